"""cross_entropy and nll_loss: over split batches, and over split classes without gathering them.

With split classes, the forward communicates a maximum and a few sums per row. The backward
communicates nothing: the sums are replicated, so each rank has their whole gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.dtensor.composite import decompose
from shardwise.dtensor.tensor import DTensor
from shardwise.rules.helpers.collectives import all_reduce_sum
from shardwise.rules.helpers.dims import Inputs, present_inputs
from shardwise.rules.helpers.local_tensors import autocast_wide_dtype, widen
from shardwise.rules.nn.losses import Loss, Values, loss_spec, losses
from shardwise.rules.reduce.softmax import subtract_max
from shardwise.rules.registry import dispatched, handler
from shardwise.rules.spec import Dims, Out, Spec, SplitContext


@dataclass(frozen=True)
class Problem:
    """The global facts of one call."""

    classes: int
    dim: int
    """The dim of the input that holds the classes."""
    ignore_index: int
    label_smoothing: float


@losses("cross_entropy", "cross_entropy_loss")
def cross_entropy(loss: Loss, values: Values) -> Spec:
    input, target = values["input"], values["target"]
    if input.shape == target.shape:
        return _of_probabilities(loss, values)
    return _of_indices(loss, values, _cross_entropies)


@losses("nll_loss", "nll_loss_nd", "nll_loss2d")
def nll_loss(loss: Loss, values: Values) -> Spec:
    return _of_indices(loss, values, _negative_log_likelihoods, linear=[(0,)])


def _factors(input: torch.Tensor) -> tuple[Dims, Dims]:
    """Return the factors of the input, (C), (N, C) or (N, C, d1, ...), and of its losses."""
    space = tuple(f"s{at}" for at in range(input.dim() - 2))
    rows = ("n", *space) if input.dim() > 1 else ()
    return (("n", "c", *space) if input.dim() > 1 else ("c",)), rows


def _problem(values: Values) -> Problem:
    input = values["input"]
    dim = min(input.dim() - 1, 1)
    smoothing = values.get("label_smoothing", 0.0)
    if not 0 <= smoothing <= 1:
        raise RuntimeError(f"label_smoothing must be between 0.0 and 1.0. Got: {smoothing}")
    return Problem(input.shape[dim], dim, values.get("ignore_index", -100), smoothing)


# ---- targets that are classes

Indexed = Callable[[Values, Problem, SplitContext, Sequence[int]], torch.Tensor]


def _of_indices(loss: Loss, values: Values, compute: Indexed, linear: Any = ()) -> Spec:
    input, target, weight = values["input"], values["target"], values["weight"]
    dims, rows = _factors(input)
    shape = tuple(size for at, size in enumerate(input.shape) if dims[at] != "c")
    if input.dim() == 0 or tuple(target.shape) != shape:
        raise RuntimeError(
            f"Expected a target of shape {list(shape)} for an input of shape {list(input.shape)}, "
            f"got {list(target.shape)}"
        )
    problem = _problem(values)
    inputs = present_inputs((input, dims), (target, rows), (weight, ("c",)))

    def each(context: SplitContext) -> Callable[[Values], torch.Tensor] | None:
        axes = context.axes("c")
        return (lambda values: compute(values, problem, context, axes)) if axes else None

    def count(context: SplitContext, values: Values) -> torch.Tensor:
        """Sum the weights of all ranks' targets that are not ignored: the divisor of the mean."""
        target, weight = values["target"], values["weight"]
        if weight is None:
            found = (target != problem.ignore_index).sum()
        else:
            where = _Where(values, problem, context)
            found = all_reduce_sum(
                where.taken(widen(weight)).sum(), context.mesh, context.axes("c")
            )
        return all_reduce_sum(found, context.mesh, context.axes(*rows))

    whole = {"c": "whole"}
    spec = Spec(inputs, [Out(rows, shape)], reduces=whole, linear=linear, positions=("c",))
    return loss_spec(loss, values, spec, count, each)


