"""Every JSON or YAML file that is read back × every kind of value at every key × every command that reads it."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from matplotlib.layout_engine import ConstrainedLayoutEngine

import moetune as package
from moetune.config.schema import RunConfig
from moetune.exporting.export import export
from moetune.planning import predict as predict_module
from moetune.training.folder.manifest import MANIFEST, write_manifest
from tests import small
from tests.fuzz.damage import within
from tests.resolved import train, write_quantized_base
from tests.routing.made import write_scores

VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 10**400, 0.5, float("nan"), float("inf"), "", "a\x1b[31m",
    [], [[]], {}, {"": ""}, {"a": {"b": {}}},
)  # fmt: skip
DEEP = "[" * 3000

TABLE: dict[str, tuple[str, ...]] = {
    "run/metrics.jsonl": ("report run --no-timeline", "predict run/run.yaml --gpu l40s --measured run --tokens 9"),
    "run/memory.json": (
        "report run --no-timeline",
        "predict run/run.yaml --routing run/memory.json",
    ),
    "run/drift.json": ("report run --no-timeline",),
    "run/run.yaml": ("report run --no-timeline", "train run/run.yaml --resume auto --dry-run"),
    "run/base.json": ("train run/run.yaml --resume auto --dry-run",),
    "run/inputs.json": ("train run/run.yaml --resume auto --dry-run",),
    "run/checkpoints/step-2/manifest.json": ("train run/run.yaml --resume auto --dry-run",),
    "run/checkpoints/step-2/optimizer.json": ("train run/run.yaml --resume auto --dry-run",),
    "run/checkpoints/step-2/trainer_state.json": ("train run/run.yaml --resume auto --dry-run",),
    "packed/packed.json": ("count packed",),
    "delta/manifest.json": ("apply delta --to model --out applied --overwrite",),
    "delta/delta.safetensors": ("apply delta --to model --out applied --overwrite",),
    "adapter/adapter_config.json": ("eval adapter --data data.jsonl", "adapter check model adapter"),
    "adapter/adapter_model.safetensors": ("adapter check model adapter",),
    "deepspeed.json": ("count --run deepspeed.yaml",),
    "load.json": ("count --run load.yaml",),
    "scores.json": ("select scores.json --k 1",),
}
"""What is read back -> the commands that read it. A new file belongs here."""

READ_BY = {
    "inference/completions.py": "texts of an interrupted call: test_completions.py",
    "adapt/weights/stock.py": "model.safetensors.index.json: test_models.py",
    "adapters/files.py": "adapter/adapter_config.json",
    "models/source.py": "config.json: test_models.py",
    "adapt/start_from/start.py": "config.json: test_models.py",
    "exporting/writers/merged.py": "config.json: test_models.py",
    "models/hub/delta_folder.py": "delta/manifest.json",
    "formats/source_quantization.py": "config.json: test_models.py",
    "tensor_files.py": "delta/delta.safetensors",
    "inference/run_page.py": "run/memory.json",
    "parallel/start_ranks.py": "a rank's last words, in a folder of our own",
    "run/deepspeed_json.py": "deepspeed.json",
    "models/quantized_manifest.py": "packed/packed.json",
    "run/folder_files.py": "run/metrics.jsonl",
    "run/scores.py": "scores.json",
    "training/folder/checkpoint.py": "run/checkpoints/step-2/optimizer.json",
    "watch/ending.py": "run/memory.json",
    "training/same_run.py": "config.json: test_models.py",
    "training/folder/manifest.py": "run/checkpoints/step-2/manifest.json",
    "training/folder/run_folder.py": "run/base.json",
    "training/data/tokenizer_files.py": "a model's own: test_tokenizer_files.py",
    "training/data/sources.py": "dataset_dict.json: tests/training/data/files/test_folder.py",
    "training/data/files/llama_factory.py": "dataset_info.json: tests/training/data/files/test_llama_factory.py",
}
"""Who calls the reader -> a file of the table, or where else it is damaged."""
RAW = {
    "atomic.py": "whose a folder beside an output is: test_atomic.py",
    "models/catalog/__init__.py": "part of the package",
    "models/catalog/gpus.py": "part of the package",
    "cli/init.py": "part of the package",
    "training/data/files/folder.py": "state.json of a data set: tests/training/data/files/test_folder.py",
    "training/data/files/tables.py": "a value in a table: tests/training/data/files/test_tables.py",
    "watch/memory_record.py": "what the run has just written",
    "training/data/tokenizer_files.py": "what a tokenizer writes of itself",
    "files.py": "a lock of another process",
    "training/trl.py": "what the program writes of itself",
    "compat/transformers.py": "what transformers has just written",
    "inference/rollouts.py": "what a server answers",
}
"""Who parses by themselves."""


@pytest.fixture(scope="module")
def run_written(small_model: Path, small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("read_back")
    settings = {"steps": 2, "save_every": 2}
    train(RunConfig.model_validate(small.run_file(small_model, small_data, folder / "run", "lora", train=settings)))
    layer = {"before": [1, 2], "after": [2, 1], "distance": 0.1, "changed": 0.5, "died": [], "came": []}
    drift = {"schema": 1, "run": "run", "step": 2, "data": "x", "tokens": 3, "changed": 0.5, "layers": {"0": layer}}
    (folder / "run" / "drift.json").write_text(json.dumps(drift))
    write_scores(folder / "scores.json", {0: [4, 3, 2, 1], 1: [1, 2, 3, 4]}, str(small_model))
    return folder


@pytest.fixture(scope="module")
def written(run_written: Path, small_model: Path, small_data: Path) -> Path:
    folder, settings = run_written, {"steps": 2, "save_every": 2}
    (folder / "model").symlink_to(small_model)
    (folder / "data.jsonl").symlink_to(small_data)
    train(RunConfig.model_validate(small.run_file(folder / "model", small_data, folder / "experts", train=settings)))
    export(folder / "experts", "delta", folder / "delta")
    export(folder / "run", "peft", folder / "adapter")
    settled = {"train_batch_size": 8, "zero_optimization": {"stage": 2}, "bf16": {"enabled": False}}
    (folder / "deepspeed.json").write_text(json.dumps(settled))
    for name, parallel in {
        "deepspeed": {"engine": "deepspeed", "fsdp": 2, "zero": 2, "deepspeed": str(folder / "deepspeed.json")},
        "load": {"ep": 2, "fsdp": 2, "load": str(folder / "load.json")},
    }.items():
        run_file = small.run_file(small_model, small_data, folder / "new", parallel=parallel)
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(run_file))
    (folder / "load.json").write_text(json.dumps({"expert_load": {"0": [1, 2, 3, 4], "1": [4.0, 3, 2, 1]}}))
    write_quantized_base(str(small_model), folder / "packed", "nf4", double_quant=True)
    return folder


def distinct_places(tree: Any) -> list[tuple[Any, Any]]:
    """`places`, but of a list only its first value, and of keys that are names of tensors, files or layers one."""
    found: list[tuple[Any, Any]] = []
    left = [tree]
    while left:
        node = left.pop()
        keys: list[Any] = [0][: len(node)] if isinstance(node, list) else []
        if isinstance(node, dict):
            names = [key for key in node if "." in key or key.isdigit()]
            keys = [key for key in node if key not in names[1:]]
        found += [(node, key) for key in keys]
        left += [node[key] for key in keys]
    return found


def damaged_texts(name: str, text: str) -> list[str]:
    """The file with each value at each key; of lines the first one."""
    first, *rest = text.splitlines(keepends=True) if name.endswith(".jsonl") else [text]
    tree: Any = yaml.safe_load(first) if name.endswith(".yaml") else json.loads(first)
    found = [DEEP, "", "null", "3", "[]", "\ufeff{}"]
    for node, key in distinct_places(tree):
        before = node[key]
        for value in VALUES:
            node[key] = value
            found.append((yaml.safe_dump(tree) if name.endswith(".yaml") else json.dumps(tree)) + "\n" + "".join(rest))
        node[key] = before
    return found


@pytest.fixture
def one_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is traced is the same for every damaged file: `--measured` reads it and `predict` does not."""
    reports: list[Any] = []
    stock = predict_module.predict

    def predict(*arguments: Any, **settings: Any) -> Any:
        if not reports:
            reports.append(stock(*arguments, **settings))
        return reports[0]

    monkeypatch.setattr(predict_module, "predict", predict)


