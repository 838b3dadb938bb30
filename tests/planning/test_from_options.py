"""`predict MODEL --lora 16` is the run file that it prints."""

from pathlib import Path

import pytest

from moetune.config.load import load_run_config
from moetune.errors import UserError
from moetune.planning.from_options import as_yaml, config_of


@pytest.mark.parametrize(
    "options",
    [{"lora": 16, "gpu": "l40s"}, {"router": "all"}, {"experts": "0-5:0,1"}, {"experts": "all:0", "router": "0-3"}],
)
def test_what_is_printed_reads_back_equal(options: dict, tmp_path: Path) -> None:
    config, raw = config_of("mixtral-8x7b", ["train.micro_batch=2"], **options)
    assert raw is not None
    (tmp_path / "run.yaml").write_text(as_yaml(raw))
    assert load_run_config(tmp_path / "run.yaml", ["train.micro_batch=2"]) == config
    assert config.train.micro_batch == 2


def test_layers_and_experts() -> None:
    config, _ = config_of("mixtral-8x7b", [], experts="0-2,5:0,1", lora=8)
    assert config.adapt.experts is not None
    assert (config.adapt.experts.layers, config.adapt.experts.ids) == ((0, 1, 2, 5), (0, 1))
    assert config.adapt.lora is not None
    assert (config.adapt.lora.rank, config.adapt.lora.alpha) == (8, 16)


def test_what_is_neither_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"what to train: --lora RANK, .*--experts LAYERS:EXPERTS"):
        config_of("mixtral-8x7b", [])
    with pytest.raises(UserError, match="LAYERS:EXPERTS"):
        config_of("mixtral-8x7b", [], experts="0-5")
    with pytest.raises(UserError, match="is a run file, which says what trains; leave --lora out"):
        config_of("run.yaml", [], lora=16)
    with pytest.raises(UserError, match=r"the run file that mixtral-8x7b and its options stand for:\n.*backwards"):
        config_of("mixtral-8x7b", [], router="5-0")
    with pytest.raises(UserError, match="cannot be read"):
        config_of(str(tmp_path / "none.yaml"), [])
