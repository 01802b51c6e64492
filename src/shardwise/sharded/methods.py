"""Torch functions with an implementation for sharded tensors, however they are cut: the table
METHODS, and operators that users register.

Copies and comparisons run shard by shard. Access to memory is refused: only shards have memory.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from shardwise.api import factories
from shardwise.core.errors import ShardedTensorError
from shardwise.core.placement import Replicate
from shardwise.dtensor.writes import check_writable
from shardwise.rules.pointwise.elementwise import names
from shardwise.sharded import autograd, per_shard_ops
from shardwise.sharded.specs import ShardingSpec
from shardwise.sharded.tensor import ShardedTensor

_Tensor: Any = torch.Tensor
Method = Callable[..., Any]


def _call_method(name: str) -> Method:
    """Return a function that calls a method of the class by name."""
    return lambda tensor, *args, **kwargs: getattr(tensor, name)(*args, **kwargs)


# ---- conversions


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Convert a sharded tensor, or convert another tensor to the dtype of one: `tensor.to(x)`."""
    if isinstance(tensor, ShardedTensor):
        return tensor.to(*args, **kwargs)

    def prototype(value: Any) -> Any:
        return value._prototype() if isinstance(value, ShardedTensor) else value

    return tensor.to(
        *map(prototype, args), **{name: prototype(each) for name, each in kwargs.items()}
    )


def _cast(dtype: torch.dtype) -> Method:
    return lambda tensor, memory_format=torch.preserve_format: tensor.to(
        dtype, memory_format=memory_format
    )


def _type_as(tensor: ShardedTensor, other: torch.Tensor) -> ShardedTensor:
    return tensor.to(other.dtype)


def _type(tensor: ShardedTensor, dtype: Any = None, non_blocking: bool = False) -> Any:
    answer = tensor._prototype().type(dtype)
    return answer if dtype is None else tensor.to(answer.dtype, non_blocking=non_blocking)


# ---- memory


def _copy(target: Any, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy into a sharded tensor, or copy a whole sharded tensor into one that every rank has, as
    `load_state_dict` does."""
    if not isinstance(target, ShardedTensor) and isinstance(source, ShardedTensor):
        source = source.full_tensor()
    return target.copy_(source, non_blocking)  # type: ignore[no-any-return]


def _set_data(tensor: ShardedTensor, value: torch.Tensor) -> None:
    if not isinstance(value, ShardedTensor) or value._ownership != tensor._ownership:
        raise ShardedTensorError(
            "data: expected a ShardedTensor with the same shards as this one, got "
            f"{value!r}; x.reshard(spec) cuts one otherwise, x.copy_(other) takes its elements"
        )
    tensor._replace_data(value)


def _can_set_data(tensor: Any, other: Any) -> bool:
    """Return whether `tensor.data = other` is possible, as `Module.to` asks."""
    are_sharded = isinstance(tensor, ShardedTensor) and isinstance(other, ShardedTensor)
    return are_sharded and other._ownership == tensor._ownership


def _in_place(name: str) -> Method:
    """Return a function that calls an in-place method of each shard."""

    def run(tensor: ShardedTensor, *args: Any, **kwargs: Any) -> ShardedTensor:
        for each in tensor._tensors_or_placeholder():
            check_writable(name, each)
            getattr(each, name)(*args, **kwargs)
        return tensor

    return run


def _fill(tensor: torch.Tensor, value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        return _in_place("fill_")(tensor, value)  # type: ignore[no-any-return]
    if value.dim() > 0:
        raise ShardedTensorError(
            f"fill_: expected a number or a tensor of 0 dims, got one of size {tuple(value.shape)}"
        )
    return _copy(tensor, value)


def _is_shared(tensor: ShardedTensor) -> bool:
    parts: list[Any] = tensor._tensors_or_placeholder()
    return all(each.is_shared() for each in parts)


def _contiguous(tensor: ShardedTensor, memory_format: Any = torch.contiguous_format) -> Any:
    pieces = [each.contiguous(memory_format=memory_format) for each in tensor._local_tensors()]
    return tensor._with_tensors(pieces)


def _view_as(tensor: Any, other: torch.Tensor) -> Any:
    """Return an alias of every shard, if the shape is the same."""
    if not isinstance(tensor, ShardedTensor) or other.shape != tensor.shape:
        return NotImplemented
    return tensor._with_tensors([each.view_as(each) for each in tensor._local_tensors()])


def _refuse(name: str) -> Method:
    """Return a function that refuses access to memory."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise ShardedTensorError(
            f"{name}: a ShardedTensor has no memory of its own but that of its shards; "
            f"ask them: x.local_shards()[i].tensor.{name}. If torch.distributed."
            "checkpoint.async_save asked: give it async_stager=shardwise.CheckpointStager()"
        )

    return refuse


_MEMORY = names("""
    data_ptr storage storage_type untyped_storage _typed_storage set_ resize_ resize_as_ is_set_to
""")


# ---- new tensors


def _new(name: str) -> Method:
    """Return a method that makes a tensor of another size, with the same dtype and device, the same
    on every rank.

    The result of `new_empty` is a replicated DTensor, so that random numbers that are drawn into
    it, as by `torch.nn.init.orthogonal_`, are the same on every rank too.
    """

    def make(tensor: ShardedTensor, *args: Any, **kwargs: Any) -> Any:
        mesh = tensor._group.mesh(tensor.device.type)
        model = factories.empty(0, dtype=tensor.dtype, device_mesh=mesh, placements=[Replicate()])
        result = getattr(model, name)(*args, **kwargs)
        return result if name == "new_empty" else result.full_tensor()

    return make


