"""LoRA out to a PEFT adapter folder and back: what stock `PeftModel.from_pretrained` puts on the plain model.

PEFT 0.21 holds the factors of a stack of E experts (its `target_parameters`) in two matrices:

    lora_A [E·R, in]    expert after expert
    lora_B [out, R·E]   reads back as .reshape(out, R, E).permute(2, 0, 1)

and wraps the experts module once a stack, in the order of its parameters: gate_up is inside
(`experts.base_layer.lora_A`), down outside (`experts.lora_A`). Both are [in] to [out] whatever the model stores. An
expert without factors has zeros. A split gate and up of rank r are one A of rank R = 2r, both A joined, and a B whose
gate rows use the first r columns and whose up rows the others.

What trains in full precision is in `modules_to_save`, module by module, which is how PEFT saves such parameters.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model, set_peft_model_state_dict
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from moetune.adapt.build import Adapted
from moetune.anatomy.anatomy import MoeLayer, meta_model
from moetune.anatomy.source import resolve
from moetune.config import LoraConfig
from moetune.errors import UserError
from moetune.experts.bank import ExpertLora
from moetune.export.finished_run import FinishedRun, base_folder, open_run
from moetune.export.folder import new_folder
from moetune.export.hub_names import find_homes
from moetune.export.tensor_files import read_checkpoint

WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
_TAKEN_FOR_EXPERTS = frozenset({"gate", "w1", "w2", "w3", "gate_proj", "up_proj", "down_proj"})
"""Names of linear layers that PEFT, on a model with experts, takes for the experts of transformers 4."""
_OF_OTHERS = (
    "use_dora", "lora_bias", "layer_replication", "trainable_token_indices", "alora_invocation_tokens",
    "fan_in_fan_out", "use_qalora", "use_bdlora", "kasa_config", "velora_config", "monteclora_config", "arrow_config",
    "megatron_config",
)  # fmt: skip
"""Settings of a PEFT adapter that make it more, or other, than A and B."""
_MOST_PROBLEMS = 10

Tensors = Mapping[str, Tensor]


def export_peft(run_folder: Path, out: Path) -> None:
    """Writes the newest checkpoint of a run as a PEFT adapter.

    `PeftModel.from_pretrained(plain, out)` then computes what the trained model computes, where `plain` is the model
    that transformers loads from the run's `model.path`, with unpacked weights.

    Args:
        run_folder: what `moetune train` wrote.
        out: a folder that does not exist yet, or an empty one.

    Raises:
        UserError: the run has no LoRA or no whole checkpoint, trains what PEFT cannot hold, or `out` is not free.
    """
    run = open_run(run_folder)
    if run.config.adapt.lora is None:
        raise UserError(
            f"the run in {str(run_folder)!r} has no adapt.lora, so there is no adapter; use --format delta or merged"
        )
    with new_folder(out, overwrite=False) as folder:
        saved = saved_modules(run.adapted)
        trained = {name: stored.rows() for name, stored in run.trained.items()}
        tensors = _factors_of(run.adapted, trained) | _saved_tensors(run, saved, trained)
        named = {f"{_PREFIX}{name}": tensor.contiguous().clone() for name, tensor in tensors.items()}
        source = resolve(run.config.model.path)
        settings = _settings(run.adapted, run.config.adapt.lora, saved)
        settings["base_model_name_or_path"] = source.folder or source.name
        _refuse_lost(meta_model(source.config), named, settings)
        _write(folder, named, settings)


def load_peft(adapted: Adapted, folder: Path) -> None:
    """Copies a PEFT adapter's factors and saved modules into an adapted model of the same selection.

    Raises:
        UserError: the folder holds no adapter in safetensors, one that is more than LoRA, or one that differs from the
            model's selection in rank, alpha or targets. The model is unchanged then.
    """
    settings, tensors = _read_adapter(folder)
    reading = _Reading(adapted, settings, tensors)
    values = reading.values()
    if reading.problems:
        shown = reading.problems[:_MOST_PROBLEMS]
        more = len(reading.problems) - len(shown)
        lines = "\n  ".join([*shown, f"and {more} more"] if more else shown)
        raise UserError(f"the adapter in {str(folder)!r} does not fit the run's adapt: block:\n  {lines}")
    with torch.no_grad():
        for name, parameter in adapted.trainable().items():
            parameter.copy_(values[name])


def join_experts(A: Tensor, B: Tensor, ids: Iterable[int], experts: int, rows: tuple[slice, ...]) -> tuple[Tensor, ...]:
    """Factors of n experts as PEFT holds those of all E.

    Args:
        A, B: [n, parts, r, in] and [n, parts, out / parts, r].
        ids: the n experts.
        rows: the output rows of each part.

    Returns:
        lora_A [E·R, in] and lora_B [out, R·E], where R = parts·r.
    """
    chosen = list(ids)
    _, parts, rank, into = A.shape
    outputs = parts * B.shape[2]
    A_all = A.new_zeros(experts, parts * rank, into)
    A_all[chosen] = A.flatten(1, 2)
    B_all = B.new_zeros(experts, outputs, parts * rank)
    for part, of_part in enumerate(rows):
        B_all[chosen, of_part, part * rank : (part + 1) * rank] = B[:, part]
    return A_all.flatten(0, 1), B_all.permute(1, 2, 0).reshape(outputs, -1)


def split_experts(lora_A: Tensor, lora_B: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The factors of each expert: A [E, R, in] and B [E, out, R]."""
    outputs = lora_B.shape[0]
    return lora_A.unflatten(0, (experts, -1)), lora_B.reshape(outputs, -1, experts).permute(2, 0, 1)


