"""Finding a model: catalog, folder, hub; and every way to fail."""

import json
from pathlib import Path

import pytest
import torch

from moetune.adapt.count import count
from moetune.errors import UserError
from moetune.files import LFS_POINTER
from moetune.models.source import find_model_source
from tests.toys import toy_config

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def folder_with(tmp_path: Path, config: object) -> str:
    text = config if isinstance(config, str) else json.dumps(config)
    (tmp_path / "config.json").write_text(text)
    return str(tmp_path)


ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}


def test_catalog_name_gives_config_and_hub_id() -> None:
    source = find_model_source("Mixtral-8x7B")
    assert source.name == "mixtral-8x7b"
    assert source.config.model_type == "mixtral"
    assert source.folder == "mistralai/Mixtral-8x7B-v0.1"
    assert find_model_source("mistralai/Mixtral-8x7B-v0.1").name == "mixtral-8x7b"


def test_embedded_model_gives_its_folder() -> None:
    folder = find_model_source("tiny-mixtral").folder
    assert folder is not None
    assert (Path(folder) / "config.json").is_file()


def test_local_folder(tmp_path: Path) -> None:
    toy_config("qwen3_moe").save_pretrained(tmp_path)
    source = find_model_source(str(tmp_path))
    assert source.config.model_type == "qwen3_moe"
    assert source.folder == str(tmp_path)


@pytest.mark.parametrize(("dtype", "read"), [("bfloat16", torch.bfloat16), ("int4", None), ("float8_e4m3fn", None)])
def test_a_dtype_of_8_bits_or_fewer_is_quantized(dtype: str, read: torch.dtype | None, tmp_path: Path) -> None:
    path = folder_with(tmp_path, toy_config("mixtral").to_dict() | {"dtype": dtype})
    assert find_model_source(path).config.dtype == read
    if read is not None:
        assert count(path).parameter_count.total > 0
    else:  # without settings that say how the codes are scaled
        with pytest.raises(UserError, match=f"is already quantized \\(dtype {dtype}\\) in a way that is not read"):
            count(path)


