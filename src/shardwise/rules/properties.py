"""Properties of a tensor that do not depend on its values, answered without planning.

Global properties (shape, number of elements) come from DTensor's own methods; all others are those
of the local shard.
"""

from __future__ import annotations

from types import GetSetDescriptorType
from typing import Any

import torch

from shardwise.dtensor.local_shards import has_short_dims, is_globally_contiguous
from shardwise.dtensor.properties import GlobalProperties, check_whole
from shardwise.dtensor.tensor import DTensor, unwrap
from shardwise.rules.registry import handler, name_of
from shardwise.torch_internals import TensorBase, as_local

_OPERATORS = {"T", "H", "mT", "mH", "real", "imag"}
"""Properties that compute a result, and so have rules."""


@handler(
    "is_complex", "is_floating_point", "is_signed", "is_inference", "is_conj",
    "is_neg", "is_pinned", "is_shared", "is_coalesced", "is_distributed", "is_set_to", "_is_view",
    "_is_zerotensor", "element_size", "storage_offset", "storage_type", "get_device", "dense_dim",
    "sparse_dim", "result_type", "_has_compatible_shallow_copy_type", "__dlpack_device__",
    "share_memory_",
)  # fmt: skip
def of_piece(func: Any, args: Any, kwargs: Any) -> Any:
    # `storage_offset` and `is_set_to` describe the shard's memory. That is safe: `of_memory` does
    # not give that memory to callers. `share_memory_` moves it and keeps its values.
    with as_local():
        return func(*args, **kwargs)


@handler(
    "data_ptr", "const_data_ptr", "storage", "untyped_storage", "_typed_storage",
)  # fmt: skip
def of_memory(func: Any, args: Any, kwargs: Any) -> Any:
    check_whole(name_of(func), args[0])
    with as_local():
        return func(*args, **kwargs)


@handler("is_contiguous")
def is_contiguous(func: Any, args: Any, kwargs: Any) -> Any:
    # The same on every rank: programs decide by it.
    tensor, *rest = args
    with as_local():
        if has_short_dims(tensor._layout):
            return is_globally_contiguous(tensor, tensor._layout, *rest, **kwargs)
        return func(*args, **kwargs)


@handler("is_same_size")
def is_same_size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    first, second = (*args, *kwargs.values())
    return bool(first.shape == second.shape)


@handler("dim_order")
def dim_order(func: Any, args: Any, kwargs: Any) -> Any:
    return func(unwrap(args[0]), *args[1:], **kwargs)


_OWN = {**vars(GlobalProperties), **vars(DTensor)}
"""The properties and methods of DTensor that replace torch's."""


def _own(name: str) -> Any:
    """Return a handler that calls DTensor's own property or method instead of torch's."""
    own = _OWN[name]
    if isinstance(own, property):
        return lambda func, args, kwargs: own.fget(args[0])  # type: ignore[misc]
    return lambda func, args, kwargs: own(*args, **kwargs)


for _name in ("size", "stride", "dim", "ndimension", "numel", "nelement"):
    for _function in (getattr(torch.Tensor, _name), getattr(torch, _name, None)):
        if callable(_function):
            handler(_function)(_own(_name))

for _name, _property in vars(TensorBase).items():
    if not isinstance(_property, GetSetDescriptorType) or _name in _OPERATORS:
        continue
    _is_own = _name in _OWN
    handler(_property.__get__)(_own(_name) if _is_own else of_piece)
    if not _is_own:
        handler(_property.__set__)(of_piece)
