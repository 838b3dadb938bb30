"""Every layout on every kind of model: told from the files, read, written again, equal to the byte."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moetune.adapters.factors import Adapter
from moetune.adapters.files import open_adapter, write_adapter
from moetune.adapters.read import _OF_TOWER, LAYOUTS, read, sure
from moetune.adapters.write import PROGRAMS, laid_out
from moetune.errors import UserError
from tests.adapters.made import base_from, base_of_toy, make_adapter, same, stored_as, write
from tests.toys import expert_model_types, toy_config

MODELS = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "olmoe", "glm4_moe")
APART = [name for name in MODELS if name != "gpt_oss"]
"""Whose checkpoints have tensors for each expert."""
PUSHED = {("mixtral", layout) for layout in LAYOUTS} | {("gpt_oss", "peft"), ("gpt_oss", "megatron")}


def cases() -> list[Any]:
    """Models × layouts × whether gate and up have an A each; on a push, one model for each layout."""
    found = []
    for model, layout, split in product(MODELS, LAYOUTS, (False, True)):
        if layout == "per-expert" and model not in APART:
            continue
        marks = [] if (model, layout) in PUSHED and split == (layout != "3d") else [pytest.mark.full]
        found.append(pytest.param(model, layout, split, id=f"{model} {layout}{' split' * split}", marks=marks))
    return found


def servable(adapter: Adapter) -> Adapter:
    """Without the layer that vLLM and SGLang split."""
    return replace(adapter, linears={path: one for path, one in adapter.linears.items() if "kv_b_proj" not in path})


def latent(adapter: Adapter) -> bool:
    """Whether it has factors on multi-head latent attention."""
    return any("kv_a_proj_with_mqa" in path for path in adapter.linears)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("model", "layout", "split"), cases())
def test_there_and_back_to_the_byte(model: str, layout: str, split: bool, tmp_path: Path) -> None:
    """Read, converted to each program, read from there, and stored again as it was."""
    base = base_of_toy(model)
    adapter = servable(make_adapter(base, split=split, grow=True))
    stored = write(tmp_path / "first", adapter, base, layout)
    found = read(stored, base, layout)
    assert (found.layout, found.problems) == (layout, [])
    assert same(found.adapter, adapter)
    before, _ = stored_as(adapter, base, layout)
    for program in PROGRAMS:
        if (program in ("sglang", "llama.cpp") and model not in APART) or (program == "llama.cpp" and latent(adapter)):
            continue
        laid = laid_out(found.adapter, base, program)
        write_adapter(tmp_path / "first", laid.tensors, laid.settings, laid.record())
        back = read(open_adapter(tmp_path / "first"), base)
        assert (back.layout, back.problems) == (laid.layout, [])
        after, _ = stored_as(back.adapter, base, layout)
        assert after.keys() == before.keys()
        assert all(after[name].numpy().tobytes() == tensor.numpy().tobytes() for name, tensor in before.items())


@pytest.mark.full
@pytest.mark.parametrize("model_type", expert_model_types())
def test_every_type_comes_back_from_every_program(model_type: str, tmp_path: Path) -> None:
    """Whatever its checkpoint calls experts; a program that has no name for them is refused with a remedy."""
    base = base_from(toy_config(model_type))
    adapter = servable(make_adapter(base, grow=True))
    named = [base.expert_names[path] for path in base.layers if path in base.expert_names]
    whole = len(named) == len(base.layers) > 0
    can = {"vllm": whole, "sglang": whole and all(names.roles for names in named)}
    can["llama.cpp"] = can["sglang"] and not latent(adapter)
    for program in PROGRAMS:
        if not can.get(program, True):
            with pytest.raises(UserError, match="merge"):
                laid_out(adapter, base, program)
            continue
        laid = laid_out(adapter, base, program)
        write_adapter(tmp_path, laid.tensors, laid.settings, laid.record())
        found = read(open_adapter(tmp_path), base)
        assert (found.layout, found.problems) == (laid.layout, [])
        assert same(found.adapter, adapter)


def test_each_layout_is_told_from_the_files(tmp_path: Path) -> None:
    """By names, by shapes, by what Unsloth and Megatron-Bridge write into the settings, by zeros; else PEFT's."""
    base = base_of_toy("mixtral")
    adapter = make_adapter(base)

    def told(layout: str, **settings: Any) -> str | None:
        def change(_: dict[str, Tensor], own: dict[str, Any]) -> None:
            own |= settings

        return read(write(tmp_path, adapter, base, layout, change), base).layout

    assert [told(layout) for layout in ("peft", "peft-0.18", "megatron", "per-expert", "3d")] == [
        "peft", "peft-0.18", "megatron", "per-expert", "3d",
    ]  # fmt: skip
    assert told("unsloth-grouped", lora_B_layout="grouped_by_expert") == "unsloth-grouped"
    assert told("unsloth-grouped", auto_mapping={"unsloth_fixed": True}) == "unsloth-grouped"
    assert told("peft", auto_mapping={"unsloth_fixed": True}, lora_B_layout="rank_major") == "peft"


