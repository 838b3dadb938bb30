"""The guide from preference pairs to a served adapter: its blocks are run in order; its table is that of the code."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl.trainer.dpo_trainer")  # loggers of what it imports keep the stdout that they find

from moetune.config.schema import RunConfig
from moetune.run.resolve import resolve
from moetune.training.trl import TRAINERS, trl_arguments
from tests.docs.test_commands import ROOT

PAGE = (ROOT / "docs/guides/preferences.md").read_text(encoding="utf-8")


def test_the_table_is_of_arguments_that_are_given() -> None:
    rows = set(re.findall(r"^\| `(\w+)` \| .* \|$", PAGE, re.MULTILINE))
    run = {"model": {"path": "tiny-mixtral"}, "adapt": {"router": "all"}}
    given = [trl_arguments(resolve(RunConfig.model_validate(run), "cpu"), trainer).keys() for trainer in TRAINERS]
    assert len(rows) > 10
    assert rows <= set().union(*given)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_guide(moetune: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    names: dict[str, Any] = {}
    said = []
    for kind, name, content in re.findall(r"^```(\w+) ?([\w.]*)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        if kind in ("yaml", "json"):
            Path(name).write_text(content, encoding="utf-8")
        elif kind == "python":
            exec(content.replace('resolve("run.yaml")', 'resolve("run.yaml", "cpu")'), names)
        else:
            for line in content.splitlines():
                program, *arguments = shlex.split(line)
                assert program == "moetune"
                ended = moetune(*arguments)
                assert ended.code == 0, ended
                said.append(ended.out)
    assert len(said) == 6
    assert "reference" in said[0]
    assert "reference" in said[1]
    assert "generation" in said[2]
    assert "generation" not in said[3]
    assert Path("out/vllm/adapter_model.safetensors").exists()
