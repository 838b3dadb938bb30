"""The machine at hand: its GPU and the memory that is free (`card_at_hand`); commands that it cannot hold."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from moetune.errors import DoesNotFit, UserError, counted
from moetune.memory.host import this_machine
from moetune.memory.measurement.measure import catalog_name
from moetune.memory.report import MemoryReport
from moetune.models.catalog.gpus import Figure, Gpu, find_gpu
from moetune.models.structure import ModelStructure
from moetune.report.memory import verdict
from moetune.report.units import gib


@dataclass(frozen=True)
class AtHand:
    """A GPU of this machine.

    Attributes:
        gpu: its catalog entry, or one made for a GPU of its size, with the GPU memory (`memory`) and host memory
            (`host`) that are free to a new process now.
        words: name and free memory of the GPU, for the user.
    """

    gpu: Gpu
    words: str


def card_at_hand(count: int = 1) -> AtHand | None:
    """Return the first GPU of this machine, with the memory that is free now; None without CUDA.

    The context that this process itself has on the GPU counts as free, because the process ends before a run starts;
    its size is taken to be the least over drivers. For a run on `count` GPUs, the free memory is the least of them.
    """
    if not torch.cuda.is_available():
        return None
    card = find_gpu(catalog_name(torch.device("cuda", 0)))
    memories = [torch.cuda.mem_get_info(number) for number in range(min(count, torch.cuda.device_count()))]
    free, total = min((min(total, free + card.context_range[0]), total) for free, total in memories)
    name = torch.cuda.get_device_name(0)
    several = f", the fullest of {counted(len(memories), 'GPU')}" if len(memories) > 1 else ""
    words = f"the card of this machine, {name}{several}: {gib(free)} of {gib(total)} free now"
    memory = Figure(free, "free now on this machine", measured_here=True)
    return AtHand(replace(card, full_name=name, memory=memory, host=this_machine()), words)


def refuse_unfit(doing: str, rough: int, predict: Callable[[Gpu | None], MemoryReport]) -> None:
    """Raise `DoesNotFit` if what a command is about to do needs more GPU or host memory than this machine has free.

    Args:
        doing: what the command does, as the subject of the message.
        rough: upper bound of its bytes (`surely_below`). If twice as much is free, nothing is predicted, because a
            prediction takes a second.
        predict: predicts the command on the GPU of this machine, or on its CPU (None). If it raises
            `UserError`, nothing is refused.
    """
    here, host = card_at_hand(), this_machine()
    rooms = [room.value for room in (host, None if here is None else here.gpu.memory) if room is not None]
    if all(2 * rough <= room for room in rooms):
        return
    try:
        report = predict(None if here is None else here.gpu)
    except UserError:  # what cannot be predicted is tried
        return
    if report.fits is False:
        raise DoesNotFit(f"{doing} {verdict(report)}; --predict shows what takes it", report.to_json())


def surely_below(structure: ModelStructure, tokens: int = 0) -> int:
    """Return an upper bound of the bytes that a command takes with a model: twice its weights in float32, and 64 KiB
    for each of the tokens that it computes at once."""
    return 8 * sum(part.numel for part in structure.parameters) + tokens * (64 << 10)
