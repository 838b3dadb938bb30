"""What public memory estimators answer for runs whose peak is known: docs/benchmarks/estimators.md.

    python scripts/bench/estimators.py --json docs/benchmarks/estimators.json

Makes an environment with the pinned packages (a gigabyte, three minutes), and asks each of them as estimators_asked.py
says. They ask the hub for a model; here a server on loopback answers what the hub does: `config.json` and the published
number of parameters, from moetune's catalog. The known answers are what torch's allocator counted (`CUDA_CASES` of
predict_vs_measured.py on capability 9.0), and moetune's is its own prediction. With a JSON file that is there, only
tools that it lacks are asked.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from _common import ROOT, commit, write_json, write_table
from predict_vs_measured import CUDA_CASES

from moetune.models.catalog import find_model

PAGE = ROOT / "docs/benchmarks/estimators.md"
MEASURED = ROOT / "docs/benchmarks/predict_vs_measured_cuda_90.json"
GiB = 2**30
PACKAGES = {
    "accelerate": "accelerate==1.15.0",
    "deepspeed": "deepspeed==0.19.8",
    "hf_vram_calc": "hf-vram-calc==1.0.9",
    "qmemcalc": "qmemcalc==0.1.1",
    "canifinetune": "canifinetune==0.4.1",
    "ftuneai": "ftuneai==0.4.1",
    "tinyforge": "tinyforge==0.1.2",
    "loggetta": "loggetta==0.7.0",
    "vramcalc": "vramcalc==0.1.2",
    "alloc": "alloc==0.0.16",
}
WITH = (
    "torch==2.13.0", "transformers==5.23.0", "bitsandbytes==0.50.2", "experts4bit-qlora==0.58.1",
    "grouped-nf4-gemm==0.51.0", "typer", "rich", "pydantic", "pyyaml", "httpx", "platformdirs", "psutil", "requests",
)  # fmt: skip
LORA = {  # case -> rows, tokens a row, the projections whose adapters the tool is asked for
    "mixtral-8x7b-lora": (2, 2048, "all_linear"),
    "qwen3-30b-a3b-lora": (2, 2048, "all_linear"),
    "gpt-oss-20b-lora": (1, 2048, "all_linear"),
    "deepseek-v2-lite-lora": (1, 4096, "all_linear"),
    "llama-3-8b-lora-1x8192": (1, 8192, "attention"),
}
UNASKED = ("mixtral-8x7b-router", "mixtral-8x7b-experts", "olmoe-1b-7b-experts")
"""Runs of which no other tool can be asked: routers, and chosen experts of chosen layers."""


class Hub(BaseHTTPRequestHandler):
    """The hub's answers to what the tools ask of it: a model's configuration and the size of its weights."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/").removeprefix("api/models/").split("/")
        entry, commit_name = find_model("/".join(path[:2])), "0" * 40
        headers, status, body = {"Content-Type": "application/json"}, 200, b""
        if entry is None or (path[2:3] == ["resolve"] and path[4:] != ["config.json"]):
            status, headers["X-Error-Code"] = 404, "RepoNotFound" if entry is None else "EntryNotFound"
        elif path[2:3] == ["resolve"]:
            body = json.dumps(entry.config).encode()
            headers |= {"ETag": '"config"', "X-Repo-Commit": commit_name}
        else:
            total, config = entry.published["total"], entry.config
            about = {"architectures": config["architectures"], "model_type": config["model_type"]}
            weights = {"parameters": {"BF16": total}, "total": total}
            body = json.dumps(
                {"id": entry.hub_id, "sha": commit_name, "private": False, "gated": False, "disabled": False,
                 "library_name": "transformers", "tags": ["transformers", "safetensors"], "config": about,
                 "siblings": [{"rfilename": "config.json"}], "safetensors": weights}
            ).encode()  # fmt: skip
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        pass


