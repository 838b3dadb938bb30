"""What a run computes, against the clock."""

from pathlib import Path

from moetune.models.catalog.gpus import find_gpu
from moetune.parallel.ranks import SINGLE_RANK
from moetune.run.resolve import resolve
from moetune.training.metrics import Pace
from moetune.watch.memory_record import predicted
from tests.memory.models import toy_run, write_toy


def test_operations_are_those_of_a_trace_and_the_limit_the_cards(tmp_path: Path) -> None:
    config = toy_run(write_toy(tmp_path, "mixtral", num_hidden_layers=1), "mixtral", {"router": "all"})
    card = find_gpu("h100")
    pace = predicted(resolve(config, "cuda"), SINGLE_RANK, card).pace
    assert pace.flops is not None
    assert pace.flops > 0
    assert card.bf16 is not None
    assert pace.limit == card.bf16.value
    assert predicted(resolve(config, "cpu")).pace == Pace()
