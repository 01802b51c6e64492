"""The fallback for calls without a rule: every rank runs them on replicated inputs.

Always right, never fast.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from shardwise.comm import carries_values
from shardwise.core.errors import PolicyError
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh
from shardwise.dispatch.cached_call import CachedCall
from shardwise.dtensor.call_args import ArgPath, Args, Kwargs
from shardwise.dtensor.input_moves import InputMove
from shardwise.dtensor.state import state
from shardwise.dtensor.tensor import tensors_in
from shardwise.dtensor.writes import mark_detached_copy
from shardwise.random.seed_check import check_plain_draws


class FallbackWarning(UserWarning):
    """An operator has no rule for a call, so its inputs are replicated."""


class FallbackCall(CachedCall):
    """A call on replicated inputs: its results are replicated, whatever their shapes."""

    __slots__ = ("mesh",)

    def __init__(
        self,
        name: str,
        run: Any,
        paths: list[ArgPath],
        moves: list[tuple[ArgPath, InputMove]],
        mesh: DeviceMesh,
    ) -> None:
        super().__init__(name, run, paths, moves, (), needs_plain=True)
        self.mesh = mesh
        self.returns_views = bool(moves)

    def __call__(self, args: Args, kwargs: Kwargs) -> Any:
        if self.moves:
            _report_fallback(self.name, [move.source for _, move in self.moves])
        if not carries_values(self.mesh):
            return super().__call__(args, kwargs)
        before = _random_state()
        result = super().__call__(args, kwargs)
        if _random_state() != before:
            check_plain_draws(self.mesh)
        return result

    def retyped(self, result: Any, operands: tuple[Any, ...] = ()) -> Any:
        results = list(tensors_in(result))
        layouts = iter([Layout(self.mesh, tuple(each.shape)) for each in results])
        made = self._retyped(result, layouts, operands)
        if self.moves:
            # A view of a moved input is not a view of the input itself.
            inputs = {_address(each) for each in tensors_in(operands)} - {0}
            for each in tensors_in(made):
                if _address(each) in inputs:
                    mark_detached_copy(each, self.name)
        return made


def _random_state() -> bytes:
    return torch.get_rng_state().numpy().tobytes()


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse tensors and the like have none
        return 0


def _report_fallback(name: str, layouts: Sequence[Layout]) -> None:
    state.fallbacks[name] = state.fallbacks.get(name, 0) + 1
    if state.fallback == "replicate":
        return
    text = (
        f"{name} has no rule for inputs of these layouts: {', '.join(map(repr, layouts))}; they "
        "are replicated and every rank computes the whole result"
    )
    if state.fallback == "error":
        raise PolicyError(
            f"{text}, which sw.fallback('error') forbids. Register a rule with "
            "sw.register_rule, or redistribute the inputs to Replicate()"
        )
    file, line = _warning_location()
    if (name, file, line) not in state.warned:
        state.warned.add((name, file, line))
        warnings.warn_explicit(
            f"{text}. sw.register_rule adds a rule, sw.fallback('replicate') silences this",
            FallbackWarning,
            file,
            line,
        )


_ROOTS = tuple(
    path.rpartition("/")[0] + "/" for path in (torch.__file__, __file__.rpartition("/")[0])
)


def _warning_location() -> tuple[str, int]:
    """Return the file and number of the innermost line outside of torch and shardwise."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_ROOTS):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
