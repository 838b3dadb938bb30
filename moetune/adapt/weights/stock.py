"""Load a checkpoint with transformers alone, unquantized; check that all tensors were used."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from moetune.adapt.weights.published import refuse_misfit, without_drafts
from moetune.errors import UserError, reading
from moetune.formats.checkpoint import open_checkpoint
from moetune.json_files import read_json
from moetune.models.text import auto_class
from moetune.run.resolve import ResolvedModel
from moetune.tensor_files import INDEX_FILE, SINGLE_FILE, is_suspect, read_headers, refuse_not_finite


def load_stock(model: ResolvedModel, device: str) -> PreTrainedModel:
    """Load a model with transformers' `from_pretrained`, in the model's dtype; download its weights if needed.

    Raises:
        UserError: the weights cannot be found, downloaded or loaded; or a tensor is missing, unexpected, of another
            shape, or holds values that are not finite.
    """
    folder = model.source.weights()
    read_headers(folder)
    index = folder / INDEX_FILE
    indexed = not (folder / SINGLE_FILE).is_file()
    if indexed and not isinstance(read_json(index, dict[str, Any]).get("metadata"), dict):  # transformers writes to it
        raise UserError(f'{str(index)!r} has no metadata; add "metadata": {{}} to it')
    with reading(f"the weights of {model.source.name!r} in {str(folder)!r}"), no_progress_bars():
        load: Any = auto_class(model.settings).from_pretrained
        loaded, info = load(
            str(folder),
            dtype=model.dtype,
            device_map={"": device},
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # mismatches are reported below, by name
            output_loading_info=True,
        )
    kinds = {"missing": info["missing_keys"], "unexpected": without_drafts(info["unexpected_keys"])}
    wrong = [f"{kind} {key}" for kind, keys in kinds.items() for key in sorted(keys)]
    wrong += [f"{key} is {[*stored]}, not {[*size]}" for key, stored, size in sorted(info["mismatched_keys"])]
    refuse_misfit(wrong, f"the weights in {str(folder)!r}", model.source.name)
    if torch.stack([is_suspect(tensor) for tensor in loaded.state_dict().values()]).any():
        refuse_not_finite(open_checkpoint(folder))  # reads the files again, to name the tensor there
    return loaded


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Disable transformers' progress bars inside the `with` block; moetune shows its own."""
    were_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            transformers_logging.enable_progress_bar()
