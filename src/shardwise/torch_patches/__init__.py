"""Every change that shardwise makes to torch: what, why, and how to undo it.

`import shardwise` calls `install()`. Each patch does what torch does where no DTensor is involved.
Torch's public hooks are used where they suffice (`register_optimizer_step_pre_hook`); each of the
others says why they do not. All patches hold for torch 2.13 to 2.15; a difference between versions
is stated at the patch.
"""

from __future__ import annotations

import functools
import inspect
import threading
from typing import Any

import torch
from torch import nn, optim
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shardwise.api import optimizers
from shardwise.comm import trace
from shardwise.comm.trace import module_scope
from shardwise.dispatch.autograd import apply_to_dtensors
from shardwise.dtensor.tensor import DTensor
from shardwise.dtensor.view_copy import call_with_copies, view_copies_in
from shardwise.torch_internals import (
    CheckpointFrame,
    as_local,
    checkpoint_metadata,
    default_checkpoint_metadata,
    foreach_types,
    is_torch_function_enabled,
)
from shardwise.torch_patches import (
    collectives,
    compiled,
    constructors,
    grad_hooks,
    script,
    state_dicts,
    transforms,
    wrappers,
)
from shardwise.torch_patches.patch import Patch, Undo
from shardwise.torch_patches.patch import replace as _replace
from shardwise.torch_patches.patch import undo_all as _all
from shardwise.torch_patches.profilers import count_local_flops, profile_once_in_a_process

_undos: list[Undo] = []
_changing = threading.Lock()


def install() -> None:
    """Make all changes to torch; does nothing if they are made. If one fails, none is made."""
    with _changing:
        if _undos:
            return
        try:
            for patch in PATCHES:
                _undos.append(patch.apply())
        except BaseException:
            _take_back()
            raise


def uninstall() -> None:
    """Take all changes back: torch is as it was before `import shardwise`.

    Operators on DTensors go on working; what `PATCHES` lists does not.
    """
    with _changing:
        _take_back()


def is_installed() -> bool:
    """Tell whether the changes are made."""
    return bool(_undos)


def _take_back() -> None:
    while _undos:
        _undos.pop()()


# ---- custom autograd functions


def _guard_function_apply() -> Undo:
    # Until 2.13 a Python classmethod, since 2.14 a method of C: both are descriptors of a class.
    apply_of = inspect.getattr_static(torch.autograd.Function, "apply").__get__

    def guarded_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        for arg in args:
            if isinstance(arg, DTensor):
                if is_torch_function_enabled():
                    run = functools.partial(
                        apply_to_dtensors, apply_of(None, cls), cls, args, kwargs
                    )
                    return call_with_copies(view_copies_in(args, kwargs), run)
                break
        return apply_of(None, cls)(*args, **kwargs)

    return _replace(torch.autograd.Function, "apply", classmethod(guarded_apply))


# ---- activation checkpointing


def _compare_shards_in_checkpoints() -> Undo:
    def metadata_of_shard(tensor: torch.Tensor) -> Any:
        with as_local():
            return default_checkpoint_metadata(tensor)

    before = checkpoint_metadata["default"]
    checkpoint_metadata["default"] = metadata_of_shard
    return lambda: checkpoint_metadata.update(default=before)


def _renew_inputs_of_checkpoints() -> Undo:
    save_inputs = CheckpointFrame.save_inputs

    def save_renewed(self: Any, *args: Any) -> None:
        for each in view_copies_in(args):
            each._renew()
        save_inputs(self, *args)

    return _replace(CheckpointFrame, "save_inputs", save_renewed)


# ---- optimizers


def _watch_optimizer_steps() -> Undo:
    handles = [
        register_optimizer_step_pre_hook(optimizers.before_step),
        register_optimizer_step_post_hook(optimizers.after_step),
    ]
    return _all([handle.remove for handle in handles])


def _step_on_shards() -> Undo:
    # All are read before any is changed: AdamW inherits its step from Adam.
    steps: dict[Any, Any] = {kind: kind.step for kind in optimizers.POINTWISE}
    undos = []
    for kind, step in steps.items():
        ours: Any
        if getattr(step, "hooked", False):  # one was made before shardwise was imported
            ours = _hooked(optimizers.on_shards(step.__wrapped__))
        else:
            ours = optimizers.on_shards(step)
        undos.append(_restored_step(kind, ours, step, "step" in vars(kind)))
        kind.step = ours
    return _all(undos)


def _restored_step(kind: Any, ours: Any, before: Any, is_own: bool) -> Undo:
    def undo() -> None:
        now = kind.step
        if now is ours and is_own:
            kind.step = before
        elif now is ours:
            del kind.step
        elif getattr(now, "__wrapped__", None) is ours:  # torch wrapped it for its hooks meanwhile
            kind.step = before if getattr(before, "hooked", False) else _hooked(before)

    return undo


