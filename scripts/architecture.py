"""Write the tree of `docs/architecture.md`: every room and file of moetune with the first sentence of its docstring.

    python scripts/architecture.py           # rewrites the tree in place
    python scripts/architecture.py --check   # exits with 1 if the page is not what this would write

Rooms come in the order of the import-linter layers in `pyproject.toml`, top to bottom: the direction of imports.
"""

import argparse
import ast
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/architecture.md"
BEGIN, END = "<!-- tree: scripts/architecture.py -->", "<!-- end of tree -->"
_WIDTH, _COLUMN = 150, 26


def summary(file: Path) -> str:
    """Return the first sentence of a module's docstring, on one line."""
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    first = " ".join(docstring.partition("\n\n")[0].split())
    return re.split(r"(?<=[.!])\s(?=[A-Z`])", first)[0].rstrip(".")


def rooms() -> list[str]:
    """Return the packages and modules directly in moetune, in the order of the layers."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = next(one for one in settings["tool"]["importlinter"]["contracts"] if one["type"] == "layers")
    return [name.strip().removeprefix("moetune.") for layer in contract["layers"] for name in layer.split("|")]


def lines() -> Iterator[str]:
    """Yield the lines of the tree."""
    listed = subprocess.run(["git", "ls-files", "moetune/*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).exists()]
    yield "moetune/"
    yield from _entry(1, "__init__.py", ROOT / "moetune/__init__.py")
    for room in rooms():
        folder = ROOT / "moetune" / room
        if folder.is_dir():
            yield from _folder(1, folder, files)
        else:
            yield from _entry(1, f"{room}.py", folder.with_suffix(".py"))


def _folder(depth: int, folder: Path, files: list[Path]) -> Iterator[str]:
    yield from _entry(depth, f"{folder.name}/", folder / "__init__.py")
    inside = [file for file in files if folder in file.parents and file.name != "__init__.py"]
    for file in sorted(file for file in inside if file.parent == folder):
        yield from _entry(depth + 1, file.name, file)
    below = {folder / file.relative_to(folder).parts[0] for file in files if folder in file.parents}
    for package in sorted(path for path in below if path.is_dir()):
        yield from _folder(depth + 1, package, files)


def _entry(depth: int, name: str, file: Path) -> list[str]:
    head = f"{'  ' * depth}{name}"
    text = textwrap.wrap(summary(file), _WIDTH - _COLUMN) or [""]
    first = f"{head:<{_COLUMN - 1}} {text[0]}".rstrip()
    return [first, *(" " * _COLUMN + more for more in text[1:])]


def page() -> str:
    """Return the page with its tree as it should be."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    tree = "".join(f"    {line}\n" for line in lines())
    return f"{before}{BEGIN}\n\n{tree}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page would change")
    wanted = page()
    if parser.parse_args().check:
        return int(PAGE.read_text(encoding="utf-8") != wanted)
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
