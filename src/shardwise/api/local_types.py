"""The check of a `local_map` function with the package `spmd_types`, if the caller asks for it.

On each axis of the mesh a local tensor has a type, which describes the tensor and its gradient:

| type | the tensor | its gradient | placement |
|---|---|---|---|
| V | differs from rank to rank | differs, too | `Shard` |
| R | is the same | is a contribution | `Replicate`, with gradients `Partial` (the default) |
| I | is the same | is the same | `Replicate`, with gradients `Replicate` |
| P | is a contribution | is the same | `Partial` |

The package propagates these types through the operators of the function and refuses operators that
mix them up. It is imported when it is first needed. The meaning is that of torch's own `local_map`,
except that inputs without `in_placements` get the types of their own placements.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from shardwise.core import world
from shardwise.core.errors import DispatchError, LayoutError
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import Partial, Placement, Replicate, Shard, as_placement

Placements = Sequence[Placement]

_GRADIENTS = {
    "Shard": "Shard (V)",
    "Replicate": "Partial (R) or Replicate (I)",
    "Partial": "Replicate (P)",
}
"""The gradient placements that go with a placement."""


def _package() -> Any:
    try:
        return importlib.import_module("spmd_types")
    except ImportError as error:
        raise DispatchError(
            "local_map(spmd_types): expected the package spmd_types, which cannot be imported "
            f"({error}); pip install spmd_types, or pass spmd_types=False to run unchecked"
        ) from error


class LocalTypes:
    """The types of the local tensors on one mesh."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self._spmd = _package()
        self._axes = {
            axis: self._mesh_axis(axis) for axis in range(mesh.ndim) if mesh.shape[axis] > 1
        }

    def input_gradients(self, argument: str, placements: Placements) -> list[Placement]:
        """Return the default placements of an input's gradient: replicated inputs have type R."""
        return [self._gradient(argument, each) for each in self._given(argument, placements)]

    def annotate(
        self, argument: str, local: torch.Tensor, placements: Placements, gradients: Placements
    ) -> None:
        """Give a local tensor the types that fit its placements and those of its gradient."""
        placements = self._given(argument, placements)
        gradients = self._given(argument.replace("in_", "in_grad_"), gradients)
        types = {}
        for axis, mesh_axis in self._axes.items():
            placement, gradient = placements[axis], gradients[axis]
            found = self._type(argument, placement, gradient)
            if found is None:
                kind = _GRADIENTS[type(placement).__name__]
                raise LayoutError(
                    f"{argument}: {placement} on axis {self.mesh.axis_name(axis)} has gradients "
                    f"{kind}, got {gradient}; the type of a local tensor also determines its "
                    "gradient. Let func include the operation that makes the two differ"
                )
            types[mesh_axis] = found
        self._spmd.assert_type(local, types)

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Within, check all operators; all tensors must have types."""
        checker = importlib.import_module("spmd_types._checker")
        current = self._spmd.set_current_mesh(self._as_current())
        with current, checker.typecheck(strict_mode="strict"):
            yield

    def output_gradients(
        self, argument: str, out: torch.Tensor, placements: Placements
    ) -> list[Placement]:
        """Check the types of a result against its placements; return its gradient's placements."""
        spmd, types = self._spmd, self._spmd.get_local_type(out)
        if self._axes and not types:
            raise LayoutError(
                f"{argument}: expected a result with types; func must make it of its inputs, or "
                "give it types with spmd_types.assert_type"
            )
        result: list[Placement] = []
        for axis, placement in enumerate(self._given(argument, placements)):
            gradient = self._gradient(argument, placement)
            if axis in self._axes:
                found = types.get(self._axes[axis])
                if found not in self._fitting(placement):
                    expected = " or ".join(each.name for each in self._fitting(placement))
                    raise LayoutError(
                        f"{argument}: expected a result of type {expected} on axis "
                        f"{self.mesh.axis_name(axis)}, for {placement}; func returned one of type "
                        f"{'none' if found is None else found.name}"
                    )
                if found == spmd.I:
                    gradient = Replicate()
            result.append(gradient)
        return result

    # ---- helpers

    def _given(self, argument: str, placements: Placements) -> list[Placement]:
        if not isinstance(placements, Sequence) or len(placements) != self.mesh.ndim:
            raise LayoutError(
                f"{argument}: expected a list of {self.mesh.ndim}, one per axis of {self.mesh!r}; "
                f"got {placements!r}"
            )
        return [as_placement(each, argument) for each in placements]

    def _type(self, argument: str, placement: Placement, gradient: Placement) -> Any:
        """Return the type of a tensor with these placements; None if there is none."""
        spmd = self._spmd
        if placement.is_replicate():
            kind = spmd.I if gradient.is_replicate() else spmd.R
            return kind if gradient.is_replicate() or gradient == Partial() else None
        self._gradient(argument, placement)
        if placement.is_shard():
            return spmd.V if gradient.is_shard() else None
        return spmd.P if gradient.is_replicate() else None

    def _gradient(self, argument: str, placement: Placement) -> Placement:
        match placement:
            case Shard():
                return placement
            case Replicate():
                return Partial()
            case Partial("sum"):
                return Replicate()
        raise LayoutError(
            f"{argument}: spmd_types knows pending sums only, got {placement}; redistribute it to "
            "Replicate or Shard first"
        )

    def _fitting(self, placement: Placement) -> tuple[Any, ...]:
        """Return the types that a result with a placement may have."""
        spmd = self._spmd
        if placement.is_replicate():
            return spmd.R, spmd.I
        return (spmd.V,) if placement.is_shard() else (spmd.P, spmd.V)

    def _mesh_axis(self, axis: int) -> Any:
        """Return the `spmd_types.MeshAxis` of an axis of the mesh.

        It is made from the axis's process group, or from the ranks if there are no groups.
        """
        if self._has_groups:
            return self._spmd.MeshAxis.of(self.mesh.get_group(axis))
        ranks = sorted(self.mesh.ranks_along([axis]))
        strides = {after - before for before, after in pairwise(ranks)}
        if len(strides) != 1:
            raise LayoutError(
                f"local_map(spmd_types): expected ranks at equal distances along axis "
                f"{self.mesh.axis_name(axis)}, as spmd_types needs them; got {tuple(ranks)}"
            )
        return self._spmd.MeshAxis.of(len(ranks), strides.pop())

    @property
    def _has_groups(self) -> bool:
        return not self.mesh.is_abstract and world.current().has_process_groups

    def _as_current(self) -> Any:
        """Return the mesh in the package's form, with process groups if it finds them by name."""
        if self.mesh.mesh_dim_names is None:
            return frozenset(self._axes.values())
        if self._has_groups:
            return self.mesh.to_torch()
        one = self._spmd.MeshAxis.of(1, 1)
        return {
            name: self._axes.get(axis, one) for axis, name in enumerate(self.mesh.mesh_dim_names)
        }
