"""Kills runs at random moments and resumes them: do they end as if nothing had happened?

    python scripts/kill_and_resume.py --kills 30
    python scripts/kill_and_resume.py --kills 20 --stages 2     # a pipeline: kills its launcher or one of its ranks

Takes a reference run of the tiny model, then starts the same run again and again, kills it (SIGKILL) after a random
time, start-up and checkpoint writes included, resumes it with `--resume auto`, and compares every logged loss and the
last checkpoint's trained tensors and optimizer with the reference, bit for bit. Exit code 1: one differed.
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
STEPS = 10


def command(output: Path, stages: int, *more: str) -> list[str]:
    settings = [f"output={output}", f"train.steps={STEPS}", "train.save_every=1", "train.eval_every=5"]
    settings += [f"parallel.pp={stages}", "train.accumulate=4"] if stages > 1 else []
    flags = [word for setting in settings for word in ("--set", setting)]
    return [sys.executable, "-m", "moetune", "train", str(ROOT / "configs" / "tiny-experts.yaml"), *flags, *more]


def run(*arguments: str, output: Path, stages: int, kill_after: float | None = None, whom: float = 0) -> bool:
    """Runs the command; returns whether it was killed: the launcher or, at `whom` of 0 to 1, one of its ranks."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command(output, stages, *arguments), env=environment, stderr=subprocess.PIPE, stdout=-3)
    if kill_after is not None:
        try:
            process.wait(kill_after)
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
        moments = [(draw.uniform(0.3, 1.0) * seconds, draw.random()) for _ in range(options.kills)]

        def once(number: int) -> str:
            output = folder / f"run-{number}"
            moment, whom = moments[number]
            if not run(output=output, stages=options.stages, kill_after=moment, whom=whom):
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
