"""torch._foreach_*: one call for many tensors, as optimizers use it.

If the tensors at each position of all lists have the same layout, with no pending reduction, one
torch call on the shards is enough. Otherwise the ordinary operator runs for each position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

import torch

from shardwise.comm import communicator
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh
from shardwise.dtensor.tensor import DTensor, redistribute_to, wrap
from shardwise.dtensor.writes import check_writable
from shardwise.rules.helpers.local_tensors import vector_of
from shardwise.rules.pointwise.elementwise import names
from shardwise.rules.registry import handler
from shardwise.torch_internals import TensorBase, as_local

_layout_of = attrgetter("_layout")
_Tensor = torch.Tensor


def aligned(args: Any) -> list[Layout] | None:
    """Return the layouts of the tensors at each position, if they are the same in all lists.

    None if they differ or a reduction is pending. Lists of numbers and single replicated tensors
    are ignored.
    """
    layouts: list[Layout] | None = None
    for arg in args:
        kind = type(arg)
        if kind is list or kind is tuple:
            if not arg or not isinstance(arg[0], _Tensor):
                continue
            try:
                found = list(map(_layout_of, arg))
            except AttributeError:  # a plain tensor among them
                return None
            if layouts is None:
                layouts = found
            elif layouts != found:
                return None
        elif isinstance(arg, _Tensor) and not _is_constant(arg):
            return None
    if layouts is None or _is_pending(tuple(layouts)):
        return None
    return layouts


@lru_cache(maxsize=1024)
def _is_pending(layouts: tuple[Layout, ...]) -> bool:
    return any(layout.partial for layout in layouts)


def _is_constant(tensor: torch.Tensor) -> bool:
    """Return whether a single tensor beside the lists can be used without moving it."""
    if tensor.requires_grad and torch.is_grad_enabled():
        return False
    return not isinstance(tensor, DTensor) or tensor._layout.is_replicated


# ---- pointwise


def inplace(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a call that writes to the tensors of the first list."""
    if aligned((*args, *kwargs.values()) if kwargs else args) is None:
        return inplace_one_by_one(func, args, kwargs)
    for target in args[0]:
        check_writable(func.__name__, target)
    with as_local():
        return func(*args, **kwargs)


def inplace_one_by_one(func: Any, args: Any, kwargs: Any) -> Any:
    """Run it position by position, so that each sees the writes of the ones before."""
    _one_by_one(func, args, kwargs)
    return args[0]


def _outplace(func: Any, args: Any, kwargs: Any) -> Any:
    layouts = aligned((*args, *kwargs.values()) if kwargs else args)
    if layouts is None:
        return _one_by_one(func, args, kwargs)
    with as_local():
        results = func(*args, **kwargs)
    for result, layout in zip(results, layouts, strict=True):
        result.__class__ = DTensor
        result._layout = layout
    return results


