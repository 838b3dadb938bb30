"""`vllm_rollouts`: GRPO completions from a vLLM server, which gets the adapter after each update."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from moetune.adapt.build import Adapted
from moetune.errors import UserError, one_line
from moetune.exporting.export import export

_TIMEOUT = 3600
"""Seconds for an answer, which has all completions of a step."""


def vllm_rollouts(
    adapted: Adapted, folder: Path | str, address: str = "http://127.0.0.1:8000"
) -> Callable[[list[Any], Any], dict[str, list[Any]]]:
    """Return what `GRPOTrainer` takes as `rollout_func`: a vLLM server generates, with the policy of each step.

    Before the first rollouts, and again when the trainer has made a step, the model's LoRA factors are exported to
    `folder`, and the server loads them under a new name, so that no cache holds what an earlier policy computed. The
    sampling settings are those of the trainer's arguments. The server has the base beside the adapter, needs
    `--enable-lora`, `--max-lora-rank` and `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`, and can read `folder`.

    Raises:
        UserError: when called, if the server does not answer or refuses, or the factors cannot be exported for vLLM.
    """
    loaded: list[str] = []

    def load(step: int) -> None:
        export(adapted, "vllm", folder, overwrite=True)
        _post(address, "/v1/load_lora_adapter", lora_name=f"step-{step}", lora_path=str(Path(folder).absolute()))
        loaded.append(f"step-{step}")
        if len(loaded) > 1:
            _post(address, "/v1/unload_lora_adapter", lora_name=loaded.pop(0))

    def rollouts(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        if f"step-{trainer.state.global_step}" not in loaded:
            load(trainer.state.global_step)
        tokenizer, args = trainer.processing_class, trainer.args
        ids = [
            tokenizer(prompt)["input_ids"]
            if isinstance(prompt, str)
            else tokenizer.apply_chat_template(prompt, add_generation_prompt=True, **trainer.chat_template_kwargs)[
                "input_ids"
            ]
            for prompt in prompts
        ]
        sampling = {name: getattr(args, name) for name in ("temperature", "top_p", "min_p", "repetition_penalty")}
        answer = _post(
            address, "/v1/completions", model=loaded[-1], prompt=ids, max_tokens=args.max_completion_length,
            top_k=args.top_k or -1, logprobs=0, return_token_ids=True,
            **{name: value for name, value in sampling.items() if value is not None},
        )  # fmt: skip
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        logprobs = [choice["logprobs"]["token_logprobs"] for choice in choices]
        return {"prompt_ids": ids, "completion_ids": [choice["token_ids"] for choice in choices], "logprobs": logprobs}

    return rollouts


def _post(address: str, path: str, **body: Any) -> Any:
    """Return what a server answers; `UserError` with its words if it refuses or is not there."""
    request = Request(f"{address}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=_TIMEOUT) as answer:
            text = answer.read().decode()
    except (URLError, OSError) as error:
        said = error.read().decode() if isinstance(error, HTTPError) else error
        raise UserError(
            f"the vLLM server at {address} did not answer {path}: {one_line(Exception(said))}; start it with "
            "--enable-lora, --max-lora-rank and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
        ) from None
    return json.loads(text) if text.startswith("{") else text
