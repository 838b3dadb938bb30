"""Summary that `moetune train` prints after a run."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from moetune.config.load import load_run_config
from moetune.json_files import read_json
from moetune.report.units import gib
from moetune.run.folder_files import MemoryFile
from moetune.training.folder.run_folder import MEMORY_FILE, RUN_FILE, RunFolder


def ending(path: Path) -> Iterator[str]:
    """Yield lines that sum up the finished run in the folder `path`: best held-out loss, peak memory, files, what to do
    next."""
    folder, config = RunFolder(path), load_run_config(path / RUN_FILE)
    losses = {line["step"]: loss for line in folder.metrics() if (loss := line.get("eval_loss")) is not None}
    if len(losses) > 1:
        best = min(losses, key=losses.__getitem__)
        yield f"best held-out loss {losses[best]:.4f}, at step {best}"
    if (path / MEMORY_FILE).is_file():
        memory = read_json(path / MEMORY_FILE, MemoryFile)
        predicted, measured = memory["predicted"], memory["measured"]["peak_allocated"]
        if measured and (size := predicted["as_routed"] or predicted["peak_allocated"]):
            full, own = "", ""
            if not config.packs:
                full, own = f" for sequences of {config.train.sequence_length:,} tokens", " with those of the data"
            yield f"peak memory: predicted {gib(size)}{full}, measured {gib(measured)}{own}"
    stops_early = config.train.early_stopping is not None
    if checkpoints := folder.by_preference(best=stops_early):
        yield f"weights in {checkpoints[0]}, losses in {folder.metrics_file}"
    run = shlex.quote(str(path))
    yield f"next: moetune report {run}"
    yield f"      moetune export {run} --format merged --out {shlex.quote(str(path) + '-merged')}"
