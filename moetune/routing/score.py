"""`moetune score`: one pass through a base over data, and what its routers did with it.

The pass is that of training: the same base precision, the same way to make rows of documents, experts on the host if
the run file says so. It runs the decoder stack alone, because no logits are needed. It can be interrupted: what was
added up so far lies beside the output, and the same command goes on from there. Of several ranks, each that sees data
of its own reads every so many-th batch, and what they have counted is added up.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as as_safetensors
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from moetune.adapt.attention import wants_cu_seqlens
from moetune.adapt.build import Adapted, build
from moetune.adapt.start_from.start import open_start
from moetune.adapt.weights.base import build_noting
from moetune.config.load import load_run_config
from moetune.config.schema import (
    AdaptConfig,
    ChoiceConfig,
    DataConfig,
    HardwareConfig,
    ParallelConfig,
    RunConfig,
    data_sets,
)
from moetune.errors import UserError
from moetune.files import write_whole
from moetune.parallel.ranks import SINGLE_RANK, Ranks
from moetune.report.console import terminal
from moetune.report.progress import reading
from moetune.routing.recorder import Recorder, Sums, documents_of
from moetune.run import validation
from moetune.run.dtypes import kind_of
from moetune.run.resolve import AnyRun, ResolvedRun, raise_problems, resolve
from moetune.run.scores import Scored, Scores, read_scores
from moetune.training.data.load import load_data, pad_token_id, refuse_unknown_tokens, tokenizer_of
from moetune.training.isolation import refuse_leaky_packing
from moetune.training.step.batch import Row, collate
from moetune.training.step.lm_head import split

TOKENS = 131_072
SAVE_SECONDS = 60.0


@dataclass(frozen=True)
class Source:
    """The rows of one data set that are read, in the order in which they are."""

    name: str
    rows: datasets.Dataset
    digest: str


def to_score(config: RunConfig) -> RunConfig:
    """The run as it is scored: of `adapt:` what does not depend on the scores. Where that leaves nothing, the routers
    stand in; what trains changes nothing that is counted. Ranks share the model as FSDP2 does: DeepSpeed shares it with
    its optimizer, and here there is none."""
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
    """Raises `UserError` if there is nothing to score."""
    if not run.structure.moe_layers:
        raise UserError(f"{run.config.model.path!r} is a dense model: it has no experts to score")


def on_one_rank(config: RunConfig) -> RunConfig:
    """The run without the others."""
    return config.but(parallel=ParallelConfig(), hardware=HardwareConfig(gpu=config.hardware.gpu))


def score(
    run: AnyRun,
    data: Sequence[str],
    tokens: int = TOKENS,
    out: Path | None = None,
    *,
    overwrite: bool = False,
    device: torch.device | str | None = None,
    console: Console | None = None,
    save_seconds: float = SAVE_SECONDS,
    on_batch: Callable[[int], None] = lambda done: None,
    ranks: Ranks = SINGLE_RANK,
) -> Scores:
    """Scores a base on data.

    Args:
        run: if it is resolved, that of `to_score`.
        data: files or names as under `data.train`; each is one source.
        tokens: of each source, padding left out; whole rows are read until there are as many, in an order that
            `train.seed` draws.
        out: where the scores are written, whole or not at all; what is needed to go on lies beside it until then.
        on_batch: is told after each batch, of all ranks, how many are done.
        ranks: the ranks of the run, of which this process is one.

    Raises:
        UserError: the model is dense; the layout cannot be trained, or is not that of the ranks; data, base or
            `adapt.start_from` cannot be read, or documents would see each other; the output exists.
    """
    console = console or terminal(stderr=True, quiet=not ranks.is_first)
    if not isinstance(run, ResolvedRun):
        config = run if isinstance(run, RunConfig) else load_run_config(run)
        run = resolve(to_score(config), kind_of(device))
    device = run.device(device)
    config = run.config
    raise_problems(validation.untrainable_settings(config))
    if config.parallel.ranks != ranks.parallel.ranks:
        raise UserError(
            f"parallel: makes {config.parallel.ranks} ranks, and this process is one of {ranks.parallel.ranks}"
        )
    refuse_dense(run)
    if len(set(data)) < len(data):
        raise UserError("--data: a file is named twice")
    if out is not None:
        _refuse_output(out, overwrite)
    start = open_start(build(run, "meta")) if config.adapt.start_from is not None else None
    sources, padding = read_sources(run, data, tokens)
    weights = run.model.source.folder if config.model.weights == "pretrained" else None
    with reading(console, weights) as on_read:
        adapted, base = build_noting(run, device, on_read, ranks)
    for note in start.load(adapted, base) if start is not None else ():
        console.print(f"{config.adapt.start_from}: {note}", highlight=False, soft_wrap=True)
    if config.packs:
        refuse_leaky_packing(adapted.model, config.train.micro_batch, config.train.sequence_length)
    content = None if base is None else base.fingerprint.content
    about = _about(config)
    begun = _Begun(out, {"base": content, "data": [source.digest for source in sources], "run": about})
    recorder = Recorder(adapted, begun.read(adapted.model.device) if ranks.is_first else None)
    saved = time.monotonic()

    def save(done: int) -> None:
        nonlocal saved
        if ranks.any(time.monotonic() - saved >= save_seconds):
            total = recorder.total(ranks)
            if ranks.is_first:
                begun.write(total)
            saved = time.monotonic()
        on_batch(done)

    try:
        record(recorder, adapted, sources, padding, console, save)
    except KeyboardInterrupt:
        if ranks.is_single:  # others may be elsewhere; what was saved last stays
            begun.write(recorder.sums)
        raise
    recorder.sums = recorder.total(ranks)
    scores = _scores(recorder, sources, config.model.path, content, about)
    if out is not None and ranks.is_first:
        _write(out, scores.to_text())
        begun.remove()
    return scores


def record(
    recorder: Recorder,
    adapted: Adapted,
    sources: Sequence[Source],
    padding: int,
    console: Console,
    on_batch: Callable[[int], None] = lambda done: None,
) -> None:
    """Lets the model read what the recorder has not yet; its hooks go with the last batch.

    Ranks run each batch together: those that would have one less read the last one again, and count nothing of it.
    """
    ranks, size = adapted.ranks, adapted.run.config.train.micro_batch
    done = max(ranks.gather(recorder.done))
    adapted.model.eval()
    plan = [(number, at) for number, source in enumerate(sources) for at in range(0, len(source.rows), size)]
    if done:
        console.print(f"going on after {done} of {len(plan)} batches", highlight=False)
    try:
        with _bar(console, len(plan), done) as advance, torch.no_grad():
            for first in range(done, len(plan), ranks.data_size):
                mine = first + ranks.data_index
                number, at = plan[min(mine, len(plan) - 1)]
                rows = sources[number].rows
                some = [_row(rows, index) for index in range(at, min(at + size, len(rows)))]
                read(recorder, adapted, some, padding, number, mine, counts=mine < len(plan))
                ended = min(first + ranks.data_size, len(plan))
                advance(ended - first)
                on_batch(ended)
    finally:
        recorder.remove()


def read(
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
    """One batch: its rows go through the decoder stack.

    Args:
        source, number: as in `Recorder.batch`.
        counts: whether it is recorded.
        at_least: tokens that rows are padded to.
    """
    model = adapted.model
    batch = collate(rows, padding, at_least=at_least, documents_by_cu_seqlens=wants_cu_seqlens(model))
    batch = {name: _on(value, model.device) for name, value in batch.items()}
    inputs = {name: value for name, value in batch.items() if name not in ("labels", "is_token")}
    recording = recorder.batch(batch, documents_of(rows), source, number) if counts else recorder.nothing()
    with recording, split(model, inputs):
        pass


def _scores(
    recorder: Recorder, sources: Sequence[Source], model: str, base: str | None, about: dict[str, Any]
) -> Scores:
    numbers = list(range(len(sources)))
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
            "run": about,
            "data": data,
            "tokens": sum(one.tokens for one in data),
            "loss_tokens": sum(one.loss_tokens for one in data),
            "expert_load": recorder.load(),
            "layers": recorder.scores(numbers),
        }
    )


# --- Data ---------------------------------------------------------------------------------------------------------


def _about(config: RunConfig) -> dict[str, Any]:
    """What of a run file decides about the result."""
    return {
        "model": config.model.model_dump(mode="json", exclude={"path", "experts_on"}),
        "start_from": config.adapt.start_from,
        "packing": config.packs,
        **{key: getattr(config.train, key) for key in ("sequence_length", "micro_batch", "seed")},
    }


def read_sources(run: ResolvedRun, data: Sequence[str], tokens: int) -> tuple[list[Source], int]:
    """Raises `UserError` with what is wrong with any of them."""
    tokenizer = tokenizer_of(run.model.source.name, run.model.source.folder)
    sources, problems = [], []
    for name in data:
        try:
            sources.append(read_source(run.config, name, tokenizer, tokens))
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    return sources, _padding(run, tokenizer, sources)


def read_source(config: RunConfig, name: str, tokenizer: PreTrainedTokenizerBase, tokens: int) -> Source:
    """Rows of one data set with at least so many tokens, or all there are."""
    how = {} if config.data is None else config.data.model_dump(exclude={"train", "eval", "validation"})
    data = DataConfig.model_validate({**how, "train": name})
    return some_of(name, load_data(data, tokenizer, config.train).train, config, tokens)


def held_out_source(run: ResolvedRun, tokens: int) -> tuple[Source, int]:
    """The same of the run's own held-out data."""
    config, source = run.config, run.model.source
    tokenizer = tokenizer_of(source.name, source.folder)
    assert config.data is not None
    rows = load_data(config.data, tokenizer, config.train).eval
    assert rows is not None
    held_out = some_of("held-out data", rows, config, tokens)
    return held_out, _padding(run, tokenizer, [held_out])


