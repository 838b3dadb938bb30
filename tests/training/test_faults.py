"""What befalls a run from outside: damaged files, and a disk that fills up (for kills see test_resume.py and fuzz/).

After each of them the run either ends as if nothing had happened, bit for bit, or says what is damaged.
"""

import ctypes
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.exporting.export import export
from moetune.training.folder.run_folder import RunFolder
from tests import small
from tests.processes import processes
from tests.resolved import train
from tests.thinned import thinned
from tests.training.test_resume import (
    ONE_FILE,
    assert_same,
    elsewhere,
    in_process,
    outcome,
    work_alone,
)

pytestmark = pytest.mark.slow

# --- damage ---


def flip(file: Path) -> None:
    """Changes what nobody would notice: a digit of a text, a bit of a number."""
    raw = bytearray(file.read_bytes())
    if file.name == "run.yaml":
        place = raw.index(b"alpha: ") + len(b"alpha: ")
    elif file.suffix in (".json", ".jsonl"):
        digits = [place for place, byte in enumerate(raw) if byte in b"0123456789"]
        place = digits[len(digits) // 2]
    else:
        place = len(raw) // 2
    raw[place] ^= 1
    file.write_bytes(raw)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "flip": flip,
    "cut": lambda file: os.truncate(file, file.stat().st_size - 1),
    "empty": lambda file: os.truncate(file, 0),
    "delete": lambda file: file.unlink(),
}


class Finished:
    """A run of three steps with the last two checkpoints, and what becomes of it undamaged: four steps, and exports."""

    def __init__(self, folder: Path, model: Path, data: Path) -> None:
        settings = {"steps": 3, "save_every": 1, "eval_every": 1, "keep_checkpoints": 2}
        self.file = small.run_file(model, data, folder / "run", "lora", train=settings, data={"eval": str(data)})
        train(RunConfig.model_validate(self.file))
        self.path = folder / "run"
        self.newest = "checkpoints/step-3"
        self.export, _ = exported(self.path, folder / "export")
        earlier = self.copy(folder / "earlier")
        shutil.rmtree(earlier / self.newest)
        self.earlier_export, _ = exported(earlier, folder / "earlier-export")
        self.longer = self.to_go_on(self.copy(folder / "longer"))
        train(RunConfig.model_validate(self.longer), resume="auto")

    def copy(self, folder: Path) -> Path:
        shutil.copytree(self.path, folder / "run")
        return folder / "run"

    def to_go_on(self, path: Path) -> dict[str, Any]:
        return elsewhere(self.file, path) | {"train": self.file["train"] | {"steps": 4}}

    def files(self, folder: Path) -> list[str]:
        """Of a checkpoint those in its folders too, of a run folder only its own."""
        inside = folder.rglob("*") if folder.name.startswith("step-") else folder.iterdir()
        return sorted(str(file.relative_to(folder)) for file in inside if file.is_file())


def exported(path: Path, out: Path) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """The files of a merged export, and its notes."""
    notes = export(path, "merged", out).notes
    return {file.name: file.read_bytes() for file in out.iterdir()}, notes


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, small_model: Path, small_data: Path) -> Finished:
    return Finished(tmp_path_factory.mktemp("finished"), small_model, small_data)


@pytest.mark.full
@pytest.mark.parametrize("how", thinned(DAMAGE, len(DAMAGE), ("flip",)))
def test_damage_to_the_run_folders_own_files_is_named_or_changes_nothing(
    how: str, finished: Finished, tmp_path: Path
) -> None:
    """Each of them: exported, then trained for a step more."""
    names = finished.files(finished.path)
    assert {"run.yaml", "metrics.jsonl", "memory.json"} <= set(names)
    for number, name in enumerate(names):
        path = finished.copy(tmp_path / str(number))
        DAMAGE[how](path / name)
        for what in (export_again, go_on):
            if (message := refusal(what, finished, path)) is not None:
                assert name in message
                print(f"{name}, {how}: {what.__name__} is refused")


def refusal(what: Callable[[Finished, Path], None], finished: Finished, path: Path) -> str | None:
    try:
        what(finished, path)
    except UserError as error:
        return str(error)
    return None


def export_again(finished: Finished, path: Path) -> None:
    assert exported(path, path.parent / "export") == (finished.export, ())


def go_on(finished: Finished, path: Path) -> None:
    run = finished.to_go_on(path)
    train(RunConfig.model_validate(run), resume="auto")
    assert_same(run, finished.longer)


@pytest.mark.parametrize("how", thinned(DAMAGE, len(DAMAGE), ("flip",)))
def test_a_damaged_checkpoint_is_named_and_passed_over(
    how: str, finished: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str], pytestconfig: pytest.Config
) -> None:
    """Each file of the newest one: exported, and trained again from the one before, by hand or by `--resume auto`; on a
    push that is done of every fourth."""
    every = 1 if pytestconfig.getoption("--all") else 4
    names = finished.files(finished.path / finished.newest)
    assert {"run.yaml", "inputs.json", "optimizer.json", "trained.safetensors", "manifest.json"} <= set(names)
    assert {ONE_FILE, "generators/0.safetensors"} <= set(names)
    for number, name in enumerate(names):
        path = finished.copy(tmp_path / str(number))
        DAMAGE[how](path / finished.newest / name)
        files, (note,) = exported(path, tmp_path / f"export-{number}")
        assert note.startswith("skipping damaged"), name
        assert name in note
        assert files == finished.earlier_export, name

        run = elsewhere(finished.file, path)
        folder = RunFolder(path)
        assert folder.newest_whole() == path / "checkpoints" / "step-2"
        assert name in folder.damaged[0]
        if how == "flip" and not number % every:  # what comes after does not depend on how it was damaged
            capsys.readouterr()
            train(RunConfig.model_validate(run), resume="auto")
            (said,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("skipping damaged"))
            assert name in said
            assert_same(run, finished.file)


