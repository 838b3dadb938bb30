"""`select`: apply `adapt:` to a model's structure; `Selection`: which parameters and experts train."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from moetune.config.fields import IdsByLayer, IdSet, ranges
from moetune.config.lora_rank import layers_named, rank_of
from moetune.config.resolved import ResolvedAdapt, ResolvedLora
from moetune.config.schema import ExpertsConfig, LoraConfig
from moetune.errors import first_of, suggest
from moetune.models.components import COMPONENTS, Component
from moetune.models.moe import MoeLayer
from moetune.models.structure import ModelStructure, ParameterInfo


@dataclass(frozen=True)
class Selection:
    """The parameters and experts of a model that train. Names are those of the model that transformers builds.

    Attributes:
        full: names of the parameters that train in full precision, without those of experts.
        experts: layer index -> ids of experts that train in full precision.
        lora_experts: layer index -> ids of frozen experts that get low-rank factors.
        lora_linears: paths of the linear layers and routers (`ModelStructure.lora_layers`) that get low-rank factors.
        ranks: path of a linear layer, or of a layer's experts module, that gets factors -> their rank.
        lora: settings of the factors; None without LoRA.
        left_out: paths of linear layers in a chosen component that get no factors, because these would have no effect.
    """

    full: frozenset[str]
    experts: Mapping[int, tuple[int, ...]]
    lora_experts: Mapping[int, tuple[int, ...]]
    lora_linears: tuple[str, ...]
    ranks: Mapping[str, int]
    lora: LoraConfig | None
    left_out: tuple[str, ...] = ()

    def trained_parameters(self, layer: MoeLayer) -> dict[int, int]:
        """Return id -> number of trained parameters, for the experts of a layer that train, in full or by factors of
        their own."""
        rank, numbers = self.ranks.get(layer.experts), dict[int, int]()
        for ids, lora in ((self.experts, None), (self.lora_experts, self.lora)):
            numbers |= dict.fromkeys(ids.get(layer.index, ()), layer.shape.trained_parameters(lora, rank))
        return numbers

    def within(self, rest: ModelStructure) -> "Selection":
        """Return what is selected of `rest`, the structure of a part of the model."""
        layers = {layer.index for layer in rest.moe_layers}
        paths = {*rest.lora_layers(), *(layer.experts for layer in rest.moe_layers)}
        return Selection(
            self.full & {info.name for info in rest.parameters},
            {layer: ids for layer, ids in self.experts.items() if layer in layers},
            {layer: ids for layer, ids in self.lora_experts.items() if layer in layers},
            tuple(path for path in self.lora_linears if path in rest.lora_layers()),
            {path: rank for path, rank in self.ranks.items() if path in paths},
            self.lora,
        )


NOTHING = Selection(frozenset(), {}, {}, (), {}, None)
"""The selection in which nothing trains."""


def select(adapt: ResolvedAdapt, structure: ModelStructure, inert: Collection[str] = ()) -> tuple[Selection, list[str]]:
    """Apply the `adapt:` section to a model.

    Return the selection of what exists, and a message for each layer, expert, component or pattern that matches
    nothing, and for each contradiction. `inert` are the paths of linear layers on which LoRA has no effect, because the
    model reads their weight without calling them. They are left out where `lora.targets` names their component.
    """
    resolver = _Resolver(structure, inert)
    full = resolver.routers(adapt.router)
    experts = resolver.experts(adapt.experts)
    for index, target in enumerate(adapt.also):
        names, whole_layers = resolver.also(f"adapt.also[{index}]", target)
        full |= names
        experts |= whole_layers
    lora_linears, lora_experts = resolver.lora(adapt.lora, experts)
    if in_both := sorted(path for path in lora_linears if f"{path}.weight" in full):
        resolver.problems.append(f"adapt: {_some(in_both)} would train in full and with LoRA; choose one for each")
    if not (full or experts or lora_linears or lora_experts or resolver.problems):
        resolver.problems.append("adapt: nothing trains; set router, experts, lora or also")
    left_out = tuple(resolver.left_out)
    return (
        Selection(frozenset(full), experts, lora_experts, lora_linears, resolver.ranks, adapt.lora, left_out),
        resolver.problems,
    )


_MLP: tuple[Component, ...] = ("experts", "dense_mlp")
_OTHER_TARGETS: Mapping[str, tuple[Component, ...]] = {
    "all-linear": ("attention", *_MLP),
    **dict.fromkeys(
        ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "query_key_value", "self_attn"), ("attention",)
    ),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3", "mlp"), _MLP),
}
"""Names of linear layers in other models and tools -> components that hold such layers here, for hints."""
_UNREACHED = "only chooses among tokens or experts, by comparison, so no gradient reaches it"


class _Resolver:
    """Looks up the names and numbers of `adapt:` in a model structure.

    Its methods collect `problems` (messages), and `lora` also `ranks` and `left_out`, which have the form that they
    have in `Selection`. `inert` are the paths of linear layers on which LoRA has no effect.
    """

    def __init__(self, structure: ModelStructure, inert: Collection[str]) -> None:
        self.structure, self.inert = structure, inert
        self.left_out: dict[str, None] = {}
        self.ranks: dict[str, int] = {}
        self.moe_layers = {layer.index: layer for layer in structure.moe_layers}
        self.problems: list[str] = []

    def routers(self, layers: IdSet) -> set[str]:
        """Return the names of the router parameters in these layers that a gradient reaches."""
        chosen = set(self._layers("adapt.router", layers, self.moe_layers, "has no router"))
        routers = self.structure.parameters_of("router")
        return {router.name for router in routers if router.layer in chosen and router.has_gradient}

    def experts(self, config: ExpertsConfig | None) -> IdsByLayer:
        """Return layer index -> ids of the experts that train in full precision."""
        return {} if config is None else self._expert_ids("adapt.experts", config.layers, config.ids)

    def also(self, where: str, target: str) -> tuple[set[str], IdsByLayer]:
        """Return the parameter names, and the expert ids by layer, that an entry of `adapt.also` matches.

        `target` is a component, or a pattern of parameter names; `where` is the entry's key, for messages.
        """
        if target in COMPONENTS:
            matched = self.structure.parameters_of(target)
        else:
            matched = tuple(info for info in self.structure.parameters if fnmatchcase(info.name, target))
        if not matched and (first := self._tied_to(target)):
            self.problems.append(
                f"{where}: {target!r} is one weight with {first.name} in this model (tied), which would train with it; "
                f"write {first.component} to train both, or leave it out"
            )
        elif not matched:
            self.problems.append(f"{where}: {target!r} matches no parameter.{self._hint(target)}")
        elif not any(info.has_gradient for info in matched):
            self.problems.append(f"{where}: {target!r} {_UNREACHED} ({matched[0].name}); leave it out")
        names = {info.name for info in matched if info.has_gradient}
        layers = {}
        for layer in self.structure.moe_layers:
            stacks = {info.name for info in self.structure.parameters_of("experts") if info.layer == layer.index}
            if stacks <= names:
                layers[layer.index] = tuple(range(layer.shape.num_experts))
            elif stacks & names:
                self.problems.append(
                    f"{where}: {target!r} matches only part of the experts of layer {layer.index} "
                    f"({_some(stacks & names)}); experts train whole: write also: [experts], or use adapt.experts"
                )
            names -= stacks
        return names, layers

    def lora(self, config: ResolvedLora | None, trained: IdsByLayer) -> tuple[tuple[str, ...], IdsByLayer]:
        """Return the paths of the linear layers, and the expert ids by layer, that get low-rank factors.

        Experts in `trained`, which train in full precision, get none.
        """
        if config is None:
            return (), {}
        every_layer = range(self.structure.num_layers)
        if not isinstance(config.ids, str) and "experts" not in config.targets:
            self.problems.append("adapt.lora.ids: chooses experts, and adapt.lora.targets has no experts")
        layers = set(self._layers("adapt.lora.layers", config.layers, every_layer, "does not exist"))
        self._layers("adapt.lora.rank", tuple(sorted(layers_named(config.rank))), every_layer, "does not exist")
        linears: dict[str, None] = {}
        experts: IdsByLayer = {}
        of_layers = {linear.component for linear in self.structure.lora_layers().values() if linear.layer is not None}
        for index, target in enumerate(config.targets):
            where = f"adapt.lora.targets[{index}]"
            if target == "experts":
                in_layers: IdSet = tuple(sorted(layers & self.moe_layers.keys())) or "none"
                ids = self._expert_ids("adapt.lora", in_layers, config.ids)
                experts = {
                    layer: rest
                    for layer in ids
                    if (rest := tuple(e for e in ids[layer] if e not in trained.get(layer, ())))
                }
                for layer in experts:
                    self._set_rank(config, target, self.moe_layers[layer].experts, layer)
                if not experts and not self.problems:
                    self.problems.append(f"{where}: no frozen expert in the chosen layers to put LoRA on")
                continue
            is_component = target in COMPONENTS
            outside = config.layers == "all" or (is_component and target not in of_layers)  # such as lm_head
            paths = [
                path
                for path, linear in self.structure.lora_layers().items()
                if (linear.component == target if is_component else _matches(path, target))
                and (outside if linear.layer is None else linear.layer in layers)
            ]
            if not paths:
                self.problems.append(f"{where}: {target!r} matches no linear layer there.{self._hint(target, True)}")
            elif layers & self.moe_layers.keys() and "experts" in {*_OTHER_TARGETS.get(target, ())} - {*config.targets}:
                parts = ", ".join(sorted({self.structure.lora_layers()[path].component for path in paths}))
                self.problems.append(
                    f"{where}: {target!r} matches {paths[0]}, and none of the experts that tokens are routed to; name "
                    f"components: experts, or {parts} if only these are meant"
                )
            if tied := [path for path in paths if f"{path}.weight" in self.structure.tied]:
                self.problems.append(
                    f"{where}: {target!r} takes in {tied[0]}, which has one weight with "
                    f"{self.structure.tied[f'{tied[0]}.weight']} (tied), which trains as one; "
                    "name the other layers, or train both in full with adapt.also: [embedding]"
                )
            unreached = [path for path in paths if not self.structure.lora_layers()[path].has_gradient]
            if is_component:
                cannot = {*unreached, *self.inert}
                self.left_out |= dict.fromkeys(path for path in paths if path in cannot)
                paths = [path for path in paths if path not in cannot]
            elif unreached:
                self.problems.append(f"{where}: {target!r} {_UNREACHED} ({unreached[0]}); leave it out")
            for path in paths:
                self._set_rank(config, target, path, self.structure.lora_layers()[path].layer)
            linears |= dict.fromkeys(paths)
        return tuple(linears), experts

    def _set_rank(self, config: ResolvedLora, target: str, path: str, layer: int | None) -> None:
        """Put the rank of the factors on the module at `path` into `ranks`; report a layer without a rank, or with two.

        `target` is the entry of `adapt.lora.targets` that names the module, and `layer` its decoder layer, None for
        none.
        """
        rank = rank_of(config.rank, target, layer)
        if rank is None:
            where = f"{target!r} in layer {layer}" if layer is not None else f"{path}, which is in no layer"
            self.problems.append(f"adapt.lora.rank: has no rank for {where}; add one, or leave it out of targets")
        elif self.ranks.setdefault(path, rank) != rank:
            self.problems.append(
                f"adapt.lora.rank: {path} is named by two targets, with rank {self.ranks[path]} and with {rank}"
            )

    def _expert_ids(self, where: str, layers: IdSet, ids: IdSet | IdsByLayer) -> IdsByLayer:
        """Return layer index -> the ids that exist among `ids`, one list for all `layers` or ids by layer.

        Layers without a chosen expert are left out. `where` is the section of the run file, for messages.
        """
        chosen = {}
        in_layers = self._layers(f"{where}.layers", layers, self.moe_layers, "has no experts")
        if isinstance(ids, dict):
            named = self._layers(f"{where}.ids", tuple(ids), self.moe_layers, "has no experts")
            in_layers = [index for index in named if index in in_layers]
        for index in in_layers:
            count = self.moe_layers[index].shape.num_experts
            given = ids[index] if isinstance(ids, dict) else ids
            wrong = [] if isinstance(given, str) else [expert for expert in given if expert >= count]
            if wrong:
                self.problems.append(
                    f"{where}.ids: expert {_numbers(wrong)} does not exist; layer {index} has experts 0-{count - 1}"
                )
                break
            chosen[index] = tuple(range(count)) if given == "all" else () if given == "none" else given
        return {index: experts for index, experts in chosen.items() if experts}

    def _layers(self, where: str, layers: IdSet, existing: Iterable[int], wrong_how: str) -> list[int]:
        """Return the chosen layers that exist, and add a line to `problems` for the others.

        `where` is the key of the run file, and `wrong_how` what the message says of another layer, such as "has no
        router".
        """
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

    def _tied_to(self, target: str) -> ParameterInfo | None:
        """Return the parameter that `target` matches only by the second name of a tied weight; None if there is
        none."""
        linears = self.structure.lora_layers()
        names = {
            first
            for name, first in self.structure.tied.items()
            if _matches(name, target)
            or _matches(path := name.rpartition(".")[0], target)
            or (path in linears and linears[path].component == target)
        }
        return next((info for info in self.structure.parameters if info.name in names), None)

    def _hint(self, target: str, linear: bool = False) -> str:
        """Return a suggestion, for a message, of the components or names that the user may have meant by `target`: of
        those with linear layers alone, if `linear`."""
        have = {info.component for info in self.structure.lora_layers().values()} | {"experts"}
        components = [c for c in COMPONENTS if self.structure.parameters_of(c) and (not linear or c in have)]
        if meant := [c for c in _OTHER_TARGETS.get(target.rpartition(".")[2], ()) if c in components]:
            return f" Components have names of their own here: write [{', '.join(meant)}]."
        names = {piece for path in self.structure.lora_layers() for piece in path.split(".") if not piece.isdigit()}
        return suggest(target, {*components, *(names if linear else ())} - {target}) or (
            f" Components: {', '.join(components)}; patterns match names such as {self.structure.parameters[-1].name!r}"
        )


def _matches(path: str, target: str) -> bool:
    """Return whether a module path matches a pattern as a whole, or ends in the name `target` (such as `q_proj`)."""
    return fnmatchcase(path, target) or path.endswith(f".{target}") or path == target


def _numbers(values: Iterable[int]) -> str:
    return ranges(values).replace(",", ", ")


def _some(names: Iterable[str], most: int = 3) -> str:
    return ", ".join(first_of(sorted(names), most))
