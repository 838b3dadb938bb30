from typing import Any

import pytest

from moetune.memory.closed_form import form


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments of each recording."""
    made: list[Any] = []
    record = form.record
    monkeypatch.setattr(form, "record", lambda *arguments: made.append(arguments) or record(*arguments))
    return made
