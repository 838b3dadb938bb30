"""Checkpoints that are published quantized: kept as they are, to the bit, or packed as what they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from moetune.experts.bank import ExpertBank
from moetune.hub.tensor_files import Stored
from moetune.memory.trace.tracker import Tracker
from tests.memory.test_loading import load
from tests.published import write_mxfp4
from tests.reference import run_config, token_ids
from tests.resolved import build, write_packed_base

FROZEN: dict[str, Any] = {"also": ["norm"]}


def built(folder: Path, adapt: dict[str, Any], **model: Any) -> Any:
    return build(run_config(folder, adapt, model={"weights": "pretrained", **model}), "cpu")


def stock(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """As transformers unpacks it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mxfp4(tmp_path_factory.mktemp("models") / "gpt-oss", shards=True)


@pytest.fixture(scope="module")
def unpacked(mxfp4: Path) -> PreTrainedModel:
    return stock(mxfp4, torch.bfloat16)


def banks(model: torch.nn.Module) -> dict[str, ExpertBank]:
    return {name: module for name, module in model.named_modules() if isinstance(module, ExpertBank)}


@pytest.mark.parametrize(("base", "dtype"), [("auto", "bf16"), ("mxfp4", "fp32"), ("bf16", "fp32")])
def test_mxfp4_has_transformers_values_to_the_bit(
    base: str, dtype: str, mxfp4: Path, unpacked: PreTrainedModel
) -> None:
    """Kept, or unpacked; what trains is there in full."""
    adapted = built(mxfp4, {"experts": {"layers": "1", "ids": [2]}}, base=base, dtype=dtype)
    for name, bank in banks(adapted.model).items():
        assert bank.gate_up.storage == ("mxfp4" if base == "auto" else base)
        experts: Any = unpacked.get_submodule(name)
        for expert in range(bank.num_experts):
            of_stacks = experts.gate_up_proj[expert].T, experts.down_proj[expert].T
            for stack, expected in zip(("gate_up", "down"), of_stacks, strict=True):
                if expert in bank.frozen_slots:
                    found = getattr(bank, stack).matrix(bank.frozen_slots[expert], torch.bfloat16)
                else:
                    found = getattr(bank.trained[str(expert)], stack).weight.bfloat16()
                assert torch.equal(found.view(torch.int16), expected.contiguous().view(torch.int16))
        frozen = [expert for expert in range(bank.num_experts) if expert in bank.frozen_slots]
        assert torch.equal(bank.gate_up_bias.bfloat16(), experts.gate_up_proj_bias[frozen])
    assert adapted.run.config.model.base == ("mxfp4" if base == "auto" else base)


def test_mxfp4_computes_what_the_stock_model_does(mxfp4: Path) -> None:
    adapted, plain = built(mxfp4, FROZEN, dtype="fp32"), stock(mxfp4, torch.float32)
    with torch.no_grad():
        found = adapted.model.eval()(token_ids()).logits
        torch.testing.assert_close(found, plain(token_ids()).logits, rtol=1e-4, atol=1e-5)


def test_mxfp4_packed_otherwise_is_packing_what_it_stands_for(
    mxfp4: Path, unpacked: PreTrainedModel, tmp_path: Path
) -> None:
    config = json.loads((mxfp4 / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({name: t.contiguous() for name, t in unpacked.state_dict().items()}, tmp_path / "model.safetensors")
    found, expected = (banks(built(folder, FROZEN, base="nf4").model) for folder in (mxfp4, tmp_path))
    for name, bank in expected.items():
        assert all(torch.equal(bank.state_dict()[key], value) for key, value in found[name].state_dict().items())


@pytest.mark.parametrize(("base", "adapt"), [("auto", FROZEN), ("nf4", {"experts": {"ids": [0]}})])
def test_reading_mxfp4_takes_what_is_predicted(base: str, adapt: dict[str, Any], tmp_path: Path) -> None:
    """Expert by expert, on either side."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 1024, "num_local_experts": 8}
    folder, reads = write_mxfp4(tmp_path, **sizes), []
    config = run_config(folder, adapt, model={"weights": "pretrained", "base": base, "dtype": "bf16"})
    stock_rows = Stored.rows

    def rows(self: Stored, *where: Any) -> torch.Tensor:
        reads.append((found := stock_rows(self, *where)).nbytes)
        return found

    with patch.object(Stored, "rows", rows), Tracker({}) as tracker:
        build(config, "cpu")
    assert max(reads) <= load(config).host
    assert load(config).gpu == pytest.approx(tracker.peak_bytes, rel=0.06)


@pytest.mark.parametrize("base", ["auto", "nf4"])
def test_a_packed_base_of_it_is_the_same(base: str, mxfp4: Path, tmp_path: Path) -> None:
    """And says by itself what it is packed in."""
    write_packed_base(str(mxfp4), tmp_path / "packed", base, True)
    expected = built(mxfp4, {"router": "all"}, base=base).model.state_dict()
    found = built(tmp_path / "packed", {"router": "all"}).model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
