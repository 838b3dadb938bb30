"""This machine's GPU and free memory (`card_at_hand`); commands that cannot fit."""

from collections.abc import Callable
from dataclasses import replace

import torch

from moetune.errors import DoesNotFit, UserError
from moetune.memory.host import this_machine
from moetune.memory.measurement.measure import catalog_name
from moetune.memory.report import MemoryReport
from moetune.models.catalog.gpus import Figure, Gpu, find_gpu
from moetune.models.structure import ModelStructure
from moetune.report.memory import verdict
from moetune.report.units import gib


def card_at_hand(count: int = 1) -> Gpu | None:
    """Return the first GPU of this machine; None without CUDA.

    It is the catalog's entry, or one made for a GPU of its size, with the GPU memory (`memory`) and host memory
    (`host`) that are free to a new process now. The context that this process itself has on the GPU counts as free,
    because the process ends before a run starts; its size is taken to be the least over drivers. For a run on `count`
    GPUs, the free memory is the least of them.
    """
    if not torch.cuda.is_available():
        return None
    card = find_gpu(catalog_name(torch.device("cuda", 0)))
    memories = [torch.cuda.mem_get_info(number) for number in range(min(count, torch.cuda.device_count()))]
    free = min(min(total, free + card.context_range[0]) for free, total in memories)
    memory = Figure(free, "free now on this machine", measured_here=True)
    return replace(card, full_name=torch.cuda.get_device_name(0), memory=memory, host=this_machine())


def in_words(card: Gpu) -> str:
    """Format the card at hand, for the user: its name and free memory."""
    return f"the card of this machine, {card.full_name}: {gib(card.memory.value)} free now"


def refuse_unfit(
    doing: str, rough: int, predict: Callable[[Gpu | None], MemoryReport], shown_by: str = "--predict"
) -> None:
    """Raise `DoesNotFit` if what a command is about to do needs more GPU or host memory than this machine has free.

    Args:
        doing: what the command does, as the subject of the message.
        rough: upper bound of its bytes (`surely_below`). If twice as much is free, nothing is predicted, because a
            prediction takes a second.
        predict: predicts the command on the GPU of this machine, or on its CPU (None). If it raises
            `UserError`, nothing is refused.
        shown_by: the option or command that prints the prediction.
    """
    card, host = card_at_hand(), this_machine()
    sizes = [memory.value for memory in (host, None if card is None else card.memory) if memory is not None]
    if all(2 * rough <= size for size in sizes):
        return
    try:
        report = predict(card)
    except UserError:  # what cannot be predicted is tried
        return
    if report.fits is False:
        raise DoesNotFit(f"{doing} {verdict(report)}; {shown_by} shows what takes it", report.to_json())


def surely_below(structure: ModelStructure, tokens: int = 0) -> int:
    """Return an upper bound of the bytes that a command takes with a model: twice its weights in float32, and 64 KiB
    for each of the tokens that it computes at once."""
    return 8 * sum(part.numel for part in structure.parameters) + tokens * (64 << 10)
