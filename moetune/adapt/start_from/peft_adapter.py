"""Load an adapter folder, in the layout of any program, into an adapted model. Pickles are never opened."""

import math
from pathlib import Path

import torch
from torch import Tensor, nn

from moetune.adapt.build import Adapted
from moetune.adapters.base import base_of, of_another_base, stacks_of
from moetune.adapters.factors import Adapter, Factors, plain_number, split_parts, untied_in
from moetune.adapters.files import CONFIG_FILE, StoredAdapter, open_adapter
from moetune.adapters.read import read, sure
from moetune.errors import UserError, first_of, time_limit
from moetune.experts.bank import ExpertLora
from moetune.models.structure import MoeLayer
from moetune.run.names import linear_factors, whole_name


def load_peft(adapted: Adapted, folder: Path) -> tuple[str, ...]:
    """Copy the values of a PEFT adapter, factors and saved modules, into an adapted model with the same selection.

    Factors of a lower rank than the model's are filled up as new factors begin, A drawn and B zero, with a note for the
    user in the returned ones.

    Raises:
        UserError: the folder holds no adapter in safetensors, the adapter is not plain LoRA, its layout is in doubt, or
            it differs from the model's selection in rank, alpha, targets or shapes, or from frozen weights in their
            values. The model is unchanged then.
    """
    matching = _matched(adapted, folder)
    with torch.no_grad():
        for name, tensor in adapted.learned().items():
            tensor.copy_(matching.values[name])
    model = adapted.run.model
    notes = of_another_base(matching.stored, model.config.path, model.source)
    if grown := matching.grown:
        further = f" and {len(grown) - 1} more" if len(grown) > 1 else ""
        notes += [f"of a lower rank in the adapter, so the other ranks begin like new factors: {grown[0]}{further}"]
    return tuple(notes)


def check_peft(adapted: Adapted, folder: Path) -> None:
    """Raise `UserError` if `load_peft` would, for a model on the meta device; compare no values of frozen weights."""
    _matched(adapted, folder)


def _matched(adapted: Adapted, folder: Path) -> "_Matching":
    model = adapted.run.model
    with time_limit(f"the patterns in {str(folder / CONFIG_FILE)!r}"):
        stored = open_adapter(folder)
        parsed = sure(read(stored, base_of(model.source, model.plain, model.structure, model.config.path)), stored)
    matching = _Matching(adapted, stored, parsed.problems)
    matching.match(parsed.adapter, parsed.frozen)
    if matching.problems:
        lines = "\n  ".join(first_of(matching.problems))
        raise UserError(f"the adapter in {str(folder)!r} does not fit the run's adapt: block:\n  {lines}")
    return matching


