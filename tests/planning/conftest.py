"""Cards of several sizes are asked about the same runs here, whose traces do not depend on the size."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

from moetune.memory import predict
from moetune.memory.assumed_routing import AssumedRouting
from moetune.memory.trace import Trace, trace
from moetune.models.catalog.gpus import Gpu
from moetune.run.resolve import ResolvedRun

SIZE = ("name", "full_name", "memory", "context")
"""Fields of a card that depend on its size; the context is outside of what is traced."""


@pytest.fixture(scope="module", autouse=True)
def traced_once_for_all_sizes() -> Iterator[None]:
    """In this module each run is traced once, for cards that differ in nothing but their size."""
    traces: dict[str, Trace] = {}

    def traced(run: ResolvedRun, routing: AssumedRouting, *, gpu: Gpu, **how: Any) -> Trace:
        card = {name: value for name, value in asdict(gpu).items() if name not in SIZE}
        config = run.config.model_dump(mode="json", exclude={"output": True, "hardware": {"gpu", "gpus"}})
        asked = json.dumps([config, run.model.source.config.to_dict(), asdict(routing), card, how], default=str)
        if asked not in traces:
            traces[asked] = trace(run, routing, gpu=gpu, **how)
        return traces[asked]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predict, "trace", traced)
        patch.setitem(predict.predict_memory.__kwdefaults__, "tracing", traced)
        yield
