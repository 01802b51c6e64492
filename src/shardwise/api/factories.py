"""Factories of DTensors. Each rank makes its own shard, without communication.

Random tensors have the same global values on every layout and mesh (`random.samplers`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec

import torch

from shardwise.comm import standing_in
from shardwise.core.checks import as_int, as_ints
from shardwise.core.errors import LayoutError
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh, mesh_or_current
from shardwise.core.placement import Placement, Replicate
from shardwise.dtensor.tensor import DTensor, wrap
from shardwise.random import samplers
from shardwise.random.samplers import Sampler, draw_shard
from shardwise.redistribute.autograd import redistribute_local
from shardwise.torch_internals import as_local

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

    Mesh = DeviceMesh | TorchMesh | None

Placements = Sequence[Placement] | None
_Arguments = ParamSpec("_Arguments")


def _on_every_rank(make: Callable[_Arguments, DTensor]) -> Callable[_Arguments, DTensor]:
    """Let a factory run on ranks outside of the mesh too: the tensor has no data there.

    Such a rank stands in for one of the mesh, so that it draws random keys as that does.
    """

    @functools.wraps(make)
    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> DTensor:
        given: Any = kwargs.get("device_mesh")
        mesh = mesh_or_current(given)
        if mesh.get_coordinate() is not None:
            return make(*args, **kwargs)
        kwargs["device_mesh"] = mesh
        with standing_in(mesh), torch.device("meta"):
            made = make(*args, **kwargs)
        like = torch.empty(0, dtype=made.dtype, device=mesh.device_type)
        return DTensor._outside(made._layout, like, requires_grad=made.requires_grad)

    return run


@_on_every_rank
def empty(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Mesh = None,
    placements: Placements = None,
) -> DTensor:
    """Make a tensor of arbitrary values.

    Arguments:
        size: the global shape, as ints or one sequence.
        dtype: by default torch's default dtype.
        layout: `torch.strided`; no other layout is supported.
        requires_grad: whether gradients are recorded for it.
        device_mesh: the mesh of the tensor; by default that of `with mesh:`. On an abstract
            mesh, and within `torch.device("meta")`, it has no memory.
        placements: one per axis of the mesh; all `Replicate()` by default.

    Example:
        >>> sw.empty(8, 4, device_mesh=mesh, placements=[Shard(0)])
    """
    target = _target_layout("empty", _as_shape(size), layout, device_mesh, placements)
    return _make(target, dtype, requires_grad, torch.empty)


@_on_every_rank
def zeros(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Mesh = None,
    placements: Placements = None,
) -> DTensor:
    """Make a tensor of zeros. For the arguments see `empty`."""
    target = _target_layout("zeros", _as_shape(size), layout, device_mesh, placements)
    return _fill(target, 0, dtype, requires_grad)


@_on_every_rank
def ones(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Mesh = None,
    placements: Placements = None,
) -> DTensor:
    """Make a tensor of ones. For the arguments see `empty`."""
    target = _target_layout("ones", _as_shape(size), layout, device_mesh, placements)
    return _fill(target, 1, dtype, requires_grad)


@_on_every_rank
def full(
    size: Sequence[int],
    fill_value: float,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Mesh = None,
    placements: Placements = None,
) -> DTensor:
    """Make a tensor of one value, which determines the default dtype. See `empty`."""
    target = _target_layout("full", _as_shape((size,)), layout, device_mesh, placements)
    if dtype is None:
        dtype = torch.full((), fill_value, device="cpu").dtype
    return _fill(target, fill_value, dtype, requires_grad)


@_on_every_rank
def arange(
    start: float,
    end: float | None = None,
    step: float = 1,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Mesh = None,
    placements: Placements = None,
) -> DTensor:
    """Make the numbers from start up to end, without end; `arange(n)` starts at 0. See `empty`.

    Every rank makes all of them and keeps its shard, so that they equal torch's to the last bit.

    Example:
        >>> sw.arange(8, device_mesh=mesh, placements=[Shard(0)])
        >>> sw.arange(1, 2, 0.25, device_mesh=mesh, placements=[Shard(0)])
    """
    first, last = (0, start) if end is None else (start, end)
    made = torch.arange(first, last, step, dtype=dtype, device="cpu")
    target = _target_layout("arange", tuple(made.shape), layout, device_mesh, placements)
    return _keep_shard(target, made, requires_grad)


@_on_every_rank
def linspace(
    start: complex | torch.Tensor,
    end: complex | torch.Tensor,
    steps: int,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Mesh = None,
    placements: Placements = None,
) -> DTensor:
    """Make `steps` numbers, evenly spaced from `start` to `end`, both included. See `arange`.

    Arguments:
        start: the first number, or a 0-d tensor or DTensor, whose value is used without gradients.
        end: the last number, likewise.

    Example:
        >>> sw.linspace(0, 1, 5, device_mesh=mesh, placements=[Shard(0)])
    """
    first, last = _number("linspace(start)", start), _number("linspace(end)", end)
    count = _count("linspace(steps)", steps)
    made = torch.linspace(first, last, count, dtype=dtype, device="cpu")
    target = _target_layout("linspace", tuple(made.shape), layout, device_mesh, placements)
    return _keep_shard(target, made, requires_grad)


@_on_every_rank
def logspace(
    start: complex | torch.Tensor,
    end: complex | torch.Tensor,
    steps: int,
    base: float = 10.0,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Mesh = None,
    placements: Placements = None,
) -> DTensor:
    """Make `steps` powers of `base`, with the exponents of `linspace`. See `linspace`.

    Example:
        >>> sw.logspace(0, 3, 4, device_mesh=mesh, placements=[Shard(0)])  # 1, 10, 100, 1000
    """
    first, last = _number("logspace(start)", start), _number("logspace(end)", end)
    count = _count("logspace(steps)", steps)
    made = torch.logspace(first, last, count, base, dtype=dtype, device="cpu")
    target = _target_layout("logspace", tuple(made.shape), layout, device_mesh, placements)
    return _keep_shard(target, made, requires_grad)


@_on_every_rank
def eye(
    n: int,
    m: int | None = None,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Mesh = None,
    placements: Placements = None,
) -> DTensor:
    """Make a matrix of n rows and m (or n) columns with ones on its diagonal. See `empty`."""
    target = _target_layout("eye", (n, n if m is None else m), layout, device_mesh, placements)
    rows, columns = (
        torch.cat([torch.arange(*each, device=_device(target)) for each in target.ranges(dim)])
        for dim in range(2)
    )
    ones = (rows[:, None] == columns).to(dtype or torch.get_default_dtype())
    return _wrap_known(target, ones, requires_grad)


@_on_every_rank
def rand(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Mesh = None,
    placements: Placements = None,
    generator: torch.Generator | None = None,
) -> DTensor:
    """Make a tensor of numbers uniform in [0, 1), the same on every layout. See `empty`.

    Arguments:
        generator: draw the key from it instead of torch's default generator. Either must be in the
            same state on every rank.
    """
    target = _target_layout("rand", _as_shape(size), layout, device_mesh, placements)
    return _draw(target, samplers.uniform, dtype, requires_grad, generator)


@_on_every_rank
def randn(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Mesh = None,
    placements: Placements = None,
    generator: torch.Generator | None = None,
) -> DTensor:
    """Make a tensor of normally distributed numbers, the same on every layout. See `rand`."""
    target = _target_layout("randn", _as_shape(size), layout, device_mesh, placements)
    return _draw(target, samplers.normal, dtype, requires_grad, generator)


@_on_every_rank
def randint(
    low: int,
    high: Any = None,
    size: Sequence[int] | None = None,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Mesh = None,
    placements: Placements = None,
    generator: torch.Generator | None = None,
) -> DTensor:
    """Make a tensor of integers in [low, high), the same on every layout. See `rand`.

    Example:
        >>> sw.randint(10, (8, 4), device_mesh=mesh, placements=[Shard(0)])
        >>> sw.randint(5, 10, (8, 4), device_mesh=mesh, placements=[Shard(0)])
    """
    if size is None and isinstance(high, Sequence):
        low, high, size = 0, low, high
    elif high is None:
        low, high = 0, low
    if size is None:
        raise LayoutError("randint(size): expected the global shape, got None")
    if low >= high:
        raise LayoutError(f"randint(low, high): expected low < high, got {low} and {high}")
    target = _target_layout("randint", _as_shape((size,)), layout, device_mesh, placements)
    dtype = dtype or torch.int64
    return _draw(target, samplers.integers, dtype, requires_grad, generator, low, high)


@_on_every_rank
def randperm(
    n: int,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: Mesh = None,
    placements: Placements = None,
    generator: torch.Generator | None = None,
) -> DTensor:
    """Make a random order of the numbers 0 to n - 1, the same on every layout. See `rand`.

    Every rank makes the whole order and keeps its shard.
    """
    target = _target_layout("randperm", (n,), layout, device_mesh, placements)
    return _draw(target, samplers.permutation, dtype or torch.int64, requires_grad, generator)


# ---- helpers


def _target_layout(
    name: str,
    shape: tuple[int, ...],
    strided: torch.layout,
    device_mesh: Mesh,
    placements: Placements,
) -> Layout:
    if strided is not torch.strided:
        raise LayoutError(f"{name}(layout): expected torch.strided, got {strided}")
    mesh = mesh_or_current(device_mesh)
    return Layout.from_placements(mesh, shape, placements or [Replicate()] * mesh.ndim)


def _device(target: Layout) -> torch.device:
    is_meta = target.mesh.is_abstract or torch.get_default_device().type == "meta"
    return torch.device("meta" if is_meta else target.mesh.device_type)


def _make(
    target: Layout,
    dtype: torch.dtype | None,
    requires_grad: bool,
    make: Callable[..., torch.Tensor],
    *extra: Any,
) -> DTensor:
    with as_local():
        local = make(target.local_shape(), *extra, dtype=dtype, device=_device(target))
    result = wrap(local, target)
    result.requires_grad = requires_grad
    return result


def _fill(target: Layout, value: Any, dtype: torch.dtype | None, requires_grad: bool) -> DTensor:
    place = target.mesh.get_coordinate() or (0,) * target.mesh.ndim
    for axis, op in target.partial:  # a pending sum or product must count the value once
        if op in ("sum", "product") and place[axis] > 0:
            value = 0 if op == "sum" else 1
            break
    dtype = dtype or torch.get_default_dtype()
    return _make(target, dtype, requires_grad, torch.full, value)


def _draw(
    target: Layout,
    sampler: Sampler,
    dtype: torch.dtype | None,
    requires_grad: bool,
    generator: torch.Generator | None,
    *numbers: int,
) -> DTensor:
    local = draw_shard(
        sampler,
        target.relaid(partial={}),
        *numbers,
        dtype=dtype or torch.get_default_dtype(),
        device=_device(target),
        generator=generator,
    )
    return _wrap_known(target, local, requires_grad)


def _keep_shard(target: Layout, made: torch.Tensor, requires_grad: bool) -> DTensor:
    """Keep this rank's shard of a tensor that every rank has made."""
    return _wrap_known(target, target.piece_of(made).to(_device(target), copy=True), requires_grad)


def _wrap_known(target: Layout, local: torch.Tensor, requires_grad: bool) -> DTensor:
    """Wrap a shard of values that every rank knows: a pending sum must count them only once."""
    with as_local():
        result = wrap(redistribute_local(local, target.relaid(partial={}), target), target)
    result.requires_grad = requires_grad
    return result


def _number(argument: str, value: Any) -> Any:
    """Return the value of a 0-d tensor or DTensor; a number as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.ndim != 0:
        raise LayoutError(
            f"{argument}: expected a number or a 0-d tensor, got one of shape {tuple(value.shape)}"
        )
    return value.item()


def _count(argument: str, value: int) -> int:
    count = as_int(value)
    if count is None or count < 0:
        raise LayoutError(f"{argument}: expected a number from 0 on, got {value!r}")
    return count


def _as_shape(sizes: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the shape given as `f(2, 3)` or `f((2, 3))`."""
    given = sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    shape = as_ints(given)
    if shape is None:
        raise LayoutError(f"size: expected ints, got {sizes!r}")
    return shape
