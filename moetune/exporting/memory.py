"""`moetune export --format merged --predict`: the host memory of writing a merged checkpoint."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from moetune.compat.fake_mode import QuickFakeMode, add_missing_fakes
from moetune.exporting.finished_run import FinishedRun, base_folder
from moetune.exporting.writers.updates import Trained, Update, new_rows, placed, updates
from moetune.formats.base import Quantized
from moetune.formats.checkpoint import open_checkpoint
from moetune.memory.commands.unread import Reading, report_of, unread
from moetune.memory.report import MemoryReport
from moetune.memory.trace.tracing import refusing_values
from moetune.memory.trace.tracker import Tracker
from moetune.models.hub.key_mapping import KeyMapping
from moetune.tensor_files import Stored


def predict_merged(run: FinishedRun) -> MemoryReport:
    """Predict the peak memory of writing the merged checkpoint of a run, which takes host memory only.

    Of updates that need equal memory, such as those of the experts, one is computed: they are made one after the other.

    Raises:
        UserError: the run began with random weights; or the base is missing or has other tensors than the run recorded.
    """
    add_missing_fakes()
    tracker = Tracker({})
    reading = Reading(tracker, torch.device("cpu"), has_gpu=False)
    base = unread(open_checkpoint(base_folder(run)), reading)
    stored = {name: tensor for name, tensor in run.trained.items() if isinstance(tensor, Stored)}
    trained: dict[str, Trained] = {**run.trained, **unread(stored, reading)}
    targets = placed(run.adapted.run.model, updates(replace(run, trained=trained)), base)
    alike = {_kind(update, mapping, base): (update, mapping) for update, mapping in targets}
    settings, structure = run.config.model, run.adapted.structure
    with refusing_values(settings.path, structure.model_type), QuickFakeMode(), tracker, torch.no_grad():
        for tensor in {tensor.shape: tensor for tensor in trained.values() if isinstance(tensor, Stored)}.values():
            for start, stop in tensor.blocks():  # as opening the run looks for values that are not finite
                tensor.rows(start, stop)
        if any(isinstance(tensor, Quantized) for tensor in base.values()):
            for tensor in {tensor.shape: tensor for tensor in base.values()}.values():
                for start, stop in tensor.blocks():
                    tensor.as_written(tensor.rows(start, stop))
        for update, mapping in alike.values():
            for key, _, rows in new_rows(update, mapping, base):
                base[key].as_written(rows)
                del rows
    return report_of(tracker, settings.path, {"exports": f"{run} as a merged checkpoint"}, None)


def _kind(update: Update, mapping: KeyMapping, base: Mapping[str, Stored]) -> tuple[Any, ...]:
    """Return a key that is equal for updates that need equal memory: the shapes of all tensors that they read, and how
    these are converted."""
    shapes = tuple(tensor.shape for tensor in update.reads if isinstance(tensor, Stored))
    stored = tuple(base[key].shape for key in mapping.every_key())
    return update.expert is None, update.is_added, shapes, stored, type(mapping.conversion)
