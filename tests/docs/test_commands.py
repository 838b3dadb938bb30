"""Every command that the documentation shows is run, in order, page by page; training on less than a reader would."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moetune.anatomy.anatomy import meta_model, read_anatomy
from moetune.anatomy.selection import select
from moetune.anatomy.source import find_model_source
from moetune.cli.main import app
from moetune.run_file import load_run_config

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SCRIPTS = ("./scripts/demo.sh", "./scripts/test.sh")

REFUSED = "  # exit code 1"
"""Beside a command that is shown because the answer is no."""
FEWER_STEPS = ("train.steps=10", "train.eval_every=10")
"""A sixth of a recipe's steps, which is enough to see it learn; held-out loss before and after them."""
HELD_OUT = ROOT / "moetune/catalog/data/unicode-names/heldout.jsonl"


def commands(page: Path, kind: str = "bash") -> list[str]:
    """The lines of a page's ```bash blocks (those a reader can run anywhere) or ```bash gpu blocks."""
    blocks = re.findall(rf"^```{kind}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


def documented(kind: str) -> list:
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES if commands(page, kind)]


@pytest.mark.slow
@pytest.mark.parametrize("page", documented("bash"))
def test_commands_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    some = tmp_path / "some.jsonl"  # of the held-out data: runs of a few steps would spend their time on the rest
    some.write_text("".join(HELD_OUT.read_text(encoding="utf-8").splitlines(keepends=True)[:10]), encoding="utf-8")
    runs = []
    for command in commands(page):
        program, *arguments = shlex.split(command)
        if command in SCRIPTS:
            assert (ROOT / command).stat().st_mode & 0o100, f"{command} is not executable"
            continue
        assert program == "moetune", f"{page.name} shows a command that no test runs: {command}"
        is_recipe = re.fullmatch(r"train configs/tiny-\w+\.yaml", " ".join(arguments)) is not None
        less = () if arguments[0] != "train" else FEWER_STEPS if is_recipe else (f"data.eval={some}",)
        options = [option for setting in less for option in ("--set", setting)]
        monkeypatch.setattr(sys, "argv", ["moetune", *arguments, *options])  # which ranks are started with
        result = CliRunner().invoke(app, [*arguments, *options], catch_exceptions=False)
        expected = int(f"{command}{REFUSED}" in page.read_text(encoding="utf-8"))
        assert result.exit_code == expected, f"{command}\n{result.output}"
        if is_recipe:
            runs.append(Path(arguments[1]).stem)
    for run in runs:
        assert_learned(tmp_path / "runs" / run)
    if page.name == "README.md":
        assert set(runs) == {"tiny-router", "tiny-experts", "tiny-lora"}


def assert_learned(run: Path) -> None:
    """Each recipe lowers held-out loss, of all held-out data, on a domain that the tiny model has not seen."""
    losses = [line["eval_loss"] for line in map(json.loads, (run / "metrics.jsonl").open()) if "eval_loss" in line]
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("page", documented("bash gpu"))
def test_gpu_commands_are_valid(page: Path) -> None:
    for command in commands(page, "bash gpu"):
        _, name, run_file = shlex.split(command)[:3]
        assert name == "train"
        config = load_run_config(ROOT / run_file)
        select(config.adapt, read_anatomy(meta_model(find_model_source(config.model.path).config)))


def test_readme_run_file_is_valid(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "run.yaml").write_text(text)
    config = load_run_config(tmp_path / "run.yaml")
    select(config.adapt, read_anatomy(meta_model(find_model_source(config.model.path).config)))