def environment(folder: Path) -> Path:
    """Install the estimators into a new environment in `folder`, and return its Python."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin/python"
    install = [str(python), "-m", "pip", "install", "--quiet"]
    variables = os.environ | {"DS_BUILD_OPS": "0"}
    subprocess.run([*install, WITH[0], "setuptools"], check=True)
    subprocess.run([*install, *WITH[1:3], *WITH[5:], PACKAGES["accelerate"]], check=True)
    subprocess.run([*install, "--no-build-isolation", PACKAGES["deepspeed"]], check=True, env=variables)
    # Without what they need to train.
    rest = [package for tool, package in PACKAGES.items() if tool not in ("accelerate", "deepspeed")]
    subprocess.run([*install, "--no-deps", *WITH[3:5], *rest], check=True)
    subprocess.run([*install, "nvidia-ml-py"], check=True)
    return python


def asked(python: Path, tool: str, case: str, home: str, endpoint: str) -> dict[str, Any]:
    """Return what a tool answers: {"gib", "count", "note"}, or {"refused": its message}."""
    config = CUDA_CASES[case]()
    entry = find_model(str(config.model.path))
    assert entry is not None
    rows, length, targets = LORA[case]
    words = [tool, entry.hub_id, str(entry.published["total"]), str(rows), str(length), targets]
    variables = {"HF_ENDPOINT": endpoint, "HF_HOME": home, "HOME": home, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [python, Path(__file__).with_name("estimators_asked.py"), *words],
        env=os.environ | variables, capture_output=True, text=True, check=False, cwd=home,
    )  # fmt: skip
    if done.returncode:
        return {"refused": done.stderr.strip().splitlines()[-1].removeprefix("RuntimeError: ")}
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def moetune(case: str) -> dict[str, Any]:
    from moetune import predict

    report = predict(CUDA_CASES[case](), gpu="h100-80gb")
    return {"gib": max(rank.peak_allocated for rank in report.ranks) / GiB}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    measured = {row["case"]: row["measured"]["allocated"] for row in json.loads(MEASURED.read_text())["cases"]}
    report = {"schema": 1, "benchmark": "estimators", "versions": [*PACKAGES.values(), *WITH[:5]], "answers": {}}
    if options.json.exists():
        report = json.loads(options.json.read_text(encoding="utf-8"))
    report["measured"] = {case: measured[case] for case in (*LORA, *UNASKED)}
    report["commit"] = commit()
    report["answers"]["moetune"] = {case: moetune(case) for case in (*LORA, *UNASKED)}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        left = [tool for tool in PACKAGES if tool not in report["answers"]]
        python = environment(Path(folder, "venv")) if left else Path()
        for tool in left:
            endpoint = f"http://127.0.0.1:{server.server_port}"
            report["answers"][tool] = {case: asked(python, tool, case, folder, endpoint) for case in LORA}
            write_json(report, options.json)
            print(tool, json.dumps(report["answers"][tool]), file=sys.stderr)
    write_json(report, options.json)
    write_table(table(report), PAGE)


def table(report: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the page's table: each tool's answer in GiB, and as a multiple of the measured peak."""
    cases = [*LORA, *UNASKED]
    yield f"| | {' | '.join(cases)} |"
    yield "|---|" + "---:|" * len(cases)
    yield "| **measured** | " + " | ".join(f"**{report['measured'][case] / GiB:.2f}**" for case in cases) + " |"
    for tool in ("moetune", *PACKAGES):
        answers, cells = report["answers"][tool], []
        for case in cases:
            answer = answers.get(case)
            if answer is None or "refused" in answer:
                cells.append("–" if answer is None else "refused")
            else:
                ratio = answer["gib"] * GiB / report["measured"][case]
                cells.append(f"{answer['gib']:,.2f} ({ratio:,.2f} ×)")
        yield f"| {PACKAGES.get(tool, tool).replace('==', ' ')} | {' | '.join(cells)} |"
    yield f"\nGiB. {', '.join(package.replace('==', ' ') for package in WITH[:3])}; moetune {report['commit'][:12]}."


if __name__ == "__main__":
    main()
