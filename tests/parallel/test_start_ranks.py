"""How ranks are started, and how a run of several ends when one of them does."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from moetune.config.load import load_run_config
from moetune.parallel.start_ranks import free_port, start_ranks
from tests import small
from tests.conftest import Ended
from tests.resolved import train

pytestmark = pytest.mark.slow


@pytest.fixture
def run_file(small_model: Path, small_data: Path, tmp_path: Path) -> Path:
    """Two ranks with half of the experts each; two steps."""
    run: dict[str, Any] = small.run_file(
        small_model, small_data, tmp_path / "run", "router",
        train={"accumulate": 1, "steps": 2, "save_every": 1, "sequence_length": 48},
        parallel={"fsdp": 2, "ep": 2, "timeout": 60},
        hardware={"count": 2},
    )  # fmt: skip
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(run))
    return file


STAGES = ("--set", "parallel={pp: 2, timeout: 60}", "--set", "train.accumulate=2")


@pytest.mark.parametrize("settings", [(), pytest.param(STAGES, marks=pytest.mark.full)], ids=["experts", "stages"])
@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(
            ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"], id="torchrun", marks=pytest.mark.full
        ),
        pytest.param(
            ["accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision",
             "no", "--dynamo_backend", "no", "--main_process_port", "FREE"],
            id="accelerate", marks=pytest.mark.full,
        ),
    ],
)  # fmt: skip
def test_by_a_launcher(launcher: list[str], settings: Sequence[str], run_file: Path, tmp_path: Path) -> None:
    words = [str(free_port()) if word == "FREE" else word for word in launcher]
    command = [sys.executable, "-m", *words, "-m", "moetune", "train", str(run_file), "--json", *settings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["steps"] == 2  # one rank speaks
    assert done.stderr.count("training tokens") == 1
    assert "parallel_mode" not in done.stderr
    assert [line["step"] for line in small.read_metrics(tmp_path / "run")] == [1, 2]


def test_a_launcher_with_other_ranks(
    run_file: Path, moetune: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"WORLD_SIZE": "3", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    done = moetune("train", run_file)
    assert done.code == 2
    assert "3 processes were started, and parallel: in the run file makes 2 ranks" in done.err


@pytest.mark.full
def test_an_interrupted_pipeline_saves_and_goes_on_with_its_stages(run_file: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "moetune", "train", str(run_file), *STAGES, "--set", "train.save_every=1000"]
    running = subprocess.Popen([*command, "--set", "train.steps=500"], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text()):
        assert running.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 128 + signal.SIGINT, said
    last = small.read_metrics(tmp_path / "run")[-1]["step"]
    assert (tmp_path / "run" / "checkpoints" / f"step-{last}").is_dir()
    recorded = load_run_config(tmp_path / "run" / "run.yaml").parallel
    assert recorded.stages == ((0, 0), (1, 1))
    again = [*command, "--resume", "auto", "--set", f"train.steps={last + 1}"]
    assert subprocess.run(again, capture_output=True, timeout=120, check=False).returncode == 0
    assert small.read_metrics(tmp_path / "run")[-1]["step"] == last + 1


@pytest.mark.full
def test_a_killed_rank_ends_the_run_and_it_resumes(run_file: Path, tmp_path: Path) -> None:
    longer = ("--set", "train.steps=500", "--set", "train.keep_checkpoints=2")
    command = [sys.executable, "-m", "moetune", "train", str(run_file), *longer]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    checkpoints = tmp_path / "run" / "checkpoints"
    deadline = time.monotonic() + 90
    while not list(checkpoints.glob("step-*")):
        assert running.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    ranks = [int(pid) for pid in Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()]
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 128 + signal.SIGKILL
    assert "error: rank 1 was ended by SIGKILL" in said
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)

    last = max(int(path.name.removeprefix("step-")) for path in checkpoints.glob("step-*"))
    settings = [f"train.steps={last + 1}", "train.accumulate=2", "parallel={}", "hardware.count=1"]
    train(load_run_config(run_file, settings), resume="auto")
    assert small.read_metrics(tmp_path / "run")[-1]["step"] == last + 1


@pytest.mark.one_in(2)
@pytest.mark.parametrize("then", ["time.sleep(600)", "sys.exit(70)"])
def test_a_killed_rank_ends_the_others(then: str, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Whether these wait for it or fail because it has gone, which is no error of moetune."""
    code = (
        "import os, signal, sys, time; open(sys.argv[1] + os.environ['RANK'], 'w').write(str(os.getpid())); "
        f"os.kill(os.getpid(), signal.SIGKILL) if os.environ['RANK'] == '1' else {then}"
    )
    assert start_ranks([sys.executable, "-S", "-c", code, f"{tmp_path}/"], 2) == 128 + signal.SIGKILL
    assert "error: rank 1 was ended by SIGKILL, as the system does when the machine's memory" in capfd.readouterr().err
    assert not Path(f"/proc/{(tmp_path / '0').read_text()}").exists()


_START = """
import os, sys, time
from moetune.parallel.start_ranks import note_failure
is_one = os.environ["RANK"] == "1"
"""
_ONE_FAILS = """
note_failure("it was me") or sys.exit(2) if is_one else time.sleep(1)
note_failure("the other one has gone") or sys.exit(1)
"""


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("code", "ended", "said"),
    [
        (_ONE_FAILS, 1, "error: rank 1: it was me"),
        ("note_failure('no such router') or sys.exit(2)", 2, "error: no such router"),
        ("sys.exit(3) if is_one else time.sleep(600)", 3, "error: rank 1: it ended with code 3"),
    ],
    ids=["the first", "one of all", "before others hang"],
)
def test_one_error_is_told(code: str, ended: int, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert start_ranks([sys.executable, "-c", _START + code], 2) == ended
    assert capfd.readouterr().err.strip() == said


_ONE_IS_DEAF = """
import os, signal, sys, time
from pathlib import Path
from moetune.parallel.start_ranks import note_failure
ready = Path(sys.argv[1])
if os.environ["RANK"] == "1":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready.touch()
    time.sleep(600)
while not ready.exists():
    time.sleep(0.02)
note_failure("out of memory")
sys.exit(2)
"""


def test_a_rank_that_has_to_be_killed_is_not_the_one_that_failed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moetune.parallel.start_ranks._GRACE", 0.2)
    assert start_ranks([sys.executable, "-c", _ONE_IS_DEAF, str(tmp_path / "ready")], 2) == 2
    assert capfd.readouterr().err.strip() == "error: rank 0: out of memory"
