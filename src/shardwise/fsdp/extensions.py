"""Gather extensions: functions of a parameter that define the tensors to gather for it.

`fsdp_pre_all_gather` makes the tensors to gather from this rank's shard, such as a quantised copy
and its scales; `fsdp_post_all_gather` makes the parameter from the tensors of all ranks. They are
methods of the parameter's tensor subclass, or functions set as attributes of the parameter; in
both cases they are called as methods of the shard, a plain tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from shardwise.core.mesh import DeviceMesh
from shardwise.dtensor.tensor import DTensor
from shardwise.fsdp.config import MixedPrecisionPolicy
from shardwise.fsdp.errors import FSDPError

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
RELEASE = "fsdp_should_release_all_gather_outputs_after_post_all_gather"


@dataclass(frozen=True)
class GatherExtension:
    """The gather functions of a parameter.

    Arguments:
        pre_all_gather: `fsdp_pre_all_gather`, with the shard as first argument.
        post_all_gather: `fsdp_post_all_gather`, with the shard as first argument.
        takes_mesh_only: whether `pre_all_gather` has torch's older signature `(shard, mesh)`.
        releases_outputs: whether the parameter that `post_all_gather` makes does not need the
            memory of the gathered tensors.
    """

    pre_all_gather: Callable[..., Any]
    post_all_gather: Callable[..., Any]
    takes_mesh_only: bool
    releases_outputs: bool = False

    def make_inputs(
        self,
        name: str,
        shard: torch.Tensor,
        mesh: DeviceMesh,
        size: Sequence[int],
        strides: tuple[int, ...],
        module: nn.Module,
        policy: MixedPrecisionPolicy,
    ) -> tuple[list[torch.Tensor], Any]:
        """Return the tensors that this rank sends, and the metadata that it keeps.

        Arguments:
            name: the parameter's name, for errors.
            mesh: the ranks that hold its shards.
            size: the size of the gathered parameter.
            strides: the strides of the gathered parameter.
        """
        if self.takes_mesh_only:
            found = self.pre_all_gather(shard, mesh)
        else:
            found = self.pre_all_gather(shard, mesh, torch.Size(size), strides, module, policy)
        tensors = found[0] if isinstance(found, tuple | list) and len(found) == 2 else None
        if _is_plain(tensors):
            tensors = (tensors,)
        if not isinstance(tensors, tuple | list) or not tensors or not all(map(_is_plain, tensors)):
            raise FSDPError(
                f"{name}: {PRE} must return (tensors to gather, metadata), the first a tuple of "
                f"plain tensors; got {_format_types(found)}"
            )
        for each in tensors:
            if each.device != shard.device:
                raise FSDPError(
                    f"{name}: {PRE} must return tensors on {shard.device}, where the shard is; got "
                    f"one on {each.device}"
                )
        # A scalar becomes a list of one element, so that it can be joined along dim 0.
        return [each.detach().reshape(each.shape or (1,)) for each in tensors], found[1]

    def make_param(
        self,
        name: str,
        shard: torch.Tensor,
        gathered: Sequence[torch.Tensor],
        metadata: Any,
        dtype: torch.dtype,
        shape: tuple[int, ...],
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the gathered parameter, and the tensors that it is made of.

        Arguments:
            gathered: the tensors of all ranks, joined along dim 0.
            metadata: the metadata that `make_inputs` returned.
            dtype: the dtype that the parameter must have.
            shape: the shape that the parameter must have.
        """
        found = self.post_all_gather(shard, tuple(gathered), metadata, dtype)
        is_pair = isinstance(found, tuple | list) and len(found) == 2
        inner = found[1] if is_pair else None
        is_valid = isinstance(inner, tuple | list) and all(
            isinstance(each, torch.Tensor) for each in (found[0], *inner)
        )
        if not is_valid or inner is None:
            raise FSDPError(
                f"{name}: {POST} must return (parameter, tensors to free), a tensor and a tuple of "
                f"tensors; got {_format_types(found)}"
            )
        parameter = found[0]
        # Ranks may send padded shards, so that the last rows are no part of the parameter.
        is_padded = bool(shape) and parameter.dim() > 0 and parameter.shape[0] > shape[0]
        has_shape = tuple(parameter.shape[is_padded:]) == shape[is_padded:]
        if not has_shape or parameter.dtype is not dtype:
            raise FSDPError(
                f"{name}: {POST} must return a parameter of {dtype} {shape}, got "
                f"{parameter.dtype} {tuple(parameter.shape)}"
            )
        return parameter, list(inner)

    def refill_param(
        self,
        name: str,
        shard: torch.Tensor,
        gathered: Sequence[torch.Tensor],
        metadata: Any,
        dtype: torch.dtype,
        out: torch.Tensor,
    ) -> None:
        """Write the values of a parameter again. `make_param` has made the parameter; its memory
        was freed and allocated again."""
        found = self.post_all_gather(shard, tuple(gathered), metadata, dtype, out=out)
        if found is not None:
            raise FSDPError(
                f"{name}: {POST} must write to `out` if that is given, and return None; got "
                f"{_format_types(found)}"
            )


