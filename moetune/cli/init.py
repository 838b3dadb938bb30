"""`moetune init`: a starter run file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moetune.cli.options import Json


def init(
    recipe: Annotated[
        str, typer.Argument(help="Recipe name; `moetune init --list` shows them.", show_default=False)
    ] = "",
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where to write it.")] = Path("run.yaml"),
    list_: Annotated[bool, typer.Option("--list", help="List the recipes.")] = False,
    json_: Json = False,
) -> None:
    """Write a commented run file to start from."""
    import json

    from moetune.catalog import read_recipe, recipes
    from moetune.errors import UserError, suggest

    known = recipes()
    if list_:
        if json_:
            print(json.dumps({"schema": 1, "recipes": known}))
        else:
            for name, summary in known.items():
                print(f"{name:24} {summary}")
        return
    if recipe not in known:
        hint = suggest(recipe, known) or f" There are: {', '.join(known)}."
        raise UserError(f"recipe {recipe!r} does not exist.{hint}" if recipe else f"init needs a recipe.{hint}")
    if out.exists():
        raise UserError(f"{str(out)!r} exists; choose another file with --out")
    # the command in its header is that of the repository; a user's is this file's
    text = read_recipe(recipe).replace(f"configs/{recipe}.yaml", str(out))
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{str(out)!r} cannot be written: {error.strerror}") from None
    if json_:
        print(json.dumps({"schema": 1, "recipe": recipe, "file": str(out)}))
    else:
        print(f"{out} written; next: moetune train {out}")
