"""Fourier transforms: a transformed dim is whole, the others are free.

A transform over several dims is done dim by dim, so a tensor that is split along some of them is
never gathered: first the whole dims are transformed, then one all-to-all moves the split to them,
and the other dims are transformed. A short-time transform works on windows, so a rank receives the
few rows beyond its own that its windows read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from shardwise.dtensor.tensor import DTensor
from shardwise.rules.helpers.dims import as_dims, drop_dims, present_inputs, replace_dim
from shardwise.rules.helpers.halo_exchange import Window, plan_exchange
from shardwise.rules.helpers.local_tensors import crop, is_empty, lower_with_padding, pad_empty_dims
from shardwise.rules.registry import Aten, Function, composed, rule, with_synonyms
from shardwise.rules.shape.rearranging import roll
from shardwise.rules.spec import Out, Spec, SplitContext, dims_of, normalize_dim
from shardwise.torch_internals import VF

Sizes = tuple[int, ...]


def transformed(input: torch.Tensor, dims: Sequence[int], shape: Sizes, run: Any) -> Spec:
    """Return the spec of a transform `run` over some dims, with a result of this shape."""
    names = drop_dims(dims_of(input), dims, True)
    out, lower = Out(names, shape), lower_with_padding(run)
    return Spec([(input, names)], [out], linear=[(0,)], lower=lower, positions=())


# ---- the length of a result, from the input's length and the requested one


def _same(size: int, wanted: int | None) -> int:
    return size if wanted is None or wanted == -1 else wanted


def _half(size: int, wanted: int | None) -> int:
    return _same(size, wanted) // 2 + 1


def _double(size: int, wanted: int | None) -> int:
    return _same(2 * (size - 1), wanted)


Length = Callable[[int, int | None], int]


def _checked(sizes: Iterable[int]) -> Sizes:
    sizes = tuple(sizes)
    if min(sizes, default=1) < 1:
        raise RuntimeError("Invalid number of data points")
    return sizes


# ---- over one dim


def _one_rule(function: Any, length: Length) -> None:
    @rule(function, Aten(function.__name__))
    @with_synonyms
    def transform(
        input: torch.Tensor, n: int | None = None, dim: int = -1, norm: str | None = None
    ) -> Spec:
        at = normalize_dim(dim, input.dim())
        (size,) = _checked([length(input.shape[at], n)])
        return transformed(input, (at,), replace_dim(input.shape, at, size), function)


# ---- over several


def _dims_and_sizes(
    input: torch.Tensor, s: Any, dim: Any
) -> tuple[tuple[int, ...], tuple[int | None, ...]]:
    """Return the transformed dims in their order, and the requested length of each."""
    s = (s,) if isinstance(s, int) else s
    if dim is not None and not input.dim():
        raise IndexError("Dimension specified but tensor has no dimensions")
    if dim is None:
        dim = range(input.dim()) if s is None else range(input.dim() - len(s), input.dim())
    dims = tuple(
        normalize_dim(each, input.dim()) for each in ((dim,) if isinstance(dim, int) else dim)
    )
    sizes = (None,) * len(dims) if s is None else tuple(s)
    if len(set(dims)) < len(dims) or len(sizes) != len(dims) or not (dims and input.dim()):
        raise RuntimeError(
            "fft: expected dims that differ, at least one, and as many sizes (s), "
            f"got dims {dims} and s={s}"
        )
    return dims, sizes


def _several_rule(function: Any, default: Any, length: Length) -> Function:
    """Register a transform over several dims at once, each of them whole."""
    found = Function(function.__name__, function)

    @rule(found)
    def transform(
        input: torch.Tensor, s: Any = None, dim: Any = default, norm: str | None = None
    ) -> Spec:
        dims, wanted = _dims_and_sizes(input, s, dim)
        lengths = [*[_same] * (len(dims) - 1), length]
        shape = list(input.shape)
        for at, size, of in zip(dims, wanted, lengths, strict=True):
            shape[at] = of(shape[at], size)
        _checked(shape[at] for at in dims)
        return transformed(input, dims, tuple(shape), function)

    return found


def _several(name: str, default: Any, one: Any, length: Length, others: str) -> None:
    """Register a transform over several dims.

    Arguments:
        default: the dims if none are given.
        one: the transform along the last dim.
        others: the transform along each other dim; it follows if `one` makes the input complex.
    """
    function = getattr(torch.fft, name)
    at_once = _several_rule(function, default, length)
    rest = _complex[others]

    @composed(function, Aten(function.__name__))
    def transform(
        input: torch.Tensor, s: Any = None, dim: Any = default, norm: str | None = None
    ) -> Any:
        split = _split_dims(input)
        if not split:
            return at_once.dispatched(input, s, dim, norm)
        dims, sizes = _dims_and_sizes(input, s, dim)
        if not split.intersection(dims):
            return at_once.dispatched(input, s, dim, norm)
        wanted = dict(zip(dims, sizes, strict=True))
        if length is _same:
            return _one_after_other(rest, input, wanted, norm)
        last = wanted.popitem()
        if length is _half:
            return _one_after_other(rest, one(input, last[1], last[0], norm), wanted, norm)
        return one(_one_after_other(rest, input, wanted, norm), last[1], last[0], norm)


def _one_after_other(
    function: Function, input: Any, wanted: dict[int, int | None], norm: str | None
) -> Any:
    """Transform whole dims first; then move the axes of split dims to dims that are done or
    free."""
    while wanted:
        split = _split_dims(input)
        now = [dim for dim in wanted if dim not in split] or list(wanted)
        if (
            split.issuperset(now)
            and math.prod(drop_dims(input.shape, now)) < input._layout.mesh.size()
        ):
            now = now[:1]  # no other dim can take their axes: transform one dim at a time
        sizes = [input.shape[dim] if wanted[dim] in (None, -1) else wanted[dim] for dim in now]
        input = function.dispatched(input, sizes, now, norm)
        wanted = {dim: size for dim, size in wanted.items() if dim not in now}
    return input


def _split_dims(input: Any) -> set[int]:
    if not isinstance(input, DTensor):
        return set()
    sizes = input._layout.mesh.shape
    return {
        dim
        for dim, axes in enumerate(input._layout.shard_order)
        if any(sizes[axis] > 1 for axis in axes)
    }


for _function, _length in (
    (torch.fft.fft, _same),
    (torch.fft.ifft, _same),
    (torch.fft.rfft, _half),
    (torch.fft.ihfft, _half),
    (torch.fft.irfft, _double),
    (torch.fft.hfft, _double),
):
    _one_rule(_function, _length)

_complex = {
    each: _several_rule(getattr(torch.fft, each), None, _same) for each in ("fftn", "ifftn")
}
for _count, _default in (("2", (-2, -1)), ("n", None)):
    _several(f"fft{_count}", _default, torch.fft.fft, _same, "fftn")
    _several(f"ifft{_count}", _default, torch.fft.ifft, _same, "ifftn")
    _several(f"rfft{_count}", _default, torch.fft.rfft, _half, "fftn")
    _several(f"ihfft{_count}", _default, torch.fft.ihfft, _half, "ifftn")
    _several(f"irfft{_count}", _default, torch.fft.irfft, _double, "ifftn")
    _several(f"hfft{_count}", _default, torch.fft.hfft, _double, "fftn")


# ---- the aten operators behind these functions


@rule(Aten("_fft_c2c"))
def c2c(self: torch.Tensor, dim: Sequence[int], normalization: int, forward: bool) -> Spec:
    return transformed(self, as_dims(dim, self.dim()), tuple(self.shape), torch._fft_c2c)


@rule(Aten("_fft_r2c"))
def r2c(self: torch.Tensor, dim: Sequence[int], normalization: int, onesided: bool) -> Spec:
    last = normalize_dim(dim[-1], self.dim())
    size = _half(self.shape[last], None) if onesided else self.shape[last]
    shape = replace_dim(self.shape, last, size)
    return transformed(self, as_dims(dim, self.dim()), shape, torch._fft_r2c)


@rule(Aten("_fft_c2r"))
def c2r(self: torch.Tensor, dim: Sequence[int], normalization: int, last_dim_size: int) -> Spec:
    shape = replace_dim(self.shape, normalize_dim(dim[-1], self.dim()), last_dim_size)
    return transformed(self, as_dims(dim, self.dim()), shape, torch._fft_c2r)


# ---- fftshift and ifftshift: a roll


def _shift_rule(function: Any, by: Callable[[int], int]) -> None:
    @rule(function, Aten(function.__name__))
    @with_synonyms
    def shift(input: torch.Tensor, dim: Any = None) -> Spec | None:
        dims = as_dims(dim, input.dim())
        return roll(input, [by(input.shape[each]) for each in dims], dims)


_shift_rule(torch.fft.fftshift, lambda size: size // 2)
_shift_rule(torch.fft.ifftshift, lambda size: (size + 1) // 2)


# ---- short-time transforms


@rule(VF.stft, by_dtype=True)
def stft(
    input: torch.Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: torch.Tensor | None = None,
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> Spec:
    """Transform windows of a signal that is already padded."""
    tensors = [each for each in (input, window) if each is not None]
    is_complex = any(each.is_complex() for each in tensors)
    frequencies = n_fft if onesided is False or is_complex else _half(n_fft, None)
    hop, size = hop_length or n_fft // 4, input.shape[-1]
    # Windows may be shorter than the transform and are then padded, so the time is whole.
    kernel, time = (win_length or n_fft, None) if align_to_window else (n_fft, "time")
    windows = Window(size, kernel, hop)
    if windows.count < 1:
        raise RuntimeError(
            f"stft: expected n_fft of at most {size}, the signal's length, got {n_fft}"
        )
    batch = ("batch",) * (input.dim() - 1)
    parts = () if return_complex or (is_complex and return_complex is None) else (2,)

    def lower(context: SplitContext) -> Callable[..., torch.Tensor] | None:
        mine = context.outputs[0].local_shape()
        if not context.axes(time) and not is_empty(mine):
            return None
        at = input.dim() - 1
        get = plan_exchange(context, "time", at, (size, windows.count), windows.needs)

        def run(local: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            signal = pad_empty_dims(get(local) if time else local, [n_fft] * local.dim())
            return crop(VF.stft(signal, *args, **kwargs), mine)

        return run

    inputs = [(input, (*batch, time)), *((each, (None,)) for each in tensors[1:])]
    shape = (*input.shape[:-1], frequencies, windows.count, *parts)
    out = Out((*batch, None, time, *(None for _ in parts)), shape)
    linear = [(at,) for at in range(len(tensors))]
    return Spec(inputs, [out], linear=linear, lower=lower, positions=["time"])


@rule("istft")
@with_synonyms
def istft(
    input: torch.Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: torch.Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> Spec:
    """Invert a short-time transform: the time dim is whole, because torch checks the sum of all
    windows at each point."""
    whole = n_fft + (hop_length or n_fft // 4) * (input.shape[-1] - 1)
    size = length or whole - (2 * (n_fft // 2) if center else 0)
    batch = ("batch",) * (input.dim() - 2)
    inputs = present_inputs((input, (*batch, None, None)), (window, (None,)))
    out, lower = Out((*batch, None), (*input.shape[:-2], size)), lower_with_padding(torch.istft)
    return Spec(inputs, [out], linear=[(0,)], lower=lower, positions=())
