"""The public API: every name exists, is the object of its module, and is imported only when it is used."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import moetune


def test_all_names_are_there() -> None:
    assert set(moetune.__all__) == moetune._HOMES.keys() <= set(dir(moetune))
    for name in moetune.__all__:
        value = getattr(moetune, name)
        assert callable(value)
        assert value.__name__ == name
        assert value.__module__ == moetune._HOMES[name] or name.startswith("Resolved")
    with pytest.raises(AttributeError, match="'moetune' has no attribute 'trian'"):
        _ = moetune.trian  # type: ignore[attr-defined]


def test_importing_loads_nothing() -> None:
    seen = "import sys, moetune; moetune.load_run_config; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", seen], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_run_its_values_and_its_path_are_alike(small_model: Path, tmp_path: Path) -> None:
    run = {"model": {"path": str(small_model)}, "adapt": {"router": "all"}, "hardware": {"gpu": "1GiB"}}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(run), encoding="utf-8")
    config = moetune.load_run_config(file)
    resolved = moetune.resolve(file, "cuda")
    assert resolved.config.to_yaml() == moetune.resolve(config, "cuda").config.to_yaml()
    assert moetune.resolve(resolved) is resolved
    reports = [moetune.predict(given) for given in (file, str(file), config, resolved)]
    assert all(report == reports[0] for report in reports)
    assert "allocator: expandable segments" in " ".join(reports[0].assumptions)  # as `moetune predict` prints
    trained = [moetune.count(given).trainable for given in (file, str(file), config, resolved)]
    built = moetune.build(str(file), "meta")
    assert all(
        one == trained[0] == {**one, "total": sum(p.numel() for p in built.trainable().values())} for one in trained
    )


def test_other_objects_are_told_how_they_are_given(small_model: Path, tmp_path: Path) -> None:
    run = moetune.RunConfig.model_validate({"model": {"path": str(small_model)}, "adapt": {"router": "all"}})
    for call in (
        lambda: moetune.resolve(run.model_dump()),  # type: ignore[arg-type]
        lambda: moetune.export(moetune.build(run, "meta").model, "delta", tmp_path / "out"),  # type: ignore[arg-type]
    ):
        with pytest.raises(moetune.UserError, match=r"is no path; give .*RunConfig\.model_validate"):
            call()
    with pytest.raises(moetune.UserError, match="device mps: moetune computes on cuda or cpu"):
        moetune.build(run, "mps")
    assert moetune.count(small_model) == moetune.count(str(small_model))


@pytest.mark.full
def test_a_prediction_imports_neither_data_sets_nor_figures(small_model: Path) -> None:
    code = (
        "import sys, moetune\n"
        "raw = {'model': {'path': sys.argv[1]}, 'adapt': {'router': 'all'}, 'train': {'accumulate': 1}}\n"
        "config = moetune.RunConfig.model_validate(raw)\n"
        "moetune.count(config)\n"
        "moetune.predict(config)\n"
        "print(sorted({'datasets', 'pyarrow', 'matplotlib', 'trl'} & set(sys.modules)))"
    )
    words = [sys.executable, "-c", code, str(small_model)]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "[]\n"
