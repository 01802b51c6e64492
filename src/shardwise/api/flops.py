"""flops: count floating point operations, of this rank and of one process.

Built on torch's `FlopCounterMode` and its formulas. On the ranks, that mode sees local calls: the
work that this rank does. For the work of one process, each call on DTensors is run once more, on
tensors without memory (`FakeTensorMode`) of the global shapes, forward and backward. A backward
runs on local tensors only; the numbers of its nodes tell which call they come from.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from shardwise.comm import carries_values, communicator
from shardwise.comm.trace import watch_calls
from shardwise.core.mesh import DeviceMesh, as_mesh
from shardwise.dtensor.tensor import DTensor
from shardwise.torch_internals import (
    FakeTensorMode,
    as_local,
    current_autograd_node,
    current_graph_task,
    next_sequence_number,
    pytree,
    sequence_number,
    without_dispatch_modes,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

_aten: Any = torch.ops.aten
_GLOBAL = "Global"
"""The name that torch's counter gives to the whole program."""
_BACKWARD = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
"""Calls that run the backward of other calls, which are counted themselves."""

Operators = dict[str, int]
"""Floating point operations, by the name of the aten operator."""


class Flops(NamedTuple):
    """The work of one operator or module."""

    rank: int
    """That this rank did."""
    one_process: int
    """That one process would do."""


@dataclass(frozen=True)
class FlopTotals:
    """The work of all ranks of a mesh, from `FlopCount.over`."""

    ranks: tuple[int, ...]
    """The work that each rank did, in the order of the mesh."""
    one_process: int
    """The work of one process that does what all ranks do together, without doing any of it twice.
    Work on plain tensors counts as different on each rank, such as that of data parallelism."""

    @property
    def total(self) -> int:
        """The sum over all ranks."""
        return sum(self.ranks)

    @property
    def redundancy(self) -> float:
        """`total / one_process`: 1.0 if no work is done twice."""
        return self.total / self.one_process if self.one_process else 1.0


@dataclass
class _CountedCall:
    """A call on DTensors: what its backward would cost one process."""

    backward: Operators
    modules: frozenset[str]
    ranks: int
    tasks: set[int] = field(default_factory=set)
    """The backwards in which it was counted."""


