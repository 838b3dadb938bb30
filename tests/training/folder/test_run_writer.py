"""Writing a run folder: what a run may start in, what it deletes, what it refuses to resume."""

import errno
import json
import os
from pathlib import Path
from traceback import StackSummary
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import SafetensorError
from torch.distributed.checkpoint import CheckpointException

from moetune.atomic import aside_of
from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.training.folder.run_writer import RunWriter
from moetune.training.same_run import Inputs

INPUTS = Inputs("0" * 32, {}, {}, {})


def config(**train: Any) -> RunConfig:
    return RunConfig.model_validate(
        {"model": {"path": "tiny-mixtral"}, "adapt": {"router": "all"}, "train": train, "output": "somewhere"}
    )


def started(path: Path, steps: int = 0) -> RunWriter:
    """A run folder with metrics of `steps` steps and a checkpoint after each."""
    folder = RunWriter(path)
    folder.create(config(), None, False, None, INPUTS)
    for step in range(1, steps + 1):
        folder.append_metrics({"step": step, "loss": 1 / step})
        with folder.new_checkpoint(step, keep=steps) as aside:
            (aside / "weights").write_text(str(step))
    return folder


def leave_aside(checkpoint: Path) -> Path:
    """Leave what a process that was killed while it wrote a checkpoint leaves."""
    folder = aside_of(checkpoint)
    (folder / "new").mkdir(parents=True)
    (folder / "new" / "weights").write_text("half")
    (folder / "of.json").write_text(json.dumps({"written by moetune": "aside", "of": None}))
    return folder


def listing(path: Path) -> dict[str, bytes | None]:
    return {str(item.relative_to(path)): item.read_bytes() if item.is_file() else None for item in path.rglob("*")}


def plant(path: Path, names: list[str]) -> dict[str, bytes]:
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(name.encode())
    return {name: name.encode() for name in names}


def names(folder: RunWriter) -> list[str]:
    return [path.name for path in folder.checkpoints()]


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_check_writes_nothing(tmp_path: Path, resume: str) -> None:
    for path in (tmp_path, tmp_path / "deep" / "run"):
        assert RunWriter(path).check(config(), resume, overwrite=False) is None
    assert listing(tmp_path) == {}


def test_a_run_is_neither_continued_nor_replaced_unasked(tmp_path: Path) -> None:
    folder = started(tmp_path / "run", steps=1)
    with pytest.raises(UserError, match=r"already holds a run; continue it with --resume auto, replace it with"):
        folder.check(config(), "never", overwrite=False)
    with pytest.raises(UserError, match=r"--resume and --overwrite exclude each other"):
        folder.check(config(), "auto", overwrite=True)


OTHER_RUN = ["run.yaml", "metrics.jsonl", "delta/delta.safetensors", "checkpoints/step-3/model.safetensors"]


@pytest.mark.parametrize("foreign", [["thesis.tex"], ["run.yaml"], ["checkpoints/best.pt"], [".hidden"], OTHER_RUN])
def test_a_foreign_folder_is_refused(tmp_path: Path, foreign: list[str]) -> None:
    """A run file alone is foreign too: `moetune init` leaves one in a folder full of other things."""
    plant(tmp_path, foreign)
    before = listing(tmp_path)
    for resume, overwrite in (("never", False), ("never", True), ("auto", False)):
        with pytest.raises(UserError, match=r"exists and is not a run folder; choose another output \(a copy of a run"):
            RunWriter(tmp_path).check(config(), resume, overwrite)
    assert listing(tmp_path) == before


@pytest.mark.parametrize("lost", ["run.yaml", "checkpoints"])
def test_what_a_run_has_lost_is_named(tmp_path: Path, lost: str) -> None:
    folder = started(tmp_path / "run", steps=1)
    (folder.path / lost).rename(tmp_path / "lost")
    with pytest.raises(UserError, match=f"holds a run without {lost}: copy it back, start again with --overwrite"):
        RunWriter(folder.path).check(config(), "auto", overwrite=False)
    assert RunWriter(folder.path).check(config(), "never", overwrite=True) is None


@pytest.mark.parametrize(
    ("output", "reason"),
    [("file/run", "Not a directory"), ("file", "Not a directory")],
)
def test_an_unwritable_output(tmp_path: Path, output: str, reason: str) -> None:
    (tmp_path / "file").write_text("a file")
    with pytest.raises(UserError, match=f"cannot be written: {reason}"):
        RunWriter(tmp_path / output).check(config(), "never", overwrite=False)


