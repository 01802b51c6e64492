"""DTensor: the local shard, re-typed, with one attribute: how the global tensor lies.

C++ (autograd, kernels, storage) sees an ordinary local tensor. Python sees the global one: what is
read off the layout is a plain property here, and every torch function goes through
`shardwise.dispatch`, which gives the class its `__torch_function__`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardwise import stored
from shardwise.box import Box
from shardwise.comm import Pending
from shardwise.errors import LayoutError
from shardwise.layout import Layout
from shardwise.layout_text import short_dtype
from shardwise.local_shards import (
    check_dense,
    check_replicas,
    check_shard,
    found_layout,
    global_stride,
)
from shardwise.mesh import DeviceMesh, as_mesh, unpickled
from shardwise.placement import Placement, Replicate
from shardwise.redistribute.autograd import redistribute_local, relabelled
from shardwise.redistribute.plan import dual, placed
from shardwise.torch_internals import (
    PARAMETER_FLAG,
    TensorBase,
    as_local,
    base_of,
    is_torch_function_enabled,
    locally,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

_grad_of: Any = TensorBase.grad.__get__
_dtype_of: Any = TensorBase.dtype.__get__
_device_of: Any = TensorBase.device.__get__
_requires_grad: Any = TensorBase.requires_grad.__get__
_shape_of: Callable[[torch.Tensor], torch.Size] = TensorBase.shape.__get__
_numel_of: Callable[[torch.Tensor], int] = TensorBase.numel


def wrap(local: torch.Tensor, layout: Layout) -> DTensor:
    """Re-type a fresh local tensor, that nobody else holds, as the DTensor it is a piece of."""
    local.__class__ = DTensor
    local._layout = layout  # type: ignore[attr-defined]
    return local  # type: ignore[return-value]


def unwrap(tensor: DTensor) -> torch.Tensor:
    """This rank's piece as a plain tensor: an alias, differentiable, with the same gradient."""
    if type(tensor) is not DTensor:
        tensor._renew()
    with as_local():
        return tensor.as_subclass(torch.Tensor)


def severed_by(tensor: torch.Tensor) -> str | None:
    """The operator whose result this is, or is a view of, if torch would have returned a view and
    here it is a copy. Within `as_local()`."""
    severed: str | None = tensor.__dict__.get("_severed")
    if severed is None:
        base = base_of(tensor)
        severed = None if base is None else base.__dict__.get("_severed")
    return severed


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in arguments or results, in order; within lists, tuples and dicts too."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


