"""Planning a call: from a function and its arguments to an `Entry`. Paid once per kind of call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from shardwise.dispatch.arguments import (
    check_dense,
    check_plain,
    check_target,
    common_mesh,
    layout_of,
    tensor_paths,
)
from shardwise.dispatch.aside import (
    AsIs,
    computed_aside,
    decomposed,
    into_out,
    numbers_among,
    with_numbers,
)
from shardwise.dispatch.entry import Entry, Path, get
from shardwise.dispatch.failing import failing_together, refusing_together
from shardwise.dispatch.fallback import WholeEntry
from shardwise.dispatch.flowing import FlowEntry, flowing_paths
from shardwise.dispatch.moving import InputMove, input_move
from shardwise.dispatch.state import state
from shardwise.errors import DispatchError
from shardwise.layout import Layout
from shardwise.mesh import DeviceMesh
from shardwise.redistribute.cost import when_costs_change
from shardwise.rules.choose import Choice, choose
from shardwise.rules.registry import Known, RuleError, name_of
from shardwise.rules.spec import Spec
from shardwise.tensor import DTensor
from shardwise.torch_internals import OpOverload, OpOverloadPacket, as_local, schema_of

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def plan(func: Any, known: Known | None, args: Args, kwargs: Kwargs) -> Entry:
    """How to run a call."""
    name = name_of(func)
    if kwargs.get("out") is not None:
        return into_out(func, name)
    numbers = numbers_among(name, kwargs)
    if numbers:
        return with_numbers(func, name, numbers)
    paths = list(tensor_paths(args, kwargs))
    tensors = [get(args, kwargs, path) for path in paths]
    mesh = common_mesh(name, tensors)
    check_dense(name, tensors)
    check_plain(name, tensors, mesh)
    spec = None
    if known is not None and known.rule is not None:
        spec = known.rule(*args, **kwargs)
    if callable(spec):
        return AsIs(name, spec)
    if spec is not None:
        return _by_rule(func, known, name, spec, paths, tensors, mesh, args)
    return _whole(func, known, name, paths, tensors, mesh, args, kwargs)


def _by_rule(
    func: Any,
    known: Known | None,
    name: str,
    spec: Spec,
    paths: list[Path],
    tensors: list[torch.Tensor],
    mesh: DeviceMesh,
    args: Args,
) -> Entry:
    order = _matched(name, spec, tensors)
    layouts = [layout_of(tensor, mesh) for tensor, _ in spec.inputs]
    inplace = known is not None and known.outplace is not None
    if inplace:
        if not isinstance(args[0], DTensor) and all(each.is_replicated for each in layouts):
            return AsIs(name, _on_copies(func))
        check_target(name, args[0])
    keeps = layouts[0] if inplace else None
    choice = choose(spec, layouts, mesh, keeps=keeps)
    if choice is not None and choice.depends_on_dtype and known is not None and not known.by_dtype:
        return PerDtypeEntry(name, paths, spec, partial(plan, func, replace(known, by_dtype=True)))
    if choice is None:
        assert known is not None and known.outplace is not None, "only a fixed result can fail"
        return computed_aside(name, known.outplace, keeps)
    run = func
    lowered = None if spec.lower is None else spec.lower(choice.here)
    if lowered is not None:
        if known is not None and known.outplace is not None and not spec.writes:
            return computed_aside(name, known.outplace, keeps)
        run = lowered
    is_plain = spec.needs_plain or (_is_python(func) if lowered is None else _needs_plain(lowered))
    run = refusing_together(func, run, choice.here)
    if spec.may_fail:
        run = failing_together(name, run, choice.here)
    moves = [
        (paths[at], how)
        for at, how in zip(order, _input_moves(layouts, choice), strict=True)
        if how is not None
    ]
    first = (
        moves and moves[0][0] == paths[order[0]] and moves[0][1].source is not moves[0][1].target
    )
    made = Entry(
        name,
        run,
        paths,
        moves,
        choice.outputs,
        plain=is_plain,
        inplace=inplace,
        fresh=all(isinstance(tensor, DTensor) for tensor in tensors),
        severed=bool(spec.is_view and first),
    )
    made.views, made.keys = spec.is_view, spec.keys
    # What is written to, by itself or through a view, must be the tensor that was given.
    if inplace or spec.is_view or not any(each.partial for each in choice.outputs):
        return made
    flowing = flowing_paths(
        layouts, choice.inputs, [paths[at] for at in order], [tensors[at] for at in order]
    )
    again = partial(plan, func, known)
    return FlowEntry(made, flowing, again) if flowing else made


class PerDtypeEntry(Entry):
    """A call whose cheapest strategy depends on dtypes: one entry for each combination."""

    __slots__ = ("entries", "plan")

    def __init__(
        self, name: str, paths: list[Path], spec: Spec, plan: Callable[[Args, Kwargs], Entry]
    ) -> None:
        super().__init__(
            name, plan, paths, [], (), plain=False, inplace=False, fresh=True, severed=False
        )
        self.views, self.keys = spec.is_view, spec.keys
        self.plan = plan
        self.entries: dict[tuple[torch.dtype, ...], Entry] = {}

    def __call__(self, args: Args, kwargs: Kwargs) -> Any:
        """Run the entry for the dtypes of these arguments."""
        dtypes = tuple([get(args, kwargs, path).dtype for path in self.tensors])
        entry = self.entries.get(dtypes)
        if entry is None:
            entry = self.entries[dtypes] = self.plan(args, kwargs)
        if isinstance(entry, FlowEntry):
            result = entry.with_sums_made(args, kwargs)
            if result is not None:
                return result
        return entry(args, kwargs)


def _on_copies(func: Any) -> Callable[..., Any]:
    """In place on a plain tensor, with whole DTensors: every rank writes the same to its copy."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with as_local():
            return func(*args, **kwargs)

    return run


