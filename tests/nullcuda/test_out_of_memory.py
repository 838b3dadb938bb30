"""A card that is too small: torch raises its own error, and training says what was there, or goes on."""

import json
from pathlib import Path

import yaml

from moetune.models.catalog import find_model
from tests import small
from tests.nullcuda.test_commands import start


def run_file(model: Path, folder: Path) -> Path:
    data = small.write_data(folder / "data.jsonl", [{"text": "a router sends every token of the text " * 200}] * 32)
    train = {"micro_batch": 64, "accumulate": 1, "steps": 1, "save_every": 1, "sequence_length": 1024}
    run = small.run_file(model, data, folder / "run", "lora", train=train, data={"too_long": "truncate"})
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(run), encoding="utf-8")
    return file


def test_a_model_of_full_size_on_a_card_of_44_gib(tmp_path: Path) -> None:
    """Mixtral-8x7B with random weights. What is said to fit is tried there; half the micro-batch after half goes on."""
    model = small.write_model(tmp_path / "mixtral")
    entry = find_model("mixtral-8x7b")
    assert entry is not None
    (model / "config.json").write_text(json.dumps(entry.config), encoding="utf-8")
    file = run_file(model, tmp_path)
    settings = ("--set", "model.weights=random", "--set", "model.base=nf4", "--set", "model.dtype=bf16")

    ended = start("train", file, *settings, "--json", NULL_GIB="44")
    out, err = ended.communicate()
    assert ended.returncode == 1, err
    assert "error: out of memory in step 1, micro-step 0" in err, err
    assert "Traceback" not in err
    found = json.loads(out)["out_of_memory"]
    assert found["wanted_bytes"] + found["allocated_bytes"] > found["available_bytes"] - (100 << 20)
    assert 0.99 <= found["actual"]["frozen_weights"] / found["predicted"]["frozen_weights"] <= 1.01
    assert found["actual"]["allocated"] == found["allocated_bytes"] >= sum(one["bytes"] for one in found["largest"])
    assert found["largest"][0]["bytes"] > 20 << 30  # the experts that are frozen
    flags = [one["flags"] for one in found["settings"]]
    (rows,) = [those for those in flags if those[0].startswith("train.micro_batch=")]

    mended = start("train", file, "--overwrite", *settings, *(w for f in rows for w in ("--set", f)), NULL_GIB="44")
    assert mended.wait() == 0, mended.communicate()

    halving = ("--overwrite", *settings, "--set", "train.on_oom=halve_micro_batch")
    goes_on = start("train", file, *halving, NULL_GIB="44")
    assert goes_on.wait() == 0, goes_on.communicate()
    lines = small.read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines if "loss" in line] == [1]
    noted = [line for line in lines if "out_of_memory" in line]
    assert noted
    assert noted[-1]["micro_batch"] * noted[-1]["accumulate"] == 64