def _parts_of(B: Tensor, rank: int, rows: tuple[slice, ...]) -> tuple[Tensor, bool]:
    """B [n, out, parts·r] taken apart: [n, parts, out / parts, r], and whether anything was outside these blocks."""
    blocks, rest = [], B.clone()
    for part, of_part in enumerate(rows):
        columns = slice(part * rank, (part + 1) * rank)
        blocks.append(B[:, of_part, columns])
        rest[:, of_part, columns] = 0
    return torch.stack(blocks, 1), bool(rest.any())


def saved_modules(adapted: Adapted) -> tuple[str, ...]:
    """Paths of the modules that hold what trains in full precision; a router counts as one module.

    Raises:
        UserError: experts train whole, or such a module has factors inside: PEFT saves or adapts a module, not both.
    """
    if adapted.selection.experts:
        layers = ", ".join(map(str, adapted.selection.experts))
        raise UserError(
            f"experts of layer {layers} train whole (adapt.experts), and a PEFT adapter holds low-rank factors of "
            "experts only; use --format delta or merged"
        )
    full = adapted.selection.full
    names = {*full, *(name for name, first in adapted.anatomy.tied.items() if first in full)}
    routers = [layer.router for layer in adapted.anatomy.moe_layers]
    paths = set()
    for name in names:
        router = next((path for path in routers if name.startswith(f"{path}.")), None)
        paths.add(router or name.rpartition(".")[0])
    adapted_paths = {*adapted.selection.lora_linears, *(layer.experts for layer in adapted.anatomy.moe_layers)}
    for path in sorted(paths):
        inside = sorted(other for other in adapted_paths if f"{other}.".startswith(f"{path}."))
        if inside:
            raise UserError(
                f"parameters of {path!r} train in full precision, and PEFT saves modules whole: that one holds "
                f"{inside[0]}, which it cannot save; use --format delta or merged"
            )
    return tuple(sorted(paths))


