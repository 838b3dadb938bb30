"""The `train` command's work: everything that can be wrong is found before a weight is loaded or a file is written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from moetune.adapt.build import build, count_trainable
from moetune.anatomy.source import resolve
from moetune.config import RunConfig, require
from moetune.errors import UserError
from moetune.train.data import load_data, pad_token_id
from moetune.train.isolation import refuse_leaky_packing
from moetune.train.progress import ProgressBar
from moetune.train.run_folder import RunFolder
from moetune.train.trainer import MoeTrainer


@dataclass(frozen=True)
class TrainResult:
    """What a run did. Losses are None without `data.eval`; a dry run has taken no step."""

    output: str
    steps: int
    trainable: dict[str, int]
    train_tokens: int
    eval_loss_before: float | None
    eval_loss_after: float | None

    def to_json(self) -> dict[str, Any]:
        return {"schema": 1, **self.__dict__}


def train(
    config: RunConfig,
    *,
    resume: str = "never",
    overwrite: bool = False,
    dry_run: bool = False,
    device: torch.device | str | None = None,
    console: Console | None = None,
) -> TrainResult:
    """Trains what the run file says and leaves the result in its run folder.

    Args:
        resume: `never`, `auto` or a checkpoint folder.
        dry_run: check run file, data and output, count what would train, and stop.
        device: CUDA if there is any, else the CPU.

    Raises:
        UserError: anything that the user can mend. No file has been written then.
    """
    console = console or Console(stderr=True)
    require(config, "train", "data", "output")
    assert config.data is not None
    assert config.output is not None
    folder = RunFolder(Path(config.output))
    checkpoint = folder.check(config, resume, overwrite)
    counts = count_trainable(config)
    tokenizer = _tokenizer(config)
    data = load_data(config.data, tokenizer, config.train)
    tokens = sum(len(row) for row in data.train["input_ids"])
    _announce(console, config, counts, tokens)
    if dry_run:
        return TrainResult(config.output, 0, counts, tokens, None, None)

    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    adapted = build(config, device)
    if config.data.packing:
        rows = max(config.train.micro_batch, config.train.eval_micro_batch or 0)
        refuse_leaky_packing(adapted.model, rows)
    folder.create(config, checkpoint, overwrite)
    trainer = MoeTrainer(adapted, config, data, folder, pad_token_id(tokenizer), callbacks=[ProgressBar(console)])
    if checkpoint is not None:
        console.print(f"resuming from {checkpoint}", highlight=False)
        trainer.args.eval_on_start = False
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    held_out = [line["eval_loss"] for line in folder.metrics() if "eval_loss" in line]
    before, after = (held_out[0], held_out[-1]) if held_out else (None, None)
    return TrainResult(config.output, trainer.state.global_step, counts, tokens, before, after)


def _tokenizer(config: RunConfig) -> PreTrainedTokenizerBase:
    source = resolve(config.model.path)
    try:
        return AutoTokenizer.from_pretrained(source.folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"the tokenizer of {source.name!r} cannot be loaded from {source.folder!r}: {reason}"
        ) from error


def _announce(console: Console, config: RunConfig, counts: dict[str, int], tokens: int) -> None:
    parts = ", ".join(f"{part} {count:,}" for part, count in counts.items() if part != "total" and count)
    console.print(f"{config.model.path}: trains {counts['total']:,} parameters ({parts})", highlight=False)
    console.print(f"data: {tokens:,} training tokens", highlight=False)
