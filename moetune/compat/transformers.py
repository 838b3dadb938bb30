"""transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm


def checkpoint_layers_by(model: PreTrainedModel, checkpoint: Callable[..., Any]) -> None:
    """Lets layers, whose checkpointing is enabled, call `checkpoint(function, *args)`.

    `activation_checkpointing_enable` takes arguments for torch's function, and no other function. Its `offload` copies
    on the stream that computes, and does not keep routers' choices.
    """
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            # as the class says that it is to be assigned
            module._gradient_checkpointing_func = checkpoint  # type: ignore[assignment]


def mark_initialized(values: nn.Module | Tensor) -> None:
    """Says that these have their values: rules of initialisation leave them alone."""
    values._is_hf_initialized = True  # type: ignore[union-attr]


def draw(model: PreTrainedModel, module: nn.Module) -> None:
    """Draws a module's tensors by the model's rules. `init_weights()` would draw the whole model."""
    model._init_weights(module)


def activation_of(experts: nn.Module, *, has_gate: bool) -> Callable[[Tensor], Tensor]:
    """gate_up rows [N, O] -> act rows [N, I], as the experts of a model compute them."""
    return getattr(experts, "_apply_gate" if has_gate else "act_fn")


def _code_of(function: Callable[..., Any]) -> tuple[Any, ...]:
    code = function.__code__
    return code.co_code, code.co_consts, code.co_names


_RMS_NORMS = tuple(_code_of(norm.forward) for norm in (LlamaRMSNorm, GptOssRMSNorm))


def is_rms_norm(module: nn.Module) -> bool:
    """Whether a module computes what Llama's RMS norm does, or gpt-oss's. Each model file has a class of its own with
    the same code, so the code is compared: a norm that adds one to its weight, say, is another."""
    forward = type(module).forward
    return hasattr(forward, "__code__") and _code_of(forward) in _RMS_NORMS


_BY_LENGTH = ("dynamic", "longrope")


def never_ask_for_the_length(module: nn.Module) -> None:
    """Stops a rotary embedding from choosing frequencies by the largest position: a value, which fake tensors lack.

    Whichever are chosen, they have the same size, and a `default` embedding does not choose. Phimoe's reads its
    configuration too, which the model goes on using: this module gets a copy.
    """
    rotary: Any = module
    if getattr(rotary, "rope_type", None) not in _BY_LENGTH:
        return
    rotary.rope_type = "default"
    rotary.config = copy.copy(rotary.config)
    rotary.config.rope_parameters = {**rotary.config.rope_parameters, "rope_type": "default"}
