"""The plain transformers model that an adapted one must equal, as a differentiable function of what trains.

Every stored weight is unpacked, every low-rank factor merged (W + s·B·A) and every expert put back in the model's own
layout, so autograd through stock code gives the gradients that the adapted model should have.
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
    """A run file with random weights and no checkpointing, unless `sections` says otherwise."""
    model = {"path": str(path), "weights": "random", "attention": "eager", **sections.pop("model", {})}
    train = {"checkpointing": "none", **sections.pop("train", {})}
    return RunConfig.model_validate({"model": model, "adapt": adapt, "train": train, **sections})


def build_toy(config: PretrainedConfig, folder: Path, adapt: dict[str, Any], **sections: Any) -> Adapted:
    """Builds the adapted model of a toy configuration, with factors that act, in evaluation mode."""
    config.save_pretrained(folder)
    adapted = build(run_config(folder, adapt, **sections), "cpu")
    excite_(adapted.model)
    adapted.model.eval()
    return adapted


@torch.no_grad()
def excite_(model: nn.Module, seed: int = 1) -> None:
    """Draws every B of LoRA, which starts at zero and would hide the gradient of A."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("_B") or ".lora_B." in name:
            parameter.normal_(std=0.05, generator=generator)


def token_ids(rows: int = 2, tokens: int = 12, seed: int = 3) -> Tensor:
    """Random ids [rows, tokens] of a toy's vocabulary, special ones left out."""
    return torch.randint(3, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """The mean cross-entropy of each next token."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def loss_and_gradients(adapted: Adapted, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradient of every trained tensor that has one, from the adapted model's own backward pass."""
    adapted.model.zero_grad(set_to_none=True)
    loss = next_token_loss(adapted.model(input_ids=ids, use_cache=False).logits, ids)
    loss.backward()
    gradients = {name: p.grad for name, p in adapted.trainable().items() if p.grad is not None}
    return loss.detach(), gradients


def reference_loss_and_gradients(
    adapted: Adapted, ids: Tensor, plain: PreTrainedModel | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The same from the plain model, by autograd alone; what the loss does not reach has no gradient."""
    plain = plain_model(adapted.model.config) if plain is None else plain
    leaves = {name: parameter.detach().clone().requires_grad_() for name, parameter in adapted.trainable().items()}
    weights = plain_weights(adapted, plain, leaves)
    output = torch.func.functional_call(plain, weights, kwargs={"input_ids": ids, "use_cache": False})
    loss = next_token_loss(output.logits, ids)
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return loss.detach(), {name: g for name, g in zip(leaves, gradients, strict=True) if g is not None}


def plain_model(config: PretrainedConfig) -> PreTrainedModel:
    """The stock model of this configuration, without towers; its experts run their own class's code."""
    config = copy.deepcopy(config)
    config._experts_implementation = "eager"
    plain = auto_class(config).from_config(config, dtype=torch.float32).eval()
    drop_towers(plain)
    return plain


def plain_weights(adapted: Adapted, plain: PreTrainedModel, leaves: Tensors) -> dict[str, Tensor]:
    """Every parameter and buffer of the plain model, made of `leaves` (what trains) and what is stored.

    Each is keyed by its name in the plain model; a tied parameter by its first name.
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
    """The bank's experts as transformers stores them: name -> [E, …], in the layout of the model."""
    shape = bank.expert_shape
    merged = [_expert(bank, path, expert, leaves) for expert in range(bank.num_experts)]
    up = "gate_up_proj" if shape.has_gate else "up_proj"
    names = {"gate_up": up, "down": "down_proj", "gate_up_bias": f"{up}_bias", "down_bias": "down_proj_bias"}
    stacks = {names[key]: torch.stack([weights[key] for weights in merged]) for key in merged[0]}
    if shape.is_transposed:
        stacks |= {name: stack.transpose(1, 2).contiguous() for name, stack in stacks.items() if stack.ndim == 3}
    return stacks


def _expert(bank: ExpertBank, path: str, expert: int, leaves: Tensors) -> dict[str, Tensor]:
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
            scale * leaves[f"{path}.lora.{key}_B"][slot] @ leaves[f"{path}.lora.{key}_A"][slot]
            for key in ("gate_up", "down")
        )
        weights["gate_up"] = weights["gate_up"] + _join_gate_and_up(gate_up, bank.expert_shape)
        weights["down"] = weights["down"] + down[0]
    return weights


def _join_gate_and_up(parts: Tensor, shape: ExpertShape) -> Tensor:
    """[parts, rows, H] -> [O, H]: two parts lie one after the other, or alternate."""
    if len(parts) == 1 or shape.is_concatenated:
        return parts.flatten(0, 1)
    return parts.transpose(0, 1).flatten(0, 1)


def _linear_weight(module: nn.Module, path: str, leaves: Tensors) -> Tensor:
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
    """Each tensor's relative error is within `tolerance`; the message names those that are not.

    A tensor whose exact gradient is zero (a router that picks one expert and normalizes, the bias of a key) holds
    only rounding, so errors below 1e-8 of the largest tensor's norm do not count.
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
    """A digest of the bytes, shapes and dtypes of every buffer and frozen parameter, quantization states included."""
    digest = hashlib.sha256()
    for name, tensor in frozen_tensors(adapted):
        data = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {data.dtype} {tuple(data.shape)} {tensor.requires_grad}".encode())
        digest.update(data.view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def frozen_tensors(adapted: Adapted) -> Iterable[tuple[str, Tensor]]:
    yield from adapted.model.named_buffers()
    for name, parameter in adapted.model.named_parameters():
        if parameter.requires_grad:
            continue
        yield name, parameter
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            yield from ((f"{name}.{key}", value) for key, value in state.as_dict(packed=True).items())


@contextmanager
def small_linears_are_packed() -> Any:
    """Packs linear layers from 8 rows and columns on; in a toy every one is smaller than what is worth packing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moetune.run.linears._SMALLEST", 8)
        yield
