"""`moetune serve`: print and start the commands with which vLLM or llama.cpp serves."""

from typing import Annotated, Any

from moetune.cli.options import Json, Opens, answer, choice, flag, heavy_imports, known_gpu, number, option, target
from moetune.errors import note


def serve(
    model: Opens,
    with_: Annotated[Any, choice("vllm|llama.cpp", "The program that serves it.", "--with")],
    requests: Annotated[int, number("Requests to answer at once, each with the whole context.", metavar="N")] = 8,
    gpu: Annotated[
        str | None, option(None, "A GPU such as l40s, or 44GiB. Default: this machine's.", check=known_gpu)
    ] = None,
    name: Annotated[str, option("NAME", "The name by which requests choose the adapter.")] = "mine",
    port: Annotated[int, number("Port on 127.0.0.1.", 1, 65535)] = 8000,
    dry_run: Annotated[bool, flag("--dry-run", "Only print the commands.")] = False,
    json_: Json = False,
) -> None:
    """Print the commands with which a program serves a run, an export or a base, with the options that it needs, and
    call them if the program is installed. Of a run the adapter is exported first, to RUN_DIR-served. Exit code 1: the
    GPU has no room for this many requests."""
    with heavy_imports():
        from moetune.inference.serving import serving

    _, card = target(gpu)
    plan = serving(model, with_, name=name, requests=requests, port=port, gpu=card)
    starts = not (dry_run or json_ or plan.missing)
    note(*plan.notes)
    if plan.missing and not (dry_run or json_):
        note(f"not installed here, so nothing is started: {', '.join(plan.missing)}")
    answer(json_, plan.to_json(), plan.text())
    if starts:
        plan.start()