def _one_by_one(func: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Run a foreach operator as calls of the ordinary one, for each position of the lists."""
    operator = _ordinary(func.__name__.removeprefix("_foreach_"))
    keywords = {name: each for name, each in kwargs.items() if name in ("alpha", "value")}
    args = [*args, *(each for name, each in kwargs.items() if name not in keywords)]
    if "addc" in func.__name__ and len(args) == 4:
        value = args.pop()
        keywords["value"] = value.tolist() if isinstance(value, _Tensor) else value
    lists = [each for each in (*args, *keywords.values()) if isinstance(each, list | tuple)]
    count = len(lists[0])
    for each in lists:
        if len(each) != count:
            raise RuntimeError(
                f"Tensor lists must have the same number of tensors, got {count} and {len(each)}"
            )

    def at(arg: Any, position: int) -> Any:
        return arg[position] if isinstance(arg, list | tuple) else arg

    return tuple(
        operator(
            *(at(arg, position) for arg in args),
            **{name: at(arg, position) for name, arg in keywords.items()},
        )
        for position in range(count)
    )


@lru_cache
def _ordinary(name: str) -> Callable[..., Any]:
    """Return the operator on one tensor."""
    for foreach, ordinary in (("maximum", "clamp_min"), ("minimum", "clamp_max")):
        if name.startswith(foreach):  # of a tensor or a number
            name = name.replace(foreach, ordinary)
    if name == "pow":  # the base may be a number
        return torch.pow
    return getattr(torch.Tensor, name)  # type: ignore[no-any-return]


POINTWISE = names("""
    abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min cos cosh div erf erfc exp expm1
    floor frac lerp lgamma log log10 log1p log2 maximum minimum mul neg pow reciprocal round rsqrt
    sigmoid sign sin sinh sqrt sub tan tanh trunc
""")

handler(*(f"_foreach_{name}" for name in POINTWISE), "_foreach_clone")(_outplace)
handler(*(f"_foreach_{name}_" for name in [*POINTWISE, "zero", "copy"]))(inplace)


@handler("_foreach_max", "_foreach_mm")
def one_by_one(func: Any, args: Any, kwargs: Any) -> Any:
    return _one_by_one(func, args, kwargs)


# ---- fused optimizers


@handler("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
def fused(func: Any, args: Any, kwargs: Any) -> None:
    """Run in the parameters' layouts; other tensors are moved there, updated, and copied back."""
    keywords = {name: _as_whole(arg) for name, arg in kwargs.items()}
    args = [_plain_counts(arg, args[0]) for arg in args]
    lists = [arg for arg in args if arg and isinstance(arg[0], DTensor)]
    for parameter in args[0]:
        check_writable(func.__name__, parameter)
    if aligned(lists) is not None:
        with as_local():
            func(*args, **keywords)
        return
    moved: list[tuple[DTensor, DTensor]] = []
    given = [
        [
            _like_parameter(each, parameter, moved)
            for each, parameter in zip(arg, args[0], strict=False)
        ]
        for arg in args
    ]
    with as_local():
        func(*given, **keywords)
    for tensor, updated in moved:
        tensor.copy_(updated)


def _as_whole(arg: Any) -> Any:
    """Return a single tensor beside the lists, gathered if it is split or pending."""
    if isinstance(arg, DTensor) and not arg._layout.is_replicated:
        return arg.full_tensor()
    return arg


def _plain_counts(tensors: Any, parameters: Any) -> Any:
    """Return a list of steps, one number for each parameter, as plain tensors; others unchanged.

    The kernels only read them.
    """
    if all(each.dim() == 0 for each in tensors) and any(each.dim() for each in parameters):
        return [each.full_tensor() if isinstance(each, DTensor) else each for each in tensors]
    return tensors


def _like_parameter(tensor: Any, parameter: Any, moved: list[Any]) -> Any:
    """Return a tensor in the layout of the parameter without pending reductions."""
    if not isinstance(parameter, DTensor):
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    layout = parameter._layout.relaid(partial={})
    if not isinstance(tensor, DTensor):
        if tensor.dim() == 0 and layout.ndim > 0:
            return tensor  # the number of steps
        tensor = DTensor.from_local(tensor, layout.mesh)
    if tensor._layout is layout:
        return tensor
    made = redistribute_to(tensor, layout)
    moved.append((tensor, made))
    return made


# ---- norms of many tensors, and the check for non-finite values: one collective for all tensors

_local_numel = TensorBase.numel


@handler("_foreach_norm", "_foreach_powsum")
def norms(func: Any, args: Any, kwargs: Any) -> tuple[torch.Tensor, ...]:
    """Compute the norm of each tensor, or its power, with one collective per mesh."""
    tensors, order, dtype = _bound(*args, **kwargs)
    is_root = func.__name__ == "_foreach_norm"
    if order == math.inf and any(each.numel() == 0 for each in tensors):
        raise RuntimeError(
            "_foreach_norm cannot compute the infinity norm on an empty tensor because the "
            "operation does not have an identity"
        )
    needs_grad = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
    if needs_grad or not order > 0:
        made = [torch.linalg.vector_norm(each, order, dtype=dtype) for each in tensors]
        return tuple(made if is_root else [each**order for each in made])
    results: list[Any] = [None] * len(tensors)
    by_mesh = _by_mesh(tensors)
    widest = _mesh_of_all_ranks(tuple(by_mesh))
    for mesh, positions in by_mesh.items():
        group = [tensors[at] for at in positions]
        if mesh is None:
            found = list(func(group, order, dtype=dtype))
        else:
            found = _norms_on(mesh, group, order, dtype, is_root)
            if widest is not None and widest is not mesh:
                found = [wrap(each, Layout(widest, ())) for each in found]
        for at, each in zip(positions, found, strict=True):
            results[at] = each
    return tuple(results)


def _bound(
    tensors: Any = None, ord: Any = 2, dtype: Any = None, *, self: Any = None
) -> tuple[Any, float, Any]:
    return self if tensors is None else tensors, float(ord), dtype


def _by_mesh(tensors: Sequence[torch.Tensor]) -> dict[DeviceMesh | None, Sequence[int]]:
    """Return the positions of the tensors on each mesh; plain tensors count under None."""
    try:
        return _by_mesh_of(tuple(map(_layout_of, tensors)))
    except AttributeError:  # a plain tensor among them
        return _by_mesh_of(tuple(getattr(each, "_layout", None) for each in tensors))


@lru_cache(maxsize=256)
def _by_mesh_of(layouts: tuple[Layout | None, ...]) -> dict[DeviceMesh | None, Sequence[int]]:
    found: dict[DeviceMesh | None, list[int]] = {}
    for at, layout in enumerate(layouts):
        found.setdefault(None if layout is None else layout.mesh, []).append(at)
    return dict(found)


@lru_cache(maxsize=256)
def _mesh_of_all_ranks(meshes: tuple[DeviceMesh | None, ...]) -> DeviceMesh | None:
    """Return the mesh that contains the ranks of all others.

    None if no mesh contains all others, or if there is only one mesh. All norms are returned on the
    widest mesh, so that norms of parameters on `mesh["dp"]` and on `mesh["dp", "tp"]` can be
    combined. A tensor on fewer ranks is the same along the other axes.
    """
    ranks = {mesh: set(mesh.mesh.flatten().tolist()) for mesh in meshes if mesh is not None}
    if len(ranks) < 2:
        return None
    found = max(ranks, key=lambda mesh: len(ranks[mesh]))
    return found if all(each <= ranks[found] for each in ranks.values()) else None


def _norms_on(
    mesh: DeviceMesh, tensors: list[Any], order: float, dtype: Any, is_root: bool
) -> list[DTensor]:
    layouts = tuple(map(_layout_of, tensors))
    axes, counts = _counted(layouts, mesh.get_coordinate())
    if counts is None:
        tensors = [_reduced(each) for each in tensors]
        return _norms_on(mesh, tensors, order, dtype, is_root)
    with as_local():
        made = _local_norms(tensors, order, dtype)
        if is_root and not axes:
            layout = Layout(mesh, ())
            return [wrap(each, layout) for each in made]
        dtypes = [each.dtype for each in made]
        kinds = set(dtypes)
        if short := [at for at, kind in enumerate(dtypes) if kind.itemsize < 4]:
            wide = _local_norms([tensors[at] for at in short], order, torch.float32)
            by_position = dict(zip(short, wide, strict=True))
            made = tuple(by_position.get(at, each) for at, each in enumerate(made))
        # In double precision: the square of a finite norm may overflow.
        values = torch.stack(made).double()
        if order == math.inf:
            if axes:
                values = communicator(mesh, axes).all_reduce(values, "max")
        else:
            if order != 1:
                values = values**order
            if axes:
                if 0 in counts:
                    values = values * vector_of(counts, values)
                values = communicator(mesh, axes).all_reduce(values, "sum")
            if is_root and order != 1:
                values = values ** (1 / order)
        if len(kinds) == 1:
            parts = list(values.to(dtypes[0]).unbind())
        else:
            parts = [part.to(each) for part, each in zip(values.unbind(), dtypes, strict=True)]
        layout = Layout(mesh, ())
        return [wrap(part, layout) for part in parts]


def _reduced(tensor: DTensor) -> DTensor:
    layout = tensor._layout
    return redistribute_to(tensor, layout.relaid(partial={})) if layout.partial else tensor


def _local_norms(tensors: list[Any], order: float, dtype: Any) -> tuple[torch.Tensor, ...]:
    if order == math.inf:  # torch refuses the maximum of an empty tensor
        tensors = [each if _local_numel(each) else each.new_zeros(1) for each in tensors]
    return torch._foreach_norm(tensors, order, dtype=dtype)


@lru_cache(maxsize=256)
def _counted(
    layouts: tuple[Layout, ...], place: tuple[int, ...] | None
) -> tuple[tuple[int, ...], tuple[float, ...] | None]:
    """Return the axes that split any of the tensors, and a weight for each tensor.

    Of the ranks that hold the same shard only the first counts: its weight is 1, the others' is 0.
    The weights are None if a reduction is pending.
    """
    if any(layout.partial for layout in layouts):
        return (), None
    axes = sorted(
        {
            axis
            for layout in layouts
            for each in layout.shard_order
            for axis in each
            if layout.mesh.shape[axis] > 1
        }
    )
    counts = []
    for layout in layouts:
        split = {axis for each in layout.shard_order for axis in each}
        is_first = place is None or all(place[axis] == 0 for axis in axes if axis not in split)
        counts.append(1.0 if is_first else 0.0)
    return tuple(axes), tuple(counts)


@handler("_amp_foreach_non_finite_check_and_unscale_")
def non_finite_check_and_unscale_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Unscale and check each rank's shards; `found_inf` is set if any rank finds one."""
    tensors, found_inf, inv_scale = (*args, *kwargs.values())
    pieces = [each for each in tensors if not _has_pending(each)]
    # A pending sum may overflow although no contribution does, so it is reduced first.
    sums = [each for each in tensors if _has_pending(each)]
    reduced = [_reduced(each) for each in sums]
    if isinstance(inv_scale, DTensor):
        inv_scale = inv_scale.full_tensor()
    with as_local():
        func([*pieces, *reduced], found_inf, inv_scale)
        for mesh in filter(None, _by_mesh(tensors)):
            found_inf.copy_(communicator(mesh).all_reduce(found_inf.detach().clone(), "max"))
    for tensor, whole in zip(sums, reduced, strict=True):
        tensor.copy_(whole)


def _has_pending(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor) and bool(tensor._layout.partial)
