"""Base classes of `ShardedTensor`: the wrapper object, its local shards and their gradients.

The other modules of this package work on `ShardedTensorCore`, so that `ShardedTensor` can use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, TypeVar

import torch

from shardwise.core.box import Box
from shardwise.core.checks import as_ints
from shardwise.core.errors import ShardedStateError, ShardedTensorError
from shardwise.core.layout import Layout
from shardwise.sharded import remote
from shardwise.sharded.group import RankGroup, ShardOwnership, local_metadata
from shardwise.sharded.metadata import Shard, ShardedTensorMetadata, TensorProperties
from shardwise.sharded.specs import (
    ShardingSpec,
    as_size,
    as_spec,
    build_checked_metadata,
    checked_spec,
    infer_spec,
)
from shardwise.torch_internals import TensorBase, make_wrapper_subclass

_get_requires_grad: Any = TensorBase.requires_grad.__get__
_set_requires_grad: Any = TensorBase.requires_grad.__set__


class ShardedTensorBase(torch.Tensor):
    """Shards and their metadata, without a process group and without communication.

    Arguments:
        sharding_spec: how the tensor is cut.
        size: the global size, as numbers or one sequence of them.
        strides: the strides of the whole tensor; contiguous ones by default.
    """

    _sharding_spec: ShardingSpec
    _metadata: ShardedTensorMetadata
    _local_shards: list[Shard]

    def __new__(
        cls,
        sharding_spec: ShardingSpec,
        *size: Any,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        requires_grad: bool = False,
        pin_memory: bool = False,
        memory_format: torch.memory_format = torch.contiguous_format,
        strides: Sequence[int] | None = None,
        **_: Any,
    ) -> Any:
        as_spec(sharding_spec, "sharding_spec")
        if layout != torch.strided:
            raise ShardedTensorError(f"layout: expected torch.strided, got {layout}")
        if memory_format != torch.contiguous_format:
            raise ShardedTensorError(
                f"memory_format: expected torch.contiguous_format, got {memory_format}"
            )
        properties = TensorProperties(
            dtype or torch.get_default_dtype(),
            layout,
            requires_grad,
            memory_format,
            pin_memory,
            None if strides is None else tuple(strides),
        )
        metadata = build_checked_metadata(sharding_spec, as_size(size, "size"), properties)
        return new_wrapper(cls, sharding_spec, metadata, [])

    def metadata(self) -> ShardedTensorMetadata:
        """Return the shards of all ranks, the global size and the properties of all shards."""
        return self._metadata

    def sharding_spec(self) -> ShardingSpec:
        """Return the spec that says how the tensor is cut."""
        return self._sharding_spec

    def local_shards(self) -> list[Shard]:
        """Return the shards that this rank holds; perhaps none."""
        return self._local_shards

    @classmethod
    def _init_from_local_shards_and_global_metadata(
        cls,
        local_shards: Sequence[Shard],
        sharded_tensor_metadata: ShardedTensorMetadata,
        sharding_spec: ShardingSpec | None = None,
    ) -> ShardedTensorBase:
        """Make a tensor of this rank's shards; the metadata is checked, the shards are not."""
        spec = checked_spec(sharded_tensor_metadata, sharding_spec)
        return new_wrapper(ShardedTensorBase, spec, sharded_tensor_metadata, list(local_shards))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self._metadata})"

    def __format__(self, spec: str) -> str:
        return object.__format__(self, spec)

    def __hash__(self) -> int:
        return id(self)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise ShardedTensorError(
            f"{func}: a {cls.__name__} has no elements of its own that torch's own code could work "
            "on; use its local_shards(), or a ShardedTensor's operators"
        )


_Base = TypeVar("_Base", bound=ShardedTensorBase)


def new_wrapper(
    cls: type[_Base], spec: ShardingSpec, metadata: ShardedTensorMetadata, shards: list[Shard]
) -> _Base:
    """Return a tensor object without memory that has the metadata's size and these shards."""
    properties = metadata.tensor_properties
    strides = properties.strides
    if strides is not None and (as_ints(strides) is None or len(strides) != len(metadata.size)):
        raise ShardedTensorError(
            f"strides: expected {len(metadata.size)} numbers, one per dim of "
            f"{tuple(metadata.size)}, or None; got {strides!r}"
        )
    wrapper: Any = make_wrapper_subclass(
        cls,
        metadata.size,
        strides=strides,
        dtype=properties.dtype,
        requires_grad=properties.requires_grad,
    )
    wrapper._sharding_spec, wrapper._metadata, wrapper._local_shards = spec, metadata, shards
    return wrapper  # type: ignore[no-any-return]


