"""The notes that the library keeps on a tensor: one `TensorState`, absent on ordinary tensors.

Plain tensors carry one too: the base of a view, the result of a gather, a tensor that enters
several modules. Two kinds of notes are elsewhere. The layout of a DTensor is an attribute of its
own, because every operator reads it. Notes on parameters that must survive copies and pickles are
ordinary attributes (`optimizers`, `fsdp`).
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from typing import Any

import torch

ATTRIBUTE = "_tensor_state"
"""The attribute of a tensor that holds its state. The hot path of dispatch tests for it only."""


class TensorState:
    """The notes on one tensor. A field that nobody set is None or False.

    A copy and a pickle of the tensor have no notes.
    """

    __slots__ = (
        "alias_of",
        "detached_by",
        "gathered_from",
        "in_one_process",
        "is_gradient",
        "key",
        "link",
        "moves",
        "pending",
        "reduced",
        "relabelled",
        "replaced_by",
        "stand_in",
        "summed_later",
        "viewed_copy",
    )

    def __init__(self) -> None:
        self.moves: dict[Any, tuple[torch.Tensor, int]] | None = None
        """Its moved versions, by move and grad mode, each with the version of the tensor. Set and
        read by `input_moves`; an entry ends with that version, all end with `forget_moves`."""
        self.reduced: tuple[Any, ...] | None = None
        """Its value without pending reductions, and for which calls that value holds. Set and read
        by `input_moves`; ends with the version of the tensor or with `forget_moves`."""
        self.alias_of: torch.Tensor | None = None
        """The plain tensor that this DTensor wraps where it enters a module. Set by `parallel`;
        read by `input_moves`, which keeps `moves` there, so that all modules share them."""
        self.gathered_from: torch.Tensor | None = None
        """The piece that a gather made this tensor of. Set and read by `redistribute`, which sums
        gradients directly into the pieces."""
        self.replaced_by: dict[int, weakref.ref[torch.Tensor]] | None = None
        """The DTensors that have replaced this parameter in a module, by rank, as simulated ranks
        may share a parameter. Set and read by `parallel`, which keeps ties."""
        self.relabelled: tuple[torch.Tensor, Any] | None = None
        """The local tensor that this is an alias of, and the layout in which its gradient is
        wanted, if as contributions (`from_local(grad_placements=)`). Set and read by
        `redistribute`, which then computes no sums."""
        self.is_gradient = False
        """Whether it is the `grad` of a DTensor: backward adds to it unseen. Set by `DTensor.grad`;
        read by `view_copy`."""
        self.detached_by: str | None = None
        """The operator that returned it as a copy, where torch would return a view. Set by
        `writes.mark_detached_copy`, and handed on by `detach` and `data`; read by
        `writes.check_writable`. Ends when `data` is assigned."""
        self.key: Any = None
        """The index of the original that gives such a copy, if one does. Set beside `detached_by`;
        read by `view_copy.link`."""
        self.link: Any = None
        """The `CopyLink` from such a copy, or a view of one, to the original. Set and read by
        `view_copy`; ends when `data` is assigned."""
        self.in_one_process: torch.Tensor | None = None
        """For a view of such a copy: a meta tensor with the strides of the view that one process
        would have. Set and read by `view_copy`."""
        self.pending: Any = None
        """The data that a tensor waits for (`Pending`). Set and read by `WaitingDTensor`; ends when
        they are there."""
        self.stand_in: Any = None
        """The meta tensor that operators run on in place of a DTensor without data, on a rank
        outside of its mesh. Set and read by `dispatch.outside`."""
        self.viewed_copy: torch.Tensor | None = None
        """The copy that this tensor is a view of. Set and read by `view_copy` beside `link`."""

        self.summed_later: tuple[int, ...] = ()
        """The axes over which the gradient of this leaf is summed after the backward, so that no
        operator sums it. Set by `fsdp`; read by `summed_later`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()  # torch.load accepts it, also where shardwise is not installed


def state_of(tensor: torch.Tensor) -> TensorState | None:
    """Return the state of a tensor; None if it has none."""
    found = tensor.__dict__.get(ATTRIBUTE)
    return found if type(found) is TensorState else None


def ensure_state(tensor: torch.Tensor) -> TensorState:
    """Return the state of a tensor, which gets one if it has none."""
    found = tensor.__dict__.get(ATTRIBUTE)
    if type(found) is not TensorState:
        found = tensor.__dict__[ATTRIBUTE] = TensorState()
    return found


def user_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes of a tensor without its state, for a tensor that replaces it."""
    return {name: value for name, value in vars(tensor).items() if name != ATTRIBUTE}


class _LeafMoves(threading.local):
    """The moved versions of leaves of the autograd graph, until a backward has passed through.

    A leaf cannot hold them itself: their graph leads back to the leaf, and a cycle through C++ is
    never freed. Keys begin with the id of the leaf, which the graph of the value keeps alive.
    Whether a tensor is still alive must not decide which moves are shared: it may differ between
    ranks, and each move of a gradient back is a collective.
    """

    def __init__(self) -> None:
        self.of_parameters: dict[Any, tuple[torch.Tensor, int]] = {}
        self.of_inputs: dict[Any, tuple[torch.Tensor, int]] = {}
        """The same for leaves that are no parameters. A program may make new ones forever and never
        run a backward, so fewer are kept."""

    def clear(self) -> None:
        """Forget all of this thread."""
        self.of_parameters.clear()
        self.of_inputs.clear()


leaf_moves = _LeafMoves()


def forget_moves(tensor: torch.Tensor) -> None:
    """Drop the moved versions of a tensor whose data change without a change of its version."""
    state = state_of(tensor)
    if state is not None:
        state.moves = state.reduced = None
    mine = id(tensor)
    for kept in (leaf_moves.of_parameters, leaf_moves.of_inputs):
        for key in [each for each in kept if each[0] == mine]:
            del kept[key]
