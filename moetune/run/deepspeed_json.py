"""Configuration for `deepspeed.initialize`: the run file's settings and the user's JSON.

Nothing here imports torch or deepspeed, so a run file can be refused before anything is loaded.
"""

import json
from typing import Any, get_args

from moetune.config.schema import ParallelConfig, QuantizedDtype, RunConfig
from moetune.errors import UserError
from moetune.files import expanded
from moetune.json_files import read_json

_BUCKET = 2**26
"""Largest number of gradient elements that are reduced at a time: DeepSpeed allocates a buffer of this many.

Its default of 5·10⁸ is 2 GB in float32, much compared with a few adapters.
"""
_DECIDED_ELSEWHERE = (
    "optimizer", "scheduler", "fp16", "amp", "torch_autocast", "data_types", "prescale_gradients",
    "gradient_predivide_factor", "gradient_allreduce_op", "managed_gradient_accumulation", "tensor_parallel",
    "expert_parallel", "sequence_parallel_size", "data_parallel_size", "activation_checkpointing", "compile",
    "hybrid_engine", "zero_optimization.offload_param", "zero_optimization.zenflow",
    "zero_optimization.zero_hpz_partition_size", "zero_optimization.zero_quantized_weights",
    "zero_optimization.zero_quantized_nontrainable_weights", "zero_optimization.zero_quantized_gradients",
    "zero_optimization.compute_grad_norm",
)  # fmt: skip
"""Keys that `parallel.deepspeed` may not set: optimizer, schedule, dtypes, ranks, checkpointing and storage of weights
are those of the run file, and moetune sums gradients and takes their norm."""


def deepspeed_json(config: RunConfig, trained: int = 0) -> dict[str, Any]:
    """Return the configuration for `deepspeed.initialize`, a dict in the form of DeepSpeed's JSON file.

    Args:
        config: a configuration whose `model.dtype` is not `auto`.
        trained: number of parameters that train; 0 if unknown.

    Raises:
        UserError: DeepSpeed does not support a setting of the run file; or the file `parallel.deepspeed` cannot be
            read, or sets a key that the run file decides.
    """
    if problems := _problems(config):
        raise UserError("\n".join(f"parallel.engine: deepspeed and {problem}" for problem in problems))
    decided, file = _decided(config), config.parallel.deepspeed
    bucket = {"zero_optimization": {"reduce_bucket_size": reduce_bucket(config.parallel, trained)}}
    if file is None:
        return _merge(bucket, decided)
    given = _read(file)
    problems = _conflicts(given, decided)
    why = "the run file and moetune decide what it sets"
    problems += [f"{key}: leave it out; {why}" for key in _DECIDED_ELSEWHERE if _has(given, key)]
    if problems:
        raise UserError("\n".join(f"parallel.deepspeed: {file!r} has {problem}" for problem in problems))
    return _merge(bucket, _merge(given, decided))


def reduce_bucket(parallel: ParallelConfig, trained: int = 0) -> int:
    """Return the number of gradient elements that DeepSpeed reduces at a time.

    This is `zero_optimization.reduce_bucket_size` of the user's file, if it is there and not `auto`; else `_BUCKET`, or
    `trained` if fewer parameters train (0: unknown). Raise `UserError` if the file cannot be read, or the value is no
    number.
    """
    of_zero = {} if parallel.deepspeed is None else _read(parallel.deepspeed).get("zero_optimization", {})
    size = of_zero.get("reduce_bucket_size", "auto") if isinstance(of_zero, dict) else "auto"
    if size == "auto":
        return min(trained or _BUCKET, _BUCKET)
    if isinstance(size, bool) or not isinstance(size, int | float) or not 1 <= size < 2**63:
        raise UserError(
            f"parallel.deepspeed: {parallel.deepspeed!r} has zero_optimization.reduce_bucket_size: {json.dumps(size)}; "
            "give a number of elements from 1 up, or leave it out"
        )
    return int(size)


def _decided(config: RunConfig) -> dict[str, Any]:
    """Return the settings of DeepSpeed that the run file decides, and those for which moetune needs a fixed value."""
    train, parallel = config.train, config.parallel
    device = "cpu" if parallel.offload == "optimizer" else "none"
    return {
        "train_batch_size": train.micro_batch * train.accumulate * parallel.fsdp,
        "train_micro_batch_size_per_gpu": train.micro_batch,
        "gradient_accumulation_steps": train.accumulate,
        "gradient_clipping": train.max_grad_norm,
        "zero_optimization": {"stage": parallel.zero, "offload_optimizer": {"device": device}},
        "bf16": {"enabled": trains_in_bf16(config), "check_grad_overflow": True},
        "zero_force_ds_cpu_optimizer": False,  # use torch's optimizer, also with offload to the host
        "zero_allow_untested_optimizer": True,  # DeepSpeed calls every optimizer but Adam untested
    }


