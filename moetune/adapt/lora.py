"""PEFT on a model's linear layers. The experts' factors live in the bank (experts/bank.py)."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import inject_adapter_in_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from moetune.config import LoraConfig
from moetune.errors import UserError
from moetune.patches.peft import cast_inputs_by


class SharedInput:
    """One float32 copy of an input for all adapters of a module that read it, as q, k and v do, kept for backward once.

    PEFT by itself makes a copy for each. This one is forgotten when the module's forward pass ends.
    """

    def __init__(self, module: nn.Module) -> None:
        self._latest: tuple[Tensor, int | None, Tensor] | None = None  # an input, its version, and its copy
        module.register_forward_hook(self._forget, always_call=True)

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x in `dtype`: x itself if it has it, else a copy, the one of the last call if that had the same x."""
        if x.dtype == dtype:
            return x
        now = None if x.is_inference() else x._version
        if self._latest is not None:
            source, version, copy = self._latest
            if source is x and version == now and copy.dtype == dtype:
                return copy
        copy = x.to(dtype)
        self._latest = x, now, copy
        return copy

    def _forget(self, *_: object) -> None:
        self._latest = None


class Dropout(nn.Module):
    """Dropout by the operator that a GPU runs, on a CPU too, so that a trace keeps its mask of one byte an element.

    torch's own keeps a float mask on a CPU.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return torch.native_dropout(x, self.p, True)[0] if self.training else x


def add_lora(model: PreTrainedModel, paths: tuple[str, ...], lora: LoraConfig) -> None:
    """Wraps each linear module in `paths` with PEFT's LoRA, in place. Factors are float32, as PEFT keeps them.

    Raises:
        UserError: PEFT left one of the paths as it was.
    """
    targets = [f"model.{path}" for path in paths]
    alpha: Any = lora.alpha  # PEFT takes floats, and is typed without
    config = PeftLoraConfig(r=lora.rank, lora_alpha=alpha, use_rslora=lora.rslora, target_modules=targets)
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    # Handed a transformers model, PEFT takes any gate_proj or w1 for an expert's and moves its factors there.
    inject_adapter_in_model(config, nn.ModuleDict({"model": model}), low_cpu_mem_usage=on_meta)
    for path in paths:
        module = model.get_submodule(path)
        if not hasattr(module, "lora_A"):
            raise UserError(
                f"PEFT put no LoRA on {path!r} ({type(module).__name__}); leave it out of adapt.lora.targets"
            )
        module.lora_A.float(), module.lora_B.float()
        if lora.dropout:
            dropouts: Any = module.lora_dropout
            dropouts["default"] = Dropout(lora.dropout)
    for parent in {path.rpartition(".")[0]: None for path in paths}:
        share = SharedInput(model.get_submodule(parent))
        for path in paths:
            if path.rpartition(".")[0] == parent:
                cast_inputs_by(model.get_submodule(path), share.cast)
