"""Format and reader of `scores.json`, a model's routing statistics on data sets.

Shapes, for one layer: E experts, K experts per token, T tokens.
"""

import json
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from moetune.errors import UserError
from moetune.files import expanded
from moetune.json_files import Amount, read_json
from moetune.models.structure import ModelStructure

SCHEMA: Literal[1] = 1
SCOPES = ("loss", "all")
"""Sets of tokens with statistics of their own: `loss`, whose next token counts in the loss; `all`, all but padding."""


class Statistics(BaseModel):
    """Routing statistics of one layer over one scope of tokens; all lists but `unused` have E entries, one per expert.

    Attributes:
        count: number of tokens, T.
        tokens: number of tokens routed to the expert.
        share: `tokens` over their sum, so shares sum to 1.
        interval: lower and upper end of the 95 % confidence interval of `share`, by bootstrap over documents.
        weight_sum: sum of the expert's routing weights over its tokens.
        weight_mean: mean of the expert's routing weights over its tokens.
        probability: mean over all T tokens of the softmax of the router's logits; None if the router does not return
            logits.
        entropy: mean entropy of that softmax, in nats; None if the router does not return logits.
        reap: mean over the expert's tokens of routing weight × ‖expert output‖₂ (REAP, arXiv 2510.13999).
        pairs: entry e lists the number of tokens routed to both e and e + 1, to both e and e + 2, ….
        unused: ids of experts that received no token.
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
    """Statistics of one layer: `loss`, over tokens whose next token counts in the loss; `all`, over all but padding."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_experts: int = Field(gt=0)
    top_k: int = Field(gt=0)
    loss: Statistics
    all: Statistics

    @model_validator(mode="after")
    def _check_lengths(self) -> "LayerScores":
        """Raise `ValueError` if a list does not have one entry for each expert."""
        for of_scope in (self.loss, self.all):
            for name in ("tokens", "share", "weight_sum", "reap"):
                if len(getattr(of_scope, name)) != self.num_experts:
                    raise ValueError(f"{name} has not a value for each of {self.num_experts} experts")
        return self


class Scored(BaseModel):
    """One of the data sets that scores were recorded on.

    Attributes:
        digest: SHA-256 of the token ids, labels and positions of the data set's rows.
        tokens: number of tokens, without padding.
        loss_tokens: number of those whose next token counts in the training loss.
        layers: layer index -> statistics of this data set alone; None if it is the only one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    digest: str
    rows: Amount
    tokens: Amount
    loss_tokens: Amount
    layers: dict[int, LayerScores] | None = None


class Scores(BaseModel):
    """Contents of a `scores.json` file.

    Attributes:
        model: name of the model that was scored.
        base: digest of the weights that were scored (`Fingerprint.content`); None for random weights.
        run: the settings of the run file that scores depend on: the model, and how rows are made of the data.
        data: the data sets.
        tokens: number of tokens in all data sets, without padding.
        loss_tokens: number of those whose next token counts in the training loss.
        expert_load: layer index -> tokens per expert, as `predict --routing` and `parallel.load` read it.
        layers: layer index -> statistics over all data sets.
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
        """Return the scores as JSON text, each list of numbers on one line."""
        text = json.dumps(self.model_dump(mode="json", by_alias=True), indent=1)
        return re.sub(r"\[\n[^][{}\"]*\]", lambda numbers: " ".join(numbers[0].split()), text) + "\n"


def read_scores(file: str | Path, where: str) -> Scores:
    """Read a `scores.json` file; `UserError` if it holds no scores. `where` is the key or option, for messages."""
    return read_json(expanded(file), Scores, f"{where}: {str(file)!r}", "give what moetune score writes")


def read_intervals(file: Path) -> dict[int, LayerScores]:
    """Return layer index -> scores, with confidence intervals, from a `scores.json` file; empty for any other file,
    such as a `memory.json`."""
    try:
        return read_scores(file, "scores").layers
    except UserError:
        return {}


def scores_of_model(file: str, structure: ModelStructure, where: str) -> Scores:
    """Read a `scores.json` file as `read_scores` does; `UserError` also unless it has the same expert layers, with as
    many experts each, as the model."""
    scores = read_scores(file, where)
    counts = {index: layer.num_experts for index, layer in scores.layers.items()}
    expected = {layer.index: layer.shape.num_experts for layer in structure.moe_layers}
    for index in sorted(counts.keys() | expected.keys()):
        if counts.get(index) != expected.get(index):
            raise UserError(
                f"{where}: the scores are of another model ({scores.model}): layer {index} has "
                f"{counts.get(index, 'no')} experts there and {expected.get(index, 'none')} here"
            )
    return scores
