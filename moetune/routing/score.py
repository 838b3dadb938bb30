"""`moetune score`: a forward pass over data sets counts what each expert receives.

For each expert, its tokens, routing weights and REAP score (mean of routing weight × norm of the expert's output, arXiv
2510.13999) are recorded, and how often it is chosen together with each other expert. The model computes as in training:
the same precision of the base, the same rows made of documents, experts on the host if the run file says so. Only the
decoder stack runs, because no logits are needed. Of n ranks with different data, each reads every n-th batch, and the
sums of all ranks, from which the scores follow (`RoutingSums`), are added.
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from moetune.adapt.attention import document_inputs
from moetune.adapt.build import Adapted, build, build_noting
from moetune.adapt.start_from.start import open_start
from moetune.atomic import NEW, aside, aside_of, publish, sweep, writing
from moetune.config.load import load_run_config
from moetune.config.schema import AdaptConfig, ChoiceConfig, RunConfig
from moetune.errors import UserError, raise_problems
from moetune.files import write_whole
from moetune.models.hub.fingerprint import Base
from moetune.parallel.ranks import SINGLE_RANK, Ranks
from moetune.report.console import terminal
from moetune.report.progress import counting, loading_progress
from moetune.routing.data_sets import RoutedData, read_sources
from moetune.routing.recorder import Recorder, documents_of
from moetune.run import validation
from moetune.run.dtypes import device_kind
from moetune.run.resolve import AnyRun, ResolvedRun, resolve
from moetune.run.scores import Scored, Scores, read_scores
from moetune.training.isolation import refuse_leaky_packing
from moetune.training.step.batch import Row, collate
from moetune.training.step.lm_head import split

TOKENS = 131_072


def to_score(config: RunConfig) -> RunConfig:
    """Return a configuration without choices of experts by scores, so that the model can be scored before they exist.

    Choices in `adapt.experts` and `adapt.lora.ids` are removed; in place of the latter, no expert has LoRA. If nothing
    is left in `adapt:`, all routers are set to train, because a configuration must train something; the scores do not
    depend on what trains. The engine becomes FSDP2 without offload: DeepSpeed shards a model through its optimizer, and
    scoring has none.
    """
    adapt, lora = config.adapt, config.adapt.lora
    if isinstance(adapt.experts, ChoiceConfig):
        adapt = adapt.but(experts=None)
    if lora is not None and isinstance(lora.ids, ChoiceConfig):
        rest = tuple(target for target in lora.targets if target != "experts")
        adapt = adapt.but(lora={"ids": "all", "targets": rest} if rest else None)
    if adapt.router == "none" and adapt.experts is None and adapt.lora is None and not adapt.also:
        adapt = AdaptConfig(router="all", start_from=adapt.start_from)
    return config.but(adapt=adapt, parallel={"engine": "fsdp2", "offload": "none", "deepspeed": None})


def refuse_dense(run: ResolvedRun) -> None:
    """Raise `UserError` if the model of a run has no experts, or is divided over the stages of a pipeline."""
    if run.config.parallel.pp > 1:
        raise UserError("parallel.pp: scoring runs whole models; set parallel.pp: 1, and fsdp to as many ranks")
    if not run.structure.moe_layers:
        raise UserError(f"{run.config.model.path!r} is a dense model: it has no experts to score")


def score(
    run: AnyRun,
    data: Sequence[str],
    tokens: int = TOKENS,
    out: Path | None = None,
    *,
    overwrite: bool = False,
    device: torch.device | str | None = None,
    console: Console | None = None,
    ranks: Ranks = SINGLE_RANK,
) -> Scores:
    """Run a model over data sets, and return statistics of the experts that its routers choose, for each layer.

    Args:
        run: a run file; or a resolved run, whose configuration must come from `to_score`.
        data: data sets: files or names as under `data.train`. Of several, the result also has the statistics of each.
        tokens: the number of tokens to read from each data set, padding not counted. Whole rows are read, in a random
            order seeded by `train.seed`.
        out: the file to write the scores to, when they are complete; None to write nothing.
        overwrite: replace earlier scores in `out`.
        device: by default the first device of the kind that the run is resolved for.
        console: where progress and notes are printed; by default stderr, of the first rank alone.
        ranks: the ranks of the run, of which this process is one.

    Raises:
        UserError: the model has no experts; the settings cannot be trained, or `parallel:` does not match the ranks;
            data, base or `adapt.start_from` cannot be read; with packing, the model's attention would mix documents; or
            `out` exists.
    """
    console = console or terminal(stderr=True, quiet=not ranks.is_first)
    if not isinstance(run, ResolvedRun):
        config = run if isinstance(run, RunConfig) else load_run_config(run)
        run = resolve(to_score(config), device_kind(device))
    config = run.config
    raise_problems(validation.untrainable_settings(config))
    if config.parallel.ranks != ranks.parallel.ranks:
        raise UserError(
            f"parallel: makes {config.parallel.ranks} ranks, but this process is one of {ranks.parallel.ranks}; start "
            "as many processes as there are ranks"
        )
    refuse_dense(run)
    if len(set(data)) < len(data):
        raise UserError("--data: a file is named twice")
    if out is not None:
        _refuse_output(out, overwrite)
    sources, padding = read_sources(run, data, tokens)
    adapted, base = load_base(run, run.device(device), console, ranks)
    content = None if base is None else base.fingerprint.content
    settings = _settings(config)
    with ExitStack() as stack:
        if out is not None and ranks.is_first:
            stack.enter_context(writing(out))
            stack.enter_context(aside(out))
        recorder = Recorder(adapted)
        record_batches(recorder, adapted, sources, padding, console)
        recorder.sums = recorder.total(ranks)
        scores = _scores(recorder, sources, config.model.path, content, settings)
        if out is not None and ranks.is_first:
            write_whole(aside_of(out) / NEW, scores.to_text())
            publish(out)
    return scores


def load_base(
    run: ResolvedRun, device: torch.device, console: Console, ranks: Ranks = SINGLE_RANK
) -> tuple[Adapted, Base | None]:
    """Build the model of a run with the weights that training starts from, `adapt.start_from` included.

    Also return the name and fingerprint of its base, None for random weights. Progress and notes go to `console`.

    Raises:
        UserError: the weights cannot be read; or with packing, the model's attention would mix documents of a row.
    """
    config = run.config
    start = open_start(build(run, "meta")) if config.adapt.start_from is not None else None
    weights = run.model.source.folder if config.model.weights == "pretrained" else None
    with loading_progress(console, weights) as on_read:
        adapted, base = build_noting(run, device, on_read, ranks)
    for note in start.load(adapted, base) if start is not None else ():
        console.print(f"{config.adapt.start_from}: {note}")
    if config.packs:
        refuse_leaky_packing(adapted.model, config.train.micro_batch, config.train.sequence_length)
    return adapted, base


def record_batches(
    recorder: Recorder, adapted: Adapted, sources: Sequence[RoutedData], padding: int, console: Console
) -> None:
    """Run all batches of `train.micro_batch` rows, and remove the recorder's hooks.

    All ranks run the same number of batches, because they compute together: one that has a batch fewer runs the last
    one again, without recording it.

    Args:
        sources: the data sets, which are read one after the other; a batch holds rows of one of them.
        padding: id of the padding token.
    """
    ranks, size = adapted.ranks, adapted.run.config.train.micro_batch
    adapted.model.eval()
    plan = [(number, at) for number, source in enumerate(sources) for at in range(0, len(source.rows), size)]
    try:
        with counting(console, "scoring", len(plan)) as advance, torch.no_grad():
            for first in range(0, len(plan), ranks.data_size):
                mine = first + ranks.data_index
                number, at = plan[min(mine, len(plan) - 1)]
                source = sources[number]
                rows = [source.row(index) for index in range(at, min(at + size, len(source.rows)))]
                record_batch(recorder, adapted, rows, padding, number, mine, counts=mine < len(plan))
                advance(min(ranks.data_size, len(plan) - first))
    finally:
        recorder.remove()


def record_batch(
    recorder: Recorder,
    adapted: Adapted,
    rows: Sequence[Row],
    padding: int,
    source: int,
    number: int,
    *,
    counts: bool = True,
    at_least: int = 0,
) -> None:
    """Run one batch of rows through the decoder stack, and record it unless `counts` is False.

    Args:
        padding: id of the padding token.
        source, number: index of the data set, and index of the batch in the whole pass.
        at_least: tokens to which each row is padded, if no row of the batch is longer.
    """
    model = adapted.model
    batch = collate(rows, padding, at_least=at_least, document_inputs=document_inputs(model))
    batch = {name: value.to(model.device) if isinstance(value, Tensor) else value for name, value in batch.items()}
    inputs = {name: value for name, value in batch.items() if name not in ("labels", "is_token")}
    with recorder.batch(batch, documents_of(rows), source, number, counts=counts), split(model, inputs):
        pass


def _scores(
    recorder: Recorder, sources: Sequence[RoutedData], model: str, base: str | None, settings: dict[str, Any]
) -> Scores:
    """Return the content of `scores.json` after a whole pass.

    `model` is `model.path`; `base` the digest of the checkpoint, None for random weights; `settings` are those
    of the run that influence the scores, as JSON values.
    """
    layers = recorder.scores(list(range(len(sources))))
    data = [
        Scored(
            name=source.name,
            digest=source.digest,
            rows=len(source.rows),
            tokens=recorder.count(number, "all"),
            loss_tokens=recorder.count(number, "loss"),
            layers=recorder.scores([number]) if len(sources) > 1 else None,
        )
        for number, source in enumerate(sources)
    ]
    return Scores.model_validate(
        {
            "schema": 1,
            "model": model,
            "base": base,
            "run": settings,
            "data": data,
            "tokens": sum(scored.tokens for scored in data),
            "loss_tokens": sum(scored.loss_tokens for scored in data),
            "expert_load": {index: layer.all.tokens for index, layer in layers.items()},
            "layers": layers,
        }
    )


def _settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings that influence the scores, as key -> JSON value: the entry `run` of `scores.json`."""
    return {
        "model": config.model.model_dump(mode="json", exclude={"path", "experts_on", "embeddings_on"}),
        "start_from": config.adapt.start_from,
        "packing": config.packs,
        **{key: getattr(config.train, key) for key in ("sequence_length", "micro_batch", "seed")},
    }


def _refuse_output(out: Path, overwrite: bool) -> None:
    """Raise `UserError` unless scores can be written to `out`.

    The folder must exist. The file must not, unless `overwrite` is set and it holds scores and is no symbolic link.
    """
    sweep(out)
    if os.path.lexists(out):
        if not overwrite:
            raise UserError(f"--out {str(out)!r} exists; replace it with --overwrite, or choose another")
        if out.is_symlink():
            raise UserError(f"--out {str(out)!r} is a symbolic link; give the file that it points to, or another")
        read_scores(out, "--overwrite replaces scores only: --out")
    if not out.absolute().parent.is_dir():
        raise UserError(f"--out {str(out)!r}: there is no folder {str(out.absolute().parent)!r}")
