"""batch_norm and instance_norm: statistics of the global batch, and running statistics.

The functions update two of their arguments, the running statistics, in whatever layout these have.
So each call has two parts: a function with a rule that returns the statistics, and the update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.core.layout import Layout
from shardwise.dtensor.call_args import check_plain_tensors
from shardwise.dtensor.tensor import DTensor, unwrap, wrap
from shardwise.rules.helpers.collectives import all_reduce_sum, sum_grads_over
from shardwise.rules.helpers.dims import present_inputs
from shardwise.rules.helpers.index_key import as_replicated, mesh_of
from shardwise.rules.helpers.local_tensors import crop, pad_empty_dims, widen
from shardwise.rules.nn.normalization import as_channels, channels, moments, scale_and_shift
from shardwise.rules.registry import composed, dispatched, functions_named, handler, rule
from shardwise.rules.spec import Out, Spec, SplitContext
from shardwise.torch_internals import verify_batch_size, verify_spatial_size

Optional = torch.Tensor | None


@composed(F.batch_norm)
def batch_norm(
    input: torch.Tensor,
    running_mean: Optional,
    running_var: Optional,
    weight: Optional = None,
    bias: Optional = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if training:
        verify_batch_size(input.shape)
    if eps < 0 or (training and eps == 0):
        wanted = "positive during training" if training else "non-negative"
        raise ValueError(f"batch_norm eps must be {wanted}, but got {eps}")
    return _run_norm(
        by_batch, input, weight, bias, running_mean, running_var, training, momentum, eps
    )


@handler(*(each for each in functions_named("batch_norm") if each is not F.batch_norm))
def builtin_batch_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _run_norm(by_batch, *args, **kwargs)


@composed(F.instance_norm)
def instance_norm(
    input: torch.Tensor,
    running_mean: Optional = None,
    running_var: Optional = None,
    weight: Optional = None,
    bias: Optional = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if use_input_stats:
        verify_spatial_size(input.shape)
    return _run_norm(
        by_instance, input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps
    )


@handler(*(each for each in functions_named("instance_norm") if each is not F.instance_norm))
def builtin_instance_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    kwargs = {**kwargs}
    if "use_input_stats" in kwargs:
        kwargs["training"] = kwargs.pop("use_input_stats")
    return _run_norm(by_instance, *args, **kwargs)


def _run_norm(
    by: Callable[..., Any],
    input: torch.Tensor,
    weight: Optional,
    bias: Optional,
    running_mean: Optional,
    running_var: Optional,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> Any:
    input = _on_mesh(input, weight, bias, running_mean, running_var)
    if not training:
        return dispatched(by_statistics, input, weight, bias, running_mean, running_var, eps)
    tracks = running_mean is not None or running_var is not None
    if not tracks or not input.numel():
        return dispatched(by, input, weight, bias, eps, False)
    result, mean, variance = dispatched(by, input, weight, bias, eps, True)
    _update((running_mean, mean), (running_var, variance), momentum=momentum)
    return result


# ---- aten operators, which also return what their backward needs


@composed("native_batch_norm", "_native_batch_norm_legit")
def native_batch_norm(
    input: torch.Tensor, weight: Optional, bias: Optional, *rest: Any, **kwargs: Any
) -> Any:
    """Return result, mean and reciprocal deviation; the last two are empty without training."""
    # The overload without running statistics has two arguments less.
    has_statistics = len(rest) + len(kwargs) == 5
    return _native(input, weight, bias, *(() if has_statistics else (None, None)), *rest, **kwargs)


@composed("_native_batch_norm_legit_functional")
def functional_batch_norm(
    input: torch.Tensor,
    weight: Optional,
    bias: Optional,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """Return the updated running statistics too; the given ones are not changed."""
    mean, variance = running_mean.clone(), running_var.clone()
    made = _native(input, weight, bias, mean, variance, training, momentum, eps)
    return (*made, mean, variance)


@composed("_native_batch_norm_legit_no_training")
def native_batch_norm_by_statistics(*args: Any) -> Any:
    """Normalize by the running statistics."""
    return _with_reserve(*args[:5], False, *args[5:])[:3]


@composed("_batch_norm_with_update")
def batch_norm_with_update(*args: Any) -> Any:
    """Return cudnn's reserve too, which is empty on other backends."""
    return _with_reserve(*args[:5], True, *args[5:])


@composed("_batch_norm_no_update")
def batch_norm_no_update(*args: Any) -> Any:
    return _with_reserve(*args[:5], False, *args[5:])


def _with_reserve(*args: Any) -> tuple[Any, ...]:
    made = _native(*args)
    return (*made, _nothing(made[0], torch.uint8))


