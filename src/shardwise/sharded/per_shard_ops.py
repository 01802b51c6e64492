"""Functions that run shard by shard, for shards that form no layout of a DTensor.

Pointwise functions run on each shard. Whether a function is pointwise follows from its rule
(`shardwise.rules`): every dim of its results is a factor, the sharded tensors have all factors, and
nothing is reduced or depends on positions. Random numbers must not depend on how a tensor is cut:
they are drawn for a tensor in chunks, a DTensor, and moved to the shards. A few reductions (norms,
any, all) and comparisons combine the results of all shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn import init

from shardwise.api import factories
from shardwise.core.box import Box
from shardwise.core.placement import Replicate, Shard
from shardwise.dtensor.tensor import DTensor, tensors_in
from shardwise.random.samplers import draw_key
from shardwise.rules.pointwise.elementwise import names
from shardwise.rules.registry import input_of, lookup
from shardwise.rules.spec import Dims, Spec
from shardwise.sharded.tensor import ShardedTensor, as_full_tensor
from shardwise.sharded.transfer import sum_grads_over_ranks
from shardwise.torch_internals import pytree


def run_pointwise(func: Any, args: Any, kwargs: Any, tensors: list[ShardedTensor]) -> Any:
    """Run a pointwise function shard by shard; return None for other functions."""
    model = tensors[0]
    out = kwargs.get("out")
    if out is not None:
        kwargs = {name: each for name, each in kwargs.items() if name != "out"}
    spec = _pointwise_spec(func, args, kwargs)
    if spec is None or any(each._ownership != model._ownership for each in tensors):
        return None
    whole = spec.outputs[0].dims
    dims = {id(tensor): found for tensor, found in spec.inputs}
    for each in tensors_in((args, kwargs)):
        found = dims.get(id(each))
        if found is None or (isinstance(each, ShardedTensor) and found != whole):
            return None
    target = input_of(args, kwargs) if is_in_place(func) else out
    if target is not None and not isinstance(target, ShardedTensor):
        return None

    def with_summed_grads(value: Any) -> Any:
        """Let a plain tensor get the sum of the gradients of all ranks."""
        is_plain = isinstance(value, torch.Tensor) and not isinstance(value, ShardedTensor)
        if not (is_plain and value.requires_grad and torch.is_grad_enabled()):
            return value
        view = sum_grads_over_ranks(value, model._group)
        dims[id(view)] = dims[id(value)]
        return view

    def part_of(box: Box, at: int, value: Any) -> Any:
        """Return the part of an argument for the shard at position `at`."""
        if isinstance(value, ShardedTensor):
            tensors = value._local_tensors() or [_placeholder_for(value, box, value is target)]
            return tensors[at]
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            return value[_slices(dims[id(value)], whole, box)]
        return value

    args, kwargs = pytree.tree_map(with_summed_grads, (args, kwargs))
    results: list[Any] = []
    # A rank without shards computes with placeholders, for the same dtypes and errors.
    boxes = model._ownership.boxes_of(model._group.rank) or [model._ownership.empty_box]
    for at, box in enumerate(boxes):
        local_args, local_kwargs = pytree.tree_map(partial(part_of, box, at), (args, kwargs))
        results.append(func(*local_args, **local_kwargs))
    if not isinstance(results[0], torch.Tensor | tuple | list):
        return results[0]  # a bool, from x == None
    if target is not None and target is not out:
        if any(each.requires_grad for each in results):
            target._set_requires_grad_flag(True)
            if not whole and not target._local_shards:  # the placeholder was written to
                (written,) = results
                target._placeholder = written.reshape(-1)[:0]
        return target
    result = pytree.tree_map(lambda *each: model._with_results(each), *results)
    if out is None:
        return result
    if not torch.can_cast(result.dtype, out.dtype):
        raise RuntimeError(
            f"result type {result.dtype} can't be cast to the desired output type {out.dtype}"
        )
    return out.copy_(result)


def is_in_place(func: Any) -> bool:
    """Return whether a function writes to its input."""
    known = lookup(func)
    return known is not None and known.outplace is not None


def _placeholder_for(value: ShardedTensor, box: Box, is_written: bool) -> torch.Tensor:
    """Return the tensor that a rank without shards computes with. A tensor without dims always has
    one element; then it is 1, with the history of the placeholder."""
    if box.start:
        return value._get_placeholder(box.shape)
    placeholder = value._get_placeholder()
    if not placeholder.requires_grad:
        return placeholder.new_ones(())
    if is_written and placeholder.is_leaf and torch.is_grad_enabled():
        raise RuntimeError(  # as torch does on ranks with shards
            "a leaf Variable that requires grad is being used in an in-place operation."
        )
    return placeholder.sum() + 1


def _pointwise_spec(func: Any, args: Any, kwargs: Any) -> Spec | None:
    """Return the spec that the rule of a function gives for a call, if it is pointwise."""
    known = lookup(func)
    if known is None or known.rule is None:
        return None
    spec = known.rule(*args, **kwargs)
    if not isinstance(spec, Spec) or spec.lower or spec.allows or spec.reduces or spec.scales:
        return None
    first = spec.outputs[0].dims
    if None in first or any(out.dims != first for out in spec.outputs):
        return None
    return spec


def _slices(dims: Dims, factors: Dims, box: Box) -> tuple[slice, ...]:
    """Return the slices of a plain tensor that broadcast against a box."""
    return tuple(slice(None) if name is None else box.slices[factors.index(name)] for name in dims)


# ---- filling

MAKES_LIKE = [torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like]

_RANDOM_LIKE = {torch.rand_like, torch.randn_like, torch.randint_like}
_FILLED = {
    *(getattr(torch.Tensor, name) for name in names("""
        bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_
    """)),
    torch.eye,
}  # fmt: skip
"""Functions that write to a tensor without reading it."""
_INITIALIZED = {init.uniform_, init.normal_, init.constant_, init.kaiming_uniform_}
"""Functions that do the same without autograd, so that they can write to parameters."""
_DROPOUT = {torch.dropout, torch.dropout_, F.dropout}


def make_like(func: Any) -> Callable[..., Any]:
    """Return a function that makes a tensor like another, shard by shard."""

    def make(input: ShardedTensor, *args: Any, **kwargs: Any) -> ShardedTensor:
        model = func(input._prototype(), *args, **kwargs)
        return input._with_tensors(
            [func(each, *args, **kwargs) for each in input._local_tensors()],
            placeholder=model,
            device=model.device,
            dtype=model.dtype,
            requires_grad=model.requires_grad,
            pin_memory=bool(kwargs.get("pin_memory", False)),
        )

    return make


def run_filling(func: Any, args: Any, kwargs: Any, model: ShardedTensor) -> Any:
    """Run a function that fills shards; return None for other functions."""
    if model._group.is_outside and func in _FILLED | _INITIALIZED:
        if func not in (torch.eye, init.constant_):
            draw_key()  # as on the ranks of the group, so that generators stay in the same state
        return model
    if func in _FILLED or func in _INITIALIZED:
        args, kwargs = _replace_argument(model, _empty_in_chunks(model), args, kwargs)
        filled = func(*args, **kwargs)
        with torch.set_grad_enabled(torch.is_grad_enabled() and func in _FILLED):
            return model.copy_(filled)
    if func in _RANDOM_LIKE:
        args, kwargs = _replace_argument(model, _empty_in_chunks(model), args, kwargs)
        return _move_to_shards(model, func(*args, **kwargs))
    if func in _DROPOUT:
        return _run_dropout(func, args, kwargs)
    if func is torch.Tensor.__setitem__ and not _is_recorded(args):
        chunks = _empty_in_chunks(model)
        chunks.copy_(model.full_tensor())
        func(*_replace_argument(model, chunks, args, kwargs)[0])
        return model.copy_(chunks)
    return None


def _is_recorded(args: Any) -> bool:
    return torch.is_grad_enabled() and any(each.requires_grad for each in tensors_in(args))


def _run_dropout(func: Any, args: Any, kwargs: Any) -> Any:
    """Multiply a tensor by the result of dropout on ones."""
    input: Any = input_of(args, kwargs)
    rest = list(args[1:])
    named = {name: each for name, each in kwargs.items() if each is not input}
    in_place = func is torch.dropout_ or named.pop("inplace", False) or rest[2:] == [True]
    ones = torch.ones_like(_empty_in_chunks(input))
    dropout: Any = F.dropout if func is F.dropout else torch.dropout
    with torch.no_grad():
        factors = _move_to_shards(input, dropout(ones, *rest[:2], **named))
    return input.mul_(factors) if in_place else input * factors


def _move_to_shards(model: ShardedTensor, dtensor: DTensor) -> ShardedTensor:
    """Return a DTensor of the model's size as a sharded tensor with the model's boxes."""
    shards = model._shards_of(dtensor.detach())
    result = model._with_tensors(shards, dtype=dtensor.dtype, requires_grad=False, pin_memory=False)
    return result.requires_grad_(dtensor.requires_grad)


def _empty_in_chunks(model: ShardedTensor) -> DTensor:
    """Return an uninitialized DTensor of the model's size, in chunks of dim 0."""
    mesh = model._group.mesh(model.device.type)
    placement = Shard(0) if model.shape else Replicate()
    return factories.empty(model.shape, dtype=model.dtype, device_mesh=mesh, placements=[placement])


