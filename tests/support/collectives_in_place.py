"""Collectives that write into memory of the caller, checked as those of collectives.py are, and
collectives on separate channels.

The memory is often a part of a larger buffer, which is checked as a whole afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch

import shardwise as sw
from support.collectives import (
    COMPLEX,
    DTYPES,
    HALF,
    MOVED,
    MOVED_ONLY,
    OPS,
    allowed,
    bits,
    check,
    check_reduced,
    forms,
    plain,
    reduced,
    same,
    size_patterns,
    untouched,
    value,
    values,
)

Shape = Sequence[int]


class Place:
    """Memory for a tensor of a shape, within a larger buffer of zeros.

    Arguments:
        spread: whether the tensor takes every second element of a row.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, spread: bool) -> None:
        count = torch.Size(shape).numel()
        step = 2 if spread else 1
        self._buffer = torch.zeros((count + 2) * step, dtype=dtype)
        self._inner = slice(step, (count + 1) * step, step)
        self.tensor = (
            self._buffer[self._inner].view(tuple(shape)) if count else _empty(shape, dtype)
        )
        if spread and count > 1:
            assert not self.tensor.is_contiguous()

    def check_beside(self) -> None:
        """Check that nothing outside of the tensor was written."""
        rest = self._buffer.clone()
        rest[self._inner] = torch.zeros((), dtype=torch.float32).to(rest.dtype)
        assert not bits(rest).any(), "wrote beside its place"


def _empty(shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype)


def waited(comm: sw.Communicator, name: str) -> list[Callable[..., Any]]:
    """Return the synchronous form, and the asynchronous one followed by a wait."""
    start = getattr(comm, f"{name}_async")
    return [getattr(comm, name), lambda *args, **kwargs: start(*args, **kwargs).wait()]


# ---- one tensor


def all_reduce_in_place(comm: sw.Communicator, exact: bool) -> None:
    def one(shape: Shape, dtype: torch.dtype, op: str, form: str) -> None:
        for call in waited(comm, "all_reduce"):
            x = value(comm.index, shape, dtype, form)
            strides = x.stride()
            assert call(x, op, in_place=True) is x
            assert x.stride() == strides
            check_reduced(plain(x), values(comm, shape, dtype, form), op, [], exact)
            if form == "strided":
                assert x._base is not None
                assert not bits(x._base[1::2]).any(), "wrote beside its place"

    for dtype, op in product(DTYPES, OPS):
        if allowed(op, dtype):
            one((3, 5), dtype, op, "contiguous")
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, *COMPLEX):
        for form in forms(dtype):
            if form != "expanded":  # its elements share memory
                one((3, 5), dtype, "sum", form)
        for shape in ((), (0,), (2, 0, 3)):
            one(shape, dtype, "sum", "contiguous")


def all_reduce_in_place_of_what_lies_differently(comm: sw.Communicator, exact: bool) -> None:
    """Each rank stores its values in another memory format; the sums are the same."""
    for form, op in product(("neg", "transposed", "offset"), ("sum", "avg", "max")):
        for shape in ((3, 5), (1, 1)):  # of one element all are contiguous
            x = value(comm.index, shape, form=form if comm.index == 0 else "contiguous")
            comm.all_reduce(x, op, in_place=True)
            check_reduced(plain(x), values(comm, shape), op, [], exact)


def all_reduce_in_place_of_a_parameter(comm: sw.Communicator, exact: bool) -> None:
    for dtype, op in product((torch.float32, torch.bfloat16), ("sum", "avg")):
        x = torch.nn.Parameter(value(comm.index, (3, 5), dtype))
        assert comm.all_reduce(x, op, in_place=True) is x
        assert x.is_leaf and x.requires_grad
        check_reduced(plain(x.detach()), values(comm, (3, 5), dtype), op, [], exact)


def all_gather_into(comm: sw.Communicator, exact: bool) -> None:
    def one(shape: Shape, dtype: torch.dtype = torch.float32, form: str = "contiguous") -> None:
        x = value(comm.index, shape, dtype, form)
        expected = [each.reshape(-1) for each in values(comm, shape, dtype, form)]
        for call, skips in product(waited(comm, "all_gather_into"), (False, True)):
            place = Place((comm.size, x.numel()), dtype, spread=False)
            with untouched(x):
                assert call(x, place.tensor, skip_own=skips) is place.tensor
            place.check_beside()
            for index, (row, there) in enumerate(zip(place.tensor, expected, strict=True)):
                is_left = skips and index == comm.index and not bits(row).any()
                assert is_left or same(row, there), f"row {index}"

    for shape in ((), (7,), (3, 5), (0,), (2, 0, 3)):
        one(shape)
    for dtype in MOVED:
        one((2, 3), dtype)
    for dtype in (torch.float32, *COMPLEX):
        for form in forms(dtype):
            one((2, 3), dtype, form)


