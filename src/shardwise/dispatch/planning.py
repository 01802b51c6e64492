"""Planning a call: from a function and its arguments to an `Entry`. Paid once per kind of call."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch

from shardwise.dispatch.entry import (
    DispatchError,
    Entry,
    Path,
    check_writable,
    get,
    mark_severed,
)
from shardwise.dispatch.moving import Transfer, transfer
from shardwise.dispatch.state import PolicyError, state
from shardwise.errors import MeshError, ShardwiseError
from shardwise.layout import Layout
from shardwise.mesh import DeviceMesh
from shardwise.rules.choose import Choice, choose
from shardwise.rules.registry import Known, RuleError, name_of
from shardwise.rules.spec import Spec
from shardwise.tensor import DTensor, as_local

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class FallbackWarning(UserWarning):
    """An operator has no rule for a call, so its inputs are made whole."""


def plan(func: Any, known: Known | None, args: Args, kwargs: Kwargs) -> Entry:
    """How to run a call."""
    name = name_of(func)
    if kwargs.get("out") is not None:
        return _into_out(func, name, kwargs["out"])
    numbers = [each for each in _NUMBERS if isinstance(kwargs.get(each), torch.Tensor)]
    if numbers:
        return _with_numbers(func, name, numbers)
    paths = list(_tensor_paths(args, kwargs))
    tensors = [get(args, kwargs, path) for path in paths]
    mesh = common_mesh(name, tensors)
    check_plain(name, tensors)
    spec = None
    if known is not None and known.rule is not None:
        spec = known.rule(*args, **kwargs)
    if spec is not None:
        return _by_rule(func, known, name, spec, paths, tensors, mesh, args)
    return _whole(func, known, name, paths, tensors, mesh, args, kwargs)


def _by_rule(
    func: Any,
    known: Known | None,
    name: str,
    spec: Spec,
    paths: list[Path],
    tensors: list[torch.Tensor],
    mesh: DeviceMesh,
    args: Args,
) -> Entry:
    order = _matched(name, spec, tensors)
    layouts = [layout_of(tensor, mesh) for tensor, _ in spec.inputs]
    inplace = known is not None and known.outplace is not None
    keeps = layouts[0] if inplace and isinstance(args[0], DTensor) else None
    if inplace and keeps is None:
        raise DispatchError(
            f"{name}: cannot write a DTensor's values into a plain tensor in place; "
            "use full_tensor() or to_local() of the DTensor"
        )
    choice = choose(spec, layouts, mesh, keeps=keeps)
    if choice is None:
        assert known is not None and known.outplace is not None, "only a fixed result can fail"
        return _computed_aside(name, known.outplace, paths, keeps)
    run = func
    lowered = None if spec.lower is None else spec.lower(choice.here)
    if lowered is not None:
        if known is not None and known.outplace is not None and not spec.writes:
            return _computed_aside(name, known.outplace, paths, keeps)
        run = lowered
    moves = [
        (paths[at], how)
        for at, how in zip(order, _transfers(layouts, choice), strict=True)
        if how is not None
    ]
    first = (
        moves and moves[0][0] == paths[order[0]] and moves[0][1].source is not moves[0][1].target
    )
    return Entry(
        name,
        run,
        paths,
        moves,
        choice.outputs,
        plain=spec.needs_plain or (_is_python(func) if lowered is None else _needs_plain(lowered)),
        inplace=inplace,
        fresh=all(isinstance(tensor, DTensor) for tensor in tensors),
        severed=bool(spec.is_view and first),
    )


def _transfers(layouts: Sequence[Layout], choice: Choice) -> Iterator[Transfer | None]:
    for source, target, used_on in zip(layouts, choice.inputs, choice.used_on, strict=True):
        moves = source is not target or used_on
        yield transfer(source, target, used_on) if moves else None


def _computed_aside(
    name: str, outplace: Callable[..., Any], paths: list[Path], keeps: Layout | None
) -> Entry:
    """An in-place call whose result cannot be made where it must lie: make it, then copy it."""
    assert keeps is not None, "the target is a DTensor"

    def run(*args: Any, **kwargs: Any) -> Any:
        target = args[0]
        check_writable(name, target)
        if torch.is_grad_enabled() and target.requires_grad:
            args = (target.clone(), *args[1:])  # its gradient may need what is overwritten
        result = outplace(*args, **kwargs)
        if result.shape != keeps.size:
            raise RuntimeError(
                f"output with shape {list(keeps.shape)} doesn't match the broadcast shape "
                f"{list(result.shape)}"
            )
        if not torch.can_cast(result.dtype, target.dtype):
            raise RuntimeError(
                f"result type {result.dtype} can't be cast to the desired output type "
                f"{target.dtype}"
            )
        target.copy_(result)
        return target

    return AsIs(name, run)


_NUMBERS = ("alpha", "beta")
"""Keywords that are numbers to torch, which also takes tensors for them."""


def _with_numbers(func: Any, name: str, keywords: list[str]) -> Entry:
    def run(*args: Any, **kwargs: Any) -> Any:
        return func(*args, **{**kwargs, **{each: kwargs[each].item() for each in keywords}})

    return AsIs(name, run)


def _into_out(func: Any, name: str, out: Any) -> Entry:
    """A call with `out=`: make the result, then copy it to where it should lie."""
    single = isinstance(out, torch.Tensor)

    def run(*args: Any, out: Any, **kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        for made, target in zip(
            [result] if single else result, [out] if single else out, strict=True
        ):
            _copy_into(name, made, target)
        return out

    return AsIs(name, run)


def _copy_into(name: str, made: Any, target: torch.Tensor) -> None:
    if not isinstance(target, DTensor):
        raise DispatchError(
            f"{name}(out=): expected a DTensor, as the inputs are; got a plain tensor. "
            "Give out= a DTensor, or use to_local() or full_tensor() of the result"
        )
    if target.shape != made.shape:
        raise DispatchError(
            f"{name}(out=): expected a DTensor of shape {tuple(made.shape)}, "
            f"got {tuple(target.shape)}; a DTensor is not resized in place"
        )
    if not torch.can_cast(made.dtype, target.dtype):
        raise RuntimeError(
            f"result type {made.dtype} can't be cast to the desired output type {target.dtype}"
        )
    target.copy_(made)


class AsIs(Entry):
    """A call whose result is not re-typed: it is made of other calls."""

    __slots__ = ()

    def __init__(self, name: str, run: Callable[..., Any]) -> None:
        super().__init__(
            name, run, [], [], (), plain=False, inplace=False, fresh=True, severed=False
        )

    def __call__(self, args: Args, kwargs: Kwargs) -> Any:
        return self.run(*args, **kwargs)


# ---- no rule


def _whole(
    func: Any,
    known: Known | None,
    name: str,
    paths: list[Path],
    tensors: list[torch.Tensor],
    mesh: DeviceMesh,
    args: Args,
    kwargs: Kwargs,
) -> Entry:
    """Run an operator without a rule: on whole inputs, or by the operators it is made of."""
    copy = decomposed(func)
    if copy is not None:
        return AsIs(name, copy)
    if known is not None and known.outplace is not None:
        return _computed_aside(name, known.outplace, paths, layout_of(args[0], mesh))
    outplace = _outplace(func)
    if outplace is not None:
        if not isinstance(args[0], DTensor):
            raise DispatchError(f"{name}: cannot write a DTensor's values into a plain tensor")
        return _computed_aside(name, outplace, paths, layout_of(args[0], mesh))
    moves = []
    for path, tensor in zip(paths, tensors, strict=True):
        source = layout_of(tensor, mesh)
        if not source.is_replicated:
            moves.append((path, transfer(source, Layout(mesh, source.shape), ())))
    return WholeEntry(name, func, paths, moves, mesh)


class WholeEntry(Entry):
    """A call on whole inputs: the results are whole, whatever their shapes."""

    __slots__ = ("mesh",)

    def __init__(
        self,
        name: str,
        run: Any,
        paths: list[Path],
        moves: list[tuple[Path, Transfer]],
        mesh: DeviceMesh,
    ) -> None:
        super().__init__(
            name, run, paths, moves, (), plain=True, inplace=False, fresh=False, severed=False
        )
        self.mesh = mesh

    def __call__(self, args: Args, kwargs: Kwargs) -> Any:
        if self.moves:
            _report_fallback(self.name, [how.source for _, how in self.moves])
        return super().__call__(args, kwargs)

    def retyped(self, result: Any, operands: tuple[Any, ...] = ()) -> Any:
        results = list(_tensors_in(result))
        layouts = iter([Layout(self.mesh, tuple(each.shape)) for each in results])
        made = self._retyped(result, layouts, operands)
        if self.moves:
            # A view of an input that was moved is none of the input itself.
            inputs = {_memory(each) for each in _tensors_in(operands)} - {0}
            for each in _tensors_in(made):
                if _memory(each) in inputs:
                    mark_severed(each, self.name)
        return made


def _memory(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse tensors and the like have none
        return 0


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(each)


def _outplace(func: Any) -> Callable[..., Any] | None:
    """The function that returns a new tensor, of one that changes its first argument."""
    name = getattr(func, "__name__", "")
    if not name.endswith("_") or name.endswith("__"):
        return None
    found = getattr(torch.Tensor, name[:-1], None)
    return found if callable(found) else None


def _report_fallback(name: str, layouts: Sequence[Layout]) -> None:
    if state.fallback == "replicate":
        return
    lies = ", ".join(map(repr, layouts))
    text = (
        f"{name} has no rule for inputs that lie so: {lies}; they are made whole and every rank "
        "computes all of it"
    )
    if state.fallback == "error":
        raise PolicyError(
            f"{text}, which sw.fallback('error') forbids. Register a rule with "
            "sw.register_rule, or redistribute the inputs to Replicate()"
        )
    file, line = user_line()
    if (name, file, line) not in state.warned:
        state.warned.add((name, file, line))
        warnings.warn_explicit(
            f"{text}. sw.register_rule adds a rule, sw.fallback('replicate') silences this",
            FallbackWarning,
            file,
            line,
        )


_ROOTS = tuple(
    path.rpartition("/")[0] + "/" for path in (torch.__file__, __file__.rpartition("/")[0])
)


def user_line() -> tuple[str, int]:
    """The innermost line that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_ROOTS):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


