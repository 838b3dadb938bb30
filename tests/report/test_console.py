"""What is printed is what was given: no markup, no emoji, whatever a path is called."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.table import Table

import moetune as package
from moetune.errors import note
from moetune.report.console import quieten, terminal
from tests import small

NAME = "x[/]y [bold red]z[/bold red] :key:"


def test_a_name_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    console = terminal()
    console.print(NAME)
    console.rule(NAME)
    table = Table(title=NAME)
    table.add_column(NAME)
    table.add_row(NAME)
    console.print(table)
    assert capsys.readouterr().out.count(NAME) == 5


def test_a_note_does_not_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    note("one\r\x1b[A", "other")
    assert capsys.readouterr().err == "note: one\\r\\x1b[A\nnote: other\n"


def test_what_transformers_logs_twice_is_printed_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    quieten()
    for text in ("[transformers] of a test\n", "a line\n") * 2:
        sys.stderr.write(text)
    assert capsys.readouterr().err == "[transformers] of a test\na line\na line\n"


def test_everything_is_printed_there() -> None:
    """`Console()` would read markup; a spinner does so even on a console that does not, and takes a `Text`."""
    sources = {file: file.read_text() for file in Path(package.__file__).parent.rglob("*.py")}
    made = [
        file.name
        for file, text in sources.items()
        if re.search(r"\b(Console|_Terminal)\(|rich import|from_markup", text)
    ]
    assert made == ["console.py"]
    statuses = [call for text in sources.values() for call in re.findall(r"(?:\.status|status\.update)\([^)]*", text)]
    assert statuses
    assert all("(Text(" in call for call in statuses)


@pytest.mark.parametrize(
    "arguments",
    [
        ["compare", "{}", "--gpu", "44GiB"],
        ["plan", "{}", "--gpu", "44GiB", "--solve", NAME],
    ],
    ids=lambda arguments: arguments[0],
)
def test_commands(
    arguments: list[str], small_model: Path, tmp_path: Path, monkeypatch: Any, moetune: Callable[..., Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "x[").mkdir()
    file = Path("x[/]y :key:.yaml")
    file.write_text(yaml.safe_dump(small.run_file(small_model, Path("data.jsonl"), Path("out"))))
    ended = moetune(*(argument.format(file) for argument in arguments))
    shown = {"compare": file.stem, "plan": repr(NAME)}[arguments[0]]
    assert shown in ended.out + ended.err
    assert ended.code == (2 if arguments[0] == "plan" else 0)
