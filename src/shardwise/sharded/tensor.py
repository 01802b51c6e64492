"""ShardedTensor: a tensor described by explicit shards, of which each rank holds some or none.

Python sees a tensor of the global size without memory of its own; the elements, and everything that
autograd knows, are in the local shards. `shardwise.sharded.operators` gives the class its
`__torch_function__`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from shardwise import stored
from shardwise.box import Box
from shardwise.layout_input import short_dtype
from shardwise.mesh import DeviceMesh
from shardwise.sharded import converting, moving, remote, saving
from shardwise.sharded.building import (
    from_local_shards,
    from_local_shards_and_global_metadata,
    from_local_tensor,
)
from shardwise.sharded.copying import Copying
from shardwise.sharded.errors import ShardedStateError, ShardedTensorError
from shardwise.sharded.group import GroupLike, as_group
from shardwise.sharded.held import Held, mine
from shardwise.sharded.local import check_can_pin
from shardwise.sharded.metadata import ShardedTensorMetadata, ShardMetadata
from shardwise.sharded.moving import Move
from shardwise.sharded.shard import Shard
from shardwise.sharded.specs import ShardingSpec, as_spec, metadata_of, summary
from shardwise.tensor import DTensor
from shardwise.torch_internals import PARAMETER_FLAG


class ShardedTensor(Copying):
    """A tensor in shards, held by the ranks of a process group. All ranks make it, with the same
    arguments.

    Arguments:
        sharding_spec: how it is cut, and who holds which shard.
        size: the global size, as numbers or one sequence of them.
        dtype: of all shards; torch's default by default.
        layout: torch.strided.
        requires_grad: whether autograd records what is done with the shards.
        pin_memory: whether the shards, on the CPU, are in pinned memory.
        memory_format: torch.contiguous_format.
        process_group: the ranks that take part; all by default. A ProcessGroup, or a DeviceMesh,
            which simulated ranks have too.
        init_rrefs: let every rank have references to the shards of all (`remote_shards`). RPC must
            be running.

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
        group = as_group(process_group)
        with remote.together(group, init_rrefs):
            if pin_memory:
                check_can_pin()
            held = Held.of(self._metadata.shards_metadata, group)
            shards = []
            for each in mine(self._metadata, held, group):
                tensor = torch.empty(
                    each.shard_sizes,
                    dtype=self.dtype,
                    device=each.device,
                    pin_memory=pin_memory,
                    requires_grad=requires_grad,
                )
                shards.append(Shard(tensor, each))
        self._become(group, held, shards, init_rrefs)

    makes_dtensors = True
    """Beside a DTensor, this class runs the function (see `shardwise.dispatch`)."""

    # ---- of pieces that ranks have

    _init_from_local_shards = staticmethod(from_local_shards)
    _init_from_local_tensor = staticmethod(from_local_tensor)
    _init_from_local_shards_and_global_metadata = staticmethod(  # type: ignore[assignment]
        from_local_shards_and_global_metadata
    )

    # ---- what it is

    @property
    def _process_group(self) -> Any:
        return self._group.handle

    def remote_shards(self) -> dict[int, list[Any]]:
        """References (`torch.distributed.rpc.RRef`) to the shards of the other ranks, by rank.

        Ranks that hold no shards are not among them.

        Example:
            >>> (reference,) = x.remote_shards()[1]
            >>> reference.to_here().tensor  # a copy of what rank 1 holds
        """
        if not self._init_rrefs:
            raise ShardedStateError(
                "remote_shards: it was made with init_rrefs=False, so there are no references; "
                "start RPC (torch.distributed.rpc.init_rpc) and make it with init_rrefs=True"
            )
        given = self._references
        return {rank: list(given[rank]) for rank in self._group.ranks if rank in given}

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
            dtype: what the elements are converted to before they travel. By default they travel
                as they are, and `out` must be able to hold them.
        """
        self._group.check_member(dst, "dst")
        like, tensors = self._like(), self._tensors()
        if dtype is not None:
            like, tensors = like.to(dtype), [each.detach().to(dtype) for each in tensors]
        problem = self._problem_with(out, dst, like.dtype, enforce_dtype)
        into = None
        if out is not None and not problem and _can_be_received_in(out, like, tensors):
            into = [out.detach()]
        move = Move(
            self._group, self._held, Held.whole(self._metadata.size, dst), "ShardedTensor.gather"
        )
        results = move.run(tensors, like, into)
        if problem:  # all ranks have taken part before one complains: nobody is left waiting
            raise ShardedTensorError(problem)
        if out is not None and into is None:
            out.detach().copy_(results[0])

    def _problem_with(
        self, out: torch.Tensor | None, dst: int, dtype: torch.dtype, enforce_dtype: bool
    ) -> str:
        """What is wrong about where a gathered tensor should be written; nothing if all is well."""
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
        if not _holds(out.dtype, dtype):
            return (
                f"out: expected {dtype}, or what holds it without loss; got {out.dtype}. "
                f"To convert, say gather(dtype={out.dtype})"
            )
        return ""

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor, on every rank; differentiable, if what follows is the same on all."""
        out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        return moving.whole(self._held, self._group, self._tensors(), out, self._empty())

    def reshard(self, resharding_spec: ShardingSpec) -> ShardedTensor:
        """Cut it otherwise, in place; returns itself. All ranks call it.

        Any spec can follow any other. A leaf, such as a parameter, stays one, and its gradient
        moves with it; of what was computed, the move is recorded and gradients move back.
        """
        with remote.together(self._group, self._init_rrefs):
            as_spec(resharding_spec, "resharding_spec")
            properties = replace(self._metadata.tensor_properties)
            metadata = metadata_of(resharding_spec, self._metadata.size, properties)
            _check_devices(metadata.shards_metadata, self._metadata.shards_metadata)
            held = Held.of(metadata.shards_metadata, self._group)
        if held == self._held:  # perhaps by other names of the same ranks
            self._become_cut(resharding_spec, metadata, held, self._tensors())
            return self
        move = Move(self._group, self._held, held)
        requires_grad = self.requires_grad
        was_computed, has_gradient = self._history() if requires_grad else (False, False)
        recorded = was_computed and torch.is_grad_enabled()
        if recorded:
            move.check_gradients_return("resharding_spec")
        nothing = self._empty() if recorded else None
        tensors = moving.moved(move, self._tensors(), self._like(), nothing)
        if requires_grad and not was_computed:
            tensors = [each.requires_grad_() for each in tensors]
            if has_gradient:
                old = [_gradient(each) for each in self._tensors()]
                for tensor, new in zip(tensors, move.run(old, self._like()), strict=True):
                    tensor.grad = new
        self._become_cut(resharding_spec, metadata, held, tensors)
        self._nothing = None
        if was_computed and not recorded:
            self._note_requires_grad(False)
        if has_gradient and not was_computed and not tensors:
            self._note_gradient()
        return self

    def _become_cut(
        self,
        spec: ShardingSpec,
        metadata: ShardedTensorMetadata,
        held: Held,
        tensors: Sequence[torch.Tensor],
    ) -> None:
        self._metadata, self._sharding_spec, self._held = metadata, spec, held
        self._local_shards = list(map(Shard, tensors, mine(metadata, held, self._group)))
        if self._init_rrefs:
            remote.register(self)

    def _history(self) -> tuple[bool, bool]:
        """Whether a shard of any rank is the result of a recorded operation; has a gradient."""
        tensors = self._tensors()
        facts = [
            any(not tensor.is_leaf for tensor in tensors),
            any(tensor.is_leaf and tensor.grad is not None for tensor in tensors),
        ]
        mine = torch.tensor(facts, device=self.device)
        was_computed, has_gradient = self._group.communicator.all_reduce(mine, "max").tolist()
        return was_computed, has_gradient

    # ---- beside DTensors

    def to_dtensor(self, device_mesh: DeviceMesh | None = None) -> DTensor:
        """The same tensor as a DTensor, if the shards are such a layout; differentiable.

        It shares the memory of the shards, if no rank holds several.

        Arguments:
            device_mesh: on which mesh; by default on one whose ranks are in the order of the
                shards, with an axis for each dim that is cut.
        """
        return converting.to_dtensor(self, device_mesh)

    @staticmethod
    def from_dtensor(tensor: DTensor, process_group: GroupLike = None) -> ShardedTensor:
        """The same tensor as explicit shards, sharing memory; differentiable.

        Arguments:
            tensor: split so that every element is on one rank.
            process_group: the ranks that take part; those of its mesh by default.
        """
        return converting.from_dtensor(tensor, process_group)

    # ---- as an object

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        name = "Parameter, " if getattr(self, PARAMETER_FLAG, False) else ""
        history = ", requires_grad=True" if self.requires_grad else ""
        size = f"{short_dtype(self.dtype)}[{', '.join(map(str, self.shape))}]"
        local = ", ".join(f"{each.metadata.box}: {each.tensor!r}" for each in self._local_shards)
        text = f"{name}{size}, {summary(self._sharding_spec)}{history}, local={{{local}}}"
        return f"{type(self).__name__}({text})"

    ProcessGroupState = saving.ProcessGroupState

    def __getstate__(self) -> saving.State:
        return saving.state_of(self)

    def __setstate__(self, state: saving.State) -> None:
        saving.restore(self, state)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return saving.reduced(self)

    def __create_chunk_list__(self) -> list[Any]:
        """The boxes that this rank holds, in the words of torch's checkpoints."""
        return stored.chunks(self._held.by(self._group.rank), self.shape)

    def __create_write_items__(self, name: str, tensor: Any) -> list[Any]:
        """What this rank writes to a checkpoint: its shards."""
        boxes = self._held.by(self._group.rank)
        strides = self._metadata.tensor_properties.strides
        return stored.write_items(name, boxes, self.shape, self._like(), strides)

    global_shape = stored.ProtocolField(stored.global_shape)
    global_offsets = stored.ProtocolField(stored.global_offsets)
    local_offsets = stored.ProtocolField(stored.local_offsets)
    local_sizes = stored.ProtocolField(stored.local_sizes)

    def _stored_parts(self) -> list[tuple[Box, Box]]:
        """Each shard is a tensor of its own."""
        boxes = self._held.by(self._group.rank)
        return [(box, Box((0,) * len(box.shape), box.shape)) for box in boxes]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        """Where a checkpoint is read to, or written from."""
        for shard in self._local_shards:
            if index.offset is None or shard.metadata.shard_offsets == list(index.offset):
                return shard.tensor.detach()
        raise ShardedTensorError(
            f"checkpoint: expected the offsets of a shard of this rank, got {index}"
        )


