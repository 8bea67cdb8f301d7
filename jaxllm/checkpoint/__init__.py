"""Files on disk to a model, and back."""

from jaxllm.checkpoint.hf import load as load
from jaxllm.checkpoint.hf import save as save
