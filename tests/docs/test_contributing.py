"""CONTRIBUTING.md: what it says to change is changed in a copy of the program, which then does what the page says."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import moetune
from tests.docs.test_commands import ROOT

PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package with every change of the page."""
    folder = tmp_path_factory.mktemp("changed")
    shutil.copytree(ROOT / "moetune", folder / "moetune")
    shutil.copytree(ROOT / "configs", folder / "configs")
    blocks = re.findall(r"^```diff\n(\S+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 6
    for name, block in blocks:
        old, new = (
            "\n".join(line[1:] for line in block.splitlines() if line.startswith(sign)).strip("\n") for sign in "-+"
        )
        text = (folder / name).read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{name}: {old}"
        (folder / name).write_text(text.replace(old, new), encoding="utf-8")
    return folder


def run(folder: Path, *arguments: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-m", "moetune", *arguments],
        cwd=folder, env=os.environ | {"PYTHONPATH": str(folder)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


SETTINGS = ("--set", "optimizer.name=paged_lion8bit", "--set", "model.base=fp16", "--set", "train.accumulate=1")


@pytest.mark.slow
def test_the_optimizer_the_storage_and_the_gpu_are_there(changed: Path, small_model: Path) -> None:
    model = ("--set", f"model.path={small_model}")
    said = run(changed, "predict", "configs/tiny-lora.yaml", "--gpu", "my-card", *model, *SETTINGS, "--verbose")
    assert "NVIDIA My Card" in said
    assert "paged_lion8bit" in said
    assert "fp16" in said


@pytest.mark.full
@pytest.mark.parametrize("setting", ["optimizer.name=paged_lion8bit", "model.base=fp16"])
def test_they_take_what_is_predicted(setting: str, changed: Path) -> None:
    run(changed, "verify", "configs/tiny-lora.yaml", "--set", setting, "--set", "train.accumulate=1", "--steps", "2")


def test_every_place_that_is_named_exists() -> None:
    places = set(re.findall(r"`?\b((?:moetune|tests|docs|scripts)/[\w./-]+)", PAGE))
    assert len(places) > 30
    missing = [place for place in places if not (ROOT / place.rstrip(".")).exists() and "X" not in place]
    assert missing == []


def test_the_version_is_one() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None
    assert cited == newest[1] == moetune.__version__


@pytest.mark.parametrize("name", ["ci", "nightly"])
def test_workflows_run_scripts_that_exist(name: str) -> None:
    workflow = yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text(encoding="utf-8"))
    scripts = set()
    for job in workflow["jobs"].values():
        values = job.get("strategy", {}).get("matrix", {}).get("include", [{}])
        runs = [step["run"] for step in job["steps"] if "run" in step]
        scripts |= {run.replace("${{ matrix.script }}", v.get("script", "")).split()[0] for run in runs for v in values}
    ours = {script for script in scripts if script.startswith("./")}
    assert {"./scripts/test.sh", "./scripts/test_cuda.sh"} <= ours
    assert all(os.access(ROOT / script, os.X_OK) for script in ours)
