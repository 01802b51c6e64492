"""Operators that reorder, repeat or pad rows (flip, roll, repeat, pad), and triangles of matrices.

Dims that do not change are free. A dim that changes stays split too: its rows move between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from shardwise.dtensor.tensor import DTensor
from shardwise.dtensor.writes import check_writable
from shardwise.rules.helpers.dims import as_sizes, unsplit_spec
from shardwise.rules.helpers.local_tensors import crop, pad_empty_dims
from shardwise.rules.helpers.row_exchange import Rows, plan_row_exchange
from shardwise.rules.make.creation import contribution_of
from shardwise.rules.pointwise.elementwise import broadcast_spec
from shardwise.rules.registry import composed, rule
from shardwise.rules.spec import Out, Spec, SplitContext, dims_of, normalize_dim
from shardwise.torch_internals import as_local


def rearrange_spec(
    name: str,
    input: torch.Tensor,
    out: Out,
    rows: Mapping[int, Callable[[], Rows]],
    local: Callable[[torch.Tensor, Collection[int]], torch.Tensor],
    *,
    fill: float = 0,
) -> Spec:
    """Return the spec of an operator that rearranges the rows of some dims, each on its own.

    Arguments:
        out: the result, with the factors of the input's dims.
        rows: for each dim that changes, the rows of the result by number; -1 for the fill value.
        local: runs the operator on a local tensor; it skips the dims that it is given, whose rows
            are exchanged already.
    """
    dims = dims_of(input)

    def lower(context: SplitContext) -> Callable[..., Any] | None:
        split = {dim: context.axes(dims[dim]) for dim in rows}
        split = {dim: axes for dim, axes in split.items() if axes}
        if not split and 0 not in context.inputs[0].local_shape():
            return None
        moves = []
        for dim, axes in split.items():
            at = out.dims.index(dims[dim])
            sizes = [input.shape[dim]], [out.shape[at]]
            moves.append(plan_row_exchange(name, context.mesh, axes, at, *sizes, rows[dim](), fill))

        def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            result = local(x, split)
            for move in moves:
                result = move(result)
            return result

        return run

    linear = [(0,)] if fill == 0 else ()
    positions = [f"d{dim}" for dim in rows]
    return Spec([(input, dims)], [out], linear=linear, lower=lower, positions=positions)


# ---- order


def flip_spec(
    name: str, input: torch.Tensor, flips: Collection[int], swaps: tuple[int, int] | None = None
) -> Spec:
    """Return the spec of a tensor with some dims reversed, then optionally two dims swapped."""
    order = list(range(input.dim()))
    if swaps is not None:
        order[swaps[0]], order[swaps[1]] = swaps[1], swaps[0]
    out = Out(tuple(f"d{dim}" for dim in order), tuple(input.shape[dim] for dim in order))

    def local(x: torch.Tensor, done: Collection[int]) -> torch.Tensor:
        return x.flip([dim for dim in flips if dim not in done]).permute(order)

    flips = flips if input.dim() else ()  # torch accepts dim 0 of a 0-d tensor
    rows = {dim: lambda size=input.shape[dim]: np.arange(size)[::-1] for dim in flips}
    return rearrange_spec(name, input, out, rows, local)


@rule("flip", inplace=False)
def flip(input: torch.Tensor, *given: Any, dims: Any = ()) -> Spec:
    return flip_spec(
        "flip", input, [normalize_dim(dim, input.dim()) for dim in as_sizes(given or (dims,))]
    )


@rule("fliplr", inplace=False)
def fliplr(input: torch.Tensor) -> Spec:
    if input.dim() < 2:
        raise RuntimeError("Input must be >= 2-d.")
    return flip_spec("fliplr", input, [1])


@rule("flipud", inplace=False)
def flipud(input: torch.Tensor) -> Spec:
    if input.dim() < 1:
        raise RuntimeError("Input must be >= 1-d.")
    return flip_spec("flipud", input, [0])


@rule("rot90", inplace=False)
def rot90(input: torch.Tensor, k: int = 1, dims: Any = (0, 1)) -> Spec:
    first, second = (normalize_dim(dim, input.dim()) for dim in dims)
    if first == second:
        raise RuntimeError("expected rotation dims to be different")
    flips = ([], [second], [first, second], [first])[k % 4]
    return flip_spec("rot90", input, flips, (first, second) if k % 2 else None)


@rule("roll", inplace=False)
def roll(input: torch.Tensor, shifts: Any, dims: Any = ()) -> Spec:
    shifts = (shifts,) if isinstance(shifts, int) else tuple(shifts)
    dims = (dims,) if isinstance(dims, int) else tuple(dims)
    if not dims and input.dim() != 1:  # the flattened tensor is rolled
        return unsplit_spec([input], input.shape, linear=[(0,)])
    by: dict[int, int] = {}
    for shift, dim in zip(shifts, dims or (0,), strict=True):
        at = normalize_dim(dim, input.dim())
        by[at] = by.get(at, 0) + shift

    def local(x: torch.Tensor, done: Collection[int]) -> torch.Tensor:
        rest = [dim for dim in by if dim not in done]
        return x.roll([by[dim] for dim in rest], rest) if rest else x

    rows = {
        dim: lambda size=input.shape[dim], shift=shift: np.roll(np.arange(size), shift)
        for dim, shift in by.items()
    }
    return rearrange_spec("roll", input, Out(dims_of(input), tuple(input.shape)), rows, local)


# ---- repetition


@rule("repeat", inplace=False)
def repeat(input: torch.Tensor, *given: Any, repeats: Any = ()) -> Spec:
    return repeat_spec("repeat", input, as_sizes(given or (repeats,)))


@rule("tile", inplace=False)
def tile(input: torch.Tensor, *given: Any, dims: Any = ()) -> Spec:
    counts = as_sizes(given or (dims,))
    return repeat_spec("tile", input, (1,) * (input.dim() - len(counts)) + counts)


def repeat_spec(name: str, input: torch.Tensor, counts: tuple[int, ...]) -> Spec:
    """Return the spec of a tensor that is repeated along its dims and along new leading dims."""
    added = len(counts) - input.dim()
    if added < 0 or min(counts, default=1) < 0:
        raise RuntimeError(f"{name}: expected at least {input.dim()} counts >= 0, got {counts}")
    shape = tuple(
        size * count for size, count in zip((1,) * added + tuple(input.shape), counts, strict=True)
    )

    def local(x: torch.Tensor, done: Collection[int]) -> torch.Tensor:
        return x.repeat([1 if at - added in done else count for at, count in enumerate(counts)])

    rows = {
        dim: lambda size=size, count=counts[dim + added]: np.tile(np.arange(size), count)
        for dim, size in enumerate(input.shape)
        if counts[dim + added] != 1
    }
    return rearrange_spec(name, input, Out((None,) * added + dims_of(input), shape), rows, local)


# ---- padding


@rule("pad", inplace=False)
def pad(input: torch.Tensor, pad: Any, mode: str = "constant", value: Any = None) -> Spec | None:
    return None if isinstance(pad, torch.Tensor) else padded(input, pad, mode, value)


@rule("constant_pad_nd", inplace=False)
def constant_pad_nd(input: torch.Tensor, pad: Any, value: Any = 0) -> Spec:
    return padded(input, pad, "constant", value)


def padded(input: torch.Tensor, pad: Any, mode: str, value: Any) -> Spec:
    """Return the spec of a padded tensor; `pad` lists (before, after) from the last dim on."""
    ndim = input.dim()
    around = {ndim - 1 - at // 2: (pad[at], pad[at + 1]) for at in range(0, len(pad) - 1, 2)}
    around = {dim: both for dim, both in around.items() if both != (0, 0)}
    if min(around, default=0) < 0 or len(pad) % 2:
        raise RuntimeError(f"pad: expected pairs for at most {ndim} dims, got {pad}")
    shape = [size + sum(around.get(dim, ())) for dim, size in enumerate(input.shape)]
    most = {"reflect": -1, "circular": 0}
    if min(shape, default=0) < 0 or any(
        mode in most and max(both) > input.shape[dim] + most[mode] for dim, both in around.items()
    ):
        raise RuntimeError(f"pad: {pad} is too much for {tuple(input.shape)} in mode {mode}")

    # Some modes refuse empty tensors; if there are no elements at all, the modes agree.
    is_constant = mode == "constant" or not input.numel()

    def local(x: torch.Tensor, done: Collection[int]) -> torch.Tensor:
        left = [0 if ndim - 1 - at // 2 in done else each for at, each in enumerate(pad)]
        if not any(left):
            return x
        if is_constant:
            return torch.constant_pad_nd(x, left, value or 0)
        sizes = [size + sum(around.get(dim, ())) * (dim not in done)
                 for dim, size in enumerate(x.shape)]  # fmt: skip
        return crop(F.pad(pad_empty_dims(x), left, mode), sizes)

    rows = {
        dim: partial(_padded_rows, input.shape[dim], *both, mode) for dim, both in around.items()
    }
    out = Out(dims_of(input), tuple(shape))
    return rearrange_spec("pad", input, out, rows, local, fill=value or 0)


def _padded_rows(size: int, before: int, after: int, mode: str) -> Rows:
    """Return for each row of the padded dim the row of the input; -1 for the fill value."""
    rows = np.arange(-before, size + after)
    if mode == "constant":
        return np.where((rows >= 0) & (rows < size), rows, -1)
    if mode == "replicate":
        return rows.clip(0, size - 1)
    if mode == "circular":  # negative padding crops first
        first, last = max(0, -before), size - max(0, -after)
        return first + (rows - first) % (last - first)
    return (size - 1) - abs((size - 1) - abs(rows))  # reflect


# ---- triangles and diagonals of matrices, by global indices


def _triangle(function: Any) -> Any:
    """Return the rule of a function that keeps one side of a diagonal.

    The local diagonal is the global one, shifted by the first row and column of the shard.
    """

    def spec(input: Any, diagonal: int = 0) -> Spec:
        def lower(context: SplitContext) -> Any:
            if not any(context.inputs[0].shard_order[-2:]):
                return None
            (rows, _), (columns, _) = (context.inputs[0].range(dim) for dim in (-2, -1))

            def local(input: torch.Tensor, diagonal: int = 0) -> Any:
                return function(input, diagonal + rows - columns)

            return local

        split = [f"d{input.dim() - 2}", f"d{input.dim() - 1}"]
        return broadcast_spec([input], [(0,)], lower=lower, positions=split)

    return spec


rule("tril")(_triangle(torch.tril))
rule("triu")(_triangle(torch.triu))


@composed("fill_diagonal_")
def fill_diagonal_(input: DTensor, fill_value: Any, wrap: bool = False) -> DTensor:
    """Fill the diagonal; the target keeps its layout, and each rank writes its own elements."""
    check_writable("fill_diagonal_", input)
    layout = input._layout
    if layout.ndim < 2 or (layout.ndim > 2 and len(set(layout.shape)) > 1):
        torch.empty(layout.shape, device="meta").fill_diagonal_(0)  # raises torch's own error
    indices = _diagonal(layout.shape, wrap)
    with as_local():
        value = contribution_of(layout, fill_value)
        number = torch.full((), value, dtype=input.dtype, device=input.device)
        for box, here in layout.boxes():
            inside = torch.ones(indices.shape[1], dtype=torch.bool)
            for index, start, stop in zip(indices, box.start, box.stop, strict=True):
                inside &= (index >= start) & (index < stop)
            shift = torch.tensor(here.start).unsqueeze(1) - torch.tensor(box.start).unsqueeze(1)
            places = indices[:, inside] + shift
            # While a program is recorded, indices stay on the CPU: meta tensors have no values.
            local = tuple(places if input.is_meta else places.to(input.device))
            torch.Tensor.index_put_(input, local, number)
    return input


def _diagonal(shape: tuple[int, ...], wraps: bool) -> torch.Tensor:
    """Return the global indices of the diagonal's elements, one row per dim."""
    if wraps and len(shape) == 2 and shape[0] > shape[1] > 0:
        flat = torch.arange(0, shape[0] * shape[1], shape[1] + 1)
        return torch.stack([flat // shape[1], flat % shape[1]])
    return torch.arange(min(shape)).expand(len(shape), -1)
