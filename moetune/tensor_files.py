"""Safetensors: headers, rows read or overwritten, a checkpoint's files listed, files created.

Files are read and written with plain I/O, not memory-mapped, so only the requested rows are in memory. Nothing in a
file is executed. Whatever is read is looked through for NaN and infinity, because a loss may be finite all the same:
torch's flash attention on a CPU returns zeros for a query of NaN where there are few keys.
"""

import json
import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from typing_extensions import TypedDict

from moetune.errors import UserError, reading, shown
from moetune.files import refuse_pointer
from moetune.json_files import parse_json, read_json

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
"""Dtype in safetensors' spelling -> torch dtype."""
_OTHER_FORMATS = {
    r"run\.yaml|trained\.safetensors": "of a run, which moetune export RUN_DIR --format merged makes a model of",
    r"adapter_model\.(safetensors|bin)": "an adapter, which moetune adapter merge BASE {0} makes a model of",
    r"delta\.safetensors": "a delta, which moetune apply {0} --to BASE makes a model of",
    r"global_step\d+": "DeepSpeed's shards, which python zero_to_fp32.py . NEW_FOLDER --safe_serialization joins there",
    r".*\.distcp": "torch's shards, which accelerate merge-weights {0} NEW_FOLDER joins",
    r"pytorch_model_fsdp_0": "torch's shards, which accelerate merge-weights {0}/pytorch_model_fsdp_0 NEW_FOLDER joins",
    r"latest_checkpointed_iteration\.txt": "of Megatron's shards, which Megatron-Bridge's AutoBridge.export_ckpt joins",
    r"pytorch_model.*\.bin": 'written again by python -c "from transformers import AutoModelForCausalLM as Model; '
    "Model.from_pretrained('{0}', dtype='auto').save_pretrained('NEW_FOLDER')\"",
    r"model-\d+-of-\d+\.safetensors": f"its {INDEX_FILE} is missing; copy it there from where the model is published",
    r"(?i).*\.(gguf|safetensors|pth|pt|ckpt|bin|npz|nemo|msgpack|h5|onnx)": "another format or other names of tensors; "
    "take the model as it is published for transformers",
}
"""Pattern of names of files and folders that hold weights -> how they become a checkpoint that is read."""
_BLOCK = 2**22  # elements in a block of `Stored.blocks`; bytes in one of `pieces`
_NOT_FINITE = {torch.float8_e4m3fn: (0x7F, 0x7F), torch.float8_e5m2: (0x7F, 0x7C), torch.float8_e8m0fnu: (0xFF, 0xFF)}
"""8-bit float -> its bits without a sign, and the least pattern of them that is NaN or infinity."""
_CODES = 2**20  # 8-bit floats that are looked at together, because they are in the processor's cache
NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""Torch dtype -> safetensors' spelling."""


