"""DTensor: the local shard, re-typed, with one attribute: the layout of the global tensor.

C++ (autograd, kernels, storage) sees an ordinary local tensor. Python sees the global one: shape
and sizes are properties that read the layout, and every torch function goes through
`shardwise.dispatch`, which gives the class its `__torch_function__`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from shardwise.comm import Pending, carries_values
from shardwise.core.box import Box
from shardwise.core.errors import LayoutError, also
from shardwise.core.layout import Layout
from shardwise.core.layout_input import short_dtype
from shardwise.core.mesh import DeviceMesh, as_mesh, mesh_or_current, unpickled
from shardwise.core.placement import Placement, Replicate
from shardwise.core.tensor_state import ATTRIBUTE, TensorState, ensure_state, forget_moves
from shardwise.dtensor import dcp
from shardwise.dtensor.dtensor_spec import DTensorSpec, layout_of_spec
from shardwise.dtensor.local_shards import (
    check_class,
    check_pickled,
    check_replicas,
    check_shard,
    check_supported,
    state_layout,
    waited,
)
from shardwise.dtensor.properties import GlobalProperties, NoExchangeApi, check_whole
from shardwise.dtensor.shard_sizes import guess_layout, infer_layout, note_origin
from shardwise.redistribute import accumulate
from shardwise.redistribute.autograd import (
    redistribute_later,
    redistribute_local,
    with_grad_layout,
)
from shardwise.redistribute.cost import communicates
from shardwise.redistribute.plan import gradient_layout, with_placements
from shardwise.torch_internals import (
    PARAMETER_FLAG,
    TensorBase,
    as_local,
    base_of,
    locally,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

_Kind = TypeVar("_Kind", bound=torch.Tensor)
_grad_of: Any = TensorBase.grad.__get__
_device_of: Any = TensorBase.device.__get__


def wrap(local: torch.Tensor, layout: Layout) -> DTensor:
    """Re-type a new local tensor, which nobody else may hold, as the DTensor with this shard."""
    local.__class__ = DTensor
    local._layout = layout  # type: ignore[attr-defined]
    return local  # type: ignore[return-value]


GRADIENT_SOURCE = "_gradient_source"
"""The attribute of a parameter that is not in the graph itself, because modules compute with
another tensor, as with FSDP: an object that gives that tensor, and reduces its gradient."""


def unwrap(tensor: DTensor) -> torch.Tensor:
    """Return this rank's shard as a plain tensor: a differentiable alias with the same gradient."""
    if type(tensor) is not DTensor:
        tensor._renew()
    with as_local():
        return tensor._as_subclass(torch.Tensor)  # type: ignore[no-any-return]


def find_detaching_operator(tensor: torch.Tensor) -> str | None:
    """Return the operator that made a tensor, or its base, a copy where torch would return a view.

    None for an ordinary tensor. Runs within `as_local()`.
    """
    # Every in-place operator runs this: `state_of`, without its frames.
    notes = tensor.__dict__.get(ATTRIBUTE)
    if type(notes) is not TensorState or notes.detached_by is None:
        base = base_of(tensor)
        notes = None if base is None else base.__dict__.get(ATTRIBUTE)
    return notes.detached_by if type(notes) is TensorState else None


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in arguments or results, in order; lists, tuples and dicts are searched."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


