"""The two files of an adapter's folder: read without pickles, refused unless they are plain LoRA, written.

`adapter_config.json` holds PEFT's settings, of which rank and alpha decide the scale; `adapter_model.safetensors` the
tensors and, if moetune wrote it, a record. Every program of docs/reference/adapters.md writes both files.
"""

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from re import Pattern
from typing import Annotated, Any, TypeVar

import peft
from peft import LoraConfig
from peft.utils.other import get_pattern_key
from pydantic import AfterValidator, BaseModel, Field, FiniteFloat, StrictBool, ValidationError
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from typing_extensions import TypedDict

from moetune.errors import UserError, first_of, note_once, reading, shown
from moetune.json_files import first_problem, parse_json, read_json
from moetune.tensor_files import DTYPES, Stored, create_file, read_header, refuse_not_finite

WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
"""Beside an adapter, if it was trained with another template than its base has."""
PREFIX = "base_model.model."
"""PEFT's prefix of every tensor's name."""
_RECORD = "moetune"
"""Key of the safetensors metadata under which an adapter that moetune wrote carries its layout and sketch."""
_NOT_PLAIN = (
    "use_dora", "lora_bias", "layer_replication", "trainable_token_indices", "alora_invocation_tokens",
    "fan_in_fan_out", "use_qalora", "use_bdlora", "kasa_config", "velora_config", "monteclora_config", "arrow_config",
    "megatron_config",
)  # fmt: skip
"""Settings of a PEFT adapter with which its layers compute something else than W·x + s·B·(A·x)."""
_SETTINGS = {setting.name for setting in dataclasses.fields(LoraConfig)}
"""All settings of the PEFT that is installed. Its variants have been called `use_…` or `…_config`."""
_FLOATS = ("F32", "BF16", "F16", "F64")
"""Types of the tensors that are read, in safetensors' spelling."""
_STATES = ("adapter_model", "optimizer", "scheduler", "scaler", "rng_state", "random_states", "training_args")
"""How names of files begin that trainers write beside an adapter, and that hold no weights but its own."""
_PICKLE = (
    "is a pickle, which can run code and is never read; save it as safetensors, as torchtune does with "
    "safe_serialization of FullModelHFCheckpointer"
)
_OTHER_FILES = {
    "adapter_model-*.safetensors": "is one of several shards, which PEFT does not read: write their tensors into one "
    f"{WEIGHTS_FILE} with load_file and save_file of safetensors.torch",
    "*adapters.safetensors": "is mlx-lm's, whose factors have other names: write them transposed as PEFT's lora_A and "
    f"lora_B, and r, lora_alpha (rank · scale) and peft_type into {CONFIG_FILE}",
    "run.yaml": "is of a run: give what moetune export RUN_DIR --format peft --out DIR writes",
    "delta.safetensors": "is a delta, which holds no factors: moetune apply",
    "*.gguf": "is for llama.cpp, and not read: take the adapter that it was converted from",
    "adapter_*.bin": _PICKLE,
    "latest_checkpointed_iteration.txt": "is of Megatron's shards: AutoBridge.export_adapter_ckpt of Megatron-Bridge "
    "writes an adapter of them",
    "trainer_state.json": "is of a trainer's checkpoint without an adapter: resume it, then write one",
    **dict.fromkeys(("*.pt", "*.pth"), _PICKLE),
}
"""Name of a file of weights that stands in place of PEFT's -> what it is, and what to do."""
_OTHER_NAME = re.compile(
    r"(?:(?<=\.lora_[AB])|(?<=\.modules_to_save))\.default(?=\.)|(?<=\.lora_[AB])\.[\w-]+(?=\.weight$)"
)
"""The name of an adapter among several."""
_WRAPPER = re.compile(r"^module\.|(?:^|(?<=\.))(?:base_model\.model|_orig_mod|_\w+_wrapped_module)\.")
"""What wrappers of a model put into names: PEFT, and, where a program saves them so, DDP, torch.compile and FSDP."""

