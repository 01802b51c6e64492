"""Moves executed by simulated ranks: values, gradients, dtypes, and what travels for them."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.redistributions import (
    BYTES_ONLY,
    Pair,
    check_everywhere,
    layouts,
    local_tensor,
    moved,
    numbered,
    pairs,
    piece,
    places,
)

import shardwise as sw
from shardwise import Costs, DeviceMesh, Layout, init_device_mesh, redistribute_local

OPS = ("sum", "avg", "max", "min", "product")
NAMES = "xyzw"
SHAPES = ((), (8,), (5,), (1,), (0,), (4, 6), (5, 3), (0, 3), (2, 4, 6), (3, 2, 5), (2, 0, 3))


def mesh_of(shape: Sequence[int], ranks: Any = None) -> DeviceMesh:
    if ranks is None:
        return init_device_mesh("cpu", shape, tuple(NAMES[: len(shape)]))
    return DeviceMesh("cpu", ranks, mesh_dim_names=tuple(NAMES[: len(shape)]))


def outside(shape: Sequence[int], ranks: Any = None) -> DeviceMesh:
    """The mesh of simulated ranks, to look at from outside."""
    return sw.simulate(lambda: mesh_of(shape, ranks), math.prod(shape))[0]


def on_ranks(count: int, each: Callable[[], Any]) -> list[Any]:
    """What each of `count` simulated ranks returns."""
    return sw.simulate(each, count)


@contextmanager
def own_events(mesh: DeviceMesh) -> Iterator[list[sw.Event]]:
    """What the calling rank communicates in here; a listener hears all ranks of the process."""
    rank = mesh.get_rank()
    heard: list[sw.Event] = []
    with sw.listen(lambda event: heard.append(event) if event.rank == rank else None):
        yield heard


def check_moves(mesh: DeviceMesh, found: list[Pair], full: torch.Tensor, costs: Any) -> None:
    """Run all moves in one simulation, then look at the results of all ranks from outside."""
    results = on_ranks(mesh.size(), lambda: [moved(pair, full, costs) for pair in found])
    ranks = [mesh.rank_at(place) for place in places(mesh)]
    for number, pair in enumerate(found):
        check_everywhere(pair, full, [results[rank][number] for rank in ranks])


# ---- values


@pytest.mark.sampled(every=2)
@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("costs", [None, BYTES_ONLY], ids=["default costs", "bytes only"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)], ids=str)
def test_every_pair_of_layouts_gives_the_slice_of_the_full_tensor(
    mesh_shape: tuple[int, ...], shape: tuple[int, ...], costs: Costs | None
) -> None:
    mesh = outside(mesh_shape)
    check_moves(mesh, pairs(mesh, shape), numbered(shape), costs)


@pytest.mark.sampled(every=5)
@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("costs", [None, BYTES_ONLY], ids=["default costs", "bytes only"])
@pytest.mark.parametrize("shape", [(7,), (4, 6), (5, 3), (3, 2, 5)], ids=str)
@pytest.mark.parametrize("mesh_shape", [(2, 3), (2, 4), (2, 2, 2)], ids=str)
def test_sampled_pairs_of_larger_meshes_give_the_slice_of_the_full_tensor(
    mesh_shape: tuple[int, ...], shape: tuple[int, ...], costs: Costs | None
) -> None:
    mesh = outside(mesh_shape)
    check_moves(mesh, pairs(mesh, shape, 150), numbered(shape), costs)


@settings(max_examples=25)
@given(st.data())
def test_random_pairs_on_large_meshes_with_ranks_in_any_order(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from([(3, 4), (2, 3, 2), (5, 2), (2, 1, 6)]))
    order = data.draw(st.permutations(range(math.prod(shape))))
    mesh = outside(shape, torch.tensor(order).reshape(shape).tolist())
    sizes = data.draw(st.lists(st.integers(0, 13), max_size=3).map(tuple))
    choices = st.sampled_from(list(layouts(mesh, sizes)))
    pair = st.tuples(choices, choices)
    found = data.draw(st.lists(pair, min_size=1, max_size=6))
    costs = data.draw(st.sampled_from([None, BYTES_ONLY]))
    check_moves(mesh, found, numbered(sizes), costs)


@pytest.mark.parametrize("shape", [(5,), (4, 6), (5, 3), (3, 2, 5)], ids=str)
def test_large_tensors_are_exchanged_in_place_with_the_same_results(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.redistribute.execute.is_large", bool)
    mesh = outside((2, 3))
    found = pairs(mesh, shape, 150, ops=())
    kinds: Counter[str] = Counter()
    with sw.listen(lambda event: kinds.update([event.kind])):
        check_moves(mesh, found, numbered(shape), BYTES_ONLY)
    assert kinds["exchange"] and not kinds["all_to_all"]


def test_axes_of_size_one_are_no_obstacle() -> None:
    mesh = outside((1, 2, 1))
    check_moves(mesh, pairs(mesh, (3, 2), 400), numbered((3, 2)), None)


# ---- pending reductions of every kind


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", [(8,), (5, 3)], ids=str)
def test_every_pending_op_ends_stays_and_begins(op: str, shape: tuple[int, ...]) -> None:
    mesh = outside((2, 2))
    full = 2.0 ** (numbered(shape) % 5) - (0 if op == "product" else 7)  # below 0 too
    found = [
        pair for pair in pairs(mesh, shape, 150, ops=(op,)) if pair[0].partial or pair[1].partial
    ]
    assert any(dst.partial and not src.partial for src, dst in found)
    for costs in (None, BYTES_ONLY):
        check_moves(mesh, found, full, costs)


def test_a_pending_average_and_a_pending_sum_mix() -> None:
    mesh = outside((2, 2))
    found = pairs(mesh, (4, 3), ops=("sum", "avg"))
    check_moves(mesh, found, numbered((4, 3)) * 4, None)


@pytest.mark.parametrize("ending, new", [("max", "sum"), ("sum", "max"), ("avg", "min")])
def test_one_pending_op_ends_while_another_begins(ending: str, new: str) -> None:
    mesh = outside((2, 2))
    found = [
        (Layout(mesh, (5, 4), {0: split}, {1: ending}), Layout(mesh, (5, 4), {1: after}, {0: new}))
        for split, after in product(([], [0]), ([], [1]))
    ]
    check_moves(mesh, found, numbered((5, 4)) - 10, None)
    check_moves(mesh, found, numbered((5, 4)) - 10, BYTES_ONLY)


@pytest.mark.parametrize(
    "dtype, op",
    [
        (torch.bfloat16, "sum"),
        (torch.float16, "avg"),
        (torch.bfloat16, "max"),
        (torch.int64, "sum"),
        (torch.int64, "min"),
        (torch.uint8, "max"),
        (torch.complex64, "sum"),
        (torch.complex128, "product"),
    ],
    ids=str,
)
def test_every_dtype_moves(dtype: torch.dtype, op: str) -> None:
    mesh = outside((2, 2))
    full = torch.full((5, 3), 64).to(dtype) if op == "product" else (numbered((5, 3)) + 9).to(dtype)
    if dtype.is_complex and op != "product":
        full = full * (1 + 2j)
    check_moves(mesh, pairs(mesh, (5, 3), 120, ops=(op,)), full, None)


@pytest.mark.parametrize("op, combine", [("max", torch.any), ("min", torch.all)])
def test_bools_move_and_reduce(op: str, combine: Callable[..., torch.Tensor]) -> None:
    mesh = outside((4,))
    src, dst = Layout(mesh, (6,), partial={0: op}), Layout(mesh, (6,), {0: [0]})
    given_by = [
        torch.tensor([index % 2, index < 3, 0, 1, 1, index > 0]).bool() for index in range(4)
    ]
    expected = combine(torch.stack(given_by), 0)
    results = on_ranks(4, lambda: redistribute_local(given_by[mesh.get_rank()], src, dst))
    assert torch.equal(torch.cat(results), expected)
    back = on_ranks(4, lambda: redistribute_local(results[mesh.get_rank()], dst, src))
    assert torch.equal(combine(torch.stack(back), 0), expected)


def test_averages_of_integers_are_refused_rather_than_rounded() -> None:
    mesh = outside((2,))
    averaged, summed = (Layout(mesh, (4,), partial={0: op}) for op in ("avg", "sum"))
    for src, dst in ((averaged, summed), (summed, averaged), (averaged, Layout(mesh, (4,)))):
        with pytest.raises(sw.RankError, match=r"'avg' of torch\.int64 would lose the fraction"):
            on_ranks(2, lambda src=src, dst=dst: redistribute_local(torch.arange(4), src, dst))


# ---- two meshes of one world


def cross(pair: Pair, full: torch.Tensor, costs: Costs | None) -> torch.Tensor:
    """This rank's piece in the target, from its piece in the source, if it has these."""
    src, dst = pair
    place = src.mesh.get_coordinate()
    local = full.new_empty(0) if place is None else local_tensor(full, src, place)
    result: torch.Tensor = redistribute_local(local, src, dst, costs=costs)
    return result


