"""Units of parameters with gather extensions, which define the tensors that are gathered.

The tensors that ranks send for a parameter may differ in length along dim 0. Ranks exchange the
shapes when a unit is gathered for the first time; they must stay the same from then on. A row has
the bytes of all tensors that a rank sends; rows are padded to the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardwise.comm import Pending
from shardwise.core.mesh import DeviceMesh
from shardwise.fsdp.all_gather import CHANNEL, RowGather, start_custom_gather
from shardwise.fsdp.config import AllGather
from shardwise.fsdp.errors import FSDPError, ShardedState, transition
from shardwise.fsdp.extensions import POST, PRE, RELEASE, GatherExtension, inner_names
from shardwise.fsdp.flat_buffer import BufferPool, RowBuffer, header_digits
from shardwise.fsdp.mesh_info import DataParallelMeshInfo
from shardwise.fsdp.param import ShardedParam
from shardwise.fsdp.unit import Unit, trace_gather
from shardwise.torch_internals import as_local, preserve_version_counter, storage_id

HEADER_BYTES = 2
"""Bytes at the start of a row that have the unit's number."""

TensorSpecs = list[tuple[tuple[int, ...], torch.dtype]]
"""Shapes and dtypes of the tensors that a rank sends for a parameter."""


class ExtendedParam:
    """A parameter with a gather extension."""

    def __init__(self, param: ShardedParam) -> None:
        assert param.slot.extension is not None, "others are in units without extensions"
        self.param = param
        self.extension: GatherExtension = param.slot.extension
        self.specs: list[TensorSpecs] = []
        """What each rank sends; only this rank's, if the parameter is not sharded."""
        self.offsets: list[list[int]] = []
        """For each rank, where its tensors begin in its row."""
        self.outputs: list[torch.Tensor] | None = None
        """The tensors of all ranks, if the gathered parameter uses their memory."""
        self.made: torch.Tensor | None = None
        """The parameter that the extension has made."""
        self.is_padded = False
        """Whether that has rows at its end that do not belong to the parameter."""
        self.inner: list[torch.Tensor] = []
        """The tensors that it is made of."""

    @property
    def is_sent(self) -> bool:
        """Whether ranks have different shards of it."""
        return self.param.sharding.dim is not None and self.param.sharding.count > 1

    def new_outputs(self, device: torch.device) -> list[torch.Tensor]:
        """Allocate the tensors of all ranks, joined along dim 0."""
        result = []
        for specs in zip(*self.specs, strict=True):
            shape, dtype = specs[0]
            length = sum(other[0] for other, _ in specs)
            result.append(torch.empty((length, *shape[1:]), dtype=dtype, device=device))
        return result


