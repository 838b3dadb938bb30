"""`moetune generate` and `chat`: print text of a run, adapter or checkpoint."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from moetune.cli import options as cli
from moetune.errors import UserError, note


def temperature_in_range(value: float) -> float:
    """Return a temperature that is 0 or from 0.001 to 1000; raise `UserError` for any other value."""
    if value == 0 or 1e-3 <= value <= 1e3:
        return value
    raise UserError(f"--temperature {value}: give 0, or a number from 0.001 to 1000")


MaxNewTokens = Annotated[int, cli.number("Largest number of tokens to generate.", metavar="N")]
Temperature = Annotated[
    float, cli.option(None, "0: always the likeliest token; above 0: sample.", check=temperature_in_range)
]
Seed = Annotated[int, cli.number("Seed of the sampling.", 0, 2**63 - 1)]


def generate(
    context: typer.Context,
    model: cli.Opens,
    prompt: Annotated[str | None, cli.option("TEXT", "Text to continue.", check=cli.utf8)] = None,
    chat: Annotated[bool, cli.flag("--chat", "Take the prompt as a message for the chat template.")] = False,
    prompts: Annotated[
        str | None, cli.option("FILE", "Records with a prompt, text or messages: generate a text for each.")
    ] = None,
    out: Annotated[
        Path | None, cli.option("FILE.jsonl", "With --prompts: the records with their texts.", check=cli.in_a_folder)
    ] = None,
    batch: Annotated[int, cli.number("With --prompts: prompts in a batch.", metavar="N")] = 8,
    samples: Annotated[int, cli.number("With --prompts: texts for each record.", metavar="N")] = 1,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    base: cli.KeepQuantized = None,
    predict: cli.Predict = False,
    gpu: cli.OnCard = None,
    json_: cli.Json = False,
) -> None:
    """Continue a prompt, or those of a file, with a run, an adapter, a merged checkpoint or a base. A run need not be
    merged first. With --prompts, the same command continues after an interruption. Exit code 1: it needs more memory
    than there is."""
    cli.refuse_card(gpu, predict)
    if (prompt is None) == (prompts is None):
        raise UserError("give --prompt TEXT, or --prompts FILE with --out FILE.jsonl")
    if prompts is not None:
        cli.refuse_given(context, "is for --prompt; records of --prompts with messages take the chat template", "chat")
    else:
        cli.refuse_given(context, "is for --prompts FILE; --prompt is one prompt, with one text", "batch", "samples")
    if (prompts is None) != (out is None) and not (predict and out is None):
        raise UserError("--prompts FILE and --out FILE.jsonl belong together: give both, or neither")
    with cli.heavy_imports():
        from moetune.inference.completions import complete, fullest_batch
        from moetune.inference.generate import generate as go_on
        from moetune.inference.generate import token_ids
        from moetune.inference.memory import predict_generate
        from moetune.planning.at_hand import refuse_unfit, surely_below

    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    asked = [{"role": "user", "content": prompt or ""}] if chat else prompt or ""
    device, card = cli.target(gpu) if predict else (None, None)
    opened = cli.found_model(model, base, device)

    def size() -> tuple[int, int]:
        """Return the number of prompts in the largest batch, and the tokens of the longest of them."""
        if prompts is not None:
            return fullest_batch(opened, prompts, batch=batch, samples=samples)
        return 1, len(token_ids(opened, asked))

    if predict:
        try:
            rows, length = size()
        except UserError as error:
            if prompt is None:
                raise
            rows, length = 1, len(prompt.encode()) or 1
            note(f"a token is assumed for each byte of the prompt: {error}")
        report = predict_generate(opened, length, max_new_tokens, temperature, batch=rows, gpu=card)
        cli.answer_prediction(json_, report)
        return
    if opened.run is not None:
        # the prompts of a file are read after the weights; until then, one token after a prompt of one token is assumed
        length, most = (size()[1], max_new_tokens) if prompts is None else (1, 1)
        refuse_unfit(
            "generate",
            surely_below(opened.resolved.structure, length + most),
            lambda card: predict_generate(opened, length, most, temperature, gpu=card),
        )
    if prompts is not None and out is not None:
        done = complete(opened, prompts, out, batch=batch, samples=samples, **options)
        cli.answer(json_, done.to_json(), f"{done.texts:,} texts for {done.records:,} records written to {done.out}")
        return
    text = go_on(opened, asked, **options, stream=not json_)
    cli.answer(json_, {"model": model, "prompt": prompt, "text": text})


def chat(
    model: cli.Opens,
    system: Annotated[str | None, cli.option("TEXT", "System message.", check=cli.utf8)] = None,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.7,
    seed: Seed = 0,
    base: cli.KeepQuantized = None,
) -> None:
    """Chat with a run, an adapter, a merged checkpoint or a base. An empty line or Ctrl-D ends the chat."""
    with cli.heavy_imports():
        from moetune.inference.generate import generate as go_on

    opened = cli.found_model(model, base)
    _ = opened.model  # weights are read before the first message is
    messages = [{"role": "system", "content": system}] if system else []
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = (cli.utf8(sys.stdin.readline()) or "").strip()
        if not line:
            return
        messages.append({"role": "user", "content": line})
        text = go_on(opened, messages, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, stream=True)
        messages.append({"role": "assistant", "content": text})
