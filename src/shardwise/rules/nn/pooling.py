"""Pooling: batch and channels are free; along spatial dims ranks exchange the inputs they need."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.core.box import Range
from shardwise.dtensor.composite import decompose
from shardwise.dtensor.tensor import DTensor, tensors_in
from shardwise.random.seed_check import check_plain_draws
from shardwise.rules.helpers.halo_exchange import Window, WindowExchange, per_dim, plan_exchange
from shardwise.rules.helpers.local_tensors import crop, is_empty, keeps_sums, pad, pad_empty_dims
from shardwise.rules.pointwise.elementwise import tensors_among
from shardwise.rules.registry import Aten, composed, handler, rule
from shardwise.rules.spec import Dims, Out, Spec, SplitContext, dims_of
from shardwise.torch_internals import nn_builtins

_MAX: dict[int, Any] = {1: torch.max_pool1d, 2: torch.max_pool2d, 3: torch.max_pool3d}
_MAX_AND_WHERE: dict[int, Any] = {
    1: torch.max_pool1d_with_indices,
    2: nn_builtins.max_pool2d_with_indices,
    3: nn_builtins.max_pool3d_with_indices,
}

_AVERAGE: dict[int, Any] = {2: nn_builtins.avg_pool2d, 3: nn_builtins.avg_pool3d}

Tensor = torch.Tensor
Operator = Callable[[Tensor], Any]


@dataclass(frozen=True, slots=True)
class Pooling:
    """A pooling with arguments for each spatial dim; these are the last dims of the input."""

    input: tuple[int, ...]
    windows: tuple[Window, ...]
    is_max: bool = False

    @property
    def first(self) -> int:
        """The first spatial dim."""
        return len(self.input) - len(self.windows)

    @property
    def result(self) -> tuple[int, ...]:
        """The shape of the result."""
        return (*self.input[: self.first], *(window.count for window in self.windows))

    @property
    def shared(self) -> tuple[list[int], list[int]]:
        """Kernel and stride as lists, as torch takes them."""
        return [each.kernel for each in self.windows], [each.stride for each in self.windows]

    def spec(self, input: Tensor, lower: Callable[[SplitContext], Operator], **extra: Any) -> Spec:
        """Return the spec of the pooling; every dim may be split.

        Arguments:
            lower: returns the operator that pools the exchanged and padded shard.
        """

        def windowed(context: SplitContext) -> Callable[..., Any] | None:
            split = [at for at in range(self.first, len(self.input)) if context.axes(f"d{at}")]
            if not split and not is_empty(context.inputs[0].local_shape()):
                return None
            return self.on_windows(context, split, lower(context))

        names = dims_of(input)
        extra = {"positions": names[self.first :], **extra}
        return Spec([(input, names)], [Out(names, self.result)], lower=windowed, **extra)

    def on_windows(
        self, context: SplitContext, split: Iterable[int], operator: Operator
    ) -> Operator:
        """Wrap an operator so that the shard is exchanged and padded before it runs."""
        exchanges = [self.exchange(context, dim) for dim in split]
        shape = context.outputs[0].local_shape()
        sides = dict(enumerate(map(Window.padding, self.windows, self.mine(context)), self.first))

        def run(input: Tensor, *_: Any, **__: Any) -> Tensor:
            for get in exchanges:
                input = get(input)
            value = _lowest(input.dtype) if self.is_max else 0
            return crop(operator(pad_empty_dims(pad(input, sides, value))), shape)

        return run

    def mine(self, context: SplitContext) -> list[Range]:
        """Return this rank's range of results along each spatial dim."""
        return [context.outputs[0].range(dim) for dim in range(self.first, len(self.input))]

    def exchange(self, context: SplitContext, dim: int) -> WindowExchange:
        """Plan the exchange along one spatial dim: the inputs that each rank's results read."""
        window = self.windows[dim - self.first]
        return plan_exchange(context, f"d{dim}", dim, (window.size, window.count), window.needs)


