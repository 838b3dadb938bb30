"""What the closed form knows of a model: read once off its modules on the meta device, then plain numbers."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PreTrainedModel

from moetune.adapt.pack import linears_to_pack
from moetune.anatomy.anatomy import Anatomy, Component, ExpertShape, MoeLayer, meta_model, read_anatomy
from moetune.anatomy.selection import Selection
from moetune.anatomy.source import resolve
from moetune.errors import UserError

FAMILIES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
    "mixtral": "mixtral",
    "qwen2_moe": "qwen",
    "qwen3_moe": "qwen",
    "olmoe": "qwen",
    "granitemoe": "granite",
    "phimoe": "phimoe",
    "gpt_oss": "gpt_oss",
    "deepseek_v2": "deepseek_v2",
    "deepseek_v3": "deepseek_v3",
    "glm4_moe": "deepseek_v3",
}
"""Model type -> whose router it has. A type that is not here has no closed form; a trace needs none."""


class NoClosedForm(UserError):
    """The model's layers are not among those that are written down; a trace needs no such thing."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a layer, by the end of its name. `width` is None if it follows the compute dtype."""

    name: str
    component: Component
    shape: tuple[int, ...]
    width: int | None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Linear:
    """One linear layer [out, into]. `packable`: frozen, it is stored in base precision."""

    out: int
    into: int
    bias: bool
    packable: bool


@dataclass(frozen=True)
class Attention:
    """Sizes of one attention block.

    Attributes:
        heads, kv_heads: of queries, and of keys and values.
        head: size of a query's and a key's head; `value_head` that of a value's.
        rotary: how many of a head's numbers are rotated.
        rotation: how: `half`, `interleaved`, `complex` or `split`.
        norm: what the norms of queries and keys run over: `head`, `all` or None.
        latent: rank of the compressed keys and values (multi-head latent attention), 0 without.
        query_latent: rank of the compressed queries, 0 without.
        window: whether it sees a window only.
        sinks: whether a learned logit takes part in every softmax.
        clipped: whether queries, keys and values are clamped in place.
    """

    heads: int
    kv_heads: int
    head: int
    value_head: int
    rotary: int
    rotation: str
    norm: str | None
    latent: int
    query_latent: int
    window: bool
    sinks: bool


@dataclass(frozen=True)
class Experts:
    """Routed experts of a layer: their shape, their router, and what stands beside them.

    Attributes:
        activation: `silu` or `clamped` (gpt-oss).
        shared: path of the shared experts in the layer, or None.
        gated: whether a sigmoid gate weighs the shared experts' output.
        choices: indices that the router's choices leave for a token; groups of experts are chosen too.
        normalized: whether a token's routing weights are divided by their sum.
        noises: how often training multiplies the block's input by noise.
    """

    path: str
    router: str
    shape: ExpertShape
    top_k: int
    shared: str | None
    gated: bool
    choices: int
    normalized: bool
    noises: int
    activation: str


@dataclass(frozen=True)
class LayerFacts:
    """A decoder layer; layers that do not differ share one."""

    parameters: tuple[Parameter, ...]
    linears: Mapping[str, Linear]
    buffers: int
    norms: tuple[str, str]
    norm: str
    attention_path: str
    attention: Attention
    mlp: str
    experts: Experts | None


@dataclass(frozen=True)
class Facts:
    """A model. `layers` has one entry a decoder layer; `outside` the parameters before and after them.

    Attributes:
        family: whose router and quirks.
        head: name of the output table's weight; that of the embedding if they are one (`tied`).
        windows: kinds of attention masks.
        head_scaled, embedding_scaled: whether logits, or embeddings, are multiplied by a number (granite).
        buffers: bytes outside of layers.
        position_width: bytes of one token's cosines and sines, per byte of the compute dtype; `complex` ones are fixed.
    """

    name: str
    anatomy: Anatomy
    family: str
    prefix: str
    layers: tuple[LayerFacts, ...]
    outside: tuple[Parameter, ...]
    embedding: str
    head: str
    head_bias: bool
    final_norm: str
    norm: str
    tied: bool
    vocabulary: int
    hidden: int
    masks: int
    scaled: bool
    residual_scaled: bool
    buffers: int
    rotary: int
    rotation: str

    @property
    def moe_layers(self) -> dict[int, MoeLayer]:
        return {layer.index: layer for layer in self.anatomy.moe_layers}


