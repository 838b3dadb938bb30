"""Rows are grouped under the experts that they are sent to."""

import torch

from moetune.experts.permutation import Permutation


def test_every_row_is_under_its_expert() -> None:
    ids_TK = torch.tensor([[3, 1], [1, 0], [3, 0], [1, 3]])
    counts = torch.bincount(ids_TK.flatten(), minlength=8).tolist()
    assert counts == [2, 3, 0, 3, 0, 0, 0, 0]
    permutation = Permutation(torch.argsort(ids_TK.flatten(), stable=True), counts, 2)
    groups = {group.slots.start: group for group in permutation.groups(range(slot, slot + 1) for slot in range(8))}
    assert {slot: group.order.tolist() for slot, group in groups.items()} == {0: [3, 5], 1: [1, 2, 6], 3: [0, 4, 7]}
    assert all(torch.equal(group.order, permutation.order[group.at]) for group in groups.values())
    (first, second) = permutation.groups([range(2), range(2, 4), range(4, 8)])  # none for the last
    assert [group.gemm.counts for group in (first, second)] == [[2, 3], [0, 3]]
    assert [group.gemm.ends.tolist() for group in (first, second)] == [[2, 5], [0, 3]]
