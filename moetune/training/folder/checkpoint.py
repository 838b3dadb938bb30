"""Trained weights and optimizer states in a checkpoint, with any number of ranks.

    trained.safetensors    trained weights, each whole
    optimizer/             optimizer states `<name>.<state>`, and float32 copies of weights `<name>.master`
    optimizer.json         states that are numbers, the loss scale, the scheduler's step

torch.distributed.checkpoint writes each rank's part of a tensor as safetensors, which execute nothing when they are
read, and re-shards them for other ranks. The name of a tensor does not depend on the ranks: it is the name of its
parameter. Low-rank factors of several experts are stacked in one parameter and saved expert by expert, under the name
of the stack and the expert's index: `….lora.down_A.5`.
"""

import json
import shutil
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NotRequired

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor
from typing_extensions import TypedDict

from moetune.adapt.build import Adapted
from moetune.compat.torch import consolidate, shard_place
from moetune.errors import UserError, one_line
from moetune.experts.bank import ExpertLora
from moetune.json_files import Amount, T, read_json
from moetune.parallel.distribute import reshard
from moetune.parallel.ranks import Ranks, local_tensor
from moetune.tensor_files import read_header, refuse_not_finite
from moetune.training.optim.optimizers import CombinedOptimizer
from moetune.training.optim.zero import ZeroUpdater

TRAINED_FILE = "trained.safetensors"
OPTIMIZER_FOLDER, OPTIMIZER_FILE = "optimizer", "optimizer.json"
_FILE_BYTES = 2**30  # largest file, unless one tensor is larger: a file is built in memory
_TABLES = ("qmap1", "qmap2")  # states of bitsandbytes: quantization tables, equal for all parameters
_BLOCKWISE, _BLOCK = ("absmax1", "absmax2"), 256  # states of bitsandbytes: one scale for each block of 256 weights


@dataclass(frozen=True)
class SavedPart:
    """A unit of a checkpoint: a whole parameter, or one expert's row of stacked LoRA factors, under the name `name`.

    Attributes:
        parameter: the parameter, of which this rank may hold a part.
        row: index of the expert's row in this rank's part of the stack; None for a whole parameter.
    """

    name: str
    parameter: nn.Parameter
    row: int | None = None

    def of(self, tensor: Tensor, *, like: bool = True) -> Tensor:
        """Return what belongs to this unit of `tensor`, the local weight or optimizer state of the parameter, uncopied.

        Args:
            like: whether `tensor` has the shape of the parameter on this rank. If so, and the parameter is a DTensor,
                the result is a DTensor too, which is saved with its offset in the whole tensor.
        """
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


def parts_of(adapted: Adapted) -> dict[nn.Parameter, list[SavedPart]]:
    """Return each parameter that trains on this rank -> its `SavedPart`s: one for each of this rank's experts if it
    stacks their LoRA factors, else one."""
    stacks = {path: module for path, module in adapted.model.named_modules() if isinstance(module, ExpertLora)}
    parts: dict[nn.Parameter, list[SavedPart]] = {}
    for name, parameter in adapted.trainable().items():
        path, _, factor = name.rpartition(".")
        if (lora := stacks.get(path)) is not None:
            slots = {
                f"{path}.{lora.stored_name(factor, expert)}": 0 if factor in lora.shared else slot
                for expert, slot in lora.slots.items()
            }
            rows = range(len(slots))  # DeepSpeed gathers all rows when it saves
            if isinstance(parameter, DTensor):
                (first, *_), (count, *_) = shard_place(parameter)
                rows = range(first, first + count)
            parts[parameter] = [
                SavedPart(own, parameter, slot - rows.start) for own, slot in slots.items() if slot in rows
            ]
        else:
            parts[parameter] = [SavedPart(name, parameter)]
    return parts


# --- Writing --------------------------------------------------------------------------------------------------------


