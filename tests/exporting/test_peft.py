"""Stock PEFT with an exported adapter on the plain model computes what was trained, and adapters come back."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from moetune.adapt.build import Adapted
from moetune.adapt.start_from.peft_adapter import load_peft
from moetune.adapt.start_from.peft_layout import join_experts, split_experts
from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.exporting.export import export
from moetune.exporting.finished_run import open_run
from moetune.exporting.peft import write_peft
from moetune.models.hub.fingerprint import Base, take_fingerprint
from moetune.training.checkpoint import TRAINED_FILE, parts_of
from moetune.training.manifest import write_manifest
from moetune.training.run_folder import RunFolder
from tests import small
from tests.reference import excite_, run_config, token_ids
from tests.resolved import build, train
from tests.toys import toy_model

RANK, ALPHA = 3, 7.5
LORA = {"rank": RANK, "alpha": ALPHA}
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@dataclass
class Run:
    """A run folder as training leaves it, and the model that is in its checkpoint."""

    folder: Path
    model: Path
    config: RunConfig
    adapted: Adapted

    def logits(self) -> Tensor:
        return logits(self.adapted.model)

    def plain(self) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32).eval()

    def fresh(self, **lora: Any) -> Adapted:
        """The model before training; `lora` changes settings of adapt.lora."""
        adapt = self.config.adapt.model_dump()
        adapt["lora"] |= lora
        config = run_config(self.model, adapt, model=self.config.model.model_dump())
        adapted = build(config, "cpu")
        adapted.model.eval()
        return adapted


def make_run(model_type: str, folder: Path, adapt: dict[str, Any], **sizes: Any) -> Run:
    """A run on a toy whose every trained tensor moved; base and compute in float32."""
    toy = toy_model(model_type, num_hidden_layers=2, **sizes)
    spread_(toy)
    toy.save_pretrained(folder / "model")
    settings = {"weights": "pretrained", "base": "fp32", "dtype": "fp32"}
    config = run_config(folder / "model", adapt, model=settings)
    adapted = build(config, "cpu")
    excite_(adapted.model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in adapted.trainable().items():
            if adapted.part_of(name) != "lora":
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    adapted.model.eval()
    write_run(folder / "run", config, adapted)
    return Run(folder / "run", folder / "model", config, adapted)


def spread_(model: nn.Module) -> None:
    """Draws routers wide enough apart that rounding never changes a choice, and buffers that are not zero."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "mlp.gate." in name or ".router." in name:
                tensor.normal_(std=0.5, generator=generator)


def write_run(folder: Path, config: RunConfig, adapted: Adapted, step: int = 3) -> None:
    checkpoint = folder / "checkpoints" / f"step-{step}"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (folder / "run.yaml").write_text(config.to_yaml())
    RunFolder(folder).write_base(Base("model", take_fingerprint(Path(config.model.path))))
    save_file(trained_of(adapted), checkpoint / TRAINED_FILE)
    write_manifest(checkpoint, step)


def trained_of(adapted: Adapted) -> dict[str, Tensor]:
    """What trains, by the names and in the pieces of a checkpoint."""
    places = parts_of(adapted)
    return {part.name: part.of(p.detach()).contiguous() for p, parts in places.items() for part in parts}


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=token_ids(), use_cache=False).logits


def stock(plain: PreTrainedModel, adapter: Path) -> PeftModel:
    """Loads as a user would. Nothing but PEFT's remark on patterns for parameters, which it does use, may be said."""
    with only_the_known_warning():
        return PeftModel.from_pretrained(plain, str(adapter)).eval()


@contextmanager
def only_the_known_warning() -> Iterator[None]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield
    others = [str(one.message) for one in said if "did not match any targeted module" not in str(one.message)]
    assert not [text for text in others if "adapter" in text or "target" in text], others


def assert_holds(adapted: Adapted, saved: dict[str, Tensor]) -> None:
    found = trained_of(adapted)
    assert found.keys() == saved.keys()
    for name, tensor in found.items():
        assert tensor.equal(saved[name]), name


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).norm() <= 1e-4 * expected.norm()


def check_export(run: Run, tmp_path: Path) -> PeftModel:
    """Exports, and compares logits; what trained must matter."""
    export(run.folder, "peft", tmp_path / "adapter")
    plain = run.plain()
    before = logits(plain)
    model = stock(plain, tmp_path / "adapter")
    expected = run.logits()
    assert (expected - before).norm() > 1e-2 * expected.norm()
    assert_same(logits(model), expected)
    return model


