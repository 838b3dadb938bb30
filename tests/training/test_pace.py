"""What a run computes, against the clock."""

from moetune.training.pace import Pace


def test_metrics() -> None:
    metrics = Pace(flops=10**12, limit=10**13).metrics(updates=4, seconds=2.0, left=10)
    assert metrics == {"flops": 10**12, "share_of_limit": 0.2, "seconds_left": 5.0}
    assert Pace().metrics(updates=0, seconds=2.0, left=10) == dict.fromkeys(metrics)
