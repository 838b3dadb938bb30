"""Precisions by their names in a run file, kinds of devices, and `dtype: auto`."""

from __future__ import annotations

from typing import Literal

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

DeviceType = Literal["cuda", "cpu"]


def dtype_on(device_type: DeviceType) -> Literal["bf16", "fp32"]:
    """Return `model.dtype: auto`: bfloat16 on a GPU, float32 on a CPU."""
    return "fp32" if device_type == "cpu" else "bf16"


def this_device() -> DeviceType:
    """Return what this machine trains on: CUDA if there is any, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def kind_of(device: torch.device | str | None) -> DeviceType:
    """Return what to resolve a run for that takes place on a device; for None, on this machine."""
    if device is None:
        return this_device()
    return "cpu" if torch.device(device).type == "cpu" else "cuda"