def factors_on(model: PeftModel) -> set[str]:
    found = {name for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    return {name.removeprefix("base_model.model.").removesuffix(".base_layer") for name in found}


ALL = ["attention", "experts"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"lora": LORA}),
    "mixtral split": ("mixtral", {"lora": LORA | {"gate_up": "split"}}),
    "experts alone": ("mixtral", {"lora": LORA | {"targets": ["experts"], "gate_up": "split"}}),
    "attention alone": ("mixtral", {"lora": LORA | {"targets": ["attention"], "layers": [1]}}),
    "one layer, three experts": ("mixtral", {"lora": LORA | {"layers": [1], "ids": [0, 3, 6], "gate_up": "split"}}),
    "router": ("mixtral", {"router": [1], "lora": LORA}),
    "router and norms": ("mixtral", {"router": "all", "also": ["norm"], "lora": LORA}),
    "embedding and head": ("mixtral", {"also": ["*embed_tokens*", "lm_head"], "lora": LORA}),
    "qwen2_moe": ("qwen2_moe", {"router": "all", "lora": LORA | {"targets": [*ALL, "shared_experts"]}}),
    "qwen2_moe split": ("qwen2_moe", {"lora": LORA | {"targets": [*ALL, "shared_experts"], "gate_up": "split"}}),
    "qwen2_moe, a shared projection": (
        "qwen2_moe", {"lora": LORA | {"targets": ["q_proj", "model.layers.1.mlp.shared_expert.up_proj"]}},
    ),
    "gpt_oss": ("gpt_oss", {"router": "all", "lora": LORA}),
    "gpt_oss split": ("gpt_oss", {"lora": LORA | {"gate_up": "split", "ids": [1, 2, 5]}}),
    "gpt_oss, part of a router": ("gpt_oss", {"also": ["*router.weight"], "lora": LORA}),
    "deepseek_v2": (
        "deepseek_v2", {"router": "all", "lora": LORA | {"targets": [*ALL, "shared_experts", "dense_mlp"]}},
    ),
    "deepseek_v2 split": ("deepseek_v2", {"lora": LORA | {"gate_up": "split"}}),
    "deepseek_v3, a buffer in the router": ("deepseek_v3", {"router": "all", "lora": LORA}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_stock_peft_computes_the_same_and_the_adapter_comes_back(case: str, tmp_path: Path) -> None:
    run = make_run(CASES[case][0], tmp_path, CASES[case][1])
    model = check_export(run, tmp_path)
    selection, layers = run.adapted.selection, run.adapted.structure.moe_layers
    experts = {layer.experts for layer in layers if layer.index in selection.lora_experts}
    assert factors_on(model) == {*selection.lora_linears, *experts}

    again = run.fresh()
    load_peft(again, tmp_path / "adapter")
    trained = run.adapted.trainable()
    for name, parameter in again.trainable().items():
        assert parameter.equal(trained[name]), name
    assert logits(again.model).equal(run.logits())


def test_a_tied_embedding_is_saved_under_both_names(tmp_path: Path) -> None:
    run = make_run("mixtral", tmp_path, {"also": ["*embed_tokens*"], "lora": LORA}, tie_word_embeddings=True)
    model = check_export(run, tmp_path).base_model.model
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    again = run.fresh()
    load_peft(again, tmp_path / "adapter")
    assert logits(again.model).equal(run.logits())


def test_a_run_that_trained(small_model: Path, small_data: Path, tmp_path: Path) -> None:
    config = small.run_config(small_model, small_data, tmp_path / "run", "lora", model={"base": "fp32"})
    train(config)
    export(tmp_path / "run", "peft", tmp_path / "adapter")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["adapter", "run"]
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(small_model)
    assert sorted(file.name for file in (tmp_path / "adapter").iterdir()) == [
        ".moetune", "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip
    adapted = build(config, "cpu")
    load_peft(adapted, tmp_path / "adapter")
    saved = load_file(tmp_path / "run" / "checkpoints" / "step-3" / "trained.safetensors")
    assert_holds(adapted, saved)
    plain = AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float32).eval()
    adapted.model.eval()
    assert_same(logits(stock(plain, tmp_path / "adapter")), logits(adapted.model))


def test_the_newest_checkpoint_is_exported(tmp_path: Path) -> None:
    run = make_run("mixtral", tmp_path, {"lora": LORA})
    excite_(run.adapted.model, seed=2)
    write_run(run.folder, run.config, run.adapted, step=12)
    check_export(run, tmp_path)


def test_a_checkpoint_that_comes_later_is_not_what_was_opened(tmp_path: Path) -> None:
    run = make_run("mixtral", tmp_path, {"lora": LORA})
    opened = open_run(run.folder)
    excite_(run.adapted.model, seed=2)
    write_run(run.folder, run.config, run.adapted, step=12)
    (tmp_path / "adapter").mkdir()
    write_peft(opened, tmp_path / "adapter")
    again = run.fresh()
    load_peft(again, tmp_path / "adapter")
    saved = load_file(run.folder / "checkpoints" / "step-3" / "trained.safetensors")
    assert opened.step == 3
    assert_holds(again, saved)


def test_the_layout_on_disk() -> None:
    ids, rows = (1, 3), (slice(0, None, 2), slice(1, None, 2))
    A, B = torch.randn(2, 2, 3, 5), torch.randn(2, 2, 4, 3)
    lora_A, lora_B = join_experts(A, B, ids, 4, rows)
    assert lora_A.shape == (4 * 6, 5)
    assert lora_B.shape == (8, 6 * 4)
    A_all, B_all = split_experts(lora_A, lora_B, 4)
    assert B_all.equal(lora_B.reshape(8, 6, 4).permute(2, 0, 1))
    for slot, expert in enumerate(ids):
        delta = B_all[expert] @ A_all[expert]
        for part, of_part in enumerate(rows):
            torch.testing.assert_close(delta[of_part], B[slot, part] @ A[slot, part])
    for expert in (0, 2):
        assert not A_all[expert].any()
        assert not B_all[expert].any()


def make_stock(run: Run, folder: Path, **settings: Any) -> PeftModel:
    """An adapter that stock PEFT made on the plain model, with factors that act."""
    targets = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "target_parameters": STACKS}
    config = LoraConfig(**({"r": RANK, "lora_alpha": ALPHA} | targets | settings))
    torch.manual_seed(4)
    model = get_peft_model(run.plain(), config).eval()
    excite_(model)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_an_adapter_of_stock_peft_loads(model_type: str, tmp_path: Path) -> None:
    run = make_run(model_type, tmp_path, {"lora": LORA})
    made = make_stock(run, tmp_path / "stock")
    adapted = run.fresh()
    load_peft(adapted, tmp_path / "stock")
    assert_same(logits(adapted.model), logits(made))
    loss = adapted.model(input_ids=token_ids(), labels=token_ids()).loss
    loss.backward()
    assert all(parameter.grad is not None for parameter in adapted.trainable().values())


