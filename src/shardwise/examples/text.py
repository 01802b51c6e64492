"""Text that every Python has, the documentation of its keywords, as tokens: one for each byte."""

from __future__ import annotations

from collections.abc import Iterator
from pydoc_data.topics import topics

import torch
from torch import Tensor

VOCABULARY = 256


def all_tokens() -> Tensor:
    """Return the whole text."""
    text = "\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8).long()


def batches(tokens: Tensor, size: int, length: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random pieces of a text, each with the tokens that follow: [size, length] and [size, length].

    The same for the same seed; every rank that takes part should use the same.
    """
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(length + 1)
    while True:
        starts = torch.randint(len(tokens) - length, (size, 1), generator=generator)
        pieces = tokens[starts + offsets]
        yield pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()
