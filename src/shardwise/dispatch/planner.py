"""The planner: from a function and its arguments to a `CachedCall`. Runs once per kind of call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch

from shardwise.core.errors import DispatchError
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh
from shardwise.dispatch.cached_call import (
    CachedCall,
    CompositeCall,
    PartialReuseCall,
    PerDtypeCall,
)
from shardwise.dispatch.errors import check_dtype_on_empty_shards, fail_on_all_ranks
from shardwise.dispatch.fallback import FallbackCall
from shardwise.dtensor.call_args import (
    ArgPath,
    Args,
    Kwargs,
    argument_at,
    check_dense_arguments,
    check_plain_tensors,
    common_mesh,
    layout_of,
    tensor_paths,
)
from shardwise.dtensor.composite import (
    call_when_waited,
    call_with_numbers,
    compute_into_out,
    compute_then_copy,
    decompose,
    tensors_for_numbers,
    write_lowered,
    write_to_plain,
)
from shardwise.dtensor.input_moves import InputMove, plan_input_move
from shardwise.dtensor.local_shards import is_under_way
from shardwise.dtensor.state import state
from shardwise.dtensor.tensor import DTensor
from shardwise.redistribute.cost import when_costs_change
from shardwise.rules.index.scattering import adopt_layout
from shardwise.rules.registry import OpInfo, RuleError, name_of
from shardwise.rules.spec import Spec
from shardwise.rules.strategy import Strategy, choose
from shardwise.torch_internals import OpOverload, OpOverloadPacket, schema_of


@dataclass(frozen=True, slots=True)
class _NewCall:
    """A call to plan."""

    func: Any
    known: OpInfo | None
    name: str
    args: Args
    paths: list[ArgPath]
    """The paths to the tensors among its arguments."""
    tensors: list[torch.Tensor]
    mesh: DeviceMesh

    @property
    def outplace(self) -> Callable[..., Any] | None:
        """The out-of-place form of an in-place function that has a rule; else None."""
        return None if self.known is None else self.known.outplace


def plan(func: Any, known: OpInfo | None, args: Args, kwargs: Kwargs) -> CachedCall:
    """Plan a call: by its rule, as a composite of other calls, or as a fallback."""
    name = name_of(func)
    if kwargs.get("out") is not None:
        return CompositeCall(name, compute_into_out(func, name))
    numbers = tensors_for_numbers(name, kwargs)
    if numbers:
        return CompositeCall(name, call_with_numbers(func, numbers))
    paths = list(tensor_paths(args, kwargs))
    tensors = [argument_at(args, kwargs, path) for path in paths]
    if any(map(is_under_way, tensors)):
        return CompositeCall(name, call_when_waited(func))
    mesh = common_mesh(name, tensors)
    check_dense_arguments(name, tensors)
    check_plain_tensors(name, tensors, mesh)
    spec = None
    if known is not None and known.rule is not None:
        spec = known.rule(*args, **kwargs)
    if callable(spec):
        return CompositeCall(name, spec)
    new = _NewCall(func, known, name, args, paths, tensors, mesh)
    return _plan_without_rule(new) if spec is None else _plan_by_rule(new, spec)


def _plan_by_rule(new: _NewCall, spec: Spec) -> CachedCall:
    name, paths, tensors, outplace = new.name, new.paths, new.tensors, new.outplace
    order = _match_inputs(name, spec, tensors)
    layouts = [layout_of(tensor, new.mesh) for tensor, _ in spec.inputs]
    is_inplace = outplace is not None
    if is_inplace and not isinstance(new.args[0], DTensor):
        return _write_to_plain(new)
    choice = choose(spec, layouts, new.mesh, keeps=layouts[0] if is_inplace else None)
    known = new.known
    if choice is not None and choice.depends_on_dtype and known is not None and not known.by_dtype:
        plan_again = partial(plan, new.func, replace(known, by_dtype=True))
        per_dtype = PerDtypeCall(name, paths, plan_again)
        per_dtype.returns_views, per_dtype.keys = spec.is_view, spec.keys
        return per_dtype
    if choice is None and outplace is None:
        raise RuleError(
            f"{name}: no sharding that its rule lists fits inputs of layouts {layouts}; list "
            "([Replicate()], [Replicate(), ...]) as well, which always does"
        )
    if choice is None:
        assert outplace is not None, "checked above"
        return CompositeCall(name, compute_then_copy(name, outplace, layouts[0]))
    lowered = None if spec.lower is None else spec.lower(choice.context)
    if lowered is not None and outplace is not None and not spec.writes:
        lowered = write_lowered(lowered)
    run = new.func if lowered is None else lowered
    run = check_dtype_on_empty_shards(new.func, run, choice.context)
    if spec.may_fail:
        run = fail_on_all_ranks(name, run, choice.context)
    moves = [
        (paths[at], move)
        for at, move in zip(order, _input_moves(layouts, choice), strict=True)
        if move is not None
    ]
    moves_first = bool(
        moves and moves[0][0] == paths[order[0]] and moves[0][1].source is not moves[0][1].target
    )
    run_needs_plain = _is_python(new.func) if lowered is None else _needs_plain(lowered)
    call = CachedCall(
        name,
        run,
        paths,
        moves,
        choice.outputs,
        needs_plain=spec.needs_plain or run_needs_plain,
        is_inplace=is_inplace,
        takes_only_dtensors=all(isinstance(tensor, DTensor) for tensor in tensors),
        detaches=spec.is_view and moves_first,
    )
    call.returns_views, call.keys = spec.is_view, spec.keys
    # A write, directly or through a view, must reach the tensor that was given.
    if is_inplace or spec.is_view or not any(each.partial for each in choice.outputs):
        return call
    partial_inputs = [
        paths[at]
        for before, after, at in zip(layouts, choice.inputs, order, strict=True)
        if before.partial and after.partial and type(tensors[at]) is DTensor
    ]
    if not partial_inputs:
        return call
    return PartialReuseCall(call, partial_inputs, partial(plan, new.func, new.known))


def _write_to_plain(new: _NewCall) -> CachedCall:
    """Plan an in-place call on a plain tensor."""
    write = adopt_layout if new.name == "index_copy_" else write_to_plain
    return CompositeCall(new.name, partial(write, new.name, new.func))


def _input_moves(layouts: Sequence[Layout], choice: Strategy) -> Iterator[InputMove | None]:
    for source, target, used_on in zip(layouts, choice.inputs, choice.used_on, strict=True):
        moves = source is not target or used_on
        yield plan_input_move(source, target, used_on) if moves else None


# ---- the rule and the arguments


def _match_inputs(name: str, spec: Spec, tensors: list[torch.Tensor]) -> list[int]:
    """Return the position of each input of a spec among the tensors of the call."""
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
    if free and all(tensors[at].dim() == 0 for at in free):
        raise DispatchError(
            f"{name}: expected a number, as a size or a dim, got a 0-d tensor; take its value: "
            f"{name}(x.item(), ...)"
        )
    if free:
        raise RuleError(f"{name}: its rule forgets {len(free)} of {len(tensors)} tensors")
    return found


_BUILTIN = type(torch.layer_norm)
"""The type of torch's functions of C, to which a DTensor is its shard. A Python function may ask
for its shape, and would get the global one."""


def _needs_plain(lowered: Callable[..., Any]) -> bool:
    return type(lowered) is not _BUILTIN and not getattr(lowered, "takes_shards", False)


def _is_python(func: Any) -> bool:
    """Tell whether Python code runs on the tensors, now or in the backward.

    Such code must get plain local tensors, because a DTensor would show it global shapes.
    """
    if isinstance(func, OpOverload | OpOverloadPacket):
        return not str(func).startswith("aten.")
    return hasattr(func, "__code__")


_NUMPYS_NAMES = {"axis": "dim", "keepdims": "keepdim"}


def by_torchs_names(func: Any, kwargs: Kwargs) -> Kwargs:
    """Rename numpy's keywords, which functions of C accept too, to torch's, which rules know."""
    if not isinstance(func, BuiltinFunctionType | MethodDescriptorType):
        return kwargs
    if "quantize" in func.__name__ or func is torch.segment_reduce:  # torch's own name is `axis`
        return kwargs
    return {_NUMPYS_NAMES.get(name, name): each for name, each in kwargs.items()}


_INPUTS = ("input", "self", "A", "x")
"""Names that torch has for the first operand, where a rule may use another."""


def by_position(func: Any, known: OpInfo | None, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Turn keyword arguments into positional ones, because lowerings know operands by position.

    For an aten operator: all of them, by its schema. For other functions: the first one, if it is
    the first parameter of the rule, or the target of a write.
    """
    given, rest = list(args), dict(kwargs)
    if isinstance(func, OpOverload | OpOverloadPacket):
        for name in _positional_names(func, frozenset(kwargs))[len(args) :]:
            if name not in rest:
                break
            given.append(rest.pop(name))
        return tuple(given), rest
    if args or known is None or known.rule is None:
        return args, kwargs
    names = _names_of_first(known.rule)
    if known.outplace is not None:
        names = (*names, *_INPUTS)
    found = next((each for each in names if each in rest), None)
    return (args, kwargs) if found is None else ((rest.pop(found),), rest)


