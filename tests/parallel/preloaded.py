"""What every rank of a test imports, imported once."""

import bitsandbytes  # noqa: F401
import peft  # noqa: F401
import torch.distributed.checkpoint
import torch.distributed.fsdp
import transformers  # noqa: F401
from transformers import MixtralForCausalLM  # noqa: F401

import moetune.parallel.deepspeed
import moetune.train.run
import tests.parallel.steps  # noqa: F401

if moetune.parallel.deepspeed.is_installed():
    moetune.parallel.deepspeed.keep_quiet(torch.device("cpu"))
    import deepspeed  # noqa: F401
