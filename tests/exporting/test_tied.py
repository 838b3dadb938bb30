"""Tied embeddings: one tensor, two equal ones, or apart. Logits of what moetune writes, loaded by stock transformers,
are those of stock PEFT or of the trained model, or it is refused.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from moetune import MoetuneConfig
from moetune.adapt.count import count
from moetune.adapt.start_from.peft_adapter import load_peft
from moetune.adapt.start_from.start import open_start
from moetune.errors import UserError
from moetune.exporting.adapter import check_adapter, convert_adapter, diff_adapters, merge_adapter
from moetune.exporting.apply import apply_delta
from moetune.exporting.export import export
from moetune.models.text import auto_class
from tests.exporting.runs import ToyRun, tensors_of, write_base, write_run
from tests.published import write_fp8
from tests.reference import run_config, token_ids
from tests.resolved import build, write_quantized_base

WRAPPERS = ["gemma4", "qwen3_vl_moe", "aria", "ernie4_5_vl_moe"]
TYPES = ["qwen3_moe", *(pytest.param(name, marks=pytest.mark.full) for name in ("lfm2_moe", "ernie4_5_moe", *WRAPPERS))]
SAVED = {"both": ["embed_tokens", "lm_head"], "head": ["lm_head"], "embedding": ["embed_tokens"]}
HEAD = "lm_head.weight"


def tied_base(folder: Path, model_type: str, **more: Any) -> Path:
    layers = {} if model_type == "lfm2_moe" else {"num_hidden_layers": 2}  # its layers have types
    return write_base(folder, model_type, tie_word_embeddings=True, **layers, **more)


def own_head(base: Path, name: str = HEAD) -> Path:
    """Write a head of its own into a tied checkpoint, as PEFT's merge leaves it; its configuration still ties it."""
    tensors = load_file(base / "model.safetensors")
    table = next(tensor for key, tensor in tensors.items() if key.endswith("embed_tokens.weight"))
    tensors[name] = 0.05 * torch.randn(table.shape, generator=torch.Generator().manual_seed(5))
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    return base


def stock(folder: Path, **more: Any) -> Any:
    load: Any = auto_class(AutoConfig.from_pretrained(folder)).from_pretrained
    return load(folder, dtype=torch.float32, attn_implementation="eager", **more).eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model(input_ids=token_ids(), use_cache=False).logits
    return found


def assert_same(found: Tensor, expected: Tensor) -> None:
    """As close as float32 sums are: Gemma 4 multiplies embeddings by √H."""
    torch.testing.assert_close(found, expected, atol=3e-5, rtol=1e-5)


def run_of(base: Path, adapt: dict[str, Any], storage: str = "fp32") -> Any:
    return run_config(base, adapt, model={"weights": "pretrained", "base": storage, "dtype": "fp32"})


def stock_adapter(base: Path, folder: Path, **settings: Any) -> Tensor:
    """Save an adapter of stock PEFT whose every tensor acts, and return the logits with it, loaded again."""
    torch.manual_seed(1)
    settings = {"target_modules": r"(?!.*(vision|projector)).*q_proj", "r": 2, "lora_alpha": 4, **settings}
    model = get_peft_model(stock(base), LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter) if parameter.requires_grad else 0
    model.save_pretrained(folder)
    return logits(PeftModel.from_pretrained(stock(base), folder))


def merged(base: Path, adapter: Path, out: Path) -> Tensor:
    merge_adapter(str(base), adapter, out)
    return logits(stock(out))


