"""Tied weights: whether a checkpoint's files hold apart what its configuration ties.

transformers ties the LM head to the embedding where the configuration says so (`tie_word_embeddings`), unless the files
hold both with different values: then it keeps both. PEFT's merge of a tied model leaves such files, for example.
"""

import copy
from collections.abc import Mapping

import torch
from transformers import PretrainedConfig

from moetune.errors import UserError
from moetune.models.hub.key_mapping import key_mappings
from moetune.models.structure import meta_model, tied_names
from moetune.tensor_files import Stored

_KEY = "tie_word_embeddings"


def ties(config: PretrainedConfig) -> bool:
    """Return whether a configuration ties the LM head to the embedding, if the model's code can."""
    return bool(getattr(config, _KEY, False))


def untied(config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy of a configuration that ties nothing."""
    config = copy.deepcopy(config)
    for section in (config, config.get_text_config()):
        if getattr(section, _KEY, False):
            setattr(section, _KEY, False)
    return config


def holds_apart(config: PretrainedConfig, tensors: Mapping[str, Stored]) -> bool:
    """Return whether a checkpoint's tensors hold two names apart that its configuration ties, with different values.

    Reads the two tensors up to their first difference.

    Raises:
        UserError: transformers cannot build the model; a file is cut short; or the configuration also ties what the
            files do not hold apart, such as the shared layers of Zamba, so that it cannot be untied.
    """
    rows = getattr(config.get_text_config(), "vocab_size", None)
    tables = {name: tensor for name, tensor in tensors.items() if len(tensor.shape) == 2 and tensor.shape[0] == rows}
    if not ties(config) or len(tables) < 2:
        return False
    model = meta_model(config)
    stored = {name: tables[mapping.every_key()[0]] for name, mapping in key_mappings(model, tables).items()}
    tied = tied_names(model)
    apart = [n for n, first in tied.items() if n in stored and first in stored and _differ(stored[n], stored[first])]
    if apart and len(apart) < len(tied):
        raise UserError(
            f"{apart[0]} has other values than {tied[apart[0]]} in the files; {_KEY} in config.json ties them, "
            "and more: set it to false, with every tensor in the files"
        )
    return bool(apart)


def _differ(first: Stored, second: Stored) -> bool:
    if first.shape != second.shape:  # the checkpoint's reader names it
        return False
    return not all(torch.equal(first.rows(*block).float(), second.rows(*block).float()) for block in first.blocks())
