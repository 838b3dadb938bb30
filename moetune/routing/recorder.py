"""`Recorder`: sum up statistics of routers and experts over batches, by forward hooks.

Shapes: T tokens of a batch (batch size B × sequence length S); E experts; K experts chosen for a token; D documents; R
bootstrap replicates.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from moetune.adapt.build import Adapted
from moetune.errors import UserError
from moetune.models.moe import MoeLayer
from moetune.models.routers import find_logits, logits_module
from moetune.parallel.ranks import Ranks
from moetune.run.scores import SCOPES, LayerScores, Statistics
from moetune.training.step.batch import Batch, Row
from moetune.training.step.loss import IGNORED

REPLICATES = 200
"""R, bootstrap replicates for the confidence intervals of expert load."""
RoutingSums = dict[str, Tensor]
"""Sums by name: `<source>.<layer>.<scope>.<statistic>`; the number of tokens of a scope as `<source>.<scope>.count`.
`<source>` is the index of a data set; a scope is `loss`, tokens that carry loss, or `all`, all tokens but padding.

Statistics: `pairs` [E, E], tokens that two experts share, with an expert's own tokens on the diagonal; `replicates` [R,
E], tokens of each expert in a replicate; sums [E] of routing weights (`weight`), of routing weight × output norm
(`reap`) and of router probabilities (`probability`); and their `entropy`, a scalar."""


class Recorder:
    """Sums up which experts the routers of a model choose on the batches that it computes inside `with
    recorder.batch(…):`.

    Counts are integers, and do not depend on how rows are batched, packed or padded. All other statistics are added up
    in float64. The constructor registers hooks on the model; `remove` removes them.

    Attributes:
        sums: the sums so far.
        choices: None; or a dict, set by the caller, that is filled with layer number -> for each batch, the ids [T, K]
            of the experts of its tokens that carry loss, in ascending order.
        layers: the MoE layers by their number.
    """

    def __init__(self, adapted: Adapted) -> None:
        self.sums: RoutingSums = {}
        self.choices: dict[int, list[Tensor]] | None = None
        self.layers = {layer.index: layer for layer in adapted.structure.moe_layers}
        self._batch: _Tokens | None = None
        self._logits: dict[int, Tensor] = {}
        self._chosen: dict[int, tuple[Tensor, Tensor]] = {}  # ids and weights [T, K]
        self._expert_hooks = adapted.expert_context.hooks
        self._hooks = [hook for layer in self.layers.values() for hook in self._watch(adapted.model, layer)]

    def _watch(self, model: nn.Module, layer: MoeLayer) -> Iterator[Any]:
        """Register a hook on a layer's router logits and one on its experts' arguments; yield the two handles."""

        def saw_logits(module: nn.Module, args: Any, output: Any) -> None:
            """Hold the router's logits until the experts have run."""
            logits = find_logits(output, layer.shape.num_experts)
            if self._batch is not None and logits is not None:
                self._logits[layer.index] = logits

        def saw_choice(bank: Any, args: Any, kwargs: Any) -> None:
            """Hold the ids and weights with which the experts are called until they have run."""
            if self._batch is not None:
                names = {1: "top_k_index", 2: "top_k_weights"}
                ids, weights = (kwargs[name] if name in kwargs else args[i] for i, name in names.items())
                self._chosen[layer.index] = ids, weights

        yield logits_module(model, layer.router, layer.shape.num_experts).register_forward_hook(saw_logits)
        yield model.get_submodule(layer.experts).register_forward_pre_hook(saw_choice, with_kwargs=True)

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def batch(
        self, batch: Batch, documents: int, source: int = 0, number: int = 0, *, counts: bool = True
    ) -> Iterator[None]:
        """Record what the model computes on one batch inside this context.

        Args:
            documents: how many documents the batch has (`documents_of`).
            source: index of the data set that the rows are from.
            number: index of the batch in the whole pass; with `source` it seeds the bootstrap.
            counts: False to run the batch without recording it, on a rank that has no batch left and only takes part in
                the computation of the others.
        """
        if counts:
            self._batch = _Tokens.of(batch, documents, source, number)
            for scope, mask_T in self._batch.scopes.items():
                self._add_to(f"{source}.{scope}.count", mask_T.sum())
        with self._expert_hooks.using(norms=self._saw_norms):
            yield
        self._batch = None
        self._logits.clear()
        self._chosen.clear()

    def total(self, ranks: Ranks) -> RoutingSums:
        """Return the sums over all ranks, on the CPU, to every rank. Ranks that read the same data are counted once."""
        mine = {} if ranks.coordinates.tp else {name: value.cpu() for name, value in self.sums.items()}
        total: RoutingSums = {}
        for sums in ranks.gather(mine):
            for name, value in sums.items():
                total[name] = total[name] + value if name in total else value
        return total

    def _saw_norms(self, layer: int, norms_TK: Tensor) -> None:
        """Add the statistics of a layer once its experts have run; `norms_TK` are the L2 norms of their outputs."""
        if self._batch is not None:
            self._add(self.layers[layer], self._batch, *self._chosen.pop(layer), norms_TK)

    @torch.no_grad()
    def _add(self, layer: MoeLayer, tokens: "_Tokens", ids_TK: Tensor, weights_TK: Tensor, norms_TK: Tensor) -> None:
        """Add the statistics of one layer to the sums of this batch, from the ids of the chosen experts, their routing
        weights and the norms of their outputs."""
        experts = layer.shape.num_experts
        if self.choices is not None:
            chosen_TK = ids_TK[tokens.scopes["loss"]].sort(-1).values
            self.choices.setdefault(layer.index, []).append(chosen_TK.to("cpu", torch.int16))
        routed_TK = weights_TK != 0  # ZAYA sends a token that skips its experts to expert 0, with weight 0
        weights_TK = weights_TK.double()

        def spread(values_TK: Tensor) -> Tensor:
            """Scatter values [T, K] of the chosen experts to [T, E], with 0 for experts that were not chosen."""
            return torch.zeros(len(ids_TK), experts, dtype=torch.double, device=ids_TK.device).scatter_add_(
                1, ids_TK, values_TK.double()
            )

        chosen_TE, weights_TE = spread(routed_TK), spread(weights_TK)
        reap_TE = spread(weights_TK * norms_TK.double())
        logits = self._logits.pop(layer.index, None)
        log_p_TE = None if logits is None else logits.reshape(-1, experts).double().log_softmax(-1)
        p_TE = None if log_p_TE is None else log_p_TE.exp()
        for scope, mask_T in tokens.scopes.items():
            where = f"{tokens.source}.{layer.index}.{scope}"
            mask_T1 = mask_T.double()[:, None]
            masked_TE = chosen_TE * mask_T1
            # Sums of ones in float64 are whole numbers up to 2^53, and CUDA multiplies no integer matrices.
            self._add_to(f"{where}.pairs", (masked_TE.T @ chosen_TE).round().long())
            by_document_DE = torch.zeros(tokens.drawn_RD.shape[1], experts, dtype=torch.double, device=ids_TK.device)
            by_document_DE.index_add_(0, tokens.document_T, masked_TE)
            self._add_to(f"{where}.replicates", (tokens.drawn_RD @ by_document_DE).round().long())
            self._add_to(f"{where}.weight", (weights_TE * mask_T1).sum(0))
            self._add_to(f"{where}.reap", (reap_TE * mask_T1).sum(0))
            if p_TE is not None and log_p_TE is not None:
                self._add_to(f"{where}.probability", (p_TE * mask_T1).sum(0))
                self._add_to(f"{where}.entropy", -(torch.nan_to_num(p_TE * log_p_TE) * mask_T1).sum())

    def _add_to(self, name: str, value: Tensor) -> None:
        self.sums[name] = self.sums[name] + value if name in self.sums else value

    def scores(self, sources: list[int]) -> dict[int, LayerScores]:
        """Return layer number -> statistics over the data sets of these indices together; `UserError` if outputs of
        experts are NaN or infinite."""
        return {
            index: LayerScores(
                num_experts=layer.shape.num_experts,
                top_k=layer.top_k,
                **{scope: self._statistics(layer, scope, sources) for scope in SCOPES},
            )
            for index, layer in self.layers.items()
        }

    def count(self, source: int, scope: str) -> int:
        """Return the number of tokens of a data set, given by its index, in a scope, `loss` or `all`."""
        return int(self.sums[f"{source}.{scope}.count"])

    def _statistics(self, layer: MoeLayer, scope: str, sources: list[int]) -> Statistics:
        """Compute the statistics of a layer in a scope from the sums of the data sets of these indices.

        Raises `UserError` if the experts' outputs are NaN or infinite.
        """

        def total(what: str) -> Any:
            names = [f"{source}.{layer.index}.{scope}.{what}" for source in sources]
            sums = [self.sums[name].cpu() for name in names if name in self.sums]
            return sum(sums[1:], start=sums[0]) if sums else None

        pairs, replicates, weight, reap = (total(what) for what in ("pairs", "replicates", "weight", "reap"))
        if not (weight + reap).isfinite().all():
            raise UserError(
                f"the experts of layer {layer.index} compute NaN or infinity; check the weights of this layer"
            )
        count = sum(self.count(source, scope) for source in sources)
        tokens = pairs.diagonal()
        share_RE = replicates.double() / replicates.sum(1, keepdim=True).clamp(min=1)
        low_E, high_E = share_RE.quantile(torch.tensor([0.025, 0.975], dtype=torch.double), dim=0)
        probability, entropy = total("probability"), total("entropy")
        return Statistics(
            count=count,
            tokens=tokens.tolist(),
            share=(tokens.double() / tokens.sum().clamp(min=1)).tolist(),
            interval=list(zip(low_E.tolist(), high_E.tolist(), strict=True)),
            weight_sum=weight.tolist(),
            weight_mean=(weight / tokens.clamp(min=1)).tolist(),
            probability=None if probability is None else (probability / max(count, 1)).tolist(),
            entropy=None if entropy is None else entropy.item() / max(count, 1),
            reap=(reap / tokens.clamp(min=1)).tolist(),
            pairs=[row[expert + 1 :] for expert, row in enumerate(pairs.tolist())][:-1],
            unused=(tokens == 0).nonzero().flatten().tolist(),
        )


