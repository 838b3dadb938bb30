"""`moetune select`: choose experts by score, write the choice into a run file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from moetune.cli import options as cli
from moetune.errors import UserError
from moetune.files import write_output
from moetune.report.console import terminal
from moetune.report.view import Table, ViewSection

if TYPE_CHECKING:
    from moetune.config.fields import IdsByLayer
    from moetune.run.choice import Coverage


def select(
    scores: Annotated[Path, cli.argument("SCORES.json", "The file that moetune score wrote.")],
    rule: Annotated[str, cli.choice("tokens|gate|reap|foreground|random|least", "How to rank experts.")] = "tokens",
    p: Annotated[
        float | None,
        cli.option(None, "Choose the fewest experts with this share of a layer's tokens, or of gate weight."),
    ] = None,
    k: Annotated[int | None, cli.number("Choose this many experts of each layer.", None)] = None,
    experts: Annotated[int | None, cli.number("Choose at most this many experts in total.", None)] = None,
    parameters: Annotated[int | None, cli.number("Choose at most this many parameters in total.", None)] = None,
    budget: Annotated[
        str | None,
        cli.option(None, "Choose as many as --run fits in this memory, such as 44GiB; or a share, such as 0.25."),
    ] = None,
    background: Annotated[
        Path | None, cli.option("SCORES.json", "Scores of general text, for --rule foreground.")
    ] = None,
    layers: Annotated[str, cli.option(None, "Choose only from these layers, such as 0-5.")] = "all",
    seed: Annotated[int, cli.number("Seed for --rule random.", 0)] = 0,
    run: Annotated[Path | None, cli.option("RUN.yaml", "The run file to add the choice to.")] = None,
    part: Annotated[Any, cli.choice("experts|lora", "Train the experts in full, or with LoRA.", "--as")] = "experts",
    out: Annotated[
        Path | None, cli.option("FILE", "Write the run file here. Default: stdout.", check=cli.output_file)
    ] = None,
    set_: cli.Overrides = None,
    json_: cli.Json = False,
) -> None:
    """Choose experts by their scores, and print their share of the routed tokens beside that of a random choice."""
    if layers == "none":
        raise UserError("--layers none chooses no expert; give all, or numbers such as 0-5")
    if run is None:
        cli.refuse_set(set_, "give one with --run")
    with cli.heavy_imports():
        from moetune.adapt.weights.base import noting_base
        from moetune.report.terminal import show
        from moetune.routing.select import choice_of, with_choice, within_budget
        from moetune.run.choice import coverage
        from moetune.run.dtypes import this_device
        from moetune.run.resolve import resolve
        from moetune.run.scores import read_scores

    given = {"p": p, "k": k, "experts": experts, "parameters": parameters, "budget": budget, "layers": layers}
    how = {"rule": rule, "seed": seed, "background": None if background is None else str(background)}
    read = read_scores(scores, "SCORES.json")
    chosen_by = choice_of({"from": str(scores), **given, **how})
    if isinstance(chosen_by.budget, str) and run is None:
        raise UserError(f"--budget {budget} limits a run's memory; also give --run RUN.yaml")
    config = with_choice(None if run is None else cli.read_run(run, set_), read.model, chosen_by, part)
    resolved = resolve(within_budget(config), this_device())
    is_read = run is not None and config.model.weights == "pretrained"
    if is_read and resolved.model.source.local_folder() is not None:
        with noting_base(resolved.model) as noted:
            base = noted()
        resolved.refuse_other_scores(None if base is None else base.fingerprint.content)
    adapt: Any = resolved.config.adapt
    chosen: IdsByLayer = adapt.lora.ids if part == "lora" else adapt.experts.ids
    covers = coverage(chosen, read)
    text = _yaml(config.but(adapt=adapt), part, chosen)
    if out is not None:
        write_output(out, text)
    table = ViewSection("share of the routed tokens that carry loss", _table(chosen, covers))
    if out is None and not json_:
        show(table, terminal(stderr=True))
        print(text, end="")
        return
    cli.answer(json_, _json(chosen, covers, out), table, f"written to {out}")


def _yaml(config: Any, part: str, chosen: IdsByLayer) -> str:
    """Return the configuration as YAML text: the keys that were set, with the chosen expert ids in place of the rule.

    `part` says where the ids go: `experts`, to `adapt.experts`; or `lora`, to `adapt.lora.ids`.
    """
    import yaml

    raw = config.model_dump(mode="json", exclude_unset=True)
    ids = {index: list(ids) for index, ids in chosen.items()}
    if part == "lora":
        raw["adapt"]["lora"]["ids"] = ids
    else:
        raw["adapt"]["experts"] = {"ids": ids}
    raw["adapt"] = {key: value for key, value in raw["adapt"].items() if value is not None}
    return str(yaml.safe_dump(raw, sort_keys=False, default_flow_style=None, width=120))


def _json(chosen: IdsByLayer, covers: Coverage, out: Path | None) -> dict[str, Any]:
    """Return the object that `moetune select --json` prints, without `schema`; `covers` are the shares of the chosen
    experts, `out` the file that was written."""
    return {
        "out": None if out is None else str(out),
        "experts": {str(index): list(ids) for index, ids in chosen.items()},
        "share": {str(index): share for index, share in covers.layers.items()},
        "random_share": {str(index): share for index, share in covers.random.items()},
        "total_share": covers.total,
        "total_random_share": covers.random_total,
    }


def _table(chosen: IdsByLayer, covers: Coverage) -> Table:
    """Return a table of the chosen experts of each layer, their share of the tokens, and that of a random choice."""
    rows = [
        (str(index), ", ".join(map(str, ids)), *(f"{100 * s[index]:.1f} %" for s in (covers.layers, covers.random)))
        for index, ids in chosen.items()
    ]
    count = sum(map(len, chosen.values()))
    total = "all", str(count), f"{100 * covers.total:.1f} %", f"{100 * covers.random_total:.1f} %"
    return Table((">layer", "experts", ">these", ">as many at random"), rows, [total])
