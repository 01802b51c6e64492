"""Compare values: one function for every check, whatever the dtype.

NaN equals NaN, and a dtype that torch has no arithmetic for is compared in a wider one. What a CPU
computes differs: kernels for float8 saturate on one and give NaN on another.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch


class UnstableWarning(UserWarning):
    """Values were not compared, as torch itself does not reproduce them."""


def warn_of_unstable(subject: str, unstable: Sequence[str]) -> None:
    """Warn of values that were not compared, by name; say nothing if there are none."""
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

    Small floats become float32, exactly. Dtypes that convert to no other (uint64, packed floats of
    4 bits, quantized numbers) are given by their bits.
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
        except RuntimeError:  # as of float4_e2m1fn_x2: two numbers in one element
            return tensor.contiguous().view(torch.uint8)
    return tensor


def value_difference(
    have: torch.Tensor, expected: torch.Tensor, *, rtol: float = 0.0, atol: float = 0.0
) -> str:
    """Describe how the values of two tensors of one shape and dtype differ, or return "".

    Arguments:
        rtol: how far numbers may be off, in parts of the expected one; floats and complex alone.
        atol: the same, beside that; both 0 ask for equal numbers. NaN equals NaN always.
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
