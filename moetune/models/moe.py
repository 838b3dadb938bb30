"""Layers with routed experts, recognized by their modules: shape and layout, router, top_k.

transformers decorates expert modules with `use_experts_implementation`, which sets layout flags on them. Experts are
recognized by these flags alone, because the names of config fields vary between models. Modules without them that
compute the same get them (`mark_experts`). A model with other experts is refused, because neither their number nor
their layout is known.
"""

import copy
import re
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from moetune.compat import llama4
from moetune.config.schema import LoraConfig
from moetune.errors import UserError

_FLAGS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated")
"""Attributes that `use_experts_implementation` sets on a module of experts."""
_DEFAULT_FLAGS = dict.fromkeys(_FLAGS, False) | {"has_gate": True, "is_concatenated": True}
_EXPERT_CLASS = re.compile(r"(Experts?|MoE|Moe|MoA|SparseMLP|ExpertGLU)$")
_ROUTER_NAMES = ("router", "gate")
_TOP_K_NAMES = (
    "top_k", "num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k",
)  # fmt: skip
_EXPERT_COUNT_NAMES = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class ExpertShape:
    """Sizes and memory layout of one layer's experts.

    transformers stores `gate_up_proj [E, 2I, H]`, or `up_proj [E, I, H]` if there is no gate, and `down_proj [E, H,
    I]`; with `is_transposed` the last two axes are swapped.

    Attributes:
        num_experts: E.
        hidden: H.
        intermediate: I.
        has_gate: gate and up projections are in one tensor; False for an up projection alone.
        has_bias: every projection has a bias for each expert.
        is_transposed: matrices are stored [in, out] instead of [out, in].
        is_concatenated: gate rows come first, then up rows; False if they alternate (gate 0, up 0, gate 1, …).
    """

    num_experts: int
    hidden: int
    intermediate: int
    has_gate: bool
    has_bias: bool
    is_transposed: bool
    is_concatenated: bool

    @property
    def gate_up_rows(self) -> int:
        """O, the rows of an expert's gate_up [O, H]: 2I, or I without a gate."""
        return self.intermediate * (2 if self.has_gate else 1)

    @property
    def can_be_split(self) -> bool:
        """Whether gate and up can be stored as two matrices: their rows do not alternate."""
        return self.has_gate and self.is_concatenated

    @property
    def gate_and_up(self) -> tuple[slice, slice]:
        """The rows of gate and of up in gate_up [2I, H]."""
        half = self.intermediate
        return (slice(0, half), slice(half, None)) if self.is_concatenated else (slice(0, None, 2), slice(1, None, 2))

    @property
    def parameters_per_expert(self) -> int:
        """Number of parameters of one expert, projections and biases."""
        weights = self.gate_up_rows * self.hidden + self.hidden * self.intermediate
        return weights + (self.gate_up_rows + self.hidden if self.has_bias else 0)

    def trained_parameters(self, lora: LoraConfig | None, rank: int | None) -> int:
        """Return how many parameters of one expert train: its own LoRA factors of this rank (`ExpertLora` in
        experts/bank.py), or all if `lora` or `rank` is None."""
        if lora is None or rank is None:
            return self.parameters_per_expert
        parts = 2 if self.has_gate else 1
        factors = parts if lora.gate_up == "split" else 1
        outer = 0 if lora.share == "outer" else factors * self.hidden + self.hidden
        return rank * (outer + (parts + 1) * self.intermediate)


@dataclass(frozen=True)
class MoeLayer:
    """One decoder layer with routed experts: the module paths of its feed-forward block, experts and router.

    `top_k` is the number of experts per token; the maximum, if the router may also choose none.
    """

    index: int
    block: str
    experts: str
    router: str
    top_k: int
    shape: ExpertShape


def is_experts(module: nn.Module) -> bool:
    """Return whether a module has the flags that transformers sets on modules of routed experts."""
    return all(hasattr(module, flag) for flag in _FLAGS)


def mark_experts(model: nn.Module) -> None:
    """Set transformers' flags on modules that lack them and compute what experts with its default flags do: Step3p7's.

    That is measured, once for each class and shape, because parameters of the same shapes may be used otherwise:
    LongCat has experts without weights. Llama 4's, whose inputs are multiplied instead of their outputs, get flags of
    their own (compat/llama4.py).
    """
    for module in llama4.choose_before_experts(model):
        for flag in _FLAGS:
            setattr(module, flag, llama4.FLAGS.get(flag, False))
    measured: dict[object, bool] = {}
    for module in model.modules():
        shapes = {name: weight.shape for name, weight in expert_parameters(module).items()}
        if shapes.keys() != {"gate_up_proj", "down_proj"} or is_experts(module):
            continue
        kind = type(module), *shapes.values()
        if kind not in measured:
            measured[kind] = _computes_default(module)
        if measured[kind]:
            for flag, value in _DEFAULT_FLAGS.items():
                setattr(module, flag, value)


