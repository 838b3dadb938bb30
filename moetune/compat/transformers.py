"""transformers: private attributes, loading hooks, which layers carry a state or scan, facts from its source."""

import copy
import functools
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import FunctionType, MethodType
from typing import Any, NamedTuple, cast

import torch
from jinja2 import Environment
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import build_glob_alternation
from transformers.integrations import hub_kernels
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama import modeling_llama as llama
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention, Qwen3MoeTopKRouter
from transformers.quantizers import HfQuantizer
from transformers.utils.chat_template_utils import _compile_jinja_template
from transformers.utils.loading_report import LoadStateDictInfo

Checkpoint = Callable[..., Any]
"""Function of (function, *args) that returns function(*args) with activation checkpointing, as
`torch.utils.checkpoint.checkpoint` does."""


def checkpoint_by(model: PreTrainedModel, checkpoint: Checkpoint, others: Mapping[nn.Module, Checkpoint]) -> None:
    """Make a model use `checkpoint`, or in some of its layers `others`, whenever activation checkpointing is switched
    on from now on, and none while it generates: in training mode, layers that are checkpointed drop the cache, so that
    each token would be chosen as if it were the first.

    `checkpoint(function, *args)` returns function(*args), as `torch.utils.checkpoint.checkpoint` does.

    Trainers switch it on with their own settings, and TRL's trainers switch it off and on around a reference model.
    transformers' `activation_checkpointing_enable` accepts arguments for torch's function but no other function; its
    `offload` copies on the computing stream, and does not keep the routers' choices.
    """
    switch, stock = model._set_gradient_checkpointing, cast(Any, type(model)).generate

    def switch_to(enable: bool = True, gradient_checkpointing_func: Any = None, every_n_layers: int = 1) -> None:
        switch(enable=enable, gradient_checkpointing_func=checkpoint, every_n_layers=every_n_layers)
        for layer, own in others.items():
            layer._gradient_checkpointing_func = own  # type: ignore[assignment]

    def generate(self: PreTrainedModel, *args: Any, **options: Any) -> Any:
        checkpointed: list[Any] = [part for part in self.modules() if getattr(part, "gradient_checkpointing", False)]
        for part in checkpointed:
            part.gradient_checkpointing = False
        try:
            return stock(self, *args, **options)
        finally:
            for part in checkpointed:
                part.gradient_checkpointing = True

    model._set_gradient_checkpointing = switch_to  # type: ignore[method-assign]
    model.generate = MethodType(generate, model)  # type: ignore[assignment]


def save_what_trains(model: PreTrainedModel, names: Iterable[str], model_type: str) -> None:
    """Make `save_pretrained` write the tensors `names` alone, under their own names, and `model_type` into config.json.

    transformers' Trainer reads them when it resumes; under the hub's names, the default, it would read nothing back
    (findings/transformers_resume_leaves_experts_out.sh). `from_pretrained` refuses the folder by its `model_type`.
    """
    saved, save = set(names), type(model).save_pretrained
    stored = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    model._keys_to_ignore_on_save = {name for name, _ in stored if name not in saved} & model.state_dict().keys()

    @functools.wraps(save)
    def save_pretrained(self: PreTrainedModel, save_directory: str | Path, **options: Any) -> None:
        state = options.get("state_dict") or self.state_dict()
        trained = {name: tensor for name, tensor in state.items() if name in saved}
        save(self, save_directory, **options | {"state_dict": trained, "save_original_format": False})
        if (file := Path(save_directory) / "config.json").is_file():
            file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": model_type}, indent=2))

    model.save_pretrained = MethodType(save_pretrained, model)  # type: ignore[method-assign]  # a copy's own, if copied


