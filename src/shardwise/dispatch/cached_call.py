"""A planned call: which inputs move, what runs on the shards, and the layouts of the results.

Planned once per key, then run again for other tensors of the same layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from functools import partial
from typing import Any

import torch

from shardwise.core.layout import Layout
from shardwise.core.tensor_state import ATTRIBUTE
from shardwise.dtensor.call_args import (
    ArgPath,
    Args,
    Kwargs,
    argument_at,
    replace_argument,
    with_argument_at,
)
from shardwise.dtensor.input_moves import InputMove, find_reduced, move_input
from shardwise.dtensor.tensor import DTensor, wrap
from shardwise.dtensor.writes import check_writable, mark_detached_copy
from shardwise.redistribute.cost import communicates
from shardwise.torch_internals import as_local

_unsafe_view: Any = torch.ops.aten._unsafe_view.default


class CallMode(Enum):
    """How much of the work of a call dispatch must do; the hot path branches on it."""

    NEW_RESULT = auto()
    """Run the function on the shards; its one result is new. This case must be fast."""
    ON_SHARDS = auto()
    """Run the function on the shards; its one result may be an argument (in place, or plain)."""
    ONLY_GRADS_MOVE = auto()
    """As `ON_SHARDS` while no gradients are recorded; else as `GENERAL`."""
    GENERAL = auto()
    """Call it: inputs move or become plain tensors, or there is not exactly one result."""
    REUSES_SUMS = auto()
    """Ask a `PartialReuseCall` first, then go on in its `mode_without_sums`."""


# Bound once: looking up a member of an enum is slower than a global.
NEW_RESULT = CallMode.NEW_RESULT
ON_SHARDS = CallMode.ON_SHARDS
ONLY_GRADS_MOVE = CallMode.ONLY_GRADS_MOVE
GENERAL = CallMode.GENERAL
REUSES_SUMS = CallMode.REUSES_SUMS


class CachedCall:
    """A planned call, cheap to run again with other tensors of the same layouts.

    Arguments:
        name: the operator, for messages.
        run: the function to run on the local tensors.
        tensors: the paths to the tensors among the arguments.
        moves: the inputs to move first.
        layouts: the layouts of the results, in order.
        needs_plain: whether `run` must get plain tensors in place of DTensors.
        is_inplace: whether it writes to its first argument and returns that.
        takes_only_dtensors: whether every tensor argument is a DTensor: a plain tensor that `run`
            returns is then no argument.
        detaches: whether torch would return a view, and this call always returns a copy.
    """

    __slots__ = (
        "detaches",
        "has_flat_arguments",
        "hits",
        "is_inplace",
        "keys",
        "layouts",
        "mode",
        "moves",
        "name",
        "needs_plain",
        "returns_views",
        "run",
        "single",
        "takes_only_dtensors",
        "tensors",
    )

    def __init__(
        self,
        name: str,
        run: Callable[..., Any],
        tensors: list[ArgPath],
        moves: list[tuple[ArgPath, InputMove]],
        layouts: tuple[Layout, ...],
        *,
        needs_plain: bool = False,
        is_inplace: bool = False,
        takes_only_dtensors: bool = False,
        detaches: bool = False,
    ) -> None:
        self.name = name
        self.run = run
        self.hits = 0
        """How often it was found in the cache; the call that planned it does not count."""
        self.tensors = tensors
        self.moves = moves
        self.layouts = layouts
        self.needs_plain = needs_plain
        self.is_inplace = is_inplace
        self.takes_only_dtensors = takes_only_dtensors
        self.detaches = detaches
        self.returns_views = detaches
        """Whether torch would return views, and this call may return copies."""
        self.keys: Sequence[Any] = ()
        """The indices of the input that give the results, if torch would return views and the rule
        knows them."""
        self.single = layouts[0] if len(layouts) == 1 else None
        """The layout of the result, if there is exactly one."""
        self.has_flat_arguments = not is_inplace and all(len(path) == 1 for path in tensors)
        """Whether no tensor argument is nested in a list, and nothing is written in place."""
        self.mode = self._mode()

    def _mode(self) -> CallMode:
        if self.needs_plain or self.single is None:
            return GENERAL
        if self.moves:
            only_grads = all(move.source is move.target for _, move in self.moves)
            return ONLY_GRADS_MOVE if only_grads else GENERAL
        return NEW_RESULT if self.takes_only_dtensors and not self.is_inplace else ON_SHARDS

    def __call__(self, args: Args, kwargs: Kwargs) -> Any:
        """Run it."""
        if self.has_flat_arguments:
            return self._call_flat(args, kwargs)
        with as_local():
            positional: list[Any] = list(args)
            keywords = dict(kwargs)
            for path, move in self.moves:
                replace_argument(
                    positional, keywords, path, partial(move_input, move=move, operator=self.name)
                )
            if self.needs_plain:
                for path in self.tensors:
                    replace_argument(positional, keywords, path, _as_plain)
            if self.is_inplace:
                target = args[0] if args else kwargs["input"]
                check_writable(self.name, target)
                self.run(*positional, **keywords)
                return target
            result = self.run(*positional, **keywords)
            is_new = self.takes_only_dtensors and not self.moves
            return self.retyped(result, () if is_new else (positional, keywords))

    def _call_flat(self, args: Args, kwargs: Kwargs) -> Any:
        """Run it where no tensor argument is nested, as in most calls."""
        positional: list[Any] = list(args)
        keywords = dict(kwargs) if kwargs else kwargs
        with as_local():
            for path, move in self.moves:
                at: Any = path[0]
                container: Any = keywords if type(at) is str else positional
                container[at] = move_input(container[at], move, self.name)
            if self.needs_plain:
                for path in self.tensors:
                    at = path[0]
                    container = keywords if type(at) is str else positional
                    container[at] = _as_plain(container[at])
            result = self.run(*positional, **keywords) if keywords else self.run(*positional)
            single = self.single
            if single is None or type(result) is not torch.Tensor or self.detaches:
                return self.retyped(result, (positional, keywords))
            for each in (*positional, *keywords.values()) if keywords else positional:
                if each is result:
                    return wrap(result.view_as(result), single)
            return wrap(result, single)

    def retyped(self, result: Any, operands: tuple[Any, ...] = ()) -> Any:
        """Return the local results as DTensors.

        Arguments:
            operands: the local arguments, of which a result may be one: it then becomes an alias.
        """
        return self._retyped(result, iter(self.layouts), operands)

    def _retyped(self, value: Any, remaining: Iterator[Layout], operands: tuple[Any, ...]) -> Any:
        # Not a closure that calls itself: such a cycle would keep the operands alive until Python's
        # collector runs, which is at another time on each rank.
        if isinstance(value, torch.Tensor):
            layout = next(remaining)
            if type(value) is DTensor:
                if value._layout is layout:
                    return value
                value = value.view_as(value)
            elif operands and _is_among(value, operands):
                value = value.view_as(value)
            if self.detaches and self.single is None:
                # Autograd allows no writes to one of several views of a moved tensor.
                value = _unsafe_view(value, value.shape)
            if self.detaches and _overlaps(value):  # as of unfold: each element becomes writable
                value = value.clone(memory_format=torch.contiguous_format)
            made = wrap(value, layout)
            if self.detaches:
                mark_detached_copy(made, self.name)
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
    """Tell whether elements of a tensor may share memory."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += max(size - 1, 0) * stride
    return False


