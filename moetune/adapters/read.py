"""`read`: detect which layout an adapter is stored in, and read it into an `Adapter`.

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
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moetune.adapters.base import AdapterBase, sizes_of, stacks_of
from moetune.adapters.evidence import sign_of
from moetune.adapters.factors import GATE_UP, Adapter, Factors, fused
from moetune.adapters.files import StoredAdapter
from moetune.adapters.sketch import differing
from moetune.adapters.stacked import ORDERS, Order, named_order
from moetune.errors import UserError
from moetune.models.moe import MoeLayer

LAYOUTS = (*ORDERS, "per-expert", "3d")
"""Names of the layouts, which are the values of `--from`."""


@dataclass
class Read:
    """What `read` found in an adapter.

    Attributes:
        adapter: the factors and parameters that belong to the base.
        layout: one of `LAYOUTS`; None for an adapter without factors on experts.
        reasons: from what the layout was concluded, one sentence each.
        problems: what was trained and is ignored, or would be read wrongly, one line each.
        unread: those of the problems about tensors that have no part in `adapter`.
        altered: those of the problems about updates that differ from what moetune recorded when it wrote the file.
        is_unsure: whether the values of the factors contradict the layout that names, shapes or settings indicate.
        zero: projection (`<experts>.gate_up`) -> ids of the experts that have factors whose update is zero.
        frozen: name of a parameter -> the base's value of it, which PEFT stores beside the factors of `lm_head`: a part
            of the base that the adapter was made on, and not of the adapter.
    """

    adapter: Adapter
    layout: str | None
    reasons: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    altered: list[str] = field(default_factory=list)
    is_unsure: bool = False
    zero: dict[str, list[int]] = field(default_factory=dict)
    frozen: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class _Pairs:
    """The tensors of an adapter in pairs of factors A and B, sorted by what they belong to.

    Attributes:
        linears: path of a linear layer -> (stored name, A, B).
        slots: path of a layer's experts -> slot -> (stored name, first matrix, second matrix).
        apart: path of a layer's experts -> role -> expert id -> {"A" or "B": tensor}.
        whole: path of a layer's experts -> role -> {"A" or "B": tensor [E or 1, …]}.
        named: (path of a layer's experts, role) -> a stored name of it, by which the settings give its scale.
        saved: parameter -> value.
        frozen: parameter -> the base's value of it, where its module has factors.
        unread: a line for each tensor that belongs to nothing, with the reason.
    """

    linears: dict[str, tuple[str, Tensor, Tensor]] = field(default_factory=dict)
    slots: dict[str, dict[int, tuple[str, Tensor, Tensor]]] = field(default_factory=lambda: defaultdict(dict))
    apart: dict[str, dict[str, dict[int, dict[str, Tensor]]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
    )
    whole: dict[str, dict[str, dict[str, Tensor]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(dict))
    )
    named: dict[tuple[str, str], str] = field(default_factory=dict)
    saved: dict[str, Tensor] = field(default_factory=dict)
    frozen: dict[str, Tensor] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)


def read(stored: StoredAdapter, base: AdapterBase, layout: str | None = None) -> Read:
    """Read an adapter of a base, in the layout with this name or, for None, in the one that is detected.

    What does not fit is in `Read.problems`.

    Raises:
        UserError: names and shapes allow two layouts, or none; or `layout` is not one of those that they allow.
    """
    pairs = _sort(stored, base)
    found = Read(Adapter({}, {}), None, unread=list(pairs.unread), frozen=pairs.frozen)
    linears = {}
    for path, (name, A, B) in pairs.linears.items():
        info = base.structure.lora_layers()[path]
        if A.ndim != 2 or B.ndim != 2 or (A.shape[1], *B.shape) != (info.in_features, info.out_features, len(A)):
            found.unread.append(
                f"{path}: lora_A {[*A.shape]} and lora_B {[*B.shape]} do not map {info.in_features} features to "
                f"{info.out_features}"
            )
            continue
        _check_rank(found, stored, name, len(A))
        linears[path] = Factors(A, B, stored.scales.of(name, len(A))).trimmed(_ranks(stored).get(path))
    experts: dict[str, dict[str, Factors]] = {}
    present: dict[str, dict[str, frozenset[int]]] = {}
    kinds = {"stacked": pairs.slots, "per-expert": pairs.apart, "3d": pairs.whole}
    if there := [kind for kind, held in kinds.items() if held]:
        if pairs.slots and len(there) > 1:
            raise UserError(f"{stored} mixes layouts: {' and '.join(there)}; it is read by no program")
        if pairs.slots:
            order, names = _order(stored, base, pairs, layout, found)
            for path, slots in pairs.slots.items():
                experts[path] = _from_slots(stored, base.layers[path], slots, order, names[path], found)
                present[path] = {name: _nonzero_ids(factors) for name, factors in experts[path].items()}
        else:
            found.layout = "per-expert" if pairs.apart else "3d"
            found.reasons.append(
                "the tensors' names have the expert's number" if pairs.apart else "3-dimensional factors"
            )
            if layout not in (None, found.layout):
                raise UserError(f"{stored} is not {layout}: {found.reasons[-1]} ({found.layout}); leave --from out")
            for path in sorted({*pairs.apart, *pairs.whole}):
                experts[path], present[path] = _from_roles(stored, base.layers[path], pairs, found)
    elif layout is not None:
        found.reasons.append(f"it has no factors on experts, which --from {layout} is about")
    found.adapter = Adapter(linears, {path: own for path, own in experts.items() if own}, present, pairs.saved)
    for name, factors in found.adapter.named().items():
        if factors.A.ndim == 3:
            ids = present[name.rpartition(".")[0]][name.rpartition(".")[2]]
            zero = [e for e in sorted(ids) if not factors.B[e].any() or not factors.A[e].any()]
            if zero:
                found.zero[name] = zero
    found.problems = [*found.unread, *found.problems]
    _compare_sketch(stored, found)
    return found


def sure(found: Read, stored: StoredAdapter) -> Read:
    """Return `found`; raise `UserError` if values of the factors contradict its layout, so that the user names one."""
    if found.is_unsure or found.altered:
        reason = (found.altered or [line for line in found.problems if "looks like" in line])[0]
        raise UserError(
            f"{stored}: {reason}; say in which layout it is: moetune adapter convert … --from {'|'.join(LAYOUTS)}"
        )
    return found


def _sort(stored: StoredAdapter, base: AdapterBase) -> _Pairs:
    """Sort the tensors of an adapter by what they belong to in its base."""
    pairs = _Pairs()
    parameters = {**dict(base.plain.named_parameters(remove_duplicate=False)), **dict(base.plain.named_buffers())}
    with_factors = {unwrapped(_factor_of(name)[0]) for name in stored.tensors}
    halves: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in sorted(stored.tensors.items()):
        module, factor, rest = _factor_of(name)
        if factor:
            if rest not in ("", "weight"):
                remedy = "; factors of an embedding: merge with PEFT (merge_and_unload)" if "embedding" in name else ""
                pairs.unread.append(f"{name}: is no factor of plain LoRA{remedy}")
            else:
                halves[module][factor] = tensor
            continue
        plain = unwrapped(name)
        if plain not in parameters:
            pairs.unread.append(f"{name}: belongs to no parameter of {base.name!r}")
        elif (here := parameters[plain].shape) != tensor.shape:
            resized = len(here) == 2 and here[1:] == tensor.shape[1:]
            pairs.unread.append(
                f"{name}: is {[*tensor.shape]}, and that of {base.name!r} is {[*here]}"
                + ("; give the base with as many rows, which it was trained on" if resized else "")
            )
        elif ".base_layer." in name and plain.rpartition(".")[0] in with_factors:
            pairs.frozen[plain] = tensor
        else:
            pairs.saved[plain] = tensor
    for module, half in halves.items():
        inner = module
        while inner.endswith(".base_layer"):
            inner = inner.removesuffix(".base_layer")
        depth = module.count(".base_layer")
        if (one := base.expert(module)) is not None:
            layer, expert, role = one
            if expert >= layer.shape.num_experts:
                pairs.unread.append(f"{module}: {base.name!r} has {layer.shape.num_experts} experts")
                continue
            pairs.apart[layer.experts][role][expert] = half
            pairs.named.setdefault((layer.experts, role), module)
        elif (every := base.all_experts(module)) is not None:
            pairs.whole[every[0].experts][every[1]] = half
            pairs.named.setdefault((every[0].experts, every[1]), module)
        elif len(half) < 2:
            pairs.unread.append(f"{module}: lora_{'B' if 'A' in half else 'A'} is missing")
        elif (of := base.experts(inner)) is not None:
            pairs.slots[of.experts][depth] = inner, half["A"], half["B"]
        elif (path := base.linear(module)) is not None:
            pairs.linears[path] = module, half["A"], half["B"]
        else:
            pairs.unread.append(f"{module}: has factors, and {base.name!r} has no such layer")
    return pairs


def unwrapped(name: str) -> str:
    """Return a stored name without `base_layer` and `modules_to_save`, the parts that PEFT's wrappers add to it."""
    return ".".join(part for part in name.split(".") if part not in ("base_layer", "modules_to_save"))


def _factor_of(name: str) -> tuple[str, str, str]:
    """Split a factor's name: return the module, `A` or `B`, and what follows; ("", "", "") if it is no factor."""
    for factor in "AB":
        module, found, rest = name.partition(f".lora_{factor}")
        if found:
            return module, factor, rest.removeprefix(".")
    if ".lora_" in name:
        return name, "A", "other"
    return "", "", ""


def _order(
    stored: StoredAdapter, base: AdapterBase, pairs: _Pairs, layout: str | None, found: Read
) -> tuple[Order, dict[str, dict[int, str]]]:
    """Return the order of all stacked factors, and path of experts -> slot -> projection; set the layout in `found`.

    The order is concluded from shapes, from what the files say of it, and from the values of the factors.
    """
    is_swapped, names = _by_shape(stored, base, pairs, layout)
    stacks = [
        (first, second, base.layers[path].shape.num_experts)
        for path, slots in pairs.slots.items()
        for _, first, second in slots.values()
    ]
    sign = sign_of(stacks)
    is_grouped, because = _grouping(stored, layout, is_swapped)
    same = all(experts == 1 or len(first) == experts for first, _, experts in stacks)
    if same and layout is None:
        is_grouped, because = False, "with one rank or one expert all orders of the experts are the same"
    order = Order(is_grouped, is_swapped)
    found.layout = named_order(order)
    found.reasons.append(because)
    if is_swapped and layout is None:
        found.reasons.append("its first factors map from the outputs: their shapes are those of the base's, exchanged")
    if sign is not None and (sign.verdict == "grouped") != order.is_grouped:
        other = named_order(Order(not order.is_grouped, is_swapped))
        found.is_unsure = layout is None
        found.problems.append(f"the experts' lora_B is read as {found.layout}, and looks like {other}: {sign.because}")
    elif sign is not None:
        found.reasons.append(f"the numbers agree: {sign.because}")
    return order, names


def _grouping(stored: StoredAdapter, layout: str | None, is_swapped: bool) -> tuple[bool, str]:
    """Return whether the expert is the slowest index in the second matrices, and the reason as text.

    `layout` is the one that the user named, None to conclude it from the files; `is_swapped` as in `Order`.
    """
    if layout is not None:
        return ORDERS[layout].is_grouped, f"--from {layout}"
    noted = stored.record.get("layout")
    if noted in ORDERS:
        return ORDERS[noted].is_grouped, f"moetune noted the layout {noted} in the file"
    mark = stored.settings.get("lora_B_layout")
    if mark in ("rank_major", "grouped_by_expert"):
        return mark == "grouped_by_expert", f"lora_B_layout in adapter_config.json is {mark}"
    mapping = stored.settings.get("auto_mapping")
    if isinstance(mapping, dict) and mapping.get("unsloth_fixed"):
        return True, "Unsloth wrote it (auto_mapping.unsloth_fixed), before it noted lora_B_layout"
    if is_swapped and "layers_to_transform" not in stored.settings:
        return True, "its settings are not PEFT's own and its factors are exchanged, as Megatron-Bridge writes them"
    return False, (
        "nothing in the files tells PEFT's order of the experts from that of Unsloth before September 2026; read as "
        "PEFT's (else: --from unsloth-grouped)"
    )


def _by_shape(
    stored: StoredAdapter, base: AdapterBase, pairs: _Pairs, layout: str | None
) -> tuple[bool, dict[str, dict[int, str]]]:
    """Return whether first and second factors are exchanged, and path of experts -> slot -> projection.

    Shapes are compared with the base's. Where a projection is square, the other projection or another layer decides.

    Raises:
        UserError: a shape fits no projection; or all are square, and nothing decides.
    """
    possible: dict[str, dict[int, set[tuple[str, bool]]]] = {}
    for path, slots in pairs.slots.items():
        layer = base.layers[path]
        for depth, (name, first, second) in slots.items():
            fits = {
                (projection, is_swapped)
                for projection, (into, out) in sizes_of(layer).items()
                for is_swapped, (one, other) in ((False, (into, out)), (True, (out, into)))
                if first.ndim == second.ndim == 2
                and (first.shape[1], second.shape[0]) == (one, other)
                and len(first) == second.shape[1]
                and len(first) % layer.shape.num_experts == 0
            }
            if not fits:
                raise UserError(
                    f"{stored}: {name}: lora_A {[*first.shape]} and lora_B {[*second.shape]} fit no projection of "
                    f"{base.name!r}, with {layer.shape.num_experts} experts of {layer.shape.hidden} x "
                    f"{layer.shape.intermediate}"
                )
            possible.setdefault(path, {})[depth] = fits
    every = [fits for slots in possible.values() for fits in slots.values()]
    ways = {is_swapped for _, is_swapped in every[0]}
    for fits in every:
        ways &= {is_swapped for _, is_swapped in fits}
    if layout is not None:
        if ORDERS.get(layout) is None or ORDERS[layout].is_swapped not in ways:
            allowed = [name for name, order in ORDERS.items() if order.is_swapped in ways]
            raise UserError(
                f"{stored} is not {layout}: the shapes of its factors are those of {' or '.join(allowed) or 'none'}"
            )
        ways = {ORDERS[layout].is_swapped}
    if len(ways) == 2 and (noted := stored.record.get("layout")) in ORDERS:
        ways = {ORDERS[noted].is_swapped}
    if len(ways) != 1:
        what = "as PEFT writes it and as PEFT before 0.19.1 did" if ways else "in no one way"
        raise UserError(
            f"{stored}: the factors of its experts fit {base.name!r} {what}, which their shapes do not tell; give "
            f"--from {'|'.join(ORDERS)}"
        )
    (is_swapped,) = ways
    names: dict[str, dict[int, str]] = {}
    for path, by_depth in possible.items():
        names[path] = {
            depth: sorted(projection for projection, way in fits if way == is_swapped)[-1 if depth else 0]
            for depth, fits in by_depth.items()
        }
        if len(set(names[path].values())) < len(by_depth):
            raise UserError(f"{stored}: {path} has factors of one projection twice")
    return is_swapped, names


def _from_slots(
    stored: StoredAdapter,
    layer: MoeLayer,
    slots: Mapping[int, tuple[str, Tensor, Tensor]],
    order: Order,
    names: Mapping[int, str],
    found: Read,
) -> dict[str, Factors]:
    """Return projection -> factors of a layer from its stacked matrices; `names` maps each slot to its projection."""
    experts, factors = layer.shape.num_experts, {}
    for depth, (_, first, second) in slots.items():
        projection = names[depth]
        target, rank = f"{layer.experts}.{stacks_of(layer)[projection]}", len(first) // experts
        _check_rank(found, stored, target, rank)
        A, B = order.read(first, second, experts)
        noted = _ranks(stored).get(f"{layer.experts}.{projection}")
        factors[projection] = Factors(A, B, stored.scales.of(target, rank)).trimmed(noted)
    return dict(sorted(factors.items(), reverse=True))


def _from_roles(
    stored: StoredAdapter, layer: MoeLayer, pairs: _Pairs, found: Read
) -> tuple[dict[str, Factors], dict[str, frozenset[int]]]:
    """Return projection -> factors of a layer (gate and up fused), and projection -> ids of experts with factors."""
    roles: dict[str, Factors] = {}
    ids: dict[str, frozenset[int]] = {}
    held = {*pairs.apart.get(layer.experts, ()), *pairs.whole.get(layer.experts, ())}
    for role in sorted(held):
        factors = {factor: _stack(stored, layer, role, factor, pairs, found) for factor in "AB"}
        A, B = factors["A"], factors["B"]
        if A is None or B is None:
            continue
        rank = A[0].shape[1]
        if B[0].shape[2] != rank:
            found.unread.append(f"{layer.experts} {role}: lora_A has rank {rank} and lora_B {B[0].shape[2]}")
            continue
        target = pairs.named[layer.experts, role]
        _check_rank(found, stored, target, rank)
        noted = _ranks(stored).get(f"{layer.experts}.{role}")
        roles[role] = Factors(A[0], B[0], stored.scales.of(target, rank)).trimmed(noted)
        ids[role] = A[1] & B[1]
        for expert in sorted(A[1] ^ B[1]):
            found.unread.append(f"{layer.experts}.{expert} {role}: has one of the two factors only")
    if not layer.shape.has_gate and "up" in roles:
        roles[GATE_UP], ids[GATE_UP] = roles.pop("up"), ids.pop("up")
    if parts := roles.keys() & {"gate", "up"}:
        roles[GATE_UP] = fused(layer.shape, roles.pop("gate", None), roles.pop("up", None))
        ids[GATE_UP] = frozenset().union(*(ids.pop(part) for part in parts))
    return dict(sorted(roles.items(), reverse=True)), ids


def _stack(
    stored: StoredAdapter, layer: MoeLayer, role: str, factor: str, pairs: _Pairs, found: Read
) -> tuple[Tensor, frozenset[int]] | None:
    """Return one factor of all experts, [E, r, in] or [E, out, r], and the ids that have it; None if it misfits."""
    shape, count = layer.shape, layer.shape.num_experts
    into, out = sizes_of(layer)[GATE_UP if role in ("gate", "up") else role]
    if role in ("gate", "up") and shape.has_gate:
        out //= 2
    whole = pairs.whole.get(layer.experts, {}).get(role, {}).get(factor)
    if whole is not None:
        own = whole.expand(count, -1, -1) if whole.ndim == 3 and len(whole) == 1 else whole
        parts, every = {e: own[e] for e in range(len(own))} if own.ndim == 3 else {0: own}, frozenset(range(count))
    else:
        apart = pairs.apart.get(layer.experts, {}).get(role, {})
        parts = {expert: half[factor] for expert, half in apart.items() if factor in half}
        every = frozenset(parts)
    where = f"{layer.experts} {role}: lora_{factor}"
    if not parts:
        found.unread.append(f"{where} is missing")
        return None
    shapes = {tuple(part.shape) for part in parts.values()}
    features = {part.shape[1 if factor == "A" else 0] for part in parts.values() if part.ndim == 2}
    if len(shapes) != 1 or features != {into if factor == "A" else out} or (whole is not None and len(parts) != count):
        found.unread.append(
            f"{where} {[*min(shapes)]} does not fit {count} experts of {into} features to {out}"
            if len(shapes) == 1
            else f"{where} has another rank for some experts"
        )
        return None
    first = next(iter(parts.values()))
    zero = torch.zeros_like(first)
    return torch.stack([parts.get(expert, zero) for expert in range(count)]), every


def _ranks(stored: StoredAdapter) -> Mapping[str, int]:
    """Return the ranks that moetune recorded, of factors that it filled with zeros."""
    return stored.record.get("ranks", {})


def _check_rank(found: Read, stored: StoredAdapter, target: str, rank: int) -> None:
    """Report a rank in the settings other than that of the factors: other programs derive the scale from it."""
    if (noted := stored.scales.rank(target)) != rank:
        found.problems.append(f"{target}: its factors have rank {rank}, and adapter_config.json says {noted}")


def _nonzero_ids(factors: Factors) -> frozenset[int]:
    """Return the ids of the experts that have factors: A is drawn for every expert with LoRA, so it is not zero."""
    return frozenset(e for e in range(len(factors.A)) if factors.A[e].any() or factors.B[e].any())


def _compare_sketch(stored: StoredAdapter, found: Read) -> None:
    """Report updates that differ from those that moetune recorded when it wrote the file."""
    noted = stored.record.get("sketch")
    for name in () if noted is None else differing(found.adapter, noted):
        found.altered.append(f"{name}: the update is not the one that moetune noted when it wrote the file")
    found.problems += found.altered


def rest(base: AdapterBase, adapter: Adapter) -> Iterator[str]:
    """Yield the projections of expert layers that have no factors, while those of another layer have."""
    used = {name for own in adapter.experts.values() for name in own}
    for path in base.layers:
        for name in sorted(used - set(adapter.experts.get(path, {})), reverse=True):
            yield f"{path}.{name}"
