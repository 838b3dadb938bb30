"""Seeded damage: values that nobody expects, put into JSON, YAML, text and bytes; and how a reader may answer."""

import copy
import json
import random
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from moetune.errors import UserError

MOST_BYTES, MOST_SECONDS = 4096, 30.0
PUSH, ALL = 40, 2_500
"""Cases of a generator."""

HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 2**64, 10**400, 0.0, -0.0, 0.5, 1e-320, 1e300, -1e300,
    float("nan"), float("inf"), "", " ", "all", "none", "auto", "0-99999999999", "5-2", "١-٢", "1e400", "a" * 300,
    "b" * 20_000, "a/" * 3000, "\0", "run\0s", "\ud800", "~nosuchuser/x", "~", "..", "../../etc/passwd", "/etc/passwd",
    "/", "evil.bin", "x[/]y", "[bold red]", "{}", "%s", "\x1b[31m", "\u202e", "𝕏", "*", "**", "(", "model.*(", "-",
    "2025-02-30", "0x10", "1_000", "44GiB", "9" * 5000 + "GiB", "-1GiB", [], [[]], [None], [1, 2], ["a"], {}, {"": ""},
    {"a": {"b": {"c": {}}}}, {"name": "lomo"}, {"is_encoder_decoder": True}, list(range(3000)),
)  # fmt: skip
YAML_SNIPPETS = (
    "!!int ''", "!!float ''", "!!timestamp x", "!!map [1, 2]", "!!set [1]", "!!omap {a: 1}", "!!pairs 3",
    "!!binary '*'", "- " * 30_000,
    "!!bool maybe", "!!null x", "!!seq {a: 1}", "!!str {a: 1}", "!!python/object:os.system x", "!unknown 1", "&a [*a]",
    "*nowhere", "&x {<<: *x}", "{<<: 3}", "{<<: [1]}", "{? [1] : 2}", "{? {a: 1} : 2}", "9" * 5000, "0x" + "f" * 5000,
    "0b" + "1" * 20_000, "190:20:30.15", "1:" * 3000 + "1", ".inf", "-.inf", ".nan", "~", '"\\0"', '"\\ud800"',
    "'", '"', "[", "{", "]", "}", ":", "- -", "|", ">", "%", "@", "`", "\t", "---", "...", "[" * 2000, "{a: " * 500,
    "2001-12-14t21:59:43.10-05:00", "2001-99-99", "2025-02-30", "!!timestamp 2001-01-01T99:99:99", "=", "<<",
)  # fmt: skip
BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    + ["model: {path: *a11}"]
)


def cases(config: Any, push: int = PUSH) -> range:
    """The seeds of a test: some on a push, thousands with `--all`."""
    return range(ALL if config.getoption("--all") else push)


