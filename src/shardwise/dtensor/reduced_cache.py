"""The cache of reduced values: a tensor keeps its value without pending reductions for later calls.

This value decides how a later call is split. A checkpointed region runs twice, and the tensors
that its second run saves go into the graph of the first run, so both runs must decide alike.
Therefore only a value that was made in the same run of the region counts within it. The hooks for
saved tensors, which a region sets, tell the runs apart.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from shardwise.core.tensor_state import ATTRIBUTE, TensorState, ensure_state
from shardwise.dtensor.tensor import DTensor
from shardwise.torch_internals import TensorBase, locally, top_saved_tensors_hooks, version_of

_requires_grad = TensorBase.requires_grad.__get__
_hooks = top_saved_tensors_hooks


def remember_reduced(tensor: Any, result: DTensor, has_grad: bool) -> None:
    """Keep the value of a tensor without its pending reductions, which a call has asked for."""
    hooks = _hooks(True)
    # A weak reference: the hooks of a region lead to its inputs, and so back to the tensor.
    region = None if hooks is None else weakref.ref(hooks[0])
    notes = tensor.__dict__.get(ATTRIBUTE)  # `ensure_state`, mostly without its frame
    if type(notes) is not TensorState:
        notes = ensure_state(tensor)
    notes.reduced = result, has_grad, version_of(tensor), region


def find_reduced(tensor: Any) -> DTensor | None:
    """Return the value of a tensor without its pending reductions, if an earlier call made it.

    The answer is the same on every rank: it does not depend on whether the value is still alive.
    """
    notes = tensor.__dict__.get(ATTRIBUTE)  # `state_of`, without its frame
    if type(notes) is not TensorState or notes.reduced is None:
        return None
    result, has_grad, version, region = notes.reduced
    if version != locally(version_of, (), (tensor,)):
        return None
    if not has_grad and torch.is_grad_enabled() and locally(_requires_grad, (), (tensor,)):
        return None
    hooks = _hooks(True)
    is_same_run = region is None if hooks is None else region is not None and region() is hooks[0]
    return result if is_same_run else None