def _can_be_received_in(
    out: torch.Tensor, like: torch.Tensor, sent: Sequence[torch.Tensor]
) -> bool:
    """Whether what travels can be written to a tensor as it comes: not to several elements in the
    same memory, which torch refuses, nor to memory from which others are still sent."""
    memory = out.untyped_storage().data_ptr()
    is_apart = all(each.untyped_storage().data_ptr() != memory for each in sent)
    is_alike = out.dtype == like.dtype and out.device == like.device
    return is_alike and is_apart and out.is_contiguous()


def _holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether elements of the other dtype can be converted to the first without loss."""
    if dtype == other or other == torch.bool:
        return True
    if _is_whole(dtype) != _is_whole(other):
        return False
    try:
        return torch.promote_types(dtype, other) == dtype
    except RuntimeError:  # torch does not promote the smallest floats and the unsigned integers
        return False


def _is_whole(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex


def _check_devices(after: Sequence[ShardMetadata], before: Sequence[ShardMetadata]) -> None:
    """Refuse placements on devices that no shard was on: to reshard is to move between ranks."""
    known = {each.device.type for each in before}
    for each in after:
        if each.placement is not None and each.device.type not in known:
            raise ShardedTensorError(
                f"resharding_spec: expected placements on {' or '.join(sorted(known))}, where the "
                f"shards are; got {each.placement}. To change the device, say to(device) first"
            )


def _gradient(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


# What a pickled one is made of, so that torch.load takes it.
torch.serialization.add_safe_globals([ShardedTensor, *saving.SAFE])
