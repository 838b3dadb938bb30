"""A run folder has one writer at a time; whoever comes second is told, and readers go on beside it."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.exporting.export import export
from moetune.training.folder.manifest import damage
from moetune.training.folder.run_folder import RunFolder
from moetune.training.folder.run_writer import RunWriter
from tests import small
from tests.processes import processes
from tests.resolved import train
from tests.training.test_resume import work_alone

TRAIN = {"steps": 3, "save_every": 1, "keep_checkpoints": 2}


@pytest.fixture(scope="module")
def begun(small_model: Path, small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run file whose output has a run of two steps, with LoRA so that every format can be exported."""
    output = tmp_path_factory.mktemp("one-writer") / "run"
    run = small.run_file(small_model, small_data, output, train=TRAIN | {"steps": 2})
    train(RunConfig.model_validate(run))
    return run | {"train": run["train"] | {"steps": 3}}


@pytest.fixture
def run(begun: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    shutil.copytree(begun["output"], tmp_path / "run")
    return begun | {"output": str(tmp_path / "run")}


def contend(run: dict[str, Any], how: dict[str, Any], start: Any, told: Any) -> None:
    work_alone()
    start.wait(30)
    try:
        train(RunConfig.model_validate(run), **how)
        told.put(("done", run["train"]["seed"]))
    except UserError as error:
        told.put((str(error), run["train"]["seed"]))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", [{}, {"overwrite": True}], ids=["never", "overwrite"])
def test_of_two_that_race_one_trains(how: dict[str, Any], run: dict[str, Any], tmp_path: Path) -> None:
    output = run["output"] if how else str(tmp_path / "new")
    start, told = processes.Barrier(2), processes.Queue()
    runs = [run | {"output": output, "train": run["train"] | {"seed": seed}} for seed in (0, 1)]
    racers = [processes.Process(target=contend, args=(racing, how, start, told)) for racing in runs]
    for racer in racers:
        racer.start()
    ends = [told.get(timeout=60) for _ in racers]
    for racer in racers:
        racer.join(30)
    trained = [seed for end, seed in ends if end == "done"]
    refused = [end for end, _ in ends if end != "done"]
    assert all("is being written by" in end or "meanwhile" in end or "holds a run" in end for end in refused)
    assert trained
    assert how or len(refused) == 1
    folder = RunFolder(Path(output))
    kept = yaml.safe_load((folder.path / "run.yaml").read_text())["train"]["seed"]
    assert kept in trained
    for checkpoint in folder.checkpoints():
        assert damage(checkpoint) is None
        assert yaml.safe_load((checkpoint / "run.yaml").read_text())["train"]["seed"] == kept


def test_a_live_run_is_left_alone_and_read(run: dict[str, Any], tmp_path: Path) -> None:
    """A dry run too is told; exports go on beside it."""
    live = RunWriter(Path(run["output"]))
    live.lock()
    for how in ({"overwrite": True}, {"resume": "auto", "dry_run": True}):
        with pytest.raises(
            UserError, match=r"output '.*run' is being written by process \d+ on .+; wait for it to end"
        ):
            train(RunConfig.model_validate(run), **how)
    assert export(run["output"], "delta", tmp_path / "out").step == 2
    live.close()


def test_a_lock_that_a_kill_left_does_not_hold(run: dict[str, Any]) -> None:
    (Path(run["output"]) / ".lock").write_text('{"process": 1, "host": "here"}')
    train(RunConfig.model_validate(run), resume="auto")
    assert not (Path(run["output"]) / ".lock").exists()