def _padding(run: ResolvedRun, tokenizer: PreTrainedTokenizerBase, sources: Sequence[Source]) -> int:
    """The token that pads; raises `UserError` if the model does not know it, or one of the data's."""
    padding = pad_token_id(tokenizer)
    refuse_unknown_tokens(run.model.settings, run.config.model.path, padding, *(one.rows for one in sources))
    return padding


def some_of(name: str, rows: datasets.Dataset, config: RunConfig, tokens: int) -> Source:
    """As many rows, in an order that the run's seed draws, as have so many tokens."""
    order = np.random.default_rng(config.train.seed).permutation(len(rows))
    chosen, digest, count = [], hashlib.sha256(), 0
    for index in order.tolist():
        if count >= tokens:
            break
        row = _row(rows, index)
        chosen.append(index)
        count += int(row["is_token"].sum()) if "is_token" in row else len(row["input_ids"])
        for key in sorted(row):
            digest.update(key.encode() + row[key].astype("<i4").tobytes())
    return Source(name, rows.select(chosen), digest.hexdigest())


def names_of(config: RunConfig) -> list[str]:
    """The data sets that a run trains on."""
    return [] if config.data is None else [name for name, _ in data_sets(config.data.train)]


def _row(rows: datasets.Dataset, index: int) -> dict[str, np.ndarray]:
    return {name: np.asarray(value, np.int64) for name, value in rows[index].items()}


