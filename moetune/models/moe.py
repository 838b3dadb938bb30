"""The mixture-of-experts layers of a model: experts, router, top_k.

transformers marks the stacks of experts that it knows how to run with the decorator
`use_experts_implementation`; the decorated module carries layout flags. Those flags are the only way experts
are recognised here: field names in configs vary too much. Experts without the mark are refused, because
neither their number nor their layout is known.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from moetune.config.schema import LoraConfig
from moetune.errors import UserError

_FLAGS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated")
_EXPERT_CLASS = re.compile(r"(Experts?|MoE|Moe|MoA|SparseMLP|ExpertGLU)$")
_ROUTER_NAMES = ("router", "gate")
_TOP_K_NAMES = (
    "top_k", "num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k",
)  # fmt: skip
_EXPERT_COUNT_NAMES = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class ExpertShape:
    """Size and layout of one layer's experts.

    With E experts, hidden size H and intermediate size I, transformers stores `gate_up_proj [E, 2I, H]`
    (without a gate `up_proj [E, I, H]`) and `down_proj [E, H, I]`; the last two axes are swapped if
    `is_transposed`.

    Attributes:
        has_gate: gate and up projection in one tensor, rather than an up projection alone.
        has_bias: every projection has a bias row per expert.
        is_concatenated: gate rows, then up rows; otherwise they alternate (gate 0, up 0, gate 1, up 1, …).
    """

    num_experts: int
    hidden: int
    intermediate: int
    has_gate: bool
    has_bias: bool
    is_transposed: bool
    is_concatenated: bool

    @property
    def parameters_per_expert(self) -> int:
        """Parameters of one expert: its projections and their biases."""
        widened = self.intermediate * (2 if self.has_gate else 1)
        weights = widened * self.hidden + self.hidden * self.intermediate
        return weights + (widened + self.hidden if self.has_bias else 0)

    def trained_parameters(self, lora: LoraConfig | None) -> int:
        """Count what trains of one expert: all of it, or its low-rank factors (experts/bank.py, `ExpertLora`)."""
        if lora is None:
            return self.parameters_per_expert
        parts = 2 if self.has_gate else 1
        factors = parts if lora.gate_up == "split" else 1
        return lora.rank * (factors * self.hidden + (parts + 1) * self.intermediate + self.hidden)


@dataclass(frozen=True)
class MoeLayer:
    """One decoder layer with routed experts. `block`, `experts` and `router` are module paths.

    Attributes:
        index: number of the decoder layer.
        top_k: experts that one token is sent to; the most, where a router may also send it to none.
    """

    index: int
    block: str
    experts: str
    router: str
    top_k: int
    shape: ExpertShape


def is_experts(module: nn.Module) -> bool:
    """Whether transformers marks this module as a stack of routed experts."""
    return all(hasattr(module, flag) for flag in _FLAGS)


def read_shape(experts: nn.Module, where: str) -> ExpertShape:
    """Reads size and layout off a marked experts module; `where` is its path, for messages.

    Raises:
        UserError: its parameters are not the projections that its flags announce.
    """
    flags = {flag: bool(getattr(experts, flag)) for flag in _FLAGS if flag != "has_post_expert_norm"}
    down = getattr(experts, "down_proj", None)
    if not isinstance(down, nn.Parameter) or down.ndim != 3:
        raise UserError(f"{where} ({type(experts).__name__}): no down_proj [experts, hidden, intermediate] in it")
    num_experts, *matrix = down.shape
    hidden, intermediate = reversed(matrix) if flags["is_transposed"] else matrix
    shape = ExpertShape(num_experts, hidden, intermediate, **flags)
    found = sum(parameter.numel() for parameter in expert_parameters(experts).values())
    if found != num_experts * shape.parameters_per_expert:
        raise UserError(
            f"{where} ({type(experts).__name__}): its {num_experts} experts hold {found:,} parameters, "
            f"not {num_experts} x {shape.parameters_per_expert:,}; this layout is not supported"
        )
    return shape


def expert_parameters(experts: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of a marked module with one slice per expert (a norm that they share is a submodule)."""
    return dict(experts.named_parameters(recurse=False))


def find_router(model: PreTrainedModel, block: str, num_experts: int) -> str | None:
    """Path of the module, beside the experts, that scores them; None if there is none.

    It goes by name (`gate`, `router`), then by class (`*Router`), then by shape: a linear with one output an
    expert.
    """
    children = {
        name: child
        for name, child in model.get_submodule(block).named_children()
        if not name.startswith("shared") and not is_experts(child) and any(True for _ in child.parameters())
    }
    tests = (
        lambda name, child: name in _ROUTER_NAMES,
        lambda name, child: "Router" in type(child).__name__,
        lambda name, child: isinstance(child, nn.Linear) and child.out_features == num_experts,
    )
    for test in tests:
        for name, child in children.items():
            if test(name, child):
                return f"{block}.{name}"
    return None


def read_top_k(model: PreTrainedModel, router: str, block: str, layer: int) -> int | None:
    """How many experts a token uses: off the router, its block or the config; None if nothing says."""
    config = model.config.get_text_config()
    for holder in (model.get_submodule(router), model.get_submodule(block), config):
        for name in _TOP_K_NAMES:
            value = _field(holder, name)
            if isinstance(value, (list, tuple)) and layer < len(value):
                value = value[layer]
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def unknown_experts(model: PreTrainedModel) -> str | None:
    """Describes the first stack of experts that transformers has not marked, or returns None.

    Told by a module named `experts`, a class named after them, or a 3-D parameter with one slice an expert.
    """
    known = [name for name, module in model.named_modules() if is_experts(module)]
    holders = {name.rpartition(".")[0] for name in known}
    counts = _expert_counts(model.config)
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if last.startswith("shared") or name in holders or any(_inside(name, path) for path in known):
            continue
        named = last in ("expert", "experts") or _EXPERT_CLASS.search(type(module).__name__)
        if named and any(True for _ in module.parameters()):
            return f"{name} ({type(module).__name__})"
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 3 and parameter.shape[0] in counts and "shared" not in name:
                return f"{name}.{key} {list(parameter.shape)}"
    return None


def _inside(name: str, path: str) -> bool:
    return name == path or name.startswith(path + ".")


def _expert_counts(config: PretrainedConfig) -> set[int]:
    """Every number above 1 that the config or its text config gives as a count of routed experts."""
    values = (_field(part, name) for part in _configs(config) for name in _EXPERT_COUNT_NAMES)
    return {value for value in values if isinstance(value, int) and value > 1}


def _field(holder: object, name: str) -> object:
    """An attribute, or None; also where transformers keeps it per layer and refuses to give one value."""
    try:
        return getattr(holder, name, None)
    except RuntimeError:
        return None


def _configs(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    yield config
    text = config.get_text_config()
    if text is not config:
        yield text
