"""Units of parameters with extensions: what travels, and what becomes of it, is up to these.

What ranks send of a parameter may differ in length along dim 0. How much each sends is agreed upon
when a unit is gathered for the first time, and must stay the same. A row has the bytes of all that
a rank sends; rows are padded to the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.comm import Pending
from shardwise.fsdp.arena import digits
from shardwise.fsdp.causes import gathering
from shardwise.fsdp.custom import AllGather
from shardwise.fsdp.errors import FSDPError
from shardwise.fsdp.extension import POST, PRE, RELEASE, Extension, inner_names
from shardwise.fsdp.gathering import CHANNEL, Gather, custom_gather
from shardwise.fsdp.held import Held
from shardwise.fsdp.mesh_info import DataParallelMeshInfo
from shardwise.fsdp.policies import MixedPrecisionPolicy
from shardwise.fsdp.pool import Pool, Rows
from shardwise.fsdp.states import ShardedState, moved_on
from shardwise.fsdp.unit import Unit
from shardwise.mesh import DeviceMesh
from shardwise.torch_internals import as_local, preserve_version_counter, storage_id

if TYPE_CHECKING:
    from shardwise.fsdp.group import Group

HEADER = 2
"""Bytes at the start of a row that say whose it is."""

Kinds = list[tuple[tuple[int, ...], torch.dtype]]
"""Shapes and dtypes of what a rank sends of a parameter."""


class Extended:
    """A parameter with an extension.

    Arguments:
        module: the first that has it.
    """

    def __init__(self, held: Held, extension: Extension, module: nn.Module) -> None:
        self.held = held
        self.extension = extension
        self.module = module
        self.kinds: list[Kinds] = []
        """What each rank sends; of one that is not split, what this rank has."""
        self.places: list[list[int]] = []
        """Where that begins in its row."""
        self.outputs: list[torch.Tensor] | None = None
        """What has come from all ranks, if the parameter lives in its memory."""
        self.own: torch.Tensor | None = None
        """What the extension has returned."""
        self.inner: list[torch.Tensor] = []
        """What that is made of."""

    @property
    def travels(self) -> bool:
        """Whether ranks have different pieces of it."""
        return self.held.division.dim is not None and self.held.division.count > 1

    def new_outputs(self, device: torch.device) -> list[torch.Tensor]:
        """Memory for what comes from all ranks, joined along dim 0."""
        result = []
        for each in zip(*self.kinds, strict=True):
            shape, dtype = each[0]
            length = sum(other[0] for other, _ in each)
            result.append(torch.empty((length, *shape[1:]), dtype=dtype, device=device))
        return result


class ExtendedUnit(Unit):
    """The parameters of a group that have extensions, and one dtype.

    Arguments:
        extensions: of each parameter.
        modules: of each the first that has it.
    """

    def __init__(
        self,
        number: int,
        groups: list[Group],
        held: list[Held],
        info: DataParallelMeshInfo,
        policy: MixedPrecisionPolicy,
        device: torch.device,
        reduce_dtype: torch.dtype | None,
        extensions: Sequence[Extension],
        modules: Sequence[nn.Module],
    ) -> None:
        super().__init__(number, groups, held, info, policy, device, reduce_dtype)
        self.policy = policy
        self.extended = list(map(Extended, held, extensions, modules))
        self.row_length = HEADER
        self._storages: dict[int, tuple[torch.UntypedStorage, int]] = {}
        """The memory of the gathered parameters, by address, with its size in bytes."""
        self._is_made = False

    # ---- what travels

    def inputs(self) -> tuple[list[list[torch.Tensor]], list[Any]]:
        """What this rank sends of each parameter, and what it keeps for each."""
        mesh = _shard_mesh(self.info)
        tensors, metadata = [], []
        for each in self.extended:
            held = each.held
            whole = held.division.whole_shape, held.strides
            sent, kept = each.extension.inputs(
                held.name, self.shard_of(held), mesh, whole, each.module, self.policy
            )
            tensors.append(sent)
            metadata.append(kept)
        self._agree([_kinds(sent) for sent in tensors])
        return tensors, metadata

    def shard_of(self, held: Held) -> torch.Tensor:
        """This rank's piece, where it is computed with."""
        return self.own(held).to(self.device, non_blocking=True)

    def _agree(self, own: list[Kinds]) -> None:
        """The first time find out what other ranks send."""
        index = self.info.shard_mesh_rank
        if self.extended[0].kinds:
            for each, now in zip(self.extended, own, strict=True):
                first = each.kinds[index if each.travels else 0]
                if now != first:
                    raise FSDPError(
                        f"{each.held.name}: {PRE} must return tensors of the same shapes and "
                        f"dtypes each time, at first {_shown(first)}; got {_shown(now)}"
                    )
            return
        found = [own]
        if any(each.travels for each in self.extended):
            with gathering([self]):
                found = self.info.shard_communicator(CHANNEL).gather_objects(own)
        lengths = [HEADER] * len(found)
        for at, each in enumerate(self.extended):
            if not each.travels:
                each.kinds = [own[at]]
                continue
            each.kinds = [kinds[at] for kinds in found]
            _check_alike(each, self.info.shard_ranks)
            each.places = [[] for _ in found]
            for rank, kinds in enumerate(each.kinds):
                for shape, dtype in kinds:
                    each.places[rank].append(lengths[rank])
                    lengths[rank] += torch.Size(shape).numel() * dtype.itemsize
        self.row_length = max(lengths)

    # ---- memory

    def make_wholes(self) -> None:
        """Something in place of the gathered parameters, which extensions make when first asked."""
        self.is_alias = False
        for each in self.held:
            each.whole = nn.Parameter(torch.empty(0, dtype=self.dtype), requires_grad=False)

    def allocate(self) -> None:
        """Get the memory of the gathered parameters, unless it was kept."""
        for storage, size in self._storages.values():
            if storage.nbytes() != size:
                storage.resize_(size)

    def free(self) -> None:
        """Give it back, unless users want to keep it."""
        if not self.keeps_memory:
            for storage, _ in self._storages.values():
                storage.resize_(0)

    @property
    def gathered_bytes(self) -> int:
        """The memory that it takes beyond its shards."""
        return sum(storage.nbytes() for storage, _ in self._storages.values())

    def holds(self, address: int) -> bool:
        """Whether a tensor's memory, given by its storage's address, will be given back."""
        return address in self._storages

    def keep(self, index: int, count: int) -> None:
        """Give back all of it: what the parameters are made of need not have equal pieces."""
        self.reshard()

    # ---- gathered

    def make(self, rows: torch.Tensor, sent: list[list[torch.Tensor]], metadata: list[Any]) -> None:
        """Make the gathered parameters from what all ranks have sent.

        Arguments:
            rows: that.
            sent: what this one has sent.
            metadata: what the extensions have kept.
        """
        # Else what is made in inference mode could never be trained with.
        with torch.inference_mode(False), torch.no_grad():
            try:
                self.allocate()
                for each, own, kept in zip(self.extended, sent, metadata, strict=True):
                    outputs = each.outputs or each.new_outputs(self.device)
                    _copy_in(each, outputs, rows, own)
                    if self._is_made:
                        self._renew(each, outputs, kept)
                    else:
                        self._make(each, outputs, kept)
            except BaseException:
                self.free()
                if not self._is_made:
                    self._storages.clear()
                    for each in self.extended:
                        each.outputs = None
                raise
        if not self._is_made:
            self._is_made = True
            self.watched.clear()
            self.follow_requires_grad()
        self.state = moved_on(self.state, ShardedState.UNSHARDED, self.name)

    def _make(self, each: Extended, outputs: list[torch.Tensor], metadata: Any) -> None:
        held = each.held
        division = held.division
        whole, inner = each.extension.result(
            held.name, self.shard_of(held), outputs, metadata, self.dtype, division.whole_shape
        )
        is_wrapper = len(inner_names(whole)) > 0
        if division.whole_layout is not None and type(whole) is not torch.Tensor:
            raise FSDPError(
                f"{held.name}: {POST} must return a plain tensor for a parameter that is "
                f"tensor-parallel, got {type(whole).__name__}"
            )
        made = inner if is_wrapper else [whole, *inner]
        storages = {_address(tensor): tensor.untyped_storage() for tensor in made}
        if _address(self.arena.flat) in storages:
            raise FSDPError(
                f"{held.name}: {POST} must not return the memory of the shard, which would be "
                "given back; return a copy"
            )
        is_alias = any(_address(tensor) in storages for tensor in outputs)
        if is_alias and each.extension.releases_outputs:
            raise FSDPError(
                f"{held.name}: {RELEASE} says that what was gathered is not needed any more, but "
                f"what {POST} has returned lies in its memory; return a copy, or False there"
            )
        if is_alias or (is_wrapper and not each.extension.releases_outputs):
            each.outputs = outputs
            storages.update((_address(tensor), tensor.untyped_storage()) for tensor in outputs)
        self._storages.update((key, (one, one.nbytes())) for key, one in storages.items())
        each.own, each.inner = whole, inner
        self._make_whole(held, whole)

    def _renew(self, each: Extended, outputs: list[torch.Tensor], metadata: Any) -> None:
        held = each.held
        assert each.own is not None, "it was made"
        out = held.whole if held.division.whole_layout is None else each.own
        with as_local():
            preserved = preserve_version_counter((held.whole, each.own, *each.inner, *outputs))
        with preserved:  # what autograd has saved gets the values again that it had
            each.extension.renew(held.name, self.shard_of(held), outputs, metadata, self.dtype, out)


