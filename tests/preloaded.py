"""Imports of the server from which the processes of tests are forked (processes.py), frozen for garbage collection."""

import gc
from importlib.util import find_spec

import bitsandbytes.optim  # noqa: F401
import lomo_optim  # noqa: F401
import peft  # noqa: F401
import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
from transformers import MixtralForCausalLM  # noqa: F401

import moetune.training.run  # noqa: F401
import tests.parallel.steps
import tests.training.test_resume  # noqa: F401
from moetune.compat.deepspeed import keep_quiet

if find_spec("deepspeed") is not None:
    keep_quiet(torch.device("cpu"))
    import deepspeed  # noqa: F401

gc.collect()
gc.freeze()
