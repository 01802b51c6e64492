"""What a call gives in one process, and how far another result is from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from shardwise.rules.calls import tensors_in
from shardwise.testing.comparing import value_difference
from shardwise.testing.sample import Sample


class Reference(NamedTuple):
    """What a call gives in one process."""

    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor | None] | None
    """Of the inputs that require grad; None if they are not compared."""
    unstable: frozenset[int] = frozenset()
    """The outputs, by position, that torch itself gives other values when it is called again: their
    shapes and dtypes are compared, and no more."""
    unstable_gradients: frozenset[int] = frozenset()
    """The same, of the gradients."""


def reference_of(
    fn: Callable[..., Any], sample: Sample, gradients: bool, tolerance: Tolerance
) -> Reference:
    """Return the results and gradients in one process, and which of them torch reproduces."""
    first = _called(fn, sample, gradients)
    again = _called(fn, sample, gradients)
    return first._replace(
        unstable=_differing(again.outputs, first.outputs, tolerance),
        unstable_gradients=_differing(again.gradients or [], first.gradients or [], tolerance),
    )


def _called(fn: Callable[..., Any], sample: Sample, gradients: bool) -> Reference:
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
    return frozenset(
        at
        for at, (have, want) in enumerate(zip(again, first, strict=True))
        if have is not None and want is not None and difference([have], [want], "", tolerance)
    )


def loss_of(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """A number that depends on every element of the results differently."""
    total = torch.zeros((), dtype=torch.float64)
    for at, each in enumerate(outputs):
        if each.requires_grad:
            generator = torch.Generator().manual_seed(23 + at)
            weights = torch.randn(each.shape, generator=generator, dtype=torch.float64)
            part = each.real + each.imag if each.is_complex() else each
            total = total + (part.double() * weights).sum()
    return total


class Tolerance(NamedTuple):
    """How far numbers may be off."""

    rtol: float
    atol: float


def difference(
    got: Sequence[torch.Tensor],
    want: Sequence[torch.Tensor],
    what: str,
    tolerance: Tolerance,
    unstable: frozenset[int] = frozenset(),
) -> str:
    """Return the first thing in which tensors are not what they should be, or "".

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
