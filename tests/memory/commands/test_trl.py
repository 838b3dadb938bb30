"""Predictions for TRL's trainers, against their real runs."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

pytest.importorskip("trl")

import trl.trainer.utils
from datasets import Dataset
from transformers import AutoTokenizer

from moetune.adapt.build import build
from moetune.errors import UserError
from moetune.experts.context import ReadCounts
from moetune.memory.assumed_routing import BALANCED
from moetune.memory.commands.trl import predict_trl, trace_trl
from moetune.memory.report import MemoryReport
from moetune.memory.trace.tracker import Tracker
from moetune.memory.trace.watched import Watched
from moetune.models.catalog.gpus import find_gpu
from moetune.run.resolve import resolve
from moetune.training.trl import trl_arguments, trl_model
from tests.toys import toy_config
from tests.training.test_trl import ADAPT, KINDS, TEXT, a_reward, a_run, write_toy

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
LONG = [f" {TEXT} {TEXT}"[row:] for row in range(8)]
SHORT = [*LONG[:7], " " + TEXT[:20]]  # one row is padded
PAIRS = {"prompt": ["a"] * 8, "chosen": LONG, "rejected": SHORT}
DATA: dict[str, dict[str, Any]] = {
    "dpo": PAIRS,
    "orpo": PAIRS,
    "kto": {"prompt": ["a"] * 8, "completion": SHORT, "label": [row % 2 == 0 for row in range(8)]},
}


@pytest.fixture(autouse=True)
def narrow_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's buffer of logits is as wide as a large vocabulary; beside it a toy would take nothing."""
    monkeypatch.setattr(trl.trainer.utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", 64)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy") / "model", "mixtral")


class Running:
    """A real run of a trainer on this machine, as a user writes it."""

    def __init__(
        self,
        toy: Path,
        kind: str,
        part: str,
        more: dict[str, Any],
        train: dict[str, Any] | None = None,
        shorter: int = 0,
    ) -> None:
        adam = {"name": "adamw", "lr": 1e-4}
        self.run = resolve(
            a_run(toy, ADAPT[part], optimizer=adam, train={"max_grad_norm": 1.0, **(train or {})}), "cpu"
        )
        adapted = build(self.run, "cpu")
        self._generate, adapted.model.generate = adapted.model.generate, self._generating
        self.most_of_generation = 0
        tokenizer = AutoTokenizer.from_pretrained(toy)
        tokenizer.pad_token = tokenizer.eos_token
        of = KINDS[kind]
        self.calls: list[list[int]] = []
        watched = Watched(adapted)
        self.tracker = Tracker({})
        watched.add_to(self.tracker)
        arguments = trl_arguments(self.run, kind) | more  # type: ignore[arg-type]
        given = {"reward_funcs": a_reward} if kind == "grpo" else {}
        if arguments.pop("use_vllm", False):
            given["rollout_func"] = rollouts
        gc.collect()
        with adapted.expert_context.hooks.using(count_rows=self._count), self.tracker:
            trainer = of.trainer(
                trl_model(adapted) if kind != "orpo" else adapted.model,
                args=of.config(**arguments),
                train_dataset=Dataset.from_dict(DATA.get(kind) or {"prompt": prompts_of(tokenizer, 56, shorter)}),
                processing_class=tokenizer,
                **given,
            )
            self.before, self.calls = self.calls, []
            trainer.train()
        self.peak = self.tracker.peak_bytes
        self.tracker.stop()

    def _generating(self, **given: Any) -> Tensor:
        began = self.tracker.place()
        found: Tensor = self._generate(**given)
        alive = 0
        for at, entry in enumerate(self.tracker.log.entries):
            block = self.tracker.log.blocks[entry if entry >= 0 else ~entry]
            alive += 0 if block.on_host else block.bytes if entry >= 0 else -block.bytes
            self.most_of_generation = max(self.most_of_generation, alive * (at >= began))
        return found

    def _count(self, layer: int, ids: Tensor, num_experts: int, read: ReadCounts) -> list[int]:
        self.calls.append(read())
        return self.calls[-1]

    def answers(self, passes: int) -> Iterator[list[int]]:
        """What experts received: in the first passes before training, and in the steps."""
        return iter([*self.before[: 2 * passes], *self.calls])


