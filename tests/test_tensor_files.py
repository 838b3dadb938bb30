"""Safetensors files, row by row: what safetensors itself reads and writes, and nothing of a broken one."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moetune.errors import UserError
from moetune.tensor_files import create_file, read_header, read_headers, weight_files


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
