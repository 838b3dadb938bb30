"""Runs docs/guides/serve.md with vLLM's server: `python ask_server.py ENVIRONMENT PLUGIN`.

The commands of the page are run, and the server that `moetune serve --with vllm` prints is started, in float32. The
adapter, the base and a chat request must answer as moetune does. The server is ended by its process id.
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
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

ROOT = Path(__file__).parents[2]
PROMPTS = ("GREEK SMALL LETTER", "LATIN CAPITAL LETTER A WITH", "The router")
CHAT = [{"role": "user", "content": "Say a name."}]


def moetune(line: str) -> str:
    """Run a command of moetune, given without the program's name; return what it prints."""
    done = subprocess.run([sys.executable, "-m", "moetune", *line.split(" ")], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"moetune {line}: exit code {done.returncode}\n{done.stderr}")
    return done.stdout


def post(address: str, path: str, **body: Any) -> Any:
    request = Request(f"{address}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=120) as answer:
        return json.load(answer)


def ended(*_: object) -> None:
    sys.exit("ended from outside")


def compared(address: str) -> list[str]:
    """Return a line for each answer of a server that is not moetune's."""
    from moetune.inference.generate import generate, token_ids
    from moetune.inference.opened import open_model

    wrong = []
    run, base = open_model("runs/names", device="cpu"), open_model("tiny-mixtral", device="cpu", dtype="fp32")
    for name, opened in (("mine", run), ("base", base)):
        for prompt in PROMPTS:
            asked = {"model": name, "prompt": prompt, "max_tokens": 16, "temperature": 0}
            text = post(address, "/v1/completions", **asked)["choices"][0]["text"]
            expected = generate(opened, prompt, max_new_tokens=16, temperature=0.0, seed=0)
            print(f"{name}: {prompt!r} -> {text!r}")
            if text.strip() != expected.strip():
                wrong.append(f"{name}: {prompt!r}: {text!r}, moetune {expected!r}")
    ids = post(address, "/tokenize", model="mine", messages=CHAT)["tokens"]
    if ids != token_ids(run, CHAT):
        wrong.append(f"chat: {ids}, moetune {token_ids(run, CHAT)}")
    print(f"chat: {len(ids)} tokens")
    return wrong


def main(environment: Path, plugin: Path) -> int:
    page = (ROOT / "docs" / "guides" / "serve.md").read_text(encoding="utf-8")
    for block in re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            moetune(line.removeprefix("moetune "))
    plan = json.loads(moetune("serve runs/names --with vllm --dry-run --json --port 8123"))
    model, *options = plan["commands"][-1][2:]
    options[options.index("--dtype") + 1] = "float32"
    # The wheel's `vllm serve` looks for a distribution of the name vllm.
    command = [str(environment / "vllm/bin/python"), "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += [*options, "--enforce-eager", "--served-model-name", "base"]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": str(plugin), "VLLM_PLUGINS": "cpu_moe_lora"}
    with Path("server.log").open("w") as log:
        server = subprocess.Popen(command, env=os.environ | settings, stdout=log, stderr=log, start_new_session=True)
    address = "http://127.0.0.1:8123"
    try:
        for _ in range(300):
            try:
                urlopen(f"{address}/health", timeout=5)
                break
            except (URLError, OSError):
                if server.poll() is not None:
                    sys.exit("the server ended:\n" + Path("server.log").read_text()[-3000:])
                time.sleep(1)
        wrong = compared(address)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=60)
    print(*wrong, sep="\n", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    environment, plugin = Path(sys.argv[1]).absolute(), Path(sys.argv[2]).absolute()
    signal.signal(signal.SIGTERM, ended)  # so that the server is ended too
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.symlink(ROOT / "configs", "configs")
        sys.exit(main(environment, plugin))