def _input_moves(layouts: Sequence[Layout], choice: Choice) -> Iterator[InputMove | None]:
    for source, target, used_on in zip(layouts, choice.inputs, choice.used_on, strict=True):
        moves = source is not target or used_on
        yield input_move(source, target, used_on) if moves else None


# ---- how a rule fits the call


def _matched(name: str, spec: Spec, tensors: list[torch.Tensor]) -> list[int]:
    """The positions among a call's tensors of the spec's inputs."""
    free = list(range(len(tensors)))
    found = []
    for tensor, dims in spec.inputs:
        at = next((at for at in free if tensors[at] is tensor), None)
        if at is None:
            raise RuleError(f"{name}: its rule speaks of a tensor that is no argument")
        if len(dims) != tensor.dim():
            raise RuleError(
                f"{name}: its rule gives {len(dims)} factors to an input of {tensor.dim()} dims"
            )
        free.remove(at)
        found.append(at)
    if free:
        raise RuleError(f"{name}: its rule forgets {len(free)} of {len(tensors)} tensors")
    return found


_BUILTIN = type(torch.layer_norm)
"""torch's own functions see the shard that a DTensor is; others may ask it for its shape."""


def _needs_plain(lowered: Callable[..., Any]) -> bool:
    return type(lowered) is not _BUILTIN and not getattr(lowered, "takes_shards", False)


def _is_python(func: Any) -> bool:
    """Whether Python code runs on the tensors, now or in the backward: it must not meet DTensors
    where it computes with local tensors."""
    if isinstance(func, OpOverload | OpOverloadPacket):
        return not str(func).startswith("aten.")
    return hasattr(func, "__code__")


# ---- no rule


def _whole(
    func: Any,
    known: Known | None,
    name: str,
    paths: list[Path],
    tensors: list[torch.Tensor],
    mesh: DeviceMesh,
    args: Args,
    kwargs: Kwargs,
) -> Entry:
    """Run an operator without a rule: on whole inputs, or by the operators it is made of."""
    copy = decomposed(func)
    if copy is not None:
        return AsIs(name, copy)
    if known is not None and known.outplace is not None:
        return computed_aside(name, known.outplace, layout_of(args[0], mesh))
    outplace = _outplace(func)
    if outplace is not None:
        check_target(name, args[0])
        return computed_aside(name, outplace, layout_of(args[0], mesh))
    moves = []
    for path, tensor in zip(paths, tensors, strict=True):
        source = layout_of(tensor, mesh)
        if not source.is_replicated:
            moves.append((path, input_move(source, Layout(mesh, source.shape), ())))
            if _is_written(func, path):
                raise DispatchError(
                    f"{name}: it writes to a tensor that lies as {source!r}, and has no rule: on "
                    "whole inputs it would write to a copy. Register a rule with "
                    "sw.register_rule, redistribute the tensor to Replicate(), or write to "
                    "x.to_local(), this rank's piece"
                )
    return WholeEntry(name, func, paths, moves, mesh)


def _is_written(func: Any, path: Path) -> bool:
    """Whether a function writes to an argument, as its schema or its name says."""
    if not isinstance(func, OpOverload):
        return path[0] == 0 and _is_inplace(func)
    return any(
        each.alias_info is not None and each.alias_info.is_write and path[0] in (at, each.name)
        for at, each in enumerate(schema_of(func).arguments)
    )


def _outplace(func: Any) -> Callable[..., Any] | None:
    """The function that returns a new tensor, of one that changes its first argument."""
    found = getattr(torch.Tensor, _short_name(func)[:-1], None) if _is_inplace(func) else None
    return found if callable(found) else None


def _is_inplace(func: Any) -> bool:
    """Whether a function is named as those that change their first argument are."""
    name = _short_name(func)
    return name.endswith("_") and not name.endswith("__")


def _short_name(func: Any) -> str:
    if isinstance(func, OpOverload):
        return str(schema_of(func).name.rpartition("::")[2])
    return getattr(func, "__name__", "")


def _forget_calls() -> None:
    state.entries.clear()  # of the calling thread


when_costs_change(_forget_calls)
