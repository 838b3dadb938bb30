"""`model:` of a run file, and the formats in which frozen weights are stored."""

from typing import Any, Literal

from pydantic import ValidationError

from moetune.config.fields import FilePath
from moetune.config.schema.section import Section
from moetune.errors import UserError

Int4Name = Literal[
    "int4-g32", "int4-g64", "int4-g128", "int4-row", "int4-g32-order", "int4-g64-order", "int4-g128-order"
]
QuantizedDtype = Literal["nf4", "int8", "fp8", "fp8-row", "fp8-tensor", "mxfp8", "nvfp4", "mxfp4", Int4Name]
Storage = Literal[QuantizedDtype, "bf16", "fp32"]


class ModelConfig(Section):
    """The model, and how its frozen weights are stored (`model:`).

    Attributes:
        path: a catalog name, a local folder in hub format, or a hub id.
        weights: read the published weights, or draw random ones.
        base: precision in which frozen weights are stored; `auto` keeps the format of checkpoints in NF4, MXFP4,
            NVFP4, FP8 or INT4 and of quantized bases, and is nf4 for all others.
        double_quant: with nf4, store the scales in 8 bits.
        dtype: dtype of compute and of trained weights; `auto` is bf16 on a GPU and fp32 on a CPU.
        attention: the attention implementation, by transformers' name; `auto` is sdpa if it computes the model's
            attention, else eager.
        experts_on: where quantized experts are kept: in GPU memory, or in pinned host memory.
    """

    path: FilePath
    weights: Literal["pretrained", "random"] = "pretrained"
    base: Literal["auto", Storage] = "auto"
    double_quant: bool = True
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    experts_on: Literal["gpu", "host"] = "gpu"

    @classmethod
    def named(cls, path: str, **settings: Any) -> "ModelConfig":
        """Return the configuration of a model that an option or an adapter names, with `settings` as other keys.

        Raises:
            UserError: `path` cannot be the name of a model.
        """
        try:
            return cls.model_validate({"path": path, **settings})
        except ValidationError as error:
            raise UserError(f"model {path!r}: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None
