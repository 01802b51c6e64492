"""Parameters of groups: the places in modules that hold them, and the forms that each has.

A `ParamSlot` is a place in a module that holds a parameter. A `ShardedParam` is one parameter in
all its forms: shard, gathered, gradients. A tied parameter has one `ShardedParam` and several
slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import nn

from shardwise.core.layout import Layout
from shardwise.dtensor.tensor import DTensor, as_layout, unwrap, wrap
from shardwise.fsdp.config import MixedPrecisionPolicy
from shardwise.fsdp.errors import StateError
from shardwise.fsdp.extensions import GatherExtension
from shardwise.fsdp.mesh_info import DataParallelMeshInfo
from shardwise.fsdp.param_sharding import ParamSharding
from shardwise.torch_internals import (
    TensorBase,
    backward_hooks_of,
    has_own_grad_dtype,
    own_parameters,
    post_accumulate_hooks_of,
)

if TYPE_CHECKING:
    from shardwise.fsdp.param_group import ParamGroup

_grad_hooks: Callable[[torch.Tensor], dict[int, Callable[[Any], Any]] | None] = backward_hooks_of
_post_accumulate_hooks: Callable[
    [torch.Tensor], dict[int, Callable[[torch.Tensor], None]] | None
] = post_accumulate_hooks_of
# The accessors of torch.Tensor itself, which do not go through a DTensor's dispatch.
get_grad: Callable[[torch.Tensor], torch.Tensor | None] = TensorBase.grad.__get__
set_grad: Callable[[torch.Tensor, torch.Tensor | None], None] = TensorBase.grad.__set__


@dataclass(frozen=True)
class GradDtype:
    """A `Tensor.grad_dtype` that users have set. If unset, it follows the parameter's dtype.

    Arguments:
        dtype: None allows any dtype.
    """

    dtype: torch.dtype | None

    @staticmethod
    def set_on(parameter: Any) -> GradDtype | None:
        """Return the `grad_dtype` that users have set on a parameter, or None."""
        return GradDtype(parameter.grad_dtype) if has_own_grad_dtype(parameter) else None

    def put_on(self, parameter: Any) -> None:
        """Set it on a parameter, unless the parameter has it."""
        if GradDtype.set_on(parameter) != self:
            parameter.grad_dtype = self.dtype


def promoted_dtype(dtypes: set[torch.dtype]) -> torch.dtype:
    """Return the dtype that all of `dtypes` promote to."""
    first, *others = dtypes
    for other in others:
        first = torch.promote_types(first, other)
    return first


class Tie:
    """The slots that hold one parameter, in one group or several.

    Users may replace the parameter in a slot. Where that must not untie it, `shard_memory` puts the
    new one into all slots.
    """

    def __init__(self) -> None:
        self._slots: list[ref[ParamSlot]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Tie:
        """Return the tie of copied slots, which are added to it as they are made."""
        memo[id(self)] = result = Tie()
        return result

    def add(self, slot: ParamSlot) -> None:
        """Add a slot, in the order of groups."""
        self._slots.append(ref(slot))

    def slots(self) -> list[ParamSlot]:
        """Return the slots that hold a parameter."""
        found = (each() for each in self._slots)
        return [slot for slot in found if slot is not None and slot.is_filled]

    def divide(self) -> None:
        """Leave only those slots tied that hold the same parameter now."""
        ties: dict[int, Tie] = {}
        for slot in self.slots():
            slot.tie = ties.setdefault(id(slot.tensor), Tie())
            slot.tie.add(slot)


@dataclass(slots=True, eq=False, weakref_slot=True)
class ParamSlot:
    """A place in a module that holds a parameter of a group: `module._parameters[key]`."""

    module: nn.Module
    key: str
    name: str
    """Of the parameter, for messages."""
    layout: Layout
    """Of the parameter at rest."""
    strides: tuple[int, ...] | None
    """Of the gathered parameter, if it is not contiguous."""
    extension: GatherExtension | None
    """The parameter's own gather functions, if any."""
    policy: MixedPrecisionPolicy
    """Of this parameter."""
    info: DataParallelMeshInfo
    """The data-parallel ranks of this parameter."""
    tie: Tie
    """All slots of this parameter."""
    known: torch.Tensor | None = None
    """The parameter at rest, when it was last looked at; users may have replaced it since."""
    group: ref[ParamGroup] | None = None
    """The group that the slot belongs to."""
    grad_dtype: GradDtype | None = None
    """The `grad_dtype` that users have set on the parameter, if any."""
    _has_own_setter: bool = field(init=False)
    """Whether the module's class defines `__setattr__`."""

    def __post_init__(self) -> None:
        # Some modules, such as torch's LSTM, keep their parameters in a list too.
        self._has_own_setter = type(self.module).__setattr__ is not nn.Module.__setattr__

    def for_copy(self, module: nn.Module, tie: Tie) -> ParamSlot:
        """Return the same slot of a copy of the module, with the copied tie."""
        return replace(self, module=module, tie=tie, known=None, group=None)

    @property
    def tensor(self) -> nn.Parameter:
        """The parameter in the slot now."""
        found = own_parameters(self.module).get(self.key)
        if found is None:
            raise StateError(
                f"{self.name}: {type(self.module).__name__} has no {self.key!r} any more, as after "
                "torch.nn.utils.weight_norm or a parametrization with parameters of its "
                "own; apply them before fully_shard or replicate, which then shards what they make"
            )
        return found

    @property
    def is_filled(self) -> bool:
        """Whether the slot holds a parameter; users may have removed it."""
        return self.module._parameters.get(self.key) is not None

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in the slot now."""
        return own_parameters(self.module).get(self.key) is tensor

    def put(self, tensor: Any) -> None:
        """Put a parameter into the slot."""
        if self._has_own_setter:
            setattr(self.module, self.key, tensor)
        else:
            own_parameters(self.module)[self.key] = tensor

    def move_to(self, module: nn.Module, key: str) -> None:
        """Follow the parameter to another place, to which users have moved it."""
        vars(self.module).get("_fsdp_keys", set()).discard(self.key)
        self.name = self.name[: len(self.name) - len(self.key)] + key
        self.module, self.key = module, key
        self.__post_init__()
        self.claim()

    def claim(self) -> None:
        """Record on the module that the slot belongs to a group."""
        vars(self.module).setdefault("_fsdp_keys", set()).add(self.key)

    def note_grad_dtype(self) -> None:
        """Remember the `grad_dtype` that users have set on the present parameter. A parameter that
        replaces it, after a conversion or from a state dict, inherits it."""
        if self.is_filled:
            self.grad_dtype = GradDtype.set_on(self.tensor) or self.grad_dtype

    def restore_grad_dtype(self) -> None:
        """Set the remembered `grad_dtype` on the present parameter."""
        if self.grad_dtype is not None and self.is_filled:
            self.grad_dtype.put_on(self.tensor)


def is_claimed(module: nn.Module, key: str) -> bool:
    """Return whether a parameter of a module belongs to a group."""
    return key in vars(module).get("_fsdp_keys", ())


def accumulation_dtype(slot: ParamSlot, param_dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype in which unreduced gradients of a parameter are summed; None means any."""
    if slot.policy.reduce_dtype is not None and param_dtype.is_floating_point:
        return slot.policy.reduce_dtype
    return param_dtype if slot.grad_dtype is None else slot.grad_dtype.dtype


