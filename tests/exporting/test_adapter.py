"""Adapters of stock PEFT and of toys, converted and merged: stock transformers computes what the adapter computed."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from moetune.adapt.start_from.peft_adapter import load_peft
from moetune.adapters.base import AdapterBase
from moetune.adapters.files import open_adapter
from moetune.adapters.read import read
from moetune.errors import UserError
from moetune.exporting.adapter import check_adapter, convert_adapter, diff_adapters, merge_adapter
from moetune.exporting.export import export
from moetune.inference.opened import open_model
from moetune.models.structure import meta_model, read_structure
from moetune.tensor_files import read_headers
from tests.adapters.made import RANK, SCALE, make_adapter, write
from tests.exporting.runs import tensors_of, write_base, write_run
from tests.exporting.writers.test_peft import logits
from tests.reference import excite_, run_config, token_ids
from tests.resolved import build

MODELS = [
    "mixtral",
    *(pytest.param(name, marks=pytest.mark.full) for name in ("qwen3_moe", "deepseek_v3", "olmoe", "glm4_moe")),
    "gpt_oss",
]


def stock_adapter(base: Path, folder: Path, **more: Any) -> PeftModel:
    """An adapter that stock PEFT made and saved, with factors that act and differ between experts."""
    settings = {"r": RANK, "lora_alpha": RANK * SCALE, "target_modules": ["q_proj", "o_proj"]}
    settings |= {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    torch.manual_seed(4)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = get_peft_model(plain, LoraConfig(**(settings | more))).eval()
    excite_(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name and ".lora_B." in name:  # the expert is the fastest index of the columns
                parameter *= torch.linspace(0.3, 3, 8)[torch.randperm(8)].repeat(parameter.shape[1] // 8)
    model.save_pretrained(folder)
    return model


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def base_in(folder: Path) -> AdapterBase:
    plain = meta_model(AutoModelForCausalLM.from_pretrained(folder).config)
    return AdapterBase(str(folder), plain, read_structure(plain), tuple(read_headers(folder)))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("model_type", MODELS)
def test_logits_of_stock_peft_after_each_conversion_and_merge(model_type: str, tmp_path: Path) -> None:
    """An adapter of stock PEFT, through every program's layout, merged: 1e-5 of the logits of PEFT itself."""
    base = write_base(tmp_path / "base", model_type, num_hidden_layers=2)
    targets = {"target_modules": ["o_proj"]} if model_type == "deepseek_v3" else {}
    expected = logits(stock_adapter(base, tmp_path / "stock", **targets))
    from_peft, programs = tmp_path / "stock", ["unsloth-grouped", "vllm", "sglang"]
    for program in programs:
        if (model_type, program) == ("gpt_oss", "sglang"):
            with pytest.raises(UserError, match="adapter merge"):
                convert_adapter(str(base), from_peft, program, tmp_path / program)
            continue
        written = convert_adapter(str(base), from_peft, program, tmp_path / program)
        assert written.tensors == len(load_file(tmp_path / program / "adapter_model.safetensors"))
        assert check_adapter(str(base), tmp_path / program, program=program).problems == []
        merge_adapter(str(base), tmp_path / program, tmp_path / "merged", overwrite=True)
        torch.testing.assert_close(logits(loaded(tmp_path / "merged")), expected, atol=1e-5, rtol=1e-5)
        assert diff_adapters(from_peft, tmp_path / program, base=str(base)).equal
    convert_adapter(str(base), tmp_path / "vllm", "peft", tmp_path / "back")
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (from_peft, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(after[name].numpy().tobytes() == tensor.numpy().tobytes() for name, tensor in before.items())
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    again = logits(PeftModel.from_pretrained(plain, str(tmp_path / "back")).eval())
    torch.testing.assert_close(again, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "model_type",
    [
        "mixtral",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("qwen3_moe", "olmoe", "deepseek_v3", "glm4_moe", "qwen3_next", "minimax_m2", "ernie4_5_moe")
        ),
    ],
)
def test_all_linear_of_stock_peft_is_merged_converted_and_trained_on(model_type: str, tmp_path: Path) -> None:
    """On the models of transformers 5 it has factors on routers, and of twice the rank on gate and up."""
    base, stock = write_base(tmp_path / "base", model_type, num_hidden_layers=2), tmp_path / "stock"
    expected = logits(stock_adapter(base, stock, target_modules="all-linear", target_parameters=None))
    path = str(base)
    assert any("mlp.gate.lora_A" in name for name in load_file(stock / "adapter_model.safetensors"))
    report = check_adapter(path, stock, program="peft")
    assert report.problems == []
    for program in ("peft", "vllm"):
        if (model_type, program) == ("deepseek_v3", "vllm"):
            (problem,) = check_adapter(path, stock, program="vllm").problems
            assert re.search(r"vLLM does not apply factors on .*kv_b_proj and 1 more.*merge", problem)
            continue
        if program == "vllm" and model_type.startswith("qwen3"):
            with pytest.raises(UserError, match="vLLM has no LoRA on routers"):
                convert_adapter(path, stock, program, tmp_path / program)
            continue
        convert_adapter(path, stock, program, tmp_path / program)
        assert diff_adapters(stock, tmp_path / program, base=path).equal
        merge_adapter(path, tmp_path / program, tmp_path / "merged", overwrite=True)
        torch.testing.assert_close(logits(loaded(tmp_path / "merged")), expected, atol=1e-5, rtol=1e-5)
    targets = ["attention", "experts", "router", *(["shared_expert_gate"] if model_type == "qwen3_next" else [])]
    lora = {"rank": 2 * RANK, "alpha": 2 * RANK * SCALE, "targets": targets}
    settings = {"weights": "pretrained", "base": "fp32", "dtype": "fp32"}
    adapted = build(run_config(base, {"lora": lora}, model=settings), "cpu")
    adapted.model.eval()
    (note,) = load_peft(adapted, stock)
    assert "of a lower rank" in note
    assert "gate_up_proj" not in note
    torch.testing.assert_close(logits(adapted.model), expected, atol=1e-5, rtol=1e-5)
    adapted.model(input_ids=token_ids(), labels=token_ids()).loss.backward()
    assert all(parameter.grad is not None for parameter in adapted.trainable().values())


