"""`MemoryRecord`: the memory of a run's first steps beside the prediction, as `memory.json`."""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from moetune.config.load import load_run_config
from moetune.errors import UserError, one_line
from moetune.experts.bank import ExpertBank
from moetune.experts.context import ReadCounts
from moetune.files import write_whole
from moetune.memory.assumed_routing import BALANCED, AssumedRouting
from moetune.memory.measurement.live import Refused, watch_cuda
from moetune.memory.measurement.measure import catalog_name
from moetune.memory.predict import time_of
from moetune.memory.trace import named_modules, trace
from moetune.memory.trace.tracker import Tracker
from moetune.memory.trace.watched import tensors_of
from moetune.models.catalog.gpus import Gpu, find_gpu
from moetune.run.resolve import ResolvedRun, resolve
from moetune.training.folder.run_folder import MEMORY_FILE, RUN_FILE
from moetune.training.loop import Loop
from moetune.training.metrics import Pace
from moetune.training.optim.values import generator_states, set_generator_states

MEASURED_STEPS = 2
"""Number of steps that are measured: optimizer states appear in the first, and the second is like all later ones."""


class MemoryRecord:
    """Predicts the memory of a run, measures its first steps, and writes both to `memory.json`.

    Create it before the first step, call `step_begins` and `step_ends` around each step, and `finish` after the last.
    On CUDA the peak comes from torch's counters; on a CPU from `Tracker`, which traces also use.

    Attributes:
        predicted: the prediction for the current micro-batch, with balanced routing.
    """

    def __init__(self, loop: Loop, console: Console) -> None:
        self.loop, self.console, self.device = loop, console, loop.device
        self.card = find_gpu(catalog_name(self.device)) if self.device.type == "cuda" else None
        self.predicted = self._predict(BALANCED)
        self._as_routed: int | None = None
        self._tracker = Tracker(named_modules(loop.adapted))
        self._tracking = ExitStack()
        self._groups = {  # layer -> ids of the experts of each group that is computed together
            bank.layer: [bank.expert_order[slots.start : slots.stop] for slots in bank.groups(loop.adapted.run.dtype)]
            for bank in loop.adapted.model.modules()
            if isinstance(bank, ExpertBank)
        }
        self._fullest: dict[int, list[int]] = {}  # layer -> rows of each expert in the call with the fullest group
        self._steps, self._rows = 0, 0
        self._measured: dict[str, int | None] | None = None
        self._had_states = self._has_states()
        self._seen = watch_cuda() if self.device.type == "cuda" else {}

    def _predict(self, routing: AssumedRouting) -> "Predicted":
        """Predict the run with a routing, leaving random generators as they were.

        If that fails, print why, and return a prediction without values. One of several ranks has none: a trace needs a
        process group of its own (`add_predictions`).
        """
        if not self.loop.ranks.is_single:
            return Predicted()
        drawn = generator_states(self.device)
        try:
            return predicted(self.loop.smaller_run(), self.card, routing)
        except Exception as error:  # a model's own code can raise anything
            self.console.print(f"memory of this run cannot be predicted ({one_line(error)}); it trains without")
            return Predicted()
        finally:
            set_generator_states(drawn, self.device)

    def step_begins(self) -> None:
        """Start measuring at the first step; start again if a step is repeated with a smaller micro-batch."""
        if self._measured is None and self._rows != self.loop.micro_batch:
            if self._rows:
                self._tracking.close()
                self.predicted = self._predict(BALANCED)
                self._tracker = Tracker(self._tracker.modules)
                self._fullest, self._steps = {}, 0
            self._rows = self.loop.micro_batch
            self._begin()
        elif self._steps == 1 and self._has_states() and not self._had_states:
            self._fullest = {}  # the first step made the optimizer states: from now on they exist at the peak

    def _has_states(self) -> bool:
        """Return whether the optimizer has states already; they are allocated in the first update."""
        return any(True for _ in self.loop.optimizer.states())

    def refused(self) -> Refused | None:
        """Stop measuring, and return the state of memory at the last refused allocation; None if there was none."""
        self._tracking.close()
        return self._seen.get(self.device.index or 0)

    def _begin(self) -> None:
        """Reset torch's counters, or start the tracker with all tensors of the model and the optimizer."""
        hooks = self.loop.adapted.expert_context.hooks
        self._tracking.enter_context(hooks.using(count_rows=self._count_rows))
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        for tensor in tensors_of(self.loop.adapted.model):
            self._tracker.add(tensor)
        optimizer = self.loop.optimizer
        for tensor in (*optimizer.masters(), *optimizer.states()):  # a resumed run already has optimizer states
            self._tracker.add(tensor)
        self._tracking.enter_context(self._tracker)

    def _count_rows(self, layer: int, ids: Tensor, num_experts: int, read: ReadCounts) -> list[int]:
        """Return the rows that each expert of a layer receives, by calling `read`: the experts' hook `count_rows`.

        In training, also record those of the call in which one group of experts, computed together, received the most
        rows, because that call takes the most memory.
        """

        def fullest(rows: list[int]) -> int:
            return max(sum(rows[expert] for expert in group) for group in self._groups[layer])

        rows = read()
        if self.loop.adapted.model.training:
            self._fullest[layer] = max(self._fullest.get(layer, rows), rows, key=fullest)
        return rows

    def step_ends(self) -> None:
        """Count a step; after the last measured step, stop measuring and write `memory.json`."""
        self._steps += 1
        if self._steps == MEASURED_STEPS:
            self.finish()

    def finish(self) -> None:
        """Stop measuring and write `memory.json`; before the first step, write nothing.

        A later call only updates `expert_load` in the file.
        """
        self._tracking.close()
        if not self._steps:
            return
        on_cuda = self.device.type == "cuda"
        if self._measured is None:
            self._measured = {
                "peak_allocated": torch.cuda.max_memory_allocated(self.device) if on_cuda else self._tracker.peak_bytes,
                "peak_reserved": torch.cuda.max_memory_reserved(self.device) if on_cuda else None,
            }
            if self.predicted.peak is not None:
                self._as_routed = self._predict(as_measured(self._fullest)).peak
        record = {
            "schema": 1,
            "device": torch.cuda.get_device_name(self.device) if on_cuda else "cpu",
            "steps": min(self._steps, MEASURED_STEPS),
            "predicted": {"peak_allocated": self.predicted.peak, "as_routed": self._as_routed},
            "measured": self._measured,
            "rows": {str(layer): rows for layer, rows in sorted(self._fullest.items())},
            "expert_load": {str(layer): load.tolist() for layer, load in self.loop.total_load.items()},
        }
        self.loop.folder.write_if_possible(MEMORY_FILE, json.dumps(record) + "\n")


