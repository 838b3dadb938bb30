"""Writes toy bases, their exports and what transformers and PEFT compute of them: `python cases.py FOLDER [TYPE …]`.

For each model type and kind of adapter, `FOLDER/TYPE/KIND/` has the adapter as stock PEFT reads it (`peft`), as moetune
writes it for vLLM (`vllm`) and merged into the base (`merged`), and the same of three faults: experts in another order
(`order`), gate in the place of up (`gate_up`), and a file without alpha (`alpha`). `FOLDER/cases.json` lists them, and
`FOLDER/expected/` has the log-probabilities of the next token after every prefix of the prompts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from formats import write_formats
from peft import PeftModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moetune.adapters.factors import DOWN, GATE_UP, Adapter, Factors
from moetune.adapters.files import open_adapter, write_adapter
from moetune.adapters.read import read
from moetune.errors import UserError
from moetune.exporting.adapter import _open_base, check_adapter, convert_adapter, merge_adapter
from moetune.exporting.export import export
from tests.adapters.made import stored_as
from tests.exporting.runs import write_base, write_run

VOCAB = 288

TYPES = ("mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "glm4_moe", "gpt_oss", "deepseek_v3")
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
"""Types with multi-head latent attention, on whose `kv_b_proj` vLLM applies no factors."""
SIZES: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 2, "head_dim": 32, "vocab_size": VOCAB}
"""vLLM's attention on a CPU has heads of 32 and more."""
AS_PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"norm_topk_prob": True},
    "olmoe": {"num_key_value_heads": 4},
    "gpt_oss": {"head_dim": 64},
    "deepseek_v3": {
        **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "head_dim"), 64),
        "kv_lora_rank": 512,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
}
"""What published models of a type have, unlike the defaults of its configuration, and a program takes for granted."""
PROMPTS = 2
TOKENS = 16