def write(folder: Path, adapted: Adapted, optimizer: CombinedOptimizer, step: int) -> None:
    """Write trained weights, optimizer states and `optimizer.json` into a checkpoint folder; every rank must call this.

    `step` is the number of updates since the run began.
    """
    parts, ranks = parts_of(adapted), adapted.ranks
    trained, states, numbers = _contents(parts, optimizer)
    _save_trained(trained | adapted.router_biases(), folder, ranks)
    _save(states, folder / OPTIMIZER_FOLDER, ranks)
    of_ranks = ranks.gather(numbers)
    if ranks.is_first:
        scale = {} if optimizer.loss_scale is None else asdict(optimizer.loss_scale)
        contents = {"numbers": dict(ChainMap(*of_ranks)), "loss_scale": scale, "scheduler_step": step}
        (folder / OPTIMIZER_FILE).write_text(json.dumps(contents), encoding="utf-8")


def _save_trained(tensors: dict[str, Tensor], folder: Path, ranks: Ranks) -> None:
    """Write `trained.safetensors`, with whole tensors; every rank must call this.

    `tensors` is name -> this rank's weight, a DTensor if it is sharded. With several ranks their parts are written to
    files and joined on disk, so that no rank holds all tensors in memory.
    """
    if ranks.is_single:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / TRAINED_FILE)
        return
    aside = folder / ".trained"
    _save(tensors, aside, ranks)
    ranks.barrier()
    if ranks.is_first:
        consolidate(aside, list(_reader(aside).read_metadata().state_dict_metadata)).rename(folder / TRAINED_FILE)
        shutil.rmtree(aside)


def _save(tensors: dict[str, Tensor], folder: Path, ranks: Ranks) -> None:
    """Write tensors, DTensors in parts, as safetensors of about `_FILE_BYTES` each; every rank must call this."""
    sizes = dict(ChainMap(*ranks.gather({name: local_tensor(tensor).nbytes for name, tensor in tensors.items()})))
    if not sizes:  # lomo has no states
        return
    number, filled, files = 1, 0, {}
    for name, size in sorted(sizes.items()):
        if filled and filled + size > _FILE_BYTES:
            number, filled = number + 1, 0
        files[name], filled = number, filled + size
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=files, save_distributed=True)
    with _quiet():
        dcp.save(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            storage_writer=writer,
            no_dist=ranks.is_single,
        )


