"""Pipelines against one process: whole runs, checkpoints read by other layouts, predictions; and what is refused."""

import copy
from collections.abc import Callable
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble

from moetune.config.schema import ParallelConfig, RunConfig
from moetune.errors import UserError
from moetune.exporting.export import export
from moetune.memory.predict import predict_memory
from moetune.models.catalog.gpus import find_gpu
from moetune.models.dry_run import flow_of
from moetune.models.stack import AbsentTable, StageLayers, every_layer
from moetune.models.structure import meta_model
from moetune.planning.predictor import Predictor
from moetune.run.resolve import resolve
from moetune.run.resolved import ResolvedRun
from moetune.run.stages import bubble, in_flight, least_stages
from tests import small
from tests.memory.models import toy_run
from tests.parallel import pipelines, predicted, world
from tests.toys import expert_model_types, toy_config, toy_model

SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {"pp": 2},
    "gpipe": {"pp": 2, "schedule": "gpipe", "stages": [0, "1-3"]},
    "interleaved1f1b": {"pp": 2, "schedule": "interleaved1f1b"},
}
BALANCED = {"train": {"router_aux_loss": 0.02, "router_z_loss": 0.01, "max_grad_norm": 0.1}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.write_model(tmp_path_factory.mktemp("four") / "model", num_hidden_layers=4)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirteen rows: an epoch ends with a micro-batch too few and one of a single row."""
    return small.write_data(tmp_path_factory.mktemp("data") / "rows.jsonl", small.DATA[:13])


def assert_same(one: Path, other: Path, last: int) -> None:
    """Two runs logged the same and ended with the same weights."""
    for mine, expected in zip(small.read_metrics(other), small.read_metrics(one), strict=True):
        assert mine.get("routing") == expected.get("routing")
        for name in ("loss", "grad_norm", "router_loss", "eval_loss", "lr"):
            if expected.get(name) is not None:
                assert mine[name] == pytest.approx(expected[name], rel=1e-6), (name, mine["step"])
    weights, of_one = (load_file(run / "checkpoints" / f"step-{last}" / "trained.safetensors") for run in (other, one))
    assert weights.keys() == of_one.keys()
    assert max(float((weights[name] - of_one[name]).abs().max()) for name in weights) < 2e-6


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("schedule", "adapt", "packing"),
    [
        pytest.param(
            schedule, adapt, packing, marks=[] if (schedule, adapt) == ("interleaved1f1b", "lora") else pytest.mark.full
        )
        for schedule in SCHEDULES
        for adapt, packing in (("router", False), ("experts", False), ("lora", True))
    ],
)
def test_a_pipeline_trains_as_one_process(
    schedule: str, adapt: str, packing: bool, model: Path, data: Path, tmp_path: Path
) -> None:
    """With router losses, clipping, evaluation and, of experts, a last stage in which nothing trains; of routers, their
    gradient through all experts."""
    train = BALANCED["train"] | {"dense_router_gradient": adapt == "router"}
    sections = {"train": train, "data": {"train": str(data), "eval": str(data), "packing": packing}}
    for name, parallel in (("one", {}), ("two", SCHEDULES[schedule])):
        pipelines.run(pipelines.config_of(model, data, tmp_path / name, adapt, parallel, 3, **sections))
    assert_same(tmp_path / "one", tmp_path / "two", 3)


LAYOUTS: dict[str, dict[str, Any]] = {
    **SCHEDULES,
    "four ranks": {"pp": 4},
    "four ranks, gpipe": {"pp": 4, "schedule": "gpipe"},
    "four ranks, interleaved1f1b": {"pp": 4, "schedule": "interleaved1f1b"},
    "replicas": {"pp": 2, "replicate": 2},
}
LAYERS = {"four ranks, interleaved1f1b": 8}
"""Decoder layers of the toy of a layout, one for each stage at least; 4 of the others."""


@pytest.fixture(scope="module")
def of_one_rank(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """Model type and number of layers -> folder with a toy, and its runs on one rank, by what trains."""

    @cache
    def made(model_type: str, layers: int) -> Path:
        folder = tmp_path_factory.mktemp(model_type)
        pipelines.write_toy(folder / "model", model_type, layers)
        pipelines.run(*(toy_config_of(folder, layers, data, adapt, folder / adapt, {}) for adapt in small.ADAPT))
        return folder

    return made


def toy_config_of(
    folder: Path, layers: int, data: Path, adapt: str, output: Path, parallel: dict[str, Any]
) -> RunConfig:
    """Of experts, those of the last two layers train, so that with two stages nothing does in the first."""
    experts = {"layers": f"{layers - 2}-{layers - 1}", "ids": [0, 1]}
    last = {"adapt": {"router": "none", "experts": experts}} if adapt == "experts" else {}
    return pipelines.config_of(folder / "model", data, output, adapt, parallel, **last)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "model_type", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "granitemoehybrid", "llama4_text"]
)
def test_every_kind_of_model_in_every_layout(
    model_type: str, layout: str, of_one_rank: Callable[[str, int], Path], data: Path, tmp_path: Path
) -> None:
    layers, parallel = LAYERS.get(layout, 4), LAYOUTS[layout]
    folder = of_one_rank(model_type, layers)
    pipelines.run(*(toy_config_of(folder, layers, data, adapt, tmp_path / adapt, parallel) for adapt in small.ADAPT))
    for adapt in small.ADAPT:
        assert_same(folder / adapt, tmp_path / adapt, 10)


@pytest.mark.full
@pytest.mark.slow
def test_other_layouts_go_on_and_the_same_one_bit_by_bit(model: Path, data: Path, tmp_path: Path) -> None:
    def go_on(name: str, parallel: dict[str, Any], steps: int) -> None:
        config = pipelines.config_of(model, data, tmp_path / name, "experts", parallel, steps)
        pipelines.run(config, resume="auto")

    go_on("one", {}, 8)
    layouts = ({}, {"pp": 2}, {"pp": 4}, {}, SCHEDULES["interleaved1f1b"], {"pp": 2, "replicate": 2}, {"replicate": 2})
    for steps, parallel in enumerate(layouts, 2):
        go_on("many", parallel, steps)
    for steps in (3, 8):
        go_on("again", {"pp": 2}, steps)
    go_on("through", {"pp": 2}, 8)
    ends = {
        name: load_file(tmp_path / name / "checkpoints" / "step-8" / "trained.safetensors")
        for name in ("one", "many", "again", "through")
    }
    assert max(float((ends["one"][key] - ends["many"][key]).abs().max()) for key in ends["one"]) < 2e-6
    assert all(ends["again"][key].equal(ends["through"][key]) for key in ends["through"])
    for name in ("one", "through"):
        export(tmp_path / name, "merged", tmp_path / f"{name}-merged")
    one, two = (load_file(next((tmp_path / f"{name}-merged").glob("*.safetensors"))) for name in ("one", "through"))
    assert one.keys() == two.keys()
    assert max(float((one[key] - two[key]).abs().max()) for key in one) < 2e-6


@pytest.mark.full
@pytest.mark.parametrize(
    ("schedule", "adapt"),
    [(schedule, adapt) for schedule in SCHEDULES for adapt in ("experts", "lora")],
)
def test_a_prediction_is_what_real_ranks_take_and_send(schedule: str, adapt: str, model: Path, tmp_path: Path) -> None:
    mixed = {"path": str(model), "dtype": "fp32", "base": {"layers": {0: "fp32", 2: {"experts": "int8"}}}}
    sections = {"model": mixed} if adapt == "lora" else {}
    config = pipelines.config_of(model, tmp_path, tmp_path / "out", adapt, SCHEDULES[schedule], **sections)
    for rank, (real, counts) in enumerate(world.run(2, pipelines.measured, config)):
        told = predicted.predicted(config, rank, counts)
        assert told.collectives == real.collectives
        assert told.peak == pytest.approx(real.peak, rel=1e-3)


def frozen_first_stage(rank: int) -> Tensor | None:
    """The gradient of a stage that trains, behind one that does not, by the interleaved zero-bubble schedule."""
    layers = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
    layers[0].requires_grad_(False)
    example = torch.ones(2, 4)
    stage = PipelineStage(
        layers[rank], rank, 2, torch.device("cpu"), input_args=(example,) if rank == 0 else (example.clone(),),
        output_args=(example.clone(),),
    )  # fmt: skip
    schedule = ScheduleInterleavedZeroBubble([stage], 2, loss_fn=lambda output, target: output.sum(), scale_grads=False)
    schedule.step(*([torch.ones(4, 4)] if rank == 0 else []), **({"target": torch.ones(4, 4)} if rank == 1 else {}))
    return layers[rank].weight.grad


def on_a_rank() -> Tensor | None:
    return frozen_first_stage(torch.distributed.get_rank())


@pytest.mark.full
def test_zero_bubble_schedules_lose_gradients_behind_a_frozen_stage() -> None:
    """Why `parallel.schedule` has none of them. If this fails, torch has mended it, and they can be offered."""
    assert world.run(2, on_a_rank)[1] is None


@pytest.mark.full
def test_a_report_names_the_stages(model: Path, tmp_path: Path) -> None:
    config = pipelines.config_of(model, tmp_path, tmp_path / "out", "router", {"pp": 2, "stages": ["0-2", 3]})
    report = predict_memory(resolve(config, "cuda"), gpu="rtx-3090", simulated=False)
    text = dict(report.about)["stages"]
    assert text == "1f1b: layers 0-2 (2 in flight); layers 3-3 (1 in flight); 20% of a step waits for other stages"
    assert [sent.axis for sent in report.collectives if sent.kind == "point-to-point"]
    assert report.ranks[0].parts.frozen_weights > report.ranks[1].parts.frozen_weights
    assert report.time is not None
    assert report.time.parts["bubble"].fast > 0


# --- Stages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model_type",
    [
        name
        if name in ("mixtral", "gpt_oss", "granitemoehybrid", "gemma4_text", "llama4_text")
        else pytest.param(name, marks=pytest.mark.full)
        for name in [*expert_model_types(), "llama4_text"]
        if (toy := toy_config(name)).get_text_config() is toy
    ],
)
def test_stages_compute_what_the_model_does_or_are_refused(model_type: str) -> None:
    """Of every architecture, bit by bit: scaled embeddings, hybrids and dense first layers included. The second has no
    embedding."""
    why, _ = flow_of(meta_model(toy_config(model_type)))
    assert bool(why) == (model_type in REFUSED), why
    if why:
        return
    whole = toy_model(model_type).eval()
    ids = torch.randint(5, 90, (2, 13), generator=torch.Generator().manual_seed(0))
    count, hidden, embedding = len(every_layer(whole)), None, whole.get_input_embeddings()
    path = next(path for path, module in whole.named_modules() if module is embedding)
    with torch.no_grad():
        expected: Tensor = whole(input_ids=ids, use_cache=False).logits
        for layers in (range(count // 2), range(count // 2, count)):
            stage = StageLayers(whole, layers)
            if hidden is not None:
                whole.set_submodule(path, AbsentTable(copy.deepcopy(embedding).to("meta")))
            with stage.entered(hidden):
                if not stage.is_last:
                    hidden = stage.hidden_states({"input_ids": ids})
                else:
                    assert whole(input_ids=ids, use_cache=False).logits.equal(expected)


REFUSED = {
    "deepseek_v4", "gemma4_text", "glm_moe_dsa", "hy_v4", "inkling2_text", "qwen4_exp_text", "zaya"
}  # fmt: skip
"""Layers that return or take more than hidden states, or whose code reads values."""


def test_the_stage_that_needs_most_of_its_room_needs_least() -> None:
    assert least_stages([4, 1, 1, 1, 1], [(0, 1)] * 2) == (range(1), range(1, 5))
    assert least_stages([1, 1, 1, 1], [(2, 1), (0, 1)]) == (range(1), range(1, 4))
    assert least_stages([1] * 7, [(0, 1)] * 3) == (range(2), range(2, 4), range(4, 7))
    assert least_stages([1] * 6, [(0, 2), (0, 1)]) == (range(4), range(4, 6))


@pytest.mark.full
@pytest.mark.parametrize(
    ("model_type", "parallel", "gpus"),
    [
        ("deepseek_v2", {"pp": 2}, ()),
        ("granitemoehybrid", {"pp": 2}, ()),
        ("mixtral", {"pp": 3, "schedule": "gpipe"}, ()),
        ("mixtral", {"pp": 2}, ("900MiB", "700MiB")),
    ],
)
def test_stages_are_cut_where_the_fullest_rank_needs_least(
    model_type: str, parallel: dict[str, Any], gpus: tuple[str, ...], tmp_path: Path
) -> None:
    """Of all cuts, by their predictions: a dense first layer, an embedding as large as some layers, unlike cards."""
    kinds = {"layers_block_type": ["mamba", "attention"] * 2} if model_type == "granitemoehybrid" else {}
    toy = toy_config(model_type, **{"num_hidden_layers": 4, "vocab_size": 50_000, "intermediate_size": 2_000, **kinds})
    toy.save_pretrained(tmp_path / "model")
    layers, pp = range(toy.num_hidden_layers), parallel["pp"]
    config = toy_run(
        tmp_path / "model", model_type, {"router": "all"},
        parallel=parallel, hardware={"gpus": list(gpus), "count": pp}, train={"accumulate": 2 * pp},
    )  # fmt: skip
    predictor = Predictor(end="high")
    cards = [find_gpu(name).memory.value for name in gpus or ("l40s",) * pp]

    def fullest(run: ResolvedRun) -> float:
        return max(rank.needed / card for rank, card in zip(predictor.quick(run).ranks, cards, strict=True))

    run = resolve(config, "cuda")
    cuts = [
        [range(start, end) for start, end in pairwise((0, *ends, len(layers)))]
        for ends in combinations(layers[1:], pp - 1)
    ]
    shares = {tuple(cut): fullest(run.cut_into(cut)) for cut in cuts}
    chosen = predictor.divided(run).stages
    assert shares[chosen] == min(shares.values())
    assert chosen != run.stages  # the even cut


def test_micro_batches_in_flight_and_the_bubble() -> None:
    four = ParallelConfig(pp=4)
    assert [in_flight(four, rank, 8) for rank in range(4)] == [4, 3, 2, 1]
    assert in_flight(ParallelConfig(pp=4, schedule="gpipe"), 0, 8) == 8
    assert bubble(four, 8) == pytest.approx(3 / 11)
    assert bubble(ParallelConfig(), 8) == 0


@pytest.mark.parametrize(
    ("parallel", "sections", "message"),
    [
        ({"pp": 2, "fsdp": 2}, {}, r"parallel\.pp: 2 goes with replicate, not with fsdp: 2"),
        ({"pp": 2, "engine": "deepspeed"}, {}, r"not with engine: deepspeed"),
        ({"stages": ["0-1", "2-3"]}, {}, r"parallel\.stages: 2 stages, and pp: 1"),
        ({"schedule": "gpipe"}, {}, r"parallel\.schedule: gpipe, and pp: 1"),
        (
            {"pp": 2, "stages": ["2-3", "0-1"]},
            {},
            r"\[2-3, 0-1\] does not hold each of the layers 0-3 once and in order",
        ),
        (
            {"pp": 2, "schedule": "interleaved1f1b", "stages": ["0-1", "2-3"]},
            {},
            r"takes a multiple of 2, two or more each",
        ),
        ({"pp": 2, "stages": ["0-1", 3]}, {}, r"\[0-1, 3-3\] does not hold each of the layers 0-3 once"),
        ({"pp": 2, "stages": [0, 1, "2-3"]}, {}, r"3 stages, and schedule: 1f1b takes 2, one for each rank"),
        ({"pp": 8}, {"train": {"accumulate": 8}}, r"8 stages, and the model has 4 layers"),
        ({"pp": 2}, {"train": {"accumulate": 1}}, r"train\.accumulate: 1, and a pipeline of 2 stages takes 2"),
        (
            {"pp": 2, "schedule": "interleaved1f1b"},
            {"train": {"accumulate": 5}},
            r"5 micro-batches do not divide into 2",
        ),
        (
            {"pp": 2},
            {"train": {"checkpointing": "offload"}},
            r"checkpointing: inputs on the host come back in one order",
        ),
        (
            {"pp": 2},
            {"train": {"checkpointing": {"host": 0}}},
            r"checkpointing: inputs on the host come back in one order",
        ),
        ({"pp": 2}, {"model": {"experts_on": "host", "base": "nf4"}}, r"experts_on: host fetches a layer ahead"),
        (
            {"pp": 2, "schedule": "gpipe"},
            {"optimizer": {"name": "lomo"}, "train": {"accumulate": 1}},
            r"other micro-batches of the pipeline need them",
        ),
        (
            {"fsdp": 2},
            {"hardware": {"gpus": ["rtx-3090", "12GiB"]}},
            r"hardware\.gpus: 2 cards, and parallel\.pp: 1; cards of unlike size go with the stages of a pipeline",
        ),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused_by_name(
    parallel: dict[str, Any], sections: dict[str, Any], message: str, model: Path, tmp_path: Path
) -> None:
    count = parallel.get("pp", 1) * parallel.get("fsdp", 1)
    more = {"hardware": {"count": count, **sections.get("hardware", {})}}
    config = pipelines.config_of(model, tmp_path, tmp_path / "out", "router", parallel, **sections | more)
    with pytest.raises(UserError, match=message):
        resolve(config, "cpu")


def test_a_tied_embedding_stays_frozen(data: Path, tmp_path: Path) -> None:
    tied = small.write_model(tmp_path / "tied", num_hidden_layers=4, tie_word_embeddings=True)
    config = pipelines.config_of(tied, data, tmp_path / "out", "router", {"pp": 2}, adapt={"also": ["embedding"]})
    with pytest.raises(UserError, match=r"is tied to the LM head, which is on another rank"):
        resolve(config, "cpu")
    resolve(pipelines.config_of(tied, data, tmp_path / "out", "router", {"pp": 2}), "cpu")


@pytest.mark.full
def test_tied_embeddings_and_what_trains_outside_of_the_layers(model: Path, data: Path, tmp_path: Path) -> None:
    tied = small.write_model(tmp_path / "tied", num_hidden_layers=4, tie_word_embeddings=True)
    for name, base, also in (("tied", tied, ["norm"]), ("untied", model, ["norm", "embedding", "lm_head"])):
        for layout, parallel in (("one", {}), ("two", {"pp": 2})):
            output = tmp_path / f"{name}-{layout}"
            sections = {"adapt": {"also": also}, "model": {"path": str(base), "base": "fp32", "dtype": "fp32"}}
            pipelines.run(pipelines.config_of(base, data, output, "router", parallel, 5, **sections))
        assert_same(tmp_path / f"{name}-one", tmp_path / f"{name}-two", 5)
