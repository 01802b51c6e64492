"""The arguments of a call: where its tensors stand, how they lie, and which are refused."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch

from shardwise.agreement import disagreeing
from shardwise.dispatch.entry import Path
from shardwise.dispatch.state import state
from shardwise.errors import DispatchError, MeshError
from shardwise.layout import Layout
from shardwise.mesh import DeviceMesh
from shardwise.policy import PolicyError
from shardwise.rules.registry import Known
from shardwise.tensor import DTensor
from shardwise.torch_internals import OpOverload, schema_of


def tensor_paths(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Path]:
    """Where the tensors of a call stand."""
    for at, arg in enumerate(args):
        yield from _paths_in(arg, (at,))
    for name, arg in kwargs.items():
        yield from _paths_in(arg, (name,))


def _paths_in(value: Any, path: Path) -> Iterator[Path]:
    if isinstance(value, torch.Tensor):
        yield path
    elif isinstance(value, list | tuple):
        for at, each in enumerate(value):
            yield from _paths_in(each, (*path, at))


_NUMPYS_NAMES = {"axis": "dim", "keepdims": "keepdim"}


def by_torchs_names(func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keywords under torch's names, where its C++ takes numpy's too; rules know only the former."""
    if not isinstance(func, BuiltinFunctionType | MethodDescriptorType):
        return kwargs
    if "quantize" in func.__name__ or func is torch.segment_reduce:  # where the axis is called so
        return kwargs
    return {_NUMPYS_NAMES.get(name, name): each for name, each in kwargs.items()}


_INPUTS = ("input", "self", "A", "x")
"""What torch calls the first operand, where a rule has another name for it."""


def by_position(
    func: Any, known: Known | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments that were named, in their places, by which lowerings know operands.

    All of an aten operator's, whose schema tells the places; of others the first, if it is what
    the rule begins with, or what is written to.
    """
    given, rest = list(args), dict(kwargs)
    if isinstance(func, OpOverload):
        for name in _places(func)[len(args) :]:
            if name not in rest:
                break
            given.append(rest.pop(name))
        return tuple(given), rest
    if args or known is None or known.rule is None:
        return args, kwargs
    names = _inputs(known.rule)
    if known.outplace is not None:
        names = (*names, *_INPUTS)
    found = next((each for each in names if each in rest), None)
    return (args, kwargs) if found is None else ((rest.pop(found),), rest)


@lru_cache(maxsize=4096)
def _places(operator: OpOverload) -> tuple[str, ...]:
    return tuple(each.name for each in schema_of(operator).arguments if not each.kwarg_only)


@lru_cache(maxsize=4096)
def _inputs(rule: Any) -> tuple[str, ...]:
    """What a rule's first argument may be called; nothing if it takes any arguments."""
    first, *others = inspect.signature(rule).parameters.values()
    if first.kind is first.VAR_POSITIONAL:
        return ()
    taken = {each.name for each in others}
    return (first.name, *(each for each in _INPUTS if each not in taken))


def layout_of(tensor: torch.Tensor, mesh: DeviceMesh) -> Layout:
    """How a tensor lies; a plain one is whole."""
    if isinstance(tensor, DTensor):
        layout = tensor._layout
        return layout if layout.mesh is mesh else Layout(mesh, layout.shape)
    return Layout(mesh, tuple(tensor.shape))


def common_mesh(name: str, tensors: Sequence[torch.Tensor]) -> DeviceMesh:
    """The mesh that the DTensors of a call lie on.

    Those that are whole may lie on another one of the same ranks.
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


def check_dense(name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Refuse plain tensors that are sparse: no layout can tell of their pieces."""
    for tensor in tensors:
        if tensor.layout != torch.strided:
            raise DispatchError(
                f"{name}: got a plain tensor with layout {tensor.layout} beside a DTensor, which "
                "is dense; to_dense() it, or run the operator on pieces with sw.local_map"
            )


def check_plain(name: str, tensors: Sequence[torch.Tensor], mesh: DeviceMesh) -> None:
    """Refuse plain tensors, or those that differ between ranks, if that is the policy."""
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
                check_same(name, tensor, mesh)


def check_same(name: str, tensor: torch.Tensor, mesh: DeviceMesh) -> None:
    """Refuse a plain tensor that is not the same on every rank of the mesh; all of them call it."""
    if tensor.is_meta:
        return
    kind = f"{tuple(tensor.shape)} {tensor.dtype}".encode()
    plain = tensor.detach().resolve_conj().resolve_neg()
    values = plain.cpu().contiguous().view(-1).view(torch.uint8).numpy()
    others, same = disagreeing(mesh, kind + values.tobytes())
    if others:
        raise PolicyError(
            f"{name}: got a plain tensor of shape {tuple(tensor.shape)} that is another one on "
            f"ranks {others} of {mesh!r} than on ranks {same}, and is taken for the same on all; "
            "if each has its own part, as of a batch, say DTensor.from_local(x, mesh, placements)"
        )


def check_target(name: str, target: Any) -> None:
    """Refuse a plain tensor as what an operator in place writes to."""
    if not isinstance(target, DTensor):
        raise DispatchError(
            f"{name}: cannot write a DTensor's values into a plain tensor in place; "
            "use full_tensor() or to_local() of the DTensor, or write to a DTensor: "
            "x.new_empty(...), torch.empty_like(x), sw.empty(..., device_mesh=...)"
        )
