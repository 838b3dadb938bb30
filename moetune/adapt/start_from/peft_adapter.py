"""Load an adapter folder, in the layout of any program, into an adapted model. Pickles are never opened."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from moetune.adapt.build import Adapted
from moetune.adapters.base import base_of, stacks_of
from moetune.adapters.factors import plain_number, split_parts, untied_in
from moetune.adapters.files import CONFIG_FILE, Scales, StoredAdapter, open_adapter
from moetune.adapters.read import read, sure
from moetune.adapters.stacked import ORDERS
from moetune.adapters.write import laid_out
from moetune.errors import UserError, first_of, time_limit
from moetune.experts.bank import ExpertLora
from moetune.models.structure import MoeLayer
from moetune.run.names import linear_factors

Tensors = Mapping[str, Tensor]


def load_peft(adapted: Adapted, folder: Path) -> None:
    """Copy the values of a PEFT adapter, factors and saved modules, into an adapted model with the same selection.

    Raises:
        UserError: the folder holds no adapter in safetensors, the adapter is not plain LoRA, or it differs from the
            model's selection in rank, alpha, targets or shapes, or from frozen weights in their values. The model is
            unchanged then.
    """
    values = _values(adapted, folder)
    with torch.no_grad():
        for name, tensor in adapted.learned().items():
            tensor.copy_(values[name])


def check_peft(adapted: Adapted, folder: Path) -> None:
    """Raise `UserError` if `load_peft` would, for a model on the meta device; compare no values of frozen weights."""
    _values(adapted, folder)


def _values(adapted: Adapted, folder: Path) -> dict[str, Tensor]:
    with time_limit(f"the patterns in {str(folder / CONFIG_FILE)!r}"):
        stored = _in_pefts_layout(open_adapter(folder), adapted)
        reading = _Reading(adapted, stored.scales, stored.tensors)
        values = reading.values()
    if reading.problems:
        lines = "\n  ".join(first_of(reading.problems))
        raise UserError(f"the adapter in {str(folder)!r} does not fit the run's adapt: block:\n  {lines}")
    return values


def _in_pefts_layout(stored: StoredAdapter, adapted: Adapted) -> StoredAdapter:
    """Return an adapter in PEFT's layout, whichever it is stored in.

    Raises:
        UserError: the layout cannot be detected, or a part of the adapter belongs to nothing.
    """
    model = adapted.run.model
    base = base_of(model.source, model.plain, model.structure, model.config.path)
    found = sure(read(stored, base), stored)
    if found.layout in (None, "peft"):
        return stored
    if found.problems:
        lines = "\n  ".join(first_of(found.problems))
        raise UserError(f"{stored}, read as {found.layout}:\n  {lines}")
    laid = laid_out(found.adapter, base, "peft")
    # compared with the base, under their names in an adapted model
    frozen = {".base_layer.".join(name.rsplit(".", 1)): tensor for name, tensor in found.frozen.items()}
    return replace(
        stored,
        tensors=laid.tensors | frozen,
        settings=laid.settings,
        scales=Scales.model_validate(laid.settings),
        record={},
    )


class _Reading:
    """Matches the tensors of an adapter with the parameters that a model learns: call `values`, then read `problems`.

    Attributes:
        left: the adapter's tensors, by their names in the plain model, that are not matched yet.
        problems: what does not fit, one line each.
        trainable: name -> tensor of all that the model learns.
    """

    def __init__(self, adapted: Adapted, scales: Scales, tensors: Tensors) -> None:
        self.adapted, self.scales = adapted, scales
        self.left = dict(tensors)
        self.problems: list[str] = []
        self.trainable = adapted.learned()

    def values(self) -> dict[str, Tensor]:
        """Return name -> value for all that the model learns; incomplete if there are `problems` afterwards."""
        values: dict[str, Tensor] = {}
        for path in self.adapted.selection.lora_linears:
            values |= self._linear(path)
        for layer, lora in self.adapted.expert_lora():
            values |= self._experts(layer, lora)
        wanted = self.trainable.keys() - values.keys()
        values |= self._full({name for name in wanted if self.adapted.part_of(name) != "lora"})
        self._refuse_rest()
        return values

    def _linear(self, path: str) -> dict[str, Tensor]:
        names = linear_factors(path)
        rank, into = self.trainable[names["A"]].shape
        lora = self.adapted.selection.lora
        assert lora is not None
        factors = self._factors(path, path, rank, into, lora.scale(rank), outputs=len(self.trainable[names["B"]]))
        return {} if factors is None else {names[factor]: factors[factor] for factor in "AB"}

    def _experts(self, layer: MoeLayer, lora: ExpertLora) -> dict[str, Tensor]:
        shape = layer.shape
        values: dict[str, Tensor] = {}
        paths = {"gate_up": f"{layer.experts}.base_layer", "down": layer.experts}
        for projection, stack in stacks_of(layer).items():
            path = paths[projection]
            A, B = (getattr(lora, f"{projection}_{factor}") for factor in "AB")
            _, parts, rank, into = A.shape
            where = f"{layer.experts}.{stack}"
            found = self._factors(path, where, parts * rank, into, lora.scale, parts * B.shape[2], shape.num_experts)
            if found is None:
                continue
            A_all, B_all = ORDERS["peft"].read(found["A"], found["B"], shape.num_experts)
            self._check_ids(where, A_all, B_all, tuple(lora.slots))
            chosen = list(lora.slots)
            B_parts, shared = split_parts(B_all[chosen], rank, lora.rows_of_parts[projection])
            if shared:
                self.problems.append(
                    f"{where}: gate and up share factors; set adapt.lora.gate_up: fused, rank: {parts * rank} and "
                    f"alpha: {plain_number(parts * rank * lora.scale)}"
                )
            name = f"{layer.experts}.lora.{projection}"
            values |= {f"{name}_A": A_all[chosen].unflatten(1, (parts, rank)), f"{name}_B": B_parts}
        return values

    def _check_ids(self, where: str, A: Tensor, B: Tensor, ids: tuple[int, ...]) -> None:
        """Add a problem for each expert that has factors in the adapter or in the selection, but not in both. A [E, R,
        in] and B [E, out, R] are the adapter's factors of all E experts, zero for one without; `ids` are the experts
        that have LoRA in the selection; `where` names the parameter in the problem."""
        for expert in range(len(A)):
            has_A, has_B = bool(A[expert].any()), bool(B[expert].any())
            if expert in ids and not has_A and not has_B:
                self.problems.append(f"{where}: expert {expert} has no factors; leave it out of adapt.lora.ids")
            if expert not in ids and has_A and has_B:
                self.problems.append(f"{where}: expert {expert} has factors; adapt.lora leaves it out")

    def _factors(
        self, path: str, target: str, rank: int, into: int, scale: float, outputs: int, experts: int = 1
    ) -> dict[str, Tensor] | None:
        """Take lora_A and lora_B under `path` out of `left`; report a missing factor or a wrong shape, rank or scale.

        Args:
            path: where PEFT stores the factors.
            target: the layer's path in the plain model, for messages and for PEFT's patterns.
            rank: rank per expert that the selection sets.
            into, outputs: numbers of input and output features.
            scale: the number that the selection multiplies B·A by.
            experts: number of experts that the two matrices hold.

        Returns:
            `A` [rank·experts, into] and `B` [outputs, rank·experts]; None if they do not fit.
        """
        found = {factor: self.left.pop(f"{path}.lora_{factor}.weight", None) for factor in "AB"}
        A, B = found["A"], found["B"]
        if A is None or B is None:
            self.problems.append(f"{target}: has no factors; leave it out of adapt.lora")
            return None
        if A.ndim != 2 or (A.shape[1], *B.shape) != (into, outputs, len(A)) or len(A) % experts:
            self.problems.append(
                f"{target}: lora_A {[*A.shape]} and lora_B {[*B.shape]} do not map {into} features to {outputs}"
            )
            return None
        if len(A) != rank * experts:
            self.problems.append(f"{target}: rank {len(A) // experts}, and adapt.lora asks for {rank}")
            return None
        if (noted := self.scales.rank(target)) != rank:
            self.problems.append(f"{target}: its factors have rank {rank}, and {CONFIG_FILE} says {noted}")
        if not math.isclose(found_scale := self.scales.of(target, rank), scale, rel_tol=1e-9):
            self.problems.append(f"{target}: alpha / rank is {found_scale:g}, and adapt.lora asks for {scale:g}")
        return {"A": A, "B": B}

    def _full(self, wanted: set[str]) -> dict[str, Tensor]:
        """Return the values of the parameters in `wanted`, which train in full precision, and report what is missing. A
        tied parameter has to be stored under all its names, in one value."""
        values: dict[str, Tensor] = {}
        tied = {name: first for name, first in self.adapted.structure.tied.items() if first in wanted}
        for name in untied_in(self.left, tied):
            self.problems.append(
                f"{name} and {tied[name]} are apart in it, and train as one here (tied); merge it first "
                "(moetune adapter merge), and train on the result"
            )
        for stored in list(self.left):
            name = tied.get(stored, stored)
            if name not in wanted:
                continue
            tensor = self.left.pop(stored)
            if tensor.shape != self.trainable[name].shape:
                expected = [*self.trainable[name].shape]
                self.problems.append(f"{stored} is {[*tensor.shape]}, and the model's is {expected}")
            values[name] = tensor
        for name in sorted(wanted - values.keys()):
            self.problems.append(f"{name}: is not in the adapter, and trains in full precision here")
        return values

    def _refuse_rest(self) -> None:
        """Report tensors that were not matched, except frozen ones whose values equal the model's."""
        model = self.adapted.model
        frozen: dict[str, Tensor] = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers()),
        }
        for name, tensor in sorted(self.left.items()):
            here = frozen.get(name)
            if here is not None and here.shape == tensor.shape and (here.is_meta or tensor.to(here).equal(here)):
                continue
            if ".lora_" in name:
                problem = f"{name.partition('.lora_')[0]}: has factors; adapt.lora leaves it out"
            else:
                problem = f"{name}: is in the adapter; it is frozen here{self._remedy(name, tensor)}"
            if problem not in self.problems:
                self.problems.append(problem)

    def _remedy(self, name: str, tensor: Tensor) -> str:
        """Return the end of a message, on the setting that would let the parameter `name` train.

        "" if the model has no parameter of this name in the shape of `tensor`, the adapter's value.
        """
        here = dict(self.adapted.model.named_parameters(remove_duplicate=False)).get(name)
        if here is None or here.shape != tensor.shape:
            return ""
        is_router = any(part.name == name for part in self.adapted.structure.parameters_of("router"))
        return f", with another value; set adapt.{'router' if is_router else 'also'} so that it trains"