class ShardedTensorCore(ShardedTensorBase):
    """A sharded tensor with its process group, the owners of all shards, and gradients.

    A rank that holds no shards has a placeholder in their place: a tensor without elements that
    goes through the same operations as the shards of other ranks. So this rank raises the same
    errors, its results have the same dtype, and it takes part in collectives of the backward pass.
    """

    _group: RankGroup
    _ownership: ShardOwnership
    """The boxes of all shards, and the rank that holds each."""
    _init_rrefs: bool
    _cached_layout: tuple[ShardOwnership, Layout | None] | None = None
    """The result of `as_dtensor.find_layout`, and the ownership that it is valid for."""
    _placeholder: torch.Tensor | None = None
    """Made on demand by `_get_placeholder`; None on ranks that hold shards."""
    _references: remote.References
    """References to the shards of other ranks; set only with init_rrefs."""

    @classmethod
    def _from_parts(
        cls,
        metadata: ShardedTensorMetadata,
        spec: ShardingSpec,
        tensors: Sequence[torch.Tensor],
        group: RankGroup,
        ownership: ShardOwnership | None = None,
        init_rrefs: bool = False,
    ) -> Self:
        """Make a sharded tensor of parts that have been checked.

        Arguments:
            tensors: the local shards, in the order of the metadata.
            ownership: taken from the metadata by default.
        """
        if ownership is None:
            ownership = ShardOwnership.of(metadata.shards_metadata, group)
        shards = list(map(Shard, tensors, local_metadata(metadata, ownership, group)))
        wrapper = new_wrapper(cls, spec, metadata, [])
        return wrapper._set_shards(group, ownership, shards, init_rrefs)

    def _set_shards(
        self,
        group: RankGroup,
        ownership: ShardOwnership,
        shards: list[Shard],
        init_rrefs: bool = False,
    ) -> Self:
        """Finish the construction of a sharded tensor; all ranks call it, if `init_rrefs`."""
        self._group, self._ownership, self._local_shards = group, ownership, shards
        self._init_rrefs = init_rrefs
        if init_rrefs:
            self._references = remote.exchange_references(group, shards)
        return self

    def _with_tensors(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        device: torch.device | None = None,
        placeholder: torch.Tensor | None = None,
        group: RankGroup | None = None,
        init_rrefs: bool = False,
        **properties: Any,
    ) -> Self:
        """Make a sharded tensor with the same boxes and these local tensors.

        Arguments:
            device: the device of `tensors`; this tensor's by default.
            placeholder: what a rank without shards has in their place; a copy of its placeholder
                here by default.
            properties: the tensor properties that differ: dtype, requires_grad, pin_memory.
        """
        if device is not None:
            # Metadata names the type alone: each rank knows the index of its own device.
            other = device if device.type == "cpu" else torch.device(device.type)
            device = None if device == self.device else other
        metadata = self._metadata.copy(device, **properties)
        common = metadata.tensor_properties
        if not is_differentiable(common.dtype):
            common.requires_grad = False
        spec = self._sharding_spec
        if device is not None:
            spec = infer_spec(metadata.shards_metadata, metadata.size)
            own = local_metadata(metadata, self._ownership, self._group)
        else:
            own = [shard.metadata for shard in self._local_shards]
        result = new_wrapper(type(self), spec, metadata, [])
        shards = list(map(Shard, tensors, own))
        if not own and placeholder is not None:
            is_flat = placeholder.shape == (0,)
            result._placeholder = placeholder if is_flat else placeholder.reshape(-1)[:0]
        elif not own and common.requires_grad and torch.is_grad_enabled():
            result._placeholder = self._get_placeholder().to(common.dtype, copy=True)
        return result._set_shards(group or self._group, self._ownership, shards, init_rrefs)

    def _with_results(self, results: Sequence[torch.Tensor]) -> Self:
        """Make a sharded tensor of what was computed from each of `_tensors_or_placeholder()`,
        with the dtype and the autograd history of the results."""
        first = results[0]
        return self._with_tensors(
            results[: len(self._local_shards)],
            placeholder=first,
            dtype=first.dtype,
            requires_grad=first.requires_grad,
            pin_memory=False,
        )

    def _prototype(self) -> torch.Tensor:
        """Return an empty tensor with this one's dtype and device."""
        return torch.empty(0, dtype=self.dtype, device=self.device)

    def _local_tensors(self) -> list[torch.Tensor]:
        return [shard.tensor for shard in self._local_shards]

    def _local_boxes(self) -> list[Box]:
        return self._ownership.boxes_of(self._group.rank)

    def _tensors_or_placeholder(self) -> list[torch.Tensor]:
        """Return the tensors that functions run on: the local shards, or else the placeholder."""
        return self._local_tensors() or [self._get_placeholder()]

    def _get_placeholder(self, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """Return the placeholder of a rank without shards, always the same one: its autograd
        history is that of all its uses.

        Arguments:
            shape: a shape without elements, as a layout gives to this rank; any by default.
        """
        if self._placeholder is None or self._placeholder.requires_grad != self.requires_grad:
            self._placeholder = self._prototype().requires_grad_(self.requires_grad)
        return self._placeholder if shape is None else self._placeholder.reshape(shape)

    def local_tensor(self) -> torch.Tensor:
        """Return the tensor of the only shard that this rank holds."""
        if len(self._local_shards) != 1:
            raise ShardedTensorError(
                f"local_tensor: expected one shard on this rank, there are "
                f"{len(self._local_shards)}; use local_shards()"
            )
        return self._local_shards[0].tensor

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device of this rank's shards; without shards, the device type of the first shard."""
        if self._local_shards:
            return self._local_shards[0].tensor.device
        return torch.device(self._metadata.shards_metadata[0].device.type)

    # ---- gradients

    @property
    def requires_grad(self) -> bool:
        """Whether autograd records operations on this tensor."""
        return _get_requires_grad(self)  # type: ignore[no-any-return]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Set whether autograd records operations on the shards from now on; returns itself."""
        for tensor in self._local_tensors():
            tensor.requires_grad_(requires_grad)
        if self._placeholder is not None:
            self._placeholder.requires_grad_(requires_grad)
        self._set_requires_grad_flag(requires_grad)
        return self

    def _set_requires_grad_flag(self, requires_grad: bool) -> None:
        """Set the flag of the wrapper and of the metadata, after the local tensors have changed."""
        _set_requires_grad(self, requires_grad)
        self._metadata.tensor_properties.requires_grad = requires_grad

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """Whether no shard of this rank is the result of a recorded operation."""
        return all(tensor.is_leaf for tensor in self._autograd_tensors())

    def _autograd_tensors(self) -> list[torch.Tensor]:
        """Return the local tensors that autograd may know: the shards, or else the placeholder if
        there is one."""
        return self._local_tensors() or ([] if self._placeholder is None else [self._placeholder])

    @property
    def grad(self) -> Self | None:
        """The gradients of the shards; None if one of them has none.

        On a rank without shards it is a tensor without local elements, and None as on the others.
        """
        leaves = self._autograd_tensors()
        found = [tensor.grad for tensor in leaves if tensor.grad is not None]
        if not found or len(found) < len(leaves):
            return None
        return self._with_results(found)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is None:
            for tensor in self._autograd_tensors():
                tensor.grad = None
            return
        if not isinstance(value, ShardedTensorCore) or value._ownership != self._ownership:
            raise ShardedTensorError(
                "grad: expected a ShardedTensor with the same shards as this one, or None; got a "
                f"{type(value).__name__}; torch.zeros_like(x).copy_(value) makes one"
            )
        for tensor, gradient in zip(self._local_tensors(), value._local_tensors(), strict=True):
            tensor.grad = gradient
        if not self._local_shards:
            self._set_placeholder_grad()

    def _set_placeholder_grad(self) -> None:
        """Record on a rank without shards that the shards of other ranks have gradients."""
        placeholder = self._get_placeholder()
        placeholder.grad = torch.zeros_like(placeholder)


def is_differentiable(dtype: torch.dtype) -> bool:
    """Return whether tensors of this dtype can require gradients."""
    return dtype.is_floating_point or dtype.is_complex


def check_can_pin() -> None:
    """Refuse pinned memory where torch has no accelerator to pin it for."""
    if not torch.accelerator.is_available():
        raise ShardedStateError(
            "pin_memory: expected an accelerator on this rank, for which memory is pinned; "
            "there is none that torch can use"
        )
