"""`moetune score`: count which experts a data set uses, write the scores."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from moetune.cli import options as cli
from moetune.config.load import load_run_config, read_run_config, refuse_missing
from moetune.errors import UserError, note
from moetune.report.view import Table, ViewSection

if TYPE_CHECKING:
    from moetune.run.scores import Scores


def score(
    model: Annotated[str, cli.argument("MODEL|RUN.yaml", "A model, or the run file that will train it.")],
    data: Annotated[
        list[str] | None, cli.option("FILE", "Data, as under data.train; repeatable. Default: the run file's.")
    ] = None,
    out: Annotated[Path, cli.option("FILE", "File to write the scores to.", check=cli.in_a_folder)] = Path(
        "scores.json"
    ),
    tokens: cli.Scored = 131_072,
    overwrite: cli.Overwrite = False,
    predict: cli.Predict = False,
    gpu: cli.Card = None,
    set_: cli.Overrides = None,
    json_: cli.Json = False,
) -> None:
    """Count what each expert of a model receives from data, by layer: tokens, gate weight, REAP score, expert pairs.
    Exit code 1: scoring needs more memory than there is."""
    from moetune.cli.start_on_ranks import on_ranks, starts_ranks

    if model.endswith((".yaml", ".yml")):
        config = load_run_config(model, set_ or ())
    else:
        cli.refuse_set(set_, "give a run file instead of MODEL")
        config = read_run_config({"model": {"path": model}, "adapt": {"router": "all"}}, (), "score")
    cli.refuse_card(gpu, predict)
    refuse_missing(data or ())
    if not data and config.data is None and not predict:
        raise UserError("moetune score needs --data FILE, or data: in the run file")
    if predict or not starts_ranks(config.parallel):
        with cli.heavy_imports():
            from moetune.planning.at_hand import refuse_unfit, surely_below
            from moetune.routing.data_sets import names_of
            from moetune.routing.memory import predict_score
            from moetune.routing.score import score as score_run
            from moetune.routing.score import to_score
            from moetune.run.dtypes import this_device
            from moetune.run.resolve import resolve
    if predict:
        device, card = cli.target(gpu, config.hardware)
        report = predict_score(resolve(to_score(config), device), len(data or names_of(config)) or 1, gpu=card)
        cli.answer_prediction(json_, report)
        return
    with on_ranks(config.parallel, "nothing was written; run it again") as ranks:
        run = resolve(to_score(config), this_device())
        if ranks.is_first:
            note(*filter(None, [run.model.lost_bits]))
        if ranks.is_single and run.structure.moe_layers:
            sources = len(data or names_of(config))
            rough = surely_below(run.structure, config.train.micro_batch * config.train.sequence_length)
            refuse_unfit("score", rough, lambda card: predict_score(run, sources, gpu=card))
        scores = score_run(run, data or names_of(config), tokens, out, overwrite=overwrite, ranks=ranks)
    if ranks.is_first:
        cli.answer(
            json_,
            {"out": str(out), **scores.model_dump(mode="json", by_alias=True)},
            ViewSection(f"experts of {scores.model}, by tokens that carry loss", _table(scores)),
            f"{scores.tokens:,} tokens, {scores.loss_tokens:,} of them carry loss",
            f"written to {out}; moetune select {out} --k 2 says which experts to train",
        )


def _table(scores: Scores) -> Table:
    """Return a table with a row for each MoE layer: its four most used experts, the load of the fullest over the mean,
    the router's entropy, and the number of unused experts; over tokens that carry loss."""
    rows = []
    for index, layer in scores.layers.items():
        share = layer.loss.share
        first = sorted(range(layer.num_experts), key=lambda expert: (-share[expert], expert))[:4]
        most_used = ", ".join(f"{expert} {100 * share[expert]:.1f} %" for expert in first)
        entropy = "" if layer.loss.entropy is None else f"{layer.loss.entropy:.2f}"
        fullest = f"{max(share) * layer.num_experts:.2f}"
        rows.append((str(index), most_used, fullest, entropy, str(len(layer.loss.unused))))
    most = "most used, with the share of tokens"
    return Table((">layer", most, ">fullest over mean", ">entropy, nats", ">unused"), rows)
