"""register_rule: a rule for a user's own operator, in one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.rules.helpers.composed_ops import tensors_in
from shardwise.rules.registry import OpInfo, RuleError, add_op_info
from shardwise.rules.spec import Dims, Out, Spec, parse_pattern
from shardwise.torch_internals import OpOverload, OpOverloadPacket, overload_of_custom_operator


def register_rule(
    op: Any,
    pattern: str,
    *,
    reduces: str | Mapping[str, str] = "sum",
    linear: Sequence[Sequence[int]] = (),
    additive: Sequence[int] = (),
) -> None:
    """Declare how an operator relates the dims of its tensors, so that it runs on shards.

    `shardwise.testing.check_rule` checks the declaration.

    Arguments:
        op: an operator: `torch.ops.mine.op`, what `torch.library.custom_op` returned, or a torch
            function.
        pattern: the factors of its tensor arguments and results, as an einsum: "m k, k n -> m n".
            `...` stands for any leading dims, `_` for a dim that must be whole. A factor of a
            result may be split; a factor of arguments only is reduced; for the size of a `_` in a
            result the operator is run on tensors without data (`register_fake`).
        reduces: how to combine the results of ranks that split a reduced factor: "sum", "max",
            "min" or "product", or one of these for each reduced factor; a factor that is not named
            must be whole.
        linear: the sets of (positions of) tensors in which the operator is linear, so that pending
            sums pass through it: [(0,), (1,)] for a product, [(0, 1)] for a sum.
        additive: the tensors that are added to the result, such as a bias.

    Example:
        >>> sw.register_rule(torch.ops.mine.matmul, "m k, k n -> m n", linear=[(0,), (1,)])
    """
    functions = _functions(op)
    name = str(functions[0])
    left, arrow, _ = pattern.partition("->")
    if not arrow:
        raise RuleError(f"pattern: expected such as 'm k, k n -> m n', got {pattern!r}")
    count = len(left.split(","))
    for position in (*additive, *(each for group in linear for each in group)):
        if not 0 <= position < count:
            raise RuleError(f"linear/additive: expected positions below {count}, got {position}")

    def rule(*args: Any, **kwargs: Any) -> Spec:
        tensors = list(tensors_in((args, kwargs)))
        if len(tensors) != count:
            raise RuleError(f"{name}: {pattern!r} is of {count} tensors, got {len(tensors)}")
        inputs, outputs = parse_pattern(pattern, tensors)
        sizes = _sizes(name, pattern, tensors, inputs)
        summed = [each for each in sizes if not any(each in dims for dims in outputs)]
        ways = dict.fromkeys(summed, reduces) if isinstance(reduces, str) else dict(reduces)
        shapes = _shapes(functions[0], args, kwargs, outputs, sizes)
        return Spec(
            list(zip(tensors, inputs, strict=True)),
            [Out(dims, shape) for dims, shape in zip(outputs, shapes, strict=True)],
            reduces=ways,
            linear=linear,
            additive=additive,
        )

    for function in functions:
        add_op_info(function, OpInfo(name, rule))


def _functions(op: Any) -> list[Any]:
    """Return the functions to register for an operator: its overloads and their packet."""
    op = overload_of_custom_operator(op)  # if it is from torch.library.custom_op
    if isinstance(op, OpOverload):
        return [op, op.overloadpacket]
    if isinstance(op, OpOverloadPacket):
        return [op, *(getattr(op, each) for each in op.overloads())]  # type: ignore[no-untyped-call]
    module = getattr(op, "__module__", None)  # builtins such as torch.add have none
    if callable(op) and (module is None or module.partition(".")[0] == "torch"):
        return [op]
    raise RuleError(
        f"op: expected an operator such as torch.ops.mine.op, got {op!r}; make a Python function "
        "an operator with torch.library.custom_op, or run it on shards with sw.local_map"
    )


def _sizes(
    name: str, pattern: str, tensors: list[torch.Tensor], inputs: list[Dims]
) -> dict[str, int]:
    """Return the size of each factor, after checking that all dims of a factor have one size."""
    sizes: dict[str, int] = {}
    for at, (tensor, dims) in enumerate(zip(tensors, inputs, strict=True)):
        if len(dims) != tensor.dim():
            raise RuleError(
                f"{name}: {pattern!r} gives tensor {at} {len(dims)} dims, "
                f"but its shape is {tuple(tensor.shape)}"
            )
        for factor, size in zip(dims, tensor.shape, strict=True):
            if factor is not None and sizes.setdefault(factor, size) != size:
                raise RuleError(
                    f"{name}: in {pattern!r}, {factor} is both {sizes[factor]} and {size}"
                )
    return sizes


def _shapes(
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: list[Dims],
    sizes: dict[str, int],
) -> list[tuple[int, ...]]:
    """Return the shapes of the results: from the factors, or by running on meta tensors."""
    if all(each in sizes for dims in outputs for each in dims):
        return [tuple(sizes[each] for each in dims if each is not None) for dims in outputs]

    def meta(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty(tuple(value.shape), dtype=value.dtype, device="meta")
        if isinstance(value, list | tuple):
            return type(value)(meta(each) for each in value)
        return value

    result = function(*map(meta, args), **{name: meta(arg) for name, arg in kwargs.items()})
    return [tuple(each.shape) for each in tensors_in(result)]