class ExtendedGather(Gather):
    """What the ranks send of an extended unit, under way.

    Arguments:
        units: one.
        pool: where memory comes from.
        custom: what gathers it, if not the communicator.
    """

    def __init__(self, units: Sequence[Unit], pool: Pool, custom: AllGather | None = None) -> None:
        (unit,) = units
        assert isinstance(unit, ExtendedUnit), "others have gathers of their own"
        self.first = self._unit = unit
        self._units = units
        self._left = 1
        self._pool = pool
        self._is_direct = self._skips_own = False
        with torch.inference_mode(False), torch.no_grad():
            self._sent, self._metadata = unit.inputs()
            self._is_there = not any(each.travels for each in unit.extended)
            size = unit.info.shard_mesh_size, unit.row_length, torch.uint8, unit.device
            self._rows = pool.take(size) if custom is None else Rows(size)
            self.pending: Pending[Any] = (
                Pending.done(None) if self._is_there else self._send(unit, custom)
            )
        unit.gather = self
        unit.note_versions()

    def _send(self, unit: ExtendedUnit, custom: AllGather | None) -> Pending[torch.Tensor]:
        row = torch.zeros(unit.row_length, dtype=torch.uint8, device=unit.device)
        row[:HEADER] = torch.tensor(digits(unit.number))
        for each, tensors in zip(unit.extended, self._sent, strict=True):
            if each.travels:
                starts = each.places[unit.info.shard_mesh_rank]
                for start, tensor in zip(starts, tensors, strict=True):
                    sent = _bytes(tensor)
                    row[start : start + len(sent)] = sent
        if custom is not None:
            return custom_gather(custom, row, self._rows, unit)
        shard = self._communicator()
        with gathering([unit]):
            return shard.all_gather_into_async(row, self._rows.matrix)

    def fill(self, unit: Unit) -> None:
        """Let the unit have its parameters, once they are there."""
        if not self._is_there:
            self._wait()
        self._unit.make(self._rows.matrix, self._sent, self._metadata)
        self._let_go(unit)


