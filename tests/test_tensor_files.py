"""Safetensors files, row by row: what safetensors itself reads and writes, and nothing of a broken one."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moetune.errors import UserError
from moetune.models.hub.fingerprint import digest
from moetune.tensor_files import create_file, pieces, read_header, read_headers, weight_files


def test_rows_are_those_of_the_tensor(tmp_path: Path) -> None:
    tensors = {
        "m": torch.randn(5, 3),
        "h": torch.randn(4, 2, 2).bfloat16(),
        "s": torch.tensor(7),
        "n": torch.empty(0, 3),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    stored = read_headers(tmp_path)
    for name, tensor in tensors.items():
        assert stored[name].rows().reshape(tensor.shape).equal(tensor)
        assert (stored[name].shape, stored[name].torch_dtype) == (tuple(tensor.shape), tensor.dtype)
        assert (stored[name].numel, stored[name].nbytes) == (tensor.numel(), tensor.nbytes)
    assert stored["m"].rows(1, 3).equal(tensors["m"][1:3])


def test_rows_are_written_in_place(tmp_path: Path) -> None:
    layout = {"b": (torch.bfloat16, (3, 2)), "a": (torch.float32, (2,)), "c": (torch.uint8, (3,))}
    stored = create_file(tmp_path / "x.safetensors", layout)
    stored["b"].write(torch.tensor([[1.5, 2.0]]), start=1)
    stored["a"].write(torch.tensor([3.0, 4.0]))
    found = load_file(tmp_path / "x.safetensors")
    assert found["b"].tolist() == [[0, 0], [1.5, 2], [0, 0]]
    assert (found["a"].tolist(), found["c"].tolist()) == ([3, 4], [0, 0, 0])


HALF, BF16, FLOAT, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [HALF, BF16, FLOAT, DOUBLE, E4M3, E5M2])
def test_a_value_that_is_not_finite_is_named_when_it_is_read(dtype: torch.dtype, value: float, tmp_path: Path) -> None:
    weight = torch.full((3, 5), -1.0)
    weight[1, 4] = value
    converted = weight.to(dtype)
    if dtype is E4M3 and math.isinf(value):  # it has none: what is written is the largest value
        converted.view(torch.uint8)[1, 4] = 0xFF if value < 0 else 0x7F
    save_file({"sound": torch.ones(2), "layer.weight": converted}, tmp_path / "model.safetensors")
    stored = read_headers(tmp_path)
    stored["sound"].rows()
    stored["layer.weight"].rows(2)
    for read in (stored["layer.weight"].whole, lambda: digest(tmp_path / "model.safetensors", copy_to=tmp_path / "to")):
        (tmp_path / "to").mkdir(exist_ok=True)
        with pytest.raises(
            UserError, match=r"model\.safetensors': layer\.weight holds values that are not finite.*again"
        ):
            read()


@pytest.mark.parametrize("dtype", [HALF, BF16, FLOAT, DOUBLE, E4M3, E5M2])
def test_the_largest_values_are_read(dtype: torch.dtype, tmp_path: Path) -> None:
    """Their sum is infinite."""
    largest = torch.full((300,), torch.finfo(dtype).max, dtype=dtype)
    ones = torch.full((300,), -1)
    tensors = {"up": largest, "down": (-largest.double()).to(dtype), "ids": ones, "bytes": ones.to(torch.uint8)}
    save_file(tensors, tmp_path / "model.safetensors")
    for name, tensor in read_headers(tmp_path).items():
        assert tensor.rows().view(torch.uint8).equal(tensors[name].view(torch.uint8))
    (tmp_path / "to").mkdir()
    digest(tmp_path / "model.safetensors", copy_to=tmp_path / "to")
    copy = (tmp_path / "to" / "model.safetensors").read_bytes()
    assert copy == (tmp_path / "model.safetensors").read_bytes()


@pytest.mark.parametrize("block", [16, 1 << 22])
def test_pieces_are_the_whole_file(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tensors' own dtypes, and whole values."""
    monkeypatch.setattr("moetune.tensor_files._BLOCK", block)
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.randn(7, 3), "b": torch.randn(5).half(), "c": torch.tensor(3)}, file)
    stored, at = read_header(file), 0
    for size, tensor in pieces(file):
        if tensor is not None:
            assert tensor == stored[tensor.name]
            assert size <= block
            assert (at - tensor.offset) % tensor.torch_dtype.itemsize == size % tensor.torch_dtype.itemsize == 0
        at += size
    assert at == file.stat().st_size


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 9\n")
    with pytest.raises(UserError, match=r"x\.safetensors' is a pointer of Git LFS; .*git lfs pull"):
        read_header(tmp_path / "x.safetensors")


def test_a_file_that_is_cut_short_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(9)}, tmp_path / "x.safetensors")
    (tmp_path / "x.safetensors").write_bytes((tmp_path / "x.safetensors").read_bytes()[:-1])
    with pytest.raises(UserError, match=r"x\.safetensors' cannot be read"):
        read_header(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "gone.safetensors"}}, "'gone.safetensors', which is missing"),
        ({"weight_map": {"a": "../x.safetensors"}}, "no safetensors file beside it"),
        ({"weight_map": {"a": "model.bin"}}, "no safetensors file beside it"),
        ({}, "weight_map: Field required"),
    ],
)
def test_an_index_that_misleads_is_refused(index: dict[str, object], message: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=message):
        weight_files(tmp_path)


@pytest.mark.parametrize("shape", [(7, 3), (5,), (), (0, 3), (3, 0), (2, 2000)])
def test_blocks_cover_every_row_once(shape: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moetune.tensor_files._BLOCK", 6)
    stored = create_file(tmp_path / "a.safetensors", {"a": (torch.float32, shape)})["a"]
    blocks = list(stored.blocks())
    assert [row for start, stop in blocks for row in range(start, stop)] == list(range(stored.num_rows))
    width = max(1, stored.numel // max(1, stored.num_rows))
    assert all(stop - start == 1 or (stop - start) * width <= 6 for start, stop in blocks)


def test_two_checkpoints_in_a_folder_are_refused(tmp_path: Path) -> None:
    for name in ("model.safetensors", "model-00001-of-00001.safetensors"):
        save_file({"a": torch.ones(1)}, tmp_path / name)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        if name == "model.safetensors":
            assert [file.name for file in weight_files(tmp_path)] == [name]
    with pytest.raises(UserError, match=r"holds model\.safetensors and, by its .*, model-00001-of-00001"):
        weight_files(tmp_path)


def test_a_link_to_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blobs" / "gone")
    with pytest.raises(UserError, match=r"model\.safetensors is a link to what is not there"):
        weight_files(tmp_path)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("pytorch_model-00001-of-00002.bin", r"\.save_pretrained\("),
        ("__0_0.distcp", "accelerate merge-weights"),
        ("run.yaml", "of a run, which moetune export RUN_DIR"),
        ("adapter_model.safetensors", "an adapter, which moetune adapter merge BASE"),
        ("delta.safetensors", "a delta, which moetune apply"),
        ("global_step10", "zero_to_fp32.py"),
        ("latest_checkpointed_iteration.txt", "AutoBridge.export_ckpt joins"),
        ("model-00001-of-00002.safetensors", "index.json is missing"),
        ("m-Q4_K_M.gguf", "as it is published for transformers"),
    ],
)
def test_weights_in_another_format_are_named_with_the_way_from_them(name: str, remedy: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UserError, match=f"it holds {re.escape(name)}: .*{remedy}"):
        weight_files(tmp_path)
