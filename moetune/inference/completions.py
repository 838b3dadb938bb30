"""`moetune generate --prompts`: text for each record of a file, in batches; resumes.

Batches hold prompts of similar length, the longest first, so that a batch that needs too much memory fails at once. The
texts are collected in a file in the folder beside the output (`atomic.aside`), with a line for each finished batch. The
same command reads this file and generates the rest.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from moetune.atomic import NEW, aside, publish, sweep, writing
from moetune.errors import UserError, one_line, shown
from moetune.files import expanded, write_whole
from moetune.inference.generate import Message, continued, has_static_cache, token_ids
from moetune.inference.opened import Opened, open_model
from moetune.json_files import Answer, parse_json
from moetune.report.console import terminal
from moetune.report.progress import counting
from moetune.training.data.conversion import MEDIA, chat_of, checked_messages
from moetune.training.data.sources import open_sources
from moetune.training.data.values import MalformedError, checked_text

GENERATED = "generated"
"""The key of the generated text in a record of the output."""
_BATCHES = "batches.jsonl"


@dataclass(frozen=True)
class Completions(Answer):
    """The result of `complete`: the numbers of `records` read and of `texts` generated, and the file with both."""

    model: str
    out: str
    records: int
    texts: int


def complete(
    opened: Opened | Path | str,
    prompts: str,
    out: Path | str,
    *,
    batch: int = 8,
    samples: int = 1,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    console: Console | None = None,
) -> Completions:
    """Generate text for each record of a file, and write the records with it to a JSONL file.

    A record has a `prompt` or `text` to continue, or `messages`, a chat that the model answers (a `prompt` may be one
    too, as for TRL); an answer at the end of the chat is not shown to the model. The output has the records with all
    their keys, and the generated text under `generated`. A call with the same arguments continues one that was
    interrupted.

    Args:
        opened: an opened model; or what `open_model` opens.
        prompts: a file or data set, as under `data.train`.
        out: the file to write, in the order of the records; nothing may be there.
        batch: the largest number of prompts in a batch.
        samples: the number of texts for each record, each in a line of its own.
        max_new_tokens: the largest number of tokens of a text.
        temperature: 0 for the most likely token at each position; above 0, tokens are sampled.
        seed: seed of the first batch; the n-th batch after it has `seed` + n.
        console: where progress is shown; by default stderr.

    Raises:
        UserError: `out` exists or cannot be written, or another process writes it; it was begun with other arguments; a
            record has no prompt, has `generated` already, or cannot be written as JSON; several samples are asked for
            at temperature 0; a prompt takes all positions of the model or has tokens that it does not have; or the
            model computes NaN.
    """
    out, console = expanded(out), console or terminal(stderr=True)
    sweep(out)
    _refuse_existing(out)
    if samples > 1 and not temperature:
        raise UserError(f"--samples {samples} at temperature 0 would be equal texts; set --temperature, such as 0.7")
    opened = opened if isinstance(opened, Opened) else open_model(str(opened))
    records = list(_records(prompts))
    ids = [_token_ids(opened, where, record) for where, record in records]
    plan = _batches(opened, [row for row in ids for _ in range(samples)], batch)
    asked = [record for _, record in records]
    settings = [asked, batch, samples, max_new_tokens, temperature, seed, opened.name, opened.step, _weights(opened)]
    task = {"command": "generate", "texts of": hashlib.sha256(json.dumps(settings).encode()).hexdigest()}
    with writing(out), aside(out, task) as folder, (folder / _BATCHES).open("a+b") as begun:
        finished = _finished(begun, [len(numbers) for numbers in plan])
        texts: dict[int, str] = {}
        for numbers, written in zip(plan, finished, strict=False):
            texts.update(zip(numbers, written, strict=True))
        if texts:
            console.print(f"continuing after {len(texts):,} of {len(ids) * samples:,} texts")
        with counting(console, "generating", len(ids) * samples, len(texts)) as advance:
            for number in range(len(finished), len(plan)):
                rows = [ids[index // samples] for index in plan[number]]
                written = continued(
                    opened, rows, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed + number
                )
                begun.write(json.dumps(written).encode() + b"\n")
                begun.flush()
                texts.update(zip(plan[number], written, strict=True))
                advance(len(written))
        lines = [
            json.dumps({**record, GENERATED: texts[index * samples + sample]}, ensure_ascii=False)
            for index, (_, record) in enumerate(records)
            for sample in range(samples)
        ]
        write_whole(folder / NEW, "".join(f"{line}\n" for line in lines))
        _refuse_existing(out)
        publish(out)
    return Completions(opened.name, str(out), len(records), len(lines))


def fullest_batch(opened: Opened, prompts: str, *, batch: int = 8, samples: int = 1) -> tuple[int, int]:
    """Return the size of the largest batch that `complete` would make of the same arguments, for a memory prediction.

    This is the number of prompts, and the tokens of the longest of them, to which the others are padded; the batch is
    the one in which their product is largest. Raises `UserError` as `complete` for a record that it cannot use.
    """
    rows = [ids for where, record in _records(prompts) for ids in [_token_ids(opened, where, record)] * samples]
    sizes = [(len(numbers), max(len(rows[number]) for number in numbers)) for numbers in _batches(opened, rows, batch)]
    return max(sizes, key=lambda size: size[0] * size[1])


def _records(spec: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, record) for each record of a file or data set; `place` is text for messages, such as `a.jsonl, line
    3`. Raise `UserError` for a record that cannot be read, or cannot be written as JSON, and if there is none."""
    empty = True
    for source in open_sources(spec):
        for row in source.rows:
            where, empty = f"{source.name}, {source.unit} {row.number}", False
            if row.problem is not None:
                raise UserError(f"{where}: {row.problem}")
            if not isinstance(row.value, dict):
                raise UserError(f"{where}: {shown(row.value)} is no object with prompt, text or messages")
            if GENERATED in row.value:
                raise UserError(f"{where}: holds {GENERATED!r} already; rename it or leave it out")
            try:
                json.dumps(row.value, ensure_ascii=False).encode()
            except (TypeError, ValueError) as error:
                raise UserError(f"{where}: cannot be written to --out as JSON: {one_line(error)}") from error
            yield where, row.value
    if empty:
        raise UserError(f"{spec!r} holds no records")