def _hooked(step: Any) -> Any:
    """Wrap a step as torch does when an optimizer is made: it calls the hooks."""
    wrapped: Any = optim.Optimizer.profile_hook_step(step)
    wrapped.hooked = True
    return wrapped


def _lay_out_loaded_state() -> Undo:
    name = "_process_value_according_to_param_policy"
    load = functools.partial(optimizers.load_value, getattr(optim.Optimizer, name))
    return _replace(optim.Optimizer, name, staticmethod(load))


def _hand_dtensors_to_foreach() -> Undo:
    extended = [types for types in foreach_types if DTensor not in types]
    for types in extended:
        types.append(DTensor)
    return _all([functools.partial(types.remove, DTensor) for types in extended])


# ---- modules, while somebody listens to collectives


def _name_running_modules() -> Undo:
    call: Any = nn.Module.__call__

    def named_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with module_scope(module):
            return call(module, *args, **kwargs)

    def watch(is_watched: bool) -> None:
        nonlocal call
        now: Any = nn.Module.__call__
        if is_watched and now is not named_call:
            call = now  # somebody may have wrapped it since
            nn.Module.__call__ = named_call  # type: ignore[method-assign]
        elif not is_watched and now is named_call:
            nn.Module.__call__ = call  # type: ignore[method-assign]

    trace.watch_modules_with(watch)

    def undo() -> None:
        watch(False)
        trace.watch_modules_with(None)

    return undo


PATCHES: tuple[Patch, ...] = (
    Patch(
        "torch.autograd.Function.apply",
        "A custom function bypasses __torch_function__: its forward would see DTensors and its "
        "backward shards. Torch has no hook there.",
        _guard_function_apply,
    ),
    Patch(
        "torch._functorch.vmap._add_batch_dim, .eager_transforms._wrap_for_grad and "
        "._wrap_functional_tensor",
        "torch.func wraps its inputs in C++, where a DTensor is only its shard: whole ones enter "
        "as plain tensors, others are refused.",
        transforms.take_whole_inputs,
    ),
    Patch(
        "torch._functorch.vmap._vmap_increment_nesting and _vmap_decrement_nesting, and the same "
        "of _grad and _jvp in .eager_transforms",
        "Within a transform, tensors that it has wrapped meet DTensors; their results are no "
        "DTensors. Known only from here, as dispatch must not ask for it on every call.",
        transforms.dispatch_in_transforms,
    ),
    Patch(
        "torch.utils.checkpoint._allowed_determinism_checks_to_fns['default']",
        "Checkpointing compares saved tensors, which are shards, with recomputed ones, which are "
        "DTensors: both must be described as shards.",
        _compare_shards_in_checkpoints,
    ),
    Patch(
        "torch.utils.checkpoint._CheckpointFrame.save_inputs",
        "Copies that emulate views of split dims must be up to date before a checkpoint runs.",
        _renew_inputs_of_checkpoints,
    ),
    Patch(
        "register_optimizer_step_pre_hook and _post_hook (public)",
        "A step of parameters that were replaced by DTensors would do nothing: refused. Changed "
        "parameters outdate what was gathered from them.",
        _watch_optimizer_steps,
    ),
    Patch(
        "torch.optim.SGD.step and those of the other pointwise optimizers",
        "They run on the shards as plain tensors. Not by step hooks: these run in the order of "
        "registration, so that a user's hooks would see the plain tensors, and not at all after an "
        "error.",
        _step_on_shards,
    ),
    Patch(
        "torch.optim.Optimizer._process_value_according_to_param_policy",
        "Loaded state of a parameter's shape is laid out as the parameter. Torch's hooks of "
        "load_state_dict are an optimizer's own, not global.",
        _lay_out_loaded_state,
    ),
    Patch(
        "_foreach_supported_types of torch.optim.optimizer and torch.utils._foreach_utils",
        "Optimizers and clip_grad_norm_ use torch._foreach_* only for the types listed there.",
        _hand_dtensors_to_foreach,
    ),
    Patch(
        "torch.nn.Module.__call__, within `listen` and `trace`",
        "Events name the module that runs. Not by global forward hooks: these end before a "
        "module's own hooks, which move tensors at its boundary.",
        _name_running_modules,
    ),
    *constructors.PATCHES,
    *script.PATCHES,
    *state_dicts.PATCHES,
    Patch(
        "torch.autograd.profiler.profile._prepare_trace and .__exit__ (torch.profiler uses them)",
        "Torch has one profiler in a process; a second one, on another thread, crashes or hangs "
        "it. Simulated ranks are threads: the second rank gets an error.",
        profile_once_in_a_process,
    ),
    Patch(
        "torch.utils.flop_counter.FlopCounterMode._count_flops",
        "In a backward, autograd hands on the DTensors that it saved: their shapes are global, "
        "those of the gradients beside them local, so that formulas fail or count too much.",
        count_local_flops,
    ),
    *collectives.PATCHES,
    *compiled.PATCHES,
    *wrappers.PATCHES,
    *grad_hooks.PATCHES,
)
"""All changes, in the order in which they are made."""
