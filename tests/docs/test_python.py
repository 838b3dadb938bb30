"""The guide to the Python API does what it says: its blocks are run in order, and what they leave is checked."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import moetune
from moetune.tensor_files import read_headers
from tests import small

pytest.importorskip("trl")

GUIDE = Path(__file__).parents[2] / "docs/guides/python.md"
ADAPT = {
    "router": "all",
    "experts": {"layers": "0-1", "ids": [0, 1, 2, 3]},
    "lora": {"rank": 4, "alpha": 8, "targets": ["attention"]},
}


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # TRL calls what transformers has renamed
def test_the_guide(small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = small.write_data(tmp_path / "data.jsonl")
    sections: dict[str, Any] = {
        "data": {"eval": str(data)},
        "train": {"sequence_length": 48, "save_every": 2, "accumulate": 1},
    }
    run = small.run_file(small_model, data, tmp_path / "run", **sections) | {"adapt": ADAPT}
    (tmp_path / "run.yaml").write_text(moetune.RunConfig.model_validate(run).to_yaml(), encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 6
    names: dict[str, Any] = {}
    trained: list[Any] = []
    for block in blocks:
        exec(block, names)
        if "adapted" in names and names["adapted"] not in trained:
            trained.append(names["adapted"])

    assert len(trained) == 3
    resolved = names["run"]
    for adapted in trained:
        assert isinstance(adapted.model, type(resolved.model.plain))
        fresh = moetune.build(resolved, "cpu")
        state, before = adapted.model.state_dict(), fresh.model.state_dict()
        changed = {name for name in before if not torch.equal(state[name], before[name])}
        assert changed <= adapted.trainable().keys()  # an expert may have received no token
        assert {resolved.parts[name] for name in changed} == {"router", "experts", "lora"}

    merged = read_headers(tmp_path / "out/dpo-merged")
    base = read_headers(Path(resolved.model.source.folder))
    assert {name: stored.shape for name, stored in merged.items()} == {n: stored.shape for n, stored in base.items()}
    router = "model.layers.1.block_sparse_moe.gate.weight"
    mine = trained[-1].model.get_parameter("model.layers.1.mlp.gate.weight")
    assert merged[router].rows().equal(mine.detach().to(merged[router].torch_dtype))
    assert set(read_delta_headers(tmp_path / "out/sft-delta")) <= set(base)


def read_delta_headers(folder: Path) -> dict[str, Any]:
    from moetune.models.hub.delta_folder import read_delta

    return dict(read_delta(folder).tensors)
