"""Load a PEFT adapter folder, written by moetune or by PEFT itself, into an adapted model. Pickles are never opened."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from re import Pattern
from typing import Any

import torch
from peft.utils.other import get_pattern_key
from pydantic import BaseModel, FiniteFloat, ValidationError
from safetensors.torch import load_file
from torch import Tensor

from moetune.adapt.build import Adapted
from moetune.adapt.start_from.peft_layout import (
    CONFIG_FILE,
    PREFIX,
    WEIGHTS_FILE,
    expert_keys,
    lora_layers,
    lora_of,
    lora_stacks,
    plain_number,
    rows_of_parts,
    split_experts,
    split_parts,
)
from moetune.errors import UserError, first_of, reading, shown, time_limit
from moetune.json_files import read_json
from moetune.models.hub.tensor_files import read_header, refuse_not_finite
from moetune.models.structure import MoeLayer
from moetune.run.names import linear_factors

_NOT_PLAIN = (
    "use_dora", "lora_bias", "layer_replication", "trainable_token_indices", "alora_invocation_tokens",
    "fan_in_fan_out", "use_qalora", "use_bdlora", "kasa_config", "velora_config", "monteclora_config", "arrow_config",
    "megatron_config",
)  # fmt: skip
"""Settings of a PEFT adapter with which its layers compute something else than W·x + s·B·(A·x)."""

Tensors = Mapping[str, Tensor]


class _Scales(BaseModel):
    """The settings of an adapter from which rank and scale of its factors follow, under PEFT's names; None for PEFT's
    default."""

    r: int
    rank_pattern: dict[Pattern[str], int] | None = None
    lora_alpha: FiniteFloat
    alpha_pattern: dict[Pattern[str], FiniteFloat] | None = None
    target_parameters: tuple[str, ...] | None = None
    use_rslora: bool | None = None


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
    """Raise the errors of `load_peft` for a model on the meta device, whose frozen weights are not compared."""
    _values(adapted, folder)


def _values(adapted: Adapted, folder: Path) -> dict[str, Tensor]:
    reading = _Reading(adapted, *_plain_lora(folder))
    with time_limit(f"the patterns in {str(folder / CONFIG_FILE)!r}"):
        values = reading.values()
    if reading.problems:
        lines = "\n  ".join(first_of(reading.problems))
        raise UserError(f"the adapter in {str(folder)!r} does not fit the run's adapt: block:\n  {lines}")
    return values


class _Reading:
    """Matches the tensors of an adapter with the parameters that a model learns.

    Attributes:
        left: the adapter's tensors, by their names in the plain model, that are not matched yet.
        problems: what does not fit, one line each.
        trainable: name -> tensor of all that the model learns.
    """

    def __init__(self, adapted: Adapted, scales: _Scales, tensors: Tensors) -> None:
        self.adapted, self.scales = adapted, scales
        self.left = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
        self.problems: list[str] = []
        self.trainable = adapted.learned()

    def values(self) -> dict[str, Tensor]:
        """Return name -> value for all that the model learns; incomplete if `problems` is not empty afterwards."""
        values: dict[str, Tensor] = {}
        for path in self.adapted.selection.lora_linears:
            values |= self._linear(path)
        for layer in lora_layers(self.adapted):
            values |= self._experts(layer)
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

    def _experts(self, layer: MoeLayer) -> dict[str, Tensor]:
        lora, shape = lora_of(self.adapted, layer), layer.shape
        values: dict[str, Tensor] = {}
        for (projection, path), stack in zip(expert_keys(layer).items(), lora_stacks(layer), strict=True):
            A, B = (getattr(lora, f"{projection}_{factor}") for factor in "AB")
            _, parts, rank, into = A.shape
            where = f"{layer.experts}.{stack}"
            found = self._factors(path, where, parts * rank, into, lora.scale, parts * B.shape[2], shape.num_experts)
            if found is None:
                continue
            A_all, B_all = split_experts(found["A"], found["B"], shape.num_experts)
            self._check_ids(where, A_all, B_all, tuple(lora.slots))
            chosen = list(lora.slots)
            B_parts, shared = split_parts(B_all[chosen], rank, rows_of_parts(lora, projection))
            if shared:
                self.problems.append(
                    f"{where}: gate and up share factors; set adapt.lora.gate_up: fused, rank: {parts * rank} and "
                    f"alpha: {plain_number(parts * rank * lora.scale)}"
                )
            name = f"{layer.experts}.lora.{projection}"
            values |= {f"{name}_A": A_all[chosen].unflatten(1, (parts, rank)), f"{name}_B": B_parts}
        return values

    def _check_ids(self, where: str, A: Tensor, B: Tensor, ids: tuple[int, ...]) -> None:
        """Report experts that have factors in the adapter or in the selection, but not in both. A [E, R, in] and B [E,
        out, R] are the adapter's factors of all E experts; `ids` are the experts that have LoRA in the selection."""
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
        if (said := self._setting(target, self.scales.rank_pattern, self.scales.r)) != rank:
            self.problems.append(f"{target}: its factors have rank {rank}, and {CONFIG_FILE} says {said}")
        if not math.isclose(found_scale := self._scale(target, rank), scale, rel_tol=1e-9):
            self.problems.append(f"{target}: alpha / rank is {found_scale:g}, and adapt.lora asks for {scale:g}")
        return {"A": A, "B": B}

    def _scale(self, target: str, rank: int) -> float:
        """Return PEFT's factor of B·A for this layer: alpha / rank, or alpha / √rank with `use_rslora`."""
        alpha = self._setting(target, self.scales.alpha_pattern, self.scales.lora_alpha)
        return alpha / (math.sqrt(rank) if self.scales.use_rslora else rank)

    def _setting(self, target: str, patterns: Mapping[Pattern[str], float] | None, default: float) -> float:
        """Return the value of the first pattern that PEFT finds to match a layer, or `default`."""
        values = {pattern.pattern: value for pattern, value in (patterns or {}).items()}
        as_parameters = self.scales.target_parameters or ()
        if any(f".{target}.weight".endswith(f".{parameter}") for parameter in as_parameters):
            target = f"{target}.weight"
        return values.get(get_pattern_key(list(values), target), default)

    def _full(self, wanted: set[str]) -> dict[str, Tensor]:
        """Return the values of the parameters in `wanted`, which train in full precision, and report what is missing. A
        parameter may be stored under its own name or under one that is tied to it."""
        values: dict[str, Tensor] = {}
        tied = self.adapted.structure.tied
        for stored in list(self.left):
            name = tied.get(stored, stored)
            if name not in wanted:
                continue
            tensor = self.left.pop(stored)
            if tensor.shape != self.trainable[name].shape:
                expected = [*self.trainable[name].shape]
                self.problems.append(f"{stored} is {[*tensor.shape]}, and the model's is {expected}")
            elif name in values and not tensor.equal(values[name]):
                self.problems.append(f"{stored} differs from {name}, and the model ties them")
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
        """Return advice on which setting would let this parameter train; "" if the model has no such parameter."""
        here = dict(self.adapted.model.named_parameters(remove_duplicate=False)).get(name)
        if here is None or here.shape != tensor.shape:
            return ""
        is_router = any(part.name == name for part in self.adapted.structure.parameters_of("router"))
        return f", with another value; set adapt.{'router' if is_router else 'also'} so that it trains"


