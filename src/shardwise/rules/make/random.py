"""Random operators. Each call draws one key and makes its noise in the layout of the operand.

Operators that use the noise (a product, a comparison) are dispatched as usual, so they decide
whether pending sums flow. The noise itself is replicated where its model has a pending sum.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import init

from shardwise.core import world
from shardwise.core.cut import Cut
from shardwise.core.layout import Layout
from shardwise.dtensor.tensor import DTensor, unwrap, wrap
from shardwise.dtensor.writes import check_writable
from shardwise.random import samplers
from shardwise.random.samplers import Sampler, draw_shard
from shardwise.redistribute.autograd import redistribute_local
from shardwise.rules.helpers.dims import unsplit_spec
from shardwise.rules.helpers.local_tensors import keeps_sums
from shardwise.rules.make.creation import check_layout
from shardwise.rules.pointwise.elementwise import tensors_among
from shardwise.rules.registry import Aten, Function, composed, handler, name_of, rule
from shardwise.rules.spec import Spec, SplitContext
from shardwise.torch_internals import as_local, fan_of, fill_constant, fill_normal, fill_uniform


def noise(
    sampler: Sampler,
    layout: Layout,
    *numbers: Any,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator | None = None,
) -> DTensor:
    """Return random numbers in a layout, replicated where it has a pending reduction.

    Arguments:
        sampler: a sampler of `random.samplers`; `numbers` are its parameters.
    """
    whole = layout.relaid(partial={}) if layout.partial else layout
    local = draw_shard(sampler, whole, *numbers, dtype=dtype, device=device, generator=generator)
    return wrap(local, whole)


def noise_like(sampler: Sampler, model: DTensor, *numbers: Any, **options: Any) -> DTensor:
    """Return random numbers in the shape, dtype and layout of another tensor."""
    options = {"dtype": model.dtype, "device": model.device, **options}
    return noise(sampler, model._layout, *numbers, **options)


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


# ---- in-place filling with random numbers


def _bounds(dtype: torch.dtype, low: int | None, high: int | None) -> tuple[int, int]:
    """Return the default bounds of `random_`: up to the largest integer that a dtype holds
    exactly."""
    if high is None:
        if dtype.is_floating_point:
            high = round(2 / torch.finfo(dtype).eps) + 1
        else:
            high = 2 if dtype == torch.bool else torch.iinfo(dtype).max + 1
    return low or 0, high


class Fill(NamedTuple):
    """An in-place operator: its sampler, its parameters with defaults, and the check of these."""

    sampler: Sampler
    parameters: dict[str, Any]
    allows: Callable[..., bool]
    complaint: str
    takes_integers: bool = False


_FILLS = {
    "uniform_": Fill(
        samplers.uniform,
        {"from": 0.0, "to": 1.0},
        lambda low, high: low <= high,
        "uniform_ expects to return a [from, to) range, but found from={} > to={}",
    ),
    "normal_": Fill(
        samplers.normal,
        {"mean": 0.0, "std": 1.0},
        lambda mean, std: std >= 0,
        "normal expects std >= 0.0, but found mean={}, std={}",
    ),
    "log_normal_": Fill(
        samplers.log_normal,
        {"mean": 1.0, "std": 2.0},
        lambda mean, std: std > 0,
        "log_normal_ expects std > 0.0, but found mean={}, std={}",
    ),
    "exponential_": Fill(
        samplers.exponential,
        {"lambd": 1.0},
        lambda rate: rate > 0,
        "exponential_ expects lambda > 0.0, but found lambda={}",
    ),
    "geometric_": Fill(
        samplers.geometric,
        {"p": math.nan},
        lambda p: 0 < p < 1,
        "geometric_ expects p to be in (0, 1), but got p={}",
        takes_integers=True,
    ),
    "cauchy_": Fill(
        samplers.cauchy,
        {"median": 0.0, "sigma": 1.0},
        lambda median, sigma: sigma > 0,
        "cauchy_ expects sigma > 0.0, but found median={}, sigma={}",
    ),
    "random_": Fill(
        samplers.integers,
        {"from": None, "to": None},
        lambda low, high: high is None or (low or 0) < high,
        "random_ expects 'from' to be less than 'to', but got from={} >= to={}",
        takes_integers=True,
    ),
}


def fill(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Fill the target in its layout; pending contributions reduce to the random numbers."""
    what = _FILLS[name]
    given = dict(kwargs)
    target, *rest = args or (given.pop("self"),)
    generator = given.pop("generator", None)
    if name == "random_" and len(rest) == 1:
        rest = [None, *rest]
    for parameter, value in zip(what.parameters, rest, strict=False):
        given[parameter] = value
    if unknown := given.keys() - what.parameters.keys():
        raise TypeError(f"{name}() got an unexpected keyword argument {unknown.pop()!r}")
    numbers = [_number(given.get(each, default)) for each, default in what.parameters.items()]
    if not what.allows(*numbers):
        raise RuntimeError(what.complaint.format(*numbers))
    if name == "random_":
        numbers = list(_bounds(target.dtype, *numbers))
    if not what.takes_integers:
        _check_floating(name, target.dtype)
    return overwrite(name, target, what.sampler, *numbers, generator=generator)