def _native(
    input: torch.Tensor,
    weight: Optional,
    bias: Optional,
    running_mean: Optional,
    running_var: Optional,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Any, Any, Any]:
    input = _on_mesh(input, weight, bias, running_mean, running_var)
    if not training:
        made = dispatched(by_statistics, input, weight, bias, running_mean, running_var, eps)
        return made, _nothing(made), _nothing(made)
    result, mean, variance, scale = dispatched(by_batch_saving, input, weight, bias, eps)
    _update((running_mean, mean), (running_var, variance), momentum=momentum)
    kind = (
        input if weight is None else weight
    ).dtype  # for half types the statistics are computed in float32
    return result, mean.to(kind), scale.to(kind)


def _on_mesh(input: torch.Tensor, *others: Optional) -> torch.Tensor:
    """Return the input, as a replicated DTensor if only running statistics are DTensors: the update
    of these is no part of the function that has a rule."""
    if isinstance(input, DTensor):
        return input
    mesh = mesh_of(*others)
    check_plain_tensors("batch_norm", [input], mesh)
    return as_replicated(input.view_as(input), mesh)


def _nothing(like: DTensor, dtype: torch.dtype | None = None) -> DTensor:
    local = unwrap(like).new_empty(0, dtype=dtype)
    return wrap(local, Layout(like._layout.mesh, (0,)))


@torch.no_grad()
def _update(*statistics: tuple[Optional, DTensor], momentum: float) -> None:
    """Update the running statistics that are given with those of this batch."""
    for running, value in statistics:
        if running is not None:
            new = value if isinstance(running, DTensor) else value.full_tensor()
            running.mul_(1 - momentum).add_(new.to(running.dtype), alpha=momentum)


# ---- with given statistics


def by_statistics(
    input: torch.Tensor,
    weight: Optional,
    bias: Optional,
    mean: Optional,
    variance: Optional,
    eps: float,
) -> torch.Tensor:
    """Normalize by a mean and a variance per channel."""
    shape = input.shape
    if _needs_padding(input):
        input, weight, bias, mean, variance = map(_padded, (input, weight, bias, mean, variance))
    return crop(
        torch.batch_norm(
            input, weight, bias, mean, variance, False, 0.0, eps, torch.backends.cudnn.enabled
        ),
        shape,
    )


def _needs_padding(input: torch.Tensor) -> bool:
    """Return whether to run on a padded input: torch's kernels refuse empty ones, and a rank must
    differentiate the same function as the others."""
    return not input.numel() and input.dim() > 1  # torch accepts an empty vector


def _padded(tensor: Any) -> Any:
    return None if tensor is None else pad_empty_dims(tensor)


@rule(by_statistics)
def statistics_rule(
    input: torch.Tensor,
    weight: Optional,
    bias: Optional,
    mean: Optional,
    variance: Optional,
    eps: float,
) -> Spec:
    names = channels(input)
    inputs = present_inputs(
        (input, names), *((each, ("c",)) for each in (weight, bias, mean, variance))
    )
    return Spec(inputs, [Out(names, tuple(input.shape))])


# ---- with statistics of the batch, or of each instance in it


def by_batch(
    input: torch.Tensor, weight: Optional, bias: Optional, eps: float, tracks: bool
) -> Any:
    """Normalize by the mean and variance of each channel.

    Returns:
        The result; if `tracks` also the mean and the unbiased variance.
    """
    return _by_torch(torch.batch_norm, input, weight, bias, eps, tracks)


def by_batch_saving(
    input: torch.Tensor, weight: Optional, bias: Optional, eps: float
) -> tuple[torch.Tensor, ...]:
    """Normalize by the mean and variance of each channel.

    Returns:
        The result, the mean, the unbiased variance, and the reciprocal deviation.
    """
    mean, variance = (input.new_zeros(input.shape[1]) for _ in range(2))
    if _needs_padding(input):
        padded, weight, bias = map(_padded, (input, weight, bias))
        result, *_ = torch.native_batch_norm(padded, weight, bias, None, None, True, 1.0, eps)
        return crop(result, input.shape), mean, variance, torch.zeros_like(mean)
    result, mean, scale = torch.native_batch_norm(
        input, weight, bias, mean, variance, True, 1.0, eps
    )
    return result, mean, variance, scale


def by_instance(
    input: torch.Tensor, weight: Optional, bias: Optional, eps: float, tracks: bool
) -> Any:
    """Normalize by the mean and variance of each channel of each instance.

    Returns:
        The result; if `tracks` also mean and unbiased variance, averaged over the instances.
    """
    return _by_torch(torch.instance_norm, input, weight, bias, eps, tracks)


