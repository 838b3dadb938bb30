"""What every rank of a test imports, imported once."""

import bitsandbytes  # noqa: F401
import peft  # noqa: F401
import torch.distributed.checkpoint
import torch.distributed.fsdp  # noqa: F401
import transformers  # noqa: F401
from transformers import MixtralForCausalLM  # noqa: F401

import moetune.train.run  # noqa: F401
import tests.parallel.steps  # noqa: F401
