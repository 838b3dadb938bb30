"""What befalls a run from outside: damaged files, and a disk that fills up (for kills see test_resume.py and fuzz/).

After each of them the run either ends as if nothing had happened, bit for bit, or says what is damaged.
"""

import ctypes
import json
import os
import shutil
import subprocess
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
    """Changes what nobody would notice: a digit of a text, a bit of a number (test_manifest.py has other damage)."""
    raw = bytearray(file.read_bytes())
    place = len(raw) // 2
    if file.suffix == ".json":
        digits = [place for place, byte in enumerate(raw) if byte in b"0123456789"]
        place = digits[len(digits) // 2]
    raw[place] ^= 1
    file.write_bytes(raw)


def exported(path: Path, out: Path) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """The files of a merged export, and its notes."""
    notes = export(path, "merged", out).notes
    return {file.name: file.read_bytes() for file in out.iterdir()}, notes


def test_a_damaged_checkpoint_is_named_and_passed_over(
    small_model: Path,
    small_data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    pytestconfig: pytest.Config,
) -> None:
    """Each file of the newest one: exported, and trained again from the one before; on a push every fifth, and every
    tenth."""
    settings = {"steps": 3, "save_every": 1, "eval_every": 1, "keep_checkpoints": 2}
    file = small.run_file(
        small_model, small_data, tmp_path / "run", "lora", train=settings, data={"eval": str(small_data)}
    )
    train(RunConfig.model_validate(file))
    earlier = Path(shutil.copytree(tmp_path / "run", tmp_path / "earlier" / "run"))
    shutil.rmtree(earlier / "checkpoints" / "step-3")
    expected, _ = exported(earlier, tmp_path / "earlier-export")
    newest = tmp_path / "run" / "checkpoints" / "step-3"
    names = sorted(str(file.relative_to(newest)) for file in newest.rglob("*") if file.is_file())
    assert {"run.yaml", "inputs.json", "optimizer.json", "trained.safetensors", "manifest.json"} <= set(names)
    assert {ONE_FILE, "generators/0.safetensors"} <= set(names)
    step = 1 if pytestconfig.getoption("--all") else 5
    for number, name in enumerate(names[::step]):
        path = Path(shutil.copytree(tmp_path / "run", tmp_path / str(number) / "run"))
        flip(path / "checkpoints" / "step-3" / name)
        files, (note,) = exported(path, tmp_path / f"export-{number}")
        assert note.startswith("skipping damaged"), name
        assert name in note
        assert files == expected, name
        if step == 1 or not number % 2:
            capsys.readouterr()
            train(RunConfig.model_validate(elsewhere(file, path)), resume="auto")
            (said,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("skipping damaged"))
            assert name in said
            assert_same(elsewhere(file, path), file)


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


@pytest.mark.full
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