def test_factors_of_one_rank_read_the_same_in_every_order(tmp_path: Path) -> None:
    base = base_of_toy("mixtral")
    whole = make_adapter(base)
    experts = {
        path: {name: replace(one, A=one.A[:, :1], B=one.B[:, :, :1]) for name, one in own.items()}
        for path, own in whole.experts.items()
    }
    one = replace(whole, experts=experts)
    found = read(write(tmp_path, one, base, "unsloth-grouped"), base)
    assert same(found.adapter, one)


def test_square_projections_are_told_by_the_others_and_else_asked_for(tmp_path: Path) -> None:
    """With H = 2I gate_up fits both ways; down decides, and alone it does not."""
    base = base_of_toy("qwen3_moe", moe_intermediate_size=16, hidden_size=32)
    adapter = make_adapter(base)
    for layout in ("peft", "peft-0.18"):
        assert read(write(tmp_path, adapter, base, layout), base).layout == layout

    def only_gate_up(tensors: dict[str, Tensor], _: object) -> None:
        for name in [name for name in tensors if ".experts." in name and ".base_layer." not in name]:
            del tensors[name]

    alone = write(tmp_path, adapter, base, "peft-0.18", only_gate_up)
    with pytest.raises(UserError, match="--from peft"):
        read(alone, base)
    assert read(alone, base, "peft-0.18").layout == "peft-0.18"


def test_names_of_other_programs(tmp_path: Path) -> None:
    """Adapter names in factors, the prefix of a model of text and images, fused gate_up of an expert."""
    base = base_of_toy("gpt_oss")
    adapter = make_adapter(base)

    def renamed(tensors: dict[str, Tensor], _: object) -> None:
        for path, own in adapter.experts.items():
            for slot in ("", ".base_layer"):
                del tensors[f"{path}{slot}.lora_A.weight"], tensors[f"{path}{slot}.lora_B.weight"]
            for expert in range(len(own["down"].A)):
                for name, one in (("gate_up_projs", own["gate_up"]), ("down_projs", own["down"])):
                    for factor in "AB":
                        tensors[f"{path}.{name}.{expert}.lora_{factor}.default.weight"] = getattr(one, factor)[expert]
        for name in list(tensors):
            tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)

    found = read(write(tmp_path, adapter, base, "peft", renamed), base)
    assert (found.layout, found.problems) == ("per-expert", [])
    assert same(found.adapter, adapter)