def test_saved_routers_and_other_scalings_of_stock_peft_load(tmp_path: Path) -> None:
    run = make_run("mixtral", tmp_path, {"router": "all", "lora": LORA | {"rank": 4, "alpha": 4}})
    made = make_stock(run, tmp_path / "stock", r=4, lora_alpha=2, use_rslora=True, modules_to_save=["mlp.gate"])
    adapted = run.fresh()
    load_peft(adapted, tmp_path / "stock")
    assert_same(logits(adapted.model), logits(made))


def test_a_head_that_stock_peft_saved_with_its_base_weight_loads(tmp_path: Path) -> None:
    run = make_run("mixtral", tmp_path, {"lora": LORA | {"targets": ["attention", "lm_head"]}})
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "lm_head"]
    made = make_stock(run, tmp_path / "stock", target_modules=modules, target_parameters=None)
    assert "base_model.model.lm_head.base_layer.weight" in load_file(tmp_path / "stock" / "adapter_model.safetensors")
    adapted = run.fresh()
    load_peft(adapted, tmp_path / "stock")
    assert_same(logits(adapted.model), logits(made))


MISMATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "rank": ({"rank": 4}, r"q_proj: rank 3, and adapt\.lora asks for 4"),
    "alpha": ({"alpha": 6}, r"experts\.gate_up_proj: alpha / rank is 2\.5, and adapt\.lora asks for 2\n"),
    "split": ({"gate_up": "split"}, r"experts\.gate_up_proj: rank 3, and adapt\.lora asks for 6"),
    "layers": ({"layers": [0]}, r"model\.layers\.1\.self_attn\.q_proj: has factors; adapt\.lora leaves it out"),
    "ids": ({"ids": [0, 1]}, r"layers\.0\.mlp\.experts\.gate_up_proj: expert 2 has factors; adapt\.lora leaves it out"),
    "more": ({"targets": ["attention", "experts", "lm_head"]}, r"lm_head: has no factors; leave it out of adapt\.lora"),
    "less": ({"targets": ["experts"]}, r"k_proj: has factors; adapt\.lora leaves it out"),
}


@pytest.fixture(scope="module")
def stock_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    folder = tmp_path_factory.mktemp("stock")
    run = make_run("mixtral", folder, {"lora": LORA})
    make_stock(run, folder / "stock")
    return run, folder / "stock"


@pytest.mark.parametrize("kind", MISMATCHES)
def test_a_mismatch_is_named_and_changes_nothing(kind: str, stock_run: tuple[Run, Path]) -> None:
    run, adapter = stock_run
    changed, message = MISMATCHES[kind]
    adapted = run.fresh(**changed)
    before = {name: parameter.clone() for name, parameter in adapted.trainable().items()}
    with pytest.raises(UserError, match=message):
        load_peft(adapted, adapter)
    for name, parameter in adapted.trainable().items():
        assert parameter.equal(before[name])


