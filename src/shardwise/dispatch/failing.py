"""Calls that fail for what one rank holds, as of a batch of matrices of which one is singular.

They fail on every rank: else those that did not would go on, and wait for it in vain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.comm import communicator
from shardwise.comm.cause import running
from shardwise.rules.spec import Here
from shardwise.tensor import tensors_in

_LinAlgError: Any = torch.linalg.LinAlgError  # type: ignore[attr-defined]

AGREEING = "success"
"""What such a collective is about, in its cause: it moves nothing of the tensors."""


def failing_together(name: str, run: Callable[..., Any], here: Here) -> Callable[..., Any]:
    """The local call, after which ranks with other parts tell each other whether it failed.

    Costs a gather of a byte for each rank, unless all have the same.
    """
    axes = here.axes(*here.splits)
    if not axes or here.mesh.is_abstract:
        return run
    group = communicator(here.mesh, axes)

    def checked(*args: Any, **kwargs: Any) -> Any:
        given = next(tensors_in((args, kwargs)))
        if given.is_meta:
            return run(*args, **kwargs)
        result, failure = None, None
        try:
            result = run(*args, **kwargs)
        except RuntimeError as error:
            failure = error
        kind = 0 if failure is None else 1 + isinstance(failure, _LinAlgError)
        mine = torch.tensor([kind], dtype=torch.uint8, device=given.device)
        with running(f"{AGREEING} of {name}"):
            failed = group.all_gather(mine).tolist()
        if failure is not None:
            raise failure
        if any(failed):
            ranks = [rank for rank, has in zip(group.ranks, failed, strict=True) if has]
            error_type = _LinAlgError if 2 in failed else RuntimeError
            raise error_type(
                f"{name}: failed on ranks {ranks}, which hold other parts of the batch than this "
                "one; their errors say why"
            )
        return result

    return checked
