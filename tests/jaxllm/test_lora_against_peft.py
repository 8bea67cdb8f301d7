"""Adapters against PEFT, live: folders in both directions, and how training goes."""

from typing import Any

import numpy as np
import optax
import pytest
from flax import nnx
from tiny_checkpoints import read_golden, write_checkpoint
from tiny_models import logits

import jaxllm
from jaxllm import lora, train

pytestmark = [
    pytest.mark.reference,
    # PEFT 0.21 asks transformers 5 for names that it will drop
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]
FAMILIES = ("llama_biases", "phi3", "gemma2", "smollm2")  # biases; fused; soft caps; tied
KINDS = pytest.mark.parametrize("kind", lora.KINDS)
# Logits are of order 1; float32 through two layers (test_families.TOLERANCE), and a share for the
# adapters' own sums
TOLERANCE = 1e-4


@pytest.fixture
def peft(transformers) -> Any:
    del transformers
    return pytest.importorskip("peft")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp(request.param), read_golden(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("llama"), read_golden("llama"))


def original(folder) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype="float32"
    ).eval()


def their_logits(model, text) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(text.astype(np.int64)), use_cache=False).logits.numpy()


def text_for(model, *shape: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(model.config.vocab_size, size=shape).astype(np.int32)


def assert_same(ours, theirs, base) -> None:
    """And far from what the base alone says."""
    assert np.max(np.abs(ours - theirs)) < TOLERANCE
    assert np.max(np.abs(base - theirs)) > 100 * TOLERANCE


@KINDS
def test_we_read_what_peft_writes(peft, folder, kind, tmp_path):
    import torch

    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules="all-linear",
        use_rslora=kind == "rslora",
        use_dora=kind == "dora",
        rank_pattern={r"layers.1.mlp.down_proj": 2},
        alpha_pattern={"o_proj": 9},
        task_type="CAUSAL_LM",
    )
    theirs = peft.get_peft_model(original(folder), config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2)
            if "magnitude" in name:
                parameter.mul_(1 + 0.2 * torch.rand_like(parameter))
    theirs.save_pretrained(tmp_path)
    model, _ = jaxllm.load(folder, "float32")
    text = text_for(model, 2, 13)
    base = logits(model, text)
    lora.load_peft(model, tmp_path)
    wanted = their_logits(theirs.eval(), text)
    assert_same(logits(model, text), wanted, base)
    lora.merge(model)
    assert_same(logits(model, text), wanted, base)


def test_an_adapter_of_the_head(peft, llama, tmp_path):
    """PEFT saves the head's own weights beside it, where nobody says that it should not."""
    config = peft.LoraConfig(r=2, target_modules=["lm_head"], task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(original(llama), config)
    model, _ = jaxllm.load(llama, "float32")
    theirs.save_pretrained(tmp_path / "auto")
    with pytest.raises(NotImplementedError, match="save it anew with save_embedding_layers=False"):
        lora.load_peft(model, tmp_path / "auto")
    theirs.save_pretrained(tmp_path / "alone", save_embedding_layers=False)
    lora.load_peft(model, tmp_path / "alone")
    assert lora.adapters(model).keys() == {"lm_head.lora_a", "lm_head.lora_b"}


@KINDS
def test_peft_reads_what_we_write(peft, folder, kind, tmp_path):
    model, _ = jaxllm.load(folder, "float32")
    text = text_for(model, 2, 13)
    base = logits(model, text)
    lora.add_adapters(model, kind=kind, rank=3, targets=r"self_attn\..*", rngs=nnx.Rngs(0))
    lora.add_adapters(model, kind=kind, rank=5, alpha=2, targets=r"mlp\..*", rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    lora.set_adapters(
        model,
        {
            name: x * (1 + 0.2 * rng.random(x.shape)) + 0.1 * rng.standard_normal(x.shape)
            for name, x in lora.adapters(model).items()
        },
    )
    lora.save_peft(model, tmp_path)
    theirs = peft.PeftModel.from_pretrained(original(folder), tmp_path).eval()
    assert_same(logits(model, text), their_logits(theirs, text), base)


@pytest.mark.slow
@KINDS
def test_training_goes_as_in_peft(peft, llama, kind, tmp_path):
    """50 steps of AdamW from the same factors, on the same batches: the losses agree to 1e-4."""
    import torch

    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj", "up_proj"],
        use_rslora=kind == "rslora",
        use_dora=kind == "dora",
        task_type="CAUSAL_LM",
    )
    theirs = peft.get_peft_model(original(llama), config)
    theirs.save_pretrained(tmp_path)
    model, _ = jaxllm.load(llama, "float32")
    batches = [text_for(model, 4, 13, seed=seed) for seed in range(5)]
    rate, decay = 1e-3, 0.1

    lora.load_peft(model, tmp_path)
    optimizer = optax.adamw(rate, weight_decay=decay)
    state = train.init_state(model, optimizer, trainable=lora.is_adapter)
    step = train.make_train_step(model, optimizer)
    ours = []
    for i in range(50):
        text = batches[i % 5]
        state, metrics = step(state, {"tokens": text[:, :-1], "targets": text[:, 1:]})
        ours.append(float(metrics["loss"]))

    trained = [parameter for parameter in theirs.parameters() if parameter.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=rate, weight_decay=decay)
    curve = []
    for i in range(50):
        text = torch.from_numpy(batches[i % 5].astype(np.int64))
        found = theirs(text[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(found.flatten(0, 1), text[:, 1:].flatten())
        adamw.zero_grad()
        loss.backward()
        adamw.step()
        curve.append(loss.item())

    print(f"{kind}: {curve[0]:.4f} to {curve[-1]:.4f}, {np.max(np.abs(np.subtract(ours, curve)))}")
    np.testing.assert_allclose(ours, curve, atol=1e-4, rtol=0)
    assert curve[-5] < curve[0] - 0.1  # the same batch again
