"""GRPO with a vLLM server as its generator: `python ask_grpo.py ENVIRONMENT PLUGIN`.

tiny-mixtral learns by TRL's GRPOTrainer with `moetune.vllm_rollouts`, in float32 on a CPU. The log-probability that the
server gives to every token that it drew must be that of the model in training, at each step; it must not be if the
server keeps the first policy, which is asked too.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from ask_server import post, served, write_programs
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import moetune

ADDRESS = "http://127.0.0.1:8125"
STEPS = 4
CLOSE = 1e-3
"""Largest difference of a log-probability of the same policy, in float32."""
PROMPTS = ["U+00E9 LATIN SMALL", "The router", "def main", "GREEK"]
RUN: dict[str, Any] = {
    "model": {"path": "tiny-mixtral", "base": "fp32", "dtype": "fp32"},
    "adapt": {"lora": {"rank": 8, "alpha": 16, "targets": ["attention", "experts"]}},
    "optimizer": {"name": "adamw", "lr": 1e-2},
    "train": {"micro_batch": 4, "accumulate": 2, "sequence_length": 48, "steps": STEPS},
    "output": "runs/grpo",
}


@torch.no_grad()
def of_model(model: Any, output: dict[str, list[Any]]) -> float:
    """Return the largest difference of the server's log-probabilities from the model's."""
    model.eval()
    largest = 0.0
    columns = (output[key] for key in ("prompt_ids", "completion_ids", "logprobs"))
    for prompt, completion, told in zip(*columns, strict=True):
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        own = torch.log_softmax(logits.float(), -1).gather(-1, torch.tensor(completion)[:, None])[:, 0]
        largest = max(largest, float((own - torch.tensor(told)).abs().max()))
    model.train()
    return largest


def main(environment: Path, plugin: Path) -> int:
    adapted = moetune.build(moetune.resolve(moetune.RunConfig.model_validate(RUN)), "cpu")
    write_programs(Path("bin"), environment, Path())
    command = ["bin/vllm", "serve", adapted.run.model.source.folder, "--enable-lora", "--max-lora-rank", "8"]
    command += ["--max-loras", "3", "--max-model-len", "64", "--port", ADDRESS.rpartition(":")[2]]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_PLUGINS": "cpu_moe_lora"}
    settings["PYTHONPATH"] = str(plugin)
    return served([*map(str, command)], settings, ADDRESS, lambda _: asked(adapted))


def asked(adapted: Any) -> int:
    rollouts = moetune.vllm_rollouts(adapted, "adapter", ADDRESS)
    differences, of_first = [], []

    def watched(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        output = rollouts(prompts, trainer)
        differences.append(of_model(trainer.model, output))
        if not of_first:  # the policy before the first update, which a server that ignores updates would keep
            moetune.export(adapted, "vllm", "first")
            post(ADDRESS, "/v1/load_lora_adapter", lora_name="first", lora_path=str(Path("first").absolute()))
        choices = post(
            ADDRESS, "/v1/completions", model="first", prompt=output["prompt_ids"], max_tokens=8, temperature=1,
            logprobs=0, return_token_ids=True,
        )["choices"]  # fmt: skip
        old = {"prompt_ids": output["prompt_ids"], "completion_ids": [choice["token_ids"] for choice in choices]}
        old["logprobs"] = [choice["logprobs"]["token_logprobs"] for choice in choices]
        of_first.append(of_model(trainer.model, old))
        return output

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(text.count("E")) for text in completions]

    run = adapted.run
    trainer = GRPOTrainer(
        adapted.model, reward_funcs=reward, rollout_func=watched, train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        args=GRPOConfig(**moetune.trl_arguments(run, "grpo") | {"use_cpu": True}),
        processing_class=moetune.trl_tokenizer(run),
    )  # fmt: skip
    trainer.train()
    print("step: difference of the server's log-probabilities from the model's; of the first policy's")
    for step, pair in enumerate(zip(differences, of_first, strict=True)):
        print(f"{step}: {pair[0]:.1e}; {pair[1]:.2f}")
    is_right = len(differences) >= STEPS and max(differences) < CLOSE and min(of_first[1:]) > 20 * CLOSE
    return int(not is_right)


if __name__ == "__main__":
    arguments = [Path(path).absolute() for path in sys.argv[1:]]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.exit(main(*arguments))
