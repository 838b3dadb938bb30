"""Optimizers by name and by part, as one optimizer for a trainer to hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from moetune.adapt.build import Adapted
from moetune.config.schema import OptimizerConfig, Part
from moetune.run.deepspeed_json import deepspeed_json
from moetune.run.names import is_second_factor
from moetune.training.optim.lomo import Adafactor, AdaLomo, Lomo
from moetune.training.optim.loss_scale import LossScale
from moetune.training.optim.offload import HostCopies, HostUpdater
from moetune.training.optim.updater import Updater
from moetune.training.optim.zero import ZeroUpdater

_8BIT = {"adamw8bit": "AdamW8bit", "paged_adamw8bit": "PagedAdamW8bit", "lion8bit": "Lion8bit",
         "ademamix8bit": "AdEMAMix8bit", "paged_adamw": "PagedAdamW32bit"}  # fmt: skip


class CombinedOptimizer(torch.optim.Optimizer):
    """Several updaters as one optimizer; schedulers and checkpoints see a single one.

    Attributes:
        loss_scale: of a run in float16; saved with the rest.
    """

    def __init__(self, updaters: list[Updater], loss_scale: LossScale | None = None) -> None:
        # the base class would hold parameters of its own
        self.updaters, self.defaults, self.loss_scale = updaters, {}, loss_scale

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for updater in self.updaters for group in updater.optimizer.param_groups]

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:  # type: ignore[override]
        return dict(chain.from_iterable(updater.optimizer.state.items() for updater in self.updaters))

    @torch.no_grad()
    def step(self, closure: None = None, *, scale: float = 1.0) -> None:  # type: ignore[override]
        """One update of what is not fused into backward, with gradients times `scale`."""
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


def make_optimizer(adapted: Adapted) -> CombinedOptimizer:
    """The optimizers of a run. Where gradients are used one by one, each parameter has an updater of its own."""
    config, loss_scale = adapted.run.config, LossScale() if adapted.model.dtype == torch.float16 else None
    parts: dict[Part, dict[str, nn.Parameter]] = {}
    for name, parameter in adapted.trainable().items():
        parts.setdefault(adapted.part_of(name), {})[name] = parameter
    if not adapted.ranks.is_single and config.parallel.engine == "deepspeed":
        (one,) = set(config.optimizers.values())
        trained = [*adapted.trainable().values()]
        settings = deepspeed_json(config, sum(parameter.numel() for parameter in trained))
        return CombinedOptimizer(
            [ZeroUpdater(adapted.model, trained, _maker(one), settings, adapted.ranks)], loss_scale
        )
    by_config: dict[OptimizerConfig, dict[str, nn.Parameter]] = {}
    for part, parameters in parts.items():
        for name, parameter in parameters.items():
            optimizer, lora = adapted.run.optimizers[part], config.adapt.lora
            if part == "lora" and lora is not None and is_second_factor(name):
                optimizer = optimizer.but(lr=optimizer.lr * lora.lr_ratio)
            by_config.setdefault(optimizer, {})[name] = parameter
    updaters: list[Updater] = []
    copies = HostCopies(adapted.model.device)
    for number, (optimizer, named) in enumerate(by_config.items()):
        make = _maker(optimizer)
        if optimizer.offload:
            updaters += [HostUpdater(name, parameter, make, copies) for name, parameter in named.items()]
            continue
        alone = optimizer.fused_backward or optimizer.master_weights != "none"
        groups = (
            {name: [p] for name, p in named.items()} if alone else {f"{optimizer.name}.{number}": [*named.values()]}
        )
        updaters += [
            Updater(key, parameters, make, optimizer.master_weights, optimizer.fused_backward)
            for key, parameters in groups.items()
        ]
    return CombinedOptimizer(updaters, loss_scale)


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
                given = {"betas": config.betas, "eps": config.eps}  # which its settings fill in
                return torch.optim.AdamW(groups, lr=config.lr, fused=True, **given)  # type: ignore[arg-type]
            case "sgd":
                return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum or 0.0, fused=True)
            case "adafactor":
                return Adafactor(groups, config.lr)
            case "lomo":
                return Lomo(groups, config.lr)
            case "adalomo":
                return AdaLomo(groups, config.lr)
        from bitsandbytes import optim

        from moetune.compat.bitsandbytes import share_tables

        eps = {} if config.eps is None else {"eps": config.eps}
        optimizer = getattr(optim, _8BIT[config.name])(groups, lr=config.lr, betas=config.betas, **eps)
        share_tables(optimizer, tables)
        return optimizer

    return make
