"""Policies and settings of a parameter group: dtypes, offloading, schedule, custom collectives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from shardwise.fsdp.errors import FSDPError, check_bool

# ---- policies, which are chosen when a module is sharded


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of a group's computation and of its communication.

    Arguments:
        param_dtype: the dtype of the gathered parameters, and so of forward and backward; by
            default the parameters' own.
        reduce_dtype: the dtype in which gradients are reduced, and accumulated before they are
            reduced; by default the parameter's `grad_dtype`, which is its own dtype unless it was
            set. If the gradients of a group have different dtypes, they are reduced in the dtype
            that they promote to. The gradient of a shard has the parameter's `grad_dtype`.
        output_dtype: floating-point outputs are cast to it; by default they are not cast.
        cast_forward_inputs: whether floating-point inputs are cast to `param_dtype`.
        param_dtype_override_fn: called once with each parameter when its module is sharded;
            returns the dtype to gather it in: `param_dtype` (or None), or its own dtype. It must
            return the same on every rank. Inputs are cast to `param_dtype` all the same.
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
        """Return the policy of one parameter, with `param_dtype_override_fn` applied.

        Arguments:
            name: the parameter's name, for errors.
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
    """Policy that keeps shards on the mesh's device."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Policy that keeps shards, their gradients and the optimizer's state on the CPU.

    Arguments:
        pin_memory: keep the shards in page-locked memory, for faster copies to an accelerator.
            It has no effect on a machine without one.
    """

    pin_memory: bool = True

    def __post_init__(self) -> None:
        check_bool("CPUOffloadPolicy(pin_memory)", self.pin_memory)


# ---- collectives that users provide


class Comm(ABC):
    """A collective that users provide; it also allocates the memory of its result."""

    @abstractmethod
    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return memory for the result."""


class AllGather(Comm):
    """A collective that gathers parameters."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        async_op: bool = False,
    ) -> Any:
        """Fill `output_tensor` with the inputs of all ranks, one after the other.

        Arguments:
            group: torch's process group; on simulated ranks the communicator.
            async_op: whether to return at once an object with a `wait()` method.
        """


class ReduceScatter(Comm):
    """A collective that reduces gradients."""

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Fill `output_tensor` with the sum over ranks of this rank's piece of their inputs.

        Arguments:
            group: torch's process group; on simulated ranks the communicator.
            op: always `ReduceOp.SUM`; averages are divided afterwards.
            async_op: whether to return at once an object with a `wait()` method.
        """


# ---- settings, which users may change at any time


@dataclass(frozen=True)
class GroupSettings:
    """How a group communicates; the setters of `FSDPModule` explain the fields."""

    reshard_after_forward: bool | int | None = None
    """None: True, except for the groups that backward begins with. A number: the number of ranks
    to shard over between forward and backward."""
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    keep_unsharded_storage: bool = False
    """Whether the memory of gathered parameters stays allocated after they are resharded."""
    gradient_sync: bool = True
    all_reduce: bool = True
    divide_factor: float | None = None
    """None: the number of data-parallel ranks."""
    fill_unused: bool = False
    """Whether parameters that no rank has used get zeros, instead of None, as their gradients."""
    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None
    all_reduce_hook: Callable[[torch.Tensor], Any] | None = None
    sums_only: bool = False
    """Whether half-precision gradients are summed, too, and not averaged by the collective."""
    replicated_unit_bytes: int | None = None
    """Of a replicated module: about how many bytes of gradients are reduced at once; None for the
    default."""

    @property
    def schedule(self) -> tuple[bool | int | None, ...]:
        """The settings that decide when a collective takes place."""
        return (
            self.reshard_after_forward,
            self.reshard_after_backward,
            self.unshard_in_backward,
            self.gradient_sync,
            self.all_reduce,
            self.needs_own_collectives,
        )

    @property
    def needs_own_collectives(self) -> bool:
        """Whether the group's collectives must not be merged with those of other groups."""
        return (
            self.all_gather is not None
            or self.reduce_scatter is not None
            or self.all_reduce_hook is not None
        )

    @property
    def bucket_key(self) -> tuple[Any, ...]:
        """The settings that groups must have in common to share a collective."""
        return (
            self.gradient_sync,
            self.all_reduce,
            self.divide_factor,
            self.fill_unused,
            self.sums_only,
            self.needs_own_collectives,
            self.unshard_in_backward,
        )