GRIDS = {
    "disjoint": ([[0, 1], [2, 3]], [[4, 5], [6, 7]]),
    "overlapping": ([0, 1, 2, 3], [[2, 3, 4], [5, 6, 7]]),
    "same ranks, another order": ([[0, 1], [2, 3]], [3, 1, 2, 0]),
    "to one rank": ([[[0, 1], [2, 3]]], [1]),
    "from one rank": ([7], [[0, 1], [2, 3]]),
}


@pytest.mark.parametrize("large", [True, False], ids=["in place", "packed"])
@pytest.mark.parametrize("one, other", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("shape", [(), (4, 6), (5, 3)], ids=str)
def test_moves_between_two_meshes(
    one: Any, other: Any, shape: tuple[int, ...], large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.redistribute.execute.is_large", lambda size: large and size > 0)
    source, target = (
        sw.simulate(lambda grid=grid: DeviceMesh("cpu", grid), 8)[0] for grid in (one, other)
    )
    found = list(product(layouts(source, shape), layouts(target, shape)))[::5]
    full = numbered(shape)
    inside = {*source.mesh.flatten().tolist(), *target.mesh.flatten().tolist()}

    def run() -> list[torch.Tensor]:
        if rank_here() not in inside:
            return []
        return [cross(pair, full, None) for pair in found]

    results = sw.simulate(run, 8)
    for number, pair in enumerate(found):
        ranks = [target.rank_at(place) for place in places(target)]
        check_everywhere(pair, full, [results[rank][number] for rank in ranks])
        for rank in inside - {*ranks}:
            assert results[rank][number].numel() == 0
            assert results[rank][number].dtype == full.dtype


def rank_here() -> int:
    return init_device_mesh("cpu", (8,)).get_rank()


def test_a_move_between_two_meshes_meets_the_bound_on_the_wire() -> None:
    source, target = (
        sw.simulate(lambda grid=grid: DeviceMesh("cpu", grid), 8)[0]
        for grid in GRIDS["overlapping"]
    )
    pair = Layout(source, (24, 4), {0: [0]}), Layout(target, (24, 4), {0: [1]})
    events: list[sw.Event] = []
    with sw.listen(events.append):
        sw.simulate(lambda: cross(pair, numbered((24, 4)), BYTES_ONLY), 8)
    agreed = [event for event in events if event.kind == "all_gather"]
    assert all(event.shape == (1,) for event in agreed), "on the dtype, and nothing else"
    events = [event for event in events if event.kind != "all_gather"]
    assert {event.kind for event in events} == {"all_to_all"}
    made = sw.plan_redistribute(*pair, torch.float64, costs=BYTES_ONLY)
    assert max(event.bytes for event in events) == made.bytes_received == made.lower_bound


# ---- what is on the wire


def test_what_travels_is_what_the_plan_says() -> None:
    mesh = outside((2, 3))
    full = numbered((12, 6))
    found = pairs(mesh, (12, 6))[::7]
    assert len(found) > 40
    for src, dst in found:
        events: list[sw.Event] = []
        with sw.listen(events.append):
            on_ranks(6, lambda src=src, dst=dst: moved((src, dst), full, BYTES_ONLY))
        received = Counter(dict.fromkeys(range(6), 0))
        for event in events:
            received[event.rank] += event.bytes
        made = sw.plan_redistribute(src, dst, torch.float64, costs=BYTES_ONLY)
        if len(made.steps) == 1:  # else the busiest rank of one step need not be that of another
            assert max(received.values()) == made.bytes_received, made
        assert sum(received.values()) / 6 == pytest.approx(made.mean_bytes), made


# ---- bad input


def test_a_local_tensor_of_the_wrong_shape_is_refused_with_the_rank_and_both_shapes() -> None:
    mesh = outside((2, 2))
    src, dst = Layout(mesh, (5, 4), {0: ["x"]}), Layout(mesh, (5, 4))
    message = (
        r"local: expected shape \(3, 4\), rank 0's piece of \[5@x, 4\] at \(0, 0\); got \(2, 4\)"
    )
    for needs_grad in (False, True):
        local = torch.ones(2, 4, requires_grad=needs_grad)
        with pytest.raises(sw.RankError, match=message):
            on_ranks(4, lambda local=local: redistribute_local(local, src, dst))


def test_a_wrong_shape_is_refused_though_nothing_is_to_do() -> None:
    mesh = outside((2, 2))
    layout = Layout(mesh, (5, 4))
    with pytest.raises(sw.RankError, match=r"expected shape \(5, 4\).* got \(5,\)"):
        on_ranks(4, lambda: redistribute_local(torch.ones(5), layout, layout))


def test_used_on_names_only_axes_on_which_the_target_is_whole() -> None:
    mesh = outside((2, 2))
    src, dst = Layout(mesh, (4,), {0: ["x"]}), Layout(mesh, (4,), {0: ["y"]})
    with pytest.raises(sw.RankError, match=r"used_on: .*\[4@y\] is whole, got y: Shard\(0\)"):
        on_ranks(4, lambda: redistribute_local(torch.ones(2), src, dst, used_on=["y"]))


# ---- gradients


def averaged(layout: Layout) -> int:
    return math.prod(layout.mesh.shape[axis] for axis, op in layout.partial if op == "avg")


def weights(shape: Sequence[int]) -> torch.Tensor:
    """The gradient of the loss `(weights * tensor).sum()` with respect to the whole tensor."""
    return 72 * (100 - numbered(shape))  # averages of it are exact, over 2 and over 3 ranks


def check_gradient(pair: Pair, costs: Costs | None) -> None:
    """Feed this rank's piece of dL/dy, and find its piece of dL/dx.

    A contribution to a pending sum counts fully, one of n to an average for an n-th.
    """
    src, dst = pair
    place = src.mesh.get_coordinate()
    assert place is not None
    full, weight = numbered(src.shape), weights(src.shape)
    local = local_tensor(full, src, place).requires_grad_()
    result = redistribute_local(local, src, dst, costs=costs)
    result.backward(piece(weight, dst, place) / averaged(dst))
    assert local.grad is not None
    expected = piece(weight, src, place) / averaged(src)
    assert torch.equal(local.grad, expected), f"{src} -> {dst} at {place}: {local.grad}"


@pytest.mark.parametrize("costs", [None, BYTES_ONLY], ids=["default costs", "bytes only"])
@pytest.mark.parametrize(
    "mesh_shape, shape",
    [
        ((4,), (5, 4)),
        ((2, 2), ()),
        ((2, 2), (5,)),
        ((2, 2), (4, 3)),
        ((2, 3), (5, 4)),
        ((2, 2, 2), (4, 3)),
    ],
    ids=str,
)
def test_gradients_are_those_of_the_plain_computation(
    mesh_shape: tuple[int, ...], shape: tuple[int, ...], costs: Costs | None
) -> None:
    mesh = outside(mesh_shape)
    found = pairs(mesh, shape, 120, ops=("sum", "avg"))

    def run() -> None:
        for pair in found:
            check_gradient(pair, costs)

    on_ranks(mesh.size(), run)


def test_gradients_go_back_between_two_meshes() -> None:
    source, target = (
        sw.simulate(lambda grid=grid: DeviceMesh("cpu", grid), 8)[0]
        for grid in GRIDS["overlapping"]
    )
    shape = (6, 4)
    found = list(product(layouts(source, shape), layouts(target, shape)))[::4]
    full, weight = numbered(shape), weights(shape)

    def run() -> None:
        for src, dst in found:
            here, there = source.get_coordinate(), target.get_coordinate()
            local = full.new_empty(0) if here is None else local_tensor(full, src, here)
            local.requires_grad_()
            result = redistribute_local(local, src, dst)
            result.backward(torch.zeros(0) if there is None else piece(weight, dst, there))
            expected = full.new_empty(0) if here is None else piece(weight, src, here)
            assert torch.equal(local.grad, expected), f"{src} -> {dst}"

    sw.simulate(run, 8)


def test_a_gradient_goes_through_several_moves_and_local_work() -> None:
    """L = sum(w * x ** 3), with x moved before every product."""
    mesh = outside((2, 2))
    shape = (5, 4)
    a, b, c = (
        Layout(mesh, shape, order) for order in ({0: ["x", "y"]}, {0: ["y"], 1: ["x"]}, {1: ["y"]})
    )

    def run() -> None:
        place = mesh.get_coordinate()
        assert place is not None
        x = piece(numbered(shape), a, place).clone().requires_grad_()
        squared = redistribute_local(x, a, b) ** 2
        cubed = redistribute_local(squared, b, c) * redistribute_local(x, a, c)
        cubed.backward(piece(weights(shape), c, place))
        assert torch.equal(x.grad, piece(weights(shape) * 3 * numbered(shape) ** 2, a, place))

    on_ranks(4, run)


def test_gradients_of_gradients_are_those_of_the_plain_computation() -> None:
    """L = sum(w * y ** 2): its gradient is 2 w x, and the gradient of sum(v * that) is 2 w v."""
    mesh = outside((2, 2))
    shape = (5, 4)
    found = [pair for pair in pairs(mesh, shape, 60, ops=()) if pair[0] is not pair[1]]
    full, weight = numbered(shape), weights(shape)
    direction = numbered(shape) % 5

    def run() -> None:
        for src, dst in found:
            place = mesh.get_coordinate()
            assert place is not None
            x = piece(full, src, place).clone().requires_grad_()
            y = redistribute_local(x, src, dst)
            (first,) = torch.autograd.grad(y**2, x, piece(weight, dst, place), create_graph=True)
            assert torch.equal(first, piece(2 * weight * full, src, place))
            (second,) = torch.autograd.grad(first, x, piece(direction, src, place))
            assert torch.equal(second, piece(2 * weight * direction, src, place)), f"{src} -> {dst}"

    on_ranks(4, run)


def test_the_gradient_of_a_gradient_moves_forward_again() -> None:
    """A move is linear: the derivative of its backward, by the cotangent, is the move itself."""
    mesh = outside((2, 2))
    found = [
        pair for pair in pairs(mesh, (4, 3), 80) if not pair[0].partial and not pair[1].partial
    ]

    def run() -> None:
        for src, dst in found:
            place = mesh.get_coordinate()
            assert place is not None
            x = torch.zeros(src.local_shape(), dtype=torch.float64, requires_grad=True)
            cotangent = torch.ones(dst.local_shape(), dtype=torch.float64, requires_grad=True)
            y = redistribute_local(x, src, dst)
            (back,) = torch.autograd.grad(y, x, cotangent, create_graph=True)
            full = numbered((4, 3))
            (forward,) = torch.autograd.grad(back, cotangent, piece(full, src, place))
            assert torch.equal(forward, piece(full, dst, place))

    on_ranks(4, run)


def test_the_gradient_of_a_pending_max_is_refused() -> None:
    mesh = outside((2,))
    whole = Layout(mesh, (4,))
    for op in ("max", "min", "product"):
        pending = Layout(mesh, (4,), partial={0: op})
        for src, dst in ((pending, whole), (whole, pending)):
            local = torch.ones(4, requires_grad=True)
            with pytest.raises(
                sw.RankError, match=rf"a pending {op} on axis x .* no gradient.*detach\(\)"
            ):
                on_ranks(2, lambda a=src, b=dst, local=local: redistribute_local(local, a, b))
            on_ranks(2, lambda a=src, b=dst: redistribute_local(torch.ones(4), a, b))


def test_without_gradients_the_result_needs_none() -> None:
    mesh = outside((2,))
    src, dst = Layout(mesh, (4,), {0: [0]}), Layout(mesh, (4,))

    def run() -> tuple[bool, bool, bool]:
        x = torch.ones(2, requires_grad=True)
        with torch.no_grad():
            quiet = redistribute_local(x, src, dst)
        return (
            redistribute_local(x, src, dst).requires_grad,
            quiet.requires_grad,
            redistribute_local(torch.ones(2), src, dst).requires_grad,
        )

    assert on_ranks(2, run) == [(True, False, False)] * 2


# ---- gradients that come back as contributions


USED_ON = [
    ("[5, 4]", "[5, 4]", ["x"], ["all_reduce"]),
    ("[6, 4]", "[6, 4]", ["x", "y"], ["all_reduce"]),
    ("[6@x, 4]", "[6, 4]", ["x"], ["reduce_scatter"]),
    ("[5, 4@x]", "[5, 4]", ["x"], ["reduce_scatter"]),
    ("[8@x.y, 4]", "[8, 4]", ["x", "y"], ["reduce_scatter"]),
    ("[8@x.y, 4]", "[8@x, 4]", ["y"], ["reduce_scatter"]),
    ("[8@x.y, 4]", "[8, 4]", ["y"], None),
    ("[8@y, 4]", "[8@x, 4]", ["y"], None),
    ("[8, 4] +sum@x", "[8, 4]", ["x"], ["all_reduce"]),
    ("[8@y, 4] +sum@x", "[8, 4@y]", ["x"], None),
]


@pytest.mark.parametrize("source, target, used_on, kinds", USED_ON)
def test_contributions_to_a_gradient_are_summed_where_the_tensor_came_from(
    source: str, target: str, used_on: list[str], kinds: list[str] | None
) -> None:
    mesh = outside((2, 2))
    src, dst = Layout.parse(source, mesh), Layout.parse(target, mesh)
    full = numbered(src.shape)
    users = math.prod(mesh.size(axis) for axis in used_on)

    def run() -> None:
        place = mesh.get_coordinate()
        assert place is not None
        x = local_tensor(full, src, place).requires_grad_()
        y = redistribute_local(x, src, dst, used_on=used_on, costs=BYTES_ONLY)
        assert torch.equal(y, piece(full, dst, place))
        index = sw.communicator(mesh, used_on).index
        with own_events(mesh) as events:
            y.backward(piece(full, dst, place) * (index + 1))
        total = full * sum(range(1, users + 1))
        assert torch.equal(x.grad, piece(total, src, place))
        if kinds is not None:
            assert [event.kind for event in events] == kinds
            assert [event.axes for event in events] == [tuple(used_on)]

    on_ranks(4, run)


def test_without_used_on_the_gradient_of_a_gather_is_a_slice() -> None:
    mesh = outside((2, 2))
    src, dst = Layout.parse("[6@x, 4]", mesh), Layout.parse("[6, 4]", mesh)

    def run() -> None:
        place = mesh.get_coordinate()
        assert place is not None
        x = piece(numbered((6, 4)), src, place).clone().requires_grad_()
        y = redistribute_local(x, src, dst)
        with own_events(mesh) as events:
            y.backward(numbered((6, 4)))
        assert events == []
        assert torch.equal(x.grad, x)

    on_ranks(4, run)


@pytest.mark.parametrize(
    "source, target, forward, backward",
    [
        ("[8, 4] +sum@x.y", "[8, 4]", ["all_reduce"], []),
        ("[8, 4] +sum@x", "[8@x, 4]", ["reduce_scatter"], ["all_gather"]),
        ("[8, 4@x]", "[8, 4]", ["all_gather"], []),
        ("[8, 4]", "[8@y, 4]", [], ["all_gather"]),
        ("[8, 4]", "[8, 4] +sum@x", [], []),
        ("[8@x, 4]", "[8, 4] +sum@x", [], []),
        ("[8@x, 4]", "[8, 4@x]", ["all_to_all"], ["all_to_all"]),
        ("[8@x.y, 4]", "[8@y.x, 4]", ["all_to_all"], ["all_to_all"]),
        ("[8@x, 4]", "[8@y, 4]", ["all_to_all"], ["all_to_all"]),
    ],
)
def test_forward_and_backward_are_the_moves_of_the_design(
    source: str, target: str, forward: list[str], backward: list[str]
) -> None:
    mesh = outside((2, 2))
    src, dst = Layout.parse(source, mesh), Layout.parse(target, mesh)

    def run() -> list[str]:
        place = mesh.get_coordinate()
        assert place is not None
        x = local_tensor(numbered((8, 4)), src, place).requires_grad_()
        with own_events(mesh) as events:
            y = redistribute_local(x, src, dst, costs=BYTES_ONLY)
            y.backward(piece(numbered((8, 4)), dst, place))
        return [event.kind for event in events]

    assert on_ranks(4, run) == [[*forward, *backward]] * 4


# ---- the dtype on the wire


def wire(
    used_on: Sequence[str] = (), **dtypes: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, list[sw.Event]]:
    """Gather float32 shards and go back: rank 0's result, its gradient and what it heard."""
    mesh = outside((2,))
    src, dst = Layout(mesh, (4, 3), {0: ["x"]}), Layout(mesh, (4, 3))
    full = numbered((4, 3), torch.float32)

    def run() -> tuple[torch.Tensor, torch.Tensor, list[sw.Event]]:
        place = mesh.get_coordinate()
        assert place is not None
        x = piece(full, src, place).clone().requires_grad_()
        with own_events(mesh) as events:
            y = redistribute_local(x, src, dst, used_on=used_on, costs=BYTES_ONLY, **dtypes)
            y.backward(full.to(y.dtype))
        assert x.grad is not None
        return y.detach(), x.grad, events

    (result, gradient, events), _ = on_ranks(2, run)
    assert torch.equal(result.float(), full)
    assert torch.equal(gradient, full[:2] * (2 if used_on else 1))
    assert gradient.dtype == torch.float32
    return result, gradient, events


def test_a_forward_dtype_halves_the_bytes_and_is_the_dtype_of_the_result() -> None:
    plain, _, (event,) = wire()
    half, _, (smaller,) = wire(forward_dtype=torch.bfloat16)
    assert (plain.dtype, event.dtype, event.bytes) == (torch.float32, torch.float32, 24)
    assert (half.dtype, smaller.dtype, smaller.bytes) == (torch.bfloat16, torch.bfloat16, 12)


def test_a_gradient_travels_as_it_comes_or_in_the_backward_dtype() -> None:
    for dtypes, expected in (
        ({}, [torch.float32, torch.float32]),
        ({"forward_dtype": torch.bfloat16}, [torch.bfloat16, torch.bfloat16]),
        ({"backward_dtype": torch.bfloat16}, [torch.float32, torch.bfloat16]),
        (
            {"forward_dtype": torch.bfloat16, "backward_dtype": torch.float32},
            [torch.bfloat16, torch.float32],
        ),
    ):
        _, _, events = wire(["x"], **dtypes)
        assert [event.kind for event in events] == ["all_gather", "reduce_scatter"]
        assert [event.dtype for event in events] == expected


def test_a_forward_dtype_holds_though_nothing_moves() -> None:
    mesh = outside((2,))
    layout = Layout(mesh, (4,))

    def run() -> torch.dtype:
        x = torch.ones(4, requires_grad=True)
        y = redistribute_local(x, layout, layout, forward_dtype=torch.bfloat16)
        y.backward(torch.ones(4, dtype=torch.bfloat16))
        assert x.grad is not None and x.grad.dtype == torch.float32
        return y.dtype

    assert on_ranks(2, run) == [torch.bfloat16] * 2


# ---- asynchronous


def test_several_moves_in_flight_give_what_waiting_gives() -> None:
    mesh = outside((2, 2))
    found = pairs(mesh, (5, 4), 60)
    full = numbered((5, 4))

    def run() -> list[torch.Tensor]:
        place = mesh.get_coordinate()
        assert place is not None
        started = [
            redistribute_local(local_tensor(full, src, place), src, dst, async_op=True)
            for src, dst in found
        ]
        assert all(isinstance(each, sw.Pending) for each in started)
        results = [each.wait() for each in started]
        assert all(each.wait() is result for each, result in zip(started, results, strict=True))
        return results

    results = on_ranks(4, run)
    for number, pair in enumerate(found):
        check_everywhere(pair, full, [each[number] for each in results])


def test_the_first_collective_is_under_way_when_an_asynchronous_call_returns() -> None:
    mesh = outside((2,))
    src, dst = Layout(mesh, (4,), {0: [0]}), Layout(mesh, (4,))

    def run() -> None:
        with own_events(mesh) as events:
            pending = redistribute_local(torch.ones(2), src, dst, async_op=True)
            assert [event.kind for event in events] == ["all_gather"]
            pending.wait()
            assert len(events) == 1

    on_ranks(2, run)


def test_an_asynchronous_move_has_its_gradient() -> None:
    mesh = outside((2, 2))
    found = pairs(mesh, (5, 4), 60)
    full, weight = numbered((5, 4)), weights((5, 4))

    def run() -> None:
        place = mesh.get_coordinate()
        assert place is not None
        locals = [local_tensor(full, src, place).requires_grad_() for src, _ in found]
        started = [
            redistribute_local(local, src, dst, async_op=True)
            for local, (src, dst) in zip(locals, found, strict=True)
        ]
        results = [each.wait() for each in started]
        for local, result, (src, dst) in zip(locals, results, found, strict=True):
            result.backward(piece(weight, dst, place))
            assert torch.equal(local.grad, piece(weight, src, place)), f"{src} -> {dst}"

    on_ranks(4, run)


# ---- abstract meshes


def test_on_an_abstract_mesh_every_pair_gives_a_meta_tensor_of_the_right_shape() -> None:
    mesh = DeviceMesh.abstract((2, 3), ("x", "y"))
    for shape in ((), (6,), (5, 3), (4096, 300)):
        for src, dst in product(layouts(mesh, shape), repeat=2):
            local = torch.empty(src.local_shape(), device="meta")
            result = redistribute_local(local, src, dst)
            assert result.is_meta and tuple(result.shape) == dst.local_shape(), (src, dst)


# ---- what a review found


def two_under_way_waited_for_in_another_order_by_some() -> bool:
    mesh = mesh_of((2, 2))
    src, dst = (Layout.parse(text, mesh) for text in ("[64@x, 64] +sum@y", "[64, 64]"))
    inputs = [torch.full(src.local_shape(), value) for value in (1.0, 100.0)]
    plan = sw.plan_redistribute(src, dst)
    pendings = [redistribute_local(x, src, dst, async_op=True) for x in inputs]
    assert sum(step.kind in ("all_gather", "all_reduce") for step in plan.steps) == 2
    if mesh.get_rank() in (1, 2):  # each has a neighbour along every axis that does not
        pendings[1].wait()
    results = [pending.wait() for pending in pendings]
    return all((x == 2 * value).all() for x, value in zip(results, (1.0, 100.0), strict=True))


def test_ranks_may_wait_for_moves_in_different_orders() -> None:
    assert all(sw.simulate(two_under_way_waited_for_in_another_order_by_some, 4))


def test_the_first_collective_is_under_way_even_if_a_slice_comes_before_it() -> None:
    def body() -> None:
        mesh = mesh_of((2, 2))
        src, dst = (Layout.parse(text, mesh) for text in ("[64, 64] +sum@x", "[64@y, 64]"))
        assert sw.plan_redistribute(src, dst).steps[0].kind == "slice"
        events: list[sw.Event] = []
        with sw.listen(events.append):
            pending = redistribute_local(torch.ones(64, 64), src, dst, async_op=True)
            mine = [event for event in events if event.rank == mesh.get_rank()]
        assert len(mine) == 1
        pending.wait()

    sw.simulate(body, 4)


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("text", ["[4]", "[4@x]", "[4] +sum@x"])
def test_a_second_derivative_through_a_pending_reduction_is_right(op: str, text: str) -> None:
    """The gradient is the cotangent of y made whole, times a factor. Its transpose takes what comes
    back, contributions again, the way of the move: it is linear."""

    def body() -> None:
        mesh = mesh_of((2,))
        src, dst = Layout.parse(f"[4] +{op}@x", mesh), Layout.parse(text, mesh)
        x = torch.arange(1.0, 5.0, dtype=torch.float64, requires_grad=True)
        y = redistribute_local(x, src, dst)
        cotangent = torch.ones_like(y, requires_grad=True)
        (first,) = torch.autograd.grad(y, x, cotangent, create_graph=True)
        factor = 1 if op == "sum" else 0.5
        assert torch.equal(first, torch.full((4,), float(factor), dtype=torch.float64))
        one = torch.tensor([1.0, -2.0, 3.0, -4.0], dtype=torch.float64)
        back = one * (1 + 2 * mesh.get_rank())
        (second,) = torch.autograd.grad(first, cotangent, back)
        whole = 4 * one if not dst.partial else back
        assert torch.equal(second, (whole * factor)[dst.box().slices])

    sw.simulate(body, 2)


def test_a_memory_cap_chooses_the_plan_or_is_refused() -> None:
    def body() -> None:
        mesh = mesh_of((2, 2))
        src, dst = Layout.parse("[64@x, 64@y]", mesh), Layout.parse("[64@y, 64@x]", mesh)
        x = torch.ones(src.local_shape(), requires_grad=True)
        least = sw.plan_redistribute(src, dst).peak_bytes
        redistribute_local(x, src, dst, peak_bytes=least).sum().backward()
        with pytest.raises(sw.MemoryCapError, match=r"peak_bytes: .* takes at least \d+ bytes"):
            redistribute_local(x, src, dst, peak_bytes=100)

    sw.simulate(body, 4)


def test_ranks_of_another_world_and_ranks_outside_both_meshes_are_refused() -> None:
    def body(where: list[int]) -> None:
        src = Layout(DeviceMesh("cpu", [0, 1]), (4,))
        dst = Layout(DeviceMesh("cpu", where), (4,))
        redistribute_local(torch.zeros(4), src, dst)

    with pytest.raises(sw.RankError, match="redistribute: expected ranks of this world"):
        sw.simulate(body, 4, [1, 2])  # rank 3 is in neither

    bigger = sw.simulate(lambda: DeviceMesh("cpu", [4, 5]), 8)[0]

    def beyond() -> None:
        src = Layout(init_device_mesh("cpu", (4,)), (4,))
        redistribute_local(torch.zeros(4), src, Layout(bigger, (4,)))

    with pytest.raises(sw.RankError, match=r"redistribute: expected ranks of this world, .* 4"):
        sw.simulate(beyond, 4)


def test_ranks_with_different_dtypes_across_meshes_are_told() -> None:
    def body() -> None:
        src = Layout(DeviceMesh("cpu", [0, 1]), (4,))
        dst = Layout(DeviceMesh("cpu", [2, 3]), (4,))
        inside = init_device_mesh("cpu", (4,)).get_rank() < 2
        local = torch.zeros(4, dtype=torch.float64) if inside else torch.empty(0)
        redistribute_local(local, src, dst)

    with pytest.raises(sw.RankError, match=r"expected one dtype on all ranks, got torch.float64"):
        sw.simulate(body, 4)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"dst": [sw.Replicate()]}, "dst: expected a Layout, got"),
        ({"local": [1.0]}, "local: expected a tensor, got"),
        ({"forward_dtype": "bf16"}, "dtype: expected such as torch.bfloat16, got 'bf16'"),
        ({"used_on": "y"}, "axis: expected one of"),
        ({"peak_bytes": "1GB"}, "peak_bytes: expected a number of bytes, got '1GB'"),
    ],
)
def test_mistakes_are_told_by_the_name_of_the_argument(
    arguments: dict[str, Any], message: str
) -> None:
    layout = Layout(DeviceMesh.abstract((1,), ("x",)), (2,))
    given = {"local": torch.zeros(2), "src": layout, "dst": layout, **arguments}
    with pytest.raises(sw.ShardwiseError, match=message.replace("[", r"\[")):
        redistribute_local(**given)


