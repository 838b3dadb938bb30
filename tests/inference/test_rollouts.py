"""GRPO's rollouts from a vLLM server; scripts/serving/ask_grpo.py compares those of a real one with the policy's."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moetune.errors import UserError
from moetune.inference.rollouts import vllm_rollouts
from tests.exporting.runs import LORA, write_base, write_run


class Recorder(BaseHTTPRequestHandler):
    """Answers as vLLM does, with the prompt's last id as the one that is drawn, and notes what it is asked."""

    asked: list[tuple[str, dict[str, Any], dict[str, torch.Tensor]]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        path = body.get("lora_path")
        loaded = load_file(Path(path) / "adapter_model.safetensors") if path else {}
        self.asked.append((self.path, body, loaded))
        text = b"Success"
        if self.path == "/v1/completions":
            choices = [
                {"index": place, "token_ids": [ids[-1]], "logprobs": {"token_logprobs": [-0.5]}}
                for place, ids in enumerate(body["prompt"])
            ]
            text = json.dumps({"choices": choices[::-1]}).encode()
        self.send_response(404 if body.get("temperature") == 9 else 200)
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    Recorder.asked = []
    server = HTTPServer(("127.0.0.1", 0), Recorder)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def trainer(step: int, temperature: float = 0.7) -> Any:
    args = SimpleNamespace(
        temperature=temperature, top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0, max_completion_length=5
    )
    tokenizer = SimpleNamespace(apply_chat_template=lambda chat, **_: {"input_ids": [len(chat), 7]})
    return SimpleNamespace(
        state=SimpleNamespace(global_step=step), args=args, processing_class=tokenizer, chat_template_kwargs={}
    )


def test_the_server_gets_the_adapter_of_each_step(tmp_path: Path, address: str) -> None:
    adapted = write_run(tmp_path / "run", write_base(tmp_path / "base", "mixtral"), {"lora": LORA}).adapted
    rollouts = vllm_rollouts(adapted, tmp_path / "adapter", address)
    chat = [{"role": "user", "content": "?"}]
    assert rollouts([chat, [*chat, *chat]], trainer(0)) == {
        "prompt_ids": [[1, 7], [2, 7]],
        "completion_ids": [[7], [7]],
        "logprobs": [[-0.5], [-0.5]],
    }
    rollouts([chat], trainer(0))
    with torch.no_grad():
        for factor in adapted.trainable().values():
            factor += 1
    rollouts([chat], trainer(1))
    paths = [path.rpartition("/")[2] for path, _, _ in Recorder.asked]
    load, unload, ask = "load_lora_adapter", "unload_lora_adapter", "completions"
    assert paths == [load, ask, ask, load, unload, ask]
    bodies = [body for _, body, _ in Recorder.asked]
    assert [bodies[place]["model"] for place in (1, 2, 5)] == ["step-0", "step-0", "step-1"]
    assert (bodies[4]["lora_name"], bodies[1]["top_k"], bodies[1]["max_tokens"]) == ("step-0", -1, 5)
    assert "min_p" not in bodies[1]
    first, second = (Recorder.asked[place][2] for place in (0, 3))
    assert first.keys() == second.keys() != set()
    assert not any(first[name].equal(second[name]) for name in first if first[name].any())


def test_a_server_that_refuses_or_is_not_there_is_named(tmp_path: Path, address: str) -> None:
    adapted = write_run(tmp_path / "run", write_base(tmp_path / "base", "mixtral"), {"lora": LORA}).adapted
    chat = [{"role": "user", "content": "?"}]
    with pytest.raises(UserError, match=r"/v1/completions: .*--enable-lora"):
        vllm_rollouts(adapted, tmp_path / "adapter", address)([chat], trainer(0, temperature=9))
    with pytest.raises(UserError, match=r"127\.0\.0\.1:9 did not answer /v1/load_lora_adapter"):
        vllm_rollouts(adapted, tmp_path / "adapter", "http://127.0.0.1:9")([chat], trainer(0))
