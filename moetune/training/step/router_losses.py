"""Expert load and router losses (load balancing, z-loss), from hooks.

With E experts, K experts per token, and T tokens that are not padding:

    load f_e = (tokens that chose e) / T            mean probability P_e = mean over tokens of softmax(logits)_e
    balance  = E · Σ_e mean_l(f_e) · mean_l(P_e)    Switch Transformer (arXiv 2101.03961, eq. 4), K when balanced
    z        = mean over layers and tokens of logsumexp(logits)²      ST-MoE (arXiv 2202.08906, eq. 5)

By default the balance loss is that of transformers (`load_balancing_loss_func`): f and P are averaged over the layers l
before they are multiplied. It balances the load summed over layers, and a coefficient from a model's configuration has
the same effect here. With `per_layer` it is mean_l(E · Σ_e f_e · P_e), which balances every layer separately. Both work
for every architecture whose routers return their logits.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moetune.adapt.build import Adapted
from moetune.errors import UserError
from moetune.models.moe import MoeLayer
from moetune.models.routers import find_logits, logits_module


@dataclass
class Routed:
    """Routing recorded in a forward pass.

    Attributes:
        mask: 1 for tokens that count, 0 for padding; any shape with T elements. None if all tokens count.
        logits: layer index -> router logits [T, E], attached to the autograd graph; empty unless requested.
        load: layer index -> number of tokens that chose each expert, float [E].
    """

    mask: Tensor | None = None
    logits: dict[int, Tensor] = field(default_factory=dict)
    load: dict[int, Tensor] = field(default_factory=dict)


class RouterWatch:
    """Registers hooks on every router and expert bank of a model, which record routing inside `recording()`.

    End the recording before the backward pass; otherwise the recomputation of a checkpointed layer is recorded too.
    Micro-batches that run layer by layer record at the same time, so a recording is a context variable.
    """

    def __init__(self, adapted: Adapted) -> None:
        self.layers = {layer.index: layer for layer in adapted.structure.moe_layers}
        self._recording: ContextVar[tuple[Routed | None, bool]] = ContextVar("recording", default=(None, False))
        self._hooks: list[RemovableHandle] = []
        for layer in self.layers.values():
            self._watch(adapted.model, layer)

    def _watch(self, model: nn.Module, layer: MoeLayer) -> None:
        def saw_logits(module: nn.Module, args: Any, output: Any) -> None:
            routed, keeps_logits = self._recording.get()
            if routed is None or not keeps_logits:
                return
            if (logits := find_logits(output, layer.shape.num_experts)) is not None:
                routed.logits[layer.index] = logits

        def saw_choice(module: nn.Module, args: Any, kwargs: Any) -> None:
            routed, _ = self._recording.get()
            if routed is not None:
                ids, weights = [*args, *kwargs.values()][1:]
                routed.load[layer.index] = _tokens(ids.detach(), weights.detach(), layer.shape.num_experts, routed.mask)

        router = logits_module(model, layer.router, layer.shape.num_experts)
        bank = model.get_submodule(layer.experts)
        self._hooks.append(router.register_forward_hook(saw_logits))
        self._hooks.append(bank.register_forward_pre_hook(saw_choice, with_kwargs=True))

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def recording(self, mask: Tensor | None, *, logits: bool) -> Iterator[Routed]:
        """Record the routing of forward passes inside the `with` block into the `Routed` that is yielded.

        Args:
            mask: 1 for tokens that count, 0 for padding; any shape with T elements. None if all tokens count.
            logits: also record the router logits, which `statistics` needs.
        """
        before = self._recording.set(((routed := Routed(mask)), logits))
        try:
            yield routed
        finally:
            self._recording.reset(before)

    def statistics(self, routed: Routed) -> dict[int, Tensor]:
        """Return layer index -> the numbers that router losses are made of, float32 [2E + 1]: load f [E], mean
        probability P [E] and z-loss, from a recording made with `logits=True`.

        Raises:
            UserError: no logits were recorded for a layer, because its router does not return them.
        """
        silent = sorted(routed.load.keys() - routed.logits.keys())
        if silent:
            raise UserError(
                f"train.router_aux_loss / router_z_loss: the router of layer {silent[0]} "
                f"({self.layers[silent[0]].router}) returns no logits; set both to 0 for this model"
            )
        by_layer: dict[int, Tensor] = {}
        for index, logits_TE in routed.logits.items():
            logits_TE = logits_TE.reshape(-1, logits_TE.shape[-1]).float()
            mask = routed.mask
            weight_T = torch.ones_like(logits_TE[:, 0]) if mask is None else mask.flatten().to(logits_TE.dtype)
            count = weight_T.sum().clamp(min=1)
            weight_T, f_E = weight_T / count, routed.load[index] / count
            z = weight_T @ logits_TE.logsumexp(-1).square()
            by_layer[index] = torch.cat([f_E, weight_T @ logits_TE.softmax(-1), z[None]])
        return by_layer


def losses_of(statistics: Mapping[int, Tensor], *, per_layer: bool = False) -> tuple[Tensor, Tensor]:
    """Return the scalars (balance loss, z-loss) over all layers, by the formulas at the top of this file.

    If layers differ in their number of experts, a balance loss is computed for each number, and averaged. With
    `per_layer` every layer is balanced separately, instead of the sum over layers.
    """
    of_size: dict[int, list[Tensor]] = {}
    for of_layer in statistics.values():
        of_size.setdefault(len(of_layer) // 2, []).append(of_layer)
    balance = []
    for size, of_layers in of_size.items():
        f_LE, p_LE, _ = torch.stack(of_layers).split([size, size, 1], dim=1)
        pooled = size * f_LE.mean(0) @ p_LE.mean(0)
        balance.append(size * (f_LE * p_LE).sum(-1).mean() if per_layer else pooled)
    return torch.stack(balance).mean(), torch.stack([of_layer[-1] for of_layer in statistics.values()]).mean()


def add_load(sums: dict[int, Tensor], load: Mapping[int, Tensor]) -> None:
    """Add the expert load `load`, layer index -> tokens [E], to `sums` in place; new layers get a copy."""
    for layer, tensor in load.items():
        sums[layer] = sums[layer] + tensor if layer in sums else tensor.clone()


def _tokens(ids_TK: Tensor, weights_TK: Tensor, num_experts: int, mask: Tensor | None) -> Tensor:
    """Return how many tokens chose each expert, float [num_experts], from the chosen ids and their routing weights.

    `mask` is 1 for tokens that count, 0 for padding; any shape with T elements. None if all count.

    A choice with routing weight 0 does not count: in ZAYA it means that the token skips the experts.
    """
    chosen_TK = weights_TK.reshape(-1, ids_TK.shape[-1])
    counts_TK = torch.empty(chosen_TK.shape, device=ids_TK.device)
    torch.logical_and(chosen_TK, chosen_TK if mask is None else mask.reshape(-1, 1), out=counts_TK)  # 1 or 0
    return torch.zeros(num_experts, device=ids_TK.device).index_add_(0, ids_TK.flatten(), counts_TK.view(-1))
