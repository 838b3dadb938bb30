"""What `check` says of an adapter; every wrong reading is found, with and without what moetune notes in its files."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moetune.adapters.check import MIXED_FORMAT, check
from moetune.adapters.factors import Adapter, Factors
from moetune.adapters.files import open_adapter, write_adapter
from moetune.adapters.read import LAYOUTS, read
from moetune.adapters.stacked import ORDERS, Order
from moetune.adapters.write import PROGRAMS, laid_out
from moetune.errors import UserError
from tests.adapters.made import RANK, SCALE, base_of_toy, make_adapter, same, write

Change = Callable[[dict[str, Tensor], dict[str, Any]], object]


def test_what_a_sound_adapter_covers(tmp_path: Path) -> None:
    base = base_of_toy("mixtral")
    report = check(write(tmp_path, make_adapter(base, ids=(2, 3)), base, "peft"), base)
    assert (report.layout, report.problems, report.missing) == ("peft", [], [])
    of_experts = [one for one in report.covered if one.experts is not None]
    assert [one.name.rpartition(".")[2] for one in of_experts] == ["gate_up", "down"] * 2
    assert {(one.rank, one.scale, tuple(one.experts or ()), tuple(one.zero)) for one in of_experts} == {
        (3, 2.5, (2, 3), ())
    }
    assert len(report.covered) == 4 + 2 * 4
    assert report.to_json()["schema"] == 1


def test_layers_and_experts_whose_update_is_zero_are_named(tmp_path: Path) -> None:
    base = base_of_toy("mixtral")
    adapter = make_adapter(base)
    first, second = adapter.experts.values()
    first["down"].B[5] = 0
    del second["gate_up"]  # type: ignore[attr-defined]
    report = check(write(tmp_path, adapter, base, "peft"), base)
    assert {one.name: one.zero for one in report.covered if one.zero} == {"model.layers.0.mlp.experts.down": [5]}
    assert report.missing == ["model.layers.1.mlp.experts.gate_up"]


@pytest.mark.parametrize("layout", ["peft", "peft-0.18", "unsloth-grouped", "megatron", "per-expert", "3d"])
def test_which_programs_read_it_as_it_is(layout: str, tmp_path: Path) -> None:
    base = base_of_toy("mixtral")
    report = check(write(tmp_path, make_adapter(base, grow=True), base, layout), base, layout)
    read_by = {name for name, said in report.programs.items() if said is None}
    assert read_by == {
        "peft": {"peft", "unsloth"},
        "unsloth-grouped": {"unsloth-grouped"},
        "per-expert": {"vllm", "sglang", "llama.cpp"},
    }.get(layout, set())
    assert all("adapter convert --to" in said for said in report.programs.values() if said is not None)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["k_proj", "v_proj", "o_proj"]}, {"target_modules": r".*\.1\.self_attn\..*"},
        {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "layers_to_transform": [1]},
        {"exclude_modules": ["layers.0.self_attn.q_proj"]}, {"target_parameters": None},
        {"target_parameters": ["layers.1.mlp.experts.gate_up_proj", "experts.down_proj"]},
    ],
)  # fmt: skip
def test_factors_that_peft_ignores_because_of_the_settings(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = base_of_toy("mixtral")
    stored = write(tmp_path, make_adapter(base), base, "peft")
    assert check(stored, base).programs["peft"] is None
    assert capsys.readouterr().err == ""
    said = check(replace(stored, settings={**stored.settings, **settings}), base).programs["peft"]
    assert said is not None
    assert "it ignores the factors of model.layers.0." in said
    assert "its settings leave out model.layers.0." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "by_peft"),
    [
        ("model.layers", "_orig_mod.model.layers", False), ("self_attn", "_fsdp_wrapped_module.self_attn", False),
        ("model.layers", "base_model.model.model.layers", False), (".lora_B.", ".lora_B.policy.", False),
        (".lora_B.", ".lora_B.default.", True),
    ],
)  # fmt: skip
def test_names_with_parts_of_wrappers_are_read_and_to_be_converted(
    old: str, new: str, by_peft: bool, tmp_path: Path
) -> None:
    base = base_of_toy("gpt_oss")
    stored = write(tmp_path, make_adapter(base), base, "peft", rename(old, new))
    report = check(stored, base)
    assert report.problems == []
    assert {name for name, said in report.programs.items() if said is None} == (
        {"peft", "unsloth"} if by_peft else set()
    )
    assert new in str(report.programs["vllm"])
    assert same(read(stored, base).adapter, make_adapter(base))


def test_settings_of_vllm_are_not_for_peft(tmp_path: Path) -> None:
    """They name the module of stacked experts, whose factors have the same names and shapes as PEFT's."""
    base = base_of_toy("gpt_oss")
    stored = write(tmp_path, make_adapter(base), base, "peft")
    assert {program for program, said in check(stored, base).programs.items() if said is None} == {
        "peft", "vllm", "unsloth"
    }  # fmt: skip
    report = check(replace(stored, settings=laid_out(make_adapter(base), base, "vllm").settings), base)
    assert {program for program, said in report.programs.items() if said is None} == {"vllm"}
    assert "target_modules name model.layers.0.mlp.experts" in str(report.programs["peft"])


