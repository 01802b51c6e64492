"""Units: the parameters of a group that have one dtype. They are gathered into one piece of memory.

At rest a unit's shards are consecutive in a flat buffer (`shardwise.fsdp.arena`): a *row*, of the
same length on every rank. Gathering gives the rows of all ranks, from which the gathered parameters
are filled by one fused copy. These live as long as the unit, so that what autograd has saved of
them is there again when they are filled for backward; in between only their memory is given back.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import nn

from shardwise.fsdp.grad_dtype import promoted
from shardwise.fsdp.held import Held, gradient_of, set_gradient
from shardwise.fsdp.mesh_info import DataParallelMeshInfo
from shardwise.fsdp.policies import MixedPrecisionPolicy
from shardwise.fsdp.states import ShardedState, moved_on
from shardwise.tensor import wrap
from shardwise.torch_internals import PARAMETER_FLAG, TensorBase, as_local, storage_id, version_of

if TYPE_CHECKING:
    from shardwise.fsdp.arena import Arena
    from shardwise.fsdp.building import Bucket
    from shardwise.fsdp.gathering import Gather
    from shardwise.fsdp.group import Group
    from shardwise.fsdp.pool import Rows

ALIGNED = 16
"""Parameters begin at multiples of so many elements, as fast kernels like it."""
DIRECT = 1 << 17
"""Pieces of so many bytes travel by themselves: to copy them costs more than a message."""
HEADER = ALIGNED
"""Elements at the start of a row that say whose it is."""

_requires_grad: Callable[[torch.Tensor], bool] = TensorBase.requires_grad.__get__


class Unit:
    """Parameters that are gathered at once.

    Arguments:
        number: its position among all units, the same on every rank.
        groups: those that compute with it: one, or several if parameters are tied.
        held: its parameters; their dtype and device are all the same.
        policy: of these parameters.
        reduce_dtype: what gradients are reduced in at least, if that is known; those that may have
            any dtype may need a wider one.
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
    ) -> None:
        self.number = number
        self.groups = groups
        self.held = held
        self.info = info
        self.device = device
        """Where it computes; shards may be kept elsewhere."""
        own = held[0].sharded.dtype
        casts = policy.param_dtype is not None and own.is_floating_point
        self.dtype: torch.dtype = policy.param_dtype if casts else own  # type: ignore[assignment]
        """Of the gathered parameters, and of what travels."""
        self.reduce_dtype = reduce_dtype
        self.follows_gradients = any(each.sum_dtype is None for each in held)
        """Whether in which dtype it is reduced depends on the gradients that come."""
        self.direct = [each for each in held if self._is_direct(each)]
        for each in self.direct:
            each.is_direct = True
        self.length = HEADER
        for each in sorted(held, key=lambda each: each.is_direct):
            each.offset = self.length
            self.length += aligned(each.division.size)
        self.flat_length = self.direct[0].offset if self.direct else self.length
        """Of a row without what travels by itself."""
        self.arena: Arena
        self.offset: int
        """Where its row begins in the arena."""
        self.state = ShardedState.SHARDED
        self.holders: set[Group] = set()
        """The groups that need it gathered now."""
        self.gather: Gather | None = None
        """What it will be filled from, if that is under way."""
        self.kept: torch.Tensor | None = None
        """Its piece in SHARDED_POST_FORWARD."""
        self.kept_count = 0
        """Of how many equal pieces that is one, whatever settings say meanwhile."""
        self.versions: list[int] = []
        """Of the shards when they were gathered."""
        self.got: set[int] = set()
        """The parameters whose gradients this backward has brought."""
        self.trainable: list[int] = []
        self.watched: set[int] = set()
        self.on_ready: Callable[[Unit], None]
        self.bucket: Bucket
        """Those that it travels with."""

    def _is_direct(self, held: Held) -> bool:
        shape = held.division.whole_shape
        return (
            held.division.is_chunked
            and held.division.count > 1
            and held.division.size * self.dtype.itemsize >= DIRECT
            and self.dtype is held.sharded.dtype
            and self.device == held.sharded.device
            and held.strides == torch.empty(shape, device="meta").stride()
        )

    @property
    def name(self) -> str:
        """As messages have it."""
        return " and ".join(group.name for group in self.groups)

    def described(self) -> str:
        """Its name and those of its parameters."""
        names = [each.name for each in self.held]
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        return f"{self.name} ({shown})"

    # ---- memory

    def make_wholes(self) -> None:
        """Make the gathered parameters, without memory; or let them be the shards, if those are
        whole already."""
        self.is_alias = (
            self.info.shard_mesh_size == 1
            and self.dtype is self.held[0].sharded.dtype
            and self.device == self.arena.flat.device
        )
        self._places: dict[Hashable, list[torch.Tensor]] = {}
        if self.is_alias:
            row = self.arena.flat.detach()[self.offset : self.offset + self.length]
            for each in self.held:
                self._make_whole(each, each.division.own(row, each.offset))
            return
        sizes = [aligned(torch.Size(each.division.whole_shape).numel()) for each in self.held]
        # Split over as many ranks as may be, it must have equal pieces.
        total = -(-sum(sizes) // self.info.shard_mesh_size) * self.info.shard_mesh_size
        self.memory = torch.empty(total, dtype=self.dtype, device=self.device)
        self.nbytes = total * self.dtype.itemsize
        bare = self.memory.data  # its copies do not count as changes of what autograd has saved
        start = 0
        self._bare: list[tuple[Held, torch.Tensor]] = []
        for each, size in zip(self.held, sizes, strict=True):
            shape, strides = each.division.whole_shape, each.strides
            self._make_whole(each, self.memory.as_strided(shape, strides, start))
            place = bare.as_strided(shape, strides, start)
            self._bare.append((each, place))
            if each.is_direct:
                each.chunks = each.division.chunks(place)
            start += size
        self.free()

    def _make_whole(self, held: Held, memory: torch.Tensor) -> None:
        if held.division.whole_layout is not None:
            memory = wrap(memory.view_as(memory), held.division.whole_layout)
        whole: Any = nn.Parameter(memory, requires_grad=False)
        held.whole = whole
        if held.sum_dtype is not self.dtype:
            whole.grad_dtype = None  # else a backward that makes wider ones would be rounded
        for name, value in vars(held.sharded).items():  # what users hang on a parameter
            if name not in ("_layout", PARAMETER_FLAG, "_whole_strides"):
                setattr(held.whole, name, value)

    def allocate(self) -> None:
        """Get the memory of the gathered parameters, unless it was kept: resized to the size that
        it has, it would move."""
        storage = self.memory.untyped_storage()
        if storage.nbytes() != self.nbytes:
            storage.resize_(self.nbytes)

    def free(self) -> None:
        """Give it back, unless users want to keep it."""
        if not self.keeps_memory:
            self.memory.untyped_storage().resize_(0)

    @property
    def keeps_memory(self) -> bool:
        """Whether the memory of the gathered parameters stays where it is."""
        return any(group.settings.keep_unsharded_storage for group in self.groups)

    def stop_keeping_memory(self) -> None:
        """Give back what was kept and holds nothing."""
        is_in_use = self.gather is not None or self.state is ShardedState.UNSHARDED
        if not is_in_use and not self.is_alias:
            self.free()

    @property
    def is_whole(self) -> bool:
        """Whether the gathered parameters have their values."""
        return self.is_alias or self.state is ShardedState.UNSHARDED

    @property
    def gathered_bytes(self) -> int:
        """The memory that it takes beyond its shards."""
        if self.is_alias:
            return 0
        kept = 0 if self.kept is None else self.kept.untyped_storage().nbytes()
        return self.memory.untyped_storage().nbytes() + kept

    def holds(self, address: int) -> bool:
        """Whether a tensor's memory, given by its storage's address, is that of its gathered
        parameters, and will be given back."""
        return not self.is_alias and storage_id(self.memory.untyped_storage()) == address

    # ---- gathered, and not

    def fill(self, rows: Rows, start: int, skips_own: bool, is_direct: bool = False) -> None:
        """Make the gathered parameters from the rows of all ranks.

        Arguments:
            rows: may hold those of other units too.
            start: where those of this one begin.
            skips_own: whether this rank's own row is not among them.
            is_direct: whether the direct ones have come where they belong, but for their own.
        """
        key = self.number, start, skips_own, is_direct
        with torch.no_grad():
            if not is_direct:
                self.allocate()
            places = self._places.get(key)
            if places is None:
                places = self._places[key] = self._places_of(skips_own, is_direct)
            pieces = rows.views(
                key, lambda rows: self._pieces_of(rows, start, skips_own, is_direct)
            )
            torch._foreach_copy_(places, pieces)
        self.state = moved_on(self.state, ShardedState.UNSHARDED, self.name)

    def _places_of(self, skips_own: bool, is_direct: bool) -> list[torch.Tensor]:
        result: list[torch.Tensor] = []
        for each, place in self._bare:
            if is_direct and each.is_direct:
                result.append(each.chunks[each.division.index])
            else:
                result += each.division.of_whole(place, skips_own)
        return result

    def _pieces_of(
        self, rows: torch.Tensor, start: int, skips_own: bool, is_direct: bool
    ) -> list[torch.Tensor]:
        result: list[torch.Tensor] = []
        for each in self.held:
            if is_direct and each.is_direct:
                result.append(self.own(each))
                continue
            own = None
            if skips_own:
                first = self.offset + each.offset
                own = self.arena.flat.detach()[first : first + each.division.size]
            result += each.division.of_rows(rows, start + each.offset, own)
        return result

    def own(self, held: Held) -> torch.Tensor:
        """What this rank holds of a parameter, as a plain tensor."""
        return held.division.own(self.arena.flat.detach(), self.offset + held.offset)

    def refill(self, whole: torch.Tensor) -> None:
        """Make the gathered parameters from what `keep` has split."""
        with torch.no_grad():
            self.allocate()
            self.memory.data.copy_(whole)
        self.kept = None
        self.state = moved_on(self.state, ShardedState.UNSHARDED, self.name)

    def note_versions(self) -> None:
        """The shards are being gathered as they are now."""
        with as_local():
            self.versions = [version_of(each.sharded) for each in self.held]

    def is_stale(self) -> bool:
        """Whether its shards were changed since they were gathered, if they are."""
        if self.state is ShardedState.SHARDED and self.gather is None:
            return False
        with as_local():
            return self.versions != [version_of(each.sharded) for each in self.held]

    def keep(self, index: int, count: int) -> None:
        """Give back all but one of `count` equal pieces of the gathered parameters' memory."""
        with torch.no_grad():
            self.kept = self.memory.view(count, -1)[index].clone()
        self.kept_count = count
        self.free()
        self.state = moved_on(self.state, ShardedState.SHARDED_POST_FORWARD, self.name)

    def reshard(self) -> None:
        """Give back the memory of the gathered parameters."""
        self.holders.clear()
        if self.state is not ShardedState.SHARDED:
            if not self.is_alias:
                self.free()
            self.kept = None
            self.state = moved_on(self.state, ShardedState.SHARDED, self.name)

    # ---- gradients

    def follow_requires_grad(self) -> None:
        """Let the gathered parameters require gradients exactly where the shards do."""
        trainable = []
        with as_local():
            for index, each in enumerate(self.held):
                wanted = _requires_grad(each.sharded)
                if wanted is not _requires_grad(each.whole):
                    each.whole.requires_grad_(wanted)
                if wanted:
                    trainable.append(index)
                    if index not in self.watched:
                        self._watch(index)
        self.trainable = trainable

    def _watch(self, index: int) -> None:
        self.watched.add(index)
        unit = ref(self)  # a hook that held the unit would be a cycle through C++

        def ready(_: torch.Tensor) -> None:
            found = unit()
            if found is not None:
                found.got.add(index)
                if len(found.got) == len(found.trainable):
                    found.on_ready(found)

        whole: Any = self.held[index].whole
        whole.register_post_accumulate_grad_hook(ready)

    def keep_gradients(self) -> None:
        """Accumulate what is not reduced now in the dtype in which it will be."""
        self.got.clear()
        with torch.no_grad(), as_local():
            for index in self.trainable:
                each = self.held[index]
                if each.sum_dtype is None or each.sum_dtype is self.dtype:
                    continue  # autograd accumulates it
                gradient = gradient_of(each.whole)
                if gradient is not None:
                    each.accumulated = _added(each.accumulated, gradient, each.sum_dtype)
                    set_gradient(each.whole, None)

    def take_gradients(self) -> list[torch.Tensor | None]:
        """The gradients of the trainable ones, which are then forgotten here."""
        self.got.clear()
        result = []
        with torch.no_grad(), as_local():
            for index in self.trainable:
                each = self.held[index]
                gradient = gradient_of(each.whole)
                set_gradient(each.whole, None)
                if each.accumulated is not None:
                    if gradient is None:
                        gradient = each.accumulated
                    else:
                        gradient = each.accumulated.add_(gradient)
                    each.accumulated = None
                if gradient is not None and gradient.is_sparse:
                    gradient = gradient.to_dense()
                result.append(gradient)
        return result

    @property
    def has_gradients(self) -> bool:
        """Whether it holds some that are not reduced."""
        with as_local():
            return any(
                each.accumulated is not None or gradient_of(each.whole) is not None
                for each in self.held
            )

    def dtype_for(self, gradients: Sequence[torch.Tensor | None]) -> torch.dtype:
        """In which dtype to reduce gradients of the trainable ones. All ranks must come to the
        same: those without a gradient take it to have the dtype of the gathered parameter."""
        found = set() if self.reduce_dtype is None else {self.reduce_dtype}
        for index, gradient in zip(self.trainable, gradients, strict=True):
            each = self.held[index]
            if each.sum_dtype is None:
                found.add(self.dtype if gradient is None else gradient.dtype)
            if each.reduced is not None:
                found.add(each.reduced.dtype)
        return promoted(found or {self.dtype})

    def forget_gradients(self) -> None:
        """Drop what was not reduced."""
        self.take_gradients()
        for each in self.held:
            each.reduced = None


def aligned(count: int) -> int:
    """As many elements, or some more."""
    return -(-count // ALIGNED) * ALIGNED


def _added(total: torch.Tensor | None, gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if total is None:
        return gradient.to(dtype)
    return total.add_(gradient)
