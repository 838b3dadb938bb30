"""Asks vLLM for the next token's log-probabilities after every prefix: `python ask_vllm.py FOLDER OUT` (see cases.py).

Adapters of one base are asked in one batch, mixed with the base itself, and merged exports one after the other. OUT
gets an array of each case, or a text with the reason why there is none. Runs in vLLM's own environment.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}

import numpy as np
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of `max_lora_rank` above 1."""
STACKED = ("gpt_oss",)
"""Types whose class in vLLM reads stacked experts; of others only with `enable_mixed_moe_lora_format`."""

EMULATED = ("int4", "gptq", "awq")
"""Formats whose experts vLLM emulates, which the plugin allows on a CPU."""


def engine(model: str, model_type: str, adapters: list[str], mixed: bool = False) -> LLM:
    settings: dict[str, Any] = {}
    if adapters:
        configs = [json.loads((Path(path) / "adapter_config.json").read_text()) for path in adapters]
        rank = max(max([config["r"], *config.get("rank_pattern", {}).values()]) for config in configs)
        # rounded up to a value that vLLM takes, and no further
        # A slot to spare: on a CPU, requests of the base get the last slot's factors on linear layers (index -1).
        settings = {
            "enable_lora": True,
            "max_loras": len(adapters) + 1,
            "max_lora_rank": min(r for r in RANKS if r >= rank),
        }
        settings |= {"enable_mixed_moe_lora_format": True} if mixed else {}
    elif model_type == "gpt_oss":  # a CPU has these experts only in the plugin, with LoRA
        settings = {"enable_lora": True}
    format = model_type.partition("-")[2]
    if format in EMULATED:
        settings["moe_backend"] = "emulation"
    if model_type.startswith("deepseek"):  # the CPU's operator is wrong for [tokens, heads, size]
        settings["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
    return LLM(
        model=model, dtype="bfloat16" if format else "float32", enforce_eager=True, max_model_len=64, seed=0,
        skip_tokenizer_init=True, max_logprobs=-1, max_num_seqs=32, disable_log_stats=True,
        enable_prefix_caching=False, **settings,
    )  # fmt: skip


def ask(llm: LLM, prompts: list[list[int]], adapters: list[LoRARequest | None]) -> list[np.ndarray]:
    """Return the log-probabilities with each adapter (None: without), [prompts, tokens, vocabulary]."""
    prefixes = [{"prompt_token_ids": ids[: end + 1]} for ids in prompts for end in range(len(ids))]
    requests = [(prefix, adapter) for prefix in prefixes for adapter in adapters]  # adapters change within a batch
    how = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, detokenize=False)
    outputs = llm.generate([r[0] for r in requests], how, lora_request=[r[1] for r in requests], use_tqdm=False)
    rows = []
    for output in outputs:
        found = output.outputs[0].logprobs[0]
        rows.append([found[id].logprob for id in range(len(found))])
    shape = (len(prompts), len(prompts[0]), len(adapters), -1)
    return list(np.moveaxis(np.array(rows, np.float32).reshape(shape), 2, 0))


def write(out: Path, case: dict[str, Any], answer: np.ndarray | Exception) -> None:
    stem = case["name"]
    if isinstance(answer, Exception):
        (out / f"{stem}.txt").write_text(f"{type(answer).__name__}: {answer}")
        print(f"{stem}: {answer}"[:300], file=sys.stderr)
    else:
        np.save(out / f"{stem}.npy", answer)


def ask_group(
    out: Path, base: str, model_type: str, group: list[dict[str, Any]], mixed: bool, prompts: list[list[int]]
) -> np.ndarray:
    """Ask for all adapters of a base at once, and the base itself; return its answer."""
    llm = engine(base, model_type, [case["path"] for case in group], mixed)
    loaded: list[tuple[dict[str, Any], LoRARequest]] = []
    for number, case in enumerate(group, 1):
        request = LoRARequest(case["name"], number, case["path"], **({"is_3d_lora_weight": True} if mixed else {}))
        try:
            llm.llm_engine.add_lora(request)
            loaded.append((case, request))
        except Exception as error:
            write(out, case, error)
    answers = ask(llm, prompts, [None, *(request for _, request in loaded)])
    np.save(out / f"{model_type}-base{'-mixed' if mixed else ''}.npy", answers[0])
    for (case, _), answer in zip(loaded, answers[1:], strict=True):
        write(out, case, answer)
    return answers[0]


def main(folder: Path, out: Path) -> None:
    content = json.loads((folder / "cases.json").read_text())
    prompts, cases = content["prompts"], content["cases"]
    for base in dict.fromkeys(case["base"] for case in cases):
        of_base = [case for case in cases if case["base"] == base]
        model_type = of_base[0]["type"]
        adapters = [case for case in of_base if case["export"] == "vllm"]
        quantized = [case for case in of_base if case["export"] == "quantized"]
        as_peft = [case for case in of_base if case["export"] == "peft"]
        for group, mixed in ((adapters, False), (as_peft, model_type not in STACKED)):
            if not group:
                continue
            try:
                answer = ask_group(out, base, model_type, group, mixed, prompts)
                for case in quantized:
                    write(out, case, answer)
            except Exception as error:
                for case in [*group, *quantized]:
                    write(out, case, error)
            gc.collect()
        merged = [case for case in of_base if case["export"] == "merged" and case["kind"] == "all experts"]
        for case in merged:  # an engine each
            try:
                llm = engine(case["path"], model_type, [])
                write(out, case, ask(llm, prompts, [None])[0])
                del llm
            except Exception as error:
                write(out, case, error)
            gc.collect()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
