"""Every path that a command writes: what is there already is replaced only if it is ours, and what the system refuses
is said. Whatever else is there is the same afterwards, byte for byte."""

import builtins
import errno
import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml
from typer.models import OptionInfo

from moetune.cli.main import app
from tests import small
from tests.thinned import in_pairs

FILES = {
    ("init", "--out"): "init tiny-router --out {}",
    ("select", "--out"): "select scores.json --k 1 --out {}",
    ("generate", "--out"): "generate model --prompts data.jsonl --max-new-tokens 1 --out {}",
    ("score", "--out"): "score run.yaml --tokens 64 --overwrite --out {}",
    ("predict", "--html"): "predict run.yaml --gpu 44GiB --html {}",
    ("predict", "--figure"): "predict run.yaml --gpu 44GiB --figure {}.svg",
    ("data", "--html"): "data run.yaml --html {}",
    ("drift", "--figure"): "drift done --data data.jsonl --tokens 64 --figure {}.png",
    ("report", "--out"): "report done --no-timeline --out {}",
    ("plan", "--html"): "plan model --gpu 44GiB --goal router --html {}",
    ("plan", "--figure"): "plan model --gpu 44GiB --goal router --figure {}.svg",
}
FOLDERS = {
    ("export", "--out"): "export done --format delta --overwrite --out {}",
    ("apply", "--out"): "apply delta --to model --overwrite --out {}",
    ("quantize", "--out"): "quantize model --base nf4 --out {}",
    ("train", "output"): "train run.yaml --overwrite --set train.steps=1 --set output={}",
}
NEW_FILES_IN = {("plan", "--write"): "plan model --gpu 44GiB --goal router --write {}"}
READ = {
    "train": {"run"}, "count": {"--run"}, "select": {"scores", "--background", "--run"}, "data": {"run"},
    "doctor": {"run"}, "drift": {"run"}, "export": {"run"}, "compare": {"runs"}, "report": {"run"}, "verify": {"run"},
    "apply": {"delta"},
}  # fmt: skip
"""Paths that are read: the name of an argument, or an option."""


def paths_of(command: Any) -> set[str]:
    """What a command takes as a path: names of arguments, and options."""
    found = set()
    for name, hint in get_type_hints(command, include_extras=True).items():
        kind, *about = get_args(hint) or (hint,)
        if kind is Path or Path in get_args(kind):
            option = isinstance(about[0], OptionInfo)
            decls = [one for one in about[0].param_decls or () if one.startswith("--")]
            found.add(decls[0] if decls else f"--{name.replace('_', '-')}" if option else name)
    return found


def test_the_table_has_every_path_that_a_command_takes() -> None:
    """So that a new one must be added, either as read or, with what tests it, as written."""
    written = {*FILES, *FOLDERS, *NEW_FILES_IN} - {("train", "output")}
    for command in app.registered_commands:
        name = str(command.name)
        known = READ.get(name, set()) | {option for of, option in written if of == name}
        assert paths_of(command.callback) == known, name