class ShardedParam:
    """One parameter of a unit: its shard, its gathered form, and gradients not yet reduced.

    Arguments:
        slot: the first slot that holds it.
        sharded: the DTensor that the module has at rest, and that optimizers see.
    """

    def __init__(self, slot: ParamSlot, sharded: DTensor) -> None:
        self.slot = slot
        self.sharded = sharded
        self.sharding = ParamSharding.of(sharded._layout, slot.info, slot.strides is None)
        shape = self.sharding.gathered_shape
        self.strides = slot.strides or torch.empty(shape, device="meta").stride()
        """Of the gathered parameter."""
        own = sharded.dtype
        casts = slot.policy.param_dtype is not None and own.is_floating_point
        self.gathered_dtype: torch.dtype = slot.policy.param_dtype if casts else own  # type: ignore[assignment]
        """Of the gathered parameter."""
        self.grad_dtype = own if slot.grad_dtype is None else slot.grad_dtype.dtype
        """Of the shard's gradient; None means any."""
        self.sum_dtype = accumulation_dtype(slot, own)
        """In which unreduced gradients are accumulated; None means any."""
        self.local: torch.Tensor
        """The shard as a plain tensor of the same memory, with its own version counter."""
        self.offset = 0
        """Where the parameter begins in its unit's row."""
        self.is_direct = False
        """Whether it is large and therefore sent and received in its own memory, without a copy
        through a row buffer."""
        self.chunks: list[torch.Tensor]
        """Of a direct one: the views of the gathered parameter that the ranks' shards fill."""
        self.gathered: torch.Tensor
        """The parameter that the module computes with."""
        self.accumulated: torch.Tensor | None = None
        """Gradients of the gathered parameter that are still to be reduced, in `sum_dtype`."""
        self.reduced: torch.Tensor | None = None
        """Gradients of the shard that are still to be summed over the replicate axis."""

    @property
    def name(self) -> str:
        """The name of the parameter, for messages."""
        return self.slot.name

    @property
    def sharded_param(self) -> DTensor:
        """The DTensor that the module has at rest: torch's name for it."""
        return self.sharded

    @property
    def unsharded_param(self) -> torch.Tensor:
        """The parameter that the module computes with: torch's name for it."""
        return self.gathered

    def apply_grad_hooks(self, gradient: torch.Tensor, has_history: bool) -> torch.Tensor:
        """Return the shard's new gradient after the hooks that users have registered on it.

        Arguments:
            has_history: whether the gradient can be differentiated (`create_graph=True`).
        """
        hooks = _grad_hooks(self.sharded)
        if not hooks:
            return gradient
        with torch.set_grad_enabled(has_history):
            found: Any = wrap(gradient, self.sharded._layout)
            for hook in list(hooks.values()):
                changed = hook(found)
                if changed is not None:
                    changed = changed if has_history else changed.detach()
                    found = as_layout(changed, self.sharded._layout, f"hook of {self.name}")
            return unwrap(found)

    def call_post_accumulate_hooks(self) -> None:
        """Call the hooks that users have registered to run once the shard has its gradient."""
        hooks = _post_accumulate_hooks(self.sharded)
        if hooks:
            for hook in list(hooks.values()):
                hook(self.sharded)
