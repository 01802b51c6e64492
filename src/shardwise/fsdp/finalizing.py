"""Manual finalization: users say when the backward of a root is over, and may wait for it later.

A root is the outermost sharded module of a model. By default the end of autograd's backward is the
end of its iteration: everything is reduced, and the shards have their gradients. With manual
finalization a backward that has several parts, such as that of a pipeline's stage, ends when
`finalize_backward` is called: then what is left is reduced, and given back, by the settings of
that time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from shardwise.fsdp.errors import StateError, check_bool
from shardwise.torch_internals import current_graph_task

if TYPE_CHECKING:
    from shardwise.fsdp.context import Context
    from shardwise.fsdp.group import Group

_SET = "set_manual_backward_finalization"


class GradientReductionHandle:
    """Reductions of gradients under way, that `finalize_backward(async_op=True)` has left so."""

    def __init__(self, root: Group | None = None) -> None:
        self._root = root
        self._context: Context | None = None if root is None else root.context

    def wait(self) -> None:
        """Wait until the shards have their gradients. The second time nothing happens.

        Raises:
            StateError: `reset_iter_state` has forgotten them since.
        """
        context, root = self._context, self._root
        if context is None or root is None:
            return
        if context.outstanding is not self:
            raise StateError(
                "wait: reset_iter_state, or a change of the parameters, has forgotten the "
                "gradients of this handle; run the iteration again"
            )
        context.end_iteration(root)
        context.outstanding = None
        self._root = self._context = None

    def check_owner(self, root: Group) -> None:
        """Refuse another root than the one whose gradients these are."""
        if root is not self._root:
            assert self._root is not None, "it is outstanding"
            raise StateError(
                f"reset_iter_state: {root.name} shares its schedule with {self._root.name}, whose "
                "gradients are under way; call wait() of the handle of its finalize_backward, or "
                "reset_iter_state() of that module, first"
            )


def set_manual(group: Group, enabled: bool) -> None:
    """Say whether users end the backwards of a root."""
    check_bool("enabled", enabled)
    if group.outer is not None:
        if enabled or not group.is_manual:
            raise _not_root(_SET, group)
        group.is_manual = False  # it was set before there was a module around it
        return
    if enabled != group.is_manual and current_graph_task() != -1:
        raise StateError(f"{_SET}: the mode cannot change during a backward; call it before")
    if group.is_manual_now is not None and enabled != group.is_manual_now:
        raise StateError(
            f"{_SET}: the mode cannot change after a backward of {group.name} has begun; end it "
            "first: by finalize_backward(), by a backward with set_is_last_backward(True), or by "
            "reset_iter_state()"
        )
    group.is_manual = enabled


def finalize(group: Group, async_op: bool) -> GradientReductionHandle | None:
    """End the backwards of a root; return a handle if the gradients are to be waited for later."""
    check_bool("async_op", async_op)
    context = group.context
    if context is None:  # nothing has run yet
        return GradientReductionHandle() if async_op else None
    _check(group, context)
    if not async_op:
        context.finalize(group, waits=True)
        return None
    _check_alone(group, context)
    context.finalize(group, waits=False)
    context.outstanding = GradientReductionHandle(group)
    return context.outstanding


def check_outstanding(context: Context, what: str) -> None:
    """Refuse to begin something while a handle is to be waited for."""
    if context.outstanding is not None:
        raise StateError(
            f"{what}: the gradients that finalize_backward(async_op=True) has left under way must "
            "be there first; call wait() of the handle that it has returned"
        )


def check_roots(groups: Iterable[Group]) -> None:
    """Refuse manual finalization of what has become a part of something larger since."""
    for group in groups:
        if group.is_manual and group.outer is not None:
            raise _not_root(_SET, group)


def note_begun(group: Group) -> None:
    """A backward of a group has begun: from now on its root's mode cannot change."""
    root = group.root
    if root.is_manual_now is None:
        root.is_manual_now = root.is_manual


def _check(group: Group, context: Context) -> None:
    check_outstanding(context, "finalize_backward")
    if group.outer is not None:
        raise _not_root("finalize_backward", group)
    if not (group.is_manual if group.is_manual_now is None else group.is_manual_now):
        raise StateError(
            f"finalize_backward: the backward of {group.name} ends by itself; call {_SET}(True) "
            "before forward"
        )
    if context.in_backward:
        raise StateError(
            "finalize_backward: a backward is under way; call it afterwards, or after an exception "
            "reset_iter_state()"
        )
    units = [unit for other in context.groups if other.root is group for unit in other.units]
    partial = context.line.units_under_way(is_partial=True)
    for unit in context.line.to_reduce(units):
        if unit.info.replicate_mesh_size > 1 and not unit.groups[0].settings.all_reduce:
            partial.add(unit)
    for unit in units:
        if unit in partial or any(held.reduced is not None for held in unit.held):
            raise StateError(
                f"finalize_backward: the gradients of {unit.described()} are not summed over the "
                "replicate axis, which manual finalization must do; call "
                "set_requires_all_reduce(True) before, and reset_iter_state() if some were reduced "
                "without"
            )


def _check_alone(group: Group, context: Context) -> None:
    """Refuse to leave reductions under way beside the work of another root."""
    units = {*context.line.units_under_way(), *context.line.used}
    for unit in units:
        for other in unit.groups:
            if other.root is not group:
                raise StateError(
                    f"finalize_backward(async_op=True): {other.root.name} shares the schedule of "
                    f"{group.name} and has work under way; end its backward first, or use "
                    "async_op=False"
                )


def _not_root(what: str, group: Group) -> StateError:
    return StateError(
        f"{what}: {group.name} is within {group.root.name}, the root; call it on that module"
    )