def _check_floating(name: str, dtype: torch.dtype) -> None:
    if not keeps_sums(dtype):
        raise NotImplementedError(f'"{name}" not implemented for {dtype}')


def overwrite(
    name: str, target: DTensor, sampler: Sampler, *numbers: Any, generator: Any = None
) -> DTensor:
    """Write random numbers to a DTensor."""
    check_writable(name, target)
    made = noise_like(sampler, target, *numbers, generator=generator)
    local = redistribute_local(unwrap(made), made._layout, target._layout)
    with as_local():
        torch.Tensor.copy_(target, local)
    return target


def filled(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Return a new filled tensor, as aten's functional forms do."""
    return fill(name, func, (torch.empty_like(args[0]), *args[1:]), kwargs)


for _name in _FILLS:
    handler(_name)(partial(fill, _name))
    handler(Aten("normal_functional" if _name == "normal_" else _name[:-1]))(partial(filled, _name))


# ---- like another tensor


def like(sampler: Sampler, func: Any, args: Any, kwargs: Any) -> Any:
    """Return random numbers in the model's layout, replicated where it is pending a sum."""
    options = dict(kwargs)
    check_layout(name_of(func), options.get("layout"))
    model, *numbers = args or (options.pop("input"),)
    numbers = [_number(each) for each in numbers]
    if sampler is samplers.integers:
        numbers += [_number(options.pop(each)) for each in ("low", "high") if each in options]
        numbers = [0] * (2 - len(numbers)) + numbers
        if numbers[0] >= numbers[1]:
            raise RuntimeError(_FILLS["random_"].complaint.format(*numbers))
    generator = options.pop("generator", None)
    requires_grad = options.pop("requires_grad", False)
    local = torch.empty_like(unwrap(model), **options)  # for its strides
    if sampler is not samplers.integers:
        _check_floating(name_of(func), local.dtype)
    made = noise_like(
        sampler, model, *numbers, dtype=local.dtype, device=local.device, generator=generator
    )
    if not local.is_contiguous():
        made = wrap(local.copy_(unwrap(made)), made._layout)
    made.requires_grad = requires_grad
    return made


for _name, _sampler in (
    ("rand_like", samplers.uniform),
    ("randn_like", samplers.normal),
    ("randint_like", samplers.integers),
):
    handler(_name)(partial(like, _sampler))


# ---- operators whose parameters are tensors


@composed("bernoulli")
def bernoulli(input: Any, p: Any = None, *, generator: Any = None) -> Any:
    """Draw 0 or 1; the input gives the probabilities, or only the shape if `p` is given."""
    if p is None or isinstance(p, torch.Tensor):
        return smooth(compared(input, input if p is None else p, generator), input)
    _check_probability(p)
    return smooth(noise_like(samplers.bernoulli, input, float(p), generator=generator), input)


@composed("bernoulli_")
def bernoulli_(input: Any, p: Any = 0.5, *, generator: Any = None) -> Any:
    """Draw 0 or 1 into the target, which keeps its layout."""
    if isinstance(p, torch.Tensor):
        return input.copy_(compared(input, p, generator))
    _check_probability(p)
    return overwrite("bernoulli_", input, samplers.bernoulli, float(p), generator=generator)


@composed("normal")
def normal(mean: Any, std: Any = 1.0, *, generator: Any = None) -> Any:
    """Draw normal numbers; mean and standard deviation broadcast against each other."""
    given = tensors_among(mean, std)
    if not isinstance(std, torch.Tensor) and std < 0:
        raise RuntimeError(f"normal expects std >= 0.0, but found std {std}")
    layout = joint_layout([each.shape for each in given], given)
    dtype, device = given[0].dtype, given[0].device
    made = noise(samplers.normal, layout, dtype=dtype, device=device, generator=generator)
    with torch.no_grad():
        sample = made * std + mean
    return smooth(sample, *given)


def compared(model: DTensor, p: torch.Tensor, generator: Any) -> Any:
    """Draw 1 with probability `p` (broadcast), else 0, in the layout of the model."""
    layout = joint_layout([model.shape, p.shape], [model, p])
    if layout.size != model.shape:
        raise RuntimeError(
            f"bernoulli expects p to be broadcastable to {list(model.shape)}, but it has shape "
            f"{list(p.shape)}"
        )
    # Double precision is better, but a recorded program must draw what torch draws.
    is_single = world.current().draws_whole and p.dtype != torch.float64
    dtype = torch.float32 if is_single else torch.float64
    made = noise(samplers.uniform, layout, dtype=dtype, device=model.device, generator=generator)
    with torch.no_grad():
        return (made < p).to(model.dtype)


def joint_layout(shapes: Sequence[Any], tensors: Sequence[torch.Tensor]) -> Layout:
    """Return the layout of a broadcast result: each dim is split as in the first operand that
    does."""
    shape = tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    order: dict[int, tuple[int, ...]] = {}
    cuts: dict[int, Cut | None] = {}
    layouts = [each._layout for each in tensors if isinstance(each, DTensor)]
    for layout in layouts:
        skipped = len(shape) - layout.ndim
        for dim, axes in enumerate(layout.shard_order):
            used = {axis for each in order.values() for axis in each}
            fits = layout.shape[dim] == shape[skipped + dim] and skipped + dim not in order
            if axes and fits and not used.intersection(axes):
                order[skipped + dim] = axes
                cuts[skipped + dim] = layout.cuts[dim]
    return Layout(layouts[0].mesh, shape, order, {}, cuts)


class _Sampled(torch.autograd.Function):
    """Forward: return the sample. Backward: zeros for the parameters."""

    @staticmethod
    def forward(ctx: Any, sample: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.like = [torch.empty_like(each, device="meta") for each in parameters]
        ctx.device = sample.device
        return sample.view_as(sample)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return None, *(torch.zeros_like(each, device=ctx.device) for each in ctx.like)


def smooth(sample: Any, *parameters: Any) -> Any:
    """Return a sample that gives its parameters zero gradients, as torch does."""
    given = [unwrap(each) if isinstance(each, DTensor) else each
             for each in parameters if each.requires_grad]  # fmt: skip
    if given and torch.is_grad_enabled():
        local = _Sampled.apply(unwrap(sample), *given)  # type: ignore[no-untyped-call]
        return wrap(local, sample._layout)
    return sample


def _check_probability(p: float) -> None:
    if not 0 <= p <= 1:
        raise RuntimeError(f"bernoulli_ expects p to be in [0, 1], but got p={p}")


# ---- replicated: torch's own algorithms, whose number of draws depends on the data.
# They draw from a generator that is seeded by the key, so that the default generator advances
# equally on all ranks. A recorded program draws from the default one: all its ranks have the same
# data.


def _seeded(
    func: Callable[..., torch.Tensor], context: SplitContext
) -> Callable[..., torch.Tensor]:
    def run(*args: Any, generator: torch.Generator | None = None, **kwargs: Any) -> torch.Tensor:
        if world.current().draws_whole:
            return func(*args, **kwargs)
        own = torch.Generator(args[0].device)
        own.manual_seed(samplers.draw_key(context.mesh, generator))
        return func(*args, generator=own, **kwargs)

    return run


def _sampled(func: Any, input: torch.Tensor, generator: Any = None) -> Spec:
    return unsplit_spec([input], input.shape, lower=partial(_seeded, func))


for _func in (torch.poisson, torch._standard_gamma, torch._sample_dirichlet):
    rule(_func.__name__, inplace=False)(partial(_sampled, _func))


@rule("binomial", inplace=False)
def binomial(count: torch.Tensor, prob: torch.Tensor, generator: Any = None) -> Spec:
    shape = torch.broadcast_shapes(count.shape, prob.shape)  # type: ignore[no-untyped-call]
    return unsplit_spec([count, prob], shape, lower=partial(_seeded, torch.binomial))


CHOOSE = Function(
    "multinomial",
    lambda input, count, replacement, generator=None: torch.multinomial(
        input, count, replacement, generator=generator
    ),
)


@rule(CHOOSE)
def choose(input: torch.Tensor, count: int, replacement: bool, generator: Any = None) -> Spec:
    return unsplit_spec([input], (*input.shape[:-1], count), lower=partial(_seeded, CHOOSE))


@composed("multinomial")
def multinomial(
    input: Any, num_samples: int, replacement: bool = False, *, generator: Any = None
) -> Any:
    """Draw indices by weight. Without replacement they are those of the largest weights divided by
    exponential noise, as in torch, so neither rows nor weights are gathered."""
    if world.current().draws_whole:
        return CHOOSE.dispatched(input, num_samples, replacement, generator=generator)
    with as_local():
        like = torch.empty(input.shape, dtype=input.dtype, device="meta")
        torch.multinomial(like, num_samples, replacement)  # raises torch's own error
    if replacement and num_samples > 1:
        return CHOOSE.dispatched(input, num_samples, True, generator=generator)
    if not (0 < num_samples <= input.shape[-1] and input.dim() in (1, 2)):
        raise RuntimeError(
            f"cannot sample n_sample={num_samples} > prob_dist.size(-1) samples without "
            f"replacement from a distribution of shape {list(input.shape)}"
        )
    input = input.detach()
    if not bool(((input >= 0) & (input < float("inf"))).all()):
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
    races = input / noise_like(samplers.exponential, input, generator=generator)
    if num_samples == 1:
        return races.argmax(-1, keepdim=True)
    return races.topk(num_samples, -1)[1]


# ---- torch.nn.init: the functions that call `__torch_function__` of their tensor
# The others are composed of operators that have rules.


@handler(init.uniform_)
def uniform_(func: Any, args: Any, kwargs: Any) -> Any:
    """Fill with uniform numbers in [a, b)."""
    return fill_uniform(*args, **kwargs)


@handler(init.normal_)
def normal_(func: Any, args: Any, kwargs: Any) -> Any:
    """Fill with normally distributed numbers."""
    return fill_normal(*args, **kwargs)


@handler(init.constant_)
def constant_(func: Any, args: Any, kwargs: Any) -> Any:
    """Fill with one value."""
    return fill_constant(*args, **kwargs)


@handler(init.kaiming_uniform_)
def kaiming_uniform_(func: Any, args: Any, kwargs: Any) -> Any:
    """Fill with uniform numbers whose bound follows from the global fan."""

    def initialized(
        tensor: Any,
        a: float = 0,
        mode: Any = "fan_in",
        nonlinearity: Any = "leaky_relu",
        generator: Any = None,
    ) -> Any:
        if 0 in tensor.shape:
            warnings.warn("Initializing zero-element tensors is a no-op", stacklevel=5)
            return tensor
        fan = fan_of(tensor, mode)
        bound = init.calculate_gain(nonlinearity, a) * math.sqrt(3 / fan)
        with torch.no_grad():
            return tensor.uniform_(-bound, bound, generator=generator)

    return initialized(*args, **kwargs)