def _as_plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._as_subclass(torch.Tensor) if type(tensor) is DTensor else tensor


def _is_among(value: torch.Tensor, operands: Any) -> bool:
    if isinstance(operands, dict):
        operands = operands.values()
    for each in operands:
        if each is value or (isinstance(each, list | tuple | dict) and _is_among(value, each)):
            return True
    return False


class CompositeCall(CachedCall):
    """A call that is made of other calls on DTensors; its result is not re-typed."""

    __slots__ = ()

    def __init__(self, name: str, run: Callable[..., Any]) -> None:
        super().__init__(name, run, [], [], ())

    def __call__(self, args: Args, kwargs: Kwargs) -> Any:
        return self.run(*args, **kwargs)


class PartialReuseCall(CachedCall):
    """A call whose result is a pending sum because an input is one.

    Passing a pending sum on costs nothing now. But if an earlier call has reduced the input, the
    reduced value is available, and passing the pending sum on would need a second reduction later.

    Arguments:
        call: the call that passes pending sums on.
        partial_inputs: the paths to the inputs that are pending sums.
        plan: plans the same call for other arguments.
    """

    __slots__ = (
        "_alternatives",
        "_first_and_last",
        "_partial_inputs",
        "_plan",
        "mode_without_sums",
    )

    def __init__(
        self,
        call: CachedCall,
        partial_inputs: list[ArgPath],
        plan: Callable[[Args, Kwargs], CachedCall],
    ) -> None:
        super().__init__(
            call.name,
            call.run,
            call.tensors,
            call.moves,
            call.layouts,
            needs_plain=call.needs_plain,
            is_inplace=call.is_inplace,
            takes_only_dtensors=call.takes_only_dtensors,
            detaches=call.detaches,
        )
        self.mode_without_sums = self.mode
        """The mode of the call if it passes the pending sums on."""
        self.mode = REUSES_SUMS
        self._partial_inputs = tuple(partial_inputs)
        places = [path[0] for path in partial_inputs if len(path) == 1 and type(path[0]) is int]
        is_short = len(partial_inputs) == len(places) <= 2
        self._first_and_last = (places[0], places[-1]) if is_short else None
        """The first and the last pending sum, if these are all, and positional arguments: a quick
        way to see that none was reduced."""
        self._plan = plan
        self._alternatives: dict[Any, CachedCall | None] = {}
        """The same call on reduced inputs, by their layouts (None for an input that was not
        reduced). The value is None where that gains nothing."""

    def with_reduced_inputs(self, args: Args, kwargs: Kwargs) -> Any:
        """Run the call on reduced inputs, if some are at hand and less is then left to reduce.

        Returns None if the call should pass the pending sums on.
        """
        if self._first_and_last is not None:  # most calls, and in most nothing was reduced
            first, last = self._first_and_last
            if ATTRIBUTE not in args[first].__dict__ and ATTRIBUTE not in args[last].__dict__:
                return None
        found = [find_reduced(argument_at(args, kwargs, path)) for path in self._partial_inputs]
        key = tuple([None if each is None else each._layout for each in found])
        alternative = self._alternatives.get(key)
        if alternative is None and key in self._alternatives:
            return None
        for path, each in zip(self._partial_inputs, found, strict=True):
            if each is not None:
                args, kwargs = with_argument_at(args, kwargs, path, each)
        if alternative is None:
            other = self._plan(args, kwargs) if any(key) else self
            alternative = self._alternatives[key] = other if self._is_worse_than(other) else None
            if alternative is None:
                return None
        result = alternative(args, kwargs)
        # A call that returns its argument (x.to with nothing to do) must return the given one.
        return None if any(result is each for each in found) else result

    def _is_worse_than(self, other: CachedCall) -> bool:
        """Tell whether another call leaves less to reduce, and communicates nothing either."""
        if any(communicates(move.source, move.target) for _, move in other.moves):
            return False
        return _pending_axes(other) < _pending_axes(self)


class PerDtypeCall(CachedCall):
    """A call whose cheapest strategy depends on the dtypes: one planned call per combination.

    Arguments:
        plan: plans the call for arguments of given dtypes.
    """

    __slots__ = ("_by_dtypes", "_plan")

    def __init__(
        self, name: str, tensors: list[ArgPath], plan: Callable[[Args, Kwargs], CachedCall]
    ) -> None:
        super().__init__(name, plan, tensors, [], ())
        self._plan = plan
        self._by_dtypes: dict[tuple[torch.dtype, ...], CachedCall] = {}

    def __call__(self, args: Args, kwargs: Kwargs) -> Any:
        """Run the planned call for the dtypes of these arguments."""
        dtypes = tuple([argument_at(args, kwargs, path).dtype for path in self.tensors])
        call = self._by_dtypes.get(dtypes)
        if call is None:
            call = self._by_dtypes[dtypes] = self._plan(args, kwargs)
        if isinstance(call, PartialReuseCall):
            result = call.with_reduced_inputs(args, kwargs)
            if result is not None:
                return result
        return call(args, kwargs)


def _pending_axes(call: CachedCall) -> int:
    return sum(len(layout.partial) for layout in call.layouts)
