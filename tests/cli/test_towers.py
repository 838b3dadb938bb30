"""Commands on a checkpoint that also has towers: their numbers are those of the stock whole model, given text."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from torch import nn
from transformers import PreTrainedTokenizerFast

from moetune.inference.evaluate import rows_of
from moetune.inference.opened import find
from tests import small, toys
from tests.exporting.runs import write_base
from tests.models.test_text import NOT_IN_PEFT, TYPES, whole
from tests.reference import plain_model, plain_weights, run_config
from tests.resolved import build

UNPACKED = ("glm4v_moe", "ernie4_5_vl_moe")
"""Their masks of scaled dot product attention, which a CPU uses, do not keep documents apart."""
MORE: dict[str, dict[str, Any]] = {
    "aria": {"image_token_index": 2},
    "mistral_large4": {"image_token_index": 2},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 2},  # published configurations have it, the class does not
}
PROMPT, NEW = "a router", 6
ADAPT = {"router": "1", "lora": {"rank": 2, "alpha": 5, "targets": ["attention", "experts"]}}
ROWS = [{"prompt": "a router", "completion": " sends every token"}, {"prompt": "two of four", "completion": " experts"}]


def write_tokenizer(folder: Path) -> None:
    """A token for each character; the first three are special, as in the toys' configurations."""
    characters = sorted(set(" .".join(letter for letter in map(chr, range(97, 123)))))
    words = {word: number for number, word in enumerate(["<pad>", "</s>", "<image>", *characters])}
    backend = Tokenizer(WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="<pad>").save_pretrained(folder)


@torch.no_grad()
def loss(model: nn.Module, rows: Any) -> float:
    """The mean over all tokens that carry loss, a row at a time."""
    total, tokens = 0.0, 0
    for row in rows:
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])
        logits = model(input_ids=ids, use_cache=False).logits[0]
        total += nn.functional.cross_entropy(logits[:-1], labels[1:], reduction="sum").item()
        tokens += int((labels[1:] != -100).sum())
    return total / tokens


@torch.no_grad()
def continued(model: nn.Module, tokenizer: Any) -> str:
    """The most probable text, each token from a forward pass of its own."""
    ids = tokenizer(PROMPT)["input_ids"]
    for _ in range(NEW):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits
        ids.append(int(logits[0, -1].argmax()))
        if ids[-1] == tokenizer.eos_token_id:
            break
    return tokenizer.decode(ids[len(tokenizer(PROMPT)["input_ids"]) :], skip_special_tokens=True)


@pytest.mark.full
@pytest.mark.usefixtures("unpredicted")
@pytest.mark.parametrize("model_type", TYPES)
def test_the_commands(model_type: str, moetune: Callable[..., Any], tmp_path: Path) -> None:
    def answer(*arguments: Any) -> Any:
        ended = moetune(*arguments, "--json")
        assert ended.code == 0, ended.err
        return json.loads(ended.out)

    base, run, data = tmp_path / "base", tmp_path / "run", small.write_data(tmp_path / "data.jsonl", ROWS)
    sizes = MORE.get(model_type, {})
    if model_type == "aria":  # which has a size for each section
        sizes = sizes | {"text_config": toys.toy_config(model_type).text_config.to_dict() | {"num_hidden_layers": 2}}
    write_base(base, model_type, **sizes)
    write_tokenizer(base)
    packing = model_type not in UNPACKED
    file = small.run_file(
        base, data, run, model={"base": "fp32"}, adapt=ADAPT, data={"eval": str(data), "packing": packing},
        train={"steps": 2, "micro_batch": 1 if packing else 2, "accumulate": 1, "eval_every": 2, "save_every": 2},
    )  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(file))
    stock = whole(base)
    rows, _ = rows_of(find(str(base), device="cpu"), str(data), 64)
    of_base = loss(stock, rows)
    assert answer("eval", base, "--data", data)["loss"] == pytest.approx(of_base, rel=1e-5)

    answer("train", tmp_path / "run.yaml")
    metrics = small.read_metrics(run)
    assert [metrics[0]["eval_loss"], metrics[1]["loss"]] == pytest.approx([of_base] * 2, rel=1e-5)
    answer("export", run, "--format", "merged", "--out", tmp_path / "merged")
    merged = whole(tmp_path / "merged")
    trained = loss(merged, rows)
    assert abs(trained / of_base - 1) > 1e-3
    for what in (run, tmp_path / "merged"):
        assert answer("eval", what, "--data", data)["loss"] == pytest.approx(trained, rel=1e-5)
        written = answer("generate", what, "--prompt", PROMPT, "--max-new-tokens", NEW)["text"]
        assert written == continued(merged, find(str(base), device="cpu").tokenizer)
    assert metrics[-1]["eval_loss"] == pytest.approx(trained, rel=1e-5)
    if model_type not in NOT_IN_PEFT:
        answer("export", run, "--format", "peft", "--out", tmp_path / "adapter")
        adapted = PeftModel.from_pretrained(whole(base), str(tmp_path / "adapter")).eval()
        assert loss(adapted, rows) == pytest.approx(trained, rel=1e-5)
        assert answer("eval", tmp_path / "adapter", "--data", data)["loss"] == pytest.approx(trained, rel=1e-5)

    answer("quantize", base, "--out", tmp_path / "packed", "--base", "nf4")
    packed = build(run_config(tmp_path / "packed", {"also": ["norm"]}, model={"weights": "pretrained"}), "cpu")
    rounded = whole(base)
    text = plain_weights(packed, plain_model(packed.model.config), packed.trainable())
    rounded.load_state_dict(text, strict=False)
    assert answer("eval", tmp_path / "packed", "--data", data)["loss"] == pytest.approx(loss(rounded, rows), rel=1e-5)

    scores = answer("score", tmp_path / "run.yaml", "--out", tmp_path / "scores.json")
    chosen: list[torch.Tensor] = []
    for layer in packed.structure.moe_layers:
        chosen.clear()
        hook = stock.get_submodule(layer.experts).register_forward_hook(lambda _, given, __: chosen.append(given[1]))
        loss(stock, rows)
        hook.remove()
        counts = torch.cat([ids.flatten() for ids in chosen]).bincount(minlength=toys.EXPERTS)
        assert scores["expert_load"][str(layer.index)] == counts.tolist()