def test_a_model_is_counted_whose_attention_needs_another_package(tmp_path: Path) -> None:
    path = folder_with(tmp_path, toy_config("mixtral").to_dict() | {"attn_implementation": "flash_attention_2"})
    assert count(path).parameter_count.total > 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mixtral-8x7", "'mixtral-8x7'.*Did you mean 'mixtral-8x7b'"),
        ("https://huggingface.co/unsloth/Qwen3-30B-A3B/tree/main", r"Give unsloth/Qwen3-30B-A3B\.$"),
        ("./no/such/folder", "'./no/such/folder'.*nor a folder that exists"),
        ("", "'' cannot be a path: it is empty"),
    ],
)
def test_unknown_name(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_model_source(name)


def test_hub_without_network_suggests_a_catalog_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(path: str, **_: object) -> None:
        raise OSError(f"We couldn't connect\nto load {path}")

    monkeypatch.setattr("moetune.models.source.AutoConfig.from_pretrained", offline)
    with pytest.raises(UserError) as caught:
        find_model_source("mistralai/Mixtral-8x7B-v0.2")
    assert "Did you mean 'mistralai/Mixtral-8x7B-v0.1'?" in str(caught.value)
    assert "hf download mistralai/Mixtral-8x7B-v0.2 elsewhere, and give the folder" in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{not json", "config.json cannot be read"),
        (LFS_POINTER.decode() + "\noid sha256:aa\nsize 9\n", "is a pointer of Git LFS; .*git lfs pull"),
        ([1], "should be an object"),
        ({"hidden_size": 4}, "has no model_type"),
        ({"model_type": "mixtrall"}, "'mixtrall'.*never run.*Did you mean 'mixtral'"),
        ({"model_type": "mixtral", "hidden_size": "many"}, "config.json is not valid.*hidden_size"),
        ({"model_type": "mixtral", "torch_dtype": "auto"}, r"'auto'; dtype \(torch_dtype\) is bfloat16, float16 or"),
        (
            {"model_type": "mixtral", "num_hidden_layers": 2**31},
            "says 2147483648 layers, and no model has more than 1,000",
        ),
        ({"model_type": "llama4", "text_config": {"num_hidden_layers": 10**400}}, r"says 1000+\.\.\. layers, and no"),
        (
            {"model_type": "mixtral", "quantization_config": {"quant_method": "fp8", "weight_block_size": 128}},
            r"config\.json: quantization_config\.weight_block_size 128 is not valid",
        ),
        (
            {"model_type": "mixtral", "quantization_config": FP8 | {"modules_to_not_convert": "lm_head"}},
            r"config\.json: quantization_config\.modules_to_not_convert 'lm_head' is not valid: give a list",
        ),
        (
            {"model_type": "mixtral", "quantization_config": NVFP4 | {"ignore": ["lm_head", "re:("]}},
            r"config\.json: quantization_config\.ignore 're:\(' is not valid: missing \)",
        ),
        (
            {"model_type": "mixtral", **ROPE, "rope_theta": 1e4},
            r"rope_theta: 10000\.0, and .* 5000000\.0; say one thing",
        ),
        (
            {"model_type": "qwen3_moe", **ROPE, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            r"rope_parameters\.rope_theta: 5000000\.0, and transformers takes 10000\.0",
        ),
        (  # transformers#47355
            {"model_type": "glm_moe_dsa", "n_routed_experts": 256, "num_experts": 128},
            "says n_routed_experts: 256, and transformers takes 128, by another key; remove one",
        ),
        ({"model_type": "mixtral", "num_expert_per_tok": 4}, "num_expert_per_tok: 4, which .* to num_experts_per_tok"),
        ({"model_type": "mixtral", "num_local_experts": 4, "num_experts": 8}, "num_local_experts: 4, and .* takes 8"),
        ({"model_type": "t5"}, "'t5' is not a causal language model"),
        ({"model_type": "vit"}, "'vit' is not a causal language model"),
        *(
            (
                {"model_type": "mixtral", "architectures": [f"Mixtral{ending}"]},
                f"is a Mixtral{ending} .* no LM head; give",
            )
            for ending in ("ForSequenceClassification", "ForQuestionAnswering", "ForProcessRewardModel")
        ),
    ],
)
def test_broken_config(tmp_path: Path, config: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_model_source(folder_with(tmp_path, config))


def test_a_number_that_stands_for_what_the_type_computes_is_no_other(tmp_path: Path) -> None:
    config = {"model_type": "ernie4_5_moe", "num_hidden_layers": 4, "moe_layer_end_index": -1}
    assert find_model_source(folder_with(tmp_path, config)).config.moe_layer_end_index == 3


def test_folder_without_config_and_a_file_in_its_place(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        find_model_source(str(tmp_path))
    for below in ("snapshots/ab12/config.json", "checkpoint-50/adapter_config.json"):  # of the hub's cache, of trainers
        (tmp_path / below).parent.mkdir(parents=True)
        (tmp_path / below).touch()
    with pytest.raises(UserError, match=r"no config\.json.*there is one in .*/checkpoint-50 and in .*/snapshots/ab12$"):
        find_model_source(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    for name in ("adapter_model.safetensors", "adapter_config.json"):  # the latter alone stays where a merge is saved
        (tmp_path / name).touch()
        with pytest.raises(UserError, match=rf"holds an adapter beside its config\.json \({name}\)"):
            find_model_source(str(tmp_path))
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(UserError, match=r"model\.safetensors' is a file; give its folder; it holds adapter_model"):
        find_model_source(str(file))


def test_code_in_a_folder_does_not_run(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('it ran')")
    config = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}}
    with pytest.raises(UserError, match="never run"):
        find_model_source(folder_with(tmp_path, config))