def check_can_be_split(parameter: torch.Tensor, name: str) -> None:
    """Raise `FSDPError` if a parameter has no memory of its own that can be split."""
    if parameter.is_quantized or parameter.is_nested or parameter.layout is not torch.strided:
        kind = "quantized" if parameter.is_quantized else "nested" if parameter.is_nested else None
        raise FSDPError(
            f"{name}: expected a dense tensor, got a {kind or parameter.layout} one, which cannot "
            "be split; convert it, or leave it out with ignored_params"
        )
    if isinstance(parameter, DTensor) or extension_of(parameter, name) is not None:
        return
    cls = type(parameter)
    if cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        parts = ", ".join(inner_names(parameter))
        raise FSDPError(
            f"{name}: it is a {cls.__name__}, a tensor subclass that is made of other tensors"
            f"{f' ({parts})' if parts else ''} and does not say how to gather them; define "
            f"{PRE} and {POST}, or leave it out with ignored_params"
        )


def extension_of(parameter: torch.Tensor, name: str) -> GatherExtension | None:
    """Return the gather functions of a parameter that is about to be sharded, if it has any."""
    pre, post, release = (getattr(parameter, each, None) for each in (PRE, POST, RELEASE))
    if pre is None and post is None:
        if release is not None:
            raise FSDPError(f"{name}: it has {RELEASE}, and neither {PRE} nor {POST}; define both")
        return None
    if not callable(pre) or not callable(post):
        missing, present = (PRE, POST) if not callable(pre) else (POST, PRE)
        raise FSDPError(
            f"{name}: it has {present} and no function {missing}; define both, as methods of its "
            "class or as attributes of the parameter, or neither"
        )
    own = vars(parameter)
    subclass = _TensorSubclass.of(parameter, name) if PRE not in own or POST not in own else None
    pre_of_shard, post_of_shard = (
        own.get(each) or _SubclassMethod(subclass, each) for each in (PRE, POST)
    )
    shard = PRE in own  # a function gets the shard as an argument; a bound method has it already
    takes_all = _accepts(pre, shard + 5)
    if not takes_all and not _accepts(pre, shard + 1):
        raise FSDPError(
            f"{name}: {PRE} must take (mesh, outer_size, outer_stride, module, mp_policy) or "
            f"(mesh), after the shard; got {inspect.signature(pre)}"
        )
    releases = _releases_outputs(parameter, release, name)
    return GatherExtension(pre_of_shard, post_of_shard, not takes_all, releases)


