"""print_sharding: a rank's program as text, with layouts, collectives, their causes and sizes."""

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

from shardwise.core.errors import ExportError
from shardwise.core.layout_input import short_dtype
from shardwise.export.annotations import (
    COLLECTIVE,
    INPUTS,
    LAYOUT,
    LAYOUTS,
    MODULE,
    NAME,
    get_annotation,
    module_path_of,
)
from shardwise.export.operators import is_collective
from shardwise.torch_internals import OpOverload, operator_name, pytree

_MAX_CALL_WIDTH = 36
"""The most characters that are printed of an operator and its arguments."""

_NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"
"""The path that torch writes at nodes that no module made."""


def print_sharding(program: Any, file: TextIO | None = None) -> None:
    """Print a rank's program: parameters, nodes with their layouts, collectives and their causes.

    Arguments:
        program: a program that `shard_program` or `tensor_parallel_transformation` made, also after
            it was saved and loaded; or a `ShardedStep`.
        file: where to print; standard output by default.

    Example:
        >>> print_sharding(shard_program(program, mesh, plan))
    """
    print(sharding_text(program), file=file)


def sharding_text(program: Any) -> str:
    """Return the text that `print_sharding` prints.

    In a layout, `16@tp` is a dim of 16 that axis `tp` splits, and `+sum@tp` says that each rank has
    a contribution to a sum. Bytes are the least that this rank receives from others.
    """
    module = getattr(program, "graph_module", program)
    if not isinstance(module, fx.GraphModule):
        raise ExportError(
            "program: expected one of shard_program, tensor_parallel_transformation or shard_step, "
            f"got {type(program).__name__}"
        )
    nodes = list(module.graph.nodes)
    calls = [node for node in nodes if node.op == "call_function"]
    state, given = _find_inputs(
        program, [node for node in nodes if node.op == "placeholder"], calls
    )
    columns = "dtype", "layout", "local shape"
    tables = [
        _table(("parameters, buffers, constants", *columns), _group_rows(state)),
        _table(("inputs", *columns), _group_rows(given)),
        _table(
            ("nodes", "operator", "dtype", "local shape", "layout", "module"), map(_call_row, calls)
        ),
        _outputs_table(module.graph.output_node()),
        _summary(calls),
    ]
    return "\n\n".join(filter(None, tables))


# ---- inputs


@dataclass(frozen=True)
class _InputRow:
    name: str
    dtype: str
    layout: str
    local_shape: str


def _find_inputs(
    program: Any, placeholders: Sequence[fx.Node], calls: Sequence[fx.Node]
) -> tuple[list[_InputRow], list[_InputRow]]:
    """Return the rows of the tensors that the program holds, and of those that users pass."""
    saved: dict[str, str]
    saved = next((found for node in calls if (found := get_annotation(node, INPUTS))), {})
    state_names: dict[str, str] = {}
    if isinstance(program, ExportedProgram):
        specs = program.graph_signature.input_specs
        pairs = zip(placeholders, specs, strict=True)
        state_names = {node.name: spec.target for node, spec in pairs if spec.target is not None}
    state: list[_InputRow] = []
    given: list[_InputRow] = []
    for node in placeholders:
        value = node.meta.get("val")
        name = state_names.get(node.name) or get_annotation(node, NAME) or node.name
        layout = get_annotation(node, LAYOUT) or saved.get(node.name, "")
        row = _InputRow(name, _format_dtype(value), layout, _format_shape(value))
        (state if node.name in state_names else given).append(row)
    return state, given


def _group_rows(inputs: Iterable[_InputRow]) -> Iterator[tuple[str, ...]]:
    """Yield one row for inputs that differ only in the numbers in their names, as layers do."""
    groups: dict[Any, list[str]] = {}
    for each in inputs:
        key = re.sub(r"\b\d+\b", "*", each.name), each.dtype, each.layout, each.local_shape
        groups.setdefault(key, []).append(each.name)
    for (pattern, *rest), names in groups.items():
        yield (names[0] if len(names) == 1 else f"{pattern} (x{len(names)})", *rest)


