"""accumulate: gradients of several backwards are summed on each rank, and over ranks only once.

The gradient of a parameter that is whole beside shards is a contribution on each rank, and so is
that of a parameter that is gathered for use. Each backward sums them over ranks. Within
`accumulate()` the move that would do so (`Move`, from pending to whole or split) is put off: the
contributions of all backwards are added up, and moved once. A move is linear, so the order makes no
difference.

Nobody sees a gradient that is not complete: it is moved when `.grad` is read, and at the end of the
context. Whether it is put off depends only on facts that all ranks share.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardwise.comm.trace import Cause, trace_scope
from shardwise.core.tensor_state import leaf_moves
from shardwise.torch_internals import (
    TensorBase,
    as_local,
    backward_hooks_of,
    post_accumulate_hooks_of,
)

_requires_grad: Callable[[torch.Tensor], bool] = TensorBase.requires_grad.__get__
_set_requires_grad: Callable[[torch.Tensor, bool], None] = TensorBase.requires_grad.__set__


class _Contributions:
    """What this rank has to contribute to the gradient of one leaf, by one move."""

    def __init__(self, leaf: torch.Tensor, move: Any, gradient: torch.Tensor) -> None:
        self.leaf = leaf
        self.move = move
        self._total = gradient
        self._is_own = False
        """Whether `_total` is memory that autograd does not know."""

    def add(self, gradient: torch.Tensor) -> None:
        self._total = self._total.add_(gradient) if self._is_own else self._total + gradient
        self._is_own = True

    def moved(self) -> torch.Tensor:
        result: torch.Tensor = self.move.run(self._total.contiguous())
        return result.to(self.leaf.dtype)


class Accumulation:
    """One `accumulate()` of one rank: the gradients that wait for their sum over ranks."""

    def __init__(self) -> None:
        self.is_open = True
        self.is_suspended = False
        """Whether a gradient is wanted at once, as `torch.autograd.grad` does."""
        self._waiting: dict[tuple[Any, ...], _Contributions] = {}
        self.others: dict[Any, Callable[[bool], None]] = {}
        """Who else puts off reductions of gradients: FSDP's schedules. Called at the end, with
        whether to reduce them (True) or to drop them (False)."""

    def put_off(self, leaf: torch.Tensor, move: Any, gradient: torch.Tensor) -> bool:
        """Take a leaf's gradient, which `move` would complete; return whether it was taken.

        It is not taken where somebody looks at it in this backward: a hook, or a second backward
        through this one.
        """
        if not self.is_open or self.is_suspended or torch.is_grad_enabled():
            return False
        if backward_hooks_of(leaf) or post_accumulate_hooks_of(leaf):
            return False
        if not move.communicates(gradient):
            return False
        key = id(leaf), move.source, move.target, move.factor, move.dtype, gradient.dtype
        found = self._waiting.get(key)
        if found is None:
            self._waiting[key] = _Contributions(leaf, move, gradient)
        else:
            found.add(gradient)
        return True

    def complete(self, leaf: torch.Tensor | None = None) -> None:
        """Move the gradients that wait, of one leaf or of all, and add them to `.grad`."""
        taken = self._take(leaf)
        if not taken:
            return
        with torch.no_grad(), trace_scope(Cause("accumulate", "", "backward")), as_local():
            moved = [(each.leaf, each.moved()) for each in taken]
        frozen = [each for each, _ in moved if not _requires_grad(each)]  # since its backward
        try:
            with torch.enable_grad(), as_local():
                for each in frozen:
                    _set_requires_grad(each, True)
                ends = [each.view_as(each) for each, _ in moved]
            # As a backward does: in the layout and the dtype that the leaf wants.
            torch.autograd.backward(ends, [gradient for _, gradient in moved])
        finally:
            with as_local():
                for each in frozen:
                    _set_requires_grad(each, False)
        for function in after_completion:
            function()

    def forget(self, leaf: torch.Tensor) -> None:
        """Drop the gradient of a leaf that waits, as another one takes its place."""
        self._take(leaf)

    def _take(self, leaf: torch.Tensor | None) -> list[_Contributions]:
        keys = [key for key in self._waiting if leaf is None or key[0] == id(leaf)]
        return [self._waiting.pop(key) for key in keys]

    def close(self, keeps: bool) -> None:
        """End it: reduce what waits, or drop it."""
        self.is_open = False
        others, self.others = self.others, {}
        if keeps:
            self.complete()
        self._waiting.clear()
        for end in others.values():
            end(keeps)


after_completion: list[Callable[[], None]] = []
"""Called after gradients were added to those of leaves, outside of a user's backward."""


class _OpenAccumulation(threading.local):
    """The accumulation of one thread, if any."""

    def __init__(self) -> None:
        self.accumulation: Accumulation | None = None


current = _OpenAccumulation()


@contextmanager
def accumulate() -> Iterator[None]:
    """Return a context in which gradients of several backwards are summed over ranks only once.

    Each rank adds up its own contributions. They are reduced when the context ends, and the
    gradient of a parameter that is a DTensor as soon as `.grad` is read, by an optimizer or to clip
    it. So k micro-batches need the reductions of one, and memory for a gradient of the size that
    each rank computes. It is for parameters on a mesh, and for modules after `fully_shard` and
    `replicate`, for which it does what `set_requires_gradient_sync(False)` does until the last
    micro-batch.

    Every rank must use it alike. Both the forward and the backward must be in the context; a
    backward of an earlier forward reduces gradients at once, and so do parameters with hooks.
    Within another `accumulate()` it does nothing: the outer one decides.

    After an exception, gradients that were not reduced are dropped, without communication. Call
    `zero_grad()` before you go on.

    Example:
        >>> optimizer.zero_grad()
        >>> with sw.accumulate():
        ...     for batch in micro_batches:
        ...         (loss(model(batch)) / len(micro_batches)).backward()
        >>> optimizer.step()
    """
    if current.accumulation is not None:
        yield
        return
    leaf_moves.clear()  # moves that were made before would reduce gradients at once
    accumulation = current.accumulation = Accumulation()
    try:
        yield
    except BaseException:
        current.accumulation = None
        accumulation.close(keeps=False)
        raise
    current.accumulation = None
    accumulation.close(keeps=True)


@contextmanager
def suspended() -> Iterator[None]:
    """Return a context in which gradients are complete at once, within `accumulate()` too."""
    accumulation = current.accumulation
    if accumulation is None:
        yield
        return
    before, accumulation.is_suspended = accumulation.is_suspended, True
    try:
        yield
    finally:
        accumulation.is_suspended = before
