"""Values of a run file: lists of layers and experts, sizes of memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.config.fields import parse_ids, parse_stages
from moetune.config.memory_size import parse_size
from moetune.config.schema import ChoiceConfig, HardwareConfig, TrainConfig
from moetune.models.selection import ranges


@pytest.mark.parametrize(
    ("written", "ids"),
    [
        ("all", "all"),
        ("none", "none"),
        (3, (3,)),
        ("0-5,8", (0, 1, 2, 3, 4, 5, 8)),
        (" 2 - 3 , 1 ", (1, 2, 3)),
        ([4, "0-1", 1], (0, 1, 4)),
    ],
)
def test_ids(written: object, ids: object) -> None:
    assert parse_ids(written) == ids


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("0-", "'0-' is not a number or a range"),
        ("5-2", 'runs backwards; write "2-5"'),
        (-1, "'-1' is not a number"),
        ([], "the list is empty; write none"),
        (True, "True is not a list of numbers"),
        (1.5, "1.5 is not a list of numbers"),
        ([[1]], "is not a number or a range"),
        ("everything", "'everything' is not a number"),
    ],
)
def test_wrong_ids(written: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_ids(written)


@given(st.sets(st.integers(0, 99), min_size=1))
def test_ids_written_as_ranges_read_back(ids: set[int]) -> None:
    assert parse_ids(ranges(ids)) == tuple(sorted(ids))


@pytest.mark.parametrize(
    ("key", "written", "kept"),
    [
        *(("loss_memory", size, size) for size in ("256MiB", "1 GB", "none", "auto", "0.5GiB")),
        *(("expert_memory", size, size) for size in ("auto", "0", "64MiB")),
        ("expert_memory", 0, "0"),
        *(("keep_rows", kept, kept) for kept in ("none", "auto", 1, 32)),
        ("keep_rows", 0, "none"),
        *(("router_aux_loss", coefficient, coefficient) for coefficient in ("auto", 0, 0.01)),
        ("router_aux_loss", "1e-3", 0.001),  # which YAML takes for text
    ],
)
def test_sizes_and_coefficients_stay_as_they_are_written(key: str, written: object, kept: object) -> None:
    config = TrainConfig.model_validate({key: written})
    assert getattr(config, key) == kept
    assert TrainConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("key", "wrong", "message"),
    [
        ("loss_memory", [0, 256, "256", "0MiB", "-1GiB", "all", None], "neither a size above zero nor none nor auto"),
        ("expert_memory", [False, 256, "256", "-1GiB", "all", None], "neither a size nor 0 nor auto"),
        ("keep_rows", [-1, True, False, "all", "3", 1.0, None], "neither a number of layers nor none nor auto"),
        ("router_aux_loss", [True, -1, 1e7, "1e7", "nan", "none", None], "neither a number from 0 to 1e6 nor auto"),
    ],
)
def test_wrong_sizes_and_coefficients(key: str, wrong: list[object], message: str) -> None:
    for written in wrong:
        with pytest.raises(ValueError, match=message):
            TrainConfig.model_validate({key: written})


@pytest.mark.parametrize("budget", [0.25, "44GiB"])
def test_a_budget_is_memory_or_a_share(budget: object) -> None:
    assert ChoiceConfig.model_validate({"from": "scores.json", "budget": budget}).budget == budget
    for wrong in (0, 1, 1.5, -0.5, True, "0.25", "none", "0GiB"):
        with pytest.raises(ValueError, match="neither memory, such as 44GiB, nor a share"):
            ChoiceConfig.model_validate({"from": "scores.json", "budget": wrong})


def test_a_gpu_may_be_a_number_whose_unit_is_then_asked_for() -> None:
    """Which find_gpu does; a machine may have 1.5 TiB."""
    assert HardwareConfig.model_validate({"gpu": 48, "host_memory": "1.5TiB"}).names == ("48",)
    assert parse_size("1.5TiB") == 1.5 * 2**40


@pytest.mark.parametrize("written", [["0-1", "2,3"], [[0, 1], [2, 3]], ["0-1", [2, 3]], "auto"])
def test_stages(written: object) -> None:
    assert parse_stages(written) == (((0, 1), (2, 3)) if written != "auto" else "auto")


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (["0,2", 3], "'0,2' is not a stage"),
        (["none"], "'none' is not a stage"),
        ([[2, 0], 3], "runs backwards"),
        ("0-3", "is not a list of stages"),
    ],
)
def test_what_is_not_a_list_of_stages(written: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_stages(written)
