"""Every layout against one process: losses, gradient norms and weights; and against its prediction: bytes."""

from pathlib import Path
from typing import Any

import pytest

from tests.exporting.runs import write_base
from tests.models.test_text import TYPES
from tests.parallel import layouts, world
from tests.parallel.layouts import CASES, DEEPSPEED, LAYOUTS
from tests.parallel.test_deepspeed import with_deepspeed

Alone = dict[layouts.Case, layouts.Outcome]


def every_layout() -> list[Any]:
    return [pytest.param(name, marks=[with_deepspeed] if name in DEEPSPEED else []) for name in (*LAYOUTS, *DEEPSPEED)]


@pytest.mark.full  # on a push four ranks are below, a command's two in test_commands.py, more in test_runs.py
@pytest.mark.parametrize("name", every_layout())
def test_a_layout(name: str, alone: Alone, small_model: Path, sharded: Path) -> None:
    parallel = LAYOUTS[name] if name in LAYOUTS else DEEPSPEED[name] | {"deepspeed": str(sharded)}
    ranks = layouts.config_of(parallel, CASES[0], small_model).parallel.ranks
    found = world.run(ranks, layouts.every_case, parallel, small_model)
    counts = [[found[rank][case].counts for rank in range(ranks)] for case in range(len(CASES))]
    assert layouts.row(name, found, [*alone.values()]) in layouts.PAGE.read_text(encoding="utf-8")
    predictions = world.run(1, layouts.every_prediction, parallel, small_model, counts)[0]
    for number, case in enumerate(CASES):
        assert [outcome[number].refused for outcome in found] == [refusal(name, case, found[0][number])] * ranks
        if found[0][number].refused:
            continue
        for rank in range(ranks):
            one = found[rank][number]
            assert layouts.difference(one.taken, alone[case].taken) < layouts.TOLERANCE, (name, case, rank)
            if rank not in predictions[number]:
                continue
            predicted, peak = predictions[number][rank], one.found.peak
            for _ in range(3):  # gloo's threads may let go of a buffer a moment after it was waited for
                if predicted.peak == pytest.approx(peak, rel=0.02):
                    break
                peak = min(peak, world.run(ranks, layouts.measured_again, parallel, case, small_model)[rank])
            assert predicted.peak == pytest.approx(peak, rel=0.02), (name, case, rank)
            assert predicted.collectives == one.found.collectives, (name, case, rank)


@pytest.mark.parametrize("name", [pytest.param("fsdp 2", marks=pytest.mark.full), "ep 2 × fsdp 2"])
def test_without_checkpointing(name: str, small_model: Path) -> None:
    parallel, case = LAYOUTS[name], ("experts", "nf4")
    (alone,) = world.run(1, layouts.few_steps, {}, case, small_model)
    ranks = layouts.config_of(parallel, case, small_model).parallel.ranks
    for taken in world.run(ranks, layouts.few_steps, parallel, case, small_model, {"checkpointing": "none"}):
        assert layouts.difference(taken, alone) < layouts.TOLERANCE


SEVERAL = ("fsdp 2", "zero 2", "tp 2 × ep 2", "deepspeed, zero 2")


@pytest.mark.full
@pytest.mark.parametrize("name", SEVERAL)
def test_a_base_in_several_precisions(name: str, small_model: Path, sharded: Path) -> None:
    """Attention that is not quantized is split, beside experts that are."""
    base: Any = {"default": "nf4", "parts": {"attention": "fp32"}, "layers": {1: {"experts": "int8"}}}
    parallel = LAYOUTS[name] if name in LAYOUTS else DEEPSPEED[name] | {"deepspeed": str(sharded)}
    (alone,) = world.run(1, layouts.few_steps, {}, ("lora", base), small_model)
    for taken in world.run(2, layouts.few_steps, parallel, ("lora", base), small_model):
        assert layouts.difference(taken, alone) < layouts.TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize("model_type", [one for one in TYPES if one != "qwen3_omni_moe_thinker"])
def test_the_text_of_a_vision_language_checkpoint(model_type: str, tmp_path: Path) -> None:
    """Most of these models embed the tokens outside of their decoder stack. Qwen3-Omni's toy takes no padded rows."""
    base, case = write_base(tmp_path / "base", model_type), ("lora", "fp32")
    (alone,) = world.run(1, layouts.few_steps, {}, case, base)
    for taken in world.run(2, layouts.few_steps, LAYOUTS["fsdp 2"], case, base):
        assert layouts.difference(taken, alone) < layouts.TOLERANCE


def refusal(name: str, case: layouts.Case, outcome: layouts.Outcome) -> str:
    """What a layout cannot do, it says by name; nothing else is refused."""
    if "tp" in name and case[1] == "nf4":
        assert "is quantized (model.base), and quantized matrices cannot be split" in outcome.refused
        return outcome.refused
    if name == "deepspeed, zero 3" and case[1] == "nf4":
        assert "DeepSpeed cannot shard quantized experts and linears; set parallel.zero: 2" in outcome.refused
        return outcome.refused
    return ""


@pytest.mark.full
def test_the_cases_clip_and_move(alone: Alone, small_model: Path) -> None:
    """Or they would show nothing: the norm is above the bound in one of the cases, and below in another."""
    bound = layouts.config_of({}, CASES[0], small_model).train.max_grad_norm
    norms = [norm for outcome in alone.values() for norm in outcome.taken.norms]
    assert min(norms) < bound < max(norms)
    assert len({loss for outcome in alone.values() for loss in outcome.taken.losses}) > len(alone)