class DTensor(GlobalProperties):
    """A tensor on a device mesh. `from_local`, `distribute_tensor` and the factories make it.

    Shapes, sizes and results are those of the global tensor; `to_local()` is this rank's shard.

    Example:
        >>> x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
        >>> x.shape, x.to_local().shape, (x * 2).sum().item()
        (torch.Size([8]), torch.Size([4]), 56.0)
    """

    _waiting: ClassVar[Callable[[torch.Tensor, Layout, Pending[torch.Tensor]], DTensor]]
    """Makes a tensor whose data are under way. Set by `kinds`, which lies above."""
    _outside: ClassVar[Callable[..., DTensor]]
    """Makes the tensor of a rank outside of the mesh. Set by `kinds`."""

    def __new__(
        cls, local_tensor: torch.Tensor, spec: Any, *, requires_grad: bool = False
    ) -> DTensor:
        """Make a leaf of a local tensor, as torch's private constructor does.

        `DTensor.from_local` makes a differentiable one.

        Arguments:
            local_tensor: this rank's shard. The result shares its memory, not its history.
            spec: a `DTensorSpec`, of shardwise or torch, with its `tensor_meta`.
            requires_grad: whether gradients are recorded for the result.
        """
        _check_plain("local_tensor", local_tensor)
        layout = layout_of_spec(spec)
        if layout.mesh.get_coordinate() is None:
            return DTensor._outside(layout, local_tensor.detach(), requires_grad=requires_grad)
        check_shard(local_tensor, layout)
        result = wrap(local_tensor.detach(), layout)
        result.requires_grad = requires_grad
        return result

    # ---- conversions and moves

    @staticmethod
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh | TorchMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Sequence[Placement] | None = None,
    ) -> DTensor:
        """Make a DTensor of the shards that the ranks hold; differentiable.

        Forward: nothing moves. Backward: the gradient moves to `grad_placements`.

        Arguments:
            local_tensor: this rank's shard. The result shares its memory. On a rank outside of the
                mesh the result has no data.
            device_mesh: the mesh of the ranks; by default that of `with mesh:`.
            placements: one per axis of the mesh; all `Replicate()` by default.
            run_check: check on all ranks that shapes and dtypes fit, and that replicas are equal
                (they are compared, never overwritten).
            shape: the global shape. Without it, if a dim is split, the ranks exchange their sizes,
                so that the shape is right for uneven shards, too.
            stride: accepted because torch does; strides follow from the local tensor.
            grad_placements: the placements of the gradient of `local_tensor`; by default those of
                the shards, with pending sums reduced. `Partial()` where the tensor is not split:
                each rank gets its own contribution, and nothing is summed.
        """
        mesh = mesh_or_current(device_mesh)
        local_tensor = waited(local_tensor)
        _check_plain("local_tensor", local_tensor)
        placements = _placements(mesh, placements)
        if mesh.get_coordinate() is None:
            layout = guess_layout(local_tensor, mesh, placements, shape)
            return DTensor._outside(layout, local_tensor)
        if shape is None:
            layout = infer_layout(local_tensor, mesh, placements)
        else:
            layout = Layout.from_placements(mesh, shape, placements)
            check_shard(local_tensor, layout)
            state_layout(layout)
        if run_check:
            check_replicas(local_tensor, layout)
        back = gradient_layout(layout)
        wanted = back
        if grad_placements is not None:
            wanted = Layout.from_placements(mesh, layout.shape, grad_placements)
            _check_same_shards(wanted, layout)
        return wrap(with_grad_layout(local_tensor, back, wanted), layout)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return this rank's shard, sharing memory; differentiable.

        Forward: nothing moves. Backward: the gradient moves from `grad_placements`.

        Arguments:
            grad_placements: the placements of the gradient of the result; by default those of this
                tensor, with pending sums reduced.
        """
        layout = self._layout
        local = unwrap(self)
        if local.requires_grad and not torch.is_grad_enabled():
            local = local.detach()
        if grad_placements is not None:
            given = Layout.from_placements(layout.mesh, layout.shape, grad_placements)
            _check_same_shards(given, layout)
            local = with_grad_layout(local, given, gradient_layout(layout))
        if PARAMETER_FLAG in self.__dict__:  # as in torch, isinstance(local, nn.Parameter)
            setattr(local, PARAMETER_FLAG, self.__dict__[PARAMETER_FLAG])
        note_origin(local, layout)
        return local

    @property
    def _local_tensor(self) -> torch.Tensor:
        """This rank's shard, sharing memory, without its history; torch's private name for it."""
        return unwrap(self).detach()

    @_local_tensor.setter
    def _local_tensor(self, value: torch.Tensor) -> None:
        _check_plain("_local_tensor", value)
        check_shard(value, self._layout)
        self.data = wrap(value.detach(), self._layout)

    @property
    def _spec(self) -> DTensorSpec:
        """The mesh, placements, shape, strides and dtype, in torch's terms; its private name."""
        return DTensorSpec.of(self._layout, self.stride(), self.dtype)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return the whole tensor, on every rank; differentiable.

        Forward: gather and reduce. Backward: the gradient moves from `grad_placements` to the
        layout of this tensor.

        Arguments:
            grad_placements: the placements of the gradient of the result, such as `[Partial()]` if
                the gradient of each rank is a contribution; by default it is the same on every
                rank.
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
    ) -> DTensor:
        """Return the same tensor in another layout; differentiable.

        Forward: the cheapest plan between the two layouts. Backward: the plan between their duals.

        Arguments:
            device_mesh: the mesh of the result; by default that of this tensor.
            placements: the placements of the result; all `Replicate()` by default.
            async_op: return at once. The result waits for its data when it is first used; `wait()`
                waits now. The collectives of a dropped result are completed as well.
            forward_dtype: the dtype that is sent, and that of the result.
            backward_dtype: the dtype that is sent backward; the gradient has this tensor's dtype.
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
            target = with_placements(source, wanted)
        else:
            target = Layout.from_placements(mesh, source.shape, wanted, shard_order)
        local = unwrap(self)
        if type(self) is not DTensor and _is_outside(source, target):
            return DTensor._outside(target, local, dtype=forward_dtype)
        if target is source and forward_dtype is None and backward_dtype is None:
            return wrap(local, source)
        if async_op and carries_values(mesh) and communicates(source, target):
            dtypes = forward_dtype, backward_dtype
            moved, started = redistribute_later(local, source, target, *dtypes)
            return DTensor._waiting(moved, target, started)
        moved = redistribute_local(
            local,
            source,
            target,
            forward_dtype=forward_dtype,
            backward_dtype=backward_dtype,
        )
        if mesh is not source.mesh and mesh.get_coordinate() is None:
            return DTensor._outside(target, moved)
        return _as_new(moved, local, target)

    def wait(self) -> DTensor:
        """Wait for the data, if they are under way (`redistribute(async_op=True)`); return it."""
        self._renew()
        return self

    # ---- gradients and data

    @property
    def grad(self) -> DTensor | None:
        """The gradient, in the layout of this tensor, with pending sums reduced."""
        if accumulate.current.accumulation is not None:
            self._complete_gradient(accumulate.current.accumulation)
        local = locally(_grad_of, (), (self,))
        if local is None:
            return None
        layout = self._layout
        if layout.partial:
            layout = gradient_layout(layout)
        if type(local) is DTensor:
            if local._layout is layout:
                return local
            with as_local():  # autograd may give one tensor to two leaves
                local = local.view_as(local)
        ensure_state(local).is_gradient = True
        return wrap(local, layout)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if accumulate.current.accumulation is not None:
            self._complete_source()  # what FSDP has put off ends in the gradient that is replaced
            accumulate.current.accumulation.forget(self)
        if value is not None:
            value = as_layout(value, gradient_layout(self._layout), "grad")
            notes = ensure_state(value)
            if notes.link is not None:
                raise LayoutError(
                    "grad: this tensor is a part of another one, and of a dim that was split: what "
                    "backward adds to it would not reach that; clone() it"
                )
            notes.is_gradient = True
        with as_local():
            TensorBase.grad.__set__(self, value)

    def _complete_gradient(self, accumulation: accumulate.Accumulation) -> None:
        """Reduce the gradient that `accumulate()` has put off, as somebody reads it."""
        self._complete_source()
        with torch.inference_mode(False):  # later backwards add to it
            accumulation.complete(self)

    def _complete_source(self) -> None:
        source = getattr(self, GRADIENT_SOURCE, None)
        if source is not None:
            with torch.inference_mode(False):
                source.complete()

    @property
    def data(self) -> DTensor:
        """The tensor without its history, sharing memory."""
        if self._layout.partial:  # a write to the result does not change the tensor's version
            forget_moves(self)
        with as_local():
            result = wrap(TensorBase.data.__get__(self), self._layout)
            detached_by = find_detaching_operator(self)
        if detached_by is not None:
            ensure_state(result).detached_by = detached_by
        return result

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        layout = value._layout if isinstance(value, DTensor) else self._layout
        value = value.wait() if isinstance(value, DTensor) else as_layout(value, layout, "data")
        forget_moves(self)
        with as_local():
            TensorBase.data.__set__(self, value)
        self._layout = layout

    def _renew(self) -> None:
        """Bring it up to date. Only a `ViewCopy` and a `WaitingDTensor` can be out of date, and
        override this."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Convert as `torch.Tensor.to` does; return itself at once for the device it is on."""
        asks_device = len(args) == 1 and not kwargs and type(args[0]) is torch.device
        if asks_device and args[0] == locally(_device_of, (), (self,)):
            return self
        return super().to(*args, **kwargs)

    _as_subclass: Any = TensorBase.as_subclass
    """Torch's method: this rank's shard in another class. It does not call `__torch_function__`."""

    def as_subclass(self, cls: type[_Kind]) -> _Kind:
        """Return a tensor of another class with the same memory; only if each shard is whole."""
        check_whole("as_subclass", self)
        self._renew()
        return self._as_subclass(cls)  # type: ignore[no-any-return]

    def set_(self, *args: Any, **kwargs: Any) -> DTensor:
        """Take another DTensor's memory and layout, as `torch.nn.utils.parametrize` does.

        Other arguments are refused: torch does not call `__torch_function__` here, and set_ would
        make the layout wrong.
        """
        if len(args) == 1 and not kwargs and isinstance(args[0], DTensor):
            self.data = args[0]
            return self
        raise LayoutError(
            f"set_: the memory of a DTensor is a piece of its layout ({self._layout!r}) and cannot "
            "be replaced; copy with x.copy_(other), or say x.data = other. If torch.distributed."
            "checkpoint.async_save asked: give it async_stager=shardwise.CheckpointStager()"
        )

    __dlpack_c_exchange_api__ = NoExchangeApi()

    # ---- as an object

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with as_local(), torch.no_grad():
            local = self._as_subclass(torch.Tensor)
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
            result = wrap(self._as_subclass(torch.Tensor).clone(), self._layout)
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
            local = self._as_subclass(torch.Tensor).detach()
        is_param = getattr(self, PARAMETER_FLAG, False)
        place = self._layout.mesh.get_coordinate()
        return rebuilt, (local, self._layout, self.requires_grad, is_param, place)

    def __iter__(self) -> Iterator[Any]:
        if self.dim() == 0:
            raise TypeError("iteration over a 0-d tensor")
        return iter(self.unbind(0))

    # ---- the protocol of torch.distributed.checkpoint

    def __create_chunk_list__(self) -> list[Any]:
        """List the boxes that this rank holds, as torch's checkpoints describe them."""
        return dcp.chunks(dcp.boxes_of(self._layout), self._layout.shape)

    def __create_write_items__(self, name: str, tensor: Any) -> list[Any]:
        """List the items that this rank writes to a checkpoint: its shard."""
        boxes = dcp.boxes_of(self._layout)
        local = unwrap(self).detach()
        return dcp.write_items(name, boxes, self._layout.shape, local, local.stride())

    global_shape = dcp.ProtocolField(dcp.global_shape)
    global_offsets = dcp.ProtocolField(dcp.global_offsets)
    local_offsets = dcp.ProtocolField(dcp.local_offsets)
    local_sizes = dcp.ProtocolField(dcp.local_sizes)

    def _stored_parts(self) -> list[tuple[Box, Box]]:
        return dcp.parts_of(self._layout)

    def _staged(self, copied: Callable[[torch.Tensor], torch.Tensor]) -> DTensor:
        """Return the same tensor made of a copy of this rank's shard, as `async_save` stores it."""
        return wrap(copied(unwrap(self).detach()), self._layout)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        """Return the memory that a checkpoint is read into, or written from."""
        return dcp.chunk_at(unwrap(self).detach(), self._layout, index.offset)