def all_gather_into_a_megabyte(comm: sw.Communicator, exact: bool) -> None:
    """From this size on, the gather is made of messages between pairs of ranks."""
    count = -(-(1 << 18) // comm.size)
    x = torch.arange(count, dtype=torch.float32) + comm.index
    for given, skips in product((x, torch.stack([x, x], 1)[:, 0]), (False, True)):
        rows = torch.full((comm.size, count), -1.0)
        with untouched(x):
            comm.all_gather_into(given, rows, skip_own=skips)
        rows -= torch.arange(count)
        others = [index for index in range(comm.size) if index != comm.index or not skips]
        assert all((rows[index] == index).all() for index in others)


# ---- several tensors, each where it belongs


def shapes_of(count: int) -> dict[str, Callable[[int, int], Shape]]:
    """Return the shape of each rank's piece of the first, second and third tensor."""
    patterns = list(size_patterns(count))
    uneven, none, last = patterns[1:]
    return {
        "even": lambda at, index: (2, at + 1),
        "uneven": lambda at, index: (uneven[index], 3, at),
        "along the last dim": lambda at, index: (2, uneven[(index + at) % count]),
        "empty": lambda at, index: (none[index], 2),
        "all on the last": lambda at, index: (last[index], at + 2),
        "numbers": lambda at, index: (),
    }


def all_gather_in_place(comm: sw.Communicator, exact: bool) -> None:
    def one(
        shape_of: Callable[[int, int], Shape],
        dtype: torch.dtype = torch.float32,
        form: str = "contiguous",
        spread: bool = False,
        count: int = 3,
    ) -> None:
        everybodys = [
            [value(index, shape_of(at, index), dtype, form, at) for index in range(comm.size)]
            for at in range(count)
        ]
        xs = [each[comm.index] for each in everybodys]
        for call in waited(comm, "all_gather_in_place"):
            places = [[Place(x.shape, dtype, spread) for x in each] for each in everybodys]
            outs = [[place.tensor for place in each] for each in places]
            with untouched(*xs, *(each[comm.index] for each in outs)):  # its own stay as they are
                assert call(xs, outs) is None
            for each, there in zip(places, everybodys, strict=True):
                for index, (place, x) in enumerate(zip(each, there, strict=True)):
                    place.check_beside()
                    if index != comm.index:
                        assert same(place.tensor, plain(x))

    for shape_of, spread in product(shapes_of(comm.size).values(), (False, True)):
        one(shape_of, spread=spread)
        one(shape_of, spread=spread, count=1)
    uneven = shapes_of(comm.size)["uneven"]
    for dtype in MOVED:
        one(uneven, dtype)
    for dtype in (torch.float32, *COMPLEX):
        for form in forms(dtype):
            one(uneven, dtype, form, spread=True)


def reduce_scatter_in_place(comm: sw.Communicator, exact: bool) -> None:
    def one(
        shape_of: Callable[[int, int], Shape],
        dtype: torch.dtype = torch.float32,
        op: str = "sum",
        form: str = "contiguous",
        spread: bool = False,
        count: int = 3,
    ) -> None:
        def piece(source: int, at: int, target: int) -> torch.Tensor:
            return value(source, shape_of(at, target), dtype, form, (at, target))

        me, everybody = comm.index, range(comm.size)
        xs = [[piece(me, at, target) for target in everybody] for at in range(count)]
        for call in waited(comm, "reduce_scatter_in_place"):
            places = [Place(each[me].shape, dtype, spread) for each in xs]
            with untouched(*(x for each in xs for x in each)):
                assert call(xs, [place.tensor for place in places], op) is None
            for at, place in enumerate(places):
                place.check_beside()
                there = [plain(piece(source, at, me)) for source in everybody]
                # In rank order on every engine, as each is summed where it is wanted.
                check_reduced(plain(place.tensor), there, op, [], exact=True)

    for shape_of, spread in product(shapes_of(comm.size).values(), (False, True)):
        one(shape_of, spread=spread)
        one(shape_of, op="avg", spread=spread, count=1)
    uneven = shapes_of(comm.size)["uneven"]
    for dtype, op in product(DTYPES, OPS):
        if allowed(op, dtype):
            one(uneven, dtype, op, count=2)
    for dtype in (torch.float32, torch.bfloat16, *COMPLEX):
        for form in forms(dtype):
            one(uneven, dtype, form=form, spread=True)


def half_types_are_summed_in_float32_also_in_place(comm: sw.Communicator, exact: bool) -> None:
    """256 + 1 is 256 in bfloat16: a sum rounded at every step would stay there."""
    for dtype, large in zip(HALF, (256.0, 2048.0), strict=True):
        mine = torch.full((1,), large if comm.index == 0 else 1.0, dtype=dtype)
        for op, parts in (("sum", 1), ("avg", comm.size)):
            expected = torch.tensor([(large + comm.size - 1) / parts]).to(dtype)
            out = torch.zeros(1, dtype=dtype)
            comm.reduce_scatter_in_place([[mine] * comm.size], [out], op)
            check(out, expected)
            check(comm.all_reduce(mine.clone(), op, in_place=True), expected)


def inputs_in_place_may_require_grad(comm: sw.Communicator, exact: bool) -> None:
    x = value(comm.index, (comm.size, 2)).requires_grad_()
    for each in (x, x * 1):
        pieces = list(each.unbind())
        rows, out = torch.zeros(comm.size, 2 * comm.size), torch.zeros(2)
        outs = [torch.zeros(comm.size, 2) for _ in range(comm.size)]
        comm.all_gather_into(each, rows)
        comm.all_gather_in_place([each], [outs])
        comm.reduce_scatter_in_place([pieces], [out])
        assert not any(result.requires_grad for result in (rows, out, *outs))
        mine = [there[comm.index] for there in values(comm, (comm.size, 2))]
        check_reduced(out, mine, "sum", [each], exact=True)


def several_in_place_under_way_at_once(comm: sw.Communicator, exact: bool) -> None:
    """Wait in an order that differs from the order of the starts, and between ranks."""
    everybody, me = range(comm.size), comm.index
    started: list[tuple[sw.Pending[Any], torch.Tensor, torch.Tensor]] = []
    for turn in range(3):
        x = value(me, (4,), salt=turn)
        rows = torch.zeros(comm.size, 4)
        gathered = torch.stack(values(comm, (4,), salt=turn))
        started.append((comm.all_gather_into_async(x, rows), rows, gathered))
        whole = torch.zeros(comm.size, 4)
        whole[me] = x
        started.append((comm.all_gather_in_place_async([x], [list(whole)]), whole, gathered))
        out = torch.zeros(2)
        pieces = [value(me, (2,), salt=(turn, target)) for target in everybody]
        total = reduced([value(source, (2,), salt=(turn, me)) for source in everybody], "sum")
        started.append((comm.reduce_scatter_in_place_async([pieces], [out]), out, total))
        most = value(me, (3,), salt=turn)
        expected = reduced(values(comm, (3,), salt=turn), "max")
        started.append((comm.all_reduce_async(most, "max", in_place=True), most, expected))
    generator = torch.Generator().manual_seed(me)
    for turn in torch.randperm(len(started), generator=generator).tolist():
        pending, found, wanted = started[turn]
        pending.wait()
        assert torch.equal(found, wanted)


def reductions_in_place_without_meaning_are_refused(comm: sw.Communicator, exact: bool) -> None:
    for dtype, op in product(MOVED, OPS):
        if dtype not in MOVED_ONLY and allowed(op, dtype):
            continue
        x = value(comm.index, (2,), dtype)
        for call in (
            lambda x=x, op=op: comm.all_reduce(x, op, in_place=True),
            lambda x=x, op=op: comm.reduce_scatter_in_place([[x] * comm.size], [x.clone()], op),
        ):
            with pytest.raises(sw.CollectiveError, match=f"^op: '{op}'.*{dtype}") as caught:
                call()
            assert re.search(r"use 'sum'|convert", str(caught.value))  # what to do


# ---- channels


def channels_have_an_order_of_their_own(comm: sw.Communicator, exact: bool) -> None:
    """Ranks start the same collectives in different orders: they agree only within a channel."""
    mesh = sw.DeviceMesh("cpu", comm.ranks, mesh_dim_names=("x",))
    names = ("", "one", "other")
    channels = [sw.communicator(mesh, "x", channel=name) for name in names]
    assert len({id(channel) for channel in channels}) == 3
    assert [sw.communicator(mesh, 0, channel=name) for name in names] == channels
    assert [(each.ranks, each.index) for each in channels] == [(comm.ranks, comm.index)] * 3

    started: dict[tuple[int, int], list[sw.Pending[Any]]] = {}
    for step in range(3 * 2):
        which, turn = (step + comm.index) % 3, step // 3
        channel = channels[which]
        number = torch.tensor([100.0 * which + 10 * turn + comm.index])
        started[which, turn] = [channel.all_reduce_async(number), channel.all_gather_async(number)]
    for (which, turn), (total, gathered) in sorted(started.items(), reverse=comm.index % 2 == 0):
        everybodys = [100.0 * which + 10 * turn + index for index in range(comm.size)]
        assert total.wait().tolist() == [sum(everybodys)]
        assert gathered.wait().tolist() == everybodys


IN_PLACE_CASES: dict[str, Callable[[sw.Communicator, bool], None]] = {
    case.__name__: case
    for case in (
        all_reduce_in_place,
        all_reduce_in_place_of_what_lies_differently,
        all_reduce_in_place_of_a_parameter,
        all_gather_into,
        all_gather_into_a_megabyte,
        all_gather_in_place,
        reduce_scatter_in_place,
        half_types_are_summed_in_float32_also_in_place,
        inputs_in_place_may_require_grad,
        several_in_place_under_way_at_once,
        reductions_in_place_without_meaning_are_refused,
        channels_have_an_order_of_their_own,
    )
}

IN_PLACE_RUNS = list(product(IN_PLACE_CASES, ("tp-dp", "permuted-tp", "subset")))
"""Who the ranks are makes no difference to these beyond what it makes to others."""
