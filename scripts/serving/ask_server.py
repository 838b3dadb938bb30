"""Runs docs/guides/serve.md with servers: `python ask_server.py ENVIRONMENT PLUGIN LLAMA_CPP`.

The commands of the page are run, with a chat template that is not the base's, and `moetune serve` starts vLLM's server
and llama.cpp's, in float32. The adapter, the base and a chat request must answer as moetune does. A server is ended
as by Ctrl-C, and must end. LLAMA_CPP has llama.cpp's converters.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

HERE = Path(__file__).parent.absolute()
ROOT = HERE.parents[1]
PROMPTS = ("GREEK SMALL LETTER", "LATIN CAPITAL LETTER A WITH", "The router")
CHAT = [{"role": "user", "content": "Say a name."}]
TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{{ message['role'] + ': ' + message['content'] + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'assistant: ' }}{%- endif -%}
"""


def moetune(line: str) -> str:
    """Run a command of moetune, given without the program's name; return what it prints."""
    done = subprocess.run([sys.executable, "-m", "moetune", *line.split(" ")], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"moetune {line}: exit code {done.returncode}\n{done.stderr}")
    return done.stdout


def post(address: str, path: str, **body: Any) -> Any:
    request = Request(f"{address}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=120) as answer:
        text = answer.read().decode()
    return json.loads(text) if text.startswith("{") else text


def ended(*_: object) -> None:
    sys.exit("ended from outside")


def compared(name: str, asked: Callable[[str, str], str], rendered: Callable[[], list[int]]) -> list[str]:
    """Return a line for each answer of a server that is not moetune's.

    `asked` gives what the adapter ("mine") or the "base" writes after a prompt, `rendered` the tokens of CHAT.
    """
    from moetune.inference.generate import generate, token_ids
    from moetune.inference.opened import open_model

    wrong = []
    run, base = open_model("runs/names", device="cpu"), open_model("tiny-mixtral", device="cpu", dtype="fp32")
    answers = {}
    for model, opened in (("mine", run), ("base", base)):
        for prompt in PROMPTS:
            answers[model, prompt] = text = asked(model, prompt).strip()
            expected = generate(opened, prompt, max_new_tokens=16, temperature=0.0, seed=0).strip()
            print(f"{name}, {model}: {prompt!r} -> {text!r}")
            if text != expected:
                wrong.append(f"{name}, {model}: {prompt!r}: {text!r}, moetune {expected!r}")
    if any(answers["mine", prompt] == answers["base", prompt] for prompt in PROMPTS):
        wrong.append(f"{name}: the adapter answers as its base does, so it shows nothing")
    ids, of_run, of_base = rendered(), token_ids(run, CHAT), token_ids(base, CHAT)
    if ids != of_run or ids == of_base:
        wrong.append(f"{name}, chat: {ids}, moetune {of_run}, with the base's template {of_base}")
    print(f"{name}, chat: {len(ids)} tokens")
    return wrong


def of_vllm(address: str) -> list[str]:
    def asked(model: str, prompt: str) -> str:
        body = {"model": model, "prompt": prompt, "max_tokens": 16, "temperature": 0}
        return str(post(address, "/v1/completions", **body)["choices"][0]["text"])

    return compared("vLLM", asked, lambda: post(address, "/tokenize", model="mine", messages=CHAT)["tokens"])


def of_llama(address: str) -> list[str]:
    def asked(model: str, prompt: str) -> str:
        body = {"prompt": prompt, "n_predict": 16, "temperature": 0, "lora": [{"id": 0, "scale": int(model == "mine")}]}
        return str(post(address, "/completion", **body)["content"])

    def rendered() -> list[int]:
        text = post(address, "/apply-template", messages=CHAT)["prompt"]
        ids = list(post(address, "/tokenize", content=text, add_special=True, parse_special=True)["tokens"])
        usage = post(address, "/v1/chat/completions", messages=CHAT, max_tokens=1)["usage"]
        return ids if len(ids) == usage["prompt_tokens"] else [*ids, -1]  # what a request is really given

    return compared("llama.cpp", asked, rendered)


def write_programs(folder: Path, environment: Path, llama: Path) -> None:
    """Write the programs that `moetune serve` calls: those of the environments, which have them under other names."""
    of_vllm, of_others = (environment / name / "bin/python" for name in ("vllm", "others"))
    # The wheel's `vllm serve` looks for a distribution of the name vllm.
    served = f"{of_vllm} -m vllm.entrypoints.openai.api_server --enforce-eager --served-model-name base --model"
    lines = {
        "vllm": f'shift; exec {served} "$@" --dtype float32',
        "llama-server": f'exec {of_others} {HERE}/llama_server.py "$@"',
    }
    for name in ("convert_hf_to_gguf.py", "convert_lora_to_gguf.py"):
        lines[name] = f'exec {of_vllm} {HERE}/to_gguf.py --script {name} {llama} "$@" --outtype f32'
    folder.mkdir()
    for name, line in lines.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)


def served(command: list[str], settings: dict[str, str], address: str, ask: Callable[[str], Any]) -> Any:
    """Start a server, return what `ask` finds at its address, and end it."""
    with Path("server.log").open("w") as log:
        server = subprocess.Popen(
            command, env=os.environ | settings, stdout=log, stderr=log, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # what a shell starts with & ignores it
        )  # fmt: skip
    try:
        for _ in range(1500):  # a busy machine takes minutes
            try:
                urlopen(f"{address}/health", timeout=5)
                break
            except (URLError, OSError):
                if server.poll() is not None:
                    sys.exit("the server ended:\n" + Path("server.log").read_text()[-3000:])
                time.sleep(1)
        return ask(address)
    finally:
        os.killpg(server.pid, signal.SIGINT)  # Ctrl-C
        try:
            server.wait(timeout=300)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            raise


def by_moetune(what: str, program: str, port: int, ask: Callable[[str], list[str]], plugin: Path) -> list[str]:
    """Return what `ask` finds of `moetune serve`."""
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_PLUGINS": "cpu_moe_lora"}
    settings["PYTHONPATH"] = f"{plugin}:{os.environ.get('PYTHONPATH', '')}"
    settings["PATH"] = f"{Path('bin').absolute()}:{os.environ['PATH']}"
    command = [sys.executable, "-m", "moetune", "serve", what, "--with", program, "--port", str(port)]
    return served(command, settings, f"http://127.0.0.1:{port}", ask)


def main(environment: Path, plugin: Path, llama: Path) -> int:
    write_programs(Path("bin"), environment, llama)
    Path("chat.jinja").write_text(TEMPLATE)
    page = (ROOT / "docs" / "guides" / "serve.md").read_text(encoding="utf-8")
    for block in re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            trains = line.startswith("moetune train")
            moetune(line.removeprefix("moetune ") + (" --set data.chat_template=chat.jinja" if trains else ""))
    wrong = by_moetune("runs/names", "vllm", 8123, of_vllm, plugin)
    wrong += by_moetune("out/names-vllm", "llama.cpp", 8124, of_llama, plugin)
    print(*wrong, sep="\n", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    arguments = [Path(path).absolute() for path in sys.argv[1:]]
    signal.signal(signal.SIGTERM, ended)  # so that the server is ended too
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.symlink(ROOT / "configs", "configs")
        sys.exit(main(*arguments))