def rebuilt(
    local: torch.Tensor,
    layout: Layout,
    requires_grad: bool,
    is_param: bool,
    place: tuple[int, ...] | None,
) -> DTensor:
    """Make a DTensor from its pickle, on the rank at the same place of the mesh."""
    check_pickled(local, layout, place)
    if place is None:
        result = DTensor._outside(layout, local)
    else:
        result = wrap(local, layout)
    result.requires_grad = requires_grad
    if is_param:
        setattr(result, PARAMETER_FLAG, True)
    return result


def as_layout(value: torch.Tensor, layout: Layout, argument: str) -> torch.Tensor:
    """Return a value as a tensor in `layout`.

    A DTensor is moved. A plain tensor is taken as this rank's shard or as the whole tensor.

    Arguments:
        argument: the name of the value in messages.
    """
    if isinstance(value, DTensor):
        if value._layout is layout:
            return value.wait()
        if value._layout.shape != layout.shape:
            raise LayoutError(
                f"{argument}: expected a tensor of shape {tuple(layout.shape)}, "
                f"got {tuple(value.shape)}"
            )
        return redistribute_to(value, layout)
    value = waited(value)
    check_class(argument, value)
    if tuple(value.shape) == layout.local_shape():
        return wrap(value.view_as(value), layout)
    if tuple(value.shape) == layout.shape:
        whole = wrap(value.view_as(value), Layout(layout.mesh, layout.shape))
        return redistribute_to(whole, layout)
    raise LayoutError(
        f"{argument}: expected this rank's piece, {layout.local_shape()}, or the whole tensor, "
        f"{layout.shape}; got {tuple(value.shape)}"
    )


