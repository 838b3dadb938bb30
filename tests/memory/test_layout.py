"""Sums over ranks balance, published figures come out, and each axis costs the bytes that its paper says."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise
from math import gcd

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from moetune.config import ParallelConfig
from moetune.errors import UserError
from moetune.memory.collectives import Place, all_gather, all_reduce, part, reduce_scatter
from moetune.memory.layout import RankShare, divide, model_states
from moetune.memory.quantities import Layer, Quantities, Tensors, Transient, total

FIELDS = tuple(field.name for field in fields(Tensors))


def group(numel: int, *, frozen: int = 0, packed: int = 0) -> Tensors:
    """Mixed-precision Adam: 2 + 2 + 12 bytes a weight, and a float32 copy of the gradient while it updates."""
    return Tensors(
        frozen=frozen + packed,
        trainable=2 * numel,
        gradients=2 * numel,
        states=8 * numel,
        master=4 * numel,
        numel=numel,
        update=4 * numel,
        packed=packed,
    )


def dense(*layers: int, update: int = 4) -> Quantities:
    """A dense model with weights in its layers only; its optimizer updates all of them at once."""
    at_once = update * sum(layers)
    return Quantities(
        embedding=Tensors(),
        layers=tuple(
            Layer(k, replace(group(numel), update=at_once), (), 0, (Transient("backward", 0),))
            for k, numel in enumerate(layers)
        ),
        head=Tensors(),
        batch=0,
        saved=0,
        loss=0,
        embedding_backward=0,
        hidden=0,
        routed=0,
        accumulate=1,
    )


def moe(layers: int = 4, experts: int = 4, accumulate: int = 2, unit: int = 1024) -> Quantities:
    """A small mixture of experts in which something of every kind trains; all bytes are multiples of `unit`."""
    return Quantities(
        embedding=group(6 * unit, frozen=2 * unit),
        layers=tuple(
            Layer(
                k,
                dense=group(3 * unit, frozen=4 * unit, packed=unit),
                experts=tuple(group((1 + e) * unit, packed=8 * unit) for e in range(experts)),
                saved=6 * unit,
                transients=(
                    Transient("attention", 16 * unit, 0, split=8 * unit),
                    Transient("experts", 8 * unit, 32 * unit, split=4 * unit, experts_split=16 * unit),
                ),
                unsplit=group(unit, frozen=unit),
                saved_split=2 * unit,
                saved_experts=2 * unit,
            )
            for k in range(layers)
        ),
        head=group(4 * unit, frozen=4 * unit),
        batch=unit,
        saved=2 * unit,
        loss=24 * unit,
        embedding_backward=10 * unit,
        hidden=2 * unit,
        routed=4 * unit,
        accumulate=accumulate,
        logits=8 * unit,
    )


def layout(**sizes: object) -> ParallelConfig:
    return ParallelConfig.model_validate(sizes)


def traffic(share: RankShare) -> dict[tuple[str, str, str], int]:
    return {(c.kind, c.axis, c.what): c.bytes for c in share.collectives}


def static(share: RankShare) -> int:
    return model_states(share.quantities.tensors)


def add(groups: list[Tensors], name: str) -> int:
    return sum(getattr(t, name) for t in groups)


# One rank, and sums over ranks


def test_one_rank_holds_the_whole_and_sends_nothing():
    (share,) = divide(moe(), ParallelConfig())
    assert share.quantities == moe()
    assert (share.place, share.host, share.buffers.total, share.collectives) == (Place(), Tensors(), 0, ())


@given(st.integers(0, 10**12), st.integers(1, 64))
def test_parts_sum_to_the_whole_and_the_largest_is_the_ceiling(amount: int, ranks: int):
    parts = [part(amount, ranks, index) for index in range(ranks)]
    assert sum(parts) == amount
    assert max(parts) == -(-amount // ranks)


@given(st.integers(0, 10**12), st.integers(1, 64))
def test_all_reduce_is_reduce_scatter_and_all_gather(size: int, ranks: int):
    assert all_reduce(size, ranks) == reduce_scatter(size, ranks) + all_gather(size, ranks)
    assert reduce_scatter(size * ranks, ranks) == (ranks - 1) * size  # (n - 1)/n of the tensor
    assert (ranks > 1) or all_reduce(size, ranks) == 0


SHARDED = {
    1: ("states", "master", "numel"),
    2: ("states", "master", "numel", "gradients"),
    3: ("states", "master", "numel", "gradients", "trainable"),
}


@settings(deadline=None, max_examples=40)
@given(st.sampled_from([1, 2, 3]), st.integers(2, 7), st.integers(1, 3), st.integers(0, 10**6))
def test_what_is_sharded_sums_to_the_whole_and_the_rest_is_whole_everywhere(
    zero: int, fsdp: int, replicate: int, odd: int
):
    whole = moe(unit=1000 + odd)
    ranks = divide(whole, layout(zero=zero, fsdp=fsdp, replicate=replicate))
    held = [share.quantities.tensors for share in ranks]
    for name in set(FIELDS) - {"update", "frozen", "packed"}:
        copies = replicate if name in SHARDED[zero] else replicate * fsdp
        assert add(held, name) == copies * getattr(whole.tensors, name), name
    plain = whole.tensors.frozen - whole.tensors.packed
    copies = replicate if zero == 3 else replicate * fsdp
    assert add(held, "frozen") == copies * plain + replicate * fsdp * whole.tensors.packed
    assert all(t.packed == whole.tensors.packed for t in held)  # fsdp does not shard buffers


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from([(1, 1), (2, 1), (2, 2), (1, 2), (1, 4), (2, 4)]),
    st.integers(1, 4),
    st.integers(1, 2),
    st.integers(1, 4),
)
def test_every_weight_is_held_as_often_as_the_axes_say(tp_ep: tuple[int, int], fsdp: int, replicate: int, pp: int):
    tp, ep = tp_ep
    assume((replicate * fsdp * tp) % ep == 0)
    whole = moe(unit=1001)
    ranks = divide(whole, layout(tp=tp, ep=ep, fsdp=fsdp, replicate=replicate, pp=pp))
    assert [share.rank for share in ranks] == list(range(replicate * fsdp * tp * pp))
    for index, layer in enumerate(whole.layers):
        mine = [own for share in ranks for own in share.quantities.layers if own.index == index]
        assert len(mine) == replicate * fsdp * tp
        # unsplit is sharded over fsdp and whole on every tp rank
        assert add([own.dense + own.unsplit for own in mine], "states") == replicate * (
            layer.dense.states + tp * layer.unsplit.states
        )
        experts = total(layer.experts)
        stored = [total(own.experts) for own in mine]
        # states once in each group that shards them, packed buffers once in each group that splits them
        inner = replicate * fsdp * tp
        shards = fsdp * tp // gcd(fsdp * tp, ep)
        for name in ("states", "numel"):
            assert add(stored, name) == getattr(experts, name) * (replicate if ep == 1 else inner // ep // shards)
        assert add(stored, "packed") == experts.packed * inner // (tp if ep == 1 else ep)
    assert add([share.quantities.head for share in ranks], "states") == replicate * whole.head.states
    assert add([share.quantities.embedding for share in ranks], "states") == replicate * tp * whole.embedding.states


def test_ranks_count_tp_fastest_then_fsdp_replicate_and_pp():
    places = [share.place for share in divide(moe(), layout(tp=2, fsdp=3, replicate=2, pp=2, ep=4))]
    assert places[1] == Place(tp=1, ep=1)
    assert places[2] == Place(fsdp=1, ep=2)
    assert places[6] == Place(replicate=1, ep=2)
    assert places[12] == Place(pp=1)
    assert places[23] == Place(pp=1, replicate=1, fsdp=2, tp=1, ep=3)


# Monotone


@given(st.integers(2, 16), st.booleans())
@settings(deadline=None)
def test_each_zero_stage_holds_no_more_than_the_one_before(fsdp: int, offload: bool):
    where = "optimizer" if offload else "none"
    stages = [max(map(static, divide(moe(), layout(zero=z, fsdp=fsdp, offload=where)))) for z in (1, 2, 3)]
    assert stages == sorted(stages, reverse=True)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("axis", ["fsdp", "tp", "pp", "replicate"])
def test_more_ranks_never_hold_more_model_states(axis: str, zero: int):
    fullest = [max(map(static, divide(moe(layers=8), layout(zero=zero, **{axis: n})))) for n in range(1, 9)]
    assert all(later <= earlier for earlier, later in pairwise(fullest))
    assert (fullest[-1] < fullest[0]) == (axis != "replicate")


@given(st.integers(2, 8), st.integers(2, 4), st.sampled_from([1, 2, 3]))
@settings(deadline=None, max_examples=30)
def test_more_fsdp_ranks_never_have_a_higher_peak(fsdp: int, times: int, zero: int):
    few, many = (
        max(share.quantities.peak()[1].total for share in divide(moe(), layout(zero=zero, fsdp=n)))
        for n in (fsdp, fsdp * times)
    )
    assert many <= few


def test_offloading_takes_optimizer_and_gradients_off_the_device():
    whole = moe()
    ranks = divide(whole, layout(fsdp=3, offload="optimizer"))
    assert all(
        (t.states, t.master, t.gradients, t.update) == (0, 0, 0, 0) for t in (s.quantities.tensors for s in ranks)
    )
    hosts = [share.host for share in ranks]
    assert add(hosts, "states") == whole.tensors.states
    assert add(hosts, "master") == whole.tensors.master
    assert add(hosts, "gradients") == 4 * whole.tensors.numel  # float32, as the master weights are
    single = divide(whole, layout(offload="optimizer"))[0]
    assert single.host.states == whole.tensors.states
    assert single.buffers.unreduced == whole.layers[0].tensors.gradients  # a layer's, until it has left
    assert single.collectives == ()
    undivided = divide(whole, layout(fsdp=2, zero=1, offload="optimizer"))[0]
    assert undivided.quantities.tensors.gradients == whole.tensors.gradients
    assert undivided.buffers.unreduced == 0


# ZeRO's own figures (arXiv 1910.02054, figure 1) and DeepSpeed's estimates


@pytest.mark.parametrize(
    ("parallel", "gigabytes"),
    [
        ({"replicate": 64}, "120.0"),
        ({"fsdp": 64, "zero": 1}, "31.4"),
        ({"fsdp": 64, "zero": 2}, "16.6"),
        ({"fsdp": 64, "zero": 3}, "1.9"),
    ],
)
def test_zero_figure_1(parallel: dict[str, int], gigabytes: str):
    whole = dense(*[250_000_000] * 30)
    fullest = max(map(static, divide(whole, layout(**parallel))))
    assert f"{fullest / 1e9:.1f}" == gigabytes


def test_zero_figure_1_in_bytes():
    whole, psi = dense(*[64 * 10**6] * 30), 64 * 30 * 10**6
    found = [static(divide(whole, layout(fsdp=64, zero=zero))[5]) for zero in (1, 2, 3)]
    assert found == [4 * psi + 12 * psi // 64, 2 * psi + 14 * psi // 64, 16 * psi // 64]


def zero2_estimate(params: int, gpus: int, cpu_offload: bool) -> tuple[int, int]:
    """Host and GPU bytes of deepspeed/runtime/zero/stage_1_and_2.py, one node, additional_buffer_factor=1."""
    if cpu_offload:
        return params * max(4 * gpus, 16), 2 * params
    return params * 4 * gpus, 2 * params + int(18 * params / gpus)


def zero3_estimate(params: int, largest: int, gpus: int, cpu_offload: bool) -> tuple[int, int, int]:
    """Host, GPU and largest layer's bytes of deepspeed/runtime/zero/stage3.py, one node, parameters on the GPU,
    zero_init, additional_buffer_factor=1."""
    if cpu_offload:
        return 16 * params, 4 * largest + int(2 * params / gpus), 4 * largest
    return largest * 4 * gpus, 4 * largest + int(18 * params / gpus), 4 * largest


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_zero_2_agrees_with_deepspeed(gpus: int):
    params = 10 * 800_000
    whole = dense(*[800_000] * 10, update=4)  # float32 copies of all gradients are alive in the update
    share = divide(whole, layout(fsdp=gpus, zero=2))[0]
    assert static(share) + share.quantities.tensors.update == zero2_estimate(params, gpus, False)[1]


@pytest.mark.parametrize("gpus", [2, 4])
def test_zero_2_with_offload_agrees_with_deepspeed(gpus: int):
    params = 10 * 800_000
    ranks = divide(dense(*[800_000] * 10), layout(fsdp=gpus, zero=2, offload="optimizer"))
    host, device = zero2_estimate(params, gpus, True)  # beyond 4 GPUs its host bytes are those of loading
    assert static(ranks[0]) == device
    assert sum(model_states(share.host) for share in ranks) == host


@pytest.mark.parametrize("gpus", [2, 4, 8])
@pytest.mark.parametrize("cpu_offload", [False, True])
def test_zero_3_agrees_with_deepspeed(gpus: int, cpu_offload: bool):
    layers = [800_000] * 9 + [2_400_000]
    # 16-bit gradients become 32-bit ones group by group: 2 bytes more in all, not 4
    whole = dense(*layers, update=2)
    ranks = divide(whole, layout(fsdp=gpus, zero=3, offload="optimizer" if cpu_offload else "none"))
    host, device, largest = zero3_estimate(sum(layers), max(layers), gpus, cpu_offload)
    buffers = ranks[0].buffers
    assert buffers.gathered + buffers.unreduced == largest
    held = static(ranks[0]) + ranks[0].quantities.tensors.update
    assert held + largest == device
    if cpu_offload:
        assert sum(model_states(share.host) for share in ranks) == host


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
@pytest.mark.parametrize("cpu_offload", [False, True])
def test_the_estimates_above_are_deepspeeds(gpus: int, cpu_offload: bool):
    zero2 = pytest.importorskip("deepspeed.runtime.zero.stage_1_and_2")
    zero3 = pytest.importorskip("deepspeed.runtime.zero.stage3")
    params, largest = 8_000_000, 1_000_000
    common = {"num_gpus_per_node": gpus, "cpu_offload": cpu_offload, "additional_buffer_factor": 1}
    assert zero2.estimate_zero2_model_states_mem_needs(params, **common) == zero2_estimate(params, gpus, cpu_offload)
    theirs = zero3.estimate_zero3_model_states_mem_needs(params, largest, cpu_offload_params=False, **common)
    assert theirs == zero3_estimate(params, largest, gpus, cpu_offload)


# Buffers


def test_a_gathered_layer_its_neighbour_and_their_gradients_are_in_the_transients():
    whole = moe(layers=3, accumulate=1)
    share = divide(whole, layout(fsdp=2))[0]
    layer = whole.layers[1].tensors
    weights = layer.trainable + layer.frozen - layer.packed
    expected = 2 * weights + 2 * layer.gradients
    assert share.quantities.layers[1].transients[0].dense == whole.layers[1].transients[0].dense + expected
    # the last layer follows the head, the first is followed by the embedding
    head, embedding = whole.head, whole.embedding
    last = weights + weights + layer.gradients + max(layer.gradients, head.gradients)
    assert share.quantities.layers[2].transients[0].dense == whole.layers[2].transients[0].dense + last
    assert share.quantities.loss == whole.loss + weights + head.trainable + head.frozen + 2 * head.gradients
    alone = embedding.trainable + embedding.frozen + embedding.gradients + max(layer.gradients, embedding.gradients)
    assert share.quantities.embedding_backward == whole.embedding_backward + alone


def test_without_resharding_every_layer_stays_whole_and_is_gathered_once():
    whole = moe(layers=3)
    sharded, kept = (divide(whole, layout(fsdp=2, reshard=reshard))[0] for reshard in (True, False))
    weights = [t.trainable + t.frozen - t.packed for t in (layer.tensors for layer in whole.layers)]
    embedding, head = (t.trainable + t.frozen for t in (whole.embedding, whole.head))
    before = kept.quantities.loss - whole.loss - 2 * whole.head.gradients
    assert before == embedding + sum(weights) + head
    gathers = [traffic(share)["all-gather", "fsdp", "weights"] for share in (sharded, kept)]
    assert gathers == [whole.accumulate * (2 * (embedding + sum(weights)) + head) // 2, whole.accumulate * before // 2]


def test_ddp_buckets_are_the_gradients_and_live_from_the_first_micro_step():
    whole = moe(accumulate=1)
    share = divide(whole, layout(replicate=2))[0]
    assert share.quantities.gradients_stay
    assert not divide(whole, layout(replicate=2, fsdp=2))[0].quantities.gradients_stay
    assert share.quantities.tensors == whole.tensors
    later = replace(whole, accumulate=2).peak()[1]
    assert share.quantities.peak()[1] == later
    (reduce,) = share.collectives
    assert (reduce.kind, reduce.axis, reduce.bytes) == ("all-reduce", "replicate", whole.tensors.gradients)
    assert reduce.calls == 1


# Collectives


@pytest.mark.parametrize("accumulate", [1, 3])
def test_zero_traffic(accumulate: int):
    """ZeRO section 7: stages 1 and 2 move what an all-reduce does, stage 3 half as much again."""
    whole = replace(dense(*[4096] * 4), accumulate=accumulate)
    psi = 2 * 4 * 4096  # bytes of all gradients, and of all weights
    one, two, three = (traffic(divide(whole, layout(fsdp=4, zero=zero))[0]) for zero in (1, 2, 3))
    share = psi * 3 // 4
    assert list(one.values()) == [share, share]
    assert list(two.values()) == [accumulate * share, share]
    assert list(three.values()) == [accumulate * 2 * share, accumulate * share]
    assert sum(one.values()) == all_reduce(psi, 4)
    assert [c.calls for c in divide(whole, layout(fsdp=4))[0].collectives] == [8 * accumulate, 4 * accumulate]


@pytest.fixture
def four_ranks():
    """This process as rank 0 of four, with a backend that moves nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


