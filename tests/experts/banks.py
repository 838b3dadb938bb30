"""Banks of toys, and what they are compared with: the model's own experts module in float64, run by autograd on the
bank's dequantized weights with the low-rank factors merged in."""

import copy
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from moetune.config.schema import Storage
from moetune.experts.bank import BankPlan, ExpertBank, LoraPlan
from moetune.models.moe import read_shape
from moetune.models.structure import read_structure
from tests.reference import excite_, expert_weights
from tests.toys import EXPERTS, HIDDEN, toy_model

# Together: gated or not, [out, in] or transposed, concatenated or interleaved, biases, a clamp in the gate.
LAYOUTS = ["mixtral", "gpt_oss", "nemotron_h", "aria_text"]
PLANS = {
    "frozen": BankPlan(),
    "two trained": BankPlan(trained=(0, 5)),
    "all trained": BankPlan(trained=tuple(range(EXPERTS))),
    "fused LoRA on some": BankPlan(lora=LoraPlan((1, 2, 6), rank=3, alpha=6.0)),
    "LoRA on all": BankPlan(lora=LoraPlan(tuple(range(EXPERTS)), rank=3, alpha=6.0)),
    "split LoRA on some": BankPlan(lora=LoraPlan((1, 2, 6), rank=3, alpha=6.0, split=True)),
    "shared fused LoRA on some": BankPlan(lora=LoraPlan((1, 2, 6), rank=3, alpha=6.0, shared=True)),
    "trained, shared split LoRA, frozen": BankPlan(
        (0, 5), LoraPlan((1, 7), rank=2, alpha=1.0, split=True, shared=True)
    ),
    "trained, fused LoRA, frozen": BankPlan(trained=(0, 5), lora=LoraPlan((1, 7), rank=2, alpha=1.0)),
    "trained, split LoRA, frozen": BankPlan((0, 5), LoraPlan((1, 7), rank=2, alpha=1.0, split=True)),
}
UNUSED = (0, 7)  # one that trains whole and one with LoRA, in the mixtures
Routed = tuple[Tensor, Tensor, Tensor]


@functools.cache
def stock_experts(model_type: str) -> nn.Module:
    """The first experts module of a toy, with weights large enough that a clamp in the gate acts."""
    model = toy_model(model_type)
    experts = model.get_submodule(read_structure(model).moe_layers[0].experts)
    experts.config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(0)
    for parameter in experts.parameters():
        parameter.data.normal_(std=1.0 if model_type == "gpt_oss" else 0.3, generator=generator)
    return experts


def bank_of(
    model_type: str, plan: str, storage: Storage = "nf4", dtype: torch.dtype = torch.float32, *, group: int = 1
) -> ExpertBank:
    """A bank with those experts, in groups of at most so many."""
    experts = stock_experts(model_type)
    shape = read_shape(experts, "experts")
    torch.manual_seed(2)
    activation = experts._apply_gate if shape.has_gate else experts.act_fn
    bank = ExpertBank(shape, PLANS[plan], activation, storage=storage, dtype=dtype)
    up = "gate_up_proj" if shape.has_gate else "up_proj"
    for expert in range(shape.num_experts):
        for part, name in (("gate_up", up), ("down", "down_proj")):
            weight = getattr(experts, name)[expert].detach()
            bank.put_(expert, part, weight.T if shape.is_transposed else weight)
            if shape.has_bias:
                bank.put_(expert, f"{part}_bias", getattr(experts, f"{name}_bias")[expert])
    excite_(bank)
    largest = max(math.prod(bank.gate_up.shape), math.prod(bank.down.shape))
    bank.context = replace(bank.context, expert_memory=group * largest * dtype.itemsize)
    return bank


def routed(avoid: tuple[int, ...] = (), top_k: int = 2, tokens: int = 24) -> Routed:
    """Rows [T, H], chosen experts [T, K] without those in `avoid`, and their weights [T, K]."""
    generator = torch.Generator().manual_seed(1)
    x_TH = torch.randn(tokens, HIDDEN, generator=generator)
    scores_TE = torch.rand(tokens, EXPERTS, generator=generator)
    scores_TE[:, list(avoid)] = -1.0
    weights_TK, ids_TK = scores_TE.topk(top_k)
    return x_TH, ids_TK, weights_TK


def run(bank: ExpertBank, routing: Routed) -> dict[str, Tensor]:
    """The output of a bank, and the gradients of the rows, the routing weights and what trains."""
    return gradients(bank, dict(bank.named_parameters()), routing)


def gradients(call: Callable[..., Tensor], tensors: Mapping[str, Tensor], routing: Routed) -> dict[str, Tensor]:
    x_TH, ids_TK, weights_TK = routing
    x_TH, weights_TK = x_TH.clone().requires_grad_(), weights_TK.clone().requires_grad_()
    y_TH = call(x_TH, ids_TK, weights_TK)
    pull_TH = torch.linspace(-1, 1, y_TH.numel()).view_as(y_TH)
    inputs = {"x": x_TH, "weights": weights_TK, **tensors}
    found = torch.autograd.grad(y_TH, list(inputs.values()), pull_TH)
    return {"y": y_TH.detach(), **dict(zip(inputs, found, strict=True))}


def reference(model_type: str, bank: ExpertBank, routing: Routed) -> dict[str, Tensor]:
    """What `run` has to give."""
    leaves = {f"bank.{name}": p.detach().double().requires_grad_() for name, p in bank.named_parameters()}
    weights = {name: tensor.double() for name, tensor in expert_weights(bank, "bank", leaves).items()}
    plain = copy.deepcopy(stock_experts(model_type)).double()
    tensors = {name.removeprefix("bank."): leaf for name, leaf in leaves.items()}
    x_TH, ids_TK, weights_TK = routing

    def call(*args: Tensor) -> Tensor:
        return torch.func.functional_call(plain, weights, args)

    return gradients(call, tensors, (x_TH.double(), ids_TK, weights_TK.double()))


def saved(bank: ExpertBank, routing: Routed) -> list[Tensor]:
    """What a forward pass keeps for backward."""
    kept: list[Tensor] = []
    x_TH, ids_TK, weights_TK = routing
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor), lambda _: None):
        bank(x_TH.requires_grad_(), ids_TK, weights_TK)
        with torch.no_grad():
            bank(x_TH, ids_TK, weights_TK)
    return kept
