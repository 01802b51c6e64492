"""State that Python and torch keep for a whole process: each simulated rank has its own.

Simulated ranks are threads of one process. Whatever a rank changes within `with` and restores at
the end of the block, as `warnings.catch_warnings` does, would be seen by the ranks that run while
it waits in a collective, and would be restored in the wrong order. So the scheduler swaps this
state with the turn. State that torch keeps for each thread (grad mode, autocast, inference mode,
the default device, modes) needs no swap.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch

from shardwise.torch_internals import global_hooks


class _Warnings(NamedTuple):
    """The filters of warnings and what shows them: `catch_warnings` sets and restores all."""

    filters: list[Any]
    show: Any
    show_message: Any


class ProcessState(NamedTuple):
    """The state that is swapped."""

    random: torch.Tensor
    """Of torch's default generator of the CPU."""
    dtype: torch.dtype
    """The default dtype of new tensors."""
    deterministic: int
    """`torch.use_deterministic_algorithms`."""
    anomaly: tuple[bool, bool]
    """`torch.autograd.detect_anomaly`: whether it is on, and whether it looks for NaN."""
    warnings: _Warnings
    hooks: tuple[dict[int, Any], ...]
    """The hooks of all modules and optimizers, by their handles."""


def current_state() -> ProcessState:
    """Return the state that the process has now."""
    module: Any = warnings
    return ProcessState(
        torch.get_rng_state(),
        torch.get_default_dtype(),
        torch.get_deterministic_debug_mode(),
        (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        _Warnings(module.filters, module.showwarning, module._showwarnmsg_impl),
        tuple(map(dict, global_hooks)),
    )


def own_copy(state: ProcessState) -> ProcessState:
    """Return a state that a rank may change: `warnings.simplefilter` writes to the filters."""
    own = state.warnings._replace(filters=list(state.warnings.filters))
    return state._replace(warnings=own)


def set_state(state: ProcessState) -> None:
    """Give the process another state."""
    torch.set_rng_state(state.random)
    if torch.get_default_dtype() != state.dtype:
        torch.set_default_dtype(state.dtype)
    if torch.get_deterministic_debug_mode() != state.deterministic:
        torch.set_deterministic_debug_mode(state.deterministic)
    if (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()) != state.anomaly:
        torch.autograd.set_detect_anomaly(*state.anomaly)
    _set_warnings(state.warnings)
    for hooks, wanted in zip(global_hooks, state.hooks, strict=True):
        if hooks != wanted:
            hooks.clear()  # the same dict: handles refer to it
            hooks.update(wanted)


def _set_warnings(wanted: _Warnings) -> None:
    module: Any = warnings
    before, module.filters = module.filters, wanted.filters
    module.showwarning, module._showwarnmsg_impl = wanted.show, wanted.show_message
    if before != wanted.filters:
        with warnings.catch_warnings():  # which makes Python forget what the old filters decided
            pass
