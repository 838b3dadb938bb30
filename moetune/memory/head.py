"""What stands outside the layers: the batch, the final norm, the head and the loss, tensor by tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moetune.memory.tape import Piece, Tape

if TYPE_CHECKING:
    from moetune.memory.formulas import Setup

LOSS_BLOCK = 2**23
"""Elements of logits that the loss turns to float32 at once (step/loss.py)."""


class Head:
    """The tensors of one micro-batch that belong to no layer."""

    def __init__(self, setup: Setup) -> None:
        self.setup, facts, run = setup, setup.facts, setup.run
        tokens = run.batch * run.sequence
        rows = min(tokens, max(1, LOSS_BLOCK // facts.vocabulary))
        self.blocks = -(-tokens // rows)
        packed = setup.config.data is None or setup.config.data.packing
        self.tape = Tape(
            {
                "B": run.batch,
                "S": run.sequence,
                "T": tokens,
                "H": facts.hidden,
                "V": facts.vocabulary,
                "n": rows,
                "P": tokens if packed else run.sequence,
                "a": setup.config.train.accumulate,
                "R": facts.rotary,
            }
        )
        self.packed = packed
        self.needs = setup.plans[-1].input_needs or any(
            (plan.full or plan.lora or plan.experts or plan.lora_experts) for plan in setup.plans[-1:]
        )
        self.head_trains = facts.head in setup.outside
        self.norm_trains = f"{facts.final_norm}.weight" in setup.outside

    def nbytes(self, pieces: list[Piece]) -> int:
        return self.tape.nbytes(pieces)

    def _piece(self, label: str, shape: str, width: int | None = None) -> Piece:
        return Piece("head", label, shape, self.setup.run.width if width is None else width)

    def batch(self) -> list[Piece]:
        """The micro-batches of a step as they come from the collator, positions' cosines and sines, and masks, which
        checkpointed layers hold on to."""
        run, facts = self.setup.run, self.setup.facts
        pieces = [Piece("batch", "ids, labels and masks of a step", f"{4 if self.packed else 3}·a·T", 8)]
        match facts.rotation:
            case "complex":
                pieces.append(Piece("batch", "rotations, complex", "P·R", 4))
            case "split":
                pieces.append(Piece("batch", "cosines and sines", "P·R", run.width))
            case _:
                pieces.append(Piece("batch", "cosines and sines", "2·P·R", run.width))
        if run.checkpointed:
            width = run.width if run.eager else 1
            pieces.append(Piece("batch", "attention masks", f"{facts.masks}·B·S·S", width))
            if facts.scaled:
                pieces.append(Piece("batch", "embeddings before they are scaled", "T·H", run.width))
        return pieces

    def saved(self) -> list[Piece]:
        """What the final norm keeps of its input."""
        norm, b = self.setup.facts.norm, self.setup.run.width
        if not (self.needs or self.norm_trains):
            return []
        if norm == "layer":
            return [self._piece("norm's input", "T·H", b), self._piece("norm: mean and rstd", "2·T", 4)]
        return [self._piece("norm's input in float32", "T·H", 4), self._piece("norm: rsqrt", "T", 4)]

    def evaluation(self) -> list[Piece]:
        """A batch without gradients, at its loss."""
        block = [self._piece("block of logits in float32", "n·V", 4)] if self.setup.run.width < 4 else []
        return [*self.batch(), self._piece("logits", "T·V"), *block]

    def loss(self) -> list[Piece]:
        """The fullest of four moments: the loss backward, the logits scaled, the head's backward, the norm's."""
        return max(self._moments(), key=self.nbytes)

    def _moments(self) -> list[list[Piece]]:
        facts = self.setup.facts
        kept = [self._piece("targets", "T", 8), self._piece("logsumexp", "T", 4)]
        if self.norm_trains and facts.norm != "layer":
            kept.append(self._piece("norm: x·rsqrt", "T·H"))
        if self.head_trains:
            kept.append(self._piece("normed", "T·H"))
        logits = self._piece("logits, then their gradient", "T·V")
        moments = [[*kept, logits, self._beside_logits()]]
        if facts.scaled:
            moments.append([*kept, logits, self._piece("logits scaled", "T·V"), self._piece("normed", "T·H")])
        flows = [self._piece("gradient of normed", "T·H")] if self.needs or self.norm_trains else []
        fused = self.setup.fused
        table = [self._piece("gradient of the head", "V·H")] if self.head_trains and not fused else []
        moments.append([*kept, logits, *flows, *table])
        if facts.norm != "layer" and self.needs:
            moments.append([*table, self._piece("norm backward", "5·T·H", 4)])
        return moments

    def _beside_logits(self) -> Piece:
        """moetune's loss has a block's float32 copy (if it is no float32 yet), the shifted block and the former one.
        torch's has whole the log-softmax, its gradient and that of the logits, which themselves stay."""
        if (width := self.setup.loss_width) is not None:
            return self._piece("log-softmax, its gradient, the logits' gradient", "3·T·V", width)
        copies = (self.setup.run.width < 4) + 1 + (self.blocks > 1)
        return self._piece("blocks of logits in float32", f"{copies}·n·V", 4)
