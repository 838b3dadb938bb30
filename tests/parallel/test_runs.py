"""Whole runs of several ranks: what they log and leave is what one process logs and leaves, and others can go on."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moetune.config.schema import RunConfig
from moetune.exporting.export import export
from moetune.parallel.ranks import Ranks
from tests import small
from tests.parallel import world
from tests.resolved import train

_PARALLEL: dict[str, dict[str, Any]] = {
    "ep 2": {"fsdp": 2, "ep": 2},
    "ep 4": {"fsdp": 4, "ep": 4},
    "fsdp 2": {"fsdp": 2},
    "zero 1": {"fsdp": 2, "zero": 1},
    "ddp 2": {"replicate": 2},
    "zero 2": {"engine": "deepspeed", "fsdp": 2, "zero": 2, "offload": "optimizer"},
    "zero 3": {"engine": "deepspeed", "fsdp": 2, "zero": 3},
    "alone": {},
}


def config_of(
    layout: str, model: Path, data: Path, output: Path, adapt: str, steps: int, /, **sections: Any
) -> RunConfig:
    """Four micro-batches of two rows a step, whatever the layout."""
    parallel = _PARALLEL[layout]
    ranks = parallel.get("fsdp", 1) * parallel.get("replicate", 1)
    return small.run_config(
        model, data, output, adapt,
        **{
            "optimizer": {"lr": 1.0e-3},
            "train": {"accumulate": 4 // ranks, "steps": steps, "save_every": 2, "eval_every": 2,
                      "router_aux_loss": 0.01, "sequence_length": 48},
            "data": {"train": str(data), "eval": str(data), "packing": False},
            "parallel": parallel,
            "hardware": {"count": ranks},
        }
        | sections,
    )  # fmt: skip


def on_a_rank(config: RunConfig, resume: str) -> dict[str, Any]:
    return train(config, resume=resume, device="cpu", ranks=Ranks.join(config.parallel, "cpu")).to_json()


def run(config: RunConfig, resume: str = "never") -> dict[str, Any]:
    return world.run(config.parallel.ranks, on_a_rank, config, resume)[0]


@pytest.fixture(scope="session")
def odd_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirteen records: the last step of an epoch has a micro-batch too few for several ranks, and one of a row."""
    return write_rows(tmp_path_factory.mktemp("odd") / "odd.jsonl", 13)


def write_rows(path: Path, count: int) -> Path:
    rows = [row | {"completion": f"{row['completion']} {number}"} for number, row in enumerate(3 * small.DATA)]
    return small.write_data(path, rows[:count])


@pytest.mark.full
@pytest.mark.parametrize(("layout", "count"), [("fsdp 2", 41), ("ddp 2", 3), ("ep 4", 9)])
def test_any_number_of_rows(layout: str, count: int, small_model: Path, tmp_path: Path) -> None:
    """A rank that has no rows left of an epoch runs along, on rows that count for nothing."""
    data = write_rows(tmp_path / "rows.jsonl", count)
    for name, of in (("one", "alone"), ("many", layout)):
        run(config_of(of, small_model, data, tmp_path / name, "experts", 4))
    assert_same_runs(tmp_path, 4)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("adapt", "optimizer", "layouts"),
    [
        ("experts", "adamw", ["ep 2", "alone", "zero 1"]),
        ("shared", "adamw", ["fsdp 2", "alone", "ddp 2"]),
        ("lora", "adamw", ["fsdp 2", "ep 4", "alone"]),
        ("lora", "adamw8bit", ["ep 2", "alone"]),
    ],
)
def test_other_ranks_go_on(
    adapt: str, optimizer: str, layouts: list[str], small_model: Path, odd_data: Path, tmp_path: Path
) -> None:
    """A run that changes its layout at each checkpoint logs what one process logs, and leaves the same weights; a rank
    that has no rows left of an epoch runs along."""
    settings: dict[str, Any] = {"lr": 1.0e-3, "name": optimizer} | ({"momentum": 0.9} if optimizer == "sgd" else {})
    common: dict[str, Any] = {"optimizer": settings}
    if adapt == "shared":  # of two ranks one has a factor that all experts share, the other no row of it
        adapt, common["adapt"] = "lora", {"lora": small.ADAPT["lora"]["lora"] | {"share": "outer"}}
    more = dict(common)
    if optimizer == "adamw8bit":  # shards of a matrix would be cut into other blocks: replicas have it whole
        more["parallel"], more["hardware"] = {"replicate": 2, "ep": 2}, {"count": 2}
    last = 2 * len(layouts)
    run(config_of("alone", small_model, odd_data, tmp_path / "one", adapt, last, **common))
    for number, layout in enumerate(layouts):
        sections = more if layout != "alone" else common
        config = config_of(layout, small_model, odd_data, tmp_path / "many", adapt, 2 * number + 2, **sections)
        run(config, "auto" if number else "never")
    assert_same_runs(tmp_path, last)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_deepspeed_goes_on_and_others_do(small_model: Path, odd_data: Path, tmp_path: Path) -> None:
    model = {"path": str(small_model), "base": "fp32", "dtype": "fp32"}
    run(config_of("alone", small_model, odd_data, tmp_path / "one", "lora", 6, model=model))
    for last, layout in ((2, "zero 2"), (4, "alone"), (6, "zero 3")):
        config = config_of(layout, small_model, odd_data, tmp_path / "many", "lora", last, model=model)
        run(config, "auto" if last > 2 else "never")
    assert_same_runs(tmp_path, 6)


