"""`scores.json`: statistics of a model's routing on data sets, as `moetune score` records them.

Shapes, of one layer: E experts, K of them per token, T tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from moetune.documents import Amount, read_json
from moetune.errors import UserError
from moetune.files import expanded
from moetune.models.structure import ModelStructure

SCHEMA: Literal[1] = 1
SCOPES = ("loss", "all")
"""Tokens that carry loss, whose next token trains; and all, without padding."""


class Statistics(BaseModel):
    """Statistics of one layer over the tokens of one scope; lists have a value per expert.

    Attributes:
        count: T.
        tokens: tokens that were routed to the expert.
        share: its part of the layer's routed tokens; shares sum to 1.
        interval: 95 % interval of the share, by bootstrap over documents.
        weight_sum, weight_mean: sum and mean of its gate weights over its tokens.
        probability: mean of the router's softmax over all T; null where the router does not return its logits.
        entropy: mean entropy of that softmax, in nats.
        reap: mean over its tokens of gate weight × ‖expert output‖₂ (REAP, arXiv 2510.13999).
        pairs: row e has the number of tokens with both e and e + 1, e + 2, …
        unused: experts without a token.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    count: Amount
    tokens: list[Amount]
    share: list[float]
    interval: list[tuple[float, float]]
    weight_sum: list[float]
    weight_mean: list[float]
    probability: list[float] | None
    entropy: float | None
    reap: list[float]
    pairs: list[list[Amount]]
    unused: list[int]


class LayerScores(BaseModel):
    """Statistics of one layer, in both scopes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_experts: int = Field(gt=0)
    top_k: int = Field(gt=0)
    loss: Statistics
    all: Statistics

    @model_validator(mode="after")
    def _a_value_an_expert(self) -> LayerScores:
        for of_scope in (self.loss, self.all):
            for name in ("tokens", "share", "weight_sum", "reap"):
                if len(getattr(of_scope, name)) != self.num_experts:
                    raise ValueError(f"{name} has not a value for each of {self.num_experts} experts")
        return self


class Scored(BaseModel):
    """One data set that was scored.

    Attributes:
        digest: SHA-256 of the ids, labels and positions of its rows.
        tokens, loss_tokens: without padding; those that carry loss.
        layers: its own statistics, if there are several data sets.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    digest: str
    rows: Amount
    tokens: Amount
    loss_tokens: Amount
    layers: dict[int, LayerScores] | None = None


class Scores(BaseModel):
    """The file.

    Attributes:
        base: digest of the checkpoint's files; null for random weights.
        run: the settings of the run file that the result depends on: the model, and how rows are made of data.
        expert_load: layer index -> tokens per expert, for `predict --routing` and `parallel.load`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_: Literal[1] = Field(default=SCHEMA, alias="schema")
    model: str
    base: str | None
    run: dict[str, Any]
    data: list[Scored]
    tokens: Amount
    loss_tokens: Amount
    expert_load: dict[int, list[Amount]]
    layers: dict[int, LayerScores]

    def to_text(self) -> str:
        """Return JSON with a line for each list."""
        return _lines(self.model_dump(mode="json", by_alias=True)) + "\n"


def read_scores(file: str | Path, where: str) -> Scores:
    """Read scores; raise `UserError`, with the key or option `where`, if the file holds something else."""
    return read_json(expanded(file), Scores, f"{where}: {str(file)!r}", "give what moetune score writes")


def refuse_other_model(scores: Scores, structure: ModelStructure, where: str) -> None:
    """Raise `UserError` unless the scores are of a model with these layers and experts."""
    found = {index: layer.num_experts for index, layer in scores.layers.items()}
    expected = {layer.index: layer.shape.num_experts for layer in structure.moe_layers}
    for index in sorted(found.keys() | expected.keys()):
        if found.get(index) != expected.get(index):
            raise UserError(
                f"{where}: the scores are of another model ({scores.model}): layer {index} has "
                f"{found.get(index, 'no')} experts there and {expected.get(index, 'none')} here"
            )


def refuse_other_base(scores: Scores, model: str, base: str | None, where: str) -> None:
    """Raise `UserError` unless the scores are of the checkpoint with the digest `base`, None for random weights."""
    if scores.base != base:
        there, here = (f"base {one[:12]}" if one else "random weights" for one in (scores.base, base))
        raise UserError(
            f"{where}: the scores are of {scores.model!r} ({there}), and model.path is {model!r} ({here}); record them "
            "anew with moetune score"
        )


def _lines(value: Any, indent: str = "") -> str:
    """Return JSON with objects over several lines and lists on one."""
    if not isinstance(value, Mapping) or not value:
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            return "[" + ", ".join(_lines(item, indent) for item in value) + "]"
        return json.dumps(value)
    inner = f"{indent} "
    items = ",\n".join(f"{inner}{json.dumps(str(key))}: {_lines(item, inner)}" for key, item in value.items())
    return f"{{\n{items}\n{indent}}}"
