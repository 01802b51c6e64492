"""Extensions: parameters that say themselves what travels when they are gathered.

`fsdp_pre_all_gather` makes of this rank's shard the tensors to gather, such as a quantised copy and
its scales; `fsdp_post_all_gather` makes the parameter of what has come from all ranks. They are
methods of a tensor subclass that the parameter is of, or functions set as attributes of the
parameter; either way they are called as methods of the shard, a plain tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.fsdp.errors import FSDPError
from shardwise.fsdp.policies import MixedPrecisionPolicy
from shardwise.mesh import DeviceMesh
from shardwise.tensor import DTensor

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"
RELEASE = "fsdp_should_release_all_gather_outputs_after_post_all_gather"


@dataclass(frozen=True)
class Extension:
    """What a parameter says about its gathering.

    Arguments:
        before: called with the shard, and then as `fsdp_pre_all_gather` is.
        after: called with the shard, and then as `fsdp_post_all_gather` is.
        is_short: whether `before` gets the mesh and nothing else, as it did once.
        releases_outputs: whether what `after` makes needs nothing of what it was made of.
    """

    before: Callable[..., Any]
    after: Callable[..., Any]
    is_short: bool
    releases_outputs: bool = False

    def inputs(
        self,
        name: str,
        shard: torch.Tensor,
        mesh: DeviceMesh,
        whole: tuple[Sequence[int], tuple[int, ...]],
        module: nn.Module,
        policy: MixedPrecisionPolicy,
    ) -> tuple[list[torch.Tensor], Any]:
        """What this rank sends of a parameter, and what it keeps for `result`.

        Arguments:
            name: of the parameter.
            mesh: of the ranks that hold its pieces.
            whole: size and strides of the gathered one.
        """
        if self.is_short:
            found = self.before(shard, mesh)
        else:
            found = self.before(shard, mesh, torch.Size(whole[0]), whole[1], module, policy)
        tensors = found[0] if isinstance(found, tuple | list) and len(found) == 2 else None
        if not isinstance(tensors, tuple | list) or not tensors or not all(map(_is_plain, tensors)):
            raise FSDPError(
                f"{name}: {PRE} must return (tensors to gather, metadata), the first a tuple of "
                f"plain tensors; got {_shown(found)}"
            )
        for each in tensors:
            if each.device != shard.device:
                raise FSDPError(
                    f"{name}: {PRE} must return tensors on {shard.device}, where the shard is; got "
                    f"one on {each.device}"
                )
        # A number is a list of one, so that there is something to join along.
        return [each.detach().reshape(each.shape or (1,)) for each in tensors], found[1]

    def result(
        self,
        name: str,
        shard: torch.Tensor,
        gathered: Sequence[torch.Tensor],
        metadata: Any,
        dtype: torch.dtype,
        shape: tuple[int, ...],
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The gathered parameter, and tensors that it is made of."""
        found = self.after(shard, tuple(gathered), metadata, dtype)
        is_pair = isinstance(found, tuple | list) and len(found) == 2
        inner = found[1] if is_pair else None
        is_right = isinstance(inner, tuple | list) and all(
            isinstance(each, torch.Tensor) for each in (found[0], *inner)
        )
        if not is_right or inner is None:
            raise FSDPError(
                f"{name}: {POST} must return (parameter, tensors to free), a tensor and a tuple of "
                f"tensors; got {_shown(found)}"
            )
        whole = found[0]
        if tuple(whole.shape) != shape or whole.dtype is not dtype:
            raise FSDPError(
                f"{name}: {POST} must return a parameter of {dtype} {shape}, got {whole.dtype} "
                f"{tuple(whole.shape)}"
            )
        return whole, list(inner)

    def renew(
        self,
        name: str,
        shard: torch.Tensor,
        gathered: Sequence[torch.Tensor],
        metadata: Any,
        dtype: torch.dtype,
        out: torch.Tensor,
    ) -> None:
        """Fill a parameter that `result` has made, whose memory is there again."""
        found = self.after(shard, tuple(gathered), metadata, dtype, out=out)
        if found is not None:
            raise FSDPError(
                f"{name}: {POST} must write to `out` if that is given, and return None; got "
                f"{_shown(found)}"
            )