# --- Adapters of stock PEFT -----------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.one_in(2)
@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("model_type", TYPES)
def test_an_adapter_that_unties_is_merged_converted_and_no_start(model_type: str, saved: str, tmp_path: Path) -> None:
    base, adapter = tied_base(tmp_path / "base", model_type), tmp_path / "adapter"
    expected = stock_adapter(base, adapter, modules_to_save=SAVED[saved])
    plain = logits(stock(base))
    assert (expected - plain).abs().max() > 0.1
    assert check_adapter(str(base), adapter).problems == []
    assert_same(merged(base, adapter, tmp_path / "merged"), expected)
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"] is False
    assert {name: t for name, t in tensors_of(tmp_path / "merged").items() if name == HEAD}
    for program in ("peft", "unsloth"):
        convert_adapter(str(base), adapter, program, tmp_path / program)
        assert_same(logits(PeftModel.from_pretrained(stock(base), tmp_path / program)), expected)
        assert diff_adapters(adapter, tmp_path / program, base=str(base)).equal
    lora = {"rank": 2, "alpha": 4, "targets": ["q_proj"]}
    with pytest.raises(UserError, match=r"lm_head\.weight and .*embed_tokens\.weight are apart .* adapter merge"):
        load_peft(build(run_of(base, {"also": ["*embed_tokens.weight"], "lora": lora}), "cpu"), adapter)


@pytest.mark.parametrize(
    "settings",
    [
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        pytest.param({"modules_to_save": ["lm_head"], "ensure_weight_tying": True}, marks=pytest.mark.full),
    ],
)
def test_an_adapter_that_keeps_the_tie_is_merged_and_a_start(settings: dict[str, Any], tmp_path: Path) -> None:
    base, adapter = tied_base(tmp_path / "base", "qwen3_moe"), tmp_path / "adapter"
    expected = stock_adapter(base, adapter, **settings)
    assert_same(merged(base, adapter, tmp_path / "merged"), expected)
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"] is True
    lora = {"rank": 2, "alpha": 4, "targets": ["q_proj"]}
    adapted = build(run_of(base, {"also": ["embedding"], "lora": lora}), "cpu")
    load_peft(adapted, adapter)
    assert_same(logits(adapted.model.eval()), expected)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("shard", ["50GB", "60KB"])
