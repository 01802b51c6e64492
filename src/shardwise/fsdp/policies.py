"""In which dtypes a group computes and reduces, and where its shards are kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from shardwise.fsdp.errors import FSDPError, check_bool


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of a group's computation and of its communication.

    Arguments:
        param_dtype: of the gathered parameters, so of forward and backward; by default their own.
        reduce_dtype: in which gradients are reduced, and accumulated if they are not; by default
            the parameter's `grad_dtype`, which is its own dtype unless it was set. Gradients of a
            group that have different ones are reduced in the dtype that holds all. Shards of
            gradients have the parameter's `grad_dtype`.
        output_dtype: what floating-point outputs are cast to; by default they stay as they are.
        cast_forward_inputs: whether floating-point inputs are cast to `param_dtype`.
        param_dtype_override_fn: called once with each parameter when its module is sharded; says
            what that is gathered in: `param_dtype` (or None), or its own dtype. It must say the
            same on every rank. Inputs are cast to `param_dtype` all the same.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(
        default=None, kw_only=True
    )

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            is_dtype = isinstance(dtype, torch.dtype) and dtype.is_floating_point
            if dtype is not None and not is_dtype:
                raise FSDPError(
                    f"MixedPrecisionPolicy({name}): expected a floating-point dtype such as "
                    f"torch.bfloat16, or None; got {dtype!r}"
                )
        check_bool("MixedPrecisionPolicy(cast_forward_inputs)", self.cast_forward_inputs)
        if self.param_dtype_override_fn is not None and not callable(self.param_dtype_override_fn):
            raise FSDPError(
                "MixedPrecisionPolicy(param_dtype_override_fn): expected a function of a "
                f"parameter, or None; got {self.param_dtype_override_fn!r}"
            )

    def resolved_for(self, parameter: nn.Parameter, name: str) -> MixedPrecisionPolicy:
        """The policy of one parameter: without a function, as that has been asked.

        Arguments:
            name: of the parameter, for errors.
        """
        if self.param_dtype_override_fn is None:
            return self
        wanted: Any = self.param_dtype_override_fn(parameter)
        if wanted is None:
            wanted = self.param_dtype
        elif not isinstance(wanted, torch.dtype) or wanted not in (
            self.param_dtype,
            parameter.dtype,
        ):
            raise FSDPError(
                f"param_dtype_override_fn: {name}: expected None, param_dtype "
                f"({self.param_dtype}) or the parameter's own dtype ({parameter.dtype}); got "
                f"{wanted!r}"
            )
        return replace(self, param_dtype=wanted, param_dtype_override_fn=None)


@dataclass(frozen=True)
class OffloadPolicy:
    """Shards stay on the mesh's device."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, their gradients and the optimizer's state live on the CPU.

    Arguments:
        pin_memory: keep the shards in page-locked memory, for faster copies to an accelerator.
            Where there is none, it has no effect.
    """

    pin_memory: bool = True

    def __post_init__(self) -> None:
        check_bool("CPUOffloadPolicy(pin_memory)", self.pin_memory)
