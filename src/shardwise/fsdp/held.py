"""Held: one parameter of a group, sharded and gathered, with its gradients on their way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.fsdp.division import Division
from shardwise.fsdp.grad_dtype import GradDtype
from shardwise.tensor import DTensor, laid_out, unwrap, wrap
from shardwise.torch_internals import TensorBase, backward_hooks_of, post_accumulate_hooks_of

_hooks: Callable[[torch.Tensor], dict[int, Callable[[Any], Any]] | None] = backward_hooks_of
_accumulated_hooks: Callable[[torch.Tensor], dict[int, Callable[[torch.Tensor], None]] | None] = (
    post_accumulate_hooks_of
)
gradient_of: Callable[[torch.Tensor], torch.Tensor | None] = TensorBase.grad.__get__
set_gradient: Callable[[torch.Tensor, torch.Tensor | None], None] = TensorBase.grad.__set__


class Held:
    """One parameter of a unit."""

    __slots__ = (
        "accumulated",
        "chunks",
        "division",
        "grad_dtype",
        "is_direct",
        "name",
        "offset",
        "reduced",
        "sharded",
        "strides",
        "sum_dtype",
        "whole",
    )

    def __init__(
        self,
        name: str,
        sharded: DTensor,
        division: Division,
        strides: tuple[int, ...] | None,
        grad_dtype: GradDtype | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.name = name
        self.sharded = sharded
        """What the module has at rest, and optimizers see."""
        self.division = division
        self.strides = strides or torch.empty(division.whole_shape, device="meta").stride()
        """Of what the module computes with."""
        own = sharded.dtype
        self.grad_dtype = own if grad_dtype is None else grad_dtype.dtype
        """Of the shard's gradient; None if it may be any."""
        self.sum_dtype = Held.sum_dtype_of(own, grad_dtype, reduce_dtype)
        """In which gradients are accumulated that are not reduced yet; None if it may be any."""
        self.offset = 0
        """Where it begins in a row."""
        self.is_direct = False
        """Whether it travels by itself, from and to where it belongs, as it is large."""
        self.chunks: list[torch.Tensor]
        """Of a direct one, what each rank holds, in the gathered parameter."""
        self.whole: torch.Tensor
        """What the module computes with."""
        self.accumulated: torch.Tensor | None = None
        """Gradients of the gathered parameter that are still to be reduced, in `sum_dtype`."""
        self.reduced: torch.Tensor | None = None
        """Gradients of the shard that are still to be summed over the ranks that hold the same."""

    @staticmethod
    def sum_dtype_of(
        own: torch.dtype, grad_dtype: GradDtype | None, reduce_dtype: torch.dtype | None
    ) -> torch.dtype | None:
        """In which dtype gradients of a parameter are accumulated.

        Arguments:
            own: of the parameter.
            grad_dtype: of its gradient, if that was set.
            reduce_dtype: that of the policy.
        """
        if reduce_dtype is not None and own.is_floating_point:
            return reduce_dtype
        return own if grad_dtype is None else grad_dtype.dtype

    def hooked(self, gradient: torch.Tensor) -> torch.Tensor:
        """What the hooks that users have registered on the shard make of its new gradient."""
        hooks = _hooks(self.sharded)
        if not hooks:
            return gradient
        found: Any = wrap(gradient, self.sharded._layout)
        for hook in list(hooks.values()):
            changed = hook(found)
            if changed is not None:
                found = laid_out(changed.detach(), self.sharded._layout, f"hook of {self.name}")
        return unwrap(found)

    def call_hooks(self) -> None:
        """Those that users have registered to be called once the shard has its gradient."""
        hooks = _accumulated_hooks(self.sharded)
        if hooks:
            for hook in list(hooks.values()):
                hook(self.sharded)
