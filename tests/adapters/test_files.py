"""Adapters that people bring: what is no plain LoRA, or has tensors that cannot be read, is named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from moetune.adapters.files import open_adapter, read_adapter
from moetune.errors import UserError

NAME = "base_model.model.q_proj.lora_A.weight"
SETTINGS = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}


def write(folder: Path, tensors: dict[str, Tensor], **settings: Any) -> Path:
    tensors = {NAME: torch.ones(2, 3), "base_model.model.q_proj.lora_B.weight": torch.ones(4, 2)} | tensors
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(SETTINGS | settings))
    return folder


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        *(
            (torch.ones(2, 3).to(dtype), rf"q_proj\.lora_A\.weight is of type {name}, .* save it as one of F32")
            for dtype, name in (
                (torch.float8_e4m3fn, "F8_E4M3"), (torch.float8_e5m2, "F8_E5M2"), (torch.int8, "I8"),
                (torch.bool, "BOOL"), (torch.complex64, "C64"),
            )
        ),
        (torch.ones(0, 3), r"q_proj\.lora_A\.weight is \[0, 3\], without values; leave it out"),
        (torch.full((2, 3), torch.nan), r"q_proj\.lora_A\.weight holds values that are not finite"),
    ],
)  # fmt: skip
def test_tensors_that_are_not_read(tensor: Tensor, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        open_adapter(write(tmp_path, {NAME: tensor}))
    with pytest.raises(UserError, match=r"holds q_proj\.lora_A\.weight twice, with two values"):
        open_adapter(write(tmp_path, {NAME.replace("_A.", "_A.default."): torch.zeros(2, 3)}))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"use_rslora": "false"}, "use_rslora: 'false': Input should be a valid boolean"),
        *(({"peft_type": kind}, f"peft_type is '{kind}', not LORA") for kind in ("VERA", "IA3", "ADALORA")),
        *(
            ({key: value}, f"not plain LoRA: {key}: .*merge it with PEFT")
            for key, value in {
                "use_dora": True, "lora_bias": True, "use_qalora": True, "arrow_config": {"top_k": 2}, "bias": "all",
                "fan_in_fan_out": True, "init_lora_weights": "olora", "trainable_token_indices": [1],
                "layer_replication": [[0, 2]],
            }.items()
        ),
        *(
            ({"init_lora_weights": start}, f"init_lora_weights: {start} .*path_initial_model_for_weight_conversion")
            for start in ("pissa_niter_16", "lora_ga")
        ),
        *(
            ({key: value}, f"{key}: .* is no setting that PEFT .* knows, .*; merge the adapter with the program")
            for key, value in {"use_a_newer_variant": True, "newer_config": {"depth": 1}}.items()
        ),
    ],
)  # fmt: skip
def test_other_kinds_are_named(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        open_adapter(write(tmp_path, {}, **settings))


def test_what_does_not_change_the_computation_is_no_reason_to_refuse(tmp_path: Path) -> None:
    """Settings of training, and what PEFT stores of an embedding that it resized: the module as it was, and again."""
    name, head = "base_model.model.lm_head", torch.ones(5, 3)
    tensors = {f"{name}.weight": head, f"{name}.original_module.weight": head * 2}
    tensors |= {f"{name}.modules_to_save.weight": head.clone(), "base_model.model.ids": torch.arange(3)}
    stored = open_adapter(
        write(tmp_path, tensors, init_lora_weights="gaussian", lora_dropout=0.1, lora_B_layout="rank_major")
    )
    assert {name for name in stored.tensors if "q_proj" not in name} == {"lm_head.weight", "ids"}
    assert stored.tensors["lm_head.weight"].equal(head)


def test_factors_need_no_weight_in_their_names_and_settings_no_rank(tmp_path: Path) -> None:
    tensors = {
        f"base_model.model.experts.up_proj.lora_{x}": torch.ones(3, *shape)
        for x, shape in (("A", (8, 3)), ("B", (4, 8)))
    }
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "lora_alpha": 16}')
    assert open_adapter(tmp_path).scales.of("experts", 8) == 2
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "lora_alpha": 16, "r": 9}')
    with pytest.raises(UserError, match="rank 9, and its factors have 8 rows"):
        open_adapter(tmp_path)


def test_a_folder_of_checkpoints_names_those_with_an_adapter(tmp_path: Path) -> None:
    for name in ("checkpoint-10", "checkpoint-20"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, {})
    with pytest.raises(UserError, match="there is one in checkpoint-10 and in checkpoint-20"):
        open_adapter(tmp_path)


def test_a_setting_of_no_program_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    open_adapter(write(tmp_path, {}, lora_B_layout="rank_major", scheme=None, lora_scheme="v2"))
    assert capsys.readouterr().err == (
        f"note: adapter {str(tmp_path)!r}: adapter_config.json: lora_scheme: 'v2' is no setting of PEFT, and not read\n"
    )


def test_weights_beside_an_adapter_and_factors_that_change_nothing_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """ktransformers#2146 (LoRA of experts), ms-swift#9187 (a vision tower), unsloth-zoo#1242 (factors that stayed 0).

    A trainer's own states are neither.
    """
    for name in ("fused_expert_lora.safetensors", "non_lora_trainables.bin", "optimizer.pt", "rng_state_0.pth"):
        (tmp_path / name).touch()
    open_adapter(write(tmp_path, {}))
    beside = "fused_expert_lora.safetensors and non_lora_trainables.bin beside adapter_model.safetensors is not read"
    said = capsys.readouterr().err
    assert beside in said
    assert "zero" not in said
    (tmp_path / "zero").mkdir()
    open_adapter(write(tmp_path / "zero", {NAME.replace("_A", "_B"): torch.zeros(4, 2)}))
    assert "factors A and B is zero everywhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "remedy"),
    {
        "adapter_model.bin": r"adapter_model\.bin is a pickle.*; save it as safetensors",
        "adapter_0.pt": r"adapter_0\.pt is a pickle.*FullModelHFCheckpointer",
        "adapter_model-00001-of-00002.safetensors": "of several shards.*save_file",
        "adapters.safetensors": r"mlx-lm's.*lora_alpha \(rank · scale\)",
        "latest_checkpointed_iteration.txt": "AutoBridge.export_adapter_ckpt",
        "Lora-F16-LoRA.gguf": "llama.cpp.*converted from",
        "run.yaml": "is of a run: give what moetune export",
    }.items(),
)
def test_files_of_other_programs_are_named(name: str, remedy: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(UserError, match=remedy):
        read_adapter(tmp_path)
