"""ShardedTensor: a tensor described by explicit shards, of which each rank holds some or none.

Python sees a tensor of the global size without memory of its own. The elements, and all that
autograd knows, are in the local shards. `shardwise.sharded.dispatch` sets the class's
`__torch_function__`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from shardwise.core.box import Box
from shardwise.core.errors import ShardedStateError, ShardedTensorError
from shardwise.core.layout_input import short_dtype
from shardwise.core.mesh import DeviceMesh
from shardwise.dtensor import dcp
from shardwise.dtensor.tensor import DTensor
from shardwise.sharded import as_dtensor, pickle, remote, transfer
from shardwise.sharded.base import check_can_pin
from shardwise.sharded.copying import CopyMethods
from shardwise.sharded.group import (
    GroupLike,
    ShardOwnership,
    as_rank_group,
    in_rank_order,
    local_metadata,
)
from shardwise.sharded.metadata import Shard, ShardedTensorMetadata, ShardMetadata
from shardwise.sharded.specs import ShardingSpec, as_spec, build_checked_metadata, format_spec
from shardwise.sharded.transfer import ShardMove
from shardwise.torch_internals import PARAMETER_FLAG
from shardwise.torch_patches import state_dicts


class ShardedTensor(CopyMethods):
    """A tensor in shards, held by the ranks of a process group. All ranks make it, with the same
    arguments.

    Arguments:
        sharding_spec: how the tensor is cut, and which rank holds which shard.
        size: the global size, as numbers or one sequence of them.
        dtype: the dtype of all shards; torch's default dtype by default.
        layout: torch.strided.
        requires_grad: whether autograd records operations on the shards.
        pin_memory: whether the shards, on the CPU, are in pinned memory.
        memory_format: torch.contiguous_format.
        process_group: the ranks that take part; all by default. A ProcessGroup, or a DeviceMesh,
            which simulated ranks have too.
        init_rrefs: give every rank references to the shards of all ranks (`remote_shards`). RPC
            must be running.

    Example:
        >>> spec = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
        >>> ShardedTensor(spec, 10, 4).local_tensor().shape
        torch.Size([5, 4])
    """

    def __init__(
        self,
        sharding_spec: ShardingSpec,
        *size: Any,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        requires_grad: bool = False,
        pin_memory: bool = False,
        memory_format: torch.memory_format = torch.contiguous_format,
        process_group: GroupLike = None,
        init_rrefs: bool = False,
    ) -> None:
        group = as_rank_group(process_group)
        with remote.guard_exchange(group, init_rrefs):
            if pin_memory:
                check_can_pin()
            ownership = ShardOwnership.of(self._metadata.shards_metadata, group)
            shards = []
            for each in local_metadata(self._metadata, ownership, group):
                tensor = torch.empty(
                    each.shard_sizes,
                    dtype=self.dtype,
                    device=each.device,
                    pin_memory=pin_memory,
                    requires_grad=requires_grad,
                )
                shards.append(Shard(tensor, each))
        self._set_shards(group, ownership, shards, init_rrefs)

    makes_dtensors = True
    """In a call with DTensors, this class runs the function (see `shardwise.dispatch`)."""

    @property
    def _process_group(self) -> Any:
        return self._group.handle

    def remote_shards(self) -> dict[int, list[Any]]:
        """Return references (`torch.distributed.rpc.RRef`) to the shards of the other ranks, by
        rank.

        Ranks that hold no shards are left out.

        Example:
            >>> (reference,) = x.remote_shards()[1]
            >>> reference.to_here().tensor  # a copy of the shard of rank 1
        """
        if not self._init_rrefs:
            raise ShardedStateError(
                "remote_shards: it was made with init_rrefs=False, so there are no references; "
                "start RPC (torch.distributed.rpc.init_rpc) and make it with init_rrefs=True"
            )
        found = self._references
        return {rank: list(found[rank]) for rank in self._group.ranks if rank in found}

    # ---- moves

    def gather(  # type: ignore[override]
        self,
        dst: int = 0,
        out: torch.Tensor | None = None,
        enforce_dtype: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Write the whole tensor to `out` on one rank; all ranks call it. Not differentiable.

        Arguments:
            dst: the global rank that gets it.
            out: on that rank a tensor of the global size; None on the others.
            enforce_dtype: insist that `out` has this tensor's dtype (deprecated in torch).
            dtype: the dtype that elements are converted to before they are sent. By default they
                are sent as they are, and `out` must be able to hold them.
        """
        self._group.check_member(dst, "dst")
        like, tensors = self._prototype(), self._local_tensors()
        if dtype is not None:
            like, tensors = like.to(dtype), [each.detach().to(dtype) for each in tensors]
        problem = self._problem_with(out, dst, like.dtype, enforce_dtype)
        into = None  # by default received in a new tensor, and copied to `out`
        if out is not None and not problem and _can_receive(out, like, tensors):
            into = [out.detach()]
        target = ShardOwnership.whole(self._metadata.size, dst)
        target.state(f"ShardedTensor.gather(dst={dst}, dtype={like.dtype})", self._group)
        move = ShardMove(self._group, self._ownership, target, "ShardedTensor.gather")
        results = move.run(tensors, like, into)
        if problem:  # raised after the transfer, in which all ranks wait for each other
            raise ShardedTensorError(problem)
        if out is not None and into is None:
            out.detach().copy_(results[0])

    def _problem_with(
        self, out: torch.Tensor | None, dst: int, dtype: torch.dtype, enforce_dtype: bool
    ) -> str:
        """Return the error message for a wrong `out` of `gather`; an empty one if it is right."""
        if self._group.rank != dst:
            if out is None:
                return ""
            return f"out: expected None on this rank, as rank {dst} gathers; got a tensor"
        size = tuple(self.shape)
        if out is None:
            return f"out: expected a tensor of size {size} on the rank that gathers, got None"
        if out.shape != self.shape:
            return f"out: expected a tensor of size {size}, got {tuple(out.shape)}"
        if enforce_dtype and out.dtype != dtype:
            return f"out: expected {dtype}, as enforce_dtype says; got {out.dtype}"
        if not _can_hold(out.dtype, dtype):
            return (
                f"out: expected {dtype}, or what holds it without loss; got {out.dtype}. "
                f"To convert, say gather(dtype={out.dtype})"
            )
        return ""

    def full_tensor(self) -> torch.Tensor:
        """Return the whole tensor on every rank. Backward: each rank's own part of the gradient, if
        all ranks compute the same from the result."""
        out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        return transfer.gather_shards(
            self._ownership, self._group, self._local_tensors(), out, self._get_placeholder()
        )

    def reshard(self, resharding_spec: ShardingSpec) -> ShardedTensor:
        """Cut the tensor by another spec, in place; returns itself. All ranks call it.

        Any spec can follow any other. A leaf, such as a parameter, stays a leaf, and its gradient
        moves with it. For the result of recorded operations the move is recorded too. Backward:
        gradients move back.
        """
        with remote.guard_exchange(self._group, self._init_rrefs):
            as_spec(resharding_spec, "resharding_spec")
            properties = replace(self._metadata.tensor_properties)
            metadata = build_checked_metadata(resharding_spec, self._metadata.size, properties)
            _check_devices(metadata.shards_metadata, self._metadata.shards_metadata)
            ownership = ShardOwnership.of(metadata.shards_metadata, self._group)
        if ownership != self._ownership:  # torch lists the shards by rank then
            metadata, ownership = in_rank_order(metadata, ownership)
        ownership.state("ShardedTensor.reshard", self._group)
        if ownership == self._ownership:  # the spec may name the same ranks differently
            self._set_sharding(resharding_spec, metadata, ownership, self._local_tensors())
            return self
        move = ShardMove(self._group, self._ownership, ownership)
        requires_grad = self.requires_grad
        is_computed, has_gradient = self._history() if requires_grad else (False, False)
        is_recorded = is_computed and torch.is_grad_enabled()
        if is_recorded:
            move.check_gradients_return("resharding_spec")
        placeholder = self._get_placeholder() if is_recorded else None
        tensors = transfer.move_shards(move, self._local_tensors(), self._prototype(), placeholder)
        if requires_grad and not is_computed:
            tensors = [each.requires_grad_() for each in tensors]
            if has_gradient:
                old = [_gradient(each) for each in self._local_tensors()]
                for tensor, new in zip(tensors, move.run(old, self._prototype()), strict=True):
                    tensor.grad = new
        self._set_sharding(resharding_spec, metadata, ownership, tensors)
        self._placeholder = None
        if is_computed and not is_recorded:
            self._set_requires_grad_flag(False)
        if has_gradient and not is_computed and not tensors:
            self._set_placeholder_grad()
        return self

    def _set_sharding(
        self,
        spec: ShardingSpec,
        metadata: ShardedTensorMetadata,
        ownership: ShardOwnership,
        tensors: Sequence[torch.Tensor],
    ) -> None:
        """Describe this tensor by another spec, with these local tensors."""
        self._metadata, self._sharding_spec, self._ownership = metadata, spec, ownership
        own = local_metadata(metadata, ownership, self._group)
        self._local_shards = list(map(Shard, tensors, own))
        if self._init_rrefs:
            self._references = remote.exchange_references(self._group, self._local_shards)

    def _history(self) -> tuple[bool, bool]:
        """Return whether a shard of any rank is the result of a recorded operation, and whether one
        has a gradient."""
        tensors = self._local_tensors()
        facts = [
            any(not tensor.is_leaf for tensor in tensors),
            any(tensor.is_leaf and tensor.grad is not None for tensor in tensors),
        ]
        local = torch.tensor(facts, device=self.device)
        is_computed, has_gradient = self._group.communicator.all_reduce(local, "max").tolist()
        return is_computed, has_gradient

    # ---- conversion to and from DTensors

    def to_dtensor(self, device_mesh: DeviceMesh | None = None) -> DTensor:
        """Return this tensor as a DTensor, if the shards form a layout of a DTensor;
        differentiable.

        It shares the memory of the shards, if no rank holds several.

        Arguments:
            device_mesh: the mesh of the DTensor; by default one whose ranks are in the order of the
                shards, with an axis for each dim that is cut.
        """
        return as_dtensor.to_dtensor(self, device_mesh)

    @staticmethod
    def from_dtensor(tensor: DTensor, process_group: GroupLike = None) -> ShardedTensor:
        """Return a DTensor as a sharded tensor that shares its memory; differentiable.

        Arguments:
            tensor: split so that every element is on one rank.
            process_group: the ranks that take part; those of its mesh by default.
        """
        return as_dtensor.from_dtensor(ShardedTensor, tensor, process_group)

    # ---- text, pickles and checkpoints

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        name = "Parameter, " if getattr(self, PARAMETER_FLAG, False) else ""
        history = ", requires_grad=True" if self.requires_grad else ""
        size = f"{short_dtype(self.dtype)}[{', '.join(map(str, self.shape))}]"
        local = ", ".join(f"{each.metadata.box}: {each.tensor!r}" for each in self._local_shards)
        text = f"{name}{size}, {format_spec(self._sharding_spec)}{history}, local={{{local}}}"
        return f"{type(self).__name__}({text})"

    ProcessGroupState = pickle.ProcessGroupState

    def __getstate__(self) -> pickle.PickledState:
        return pickle.state_of(self)

    def __setstate__(self, state: pickle.PickledState) -> None:
        pickle.restore(self, state)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return pickle.reduce(self)

    def __create_chunk_list__(self) -> list[Any]:
        """Describe the boxes that this rank holds, for torch.distributed.checkpoint."""
        return dcp.chunks(self._local_boxes(), self.shape)

    def __create_write_items__(self, name: str, tensor: Any) -> list[Any]:
        """Describe the shards that this rank writes to a checkpoint."""
        strides = self._metadata.tensor_properties.strides
        boxes, like = self._local_boxes(), self._prototype()
        return dcp.write_items(name, boxes, self.shape, like, strides)

    global_shape = dcp.ProtocolField(dcp.global_shape)
    global_offsets = dcp.ProtocolField(dcp.global_offsets)
    local_offsets = dcp.ProtocolField(dcp.local_offsets)
    local_sizes = dcp.ProtocolField(dcp.local_sizes)

    def _stored_parts(self) -> list[tuple[Box, Box]]:
        """Return the boxes of this rank in the whole tensor, and in the shard, which has each
        alone."""
        return [(box, Box((0,) * len(box.shape), box.shape)) for box in self._local_boxes()]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        """Return the local tensor that a checkpoint reads into, or writes."""
        for shard in self._local_shards:
            if index.offset is None or shard.metadata.shard_offsets == list(index.offset):
                return shard.tensor.detach()
        raise ShardedTensorError(
            f"checkpoint: expected the offsets of a shard of this rank, got {index}"
        )


