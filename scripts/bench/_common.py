"""What every benchmark writes beside its numbers: versions, the machine, the commit."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from transformers import MixtralConfig

ROOT = Path(__file__).parents[2]
MiB = 2**20
BEGIN, END = "<!-- table, from JSON -->\n", "<!-- end of table -->\n"
"""Between these a page has its table."""


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
    file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


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


def mixtral_config(sizes: Any, **more: Any) -> MixtralConfig:
    """A Mixtral of a benchmark's sizes."""
    return MixtralConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        num_local_experts=sizes.experts,
        max_position_embeddings=sizes.tokens,
        **more,
    )
