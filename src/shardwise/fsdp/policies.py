"""In which dtypes a group computes and reduces, and where its shards are kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardwise.fsdp.errors import FSDPError, check_bool


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of a group's computation and of its communication.

    Arguments:
        param_dtype: of the gathered parameters, so of forward and backward; by default their own.
        reduce_dtype: in which gradients are reduced, and accumulated if they are not; by default
            that of the gathered parameters. Shards of gradients have the parameters' own dtype.
        output_dtype: what floating-point outputs are cast to; by default they stay as they are.
        cast_forward_inputs: whether floating-point inputs are cast to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

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
