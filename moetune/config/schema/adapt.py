"""`adapt:` of a run file: routers, experts, LoRA, other parameters; choices by scores."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from moetune.config.fields import Budget, ExpertIds, FilePath, Ids, NonNegative, Positive, Text
from moetune.config.lora_rank import LoraRank, is_by_target
from moetune.config.schema.section import Section
from moetune.errors import suggest

Rule = Literal["tokens", "gate", "reap", "foreground", "random", "least"]
SIZES = ("p", "k", "experts", "parameters", "budget")
"""Keys of `ChoiceConfig` that set the number of chosen experts; exactly one of them is given."""


class ChoiceConfig(Section):
    """A choice of experts by recorded scores, made separately in each layer (docs/concepts/choosing-experts.md).

    Exactly one of `p`, `k`, `experts`, `parameters` and `budget` is given. With all but `p`, every layer gets equally
    many experts (with a fractional budget, the same fraction).

    Attributes:
        from_: path of a `scores.json` file (the key `from`).
        rule: what experts are ranked by, best first: most `tokens` routed to the expert, largest sum of routing weights
            (`gate`), largest `reap` score (arXiv 2510.13999), or largest difference of token shares to `background`
            (`foreground`); as baselines, `random` order, or fewest tokens (`least`).
        p: take the shortest prefix of the ranking whose share of the routing reaches `p`.
        k: number of experts in each layer.
        experts: upper bound of the number of experts in all layers together.
        parameters: upper bound of the number of trained parameters in all layers together.
        budget: a fraction of each layer's experts, or the memory that the run may use, such as `44GiB`.
        background: path of a second `scores.json`, for the rule `foreground`; None for all others.
        layers: layers to choose in.
        seed: seed of the rule `random`.
    """

    from_: FilePath = Field(alias="from")
    rule: Rule = "tokens"
    p: Annotated[float, Field(gt=0, le=1)] | None = None
    k: Positive | None = None
    experts: Positive | None = None
    parameters: Positive | None = None
    budget: Budget | None = None
    background: FilePath | None = None
    layers: Ids = "all"
    seed: NonNegative = 0

    @model_validator(mode="after")
    def _one_size(self) -> "ChoiceConfig":
        """Raise `ValueError` unless exactly one size is set, `p` only with the rules `tokens` and `gate`, and
        `background` with `foreground` and no other rule."""
        given = [name for name in SIZES if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"says how many experts {'by ' + ' and '.join(given) if given else 'in no way'}; set one of "
                f"{', '.join(SIZES)}"
            )
        if self.p is not None and self.rule not in ("tokens", "gate"):
            raise ValueError(f"p: is a share of tokens or of gate weight, and {self.rule} ranks by another; set k")
        if (self.background is not None) != (self.rule == "foreground"):
            raise ValueError("rule: foreground compares with background: FILE, and no other rule does")
        return self


def _ids_or_choice(raw: Any) -> str:
    """Return the tag of the alternative of a union that `raw` is: "ids or layers", or "a choice" by scores."""
    chosen = isinstance(raw, ChoiceConfig) or (isinstance(raw, dict) and "from" in raw)
    return "a choice" if chosen else "ids or layers"


class ExpertsConfig(Section):
    """Experts that train in full precision (`adapt.experts`).

    Attributes:
        layers: layers whose experts train; must be `all` if `ids` is a mapping.
        ids: expert ids, the same in each of `layers`; or a mapping layer index -> expert ids.
    """

    layers: Ids = "all"
    ids: ExpertIds = "all"

    @model_validator(mode="after")
    def _layers_once(self) -> "ExpertsConfig":
        """Raise `ValueError` if `ids` already names layers and `layers` is set too."""
        if isinstance(self.ids, dict) and self.layers != "all":
            raise ValueError("ids: names the layers already; leave layers out")
        return self


ExpertsOrChoice = Annotated[
    Annotated[ExpertsConfig, Tag("ids or layers")] | Annotated[ChoiceConfig, Tag("a choice")],
    Discriminator(_ids_or_choice),
]
IdsOrChoice = Annotated[
    Annotated[ExpertIds, Tag("ids or layers")] | Annotated[ChoiceConfig, Tag("a choice")], Discriminator(_ids_or_choice)
]


class LoraConfig(Section):
    """Low-rank factors A and B on frozen linear layers and experts (`adapt.lora`): W + scale · B · A.

    Attributes:
        rank: rows of A and columns of B: one number, or one for each target, for layers, or for layers of a target.
        alpha: the scale is alpha / rank.
        rslora: the scale is alpha / √rank instead (arXiv 2312.03732).
        dropout: dropout probability on the input of linear layers; must be 0 for experts.
        lr_ratio: learning rate of B over that of A (LoRA+, arXiv 2402.12354).
        targets: components (`attention`, `experts`, …), module names (`q_proj`) or patterns of module paths.
        layers: layers that get factors.
        ids: experts that get factors, if `targets` includes `experts`.
        gate_up: `fused` shares one A between an expert's gate and up projections; `split` gives each its own.
        share: `outer` gives all experts of a layer one A of gate_up and one B of down, as SGLang serves them.
        dtype: in what factors and their gradients are stored. Updates of bf16 are rounded stochastically.
    """

    rank: LoraRank
    alpha: Annotated[float, Field(ge=1e-6, le=1e6)]
    rslora: bool = False
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    lr_ratio: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0
    targets: tuple[Text, ...] = Field(default=("attention", "experts"), min_length=1)
    layers: Ids = "all"
    ids: IdsOrChoice = "all"
    gate_up: Literal["fused", "split"] = "fused"
    share: Literal["none", "outer"] = "none"
    dtype: Literal["fp32", "bf16"] = "fp32"

    @model_validator(mode="after")
    def _a_rank_for_each_target(self) -> "LoraConfig":
        """Raise `ValueError` if `rank` names targets, but lacks one of `targets`, or has one that is not among them."""
        if isinstance(self.rank, dict) and is_by_target(self.rank):
            for key in self.rank:
                if key not in self.targets:
                    raise ValueError(f"rank: {key!r} is not in targets.{suggest(key, self.targets)}")
            for target in self.targets:
                if target not in self.rank:
                    raise ValueError(f"rank: has no rank for {target!r}, which is in targets; add {target}: 8")
        return self

    def plain_alpha(self, rank: int) -> float:
        """Return the alpha that gives factors of this rank the same scale without `rslora`."""
        return self.alpha * rank**0.5 if self.rslora else self.alpha

    def scale(self, rank: int) -> float:
        """Return the factor of B · A in the weight, alpha / rank, or alpha / √rank with `rslora`."""
        return self.plain_alpha(rank) / rank


class AdaptConfig(Section):
    """Which parts of the model train, and how (`adapt:`).

    Attributes:
        router: layers whose router trains.
        experts: experts that train in full precision; None for no experts.
        lora: settings of LoRA; None for no LoRA.
        also: further components, or patterns of parameter names, that train in full precision.
        start_from: a folder with a PEFT adapter or a delta (hub/delta_folder.py) to initialize training from.
    """

    router: Ids = "none"
    experts: ExpertsOrChoice | None = None
    lora: LoraConfig | None = None
    also: tuple[Text, ...] = ()
    start_from: FilePath | None = None

    @property
    def has_memory_budget(self) -> bool:
        """Whether a choice of experts has a budget in bytes, so its size depends on predictions (routing/select.py)."""
        of_lora = None if self.lora is None else self.lora.ids
        return any(isinstance(ids, ChoiceConfig) and isinstance(ids.budget, str) for ids in (self.experts, of_lora))