# ---- nodes


def _call_row(node: fx.Node) -> tuple[str, ...]:
    value = node.meta.get("val")
    row = node.name, _shorten(_format_call(node)), _format_dtype(value), _format_shape(value)
    facts = get_annotation(node, COLLECTIVE)
    if is_collective(node) and facts:
        return *row, _format_collective(facts)
    return *row, _layout_text(node), _module_of(node)


def _layout_text(node: fx.Node) -> str:
    text: str | None = get_annotation(node, LAYOUT)
    if text is None and node.target is operator.getitem:
        several, at = node.args
        text = (get_annotation(several, LAYOUTS) or {at: ""})[at]  # type: ignore[arg-type]
    return text or ""


def _format_call(node: fx.Node) -> str:
    target = node.target
    name = operator_name(target) if isinstance(target, OpOverload) else str(
        getattr(target, "__name__", target)
    )  # fmt: skip
    inputs = [str(each) for each in pytree.tree_leaves(node.args) if isinstance(each, fx.Node)]
    return f"{name}({', '.join(inputs)})"


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_CALL_WIDTH else f"{text[: _MAX_CALL_WIDTH - 4]}...)"


def _format_collective(facts: dict[str, Any]) -> str:
    """Format what a collective does and its cause."""
    over = ".".join(facts["axes"]) or f"ranks {facts['ranks']}"
    where = f" in {facts['module']}" if facts["module"] else ""
    direction = ", backward" if facts["direction"] == "backward" else ""
    what = f"{facts['kind']} over {over}, {_format_bytes(facts['bytes'])}"
    return f"<- {what}, {facts['operator'].removesuffix('.default')}{where}{direction}"


def _module_of(node: fx.Node) -> str:
    path = module_path_of(node)
    path = ("" if path == _NO_MODULE else path) or get_annotation(node, MODULE) or ""
    return re.sub(r"^L\['self'\]\.?", "", path)


def _outputs_table(output: fx.Node) -> str:
    rows = []
    for each in pytree.tree_leaves(output.args):
        if isinstance(each, fx.Node):
            rows.append((each.name, _layout_text(each)))
        else:
            rows.append((repr(each), ""))
    return _table(("outputs", "layout"), rows)


def _summary(calls: Sequence[fx.Node]) -> str:
    """Return the last line: the number of collectives by kind, and their bytes."""
    collectives = [node for node in calls if is_collective(node)]
    facts = [get_annotation(node, COLLECTIVE) or {} for node in collectives]
    kinds = Counter(
        each.get("kind") or _format_call(node).partition("(")[0]
        for node, each in zip(collectives, facts, strict=True)
    )
    total = sum(each.get("bytes", 0) for each in facts)
    counted = f" ({', '.join(f'{count} {kind}' for kind, count in kinds.items())})" if kinds else ""
    plural = "collective" if len(collectives) == 1 else "collectives"
    text = f"{len(collectives)} {plural}{counted}, {_format_bytes(total)} received per call"
    tensors = (node.meta.get("val") for node in collectives)
    sizes = [size for each in tensors if isinstance(each, torch.Tensor) for size in each.shape]
    is_dynamic = any(isinstance(size, torch.SymInt) for size in sizes)
    return text + (" at the sizes of the example" if is_dynamic else "")


# ---- cells and columns


def _format_dtype(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return short_dtype(value.dtype)
    return "" if value is None or isinstance(value, list | tuple) else type(value).__name__


def _format_shape(value: Any) -> str:
    """Format the shape of a tensor, the shapes of several, or a number."""
    if isinstance(value, torch.Tensor):
        return f"[{', '.join(str(size).replace(' ', '') for size in value.shape)}]"
    if isinstance(value, list | tuple):
        runs = [(each, len(list(run))) for each, run in groupby(map(_format_shape, value))]
        return " ".join(f"{count} x {each}" if count > 1 else each for each, count in runs)
    return "" if value is None else str(value).replace(" ", "")


def _format_bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("the last unit is as large as needed")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format rows in aligned columns; "" without rows. The last cell of a row may be longer."""
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
