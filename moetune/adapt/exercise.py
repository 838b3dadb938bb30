"""A few layers of a run's model, forward and backward on random tokens: the calls in which kernels are compared.

The guard (adapt/guard) starts it in a child process.
"""

import os
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from moetune.adapt.build import build
from moetune.adapt.guard.comparison import CallsSeen, compare_call
from moetune.kernels.registry import Operator
from moetune.models.stack import AbsentTable, made_alike
from moetune.run.kinds import kinds_of
from moetune.run.resolve import ResolvedRun, resolve

_MOST_KINDS = 4
"""Most kinds of layers that run, the most frequent; others differ in which experts train."""


def exercise(run: ResolvedRun, device: torch.device, compute: Callable[[Operator, Sequence[Any]], Any]) -> None:
    """Build layers of each kind of a run's model, without checkpointing, and run them forward and backward: on 100
    tokens, and on 4, which leave experts idle, with checkpointing. The last layer with experts keeps their rows.

    What trains has random values, so that LoRA's part of a result is as large as the rest. Each call of an operator
    that has a kernel returns `compute(operator, args)`.
    """
    run = replace(run, keeps={layer.index: frozenset({"rows"}) for layer in run.structure.moe_layers[-1:]})
    made, (kinds, _) = [*made_alike(run.model.plain).values()], kinds_of(run, 0)
    lasts = {kind: layer for layer, kind in enumerate(kinds)}
    layers = {*map(made.index, made)}
    for kind, _ in Counter(kinds).most_common(_MOST_KINDS):
        layers |= {kinds.index(kind), lasts[kind]}  # the input of the model's first layer has no gradient
    tables = run.tables_on_host
    run = run.without_layers(set(range(len(kinds))) - layers)
    plain = run.model.plain
    for path in tables:  # no kernel reads them, and to draw 95 GiB of n-grams takes minutes
        if f"{path}.weight" != run.embedding:
            plain.set_submodule(path, AbsentTable(plain.get_submodule(path)))
    adapted = build(run, device, compares=False)
    with torch.no_grad():
        for parameter in adapted.trainable().values():
            parameter.normal_(0, 0.1)
    model = adapted.model.train()
    for shape in ((2, 50), (1, 4)):
        ids = torch.randint(model.config.get_text_config().vocab_size, shape, device=device)
        with torch.enable_grad(), CallsSeen(compute):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.activation_checkpointing_enable()


def compare_here(descriptor: int) -> None:
    """Run in a child: receive what to compare, compare kernels with references, and send a `Line` for each step.

    The process ends as soon as the other end of the pipe is closed, so when the process that asked has ended.
    """
    pipe = Connection(descriptor)
    index, configs, without = pipe.recv()
    threading.Thread(target=lambda: (pipe.poll(None), os._exit(1)), daemon=True).start()
    device, done = torch.device("cuda", index), set[Hashable](without)
    torch.cuda.set_device(device)
    for config in configs:
        run = resolve(config, "cuda")
        exercise(run, device, partial(compare_call, dtype=run.dtype, done=done, say=pipe.send))
    torch.cuda.synchronize(device)
    pipe.send(None)