def _on(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


# --- Files --------------------------------------------------------------------------------------------------------


class _Begun:
    """What was added up before an interruption, beside the output: safetensors, and in their metadata of what.

    Args:
        of: the base, the data and the settings; sums of anything else are not gone on with.
    """

    def __init__(self, out: Path | None, of: dict[str, Any]) -> None:
        self.file = None if out is None else out.with_name(f".{out.name}.begun")
        self._of = json.dumps(of, sort_keys=True)

    def read(self, device: torch.device) -> Sums:
        if self.file is None or not os.path.lexists(self.file):
            return {}
        try:
            with safe_open(self.file, "pt") as held:
                if (held.metadata() or {})["of"] != self._of:
                    return {}
                return {name: held.get_tensor(name).to(device) for name in held.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, KeyError):
            raise UserError(f"{str(self.file)!r} is in the way: a scoring keeps its sums there; move it away") from None

    def write(self, sums: Sums) -> None:
        if self.file is not None:
            held = {name: value.contiguous().cpu() for name, value in sums.items()}
            try:
                write_whole(self.file, as_safetensors(held, {"of": self._of}))
            except OSError as error:
                raise UserError(f"{str(self.file)!r} cannot be written: {error.strerror or error}") from error

    def remove(self) -> None:
        if self.file is not None:
            self.file.unlink(missing_ok=True)


def _refuse_output(out: Path, overwrite: bool) -> None:
    if os.path.lexists(out):
        if not overwrite:
            raise UserError(f"--out {str(out)!r} exists; replace it with --overwrite, or choose another")
        if out.is_symlink():
            raise UserError(f"--out {str(out)!r} is a link; name what it points to, or choose another")
        read_scores(out, "--overwrite replaces scores only: --out")
    if not out.absolute().parent.is_dir():
        raise UserError(f"--out {str(out)!r}: there is no folder {str(out.absolute().parent)!r}")


def _write(out: Path, text: str) -> None:
    try:
        write_whole(out, text)
    except OSError as error:
        raise UserError(f"--out {str(out)!r} cannot be written: {error.strerror}") from error


@contextmanager
def _bar(console: Console, total: int, done: int) -> Iterator[Callable[[int], None]]:
    """A bar of the batches, on a terminal."""
    if not console.is_terminal:
        yield lambda batches: None
        return
    columns = (TextColumn("scoring"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("score", total=total, completed=done)
        yield lambda batches: bar.advance(task, batches)
