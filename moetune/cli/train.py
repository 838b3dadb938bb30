"""`moetune train`: fine-tune as a run file says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moetune.cli.imports import heavy_imports
from moetune.cli.options import Json, Overrides, read_run
from moetune.errors import DoesNotFit, counted


def train(
    run: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run file.", show_default=False)],
    resume: Annotated[
        str,
        typer.Option(
            metavar="auto|never|PATH",
            help="Continue from the newest checkpoint, from none, or from a checkpoints/step-N folder.",
        ),
    ] = "never",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run that is in the output.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check run file, data and output; train nothing, write nothing.")
    ] = False,
    set_: Overrides = None,
    json_: Json = False,
) -> None:
    """Fine-tune the parts of a model that a run file chooses; progress on stderr, the outcome on stdout. Exit code 1:
    memory ran out."""
    import sys

    from moetune.cli.ranks import exit_as_ranks
    from moetune.config.load import refuse_existing_run, refuse_missing_files
    from moetune.models.catalog.gpus import find_gpu
    from moetune.parallel.launch import is_quiet, was_launched

    config = read_run(run, set_)
    refuse_missing_files(config, run)
    if config.hardware.gpu is not None:
        find_gpu(config.hardware.gpu)
    if config.output is not None and resume == "never" and not overwrite and not was_launched():
        refuse_existing_run(Path(config.output))
    interrupted = "interrupted; --resume auto goes on from the last checkpoint"
    if config.parallel.ranks > 1 and not dry_run and not was_launched():
        with heavy_imports():
            from moetune.memory.closed_form.form import record_ahead
            from moetune.run.dtypes import this_device
            from moetune.run.resolve import resolve

        record_ahead(resolve(config, this_device()))
        exit_as_ranks(config.parallel.ranks, interrupted)

    import json
    from contextlib import nullcontext

    with heavy_imports():
        from moetune.parallel.join import joined
        from moetune.parallel.ranks import SINGLE_RANK
        from moetune.run.dtypes import this_device
        from moetune.training.interrupt import Interrupted
        from moetune.watch.train import train as run_training

    try:
        device = this_device()
        with nullcontext(SINGLE_RANK) if dry_run else joined(config.parallel, device) as ranks:
            result = run_training(config, resume=resume, overwrite=overwrite, dry_run=dry_run, ranks=ranks)
    except Interrupted as ended:
        if not is_quiet():
            print(interrupted, file=sys.stderr)
        raise typer.Exit(128 + ended.number) from None
    except KeyboardInterrupt:
        if not is_quiet():
            print(interrupted, file=sys.stderr)
        raise
    except DoesNotFit as error:
        if json_:
            print(json.dumps(error.found))
        raise
    if not ranks.is_first:
        return
    if json_:
        print(json.dumps(result.to_json()))
        return
    if dry_run:
        print(f"would train {result.trainable['total']:,} parameters into {result.output}")
        return
    print(f"{counted(result.steps, 'step')}, {result.trainable['total']:,} trained parameters, in {result.output}")
    if result.eval_loss_before is not None and result.eval_loss_after is not None:
        print(f"held-out loss {result.eval_loss_before:.4f} -> {result.eval_loss_after:.4f}")
    from moetune.watch.ending import ending

    for line in ending(Path(result.output)):
        print(line)
