"""Tensors on their way into and out of a module: wrapped, moved, unwrapped, quickly.

What a module is called with changes its values with every step, but not its layouts: each crossing
remembers the moves between them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardwise.dispatch.arguments import check_same
from shardwise.dispatch.state import state
from shardwise.errors import LayoutError
from shardwise.layout import Layout
from shardwise.local_shards import check_shard, found_layout
from shardwise.mesh import DeviceMesh
from shardwise.parallel.names import PlanError
from shardwise.placement import Placement, Shard
from shardwise.redistribute.autograd import Pair, apply_pair, check_linear, make_pair
from shardwise.tensor import DTensor, wrap
from shardwise.torch_internals import TensorBase, as_local

_requires_grad = TensorBase.requires_grad.__get__

_MOST = 1024
"""How many layouts a crossing remembers; shapes may change with every step."""


class Crossing:
    """Moves DTensors to the layout that `target` gives for theirs; differentiable.

    Forward: from how the tensor lies to the target. Backward: the transposed move.

    Arguments:
        what: the tensor's name in messages.
        target: how a tensor should lie that lies so.
    """

    def __init__(self, what: str, target: Callable[[Layout], Layout]) -> None:
        self._what, self._target = what, target
        self._known: dict[Layout, tuple[Layout, Pair | None]] = {}

    def __call__(self, tensor: DTensor) -> DTensor:
        """The tensor as it should lie: itself if it does."""
        layout = tensor._layout
        found = self._known.get(layout)
        if found is None:
            found = self._planned(layout)
        target, pair = found
        if pair is None:
            return tensor
        with as_local():
            if _requires_grad(tensor) and torch.is_grad_enabled():
                if layout.partial or target.partial:
                    check_linear(layout)
                    check_linear(target)
                moved = apply_pair(tensor, pair)
            else:
                moved = pair.forward.run(tensor.as_subclass(torch.Tensor).detach())
        return wrap(moved, target)

    def _planned(self, layout: Layout) -> tuple[Layout, Pair | None]:
        if len(self._known) >= _MOST:
            self._known.clear()
        try:
            target = self._target(layout)
        except LayoutError as error:
            raise PlanError(f"{self._what}: {error.args[0]}") from None
        pair = None if target is layout else make_pair(layout, target)
        self._known[layout] = target, pair
        return target, pair


def wrapped(local: torch.Tensor, layout: Layout, what: str) -> DTensor:
    """The DTensor of which this is the piece. What it is moved to is shared by all uses of `local`.

    So modules that are handed the same plain tensor (as those for queries, keys and values are)
    share the sum of their gradients: one all-reduce rather than three. Forward: nothing.
    Backward: nothing; the sum is made by the operator that uses the tensor beside shards.
    """
    if state.plain_tensors == "check" and layout.is_replicated:
        check_same(what, local, layout.mesh)
    result = wrap(local.view_as(local), layout)
    result._alias_of = local  # type: ignore[attr-defined]
    return result


def check_mesh(tensor: DTensor, mesh: DeviceMesh, what: str) -> None:
    """Refuse a DTensor of another mesh."""
    if tensor._layout.mesh is not mesh:
        raise PlanError(
            f"{what}: expected a tensor on {mesh!r}, got one that lies as {tensor._layout!r} on "
            f"{tensor._layout.mesh!r}; parallelize all modules on one mesh, or hand over "
            "x.to_local() where that is what is meant"
        )


class PieceLayouts:
    """How plain tensors lie that ranks bring as their pieces.

    Arguments:
        placement: how they lie on the one axis of the mesh.
        features: the global size of the last dim, where the module knows it.
    """

    def __init__(self, mesh: DeviceMesh, placement: Placement, features: int | None = None) -> None:
        self._mesh, self._placement, self._features = mesh, placement, features
        self._known: dict[torch.Size, Layout] = {}

    def layout(self, local: torch.Tensor) -> Layout:
        """The layout of the tensor of which this is the piece.

        If a dim is split whose global size nothing tells, the ranks tell each other their sizes:
        a small collective in each call. What one rank remembers would not do, as another rank's
        size may have changed.
        """
        found = self._known.get(local.shape)
        if found is not None:
            return found
        shape = list(local.shape)
        if isinstance(self._placement, Shard):
            is_last = self._placement.dim in (-1, local.dim() - 1)
            if self._features is None or not is_last:
                return found_layout(local, self._mesh, [self._placement])
            shape[-1] = self._features
        whole = Layout.from_placements(self._mesh, shape, [self._placement])
        check_shard(local, whole)
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[local.shape] = whole
        return whole
