"""What benchmarks share: the versions, machine and commit that each writes, its table, and models of a few layers."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from moetune.config.schema import RunConfig
from moetune.models.catalog import find_model

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- table, from JSON -->\n", "<!-- end of table -->\n"
"""Between these a page has its table."""
LORA_16 = {"lora": {"rank": 16, "alpha": 32, "targets": ["attention", "experts"]}}


def versions(*packages: str) -> dict[str, str]:
    """Of Python, and of these packages."""
    return {"python": platform.python_version()} | {name: _version(name) for name in packages}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # moetune, where it is on the path only
        return "not installed"


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def commit() -> str | None:
    """The commit that was measured; `+` follows it where moetune's sources differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--", "moetune") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def write_json(report: dict[str, Any], file: Path) -> None:
    file.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def rows_of(file: Path | None, *key: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The cases that a JSON file has, by the values of these keys; none where there is no file."""
    if file is None or not file.exists():
        return {}
    return {tuple(row[name] for name in key): row for row in json.loads(file.read_text(encoding="utf-8"))["cases"]}


def write_table(lines: Iterable[str], page: Path) -> None:
    """Writes a page's table anew, where there is that page."""
    if not page.exists():
        return
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{page} has no place for a table: {BEGIN}{END}")
    page.write_text("\n".join([before + begin, *lines, "", end + after]), encoding="utf-8")


def spread(values: Iterable[float], form: str = "{:,.0f}") -> str:
    """The least, the median and the most, as "3, 5, 9"."""
    numbers = sorted(values)
    return ", ".join(form.format(number) for number in (numbers[0], median(numbers), numbers[-1]))


def config_of(model: str, layers: int | None = None) -> dict[str, Any]:
    """Return the configuration of a catalog model, of so many of its layers."""
    entry = find_model(model)
    assert entry is not None
    config = entry.config | ({} if layers is None else {"num_hidden_layers": layers})
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:layers]
    return config


def lora_run(folder: Path, model: str, layers: int | None, train: dict[str, Any], **sections: Any) -> RunConfig:
    """Write a catalog model of so many layers into a folder, and return its run file: LoRA on NF4 with random weights,
    8-bit AdamW, in bfloat16; `sections` replace others."""
    (folder / "config.json").write_text(json.dumps(config_of(model, layers)), encoding="utf-8")
    run = {"model": {"path": str(folder), "weights": "random", "dtype": "bf16"}, "adapt": LORA_16}
    return RunConfig.model_validate({**run, "optimizer": {"name": "adamw8bit"}, "train": train, **sections})
