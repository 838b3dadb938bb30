"""Random weights, module by module, so that a model far larger than memory in 16 bit can still be packed."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from moetune.compat.transformers import draw, mark_initialized
from moetune.errors import UserError


def realize(model: PreTrainedModel, path: str, device: torch.device) -> None:
    """Gives the own meta tensors of the module at `path` storage on `device` and draws them as its authors do.

    Raises:
        UserError: the model has no rule to initialise one of them.
    """
    module = model.get_submodule(path)
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    if not any(tensor.is_meta for _, tensor in own):
        return
    module.to_empty(device=device, recurse=False)
    floats = {
        name: tensor
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        if tensor.is_floating_point()
    }
    with torch.no_grad():
        for tensor in floats.values():
            tensor.fill_(torch.nan)  # what the rules leave out must not pass for a weight
        _draw(model, path)
    undrawn = [name for name, tensor in floats.items() if tensor.isnan().any()]
    if undrawn:
        raise UserError(
            f"{type(module).__name__} has no rule to draw {', '.join(undrawn)}; use model.weights=pretrained"
        )


def _draw(model: PreTrainedModel, path: str) -> None:
    """Draws a module's own tensors by its own rule or, where that leaves some out, by the one of a block around it."""
    module = model.get_submodule(path)
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    while True:
        holder = model.get_submodule(path)
        for tensor in (*holder.parameters(), *holder.buffers()):
            if not any(tensor is one for one in own):
                mark_initialized(tensor)
        draw(_owner(model, path), holder)
        if not path or not any(tensor.is_floating_point() and tensor.isnan().any() for tensor in own):
            return
        path = path.rpartition(".")[0]


def _owner(model: PreTrainedModel, path: str) -> PreTrainedModel:
    """The innermost transformers model around the module: its rules apply."""
    owner, module = model, model
    for name in path.split(".") if path else ():
        module = getattr(module, name)
        owner = module if isinstance(module, PreTrainedModel) else owner
    return owner
