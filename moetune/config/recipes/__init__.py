"""Run files to start from, one a task; `configs/` holds the same."""

from pathlib import Path


def recipes() -> dict[str, str]:
    """Return the name of each recipe and what it does (the first line of its file)."""
    files = sorted(Path(__file__).parent.glob("*.yaml"), key=lambda file: file.stem)
    return {file.stem: file.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ") for file in files}


def read_recipe(name: str) -> str:
    """Return the text of a recipe's run file."""
    return Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8")