def assert_same_runs(tmp_path: Path, last: int) -> None:
    """`one` and `many` logged the same and ended with the same weights."""
    expected, found = small.read_metrics(tmp_path / "one"), small.read_metrics(tmp_path / "many")
    # a run that ends evaluates, and so does one that goes on; one process does the former once
    for name in ("loss", "router_loss", "grad_norm", "expert_load"):
        by_step = {line["step"]: line[name] for line in expected if line.get(name) is not None}
        assert {line["step"] for line in found if line.get(name) is not None} == by_step.keys()
        for line in found:
            if line.get(name) is not None:
                assert line[name] == pytest.approx(by_step[line["step"]], rel=1e-5), (name, line["step"])
    held_out = {line["step"]: line["eval_loss"] for line in expected if "eval_loss" in line}
    assert all(
        line["eval_loss"] == pytest.approx(held_out[line["step"]], rel=1e-5) for line in found if "eval_loss" in line
    )
    ends = [tmp_path / name / "checkpoints" / f"step-{last}" for name in ("one", "many")]
    one, many = (load_file(end / "trained.safetensors") for end in ends)
    assert one.keys() == many.keys()
    assert max(float((one[name] - many[name]).abs().max()) for name in one) < 1e-5
    received = [json.loads((end / "expert_load.json").read_text()) for end in ends]
    assert received[0] == received[1]


def drawn_after(config: RunConfig, resume: str) -> bytes:
    """The state of a rank's random numbers at the end of a run."""
    on_a_rank(config, resume)
    return torch.get_rng_state().numpy().tobytes()


@pytest.mark.full
@pytest.mark.slow
def test_ranks_that_see_the_same_data_draw_the_same_numbers(noisy_model: Path, odd_data: Path, tmp_path: Path) -> None:
    """Also where a checkpoint was written by ranks that did not."""
    more: dict[str, Any] = {"model": {"path": str(noisy_model), "base": "fp32", "dtype": "fp32"}}
    first = config_of("fsdp 2", noisy_model, odd_data, tmp_path / "run", "router", 2, **more)
    one, other = world.run(2, drawn_after, first, "never")
    assert one != other
    more["parallel"] = {"tp": 2, "ep": 2}
    then = config_of("alone", noisy_model, odd_data, tmp_path / "run", "router", 4, hardware={"count": 2}, **more)
    one, other = world.run(2, drawn_after, then, "auto")
    assert one == other


@pytest.mark.full
def test_exports_are_those_of_one_process(small_model: Path, odd_data: Path, tmp_path: Path) -> None:
    for adapt, layout, formats in (("experts", "ep 4", ("delta", "merged")), ("lora", "ep 2", ("peft", "merged"))):
        for name, of in (("one", "alone"), ("many", layout)):
            run(config_of(of, small_model, odd_data, tmp_path / adapt / name, adapt, 2))
        for format_ in formats:
            folders = []
            for name in ("one", "many"):
                folders.append(tmp_path / adapt / f"{name}-{format_}")
                export(tmp_path / adapt / name, format_, folders[-1])
            files = [sorted(file.name for file in folder.glob("*.safetensors")) for folder in folders]
            assert files[0] == files[1] != []
            for file in files[0]:
                one, many = (load_file(folder / file) for folder in folders)
                assert one.keys() == many.keys()
                assert max(float((one[key] - many[key]).abs().max()) for key in one) < 1e-5, (adapt, format_)
