"""Write-back copies that emulate views of split dims.

`x[1:3]` of a split dim must move rows: where torch would return a view, the result is a copy. It
behaves as a view would. A write to the copy is written back to the original at once. After a write
to the original, the copy is taken again when it is used next. Both are moves that every rank makes
at the same point of the program. Writes are refused if no index gives the copy, as for a diagonal.

Such a copy has a class of its own, `ViewCopy`, so that calls without copies pay nothing. During a
call it is an ordinary DTensor.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef

from shardwise.core.errors import DispatchError
from shardwise.core.tensor_state import ensure_state, state_of
from shardwise.dtensor.tensor import DTensor, find_detaching_operator, tensors_in, wrap
from shardwise.torch_internals import TensorBase, as_local, base_of, locally, storage_id

_storage_of = TensorBase.untyped_storage


# ---- the link from a copy to its original


class _Linked(threading.local):
    """The links of one thread, by the memory of the originals."""

    def __init__(self) -> None:
        self.by_memory: dict[int, list[weakref.ref[CopyLink]]] = {}


linked = _Linked()


class CopyLink:
    """The link from a copy to the tensor that it was taken of, its original.

    Arguments:
        retake: takes the copy again, of the original.
        holds: whether to keep the original alive, as a view does.
    """

    def __init__(
        self,
        name: str,
        key: Any,
        original: DTensor,
        retake: Callable[[DTensor], DTensor],
        holds: bool,
    ) -> None:
        self.name = name
        """The operator that took the copy."""
        self.key = key
        """The index of the original that gives the copy; None if there is none."""
        self.retake = retake
        self._original: Callable[[], DTensor | None] = TensorWeakRef(original)
        self.held = original if holds else None
        self.memory = _memory_of(original)
        """The memory of the original. While this reference exists, no other memory has the same
        address."""
        self.records = torch.is_grad_enabled()
        """Whether gradients were recorded when the copy was taken: so they are when it is taken
        again."""
        self.outdated_by: str | None = None
        """The operator that has written to the original since."""
        self.is_written = False
        """Whether the current call writes to the copy."""
        self.is_write_recorded = False
        """Whether gradients are recorded for that write."""
        _register(self)

    def original(self) -> DTensor | None:
        """Return the original, if it is alive and has the dims and the memory that it had."""
        found = self._original()
        return found if found is not None and _address_of(found) == self.memory.cdata else None

    def cut(self) -> None:
        """Forget the original, which has other dims now."""
        self._original, self.held = lambda: None, None


def link_of(tensor: torch.Tensor) -> CopyLink | None:
    """Return the link of a copy, or of a view of one; None for any other tensor."""
    notes = state_of(tensor)
    return None if notes is None else notes.link


def _register(link: CopyLink) -> None:
    table, address = linked.by_memory, link.memory.cdata
    links = table.setdefault(address, [])

    def forget(which: weakref.ref[CopyLink]) -> None:
        links.remove(which)
        if not links and table.get(address) is links:
            del table[address]

    links.append(weakref.ref(link, forget))


def _memory_of(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(locally(_storage_of, (), (tensor,)))  # type: ignore[no-untyped-call]


def _address_of(tensor: torch.Tensor) -> int:
    return storage_id(locally(_storage_of, (), (tensor,)))


def _links_to(memory: int) -> list[CopyLink]:
    found = (each() for each in linked.by_memory.get(memory, ()))
    return [link for link in found if link is not None]


# ---- writes to an original


def mark_outdated(tensor: torch.Tensor, name: str) -> None:
    """Mark the copies of a tensor's memory as out of date, because operator `name` writes to it."""
    for link in _links_to(_address_of(tensor)):
        link.outdated_by = name
        link.held = link.original()  # needed to take the copy again


def mark_gradients_outdated(name: str) -> None:
    """Mark the copies of gradients as out of date, because `name` adds to gradients unseen."""
    for memory in list(linked.by_memory):
        for link in _links_to(memory):
            original = link.original()
            notes = None if original is None else state_of(original)
            if original is not None and notes is not None and notes.is_gradient:
                mark_outdated(original, name)


def cut_links(tensor: DTensor) -> None:
    """Cut the links to a tensor whose dims were changed in place.

    Its copies can neither be taken again nor be written back.
    """
    for link in _links_to(_address_of(tensor)):
        if link.original() is tensor:
            link.cut()


# ---- the copies