def _token_ids(opened: Opened, where: str, record: dict[str, Any]) -> list[int]:
    """Return the token ids of a record's prompt; raise `UserError` that names the place `where` if it has none."""
    try:
        return token_ids(opened, _prompt(record))
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _prompt(record: dict[str, Any]) -> str | list[Message]:
    """Return a record's prompt: text, or messages without an answer at the end; `MalformedError` if it has none."""
    keys = [key for key in ("prompt", "text", "messages") if record.get(key) is not None]
    if keys == ["prompt"] and isinstance(record["prompt"], list):  # of messages, as for TRL
        record, keys = {**record, "messages": record["prompt"]}, ["messages"]
    if len(keys) != 1:
        given = ", ".join(map(shown, record)) or "none"
        raise MalformedError(f"has the keys {given}; give it one of prompt, text and messages")
    of_chats = ("tools", "functions", "chat_template_kwargs", *(() if keys == ["messages"] else ("system", "history")))
    if lost := [key for key in (*of_chats, *MEDIA) if record.get(key)]:
        raise MalformedError(f"{lost[0]} would be lost; take it out, or give a prompt that the template has rendered")
    if keys != ["messages"]:
        return checked_text(record[keys[0]], keys[0])
    messages = chat_of(record)["messages"]
    if messages and isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant":
        if begun := [key for key in ("prefix", "partial") if messages[-1].get(key)]:
            raise MalformedError(
                f"{begun[0]}: answers are not continued; generate with a prompt that has its beginning"
            )
        messages = messages[:-1]
    if not messages:
        raise MalformedError("messages holds nothing to answer")
    # The check is of training data, which must have an answer.
    return checked_messages([*messages, {"role": "assistant", "content": "?"}])[:-1]


def _batches(opened: Opened, rows: Sequence[list[int]], size: int) -> list[list[int]]:
    """Return for each batch the indices of its rows: at most `size` rows of similar length, the longest first.

    Rows of different length share a batch only if padding does not change what the model computes. It would where a
    model compresses blocks of tokens, because padding shifts the blocks.
    """
    order = sorted(range(len(rows)), key=lambda number: -len(rows[number]))
    mixes = has_static_cache(opened.settings)
    groups = [order] if mixes else [[*group] for _, group in groupby(order, lambda number: len(rows[number]))]
    return [group[first : first + size] for group in groups for first in range(0, len(group), size)]


def _weights(opened: Opened) -> list[tuple[str, int, int]]:
    """Return name, bytes and time of change of each weight file of a local model, to notice that it was replaced."""
    folder = expanded(opened.name)
    files = sorted(folder.rglob("*.safetensors")) if folder.is_dir() else []
    return [(str(file.relative_to(folder)), (now := file.stat()).st_size, now.st_mtime_ns) for file in files]


def _refuse_existing(out: Path) -> None:
    if os.path.lexists(out):
        raise UserError(f"--out {str(out)!r} exists; choose another")


def _finished(begun: IO[bytes], sizes: Sequence[int]) -> list[list[str]]:
    """Return the texts of each finished batch from its file; drop a last line that a killed process left unfinished.

    `sizes` are the numbers of texts of all batches. Raises `UserError` if the file was changed.
    """
    begun.seek(0)
    whole, _, rest = begun.read().rpartition(b"\n")
    if rest:
        begun.truncate(len(whole) + 1 if whole else 0)
    finished = [parse_json(line, list[str], repr(begun.name), "remove it") for line in whole.splitlines()]
    if [len(texts) for texts in finished] != list(sizes[: len(finished)]):
        raise UserError(f"{begun.name!r} was changed after it was written; remove it")
    return finished
