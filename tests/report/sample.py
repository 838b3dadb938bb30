"""A report with everything in it, the numbers of a 47-billion-parameter model on a 44 GiB card."""

import math
from typing import Any

from moetune.memory.report import (
    Allocation,
    Change,
    Collective,
    GpuMemory,
    LoadPeaks,
    MemoryReport,
    Moment,
    Parts,
    RankMemory,
    Sample,
    Term,
)

GIB = 2**30
MIB = 2**20
LAYERS = 32
L40S = GpuMemory("L40S", 48_307_000_000)
PEAK = Parts(
    frozen_weights=24_485_888_000,
    trainable_weights=2_818_572_288,
    gradients=352_321_536,
    optimizer_states=5_637_144_576,
    saved_activations=553_648_128,
    transient_peak=1_610_612_736,
)


TERMS = (
    Term(
        "frozen_weights",
        "frozen experts [E, h, i per layer]",
        "244 · 3 · 4096 · 14336 · 0.516",
        22_177_000_000,
        "concepts/weights.md",
    ),
    Term("optimizer_states", "AdamW, exp_avg and exp_avg_sq", "2 · 1.4e9 · 2",
         5_637_144_576, "concepts/optimizers.md"),
    Term("saved_activations", "checkpointed inputs of layers",
         "32 · 1 · 2048 · 4096 · 2 + 32 · 1 · 2048 · 2 · 8", 537_919_488, "concepts/activations.md"),
)  # fmt: skip


def timeline() -> tuple[Sample, ...]:
    """One training step: activations grow layer by layer, then give way to temporaries and gradients."""
    static = {"frozen_weights": PEAK.frozen_weights, "trainable_weights": PEAK.trainable_weights}
    static["optimizer_states"] = PEAK.optimizer_states
    samples = []
    for label, order in (("forward", range(LAYERS)), ("backward", reversed(range(LAYERS)))):
        for position, layer in enumerate(order):
            for tick in range(12):
                share = (layer + 1) / LAYERS
                moving = {
                    "saved_activations": int(PEAK.saved_activations * share),
                    "transient_peak": int(PEAK.transient_peak * math.sin(math.pi * tick / 12) ** 2),
                    "gradients": int(PEAK.gradients * (1 - share)) if label == "backward" else 0,
                }
                if label == "forward":
                    moving["transient_peak"] //= 3
                samples.append(Sample(label if position == tick == 0 else "", Parts(**static, **moving)))
    samples[LAYERS * 12 + 6] = Sample("", PEAK)  # amid the backward of the last layer
    samples += [
        Sample("" if tick else "optimizer", Parts(**static, gradients=PEAK.gradients, transient_peak=tick * 64 * MIB))
        for tick in range(8)
    ]
    return tuple(samples)


def rank(number: int = 0, parts: Parts = PEAK) -> RankMemory:
    return RankMemory(number, parts, outside_allocator=640 * MIB, peak_reserved=parts.total + 410 * MIB, terms=TERMS)


def sample(**changes: Any) -> MemoryReport:
    """A report that fits on one GPU, with every field filled; `changes` replaces fields."""
    allocations = (
        Allocation("frozen_weights", "model.layers.31.mlp.experts.bank", "load", "packed", 96, 720 * MIB),
        Allocation(
            "optimizer_states", "model.layers.0.mlp.experts.bank", "optimizer", "aten.zeros_like.default", 12, GIB
        ),
        Allocation("transient_peak", "model.layers.31.self_attn.q_proj", "backward", "aten.mm.default", 1, 33_554_432),
        Allocation("saved_activations", "", "forward", "aten._to_copy.default", 1, 16_384),
    )
    return MemoryReport(
        **{
            "model": "mixtral-8x7b",
            "gpu": L40S,
            "ranks": (rank(),),
            "assumptions": (
                "routing: balanced, each expert of a layer receives the same number of tokens, 512 of 2048 · top_k 2",
                "allocator: expandable_segments is off",
            ),
            "load": LoadPeaks(host=3_221_225_472, gpu=27_917_287_424),
            "moment": Moment(1, 7, "backward", "model.layers.31.mlp", allocations),
            "timeline": timeline(),
            "changes": (),
            "notes": ("the fused kernel's workspace is not seen by a trace; 32 MiB were added for it",),
        }
        | changes
    )  # fmt: skip


def too_big(**changes: Any) -> MemoryReport:
    """The same report on a card that is too small, with what would help."""
    suggestions = (
        Change(("optimizer.name=adamw8bit",), 12 * GIB, 24_500_000_000, True, "optimizer states of one byte"),
        Change(("adapt.experts={layers: 0-2, ids: [0, 1]}", "optimizer.name=lomo"), 13 * GIB, 23_500_000_000, True,
               "half the trained experts, and gradients that never add up"),
    )  # fmt: skip
    return sample(**{"gpu": GpuMemory("RTX 4090", 24 * GIB), "changes": suggestions} | changes)


def tight(**changes: Any) -> MemoryReport:
    """The same report on a card that has barely room."""
    return sample(**{"gpu": GpuMemory("L40S", 34 * GIB)} | changes)


def many_ranks(**changes: Any) -> MemoryReport:
    """Eight ranks of which the first holds more, and what they tell each other."""
    fuller = Parts(**dict(PEAK.items()) | {"transient_peak": PEAK.transient_peak + GIB})
    return sample(
        **{
            "ranks": (rank(0, fuller), *(rank(number) for number in range(1, 8))),
            "collectives": (
                Collective("all-gather", "fsdp", "trainable weights, before forward and before backward", 64, 5 * GIB),
                Collective("reduce-scatter", "fsdp", "gradients", 32, 2 * GIB),
                Collective("all-to-all", "ep", "tokens to experts and back", 128, 805_306_368),
            ),
        }
        | changes
    )


def without_timeline(**changes: Any) -> MemoryReport:
    return sample(**{"moment": None, "timeline": ()} | changes)
