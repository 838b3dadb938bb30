"""PEFT on a model's linear layers. The experts' factors live in the bank (experts/bank.py)."""

from __future__ import annotations

from peft import LoraConfig as PeftLoraConfig
from peft import inject_adapter_in_model
from transformers import PreTrainedModel

from moetune.config import LoraConfig
from moetune.errors import UserError


def add_lora(model: PreTrainedModel, paths: tuple[str, ...], lora: LoraConfig) -> None:
    """Wraps each linear module in `paths` with PEFT's LoRA, in place. Factors are float32, as PEFT keeps them.

    Raises:
        UserError: PEFT left one of the paths as it was.
    """
    config = PeftLoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(paths), lora_dropout=0.0)
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    inject_adapter_in_model(config, model, low_cpu_mem_usage=on_meta)
    for path in paths:
        module = model.get_submodule(path)
        if not hasattr(module, "lora_A"):
            raise UserError(
                f"PEFT put no LoRA on {path!r} ({type(module).__name__}); leave it out of adapt.lora.targets"
            )
        module.lora_A.float(), module.lora_B.float()
