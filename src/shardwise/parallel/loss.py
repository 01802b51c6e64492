"""loss_parallel: cross-entropy of logits that are split along the classes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Do nothing: here for programs that come from torch, which needs this block.

    `cross_entropy` of DTensors that are split along the classes never gathers them, inside and
    outside of this block. Two small all-reduces compute the maximum and the sums of each row, for
    every reduction, with weights, `ignore_index` and label smoothing, on any mesh; the backward
    communicates nothing. torch needs the block around `backward()` too.

    Example:
        >>> with loss_parallel():
        ...     loss = F.cross_entropy(model(tokens), labels)
        ...     loss.backward()
    """
    yield