@functools.lru_cache(maxsize=256)
def split_heads(layer: LayerFacts, tp: int) -> LayerFacts:
    """What each of `tp` ranks has of a layer: its share of the heads, and with them of attention's linear layers, rows
    of those that make heads and columns of the one that reads them (parallel/tensor.py)."""
    path = layer.attention_path
    linears, shapes = dict(layer.linears), dict[str, tuple[int, ...]]()
    for name, linear in layer.linears.items():
        if not name.startswith(f"{path}."):
            continue
        if name == f"{path}.o_proj":
            part = replace(linear, into=linear.into // tp)
        else:
            part = replace(linear, out=linear.out // tp)
            shapes[f"{name}.bias"] = (part.out,)
        linears[name], shapes[f"{name}.weight"] = part, (part.out, part.into)
    return replace(
        layer,
        parameters=tuple(replace(p, shape=shapes.get(p.name, p.shape)) for p in layer.parameters),
        linears=_Frozen(linears),
        attention=replace(layer.attention, heads=layer.attention.heads // tp, kv_heads=layer.attention.kv_heads // tp),
    )


@functools.lru_cache(maxsize=64)
def read_facts(path: str) -> Facts:
    """Reads a model by catalog name, folder or hub id, as `model.path` gives it. Takes up to seconds, once.

    Raises:
        UserError: no such model.
        NoClosedForm: its activations are not written down.
    """
    source = resolve(path)
    config = copy.deepcopy(source.config)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    config.dtype = torch.bfloat16  # what stays wider than this is wider in every run
    model = meta_model(config)
    family = FAMILIES.get(model.config.model_type)
    if family is None:
        raise NoClosedForm(
            f"model type {model.config.model_type!r} has no closed form: its layers are not among those written down "
            f"({', '.join(sorted(FAMILIES))}); use --method trace"
        )
    return _read(source.name, model, family)


def _read(name: str, model: PreTrainedModel, family: str) -> Facts:
    anatomy = read_anatomy(model)
    nothing = Selection(frozenset(), {}, {}, (), None)
    packable = set(linears_to_pack(model, anatomy, nothing))
    modules = dict(model.named_modules())
    stack = next(path for path, module in modules.items() if isinstance(module, nn.ModuleList))
    inner, config = stack.rpartition(".")[0], model.config
    embedding = next(path for path, module in modules.items() if module is model.get_input_embeddings())
    head = next(path for path, module in modules.items() if module is model.get_output_embeddings())
    head_weight = f"{head}.weight"
    by_layer: dict[int | None, list[Parameter]] = {}
    experts_names = {part.name for part in anatomy.parts_of("experts")}
    parameters = dict(model.named_parameters())
    for part in anatomy.parts:
        if part.name in experts_names:
            continue
        prefix = "" if part.layer is None else f"{stack}.{part.layer}."
        width = 4 if parameters[part.name].dtype == torch.float32 else None
        by_layer.setdefault(part.layer, []).append(
            Parameter(part.name.removeprefix(prefix), part.component, part.shape, width)
        )
    moe = {layer.index: layer for layer in anatomy.moe_layers}
    seen: dict[LayerFacts, LayerFacts] = {}
    layers = []
    for index in range(anatomy.num_layers):
        prefix = f"{stack}.{index}"
        layer = _read_layer(model, prefix, family, tuple(by_layer[index]), packable, moe.get(index))
        layers.append(seen.setdefault(layer, layer))
    first, final = layers[0], f"{inner}.norm"
    attention = first.attention
    return Facts(
        name=name,
        anatomy=anatomy,
        family=family,
        prefix=f"{stack}.",
        layers=tuple(layers),
        outside=tuple(by_layer[None]),
        embedding=f"{embedding}.weight",
        head=anatomy.tied.get(head_weight, head_weight),
        head_bias=modules[head].bias is not None,
        final_norm=final,
        norm=_norm_kind(modules[final], family),
        tied=head_weight in anatomy.tied,
        vocabulary=modules[head].out_features,
        hidden=config.hidden_size,
        masks=len({layer.attention.window for layer in layers}) if family == "gpt_oss" else 1,
        scaled=family == "granite",
        residual_scaled=family == "granite",
        buffers=sum(_nbytes(buffer) for path, buffer in model.named_buffers() if not path.startswith(f"{stack}.")),
        rotary=attention.rotary,
        rotation=attention.rotation,
    )


def _read_layer(
    model: PreTrainedModel,
    prefix: str,
    family: str,
    parameters: tuple[Parameter, ...],
    packable: set[str],
    moe: MoeLayer | None,
) -> LayerFacts:
    layer = model.get_submodule(prefix)
    linears = {
        path: Linear(module.out_features, module.in_features, module.bias is not None, f"{prefix}.{path}" in packable)
        for path, module in layer.named_modules()
        if isinstance(module, nn.Linear)
    }
    mlp = next(path for path, _ in layer.named_children() if path in ("mlp", "block_sparse_moe"))
    return LayerFacts(
        parameters=parameters,
        linears=_Frozen(linears),
        buffers=sum(_nbytes(buffer) for buffer in layer.buffers()),
        norms=("input_layernorm", "post_attention_layernorm"),
        norm=_norm_kind(layer.input_layernorm, family),
        attention_path="self_attn",
        attention=_read_attention(layer.self_attn, model, family, linears),
        mlp=mlp,
        experts=None if moe is None else _read_experts(model, prefix, family, moe),
    )


class _Frozen(dict):
    """A mapping that is a key of others."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


def _read_attention(module: nn.Module, model: PreTrainedModel, family: str, linears: Mapping[str, Linear]) -> Attention:
    config = model.config
    heads = config.num_attention_heads
    latent = int(getattr(module, "kv_lora_rank", 0) or 0)
    if latent:
        head, value_head, rotary = module.qk_head_dim, module.v_head_dim, module.qk_rope_head_dim
        rotation = "complex" if family == "deepseek_v2" else "interleaved" if config.rope_interleave else "half"
        kv_heads, norm = heads, None
    else:
        head = value_head = module.head_dim
        kv_heads = linears["self_attn.k_proj"].out // head
        inverse = next(buffer for path, buffer in model.named_buffers() if path.endswith("inv_freq"))
        rotary = 2 * inverse.numel()
        rotation = "split" if family == "gpt_oss" else "half"
        norm = None
        if hasattr(module, "q_norm"):
            norm = "head" if module.q_norm.weight.numel() == head else "all"
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        head=head,
        value_head=value_head,
        rotary=rotary,
        rotation=rotation,
        norm=norm,
        latent=latent,
        query_latent=int(getattr(module, "q_lora_rank", 0) or 0),
        window=getattr(module, "sliding_window", None) is not None,
        sinks=hasattr(module, "sinks"),
    )


def _read_experts(model: PreTrainedModel, prefix: str, family: str, moe: MoeLayer) -> Experts:
    block = model.get_submodule(moe.block)
    shared = next((name for name in ("shared_experts", "shared_expert") if hasattr(block, name)), None)
    router = model.get_submodule(moe.router)
    return Experts(
        path=moe.experts.removeprefix(f"{prefix}."),
        router=moe.router.removeprefix(f"{prefix}."),
        shape=moe.shape,
        top_k=moe.top_k,
        shared=None if shared is None else f"{moe.block.removeprefix(f'{prefix}.')}.{shared}",
        gated=hasattr(block, "shared_expert_gate"),
        choices=_choices(router, family, moe.top_k),
        normalized=bool(getattr(router, "norm_topk_prob", family == "mixtral")),
        noises=sum(_noise(module) > 0 for module in (block, router)),
        activation="clamped" if family == "gpt_oss" else "silu",
    )


def _choices(router: nn.Module, family: str, top_k: int) -> int:
    """Indices a token leaves: two of each group, the groups, then the experts (deepseek_v3); a maximum of each group
    (deepseek_v2, if it chooses by groups); three maxima for each of two experts (phimoe)."""
    groups, chosen = getattr(router, "num_group", 0), getattr(router, "topk_group", 0)
    if family == "deepseek_v3":
        return 2 * groups + chosen + top_k
    if family == "deepseek_v2" and router.topk_method == "group_limited_greedy":
        return groups + chosen + top_k
    return 6 if family == "phimoe" else top_k


def _noise(module: nn.Module) -> float:
    """How much noise a MoE block (mixtral's, phimoe's) or a router (phimoe's) multiplies its input by in training."""
    return float(getattr(module, "input_jitter_noise", getattr(module, "jitter_noise", 0.0)))


def _norm_kind(module: nn.Module, family: str) -> str:
    """`layer` for LayerNorm, `wide` for an RMSNorm whose weight multiplies in float32, else `rms`."""
    if isinstance(module, nn.LayerNorm):
        return "layer"
    return "wide" if family == "gpt_oss" else "rms"


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