@pytest.mark.parametrize(
    ("model", "old", "new", "saved"),
    [
        ("qwen3_vl_moe", "model.language_model.", "model.", "embed_tokens.weight"),  # made on its class for text alone
        ("mixtral", "mlp", "block_sparse_moe", "layers.1.mlp.gate.weight"),  # of transformers 4
        ("mixtral", "model.", "model.language_model.", "norm.weight"),
    ],
)
def test_names_of_other_classes_of_the_model(model: str, old: str, new: str, saved: str, tmp_path: Path) -> None:
    base, prefix = base_of_toy(model), "model.language_model." if model == "qwen3_vl_moe" else "model."
    adapter, whole = make_adapter(base), {f"{prefix}{saved}": torch.ones(base.parameters[f"{prefix}{saved}"].shape)}

    def renamed(tensors: dict[str, Tensor], _: object) -> None:
        for name, tensor in list((tensors | whole).items()):
            tensors.pop(name, None)
            tensors[name.replace(old, new, 1)] = tensor

    found = read(write(tmp_path, adapter, base, "peft", renamed), base)
    assert found.problems == []
    assert same(found.adapter, adapter)
    assert {name: tensor.tolist() for name, tensor in found.adapter.saved.items()} == {
        name: tensor.tolist() for name, tensor in whole.items()
    }


def test_factors_of_a_tower_are_left_out_if_they_are_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """PEFT puts them there for `all-linear`, and `q_proj` may be in a tower too; text trains none of them."""
    base = base_of_toy("qwen3_vl_moe")
    adapter, name = make_adapter(base), "model.visual.blocks.0.attn.qkv"
    tower = {f"{name}.lora_A.weight": torch.ones(3, 32), f"{name}.lora_B.weight": torch.zeros(96, 3)}
    stored = write(tmp_path, adapter, base, "peft", lambda tensors, _: tensors.update(tower))
    assert same(read(stored, base).adapter, adapter)
    assert f"factors of 1 module, as {name}, are zero and not read" in capsys.readouterr().err
    tower[f"{name}.lora_B.weight"] += 1
    stored = write(tmp_path, adapter, base, "peft", lambda tensors, _: tensors.update(tower))
    assert read(stored, base).unread == [f"{name}: {_OF_TOWER}"]


def test_a_factor_that_all_experts_share(tmp_path: Path) -> None:
    """Shared-outer LoRA: A of gate and up, and B of down, are one [1, …] for all experts."""
    base = base_of_toy("mixtral")
    adapter = make_adapter(base)
    for own in adapter.experts.values():
        own["gate_up"].A[:], own["down"].B[:] = own["gate_up"].A[0].clone(), own["down"].B[0].clone()

    def shared(tensors: dict[str, Tensor], _: object) -> None:
        for name, tensor in list(tensors.items()):
            if "experts." in name and ("down_proj" in name) == (".lora_B." in name):
                tensors[name] = tensor[:1].clone()
            elif "experts." in name:  # Megatron-Bridge names the other side expert by expert
                del tensors[name]
                prefix, leaf = name.split(".experts.")
                for expert, of_expert in enumerate(tensor):
                    tensors[f"{prefix}.experts.{expert}.{leaf}"] = of_expert.clone()

    found = read(write(tmp_path, adapter, base, "3d", shared), base)
    assert found.problems == []
    assert same(found.adapter, adapter)


def test_numbers_that_contradict_are_not_read_in_silence(tmp_path: Path) -> None:
    """Experts without factors are zero as a whole only in the right order; the user must say which it is."""
    base = base_of_toy("mixtral")
    stored = write(tmp_path, make_adapter(base, ids=(1, 5)), base, "unsloth-grouped")
    with pytest.raises(UserError, match="--from"):
        sure(read(stored, base), stored)
    assert same(read(stored, base, "unsloth-grouped").adapter, make_adapter(base, ids=(1, 5)))


def test_what_is_in_no_layout_is_refused(tmp_path: Path) -> None:
    base = base_of_toy("mixtral")
    adapter = make_adapter(base)

    def cut(tensors: dict[str, Tensor], _: object) -> None:
        name = next(name for name in tensors if ".base_layer.lora_A." in name)
        tensors[name] = tensors[name][:, :-1].contiguous()

    with pytest.raises(UserError, match="fit no projection"):
        read(write(tmp_path, adapter, base, "peft", cut), base)
    with pytest.raises(UserError, match="shapes of its factors are those of peft"):
        read(write(tmp_path, adapter, base, "peft"), base, "megatron")
    with pytest.raises(UserError, match="leave --from out"):
        read(write(tmp_path, adapter, base, "per-expert"), base, "peft")