def trains_in_bf16(config: RunConfig) -> bool:
    """Return whether trained weights are bfloat16: `model.dtype` is bf16 and there is no LoRA, which is in float32."""
    return config.model.dtype == "bf16" and config.adapt.lora is None


def _problems(config: RunConfig) -> list[str]:
    """Return a line for each setting of the run file that DeepSpeed does not support."""
    parallel, model, adapt = config.parallel, config.model, config.adapt
    problems = [
        f"parallel.{axis} {size}: DeepSpeed shares over parallel.fsdp alone; set {axis}: 1, or use engine: fsdp2"
        for axis in ("replicate", "ep", "tp")
        if (size := getattr(parallel, axis)) > 1
    ]
    if parallel.fsdp == 1:
        problems.append("parallel.fsdp 1: there is nothing to share; leave parallel: out, and use optimizer.offload")
    if not parallel.reshard:
        problems.append("parallel.reshard: false is FSDP2's; set parallel.zero: 2")
    if parallel.zero == 3 and model.storages.intersection(get_args(QuantizedDtype)):
        problem = "DeepSpeed cannot shard quantized experts and linears; set parallel.zero: 2, or use engine: fsdp2"
        problems.append(f"parallel.zero 3 and model.base {model.base}: {problem}")
    on_host = [key for key in ("experts_on", "embeddings_on") if getattr(model, key) == "host"]
    problems += [f"model.{key}: host: not tried with DeepSpeed; use engine: fsdp2" for key in on_host]
    if model.dtype == "fp16":
        problems.append("model.dtype: fp16: its loss scaling is not used with DeepSpeed; use bf16 or fp32")
    if config.train.max_grad_value:
        problems.append("train.max_grad_value: DeepSpeed clips by norm only; use train.max_grad_norm")
    whole = adapt.router != "none" or adapt.experts is not None or bool(adapt.also)
    if model.dtype == "bf16" and adapt.lora is not None and whole:
        problem = "DeepSpeed wants one dtype of all that trains; set model.dtype: fp32, or use engine: fsdp2"
        problems.append(f"adapt.lora, which is in float32, beside whole weights in bf16: {problem}")
    if adapt.lora is not None and adapt.lora.lr_ratio != 1:
        problems.append("adapt.lora.lr_ratio: DeepSpeed has one optimizer for all; set it to 1, or use engine: fsdp2")
    if adapt.lora is not None and adapt.lora.dtype != "fp32":
        problem = "not tried with DeepSpeed; set fp32, or use engine: fsdp2"
        return [*problems, f"adapt.lora.dtype: {adapt.lora.dtype}: {problem}"]
    optimizers = dict.fromkeys(config.optimizers.values())
    if len(optimizers) > 1:
        return [*problems, "optimizer: by part: DeepSpeed has one optimizer for all; give one, or use engine: fsdp2"]
    (optimizer,) = optimizers
    if optimizer.name not in ("adamw", "sgd"):
        problems.append(f"optimizer.name {optimizer.name}: its states cannot be sharded; use adamw or sgd")
    if optimizer.fused_backward:
        problems.append("optimizer.fused_backward: gradients are freed before they are summed over ranks")
    if optimizer.offload:
        problems.append("optimizer.offload: set parallel.offload: optimizer instead")
    if trains_in_bf16(config) and optimizer.master_weights != "fp32":
        problem = "DeepSpeed keeps float32 master weights of bf16; set master_weights: fp32"
        problems.append(f"optimizer.master_weights {optimizer.master_weights}: {problem}")
    if optimizer.master_weights == "stochastic" and not trains_in_bf16(config):
        problems.append("optimizer.master_weights: stochastic; set none or fp32")
    return problems


def _read(file: str) -> dict[str, Any]:
    return read_json(expanded(file), dict[str, Any], f"parallel.deepspeed: {file!r}")


def _conflicts(given: dict[str, Any], decided: dict[str, Any], section: str = "") -> list[str]:
    """Return a line for each key whose value in the user's file, `given`, contradicts the run file's, `decided`.

    `section` is the prefix of the keys in messages, such as `zero_optimization.`.
    """
    problems = []
    for key, ours in decided.items():
        value = given.get(key, "auto")
        if isinstance(ours, dict) and isinstance(value, dict):
            problems += _conflicts(value, ours, f"{section}{key}.")
        elif value not in ("auto", ours):
            problems.append(f"{section}{key}: {json.dumps(value)}, and the run file makes it {json.dumps(ours)}")
    return problems


def _has(tree: Any, key: str) -> bool:
    """Return whether nested dicts have a key such as `zero_optimization.zenflow`."""
    first, _, rest = key.partition(".")
    return isinstance(tree, dict) and first in tree and (not rest or _has(tree[first], rest))


def _merge(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return both dicts merged section by section; where both have a value, that of `over`."""
    merged = {key: _merge(under[key], value) for key, value in over.items() if isinstance(under.get(key), dict)}
    return {**under, **over, **merged}