def read_adapter(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the settings (adapter_config.json) and the tensors of an adapter folder. Pickles are never opened.

    Raises:
        UserError: the folder has no adapter in safetensors, a file is damaged, the adapter is not LoRA, a value is not
            finite, a rank in the settings exceeds that of the factors, or an alpha is zero.
    """
    if not (folder / WEIGHTS_FILE).is_file():
        pickled = (folder / "adapter_model.bin").exists()
        reason = "adapter_model.bin is a pickle, which can run code and is never read; save it as safetensors"
        raise UserError(f"adapter {str(folder)!r}: {reason if pickled else f'there is no {WEIGHTS_FILE} in it'}")
    settings = read_json(folder / CONFIG_FILE, dict[str, Any], f"adapter {str(folder)!r}: {CONFIG_FILE}")
    if settings.get("peft_type") != "LORA" or "lora_alpha" not in settings:
        raise UserError(f"adapter {str(folder)!r}: {CONFIG_FILE} describes no LoRA adapter")
    refuse_not_finite(read_header(folder / WEIGHTS_FILE), f"adapter {str(folder)!r}")
    with reading(repr(str(folder / WEIGHTS_FILE))):
        tensors = load_file(folder / WEIGHTS_FILE)
    if not tensors:
        raise UserError(f"adapter {str(folder)!r}: {WEIGHTS_FILE} holds no tensor")
    largest = max((len(tensor) for name, tensor in tensors.items() if ".lora_A." in name and tensor.ndim), default=0)
    patterns = settings.get("rank_pattern") or {}
    ranks = [settings.get("r"), *(patterns.values() if isinstance(patterns, dict) else [patterns])]
    for rank in ranks:
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 < rank <= max(largest, 1):
            raise UserError(
                f"adapter {str(folder)!r}: {CONFIG_FILE}: rank {shown(rank)}, and its factors have {largest} rows"
            )
    alphas = settings.get("alpha_pattern") or {}
    for alpha in (settings["lora_alpha"], *(alphas.values() if isinstance(alphas, dict) else ())):
        if alpha == 0:
            raise UserError(
                f"adapter {str(folder)!r}: {CONFIG_FILE}: an alpha of {shown(alpha)} leaves factors without effect; "
                "set what they were trained with"
            )
    return settings, tensors


def _plain_lora(folder: Path) -> tuple[_Scales, dict[str, Tensor]]:
    """Return the scales and the tensors of an adapter. Raise `UserError` as `read_adapter`, or if it is not plain
    LoRA."""
    settings, tensors = read_adapter(folder)
    others = [f"{key}: {settings[key]}" for key in _NOT_PLAIN if settings.get(key)]
    if settings.get("bias", "none") != "none":
        others.append(f"bias: {settings['bias']}")
    if settings.get("init_lora_weights", True) not in (True, False, "gaussian", "eva", "orthogonal"):
        others.append(f"init_lora_weights: {settings['init_lora_weights']}, which changes the base weights")
    if others:
        raise UserError(f"adapter {str(folder)!r} is not plain LoRA: {'; '.join(others)}")
    try:
        scales = _Scales.model_validate(settings)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise UserError(f"adapter {str(folder)!r}: {CONFIG_FILE}: {key}: {first['msg']}") from None
    return scales, tensors
