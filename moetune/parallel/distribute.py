"""Distribution of a model over ranks: attention split by tensor parallelism, weights sharded by FSDP2.

Gradients are summed over ranks, never averaged: a rank's loss is its share of the step's loss
(training/step/micro_step.py).

| parallel | decoder layers, embedding, final norm | experts |
|---|---|---|
| replicate only | whole; gradients summed after the last micro-step | whole, or divided over the `ep` ranks |
| fsdp, zero 3 | gathered for forward and again for backward | as the layers, over ranks with the same experts |
| fsdp, zero 3, reshard: false; zero 2 | gathered for forward, kept until backward | as the layers |
| fsdp, zero 1 | gathered once a step; gradients reduced once a step | as the layers |

The output head stays whole, because the loss runs it in chunks (training/step/loss.py), and so do embeddings tied to
the head and quantized weights.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from moetune.compat.torch import without_host_tensors
from moetune.config.schema import ParallelConfig
from moetune.experts.bank import ExpertBank
from moetune.models.stack import below_head, decoder_layers
from moetune.models.structure import ModelStructure
from moetune.parallel.ranks import Ranks
from moetune.run.linears import SPLIT, style_of, tensor_plan


def distribute(model: PreTrainedModel, structure: ModelStructure, ranks: Ranks) -> None:
    """Split and shard a model in place as its ranks' layout says.

    Does nothing for a single rank, and with DeepSpeed, which shards when the optimizer is made
    (training/optim/zero.py). This rank must hold its own experts and everything else whole, and the expert banks must
    have their dispatcher (adapt/build.py).

    Raises:
        AssertionError: tensor parallelism cannot split a linear layer of attention; run/validation.py refuses such
            runs.
    """
    parallel = ranks.parallel
    if ranks.is_single or parallel.engine == "deepspeed":
        return
    assert ranks.dense is not None
    if parallel.tp > 1:
        _split_matrices(model, structure, ranks.dense["tp"])
    if parallel.fsdp > 1:
        with without_host_tensors(model.modules()):
            _shard(model, ranks)


def _split_matrices(model: PreTrainedModel, structure: ModelStructure, tp: DeviceMesh) -> None:
    """Split attention's linear layers by heads over the ranks of `tp`, with transformers' plan and layers.

    LoRA factors are split like their layer: B if the layer's rows are split, A if its columns are.
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
    """Shard the decoder layers, their expert banks, the embedding and the final norm with FSDP2."""
    parallel = ranks.parallel
    assert ranks.dense is not None
    dense = ranks.dense["replicate", "fsdp"] if parallel.replicate > 1 else ranks.dense["fsdp"]
    reshard = parallel.zero == 3 and parallel.reshard
    ignored = {p for p in model.parameters() if not p.is_floating_point()}  # parameters quantized by bitsandbytes
    for layer in decoder_layers(model).values():
        for bank in [module for module in layer.modules() if isinstance(module, ExpertBank)]:
            if ranks.expert is not None:
                _shard_bank(bank, ranks, reshard)
                ignored |= set(bank.parameters())
        _shard_module(layer, dense, reshard, ignored)
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    if head is not None and head.weight is embedding._parameters.get("weight"):
        ignored |= set(embedding.parameters())
    elif "weight" in embedding._parameters:  # not on the host
        _shard_module(embedding, dense, reshard, ignored)
    _shard_module(below_head(model), dense, None, ignored)


def _shard_bank(bank: ExpertBank, ranks: Ranks, reshard: bool) -> None:
    """Shard a bank over the ranks that store the same experts; do nothing for one such rank, or if nothing trains."""
    assert ranks.expert is not None
    if ranks.expert.size(1) == 1 or not any(True for _ in bank.parameters()):
        return
    mesh = ranks.expert["copy", "shard"] if ranks.expert.size(0) > 1 else ranks.expert["shard"]
    _shard_module(bank, mesh, reshard, set())


def _shard_module(module: nn.Module, mesh: DeviceMesh, reshard: bool | None, ignored: set[nn.Parameter]) -> None:
    """Apply `fully_shard` to a module over the ranks of `mesh`, with summed gradients.

    `reshard` frees the gathered weights after forward; None for FSDP2's default. Parameters in `ignored` stay as they
    are. FSDP2 needs one dtype per group of parameters, so submodules with parameters of another dtype become a group of
    their own.
    """
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
    """Make FSDP2 sum gradients instead of averaging them."""
    for module in modules:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def set_gradient_sync(stack: nn.Module, ranks: Ranks, *, last: bool) -> None:
    """Before a micro-step, tell FSDP2 whether to reduce gradients and free gathered weights in its backward.

    ZeRO-1 reduces gradients, and frees gathered weights, only in the `last` micro-step of a step. ZeRO-2 reduces
    gradients in every micro-step, and frees weights in the last. Gradients of replicas are summed over the replicas in
    the last micro-step. `stack` is `below_head` of the model, as FSDP2 sharded it; any other module is left alone.
    """
    parallel = ranks.parallel
    if not isinstance(stack, FSDPModule) or micro_steps_are_alike(parallel):
        return
    for module in stack.modules():
        if isinstance(module, FSDPModule):
            if parallel.zero < 3:
                module.set_reshard_after_backward(last, recurse=False)
            if parallel.zero == 1:
                module.set_requires_gradient_sync(last, recurse=False)
            else:
                module.set_requires_all_reduce(last, recurse=False)


def micro_steps_are_alike(parallel: ParallelConfig) -> bool:
    """Return whether every micro-step of a step communicates and frees the same, so that `set_gradient_sync` has
    nothing to tell FSDP2; with DeepSpeed they are not."""
    fsdp2 = parallel.engine == "fsdp2"
    return parallel.ranks == 1 or (fsdp2 and (parallel.fsdp == 1 or (parallel.zero == 3 and parallel.replicate == 1)))


def reshard(model: nn.Module) -> None:
    """Free the weights that FSDP2 keeps gathered after a forward pass without a backward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
