"""Index arithmetic: chunks are torch's, and boxes behave like sets of indices."""

from itertools import pairwise, product

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise import Box
from shardwise.core.box import chunk, chunk_sizes

SIZE = 6


@st.composite
def boxes(draw: st.DrawFn, ndim: int = 2) -> Box:
    ranges = [sorted(draw(st.tuples(*[st.integers(0, SIZE)] * 2))) for _ in range(ndim)]
    return Box(tuple(start for start, _ in ranges), tuple(stop for _, stop in ranges))


def indices(box: Box) -> set[tuple[int, ...]]:
    return set(product(*map(range, box.start, box.stop)))


# ---- chunks


def test_chunks_are_ceil_sized_and_the_last_are_short_or_empty() -> None:
    assert chunk_sizes(8, 4) == (2, 2, 2, 2)
    assert chunk_sizes(7, 4) == (2, 2, 2, 1)
    assert chunk_sizes(5, 4) == (2, 2, 1, 0)
    assert chunk_sizes(1, 3) == (1, 0, 0)
    assert chunk_sizes(0, 2) == (0, 0)


def test_a_chunk_is_given_by_its_bounds() -> None:
    assert [chunk(0, 5, 4, index) for index in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]


def test_a_chunk_of_a_chunk_counts_from_its_start() -> None:
    assert [chunk(10, 15, 2, index) for index in range(2)] == [(10, 13), (13, 15)]


@given(st.integers(0, 50), st.integers(1, 12))
def test_chunk_sizes_are_those_of_torch(size: int, parts: int) -> None:
    sizes = [len(piece) for piece in torch.arange(size).chunk(parts)]
    assert list(chunk_sizes(size, parts)) == sizes + [0] * (parts - len(sizes))


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 12))
def test_chunks_lie_end_to_end(start: int, length: int, parts: int) -> None:
    bounds = [chunk(start, start + length, parts, index) for index in range(parts)]
    assert bounds[0][0] == start and bounds[-1][1] == start + length
    assert all(stop == following for (_, stop), (following, _) in pairwise(bounds))
    assert all(first <= stop for first, stop in bounds)


# ---- boxes


def test_a_box_cuts_its_piece_out_of_a_tensor() -> None:
    box = Box((1, 0), (3, 2))
    assert box.shape == (2, 2)
    assert box.slices == (slice(1, 3), slice(0, 2))
    x = torch.tensor([[0, 1, 2], [10, 11, 12], [20, 21, 22]])
    assert x[box.slices].tolist() == [[10, 11], [20, 21]]


def test_a_box_without_dims_holds_one_element() -> None:
    box = Box((), ())
    assert box.shape == () and box.slices == () and not box.is_empty
    assert torch.tensor(7)[box.slices].item() == 7


def test_a_box_is_empty_if_one_range_is() -> None:
    assert Box((0, 2), (4, 2)).is_empty
    assert not Box((0, 2), (4, 3)).is_empty


def test_boxes_intersect_in_what_they_share() -> None:
    assert Box((0, 0), (4, 4)).intersect(Box((2, 1), (6, 3))) == Box((2, 1), (4, 3))


def test_boxes_apart_intersect_in_an_empty_box() -> None:
    apart = Box((0,), (2,)).intersect(Box((5,), (9,)))
    assert apart.is_empty and apart.shape == (0,)


def test_within_counts_from_the_corner_of_the_outer_box() -> None:
    assert Box((5, 2), (6, 4)).within(Box((4, 2), (8, 9))) == Box((1, 0), (2, 2))


def test_repr_shows_the_ranges() -> None:
    assert repr(Box((0, 3), (2, 5))) == "Box[0:2, 3:5]"
    assert repr(Box((), ())) == "Box[]"


@given(boxes(), boxes())
def test_intersection_is_that_of_the_sets_of_indices(one: Box, other: Box) -> None:
    both = one.intersect(other)
    assert indices(both) == indices(one) & indices(other)
    assert both.is_empty == (not indices(both))
    assert min(both.shape) >= 0
    assert indices(other.intersect(one)) == indices(both)


@given(boxes(), boxes())
def test_within_finds_the_piece_inside_the_outer_piece(one: Box, outer: Box) -> None:
    inner = one.intersect(outer)
    if inner.is_empty:
        return
    x = torch.arange(SIZE * SIZE).reshape(SIZE, SIZE)
    assert torch.equal(x[outer.slices][inner.within(outer).slices], x[inner.slices])
