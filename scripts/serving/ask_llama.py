"""Asks llama.cpp's server for the next token's log-probabilities after every prefix: `python ask_llama.py FOLDER OUT`.

FOLDER is that of cases.py, and OUT has `NAME.gguf` of each merged export, adapter and base (see to_gguf.py). The
server, that of xllamacpp, listens on loopback; adapters are chosen by each request.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import xllamacpp
from llama_server import serve
from xllamacpp import Server


def ask(server: Server, prompts: list[list[int]], adapter: int | None) -> list[list[list[float]]]:
    """Return the log-probabilities with an adapter (None: without), [prompts, tokens, vocabulary]."""
    return [[_next(server, ids[: end + 1], adapter) for end in range(len(ids))] for ids in prompts]


def _next(server: Server, ids: list[int], adapter: int | None) -> list[float]:
    body: dict[str, Any] = {"prompt": ids, "n_predict": 1, "n_probs": VOCAB, "temperature": 0, "cache_prompt": False}
    body["ignore_eos"] = True  # else there is no answer where the model would end; what is reported is before that
    body["lora"] = [] if adapter is None else [{"id": adapter, "scale": 1.0}]
    request = Request(f"{server.listening_address}/completion", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urlopen(request, timeout=60) as answer:
        tokens = json.load(answer)["completion_probabilities"][0]["top_logprobs"]
    by_id = {token["id"]: token["logprob"] for token in tokens}
    return [by_id[id] for id in range(VOCAB)]


def main(folder: Path, out: Path) -> None:
    global VOCAB
    content = json.loads((folder / "cases.json").read_text())
    VOCAB = content["vocabulary"]
    prompts = content["prompts"]
    for base in dict.fromkeys(case["base"] for case in content["cases"]):
        of_base = [case for case in content["cases"] if case["base"] == base]
        adapters = [case for case in of_base if case["export"] in ("vllm", "peft")]
        adapters = [case for case in adapters if (out / f"{case['name']}.gguf").exists()]
        models = [(f"{of_base[0]['type']}-base", adapters)]
        models += [(case["name"], []) for case in of_base if case["export"] in ("merged", "quantized")]
        for name, beside in models:
            if not (file := out / f"{name}.gguf").exists():
                continue
            try:
                loras = [str(out / f"{case['name']}.gguf") for case in beside]
                server = serve(str(file), loras, 0.0, n_ctx=64, n_parallel=1, cache_prompt=False)
                for number, asked in enumerate([name, *(case["name"] for case in beside)]):
                    answer = ask(server, prompts, number - 1 if number else None)
                    np.save(out / f"{asked}.npy", np.array(answer, np.float32))
                del server
            except Exception as error:
                for asked in (name, *(case["name"] for case in beside)):
                    (out / f"{asked}.txt").write_text(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    print(xllamacpp.BUILD_INFO, file=sys.stderr)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
