"""Every command that the documentation shows is run, on less than a reader would: those of a page in order."""

import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moetune.cli.main import app
from moetune.config.load import load_run_config
from moetune.run.resolve import resolve

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SCRIPTS = ("./scripts/demo.sh", "./scripts/test.sh")

REFUSED = "  # exit code 1"
"""Beside a command that is shown because the answer is no."""
LEAVE_NOTHING = ("models", "count", "predict", "verify", "plan", "compare", "data")
"""Commands that need no other one before them: each is run by itself, and once, however many pages show it."""
RECIPE = re.compile(r"moetune train configs/(tiny-\w+)\.yaml")
FEWER_STEPS = ("train.steps=6", "train.eval_every=6")
"""A tenth of a recipe's steps, which is enough to see it learn; held-out loss before and after them."""
FEWER_TRACED = ("train.accumulate=1", "train.router_aux_loss=0")
"""Of a prediction: one micro-step, and a few layers, which stand for all where no loss needs all."""
NAMES = ROOT / "moetune/models/catalog/data/unicode-names"

ON_A_PUSH = ("README.md",)

Run = Callable[[str], str]


def commands(page: Path, kind: str = "bash") -> list[str]:
    """The lines of a page's ```bash blocks (those a reader can run anywhere) or ```bash gpu blocks."""
    blocks = re.findall(rf"^```{kind}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


def leaves_nothing(command: str) -> bool:
    """It writes nothing, and reads nothing that a command of its page writes."""
    made = [word for word in command.split() if word.endswith((".yaml", ".json")) and not word.startswith("configs/")]
    return command.startswith(tuple(f"moetune {name}" for name in LEAVE_NOTHING)) and not made


def in_order(page: Path) -> list[str]:
    """The commands of a page that may need those before them."""
    return [command for command in commands(page) if not leaves_nothing(command)]


def documented() -> list:
    """Pages with commands; one of them on a push."""
    return [
        pytest.param(page, id=(name := str(page.relative_to(ROOT))), marks=[pytest.mark.full] * (name not in ON_A_PUSH))
        for page in PAGES
        if in_order(page)
    ]


def each_by_itself() -> list:
    """Those that are refused look for what would fit, which takes long; cli/test_predict.py does so on a push too."""
    found = sorted({command for page in PAGES for command in commands(page) if leaves_nothing(command)})
    return [pytest.param(c, marks=[pytest.mark.full] * is_refused(c)) for c in found]


def is_refused(command: str) -> bool:
    return any(f"{command}{REFUSED}" in page.read_text(encoding="utf-8") for page in PAGES)


@pytest.fixture
def run(small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> Run:
    """Runs a command and returns what it writes. Only `--all` trains the model that is shown and predicts in full."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")

    def first(records: int, name: str) -> Path:
        """Part of the example data: runs of a few steps would spend their time on the rest."""
        lines = (NAMES / name).read_text(encoding="utf-8").splitlines(keepends=True)
        (tmp_path / f"some-{name}").write_text("".join(lines[:records]), encoding="utf-8")
        return tmp_path / f"some-{name}"

    some, fewer_rows = first(10, "heldout.jsonl"), first(100, "train.jsonl")
    is_short = not pytestconfig.getoption("--all")

    def smaller(command: str) -> list[str]:
        """Settings with which it takes less."""
        name = command.split()[1]
        if RECIPE.fullmatch(command):
            return [
                *FEWER_STEPS,
                *(
                    [f"data.eval={some}", f"data.train={fewer_rows}", "model.dtype=fp32", "train.micro_batch=2"]
                    if is_short
                    else []
                ),
            ]
        model = [f"model.path={small_model}"] * is_short
        if name == "train":
            fewer = ["train.steps=4"] * (is_short and "train.steps=20" in command)
            return [f"data.eval={some}", *model, *fewer]
        if name in ("score", "select") and "configs/" in command:
            return model
        return {"verify": model, "predict": list(FEWER_TRACED) * is_short}.get(name, [])

    def run(command: str) -> str:
        program, *arguments = shlex.split(command)
        assert program == "moetune", f"a page shows a command that no test runs: {command}"
        if arguments[0] in ("apply", "adapter") and is_short:  # to what was trained on
            arguments = [str(small_model) if word == "tiny-mixtral" else word for word in arguments]
        if is_short:
            shorter = {"unicode-names:heldout": str(some), "16384": "2048"}
            arguments = [shorter.get(word, word) for word in arguments]
        arguments += [option for setting in smaller(command) for option in ("--set", setting)]
        monkeypatch.setattr(sys, "argv", ["moetune", *arguments])  # which ranks are started with
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert result.exit_code == int(is_refused(command)), f"{command}\n{result.output}"
        if is_refused(command):
            assert result.output.startswith("does NOT fit")
            assert "--set optimizer.name=adamw8bit" in result.output
        return result.output

    return run


@pytest.mark.slow
@pytest.mark.one_in(16)
@pytest.mark.parametrize("command", each_by_itself())
def test_a_command_runs(command: str, run: Run) -> None:
    assert run(command)


@pytest.mark.slow
@pytest.mark.parametrize("page", documented())
def test_commands_of_a_page_run(
    page: Path, run: Run, tmp_path: Path, request: pytest.FixtureRequest, pytestconfig: pytest.Config
) -> None:
    if not pytestconfig.getoption("--all"):
        request.getfixturevalue("unpredicted")
    recipes = []
    for command in in_order(page):
        if command in SCRIPTS:
            assert (ROOT / command).stat().st_mode & 0o100, f"{command} is not executable"
            continue
        run(command)
        if recipe := RECIPE.fullmatch(command):
            recipes.append(recipe[1])
    for name in recipes:
        assert_learned(tmp_path / "runs" / name)
    if page.name == "README.md":
        assert set(recipes) == {"tiny-router", "tiny-experts", "tiny-lora"}


def assert_learned(run: Path) -> None:
    """Each recipe lowers held-out loss, with `--all` of all held-out data, on a domain that the tiny model has not
    seen."""
    losses = [line["eval_loss"] for line in map(json.loads, (run / "metrics.jsonl").open()) if "eval_loss" in line]
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page, "bash gpu")])
def test_gpu_commands_are_valid(page: Path) -> None:
    for command in commands(page, "bash gpu"):
        _, name, run_file = shlex.split(command)[:3]
        assert name == "train"
        config = load_run_config(ROOT / run_file)
        resolve(config, "cuda")


def test_readme_run_file_is_valid(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "run.yaml").write_text(text)
    config = load_run_config(tmp_path / "run.yaml")
    resolve(config, "cuda")
