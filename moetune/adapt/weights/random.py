"""Draw random weights module by module, quantizing on the way. The model in 16 bits need not fit in
memory."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moetune.adapt.layers.table import HostTable
from moetune.adapt.weights.target import LoadTarget
from moetune.compat.transformers import draw, mark_initialized
from moetune.errors import UserError
from moetune.run.names import stacks


def fill_randomly(target: LoadTarget, *, draws: bool = True) -> None:
    """Draw every weight with the initialization rules of the model's code, and quantize what stays frozen.

    On the meta device, or with `draws=False`, only replace modules by expert banks and quantized layers: weights stay
    on the meta device, except those of the banks, which are allocated on the target's device. Raises `UserError` if the
    model's code has no rule to initialize one of the tensors.
    """
    model, device = target.model, target.device if draws else torch.device("meta")
    target.make_banks()
    for path, layer in target.layers.items():
        realize(model, path, device)
        experts = model.get_submodule(path)
        for stack in stacks(layer):
            for expert in range(layer.shape.num_experts):
                target.put_expert(path, stack, expert, getattr(experts, stack)[expert].detach())
        target.install(path)
    for path in target.linears:
        realize(model, path, device)
        target.put_linear(path, model.get_parameter(f"{path}.weight").detach())
    embedding = model.get_input_embeddings()
    for path, module in list(model.named_modules()):
        realize(model, path, device)
        if module is embedding and device.type != "meta":
            model.tie_weights()  # so that a tied head is not drawn separately


def realize_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Allocate on `device` all tensors that are still on the meta device, and initialize them by the model's own code.

    Call it once the checkpoint is loaded: tensors left then are in no checkpoint, such as rotary frequencies. Does
    nothing if `device` is meta. Raises `UserError` if the model's code has no rule for one of the tensors.
    """
    for path, module in list(model.named_modules()):
        if any(tensor.is_meta for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            realize(model, path, device)


def realize(model: PreTrainedModel, path: str, device: torch.device) -> None:
    """Allocate a module's own meta tensors on `device`, and initialize them with the rules of the model's code.

    Does nothing if `device` is meta. Raises `UserError` if there is no rule for one of them.
    """
    module = model.get_submodule(path)
    own = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    if device.type == "meta" or not any(tensor.is_meta for tensor in own.values()):
        return
    fresh: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, tensor in own.items():
            if tensor.is_meta:
                if isinstance(module, HostTable) and name == "weight":
                    made = module.allocate(device)
                else:
                    made = torch.empty_like(tensor, device=device)
                fresh[name] = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
                setattr(module, name, fresh[name])
        floats = {name: tensor for name, tensor in fresh.items() if tensor.is_floating_point()}
        for tensor in floats.values():
            tensor.fill_(torch.nan)  # to detect what the rules do not initialize
        _draw(model, path, [*fresh.values()])
    undrawn = [name for name, tensor in floats.items() if tensor.isnan().any()]
    if undrawn:
        raise UserError(
            f"{type(module).__name__} has no rule to draw {', '.join(undrawn)}; use model.weights=pretrained"
        )


def _draw(model: PreTrainedModel, path: str, fresh: list[Tensor]) -> None:
    """Initialize the tensors `fresh` of the module at `path` by the module's own rule; those that the rule skips, by
    the rule of an enclosing module."""
    while True:
        holder = model.get_submodule(path)
        for tensor in (*holder.parameters(), *holder.buffers()):
            if not any(tensor is one for one in fresh):
                mark_initialized(tensor)
        draw(_owner(model, path), holder)
        if not path or not any(tensor.is_floating_point() and tensor.isnan().any() for tensor in fresh):
            return
        path = path.rpartition(".")[0]


def _owner(model: PreTrainedModel, path: str) -> PreTrainedModel:
    """Return the innermost `PreTrainedModel` that contains the module at `path`; its initialization rules apply."""
    owner, module = model, model
    for name in path.split(".") if path else ():
        module = getattr(module, name)
        owner = module if isinstance(module, PreTrainedModel) else owner
    return owner
