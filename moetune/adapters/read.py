"""`read`: detect an adapter's layout, and read it into an `Adapter`.

The layouts and their sources are in docs/reference/adapters.md:

    stacked       two matrices for all experts of a projection, in one of the orders of stacked.py
    per-expert    two matrices for each expert and projection, such as `….experts.3.w1.lora_A`
    3d            two tensors with the expert as first axis, such as `….experts.gate_proj.lora_A` [E, r, in], or with
                  the first axis 1 for a factor that all experts share

A role is a projection of an expert, as in base.py. A slot is the depth of PEFT's wrapper that holds stacked factors:
the number of `.base_layer` in their names.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from moetune.adapters.base import AdapterBase, sizes_of, stacks_of
from moetune.adapters.evidence import sign_of
from moetune.adapters.factors import GATE_UP, Adapter, Factors, fused
from moetune.adapters.files import StoredAdapter
from moetune.adapters.sketch import differing
from moetune.adapters.stacked import ORDERS, Order, named_order
from moetune.compat.peft import is_targeted, targets_module
from moetune.errors import UserError, counted, first_of, note_once, time_limit
from moetune.models.moe import MoeLayer

LAYOUTS = (*ORDERS, "per-expert", "3d")
"""Names of the layouts, which are the values of `--from`."""

_PATTERNS = "a pattern in adapter_config.json"
_OF_TOWER = "is of a part that text never reaches, which is not read: merge with PEFT (merge_and_unload)"

Pair = tuple[str, Tensor, Tensor]
"""A stored name, and the two factors of a module."""


@dataclass
class Read:
    """What `read` found in an adapter.

    Attributes:
        adapter: the factors and parameters that belong to the base.
        layout: one of `LAYOUTS`; None for an adapter without factors on experts.
        reasons: from what the layout was concluded, one sentence each.
        unread: a line for each tensor that has no part in `adapter`.
        doubts: how the values of the factors contradict the layout: they look like another, or in a layout that was
            detected, are not what moetune recorded when it wrote the file.
        wrong: what else would be read wrongly: ranks in the settings, or what moetune recorded, differ.
        ranks: those of these lines that are of ranks.
        frozen: name of a parameter -> the base's value of it, which PEFT stores beside the factors of `lm_head`: a part
            of the base that the adapter was made on, and not of the adapter.
        names: linear layer, or parameter of stacked factors -> the names by which the settings may mean it.
    """

    adapter: Adapter
    layout: str | None = None
    reasons: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    ranks: list[str] = field(default_factory=list)
    frozen: dict[str, Tensor] = field(default_factory=dict)
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def problems(self) -> list[str]:
        """What was trained and is ignored, or would be read wrongly, one line each."""
        return [*self.unread, *self.doubts, *self.wrong]


def read(stored: StoredAdapter, base: AdapterBase, layout: str | None = None) -> Read:
    """Read an adapter of a base, in the layout with this name or, for None, in the one that is detected.

    What does not fit is in `Read.problems`. A warning is printed of what PEFT would leave out.

    Raises:
        UserError: names and shapes allow two layouts, or none; or `layout` is not one of those that they allow.
    """
    parsed = _Reader(without_idle_towers(stored, base), base, layout).read()
    with suppress(ValueError), time_limit(_PATTERNS):  # settings that PEFT refuses
        if ignored := left_out(stored, parsed):
            unread = f"its settings leave out {' '.join(first_of(ignored, 1))}"
            note_once(f"warning: {stored}: {unread}; PEFT ignores such factors, and moetune reads them")
    return parsed


def without_idle_towers(stored: StoredAdapter, base: AdapterBase) -> StoredAdapter:
    """Return an adapter without the factors of modules that text never reaches, such as a vision tower, if their update
    is zero: training on text leaves them so. Print a note of it."""
    idle = {
        name.partition(".lora_")[0]
        for name, tensor in stored.tensors.items()
        if ".lora_B" in name and _in_tower(name, base) and not tensor.any()
    }
    if not idle:
        return stored
    what = f"factors of {counted(len(idle), 'module')}, as {min(idle)}"
    note_once(f"{stored}: {what}, are zero and not read: text never reaches them")
    kept = {name: tensor for name, tensor in stored.tensors.items() if name.partition(".lora_")[0] not in idle}
    return replace(stored, tensors=kept)


def _in_tower(name: str, base: AdapterBase) -> bool:
    paths = base.structure.dropped
    return any(f"{name}.".startswith((f"{path}.", f"{path.removeprefix('model.')}.")) for path in paths)


def left_out(stored: StoredAdapter, parsed: Read) -> list[str]:
    """Return the layers and parameters that an adapter has factors of and its settings leave out, so that PEFT ignores
    these; `ValueError` for settings that PEFT refuses."""
    return [
        part for part, names in parsed.names.items() if not any(is_targeted(stored.settings, name) for name in names)
    ]


def sure(parsed: Read, stored: StoredAdapter) -> Read:
    """Return `parsed`; raise `UserError` if values of the factors contradict its layout, so that the user names one."""
    if parsed.doubts:
        raise UserError(
            f"{stored}: {parsed.doubts[0]}; say in which layout it is: moetune adapter convert … "
            f"--from {'|'.join(LAYOUTS)}"
        )
    return parsed


class _Reader:
    """Reads one adapter: call `read` once.

    Attributes:
        parsed: the result.
        linears: path of a linear layer -> its factors.
        slots: path of a layer's experts -> slot -> stacked factors.
        roles: path of a layer's experts -> role -> "A" or "B" -> expert id, None for all experts -> factor.
        named: (path of a layer's experts, role) -> a stored name of it, by which the settings give its scale.
        saved: parameter -> value.
        is_apart: whether a name has an expert's number.
    """

    def __init__(self, stored: StoredAdapter, base: AdapterBase, layout: str | None) -> None:
        self.stored, self.base, self.layout = stored, base, layout
        self.parsed = Read(Adapter({}, {}))
        self.linears: dict[str, Factors] = {}
        self.slots: dict[str, dict[int, Pair]] = defaultdict(dict)
        self.roles: dict[str, dict[str, dict[str, dict[int | None, Tensor]]]] = defaultdict(
            lambda: defaultdict(lambda: {"A": {}, "B": {}})
        )
        self.named: dict[tuple[str, str], str] = {}
        self.saved: dict[str, Tensor] = {}
        self.is_apart = False

    def read(self) -> Read:
        parsed, stored, layout = self.parsed, self.stored, self.layout
        for module, half in self._whole_tensors().items():
            self._sort(module, half)
        experts: dict[str, dict[str, Factors]] = {}
        own_layout, reason = "3d", "3-dimensional factors"
        if self.is_apart:
            own_layout, reason = "per-expert", "the tensors' names have the expert's number"
        if self.slots and self.roles:
            raise UserError(f"{stored} mixes layouts: stacked and {own_layout}; it is read by no program")
        if self.slots:
            experts = self._read_stacks()
        elif self.roles:
            parsed.layout = own_layout
            parsed.reasons.append(reason)
            if layout not in (None, own_layout):
                raise UserError(f"{stored} is not {layout}: {reason} ({own_layout}); leave --from out")
            experts = {path: self._read_roles(self.base.layers[path]) for path in sorted(self.roles)}
        elif layout is not None:
            parsed.reasons.append(f"it has no factors on experts, which --from {layout} is about")
        parsed.adapter = Adapter(self.linears, {path: own for path, own in experts.items() if own}, self.saved)
        noted = stored.record.get("sketch")
        parsed.wrong += self._lost(parsed.adapter) if noted is None else ()
        for name in () if noted is None or parsed.unread else differing(parsed.adapter, noted):
            (parsed.doubts if layout is None else parsed.wrong).insert(
                0, f"{name}: the update is not the one that moetune noted when it wrote the file"
            )
        return parsed

    def _lost(self, adapter: Adapter) -> Iterator[str]:
        """Yield a line for what the settings name and the base has, and of which the file lacks factors."""
        settings, with_factors, linears = (
            self.stored.settings,
            adapter.named().keys(),
            self.base.structure.lora_layers(),
        )
        named = defaultdict[tuple[str, str], set[str]](set)  # setting, and a name in it -> all that it means
        # each expert's projection may have the name of a dense layer's, and be all that the target meant
        of_experts = {unwrapped(name.partition(".lora_")[0]) for name in self.stored.tensors} - linears.keys()
        leaves = {path.rpartition(".")[2] for path in of_experts}
        with suppress(ValueError), time_limit(_PATTERNS):  # settings that PEFT refuses
            for path in linears:
                if (leaf := path.rpartition(".")[2]) not in leaves and targets_module(settings, path):
                    named["target_modules", leaf].add(path)
        of_all = not settings.get("exclude_modules") and not settings.get("layers_to_transform")
        for path, layer in self.base.layers.items() if of_all else ():
            for projection, stack in stacks_of(layer).items():
                for target in self.stored.scales.target_parameters or ():
                    if f".{path}.{stack}".endswith(f".{target}"):
                        named["target_parameters", target].add(f"{path}.{projection}")
        for (setting, target), names in named.items():
            if lost := sorted(names - with_factors):
                of = "it" if len(lost) == len(names) else f"{len(lost)} of {len(names)} layers, as {lost[0]}"
                yield f"{target}: is in {setting} of adapter_config.json, and the file has no factors of {of}"

    # --- Names ------------------------------------------------------------------------------------------------------

    def _whole_tensors(self) -> dict[str, dict[str, Tensor]]:
        """Sort what is no factor into saved and frozen parameters; return module -> "A" or "B" -> factor."""
        base, unread, parameters = self.base, self.parsed.unread, self.base.parameters
        halves: dict[str, dict[str, Tensor]] = defaultdict(dict)
        whole, with_factors = {}, set()
        for name, tensor in sorted(self.stored.tensors.items()):
            module, mark, rest = name.partition(".lora_")
            if mark:
                with_factors.add(unwrapped(module))
            if rest in ("A", "B", "A.weight", "B.weight"):
                halves[module][rest[0]] = tensor
            elif mark:
                remedy = "; factors of an embedding: merge with PEFT (merge_and_unload)" if "embedding" in name else ""
                unread.append(f"{name}: is no factor of plain LoRA{remedy}")
            else:
                whole[name] = tensor
        for name, tensor in whole.items():
            plain = base.parameter(unwrapped(name))
            if plain is None:
                what = f"belongs to no parameter of {base.name!r}"
                unread.append(f"{name}: {_OF_TOWER if _in_tower(name, base) else what}")
            elif (shape := parameters[plain].shape) != tensor.shape:
                resized = len(shape) == 2 and shape[1:] == tensor.shape[1:]
                unread.append(
                    f"{name}: is {[*tensor.shape]}, and that of {base.name!r} is {[*shape]}"
                    + ("; give the base with as many rows, which it was trained on" if resized else "")
                )
            else:
                is_frozen = ".base_layer." in name and unwrapped(name).rpartition(".")[0] in with_factors
                (self.parsed.frozen if is_frozen else self.saved)[plain] = tensor
        for saved in self.stored.scales.modules_to_save or ():
            if any(f".{saved}." in f".{name}" for name in parameters) and not any(
                f"{saved}." in name for name in whole
            ):
                self.parsed.wrong.append(f"{saved}: is in modules_to_save of adapter_config.json, and not in the file")
        return halves

    def _sort(self, module: str, half: Mapping[str, Tensor]) -> None:
        """Sort the factors of a module by what they belong to in the base."""
        base, unread = self.base, self.parsed.unread
        inner = module
        while inner.endswith(".base_layer"):
            inner = inner.removesuffix(".base_layer")
        if (projection := base.projection(module)) is not None:
            layer, expert, role = projection
            if expert is not None and expert >= layer.shape.num_experts:
                unread.append(f"{module}: {base.name!r} has {layer.shape.num_experts} experts")
                return
            self.is_apart |= expert is not None
            for factor, tensor in half.items():
                if self.roles[layer.experts][role][factor].setdefault(expert, tensor) is not tensor:
                    unread.append(f"{module}: is there twice, under two names")
            self.named.setdefault((layer.experts, role), module)
        elif len(half) < 2:
            unread.append(f"{module}: lora_{'B' if 'A' in half else 'A'} is missing")
        elif (moe_layer := base.experts(inner)) is not None:
            self.slots[moe_layer.experts][module.count(".base_layer")] = inner, half["A"], half["B"]
        elif (path := base.linear(module)) is not None and path not in self.linears:
            info, A, B = base.structure.lora_layers()[path], half["A"], half["B"]
            if A.ndim == B.ndim == 2 and (A.shape[1], *B.shape) == (info.in_features, info.out_features, len(A)):
                self.linears[path] = self._factors(module, A, B)
                self.parsed.names[path] = module, path
            else:
                unread.append(
                    f"{path}: lora_A {[*A.shape]} and lora_B {[*B.shape]} do not map {info.in_features} features to "
                    f"{info.out_features}"
                )
        else:
            what = f"has factors; {'is there twice' if path else f'{base.name!r} has no such layer'}"
            unread.append(f"{module}: {_OF_TOWER if _in_tower(module, base) else what}")

    def _factors(self, target: str, A: Tensor, B: Tensor) -> Factors:
        """Return factors with the scale that the settings give `target`, in a file of moetune's own without the ranks
        that were filled with zeros.

        Report a rank in the settings other than that of the factors: other programs derive the scale from it.
        """
        rank, scales = A.shape[-2], self.stored.scales
        if (noted := scales.rank(target)) != rank:
            other = f"{target}: its factors have rank {rank}, and adapter_config.json says {noted}"
            self.parsed.wrong.append(other)
            self.parsed.ranks.append(other)
        factors = Factors(A, B, scales.of(target, rank))
        return factors.trimmed() if self.stored.record else factors

    # --- Stacked ----------------------------------------------------------------------------------------------------

    def _read_stacks(self) -> dict[str, dict[str, Factors]]:
        """Return path of experts -> projection -> factors, from stacked matrices in the order that is detected."""
        possible = {
            (path, depth): self._fits(path, slot) for path, own in self.slots.items() for depth, slot in own.items()
        }
        ways = set.intersection(*({*fits} for fits in possible.values()))
        order = self._order([name for name, order in ORDERS.items() if order.is_swapped in ways])
        experts: dict[str, dict[str, Factors]] = {}
        for path, slots in self.slots.items():
            layer, own = self.base.layers[path], dict[str, Factors]()
            for depth, (inner, first, second) in sorted(slots.items(), reverse=True):
                # of two projections that fit, the outermost wrapper has down
                projection = possible[path, depth][order.is_swapped][-1 if depth else 0]
                if projection in own:
                    raise UserError(f"{self.stored}: {path} has factors of one projection twice")
                A, B = order.read(first, second, layer.shape.num_experts)
                parameter = f"{path}.{stacks_of(layer)[projection]}"
                own[projection] = self._factors(parameter, A, B)
                if self.parsed.layout != "megatron":  # whose settings are not PEFT's own
                    self.parsed.names[parameter] = path, parameter, f"{inner}.{stacks_of(layer)[projection]}"
            experts[path] = dict(sorted(own.items(), reverse=True))
        return experts

    def _fits(self, path: str, slot: Pair) -> dict[bool, list[str]]:
        """Return whether first and second factors are exchanged -> the projections that a slot's shapes fit then.

        Raises `UserError` if there are none.
        """
        layer, (name, first, second) = self.base.layers[path], slot
        shape, fits = layer.shape, defaultdict[bool, list[str]](list)
        if first.ndim == second.ndim == 2 and len(first) == second.shape[1] and not len(first) % shape.num_experts:
            for projection, size in sorted(sizes_of(layer).items()):
                for is_swapped in (False, True):
                    if (first.shape[1], len(second)) == (size[::-1] if is_swapped else size):
                        fits[is_swapped].append(projection)
        if not fits:
            raise UserError(
                f"{self.stored}: {name}: lora_A {[*first.shape]} and lora_B {[*second.shape]} fit no projection of "
                f"{self.base.name!r}, with {shape.num_experts} experts of {shape.hidden} x {shape.intermediate}"
            )
        return fits

    def _order(self, possible: list[str]) -> Order:
        """Return the order of all stacked factors, of those that their shapes allow, and set the layout in `parsed`.

        It is concluded from what the files say of it, and from the values of the factors.
        """
        parsed, layout = self.parsed, self.layout
        stacks = [
            (first, second, self.base.layers[path].shape.num_experts)
            for path, slots in self.slots.items()
            for _, first, second in slots.values()
        ]
        parsed.layout, because = self._said(possible)
        order = ORDERS[parsed.layout]
        if layout is None and all(experts == 1 or len(first) == experts for first, _, experts in stacks):
            order = Order(False, order.is_swapped)
            parsed.layout, because = (
                named_order(order),
                "with one rank or one expert all orders of the experts are the same",
            )
        parsed.reasons.append(because)
        if order.is_swapped and layout is None:
            parsed.reasons.append(
                "its first factors map from the outputs: their shapes are those of the base's, exchanged"
            )
        sign = sign_of(stacks)
        if sign is not None and (sign.verdict == "grouped") != order.is_grouped:
            likely = named_order(Order(not order.is_grouped, order.is_swapped))
            parsed.doubts.append(
                f"the experts' lora_B is read as {parsed.layout}, and looks like {likely}: {sign.because}"
            )
        elif sign is not None:
            parsed.reasons.append(f"the numbers agree: {sign.because}")
        return order

    def _said(self, possible: list[str]) -> tuple[str, str]:
        """Return which of the stacked layouts `possible` the user or the files name, and the reason as text.

        Raises:
            UserError: the user named another; or shapes allow exchanged factors and others, and nothing decides.
        """
        stored, settings, noted = self.stored, self.stored.settings, self.stored.record.get("layout")
        if self.layout is not None:
            if self.layout not in possible:
                allowed = " or ".join(possible) or "none"
                raise UserError(f"{stored} is not {self.layout}: the shapes of its factors are those of {allowed}")
            return self.layout, f"--from {self.layout}"
        if noted in possible:
            return noted, f"moetune noted the layout {noted} in the file"
        if len(possible) != 2:
            what = "as PEFT writes it and as PEFT before 0.19.1 did" if possible else "in no one way"
            raise UserError(
                f"{stored}: the factors of its experts fit {self.base.name!r} {what}, which their shapes do not tell; "
                f"give --from {'|'.join(ORDERS)}"
            )
        plain, grouped = possible
        mark, mapping = settings.get("lora_B_layout"), settings.get("auto_mapping")
        if mark in ("rank_major", "grouped_by_expert"):
            name = grouped if mark == "grouped_by_expert" else plain
            return name, f"lora_B_layout in adapter_config.json is {mark}"
        if isinstance(mapping, dict) and mapping.get("unsloth_fixed"):
            return grouped, "Unsloth wrote it (auto_mapping.unsloth_fixed), before it noted lora_B_layout"
        if ORDERS[plain].is_swapped and "layers_to_transform" not in settings:
            return (
                grouped,
                "its settings are not PEFT's own and its factors are exchanged, as Megatron-Bridge writes them",
            )
        return plain, (
            "nothing in the files tells PEFT's order of the experts from that of Unsloth before September 2026; read "
            "as PEFT's (else: --from unsloth-grouped)"
        )

    # --- Per expert, and 3d -----------------------------------------------------------------------------------------

    def _read_roles(self, layer: MoeLayer) -> dict[str, Factors]:
        """Return projection -> factors of a layer, gate and up fused."""
        unread, factors = self.parsed.unread, dict[str, Factors]()
        for role, halves in sorted(self.roles[layer.experts].items()):
            A, B = (self._of_all_experts(layer, role, factor, own) for factor, own in halves.items())
            if A is None or B is None:
                continue
            if A.shape[1] != B.shape[2]:
                unread.append(f"{layer.experts} {role}: lora_A has rank {A.shape[1]} and lora_B {B.shape[2]}")
                continue
            factors[role] = self._factors(self.named[layer.experts, role], A, B)
            ids = [{*range(len(A))} if None in own else own.keys() for own in halves.values()]
            for expert in sorted(ids[0] ^ ids[1], key=lambda expert: expert or 0):
                unread.append(f"{layer.experts}.{expert} {role}: has one of the two factors only")
        if not layer.shape.has_gate and "up" in factors:
            factors[GATE_UP] = factors.pop("up")
        if factors.keys() & {"gate", "up"}:
            factors[GATE_UP] = fused(layer.shape, factors.pop("gate", None), factors.pop("up", None))
        return dict(sorted(factors.items(), reverse=True))

    def _of_all_experts(
        self, layer: MoeLayer, role: str, factor: str, own: Mapping[int | None, Tensor]
    ) -> Tensor | None:
        """Return one factor of all experts, [E, r, in] or [E, out, r], zero for those without; None, with a line in
        `unread`, if it does not fit."""
        shape, count = layer.shape, layer.shape.num_experts
        into, out = sizes_of(layer)[GATE_UP if role in ("gate", "up") else role]
        if role in ("gate", "up") and shape.has_gate:
            out //= 2
        where, features = f"{layer.experts} {role}: lora_{factor}", into if factor == "A" else out
        if not own:
            self.parsed.unread.append(f"{where} is missing")
            return None
        stacked = own.get(None)
        if stacked is None:
            example = next(iter(own.values()))
            if {part.shape for part in own.values()} != {example.shape}:
                self.parsed.unread.append(f"{where} has another rank for some experts")
                return None
            stacked = torch.stack([own.get(expert, torch.zeros_like(example)) for expert in range(count)])
        elif stacked.ndim == 3 and len(stacked) == 1:
            stacked = stacked.expand(count, -1, -1)
        is_twice = None in own and len(own) > 1
        if (
            is_twice
            or stacked.ndim != 3
            or (len(stacked), stacked.shape[2 if factor == "A" else 1]) != (count, features)
        ):
            self.parsed.unread.append(
                f"{where} {[*stacked.shape[1:]]} does not fit {count} experts of {into} features to {out}"
            )
            return None
        return stacked


def unwrapped(name: str) -> str:
    """Return a stored name without `base_layer` and `modules_to_save`, the parts that PEFT's wrappers add to it."""
    return ".".join(part for part in name.split(".") if part not in ("base_layer", "modules_to_save"))
