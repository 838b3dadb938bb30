"""`MoetuneConfig`: stock transformers loads a model whose experts and linear layers are quantized."""

import copy
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from moetune.adapt.weights.quantizer import MoetuneConfig
from moetune.errors import UserError, note_once
from moetune.experts.bank import ExpertBank
from tests.adapt.weights.test_published import write
from tests.reference import small_linears_are_quantized


@pytest.mark.parametrize(("base", "tolerance"), [("fp32", 1e-5), ("nf4", 0.5)])
def test_a_model_is_loaded_by_from_pretrained(base: str, tolerance: float, tmp_path: Path) -> None:
    """Everything is frozen, and logits on a base in compute precision equal the plain model's."""
    model = write(tmp_path, "qwen2_moe", max_shard_size="50KB").eval()
    ids = torch.arange(12)[None]
    with small_linears_are_quantized():
        loaded = AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=MoetuneConfig(base=base), dtype=torch.float32, device_map={"": "cpu"}
        )
    assert not loaded.training
    assert any(isinstance(module, ExpertBank) for module in loaded.modules())
    assert not any(tensor.is_meta for tensor in (*loaded.parameters(), *loaded.buffers()))
    with torch.no_grad():
        difference = (loaded(ids).logits - model(ids).logits).norm() / model(ids).logits.norm()
    assert 0 <= difference < tolerance


def test_the_configuration_says_how_it_was_quantized(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """And transformers reports no tensor as missing."""
    write(tmp_path, "mixtral")
    capfd.readouterr()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=MoetuneConfig(base="int8"))
    assert "MISSING" not in capfd.readouterr().err
    assert loaded.is_quantized
    assert loaded.hf_quantizer.is_trainable
    assert loaded.config.quantization_config.to_dict() == {
        "quant_method": "moetune", "base": "int8", "double_quant": True,
    }  # fmt: skip
    assert AutoConfig.from_pretrained(tmp_path).model_type == "mixtral"


@pytest.mark.parametrize("base", [{"default": "bf16", "parts": {"experts": "nf4"}}, "nvfp4", "mxfp4"], ids=str)
def test_a_cast_leaves_scales_of_quantized_weights_as_they_are(base: object, tmp_path: Path) -> None:
    """Logits are those of a model that is loaded in that dtype."""
    write(tmp_path, "mixtral")
    ids = torch.arange(12)[None]

    def loaded(dtype: torch.dtype) -> PreTrainedModel:
        config = MoetuneConfig(base=base)
        with small_linears_are_quantized():
            return AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, dtype=dtype)

    with torch.no_grad():
        cast, expected = (loaded(dtype).to(torch.bfloat16) for dtype in (torch.float32, torch.bfloat16))
        assert torch.equal(cast(ids).logits, expected(ids).logits)
        plain = loaded(torch.float32)
        in_32_bits = plain(ids).logits
        for dtype, tolerance in ((torch.float64, 1e-5), (torch.float16, 1e-2)):
            cast = copy.deepcopy(plain).to(dtype)
            assert (cast(ids).logits - in_32_bits).norm() < tolerance * in_32_bits.norm()


def test_an_adapter_of_experts_is_not_left_out_in_silence(tmp_path: Path) -> None:
    plain = write(tmp_path / "base", "mixtral")
    for targets in ("all-linear", ["q_proj"]):
        get_peft_model(copy.deepcopy(plain), LoraConfig(r=2, target_modules=targets)).save_pretrained(tmp_path / "lora")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=MoetuneConfig())
        of_experts = pytest.raises(UserError, match="applies no factors to experts")
        with of_experts if targets == "all-linear" else nullcontext():
            PeftModel.from_pretrained(loaded, tmp_path / "lora")


def test_what_peft_does_not_train_or_merge_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "mixtral")
    ids, note_of = torch.arange(12)[None], "note: PEFT trains no experts here"
    note_once.cache_clear()
    for base, kind in (("nf4", "Linear4bit"), ("int8", "QuantizedLinear")):
        with small_linears_are_quantized():
            loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=MoetuneConfig(base=base))
        adapted = get_peft_model(copy.deepcopy(loaded), LoraConfig(r=2, target_modules="all-linear"))
        adapted.eval()(ids)
        assert note_of not in capfd.readouterr().err
        adapted.train()(ids)
        assert (note_of in capfd.readouterr().err) == (base == "nf4")
        with pytest.raises(ValueError, match=f"cannot merge factors into {kind}.*moetune adapter merge"):
            adapted.merge_and_unload()
        whole = get_peft_model(loaded, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["experts"]))
        with pytest.raises(UserError, match=r"modules_to_save: model\.layers\.0\.mlp\.experts holds experts"):
            whole.train()(ids)


@pytest.mark.parametrize("base", ["int8", "nvfp4"])
def test_magnitudes_of_dora_are_of_the_weights(base: str, tmp_path: Path) -> None:
    """Not of the codes that stand for them."""
    plain = write(tmp_path, "mixtral")
    with small_linears_are_quantized():
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=MoetuneConfig(base=base))
    adapted = get_peft_model(loaded, LoraConfig(r=2, target_modules=["q_proj"], use_dora=True))
    for name, magnitude in adapted.named_parameters():
        if "magnitude" in name:
            layer = name.removeprefix("base_model.model.").partition(".lora_")[0]
            expected = plain.get_submodule(layer).weight.norm(dim=1)
            assert torch.allclose(magnitude, expected, rtol=0.2), (base, layer)


def test_what_is_asked_for_is_done_or_refused(tmp_path: Path) -> None:
    write(tmp_path, "mixtral")
    assert AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=MoetuneConfig(), device_map="auto"
    ).device == torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ValueError, match="device_map has 2 devices, and one holds the whole model"):
        AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=MoetuneConfig(), device_map={"model": "cpu", "lm_head": "disk"}
        )
    with pytest.raises(UserError, match=r"^dtype=torch\.float64: give bfloat16"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=MoetuneConfig(), dtype=torch.float64)
    with pytest.raises(TypeError, match="load_in_8bit"):
        MoetuneConfig(load_in_8bit=True)  # type: ignore[call-arg]


def test_a_checkpoint_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, "mixtral")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"missing model\.layers\.1\.mlp\.experts\.down_proj of expert 3"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=MoetuneConfig())
