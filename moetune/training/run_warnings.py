"""Warnings of a run (idle experts, collapsed routing, lost updates), also in the metrics."""

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from moetune.adapt.build import Adapted
from moetune.config.schema import RunConfig, TrainConfig
from moetune.errors import UserError, counted, first_of
from moetune.experts.host import copy_on_host
from moetune.parallel.ranks import local_tensor
from moetune.run.resolve import ResolvedRun
from moetune.training.data.load import Datasets

_SAMPLED = 64  # elements of each parameter that are compared to see whether it has changed
_TOO_FEW = 0.5
"""If less than this share of the 16-bit weights has changed in a run, most of its updates were lost to rounding."""
_ENOUGH = 32
"""The load of a layer is checked from this mean number of tokens per expert on."""
_ROWS = 64
"""Rows of the data in which tokens are looked for that the base has not learnt."""
_ZERO = 1e-6
"""A token's weights are zero if the largest is at most this share of what it is for the median token."""
_OF_ACCELERATE = tuple(
    f"ACCELERATE_{name}" for name in ("MIXED_PRECISION", "GRADIENT_ACCUMULATION_STEPS", "USE_DEEPSPEED", "USE_FSDP")
)
_DEFAULTS = ("no", "1", "false", "False")
"""Values by which `accelerate launch` asks for nothing in its variables `_OF_ACCELERATE`."""
_COLLAPSED = 1.1
"""Routing has collapsed if the effective number of experts is below this times K: most tokens go to the same K."""