class _Where:
    """The places of the target classes in this rank's shard."""

    def __init__(self, values: Values, problem: Problem, context: SplitContext) -> None:
        target = values["target"].long()
        self.dim = problem.dim
        layout = context.inputs[0]
        first, end = layout.range(self.dim)
        size = end - first
        is_valid = target != problem.ignore_index
        is_class = (target >= 0) & (target < problem.classes)
        if target.device.type == "cpu" and not bool((is_class | ~is_valid).all()):
            wrong = target[is_valid & ~is_class].flatten()[0]
            raise IndexError(f"Target {int(wrong)} is out of bounds.")
        local = target - first
        self.is_valid: torch.Tensor = is_valid
        self.is_here: torch.Tensor = is_valid & (local >= 0) & (local < size)
        self.local: torch.Tensor = local.clamp(0, max(size - 1, 0))

    def taken(self, source: torch.Tensor) -> torch.Tensor:
        """Take the element of each target's class; 0 if another rank has the class.

        `source` has one row per target, or one row for all.
        """
        if source.dim() == 1 and self.local.dim() > 0:
            if not source.numel():
                return source.sum().expand(self.local.shape)
            found = source[self.local]
        elif not source.shape[self.dim]:
            return source.sum(self.dim)  # zeros with a gradient function
        else:
            found = source.gather(self.dim, self.local.unsqueeze(self.dim)).squeeze(self.dim)
        return torch.where(self.is_here, found, 0)


def _cross_entropies(
    values: Values, problem: Problem, context: SplitContext, axes: Sequence[int]
) -> torch.Tensor:
    """Return w_t (log sum exp x - x_t) for x minus its maximum, smoothed by the mean over
    classes."""
    input, weight = values["input"], values["weight"]
    dim, smoothing = problem.dim, problem.label_smoothing
    wide = widen(input)
    above, _ = subtract_max(wide, dim, context.mesh, axes)
    where = _Where(values, problem, context)
    weights = None if weight is None else widen(weight)
    chosen = where.taken(above)
    parts = [above.exp().sum(dim)]
    if weights is None:
        parts += [chosen]
    else:
        mine = where.taken(weights)
        parts += [mine * chosen, mine]
    if smoothing:
        scaled = above if weights is None else above * _along(weights, above, dim)
        parts.append(scaled.sum(dim))
        if weights is not None:
            parts.append(weights.sum().expand_as(chosen))
    sums = list(all_reduce_sum(torch.stack(parts), context.mesh, axes).unbind())
    logarithm = sums.pop(0).log()
    target_term = sums.pop(0)
    target_weight = where.is_valid.to(wide.dtype) if weights is None else sums.pop(0)
    result = target_weight * logarithm - target_term
    if smoothing:
        class_term = sums.pop(0)
        class_weight = problem.classes if weights is None else sums.pop(0)
        smooth = class_weight * logarithm - class_term
        result = (1 - smoothing) * result + smoothing / problem.classes * smooth
    result = torch.where(where.is_valid, result, 0)
    return result.to(autocast_wide_dtype(input))


def _negative_log_likelihoods(
    values: Values, problem: Problem, context: SplitContext, axes: Sequence[int]
) -> torch.Tensor:
    input, weight = values["input"], values["weight"]
    where = _Where(values, problem, context)
    mine = where.taken(widen(input))
    if weight is not None:
        mine = mine * where.taken(widen(weight))
    return -all_reduce_sum(mine, context.mesh, axes).to(autocast_wide_dtype(input))


def _along(weights: torch.Tensor, input: torch.Tensor, dim: int) -> torch.Tensor:
    """Reshape one weight per class so that it broadcasts against the input."""
    return weights.reshape(-1, *[1] * (input.dim() - dim - 1))


# ---- targets that are probabilities


