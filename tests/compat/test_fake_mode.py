"""A step on quick fake tensors is a step on torch's own; what torch lacks is still lacking."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode

from moetune.compat.fake_mode import QuickFakeMode, add_missing_fakes
from moetune.kernels import operators
from moetune.memory.trace import trace
from moetune.models.catalog.gpus import find_gpu
from tests.memory.models import toy_run, write_toy


@pytest.mark.full
def test_torch_has_no_fused_sgd_for_fake_tensors() -> None:
    asked = "import torch; print(torch._C._dispatch_has_kernel_for_dispatch_key('aten::_fused_sgd_', 'Meta'))"
    found = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout
    assert found.strip() == "False"
    add_missing_fakes()
    with FakeTensorMode():
        weight = torch.nn.Parameter(torch.empty(2**50))  # real zeros of that size cannot be had
        weight.grad = torch.empty_like(weight)
        torch.optim.SGD([weight], lr=0.1, fused=True).step()


@pytest.mark.full
@pytest.mark.parametrize("model_type", ["gpt_oss", "qwen3_next"])
def test_a_trace_is_that_of_torchs_own_mode(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every storage, and in the operation, module and phase that made it."""
    lora = {"rank": 4, "alpha": 8, "targets": ["attention", "experts"], "ids": [1]}
    adapt = {"router": "all", "experts": {"layers": "1", "ids": [0]}, "lora": lora}
    run = toy_run(
        write_toy(tmp_path, model_type, num_hidden_layers=2), model_type, adapt, optimizer={"name": "adamw8bit"}
    )

    def traced() -> list[Any]:
        log = trace(run, gpu=find_gpu("l40s")).log
        return [log.entries, [(block.bytes, block.part, block.phase, block.module, block.op) for block in log.blocks]]

    quick = traced()
    monkeypatch.setattr(QuickFakeMode, "__torch_dispatch__", FakeTensorMode.__torch_dispatch__)
    assert traced() == quick


def test_operators_of_ours_change_values_only() -> None:
    """Quick fakes leave out those that return nothing, and make again what those return that also write."""

    def described(mode: FakeTensorMode) -> list:
        with mode:
            x, order, inverse = torch.empty(6, 4), torch.empty(8, dtype=torch.int64), torch.empty(12, dtype=torch.int32)
            rows = [operators.gather_rows(x, order, 2, inverse) for _ in range(2)]
            assert operators.add_rows_(x, rows[0], order, 2, None) is None
        assert len({one.untyped_storage()._cdata for one in (x, *rows)}) == 3
        return [(one.shape, one.stride(), one.dtype, one.device) for one in (x, order, inverse, *rows)]

    assert described(QuickFakeMode()) == described(FakeTensorMode())


def test_what_is_made_again_is_of_its_own_type_and_memory() -> None:
    with QuickFakeMode():
        x, flags = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.bool)
        assert [(x * number).dtype for number in (1, 1.0, True)] == [torch.int64, torch.float32, torch.int64]
        assert (flags * True).dtype == torch.bool != (flags * 1).dtype
        made = [torch.sort(x) for _ in range(2)]
        normed = [torch.native_layer_norm(torch.empty(3, 4), [4], None, None, 1e-5) for _ in range(2)]
        assert [[tensor.shape for tensor in one] for one in normed] == [[(3, 4), (3, 1), (3, 1)]] * 2
        assert len({values.untyped_storage()._cdata for pair in made for values in pair}) == 4


def test_quick_fakes_leave_other_tensors_to_torch() -> None:
    with QuickFakeMode():
        known = torch.tensor(2.0)  # its value is: torch answers questions about it
        assert (known * 3).item() == 6
        assert known.is_cpu
        other = torch.empty(3).to("meta")
        assert (other * 2).device.type == "meta"


def test_real_tensors_become_fake_ones_of_their_own_layout() -> None:
    real, places = torch.empty(4, 6).T[::2], torch.tensor([2, 0, 1])

    def described(mode: FakeTensorMode) -> list:
        with mode:
            ids = torch.empty(5, dtype=torch.int64)
            made = [torch.tensor([[1, 2]]), torch.tensor([1.5, 2.5], dtype=torch.float64), torch.tensor([])]
            made += [out for _ in range(2) for out in (real * 2, places[ids])]
            assert all(isinstance(one, FakeTensor) and one.untyped_storage().nbytes() >= one.nbytes for one in made)
            with pytest.raises(DynamicOutputShapeException):  # the number of rows depends on values
                _ = real[torch.tensor([True, False, True])]
        return [(one.shape, one.stride(), one.dtype, one.device, one.untyped_storage().nbytes()) for one in made]

    assert described(QuickFakeMode()) == described(FakeTensorMode(allow_non_fake_inputs=True))
