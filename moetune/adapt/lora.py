"""LoRA on linear layers and routers, by PEFT; on experts: experts/bank.py."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import inject_adapter_in_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from moetune.adapt.layers.low_rank import adapted
from moetune.compat.peft import add_to_the_weight, compute_in_the_inputs_dtype
from moetune.config.schema import LoraConfig
from moetune.errors import UserError
from moetune.run.dtypes import DTYPES


class Dropout(nn.Dropout):
    """Dropout that keeps a mask of one byte per element on every device, so that a trace on a CPU shows a GPU's memory.
    torch's own keeps a mask of floats on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.native_dropout(x, self.p, True)[0] if self.training else x


def add_lora(
    model: PreTrainedModel, ranks: Mapping[str, int], lora: LoraConfig, linears: Collection[str], *, on_meta: bool
) -> None:
    """Wrap modules with PEFT's LoRA, in place; raise `UserError` if PEFT did not wrap one of them.

    The factors A and B are parameters in `lora.dtype`, cast to the dtype of the layer's input to multiply. PEFT freezes
    all other parameters of the model.

    Args:
        ranks: path of a linear module or router -> rank of its factors.
        lora: alpha, scaling and dropout, which is of linear modules.
        linears: paths of the model's linear modules. Of any other module, LoRA is added to the parameter `weight`.
        on_meta: whether the factors stay without values, as the whole model.
    """
    alpha: Any = lora.alpha  # PEFT accepts a float, but its annotation is int
    # In a ModuleDict: for a transformers model PEFT would treat any gate_proj or w1 as a part of experts.
    for rank in dict.fromkeys(ranks.values()):
        chosen = [path for path in ranks if ranks[path] == rank]
        config = PeftLoraConfig(
            r=rank,
            lora_alpha=alpha,
            use_rslora=lora.rslora,
            target_modules=[f"model.{path}" for path in chosen if path in linears],
            target_parameters=[f"model.{path}.weight" for path in chosen if path not in linears],
        )
        inject_adapter_in_model(config, nn.ModuleDict({"model": model}), low_cpu_mem_usage=on_meta)
    for path in ranks:
        module = model.get_submodule(path)
        if not hasattr(module, "lora_A"):
            raise UserError(
                f"PEFT put no LoRA on {path!r} ({type(module).__name__}); leave it out of adapt.lora.targets"
            )
        module.lora_A.to(DTYPES[lora.dtype]), module.lora_B.to(DTYPES[lora.dtype])
        if path not in linears:
            add_to_the_weight(module)
            continue
        if lora.dropout:
            dropouts: Any = module.lora_dropout
            dropouts["default"] = Dropout(lora.dropout)
        compute_in_the_inputs_dtype(module, adapted)
