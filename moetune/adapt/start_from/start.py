"""Open `adapt.start_from`: check it before any weight is loaded, load it afterwards."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from moetune.adapt.build import Adapted
from moetune.adapt.start_from.delta import check_delta, load_delta
from moetune.adapt.start_from.peft_adapter import check_peft, load_peft
from moetune.adapt.weights.base import refuse_other_headers
from moetune.adapters.files import CHAT_TEMPLATE_FILE, CONFIG_FILE, WEIGHTS_FILE, added_tokens, instead_of_weights
from moetune.errors import UserError, counted, raise_problems
from moetune.files import expanded
from moetune.json_files import read_json
from moetune.models.hub.delta_folder import DELTA_FILE, FORMAT, Delta, read_delta, read_manifest
from moetune.models.hub.fingerprint import Base
from moetune.models.source import ADAPTED
from moetune.run import validation

_RUN_FILE, _CHECKPOINTS = "run.yaml", "checkpoints"
"""Names as in training/folder/run_folder.py, which cannot be imported here because it imports this package."""
_ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE, "adapter_model.bin")


@dataclass(frozen=True)
class Start:
    """Initial values for what trains, checked as far as possible without reading frozen weights. `delta` is the opened
    delta; None if the folder holds a PEFT adapter."""

    folder: Path
    delta: Delta | None = None

    def load(self, adapted: Adapted, base: Base | None) -> tuple[str, ...]:
        """Copy the values into the adapted model; return notes for the user.

        `base` is the checkpoint that the frozen weights were read from; it may be None only for a PEFT adapter. Raises
        `UserError` if the values do not fit the model, or were trained on other frozen weights.
        """
        try:
            if self.delta is None:
                return load_peft(adapted, self.folder)
            assert base is not None
            difference = self.delta.base.fingerprint.difference(base.fingerprint)
            if difference is not None:
                path = adapted.run.config.model.path
                raise UserError(
                    f"the delta in {str(self.folder)!r} was made for another base than {path!r}: {difference}"
                )
            return load_delta(adapted, self.delta)
        except UserError as error:
            raise UserError(f"adapt.start_from: {error}") from None

    def other_texts(self, tokenizer: PreTrainedTokenizerBase, with_template: bool) -> Iterator[str]:
        """Yield what an adapter has beside it for texts and `tokenizer`, that of the run, has not: added tokens and,
        `with_template`, a chat template."""
        template = self.folder / CHAT_TEMPLATE_FILE
        written = template.read_text(encoding="utf-8").strip() if with_template and template.is_file() else ""
        if written not in (tokenizer.chat_template or ""):
            yield f"chats are written by another template than its own; data.chat_template: {template} takes that"
        if lacking := (added_tokens(self.folder) or set()) - tokenizer.get_added_vocab().keys():
            yield (
                f"{counted(len(lacking), 'added token')} of its tokenizer.json, as {min(lacking)}, are not in that of "
                "model.path, by which texts are read; copy it there"
            )


def open_start(adapted: Adapted) -> Start | None:
    """Open and check the folder that `adapt.start_from` names; return None if the setting is not used.

    `adapted` is the run's model, on the meta device. Raises `UserError` if the folder does not exist, is neither
    adapter nor delta, is damaged, or does not fit the run; or if the run's ranks divide the model.
    """
    start_from = adapted.run.config.adapt.start_from
    if start_from is None:
        return None
    raise_problems(validation.divided_start(adapted.run.config))
    folder = expanded(start_from)
    if not folder.is_dir():
        raise UserError(f"adapt.start_from: folder {str(folder)!r} does not exist")
    manifest, config = read_manifest(folder), folder / "config.json"
    try:
        if config.is_file() and read_json(config, dict[str, Any]).get("model_type") == ADAPTED:
            raise UserError(
                f"{str(folder)!r} is what a trainer saved of the model of moetune.build; resume it there "
                "(resume_from_checkpoint), and give what moetune.export writes of it"
            )
        if any((folder / name).exists() for name in _ADAPTER_FILES):
            check_peft(adapted, folder)
            return Start(folder)
        if (folder / DELTA_FILE).exists() or (manifest is not None and manifest.get("format") == FORMAT):
            return _open_delta(adapted, folder)
    except UserError as error:
        raise UserError(f"adapt.start_from: {error}") from None
    if (run := _run_of(folder)) is not None:
        raise UserError(
            f"adapt.start_from: {str(folder)!r} is {'a run' if run == folder else 'a checkpoint of a run'}; write what "
            f"it trained with moetune export {run} --format peft|delta --out DIR, and give DIR"
        )
    if config.is_file():
        raise UserError(f"adapt.start_from: {str(folder)!r} is a whole checkpoint; give it as model.path")
    raise UserError(
        f"adapt.start_from: {str(folder)!r} holds no PEFT adapter ({CONFIG_FILE}, {WEIGHTS_FILE}) and no delta "
        f"({DELTA_FILE}, manifest.json): {instead_of_weights(folder)}"
    )


def _run_of(folder: Path) -> Path | None:
    """Return the run folder if `folder` is one, or is a checkpoint in one; None otherwise."""
    if not (folder / _RUN_FILE).is_file():
        return None
    if (folder / _CHECKPOINTS).is_dir():
        return folder
    parent = folder.absolute().parent
    return parent.parent if parent.name == _CHECKPOINTS else None


def _open_delta(adapted: Adapted, folder: Path) -> Start:
    delta, model = read_delta(folder), adapted.run.model
    if model.config.weights == "random":
        raise UserError(f"the delta in {str(folder)!r} belongs to a checkpoint, and model.weights is random")
    refuse_other_headers(delta.base, model, f"the delta in {str(folder)!r}")
    check_delta(adapted, delta)
    return Start(folder, delta)