class ViewCopy(DTensor):
    """A DTensor that is a copy where torch would return a view, or a view of such a copy."""

    @property
    def _link(self) -> CopyLink:
        return ensure_state(self).link  # type: ignore[no-any-return]

    @property
    def _copy(self) -> DTensor:
        """The copy itself, if this tensor is a view of it."""
        copy = ensure_state(self).viewed_copy
        return self if copy is None else copy  # type: ignore[return-value]

    def _renew(self) -> None:
        """Take the copy again if the original has been written to since it was taken."""
        copy, link = self._copy, self._link
        original = link.original()
        if type(original) is ViewCopy:
            original._renew()
        by = link.outdated_by
        if by is None:
            return
        if original is None:
            raise DispatchError(
                f"this tensor is the result of {format_operator(link.name)}, of which torch would "
                "return a view, but the dim was split and so it is a copy. The original was "
                f"changed since, by {by}, and is gone, or has other dims or memory: the copy "
                "cannot be taken again. Keep the original, or clone() the part before it changes"
            )
        link.outdated_by = None
        mark_outdated(copy, by)
        # The history is that of the original now, whether or not gradients are recorded here.
        with torch.set_grad_enabled(link.records):
            made = link.retake(original)
            with as_local():
                # A leaf has no history, whatever it is a part of.
                is_leaf = copy.is_leaf and copy.requires_grad
                torch.Tensor.copy_(copy.detach() if is_leaf else copy, made)

    @property
    def data(self) -> DTensor:
        """The tensor without its history, sharing memory."""
        self._renew()
        return _mark_view(DTensor.data.__get__(self), self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        notes = ensure_state(self)  # it is no part of another tensor any more
        notes.link = notes.viewed_copy = notes.detached_by = notes.key = None
        self.__class__ = DTensor  # type: ignore[assignment]
        self.data = value

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        text = super().__repr__()
        by = self._link.outdated_by
        return text if by is None else f"{text[:-1]}, before {by} changed what it is a part of)"

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        self._renew()
        return super().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        self._renew()
        return super().__reduce_ex__(protocol)

    def __create_chunk_list__(self) -> list[Any]:
        raise DispatchError(  # torch asks for it when it loads, not when it saves
            "torch.distributed.checkpoint: this tensor is the result of "
            f"{format_operator(self._link.name)}, of which torch would return a view, but the dim "
            "was split and so it is a copy: what is loaded into it would not reach the original. "
            "Load into the original, or into a clone() of the part, and copy_() that"
        )


_PLAIN_NAMES = {"__getitem__": "indexing"}


def format_operator(name: str) -> str:
    """Return the name by which messages call an operator that returns views."""
    return _PLAIN_NAMES.get(name, name)


def link(
    result: Any, original: Any, retake: Callable[[DTensor], Any], keys: Sequence[Any] = ()
) -> None:
    """Link the detached copies among the results of a call to their original.

    Arguments:
        original: the tensor that torch would return views of.
        retake: makes the results again, of the original.
        keys: the indices that give the results, for copies that were marked without one.
    """
    for number, each in enumerate(tensors_in(result)):
        notes = state_of(each)
        if type(each) is not DTensor or notes is None:
            continue
        name, key = notes.detached_by, notes.key
        if name is None or notes.link is not None:
            continue
        if key is None and keys:
            key = keys[number]
        # A view keeps its original alive. While gradients are recorded, that would double the
        # saved memory; but another copy may be all that is left of its own original.
        holds = link_of(original) is not None or not each.requires_grad
        notes.link = CopyLink(name, key, original, _nth(retake, number), holds)
        each.__class__ = ViewCopy


def _nth(retake: Callable[[DTensor], Any], number: int) -> Callable[[DTensor], DTensor]:
    return lambda original: list(tensors_in(retake(original)))[number]  # type: ignore[return-value]


def _mark_view(tensor: DTensor, copy: ViewCopy) -> DTensor:
    """Make a tensor that shares memory with a copy a view of that copy."""
    notes = ensure_state(tensor)
    notes.link, notes.viewed_copy = copy._link, copy._copy
    tensor.__class__ = ViewCopy
    return tensor


def is_view_copy(tensor: Any) -> bool:
    """Tell whether a tensor is a copy itself, and not a view of one."""
    notes = state_of(tensor)
    return notes is not None and notes.link is not None and notes.viewed_copy is None


def is_current_copy(copy: Any, original: DTensor, key: Any) -> bool:
    """Tell whether a tensor is the copy of `original[key]`, and nothing was written since."""
    link = link_of(copy) if is_view_copy(copy) else None
    if link is None or link.outdated_by is not None:
        return False
    return link.original() is original and type(link.key) is type(key) and bool(link.key == key)


# ---- calls with copies


def view_copies_in(*values: Any) -> list[ViewCopy]:
    """List the copies among arguments."""
    return [each for each in tensors_in(values) if type(each) is ViewCopy]


def call_with_copies(
    copies: list[ViewCopy],
    run: Callable[[], Any],
    call: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None,
) -> Any:
    """Make a call in which these copies are ordinary DTensors; then write back what it wrote.

    Arguments:
        run: makes the call.
        call: its function and arguments, to tell which results are views in one process.
    """
    for each in copies:
        each._renew()
    for each in copies:
        each.__class__ = DTensor  # type: ignore[assignment]
    try:
        result = run()
    except BaseException:
        for each in copies:
            ensure_state(each).link.is_written = False
        raise
    finally:
        for each in copies:
            each.__class__ = ViewCopy
    for each in copies:
        if each._link.is_written:
            _write_back(each)
    _mark_views(result, copies)
    return result if call is None else _as_of_view(result, *call)


_MAY_RETURN_ITS_ARGUMENT = {"contiguous", "flatten", "ravel", "reshape"}
"""Functions that return their argument, a view or a copy of it, as its strides are."""


def _as_of_view(result: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of a call, or a copy of it where torch would copy the view that a copy
    stands for: a part of some columns has gaps between its rows, which the copy does not have."""
    if (
        not args
        or type(args[0]) is not ViewCopy
        or any(True for _ in tensors_in((args[1:], kwargs)))
    ):
        return result
    copy = args[0]
    may_be_itself = getattr(func, "__name__", "") in _MAY_RETURN_ITS_ARGUMENT
    made = [each for each in tensors_in(result) if type(each) is ViewCopy]
    if not made or (made[0] is copy and not may_be_itself):
        return result
    view = _in_one_process(copy)
    in_one_process = list(tensors_in(func(view, *args[1:], **kwargs)))
    memory = storage_id(view.untyped_storage())
    if any(storage_id(each.untyped_storage()) != memory for each in in_one_process):
        return result.clone()
    for each, strides in zip(tensors_in(result), in_one_process, strict=True):
        if type(each) is ViewCopy and each is not copy:
            ensure_state(each).in_one_process = strides
    return result


def _in_one_process(tensor: DTensor) -> torch.Tensor:
    """Return a meta tensor with the strides of the view that a copy stands for; for another tensor
    with its own."""
    if type(tensor) is ViewCopy:
        link, original = tensor._link, tensor._link.original()
        noted = ensure_state(tensor).in_one_process
        if noted is not None:
            return noted
        if tensor._copy is tensor and link.key is not None and original is not None:
            return _in_one_process(original)[link.key]
    return torch.empty_strided(tensor.shape, tensor.stride(), device="meta")


def _write_back(tensor: ViewCopy) -> None:
    link, copy = tensor._link, tensor._copy
    original = link.original()
    link.is_written = False
    assert original is not None, "`note_write` saw it before the call"
    with as_local():
        value = wrap(copy.view_as(copy), copy._layout)  # an ordinary DTensor
    link.outdated_by = "__setitem__"  # it stays so if the write is refused, as to a leaf
    with torch.set_grad_enabled(link.is_write_recorded):
        original[link.key] = value
    link.outdated_by = None


def _mark_views(result: Any, copies: list[ViewCopy]) -> None:
    """Find the results that share memory with a copy, and make them views of it."""
    for each in tensors_in(result):
        if type(each) is not DTensor or link_of(each) is not None:
            continue
        memory = _address_of(each)
        sharing = [copy for copy in copies if _address_of(copy) == memory]
        if sharing:
            # Parts that were moved together share memory, too. Operators that take several tensors
            # and return views, such as broadcast_tensors, keep the address of the first element.
            first = _first_of(each)
            _mark_view(
                each, next((copy for copy in sharing if _first_of(copy) == first), sharing[0])
            )


def _first_of(tensor: torch.Tensor) -> int:
    return locally(TensorBase.data_ptr, (), (tensor,))  # type: ignore[no-any-return]


def note_write(target: Any) -> bool:
    """Note that the current call writes to a copy, or to a view of one.

    Returns whether the write can be written back to the original; if not, nothing is noted.
    """
    if not _can_write_back(target):
        return False
    link = ensure_state(target).link
    link.is_written = True
    link.is_write_recorded = torch.is_grad_enabled()
    return True


def _can_write_back(target: Any) -> bool:
    link = link_of(target)
    original = None if link is None else link.original()
    if link is None or link.key is None or original is None:
        return False
    copy = ensure_state(target).viewed_copy
    if copy is not None:
        # A tensor that is no view to autograd, as the result of detach(), has its own history.
        with as_local():
            of_copy = base_of(copy)
            if base_of(target) is not (copy if of_copy is None else of_copy):
                return False
    with as_local():
        is_detached = find_detaching_operator(original) is not None
    return not is_detached or _can_write_back(original)