def _settings(adapted: Adapted, lora: LoraConfig, saved: tuple[str, ...]) -> dict[str, Any]:
    """The adapter's configuration. Every target is a full name, so that no other layer can match."""
    linears = adapted.selection.lora_linears
    has_experts = bool(adapted.anatomy.moe_layers)
    as_parameters = [path for path in linears if has_experts and path.rpartition(".")[2] in _TAKEN_FOR_EXPERTS]
    parameters = [f"{path}.weight" for path in as_parameters]
    ranks: dict[str, int] = {}
    for layer in _lora_layers(adapted):
        parameters += [f"{layer.experts}.{stack}" for stack in _stacks(layer)]
        parts = len(_lora(adapted, layer).gate_up_rows)
        if parts > 1:
            ranks[rf"{layer.experts.rpartition('.')[2]}\.{_stacks(layer)[0]}"] = parts * lora.rank
    settings = PeftLoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=_plain(lora.alpha),
        rank_pattern=ranks,
        alpha_pattern={pattern: _plain(lora.alpha * rank / lora.rank) for pattern, rank in ranks.items()},
        target_modules=[],  # none means the model type's default ones
        target_parameters=parameters or None,
        modules_to_save=list(saved) or None,
        ensure_weight_tying=bool(adapted.selection.full & set(adapted.anatomy.tied.values())),
        inference_mode=True,
    ).to_dict()
    return settings | {"target_modules": [path for path in linears if path not in as_parameters]}


def _plain(number: float) -> Any:
    return int(number) if number == int(number) else number


def _lora_layers(adapted: Adapted) -> list[MoeLayer]:
    return [layer for layer in adapted.anatomy.moe_layers if layer.index in adapted.selection.lora_experts]


def _lora(adapted: Adapted, layer: MoeLayer) -> ExpertLora:
    lora = adapted.model.get_submodule(f"{layer.experts}.lora")
    assert isinstance(lora, ExpertLora)
    return lora


def _stacks(layer: MoeLayer) -> tuple[str, str]:
    return ("gate_up_proj" if layer.shape.has_gate else "up_proj"), "down_proj"


def _expert_keys(layer: MoeLayer) -> dict[str, str]:
    """The bank's name of a projection -> where PEFT has its factors."""
    return {"gate_up": f"{layer.experts}.base_layer", "down": layer.experts}


def _rows(lora: ExpertLora, projection: str) -> tuple[slice, ...]:
    return lora.gate_up_rows if projection == "gate_up" else (slice(None),)


def _factors_of(adapted: Adapted, trained: Tensors) -> dict[str, Tensor]:
    """All factors under PEFT's names."""
    tensors: dict[str, Tensor] = {}
    for path in adapted.selection.lora_linears:
        for factor in ("lora_A", "lora_B"):
            tensors[f"{path}.{factor}.weight"] = trained[f"{path}.{factor}.default.weight"]
    for layer in _lora_layers(adapted):
        lora = _lora(adapted, layer)
        for projection, path in _expert_keys(layer).items():
            A, B = (trained[f"{layer.experts}.lora.{projection}_{factor}"] for factor in "AB")
            joined = join_experts(A, B, lora.slots, layer.shape.num_experts, _rows(lora, projection))
            tensors |= zip((f"{path}.lora_A.weight", f"{path}.lora_B.weight"), joined, strict=True)
    return tensors


def _saved_tensors(run: FinishedRun, modules: tuple[str, ...], trained: Tensors) -> dict[str, Tensor]:
    """All that the saved modules hold: what trained, and from the base weights what did not."""
    if not modules:
        return {}
    plain = meta_model(resolve(run.config.model.path).config)
    tied = run.adapted.anatomy.tied
    shapes = {
        f"{path}.{key}": tensor.shape
        for path in modules
        for key, tensor in plain.get_submodule(path).state_dict().items()
    }
    values = dict(trained)
    frozen = {tied.get(name, name) for name in shapes} - values.keys()
    if frozen:
        stored = read_checkpoint(base_folder(run))
        homes = find_homes(plain, stored)
        for name in sorted(frozen):
            if name not in homes:
                raise UserError(
                    f"PEFT saves modules whole, and the base checkpoint has no {name}, which is frozen beside what "
                    "trained; use --format delta"
                )
            values[name] = homes[name].to_model({key: stored[key].rows() for key in homes[name].every_key()})
    return {name: values[tied.get(name, name)].reshape(shape) for name, shape in shapes.items()}


