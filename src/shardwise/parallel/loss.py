"""loss_parallel: cross-entropy of logits that are split along the classes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Here for programs that come from torch: it changes nothing, as nothing needs to change.

    `cross_entropy` of DTensors that are split along the classes never gathers them, within this
    block and without it. Two small collectives find the maximum and the sums of each row, for every
    reduction, with weights, `ignore_index` and label smoothing, on any mesh; nothing travels
    backward. In torch that needs this block, around `backward()` too.

    Example:
        >>> with loss_parallel():
        ...     loss = F.cross_entropy(model(tokens), labels)
        ...     loss.backward()
    """
    yield
