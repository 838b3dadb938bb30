"""`moetune score --predict`: the peak memory of scoring, traced."""

from moetune.memory.commands.forward import predict_forward
from moetune.memory.report import MemoryReport
from moetune.memory.trace import vocabulary_of
from moetune.memory.trace.tracker import Tracker
from moetune.memory.trace.watched import Watched
from moetune.models.catalog.gpus import Gpu
from moetune.routing.recorder import Recorder, layer_of
from moetune.routing.score import record_batch, refuse_dense
from moetune.run.resolve import ResolvedRun
from moetune.training.step.batch import random_rows


def predict_score(run: ResolvedRun, sources: int = 1, *, gpu: str | Gpu | None = None) -> MemoryReport:
    """Predict the peak memory of `score`, without weights, data or a GPU.

    Args:
        run: its configuration must come from `to_score`. If it is resolved for a CPU, this machine's CPU is meant.
        sources: the number of data sets, whose statistics are summed up separately and take memory.
        gpu: a GPU's name, a size such as `44GiB`, or a catalog entry; by default `hardware.gpu` of the run file.

    Raises:
        UserError: the model has no experts, or the pass cannot be predicted.
    """
    refuse_dense(run)
    train = run.config.train
    said = {
        "scores": f"{sources} data sets" if sources > 1 else "one data set",
        "batch": f"{train.micro_batch} × {train.sequence_length:,} tokens, forward alone",
    }
    return predict_forward(run, Scoring(sources), said, gpu=gpu)


class Scoring:
    """The forward passes of scoring `sources` data sets, on random tokens, to be traced by `predict_forward`.

    One batch of each data set is run, then a second batch of the last one, whose sums are added to existing ones; all
    further batches would be like this one.
    """

    def __init__(self, sources: int = 1) -> None:
        self.sources = sources

    def __call__(self, watched: Watched, tracker: Tracker) -> None:
        adapted = watched.adapted
        recorder, config = Recorder(adapted), adapted.run.config
        rows, length = config.train.micro_batch, config.train.sequence_length
        for number, source in enumerate((*range(self.sources), self.sources - 1)):
            tracker.step = number
            tracker.enter("forward")
            batch = random_rows(rows, length, vocabulary_of(adapted), packing=config.packs)
            record_batch(recorder, adapted, batch, 0, source, number, at_least=length)
            for name, tensor in recorder.sums.items():
                layer = layer_of(name)
                if layer is not None:
                    tracker.belongs(tensor, layer)
        recorder.remove()
