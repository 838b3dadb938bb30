"""`moetune adapter check`: what of an adapter reaches its base, which programs read it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from moetune.adapters.base import AdapterBase
from moetune.adapters.factors import Adapter
from moetune.adapters.files import StoredAdapter
from moetune.adapters.read import Read, left_out, read, unwrapped, without_idle_towers
from moetune.adapters.write import PROGRAMS, SERVERS, laid_out, unread_in_vllm
from moetune.compat.peft import targets_module
from moetune.errors import UserError, one_line
from moetune.json_files import Answer

MIXED_FORMAT = "--enable-mixed-moe-lora-format"
"""The option with which vLLM reads stacked factors for experts that it has one by one."""


@dataclass(frozen=True)
class Covered:
    """One projection of one layer's experts, or one linear layer, with factors.

    Attributes:
        name: `<experts>.gate_up`, `<experts>.down`, or the path of a linear layer.
        layer: index of the decoder layer; None outside of layers.
        experts: ids of the experts whose factors are not both zero; None for a linear layer.
        zero: ids of those whose update is zero; for a linear layer [0] if its update is.
    """

    name: str
    layer: int | None
    rank: int
    scale: float
    experts: list[int] | None
    zero: list[int]


@dataclass(frozen=True)
class AdapterReport(Answer):
    """The answer of `check`.

    Attributes:
        layout: name of the layout of the experts' factors, one of `read.LAYOUTS`; None without such factors.
        reasons: from what the layout was concluded, one sentence each.
        covered: what has factors.
        saved: names of the parameters that the adapter holds whole.
        missing: projections of expert layers without factors, while another layer has them.
        problems: what was trained and is ignored, or is read wrongly; none if all is well.
        programs: program -> None if it reads the files as they are, else the reason why it does not.
    """

    base: str
    adapter: str
    layout: str | None
    reasons: list[str]
    covered: list[Covered]
    saved: list[str]
    missing: list[str]
    problems: list[str]
    programs: dict[str, str | None]


def check(
    stored: StoredAdapter, base: AdapterBase, layout: str | None = None, program: str | None = None
) -> AdapterReport:
    """Return which parts of an adapter take effect on its base, and which programs read it as it is.

    Args:
        layout: the layout to read it in, one of `read.LAYOUTS`; None to detect it.
        program: one of `PROGRAMS`; if this one does not read the files as they are, that is a problem too.

    Raises:
        UserError: names and shapes allow two layouts, or none; or `layout` is not one of those that they allow.
    """
    stored = without_idle_towers(stored, base)
    parsed = read(stored, base, layout)
    problems = parsed.problems
    programs = {name: _as_it_is(parsed, stored, base, name) for name in PROGRAMS}
    if program is not None and programs[program] is not None:
        problems.append(f"{program}: {programs[program]}")
    if not parsed.adapter.named() and not parsed.adapter.saved:
        problems.append("nothing of it belongs to the base")
    used = {name for own in parsed.adapter.experts.values() for name in own}
    missing = [
        f"{path}.{name}"
        for path in base.layers
        for name in sorted(used - set(parsed.adapter.experts.get(path, {})), reverse=True)
    ]
    covered, saved = list(_covered(parsed, base)), sorted(parsed.adapter.saved)
    return AdapterReport(
        base.name, str(stored.folder), parsed.layout, parsed.reasons, covered, saved, missing, problems, programs
    )


def _covered(parsed: Read, base: AdapterBase) -> Iterator[Covered]:
    for name, factors in parsed.adapter.named().items():
        has_A, has_B = (half.flatten(-2).any(-1) for half in (factors.A, factors.B))  # [E], or one for a linear layer
        if factors.A.ndim == 3:
            layer = base.layers[name.rpartition(".")[0]].index
            ids, zero = (has_A | has_B).nonzero().flatten().tolist(), (has_A ^ has_B).nonzero().flatten().tolist()
            yield Covered(name, layer, factors.rank, factors.scale, ids, zero)
        else:
            zero, info = [] if has_A & has_B else [0], base.structure.lora_layers()[name]
            yield Covered(name, info.layer, factors.rank, factors.scale, None, zero)


def _as_it_is(parsed: Read, stored: StoredAdapter, base: AdapterBase, program: str) -> str | None:
    """Return None if the files hold what moetune would write for a program; else the first difference as text."""
    try:
        laid = laid_out(parsed.adapter, base, program)
        ignored = [] if program in SERVERS else left_out(stored, parsed)
        refused = [path for path in parsed.adapter.experts if targets_module(stored.settings, path)]
    except (UserError, ValueError) as error:  # moetune's, and PEFT's of the settings
        return f"cannot read it: {one_line(error)}"
    if parsed.ranks and program != "llama.cpp":  # it goes by the factors' own
        return f"cannot read it: {parsed.ranks[0]}; correct it there"
    tensors, adapter = stored.tensors, parsed.adapter
    if program not in SERVERS:  # PEFT reads the frozen weights that it stores
        tensors = {name: tensor for name, tensor in tensors.items() if unwrapped(name) not in parsed.frozen}
    if program == "vllm" and parsed.layout == "peft" and laid.layout == "per-expert":
        return _stacked_in_vllm(adapter, base)
    if program == "vllm" and laid.layout == "peft" and (unread := unread_in_vllm(base.structure.model_type)):
        return f"cannot read it: {unread[0]}"
    misfit = _difference(tensors, laid.tensors)
    if misfit is None and program in SERVERS:
        has, needs = stored.settings, laid.settings
        mixed = any(has.get(key) for key in ("rank_pattern", "alpha_pattern", "use_rslora"))
        if mixed or any(has.get(key) != needs[key] for key in ("r", "lora_alpha")):
            misfit = "it takes lora_alpha / r of adapter_config.json for everything, and nothing else"
    if misfit is not None and tensors.keys() == laid.tensors.keys():
        alpha = stored.settings["lora_alpha"]
        if program == "vllm" and parsed.layout in (None, "peft"):
            misfit = None  # to linear layers and stacked experts it applies rank_pattern, alpha_pattern and use_rslora
        elif program == "llama.cpp":  # it takes lora_alpha / rank of each pair of factors
            wrong = [name for name, factors in adapter.named().items() if factors.scale * factors.rank != alpha]
            misfit = f"it ignores use_rslora and alpha_pattern, and would scale {wrong[0]} wrongly" if wrong else None
    if misfit is None and stored.renamed and (program in SERVERS or ".default." not in stored.renamed):
        misfit = f"it looks for other names than {stored.renamed}"
    elif misfit is None and refused and program not in SERVERS:
        misfit = f"its target_modules name {refused[0]}, as vLLM's do, and PEFT refuses that"
    elif misfit is None and ignored:
        misfit = f"it ignores the factors of {ignored[0]}, which its settings leave out"
    if misfit is not None and (problems := [*parsed.unread, *parsed.wrong]):  # with which it cannot be converted
        return f"cannot read it: {problems[0]}"
    return None if misfit is None else f"needs moetune adapter convert --to {program}: {misfit}"


def _stacked_in_vllm(adapter: Adapter, base: AdapterBase) -> str:
    """Return what vLLM does with stacked factors where its class has experts one by one."""
    names = {path: base.expert_names[path].prefix for path in adapter.experts}
    if where := next((f"{name}, not at {path}" for path, name in names.items() if name != path), None):
        told = f"it accepts the adapter and drops its experts without a message, since it has them at {where}"
    else:
        told = f"it is read as it is only with {MIXED_FORMAT} and is_3d_lora_weight, which moetune serve gives"
    return f"needs moetune adapter convert --to vllm: {told}"


def _difference(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str | None:
    """Return the first difference of two sets of tensors by name, as text; None if they are equal."""
    for name in sorted(expected.keys() - tensors.keys()):
        return f"{name} is missing"
    for name in sorted(tensors.keys() - expected.keys()):
        return f"{name} is not read"
    for name in sorted(tensors):
        if tensors[name].shape != expected[name].shape:
            return f"{name} is {[*tensors[name].shape]}, not {[*expected[name].shape]}"
        if not tensors[name].equal(expected[name]):
            has, needs = (of[name].flatten().sort().values for of in (tensors, expected))
            return f"{name} has {'its experts in another order' if has.equal(needs) else 'another scale'}"
    return None
