"""`open_model`: load a run folder, a PEFT adapter or a checkpoint for inference.

a run folder      the adapted model on its quantized base, with the trained values of the checkpoint from `open_run`
a PEFT adapter    the plain base that the adapter names, with the adapter, loaded by stock PEFT
a checkpoint      the model unquantized; or quantized, if a precision is given or the checkpoint is published so
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from peft import PeftModel, get_peft_model_state_dict
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from moetune.adapt.build import build, build_noting
from moetune.adapt.weights.base import refuse_changed_base
from moetune.adapt.weights.published import refuse_misfit
from moetune.adapt.weights.stock import load_stock
from moetune.adapters.base import base_of
from moetune.adapters.files import CHAT_TEMPLATE_FILE, CONFIG_FILE, PREFIX, beyond_plain, open_adapter, read_adapter
from moetune.adapters.read import read, sure
from moetune.compat.peft import targets_module
from moetune.config.schema import (
    AdaptConfig,
    DataConfig,
    HardwareConfig,
    ModelConfig,
    ParallelConfig,
    QuantizedDtype,
    RunConfig,
)
from moetune.errors import UserError, reading, shown, time_limit
from moetune.exporting.finished_run import FinishedRun, fill_trained, open_run
from moetune.files import expanded
from moetune.models.source import ModelSource, find_model_source
from moetune.run.dtypes import DeviceType, dtype_on, this_device
from moetune.run.resolve import ResolvedModel, ResolvedRun, resolve, resolve_model
from moetune.tensor_files import Stored
from moetune.training.data.load import set_template, tokenizer_of
from moetune.training.folder.run_folder import RUN_FILE


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A model for inference, in eval mode. `open_model` loads its weights; those of `find` are loaded at first use.

    Attributes:
        name: the name or path that was opened.
        kind: what was opened: `run`, `adapter`, `checkpoint`, or `packed` for a quantized checkpoint.
        resolved: the model's source, configuration and structure, without weights.
        load: function that loads the model, in eval mode; `model` calls it.
        config, step: the run file and the checkpoint's step, for a run; else None.
        began: when the run began, if its chat template writes the date; else None.
        notes: messages for the user.
        run: the run that describes the model with its settings, resolved for one device; None for an adapter, and for a
            checkpoint that transformers alone loads.
        filled: bytes of the largest trained tensor of a run, which is read into the model after the base; 0 for others.
        adapter: the folder of an adapter, which may hold a tokenizer or a chat template of its own; else None.
    """

    name: str
    kind: Literal["run", "adapter", "checkpoint", "packed"]
    resolved: ResolvedModel
    load: Callable[[], PreTrainedModel]
    config: RunConfig | None = None
    step: int | None = None
    began: datetime | None = None
    notes: tuple[str, ...] = ()
    run: ResolvedRun | None = None
    filled: int = 0
    adapter: Path | None = None

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model; `UserError` if its weights cannot be read, or a run's base has changed."""
        return self.load()

    @property
    def settings(self) -> PretrainedConfig:
        """The model's configuration."""
        return self.resolved.settings

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, with the run file's chat template and its arguments; `UserError` if there is no tokenizer."""
        return self._with_template[0]

    @property
    def clock(self) -> datetime | None:
        """The time that the chat template writes: of the run's beginning, or of now; None if it writes none."""
        return self._with_template[1]

    @cached_property
    def _with_template(self) -> tuple[PreTrainedTokenizerBase, datetime | None]:
        beside = {file.name: str(file) for file in (self.adapter.iterdir() if self.adapter is not None else ())}
        has_tokenizer = beside.keys() >= {"tokenizer.json", "tokenizer_config.json"}
        tokenizer = tokenizer_of(self.name, str(self.adapter) if has_tokenizer else self.resolved.source.folder)
        data, template = None if self.config is None else self.config.data, beside.get(CHAT_TEMPLATE_FILE)
        return tokenizer, set_template(tokenizer, data or DataConfig(train="none", chat_template=template), self.began)


