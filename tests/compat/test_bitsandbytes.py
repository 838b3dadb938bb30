"""What is changed of bitsandbytes is still necessary and possible."""

import inspect

import bitsandbytes.optim.optimizer
import pytest
import torch
from bitsandbytes.nn import Linear4bit
from bitsandbytes.optim import AdamW8bit, PagedAdamW8bit
from torch import nn

from moetune.compat.bitsandbytes import SMALLEST_PAGED, keep_packing, share_tables, update


def optimizer() -> AdamW8bit:
    return AdamW8bit([nn.Parameter(torch.ones(4096))], lr=1e-3)


def test_each_8_bit_optimizer_makes_tables_of_its_own() -> None:
    one, other = optimizer(), optimizer()
    assert one.name2qmap is not other.name2qmap
    tables: dict[str, torch.Tensor] = {}
    for each in (one, other):
        share_tables(each, tables)
        each.param_groups[0]["params"][0].grad = torch.ones(4096)
        each.step()
    assert one.name2qmap.keys() == other.name2qmap.keys()
    assert all(other.name2qmap[name] is table for name, table in tables.items())


def test_a_4_bit_layer_may_repack_itself() -> None:
    linear = Linear4bit(64, 64)
    assert hasattr(linear, "support_avx512bf16_for_cpu")
    keep_packing(linear)
    assert not linear.support_avx512bf16_for_cpu


def test_paged_states_are_loaded_as_ours_are() -> None:
    assert "move_to_device" in inspect.signature(PagedAdamW8bit.load_state_dict).parameters
    assert str(SMALLEST_PAGED).replace("100000", "1e5") in inspect.getsource(PagedAdamW8bit.get_state_buffer)
    assert hasattr(PagedAdamW8bit([nn.Parameter(torch.ones(4))]).page_mng, "paged_tensors")


@pytest.mark.parametrize(("kind", "waits"), [(AdamW8bit, 0), (PagedAdamW8bit, 3)])
def test_an_update_waits_for_the_device_where_states_are_paged(
    kind: type[AdamW8bit], waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[torch.Tensor] = []
    monkeypatch.setattr(bitsandbytes.optim.optimizer, "sync_gpu", waited.append)
    parameters = [nn.Parameter(torch.ones(4096)) for _ in range(2)]
    made = kind(parameters, lr=1e-3)
    for parameter in parameters:
        parameter.grad = torch.ones(4096)
    update(made)
    assert len(waited) == waits
    assert all((parameter != 1).all() for parameter in parameters)
    for parameter in parameters:
        parameter.grad = torch.ones(4096)
    made.step()
    assert len(waited) == waits + (2 if waits == 0 else 3), "bitsandbytes waits by itself no more"
