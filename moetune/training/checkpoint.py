"""What trains and the optimizer's states on disk, whatever ranks wrote them and whatever ranks read them.

torch.distributed.checkpoint writes each rank's part into safetensors, which execute nothing when they are read, and
cuts them anew for other ranks. A tensor has one name in every layout: a parameter's own, and for low-rank factors of
experts, which lie in one stack with those of other experts, that of the stack and the expert: `….lora.down_A.5`.

    trained.safetensors    what trains, whole
    optimizer/             `<name>.<state>` and, of float32 copies, `<name>.master`
    optimizer.json         numbers among the states, the loss scale, the scheduler's step
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NotRequired

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from typing_extensions import TypedDict

from moetune.adapt.build import Adapted
from moetune.documents import Amount, T, read_json
from moetune.errors import UserError, one_line
from moetune.experts.bank import ExpertBank
from moetune.models.hub.tensor_files import read_header, refuse_not_finite
from moetune.parallel.distribute import reshard
from moetune.parallel.ranks import Ranks, local_tensor
from moetune.training.optim.optimizers import CombinedOptimizer
from moetune.training.optim.updater import Updater
from moetune.training.optim.zero import ZeroUpdater

TRAINED_FILE = "trained.safetensors"
OPTIMIZER_FOLDER, OPTIMIZER_FILE = "optimizer", "optimizer.json"
_FILE_BYTES = 2**30  # written at a time; a file is put together in memory
_TABLES = ("qmap1", "qmap2")  # the same for every weight
_BLOCKWISE, _BLOCK = ("absmax1", "absmax2"), 256  # one number for a block of so many weights


@dataclass(frozen=True)
class Part:
    """A tensor of the checkpoint: a parameter, or the rows of one expert in a stack.

    Attributes:
        row: which row of what is here; None for all of it.
    """

    name: str
    parameter: nn.Parameter
    row: int | None = None

    def of(self, tensor: Tensor, *, like: bool = True) -> Tensor:
        """This part of a tensor that belongs to the parameter and, if `like`, has its shape here."""
        if self.row is not None:
            return tensor[self.row]
        if like and isinstance(self.parameter, DTensor):
            return DTensor.from_local(
                tensor,
                self.parameter.device_mesh,
                self.parameter.placements,
                run_check=False,
                shape=self.parameter.shape,
                stride=self.parameter.stride(),
            )
        return tensor


def parts_of(adapted: Adapted) -> dict[nn.Parameter, list[Part]]:
    """What trains on this rank, by the names that it has in a checkpoint."""
    banks = {layer.experts: adapted.model.get_submodule(layer.experts) for layer in adapted.structure.moe_layers}
    parts: dict[nn.Parameter, list[Part]] = {}
    for name, parameter in adapted.trainable().items():
        bank = next((bank for path, bank in banks.items() if name.startswith(f"{path}.lora.")), None)
        if isinstance(bank, ExpertBank) and bank.lora is not None:
            rows = _rows_here(parameter, len(bank.lora.slots))
            parts[parameter] = [
                Part(f"{name}.{expert}", parameter, slot - rows.start)
                for expert, slot in bank.lora.slots.items()
                if slot in rows
            ]
        else:
            parts[parameter] = [Part(name, parameter)]
    return parts


def _rows_here(parameter: Tensor, rows: int) -> range:
    """Which of its rows a parameter has on this rank, and DeepSpeed at least for as long as it is gathered."""
    if not isinstance(parameter, DTensor):
        return range(rows)
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return range(offset[0], offset[0] + shape[0])


# --- Writing --------------------------------------------------------------------------------------------------------


def write(folder: Path, adapted: Adapted, optimizer: CombinedOptimizer, step: int) -> None:
    """Writes into a folder that is there; every rank takes part."""
    parts, ranks = parts_of(adapted), adapted.ranks
    trained, states, numbers = _contents(parts, optimizer)
    _save_trained(trained | adapted.router_biases(), folder, ranks)
    _save(states, folder / OPTIMIZER_FOLDER, ranks)
    every = ranks.gather(numbers)
    if not ranks.is_first:
        return
    scale = {} if optimizer.loss_scale is None else optimizer.loss_scale.state_dict()
    said = {
        "numbers": {name: values for one in every for name, values in one.items()},
        "loss_scale": scale,
        "scheduler_step": step,
    }
    (folder / OPTIMIZER_FILE).write_text(json.dumps(said), encoding="utf-8")


def _save_trained(tensors: dict[str, Tensor], folder: Path, ranks: Ranks) -> None:
    """As one file of whole tensors. The parts are put together on disk, so no rank ever holds all of it."""
    if ranks.is_single:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / TRAINED_FILE)
        return
    aside = folder / ".trained"
    _save(tensors, aside, ranks)
    ranks.barrier()
    if ranks.is_first:
        names = HuggingFaceStorageReader(str(aside)).read_metadata().state_dict_metadata
        (aside / "whole").mkdir()
        consolidate_safetensors_files(str(aside), str(aside / "whole"), dict.fromkeys(names, 1))
        next((aside / "whole").glob("*.safetensors")).rename(folder / TRAINED_FILE)
        shutil.rmtree(aside)


def _save(tensors: dict[str, Tensor], folder: Path, ranks: Ranks) -> None:
    sizes: dict[str, int] = {}
    for one in ranks.gather({name: local_tensor(tensor).nbytes for name, tensor in tensors.items()}):
        sizes |= one
    if not sizes:  # lomo has no states
        return
    number, filled, files = 1, 0, {}
    for name, size in sorted(sizes.items()):
        if filled and filled + size > _FILE_BYTES:
            number, filled = number + 1, 0
        files[name], filled = number, filled + size
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=files, save_distributed=True)
    with _plainly():
        dcp.save(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            storage_writer=writer,
            no_dist=ranks.is_single,
        )


def _contents(
    parts: Mapping[nn.Parameter, list[Part]], optimizer: CombinedOptimizer
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, dict[str, Any]]]:
    """What trains and its states by name, and numbers by the name of their parameter."""
    trained: dict[str, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for parameter, weight, values in chain.from_iterable(updater.saved() for updater in optimizer.updaters):
        for part in parts[parameter]:
            trained[part.name] = part.of(weight)
            for state, value in values.items():
                if not isinstance(value, Tensor):
                    numbers.setdefault(part.name, {})[state] = {"value": value}
                elif value.dim() == 0:
                    dtype = str(value.dtype).removeprefix("torch.")
                    numbers.setdefault(part.name, {})[state] = {"value": value.item(), "dtype": dtype}
                else:
                    name, tensor = _saved(part, state, value)
                    tensors[name] = tensor
    return trained, tensors, numbers


def _saved(part: Part, state: str, value: Tensor) -> tuple[str, Tensor]:
    if state in _TABLES:  # one for all parameters, and safetensors takes no memory twice
        return f"{part.name}.{state}", value.clone()
    if part.row is not None:
        rows, size = len(local_tensor(part.parameter)), local_tensor(part.parameter)[0].numel()
        if state in _BLOCKWISE:
            if size % _BLOCK:  # a block has weights of two experts
                return f"{part.name}.{state}{_cut(part)}", value.clone()
            value = value.unflatten(-1, (rows, -1))
        return f"{part.name}.{state}", value.select(_axis(part, state, value.dim()), part.row)
    is_like = value.shape == local_tensor(part.parameter).shape
    if isinstance(part.parameter, DTensor) and (value.dtype == torch.uint8 or not is_like):
        return f"{part.name}.{state}{_cut(part)}", value
    return f"{part.name}.{state}", part.of(value, like=is_like)


def _axis(part: Part, state: str, dims: int) -> int:
    """Where the experts are in the state of a stack; ademamix has two averages in one, before them."""
    return dims - 2 if state in _BLOCKWISE else int(dims > part.parameter.dim())


def _cut(part: Part) -> str:
    """Says what a state belongs to that cannot be cut anew, because blocks of weights share a number: which part of a
    parameter, or a stack of how many experts."""
    if not isinstance(part.parameter, DTensor):
        return f"@{len(part.parameter)}"
    shape, offset = compute_local_shape_and_global_offset(
        part.parameter.shape, part.parameter.device_mesh, part.parameter.placements
    )
    return "@" + ",".join(f"{first}+{size}" for first, size in zip(offset, shape, strict=True))


# --- Reading --------------------------------------------------------------------------------------------------------


class _Number(TypedDict):
    value: int | float | bool | None
    dtype: NotRequired[str]


class _Optimizer(TypedDict):
    numbers: dict[str, dict[str, _Number]]
    loss_scale: dict[str, float]
    scheduler_step: Amount


def read_part(folder: Path, name: str, kind: Callable[..., T]) -> T:
    """Read a JSON file of a checkpoint; raise `UserError` naming both if it is damaged."""
    what = f"checkpoint {str(folder)!r} is damaged: {name}"
    return read_json(folder / name, kind, what, "resume from an earlier one with --resume PATH")


def check(folder: Path) -> None:
    """Opens each file; raises what its reader raises if it is not what it should be."""
    read_part(folder, OPTIMIZER_FILE, _Optimizer)
    for path in (folder, folder / OPTIMIZER_FOLDER):
        if path.is_dir():
            HuggingFaceStorageReader(str(path)).read_metadata()
    refuse_not_finite(read_header(folder / TRAINED_FILE), f"checkpoint {str(folder)!r}")


def read_trained(folder: Path, adapted: Adapted) -> None:
    """Fills what trains; every rank takes part.

    Raises:
        UserError: the checkpoint has other tensors.
    """
    parts = [part for all_ in parts_of(adapted).values() for part in all_]
    stored: dict[str, Any] = dict(HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata)
    tensors = {part.name: part.of(local_tensor(part.parameter).detach()) for part in parts} | adapted.router_biases()
    wanted = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    everyones: set[str] = set().union(*adapted.ranks.gather(set(wanted)))
    differing = sorted(
        name
        for name in everyones | stored.keys()
        if name not in everyones
        or name not in stored
        or (name in wanted and (tuple(stored[name].size), stored[name].properties.dtype) != wanted[name])
    )
    if differing:
        raise UserError(f"checkpoint {str(folder)!r} holds other trained tensors: {differing[0]}")
    _load(tensors, folder, adapted.ranks)
    reshard(adapted.model)  # weights that a probe has left gathered are not those that were read


def read_optimizer(folder: Path, adapted: Adapted, optimizer: CombinedOptimizer) -> None:
    """Gives the optimizer its states; every rank takes part.

    Raises:
        UserError: states that cannot be cut anew for these ranks.
    """
    said = read_part(folder, OPTIMIZER_FILE, _Optimizer)
    path = folder / OPTIMIZER_FOLDER
    stored = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata if path.is_dir() else {}
    parts = parts_of(adapted)
    names: dict[str, list[str]] = {}
    for name in stored:
        owner, _, state = name.rpartition(".")
        names.setdefault(owner, []).append(state)

    def read(some: Iterable[Part]) -> dict[str, dict[str, Tensor]]:
        """States by the name of their part."""
        wanted: dict[str, Tensor] = {}
        for part in some:
            _want(part, names.get(part.name, []), stored, wanted)
        _load(wanted, path, adapted.ranks)
        by_part: dict[str, dict[str, Tensor]] = {}
        for name, tensor in wanted.items():
            owner, _, state = name.rpartition(".")
            by_part.setdefault(owner, {})[state] = local_tensor(tensor)
        return by_part

    for updater in optimizer.updaters:
        if isinstance(updater, ZeroUpdater):  # whole tensors: no more at once than one parameter's
            for parameter in updater.parameters:
                with updater.engine.gathered(parameter):
                    mine = parts[parameter]
                    updater.restore(parameter, _together(mine, read(mine), said["numbers"]))
    others = [updater for updater in optimizer.updaters if not isinstance(updater, ZeroUpdater)]
    states = read(part for updater in others for p in updater.parameters for part in parts[p])
    for updater in others:
        updater.load_state_dict(_state_dict(updater, parts, states, said["numbers"]))
    if optimizer.loss_scale is not None:
        optimizer.loss_scale.load_state_dict(said["loss_scale"])


def _want(part: Part, states: list[str], stored: Mapping[str, Any], wanted: dict[str, Tensor]) -> None:
    """Room for the states that the checkpoint has of one part."""
    for state in states:
        name = f"{part.name}.{state}"
        size, dtype = tuple(stored[name].size), stored[name].properties.dtype
        _, mark, cut = state.partition("@")
        if mark and f"@{cut}" != _cut(part):
            if any(other.startswith(state.partition("@")[0] + _cut(part)) for other in states):
                continue  # another rank's
            raise UserError(
                f"the optimizer's states of {part.name} are in 8 bits, in blocks that were cut for other ranks; resume "
                "with the parallel: that the run had"
            )
        room = torch.empty(size, dtype=dtype)  # on the host, whence the optimizer takes it to where its states are
        if (
            not mark
            and part.row is None
            and isinstance(part.parameter, DTensor)
            and size == tuple(part.parameter.shape)
        ):
            room = part.of(torch.empty_like(local_tensor(part.parameter), dtype=dtype))
        wanted[name] = room


def _state_dict(
    updater: Updater, parts: Mapping[nn.Parameter, list[Part]], tensors: Mapping[str, dict[str, Tensor]], numbers: Any
) -> dict[str, Any]:
    """What `Updater.load_state_dict` takes."""
    owners = {updater.copies.get(p, updater.shards[p]): p for p in updater.parameters}
    plain = updater.optimizer.state_dict()
    updated = [p for group in updater.optimizer.param_groups for p in group["params"]]
    state = {}
    masters: dict[nn.Parameter, Tensor] = {}
    for number, one in enumerate(updated):
        parameter = owners[one]
        values = _together(parts[parameter], tensors, numbers)
        if "master" in values:
            masters[parameter] = values.pop("master")
        if values:
            state[number] = values
    kept = [masters[p] for p in updater.copies] if updater.masters == "fp32" else []
    return {"optimizer": {"state": state, "param_groups": plain["param_groups"]}, "masters": kept}


def _together(parts: list[Part], tensors: Mapping[str, dict[str, Tensor]], numbers: Any) -> dict[str, Any]:
    """The states of one parameter, of its parts'."""
    if not parts:
        return {}
    first = parts[0]
    values: dict[str, Any] = {}
    for state, said in numbers.get(first.name, {}).items():
        dtype = said.get("dtype")
        values[state] = said["value"] if dtype is None else torch.tensor(said["value"], dtype=getattr(torch, dtype))
    for state, tensor in tensors.get(first.name, {}).items():
        if first.row is None or state in _TABLES or "@" in state:
            values[state.partition("@")[0]] = tensor
            continue
        axis = _axis(first, state, tensor.dim() + 1)
        rows = torch.stack([tensors[part.name][state] for part in parts], axis)
        values[state] = rows.flatten(axis) if state in _BLOCKWISE else rows
    return values


def _load(tensors: dict[str, Tensor], folder: Path, ranks: Ranks) -> None:
    if any(ranks.gather(bool(tensors))):
        with _plainly():
            dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=ranks.is_single)


@contextmanager
def _plainly() -> Iterator[None]:
    """Without the remark that one process is one, and with errors of the usual kinds: torch wraps even Ctrl-C."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"torch\.distributed is .* in a single process")
            yield
    except CheckpointException as error:
        failures = [failure for failure, _ in error.failures.values()]
        for failure in failures:
            if not isinstance(failure, Exception):
                raise failure from None
        raise RuntimeError(one_line(failures[0])) from error
