"""The closed form as lines that a person can check: what, formula, numbers put in, bytes."""

from __future__ import annotations

from moetune.config import OptimizerConfig, RunConfig
from moetune.memory.facts import Facts
from moetune.memory.quantities import Quantities, total
from moetune.memory.report import Term

_WEIGHTS = {
    ("nf4", True): "n/2 + ⌈n/64⌉ + 4·⌈n/16384⌉ + 4 a matrix",
    ("nf4", False): "n/2 + 4·⌈n/64⌉ a matrix",
    ("int8", True): "n + 4·rows a matrix",
    ("bf16", True): "2·n",
    ("fp32", True): "4·n",
}


def terms_of(facts: Facts, config: RunConfig, whole: Quantities) -> tuple[Term, ...]:
    """The lines of the peak moment of one undivided rank; their bytes sum to that peak."""
    name, parts = whole.peak()
    experts = total(tensors for layer in whole.layers for tensors in layer.experts)
    everything = whole.tensors
    numel = everything.numel
    all_parameters = sum(part.numel for part in facts.anatomy.parts)
    base = config.model.base
    formula = _WEIGHTS[base, config.model.double_quant if base == "nf4" else True]
    train = config.train
    tokens = f"{train.micro_batch} × {train.sequence_length} tokens"
    lines = [
        Term(
            "frozen_weights", f"frozen experts, {base}", formula,
            f"of {sum(p.numel for p in facts.anatomy.parts_of('experts')):,} expert parameters",
            experts.frozen, "concepts/weights.md",
        ),
        Term(
            "frozen_weights", f"all else that is frozen ({base} linear layers, the rest as it is)", formula,
            f"of {all_parameters:,} parameters", parts.frozen_weights - experts.frozen, "concepts/weights.md",
        ),
        Term(
            "trainable_weights", "weights that train", "n · bytes of their dtype", f"n = {numel:,}",
            parts.trainable_weights, "concepts/weights.md",
        ),
        Term(
            "gradients", f"gradients that exist at the peak ({name})", "n · bytes of the weight",
            f"all of them: {everything.gradients:,} B", parts.gradients, "concepts/optimizer-states.md",
        ),
        Term(
            "optimizer_states", f"states of {config.optimizer.name}", _states(config.optimizer), f"n = {numel:,}",
            parts.optimizer_states, "concepts/optimizer-states.md",
        ),
        Term(
            "master_weights", "float32 copies of 16-bit weights", "4 · n", f"n = {numel:,}",
            parts.master_weights, "concepts/optimizer-states.md",
        ),
        Term(
            "saved_activations", f"batch and what forward keeps (checkpointing: {train.checkpointing})",
            "L · T · H · bytes + routing" if train.checkpointing == "full" else "every input that backward needs",
            f"L = {len(facts.layers)}, {tokens}, H = {facts.hidden:,}", parts.saved_activations,
            "concepts/activations.md",
        ),
        Term(
            "transient_peak", f"temporaries at {name}", "recomputed activations + widest operation", tokens,
            parts.transient_peak, "concepts/activations.md",
        ),
    ]  # fmt: skip
    lines = [line for line in lines if line.bytes]
    assert sum(line.bytes for line in lines) == parts.total
    return tuple(lines)


def _states(optimizer: OptimizerConfig) -> str:
    match optimizer.name:
        case "adamw":
            width = "4" if optimizer.master_weights == "fp32" else "bytes of the weight"
            return f"2 · n · {width}"
        case "adamw8bit":
            return "2·n + 2·4·⌈n/256⌉ (4 096 elements and more)"
        case "sgd":
            return "n · bytes of the weight" if optimizer.momentum else "none"
        case _:
            return "none"
