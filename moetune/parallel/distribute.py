"""Distribution of an adapted model: matrices split by transformers' tensor parallelism, weights sharded by FSDP2.

Gradients are summed over ranks, never averaged: a rank's loss is its share of the step's
(training/step/micro_step.py).

| parallel | decoder layers, embedding, final norm | experts |
|---|---|---|
| replicate only | whole; gradients added up after the last micro-step | the same, or over `ep` |
| fsdp, zero 3 | gathered for forward and again for backward | the same over ranks with the same experts |
| fsdp, zero 3, reshard: false; zero 2 | gathered for forward, kept until backward | |
| fsdp, zero 1 | gathered once a step; gradients reduced once a step | |

The head stays whole, because the loss runs it by chunks (training/step/loss.py), and so do embeddings tied to it and
quantized weights.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from moetune.experts.bank import ExpertBank
from moetune.models.stack import decoder_layers, decoder_stack
from moetune.models.structure import ModelStructure
from moetune.parallel.ranks import Ranks
from moetune.run.tensor_plan import SPLIT, style_of, tensor_plan


def distribute(model: PreTrainedModel, structure: ModelStructure, ranks: Ranks) -> None:
    """Distribute a model of which this rank holds its own experts and all else whole. Its banks already have a
    dispatcher (adapt/pack.py).

    Raises:
        UserError: the layout does not go with this model.
    """
    parallel = ranks.parallel
    if ranks.is_single or parallel.engine == "deepspeed":  # it shards with its optimizer (training/optim/zero.py)
        return
    assert ranks.dense is not None
    if parallel.tp > 1:
        _split_matrices(model, structure, ranks.dense["tp"])
    if parallel.fsdp > 1:
        _shard(model, ranks)


def _split_matrices(model: PreTrainedModel, structure: ModelStructure, tp: DeviceMesh) -> None:
    """Split the linear layers of attention by heads over the ranks of `tp`, with transformers' plan and layers.

    LoRA is split like its layer: B where the rows are split, A where the columns are.
    """
    plan = tensor_plan(model)
    resolved: dict[str, str] = {}
    for path in structure.linears("attention"):
        style = style_of(path, plan)
        assert style in SPLIT, f"{path} cannot be split (run.validation)"
        module = model.get_submodule(path)
        base = f"{path}.base_layer" if hasattr(module, "base_layer") else path
        resolved[f"{base}.weight"] = resolved[base] = style
        if getattr(model.get_submodule(base), "bias", None) is not None:
            resolved[f"{base}.bias"] = style
        if base != path:
            factor = f"{path}.lora_B.default" if style == "colwise" else f"{path}.lora_A.default"
            resolved[f"{factor}.weight"] = resolved[factor] = style
    parameters = {name for name, _ in model.named_parameters()}
    apply_tensor_parallelism(model, tp, {name: style for name, style in resolved.items() if name in parameters})
    apply_tensor_parallelism(model, tp, {name: style for name, style in resolved.items() if name not in parameters})


def _shard(model: PreTrainedModel, ranks: Ranks) -> None:
    parallel = ranks.parallel
    assert ranks.dense is not None
    dense = ranks.dense["replicate", "fsdp"] if parallel.replicate > 1 else ranks.dense["fsdp"]
    reshard = parallel.zero == 3 and parallel.reshard
    ignored = {p for p in model.parameters() if not p.is_floating_point()}  # quantized by bitsandbytes
    for layer in decoder_layers(model).values():
        for bank in [module for module in layer.modules() if isinstance(module, ExpertBank)]:
            if ranks.expert is not None:
                _shard_bank(bank, ranks, reshard)
                ignored |= set(bank.parameters())
        _shard_module(layer, dense, reshard, ignored)
    embedding = model.get_input_embeddings()
    if model.get_output_embeddings() is not None and model.get_output_embeddings().weight is embedding.weight:
        ignored |= set(embedding.parameters())
    else:
        _shard_module(embedding, dense, reshard, ignored)
    _shard_module(decoder_stack(model), dense, None, ignored)


def _shard_bank(bank: ExpertBank, ranks: Ranks, reshard: bool) -> None:
    """Shard a bank over the ranks that hold the same experts, if there are several."""
    assert ranks.expert is not None
    if ranks.expert.size(1) == 1 or not any(True for _ in bank.parameters()):
        return
    mesh = ranks.expert["copy", "shard"] if ranks.expert.size(0) > 1 else ranks.expert["shard"]
    _shard_module(bank, mesh, reshard, set())


def _shard_module(module: nn.Module, mesh: DeviceMesh, reshard: bool | None, ignored: set[nn.Parameter]) -> None:
    """`fully_shard` with summed gradients. FSDP2 needs one dtype in a group: other dtypes get groups of their own."""
    trained = [
        (owner, p)
        for owner in module.modules()
        for p in owner.parameters(recurse=False)
        if p.requires_grad and p not in ignored and not hasattr(p, "placements")
    ]
    if len({p.dtype for _, p in trained}) > 1:
        most = next(p.dtype for p in module.parameters() if p.is_floating_point())
        apart = list(dict.fromkeys(owner for owner, p in trained if p.dtype != most))
        _sum(fully_shard(apart, mesh=mesh, reshard_after_forward=reshard, ignored_params=ignored))
    _sum([fully_shard(module, mesh=mesh, reshard_after_forward=reshard, ignored_params=ignored)])


def _sum(modules: list[FSDPModule]) -> None:
    for module in modules:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def set_gradient_sync(stack: nn.Module, ranks: Ranks, *, last: bool) -> None:
    """Tell FSDP2 before a micro-step whether it is the `last` of its step, when gradients must be reduced.

    Under ZeRO-1 gradients are reduced only then and weights stay gathered until then; under ZeRO-2 only the latter.
    Replicas of shards are summed once a step.
    """
    parallel = ranks.parallel
    if not isinstance(stack, FSDPModule) or (parallel.zero == 3 and parallel.replicate == 1):
        return
    for module in stack.modules():
        if isinstance(module, FSDPModule):
            if parallel.zero < 3:
                module.set_reshard_after_backward(last, recurse=False)
            if parallel.zero == 1:
                module.set_requires_gradient_sync(last, recurse=False)
            else:
                module.set_requires_all_reduce(last, recurse=False)


def reshard(model: nn.Module) -> None:
    """Free the weights that FSDP2 leaves gathered after a forward pass without a backward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