# ---- functions that torch wrote in Python are made of others


@lru_cache(maxsize=4096)
def decomposed(func: Any) -> Callable[..., Any] | None:
    """A torch function written in Python, without its first question whether an argument
    overrides it: then the functions it calls are what is dispatched."""
    func = getattr(func, "__wrapped__", func)
    if not isinstance(func, types.FunctionType) or not func.__module__.startswith("torch"):
        return None
    names = {name for name in func.__code__.co_names if name.startswith("has_torch_function")}
    if not names or "overrides" in func.__code__.co_names:  # asked through its module
        return None
    changed = {**func.__globals__, **dict.fromkeys(names, _never)}
    copy = types.FunctionType(
        func.__code__, changed, func.__name__, func.__defaults__, func.__closure__
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _never(*args: Any) -> bool:
    return False


# ---- the arguments


def _tensor_paths(args: Args, kwargs: Kwargs) -> Iterator[Path]:
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


def check_plain(name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Refuse plain tensors, if that is the policy."""
    if state.plain_tensors == "error":
        for tensor in tensors:
            if not isinstance(tensor, DTensor) and tensor.dim() > 0:
                raise PolicyError(
                    f"{name}: got a plain tensor of shape {tuple(tensor.shape)} beside a DTensor, "
                    "which sw.plain_tensors('error') forbids; make it one with "
                    "DTensor.from_local(x, mesh) if every rank has the same"
                )


def _matched(name: str, spec: Spec, tensors: list[torch.Tensor]) -> list[int]:
    """The positions among a call's tensors of the spec's inputs."""
    free = list(range(len(tensors)))
    found = []
    for tensor, dims in spec.inputs:
        at = next((at for at in free if tensors[at] is tensor), None)
        if at is None:
            raise RuleError(f"{name}: its rule speaks of a tensor that is no argument")
        if len(dims) != tensor.dim():
            raise RuleError(
                f"{name}: its rule gives {len(dims)} factors to an input of {tensor.dim()} dims"
            )
        free.remove(at)
        found.append(at)
    if free:
        raise RuleError(f"{name}: its rule forgets {len(free)} of {len(tensors)} tensors")
    return found


_BUILTIN = type(torch.layer_norm)
"""torch's own functions see the shard that a DTensor is; others may ask it for its shape."""


def _needs_plain(lowered: Callable[..., Any]) -> bool:
    return type(lowered) is not _BUILTIN and not getattr(lowered, "takes_shards", False)


def _is_python(func: Any) -> bool:
    """Whether Python code runs on the tensors, now or in the backward: it must not meet DTensors
    where it computes with local tensors."""
    if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return not str(func).startswith("aten.")
    return hasattr(func, "__code__")


# ---- torch's own errors, about global shapes


def on_meta(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run a function on tensors without data, of the global shapes; for its error."""

    def meta(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            shape = value._layout.shape if isinstance(value, DTensor) else tuple(value.shape)
            with as_local():
                return torch.empty(shape, dtype=value.dtype, device="meta")
        if isinstance(value, list | tuple):
            parts = [meta(each) for each in value]
            return parts if isinstance(value, list) else tuple(parts)
        return value

    given = [meta(arg) for arg in args]
    with as_local(), torch.no_grad():
        return func(*given, **{name: meta(arg) for name, arg in kwargs.items()})
