"""`records` and `notes` of a data set, as commands read it, and what is said when it cannot be read."""

import json
from pathlib import Path

import pytest

from moetune.errors import UserError
from moetune.training.data.sources import open_sources


def records(spec, held_out=False):
    return read(spec, held_out)[0]


def notes(spec, held_out=False):
    return read(spec, held_out)[1]


def read(spec, held_out=False):
    said = []
    rows = [row for source in open_sources(str(spec), held_out=held_out, note=said.append) for row in source.rows]
    assert all(row.problem is None for row in rows)
    return [row.value for row in rows], said


def message(spec, held_out=False):
    with pytest.raises(UserError) as caught:
        read(spec, held_out)
    return str(caught.value)


def write_lines(file: Path, *values: object) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(value) + "\n" for value in values))
    return file
