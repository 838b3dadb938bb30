"""What a run should not pass over in silence: said once on the terminal, and in every line of metrics from then on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from rich.console import Console
from torch import Tensor, nn

from moetune.adapt.build import Adapted
from moetune.errors import UserError
from moetune.parallel.ranks import local_tensor
from moetune.training.data import Datasets

_SAMPLED = 64  # elements of each parameter
_COLLAPSED = 0.95
"""Share of a layer's rows beyond which the K experts that receive most receive all, as far as training goes."""
_EQUAL = 1e-5  # of ln V: what rounding makes of a loss that is ln V


class Notices:
    """Looks at each line of metrics before it is written."""

    def __init__(self, adapted: Adapted, console: Console) -> None:
        self.adapted, self.console = adapted, console
        self.kinds: list[str] = []
        self._known = self._sample()

    def say(self, kind: str, text: str) -> None:
        """Says it, if nothing of its kind was said before."""
        if kind not in self.kinds:
            self.kinds.append(kind)
            self.console.print(f"note: {text}", highlight=False, soft_wrap=True)

    def about_data(self, data: Datasets) -> None:
        """Positions that the model was not made for."""
        most = getattr(self.adapted.run.model.settings.get_text_config(), "max_position_embeddings", None)
        rows = data.train["position_ids" if "position_ids" in data.train.column_names else "input_ids"]
        longest = max((max(row) + 1 if "position_ids" in data.train.column_names else len(row)) for row in rows)
        if isinstance(most, int) and longest > most:
            self.say(
                "long positions",
                f"documents of up to {longest} tokens, and the model has {most} positions (max_position_embeddings): "
                f"what lies beyond it has not learnt; train.sequence_length: {most} cuts there",
            )

    def about_step(
        self, loss: float | None, updated: bool, load: Mapping[int, Tensor], received: Mapping[int, Tensor]
    ) -> dict[str, object]:
        """What a line of metrics says beside its numbers.

        Args:
            loss: of the steps since the last line; None if all were skipped.
            updated: whether a weight should have changed in them.
            load: by layer, the tokens that each expert received in them.
            received: the same since the run began.
        """
        size = self.adapted.run.model.settings.get_text_config().vocab_size
        if loss is not None and abs(loss - math.log(size)) <= _EQUAL * math.log(size):
            self.say(
                "equal logits",
                f"the loss is ln {size}: every token is as likely as any other. Weights were destroyed, most likely by "
                "the learning rate; lower optimizer.lr and start anew",
            )
        collapsed = [str(layer) for layer in self._collapsed(load)]
        if collapsed:
            self.say(
                "collapsed routers",
                f"the routers of layers {', '.join(collapsed)} send nearly all tokens to the same experts; "
                "train.router_aux_loss balances them",
            )
        now = self._sample()
        still = [part for part, sample in now.items() if torch.equal(sample, self._known[part])]
        self._known = now
        if still and updated:
            self.say(
                "updates rounded away",
                f"no weight of {', '.join(still)} has changed: the updates are smaller than what their precision can "
                "hold; raise optimizer.lr, or set optimizer.master_weights: fp32 or stochastic",
            )
        idle = self.idle(received)
        return {
            "idle_experts": sum(map(len, idle.values())),
            "unchanged": still if updated else [],
            "notices": list(self.kinds),
        }

    def idle(self, received: Mapping[int, Tensor]) -> dict[int, list[int]]:
        """By layer, the experts that train or have LoRA, and no token came to them."""
        selection, found = self.adapted.selection, {}
        for layer, tokens in received.items():
            chosen = sorted({*selection.experts.get(layer, ()), *selection.lora_experts.get(layer, ())})
            none = [expert for expert in chosen if tokens[expert] == 0] if chosen else []
            if none:
                found[layer] = none
        return found

    def at_end(self, received: Mapping[int, Tensor]) -> None:
        """Names the experts that trained on nothing."""
        if idle := self.idle(received):
            which = "; ".join(f"layer {layer}: {', '.join(map(str, ids))}" for layer, ids in list(idle.items())[:10])
            more = f"; and of {len(idle) - 10} more layers" if len(idle) > 10 else ""
            self.say(
                "idle experts", f"experts that were to train received no token and are as they were: {which}{more}"
            )

    def _collapsed(self, load: Mapping[int, Tensor]) -> Iterator[int]:
        for layer in self.adapted.anatomy.moe_layers:
            tokens = load.get(layer.index)
            if tokens is None or len(tokens) <= layer.top_k:
                continue
            total, most = float(tokens.sum()), float(tokens.topk(layer.top_k).values.sum())
            if total > 0 and most >= _COLLAPSED * total:
                yield layer.index

    @torch.no_grad()
    def _sample(self) -> dict[str, Tensor]:
        """Some elements of all that trains, by part; on the host."""
        parts: dict[str, list[Tensor]] = {}
        for name, parameter in self.adapted.trainable().items():
            flat = local_tensor(parameter).reshape(-1)
            if len(flat):  # not an empty shard, nor what DeepSpeed has elsewhere
                parts.setdefault(self.adapted.part_of(name), []).append(flat[:: -(-len(flat) // _SAMPLED)].float())
        return {part: torch.cat(some).cpu() for part, some in parts.items()}


def refuse_broken_weights(model: nn.Module) -> None:
    """Raises `UserError` if a weight or buffer is not finite, naming the first: what is computed then says nothing.

    It reads them all: for when something was not finite.
    """
    for name, tensor in _floats(model):
        if not bool(local_tensor(tensor).isfinite().all()):
            raise UserError(
                f"{name} of the base holds values that are not finite (NaN, infinity): nothing can be learnt on it; "
                "the checkpoint of model.path is damaged, or was made in another precision"
            )


def _floats(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point():
            yield name, tensor
        state = getattr(tensor, "quant_state", None)
        for inner in (state, getattr(state, "state2", None)):
            scales = getattr(inner, "absmax", None)
            if scales is not None and scales.is_floating_point():
                yield name, scales