class ExtendedUnit(Unit):
    """Parameters of a group that have gather extensions, and one dtype; arguments as of `Unit`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.extended = list(map(ExtendedParam, self.params))
        self.row_length = HEADER_BYTES
        self._storages: dict[int, tuple[torch.UntypedStorage, int]] = {}
        """The memory of the gathered parameters, by address, with its size in bytes."""
        self._is_made = False

    # ---- tensors that are sent

    def make_inputs(self) -> tuple[list[list[torch.Tensor]], list[Any]]:
        """Return for each parameter the tensors that this rank sends, and the metadata that it
        keeps."""
        mesh = _shard_mesh(self.info)
        tensors, metadata = [], []
        for each in self.extended:
            param = each.param
            sent, kept = each.extension.make_inputs(
                param.name,
                self.shard_on_device(param),
                mesh,
                param.sharding.gathered_shape,
                param.strides,
                param.slot.module,
                self.params[0].slot.policy,
            )
            tensors.append(sent)
            metadata.append(kept)
        self._agree_on_specs([_specs_of(sent) for sent in tensors])
        return tensors, metadata

    def shard_on_device(self, param: ShardedParam) -> torch.Tensor:
        """Return this rank's shard on the device that computes."""
        return param.local.to(self.device, non_blocking=True)

    def _agree_on_specs(self, own: list[TensorSpecs]) -> None:
        """Exchange the shapes and dtypes that each rank sends, the first time; later, check that
        they have not changed."""
        index = self.info.shard_mesh_rank
        if self.extended[0].specs:
            for each, now in zip(self.extended, own, strict=True):
                first = each.specs[index if each.is_sent else 0]
                if now != first:
                    raise FSDPError(
                        f"{each.param.name}: {PRE} must return tensors of the same shapes and "
                        f"dtypes each time, at first {_format_specs(first)}; got "
                        f"{_format_specs(now)}"
                    )
            return
        found = [own]
        if any(each.is_sent for each in self.extended):
            with trace_gather([self]):
                found = self.info.shard_communicator(CHANNEL).gather_objects(own)
        lengths = [HEADER_BYTES] * len(found)
        for position, each in enumerate(self.extended):
            if not each.is_sent:
                each.specs = [own[position]]
                continue
            each.specs = [specs[position] for specs in found]
            _check_joinable(each, self.info.shard_ranks)
            each.offsets = [[] for _ in found]
            for rank, specs in enumerate(each.specs):
                for shape, dtype in specs:
                    each.offsets[rank].append(lengths[rank])
                    lengths[rank] += torch.Size(shape).numel() * dtype.itemsize
        self.row_length = max(lengths)

    # ---- memory

    def make_gathered_params(self) -> None:
        """Create placeholders: the extensions make the gathered parameters at the first gather."""
        for each in self.params:
            each.gathered = nn.Parameter(torch.empty(0, dtype=self.dtype), requires_grad=False)

    def allocate(self) -> None:
        """Allocate the memory of the gathered parameters, unless it was kept."""
        for storage, size in self._storages.values():
            if storage.nbytes() != size:
                storage.resize_(size)

    def free(self) -> None:
        """Free the memory of the gathered parameters, unless users want to keep it."""
        if not self.keeps_storage:
            for storage, _ in self._storages.values():
                storage.resize_(0)

    @property
    def gathered_bytes(self) -> int:
        """The memory that it uses beyond its shards."""
        return sum(storage.nbytes() for storage, _ in self._storages.values())

    def owns_storage(self, address: int) -> bool:
        """Return whether a storage, given by its address, is memory of the gathered parameters,
        which will be freed."""
        return address in self._storages

    def reshard_post_forward(self, index: int, count: int) -> None:
        """Free all memory, as `reshard` does: the tensors that the parameters are made of may not
        divide into equal parts."""
        self.reshard()

    # ---- gathered parameters

    def make_params(
        self, rows: torch.Tensor, sent: list[list[torch.Tensor]], metadata: list[Any]
    ) -> None:
        """Make the gathered parameters, or fill them again.

        Arguments:
            rows: the rows of all ranks.
            sent: the tensors that this rank has sent.
            metadata: the metadata that the extensions have returned with these tensors.
        """
        # Tensors that are created in inference mode could never be used in training.
        with torch.inference_mode(False), torch.no_grad():
            try:
                self.allocate()
                for each, own, kept in zip(self.extended, sent, metadata, strict=True):
                    outputs = each.outputs or each.new_outputs(self.device)
                    _join_rows(each, outputs, rows, own)
                    if self._is_made:
                        self._refill_param(each, outputs, kept)
                    else:
                        self._make_param(each, outputs, kept)
            except BaseException:
                self.free()
                if not self._is_made:
                    self._storages.clear()
                    for each in self.extended:
                        each.outputs = None
                raise
        if not self._is_made:
            self._is_made = True
            self.hooked.clear()
            self.follow_requires_grad()
        self.state = transition(self.state, ShardedState.UNSHARDED, self.name)

    def _make_param(self, each: ExtendedParam, outputs: list[torch.Tensor], metadata: Any) -> None:
        param = each.param
        made, inner = each.extension.make_param(
            param.name,
            self.shard_on_device(param),
            outputs,
            metadata,
            self.dtype,
            param.sharding.gathered_shape,
        )
        is_wrapper = len(inner_names(made)) > 0
        if param.sharding.gathered_layout is not None and type(made) is not torch.Tensor:
            raise FSDPError(
                f"{param.name}: {POST} must return a plain tensor for a parameter that is "
                f"tensor-parallel, got {type(made).__name__}"
            )
        parts = inner if is_wrapper else [made, *inner]
        storages = {_address(tensor): tensor.untyped_storage() for tensor in parts}
        if _address(param.local) in storages:
            raise FSDPError(
                f"{param.name}: {POST} must not return the memory of the shard, as that would be "
                "freed; return a copy"
            )
        is_alias = any(_address(tensor) in storages for tensor in outputs)
        if is_alias and each.extension.releases_outputs:
            raise FSDPError(
                f"{param.name}: {RELEASE} returns True: the gathered tensors may be freed. But the "
                f"parameter that {POST} returns lies in their memory; return a copy there, or "
                "False here"
            )
        if is_alias or (is_wrapper and not each.extension.releases_outputs):
            each.outputs = outputs
            storages.update((_address(tensor), tensor.untyped_storage()) for tensor in outputs)
        self._storages.update((key, (one, one.nbytes())) for key, one in storages.items())
        each.made, each.inner = made, inner
        shape = param.sharding.gathered_shape
        each.is_padded = tuple(made.shape) != shape
        if each.is_padded:
            _check_padding(each)
        self._set_gathered(param, made[: shape[0]] if each.is_padded else made)

    def _refill_param(
        self, each: ExtendedParam, outputs: list[torch.Tensor], metadata: Any
    ) -> None:
        param = each.param
        assert each.made is not None, "it was made at the first gather"
        is_made = param.sharding.gathered_layout is None and not each.is_padded
        out = param.gathered if is_made else each.made
        shard = self.shard_on_device(param)
        with as_local():
            preserved = preserve_version_counter((param.gathered, each.made, *each.inner, *outputs))
        with preserved:  # tensors that autograd has saved get the values that they had
            each.extension.refill_param(param.name, shard, outputs, metadata, self.dtype, out)


