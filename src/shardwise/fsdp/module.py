"""FSDPModule: what a sharded module can do beside its own class's methods."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import nn

from shardwise.checks import as_int
from shardwise.fsdp.custom import AllGather, ReduceScatter
from shardwise.fsdp.errors import FSDPError, check_bool
from shardwise.fsdp.finalizing import GradientReductionHandle, finalize, set_manual
from shardwise.fsdp.group import Group, check_group, check_list

if TYPE_CHECKING:
    _Base = nn.Module
else:
    _Base = object


class UnshardHandle:
    """A gather under way, that `unshard(async_op=True)` has started."""

    def __init__(self, group: Group) -> None:
        self._group: Group | None = group

    def wait(self) -> None:
        """Wait until the parameters are gathered. Forward does so itself."""
        if self._group is not None:
            self._group.wait()
            self._group = None


class FSDPModule(_Base):
    """The module that `fully_shard` was called on: its class is made of this and its own."""

    _fsdp_group: Group

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """One of its own class: a part of a sharded `Sequential` is a `Sequential`."""
        own = cls.__mro__[2]
        return own(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _run(self, self._fsdp_group, super().__call__, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise FSDPError(
            f"pickle: {type(self).__name__} holds ways to talk to other ranks; save "
            "module.state_dict(), which is DTensors"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        result = object.__new__(type(self))
        memo[id(self)] = result
        with self._fsdp_group.with_shards():  # the copy has shards of its own
            for name, value in self.__dict__.items():
                result.__dict__[name] = copy.deepcopy(value, memo)
        take_in(result)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `nn.Module.zero_grad`; gradients that are accumulated and not reduced yet go too."""
        with ExitStack() as stack:
            for group in self._groups(recurse=True):
                stack.enter_context(group.with_shards())
                for unit in group.units:
                    unit.forget_gradients()
            super().zero_grad(set_to_none)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As `nn.Module.state_dict`: shards, as DTensors, also while parameters are gathered."""
        with self._fsdp_group.with_shards():
            return super().state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._fsdp_group.put_shards()
        self._fsdp_group.note_grad_dtypes()
        super()._load_from_state_dict(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._fsdp_group.put_shards()
        with self._fsdp_group.without_set_grad_dtypes():
            return super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]

    # ---- parameters

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the parameters of this group, not of submodules' groups, ahead of time.

        Arguments:
            async_op: return at once a handle that has a `wait()`, which forward also calls.
        """
        self._fsdp_group.unshard()
        handle = UnshardHandle(self._fsdp_group)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Give back the memory of the gathered parameters of this group, if there is any."""
        self._fsdp_group.reshard()

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Say whether the memory of gathered parameters stays allocated when they are given back,
        so that their addresses are the same each time; as graphs of CUDA need it."""
        check_bool("keep", keep)
        self._change(recurse, keep_unsharded_storage=keep)
        if not keep:
            for group in self._groups(recurse):
                for unit in group.units:
                    unit.stop_keeping_memory()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Say whether parameters are given back after forward, and gathered again in backward."""
        check_bool("reshard_after_forward", reshard_after_forward)
        self._change(recurse, reshard_after_forward=reshard_after_forward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Say whether parameters are given back after backward. Kept ones need no gather in the
        next forward, unless the shards have changed since, which is noticed."""
        check_bool("reshard_after_backward", reshard_after_backward)
        self._change(recurse, reshard_after_backward=reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Say whether this group's backward needs its parameters; that of an embedding does not."""
        check_bool("unshard_in_backward", unshard_in_backward)
        self._change(False, unshard_in_backward=unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Say what to gather while this module's forward runs, in place of what came next the
        last time."""
        self._fsdp_group.forward_prefetch = _groups_of(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Say what to gather while this module's backward runs, in place of what came before it."""
        self._fsdp_group.backward_prefetch = _groups_of(modules)

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Gather this group's parameters with `comm`."""
        if not isinstance(comm, AllGather):
            raise FSDPError(f"comm: expected an AllGather, got {type(comm).__name__}")
        self._change(False, all_gather=comm)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the next forward wait for an event, once: the end of an optimizer's step in another
        stream. Gathers always wait for the current stream, too."""
        if not callable(getattr(event, "wait", None)):
            raise FSDPError(f"event: expected a torch.Event, got {type(event).__name__}")
        self._fsdp_group.ready_context().post_optim_event = event

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Nothing changes: buffers are allocated once and used again, in ordinary memory.
        Refused beside custom communication, which allocates for itself."""
        check_bool("enable", enable)
        self._check_no_custom("set_allocate_memory_from_process_group_for_comm")

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Nothing changes: gathers use ordinary memory. Refused beside custom communication, which
        allocates for itself.

        Arguments:
            backend: `"NCCL"` is the only one.
        """
        if backend != "NCCL":
            raise FSDPError(f"backend: expected 'NCCL', got {backend!r}")
        self._check_no_custom("set_symm_mem_for_comm")

    # ---- gradients

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Say whether backward reduces gradients. If not, they are accumulated unsharded."""
        check_bool("requires_gradient_sync", requires_gradient_sync)
        self._change(
            recurse, gradient_sync=requires_gradient_sync, all_reduce=requires_gradient_sync
        )

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Say whether backward sums gradients over the replicate axis. If not, the shards'
        gradients are accumulated until it does."""
        check_bool("requires_all_reduce", requires_all_reduce)
        self._change(recurse, all_reduce=requires_all_reduce)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Say whether the next backward waits for gradients under way. With False they go on
        beside the next microbatch; the last one must wait."""
        check_bool("is_last_backward", is_last_backward)
        self._fsdp_group.ready_context().is_last_backward = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Say whether a backward is over only when `finalize_backward` is called. Until then
        gradients may not be reduced, whatever `set_is_last_backward` says.

        Call it on the root, the outermost sharded module, before backward. From the begin of a
        backward to its finalization the mode cannot change.
        """
        set_manual(self._fsdp_group, enabled)

    @overload
    def finalize_backward(self, *, async_op: Literal[False] = False) -> None: ...

    @overload
    def finalize_backward(self, *, async_op: Literal[True]) -> GradientReductionHandle: ...

    @overload
    def finalize_backward(self, *, async_op: bool) -> GradientReductionHandle | None: ...

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce the gradients that the backwards of this root have left, and give back memory, as
        settings are now; needs `set_manual_backward_finalization(True)`.

        Call it after all backwards of an iteration, on every rank. If there are several, call
        `set_requires_gradient_sync(False)` before them, and `(True)` before this. Before the first
        forward nothing happens.

        Arguments:
            async_op: return at once a handle. Call its `wait()` before gradients are used, and
                before the next forward.
        """
        return finalize(self._fsdp_group, async_op)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of this group's gradients by `factor`, not by the number of ranks."""
        is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
        if not is_number or factor == 0 or not math.isfinite(factor):
            raise FSDPError(f"factor: expected a finite number other than 0, got {factor!r}")
        self._change(False, divide_factor=float(factor))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """torch's older name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Say how many reductions may be on their way before backward waits for the oldest: 1 by
        default. More take more memory, and help if gradients travel slower than they come.

        Arguments:
            recurse: accepted for torch's sake; it is one number for all groups of a model.
        """
        count = as_int(max_input_buffers)
        if count is None or count < 1:
            raise FSDPError(
                f"max_input_buffers: expected a number from 1 on, got {max_input_buffers!r}"
            )
        self._fsdp_group.ready_context().line.ahead = count

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Nothing changes: gathers and reductions always have a way of their own."""
        check_bool("enable", enable)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Nothing changes: what travels is always summed, and divided afterwards."""
        check_bool("enable", enable)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Say whether parameters that no rank has used get zeros as gradients. By default they have
        none, as in one process. What only some ranks have used is right either way."""
        check_bool("reduce_scatter_unused_params", reduce_scatter_unused_params)
        self._change(recurse, fill_unused=reduce_scatter_unused_params)

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: torch.Stream | None = None
    ) -> None:
        """Call `hook` with this group's reduced gradients, flat, before the shards get them.

        Arguments:
            hook: may change them in place.
            stream: accepted for torch's sake; the hook runs in the stream of backward.
        """
        if not callable(hook):
            raise FSDPError(f"hook: expected a function of a tensor, got {hook!r}")
        self._change(False, all_reduce_hook=hook)

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce this group's gradients with `comm`."""
        if not isinstance(comm, ReduceScatter):
            raise FSDPError(f"comm: expected a ReduceScatter, got {type(comm).__name__}")
        self._change(False, reduce_scatter=comm)

    # ---- the rest

    def reset_iter_state(self) -> None:
        """Forget an iteration that an exception has ended, with its gradients that no shard has
        got. The next forward does so itself if it must. A `GradientReductionHandle` of this root
        cannot be waited for any more; while one of another root with the same schedule is
        outstanding, this is refused."""
        context = self._fsdp_group.context
        if context is not None:
            if context.outstanding is not None:
                context.outstanding.check_owner(self._fsdp_group.root)
            context.recover()

    def _check_no_custom(self, setter: str) -> None:
        settings = self._fsdp_group.settings
        for comm in (settings.all_gather, settings.reduce_scatter):
            if comm is not None:
                raise FSDPError(
                    f"{setter}: {self._fsdp_group.name} has custom communication "
                    f"({type(comm).__name__}), which allocates for itself"
                )

    def _groups(self, recurse: bool) -> Iterable[Group]:
        if not recurse:
            return [self._fsdp_group]
        modules = (module for module in self.modules() if isinstance(module, FSDPModule))
        return dict.fromkeys(module._fsdp_group for module in modules)

    def _change(self, recurse: bool, **settings: Any) -> None:
        for group in self._groups(recurse):
            group.change(**settings)


def _run(
    module: nn.Module,
    group: Group,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    args, kwargs, call = group.before(args, kwargs)
    try:
        output = function(*args, **kwargs)
    except BaseException:
        group.failed()
        raise
    return group.after(module, output, call)


_classes: dict[tuple[type, str], type] = {}


def swap_class(module: nn.Module, group: Group, prefix: str) -> None:
    """Make a module one that is sharded: `FSDPLinear` is both an `FSDPModule` and a `Linear`."""
    own = type(module)
    found = _classes.get((own, prefix))
    if found is None:
        found = _classes[own, prefix] = type(f"{prefix}{own.__name__}", (FSDPModule, own), {})
    module._fsdp_group = group  # type: ignore[assignment]
    module.__class__ = found
    take_in(module)


def take_in(module: Any) -> None:
    """Let the groups within a sharded module know that it is around them."""
    group: Group = module._fsdp_group
    for each in module.modules():
        inner: Group | None = getattr(each, "_fsdp_group", None)
        if inner is not None and inner is not group and inner.outer is None:
            inner.outer = group


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let another method of a sharded module gather parameters, as `forward` does.

    Arguments:
        module: nothing happens if it is not sharded.
        method_name: such as `"generate"`.
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None) if isinstance(method_name, str) else None
    if not callable(method):
        raise FSDPError(
            f"method_name: expected a method of {type(module).__name__}, got {method_name!r}"
        )

    function = getattr(method, "__func__", None)
    if function is None:
        raise FSDPError(
            f"method_name: expected a method of {type(module).__name__}, got {method!r}, which is "
            "a function that does not get the module"
        )

    @functools.wraps(function)
    def gathered(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _run(self, self._fsdp_group, functools.partial(function, self), args, kwargs)

    setattr(module, method_name, MethodType(gathered, module))


def _groups_of(modules: Sequence[FSDPModule]) -> list[Group]:
    check_list(modules)
    return [check_group(module, f"modules[{at}]") for at, module in enumerate(modules)]
