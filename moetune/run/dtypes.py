"""Dtypes in a run file (`bf16`, `fp16`, `fp32`), kinds of devices, `model.dtype: auto`."""

from typing import Literal

import torch

from moetune.errors import UserError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Name in a run file -> torch dtype."""

DeviceType = Literal["cuda", "cpu"]


def dtype_on(device_type: DeviceType) -> Literal["bf16", "fp32"]:
    """Return the dtype that `model.dtype: auto` stands for: `bf16` on a GPU, `fp32` on a CPU."""
    return "fp32" if device_type == "cpu" else "bf16"


def this_device() -> DeviceType:
    """Return the kind of device that this machine trains on: `cuda` if torch sees a GPU, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_kind(device: torch.device | str | None) -> DeviceType:
    """Return the kind of a device: `cpu`, or `cuda` for that and `meta`; `UserError` for others. None is the device
    that this machine trains on."""
    if device is None:
        return this_device()
    if (kind := torch.device(device).type) not in ("cpu", "cuda", "meta"):
        raise UserError(f"device {kind}: moetune computes on cuda or cpu")
    return "cpu" if kind == "cpu" else "cuda"