def test_stacked_experts_that_vllm_does_not_read(tmp_path: Path) -> None:
    base = base_of_toy("llama4_text")
    for program in ("peft", "vllm"):
        laid = laid_out(make_adapter(base), base, program)
        (tmp_path / program).mkdir()
        write_adapter(tmp_path / program, laid.tensors, laid.settings, laid.record())
        report = check(open_adapter(tmp_path / program), base)
        assert report.problems == []
        assert "and not for llama4_text" in str(report.programs["vllm"])


def test_of_an_adapter_of_another_base_no_value_is_compared(tmp_path: Path) -> None:
    base, other = base_of_toy("mixtral"), base_of_toy("llama4_text", hidden_size=64)
    laid = laid_out(make_adapter(base), base, "peft")
    write_adapter(tmp_path, laid.tensors, laid.settings, laid.record())
    parsed = read(open_adapter(tmp_path), other)
    assert parsed.unread
    assert parsed.doubts == []


@pytest.mark.parametrize(
    "settings", [{"target_modules": "(("}, {"target_modules": ".*", "layers_to_transform": [1]}, {"target_modules": 5}]
)
def test_settings_that_peft_refuses(settings: dict[str, Any], tmp_path: Path) -> None:
    base = base_of_toy("mixtral")
    stored = write(tmp_path, make_adapter(base), base, "peft")
    said = check(replace(stored, settings={**stored.settings, **settings}), base).programs["peft"]
    assert said is not None
    assert said.startswith("cannot read it: ")


def rename(old: str, new: str) -> Change:
    def change(tensors: dict[str, Tensor], _: object) -> None:
        for name in list(tensors):
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def copy(old: str, new: str) -> Change:
    return lambda tensors, _: tensors.update({k.replace(old, new): v.clone() for k, v in tensors.items() if old in k})


def drop(part: str) -> Change:
    def change(tensors: dict[str, Tensor], _: object) -> None:
        for name in [name for name in tensors if part in name]:
            del tensors[name]

    return change


def say(**settings: Any) -> Change:
    return lambda _, own: own.update(settings)


def both(*changes: Change) -> Change:
    def change(*given: Any) -> None:
        for part in changes:
            part(*given)

    return change


IGNORED: dict[str, tuple[str, Change, str]] = {
    "a layer that the base lacks": ("peft", rename("layers.1", "layers.7"), r"model\.layers\.7\..*has no such layer"),
    "an expert that the base lacks": ("per-expert", rename("experts.7.", "experts.8."), r"has 8 experts"),
    "a name that nothing has": ("peft", rename("q_proj", "query"), r"self_attn\.query: has factors"),
    "half of a pair": ("peft", drop("layers.0.self_attn.q_proj.lora_B"), r"q_proj: lora_B is missing"),
    "half of an expert's pair": ("per-expert", drop("experts.3.w1.lora_B"), r"experts\.3 gate: has one of the two"),
    "factors of an embedding": ("peft", rename("v_proj.lora_A", "v_proj.lora_embedding_A"), "no factor of plain LoRA"),
    "an embedding of another vocabulary": (
        "peft",
        lambda tensors, _: tensors.update({"model.embed_tokens.weight": torch.ones(98, 32)}),
        r"embed_tokens\.weight: is \[98, 32\], and that of 'mixtral' is \[96, 32\]; give the base",
    ),
    "a rank that is not said": ("per-expert", say(r=2), r"have rank 3, and adapter_config\.json says 2"),
    "a target without factors": (
        "peft", both(drop("q_proj"), say(target_modules=["q_proj"])), "q_proj: is in target_modules .*no factors",
    ),
    "a target without factors in some layers": (
        "peft", both(drop("layers.1.self_attn.q_proj"), say(target_modules=["q_proj"])), "q_proj: .*of 1 of 2 layers",
    ),
    "a pattern without factors in some layers": (
        "peft", both(drop("layers.1.self_attn.q_proj"), say(target_modules=r".*attn\.[qk]_proj")), "q_proj: .*1 of 2",
    ),
    "a chosen layer without factors": (
        "peft", both(drop("layers.1.self_attn.q"), say(target_modules=["q_proj"], layers_to_transform=[1])), "q_.*it",
    ),
    "a router without factors": ("peft", say(target_modules=["o_proj", "gate"]), "gate: is in target_modules"),
    "experts without factors": (
        "per-expert", both(drop("w2"), say(target_parameters=["mlp.experts.down_proj"])), "down_proj: is in target_p",
    ),
    "a module that was saved apart": ("peft", say(modules_to_save=["lm_head"]), "lm_head: is in modules_to_save"),
    "an expert under two names": ("per-expert", copy("experts.3.w1.", "experts.3.gate_proj."), "3.*is there twice"),
    "a layer under two names": ("peft", copy("model.layers.0", "model.language_model.layers.0"), "is there twice"),
    "a pattern of another layer": ("peft", say(rank_pattern={"down_proj": 2}), r"down_proj.* says 2"),
}  # fmt: skip