class _Matching:
    """Matches an adapter, read from the files `stored`, with what a model learns: call `match`, then read the rest.

    Attributes:
        values: name -> value for all that the model learns; incomplete if there are `problems`.
        problems: what does not fit, one line each.
        grown: layers and parameters that the adapter has factors of a lower rank of.
    """

    def __init__(self, adapted: Adapted, stored: StoredAdapter, problems: list[str]) -> None:
        self.adapted, self.stored, self.problems = adapted, stored, problems
        self.values: dict[str, Tensor] = {}
        self.grown: list[str] = []
        self.trainable = adapted.learned()

    def match(self, adapter: Adapter, frozen: dict[str, Tensor]) -> None:
        """Match all parts of an adapter; `frozen` are the base's values that it stores (`Read.frozen`)."""
        selection, with_lora = self.adapted.selection, self.adapted.expert_lora()
        for path in selection.lora_linears:
            assert selection.lora is not None
            names = linear_factors(path)
            rank = len(self.trainable[names["A"]])
            if factors := self._fitting(path, adapter.linears.get(path), rank, selection.lora.scale(rank)):
                self._take(path, names, factors.A, factors.B)
        for layer, lora in with_lora:
            for projection, stack in stacks_of(layer).items():
                factors = adapter.experts.get(layer.experts, {}).get(projection)
                self._match_experts(layer, lora, projection, f"{layer.experts}.{stack}", factors)
        chosen = {*selection.lora_linears, *(layer.experts for layer, _ in with_lora)}
        for path in sorted({*adapter.linears, *adapter.experts} - chosen):
            self.problems.append(f"{path}: has factors; adapt.lora leaves it out")
        self._match_whole({**adapter.saved, **frozen})

    def _fitting(self, where: str, factors: Factors | None, rank: int, scale: float) -> Factors | None:
        """Return factors of at most this rank; None, with a problem, for others. Report another scale."""
        if factors is None:
            self.problems.append(f"{where}: has no factors; leave it out of adapt.lora")
        elif factors.rank > rank:
            self.problems.append(f"{where}: rank {factors.rank}, and adapt.lora asks for {rank}")
        else:
            if not math.isclose(factors.scale, scale, rel_tol=1e-9):
                self.problems.append(f"{where}: alpha / rank is {factors.scale:g}, and adapt.lora asks for {scale:g}")
            return factors
        return None

    def _match_experts(
        self, layer: MoeLayer, lora: ExpertLora, projection: str, where: str, factors: Factors | None
    ) -> None:
        names = {factor: f"{layer.experts}.lora.{projection}_{factor}" for factor in "AB"}
        _, parts, rank, _ = self.trainable[names["A"]].shape
        if (factors := self._fitting(where, factors, parts * rank, lora.scale)) is None:
            return
        for expert, (A, B) in enumerate(zip(factors.A, factors.B, strict=True)):
            has_A, has_B = bool(A.any()), bool(B.any())
            if expert in lora.slots and not has_A and not has_B:
                self.problems.append(f"{where}: expert {expert} has no factors; leave it out of adapt.lora.ids")
            if expert not in lora.slots and has_A and has_B:
                self.problems.append(f"{where}: expert {expert} has factors; adapt.lora leaves it out")
        chosen = list(lora.slots)
        B_parts, shared = split_parts(factors.B[chosen], factors.rank // parts, lora.rows_of_parts[projection])
        if shared or factors.rank % parts:
            self.problems.append(
                f"{where}: gate and up share factors; set adapt.lora.gate_up: fused, rank: {factors.rank} and alpha: "
                f"{plain_number(factors.rank * lora.scale)}"
            )
            return
        A_parts = factors.A[chosen].unflatten(1, (parts, -1))
        is_one = {name: f"{projection}_{name}" in lora.shared for name in "AB"}
        for name, of_experts in (("A", A_parts), ("B", B_parts)):
            if is_one[name] and not of_experts.equal(of_experts[:1].expand_as(of_experts)):
                self.problems.append(f"{where}: experts have an {name} each, not one; set adapt.lora.share: none")
                return
        A, B = A_parts[:1] if is_one["A"] else A_parts, B_parts[:1] if is_one["B"] else B_parts
        self._take(where, names, A, B)

    def _take(self, where: str, names: dict[str, str], A: Tensor, B: Tensor) -> None:
        """Take factors, `A` [..., r, in] and `B` [..., out, r], filled up to the ranks that the model has."""
        rank, drawn = A.shape[-2], self.trainable[names["A"]]
        if rank < drawn.shape[-2]:
            self.grown.append(where)
            zeros = torch.zeros_like(self.trainable[names["B"]][..., rank:])
            A, B = torch.cat((A.to(drawn), drawn[..., rank:, :]), -2), torch.cat((B.to(zeros), zeros), -1)
        self.values |= {names["A"]: A, names["B"]: B}

    def _match_whole(self, held: dict[str, Tensor]) -> None:
        """Match the parameters that an adapter holds whole with those that train in full precision, and report what is
        missing and what is frozen here and has another value. A tied parameter has to be held under all its names, in
        one value."""
        adapted, structure = self.adapted, self.adapted.structure
        wanted = {name for name in self.trainable if adapted.part_of(name) != "lora"}
        tied = {name: first for name, first in structure.tied.items() if first in wanted}
        for name in untied_in(held, tied):
            self.problems.append(
                f"{name} and {tied[name]} are apart in it, and train as one here (tied); merge it first "
                "(moetune adapter merge), and train on the result"
            )
        model, routers = adapted.model, {part.name for part in structure.parameters_of("router")}
        frozen = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
        for name, tensor in sorted(held.items()):
            own = whole_name(tied.get(name, name), adapted.selection)
            if own in wanted:
                self.values[own] = tensor
            elif (current := frozen.get(own)) is None or not (current.is_meta or tensor.to(current).equal(current)):
                setting = f"; set adapt.{'router' if name in routers else 'also'} so that it trains"
                is_parameter = isinstance(current, nn.Parameter)
                self.problems.append(
                    f"{name}: is in the adapter; it is frozen here, with another value{setting * is_parameter}"
                )
        for name in sorted(wanted - self.values.keys()):
            self.problems.append(f"{name}: is not in the adapter, and trains in full precision here")
