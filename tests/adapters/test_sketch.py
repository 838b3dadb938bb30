"""The sketch changes with every wrong reading, and not with the dtype."""

from dataclasses import replace

import pytest
import torch

from moetune.adapters.factors import Adapter, Factors
from moetune.adapters.sketch import differing, sketch
from tests.adapters.made import base_of_toy, make_adapter


def changed(adapter: Adapter, **factors: object) -> Adapter:
    path = next(iter(adapter.experts))
    own = dict(adapter.experts[path])
    own["down"] = replace(own["down"], **factors)  # type: ignore[arg-type]
    return replace(adapter, experts={**adapter.experts, path: own})


def test_a_dtype_of_16_bits_is_within_the_tolerance() -> None:
    adapter = make_adapter(base_of_toy("mixtral"))

    def rounded(one: Factors) -> Factors:
        return replace(one, A=one.A.bfloat16(), B=one.B.bfloat16())

    low = Adapter(
        {path: rounded(one) for path, one in adapter.linears.items()},
        {path: {name: rounded(one) for name, one in own.items()} for path, own in adapter.experts.items()},
    )
    assert differing(low, sketch(adapter)) == []


@pytest.mark.parametrize("how", ["experts", "ranks", "rows", "scale"])
def test_whatever_changes_an_update_changes_its_number_alone(how: str) -> None:
    adapter = make_adapter(base_of_toy("mixtral"))
    down = adapter.experts["model.layers.0.mlp.experts"]["down"]
    other = {
        "experts": {"B": down.B.roll(1, 0)},
        "ranks": {"B": down.B.roll(1, 2)},
        "rows": {"B": down.B.roll(1, 1)},
        "scale": {"scale": down.scale * 1.1},
    }[how]
    assert differing(changed(adapter, **other), sketch(adapter)) == ["model.layers.0.mlp.experts.down"]


def test_the_same_update_in_other_factors_has_the_same_number() -> None:
    adapter = make_adapter(base_of_toy("mixtral"))
    down = adapter.experts["model.layers.0.mlp.experts"]["down"]
    turned = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(1)))[0]
    assert differing(changed(adapter, A=turned @ down.A, B=down.B @ turned.T), sketch(adapter)) == []