@pytest.mark.parametrize("case", IGNORED)
def test_what_would_be_ignored(case: str, tmp_path: Path) -> None:
    layout, change, said = IGNORED[case]
    base = base_of_toy("mixtral")
    problems = check(write(tmp_path, make_adapter(base), base, layout, change), base).problems
    assert any(re.search(said, problem) for problem in problems), problems


def transposed(tensors: dict[str, Tensor], _: object) -> None:
    """The two factors of every stack, each in the other's place."""
    for name in [name for name in tensors if "experts" in name and ".lora_A." in name]:
        other = name.replace(".lora_A.", ".lora_B.")
        tensors[name], tensors[other] = tensors[other].T.contiguous(), tensors[name].T.contiguous()


def slowest(tensors: dict[str, Tensor], _: object) -> None:
    """lora_B of every stack with the expert as slowest index, where the fastest is expected."""
    for name in [name for name in tensors if "experts" in name and ".lora_B." in name]:
        first = tensors[name.replace(".lora_B.", ".lora_A.")]
        factors = ORDERS["peft"].read(first, tensors[name], len(first) // RANK)
        tensors[name] = Order(is_grouped=True, is_swapped=False).write(*factors)[1].contiguous()


def exchanged(tensors: dict[str, Tensor], _: object) -> None:
    """The rows of gate and up, each in the other's place."""
    for name in [name for name in tensors if "experts.base_layer.lora_B" in name]:
        tensors[name] = tensors[name].roll(len(tensors[name]) // 2, 0)


def unscaled(_: object, settings: dict[str, Any]) -> None:
    """Alpha equal to rank, as if there were no scale."""
    settings["lora_alpha"] = settings["r"]


WRONG = {"transposed": transposed, "slowest": slowest, "exchanged": exchanged, "unscaled": unscaled}


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("how", WRONG)
def test_every_wrong_reading_of_a_file_of_ours_is_found(how: str, square: bool, tmp_path: Path) -> None:
    """By the sketch, even where all shapes fit: experts all alike, and a base that is square where it can be."""
    base = base_of_toy("qwen3_moe", **({"moe_intermediate_size": 32, "hidden_size": 32} if square else {}))
    adapter = make_adapter(base)
    record = laid_out(adapter, base, "peft").record()
    assert check(write(tmp_path, adapter, base, "peft", record=record), base).problems == []
    wrong = write(tmp_path, adapter, base, "peft", WRONG[how], record)
    problems = check(wrong, base).problems
    assert any("not the one that moetune noted" in problem for problem in problems)
    assert sum("experts" in problem for problem in problems) >= 2


def test_a_file_of_ours_that_was_rounded_to_16_bits_is_not_altered(tmp_path: Path) -> None:
    base = base_of_toy("mixtral")
    adapter = make_adapter(base)

    def rounded(tensors: dict[str, Tensor], _: object) -> None:
        tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()})

    stored = write(tmp_path, adapter, base, "peft", rounded, laid_out(adapter, base, "peft").record())
    assert check(stored, base).problems == []


