"""The memory of shards at rest: a row for each unit, in place before `fully_shard` returns.

Anyone may hold a tensor that shares memory with a shard: a state dict, `to_local()`, the views that
an optimizer keeps. So a shard has its place from the start, and building units and buckets does not
move it. Shards get a row when they are made: by `fully_shard`, by a copy of the module, and by a
conversion such as `module.to(dtype)`, for which torch makes new memory. A shard that others may
hold, such as a tensor that `load_state_dict(assign=True)` has assigned, stays where it is: gathers
copy it into the row that they send.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import swap_tensors

from shardwise.api.optimizers import note_averaged, note_in_use, note_replaced
from shardwise.comm import communicator
from shardwise.dtensor.tensor import DTensor, as_layout
from shardwise.fsdp.config import CPUOffloadPolicy
from shardwise.fsdp.errors import FSDPError, StateError
from shardwise.fsdp.extensions import PRE, extension_of
from shardwise.fsdp.flat_buffer import lay_out_row
from shardwise.fsdp.mesh_info import DataParallelMeshInfo
from shardwise.fsdp.param import ParamSlot, ShardedParam, Tie, accumulation_dtype, promoted_dtype
from shardwise.fsdp.param_group import ParamGroup
from shardwise.fsdp.param_sharding import gather_buffer
from shardwise.torch_internals import (
    TensorBase,
    as_local,
    own_buffers,
    own_parameters,
    storage_id,
    storage_use_count,
)

REPLICATED_UNIT_BYTES = 4 << 20
"""A replicated module is reduced in units of about this number of bytes, each as soon as its
gradients are computed."""

SlotTensor = tuple[ParamSlot, DTensor]
"""A parameter and the first slot that holds it."""


# ---- which parameters make a unit


class UnitPart(NamedTuple):
    """The parameters of one unit."""

    groups: list[ParamGroup]
    """The groups that compute with them: one, or several if parameters are tied."""
    members: list[SlotTensor]
    reduce_dtype: torch.dtype | None
    """In which gradients are reduced, if it is known in advance."""

    @property
    def params(self) -> list[ShardedParam]:
        """A new `ShardedParam` for each."""
        return [ShardedParam(slot, tensor) for slot, tensor in self.members]

    @property
    def device(self) -> torch.device:
        """The device of the gathered parameters."""
        if isinstance(self.groups[0].offload, CPUOffloadPolicy):
            return torch.device(self.members[0][0].info.mesh.device_type)
        return self.members[0][1].device

    @property
    def is_pinned(self) -> bool:
        """Whether the shards are in page-locked memory."""
        offload = self.groups[0].offload
        is_offloaded = isinstance(offload, CPUOffloadPolicy) and offload.pin_memory
        return is_offloaded and torch.accelerator.is_available()


def divide_into_units(groups: Sequence[ParamGroup]) -> list[UnitPart]:
    """Divide the parameters that groups have now into units, in the order of the groups.

    Tied parameters that several groups share have units of their own, and so do parameters with
    gather extensions and those that are sharded over other ranks.
    """
    tensors: dict[int, tuple[ParamSlot, Any, list[ParamGroup]]] = {}
    for group in groups:
        for slot in group.slots:
            users = tensors.setdefault(id(slot.tensor), (slot, slot.tensor, []))[2]
            if group not in users:
                users.append(group)
    by_unit: dict[Any, list[SlotTensor]] = {}
    by_dtype: dict[Any, list[SlotTensor]] = {}
    for slot, tensor, users in tensors.values():
        is_extended = slot.extension is not None
        dtype_key: Any = (tuple(map(id, users)), tensor.dtype, slot.info)
        unit_key: Any = (dtype_key, slot.policy.param_dtype, tensor.device, is_extended)
        by_unit.setdefault(unit_key, []).append((slot, tensor))
        by_dtype.setdefault(dtype_key, []).append((slot, tensor))
    found = []
    for (dtype_key, *_), members in by_unit.items():
        users = tensors[id(members[0][1])][2]
        reduce_dtype = _find_reduce_dtype(by_dtype[dtype_key])
        for part in _split_replicated(members, users[0]):
            found.append(UnitPart(users, part, reduce_dtype))
    return found


def check_tied_policies(parts: Iterable[UnitPart]) -> None:
    """Raise `FSDPError` if groups share a parameter and have different dtypes for it."""
    for part in parts:
        first = {id(tensor): slot for slot, tensor in part.members}
        for other in part.groups[1:]:
            for slot in other.slots:
                before = first.get(id(slot.tensor))
                if before is None:
                    continue
                for field in ("param_dtype", "reduce_dtype"):
                    wanted = [getattr(each.policy, field) for each in (before, slot)]
                    if wanted[0] != wanted[1]:
                        raise FSDPError(
                            f"mp_policy: {before.name} is shared by {part.groups[0].name} and "
                            f"{other.name}, with {field} {wanted[0]} and {wanted[1]}; modules with "
                            "tied parameters need the same"
                        )


def _find_reduce_dtype(parameters: Sequence[SlotTensor]) -> torch.dtype | None:
    """Return the dtype to which all `grad_dtype`s of the parameters promote, in which gradients are
    reduced. None if every parameter accepts gradients of any dtype."""
    found = {accumulation_dtype(slot, tensor.dtype) for slot, tensor in parameters}
    known = {dtype for dtype in found if dtype is not None}
    return promoted_dtype(known) if known else None


def _split_replicated(part: list[SlotTensor], group: ParamGroup) -> list[list[SlotTensor]]:
    """Split the parameters of a replicated module over several units, others over one."""
    if part[0][0].info.shard_mesh_size > 1:
        return [part]
    most = group.settings.replicated_unit_bytes or REPLICATED_UNIT_BYTES
    result: list[list[SlotTensor]] = [[]]
    size = 0
    for slot, tensor in part:
        if size >= most:
            result.append([])
            size = 0
        result[-1].append((slot, tensor))
        size += tensor.nbytes
    return result


# ---- rows


def place_new_shards(group: ParamGroup, new: Iterable[torch.Tensor]) -> None:
    """Move shards that `fully_shard` has just made into rows."""
    found = set(map(id, new))
    _place(group, lambda tensor: id(tensor) in found)


def _place(group: ParamGroup, may_move: Callable[[torch.Tensor], bool]) -> None:
    """Move the shards of a group into rows, by units, if all shards of a unit may be moved."""
    with torch.inference_mode(False), torch.no_grad(), as_local():
        for part in divide_into_units(group.find_tied_groups()):
            slot, first = part.members[0]
            if slot.extension is not None or first.is_meta:
                continue
            if not all(may_move(tensor) for _, tensor in part.members):
                continue
            params = part.params
            length, _ = lay_out_row(params, params[0].gathered_dtype, part.device)
            row = torch.zeros(
                length, dtype=first.dtype, device=first.device, pin_memory=part.is_pinned
            )
            for each in params:
                own = each.sharding.own_shard(row, each.offset)
                own.copy_(each.sharded)
                TensorBase.data.__set__(each.sharded, own)
            part.groups[0].rows.append(row)


def _is_held_once(tensor: torch.Tensor) -> bool:
    """Return whether no other tensor shares the memory of this one; within `as_local()`."""
    return storage_use_count(tensor.untyped_storage()) == 2  # the tensor, and this storage object


def find_row(
    groups: Sequence[ParamGroup], params: Sequence[ShardedParam], length: int
) -> torch.Tensor | None:
    """Return the row in which all shards are where `lay_out_row` wants them; None if some are
    elsewhere. Within `as_local()`."""
    present = [each for each in params if each.local.numel()]
    if not present:
        return None
    storage = storage_id(present[0].local.untyped_storage())
    for group in groups:
        for row in group.rows:
            if storage_id(row.untyped_storage()) == storage and row.dtype is present[0].local.dtype:
                is_in_place = len(row) == length and all(
                    each.local.data_ptr() == row.data_ptr() + each.offset * row.itemsize
                    and each.local.is_contiguous()
                    for each in present
                )
                return row if is_in_place else None
    return None


# ---- parameters that were replaced, converted, loaded or copied


def adopt_params(groups: Sequence[ParamGroup]) -> None:
    """Adopt the parameters that the modules of groups have at the start of a forward.

    Parameters that came apart when they got memory are tied again. Others that users have replaced
    are not tied any more. No shard is moved.
    """
    for group in groups:
        _follow_params(group)
    _tie_again(groups, may_untie=True)
    made: dict[int, Any] = {}
    for group in groups:
        for slot in group.slots:
            _adopt(slot, made)
    _note_in_use(groups)


def settle(group: ParamGroup) -> None:
    """Adopt the parameters that the modules of a group have after a conversion, a load or a copy.

    Parameters that came apart are tied again, and new shards get a row.
    """
    groups = group.find_tied_groups()
    for each in groups:
        each.put_shards()
        _follow_params(each)
    _tie_again(groups, may_untie=False)
    made: dict[int, Any] = {}
    has_all = True
    for each in groups:
        for slot in each.slots:
            if slot.is_filled and not slot.tensor.is_meta:
                _adopt(slot, made)
            else:
                has_all = False
    made.clear()
    _note_in_use(groups)
    if has_all:  # otherwise shards of a unit that get their memory later could not join its row
        _place(group, _is_held_once)
    for each in groups:
        each.forget_empty_rows()


def _follow_params(group: ParamGroup) -> None:
    """Find parameters that users have moved to another place of the group's modules, as
    `torch.nn.utils.prune` and `parametrize` do.

    Masks and other buffers that they have made of shards are gathered, as modules compute with
    gathered parameters.
    """
    lost = [slot for slot in group.slots if not slot.is_filled and slot.known is not None]
    if not lost:
        return
    group.find_modules()
    places = {
        id(parameter): (module, key)
        for module in group.own_modules
        for key, parameter in own_parameters(module).items()
    }
    found = [slot for slot in lost if id(slot.known) in places]
    for slot in found:
        slot.move_to(*places[id(slot.known)])
    infos = {slot.layout.mesh: slot.info for slot in group.slots}
    for module in group.own_modules if found else ():
        for key, buffer in own_buffers(module).items():
            if isinstance(buffer, DTensor) and buffer._layout.mesh in infos:
                own_buffers(module)[key] = gather_buffer(buffer, infos[buffer._layout.mesh])


def _adopt(slot: ParamSlot, made: dict[int, Any]) -> None:
    """Let the parameter in a slot, which users may have replaced, have the slot's layout.

    Arguments:
        made: the parameters that were made in the place of others, by their ids, with these.
    """
    tensor: Any = slot.tensor
    if tensor.is_meta:
        raise StateError(
            f"{slot.name}: it is on the meta device and has no values; call "
            "module.to_empty(device=...) and initialise it, or load a state dict, before forward"
        )
    if not isinstance(tensor, nn.Parameter):
        raise StateError(
            f"{slot.name}: expected a parameter, got a {type(tensor).__name__} that is none, which "
            "would get no gradient; torch.func.functional_call cannot put tensors into a sharded "
            "module: change the parameters, or assign an nn.Parameter"
        )
    slot.note_grad_dtype()
    if slot.extension is None and PRE in vars(tensor):
        slot.extension = extension_of(tensor, slot.name)
    if not isinstance(tensor, DTensor) or tensor._layout is not slot.layout:
        if id(tensor) not in made:
            shard = as_layout(tensor.detach(), slot.layout, slot.name)
            result: Any = nn.Parameter(shard, tensor.requires_grad)
            if tensor is slot.known:  # torch has swapped its contents, so that it stays the same
                del shard
                swap_tensors(tensor, result)  # type: ignore[no-untyped-call]
                result = tensor
            else:
                note_replaced(tensor, slot.name)
            made[id(tensor)] = tensor, result
        _, tensor = made[id(tensor)]
        slot.put(tensor)
    slot.restore_grad_dtype()
    if slot.known is not None and tensor is not slot.known:
        note_replaced(slot.known, slot.name)
    slot.known = tensor
    if getattr(tensor, "_fsdp_tie", None) is not slot.tie:
        mark_as_sharded(tensor, slot)


def _note_in_use(groups: Sequence[ParamGroup]) -> None:
    """Undo notes that a parameter was replaced, if some slot has it again, or still."""
    for group in groups:
        for slot in group.slots:
            if slot.is_filled:
                note_in_use(slot.tensor)


def mark_as_sharded(tensor: Any, slot: ParamSlot) -> None:
    """Note on a sharded parameter what another call of `fully_shard`, for a module that shares it,
    and optimizers must know."""
    tensor._fsdp_info = slot.info
    tensor._fsdp_extension = slot.extension
    tensor._fsdp_tie = slot.tie
    note_averaged(tensor, DataParallelAverage(slot.info, slot.tie))


class DataParallelAverage:
    """The average of gradients, and of losses, over data-parallel ranks.

    Arguments:
        info: the data-parallel ranks.
        tie: the slots of the parameter.
    """

    def __init__(self, info: DataParallelMeshInfo, tie: Tie) -> None:
        self.ranks = info.mesh.size()
        self._mesh = info.mesh
        self._tie = tie

    @property
    def _divisor(self) -> float:
        """The number by which the sum over ranks is divided."""
        for slot in self._tie.slots():
            group = None if slot.group is None else slot.group()
            if group is not None and group.settings.divide_factor is not None:
                return group.settings.divide_factor
        return self.ranks

    @property
    def key(self) -> Any:
        """The ranks, and the divisor."""
        return self._mesh, self._divisor

    def __call__(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss of all ranks, whose gradient the shards get."""
        return communicator(self._mesh).all_reduce(loss) / self._divisor