class ExtendedGather(RowGather):
    """An all_gather of the tensors that an extended unit sends; starts at once.

    Arguments:
        units: a list of exactly one unit.
        pool: provides the row buffer.
        custom: the user's collective, in place of the communicator's.
    """

    def __init__(
        self, units: Sequence[Unit], pool: BufferPool, custom: AllGather | None = None
    ) -> None:
        (unit,) = units
        assert isinstance(unit, ExtendedUnit), "RowGather gathers other units"
        self.first = self._unit = unit
        self._units = units
        self._unfilled = 1
        self._pool = pool
        self._is_direct = self._skips_own = False
        with torch.inference_mode(False), torch.no_grad():
            self._sent, self._metadata = unit.make_inputs()
            self._has_arrived = not any(each.is_sent for each in unit.extended)
            size = unit.info.shard_mesh_size, unit.row_length, torch.uint8, unit.device
            self._rows = pool.take(size) if custom is None else RowBuffer(size)
            self.pending: Pending[Any] = (
                Pending.done(None) if self._has_arrived else self._send(unit, custom)
            )
        unit.gather = self
        unit.note_versions()

    def _send(self, unit: ExtendedUnit, custom: AllGather | None) -> Pending[torch.Tensor]:
        row = torch.zeros(unit.row_length, dtype=torch.uint8, device=unit.device)
        row[:HEADER_BYTES] = torch.tensor(header_digits(unit.number))
        for each, tensors in zip(unit.extended, self._sent, strict=True):
            if each.is_sent:
                starts = each.offsets[unit.info.shard_mesh_rank]
                for start, tensor in zip(starts, tensors, strict=True):
                    sent = _as_bytes(tensor)
                    row[start : start + len(sent)] = sent
        if custom is not None:
            return start_custom_gather(custom, row, self._rows, unit)
        shard = self._communicator()
        with trace_gather([unit]):
            return shard.all_gather_into_async(row, self._rows.matrix)

    def fill(self, unit: Unit) -> None:
        """Wait for the rows, and let the extensions make the gathered parameters."""
        if not self._has_arrived:
            self._wait()
        self._unit.make_params(self._rows.matrix, self._sent, self._metadata)
        self._release(unit)


def _join_rows(
    each: ExtendedParam, outputs: list[torch.Tensor], rows: torch.Tensor, own: list[torch.Tensor]
) -> None:
    """Join the tensors of all ranks into `outputs`.

    Autograd may have saved `outputs` for backward. The copies go to `.data`, so that autograd does
    not count them as changes.
    """
    if not each.is_sent:
        for output, tensor in zip(outputs, own, strict=True):
            output.data.copy_(tensor)
        return
    targets, sources = [], []
    for position, output in enumerate(outputs):
        flat, end = _as_bytes(output.data), 0
        for rank, specs in enumerate(each.specs):
            shape, dtype = specs[position]
            begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
            if end > begin:
                start = each.offsets[rank][position]
                targets.append(flat[begin:end])
                sources.append(rows[rank, start : start + end - begin])
    if targets:
        torch._foreach_copy_(targets, sources)


def _check_padding(each: ExtendedParam) -> None:
    """Raise `FSDPError` unless the rows beyond the parameter are at its end."""
    sharding = each.param.sharding
    lengths = {specs[0][0][0] for specs in each.specs}
    if not sharding.is_chunked or lengths != {sharding.shapes[0][0]}:
        raise FSDPError(
            f"{each.param.name}: {POST} must return a parameter of {sharding.gathered_shape}; it "
            f"returns more rows, and ranks send {sorted(lengths)}. Rows are cut off at the end "
            f"only if every rank pads its shard to {sharding.shapes[0][0]} rows along dim 0"
        )


def _check_joinable(each: ExtendedParam, ranks: Sequence[int]) -> None:
    """Raise `FSDPError` if the ranks' tensors cannot be joined along dim 0."""
    first = each.specs[0]
    for rank, specs in zip(ranks, each.specs, strict=True):
        if _without_dim_0(specs) != _without_dim_0(first):
            raise FSDPError(
                f"{each.param.name}: {PRE} must return as many tensors on every rank, of shapes "
                f"that differ in dim 0 only; rank {ranks[0]} has {_format_specs(first)}, rank "
                f"{rank} has {_format_specs(specs)}"
            )


def _without_dim_0(specs: TensorSpecs) -> TensorSpecs:
    return [(shape[1:], dtype) for shape, dtype in specs]


def _specs_of(tensors: Sequence[torch.Tensor]) -> TensorSpecs:
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]


def _format_specs(specs: TensorSpecs) -> str:
    return ", ".join(f"{dtype} {shape}" for shape, dtype in specs)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _address(tensor: torch.Tensor) -> int:
    found: int = storage_id(tensor.untyped_storage())
    return found


def _shard_mesh(info: DataParallelMeshInfo) -> DeviceMesh:
    """Return the ranks along the shard axis as a mesh of one axis."""
    mesh, axis = info.mesh, info.shard_mesh_dim
    if mesh.ndim == 1 and axis is not None:
        return mesh
    if axis is not None and mesh.mesh_dim_names is not None:
        return mesh[mesh.mesh_dim_names[axis]]
    return DeviceMesh(mesh.device_type, info.shard_ranks)
