"""A run folder has one writer at a time; whoever comes second is told, and readers go on beside it."""

from pathlib import Path

import pytest

from moetune.errors import UserError
from moetune.exporting.export import export
from moetune.training.folder.run_writer import RunWriter
from tests import small
from tests.resolved import train


def test_a_live_run_is_left_alone_and_read(configure: small.Configure, tmp_path: Path) -> None:
    """A dry run too is told; exports go on beside it; a lock that a kill left does not hold."""
    output = tmp_path / "run"
    train(configure(output=output, train={"steps": 2, "save_every": 1}))
    longer = configure(output=output, train={"steps": 3, "save_every": 1})
    live = RunWriter(output)
    live.lock()
    for how in ({"overwrite": True}, {"resume": "auto", "dry_run": True}):
        with pytest.raises(UserError, match=r"run' is being written by process \d+ on .+; wait for it to end"):
            train(longer, **how)
    assert export(output, "delta", tmp_path / "out").step == 2
    live.close()
    (output / ".lock").write_text('{"process": 1, "host": "here"}')
    train(longer, resume="auto")
    assert not (output / ".lock").exists()
