"""What programs need beside the right layout: one rank and scale, no gaps, their notes; and what they cannot hold."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moetune.adapters.factors import Adapter, Factors
from moetune.adapters.files import open_adapter, write_adapter
from moetune.adapters.read import read
from moetune.adapters.write import PROGRAMS, laid_out
from moetune.errors import UserError
from tests.adapters.made import RANK, SCALE, base_from, base_of_toy, make_adapter
from tests.toys import toy_config


def test_one_rank_and_one_scale_and_the_ranks_come_back(tmp_path: Path) -> None:
    """vLLM has one of each: the updates stay, to rounding, and notes say what changed."""
    base = base_of_toy("mixtral")
    adapter = make_adapter(base)
    path = next(iter(adapter.linears))
    one = adapter.linears[path]
    other = replace(one, A=one.A[:2], B=one.B[:, :2], scale=1.25)
    adapter = replace(adapter, linears={**adapter.linears, path: other})
    laid = laid_out(adapter, base, "vllm")
    assert {len(tensor) for name, tensor in laid.tensors.items() if ".lora_A." in name} == {RANK}
    assert (laid.settings["r"], laid.settings["lora_alpha"], laid.settings["rank_pattern"]) == (RANK, RANK * SCALE, {})
    assert len(laid.notes) == 2
    write_adapter(tmp_path, laid.tensors, laid.settings, laid.record())
    back = read(open_adapter(tmp_path), base)
    assert back.problems == []
    assert back.adapter.linears[path].rank == 2
    torch.testing.assert_close(back.adapter.linears[path].delta(), other.delta())


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_adapter_without_factors_has_no_place(program: str) -> None:
    """A module that it holds whole makes it no adapter for PEFT, which asks for a target."""
    with pytest.raises(UserError, match="no factors that could be written; merge"):
        laid_out(Adapter({}, {}, {"lm_head.weight": torch.ones(96, 32)}), base_of_toy("mixtral"), program)


def test_a_module_within_one_that_is_held_whole_is_not_named_again() -> None:
    """PEFT finds no weight of it then: gpt-oss's attention has sinks of its own beside its linear layers."""
    base, path = base_of_toy("gpt_oss"), "model.layers.0.self_attn"
    adapter = replace(make_adapter(base), saved={f"{path}.{x}": torch.ones(4) for x in ("sinks", "q_proj.bias")})
    assert laid_out(adapter, base, "peft").settings["modules_to_save"] == [path]


def test_gaps_are_filled_with_zeros_where_a_program_needs_all() -> None:
    """Both projections of experts for both servers; q, k and v for SGLang."""
    base = base_of_toy("mixtral")
    whole = make_adapter(base)
    experts = {path: {"down": own["down"]} for path, own in whole.experts.items()}
    some = Adapter({path: one for path, one in whole.linears.items() if path.endswith("q_proj")}, experts)
    for program, joined in (("vllm", ["q_proj"]), ("sglang", ["q_proj", "k_proj", "v_proj"])):
        laid = laid_out(some, base, program)
        linears = {name.split(".")[-3] for name in laid.tensors if "self_attn" in name}
        assert linears == set(joined)
        assert len([name for name in laid.tensors if "experts" in name]) == 2 * 8 * 3 * 2
        assert not any(tensor.any() for name, tensor in laid.tensors.items() if ".w1." in name and ".lora_B" in name)
        assert sum("zeros stand for" in note for note in laid.notes) == 1
    assert {name.rpartition(".lora_")[0] for name in laid_out(some, base, "peft").tensors} == {*some.linears, *experts}


def test_unsloth_gets_its_note() -> None:
    base = base_of_toy("mixtral")
    noted = {name: laid_out(make_adapter(base), base, name).settings.get("lora_B_layout") for name in PROGRAMS}
    assert noted == dict.fromkeys(PROGRAMS) | {"unsloth": "rank_major", "unsloth-grouped": "grouped_by_expert"}


def test_stacked_experts_that_vllm_would_not_read_are_noted() -> None:
    assert laid_out(make_adapter(base_of_toy("gpt_oss")), base_of_toy("gpt_oss"), "vllm").notes == ()
    base = base_of_toy("minimax_m3_vl_text")
    (note,) = laid_out(make_adapter(base), base, "vllm").notes
    assert "not for minimax_m3_vl_text" in note
    base = base_of_toy("granitemoe")  # whose checkpoint has input_linear and output_linear
    for program in ("vllm", "sglang"):
        with pytest.raises(UserError, match="merge"):
            laid_out(make_adapter(base), base, program)


def test_layers_that_a_server_loads_and_does_not_use() -> None:
    """kv_b_proj of multi-head latent attention, by structure; routers where the server has no LoRA on them."""
    base = base_of_toy("glm4_moe_lite")
    adapter = make_adapter(base)
    for program in ("vllm", "sglang"):
        with pytest.raises(UserError, match=r"layers\.0\.self_attn\.kv_b_proj and 1 more.*adapter merge.*") as said:
            laid_out(adapter, base, program)
        assert "adapt.lora.targets: [kv_a_proj_with_mqa, o_proj, q_a_proj, q_b_proj, experts]" in str(said.value)
    (note,) = laid_out(adapter, base, "peft").notes
    assert "vLLM and SGLang do not apply" in note
    rest = {path: one for path, one in adapter.linears.items() if "kv_b_proj" not in path}
    assert laid_out(replace(adapter, linears=rest), base, "vllm").notes == ()
    assert laid_out(make_adapter(base_of_toy("minicpm3")), base_of_toy("minicpm3"), "vllm").notes == ()

    nemotron = base_from(toy_config("nemotron_h"))
    for base, refusing in ((base_of_toy("mixtral"), ["sglang"]), (nemotron, ["sglang", "vllm"])):
        path = base.structure.moe_layers[0].router
        on_router = Adapter({path: Factors(torch.ones(1, 32), torch.ones(8, 1), 1.0)}, {})
        for program in ("vllm", "sglang"):
            if program in refusing:
                with pytest.raises(UserError, match=f"no LoRA on routers, such as {path}; merge"):
                    laid_out(on_router, base, program)
            else:
                assert f"{base.linear_name(path)}.lora_A.weight" in laid_out(on_router, base, program).tensors


def test_what_a_program_has_no_place_for() -> None:
    base = base_of_toy("mixtral")
    adapter = make_adapter(base)
    with pytest.raises(UserError, match="hold factors only"):
        laid_out(replace(adapter, saved={"lm_head.weight": torch.ones(96, 32)}), base, "vllm")
    with pytest.raises(UserError, match="no factors"):
        laid_out(Adapter({}, {}), base, "peft")
    one = Factors(torch.ones(1, 32), torch.ones(96, 1), 1.0)
    assert "lm_head.lora_A.weight" in laid_out(Adapter({"lm_head": one}, {}), base, "vllm").tensors
