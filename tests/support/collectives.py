"""Collectives, each checked on every rank against the same thing computed in one process.

A rank's inputs are functions of its index in the communicator, so every rank can rebuild what all
the others put in. The cases run on simulated ranks (test_collectives_simulated.py) and on real ones
(test_collectives_gloo.py).
"""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import shardwise as sw

OPS = ("sum", "avg", "max", "min", "product")
HALF = (torch.bfloat16, torch.float16)
COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
DTYPES = (
    *HALF,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    *UNSIGNED,
    torch.bool,
    *COMPLEX,
)
MOVED_ONLY = (torch.float8_e4m3fn, torch.float8_e5m2)
MOVED = (*DTYPES, *MOVED_ONLY)


# ---- where: a mesh and the axes to talk along


@dataclass(frozen=True)
class Where:
    ranks: Any
    names: tuple[str, ...]
    axes: tuple[str, ...]
    expected: tuple[tuple[int, ...], ...]
    """The ranks of each communicator, in order, worked out by hand."""

    def mesh(self) -> sw.DeviceMesh:
        return sw.DeviceMesh("cpu", self.ranks, mesh_dim_names=self.names)

    def communicator(self) -> sw.Communicator | None:
        """Return the calling rank's communicator, or None if the rank is not in the mesh."""
        mesh = self.mesh()
        return None if mesh.get_coordinate() is None else sw.communicator(mesh, self.axes)


SQUARE = ((0, 1), (2, 3))
PERMUTED = ((2, 0), (3, 1))
BOTH = ("dp", "tp")
WHERES = {
    "all": Where((0, 1, 2, 3), ("x",), ("x",), ((0, 1, 2, 3),)),
    "dp": Where(SQUARE, BOTH, ("dp",), ((0, 2), (1, 3))),
    "tp": Where(SQUARE, BOTH, ("tp",), ((0, 1), (2, 3))),
    "dp-tp": Where(SQUARE, BOTH, ("dp", "tp"), ((0, 1, 2, 3),)),
    "tp-dp": Where(SQUARE, BOTH, ("tp", "dp"), ((0, 2, 1, 3),)),
    "permuted-dp": Where(PERMUTED, BOTH, ("dp",), ((2, 3), (0, 1))),
    "permuted-tp": Where(PERMUTED, BOTH, ("tp",), ((2, 0), (3, 1))),
    "permuted-tp-dp": Where(PERMUTED, BOTH, ("tp", "dp"), ((2, 3, 0, 1),)),
    "subset": Where((3, 0, 1), ("x",), ("x",), ((3, 0, 1),)),
}


# ---- inputs


def value(
    index: int,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    form: str = "contiguous",
    salt: Any = 0,
) -> torch.Tensor:
    """Return the input of the rank at `index`."""
    name = repr((index, tuple(shape), str(dtype), salt))
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if dtype is torch.bool:
        x = torch.randint(0, 2, shape, generator=generator).bool()
    elif dtype.is_floating_point or dtype.is_complex:
        x = torch.randn(shape, generator=generator, dtype=torch.complex128)
        x = x.to(dtype) if dtype.is_complex else x.real.to(dtype).contiguous()
    elif dtype in UNSIGNED:
        low, high = -(2**63), 2**63 - 1  # every bit counts
        x = torch.randint(low, high, shape, generator=generator).to(dtype)
    else:
        x = torch.randint(0 if dtype is torch.uint8 else -100, 100, shape, generator=generator)
        x = x.to(dtype)
    return laid_out(x, form)


def forms(dtype: torch.dtype) -> tuple[str, ...]:
    common = ("transposed", "strided", "offset", "expanded")
    if dtype.is_complex:
        return (*common, "conj")
    return (*common, "neg") if dtype in (torch.float32, torch.float64) else common


def laid_out(x: torch.Tensor, form: str) -> torch.Tensor:
    """Return the same values in another memory format ("expanded" repeats the first row)."""
    if form == "contiguous":
        return x
    if form == "transposed":
        order = tuple(range(x.ndim))[::-1]
        return x.permute(order).contiguous().permute(order)
    if form == "strided":
        buffer = x.new_zeros([2 * size for size in x.shape])
        y = buffer[tuple(slice(None, None, 2) for _ in x.shape)]
        return y.copy_(x)
    if form == "offset":
        return torch.cat([x.new_zeros(3), x.reshape(-1)])[3:].view(x.shape)
    if form == "expanded":
        return x[:1].expand_as(x)
    if form == "conj":
        y = x.conj().resolve_conj().conj()
        assert y.is_conj() and same(y, x)
        return y
    if form == "neg":
        y = torch.complex(torch.zeros_like(x), -x).conj().imag
        assert y.is_neg() and torch.equal(y, x)
        return y
    raise AssertionError(form)