def open_model(
    what: str,
    *,
    base: QuantizedDtype | None = None,
    device: DeviceType | None = None,
    dtype: str | None = None,
    stock: bool = False,
) -> Opened:
    """Load a run, an adapter or a checkpoint for inference.

    Args:
        what: a run folder, the folder of a PEFT adapter or of a checkpoint, a catalog name or a hub id.
        base: the precision to quantize a checkpoint to; None to leave it as it is. Checkpoints that are published in
            MXFP4 or NF4 stay quantized.
        device: `cuda` or `cpu`; by default the GPU, or the CPU if there is none.
        dtype: the dtype of computation, such as `bf16`; by default a run's own, else bfloat16 on a GPU and float32 on a
            CPU.
        stock: load a checkpoint by transformers alone, without moetune's modules.

    Raises:
        UserError: `what` is none of these, or is a delta; its weights cannot be read; `base` is given for a run or an
            adapter; or the base of a run has changed.
    """
    opened = find(what, base=base, device=device, dtype=dtype, stock=stock)
    _ = opened.model  # what cannot be read is an error here
    return opened


def find(
    what: str,
    *,
    base: QuantizedDtype | None = None,
    device: DeviceType | None = None,
    dtype: str | None = None,
    stock: bool = False,
) -> Opened:
    """Find the model that `open_model` would load with the same arguments, without reading its weights.

    Raises:
        UserError: `what` is no run, adapter, checkpoint, catalog name or hub id, or has no weights; or `base` is given
            for a run or an adapter. Weights that cannot be read are an error of loading.
    """
    device, path = device or this_device(), expanded(what)
    if (path / RUN_FILE).is_file():
        if base is not None:
            raise UserError(f"{what!r} is a run, on a base that is quantized as in training; leave --base out")
        return _found_run(what, open_run(path), device, dtype)
    if (path / "adapter_config.json").is_file():
        if base is not None:
            raise UserError(f"{what!r} is an adapter, which PEFT puts on the plain base; leave --base out")
        return _found_adapter(what, path, device, dtype)
    if (path / "delta.safetensors").is_file():
        raise UserError(f"{what!r} is a delta; moetune apply makes a checkpoint of it and its base")
    dtype = dtype or dtype_on(device)
    source = _source(what)
    if stock:
        model = resolve_model(ModelConfig.named(what, dtype=dtype), device)
        load = partial(_stock, model, device)
        return Opened(name=what, kind="checkpoint", load=load, resolved=model)
    as_it_is = base is None and source.quantization.base is None
    kind: Literal["checkpoint", "packed"] = "checkpoint" if as_it_is else "packed"
    return _found_checkpoint(what, kind, device, base=dtype if as_it_is else base or "auto", dtype=dtype)


def find_in_16_bits(what: str, device: DeviceType, *, on_host: bool = False) -> Opened:
    """Find a checkpoint as `find`, to be loaded unquantized however it is published; its experts on the host if
    `on_host`.

    Raises:
        UserError: `what` is no checkpoint, catalog name or hub id with weights, or is a quantized base.
    """
    source, dtype = _source(what), dtype_on(device)
    if source.quantized_base is not None:
        raise UserError(
            f"model {what!r} is quantized already; give the checkpoint {str(source.quantized_base.source)!r}"
        )
    experts_on = "host" if on_host else "gpu"
    return _found_checkpoint(what, "checkpoint", device, base=dtype, dtype=dtype, experts_on=experts_on)


def _found_checkpoint(what: str, kind: Literal["checkpoint", "packed"], device: DeviceType, **settings: str) -> Opened:
    """Return the checkpoint `what`, to be loaded with these settings of `model:`."""
    config = RunConfig(model=ModelConfig.named(what, **settings), adapt=AdaptConfig(also=("norm",)))
    run = resolve(_alone(config, device, settings["dtype"]), device)
    return Opened(name=what, kind=kind, load=lambda: build(run, run.device()).model.eval(), resolved=run.model, run=run)