@dataclass(frozen=True)
class Stored:
    """One tensor in a safetensors file. Rows are slices along its first axis; a scalar has one row.

    `dtype` is in safetensors' spelling, such as `BF16`; `offset` is the position of the first byte in the file. `name`
    is for messages.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    name: str = field(default="", kw_only=True)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape without the first axis."""
        return self.shape[1:]

    @property
    def num_rows(self) -> int:
        """Length of the first axis; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        """Torch dtype of the tensor; raises `UserError` if `DTYPES` has none for it."""
        if self.dtype not in DTYPES:
            raise UserError(f"{str(self.file)!r}: tensors of type {self.dtype} cannot be read")
        return DTYPES[self.dtype]

    @property
    def _row_bytes(self) -> int:
        return math.prod(self.row_shape) * self.torch_dtype.itemsize

    def rows(self, start: int = 0, stop: int | None = None, device: torch.device | str = "cpu") -> Tensor:
        """Read the rows [start, stop) as a new tensor [stop - start, ...] in the file's dtype; None for `stop` is the
        end.

        Raises `UserError` if the file is too short, its dtype is not supported, or a value is not finite.
        """
        count = (self.num_rows if stop is None else stop) - start
        rows = torch.empty((count, *self.row_shape), dtype=self.torch_dtype)
        data = rows.view(-1).view(torch.uint8).numpy()
        with self.file.open("rb") as file:
            file.seek(self.offset + start * self._row_bytes)
            if file.readinto(data.data) != len(data):
                raise UserError(f"{str(self.file)!r} ends before its tensors do")
        return finite(rows, self.name, self.file).to(device)

    def whole(self, device: torch.device | str = "cpu") -> Tensor:
        """Read the whole tensor, in its own shape, to `device`."""
        return self.rows(device=device).reshape(self.shape)

    def is_blank(self) -> bool:
        """Return whether the file has only zeros at the beginning, in the middle and at the end of the tensor."""
        size = min(4096, self.nbytes)
        with self.file.open("rb") as file:
            for at in (0, (self.nbytes - size) // 2, self.nbytes - size):
                file.seek(self.offset + at)
                if any(file.read(size)):
                    return False
        return True

    def write(self, rows: Tensor, start: int = 0) -> None:
        """Overwrite rows of the file from `start` on with the CPU tensor `rows` [n, ...], cast to the file's dtype."""
        assert tuple(rows.shape[1:]) == self.row_shape, (tuple(rows.shape), self.shape)
        assert start + len(rows) <= self.num_rows
        data = self.as_written(rows).view(-1).view(torch.uint8).numpy()
        with self.file.open("r+b") as file:
            file.seek(self.offset + start * self._row_bytes)
            file.write(data.data)

    def as_written(self, rows: Tensor) -> Tensor:
        """Return rows as `write` writes them: contiguous, in the file's dtype."""
        return rows.to(self.torch_dtype).contiguous()

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield (first row, row after the last) of consecutive blocks of at most about 4 million elements."""
        step = max(1, _BLOCK * self.num_rows // max(1, self.numel))
        for start in range(0, self.num_rows, step):
            yield start, min(start + step, self.num_rows)

    def within(self, folder: Path) -> "Stored":
        """Return the same tensor in the copy of its file, with the same name, in `folder`; nothing is copied."""
        return replace(self, file=folder / self.file.name)


@dataclass(frozen=True)
class Held:
    """A tensor in memory that is read by rows like a `Stored` tensor."""

    tensor: Tensor

    @property
    def torch_dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def rows(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the rows `start` to `stop` (excluded; None for all) on the CPU; they may be a view and must
        not be modified."""
        tensor = self.tensor.detach()
        return (tensor if tensor.dim() else tensor[None])[start:stop].cpu()


class _Index(TypedDict):
    weight_map: dict[str, str]


def weight_files(folder: Path) -> list[Path]:
    """Return the paths of a checkpoint's safetensors files: `model.safetensors`, else the files of the index, sorted.

    Raises:
        UserError: there are none (other formats are not read), the index is invalid, or a listed file is missing.
    """
    index = folder / INDEX_FILE
    if (folder / SINGLE_FILE).is_file():
        listed = {*read_json(index, _Index)["weight_map"].values()} if index.is_file() else set()
        if others := [name for name in sorted(listed - {SINGLE_FILE}) if (folder / name).is_file()]:
            raise UserError(
                f"{str(folder)!r} holds {SINGLE_FILE} and, by its {INDEX_FILE}, {others[0]}: two checkpoints; "
                "remove the files of one of them"
            )
        return [folder / SINGLE_FILE]
    if not index.is_file():
        raise UserError(
            f"{str(folder)!r} holds no {SINGLE_FILE} and no {INDEX_FILE}; only safetensors checkpoints are read"
            f"{of_another_format(folder)}"
        )
    names = sorted(set(read_json(index, _Index)["weight_map"].values()))
    if not names:
        raise UserError(f"{str(index)!r} lists no file")
    for name in names:
        if not is_name_of_weights(name):
            raise UserError(f"{str(index)!r} lists {shown(name)}, which is no safetensors file beside it")
        if not (folder / name).is_file():
            raise UserError(f"{str(index)!r} lists {name!r}, which is missing")
    return [folder / name for name in names]


def of_another_format(folder: Path) -> str:
    """Return `; it holds NAME, …`, weights in another format and how to get them in this one; "" if there are none."""
    for pattern, remedy in _OTHER_FORMATS.items():
        for path in sorted(folder.glob("*")):
            if re.fullmatch(pattern, path.name) and not path.exists():
                return f"; {path.name} is a link to what is not there: download it again"
            if re.fullmatch(pattern, path.name) and path.name != SINGLE_FILE:
                return f"; it holds {path.name}: {remedy.format(folder)}"
    return ""


def is_name_of_weights(name: object) -> bool:
    """Return whether `name` is a plain file name, without a folder, that ends in `.safetensors`."""
    return isinstance(name, str) and Path(name).name == name and "\0" not in name and name.endswith(".safetensors")