def _tie_again(groups: Sequence[ParamGroup], may_untie: bool) -> None:
    """Put one parameter into all slots of a tie, if some have got another one.

    It is the one that was put in last: when a state dict with several values for a tied parameter
    is loaded without `assign`, the last value stays, too.

    Arguments:
        may_untie: whether users may have replaced parameters in order to untie them.
    """
    for group in groups:
        for slot in group.slots:
            slots = slot.tie.slots()
            if len({id(each.tensor) for each in slots}) < 2:
                continue
            changed = [each for each in slots if each.tensor is not each.known]
            had_memory = any(each.known is not None and not each.known.is_meta for each in changed)
            if may_untie and had_memory:
                slot.tie.divide()
                continue
            chosen = ([each for each in changed if not each.tensor.is_meta] or changed)[-1].tensor
            for each in slots:
                if not each.holds(chosen):
                    each.put(chosen)


# ---- conversions


@contextmanager
def converting(group: ParamGroup) -> Iterator[None]:
    """Let users convert the parameters of a group within (`module.to`), and settle them.

    Tensors that shared memory with a shard keep the old memory. A warning tells of them.
    """
    group.put_shards()
    before = _find_storages(group)
    with group.preserve_grad_dtypes():
        yield
    settle(group)
    _warn_of_aliases(group, before)


