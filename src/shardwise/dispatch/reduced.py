"""Which pending sums have been made: a tensor remembers, so that later calls can use what is there.

What a tensor remembers decides how a call is split, and a checkpointed region is run twice: what
the second run saves goes into the graph of the first, so both must decide alike. In such a region
only what was asked for in this very run counts. Its hooks for saved tensors tell the runs apart.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from shardwise.tensor import DTensor
from shardwise.torch_internals import TensorBase, locally, top_saved_tensors_hooks, version_of

_requires_grad = TensorBase.requires_grad.__get__
_hooks = top_saved_tensors_hooks


def remember_reduced(tensor: Any, result: DTensor, has_grad: bool) -> None:
    """Keep a tensor's value with its pending reductions made, which a call has asked for."""
    hooks = _hooks(True)
    # No reference: the hooks of a region lead to its inputs, and so back to the tensor.
    region = None if hooks is None else weakref.ref(hooks[0])
    tensor._reduced = result, has_grad, version_of(tensor), region


def reduced(tensor: Any) -> DTensor | None:
    """A tensor with its pending reductions made, if an earlier call had that done.

    The same on every rank: whether something is alive has no influence.
    """
    found = tensor.__dict__.get("_reduced")
    if found is None:
        return None
    result, has_grad, version, region = found
    if version != locally(version_of, (), (tensor,)):
        return None
    if not has_grad and torch.is_grad_enabled() and locally(_requires_grad, (), (tensor,)):
        return None
    hooks = _hooks(True)
    here = region is None if hooks is None else region is not None and region() is hooks[0]
    return result if here else None