def test_a_router_that_an_adapter_holds_whole_is_merged_and_kept(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", "mixtral", num_hidden_layers=2)
    model = stock_adapter(base, tmp_path / "stock", modules_to_save=["mlp.gate"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".modules_to_save." in name:
                parameter.normal_(std=0.5)
    model.save_pretrained(tmp_path / "stock")
    report = check_adapter(str(base), tmp_path / "stock")
    assert (report.problems, report.saved) == ([], [f"model.layers.{layer}.mlp.gate.weight" for layer in (0, 1)])
    convert_adapter(str(base), tmp_path / "stock", "unsloth-grouped", tmp_path / "other")
    merge_adapter(str(base), tmp_path / "other", tmp_path / "merged")
    torch.testing.assert_close(logits(loaded(tmp_path / "merged")), logits(model), atol=1e-5, rtol=1e-5)
    with pytest.raises(UserError, match="hold factors only"):
        convert_adapter(str(base), tmp_path / "stock", "vllm", tmp_path / "vllm")
    assert not (tmp_path / "vllm").exists()


def test_lora_on_the_head_is_merged_beside_its_frozen_weight(base: Callable[[str], Path], tmp_path: Path) -> None:
    """PEFT stores the frozen `lm_head` with its factors: no update, and to be that of the base."""
    path, stock = str(base("mixtral")), tmp_path / "stock"
    expected = logits(stock_adapter(base("mixtral"), stock, target_modules=["q_proj", "lm_head"]))
    name, file = "base_model.model.lm_head.base_layer.weight", stock / "adapter_model.safetensors"
    tensors = load_file(file)
    assert name in tensors
    report = check_adapter(path, stock)
    assert (report.problems, report.saved, report.programs["peft"]) == ([], [], None)
    for program in ("peft", "vllm"):
        assert convert_adapter(path, stock, program, tmp_path / program).notes == []
        assert json.loads((tmp_path / program / "adapter_config.json").read_text())["modules_to_save"] is None
    save_file(tensors | {name: tensors[name].bfloat16()}, file)
    for adapter in (stock, tmp_path / "vllm"):
        merge_adapter(path, adapter, tmp_path / "merged", overwrite=True)
        torch.testing.assert_close(logits(loaded(tmp_path / "merged")), expected, atol=1e-5, rtol=1e-5)
    other = write_base(tmp_path / "other", "mixtral", num_hidden_layers=2, seed=1)
    with pytest.raises(UserError, match=r"made on another base than 'other': it stores lm_head\.weight"):
        merge_adapter(str(other), stock, tmp_path / "merged", overwrite=True)
    (said,) = convert_adapter(str(other), stock, "peft", tmp_path / "peft", overwrite=True).notes
    assert said == f"adapter {str(stock)!r} names the base {path!r}, and it is read with {str(other)!r}"


def test_adapters_of_which_a_part_is_not_read_are_not_the_same(base: Callable[[str], Path], tmp_path: Path) -> None:
    path, of = str(base("mixtral")), base_in(base("mixtral"))
    adapter = make_adapter(of)
    write(tmp_path / "one", adapter, of, "peft")
    foreign = {"foreign.lora_A.weight": torch.ones(3, 2)}
    write(tmp_path / "other", adapter, of, "peft", lambda tensors, _: tensors.update(foreign))
    assert diff_adapters(tmp_path / "one", tmp_path / "one", base=path).equal
    with pytest.raises(UserError, match=r"other' does not fit .*\n  foreign: lora_B is missing"):
        diff_adapters(tmp_path / "one", tmp_path / "other", base=path)
    zero = {name: replace(one, B=torch.zeros_like(one.B)) for name, one in adapter.linears.items()}
    write(tmp_path / "zero", replace(adapter, linears=zero, experts={}), of, "peft")
    with pytest.raises(UserError, match="nothing to compare"):
        diff_adapters(tmp_path / "zero", tmp_path / "zero", base=path)


def test_only_what_has_factors_changes_in_the_base(tmp_path: Path) -> None:
    """The rest of the checkpoint is that of the base, byte for byte, in bfloat16 as well."""
    base = write_base(tmp_path / "base", "mixtral", num_hidden_layers=2, dtype=torch.bfloat16)
    of = base_in(base)
    adapter = make_adapter(of, ids=(3,))
    write(tmp_path / "adapter", adapter, of, "per-expert")
    for folder, tokens in ((base, ["<s>"]), (tmp_path / "adapter", ["<s>", "<new>"])):
        (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"content": token} for token in tokens]}))
    written = merge_adapter(str(base), tmp_path / "adapter", tmp_path / "merged")
    assert any("lacks 1 of its added tokens" in note for note in written.notes)
    before, after = tensors_of(base), tensors_of(tmp_path / "merged")
    changed = {name for name, tensor in before.items() if not tensor.equal(after[name])}
    assert changed == {name for name in before if ".experts.3." in name or "_proj" in name}
    assert written.tensors == len(changed) == 2 * (3 + 4)
    (tmp_path / "adapter/tokenizer.json").write_text('{"added_tokens": "<new>"}')
    with pytest.raises(UserError, match=r"adapter/tokenizer\.json' cannot be read: added_tokens"):
        merge_adapter(str(base), tmp_path / "adapter", tmp_path / "damaged")
    assert not (tmp_path / "damaged").exists()


