"""What a function that is being recorded takes from outside: constants, and devices."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.overrides import TorchFunctionMode

from shardwise.comm.trace import current
from shardwise.export.errors import ExportError
from shardwise.export.notes import MODULE, node_of, note, say
from shardwise.layout import Layout
from shardwise.mesh import DeviceMesh
from shardwise.tensor import DTensor, wrap
from shardwise.torch_internals import pytree, version_of

_META = torch.device("meta")

_OF_DATA = {torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, torch.scalar_tensor}
"""What makes tensors of numbers that are known now: constants."""

_VALUES = {
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.__bool__,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
}


class Outside(TorchFunctionMode):
    """Within, tensors with data are whole on every rank, and everything is made without data.

    The function being recorded works on DTensors of meta tensors. What it finds elsewhere, such as
    a module's buffers, becomes a DTensor of a meta tensor too, and `insert` puts it into the graph.

    Arguments:
        mesh: where the DTensors lie.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self._mesh = mesh
        self._made: dict[int, tuple[torch.Tensor, DTensor]] = {}
        self._nodes: list[tuple[fx.Node, torch.Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function on what the recording has."""
        if torch.is_autocast_enabled(self._mesh.device_type):
            raise ExportError(
                "fn: torch.autocast does nothing to tensors without data, so it cannot be "
                "recorded; convert parameters and inputs with to(dtype) in fn"
            )
        kwargs = kwargs or {}
        if any(isinstance(each, torch.Generator) for each in (*args, *kwargs.values())):
            raise ExportError(
                f"fn: {getattr(func, '__name__', func)} draws from a torch.Generator, which a "
                "graph cannot hold; draw from torch's default one, without `generator`"
            )
        is_constant = func in _OF_DATA and not isinstance(args[0], torch.Tensor)
        if is_constant or (func in _VALUES and _is_outside(args[0])):
            with disable_proxy_modes_tracing():
                return func(*args, **_without_meta(kwargs))
        if func in _VALUES:
            raise ExportError(
                f"fn: expected the same operators whatever the values, but it asks for the value "
                f"of a tensor ({func.__name__}); return the tensor, or use torch.where"
            )
        if func is torch.Tensor.to:
            args = tuple(_META if isinstance(each, str) else each for each in args)
        if isinstance(kwargs.get("device"), str | int):
            kwargs = kwargs | {"device": _META}
        args, kwargs = pytree.tree_map(self.inside, (args, kwargs))
        with torch.device(_META):
            result = func(*args, **kwargs)
        pytree.tree_map_only(torch.Tensor, _note, result)
        return result

    def inside(self, value: Any) -> Any:
        """What the recording has for a value."""
        if isinstance(value, torch.device):
            return _META
        return self._stand_in(value) if _is_outside(value) else value

    def _stand_in(self, tensor: torch.Tensor) -> DTensor:
        if tensor.requires_grad:
            raise ExportError(
                f"fn: expected all that is trained in the state, but it uses a tensor of shape "
                f"{tuple(tensor.shape)} that requires grad from elsewhere; pass it with the state "
                "(torch.func.functional_call), or detach() it if it is a constant"
            )
        if id(tensor) not in self._made:
            local = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META
            )
            node = node_of(local)
            assert node is not None, "it is recorded"
            self._nodes.append((node, tensor))
            self._made[id(tensor)] = tensor, wrap(local, Layout(self._mesh, tensor.shape))
        return self._made[id(tensor)][1]

    def insert(self, module: fx.GraphModule, device: torch.device) -> None:
        """Put what was found into the graph, as constants of the module."""
        for tensor, stand_in in self._made.values():
            if version_of(stand_in):
                raise ExportError(
                    f"fn: it writes to a tensor of shape {tuple(tensor.shape)} from elsewhere, "
                    "such as a buffer of a module; pass it with the state "
                    "(torch.func.functional_call takes buffers too), and return it"
                )
        for at, (node, tensor) in enumerate(self._nodes):
            name = f"constant_{at}"
            module.register_buffer(name, tensor.detach().to(device))
            with module.graph.inserting_before(node):
                constant = module.graph.get_attr(name)
            constant.meta = node.meta
            node.replace_all_uses_with(constant)
            module.graph.erase_node(node)


def _note(tensor: torch.Tensor) -> None:
    note(tensor)
    node = node_of(tensor)
    if node is not None and current().module:
        say(node, MODULE, current().module)


def _is_outside(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and not value.is_meta


def _without_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    """A constant is made where there is data, whatever device the others seem to be on."""
    return kwargs | {"device": "cpu"} if "device" in kwargs else kwargs
