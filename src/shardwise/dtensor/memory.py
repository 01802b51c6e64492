"""Who may have the memory of a DTensor.

A DTensor has the shape of the global tensor and the memory of this rank's shard. Code that does not
know it would read one with the sizes of the other. So its memory is handed out only where the shard
is the whole tensor; elsewhere the call is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from shardwise.core.errors import DispatchError
from shardwise.torch_internals import is_torch_function_enabled

if TYPE_CHECKING:
    from shardwise.core.layout import Layout
    from shardwise.dtensor.properties import GlobalProperties


def check_whole(name: str, tensor: GlobalProperties) -> None:
    """Refuse a call that hands out memory unless each rank's shard is the whole tensor.

    Within `as_local()` every call goes on: there a DTensor has the shape of its shard.
    """
    if not tensor._layout.is_whole and is_torch_function_enabled():
        refuse_piece(name, tensor._layout)


def refuse_piece(name: str, layout: Layout) -> NoReturn:
    """Refuse a call that would take this rank's piece for the global tensor."""
    raise DispatchError(
        f"{name}: would give the memory of this rank's piece, {layout.local_shape()}, for the "
        f"tensor {layout!r}; take x.to_local() for the piece or x.full_tensor() for the whole, or "
        "run code that does not know DTensors within sw.local_map. To files: whole tensors by "
        "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) of torch."
        "distributed.checkpoint.state_dict, which save_pretrained(path, state_dict=...) takes too; "
        "pieces by torch.distributed.checkpoint (async_save with "
        "async_stager=shardwise.CheckpointStager())"
    )


class NoExchangeApi:
    """Hides torch's C functions for DLPack, which export a shard without asking Python.

    Consumers that do not find them call `__dlpack__`.
    """

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError("a DTensor has no __dlpack_c_exchange_api__; use __dlpack__")
