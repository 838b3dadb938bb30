"""Two records serve all ranks of LoRA between theirs: to the byte what their own records say."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetune.memory.closed_form.depth import Depths
from moetune.memory.closed_form.experts import Unlike
from moetune.memory.closed_form.form import ClosedForm
from moetune.memory.closed_form.lora_ranks import HIGHEST, LOWEST, LoraRanks, probes_of
from moetune.models.catalog.gpus import find_gpu
from moetune.run.resolve import ResolvedRun, resolve
from tests.memory.models import toy_run, write_toy
from tests.thinned import thinned

MODELS = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2", "glm4_moe")


def run_of(path: Path, model: str, rank: Any, /, **settings: Any) -> ResolvedRun:
    lora = {"rank": rank, "alpha": 8, "targets": ["attention", "experts"]}
    return resolve(toy_run(path, model, {"lora": lora}, **settings), "cuda")


@pytest.mark.parametrize("optimizer", thinned(("adamw", "adamw8bit"), 2, always=("adamw",)))
@pytest.mark.parametrize("checkpointing", thinned(("full", "offload", "none"), 3, always=("offload",)))
@pytest.mark.parametrize("model", thinned(MODELS, 3, always=("mixtral",)))
@pytest.mark.parametrize("count", [1, 2])
def test_ranks_between_two(
    count: int,
    model: str,
    optimizer: str,
    checkpointing: str,
    tmp_path: Path,
    recorded: list[Any],
) -> None:
    path, depths, gpu = write_toy(tmp_path, model, num_hidden_layers=4), Depths(), find_gpu("l40s")
    settings = {
        "model": {"weights": "pretrained", "dtype": "bf16", "base": "nf4"},
        "optimizer": {"name": optimizer},
        "train": {"accumulate": 4, "checkpointing": checkpointing},
        "hardware": {"count": count},
        "parallel": {} if count == 1 else {"fsdp": count, "ep": count},
    }
    depths.at(run_of(path, model, HIGHEST, **settings), 0, gpu)
    for rank in (16, LOWEST, 32, 8):
        before = len(recorded)
        run = run_of(path, model, rank, **settings)
        found = depths.at(run, 0, gpu)
        is_derived = len(recorded) - before == (rank == 16)  # that of the lowest rank, to compare with
        own = ClosedForm(run, 0, gpu).at(run.config)
        assert (found.parts(), found.rounded_peak, found.load) == (own.parts(), own.rounded_peak, own.load)
        assert found.host_peak == own.host_peak
        assert is_derived or optimizer == "adamw8bit"  # states of small factors are in 32 bits


def test_a_rank_is_recorded_alone_if_the_highest_is_not_known(tmp_path: Path, recorded: list[Any]) -> None:
    Depths().at(run_of(write_toy(tmp_path, "mixtral"), "mixtral", 8))
    assert [steps.config.adapt.lora.rank for steps, *_ in recorded] == [8]


@pytest.mark.parametrize("rank", [2, HIGHEST, 128, {"attention": 8, "experts": 16}])
def test_ranks_that_have_records_of_their_own(rank: Any, tmp_path: Path) -> None:
    assert probes_of(run_of(write_toy(tmp_path, "mixtral"), "mixtral", rank)) is None


def test_records_that_do_not_agree_are_not_shared(tmp_path: Path) -> None:
    probes = probes_of(run_of(write_toy(tmp_path, "mixtral"), "mixtral", 8))
    assert probes is not None
    one, other = (next(iter(ClosedForm(run).with_records(run.config).records.values())) for run in probes)
    LoraRanks.of(one, other)
    largest = int(np.argmax(other.coefficients))
    broken, blocks = other.coefficients.copy(), [*other.log.blocks]
    broken[largest], blocks[largest] = broken[largest] + 8, replace(blocks[largest], bytes=blocks[largest].bytes + 8)
    entries, log = replace(other.log, entries=[]), replace(other.log, blocks=blocks)
    for wrong in (replace(other, coefficients=broken, log=log), replace(other, log=entries)):
        with pytest.raises(Unlike):
            LoraRanks.of(one, wrong)


def test_a_size_that_divides_a_constant_by_chance(tmp_path: Path) -> None:
    """The lowest rank is recorded at one choice of sizes, which can explain bytes that are constant."""
    probes = probes_of(run_of(write_toy(tmp_path, "mixtral"), "mixtral", 8))
    assert probes is not None
    one, other = (next(iter(ClosedForm(run).with_records(run.config).records.values())) for run in probes)
    constant = next(number for number, power in enumerate(one.monomials) if not one.powers[power])
    coefficients, monomials = other.coefficients.copy(), other.monomials.copy()
    coefficients[constant], monomials[constant] = 1, len(other.powers)
    by_chance = replace(other, coefficients=coefficients, monomials=monomials, powers=(*other.powers, (("S", 1),)))
    assert LoraRanks.of(one, by_chance).grows == LoraRanks.of(one, other).grows
