"""Selection: which parts of a model train and how: the `adapt:` block of a run file, resolved on a model structure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from moetune.config.fields import IdsByLayer, IdSet
from moetune.config.schema import AdaptConfig, ChoiceConfig, ExpertsOrChoice, LoraConfig
from moetune.errors import UserError, suggest
from moetune.models.structure import COMPONENTS, Component, ModelStructure, Part

ExpertIds = Mapping[int, tuple[int, ...]]
"""Decoder layer -> expert numbers."""


@dataclass(frozen=True)
class Selection:
    """What trains.

    Attributes:
        full: names of parameters that train in full precision; the experts' are not among them.
        experts: whole experts that train in full precision, by layer.
        lora_experts: frozen experts with low-rank factors, by layer. An expert that trains whole needs none.
        lora_linears: paths of linear modules with low-rank factors.
        lora: rank, alpha and factoring of those.
        left_out: linear modules of the components that LoRA is put on which cannot have it.
    """

    full: frozenset[str]
    experts: ExpertIds
    lora_experts: ExpertIds
    lora_linears: tuple[str, ...]
    lora: LoraConfig | None
    left_out: tuple[str, ...] = ()

    def without(self, layers: Collection[int], structure: ModelStructure) -> Selection:
        """The same but for what is in these decoder layers."""
        rest = structure.without(layers)
        return Selection(
            self.full & {part.name for part in rest.parts},
            {layer: ids for layer, ids in self.experts.items() if layer not in layers},
            {layer: ids for layer, ids in self.lora_experts.items() if layer not in layers},
            tuple(path for path in self.lora_linears if path in rest.linears()),
            self.lora,
        )


NOTHING = Selection(frozenset(), {}, {}, (), None)
"""Of a run whose choice could not be made."""


def select(adapt: AdaptConfig, structure: ModelStructure) -> Selection:
    """Resolves `adapt` on a model.

    Raises:
        UserError: a layer, expert, component or pattern matches nothing, or nothing would train. All problems are in
            the one message, each with what exists.
    """
    selection, problems = examine_selection(adapt, structure)
    if problems:
        raise UserError("\n".join(problems))
    return selection


def examine_selection(
    adapt: AdaptConfig, structure: ModelStructure, inert: Collection[str] = ()
) -> tuple[Selection, list[str]]:
    """What there is of what `adapt` chooses, and every problem with it.

    Args:
        inert: linear modules on which LoRA would have no effect: a component is taken without them.
    """
    resolver = _Resolver(structure, inert)
    full = resolver.routers(adapt.router)
    experts = resolver.experts(adapt.experts)
    for index, target in enumerate(adapt.also):
        names, whole_layers = resolver.also(f"adapt.also[{index}]", target)
        full |= names
        experts |= whole_layers
    lora_linears, lora_experts = resolver.lora(adapt.lora, experts)
    both = sorted(path for path in lora_linears if f"{path}.weight" in full)
    if both:
        resolver.problems.append(f"adapt: {_some(both)} would train in full and with LoRA; choose one for each")
    if not (full or experts or lora_linears or lora_experts or resolver.problems):
        resolver.problems.append("adapt: nothing trains; set router, experts, lora or also")
    left_out = tuple(resolver.left_out)
    return Selection(frozenset(full), experts, lora_experts, lora_linears, adapt.lora, left_out), resolver.problems


_MLP: tuple[Component, ...] = ("experts", "dense_mlp")
_OTHER_TARGETS: Mapping[str, tuple[Component, ...]] = {
    "all-linear": ("attention", *_MLP),
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "query_key_value"), ("attention",)),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3", "mlp"), _MLP),
}
"""What other tools call linear layers that a model has under other names, or in its experts' stacks."""
_UNREACHED = "only chooses among tokens or experts, by comparison, so no gradient reaches it"


