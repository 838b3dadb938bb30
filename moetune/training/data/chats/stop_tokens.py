"""Tokens at which generation ends, and whether the data's turns end with one."""

from collections.abc import Collection, Mapping
from contextlib import suppress

from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from moetune.errors import UserError, counted, shown
from moetune.models.hub.reach import hub_is_reachable


def stop_tokens(tokenizer: PreTrainedTokenizerBase, settings: PretrainedConfig, folder: str | None) -> frozenset[str]:
    """Return the tokens at which generation ends: `eos_token_id` of the tokenizer, of the model's configuration
    `settings`, and of generation_config.json in `folder`, a folder or a name on the hub."""
    generation = None
    if folder is not None:
        with suppress(Exception):  # many models have no such file; a broken one is refused where weights are read
            generation = GenerationConfig.from_pretrained(folder, local_files_only=not hub_is_reachable())
    tokens = tokenizer.convert_ids_to_tokens(stop_ids(tokenizer, settings, generation))
    return frozenset(token for token in tokens if token is not None)  # None for ids beyond the vocabulary


def stop_ids(
    tokenizer: PreTrainedTokenizerBase, settings: PretrainedConfig, generation: GenerationConfig | None
) -> list[int]:
    """Return the sorted ids of the tokens at which generation ends; `generation` is from generation_config.json."""
    holders = (tokenizer, settings, settings.get_text_config(), generation)
    of_holders = [getattr(holder, "eos_token_id", None) for holder in holders]
    ids = [number for numbers in of_holders for number in (numbers if isinstance(numbers, list) else [numbers])]
    if wrong := [value for value in ids if type(value) not in (int, type(None))]:
        raise UserError(
            f"eos_token_id in generation_config.json: {shown(wrong[0])} is no id of a token; write its number in the "
            f"vocabulary ({tokenizer.eos_token} has {tokenizer.eos_token_id}), or a list of such numbers"
        )
    return sorted({number for number in ids if number is not None and number >= 0})  # -1 stands for no token


def turn_ends(ends: Mapping[tuple[str, ...], int], stops: Collection[str]) -> dict[str, int]:
    """Return token -> number of turns that end with it, most turns first; "" for turns that end with no token.

    Of several tokens at the end of a turn it is the first that is among `stops`, else the last.

    Args:
        ends: control tokens at the end of a turn, in order -> number of turns.
    """
    turns: dict[str, int] = {}
    for tokens, count in ends.items():
        end = next((token for token in tokens if token in stops), tokens[-1] if tokens else "")
        turns[end] = turns.get(end, 0) + count
    return dict(sorted(turns.items(), key=lambda item: -item[1]))


def end_notes(turns: Mapping[str, int], stops: Collection[str]) -> list[str]:
    """Return a sentence for each token that ends turns of the assistant, a warning if generation goes on after it.

    Args:
        turns: from `turn_ends`.
    """
    notes = []
    for token, count in turns.items():
        said = f"{token or 'no token'} ends {counted(count, 'turn')} of the assistant"
        if token and token not in stops:
            said = (
                f"warning: {said}, and is not in the model's eos_token_id ({', '.join(sorted(stops)) or 'none'}), so "
                "generation goes on after it; add it to eos_token_id in generation_config.json beside the weights, or "
                "name a template in data.chat_template that ends turns with one of these"
            )
        elif not token:
            said = (
                f"warning: {said}, so the model does not learn where to stop; name a template in data.chat_template "
                "that ends turns with a token of the tokenizer"
            )
        notes.append(said)
    return notes
