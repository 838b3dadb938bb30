"""The peaks before the first step: `build` followed matrix by matrix, on the GPU and on the host."""

from __future__ import annotations

from moetune.experts.packed import BLOCK
from moetune.memory.activations import Run
from moetune.memory.facts import Experts
from moetune.memory.formulas import Setup
from moetune.memory.quantities import Quantities, Tensors, total
from moetune.memory.report import LoadPeaks

_CHECKPOINT = 2  # bytes of a weight on disk: nobody ships these models in more


def load_peaks(setup: Setup, share: Quantities) -> LoadPeaks:
    """What loading takes at most, for a rank that keeps `share`.

    GPU: one layer after the other its bank is made and filled. A checkpoint's matrix arrives, is packed, and goes.
    Random weights are drawn there a layer's experts at a time, with a mask of one byte a weight that checks the draw;
    the embedding and the head come last. A linear layer on its way is taken to be no larger than they are.

    Host: transformers reads the whole checkpoint, in the compute dtype, before anything is packed; its files are mapped
    meanwhile. Where the dtype differs, casts of tensors that wait for their layer may come to as much again.
    """
    run, facts = setup.run, setup.facts
    is_random = setup.config.model.weights == "random"
    held = peak = 0
    for layer in share.layers:
        moe = facts.layers[layer.index].experts
        if moe is None:
            continue
        bank, matrix = _stays(total(layer.experts)), _matrix(moe)
        packing = bank + _temporaries(moe, matrix, run)
        if is_random:
            peak = max(peak, held + _drawn(moe) * run.width + max(moe.shape.num_experts * matrix, packing))
        else:
            peak = max(peak, held + packing + matrix * run.width)
        held += bank
    static = _stays(share.tensors)
    if is_random:
        return LoadPeaks(host=0, gpu=max(peak, static + max(p.numel for p in facts.outside)))
    weights = sum(part.numel for part in facts.anatomy.parts)
    casts = 0 if run.width == _CHECKPOINT else weights * run.width
    return LoadPeaks(host=weights * (run.width + _CHECKPOINT) + casts, gpu=max(peak, static))


def _stays(tensors: Tensors) -> int:
    return tensors.frozen + tensors.trainable


def _matrix(moe: Experts) -> int:
    """Weights of an expert's larger matrix, gate_up."""
    return moe.shape.hidden * moe.shape.intermediate * (2 if moe.shape.has_gate else 1)


def _drawn(moe: Experts) -> int:
    """Weights of a layer's experts, biases included."""
    return moe.shape.num_experts * moe.shape.parameters_per_expert


def _temporaries(moe: Experts, n: int, run: Run) -> int:
    """What packing a matrix of n weights takes: a copy where it lies the other way round, and the packed result before
    it goes into the bank."""
    copy = n * run.width if moe.shape.is_transposed else 0
    match run.base:
        case "nf4":
            return copy + n // 2 + 4 * n // BLOCK
        case "int8":  # from a float16 copy
            return copy + 3 * n
    return copy
