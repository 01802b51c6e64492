"""Pointwise operators: every dim of the result is a free factor; inputs broadcast.

`linear` names the inputs through which pending sums may flow: if an operator is linear in the
pending inputs and the others are whole, the sum may be taken after the operator instead of before
it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.dtensor.tensor import DTensor
from shardwise.rules.helpers.dims import broadcast_dims
from shardwise.rules.registry import dispatched, functions_named, handler, rule
from shardwise.rules.spec import Dims, Out, Spec, SplitContext, dims_of
from shardwise.torch_internals import nn_builtins


def broadcast_spec(tensors: list[torch.Tensor], linear: Any = (), **extra: Any) -> Spec:
    """Return the spec of an operator on tensors that broadcast against each other."""
    shape = tuple(torch.broadcast_shapes(*(tensor.shape for tensor in tensors)))  # type: ignore[no-untyped-call]
    names = tuple(f"d{dim}" for dim in range(len(shape)))
    inputs = [(tensor, broadcast_dims(tensor, names, shape)) for tensor in tensors]
    return Spec(inputs, [Out(names, shape)], linear=linear, **extra)


def tensors_among(*args: Any) -> list[torch.Tensor]:
    """Return the tensors among arguments, in order."""
    return [arg for arg in args if isinstance(arg, torch.Tensor)]


# ---- operators that are not linear: their inputs broadcast, and that is all


def names(text: str) -> list[str]:
    """Split a text into words."""
    return text.split()


UNARY = names("""
    abs absolute acos arccos acosh arccosh asin arcsin asinh arcsinh atan arctan atanh arctanh
    ceil cos cosh digamma erf erfc erfinv exp exp2 expm1 fix floor frac i0 lgamma log log10 log1p
    log2 logit mvlgamma nan_to_num polygamma reciprocal round rsqrt sgn sigmoid sign sin sinc sinh
    sqrt square tan tanh trunc
    angle isfinite isinf isnan isneginf isposinf isreal signbit logical_not bitwise_not
    __invert__
""")
ACTIVATIONS = names("""
    celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu log_sigmoid logsigmoid mish
    relu relu6 selu silu softplus softshrink softsign tanhshrink threshold
""")
BINARY = names("""
    atan2 arctan2 copysign float_power floor_divide fmax fmin fmod gcd heaviside hypot igamma
    igammac isclose lcm logaddexp logaddexp2 maximum minimum nextafter pow remainder xlogy
    eq ne lt le gt ge greater greater_equal less less_equal not_equal
    logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor bitwise_left_shift
    bitwise_right_shift __and__ __or__ __xor__ __lshift__ __rshift__
    clamp clamp_max clamp_min clip
""")
SPECIAL = [f"special.{name}" for name in names("""
    airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 chebyshev_polynomial_t chebyshev_polynomial_u
    chebyshev_polynomial_v chebyshev_polynomial_w digamma entr erf erfc erfcx erfinv exp2 expit
    expm1 gammainc gammaincc gammaln hermite_polynomial_h hermite_polynomial_he i0 i0e i1 i1e
    laguerre_polynomial_l legendre_polynomial_p log1p log_ndtr logit modified_bessel_i0
    modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 multigammaln ndtr ndtri polygamma psi
    round scaled_modified_bessel_k0 scaled_modified_bessel_k1 shifted_chebyshev_polynomial_t
    shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w
    sinc spherical_bessel_j0 xlog1py xlogy zeta