def _refuse_lost(plain: PreTrainedModel, tensors: Tensors, settings: dict[str, Any]) -> None:
    """Raises `UserError` if PEFT would not put every tensor in its place: on loading it renames for some models.

    PEFT itself only warns. It is asked here with tensors that hold nothing.
    """
    nothing = {name: tensor.to("meta") for name, tensor in tensors.items()}
    kind = plain.config.model_type
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = get_peft_model(plain, PeftLoraConfig(**settings), low_cpu_mem_usage=True)
            outcome: Any = set_peft_model_state_dict(model, nothing, low_cpu_mem_usage=True)
    except Exception as error:  # PEFT refuses in many ways
        raise UserError(
            f"PEFT cannot load this adapter on {kind!r}: {_one_line(error)}; use --format merged"
        ) from error
    missing = [name for name in outcome.missing_keys if ".lora_" in name or ".modules_to_save." in name]
    if lost := sorted([*missing, *outcome.unexpected_keys]):
        raise UserError(
            f"PEFT would not load this adapter on {kind!r}: it finds no place for {lost[0].removeprefix(_PREFIX)}; "
            "use --format merged"
        )


class _Reading:
    """An adapter read against a selection. Each tensor is taken once; what is left over was not asked for."""

    def __init__(self, adapted: Adapted, settings: dict[str, Any], tensors: Tensors) -> None:
        self.adapted, self.settings = adapted, settings
        self.left = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
        self.problems: list[str] = []
        self.trainable = adapted.trainable()

    def values(self) -> dict[str, Tensor]:
        """A value for each trained parameter, unless there are problems."""
        values: dict[str, Tensor] = {}
        for path in self.adapted.selection.lora_linears:
            values |= self._linear(path)
        for layer in _lora_layers(self.adapted):
            values |= self._experts(layer)
        wanted = self.trainable.keys() - values.keys()
        values |= self._full({name for name in wanted if self.adapted.part_of(name) != "lora"})
        self._refuse_rest()
        return values

    def _linear(self, path: str) -> dict[str, Tensor]:
        names = {factor: f"{path}.lora_{factor}.default.weight" for factor in "AB"}
        rank, into = self.trainable[names["A"]].shape
        factors = self._factors(path, path, rank, into, outputs=len(self.trainable[names["B"]]))
        return {} if factors is None else {names[factor]: factors[factor] for factor in "AB"}

    def _experts(self, layer: MoeLayer) -> dict[str, Tensor]:
        lora, shape = _lora(self.adapted, layer), layer.shape
        values: dict[str, Tensor] = {}
        for (projection, path), stack in zip(_expert_keys(layer).items(), _stacks(layer), strict=True):
            A, B = (getattr(lora, f"{projection}_{factor}") for factor in "AB")
            _, parts, rank, into = A.shape
            where = f"{layer.experts}.{stack}"
            found = self._factors(path, where, parts * rank, into, parts * B.shape[2], shape.num_experts)
            if found is None:
                continue
            A_all, B_all = split_experts(found["A"], found["B"], shape.num_experts)
            self._check_ids(where, A_all, B_all, tuple(lora.slots))
            chosen = list(lora.slots)
            B_parts, shared = _parts_of(B_all[chosen], rank, _rows(lora, projection))
            if shared:
                self.problems.append(
                    f"{where}: gate and up share factors; set adapt.lora.gate_up: fused, rank: {parts * rank} and "
                    f"alpha: {_plain(parts * rank * lora.scale)}"
                )
            name = f"{layer.experts}.lora.{projection}"
            values |= {f"{name}_A": A_all[chosen].unflatten(1, (parts, rank)), f"{name}_B": B_parts}
        return values

    def _check_ids(self, where: str, A: Tensor, B: Tensor, ids: tuple[int, ...]) -> None:
        """Notes experts that have factors on one side only."""
        for expert in range(len(A)):
            has_A, has_B = bool(A[expert].any()), bool(B[expert].any())
            if expert in ids and not has_A and not has_B:
                self.problems.append(f"{where}: expert {expert} has no factors; leave it out of adapt.lora.ids")
            if expert not in ids and has_A and has_B:
                self.problems.append(f"{where}: expert {expert} has factors; adapt.lora leaves it out")

    def _factors(
        self, path: str, target: str, rank: int, into: int, outputs: int, experts: int = 1
    ) -> dict[str, Tensor] | None:
        """lora_A and lora_B under `path` if they are there in the size and with the scale that are asked for."""
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
        lora = self.adapted.selection.lora
        assert lora is not None
        scale, wanted = self._scale(target, rank), lora.alpha / lora.rank
        if not math.isclose(scale, wanted, rel_tol=1e-9):
            self.problems.append(f"{target}: alpha / rank is {scale:g}, and adapt.lora asks for {wanted:g}")
        return {"A": A, "B": B}

    def _scale(self, target: str, rank: int) -> float:
        """What PEFT multiplies B·A with."""
        alphas = self.settings.get("alpha_pattern") or {}
        as_parameters = self.settings.get("target_parameters") or ()
        if any(f".{target}.weight".endswith(f".{parameter}") for parameter in as_parameters):
            target = f"{target}.weight"
        alpha = alphas.get(get_pattern_key(list(alphas), target), self.settings["lora_alpha"])
        return float(alpha) / (math.sqrt(rank) if self.settings.get("use_rslora") else rank)

    def _full(self, wanted: set[str]) -> dict[str, Tensor]:
        """Parameters that train in full precision, under their own names or those that they are tied to."""
        values: dict[str, Tensor] = {}
        tied = self.adapted.anatomy.tied
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
        """Notes what the selection does not have; a frozen tensor with the value that it has here may be there."""
        model = self.adapted.model
        frozen: dict[str, Tensor] = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers()),
        }
        for name, tensor in sorted(self.left.items()):
            here = frozen.get(name)
            if here is not None and here.shape == tensor.shape and tensor.to(here).equal(here):
                continue
            if ".lora_" in name:
                problem = f"{name.partition('.lora_')[0]}: has factors; adapt.lora leaves it out"
            else:
                problem = f"{name}: is in the adapter; it is frozen here"
            if problem not in self.problems:
                self.problems.append(problem)