def rollouts(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
    """Completions as a vLLM server gives them, all of full length."""
    length, ids = trainer.args.max_completion_length, trainer.processing_class(prompts)["input_ids"]
    return {
        "prompt_ids": ids,
        "completion_ids": [[5] * length for _ in ids],
        "logprobs": [[-0.5] * length for _ in ids],
    }


def prompts_of(tokenizer: Any, tokens: int, shorter: int) -> list[str]:
    """Eight texts of this many tokens; some of them have one token less."""
    ends = [(f" {TEXT}" * 4)[row:end] for row in range(40) for end in range(row + 1, 200)]
    long, short = ([text for text in ends if len(tokenizer(text)["input_ids"]) == n] for n in (tokens, tokens - 1))
    return [*short[:shorter], *long][:8]


CASES = [
    ("dpo", "experts", {}, 1),
    ("dpo", "lora", {"precompute_ref_log_probs": False}, 0),
    ("dpo", "experts", {"precompute_ref_log_probs": False}, 0),
    ("kto", "router", {}, 2),
    ("kto", "experts", {"precompute_ref_log_probs": False}, 0),
    ("orpo", "lora", {}, 0),
    ("orpo", "experts", {}, 0),
]


@pytest.mark.one_in(7)
@pytest.mark.parametrize(("kind", "part", "more", "passes"), CASES)
def test_a_real_run(kind: str, part: str, more: dict[str, Any], passes: int, toy: Path) -> None:
    real = Running(toy, kind, part, more)
    rows = real.answers(passes)
    traced = trace_trl(real.run, lambda *_: next(rows), trainer=kind, more=more)  # type: ignore[arg-type]
    assert next(rows, None) is None
    assert traced.parts().total == pytest.approx(real.peak, rel=0.01)
    assert max(most for _, most in traced.phases()) == traced.parts().total
    phases = [phase for phase, _ in traced.phases()]
    assert (
        phases
        == {
            "orpo": ["forward", "backward", "optimizer"],
            "kto": ["reference", "forward", "backward", "optimizer"],
            "dpo": ["reference", "forward", "backward", "optimizer"],
        }[kind]
        or not passes
    )


@pytest.mark.full
@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("model_type", "part", "more", "train", "every", "between"),
    [
        ("qwen3_moe", "lora", {"beta": 0.1}, {"accumulate": 8}, 1, ["reference"]),
        ("qwen3_moe", "experts", {"beta": 0.1}, {}, 1, ["reference"]),
        ("mixtral", "experts", {"num_iterations": 2}, {}, 2, ["old_logprobs"]),
        ("mixtral", "router", {"cache_implementation": "static"}, {}, 1, []),
        ("qwen3_moe", "router", {"generation_kwargs": {"use_cache": False}}, {}, 1, []),
        ("qwen3_next", "lora", {"beta": 0.1, "num_generations": 2}, {}, 1, ["reference"]),
        ("granitemoehybrid", "lora", {"beta": 0.1}, {}, 1, ["reference"]),
        ("lfm2_moe", "lora", {"num_iterations": 2}, {}, 2, ["old_logprobs"]),
    ],
)
def test_a_real_run_of_grpo(
    model_type: str,
    part: str,
    more: dict[str, Any],
    train: dict[str, Any],
    every: int,
    between: list[str],
    tmp_path: Path,
) -> None:
    """TRL generates every so many steps; a trace does in each of its two. Mixtral's layers have windows. Qwen3-Next's
    hide padding in a copy of their input, which is predicted."""
    length, rows = 8, 2 * train.get("accumulate", 2)
    more = {"max_completion_length": length, "num_generations": 4, **more}
    real = Running(
        write_toy(tmp_path / "model", model_type),
        "grpo",
        part,
        more,
        train | {"steps": every + 1},
        4 * (model_type == "qwen3_next"),
    )
    # Of two layers: passes for the tokens, those over batches of two rows, and those of the steps' own micro-steps.
    passes, others = 2 * length, rows * (1 + len(between))
    steps = real.calls[: passes + others], real.calls[-passes - others :]
    last = passes if "cache_implementation" in more else passes - 4  # a static cache is full from the beginning
    own = slice(passes, passes + others - rows + 4)  # the trace runs two micro-steps
    counts = iter([one for calls in steps for one in (*calls[:4], *calls[last:passes], *calls[own])])
    traced = trace_trl(real.run, lambda *_: next(counts), trainer="grpo", more=more)
    assert next(counts, None) is None
    most = dict(traced.phases())
    assert traced.parts().total == pytest.approx(real.peak, rel=0.01)
    assert most["generation"] == pytest.approx(real.most_of_generation, rel=0.01)
    assert most.keys() == {"generation", *between, "forward", "backward", "optimizer"}


@pytest.mark.full
def test_a_real_run_with_completions_from_vllm(toy: Path) -> None:
    more = {"max_completion_length": 8, "num_generations": 4, "beta": 0.1, "use_vllm": True}
    real = Running(toy, "grpo", "lora", more, {"steps": 2})
    counts = iter(real.calls)
    traced = trace_trl(real.run, lambda *_: next(counts), trainer="grpo", more=more)
    assert next(counts, None) is None
    assert traced.parts().total == pytest.approx(real.peak, rel=0.01)
    assert dict(traced.phases()).keys() == {"reference", "forward", "backward", "optimizer"}