""")]  # fmt: skip


@rule(*UNARY, *ACTIVATIONS, *BINARY, torch.Tensor.__eq__, ignores_numbers=True)
@rule(*SPECIAL, ignores_numbers=True)
def pointwise(*args: Any, **kwargs: Any) -> Spec:
    return broadcast_spec(tensors_among(*args, *kwargs.values()))


# ---- linear operators


@rule("neg", "negative", "positive", "deg2rad", "rad2deg", "conj_physical", ignores_numbers=True)
def linear_unary(input: torch.Tensor) -> Spec:
    return broadcast_spec([input], [(0,)])


@rule("add", "sub", "subtract", "rsub", ignores_numbers=True)
def add(input: Any, other: Any, *, alpha: Any = 1) -> Spec:
    tensors = tensors_among(input, other)
    return broadcast_spec(tensors, [(0, 1)] if len(tensors) == 2 else ())


@rule("mul", "multiply", ignores_numbers=True)
def mul(input: Any, other: Any) -> Spec:
    tensors = tensors_among(input, other)
    return broadcast_spec(tensors, [(0,), (1,)] if len(tensors) == 2 else [(0,)])


@rule("div", "divide", "true_divide", ignores_numbers=True)
def div(input: Any, other: Any, *, rounding_mode: str | None = None) -> Spec:
    numerator = isinstance(input, torch.Tensor) and rounding_mode is None
    return broadcast_spec(tensors_among(input, other), [(0,)] if numerator else ())


@rule("ldexp", ignores_numbers=True)
def ldexp(input: Any, other: Any) -> Spec:
    return broadcast_spec(tensors_among(input, other), [(0,)])


@rule("addcmul", ignores_numbers=True)
def addcmul(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Spec:
    return broadcast_spec([input, tensor1, tensor2], [(0, 1), (0, 2)])


@rule("addcdiv", ignores_numbers=True)
def addcdiv(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Spec:
    return broadcast_spec([input, tensor1, tensor2], [(0, 1)])


@rule("lerp", ignores_numbers=True)
def lerp(input: Any, end: Any, weight: Any) -> Spec:
    return broadcast_spec(tensors_among(input, end, weight), [(0, 1)])


# ---- selection by a mask: linear in the values to select from, if a number among them is 0


@rule(torch.where, *functions_named("where"))
def where(condition: Any, input: Any = None, other: Any = None) -> Spec | Callable[..., Any]:
    if input is None and other is None:
        return _where_true
    return _chosen(condition, input, other)


def _where_true(condition: Any) -> Any:
    return torch.nonzero(condition, as_tuple=True)


@rule(torch.Tensor.where)
def where_of_tensor(self: Any, condition: Any, other: Any) -> Spec:
    return _chosen(condition, self, other)


@rule("masked_fill")
def masked_fill(input: Any, mask: Any, value: Any) -> Spec:
    # The target of the in-place form comes first.
    tensors = tensors_among(input, mask, value)
    return broadcast_spec(tensors, _linear_in(tensors, input, value))


def _chosen(condition: Any, input: Any, other: Any) -> Spec:
    tensors = tensors_among(condition, input, other)
    return broadcast_spec(tensors, _linear_in(tensors, input, other))


def _linear_in(tensors: list[torch.Tensor], *chosen: Any) -> list[tuple[int, ...]]:
    """Return the positions of the tensors to select from; nothing if a number other than 0 is one
    of the values."""
    flow = []
    for each in chosen:
        if isinstance(each, torch.Tensor):
            flow.append(next(at for at, t in enumerate(tensors) if t is each and at not in flow))
        elif each != 0:
            return []
    return [tuple(flow)]


# ---- complex numbers


@rule("complex")
def complex_(real: Any, imag: Any) -> Spec:
    return broadcast_spec([real, imag], [(0, 1)])


@rule("polar")
def polar(abs: Any, angle: Any) -> Spec:
    # Linear in abs, but torch's gradient needs the sign of the result, so it must not be pending.
    return broadcast_spec([abs, angle])


@rule("real", "imag", "conj", "resolve_conj", "resolve_neg", inplace=False)
@rule(torch.Tensor.real.__get__, torch.Tensor.imag.__get__)  # type: ignore[attr-defined]
def complex_view(input: Any, *args: Any) -> Spec:
    return broadcast_spec([input], [(0,)], is_view=True)


@rule("view_as_real")
def view_as_real(input: Any) -> Spec:
    dims = dims_of(input)
    out = Out((*dims, None), (*input.shape, 2))

    def lower(context: SplitContext) -> Any:
        if 0 in context.inputs[0].local_shape():  # torch's own gradient fails for it
            return lambda input: torch.stack((input.real, input.imag), -1)
        return None

    return Spec([(input, dims)], [out], linear=[(0,)], is_view=True, lower=lower, positions=())


@rule("view_as_complex")
def view_as_complex(input: Any) -> Spec:
    dims = dims_of(input)[:-1]
    out = Out(dims, tuple(input.shape[:-1]))
    return Spec([(input, (*dims, None))], [out], linear=[(0,)], is_view=True)


# ---- pointwise but for one dim or a second result


@rule("frexp")
def frexp(input: Any) -> Spec:
    dims, shape = dims_of(input), tuple(input.shape)
    return Spec([(input, dims)], [Out(dims, shape)] * 2)


@rule("prelu")
def prelu(input: Any, weight: Any) -> Spec:
    dims, shape = dims_of(input), tuple(input.shape)
    per_channel: Dims = (None,) * weight.dim()
    if weight.dim() == 1 and input.dim() > 1 and weight.shape[0] == shape[1]:
        per_channel = (dims[1],)
    return Spec([(input, dims), (weight, per_channel)], [Out(dims, shape)])


@rule("glu")
def glu(input: Any, dim: int = -1) -> Spec:
    dims, shape = list(dims_of(input)), list(input.shape)
    dims[dim], shape[dim] = None, shape[dim] // 2
    return Spec([(input, tuple(dims))], [Out(tuple(dims), tuple(shape))])


@rule(
    "gelu_backward", "silu_backward", "sigmoid_backward", "tanh_backward", "threshold_backward",
    "logit_backward", "leaky_relu_backward", "elu_backward", "hardtanh_backward",
    "softplus_backward", "native_dropout_backward", ignores_numbers=True, inplace=False,
)  # fmt: skip
def backward_of_unary(*args: Any, **kwargs: Any) -> Spec:
    gradient, saved = tensors_among(*args, *kwargs.values())
    return broadcast_spec([gradient, saved], [(0,)])


# ---- aliases: operators with a number on the left, and activations that torch implements in Python
# Their handlers replace the rules above.

Tensor = torch.Tensor


ALIASES: set[Any] = set()
"""The handlers of this module, which accept any kind of tensor and pass it on."""


def _alias(name: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(made: Callable[..., Any]) -> Callable[..., Any]:
        ALIASES.add(made)
        return handler(name)(made)

    return register


def _run(function: Any, *args: Any, **kwargs: Any) -> Any:
    if args and isinstance(args[0], DTensor):  # skips one round through __torch_function__
        return dispatched(function, *args, **kwargs)
    return function(*args, **kwargs)


def _same(name: Any, function: Any) -> None:
    """Register `name(...)` as `function(...)`."""
    _alias(name)(lambda func, args, kwargs: _run(function, *args, **kwargs))


def _swapped(name: Any, function: Any) -> None:
    """Register `name(x, y)` as `function(y, x)`."""
    _alias(name)(lambda func, args, kwargs: _run(function, args[1], args[0]))


_same(Tensor.__pow__, Tensor.pow)
_same(Tensor.__ipow__, Tensor.pow_)
_same(Tensor.__rsub__, torch.rsub)
_same(Tensor.__floordiv__, torch.floor_divide)
_same("_is_all_true", torch.all)
_same("_is_any_true", torch.any)
_same("__iand__", Tensor.bitwise_and_)
_same("__ior__", Tensor.bitwise_or_)
_same("__ixor__", Tensor.bitwise_xor_)
_same("__ilshift__", Tensor.bitwise_left_shift_)
_same("__irshift__", Tensor.bitwise_right_shift_)

_swapped(Tensor.__rpow__, torch.pow)
_swapped(Tensor.__rmod__, torch.remainder)
_swapped(Tensor.__rfloordiv__, torch.floor_divide)
_swapped(Tensor.__rlshift__, torch.bitwise_left_shift)
_swapped(Tensor.__rrshift__, torch.bitwise_right_shift)
_swapped(Tensor.__rmatmul__, torch.matmul)


@_alias(Tensor.__rdiv__)
def rdiv(func: Any, args: Any, kwargs: Any) -> Any:
    """Multiply by the reciprocal, as torch does: it rounds once more than a division."""
    return _run(Tensor.mul, args[0].reciprocal(), args[1])


def _activation(python: Any, function: Any, inplace: Any) -> None:
    """Register a Python function that has an `inplace` argument."""
    position = python.__code__.co_varnames.index("inplace")

    def activation(func: Any, args: Any, kwargs: Any) -> Any:
        chosen = function
        if len(args) > position:
            chosen = inplace if args[position] else function
            args = args[:position]
        elif "inplace" in kwargs:
            kwargs = dict(kwargs)
            chosen = inplace if kwargs.pop("inplace") else function
        return _run(chosen, *args, **kwargs)

    _alias(python)(activation)


_builtin: Any = nn_builtins
_activations: list[tuple[Callable[..., Any], Any, Any]] = [
    (F.relu, torch.relu, torch.relu_),
    (F.relu6, _builtin.relu6, _builtin.relu6_),
    (F.elu, _builtin.elu, _builtin.elu_),
    (F.celu, torch.celu, torch.celu_),
    (F.selu, torch.selu, torch.selu_),
    (F.silu, _builtin.silu, _builtin.silu_),
    (F.mish, _builtin.mish, _builtin.mish_),
    (F.hardtanh, _builtin.hardtanh, _builtin.hardtanh_),
    (F.hardswish, _builtin.hardswish, _builtin.hardswish_),
    (F.hardsigmoid, _builtin.hardsigmoid, _builtin.hardsigmoid_),
    (F.leaky_relu, _builtin.leaky_relu, _builtin.leaky_relu_),
    (F.threshold, torch.threshold, torch.threshold_),
]
for _each in _activations:
    _activation(*_each)


def _part(function: Any) -> property:
    """Return a property for the real or imaginary part: a view that can be assigned to.

    torch's own property does not call `__torch_function__` on assignment.
    """

    def write(tensor: DTensor, value: Any) -> None:
        part = function(tensor)
        part.copy_(value) if isinstance(value, Tensor) else part.fill_(value)

    return property(lambda tensor: dispatched(function, tensor), write)


DTensor.real = _part(torch.real)  # type: ignore[assignment]
DTensor.imag = _part(torch.imag)  # type: ignore[assignment]
