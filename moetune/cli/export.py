"""`moetune export`: write a trained model as delta, adapter or merged checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from moetune.atomic import is_occupied
from moetune.cli import options as cli
from moetune.errors import UserError, counted, note
from moetune.files import expanded

if TYPE_CHECKING:
    from moetune.exporting.writers.rounded import Survival

_HALF = 0.5
"""Share of the change that must survive for a rounded checkpoint to be no worse an export than the adapter."""


def export(
    run: cli.RunFolder,
    format_: Annotated[
        Any,
        cli.choice(
            "delta|peft|merged|vllm|sglang",
            "Trained tensors, PEFT adapter, whole checkpoint, server adapter.",
            "--format",
        ),
    ],
    out: Annotated[Path | None, cli.option("DIR", "Output folder, new or empty. Only --predict needs none.")] = None,
    overwrite: cli.Overwrite = False,
    check: Annotated[
        int, cli.number("Compare the loss on N held-out records with the trained model's.", 0, 1000, "N")
    ] = 0,
    into: Annotated[
        Any,
        cli.choice(
            "fp8|mxfp8|nvfp4|mxfp4|int4",
            "Round a merged checkpoint, and say how much of the change survives.",
            "--into",
        ),
    ] = None,
    predict: cli.Predict = False,
    json_: cli.Json = False,
) -> None:
    """Export a run's newest checkpoint, or its best with early stopping: a delta, an adapter or a merged checkpoint.
    Exit code 1: a merged checkpoint needs more memory than there is."""
    if predict and (format_ != "merged" or into is not None):
        raise UserError("--predict is for --format merged without --into; other exports are not predicted")
    if out is None and not predict:
        raise UserError("export needs --out, the folder to write to")
    if check and format_ in ("delta", "vllm", "sglang"):
        raise UserError(
            f"--check computes with stock transformers and PEFT, which do not read --format {format_}; use it with "
            "merged or peft"
        )
    if into is not None and (check or format_ != "merged"):
        raise UserError(f"--into {into} is for --format merged, and prints losses without --check")
    if out is not None:
        is_occupied(out := expanded(out), overwrite)
    with cli.heavy_imports():
        from moetune.exporting.export import export as export_trained
        from moetune.exporting.finished_run import open_run
        from moetune.exporting.memory import predict_merged
        from moetune.inference.check import check_export
        from moetune.memory.host import process_here
        from moetune.planning.at_hand import refuse_unfit

    process_here()
    if predict:
        report = predict_merged(open_run(run))
        cli.answer_prediction(json_, report)
        return
    assert out is not None
    trained: Any = run
    if format_ == "merged" and into is None:
        trained = opened = open_run(run)
        largest = max(part.numel for part in opened.adapted.structure.parameters)
        refuse_unfit("export", 64 * largest, lambda _: predict_merged(opened))
    result = export_trained(trained, format_, out, overwrite=overwrite, into=into)
    note(*result.notes)
    shown = [
        f"{result.format} of step {result.step}: {counted(result.tensors, 'tensor')}, {result.bytes:,} bytes, in "
        f"{result.out}"
    ]
    try:
        checked = check_export(run, out, check) if check else check_export(run, out, rounded=True) if into else None
    except UserError as error:
        raise UserError(
            f"{str(out)!r} was written; {'--check' if check else 'comparing losses'} failed: {error}"
        ) from error
    shown += _of_survival(result.survival)
    if checked is not None:
        if checked.unread is not None:
            note(f"--check: random tokens take the place of the run's data: {checked.unread}")
        shown.append(
            f"loss on {counted(checked.rows, 'record')} of {checked.of}, {checked.tokens:,} tokens: "
            f"{checked.trained_loss:.4f} trained, {checked.exported_loss:.4f} exported"
        )
    cli.answer(json_, {**result.to_json(), "check": checked and asdict(checked)}, *shown)


def _of_survival(survival: Sequence[Survival]) -> Iterator[str]:
    """Yield lines that say how much of the change rounding keeps in each layer, and in all of them together.

    The last of `survival` is that of all layers; without any, nothing is yielded.
    """
    if not survival:
        return
    every = survival[-1]
    yield "of the change Δ, rounding keeps ⟨Q(W + Δ) − Q(W), Δ⟩ / ⟨Δ, Δ⟩, and errs by ‖Q(W + Δ) − Q(W) − Δ‖ / ‖Δ‖:"
    for layer in survival:
        name = "all" if layer is every else "others" if layer.layer is None else f"layer {layer.layer}"
        yield f"  {name:<9} kept {layer.kept:6.2f}   error {layer.error:6.2f}"
    if every.kept < _HALF:
        yield "less than half of the change survives: the adapter (--format peft) is the better export"
