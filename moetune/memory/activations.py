"""One decoder layer on a tape: attention, norms, MLP and routers, operation by operation as transformers writes them.

Letters: B sequences of S tokens, T = B·S; H hidden size; h query heads, k key-value heads, d their size, v a value
head's size; F rows of an MLP; E experts, K of them a token, N rows of the fullest expert, I expert dim, O rows of
gate_up; r LoRA rank. b is the width of the compute dtype. Where experts are spread over ranks: U tokens whose rows this
rank sends, M = U·K rows that it sends, A rows that arrive.
"""

from __future__ import annotations

from moetune.memory.experts import experts_backward
from moetune.memory.facts import LayerFacts, Linear
from moetune.memory.layer_plan import Exchanged, LayerPlan, Run
from moetune.memory.quantities import Split
from moetune.memory.tape import Moment, Piece, Tape, Value


class LayerTape:
    """The forward pass of one layer, recorded; `output` is what it hands to the next."""

    def __init__(self, facts: LayerFacts, plan: LayerPlan, run: Run, family: str, hidden: int) -> None:
        self.facts, self.plan, self.run, self.family = facts, plan, run, family
        self.tape = Tape(_letters(facts, plan, run, hidden), run.fused)
        self._wide: dict[tuple[str, int], Value] = {}  # copies of inputs in float32, by module and input
        self.gathered: tuple[int, ...] = ()  # bytes, by the tensor-parallel ranks of a layer whose experts are spread
        self.gathered_back: tuple[int, ...] = ()
        self.input = self.tape.new(
            "input of the layer", "T·H", run.width, needs=plan.input_needs, external=run.checkpointed
        )
        self.output = self._layer(self.input)

    def _layer(self, x: Value) -> Value:
        first, second = self.facts.norms
        self.tape.where = "attention"
        mixed = self._attention(self._norm(x, first, self.facts.norm))
        x = self._residual(x, mixed)
        self.tape.where = "experts" if self.facts.experts else "mlp"
        normed = self._norm(x, second, self.facts.norm)
        out = self._moe(normed) if self.facts.experts else self._mlp(normed, self.facts.mlp, "F")
        return self._residual(x, out)

    def _residual(self, x: Value, branch: Value) -> Value:
        if self.family == "granite":
            branch = self._map(branch, "scaled branch")
        y = self._new("residual", x.shape)
        self.tape.record("residual", y, passed=(x, branch))
        return y

    def saved(self) -> list[Piece]:
        """What the forward pass leaves for backward: under checkpointing the layer's input and its routers' choices, if
        anything in the layer needs a gradient at all."""
        kept = self.tape.saved()
        if not self.run.checkpointed or not kept:
            return kept
        choices = [Piece("experts", "router's choices", "c·T", 8)] if self.facts.experts else []
        if self.run.eager and self.facts.attention.sinks:  # checkpointing takes any maximum for a choice
            choices.append(Piece("attention", "where the maximum is", "h·T", 8))
        return choices if self.plan.offloads else [self.input.storage.piece, *choices]

    @property
    def keeps_input(self) -> bool:
        """Whether the layer's own operations keep its input, and not a copy of it in float32."""
        return self.run.width == 4 or self.facts.norm == "layer"

    @property
    def split(self) -> Split:
        """What tensor-parallel ranks send: rows and columns of attention's matrices make parts of sums."""
        path, plan = self.facts.attention_path, self.plan
        hidden, low = self.input.bytes, 4 * self.tape.numel("T·r")
        into = [name for name in self.facts.linears if name.startswith(f"{path}.") and name != f"{path}.o_proj"]
        reads = plan.input_needs or self._trains(f"{self.facts.norms[0]}.weight")
        labels = [node.label for node in self.tape.nodes]
        after = self.tape.nodes[labels.index("gather") + 1 :] if "gather" in labels else []
        return Split(
            added=(hidden,) + (low,) * (f"{path}.o_proj" in plan.lora),
            added_back=(hidden,) * (len(into) if reads else 0) + (low,) * len(plan.lora & set(into)),
            gathered=self.gathered,
            gathered_back=self.gathered_back,
            again=any(node.saved for node in after),
        )

    @property
    def experts_return(self) -> bool:
        """Whether the experts run backward."""
        return any(node.label == "experts" for node in self.tape.nodes)

    def moments(self, accumulating: bool) -> list[Moment]:
        """The fullest moment of each part of the layer. A checkpointed layer's forward pass runs again in backward."""
        again = self.tape.forward(self.output, again=self.run.checkpointed)
        return self.tape.backward(self.output, accumulating=accumulating, again=self.run.checkpointed) + again

    def alive_at(self, moment: Moment, accumulating: bool) -> tuple[list[Piece], list[Piece]]:
        """(what the forward pass left, all else) that is alive then; gradients of parameters are not listed. What a
        checkpointed layer computes again is not left by the forward pass."""
        kept, others = self.tape.alive_at(self.output, moment, accumulating=accumulating, again=self.run.checkpointed)
        return ([], [*kept, *others]) if self.run.checkpointed else (kept, others)

    # --- Operations that everything is made of ------------------------------------------------------------------

    def _new(self, label: str, shape: str, width: int | None = None) -> Value:
        return self.tape.new(label, shape, self.run.width if width is None else width)

    def _piece(self, label: str, shape: str, width: int | None = None) -> Piece:
        return self.tape.piece(label, shape, self.run.width if width is None else width)

    def _map(self, x: Value, label: str, *, shape: str | None = None, keeps: tuple[Value, ...] = ()) -> Value:
        """An operation that makes one tensor of another, and of its gradient a new one."""
        y = self._new(label, shape or x.shape, x.width)
        self.tape.record(label, y, fresh=(x,), saved=keeps)
        return y

    def _cast(self, x: Value, width: int, label: str) -> Value:
        """A copy in another dtype; nothing where it has that dtype already."""
        if x.width == width:
            return x
        y = self._new(label, x.shape, width)
        self.tape.record(label, y, fresh=(x,))
        return y

    def _softmax(self, x: Value, label: str) -> Value:
        y = self._new(label, x.shape, x.width)
        self.tape.record(label, y, fresh=(x,), saved=(y,))
        return y

    def _product(self, a: Value, b: Value, label: str, shape: str) -> Value:
        """A product of two activations, elementwise or of matrices: each factor's gradient reads the other."""
        y = self._new(label, shape, a.width)
        keeps = ((b,) if a.needs else ()) + ((a,) if b.needs else ())
        self.tape.record(label, y, fresh=(a, b), saved=keeps)
        return y

    def _trains(self, name: str) -> bool:
        return name in self.plan.full

    def _norm(self, x: Value, path: str, kind: str) -> Value:
        """RMSNorm as transformers writes it, in float32: y = w·x·rsqrt(mean(x²) + ε). LayerNorm is one operation."""
        weight, shape = x.shape.rpartition("·")[2], x.shape
        rows = shape.rpartition("·")[0]
        trains = self._trains(f"{path}.weight")
        gradients = self.tape.numel(weight) * self.run.width * trains
        name = path.rpartition(".")[2]
        if kind == "layer":
            y, moments = self._new(name, shape), self._new(f"{name}: mean and rstd", f"2·{rows}", 4)
            self.tape.record(name, y, fresh=(x,), saved=(x, moments), gradients=2 * gradients)
            return y
        wide = self._cast(x, 4, f"{name}: x in float32")
        square = self._new("square", shape, 4)
        two = (self._piece("x again", shape, 4), self._piece("2·x", shape, 4))
        self.tape.record("square", square, fresh=(wide,), saved=(wide,), temporaries=two)
        mean = self._map(square, "mean", shape=rows)
        rsqrt = self._new(f"{name}: rsqrt", rows, 4)
        self.tape.record("rsqrt", rsqrt, fresh=(mean,), saved=(rsqrt,))
        normal = self._new(f"{name}: x·rsqrt", shape, 4)
        product = (self._piece("gradient·x", shape, 4),)
        self.tape.record("normal", normal, fresh=(wide, rsqrt), saved=(wide, rsqrt), temporaries=product)
        if kind == "rms":
            normal = self._cast(normal, self.run.width, f"{name}: x·rsqrt")
        y = self._new(name, shape, normal.width)
        product = (self._piece("gradient·x", shape, normal.width),) if trains else ()
        saved = (normal,) if trains else ()
        self.tape.record(name, y, fresh=(normal,), saved=saved, temporaries=product, gradients=gradients)
        return self._cast(y, self.run.width, name)

    # --- Linear layers ------------------------------------------------------------------------------------------

    def _linear(self, x: Value, path: str, out: str) -> Value:
        """x [T, in] -> [T, out], with LoRA if the plan has it there."""
        base = self._base_linear(x, path, self.facts.linears[path], out)
        return self._lora(x, base, path, out) if path in self.plan.lora else base

    def _base_linear(self, x: Value, path: str, linear: Linear, out: str) -> Value:
        b, name = self.run.width, path.rpartition(".")[2]
        tokens, _, into = x.shape.partition("·")
        y = self._new(name, f"{tokens}·{out}", b)
        trains = self._trains(f"{path}.weight")
        gradients = linear.out * linear.into * b * trains
        gradients += linear.out * b * (linear.bias and self._trains(f"{path}.bias"))
        packed = linear.packable and not trains
        unpacked = self._unpacked(name, f"{out}·{into}") if packed else ()
        saved = (x,) if trains else ()
        # What is packed unpacks its weight itself; any other linear layer reads it from autograd.
        reads = x.needs and not unpacked
        self.tape.record(name, y, fresh=(x,), saved=saved, reads=reads, temporaries=unpacked, gradients=gradients)
        return y

    def _unpacked(self, name: str, shape: str) -> tuple[Piece, ...]:
        """What backward takes to have a packed weight in the compute dtype."""
        b, base = self.run.width, self.run.base
        if base == "nf4":
            return (self._piece(f"{name} unpacked", shape, b),)
        if base == "int8":  # scaled in float32, then cast
            cast = (self._piece(f"{name} unpacked", shape, b),) if b != 4 else ()
            return (self._piece(f"{name} in float32", shape, 4), *cast)
        return (self._piece(f"{name} unpacked", shape, b),) if {"bf16": 2, "fp32": 4}[base] != b else ()

    def _lora(self, x: Value, base: Value, path: str, out: str) -> Value:
        """PEFT: base + s·B·(A·x), the second term in float32; the layers of a module that read the same x share a copy
        of it (adapt/lora.py)."""
        linear, r, (parent, _, name) = self.facts.linears[path], self.run.rank, path.rpartition(".")
        tokens = x.shape.partition("·")[0]
        wide = self._wide.get((parent, id(x)))
        if wide is None:
            wide = self._wide[parent, id(x)] = self._cast(x, 4, f"{name}: x in float32")
        low = self._new(f"{name}: A·x", f"{tokens}·r", 4)
        self.tape.record("A", low, fresh=(wide,), saved=(wide,), gradients=4 * r * linear.into, part="lora")
        high = self._new(f"{name}: B·A·x", f"{tokens}·{out}", 4)
        self.tape.record("B", high, fresh=(low,), saved=(low,), gradients=4 * r * linear.out, part="lora")
        high = self._map(high, f"{name}: s·B·A·x")
        total = self._new(name, base.shape, 4)
        same = base.width == 4
        self.tape.record("sum", total, fresh=() if same else (base,), passed=(high, base) if same else (high,))
        return self._cast(total, self.run.width, name)

    def _mlp(self, x: Value, path: str, rows: str) -> Value:
        """down(silu(gate(x)) · up(x))."""
        gate = self._linear(x, f"{path}.gate_proj", rows)
        act = self._map(gate, "silu(gate)", keeps=(gate,))
        up = self._linear(x, f"{path}.up_proj", rows)
        return self._linear(self._product(act, up, "silu(gate)·up", up.shape), f"{path}.down_proj", "H")

    # --- Attention ----------------------------------------------------------------------------------------------

    def _attention(self, x: Value) -> Value:
        a, path = self.facts.attention, self.facts.attention_path
        q, key, value = self._latent(x) if a.latent else self._heads(x)
        if self.run.eager:
            out = self._eager(q, self._repeat(key), self._repeat(value))
        elif a.head == a.value_head:
            out = self._fused(q, self._repeat(key), self._repeat(value))
        else:
            out = self._in_steps(q, key, value)
        return self._linear(out, f"{path}.o_proj", "H")

    def _heads(self, x: Value) -> tuple[Value, Value, Value]:
        a, path = self.facts.attention, self.facts.attention_path
        q = self._linear(x, f"{path}.q_proj", "h·d")
        key = self._linear(x, f"{path}.k_proj", "k·d")
        value = self._linear(x, f"{path}.v_proj", "k·d")
        if a.norm == "head":
            q, key = self._norm(q, f"{path}.q_norm", "rms"), self._norm(key, f"{path}.k_norm", "rms")
        elif a.norm == "all":
            q, key = self._norm_all(q, "h·d", "q"), self._norm_all(key, "k·d", "k")
        return self._rotated(q, "q rotated"), self._rotated(key, "k rotated"), value

    def _norm_all(self, x: Value, width: str, name: str) -> Value:
        """A norm over all heads of a token at once."""
        flat = self.tape.part_of(x, f"T·{name}d")
        self.tape.record("view", flat, passed=(x,))
        normed = self._norm(flat, f"{self.facts.attention_path}.{name}_norm", "rms")
        heads = self.tape.part_of(normed, f"T·{width}")
        self.tape.record("view", heads, passed=(normed,))
        return heads

    def _rotated(self, x: Value, label: str) -> Value:
        """Rotary positions: sums and products with cos and sin, which are nobody's here; so nothing of x is kept.
        Backward holds the gradients of both products and of one half at once."""
        y = self._new(label, x.shape)
        halves = (self._piece("gradient·sin", x.shape), self._piece("gradient of a half", x.shape))
        self.tape.record(label, y, fresh=(x,), temporaries=halves)
        return y

    def _repeat(self, x: Value) -> Value:
        """With a mask, scaled_dot_product_attention wants as many key and value heads as query heads: copies, but of a
        single head, which is looked at again and again."""
        if self.facts.attention.kv_heads == self.facts.attention.heads:
            return x
        if self.facts.attention.kv_heads == 1:
            view = self.tape.part_of(x, "T·h·d")
            self.tape.record("key-value head expanded", view, fresh=(x,))
            return view
        return self._map(x, "key-value heads repeated", shape="T·h·d")

    def _fused(self, q: Value, key: Value, value: Value) -> Value:
        """One kernel: keeps its inputs, its output, a logsumexp a row, and its copy of the mask as numbers."""
        out = self._new("attention's output", "T·h·v")
        kept = (q, key, value, out, self._new("logsumexp", "h·T", 4), self._new("mask as numbers", "B·S·S"))
        self.tape.record("attention", out, fresh=(q, key, value), saved=kept)
        a = self.facts.attention
        # The output is laid out as the queries are: by head where they were joined of a rotated part and the rest.
        return self._map(out, "attention's output, by token") if a.rotary < a.head else out

    def _in_steps(self, q: Value, key: Value, value: Value) -> Value:
        """Heads of queries and values differ in size: no kernel of one pass, but products and a softmax in float32."""
        whole, copies = "B·h·S·S", ()
        weights_copy: tuple[Piece, ...] = ()
        if self.run.width < 4:
            sizes = {"q": "T·h·d", "k": "T·h·d", "v": "T·h·v"}
            copies = tuple(self._piece(f"{name} in float32", shape, 4) for name, shape in sizes.items())
            weights_copy = (self._piece("attention weights", whole), self._piece("attention's output", "T·h·v"))
        before = (
            self._piece("normed", "T·H"),
            self._piece("q before and after rotation, and k", "3·T·h·d"),
            self._piece("q's rotated part", "T·h·R"),
            self._piece("k and v expanded", "T·h·X"),
            *copies,
            self._piece("q and k scaled", "2·T·h·d", 4),
        )
        self.tape.pass_by(*before, self._piece("scores, with the mask and without", f"2·{whole}", 4))
        after = (self._piece("softmax of scores", whole, 4), self._piece("v contiguous, and the output", "2·T·h·v", 4))
        self.tape.pass_by(*before, *after, *weights_copy)
        q = self._map(self._cast(q, 4, "q in float32"), "q scaled")
        key = self._map(self._cast(key, 4, "k in float32"), "k scaled")
        value = self._map(self._cast(value, 4, "v in float32"), "v contiguous")
        scores = self._product(q, key, "scores", whole)
        weights = self._softmax(scores, "softmax of scores")
        out = self._product(weights, value, "attention's output", "T·h·v")
        return self._map(self._cast(out, self.run.width, "attention's output"), "attention's output")

    def _eager(self, q: Value, key: Value, value: Value) -> Value:
        scores = self._map(self._product(q, key, "scores", "B·h·S·S"), "scaled scores")
        if self.facts.attention.sinks:
            weights = self._with_sinks(scores)
        else:
            wide = self._softmax(self._cast(scores, 4, "scores in float32"), "softmax of scores")
            weights = self._cast(wide, self.run.width, "attention weights")
        if self.facts.attention.latent and self.run.batch > 1:  # values of several sequences are not one matrix a head
            value = self._map(value, "v contiguous")
        out = self._product(weights, value, "attention's output", "T·h·v")
        return self._map(out, "attention's output, by token")

    def _with_sinks(self, scores: Value) -> Value:
        """gpt-oss: a learned logit beside each row's scores, the row's maximum taken off before softmax."""
        shape, b = "B·h·S·S1", self.run.width
        joined = self._new("scores and sink", shape)
        sinks = self.facts.attention.heads * b * self._trains(f"{self.facts.attention_path}.sinks")
        self.tape.record("cat", joined, passed=(scores,), gradients=sinks)
        most = self._new("maximum", "h·T")
        zeros = (self._piece("zeros", shape),)
        index = self.tape.new("where the maximum is", "h·T", 8, external=self.run.checkpointed)
        self.tape.record("maximum", most, fresh=(joined,), saved=(index,), temporaries=zeros)
        less = self._new("scores less maximum", shape)
        self.tape.record("difference", less, passed=(joined,), fresh=(most,), temporaries=zeros)
        weights = self._softmax(less, "softmax of scores")
        # A checkpointed layer's recomputation holds on to masks that are counted with the batch: one of each kind.
        masks = () if self.run.checkpointed else (self._piece("masks", "2·B·S·S"),)
        self.tape.pass_by(
            *masks,
            self._piece("normed", "T·H"),
            self._piece("k rotated, and v", "2·T·k·d"),
            self._piece("v repeated", "T·h·d"),
            self._piece("scores with the mask", "B·h·S·S"),
            self._piece("scores less maximum", shape),
        )
        kept = self.tape.part_of(weights, "B·h·S·S")
        self.tape.record("without sink", kept, fresh=(weights,))
        return kept

    def _latent(self, x: Value) -> tuple[Value, Value, Value]:
        """Multi-head latent attention (arXiv 2405.04434): keys and values from one compressed vector a token."""
        a, path = self.facts.attention, self.facts.attention_path
        if a.query_latent:
            low = self._norm(self._linear(x, f"{path}.q_a_proj", "Q"), f"{path}.q_a_layernorm", "rms")
            q = self._linear(low, f"{path}.q_b_proj", "h·d")
        else:
            q = self._linear(x, f"{path}.q_proj", "h·d")
        q = self._map(q, "q rotated")
        compressed = self._linear(x, f"{path}.kv_a_proj_with_mqa", "C")
        latent = self.tape.part_of(compressed, "T·L")
        self.tape.record("latent", latent, fresh=(compressed,))
        expanded = self._linear(self._norm(latent, f"{path}.kv_a_layernorm", "rms"), f"{path}.kv_b_proj", "h·X")
        key, value = self._new("k", "T·h·d"), self.tape.part_of(expanded, "T·h·v")
        copies = (self._piece("gradient of k", "T·h·d"),)
        self.tape.record("split", (key, value), fresh=(expanded,), temporaries=copies)
        return q, key, value

    # --- Mixture of experts -------------------------------------------------------------------------------------

    def _moe(self, x: Value) -> Value:
        moe = self.facts.experts
        assert moe is not None
        for _ in range(moe.noises):
            x = self._noised(x)
        before = moe.shared is not None and moe.gated
        shared = self._mlp(x, moe.shared, "F") if before and moe.shared is not None else None
        weights = self._router(x)
        out = self._experts(x, weights)
        if before and shared is not None:
            gate = self._gate(x, moe.path.rpartition(".")[0])
            shared = self._product(gate, shared, "gated shared experts", "T·H")
        elif moe.shared is not None:
            shared = self._mlp(x, moe.shared, "F")
        if shared is None:
            return out
        total = self._new("routed and shared", "T·H")
        self.tape.record("sum", total, passed=(out, shared))
        return total

    def _noised(self, x: Value) -> Value:
        """x multiplied in place by random numbers around one."""
        y = self.tape.part_of(x, x.shape)
        self.tape.record("noise", y, fresh=(x,), saved=(self._new("noise", x.shape),))
        return y

    def _gate(self, x: Value, block: str) -> Value:
        logit = self._linear(x, f"{block}.shared_expert_gate", "1")
        return self._softmax(logit, "sigmoid of the gate")  # like softmax's, its derivative reads its output

    def _router(self, x: Value) -> Value:
        """Routing weights [T, K]."""
        moe, b = self.facts.experts, self.run.width
        assert moe is not None
        trains = self._trains(f"{moe.router}.weight")
        shape = moe.shape
        gradients = shape.num_experts * (shape.hidden + self._trains(f"{moe.router}.bias")) * b * trains
        wide = self.family in ("deepseek_v2", "deepseek_v3")
        if wide:  # scores in float32 from a float32 copy of x and of the weight
            x = self._cast(x, 4, "router: x in float32")
        logits = self._new("router logits", "T·E", x.width)
        saved = (x,) if trains else ()
        if wide and b != 4 and x.needs:
            saved = (*saved, self._new("router weight in float32", "E·H", 4))
        in_float32 = (self._piece("gradient in float32", "E·H", 4),) if wide and b != 4 and trains else ()
        self.tape.record(
            "router", logits, fresh=(x,), saved=saved, temporaries=in_float32, gradients=gradients, part="router"
        )
        match self.family:
            case "gpt_oss":
                return self._softmax(self._chosen(logits), "routing weights")
            case "granite":
                logits = self._cast(logits, 4, "router logits in float32")
                return self._cast(self._softmax(self._chosen(logits), "routing weights"), b, "routing weights")
            case "phimoe":
                return self._sparse_mixer(logits)
        logits = self._cast(logits, 4, "router logits in float32")
        weights = self._chosen(self._softmax(logits, "router scores"))
        if moe.normalized:
            total = self._map(weights, "sum of weights", shape="T")
            weights = self._product(weights, total, "routing weights", "T·K")
        if wide:
            return self._map(weights, "scaled routing weights")
        return self._cast(weights, b, "routing weights") if self.family == "qwen" else weights

    def _chosen(self, scores: Value) -> Value:
        """topk: the best K of each row; keeps where they stand."""
        indices = self.tape.new("indices", "T·K", 8, external=self.run.checkpointed)
        return self._map(scores, "chosen", shape="T·K", keeps=(indices,))

    def _sparse_mixer(self, logits: Value) -> Value:
        """phimoe draws each of two experts from a masked softmax and keeps what its estimator reads (2409.12136)."""
        parts = []
        for _ in range(2):
            mask, index = self._new("mask", "T·E", 1), self._new("index", "T", 8)
            masked = self._map(logits, "masked logits", keeps=(mask,))
            scores = self._softmax(masked, "router scores")
            parts.append(self._map(scores, "multiplier", shape="T", keeps=(index, scores)))
        weights = self._new("routing weights", "T·K")
        self.tape.record("cat", weights, passed=tuple(parts))
        return weights

    def _experts(self, x: Value, weights: Value) -> Value:
        if self.plan.exchange is not None:
            return self._exchanged(x, weights, self.plan.exchange)
        return self._bank(x, weights, "T", "T·K")

    def _bank(self, x: Value, weights: Value, tokens: str, rows: str) -> Value:
        """The bank's one node (docs/concepts/expert-bank.md): keeps its input and the routing, and recomputes the
        rest; without checkpointing it keeps the rows of gate_up too."""
        moe, plan, run = self.facts.experts, self.plan, self.run
        assert moe is not None
        out = self._new("experts' output", f"{tokens}·H")
        order = self._new("order of rows", rows, 8)
        back = experts_backward(self.tape, moe, plan, run, needs_x=x.needs, weights_width=weights.width)
        self.tape.record(
            "experts",
            out,
            fresh=(x, weights),
            saved=(x, weights, order, self._new("gate_up", f"{rows}·O")) if run.keeps_rows else (x, weights, order),
            temporaries=back.temporaries,
            gradients=back.gradients,
            gradients_then=back.gradients_then,
            trains=bool(plan.experts or plan.lora_experts),
        )
        return out

    def _exchanged(self, x: Value, weights: Value, exchange: Exchanged) -> Value:
        """Rows go to the ranks of their experts and come back (parallel/exchange.py and transformers' AllToAllEP)."""
        b, tape = self.run.width, self.tape
        if exchange.trains and not x.needs:
            x = tape.part_of(x, x.shape)
            x.needs = True
        if exchange.sliced:  # the slice is a view, its gradient is gathered
            x, whole = tape.part_of(x, "U·H"), x
            tape.record("slice", x, fresh=(whole,))
        order = self._new("order of rows", "M", 8)
        sent, arrived = self._new("rows sent", "M·H"), self._new("rows that arrived", "A·H")
        tape.record("rows", sent, fresh=(x,), saved=(order,))
        tape.record("dispatch", arrived, fresh=(sent,))
        out = self._bank(arrived, self._new("ones", "A"), "A", "A")
        back, returned = self._new("rows returned", "M·H"), self._new("rows in their order", "M·H")
        tape.record("combine", back, fresh=(out,))
        tape.record("order", returned, fresh=(back,), saved=(order,))
        wide = max(b, weights.width)
        weighted, total = self._new("weighted rows", "M·H", wide), self._new("their sums", "U·H", wide)
        cast = (self._piece("gradient of rows", "M·H", wide),) * ((wide != b) + weights.needs)
        tape.record("weighted", weighted, fresh=(returned, weights), saved=(returned, weights), temporaries=cast)
        # Running forward again stops once the rows are there, unless something after it keeps more.
        stops = self.facts.experts is not None and self.facts.experts.shared is None
        beside = (out, back) if stops else (out, back, weighted, total)
        tape.pass_by(*(value.storage.piece for value in beside))
        tape.record("sums", total, passed=(weighted,))
        if exchange.sliced:
            total, part = self._new("gathered sums", "T·H", wide), total
            tape.record("gather", total, fresh=(part,))
            self.gathered = (total.bytes,)
            self.gathered_back = (self.input.bytes,) + (tape.numel("T·K") * weights.width,) * weights.needs
        return self._cast(total, b, "experts' output")


