"""Context parallelism: each rank has a part of the sequence, and attention sees all of it.

Two ways to say so, both torch's. Within `context_parallel(mesh, buffers=...)`, buffers are this
rank's part of the sequence, and every `scaled_dot_product_attention` is attention over the whole
sequence. Or `context_parallel_shard` cuts the inputs, and the style `ContextParallel` does the same
for the attention in one module.

Keys and values are gathered over the mesh; queries stay where they are. Forward: an all-gather of
keys and values. Backward: a reduce-scatter of their gradients. So a rank computes its share of the
attention, and holds the keys and values of the whole sequence for each attention until the backward
has passed. Ring attention, which holds a part of them at a time, is not built.

With the causal mask, late positions attend to more keys than early ones. So a sequence whose length
is a multiple of twice the number of ranks is cut into twice as many chunks as there are ranks, and
rank `r` has chunk `r` from the start and chunk `r` from the end: all ranks compute as much.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from types import MethodType
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import increment_version
from torch.overrides import TorchFunctionMode

from shardwise.comm import communicator
from shardwise.core import world
from shardwise.core.errors import DispatchError, LayoutError, MeshError, also
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh, as_mesh
from shardwise.core.placement import Replicate, Shard
from shardwise.dtensor.composite import decompose
from shardwise.dtensor.tensor import DTensor
from shardwise.parallel.plan_spec import PlanError
from shardwise.parallel.sequence_split import (
    HeadTailLoadBalancer,
    LoadBalancer,
    SequenceSplit,
    check_balanced,
    flex_refusal,
    options,
)
from shardwise.parallel.styles import ParallelStyle, as_one_axis_mesh
from shardwise.redistribute.autograd import redistribute_local
from shardwise.torch_internals import nn_builtins, pytree

# ---- the sequences of meshes


_splits: WeakKeyDictionary[world.World, dict[tuple[int, ...], SequenceSplit]] = WeakKeyDictionary()
"""The last sequence that each rank has cut, by the ranks that share it. Not by thread: a backward
on another thread may recompute an attention."""


def _one_axis(mesh: Any, argument: str = "mesh") -> DeviceMesh:
    found = as_mesh(mesh)
    if found.ndim != 1:
        raise MeshError(
            f"{argument}: expected one axis, that of the sequence, as in mesh['cp']; got {found!r}"
        )
    return found


# ---- buffers


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: Sequence[torch.Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Collection[torch.Tensor] | None = None,
) -> Iterator[None]:
    """Give each rank its part of the sequence, and let attention see all of it.

    Within, the buffers hold this rank's part, and `F.scaled_dot_product_attention` of this rank's
    queries, keys and values is attention over the whole sequence. Run the backward within, too.

    Arguments:
        mesh: the ranks that share a sequence: a mesh of one axis.
        buffers: plain tensors with the whole sequence on every rank: inputs, labels, positional
            embeddings. The first one gives the length; of longer ones, the first positions count.
            They have this rank's part as their `data` within, and are restored at the end. What is
            written to the parts is dropped.
        buffer_seq_dims: the dim of the sequence of each buffer.
        no_restore_buffers: the buffers that need not be restored.

    Example:
        >>> with context_parallel(mesh["cp"], buffers=[x, y], buffer_seq_dims=[1, 1]):
        ...     loss(model(x), y).backward()
    """
    one_axis = _one_axis(mesh)
    given, dims = list(buffers or ()), list(buffer_seq_dims or ())
    _check_buffers(given, dims, "buffers", "buffer_seq_dims")
    dropped = {id(each) for each in no_restore_buffers or ()}
    if dropped - {id(each) for each in given}:
        raise LayoutError("no_restore_buffers: expected some of buffers, got another tensor")
    length = given[0].shape[dims[0]]
    is_balanced = options.enable_load_balance and length % (2 * one_axis.size()) == 0
    split = SequenceSplit(one_axis, length, is_balanced)
    _check_lengths(given, dims, split)
    for at, each in enumerate(given):
        if each.requires_grad:
            raise also(LayoutError, RuntimeError)(
                f"buffers[{at}]: expected a tensor without gradient, as it is replaced by a part; "
                "cut it by context_parallel_shard, or by an operator within the context"
            )
    with torch.no_grad():
        parts = [split.shard(each, dim) for each, dim in zip(given, dims, strict=True)]
        saved = [each.detach() for each in given]
    # Not written into their memory: another buffer may be a view of the same, as inputs and labels.
    try:
        _replace(given, parts)
        with _WholeAttention(split):
            yield
    finally:
        kept = [each for each in zip(given, saved, strict=True) if id(each[0]) not in dropped]
        _replace([each for each, _ in kept], [before for _, before in kept])


def context_parallel_shard(
    mesh: DeviceMesh, buffers: Any, seq_dims: Any, load_balancer: LoadBalancer | None = None
) -> Any:
    """Return this rank's part of each buffer, for modules with the style `ContextParallel`.

    Arguments:
        mesh: the ranks that share a sequence: a mesh of one axis.
        buffers: a list or dict of plain tensors with the whole sequence on every rank.
        seq_dims: the dim of the sequence of each buffer, as a list or dict alike.
        load_balancer: a `HeadTailLoadBalancer` of the sequence; None for one chunk for each rank.

    Returns:
        The parts, as a list or dict like `buffers`.
    """
    one_axis = _one_axis(mesh)
    given, structure = pytree.tree_flatten(buffers)
    dims, _ = pytree.tree_flatten(seq_dims)
    _check_buffers(given, dims, "buffers", "seq_dims")
    length = given[0].shape[dims[0]]
    is_balanced = _is_balanced_by(load_balancer, length, one_axis)
    split = SequenceSplit(one_axis, length, is_balanced)
    _check_lengths(given, dims, split)
    options.enable_load_balance = is_balanced
    _splits.setdefault(world.current(), {})[one_axis.ranks_along((0,))] = split
    with torch.no_grad():
        parts = [split.shard(each, dim) for each, dim in zip(given, dims, strict=True)]
    return pytree.tree_unflatten(parts, structure)


@torch.no_grad()
def context_parallel_unshard(
    mesh: DeviceMesh,
    buffers: Sequence[torch.Tensor],
    seq_dims: Sequence[int],
    load_balancer: LoadBalancer | None = None,
) -> list[torch.Tensor]:
    """Gather parts of the sequence, such as outputs, on every rank, in the order of the sequence.

    Not differentiable. Costs one small collective, for the lengths, and an all-gather per buffer.

    Arguments:
        mesh: the ranks that share a sequence.
        buffers: this rank's part of each buffer.
        seq_dims: the dim of the sequence of each.
        load_balancer: as for `context_parallel_shard`. None: as `context_parallel` cuts.
    """
    group = communicator(_one_axis(mesh))
    given, dims = list(buffers), list(seq_dims)
    _check_buffers(given, dims, "buffers", "seq_dims")
    own = [each.shape[dim] for each, dim in zip(given, dims, strict=True)]
    lengths: list[list[int]] = group.gather_objects(own)
    whole = []
    for at, (part, dim) in enumerate(zip(given, dims, strict=True)):
        sizes = [each[at] for each in lengths]
        total = sum(sizes)
        is_even = len(set(sizes)) == 1 and total % (2 * group.size) == 0
        is_balanced = options.enable_load_balance and is_even
        if load_balancer is not None:
            is_balanced = _is_balanced_by(load_balancer, total, _one_axis(mesh))
        gathered = group.all_gather(part.contiguous(), dim, sizes)
        whole.append(SequenceSplit(_one_axis(mesh), total, is_balanced).in_order(gathered, dim))
    return whole


def _is_balanced_by(load_balancer: LoadBalancer | None, length: int, mesh: DeviceMesh) -> bool:
    if load_balancer is None:
        return False
    if not isinstance(load_balancer, HeadTailLoadBalancer):
        raise LayoutError(
            "load_balancer: expected a HeadTailLoadBalancer or None, as attention must know the "
            f"positions that each rank has; got {type(load_balancer).__name__}"
        )
    if (load_balancer.seq_length, load_balancer.world_size) != (length, mesh.size()):
        raise LayoutError(
            f"load_balancer: expected one for a length of {length} and {mesh.size()} ranks, got "
            f"one for {load_balancer.seq_length} and {load_balancer.world_size}"
        )
    check_balanced(length, mesh.size())
    return True


def _check_buffers(buffers: list[Any], dims: list[int], name: str, dims_name: str) -> None:
    if len(buffers) != len(dims) or not buffers:
        raise LayoutError(
            f"{name}, {dims_name}: expected at least one buffer, whose length is that of the "
            f"sequence, and as many dims; got {len(buffers)} and {len(dims)}"
        )
    for at, each in enumerate(buffers):
        if not isinstance(each, torch.Tensor):
            raise flex_refusal(f"{name}[{at}] of type {type(each).__name__}")
        if isinstance(each, DTensor):
            raise LayoutError(
                f"{name}[{at}]: expected a plain tensor with the whole sequence, got a DTensor "
                f"{each._layout!r}; a DTensor is cut by x.redistribute(placements=[Shard(dim)])"
            )


def _check_lengths(buffers: list[torch.Tensor], dims: list[int], split: SequenceSplit) -> None:
    for at, (each, dim) in enumerate(zip(buffers, dims, strict=True)):
        if each.shape[dim] < split.length:
            raise LayoutError(
                f"buffers[{at}]: expected {split.length} positions along dim {dim}, as the first "
                f"buffer has; got shape {tuple(each.shape)}"
            )


def _replace(buffers: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Give buffers other shapes and memory; a graph that has saved them notices."""
    for buffer, value in zip(buffers, values, strict=True):
        buffer.data = value
        if not buffer.is_inference():
            increment_version(buffer)


