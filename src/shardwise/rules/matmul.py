"""Matrix products, as einsums."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.rules.registry import rule
from shardwise.rules.spec import Out, Spec, parsed


def contraction(pattern: str, tensors: list[torch.Tensor], **extra: Any) -> Spec:
    inputs, outputs = parsed(pattern, tensors)
    sizes: dict[str, int] = {}
    fixed = []
    for tensor, dims in zip(tensors, inputs, strict=True):
        for name, size in zip(dims, tensor.shape, strict=True):
            if name is not None and sizes.setdefault(name, size) != size:
                raise RuntimeError(f"sizes of {name} differ: {sizes[name]} and {size}")
        fixed.append((tensor, dims))
    (names,) = outputs
    summed = {name: "sum" for name in sizes if name not in names}
    return Spec(
        fixed,
        [Out(names, tuple(sizes[n] for n in names))],
        reduces=summed,
        linear=[(0,), (1,)],
        **extra,
    )


@rule("mm")
def mm(input: torch.Tensor, mat2: torch.Tensor) -> Spec:
    return contraction("m k, k n -> m n", [input, mat2])
