"""scripts/size.py counts code, and refuses more than the budget."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = '''"""Docstring."""

# comment
x = """two
lines"""


def f():
    """Docstring
    of two lines."""
    return (
        x  # and a comment
    )
'''


@pytest.mark.parametrize(
    ("lines", "words", "above"), [(6, 3, ""), (5, 3, "config 6, budget 5"), (6, 2, "docs_words 3")]
)
def test_a_size_above_its_budget_is_refused(lines: int, words: int, above: str, tmp_path: Path) -> None:
    (tmp_path / "moetune/config").mkdir(parents=True)
    (tmp_path / "moetune/config/schema.py").write_text(CODE)
    (tmp_path / "README.md").write_text("three words here")
    (tmp_path / "pyproject.toml").write_text(
        f"[tool.moetune.size]\ntotal = 6\ntests = 0\nscripts = 0\ndocs_words = {words}\nrooms.config = {lines}\n"
    )
    done = subprocess.run([sys.executable, ROOT / "scripts/size.py", tmp_path], capture_output=True, text=True)
    assert done.returncode == bool(above)
    assert above in done.stderr
    assert "config " in done.stdout
