"""`moetune eval`: print the held-out loss of a run, an adapter or a checkpoint."""

from typing import Annotated

from moetune.cli import options as cli
from moetune.config.load import refuse_missing
from moetune.errors import UserError, note


def eval_(
    model: cli.Opens,
    data: Annotated[
        str | None, cli.option("DATA", "Data, as under data.train. Default: the run's held-out data.")
    ] = None,
    format_: cli.DataFormat = None,
    sequence_length: Annotated[
        int | None, cli.number("Largest number of tokens of a record. Default: the run's, or 2048.", 2, 2**24, "N")
    ] = None,
    base: cli.KeepQuantized = None,
    predict: cli.Predict = False,
    gpu: cli.OnCard = None,
    json_: cli.Json = False,
) -> None:
    """Print the held-out loss and perplexity of a run, an adapter, a checkpoint or a base, all computed alike. Exit
    code 1: it needs more memory than there is."""
    cli.refuse_card(gpu, predict)
    refuse_missing([] if data is None else [data])
    with cli.heavy_imports():
        from moetune.inference.evaluate import ROWS, evaluated, rows_of
        from moetune.inference.memory import lengths_of, predict_eval
        from moetune.planning.at_hand import refuse_unfit, surely_below

    device, card = cli.target(gpu) if predict else (None, None)
    opened = cli.found_model(model, base, device)
    if predict:
        try:
            lengths = lengths_of(rows_of(opened, data, sequence_length, format_)[0])
        except UserError as error:
            longest = sequence_length or (2048 if opened.config is None else opened.config.train.sequence_length)
            lengths = [longest] * ROWS
            note(f"rows of {longest:,} tokens are assumed: {error}")
        report = predict_eval(opened, lengths, gpu=card)
        cli.answer_prediction(json_, report)
        return
    rows, name = rows_of(opened, data, sequence_length, format_)
    if opened.run is not None:
        lengths = lengths_of(rows)
        rough = surely_below(opened.resolved.structure, ROWS * max(lengths, default=0))
        refuse_unfit("eval", rough, lambda card: predict_eval(opened, lengths, gpu=card))
    result = evaluated(opened, rows, name, data)
    which = ", which the run trained on" if result.held_out is False else ""
    kind = "held-out loss" if result.held_out else "loss"
    cli.answer(
        json_,
        result.to_json(),
        f"{kind} {result.loss:.4f}, perplexity {result.perplexity:.4g}",
        f"{result.tokens:,} predicted tokens in {result.records:,} sequences of {result.data}{which}",
        *([] if result.date is None else [f"the chat template writes the date {result.date}"]),
    )
