"""The loss by chunks takes no more at its peak when autograd's thread is slow."""

import os
from collections.abc import Iterator

import pytest
import torch

from moetune.training.step.lm_head import LMHead
from moetune.training.step.loss import Chunks, summed_cross_entropy
from tests.nullcuda import runs

TOKENS, HIDDEN, VOCABULARY = 64, 256, 4096


@pytest.fixture
def _one_core() -> Iterator[None]:
    """Threads take turns on one core, so that autograd's thread is often interrupted just after its last result."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yield
    os.sched_setaffinity(0, cores)


def peak() -> int:
    weight_VH = torch.zeros(VOCABULARY, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    hidden_NH = torch.zeros(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets_N = torch.zeros(TOKENS, device="cuda", dtype=torch.long)
    head = LMHead(lambda hidden: hidden @ weight_VH.T, hidden_NH[None, :0].detach())
    torch.cuda.reset_peak_memory_stats()
    summed_cross_entropy(head, hidden_NH, targets_N, memory=Chunks(TOKENS, 2, 2)).backward()
    return torch.cuda.max_memory_allocated()


@pytest.mark.usefixtures("_one_core")
def test_a_chunks_gradients_are_freed_before_the_next_chunk() -> None:
    peak()  # cuBLAS's workspace
    found = set()
    for _ in range(50):
        runs.clear()
        found.add(peak())
    assert len(found) == 1
