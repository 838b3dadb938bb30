"""What an export copies is the model's: a link out of its folder is refused by name, the hub's own are followed."""

import shutil
from pathlib import Path

import pytest

from moetune.errors import UserError
from moetune.exporting.writers.merged import copy_checkpoint
from tests.resolved import write_quantized_base


@pytest.fixture
def model(small_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_model, tmp_path / "model"))


@pytest.mark.parametrize("name", ["secret.txt", "LICENSE", "extra.json", "additional_chat_templates/a.jinja"])
def test_a_link_out_of_the_folder(name: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).symlink_to(tmp_path / "secret")
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match=rf"{name}' is a link to '.*secret', outside of the model's folder"):
        copy_checkpoint(model, tmp_path / "out")
    with pytest.raises(UserError, match="outside of the model's folder"):
        write_quantized_base(str(model), tmp_path / "packed", "nf4", double_quant=True)
    for folder in ("out", "packed"):
        assert not (tmp_path / folder / name).exists()


def test_a_snapshot_of_the_hub(small_model: Path, tmp_path: Path) -> None:
    """Its files are links into the blobs beside it, and nowhere else."""
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in small_model.iterdir():
        shutil.copy(file, blobs / f"blob-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/blob-{file.name}")
    (tmp_path / "out").mkdir()
    copy_checkpoint(snapshot, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_bytes() == (small_model / "config.json").read_bytes()
    (tmp_path / "secret").write_text("secret")
    (snapshot / "secret.txt").symlink_to(tmp_path / "secret")
    (tmp_path / "out2").mkdir()
    with pytest.raises(UserError, match="outside of the model's folder"):
        copy_checkpoint(snapshot, tmp_path / "out2")
