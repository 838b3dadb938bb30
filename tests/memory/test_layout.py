"""The textbook's division: sums over ranks balance, and published figures come out (`engine: deepspeed`, pipelines)."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.config import ParallelConfig
from moetune.errors import UserError
from moetune.memory.collectives import all_gather, all_reduce, part, reduce_scatter
from moetune.memory.layout import RankShare, divide, model_states, refuse_indivisible
from moetune.memory.quantities import Layer, Quantities, Tensors, Transient
from moetune.parallel.place import Place

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
                transients=(Transient("attention", 16 * unit), Transient("experts", 8 * unit, 32 * unit)),
            )
            for k in range(layers)
        ),
        head=group(4 * unit, frozen=4 * unit),
        batch=unit,
        saved=2 * unit,
        loss=24 * unit,
        embedding_backward=10 * unit,
        hidden=2 * unit,
        accumulate=accumulate,
    )


def layout(**sizes: object) -> ParallelConfig:
    return ParallelConfig.model_validate({"engine": "deepspeed", **sizes})


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
    assert all(t.packed == whole.tensors.packed for t in held)  # buffers


def test_ranks_count_tp_fastest_then_fsdp_replicate_and_pp():
    places = [share.place for share in divide(moe(), layout(tp=2, fsdp=3, replicate=2, pp=2, ep=4))]
    assert places[1] == Place(tp=1, ep=1)
    assert places[2] == Place(fsdp=1, ep=2)
    assert places[6] == Place(replicate=1, ep=2, shard=1)
    assert places[12] == Place(pp=1)
    assert places[23] == Place(pp=1, replicate=1, fsdp=2, tp=1, ep=3, shard=2)


# Monotone


@given(st.integers(2, 16), st.booleans())
@settings(deadline=None)
def test_each_zero_stage_holds_no_more_than_the_one_before(fsdp: int, offload: bool):
    where = "optimizer" if offload else "none"
    stages = [max(map(static, divide(moe(), layout(zero=z, fsdp=fsdp, offload=where)))) for z in (1, 2, 3)]
    assert stages == sorted(stages, reverse=True)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("axis", ["fsdp", "pp", "replicate"])
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


def test_a_gathered_layer_its_neighbour_its_gradients_and_the_bucket_are_in_the_transients():
    whole = moe(layers=3, accumulate=1)
    share = divide(whole, layout(fsdp=2))[0]
    layer = whole.layers[1].tensors
    weights = layer.trainable + layer.frozen - layer.packed
    bucket = whole.tensors.gradients  # DeepSpeed's, as large as all gradients if these are few
    expected = 2 * weights + layer.gradients + bucket
    assert share.quantities.layers[1].transients[0].dense == whole.layers[1].transients[0].dense + expected
    # the last layer follows the head, the first is followed by the embedding
    head, embedding = whole.head, whole.embedding
    last = weights + weights + layer.gradients + bucket
    assert share.quantities.layers[2].transients[0].dense == whole.layers[2].transients[0].dense + last
    assert share.quantities.loss == whole.loss + weights + head.trainable + head.frozen + head.gradients + bucket
    alone = embedding.trainable + embedding.frozen + embedding.gradients + bucket
    assert share.quantities.embedding_backward == whole.embedding_backward + alone


def test_without_resharding_every_layer_stays_whole_and_is_gathered_once():
    whole = moe(layers=3)
    sharded, kept = (divide(whole, layout(fsdp=2, reshard=reshard))[0] for reshard in (True, False))
    weights = [t.trainable + t.frozen - t.packed for t in (layer.tensors for layer in whole.layers)]
    embedding, head = (t.trainable + t.frozen for t in (whole.embedding, whole.head))
    before = kept.quantities.loss - whole.loss - whole.head.gradients - whole.tensors.gradients
    assert before == embedding + sum(weights) + head
    gathers = [traffic(share)["all-gather", "fsdp", "weights"] for share in (sharded, kept)]
    assert gathers == [whole.accumulate * (2 * (embedding + sum(weights)) + head) // 2, whole.accumulate * before // 2]


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


def test_hybrid_sharding_reduces_each_shard_once_a_step_over_its_copies():
    whole = moe()
    found = traffic(divide(whole, layout(fsdp=2, replicate=3))[0])
    gradients = whole.tensors.gradients
    assert found["reduce-scatter", "fsdp", "gradients"] == whole.accumulate * gradients // 2
    assert found["all-reduce", "replicate", "gradients"] == pytest.approx(2 * 2 * gradients / 2 / 3, abs=20)


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


# Refusals


@pytest.mark.parametrize(
    ("sizes", "parts", "message"),
    [
        ({"ep": 8, "fsdp": 8}, {}, "more ranks than experts, 8 and 4; set ep to 1, 2, 4"),
        ({"ep": 3, "fsdp": 3}, {}, "3 ranks cannot hold 4 experts evenly; set ep to 1, 2, 4"),
        ({"ep": 2, "tp": 4}, {}, "2 is no multiple of tp 4"),
        ({"pp": 9}, {}, "9 stages and only 4 layers; set pp to 4"),
        ({"tp": 3}, {"kv_heads": 8}, "3 ranks cannot split 8 key/value heads evenly; set tp to 1, 2, 4, 8"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_both_numbers(sizes, parts, message):
    with pytest.raises(UserError) as error:
        refuse_indivisible(layout(**sizes), layers=4, experts=[4] * 4, **parts)
    assert message in str(error.value)


def test_every_refusal_is_listed_and_a_dense_model_has_no_experts():
    with pytest.raises(UserError) as error:
        refuse_indivisible(layout(pp=3, ep=2, fsdp=2), layers=2, experts=[])
    assert len(str(error.value).splitlines()) == 2
    assert "the model has none" in str(error.value)
