"""A run file from a model and a few options: what `predict MODEL --lora 16` stands for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from moetune.config.load import load_run_config, read_run_config
from moetune.config.schema import RunConfig
from moetune.errors import UserError


def config_of(run: str, overrides: Sequence[str], **options: Any) -> tuple[RunConfig, dict[str, Any] | None]:
    """A run file read; or of a model, the one that the options stand for, and its mapping.

    Raises:
        UserError: the file cannot be read or does not validate; options beside a run file, or none beside a model.
    """
    trained = {name: value for name, value in options.items() if name != "gpu" and value is not None}
    if Path(run).suffix in (".yaml", ".yml") or (Path(run).is_file() and not trained):
        if trained:
            raise UserError(f"{run!r} is a run file, which says what trains; leave --{', --'.join(trained)} out")
        return load_run_config(run, overrides), None
    raw = run_of_options(run, **options)
    config = read_run_config(raw, overrides, f"the run file that {run} and its options stand for")
    return config, raw


def run_of_options(
    model: str,
    *,
    router: str | None = None,
    experts: str | None = None,
    lora: int | None = None,
    gpu: str | None = None,
) -> dict[str, Any]:
    """The run file as a mapping.

    Args:
        router: layers, as `adapt.router` has them.
        experts: layers and experts of each, as in `0-5:0,1`.
        lora: rank of factors on attention and experts; alpha is twice that.

    Raises:
        UserError: nothing would train, or `experts` is written otherwise.
    """
    adapt: dict[str, Any] = {}
    if router is not None:
        adapt["router"] = router
    if experts is not None:
        layers, colon, ids = experts.partition(":")
        if not (layers and colon and ids):
            raise UserError(f"--experts {experts!r}: write it as LAYERS:EXPERTS, for example 0-5:0,1 or all:0")
        adapt["experts"] = {"layers": layers, "ids": ids}
    if lora is not None:
        adapt["lora"] = {"rank": lora, "alpha": 2 * lora}
    if not adapt:
        raise UserError(
            f"{model!r} is no run file, and for a model it must be said what trains: give --lora RANK, --router LAYERS "
            "or --experts LAYERS:EXPERTS"
        )
    raw: dict[str, Any] = {"model": {"path": model}, "adapt": adapt}
    if gpu is not None:
        raw["hardware"] = {"gpu": gpu}
    return raw


def as_yaml(raw: dict[str, Any]) -> str:
    """A run file as it is written by hand: a section a line where it is short."""
    return yaml.safe_dump(raw, sort_keys=False, default_flow_style=None, allow_unicode=True, width=120)
