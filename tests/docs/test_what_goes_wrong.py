"""What the page quotes is what the program says, and its commands exist."""

import re
from pathlib import Path

import moetune
from moetune.cli.main import EXAMPLES
from tests.docs.test_commands import ROOT

PAGE = (ROOT / "docs/guides/what-goes-wrong.md").read_text(encoding="utf-8")


def test_messages_are_those_of_the_program() -> None:
    """Adjacent literals are one text; what a message fills in is not quoted."""
    files = Path(moetune.__file__).parent.rglob("*.py")
    source = "\n".join(re.sub(r'"\s*\n\s*f?"', "", file.read_text(encoding="utf-8")) for file in files)
    rows = [row.split("|") for row in PAGE.splitlines() if row.startswith("| ") and "one sees" not in row]
    quoted = [text for row in rows for text in re.findall(r"`([^`]+)`", row[1])]
    quoted += re.findall(r"\(`([^`]+)`\)", "".join(row[2] for row in rows))
    assert len(quoted) > 20
    assert [text for text in quoted if text not in source] == []


def test_commands_exist() -> None:
    assert set(re.findall(r"`moetune ([a-z]+)", PAGE)) <= EXAMPLES.keys()
