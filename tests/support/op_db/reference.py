"""The result of a call in one process, and the comparison of results with it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.core.layout import Layout
from shardwise.core.mesh import init_device_mesh
from shardwise.dtensor.tensor import tensors_in
from shardwise.run.simulate import simulate
from shardwise.testing import distributed, loss_of, value_difference, whole_of, widened
from support.op_db.entries import Call

SEED = 5
UNFILLED = ("empty", "new_empty")
"""Operators whose results are memory as it is: only shapes and dtypes are compared."""


@dataclass(frozen=True, eq=False)
class Reference:
    """The result of one call in one process."""

    results: list[Any]
    """Tensors, and whatever else a call returns."""
    gradients: list[torch.Tensor | None] | None
    """Of the inputs that require grad; None if there are none."""
    views: list[list[int]]
    """For each tensor of the result, the inputs of which it is a view."""
    is_random: bool
    is_filled: bool
    unstable: frozenset[int] = frozenset()
    """The results, by position, of which torch gives other values when it is called again with the
    same seed: only types, shapes, dtypes and layouts are compared."""
    unstable_gradients: frozenset[int] = frozenset()
    """The same, of the gradients."""

    def unstable_names(self) -> list[str]:
        """Return the names of results and gradients that are not compared."""
        results = [f"result {at}" for at in sorted(self.unstable)]
        return results + [f"gradient of input {at}" for at in sorted(self.unstable_gradients)]


def reference(call: Call) -> Reference | None:
    """Compute the reference of a call; None if torch itself refuses the call."""
    try:
        results, gradients, views = on_plain(call, SEED)
        again, gradients_again, _ = on_plain(call, SEED)
        others = [on_plain(call, SEED + more)[0] for more in (1, 2)]
    except Exception:
        return None
    is_filled = not call.entry.name.startswith(UNFILLED)
    # Of torch's own two calls: random numbers of DTensors, which replace its below, are others.
    unstable = _differing(again, results) if is_filled else frozenset()
    of_gradients = _differing(gradients_again or [], gradients or [])
    is_random = is_filled and (
        call.entry.sets_seed
        or any(difference(other, results, unstable=unstable) for other in others)
    )
    if call.form == "out":
        # What the function returns must be there; torch's own ihfftn leaves something else.
        results, _, _ = on_plain(replace(call, fn=call.entry.info.op), SEED)
    if is_random:
        # torch draws other numbers than DTensors do, whose numbers are those of one rank.
        plain = results
        results, gradients = simulate(lambda: _on_one_rank(call), 1)[0]
        problem = difference(results, plain, values=False)
        assert not problem, f"{call.entry.name} {call.sample} on one rank: {problem}"
    return Reference(results, gradients, views, is_random, is_filled, unstable, of_gradients)


def _differing(again: Sequence[Any], first: Sequence[Any]) -> frozenset[int]:
    """Return the positions at which a second call gives other values."""
    pairs = enumerate(zip(again, first, strict=True))
    return frozenset(
        at
        for at, (have, want) in pairs
        if (have is None) != (want is None) or (want is not None and difference([have], [want]))
    )


def on_plain(
    call: Call, seed: int
) -> tuple[list[Any], list[torch.Tensor | None] | None, list[list[int]]]:
    """Return results, gradients, and for each result the inputs of which it is a view."""
    inputs = [
        call.placed(each.detach().clone().requires_grad_(each.requires_grad and call.form != "out"))
        for each in call.sample.tensors()
    ]
    torch.manual_seed(seed)
    made = call.on(inputs)
    results = list(leaves(unambiguous(call, inputs, made)))
    views = [
        [at for at, each in enumerate(inputs) if memory(each) and memory(each) == memory(result)]
        for result in results
        if isinstance(result, torch.Tensor)
    ]
    graded = [each for each in inputs if each.requires_grad]
    outputs = [each for each in tensors_in(call.graded(made)) if each.requires_grad]
    kept = [each.detach().clone() if isinstance(each, torch.Tensor) else each for each in results]
    if not graded or not outputs:
        return kept, None, views
    gradients = torch.autograd.grad(loss_of(outputs), graded, allow_unused=True)
    return kept, list(gradients), views


def _on_one_rank(call: Call) -> tuple[list[Any], list[torch.Tensor | None] | None]:
    mesh = init_device_mesh("cpu", (1,))
    inputs = [distributed(each, Layout(mesh, tuple(each.shape))) for each in call.sample.tensors()]
    if call.form == "out":
        inputs = [each.detach() for each in inputs]
    torch.manual_seed(SEED)
    made = call.on(inputs)
    results = [whole_of(each).detach() if isinstance(each, torch.Tensor) else each
               for each in leaves(unambiguous(call, inputs, made))]  # fmt: skip
    outputs = [whole_of(each) for each in tensors_in(call.graded(made)) if each.requires_grad]
    graded = [each for each in inputs if each.requires_grad]
    if not graded or not outputs:
        return results, None
    loss_of(outputs).backward()
    return results, [None if each.grad is None else each.grad.full_tensor() for each in graded]


def unambiguous(call: Call, inputs: Sequence[torch.Tensor], made: Any) -> Any:
    """Replace indices, which may point to any of several equal values, by those values."""
    if call.entry.info.name != "topk":
        return made
    found, indices = made
    dim = dict(enumerate(call.sample.args)).get(2, call.sample.kwargs.get("dim", -1))
    with torch.no_grad():
        return found, inputs[0].detach().gather(dim, indices) if inputs[0].dim() else indices


def leaves(value: Any) -> Iterator[Any]:
    """Yield the tensors, numbers, ... of a result."""
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        for each in value:
            yield from leaves(each)
    else:
        yield value


def memory(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory; 0 if it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # as of a sparse one
        return 0


# ---- comparing


_DIGITS = {
    torch.float64: 1e-7,
    torch.complex128: 1e-7,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float16: 1e-2,
    torch.complex32: 1e-2,
    torch.bfloat16: 4e-2,
}


def difference(
    got: Sequence[Any],
    want: Sequence[Any],
    values: bool = True,
    unstable: frozenset[int] = frozenset(),
) -> str:
    """Return what is wrong with a list of results, or an empty text.

    Arguments:
        values: whether to compare values, or only types, shapes, dtypes and memory formats.
        unstable: the positions of results whose values are not compared.
    """
    if len(got) != len(want):
        return f"{len(got)} results, expected {len(want)}"
    for at, (have, expected) in enumerate(zip(got, want, strict=True)):
        problem = _difference_of(have, expected, values and at not in unstable)
        if problem:
            return f"result {at}: {problem}" if len(want) > 1 else problem
    return ""


def _difference_of(have: Any, expected: Any, values: bool) -> str:
    if not isinstance(expected, torch.Tensor):
        same = have == expected or (have != have and expected != expected)
        if isinstance(expected, float) and values:
            same = same or math.isclose(have, expected, rel_tol=1e-6, abs_tol=1e-6)
        return "" if same or not values else f"wrong value: {have}, expected {expected}"
    if not isinstance(have, torch.Tensor):
        return f"wrong type: {type(have).__name__}, expected a tensor"
    if have.shape != expected.shape:
        return f"wrong shape: {list(have.shape)}, expected {list(expected.shape)}"
    if have.dtype != expected.dtype:
        return f"wrong dtype: {have.dtype}, expected {expected.dtype}"
    if have.layout != expected.layout:
        return f"wrong layout: {have.layout}, expected {expected.layout}"
    if not values or expected.numel() == 0:
        return ""
    digits = _DIGITS.get(expected.dtype)
    if digits is None:  # integers, and floats of 8 bits
        apart = value_difference(have, expected)
    else:
        size = widened(expected)
        size = size[torch.isfinite(size)].abs()
        atol = digits * max(1.0, float(size.max()) if size.numel() else 1.0)
        apart = value_difference(have, expected, rtol=digits, atol=atol)
    return f"wrong value: {apart}" if apart else ""
