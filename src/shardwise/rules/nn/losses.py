"""Losses: a number per element or per row, and their sum or mean over the global tensor.

A reduced loss is a pending sum over the ranks. A mean divides each rank's sum by the global count,
so the ranks may have different numbers of elements.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.rules.helpers.collectives import all_reduce_both_ways, all_reduce_sum
from shardwise.rules.helpers.dims import Inputs
from shardwise.rules.helpers.local_tensors import autocast_wide_dtype, keeps_sums, widen
from shardwise.rules.pointwise.elementwise import broadcast_spec, tensors_among
from shardwise.rules.registry import Aten, composed, dispatched, functions_named, handler, rule
from shardwise.rules.spec import Dims, Out, Spec, SplitContext
from shardwise.torch_internals import legacy_reduction, schema_of

Values = dict[str, Any]
"""The arguments of a call by name."""
Each = Callable[[SplitContext], Callable[[Values], torch.Tensor] | None]
"""Maps the split of a call to a function for the losses before reduction; None to use torch."""

_REDUCTIONS = ("none", "mean", "sum")  # in the order of torch's enumeration


@dataclass(frozen=True)
class Loss:
    """A loss function of torch and its parameters."""

    function: Callable[..., torch.Tensor]
    defaults: Mapping[str, Any]
    """The parameters in order, with their defaults."""
    keyword_only: frozenset[str]

    @staticmethod
    def of(function: Any, name: str) -> Loss:
        """Return the loss of a Python function (by its signature) or a builtin (by its aten
        schema)."""
        if hasattr(function, "__code__"):
            parameters = inspect.signature(function).parameters
            return Loss(
                function, {at: each.default for at, each in parameters.items()}, frozenset()
            )
        arguments = schema_of(getattr(torch.ops.aten, name).default).arguments
        names = ["input" if each.name == "self" else each.name for each in arguments]
        defaults = dict(zip(names, (each.default_value for each in arguments), strict=True))
        only = {at for at, each in zip(names, arguments, strict=True) if each.kwarg_only}
        return Loss(function, defaults, frozenset(only))

    def values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Values:
        """Return the arguments by name."""
        given = dict(zip(self.defaults, args, strict=False))
        given.update(kwargs)
        if "self" in given:
            given["input"] = given.pop("self")
        return {**self.defaults, **given}

    def reduction(self, values: Values) -> str:
        """Return the reduction: "none", "mean", "sum", or another one of the function."""
        given = values["reduction"]
        if values.get("size_average") is not None or values.get("reduce") is not None:
            given = legacy_reduction(values["size_average"], values["reduce"])
        return given if isinstance(given, str) else _REDUCTIONS[given]

    def each(self, values: Values) -> torch.Tensor:
        """Compute the losses before reduction with torch's function."""
        is_named = isinstance(values["reduction"], str)
        values = {**values, "reduction": "none" if is_named else 0}
        for old in ("size_average", "reduce"):
            if old in values:
                values[old] = None
        by_name = {name: values.pop(name) for name in self.keyword_only}
        return self.function(*values.values(), **by_name)


def losses(*names: Any) -> Callable[[Callable[..., Spec]], Callable[..., Spec]]:
    """Register the function that makes the spec of these losses from a `Loss` and its `Values`."""

    def register(made: Callable[..., Spec]) -> Callable[..., Spec]:
        for name in names:
            for function in [name] if callable(name) else functions_named(name):
                rule(function)(_spec_of(function, name, made))
        return made

    return register


def _spec_of(function: Any, name: str, made: Callable[..., Spec]) -> Callable[..., Spec]:
    @cache
    def loss() -> Loss:  # on first use: torch creates its operators lazily
        return Loss.of(getattr(torch.ops.aten, name) if type(function) is Aten else function, name)

    def spec(*args: Any, **kwargs: Any) -> Spec:
        return made(loss(), loss().values(args, kwargs))

    return spec