def keep_as_built(model: PreTrainedModel, dtype: torch.dtype, chosen: Sequence[nn.Parameter]) -> None:
    """Make `resize_token_embeddings` keep embeddings that have a row for each token, and refuse to add rows; make `to`,
    `half` and `bfloat16` refuse 16 bits, passes autocast to another dtype than `dtype`, and training passes the
    `chosen` parameters if all are frozen."""

    def resize_token_embeddings(
        self: PreTrainedModel, new_num_tokens: int | None = None, *_: Any, **options: Any
    ) -> Any:
        embeddings: Any = self.get_input_embeddings()
        if (new_num_tokens or 0) > (rows := len(embeddings.weight)):
            raise ValueError(
                f"{new_num_tokens} tokens, and the model was built with {rows}: exports would leave the new ones out; "
                "add them to the checkpoint and its tokenizer before training"
            )
        return embeddings

    def to(self: PreTrainedModel, *args: Any, **options: Any) -> Any:
        for dtype in {*args, *options.values()} & {torch.float16, torch.bfloat16}:
            raise ValueError(f"{dtype} would round the weights that train; set model.dtype in the run file")
        return type(self).to(self, *args, **options)

    def refuse_changes(self: PreTrainedModel, *_: Any) -> None:
        kind = self.device.type
        if torch.is_autocast_enabled(kind) and (cast := torch.get_autocast_dtype(kind)) != dtype:
            raise ValueError(
                f"the model computes in {dtype}, and autocast asks for {cast}; leave it off (bf16=False, fp16=False of "
                "a trainer), or set model.dtype in the run file"
            )
        if self.training and torch.is_grad_enabled() and not any(p.requires_grad for p in chosen):
            raise ValueError(
                "nothing in the model requires a gradient any more, so nothing would train; leave out what froze it, "
                "such as prepare_model_for_kbit_training"
            )

    model.resize_token_embeddings = MethodType(resize_token_embeddings, model)  # type: ignore[method-assign]
    model.to = MethodType(to, model)  # type: ignore[assignment]
    model.half = MethodType(lambda self: self.to(torch.float16), model)  # type: ignore[method-assign]
    model.bfloat16 = MethodType(lambda self: self.to(torch.bfloat16), model)  # type: ignore[method-assign]
    model.register_forward_pre_hook(refuse_changes)


def chat_template_environment() -> Environment:
    """Return a jinja environment as transformers renders chat templates in: its tags, filters and functions."""
    return _compile_jinja_template("").environment


def attention_name(model: PreTrainedModel) -> str:
    """Return the name of the attention function that a model's decoder runs, such as "sdpa"."""
    return str(model.config.get_text_config()._attn_implementation)


def ignore_unexpected(model: PreTrainedModel, patterns: set[str]) -> None:
    """Let transformers load checkpoints into a model although they hold tensors that match these regexes."""
    model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), *patterns}


def set_attention(config: Any, name: str) -> None:
    """Set the attention function of a model configuration by name.

    transformers' own setter refuses functions that the model's authors do not declare as supported.
    """
    config._attn_implementation = name


def has_flash_interface(model: PreTrainedModel) -> bool:
    """Return whether a model declares that it supports flash attention.

    True also of models that transformers lets run with particular kernels only, as it does for attention sinks.
    """
    return bool(model._supports_flash_attn)


def has_sinks(model: PreTrainedModel) -> bool:
    """Return whether attention layers of a model have sinks, and pass them to any attention function.

    A sink is a learned score for each head, in the parameter `sinks`, that takes part in the softmax without a value.
    """
    return bool(model._supports_attention_backend) and any(
        isinstance(getattr(module, "sinks", None), nn.Parameter) for module in model.modules()
    )


def supports_attention(model_class: type[PreTrainedModel], attention: str) -> bool:
    """Return whether a model class declares that it supports an attention function of transformers, by its name.

    True for all but `sdpa` and `flash_attention_2`, of which classes declare nothing. False for `flash_attention_2` if
    the class allows particular kernels only.
    """
    if attention == "flash_attention_2":  # kernels are listed where not every kernel computes the model's attention
        return bool(model_class._supports_flash_attn) and model_class._compatible_flash_implementations is None
    return bool(model_class._supports_sdpa) if attention == "sdpa" else True


