"""Sample: the arguments of one call, to be filled with other tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shardwise.rules.calls import tensors_in


class Sample:
    """The arguments of one call, with plain tensors.

    Example:
        >>> Sample(torch.randn(5, 4), dim=1)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs

    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the arguments, in order."""
        return list(tensors_in((self.args, self.kwargs)))

    def filled(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with these tensors in place of its own."""
        rest = iter(tensors)
        args = tuple(_filled(arg, rest) for arg in self.args)
        return args, {name: _filled(arg, rest) for name, arg in self.kwargs.items()}

    def __repr__(self) -> str:
        parts = [_shown(arg) for arg in self.args]
        parts += [f"{name}={_shown(arg)}" for name, arg in self.kwargs.items()]
        return f"({', '.join(parts)})"


def _filled(value: Any, rest: Iterator[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return next(rest)
    if isinstance(value, list | tuple):
        parts = [_filled(each, rest) for each in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    return repr(value)
