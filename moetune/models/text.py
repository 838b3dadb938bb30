"""The text stack of a checkpoint with vision or audio towers: class, what is dropped.

Such a model is built whole, and then everything but its decoder, embedding and LM head is dropped. So parameters have
the names of the whole model, exports fit it, and the text passes through the whole model's own forward pass.
"""

import re
from typing import Any

from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)

from moetune.compat.transformers import ignore_unexpected
from moetune.models.components import MODALITY


def auto_class(config: PretrainedConfig) -> Any:
    """Return transformers' Auto class that builds the model of a configuration; None if it does not continue text.

    If transformers has a whole model with a text section in its configuration, it is that one, even where
    `AutoModelForCausalLM` would take the text out of it: exports have to fit the whole model.
    """
    whole: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    if (
        whole is not None
        and ("text_config" in config.sub_configs or not config.sub_configs)
        and whole.main_input_name == "input_ids"
        and issubclass(whole, GenerationMixin)
        and not config.is_encoder_decoder
    ):
        return AutoModelForImageTextToText
    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else None


class Dropped(nn.Module):
    """Empty module in the place of one that was dropped, which had `numel` parameters."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel = numel


def drop_towers(model: PreTrainedModel) -> None:
    """Replace the modules that text never reaches by `Dropped`, in place, and ignore their tensors in a checkpoint.

    These are all modules with parameters beside the decoder, the embedding and the LM head; and those in the decoder
    that are named for images or audio (ERNIE-4.5-VL's `vision_moe`). Without such modules the model stays as it is.
    """
    decoder = model.get_decoder()
    text = (decoder, model.get_input_embeddings(), model.get_output_embeddings())
    kept = {id(module) for part in text if part is not None for module in part.modules()}
    around = {id(parent) for parent in model.modules() if not kept.isdisjoint(map(id, parent.modules()))} - kept
    modules = dict(model.named_modules())
    for path, module in modules.items():
        parent, _, name = path.rpartition(".")
        owner = id(modules[parent])
        is_tower = owner in around and id(module) not in around | kept
        if path and (is_tower or (owner in kept and MODALITY.search(name))):
            numel = sum(parameter.numel() for parameter in module.parameters())
            if numel:
                model.set_submodule(path, Dropped(numel))
    ignore_unexpected(model, {rf"^{re.escape(path)}\." for path in dropped(model)})


def dropped(model: PreTrainedModel) -> dict[str, int]:
    """Return path of each module that was dropped -> its number of parameters."""
    return {path: module.numel for path, module in model.named_modules() if isinstance(module, Dropped)}