# Kimi Linear, MiniMax-M2 and some more would round it as they load in 16 bits, and choose other experts
# (findings/transformers_correction_bias_rounded.sh).
PreTrainedModel._keep_in_fp32_modules_strict = ["e_score_correction_bias"]


def dtypes_kept(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the parameters and buffers that transformers loads in another dtype than `dtype`, as name -> dtype."""
    if not (plan := model._get_dtype_plan(dtype)):
        return {}
    pattern, by_group, _ = build_glob_alternation(list(plan))
    matches = ((name, pattern.search(name)) for name in model.state_dict())
    return {name: plan[by_group[str(match.lastgroup)]] for name, match in matches if match is not None}


def unmatched_keys(
    model: PreTrainedModel, missing: Iterable[str], unexpected: Iterable[str]
) -> tuple[set[str], set[str]]:
    """Return the (missing, unexpected) keys of a checkpoint that are an error.

    Missing keys are those that the model has and the checkpoint lacks, unexpected ones the reverse. Missing keys of
    tied weights, and keys that the model's class lists as ignored, are no error and left out. Ties the model's weights.
    """
    info = LoadStateDictInfo(set(missing), set(unexpected), set(), [], {}, set())
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(info)
    return info.missing_keys, info.unexpected_keys


def reads_weight(owner: nn.Module, linear: str, *, or_its_dtype: bool = False) -> bool:
    """Return whether a module's source code uses the weight of its attribute `linear` without calling that layer.

    Mamba's kernels do, for example. There is no other way to find out, so the source of the module's transformers
    classes is searched for `self.NAME.weight`. With `or_its_dtype`, `weight.dtype` and `weight.device` count too:
    DeepSeek's indexer, for example, casts to that dtype, which is uint8 once the layer is quantized.
    """
    unless = "" if or_its_dtype else r"(?!\.(dtype|device)\b)"
    return _has(_kinds(owner), rf"\bself\.{linear}\.weight\b{unless}")


def sends_back(owner: nn.Module, embedding: str) -> bool:
    """Return whether a module's source code sends what its attribute `embedding` returns to a device, so that the
    table may be on another: Qwen3.8's n-grams."""
    return _has(_kinds(owner), rf"\bself\.{embedding}\(.*\)\.to\(\w+\.device\)")


def looks_up(embedding: nn.Embedding) -> bool:
    """Return whether an embedding's forward is `nn.Embedding`'s, or its source code calls that and reads of its weight
    the dtype alone."""
    kinds = _kinds(embedding)
    return not kinds or (_has(kinds, r"super\(\)\.forward\(") and not _has(kinds, r"\bself\.weight\b(?!\.dtype)"))


CACHE = "cache" if "cache" in inspect.signature(llama.LlamaModel.forward).parameters else "past_key_values"
"""Name of the argument by which modules are given the cache of keys and values: `cache` since transformers 5.24."""
_STATE = re.compile(r"\.(get|set|update)_(conv_state|recurrent_state|linear_cache)\(")
"""Methods of transformers' caches that read and write a state which is not that of attention."""


def carries_state(module: nn.Module) -> bool:
    """Return whether a module carries a state from token to token, by which one document would reach the next.

    Its source code keeps such a state in transformers' cache while it generates, or a child of it is a convolution over
    tokens. True for Mamba, linear attention and short convolutions; False for attention.
    """
    return any(isinstance(child, nn.Conv1d) and child.kernel_size != (1,) for child in module.children()) or bool(
        _STATE.search(_source(_kinds(module)))
    )


@contextmanager
def without_packages(model: nn.Module) -> Iterator[None]:
    """Let a model's code run transformers' own operations instead of other packages' kernels within the `with` block.

    The packages are flash-linear-attention, causal-conv1d and mamba-ssm. Their kernels need a GPU's memory, which
    tensors on the meta device and fake tensors do not have.
    """
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    spaces = [vars(sys.modules[name]) for name in {kind.__module__ for kind in kinds}]
    replaced = [(space, name, value) for space in spaces for name, value in space.items() if _is_of_package(value)]
    try:
        for space, name, value in replaced:
            space[name] = value.__wrapped__
        yield
    finally:
        for space, name, value in replaced:
            space[name] = value


_SCANS = ("chunk_gated_delta_rule", "chunk_kda", "mamba_chunk_scan_combined", "selective_scan_fn")
"""Names of the packages' functions that scan a sequence in chunks."""
_CONVOLUTION = "causal_conv1d_fn"
"""Name of the package's function that convolves along a sequence."""


@dataclass(frozen=True)
class Operation:
    """A function that a model's code calls on sequences, and in whose place a package's kernel may run.

    Attributes:
        space: the module of the model's code, as name -> value.
        name: the function's name there.
        function: transformers' wrapper, which calls a package's kernel or its own code in torch.
    """

    space: dict[str, Any]
    name: str
    function: Callable[..., Any]

    def is_in_torch(self) -> bool:
        """Return whether transformers' own code would run now, and has not been replaced."""
        now = self.space[self.name]
        return now is self.function.__wrapped__ or (now is self.function and not self.is_kernel())  # type: ignore[attr-defined]

    def is_kernel(self) -> bool:
        """Return whether a package's kernel would run now."""
        return bool(self.space[self.name] is self.function and self._of_wrapper("is_new_implementation"))

    def takes_documents(self) -> bool:
        """Return whether a package's kernel would run now that takes the offsets of documents, `cu_seqlens`."""
        return self.is_kernel() and "cu_seqlens" in self._of_wrapper("applicable_params")

    @contextmanager
    def changed(self, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
        """Let the model's code call `change(function)` instead of the function that it calls now, within the `with`."""
        before = self.space[self.name]
        self.space[self.name] = change(before)
        try:
            yield
        finally:
            self.space[self.name] = before

    def leave_out(self) -> None:
        """Let the model's code call transformers' own code, whatever is installed."""
        self.space[self.name] = self.function.__wrapped__  # type: ignore[attr-defined]

    @property
    def package(self) -> str:
        """Name under which the kernel's package is installed."""
        name: str = self._of_wrapper("package")
        return hub_kernels._PACKAGE_TO_DISTRIBUTION.get(name, name)

    @property
    def kernel(self) -> str:
        """The kernel's name in its package."""
        return str(self._of_wrapper("func_name"))

    def _of_wrapper(self, name: str) -> Any:
        return _variables_of(self.function)[name]


@functools.cache
def _variables_of(wrapper: Callable[..., Any]) -> Mapping[str, Any]:
    """Return name -> value of what transformers' wrapper of a function has from where it was made."""
    return inspect.getclosurevars(wrapper).nonlocals


def scans_of(module: nn.Module) -> tuple[Operation, ...]:
    """Return the scans that the code of a module calls."""
    return _operations(_kinds(module), _SCANS)


def is_hyper_connection(module: nn.Module) -> bool:
    """Return whether a module weighs and mixes the streams of a residual around a sublayer (arXiv 2512.24880), by
    parameters of its own alone."""
    of_children = (parameter for child in module.children() for parameter in child.parameters())
    return type(module).__name__.endswith("HyperConnection") and next(of_children, None) is None


def convolutions_of(module: nn.Module) -> tuple[Operation, ...]:
    """Return the convolutions along a sequence, [B, channels, S], that the code of a module calls."""
    return _operations(_kinds(module), (_CONVOLUTION,))


@functools.cache
def _operations(kinds: tuple[type, ...], names: tuple[str, ...]) -> tuple[Operation, ...]:
    spaces = {kind.__module__: vars(sys.modules[kind.__module__]) for kind in kinds}
    return tuple(
        Operation(space, name, value)
        for space in spaces.values()
        for name, value in space.items()
        if _is_of_package(value) and _variables_of(value).get("func_name") in names and _has(kinds, rf"\b{name}\(")
    )


def _is_of_package(value: object) -> bool:
    """Return whether a value is transformers' wrapper that runs a package's kernel in place of `value.__wrapped__`."""
    return isinstance(value, FunctionType) and value.__globals__ is vars(hub_kernels) and hasattr(value, "__wrapped__")


def _kinds(module: nn.Module) -> tuple[type, ...]:
    """Return those of a module's classes, base classes included, that are in transformers' model files."""
    return tuple(kind for kind in type(module).__mro__ if ".models." in kind.__module__)


@functools.cache
def _has(kinds: tuple[type, ...], pattern: str) -> bool:
    """Return whether the source code of the classes has a match of a regular expression."""
    return re.search(pattern, _source(kinds)) is not None


@functools.cache
def _source(kinds: tuple[type, ...]) -> str:
    """Return the joined source code of the classes."""
    return "".join(inspect.getsource(kind) for kind in kinds)


class LoadingQuantizer(HfQuantizer):
    """Base class of a transformers quantizer that loads the whole model itself, in `load`.

    transformers itself would read all experts of a layer at once in 16 bits. Here it reads nothing: it gets a file
    without tensors, leaves the model on the meta device and reports no missing tensors.
    """

    def load(self, model: PreTrainedModel, folder: Path, device: torch.device) -> None:
        """Load the checkpoint in `folder` to `device`, into a model on the meta device; for subclasses to define."""
        raise NotImplementedError

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_qat_trainable(self) -> bool:
        return True

    def update_device_map(self, device_map: dict[str, Any] | str | None) -> dict[str, Any]:
        if isinstance(device_map, str):  # "auto" and others that divide a model
            device_map = {"": "cuda" if torch.cuda.is_available() else "cpu"}
        device, *more = {*device_map.values()} if device_map else {"cpu"}
        if more:
            raise ValueError(f"device_map has {1 + len(more)} devices, and one holds the whole model: name that alone")
        self._device = torch.device(device)
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
    """Mark a module or tensor as initialized, so that transformers' initialization leaves it as it is."""
    values._is_hf_initialized = True  # type: ignore[union-attr]


def draw(model: PreTrainedModel, module: nn.Module) -> None:
    """Initialize the tensors of one module at random, by its model's rules; `init_weights()` would do all modules."""
    model._init_weights(module)


def activation_of(experts: nn.Module, *, has_gate: bool) -> Callable[[Tensor], Tensor]:
    """Return the function by which a transformers experts module turns gate_up [N, O] into the input of down [N, I].

    O is 2I if the experts have a gate projection, else I.
    """
    return getattr(experts, "_apply_gate" if has_gate else "act_fn")


def _code_of(function: Any) -> tuple[Any, ...] | None:
    """Return the bytecode, constants and names of a function, without its docstring, to compare it with others.

    None for what is no function. Of a decorated function it is that of the function within: transformers' decorators
    rename arguments, count or record, and all functions that one of them wraps would be the same.
    """
    if not isinstance(function, FunctionType):
        return None
    code = inspect.unwrap(function).__code__
    return code.co_code, tuple(value for value in code.co_consts if value != function.__doc__), code.co_names


_code_of_routers = functools.cache(_code_of)  # which are asked in each forward pass
_RMS_NORMS = tuple(_code_of(norm.forward) for norm in (llama.LlamaRMSNorm, GptOssRMSNorm))
_ROTARY = {name: _code_of(getattr(llama, name)) for name in ("apply_rotary_pos_emb", "rotate_half")}
_ROUTERS = tuple(_code_of(router.forward) for router in (MixtralTopKRouter, Qwen3MoeTopKRouter))
_NORMS_HEADS = _code_of(Qwen3MoeAttention.forward)


def is_rms_norm(module: nn.Module) -> bool:
    """Return whether a module's forward has the same code as the RMS norm of Llama or of gpt-oss.

    Each model file in transformers has its own class, so code is compared instead of types. A norm that adds 1 to its
    weight, for example, has other code.
    """
    return _code_of(type(module).forward) in _RMS_NORMS


def calls_rotary(attention: nn.Module) -> bool:
    """Return whether a module's forward calls `apply_rotary_pos_emb`, and this has the code of Llama's.

    Each model file in transformers has its own functions, which its modules find among the globals of the file. Code is
    compared, so the result is False for a function that, for example, rotates other pairs.
    """
    forward: Any = inspect.unwrap(type(attention).forward)
    if not isinstance(forward, FunctionType) or "apply_rotary_pos_emb" not in forward.__code__.co_names:
        return False
    return all(_code_of(forward.__globals__.get(name)) == code for name, code in _ROTARY.items())


def forward_with_rotary(attention: nn.Module, rotate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run an attention module's forward pass with `rotate` instead of `apply_rotary_pos_emb`.

    `calls_rotary` must hold for the module. `rotate` is called as rotate(apply_rotary_pos_emb, q, k, cos, sin), and
    with whatever else the module passes, and returns (rotated q, rotated k).
    """
    copied = rotate.__dict__.get("copied")
    if copied is None or copied.__globals__["apply_rotary_pos_emb"].func is not rotate:  # `rotate` may be a copy itself
        forward: Any = inspect.unwrap(type(attention).forward)
        replaced = {"apply_rotary_pos_emb": functools.partial(rotate, forward.__globals__["apply_rotary_pos_emb"])}
        copied = FunctionType(
            forward.__code__,
            forward.__globals__ | replaced,
            forward.__name__,
            forward.__defaults__,
            forward.__closure__,
        )
        copied.__kwdefaults__ = forward.__kwdefaults__
        rotate.__dict__["copied"] = copied
    return copied(attention, *args, **kwargs)


class SoftmaxRouter(NamedTuple):
    """Settings of a router that chooses the `top_k` experts with the largest softmax probabilities of its logits.

    `normalized`: the weights are divided by their sum. `keeps_float32`: they stay float32, else have the logits' dtype.
    """

    top_k: int
    normalized: bool
    keeps_float32: bool


def softmax_router(router: nn.Module) -> SoftmaxRouter | None:
    """Return how a module routes if its forward has the code of Mixtral's or Qwen3-MoE's router; else None.

    Both reshape the hidden states to [T, hidden_dim], multiply them by `weight` [E, hidden_dim], and return the logits,
    the weights and the ids.
    """
    module: Any = router
    code = _code_of_routers(type(module).forward)
    if code not in _ROUTERS:
        return None
    is_mixtrals = code == _ROUTERS[0]
    return SoftmaxRouter(module.top_k, is_mixtrals or module.norm_topk_prob, is_mixtrals)


def norms_heads(attention: nn.Module) -> bool:
    """Return whether a module's forward has the code of Qwen3-MoE's attention.

    It passes the results of `q_norm` and `k_norm`, RMS norms of each head, to `apply_rotary_pos_emb` and nothing else.
    """
    return _code_of(type(attention).forward) == _NORMS_HEADS


_BY_LENGTH = ("dynamic", "longrope")  # types whose frequencies depend on the largest position


def fix_rotary_length(module: nn.Module) -> None:
    """Stop a rotary embedding from choosing its frequencies by the largest position, a value that fake tensors lack.

    Does nothing unless its type is "dynamic" or "longrope". The type becomes "default", which does not choose; the
    tensors have the same shapes. Phimoe's embedding also reads its configuration, so the module gets a changed copy of
    it.
    """
    rotary: Any = module
    if getattr(rotary, "rope_type", None) not in _BY_LENGTH:
        return
    rotary.rope_type = "default"
    rotary.config = copy.copy(rotary.config)
    rotary.config.rope_parameters = {**rotary.config.rope_parameters, "rope_type": "default"}