# --- a full disk ---

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000


def mount_small_disk(where: Path, size: int) -> str | None:
    """Mounts a tmpfs of `size` bytes that only this process sees; returns why it cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if not hasattr(libc, "unshare") or libc.unshare(CLONE_NEWNS | (CLONE_NEWUSER if user else 0)):
        return f"no mount namespace: {os.strerror(ctypes.get_errno())}"
    if user:
        for file, text in (("uid_map", f"0 {user} 1"), ("setgroups", "deny"), ("gid_map", f"0 {group} 1")):
            Path("/proc/self", file).write_text(text)
    where.mkdir()
    for arguments in (["--make-rprivate", "/"], ["-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(where)]):
        done = subprocess.run(["mount", *arguments], stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            return done.stderr.strip()
    return None


def on_a_small_disk(run: dict[str, Any], disk: Path, size: int, ballast: int, kept: Path) -> None:
    """What a process does: trains where the disk fills up, then where it has room; tells what happened in `kept`."""
    work_alone()
    kept.mkdir()
    told: dict[str, Any] = {"skip": mount_small_disk(disk, size)}
    if told["skip"] is None:
        (disk / "ballast").write_bytes(bytes(ballast))
        told |= {"error": tried(run, "never"), "left": listing(disk)}
        folder = RunFolder(Path(run["output"]))
        if folder.checkpoints():
            told["newest"] = folder.newest_whole().name
        (disk / "ballast").unlink()
        told["after"] = tried(run, "auto")
        shutil.copytree(run["output"], kept / "run", dirs_exist_ok=True)
    (kept / "told.json").write_text(json.dumps(told))


def tried(run: dict[str, Any], resume: str) -> str | None:
    try:
        train(RunConfig.model_validate(run), resume=resume)
    except UserError as error:
        return str(error)
    return None


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


PAGE = 4096


def pages(folder: Path) -> int:
    """What the files of a folder take on a tmpfs."""
    return sum(-(-file.stat().st_size // PAGE) * PAGE for file in folder.rglob("*") if file.is_file())


@pytest.fixture(scope="module")
def with_room(noisy_model: Path, small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of five steps that keeps every checkpoint, on a disk with room for them."""
    folder = tmp_path_factory.mktemp("room")
    settings = {"steps": 5, "save_every": 1, "keep_checkpoints": 5}
    run = small.run_file(noisy_model, small_data, folder / "run", "experts", train=settings)
    in_process(run)
    return run


def told_by(run: dict[str, Any], tmp_path: Path, room: int) -> dict[str, Any]:
    """Trains on a disk where `room` bytes are free, and then on."""
    size = 12 * pages(Path(run["output"]) / "checkpoints" / "step-5")
    arguments = (elsewhere(run, tmp_path / "disk" / "run"), tmp_path / "disk", size, size - room, tmp_path / "kept")
    process = processes.Process(target=on_a_small_disk, args=arguments)
    process.start()
    process.join(120)
    assert process.exitcode == 0
    told = json.loads((tmp_path / "kept" / "told.json").read_text())
    if told["skip"] is not None:
        pytest.skip(f"a disk of its own is not to be had here: {told['skip']}")
    return told


def test_a_disk_that_fills_up_within_a_checkpoint(with_room: dict[str, Any], tmp_path: Path) -> None:
    """Room for three checkpoints and half of the fourth."""
    checkpoint = pages(Path(with_room["output"]) / "checkpoints" / "step-4")
    told = told_by(with_room, tmp_path, 3 * checkpoint + 11 * PAGE + checkpoint // 2)
    assert "step 4: a checkpoint cannot be written" in told["error"]
    assert "The last complete one is step-3; free some space" in told["error"]
    needed = int(told["error"].split("needs ")[1].split(" bytes")[0].replace(",", ""))
    assert checkpoint - 40 * PAGE < needed < checkpoint + 2**20 + 40 * PAGE
    assert told["newest"] == "step-3"
    assert not [name for name in told["left"] if "/.step" in name or "step-4" in name]
    assert told["after"] is None
    assert_same(elsewhere(with_room, tmp_path / "kept" / "run"), with_room)


def test_a_disk_too_small_for_two_checkpoints_is_refused_after_the_first_step(
    with_room: dict[str, Any], tmp_path: Path
) -> None:
    checkpoint = pages(Path(with_room["output"]) / "checkpoints" / "step-4")
    told = told_by(with_room, tmp_path, int(1.8 * checkpoint))
    assert "checkpoints need" in told["error"]
    assert "bytes there and" in told["error"]
    assert not [name for name in told["left"] if "step-" in name]
    assert told["after"] is None
    assert_same(elsewhere(with_room, tmp_path / "kept" / "run"), with_room)
    assert len(outcome(with_room)[0]) == 5