Tensors = Mapping[str, Tensor]
T = TypeVar("T")


def _acting(alpha: float) -> float:
    if alpha == 0:
        raise ValueError(f"an alpha of {alpha:g} leaves factors without effect; set what they were trained with")
    return alpha


Rank = Annotated[int, Field(gt=0, strict=True)]
Alpha = Annotated[FiniteFloat, Field(strict=True), AfterValidator(_acting)]
Expression = Annotated[Pattern[str], AfterValidator(lambda pattern: pattern.pattern)]


class Scales(BaseModel):
    """Settings that decide the scale of an adapter's factors, and what it has beside them, under PEFT's names; None
    stands for PEFT's default."""

    r: Rank = LoraConfig().r
    lora_alpha: Alpha
    rank_pattern: dict[Expression, Rank] | None = None
    alpha_pattern: dict[Expression, Alpha] | None = None
    target_parameters: tuple[str, ...] | None = None
    modules_to_save: tuple[str, ...] | None = None
    use_rslora: StrictBool | None = None

    def of(self, target: str, rank: int) -> float:
        """Return what PEFT multiplies B·A of this rank by: alpha / rank, or alpha / √rank with `use_rslora`.

        `target` is the path of the layer or parameter in the model, on which alpha may depend.
        """
        alpha = self._by_pattern(self.alpha_pattern, target, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def rank(self, target: str) -> int:
        """Return the rank that the settings give the layer or parameter at this path in the model."""
        return self._by_pattern(self.rank_pattern, target, self.r)

    def _by_pattern(self, patterns: Mapping[Any, T] | None, target: str, default: T) -> T:
        """Return the value of the first pattern that matches `target` as the settings name it: with `.weight` if they
        list the parameter and not its layer."""
        as_parameters = self.target_parameters or ()
        if any(f".{target}.weight".endswith(f".{parameter}") for parameter in as_parameters):
            target = f"{target}.weight"
        return (patterns or {}).get(get_pattern_key(list(patterns or ()), target), default)


class AdapterRecord(TypedDict, total=False):
    """What moetune records about an adapter in its weight file, so that reading it back takes no guess at its layout.

    It is JSON in the metadata of safetensors, under the key `moetune`.

    Attributes:
        schema: version of the record, 1.
        layout: how factors of experts are stored, one of `read.LAYOUTS`; None if there are none.
        sketch: `<experts>.gate_up`, `<experts>.down` or the path of a linear layer -> two numbers that follow from its
            update (sketch.py), by which a wrong reading is found.
    """

    schema: int
    layout: str | None
    sketch: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter as it is in its folder.

    Attributes:
        settings: the content of `adapter_config.json`.
        tensors: the tensors, by their names without what wrappers of the model, PEFT's too, put into them.
        scales: the settings that decide the scale.
        record: what moetune recorded when it wrote the file; empty if another program wrote it.
        renamed: a factor's name in the file that has more in it than PEFT's prefix; None if there is none.
    """

    folder: Path
    settings: Mapping[str, Any]
    tensors: Tensors
    scales: Scales
    record: AdapterRecord
    renamed: str | None = None

    def __str__(self) -> str:
        return f"adapter {str(self.folder)!r}"


def read_adapter(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor], Scales]:
    """Return the settings (adapter_config.json) and the tensors of an adapter folder, and the settings that decide the
    scale. Pickles are never opened.

    Raises:
        UserError: the folder has no adapter in safetensors, a file is damaged, the adapter is not LoRA, a tensor is
            empty or of a type that only a scale would give a meaning, a value is not finite, a rank in the settings
            exceeds that of the factors, an alpha is zero, or a setting is of a variant that PEFT does not know.
    """
    where = f"adapter {str(folder)!r}"
    if not (folder / WEIGHTS_FILE).is_file():
        raise UserError(f"{where}: {instead_of_weights(folder)}")
    settings = read_json(folder / CONFIG_FILE, dict[str, Any], f"{where}: {CONFIG_FILE}")
    kind, no_lora = settings.get("peft_type"), f"{where}: {CONFIG_FILE} describes no LoRA adapter"
    if kind != "LORA":
        raise UserError(f"{no_lora}: peft_type is {shown(kind)}, not LORA")
    if "lora_alpha" not in settings:
        raise UserError(f"{no_lora}: it has no lora_alpha")
    if str(start := settings.get("init_lora_weights")).startswith(("pissa_niter", "lora_ga")):
        raise UserError(
            f"{where}: {CONFIG_FILE}: init_lora_weights: {start} changed the base's weights before training, and PEFT "
            "does not repeat that when it loads the adapter: save it as plain LoRA where it was trained, with "
            "path_initial_model_for_weight_conversion (pissa_convert in LLaMA-Factory)"
        )
    for key, setting in settings.items():
        if setting and key not in _SETTINGS and (key.startswith("use_") or key.endswith("_config")):
            raise UserError(
                f"{where}: {CONFIG_FILE}: {key}: {shown(setting)} is no setting that PEFT {peft.__version__} knows, so "
                "it would be ignored; merge the adapter with the program that wrote it"
            )
        if setting not in (None, False, "", [], {}) and key not in (*_SETTINGS, "lora_B_layout"):
            note_once(f"{where}: {CONFIG_FILE}: {key}: {shown(setting)} is no setting of PEFT, and not read")
    header = read_header(folder / WEIGHTS_FILE)
    _refuse_unread(folder, header)
    refuse_not_finite(header)
    with reading(repr(str(folder / WEIGHTS_FILE))):
        tensors = load_file(folder / WEIGHTS_FILE)
    if not tensors:
        raise UserError(f"{where}: {WEIGHTS_FILE} holds no tensor")
    weights = {file.name for file in folder.iterdir() if file.suffix in (".safetensors", ".bin", ".pt", ".pth")}
    if unread := sorted(name for name in weights if not name.startswith(_STATES)):
        note_once(f"{where}: {' and '.join(first_of(unread))} beside {WEIGHTS_FILE} is not read, nor what it trained")
    halves = [any(tensors[name].any() for name in tensors if f".lora_{half}" in name) for half in "AB"]
    if not all(halves) and all(".lora_" in name for name in tensors):
        note_once(f"{where}: one of the factors A and B is zero everywhere, so it changes nothing: was it trained?")
    rows = [tensor.shape[-2] for name, tensor in tensors.items() if ".lora_A" in name and tensor.ndim > 1]
    try:
        scales = Scales.model_validate(settings)
    except ValidationError as error:
        raise UserError(f"{where}: {CONFIG_FILE}: {first_problem(error)}") from None
    for rank in (scales.r, *(scales.rank_pattern or {}).values()):
        if rows and rank > max(rows):
            raise UserError(f"{where}: {CONFIG_FILE}: rank {rank}, and its factors have {max(rows)} rows")
    return settings, tensors, scales


def instead_of_weights(folder: Path) -> str:
    """Return what is in a folder without an adapter's weights: a file of another program and what to do, or that there
    is no file, and in which folders below there is one."""
    below = sorted(str(file.parent.relative_to(folder)) for file in folder.glob(f"*/{WEIGHTS_FILE}"))
    hint = f"; there is one in {' and in '.join(first_of(below))}" if below else ""
    others = (f"{file.name} {why}" for name, why in _OTHER_FILES.items() for file in sorted(folder.glob(name)))
    return next(others, f"there is no {WEIGHTS_FILE} in it{hint}")


def _refuse_unread(folder: Path, header: Mapping[str, Stored]) -> None:
    """Raise `UserError` for a tensor without values, and for one of a type that needs a scale, such as float8.

    Whole modules may hold integers: buffers.
    """
    for name, tensor in header.items():
        where = f"adapter {str(folder)!r}: {name} is"
        if 0 in tensor.shape:
            raise UserError(f"{where} {[*tensor.shape]}, without values; leave it out of the file")
        dtype = DTYPES.get(tensor.dtype)
        is_integer = dtype is not None and not dtype.is_floating_point
        if tensor.dtype not in _FLOATS and (".lora_" in name or not is_integer):
            raise UserError(
                f"{where} of type {tensor.dtype}, which is not read; save it as one of {', '.join(_FLOATS)}"
            )


@dataclass(frozen=True)
class _Added:
    """What is read of a `tokenizer.json`."""

    added_tokens: list[dict[str, Any]] = field(default_factory=list)


def added_tokens(folder: Path) -> set[str] | None:
    """Return the added tokens of the tokenizer in a folder; None if it has no tokenizer.json, `UserError` if that is
    damaged."""
    file = folder / "tokenizer.json"
    return {str(token.get("content")) for token in read_json(file, _Added).added_tokens} if file.is_file() else None


def beyond_plain(settings: Mapping[str, Any]) -> list[str]:
    """Return the settings with which an adapter is not plain LoRA, each as text `key: value`; none for plain LoRA."""
    not_plain = [f"{key}: {settings[key]}" for key in _NOT_PLAIN if settings.get(key)]
    if settings.get("bias", "none") != "none":
        not_plain.append(f"bias: {settings['bias']}")
    if settings.get("init_lora_weights", True) not in (True, False, "gaussian", "eva", "orthogonal"):
        not_plain.append(f"init_lora_weights: {settings['init_lora_weights']}, which changes the base weights")
    return not_plain


def open_adapter(folder: Path) -> StoredAdapter:
    """Read an adapter folder. Raise `UserError` if it has no valid adapter (`read_adapter`), or no plain LoRA."""
    settings, tensors, scales = read_adapter(folder)
    if not_plain := beyond_plain(settings):
        raise UserError(f"adapter {str(folder)!r} is not plain LoRA: {'; '.join(not_plain)}; merge it with PEFT")
    # beside a module that it saves whole, PEFT may store the one that it replaces, and the saved one by a second name
    named, renamed = dict[str, Tensor](), None
    for name in (name for name in tensors if ".original_module." not in name):
        plain = _OTHER_NAME.sub("", _WRAPPER.sub("", name)).replace(".modules_to_save.", ".")
        if ".lora_" in name and plain != name.removeprefix(PREFIX):
            renamed = name
        if not named.setdefault(plain, tensors[name]).equal(tensors[name]):
            raise UserError(f"adapter {str(folder)!r} holds {plain} twice, with two values: keep {name} or the other")
    return StoredAdapter(folder, settings, named, scales, _record(folder), renamed)


def _record(folder: Path) -> AdapterRecord:
    """Return the record in an adapter's weight file; empty if there is none."""
    with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
        text = (file.metadata() or {}).get(_RECORD)
    if text is None:
        return {}
    return parse_json(text.encode(), AdapterRecord, f"{str(folder / WEIGHTS_FILE)!r}: {_RECORD} in its metadata")


def write_adapter(folder: Path, tensors: Tensors, settings: Mapping[str, Any], record: AdapterRecord) -> int:
    """Write the weights and the configuration of an adapter into a folder; return the number of bytes of its tensors.

    Args:
        tensors: the adapter's tensors by name, without PEFT's prefix.
        settings: the content of `adapter_config.json`.
        record: what to record in the weight file (`LaidOut.record`).
    """
    kinds = {f"{PREFIX}{name}": (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    (folder / WEIGHTS_FILE).unlink(missing_ok=True)  # tensors that were read from it stay mapped
    stored = create_file(folder / WEIGHTS_FILE, kinds, {_RECORD: json.dumps(record, sort_keys=True)})
    for name, tensor in tensors.items():
        stored[f"{PREFIX}{name}"].write(tensor)
    (folder / CONFIG_FILE).write_text(json.dumps(dict(settings), indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return sum(tensor.nbytes for tensor in tensors.values())
