"""Groups: what one call of `fully_shard` makes of a module: whole while it computes, else sharded.

Forward: `before` gathers the parameters and puts them into the modules; `after` puts the shards
back, and gives back the memory unless it is kept. Backward: the first gradient that reaches an
output gathers them again; when all gradients of inputs and parameters are there, they are given
back. When that happens, and what travels together, is the context's business.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise.fsdp.errors import FSDPError, StateError
from shardwise.fsdp.held import Held
from shardwise.fsdp.mesh_info import DataParallelMeshInfo
from shardwise.fsdp.policies import MixedPrecisionPolicy, OffloadPolicy
from shardwise.fsdp.settings import Settings
from shardwise.fsdp.slot import Slot
from shardwise.fsdp.states import TrainingState, moved_on
from shardwise.fsdp.unit import Unit
from shardwise.parallel.containers import on_tensors
from shardwise.tensor import DTensor, wrap
from shardwise.torch_internals import (
    as_local,
    base_of,
    current_graph_task,
    next_sequence_number,
    sequence_number,
    storage_id,
)

if TYPE_CHECKING:
    from shardwise.fsdp.context import Context

_users: MutableMapping[torch.Tensor, list[ref[Group]]] = WeakTensorKeyDictionary()
"""Of each parameter the groups that have it: several, if it is tied."""

_TENSORS = (torch.Tensor, DTensor)


class Call:
    """One forward of a group, as long as its graph lives: which gradients of inputs are to come."""

    __slots__ = ("__weakref__", "began", "inputs", "is_watched", "left", "task")

    def __init__(self) -> None:
        self.began: int = next_sequence_number()
        """The number that autograd gave to what was computed next."""
        self.is_watched = False
        """Whether its group waits for them."""
        self.inputs = 0
        self.left = 0
        """How many of them have no gradient yet in this backward."""
        self.task = -1
        """Which backward that is."""


class Group:
    """The modules of one call of `fully_shard`, and their parameters.

    Arguments:
        modules: what computes with them.
        slots: where they are; without those that submodules' groups have.
    """

    def __init__(
        self,
        modules: list[nn.Module],
        slots: list[Slot],
        info: DataParallelMeshInfo,
        policy: MixedPrecisionPolicy,
        offload: OffloadPolicy,
        settings: Settings,
    ) -> None:
        self.modules = modules
        self.slots = slots
        self.info = info
        self.policy = policy
        self.offload = offload
        self.settings = settings
        self.name = type(modules[0]).__name__
        self.forward_prefetch: list[Group] | None = None
        self.backward_prefetch: list[Group] | None = None
        self.context: Context | None = None
        self.outer: Group | None = None
        """The group of a module around these, if any."""
        self.is_manual = False
        """Of a root: whether users say when a backward is over."""
        self._reset()

    def _reset(self) -> None:
        self.units: list[Unit] = []
        self.bindings: list[tuple[Slot, Held]] = []
        """Which parameter each slot holds."""
        self.within: list[nn.Module] = []
        """Its modules and those in them, without other groups'."""
        self.state = TrainingState.IDLE
        self.active = 0
        """How many of its forwards are under way: one may call another."""
        self.ran: set[nn.Module] = set()
        """Which of its modules have run in this forward of the outermost."""
        self.calls: WeakSet[Call] = WeakSet()
        """Forwards whose inputs have not all got their gradients."""
        self.is_manual_now: bool | None = None
        """Of a root: the same, as it was when the backward began that is not over; else None."""
        self.has_wholes = False
        """Whether the modules hold the gathered parameters."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        """The group of copied modules; everything else is found again when they first run."""
        result = copy.copy(self)
        memo[id(self)] = result
        result._reset()
        result.context = result.outer = None
        result.modules = copy.deepcopy(self.modules, memo)
        result.slots = [slot.of(copy.deepcopy(slot.module, memo)) for slot in self.slots]
        result.forward_prefetch = result.backward_prefetch = None
        return result

    @property
    def root(self) -> Group:
        """The group of the outermost module around these."""
        found, seen = self, {self}
        while found.outer is not None and found.outer not in seen:
            found = found.outer
            seen.add(found)
        return found

    def note_parameters(self) -> None:
        """Let other groups that have the same parameters find this one."""
        for slot in self.slots:
            _users.setdefault(slot.tensor, []).append(ref(self))

    def note_grad_dtypes(self) -> None:
        """Remember what users have set as the dtypes of gradients."""
        for slot in self.slots:
            slot.note_grad_dtype()

    @contextmanager
    def without_set_grad_dtypes(self) -> Iterator[None]:
        """While parameters are converted, keep gradients whose dtype was set as they are; but they
        move to where the parameters are."""
        self.note_grad_dtypes()
        kept: list[tuple[Slot, torch.Tensor]] = []
        for slot in self.slots:
            if slot.grad_dtype is not None and slot.is_filled and slot.tensor.grad is not None:
                kept.append((slot, slot.tensor.grad))
                slot.tensor.grad = None
        try:
            yield
        finally:
            for slot in self.slots:
                slot.restore_grad_dtype()
            for slot, gradient in kept:
                slot.tensor.grad = gradient.to(slot.tensor.device)

    def tied(self) -> list[Group]:
        """The groups that have any of its parameters, in the order of their making."""
        users = (user() for slot in self.slots for user in _users.get(slot.tensor, ()))
        return list(dict.fromkeys(user for user in users if user is not None))

    def find_modules(self) -> None:
        """Note which modules compute with its parameters."""
        self.within = []
        left = list(self.modules)
        while left:
            module = left.pop()
            if module not in self.within:
                self.within.append(module)
                left += [each for each in module.children() if not hasattr(each, "_fsdp_group")]

    def change(self, **settings: Any) -> None:
        """Change some settings."""
        self.settings = replace(self.settings, **settings)
        if self.context is not None:
            self.context.settings_changed = True

    # ---- forward

    def before(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], Call]:
        """Gather, and return what the module is to be called with."""
        context = self.context
        if context is None or context.depth == 0:
            context = self._begin()
        call = Call()
        context.depth += 1
        self.active += 1
        try:
            again = self.state is TrainingState.PRE_BACKWARD  # a checkpoint computes it anew
            if not again and self.active == 1 and self.state is not TrainingState.FORWARD:
                self.state = moved_on(self.state, TrainingState.FORWARD, self.name)
            context.unshard_for_forward(self)
            self.put_wholes()
            policy = self.policy
            if policy.param_dtype is not None and policy.cast_forward_inputs:
                args, kwargs = _cast((args, kwargs), policy.param_dtype)
            if not again and torch.is_grad_enabled() and not self.is_alias:
                args, kwargs = self._watch_inputs(call, args, kwargs)
        except BaseException:
            self.failed()
            raise
        return args, kwargs, call

    def _begin(self) -> Context:
        context = self._own_context()
        context.begin(self)
        return context

    def after(self, module: nn.Module, output: Any, call: Call) -> Any:
        """Put the shards back, and return what the caller is to get."""
        context = self.context
        assert context is not None, "it was set before"
        policy = self.policy
        if policy.output_dtype is not None:
            output = _cast(output, policy.output_dtype)
        self._leave(context)
        if self.active:
            return output
        if self.state is TrainingState.FORWARD:
            self.state = moved_on(self.state, TrainingState.IDLE, self.name)
            output = self._unaliased(output)
            self.ran.add(module)
            needs_backward = False
            if torch.is_grad_enabled():
                hidden = [] if self.is_alias else self._left_behind(call)
                needs_backward = self._watch_outputs(call, (output, hidden) if hidden else output)
            context.after_forward(self, needs_backward)
        if context.depth == 0:
            context.end_forward()
        return output

    def failed(self) -> None:
        """After an exception in forward."""
        context = self.context
        assert context is not None, "it was set before"
        self._leave(context)
        if not self.active and self.state is TrainingState.FORWARD:
            self.state = TrainingState.IDLE
        if context.in_backward:
            return
        if context.depth == 0:
            context.settle()
        elif not self.active:
            context.release(self, True)  # somebody may handle it, and go on

    def _leave(self, context: Context) -> None:
        context.depth -= 1
        self.active -= 1
        if not self.active and self.state is not TrainingState.PRE_BACKWARD:
            self.put_shards()

    def put_wholes(self) -> None:
        """Put the gathered parameters into the modules."""
        if not self.has_wholes:
            self.has_wholes = True
            for slot, held in self.bindings:
                slot.put(held.whole)

    def put_shards(self) -> None:
        """Put the shards into the modules, where users have not put something else since."""
        if self.has_wholes:
            self.has_wholes = False
            for slot, held in self.bindings:
                if slot.holds(held.whole):
                    slot.put(held.sharded)

    @property
    def is_alias(self) -> bool:
        """Whether it computes with the shards themselves, which are whole."""
        return all(unit.is_alias for unit in self.units)

    def _unaliased(self, output: Any) -> Any:
        """Outputs that are views of parameters as copies, as that memory will be given back."""

        def change(tensor: torch.Tensor) -> torch.Tensor:
            with as_local():
                address = storage_id(tensor.untyped_storage()) if not tensor.is_sparse else 0
            return tensor.clone() if any(unit.holds(address) for unit in self.units) else tensor

        return change(output) if isinstance(output, torch.Tensor) else on_tensors(output, change)

    @contextmanager
    def with_shards(self) -> Iterator[None]:
        """Let the modules hold the shards for a while."""
        had_wholes = self.has_wholes
        self.put_shards()
        try:
            yield
        finally:
            if had_wholes:
                self.put_wholes()

    # ---- gradients that come and go

    def _watch_inputs(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Notice when the gradients of all inputs are there: then nothing here is needed any more.

        The inputs become views, so that only what happens in this forward counts.
        """

        def came(_: torch.Tensor) -> None:
            call.left -= 1
            if not call.left:
                self.calls.discard(call)
                assert self.context is not None, "it has run"
                self.context.check_done(self)

        def change(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad:
                return tensor
            call.inputs += 1
            with as_local():
                view: Any = tensor.view_as(tensor)
                view.register_hook(came)
            return wrap(view, tensor._layout) if isinstance(tensor, DTensor) else view

        if all(isinstance(each, torch.Tensor) for each in args) and not kwargs:
            args = tuple(map(change, args))
        else:
            args, kwargs = on_tensors((args, kwargs), change)
        # Gradients of inputs that nobody sees may need what is frozen, until the very end.
        if call.inputs or any(len(unit.trainable) < len(unit.held) for unit in self.units):
            call.is_watched, call.left = True, call.inputs
            self.calls.add(call)
        return args, kwargs

    def _left_behind(self, call: Call) -> list[torch.Tensor]:
        """What a forward has computed and kept in attributes, such as a loss beside the output: its
        backward may come first, and need the parameters."""
        return [
            value
            for module in self.within
            for value in vars(module).values()
            if type(value) in _TENSORS  # by far faster than isinstance, for what is rarely there
            and _is_of(call, value)
        ]

    def _watch_outputs(self, call: Call, output: Any) -> bool:
        """Notice when the first gradient comes; says whether one may."""
        found = False

        def came(_: torch.Tensor) -> None:
            assert self.context is not None, "it has run"
            task = current_graph_task()
            if call.is_watched and call.task != task:  # again, if its graph was retained
                call.task, call.left = task, call.inputs
                self.calls.add(call)
            self.context.begin_backward_of(self)

        def watch(tensor: Any) -> Any:
            nonlocal found
            if tensor.requires_grad:
                found = True
                with as_local():
                    tensor.register_hook(came)
                    # Changed in place, a view gets another history: that of its base goes on.
                    base = base_of(tensor)
                    if base is not None and _is_of(call, base):
                        base.register_hook(came)
            return tensor

        if isinstance(output, torch.Tensor):
            watch(output)
        else:
            on_tensors(output, watch)
        return found

    # ---- asked for by users

    def unshard(self) -> None:
        """Start gathering, outside of forward."""
        context = self.ready_context()
        context.start(self.units)

    def wait(self) -> None:
        """Finish gathering, and put the gathered parameters into the modules; unless they were
        given back before."""
        assert self.context is not None, "unshard has set it"
        if any(unit.gather is None and not unit.is_whole for unit in self.units):
            return
        self.context.finish_gathers(self)
        self.put_wholes()

    def reshard(self) -> None:
        """Give back the memory."""
        if self.state is not TrainingState.IDLE:
            raise StateError(
                f"reshard: {self.name} is in {self.state.name} and computes with its parameters; "
                "call it outside of forward and backward"
            )
        for unit in self.units:
            if unit.gather is not None:
                unit.gather.drop(unit)
            unit.reshard()
        self.put_shards()

    def ready_context(self) -> Context:
        """Its context, whose units hold what the modules have now."""
        context = self._own_context()
        context.check()
        return context

    def _own_context(self) -> Context:
        from shardwise.fsdp.sharing import context_of

        return self.context or context_of(self)


def _is_of(call: Call, tensor: torch.Tensor) -> bool:
    """Whether a forward has computed it."""
    node = tensor.grad_fn
    return node is not None and sequence_number(node) >= call.began


def _cast(value: Any, dtype: torch.dtype) -> Any:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return on_tensors(value, change)


def check_list(modules: Any) -> None:
    """Refuse what is not several modules."""
    if isinstance(modules, nn.Module) or not isinstance(modules, Iterable):
        raise FSDPError(f"modules: expected a list of modules, got {type(modules).__name__}")


def check_group(module: Any, argument: str) -> Group:
    """The group of a sharded module, or an error."""
    group = getattr(module, "_fsdp_group", None)
    if not isinstance(group, Group):
        raise FSDPError(
            f"{argument}: expected a module that fully_shard or replicate was called on, got "
            f"{type(module).__name__}"
        )
    return group
