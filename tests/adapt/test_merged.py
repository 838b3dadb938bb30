"""`train.merge_into`: the model computes with the weights that `export --into` writes, and learns as if unrounded."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from moetune.errors import UserError
from moetune.exporting.export import export
from moetune.inference.check import check_export
from tests import small
from tests.exporting.runs import write_base, write_run
from tests.published import write_floats, write_fp8, write_int4, write_mxfp4, write_nvfp4
from tests.reference import (
    assert_close,
    loss_and_gradients,
    next_token_loss,
    plain_model,
    plain_weights,
    run_config,
    token_ids,
)
from tests.resolved import build, train

SIZES = {"hidden_size": 64, "num_key_value_heads": 4, "head_dim": 16}
QWEN3, MIXTRAL = SIZES | {"moe_intermediate_size": 64}, SIZES | {"intermediate_size": 64}
LORA: dict[str, Any] = {"rank": 2, "alpha": 5, "layers": "1", "ids": [2, 3], "targets": ["attention", "experts"]}
Case = tuple[Any, Callable[[Path], Path], dict[str, Any]]


def base(
    into: str, write: Callable[..., Path], *args: Any, lora: dict[str, Any] | None = None, also: Any = (), **more: Any
) -> Case:
    adapt = {"lora": LORA | (lora or {}), "also": also}
    return into, partial(write, **more) if not args else lambda folder: write(folder, *args, **more), adapt


CASES: dict[str, Case] = {
    "nvfp4": base("nvfp4", write_nvfp4, "qwen3_moe", **QWEN3),
    "16 bits, int4": base("int4", write_base, "mixtral", **MIXTRAL, lora={"layers": "all", "ids": "all"}),
}
MORE: dict[str, Case] = {
    "fp8": base(
        "fp8",
        write_fp8,
        "mixtral",
        **MIXTRAL,
        left_out=["self_attn.o_proj"],
        lora={"share": "outer", "targets": ["q_proj", "v_proj", "experts"]},
    ),
    "16 bits, nvfp4": base("nvfp4", write_base, "qwen3_moe", **QWEN3, lora={"gate_up": "split"}),
    "nvfp4 of compressed-tensors": base(
        "nvfp4", write_nvfp4, "mixtral", "compressed-tensors", **MIXTRAL, lora={"gate_up": "split"}
    ),
    "16 bits, fp8": base("fp8", write_base, "mixtral", **MIXTRAL),
    "gptq": base("int4", write_int4, producer="gptq", **QWEN3),
    "awq": base("int4", write_int4, producer="awq", **QWEN3),
    "pack-quantized": base("int4", write_int4, producer="compressed-tensors", **QWEN3),
    "mxfp8": base("mxfp8", write_floats, kind="mxfp8", **QWEN3),
    "fp8 of a row": base("fp8", write_floats, kind="row", **QWEN3),
    "fp8 of a matrix": base("fp8", write_floats, kind="modelopt", **QWEN3),
    "deepseek_v4": base(
        "mxfp4", write_floats, kind="deepseek_v4", lora={"targets": ["experts"], "layers": "all", "ids": "all"}
    ),
    "gpt-oss": base("mxfp4", write_mxfp4, lora={"targets": ["experts"]}),
    "16 bits, and a bias": base(
        "nvfp4", write_base, "qwen2_moe", **QWEN3, also=["model.layers.1.self_attn.q_proj.bias"]
    ),
    "16 bits, mxfp8": base("mxfp8", write_base, "qwen3_moe", **QWEN3),
    "16 bits, gpt-oss": base("mxfp4", write_base, "gpt_oss", hidden_size=64, intermediate_size=96),
}

BASES = CASES | MORE


@pytest.mark.one_in(2)
@pytest.mark.parametrize("checkpointing", ["none", pytest.param("full", marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", [*CASES, *(pytest.param(kind, marks=pytest.mark.full) for kind in MORE)])
def test_it_computes_with_what_is_exported(kind: str, checkpointing: str, tmp_path: Path) -> None:
    """Logits are those of the merged checkpoint, and gradients those of w + (rounded - w).detach(), by autograd."""
    into, write, adapt = BASES[kind]
    storage = "fp32" if "16 bits" in kind else "auto"
    train = {"merge_into": into, "checkpointing": checkpointing}
    run = write_run(tmp_path / "run", write(tmp_path / "base"), adapt, storage=storage, **train)
    export(run.path, "merged", tmp_path / "out", into=into)
    settings = {"weights": "pretrained", "base": "auto", "dtype": "fp32"}
    merged = build(run_config(tmp_path / "out", {"also": ["norm"]}, model=settings), "cpu")

    adapted, ids, plain = run.adapted, token_ids(), plain_model(run.adapted.model.config)
    leaves = {name: parameter.detach().clone().requires_grad_() for name, parameter in adapted.trainable().items()}
    exact = plain_weights(adapted, plain, leaves)
    rounded = plain_weights(merged, plain, {name: p.detach() for name, p in merged.trainable().items()})
    weights = {name: exact[name] + (rounded[name] - exact[name]).detach() for name in exact}
    logits = torch.func.functional_call(plain, weights, kwargs={"input_ids": ids, "use_cache": False}).logits
    assert (torch.func.functional_call(plain, exact, kwargs={"input_ids": ids}).logits - logits).abs().max() > 1e-4
    expected = torch.autograd.grad(next_token_loss(logits, ids), [*leaves.values()])
    adapted.model.train(checkpointing == "full")
    with torch.no_grad():
        found = adapted.model(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(found, merged.model.eval()(ids).logits, rtol=0, atol=1e-5)
    _, gradients = loss_and_gradients(adapted, ids)
    assert_close(gradients, dict(zip(leaves, expected, strict=True)), 1e-4)


@pytest.mark.full
@pytest.mark.parametrize("base", ["16 bits", "published"])
def test_held_out_loss_is_that_of_the_merged_checkpoint(
    base: str, small_model: Path, small_data: Path, tmp_path: Path
) -> None:
    """Of a trained and resumed run: in its metrics, as `eval` opens it again, and of the export; the base's own too,
    while LoRA is switched off."""
    model, settings = small_model, {"base": "fp32"}
    if base == "published":
        untrained = small.run_config(small_model, small_data, tmp_path / "no-run", "lora", model=settings)
        model, settings = tmp_path / "base", {"base": "auto"}
        export(build(untrained, "cpu"), "merged", model, into="nvfp4")
    data = {"train": str(small_data), "eval": str(small_data)}
    train_ = {"merge_into": "nvfp4", "steps": 2, "eval_every": 2, "save_every": 1}
    lora = {"rank": 4, "alpha": 8, "targets": ["attention", "experts"], "share": "outer", "dtype": "bf16"}
    config = small.run_config(
        model, small_data, tmp_path / "run", "lora", model=settings, data=data, train=train_, adapt={"lora": lora}
    )
    train(config.but(train={"steps": 1}), device="cpu")
    with pytest.raises(UserError, match=r"train\.merge_into"):
        train(config.but(train={"merge_into": None}), device="cpu", resume="auto")
    train(config, device="cpu", resume="auto")
    held_out = [line["eval_loss"] for line in small.read_metrics(tmp_path / "run") if line.get("eval_loss")][-1]
    result = export(tmp_path / "run", "merged", tmp_path / "out", into="nvfp4")
    assert not any("train.merge_into" in note for note in result.notes)
    checked = check_export(tmp_path / "run", tmp_path / "out", rounded=True)
    assert checked is not None
    assert checked.trained_loss == pytest.approx(held_out, abs=5e-6)
    assert checked.exported_loss == pytest.approx(held_out, abs=5e-6)
    export(tmp_path / "run", "merged", tmp_path / "plain")
    plain = check_export(tmp_path / "run", tmp_path / "plain", rounded=True)
    assert plain is not None
    assert abs(plain.exported_loss - held_out) > 2e-5


@pytest.mark.full
def test_other_exports_say_what_it_was_trained_for(tmp_path: Path) -> None:
    into, write, _ = CASES["16 bits, int4"]
    run = write_run(tmp_path / "run", write(tmp_path / "base"), {"lora": LORA | {"ids": "all"}}, merge_into=into)
    for format, other in (("peft", None), ("merged", None), ("merged", "fp8")):
        notes = export(run.path, format, tmp_path / "out", into=other, overwrite=True).notes  # type: ignore[arg-type]
        assert any("merged into int4 (train.merge_into)" in note for note in notes)
