"""Optimizers by name and by part, as one optimizer for a trainer to hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from moetune.adapt.build import Adapted
from moetune.config import OptimizerConfig, Part, RunConfig
from moetune.errors import UserError
from moetune.parallel.deepspeed_json import deepspeed_json
from moetune.step.lomo import Adafactor, AdaLomo, Lomo
from moetune.step.loss_scale import LossScale
from moetune.step.offload import Bus, HostUpdater
from moetune.step.updater import Updater
from moetune.step.zero import ZeroUpdater

_8BIT = {"adamw8bit": "AdamW8bit", "paged_adamw8bit": "PagedAdamW8bit", "lion8bit": "Lion8bit",
         "ademamix8bit": "AdEMAMix8bit", "paged_adamw": "PagedAdamW32bit"}  # fmt: skip


class CombinedOptimizer(torch.optim.Optimizer):
    """Several updaters as one optimizer; schedulers and checkpoints see a single one.

    Attributes:
        scale: what gradients are multiplied with at the next `step`.
        loss_scale: of a run in float16; saved with the rest.
        skips: whether the next `step` does nothing.
    """

    def __init__(self, updaters: list[Updater]) -> None:  # the base class would hold parameters of its own
        self.updaters, self.defaults = updaters, {}
        self.scale, self.skips = 1.0, False
        self.loss_scale: LossScale | None = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for updater in self.updaters for group in updater.optimizer.param_groups]

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:  # type: ignore[override]
        return dict(chain.from_iterable(updater.optimizer.state.items() for updater in self.updaters))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        scale, skips, self.scale, self.skips = self.scale, self.skips, 1.0, False
        if skips:
            return
        for updater in self.updaters:
            if not updater.fused:
                updater.step(scale)

    def on_host(self) -> list[HostUpdater]:
        """The updaters that work on the host."""
        return [updater for updater in self.updaters if isinstance(updater, HostUpdater)]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.parameters():
            parameter.grad = None
        for updater in self.on_host():
            updater.drop()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Everything that trains."""
        return (parameter for updater in self.updaters for parameter in updater.parameters)

    def states(self) -> Iterator[Tensor]:
        """The tensors of optimizer states, but master weights."""
        values = chain.from_iterable(state.values() for state in self.state.values())
        return (value for value in values if isinstance(value, Tensor))

    def masters(self) -> Iterator[Tensor]:
        """The master weights."""
        return chain.from_iterable(updater.masters_kept() for updater in self.updaters)

    def state_dict(self) -> dict[str, Any]:
        scale = {} if self.loss_scale is None else self.loss_scale.state_dict()
        return {"loss_scale": scale, "updaters": {updater.key: updater.state_dict() for updater in self.updaters}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = state_dict["updaters"]
        if saved.keys() != {updater.key for updater in self.updaters}:
            raise ValueError("these are the states of another optimizer")
        for updater in self.updaters:
            updater.load_state_dict(saved[updater.key])
        if self.loss_scale is not None:
            self.loss_scale.load_state_dict(state_dict["loss_scale"])


def make_optimizer(adapted: Adapted, config: RunConfig) -> CombinedOptimizer:
    """The optimizers of a run. Where gradients are used one by one, each parameter has an updater of its own.

    Raises:
        UserError: a part that trains has no optimizer, or the other way round.
    """
    parts: dict[Part, dict[str, nn.Parameter]] = {}
    for name, parameter in adapted.trainable().items():
        parts.setdefault(adapted.part_of(name), {})[name] = parameter
    if adapted.ranks.alone:  # one of several may hold none of a part
        refuse_parts_without(config, {part: len(parameters) for part, parameters in parts.items()})
    if not adapted.ranks.alone and config.parallel.engine == "deepspeed":
        (one,) = set(config.optimizers.values())
        trained = [*adapted.trainable().values()]
        settings = deepspeed_json(config, sum(parameter.numel() for parameter in trained))
        return CombinedOptimizer([ZeroUpdater(adapted.model, trained, _maker(one), settings, adapted.ranks)])
    refuse_unshared(config)
    by_config: dict[OptimizerConfig, dict[str, nn.Parameter]] = {}
    for part, parameters in parts.items():
        by_config.setdefault(config.optimizers[part], {}).update(parameters)
    updaters: list[Updater] = []
    bus = Bus(adapted.model.device)
    for number, (optimizer, named) in enumerate(by_config.items()):
        make = _maker(optimizer)
        _refuse_coarse(optimizer, named)
        if optimizer.offload:
            updaters += [HostUpdater(name, parameter, make, bus) for name, parameter in named.items()]
            continue
        alone = optimizer.fused_backward or optimizer.master_weights != "none"
        groups = (
            {name: [p] for name, p in named.items()} if alone else {f"{optimizer.name}.{number}": [*named.values()]}
        )
        updaters += [
            Updater(key, parameters, make, optimizer.master_weights, optimizer.fused_backward)
            for key, parameters in groups.items()
        ]
    return CombinedOptimizer(updaters)


def refuse_parts_without(config: RunConfig, trained: Mapping[Part, int]) -> None:
    """Raises `UserError` unless every part that trains has an optimizer, and every optimizer something to train.

    Args:
        trained: parameters or tensors that train, by part.
    """
    if isinstance(config.optimizer, OptimizerConfig):
        return
    without = [part for part, count in trained.items() if count and part not in config.optimizers]
    idle = [part for part in config.optimizers if not trained.get(part)]
    problems = [f"optimizer.{part} is missing, and that part trains" for part in without]
    problems += [f"optimizer.{part}: adapt: chooses nothing of that part; leave it out" for part in idle]
    if problems:
        raise UserError("\n".join(problems))


def _refuse_coarse(config: OptimizerConfig, named: Mapping[str, nn.Parameter]) -> None:
    """float16 gradients are scaled; taking the scale off in float16 would make the small ones zero again."""
    coarse = [name for name, parameter in named.items() if parameter.dtype == torch.float16]
    if (
        coarse
        and config.master_weights == "none"
        and not config.offload
        and config.name not in ("lomo", "adalomo", "adafactor")
    ):
        raise UserError(
            f"model.dtype: fp16 and {config.name} on {coarse[0]}: set optimizer.master_weights: fp32, use lomo, "
            "adalomo or adafactor, which compute in float32, or set model.dtype: bf16"
        )


def refuse_unshared(config: RunConfig) -> None:
    """Raises `UserError` for optimizers that cannot work with a part of a weight, or without the other ranks'."""
    if config.parallel.ranks == 1:
        return
    problems = []
    splits = config.parallel.fsdp * config.parallel.tp > 1
    for optimizer in dict.fromkeys(config.optimizers.values()):
        if optimizer.fused_backward:
            problems.append(f"{optimizer.name} with fused_backward uses gradients up before the ranks have added them")
        if optimizer.offload:
            problems.append(f"{optimizer.name} with offload takes gradients away before the ranks have added them")
        if optimizer.master_weights == "stochastic":
            problems.append("master_weights: stochastic would round the copies of one weight apart")
        if splits and optimizer.name in ("adafactor", "adalomo"):
            problems.append(f"{optimizer.name} needs whole matrices, and parallel.fsdp and tp split them")
    if problems:
        raise UserError(
            f"optimizer: over several ranks {'; '.join(problems)}. Use adamw, adamw8bit, sgd or lion8bit with "
            "master_weights: none or fp32"
        )


def optimizer_over(parameters: list[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """The library's optimizer of that name over some parameters, by itself."""
    return _maker(config)(parameters)


def _maker(config: OptimizerConfig) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """How to make an optimizer over some parameters.

    Weight decay goes to matrices only; biases and norms have none. Implementations are named, not left to torch, which
    chooses differently on a CPU and on a GPU: `fused` keeps no parameter-sized temporary.
    """
    tables: dict[str, Tensor] = {}

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        match config.name:
            case "adamw":
                return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
            case "sgd":
                return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=True)
            case "adafactor":
                return Adafactor(groups, config.lr)
            case "lomo":
                return Lomo(groups, config.lr)
            case "adalomo":
                return AdaLomo(groups, config.lr)
        from bitsandbytes import optim

        eps = {} if config.eps is None else {"eps": config.eps}
        optimizer = getattr(optim, _8BIT[config.name])(groups, lr=config.lr, betas=config.betas, **eps)
        optimizer.name2qmap = tables or optimizer.name2qmap  # one for all, not one a parameter
        tables.update(optimizer.name2qmap)
        return optimizer

    return make