def same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Compare bit by bit, also dtypes that `torch.equal` does not support."""
    if x.dtype in (*MOVED_ONLY, torch.complex32):
        return x.shape == y.shape and torch.equal(bits(x), bits(y))
    return torch.equal(x, y)


def bits(x: torch.Tensor) -> torch.Tensor:
    return plain(x).clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def plain(x: torch.Tensor) -> torch.Tensor:
    return x.resolve_conj().resolve_neg().contiguous().clone()


def values(
    comm: sw.Communicator,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    form: str = "contiguous",
    salt: Any = 0,
) -> list[torch.Tensor]:
    """Return the inputs of all ranks, contiguous."""
    return [plain(value(index, shape, dtype, form, salt)) for index in range(comm.size)]


def size_patterns(count: int) -> Iterator[list[int]]:
    """Return lengths of the pieces of `count` ranks: even, uneven, none, all on the last."""
    yield [2] * count
    yield [(3 * index + 1) % 4 for index in range(count)]
    yield [0] * count
    yield [0] * (count - 1) + [5]


def allowed(op: str, dtype: torch.dtype) -> bool:
    if op == "avg":
        return dtype.is_floating_point or dtype.is_complex
    return not (op in ("max", "min") and (dtype.is_complex or dtype is torch.uint64))


# ---- what is expected


def reduced(contributions: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """Reduce in rank order, half types in float32 and rounded once."""
    dtype = contributions[0].dtype
    stacked = torch.stack(list(contributions))
    if dtype in UNSIGNED:
        numpy = {"sum": np.add, "product": np.multiply, "max": np.maximum, "min": np.minimum}[op]
        return torch.from_numpy(np.asarray(reduce(numpy, stacked.numpy())))
    if dtype is torch.bool:
        return stacked.any(0) if op in ("sum", "max") else stacked.all(0)
    if op == "max":
        return stacked.amax(0)
    if op == "min":
        return stacked.amin(0)
    wide = widened(stacked)
    total = reduce(torch.mul if op == "product" else torch.add, wide)
    return (total / len(stacked) if op == "avg" else total).to(dtype)


def check_reduced(
    result: torch.Tensor,
    contributions: Sequence[torch.Tensor],
    op: str,
    inputs: Sequence[torch.Tensor],
    exact: bool,
) -> None:
    """Check a reduction: bit by bit if `exact` (sums in rank order), else with a tolerance."""
    expected = reduced(contributions, op)
    dtype = expected.dtype
    inexact = (dtype.is_floating_point or dtype.is_complex) and op in ("sum", "avg", "product")
    # The kernels of a complex product round one way or another, depending on strides.
    fused = dtype.is_complex and op == "product"
    if not inexact or (exact and not fused):
        return check(result, expected, inputs)
    check_fresh(result, expected, inputs)
    if dtype in HALF:
        assert ulps_apart(result, expected) <= 1, f"{op} {dtype}: {result} != {expected}"
        return None
    stacked = widened(torch.stack(list(contributions))).abs()
    scale = stacked.prod(0) if op == "product" else stacked.sum(0)
    bound = 4 * len(contributions) * torch.finfo(dtype).eps * scale
    apart = (widened(result) - widened(expected)).abs()
    assert (apart <= bound).all(), f"{op} {dtype}: {result} != {expected}"
    return None


def widened(x: torch.Tensor) -> torch.Tensor:
    """Convert half types to the dtype in which they are reduced."""
    if x.dtype is torch.complex32:
        return x.to(torch.complex64)
    return x.float() if x.dtype in HALF else x


def ulps_apart(x: torch.Tensor, y: torch.Tensor) -> int:
    """Return the largest number of representable values between two half-type tensors."""

    def place(half: torch.Tensor) -> torch.Tensor:
        bits = half.view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return int((place(x) - place(y)).abs().max()) if x.numel() else 0


def check(
    result: torch.Tensor, expected: torch.Tensor, inputs: Sequence[torch.Tensor] = ()
) -> None:
    """Check that a result has exactly these values and shares no memory with the inputs."""
    check_fresh(result, expected, inputs)
    assert same(result, expected), f"{result} != {expected}"


def check_fresh(
    result: torch.Tensor, expected: torch.Tensor, inputs: Sequence[torch.Tensor]
) -> None:
    assert type(result) is torch.Tensor
    assert result.shape == expected.shape, f"{result.shape} != {expected.shape}"
    assert result.dtype == expected.dtype, f"{result.dtype} != {expected.dtype}"
    assert not result.requires_grad
    assert result.is_contiguous(), f"strides {result.stride()} of {result.shape}"
    assert not result.is_conj() and not result.is_neg()
    if result.numel():
        memory = result.untyped_storage().data_ptr()
        assert all(memory != x.untyped_storage().data_ptr() for x in inputs), "shared with an input"


@contextmanager
def untouched(*inputs: torch.Tensor) -> Iterator[None]:
    before = [plain(x) for x in inputs]
    strides = [x.stride() for x in inputs]
    yield
    for x, y, stride in zip(inputs, before, strides, strict=True):
        assert same(x, y) and x.stride() == stride, "an input was modified"


def both_forms(comm: sw.Communicator, name: str, *args: Any, **kwargs: Any) -> list[Any]:
    """Return the results of the synchronous and of the asynchronous form."""
    pending = getattr(comm, name + "_async")(*args, **kwargs)
    assert isinstance(pending, sw.Pending)
    result = pending.wait()
    assert pending.wait() is result
    return [getattr(comm, name)(*args, **kwargs), result]


# ---- the cases: each takes a communicator, and whether float sums are made in rank order


def all_reduce(comm: sw.Communicator, exact: bool) -> None:
    def one(shape: Sequence[int], dtype: torch.dtype, op: str, form: str) -> None:
        x = value(comm.index, shape, dtype, form)
        with untouched(x):
            for result in both_forms(comm, "all_reduce", x, op):
                check_reduced(result, values(comm, shape, dtype, form), op, [x], exact)

    for dtype, op in product(DTYPES, OPS):
        if allowed(op, dtype):
            one((3, 5), dtype, op, "contiguous")
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int16, *COMPLEX):
        for form in forms(dtype):
            one((3, 5), dtype, "sum", form)
            one((3, 5), dtype, "product", form)
        for shape in ((), (0,), (2, 0, 3)):
            one(shape, dtype, "sum", "contiguous")
            one(shape, dtype, "product", "contiguous")
    x = value(comm.index, (3,))
    check_reduced(comm.all_reduce(x), values(comm, (3,)), "sum", [x], exact)  # the default op


def all_reduce_gives_every_rank_the_same_bits(comm: sw.Communicator, exact: bool) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        result = comm.all_reduce(value(comm.index, (100_000,), dtype), "sum")
        everybodys = comm.gather_objects(result.view(torch.uint8).numpy().tobytes())
        assert len(set(everybodys)) == 1, dtype


def half_types_are_summed_in_float32(comm: sw.Communicator, exact: bool) -> None:
    """256 + 1 is 256 in bfloat16: a sum rounded at every step would stay there."""
    for dtype, large in ((torch.bfloat16, 256.0), (torch.float16, 2048.0)):
        mine = large if comm.index == 0 else 1.0
        expected = torch.tensor(large + comm.size - 1).to(dtype)
        x = torch.full((comm.size,), mine, dtype=dtype)
        check(comm.all_reduce(x), expected.expand(comm.size))
        check(comm.reduce_scatter(x), expected.expand(1))
        average = torch.tensor((large + comm.size - 1) / comm.size).to(dtype)
        check(comm.all_reduce(x, "avg"), average.expand(comm.size))


def nan_is_never_lost(comm: sw.Communicator, exact: bool) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for op, poisoned in product(OPS, range(comm.size)):
            x = torch.full((2 * comm.size,), comm.index - 1.0, dtype=dtype)
            if comm.index == poisoned:
                x[:] = torch.nan
                x[0] = -torch.inf  # the others are ordered around it
            where = f"{op} of {dtype}, from {poisoned}"
            assert comm.all_reduce(x, op)[1:].isnan().all(), where
            mine = comm.reduce_scatter(x, op=op)
            assert mine[1:].isnan().all(), where
            if op in ("max", "min"):
                lowest = [-torch.inf if i == poisoned else i - 1.0 for i in range(comm.size)]
                first = max(lowest) if op == "max" else min(lowest)
                assert comm.all_reduce(x, op)[0] == first, where


def all_gather(comm: sw.Communicator, exact: bool) -> None:
    def one(
        dim: int,
        sizes: Sequence[int],
        dtype: torch.dtype = torch.float32,
        form: str = "contiguous",
        other: Sequence[int] = (2, 3, 4),
        given: Sequence[int] | None = None,
    ) -> None:
        def piece(index: int) -> torch.Tensor:
            shape = list(other)
            shape[dim] = sizes[index]
            return value(index, shape, dtype, form)

        x = piece(comm.index)
        expected = torch.cat([plain(piece(index)) for index in range(comm.size)], dim)
        with untouched(x):
            for result in both_forms(comm, "all_gather", x, dim, given):
                check(result, expected, [x])

    for dim, sizes in product((0, 1, 2, -1, -2, -3), size_patterns(comm.size)):
        one(dim, sizes, given=sizes)
    one(0, [2] * comm.size)  # sizes may be left out if they are equal
    one(1, [3] * comm.size)
    one(0, [1] * comm.size, other=(0,))
    for other in ((1, 2, 0), (2, 1, 0), (1, 1, 0)):  # dims of length 1 before the joined one
        one(2, [3] * comm.size, other=other)
    uneven = [(3 * index + 1) % 4 for index in range(comm.size)]
    for dtype in MOVED:
        one(0, [2] * comm.size, dtype)
        one(1, uneven, dtype, given=uneven)
    for dtype in (torch.float32, torch.bool, *COMPLEX):
        for form in forms(dtype):
            one(0, [2] * comm.size, dtype, form)
            one(2, [2] * comm.size, dtype, form)
            one(-1, uneven, dtype, form, given=tuple(uneven))
            one(1, [0] * comm.size, dtype, form)


def reduce_scatter(comm: sw.Communicator, exact: bool) -> None:
    def one(
        dim: int,
        sizes: Sequence[int],
        dtype: torch.dtype = torch.float32,
        op: str = "sum",
        form: str = "contiguous",
        given: Sequence[int] | None = None,
    ) -> None:
        shape = [2, 3, 4]
        shape[dim] = sum(sizes)
        x = value(comm.index, shape, dtype, form)
        start = sum(sizes[: comm.index])
        mine = [
            part.narrow(dim, start, sizes[comm.index]) for part in values(comm, shape, dtype, form)
        ]
        with untouched(x):
            for result in both_forms(comm, "reduce_scatter", x, dim, given, op):
                # In rank order on every engine: the pieces are summed where they are wanted.
                check_reduced(result, mine, op, [x], exact=True)

    for dim, sizes in product((0, 1, 2, -1, -2, -3), size_patterns(comm.size)):
        one(dim, sizes, given=sizes)
    for sizes, op in product(size_patterns(comm.size), OPS):
        one(1, sizes, op=op, given=sizes)
    one(0, [3] * comm.size)  # sizes may be left out if they are equal
    one(-1, [1] * comm.size)
    uneven = [(3 * index + 1) % 4 for index in range(comm.size)]
    for dtype, op in product(DTYPES, OPS):
        if allowed(op, dtype):
            one(0, [2] * comm.size, dtype, op)
            one(1, uneven, dtype, op, given=uneven)
    for dtype in (torch.float32, torch.bfloat16, torch.bool, *COMPLEX):
        for form in forms(dtype):
            one(0, [2] * comm.size, dtype, "sum", form)
            one(2, uneven, dtype, "product", form, given=tuple(uneven))
            one(1, [0] * comm.size, dtype, "sum", form)


def all_to_all(comm: sw.Communicator, exact: bool) -> None:
    def one(
        shape_of: Callable[[int, int], Sequence[int]],
        dtype: torch.dtype = torch.float32,
        form: str = "contiguous",
        shapes_given: bool = True,
    ) -> None:
        def piece(source: int, target: int) -> torch.Tensor:
            return value(source, shape_of(source, target), dtype, form, salt=target)

        pieces = [piece(comm.index, target) for target in range(comm.size)]
        expected = [plain(piece(source, comm.index)) for source in range(comm.size)]
        given = {"shapes": [tuple(each.shape) for each in expected]} if shapes_given else {}
        with untouched(*pieces):
            for results in both_forms(comm, "all_to_all", pieces, **given):
                assert isinstance(results, list) and len(results) == comm.size
                for result, each in zip(results, expected, strict=True):
                    check(result, each, pieces)

    for dtype in MOVED:
        one(lambda source, target: (2, 3), dtype)
        one(lambda source, target: ((source + 2 * target) % 3, target + 1), dtype)
    one(lambda source, target: (2, 3), shapes_given=False)
    one(lambda source, target: ())
    one(lambda source, target: (2,) * ((source + target) % 4))  # other numbers of dims
    one(lambda source, target: (0, 3))
    one(lambda source, target: (4,) if source == 0 else (0,))
    for dtype in (torch.float32, *COMPLEX):
        for form in forms(dtype):
            one(lambda source, target: (2, source + target, 3), dtype, form)
            one(lambda source, target: (0, 2), dtype, form)


def all_to_all_of_pieces_of_one_tensor(comm: sw.Communicator, exact: bool) -> None:
    """Pieces that lie one after the other need no packing; those that do not, must be packed."""
    sizes = [(index % 3) + 1 for index in range(comm.size)]

    def whole(index: int) -> torch.Tensor:
        return value(index, (sum(sizes), 4))

    for dim_first in (True, False):
        for backwards in (True, False):

            def pieces_of(
                index: int, dim_first: bool = dim_first, backwards: bool = backwards
            ) -> list[torch.Tensor]:
                x = whole(index) if dim_first else whole(index).t()
                pieces = list(x.split(sizes, dim=0 if dim_first else 1))
                return pieces[::-1] if backwards else pieces

            mine = pieces_of(comm.index)
            expected = [pieces_of(index)[comm.index] for index in range(comm.size)]
            with untouched(*mine):
                results = comm.all_to_all(mine, [tuple(each.shape) for each in expected])
            for result, each in zip(results, expected, strict=True):
                check(result, plain(each), mine)


def broadcast(comm: sw.Communicator, exact: bool) -> None:
    def one(
        source: int,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        form: str = "contiguous",
    ) -> None:
        x = value(comm.index, shape, dtype, form)
        with untouched(x):
            for result in both_forms(comm, "broadcast", x, source):
                check(result, plain(value(source, shape, dtype, form)), [x])

    for source in range(comm.size):
        for shape in ((), (7,), (2, 3), (0, 3)):
            one(source, shape)
        for dtype in MOVED:
            one(source, (2, 3), dtype)
        for dtype in (torch.float32, *COMPLEX):
            for form in forms(dtype):
                one(source, (2, 3), dtype, form)
                one(source, (0, 3), dtype, form)
    check(comm.broadcast(value(comm.index, (2,))), value(0, (2,)))  # from index 0 by default


def scatter(comm: sw.Communicator, exact: bool) -> None:
    def one(
        source: int,
        shape_of: Callable[[int], Sequence[int]],
        dtype: torch.dtype = torch.float32,
        form: str = "contiguous",
        everywhere: bool = False,
    ) -> None:
        def pieces_of(index: int) -> list[torch.Tensor]:
            return [
                value(index, shape_of(target), dtype, form, salt=target)
                for target in range(comm.size)
            ]

        like = torch.empty(tuple(shape_of(comm.index)), dtype=dtype)
        # Elsewhere the pieces are not looked at.
        pieces = pieces_of(comm.index) if comm.index == source or everywhere else None
        inputs = pieces or []
        with untouched(*inputs):
            for result in both_forms(comm, "scatter", like, pieces, source):
                check(result, plain(pieces_of(source)[comm.index]), [*inputs, like])

    for source in range(comm.size):
        one(source, lambda target: (2, 3))
        one(source, lambda target: (2, 3), everywhere=True)
        one(source, lambda target: (target, 2))
        one(source, lambda target: (2,) * target)
        one(source, lambda target: (0,))
        for form in forms(torch.complex64):
            one(source, lambda target: (target + 1, 2), torch.complex64, form)
    for dtype in MOVED:
        one(comm.size - 1, lambda target: (target, 2), dtype)


def gather(comm: sw.Communicator, exact: bool) -> None:
    def one(
        destination: int,
        shape_of: Callable[[int], Sequence[int]],
        dtype: torch.dtype = torch.float32,
        form: str = "contiguous",
        shapes_given: bool = True,
    ) -> None:
        x = value(comm.index, shape_of(comm.index), dtype, form)
        everybodys = [value(index, shape_of(index), dtype, form) for index in range(comm.size)]
        given = {"shapes": [tuple(each.shape) for each in everybodys]} if shapes_given else {}
        with untouched(x):
            for results in both_forms(comm, "gather", x, destination=destination, **given):
                if comm.index != destination:
                    assert results is None
                    continue
                assert isinstance(results, list) and len(results) == comm.size
                for result, each in zip(results, everybodys, strict=True):
                    check(result, plain(each), [x])

    for destination in range(comm.size):
        one(destination, lambda index: (2, 3))
        one(destination, lambda index: (2, 3), shapes_given=False)
        one(destination, lambda index: (index, 2))
        one(destination, lambda index: (2,) * index)
        one(destination, lambda index: (0,))
        for form in forms(torch.complex64):
            one(destination, lambda index: (index + 1, 2), torch.complex64, form)
    for dtype in MOVED:
        one(comm.size - 1, lambda index: (index, 2), dtype)


def send_recv(comm: sw.Communicator, exact: bool) -> None:
    if comm.size == 1:
        return
    after, before = (comm.index + 1) % comm.size, (comm.index - 1) % comm.size

    def around(shape: Sequence[int], dtype: torch.dtype, form: str = "contiguous") -> None:
        """Pass a tensor around the ring, asynchronously and then in turn."""
        x = value(comm.index, shape, dtype, form)
        like = torch.zeros(tuple(shape), dtype=dtype)
        with untouched(x, like):
            sent = comm.send_async(x, after)
            result = comm.recv_async(like, before).wait()
            assert sent.wait() is None
        check(result, plain(value(before, shape, dtype, form)), [x, like])
        passed_on = x if comm.index == 0 else comm.recv(like, before)
        assert comm.send(passed_on, after) is None
        if comm.index == 0:
            passed_on = comm.recv(like, before)
        check(passed_on, plain(value(0, shape, dtype, form)), [like, *([x] if comm.index else [])])

    for dtype in MOVED:
        around((2, 3), dtype)
    for shape in ((), (0,), (2, 0, 3)):
        around(shape, torch.float32)
    for dtype in (torch.float32, *COMPLEX):
        for form in forms(dtype):
            around((2, 3), dtype, form)


def exchange(comm: sw.Communicator, exact: bool) -> None:
    """Send to the ranks at even distances in the ring, and to the next one.

    Some pairs exchange and some do not; pieces are uneven and empty.
    """

    def peers(index: int) -> list[int]:
        steps = [step for step in range(1, comm.size) if step == 1 or step % 2 == 0]
        return [(index + step) % comm.size for step in steps]

    def shape(source: int, target: int) -> tuple[int, int]:
        return (source + 2 * target) % 4, 3

    sources = [peer for peer in range(comm.size) if comm.index in peers(peer)]
    for dtype in MOVED:
        for form in forms(dtype):
            sends = {
                peer: value(comm.index, shape(comm.index, peer), dtype, form)
                for peer in peers(comm.index)
            }
            for start in (comm.exchange, lambda *both: comm.exchange_async(*both).wait()):
                wide = {peer: torch.zeros((4, 6), dtype=dtype) for peer in sources}
                receives = {peer: wide[peer][: shape(peer, comm.index)[0], ::2] for peer in sources}
                with untouched(*sends.values()):
                    assert start(sends, receives) is None
                for peer, x in receives.items():
                    sent = plain(value(peer, shape(peer, comm.index), dtype, form))
                    assert same(x, sent)
                    assert not bits(wide[peer][:, 1::2]).any(), "wrote beside its place"


def large_pieces_take_another_way(comm: sw.Communicator, exact: bool) -> None:
    """Above a size, moves are messages between pairs of ranks; the results are the same."""
    rows = [70_000 + 10_000 * index for index in range(comm.size)]
    mine = torch.arange(rows[comm.index] * 4, dtype=torch.float32).reshape(-1, 4) + comm.index
    whole = torch.cat(
        [torch.arange(n * 4, dtype=torch.float32).reshape(-1, 4) + i for i, n in enumerate(rows)]
    )
    assert torch.equal(comm.all_gather(mine, sizes=rows), whole)
    assert torch.equal(comm.all_gather(mine.T, 1, sizes=rows), whole.T)
    begin = sum(rows[: comm.index])
    reduced = comm.reduce_scatter(whole + comm.index, sizes=rows)
    total = whole[begin : begin + rows[comm.index]] * comm.size + sum(range(comm.size))
    torch.testing.assert_close(reduced, total)
    even = torch.full((1 << 18,), float(comm.index))
    expected = torch.arange(comm.size, dtype=torch.float32).repeat_interleave(1 << 18)
    assert torch.equal(comm.all_gather(even), expected)


def several_sends_arrive_in_order(comm: sw.Communicator, exact: bool) -> None:
    if comm.size == 1:
        return
    after, before = (comm.index + 1) % comm.size, (comm.index - 1) % comm.size
    plan = [((3,), torch.float32), ((0,), torch.int64), ((2, 2), torch.complex64)]
    plan += [((5,), torch.float32)] * 8  # alike: only the order tells them apart
    inputs = [value(comm.index, *each, salt=turn) for turn, each in enumerate(plan)]
    sends = [comm.send_async(x, after) for x in inputs]
    recvs = [comm.recv_async(torch.empty(shape, dtype=dtype), before) for shape, dtype in plan]
    for turn in reversed(range(len(plan))):
        check(recvs[turn].wait(), value(before, *plan[turn], salt=turn), inputs)
        sends[turn].wait()


def barrier(comm: sw.Communicator, exact: bool) -> None:
    """No rank leaves the barrier before every rank has reached it."""
    for name in ("barrier", "barrier_async"):
        time.sleep(0.01 * comm.index)
        came = time.monotonic()
        result = getattr(comm, name)()
        assert (result.wait() if name == "barrier_async" else result) is None
        left = time.monotonic()
        times = comm.gather_objects((came, left))
        assert max(came for came, _ in times) <= min(left for _, left in times)


def gather_objects(comm: sw.Communicator, exact: bool) -> None:
    def thing(index: int) -> Any:
        return [
            None,
            "x" * 100_000,
            {"index": index, "nested": [(1, 2.5), {3}]},
            torch.arange(5 * index),
        ][index % 4]

    for results in both_forms(comm, "gather_objects", thing(comm.index)):
        assert isinstance(results, list) and len(results) == comm.size
        for index, result in enumerate(results):
            if isinstance(result, torch.Tensor):
                check(result, thing(index))
            else:
                assert result == thing(index)
    shared = [comm.index]
    everybodys = comm.gather_objects(shared)
    for each in everybodys:
        each.append("changed")
    comm.barrier()
    assert shared == [comm.index]
    assert everybodys == [[index, "changed"] for index in range(comm.size)]


def many_under_way_at_once(comm: sw.Communicator, exact: bool) -> None:
    """Wait in an order that differs from the order of the starts, and between ranks."""
    n = comm.size
    x, y = value(comm.index, (n, 3)), value(comm.index, (n, 2), torch.int64)
    sizes = [index % 3 for index in range(n)]
    uneven = value(comm.index, (2, sizes[comm.index]))
    pieces = [value(comm.index, (2,), salt=target) for target in range(n)]
    last = n - 1

    def reduction(name: str) -> torch.Tensor:
        return reduced(values(comm, (n, 3)), name)

    every_index = range(n)
    started: list[tuple[sw.Pending[Any], Any]] = []
    for _ in range(3):
        started += [
            (comm.all_reduce_async(x, "max"), reduction("max")),
            (comm.all_gather_async(y, 1), torch.cat(values(comm, (n, 2), torch.int64), 1)),
            (comm.reduce_scatter_async(x), reduction("sum")[comm.index : comm.index + 1]),
            (
                comm.all_gather_async(uneven, 1, sizes),
                torch.cat([value(index, (2, sizes[index])) for index in every_index], 1),
            ),
            (
                comm.all_to_all_async(pieces),
                [value(source, (2,), salt=comm.index) for source in every_index],
            ),
            (comm.barrier_async(), None),
            (comm.broadcast_async(y, last), value(last, (n, 2), torch.int64)),
            (comm.gather_objects_async({"i": comm.index}), [{"i": index} for index in every_index]),
            (
                comm.scatter_async(pieces[0], pieces, last),
                value(last, (2,), salt=comm.index),
            ),
            (
                comm.gather_async(y, destination=last),
                values(comm, (n, 2), torch.int64) if comm.index == last else None,
            ),
            (comm.all_reduce_async(y), reduced(values(comm, (n, 2), torch.int64), "sum")),
        ]
    generator = torch.Generator().manual_seed(comm.index)
    with untouched(x, y, uneven, *pieces):
        for turn in torch.randperm(len(started), generator=generator).tolist():
            pending, expected = started[turn]
            result = pending.wait()
            if isinstance(expected, torch.Tensor):
                check(result, expected, [x, y])
            elif isinstance(expected, list) and isinstance(expected[0], torch.Tensor):
                for one, other in zip(result, expected, strict=True):
                    check(one, other, [x, y, *pieces])
            else:
                assert result == expected


def results_belong_to_the_rank_alone(comm: sw.Communicator, exact: bool) -> None:
    """Each rank overwrites every result with its own number; no other rank may see it."""
    x = value(comm.index, (comm.size, 2))
    pieces = [value(comm.index, (2,)) for _ in range(comm.size)]
    results = [
        comm.all_reduce(x),
        comm.all_gather(x),
        comm.all_gather(x, 1),
        comm.reduce_scatter(x),
        comm.broadcast(x),
        comm.scatter(pieces[0], pieces),
        *(comm.gather(x) or []),
    ]
    for result in results:
        assert result.untyped_storage().nbytes() == result.numel() * result.itemsize
    results += comm.all_to_all(pieces)  # which may share a buffer
    with untouched(x, *pieces):
        for result in results:
            result.fill_(100 + comm.index)
        comm.barrier()
    for result in results:
        assert (result == 100 + comm.index).all()


def inputs_may_require_grad(comm: sw.Communicator, exact: bool) -> None:
    x = value(comm.index, (comm.size, 2)).requires_grad_()
    y = x * 1
    for each in (x, y):
        pieces = list(each.unbind())
        results = [
            comm.all_reduce(each),
            comm.all_gather(each),
            comm.reduce_scatter(each),
            comm.broadcast(each),
            comm.scatter(pieces[0], pieces),
            *comm.all_to_all(pieces),
            *(comm.gather(each) or []),
        ]
        assert not any(result.requires_grad for result in results)


def reductions_without_meaning_are_refused(comm: sw.Communicator, exact: bool) -> None:
    for dtype, op in product(MOVED, OPS):
        if dtype in MOVED_ONLY or not allowed(op, dtype):
            x = value(comm.index, (comm.size,), dtype)
            for name in ("all_reduce", "all_reduce_async", "reduce_scatter"):
                with pytest.raises(sw.CollectiveError, match=f"^op: '{op}'.*{dtype}") as caught:
                    getattr(comm, name)(x, op=op)
                assert re.search(r"use 'sum'|convert", str(caught.value))  # what to do


def reductions_by_torchs_objects(comm: sw.Communicator, exact: bool) -> None:
    x = value(comm.index, (comm.size,), torch.float32)
    for name in OPS:
        op = getattr(dist.ReduceOp, name.upper())
        check(comm.all_reduce(x, op), comm.all_reduce(x, name))
        check(comm.reduce_scatter(x, op=dist.ReduceOp(op)), comm.reduce_scatter(x, op=name))
        check(comm.all_reduce(x.clone(), op, in_place=True), comm.all_reduce(x, name))
        outs = [torch.empty(1), torch.empty(1)]
        for out, each in zip(outs, (op, name), strict=True):
            comm.reduce_scatter_in_place([list(x.split(1))], [out], each)
        assert torch.equal(*outs)
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.PREMUL_SUM, "SUM", 0):
        with pytest.raises(sw.CollectiveError, match=r"^op: expected one of sum, avg, max, min"):
            comm.all_reduce(x, op)
        with pytest.raises(sw.CollectiveError, match=r"^op: expected one of sum, avg, max, min"):
            comm.reduce_scatter(x, op=op)


class Unreadable:
    """An object whose pickle cannot be loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


