"""Operators described by the placements they accept, in torch's form: `register_sharding`.

A rule in factors (`register_rule`) says how dims relate, and everything follows from that. torch's
form lists, for one axis of the mesh, the placements of the results with those of the inputs. Both
end in the same planner: what axes may do is combined over all axes, and the cheapest combination
for the inputs as they are is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice, product
from typing import Any, NamedTuple, TypeVar

import torch

from shardwise.core.errors import LayoutError
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh
from shardwise.core.placement import as_placement
from shardwise.dtensor.call_args import common_mesh, layout_of
from shardwise.dtensor.dtensor_spec import DTensorSpec
from shardwise.dtensor.tensor import tensors_in
from shardwise.rules.registry import (
    OpInfo,
    RuleError,
    add_user_rule,
    functions_named,
    lookup,
    meta_result,
    operator_functions,
)
from shardwise.rules.spec import Listed, Out, Spec, SplitContext
from shardwise.torch_internals import OpOverload, pytree, schema_of

Function = TypeVar("Function", bound=Callable[..., Any])

_MOST_COMBINATIONS = 4096


def register_sharding(op: Any) -> Callable[[Function], Function]:
    """Declare the placements that an operator accepts, in torch's form. A decorator.

    `register_rule` says the same in one line, for any number of dims and axes, and can be checked
    with `shardwise.testing.check_rule`. Gradients need no declaration: autograd runs on the shards,
    and the gradient of an input that is replicated beside split ones is summed.

    Arguments:
        op: an operator, such as `torch.ops.mine.op.default`, or a list of operators.

    The decorated function gets the arguments of the operator, with a `DTensorSpec` for each tensor
    (its shape, ndim, placements, mesh). It returns a list of pairs: the
    placements of the results on one axis of the mesh, and those of the arguments; None for an
    argument that is no tensor.

    Example:
        >>> @register_sharding(torch.ops.mine.softmax.default)
        ... def softmax_sharding(x, dim):
        ...     listed = [([Replicate()], [Replicate(), None])]
        ...     return listed + [
        ...         ([Shard(each)], [Shard(each), None]) for each in range(x.ndim) if each != dim
        ...     ]
    """
    operators = list(op) if isinstance(op, list | tuple) else [op]

    def register(sharding: Function) -> Function:
        for each in operators:
            _register(each, sharding)
        return sharding

    return register


def _register(op: Any, sharding: Callable[..., Any]) -> None:
    functions = operator_functions(op)
    operator = functions[0]
    name = str(operator)
    overload = operator if isinstance(operator, OpOverload) else None
    if overload is not None and any(
        each.alias_info is not None and each.alias_info.is_write
        for each in schema_of(overload).arguments
    ):
        raise RuleError(
            f"op: expected an operator that returns new tensors, got {name}, which writes to its "
            "arguments; register the operator that returns them"
        )

    add_user_rule(functions, OpInfo(name, _rule(operator, operator, sharding)))
    if overload is not None and name.startswith("aten."):
        _register_torchs_functions(overload, sharding)


def _rule(operator: Any, function: Any, sharding: Callable[..., Any]) -> Callable[..., Spec]:
    """Return the rule of a function that an operator implements, by what the operator accepts."""
    name = str(operator)

    def rule(*args: Any, **kwargs: Any) -> Spec:
        tensors = list(tensors_in((args, kwargs)))
        mesh = common_mesh(name, tensors)
        of_args, of_kwargs = pytree.tree_map_only(
            torch.Tensor, partial(_as_spec, mesh), (args, kwargs)
        )
        listed = sharding(*of_args, **of_kwargs)
        results = list(tensors_in((meta_result(operator, args, kwargs),)))
        return Spec(
            [(tensor, (None,) * tensor.dim()) for tensor in tensors],
            [Out((None,) * each.dim(), tuple(each.shape)) for each in results],
            acceptable=[_as_listed(name, pair, len(results), len(tensors)) for pair in listed],
            lower=partial(_checked, name, function),
        )

    return rule


def _as_spec(mesh: DeviceMesh, tensor: torch.Tensor) -> DTensorSpec:
    return DTensorSpec.of(layout_of(tensor, mesh), tensor.stride(), tensor.dtype)


def _checked(name: str, function: Any, context: SplitContext) -> Callable[..., Any]:
    """Return the function, which also checks that its results are shards of the given layouts."""
    shapes = [each.local_shape() for each in context.outputs]

    def run(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        for at, (each, shape) in enumerate(zip(tensors_in((result,)), shapes, strict=True)):
            if each.shape != shape:
                raise RuleError(
                    f"{name}: register_sharding: the shard of result {at} must have the shape "
                    f"{shape} for inputs {context.inputs}; got {tuple(each.shape)}. The operator "
                    f"cannot run on these shards: list {context.outputs[at].placements} only for "
                    "inputs whose shards give it"
                )
        return result

    return run


def _register_torchs_functions(overload: OpOverload, sharding: Callable[..., Any]) -> None:
    """Register torch's function and method of an aten operator's name, for calls of its form.

    Other calls of them, as of another overload, keep their own rule.
    """
    arguments = schema_of(overload).arguments
    for function in functions_named(overload.overloadpacket.__name__):
        known = lookup(function) if callable(function) else None
        if known is None or known.rule is None:
            continue
        rule = _by_form(arguments, _rule(overload, function, sharding), known.rule)
        add_user_rule([function], OpInfo(known.name, rule, by_dtype=known.by_dtype))


def _by_form(
    arguments: Sequence[Any], listed: Callable[..., Spec], other: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a rule that is the first one for calls of an operator's form, else the other."""
    positional = [each.name for each in arguments if not each.kwarg_only]
    remaining = {name: positional[at:] for at, name in enumerate(positional)}

    def rule(*args: Any, **kwargs: Any) -> Any:
        named = {"self" if name == "input" else name: each for name, each in kwargs.items()}
        if not _fits(arguments, args, named):
            return other(*args, **kwargs)
        given = list(args)
        for each in arguments[len(args) :]:  # by position, as operators get them
            if each.kwarg_only or not any(name in named for name in remaining[each.name]):
                break
            given.append(named.pop(each.name, each.default_value))
        return listed(*given, **named)

    return rule