def test_wrong_readings_of_others_files(tmp_path: Path) -> None:
    """Without the sketch: exchanged factors by their shapes, the order of experts by zeros or by the columns' sizes."""
    base = base_of_toy("qwen3_moe")
    adapter = make_adapter(base, grow=True)
    with pytest.raises(UserError, match="its factors are those of peft or unsloth-grouped"):
        check(write(tmp_path, adapter, base, "peft"), base, "peft-0.18")
    for one in (adapter, make_adapter(base, ids=(0, 4))):
        (problem,) = check(write(tmp_path, one, base, "peft", slowest), base).problems
        assert "looks like unsloth-grouped" in problem
        (problem,) = check(write(tmp_path, one, base, "peft"), base, "unsloth-grouped").problems
        assert "looks like peft" in problem
    stale = write(tmp_path, adapter, base, "peft", say(lora_B_layout="grouped_by_expert"))
    (problem,) = check(stale, base).problems
    assert "looks like peft" in problem


def test_the_options_of_the_command_line_are_the_layouts_and_programs() -> None:
    from moetune.cli.adapter import _LAYOUTS, _PROGRAMS

    assert (*_LAYOUTS.split("|"),) == LAYOUTS
    assert (*_PROGRAMS.split("|"),) == PROGRAMS


def test_vllm_applies_ranks_and_scales_of_linear_layers_alone(tmp_path: Path) -> None:
    """Seen in vLLM 0.32; llama.cpp takes lora_alpha / rank of each pair of factors, and ignores `use_rslora`."""
    base = base_of_toy("qwen3_moe")
    adapter = Adapter(make_adapter(base).linears, {})
    first = next(iter(adapter.linears))
    linears = adapter.linears | {first: replace(adapter.linears[first].padded(5), scale=SCALE * RANK / 5)}
    programs = check(write(tmp_path / "alpha", replace(adapter, linears=linears), base, "peft"), base).programs
    assert (programs["vllm"], programs["llama.cpp"]) == (None, None)
    linears = adapter.linears | {first: replace(adapter.linears[first], scale=2 * SCALE)}
    programs = check(write(tmp_path / "scale", replace(adapter, linears=linears), base, "peft"), base).programs
    assert programs["vllm"] is None
    assert "it ignores use_rslora and alpha_pattern" in str(programs["llama.cpp"])


def test_a_rank_and_a_scale_are_told_as_such(tmp_path: Path) -> None:
    """Not as another order of experts; PEFT makes factors of the rank that the settings say."""
    base = base_of_toy("qwen3_moe")
    for layout in ("peft", "per-expert"):
        ranked, scaled = (
            check(
                write(tmp_path, make_adapter(base), base, layout, lambda _, own, other=other: own.update(other)), base
            ).programs
            for other in ({"r": RANK - 1}, {"alpha_pattern": {"q_proj": 2.0}})
        )
        told = "k_proj: its factors have rank 3, and adapter_config.json says 2; correct it there"
        assert {name for name, said in ranked.items() if told not in str(said)} == {"llama.cpp"}
        if layout == "per-expert":
            assert all("has another scale" in str(scaled[name]) for name in ("vllm", "sglang"))


@pytest.mark.parametrize(
    ("model_type", "said"), [("mixtral", "drops its experts without a message"), ("qwen3_moe", MIXED_FORMAT)]
)
def test_stacked_factors_in_vllm_by_type(model_type: str, said: str, tmp_path: Path) -> None:
    base = base_of_toy(model_type)
    assert said in str(check(write(tmp_path, make_adapter(base, grow=True), base, "peft"), base).programs["vllm"])


@pytest.mark.parametrize(("model_type", "is_dropped"), [("mixtral", False), ("qwen3_moe", True), ("deepseek_v3", True)])
def test_routers_that_vllm_calls_without_their_factors(model_type: str, is_dropped: bool) -> None:
    base = base_of_toy(model_type)
    layer = base.structure.moe_layers[0]
    A, B = torch.ones(2, layer.shape.hidden), torch.ones(layer.shape.num_experts, 2)
    adapter = Adapter({layer.router: Factors(A, B, 1.0)}, {})
    assert laid_out(adapter, base, "llama.cpp").tensors
    if is_dropped:
        with pytest.raises(UserError, match=r"vLLM has no LoRA on routers, .*merge"):
            laid_out(adapter, base, "vllm")
    else:
        assert laid_out(adapter, base, "vllm").tensors


def test_latent_attention_is_merged_for_llama() -> None:
    base = base_of_toy("deepseek_v3")
    every = make_adapter(base).linears
    for leaf, programs in (("o_proj", ("vllm", "llama.cpp")), ("q_b_proj", ("vllm",))):
        linears = {path: one for path, one in every.items() if path.endswith(leaf)}
        assert all(laid_out(Adapter(linears, {}), base, program).tensors for program in programs)
    with pytest.raises(UserError, match=r"llama\.cpp accepts factors on latent attention, .*q_b_proj, .*merge"):
        laid_out(Adapter(linears, {}), base, "llama.cpp")
