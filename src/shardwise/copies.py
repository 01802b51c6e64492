"""Copies that stand for views.

Of a split dim, `x[1:3]` must move rows: where torch would return a view, here it is a copy. It is
kept as a view would be: what is written to it is written to the tensor it was taken of, at once,
and if that was written to since, the copy is taken again when it is used next. Both are moves that
every rank makes at the same place of the program. Where no index says what it is a copy of, as of a
diagonal, writing to it is refused.

Such a copy is a DTensor of a class of its own, so that calls without any pay nothing. Within a call
it is an ordinary one.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef

from shardwise.errors import DispatchError
from shardwise.tensor import DTensor, severed_by, tensors_in, wrap
from shardwise.torch_internals import TensorBase, as_local, base_of, locally, storage_id

_storage_of = TensorBase.untyped_storage


class _Linked(threading.local):
    """The links of one thread, by the memory of what the copies were taken of."""

    def __init__(self) -> None:
        self.by_memory: dict[int, list[weakref.ref[Link]]] = {}


linked = _Linked()


class Link:
    """What ties a copy to the tensor that it was taken of."""

    def __init__(
        self, name: str, key: Any, base: DTensor, again: Callable[[DTensor], DTensor], holds: bool
    ) -> None:
        self.name = name
        """The operator that took it."""
        self.key = key
        """What it is of the tensor, as an index; None if no index says it."""
        self.again = again
        """Takes it again."""
        self._viewed: Callable[[], DTensor | None] = TensorWeakRef(base)
        self.held = base if holds else None
        self.memory = _memory_of(base)
        """Of the tensor; while this is held no other memory has its address."""
        self.records = torch.is_grad_enabled()
        """Whether gradients were recorded when it was taken: so they are when it is again."""
        self.outdated_by: str | None = None
        """What wrote to the tensor since."""
        self.is_written = False
        """Whether the call that is under way writes to the copy."""
        self.is_write_recorded = False
        """Whether gradients are recorded where it does."""
        _register(self)

    def base(self) -> DTensor | None:
        """The tensor, if it is still there, with the dims and the memory that it had."""
        base = self._viewed()
        return base if base is not None and _address_of(base) == self.memory.cdata else None

    def cut(self) -> None:
        """Say that the tensor has other dims now."""
        self._viewed, self.held = lambda: None, None


def _register(link: Link) -> None:
    table, address = linked.by_memory, link.memory.cdata
    links = table.setdefault(address, [])

    def forget(which: weakref.ref[Link]) -> None:
        links.remove(which)
        if not links and table.get(address) is links:
            del table[address]

    links.append(weakref.ref(link, forget))


def _memory_of(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(locally(_storage_of, (), (tensor,)))  # type: ignore[no-untyped-call]


def _address_of(tensor: torch.Tensor) -> int:
    return storage_id(locally(_storage_of, (), (tensor,)))


def _links_to(memory: int) -> list[Link]:
    found = (each() for each in linked.by_memory.get(memory, ()))
    return [link for link in found if link is not None]


def outdate(tensor: torch.Tensor, name: str) -> None:
    """Say that `name` writes to a tensor: what was copied of its memory is out of date."""
    for link in _links_to(_address_of(tensor)):
        link.outdated_by = name
        link.held = link.base()  # to take it again


def outdate_gradients(name: str) -> None:
    """Say that `name` writes to gradients, unseen."""
    for memory in list(linked.by_memory):
        for link in _links_to(memory):
            base = link.base()
            if base is not None and "_is_gradient" in base.__dict__:
                outdate(base, name)


def has_other_dims(tensor: DTensor) -> None:
    """Say that a tensor's dims were changed in place: nothing can be taken of it again as it was,
    nor written to it."""
    for link in _links_to(_address_of(tensor)):
        if link.base() is tensor:
            link.cut()


class ViewCopy(DTensor):
    """A DTensor that is a copy where torch would have returned a view, or a view of such a one."""

    _link: Link

    def _renew(self) -> None:
        """Take the copy again, if what it was taken of was written to since."""
        owner, link = self._owner, self._link
        base = link.base()
        if type(base) is ViewCopy:
            base._renew()
        by = link.outdated_by
        if by is None:
            return
        if base is None:
            raise DispatchError(
                f"this tensor is the result of {shown(link.name)}, of which torch would return a "
                "view, but the dim was split and so it is a copy. The original was changed since, "
                f"by {by}, and is gone, or has other dims or memory: the copy cannot be taken "
                "again. Keep the original, or clone() the part before it changes"
            )
        link.outdated_by = None
        outdate(owner, by)
        # The history is that of what is there now, whether or not gradients are recorded here.
        with torch.set_grad_enabled(link.records):
            made = link.again(base)
            with as_local():
                # A leaf has no history, whatever it is a part of.
                is_leaf = owner.is_leaf and owner.requires_grad
                torch.Tensor.copy_(owner.detach() if is_leaf else owner, made)

    @property
    def _owner(self) -> DTensor:
        """The copy itself, of a view of it."""
        return self.__dict__.get("_copy", self)  # type: ignore[no-any-return]

    @property
    def data(self) -> DTensor:
        """The tensor without its history, sharing memory."""
        self._renew()
        return alias(DTensor.data.__get__(self), self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        for name in ("_link", "_copy", "_severed", "_key"):  # it is no part of another any more
            self.__dict__.pop(name, None)
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
        raise DispatchError(  # it is asked for by those who load, not by those who save
            f"torch.distributed.checkpoint: this tensor is the result of {shown(self._link.name)}, "
            "of which torch would return a view, but the dim was split and so it is a copy: what "
            "is loaded into it would not reach the original. Load into the original, or into a "
            "clone() of the part, and copy_() that"
        )


_SHOWN = {"__getitem__": "indexing"}


def shown(name: str) -> str:
    """How a message calls an operator that returns views."""
    return _SHOWN.get(name, name)


def alias(tensor: DTensor, copy: DTensor) -> DTensor:
    """Say that a tensor shares memory with a copy."""
    tensor._link = copy._link  # type: ignore[attr-defined]
    tensor._copy = copy.__dict__.get("_copy", copy)  # type: ignore[attr-defined]
    tensor.__class__ = ViewCopy
    return tensor


def link(result: Any, base: Any, again: Callable[[DTensor], Any], keys: Sequence[Any] = ()) -> None:
    """Tie the copies among results to the tensor they were taken of.

    Arguments:
        again: makes the results again, of that tensor.
        keys: the indices that give them, unless those that made the copies said so.
    """
    for number, each in enumerate(tensors_in(result)):
        if type(each) is DTensor and "_severed" in each.__dict__ and "_link" not in each.__dict__:
            name, key = each.__dict__["_severed"], each.__dict__.get("_key")
            if key is None and keys:
                key = keys[number]
            # As a view, it keeps the tensor. While gradients are recorded that would double what is
            # saved for them; but another copy may be all that is left of the tensor itself.
            holds = "_link" in base.__dict__ or not each.requires_grad
            each._link = Link(name, key, base, _nth(again, number), holds)  # type: ignore[attr-defined]
            each.__class__ = ViewCopy


def _nth(again: Callable[[DTensor], Any], number: int) -> Callable[[DTensor], DTensor]:
    return lambda base: list(tensors_in(again(base)))[number]  # type: ignore[return-value]


def copies_in(*values: Any) -> list[ViewCopy]:
    """The copies among arguments."""
    return [each for each in tensors_in(values) if type(each) is ViewCopy]


def as_ordinary(copies: list[ViewCopy], run: Callable[[], Any]) -> Any:
    """Make a call with copies as a call with ordinary DTensors."""
    for each in copies:
        each._renew()
    for each in copies:
        each.__class__ = DTensor  # type: ignore[assignment]
    try:
        result = run()
    except BaseException:
        for each in copies:
            each._link.is_written = False
        raise
    finally:
        for each in copies:
            each.__class__ = ViewCopy
    for each in copies:
        if each._link.is_written:
            _write_back(each)
    _find_aliases(result, copies)
    return result


def _write_back(copy: ViewCopy) -> None:
    link, base = copy._link, copy._link.base()
    link.is_written = False
    assert base is not None, "seen before the call"
    owner = copy._owner
    with as_local():
        value = wrap(owner.view_as(owner), owner._layout)  # no copy of the tensor's any more
    link.outdated_by = "__setitem__"  # should that be refused, as of a leaf, it is as it was
    with torch.set_grad_enabled(link.is_write_recorded):
        base[link.key] = value
    link.outdated_by = None


def _find_aliases(result: Any, copies: list[ViewCopy]) -> None:
    for each in tensors_in(result):
        if type(each) is not DTensor or "_link" in each.__dict__:
            continue
        memory = _address_of(each)
        sharing = [copy for copy in copies if _address_of(copy) == memory]
        if sharing:
            # Parts that were moved at once share memory too. What takes several tensors and returns
            # views, as broadcast_tensors, leaves the first element where it was.
            first = _first_of(each)
            alias(each, next((copy for copy in sharing if _first_of(copy) == first), sharing[0]))


def _first_of(tensor: torch.Tensor) -> int:
    return locally(TensorBase.data_ptr, (), (tensor,))  # type: ignore[no-any-return]


def writes_through(target: Any) -> bool:
    """Whether what is written to a copy, or to a view of one, reaches what it was taken of."""
    reaches = _reaches(target)
    if reaches:
        target._link.is_written = True
        target._link.is_write_recorded = torch.is_grad_enabled()
    return reaches


def _reaches(target: Any) -> bool:
    link: Link | None = target.__dict__.get("_link")
    base = None if link is None else link.base()
    if link is None or link.key is None or base is None:
        return False
    copy = target.__dict__.get("_copy", target)
    if copy is not target:
        # What is no view to autograd, as the result of detach(), has a history of its own.
        with as_local():
            of_copy = base_of(copy)
            if base_of(target) is not (copy if of_copy is None else of_copy):
                return False
    with as_local():
        is_copy = severed_by(base) is not None
    return not is_copy or _reaches(base)


def is_copy(tensor: Any) -> bool:
    """Whether a tensor is a copy itself, and no view of one."""
    return "_link" in tensor.__dict__ and "_copy" not in tensor.__dict__


def is_up_to_date(copy: Any, base: DTensor, key: Any) -> bool:
    """Whether a tensor is a copy of just this part, and nothing was written since."""
    if not is_copy(copy) or copy._link.outdated_by is not None:
        return False
    link: Link = copy._link
    return link.base() is base and type(link.key) is type(key) and bool(link.key == key)
