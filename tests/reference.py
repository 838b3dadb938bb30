"""Reference for an adapted model: the plain transformers model, as a differentiable function of the trained tensors.

Every stored weight is dequantized, every pair of LoRA factors merged (W + scale·B·A) and every expert put back into the
model's own layout, so that autograd through transformers' code gives the gradients that the adapted model should have.
"""

import copy
import hashlib
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import pytest
import torch
from bitsandbytes.nn import Linear4bit
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from moetune.adapt.build import Adapted
from moetune.config.schema import RunConfig
from moetune.experts.bank import ExpertBank
from moetune.experts.quantized import QuantizedLinear
from moetune.models.moe import ExpertShape
from moetune.models.text import auto_class, drop_towers
from tests.resolved import build
from tests.toys import VOCAB

TOLERANCE = 1e-5  # relative error of a gradient, in float32, as |difference| / |reference| over the whole tensor

Tensors = Mapping[str, Tensor]


def run_config(path: Path | str, adapt: dict[str, Any], **sections: dict[str, Any]) -> RunConfig:
    """Return a configuration with random weights and no checkpointing, unless `sections` says otherwise.

    `path` is `model.path`; `adapt` and `sections` are sections of a run file.
    """
    model = {"path": str(path), "weights": "random", "attention": "eager", **sections.pop("model", {})}
    train = {"checkpointing": "none", **sections.pop("train", {})}
    return RunConfig.model_validate({"model": model, "adapt": adapt, "train": train, **sections})


def build_toy(config: PretrainedConfig, folder: Path, adapt: dict[str, Any], **sections: Any) -> Adapted:
    """Build the adapted model of a toy configuration, whose LoRA changes the output (`excite_`), in evaluation mode.

    The configuration is saved in `folder`; `adapt` and `sections` as in `run_config`.
    """
    config.save_pretrained(folder)
    adapted = build(run_config(folder, adapt, **sections), "cpu")
    excite_(adapted.model)
    adapted.model.eval()
    return adapted


