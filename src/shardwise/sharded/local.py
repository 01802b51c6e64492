"""What a rank holds of a sharded tensor: its shards, where they are, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from shardwise.layout import Layout
from shardwise.sharded import remote
from shardwise.sharded.base import ShardedTensorBase, bare
from shardwise.sharded.errors import ShardedStateError, ShardedTensorError
from shardwise.sharded.group import Group
from shardwise.sharded.held import Held, mine
from shardwise.sharded.shard import Shard
from shardwise.sharded.specs import inferred_spec
from shardwise.torch_internals import TensorBase

_requires_grad_of: Any = TensorBase.requires_grad.__get__
_set_requires_grad: Any = TensorBase.requires_grad.__set__

Kind = TypeVar("Kind", bound="LocalShards")


class LocalShards(ShardedTensorBase):
    """The shards of a rank, among those of a group of ranks."""

    _group: Group
    _held: Held
    """All shards, and who holds each."""
    _init_rrefs: bool
    _known_layout: tuple[Held, Layout | None] | None = None
    """Which layout these shards are, if that was asked (`converting.layout_of`)."""
    _nothing: torch.Tensor | None = None
    """On a rank without shards: no elements, but a part of the graph as others' shards are, and so
    given a gradient when they are (`_empty`)."""
    _references: remote.References
    """To the shards of other ranks, if it was made with init_rrefs."""

    def _become(
        self: Kind, group: Group, held: Held, shards: list[Shard], init_rrefs: bool = False
    ) -> Kind:
        """What every way to make one ends with."""
        self._group, self._held, self._local_shards = group, held, shards
        self._init_rrefs = init_rrefs
        if init_rrefs:
            remote.register(self)
        return self

    def _with(
        self: Kind,
        tensors: Sequence[torch.Tensor],
        *,
        device: torch.device | None = None,
        nothing: torch.Tensor | None = None,
        group: Group | None = None,
        init_rrefs: bool = False,
        **properties: Any,
    ) -> Kind:
        """One of the same boxes with these tensors in them.

        Arguments:
            device: where they are; where these are by default.
            nothing: what a rank without shards has in their place; by default a copy of what it
                has here.
            properties: what is other than here: dtype, requires_grad, pin_memory.
        """
        if device is not None:
            # Which of a kind is a rank's own, only the rank knows.
            other = device if device.type == "cpu" else torch.device(device.type)
            device = None if device == self.device else other
        metadata = self._metadata.copy(device, **properties)
        common = metadata.tensor_properties
        if not can_require_gradients(common.dtype):
            common.requires_grad = False
        spec = self._sharding_spec
        if device is not None:
            spec = inferred_spec(metadata.shards_metadata, metadata.size)
            own = mine(metadata, self._held, self._group)
        else:
            own = [shard.metadata for shard in self._local_shards]
        made = bare(type(self), spec, metadata, [])
        shards = list(map(Shard, tensors, own))
        if not own and nothing is not None:
            made._nothing = nothing if nothing.shape == (0,) else nothing.reshape(-1)[:0]
        elif not own and common.requires_grad and torch.is_grad_enabled():
            made._nothing = self._empty().to(common.dtype, copy=True)
        return made._become(group or self._group, self._held, shards, init_rrefs)

    def _with_results(self: Kind, results: Sequence[torch.Tensor]) -> Kind:
        """One of what was computed of each of the parts (`_parts`), with its dtype and history."""
        first = results[0]
        return self._with(
            results[: len(self._local_shards)],
            nothing=first,
            dtype=first.dtype,
            requires_grad=first.requires_grad,
            pin_memory=False,
        )

    def _like(self) -> torch.Tensor:
        """Nothing, of its dtype and on its device: a model for what travels."""
        return torch.empty(0, dtype=self.dtype, device=self.device)

    def _tensors(self) -> list[torch.Tensor]:
        return [shard.tensor for shard in self._local_shards]

    def _parts(self) -> list[torch.Tensor]:
        """What functions are run on: the shards, or nothing. A rank without shards so refuses what
        the others refuse, and has the same dtype and history."""
        return self._tensors() or [self._empty()]

    def _empty(self, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """The piece of a rank without shards; one for all uses, so that it has their history.

        Arguments:
            shape: what a layout gives this rank; any by default.
        """
        if self._nothing is None or self._nothing.requires_grad != self.requires_grad:
            self._nothing = self._like().requires_grad_(self.requires_grad)
        return self._nothing if shape is None else self._nothing.reshape(shape)

    def local_tensor(self) -> torch.Tensor:
        """The one shard that this rank holds, as a tensor."""
        if len(self._local_shards) != 1:
            raise ShardedTensorError(
                f"local_tensor: expected one shard on this rank, there are "
                f"{len(self._local_shards)}; use local_shards()"
            )
        return self._local_shards[0].tensor

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where this rank's shards are; where the first shard is, if it has none."""
        if self._local_shards:
            return self._local_shards[0].tensor.device
        return torch.device(self._metadata.shards_metadata[0].device.type)

    # ---- gradients

    @property
    def requires_grad(self) -> bool:
        """Whether autograd records what is done with it."""
        return _requires_grad_of(self)  # type: ignore[no-any-return]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self: Kind, requires_grad: bool = True) -> Kind:
        """Record, or do not, what is done with its shards from now on."""
        for tensor in self._tensors():
            tensor.requires_grad_(requires_grad)
        if self._nothing is not None:
            self._nothing.requires_grad_(requires_grad)
        self._note_requires_grad(requires_grad)
        return self

    def _note_requires_grad(self, requires_grad: bool) -> None:
        _set_requires_grad(self, requires_grad)
        self._metadata.tensor_properties.requires_grad = requires_grad

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """Whether no shard of this rank is the result of an operation that was recorded."""
        return all(tensor.is_leaf for tensor in self._recorded())

    def _recorded(self) -> list[torch.Tensor]:
        """What autograd knows of it on this rank."""
        return self._tensors() or ([] if self._nothing is None else [self._nothing])

    @property
    def grad(self: Kind) -> Kind | None:
        """The gradients of the shards; None if one of them has none.

        A rank without shards has one, of no elements, when the others have theirs.
        """
        leaves = self._recorded()
        found = [tensor.grad for tensor in leaves if tensor.grad is not None]
        if not found or len(found) < len(leaves):
            return None
        return self._with_results(found)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is None:
            for tensor in self._recorded():
                tensor.grad = None
            return
        if not isinstance(value, LocalShards) or value._held != self._held:
            raise ShardedTensorError(
                "grad: expected a ShardedTensor with the same shards as this one, or None; got a "
                f"{type(value).__name__}; torch.zeros_like(x).copy_(value) is one of its elements"
            )
        for tensor, gradient in zip(self._tensors(), value._tensors(), strict=True):
            tensor.grad = gradient
        if not self._local_shards:
            self._note_gradient()

    def _note_gradient(self) -> None:
        """On a rank without shards: the shards of others have gradients."""
        piece = self._empty()
        piece.grad = torch.zeros_like(piece)


def can_require_gradients(dtype: torch.dtype) -> bool:
    """Whether autograd can follow elements of this dtype."""
    return dtype.is_floating_point or dtype.is_complex


def check_can_pin() -> None:
    """Refuse pinned memory where there is nothing that it would be pinned for."""
    if not torch.accelerator.is_available():
        raise ShardedStateError(
            "pin_memory: expected an accelerator on this rank, for which memory is pinned; "
            "there is none that torch can use"
        )