def _find_storages(group: ParamGroup) -> dict[int, torch.UntypedStorage]:
    """Return the memory of the shards of a group, by its identity."""
    found = {}
    with as_local():
        for slot in group.slots:
            if slot.is_filled and not slot.tensor.is_meta:
                storage = slot.tensor.untyped_storage()
                found[storage_id(storage)] = storage
    return found


def _warn_of_aliases(group: ParamGroup, before: dict[int, torch.UntypedStorage]) -> None:
    """Warn of tensors that share memory that shards have left.

    Arguments:
        before: the memory of shards before.
    """
    for each in group.find_tied_groups():
        for key in _find_storages(each):
            before.pop(key, None)
    if not before:
        return
    with as_local():
        left = _count_aliases(group, before)
    if left > 0:
        warnings.warn(
            f"{group.name}: its parameters were converted and have new memory. {left} tensors "
            "still share the old memory, such as those of state_dict(), to_local() or detach(), or "
            "views that an optimizer keeps: they do not follow the parameters any more. Convert "
            "first, and take them afterwards",
            stacklevel=4,
        )


def _count_aliases(group: ParamGroup, storages: dict[int, torch.UntypedStorage]) -> int:
    """Count the tensors that share old memory of shards, apart from those of units, which will be
    built anew; within `as_local()`."""
    if group.schedule is not None:
        group.schedule.unit_set.pool.clear()  # its buffers keep views of shards
    own = [param.local for unit in group.units for param in unit.params]
    own += [param.sharded for unit in group.units for param in unit.params]
    own += [param.gathered for unit in group.units if unit.is_alias for param in unit.params]
    own += [unit.row for unit in group.units if unit.row is not None]
    known = Counter(storage_id(each.untyped_storage()) for each in own)
    return sum(storage_use_count(storage) - 1 - known[key] for key, storage in storages.items())