class FlopCount:
    """What `sw.flops` has counted so far on the calling rank."""

    def __init__(self) -> None:
        self._rank: dict[str, Operators] = defaultdict(lambda: defaultdict(int))
        self._one: dict[str, Operators] = defaultdict(lambda: defaultdict(int))
        self._share = Fraction(0)
        self.unmeasured: set[str] = set()
        """Functions on DTensors that need data to run, so that their work for one process is not
        known: it counts as the work that this rank did for them."""
        self._local = _LocalCounter(self)
        self._measured: dict[Any, tuple[Operators, Operators]] = {}
        self._calls: list[_CountedCall] = []
        self._starts: list[int] = []
        self._ends: list[int] = []
        """The numbers of the autograd nodes that belong to each call: from a start to an end."""
        self._in_call = False
        self._seen = 0
        self._modules_since: list[int] = []
        self._modules_then: list[frozenset[str]] = []
        """The modules that ran when autograd nodes were made, each from a number on: torch's own
        tracker tells those of a backward only roughly."""

    # ---- results

    @property
    def rank(self) -> int:
        """The work that this rank did."""
        return sum(self._rank[_GLOBAL].values())

    @property
    def one_process(self) -> int:
        """The work that one process would do in place of this rank: calls on DTensors count with
        their global shapes, calls on plain tensors as they are."""
        return sum(self._one[_GLOBAL].values())

    @property
    def by_operator(self) -> dict[str, Flops]:
        """The work by aten operator."""
        return _paired(self._rank[_GLOBAL], self._one[_GLOBAL])

    @property
    def by_module(self) -> dict[str, Flops]:
        """The work by module, with that of its parts, by its path from the outermost module."""
        totals = [
            {name: sum(each.values()) for name, each in found.items() if name != _GLOBAL}
            for found in (self._rank, self._one)
        ]
        return _paired(*totals)

    def over(self, mesh: DeviceMesh | TorchMesh) -> FlopTotals:
        """Return the work of all ranks of a mesh, all of which must call this (one collective)."""
        mesh = as_mesh(mesh)
        mine = self.rank, self._share
        alone = mesh.size() == 1 or not carries_values(mesh)
        found = [mine] if alone else communicator(mesh).gather_objects(mine)
        one_process = sum((share for _, share in found), Fraction(0))
        return FlopTotals(tuple(rank for rank, _ in found), round(one_process))

    def table(self) -> str:
        """Return the numbers as text, by operator and by module."""
        lines = [f"{'':40} {'this rank':>16} {'one process':>16}"]
        for group in ({"total": Flops(self.rank, self.one_process)}, self.by_operator):
            lines += [f"{name:40} {each.rank:>16,} {each.one_process:>16,}"
                      for name, each in group.items()]  # fmt: skip
        modules = sorted(self.by_module.items())
        lines += [f"{name:40} {each.rank:>16,} {each.one_process:>16,}" for name, each in modules]
        return "\n".join(lines)

    # ---- counting

    def _add_local(self, operator: str, flops: int) -> None:
        """Count an operator that ran on this rank, also one without work: it may tell that the
        backward of a call runs."""
        modules = self._modules()
        self._add(self._rank, modules, operator, flops)
        if self._in_call:
            return  # counted with the global shapes
        call = self._call_of_backward()
        if call is None:
            self._add_for_one(modules, {operator: flops}, 1)
        elif (task := current_graph_task()) not in call.tasks:
            call.tasks.add(task)
            self._add_for_one(call.modules, call.backward, call.ranks)

    def _call_of_backward(self) -> _CountedCall | None:
        """Return the call on DTensors whose backward runs now."""
        node = current_autograd_node()
        if node is None:
            return None
        number = sequence_number(node)
        at = bisect_right(self._starts, number) - 1
        return self._calls[at] if at >= 0 and number < self._ends[at] else None

    def _modules(self) -> frozenset[str]:
        """Return the modules that run now; in a backward, those that ran in the forward."""
        node = current_autograd_node()
        if node is not None and not self._in_call:
            at = bisect_right(self._modules_since, sequence_number(node)) - 1
            if at >= 0:
                return self._modules_then[at]
        now = frozenset(self._local.mod_tracker.parents)
        if not self._modules_then or self._modules_then[-1] != now:
            self._modules_since.append(self._seen)  # nodes made since the last operator
            self._modules_then.append(now)
        self._seen = next_sequence_number()
        return now

    def _watch(self, func: Any, args: Any, kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        """Run a function on DTensors, and count what it would cost one process."""
        if self._in_call or func in _BACKWARD or getattr(func, "__name__", "") == "__get__":
            return run()
        tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, DTensor)]
        measured = self._measure(func, args, kwargs) if tensors else None
        modules = self._modules()
        before, start = self.rank, next_sequence_number()
        self._in_call = True
        try:
            result = run()
        finally:
            self._in_call = False
        if measured is None:
            if self.rank > before:
                self.unmeasured.add(getattr(func, "__name__", str(func)))
                self._add_for_one(modules, {"unmeasured": self.rank - before}, 1)
            return result
        forward, backward = measured
        ranks = tensors[0].device_mesh.size()
        self._add_for_one(modules, forward, ranks)
        end = next_sequence_number()
        if backward and end > start:
            self._calls.append(_CountedCall(backward, modules, ranks))
            self._starts.append(start)
            self._ends.append(end)
        return result

    def _measure(
        self, func: Any, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Operators, Operators] | None:
        """Return the work of a call on global shapes, forward and backward; None if it needs
        data."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        records = torch.is_grad_enabled()
        key = func, records, str(structure), tuple(map(_described, leaves))
        try:
            if key in self._measured:
                return self._measured[key]
        except TypeError:  # an argument cannot be hashed
            return _measured(func, leaves, structure)
        found = _measured(func, leaves, structure)
        if found is not None:
            self._measured[key] = found
        return found

    def _add_for_one(self, modules: frozenset[str], operators: Operators, ranks: int) -> None:
        for operator, flops in operators.items():
            self._add(self._one, modules, operator, flops)
        self._share += Fraction(sum(operators.values()), ranks)

    @staticmethod
    def _add(
        counts: dict[str, Operators], modules: frozenset[str], operator: str, flops: int
    ) -> None:
        for module in modules if flops else ():
            counts[module][operator] += flops


@contextmanager
def flops() -> Iterator[FlopCount]:
    """Count the floating point operations of everything that runs within, forward and backward.

    Formulas are those of `torch.utils.flop_counter`, also those that a program registers there;
    attention on the CPU counts like elsewhere. Numbers are available within the block and after it.

    Example:
        >>> with sw.flops() as count:
        ...     model(x).sum().backward()
        >>> count.rank  # what this rank did: what torch's FlopCounterMode counts
        >>> count.one_process  # what one process would do
        >>> count.over(mesh).redundancy  # all ranks together
        >>> print(count.table())
    """
    count = FlopCount()
    with count._local, watch_calls(count._watch):
        yield count


class _LocalCounter(FlopCounterMode):
    """Torch's counter, which passes on what it counts."""

    def __init__(self, count: FlopCount | None = None) -> None:
        super().__init__(display=False)
        self.flop_registry = _formulas(self.flop_registry)
        self._count = count

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        if self._count is None:
            return super()._count_flops(func_packet, out, args, kwargs)  # type: ignore[no-untyped-call]
        formula = self.flop_registry.get(func_packet)
        with as_local():  # in a backward, autograd hands on DTensors that it saved
            flops = 0 if formula is None else formula(*args, **kwargs, out_val=out)
        self._count._add_local(str(func_packet), flops)
        return out


