"""`dry_run`: a forward pass without values finds settings of config.json that do not fit.

What a configuration divides by, splits at and chooses among shows only when the model runs. Here a copy of it, with one
of identical layers and without experts, runs on fake tensors, in some hundredths of a second. All problems of shapes
are found so, whatever the architecture.
"""

import copy
import inspect
import re
import traceback
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from moetune.compat.fake_mode import QuickFakeMode, without_fake_reports
from moetune.compat.transformers import fix_rotary_length, without_packages
from moetune.errors import UserError, one_line, shown
from moetune.models.moe import is_experts
from moetune.models.stack import decoder_layers, every_layer, leave_out, made_alike

_TOKENS = 13
"""Tokens of the pass: prime, because a wrong size may divide a number of tokens where it does not divide another."""
_NEXT_TOKENS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Names of the number of layers that predict further tokens; lists with an entry for each layer may cover them."""
_MOST_SIDE = 2**31
"""Size from which a tensor's axis is no model's: kernels count with 32 bits."""


class _Counted(list[Any]):
    """A list of a configuration that remembers which of its entries a model asks for by their numbers."""

    name = ""

    def __getitem__(self, at: Any) -> Any:
        vars(self).setdefault("asked", set()).add(at if isinstance(at, int) else None)
        if isinstance(at, int) and at >= len(self):
            raise IndexError(f"{self.name} has {len(self)} entries, and entry {at + 1} is asked for")
        return super().__getitem__(at)

    def __hash__(self) -> int:  # type: ignore[override]  # pytrees take it for a value, which may be part of a key
        return len(self)


def count_lists(config: PretrainedConfig) -> None:
    """Replace the lists of a configuration by ones from which `dry_run` tells those that have an entry for
    each layer."""
    settings = vars(config.get_text_config())
    for name, value in settings.items():
        if type(value) is list:
            settings[name] = _Counted(value)
            settings[name].name = name


def shortened(plain: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model that runs one of identical decoder layers, whose experts return what they are given."""
    kinds = made_alike(plain)
    first = {kind: path for path, kind in reversed(kinds.items())}
    numbered = enumerate(every_layer(plain).items())  # `plain` may lack layers itself
    again = {number: layer for number, (path, layer) in numbered if path in kinds and first[kinds[path]] != path}
    model = copy.deepcopy(plain, {id(layer): layer for layer in again.values()})  # these are not copied
    leave_out(model, again)
    for path in [path for path, module in model.named_modules() if is_experts(module)]:
        model.set_submodule(path, _NoExperts())
    return model


class _NoExperts(nn.Module):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


def dry_run(plain: PreTrainedModel) -> bool:
    """Run a model on the meta device; return whether a decoder layer runs more than once in a forward pass, as those of
    looped models do.

    Nothing is found out of a model whose code reads the values of tensors.

    Raises:
        UserError: the model cannot run, because settings of its configuration do not fit. The message has the error,
            and the settings that the code of the failing module reads; or a list with an entry for each layer that has
            more of them.
    """
    what = f"model type {plain.config.model_type!r}"
    for name, parameter in plain.named_parameters():
        if not all(0 < size < _MOST_SIDE for size in parameter.shape):
            raise UserError(f"{what}: by its config.json {name} would be {[*parameter.shape]}; correct the sizes there")
    config = plain.config.get_text_config()
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if type(window) is int and window < 1 and (not kinds or "sliding_attention" in kinds):
        raise UserError(
            f"{what}: sliding_window {window} in config.json lets no token see another; set 1 or more, or null"
        )
    model = shortened(plain).eval()
    _refuse_other_scores(model)
    calls = Counter[nn.Module]()
    for layer in every_layer(model).values():
        layer.register_forward_pre_hook(lambda module, _: calls.update([module]))
    try:
        with QuickFakeMode(), without_fake_reports():
            _fill(model)
            with torch.no_grad(), without_packages(model):
                model(input_ids=torch.zeros(1, _TOKENS, dtype=torch.long), use_cache=False)
    except (DataDependentOutputException, DynamicOutputShapeException):
        pass
    except Exception as error:  # whatever the model's code raises
        raise UserError(
            f"{what}: the model cannot run with the settings of its config.json: {_settings(error, model)}"
            f"{one_line(error)}; correct them there"
        ) from error
    layers, settings = len(decoder_layers(plain)), model.config.get_text_config()
    further = max(getattr(settings, name, None) or 0 for name in _NEXT_TOKENS)
    for name, value in vars(settings).items():
        of_layers = layers > 1 and isinstance(value, _Counted) and getattr(value, "asked", ()) == {*range(layers)}
        if of_layers and len(value) not in (layers, layers + further):
            raise UserError(f"{what}: {name} in config.json has {len(value)} entries, for {layers} layers; correct it")
    return max(calls.values(), default=0) > 1


