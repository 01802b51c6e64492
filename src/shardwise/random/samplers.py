"""Random samplers whose values do not depend on the layout.

A random operator draws one 64-bit key from torch's default generator, which every rank has in the
same state. The key selects a stream of 64-bit words (numpy's Philox, which can start anywhere), and
word i makes the element at row-major position i of the *global* tensor. So a rank makes its shard
without communication, and the global tensor is the same on every layout and mesh. Seeds, saved
states, `fork_rng` and the recomputation of activation checkpointing work as in torch, because only
the generator holds state.

A word must give the same bits at any position of a buffer. torch's vectorised functions do not
guarantee that, so the conversions use numpy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from shardwise.core import world
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh
from shardwise.random.philox import NONE, Runs, Words, blocks, boxes_of
from shardwise.random.seed_check import compare_draw

if TYPE_CHECKING:
    from numpy.typing import NDArray

Convert: TypeAlias = "Callable[[Words], NDArray[Any]]"
"""Converts each word to a number."""
Device: TypeAlias = "torch.device | str | None"


# ---- the key


def draw_key(mesh: DeviceMesh | None = None, generator: torch.Generator | None = None) -> int:
    """Draw the key of one random operator: 64 bits of torch's default generator, or another.

    Arguments:
        mesh: the mesh of the operator, whose ranks compare what they draw now and then.
        generator: draw from this one instead. It must be in the same state on every rank.
    """
    device = "cpu" if generator is None else generator.device
    drawn = torch.empty((), dtype=torch.int64, device=device)
    key = int(drawn.random_(-(2**63), None, generator=generator)) % 2**64
    return key if mesh is None else compare_draw(mesh, key)


# ---- words to numbers


def _filled(
    key: int, layout: Layout, convert: Convert, dtype: torch.dtype, device: Device
) -> torch.Tensor:
    """Make this rank's shard of its words."""
    # simulated ranks share the cache of `boxes_of`, so the key must name the rank
    place = layout.mesh.get_coordinate()
    boxes = boxes_of(layout, place)
    parts = [_filled_box(key, runs, convert, dtype) for runs, _ in boxes]
    if len(parts) == 1:
        return parts[0].to(device)
    result = torch.empty(layout.local_shape(place), dtype=dtype, device="cpu")
    for part, (_, here) in zip(parts, boxes, strict=True):
        result[here.slices] = part
    return result.to(device)


def _filled_box(key: int, runs: Runs, convert: Convert, dtype: torch.dtype) -> torch.Tensor:
    size = math.prod(runs.shape)
    made = blocks(key, runs)
    first = next(made, NONE)
    if len(first) == size:
        result = torch.from_numpy(convert(first)).to(dtype)
    else:
        result = torch.empty(size, dtype=dtype, device="cpu")
        at = 0
        for block in chain([first], made):
            result[at : at + len(block)] = torch.from_numpy(convert(block))
            at += len(block)
    return result.view(runs.shape)


def _filled_complex(
    key: int, layout: Layout, convert: Convert, dtype: torch.dtype, device: Device
) -> torch.Tensor:
    """Make a shard of complex numbers, whose real and imaginary parts take neighbouring words."""
    real = torch.empty((), dtype=dtype, device="meta").real.dtype
    pairs = Layout(
        layout.mesh, (*layout.shape, 2), (*layout.shard_order, ()), {}, (*layout.cuts, None)
    )
    return torch.view_as_complex(_filled(key, pairs, convert, real, device))


def _fill(
    key: int, layout: Layout, convert: Convert, dtype: torch.dtype | None, device: Device
) -> torch.Tensor:
    dtype = dtype or torch.get_default_dtype()
    fill = _filled_complex if dtype.is_complex else _filled
    return fill(key, layout, convert, dtype, device)


def _floats(words: Words, bits: int, dtype: Any = np.float64) -> NDArray[Any]:
    """Return the first `bits` bits of each word as an integer in floating point."""
    return (words >> np.uint64(64 - bits)).view(np.int64).astype(dtype)


def _open_unit(words: Words) -> NDArray[np.float64]:
    """Return uniform numbers in (0, 1), without its ends."""
    values = _floats(words, 52)
    values += 0.5
    values *= 2.0**-52
    return values


def _gauss(words: Words, dtype: torch.dtype) -> NDArray[Any]:
    """Return normally distributed numbers, out to more than 6.7 sigma (8.2 in float64)."""
    return _gauss_double(words) if dtype in _DOUBLES else _gauss_single(words)


def _gauss_double(words: Words) -> NDArray[np.float64]:
    """Apply the inverse of the distribution: 52 bits for the magnitude, the last for the sign."""
    below = _floats(words, 52)
    below += 0.5
    below *= 2.0**-53
    values: NDArray[np.float64] = torch.special.ndtri(torch.from_numpy(below)).numpy()
    bits = values.view(np.uint64)
    np.bitwise_xor(bits, words << np.uint64(63), out=bits)
    return values


