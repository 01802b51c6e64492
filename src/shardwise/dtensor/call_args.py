"""The arguments of a call: the paths to its tensors, their common mesh, and checks of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from shardwise.core.errors import DispatchError, MeshError, PolicyError
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh
from shardwise.dtensor.local_shards import check_class, differing_ranks
from shardwise.dtensor.state import state
from shardwise.dtensor.tensor import DTensor

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

ArgPath = tuple[int | str, ...]
"""The path to a tensor among arguments: position or keyword, then positions in nested lists."""


# ---- paths


def tensor_paths(args: Args, kwargs: Kwargs) -> Iterator[ArgPath]:
    """Yield the paths to the tensors of a call."""
    for at, arg in enumerate(args):
        yield from _paths_in(arg, (at,))
    for name, arg in kwargs.items():
        yield from _paths_in(arg, (name,))


def _paths_in(value: Any, path: ArgPath) -> Iterator[ArgPath]:
    if isinstance(value, torch.Tensor):
        yield path
    elif isinstance(value, list | tuple):
        for at, each in enumerate(value):
            yield from _paths_in(each, (*path, at))


def argument_at(args: Args, kwargs: Kwargs, path: ArgPath) -> Any:
    """Return the argument at a path."""
    first, *rest = path
    value: Any = kwargs[first] if isinstance(first, str) else args[first]
    for at in rest:
        value = value[at]
    return value


def with_argument_at(args: Args, kwargs: Kwargs, path: ArgPath, value: Any) -> tuple[Args, Kwargs]:
    """Return the arguments with another value at a path."""
    positional, keywords = list(args), dict(kwargs)
    replace_argument(positional, keywords, path, lambda _: value)
    return tuple(positional), keywords


def replace_argument(
    positional: list[Any], keywords: Kwargs, path: ArgPath, change: Callable[[Any], Any]
) -> None:
    """Replace the argument at a path by what `change` makes of it; nested lists are copied."""
    first, *rest = path
    container: Any = keywords if isinstance(first, str) else positional
    if rest:
        container[first] = _changed(container[first], rest, change)
    else:
        container[first] = change(container[first])


def _changed(value: Any, path: list[int | str], change: Callable[[Any], Any]) -> Any:
    parts = list(value)
    at, *rest = path
    assert isinstance(at, int), "lists have positions"
    parts[at] = _changed(parts[at], rest, change) if rest else change(parts[at])
    return parts if isinstance(value, list) else type(value)(parts)


# ---- layouts


def layout_of(tensor: torch.Tensor, mesh: DeviceMesh) -> Layout:
    """Return the layout of a tensor on a mesh; a plain tensor is replicated."""
    if isinstance(tensor, DTensor):
        layout = tensor._layout
        return layout if layout.mesh is mesh else Layout(mesh, layout.shape)
    return Layout(mesh, tuple(tensor.shape))


def common_mesh(name: str, tensors: Sequence[torch.Tensor]) -> DeviceMesh:
    """Return the mesh of the DTensors of a call.

    A replicated DTensor may be on another mesh of the same ranks.
    """
    layouts = [tensor._layout for tensor in tensors if isinstance(tensor, DTensor)]
    split = [layout for layout in layouts if not layout.is_replicated] or layouts
    mesh = split[0].mesh
    for layout in layouts:
        if layout.mesh is mesh:
            continue
        same = sorted(layout.mesh.mesh.flatten().tolist()) == sorted(mesh.mesh.flatten().tolist())
        if not (same and layout.is_replicated):
            raise MeshError(
                f"{name}: expected DTensors on one mesh, got {split[0]!r} on {mesh!r} and "
                f"{layout!r} on {layout.mesh!r}; move one with x.redistribute(mesh, placements)"
            )
    return mesh


# ---- checks


def check_dense_arguments(name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Refuse plain tensors that are sparse, or of a class with operators of its own: no layout
    describes their pieces."""
    for tensor in tensors:
        check_class(name, tensor)
        if tensor.layout != torch.strided:
            raise DispatchError(
                f"{name}: got a plain tensor with layout {tensor.layout} beside a DTensor, which "
                "is dense; to_dense() it, or run the operator on pieces with sw.local_map"
            )


def check_plain_tensors(name: str, tensors: Sequence[torch.Tensor], mesh: DeviceMesh) -> None:
    """Apply the policy of `sw.plain_tensors` to the plain tensors of a call."""
    if state.plain_tensors == "error":
        for tensor in tensors:
            if not isinstance(tensor, DTensor) and tensor.dim() > 0:
                raise PolicyError(
                    f"{name}: got a plain tensor of shape {tuple(tensor.shape)} beside a DTensor, "
                    "which sw.plain_tensors('error') forbids; make it one with "
                    "DTensor.from_local(x, mesh) if every rank has the same"
                )
    elif state.plain_tensors == "check":
        for tensor in tensors:
            if not isinstance(tensor, DTensor):
                check_same_on_ranks(name, tensor, mesh)


def check_same_on_ranks(name: str, tensor: torch.Tensor, mesh: DeviceMesh) -> None:
    """Refuse a plain tensor that differs between the ranks of a mesh; all its ranks call this."""
    if tensor.is_meta:
        return
    kind = f"{tuple(tensor.shape)} {tensor.dtype}".encode()
    plain = tensor.detach().resolve_conj().resolve_neg()
    values = plain.cpu().contiguous().view(-1).view(torch.uint8).numpy()
    others, same = differing_ranks(mesh, kind + values.tobytes())
    if others:
        raise PolicyError(
            f"{name}: got a plain tensor of shape {tuple(tensor.shape)} that is another one on "
            f"ranks {others} of {mesh!r} than on ranks {same}, and is taken for the same on all; "
            "if each has its own part, as of a batch, say DTensor.from_local(x, mesh, placements)"
        )