class RunWarnings:
    """Finds the warnings of a run and prints each once, as a note on the console.

    Call `about_data` before the first step, `begin` if the run is resumed, `about_step` at each line of metrics, and
    `at_end`.

    Args:
        adapted: the model in training, with its weights; the constructor records samples of them, like `begin`.
        trained: number of parameters that train, on all ranks together.
    """

    def __init__(self, adapted: Adapted, trained: int, console: Console) -> None:
        self.adapted, self.trained, self.console = adapted, trained, console
        self._said: set[tuple[str, object]] = set()
        self._kinds: list[str] = []
        self._of_data: list[str] = []
        self.begin()

    def begin(self) -> None:
        """Record samples of the current weights, with which later ones are compared."""
        self._begun = self._known = self._sample()

    def say(self, kind: str, text: str, about: object = None) -> None:
        """Print a warning, unless one with the same `kind` and `about` was printed before.

        Printed or not, `kind` is added to the `notices` that `about_step` returns.

        Args:
            kind: short name of the warning, such as `idle experts`.
            about: what the warning is about, such as the index of a layer, if a kind can apply to several things.
        """
        if kind not in self._kinds:
            self._kinds.append(kind)
        if (kind, about) not in self._said:
            self._said.add((kind, about))
            self.console.print(f"note: {text}")

    def about_data(self, data: Datasets) -> None:
        """Warn of settings without use, of a router loss that only config.json asks for, of a checkpoint in float16, of
        documents longer than the model has positions or than transformers computes right, of tokens that the base has
        not learnt, and of linear layers that cannot have LoRA.

        Called once, before the first step; every line of metrics repeats these warnings' kinds.
        """
        for text in _without_use(self.adapted.run.config, evaluates=data.eval is not None):
            self.say("settings without use", text, about=text)
        if left_out := self.adapted.run.selection.left_out:
            self.say(
                "LoRA left out",
                f"no LoRA on {len(left_out)} linear layers of adapt.lora.targets ({', '.join(left_out[:3])}, …): the "
                "model reads their weights without calling them, or no gradient reaches them",
            )
        model = self.adapted.run.model
        if model.lost_bits is not None:
            self.say("published in float16", model.lost_bits)
        settings = model.settings.get_text_config()
        if getattr(settings, "output_router_logits", False) and self.adapted.run.config.train.router_aux_loss == 0:
            self.say(
                "router loss left out",
                "config.json asks for the load-balancing loss (output_router_logits), and train.router_aux_loss is 0; "
                "auto takes the coefficient of config.json",
            )
        most = getattr(settings, "max_position_embeddings", None)
        longest = min(int(data.counts.lengths.max()), self.adapted.run.config.train.sequence_length)
        if isinstance(most, int) and longest > most:
            self.say(
                "long positions",
                f"documents of up to {longest} tokens, and the model has {most} positions (max_position_embeddings): "
                f"what lies beyond it has not learnt; train.sequence_length: {most} cuts there",
            )
        short = (getattr(settings, "rope_parameters", None) or {}).get("original_max_position_embeddings", longest)
        if settings.model_type == "phimoe" and longest > short:
            self.say(
                "rotary factors",
                f"documents of up to {longest} tokens: transformers turns positions beyond {short} by the factors for "
                f"short rows (findings/transformers_phimoe_short_factors.sh); train.sequence_length: {short} cuts",
            )
        if zero := _untrained_tokens(self.adapted, data.train[:_ROWS]):
            self.say(
                "untrained tokens",
                f"the weights of {counted(len(zero), 'token')} of the data (ids {', '.join(map(str, zero[:5]))}) "
                "are zero in the embedding or the LM head, which does not train, so the model cannot learn them: "
                "adapt.also: [embedding, lm_head], or a data.chat_template without them",
            )
        self._of_data = list(self._kinds)

    def about_step(self, updated: bool, load: dict[int, Tensor], received: dict[int, Tensor]) -> dict[str, object]:
        """Check the steps since the last line of metrics, print warnings, and return entries for the next line.

        A run that was interrupted and resumed gets the same entries.

        Args:
            updated: whether weights should have changed in these steps.
            load: expert load of these steps, layer index -> tokens [E], on the host.
            received: expert load since the run began, on the host.

        Returns:
            `idle_experts`: number of trained experts that have received no token since the run began.
            `unchanged`: if `updated`, the parts (`router`, `experts`, `lora`, `other`) of which no weight has changed.
            `notices`: the kinds of the warnings that apply.
        """
        self._kinds = list(self._of_data)
        self._about_collapse({layer: tokens for layer, tokens in load.items() if _is_enough(tokens)})
        idle = _idle_experts(self.adapted.run, received)
        if all(map(_is_enough, received.values())):
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
        return {"idle_experts": len(idle), "unchanged": still if updated else [], "notices": self._kinds}

    def at_end(self, received: dict[int, Tensor]) -> None:
        """Warn of trained experts without a token in the run, and of 16-bit weights whose updates were rounded away.

        `received` is the expert load since the run began: layer index -> tokens [E].
        """
        self._about_idle(_idle_experts(self.adapted.run, received))
        now = self._sample()
        moved = [now[part] != self._begun[part] for part in self._rounding() if part in now]
        share = torch.cat(moved).float().mean().item() if moved else 1.0
        if share < _TOO_FEW:
            self.say(
                "updates rounded away",
                f"{share:.1%} of the weights that train in 16 bits have moved; the others' updates were smaller than "
                "half a step of their precision and were rounded away, or no token reached them. Set "
                "optimizer.master_weights: stochastic (no memory) or fp32 (4 bytes a parameter), or raise optimizer.lr",
            )

    def _rounding(self) -> set[str]:
        """Return the parts whose 16-bit weights are updated without a float32 copy, so that each update is rounded to
        nearest."""
        parts = {self.adapted.part_of(name) for name, p in self.adapted.trainable().items() if p.itemsize == 2}
        optimizers = {part: self.adapted.run.optimizers[part] for part in parts}
        return {part for part, by in optimizers.items() if by.master_weights == "none" and not by.offload}

    def _about_idle(self, idle: dict[tuple[int, int], int]) -> None:
        """Warn of idle experts, given as (layer, expert) -> number of trained parameters."""
        if idle:
            named = ", ".join(first_of([f"{layer}:{expert}" for layer, expert in idle], 8))
            self.say(
                "idle experts",
                f"no token has reached {counted(len(idle), 'expert')} to be trained (layer:expert {named}): "
                f"{100 * sum(idle.values()) / self.trained:.1f} % of the trained parameters are idle. moetune score "
                "and select choose experts that this data uses",
            )

    def _about_collapse(self, load: dict[int, Tensor]) -> None:
        """Warn of layers whose effective number of experts, exp(entropy of the load), is close to K, the experts per
        token."""
        for layer in self.adapted.structure.moe_layers:
            if layer.index not in load or layer.top_k == layer.shape.num_experts:
                continue
            used = math.exp(entropy(load[layer.index]))
            if used < _COLLAPSED * layer.top_k:
                self.say(
                    "collapsed routers",
                    f"routing of layer {layer.index} has collapsed: of {layer.shape.num_experts} experts {used:.1f} "
                    "are in use (the exponential of the load's entropy). train.router_aux_loss counteracts it; a "
                    "lower optimizer.router.lr moves routers less",
                    about=layer.index,
                )

    @torch.no_grad()
    def _sample(self) -> dict[str, Tensor]:
        """Return part -> up to `_SAMPLED` elements of each of its trained parameters on this rank, float32 [n] on the
        host."""
        parts: dict[str, list[Tensor]] = {}
        for name, parameter in self.adapted.trainable().items():
            flat = local_tensor(parameter).reshape(-1)
            if len(flat):  # an empty shard, or a weight that DeepSpeed keeps elsewhere, has no elements here
                parts.setdefault(self.adapted.part_of(name), []).append(flat[:: -(-len(flat) // _SAMPLED)].float())
        return {part: copy_on_host(torch.cat(samples)) for part, samples in parts.items()}


def entropy(tokens_E: Tensor) -> float:
    """Return the entropy -Σ p·ln p of the experts' shares p of the tokens, in nats; from 0 to ln E."""
    share = tokens_E.double() / tokens_E.sum().clamp(min=1)
    return float(-torch.special.xlogy(share, share).sum())


def _without_use(config: RunConfig, evaluates: bool) -> Iterator[str]:
    """Yield a sentence for each setting, of the environment too, that is not its default and changes nothing here."""
    train, parallel = config.train, config.parallel
    if not evaluates and (train.eval_every != TrainConfig().eval_every or train.eval_micro_batch is not None):
        yield "nothing is held out, so nothing is evaluated (train.eval_every); set data.eval, or data.validation: 0.05"
    if parallel.load is not None and parallel.ep == 1:
        yield "parallel.load is not read: it balances experts over parallel.ep, which is 1"
    if (parallel.zero, parallel.reshard) != (3, True) and parallel.fsdp == 1:
        yield "parallel.zero and reshard change nothing: they are of parallel.fsdp, which is 1"
    if asked := [
        f"{name}={os.environ[name]}" for name in _OF_ACCELERATE if os.environ.get(name, "no") not in _DEFAULTS
    ]:
        yield f"{' and '.join(asked)} of accelerate changes nothing: model.dtype, train.accumulate and parallel decide"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if visible not in ("", "-1") and not torch.cuda.is_available():
        yield f"CUDA_VISIBLE_DEVICES={visible} names no GPU that torch can use, so the run is on the CPU"


@torch.no_grad()
def _untrained_tokens(adapted: Adapted, rows: Mapping[str, list[Any]]) -> list[int]:
    """Return the tokens in some rows of the data whose weights are zero, beside those of the others, in an embedding or
    LM head that does not train."""
    ids = np.concatenate(rows["input_ids"])
    if "is_token" in rows:  # packed rows, with padding
        ids = ids[np.concatenate(rows["is_token"]) != 0]
    tokens, zero = torch.from_numpy(np.unique(ids)).long(), set[int]()
    for table in (adapted.model.get_input_embeddings(), adapted.model.get_output_embeddings()):
        weight: Any = getattr(table, "weight", None)
        if weight is None or weight.requires_grad or hasattr(table, "lora_A") or not adapted.ranks.is_single:
            continue
        parts = tokens.to(weight.device).split(1024)  # which take little of a GPU's memory
        largest = torch.cat([weight[part].abs().amax(-1) for part in parts]).float().cpu()
        padding = getattr(table, "padding_idx", None)
        zero |= {*tokens[largest <= _ZERO * largest.median()].tolist()} - {padding}
    return sorted(zero)


def _is_enough(tokens_E: Tensor) -> bool:
    return tokens_E.mean().item() >= _ENOUGH


def _idle_experts(run: ResolvedRun, load: dict[int, Tensor]) -> dict[tuple[int, int], int]:
    """Return the experts that train and received no token, as (layer, expert) -> number of trained parameters."""
    idle = {}
    for layer in run.structure.moe_layers:
        for expert, number in run.selection.trained_parameters(layer).items():
            if layer.index in load and not load[layer.index][expert]:
                idle[layer.index, expert] = number
    return idle


def refuse_broken_weights(model: nn.Module) -> None:
    """Raise `UserError` with the name of the first tensor on this rank that is not finite, quantization scales too."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        state = getattr(tensor, "quant_state", None)
        scales = getattr(state, "absmax", None), getattr(getattr(state, "state2", None), "absmax", None)
        for values in (tensor, *scales):
            if values is not None and values.is_floating_point() and not local_tensor(values).isfinite().all():
                raise UserError(
                    f"{name} of the base holds values that are not finite (NaN, infinity): it cannot be "
                    "trained; the checkpoint of model.path is damaged, or was made in another precision"
                )