def _refuse_other_scores(model: PreTrainedModel) -> None:
    """Raise `UserError` if a configuration names a function of the router's scores that its class does not compute."""
    said = getattr(model.config.get_text_config(), "scoring_func", None)
    if said not in ("softmax", "sigmoid"):
        return
    other = "sigmoid" if said == "softmax" else "softmax"
    for path in [path.rpartition(".")[0] for path, module in model.named_modules() if isinstance(module, _NoExperts)]:
        block = model.get_submodule(path)
        code = "".join(inspect.getsource(kind) for kind in {type(module) for module in (block, *block.children())})
        if other in code and not re.search(f"scoring_func|{said}", code):
            raise UserError(
                f"model type {model.config.model_type!r}: config.json says scoring_func: {said}, and transformers "
                f"computes {other} for this type, whatever it says; correct it there if the model was trained so"
            )


def flow_of(plain: PreTrainedModel) -> tuple[str, frozenset[str]]:
    """Return why the decoder layers of a model cannot be divided over ranks that send each other hidden states, empty
    if they can; and the names of the parameters that run after the last layer.

    The outputs of all layers are detached, so that whatever else arrives from earlier ones still requires a gradient.
    """
    model, wrong = shortened(plain).eval(), []
    layers = [*decoder_layers(model).values()]

    def before(layer: nn.Module, args: Any, kwargs: Any) -> None:
        given = tree_leaves((args if layer is not layers[0] else args[1:], kwargs))
        if any(isinstance(value, Tensor) and value.requires_grad for value in given):
            wrong.append("a layer takes more than the hidden states of the layer before it")

    def after(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or output.dim() != 3:
            wrong.append("a layer returns more than hidden states")
        return tree_map_only(Tensor, Tensor.detach, output)

    for layer in layers:
        layer.register_forward_pre_hook(before, with_kwargs=True)
        layer.register_forward_hook(after, with_kwargs=True)
    try:
        with QuickFakeMode(), without_fake_reports():
            _fill(model)
            weights = {name: weight for name, weight in model.named_parameters() if weight.is_floating_point()}
            for weight in weights.values():
                weight.requires_grad_()
            with without_packages(model):
                logits = model(input_ids=torch.zeros(1, _TOKENS, dtype=torch.long), use_cache=False).logits
            gradients = torch.autograd.grad(logits.sum(), [*weights.values()], allow_unused=True)
    except (DataDependentOutputException, DynamicOutputShapeException):
        return "its code reads the values of tensors", frozenset()
    after_last = frozenset(name for name, gradient in zip(weights, gradients, strict=True) if gradient is not None)
    embedding = model.get_input_embeddings().weight
    if model.get_output_embeddings().weight is not embedding and any(weights[name] is embedding for name in after_last):
        wrong.append("what follows the layers takes the embedding's output")
    return next(iter(wrong), ""), after_last


def _fill(model: nn.Module) -> None:
    """Replace the meta tensors of a model by fake ones, within a fake mode."""
    fakes: dict[Tensor, Tensor] = {}
    for module in model.modules():
        fix_rotary_length(module)
        tables: tuple[dict[str, Any], ...] = module._parameters, module._buffers
        for own in tables:
            for name, tensor in own.items():
                if tensor is not None and tensor.is_meta:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    own[name] = fakes.setdefault(tensor, nn.Parameter(fake, False) if is_parameter else fake)


def rope_problem(config: PretrainedConfig, failed: bool = True) -> str | None:
    """Return a line about the first wrong setting of rotary embeddings in a configuration: a theta that is no number
    above 0, or a type that transformers does not have; what only some models read is wrong if building one has
    `failed`."""
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        ropes = getattr(part, "rope_parameters", None) or {}
        # They are the settings, or hold those of each kind of layer.
        for rope in (ropes, *(inner for inner in ropes.values() if isinstance(inner, dict))):
            theta, kind = rope.get("rope_theta", 1), rope.get("rope_type", "default")
            if (failed or theta is not None) and not (isinstance(theta, int | float) and theta > 0):
                return f"rope_theta {shown(theta)} is no number above 0"
            if failed and kind not in (known := ["default", *ROPE_INIT_FUNCTIONS]):
                return f"rope_type {shown(kind)} (rope_scaling or rope_parameters) is none of {', '.join(known)}"
    return None


def _settings(error: Exception, model: PreTrainedModel) -> str:
    """Return "PATH with SETTING VALUE, …: " for the module of transformers' code that raised an error.

    The settings are those of the config that the code of the module's class names.
    """
    paths = {module: path for path, module in model.named_modules()}
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        module: Any = frame.f_locals.get("self")
        if not isinstance(module, nn.Module) or not paths.get(module):
            continue
        if not type(module).__module__.startswith("transformers.models."):
            continue
        config = getattr(module, "config", model.config.get_text_config())
        names = re.findall(r"config(?:\.|, \")(\w+)", inspect.getsource(type(module)))
        values = {(key := config.attribute_map.get(name, name)): vars(config).get(key, "") for name in names}
        sizes = [f"{name} {value}" for name, value in values.items() if value is None or type(value) is int]
        if sizes:
            return f"{paths[module]} with {', '.join(sizes)}: "
    return ""
