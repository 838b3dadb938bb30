"""What a checkpoint holds beside tensors that train: Trainer's state, what experts have received, random states."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from moetune.adapt.build import Adapted
from moetune.documents import Amount, Number, read_json
from moetune.errors import UserError, one_line, shown
from moetune.optim.values import generator_states, set_generator_states
from moetune.training import checkpoint
from moetune.training.run_folder import step_of

LOAD_FILE = "expert_load.json"
"""Tokens that each expert of each layer has received since the run began."""


def _generators_file(checkpoint: Path, data_index: int) -> Path:
    """Random states of the ranks that see the same data."""
    return checkpoint / "generators" / f"{data_index}.safetensors"


def write_generators(folder: Path, data_index: int, device: torch.device) -> None:
    file = _generators_file(folder, data_index)
    file.parent.mkdir(exist_ok=True)
    save_file({str(n): state for n, state in enumerate(generator_states(device))}, file)


def read_generators(folder: Path, data_index: int, device: torch.device) -> None:
    """Random generators are as they were, if they were there."""
    file = _generators_file(folder, data_index)
    if file.is_file():
        states = load_file(file)
        set_generator_states([states[str(n)] for n in range(len(states))], device)


def write_state(folder: Path, state: TrainerState, load: Mapping[int, Tensor]) -> None:
    """Trainer's, without the intervals: on resume those of the run file hold; and the load by layer."""
    received = {str(layer): tokens.tolist() for layer, tokens in load.items()}
    (folder / LOAD_FILE).write_text(json.dumps(received), encoding="utf-8")
    without: Any = dict.fromkeys(("logging_steps", "eval_steps", "save_steps"))
    replace(state, **without).save_to_json(str(folder / TRAINER_STATE_NAME))


def check_checkpoint(folder: Path) -> None:
    """Raises `UserError` if a file of a checkpoint whose bytes are as they were is not what it should be."""
    with whole(str(folder)):
        for file in sorted(folder.glob("generators/*")):
            load_file(file)
        state, usual = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME)), TrainerState()
        for field in fields(TrainerState):
            value, default = getattr(state, field.name), getattr(usual, field.name)
            kind = (int, float) if isinstance(default, (int, float)) else type(default)
            if value is not None and default is not None and not isinstance(value, kind):
                raise ValueError(f"{TRAINER_STATE_NAME}: {field.name} is {shown(value)}")
        if state.global_step != step_of(folder):
            raise ValueError(f"{TRAINER_STATE_NAME} is of step {shown(state.global_step)}")
        checkpoint.check(folder)


def read_load(folder: Path, adapted: Adapted) -> dict[int, Tensor]:
    """By layer, the tokens that each expert had received at a checkpoint; raises what reading a damaged one does."""
    received = read_json(folder / LOAD_FILE, dict[Amount, list[Number]], LOAD_FILE)
    load = {layer: torch.tensor(tokens, device=adapted.model.device) for layer, tokens in received.items()}
    sizes = {layer.index: layer.shape.num_experts for layer in adapted.anatomy.moe_layers}
    if any(load_of.shape != (sizes.get(layer),) for layer, load_of in load.items()):
        raise ValueError(f"{LOAD_FILE} is of a model with other experts")
    return load


@contextmanager
def whole(folder: str) -> Iterator[None]:
    """Turns what reading a damaged checkpoint raises into a `UserError`. Nothing in one is ever executed."""
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # readers do not agree on one
        raise UserError(
            f"checkpoint {folder!r} is damaged: {one_line(error)}; resume from an earlier one with --resume PATH"
        ) from error