def _lowest(dtype: torch.dtype) -> float | int:
    """Return the smallest value of a dtype, the neutral element of a maximum."""
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _pool(
    input: Tensor,
    space: int,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil_mode: bool,
    is_max: bool = False,
) -> Pooling:
    """Return the pooling of a call; raise where torch would."""
    sizes = tuple(input.shape)
    kernels = per_dim(kernel_size, space)
    strides = kernels if stride is None or stride == () or stride == [] else stride
    windows = []
    for size, kernel, step, before, apart in zip(
        sizes[-space:],
        kernels,
        per_dim(strides, space),
        per_dim(padding, space),
        per_dim(dilation, space),
        strict=True,
    ):
        reach = apart * (kernel - 1) + 1
        count = (size + 2 * before - reach + (step - 1 if ceil_mode else 0)) // step + 1
        if ceil_mode and (count - 1) * step >= size + before:
            count -= 1  # the last window would start behind the input
        most = (kernel if space == 1 else reach) // 2  # the limit of torch
        ranks = space + 1, space + 2
        if count < 1 or not 0 <= before <= most or len(sizes) not in ranks or 0 in sizes[~space:]:
            raise RuntimeError(f"pooling: input {sizes}, kernel {kernels}, padding {padding}")
        after = (count - 1) * step + reach - size - before
        windows.append(Window(size, kernel, step, before, after, apart))
    return Pooling(sizes, tuple(windows), is_max)


# ---- max pooling


def _max_rule(space: int, *, with_indices: bool) -> Callable[..., Spec]:
    def max_pool(
        input: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = with_indices,
    ) -> Spec:
        pool = _pool(input, space, kernel_size, stride, padding, dilation, ceil_mode, True)
        if with_indices:  # the indices are those of the whole plane
            options = *pool.shared, padding, dilation, ceil_mode
            run = _MAX_AND_WHERE[space]
            return per_plane_spec(
                [input], [pool.result] * 2, space, lambda input: run(input, *options)
            )
        apart = [each.dilation for each in pool.windows]
        return pool.spec(
            input, lambda context: lambda input: _MAX[space](input, *pool.shared, 0, apart)
        )

    return max_pool


def per_plane_spec(
    tensors: Sequence[Tensor],
    results: Sequence[tuple[int, ...]],
    space: int,
    operator: Callable[..., Any],
    **extra: Any,
) -> Spec:
    """Return the spec of an operator on each plane by itself: dims before the spatial ones are
    free.

    Arguments:
        operator: the operator as a function of tensors only, for a rank without planes.
    """
    count = tensors[0].dim() - space
    dims = (*dims_of(tensors[0])[:count], *(None,) * space)

    def lower(context: SplitContext) -> Callable[..., Any] | None:
        shapes = [layout.local_shape() for layout in context.outputs]
        if not any(map(is_empty, shapes)):
            return None

        def run(*args: Any, **kwargs: Any) -> Any:
            made = operator(*map(pad_empty_dims, tensors_among(*args, *kwargs.values())))
            if isinstance(made, Tensor):
                return crop(made, shapes[0])
            return tuple(map(crop, made, shapes))

        return run

    inputs = [(tensor, dims) for tensor in tensors]
    return Spec(inputs, [Out(dims, shape) for shape in results], lower=lower, **extra)


# ---- average pooling


def _average(
    pool: Pooling, context: SplitContext, includes_padding: bool, divisor: int | None
) -> Operator:
    """Return the operator for the sum over each window, divided by torch's divisor."""
    kernel, stride = pool.shared
    is_line = len(kernel) == 1
    if is_line:  # avg_pool1d has no divisor: pool planes of height 1
        kernel, stride = [1, *kernel], [1, *stride]
    operator = _AVERAGE[len(kernel)]

    def pooled(input: Tensor, divisor: int | None) -> Any:
        input = input.unsqueeze(-2) if is_line else input
        made = operator(input, kernel, stride, 0, False, True, divisor)
        return made.squeeze(-2) if is_line else made

    if divisor is None:
        divisors = _divisors(pool, context, includes_padding)
        if any(each != math.prod(kernel) for each in divisors.flatten().tolist()):
            return lambda input: _divided(pooled(input, 1), divisors)
    return lambda input: pooled(input, divisor)


def _divided(total: Tensor, divisors: Tensor) -> Tensor:
    if total.is_floating_point():
        return total / divisors.to(total)
    return torch.div(total, divisors.to(total), rounding_mode="trunc")


def _divisors(pool: Pooling, context: SplitContext, includes_padding: bool) -> Tensor:
    """Return the number of inputs in the window of each of this rank's results, at least 1."""
    found = torch.ones((), dtype=torch.int64)
    for window, mine in zip(pool.windows, pool.mine(context), strict=True):
        counts = []
        for at in range(*mine):
            start, stop = window.looks_at((at, at + 1))
            stop = min(stop, window.size + (window.before if includes_padding else 0))
            counts.append(stop - (start if includes_padding else max(start, 0)))
        found = found.unsqueeze(-1) * torch.tensor(counts or [1])
    return found


