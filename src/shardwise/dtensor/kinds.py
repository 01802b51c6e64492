"""Two kinds of DTensors that have classes of their own, so that ordinary ones pay nothing for them.

A `WaitingDTensor` waits for its data when it is used, and is an ordinary DTensor from then on. An
`OutsideDTensor` is on a rank that is not in its mesh: it has the global shape and no data.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from shardwise.comm import Pending
from shardwise.core.layout import Layout
from shardwise.core.tensor_state import ensure_state
from shardwise.dtensor.tensor import DTensor, tensors_in, wrap
from shardwise.redistribute.plan import gradient_layout
from shardwise.torch_internals import TensorBase, as_local, locally

_grad_of: Any = TensorBase.grad.__get__


class WaitingDTensor(DTensor):
    """A DTensor whose data are under way; `redistribute(async_op=True)` makes it.

    It waits for them when it is used, and is an ordinary DTensor from then on. Its class is another
    one so that ordinary tensors pay nothing for the question.
    """

    @staticmethod
    def of(local: torch.Tensor, layout: Layout, started: Pending[torch.Tensor]) -> WaitingDTensor:
        """Make one of a tensor with the shape and the history of the result, and of its data."""
        result = wrap(local, layout)
        ensure_state(result).pending = started
        result.__class__ = WaitingDTensor
        return result  # type: ignore[return-value]

    def _renew(self) -> None:
        notes = ensure_state(self)
        pending: Pending[torch.Tensor] = notes.pending
        with as_local(), torch.no_grad():
            TensorBase.data.__set__(self, pending.wait())
        notes.pending = None
        self.__class__ = DTensor  # type: ignore[assignment]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for each in tensors_in((args, kwargs or {})):
            if type(each) is WaitingDTensor:
                each.wait()
        kinds = tuple(DTensor if kind is WaitingDTensor else kind for kind in types)
        dispatch: Any = DTensor.__torch_function__
        return dispatch(func, kinds, args, kwargs)

    # What does not call `__torch_function__`:

    @property
    def data(self) -> DTensor:
        """The tensor without its history, sharing memory."""
        return self.wait().data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.wait().data = value

    def stride(self, dim: int | None = None) -> Any:
        return self.wait().stride(dim)

    def set_(self, *args: Any, **kwargs: Any) -> DTensor:
        return self.wait().set_(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.wait())

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        return self.wait().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return self.wait().__reduce_ex__(protocol)


DTensor._waiting = WaitingDTensor.of


class OutsideDTensor(DTensor):
    """A DTensor on a rank that is not in its mesh. It has the global shape, and no data.

    Its local tensor is empty, or 0 for a 0-d tensor. `shardwise.dispatch.outside` gives the class
    its `__torch_function__`: operators return such tensors, and communicate nothing.
    """

    @staticmethod
    def of(
        layout: Layout,
        *inputs: torch.Tensor,
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
    ) -> OutsideDTensor:
        """Make one.

        Arguments:
            layout: that of the tensor on its mesh.
            inputs: the tensors that it is computed of. The first has its device.
            dtype: by default that of the first input.
            requires_grad: whether it is a leaf that requires grad. Otherwise it requires grad if an
                input does, and the gradients of the inputs are zeros.
        """
        with as_local():
            local = _Empty.apply(layout.shape, dtype or inputs[0].dtype, *inputs)  # type: ignore[no-untyped-call]
        result = wrap(local, layout)
        result.__class__ = OutsideDTensor
        if requires_grad:
            result.requires_grad = True
        return result  # type: ignore[return-value]

    @property
    def grad(self) -> DTensor | None:
        """The gradient: another tensor without data."""
        local = locally(_grad_of, (), (self,))
        return None if local is None else OutsideDTensor.of(gradient_layout(self._layout), local)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None:
            value = OutsideDTensor.of(gradient_layout(self._layout), value.detach())
        with as_local():
            TensorBase.grad.__set__(self, value)

    @property
    def data(self) -> DTensor:
        """The tensor without its history."""
        with as_local():
            local = self.detach()
        return OutsideDTensor.of(self._layout, local)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if isinstance(value, DTensor):
            self._layout = value._layout

    def stride(self, dim: int | None = None) -> Any:
        """Return the strides of a contiguous tensor."""
        shape = self._layout.shape
        strides = tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
        return strides if dim is None else strides[dim]

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        result = super().__deepcopy__(memo)
        result.__class__ = OutsideDTensor
        return result


DTensor._outside = OutsideDTensor.of


class _Empty(torch.autograd.Function):
    """Forward: the local tensor of a rank outside of the mesh. Backward: zeros."""

    @staticmethod
    def forward(
        ctx: Any, shape: tuple[int, ...], dtype: torch.dtype, *inputs: torch.Tensor
    ) -> torch.Tensor:
        ctx.inputs = [(tuple(each.shape), each.dtype, each.device) for each in inputs]
        device = inputs[0].device
        return torch.zeros(() if not shape else (0,), dtype=dtype, device=device)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        zeros = [
            torch.zeros(shape, dtype=dtype, device=device) if is_needed else None
            for (shape, dtype, device), is_needed in zip(
                ctx.inputs, ctx.needs_input_grad[2:], strict=True
            )
        ]
        return None, None, *zeros
