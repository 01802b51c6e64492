"""Reshapes: a split dim stays split where its chunks are chunks of the result."""

import pytest
import torch
from support.rules import leaf

from shardwise import (
    Layout,
    Replicate,
    Shard,
    explicit,
    fallback,
    init_device_mesh,
    listen,
    simulate,
)
from shardwise.core.errors import PolicyError
from shardwise.rules.shape.reshape import match_dims
from shardwise.testing import Sample, check_rule, distributed

CASES = {
    "view": (torch.Tensor.view, [Sample(leaf(6, 4), 2, 3, 4), Sample(leaf(5, 4), (5, -1))]),
    "view, merged": (torch.Tensor.view, [Sample(leaf(4, 3, 2), 4, 6), Sample(leaf(5, 2), -1)]),
    "view, ones": (torch.Tensor.view, [Sample(leaf(1, 5, 1), [5, 1]), Sample(leaf(4), 1, 4, 1)]),
    "reshape": (torch.reshape, [Sample(leaf(6, 4), (4, 6)), Sample(leaf(5, 4), (2, -1, 2))]),
    "reshape method": (torch.Tensor.reshape, [Sample(leaf(6, 2), 3, 2, 2)]),
    "view_as": (torch.Tensor.view_as, [Sample(leaf(6, 2), torch.zeros(12))]),
    "reshape_as": (torch.Tensor.reshape_as, [Sample(leaf(6, 2), torch.zeros(3, 4))]),
    "flatten": (
        torch.flatten,
        [Sample(leaf(4, 3, 2)), Sample(leaf(4, 3, 2), 1), Sample(leaf())],
    ),
    "ravel": (torch.ravel, [Sample(leaf(5, 2))]),
    "unflatten": (
        torch.Tensor.unflatten,
        [Sample(leaf(2, 6), 1, (3, -1)), Sample(leaf(8), 0, (4, 2))],
    ),
    "atleast": (
        lambda x: (torch.atleast_1d(x), torch.atleast_2d(x), torch.atleast_3d(x)),
        [Sample(leaf()), Sample(leaf(5)), Sample(leaf(5, 2)), Sample(leaf(2, 1, 3))],
    ),
    "repeat_interleave": (
        torch.repeat_interleave,
        [
            Sample(leaf(5, 4), 2, 0),
            Sample(leaf(5, 4), 0, 0),
            Sample(leaf(4, 3), 2),
            Sample(leaf(4, 2), 3, 1, output_size=6),
        ],
    ),
    "pixel_shuffle": (torch.pixel_shuffle, [Sample(leaf(2, 8, 3, 2), 2)]),
    "pixel_unshuffle": (torch.pixel_unshuffle, [Sample(leaf(2, 2, 6, 4), 2)]),
    "channel_shuffle": (torch.channel_shuffle, [Sample(leaf(2, 4, 3), 2)]),
    "empty": (torch.reshape, [Sample(leaf(4, 0), (0, 3)), Sample(leaf(4, 0, 2), (4, 0))]),
}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_plain_call_in_every_layout(name):
    fn, samples = CASES[name]
    check_rule(fn, samples, most=20)


def test_groups_are_as_small_as_can_be():
    def factors(shape, target):
        match = match_dims(torch.empty(shape), target)
        return match.before, match.after, set(match.joined)

    assert factors((2, 3, 4), (2, 12)) == (("d0", "d1", None), ("d0", "d1"), {"d1"})
    assert factors((6, 4), (2, 12)) == (("d0", None), ("d0", None), {"d0"})
    assert factors((5, 1), (1, 5)) == (("d0", "d1"), ("d1", "d0"), set())
    assert factors((0, 3), (0, 7)) == (("d0", None), ("d0", None), set())


def on(mesh_shape, run):
    def simulated():
        return run(init_device_mesh("cpu", mesh_shape, ("dp", "tp")[: len(mesh_shape)]))

    size = 1
    for each in mesh_shape:
        size *= each
    return simulate(simulated, size)


def events_of(run):
    events = []
    with listen(events.append):
        result = run()
    return result, [event.kind for event in events]


def test_heads_and_batch_are_split_off_and_merged_without_communication():
    def run(mesh):
        x = distributed(
            torch.arange(48.0).reshape(2, 3, 8), Layout(mesh, (2, 3, 8), {0: ["dp"], 2: ["tp"]})
        )
        heads, kinds = events_of(lambda: x.view(2, 3, 4, 2).transpose(1, 2))
        rows, more = events_of(lambda: x.reshape(6, 8))
        return repr(heads.mesh_layout), repr(rows.mesh_layout), kinds + more

    found = on((2, 2), run)
    assert found[0] == ("[2@dp, 4@tp, 3, 2]", "[6@dp, 8@tp]", [])


def test_a_dim_that_two_axes_split_is_merged_and_split_in_their_order():
    def run(mesh):
        x = distributed(torch.arange(16.0).reshape(8, 2), Layout(mesh, (8, 2), {0: ["tp", "dp"]}))
        flat, kinds = events_of(lambda: x.view(-1))
        again, more = events_of(lambda: flat.view(4, 2, 2))
        return repr(flat.mesh_layout), repr(again.mesh_layout), kinds + more

    assert on((2, 2), run)[0] == ("[16@tp.dp]", "[4@tp.dp, 2, 2]", [])


