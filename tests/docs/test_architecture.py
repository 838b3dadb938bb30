"""docs/architecture.md: its tree is that of the files, each with what its docstring says first."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts/architecture.py"


def test_the_tree_is_what_the_docstrings_say() -> None:
    checked = subprocess.run([sys.executable, SCRIPT, "--check"])
    assert checked.returncode == 0, "run: python scripts/architecture.py"