@pytest.mark.full
def test_the_report_and_the_part_of_the_card_that_vllm_takes(toy: Path) -> None:
    run = a_run(toy, ADAPT["lora"], optimizer={"name": "adamw"}, hardware={"gpu": "l40s"})

    def predicted(**more: Any) -> MemoryReport:
        return predict_trl(run, "grpo", {"max_completion_length": 8, "beta": 0.1, **more}, routing=BALANCED)

    alone, beside, on_another = predicted(), predicted(use_vllm=True), predicted(use_vllm=True, vllm_mode="server")
    assert alone.gpu is not None
    assert beside.gpu is not None
    card = find_gpu("l40s")
    taken = alone.gpu.usable_bytes - beside.gpu.usable_bytes
    assert taken == math.ceil(0.3 * card.memory.value) + card.context.value
    assert beside.gpu.name.endswith("less vLLM's 0.3")
    assert "0.3 of the card" in dict(beside.about)["generator"]
    assert on_another.gpu == alone.gpu
    assert on_another.required == beside.required
    assert alone.verdict == "yes"
    assert [phase for phase, _ in alone.phases] == ["forward", "generation", "reference", "backward", "optimizer"]
    told = alone.to_json()
    assert (told["trainer"], told["phases"]) == ("grpo", dict(alone.phases))
    assert told["about"]["trainer"] == "TRL's GRPO, max_completion_length=8, beta=0.1"
    assert max(alone.phases, key=lambda one: one[1])[1] <= alone.fullest.peak_allocated
    assert "4 completions of 8 tokens are generated at once, 4 for each prompt of 56 tokens" in alone.assumptions
    assert "generation" not in dict(beside.phases)
    for more, named in (
        ({"vllm_gpu_memory_utilization": 1e-6}, "a second time, in 16 bits"),
        ({"vllm_gpu_memory_utilization": 1}, "a number below 1"),
        ({"vllm_mode": "beside"}, "server or colocate"),
        ({"vllm_enable_sleep_mode": True}, "vllm_enable_sleep_mode"),
    ):
        with pytest.raises(UserError, match=named):
            predicted(use_vllm=True, **more)


@pytest.mark.full
@pytest.mark.one_in(15)
@pytest.mark.parametrize("part", ["router", "experts", "lora"])
@pytest.mark.parametrize("kind", ["sft", "dpo", "kto", "orpo", "grpo"])
def test_a_few_layers_stand_for_all(kind: Any, part: str, tmp_path: Path) -> None:
    adapt = ADAPT[part] | ({"experts": {"layers": "all", "ids": [0, 2]}} if part == "experts" else {})
    toy_config("mixtral", num_hidden_layers=4, sliding_window=None).save_pretrained(tmp_path)
    more = {"precompute_ref_log_probs": False} if kind in ("dpo", "kto") else {}
    run = a_run(tmp_path, adapt, optimizer={"name": "adamw"}, model={"weights": "random"})
    short, whole = (trace_trl(run, trainer=kind, more=more, shortened=how) for how in (True, False))
    assert short.parts() == whole.parts()
    (*found, (last, after)), (*expected, (_, updated)) = short.phases(), whole.phases()
    assert found == expected
    assert last == "optimizer"  # in which the norm of each gradient is a number of 4 bytes, outside of all layers
    assert after == pytest.approx(updated, abs=4 * len(resolve(run, "cuda").parts))
    assert short.host_peak == whole.host_peak


@pytest.mark.full
@pytest.mark.parametrize("auto", ["checkpointing", "keep_rows"])
def test_nothing_is_kept_that_a_real_run_does_not_keep(auto: str, toy: Path) -> None:
    """A model that is built for TRL is not settled by a card."""
    run = a_run(toy, ADAPT["lora"], optimizer={"name": "adamw"}, train={auto: "auto"}, hardware={"gpu": "24GiB"})
    assert build(resolve(run, "cpu"), "cpu").run.keeps == {}
    report = predict_trl(run, "orpo", routing=BALANCED)
    assert dict(report.about)["batch"].endswith("checkpointing full")


@pytest.mark.parametrize(
    ("train", "trainer", "more", "named"),
    [
        ({"micro_batch": 1}, "kto", {}, "batch size"),
        ({}, "dpo", {"betta": 1}, "betta"),
        ({}, "dpo", {"loss_type": "none"}, "none"),
        ({}, "grpo", {"max_completion_length": 64}, "1 to 63"),
        ({}, "grpo", {"max_completion_length": "long"}, "1 to 63"),
        ({}, "grpo", {"use_vllm": True}, "name one with --gpu"),
        ({}, "grpo", {"use_transformers_continuous_batching": True}, "use_transformers_continuous_batching"),
        ({}, "grpo", {"num_generations": 3}, "num_generations"),
        ({}, "grpo", {"cache_implementation": "offloaded"}, "offloaded"),
    ],
)
def test_what_cannot_be_predicted(
    train: dict[str, Any], trainer: Any, more: dict[str, Any], named: str, toy: Path
) -> None:
    with pytest.raises(UserError, match=named):
        predict_trl(a_run(toy, ADAPT["lora"], train=train), trainer, more)