def extension_of(parameter: torch.Tensor, name: str) -> Extension | None:
    """What a parameter, that is about to be sharded, says about its gathering."""
    before, after, release = (getattr(parameter, each, None) for each in (PRE, POST, RELEASE))
    if before is None and after is None:
        if release is not None:
            raise FSDPError(f"{name}: it has {RELEASE}, and neither {PRE} nor {POST}; define both")
        return None
    if not callable(before) or not callable(after):
        missing, there = (PRE, POST) if not callable(before) else (POST, PRE)
        raise FSDPError(
            f"{name}: it has {there} and no function {missing}; define both, as methods of its "
            "class or as attributes of the parameter, or neither"
        )
    own = vars(parameter)
    remade = _Remade.of(parameter, name) if PRE not in own or POST not in own else None
    before_shard, after_shard = (own.get(each) or _Method(remade, each) for each in (PRE, POST))
    shard = PRE in own  # the methods of a class have it already
    is_long = _takes(before, shard + 5)
    if not is_long and not _takes(before, shard + 1):
        raise FSDPError(
            f"{name}: {PRE} must take (mesh, outer_size, outer_stride, module, mp_policy) or "
            f"(mesh), after the shard; got {inspect.signature(before)}"
        )
    return Extension(before_shard, after_shard, not is_long, _releases(parameter, release, name))


def _releases(parameter: torch.Tensor, release: Any, name: str) -> bool:
    """What a parameter says about the memory of what was gathered of it."""
    if release is None:
        return False
    if not callable(release):
        raise FSDPError(f"{name}: {RELEASE} must be a function, got {release!r}")
    is_function = RELEASE in vars(parameter) and _takes(release, 1)
    found: Any = release(parameter) if is_function else release()
    if not isinstance(found, bool):
        raise FSDPError(f"{name}: {RELEASE} must return True or False, got {found!r}")
    return found


def values_of(parameter: torch.Tensor, name: str) -> torch.Tensor:
    """The values of a parameter with an extension, as a plain tensor."""
    if isinstance(parameter, DTensor) or type(parameter) in (torch.Tensor, nn.Parameter):
        return parameter
    return _Remade.of(parameter, name).values(parameter)


def inner_names(parameter: torch.Tensor) -> Sequence[str]:
    """The attributes of a tensor that has others in it, which hold these."""
    flatten = getattr(parameter, "__tensor_flatten__", None)
    return () if flatten is None else flatten()[0]


@dataclass(frozen=True)
class _Remade:
    """A tensor subclass, of which shards can be made.

    Arguments:
        kind: the class.
        inner: of a tensor that has another in it, the attribute that holds that.
        context: what else it is made of.
    """

    kind: Any
    inner: str | None
    context: Any

    @staticmethod
    def of(parameter: Any, name: str) -> _Remade:
        kind = type(parameter)
        names = inner_names(parameter)
        if not names:
            return _Remade(kind, None, None)
        inner = getattr(parameter, names[0])
        if len(names) > 1 or inner.shape != parameter.shape or inner.dtype != parameter.dtype:
            raise FSDPError(
                f"{name}: {kind.__name__} is made of {', '.join(names)}; expected one tensor of "
                "its own shape and dtype, which can be split"
            )
        return _Remade(kind, names[0], parameter.__tensor_flatten__()[1])

    def values(self, tensor: Any) -> torch.Tensor:
        found = tensor if self.inner is None else getattr(tensor, self.inner)
        return found.detach().as_subclass(torch.Tensor)  # type: ignore[no-any-return]

    def __call__(self, shard: torch.Tensor) -> Any:
        if self.inner is None:
            return shard.as_subclass(self.kind)
        parts = {self.inner: shard}
        return self.kind.__tensor_unflatten__(parts, self.context, shard.shape, shard.stride())


@dataclass(frozen=True)
class _Method:
    """A method of a tensor subclass, called with a plain shard as that."""

    remade: Any
    name: str

    def __call__(self, shard: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.remade(shard), self.name)(*args, **kwargs)


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Whether it can be called with so many arguments."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    return True


def _is_plain(value: Any) -> bool:
    return type(value) in (torch.Tensor, nn.Parameter)


def _shown(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_shown, value))})"
    return repr(value) if value is None else type(value).__name__
