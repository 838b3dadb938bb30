"""`card_at_hand`: the GPU of this machine and the memory that is free on it now, where no GPU is named."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from moetune.errors import counted
from moetune.memory.host import this_machine
from moetune.memory.verify import catalog_name
from moetune.models.catalog.gpus import Figure, Gpu, find_gpu
from moetune.report.units import gib


@dataclass(frozen=True)
class AtHand:
    """A GPU of this machine.

    Attributes:
        gpu: its catalog entry, or one of its size; `memory` is what a new process may use of it now, `host` what of
            this machine.
        words: what was found, for the user.
    """

    gpu: Gpu
    words: str


def card_at_hand(count: int = 1) -> AtHand | None:
    """Return the first GPU of this machine, with the memory that is free now; None without CUDA.

    The context that this process itself has on the GPU counts as free, because the process ends before a run starts;
    its size is taken to be the least over drivers. Of `count` GPUs, the memory is that of the fullest.
    """
    if not torch.cuda.is_available():
        return None
    there = min(count, torch.cuda.device_count())
    card = find_gpu(catalog_name(torch.device("cuda", 0)))
    found = []
    for number in range(there):
        free, total = torch.cuda.mem_get_info(number)
        found.append((min(total, free + card.context_range[0]), total))
    free, total = min(found)
    name = torch.cuda.get_device_name(0)
    several = f", the fullest of {counted(there, 'GPU')}" if there > 1 else ""
    words = f"the card of this machine, {name}{several}: {gib(free)} of {gib(total)} free now"
    memory = Figure(free, "free now on this machine", measured_here=True)
    return AtHand(replace(card, full_name=name, memory=memory, host=this_machine()), words)
