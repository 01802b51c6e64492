"""The dtype that users have set for the gradient of a parameter (`Tensor.grad_dtype`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardwise.torch_internals import has_own_grad_dtype


@dataclass(frozen=True)
class GradDtype:
    """A `grad_dtype` that was set; one that was not follows the dtype of the parameter.

    Arguments:
        dtype: None allows any.
    """

    dtype: torch.dtype | None

    @staticmethod
    def set_on(parameter: Any) -> GradDtype | None:
        """What was set on a parameter, if anything."""
        return GradDtype(parameter.grad_dtype) if has_own_grad_dtype(parameter) else None

    def put_on(self, parameter: Any) -> None:
        """Set it on a parameter, unless that has it."""
        if GradDtype.set_on(parameter) != self:
            parameter.grad_dtype = self.dtype


def promoted(dtypes: set[torch.dtype]) -> torch.dtype:
    """The dtype that holds the values of all."""
    first, *others = dtypes
    for other in others:
        first = torch.promote_types(first, other)
    return first
