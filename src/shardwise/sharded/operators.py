"""Torch functions on sharded tensors.

In this order: what is read off the description; what a user has registered; what goes shard by
shard however the tensor is cut (copies, comparisons); everything else as DTensors, where the shards
are a layout, by the rules of `shardwise.rules`; where they are not, pointwise functions shard by
shard, and random numbers by way of a layout. The rest says what to reshard to.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch.nn import functional as F

from shardwise.dispatch.arguments import check_same
from shardwise.dispatch.state import state
from shardwise.rules.calls import tensors_in
from shardwise.rules.registry import name_of
from shardwise.sharded import as_dtensors, comparing, converting, filling, pointwise
from shardwise.sharded.errors import ShardedTensorError
from shardwise.sharded.registered import registered
from shardwise.sharded.tensor import ShardedTensor
from shardwise.tensor import locally


def dispatch(
    cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    """What `__torch_function__` does: run `func` on sharded tensors."""
    kwargs = kwargs or {}
    if func in _DESCRIBED:
        return locally(func, types, args, kwargs)
    tensors = [each for each in tensors_in((args, kwargs)) if isinstance(each, ShardedTensor)]
    if not tensors:
        return locally(func, types, args, kwargs)
    first = tensors[0]
    custom = registered(func, first._sharding_spec)
    if custom is not None:
        return custom(types, args, kwargs, first._process_group)
    own = _OWN.get(func)
    if own is not None and args and isinstance(args[0], ShardedTensor):
        return own(*args, **kwargs)
    _check_groups(func, tensors)
    if func in _LOOKUPS:
        _check_indices(func, args, kwargs, first)
    layouts = [converting.layout_of(each) for each in tensors]
    if all(each is not None and each.mesh is layouts[0].mesh for each in layouts):  # type: ignore[union-attr]
        return as_dtensors.run(func, args, kwargs, first)
    result = pointwise.run(func, args, kwargs, tensors)
    if result is NotImplemented:
        result = filling.run(func, args, kwargs, first)
    if result is NotImplemented:
        raise _refusal(func, tensors)
    return result


def _check_groups(func: Any, tensors: list[ShardedTensor]) -> None:
    ranks = tensors[0]._group.ranks
    for each in tensors:
        if each._group.ranks != ranks:
            raise ShardedTensorError(
                f"{name_of(func)}: expected sharded tensors of one process group, got one of "
                f"ranks {ranks} and one of {each._group.ranks}"
            )


_LOOKUPS = {F.embedding, F.embedding_bag, torch.embedding, torch.embedding_bag}


def _check_indices(func: Any, args: Any, kwargs: Any, weight: ShardedTensor) -> None:
    """Refuse plain indices that are not the same on every rank.

    Elsewhere in torch each rank looks up indices of its own in a sharded table; here a plain tensor
    is the same on every rank, and one that is not would silently give wrong rows.
    """
    if state.plain_tensors != "assume":
        return  # looked at by the dispatch of DTensors
    for each in tensors_in((args, kwargs)):
        if type(each) is torch.Tensor and not each.is_floating_point():
            check_same(name_of(func), each, weight._group.mesh(weight.device.type))


def _refusal(func: Any, tensors: list[ShardedTensor]) -> ShardedTensorError:
    odd = next((each for each in tensors if converting.layout_of(each) is None), None)
    if odd is not None:
        return ShardedTensorError(
            f"{name_of(func)}: needs shards that are a layout of a DTensor, and those of "
            f"{odd._sharding_spec} are not: only pointwise functions work shard by shard; "
            f"x.reshard({converting.suggested(odd)}) makes them so"
        )
    return ShardedTensorError(
        f"{name_of(func)}: got sharded tensors whose shards lie on different ranks; reshard one to "
        f"the other's spec: x.reshard({tensors[0]._sharding_spec})"
    )


# ---- what is read off the description


def _getters(*names: str) -> set[Any]:
    return {getattr(torch.Tensor, name).__get__ for name in names}


_DESCRIBED: set[Any] = {
    *_getters(
        *[
            "shape",
            "dtype",
            "layout",
            "ndim",
            "itemsize",
            "is_sparse",
            "is_sparse_csr",
            "is_quantized",
            "is_meta",
            "is_nested",
            "is_mkldnn",
            "is_cuda",
            "is_cpu",
            "is_xpu",
            "is_mps",
            "grad_fn",
            "output_nr",
            "_version",
            "_base",
            "is_ipu",
            "is_maia",
            "is_mtia",
            "is_vulkan",
            "is_xla",
            "retains_grad",
            "nbytes",
            "requires_grad",
        ]
    ),
    torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
    *(
        getattr(torch.Tensor, name)
        for name in [
            "size",
            "dim",
            "ndimension",
            "numel",
            "nelement",
            "element_size",
            "is_floating_point",
            "is_complex",
            "is_signed",
            "is_contiguous",
            "stride",
            "storage_offset",
            "is_inference",
            "is_conj",
            "is_neg",
            "is_same_size",
            "dim_order",
            "__len__",
            "_is_view",
            "is_coalesced",
            "get_device",
        ]
    ),
    torch.numel,
    torch.is_floating_point,
    torch.is_complex,
    torch.is_same_size,
    torch.is_inference,
    torch.is_nonzero,
}


# ---- what goes shard by shard, however the tensor is cut


def _method(name: str) -> Callable[..., Any]:
    """The class's own method, also where the function is called another way."""
    return lambda tensor, *args, **kwargs: getattr(tensor, name)(*args, **kwargs)


def _cast(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda tensor, memory_format=torch.preserve_format: tensor.to(
        dtype, memory_format=memory_format
    )


def _type_as(tensor: ShardedTensor, other: torch.Tensor) -> ShardedTensor:
    return tensor.to(other.dtype)


_OWN: dict[Any, Callable[..., Any]] = {
    **{
        getattr(where, name): _method(name)
        for name in ("clone", "detach")
        for where in (torch, torch.Tensor)
    },
    **{
        getattr(torch.Tensor, name): _method(name)
        for name in [
            "to",
            "cpu",
            "cuda",
            "pin_memory",
            "is_pinned",
            "requires_grad_",
            "copy_",
            "__deepcopy__",
            "__reduce_ex__",
            "__repr__",
            "__format__",
            "__hash__",
        ]
    },
    **{
        getattr(torch.Tensor, dtype): _cast(getattr(torch, dtype))
        for dtype in ["float", "double", "half", "bfloat16", "int", "long", "short", "bool"]
    },
    torch.Tensor.char: _cast(torch.int8),
    torch.Tensor.byte: _cast(torch.uint8),
    torch.Tensor.type_as: _type_as,
    torch.Tensor.data.__get__: _method("detach"),  # type: ignore[attr-defined]
    **{each: filling.like(each) for each in filling.LIKE},
    torch.equal: comparing.equal,
    torch.Tensor.equal: comparing.equal,
    torch.allclose: comparing.allclose,
    torch.Tensor.allclose: comparing.allclose,
}

ShardedTensor.__torch_function__ = MethodType(dispatch, ShardedTensor)  # type: ignore[method-assign]
