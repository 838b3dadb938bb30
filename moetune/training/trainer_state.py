"""What a checkpoint holds beside tensors that train: the step, expert load, states of random generators."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Required

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typing_extensions import TypedDict

from moetune.adapt.build import Adapted
from moetune.documents import Amount, Number
from moetune.errors import UserError, one_line
from moetune.training import checkpoint
from moetune.training.optim.values import generator_states, set_generator_states
from moetune.training.run_folder import step_of

STATE_FILE = "trainer_state.json"
"""The step, rows of a micro-batch and tokens trained on, by transformers' names."""
LOAD_FILE = "expert_load.json"
"""Tokens that each expert of each layer has received since the run began."""


class _State(TypedDict, total=False):
    global_step: Required[Amount]
    train_batch_size: Amount | None
    num_input_tokens_seen: Amount | None


def write_generators(folder: Path, data_index: int, device: torch.device) -> None:
    """Write the states of this rank's generators, which are those of all ranks that see the same data."""
    file = folder / "generators" / f"{data_index}.safetensors"
    file.parent.mkdir(exist_ok=True)
    save_file({str(n): state for n, state in enumerate(generator_states(device))}, file)


def read_generators(folder: Path, data_index: int, device: torch.device) -> None:
    """Restore the generators' states; a rank that the checkpoint does not have keeps its own."""
    file = folder / "generators" / f"{data_index}.safetensors"
    if file.is_file():
        states = load_file(file)
        set_generator_states([states[str(n)] for n in range(len(states))], device)


def write_state(folder: Path, step: int, micro_batch: int, tokens: int, load: Mapping[int, Tensor]) -> None:
    """Write the step, the rows of a micro-batch, the tokens trained on, and expert load by layer."""
    received = {str(layer): tokens_E.tolist() for layer, tokens_E in load.items()}
    (folder / LOAD_FILE).write_text(json.dumps(received), encoding="utf-8")
    state = {"global_step": step, "train_batch_size": micro_batch, "num_input_tokens_seen": tokens}
    (folder / STATE_FILE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")


def read_state(folder: Path) -> tuple[int, int | None, int]:
    """Return the step, the rows of a micro-batch if they are known, and the tokens trained on."""
    state = checkpoint.read_part(folder, STATE_FILE, _State)
    if state["global_step"] != step_of(folder):
        raise ValueError(f"{STATE_FILE} is of step {state['global_step']}")
    return state["global_step"], state.get("train_batch_size"), state.get("num_input_tokens_seen") or 0


def read_load(folder: Path, adapted: Adapted) -> dict[int, Tensor]:
    """Return expert load [E] by layer, on the model's device."""
    received = checkpoint.read_part(folder, LOAD_FILE, dict[Amount, list[Number]])
    load = {layer: torch.tensor(tokens, device=adapted.model.device) for layer, tokens in received.items()}
    sizes = {layer.index: layer.shape.num_experts for layer in adapted.structure.moe_layers}
    if any(load_of.shape != (sizes.get(layer),) for layer, load_of in load.items()):
        raise ValueError(f"{LOAD_FILE} is of a model with other experts")
    return load


def check_checkpoint(folder: Path) -> None:
    """Raise `UserError` if a file is not what it should be, in a checkpoint whose bytes are as they were written."""
    with whole(folder):
        for file in sorted(folder.glob("generators/*")):
            load_file(file)
        read_state(folder)
        checkpoint.check(folder)


@contextmanager
def whole(folder: Path) -> Iterator[None]:
    """Turn whatever reading a damaged checkpoint raises into a `UserError`. Nothing in one is ever executed."""
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # readers do not agree on one
        raise UserError(
            f"checkpoint {str(folder)!r} is damaged: {one_line(error)}; resume from an earlier one with --resume PATH"
        ) from error
