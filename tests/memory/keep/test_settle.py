"""What layers keep for backward takes what memory is left, saves most, and never makes a run not fit."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from moetune.config.schema import KeptConfig
from moetune.memory.assumed_routing import BALANCED
from moetune.memory.closed_form.depth import Depths
from moetune.memory.keep.costs import Costs
from moetune.memory.keep.settle import rows_of, settled
from moetune.memory.measurement.verify import settled_on
from moetune.memory.predict import predict, quick
from moetune.memory.report import MemoryReport
from moetune.memory.trace import Trace, trace
from moetune.models.catalog.gpus import Gpu, find_gpu
from moetune.planning.predictor import Predictor
from moetune.report.memory import rows as sentence
from moetune.run.keeps import Kept, kept_by_layer
from moetune.run.resolve import ResolvedRun, resolve
from tests.memory.models import toy_run, write_toy

LORA: dict[str, Any] = {"lora": {"rank": 4, "alpha": 8, "targets": ["attention", "experts"]}}
BF16 = {"dtype": "bf16", "base": "bf16"}


def auto(folder: Path, model_type: str, layers: int, **train: Any) -> ResolvedRun:
    """On a card, in sizes at which what is kept is most of what a layer takes."""
    toy = write_toy(folder, model_type, experts=2, num_hidden_layers=layers)
    sizes = {"sequence_length": 512, "micro_batch": 2, "loss_memory": "1MiB", "checkpointing": "auto", **train}
    adapt = {"lora": {**LORA["lora"], "targets": ["attention"]}} if model_type == "llama" else LORA
    return resolve(toy_run(toy, model_type, adapt, train=sizes, model=BF16), "cuda")


def on(size: int) -> Gpu:
    return find_gpu(f"{size}B")


class Predicted:
    """Predictions on a card of any size, made once for each choice."""

    def __init__(self) -> None:
        self.depths, self.known = Depths(), dict[tuple[Any, ...], MemoryReport]()

    def on(self, size: int) -> Any:
        def predicted(run: ResolvedRun) -> MemoryReport:
            key = tuple(sorted(run.keeps.items()))
            if key not in self.known:
                self.known[key] = quick(run, gpu="24GiB", routing=BALANCED, depths=self.depths)
            return replace(self.known[key], gpu=replace(self.known[key].gpu, usable_bytes=size))

        return predicted


def saved(costs: Costs, keeps: Any) -> int:
    things, options = costs.things, costs.options
    return sum(options[layer][of.index(keeps.get(layer, of[0]))].saves for layer, of in enumerate(things))


def check_against_all(run: ResolvedRun, shares: list[float]) -> None:
    """Of all choices that surely fit by their own predictions, none saves more than the one that is made."""
    predicted = Predicted()
    base = run.keeping({})
    costs = Costs.of(base, run, find_gpu("24GiB"), BALANCED)
    every = [dict(enumerate(chosen)) for chosen in product(*costs.things)]
    needs = {}
    for number, keeps in enumerate(every):
        needs[number] = predicted.on(1 << 40)(run.keeping(keeps)).span.high
    least, most = predicted.on(1 << 40)(base).span.high, max(needs.values())
    assert most > least
    for share in shares:
        size = least + int(share * (most - least))
        found = settled(run, on(size), BALANCED, predicted.on(size))
        assert predicted.on(size)(found).verdict == "yes"
        best = max(saved(costs, keeps) for number, keeps in enumerate(every) if needs[number] <= size)
        assert saved(costs, found.keeps) == best, (share, found.config.train.checkpointing)
        assert settled(found, on(size), BALANCED, lambda _: pytest.fail("is settled")) is found


@pytest.mark.parametrize(
    ("model_type", "layers"),
    [
        ("llama", 2),
        ("mixtral", 2),
        ("llama", 4),
        ("qwen3_moe", 3),
        ("deepseek_v3", 3),
    ],
)
@pytest.mark.full
def test_nothing_saves_more(model_type: str, layers: int, tmp_path: Path) -> None:
    check_against_all(auto(tmp_path, model_type, layers), [number / 8 for number in range(9)])


@pytest.mark.parametrize(
    ("model_type", "keep_rows"),
    [
        ("llama", False),
        pytest.param("mixtral", False, marks=pytest.mark.full),
        pytest.param("mixtral", True, marks=pytest.mark.full),
    ],
)
def test_the_verdict_is_that_of_full(model_type: str, keep_rows: bool, tmp_path: Path) -> None:
    train = {"checkpointing": "full", "keep_rows": "auto"} if keep_rows else {}
    run = auto(tmp_path, model_type, 8, accumulate=2, **train)
    base = run.keeping({})
    depths = Depths()

    def at(one: ResolvedRun, gpu: str | None) -> MemoryReport:
        return predict(one, method="formula", gpu=gpu, depths=depths)

    full = at(base, "24GiB")
    for size in (full.span.low - 1, full.required, full.span.high + (8 << 20)):
        found, without = at(run, f"{size}B"), at(base, f"{size}B")
        assert found.verdict == without.verdict
        more = found.required - without.required
        assert (more > 0) == (size > full.span.high)
    assert "kept of 8 layers" in dict(found.about)["batch"] or keep_rows
    assert at(run, None).required == full.required
    assert Predictor("24GiB", _depths=depths).of(run.config).required == full.required  # plans compare the least
    if model_type == "mixtral":
        assert "8 of 8 layers can keep their rows: train.checkpointing=auto" in sentence(full)
    if keep_rows:
        kept = at(run, f"{full.span.high + 3 * rows_of(base).bytes}B")
        assert kept.to_json()["keep_rows"]["kept"] >= 2


@pytest.mark.full
def test_a_step_repeats_less_and_its_run_file_says_it_all(tmp_path: Path) -> None:
    run, card = auto(tmp_path, "mixtral", 8), find_gpu("l40s")
    every = range(8)
    keeps: dict[int, Kept] = {
        2: frozenset(("attention",)),
        4: frozenset(("attention", "rows")),
        5: frozenset(("rest",)),
    }
    some = run.keeping(keeps)
    assert isinstance(some.config.train.checkpointing, KeptConfig)
    assert kept_by_layer(some.config.train, run.structure) == some.keeps == keeps
    again = resolve(type(run.config).model_validate(some.config.model_dump(mode="json")), "cuda", like=run)
    assert again.keeps == keeps

    def traced(one: ResolvedRun) -> Trace:
        found = trace(one, gpu=card)
        assert found.parts() == Depths().at(one, gpu=card).parts()
        return found

    full, attention = traced(run.keeping({})), traced(run.keeping(dict.fromkeys(every, frozenset(("attention",)))))
    forward = full.work["attention"].flops - attention.work["attention"].flops
    assert attention.work["experts"] == full.work["experts"]
    assert 0 < forward < full.work["attention"].flops / 3
    everything = traced(run.keeping(dict.fromkeys(every, frozenset(("rest", "rows")))))
    none = trace(resolve(run.config.but(train={"checkpointing": "none"}), "cuda", like=run), gpu=card)
    assert everything.work["experts"] == none.work["experts"]
    assert everything.work["attention"].flops >= none.work["attention"].flops  # here gradients reach the first layer
    mixed = traced(some)
    less = full.work["attention"].flops - mixed.work["attention"].flops
    linears = full.work["attention"].flops - everything.work["attention"].flops - forward
    assert less == pytest.approx(forward * 3 / 8 + linears / 8)
    rows = full.work["experts"].flops - none.work["experts"].flops
    assert full.work["experts"].flops - mixed.work["experts"].flops == pytest.approx(rows / 8)


def test_what_follows_the_last_backward_pass_is_no_part_of_it(tmp_path: Path) -> None:
    """Such as an evaluation, in larger batches than the steps."""
    run, card = auto(tmp_path, "llama", 2), find_gpu("l40s")
    sections = {"data": {"eval": "unread"}, "train": {"eval_micro_batch": 64}}
    evaluates = replace(run, config=run.config.but(**sections))
    without, found = (Costs.of(one.keeping({}), one, card, BALANCED) for one in (run, evaluates))
    assert found.peak > without.peak
    assert found.options == without.options


def test_before_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was kept is kept again where it surely fits, and on a CPU always."""
    run = auto(tmp_path, "mixtral", 8)
    keeps: dict[int, Kept] = {7: frozenset(("rows",))}
    assert settled_on(run, torch.device("cpu"), keeps).keeps == keeps
    assert settled_on(run, torch.device("cpu")).keeps == {}
    full = quick(run.keeping({}))
    wide = replace(run, config=run.config.but(hardware={"gpu": "24GiB"}))
    assert settled_on(wide, torch.device("cuda"), keeps).keeps == keeps
    narrow = replace(run, config=run.config.but(hardware={"gpu": f"{full.required}B"}))
    assert settled_on(narrow, torch.device("cuda"), keeps).keeps == {}


def test_no_number_where_none_can_be_chosen(tmp_path: Path) -> None:
    dense = toy_run(write_toy(tmp_path, "llama"), "llama", {"also": ["norm"]}, train={"keep_rows": "auto"})
    report = predict(dense, method="formula", gpu="24GiB")
    assert (report.rows, report.rows_that_fit, report.to_json()["keep_rows"]) == (None, None, None)
