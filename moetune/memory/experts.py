"""The backward of a layer's experts on sizes: `moetune/experts/mlp.py`, allocation by allocation, for one expert.

Experts run one after the other, so one expert's rows count, those of the fullest. Letters as in activations.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from moetune.memory.facts import Experts
from moetune.memory.layer_plan import LayerPlan, Run
from moetune.memory.tape import Piece, Tape


@dataclass(frozen=True)
class ExpertsBackward:
    """Its fullest moment: tensors beside the gradients of x and of the routing weights, and bytes of parameters'
    gradients, in all and at that moment."""

    temporaries: tuple[Piece, ...]
    gradients: int
    gradients_then: int


def experts_backward(
    tape: Tape, moe: Experts, plan: LayerPlan, run: Run, *, needs_x: bool, weights_width: int
) -> ExpertsBackward:
    """The fullest moment of the backward of one layer's experts."""
    whole, factors = expert_gradients(moe, run)
    used_up = plan.lora_experts * factors if "lora" in run.fused else 0
    whole, factors = whole * ("experts" not in run.fused), factors * ("lora" not in run.fused)
    everything = plan.experts * whole + plan.lora_experts * factors
    held = moe.shape.num_experts if plan.exchange is None else plan.exchange.held
    frozen = held - plan.experts - plan.lora_experts
    best: _Expert | None = None
    for kind, count in (("frozen", frozen), ("lora", plan.lora_experts), ("trained", plan.experts)):
        if count:
            expert = _Expert(tape, moe, run, kind, everything, whole, used_up, needs_x=needs_x)
            if best is None or expert.fullest > best.fullest:
                best = expert
    assert best is not None
    return ExpertsBackward(tuple(best.pieces), everything, best.gradients_then)


def expert_gradients(moe: Experts, run: Run) -> tuple[int, int]:
    """Bytes of the gradients of one expert that trains whole, and of the factors of one with LoRA."""
    shape = moe.shape
    rows = shape.intermediate * (2 if shape.has_gate else 1)
    parts = 2 if run.split and shape.has_gate else 1
    factors = run.rank * (parts * shape.hidden + rows) + run.rank * (shape.intermediate + shape.hidden)
    return shape.parameters_per_expert * run.width, 4 * factors


