"""What a run should not pass over in silence: said once on the terminal, and in every line of metrics from then on."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from rich.console import Console
from torch import Tensor, nn

from moetune.adapt.build import Adapted
from moetune.errors import UserError, counted
from moetune.parallel.ranks import local_tensor
from moetune.training.data.load import Datasets
from moetune.training.routing import collapsed, idle_experts, is_enough

_SAMPLED = 64  # elements of each parameter
_TOO_FEW = 0.5
"""Where a smaller share of 16-bit weights has moved in a run, most of what was learned is lost."""
_EQUAL = 1e-5  # of ln V: what rounding makes of a loss that is ln V


class RunWarnings:
    """Looks at each line of metrics before it is written.

    Args:
        trained: how many parameters train, on all ranks.
    """

    def __init__(self, adapted: Adapted, trained: int, console: Console) -> None:
        self.adapted, self.trained, self.console = adapted, trained, console
        self._said: set[tuple[str, object]] = set()
        self._holds: list[str] = []
        self._of_data: list[str] = []
        self.first_loss: float | None = None
        self.begin()

    def begin(self, first_loss: float | None = None) -> None:
        """Weights are from here on compared with what they are now, and losses with the run's first one."""
        self.first_loss = first_loss
        self._begun = self._known = self._sample()

    def say(self, kind: str, text: str, about: object = None) -> None:
        """Says it, unless it was said of the same thing before. A line of metrics has its kind each time."""
        if kind not in self._holds:
            self._holds.append(kind)
        if (kind, about) not in self._said:
            self._said.add((kind, about))
            self.console.print(f"note: {text}", highlight=False, soft_wrap=True)

    def about_data(self, data: Datasets) -> None:
        """Positions that the model was not made for; and what LoRA was asked for and cannot be on."""
        if left_out := self.adapted.run.selection.left_out:
            self.say(
                "LoRA left out",
                f"no LoRA on {len(left_out)} linear layers of adapt.lora.targets ({', '.join(left_out[:3])}, …): the "
                "model reads their weights without calling them, or no gradient reaches them",
            )
        most = getattr(self.adapted.run.model.settings.get_text_config(), "max_position_embeddings", None)
        longest = min(int(data.counts.lengths.max()), self.adapted.run.config.train.sequence_length)
        if isinstance(most, int) and longest > most:
            self.say(
                "long positions",
                f"documents of up to {longest} tokens, and the model has {most} positions (max_position_embeddings): "
                f"what lies beyond it has not learnt; train.sequence_length: {most} cuts there",
            )
        self._of_data = list(self._holds)

    def about_step(
        self, loss: float | None, updated: bool, load: dict[int, Tensor], received: dict[int, Tensor]
    ) -> dict[str, object]:
        """What a line of metrics says beside its numbers: the same, whether the run was interrupted before it or not.

        Args:
            loss: of the steps since the last line; None if all were skipped.
            updated: whether a weight should have changed in them.
            load: by layer, the tokens that each expert received in them, on the host.
            received: the same since the run began.
        """
        self._holds = list(self._of_data)
        size = self.adapted.run.model.settings.get_text_config().vocab_size
        if self.first_loss is None:
            self.first_loss = loss
        first = self.first_loss
        if loss is not None and first is not None and _is_ln(loss, size) and not _is_ln(first, size):
            self.say(
                "equal logits",
                f"the loss is ln {size}: every token is as likely as any other. Weights were destroyed, most likely by "
                "the learning rate; lower optimizer.lr and start anew",
            )
        self._about_collapse(load)
        idle = idle_experts(self.adapted.run, received)
        if all(map(is_enough, received.values())):
            self._about_idle(idle)
        now = self._sample()
        still = [part for part, sample in now.items() if torch.equal(sample, self._known[part])]
        self._known = now
        if still and updated:
            self.say(
                "updates rounded away",
                f"no weight of {', '.join(still)} has changed: the updates are smaller than what their precision can "
                "hold; raise optimizer.lr, or set optimizer.master_weights: fp32 or stochastic",
            )
        return {"idle_experts": len(idle), "unchanged": still if updated else [], "notices": self._holds}

    def at_end(self, received: dict[int, Tensor]) -> None:
        """Names experts that trained on nothing, however short the run was, and says if updates mostly rounded away."""
        self._about_idle(idle_experts(self.adapted.run, received))
        rounding, now = self._rounding(), self._sample()
        moved = [now[part] != self._begun[part] for part in rounding if part in now]
        share = torch.cat(moved).float().mean().item() if moved else 1.0
        if share < _TOO_FEW:
            self.say(
                "updates rounded away",
                f"{share:.1%} of the weights that train in 16 bits have moved; the others' updates were smaller than "
                "half a step of their precision and were rounded away, or no token reached them. Set "
                "optimizer.master_weights: stochastic (no memory) or fp32 (4 bytes a parameter), or raise optimizer.lr",
            )

    def _rounding(self) -> set[str]:
        """The parts whose updates are rounded to 16 bits."""
        return {
            part
            for name, parameter in self.adapted.trainable().items()
            if parameter.itemsize == 2
            and (optimizer := self.adapted.run.optimizers[part := self.adapted.part_of(name)]).master_weights == "none"
            and not optimizer.offload
        }

    def _about_idle(self, idle: dict[tuple[int, int], int]) -> None:
        if idle:
            named = ", ".join(f"{layer}:{expert}" for layer, expert in list(idle)[:8])
            more = f" and {len(idle) - 8} more" if len(idle) > 8 else ""
            self.say(
                "idle experts",
                f"no token has reached {counted(len(idle), 'expert')} to be trained (layer:expert {named}{more}): "
                f"{100 * sum(idle.values()) / self.trained:.1f} % of what trains stands idle. moetune score and select "
                "choose experts that this data uses",
            )

    def _about_collapse(self, load: dict[int, Tensor]) -> None:
        judged = {layer: tokens for layer, tokens in load.items() if is_enough(tokens)}
        for layer, used in collapsed(self.adapted.run, judged).items():
            self.say(
                "collapsed routers",
                f"routing of layer {layer} has collapsed: of {len(judged[layer])} experts {used:.1f} are in use (the "
                "exponential of the load's entropy). train.router_aux_loss holds against it; a lower "
                "optimizer.router.lr moves routers less",
                about=layer,
            )

    @torch.no_grad()
    def _sample(self) -> dict[str, Tensor]:
        """Some elements of all that trains, by part; on the host."""
        parts: dict[str, list[Tensor]] = {}
        for name, parameter in self.adapted.trainable().items():
            flat = local_tensor(parameter).reshape(-1)
            if len(flat):  # not an empty shard, nor what DeepSpeed has elsewhere
                parts.setdefault(self.adapted.part_of(name), []).append(flat[:: -(-len(flat) // _SAMPLED)].float())
        return {part: torch.cat(some).cpu() for part, some in parts.items()}


def _is_ln(loss: float, size: int) -> bool:
    """Whether a loss is that of logits which are all equal."""
    return abs(loss - math.log(size)) <= _EQUAL * math.log(size)


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
