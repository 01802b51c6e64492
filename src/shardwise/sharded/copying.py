"""Copies of sharded tensors: on another device, of another dtype, apart from autograd, written to.

None of this communicates, but `copy_` from a tensor that is cut otherwise, and what is moved or
copied with its references to remote shards.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from shardwise.dispatch.writes import check_writable
from shardwise.sharded.base import bare
from shardwise.sharded.errors import ShardedStateError, ShardedTensorError
from shardwise.sharded.group import GroupLike, as_group
from shardwise.sharded.held import mine
from shardwise.sharded.local import LocalShards, can_require_gradients, check_can_pin
from shardwise.sharded.moving import Move, moved, same
from shardwise.tensor import DTensor
from shardwise.torch_internals import PARAMETER_FLAG, TensorBase, as_local

_set_data: Any = TensorBase.data.__set__

Kind = TypeVar("Kind", bound="Copying")


class Copying(LocalShards):
    """What makes a sharded tensor of another, with the same boxes."""

    def to(self: Kind, *args: Any, process_group: GroupLike = None, **kwargs: Any) -> Kind:
        """The same on another device or of another dtype, with the arguments of `Tensor.to`.

        Arguments:
            process_group: the group of the result, if another one suits the device.
        """
        model = torch.empty(0, dtype=self.dtype, device=self.device)
        others: Any = [each._like() if isinstance(each, LocalShards) else each for each in args]
        made = model.to(*others, **kwargs)
        if made is model and process_group is None:
            return self
        group = self._group if process_group is None else as_group(process_group)
        if group.ranks != self._group.ranks:
            raise ShardedTensorError(
                f"process_group: expected one of the same ranks {self._group.ranks}, "
                f"got one of {group.ranks}"
            )
        return self._with(
            [each.to(*others, **kwargs) for each in self._tensors()],
            device=made.device,
            dtype=made.dtype,
            group=group,
            init_rrefs=self._init_rrefs,
            requires_grad=self.requires_grad and (made is model or torch.is_grad_enabled()),
            pin_memory=self.is_pinned() and made is model,
        )

    def cpu(
        self: Kind,
        memory_format: torch.memory_format = torch.preserve_format,
        process_group: GroupLike = None,
    ) -> Kind:
        """The same in the CPU's memory; itself if it is there."""
        return self.to("cpu", memory_format=memory_format, process_group=process_group)

    def cuda(
        self: Kind,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
        process_group: GroupLike = None,
    ) -> Kind:
        """The same in the memory of each rank's current GPU, or of another; itself if it is."""
        if not torch.cuda.is_available():
            raise ShardedStateError(
                "cuda: expected a GPU on this rank, there is none that torch can use"
            )
        where = torch.cuda.current_device() if device is None else device
        return self.to(
            torch.device("cuda", where) if isinstance(where, int) else torch.device(where),
            non_blocking=non_blocking,
            memory_format=memory_format,
            process_group=process_group,
        )

    def pin_memory(self: Kind, device: Any = None) -> Kind:
        """The same in pinned memory; itself if it is."""
        if self.is_pinned():
            return self
        check_can_pin()
        return self._with([each.pin_memory() for each in self._tensors()], pin_memory=True)

    def is_pinned(self, device: Any = None) -> bool:
        """Whether the shards are in pinned memory."""
        return self._metadata.tensor_properties.pin_memory

    def clone(self: Kind, *, memory_format: torch.memory_format | None = None) -> Kind:
        """A copy; differentiable."""
        return self._with(
            [each.clone(memory_format=memory_format) for each in self._tensors()],
            requires_grad=self.requires_grad and torch.is_grad_enabled(),
            pin_memory=False,
        )

    def detach(self: Kind) -> Kind:
        """The same elements, apart from what autograd has recorded."""
        made = self._with([each.detach() for each in self._tensors()], requires_grad=False)
        return made._share_references(self)

    def _take_data(self, value: Copying) -> None:
        """Hold the elements of another with the same shards, of another dtype perhaps. The local
        tensors stay the objects that optimizers know."""
        for tensor, new in zip(self._tensors(), value._tensors(), strict=True):
            tensor.data = new
        metadata = value._metadata.copy(requires_grad=self.requires_grad)
        size = bare(type(self), value._sharding_spec, metadata, [])
        with as_local():
            _set_data(self, size)
        self._metadata, self._sharding_spec = metadata, value._sharding_spec
        own = mine(metadata, self._held, self._group)
        for shard, described in zip(self._local_shards, own, strict=True):
            shard.metadata = described
        before, self._nothing = self._nothing, None
        if before is not None and before.grad is not None:
            self._note_gradient()

    def copy_(self: Kind, other: torch.Tensor, non_blocking: bool = False) -> Kind:
        """Take the elements of another tensor, and convert them if need be.

        Arguments:
            other: a sharded tensor, moved here if it is cut otherwise; a DTensor, which is
                gathered; or a plain tensor, the same on every rank. A smaller one is broadcast.
        """
        if other.shape != self.shape:
            other = self._broadcast(other)
        recorded = other.requires_grad and torch.is_grad_enabled()
        for target, source in zip(self._parts(), self._parts_of(other, recorded), strict=True):
            check_writable("copy_", target)
            target.copy_(source, non_blocking)
        if recorded and can_require_gradients(self.dtype):
            self._note_requires_grad(True)
        return self

    def _broadcast(self, other: torch.Tensor) -> torch.Tensor:
        """A smaller tensor as one of this size."""
        lengths = zip(reversed(other.shape), reversed(self.shape), strict=False)
        if other.dim() > self.dim() or any(its not in (1, own) for its, own in lengths):
            raise ShardedTensorError(
                f"copy_: expected a tensor of size {tuple(self.shape)}, or one that broadcasts to "
                f"it; got {tuple(other.shape)}"
            )
        split: Any = other
        if isinstance(other, LocalShards | DTensor):
            other = split.full_tensor()
        return other.expand(self.shape)

    def _pieces_of(self, other: torch.Tensor) -> list[torch.Tensor]:
        """A tensor of the same size, as it lies in these shards."""
        return self._parts_of(other, False)[: len(self._local_shards)]

    def _parts_of(self, other: torch.Tensor, recorded: bool) -> list[torch.Tensor]:
        """A tensor of the same size, as it lies in these shards; no elements of it, on a rank
        without shards.

        Arguments:
            recorded: whether its gradient is to be found.
        """
        if isinstance(other, DTensor):
            other = other.full_tensor()
        if not isinstance(other, LocalShards):
            whole = same(other, self._group) if recorded else other
            boxes = self._held.by(self._group.rank)
            return [whole[box.slices] for box in boxes] or [whole.reshape(-1)[:0]]
        if other._held == self._held:
            return other._parts()
        if other._group.ranks != self._group.ranks:
            raise ShardedTensorError(
                f"other: expected one of the same ranks {self._group.ranks}, got one of "
                f"{other._group.ranks}"
            )
        move = Move(self._group, other._held, self._held)
        if recorded:
            move.check_gradients_return("other")
        nothing = other._empty() if recorded else None
        return moved(move, other._tensors(), other._like(), nothing) or [other._like()]

    def __deepcopy__(self: Kind, memo: dict[int, Any]) -> Kind:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        if not self.is_leaf:
            raise ShardedTensorError(
                "copy.deepcopy: only leaves of the graph can be copied, as in torch; "
                "detach() it, or clone() it to keep its history"
            )
        tensors = [each.detach().clone() for each in self._tensors()]
        apart = self._with(tensors, init_rrefs=self._init_rrefs, requires_grad=False)
        made = self._as_leaf(apart)
        for before, after in zip(self._tensors(), made._tensors(), strict=True):
            if before.grad is not None:
                after.grad = before.grad.detach().clone()
        if not self._local_shards:
            made.grad = self.grad
        memo[id(self)] = made
        return made

    def __copy__(self: Kind) -> Kind:
        return self._as_leaf(self.detach())

    def _as_leaf(self: Kind, made: Kind) -> Kind:
        """A copy that records gradients, and is a parameter, if this is."""
        made.requires_grad_(self.requires_grad)
        if getattr(self, PARAMETER_FLAG, False):
            setattr(made, PARAMETER_FLAG, True)
        return made

    def _share_references(self: Kind, other: Kind) -> Kind:
        """References to the shards of another tensor in the same memory are good for this one."""
        if other._init_rrefs:
            self._init_rrefs, self._references = True, other._references
        return self
