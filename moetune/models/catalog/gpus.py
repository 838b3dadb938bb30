"""Catalog of GPUs: memory, what CUDA takes of it, and speed, from `gpus.yaml`. Read without torch.

Every figure in the file names its source (docs/reference/gpus.md).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from moetune.config.memory_size import HOW_TO_WRITE_A_SIZE, parse_size
from moetune.errors import UserError, suggest

_SEVERAL = re.compile(r"(\d{1,4})\s*[x×*]\s*(.+)|(.+?)\s+[x×*]\s*(\d{1,4})", re.IGNORECASE | re.ASCII)
_BARE = re.compile(r"(\d{1,3})\s*G?", re.IGNORECASE | re.ASCII)
_FILE = Path(__file__).parent / "gpus.yaml"


@dataclass(frozen=True)
class Figure:
    """A number, in the unit that the field of `Gpu` states, and its source: a document, a measurement or "estimate: …".

    `measured_here` says whether this project measured it. For a CUDA context, `least` and `most` are the least and the
    most bytes that were reported or measured over several drivers; None if unknown.
    """

    value: int
    source: str
    measured_here: bool = False
    least: int | None = None
    most: int | None = None


_RATES = {"bandwidth": 10**9, "bf16": 10**12, "fp16": 10**12, "fp32": 10**12, "host_link": 10**9, "interconnect": 10**9}
"""Field of `Gpu` -> factor from its unit in `gpus.yaml` (GB/s, TFLOP/s) to bytes/s or FLOP/s."""
AMPERE = (8, 0)
_DRIVERS = 419 / 507
"""Least over most context of one chip, where reports of drivers differ most: the L40 and L40S in `gpus.yaml`."""
PCIE_CHANNELS = Figure(2, "estimate: as many as NCCL's log has between two cards in PCIe slots")


@dataclass(frozen=True)
class Gpu:
    """One type of GPU. Optional figures are None if unknown.

    Attributes:
        name: catalog name such as `l40s`; for a GPU given by its memory, this size, such as `44GiB`.
        full_name: name that `torch.cuda.get_device_name` returns.
        capability: CUDA compute capability, (major, minor).
        memory: bytes of memory, as cudaMemGetInfo reports the total; all processes on the GPU share it.
        context: bytes that a process takes outside of torch's allocator: CUDA context, driver, loaded kernels.
        cublas_workspace: bytes of a cuBLAS workspace, allocated by torch's allocator once for each thread that
            multiplies matrices.
        bandwidth: bytes/s between the GPU's memory and its processors.
        bf16: dense FLOP/s in bfloat16 with float32 accumulation; None also without tensor cores for bfloat16.
        fp16: dense FLOP/s in float16 with float32 accumulation, for GPUs without tensor cores for bfloat16.
        fp32: FLOP/s in float32 without tensor cores.
        host_link: bytes/s from or to the host.
        interconnect: bytes/s between two GPUs, both directions together.
        channels: number of channels that NCCL opens between two GPUs.
        host: bytes of memory that the machine has for a run, for the GPU of this machine.
    """

    name: str
    full_name: str
    capability: tuple[int, int]
    memory: Figure
    context: Figure
    cublas_workspace: Figure
    bandwidth: Figure | None = None
    bf16: Figure | None = None
    fp16: Figure | None = None
    fp32: Figure | None = None
    host_link: Figure | None = None
    interconnect: Figure | None = None
    channels: Figure = PCIE_CHANNELS
    host: Figure | None = None

    @property
    def context_range(self) -> tuple[int, int]:
        """(least, most) bytes that a context may take, depending on the driver.

        The value in the catalog is the most that was reported of a chip, and `least` the least. Where there is a single
        report of another project, the range is from its value times `_DRIVERS` to its value over `_DRIVERS`.
        """
        value, least, most = self.context.value, self.context.least, self.context.most
        if self.context.measured_here:
            return least or value, most or value
        if least is None:
            return int(value * _DRIVERS), most or int(value / _DRIVERS)
        return least, most or value

    @property
    def assumptions(self) -> tuple[str, ...]:
        """One line "context of NVIDIA L40S: <source>" for each memory figure that was not measured by this project."""
        figures = {"memory": self.memory, "context": self.context, "cuBLAS workspace": self.cublas_workspace}
        assumed = {what: figure for what, figure in figures.items() if not figure.measured_here}
        return tuple(f"{what} of {self.full_name}: {figure.source}" for what, figure in assumed.items())


def gpu_names() -> list[str]:
    """Return the names of all GPUs, sorted."""
    return sorted(_gpus())


def find_gpu(name: str) -> Gpu:
    """Return a GPU by name, or a hypothetical one with a given amount of memory.

    For a memory size, context and workspace are those of the L40S, and all speeds are unknown.

    Args:
        name: a catalog name, an alias or torch's name of a GPU, ignoring case (`l40s`, `4090`, `NVIDIA L40S`); or a
            memory size with its unit (`44GiB`, `48 GB`, `45056MiB`).

    Raises:
        UserError: `name` is neither a known GPU nor a memory size above zero, or it means several GPUs (`2 x l40s`).
    """
    wanted = _spelling(name)
    if wanted in _names():
        return _gpus()[_names()[wanted]]
    if (size := parse_size(name)) is not None:
        if size <= 0:
            raise UserError(f"{name!r} is not a valid memory size: it must be above zero. {HOW_TO_WRITE_A_SIZE}")
        return _of_size(name.strip(), size)
    if (several := _SEVERAL.fullmatch(name.strip())) is not None:
        count, card = several[1] or several[4], find_gpu(several[2] or several[3]).name
        raise UserError(
            f"{name!r} is several cards: the card is {card!r}; how many is --count {count} of a plan, and in a run "
            f"file hardware.count: {count} with as many ranks, such as --set parallel.fsdp={count}"
        )
    if (bare := _BARE.fullmatch(name.strip())) is not None and int(bare[1]):
        alike = alike_in_size(_of_size(name, int(bare[1]) * 2**30))
        sold = f", or a card that has about as much: {', '.join(alike)}" if alike else ""
        raise UserError(f"{name!r} is a size without its unit: write {bare[1]}GiB{sold}. {HOW_TO_WRITE_A_SIZE}")
    longer = [known for known in gpu_names() if wanted and known.startswith(wanted)]
    hint = f" Did you mean {' or '.join(map(repr, longer))}?" if longer else suggest(wanted, _names())
    listed = ", ".join(gpu_names())
    raise UserError(
        f"{name!r} is neither a known GPU nor a size.{hint} Known GPUs: {listed}. Give any other by its size. "
        f"{HOW_TO_WRITE_A_SIZE}"
    )


def alike_in_size(card: Gpu) -> tuple[str, ...]:
    """Return the catalog names of GPUs whose memory is within 10 % of the memory of `card`."""
    return alike_in_memory(card.memory.value)


def alike_in_memory(size: int) -> tuple[str, ...]:
    """Return the catalog names of GPUs whose memory is within 10 % of `size` bytes."""
    return tuple(name for name, card in _gpus().items() if 0.9 * size <= card.memory.value <= 1.1 * size)


def _of_size(name: str, size: int) -> Gpu:
    """Return a GPU with `size` bytes of memory and the other memory figures of the L40S, without speeds.

    The range of its context spans those of all GPUs since Ampere with about as much memory.
    """
    model = _gpus()["l40s"]

    def assumed(figure: Figure) -> Figure:
        return Figure(figure.value, f"assumed as on {model.full_name}")

    alike = [_gpus()[card_name] for card_name in alike_in_memory(size) if _gpus()[card_name].capability >= AMPERE]
    ranges = [card.context_range for card in (model, *alike)]

    unknown: dict[str, Any] = dict.fromkeys(_RATES)
    return replace(
        model,
        name=name,
        full_name=f"a GPU of {name}",
        memory=Figure(size, "the size given: all of it is taken to be usable"),
        context=replace(
            assumed(model.context), least=min(low for low, _ in ranges), most=max(high for _, high in ranges)
        ),
        cublas_workspace=assumed(model.cublas_workspace),
        channels=PCIE_CHANNELS,
        **unknown,
    )


def _spelling(name: str) -> str:
    """Return a name in lower case with hyphens for spaces and underscores, as names are compared."""
    return re.sub(r"[\s_]+", "-", name.strip().lower())


@cache
def _gpus() -> Mapping[str, Gpu]:
    return MappingProxyType({name: _gpu(name, entry) for name, entry in _entries().items()})


@cache
def _names() -> Mapping[str, str]:
    """Return every accepted spelling of a GPU's name -> its catalog name."""
    names: dict[str, str] = {}
    for name, entry in _entries().items():
        for spelling in {name, _spelling(entry["full_name"]), *entry.get("aliases", ())}:
            assert spelling not in names, f"{_FILE}: {spelling} names two GPUs"
            names[spelling] = name
    return MappingProxyType(names)