def loss_spec(
    loss: Loss,
    values: Values,
    spec: Spec,
    count: float | Callable[[SplitContext, Values], Any],
    each: Each | None = None,
) -> Spec:
    """Return the spec of a loss.

    Arguments:
        spec: the spec of the losses before reduction.
        count: the divisor of a mean, or a function that computes it.
        each: computes the losses where torch's own function cannot.
    """
    reduction = loss.reduction(values)
    if reduction not in (*_REDUCTIONS, "batchmean"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    (out,) = spec.outputs
    positions = spec.positions or ()

    def lower(context: SplitContext) -> Callable[..., torch.Tensor] | None:
        compute = None if each is None else each(context)
        if not context.splits or (compute is None and reduction in ("none", "sum")):
            return None

        def run(*args: Any, **kwargs: Any) -> torch.Tensor:
            values = loss.values(args, kwargs)
            result = loss.each(values) if compute is None else compute(values)
            if reduction == "none":
                return result
            summed = widen(result).sum()
            if reduction != "sum":
                summed = summed / (count(context, values) if callable(count) else count)
            return summed.to(result.dtype)

        return run

    if reduction == "none":
        return replace(spec, lower=lower, positions=positions)
    summed = {factor: "sum" for factor in out.dims if factor is not None}
    ways = {**spec.reduces, **summed}
    return replace(spec, outputs=[Out((), ())], reduces=ways, lower=lower, positions=positions)


# ---- a loss per element


def weighted_l1_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute F.l1_loss with all its arguments."""
    return F.l1_loss(input, target, size_average, reduce, reduction, weight)  # type: ignore[call-arg]


@losses(
    weighted_l1_loss,
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "poisson_nll_loss"),
    *("hinge_embedding_loss", "margin_ranking_loss"),
)
def pointwise_loss(loss: Loss, values: Values) -> Spec:
    spec = broadcast_spec(tensors_among(*values.values()))
    count: Any = math.prod(spec.outputs[0].shape)
    if loss.reduction(values) == "batchmean":
        count = values["input"].shape[0] if values["input"].dim() else 1
    weight = values.get("weight")
    if weight is not None and loss.function in (F.mse_loss, weighted_l1_loss):
        count = _sum_of_weights(next(dims for each, dims in spec.inputs if each is weight))
    return loss_spec(loss, values, spec, count)


@handler(F.l1_loss)
def l1_loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Read the weight from the frame of F.l1_loss, which does not pass it to `__torch_function__`
    (torch 2.13)."""
    frame = sys._getframe(1)
    for _ in range(4):  # the callers: dispatch, torch.overrides, F.l1_loss
        if frame.f_code is F.l1_loss.__code__:
            kwargs = {**kwargs, "weight": frame.f_locals["weight"]}
            break
        if frame.f_back is None:
            break
        frame = frame.f_back
    return dispatched(weighted_l1_loss, *args, **kwargs)


def _sum_of_weights(dims: Dims) -> Callable[[SplitContext, Values], torch.Tensor]:
    def count(context: SplitContext, values: Values) -> torch.Tensor:
        return all_reduce_both_ways(
            widen(values["weight"]).sum(), context.mesh, context.axes(*dims)
        )

    return count


@losses("gaussian_nll_loss")
def gaussian_nll_loss(loss: Loss, values: Values) -> Spec:
    input, target, var = values["input"], values["target"], values["var"]
    spec = broadcast_spec([input, target])
    (out,) = spec.outputs
    inputs = list(spec.inputs)
    if isinstance(var, torch.Tensor):  # it may lack the last dim or broadcast
        wrong = [have for have, want in zip(var.shape, input.shape, strict=False) if have != want]
        if var.shape != input.shape[:-1] and (var.dim() != input.dim() or wrong not in ([], [1])):
            raise ValueError("var is of incorrect size")
        dims = tuple(
            name if size == whole else None
            for name, size, whole in zip(out.dims, var.shape, out.shape, strict=False)
        )
        inputs.append((var, dims))
    return loss_spec(loss, values, Spec(inputs, [out]), math.prod(out.shape))


# ---- a loss per row


@losses("triplet_margin_loss")
def triplet_margin_loss(loss: Loss, values: Values) -> Spec:
    spec = broadcast_spec(tensors_among(*values.values()))
    (out,) = spec.outputs
    inputs = [(each, (*dims[:-1], None)[-each.dim() :]) for each, dims in spec.inputs]
    rows = Out(out.dims[:-1], out.shape[:-1])
    return loss_spec(loss, values, Spec(inputs, [rows]), math.prod(rows.shape))


@losses("multi_margin_loss", "multilabel_margin_loss")
def margin_loss(loss: Loss, values: Values) -> Spec:
    """Compute one loss per row of an input of shape (N, C) or (C).

    The target has one class (`multi_margin_loss`) or several classes per row.
    """
    rows: Dims = ("n",) * (values["input"].dim() - 1)
    inputs: Inputs = []
    for name in ("input", "target", "weight"):
        tensor = values.get(name)
        if tensor is not None:
            lead = () if name == "weight" else rows[: tensor.dim()]
            inputs.append((tensor, (*lead, *[None] * (tensor.dim() - len(lead)))))
    shape = tuple(values["input"].shape[:-1])
    return loss_spec(loss, values, Spec(inputs, [Out(rows, shape)]), math.prod(shape))


@losses(F.ctc_loss)
def ctc_loss(loss: Loss, values: Values) -> Spec:
    """Each row is a sequence. One-dimensional targets are those of all rows, concatenated: they are
    whole, and so are the lengths that tell where each row begins."""
    log_probs, targets = values["log_probs"], values["targets"]
    if log_probs.dim() not in (2, 3):
        raise RuntimeError(
            f"ctc_loss: expected log_probs of 2 or 3 dims, got shape {tuple(log_probs.shape)}"
        )
    rows: Dims = ("n",) * (log_probs.dim() - 2)
    is_joined = targets.dim() == 1
    shape = tuple(log_probs.shape[1:-1])
    inputs: Inputs = [
        (log_probs, (None, *rows, None)),
        (targets, (None,) if is_joined else (*rows, None)),
    ]
    for name in ("input_lengths", "target_lengths"):
        if isinstance(values[name], torch.Tensor):
            inputs.append((values[name], (None,) if is_joined and rows else rows))

    def each(context: SplitContext) -> Callable[[Values], torch.Tensor] | None:
        first, end = context.inputs[0].range(1) if rows else (0, 1)
        reduction = loss.reduction(values)

        def compute(values: Values) -> torch.Tensor:
            if first == end:  # torch refuses an empty batch
                return torch.sum(values["log_probs"], (0, 2))
            mine = dict(values)
            for name in ("input_lengths", "target_lengths"):
                if is_joined or not isinstance(values[name], torch.Tensor):
                    mine[name] = values[name][first:end]
            if is_joined:
                lengths = torch.as_tensor(values["target_lengths"]).tolist()
                begin = sum(lengths[:first])
                mine["targets"] = values["targets"][begin : begin + sum(lengths[first:end])]
            found = loss.each(mine)
            if reduction == "mean":  # divide each by its length before the mean over rows
                long = torch.as_tensor(mine["target_lengths"], device=found.device)
                found = found / long.clamp_min(1).to(found.dtype)
            return found

        return compute

    spec = Spec(inputs, [Out(rows, shape)], positions=["n"])
    return loss_spec(loss, values, spec, math.prod(shape), each)


@composed(torch.ctc_loss, Aten("ctc_loss"))
def builtin_ctc_loss(
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Any:
    name = _REDUCTIONS[reduction]
    return F.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, name, zero_infinity)


@losses("cosine_embedding_loss")
def cosine_embedding_loss(loss: Loss, values: Values) -> Spec:
    """Rows of two inputs; for a split row only three sums are communicated."""
    first, second, target = (values[name] for name in ("input1", "input2", "target"))
    rows: Dims = ("n",) * target.dim()
    dims = (*rows, "d")
    shape = tuple(target.shape)
    if first.shape != second.shape or first.shape[:-1] != target.shape:
        raise RuntimeError(
            f"inputs are expected to be {len(dims)}D tensors of one size, got "
            f"{list(first.shape)}, {list(second.shape)} and a target of {list(shape)}"
        )

    def each(context: SplitContext) -> Callable[[Values], torch.Tensor] | None:
        axes = context.axes("d")
        return None if not axes else lambda values: _cosine_losses(values, context, axes)

    inputs = [(first, dims), (second, dims), (target, rows)]
    spec = Spec(inputs, [Out(rows, shape)], reduces={"d": "whole"})
    return loss_spec(loss, values, spec, math.prod(shape), each)


def _cosine_losses(values: Values, context: SplitContext, axes: Sequence[int]) -> torch.Tensor:
    first, second = widen(values["input1"]), widen(values["input2"])
    products = (first * second, first.square(), second.square())
    sums = torch.stack([each.sum(-1) for each in products])
    product, one, other = all_reduce_sum(sums, context.mesh, axes).unbind()
    smallest = 1e-12  # the constant of torch
    cosine = product / ((one + smallest) * (other + smallest)).sqrt()
    target = values["target"]
    alike = torch.where(target == 1, 1 - cosine, 0)
    unlike = torch.where(target == -1, (cosine - values["margin"]).clamp_min(0), 0)
    kind = autocast_wide_dtype(values["input1"], values["input2"])
    found = alike + unlike
    return found.to(kind) if keeps_sums(kind) else found  # not to integers: a loss is a float