def test_lora_on_a_tied_head_changes_the_head_alone(shard: str, tmp_path: Path) -> None:
    base, adapter = tied_base(tmp_path / "base", "qwen3_moe", shard=shard), tmp_path / "adapter"
    expected = stock_adapter(base, adapter, target_modules=["q_proj", "lm_head"])
    assert_same(merged(base, adapter, tmp_path / "merged"), expected)
    before, after = tensors_of(base), tensors_of(tmp_path / "merged")
    assert after.keys() - before.keys() == {HEAD}
    assert after["model.embed_tokens.weight"].equal(before["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"target_modules": ["q_proj", "embed_tokens"]}, r"embed_tokens\.lora_embedding_A"),
        pytest.param(
            {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
            r"embed_tokens\.lora_embedding_A",
            marks=pytest.mark.full,
        ),
        ({"trainable_token_indices": [1, 2]}, r"trainable_token_indices: \[1, 2\]"),
        pytest.param({"trainable_token_indices": {"lm_head": [1]}}, "trainable_token_indices", marks=pytest.mark.full),
    ],
)
def test_what_is_not_read_of_a_tied_weight_is_named(settings: dict[str, Any], named: str, tmp_path: Path) -> None:
    base, adapter = tied_base(tmp_path / "base", "qwen3_moe"), tmp_path / "adapter"
    stock_adapter(base, adapter, **settings)
    with pytest.raises(UserError, match=named):
        merge_adapter(str(base), adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_an_adapter_unties_a_quantized_checkpoint(tmp_path: Path) -> None:
    base = write_fp8(tmp_path / "base", "qwen3_moe", num_hidden_layers=2)
    tensors = load_file(base / "model.safetensors")
    head = torch.randn_like(tensors.pop(HEAD))
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": True}))
    stock_adapter(tied_base(tmp_path / "plain", "qwen3_moe"), tmp_path / "adapter", modules_to_save=["lm_head"])
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file(load_file(file) | {f"base_model.model.{HEAD}": head}, file)
    merge_adapter(str(base), tmp_path / "adapter", tmp_path / "merged")
    after = tensors_of(tmp_path / "merged")
    assert after[HEAD].equal(head)
    assert after["model.embed_tokens.weight"].equal(tensors["model.embed_tokens.weight"])
    assert stock(tmp_path / "merged").lm_head.weight.equal(head.float())


# --- Checkpoints that hold the head apart ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", [HEAD, pytest.param("model.lm_head.weight", marks=pytest.mark.full)])
@pytest.mark.parametrize("model_type", TYPES)
def test_a_head_of_its_own_is_read_quantized_and_counted(model_type: str, name: str, tmp_path: Path) -> None:
    base = tied_base(tmp_path / "base", model_type)
    tied = count(str(base)).parameter_count
    own_head(base, "language_model.lm_head.weight" if model_type == "aria" else name)
    head = count(str(base)).parameter_count
    assert (tied.components["lm_head"], head.total) == (0, tied.total + head.components["lm_head"])
    expected = logits(stock(base))
    assert_same(logits(build(run_of(base, {"also": ["norm"]}), "cpu").model.eval()), expected)
    write_quantized_base(str(base), tmp_path / "quantized", "nf4", True)
    folders = base, tmp_path / "quantized"
    direct, quantized = (build(run_of(one, {"also": ["norm"]}, "nf4"), "cpu").model.eval() for one in folders)
    assert logits(quantized).equal(logits(direct))
    assert count(str(tmp_path / "quantized")).parameter_count == head
    if model_type == "qwen3_moe":
        by_stock = stock(base, quantization_config=MoetuneConfig(base="nf4"), device_map="cpu")
        assert_same(logits(by_stock), logits(direct))


TRAINED: dict[str, dict[str, Any]] = {
    "embedding": {"also": ["*embed_tokens.weight"]},
    "head": {"also": ["lm_head"]},
    "both": {"also": ["*embed_tokens.weight", "lm_head"]},
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("model_type", TYPES)
def test_exports_keep_a_head_of_its_own(model_type: str, trained: str, tmp_path: Path) -> None:
    base = own_head(tied_base(tmp_path / "base", model_type))
    run = write_run(tmp_path / "run", base, TRAINED[trained])
    expected = logits(run.adapted.model)
    note = "tie_word_embeddings: false"
    assert note in "".join(export(run.path, "merged", tmp_path / "merged").notes)
    export(run.path, "delta", tmp_path / "delta")
    assert note in "".join(apply_delta(tmp_path / "delta", base, tmp_path / "applied").notes)
    for folder in (tmp_path / "merged", tmp_path / "applied"):
        assert_same(logits(stock(folder)), expected)
        settings = json.loads((folder / "config.json").read_text())
        assert not settings["tie_word_embeddings"]
        assert not settings.get("text_config", {}).get("tie_word_embeddings")
    again = build(run_of(base, TRAINED[trained] | {"start_from": str(tmp_path / "delta")}), "cpu")
    start = open_start(again)
    assert start is not None
    start.load(again, start.delta.base if start.delta else None)
    assert logits(again.model.eval()).equal(expected)


@pytest.mark.full
@pytest.mark.one_in(2)
@pytest.mark.parametrize("targets", [["attention"], ["attention", "lm_head"]])
def test_an_adapter_of_a_base_with_a_head_of_its_own(targets: list[str], tmp_path: Path) -> None:
    base = own_head(tied_base(tmp_path / "base", "qwen3_moe"))
    adapt = {"also": ["embedding"], "lora": {"rank": 2, "alpha": 4, "targets": targets}}
    run = write_run(tmp_path / "run", base, adapt)
    export(run.path, "peft", tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["ensure_weight_tying"] is False
    expected = logits(run.adapted.model)
    assert_same(logits(PeftModel.from_pretrained(stock(base), tmp_path / "adapter")), expected)
    assert_same(merged(base, tmp_path / "adapter", tmp_path / "merged"), expected)
    again = run.fresh()
    load_peft(again, tmp_path / "adapter")
    assert logits(again.model).equal(expected)


def test_a_rounded_export_keeps_a_head_of_its_own(tmp_path: Path) -> None:
    base = own_head(tied_base(tmp_path / "base", "qwen3_moe"))
    run = write_run(tmp_path / "run", base, {"also": ["embedding"]})
    assert "tie_word_embeddings: false" in "".join(export(run.path, "merged", tmp_path / "fp8", into="fp8").notes)
    after = tensors_of(tmp_path / "fp8")
    assert after[HEAD].equal(tensors_of(base)[HEAD])
    assert after["model.embed_tokens.weight"].equal(run.adapted.trainable()["model.embed_tokens.weight"])
    assert json.loads((tmp_path / "fp8" / "config.json").read_text())["tie_word_embeddings"] is False


# --- One tensor, under either name or both --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ToyRun]:
    """Function: how a checkpoint stores its tied weights -> a run of it that trained them, written once."""
    folder, table = tmp_path_factory.mktemp("tied"), "model.embed_tokens.weight"

    @functools.cache
    def run(how: str) -> ToyRun:
        base = tied_base(folder / how, "qwen3_moe")
        tensors = load_file(base / "model.safetensors")
        if how != "one":
            tensors[HEAD] = tensors[table].clone()
        if how == "head alone":
            del tensors[table]
        save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
        return write_run(folder / f"{how} run", base, {"also": ["embedding"]})

    return run


@pytest.mark.full
@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", ["both", "head alone"])
def test_one_tensor_is_one_under_whichever_name(how: str, runs: Callable[[str], ToyRun], tmp_path: Path) -> None:
    run = runs(how)
    expected = logits(run.adapted.model)
    assert count(str(run.base)).parameter_count.components["lm_head"] == 0
    assert export(run.path, "merged", tmp_path / "merged").notes == ()
    assert_same(logits(stock(tmp_path / "merged")), expected)
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"]
    write_quantized_base(str(run.base), tmp_path / "quantized", "nf4", True)
    folders = run.base, tmp_path / "quantized"
    direct, quantized = (build(run_of(one, {"also": ["norm"]}, "nf4"), "cpu").model.eval() for one in folders)
    assert logits(quantized).equal(logits(direct))
    expected = stock_adapter(run.base, tmp_path / "adapter", modules_to_save=["lm_head"])
    assert_same(merged(run.base, tmp_path / "adapter", tmp_path / "untied"), expected)


@pytest.mark.full
def test_a_delta_is_not_applied_where_another_tensor_would_change_with_it(
    runs: Callable[[str], ToyRun], tmp_path: Path
) -> None:
    one, both = runs("one"), runs("both")
    export(one.path, "delta", tmp_path / "of one")
    with pytest.raises(UserError, match=r"embed_tokens\.weight of the delta is tied to lm_head\.weight in one base"):
        apply_delta(tmp_path / "of one", both.base, tmp_path / "out", force="both")
    apart = write_run(tmp_path / "run", own_head(tied_base(tmp_path / "base", "qwen3_moe")), {"also": ["embedding"]})
    export(apart.path, "delta", tmp_path / "of apart")
    with pytest.raises(UserError, match=r"only the base that the delta was made for has a tensor for each"):
        apply_delta(tmp_path / "of apart", one.base, tmp_path / "out", force="one")
    assert not (tmp_path / "out").exists()


def test_a_missing_head_that_nothing_ties_is_named_with_the_remedy(tmp_path: Path) -> None:
    base = tied_base(tmp_path / "base", "qwen3_moe")
    settings = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": False}))
    with pytest.raises(UserError, match=r"missing lm_head\.weight \(set tie_word_embeddings: true in config\.json"):
        build(run_of(base, {"also": ["norm"]}), "cpu")
