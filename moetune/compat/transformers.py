"""transformers: what is used of it without being public, or told only by reading its code."""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import build_glob_alternation
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.quantizers import HfQuantizer
from transformers.utils.loading_report import LoadStateDictInfo

Checkpoint = Callable[..., Any]
"""`(function, *args)` -> the function's output, as `torch.utils.checkpoint.checkpoint` gives it."""


def checkpoint_by(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """Make whoever switches activation checkpointing on from now use `checkpoint`: trainers do so by their own
    settings, and TRL's switches it off and on around a reference model.

    `activation_checkpointing_enable` takes arguments for torch's function, and no other function. Its `offload` copies
    on the stream that computes, and does not keep routers' choices.
    """
    switch = model._set_gradient_checkpointing

    def switch_to(enable: bool = True, gradient_checkpointing_func: Any = None, every_n_layers: int = 1) -> None:
        switch(enable=enable, gradient_checkpointing_func=checkpoint, every_n_layers=every_n_layers)

    model._set_gradient_checkpointing = switch_to  # type: ignore[method-assign]


def attention_of(model: PreTrainedModel) -> str:
    """The name of the attention function that a model's decoder runs."""
    return str(model.config.get_text_config()._attn_implementation)


def set_attention(config: Any, name: str) -> None:
    """Choose an attention function by name. transformers' own setter asks whether the model's authors support it."""
    config._attn_implementation = name


def has_flash_interface(model: PreTrainedModel) -> bool:
    """Whether a model's authors say that its attention is transformers' interface, takes flash attention's arguments,
    and needs no kernel of its own, as sinks do."""
    return bool(
        model._supports_flash_attn
        and model._supports_attention_backend
        and model._compatible_flash_implementations is None
    )


def dtypes_kept(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Name -> dtype of the parameters and buffers that transformers loads in another dtype than a model's."""
    if not (plan := model._get_dtype_plan(dtype)):
        return {}
    pattern, by_group, _ = build_glob_alternation(list(plan))
    found = ((name, pattern.search(name)) for name in model.state_dict())
    return {name: plan[by_group[str(match.lastgroup)]] for name, match in found if match is not None}


def unmatched_keys(
    model: PreTrainedModel, missing: Iterable[str], unexpected: Iterable[str]
) -> tuple[set[str], set[str]]:
    """Of the keys that a checkpoint lacks and has too many, those that a model's authors do not expect: neither tied to
    others nor left out on purpose."""
    info = LoadStateDictInfo(set(missing), set(unexpected), set(), [], {}, set())
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(info)
    return info.missing_keys, info.unexpected_keys


def reads_weight(owner: nn.Module, linear: str, *, or_its_dtype: bool = False) -> bool:
    """Whether a module's code uses the weight of its linear layer without calling the layer, as Mamba's kernels do.

    With `or_its_dtype` also whether it casts to that weight's dtype, uint8 once quantized, as DeepSeek's indexer does.
    Nothing but the code says so: it is searched.
    """
    unless = "" if or_its_dtype else r"(?!\.(dtype|device)\b)"
    kinds = tuple(kind for kind in type(owner).__mro__ if ".models." in kind.__module__)
    return re.search(rf"\bself\.{linear}\.weight\b{unless}", _source(kinds)) is not None


@functools.cache
def _source(kinds: tuple[type, ...]) -> str:
    return "".join(inspect.getsource(kind) for kind in kinds)


class LoadingQuantizer(HfQuantizer):
    """A quantizer that loads the whole model itself, after transformers has made it.

    transformers would read a layer's experts at once, in 16 bits. It is kept from reading anything: it gets a file
    without tensors, leaves the model on the meta device, and misses nothing.
    """

    def load(self, model: PreTrainedModel, folder: Path, device: torch.device) -> None:
        """Fill a model on the meta device."""
        raise NotImplementedError

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_qat_trainable(self) -> bool:
        return True

    def update_device_map(self, device_map: dict[str, Any] | None) -> dict[str, Any]:
        self._device = torch.device((device_map or {}).get("", "cpu"))
        return {"": "meta"}

    def preprocess_model(self, model: PreTrainedModel, dtype: Any = None, **given: Any) -> None:
        files: list[str] = given["checkpoint_files"]
        self._folder = Path(files[0]).parent
        self._empty = NamedTemporaryFile(suffix=".safetensors")  # noqa: SIM115 (closed when the model is loaded)
        save_file({}, self._empty.name)
        files[:] = [self._empty.name]
        self._ignored, model._keys_to_ignore_on_load_missing = model._keys_to_ignore_on_load_missing, {""}

    def postprocess_model(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        self._empty.close()
        del self._empty
        model._keys_to_ignore_on_load_missing = self._ignored
        self.load(model, self._folder, self._device)
        vars(model).update(is_quantized=True, quantization_method=self.quantization_config.quant_method)
        return super().postprocess_model(model, **kwargs)


def mark_initialized(values: nn.Module | Tensor) -> None:
    """Mark values as there already: rules of initialisation leave them alone."""
    values._is_hf_initialized = True  # type: ignore[union-attr]


def draw(model: PreTrainedModel, module: nn.Module) -> None:
    """Draw a module's tensors by the model's rules. `init_weights()` would draw the whole model."""
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


def fix_rotary_length(module: nn.Module) -> None:
    """Stop a rotary embedding from choosing frequencies by the largest position: a value, which fake tensors lack.

    Whichever are chosen, they have the same size, and a `default` embedding does not choose. Phimoe's reads its
    configuration too, which the model goes on using: this module gets a copy.
    """
    rotary: Any = module
    if getattr(rotary, "rope_type", None) not in _BY_LENGTH:
        return
    rotary.rope_type = "default"
    rotary.config = copy.copy(rotary.config)
    rotary.config.rope_parameters = {**rotary.config.rope_parameters, "rope_type": "default"}