def _gauss_single(words: Words) -> NDArray[np.float32]:
    """Apply the Box-Muller transform: 32 bits for the radius, 32 for the angle."""
    radius: NDArray[np.float32] = _floats(words, 32, np.float32)
    radius += np.float32(0.5)
    radius *= np.float32(2.0**-32)
    np.log(radius, out=radius)
    radius *= np.float32(-2)
    np.sqrt(radius, out=radius)
    angle = (words & np.uint64(2**32 - 1)).view(np.int64).astype(np.float32)
    angle *= np.float32(2 * math.pi * 2.0**-32)
    radius *= np.cos(angle, out=angle)
    return radius


_DOUBLES = (torch.float64, torch.complex128)
_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


# ---- samplers: the key, the layout, the parameters of the distribution, the dtype, the device


def uniform(
    key: int,
    layout: Layout,
    low: float = 0.0,
    high: float = 1.0,
    dtype: torch.dtype | None = None,
    device: Device = None,
) -> torch.Tensor:
    """Make this rank's shard of numbers in [low, high), also after rounding to the dtype."""
    dtype = dtype or torch.get_default_dtype()
    real = torch.empty((), dtype=dtype, device="meta").real.dtype if dtype.is_complex else dtype
    digits = _DIGITS.get(real, 8)
    if low == 0 and high == 1:
        kind = np.float64 if digits > 24 else np.float32
        step = kind(2.0**-digits)
        return _fill(key, layout, lambda block: _floats(block, digits, kind) * step, dtype, device)
    span = high - low

    def convert(block: Words) -> NDArray[np.float64]:
        values = _floats(block, 53)
        values *= 2.0**-53 * span
        values += low
        return values

    result = _fill(key, layout, convert, dtype, device)
    if low < high:
        (torch.view_as_real(result) if dtype.is_complex else result).clamp_(max=_below(high, real))
    return result


def _below(high: float, dtype: torch.dtype) -> float:
    """Return the largest number of a dtype that is less than `high`."""
    nearest = torch.tensor(high, dtype=dtype, device="cpu")
    if nearest.item() < high:
        return nearest.item()
    if dtype == torch.float16:  # torch has no nextafter for it
        return float(np.nextafter(nearest.numpy(), np.float16(-np.inf)))
    return torch.nextafter(nearest, torch.tensor(-math.inf, dtype=dtype, device="cpu")).item()


def normal(
    key: int,
    layout: Layout,
    mean: float = 0.0,
    std: float = 1.0,
    dtype: torch.dtype | None = None,
    device: Device = None,
) -> torch.Tensor:
    """Make this rank's shard of normally distributed numbers (complex: `std` is of both parts)."""
    kind = dtype or torch.get_default_dtype()
    if kind.is_complex:
        std /= math.sqrt(2)

    def convert(block: Words) -> NDArray[Any]:
        values = _gauss(block, kind)
        if std != 1:
            values *= std
        if mean != 0 and not kind.is_complex:
            values += mean
        return values

    result = _fill(key, layout, convert, kind, device)
    return result.add_(mean) if kind.is_complex and mean != 0 else result


def log_normal(
    key: int,
    layout: Layout,
    mean: float = 1.0,
    std: float = 2.0,
    dtype: torch.dtype | None = None,
    device: Device = None,
) -> torch.Tensor:
    """Make this rank's shard of numbers whose logarithms are normally distributed."""
    return _fill(
        key, layout, lambda block: np.exp(_gauss_double(block) * std + mean), dtype, device
    )


def exponential(
    key: int,
    layout: Layout,
    rate: float = 1.0,
    dtype: torch.dtype | None = None,
    device: Device = None,
) -> torch.Tensor:
    """Make this rank's shard of exponentially distributed numbers: never 0, so log() is finite."""
    dtype = dtype or torch.get_default_dtype()
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    return _fill(
        key,
        layout,
        lambda block: np.maximum(np.log(_open_unit(block)) / -rate, least),
        dtype,
        device,
    )


def geometric(
    key: int, layout: Layout, p: float, dtype: torch.dtype | None = None, device: Device = None
) -> torch.Tensor:
    """Make this rank's shard of the number of trials until the first success: at least 1."""
    scale = 1 / math.log1p(-p)
    return _fill(
        key,
        layout,
        lambda block: np.maximum(np.ceil(np.log(_open_unit(block)) * scale), 1.0),
        dtype,
        device,
    )


def cauchy(
    key: int,
    layout: Layout,
    median: float = 0.0,
    sigma: float = 1.0,
    dtype: torch.dtype | None = None,
    device: Device = None,
) -> torch.Tensor:
    """Make this rank's shard of Cauchy distributed numbers."""

    def convert(block: Words) -> NDArray[np.float64]:
        return np.tan((_open_unit(block) - 0.5) * math.pi) * sigma + median

    return _fill(key, layout, convert, dtype, device)


