"""The aten operators that op_db's samples call, forward and backward, with arguments for each."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from shardwise.dtensor.tensor import tensors_in
from shardwise.testing import loss_of
from support.op_db.entries import entries

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@functools.cache
def aten_calls(samples: int = 1) -> dict[Any, Arguments]:
    """Return for each overload the arguments of its first call."""
    found: dict[Any, Arguments] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for entry in entries().values():
            for dtype in entry.kinds()[:1]:
                for call in entry.samples(dtype, samples):
                    inputs = [each.detach().clone().requires_grad_(each.requires_grad)
                              for each in call.sample.tensors()]  # fmt: skip
                    try:
                        with _Recorder(found):
                            outputs = list(tensors_in(call.on(inputs)))
                            if any(each.requires_grad for each in outputs):
                                loss_of(outputs).backward()
                    except Exception:
                        continue  # torch has no gradient, or no CPU runs it
    return found


class _Recorder(TorchDispatchMode):
    """Notes the arguments of each aten operator that is called for the first time."""

    def __init__(self, found: dict[Any, Arguments]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given: Arguments = (args, kwargs or {})
        if func.namespace == "aten" and func not in self.found:
            self.found[func] = tree_map_only(torch.Tensor, _copied, given)
        return func(*args, **given[1])


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone() if tensor.layout == torch.strided else tensor