def _releases_outputs(parameter: torch.Tensor, release: Any, name: str) -> bool:
    """Ask a parameter whether the gathered tensors may be freed once it is made."""
    if release is None:
        return False
    if not callable(release):
        raise FSDPError(f"{name}: {RELEASE} must be a function, got {release!r}")
    is_function = RELEASE in vars(parameter) and _accepts(release, 1)
    found: Any = release(parameter) if is_function else release()
    if not isinstance(found, bool):
        raise FSDPError(f"{name}: {RELEASE} must return True or False, got {found!r}")
    return found


def values_of(parameter: torch.Tensor, name: str) -> torch.Tensor:
    """Return the values of a parameter with an extension, as a plain tensor."""
    if isinstance(parameter, DTensor) or type(parameter) in (torch.Tensor, nn.Parameter):
        return parameter
    return _TensorSubclass.of(parameter, name).values(parameter)


def inner_names(parameter: torch.Tensor) -> Sequence[str]:
    """Return the names of the attributes in which a wrapper subclass keeps its tensors."""
    flatten = getattr(parameter, "__tensor_flatten__", None)
    return () if flatten is None else flatten()[0]


@dataclass(frozen=True)
class _TensorSubclass:
    """A tensor subclass that a plain shard can be converted to.

    Arguments:
        cls: the class.
        inner: for a wrapper subclass, the attribute that holds the wrapped tensor.
        context: for a wrapper subclass, the context that `__tensor_flatten__` returns.
        empty: for a wrapper subclass whose `__tensor_unflatten__` does not give one from its parts,
            an empty one. Its own operators make others of it.
    """

    cls: Any
    inner: str | None = None
    context: Any = None
    empty: Any = None

    @staticmethod
    def of(parameter: Any, name: str) -> _TensorSubclass:
        cls = type(parameter)
        names = inner_names(parameter)
        if not names:
            return _TensorSubclass(cls)
        inner = getattr(parameter, names[0])
        if len(names) > 1 or inner.shape != parameter.shape or inner.dtype != parameter.dtype:
            raise FSDPError(
                f"{name}: {cls.__name__} is made of {', '.join(names)}; expected one tensor of "
                "its own shape and dtype, which can be split"
            )
        made = _TensorSubclass(cls, names[0], parameter.__tensor_flatten__()[1])
        unflatten = getattr(cls, "__tensor_unflatten__", None)
        with torch.no_grad():
            takes_parts = unflatten is not None and _accepts(unflatten, 4)
            if takes_parts and isinstance(made(inner.detach()), cls):
                return made
            empty = parameter.detach().new_empty((0,) * parameter.dim())
        if not isinstance(empty, cls) or not hasattr(empty, names[0]):
            raise FSDPError(
                f"{name}: a {cls.__name__} cannot be made of its shard; define "
                "__tensor_unflatten__(inner_tensors, context, outer_size, outer_stride), which "
                f"returns a {cls.__name__}"
            )
        return replace(made, empty=empty)

    def values(self, tensor: Any) -> torch.Tensor:
        found = tensor if self.inner is None else getattr(tensor, self.inner)
        return found.detach().as_subclass(torch.Tensor)  # type: ignore[no-any-return]

    def __call__(self, shard: torch.Tensor) -> Any:
        if self.inner is None:
            return shard.as_subclass(self.cls)
        if self.empty is not None:
            result = self.empty.new_empty(shard.shape, device=shard.device)
            setattr(result, self.inner, shard)
            return result
        parts = {self.inner: shard}
        return self.cls.__tensor_unflatten__(parts, self.context, shard.shape, shard.stride())


@dataclass(frozen=True)
class _SubclassMethod:
    """A method of a tensor subclass, as a function of a plain shard."""

    subclass: Any
    name: str

    def __call__(self, shard: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.subclass(shard), self.name)(*args, **kwargs)


def _accepts(function: Callable[..., Any], count: int) -> bool:
    """Return whether a function can be called with `count` positional arguments."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    return True


def _is_plain(value: Any) -> bool:
    return type(value) in (torch.Tensor, nn.Parameter)


def _format_types(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_format_types, value))})"
    return repr(value) if value is None else type(value).__name__
