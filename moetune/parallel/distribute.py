"""An adapted model on one rank becomes one of several: experts exchange tokens, matrices are split, weights shared.

Done by others: the dispatch and the tensor-parallel layers are transformers', the sharding is torch's `fully_shard`.
What is decided here is what each of them gets. Gradients are summed over ranks, never averaged: a rank's loss is its
share of the step's (training/step/micro_step.py).

| parallel | decoder layers, embedding, final norm | experts |
|---|---|---|
| replicate only | whole; gradients added up after the last micro-step | the same, or over `ep` |
| fsdp, zero 3 | gathered for forward and again for backward | the same over ranks with the same experts |
| fsdp, zero 3, reshard: false; zero 2 | gathered for forward, kept until backward | |
| fsdp, zero 1 | gathered once a step; gradients reduced once a step | |

The head stays whole: its loss runs it by chunks (training/step/loss.py). So do embeddings tied to it, and whatever is
packed.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import PreTrainedModel

from moetune.experts.bank import ExpertBank
from moetune.models.stack import decoder_layers, decoder_stack
from moetune.models.structure import ModelStructure
from moetune.parallel.ranks import Ranks
from moetune.parallel.tensor import split_matrices


def distribute(model: PreTrainedModel, structure: ModelStructure, ranks: Ranks) -> None:
    """Makes the model of this rank, which holds its own experts and everything else whole, one of all ranks'. Its banks
    exchange tokens by what they were given (adapt/pack.py).

    Raises:
        UserError: the layout does not go with this model.
    """
    parallel = ranks.parallel
    if ranks.is_single or parallel.engine == "deepspeed":  # it shards with its optimizer (training/optim/zero.py)
        return
    assert ranks.dense is not None
    if parallel.tp > 1:
        split_matrices(model, structure, ranks.dense["tp"])
    if parallel.fsdp > 1:
        _shard(model, ranks)


def _shard(model: PreTrainedModel, ranks: Ranks) -> None:
    parallel = ranks.parallel
    assert ranks.dense is not None
    dense = ranks.dense["replicate", "fsdp"] if parallel.replicate > 1 else ranks.dense["fsdp"]
    reshard = parallel.zero == 3 and parallel.reshard
    ignored = {p for p in model.parameters() if not p.is_floating_point()}  # what bitsandbytes packed
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
    """Over the ranks that hold the same experts; where there is one only there is nothing to share."""
    assert ranks.expert is not None
    if ranks.expert.size(1) == 1 or not any(True for _ in bank.parameters()):
        return
    mesh = ranks.expert["copy", "shard"] if ranks.expert.size(0) > 1 else ranks.expert["shard"]
    _shard_module(bank, mesh, reshard, set())


def _shard_module(module: nn.Module, mesh: DeviceMesh, reshard: bool | None, ignored: set[nn.Parameter]) -> None:
    """`fully_shard`, gradients summed. FSDP2 wants one dtype of what trains in a group: others get one of their own."""
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
    """Tells FSDP2 before a micro-step whether it is the `last` of its step, after which gradients must be reduced.

    Under ZeRO-1 they are reduced then only, and weights stay gathered until then; under ZeRO-2 the latter only.
    Replicas of shards add up once a step.
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
    """Frees the weights that FSDP2 has left gathered after a forward pass without a backward one."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