def _contents(
    parts: Mapping[nn.Parameter, list[SavedPart]], optimizer: CombinedOptimizer
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Return what this rank saves: trained weights, optimizer states that are tensors, and those that are numbers.

    The first dict is name of a `SavedPart` -> its weight; the second, name of a state (`_saved`) -> its tensor; the
    third, name of a `SavedPart` -> state -> `_Number`.
    """
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


def _saved(part: SavedPart, state: str, value: Tensor) -> tuple[str, Tensor]:
    """Return the name under which an optimizer state of a `SavedPart` is saved, and its tensor, a view if possible.

    The name ends in `_cut(part)` if only a rank with the same shard can read the state.
    """
    if state in _TABLES:  # shared by all parameters, which safetensors refuses
        return f"{part.name}.{state}", value.clone()
    if part.row is not None:
        rows, size = len(local_tensor(part.parameter)), local_tensor(part.parameter)[0].numel()
        if state in _BLOCKWISE:
            if size % _BLOCK:  # blocks cross experts
                return f"{part.name}.{state}{_cut(part)}", value.clone()
            value = value.unflatten(-1, (rows, -1))
        return f"{part.name}.{state}", value.select(_axis(part, state, value.dim()), part.row)
    is_like = value.shape == local_tensor(part.parameter).shape
    if isinstance(part.parameter, DTensor) and (value.dtype == torch.uint8 or not is_like):
        return f"{part.name}.{state}{_cut(part)}", value
    return f"{part.name}.{state}", part.of(value, like=is_like)


def _axis(part: SavedPart, state: str, dims: int) -> int:
    """Return which axis indexes the experts in an optimizer state, of `dims` dimensions, of stacked LoRA factors.

    This is the first axis, or the second of AdEMAMix's states [2, …], which hold two averages.
    """
    return dims - 2 if state in _BLOCKWISE else int(dims > part.parameter.dim())


def _cut(part: SavedPart) -> str:
    """Return the name suffix of a state that cannot be re-sharded, because blocks of 256 weights share a scale.

    The suffix is `@` and, for each dimension, `offset+size` of this rank's shard, or for an unsharded stack its number
    of experts. Only a rank with the same suffix can read the state.
    """
    if not isinstance(part.parameter, DTensor):
        return f"@{len(part.parameter)}"
    return "@" + ",".join(f"{first}+{size}" for first, size in zip(*shard_place(part.parameter), strict=True))


# --- Reading --------------------------------------------------------------------------------------------------------


class _Number(TypedDict):
    """An optimizer state that is a number, in `optimizer.json`; with `dtype` if it was a scalar tensor."""

    value: int | float | bool | None
    dtype: NotRequired[str]


class _Optimizer(TypedDict):
    """The contents of `optimizer.json`; `numbers` is name of a `SavedPart` -> state -> value.

    `loss_scale` is empty without one; `scheduler_step` is the number of updates since the run began.
    """

    numbers: dict[str, dict[str, _Number]]
    loss_scale: dict[str, float]
    scheduler_step: Amount


def read_part(folder: Path, name: str, kind: Callable[..., T]) -> T:
    """Read the JSON file `name` of a checkpoint folder, and validate it as a value of the type `kind`.

    Raises:
        UserError: the file is missing or no such value; the message says that the checkpoint is damaged.
    """
    what = f"checkpoint {str(folder)!r} is damaged: {name}"
    return read_json(folder / name, kind, what, "resume from an earlier one with --resume PATH")


def read_trained(folder: Path, adapted: Adapted) -> None:
    """Copy the trained weights and router biases from a checkpoint folder into the model; every rank must call this.

    Raises:
        UserError: the checkpoint has tensors of other names, shapes or dtypes than the model trains, or one that is not
            finite.
    """
    refuse_not_finite(read_header(folder / TRAINED_FILE))
    parts = [part for all_ in parts_of(adapted).values() for part in all_]
    stored: dict[str, Any] = dict(_reader(folder).read_metadata().state_dict_metadata)
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
    reshard(adapted.model)  # FSDP2 must gather the weights again


def read_optimizer(folder: Path, adapted: Adapted, optimizer: CombinedOptimizer) -> None:
    """Restore optimizer states, float32 copies of weights and the loss scale; every rank must call this.

    Raises:
        UserError: `optimizer.json` is damaged, or 8-bit states were written by ranks that divided a parameter in
            another way.
    """
    saved = read_part(folder, OPTIMIZER_FILE, _Optimizer)
    path = folder / OPTIMIZER_FOLDER
    stored = _reader(path).read_metadata().state_dict_metadata if path.is_dir() else {}
    parts = parts_of(adapted)
    names: dict[str, list[str]] = {}
    for name in stored:
        owner, _, state = name.rpartition(".")
        names.setdefault(owner, []).append(state)

    def states_of(parameters: list[nn.Parameter]) -> dict[nn.Parameter, dict[str, Any]]:
        wanted: dict[str, Tensor] = {}
        for part in chain.from_iterable(parts[parameter] for parameter in parameters):
            wanted |= _empty_states(part, names.get(part.name, []), stored)
        _load(wanted, path, adapted.ranks)
        by_part: dict[str, dict[str, Tensor]] = {}
        for name, tensor in wanted.items():
            owner, _, state = name.rpartition(".")
            by_part.setdefault(owner, {})[state] = local_tensor(tensor)
        return {parameter: _joined(parts[parameter], by_part, saved["numbers"]) for parameter in parameters}

    without_zero = [updater for updater in optimizer.updaters if not isinstance(updater, ZeroUpdater)]
    for updater in optimizer.updaters:
        if isinstance(updater, ZeroUpdater):  # each rank gets whole tensors, so one parameter at a time is read
            for parameter in updater.parameters:
                with updater.engine.gathered(parameter):
                    updater.restore(states_of([parameter]))
    states = states_of([parameter for updater in without_zero for parameter in updater.parameters])
    for updater in without_zero:
        updater.restore(states)
    if optimizer.loss_scale is not None:
        optimizer.loss_scale.restore(saved["loss_scale"])


def _empty_states(part: SavedPart, states: list[str], stored: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return empty tensors, by name in the checkpoint, into which the states of a `SavedPart` can be read.

    Args:
        states: names of the states that the checkpoint has for this `SavedPart`, with their `_cut` suffixes.
        stored: name -> metadata (size, dtype) of all tensors of the checkpoint.

    Raises:
        UserError: a state has `_cut` suffixes, and none is this rank's.
    """
    empty: dict[str, Tensor] = {}
    for state in states:
        name = f"{part.name}.{state}"
        size, dtype = tuple(stored[name].size), stored[name].properties.dtype
        kind, mark, cut = state.partition("@")
        if mark and f"@{cut}" != _cut(part):
            if any(candidate.startswith(kind + _cut(part)) for candidate in states):
                continue  # the state of another rank's part
            raise UserError(
                f"the optimizer's states of {part.name} are in 8 bits, in blocks that were cut for other ranks; resume "
                "with the parallel: that the run had"
            )
        parameter = part.parameter
        if not mark and part.row is None and isinstance(parameter, DTensor) and size == tuple(parameter.shape):
            empty[name] = part.of(torch.empty_like(local_tensor(parameter), dtype=dtype))
        else:  # on the host; the optimizer moves the state to the device that it needs
            empty[name] = torch.empty(size, dtype=dtype)
    return empty


def _joined(parts: list[SavedPart], tensors: Mapping[str, dict[str, Tensor]], numbers: Any) -> dict[str, Any]:
    """Return a parameter's optimizer states by name, for what this rank holds of it; empty if that is nothing.

    Those of the experts of stacked LoRA factors are stacked again. States that are numbers are the same for all experts
    and are taken from the first.

    Args:
        parts: what this rank holds: the whole parameter, or experts of a stack in ascending order.
        tensors: name of a `SavedPart` -> state -> tensor.
        numbers: name of a `SavedPart` -> state -> its value and dtype, from `optimizer.json`.
    """
    if not parts:
        return {}
    first = parts[0]
    values: dict[str, Any] = {}
    for state, number in numbers.get(first.name, {}).items():
        dtype = number.get("dtype")
        values[state] = number["value"] if dtype is None else torch.tensor(number["value"], dtype=getattr(torch, dtype))
    for state, tensor in tensors.get(first.name, {}).items():
        if first.row is None or state in _TABLES or "@" in state:
            values[state.partition("@")[0]] = tensor
            continue
        axis = _axis(first, state, tensor.dim() + 1)
        rows = torch.stack([tensors[part.name][state] for part in parts], axis)
        values[state] = rows.flatten(axis) if state in _BLOCKWISE else rows
    return values


def _reader(folder: Path) -> HuggingFaceStorageReader:
    return HuggingFaceStorageReader(str(folder))


def _load(tensors: dict[str, Tensor], folder: Path, ranks: Ranks) -> None:
    """Fill `tensors`, name -> tensor or DTensor, in place from a folder of safetensors; every rank must call this."""
    if any(ranks.gather(bool(tensors))):
        with _quiet():
            dcp.load(tensors, storage_reader=_reader(folder), no_dist=ranks.is_single)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's warning about saving with one process; unwrap errors of torch.distributed.checkpoint.

    Raises:
        BaseException: the wrapped one, if it is not an `Exception`: `KeyboardInterrupt`, for example.
        RuntimeError: the first wrapped `Exception`, in one line.
    """
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