def test_a_half_written_checkpoint_does_not_count(tmp_path: Path) -> None:
    folder = started(tmp_path / "run", steps=1)
    leave_aside(folder.checkpoints_path / "step-2")
    assert folder.check(config(), "auto", overwrite=False) == folder.checkpoints_path / "step-1"
    folder.create(config(), folder.checkpoints_path / "step-1", False, None, INPUTS)
    assert [path.name for path in folder.checkpoints_path.iterdir()] == ["step-1"]


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    folder = started(tmp_path / "run")
    kept = []
    for step in (2, 4, 10, 12):
        with folder.new_checkpoint(step, keep=2):
            pass
        kept.append(names(folder))
    assert kept == [["step-2"], ["step-2", "step-4"], ["step-4", "step-10"], ["step-10", "step-12"]]
    assert sorted(os.listdir(folder.checkpoints_path)) == ["step-10", "step-12"]


@pytest.mark.parametrize(
    "resume", ["nonsense", ".", "{run}", "{run}/checkpoints", "{run}/checkpoints/step-9", "{other}/step-1"]
)
def test_resume_needs_a_checkpoint_of_this_run(tmp_path: Path, resume: str) -> None:
    folder, other = started(tmp_path / "run", steps=2), started(tmp_path / "other", steps=1)
    asked = resume.format(run=folder.path, other=other.checkpoints_path)
    before = listing(tmp_path)
    with pytest.raises(UserError, match=r"is no checkpoint of the run in .* which has: step-1, step-2") as raised:
        folder.check(config(), asked, overwrite=False)
    assert repr(asked) in str(raised.value)
    assert listing(tmp_path) == before


def test_a_checkpoint_may_be_named_by_another_way(tmp_path: Path) -> None:
    folder = started(tmp_path / "run", steps=2)
    (tmp_path / "link").symlink_to(folder.path)
    for name in ("link/checkpoints/step-1", "run/checkpoints/../checkpoints/step-1"):
        found = folder.check(config(), str(tmp_path / name), overwrite=False)
        assert found == folder.checkpoints_path / "step-1"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_without_room_for_a_line(tmp_path: Path) -> None:
    folder = started(tmp_path / "run")
    folder.metrics_file = Path("/dev/full")
    with pytest.raises(UserError, match="cannot be written: No space left on device"):
        folder.append_metrics({"step": 1})


def test_another_run_file_is_refused(tmp_path: Path) -> None:
    folder = started(tmp_path / "run", steps=1)
    other = config(seed=3, micro_batch=2).model_copy(
        update={"adapt": config().adapt.model_copy(update={"also": ("norm",)})}
    )
    with pytest.raises(UserError) as raised:
        folder.check(other, "auto", overwrite=False)
    for said in (
        "cannot be resumed with another run file", "train.seed: 0 before, 3 now", "train.micro_batch: 1 before, 2 now",
        "adapt.also: [] before, ['norm'] now", "Set these back",
    ):  # fmt: skip
        assert said in str(raised.value)


@pytest.mark.parametrize(
    "free",
    [
        {"train": {"steps": 900, "log_every": 7, "eval_every": 7, "save_every": 7, "keep_checkpoints": 7}},
        {"train": {"report_to": ["tensorboard"], "eval_micro_batch": 3}, "hardware": {"gpu": "l40s", "count": 1}},
        {"output": "moved"},
    ],
)
def test_what_may_change_on_resume(tmp_path: Path, free: dict[str, Any]) -> None:
    folder = started(tmp_path / "run", steps=1)
    changed = RunConfig.model_validate(config().model_dump() | free)
    assert changed != config()
    assert folder.check(changed, "auto", overwrite=False) == folder.checkpoints_path / "step-1"


FOREIGN = [
    "notes.txt", "runs/other/events.out.tfevents.1.host.1.0", "delta/delta.safetensors", "adapter/mine.bin",
    "report.html", "drift.json", ".run.yaml.swp", "checkpoints/my.pt", "checkpoints/best/my.pt",
]  # fmt: skip
"""What a user may keep in a run folder, under names that moetune uses too."""


def test_overwrite_leaves_what_is_not_the_runs(tmp_path: Path) -> None:
    folder = started(tmp_path / "run", steps=2)
    before = plant(folder.path, FOREIGN)
    (folder.path / "linked").symlink_to(tmp_path)
    assert RunWriter(folder.path).check(config(), "never", overwrite=True) is None
    again = RunWriter(folder.path)
    again.check(config(), "never", overwrite=True)
    again.create(config(), None, True, None, INPUTS)
    after = listing(folder.path)
    assert {name: after[name] for name in before} == before
    assert names(again) == []


@pytest.mark.parametrize(
    "name", ["checkpoints/step-2/notes.txt", "checkpoints/step-7/my.pt", "checkpoints/.step-7.moetune/my.pt"]
)
def test_what_is_in_the_way_is_named(name: str, tmp_path: Path) -> None:
    """Before anything is written or removed, and it is never removed with an old checkpoint."""
    folder = started(tmp_path / "run", steps=2)
    plant(folder.path, [name])
    before = listing(folder.path)
    for resume, overwrite in (("never", True), (str(folder.checkpoints_path / "step-1"), False)):
        with pytest.raises(UserError, match=r"already exists.*move it away") as raised:
            RunWriter(folder.path).check(config(), resume, overwrite)
        assert Path(*Path(name).parts[:2]).name in str(raised.value)
    assert listing(folder.path) == before


