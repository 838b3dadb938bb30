"""`moetune train`: check options, start the ranks, call watch/train.py, print the result."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

from moetune.cli import options as cli
from moetune.config.load import load_run_config, refuse_existing_run, refuse_missing_files
from moetune.errors import DoesNotFit, counted


def train(
    run: cli.RunFile,
    resume: Annotated[
        str,
        cli.option(
            "auto|never|PATH", "Continue from the newest checkpoint, from none, or from a checkpoints/step-N folder."
        ),
    ] = "never",
    overwrite: cli.Overwrite = False,
    dry_run: Annotated[
        bool, cli.flag("--dry-run", "Check run file, data and output; train nothing, write nothing.")
    ] = False,
    set_: cli.Overrides = None,
    json_: cli.Json = False,
) -> None:
    """Fine-tune the parts of a model that a run file chooses; progress on stderr, result on stdout. Exit code 1: memory
    ran out."""
    from moetune.cli.start_on_ranks import on_ranks, starts_ranks
    from moetune.parallel.start_ranks import was_launched

    config = cli.read_run(run, set_)
    refuse_missing_files(config, run)
    for name in config.hardware.names:
        cli.known_gpu(name)
    if config.output is not None and resume == "never" and not overwrite and not was_launched():
        refuse_existing_run(Path(config.output))
    with cli.heavy_imports():
        import torch

        from moetune.parallel.ranks import SINGLE_RANK
        from moetune.planning.settle import settled_on, with_stages
        from moetune.run.dtypes import this_device
        from moetune.run.keeps import is_open
        from moetune.run.resolve import resolve
        from moetune.watch.ending import ending
        from moetune.watch.memory_record import add_predictions
        from moetune.watch.train import train as run_training

    options: list[str] = []
    before = Path(str(config.output)) / "run.yaml"
    continues = resume != "never" and before.exists()
    if config.parallel.pp > 1 and config.parallel.stages == "auto" and not dry_run:
        config = with_stages(config, this_device(), load_run_config(before).parallel if continues else None)
        options = [f"--set=parallel.stages={json.dumps(config.parallel.stages)}"]
    if starts_ranks(config.parallel) and not dry_run:
        whole = resolve(config, this_device())
        if is_open(config.train) and config.hardware.names and not continues:
            whole = settled_on(whole, torch.device(this_device()))
            chosen = whole.config.train.model_dump(mode="json", include={"checkpointing", "keep_rows", "expert_memory"})
            options += [f"--set=train.{key}={json.dumps(value)}" for key, value in chosen.items()]
    resumes = "--resume auto continues from the last checkpoint"
    try:
        with nullcontext(SINGLE_RANK) if dry_run else on_ranks(config.parallel, resumes, options) as ranks:
            result = run_training(config, resume=resume, overwrite=overwrite, dry_run=dry_run, ranks=ranks)
    except DoesNotFit as error:
        if json_:
            print(json.dumps(error.found))
        raise
    if not ranks.is_first:
        return
    if not (ranks.is_single or dry_run):
        add_predictions(Path(result.output))
    total = f"{result.trainable['total']:,}"
    shown = [f"{counted(result.steps, 'step')}, {total} trained parameters, in {result.output}"]
    if dry_run:
        shown = [f"would train {total} parameters into {result.output}"]
    if result.eval_loss_before is not None and result.eval_loss_after is not None:
        shown.append(f"held-out loss {result.eval_loss_before:.4f} -> {result.eval_loss_after:.4f}")
    cli.answer(json_, result.to_json(), *shown, *(() if dry_run else ending(Path(result.output))))
