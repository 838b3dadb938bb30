"""moetune: fine-tune a mixture-of-experts model on one GPU, and know before starting that it fits.

    import moetune

    run = moetune.resolve(moetune.load_run_config("run.yaml"))
    print(moetune.predict(run).fits)

What is here is loaded when it is asked for: importing moetune costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moetune.adapt.build import build
    from moetune.adapt.count import count
    from moetune.adapt.weights.quantizer import MoetuneConfig
    from moetune.config.load import load_run_config
    from moetune.config.schema import RunConfig
    from moetune.errors import UserError
    from moetune.exporting.apply import apply_delta
    from moetune.exporting.export import export
    from moetune.memory.predict import predict
    from moetune.memory.report import MemoryReport
    from moetune.memory.verify import verify
    from moetune.routing.drift import drift
    from moetune.routing.score import score
    from moetune.routing.select import within_budget
    from moetune.run.resolve import resolve
    from moetune.watch.train import train

__version__ = "0.1.0"
__all__ = [
    "MemoryReport",
    "MoetuneConfig",
    "RunConfig",
    "UserError",
    "apply_delta",
    "build",
    "count",
    "drift",
    "export",
    "load_run_config",
    "predict",
    "resolve",
    "score",
    "train",
    "verify",
    "within_budget",
]

_HOMES = {
    "MemoryReport": "memory.report",
    "MoetuneConfig": "adapt.weights.quantizer",
    "RunConfig": "config.schema",
    "UserError": "errors",
    "apply_delta": "exporting.apply",
    "build": "adapt.build",
    "count": "adapt.count",
    "drift": "routing.drift",
    "export": "exporting.export",
    "load_run_config": "config.load",
    "predict": "memory.predict",
    "resolve": "run.resolve",
    "score": "routing.score",
    "train": "watch.train",
    "verify": "memory.verify",
    "within_budget": "routing.select",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'moetune' has no attribute {name!r}")
    value: object = getattr(import_module(f"moetune.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
