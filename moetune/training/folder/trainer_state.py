"""A run's state in a checkpoint besides tensors: step, tokens, expert load, random generators."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typing_extensions import TypedDict

from moetune.adapt.build import Adapted
from moetune.errors import UserError, one_line
from moetune.json_files import Amount, Number
from moetune.training.folder import checkpoint
from moetune.training.folder.run_folder import step_of
from moetune.training.optim.values import generator_states, set_generator_states

STATE_FILE = "trainer_state.json"
"""Number of updates, rows per micro-batch and tokens trained on, under the names that transformers' Trainer uses."""
LOAD_FILE = "expert_load.json"
"""Layer index -> list of the E numbers of tokens that each expert has received since the run began."""


class _State(TypedDict):
    global_step: Amount
    train_batch_size: Amount
    num_input_tokens_seen: Amount


def write_generators(folder: Path, generator: int, device: torch.device) -> None:
    """Write the states of the CPU's and the GPU's random generators to `generators/<generator>.safetensors` in a
    checkpoint folder.

    Ranks with the same `Ranks.generator` have equal states: call this on one of them.
    """
    file = folder / "generators" / f"{generator}.safetensors"
    file.parent.mkdir(exist_ok=True)
    save_file({str(n): state for n, state in enumerate(generator_states(device))}, file)


def read_generators(folder: Path, generator: int, device: torch.device) -> None:
    """Restore the states that `write_generators` wrote; without a file for this `generator`, as with other ranks, they
    stay as they are."""
    file = folder / "generators" / f"{generator}.safetensors"
    if file.is_file():
        states = load_file(file)
        set_generator_states([states[str(n)] for n in range(len(states))], device)


def write_state(folder: Path, step: int, micro_batch: int, tokens: int, load: Mapping[int, Tensor]) -> None:
    """Write `trainer_state.json` and `expert_load.json` into a checkpoint folder.

    Args:
        step, tokens, load: updates, tokens without padding, and layer index -> tokens [E], since the run began.
        micro_batch: current rows per micro-batch.
    """
    received = {str(layer): tokens_E.tolist() for layer, tokens_E in load.items()}
    (folder / LOAD_FILE).write_text(json.dumps(received), encoding="utf-8")
    state = {"global_step": step, "train_batch_size": micro_batch, "num_input_tokens_seen": tokens}
    (folder / STATE_FILE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")


def read_state(folder: Path) -> tuple[int, int, int]:
    """Return the step, the rows per micro-batch and the tokens trained on.

    Raises:
        UserError: `trainer_state.json` is damaged.
        ValueError: the step is not the one in the name of the checkpoint folder.
    """
    state = checkpoint.read_part(folder, STATE_FILE, _State)
    if state["global_step"] != step_of(folder):
        raise ValueError(f"{STATE_FILE} is of step {state['global_step']}")
    return state["global_step"], state["train_batch_size"], state["num_input_tokens_seen"]


def read_total_load(folder: Path, adapted: Adapted) -> dict[int, Tensor]:
    """Return the expert load since the run began, layer index -> tokens [E], on the model's device.

    Raises:
        UserError: `expert_load.json` is damaged.
        ValueError: the model has other layers or another number of experts.
    """
    received = checkpoint.read_part(folder, LOAD_FILE, dict[Amount, list[Number]])
    load = {layer: torch.tensor(tokens, device=adapted.model.device) for layer, tokens in received.items()}
    sizes = {layer.index: layer.shape.num_experts for layer in adapted.run.structure.moe_layers}
    if any(load_of.shape != (sizes.get(layer),) for layer, load_of in load.items()):
        raise ValueError(f"{LOAD_FILE} is of a model with other experts")
    return load


@contextmanager
def refusing_damage(folder: Path) -> Iterator[None]:
    """Turn exceptions of the body into a `UserError` that the checkpoint is damaged.

    `UserError` and `torch.OutOfMemoryError` pass unchanged.
    """
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # each library's reader raises its own exceptions
        raise UserError(
            f"checkpoint {str(folder)!r} is damaged: {one_line(error)}; resume from an earlier one with --resume PATH"
        ) from error
