"""Private names of torch: tensors, and the graph of autograd."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch

from shardwise.torch_internals.lookup import getter as _getter
from shardwise.torch_internals.lookup import take as _take

# ---- tensors: the shard below a DTensor

TensorBase: Any = _take(
    "torch._C.TensorBase", "the C class of tensors: its properties are those of the shard"
)
as_local: Any = _take("torch._C.DisableTorchFunctionSubclass", "within, torch functions see shards")
without_torch_function: Any = _take(
    "torch._C.DisableTorchFunction", "within, no mode and no subclass sees a call"
)
locally: Any = _take(
    "torch._C._disabled_torch_function_impl",
    "`locally(function, (), arguments)` is `with as_local(): function(*arguments)`, and faster",
)
is_torch_function_enabled: Callable[[], bool] = _take(
    "torch._C._is_torch_function_enabled", "false within `as_local()`"
)
is_torch_function_mode_enabled: Callable[[], bool] = _take(
    "torch._C._is_torch_function_mode_enabled", "whether a mode sees calls of torch functions"
)
base_of: Callable[[torch.Tensor], Any] = _getter(
    "torch._C.TensorBase._base", "the tensor that a view was taken of"
)
version_of: Callable[[torch.Tensor], int] = _getter(
    "torch._C.TensorBase._version", "how often the memory was written to"
)
backward_hooks_of: Callable[[torch.Tensor], Any] = _getter(
    "torch._C.TensorBase._backward_hooks", "the hooks of a tensor; None if it has none"
)
post_accumulate_hooks_of: Callable[[torch.Tensor], Any] = _getter(
    "torch._C.TensorBase._post_accumulate_grad_hooks",
    "the same for hooks that run after accumulation",
)
HOOK_ATTRIBUTES = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""The attributes to copy to a tensor that takes another's place."""
PARAMETER_FLAG = "_is_param"
"""The attribute by which `isinstance(x, nn.Parameter)` recognizes a parameter of a subclass."""


def has_own_grad_dtype(parameter: Any) -> bool:
    """Tell whether a `grad_dtype` was set on a parameter.

    Before torch 2.15, False also for a `grad_dtype` that is the parameter's own dtype.
    """
    is_set = getattr(parameter, "_has_grad_dtype_override", None)
    return parameter.grad_dtype is not parameter.dtype if is_set is None else bool(is_set)


make_wrapper_subclass: Any = _take(
    "torch.Tensor._make_wrapper_subclass", "a tensor with a size and no memory"
)
is_zero_tensor: Callable[[torch.Tensor], bool] = _take(
    "torch.Tensor._is_zerotensor", "whether autograd represents zeros without memory"
)
_storage_use_count: Any = _take(
    "torch._C._storage_Use_Count", "the number of tensors that hold a memory"
)
_take("torch.UntypedStorage._cdata", "the address of a storage's C object, its identity")
dtypes_without_typed_storage: Any = _take(
    "torch.storage._new_dtypes", "the dtypes that a typed storage cannot pickle"
)


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return a number that two storages share only if they are one memory."""
    return cast(int, storage._cdata)


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """Return the number of tensors and storages in C++ that hold this memory."""
    return cast(int, _storage_use_count(storage._cdata))


# ---- autograd

_is_key_excluded: Callable[[Any], bool] = _take(
    "torch._C._dispatch_tls_is_dispatch_key_excluded", "whether C++ calls us below autograd"
)
_AUTOGRAD: Any = _take("torch._C.DispatchKey.AutogradFunctionality", "the key asked for")
current_graph_task: Callable[[], int] = _take(
    "torch._C._current_graph_task_id", "the number of the running backward; -1 outside of one"
)
current_autograd_node: Callable[[], Any] = _take(
    "torch._C._current_autograd_node", "the node of the graph whose backward runs; None outside"
)
next_sequence_number: Callable[[], int] = _take(
    "torch._C._autograd._get_sequence_nr", "the number of the next node of the graph"
)
top_saved_tensors_hooks: Any = _take(
    "torch._C._autograd._top_saved_tensors_default_hooks", "the current hooks for saved tensors"
)
engine: Any = _take(
    "torch.autograd.variable.Variable._execution_engine", "calls back at the end of a backward"
)
preserve_version_counter: Callable[[Any], AbstractContextManager[None]] = _take(
    "torch.autograd.grad_mode._unsafe_preserve_version_counter",
    "writes that do not change versions",
    "tensors",
)


def is_autograd_excluded() -> bool:
    """Tell whether the call comes from C++ below autograd."""
    return _is_key_excluded(_AUTOGRAD)


def sequence_number(node: Any) -> int:
    """Return the number of a node of the graph, in the order in which nodes were made."""
    return cast(int, node._sequence_nr())


def backward_node(function: type[torch.autograd.Function]) -> type:
    """Return the class of the nodes that an autograd function puts into the graph."""
    return cast(type, cast(Any, function)._backward_cls)


# ---- custom autograd functions of torch that DTensors may enter (torch_patches, dispatch)

CheckpointFunction: Any = _take(
    "torch.utils.checkpoint.CheckpointFunction", "reentrant checkpointing: hands tensors through"
)
BackwardHookFunction: Any = _take(
    "torch.nn.modules._functions.BackwardHookFunction",
    "backward hooks of modules: hands tensors through",
)
Dirichlet: Any = _take("torch.distributions.dirichlet._Dirichlet", "samples of Dirichlet and Beta")