def redistribute_to(tensor: DTensor, layout: Layout) -> DTensor:
    """Return a DTensor in another layout of the same shape; differentiable."""
    local = unwrap(tensor)
    if type(tensor) is not DTensor and _is_outside(tensor._layout, layout):
        return DTensor._outside(layout, local)
    return _as_new(redistribute_local(local, tensor._layout, layout), local, layout)


def _is_outside(source: Layout, target: Layout) -> bool:
    """Tell whether a move takes place on one mesh, which this rank is not in."""
    return source.mesh is target.mesh and target.mesh.get_coordinate() is None


def _as_new(moved: torch.Tensor, local: torch.Tensor, layout: Layout) -> DTensor:
    """Wrap the result of a move, which is the input itself if nothing had to move."""
    return wrap(moved.view_as(moved) if moved is local else moved, layout)


def _check_plain(argument: str, tensor: Any) -> None:
    """Refuse a local tensor that is none, or that cannot be a shard."""
    if isinstance(tensor, DTensor):
        raise LayoutError(f"{argument}: expected a plain tensor, got a DTensor: it is one already")
    if not isinstance(tensor, torch.Tensor):
        raise also(LayoutError, AttributeError)(
            f"{argument}: expected a plain tensor, got {type(tensor).__name__}"
        )
    check_supported(argument, tensor)


def _check_same_shards(gradient: Layout, layout: Layout) -> None:
    """Refuse a layout of a gradient whose shards have other shapes than those of the tensor."""
    sizes = layout.mesh.shape
    splits = [
        [[axis for axis in axes if sizes[axis] > 1] for axes in each.shard_order]
        for each in (gradient, layout)
    ]
    if splits[0] != splits[1] or gradient.cuts != layout.cuts:
        raise LayoutError(
            f"grad_placements: expected the same dims to be split as in {layout!r}, as a local "
            f"tensor and its gradient have one shape; got {gradient.placements}. Replicate() and "
            "Partial() may differ"
        )


def _placements(mesh: DeviceMesh, placements: Sequence[Placement] | None) -> Sequence[Placement]:
    if placements is None:
        return [Replicate()] * mesh.ndim
    if isinstance(placements, Sequence) and not isinstance(placements, str):
        return placements
    raise also(LayoutError, TypeError)(
        f"placements: expected a list of {mesh.ndim}, one per axis of {mesh!r}; got {placements!r}"
    )


# The parts of a pickled DTensor: torch.load accepts it as it accepts torch's own.
torch.serialization.add_safe_globals([rebuilt, Layout, unpickled])
