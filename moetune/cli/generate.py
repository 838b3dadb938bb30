"""The commands `moetune generate` and `moetune chat`: print text that a run, an adapter or a checkpoint generates."""

from __future__ import annotations

import sys
from typing import Annotated

from moetune.cli.options import Json, KeepQuantized, Opens, answer, flag, heavy_imports, number, opened, option, utf8
from moetune.errors import UserError


def temperature_in_range(value: float) -> float:
    """Return a temperature that is 0 or from 0.001 to 1000; raise `UserError` for any other value."""
    if value == 0 or 1e-3 <= value <= 1e3:
        return value
    raise UserError(f"--temperature {value}: it is 0, or from 0.001 to 1000")


MaxNewTokens = Annotated[int, number("Tokens to write at most.", metavar="N")]
Temperature = Annotated[
    float, option(None, "0 takes the likeliest token; higher ones draw.", check=temperature_in_range)
]
Seed = Annotated[int, number("Of what is drawn.", 0, 2**63 - 1)]


def generate(
    model: Opens,
    prompt: Annotated[str, option("TEXT", "What to go on from.", check=utf8)],
    chat: Annotated[bool, flag("--chat", "Take the prompt as a message for the chat template.")] = False,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    base: KeepQuantized = None,
    json_: Json = False,
) -> None:
    """Let a run, an adapter, a merged checkpoint or a base go on from a prompt. A run needs no merge."""
    with heavy_imports():
        from moetune.inference.generate import generate as go_on

    asked = [{"role": "user", "content": prompt}] if chat else prompt
    text = go_on(
        opened(model, base), asked, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, stream=not json_
    )
    answer(json_, {"schema": 1, "model": model, "prompt": prompt, "text": text})


def chat(
    model: Opens,
    system: Annotated[str | None, option("TEXT", "What the model is told first.", check=utf8)] = None,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.7,
    seed: Seed = 0,
    base: KeepQuantized = None,
) -> None:
    """Talk with a run, an adapter, a merged checkpoint or a base. An empty line or Ctrl-D ends it."""
    with heavy_imports():
        from moetune.inference.generate import generate as go_on

    model_ = opened(model, base)
    messages = [{"role": "system", "content": system}] if system else []
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = (utf8(sys.stdin.readline()) or "").strip()
        if not line:
            return
        messages.append({"role": "user", "content": line})
        text = go_on(model_, messages, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, stream=True)
        messages.append({"role": "assistant", "content": text})
