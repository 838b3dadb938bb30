"""Public API of moetune: fine-tune a mixture-of-experts model, and predict its memory beforehand.

    import moetune

    print(moetune.predict("run.yaml").fits)
    moetune.train("run.yaml")

Functions that work on a run accept the path of a run file, a `RunConfig` (its validated values), or a `ResolvedRun` (a
run file resolved on its model). The names in `__all__` are imported when they are first used, so `import moetune`
itself loads no torch.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moetune.adapt.build import Adapted, build
    from moetune.adapt.count import Count, count
    from moetune.adapt.weights.quantize import quantize
    from moetune.adapt.weights.quantizer import MoetuneConfig
    from moetune.config.load import load_run_config
    from moetune.config.resolved import ResolvedConfig
    from moetune.config.schema.run import RunConfig
    from moetune.errors import DoesNotFit, UserError
    from moetune.exporting.apply import apply_delta
    from moetune.exporting.export import ExportResult, export
    from moetune.inference.completions import Completions, complete
    from moetune.inference.evaluate import Evaluation, evaluate
    from moetune.inference.generate import generate
    from moetune.inference.opened import Opened, open_model
    from moetune.inference.rollouts import vllm_rollouts
    from moetune.memory.report import MemoryReport
    from moetune.planning.plan import Plan, plan
    from moetune.planning.predict import predict
    from moetune.planning.predictor import Predictor
    from moetune.planning.solve import Solved, solve
    from moetune.planning.verify import Outcome, verify
    from moetune.routing.drift import drift
    from moetune.routing.score import score
    from moetune.routing.select import within_budget
    from moetune.run.folder_files import Drift
    from moetune.run.resolve import ResolvedModel, ResolvedRun, resolve
    from moetune.run.scores import Scores
    from moetune.training.run import TrainResult
    from moetune.training.trl import trl_arguments, trl_model, trl_tokenizer
    from moetune.watch.train import train

__version__ = "0.1.0"
__all__ = [
    "Adapted", "Completions", "Count", "DoesNotFit", "Drift", "Evaluation", "ExportResult", "MemoryReport",
    "MoetuneConfig", "Opened", "Outcome", "Plan", "Predictor", "ResolvedConfig", "ResolvedModel", "ResolvedRun",
    "RunConfig", "Scores", "Solved", "TrainResult", "UserError", "apply_delta", "build", "complete", "count", "drift",
    "evaluate", "export", "generate", "load_run_config", "open_model", "plan", "predict", "quantize", "resolve",
    "score", "solve", "train", "trl_arguments", "trl_model", "trl_tokenizer", "verify", "vllm_rollouts",
    "within_budget",
]  # fmt: skip

_HOMES = {
    alias.name: str(node.module)
    for node in ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8")))
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
    if alias.name in __all__
}
"""Public name -> the module that defines it, from the imports above, which only type checkers run."""


def __getattr__(name: str) -> object:
    """Import a public name when it is first used (PEP 562), and keep it in the module.

    Raises:
        AttributeError: `name` is not in `__all__`.
    """
    if name not in _HOMES:
        raise AttributeError(f"module 'moetune' has no attribute {name!r}")
    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
