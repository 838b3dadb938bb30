"""Prints how many lines of code each room has, and fails where one has more than `[tool.moetune.size]` allows.

    python scripts/size.py [ROOT]

A line counts if it has a token that is no docstring or comment. `docs_words` are those of README.md and docs/.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(text: str) -> int:
    """Return how many lines of a file are code."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstrings.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings)


def sizes(root: Path) -> tuple[dict[str, int], Counter[str]]:
    """Return the sizes of the whole, and the lines of each room of the package; files beside rooms are in "."."""
    rooms: Counter[str] = Counter()
    for file in (root / "moetune").rglob("*.py"):
        room, *rest = file.relative_to(root / "moetune").parts
        rooms[room if rest else "."] += code_lines(file.read_text(encoding="utf-8"))
    whole = {"total": rooms.total()}
    for folder in ("tests", "scripts"):
        whole[folder] = sum(code_lines(file.read_text(encoding="utf-8")) for file in (root / folder).rglob("*.py"))
    pages = [root / "README.md", *(root / "docs").rglob("*.md")]
    whole["docs_words"] = sum(len(page.read_text(encoding="utf-8").split()) for page in pages)
    return whole, rooms


def main(root: Path) -> int:
    """Print every size beside its budget; return 1 if one is above it, or if a room has none."""
    budget = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["moetune"]["size"]
    whole, rooms = sizes(root)
    above = []
    for name, size, most in [
        *((name, size, budget["rooms"].get(name, 0)) for name, size in rooms.most_common()),
        *((name, size, budget[name]) for name, size in whole.items()),
    ]:
        print(f"{name:12} {size:7,} of {most:7,}")
        if size > most:
            above.append(f"{name} {size:,}, budget {most:,}")
    if above:
        print(
            f"size.py: {'; '.join(above)}: remove code, or raise the budget in pyproject.toml and say in the "
            "commit what a user gets for it",
            file=sys.stderr,
        )
    return int(bool(above))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]))
