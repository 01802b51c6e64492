"""Functions compiled by torch.compile run eagerly when they get DTensors.

Dynamo would trace the shard of a DTensor as a tensor of the global shape, and fails. Optimizers and
libraries compile parts of their code, which a user may not be able to change.
"""

from __future__ import annotations

import functools
import warnings
from types import ModuleType
from typing import Any

from shardwise.core.errors import ShardwiseError
from shardwise.dispatch.fallback import FallbackWarning
from shardwise.dtensor.tensor import DTensor, tensors_in
from shardwise.torch_internals import FRAME_CONVERSION
from shardwise.torch_patches.patch import Patch, Undo, replace, when_imported

told: set[Any] = set()
"""The code of functions of which a warning has told."""


def _run_eagerly(module: ModuleType) -> Undo:
    convert = module.ConvertFrame.__call__

    @functools.wraps(convert)
    def convert_unless_distributed(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        if not _has_dtensors(frame.f_locals):
            try:
                return convert(self, frame, *args, **kwargs)
            except Exception as error:  # a DTensor in an attribute or a closure
                if not _is_ours(error):
                    raise
        _tell(frame.f_code)
        # Only this call: the same function may get plain tensors later.
        skip = module.FrameExecStrategy(module.FrameAction.SKIP, module.FrameAction.SKIP)
        return module.ConvertFrameReturn(frame_exec_strategy=skip, apply_to_code=False)

    return replace(module.ConvertFrame, "__call__", convert_unless_distributed)


def _has_dtensors(values: dict[str, Any]) -> bool:
    return any(isinstance(each, DTensor) for each in tensors_in(dict(values)))


def _is_ours(error: BaseException | None) -> bool:
    """Return whether an error comes from one of shardwise."""
    while error is not None:
        if isinstance(error, ShardwiseError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _tell(code: Any) -> None:
    if code in told:
        return
    told.add(code)
    warnings.warn(
        f"torch.compile: {code.co_qualname} ({code.co_filename}:{code.co_firstlineno}) gets "
        "DTensors, which are not compiled: it runs eagerly. To compile it, call it with local "
        "tensors, within sw.local_map",
        FallbackWarning,
        stacklevel=3,
    )


PATCHES = (
    Patch(
        "torch._dynamo.convert_frame.ConvertFrame.__call__",
        "Dynamo cannot trace DTensors: a compiled function that gets one runs eagerly. Torch has "
        "no hook that sees the arguments.",
        functools.partial(when_imported, FRAME_CONVERSION, _run_eagerly),
    ),
)