def _formulas(known: dict[Any, Any]) -> dict[Any, Any]:
    """Add the attention of the CPU, for which torch has no formula."""
    flash = "_scaled_dot_product_flash_attention"
    added = {
        getattr(_aten, f"{flash}_for_cpu{direction}"): known[getattr(_aten, flash + direction)]
        for direction in ("", "_backward")
    }
    return {**added, **known}


def _measured(func: Any, leaves: list[Any], structure: Any) -> tuple[Operators, Operators] | None:
    """Run a function and its backward on tensors without memory; return their work."""
    given: list[torch.Tensor] = []

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        made = torch.empty(tuple(leaf.shape), dtype=leaf.dtype, device=leaf.device)
        if not leaf.requires_grad:
            return made
        given.append(made.requires_grad_())
        return made.view_as(made)  # no leaf: it may be written to

    counters = _LocalCounter(), _LocalCounter()
    try:
        with _apart():
            args, kwargs = pytree.tree_unflatten([fake(each) for each in leaves], structure)
            with counters[0]:
                made = func(*args, **kwargs)
            results = [
                each
                for each in pytree.tree_leaves(made)
                if isinstance(each, torch.Tensor) and each.requires_grad
            ]
            if given and results:
                gradients = [torch.ones_like(each) for each in results]
                with counters[1]:
                    torch.autograd.grad(results, given, gradients, allow_unused=True)
    except Exception:  # the function looks at values, or has no kernel without memory
        return None
    forward, backward = (
        {str(packet): flops for packet, flops in each.flop_counts[_GLOBAL].items()}
        for each in counters
    )
    return forward, backward


@contextmanager
def _apart() -> Iterator[None]:
    """Return a context in which tensors have no memory, and nothing outside notices what runs: no
    generator, no dispatch mode, no hook for saved tensors (of which the innermost counts)."""
    with (
        torch.random.fork_rng(devices=()),
        without_dispatch_modes(),
        torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved),
        FakeTensorMode(),
    ):
        yield


def _described(leaf: Any) -> Any:
    """Return the part of the key of a call that stands for an argument."""
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad
    return type(leaf), leaf


def _paired(rank: Operators, one: Operators) -> dict[str, Flops]:
    return {name: Flops(rank.get(name, 0), one.get(name, 0)) for name in {**rank, **one}}