def _by_torch(
    function: Any,
    input: torch.Tensor,
    weight: Optional,
    bias: Optional,
    eps: float,
    tracks: bool,
) -> Any:
    mean = variance = None
    if tracks:  # with a momentum of 1 the running statistics are those of this batch
        dtype = widen(input).dtype if weight is None else weight.dtype
        mean, variance = (input.new_zeros(input.shape[1], dtype=dtype) for _ in range(2))
    enabled = torch.backends.cudnn.enabled
    if _needs_padding(input):
        given = map(_padded, (input, weight, bias))
        result = crop(function(*given, None, None, True, 1.0, eps, enabled), input.shape)
    else:
        result = function(input, weight, bias, mean, variance, True, 1.0, eps, enabled)
    return (result, mean, variance) if tracks else result


def _spec(
    input: torch.Tensor,
    weight: Optional,
    bias: Optional,
    tracks: bool,
    lower: Callable[[SplitContext], Callable[..., Any] | None],
    statistics: int = 2,
) -> Spec:
    names, shape = channels(input), tuple(input.shape)
    outputs = [Out(names, shape)]
    if tracks:
        outputs += [Out(("c",), shape[1:2])] * statistics
    inputs = present_inputs((input, names), (weight, ("c",)), (bias, ("c",)))
    return Spec(inputs, outputs, lower=lower, positions=())


@rule(by_batch)
def batch_rule(
    input: torch.Tensor, weight: Optional, bias: Optional, eps: float, tracks: bool
) -> Spec:
    def lower(context: SplitContext) -> Callable[..., Any] | None:
        saving = _split_batch_norm(context, tuple(input.shape))
        if saving is None:
            return None

        def run(
            input: torch.Tensor, weight: Optional, bias: Optional, eps: float, tracks: bool
        ) -> Any:
            result, mean, variance, _ = saving(input, weight, bias, eps)
            return (result, mean, variance) if tracks else result

        return run

    return _spec(input, weight, bias, tracks, lower)


@rule(by_batch_saving)
def saving_rule(input: torch.Tensor, weight: Optional, bias: Optional, eps: float) -> Spec:
    def lower(context: SplitContext) -> Callable[..., Any] | None:
        return _split_batch_norm(context, tuple(input.shape))

    return _spec(input, weight, bias, True, lower, statistics=3)


def _split_batch_norm(
    context: SplitContext, shape: tuple[int, ...]
) -> Callable[..., tuple[torch.Tensor, ...]] | None:
    """Return the lowering of `by_batch_saving`; None if no averaged dim is split."""
    averaged = [0, *range(2, len(shape))]
    count = math.prod(shape[dim] for dim in averaged)
    axes = context.axes("n", *(f"s{at}" for at in range(len(shape) - 2)))
    if not axes:
        return None

    def run(
        input: torch.Tensor, weight: Optional, bias: Optional, eps: float
    ) -> tuple[torch.Tensor, ...]:
        normal, mean, variance = _normalize(input, averaged, count, context, axes, eps)
        scale = (variance.detach() + eps).rsqrt()
        statistics = (mean.detach(), _unbiased(variance, count), scale)
        result = _scale_and_shift(normal, weight, bias, input)
        return result, *(each.flatten() for each in statistics)

    return run


@rule(by_instance)
def instance_rule(
    input: torch.Tensor, weight: Optional, bias: Optional, eps: float, tracks: bool
) -> Spec:
    names, shape = channels(input), tuple(input.shape)
    averaged = list(range(2, len(shape)))
    count = math.prod(shape[2:])

    def lower(context: SplitContext) -> Callable[..., Any] | None:
        axes, batch = context.axes(*names[2:]), context.axes("n")
        if not axes and not (tracks and batch):
            return None

        def over_batch(statistic: torch.Tensor) -> torch.Tensor:
            sums = statistic.detach().sum(0).flatten()
            return all_reduce_sum(sums, context.mesh, batch) / shape[0]

        def run(
            input: torch.Tensor, weight: Optional, bias: Optional, eps: float, tracks: bool
        ) -> Any:
            result, mean, variance = _normalize(input, averaged, count, context, axes, eps)
            result = _scale_and_shift(result, weight, bias, input)
            if not tracks:
                return result
            return result, over_batch(mean), over_batch(_unbiased(variance, count))

        return run

    return _spec(input, weight, bias, tracks, lower)


def _normalize(
    input: torch.Tensor,
    dims: list[int],
    count: int,
    context: SplitContext,
    axes: Sequence[int],
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mean, variance, centered = moments(widen(input), dims, count, context.mesh, axes)
    return centered * sum_grads_over((variance + eps).rsqrt(), context.mesh, axes), mean, variance


def _scale_and_shift(
    result: torch.Tensor, weight: Optional, bias: Optional, input: torch.Tensor
) -> torch.Tensor:
    """Multiply the normalized values by the weight and add the bias."""
    weight, bias = (as_channels(each, input.dim()) for each in (weight, bias))
    return scale_and_shift(result, weight, bias).to(input.dtype)


def _unbiased(variance: torch.Tensor, count: int) -> torch.Tensor:
    return variance.detach() * (count / (count - 1) if count > 1 else math.nan)