def _of_probabilities(loss: Loss, values: Values) -> Spec:
    input, target, weight = values["input"], values["target"], values["weight"]
    dims, rows = _factors(input)
    shape = tuple(size for at, size in enumerate(input.shape) if dims[at] != "c")
    problem = _problem(values)
    if problem.ignore_index >= 0:
        raise RuntimeError("ignore_index is not supported for floating point target")
    inputs = present_inputs((input, dims), (target, dims), (weight, ("c",)))

    def each(context: SplitContext) -> Callable[[Values], torch.Tensor] | None:
        axes = context.axes("c")
        return (
            (lambda values: _soft_cross_entropies(values, problem, context, axes)) if axes else None
        )

    spec = Spec(inputs, [Out(rows, shape)], reduces={"c": "whole"})
    return loss_spec(loss, values, spec, math.prod(shape), each)


def _soft_cross_entropies(
    values: Values, problem: Problem, context: SplitContext, axes: Sequence[int]
) -> torch.Tensor:
    """Return the sum over classes of w t (log sum exp x - x), for x minus its maximum."""
    input, target, weight = values["input"], values["target"], values["weight"]
    dim, smoothing = problem.dim, problem.label_smoothing
    above, _ = subtract_max(widen(input), dim, context.mesh, axes)
    share = widen(target)
    if smoothing:
        share = share * (1 - smoothing) + smoothing / problem.classes
    if weight is not None:
        share = share * _along(widen(weight), above, dim)
    parts = [above.exp().sum(dim), share.sum(dim), (share * above).sum(dim)]
    exps, shares, terms = all_reduce_sum(torch.stack(parts), context.mesh, axes).unbind()
    tensors = [input, target] if weight is None else [input, target, weight]
    return (shares * exps.log() - terms).to(autocast_wide_dtype(*tensors))


# ---- of a product that is never formed as a whole


@handler(F.linear_cross_entropy)
def linear_cross_entropy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute by chunks of rows if the options ask for it and the matrix is whole.

    A split matrix needs no chunks: each rank has only its share of the product.
    """
    values = {**dict(zip(("input", "linear_weight", "target"), args, strict=False)), **kwargs}
    matrix = [values["linear_weight"], values.get("linear_bias")]
    is_split = any(isinstance(each, DTensor) and not each._layout.is_replicated for each in matrix)
    if values.get("options") is None or is_split:
        by_parts = decompose(func)
        assert by_parts is not None, "torch wrote it in Python"
        return by_parts(**{**values, "options": None})
    return dispatched(chunked_cross_entropy, **values)


def chunked_cross_entropy(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    linear_bias: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
) -> torch.Tensor:
    """Compute F.linear_cross_entropy, with all parameters by position or keyword."""
    return F.linear_cross_entropy(
        input,
        linear_weight,
        target,
        linear_bias=linear_bias,
        weight=weight,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        options=options,
    )


@losses(chunked_cross_entropy)
def chunked_rule(loss: Loss, values: Values) -> Spec:
    """Compute the chunked loss: rows may be split; all other dims are whole."""
    input, matrix, target = values["input"], values["linear_weight"], values["target"]
    rows: Dims = ("n",) * (input.dim() - 1)
    shape = (*input.shape[:-1], *matrix.shape[1:-1])
    is_index = target.shape != (*input.shape[:-1], *matrix.shape[:-1])

    def count(context: SplitContext, values: Values) -> torch.Tensor:
        """Sum the weights of all ranks' targets that are not ignored: the divisor of the mean."""
        target, weight, ignored = values["target"], values["weight"], values["ignore_index"]
        is_valid = target != (-100 if ignored is None else ignored)
        if weight is not None:
            is_valid = torch.where(is_valid, widen(weight)[torch.where(is_valid, target, 0)], 0)
        return all_reduce_sum(is_valid.sum(), context.mesh, context.axes("n"))

    inputs: Inputs = [
        (input, (*rows, None)),
        (target, (*rows, *[None] * (target.dim() - len(rows)))),
    ]
    whole = (matrix, values["linear_bias"], values["weight"])
    inputs += [(each, (None,) * each.dim()) for each in whole if each is not None]
    spec = Spec(inputs, [Out((*rows, *[None] * (len(shape) - len(rows))), shape)])
    return loss_spec(loss, values, spec, count if is_index else math.prod(shape))