def test_a_checkpoint_that_holds_something_else_is_kept(tmp_path: Path) -> None:
    folder = started(tmp_path / "run", steps=2)
    plant(folder.path, ["checkpoints/step-1/notes.txt"])
    with folder.new_checkpoint(3, keep=1):
        pass
    assert names(folder) == ["step-1", "step-3"]


@pytest.mark.parametrize("text", [b"mine", b"", b"{}"])
@pytest.mark.parametrize("is_link", [True, False])
def test_a_lock_that_is_not_ours_is_left_as_it_is(text: bytes, is_link: bool, tmp_path: Path) -> None:
    target, output = tmp_path / "target", tmp_path / "run"
    output.mkdir()
    file = target if is_link else output / ".lock"
    file.write_bytes(text)
    if is_link:
        (output / ".lock").symlink_to(target)
    elif not text:
        return  # one that was killed before it wrote
    folder = RunWriter(output)
    with pytest.raises(UserError, match=r"cannot be locked|is not a lock file"):
        folder.lock()
    folder.close()
    assert file.read_bytes() == text
    assert (output / ".lock").is_symlink() == is_link


def test_a_run_that_another_began_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    second = RunWriter(tmp_path / "run")
    second.check(config(), "never", overwrite=False)
    first = started(tmp_path / "run")
    first.lock()
    with pytest.raises(UserError, match=rf"is being written by process {os.getpid()} on"):
        second.lock()
    first.close()
    with pytest.raises(UserError, match="another run wrote there meanwhile; start again"):
        second.lock()


REFUSALS = {errno.ENOSPC: "No space left", errno.EDQUOT: "quota", errno.EIO: "Input/output", errno.EROFS: "Read-only"}


@pytest.mark.parametrize("number", REFUSALS)
def test_what_the_system_refuses_is_said(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its disk shows free bytes; wrapped as torch's writer and safetensors do, or plain."""
    folder = started(tmp_path / "run", steps=1)
    folder.lock()
    refusal = OSError(number, os.strerror(number), "file")
    said = rf"step 2: .*{folder.checkpoints_path}.*{REFUSALS[number]}.* The last complete one is step-1"
    for error in (
        refusal,
        SafetensorError(f"I/O error: x (os error {number})"),
        CheckpointException("x", {0: (refusal, StackSummary())}),
    ):
        with pytest.raises(UserError, match=said), folder.new_checkpoint(2, keep=2):
            raise error
    assert sorted(os.listdir(folder.checkpoints_path)) == ["step-1"]

    def refused(*args: Any, **how: Any) -> None:
        raise refusal

    monkeypatch.setattr(Path, "unlink", refused)  # of `.lock`
    with pytest.raises(UserError, match=REFUSALS[number]):  # noqa: PT012
        try:
            with folder.new_checkpoint(2, keep=2):
                raise refusal
        finally:
            folder.close()


@pytest.mark.parametrize(
    ("name", "message"), [("step-2", "step 2: .*File exists"), (".step-2.moetune", "move it away")]
)
def test_what_came_meanwhile_is_neither_replaced_nor_removed(name: str, message: str, tmp_path: Path) -> None:
    folder = started(tmp_path / "run", steps=1)
    plant(folder.path, [f"checkpoints/{name}/weights"])
    with pytest.raises(UserError, match=message), folder.new_checkpoint(2, keep=2):
        pass
    assert (folder.checkpoints_path / name / "weights").read_text() == f"checkpoints/{name}/weights"


def test_a_full_disk_leaves_the_last_checkpoint_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = started(tmp_path / "run", steps=2)
    before = listing(folder.checkpoints_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=100))
    message = r"needs 5,000 bytes and 100 are free. The last complete one is step-2; free some space"
    with pytest.raises(UserError, match=message), folder.new_checkpoint(8, 3, 5000) as aside:
        raise OSError(plant(aside, ["half"]) and errno.ENOSPC, "No space left on device")
    assert listing(folder.checkpoints_path) == before
    with pytest.raises(UserError, match=r"checkpoints need 5,000 bytes there and 100 are free"):
        folder.refuse_full_disk(5000)


def test_a_damaged_checkpoint_that_is_asked_for_costs_no_other(tmp_path: Path) -> None:
    folder = started(tmp_path / "run", steps=2)
    plant(folder.path, ["checkpoints/step-1/weights"])
    before = listing(folder.path)
    with pytest.raises(UserError, match=r"step-1' is damaged: weights .*; resume from another, or with auto"):
        folder.check(config(), str(folder.checkpoints_path / "step-1"), overwrite=False)
    assert listing(folder.path) == before
