"""A run's configuration from a model's name and options, as `moetune predict MODEL --lora 16`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from moetune.config.load import load_run_config, read_run_config
from moetune.config.schema import RunConfig
from moetune.errors import UserError


def config_of(
    run: str,
    overrides: Sequence[str],
    *,
    router: str | None = None,
    experts: str | None = None,
    lora: int | None = None,
    gpu: str | None = None,
) -> tuple[RunConfig, dict[str, Any] | None]:
    """Read a run file, or build its content from a model and options.

    Returns the configuration, and the mapping of keys and values that it was built from; None if it was read.

    Args:
        run: a path to a run file (.yaml, .yml), or a model: a catalog name, a folder or a hub id.
        overrides: `KEY=VALUE` settings from `--set`.
        router: layers whose routers train, such as `all` or `0-5`.
        experts: LAYERS:EXPERTS that train, such as `0-5:0,1`.
        lora: the rank of LoRA; its alpha is twice the rank.
        gpu: the value of `hardware.gpu`.

    Raises:
        UserError: the file cannot be read or does not validate; `router`, `experts` or `lora` is given beside a run
            file, or none of them is given beside a model; or `experts` is not of the form LAYERS:EXPERTS.
    """
    trained = {"router": router, "experts": experts, "lora": lora}
    given = [name for name, value in trained.items() if value is not None]
    if Path(run).suffix in (".yaml", ".yml") or (Path(run).is_file() and not given):
        if given:
            raise UserError(f"{run!r} is a run file, which says what trains; leave --{', --'.join(given)} out")
        return load_run_config(run, overrides), None
    if not given:
        options = "--lora RANK, --router LAYERS or --experts LAYERS:EXPERTS"
        raise UserError(f"{run!r} is a model, not a run file, so give what to train: {options}")
    adapt: dict[str, Any] = {} if router is None else {"router": router}
    if experts is not None:
        layers, _, ids = experts.partition(":")
        if not (layers and ids):
            raise UserError(f"--experts {experts!r}: write it as LAYERS:EXPERTS, for example 0-5:0,1 or all:0")
        adapt["experts"] = {"layers": layers, "ids": ids}
    if lora is not None:
        adapt["lora"] = {"rank": lora, "alpha": 2 * lora}
    raw = {"model": {"path": run}, "adapt": adapt, **({} if gpu is None else {"hardware": {"gpu": gpu}})}
    return read_run_config(raw, overrides, f"the run file that {run} and its options stand for"), raw


def as_yaml(raw: dict[str, Any]) -> str:
    """Format the content of a run file as YAML, with short sections on one line each."""
    return yaml.safe_dump(raw, sort_keys=False, default_flow_style=None, allow_unicode=True, width=120)