def _fits(arguments: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether a call has the form of an operator with these arguments."""
    positional = [each for each in arguments if not each.kwarg_only]
    if len(args) > len(positional):
        return False
    given = {each.name: value for each, value in zip(positional, args, strict=False)} | kwargs
    if given.keys() - {each.name for each in arguments}:
        return False
    return all(
        each.has_default_value()
        if each.name not in given
        else isinstance(each.type, torch.TensorType) == isinstance(given[each.name], torch.Tensor)
        for each in arguments
        if each.name not in given or isinstance(each.type, torch.TensorType | torch.NumberType)
    )


def _as_listed(name: str, pair: Any, results: int, tensors: int) -> Listed:
    """Check one entry of a list of acceptable shardings, and leave out what is no tensor."""
    expected = (
        f"{name}: register_sharding: expected pairs ([placement of each result], [placement of "
        "each argument, None for one that is no tensor]); got "
    )
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        raise RuleError(f"{expected}{pair!r}")
    outputs, inputs = ([each for each in side if each is not None] for side in pair)
    if len(outputs) != results or len(inputs) != tensors:
        raise RuleError(f"{expected}{pair!r}, for {results} results and {tensors} tensors")
    try:
        placements = (
            tuple(as_placement(each, f"{what}[{at}]") for at, each in enumerate(side))
            for what, side in (("results", outputs), ("arguments", inputs))
        )
        return next(placements), next(placements)
    except LayoutError as error:
        raise RuleError(f"{expected}{pair!r}: {error}") from None


class ListedLayouts(NamedTuple):
    """One combination of what all axes may do."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    used_on: tuple[tuple[int, ...], ...]
    """For each input the axes on which it is whole and something else is not."""


def listed_layouts(
    spec: Spec, layouts: Sequence[Layout], mesh: DeviceMesh
) -> Iterator[ListedLayouts]:
    """Yield the layouts of inputs and results for each combination of acceptable placements."""
    assert spec.acceptable is not None, "the spec of register_sharding"
    for combination in islice(product(spec.acceptable, repeat=mesh.ndim), _MOST_COMBINATIONS):
        try:
            inputs = tuple(
                Layout.from_placements(mesh, layout.shape, [of[at] for _, of in combination])
                for at, layout in enumerate(layouts)
            )
            outputs = tuple(
                Layout.from_placements(mesh, out.shape, [of[at] for of, _ in combination])
                for at, out in enumerate(spec.outputs)
            )
        except LayoutError:  # a dim that this tensor does not have
            continue
        used_on = tuple(
            tuple(
                axis
                for axis, (results, given) in enumerate(combination)
                if mesh.shape[axis] > 1
                and given[at].is_replicate()
                and not all(each.is_replicate() for each in (*results, *given))
            )
            for at in range(len(layouts))
        )
        yield ListedLayouts(inputs, outputs, used_on)