def _read(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{str(file)!r} cannot be read: {_one_line(error)}") from error


def _read_adapter(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and tensors of an adapter folder. A pickle is never opened."""
    if not (folder / WEIGHTS_FILE).is_file():
        pickled = (folder / "adapter_model.bin").exists()
        reason = "adapter_model.bin is a pickle, which can run code and is never read; save it as safetensors"
        raise UserError(f"adapter {str(folder)!r}: {reason if pickled else f'there is no {WEIGHTS_FILE} in it'}")
    try:
        settings = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"adapter {str(folder)!r}: {CONFIG_FILE} cannot be read: {_one_line(error)}") from error
    if not isinstance(settings, dict) or settings.get("peft_type") != "LORA" or "lora_alpha" not in settings:
        raise UserError(f"adapter {str(folder)!r}: {CONFIG_FILE} describes no LoRA adapter")
    others = [f"{key}: {settings[key]}" for key in _OF_OTHERS if settings.get(key)]
    if settings.get("bias", "none") != "none":
        others.append(f"bias: {settings['bias']}")
    if settings.get("init_lora_weights", True) not in (True, False, "gaussian", "eva", "orthogonal"):
        others.append(f"init_lora_weights: {settings['init_lora_weights']}, which changes the base weights")
    if others:
        raise UserError(f"adapter {str(folder)!r} is not plain LoRA: {'; '.join(others)}")
    return settings, _read(folder / WEIGHTS_FILE)


def _write(folder: Path, tensors: dict[str, Tensor], settings: dict[str, Any]) -> None:
    try:
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    except SafetensorError as error:
        raise UserError(f"{WEIGHTS_FILE} cannot be written: {_one_line(error)}") from error
    (folder / CONFIG_FILE).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _one_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
