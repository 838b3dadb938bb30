"""docs/architecture.md: its tree is that of the files, each with what its docstring says first."""

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts/architecture.py"


def test_the_tree_is_what_the_docstrings_say() -> None:
    checked = subprocess.run([sys.executable, SCRIPT, "--check"])
    assert checked.returncode == 0, "run: python scripts/architecture.py"


def test_files_that_are_named_exist() -> None:
    root = SCRIPT.parents[1]
    texts = [*(root / "docs").rglob("*.md"), *root.glob("*.md"), *(root / "moetune").rglob("*.py")]
    named = {
        path
        for text in texts
        if text.name != "CHANGELOG.md" and "benchmarks" not in text.parts
        for path in re.findall(r"(?<![\w/.-])[a-z_]+(?:/[a-z_0-9]+)+\.py\b", text.read_text(encoding="utf-8"))
    }
    files = [
        f"/{file.relative_to(root)}" for room in ("moetune", "tests", "scripts") for file in (root / room).rglob("*.py")
    ]
    rooms = {file.name for file in [root, *(root / "moetune").iterdir(), *(root / "tests").iterdir()] if file.is_dir()}
    ours = {path for path in named if path.split("/")[0] in rooms | {"moetune", "tests", "scripts"}}
    assert len(ours) > 50
    assert {path for path in ours if not any(file.endswith(f"/{path}") for file in files)} == set()