METHODS: dict[Any, Method] = {
    **{getattr(_Tensor, name): _call_method(name) for name in names("""
        cpu cuda pin_memory is_pinned clone detach requires_grad_ __deepcopy__
        __reduce_ex__ __repr__ __format__ __hash__
    """)},
    _Tensor.to: _to,
    _Tensor.copy_: _copy,
    torch.clone: _call_method("clone"),
    torch.detach: _call_method("detach"),
    **{
        getattr(_Tensor, dtype): _cast(getattr(torch, dtype))
        for dtype in names("float double half bfloat16 int long short bool cfloat cdouble")
    },
    _Tensor.char: _cast(torch.int8),
    _Tensor.byte: _cast(torch.uint8),
    _Tensor.type_as: _type_as,
    _Tensor.type: _type,
    _Tensor.data.__get__: _call_method("detach"),
    _Tensor.data.__set__: _set_data,
    torch._has_compatible_shallow_copy_type: _can_set_data,
    _Tensor.contiguous: _contiguous,
    _Tensor.view_as: _view_as,
    _Tensor.share_memory_: _in_place("share_memory_"),
    _Tensor.is_shared: _is_shared,
    _Tensor.apply_: _in_place("apply_"),
    **{getattr(_Tensor, name): _refuse(name) for name in _MEMORY},
    **{getattr(_Tensor, name): _new(name) for name in names("""
        new_empty new_zeros new_ones new_full new_tensor
    """)},
    **{where.zero_: _in_place("zero_") for where in (torch, _Tensor)},
    **{where.fill_: _fill for where in (torch, _Tensor)},
    **{each: per_shard_ops.make_like(each) for each in per_shard_ops.MAKES_LIKE},
    **{where.is_same_size: per_shard_ops.is_same_size for where in (torch, _Tensor)},
    torch.equal: per_shard_ops.equal,
    _Tensor.equal: per_shard_ops.equal,
    torch.allclose: per_shard_ops.allclose,
    _Tensor.allclose: per_shard_ops.allclose,
    _Tensor.backward: autograd.backward_of,
    torch.autograd.backward: autograd.backward,
    torch.autograd.grad: autograd.grad,
    _Tensor.register_hook: autograd.register_hook,
    _Tensor.register_post_accumulate_grad_hook: autograd.register_post_accumulate_grad_hook,
    _Tensor.retain_grad: autograd.retain_grad,
    _Tensor.retains_grad.__get__: autograd.retains_grad,
    _Tensor.grad_fn.__get__: autograd.grad_fn,
    _Tensor.detach_: autograd.detach_,
    torch.detach_: autograd.detach_,
}  # fmt: skip
"""By torch function. Each is called as the torch function is, if a sharded tensor is its input, or
a list in its place. NotImplemented leaves the call to the rules."""


# ---- operators that users register

Operator = Callable[..., Any]
Register = Callable[[Operator], Operator]

_for_all: dict[Any, Operator] = {}
_for_specs: dict[tuple[type, Any], Operator] = {}


def custom_sharded_op_impl(func: Any) -> Register:
    """Register a function to run when a torch function is called with a ShardedTensor.

    It takes precedence over all built-in implementations.

    Arguments:
        func: the torch function, such as `torch.nn.functional.linear`.

    Example:
        >>> @custom_sharded_op_impl(torch.nn.functional.linear)
        ... def my_linear(types, args, kwargs, process_group): ...
    """
    return functools.partial(_register, _for_all, func)


def custom_sharding_spec_op(sharding_spec_class: type[ShardingSpec], func: Any) -> Register:
    """Register a function to run when a torch function is called with a ShardedTensor of one class
    of specs.

    Arguments:
        sharding_spec_class: the class of the spec of the first ShardedTensor of the call.
        func: the torch function.
    """
    if not (
        isinstance(sharding_spec_class, type) and issubclass(sharding_spec_class, ShardingSpec)
    ):
        raise ShardedTensorError(
            f"sharding_spec_class: expected a class of specs, got {sharding_spec_class!r}"
        )
    return functools.partial(_register, _for_specs, (sharding_spec_class, func))


def _register(table: dict[Any, Operator], key: Any, operator: Operator) -> Operator:
    parameters = inspect.signature(operator).parameters
    if len(parameters) != 4:
        raise ShardedTensorError(
            "expected a function of (types, args, kwargs, process_group), "
            f"got {getattr(operator, '__name__', operator)}({', '.join(parameters)})"
        )
    table[key] = operator
    return operator


def has_custom_op(func: Any) -> bool:
    """Return whether a user has registered an operator for a function, for any spec."""
    return func in _for_all or any(func == each for _, each in _for_specs)


def find_custom_op(func: Any, spec: ShardingSpec) -> Operator | None:
    """Return the operator that a user has registered for a function of tensors of this spec, or
    None."""
    if not _for_all and not _for_specs:
        return None
    found = _for_all.get(func)
    if found is None:
        kinds = (_for_specs.get((kind, func)) for kind in type(spec).__mro__)
        found = next(filter(None, kinds), None)
    return found
