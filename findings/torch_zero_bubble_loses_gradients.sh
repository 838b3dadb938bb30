#!/usr/bin/env bash
# torch 2.13.0: behind a frozen first stage, zero-bubble pipeline schedules lose gradients. The first stage that trains
# has no `.grad` after InterleavedZeroBubble and ZBVZeroBubble, and too small a one after DualPipeV; interleaved 1F1B is
# exact, and so are all four where nothing is frozen. No error: the stage just does not learn. Hurts whoever trains
# adapters of later layers only.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
cat > "$folder/stages.py" <<'EOF'
import sys

import torch
import torch.distributed
import torch.multiprocessing
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage, schedules

LOOPED, V_SHAPED = {0: [0, 2], 1: [1, 3]}, {0: [0, 3], 1: [1, 2]}  # rank -> its stages
SCHEDULES = {
    pipelining.ScheduleInterleaved1F1B: LOOPED,
    pipelining.ScheduleInterleavedZeroBubble: LOOPED,
    pipelining.ScheduleZBVZeroBubble: V_SHAPED,
    schedules.ScheduleDualPipeV: V_SHAPED,
}


def layers(is_first_frozen: bool) -> list[torch.nn.Linear]:
    torch.manual_seed(0)
    made = [torch.nn.Linear(4, 4) for _ in range(4)]
    made[0].requires_grad_(not is_first_frozen)
    return made


def loss(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def rank_of_two(rank: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
    batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    of_stage_1 = {}
    for is_first_frozen in (False, True):
        reference = layers(is_first_frozen)
        loss(torch.nn.Sequential(*reference)(batch), batch).backward()
        for schedule_class, stages_of in SCHEDULES.items():
            own = layers(is_first_frozen)
            stages = [PipelineStage(own[index], index, 4, torch.device("cpu")) for index in stages_of[rank]]
            target = {"target": batch} if 3 in stages_of[rank] else {}
            schedule_class(stages, 4, loss_fn=loss).step(*([batch] if rank == 0 else []), **target)
            if rank == 1:
                grad, exact = own[1].weight.grad, reference[1].weight.grad
                known = "none" if grad is None else "exact" if torch.allclose(grad, exact, rtol=1e-4) else "wrong"
                of_stage_1[schedule_class.__name__, "frozen" if is_first_frozen else "trained"] = known
            torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    if rank == 1:
        print("torch", torch.__version__, "\nexpected: exact gradients of stage 1, whether stage 0 is frozen or trained")
        for (name, of_stage_0), known in of_stage_1.items():
            print(f"{name}, stage 0 {of_stage_0}: {known}")
        if list(of_stage_1.values()) != ["exact"] * 5 + ["none", "none", "wrong"]:
            sys.exit("changed since this was found")


if __name__ == "__main__":
    torch.multiprocessing.spawn(rank_of_two, (sys.argv[1],), nprocs=2)
EOF
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/stages.py" "$folder"
