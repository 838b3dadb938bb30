"""Random adapters of toys in one form, and the folders in which programs would leave them."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from moetune.adapters.base import AdapterBase, sizes_of
from moetune.adapters.factors import DOWN, GATE_UP, Adapter, Factors, fused, parted
from moetune.adapters.files import AdapterRecord, StoredAdapter, open_adapter, write_adapter
from moetune.adapters.read import LAYOUTS
from moetune.adapters.settings import peft_settings, uniform_settings
from moetune.adapters.stacked import ORDERS
from moetune.adapters.write import per_expert, stacked
from moetune.models.hub.key_mapping import published_names
from moetune.models.structure import meta_model, read_structure
from tests.toys import toy_config

RANK, SCALE = 3, 2.5


@cache
def base_of_toy(model_type: str, **sizes: Any) -> AdapterBase:
    """The base of a toy with two layers."""
    return base_from(toy_config(model_type, num_hidden_layers=2, **sizes))


def base_from(config: PretrainedConfig) -> AdapterBase:
    """A base without weights; its names are those that transformers would save."""
    plain = meta_model(config)
    return AdapterBase(config.model_type, plain, read_structure(plain), tuple(published_names(plain)))


def make_adapter(
    base: AdapterBase, *, seed: int = 0, split: bool = False, ids: tuple[int, ...] | None = None, grow: bool = False
) -> Adapter:
    """Factors on attention and on experts. With `split`, gate and up have an A each; without `ids`, every expert has
    factors; with `grow`, an expert's update is the larger the higher its id, as if more tokens had reached it."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    def factors(into: int, out: int, experts: int | None = None) -> Factors:
        shape = () if experts is None else (experts,)
        return Factors(draw(*shape, RANK, into), draw(*shape, out, RANK), SCALE)

    linears = {
        path: factors(linear.in_features, linear.out_features)
        for path, linear in base.structure.linears("attention").items()
    }
    experts = {}
    for path, layer in base.layers.items():
        count, (into, out) = layer.shape.num_experts, sizes_of(layer)[GATE_UP]
        gate_up = factors(into, out, count)
        if split:
            gate_up = fused(layer.shape, factors(into, out // 2, count), factors(into, out // 2, count))
        experts[path] = {GATE_UP: gate_up, DOWN: factors(*sizes_of(layer)[DOWN], count)}
        for one in experts[path].values():
            for expert in range(count):
                if ids is not None and expert not in ids:
                    one.A[expert], one.B[expert] = 0, 0
                if grow:
                    one.B[expert] *= 1 + expert
    return Adapter(linears, experts)


def stored_as(adapter: Adapter, base: AdapterBase, layout: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and settings of an adapter in each layout that is read."""
    if layout in ORDERS:
        settings = peft_settings(base, adapter)
        if layout == "megatron":
            settings.pop("layers_to_transform")
        return stacked(adapter, ORDERS[layout]), settings
    factors = {base.linear_name(path): one for path, one in adapter.linears.items()}
    if layout == "per-expert":
        factors |= per_expert(adapter, base)
    else:
        for path, own in adapter.experts.items():
            layer = base.layers[path]
            gate, up = parted(layer.shape, own[GATE_UP])
            factors |= {f"{path}.gate_proj": gate, f"{path}.up_proj": up, f"{path}.down_proj": own[DOWN]}
    tensors = {f"{name}.lora_{factor}.weight": getattr(one, factor) for name, one in factors.items() for factor in "AB"}
    ranks = {one.rank for one in factors.values()}
    assert len(ranks) == 1
    return tensors, uniform_settings(list(factors), ranks.pop(), SCALE)


def write(
    folder: Path,
    adapter: Adapter,
    base: AdapterBase,
    layout: str,
    change: Callable[[dict[str, Tensor], dict[str, Any]], object] | None = None,
    record: AdapterRecord | None = None,
) -> StoredAdapter:
    """Write an adapter as another program would, open it again; `change` may first spoil tensors and settings."""
    assert layout in LAYOUTS
    tensors, settings = stored_as(adapter, base, layout)
    if change is not None:
        change(tensors, settings)
    folder.mkdir(exist_ok=True)
    write_adapter(folder, tensors, settings, record or {})
    return open_adapter(folder)


def same(one: Adapter, other: Adapter) -> bool:
    """Whether all factors are equal to the bit."""
    here, there = one.named(), other.named()
    return here.keys() == there.keys() and all(
        factors.A.equal(there[name].A) and factors.B.equal(there[name].B) and factors.scale == there[name].scale
        for name, factors in here.items()
    )
