"""A rank's program as text: how its values lie, and where ranks meet, for what and how much."""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TextIO

import torch
from torch import fx
from torch.export import ExportedProgram

from shardwise.export import notes
from shardwise.export.cleaning import is_collective
from shardwise.export.errors import ExportError
from shardwise.export.modules import innermost
from shardwise.layout_input import short_dtype
from shardwise.torch_internals import OpOverload, operator_name, pytree

_WIDEST = 36
"""The most characters of an operator and its arguments."""

_NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"
"""What torch writes at nodes that no module made."""


def print_sharding(program: Any, file: TextIO | None = None) -> None:
    """Print a rank's program: parameters, nodes with their layouts, collectives and reasons.

    Arguments:
        program: what `shard_program`, `tensor_parallel_transformation` or `shard_step` made; also
            one that was saved and loaded.
        file: where to; standard output by default.

    Example:
        >>> print_sharding(shard_program(program, mesh, plan))
    """
    print(sharding_text(program), file=file)


def sharding_text(program: Any) -> str:
    """What `print_sharding` prints.

    In a layout `16@tp` is a dim of 16 that axis `tp` splits, and `+sum@tp` says that each rank has
    a contribution to a sum. Bytes are what this rank receives from others, at the least.
    """
    module = getattr(program, "graph_module", program)
    if not isinstance(module, fx.GraphModule):
        raise ExportError(
            "program: expected one of shard_program, tensor_parallel_transformation or shard_step, "
            f"got {type(program).__name__}"
        )
    nodes = list(module.graph.nodes)
    calls = [node for node in nodes if node.op == "call_function"]
    held, given = _inputs(program, [node for node in nodes if node.op == "placeholder"], calls)
    parts = [
        _table(("parameters, buffers, constants", "dtype", "lies as", "here"), _grouped(held)),
        _table(("inputs", "dtype", "lies as", "here"), _grouped(given)),
        _table(("nodes", "operator", "dtype", "here", "lies as", "for"), map(_call_row, calls)),
        _outputs(module.graph.output_node()),
        _summary(calls),
    ]
    return "\n\n".join(filter(None, parts))


# ---- inputs


@dataclass(frozen=True)
class _Input:
    name: str
    dtype: str
    layout: str
    here: str


def _inputs(
    program: Any, placeholders: Sequence[fx.Node], calls: Sequence[fx.Node]
) -> tuple[list[_Input], list[_Input]]:
    """What the program holds, and what it is given."""
    saved: dict[str, str]
    saved = next((found for node in calls if (found := notes.said(node, notes.INPUTS))), {})
    names: dict[str, str] = {}
    if isinstance(program, ExportedProgram):
        specs = program.graph_signature.input_specs
        pairs = zip(placeholders, specs, strict=True)
        names = {node.name: spec.target for node, spec in pairs if spec.target is not None}
    held: list[_Input] = []
    given: list[_Input] = []
    for node in placeholders:
        value = node.meta.get("val")
        name = names.get(node.name) or notes.said(node, notes.NAME) or node.name
        layout = notes.said(node, notes.LAYOUT) or saved.get(node.name, "")
        row = _Input(name, _dtype(value), layout, _here(value))
        (held if node.name in names else given).append(row)
    return held, given


def _grouped(inputs: Iterable[_Input]) -> Iterator[tuple[str, ...]]:
    """A row for each, but one for the same thing in many layers."""
    groups: dict[Any, list[str]] = {}
    for each in inputs:
        key = re.sub(r"\b\d+\b", "*", each.name), each.dtype, each.layout, each.here
        groups.setdefault(key, []).append(each.name)
    for (pattern, *rest), names in groups.items():
        yield (names[0] if len(names) == 1 else f"{pattern} (x{len(names)})", *rest)


# ---- nodes


def _call_row(node: fx.Node) -> tuple[str, ...]:
    value = node.meta.get("val")
    row = node.name, _shortened(_call(node)), _dtype(value), _here(value)
    said = notes.said(node, notes.COLLECTIVE)
    if is_collective(node) and said:
        return *row, _reason(said)
    return *row, _layout(node), _module_of(node)


def _layout(node: fx.Node) -> str:
    text: str | None = notes.said(node, notes.LAYOUT)
    if text is None and node.target is operator.getitem:
        several, at = node.args
        text = (notes.said(several, notes.LAYOUTS) or {at: ""})[at]  # type: ignore[arg-type]
    return text or ""


def _call(node: fx.Node) -> str:
    target = node.target
    name = operator_name(target) if isinstance(target, OpOverload) else str(
        getattr(target, "__name__", target)
    )  # fmt: skip
    shown = [str(each) for each in pytree.tree_leaves(node.args) if isinstance(each, fx.Node)]
    return f"{name}({', '.join(shown)})"


def _shortened(text: str) -> str:
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 4]}...)"


def _reason(said: dict[str, Any]) -> str:
    over = ".".join(said["axes"]) or f"ranks {said['ranks']}"
    where = f" in {said['module']}" if said["module"] else ""
    way = ", backward" if said["direction"] == "backward" else ""
    what = f"{said['kind']} over {over}, {_size(said['bytes'])}"
    return f"<- {what}, {said['operator'].removesuffix('.default')}{where}{way}"


def _module_of(node: fx.Node) -> str:
    path = innermost(node)
    path = ("" if path == _NO_MODULE else path) or notes.said(node, notes.MODULE) or ""
    return re.sub(r"^L\['self'\]\.?", "", path)


def _outputs(output: fx.Node) -> str:
    rows = []
    for each in pytree.tree_leaves(output.args):
        if isinstance(each, fx.Node):
            rows.append((each.name, _layout(each)))
        else:
            rows.append((repr(each), ""))
    return _table(("outputs", "lies as"), rows)


def _summary(calls: Sequence[fx.Node]) -> str:
    collectives = [node for node in calls if is_collective(node)]
    said = [notes.said(node, notes.COLLECTIVE) or {} for node in collectives]
    kinds = Counter(
        each.get("kind") or _call(node).partition("(")[0]
        for node, each in zip(collectives, said, strict=True)
    )
    total = sum(each.get("bytes", 0) for each in said)
    counted = f" ({', '.join(f'{count} {kind}' for kind, count in kinds.items())})" if kinds else ""
    plural = "collective" if len(collectives) == 1 else "collectives"
    text = f"{len(collectives)} {plural}{counted}, {_size(total)} received per call"
    tensors = (node.meta.get("val") for node in collectives)
    sizes = [size for each in tensors if isinstance(each, torch.Tensor) for size in each.shape]
    is_dynamic = any(isinstance(size, torch.SymInt) for size in sizes)
    return text + (" at the sizes of the example" if is_dynamic else "")


# ---- words and columns


def _dtype(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return short_dtype(value.dtype)
    return "" if value is None or isinstance(value, list | tuple) else type(value).__name__


def _here(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"[{', '.join(str(size).replace(' ', '') for size in value.shape)}]"
    if isinstance(value, list | tuple):
        runs = [(each, len(list(run))) for each, run in groupby(map(_here, value))]
        return " ".join(f"{count} x {each}" if count > 1 else each for each, count in runs)
    return "" if value is None else str(value).replace(" ", "")


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("the last unit is as large as needed")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns that are aligned; nothing without rows. The last cell of a row may be longer."""
    rows = list(rows)
    if not rows:
        return ""
    lines = [head, *rows]
    widths = [
        max(len(row[at]) for row in lines if at < len(row) - 1) for at in range(len(head) - 1)
    ]
    widths.append(0)
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)).rstrip()
        for line in lines
    )