def an_error_of_a_result_comes_from_wait_on_every_rank(comm: sw.Communicator, exact: bool) -> None:
    pending = comm.gather_objects_async(Unreadable() if comm.index == 0 else 1)
    with pytest.raises(ValueError, match="no number"):
        pending.wait()
    assert comm.gather_objects(comm.index) == list(range(comm.size))


def gather_objects_waits_for_lengths_only(comm: sw.Communicator, exact: bool) -> None:
    """`gather_objects_async` returns once all ranks have called it, before any has waited."""
    came = time.monotonic()
    pending = comm.gather_objects_async(came)
    started = time.monotonic()
    assert max(comm.gather_objects(came)) <= started
    assert len(pending.wait()) == comm.size


CASES: dict[str, Callable[[sw.Communicator, bool], None]] = {
    case.__name__: case
    for case in (
        all_reduce,
        all_reduce_gives_every_rank_the_same_bits,
        half_types_are_summed_in_float32,
        nan_is_never_lost,
        all_gather,
        reduce_scatter,
        all_to_all,
        all_to_all_of_pieces_of_one_tensor,
        broadcast,
        scatter,
        gather,
        exchange,
        large_pieces_take_another_way,
        send_recv,
        several_sends_arrive_in_order,
        barrier,
        gather_objects,
        many_under_way_at_once,
        results_belong_to_the_rank_alone,
        inputs_may_require_grad,
        reductions_by_torchs_objects,
        reductions_without_meaning_are_refused,
        an_error_of_a_result_comes_from_wait_on_every_rank,
        gather_objects_waits_for_lengths_only,
    )
}


def run_case(
    case: Callable[[sw.Communicator, bool], None], where: Where, exact: bool
) -> tuple[int, ...] | None:
    """Run a case on the calling rank; return the ranks it talked to, None if not in the mesh."""
    comm = where.communicator()
    if comm is None:
        return None
    case(comm, exact)
    return comm.ranks
