"""PEFT on a model's linear layers. The experts' factors live in the bank (experts/bank.py)."""

from __future__ import annotations

from peft import LoraConfig as PeftLoraConfig
from peft import inject_adapter_in_model
from torch import nn
from transformers import PreTrainedModel

from moetune.adapt.pack import read_directly
from moetune.config import LoraConfig
from moetune.errors import UserError


def add_lora(model: PreTrainedModel, paths: tuple[str, ...], lora: LoraConfig) -> None:
    """Wraps each linear module in `paths` with PEFT's LoRA, in place. Factors are float32, as PEFT keeps them.

    Raises:
        UserError: factors on one of the paths would have no effect, or PEFT left it as it was.
    """
    inert = [path for path in paths if read_directly(model, path)]
    if inert:
        raise UserError(
            f"adapt.lora: the model reads the weight of {', '.join(inert)} without calling the layer, so LoRA there "
            "would have no effect; name the other layers in adapt.lora.targets"
        )
    targets = [f"model.{path}" for path in paths]
    config = PeftLoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, lora_dropout=0.0)
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
