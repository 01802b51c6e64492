"""Random numbers of a program: those that one process draws, in number, shape and order.

Ranks draw tensors whole (`shardwise.drawing`), so that torch's generator moves on as in one
process. Here it is made sure that they do, by comparison with what the original draws. torch fills
tensors in the order in which they lie in memory, which pieces do not know: it is taken over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from shardwise.export.errors import ExportError
from shardwise.export.operators import draws
from shardwise.export.polynomials import Sizes
from shardwise.export.sizes import number
from shardwise.torch_internals import FakeTensorMode, TorchDispatchMode, current_graph_task, pytree

_aten: Any = torch.ops.aten


class Draw(NamedTuple):
    """One tensor of random numbers."""

    operator: str
    shape: tuple[int, ...]
    order: tuple[int, ...] | None
    """Its dims as they lie in memory, the outermost first; None if there are gaps."""

    @property
    def numbers(self) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """What decides which numbers are drawn, and where they lie: sizes, and their order.

        Dims of size 1 have no part in it. torch's operators come to have them: since 2.15 attention
        of three dims is that of four, the first of size 1.
        """
        kept = _long_dims(self.shape)
        sizes = tuple(self.shape[dim] for dim in kept)
        if self.order is None:
            return sizes, None
        return sizes, tuple(kept.index(dim) for dim in self.order if dim in kept)


class _Listening(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hears of everything that is drawn."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.heard: list[Draw] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if draws(func, args, kwargs or {}):
            if current_graph_task() != -1:
                raise ExportError(
                    f"fn: {func} draws random numbers in the backward pass, as in what "
                    "torch.utils.checkpoint computes again; a graph would draw others than in the "
                    "forward pass. Leave out the checkpoint, or the dropout within it"
                )
            filled: torch.Tensor = pytree.tree_leaves(result)[0]
            if filled.numel():
                self.heard.append(Draw(str(func), tuple(filled.shape), _order(filled)))
        return result


def _long_dims(shape: Sequence[int]) -> list[int]:
    return [dim for dim, size in enumerate(shape) if size != 1]


def _order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    dims = range(tensor.dim())
    if tensor.is_contiguous():
        return tuple(dims)
    strides = tensor.stride()
    order = tuple(sorted(dims, key=lambda dim: -strides[dim]))
    return order if tensor.permute(order).is_contiguous() else None


def of_function(function: Callable[..., Any], arguments: Sequence[Any]) -> list[Draw]:
    """What a function draws; `arguments` are trees of tensors, whose values do not count."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        made = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        return made.requires_grad_(tensor.requires_grad)

    listening = _Listening()
    with mode, listening:
        function(*pytree.tree_map_only(torch.Tensor, stand_in, list(arguments)))
    return listening.heard


def of_graph(module: fx.GraphModule, at: Sizes) -> list[tuple[fx.Node, Draw]]:
    """What the nodes of a graph draw, at some sizes. They have values without data."""
    with FakeTensorMode():
        return [(node, draw) for node in _random_nodes(module) for draw in _drawn_by(node, at)]


def _random_nodes(module: fx.GraphModule) -> Iterator[fx.Node]:
    for node in module.graph.nodes:
        if node.op == "get_attr" and isinstance(
            block := getattr(module, str(node.target), None), fx.GraphModule
        ):  # one within no_grad, which is run where it stands
            yield from _random_nodes(block)
        elif node.op == "call_function" and draws(node.target, node.args, node.kwargs):
            yield node


def _drawn_by(node: fx.Node, at: Sizes) -> list[Draw]:
    def value(argument: fx.Node) -> Any:
        found = argument.meta["val"]
        if not isinstance(found, torch.Tensor):
            return number(found, at) if isinstance(found, torch.SymInt) else found
        shape, stride = ([number(n, at) for n in each] for each in (found.shape, found.stride()))
        return torch.empty_strided(shape, stride, dtype=found.dtype, device=found.device)

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
    listening = _Listening()
    with listening:
        node.target(*args, **kwargs)  # type: ignore[operator]
    return listening.heard


def settle(module: fx.GraphModule, wanted: Sequence[Draw], subject: str) -> None:
    """Make a recorded graph draw what is wanted, or refuse.

    Arguments:
        subject: what an error says the wanted ones are of.
    """
    found = of_graph(module, {})
    if [draw.numbers[0] for _, draw in found] != [draw.numbers[0] for draw in wanted]:
        one, ranks = _shown(wanted), _shown([draw for _, draw in found])
        raise ExportError(
            f"{subject}: random numbers must be drawn as in one process, which draws {one}; but "
            f"ranks would draw {ranks}. An operator in it cannot be split so: call eval() on the "
            "model, or pass random numbers as inputs"
        )
    for (node, draw), want in zip(found, wanted, strict=True):
        if draw.numbers != want.numbers and not _reorder(module.graph, node, draw, want):
            raise ExportError(
                f"{subject}: {want.operator} draws numbers into a tensor of shape {want.shape} "
                "that does not lie in memory row by row, which ranks cannot; call contiguous() "
                "before, or draw a tensor of its own"
            )


def _shown(drawn: Sequence[Draw]) -> str:
    return ", ".join(f"{draw.shape} by {draw.operator}" for draw in drawn) or "nothing"


def _reorder(graph: fx.Graph, node: fx.Node, draw: Draw, want: Draw) -> bool:
    """Let a node draw in the wanted order in memory; whether it can."""
    empty = node.args[0] if node.args else None
    is_own = isinstance(empty, fx.Node) and empty.target is _aten.empty.memory_format
    _, wanted = want.numbers
    if wanted is None or not is_own:
        return False
    assert isinstance(empty, fx.Node)
    size: Any = empty.args[0]
    kept = _long_dims(draw.shape)
    order = [dim for dim in range(len(size)) if dim not in kept] + [kept[at] for at in wanted]
    if node.target is not _aten.bernoulli.p:
        empty.target, empty.args = _aten.empty_permuted.default, (size, order)
        return True
    # It has no regard for the strides of its argument.
    empty.args = ([size[dim] for dim in order],)
    with graph.inserting_after(node):
        turned = graph.call_function(
            _aten.permute.default, (node, [order.index(dim) for dim in range(len(order))])
        )
    turned.meta = {name: each for name, each in node.meta.items() if name != "val"}
    node.replace_all_uses_with(turned, lambda user: user is not turned)
    return True
