"""Every command: its help is instant, its stdout is data only, and what it writes works."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
import yaml

from moetune.cli.main import app
from moetune.config.load import load_run_config
from moetune.config.recipes import recipes
from moetune.run.resolve import resolve

ROOT = Path(__file__).parents[2]
RUN_FILES = sorted([*(ROOT / "configs").glob("*.yaml"), *(ROOT / "moetune" / "config" / "recipes").glob("*.yaml")])
CALLED: dict[str, Any] = {str(command.name): command.callback for command in app.registered_commands}
COMMANDS = sorted(CALLED)
HEAVY = {"torch", "transformers", "datasets", "numpy", "peft", "bitsandbytes", "pyarrow", "huggingface_hub"}


def test_the_commands_of_the_contract_are_there() -> None:
    contract = {"count", "predict", "plan", "score", "train", "verify", "export", "report", "quantize", "drift", "data"}
    contract |= {"eval", "generate", "chat", "apply", "doctor", "init", "models"}
    assert contract <= set(COMMANDS)


def test_help_is_instant() -> None:
    """No heavy package is imported, whatever command explains itself: those are what takes seconds."""
    code = (
        "import functools, sys, typer.main\n"
        "from moetune.cli.main import main\n"
        "typer.main.get_command = functools.cache(typer.main.get_command)\n"
        "for command in sys.argv[1:]:\n"
        "    sys.argv = ['moetune', *command.split(), '--help']\n"
        "    try: main()\n"
        "    except SystemExit: print(*sys.modules, file=sys.stderr)"
    )
    process = subprocess.run([sys.executable, "-c", code, "", *COMMANDS], capture_output=True, text=True, check=True)
    assert process.stdout.count("Usage: moetune") == len(COMMANDS) + 1
    after_each = process.stderr.splitlines()
    assert len(after_each) == len(COMMANDS) + 1
    for command, modules in zip(["", *COMMANDS], after_each, strict=True):
        loaded = {name.partition(".")[0] for name in modules.split()}
        assert "typer" in loaded
        assert not HEAVY & loaded, command


def test_python_m_moetune_is_the_script() -> None:
    (script,) = metadata.entry_points(group="console_scripts", name="moetune")
    assert script.value == "moetune.cli.main:main"
    process = subprocess.run([sys.executable, "-m", "moetune", "models", "--json"], capture_output=True, check=True)
    assert process.stderr == b""
    assert json.loads(process.stdout)["schema"] == 1


@pytest.mark.full
@pytest.mark.parametrize("isatty", [True, False])
def test_other_libraries_bars_are_for_terminals(isatty: bool) -> None:
    code = (
        "import os, sys\n"
        f"sys.stderr.isatty = lambda: {isatty}\n"
        "os.environ.pop('TQDM_DISABLE', None); os.environ.pop('PYTORCH_CUDA_ALLOC_CONF', None)\n"
        "from moetune.cli.main import main\n"
        "sys.argv = ['moetune', '--help']\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(os.environ.get('TQDM_DISABLE'), os.environ['PYTORCH_CUDA_ALLOC_CONF'])"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.split()[-2:] == ["None" if isatty else "1", "expandable_segments:True"]


def test_init_lists_its_recipes(moetune: Callable[..., Any]) -> None:
    listed = moetune("init", "--list")
    as_json = json.loads(moetune("init", "--list", "--json").out)
    assert as_json == {"schema": 1, "recipes": recipes()}
    assert [line.split()[0] for line in listed.out.splitlines()] == sorted(as_json["recipes"])
    assert all(summary.endswith(".") for summary in recipes().values())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("recipe", recipes())
def test_init_writes_a_run_file_with_its_own_command(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moetune: Callable[..., Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = moetune("init", recipe, "--out", "mine.yaml", "--json")
    assert json.loads(ended.out) == {"schema": 1, "recipe": recipe, "file": "mine.yaml"}
    (shown,) = re.findall(r"^# {5}(moetune .*)$", Path("mine.yaml").read_text(), re.MULTILINE)
    assert shlex.split(shown)[:3] == ["moetune", "train", "mine.yaml"]
    if recipe.startswith("tiny"):  # its model and data are in the package
        ended = moetune(*shlex.split(shown)[1:], "--dry-run", "--json")
        assert ended.code == 0
        assert json.loads(ended.out)["trainable"]["total"] > 0
        assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.yaml"]


def test_init_writes_run_yaml_unless_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moetune: Callable[..., Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert moetune("init", "tiny-lora").out == "run.yaml written; next: moetune train run.yaml\n"


@pytest.mark.one_in(10)
@pytest.mark.parametrize(
    "file", [file for file in RUN_FILES if file.parent.name == "configs"], ids=lambda file: file.stem
)
def test_every_run_file_fits_its_model(file: Path) -> None:
    config = load_run_config(file)
    resolve(config, "cuda")
    assert config.data is not None
    assert config.output == f"runs/{file.stem}"
    assert config.train.steps % config.train.save_every == 0


@pytest.mark.parametrize("file", RUN_FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_the_command_in_its_header_is_valid(file: Path, tmp_path: Path) -> None:
    """It names this file, and what it sets leaves a run file that only its own data can make wrong."""
    (shown,) = re.findall(r"^# {5}(moetune .*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    program, command, named, *options = shlex.split(shown)
    assert (program, command, named) == ("moetune", "train", f"configs/{file.name}")
    assert (ROOT / named).is_file()
    assert options[::2] == ["--set"] * (len(options) // 2)
    assert load_run_config(ROOT / named, options[1::2]).data is not None


def test_configs_are_the_recipes() -> None:
    assert not any(file.is_symlink() for file in RUN_FILES), "a copy of configs/ would have links to nowhere"
    texts = {
        folder: {file.stem: file.read_text() for file in RUN_FILES if file.parent.name == folder}
        for folder in ("configs", "recipes")
    }
    assert texts["configs"] == texts["recipes"]
    for text in texts["configs"].values():
        assert len(yaml.safe_load(text)) >= 5


def test_whole_numbers_have_bounds() -> None:
    for command in CALLED.values():
        for name, hint in get_type_hints(command, include_extras=True).items():
            if get_origin(hint) is Annotated and int in (hint.__origin__, *get_args(hint.__origin__)):
                assert hint.__metadata__[0].max, f"{command.__name__} {name}"