def _replace_argument(model: ShardedTensor, other: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments with another tensor in place of the model."""
    return (
        tuple(other if each is model else each for each in args),
        {name: other if each is model else each for name, each in kwargs.items()},
    )


# ---- reductions


def run_reduction(func: Any, args: Any, kwargs: Any, model: ShardedTensor) -> Any:
    """Reduce all shards to one number on every rank; return None for other functions, for
    reductions of some dims, and for norms that autograd records."""
    recorded = model.requires_grad and torch.is_grad_enabled()
    if func in _NORMS and not recorded:
        return _NORMS[func](*args, **kwargs)
    if func in _TRUTHS and len(args) == 1 and not kwargs:
        local = func(torch.stack([func(each) for each in model._tensors_or_placeholder()]))
        return model._group.communicator.all_reduce(local, _TRUTHS[func])
    return None


def _norm(
    x: ShardedTensor,
    ord: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    out: Any = None,
) -> Any:
    """Compute `torch.linalg.vector_norm` of all elements; None for options that are not
    supported."""
    if dim is not None or keepdim or out is not None or not ord >= 0:
        return None
    result = torch.linalg.vector_norm(x._prototype(), 2, dtype=dtype)  # for the dtype
    tensors = [each for each in x._local_tensors() if each.numel() > 0]
    parts = [torch.linalg.vector_norm(each, ord, dtype=dtype).double() for each in tensors]
    # In double precision, as the square of a norm can overflow where the norm does not.
    norms = torch.stack([result.new_zeros((), dtype=torch.float64), *parts])
    communicator = x._group.communicator
    if math.isinf(ord):
        return communicator.all_reduce(norms.max(), "max").to(result.dtype)
    power = ord or 1  # order 0 counts the elements that are not 0
    total = communicator.all_reduce((norms**power).sum(), "sum")
    return (total ** (1 / power)).to(result.dtype)


def _old_norm(
    x: ShardedTensor,
    p: Any = "fro",
    dim: Any = None,
    keepdim: bool = False,
    out: Any = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """Compute `torch.norm`, which has other names for order 2."""
    order = 2 if p in ("fro", None) else p
    return None if isinstance(order, str) else _norm(x, order, dim, keepdim, dtype=dtype, out=out)


_NORMS: dict[Any, Any] = {
    torch.linalg.vector_norm: _norm,
    torch.norm: _old_norm,
    torch.Tensor.norm: _old_norm,
}
_TRUTHS = {torch.any: "max", torch.Tensor.any: "max", torch.all: "min", torch.Tensor.all: "min"}


# ---- comparisons


def is_same_size(input: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same size."""
    return tuple(input.shape) == tuple(other.shape)


def equal(input: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether size and elements are the same, however both are cut; the same on every
    rank."""
    if not is_same_size(input, other):
        return False
    return _compare(input, other, torch.equal)


def allclose(
    input: torch.Tensor,
    other: torch.Tensor,
    rtol: float = 1e-5,
    atol: float = 1e-8,
    equal_nan: bool = False,
) -> bool:
    """Return whether the elements are nearly the same, however both are cut; they may broadcast."""

    def close(one: torch.Tensor, two: torch.Tensor) -> bool:
        return torch.allclose(one, two, rtol, atol, equal_nan)

    if is_same_size(input, other):
        return _compare(input, other, close)
    return close(as_full_tensor(input), as_full_tensor(other))


def _compare(
    one: torch.Tensor, other: torch.Tensor, same: Callable[[torch.Tensor, torch.Tensor], bool]
) -> bool:
    """Compare two tensors shard by shard; return whether all ranks found them the same."""
    model: Any = one if isinstance(one, ShardedTensor) else other
    same(_empty_like(one), _empty_like(other))  # raises on every rank, if it raises
    pairs = zip(model._shards_of(one), model._shards_of(other), strict=True)
    is_same = torch.tensor(all(same(*pair) for pair in pairs), device=model.device)
    return bool(model._group.communicator.all_reduce(is_same, "min"))


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device)