def test_experts_that_share_their_factors_are_not_taken_for_split_ones(tmp_path: Path) -> None:
    run = make_run("mixtral", tmp_path, {"lora": LORA | {"targets": ["experts"], "gate_up": "split"}})
    both = {"rank_pattern": {"gate_up_proj": 2 * RANK}, "alpha_pattern": {"gate_up_proj": 2 * ALPHA}}
    make_stock(run, tmp_path / "stock", target_modules=[], **both)
    with pytest.raises(UserError, match=r"share factors; set adapt\.lora\.gate_up: fused, rank: 6 and alpha: 15"):
        load_peft(run.fresh(), tmp_path / "stock")


def test_fewer_experts_than_chosen_are_named(tmp_path: Path) -> None:
    run = make_run("mixtral", tmp_path, {"lora": LORA | {"ids": [0, 1]}})
    export(run.folder, "peft", tmp_path / "adapter")
    with pytest.raises(UserError, match=r"expert 2 has no factors; leave it out of adapt\.lora\.ids"):
        load_peft(run.fresh(ids="all"), tmp_path / "adapter")


def test_a_router_on_one_side_only_is_named(stock_run: tuple[Run, Path], tmp_path: Path) -> None:
    run = make_run("mixtral", tmp_path, {"router": [0], "lora": LORA})
    with pytest.raises(UserError, match=r"model\.layers\.0\.mlp\.gate\.weight: is not in the adapter"):
        load_peft(run.fresh(), stock_run[1])
    export(run.folder, "peft", tmp_path / "adapter")
    with pytest.raises(UserError, match=r"model\.layers\.0\.mlp\.gate\.weight: is in the adapter; it is frozen here"):
        load_peft(stock_run[0].fresh(), tmp_path / "adapter")


@pytest.mark.parametrize(
    ("adapt", "message"),
    [
        ({"router": "all"}, r"has no adapt\.lora.*--format delta or merged"),
        ({"experts": {"layers": [0], "ids": [1]}, "lora": LORA}, r"layer 0 train whole.*--format delta or merged"),
        (
            {"also": ["*q_proj.bias"], "lora": LORA},
            r"parameters of 'model\.layers\.0\.self_attn\.q_proj' train in full.*--format delta or merged",
        ),
    ],
)
def test_what_peft_cannot_hold_is_refused(adapt: dict[str, Any], message: str, tmp_path: Path) -> None:
    run = make_run("qwen2_moe", tmp_path, adapt)
    with pytest.raises(UserError, match=message):
        export(run.folder, "peft", tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_an_adapter_that_peft_would_misread_is_refused(tmp_path: Path) -> None:
    """On loading, PEFT renames the shared experts of laguna to what is not there, and only warns."""
    run = make_run("laguna", tmp_path, {"lora": LORA | {"targets": ["experts", "shared_experts"]}})
    with pytest.raises(UserError, match=r"no place for model\.layers\.1\.mlp\.shared_experts.*--format merged"):
        export(run.folder, "peft", tmp_path / "adapter")


def test_nothing_is_overwritten_and_a_broken_checkpoint_is_named(tmp_path: Path) -> None:
    run = make_run("mixtral", tmp_path, {"lora": LORA})
    (tmp_path / "mine" / "more").mkdir(parents=True)
    with pytest.raises(UserError, match="is not empty"):
        export(run.folder, "peft", tmp_path / "mine")
    file = run.folder / "checkpoints" / "step-3" / "trained.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"trained\.safetensors has .* bytes, not"):
        export(run.folder, "peft", tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_a_pickle_is_refused_unread(stock_run: tuple[Run, Path], tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text((stock_run[1] / "adapter_config.json").read_text())
    with pytest.raises(UserError, match=r"there is no adapter_model\.safetensors in it"):
        load_peft(stock_run[0].adapted, tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(UserError, match=r"adapter_model\.bin is a pickle"):
        load_peft(stock_run[0].adapted, tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"use_dora": True}, "not plain LoRA: use_dora"),
        ({"init_lora_weights": "pissa"}, "pissa, which changes the base weights"),
        ({"bias": "all"}, "not plain LoRA: bias: all"),
        ({"peft_type": "IA3"}, "describes no LoRA adapter"),
    ],
)
def test_other_kinds_of_adapter_are_refused(
    changed: dict[str, Any], message: str, stock_run: tuple[Run, Path], tmp_path: Path
) -> None:
    run, adapter = stock_run
    settings = json.loads((adapter / "adapter_config.json").read_text()) | changed
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    (tmp_path / "adapter_model.safetensors").write_bytes((adapter / "adapter_model.safetensors").read_bytes())
    with pytest.raises(UserError, match=message):
        load_peft(run.adapted, tmp_path)
