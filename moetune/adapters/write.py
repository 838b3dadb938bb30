"""`laid_out`: an `Adapter`'s tensors and settings in the layout that a program reads.

peft, unsloth     stacked, PEFT's order; unsloth also gets its note `lora_B_layout`
unsloth-grouped   stacked, the order of Unsloth before September 2026
vllm              per expert, or stacked where the base checkpoint stacks its experts; one rank and one scale
sglang            per expert; one rank and one scale; of layers that it joins (q, k and v) all or none; where all
                  experts share A of gate_up and B of down, these once, [1, …] (`--experts-shared-outer-loras`)
llama.cpp         per expert, as convert_lora_to_gguf.py takes it; one rank and one scale
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from moetune.adapters.base import AdapterBase, sizes_of
from moetune.adapters.factors import DOWN, GATE_UP, Adapter, Factors, parted
from moetune.adapters.files import AdapterRecord
from moetune.adapters.settings import peft_settings, uniform_settings
from moetune.adapters.sketch import sketch
from moetune.adapters.stacked import ORDERS, Order
from moetune.errors import UserError, counted

_STACKED_IN_VLLM = (
    "gpt_oss", "interns1_pro", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_omni_moe_thinker", "qwen3_vl_moe",
    "qwen3_vl_moe_text",
)  # fmt: skip
"""Model types whose class in vLLM reads stacked factors (`is_3d_moe_weight`, as of 0.33)."""
_JOINED = (("q_proj", "k_proj", "v_proj"), ("q_a_proj", "kv_a_proj_with_mqa"), ("gate_proj", "up_proj"))
"""Linear layers that SGLang joins: with factors on the first it takes those of the others from the file."""

_SPLIT_ON_LOADING = "kv_b_proj"
"""The layer beside `kv_a_proj_with_mqa` in multi-head latent attention. vLLM and SGLang split its weight when they load
it, and multiply queries and outputs by the halves, without its factors."""
_CALLS_IT = ("minicpm3",)
"""Model types with both layers whose class in vLLM calls `kv_b_proj` like any other."""

PROGRAMS = ("peft", "vllm", "sglang", "llama.cpp", "unsloth", "unsloth-grouped")
"""Programs to write an adapter for, which are the values of `--to`."""
SERVERS = {"vllm": "vLLM", "sglang": "SGLang", "llama.cpp": "llama.cpp"}
"""Those of them that serve, and their names."""
_ROUTES_INSIDE = (
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "exaone_moe", "glm4_moe_lite", "qwen3_moe", "qwen3_next",
)  # fmt: skip
"""Model types whose class in vLLM 0.32 gives the router to its experts' runner, which calls it without its factors, as
was seen of Qwen3-MoE and DeepSeek-V3, and the others share that code."""


@dataclass(frozen=True)
class LaidOut:
    """An adapter in the layout of a program.

    Attributes:
        layout: the layout's name, one of `read.LAYOUTS`; None without factors on experts.
        tensors: by name, without PEFT's prefix.
        settings: the content of `adapter_config.json`.
        adapter: the adapter before zeros were added.
        notes: sentences for the user on what was changed: zeros that were added, factors that were multiplied.
    """

    layout: str | None
    tensors: dict[str, Tensor]
    settings: dict[str, Any]
    adapter: Adapter
    notes: tuple[str, ...] = ()

    def record(self) -> AdapterRecord:
        """Return what the weight file is to record: the layout and the sketch."""
        return {"schema": 1, "layout": self.layout, "sketch": sketch(self.adapter)}


def laid_out(adapter: Adapter, base: AdapterBase, program: str) -> LaidOut:
    """Return the tensors and settings that a program, one of `PROGRAMS`, reads as this adapter.

    Raises:
        UserError: the adapter has no factors, or the program has no place for a part of it.
    """
    if not adapter.named():
        raise UserError("the adapter has no factors that could be written; merge what it holds whole, if it does")
    if program in SERVERS:
        return _for_server(adapter, base, program)
    holders = {saved_module(name, base) for name in adapter.saved}
    modules = tuple(sorted(x for x in holders if not any(x.startswith(f"{other}.") for other in holders)))
    tied = base.structure.tied
    ties = any(name in adapter.saved for name in tied) and not adapter.unties(tied)
    settings = peft_settings(base, adapter, modules, ties=ties)
    layout = "unsloth-grouped" if program == "unsloth-grouped" else base.peft_layout
    split = _split_on_loading(adapter, base)
    notes = (f"vLLM and SGLang do not apply its factors on {split}; merge it for them",) if split else ()
    named = replace(adapter, linears={base.peft_names[path]: own for path, own in adapter.linears.items()})
    tensors = stacked(named, ORDERS[layout]) | dict(adapter.saved)
    if program.startswith("unsloth") and adapter.experts:
        settings["lora_B_layout"] = "grouped_by_expert" if ORDERS[layout].is_grouped else "rank_major"
    return LaidOut(layout if adapter.experts else None, tensors, settings, adapter, notes)


def stacked(adapter: Adapter, order: Order) -> dict[str, Tensor]:
    """Return the factors in the stacked layout of this order: tensor name without PEFT's prefix -> tensor.

    The outermost wrapper holds down and the next one gate_up, as PEFT wraps the parameters in the order of the model; a
    projection alone is in the outermost.
    """
    pairs = {path: (factors.A, factors.B) for path, factors in adapter.linears.items()}
    for path, projections in adapter.experts.items():
        for depth, name in enumerate(sorted(projections)):
            pairs[path + ".base_layer" * depth] = order.write(projections[name].A, projections[name].B)
    return _named(pairs)


def per_expert(adapter: Adapter, base: AdapterBase) -> Iterator[tuple[str, Factors]]:
    """Yield (name in the base checkpoint, factors) for each projection of each expert.

    Raises:
        UserError: the checkpoint has no names for single experts.
    """
    for path, projections in adapter.experts.items():
        layer, names = base.layers[path], base.expert_names.get(path)
        if names is None or not names.roles:
            raise UserError(
                f"{base.name!r} stores the experts of {path} in one tensor, so there is no name for the factors of one "
                "expert; merge the adapter (moetune adapter merge)"
            )
        by_role = dict(projections)
        if layer.shape.has_gate and GATE_UP in by_role:
            by_role["gate"], by_role["up"] = parted(layer.shape, by_role.pop(GATE_UP))
        for expert in range(layer.shape.num_experts):
            for role in sorted(by_role, key=("gate", "up", GATE_UP, DOWN).index):
                factors = by_role[role]
                yield names.of(expert, role), replace(factors, A=factors.A[expert], B=factors.B[expert])


def _for_server(adapter: Adapter, base: AdapterBase, program: str) -> LaidOut:
    """Return the layout of one of `SERVERS`: names of the checkpoint, all experts, one rank and one scale.

    Raises:
        UserError: the adapter also holds whole weights, the program does not apply some of its factors, or a parameter
            with factors has no name in the checkpoint.
    """
    if split := _split_on_loading(adapter, base):
        leaves = sorted({path.rpartition(".")[2] for path in adapter.linears} - {_SPLIT_ON_LOADING})
        rest = ", ".join([*leaves, *(["experts"] if adapter.experts else [])])
        raise UserError(
            f"{SERVERS[program]} does not apply factors on {split}: it splits the base's weight when it loads, so it "
            "would not compute what was trained; merge the adapter (moetune adapter merge, or export --format merged)"
            + (f", or train without it (adapt.lora.targets: [{rest}])" if rest else "")
        )
    latent = [
        path
        for path in adapter.linears
        if f"{path.rpartition('.')[0]}.kv_a_proj_with_mqa" in base.structure.linears() and not path.endswith(".o_proj")
    ]
    if program == "llama.cpp" and latent:
        raise UserError(
            f"llama.cpp accepts factors on latent attention, such as {latent[0]}, and does not apply them, except on "
            "o_proj; merge the adapter (moetune adapter merge, or export --format merged)"
        )
    kind = base.structure.model_type
    is_inert = program == "sglang" or (program == "vllm" and kind in _ROUTES_INSIDE)
    routers = [layer.router for layer in base.layers.values() if is_inert or not layer.shape.has_gate]
    if inert := next((path for path in adapter.linears if path in routers), None):
        raise UserError(
            f"{SERVERS[program]} has no LoRA on routers, such as {inert}; merge the adapter (moetune adapter merge, or "
            "export --format merged)"
        )
    if adapter.saved:
        raise UserError(
            f"the adapter holds {min(adapter.saved)} whole, and adapters of {program} hold factors only; merge it"
        )
    full, filled = _filled(adapter, base, _JOINED if program == "sglang" else ())
    every = [(base.linear_name(path), factors) for path, factors in full.linears.items()]
    layout: str | None = None
    if program == "vllm" and all(_is_stacked(base, path) for path in full.experts):
        layout = "peft" if full.experts else None
        for path, own in full.experts.items():
            prefix = base.expert_names[path].prefix
            every += [(prefix + ".base_layer" * depth, own[name]) for depth, name in enumerate(sorted(own))]
    else:
        every += per_expert(full, base)
        layout = "per-expert"
    ranks, scales = {factors.rank for _, factors in every}, {factors.scale for _, factors in every}
    rank, scale = max(ranks), max(scales)
    notes = [f"zeros stand for {counted(len(filled), 'missing update')}, such as of {filled[0]}"] if filled else []
    notes += unread_in_vllm(kind) if program == "vllm" and layout == "peft" else ()
    if len(scales) > 1:
        notes.append(
            f"its scales {', '.join(f'{old:g}' for old in sorted(scales))} became {scale:g}; lora_B takes up the ratio"
        )
    if len(ranks) > 1:
        notes.append(f"its ranks {', '.join(map(str, sorted(ranks)))} became {rank}, filled with zeros")
    pairs = {}
    for name, factors in every:
        even = factors.scaled(scale).padded(rank)
        pairs[name] = ORDERS["peft"].write(even.A, even.B) if even.A.ndim == 3 else (even.A, even.B)
    settings, tensors = uniform_settings([name for name, _ in every], rank, scale), _named(pairs)
    if program == "sglang" and full.experts and (shared := _shared_outer(tensors, full, base)) is not None:
        tensors = shared
        notes.append(
            "all experts share A of gate and up and B of down, which are stored once: an SGLang server that starts "
            "without this adapter needs --experts-shared-outer-loras to load it"
        )
    return LaidOut(layout, tensors, settings, adapter, tuple(notes))


def unread_in_vllm(kind: str) -> list[str]:
    """Return a note if vLLM does not read factors of stacked experts for a model type; else an empty list."""
    read_for = f"as of 0.33 vLLM reads factors of stacked experts for {', '.join(_STACKED_IN_VLLM)}"
    return [] if kind in _STACKED_IN_VLLM else [f"{read_for}, and not for {kind}; merge the adapter if it does not"]


def _shared_outer(tensors: Mapping[str, Tensor], adapter: Adapter, base: AdapterBase) -> dict[str, Tensor] | None:
    """Return per-expert tensors with A of gate and up and B of down once for each layer, [1, …]; None if a layer has
    different ones.

    An expert without an update, whose other factor is zero, takes part in any.
    """
    once, most = dict(tensors), 0
    for path in adapter.experts:
        names = base.expert_names[path]
        for role, leaf in names.roles.items():
            outer, inner = ("B", "A") if role == DOWN else ("A", "B")
            every = [f"{names.of(expert, role)}.lora_" for expert in range(base.layers[path].shape.num_experts)]
            pairs = [(once.pop(f"{name}{outer}.weight"), tensors[f"{name}{inner}.weight"]) for name in every]
            trained = [factor for factor, other in pairs if other.any()] or [pairs[0][0]]
            if not all(factor.equal(trained[0]) for factor in trained):
                return None
            once[f"{names.prefix}.{leaf}.lora_{outer}.weight"] = trained[0][None]
            most = max(most, len(trained))
    return once if most > 1 else None


def _split_on_loading(adapter: Adapter, base: AdapterBase) -> str:
    """Return, in words, the layers of multi-head latent attention whose factors vLLM and SGLang do not apply; "" if the
    adapter has none there."""
    known = base.structure.linears()
    paths = [
        path
        for path in adapter.linears
        if path.endswith(f".{_SPLIT_ON_LOADING}")
        and f"{path.removesuffix(_SPLIT_ON_LOADING)}kv_a_proj_with_mqa" in known
        and base.structure.model_type not in _CALLS_IT
    ]
    return paths[0] + (f" and {len(paths) - 1} more" if len(paths) > 1 else "") if paths else ""


def _is_stacked(base: AdapterBase, path: str) -> bool:
    """Return whether the checkpoint stores the experts at `path` in one tensor, under a name of its own."""
    names = base.expert_names.get(path)
    if names is None:
        raise UserError(f"the base checkpoint has no name for {path} that other programs could know; merge instead")
    return not names.roles


def _filled(adapter: Adapter, base: AdapterBase, joined: tuple[tuple[str, ...], ...]) -> tuple[Adapter, list[str]]:
    """Return the adapter with zeros where a program needs factors that are missing, and the names of these projections.

    It needs both projections of a layer's experts, or none, and all or none of the linear layers of a group in
    `joined`.
    """
    experts, filled, linears, known = {}, [], dict(adapter.linears), base.structure.linears()
    for path, factors in adapter.linears.items():
        block, _, leaf = path.rpartition(".")
        for sibling in next((group for group in joined if leaf in group), ()):
            if (name := f"{block}.{sibling}") in known and name not in linears:
                A = factors.A.new_zeros(factors.rank, known[name].in_features)
                linears[name] = Factors(A, factors.B.new_zeros(known[name].out_features, factors.rank), factors.scale)
                filled.append(name)
    for path, projections in adapter.experts.items():
        factors, own = next(iter(projections.values())), dict(projections)
        for name, (into, out) in sizes_of(base.layers[path]).items():
            if name not in own:
                filled.append(f"{path}.{name}")
                count = len(factors.A)
                A, B = factors.A.new_zeros(count, factors.rank, into), factors.A.new_zeros(count, out, factors.rank)
                own[name] = Factors(A, B, factors.scale)
        experts[path] = own
    return replace(adapter, linears=linears, experts=experts), filled


def _named(pairs: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Return tensor name -> factor, without PEFT's prefix, for pairs of A and B by module."""
    return {f"{name}.lora_{'AB'[half]}.weight": pair[half] for name, pair in pairs.items() for half in (0, 1)}


def saved_module(name: str, base: AdapterBase) -> str:
    """Return the module that PEFT must save whole for this parameter: the router for any of its parameters."""
    routers = (layer.router for layer in base.layers.values())
    return next((path for path in routers if name.startswith(f"{path}.")), name.rpartition(".")[0])