def read_headers(folder: Path) -> dict[str, Stored]:
    """Read the headers of a checkpoint's files, and return tensor name -> where it is stored.

    Raises:
        UserError: there are no safetensors in the folder, a file is damaged, or a tensor is in two files.
    """
    stored: dict[str, Stored] = {}
    for file in weight_files(folder):
        for name, tensor in read_header(file).items():
            if name in stored:
                raise UserError(f"tensor {name!r} is in {stored[name].file.name!r} and again in {file.name!r}")
            stored[name] = tensor
    return stored


def read_header(file: Path) -> dict[str, Stored]:
    """Read the header of one safetensors file, and return tensor name -> where it is stored.

    Raises:
        UserError: the file cannot be read, is not a safetensors file, or is cut short.
    """
    with reading(repr(str(file))):
        refuse_pointer(file)
        with safe_open(file, framework="pt"):  # safetensors checks that offsets, shapes and file size agree
            pass
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = parse_json(opened.read(length), dict[str, Any], repr(str(file)))
        return {
            name: Stored(file, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0], name=name)
            for name, entry in header.items()
            if name != "__metadata__"
        }


def pieces(file: Path) -> Iterator[tuple[int, Stored | None]]:
    """Yield (number of bytes, tensor) of the consecutive pieces of a safetensors file, of at most 4 MiB each.

    A piece belongs to one tensor; to None in the header, or if `DTYPES` lacks the tensor's dtype.
    """
    at = 0
    for tensor in (*sorted(read_header(file).values(), key=lambda tensor: tensor.offset), None):
        end = file.stat().st_size if tensor is None else tensor.offset
        yield from ((min(_BLOCK, end - start), None) for start in range(at, end, _BLOCK))
        at = end
        if tensor is not None and tensor.dtype in DTYPES:
            at += tensor.nbytes
            yield from ((min(_BLOCK, at - start), tensor) for start in range(end, at, _BLOCK))


def refuse_not_finite(tensors: Mapping[str, Stored]) -> None:
    """Read every tensor, a block at a time; raise `UserError` if one holds a NaN or an infinity."""
    for tensor in tensors.values():
        for start, stop in tensor.blocks():
            tensor.rows(start, stop)


def finite(tensor: Tensor, name: str, file: Path) -> Tensor:
    """Return a tensor that was read from a file; raise `UserError` if it holds a NaN or an infinity."""
    if bool(is_suspect(tensor)) and not _is_finite(tensor):
        refuse_value(name, file)
    return tensor


def refuse_value(name: str, file: Path) -> None:
    """Raise the `UserError` of a tensor in a file that holds a NaN or an infinity."""
    raise UserError(
        f"{str(file)!r}: {name} holds values that are not finite (NaN or infinity), so every number computed with it "
        "would be wrong; copy or download the file again, or take an earlier checkpoint"
    )


def is_suspect(tensor: Tensor) -> Tensor:
    """Return a boolean scalar on the tensor's device: False only if all values of the tensor are finite.

    One pass, at the speed of memory: a sum is not finite if one of its terms is not. It may also overflow.
    """
    if not (tensor.is_floating_point() and tensor.numel()):
        return torch.zeros((), dtype=torch.bool, device=tensor.device)
    if tensor.dtype in _NOT_FINITE:
        bits, least = _NOT_FINITE[tensor.dtype]
        codes = tensor.reshape(-1).view(torch.uint8).split(_CODES)
        return torch.stack([(part & bits).max() for part in codes]).max() >= least
    total = tensor.sum()
    return total - total != 0  # NaN, if it is not finite


def _is_finite(tensor: Tensor) -> bool:
    if tensor.dtype in _NOT_FINITE:
        return not is_suspect(tensor)
    return all(bool(part.isfinite().all()) for part in tensor.reshape(-1).split(_BLOCK))


def create_file(
    file: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> dict[str, Stored]:
    """Create a safetensors file of zeros, for `Stored.write` to fill; return tensor name -> where it is stored.

    `tensors` maps tensor name -> (dtype, shape). `metadata` are further entries of the file's metadata.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    # Widest dtype first, so that every tensor begins at a multiple of its item size, as safetensors readers expect.
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: (-item[1][0].itemsize, item[0])):
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", len(header)) + header)
        opened.truncate(8 + len(header) + end)
    return read_header(file)