@dataclass(frozen=True)
class _Tokens:
    """The tokens of a batch of rows, from the data set with the index `source`.

    Attributes:
        scopes: scope (`loss` or `all`) -> mask [T] of its tokens.
        document_T: the number of each token's document in the batch.
        drawn_RD: how often each replicate draws each document: Poisson(1), the bootstrap for streams (Chamandy et al.,
            "Estimating uncertainty for massive data streams", 2012).
    """

    scopes: dict[str, Tensor]
    document_T: Tensor
    drawn_RD: Tensor
    source: int

    @classmethod
    def of(cls, batch: Batch, documents: int, source: int, number: int) -> "_Tokens":
        """Return the tokens of a collated batch of `documents` documents, the batch `number` of the whole pass."""
        is_token = batch.get("attention_mask", batch.get("is_token"))
        ids_BS = batch["input_ids"]
        is_token_BS = torch.ones_like(ids_BS, dtype=torch.bool) if is_token is None else is_token.bool()
        carries_BS = pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:] != IGNORED
        starts_BS = torch.zeros_like(is_token_BS)
        starts_BS[:, 0] = True
        if "position_ids" in batch:
            starts_BS |= batch["position_ids"] == 0
        scopes = {"loss": (carries_BS & is_token_BS).flatten(), "all": is_token_BS.flatten()}
        drawn = np.random.default_rng([source, number]).poisson(1, (REPLICATES, documents))
        drawn_RD = torch.from_numpy(drawn).double().to(ids_BS.device)
        return cls(scopes, starts_BS.flatten().cumsum(0) - 1, drawn_RD, source)


def documents_of(rows: Sequence[Row]) -> int:
    """Return the number of documents in a batch of these rows; the padding of a packed row counts as one."""
    positions = [np.asarray(row["position_ids"]) if "position_ids" in row else np.zeros(1) for row in rows]
    return sum(1 + int((of_row[1:] == 0).sum()) for of_row in positions)


def layer_of(name: str) -> int | None:
    """Return the layer number in the name of a sum (`RoutingSums`), 3 for `0.3.loss.pairs`; None for a sum of no layer,
    such as `0.loss.count`."""
    parts = name.split(".")
    return int(parts[1]) if len(parts) == 4 else None