def integers(
    key: int,
    layout: Layout,
    low: int,
    high: int,
    dtype: torch.dtype | None = torch.int64,
    device: Device = None,
) -> torch.Tensor:
    """Make this rank's shard of integers in [low, high)."""
    span = high - low

    def convert(block: Words) -> NDArray[np.int64]:
        if span < 2**64:  # as torch does, with a bias of less than span / 2**64
            block = block - block // np.uint64(span) * np.uint64(span)
        return block.view(np.int64) + np.int64(low)

    # not `_fill`: integers of a complex dtype have no imaginary part
    return _filled(key, layout, convert, dtype or torch.int64, device)


def bernoulli(
    key: int,
    layout: Layout,
    p: float,
    divisor: float = 1.0,
    dtype: torch.dtype | None = None,
    device: Device = None,
) -> torch.Tensor:
    """Make this rank's shard of numbers that are 1 / divisor with probability p, and else 0."""
    limit = math.ceil(p * 2.0**53) << 11
    is_certain = limit >= 2**64
    kind = np.float32 if dtype in (torch.float32, torch.bfloat16, torch.float16) else np.float64

    def convert(block: Words) -> NDArray[Any]:
        chosen = np.ones(len(block), bool) if is_certain else block < np.uint64(limit)
        return chosen if divisor == 1 else chosen * (kind(1) / kind(divisor))

    return _filled(key, layout, convert, dtype or torch.get_default_dtype(), device)


def permutation(
    key: int, layout: Layout, dtype: torch.dtype | None = None, device: Device = None
) -> torch.Tensor:
    """Make this rank's shard of a random order of 0 to n - 1; every rank makes the whole order."""
    order = np.random.Generator(np.random.Philox(key=key)).permutation(layout.shape[0])
    piece = layout.piece_of(torch.from_numpy(order)).clone()
    return piece.to(device=device, dtype=dtype or torch.int64)


# ---- a shard of random numbers, in eager mode and in an exported program
#
# In eager mode each element has its own number, by its global position. A program that
# `shardwise.export` records has torch's operators only: each rank draws the *whole* tensor from
# torch's default generator, as a single process would, and takes its shard. Generators that agreed
# on all ranks agree afterwards, also where a shard is empty.

Sampler = Callable[..., torch.Tensor]
"""One of the functions above that makes a shard."""

_aten: Any = torch.ops.aten


def draw_shard(
    sampler: Sampler,
    layout: Layout,
    *numbers: Any,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Draw this rank's shard of a tensor of random numbers.

    Arguments:
        sampler: the distribution.
        numbers: the parameters of the distribution.
    """
    here = world.current()
    if here.draws_whole:
        return _draw_whole(sampler, layout, *numbers, dtype=dtype)
    if device.type == "meta":  # torch draws nothing there either
        if here.is_stand_in:  # but the ranks of the mesh do: the generators stay in step
            draw_key(generator=generator)
        return torch.empty(layout.local_shape(), dtype=dtype, device=device)
    key = draw_key(layout.mesh, generator)
    return sampler(key, layout, *numbers, dtype=dtype, device=device)


def _draw_whole(
    sampler: Sampler, layout: Layout, *numbers: Any, dtype: torch.dtype
) -> torch.Tensor:
    empty = torch.empty(layout.shape, dtype=dtype, device="meta")
    if sampler is bernoulli:
        chance, divisor = (*numbers, 1.0)[:2]
        shard = _shard_of(layout, _aten.bernoulli.p(empty, chance))
        return shard if divisor == 1 else shard.div(divisor)
    return _shard_of(layout, _OPERATORS[sampler](empty, *numbers))


def _shard_of(layout: Layout, whole: torch.Tensor) -> torch.Tensor:
    if not any(layout.shard_order):
        return whole
    # A copy: a view would keep the whole tensor alive.
    return layout.piece_of(whole).clone(memory_format=torch.contiguous_format)


def _uniform(empty: torch.Tensor, low: float = 0.0, high: float = 1.0) -> Any:
    if (low, high) == (0, 1):  # torch cannot load a call without its argument named `from`
        return _aten.rand_like.default(empty)
    return _aten.uniform.default(empty, low, high)


def _integers(empty: torch.Tensor, low: int, high: int) -> Any:
    if high == 2**63:  # too large for an argument; the default of `random`
        return _aten.random.default(empty)
    return _aten.randint_like.low_dtype(empty, low, high)


# The aten operator of each sampler. They are out of place: a program has no writes after
# `run_decompositions()`.
_OPERATORS: dict[Any, Callable[..., Any]] = {
    uniform: _uniform,
    normal: _aten.normal_functional.default,
    log_normal: _aten.log_normal.default,
    exponential: _aten.exponential.default,
    geometric: _aten.geometric.default,
    cauchy: _aten.cauchy.default,
    integers: _integers,
    permutation: lambda empty: torch.randperm(len(empty), dtype=empty.dtype, device=empty.device),
}
