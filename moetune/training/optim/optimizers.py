"""A run's optimizers: one for each group with equal settings, combined into one."""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from moetune.adapt.build import Adapted
from moetune.config.schema import OptimizerConfig
from moetune.run.deepspeed_json import deepspeed_json
from moetune.run.names import is_second_factor
from moetune.training.optim.lomo import Adafactor, AdaLomo, Lomo
from moetune.training.optim.loss_scale import LossScale
from moetune.training.optim.offload import HostCopies, HostUpdater
from moetune.training.optim.updater import Updater
from moetune.training.optim.zero import ZeroUpdater

_8BIT = {"adamw8bit": "AdamW8bit", "paged_adamw8bit": "PagedAdamW8bit", "lion8bit": "Lion8bit",
         "ademamix8bit": "AdEMAMix8bit", "paged_adamw": "PagedAdamW32bit"}  # fmt: skip


class CombinedOptimizer:
    """All optimizers of a run, with the interface of one.

    Attributes:
        updaters: one `Updater` for each optimizer, with its parameters.
        loss_scale: the loss scale of a float16 run; None for other dtypes.
    """

    def __init__(self, updaters: list[Updater], loss_scale: LossScale | None = None) -> None:
        self.updaters, self.loss_scale = updaters, loss_scale
        for group in self.param_groups:
            group["initial_lr"] = group["lr"]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers; `initial_lr` in each is the learning rate before the schedule."""
        return [group for updater in self.updaters for group in updater.optimizer.param_groups]

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """The states of all optimizers, by the updated tensor: a parameter, this rank's shard or a float32 copy."""
        return dict(chain.from_iterable(updater.optimizer.state.items() for updater in self.updaters))

    def step(self, scale: float = 1.0) -> None:
        """Update all parameters that the backward pass has not updated, by `scale` times their gradients."""
        for updater in self.updaters:
            if not updater.fused:
                updater.step(scale)

    def on_host(self) -> list[HostUpdater]:
        """Return the updaters of the parameters that are updated on the host (`offload`)."""
        return [updater for updater in self.updaters if isinstance(updater, HostUpdater)]

    def zero_grad(self) -> None:
        """Free all gradients, those on the host included."""
        for parameter in self.parameters():
            parameter.grad = None
        for updater in self.on_host():
            updater.drop()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield every parameter that trains."""
        return (parameter for updater in self.updaters for parameter in updater.parameters)

    def states(self) -> Iterator[Tensor]:
        """Yield every optimizer state that is a tensor; the float32 copies of weights are in `masters`."""
        values = chain.from_iterable(state.values() for state in self.state.values())
        return (value for value in values if isinstance(value, Tensor))

    def masters(self) -> Iterator[Tensor]:
        """Yield the float32 copies of weights that are kept between steps."""
        return chain.from_iterable(updater.masters_kept() for updater in self.updaters)


def make_optimizer(adapted: Adapted) -> CombinedOptimizer:
    """Return the optimizers of a run, chosen by part (`router`, `experts`, `lora`, `other`).

    Parameters with equal settings share an optimizer; for LoRA's factors B the learning rate is `adapt.lora.lr_ratio`
    times that of A. A parameter has its own optimizer if it is updated alone: in the backward pass, on the host, or
    through a float32 copy. With DeepSpeed and several ranks there is one optimizer, DeepSpeed's.
    """
    config, trained = adapted.run.config, adapted.trainable()
    loss_scale = LossScale() if adapted.model.dtype == torch.float16 else None
    if not adapted.ranks.is_single and config.parallel.engine == "deepspeed":
        (shared,) = set(config.optimizers.values())
        settings = deepspeed_json(config, sum(parameter.numel() for parameter in trained.values()))
        updater = ZeroUpdater(adapted.model, [*trained.values()], optimizer_maker(shared), settings, adapted.ranks)
        return CombinedOptimizer([updater], loss_scale)
    parts = {name: adapted.part_of(name) for name in trained}
    order, lora = list(dict.fromkeys(parts.values())), config.adapt.lora
    by_config: dict[OptimizerConfig, list[nn.Parameter]] = {}
    for name in sorted(trained, key=lambda name: order.index(parts[name])):
        optimizer = adapted.run.optimizers[parts[name]]
        if parts[name] == "lora" and lora is not None and is_second_factor(name):
            optimizer = optimizer.but(lr=optimizer.lr * lora.lr_ratio)
        by_config.setdefault(optimizer, []).append(trained[name])
    updaters: list[Updater] = []
    copies = HostCopies(adapted.model.device)
    for optimizer, parameters in by_config.items():
        make = optimizer_maker(optimizer)
        if optimizer.offload:
            updaters += [HostUpdater(parameter, make, copies) for parameter in parameters]
            continue
        alone = optimizer.fused_backward or optimizer.master_weights != "none"
        updaters += [
            Updater(group, make, optimizer.master_weights, optimizer.fused_backward)
            for group in ([[parameter] for parameter in parameters] if alone else [parameters])
        ]
    return CombinedOptimizer(updaters, loss_scale)


def optimizer_maker(config: OptimizerConfig) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """Return a function that makes an optimizer of torch, bitsandbytes or `lomo.py` over a list of parameters.

    Weight decay applies to tensors of two or more dimensions, not to biases and norms. torch's fused kernels are used
    on CPU and GPU, because they need no temporary of a parameter's size. All 8-bit optimizers that one such function
    makes share their quantization tables.
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
                given = {"betas": config.betas, "eps": config.eps}  # not None: `OptimizerConfig` sets defaults
                return torch.optim.AdamW(groups, lr=config.lr, fused=True, **given)  # type: ignore[arg-type]
            case "sgd":
                return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum or 0.0, fused=True)
            case "adafactor":
                return Adafactor(groups, config.lr)
            case "lomo":
                return Lomo(groups, config.lr)
            case "adalomo":
                return AdaLomo(groups, config.lr)
        from moetune.compat.bitsandbytes import optim, share_tables

        eps = {} if config.eps is None else {"eps": config.eps}
        optimizer = getattr(optim, _8BIT[config.name])(groups, lr=config.lr, betas=config.betas, **eps)
        share_tables(optimizer, tables)
        return optimizer

    return make
