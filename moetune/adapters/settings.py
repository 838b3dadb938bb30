"""`adapter_config.json` made as PEFT writes it: targets, and rank and alpha of each."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from peft import LoraConfig as PeftLoraConfig

from moetune.adapters.base import AdapterBase, stacks_of
from moetune.adapters.factors import Adapter, plain_number

_TAKEN_FOR_EXPERTS = frozenset({"gate", "w1", "w2", "w3", "gate_proj", "up_proj", "down_proj"})
"""Names of linear layers that PEFT, on a model with experts, mistakes for the experts' projections of transformers 4.
"""


def peft_settings(
    base: AdapterBase, adapter: Adapter, saved: Sequence[str] = (), *, ties: bool = False
) -> dict[str, Any]:
    """Return the content of `adapter_config.json` for an adapter in PEFT's layout.

    Each target is a full path, so that PEFT matches no other.

    Args:
        saved: paths of the modules that the adapter holds whole.
        ties: whether one of these modules is tied to another weight.
    """
    linears, has_experts = base.structure.linears(), bool(base.layers)
    as_parameters = [
        path
        for path in adapter.linears
        if path not in linears or (has_experts and path.rpartition(".")[2] in _TAKEN_FOR_EXPERTS)
    ]
    parameters = [f"{path}.weight" for path in as_parameters]
    sizes: dict[str, tuple[int, float]] = {}  # name of a layer or parameter -> rank and alpha
    for path, factors in adapter.linears.items():
        sizes[f"{path}.weight" if path in as_parameters else path] = factors.rank, factors.alpha
    for path, projections in adapter.experts.items():
        stacks = stacks_of(base.layers[path])
        for name, factors in projections.items():
            parameters.append(f"{path}.{stacks[name]}")
            sizes[f"{path}.{stacks[name]}"] = factors.rank, factors.alpha
    often = Counter(sizes.values())
    usual = max(often, key=lambda size: (often[size], -size[0]))
    patterns = {re.escape(name): size for name, size in sizes.items() if size != usual}
    settings = PeftLoraConfig(
        task_type="CAUSAL_LM",
        r=usual[0],
        lora_alpha=plain_number(usual[1]),
        rank_pattern={pattern: rank for pattern, (rank, _) in patterns.items()},
        alpha_pattern={pattern: plain_number(alpha) for pattern, (_, alpha) in patterns.items() if alpha != usual[1]},
        target_modules=[],  # None would mean PEFT's defaults for the model type; the real ones are set below
        target_parameters=parameters or None,
        modules_to_save=list(saved) or None,
        ensure_weight_tying=ties,
        inference_mode=True,
    ).to_dict()
    return settings | {"target_modules": [path for path in adapter.linears if path not in as_parameters]}


def uniform_settings(names: Sequence[str], rank: int, scale: float) -> dict[str, Any]:
    """Return the content of `adapter_config.json` with one rank and one scale, for programs that go by tensor names.

    `names` are the modules that have factors; the settings list their last parts.
    """
    settings = PeftLoraConfig(
        task_type="CAUSAL_LM", r=rank, lora_alpha=plain_number(scale * rank), inference_mode=True
    ).to_dict()
    targets = {name.removesuffix(".base_layer").rpartition(".")[2] for name in names}
    return settings | {"target_modules": sorted(targets)}
