"""Torch's helpers for state dicts (`torch.distributed.checkpoint.state_dict`), for our tensors.

They ask `isinstance(value, torch's DTensor)`, and would take the pieces of ours for whole tensors.
Their modules import much, and with it torch's own DTensor, so they are changed when the program
imports them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import distributed, nn

from shardwise.api.distribute import own_shard
from shardwise.core.errors import LayoutError
from shardwise.dtensor.tensor import DTensor, unwrap
from shardwise.torch_internals import STATE_DICT_HELPERS, STATE_DICT_STAGER, STATE_DICT_UTILS
from shardwise.torch_patches.patch import Patch, Undo, replace, undo_all, when_imported

global_types: list[type] = [DTensor]
"""The classes of tensors that each rank holds a piece of. They have `full_tensor()`, and `_staged`:
the same tensor made of copies of its pieces."""

before_use: list[Callable[[nn.Module], None]] = []
"""Called with the model before torch lists its parameters: gathered ones must be pieces again."""


def _is_global(value: Any) -> bool:
    return isinstance(value, tuple(global_types))


# ---- reading: every value of a state dict


def _gather(value: Any, *_: Any) -> torch.Tensor:
    """Return the whole tensor, on every rank: `full_state_dict=True`."""
    return value.full_tensor().detach()  # type: ignore[no-any-return]


def _empty_on_cpu(value: Any, *_: Any) -> torch.Tensor:
    """Return a tensor of the same layout, to be filled by a stager."""
    return torch.empty_like(value, device="cpu")


_FOR_CALLERS: dict[str, Callable[..., torch.Tensor]] = {
    "_gather_state_dict": _gather,
    "_create_cpu_state_dict": _empty_on_cpu,
}
"""What torch's callers of `_iterate_state_dict` do with a DTensor; others leave it as it is."""


