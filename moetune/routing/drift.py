"""`moetune drift`: which experts receive held-out tokens before and after training.

Before is the model that training started from, with `adapt.start_from` if set; after is the checkpoint that `open_run`
chooses. Both compute in the same precision. Only tokens that carry loss are compared, whose next token counts in the
training loss.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from moetune.adapt.weights.base import refuse_changed_base
from moetune.config.schema import HardwareConfig, ParallelConfig
from moetune.errors import UserError
from moetune.exporting.finished_run import fill_trained, open_run
from moetune.files import write_output
from moetune.report.console import terminal
from moetune.routing.data_sets import read_sources
from moetune.routing.recorder import Recorder
from moetune.routing.score import load_base, record_batches, refuse_dense, to_score
from moetune.run.dtypes import this_device
from moetune.run.folder_files import Drift, LayerDrift
from moetune.run.resolve import resolve
from moetune.training.folder.run_folder import DRIFT_FILE
from moetune.training.folder.run_writer import RunWriter


def drift(
    path: Path,
    data: str | None = None,
    tokens: int = 131_072,
    *,
    device: torch.device | str | None = None,
    console: Console | None = None,
) -> Drift:
    """Route held-out data through the model before and after a run, and compare the experts that are chosen.

    Args:
        path: the run folder.
        data: a file or a name as under `data.train`; by default the run's held-out data.
        tokens: whole rows are read until they have this many tokens, padding not counted.
        device: by default the first GPU, or the CPU if there is none.
        console: where progress and notes are printed; by default stderr.

    Raises:
        UserError: the folder is no run with a checkpoint; the model has no experts; there is no held-out data; or the
            base has changed since the run.
    """
    console = console or terminal(stderr=True)
    finished = open_run(path)
    for note in finished.notes:
        console.print(f"note: {note}")
    # one process routes the data, on however many ranks the run was trained
    alone = HardwareConfig(gpu=finished.config.hardware.gpu)
    config = to_score(finished.config).but(parallel=ParallelConfig(), hardware=alone)
    if data is None and (config.data is None or not config.data.evaluates):
        raise UserError(f"{finished} has no held-out data (data.eval); give some with --data FILE")
    run = resolve(config, this_device())
    refuse_dense(run)
    sources, padding = read_sources(
        run, None if data is None else [data], tokens, None if finished.folder is None else finished.folder.clock()
    )
    adapted, base = load_base(run, run.device(device), console)
    if finished.base is not None and base is not None:
        refuse_changed_base(finished.base, base.fingerprint, str(finished), config.model.path)
    passes = []
    for trained in (False, True):
        if trained:
            fill_trained(adapted, finished)
        recorder = Recorder(adapted)
        recorder.choices = {}
        record_batches(recorder, adapted, sources, padding, console)
        passes.append(recorder)
    return _compared(passes, str(path), finished.step or 0, sources[0].name)


def _compared(passes: Sequence[Recorder], path: str, step: int, data: str) -> Drift:
    """Return the drift between two recorders, used before and after training, whose `choices` were filled.

    `path` is the run folder, `step` that of its checkpoint, and `data` the name of the data set, for the result.
    """
    before, after = passes
    assert before.choices is not None
    assert after.choices is not None
    scores = [recorder.scores([0]) for recorder in passes]
    count = before.count(0, "loss")
    any_layer = torch.zeros(count, dtype=torch.bool)
    layers = {}
    for index in before.layers:
        old, new = (by_layer[index].loss.tokens for by_layer in scores)
        differs = (torch.cat(before.choices[index]) != torch.cat(after.choices[index])).any(-1)
        any_layer |= differs
        layers[index] = LayerDrift(
            tuple(old),
            tuple(new),
            jensen_shannon(old, new),
            differs.double().mean().item(),
            tuple(e for e, (a, b) in enumerate(zip(old, new, strict=True)) if a and not b),
            tuple(e for e, (a, b) in enumerate(zip(old, new, strict=True)) if b and not a),
        )
    return Drift(path, step, data, count, any_layer.double().mean().item(), layers)


def jensen_shannon(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the Jensen-Shannon distance of two expert loads: the square root of their divergence in bits, from 0 to 1.

    The loads are token counts for each expert; each load is divided by its sum, which must not be 0.
    """
    p, q = ([value / sum(load) for value in load] for load in (first, second))
    middle = [(a + b) / 2 for a, b in zip(p, q, strict=True)]

    def divergence(load: list[float]) -> float:
        return sum(a * math.log2(a / m) for a, m in zip(load, middle, strict=True) if a)

    return math.sqrt(max(0.0, (divergence(p) + divergence(q)) / 2))


def write_drift(drift: Drift, run: Path) -> None:
    """Write a drift to `drift.json` in the run folder `run`, for `moetune report`; `UserError` if that fails."""
    RunWriter(run).own(DRIFT_FILE)
    write_output(run / DRIFT_FILE, json.dumps(drift.to_json()) + "\n", replace=True)
