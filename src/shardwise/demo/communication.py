"""What a step communicated, and why: the events of one rank, put together by cause."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from rich.table import Table

from shardwise import Cause, Event

_SPLIT = {
    "tok_embeddings": "vocabulary",
    "output": "vocabulary",
    "attention": "heads",
    "feed_forward": "hidden features",
}
"""What tensor parallelism splits in each part of the model."""

_DATA_PARALLEL = {
    ("unshard", "all_gather"): "parameters, put together",
    ("reduce_gradients", "reduce_scatter"): "gradients, mean over the batch, a piece each",
    ("reduce_gradients", "all_reduce"): "gradients, mean over the replicas' parts of the batch",
}
"""What the collectives of `fully_shard` are for."""


@dataclass
class Row:
    """Collectives of one kind, for one reason."""

    direction: str
    kind: str
    axes: tuple[str, ...]
    reason: str
    count: int = 0
    bytes: int = 0
    modules: dict[str, None] = field(default_factory=dict)
    """Where, in the order they came; a dict as a set that keeps it."""

    @property
    def why(self) -> str:
        """Such as `layers.*.attention: sum over the heads`."""
        by_parent: dict[str, list[str]] = {}
        for module in self.modules:
            parent, _, name = module.rpartition(".")
            by_parent.setdefault(f"{parent}." if parent else "", []).append(name)
        places = [
            parent + (f"{{{','.join(sorted(names))}}}" if len(names) > 1 else names[0])
            for parent, names in by_parent.items()
        ]
        return f"{', '.join(places)}: {self.reason}"


def rows(events: Iterable[Event]) -> list[Row]:
    """Events of the same direction, kind, axes, reason and part of the model make a row."""
    found: dict[object, Row] = {}
    for event in events:
        if len(event.ranks) == 1:
            continue  # along an axis of one rank
        cause = event.cause
        module = re.sub(r"\.\d+\.", ".*.", cause.module)
        reason = _reason(cause, event.kind, event.axes)
        kind = event.kind.replace("_", "-")
        key = cause.direction, kind, event.axes, reason, _part(module)
        row = found.setdefault(key, Row(cause.direction, kind, event.axes, reason))
        row.count += 1
        row.bytes += event.bytes
        for each in module.split(", "):  # what is gathered together is for several
            row.modules[each or cause.operator] = None
    return sorted(found.values(), key=lambda row: row.direction == "backward")


def _part(module: str) -> str | None:
    """The part of the model that a module belongs to."""
    return next((part for part in module.split(".") if part in _SPLIT), None)


def _reason(cause: Cause, kind: str, axes: tuple[str, ...]) -> str:
    split = _SPLIT.get(_part(cause.module) or "")
    if (cause.operator, kind) in _DATA_PARALLEL:
        return _DATA_PARALLEL[cause.operator, kind]
    if cause.operator == "item":
        return "the loss, to be shown"
    if cause.operator == "cross_entropy":
        if "dp" in axes:
            return "the mean is over all tokens of the batch"
        return "softmax over the split vocabulary"
    if cause.direction == "backward" and ("dp" in axes or cause.operator == "rms_norm"):
        over = [name for axis, name in (("dp", "batch"), ("tp", "sequence")) if axis in axes]
        return f"weights' gradients, sum over the {' and the '.join(over)}"
    if cause.direction == "forward" and kind in ("all_reduce", "reduce_scatter") and split:
        parts = ", a part of the sequence each" if kind == "reduce_scatter" else ""
        return f"sum over the {split}{parts}"
    if cause.direction == "forward" and kind == "all_gather":
        return "the sequence, put together"
    if cause.direction == "backward" and kind in ("all_reduce", "reduce_scatter") and split:
        return f"gradient of what came in, sum over the {split}"
    if cause.direction == "backward" and kind == "all_gather":
        return "gradient of what went out, put together"
    return f"for {cause.operator or 'itself'}"


def table(events: Iterable[Event]) -> Table:
    """The rows, to be shown."""
    shown = Table(title="What one step communicates, as rank 0 sees it")
    shown.add_column("collective")
    shown.add_column("axes")
    shown.add_column("times", justify="right")
    shown.add_column("received", justify="right")
    shown.add_column("where: why", overflow="fold")
    found = rows(events)
    for direction in ("forward", "backward"):
        shown.add_row(f"[bold]{direction}[/]")
        for row in found:
            if row.direction == direction:
                shown.add_row(*_totals(row.kind, ".".join(row.axes), [row]), row.why)
        shown.add_section()
    for kind in sorted({row.kind for row in found}):
        shown.add_row(*_totals(kind, "", [row for row in found if row.kind == kind]))
    shown.add_row(*_totals("[bold]in all[/]", "", found))
    return shown


def _totals(kind: str, axes: str, added: list[Row]) -> tuple[str, ...]:
    count, received = sum(row.count for row in added), sum(row.bytes for row in added)
    return kind, axes, str(count), bytes_shown(received)


def bytes_shown(count: int) -> str:
    """Such as `1.5 MB`."""
    for unit, size in (("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"
