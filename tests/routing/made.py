"""Scores that are written down, for tests of what is done with them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moetune.run.scores import Scores


def write_scores(
    file: Path, tokens: Mapping[int, Sequence[int]], model: str = "tiny-mixtral", **more: Mapping[int, Sequence[float]]
) -> Path:
    """A scores.json with these tokens by layer; `weight_sum` and `reap` are the tokens unless they are given."""

    def layer(index: int) -> dict[str, Any]:
        of_layer = list(tokens[index])
        count, total = len(of_layer), sum(of_layer)
        statistics = {
            "count": total // 2,
            "tokens": of_layer,
            "share": [value / total for value in of_layer],
            "interval": [(0.0, 1.0)] * count,
            "weight_sum": list(more.get("weight_sum", tokens)[index]),
            "weight_mean": [0.5] * count,
            "probability": None,
            "entropy": None,
            "reap": list(more.get("reap", tokens)[index]),
            "pairs": [[0] * (count - 1 - row) for row in range(count - 1)],
            "unused": [],
        }
        return {"num_experts": count, "top_k": 2, "loss": statistics, "all": statistics}

    scores = Scores.model_validate(
        {
            "schema": 1,
            "model": model,
            "base": None,
            "run": {},
            "data": [],
            "tokens": 1,
            "loss_tokens": 1,
            "expert_load": {index: list(values) for index, values in tokens.items()},
            "layers": {index: layer(index) for index in tokens},
        }
    )
    file.write_text(scores.to_text(), encoding="utf-8")
    return file
