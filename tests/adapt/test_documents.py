"""Layers that carry a state run on packed documents as on each document alone: values, losses and every gradient.

Tolerance: relative, of the norm of each gradient, in float32; rounding, as products have other sizes.
"""

import re
import sys
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations import hub_kernels

from moetune.adapt.attention import BY_DOCUMENTS, document_inputs, takes_cu_seqlens
from moetune.adapt.documents import (
    _takes_documents,
    is_split_by_documents,
    modules_with_state,
    split_by_documents,
)
from moetune.adapt.packages import leave_out_broken_packages
from moetune.adapt.scans import recompute_scans
from moetune.compat.transformers import Operation, _operations, carries_state, scans_of, set_attention, without_packages
from moetune.config.schema import RunConfig
from moetune.memory.trace import trace, tracker
from moetune.memory.trace.tracker import Tracker
from moetune.models.catalog.gpus import find_gpu
from moetune.models.stack import decoder_layers
from moetune.models.structure import meta_model
from moetune.training.isolation import refuse_leaky_packing
from moetune.training.step.batch import Row, collate
from moetune.training.step.loss import IGNORED
from moetune.training.step.micro_step import token_loss
from tests.resolved import build, measure
from tests.thinned import thinned
from tests.toys import VOCAB, causal_lm_types, toy_config, toy_model

Install: TypeAlias = Callable[..., Operation]
TOLERANCE = 1e-5
ROWS = ((27, 5, 32), (64,), (1, 40, 23))
# fmt: off
HYBRIDS = (
    "bailing_hybrid", "bamba", "falcon_h1", "granitemoehybrid", "inkling2_text", "inkling_text", "jamba", "kimi_linear",
    "lfm2", "lfm2_moe", "lfm3", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text",
    "qwen3_next", "qwen4_exp_text", "recurrent_gemma", "zamba", "zamba2", "zaya",
)
# fmt: on
"""Every causal language model of text with attention and with layers that carry a state."""
RECURRENT = {"falcon_mamba", "mamba", "mamba2"}
"""Models of such layers alone. rwkv and xlstm are too; they keep their state outside of transformers' caches."""
SIZES: dict[str, dict[str, Any]] = {
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "ple_layer_ids": [1],
        "ngram_size": 3,
        "heads_per_ngram": 2,
        "ple_embed_dim": 32,
        "eos_token_id": 2,
    },
}


def hybrid(model_type: str, *, recomputing: bool = True, **sizes: Any) -> PreTrainedModel:
    model = toy_model(model_type, **SIZES.get(model_type, {}), **sizes)
    generator = torch.Generator().manual_seed(7)
    for module in model.modules():
        if isinstance(module, nn.Conv1d):  # some begin at zero
            module.weight.data.normal_(std=0.3, generator=generator)
    plain = meta_model(model.config)
    if recomputing:
        recompute_scans(model)
    split_by_documents(model)
    set_attention(model.config, BY_DOCUMENTS if takes_cu_seqlens(plain, None) else "sdpa")
    return model


def one_by_one(layer: nn.Module) -> bool:
    """Whether a decoder layer has modules with a state that run on one document after the other."""
    return not all(map(_takes_documents, modules_with_state(layer)))


def rows_of(lengths: tuple[tuple[int, ...], ...] = ROWS) -> list[Row]:
    generator = torch.Generator().manual_seed(5)
    rows: list[Row] = []
    for row in lengths:
        ids = torch.randint(3, VOCAB, (sum(row),), generator=generator)
        positions = torch.cat([torch.arange(size) for size in row])
        labels = ids.where(positions != 0, IGNORED)
        columns = {"input_ids": ids, "labels": labels, "position_ids": positions, "is_token": torch.ones_like(ids)}
        rows.append({name: column.numpy() for name, column in columns.items()})
    return rows