def _letters(facts: LayerFacts, plan: LayerPlan, run: Run, hidden: int) -> dict[str, int]:
    a, moe = facts.attention, facts.experts
    letters = {
        "B": run.batch,
        "S": run.sequence,
        "S1": run.sequence + 1,
        "T": run.batch * run.sequence,
        "H": hidden,
        "h": a.heads,
        "k": a.kv_heads,
        "d": a.head,
        "v": a.value_head,
        "qd": a.heads * a.head,
        "kd": a.kv_heads * a.head,
        "L": a.latent,
        "C": a.latent + a.rotary,
        "Q": a.query_latent,
        "R": a.rotary,
        "X": a.head - a.rotary + a.value_head,
        "r": run.rank,
    }
    if moe is None:
        letters["F"] = facts.linears[f"{facts.mlp}.gate_proj"].out
        return letters
    shape = moe.shape
    rows = shape.intermediate * (2 if shape.has_gate else 1)
    letters |= {
        "E": shape.num_experts,
        "K": moe.top_k,
        "c": moe.choices,
        "N": plan.rows,
        "I": shape.intermediate,
        "O": rows,
    }
    if plan.exchange is not None:
        letters |= {"U": plan.exchange.tokens, "M": plan.exchange.tokens * moe.top_k, "A": plan.exchange.arriving}
    if moe.shared is not None:
        letters["F"] = facts.linears[f"{moe.shared}.gate_proj"].out
    return letters