class DTensor(torch.Tensor):
    """A tensor on a device mesh. `from_local`, `distribute_tensor` and the factories make it.

    Shapes, sizes and results are those of the global tensor; `to_local()` is this rank's piece.

    Example:
        >>> x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
        >>> x.shape, x.to_local().shape, (x * 2).sum().item()
        (torch.Size([8]), torch.Size([4]), 56.0)
    """

    _layout: Layout

    # ---- making one, and leaving it

    @staticmethod
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh | TorchMesh,
        placements: Sequence[Placement] | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Sequence[Placement] | None = None,
    ) -> DTensor:
        """The DTensor of which each rank gives its piece; differentiable.

        Arguments:
            local_tensor: this rank's piece. The result shares its memory.
            device_mesh: where the pieces lie.
            placements: how they lie; whole on every axis by default.
            run_check: check on all ranks that shapes and dtypes fit, and that what is called
                replicated is (it is compared, never overwritten).
            shape: the global shape. Without it, and if a dim is split, the ranks tell each other
                their sizes: the true shape, also of uneven pieces.
            stride: accepted for torch's sake; strides follow from the local tensor.
            grad_placements: how the gradient of `local_tensor` is wanted; by default it lies as
                the pieces do, with pending sums made whole.
        """
        mesh = as_mesh(device_mesh)
        if not isinstance(local_tensor, torch.Tensor) or isinstance(local_tensor, DTensor):
            raise LayoutError(
                f"local_tensor: expected a plain tensor, got {type(local_tensor).__name__}"
                + (": it is one already" if isinstance(local_tensor, DTensor) else "")
            )
        check_dense("local_tensor", local_tensor)
        placements = _placements(mesh, placements)
        if shape is None:
            layout = found_layout(local_tensor, mesh, placements)
        else:
            layout = Layout.from_placements(mesh, shape, placements)
            check_shard(local_tensor, layout)
        if run_check:
            check_replicas(local_tensor, layout)
        back = dual(layout)
        wanted = back
        if grad_placements is not None:
            wanted = Layout.from_placements(mesh, layout.shape, grad_placements)
        return wrap(relabelled(local_tensor, back, wanted), layout)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's piece, sharing memory; differentiable.

        Arguments:
            grad_placements: how the gradient that comes back lies; by default as this tensor does,
                with pending sums made whole.
        """
        if grad_placements is None:
            return unwrap(self)
        layout = self._layout
        given = Layout.from_placements(layout.mesh, layout.shape, grad_placements)
        return relabelled(unwrap(self), given, dual(layout))

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor, on every rank; differentiable.

        Arguments:
            grad_placements: how the gradient that comes back lies, such as `[Partial()]` where each
                rank's is a contribution; by default it is the same on every rank.
        """
        whole: DTensor = self.redistribute(placements=[Replicate()] * self._layout.mesh.ndim)
        return whole.to_local(grad_placements=grad_placements)

    def redistribute(
        self,
        device_mesh: DeviceMesh | TorchMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
        shard_order: Any = None,
    ) -> Any:
        """The same tensor laid out otherwise; differentiable.

        Arguments:
            device_mesh: where it should lie; by default where it does.
            placements: how it should lie; whole by default.
            async_op: return a `Pending` at once, whose `wait()` gives the DTensor.
            forward_dtype: what travels, and the dtype of the result.
            backward_dtype: what travels backward; the gradient has this tensor's dtype.
            shard_order: for each dim that several axes split, those axes outer to inner.
        """
        source = self._layout
        if isinstance(device_mesh, list | tuple):
            raise LayoutError(
                f"device_mesh: expected a DeviceMesh, got {device_mesh!r}; placements are the "
                "second argument: x.redistribute(placements=[...])"
            )
        mesh = source.mesh if device_mesh is None else as_mesh(device_mesh)
        wanted = _placements(mesh, placements)
        if mesh is source.mesh and shard_order is None:
            target = placed(source, wanted)
        else:
            target = Layout.from_placements(mesh, source.shape, wanted, shard_order)
        local = unwrap(self)
        if target is source and forward_dtype is None and backward_dtype is None:
            result = wrap(local, source)
            return Pending.done(result) if async_op else result
        moved: Any = redistribute_local(
            local,
            source,
            target,
            forward_dtype=forward_dtype,
            backward_dtype=backward_dtype,
            async_op=async_op,
        )
        if async_op:
            pending: Pending[torch.Tensor] = moved
            return pending.then(lambda moved: _as_new(moved, local, target))
        return _as_new(moved, local, target)

    # ---- how it lies

    @property
    def layout(self) -> Layout:  # type: ignore[override]
        """How the global tensor lies."""
        # within `as_local()` torch's own: some of its functions are Python that passes it on
        return self._layout if is_torch_function_enabled() else torch.strided  # type: ignore[return-value]

    @property
    def device_mesh(self) -> DeviceMesh:
        """Where it lies."""
        return self._layout.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """How it lies on each axis of the mesh."""
        return self._layout.placements

    @property
    def box(self) -> Box:
        """The indices of the global tensor that this rank holds."""
        return self._layout.box()

    # ---- the global tensor's properties, off the layout; within `as_local()` the shard's, so that
    # code which runs there, such as the hooks of activation checkpointing, meets one tensor

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The global shape."""
        return self._layout.size if is_torch_function_enabled() else _shape_of(self)

    def size(self, dim: int | None = None) -> Any:
        """The global shape, or its size along `dim`."""
        shape = self.shape
        return shape if dim is None else shape[dim]

    def numel(self) -> int:
        """The number of elements of the global tensor."""
        return self._layout.numel if is_torch_function_enabled() else _numel_of(self)

    nelement = numel

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """The number of dims."""
        return len(self._layout.shape)

    def dim(self) -> int:
        """The number of dims."""
        return len(self._layout.shape)

    ndimension = dim

    def __len__(self) -> int:
        if not self._layout.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def stride(self, dim: int | None = None) -> Any:
        """The strides of the global tensor, were it stored as its pieces are."""
        strides = locally(TensorBase.stride, (), (self,))
        if is_torch_function_enabled():
            strides = global_stride(strides, self._layout)
        return strides if dim is None else strides[dim]

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """The bytes of the global tensor."""
        return self.numel() * self.dtype.itemsize

    # ---- the local tensor's properties, without dispatch

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The dtype."""
        return locally(_dtype_of, (), (self,))  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device of this rank's piece."""
        return locally(_device_of, (), (self,))  # type: ignore[no-any-return]

    @property
    def requires_grad(self) -> bool:
        """Whether gradients are recorded for it."""
        return locally(_requires_grad, (), (self,))  # type: ignore[no-any-return]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        with as_local():
            TensorBase.requires_grad.__set__(self, value)

    @property
    def grad(self) -> DTensor | None:
        """The gradient, laid out as this tensor is, with pending sums made whole."""
        local = locally(_grad_of, (), (self,))
        if local is None:
            return None
        layout = self._layout
        if layout.partial:
            layout = dual(layout)
        if type(local) is DTensor:
            if local._layout is layout:
                return local
            with as_local():  # autograd may give one tensor to two leaves
                local = local.view_as(local)
        local._is_gradient = True  # what is taken of it must be told when it is added to
        return wrap(local, layout)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None:
            value = laid_out(value, dual(self._layout), "grad")
            if "_link" in value.__dict__:
                raise LayoutError(
                    "grad: this tensor is a part of another one, and of a dim that was split: what "
                    "backward adds to it would not reach that; clone() it"
                )
            value._is_gradient = True  # type: ignore[attr-defined]
        with as_local():
            TensorBase.grad.__set__(self, value)

    @property
    def data(self) -> DTensor:
        """The tensor without its history, sharing memory."""
        if self._layout.partial:  # what was reduced knows nothing of what is written here
            self._forget_moves()
        with as_local():
            result = wrap(TensorBase.data.__get__(self), self._layout)
            severed = severed_by(self)
        if severed is not None:
            result._severed = severed  # type: ignore[attr-defined]
        return result

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        layout = value._layout if isinstance(value, DTensor) else self._layout
        if not isinstance(value, DTensor):
            value = laid_out(value, layout, "data")
        self._forget_moves()
        with as_local():
            TensorBase.data.__set__(self, value)
        self._layout = layout

    def _forget_moves(self) -> None:
        """Drop what dispatch keeps of it for other uses; `dispatch.moving` says how."""

    def _renew(self) -> None:
        """Bring it up to date; `copies` says which ones may be out of date, and how."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As `torch.Tensor.to`; itself, at once, if it is only asked for the device it is on."""
        asks_device = len(args) == 1 and not kwargs and type(args[0]) is torch.device
        if asks_device and args[0] == locally(_device_of, (), (self,)):
            return self
        return super().to(*args, **kwargs)

    def set_(self, *args: Any, **kwargs: Any) -> DTensor:
        """Take another DTensor's memory and layout, as `torch.nn.utils.parametrize` does.

        Else refused: torch does not ask `__torch_function__` here, and a layout would be belied.
        """
        if len(args) == 1 and not kwargs and isinstance(args[0], DTensor):
            self.data = args[0]
            return self
        raise LayoutError(
            f"set_: the memory of a DTensor is a piece of its layout ({self._layout!r}) and cannot "
            "be replaced; copy with x.copy_(other), or say x.data = other. If torch.distributed."
            "checkpoint.async_save asked: give it async_stager=shardwise.CheckpointStager()"
        )

    # ---- as an object

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with as_local(), torch.no_grad():
            local = self.as_subclass(torch.Tensor)
            text = repr(local.detach())
        name = "Parameter, " if getattr(self, PARAMETER_FLAG, False) else ""
        history = ", requires_grad=True" if self.requires_grad else ""
        return f"DTensor({name}{short_dtype(self.dtype)}{self._layout!r}{history}, local={text})"

    def __format__(self, spec: str) -> str:
        if self.dim() == 0 and not self.is_meta:
            return format(self.item(), spec)
        return object.__format__(self, spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        if not self.is_leaf:
            raise LayoutError(
                "copy.deepcopy: only leaves of the graph can be copied, as in torch; "
                "detach() it, or clone() it to keep its history"
            )
        with as_local(), torch.no_grad():
            result = wrap(self.as_subclass(torch.Tensor).clone(), self._layout)
        result.requires_grad = self.requires_grad
        memo[id(self)] = result
        for name, value in self.__dict__.items():
            if name == PARAMETER_FLAG:
                result.__dict__[name] = value
        if self.grad is not None:
            if self.grad.dtype is not self.dtype:
                result.grad_dtype = self.grad_dtype
            result.grad = self.grad.__deepcopy__(memo)
        return result

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        with as_local(), torch.no_grad():
            local = self.as_subclass(torch.Tensor).detach()
        is_param = getattr(self, PARAMETER_FLAG, False)
        return rebuilt, (local, self._layout, self.requires_grad, is_param)

    def __iter__(self) -> Iterator[Any]:
        if self.dim() == 0:
            raise TypeError("iteration over a 0-d tensor")
        return iter(self.unbind(0))

    # ---- what torch.distributed.checkpoint asks for

    def __create_chunk_list__(self) -> list[Any]:
        """The boxes that this rank holds, in the words of torch's checkpoints."""
        return stored.chunks(stored.boxes_of(self._layout), self._layout.shape)

    def __create_write_items__(self, name: str, tensor: Any) -> list[Any]:
        """What this rank writes to a checkpoint: its piece."""
        boxes = stored.boxes_of(self._layout)
        local = unwrap(self).detach()
        return stored.write_items(name, boxes, self._layout.shape, local, local.stride())

    global_shape = stored.ProtocolField(stored.global_shape)
    global_offsets = stored.ProtocolField(stored.global_offsets)
    local_offsets = stored.ProtocolField(stored.local_offsets)
    local_sizes = stored.ProtocolField(stored.local_sizes)

    def _stored_parts(self) -> list[tuple[Box, Box]]:
        return stored.parts_of(self._layout)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        """Where a checkpoint is read to, or written from."""
        return stored.chunk_at(unwrap(self).detach(), self._layout, index.offset)


def rebuilt(local: torch.Tensor, layout: Layout, requires_grad: bool, is_param: bool) -> DTensor:
    """A DTensor from its pickle."""
    check_shard(local, layout)
    result = wrap(local, layout)
    result.requires_grad = requires_grad
    if is_param:
        setattr(result, PARAMETER_FLAG, True)
    return result


def laid_out(value: torch.Tensor, layout: Layout, argument: str) -> torch.Tensor:
    """A tensor, whose layout may differ, as one in `layout`; a plain one is this rank's piece,
    or the whole tensor."""
    if isinstance(value, DTensor):
        if value._layout is layout:
            return value
        if value._layout.shape != layout.shape:
            raise LayoutError(
                f"{argument}: expected a tensor of shape {tuple(layout.shape)}, "
                f"got {tuple(value.shape)}"
            )
        return wrap_moved(value, layout)
    if tuple(value.shape) == layout.local_shape():
        return wrap(value.view_as(value), layout)
    if tuple(value.shape) == layout.shape:
        whole = wrap(value.view_as(value), Layout(layout.mesh, layout.shape))
        return wrap_moved(whole, layout)
    raise LayoutError(
        f"{argument}: expected this rank's piece, {layout.local_shape()}, or the whole tensor, "
        f"{layout.shape}; got {tuple(value.shape)}"
    )


def wrap_moved(tensor: DTensor, layout: Layout) -> DTensor:
    """The tensor in another layout."""
    local = unwrap(tensor)
    return _as_new(redistribute_local(local, tensor._layout, layout), local, layout)


def _as_new(moved: torch.Tensor, local: torch.Tensor, layout: Layout) -> DTensor:
    """Wrap what a move gave, which is what went in if there was nothing to do."""
    return wrap(moved.view_as(moved) if moved is local else moved, layout)


def _placements(mesh: DeviceMesh, placements: Sequence[Placement] | None) -> Sequence[Placement]:
    if placements is None:
        return [Replicate()] * mesh.ndim
    if isinstance(placements, Sequence) and not isinstance(placements, str):
        return placements
    raise LayoutError(
        f"placements: expected a list of {mesh.ndim}, one per axis of {mesh!r}; got {placements!r}"
    )


# What a pickled DTensor is made of, so that torch.load takes it as it takes torch's own.
torch.serialization.add_safe_globals([rebuilt, Layout, unpickled])