def test_an_update_that_rounding_takes_away_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = write_base(tmp_path / "base", "mixtral", num_hidden_layers=2, dtype=torch.bfloat16)
    of = base_in(base)
    write(tmp_path / "adapter", make_adapter(of), of, "peft", lambda _, settings: settings.update(lora_alpha=1e-9))
    assert merge_adapter(str(base), tmp_path / "adapter", tmp_path / "merged").tensors == 0
    assert "warning: the base's weights stay as they are" in capsys.readouterr().err


def test_values_beyond_float16_are_not_written(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", "mixtral", num_hidden_layers=2, dtype=torch.float16)
    of = base_in(base)
    write(tmp_path / "adapter", make_adapter(of), of, "peft", lambda _, settings: settings.update(lora_alpha=1e6))
    with pytest.raises(UserError, match=r"k_proj\.weight would hold values that float16"):
        merge_adapter(str(base), tmp_path / "adapter", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("layout", ["megatron", "per-expert"])
def test_training_starts_from_every_layout(layout: str, tmp_path: Path) -> None:
    """`adapt.start_from` gives the same factors, to the bit, as from PEFT's layout."""
    base = write_base(tmp_path / "base", "mixtral", num_hidden_layers=2)
    lora = {"rank": RANK, "alpha": RANK * SCALE, "targets": ["attention", "experts"]}
    run = write_run(tmp_path / "run", base, {"lora": lora})
    export(run.path, "peft", tmp_path / "peft")
    of = base_in(base)
    trained = read(open_adapter(tmp_path / "peft"), of).adapter
    write(tmp_path / "other", trained, of, layout)
    adapted = run.fresh()
    load_peft(adapted, tmp_path / "other")
    expected = run.adapted.trainable()
    assert all(parameter.equal(expected[name]) for name, parameter in adapted.trainable().items())


def test_stock_peft_is_not_given_another_order_of_the_experts(tmp_path: Path) -> None:
    """`eval` and `generate` put an adapter on its base with stock PEFT, which reads one layout only."""
    base = write_base(tmp_path / "base", "mixtral", num_hidden_layers=2)
    stock_adapter(base, tmp_path / "stock")
    convert_adapter(str(base), tmp_path / "stock", "unsloth-grouped", tmp_path / "grouped")
    with pytest.raises(UserError, match="--to peft"):
        open_model(str(tmp_path / "grouped"), device="cpu", dtype="fp32")
    tensors = load_file(tmp_path / "stock/adapter_model.safetensors")
    shutil.copytree(tmp_path / "stock", tmp_path / "compiled")
    save_file({f"_orig_mod.{name}": x for name, x in tensors.items()}, tmp_path / "compiled/adapter_model.safetensors")
    with pytest.raises(UserError, match=r"other names than PEFT looks for, as _orig_mod\..* --to peft"):
        open_model(str(tmp_path / "compiled"), device="cpu", dtype="fp32")
    convert_adapter(str(base), tmp_path / "grouped", "peft", tmp_path / "back")
    opened = open_model(str(tmp_path / "back"), device="cpu", dtype="fp32")
    torch.testing.assert_close(logits(opened.model), logits(open_model(str(tmp_path / "stock"), device="cpu").model))


def test_what_is_refused_names_the_remedy(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", "mixtral", num_hidden_layers=2)
    of = base_in(base)
    adapter = make_adapter(of, ids=(1, 5))
    write(tmp_path / "grouped", adapter, of, "unsloth-grouped")
    with pytest.raises(UserError, match="--from peft"):
        convert_adapter(str(base), tmp_path / "grouped", "vllm", tmp_path / "out")
    convert_adapter(str(base), tmp_path / "grouped", "vllm", tmp_path / "out", layout="unsloth-grouped")
    with pytest.raises(UserError, match="holds what is being converted"):
        convert_adapter(str(base), tmp_path / "grouped", "vllm", base, layout="unsloth-grouped", overwrite=True)
