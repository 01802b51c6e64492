"""FSDPModule: the methods that a sharded module has beside those of its own class."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import nn

from shardwise.core.checks import as_int
from shardwise.core.errors import also
from shardwise.fsdp.config import AllGather, ReduceScatter
from shardwise.fsdp.errors import FSDPError, StateError, check_bool
from shardwise.fsdp.forward import run_forward
from shardwise.fsdp.param_group import ParamGroup, check_modules, group_of
from shardwise.fsdp.root import (
    GradientReductionHandle,
    finalize,
    set_manual,
    updated_schedule_of,
)
from shardwise.fsdp.shard_memory import converting, settle
from shardwise.torch_patches import state_dicts

if TYPE_CHECKING:
    _Base = nn.Module
else:
    _Base = object


class UnshardHandle:
    """A gather that `unshard(async_op=True)` has started."""

    def __init__(self, group: ParamGroup) -> None:
        self._group: ParamGroup | None = group

    def wait(self) -> None:
        """Wait until the parameters are gathered. Forward does so itself."""
        if self._group is not None:
            assert self._group.schedule is not None, "unshard has set it"
            self._group.schedule.finish_unshard(self._group)
            self._group = None


class FSDPModule(_Base):
    """A module that `fully_shard` was called on: its class derives from this and its own class."""

    _fsdp_group: ParamGroup
    _orig_cls_mro_index = 2
    """The position of the module's own class among the bases of its new one."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Create a module of its own class: a slice of a sharded `Sequential` is a `Sequential`."""
        own: Any = cls.__mro__[cls._orig_cls_mro_index]
        made = own.__new__(own, *args, **kwargs)
        if _initializes_new_modules.get():
            made.__init__(*args, **kwargs)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run_forward(self, self._fsdp_group, super().__call__, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise FSDPError(
            f"pickle: {type(self).__name__} holds communicators of this process; save a state "
            "dict: module.state_dict(), which has this rank's pieces as DTensors, or whole tensors "
            "by get_model_state_dict(module, options=StateDictOptions(full_state_dict=True)) of "
            "torch.distributed.checkpoint.state_dict"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        result = object.__new__(type(self))
        memo[id(self)] = result
        with self._fsdp_group.with_shards():  # the copy gets shards of its own
            for name, value in self.__dict__.items():
                result.__dict__[name] = copy.deepcopy(value, memo)
        set_outer_groups(result)
        settle(result._fsdp_group)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `nn.Module.zero_grad`; also drop accumulated gradients that are not reduced yet."""
        with ExitStack() as stack:
            for group in _groups_in(self, recurse=True):
                stack.enter_context(group.with_shards())
                for unit in group.units:
                    unit.forget_grads()
            super().zero_grad(set_to_none)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As `nn.Module.state_dict`: the shards, as DTensors, even if parameters are gathered."""
        with self._fsdp_group.with_shards():
            return super().state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._fsdp_group.put_shards()
        self._fsdp_group.note_grad_dtypes()
        super()._load_from_state_dict(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        with converting(self._fsdp_group):
            return super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]

    # ---- parameters

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the parameters of this group ahead of time, but not those of submodules' groups.

        Arguments:
            async_op: return at once, with a handle that has a `wait()` method; forward waits too.
        """
        updated_schedule_of(self._fsdp_group).prefetcher.start(self._fsdp_group.units)
        handle = UnshardHandle(self._fsdp_group)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the memory of this group's parameters, if they are gathered."""
        self._fsdp_group.reshard()

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Set whether the memory of gathered parameters stays allocated after they are resharded,
        so that their addresses stay the same, as CUDA graphs need."""
        check_bool("keep", keep)
        _change_settings(self, recurse, keep_unsharded_storage=keep)
        if not keep:
            for group in _groups_in(self, recurse):
                for unit in group.units:
                    unit.free_kept_storage()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether parameters are resharded after forward, and gathered again in backward."""
        check_bool("reshard_after_forward", reshard_after_forward)
        _change_settings(self, recurse, reshard_after_forward=reshard_after_forward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Set whether parameters are resharded after backward. If not, the next forward only
        gathers those whose shards have changed since."""
        check_bool("reshard_after_backward", reshard_after_backward)
        _change_settings(self, recurse, reshard_after_backward=reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether this group's parameters are gathered for backward. An embedding's backward
        does not need them."""
        check_bool("unshard_in_backward", unshard_in_backward)
        _change_settings(self, False, unshard_in_backward=unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Set the modules to gather while this module's forward runs. By default it is the module
        that came next in the last forward."""
        self._fsdp_group.forward_prefetch = _groups_of(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Set the modules to gather while this module's backward runs. By default it is the module
        that ran before this one in forward."""
        self._fsdp_group.backward_prefetch = _groups_of(modules)

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Gather this group's parameters with `comm`."""
        if not isinstance(comm, AllGather):
            raise FSDPError(f"comm: expected an AllGather, got {type(comm).__name__}")
        _change_settings(self, False, all_gather=comm)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the next forward wait for an event, such as the end of an optimizer's step in
        another stream. Gathers always wait for the current stream, too."""
        if not callable(getattr(event, "wait", None)):
            raise FSDPError(f"event: expected a torch.Event, got {type(event).__name__}")
        updated_schedule_of(self._fsdp_group).post_optim_event = event

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Warn, where the backend has an allocator of its own, that it is not used: buffers are
        allocated once and reused, in ordinary memory, as in torch on backends without one, such as
        gloo. With custom communication, which allocates its own buffers, it is an error.

        For memory of the backend give `set_custom_all_gather` and `set_custom_reduce_scatter` a
        collective that allocates it.
        """
        check_bool("enable", enable)
        _check_no_custom_comm(self._fsdp_group, "set_allocate_memory_from_process_group_for_comm")
        if enable and self._fsdp_group.info.mesh.device_type != "cpu":
            warnings.warn(
                "set_allocate_memory_from_process_group_for_comm: shardwise does not allocate "
                "memory of the process group; buffers are in ordinary memory. Give "
                "set_custom_all_gather() and set_custom_reduce_scatter() collectives that do",
                stacklevel=2,
            )

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Refuse: gathers use ordinary memory.

        Arguments:
            backend: `"NCCL"` is the only one.
        """
        if backend != "NCCL":
            raise FSDPError(f"backend: expected 'NCCL', got {backend!r}")
        _check_no_custom_comm(self._fsdp_group, "set_symm_mem_for_comm")
        raise also(FSDPError, NotImplementedError)(
            "set_symm_mem_for_comm: shardwise does not gather parameters in symmetric memory; give "
            "set_custom_all_gather() an AllGather whose allocate() takes it from "
            "torch.distributed._symmetric_memory"
        )

    # ---- gradients

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether backward reduces gradients. If not, they are accumulated unsharded."""
        check_bool("requires_gradient_sync", requires_gradient_sync)
        _change_settings(
            self, recurse, gradient_sync=requires_gradient_sync, all_reduce=requires_gradient_sync
        )

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backward sums gradients over the replicate axis. If not, they are accumulated
        shard by shard until a backward does."""
        check_bool("requires_all_reduce", requires_all_reduce)
        _change_settings(self, recurse, all_reduce=requires_all_reduce)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward waits for its reductions. With False they overlap with
        the next microbatch; the last backward must wait."""
        check_bool("is_last_backward", is_last_backward)
        updated_schedule_of(self._fsdp_group).is_last_backward = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Set whether a backward is over only when `finalize_backward` is called. Until then
        gradients may not be reduced, even after `set_is_last_backward(True)`.

        Call it on the root, the outermost sharded module, before backward. The mode cannot change
        between the start of a backward and its finalization.
        """
        set_manual(self._fsdp_group, enabled)

    @overload
    def finalize_backward(self, *, async_op: Literal[False] = False) -> None: ...

    @overload
    def finalize_backward(self, *, async_op: Literal[True]) -> GradientReductionHandle: ...

    @overload
    def finalize_backward(self, *, async_op: bool) -> GradientReductionHandle | None: ...

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce the gradients that the backwards of this root have left, and reshard parameters,
        by the present settings; needs `set_manual_backward_finalization(True)`.

        Call it on every rank, after all backwards of an iteration. If there are several, call
        `set_requires_gradient_sync(False)` before them, and `(True)` before this. Before the first
        forward it does nothing.

        Arguments:
            async_op: return at once, with a handle. Call its `wait()` before gradients are used,
                and before the next forward.
        """
        return finalize(self._fsdp_group, async_op)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of this group's gradients by `factor`, not by the number of ranks."""
        is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
        if not is_number or factor == 0 or not math.isfinite(factor):
            raise FSDPError(f"factor: expected a finite number other than 0, got {factor!r}")
        _change_settings(self, False, divide_factor=float(factor))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Call `set_gradient_divide_factor`; this is torch's older name for it."""
        self.set_gradient_divide_factor(factor)

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Set how many reductions may be in flight before backward waits for the oldest: 1 by
        default. More need more memory, and help if reductions are slower than backward.

        Arguments:
            recurse: accepted as in torch; the number applies to all groups of a model.
        """
        count = as_int(max_input_buffers)
        if count is None or count < 1:
            raise FSDPError(
                f"max_input_buffers: expected a number from 1 on, got {max_input_buffers!r}"
            )
        updated_schedule_of(self._fsdp_group).reduce_queue.max_input_buffers = count

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Do nothing: gathers and reductions always have separate channels."""
        check_bool("enable", enable)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Set whether half-precision gradients are summed as well, and divided afterwards, as
        others always are. By default the collective averages them, in a wider dtype, as a sum
        could overflow."""
        check_bool("enable", enable)
        _change_settings(self, False, sums_only=enable)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Set whether parameters that no rank has used get zeros as gradients. By default they
        have none, as in one process. Parameters that some ranks have used always get theirs."""
        check_bool("reduce_scatter_unused_params", reduce_scatter_unused_params)
        _change_settings(self, recurse, fill_unused=reduce_scatter_unused_params)

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: torch.Stream | None = None
    ) -> None:
        """Call `hook` with this group's reduced gradients, flat, before the shards get them.

        Arguments:
            hook: may change them in place.
            stream: accepted as in torch; the hook runs in the stream of backward.
        """
        if not callable(hook):
            raise FSDPError(f"hook: expected a function of a tensor, got {hook!r}")
        _change_settings(self, False, all_reduce_hook=hook)

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce this group's gradients with `comm`."""
        if not isinstance(comm, ReduceScatter):
            raise FSDPError(f"comm: expected a ReduceScatter, got {type(comm).__name__}")
        _change_settings(self, False, reduce_scatter=comm)

    # ---- what torch's own modules have, for programs that read it

    def _get_fsdp_state(self) -> ParamGroup:
        return self._fsdp_group

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Do nothing: gathers are always asynchronous, and never in a stream of their own."""
        check_bool("async_op", async_op)

    # ---- after exceptions

    def reset_iter_state(self) -> None:
        """Drop an iteration that an exception has ended, and its gradients that have not reached
        the shards. The next forward does so by itself if necessary.

        A `GradientReductionHandle` of this root becomes invalid. While a handle of another root
        with the same schedule is outstanding, the call is an error."""
        schedule = self._fsdp_group.schedule
        if schedule is not None:
            if schedule.outstanding is not None:
                schedule.outstanding.check_owner(self._fsdp_group.root)
            schedule.recover()


class ReplicateModule(FSDPModule):
    """A module that `replicate` was called on."""

    _orig_cls_mro_index = 3

    def register_comm_hook(self, *args: Any, **kwargs: Any) -> None:
        """Refuse a hook of `DistributedDataParallel`, which gets buckets of its reducer."""
        raise StateError(
            "register_comm_hook: gradients of this module are not in buckets of "
            "DistributedDataParallel; choose the dtype of reductions with "
            "MixedPrecisionPolicy(reduce_dtype=), change reduced gradients with "
            "set_all_reduce_hook(), or wrap the model in DistributedDataParallel instead"
        )


_initializes_new_modules: ContextVar[bool] = ContextVar("new_modules", default=True)


@contextmanager
def disable_fsdp_module_new_init() -> Iterator[None]:
    """Return a context in which `type(sharded)(...)` makes a module without calling `__init__`."""
    token = _initializes_new_modules.set(False)
    try:
        yield
    finally:
        _initializes_new_modules.reset(token)


# Functions, not methods: a method would hide an attribute of the user's module of the same name.


def _groups_in(module: FSDPModule, recurse: bool) -> Iterable[ParamGroup]:
    """Return the group of a module, with `recurse` also those of its submodules."""
    if not recurse:
        return [module._fsdp_group]
    modules = (each for each in module.modules() if isinstance(each, FSDPModule))
    return dict.fromkeys(each._fsdp_group for each in modules)


def _change_settings(module: FSDPModule, recurse: bool, **settings: Any) -> None:
    for group in _groups_in(module, recurse):
        group.change_settings(**settings)


def _check_no_custom_comm(group: ParamGroup, setter: str) -> None:
    for comm in (group.settings.all_gather, group.settings.reduce_scatter):
        if comm is not None:
            raise FSDPError(
                f"{setter}: {group.name} has custom communication ({type(comm).__name__}), which "
                "allocates its own buffers"
            )


_classes: dict[tuple[type, str], type] = {}


def swap_class(module: nn.Module, group: ParamGroup, prefix: str) -> None:
    """Change the class of a module: `FSDPLinear` is both an `FSDPModule` and a `Linear`."""
    own = type(module)
    found = _classes.get((own, prefix))
    if found is None:
        base = ReplicateModule if prefix == "Replicate" else FSDPModule
        found = _classes[own, prefix] = type(f"{prefix}{own.__name__}", (base, own), {})
    module._fsdp_group = group  # type: ignore[assignment]
    module.__class__ = found
    module.register_load_state_dict_post_hook(_settle_after_load)  # type: ignore[no-untyped-call]
    set_outer_groups(module)


def get_cls_to_fsdp_cls() -> dict[type, type]:
    """Return the classes that `fully_shard` has made, by the modules' own classes."""
    return {own: made for (own, prefix), made in _classes.items() if prefix == "FSDP"}


def _settle_after_load(module: Any, _: Any) -> None:
    settle(module._fsdp_group)


def set_outer_groups(module: Any) -> None:
    """Make the group of a sharded module the outer group of the groups within it."""
    group: ParamGroup = module._fsdp_group
    for each in module.modules():
        inner: ParamGroup | None = getattr(each, "_fsdp_group", None)
        if inner is not None and inner is not group and inner.outer is None:
            inner.outer = group


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let another method of a sharded module gather parameters, as `forward` does.

    Arguments:
        module: if it is not sharded, the call does nothing.
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
        bound = functools.partial(function, self)
        return run_forward(self, self._fsdp_group, bound, args, kwargs)

    setattr(module, method_name, MethodType(gathered, module))


def _groups_of(modules: Sequence[FSDPModule]) -> list[ParamGroup]:
    check_modules(modules)
    return [group_of(module, f"modules[{index}]") for index, module in enumerate(modules)]


def _put_shards(model: nn.Module) -> None:
    """Put the shards into all sharded modules of a model, where parameters are gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module._fsdp_group.put_shards()


state_dicts.before_use.append(_put_shards)