@torch.no_grad()
def _computes_default(experts: Any) -> bool:
    """Return whether a copy of a module of experts, on the CPU, with equal random experts, returns Σ weight · down ·
    act(gate_up · x), where gate's rows come first."""
    gate_up, down = experts.gate_up_proj, experts.down_proj
    count, rows, hidden = gate_up.shape if gate_up.ndim == 3 else (0, 0, 0)
    takes = list(signature(experts.forward).parameters) == ["hidden_states", "top_k_index", "top_k_weights"]
    if not takes or down.shape != (count, hidden, rows // 2) or not hasattr(experts, "_apply_gate"):
        return False
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        gate_up_RH, down_HI, x_TH = torch.randn(rows, hidden), torch.randn(hidden, rows // 2), torch.randn(3, hidden)
        weights_TK, ids_TK = torch.rand(3, 2), torch.tensor([[0, count - 1]]).expand(3, 2)
        copied = copy.deepcopy(experts)
        copied.gate_up_proj = nn.Parameter(gate_up_RH.expand(count, -1, -1), requires_grad=False)
        copied.down_proj = nn.Parameter(down_HI.expand(count, -1, -1), requires_grad=False)
        expected_TH = copied._apply_gate(x_TH @ gate_up_RH.T) @ down_HI.T * weights_TK.sum(1, keepdim=True)
        closed = torch.cat([torch.full((3, rows // 2), -20.0), torch.ones(3, rows // 2)], 1)
        return bool(copied._apply_gate(closed).abs().max() < 1e-3) and torch.allclose(
            copied(x_TH, ids_TK, weights_TK), expected_TH, rtol=1e-4, atol=1e-4 * float(expected_TH.abs().max())
        )


def read_shape(experts: nn.Module, where: str) -> ExpertShape:
    """Read the sizes and the layout of a module of experts from its flags and parameters.

    Raises `UserError`, which begins with `where`, if the parameters contradict the flags.
    """
    flags = {flag: bool(getattr(experts, flag)) for flag in _FLAGS if flag != "has_post_expert_norm"}
    down = getattr(experts, "down_proj", None)
    if not isinstance(down, nn.Parameter) or down.ndim != 3:
        raise UserError(f"{where} ({type(experts).__name__}): no down_proj [experts, hidden, intermediate] in it")
    num_experts, *matrix = down.shape
    hidden, intermediate = reversed(matrix) if flags["is_transposed"] else matrix
    shape = ExpertShape(num_experts, hidden, intermediate, **flags)
    held = sum(parameter.numel() for parameter in expert_parameters(experts).values())
    if held != num_experts * shape.parameters_per_expert:
        raise UserError(
            f"{where} ({type(experts).__name__}): its {num_experts} experts hold {held:,} parameters, "
            f"not {num_experts} x {shape.parameters_per_expert:,}; this layout is not supported"
        )
    return shape


def expert_parameters(experts: nn.Module) -> dict[str, nn.Parameter]:
    """Return name -> parameter [num_experts, ...] for the parameters directly on a module of experts.

    Parameters of submodules, such as a norm shared by all experts, are left out.
    """
    return dict(experts.named_parameters(recurse=False))


def find_router(model: PreTrainedModel, block: str, num_experts: int) -> str | None:
    """Return the path of the router in the feed-forward block at the path `block`; None if there is none.

    The router is a child module named `gate` or `router`, else of a class named `*Router*`, else a linear layer with
    one output for each expert.
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
    """Return the number of experts per token of a layer; None if it is found nowhere.

    The number is looked up in the module at the path `router`, then in that at `block`, then in the config, under the
    names that models use. `layer` is the index of the decoder layer, for configs with a number for each layer.
    """
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
    """Find experts that cannot be read because their module lacks transformers' flags (see `is_experts`).

    A module counts as experts if it is named `expert` or `experts`, if its class is named like one of experts, or if it
    has a 3-D parameter whose first axis is the number of experts in the config. Return the first such module with its
    class, or the parameter with its shape, for a message; None if there is none.
    """
    known = [name for name, module in model.named_modules() if is_experts(module)]
    holders = {name.rpartition(".")[0] for name in known}
    counts = _expert_counts(model.config)
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if last.startswith("shared") or name in holders or any(f"{name}.".startswith(f"{path}.") for path in known):
            continue
        named = last in ("expert", "experts") or _EXPERT_CLASS.search(type(module).__name__)
        if named and any(True for _ in module.parameters()):
            return f"{name} ({type(module).__name__})"
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 3 and parameter.shape[0] in counts and "shared" not in name:
                return f"{name}.{key} {list(parameter.shape)}"
    return None


def _expert_counts(config: PretrainedConfig) -> set[int]:
    """Return the numbers above 1 that the config, or its text config, gives as the number of routed experts."""
    holders = (config, config.get_text_config())
    values = (_field(holder, name) for holder in holders for name in _EXPERT_COUNT_NAMES)
    return {value for value in values if isinstance(value, int) and value > 1}


def _field(holder: object, name: str) -> object:
    """Return an attribute of a module or config; None if it is missing, or if transformers raises an error because it
    differs between layers."""
    try:
        return getattr(holder, name, None)
    except RuntimeError:
        return None
