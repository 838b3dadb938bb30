"""Precisions by the names that a run file has for them, and what `dtype: auto` is."""

from __future__ import annotations

from typing import Literal

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

DeviceType = Literal["cuda", "cpu"]


def dtype_on(device_type: DeviceType) -> Literal["bf16", "fp32"]:
    """What `model.dtype: auto` is: bfloat16 on a GPU, float32 on a CPU."""
    return "fp32" if device_type == "cpu" else "bf16"


def this_device() -> DeviceType:
    """What this machine trains on: CUDA if there is any, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"