@pytest.fixture
def simple_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are drawn, but not arranged, which takes as long."""
    monkeypatch.setattr(ConstrainedLayoutEngine, "execute", lambda *_: None)


def check(name: str, written: Path, moetune: Callable[..., Any], some: int | None = None) -> None:
    file = written / name
    whole = file.read_bytes()
    manifest = file.with_name(MANIFEST)
    sealed = manifest.read_bytes() if manifest.exists() else None

    def restore() -> None:
        file.write_bytes(whole)
        if sealed is not None:
            manifest.write_bytes(sealed)

    try:
        for command in TABLE[name][: 1 if some else None]:
            restore()
            said = moetune(*command.split())
            assert said.code in (0, 1), said.err
            texts = list(enumerate(damaged_texts(name, as_text(name, whole))))
            for number, text in random.Random(0).sample(texts, some or len(texts)):
                file.write_bytes(as_file(name, text, whole))
                if (checkpoint := file.parent).name == "step-2" and file.name != MANIFEST:
                    write_manifest(checkpoint, 2)
                with within(60):
                    said = moetune(*command.split())
                assert said.code in (0, 1, 2), (number, text[:500], said.err)
                assert "Traceback" not in said.err, (number, text[:500], said.err)
                assert said.code != 2 or "error: " in said.err
                assert "\x1b[31m" not in said.out + said.err
    finally:
        restore()


def as_text(name: str, whole: bytes) -> str:
    """What is damaged: of tensors their header."""
    return whole[8 : 8 + int.from_bytes(whole[:8], "little")].decode() if name.endswith("tensors") else whole.decode()


def as_file(name: str, text: str, whole: bytes) -> bytes:
    said = text.encode(errors="surrogatepass")
    if not name.endswith("tensors"):
        return said
    return len(said).to_bytes(8, "little") + said + whole[8 + int.from_bytes(whole[:8], "little") :]


@pytest.mark.parametrize(
    ("words", "known"),
    [
        (r"\b(read_json|read_sealed|parse_json)\(", READ_BY | {"json_files.py": ""}),
        (r"\b(json\.loads?|yaml\.(safe_)?load)\(", RAW),
    ],
)
def test_nobody_reads_past_the_table(words: str, known: dict[str, str]) -> None:
    root = Path(package.__file__).parent
    found = {str(file.relative_to(root)) for file in root.rglob("*.py") if re.search(words, file.read_text())}
    assert found == known.keys()
    for name in known.values():
        assert ":" in name or "/" not in name or name in TABLE


@pytest.mark.full
@pytest.mark.usefixtures("one_prediction", "simple_layout")
@pytest.mark.parametrize("name", TABLE)
def test_every_value_at_every_key(
    name: str, written: Path, moetune: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(written)
    check(name, written, moetune)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["run/metrics.jsonl", "scores.json"])
def test_some_values(
    name: str, run_written: Path, moetune: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run_written)
    check(name, run_written, moetune, 3)