def _source(what: str) -> ModelSource:
    """Return the source of a model; raise `UserError` if its weights are not available."""
    source = find_model_source(what)
    if source.folder is None:
        raise UserError(f"model {what!r} has no weights that could be loaded")
    return source


def _found_run(what: str, finished: FinishedRun, device: DeviceType, dtype: str | None) -> Opened:
    """Return the model of the run that was opened as `what`, to be loaded with its trained values.

    Loading it raises `UserError` if the base has changed.
    """
    run = resolve(_alone(finished.config, device, dtype), device)

    def built() -> PreTrainedModel:
        if finished.base is None:
            adapted = build(run, run.device())
        else:
            adapted, base = build_noting(run, run.device())
            if base is not None:
                refuse_changed_base(finished.base, base.fingerprint, f"the run in {what!r}", finished.config.model.path)
        adapted.model.eval()
        fill_trained(adapted, finished)
        return adapted.model

    return Opened(
        name=what,
        kind="run",
        config=finished.config,
        step=finished.step,
        began=None if finished.folder is None else finished.folder.clock(),
        notes=finished.notes,
        load=built,
        resolved=run.model,
        run=run,
        filled=max((stored.nbytes for stored in finished.trained.values() if isinstance(stored, Stored)), default=0),
    )


def _alone(config: RunConfig, device: DeviceType, dtype: str | None) -> RunConfig:
    """Return a run's configuration for inference with its model on one device; a `dtype` replaces its own.

    Settings of training are reset: checkpointing, NEFTune, packing, several ranks, the GPU. On a CPU, flash attention
    becomes `auto`.
    """
    settings: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    if config.model.attention == "flash_attention_2" and device == "cpu":
        settings["attention"] = "auto"
    return config.but(
        model=settings,
        train={"checkpointing": "none", "neftune_alpha": 0.0},
        # a run file without data packs, and the attention of packed documents has no cache of keys
        data=(config.data or DataConfig(train="none")).but(packing=False),
        parallel=ParallelConfig(),
        hardware=HardwareConfig(host_memory=config.hardware.host_memory),
    )


def _found_adapter(what: str, path: Path, device: DeviceType, dtype: str | None) -> Opened:
    """Return the adapter in the folder `path`, opened as `what`, to be loaded onto its base with stock PEFT.

    Raises `UserError` if it cannot be read, names no base, or the base cannot be found. Loading raises `UserError` if
    the weights of the base cannot be read, or the adapter does not fit the base.
    """
    settings, _, _ = read_adapter(path)
    base = settings.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UserError(f"the adapter in {what!r}: {CONFIG_FILE} names no base; set base_model_name_or_path")
    if tokens := settings.get("alora_invocation_tokens"):
        raise UserError(f"the adapter in {what!r} begins at alora_invocation_tokens {shown(tokens)}, which is not read")
    if (revision := settings.get("revision")) not in (None, "main") and not expanded(base).is_dir():
        raise UserError(
            f"the adapter in {what!r}: {CONFIG_FILE} names revision {shown(revision)} of {base!r}, and main is read: "
            f"hf download {base} --revision {revision} --local-dir DIR, and set base_model_name_or_path to DIR"
        )
    try:
        model = resolve_model(ModelConfig.named(base, dtype=dtype or dtype_on(device)), device)
    except UserError as error:
        raise UserError(f"the base of the adapter in {what!r}, by its base_model_name_or_path: {error}") from error

    trained = settings.get("trainable_token_indices") or []
    rows = model.settings.get_text_config().vocab_size
    with reading(f"the adapter in {what!r}: trainable_token_indices {shown(trained)}"):
        ids = chain(*trained.values()) if isinstance(trained, dict) else trained
        if (largest := max(ids, default=0)) >= rows:
            raise UserError(
                f"the adapter in {what!r} trains token {largest}, and its base has embeddings for {rows} only; name "
                "the base with more tokens, which it was trained on, as its base_model_name_or_path"
            )
    load = partial(_with_adapter, what, path, model, device)
    return Opened(name=what, kind="adapter", load=load, resolved=model, adapter=path)