class _Resolver:
    """Looks names and numbers up in a model structure and collects every problem it meets."""

    def __init__(self, structure: ModelStructure, inert: Collection[str]) -> None:
        self.structure, self.inert = structure, inert
        self.left_out: dict[str, None] = {}
        self.moe_layers = {layer.index: layer for layer in structure.moe_layers}
        self.problems: list[str] = []

    def routers(self, layers: IdSet) -> set[str]:
        chosen = set(self._layers("adapt.router", layers, self.moe_layers, "has no router"))
        return {part.name for part in self.structure.parts_of("router") if part.layer in chosen and part.has_gradient}

    def experts(self, config: ExpertsOrChoice | None) -> dict[int, tuple[int, ...]]:
        if config is None or isinstance(config, ChoiceConfig):  # a choice that could not be made is reported as such
            return {}
        return self._expert_ids("adapt.experts", config.layers, config.ids)

    def also(self, where: str, target: str) -> tuple[set[str], dict[int, tuple[int, ...]]]:
        """Parameter names, and layers of experts, that a component or a name pattern stands for."""
        if target in COMPONENTS:
            matched = self.structure.parts_of(target)
        else:
            matched = tuple(part for part in self.structure.parts if fnmatchcase(part.name, target))
        if not matched and (first := self._tied_to(target)):
            self.problems.append(
                f"{where}: {target!r} is one weight with {first.name} in this model (tied), which would train with it; "
                f"write {first.component} to train both, or leave it out"
            )
        elif not matched:
            self.problems.append(f"{where}: {target!r} matches no parameter.{self._hint(target)}")
        elif not any(part.has_gradient for part in matched):
            self.problems.append(f"{where}: {target!r} {_UNREACHED} ({matched[0].name}); leave it out")
        names = {part.name for part in matched if part.has_gradient}
        layers = {}
        for layer in self.structure.moe_layers:
            stacks = {part.name for part in self.structure.parts_of("experts") if part.layer == layer.index}
            if stacks <= names:
                layers[layer.index] = tuple(range(layer.shape.num_experts))
            elif stacks & names:
                self.problems.append(
                    f"{where}: {target!r} matches only part of the experts of layer {layer.index} "
                    f"({_some(stacks & names)}); experts train whole: write also: [experts], or use adapt.experts"
                )
            names -= stacks
        return names, layers

    def lora(self, config: LoraConfig | None, trained: ExpertIds) -> tuple[tuple[str, ...], dict[int, tuple[int, ...]]]:
        """Linear modules, and experts that do not train whole, that get factors."""
        if config is None:
            return (), {}
        every_layer = range(self.structure.num_layers)
        chosen: IdSet | IdsByLayer = "none" if isinstance(config.ids, ChoiceConfig) else config.ids
        if not isinstance(config.ids, str) and "experts" not in config.targets:
            self.problems.append("adapt.lora.ids: chooses experts, and adapt.lora.targets has no experts")
        layers = set(self._layers("adapt.lora.layers", config.layers, every_layer, "does not exist"))
        linears: dict[str, None] = {}
        experts: dict[int, tuple[int, ...]] = {}
        for index, target in enumerate(config.targets):
            where = f"adapt.lora.targets[{index}]"
            if target == "experts":
                in_layers: IdSet = tuple(sorted(layers & self.moe_layers.keys())) or "none"
                ids = self._expert_ids("adapt.lora", in_layers, chosen)
                experts = {
                    layer: rest
                    for layer in ids
                    if (rest := tuple(e for e in ids[layer] if e not in trained.get(layer, ())))
                }
                if not experts and not self.problems:
                    self.problems.append(f"{where}: no frozen expert in the chosen layers to put LoRA on")
                continue
            found = [
                path
                for path, linear in self.structure.linears().items()
                if (linear.component == target if target in COMPONENTS else _matches(path, target))
                and (
                    linear.layer in layers
                    or (linear.layer is None and (target in COMPONENTS or config.layers == "all"))
                )
            ]
            if not found:
                self.problems.append(f"{where}: {target!r} matches no linear layer there.{self._hint(target)}")
            if tied := [path for path in found if f"{path}.weight" in self.structure.tied]:
                self.problems.append(
                    f"{where}: {target!r} takes in {tied[0]}, which has one weight with "
                    f"{self.structure.tied[f'{tied[0]}.weight']} (tied), so factors on it could not be merged; "
                    "name the other layers, or train both in full with adapt.also: [embedding]"
                )
            unreached = [path for path in found if not self.structure.linears()[path].has_gradient]
            if target in COMPONENTS:
                cannot = {*unreached, *self.inert}
                self.left_out |= dict.fromkeys(path for path in found if path in cannot)
                found = [path for path in found if path not in cannot]
            elif unreached:
                self.problems.append(f"{where}: {target!r} {_UNREACHED} ({unreached[0]}); leave it out")
            linears |= dict.fromkeys(found)
        return tuple(linears), experts

    def _expert_ids(self, where: str, layers: IdSet, ids: IdSet | IdsByLayer) -> dict[int, tuple[int, ...]]:
        chosen = {}
        in_layers = self._layers(f"{where}.layers", layers, self.moe_layers, "has no experts")
        if isinstance(ids, dict):
            named = self._layers(f"{where}.ids", tuple(ids), self.moe_layers, "has no experts")
            in_layers = [index for index in named if index in in_layers]
        for index in in_layers:
            count = self.moe_layers[index].shape.num_experts
            here = ids[index] if isinstance(ids, dict) else ids
            wrong = [] if isinstance(here, str) else [expert for expert in here if expert >= count]
            if wrong:
                self.problems.append(
                    f"{where}.ids: expert {_numbers(wrong)} does not exist; layer {index} has experts 0-{count - 1}"
                )
                break
            chosen[index] = tuple(range(count)) if here == "all" else () if here == "none" else here
        return {index: experts for index, experts in chosen.items() if experts}

    def _layers(self, where: str, layers: IdSet, existing: Iterable[int], wrong_how: str) -> list[int]:
        existing = list(existing)
        if layers == "none":
            return []
        if not existing:
            self.problems.append(
                f"{where}: {self.structure.model_type!r} is a dense model; it has no routers and no experts"
            )
            return []
        if layers == "all":
            return existing
        wrong = sorted(set(layers) - set(existing))
        if wrong:
            self.problems.append(f"{where}: layer {_numbers(wrong)} {wrong_how}; choose from {_numbers(existing)}")
        return [layer for layer in layers if layer in existing]

    def _tied_to(self, target: str) -> Part | None:
        """The parameter that this component or pattern is another name of."""
        linears = self.structure.linears()
        names = {
            first
            for name, first in self.structure.tied.items()
            if _matches(name, target)
            or _matches(path := name.rpartition(".")[0], target)
            or (path in linears and linears[path].component == target)
        }
        return next((part for part in self.structure.parts if part.name in names), None)

    def _hint(self, target: str) -> str:
        components = [c for c in COMPONENTS if self.structure.parts_of(c)]
        if meant := [c for c in _OTHER_TARGETS.get(target.rpartition(".")[2], ()) if c in components]:
            return f" Components have names of their own here: write [{', '.join(meant)}]."
        names = {piece for path in self.structure.linears() for piece in path.split(".") if not piece.isdigit()}
        return suggest(target, [*components, *names]) or (
            f" Components: {', '.join(components)}; patterns match names such as {self.structure.parts[-1].name!r}"
        )


def _matches(path: str, target: str) -> bool:
    """Whether a module path is meant: by a pattern for the whole of it, or by the name it ends in (`q_proj`)."""
    return fnmatchcase(path, target) or path.endswith(f".{target}") or path == target


def ranges(values: Iterable[int]) -> str:
    """`[0, 1, 2, 5]` as a run file has it: "0-2,5"."""
    runs: list[list[int]] = []
    for value in sorted(values):
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _numbers(values: Iterable[int]) -> str:
    return ranges(values).replace(",", ", ")


def _some(names: Iterable[str], most: int = 3) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
