"""What `doctor --measure` calls asks the device for as many launches as its work counts. Its times say nothing here."""

from __future__ import annotations

import pytest
import torch

from moetune.errors import UserError
from moetune.memory.measurement.measure import catalog_name
from moetune.memory.time.bench import calls, measured
from moetune.memory.time.speeds import KINDS
from moetune.models.catalog.gpus import find_gpu
from moetune.planning import doctor
from tests.nullcuda import device


def test_launches_are_as_counted_and_every_speed_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    card, there = find_gpu(catalog_name(torch.device("cuda", 0))), torch.device("cuda", 0)
    for one in calls(card, there):
        if one.kind in ("link", "synchronization"):
            continue
        one.run()  # kernels are compiled
        before = device.asked().launches
        one.run()
        assert device.asked().launches - before == pytest.approx(one.work.launches, rel=0.1), one.what
    points = measured(card, there)
    assert {one.kind for one in points} == set(KINDS)
    assert all(one.seconds > 0 for one in points)
    monkeypatch.setattr(doctor, "measured", lambda *_: points)
    with pytest.raises(UserError, match="by the clock of"):  # which stands still
        list(doctor.measure_card())
