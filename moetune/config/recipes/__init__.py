"""Example run files for `moetune init`; `configs/` has the same files."""

from pathlib import Path


def recipes() -> dict[str, str]:
    """Return name of a recipe -> what it does, from the first line of its file."""
    files = sorted(Path(__file__).parent.glob("*.yaml"), key=lambda file: file.stem)
    return {file.stem: file.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ") for file in files}


def read_recipe(name: str) -> str:
    """Return the YAML text of the recipe `name`, one of the keys of `recipes()`; `OSError` for any other."""
    return Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8")
