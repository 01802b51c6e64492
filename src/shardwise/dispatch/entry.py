"""A planned call: what to move, what to run on the local tensors, how the results lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from shardwise.copies import linked, outdate, shown, writes_through
from shardwise.dispatch.moving import InputMove, moved
from shardwise.errors import DispatchError
from shardwise.layout import Layout
from shardwise.tensor import DTensor, severed_by, wrap
from shardwise.torch_internals import as_local, base_of

Path = tuple[int | str, ...]
"""Where a tensor stands among the arguments: position or keyword, then positions within."""


def check_writable(name: str, target: Any) -> None:
    """Refuse to write to a copy that the user must take for a view, if that could not be written
    back; say that what was copied of the target before is out of date."""
    with as_local():
        severed = severed_by(target)
    if severed is not None and not writes_through(target):
        raise DispatchError(
            f"{name}: this tensor is the result of {shown(severed)}, of which torch would return a "
            "view, but the dim was split and so it is a copy, or shares memory with one: writing "
            "to it would not reach the original. Write to a part taken by index of a tensor that "
            "is still there (x[i] += 1, x[i] = ...), or clone() it if it is to change alone, or "
            "take it of a tensor that is whole in that dim: "
            "x.redistribute(placements=[Replicate(), ...])"
        )
    if linked.by_memory:
        outdate(target, name)


def mark_severed(tensor: Any, name: str, key: Any = None) -> None:
    """Say that a tensor is a copy where torch would have returned a view.

    Arguments:
        key: the index that gives it, if there is one.
    """
    tensor._severed = name
    tensor._key = key
    with as_local():
        base = base_of(tensor)
    if base is not None:  # of a view of what was moved: so are other views of it
        base._severed = name


_unsafe_view: Any = torch.ops.aten._unsafe_view.default


class Entry:
    """A planned call. Cheap to run again with other tensors of the same layouts."""

    __slots__ = (
        "at_top",
        "direct",
        "direct_without_grad",
        "flowing",
        "fresh",
        "hits",
        "inplace",
        "keys",
        "layouts",
        "moves",
        "name",
        "plain",
        "run",
        "severed",
        "simple",
        "single",
        "tensors",
        "views",
    )

    def __init__(
        self,
        name: str,
        run: Callable[..., Any],
        tensors: list[Path],
        moves: list[tuple[Path, InputMove]],
        layouts: tuple[Layout, ...],
        *,
        plain: bool,
        inplace: bool,
        fresh: bool,
        severed: bool,
    ) -> None:
        self.name = name
        self.run = run
        self.hits = 0
        """How often it was found; the call that planned it does not count."""
        self.tensors = tensors
        self.moves = moves
        self.layouts = layouts
        self.plain = plain
        """Whether what runs must not be handed DTensors."""
        self.inplace = inplace
        self.fresh = fresh
        """Whether every tensor argument is a DTensor: a plain result is then never one of them."""
        self.severed = severed
        """Whether torch would return a view, and this call returns a copy."""
        self.views = severed
        """Whether torch would return views, and this call may return copies."""
        self.keys: Sequence[Any] = ()
        """Of the results, as views, the indices that give them, where the rule says so."""
        self.flowing: tuple[Path, ...] = ()
        """Inputs that are pending a sum, and so is the result; of a `FlowEntry`."""
        self.single = layouts[0] if len(layouts) == 1 else None
        self.direct = not moves and not plain and self.single is not None
        """Whether to run it is all there is to do: no input moves, the result is one tensor."""
        self.simple = self.direct and fresh and not inplace
        """And the result is new: the case that must be fast."""
        enters = all(how.source is how.target for _, how in moves)
        self.direct_without_grad = enters and not plain and self.single is not None
        """The same, when no gradients are recorded: only they would move."""
        self.at_top = not inplace and all(len(path) == 1 for path in tensors)
        """Whether its tensors are arguments themselves, and not in lists."""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it."""
        if self.at_top:
            return self._on_arguments(args, kwargs)
        with as_local():
            given: list[Any] = list(args)
            keywords = dict(kwargs)
            for path, how in self.moves:
                _replace(given, keywords, path, lambda x, how=how: moved(x, how, self.name))
            if self.plain:
                for path in self.tensors:
                    _replace(given, keywords, path, _as_plain)
            if self.inplace:
                target = args[0] if args else kwargs["input"]
                check_writable(self.name, target)
                self.run(*given, **keywords)
                return target
            result = self.run(*given, **keywords)
            operands = () if self.fresh and not self.moves else (given, keywords)
            return self.retyped(result, operands)

    def _on_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same where tensors are arguments themselves, as in most calls."""
        given: list[Any] = list(args)
        keywords = dict(kwargs) if kwargs else kwargs
        with as_local():
            for path, how in self.moves:
                at: Any = path[0]
                among: Any = keywords if type(at) is str else given
                among[at] = moved(among[at], how, self.name)
            if self.plain:
                for path in self.tensors:
                    at = path[0]
                    among = keywords if type(at) is str else given
                    among[at] = _as_plain(among[at])
            result = self.run(*given, **keywords) if keywords else self.run(*given)
            single = self.single
            if single is None or type(result) is not torch.Tensor or self.severed:
                return self.retyped(result, (given, keywords))
            for each in (*given, *keywords.values()) if keywords else given:
                if each is result:
                    return wrap(result.view_as(result), single)
            return wrap(result, single)

    def with_sums_made(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result, if sums that are made already leave less pending in it; or None."""
        return None

    def retyped(self, result: Any, operands: tuple[Any, ...] = ()) -> Any:
        """The local results as DTensors."""
        return self._retyped(result, iter(self.layouts), operands)

    def _retyped(self, value: Any, remaining: Iterator[Layout], operands: tuple[Any, ...]) -> Any:
        # No closure that calls itself: as a cycle it would keep the operands until Python's
        # collector comes, at another time on each rank.
        if isinstance(value, torch.Tensor):
            layout = next(remaining)
            if type(value) is DTensor:
                if value._layout is layout:
                    return value
                value = value.view_as(value)
            elif operands and _is_among(value, operands):
                value = value.view_as(value)
            if self.severed and self.single is None:
                # One of several views of what was moved, of which autograd lets none be written to.
                value = _unsafe_view(value, value.shape)
            if self.severed and _overlaps(value):  # as of unfold: it may be written to, once each
                value = value.clone(memory_format=torch.contiguous_format)
            made = wrap(value, layout)
            if self.severed:
                mark_severed(made, self.name)
            return made
        if isinstance(value, tuple | list):
            parts = [self._retyped(each, remaining, operands) for each in value]
            if isinstance(value, list):
                return parts
            # torch's named tuples take one sequence, Python's one argument per field
            kind: Any = type(value)
            if hasattr(value, "_fields"):
                return kind(*parts)
            return kind(parts)
        return value


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements may share memory."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += max(size - 1, 0) * stride
    return False


