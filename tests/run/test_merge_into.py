"""What `train.merge_into` refuses, by name and before a weight is read."""

from pathlib import Path
from typing import Any

import pytest

from moetune.errors import UserError
from moetune.run.resolve import resolve
from tests.exporting.runs import write_base
from tests.published import write_fp8, write_nvfp4
from tests.reference import run_config
from tests.resolved import build, write_quantized_base

LORA: dict[str, Any] = {"rank": 2, "alpha": 4, "targets": ["experts"]}
FP32 = {"base": "fp32", "dtype": "fp32"}
REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "a base that holds other weights": ("16 bits", {"lora": LORA}, {"base": "nf4"}, "base: nf4 does not hold"),
    "a base by parts": (
        "16 bits",
        {"lora": LORA},
        {"base": {"default": "bf16", "parts": {"experts": "fp32"}}},
        "fp32.* is a section, .*set base: bf16",
    ),
    "a published base held otherwise": ("nvfp4", {"lora": LORA}, {"base": "nf4"}, r"is published so.*set base: auto"),
    "a base in another format": ("fp8", {"lora": LORA}, {}, r"is published in fp8; give one in nvfp4 or 16 bits"),
    "a quantized base of ours": ("moetune", {"lora": LORA}, {}, r"set model\.path to that checkpoint"),
    "whole experts": (
        "16 bits",
        {"lora": LORA | {"ids": [1]}, "experts": {"ids": [0]}},
        FP32,
        r"\(whole experts\) train",
    ),
    "whole layers": ("16 bits", {"lora": LORA, "also": ["attention"]}, FP32, r"q_proj\.weight.* train in full"),
    "nothing to merge": (
        "16 bits",
        {"lora": LORA | {"targets": ["lm_head"]}},
        FP32,
        "nothing that it rounds gets LoRA",
    ),
    "no LoRA": ("16 bits", {"router": "all"}, FP32, "nothing that it rounds gets LoRA"),
    "dropout": (
        "16 bits",
        {"lora": LORA | {"targets": ["attention"], "dropout": 0.1}},
        FP32,
        r"set adapt\.lora\.dropout",
    ),
}


@pytest.mark.parametrize("problem", REFUSED)
def test_what_cannot_be_rounded(problem: str, tmp_path: Path) -> None:
    kind, adapt, model, message = REFUSED[problem]
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64}
    match kind:
        case "nvfp4":
            path = write_nvfp4(tmp_path / "base", "qwen3_moe", **sizes)
        case "fp8":
            path = write_fp8(tmp_path / "base", "qwen3_moe", **sizes)
        case _:
            path = write_base(tmp_path / "base", "qwen3_moe", **sizes | {"num_key_value_heads": 4, "head_dim": 16})
    if kind == "moetune":
        write_quantized_base(str(path), tmp_path / "quantized", "nvfp4", True)
        path = tmp_path / "quantized"
    config = run_config(path, adapt, model={"weights": "pretrained", **model}, train={"merge_into": "nvfp4"})
    with pytest.raises(UserError, match=rf"(?s)train\.merge_into: nvfp4: .*{message}"):
        resolve(config, "cpu")


def test_scales_that_are_not_held(tmp_path: Path) -> None:
    """The checkpoint has more quantized than its settings let expect: a layer so small that it is held in 16 bits."""
    path = write_nvfp4(tmp_path / "base", "qwen3_moe", hidden_size=64, moe_intermediate_size=64)
    adapt = {"lora": LORA | {"targets": ["k_proj", "experts"]}}
    config = run_config(path, adapt, model={"weights": "pretrained", "base": "auto"}, train={"merge_into": "nvfp4"})
    with pytest.raises(UserError, match=r"train\.merge_into: nvfp4: .*k_proj.* quantized, .*without the scales"):
        build(config, "cpu")


def test_a_format_that_the_type_is_not_published_in(tmp_path: Path) -> None:
    path = write_base(tmp_path / "base", "qwen3_moe")
    with pytest.raises(UserError, match=r"train\.merge_into: mxfp4: .*only of gpt-oss"):
        resolve(run_config(path, {"lora": LORA}, model=FP32, train={"merge_into": "mxfp4"}), "cpu")
