"""backward, grad and hooks: autograd works on the local shards, users see sharded tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from shardwise.core.errors import ShardedTensorError
from shardwise.sharded.tensor import ShardedTensor


def backward_of(
    self: torch.Tensor,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Run `tensor.backward(...)`."""
    backward([self], [gradient], retain_graph, create_graph, inputs=inputs)


def backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """Run `torch.autograd.backward(...)`."""
    outputs, starts = _roots_and_gradients(tensors, grad_tensors)
    wanted = (
        None
        if inputs is None
        else [part for each in _as_list(inputs) for part in _local_tensors(each)]
    )
    torch.autograd.backward(outputs, starts, retain_graph, create_graph, inputs=wanted)


def grad(
    outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **options: Any
) -> tuple[Any, ...]:
    """Run `torch.autograd.grad(...)`; the gradient of a sharded tensor is a sharded tensor."""
    local, starts = _roots_and_gradients(outputs, grad_outputs)
    wanted = _as_list(inputs)
    parts = [_local_tensors(each) for each in wanted]
    flat = [part for each in parts for part in each]
    found: Iterator[Any] = iter(torch.autograd.grad(local, flat, starts, *args, **options))
    pieces = [[next(found) for _ in each] for each in parts]
    return tuple(map(_join_gradients, wanted, pieces))


def _join_gradients(of: torch.Tensor, gradients: list[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the gradients of the local tensors of a tensor as one gradient; None if one is
    missing."""
    if not isinstance(of, ShardedTensor):
        return gradients[0]
    found = [each for each in gradients if each is not None]
    if len(found) < len(gradients):
        return None
    return of._with_results(found)


def _roots_and_gradients(
    tensors: Any, seeds: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Return the plain tensors and DTensors that backward starts from, and their gradients."""
    sources = _as_list(tensors)
    outputs: list[torch.Tensor] = []
    starts: list[torch.Tensor | None] = []
    for tensor, seed in zip(sources, _as_list(seeds, len(sources)), strict=True):
        if not isinstance(tensor, ShardedTensor):
            outputs.append(tensor)
            starts.append(seed.full_tensor() if isinstance(seed, ShardedTensor) else seed)
            continue
        if seed is None and tensor.numel() != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        if seed is not None and tuple(seed.shape) != tuple(tensor.shape):
            raise ShardedTensorError(
                f"gradient: expected one of size {tuple(tensor.shape)}, got {tuple(seed.shape)}"
            )
        parts = _local_tensors(tensor)
        outputs += parts
        if seed is None:
            starts += [torch.ones_like(part) for part in parts]
        else:
            starts += tensor._shards_or_placeholder_of(
                seed, seed.requires_grad and torch.is_grad_enabled()
            )
    return outputs, starts


def _local_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that autograd knows in place of one."""
    return tensor._tensors_or_placeholder() if isinstance(tensor, ShardedTensor) else [tensor]


def _as_list(value: Any, count: int = 1) -> list[Any]:
    """Return one tensor or several as a list; `count` times None for None."""
    if value is None:
        return [None] * count
    return [value] if isinstance(value, torch.Tensor) else list(value)


# ---- hooks


def register_hook(tensor: ShardedTensor, hook: Callable[[Any], Any]) -> Any:
    """Run `tensor.register_hook(hook)`: the hook gets a ShardedTensor, and may return one."""
    shard = _only_shard(tensor, "register_hook")

    def local_hook(gradient: torch.Tensor) -> torch.Tensor | None:
        result = hook(_join_gradients(tensor, [gradient]))
        return None if result is None else tensor._shards_of(result)[0]

    return shard.register_hook(local_hook)  # type: ignore[no-untyped-call]


def register_post_accumulate_grad_hook(tensor: ShardedTensor, hook: Callable[[Any], Any]) -> Any:
    """Run `tensor.register_post_accumulate_grad_hook(hook)`: the hook gets the sharded tensor."""
    shard = _only_shard(tensor, "register_post_accumulate_grad_hook")
    return shard.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
        lambda _: hook(tensor)
    )


def _only_shard(tensor: ShardedTensor, name: str) -> torch.Tensor:
    """Return this rank's shard; refuse tensors that do not have one shard on each rank."""
    counts = Counter(tensor._ownership.owners)
    if any(counts[rank] != 1 for rank in tensor._group.ranks):
        raise ShardedTensorError(
            f"{name}: expected one shard on each rank, whose gradient is the hook's; there are "
            f"{', '.join(f'{counts[rank]} on rank {rank}' for rank in tensor._group.ranks)}; "
            f"register the hook on st.local_shards()[i].tensor"
        )
    return tensor._local_shards[0].tensor


def retain_grad(tensor: ShardedTensor) -> None:
    """Run `tensor.retain_grad()`."""
    for each in tensor._autograd_tensors():
        each.retain_grad()


def detach_(tensor: ShardedTensor) -> ShardedTensor:
    """Run `tensor.detach_()`: detach the shards from the operations that made them."""
    for shard in tensor._local_shards:
        shard.tensor = shard.tensor.detach()  # not in place: torch refuses detach_ of views
    tensor._placeholder = None
    tensor._set_requires_grad_flag(False)
    return tensor


def grad_fn(tensor: ShardedTensor) -> Any:
    """Return the autograd node of the first shard of this rank."""
    parts = tensor._autograd_tensors()
    return parts[0].grad_fn if parts else None


def retains_grad(tensor: ShardedTensor) -> bool:
    """Return whether the shards of this rank retain gradients."""
    return any(each.retains_grad for each in tensor._autograd_tensors())