def _as_plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(torch.Tensor) if type(tensor) is DTensor else tensor


def _is_among(value: torch.Tensor, operands: Any) -> bool:
    if isinstance(operands, dict):
        operands = operands.values()
    for each in operands:
        if each is value or (isinstance(each, list | tuple | dict) and _is_among(value, each)):
            return True
    return False


def _replace(args: list[Any], kwargs: dict[str, Any], path: Path, change: Any) -> None:
    first, *rest = path
    container: Any = kwargs if isinstance(first, str) else args
    if not rest:
        container[first] = change(container[first])
        return
    container[first] = _replaced(container[first], rest, change)


def _replaced(value: Any, path: list[int | str], change: Any) -> Any:
    if not path:
        return change(value)
    parts = list(value)
    at = path[0]
    assert isinstance(at, int), "lists have positions"
    parts[at] = _replaced(parts[at], path[1:], change)
    return parts if isinstance(value, list) else type(value)(parts)


def replaced_at(
    args: tuple[Any, ...], kwargs: dict[str, Any], path: Path, value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with another one at a path."""
    given, keywords = list(args), dict(kwargs)
    _replace(given, keywords, path, lambda _: value)
    return tuple(given), keywords


def get(args: tuple[Any, ...], kwargs: dict[str, Any], path: Path) -> Any:
    """The argument at a path."""
    first, *rest = path
    value: Any = kwargs[first] if isinstance(first, str) else args[first]
    for at in rest:
        value = value[at]
    return value
