"""backward, grad and hooks: autograd works on the shards, the user sees sharded tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from shardwise.sharded.errors import ShardedTensorError
from shardwise.sharded.tensor import ShardedTensor


def backward_of(
    self: torch.Tensor,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """`st.backward(...)`."""
    backward([self], [gradient], retain_graph, create_graph, inputs=inputs)


def backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """`torch.autograd.backward(...)`."""
    outputs, starts = _started(tensors, grad_tensors)
    wanted = None if inputs is None else [part for each in _list(inputs) for part in _parts(each)]
    torch.autograd.backward(outputs, starts, retain_graph, create_graph, inputs=wanted)


def grad(
    outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **options: Any
) -> tuple[Any, ...]:
    """`torch.autograd.grad(...)`: sharded tensors for sharded tensors."""
    local, starts = _started(outputs, grad_outputs)
    wanted = _list(inputs)
    parts = [_parts(each) for each in wanted]
    flat = [part for each in parts for part in each]
    found: Iterator[Any] = iter(torch.autograd.grad(local, flat, starts, *args, **options))
    pieces = [[next(found) for _ in each] for each in parts]
    return tuple(map(_gradient, wanted, pieces))


def _gradient(of: torch.Tensor, pieces: list[torch.Tensor | None]) -> torch.Tensor | None:
    """The gradients of the parts of a tensor as one, if it has one."""
    if not isinstance(of, ShardedTensor):
        return pieces[0]
    found = [each for each in pieces if each is not None]
    if len(found) < len(pieces):
        return None
    return of._with_results(found)


def _started(tensors: Any, seeds: Any) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """The plain tensors and DTensors to start from, and their gradients."""
    sources = _list(tensors)
    outputs: list[torch.Tensor] = []
    starts: list[torch.Tensor | None] = []
    for tensor, seed in zip(sources, _list(seeds, len(sources)), strict=True):
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
        parts = _parts(tensor)
        outputs += parts
        if seed is None:
            starts += [torch.ones_like(part) for part in parts]
        else:
            starts += tensor._parts_of(seed, seed.requires_grad and torch.is_grad_enabled())
    return outputs, starts


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that autograd knows in place of one."""
    return tensor._parts() if isinstance(tensor, ShardedTensor) else [tensor]


def _list(value: Any, count: int = 1) -> list[Any]:
    if value is None:
        return [None] * count
    return [value] if isinstance(value, torch.Tensor) else list(value)


# ---- hooks


def register_hook(tensor: ShardedTensor, hook: Callable[[Any], Any]) -> Any:
    """`st.register_hook(hook)`: the hook is handed a ShardedTensor, and may return one."""
    shard = _only(tensor, "register_hook")

    def local_hook(gradient: torch.Tensor) -> torch.Tensor | None:
        result = hook(_gradient(tensor, [gradient]))
        return None if result is None else tensor._pieces_of(result)[0]

    return shard.register_hook(local_hook)  # type: ignore[no-untyped-call]


def register_post_accumulate_grad_hook(tensor: ShardedTensor, hook: Callable[[Any], Any]) -> Any:
    """`st.register_post_accumulate_grad_hook(hook)`: the hook is handed `st`."""
    shard = _only(tensor, "register_post_accumulate_grad_hook")
    return shard.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
        lambda _: hook(tensor)
    )


def _only(tensor: ShardedTensor, name: str) -> torch.Tensor:
    """The shard of this rank, where each rank has one."""
    counts = Counter(tensor._held.owners)
    if any(counts[rank] != 1 for rank in tensor._group.ranks):
        raise ShardedTensorError(
            f"{name}: expected one shard on each rank, whose gradient is the hook's; there are "
            f"{', '.join(f'{counts[rank]} on rank {rank}' for rank in tensor._group.ranks)}; "
            f"register the hook on st.local_shards()[i].tensor"
        )
    return tensor._local_shards[0].tensor


def retain_grad(tensor: ShardedTensor) -> None:
    """`st.retain_grad()`."""
    for each in tensor._recorded():
        each.retain_grad()


def detach_(tensor: ShardedTensor) -> ShardedTensor:
    """`st.detach_()`: its shards are apart from what was recorded."""
    for shard in tensor._local_shards:
        shard.tensor = shard.tensor.detach()  # a result may be a view, of which torch refuses it
    tensor._nothing = None
    tensor._note_requires_grad(False)
    return tensor


def grad_fn(tensor: ShardedTensor) -> Any:
    """What recorded the first shard of this rank."""
    parts = tensor._recorded()
    return parts[0].grad_fn if parts else None


def retains_grad(tensor: ShardedTensor) -> bool:
    """Whether the shards of this rank do."""
    return any(each.retains_grad for each in tensor._recorded())
