"""Choices of one of each: all of them, or a fixed sample where there are too many."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any


def combinations(choices: Sequence[Sequence[Any]], most: int, seed: int) -> list[tuple[Any, ...]]:
    """One of each of the choices: every way to choose, or `most` of them."""
    if math.prod(map(len, choices)) <= most:
        return list(itertools.product(*choices))
    generator = random.Random(seed)
    found = {tuple(generator.randrange(len(each)) for each in choices) for _ in range(most)}
    return [
        tuple(each[at] for each, at in zip(choices, picked, strict=True))
        for picked in sorted(found)
    ]
