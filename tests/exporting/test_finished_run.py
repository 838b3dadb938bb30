"""A model in memory is exported as its run folder is, whoever trained it."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from moetune.errors import UserError
from moetune.exporting.export import export
from moetune.parallel.ranks import Ranks
from tests.exporting.runs import ADAPT, tensors_of, write_base, write_run

FORMATS: dict[Literal["delta", "peft", "merged"], tuple[str, str]] = {
    "delta": ("both", "delta.safetensors"),
    "peft": ("lora", "adapter_model.safetensors"),
    "merged": ("both", "model.safetensors"),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_it_is_what_the_run_folder_gives(model_type: str, format: Any, tmp_path: Path) -> None:
    adapt, file = FORMATS[format]
    run = write_run(tmp_path / "run", write_base(tmp_path / "base", model_type, num_hidden_layers=2), ADAPT[adapt])
    of_folder = export(run.path, format, tmp_path / "of-folder")
    of_model = export(run.adapted, format, tmp_path / "of-model")
    assert (tmp_path / "of-model" / file).read_bytes() == (tmp_path / "of-folder" / file).read_bytes()
    assert replace(of_model, out=of_folder.out, step=7) == of_folder


def test_the_base_is_what_is_there_now(tmp_path: Path) -> None:
    """A run folder notes what it was trained on, a model in memory does not."""
    base = write_base(tmp_path / "base", "mixtral", num_hidden_layers=2)
    run = write_run(tmp_path / "run", base, ADAPT["full"])
    write_base(base, "mixtral", num_hidden_layers=2, seed=1)
    with pytest.raises(UserError, match=r"has changed since the run in '.*run' was trained on it"):
        export(run.path, "merged", tmp_path / "of-folder")
    export(run.adapted, "merged", tmp_path / "of-model")
    base.rename(tmp_path / "moved")
    with pytest.raises(UserError, match=r"was trained on '.*base', which is not there; .*model\.path in .*run\.yaml"):
        export(run.path, "merged", tmp_path / "of-folder")
    (tmp_path / "moved").rename(base)
    name = "model.layers.0.block_sparse_moe.gate.weight"  # is frozen
    assert tensors_of(tmp_path / "of-model")[name].equal(tensors_of(base)[name])


def test_what_cannot_be_exported_is_named(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", "mixtral", num_hidden_layers=2)
    adapted = write_run(tmp_path / "run", base, ADAPT["full"]).adapted
    with pytest.raises(UserError, match=r"^format 'gguf': not one of delta, peft, merged, vllm, sglang$"):
        export(adapted, "gguf", tmp_path / "out")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^the model has no adapt\.lora, so there is no adapter"):
        export(adapted, "peft", tmp_path / "out")
    with pytest.raises(UserError, match="holds what is being exported"):
        export(adapted, "delta", base, overwrite=True)
    drawn = replace(adapted, run=adapted.run.with_random_weights())
    with pytest.raises(UserError, match=r"^the model began with random weights"):
        export(drawn, "delta", tmp_path / "out")

    adapted.model.get_output_embeddings().weight.requires_grad_()
    with pytest.raises(UserError, match=r"trains what its run file does not choose.*: lm_head\.weight"):
        export(adapted, "delta", tmp_path / "out")
    diverged = write_run(tmp_path / "diverged", base, ADAPT["full"]).adapted
    torch.nn.init.constant_(next(iter(diverged.trainable().values())), math.nan)
    with pytest.raises(UserError, match=r"holds values that are not finite .*: training diverged"):
        export(diverged, "delta", tmp_path / "out")

    class Several(Ranks):
        is_single = False

    with pytest.raises(UserError, match="distributed over ranks cannot be exported from memory"):
        export(replace(adapted, ranks=Several()), "delta", tmp_path / "out")