def test_chunks_that_do_not_fit_are_made_whole():
    # 10 elements over 2 ranks are 5 and 5, which is 2.5 rows of 2.
    def run(mesh):
        x = distributed(torch.arange(10.0), Layout(mesh, (10,), {0: ["dp"]}))
        rows = x.view(5, 2)
        with pytest.raises(PolicyError, match="redistribute"), explicit():
            x.view(5, 2)
        return repr(rows.mesh_layout), rows.to_local().flatten().tolist()

    assert on((2,), run)[1] == ("[5, 2]", list(range(10)))


def test_uneven_rows_stay_split_in_units_where_they_are_flattened_and_come_back():
    # 5 rows of 2 over 2 ranks are 6 and 4 elements.
    def run(mesh):
        x = distributed(torch.arange(10.0).reshape(5, 2), Layout(mesh, (5, 2), {0: ["dp"]}))
        flat, kinds = events_of(lambda: x.view(10))
        again, more = events_of(lambda: flat.view(5, 2))
        return (
            repr(flat.mesh_layout),
            flat.to_local().tolist(),
            again.mesh_layout is x.mesh_layout,
            kinds + more,
        )

    assert on((2,), run)[1] == ("[(10/2)@dp]", [6.0, 7.0, 8.0, 9.0], True, [])


def test_a_dim_that_is_split_within_another_stays_split_where_they_are_joined():
    def run(mesh):
        x = distributed(torch.arange(24.0).reshape(3, 4, 2), Layout(mesh, (3, 4, 2), {1: ["dp"]}))
        flat, kinds = events_of(lambda: x.view(-1, 2))
        again, more = events_of(lambda: flat.view(3, 4, 2))
        assert torch.equal(flat.full_tensor(), torch.arange(24.0).reshape(12, 2))
        return repr(flat.mesh_layout), again.mesh_layout is x.mesh_layout, kinds + more

    assert on((2,), run)[1] == ("[(4+4+4)@dp, 2]", True, [])


def test_a_view_shares_memory_and_gradients_flow_through_writes_to_it():
    def run(mesh):
        x = distributed(torch.arange(12.0).reshape(4, 3), Layout(mesh, (4, 3), {0: ["dp"]}))
        x.view(2, 2, 3).zero_()
        leaf = distributed(torch.ones(4, 3, requires_grad=True), x.mesh_layout)
        y = leaf * 1
        y.view(12).mul_(3)
        y.sum().backward()
        return x.to_local().abs().sum().item(), leaf.grad.to_local().unique().tolist()

    assert on((2,), run) == [(0.0, [3.0])] * 2


def test_a_view_to_another_dtype_is_right():
    def run(mesh):
        x = torch.arange(8, dtype=torch.int32)
        d = distributed(x, Layout.from_placements(mesh, (8,), [Replicate()]))
        return torch.equal(d.view(torch.int16).full_tensor(), x.view(torch.int16))

    assert all(on((2,), run))


def test_sizes_that_do_not_fit_give_the_error_of_torch():
    def run(mesh):
        x = distributed(torch.zeros(4, 3), Layout.from_placements(mesh, (4, 3), [Shard(0)]))
        with pytest.raises(RuntimeError, match=r"shape '\[5, 3\]' is invalid for input of size 12"):
            x.view(5, 3)

    on((2,), run)


def test_each_row_as_often_as_is_said_for_it():
    samples = [
        Sample(leaf(5, 3), torch.tensor([1, 0, 2, 3, 1]), 0),
        Sample(leaf(2, 2), torch.tensor([2])),
        Sample(torch.tensor([1, 2, 0]), output_size=3),
    ]
    check_rule(torch.repeat_interleave, samples, most=8, allow_missing=True)

    def run(mesh):
        x = distributed(torch.zeros(4, 3), Layout.from_placements(mesh, (4, 3), [Shard(0)]))
        for repeats in (2, torch.tensor([2, 2, 2, 2])):
            with pytest.raises(RuntimeError, match="allocated size does not match"):
                x.repeat_interleave(repeats, 0, output_size=9)
        with pytest.raises(RuntimeError, match="repeats must have the same size"):
            x.repeat_interleave(torch.tensor([1, 2]), 0)

    on((2,), run)


def test_sizes_may_be_tensors():
    def run(mesh):
        x = distributed(torch.zeros(6, 4), Layout.from_placements(mesh, (6, 4), [Shard(0)]))
        with fallback("replicate"):
            for count in (2, 3, 6):  # the value is no part of a plan
                assert x.reshape(torch.tensor(count), -1).shape == (count, 24 // count)
            for count in (2, 3):
                sizes = (torch.tensor(count), torch.tensor(6 // count))
                assert x.unflatten(0, sizes).shape == (count, 6 // count, 4)

    on((2,), run)
