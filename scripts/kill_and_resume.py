"""Kills runs at random moments and resumes them: do they end as if nothing had happened?

    python scripts/kill_and_resume.py --kills 30
    python scripts/kill_and_resume.py --kills 20 --stages 2     # a pipeline: kills its launcher or one of its ranks

Takes a reference run of the tiny model, then starts the same run again and again, kills it (SIGKILL) at a random moment
of its start-up or of one of its steps, checkpoint writes included, resumes it with `--resume auto`, and compares every
logged loss and the last checkpoint's trained tensors and optimizer with the reference, bit for bit. Exit code 1: one
differed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]
LAYERS, STEPS = 4, 10


def command(output: Path, stages: int, *more: str) -> list[str]:
    settings = [f"output={output}", f"train.steps={STEPS}", "train.save_every=1", "train.eval_every=5"]
    if stages > 1:  # cut evenly at once, not by predictions
        cut = [[LAYERS * stage // stages, LAYERS * (stage + 1) // stages - 1] for stage in range(stages)]
        settings += [f"parallel.pp={stages}", f"parallel.stages={cut}", "train.accumulate=4"]
    flags = [word for setting in settings for word in ("--set", setting)]
    return [sys.executable, "-m", "moetune", "train", str(ROOT / "configs" / "tiny-experts.yaml"), *flags, *more]


def logged(output: Path) -> int:
    """How many steps the run has logged."""
    file = output / "metrics.jsonl"
    return sum('"loss"' in line for line in file.read_text().splitlines()) if file.exists() else 0


def run(
    *arguments: str, output: Path, stages: int, kill_at: float | None = None, after: float = 0, whom: float = 0
) -> bool:
    """Runs the command; returns whether it was killed: the launcher or, at `whom` of 0 to 1, one of its ranks; `after`
    seconds after it has logged `kill_at` steps."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command(output, stages, *arguments), env=environment, stderr=subprocess.PIPE, stdout=-3)
    if kill_at is not None:
        while process.poll() is None and logged(output) < kill_at:
            time.sleep(0.02)
        try:
            process.wait(after)
        except subprocess.TimeoutExpired:
            ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            processes = [process.pid, *map(int, ranks)]
            os.kill(processes[int(whom * len(processes))], signal.SIGKILL)
            process.communicate()
            return True
    _, err = process.communicate()
    if process.returncode:
        raise SystemExit(f"{output}: exit code {process.returncode}\n{err.decode()}")
    return False


def result(output: Path) -> dict[str, object]:
    """Losses by step, and what the last checkpoint holds: bytes of tensors, as a file's metadata are in any order."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    last = output / "checkpoints" / f"step-{STEPS}"
    names = ["trained.safetensors", "optimizer.json", "expert_load.json", "generators/0.safetensors"]
    names += sorted(str(file.relative_to(last)) for file in (last / "optimizer").glob("*"))
    files = {
        name: {key: tensor.numpy().tobytes() for key, tensor in load_file(last / name).items()}
        if name.endswith(".safetensors")
        else (last / name).read_bytes()
        for name in names
    }
    return {"losses": [(x["step"], x.get("loss"), x.get("eval_loss")) for x in lines], **files}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stages", type=int, default=1, help="parallel.pp")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start = time.perf_counter()
        run(output=folder / "reference", stages=options.stages)
        seconds = time.perf_counter() - start
        reference = result(folder / "reference")
        # most of the time goes into starting, before the first step
        moments = [(draw.randrange(STEPS), draw.random(), draw.random()) for _ in range(options.kills)]

        def once(number: int) -> str:
            output = folder / f"run-{number}"
            steps, part, whom = moments[number]
            after = part * seconds * (0.02 if steps else 0.8)
            if not run(output=output, stages=options.stages, kill_at=steps, after=after, whom=whom):
                return "ended before it was killed"
            reached = sum(1 for _ in output.glob("checkpoints/step-*")) if output.exists() else 0
            halfway = any(output.glob("checkpoints/.step-*"))
            run("--resume", "auto", output=output, stages=options.stages)
            found = result(output)
            wrong = [key for key in reference if found[key] != reference[key]]
            if wrong:
                return f"DIFFERS in {', '.join(wrong)}"
            return "same, killed " + (
                "inside a checkpoint" if halfway else "before any step" if not reached else "later"
            )

        with ThreadPoolExecutor(2) as pool:
            outcomes = Counter(pool.map(once, range(options.kills)))
    for outcome, count in outcomes.most_common():
        print(f"{count:3d}  {outcome}")
    return int(any(outcome.startswith("DIFFERS") for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
