"""`train:` of a run file: the training loop, what layers keep for backward."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag, model_validator

from moetune.config.fields import (
    AutoIds,
    Coefficient,
    ExpertMemory,
    Ids,
    KeepRows,
    LossMemory,
    NonNegative,
    Positive,
    Size,
    Strength,
    Text,
)
from moetune.config.schema.model import Into
from moetune.config.schema.section import WORD_OR_SECTION, Section


class EarlyStoppingConfig(Section):
    """End training when the held-out loss no longer falls, and keep its best checkpoint (`train.early_stopping:`).

    Attributes:
        patience: training ends after this many evaluations in a row that are no better than the best before them.
    """

    patience: Positive = 3


class KeptConfig(Section):
    """Layers that keep (save for backward) more than their input, or less (`train.checkpointing:` as a section).

    Attributes:
        attention: layers that keep the outputs of attention's kernels.
        rows: layers with experts that keep the experts' outputs of gate_up, a row for each routed token.
        rest: layers that keep everything but the rows of gate_up, so that they are not recomputed.
        host: layers whose input waits in host memory; `auto` for as few as the GPU needs.
    """

    attention: Ids = "none"
    rows: Ids = "none"
    rest: Ids = "none"
    host: AutoIds = "none"


CheckpointingWord = Literal["auto", "none", "experts_only", "full", "offload"]
Checkpointing = Annotated[
    Annotated[CheckpointingWord, Tag("word")] | Annotated[KeptConfig, Tag("by layer")], WORD_OR_SECTION
]


class TrainConfig(Section):
    """The training loop (`train:`). A step is one optimizer update; docs/reference/run-file.md describes every key.

    Attributes:
        micro_batch: sequences in one forward and backward pass.
        accumulate: forward and backward passes per step.
        sequence_length: tokens per sequence.
        steps: length of the training in steps.
        epochs: length of the training in passes over the data, instead of `steps`; None if `steps` sets it.
        checkpointing: activations that are recomputed in the backward pass: `none`, those of experts, or all but each
            layer's input, which `offload` keeps in host memory. A section names the layers that keep more than that,
            or less; `auto` chooses those that keep more, as many as fit the GPU.
        keep_rows: number of layers, the last ones, whose experts' outputs of gate_up are saved for backward instead of
            being computed again; `auto` for as many as fit the GPU. `checkpointing: none` keeps those of all layers.
        layer_by_layer: all micro-batches of a step run through a decoder layer before any runs through the next, so
            that experts in host memory are copied once a step; `auto` where they are there and it fits.
        seed: seed of the order of rows, dropout and random weights.
        log_every: steps between two lines of metrics.
        eval_every: steps between two evaluations.
        save_every: steps between two checkpoints.
        keep_checkpoints: number of newest checkpoints to keep.
        early_stopping: when to end before `steps`; None to run them all.
        eval_micro_batch: sequences in one forward pass of an evaluation; None for `micro_batch`.
        warmup: steps of linear warm-up.
        schedule: the learning rate after the warm-up: constant, or linear or cosine decay to zero.
        max_grad_norm: gradients are clipped to this norm; 0 does not clip.
        max_grad_value: bound of each gradient element, applied before the norm is clipped; 0 does not clip.
        on_nonfinite: if a gradient is NaN or infinite, end the run or skip the update.
        on_oom: when memory runs out, end the run or repeat the step with half the micro-batch.
        router_aux_loss: coefficient of the load-balancing loss; `auto` is the architecture's own.
        router_aux_scope: balance the sum over layers, or each layer.
        router_z_loss: coefficient of the router z-loss.
        dense_router_gradient: compute the routers' gradient through all experts (DenseMixer).
        router_bias_rate: step size of correction biases; 0 does not update them.
        loss_memory: memory of logits that the loss may hold at once; `none` for no limit, `auto` for as much as
            `expert_memory`, at least 256 MiB.
        merge_into: the quantized format in whose rounding merged weights are computed with; None for no rounding.
        expert_memory: memory of dequantized experts that are computed together; `0` for one expert at a time.
        neftune_alpha: strength of noise on embeddings (NEFTune, arXiv 2310.05914); 0 for none.
        report_to: names of accelerate's trackers.
    """

    micro_batch: Size = 1
    accumulate: Size = 8
    sequence_length: Annotated[int, Field(ge=2, le=2**24)] = 2048
    steps: Positive = 200
    epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None
    checkpointing: Checkpointing = "full"
    keep_rows: KeepRows = "none"
    layer_by_layer: Literal["auto"] | bool = "auto"
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    log_every: Positive = 1
    eval_every: Positive = 50
    save_every: Positive = 50
    keep_checkpoints: Positive = 3
    early_stopping: EarlyStoppingConfig | None = None
    eval_micro_batch: Size | None = None
    warmup: NonNegative = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    max_grad_norm: Strength = 1.0
    max_grad_value: Strength = 0.0
    on_nonfinite: Literal["stop", "skip"] = "stop"
    on_oom: Literal["error", "halve_micro_batch"] = "error"
    router_aux_loss: Coefficient = 0.0
    router_aux_scope: Literal["model", "layer"] = "model"
    router_z_loss: Strength = 0.0
    dense_router_gradient: bool = False
    router_bias_rate: Strength = 0.0
    loss_memory: LossMemory = "auto"
    merge_into: Into | None = None
    expert_memory: ExpertMemory = "auto"
    neftune_alpha: Strength = 0.0
    report_to: Annotated[
        tuple[Text, ...], BeforeValidator(lambda v: (() if v == "none" else (v,)) if isinstance(v, str) else v)
    ] = ()

    @model_validator(mode="before")
    @classmethod
    def _no_steps(cls, raw: Any) -> Any:
        """Treat `steps: null` as if the key were missing, so that the default applies."""
        return {k: v for k, v in raw.items() if (k, v) != ("steps", None)} if isinstance(raw, dict) else raw

    @model_validator(mode="after")
    def _one_length(self) -> "TrainConfig":
        """Raise `ValueError` if both `steps` and `epochs` are set."""
        if self.epochs is not None and "steps" in self.model_fields_set:
            raise ValueError("steps and epochs both say how long to train; leave one out")
        return self

    @model_validator(mode="after")
    def _rows_kept_once(self) -> "TrainConfig":
        """Raise `ValueError` if `keep_rows` is set although `checkpointing` says which layers keep their rows."""
        says_which = self.checkpointing == "auto" or isinstance(self.checkpointing, KeptConfig)
        keeps_all = self.checkpointing == "none" and isinstance(self.keep_rows, int)
        if keeps_all or (says_which and self.keep_rows != "none"):
            problem = "and checkpointing says which rows are kept; leave keep_rows out"
            raise ValueError(f"keep_rows: {self.keep_rows}, {problem}")
        return self