# ---- attention

_ATTENTION = {F.scaled_dot_product_attention, nn_builtins.scaled_dot_product_attention}
_HIDES_ATTENTION = {
    F.multi_head_attention_forward,
    torch._native_multi_head_attention,
    torch._transformer_encoder_layer_fwd,
}
"""Functions that compute attention inside, where no one could see that it is local."""


class _WholeAttention(TorchFunctionMode):
    """Within, attention of local queries, keys and values is over the whole sequence.

    A mode, not a change to torch: it belongs to the thread, sees the function under any name that a
    program has imported it by, and is there when a backward within it recomputes activations.
    """

    def __init__(self, split: SequenceSplit) -> None:
        super().__init__()
        self.split = split

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ATTENTION:
            return _attend(self.split, *args, **(kwargs or {}))
        if func in _HIDES_ATTENTION:
            raise DispatchError(
                f"{func.__name__}: this rank has a part of the sequence, and this function would "
                "attend to that part alone; call F.scaled_dot_product_attention"
            )
        run = decompose(func)
        if run is None:
            return func(*args, **(kwargs or {}))
        with self:  # in Python, such as Tensor.backward, which may recompute an attention
            return run(*args, **(kwargs or {}))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend(
    split: SequenceSplit,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute the attention of this rank's queries to all keys and values."""
    name = "scaled_dot_product_attention, with a part of the sequence on each rank"
    if attn_mask is not None or dropout_p:
        got = f"dropout_p={dropout_p}" if attn_mask is None else "attn_mask"
        raise also(DispatchError, NotImplementedError)(
            f"{name}: expected no attn_mask and no dropout, but is_causal; got {got}"
        )
    if any(isinstance(each, DTensor) for each in (query, key, value)):
        return _attend_locally(split, name, query, key, value, is_causal, scale, enable_gqa)
    local = split.local_length
    for which, each in (("key", key), ("value", value)):
        if each.shape[-2] != local:
            raise DispatchError(
                f"{name}: expected a {which} with the {local} positions that this rank has of "
                f"{split.length}, got shape {tuple(each.shape)}"
            )
    settings: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    keys, values = _whole(key, split), _whole(value, split)
    if not is_causal:  # the order of the keys does not matter
        return F.scaled_dot_product_attention(query, keys, values, **settings)
    if query.shape[-2] != local:
        raise DispatchError(
            f"{name}: expected a query with the {local} positions that this rank has, for the "
            f"causal mask; got shape {tuple(query.shape)}"
        )
    keys, values = split.in_order(keys, -2), split.in_order(values, -2)
    results = []
    first = 0
    for start, stop in split.own_ranges:
        rows = query.narrow(-2, first, stop - start)
        first += stop - start
        end = max(stop, 1)
        mask = torch.ones(stop - start, end, dtype=torch.bool, device=query.device).tril(start)
        results.append(
            F.scaled_dot_product_attention(
                rows,
                keys.narrow(-2, 0, end),
                values.narrow(-2, 0, end),
                None if start == 0 else mask,
                is_causal=start == 0,
                **settings,
            )
        )
    return torch.cat(results, -2)


def _whole(local: torch.Tensor, split: SequenceSplit) -> torch.Tensor:
    """Gather keys or values. Backward: reduce-scatter of the gradients."""
    dim = local.dim() - 2
    shape = (*local.shape[:dim], split.length, local.shape[-1])
    cut = Layout.from_placements(split.mesh, shape, [Shard(dim)])
    return cast(
        torch.Tensor,
        redistribute_local(local.contiguous(), cut, Layout(split.mesh, shape), used_on=(0,)),
    )


def _attend_locally(
    split: SequenceSplit,
    name: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Attend with DTensors that are split by batch or by heads, as tensor parallelism does it."""
    tensors = (query, key, value)
    layouts = [each._layout if isinstance(each, DTensor) else None for each in tensors]
    places = {None if each is None else (each.mesh, tuple(each.placements)) for each in layouts}
    mesh, placements = next(iter(places)) or (None, ())
    if mesh is None or len(places) > 1:
        raise DispatchError(
            f"{name}: expected query, key and value as plain tensors or as DTensors with the same "
            f"placements; got {', '.join(map(repr, layouts))}"
        )
    allowed = [Replicate(), *map(Shard, range(query.dim() - 2))]
    if any(each not in allowed for each in placements):
        raise DispatchError(
            f"{name}: expected DTensors that are split by batch or heads, got {placements}"
        )
    found = [cast(DTensor, each)._layout for each in tensors]
    for place in itertools.product(*map(range, mesh.shape)):
        shapes = [each.local_shape(place) for each in found]
        for dim, other in itertools.product(range(query.dim() - 2), (1, 2)):
            if shapes[0][dim] * found[other].shape[dim] != shapes[other][dim] * query.shape[dim]:
                raise DispatchError(
                    f"{name}: expected on every rank the keys and values of its queries; rank "
                    f"{mesh.rank_at(place)} has {shapes[0][dim]} of {query.shape[dim]} queries "
                    f"along dim {dim}, and {shapes[other][dim]} of {found[other].shape[dim]} keys "
                    "or values. Repeat the heads of keys and values (repeat_interleave), so that "
                    "they are split as those of queries"
                )
    local = [cast(DTensor, each).to_local() for each in tensors]
    result = _attend(split, *local, None, 0.0, is_causal, scale, enable_gqa)
    shape = (*query.shape[:-1], value.shape[-1])
    return DTensor.from_local(result, mesh, placements, shape=shape)


# ---- the style


class AttentionType(Enum):
    """The function by which a module computes attention."""

    FLEX = "flex_attention"
    SDPA = "scaled_dot_product_attention"


class ContextParallel(ParallelStyle):
    """The style of a module whose attention is over the whole sequence.

    Its inputs are this rank's part of the sequence, as `context_parallel_shard` cuts it.

    Arguments:
        seq_dim: the dim of the sequence of queries, keys and values: the last but one.
        attention_type: the function that the module calls; SDPA.

    Example:
        >>> style = ContextParallel(seq_dim=2, attention_type=ContextParallel.AttentionType.SDPA)
        >>> parallelize_module(model.attention, mesh["cp"], style)
    """

    AttentionType = AttentionType

    def __init__(self, seq_dim: int, attention_type: Any) -> None:
        if getattr(attention_type, "value", None) == AttentionType.FLEX.value:
            raise flex_refusal("attention_type FLEX")
        if getattr(attention_type, "value", None) != AttentionType.SDPA.value:
            raise PlanError(f"attention_type: expected AttentionType.SDPA, got {attention_type!r}")
        if seq_dim not in (2, -2):
            raise PlanError(
                "seq_dim: expected 2, the last but one of (batch, heads, sequence, features); got "
                f"{seq_dim!r}"
            )
        self.seq_dim = seq_dim
        self.attention_type = attention_type

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        setattr(module, _MESH, as_one_axis_mesh(device_mesh))
        setattr(module, _FORWARD, vars(module).get("forward"))
        module.forward = MethodType(_forward_over_whole, module)
        return module


_MESH, _FORWARD = "_context_parallel_mesh", "_context_parallel_forward"


def _forward_over_whole(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a module with the style `ContextParallel`."""
    mesh = getattr(module, _MESH)
    split = _splits.get(world.current(), {}).get(mesh.ranks_along((0,)))
    if split is None:
        raise PlanError(
            f"{type(module).__name__}: expected inputs that context_parallel_shard(mesh, ...) cut "
            f"on {mesh!r}, which was not called on this rank: it says how long the sequence is"
        )
    before = getattr(module, _FORWARD)
    forward = MethodType(type(module).forward, module) if before is None else before
    with _WholeAttention(split):
        return forward(*args, **kwargs)


def enable_context_parallel_dispatcher() -> None:
    """Do nothing: `ContextParallel` and `context_parallel` need no switch. Torch's name."""


def disable_context_parallel_dispatcher() -> None:
    """Do nothing, as `enable_context_parallel_dispatcher`."""