def _iterate(iterate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(iterate)
    def iterate_with_ours(
        value: Any, for_sharded: Any, for_dtensors: Any, for_tensors: Any, **options: Any
    ) -> Any:
        if _is_global(value):
            # Its caller is known by the function that it hands over, which is defined within it.
            caller = for_dtensors.__qualname__.partition(".")[0]
            for_tensors = _FOR_CALLERS.get(caller, for_tensors)
        return iterate(value, for_sharded, for_dtensors, for_tensors, **options)

    return iterate_with_ours


# ---- writing: whole tensors become pieces, in the layout of the tensor they are meant for


def _distribute_like(local: dict[str, Any], before: dict[str, DTensor]) -> None:
    for key, like in before.items():
        value = local.get(key)
        # A tensor of another shape stays as it is: load_state_dict says which, and what it expects.
        if type(value) is torch.Tensor and value.shape == like.shape:
            local[key] = own_shard(value, like._layout)


def _dtensors_of(local: dict[str, Any]) -> dict[str, DTensor]:
    return {key: value for key, value in local.items() if isinstance(value, DTensor)}


def _broadcast_tensors(broadcast: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(broadcast)
    def broadcast_to_ours(
        full: dict[str, Any], local: dict[str, Any], keys: list[str], *args: Any, **kwargs: Any
    ) -> None:
        before = _dtensors_of({key: local.get(key) for key in keys})
        broadcast(full, local, keys, *args, **kwargs)
        _distribute_like(local, before)

    return broadcast_to_ours


@dataclass(frozen=True)
class _Refused:
    """Takes the place of a tensor that rank 0 cannot broadcast, so that all ranks refuse it."""

    found: str


def _broadcast(broadcast: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(broadcast)
    def broadcast_whole(
        full: dict[str, Any], local: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        before = _dtensors_of(local)
        broadcast({key: _as_sent(full[key]) for key in full}, local, *args, **kwargs)
        _distribute_like(local, before)  # those without dims: torch does not broadcast tensors then
        for key, value in local.items():
            if isinstance(value, _Refused):
                raise LayoutError(
                    f"state_dict[{key!r}]: expected a whole tensor on rank 0, which "
                    f"broadcast_from_rank0=True sends to the others; got {value.found}. "
                    "Load a state dict of DTensors without full_state_dict and "
                    "broadcast_from_rank0, or make it with full_state_dict=True"
                )

    return broadcast_whole


def _as_sent(value: Any) -> Any:
    if isinstance(value, DTensor) and value._layout.is_whole:
        return unwrap(value).detach()
    if _is_global(value):
        return _Refused(f"{type(value).__name__} {getattr(value, '_layout', tuple(value.shape))!r}")
    return value


def _distribute(distribute: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(distribute)
    def distribute_to_ours(
        full: dict[str, Any], local: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        before = _dtensors_of(local)
        distribute(full, local, *args, **kwargs)
        _distribute_like(local, before)

    return distribute_to_ours


def _load_model(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def load_model(model: nn.Module, state_dict: dict[str, Any], info: Any) -> Any:
        if any(map(_is_global, model.parameters())):
            if info.broadcast_from_rank0:
                # Torch lets a rank without a state dict take no part in the broadcast.
                is_given = [bool(state_dict)]
                distributed.broadcast_object_list(is_given, src=0)
                info.handle_model = is_given[0]
            else:
                _refuse_empty(state_dict, info)
        return load(model, state_dict, info)

    return load_model


def _load_optimizer(load: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(load)
    def load_optimizer(
        model: nn.Module, optimizers: Any, state_dict: dict[str, Any], info: Any
    ) -> None:
        if any(map(_is_global, model.parameters())) and not info.broadcast_from_rank0:
            _refuse_empty(state_dict, info)
        load(model, optimizers, state_dict, info)

    return load_optimizer


def _refuse_empty(state_dict: dict[str, Any], info: Any) -> None:
    """Refuse an empty state dict: this rank would keep its old values, and others get new ones."""
    if info.full_state_dict and not state_dict:
        raise LayoutError(
            "state_dict: expected the whole tensors on every rank, got an empty state dict. If "
            "only rank 0 has them, as after full_state_dict=True with cpu_offload=True, say "
            "StateDictOptions(full_state_dict=True, broadcast_from_rank0=True). To set only one of "
            "the two, call set_model_state_dict or set_optimizer_state_dict"
        )


def _prepare(verify_options: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(verify_options)
    def verify_prepared(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for prepare in before_use:
            prepare(model)
        return verify_options(model, *args, **kwargs)

    return verify_prepared


# ---- copies for `async_save`


def _stage_tensor(offload: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(offload)
    def stage_pieces(self: Any, x: Any, memo: Any, non_blocking: bool = False) -> Any:
        if not _is_global(x):
            return offload(self, x, memo, non_blocking=non_blocking)

        def copied(piece: torch.Tensor) -> Any:
            return self.deepcopy_with_tensor_offload(piece, memo, non_blocking=non_blocking)

        return x._staged(copied)

    return stage_pieces


# ---- patches


def _change_utils(module: ModuleType) -> Undo:
    return _replace_all(
        module, {"_iterate_state_dict": _iterate, "_broadcast_tensors": _broadcast_tensors}
    )


def _change_helpers(module: ModuleType) -> Undo:
    return _replace_all(
        module,
        {
            "_verify_options": _prepare,
            "_broadcast_state_dict": _broadcast,
            "_distribute_state_dict": _distribute,
            "_load_model_state_dict": _load_model,
            "_load_optim_state_dict": _load_optimizer,
        },
    )


def _change_stager(module: ModuleType) -> Undo:
    return _replace_all(module.StateDictStager, {"_offload_tensor": _stage_tensor})


def _replace_all(module: Any, wrappers: dict[str, Callable[[Any], Any]]) -> Undo:
    return undo_all(
        [replace(module, name, wrap(getattr(module, name))) for name, wrap in wrappers.items()]
    )


PATCHES = (
    Patch(
        "torch.distributed._state_dict_utils._iterate_state_dict and ._broadcast_tensors",
        "They recognize only torch's own DTensor, and would hand out pieces as whole tensors. "
        "Torch has no hook there.",
        functools.partial(when_imported, STATE_DICT_UTILS, _change_utils),
    ),
    Patch(
        "torch.distributed.checkpoint.state_dict._verify_options, _broadcast_state_dict, "
        "_distribute_state_dict, _load_model_state_dict and _load_optim_state_dict",
        "Whole tensors become pieces as the model has them; a state dict that only some ranks "
        "have, or of which rank 0 has a piece, is refused.",
        functools.partial(when_imported, STATE_DICT_HELPERS, _change_helpers),
    ),
    Patch(
        "torch.distributed.checkpoint._state_dict_stager.StateDictStager._offload_tensor",
        "It would give the copy of a piece's memory the size of the global tensor: async_save "
        "copies the pieces of our tensors, as it copies those of torch's DTensors.",
        functools.partial(when_imported, STATE_DICT_STAGER, _change_stager),
    ),
)