def _with_adapter(what: str, path: Path, model: ResolvedModel, device: DeviceType) -> PreTrainedModel:
    """Load the adapter in the folder `path`, opened as `what`, onto its base `model` with stock PEFT, in eval mode.

    Raises `UserError` if the base cannot be loaded, the adapter's tensors are not exactly those that PEFT expects, or
    they are in another layout.
    """
    settings, stored, _ = read_adapter(path)
    tensors = {f"{PREFIX}{name.removeprefix(PREFIX).replace('.default.', '.')}": stored[name] for name in stored}
    base = model.config.path
    if not beyond_plain(settings):
        _refuse_other_layout(what, path, base, device)
    try:
        plain: Any = _stock(model, device)
    except UserError as error:
        if model.source.quantization.method != "bitsandbytes":
            raise
        raise UserError(
            f"{error}. It is in 4 bits, and transformers loads no experts so; use a merged export"
        ) from error
    with reading(f"the adapter in {what!r}"), time_limit(f"the patterns in {CONFIG_FILE}"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT calls transformers by a deprecated name
        # a tensor of another shape is left out here, and named below
        adapted = PeftModel.from_pretrained(plain, str(path), ignore_mismatched_sizes=True)
        expected, state = get_peft_model_state_dict(adapted), adapted.state_dict()

    def is_loaded(name: str) -> bool:
        """Whether a tensor is in the model, as are the embeddings that PEFT saves where rows were added to them."""
        inside = state.get(name.replace(".modules_to_save.", ".modules_to_save.default."))
        of_base = ".base_layer." in name and ".token_adapter." not in name
        return inside is not None and not of_base and inside.cpu().equal(tensors[name].to(inside.dtype))

    refuse_misfit(
        # what the base has need not be in the adapter: PEFT adds lm_head's own weight to what it saves
        {f"missing {name}" for name in expected.keys() - tensors.keys() if not name.endswith(".base_layer.weight")}
        | {f"unexpected {name}" for name in tensors.keys() - expected.keys() if not is_loaded(name)}
        | {
            f"{name} is {[*tensors[name].shape]}, not {[*factor.shape]}"
            for name, factor in (state | expected).items()
            if name in tensors and tensors[name].shape != factor.shape
        },
        f"the factors in {what!r}",
        base,
    )
    return adapted.get_base_model().eval()  # type: ignore[return-value]


def _refuse_other_layout(what: str, path: Path, base: str, device: DeviceType) -> None:
    """Raise `UserError` if an adapter is in another layout than PEFT's, or its settings are those of a server.

    PEFT would compute something else, or not tell what to do. `base` is the base that it names.
    """
    model, stored = resolve_model(ModelConfig.named(base), device), open_adapter(path)
    of = base_of(model.source, model.plain, model.structure, base)
    parsed = sure(read(stored, of), stored)
    with reading(f"the adapter in {what!r}"):
        names_modules = any(targets_module(stored.settings, experts) for experts in parsed.adapter.experts)
    if parsed.layout not in (None, of.peft_layout):
        why = f"is in the layout {parsed.layout}, and PEFT reads {of.peft_layout} with this base"
    elif parsed.wrong:
        raise UserError(f"the adapter in {what!r}: {parsed.wrong[0]}")
    elif names_modules:
        why = "names modules of experts in target_modules, which vLLM reads and PEFT does not"
    elif stored.renamed and ".default." not in stored.renamed:
        why = f"has other names than PEFT looks for, as {stored.renamed}"
    else:
        return
    raise UserError(f"the adapter in {what!r} {why}; moetune adapter convert {base} {what} --to peft --out DIR")


def _stock(model: ResolvedModel, device: DeviceType) -> PreTrainedModel:
    """Load a checkpoint unquantized by transformers alone, in eval mode; `UserError` unless its tensors all fit."""
    _source(model.config.path)
    return load_stock(model, device).eval()
