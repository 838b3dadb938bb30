"""What trains and its optimizer come back from disk exactly, whatever optimizer it is, and the run goes on."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moetune.config.schema import TrainConfig
from moetune.errors import UserError
from moetune.experts.bank import ExpertBank
from moetune.training.folder import checkpoint, trainer_state
from moetune.training.optim.optimizers import make_optimizer
from moetune.training.optim.schedule import rate_factor
from moetune.training.step.micro_step import count_loss_tokens
from moetune.training.step.stepper import Stepper
from tests import small
from tests.resolved import build
from tests.thinned import in_pairs

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw"},
    "adamw8bit": {"name": "adamw8bit"},
    "lion8bit": {"name": "lion8bit"},
    "ademamix8bit": {"name": "ademamix8bit"},
    "sgd momentum": {"name": "sgd", "momentum": 0.9},
    "adafactor": {"name": "adafactor"},
    "adalomo": {"name": "adalomo"},
    "lomo": {"name": "lomo"},
    "bf16, masters": {"name": "adamw", "master_weights": "fp32"},
    "bf16, host": {"name": "adamw", "offload": True},
    "bf16, 8 bits": {"name": "ademamix8bit"},
    "bf16, stochastic": {"name": "adamw8bit", "master_weights": "stochastic"},
    "bf16, adalomo": {"name": "adalomo", "master_weights": "stochastic"},
    "factors in bf16": {"name": "adamw8bit"},
    "factors that are shared": {"name": "adamw8bit"},
}
IN_8_BITS = ("adamw8bit", "lion8bit", "ademamix8bit")
ALIGNED, ASTRIDE = 16, 11
"""Ranks with which a stack is large enough for states in 8 bits (4096 weights); blocks of 256 end where an expert's
factors end, or do not."""


def config_of(model: Path, adapt: str, optimizer: str, rank: int | None = None) -> small.RunConfig:
    run = small.run_file(model, Path("-"), Path("-"), adapt, train={"accumulate": 1, "sequence_length": 16})
    run["model"]["dtype"] = "bf16" if optimizer.startswith("bf16") else "fp32"
    run["optimizer"] = {"lr": 1.0e-3} | OPTIMIZERS[optimizer]
    if optimizer == "factors in bf16" and adapt == "lora":
        run["adapt"] = {"lora": run["adapt"]["lora"] | {"dtype": "bf16"}}
    if optimizer == "factors that are shared" and adapt == "lora":
        run["adapt"] = {"lora": run["adapt"]["lora"] | {"share": "outer", "rank": 64}}
    if rank is not None:
        run["adapt"] = {"lora": run["adapt"]["lora"] | {"rank": rank}}
    return small.RunConfig.model_validate(run)


class Run:
    """A model that takes steps on random tokens, at a rate that changes with each."""

    def __init__(self, config: small.RunConfig, seed: int) -> None:
        torch.manual_seed(seed)
        self.adapted = build(config, "cpu")
        self.adapted.model.train()
        with torch.no_grad():  # values of its own, all of which must be replaced
            for parameter in self.adapted.trainable().values():
                parameter += 0.01 * torch.randn(parameter.shape)
        self.optimizer = make_optimizer(self.adapted)
        self.stepper = Stepper(self.adapted, self.optimizer)
        self.schedule, self.taken = TrainConfig(schedule="cosine", steps=9), 0

    def steps(self, first: int, last: int) -> None:
        for number in range(first, last + 1):
            ids = torch.randint(5, 500, (2, 16), generator=torch.Generator().manual_seed(number))
            batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
            self.stepper.micro_step(batch, count_loss_tokens(batch))
            self.stepper.finish()
            self.set_rates(self.taken + 1)

    def set_rates(self, step: int) -> None:
        self.taken = step
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * rate_factor(self.schedule, step)

    def write(self, folder: Path) -> Path:
        folder.mkdir()
        checkpoint.write(folder, self.adapted, self.optimizer, self.taken)
        return folder

    def read(self, folder: Path) -> None:
        checkpoint.read_trained(folder, self.adapted)
        checkpoint.read_optimizer(folder, self.adapted, self.optimizer)
        self.set_rates(json.loads((folder / checkpoint.OPTIMIZER_FILE).read_text())["scheduler_step"])

    def values(self) -> dict[str, Any]:
        """Every weight, state and number, by where it is."""
        trained = {name: parameter.detach() for name, parameter in self.adapted.trainable().items()}
        rates = [group["lr"] for group in self.optimizer.param_groups]
        states = [[one.optimizer.state_dict(), [*one.masters_kept()]] for one in self.optimizer.updaters]
        tree = {"trained": trained, "optimizer": states, "rates": rates}
        return dict(flat(tree | {"schedule": {"step": self.taken}}))


def flat(tree: Any, path: str = "") -> Any:
    if isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from flat(value, f"{path}/{key}")
    else:
        yield path, tree


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """To the bit, dtypes and types of numbers included."""
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        assert type(found[path]) is type(value), path
        if isinstance(value, Tensor):
            assert (found[path].dtype, found[path].shape) == (value.dtype, value.shape), path
            assert found[path].equal(value), path
        elif not callable(value):  # a schedule's function is no state
            assert found[path] == value, path


def check_goes_on(config: small.RunConfig, folder: Path) -> tuple[Run, Path]:
    """Two steps, a checkpoint, and a third step both here and in a run that has read it."""
    run, other = Run(config, 1), Run(config, 2)
    run.steps(1, 2)
    before, others = run.values(), other.values()
    assert not any(before[path].equal(others[path]) for path in before if path.startswith("/trained"))
    written = run.write(folder / "checkpoint")
    assert_equal(run.values(), before)  # writing changes nothing
    other.read(written)
    assert_equal(other.values(), before)
    for one in (run, other):
        torch.manual_seed(3)  # for stochastic rounding
        one.steps(3, 3)
    assert_equal(other.values(), run.values())
    return run, written


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("optimizer", "adapt"), in_pairs(OPTIMIZERS, small.ADAPT, every=5))
def test_a_third_step_is_the_same_after_a_checkpoint(
    optimizer: str, adapt: str, small_model: Path, tmp_path: Path
) -> None:
    run, _ = check_goes_on(config_of(small_model, adapt, optimizer), tmp_path)
    assert len([*run.optimizer.states()]) > 0 or optimizer == "lomo"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("rank", [ALIGNED, ASTRIDE])
@pytest.mark.parametrize("optimizer", IN_8_BITS)
def test_stacks_in_8_bits(optimizer: str, rank: int, small_model: Path, tmp_path: Path) -> None:
    run, _ = check_goes_on(config_of(small_model, "lora", optimizer, rank), tmp_path)
    assert any(state.dtype == torch.uint8 and state.dim() >= 4 for state in run.optimizer.states())


@pytest.mark.one_in(5)
@pytest.mark.parametrize("optimizer", ["adamw", "adalomo", *IN_8_BITS])
def test_each_experts_states_are_under_its_own_name(optimizer: str, small_model: Path, tmp_path: Path) -> None:
    """So that other ranks, with other experts, can take them."""
    run = Run(config_of(small_model, "lora", optimizer, ALIGNED), 1)
    run.steps(1, 2)
    folder = run.write(tmp_path / "checkpoint")
    trained, (file,) = load_file(folder / "trained.safetensors"), (folder / "optimizer").iterdir()
    saved, numbers = load_file(file), json.loads((folder / "optimizer.json").read_text())["numbers"]
    assert not any("@" in name for name in saved)
    states = dict(run.optimizer.state.items())
    for layer in run.adapted.structure.moe_layers:
        bank = run.adapted.model.get_submodule(layer.experts)
        assert isinstance(bank, ExpertBank)
        assert bank.lora is not None
        assert bank.lora.slots == {1: 0, 3: 1}
        for stack, parameter in bank.lora.named_parameters():
            for expert, slot in bank.lora.slots.items():
                name = f"{layer.experts}.lora.{stack}.{expert}"
                assert trained[name].equal(parameter[slot])
                assert numbers[name]["step"]["value"] == 2
                for state, value in states[parameter].items():
                    if not isinstance(value, Tensor) or value.dim() == 0 or state.startswith("qmap"):
                        continue
                    if state.startswith("absmax"):  # a number for a block: an expert's are together
                        own = value.chunk(2, -1)[slot]
                    else:  # ademamix keeps two averages in one tensor
                        own = value[slot] if value.shape[0] == 2 and value.dim() <= parameter.dim() else value[:, slot]
                    assert saved[f"{name}.{state}"].equal(own), (name, state)


def test_states_whose_blocks_are_of_two_experts_are_not_cut_anew(small_model: Path, tmp_path: Path) -> None:
    config = config_of(small_model, "lora", "adamw8bit", ASTRIDE)
    run = Run(config, 1)
    run.steps(1, 2)
    folder = run.write(tmp_path / "checkpoint")
    (file,) = (folder / "optimizer").iterdir()
    saved = load_file(file)
    assert any(name.endswith("absmax1@2") for name in saved)
    save_file({name.replace("@2", "@4"): tensor for name, tensor in saved.items()}, file)  # as if of four experts
    with pytest.raises(UserError, match=r"gate_up_B\.1 are in 8 bits, in blocks that were cut for other ranks"):
        Run(config, 2).read(folder)


def test_names_and_files(small_model: Path, tmp_path: Path) -> None:
    """Nothing in it can run: safetensors and JSON."""
    run = Run(config_of(small_model, "lora", "bf16, masters"), 1)
    run.steps(1, 2)
    folder = run.write(tmp_path / "checkpoint")
    files = [file.relative_to(folder) for file in folder.rglob("*") if file.is_file()]
    assert {str(file) for file in files if str(file.parent) != "optimizer"} == {"trained.safetensors", "optimizer.json"}
    assert {file.suffix for file in files} == {".safetensors", ".json"}
    trained = load_file(folder / "trained.safetensors")
    (file,) = (folder / "optimizer").iterdir()
    saved = load_file(file)
    places = {part.name for parts in checkpoint.parts_of(run.adapted).values() for part in parts}
    assert trained.keys() == places
    assert "model.layers.0.mlp.experts.lora.down_A.3" in places
    in_16_bits = {name for name, tensor in trained.items() if tensor.dtype == torch.bfloat16}
    assert {name.removesuffix(".master") for name in saved if name.endswith(".master")} == in_16_bits
    assert saved.keys() >= {f"{name}.{state}" for name in places for state in ("exp_avg", "exp_avg_sq")}
    said = json.loads((folder / "optimizer.json").read_text())
    assert said["scheduler_step"] == 2
    assert said["numbers"].keys() == places


@pytest.mark.parametrize("adapt", ["experts", "lora"])
def test_a_checkpoint_of_other_parts_is_refused_and_changes_nothing(
    adapt: str, small_model: Path, tmp_path: Path
) -> None:
    run, other = (Run(config_of(small_model, kind, "adamw"), 1) for kind in (adapt, "router"))
    folder = run.write(tmp_path / "checkpoint")
    before = {path: value.clone() for path, value in other.values().items() if isinstance(value, Tensor)}
    with pytest.raises(UserError, match=r"holds other trained tensors: model\."):
        other.read(folder)
    assert_equal({path: value for path, value in other.values().items() if path in before}, before)


def test_several_files(small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a bounded size each, because a file is put together in memory."""
    monkeypatch.setattr(checkpoint, "_FILE_BYTES", 2**16)
    _, folder = check_goes_on(config_of(small_model, "experts", "adamw"), tmp_path)
    files = [*(folder / "optimizer").iterdir()]
    assert len(files) > 4
    assert all(file.suffix == ".safetensors" for file in files)


def test_ctrl_c_while_writing_is_ctrl_c(small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch turns all that is raised while it writes into an error of its own."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    run = Run(config_of(small_model, "router", "adamw"), 1)
    run.steps(1, 1)
    monkeypatch.setattr("torch.distributed.checkpoint.hf_storage.HuggingFaceStorageWriter.write_data", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.write(tmp_path / "checkpoint")


def test_generators_of_a_cpu_are_read_on_a_gpu(tmp_path: Path) -> None:
    """Whose own generator stays as it is."""
    torch.manual_seed(3)
    trainer_state.write_generators(tmp_path, 0, torch.device("cpu"))
    drawn = torch.rand(4)
    trainer_state.read_generators(tmp_path, 0, torch.device("cuda"))
    assert torch.rand(4).equal(drawn)
