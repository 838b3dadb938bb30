"""The part of one tree in `host_time.py --beside`: a micro-step for each line of the input; prints its CPU seconds and
waits.

    PYTHONPATH=TREE:TREE/scripts/bench python -P scripts/bench/host_time_turns.py MODEL LAYERS MEMORY CHECKPOINTING ROWS

Everything is imported from that tree, this file apart.
"""

import sys
import tempfile
import time
from pathlib import Path

import torch
from host_time import Case, RouterWatch, batches_of, build, count_loss_tokens, micro_step, nullcuda, run_of


def main() -> None:
    model, layers, memory, which, rows = sys.argv[1:]
    case = Case(model, int(layers) or None, memory, which, int(rows))
    with nullcuda.answering(), tempfile.TemporaryDirectory() as folder:
        run = run_of(Path(folder), case)
        adapted = build(run, "cuda")
        adapted.model.train()
        watch = RouterWatch(adapted)
        batch = batches_of(adapted)(case.rows)
        batch |= {name: value.cuda() for name, value in batch.items() if torch.is_tensor(value)}
        tokens = count_loss_tokens(batch)
        for _ in sys.stdin:
            torch.cuda.synchronize()
            before, began = nullcuda.asked().synchronizations, time.process_time()
            micro_step(adapted.model, batch, tokens, watch, run.config.train)
            waits = nullcuda.asked().synchronizations - before
            torch.cuda.synchronize()
            print(time.process_time() - began, waits, flush=True)
            adapted.model.zero_grad()


if __name__ == "__main__":
    main()
