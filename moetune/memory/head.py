"""What stands outside the layers: the batch, the final norm, the head and the loss, tensor by tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moetune.memory.tape import Piece, Tape
from moetune.step.loss import block_tokens, chunk_tokens

if TYPE_CHECKING:
    from moetune.memory.formulas import Setup


def head_lora(setup: Setup) -> tuple[str, ...]:
    """Paths of linear layers with factors outside of decoder layers: that of the head, or none."""
    return tuple(path for path in setup.selection.lora_linears if not path.startswith(setup.facts.prefix))


class Head:
    """The tensors of one micro-batch that belong to no layer."""

    def __init__(self, setup: Setup) -> None:
        self.setup, facts, run = setup, setup.facts, setup.run
        tokens = run.batch * run.sequence
        width, vocabulary = run.width, facts.vocabulary
        self.lora = bool(head_lora(setup))
        # Of one token: logits; with LoRA also B·A·x, that scaled and the sum in float32, and the sum cast; scaled ones.
        row = (12 + width * (1 + (width < 4)) if self.lora else width) + width * facts.scaled
        chunk = chunk_tokens(setup.config.train.loss_bytes, vocabulary, width, vocabulary * row, tokens)
        last = tokens % chunk
        self.chunks = [("n", tokens >= 2 * chunk)] + ([("last n", True)] if last else [])
        """Chunks that may be the fullest, a whole one and a shorter last one, and whether others are before them."""
        packed = setup.config.data is None or setup.config.data.packing
        self.tape = Tape(
            {
                "B": run.batch,
                "S": run.sequence,
                "T": tokens,
                "H": facts.hidden,
                "V": facts.vocabulary,
                "n": chunk,
                "last n": last,
                "block(n)": min(chunk, block_tokens(vocabulary)),
                "block(last n)": min(last, block_tokens(vocabulary)),
                "r": run.rank,
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
            if facts.scaled and facts.embedding not in self.setup.outside:
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
        kept = [*self.batch(), self._piece("targets", "T", 8), self._piece("normed", "T·H")]
        return [*kept, *max(self._forward_of_chunk("n"), key=self.nbytes)]

    def loss(self) -> list[Piece]:
        """The fullest moment of the loss, of the head's backward, or of the final norm's."""
        moments = self._moments() if self.setup.loss_width is None else self._moments_of_torch(self.setup.loss_width)
        return max(moments, key=self.nbytes)

    def _forward_of_chunk(self, n: str) -> list[list[Piece]]:
        """The tail, and a block of logits in float32 if they are narrower."""
        logits, narrow = self._piece("logits of a chunk", f"{n}·V"), self.setup.run.width < 4
        moments = [[logits, self._piece("block of logits in float32", f"block({n})·V", 4)] if narrow else [logits]]
        if self.lora:
            both = self._piece("s·B·A·x of a chunk, and B·A·x or the sum", f"2·{n}·V", 4)
            moments.append([logits, both, *self._low(n)])
        if self.setup.facts.scaled:
            moments.append([logits, self._piece("logits scaled", f"{n}·V")])
        return moments

    def _low(self, n: str) -> list[Piece]:
        copy = [self._piece("normed of a chunk in float32", f"{n}·H", 4)] if self.setup.run.width < 4 else []
        return [*copy, self._piece("A·x of a chunk", f"{n}·r", 4)]

    def _moments(self) -> list[list[Piece]]:
        flows = self.needs or self.norm_trains
        inside = [*self._kept_by_norm(), self._piece("targets", "T", 8), self._piece("normed", "T·H")]
        inside += [self._piece("gradient of normed", "T·H")] if flows else []
        moments = []
        for n, earlier in self.chunks:
            around = [*inside, *(self._sums() if earlier else [])]
            moments += [[*around, *pieces] for pieces in self._forward_of_chunk(n)]
            moments.append([*around, *self._table(), *self._backward_of_chunk(n, flows)])
        again = [self._piece(f"{piece.label}, in forward", piece.shape) for piece in self._table()]
        passed = [self._piece("gradient of normed, in forward and in backward", "2·T·H")] if flows else []
        moments.append([*self._kept_by_norm(), *self._table(), *again, *passed])
        return moments + self._norm_backward()

    def _sums(self) -> list[Piece]:
        """What earlier chunks gave for what trains in the tail."""
        sums = [self._piece("sum of the head's gradients", "V·H", 4)] if self.head_trains else []
        if self.lora:
            sums += [
                self._piece(f"sum of {name}'s gradients", shape, 4) for name, shape in (("A", "r·H"), ("B", "V·r"))
            ]
        return sums

    def _backward_of_chunk(self, n: str, flows: bool) -> list[Piece]:
        pieces, narrow = [self._piece("gradient of a chunk's logits", f"{n}·V")], self.setup.run.width < 4
        if self.setup.facts.scaled and not (self.lora and narrow):  # there it is gone when the most is alive
            pieces.append(self._piece("gradient of logits before they are scaled", f"{n}·V"))
        if self.lora:
            pieces += [self._piece("gradient of B·A·x", f"{n}·V", 4), *self._low(n)]
            if narrow:
                wide = self._piece("gradient of the sum in float32", f"{n}·V", 4)
                return [*pieces, wide, self._piece("gradient of the head's output", f"{n}·V")]
            return [*pieces, self._piece("gradient of A·x", f"{n}·r", 4), self._piece("gradient of B", "V·r", 4)]
        return [*pieces, self._piece("gradient of a chunk's normed", f"{n}·H")] if flows else pieces

    def _moments_of_torch(self, width: int) -> list[list[Piece]]:
        """torch's cross-entropy of all logits: log-softmax, its gradient and that of the logits, which stay."""
        kept = [self._piece("normed", "T·H")] if self.head_trains else []
        kept += self._kept_by_norm()
        logits = self._piece("logits", "T·V")
        flows = [self._piece("gradient of normed", "T·H")] if self.needs or self.norm_trains else []
        wide = self._piece("log-softmax, its gradient, the logits' gradient", "3·T·V", width)
        return [[*kept, logits, wide], [*kept, logits, *flows, *self._table()], *self._norm_backward()]

    def _kept_by_norm(self) -> list[Piece]:
        keeps = self.norm_trains and self.setup.facts.norm != "layer"
        return [self._piece("norm: x·rsqrt", "T·H")] if keeps else []

    def _norm_backward(self) -> list[list[Piece]]:
        if self.setup.facts.norm == "layer" or not self.needs:
            return []
        stays = [] if "other" in self.setup.run.fused else self._table()
        return [[*stays, self._piece("norm backward", "5·T·H", 4)]]

    def _table(self) -> list[Piece]:
        return [self._piece("gradient of the head", "V·H")] if self.head_trains else []