@torch.no_grad()
def excite_(model: nn.Module, seed: int = 1) -> None:
    """Draw every LoRA factor B at random: as long as it is zero, the gradient of A is zero too, and tests nothing."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("_B") or ".lora_B." in name:
            parameter.normal_(std=0.05, generator=generator)


def token_ids(rows: int = 2, tokens: int = 12, seed: int = 3) -> Tensor:
    """Return random token ids [rows, tokens] of a toy model's vocabulary, without special tokens."""
    return torch.randint(3, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next tokens, for logits [rows, tokens, vocabulary] of ids [rows, tokens]."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def loss_and_gradients(adapted: Adapted, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss, and name -> gradient of the trained tensors, from the adapted model's own backward pass."""
    adapted.model.zero_grad(set_to_none=True)
    loss = next_token_loss(adapted.model(input_ids=ids, use_cache=False).logits, ids)
    loss.backward()
    gradients = {name: p.grad for name, p in adapted.trainable().items() if p.grad is not None}
    return loss.detach(), gradients


def reference_loss_and_gradients(
    adapted: Adapted, ids: Tensor, plain: PreTrainedModel | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the same from the plain model, by autograd alone, without tensors that the loss does not depend on."""
    plain = plain_model(adapted.model.config) if plain is None else plain
    leaves = {name: parameter.detach().clone().requires_grad_() for name, parameter in adapted.trainable().items()}
    weights = plain_weights(adapted, plain, leaves)
    output = torch.func.functional_call(plain, weights, kwargs={"input_ids": ids, "use_cache": False})
    loss = next_token_loss(output.logits, ids)
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return loss.detach(), {name: g for name, g in zip(leaves, gradients, strict=True) if g is not None}


def plain_model(config: PretrainedConfig) -> PreTrainedModel:
    """Return the transformers model of a configuration, without towers for images or audio, with `eager` experts."""
    config = copy.deepcopy(config)
    config._experts_implementation = "eager"
    plain = auto_class(config).from_config(config, dtype=torch.float32).eval()
    drop_towers(plain)
    return plain


def plain_weights(adapted: Adapted, plain: PreTrainedModel, leaves: Tensors) -> dict[str, Tensor]:
    """Return every parameter and buffer of the plain model, from an adapted model's frozen weights and `leaves`.

    `leaves` is name in the adapted model -> trained tensor that autograd tracks. The result is keyed by the names of
    the plain model; a tied parameter by its first name.
    """
    weights: dict[str, Tensor] = {}
    for layer in adapted.structure.moe_layers:
        stacks = expert_weights(adapted.model.get_submodule(layer.experts), layer.experts, leaves)
        weights |= {f"{layer.experts}.{key}": tensor for key, tensor in stacks.items()}
    modules = dict(adapted.model.named_modules())
    for name, tensor in (*plain.named_parameters(), *plain.named_buffers()):
        if name in weights:
            continue
        path, _, key = name.rpartition(".")
        module = modules[path]
        if key == "weight" and isinstance(module, (LoraLayer, Linear4bit, QuantizedLinear)):
            weights[name] = _linear_weight(module, path, leaves)
        else:
            stored = f"{path}.base_layer" if isinstance(module, LoraLayer) else path
            stored = f"{stored}.{key}" if path else key
            weights[name] = leaves[stored] if stored in leaves else _tensor(adapted.model, stored)
        assert weights[name].shape == tensor.shape, name
    return weights


def expert_weights(bank: ExpertBank, path: str, leaves: Tensors) -> dict[str, Tensor]:
    """Return the experts of a bank, at the path `path`, as transformers stores them: name -> [E, …] in its layout."""
    shape = bank.expert_shape
    merged = [_expert(bank, path, expert, leaves) for expert in range(bank.num_experts)]
    up = "gate_up_proj" if shape.has_gate else "up_proj"
    names = {"gate_up": up, "down": "down_proj", "gate_up_bias": f"{up}_bias", "down_bias": "down_proj_bias"}
    stacks = {names[key]: torch.stack([weights[key] for weights in merged]) for key in merged[0]}
    if shape.is_transposed:
        stacks |= {name: stack.transpose(1, 2).contiguous() for name, stack in stacks.items() if stack.ndim == 3}
    return stacks


def _expert(bank: ExpertBank, path: str, expert: int, leaves: Tensors) -> dict[str, Tensor]:
    """Return an expert's matrices [out, in] and biases, LoRA merged, by the bank's names, such as `gate_up`."""
    weights: dict[str, Tensor] = {}
    for key in ("gate_up", "down"):
        if expert in bank.plan.trained:
            name = f"{path}.trained.{expert}.{key}"
            weights[key] = leaves[f"{name}.weight"]
            bias = leaves.get(f"{name}.bias")
        else:
            slot = [e for e in range(bank.num_experts) if e not in bank.plan.trained].index(expert)
            weights[key] = getattr(bank, key).matrix(slot, torch.float32)
            stored = getattr(bank, f"{key}_bias")
            bias = None if stored is None else stored[slot]
        if bias is not None:
            weights[f"{key}_bias"] = bias
    plan = bank.plan.lora
    if plan is not None and expert in plan.ids:
        slot, scale = plan.ids.index(expert), plan.alpha / plan.rank
        gate_up, down = (
            scale
            * leaves[f"{path}.lora.{key}_B"][0 if shared == "B" else slot]
            @ leaves[f"{path}.lora.{key}_A"][0 if shared == "A" else slot]
            for key, shared in (("gate_up", "A" if plan.shared else ""), ("down", "B" if plan.shared else ""))
        )
        weights["gate_up"] = weights["gate_up"] + _join_gate_and_up(gate_up, bank.expert_shape)
        weights["down"] = weights["down"] + down[0]
    return weights


def _join_gate_and_up(parts: Tensor, shape: ExpertShape) -> Tensor:
    """Return the gate_up matrix [O, H] of its parts [parts, rows, H], whose rows are concatenated or interleaved."""
    if len(parts) == 1 or shape.is_concatenated:
        return parts.flatten(0, 1)
    return parts.transpose(0, 1).flatten(0, 1)


def _linear_weight(module: nn.Module, path: str, leaves: Tensors) -> Tensor:
    """Return the weight of the linear layer at `path`, dequantized and with LoRA merged."""
    if isinstance(module, LoraLayer):
        weight = _linear_weight(module.base_layer, f"{path}.base_layer", leaves)
        A, B = (leaves[f"{path}.{factor}.default.weight"] for factor in ("lora_A", "lora_B"))
        return weight + module.scaling["default"] * B @ A
    if isinstance(module, Linear4bit):
        return bnb.dequantize_4bit(module.weight.data, module.weight.quant_state).to(torch.float32)
    if isinstance(module, QuantizedLinear):
        return module.stack.matrix(0, torch.float32)
    return leaves.get(f"{path}.weight", module.weight.detach())


def _tensor(model: nn.Module, name: str) -> Tensor:
    path, _, key = name.rpartition(".")
    return getattr(model.get_submodule(path), key).detach()


def assert_close(found: Tensors, expected: Tensors, tolerance: float = TOLERANCE) -> None:
    """Assert that both have the same names, and each tensor a relative error within `tolerance`; name the others.

    A tensor whose exact gradient is zero (a router that picks one expert and normalizes, the bias of a key) holds only
    rounding errors, so errors below 1e-8 of the largest tensor's norm do not count.
    """
    assert found.keys() == expected.keys(), f"only one side has {sorted(found.keys() ^ expected.keys())[:6]}"
    norms = {name: tensor.double().norm().item() for name, tensor in expected.items()}
    floor = 1e-8 * max(norms.values())
    wrong = []
    for name, tensor in expected.items():
        error = (found[name].double() - tensor.double()).norm().item()
        if not error <= max(tolerance * norms[name], floor):
            wrong.append(f"{name}: {error:.1e} of {norms[name]:.1e}")
    assert not wrong, "\n".join(wrong)


def frozen_digest(adapted: Adapted) -> str:
    """Return the SHA-256 of all frozen tensors (`frozen_tensors`): names, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in frozen_tensors(adapted):
        data = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {data.dtype} {tuple(data.shape)} {tensor.requires_grad}".encode())
        digest.update(data.view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def frozen_tensors(adapted: Adapted) -> Iterable[tuple[str, Tensor]]:
    """Yield (name, tensor) of every buffer and frozen parameter, and of the quantization states of bitsandbytes."""
    yield from adapted.model.named_buffers()
    for name, parameter in adapted.model.named_parameters():
        if parameter.requires_grad:
            continue
        yield name, parameter
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            yield from ((f"{name}.{key}", value) for key, value in state.as_dict(packed=True).items())


@contextmanager
def small_linears_are_quantized() -> Any:
    """Quantize linear layers from 8 rows and columns on inside this context; toys have none above the normal limit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moetune.run.linears._SMALLEST", 8)
        yield