def _copy_in(
    each: Extended, outputs: list[torch.Tensor], rows: torch.Tensor, own: list[torch.Tensor]
) -> None:
    """Join what has come from all ranks; its versions do not count, as autograd may have it."""
    if not each.travels:
        for output, tensor in zip(outputs, own, strict=True):
            output.data.copy_(tensor)
        return
    places, pieces = [], []
    for at, output in enumerate(outputs):
        flat, end = _bytes(output.data), 0
        for rank, kinds in enumerate(each.kinds):
            shape, dtype = kinds[at]
            begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
            if end > begin:
                start = each.places[rank][at]
                places.append(flat[begin:end])
                pieces.append(rows[rank, start : start + end - begin])
    if places:
        torch._foreach_copy_(places, pieces)


def _check_alike(each: Extended, ranks: Sequence[int]) -> None:
    """Refuse what cannot be joined along dim 0."""
    first = each.kinds[0]
    for rank, kinds in zip(ranks, each.kinds, strict=True):
        if _apart_from_length(kinds) != _apart_from_length(first):
            raise FSDPError(
                f"{each.held.name}: {PRE} must return as many tensors on every rank, of shapes "
                f"that differ in dim 0 only; rank {ranks[0]} has {_shown(first)}, rank {rank} has "
                f"{_shown(kinds)}"
            )


def _apart_from_length(kinds: Kinds) -> Kinds:
    return [(shape[1:], dtype) for shape, dtype in kinds]


def _kinds(tensors: Sequence[torch.Tensor]) -> Kinds:
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]


def _shown(kinds: Kinds) -> str:
    return ", ".join(f"{dtype} {shape}" for shape, dtype in kinds)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _address(tensor: torch.Tensor) -> int:
    found: int = storage_id(tensor.untyped_storage())
    return found


def _shard_mesh(info: DataParallelMeshInfo) -> DeviceMesh:
    """The ranks that hold the pieces, as a mesh of one axis."""
    mesh, axis = info.mesh, info.shard_mesh_dim
    if mesh.ndim == 1 and axis is not None:
        return mesh
    if axis is not None and mesh.mesh_dim_names is not None:
        return mesh[mesh.mesh_dim_names[axis]]
    return DeviceMesh(mesh.device_type, info.shard_ranks)
