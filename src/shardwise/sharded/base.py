"""What a sharded tensor is to torch: a size, and no memory of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from shardwise.checks import as_ints
from shardwise.sharded.errors import ShardedTensorError
from shardwise.sharded.metadata import ShardedTensorMetadata, TensorProperties
from shardwise.sharded.shard import Shard
from shardwise.sharded.specs import ShardingSpec, as_size, as_spec, checked_spec, metadata_of
from shardwise.torch_internals import make_wrapper_subclass


class ShardedTensorBase(torch.Tensor):
    """Shards and what describes them, without a process group: nothing that communicates.

    Arguments:
        sharding_spec: how it is cut.
        size: the global size, as numbers or one sequence of them.
        strides: those of the whole tensor, which it then has; contiguous ones by default.
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
        metadata = metadata_of(sharding_spec, as_size(size, "size"), properties)
        return bare(cls, sharding_spec, metadata, [])

    def metadata(self) -> ShardedTensorMetadata:
        """The shards of all ranks, the global size, and what the shards have in common."""
        return self._metadata

    def sharding_spec(self) -> ShardingSpec:
        """How it is cut."""
        return self._sharding_spec

    def local_shards(self) -> list[Shard]:
        """The shards that this rank holds; perhaps none."""
        return self._local_shards

    @classmethod
    def _init_from_local_shards_and_global_metadata(
        cls,
        local_shards: Sequence[Shard],
        sharded_tensor_metadata: ShardedTensorMetadata,
        sharding_spec: ShardingSpec | None = None,
    ) -> ShardedTensorBase:
        """Of this rank's shards and the metadata of all; only the metadata is checked."""
        spec = checked_spec(sharded_tensor_metadata, sharding_spec)
        return bare(ShardedTensorBase, spec, sharded_tensor_metadata, list(local_shards))

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


Kind = TypeVar("Kind", bound=ShardedTensorBase)


def bare(
    cls: type[Kind], spec: ShardingSpec, metadata: ShardedTensorMetadata, shards: list[Shard]
) -> Kind:
    """A tensor object of the metadata's size that holds these shards."""
    properties = metadata.tensor_properties
    strides = properties.strides
    if strides is not None and (as_ints(strides) is None or len(strides) != len(metadata.size)):
        raise ShardedTensorError(
            f"strides: expected {len(metadata.size)} numbers, one per dim of "
            f"{tuple(metadata.size)}, or None; got {strides!r}"
        )
    made: Any = make_wrapper_subclass(
        cls,
        metadata.size,
        strides=strides,
        dtype=properties.dtype,
        requires_grad=properties.requires_grad,
    )
    made._sharding_spec, made._metadata, made._local_shards = spec, metadata, shards
    return made  # type: ignore[no-any-return]
