"""What several ranks cannot do is refused by name, before a process is started or a weight is read."""

from pathlib import Path
from typing import Any

import pytest

from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.run.validation import divided_start
from tests import small
from tests.resolved import train, verify

TWO = {"fsdp": 2}
IN_BF16 = {"lora": {"rank": 2, "alpha": 4, "targets": ["attention"], "dtype": "bf16"}}


def config_of(model: Path, data: Path, tmp_path: Path, parallel: dict[str, Any], **sections: Any) -> RunConfig:
    ranks = {"replicate": 1, "fsdp": 1, "tp": 1, "pp": 1} | parallel
    count = ranks["replicate"] * ranks["fsdp"] * ranks["tp"] * ranks["pp"]
    return small.run_config(
        model, data, tmp_path / "run", "experts", parallel=parallel, hardware={"count": count}, **sections
    )


@pytest.mark.parametrize(
    ("parallel", "sections", "said"),
    [
        ({"pp": 3}, {}, r"parallel\.pp: 3 stages, and the model has 2 layers"),
        (TWO | {"offload": "optimizer"}, {}, r"parallel\.offload"),
        ({"fsdp": 3, "ep": 3}, {}, r"parallel\.ep: 3 ranks cannot hold 4 experts evenly; set ep to 1, 2, 4"),
        ({"tp": 2, "fsdp": 3, "ep": 3}, {}, r"parallel\.ep: 3 is no multiple of tp 2"),
        ({"tp": 8}, {}, r"parallel\.tp: 8 ranks cannot split 2 key/value heads evenly; set tp to 1, 2"),
        (TWO, {"optimizer": {"name": "adamw", "offload": True}}, "adamw does not work: offload moves gradients"),
        (
            TWO,
            {"optimizer": {"name": "adalomo"}, "train": {"accumulate": 1}},
            "adalomo does not work: .*it needs whole matrices",
        ),
        ({"replicate": 2}, {"optimizer": {"name": "lomo"}, "train": {"accumulate": 1}}, "lomo .* fused_backward frees"),
        (TWO, {"optimizer": {"name": "adamw", "master_weights": "stochastic"}}, "master_weights: stochastic rounds"),
        (TWO, {"adapt": IN_BF16}, r"stochastic rounds .* for none adapt\.lora\.dtype: fp32"),
        (TWO | {"ep": 2, "load": "none.json"}, {}, r"parallel\.load 'none\.json'"),
        (
            TWO | {"ep": 2},
            {"adapt": {"start_from": "adapter"}},
            r"adapt\.start_from: .* parallel\.fsdp: 2 and parallel\.ep: 2 divide .*moetune adapter merge",
        ),
    ],
)
def test_refused(
    parallel: dict[str, Any], sections: dict[str, Any], said: str, small_model: Path, small_data: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=said):
        train(config_of(small_model, small_data, tmp_path, parallel, **sections), device="cpu", dry_run=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("parallel", [{"replicate": 2}, TWO | {"engine": "deepspeed"}])
def test_a_start_is_loaded_where_ranks_hold_the_whole_model(parallel: dict[str, Any], tmp_path: Path) -> None:
    start = {"adapt": {"start_from": "adapter"}}
    assert not [*divided_start(config_of(tmp_path, tmp_path, tmp_path, parallel, **start))]


def test_verify_measures_one_process(small_model: Path, small_data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"makes 2 ranks.* one process.*memory\.json"):
        verify(config_of(small_model, small_data, tmp_path, TWO), 1)