class Predicted(NamedTuple):
    """A prediction for one rank.

    Attributes:
        peak: bytes allocated at the peak; None if unknown.
        pace: floating-point operations of a step, and the GPU's peak speed; without values if they were not counted.
    """

    peak: int | None = None
    pace: Pace = Pace()


def predicted(
    run: ResolvedRun, card: Gpu | None = None, routing: AssumedRouting = BALANCED, rank: int = 0
) -> Predicted:
    """Predict the peak memory of a rank and, on a GPU, the floating-point operations of a step, by a trace.

    Args:
        card: the GPU whose kernels run, and whose cuBLAS workspaces are added; None for a CPU.
        routing: the assumed number of tokens that each expert receives.
        rank: the number of the rank.
    """
    traced = trace(run, routing, rank=rank, gpu=card)
    time = None if card is None else time_of(run.config, traced, card)
    pace = Pace() if time is None else Pace(round(time.flops), round(time.limit))
    return Predicted(traced.parts().total + sum(traced.workspaces(card)), pace)


def as_measured(rows: Mapping[int, Sequence[int]]) -> AssumedRouting:
    """Return the routing in which the experts of each layer receive these rows; balanced if there are none."""
    load = tuple((layer, tuple(map(float, of_layer))) for layer, of_layer in sorted(rows.items()))
    return AssumedRouting("measured", None, load) if load else BALANCED


def add_predictions(output: Path) -> None:
    """Add the predictions of the first rank to `memory.json` of a finished run on several ranks.

    Call it in the process of that rank when it has left the process group: a trace makes one of its own. If the run
    cannot be predicted, the file stays as it is.
    """
    file = output / MEMORY_FILE
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        card = None if record["device"] == "cpu" else find_gpu(catalog_name(torch.device("cuda", 0)))
        run = resolve(load_run_config(output / RUN_FILE), "cpu" if card is None else "cuda")
        rows = {int(layer): of_layer for layer, of_layer in record["rows"].items()}
        record["predicted"] = {
            "peak_allocated": predicted(run, card).peak,
            "as_routed": predicted(run, card, as_measured(rows)).peak,
        }
        write_whole(file, json.dumps(record) + "\n")
    except (OSError, ValueError, KeyError, UserError):
        return
