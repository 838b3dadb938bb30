"""`moetune init`: write a run file: a recipe, or a plan's best candidate."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moetune.cli import options as cli
from moetune.errors import UserError, suggest
from moetune.files import refuse_taken, write_output

if TYPE_CHECKING:
    from moetune.models.catalog.gpus import Gpu


def init(
    context: typer.Context,
    recipe: Annotated[
        str, cli.argument("RECIPE|MODEL", "Recipe name; `moetune init --list` shows them. Or a model.")
    ] = "",
    gpu: Annotated[
        str | None,
        cli.option(
            None, "For a MODEL: the card that the run must fit, such as l40s or 44GiB. Default: this machine's."
        ),
    ] = None,
    goal: Annotated[str, cli.choice("router|experts|lora", "For a MODEL: what to train.")] = "lora",
    tight: cli.Tight = False,
    out: Annotated[Path, cli.option("FILE", "Where to write it.", "--out", check=cli.in_a_folder)] = Path("run.yaml"),
    list_: Annotated[bool, cli.flag("--list", "List the recipes.")] = False,
    set_: cli.Overrides = None,
    json_: cli.Json = False,
) -> None:
    """Write a commented run file to start from: a recipe, or the best candidate of a plan for a model and a card."""
    from moetune.config.recipes import read_recipe, recipes

    known = recipes()
    if list_:
        cli.answer(json_, {"recipes": known}, *(f"{name:24} {summary}" for name, summary in known.items()))
        return
    refuse_taken(out)
    if recipe in known:
        cli.refuse_given(
            context, f"is for a plan for a MODEL, and {recipe!r} is a recipe; leave it out", "gpu", "goal", "tight"
        )
        # the command in a recipe's header names the recipe's path in the repository; replace it by the new file's
        text = read_recipe(recipe).replace(f"configs/{recipe}.yaml", str(out))
    elif recipe and (card := gpu or _here(recipe, known)) is not None:
        text = _planned(recipe, card, goal, out, tight)
    else:
        hint = suggest(recipe, known) or f" There are: {', '.join(known)}."
        beside = " For a model also give --gpu."
        raise UserError(f"recipe {recipe!r} does not exist.{hint}{beside}" if recipe else f"init needs a recipe.{hint}")
    write_output(out, _with_settings(text, set_) if set_ else text)
    cli.answer(json_, {"recipe": recipe, "file": str(out)}, f"{out} written; next: moetune train {out}")


def _with_settings(text: str, settings: list[str]) -> str:
    """Return the text of a run file with `--set` settings applied; `UserError` if it does not validate with them.

    The comments at its head are kept; comments between its lines are lost.
    """
    import yaml

    from moetune.config.load import read_run_config
    from moetune.planning.from_options import as_yaml

    lines = text.splitlines(keepends=True)
    end = next(index for index, line in enumerate(lines) if not line.startswith("#"))
    raw = yaml.safe_load(text)
    read_run_config(raw, settings, "the run file with --set")
    return "".join(lines[:end]) + as_yaml(raw)


def _here(model: str, recipes: Iterable[str]) -> Gpu | None:
    """Return the card of this machine, for which to plan `model`; None where there is none, and for a misspelt recipe.

    Raises `UserError` if there is a card, and the model does not exist.
    """
    from moetune.models.source import find_model_source

    if suggest(model, recipes):
        return None
    with cli.heavy_imports():
        import torch  # noqa: F401
    card = cli.at_hand(None)
    if card is not None:
        find_model_source(model)
    return card


def _planned(model: str, gpu: str | Gpu, goal: Any, out: Path, tight: bool) -> str:
    """Return the text of the run file, to be written to `out`, of the best candidate of a plan for a model and a GPU.

    `goal` is `router`, `experts` or `lora`. With `tight`, a run will do that is expected to fit but may run out of
    memory. Raises `UserError` if the model or the GPU is not known, or nothing fits.
    """
    with cli.heavy_imports():
        from moetune.planning.files import run_text
        from moetune.planning.plan import plan

    result = plan(model, gpu, goals=[goal], tight=tight, every=False)
    if not result.candidates:
        surely = "" if tight else "surely "
        remedy = "" if tight else ", and --tight takes what is expected to fit"
        raise UserError(
            f"{goal} of {model} does not {surely}fit {result.gpu}; moetune plan {model} --gpu {result.gpu} shows what "
            f"fits{remedy}"
        )
    return run_text(result.candidates[0], out)
