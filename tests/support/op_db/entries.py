"""The operators of op_db, their samples, and the forms in which they can be called."""

from __future__ import annotations

import functools
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.core.layout import Layout
from shardwise.dtensor.tensor import DTensor, wrap
from shardwise.testing import Sample, distributed
from support.op_db.cases import ways

MOST_NUMBERS = 4000
"""Samples with more numbers are left out where there are smaller ones: they show nothing else."""

KINDS = ("float64", "float32", "complex128", "int64", "bool")
"""The dtypes tried, of those that an operator has; gradients are of float64 and complex128."""


def _stepped(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that is every second element of its memory."""
    return tensor.new_zeros((*tensor.shape, 2))[..., 0].copy_(tensor)


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with its dims in reverse order in memory."""
    order = range(tensor.dim())[::-1]
    return tensor.new_empty(tensor.shape[::-1]).permute(*order).copy_(tensor)


MEMORIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": torch.Tensor.contiguous,
    "stepped": _stepped,
    "transposed": _transposed,
}


@dataclass(frozen=True, eq=False)
class Entry:
    """One operator of op_db."""

    name: str
    info: Any

    def kinds(self) -> list[torch.dtype]:
        """Return the dtypes to try, of those the operator supports."""
        has = self.info.supported_dtypes("cpu")
        found = [dtype for kind in KINDS if (dtype := getattr(torch, kind)) in has]
        return found or sorted(has, key=str)[:1]

    @property
    def sets_seed(self) -> bool:
        """Return whether op_db's function sets torch's seed itself, as random operators do."""
        names: tuple[str, ...] = getattr(getattr(self.info.op, "__code__", None), "co_names", ())
        return "wrapper_set_seed" in names

    def samples(self, dtype: torch.dtype, most: int) -> list[Call]:
        """Return at most `most` samples: the first, and others by a fixed seed."""
        torch.manual_seed(zlib.crc32(self.name.encode()))
        grad = self.info.supports_autograd and dtype in (torch.float64, torch.complex128)
        calls: list[Call] = []
        for at, made in enumerate(self.info.sample_inputs("cpu", dtype, requires_grad=grad)):
            call = _as_call(self, dtype, at, made)
            if call.sample.tensors():
                calls.append(call)
                if most == 1 and call.numbers <= MOST_NUMBERS:
                    return [call]  # op_db makes hundreds of some operators
        small = [each for each in calls if each.numbers <= MOST_NUMBERS] or calls[:1]
        if len(small) <= most:
            return small
        picked = random.Random(self.name).sample(range(1, len(small)), most - 1)
        return [small[0], *(small[at] for at in sorted(picked))]

    def forms(self) -> dict[str, Callable[..., Any]]:
        """Return the function and its method, operator, in-place and out= forms, if any."""
        info = self.info
        found: dict[str, Callable[..., Any]] = {"function": info.op}
        if info.method_variant is not None and info.method_variant is not info.op:
            found["method"] = info.method_variant
        if info.operator_variant is not None:
            found["operator"] = info.operator_variant
        if info.inplace_variant is not None:
            found["in place"] = _on_copy(info.inplace_variant)
        if info.supports_out:
            found["out"] = _into_out(info.op)
        return found


@dataclass(frozen=True, eq=False)
class Call:
    """One sample of an operator, in one of its forms."""

    entry: Entry
    dtype: torch.dtype
    number: int
    """Which of the samples it is."""
    sample: Sample
    graded: Callable[[Any], Any]
    """What of the result has a well-defined gradient, by op_db."""
    broadcasts: bool
    """Whether the result is larger than the first input, which then cannot be changed in place."""
    fn: Callable[..., Any]
    """What is called."""
    form: str = "function"
    memory: str = "contiguous"
    """How the inputs lie in memory: one of `MEMORIES`."""

    def in_form(self, form: str) -> Call:
        """Return the same sample for another form of the operator."""
        return replace(self, form=form, fn=self.entry.forms()[form])

    def placed(self, tensor: Any) -> Any:
        """Return a leaf with the values of a tensor, or of a DTensor, that lie in memory as this
        call wants them."""
        if self.memory == "contiguous" or tensor.layout != torch.strided:
            return tensor
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        made = MEMORIES[self.memory](local.detach())
        result = wrap(made, tensor.mesh_layout) if isinstance(tensor, DTensor) else made
        return result.requires_grad_(tensor.requires_grad)

    def on(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Call the operator with these tensors in place of the sample's own."""
        args, kwargs = self.sample.filled(tensors)
        return self.fn(*args, **kwargs)

    @property
    def numbers(self) -> int:
        return sum(each.numel() for each in self.sample.tensors())


def _as_call(entry: Entry, dtype: torch.dtype, number: int, made: Any) -> Call:
    sample = Sample(made.input, *made.args, **made.kwargs)
    return Call(
        entry,
        dtype,
        number,
        sample,
        made.output_process_fn_grad,
        made.broadcasts_input,
        entry.info.op,
    )


def _on_copy(inplace: Callable[..., Any]) -> Callable[..., Any]:
    """Apply an in-place function to a copy of its first argument, which may be a leaf."""

    def call(first: Any, *args: Any, **kwargs: Any) -> Any:
        return inplace(first.clone(), *args, **kwargs)

    return call


def _into_out(op: Callable[..., Any]) -> Callable[..., Any]:
    """Call a function with `out=`: zeros of the right shapes, in some layout."""

    def call(*args: Any, **kwargs: Any) -> Any:
        made = op(*args, **kwargs)
        targets = tuple(map(_zeros, made)) if isinstance(made, tuple) else _zeros(made)
        op(*args, **kwargs, out=targets)
        return targets

    return call


def _zeros(made: torch.Tensor) -> torch.Tensor:
    if not isinstance(made, DTensor):
        return torch.zeros_like(made.detach())  # as torch's DTensor lies, if it is one
    zeros = torch.zeros(made.shape, dtype=made.dtype)
    mesh = made.mesh_layout.mesh
    options = ways(zeros, mesh.ndim)
    how = options[zlib.crc32(repr(made.mesh_layout).encode()) % len(options)]
    return distributed(zeros, Layout.from_placements(mesh, zeros.shape, how))


@functools.cache
def entries() -> dict[str, Entry]:
    """Return every operator of op_db, by name."""
    from torch.testing._internal.common_methods_invocations import op_db

    found: dict[str, Entry] = {}
    for info in op_db:
        variant = info.variant_test_name
        name = f"{info.name}.{variant}" if variant else info.name
        assert name not in found, f"op_db has {name} twice"
        found[name] = Entry(name, info)
    return found


def named(names: Sequence[str]) -> list[Entry]:
    """Return the entries of these names, or all entries."""
    return [entries()[name] for name in names] if names else list(entries().values())
