"""A run, an adapter or a checkpoint, opened by its name as a model that computes.

a run folder        the adapted model on its packed base, with the values of the newest checkpoint
a PEFT adapter      stock PEFT on the plain base that it names
a checkpoint        stock transformers; or packed, if a precision for the base is given, or as it is published
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftConfig, PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from moetune.adapt.base import refuse_other_headers
from moetune.adapt.build import Adapted, build, no_progress_bars
from moetune.anatomy.source import ModelSource, find_model_source
from moetune.config import AdaptConfig, HardwareConfig, ModelConfig, PackedBase, ParallelConfig, RunConfig
from moetune.data.load import chat_template, tokenizer_of
from moetune.errors import UserError, one_line
from moetune.exporting.finished_run import FinishedRun, open_run
from moetune.files import expanded
from moetune.run import refusals
from moetune.run.dtypes import DTYPES, DeviceType, dtype_on, this_device
from moetune.run.published import published
from moetune.run.resolve import resolve
from moetune.training.checkpoint import parts_of
from moetune.training.run_folder import RUN_FILE


@dataclass(frozen=True)
class Opened:
    """A model ready to compute, and not to train.

    Attributes:
        kind: what it was opened as.
        folder: where its tokenizer is.
        config: the run file of a run.
    """

    name: str
    kind: Literal["run", "adapter", "checkpoint", "packed"]
    model: PreTrainedModel
    folder: str | None
    config: RunConfig | None = None

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, with the chat template that a run was given.

        Raises:
            UserError: there is none.
        """
        tokenizer, data = tokenizer_of(self.name, self.folder), None if self.config is None else self.config.data
        if data is not None and data.chat_template is not None:
            tokenizer.chat_template = chat_template(data.chat_template)
        return tokenizer


def open_model(
    what: str, *, base: PackedBase | None = None, device: DeviceType | None = None, dtype: str | None = None
) -> Opened:
    """Opens a run folder, a folder with a PEFT adapter, or a model.

    Args:
        base: keep a model packed like this; a run is packed as it was trained, and a checkpoint that is published in
            MXFP4 or NF4 stays so.
        dtype: of compute; by default a run's own, else bfloat16 on a GPU and float32 on a CPU.

    Raises:
        UserError: it is none of these, or its weights cannot be read.
    """
    device, path = device or this_device(), expanded(what)
    if (path / RUN_FILE).is_file():
        if base is not None:
            raise UserError(f"{what!r} is a run, on a base that is packed as it was in training; leave --base out")
        return _open_run(what, open_run(path), device, dtype)
    if (path / "adapter_config.json").is_file():
        if base is not None:
            raise UserError(f"{what!r} is an adapter, which PEFT puts on the plain base; leave --base out")
        return _open_adapter(what, path, device, dtype)
    if (path / "delta.safetensors").is_file():
        raise UserError(f"{what!r} is a delta; moetune apply makes a checkpoint of it and its base")
    source = find_model_source(what)
    if source.folder is None:
        raise UserError(f"model {what!r} has no weights that could be loaded")
    if base is None and published(source).base is None:
        return Opened(what, "checkpoint", _stock(source.folder, device, dtype), source.folder)
    model = ModelConfig.model_validate({"path": what, "base": base or "auto"} | _attention(source))
    packed = RunConfig(model=model, adapt=AdaptConfig(also=("norm",)))
    return Opened(what, "packed", _built(packed, device, dtype).model, source.folder)


def _attention(source: ModelSource) -> dict[str, str]:
    """Of models that have none but their own code's."""
    return {"attention": "eager"} if any(refusals.of_attention(source.config, "sdpa")) else {}


def _open_run(what: str, run: FinishedRun, device: DeviceType, dtype: str | None) -> Opened:
    adapted = _built(run.config, device, dtype)
    if run.base is not None:
        refuse_other_headers(run.base, adapted.run.model, f"the run in {what!r}")
    with torch.no_grad():
        for parameter, parts in parts_of(adapted).items():
            for part in parts:
                mine = part.of(parameter)
                mine.copy_(run.trained[part.name].rows().reshape(mine.shape))
    return Opened(what, "run", adapted.model, adapted.run.model.source.folder, run.config)


def _built(config: RunConfig, device: DeviceType, dtype: str | None) -> Adapted:
    """The adapted model of a run file, as one process computes with it."""
    settings: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    if config.model.attention == "flash_attention_2" and device == "cpu":
        settings["attention"] = "sdpa"
    model = config.model.model_copy(update=settings)
    train = config.train.model_copy(update={"checkpointing": "none", "neftune_alpha": 0.0})
    data = None if config.data is None else config.data.model_copy(update={"packing": False})
    alone = {"parallel": ParallelConfig(), "hardware": HardwareConfig()}
    run = resolve(config.model_copy(update={"model": model, "train": train, "data": data, **alone}), device)
    adapted = build(run, run.device())
    adapted.model.eval()
    return adapted


def _open_adapter(what: str, path: Path, device: DeviceType, dtype: str | None) -> Opened:
    try:
        base = PeftConfig.from_pretrained(str(path)).base_model_name_or_path
        source = find_model_source(str(base))
        try:
            plain: Any = _stock(str(source.folder), device, dtype)
        except UserError as error:
            if published(source).method != "bitsandbytes":
                raise
            raise UserError(
                f"{error}. It is in 4 bits, and transformers loads no experts so; use a merged export"
            ) from error
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT still asks transformers by an old name
            model = PeftModel.from_pretrained(plain, str(path)).get_base_model()
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"the adapter in {what!r} cannot be loaded: {one_line(error)}") from error
    return Opened(what, "adapter", model.eval(), source.folder)  # type: ignore[arg-type]


def _stock(folder: str, device: DeviceType, dtype: str | None) -> PreTrainedModel:
    try:
        with no_progress_bars():
            model: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=DTYPES[dtype or dtype_on(device)],
                device_map={"": device},
                use_safetensors=True,
                trust_remote_code=False,
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"the weights in {folder!r} cannot be loaded: {one_line(error)}") from error
    return model.eval()