def gradients(model: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def alone(model: PreTrainedModel, rows: list[Row]) -> Tensor:
    """The summed loss of every document in a batch of its own."""
    losses = []
    for row, sizes in zip(rows, ROWS, strict=True):
        columns = {
            name: torch.as_tensor(row[name], device=model.device).split(sizes) for name in ("input_ids", "labels")
        }
        for ids, labels in zip(columns["input_ids"], columns["labels"], strict=True):
            losses.append(token_loss(model, {"input_ids": ids[None], "labels": labels[None]}))
    return torch.stack(losses).sum()


def assert_equal(packed: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    """Gradients that are zero but for rounding are compared with the largest of the model's."""
    assert packed.keys() == expected.keys()
    largest = max(gradient.norm() for gradient in expected.values())
    for name, gradient in expected.items():
        assert (packed[name] - gradient).norm() <= tolerance * gradient.norm().clamp(min=1e-3 * largest), name


@pytest.mark.one_in(4)
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("model_type", thinned(HYBRIDS, 11, ("zaya",)))
def test_losses_and_gradients_are_those_of_the_documents_alone(model_type: str, checkpointing: str) -> None:
    model, rows = hybrid(model_type), rows_of()
    refuse_leaky_packing(model, len(rows), sum(ROWS[0]))
    if checkpointing == "full":
        model.activation_checkpointing_enable()
        model.train()
    batch = collate(rows, 0, document_inputs=document_inputs(model))
    loss = token_loss(model, batch)
    packed = gradients(model, loss)
    model.eval()
    expected = alone(model, rows)
    assert (loss - expected).abs() <= TOLERANCE * expected
    assert_equal(packed, gradients(model, expected))


@pytest.mark.full
@pytest.mark.parametrize("model_type", ["granitemoehybrid", "qwen3_next"])
def test_many_short_documents_take_as_much_as_two(model_type: str) -> None:
    """Each is padded to a chunk, but what only the scan needs is there for one at a time."""

    def peak(model: PreTrainedModel, *lengths: int) -> int:
        model.zero_grad()
        with Tracker({}) as tracker:
            token_loss(model, collate(rows_of((lengths,)), 0, document_inputs=document_inputs(model))).backward()
        return tracker.peak_bytes

    model = hybrid(model_type)
    many, two = peak(model, *[8] * 16), peak(model, 64, 64)
    assert many <= 1.04 * two
    kept = hybrid(model_type, recomputing=False)
    assert peak(kept, *[8] * 16) > 2 * many
    assert peak(kept, 64, 64) > two


@pytest.mark.full
def test_the_hybrids_are_those_that_transformers_has() -> None:
    found = {name for name in causal_lm_types() if _has_state(name)}
    assert {name.removesuffix("_text") for name in found - RECURRENT} == {
        name.removesuffix("_text") for name in HYBRIDS
    }
    assert found >= RECURRENT


def _has_state(model_type: str) -> bool:
    try:
        model = meta_model(toy_config(model_type, **SIZES.get(model_type, {})))
    except Exception:  # types that no toy is built of
        return False
    return any(carries_state(module) for layer in decoder_layers(model).values() for module in layer.modules())


@pytest.mark.full
@pytest.mark.parametrize("model_type", thinned(("lfm2_moe", "qwen3_next", "granitemoehybrid", "zaya", "minimax"), 9))
def test_fake_steps_run_document_by_document_too_and_take_byte_for_byte_what_real_ones_take(
    model_type: str, tmp_path: Path
) -> None:
    toy_config(model_type).save_pretrained(tmp_path)
    run = RunConfig.model_validate(
        {
            "model": {"path": str(tmp_path), "weights": "random", "base": "fp32", "dtype": "fp32"},
            "adapt": {"router": "all", "lora": {"rank": 4, "alpha": 8, "targets": ["attention", "experts"]}},
            "train": {"micro_batch": 2, "sequence_length": 40, "accumulate": 2},
        }
    )
    measured = measure(run, "cpu", steps=2)
    counts = iter(measured.counts)
    fake = trace(run, lambda *_: next(counts), micro_steps=2)
    assert measured.trace is not None
    assert fake.parts() == measured.trace.parts()
    assert any(is_split_by_documents(layer) for layer in decoder_layers(build(run, "meta").model).values())


@pytest.mark.full
@pytest.mark.parametrize("model_type", thinned(("nemotron_h", "qwen3_next", "kimi_linear", "deepseek_v4"), 4))
def test_a_trace_that_writes_scans_again_equals_one_that_runs_them_all(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy_config(model_type).save_pretrained(tmp_path)
    run = RunConfig.model_validate(
        {
            "model": {"path": str(tmp_path), "weights": "random"},
            "adapt": {"lora": {"rank": 4, "alpha": 8, "targets": ["attention", "experts"]}},
            "train": {"micro_batch": 1, "sequence_length": 40, "accumulate": 2},
        }
    )
    written = trace(run, gpu=find_gpu("l40s"))
    monkeypatch.setattr(tracker, "key_of", lambda tensors: None)
    ran = trace(run, gpu=find_gpu("l40s"))
    assert written.log.entries == ran.log.entries
    assert [(block.bytes, block.part, block.phase, block.module, block.op) for block in written.log.blocks] == [
        (block.bytes, block.part, block.phase, block.module, block.op) for block in ran.log.blocks
    ]
    assert {part: pytest.approx(vars(work)) for part, work in ran.work.items()} == {
        part: vars(work) for part, work in written.work.items()
    }
    assert len(written.log.done) < len(ran.log.done)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("model_type", thinned(("qwen3_next", "kimi_linear", "olmo_hybrid", "qwen4_exp_text"), 2))
def test_a_package_that_takes_documents_gets_all_of_them_at_once(
    model_type: str, checkpointing: str, installed: Install
) -> None:
    model, rows = hybrid(model_type), rows_of()
    layers, calls = decoder_layers(model).values(), list[Tensor]()
    assert any(map(one_by_one, layers))
    installed(model, calls)
    assert not any(map(one_by_one, layers)) or model_type == "qwen4_exp_text"
    refuse_leaky_packing(model, len(rows), sum(ROWS[0]))
    if checkpointing == "full":
        model.activation_checkpointing_enable()
        model.train()
    calls.clear()
    loss = token_loss(model, collate(rows, 0, document_inputs=document_inputs(model)))
    packed = gradients(model, loss)
    assert {tuple(offsets.tolist()) for offsets in calls} == {(0, 27, 32, 64, 128, 129, 169, 192)}
    with without_packages(model):
        model.eval()
        expected = alone(model, rows)
        assert (loss - expected).abs() <= TOLERANCE * expected
        assert_equal(packed, gradients(model, expected))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (None, None),
        (lambda out: out.register_hook(_refuse) and out, "RuntimeError: Triton is too old"),
        (lambda out: out.roll(1, 1), r"results differ by \d+\.\d%"),
    ],
)
def test_a_package_that_does_not_work_here_gives_way(damage: Any, reason: str | None, installed: Install) -> None:
    """One that raises in backward, as flash-linear-attention does on some cards, and one that is wrong."""
    model = hybrid("qwen3_next")
    scan = installed(model, [], damage)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        leave_out_broken_packages(model, torch.float32)
        leave_out_broken_packages(model, torch.float32)
    found = [str(one.message) for one in said if "does not work here" in str(one.message)]
    assert scan.is_kernel() == (reason is None)
    assert len(found) == (reason is not None)
    if reason is not None:
        assert re.search(f"^flash-linear-attention: its chunk_gated_delta_rule does not work here .{reason}", found[0])
        assert scan.is_in_torch()


def _refuse(gradient: Tensor) -> Tensor:
    raise RuntimeError("Triton is too old")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """A function that lets a package stand in for a model's scan: transformers' own code, one document after the other,
    by the offsets that it is given and lists. `damage` changes the output."""

    def install(
        model: PreTrainedModel, calls: list[Tensor], damage: Callable[[Tensor], Tensor] | None = None
    ) -> Operation:
        layers = decoder_layers(model).values()
        scan = next(scan for layer in layers for module in modules_with_state(layer) for scan in scans_of(module))
        plain = scan.function.__wrapped__  # type: ignore[attr-defined]

        def kernel(
            q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
            initial_state: Tensor | None = None, output_final_state: bool = False,
            use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None,
        ) -> tuple[Tensor, Tensor]:  # fmt: skip
            offsets = torch.tensor([0, q.shape[1]]) if cu_seqlens is None else cu_seqlens
            calls.append(offsets)
            how = {"initial_state": initial_state, "output_final_state": output_final_state}
            how["use_qk_l2norm_in_kernel"] = use_qk_l2norm_in_kernel
            made = [
                plain(*(value[:, begin:end] for value in (q, k, v)), g=g[:, begin:end], beta=beta[:, begin:end], **how)
                for begin, end in pairwise(offsets.tolist())
            ]
            out = torch.cat([out for out, _ in made], 1)
            return out if damage is None else damage(out), made[-1][1]

        package = ModuleType("fla")
        monkeypatch.setitem(sys.modules, "fla", package)
        path = hub_kernels._KERNELS_INTERNAL_PATH_MAPPINGS.get(scan.kernel)
        for part in path.split(".") if path else ():
            setattr(package, part, package := ModuleType(part))
        setattr(package, scan.kernel, kernel)
        wrapped = hub_kernels.use_kernel_func_from_hub_with_fallback(scan.kernel, "fla")(plain)
        monkeypatch.setitem(scan.space, scan.name, wrapped)
        _operations.cache_clear()
        return Operation(scan.space, scan.name, wrapped)

    yield install
    monkeypatch.undo()
    _operations.cache_clear()