def to_dtensor(tensor: ShardedTensor, device_mesh: DeviceMesh | None = None) -> DTensor:
    """Return a sharded tensor as a DTensor: `tensor.to_dtensor(device_mesh)`."""
    return tensor.to_dtensor(device_mesh)


def as_full_tensor(value: Any) -> Any:
    """Return a sharded tensor or a DTensor as a plain tensor, and other values as they are."""
    return value.full_tensor() if isinstance(value, ShardedTensor | DTensor) else value


def _can_receive(out: torch.Tensor, like: torch.Tensor, sent: Sequence[torch.Tensor]) -> bool:
    """Return whether elements can be received directly in a tensor: it is contiguous, of the same
    dtype and device, and not the memory that others are still sent from."""
    memory = out.untyped_storage().data_ptr()
    is_apart = all(each.untyped_storage().data_ptr() != memory for each in sent)
    is_alike = out.dtype == like.dtype and out.device == like.device
    return is_alike and is_apart and out.is_contiguous()


def _can_hold(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Return whether elements of the other dtype can be converted to the first without loss."""
    if dtype == other or other == torch.bool:
        return True
    if _is_integral(dtype) != _is_integral(other):
        return False
    try:
        return torch.promote_types(dtype, other) == dtype
    except RuntimeError:  # torch does not promote the smallest floats and the unsigned integers
        return False


def _is_integral(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex


def _check_devices(after: Sequence[ShardMetadata], before: Sequence[ShardMetadata]) -> None:
    """Refuse device types that no shard was on: resharding moves elements between ranks only."""
    known = {each.device.type for each in before}
    for each in after:
        if each.placement is not None and each.device.type not in known:
            raise ShardedTensorError(
                f"resharding_spec: expected placements on {' or '.join(sorted(known))}, where the "
                f"shards are; got {each.placement}. To change the device, say to(device) first"
            )


def _gradient(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


# Let torch.load read pickled sharded tensors with weights_only=True.
torch.serialization.add_safe_globals([ShardedTensor, *pickle.SAFE_GLOBALS])
# Torch's helpers for state dicts gather them.
state_dicts.global_types.append(ShardedTensor)
