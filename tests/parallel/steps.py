"""Steps of a run by its own stepper, on the batches that one process would see, by as many ranks as it has."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moetune.adapt.build import Adapted
from moetune.config.schema import RunConfig
from moetune.experts.bank import ExpertBank
from moetune.experts.context import CountReceived, read_received
from moetune.parallel.ranks import Ranks, local_tensor
from moetune.training.optim.optimizers import CombinedOptimizer, make_optimizer
from moetune.training.optim.zero import ZeroUpdater
from moetune.training.step.micro_step import count_loss_tokens
from moetune.training.step.stepper import Stepper
from tests.resolved import build


@dataclass
class Taken:
    """What some steps gave: their losses and gradient norms, and the final weights by name."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def take(
    config: RunConfig,
    ranks: Ranks,
    steps: int,
    micro_batches: int,
    *,
    word: int | None = None,
    count_received: CountReceived = read_received,
) -> Taken:
    """`micro_batches` of all ranks together make a step.

    Args:
        word: makes every token this one.
        count_received: reads the receive counts of a dispatch.
    """
    adapted = build(config, "cpu", ranks=ranks)
    adapted.expert_context.hooks.count_received = count_received
    adapted.model.train()
    optimizer = make_optimizer(adapted)
    stepper = Stepper(adapted, optimizer)
    taken, words = Taken(), min(500, adapted.model.config.get_text_config().vocab_size)
    for step in range(steps):
        batches = [batch_of(config, step * micro_batches + number, word, words) for number in range(micro_batches)]
        total = sum(count_loss_tokens(batch) for batch in batches)
        mine = batches[ranks.data_index :: ranks.data_size]
        for number, batch in enumerate(mine):
            stepper.micro_step(batch, total, last=number == len(mine) - 1)
        reduced = stepper.finish()
        taken.norms.append(float(reduced.norm))
        taken.losses.append(float(reduced.loss))
    taken.weights = whole_weights(adapted, optimizer) | adapted.router_biases()
    return taken


def batch_of(config: RunConfig, number: int, word: int | None = None, words: int = 500) -> dict[str, Tensor]:
    """Rows of unlike lengths, some tokens without a loss, of a vocabulary of at least `words`."""
    made = torch.Generator().manual_seed(number)
    rows, length = config.train.micro_batch, config.train.sequence_length
    ids = torch.randint(5, words, (rows, length), generator=made)
    ids = ids if word is None else torch.full_like(ids, word)
    lengths = torch.randint(length // 3, length + 1, (rows,), generator=made)
    mask = (torch.arange(length) < lengths[:, None]).long()
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, : number % 5] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def whole_weights(adapted: Adapted, optimizer: CombinedOptimizer) -> dict[str, Tensor]:
    """What trains, by name, whole; low-rank factors of experts one by one. Every rank gets all of it."""
    banks = {layer.experts: adapted.model.get_submodule(layer.experts) for layer in adapted.structure.moe_layers}
    mine: dict[str, Any] = {}
    engine = next((u.engine for u in optimizer.updaters if isinstance(u, ZeroUpdater)), None)
    for name, parameter in adapted.trainable().items():
        bank = next((bank for path, bank in banks.items() if name.startswith(f"{path}.lora.")), None)
        with nullcontext() if engine is None else engine.gathered(parameter):
            tensor = parameter.full_tensor() if isinstance(parameter, DTensor) else local_tensor(parameter)
            tensor = tensor.detach().clone()
        if isinstance(bank, ExpertBank):
            mine |= {f"{name}.{expert}": tensor[slot] for expert, slot in bank.lora.slots.items()}
        else:
            mine[name] = tensor
    whole: dict[str, Tensor] = {}
    for said in adapted.ranks.gather(mine):
        whole |= said
    return whole