def _average_rule(space: int) -> Callable[..., Spec]:
    def avg_pool(
        input: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Spec:
        pool = _pool(input, space, kernel_size, stride, padding, 1, ceil_mode)
        return pool.spec(
            input,
            lambda context: _average(pool, context, count_include_pad, divisor_override),
            linear=[(0,)] if keeps_sums(input.dtype) else (),
        )

    return avg_pool


# ---- unpooling, and the backward of max pooling


def _unpool_rule(space: int, operator: Callable[..., Any]) -> Callable[..., Spec]:
    def max_unpool(input: Tensor, indices: Tensor, output_size: Sequence[int], *rest: Any) -> Spec:
        shape = (*input.shape[:-space], *output_size)
        return per_plane_spec(
            [input, indices],
            [shape],
            space,
            lambda input, indices: operator(input, indices, output_size, *rest),
            linear=[(0,)],
        )

    return max_unpool


def _max_backward_rule(space: int) -> Callable[..., Spec]:
    def max_pool_backward(
        grad_output: Tensor,
        self: Tensor,
        kernel_size: Any,
        stride: Any,
        padding: Any,
        dilation: Any,
        ceil_mode: bool,
        indices: Tensor,
    ) -> Spec:
        operator = getattr(torch.ops.aten, f"max_pool{space}d_with_indices_backward")
        windows = kernel_size, stride, padding, dilation, ceil_mode
        return per_plane_spec(
            [grad_output, self, indices],
            [tuple(self.shape)],
            space,
            lambda grad, input, indices: operator(grad, input, *windows, indices),
            linear=[(0,)],
        )

    return max_pool_backward


# ---- fractional pooling, with random windows


def _fractional_rule(space: int, operator: Callable[..., Any]) -> Callable[..., Spec]:
    def fractional_max_pool(
        input: Tensor, kernel_size: Any, output_size: Any, random_samples: Tensor
    ) -> Spec:
        shape = (*input.shape[:-space], *per_dim(output_size, space))
        options = kernel_size, output_size
        spec = per_plane_spec(
            [input], [shape] * 2, space, lambda input, samples: operator(input, *options, samples)
        )
        names = dims_of(input)[:-space]
        no_batch = (None,) * (2 - len(names))
        samples = random_samples, (*no_batch, *names, None)
        return replace(spec, inputs=[*spec.inputs, samples])

    return fractional_max_pool


@handler(F.fractional_max_pool2d_with_indices, F.fractional_max_pool3d_with_indices)
def fractional_max_pool_with_indices(func: Any, args: Any, kwargs: Any) -> Any:
    """Run torch's Python code; all ranks draw the same windows, unless these are given."""
    if kwargs.get("_random_samples") is None:
        given = next(each for each in tensors_in((args, kwargs)) if isinstance(each, DTensor))
        check_plain_draws(given._layout.mesh)
    run = decompose(func)
    assert run is not None, "it is written in Python"
    return run(*args, **kwargs)


@composed(F.fractional_max_pool2d)
def fractional_max_pool2d(*args: Any, **kwargs: Any) -> Any:
    """Run it without its second result."""
    return F.fractional_max_pool2d_with_indices(*args, **kwargs)[0]


@composed(F.fractional_max_pool3d)
def fractional_max_pool3d(*args: Any, **kwargs: Any) -> Any:
    return F.fractional_max_pool3d_with_indices(*args, **kwargs)[0]


for _space in (1, 2, 3):
    rule(f"max_pool{_space}d", inplace=False)(_max_rule(_space, with_indices=False))
    rule(f"max_pool{_space}d_with_indices", inplace=False)(_max_rule(_space, with_indices=True))
    rule(f"avg_pool{_space}d", inplace=False, by_dtype=True)(_average_rule(_space))
for _space in (2, 3):
    _unpool = getattr(nn_builtins, f"max_unpool{_space}d")
    rule(f"max_pool{_space}d_with_indices_backward")(_max_backward_rule(_space))
    rule(_unpool, Aten(f"max_unpool{_space}d"))(_unpool_rule(_space, _unpool))
    _fractional = getattr(nn_builtins, f"fractional_max_pool{_space}d")
    rule(_fractional, Aten(f"fractional_max_pool{_space}d"))(_fractional_rule(_space, _fractional))

# ---- pooling to a given size
# If the size of the result divides that of the input, all windows have one length and do not
# overlap, so the dim may be split. Other spatial dims are whole.


def _sizes(input: Tensor, space: int, output_size: Any) -> list[int]:
    """Return the spatial sizes of the result; None keeps the size of the input."""
    wanted = per_dim(output_size, space)
    given = input.shape[-space:]
    return [have if want is None else want for have, want in zip(given, wanted, strict=True)]


def _adaptive(
    input: Tensor,
    space: int,
    sizes: list[int],
    operator: Callable[..., Tensor],
    is_average: bool,
) -> Spec:
    names, shape = dims_of(input), tuple(input.shape)
    first = len(shape) - space
    lengths: dict[int, int] = {}
    """The lengths of the windows along dims that can be split."""
    reduces: dict[str, str] = {}
    for dim, want in enumerate(sizes, first):
        if is_average and want == 1:
            reduces[f"d{dim}"] = "sum"  # weighted averages of the shards are summed
        elif want and shape[dim] and shape[dim] % want == 0:
            lengths[dim] = shape[dim] // want
    free: Dims = tuple(
        name if dim < first or dim in lengths else None for dim, name in enumerate(names)
    )
    given = tuple(
        name if name in reduces else either for name, either in zip(names, free, strict=True)
    )

    def lower(context: SplitContext) -> Callable[..., Tensor] | None:
        mine, result = context.inputs[0].local_shape(), context.outputs[0].local_shape()
        exchanges = [
            plan_exchange(
                context, f"d{dim}", dim, (shape[dim], sizes[dim - first]), _looks_at(length)
            )
            for dim, length in lengths.items()
            if context.axes(f"d{dim}")
        ]
        if not exchanges and not context.axes(*reduces) and not is_empty(mine):
            return None
        share = math.prod(
            mine[dim] / max(shape[dim], 1)
            for dim in range(first, len(shape))
            if names[dim] in reduces
        )
        local_sizes = [max(size, 1) for size in result[first:]]

        def run(input: Tensor, *_: Any, **__: Any) -> Tensor:
            for get in exchanges:
                input = get(input)
            made = operator(pad_empty_dims(input), local_sizes)
            return crop(made if share == 1 else made * share, result)

        return run

    out = Out(free, (*shape[:first], *sizes))
    linear = [(0,)] if is_average and keeps_sums(input.dtype) else []
    return Spec([(input, given)], [out], reduces=reduces, linear=linear, lower=lower)


def _looks_at(length: int) -> Callable[[Range], Range]:
    return lambda results: (results[0] * length, results[1] * length)


def _adaptive_rules(space: int) -> tuple[Callable[..., Spec], ...]:
    """Return the rules of an average, a maximum, and a maximum with its indices."""
    average, largest, largest_at = (
        getattr(F, f"adaptive_{name}")
        for name in (f"avg_pool{space}d", f"max_pool{space}d", f"max_pool{space}d_with_indices")
    )

    def adaptive_avg_pool(input: Tensor, output_size: Any) -> Spec:
        return _adaptive(input, space, _sizes(input, space, output_size), average, True)

    def adaptive_max_pool(input: Tensor, output_size: Any, return_indices: bool = False) -> Spec:
        return _adaptive(input, space, _sizes(input, space, output_size), largest, False)

    def adaptive_max_pool_with_indices(
        input: Tensor, output_size: Any, return_indices: bool = True
    ) -> Spec:
        sizes = _sizes(input, space, output_size)
        shape = (*input.shape[:-space], *sizes)
        return per_plane_spec([input], [shape] * 2, space, lambda each: largest_at(each, sizes))

    return adaptive_avg_pool, adaptive_max_pool, adaptive_max_pool_with_indices


for _space in (1, 2, 3):
    _builtin: Any = torch if _space == 1 else nn_builtins
    _averaged, _maximum, _maximum_at = _adaptive_rules(_space)
    rule(f"adaptive_avg_pool{_space}d", inplace=False, by_dtype=True)(_averaged)
    rule(getattr(F, f"adaptive_max_pool{_space}d"))(_maximum)
    rule(
        getattr(F, f"adaptive_max_pool{_space}d_with_indices"),
        getattr(_builtin, f"adaptive_max_pool{_space}d"),
        Aten(f"adaptive_max_pool{_space}d"),
    )(_maximum_at)