WIDTH = 256


class Sandwich(nn.Module):
    """Embedding, layers and head of WIDTH x WIDTH weights, divided as transformers' FSDP plan does."""

    def __init__(self, mesh: DeviceMesh, reshard: bool, checkpointing: bool = False, is_embedding_frozen: bool = False):
        super().__init__()
        self.checkpointing = checkpointing
        self.embedding, self.head = nn.Embedding(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.embedding.requires_grad_(not is_embedding_frozen)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        for module in (self.embedding, *self.layers):
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(self.head, mesh=mesh, reshard_after_forward=False)
        fully_shard(self, mesh=mesh)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointing else layer(x)
        return self.head(x)


def sandwich(is_embedding_frozen: bool = False) -> Quantities:
    """The same, as quantities; its activations are too small to count."""
    weights = 4 * WIDTH**2
    matrix = Tensors(trainable=weights, gradients=weights, numel=WIDTH**2)
    return replace(
        dense(1),
        embedding=Tensors(frozen=weights) if is_embedding_frozen else matrix,
        layers=tuple(Layer(k, matrix, (), 0, (Transient("backward", 0),)) for k in range(4)),
        head=matrix,
    )


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("is_embedding_frozen", [True, False])
def test_fsdp2_calls(four_ranks: DeviceMesh, reshard: bool, checkpointing: bool, is_embedding_frozen: bool):
    """torch's own FSDP2 communicates as often as predicted."""
    model = Sandwich(four_ranks, reshard, checkpointing, is_embedding_frozen)
    with CommDebugMode() as measured:
        model(torch.zeros(2, 1, dtype=torch.long)).sum().backward()
    counts = {str(op).split(".")[-1]: count for op, count in measured.get_comm_counts().items()}
    whole = sandwich(is_embedding_frozen)
    gather, scatter = divide(whole, layout(fsdp=4, reshard=reshard), checkpointing=checkpointing)[0].collectives
    assert counts == {"_allgather_base_": gather.calls, "_reduce_scatter_base_": scatter.calls}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp2_buffers(four_ranks: DeviceMesh, reshard: bool):
    """The peak of torch's own FSDP2 is as predicted, or lower by one gradient's shard."""
    model = Sandwich(four_ranks, reshard)
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        model(torch.zeros(1, 1, dtype=torch.long)).sum().backward()
    (measured,) = (found["Total"] for found in tracker.get_tracker_snapshot("peak").values())
    predicted = divide(sandwich(), layout(fsdp=4, reshard=reshard))[0].quantities.peak()[1].total
    shard, activations = WIDTH**2, WIDTH**2 // 8
    assert predicted - shard <= measured <= predicted + activations


def test_only_gradients_of_what_trains_are_reduced_and_packed_weights_are_never_gathered():
    frozen = Tensors(frozen=10_000, packed=8_000)
    whole = replace(dense(4096), layers=(replace(dense(4096).layers[0], dense=frozen),))
    assert traffic(divide(whole, layout(fsdp=2))[0]) == {("all-gather", "fsdp", "weights"): 2 * 1000}
    assert divide(whole, layout(fsdp=2, zero=2))[0].collectives == ()
    assert divide(whole, layout(replicate=2))[0].collectives == ()


def test_a_fused_backward_keeps_no_gradients_and_reduces_them_in_every_micro_step():
    plain = replace(dense(4096), accumulate=3)
    layer = replace(plain.layers[0], dense=replace(plain.layers[0].dense, gradients=0, alone=2048))
    fused = replace(plain, layers=(layer,))
    for sizes in ({"replicate": 2}, {"fsdp": 2, "zero": 1}):
        kept, gone = (divide(whole, layout(**sizes))[0].collectives[0] for whole in (plain, fused))
        assert (gone.bytes, gone.calls) == (3 * kept.bytes, 3 * kept.calls)


def test_moments_of_a_layer_keep_what_they_say_of_its_gradients():
    whole = moe(layers=1)
    early = replace(whole.layers[0].transients[0], gradients=0.25, saved=0.5)
    whole = replace(whole, layers=(replace(whole.layers[0], transients=(early,)),))
    (moment,) = divide(whole, layout(tp=2))[0].quantities.layers[0].transients
    assert (moment.gradients, moment.saved, moment.dense) == (0.25, 0.5, early.dense - early.split // 2)


def test_hybrid_sharding_reduces_each_shard_once_a_step_over_its_copies():
    whole = moe()
    found = traffic(divide(whole, layout(fsdp=2, replicate=3))[0])
    gradients = whole.tensors.gradients
    assert found["reduce-scatter", "fsdp", "gradients"] == whole.accumulate * gradients // 2
    assert found["all-reduce", "replicate", "gradients"] == pytest.approx(2 * 2 * gradients / 2 / 3, abs=20)


@pytest.mark.parametrize(("checkpointing", "passes"), [(True, 3), (False, 2)])
def test_tensor_parallel_traffic(checkpointing: bool, passes: int):
    """Megatron-LM figure 4: two all-reduces of a layer forward, two backward."""
    whole = moe(layers=4, accumulate=2)
    share = divide(whole, layout(tp=2), checkpointing=checkpointing)[0]
    assert traffic(share) == {
        ("all-reduce", "tp", "hidden activations"): 2 * (4 * 2 * passes + 1) * whole.hidden,
        ("all-gather", "tp", "logits"): 2 * whole.logits // 2,
    }


def test_pipeline_traffic_and_stages():
    whole = moe(layers=5, accumulate=4)
    first, middle, last = divide(whole, layout(pp=3))
    assert [[layer.index for layer in s.quantities.layers] for s in (first, middle, last)] == [[0, 1], [2, 3], [4]]
    moved = [sum(traffic(share).values()) for share in (first, middle, last)]
    assert moved == [4 * whole.hidden, 8 * whole.hidden, 4 * whole.hidden]
    assert (first.quantities.embedding, first.quantities.head) == (whole.embedding, Tensors())
    assert (last.quantities.embedding, last.quantities.head) == (Tensors(), whole.head)
    assert (first.quantities.loss, last.quantities.loss) == (whole.hidden, whole.loss + whole.hidden)
    assert add([s.quantities.tensors for s in (first, middle, last)], "states") == whole.tensors.states


@pytest.mark.parametrize("accumulate", [1, 2, 3, 8])
def test_1f1b_keeps_as_many_micro_batches_as_stages_follow(accumulate: int):
    whole = moe(layers=3, accumulate=accumulate)
    ranks = divide(whole, layout(pp=3))
    alive = [min(3 - stage, accumulate) for stage in range(3)]
    saved = [whole.layers[0].saved + (whole.saved if stage == 2 else 0) for stage in range(3)]
    assert [share.quantities.in_flight for share in ranks] == [(n - 1) * s for n, s in zip(alive, saved, strict=True)]
    loss = next(ranks[0].quantities.moments())[1]
    assert loss.saved_activations == whole.batch + alive[0] * saved[0]


def test_the_last_stage_copies_a_tied_embedding_and_reduces_its_gradient():
    whole = replace(moe(), tied=True, head=Tensors(frozen=64))
    first, last = divide(whole, layout(pp=2))
    assert last.quantities.head == whole.embedding + whole.head
    key = ("all-reduce", "pp", "gradients of the tied embedding")
    assert traffic(first)[key] == traffic(last)[key] == whole.embedding.gradients
    assert {traffic(s).get(key) for s in divide(whole, layout(pp=2, fsdp=2))} == {whole.embedding.gradients // 2}


# Expert parallelism


def test_each_rank_holds_consecutive_experts_and_the_rest_whole():
    whole = moe(experts=4)
    ranks = divide(whole, layout(fsdp=2, zero=1, ep=2))
    for ep, share in enumerate(ranks):
        for own, layer in zip(share.quantities.layers, whole.layers, strict=True):
            assert total(own.experts) == total(layer.experts[2 * ep : 2 * ep + 2])
            assert own.dense.trainable == (layer.dense + layer.unsplit).trainable


def test_uneven_load_raises_the_rank_that_holds_the_hot_experts_and_no_other():
    whole = moe(experts=4)
    even = divide(whole, layout(replicate=4, ep=4))
    uneven = divide(whole, layout(replicate=4, ep=4), load={k: [0.1, 0.1, 0.7, 0.1] for k in range(4)})
    grown = [
        new.quantities.layers[0].transients[1].experts / old.quantities.layers[0].transients[1].experts
        for new, old in zip(uneven, even, strict=True)
    ]
    assert grown == pytest.approx([0.4, 0.4, 2.8, 0.4], rel=1e-3)
    layer = whole.layers[0]
    saved = [share.quantities.layers[0].saved - layer.saved + layer.saved_experts for share in uneven]
    assert saved == pytest.approx([factor * layer.saved_experts for factor in grown], rel=1e-3)
    higher = [
        new.quantities.peak()[1].total > old.quantities.peak()[1].total for new, old in zip(uneven, even, strict=True)
    ]
    assert higher == [False, False, True, False]
    rows = sum(share.quantities.layers[0].transients[1].experts for share in uneven)
    assert rows == pytest.approx(4 * whole.layers[0].transients[1].experts, abs=4)


@given(st.lists(st.floats(0.0, 10.0), min_size=4, max_size=4), st.sampled_from([2, 4]), st.integers(1, 2))
@settings(deadline=None, max_examples=40)
def test_what_ranks_receive_is_what_they_send(load: list[float], ep: int, tp: int):
    assume(sum(load) > 0.1)
    whole = moe(experts=4, layers=1)
    ranks = divide(whole, layout(fsdp=4 // tp, tp=tp, ep=ep), load={0: load})
    received = sum(share.buffers.exchange for share in ranks) - 4 * whole.routed // tp
    assert received == pytest.approx(4 * whole.routed // tp, abs=4)


def test_balanced_all_to_all_moves_all_but_a_ranks_own_rows():
    """GShard's dispatch and combine, forward, in recomputation and in backward."""
    whole = moe(layers=3, accumulate=2)
    for checkpointing, passes in ((True, 3), (False, 2)):
        for share in divide(whole, layout(replicate=4, ep=4), checkpointing=checkpointing):
            exchange = next(c for c in share.collectives if c.kind == "all-to-all")
            assert exchange.bytes == 2 * passes * 2 * 3 * whole.routed * 3 // 4
            assert exchange.calls == 2 * passes * 2 * 3


def test_a_hot_rank_returns_more_than_it_sends_and_all_that_is_sent_returns():
    whole = moe(layers=1, accumulate=1)
    ranks = divide(whole, layout(replicate=2, ep=2), load={0: [3, 0, 1, 0]}, checkpointing=False)
    moved = [traffic(share)["all-to-all", "ep", "tokens"] for share in ranks]
    # rank 0 sends 1/4 of its rows and returns 3/4 of the other's; rank 1 the other way round
    assert moved == [2 * whole.routed, 2 * whole.routed]


def test_experts_under_tp_and_ep_are_whole_and_their_tokens_sliced():
    whole = moe(experts=4)
    share = divide(whole, layout(tp=2, ep=2))[1]
    layer, own = whole.layers[0], share.quantities.layers[0]
    assert total(own.experts) == total(layer.experts[2:])
    assert own.transients[1].experts == layer.transients[1].experts // 2
    assert share.buffers.exchange == 2 * whole.routed // 2
    alone = divide(whole, layout(tp=2))[1]
    assert total(alone.quantities.layers[0].experts).packed == total(layer.experts).packed // 2
    assert alone.quantities.layers[0].transients[1].experts == (16 + 16 // 2) * 1024
    found = traffic(share)
    assert found["all-gather", "tp", "expert outputs"] == 2 * 4 * 3 * whole.hidden // 2
    assert found["all-reduce", "tp", "hidden activations"] == 2 * (4 * 3 + 1) * whole.hidden


def test_experts_are_sharded_over_the_ranks_that_hold_the_same_ones():
    whole = moe(experts=4)
    ranks = divide(whole, layout(fsdp=4, ep=2))  # efsdp = fsdp · tp / ep = 2
    layer = whole.layers[0]
    for share in ranks:
        mine = total(layer.experts[2 * share.place.ep : 2 * share.place.ep + 2])
        own = total(share.quantities.layers[0].experts)
        assert (own.states, own.packed) == (mine.states // 2, mine.packed)
        experts = sum(t.gradients for x in whole.layers for t in x.experts[2 * share.place.ep : 2 * share.place.ep + 2])
        assert traffic(share)["reduce-scatter", "efsdp", "gradients of experts"] == whole.accumulate * experts // 2
    odd = moe(experts=4, unit=1001)
    ranks = divide(odd, layout(fsdp=4, ep=2))
    for ep in (0, 1):
        stored = [total(share.quantities.layers[0].experts) for share in ranks if share.place.ep == ep]
        assert add(stored, "numel") == add(list(odd.layers[0].experts[2 * ep : 2 * ep + 2]), "numel")


def test_experts_that_one_rank_holds_alone_are_not_reduced():
    found = traffic(divide(moe(), layout(replicate=4, ep=4))[0])
    assert ("all-reduce", "replicate", "gradients") in found
    assert not any("experts" in what for _, _, what in found)


@pytest.mark.parametrize(
    "sizes",
    [
        {"tp": 2, "ep": 2, "fsdp": 2},
        {"pp": 2, "fsdp": 3},
        {"replicate": 2, "fsdp": 2},
        {"tp": 2, "pp": 2, "fsdp": 2, "ep": 4, "replicate": 2},
        {"fsdp": 3, "replicate": 2, "ep": 2, "zero": 1},
        {"fsdp": 2, "ep": 4, "replicate": 2, "reshard": False, "offload": "optimizer"},
    ],
)
def test_combinations_have_a_peak_and_axes_that_communicate(sizes: dict[str, object]):
    parallel = layout(**sizes)
    ranks = divide(moe(), parallel)
    assert len(ranks) == len({share.place for share in ranks}) == parallel.ranks
    axes = {"efsdp": "ep", "fsdp": "fsdp", "tp": "tp", "ep": "ep", "pp": "pp", "replicate": "replicate"}
    for share in ranks:
        assert share.quantities.peak()[1].total > 0
        assert all(getattr(parallel, axes[c.axis]) > 1 for c in share.collectives)
        assert {"tp", "ep", "pp"} & {k for k, v in sizes.items() if v != 1} <= {c.axis for c in share.collectives}


# Refusals


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ({"ep": 8, "fsdp": 8}, {}, "more ranks than experts, 8 and 4; set ep to 1, 2, 4"),
        ({"ep": 3, "fsdp": 3}, {}, "3 ranks cannot hold 4 experts evenly; set ep to 1, 2, 4"),
        ({"ep": 2, "tp": 4}, {}, "2 is no multiple of tp 4"),
        ({"pp": 9}, {}, "9 stages and only 4 layers; set pp to 4"),
        ({"tp": 3}, {"kv_heads": 8}, "3 ranks cannot split 8 key/value heads evenly; set tp to 1, 2, 4, 8"),
        ({}, {"load": {0: [1.0]}}, "layer 0: 1 shares, and the model has 4 experts"),
        ({}, {"load": {9: [1.0]}}, "layer 9: 1 shares, and the model has 0 experts"),
        ({}, {"load": {1: [0.0] * 4}}, "not all zero"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_both_numbers(sizes, options, message):
    with pytest.raises(UserError) as error:
        divide(moe(), layout(**sizes), **options)
    assert message in str(error.value)


def test_every_refusal_is_listed_and_a_dense_model_has_no_experts():
    with pytest.raises(UserError) as error:
        divide(dense(8, 8), layout(pp=3, ep=2, fsdp=2))
    assert len(str(error.value).splitlines()) == 2
    assert "the model has none" in str(error.value)
