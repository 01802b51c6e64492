"""DTensorSpec: torch's description of a DTensor, for code that reads `x._spec` or calls the private
constructor `DTensor(local, spec, requires_grad=...)`.

Shardwise itself describes tensors by a `Layout`. A spec is made of one when it is asked for, and
has the names of torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardwise.core.errors import LayoutError, also, format_value
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh, as_mesh
from shardwise.core.placement import Partial, Placement, Replicate, Shard, as_placement

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh


class TensorMeta(NamedTuple):
    """The shape, strides and dtype of a global tensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class ShardOrderEntry(NamedTuple):
    """The axes of the mesh that split one dim, outer to inner."""

    tensor_dim: int
    mesh_dims: tuple[int, ...]


ShardOrder = tuple[ShardOrderEntry, ...]
"""An entry for each dim that is split."""


@dataclass(frozen=True, slots=True)
class DTensorSpec:
    """The distribution of a tensor in torch's terms. Immutable and hashable.

    Arguments:
        mesh: the mesh of the ranks.
        placements: one per axis of the mesh.
        tensor_meta: the shape, strides and dtype of the global tensor.
        shard_order: the axes that split each dim; by default in the order of the mesh, and None
            where the placements say it (`_StridedShard`).

    Example:
        >>> spec = DTensorSpec(mesh, (Shard(0),), TensorMeta(torch.Size([8]), (1,), torch.float32))
        >>> DTensor(torch.ones(4), spec, requires_grad=False).shape
        torch.Size([8])
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    tensor_meta: TensorMeta | None = None
    shard_order: ShardOrder | None = None

    def __post_init__(self) -> None:
        mesh = as_mesh(self.mesh)
        if not isinstance(self.placements, Sequence) or len(self.placements) != mesh.ndim:
            raise LayoutError(
                f"placements: expected a tuple of {mesh.ndim}, one per axis of {mesh!r}; "
                f"got {format_value(self.placements)}"
            )
        placements = tuple(
            as_placement(each, f"placements[{at}]") for at, each in enumerate(self.placements)
        )
        object.__setattr__(self, "mesh", mesh)
        object.__setattr__(self, "placements", placements)
        if self.shard_order is None and all(type(each) in _UNORDERED for each in placements):
            object.__setattr__(self, "shard_order", _order_of_mesh(placements))

    @staticmethod
    def of(layout: Layout, stride: tuple[int, ...], dtype: torch.dtype) -> DTensorSpec:
        """Return the spec of a tensor of this layout."""
        return DTensorSpec(layout.mesh, layout.placements, TensorMeta(layout.size, stride, dtype))

    @staticmethod
    def from_dim_map(
        mesh: DeviceMesh | TorchMesh,
        dim_map: Sequence[int],
        sums: Sequence[int],
        tensor_meta: TensorMeta | None = None,
    ) -> DTensorSpec:
        """Return the spec of a tensor whose dims are split over the given axes.

        Arguments:
            mesh: the mesh of the ranks.
            dim_map: for each dim the axis that splits it, or -1.
            sums: the axes with a pending sum.
            tensor_meta: as for `DTensorSpec`.
        """
        mesh = as_mesh(mesh)
        placements: list[Placement] = [Replicate()] * mesh.ndim
        uses = [(axis, Partial()) for axis in sums]
        uses += [(axis, Shard(dim)) for dim, axis in enumerate(dim_map) if axis >= 0]  # type: ignore[misc]
        for axis, placement in uses:
            if placements[axis] != Replicate():
                raise LayoutError(
                    f"dim_map: expected each axis once, got axis {axis} for both "
                    f"{placements[axis]} and {placement}"
                )
            placements[axis] = placement
        return DTensorSpec(mesh, tuple(placements), tensor_meta)

    @staticmethod
    def compute_default_shard_order(placements: Sequence[Placement]) -> ShardOrder:
        """Return the axes that split each dim, in the order of the mesh."""
        return _order_of_mesh(placements)

    @staticmethod
    def is_default_device_order(shard_order: ShardOrder | None) -> bool:
        """Return whether the axes that split a dim are in the order of the mesh."""
        return shard_order is not None and all(
            list(each.mesh_dims) == sorted(each.mesh_dims) for each in shard_order
        )

    @property
    def _layout(self) -> Layout:
        """The layout that it describes."""
        return layout_of_spec(self)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh."""
        return self.mesh

    @property
    def shape(self) -> torch.Size:
        """The global shape."""
        return self._meta().shape

    @property
    def stride(self) -> tuple[int, ...]:
        """The strides of the global tensor."""
        return self._meta().stride

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self._meta().shape)

    @property
    def num_shards(self) -> int:
        """The number of shards that the tensor is split into."""
        number = 1
        for axis, placement in enumerate(self.placements):
            number *= self.mesh.size(axis) if placement.is_shard() else 1
        return number

    @property
    def num_shards_map(self) -> list[int]:
        """For each dim, the number of shards that it is split into."""
        numbers = [1] * self.ndim
        for axis, placement in enumerate(self.placements):
            if isinstance(placement, Shard):
                numbers[placement.dim] *= self.mesh.size(axis)
        return numbers

    @property
    def dim_map(self) -> list[int]:
        """For each dim, the axis that splits it, or -1."""
        axes = [-1] * self.ndim
        for axis, placement in enumerate(self.placements):
            if isinstance(placement, Shard):
                if axes[placement.dim] >= 0:
                    raise LayoutError(
                        f"dim_map: expected one axis per dim, but axes {axes[placement.dim]} and "
                        f"{axis} split dim {placement.dim}; read spec.shard_order"
                    )
                axes[placement.dim] = axis
        return axes

    @property
    def sums(self) -> list[int]:
        """The axes with a pending reduction."""
        return [axis for axis, each in enumerate(self.placements) if each.is_partial()]

    def is_replicated(self) -> bool:
        """Return whether every rank holds the whole tensor."""
        return all(placement.is_replicate() for placement in self.placements)

    def is_sharded(self) -> bool:
        """Return whether some dim is split."""
        return any(placement.is_shard() for placement in self.placements)

    def shallow_copy_with_tensor_meta(self, tensor_meta: TensorMeta | None) -> DTensorSpec:
        """Return the spec with another shape, strides and dtype."""
        return replace(self, tensor_meta=tensor_meta)

    def _meta(self) -> TensorMeta:
        if self.tensor_meta is None:
            raise LayoutError("tensor_meta: expected a shape, strides and a dtype; got None")
        return self.tensor_meta


_UNORDERED = (Shard, Replicate, Partial)


def _order_of_mesh(placements: Sequence[Placement]) -> ShardOrder:
    axes: dict[int, tuple[int, ...]] = {}
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            axes[placement.dim] = (*axes.get(placement.dim, ()), axis)
    return tuple(ShardOrderEntry(*each) for each in sorted(axes.items()))


def layout_of_spec(spec: Any) -> Layout:
    """Return the layout that a spec of shardwise or torch describes."""
    meta = getattr(spec, "tensor_meta", None)
    if meta is None or not hasattr(spec, "placements"):
        raise also(LayoutError, TypeError)(
            "spec: expected a DTensorSpec with its tensor_meta, got "
            f"{format_value(spec)} ({type(spec).__name__})"
        )
    order = spec.shard_order
    axes = None if order is None else {each.tensor_dim: each.mesh_dims for each in order}
    return Layout.from_placements(spec.mesh, meta.shape, spec.placements, axes)
