"""Blocks within `autocast`: their casts, which it does not make for tensors without data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from shardwise.export.errors import ExportError
from shardwise.export.notes import note
from shardwise.torch_internals import FakeTensorMode, OpOverload, TorchDispatchMode, pytree

_COPY = torch.ops.aten._to_copy.default


@dataclass(frozen=True)
class Autocast:
    """What `torch.autocast` was given.

    Arguments:
        device: the kind of device that it is for.
        dtype: None for its default.
    """

    device: str
    dtype: torch.dtype | None

    def cast(self, target: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of an operator with the dtypes that autocast would give them.

        It is tried on tensors that seem to be on a device: once with autocast, and once with what
        it was seen to cast, which must do the same.
        """
        if not isinstance(target, OpOverload):
            return args, kwargs
        leaves, structure = pytree.tree_flatten((args, kwargs))
        with disable_proxy_modes_tracing(), FakeTensorMode():
            given = [self._like(each) for each in leaves]
            cast = _Seen(given)
            with torch.autocast(self.device, self.dtype), cast:
                result = _run(target, given, structure)
            plain = _Seen([])
            with torch.autocast(self.device, enabled=False):
                changed = list(map(_as, given, cast.dtypes))
                with plain:
                    again = _run(target, changed, structure)
        if cast.operators != plain.operators or _dtypes(result) != _dtypes(again):
            raise ExportError(
                f"exported_program: {target} is within autocast, which casts what is in it and not "
                "what it is given; convert its arguments with to(dtype) in the model, or leave it "
                "out of autocast"
            )
        leaves = list(map(_as, leaves, cast.dtypes))
        pytree.tree_map_only(torch.Tensor, note, leaves)
        args, kwargs = pytree.tree_unflatten(leaves, structure)
        return args, kwargs

    def _like(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty(value.shape, dtype=value.dtype, device=self.device)
        return torch.device(self.device) if isinstance(value, torch.device) else value


class _Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Which operators are run, except for casts of what was given; and these."""

    def __init__(self, given: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._given = given
        self.dtypes: list[torch.dtype | None] = [None] * len(given)
        self.operators: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        places = [at for at, each in enumerate(self._given) if args and each is args[0]]
        if func is _COPY and places and "dtype" in kwargs and not self.operators:
            for at in places:
                self.dtypes[at] = kwargs["dtype"]
        elif func.namespace == "aten":
            self.operators.append(func)
        return func(*args, **kwargs)


def _run(target: Any, leaves: list[Any], structure: Any) -> Any:
    args, kwargs = pytree.tree_unflatten(leaves, structure)
    return target(*args, **kwargs)


def _as(value: Any, dtype: torch.dtype | None) -> Any:
    return value if dtype is None else value.to(dtype)


def _dtypes(result: Any) -> list[Any]:
    return [getattr(each, "dtype", None) for each in pytree.tree_leaves(result)]
