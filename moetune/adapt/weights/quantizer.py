"""`MoetuneConfig`: quantize MoE experts when stock transformers loads a checkpoint (`quantization_config=`).

from transformers import AutoModelForCausalLM
from moetune import MoetuneConfig

AutoModelForCausalLM.from_pretrained(folder, quantization_config=MoetuneConfig(base="nf4"), device_map="cuda")
"""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from moetune.adapt.weights.published import CheckpointReader
from moetune.adapt.weights.target import LoadTarget
from moetune.compat.peft import refuse_to_merge_into_codes
from moetune.compat.transformers import LoadingQuantizer
from moetune.config.resolved import ResolvedModelConfig
from moetune.errors import UserError, note_once, raise_problems
from moetune.experts.bank import ExpertBank
from moetune.experts.context import ExpertContext
from moetune.experts.host import ExpertPrefetcher
from moetune.models.selection import NOTHING
from moetune.models.structure import read_structure
from moetune.run import validation
from moetune.run.dtypes import DTYPES
from moetune.run.linears import linears_to_quantize

METHOD = "moetune"


@register_quantization_config(METHOD)
class MoetuneConfig(QuantizationConfigMixin):
    """Settings for `from_pretrained(quantization_config=…)` that load a model quantized by moetune, for inference.

    Args:
        base: precision of the experts and linear layers, as `model.base` in a run file; a dict for several.
        double_quant: quantize the scales of `nf4` as well, as `model.double_quant`.
        experts_on: `gpu` or `host`, the memory that holds the quantized experts, as `model.experts_on`.

    Raises:
        pydantic.ValidationError: an argument has a value that the run file does not allow.
        TypeError: there is no such argument.
    """

    def __init__(
        self, base: Any = "nf4", double_quant: bool = True, experts_on: str = "gpu", quant_method: str = METHOD
    ) -> None:
        self.quant_method = quant_method  # type: ignore[assignment]
        settings = {"base": base, "double_quant": double_quant, "experts_on": experts_on, "attention": "eager"}
        self.model = ResolvedModelConfig.model_validate({"path": "unread", "dtype": "fp32", **settings})

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": METHOD, **self.model.model_dump(mode="json", include={"base", "double_quant"})}


@register_quantizer(METHOD)
class MoetuneQuantizer(LoadingQuantizer):
    """Quantizes experts and linear layers while `from_pretrained` reads a checkpoint, as a `MoetuneConfig` says.
    transformers creates it for that configuration and calls `load` in place of its own loading."""

    quantization_config: MoetuneConfig

    def load(self, model: PreTrainedModel, folder: Path, device: torch.device) -> None:
        """Read a checkpoint into a model on the meta device, quantizing its experts and linear layers.

        Raises `UserError` if the experts cannot be quantized, or the checkpoint does not fit the model.
        """
        plain, structure = copy.deepcopy(model), read_structure(model)
        dtype = next((name for name, dtype in DTYPES.items() if dtype == model.config.dtype), None)
        raise_problems([] if dtype else [f"dtype={model.config.dtype}: give bfloat16, float16 or float32"])
        config = self.quantization_config.model.model_copy(update={"dtype": dtype})
        unmatched = validation.unmatched_base(config, structure)
        raise_problems([*validation.unsupported_experts(model, structure), *unmatched])
        context = ExpertContext(prefetcher=ExpertPrefetcher(device) if config.experts_on == "host" else None)
        linears = linears_to_quantize(model, structure, NOTHING, config)
        target = LoadTarget(model, structure, NOTHING, config, linears, device, context=context)
        CheckpointReader(folder, plain, folder.name, target).read_all(model)
        for layer in structure.moe_layers:
            model.get_submodule(layer.experts).register_load_state_dict_pre_hook(_refuse_factors)
        model.register_forward_pre_hook(partial(_check_adapters, set()))
        refuse_to_merge_into_codes("save the adapter, and merge it into the checkpoint by moetune adapter merge")


def _check_adapters(checked: set[str], model: nn.Module, _: Any) -> None:
    """Say that experts stay as they are where PEFT trains; raise `UserError` where it is to train a copy of them. Adds
    the names of the adapters to `checked`, so that later passes look at new ones only."""
    adapters: Any = getattr(model, "peft_config", {})
    if not model.training or adapters.keys() <= checked:
        return
    for name, module in model.named_modules():
        if isinstance(module, ExpertBank) and ".modules_to_save." in name:
            raise UserError(
                f"modules_to_save: {name.partition('.modules_to_save.')[0]} holds experts that are quantized, of which "
                "nothing would train; choose adapt.experts of a run file and moetune.build"
            )
    note_once(
        "PEFT trains no experts here, whatever its targets: MoetuneConfig quantizes them; moetune.build adapts them"
    )
    checked |= adapters.keys()


def _refuse_factors(_: nn.Module, state: dict[str, Any], prefix: str, *_more: Any) -> None:
    """Raise `UserError` where PEFT loads factors of experts, which it does not apply to quantized ones."""
    for name in state:
        if name.startswith(prefix) and ".lora_" in name:
            raise UserError(
                f"{name}: PEFT applies no factors to experts that MoetuneConfig quantizes; merge the adapter (moetune "
                "adapter merge), or give it to moetune.build as adapt.start_from"
            )
