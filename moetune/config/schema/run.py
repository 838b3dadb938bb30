"""`RunConfig`: a whole run file, and checks between sections."""

import yaml
from pydantic import Field, ValidationInfo, field_validator, model_validator

from moetune.config.fields import FilePath
from moetune.config.schema.adapt import AdaptConfig
from moetune.config.schema.data import DataConfig
from moetune.config.schema.model import ModelConfig
from moetune.config.schema.optimizer import PARTS, OneOrByPart, OptimizerConfig, Part
from moetune.config.schema.parallel import HardwareConfig, ParallelConfig
from moetune.config.schema.section import Section
from moetune.config.schema.train import TrainConfig
from moetune.errors import counted


class RunConfig(Section):
    """A run file as written, validated: values may be `auto`, and experts may be chosen by scores.

    `ResolvedConfig` (config/resolved.py) is the run file with the values that depend on the model filled in.

    Attributes:
        optimizer: one optimizer for all parts, or one for each part.
        data: required for training; None for a run that is only predicted.
        output: the run folder, relative to the working directory; required for training.
    """

    model: ModelConfig
    adapt: AdaptConfig
    optimizer: OneOrByPart = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    data: DataConfig | None = None
    parallel: ParallelConfig = ParallelConfig()
    hardware: HardwareConfig = Field(default=HardwareConfig(), validate_default=True)
    output: FilePath | None = None

    @field_validator("hardware")
    @classmethod
    def _a_card_per_rank(cls, hardware: HardwareConfig, info: ValidationInfo) -> HardwareConfig:
        """Set `hardware.count` to the number of ranks if it is not given."""
        given = hardware.model_fields_set
        if "count" in given or "parallel" not in info.data:
            return hardware
        return hardware.model_copy(update={"count": info.data["parallel"].ranks})

    @property
    def packs(self) -> bool:
        """Whether a sequence may hold several documents; True for a run file without data."""
        return self.data is None or self.data.packing

    @property
    def optimizers(self) -> dict[Part, OptimizerConfig]:
        """Part -> its optimizer; parts without an optimizer are left out.

        LoRA factors in bf16 are rounded stochastically unless they have float32 copies: an update is a fraction of `lr`
        and most are below half a step of bf16.
        """
        if isinstance(self.optimizer, OptimizerConfig):
            by_part = dict.fromkeys(PARTS, self.optimizer)
        else:
            by_part = {part: given for part in PARTS if (given := getattr(self.optimizer, part)) is not None}
        factors = by_part.get("lora")
        in_bf16 = self.adapt.lora is not None and self.adapt.lora.dtype == "bf16"
        if factors is not None and in_bf16 and factors.master_weights == "none" and not factors.offload:
            by_part["lora"] = factors.but(master_weights="stochastic")
        return by_part

    @model_validator(mode="after")
    def _fused_steps_are_single(self) -> "RunConfig":
        """Raise `ValueError` for `fused_backward` with more than one micro-step per update."""
        fused = {optimizer.name: None for optimizer in self.optimizers.values() if optimizer.fused_backward}
        if self.train.accumulate > 1 and fused:
            raise ValueError(
                f"{', '.join(fused)} with optimizer.fused_backward frees each gradient as soon as it is used, so those "
                "of several micro-steps cannot be summed; set train.accumulate: 1"
            )
        return self

    @model_validator(mode="after")
    def _stops_by_held_out_loss(self) -> "RunConfig":
        """Raise `ValueError` for early stopping without held-out data."""
        if self.train.early_stopping is not None and self.data is not None and not self.data.evaluates:
            raise ValueError("train.early_stopping needs held-out data; set data.eval, or data.validation: 0.05")
        return self

    @model_validator(mode="after")
    def _as_many_gpus_as_ranks(self) -> "RunConfig":
        """Raise `ValueError` if `hardware.count` is not the number of ranks."""
        if self.parallel.ranks != self.hardware.count:
            ranks, count = self.parallel.ranks, self.hardware.count
            raise ValueError(f"parallel: asks for {counted(ranks, 'rank')}, not {count}; set hardware.count: {ranks}")
        return self

    def to_yaml(self) -> str:
        """Return the configuration as YAML with every default written out; reading it gives an equal `RunConfig`."""
        one_length = {"train": {"steps"}} if self.train.epochs is not None else None
        return yaml.safe_dump(self.model_dump(mode="json", exclude=one_length), sort_keys=False, allow_unicode=True)
