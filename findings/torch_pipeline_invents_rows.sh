#!/usr/bin/env bash
# torch 2.13.0: a pipeline schedule that evaluates 5 rows in two micro-batches gives its loss 6 of them: a stage receives
# each micro-batch into a buffer of the first one's shape, and what lies in memory beyond the rows that came is computed
# with. No error (training the same batch raises one, in backward). Hurts whoever evaluates a set that does not divide.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/rows.py" <<'EOF'
import sys

import torch
import torch.distributed
import torch.multiprocessing
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe


def rank_of_two(rank: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
    counts = {}
    for schedule_class in (ScheduleGPipe, Schedule1F1B):
        for rows in (6, 5):
            seen: list[int] = []
            stage = PipelineStage(torch.nn.Linear(4, 4), rank, 2, torch.device("cpu"))
            schedule = schedule_class(stage, n_microbatches=2, loss_fn=lambda y, _, seen=seen: seen.append(len(y)) or y.sum())
            batch = (torch.ones(rows, 4),) if rank == 0 else ()
            schedule.eval(*batch, target=torch.ones(rows, 4) if rank == 1 else None)
            counts[f"{schedule_class.__name__}, {rows} rows"] = sum(seen)
    torch.distributed.destroy_process_group()
    if rank == 1:
        print("torch", torch.__version__, "\nexpected: as many rows as were given, or an error")
        print(f"rows that the loss was given: {counts}")
        if list(counts.values()) != [6, 6, 6, 6]:
            sys.exit("changed since this was found")


if __name__ == "__main__":
    torch.multiprocessing.spawn(rank_of_two, (sys.argv[1],), nprocs=2)
EOF
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/rows.py" "$folder"