class TooLong(BaseException):
    """No `Exception`, which a reader could take for one of its own."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Ends what takes more time of the processor."""

    def end(*_: Any) -> None:
        raise TooLong(f"more than {seconds} s")

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def answer(seed: int, read: Callable[[], Any], what: Callable[[], str] = str) -> Any:
    """What a reader gives of damaged input, or the `UserError` that it raises; anything else fails the test."""
    try:
        with within(MOST_SECONDS):
            return read()
    except UserError as error:
        message = str(error)
        assert message.strip(), f"seed {seed}: no message"
        assert len(message.encode()) <= MOST_BYTES, f"seed {seed}: {len(message.encode())} bytes"
        assert all(c.isprintable() or c in "\n\t" for c in message), f"seed {seed}: {message!r}"
        assert "weights_only=False" not in message, f"seed {seed}: {message}"
        return error
    except (Exception, TooLong):
        raise AssertionError(f"seed {seed}\n{what()[:2000]}\n{traceback.format_exc(limit=-8)}") from None


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Every place in a tree of dicts and lists: what it is in, and under which key."""
    found: list[tuple[Any, Any]] = []
    left = [tree]
    while left:
        node = left.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        for key in keys:
            found.append((node, key))
            left.append(node[key])
    return found


def damaged(tree: Any, draw: random.Random, pool: tuple[Any, ...] = HOSTILE) -> Any:
    """A copy with a few of its values replaced, taken away, doubled or exchanged."""
    tree = copy.deepcopy(tree)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        there = places(tree)
        if not there:
            return copy.deepcopy(draw.choice(pool))
        node, key = draw.choice(there)
        kind = draw.randrange(10)
        if kind == 0:
            del node[key]
        elif kind == 1:
            other, name = draw.choice(there)
            if isinstance(other, dict) or name < len(other):
                node[key] = copy.deepcopy(other[name]) if name in other or isinstance(other, list) else None
        elif kind == 2 and isinstance(node, dict):
            new = draw.choice(pool)
            node[new if isinstance(new, str) else str(new)[:50]] = node.pop(key)
        elif kind == 3:
            node[key] = [node[key]] * draw.choice((0, 1, 2, 50))
        elif kind == 4 and isinstance(node[key], (int, float)) and abs(node[key]) < 2**60:
            node[key] = node[key] * draw.choice((-1, 0, 2, 1000, 0.5)) + draw.choice((0, 1, -1))
        elif kind == 5 and isinstance(node[key], str):
            node[key] = garbled(node[key], draw)
        elif kind == 6 and isinstance(node, dict):
            node[draw.choice(("extra", "schema", "format", "type", "model_type"))] = copy.deepcopy(draw.choice(pool))
        else:
            node[key] = copy.deepcopy(draw.choice(pool))
    return tree


def garbled(text: str, draw: random.Random) -> str:
    """A text cut short, doubled, or with a few characters changed."""
    if not text:
        return draw.choice(("", "x", "\0"))
    at = draw.randrange(len(text))
    kind = draw.randrange(5)
    if kind == 0:
        return text[:at]
    if kind == 1:
        return text[:at] + text[at + 1 :]
    if kind == 2:
        return text[:at] + draw.choice("\0\n\t{}[]:,'\"#&*!|>%@`~ é𝕏\x7f") + text[at:]
    if kind == 3:
        end = min(len(text), at + draw.randrange(1, 40))
        return text[:end] + text[at:end] + text[end:]
    return text[:at] + chr(draw.choice((0, 10, 32, 48, 65, 0x85, 0xD7FF, 0x10FFFF))) + text[at + 1 :]


def garbled_bytes(raw: bytes, draw: random.Random) -> bytes:
    """Bytes cut short, lengthened, or with a few of them changed."""
    kind = draw.randrange(5)
    if kind == 0:
        return raw[: draw.randrange(len(raw) + 1)]
    if kind == 1:
        return raw + draw.randbytes(draw.randrange(1, 40))
    if kind == 2:
        return draw.randbytes(draw.randrange(60))
    changed = bytearray(raw)
    for _ in range(draw.choice((1, 2, 8))):
        if changed:
            changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


def to_json(tree: Any) -> str:
    return json.dumps(tree)


def damaged_json(text: str, draw: random.Random) -> bytes:
    """A JSON file of which some value is another, or some character."""
    if draw.random() < 0.2:
        return garbled_bytes(text.encode(), draw)
    if draw.random() < 0.02:
        return b"[" * 100_000
    return to_json(damaged(json.loads(text), draw)).encode("utf-8", "surrogatepass")


def damaged_yaml(tree: Any, draw: random.Random) -> bytes:
    """A YAML file of which some value is another, some line, or some character."""
    kind = draw.random()
    if kind < 0.02:
        return BOMB.encode()
    if kind < 0.5:
        tree = damaged(tree, draw)
        if draw.random() < 0.3:  # JSON is YAML, and says what YAML's writer would not
            return to_json(tree).encode("utf-8", "surrogatepass")
    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=draw.random() < 0.5)
    if kind >= 0.5:
        lines = text.splitlines()
        for _ in range(draw.choice((1, 1, 2, 4))):
            at = draw.randrange(len(lines))
            key = lines[at].partition(":")[0]
            lines[at] = f"{key}: {draw.choice(YAML_SNIPPETS)}" if draw.random() < 0.8 else garbled(lines[at], draw)
        text = "\n".join(lines)
    raw = text.encode("utf-8", "surrogatepass")
    return garbled_bytes(raw, draw) if draw.random() < 0.1 else raw


def write(file: Path, raw: bytes) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(raw)
    return file