@cache
def _entries() -> dict[str, dict[str, Any]]:
    return yaml.safe_load(_FILE.read_text(encoding="utf-8"))["gpus"]


def _gpu(name: str, entry: dict[str, Any]) -> Gpu:
    unknown = entry.keys() - {field.name for field in fields(Gpu)} - {"aliases"}
    assert not unknown, f"{_FILE}: {name} has unknown {sorted(unknown)}"
    major, minor = entry["capability"]
    return Gpu(
        name=name,
        full_name=entry["full_name"],
        capability=(major, minor),
        memory=_size(entry["memory"]),
        context=_size(entry["context"]),
        cublas_workspace=_size(entry["cublas_workspace"]),
        channels=Figure(**entry["channels"]) if "channels" in entry else PCIE_CHANNELS,
        **{name: _rate(entry[name], unit) for name, unit in _RATES.items() if name in entry},
    )


def _size(entry: dict[str, Any]) -> Figure:
    size = parse_size(entry["value"])
    assert size is not None, f"{_FILE}: {entry['value']!r} is no size"
    ends: dict[str, Any] = {end: parse_size(entry[end]) for end in ("least", "most") if end in entry}
    return Figure(**{**entry, "value": size, **ends})


def _rate(entry: dict[str, Any], unit: int) -> Figure:
    return Figure(**{**entry, "value": int(Decimal(str(entry["value"])) * unit)})
