"""Gradients of shards within autograd: `torch.autograd.grad`, and gradients of gradients.

Modules compute with gathered parameters, which are leaves of the graph. The shards, which users and
optimizers see, are none. So `torch.autograd.grad(loss, parameters)` asks for the gradients of the
gathered parameters, and reduces them. A backward with `create_graph=True` gives gradients that have
a history: that of the gathered parameters' gradients, through the reduction.

The two moves between a rank's own tensor and a shard are each other's backward:

    _Reduce    sum over ranks, divided as gradients are; each rank gets its shard
    _Gather    all-gather: each rank gets the whole tensor

By this convention a rank's own loss counts as the part of a mean: whatever reaches a gathered
parameter, also from a gradient that all ranks share, is averaged over ranks in the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch

from shardwise.comm import communicator
from shardwise.core.layout import Layout
from shardwise.dtensor.tensor import wrap
from shardwise.fsdp.mesh_info import DataParallelMeshInfo
from shardwise.fsdp.param import ShardedParam
from shardwise.redistribute import redistribute_local
from shardwise.torch_internals import as_local


class Reduction:
    """How the gradient of a parameter is reduced.

    Arguments:
        param: the parameter.
        info: the data-parallel ranks.
        divisor: the number by which the sum over ranks is divided.
        begin: called before a gradient of a gradient is computed: all parameters of the model must
            be gathered then, as any may have been used.
    """

    def __init__(
        self, param: ShardedParam, info: DataParallelMeshInfo, divisor: float, begin: Any
    ) -> None:
        self.param = param
        self.divisor = divisor
        self.begin = begin
        self.shard: Layout = param.sharded._layout
        data_axes = info.mesh.ndim
        order = [[axis for axis in axes if axis >= data_axes] for axes in self.shard.shard_order]
        cuts = self.shard.cuts if self.shard.is_cut else ()
        mesh, shape = self.shard.mesh, self.shard.shape
        self.whole = Layout(mesh, shape, order, None, cuts)
        self.pending = Layout(mesh, shape, order, dict.fromkeys(range(data_axes), "sum"), cuts)

    def reduce(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the shard's gradient; differentiable."""
        dtype = gradient.dtype if self.param.sum_dtype is None else self.param.sum_dtype
        found: torch.Tensor = _Reduce.apply(gradient.to(dtype), self)  # type: ignore[no-untyped-call]
        return found if self.param.grad_dtype is None else found.to(self.param.grad_dtype)

    def attach(self, gradient: torch.Tensor | None, reduced: torch.Tensor) -> torch.Tensor:
        """Return a gradient that is reduced already, with the history that `reduce` would give it.

        Arguments:
            gradient: of the gathered parameter; None if this rank has none.
        """
        with torch.enable_grad():
            if gradient is None or not gradient.requires_grad:
                # All ranks must have the same graph.
                gradient = _Zeros.apply(self.param.gathered)  # type: ignore[no-untyped-call]
            result: torch.Tensor = _Attach.apply(gradient, reduced, self)  # type: ignore[no-untyped-call]
        return result


class _Reduce(torch.autograd.Function):
    """Forward: sum over ranks, divided. Backward: `_Gather`."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, how: Reduction) -> torch.Tensor:
        ctx.how = how
        local = gradient.contiguous()
        total: torch.Tensor = redistribute_local(local, how.pending, how.shard)
        return total / how.divisor

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.how.begin()
        return _Gather.apply(gradients[0], ctx.how), None  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    """Forward: all_gather. Backward: `_Reduce`."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, how: Reduction) -> torch.Tensor:
        ctx.how = how
        local = shard.contiguous()
        moved = redistribute_local(local, how.shard, how.whole)
        return moved.clone() if moved is local else moved

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.how.begin()
        return _Reduce.apply(gradients[0], ctx.how), None  # type: ignore[no-untyped-call]


class _Attach(torch.autograd.Function):
    """Forward: the reduced gradient, which is given. Backward: `_Gather`."""

    @staticmethod
    def forward(
        ctx: Any, gradient: torch.Tensor, reduced: torch.Tensor, how: Reduction
    ) -> torch.Tensor:
        ctx.how, ctx.dtype = how, gradient.dtype
        return reduced.view_as(reduced)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.how.begin()
        whole: Any = _Gather.apply(gradients[0], ctx.how)  # type: ignore[no-untyped-call]
        return whole.to(ctx.dtype), None, None


class _Zeros(torch.autograd.Function):
    """Forward: zeros of the shape of a parameter. Backward: zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        with as_local():
            return torch.zeros_like(tensor, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return torch.zeros_like(gradients[0])


class ShardGradient:
    """Where the gradient of a shard comes from: `torch.autograd.grad` asks for it.

    Arguments:
        unit: the unit of the parameter.
        param: the parameter.
    """

    def __init__(self, unit: Any, param: ShardedParam) -> None:
        self._unit, self._param = ref(unit), ref(param)

    @property
    def source(self) -> torch.Tensor | None:
        """The tensor of the graph whose gradients are summed into that of the shard, if any."""
        param = self._param()
        if param is None:
            return None
        with as_local():
            return param.gathered if param.gathered.requires_grad else None

    def complete(self) -> None:
        """Reduce the gradient that `sw.accumulate()` has put off, with all others of the model."""
        unit = self._unit()
        schedule = None if unit is None else unit.groups[0].schedule
        if schedule is not None and schedule.is_accumulating:
            schedule.reduce_put_off()

    def reduce(
        self, gradients: Sequence[tuple[ShardGradient, torch.Tensor | None]]
    ) -> list[torch.Tensor | None]:
        """Return the gradients of shards, after the hooks of these. Every rank must call it, with
        the same parameters.

        Arguments:
            gradients: for each parameter this rank's gradient of its source, if it has one.
        """
        found: list[Any] = []
        for (each, _), is_used in zip(gradients, _find_used(gradients), strict=True):
            found.append(each._reduction() if is_used else None)
        result: list[torch.Tensor | None] = []
        for (_, gradient), how in zip(gradients, found, strict=True):
            if how is None:
                result.append(None)
                continue
            if gradient is None or (torch.is_grad_enabled() and not gradient.requires_grad):
                zeros: Any = _Zeros.apply(how.param.gathered)  # type: ignore[no-untyped-call]
                gradient = zeros if gradient is None else gradient + zeros
            reduced = how.param.apply_grad_hooks(how.reduce(gradient), torch.is_grad_enabled())
            result.append(wrap(reduced, how.shard))
        return result

    def _reduction(self) -> Reduction:
        unit, param = self._unit(), self._param()
        assert unit is not None and param is not None, "it has a source"
        return unit.reduction_of(param)  # type: ignore[no-any-return]


def _find_used(gradients: Sequence[tuple[ShardGradient, torch.Tensor | None]]) -> list[bool]:
    """Return for each parameter whether any rank has a gradient of it."""
    used = [gradient is not None for _, gradient in gradients]
    meshes: dict[Any, list[int]] = {}
    for index, (each, _) in enumerate(gradients):
        unit = each._unit()
        assert unit is not None, "it has a source"
        meshes.setdefault(unit.info.mesh, []).append(index)
    for mesh, indices in meshes.items():
        own = torch.tensor([used[index] for index in indices], dtype=torch.int64)
        counts = communicator(mesh).all_reduce(own.to(mesh.device_type))
        for index, count in zip(indices, counts.tolist(), strict=True):
            used[index] = count > 0
    return used
