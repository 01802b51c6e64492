"""Methods of sharded tensors that copy: `to`, `cpu`, `cuda`, `clone`, `detach`, `copy_`.

Two of them communicate: `copy_` from a tensor that is cut differently, and any copy of a tensor
that has references to remote shards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch

from shardwise.core.errors import ShardedStateError, ShardedTensorError
from shardwise.dtensor.tensor import DTensor
from shardwise.dtensor.writes import check_writable
from shardwise.sharded.base import ShardedTensorCore, check_can_pin, is_differentiable, new_wrapper
from shardwise.sharded.group import GroupLike, as_rank_group, local_metadata
from shardwise.sharded.transfer import ShardMove, move_shards, sum_grads_over_ranks
from shardwise.torch_internals import PARAMETER_FLAG, TensorBase, as_local

_set_data: Any = TensorBase.data.__set__


class CopyMethods(ShardedTensorCore):
    """The methods of a sharded tensor that make another one with the same boxes, or copy into
    it."""

    def to(self, *args: Any, process_group: GroupLike = None, **kwargs: Any) -> Self:
        """Convert to another device or dtype, with the arguments of `Tensor.to`.

        Arguments:
            process_group: the process group of the result, if the device needs another one.
        """
        model = self._prototype()
        others: Any = [
            each._prototype() if isinstance(each, ShardedTensorCore) else each for each in args
        ]
        made = model.to(*others, **kwargs)
        if made is model and process_group is None:
            return self
        group = self._group if process_group is None else as_rank_group(process_group)
        if group.ranks != self._group.ranks:
            raise ShardedTensorError(
                f"process_group: expected one of the same ranks {self._group.ranks}, "
                f"got one of {group.ranks}"
            )
        return self._with_tensors(
            [each.to(*others, **kwargs) for each in self._local_tensors()],
            device=made.device,
            dtype=made.dtype,
            group=group,
            init_rrefs=self._init_rrefs,
            requires_grad=self.requires_grad and (made is model or torch.is_grad_enabled()),
            pin_memory=self.is_pinned() and made is model,
        )

    def cpu(
        self,
        memory_format: torch.memory_format = torch.preserve_format,
        process_group: GroupLike = None,
    ) -> Self:
        """Return a copy in the CPU's memory; itself if it is there."""
        return self.to("cpu", memory_format=memory_format, process_group=process_group)

    def cuda(
        self,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
        process_group: GroupLike = None,
    ) -> Self:
        """Return a copy on each rank's current GPU, or on another device; itself if it is there."""
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

    def pin_memory(self, device: Any = None) -> Self:
        """Return a copy in pinned memory; itself if it is pinned."""
        if self.is_pinned():
            return self
        check_can_pin()
        return self._with_tensors(
            [each.pin_memory() for each in self._local_tensors()], pin_memory=True
        )

    def is_pinned(self, device: Any = None) -> bool:
        """Return whether the shards are in pinned memory."""
        return self._metadata.tensor_properties.pin_memory

    def clone(self, *, memory_format: torch.memory_format | None = None) -> Self:
        """Return a copy; differentiable."""
        return self._with_tensors(
            [each.clone(memory_format=memory_format) for each in self._local_tensors()],
            requires_grad=self.requires_grad and torch.is_grad_enabled(),
            pin_memory=False,
        )

    def detach(self) -> Self:
        """Return a tensor that shares this memory and is not connected to the autograd graph."""
        tensors = [each.detach() for each in self._local_tensors()]
        return self._with_tensors(tensors, requires_grad=False)._share_references(self)

    def _replace_data(self, value: CopyMethods) -> None:
        """Take over the elements of another tensor with the same boxes, perhaps of another dtype.

        The local tensors stay the same objects, because optimizers refer to them.
        """
        for tensor, new in zip(self._local_tensors(), value._local_tensors(), strict=True):
            tensor.data = new
        metadata = value._metadata.copy(requires_grad=self.requires_grad)
        size = new_wrapper(type(self), value._sharding_spec, metadata, [])
        with as_local():
            _set_data(self, size)
        self._metadata, self._sharding_spec = metadata, value._sharding_spec
        own = local_metadata(metadata, self._ownership, self._group)
        for shard, described in zip(self._local_shards, own, strict=True):
            shard.metadata = described
        before, self._placeholder = self._placeholder, None
        if before is not None and before.grad is not None:
            self._set_placeholder_grad()

    def copy_(self, other: torch.Tensor, non_blocking: bool = False) -> Self:
        """Copy the elements of another tensor into this one, and return this one.

        Arguments:
            other: a sharded tensor, whose elements are sent to the ranks that need them if it is
                cut differently; a DTensor, which is gathered; or a plain tensor, the same on every
                rank. It is converted to this dtype, and broadcast if it is smaller.
        """
        if other.shape != self.shape:
            other = self._broadcast(other)
        recorded = other.requires_grad and torch.is_grad_enabled()
        sources = self._shards_or_placeholder_of(other, recorded)
        for target, source in zip(self._tensors_or_placeholder(), sources, strict=True):
            check_writable("copy_", target)
            target.copy_(source, non_blocking)
        if recorded and is_differentiable(self.dtype):
            self._set_requires_grad_flag(True)
        return self

    def _broadcast(self, other: torch.Tensor) -> torch.Tensor:
        """Expand a smaller tensor to this one's size."""
        lengths = zip(reversed(other.shape), reversed(self.shape), strict=False)
        if other.dim() > self.dim() or any(its not in (1, own) for its, own in lengths):
            raise ShardedTensorError(
                f"copy_: expected a tensor of size {tuple(self.shape)}, or one that broadcasts to "
                f"it; got {tuple(other.shape)}"
            )
        split: Any = other
        if isinstance(other, ShardedTensorCore | DTensor):
            other = split.full_tensor()
        return other.expand(self.shape)

    def _shards_of(self, other: torch.Tensor) -> list[torch.Tensor]:
        """Return this rank's boxes of another tensor of the same size, apart from autograd."""
        return self._shards_or_placeholder_of(other, False)[: len(self._local_shards)]

    def _shards_or_placeholder_of(self, other: torch.Tensor, recorded: bool) -> list[torch.Tensor]:
        """Return this rank's boxes of another tensor of the same size; on a rank without shards,
        one tensor without elements.

        Arguments:
            recorded: whether autograd records it.
        """
        if isinstance(other, DTensor):
            other = other.full_tensor()
        if not isinstance(other, ShardedTensorCore):
            whole = sum_grads_over_ranks(other, self._group) if recorded else other
            return [whole[box.slices] for box in self._local_boxes()] or [whole.reshape(-1)[:0]]
        if other._ownership == self._ownership:
            return other._tensors_or_placeholder()
        if other._group.ranks != self._group.ranks:
            raise ShardedTensorError(
                f"other: expected one of the same ranks {self._group.ranks}, got one of "
                f"{other._group.ranks}"
            )
        move = ShardMove(self._group, other._ownership, self._ownership)
        if recorded:
            move.check_gradients_return("other")
        placeholder = other._get_placeholder() if recorded else None
        like = other._prototype()
        return move_shards(move, other._local_tensors(), like, placeholder) or [like]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        if not self.is_leaf:
            raise ShardedTensorError(
                "copy.deepcopy: only leaves of the graph can be copied, as in torch; "
                "detach() it, or clone() it to keep its history"
            )
        tensors = [each.detach().clone() for each in self._local_tensors()]
        copied = self._with_tensors(tensors, init_rrefs=self._init_rrefs, requires_grad=False)
        self._set_leaf_flags(copied)
        for before, after in zip(self._local_tensors(), copied._local_tensors(), strict=True):
            if before.grad is not None:
                after.grad = before.grad.detach().clone()
        if not self._local_shards:
            copied.grad = self.grad
        memo[id(self)] = copied
        return copied

    def _staged(self, copied: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Return the same tensor made of copies of the local shards, as `async_save` stores it."""
        return self._with_tensors(
            [copied(each.detach()) for each in self._local_tensors()],
            device=torch.device("cpu"),
            init_rrefs=False,
            requires_grad=False,
        )

    def __copy__(self) -> Self:
        return self._set_leaf_flags(self.detach())

    def _set_leaf_flags(self, copied: Self) -> Self:
        """Let a copy require gradients and be a parameter, if this tensor does and is."""
        copied.requires_grad_(self.requires_grad)
        if getattr(self, PARAMETER_FLAG, False):
            setattr(copied, PARAMETER_FLAG, True)
        return copied

    def _share_references(self, other: Self) -> Self:
        """Take over the references to remote shards from another tensor that shares this memory."""
        if other._init_rrefs:
            self._init_rrefs, self._references = True, other._references
        return self
