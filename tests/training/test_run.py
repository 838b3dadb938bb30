"""What would go wrong silently, or after a long wait, stops a run at once, and leaves everything as it was."""

from pathlib import Path
from typing import Any

import pytest

from moetune.errors import UserError
from moetune.training.preview import preview
from tests import small
from tests.resolved import train


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_loss_that_is_no_number(configure: small.Configure, tmp_path: Path) -> None:
    settings = {"steps": 9, "save_every": 1, "max_grad_norm": 0}
    optimizer = {"name": "sgd", "lr": 1e30}
    with pytest.raises(UserError, match=r"step \d: the gradient of model\..* is not finite.*Lower optimizer\.lr"):
        train(configure("experts", train=settings, optimizer=optimizer))
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    reached = int(newest.name.removeprefix("step-"))
    assert len(small.read_metrics(tmp_path / "run")) == reached  # the step that went wrong is not saved


def test_a_tokenizer_with_more_tokens_than_the_model(small_data: Path, tmp_path: Path) -> None:
    folder = small.write_model(tmp_path / "model", vocab_size=300)
    config = small.run_config(folder, small_data, tmp_path / "run")
    for command in (train, preview):
        with pytest.raises(UserError, match=r"gives token \d+; the model has embeddings for 300 only"):
            command(config)


def test_problems_of_every_kind_are_reported_together(small_model: Path, tmp_path: Path) -> None:
    run = small.run_file(small_model, tmp_path / "missing.jsonl", tmp_path / "run", train={"report_to": ["tensorbord"]})
    run["adapt"] = {"router": "9"}
    with pytest.raises(UserError) as error:
        train(small.RunConfig.model_validate(run))
    assert all(part in str(error.value) for part in ("tensorboard", "adapt.router", "missing.jsonl"))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"name": "adamw", "momentum": 0.9}, "adamw has no momentum"),
        ({"name": "sgd", "betas": [0.5, 0.9]}, "sgd has no betas"),
        ({"name": "sgd", "eps": 1e-3}, "sgd has no eps"),
    ],
)
def test_a_setting_that_the_optimizer_does_not_have(section: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        small.run_config(tmp_path, tmp_path, tmp_path, optimizer=section)
