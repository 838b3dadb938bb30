"""A card that is too small: torch raises its own error, and training says what was there, or goes on."""

import json
from pathlib import Path
from typing import Any

import yaml

from moetune.models.catalog import find_model
from tests import small
from tests.nullcuda.test_commands import moetune, start

TRAIN = {
    "micro_batch": 32,
    "accumulate": 1,
    "steps": 2,
    "save_every": 1,
    "sequence_length": 1024,
    "checkpointing": "none",
}


def run_file(model: Path, folder: Path, **train: Any) -> Path:
    data = small.write_data(folder / "data.jsonl", [{"text": "a router sends every token of the text " * 200}] * 32)
    run = small.run_file(model, data, folder / "run", "lora", train=TRAIN | train, data={"too_long": "truncate"})
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(run), encoding="utf-8")
    return file


def test_memory_runs_out(tmp_path: Path) -> None:
    """On a card with a fifth less than the run takes; with half the micro-batch the same steps go on there.

    The model is large enough for a card above 1.2 GiB, which transformers leaves free while it loads.
    """
    model = small.write_model(tmp_path / "model", hidden_size=512, intermediate_size=2048, head_dim=64)
    file = run_file(model, tmp_path)
    moetune("train", file)
    taken = json.loads((tmp_path / "run/memory.json").read_text())["measured"]["peak_reserved"]
    gib = str(0.8 * taken / 2**30)

    ended = start("train", file, "--overwrite", "--json", NULL_GIB=gib)
    out, err = ended.communicate()
    assert ended.returncode == 1, err
    assert "error: out of memory in step 1, micro-step 0" in err, err
    assert "Traceback" not in err
    found = json.loads(out)["out_of_memory"]
    a_page = 20 << 20  # what is free is so much at a time
    assert found["allocated_bytes"] + found["wanted_bytes"] > found["available_bytes"] - 2 * a_page
    assert sum(one["bytes"] for one in found["largest"]) <= found["allocated_bytes"]
    assert found["actual"]["allocated"] == found["allocated_bytes"]
    assert 0 <= found["actual"]["frozen_weights"] / found["predicted"]["frozen_weights"] - 1 < 0.05  # sizes rounded up
    (flags,) = [one["flags"] for one in found["settings"] if one["flags"][0].startswith("train.micro_batch=")]

    settings = [word for flag in flags for word in ("--set", flag)]
    mended = start("train", file, "--overwrite", *settings, NULL_GIB=gib)
    _, err = mended.communicate()
    assert mended.returncode == 0, err

    goes_on = start("train", file, "--overwrite", "--set", "train.on_oom=halve_micro_batch", NULL_GIB=gib)
    _, err = goes_on.communicate()
    assert goes_on.returncode == 0, err
    lines = small.read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]
    (noted,) = [line for line in lines if "out_of_memory" in line]
    assert (noted["micro_batch"], noted["accumulate"]) == (16, 2)


def test_a_model_of_full_size_on_a_card_of_44_gib(tmp_path: Path) -> None:
    """Mixtral-8x7B with random weights. What is said to fit is tried there; half the micro-batch after half goes on."""
    model = small.write_model(tmp_path / "mixtral")
    entry = find_model("mixtral-8x7b")
    assert entry is not None
    (model / "config.json").write_text(json.dumps(entry.config), encoding="utf-8")
    file = run_file(model, tmp_path, micro_batch=64, steps=1, checkpointing="full")
    settings = ("--set", "model.weights=random", "--set", "model.base=nf4", "--set", "model.dtype=bf16")

    ended = start("train", file, *settings, "--json", NULL_GIB="44")
    out, err = ended.communicate()
    assert ended.returncode == 1, err
    assert "error: out of memory in step 1, micro-step 0" in err, err
    assert "Traceback" not in err
    found = json.loads(out)["out_of_memory"]
    assert found["wanted_bytes"] + found["allocated_bytes"] > found["available_bytes"] - (100 << 20)
    assert 0.99 <= found["actual"]["frozen_weights"] / found["predicted"]["frozen_weights"] <= 1.01
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