class _Expert:
    """One turn of the loop over experts."""

    def __init__(
        self,
        tape: Tape,
        moe: Experts,
        run: Run,
        kind: str,
        everything: int,
        whole: int,
        used_up: int,
        *,
        needs_x: bool,
    ) -> None:
        self.tape, self.moe, self.run, self.kind = tape, moe, run, kind
        self.alive: dict[str, Piece] = {}
        self.gradients = everything
        self.fullest = self.gradients_then = 0
        self.pieces: list[Piece] = []
        self.needs_dgate = needs_x or kind != "frozen"
        if kind == "trained":
            self.gradients -= whole
        if used_up:
            self.alive["factors"] = Piece("experts", "gradients of factors, until all are made", f"{used_up}", 1)
        self._turn(needs_x)

    def _turn(self, needs_x: bool) -> None:
        self._take("dy_NH", "N·H")
        self._unpack("down unpacked", "H·I")
        self._take("dact", "N·I")
        self._free("down unpacked")
        if not self.run.keeps_rows:
            self._unpack("gate_up unpacked", "O·H")
            self._take("x_NH", "N·H")
            self._take("gate_up", "N·O")
            self._free("x_NH")
        self._keep_activation()
        self._take("act", "N·I")
        if self.kind != "frozen":
            self._take("w·dy", "N·H")
            self._made("H·I", self.moe.shape.hidden, self.moe.shape.intermediate)
            self._free("w·dy")
        if not self.needs_dgate:
            return
        self._free("act", "dy_NH")
        self._activation_backward()
        self._free("dact", "gate_up")
        if needs_x:
            if self.run.keeps_rows:
                self._unpack("gate_up unpacked", "O·H")
            self._take("dx_NH", "N·H")
            self._free("dx_NH")
            if self.run.keeps_rows:
                self._free("gate_up unpacked")
        if self.kind != "frozen":
            self._take("x_NH", "N·H")
            self._made("O·H", self.tape.letters["O"], self.moe.shape.hidden)
            self._free("x_NH")

    def _keep_activation(self) -> None:
        """What the activation's own graph keeps: silu(gate); for gpt-oss both halves clamped, sigmoid and glu."""
        if self.moe.activation == "silu":
            self._take("silu(gate)", "N·I")
            return
        for name in ("clamped gate", "clamped up", "α·gate", "sigmoid", "glu", "up + 1"):
            self._take(name, "N·I")

    def _activation_backward(self) -> None:
        if self.moe.activation == "silu":
            self._take("dact·up", "N·I")
            self._take("dact·silu", "N·I")
            self._free("silu(gate)")
            self._take("dgate", "N·I")
            self._free("dact·up")
            self._take("dgate_up", "N·O")
            self._free("dgate", "dact·silu")
            return
        self._take("dup", "N·I")
        self._take("dglu", "N·I")
        self._free("glu", "up + 1")
        for name in ("dgate", "dsigmoid", "dgate again", "dgate in all"):
            self._take(name, "N·I")
        self._free("sigmoid", "dsigmoid", "dgate", "dgate again", "α·gate", "dglu")
        self._take("dup of gate_up", "N·O")
        self._take("dgate_up", "N·O")
        self._take("sum", "N·O")
        self._free("sum", "dup of gate_up", "dup", "dgate in all", "clamped gate", "clamped up")

    # --- Taking and freeing ---------------------------------------------------------------------------------------

    def _take(self, name: str, shape: str, width: int | None = None) -> None:
        width = self.run.width if width is None else width
        if width:
            self.alive[name] = Piece("experts", name, shape, width)
            self._look()

    def _free(self, *names: str) -> None:
        for name in names:
            self.alive.pop(name, None)

    def _matrix_is_new(self) -> int:
        """Width of an unpacked matrix; 0 where the stored one is used as it is."""
        stored = {"bf16": 2, "fp32": 4}.get(self.run.base)
        return 0 if self.kind == "trained" or stored == self.run.width else self.run.width

    def _unpack(self, name: str, shape: str) -> None:
        """NF4 scales come out in float32 first; int8 weights are scaled in float32, then cast."""
        if not (width := self._matrix_is_new()):
            return
        if self.run.base == "nf4" and self.run.nested:
            self._scales(shape)
        if self.run.base == "int8" and width != 4:
            self._take("in float32", shape, 4)
        self._take(name, shape)
        self._free("in float32", "scales")

    def _scales(self, shape: str) -> None:
        letters = f"{shape}/64"
        self.tape._sizes[letters] = -(-self.tape.numel(shape) // 64)
        self.alive["scales"] = Piece("experts", "scales", letters, 4)

    def _made(self, shape: str, rows: int, columns: int) -> None:
        """A gradient of an expert's matrix: a trained one's stays or is used up, a factor's goes into its stack."""
        if self.kind == "trained" and "experts" in self.run.fused:
            beside = self.run.optimizers.while_used_up("experts", (rows, columns), self.run.width)
            self.alive["beside"] = Piece("experts", "update of the gradient", f"{beside}", 1)
            self._take("gradient", shape)
            self._free("gradient", "beside")
        if self.kind == "trained" and "experts" not in self.run.fused:
            bias = rows * self.run.width if self.moe.shape.has_bias else 0
            self.gradients += self.tape.numel(shape) * self.run.width + bias
            self._look()

    def _look(self) -> None:
        alive = self.tape.nbytes(self.alive.values()) + self.gradients
        if alive > self.fullest:
            self.fullest, self.gradients_then, self.pieces = alive, self.gradients, list(self.alive.values())
