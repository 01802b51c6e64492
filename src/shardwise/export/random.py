"""Random numbers of a program: each rank draws what one process draws, in number, shape and order.

Ranks draw whole tensors (`shardwise.random.samplers`), so that torch's generator advances as in one
process. This is checked here against the draws of the original. torch fills a tensor in the order
of its memory, which a local shard does not have: the order is taken from the original.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from shardwise.core.errors import ExportError
from shardwise.export.dynamic_sizes import SymbolSizes, evaluate_size
from shardwise.export.operators import draws_random
from shardwise.torch_internals import FakeTensorMode, TorchDispatchMode, current_graph_task, pytree

_aten: Any = torch.ops.aten


class Draw(NamedTuple):
    """One tensor of random numbers."""

    operator: str
    shape: tuple[int, ...]
    order: tuple[int, ...] | None
    """Its dims by their order in memory, the outermost first; None if it is not dense."""

    @property
    def numbers(self) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """The sizes, and their order in memory: two draws with equal ones draw the same numbers.

        Dims of size 1 do not count. torch's operators may add them: since 2.15, attention on
        tensors of three dims calls that of four, with a first dim of size 1.
        """
        kept = _long_dims(self.shape)
        sizes = tuple(self.shape[dim] for dim in kept)
        if self.order is None:
            return sizes, None
        return sizes, tuple(kept.index(dim) for dim in self.order if dim in kept)


def _long_dims(shape: Sequence[int]) -> list[int]:
    return [dim for dim, size in enumerate(shape) if size != 1]


# ---- what is drawn


class _DrawRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every draw of random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws: list[Draw] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if draws_random(func, args, kwargs or {}):
            if current_graph_task() != -1:
                raise ExportError(
                    f"fn: {func} draws random numbers in the backward pass, as in what "
                    "torch.utils.checkpoint computes again; a graph would draw others than in the "
                    "forward pass. Leave out the checkpoint, or the dropout within it"
                )
            filled: torch.Tensor = pytree.tree_leaves(result)[0]
            if filled.numel():
                self.draws.append(Draw(str(func), tuple(filled.shape), _memory_order(filled)))
        return result


def _memory_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the dims by their order in memory, the outermost first; None if it is not dense."""
    dims = range(tensor.dim())
    if tensor.is_contiguous():
        return tuple(dims)
    strides = tensor.stride()
    order = tuple(sorted(dims, key=lambda dim: -strides[dim]))
    return order if tensor.permute(order).is_contiguous() else None


def find_draws_of_function(function: Callable[..., Any], arguments: Sequence[Any]) -> list[Draw]:
    """Return the draws of a function.

    Arguments:
        arguments: trees of tensors, whose values are not used.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def as_fake(tensor: torch.Tensor) -> torch.Tensor:
        made = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        return made.requires_grad_(tensor.requires_grad)

    recorder = _DrawRecorder()
    with mode, recorder:
        function(*pytree.tree_map_only(torch.Tensor, as_fake, list(arguments)))
    return recorder.draws


def find_draws_of_graph(module: fx.GraphModule, sizes: SymbolSizes) -> list[tuple[fx.Node, Draw]]:
    """Return the draws of a graph's nodes, which have `meta["val"]`, at the given sizes."""
    with FakeTensorMode():
        return [(node, draw) for node in _random_nodes(module) for draw in _run(node, sizes)]


def _random_nodes(module: fx.GraphModule) -> Iterator[fx.Node]:
    for node in module.graph.nodes:
        if node.op == "get_attr" and isinstance(
            block := getattr(module, str(node.target), None), fx.GraphModule
        ):  # a block within no_grad, which is run inline
            yield from _random_nodes(block)
        elif node.op == "call_function" and draws_random(node.target, node.args, node.kwargs):
            yield node


def _run(node: fx.Node, sizes: SymbolSizes) -> list[Draw]:
    """Run a node on fake tensors and return its draws."""

    def as_fake(argument: fx.Node) -> Any:
        found = argument.meta["val"]
        if not isinstance(found, torch.Tensor):
            return evaluate_size(found, sizes) if isinstance(found, torch.SymInt) else found
        shape, stride = (
            [evaluate_size(size, sizes) for size in each] for each in (found.shape, found.stride())
        )
        return torch.empty_strided(shape, stride, dtype=found.dtype, device=found.device)

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), as_fake)
    recorder = _DrawRecorder()
    with recorder:
        node.target(*args, **kwargs)  # type: ignore[operator]
    return recorder.draws


# ---- what should be drawn


def match_draws(module: fx.GraphModule, wanted: Sequence[Draw], subject: str) -> None:
    """Make a recorded graph draw as wanted, or raise ExportError.

    Arguments:
        wanted: the draws of the original.
        subject: the argument of the user's call that is the original, for errors.
    """
    found = find_draws_of_graph(module, {})
    if [draw.numbers[0] for _, draw in found] != [draw.numbers[0] for draw in wanted]:
        one, ranks = _format_draws(wanted), _format_draws([draw for _, draw in found])
        raise ExportError(
            f"{subject}: random numbers must be drawn as in one process, which draws {one}; but "
            f"ranks would draw {ranks}. An operator in it cannot be split so: call eval() on the "
            "model, or pass random numbers as inputs"
        )
    for (node, draw), want in zip(found, wanted, strict=True):
        if draw.numbers != want.numbers and not _reorder(module.graph, node, draw, want):
            raise ExportError(
                f"{subject}: {want.operator} draws numbers into a tensor of shape {want.shape} "
                "that is not contiguous in memory, in an order that ranks cannot draw in; call "
                "contiguous() before, or draw into a tensor of its own"
            )


def _format_draws(draws: Sequence[Draw]) -> str:
    return ", ".join(f"{draw.shape} by {draw.operator}" for draw in draws) or "nothing"


def _reorder(graph: fx.Graph, node: fx.Node, draw: Draw, want: Draw) -> bool:
    """Make a node draw in the wanted memory order; return whether that was possible."""
    empty = node.args[0] if node.args else None
    _, wanted = want.numbers
    if wanted is None or not isinstance(empty, fx.Node):
        return False
    if empty.target is not _aten.empty.memory_format:
        return False
    size: Any = empty.args[0]
    kept = _long_dims(draw.shape)
    order = [dim for dim in range(len(size)) if dim not in kept] + [kept[at] for at in wanted]
    if node.target is not _aten.bernoulli.p:
        empty.target, empty.args = _aten.empty_permuted.default, (size, order)
        return True
    # bernoulli ignores the strides of its argument: draw a tensor in the wanted order, and permute.
    empty.args = ([size[dim] for dim in order],)
    with graph.inserting_after(node):
        permuted = graph.call_function(
            _aten.permute.default, (node, [order.index(dim) for dim in range(len(order))])
        )
    permuted.meta = {name: each for name, each in node.meta.items() if name != "val"}
    node.replace_all_uses_with(permuted, lambda user: user is not permuted)
    return True