@lru_cache(maxsize=4096)
def _positional_names(
    operator: OpOverload | OpOverloadPacket, keywords: frozenset[str]
) -> tuple[str, ...]:
    """Return the names of positional arguments; of an operator with several overloads, those of the
    first overload that has all these keywords."""
    if isinstance(operator, OpOverload):
        overloads = [operator]
    else:
        overloads = [getattr(operator, each) for each in operator.overloads()]  # type: ignore[no-untyped-call]
    for overload in overloads:
        arguments = schema_of(overload).arguments
        if keywords <= {each.name for each in arguments} or len(overloads) == 1:
            return tuple(each.name for each in arguments if not each.kwarg_only)
    return ()


@lru_cache(maxsize=4096)
def _names_of_first(rule: Any) -> tuple[str, ...]:
    """Return the names that the first argument of a rule may have; none if it takes `*args`."""
    first, *others = inspect.signature(rule).parameters.values()
    if first.kind is first.VAR_POSITIONAL:
        return ()
    taken = {each.name for each in others}
    return (first.name, *(each for each in _INPUTS if each not in taken))


# ---- operators without a rule


def _plan_without_rule(new: _NewCall) -> CachedCall:
    """Plan a call by the functions it is made of, out of place, or on replicated inputs."""
    name, mesh = new.name, new.mesh
    copy = decompose(new.func)
    if copy is not None:
        return CompositeCall(name, copy)
    outplace = new.outplace
    if outplace is None:
        outplace = _outplace(new.func)
        if outplace is not None and not isinstance(new.args[0], DTensor):
            return _write_to_plain(new)
    if outplace is not None:
        run = compute_then_copy(name, outplace, layout_of(new.args[0], mesh))
        return CompositeCall(name, run)
    moves = []
    for path, tensor in zip(new.paths, new.tensors, strict=True):
        source = layout_of(tensor, mesh)
        if not source.is_replicated:
            moves.append((path, plan_input_move(source, Layout(mesh, source.shape), ())))
            if _is_written(new.func, path):
                raise DispatchError(
                    f"{name}: it has no rule and writes to a tensor of layout {source!r}: on "
                    "replicated inputs it would write to a copy. Register a rule with "
                    "sw.register_rule, redistribute the tensor to Replicate(), or write to "
                    "x.to_local(), this rank's piece"
                )
    return FallbackCall(name, new.func, new.paths, moves, mesh)


def _is_written(func: Any, path: ArgPath) -> bool:
    """Tell from its schema or its name whether a function writes to an argument."""
    if not isinstance(func, OpOverload):
        return path[0] == 0 and _is_inplace(func)
    return any(
        each.alias_info is not None and each.alias_info.is_write and path[0] in (at, each.name)
        for at, each in enumerate(schema_of(func).arguments)
    )


def _outplace(func: Any) -> Callable[..., Any] | None:
    """Return the out-of-place form of an in-place function; None if it is not in place."""
    found = getattr(torch.Tensor, _short_name(func)[:-1], None) if _is_inplace(func) else None
    return found if callable(found) else None


def _is_inplace(func: Any) -> bool:
    """Tell whether a function has the name of one that changes its first argument."""
    name = _short_name(func)
    return name.endswith("_") and not name.endswith("__")


def _short_name(func: Any) -> str:
    if isinstance(func, OpOverload):
        return str(schema_of(func).name.rpartition("::")[2])
    return getattr(func, "__name__", "")


def _forget_calls() -> None:
    state.entries.clear()  # of the calling thread


when_costs_change(_forget_calls)