def kinds(model_type: str) -> dict[str, dict[str, Any]]:
    """Return kind -> `adapt.lora` of the run."""
    attention = ["q_proj", "o_proj"] if model_type in LATENT else ["attention"]
    if model_type in LATENT[1:]:
        attention = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
    both = {"rank": 4, "alpha": 10, "targets": [*attention, "experts"]}
    every = {
        "all experts": both,
        "some experts": {"rank": 4, "alpha": 200, "targets": ["experts"], "layers": "1", "ids": [1, 4, 6]},
        "unequal ranks": {**both, "rank": {name: 2 if name == "experts" else 6 for name in both["targets"]}},
        "split gate and up": {**both, "rank": 8, "alpha": 20, "gate_up": "split"},
        "rslora": {**both, "rslora": True},
        "shared outer factors": {**both, "share": "outer"},
        "bf16 factors": {**both, "dtype": "bf16"},
    }
    if model_type not in LATENT:
        ranks = {"q_proj": 2, "k_proj": 4, "v_proj": 4, "o_proj": 6}
        every["attention"] = {"rank": ranks, "alpha": 10, "rslora": True, "targets": list(ranks)}
    else:
        every["o_proj and experts"] = {**both, "targets": ["o_proj", "experts"]}
    if model_type != "gpt_oss":
        every["router"] = {**both, "targets": [*both["targets"], "router"]}
    return every


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of bytes, which llama.cpp's converter wants beside the weights."""
    special = ["<unk>", "<s>", "</s>", "[gMASK]", "<|user|>", "<|endoftext|>", "<|observation|>"]
    # bytes of ASCII: llama.cpp's server does not report tokens that are a part of a character
    names = special + sorted(
        name for name in pre_tokenizers.ByteLevel.alphabet() if ord(name) < 127 or 255 < ord(name) < 290
    )
    names += ["Ġt"]  # llama.cpp wants at least one merge
    names += [f"<|{number}|>" for number in range(VOCAB - len(names))]
    tokenizer = Tokenizer(models.BPE({name: id for id, name in enumerate(names)}, [("Ġ", "t")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)


def prompts() -> list[list[int]]:
    """Return the prompts as ids of the toys' vocabulary, without special tokens."""
    return torch.randint(3, VOCAB, (PROMPTS, TOKENS), generator=torch.Generator().manual_seed(3)).tolist()


def plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def log_probabilities(model: Any) -> np.ndarray:
    """Return the log-probabilities of the next token after every prefix, [prompts, tokens, vocabulary]."""
    return torch.log_softmax(model(input_ids=torch.tensor(prompts())).logits.float(), -1).numpy()


def faulty(adapter: Adapter, base: Any) -> Iterator[tuple[str, Adapter]]:
    """Yield (fault, adapter with it)."""
    order, gate_up, alpha = {}, {}, {}
    for path, own in adapter.experts.items():
        shape = base.layers[path].shape
        order[path] = {name: Factors(f.A.roll(1, 0), f.B.roll(1, 0), f.scale) for name, f in own.items()}
        B = own[GATE_UP].B.clone()
        gate, up = shape.gate_and_up
        B[:, gate], B[:, up] = own[GATE_UP].B[:, up], own[GATE_UP].B[:, gate]
        gate_up[path] = {GATE_UP: Factors(own[GATE_UP].A, B, own[GATE_UP].scale), DOWN: own[DOWN]}
        alpha[path] = {name: Factors(f.A, f.B, 1.0) for name, f in own.items()}
    linears = {name: Factors(f.A, f.B, 1.0) for name, f in adapter.linears.items()}
    yield "order", Adapter(adapter.linears, order)
    yield "gate_up", Adapter(adapter.linears, gate_up)
    yield "alpha", Adapter(linears, alpha)


def exports(base: Path, folder: Path, lora: dict[str, Any]) -> None:
    """Write the exports of a run on `base` whose factors have moved."""
    run = write_run(folder / "run", base, {"lora": lora})
    for name in ("peft", "vllm", "merged"):
        try:
            export(run.path, name, folder / name)
        except UserError as error:
            (folder / f"{name}.refused").write_text(str(error))


def write_case(folder: Path, base: Path, kind: str, lora: dict[str, Any]) -> list[dict[str, Any]]:
    """Write the exports of one kind, and of its faults; return them as entries of cases.json."""
    model_type, own = base.parent.name, base.parent / kind.replace(" ", "_")
    exports(base, own, lora)
    model = PeftModel.from_pretrained(plain(base), str(own / "peft")).eval()
    expected = f"{model_type}-{own.name}.npy"
    np.save(folder / "expected" / expected, log_probabilities(model))
    entry = {"type": model_type, "kind": kind, "base": str(base), "expected": expected, "fault": None}
    entries = [
        {**entry, "export": name, "path": str(own / name)}
        for name in ("vllm", "merged", "peft")
        if (own / name).is_dir()
    ]
    for each in entries:
        each["check"] = {} if each["export"] == "merged" else check_adapter(str(base), each["path"]).programs
    if kind == "all experts":
        _, of_base = _open_base(str(base))
        for fault, adapter in faulty(read(open_adapter(own / "peft"), of_base).adapter, of_base):
            tensors, settings = stored_as(adapter, of_base, "peft")
            (wrong := own / fault).mkdir()
            write_adapter(wrong, tensors, settings, {})  # without what moetune notes, by which it would be found
            convert_adapter(str(base), wrong, "vllm", own / f"{fault}-vllm", layout="peft")
            merge_adapter(str(base), wrong, own / f"{fault}-merged", layout="peft")
            paths = {"peft": wrong, "vllm": own / f"{fault}-vllm", "merged": own / f"{fault}-merged"}
            entries += [
                {**entry, "export": name, "path": str(path), "fault": fault, "check": {}}
                for name, path in paths.items()
            ]
    return entries


def main(folder: Path, types: list[str]) -> None:
    torch.set_num_threads(1)
    (folder / "expected").mkdir(parents=True)
    cases = []
    for model_type in types:
        base = folder / model_type / "base"
        base.parent.mkdir()
        rope = CONFIG_MAPPING[model_type]().rope_parameters | {"rope_theta": 5e5}  # no program's default
        write_base(base, model_type, rope_parameters=rope, **SIZES | AS_PUBLISHED.get(model_type, {}))
        write_tokenizer(base)
        np.save(folder / "expected" / f"{model_type}-base.npy", log_probabilities(plain(base)))
        for kind, lora in kinds(model_type).items():
            print(f"{model_type}: {kind}", file=sys.stderr)
            cases += write_case(folder, base, kind, lora)
    if types == list(TYPES):
        cases += write_formats(folder, plain, log_probabilities, write_tokenizer)
    for case in cases:
        case["name"] = "-".join(
            (case["type"], case["kind"].replace(" ", "_"), case["fault"] or "right", case["export"])
        )
    text = json.dumps({"vocabulary": VOCAB, "prompts": prompts(), "cases": cases}, indent=1)
    (folder / "cases.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(TYPES))