@pytest.fixture(scope="module")
def prepared(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, data, a run file, a run, its delta and scores, in one folder."""
    from moetune.config.schema import RunConfig
    from moetune.exporting.export import export
    from moetune.routing.score import score, to_score
    from moetune.run.resolve import resolve
    from tests.resolved import train

    here = tmp_path_factory.mktemp("prepared")
    shutil.copytree(small_model, here / "model")
    small.write_data(here / "data.jsonl")
    settings = {"steps": 1, "save_every": 1}
    run = small.run_file(here / "model", here / "data.jsonl", here / "done", train=settings)
    train(RunConfig.model_validate(run))
    export(here / "done", "delta", here / "delta")
    score(resolve(to_score(RunConfig.model_validate(run)), "cpu"), [str(here / "data.jsonl")], 64, here / "scores.json")
    (here / "run.yaml").write_text(yaml.safe_dump(run))
    return here


@pytest.fixture
def here(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a command reads, which it must not change, and a folder `out` for what it writes."""
    for item in prepared.iterdir():
        (tmp_path / item.name).symlink_to(item)
    (tmp_path / "run.yaml").unlink()
    shutil.copy(prepared / "run.yaml", tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "beside.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def listing(folder: Path) -> dict[str, Any]:
    """Links as what they point to; others as their bytes."""

    def content(item: Path) -> Any:
        if item.is_symlink():
            return os.readlink(item)
        return item.read_bytes() if item.is_file() else None

    return {str(item.relative_to(folder)): content(item) for item in sorted(folder.rglob("*"))}


def a_run(at: Path) -> None:
    shutil.copytree(Path("done").resolve(), at)


def an_export(at: Path) -> None:
    shutil.copytree(Path("delta").resolve(), at)


def a_file(at: Path) -> None:
    at.write_text("precious")


def a_link(at: Path) -> None:
    (at.parent / "target").write_text("precious")
    at.symlink_to(at.parent / "target")


def a_folder(at: Path) -> None:
    (at / "checkpoints" / "step-9").mkdir(parents=True)
    for name in ("run.yaml", "adapter_config.json", "manifest.json", "checkpoints/my.pt", "checkpoints/step-9/my.pt"):
        (at / name).write_text("{}")


def a_run_file(at: Path) -> None:
    """An input of the command."""
    shutil.copy("run.yaml", at)


def a_dangling_link(at: Path) -> None:
    at.symlink_to(at.parent / "nowhere")


TAKEN = [a_file, a_run_file, a_folder, a_link, a_dangling_link, a_run]
FULL = [a_file, a_folder, a_link, a_dangling_link]


def assert_refused(ended: Any, at: str) -> None:
    assert ended.code == 2, ended
    assert "Traceback" not in ended.err
    assert at in ended.err


@pytest.mark.parametrize(("command", "make"), in_pairs(FILES, TAKEN))
def test_a_file_that_is_there(
    command: tuple[str, str], make: Callable[[Path], None], here: Path, moetune: Callable[..., Any]
) -> None:
    line = FILES[command].format("out/it").split()
    make(here / line[-1])
    before = listing(here)
    assert_refused(moetune(*line), line[-1])
    assert listing(here) == before


@pytest.mark.parametrize(("command", "make"), in_pairs(FOLDERS, [*FULL, a_run, an_export]))
def test_a_folder_that_is_there(
    command: tuple[str, str], make: Callable[[Path], None], here: Path, moetune: Callable[..., Any]
) -> None:
    is_ours = {a_run: "train", an_export: "export apply"}.get(make, "")
    if command[0] in is_ours:
        return
    line = FOLDERS[command].format("out/it").split()
    make(here / "out" / "it")
    before = listing(here)
    assert_refused(moetune(*line), "out/it")
    assert listing(here) == before


REFUSALS = {
    "no room": errno.ENOSPC, "quota": errno.EDQUOT, "read-only": errno.EROFS, "broken": errno.EIO,
}  # fmt: skip


class Refusing:
    """The system, as it refuses to make anything below a folder; or only to keep what was written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, number: int, *, late: bool) -> None:
        self.folder, self.number = str(folder), number
        if late:
            monkeypatch.setattr(os, "fsync", self.not_kept)
            return
        for module in (builtins, io):
            monkeypatch.setattr(module, "open", self.watched(module.open, lambda mode="r", *_: set(mode) & set("wax+")))
        monkeypatch.setattr(os, "open", self.watched(os.open, lambda flags, *_: flags & (os.O_WRONLY | os.O_RDWR)))
        for name in ("mkdir", "rename", "replace", "link", "unlink", "rmdir"):
            monkeypatch.setattr(os, name, self.watched(getattr(os, name), lambda *_: True))

    def watched(self, stock: Callable[..., Any], changes: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **how: Any) -> Any:
            is_below = isinstance(path, (str, os.PathLike)) and os.path.abspath(path).startswith(self.folder)
            mode = (how["mode"],) if isinstance(how.get("mode"), str) else arguments
            if is_below and changes(*mode):
                self.refuse(path)
            return stock(path, *arguments, **how)

        return call

    def not_kept(self, descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(self.folder):
            self.refuse()

    def refuse(self, *what: Any) -> None:
        raise OSError(self.number, os.strerror(self.number), *map(str, what))


EVERY = {**FILES, **FOLDERS, **NEW_FILES_IN}
CHEAP = [("init", "--out"), ("data", "--html"), ("select", "--out"), ("export", "--out"), ("train", "output")]


def cases() -> list[Any]:
    """On a push each refusal once or twice, of commands that take little time."""
    on_a_push = set(zip(CHEAP * 2, [*REFUSALS, *REFUSALS], (False, True) * 4, strict=False))
    every = [(command, how, late) for command in EVERY for how in REFUSALS for late in (False, True)]
    return [pytest.param(*case, marks=[pytest.mark.full] * (case not in on_a_push)) for case in every]


@pytest.mark.one_in(3)
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
@pytest.mark.parametrize(("command", "how", "late"), cases())
def test_what_the_system_refuses(
    command: tuple[str, str], how: str, late: bool, here: Path, moetune: Callable[..., Any]
) -> None:
    """Said by name; nothing is left of it, and the next attempt is not in its own way."""
    line = EVERY[command].format("out/it").split()
    before = listing(here)
    with pytest.MonkeyPatch.context() as patch:
        Refusing(patch, here / "out", REFUSALS[how], late=late)
        ended = moetune(*line)
    assert_refused(ended, os.strerror(REFUSALS[how]))
    assert "out/it" in ended.err
    left = listing(here)
    if command[0] == "train":  # which goes on where it was
        left = {name: content for name, content in left.items() if not name.startswith("out/it")}
    assert left == before
    assert moetune(*line).code in (0, 1)
    assert listing(here)["out/beside.txt"] == b"mine"


def test_outputs_that_name_an_input(here: Path, moetune: Callable[..., Any]) -> None:
    before = listing(here)
    for line in (
        "predict run.yaml --gpu 44GiB --html run.yaml", "data run.yaml --html run.yaml",
        "data run.yaml --html data.jsonl", "select scores.json --k 1 --out scores.json",
        "score run.yaml --data data.jsonl --overwrite --out data.jsonl", "quantize model --out model",
        "export done --format delta --out done --overwrite", "apply delta --to model --out delta --overwrite",
        "report done --out done/metrics.jsonl",
    ):  # fmt: skip
        assert_refused(moetune(*line.split()), line.split()[-1 - line.endswith("--overwrite")])
    assert listing(here) == before
