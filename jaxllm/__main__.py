"""`python -m jaxllm`: the command line without its script."""

import sys

from jaxllm.cli import main

sys.exit(main())
