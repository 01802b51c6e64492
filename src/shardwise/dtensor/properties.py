"""The properties of a DTensor: the shape and sizes of the global tensor, the dtype of the shard.

All are answered without dispatch. At the end: who may have the memory of a shard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from shardwise.core.box import Box
from shardwise.core.errors import DispatchError
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Placement
from shardwise.dtensor.local_shards import global_stride
from shardwise.torch_internals import TensorBase, as_local, is_torch_function_enabled, locally

_dtype_of: Any = TensorBase.dtype.__get__
_device_of: Any = TensorBase.device.__get__
_requires_grad: Any = TensorBase.requires_grad.__get__
_shape_of: Callable[[torch.Tensor], torch.Size] = TensorBase.shape.__get__
_numel_of: Callable[[torch.Tensor], int] = TensorBase.numel


class GlobalProperties(torch.Tensor):
    """The base of DTensor with its properties.

    Sizes are those of the global tensor. Within `as_local()` they are those of the shard: code that
    runs there, such as the hooks of activation checkpointing, must see one tensor.
    """

    _layout: Layout

    # ---- the layout

    @property
    def mesh_layout(self) -> Layout:
        """The layout of the global tensor on its mesh."""
        return self._layout

    @property
    def layout(self) -> torch.layout:  # type: ignore[override]
        """Torch's memory layout. A DTensor is always dense: `torch.strided`."""
        return torch.strided

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of the layout."""
        return self._layout.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placement on each axis of the mesh."""
        return self._layout.placements

    @property
    def box(self) -> Box:
        """The indices of the global tensor that this rank holds."""
        return self._layout.box()

    # ---- sizes of the global tensor, from the layout

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The global shape."""
        return self._layout.size if is_torch_function_enabled() else _shape_of(self)

    def size(self, dim: int | None = None) -> Any:
        """Return the global shape, or its size along `dim`."""
        shape = self.shape
        return shape if dim is None else shape[dim]

    def numel(self) -> int:
        """Return the number of elements of the global tensor."""
        return self._layout.numel if is_torch_function_enabled() else _numel_of(self)

    nelement = numel

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """The number of dims."""
        return len(self._layout.shape)

    def dim(self) -> int:
        """Return the number of dims."""
        return len(self._layout.shape)

    ndimension = dim

    def __len__(self) -> int:
        if not self._layout.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def stride(self, dim: int | None = None) -> Any:
        """Return the strides of the global tensor if it were stored as its shards are."""
        strides = locally(TensorBase.stride, (), (self,))
        if is_torch_function_enabled():
            strides = global_stride(strides, self._layout)
        return strides if dim is None else strides[dim]

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """The bytes of the global tensor."""
        return self.numel() * self.dtype.itemsize

    # ---- of the local tensor

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The dtype."""
        return locally(_dtype_of, (), (self,))  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device of this rank's shard."""
        return locally(_device_of, (), (self,))  # type: ignore[no-any-return]

    @property
    def requires_grad(self) -> bool:
        """Whether gradients are recorded for it."""
        return locally(_requires_grad, (), (self,))  # type: ignore[no-any-return]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        with as_local():
            TensorBase.requires_grad.__set__(self, value)


# ---- memory
# A DTensor has the shape of the global tensor and the memory of this rank's shard. Code that does
# not know it would read one with the sizes of the other. So its memory is handed out only where the
# shard is the whole tensor; elsewhere the call is refused.


def check_whole(name: str, tensor: GlobalProperties) -> None:
    """Refuse a call that hands out memory unless each rank's shard is the whole tensor.

    Within `as_local()` every call goes on: there a DTensor has the shape of its shard.
    """
    if not tensor._layout.is_whole and is_torch_function_enabled():
        refuse_piece(name, tensor._layout)


def refuse_piece(name: str, layout: Layout) -> NoReturn:
    """Refuse a call that would take this rank's piece for the global tensor."""
    raise DispatchError(
        f"{name}: would give the memory of this rank's piece, {layout.local_shape()}, for the "
        f"tensor {layout!r}; take x.to_local() for the piece or x.full_tensor() for the whole, or "
        "run code that does not know DTensors within sw.local_map. To files: whole tensors by "
        "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) of torch."
        "distributed.checkpoint.state_dict, which save_pretrained(path, state_dict=...) takes too; "
        "pieces by torch.distributed.checkpoint (async_save with "
        "async_stager=shardwise.CheckpointStager())"
    )


class NoExchangeApi:
    """Hides torch's C functions for DLPack, which export a shard without asking Python.

    Consumers that do not find them call `__dlpack__`.
    """

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError("a DTensor has no __dlpack_c_exchange_api__; use __dlpack__")
