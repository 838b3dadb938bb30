"""The GPUs of the catalog: every entry reads, says where its figures are from, and is found by what users call it."""

import re
from pathlib import Path

import pytest

from moetune.errors import UserError
from moetune.models.catalog.gpus import Figure, Gpu, find_gpu, gpu_names

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "gpus.md"
GIB, GB, MIB = 2**30, 10**9, 2**20


def figures(gpu: Gpu) -> dict[str, Figure]:
    return {name: value for name, value in vars(gpu).items() if isinstance(value, Figure)}


@pytest.mark.parametrize("name", gpu_names())
def test_every_entry_reads(name: str) -> None:
    gpu = find_gpu(name)
    assert gpu.name == name
    assert find_gpu(gpu.full_name) is gpu
    for figure in figures(gpu).values():
        assert type(figure.value) is int
        assert figure.value > 0
        assert figure.source
    assert 10 * GIB < gpu.memory.value < 200 * GIB
    assert 100 * MIB <= gpu.context.value <= 1024 * MIB
    # Hopper and Blackwell, that is 9 and above, get larger workspaces from torch.
    assert gpu.cublas_workspace.value == (32 * MIB if gpu.capability >= (9, 0) else 8_519_680)
    assert (gpu.bf16 is not None) == (gpu.capability >= (8, 0))
    assert (gpu.fp16 is not None) == (gpu.bf16 is None)
    assert gpu.fp32 is not None
    assert gpu.host_link is not None
    assert gpu.bandwidth is not None
    assert 100 * GB < gpu.bandwidth.value < 10_000 * GB


def test_what_is_on_the_label_is_not_what_a_process_may_take() -> None:
    for name, label in {"l40s": 48, "a40": 48, "t4": 16, "rtx-4090": 24, "h200": 141}.items():
        assert find_gpu(name).memory.value < label * GIB


@pytest.mark.parametrize(
    ("name", "spellings"),
    [
        ("l40s", ("l40s", "L40S", " l40s ", "NVIDIA L40S", "nvidia_l40s")),
        ("rtx-4090", ("RTX 4090", "4090", "NVIDIA GeForce RTX 4090")),
        ("h100-80gb", ("H100",)),
        ("t4", ("Tesla T4",)),
    ],
)
def test_spellings(name: str, spellings: tuple[str, ...]) -> None:
    assert [find_gpu(spelling).name for spelling in spellings] == [name] * len(spellings)


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        ("44GiB", 44 * GIB),
        ("44 GiB", 44 * GIB),
        ("44gib", 44 * GIB),
        ("48GB", 48 * GB),
        ("45056MiB", 44 * GIB),
        ("48000 MB", 48 * GB),
        ("44.5GiB", 89 * GIB // 2),
        ("0.1GB", GB // 10),
        ("47244640256B", 44 * GIB),
    ],
)
def test_a_size_is_a_gpu(size: str, nbytes: int) -> None:
    gpu = find_gpu(size)
    assert gpu.name == size
    assert gpu.memory.value == nbytes
    ada = find_gpu("l40s")
    assert (gpu.capability, gpu.context.value) == (ada.capability, ada.context.value)
    assert gpu.cublas_workspace.value == ada.cublas_workspace.value
    assert {gpu.bandwidth, gpu.bf16, gpu.fp16, gpu.fp32, gpu.host_link, gpu.interconnect} == {None}
    assert gpu.assumptions == (
        f"memory of a GPU of {size}: the size given: all of it is taken to be usable",
        f"context of a GPU of {size}: assumed as on NVIDIA L40S",
        f"cuBLAS workspace of a GPU of {size}: assumed as on NVIDIA L40S",
    )


def test_assumptions_leave_out_what_we_measured() -> None:
    ours, theirs = Figure(1, "our benchmark", measured_here=True), Figure(2, "a datasheet")
    gpu = Gpu("x1", "X1", (8, 9), memory=ours, context=theirs, cublas_workspace=ours)
    assert gpu.assumptions == ("context of X1: a datasheet",)


@pytest.mark.parametrize("size", ["0GiB", "0 GB", "-44GiB", "-0.5MB", "0.0000000001GB"])
def test_a_size_is_above_zero(size: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(repr(size))} is not a valid memory size: it must be above zero"):
        find_gpu(size)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("l4os", "Did you mean 'l40s'?"),
        ("rtx 4080", "Did you mean 'rtx-4090'?"),
        ("a100", "Did you mean 'a100-40gb' or 'a100-80gb'?"),
        ("3090 ti", "Did you mean '3090'?"),
        ("L40", "Did you mean 'l40s'?"),
        ("1e3GB", "A size is written like 44GiB"),
        ("GiB", "A size is written like 44GiB"),
        ("44GiB of it", "A size is written like 44GiB"),
        ("", "A size is written like 44GiB"),
    ],
)
def test_what_is_unknown_is_named_with_a_remedy(name: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        find_gpu(name)
    message = str(caught.value)
    assert message.startswith(f"{name!r} is neither a known GPU nor a size.")
    assert hint in message
    assert f"Known GPUs: {', '.join(gpu_names())}." in message


@pytest.mark.parametrize(
    ("name", "size", "card"), [("48", "48GiB", "l40s"), ("24g", "24GiB", "rtx-4090"), ("80 G", "80GiB", "h100-80gb")]
)
def test_a_size_without_its_unit_is_answered_with_it(name: str, size: str, card: str) -> None:
    with pytest.raises(UserError, match=f"^{name!r} is a size without its unit: write {size}") as caught:
        find_gpu(name)
    assert card in str(caught.value)


@pytest.mark.parametrize(
    ("name", "card", "count"),
    [("2x 24GiB", "24GiB", 2), ("2xA6000", "a6000", 2), ("8 × H100", "h100-80gb", 8), ("80GB x 4", "80GB", 4)],
)
def test_several_cards_are_answered_with_one_and_a_count(name: str, card: str, count: int) -> None:
    with pytest.raises(UserError, match=f"^{name!r} is several cards: the card is {card!r}") as caught:
        find_gpu(name)
    assert f"--count {count} of a plan" in str(caught.value)
    assert f"hardware.count: {count}" in str(caught.value)


def test_an_unknown_name_that_is_near_nothing_gets_no_suggestion() -> None:
    with pytest.raises(UserError) as caught:
        find_gpu("zzz")
    assert "Did you mean" not in str(caught.value)


def row(gpu: Gpu) -> str:
    def number(figure: Figure | None, unit: int) -> str:
        return "–" if figure is None else f"{figure.value / unit:,.2f}".rstrip("0").rstrip(".")

    cells = [
        f"`{gpu.name}`",
        gpu.full_name,
        "{}.{}".format(*gpu.capability),
        f"{gpu.memory.value / GIB:.2f}",
        number(gpu.context, MIB),
        f"{gpu.cublas_workspace.value:,}",
        number(gpu.bandwidth, GB),
        number(gpu.bf16 or gpu.fp16, 10**12),
        number(gpu.fp32, 10**12),
        number(gpu.host_link, GB),
        number(gpu.interconnect, GB),
    ]
    return f"| {' | '.join(cells)} |"


def test_the_page_shows_the_catalog() -> None:
    table = "\n".join(row(find_gpu(name)) for name in gpu_names())
    assert f"|---|\n{table}\n\n" in PAGE.read_text(encoding="utf-8")
