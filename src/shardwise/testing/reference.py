"""The results of a call in one process, and the comparison of other results with them.

NaN equals NaN, and a dtype that torch has no arithmetic for is compared in a wider one. Results of
CPUs differ: kernels for float8 saturate on one and give NaN on another.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from shardwise.dtensor.tensor import tensors_in
from shardwise.testing.inputs import Sample


class Reference(NamedTuple):
    """The results of a call in one process."""

    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor | None] | None
    """One per input that requires grad; None if gradients are not compared."""
    unstable: frozenset[int] = frozenset()
    """The positions of outputs that torch itself does not reproduce in a second call: only their
    shapes and dtypes are compared."""
    unstable_gradients: frozenset[int] = frozenset()
    """The positions of gradients that torch does not reproduce."""


def reference_of(
    fn: Callable[..., Any], sample: Sample, gradients: bool, tolerance: Tolerance
) -> Reference:
    """Return the results and gradients in one process, and which of them torch reproduces."""
    first = _call(fn, sample, gradients)
    again = _call(fn, sample, gradients)
    return first._replace(
        unstable=_differing(again.outputs, first.outputs, tolerance),
        unstable_gradients=_differing(again.gradients or [], first.gradients or [], tolerance),
    )


def _call(fn: Callable[..., Any], sample: Sample, gradients: bool) -> Reference:
    """Run a call once, on copies of the sample's tensors."""
    tensors = [each.detach().clone().requires_grad_(each.requires_grad)
               for each in sample.tensors()]  # fmt: skip
    args, kwargs = sample.filled(tensors)
    outputs = list(tensors_in(fn(*args, **kwargs)))
    leaves = [each for each in tensors if each.requires_grad]
    found = [each.detach().clone() for each in outputs]
    if not gradients or not leaves or not any(each.requires_grad for each in outputs):
        return Reference(found, None)
    grads = torch.autograd.grad(loss_of(outputs), leaves, allow_unused=True)
    return Reference(found, list(grads))


def _differing(
    again: Sequence[torch.Tensor | None],
    first: Sequence[torch.Tensor | None],
    tolerance: Tolerance,
) -> frozenset[int]:
    """Return the positions at which two lists of tensors differ."""
    return frozenset(
        at
        for at, (have, want) in enumerate(zip(again, first, strict=True))
        if have is not None and want is not None and difference([have], [want], "", tolerance)
    )


def loss_of(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a number that depends on every element of the results with a different weight."""
    total = torch.zeros((), dtype=torch.float64)
    for at, each in enumerate(outputs):
        if each.requires_grad:
            generator = torch.Generator().manual_seed(23 + at)
            weights = torch.randn(each.shape, generator=generator, dtype=torch.float64)
            part = each.real + each.imag if each.is_complex() else each
            total = total + (part.double() * weights).sum()
    return total


class Tolerance(NamedTuple):
    """The largest error that is accepted."""

    rtol: float
    atol: float


def difference(
    got: Sequence[torch.Tensor],
    want: Sequence[torch.Tensor],
    what: str,
    tolerance: Tolerance,
    unstable: frozenset[int] = frozenset(),
) -> str:
    """Describe the first difference between tensors and the expected ones, or return "".

    Arguments:
        unstable: the positions of tensors whose values are not compared.
    """
    if len(got) != len(want):
        return f"{len(got)} tensors in the {what}, expected {len(want)}"
    for at, (have, expected) in enumerate(zip(got, want, strict=True)):
        if have.shape != expected.shape or have.dtype != expected.dtype:
            return (
                f"{what} {at} is {have.dtype}{list(have.shape)}, "
                f"expected {expected.dtype}{list(expected.shape)}"
            )
        if have.layout != expected.layout:
            return f"{what} {at} is {have.layout}, expected {expected.layout}"
        if at in unstable:
            continue
        loose = 1.0 if expected.dtype in (torch.float64, torch.complex128) else 3e3
        apart = value_difference(
            have, expected, rtol=tolerance.rtol * loose, atol=tolerance.atol * loose
        )
        if apart:
            return f"{what} {at} is wrong: {apart}"
    return ""


class UnstableWarning(UserWarning):
    """Values were not compared, because torch itself does not reproduce them."""


def warn_of_unstable(subject: str, unstable: Sequence[str]) -> None:
    """Warn of values that were not compared, by name, if there are any."""
    if unstable:
        warnings.warn(
            f"{subject}: torch itself does not reproduce these values when it is called twice; "
            f"only shapes, dtypes and layouts were compared: {'; '.join(unstable)}",
            UnstableWarning,
            stacklevel=3,
        )


_WIDER = {
    torch.complex32: torch.complex64,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values, dense, in a dtype that torch adds and compares.

    Small floats become float32, exactly. Of dtypes that convert to no other (uint64, packed floats
    of 4 bits, quantized numbers) the bits are returned.
    """
    tensor = tensor.detach()
    if tensor.is_quantized:
        return tensor.int_repr().int()
    tensor = tensor.to_dense()
    if tensor.dtype in _WIDER:
        return tensor.to(_WIDER[tensor.dtype])
    if tensor.dtype == torch.uint64:
        return tensor.contiguous().view(torch.int64)
    if tensor.is_floating_point() and tensor.itemsize < 4:
        try:
            return tensor.to(torch.float32)
        except RuntimeError:  # float4_e2m1fn_x2 has two numbers in one element
            return tensor.contiguous().view(torch.uint8)
    return tensor


def value_difference(
    have: torch.Tensor, expected: torch.Tensor, *, rtol: float = 0.0, atol: float = 0.0
) -> str:
    """Describe how the values of two tensors of one shape and dtype differ, or return "".

    Arguments:
        rtol: the relative error that is accepted, for floats and complex numbers only.
        atol: the absolute error that is accepted besides. If both are 0, numbers must be equal. NaN
            always equals NaN.
    """
    have, expected = widened(have), widened(expected)
    if not (expected.is_floating_point() or expected.is_complex()):
        count = int((have != expected).sum())
        return f"{count} of {have.numel()} differ" if count else ""
    is_close = torch.isclose(have, expected, rtol=rtol, atol=atol, equal_nan=True)
    if bool(is_close.all()):
        return ""
    is_finite = torch.isfinite(have) & torch.isfinite(expected)
    gaps = (have - expected).abs()[is_finite & ~is_close]
    parts = [f"off by up to {float(gaps.max()):.3g}"] if gaps.numel() else []
    others = int((~is_finite & ~is_close).sum())
    if others:
        parts.append(f"{others} of {have.numel()} are NaN or infinite in one alone")
    return ", ".join(parts)
