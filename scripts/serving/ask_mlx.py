"""Asks mlx-lm for the next token's log-probabilities after every prefix, in merged exports.

python ask_mlx.py FOLDER OUT    # see cases.py; in an environment with `mlx[cpu]` and mlx-lm
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model


def log_probabilities(folder: Path, prompts: list[list[int]]) -> np.ndarray:
    """Return them as [prompts, tokens, vocabulary]."""
    model, _ = load_model(folder)
    logits = model(mx.array(prompts)).astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def main(folder: Path, out: Path) -> None:
    content = json.loads((folder / "cases.json").read_text())
    named = {case["name"]: Path(case["path"]) for case in content["cases"] if case["export"] in ("merged", "quantized")}
    named |= {f"{case['type']}-base": Path(case["base"]) for case in content["cases"]}
    for name, path in named.items():
        try:
            np.save(out / f"{name}.npy", log_probabilities(path, content["prompts"]))
        except Exception as error:
            (out / f"{name}.txt").write_text(f"{type(error).__name__}: {error}")
            print(f"{name}: {error}"[:300], file=sys.stderr)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