def test_a_move_with_nothing_to_do_gives_the_tensor_itself() -> None:
    layout = Layout(init_device_mesh("cpu", (1,)), (2,))
    x = torch.ones(2, requires_grad=True)
    assert redistribute_local(x, layout, layout) is x
    assert redistribute_local(x, layout, layout, async_op=True).wait() is x


def test_what_was_started_with_gradients_has_them_wherever_it_is_waited_for() -> None:
    layout = Layout(init_device_mesh("cpu", (1,)), (2,))
    x = torch.ones(2, requires_grad=True)
    pending = redistribute_local(x, layout, layout, async_op=True)
    with torch.no_grad():
        result = pending.wait()
    assert result.requires_grad


def frames_of(call: Callable[[], object]) -> int:
    """The number of Python functions that a call runs, itself included."""
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def test_a_move_that_was_planned_before_runs_few_python_functions() -> None:
    def run() -> list[int]:
        mesh = init_device_mesh("cpu", (2,), ("tp",))
        whole = sw.ones(8, 8, device_mesh=mesh, placements=[sw.Replicate()])
        counts = []
        for placements in ([sw.Replicate()], [sw.Shard(0)]):
            whole.redistribute(placements=placements)
            counts.append(frames_of(lambda: whole.redistribute(placements=placements)))  # noqa: B023
        return counts

    for nothing, slice_ in sw.simulate(run, 2):
        assert nothing <= 12
        assert slice_ <= 36


@pytest.mark.parametrize("is_heard", [False, True])
def test_a_part_that_a_rank_keeps_has_memory_of_its_own(is_heard: bool) -> None:
    """A move that only slices would be a view of its input, and a write to one change the other."""

    def run() -> None:
        mesh = mesh_of((2,))
        whole, halves = Layout(mesh, (4,)), Layout(mesh, (4,), {0: (0,)})
        local = torch.arange(4.0)
        if is_heard:
            with own_events(mesh) as heard:
                kept = redistribute_local(local, whole, halves)
            assert heard == []
        else:
            kept = redistribute_local(local, whole, halves)
        kept.zero_()
        assert torch.equal(local, torch.arange(4.0))

    on_ranks(2, run)
