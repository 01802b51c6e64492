"""Ways to get from one layout to another on one mesh, good ones only.

Each is a list of steps in the normal order: slice, reduce, exchange, gather, zero-fill. The planner
scores them. Without pending reductions the direct exchange meets the lower bound on bytes; a chain
of one-axis moves (`search`) may take fewer messages.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.errors import LayoutError
from shardwise.layout import Layout
from shardwise.redistribute import step as steps
from shardwise.redistribute.measure import busiest, overlap, received, split_axes, volume
from shardwise.redistribute.step import Step, replicated_axes, without


def paths(source: Layout, target: Layout) -> Iterator[list[Step]]:
    """All candidates from `source` to `target`, which lie on one mesh."""
    scaled = rescaled(source, target)
    start = [] if scaled is source else [steps.local("scale", source, scaled)]
    reduced = ending_axes(scaled, target)
    if not reduced and _only_zero_fill(scaled, target):
        yield [*start, steps.local("zero_fill", scaled, target)]
        return
    if new_axes(scaled, target):
        yield [*start, steps.reduce_exchange(scaled, target, pending_op(scaled, reduced))]
    for middle in _before_zero_fill(scaled, target):
        end = [] if middle is target else [steps.local("zero_fill", middle, target)]
        for path in _reductions(scaled, middle, reduced):
            yield [*start, *path, *end]


def cross_mesh_paths(source: Layout, target: Layout) -> Iterator[list[Step]]:
    """Candidates between two meshes: reduce on the first, exchange, zero-fill on the second."""
    _check_commute(target)
    bare = target.relaid(partial={})
    end = [] if bare is target else [steps.local("zero_fill", bare, target)]
    for start in _complete(source):
        here = start[-1].target if start else source
        yield [*start, steps.exchange(here, bare), *end]


def _complete(source: Layout) -> Iterator[list[Step]]:
    """Ways to be done with the pending reductions of a layout."""
    bare = source.relaid(partial={})
    yield from paths(source, bare)
    if source.partial and source.ndim:
        dim = _longest_dim(source)
        order = list(source.shard_order)
        order[dim] = (*order[dim], *(axis for axis, _ in source.partial))
        yield from paths(source, source.relaid(order, {}))


def rescaled(source: Layout, target: Layout) -> Layout:
    """`source` with pending averages made sums, and the reverse, where the target has it so."""
    partial: dict[int, str] = {}
    wanted = dict(target.partial)
    for axis, op in source.partial:
        new = wanted.get(axis, op)
        if new != op and {op, new} != {"sum", "avg"}:
            raise LayoutError(
                f"redistribute: a pending {op} cannot become a pending {new} on axis "
                f"{source.mesh.axis_name(axis)}; go by Replicate() or Shard(dim) first "
                f"({source!r} -> {target!r})"
            )
        partial[axis] = new
    ending = {op for axis, op in source.partial if axis not in wanted}
    if ending == {"sum", "avg"}:  # a mean over some axes and a sum over others: sum both
        partial.update({axis: "sum" for axis, op in source.partial if axis not in wanted})
    if ending:
        _check_commute(source)
    if new_axes(source, target):
        _check_commute(target)
    return source.relaid(partial=partial)


def _check_commute(layout: Layout) -> None:
    """Refuse pending reductions of different kinds: what they give depends on which comes first."""
    ops = {op for _, op in layout.partial}
    if len({"sum" if op == "avg" else op for op in ops}) > 1:
        raise LayoutError(
            f"redistribute: pending reductions of different kinds ({', '.join(sorted(ops))}) do "
            f"not commute, so {layout!r} has no value"
        )


def ending_axes(source: Layout, target: Layout) -> tuple[int, ...]:
    """The axes to reduce over."""
    kept = {axis for axis, _ in target.partial}
    return tuple(axis for axis, _ in source.partial if axis not in kept)


def new_axes(source: Layout, target: Layout) -> list[int]:
    """The axes along which a reduction is pending in the target only."""
    already = {axis for axis, _ in source.partial}
    return [axis for axis, _ in target.partial if axis not in already]


def pending_op(source: Layout, axes: tuple[int, ...]) -> str:
    """The reduction over these axes."""
    return dict(source.partial)[axes[0]] if axes else "sum"


def _only_zero_fill(source: Layout, target: Layout) -> bool:
    """Whether ranks along the new pending axes hold together what each of them is to add up to."""
    new = new_axes(source, target)
    if not new:
        return False
    return busiest(volume(target) - overlap(source, target, frozenset(new))) == 0


def _before_zero_fill(source: Layout, target: Layout) -> Iterator[Layout]:
    """Layouts from which the target is only a zero-fill away.

    Along an axis whose contributions the target adds up, each rank may hold a piece of its own and
    zeros elsewhere, or the first rank may hold everything.
    """
    new = new_axes(source, target)
    if not new:
        yield target
        return
    partial = without(target, tuple(new))
    order = list(target.shard_order)
    yield target.relaid(order, partial)
    for dim in range(target.ndim):
        spread = [axis for axis in new if axis in source.shard_order[dim]]
        order[dim] = (*order[dim], *spread)
    yield target.relaid(order, partial)
    rest = tuple(axis for axis in new if axis not in split_axes(source))
    if target.ndim and rest:
        dim = _longest_dim(target)
        order[dim] = (*order[dim], *rest)
        yield target.relaid(order, partial)


def _reductions(source: Layout, target: Layout, axes: tuple[int, ...]) -> Iterator[list[Step]]:
    """Candidates to a target without new pending reductions: reduce over `axes`, and move."""
    if not axes:
        yield from _moves(source, target)
        return
    op = pending_op(source, axes)
    early = _sliced_early(source, target)
    # Cut inside axes that are outer in the target, shards may lie where nobody wants them.
    starts = [early] if early is source or _is_on_the_way(early, target) else [early, source]
    for start in starts:
        first = [] if start is source else [steps.local("slice", source, start)]
        for reduction in _named_reductions(start, target, axes, op):
            for path in _moves(reduction[-1].target, target):
                yield [*first, *reduction, *path]
        yield [*first, steps.reduce_exchange(start, target, op)]
        if (spread := _spread_over_replicas(target)) is not target:
            scattered = steps.reduce_exchange(start, spread, op)
            for path in _moves(spread, target):
                yield [*first, scattered, *path]


def _moves(source: Layout, target: Layout) -> Iterator[list[Step]]:
    """Candidates without reductions."""
    if source is target:
        yield []
        return
    if busiest(received(source, target)) == 0:
        yield [steps.local("slice", source, target)]
        return
    yield _gather_of_one_dim(source, target) or [steps.exchange(source, target)]


def _gather_of_one_dim(source: Layout, target: Layout) -> list[Step] | None:
    """The all-gather that does it, if one does: innermost axes of one dim are given up."""
    changed = [
        dim for dim in range(source.ndim) if source.shard_order[dim] != target.shard_order[dim]
    ]
    if len(changed) != 1:
        return None
    before, after = source.shard_order[changed[0]], target.shard_order[changed[0]]
    if before[: len(after)] != after:
        return None
    return [steps.all_gather(source, changed[0], len(before) - len(after))]


def _sliced_early(source: Layout, target: Layout) -> Layout:
    """`source` cut along the axes where it is whole and the target is not: less to reduce."""
    whole = set(replicated_axes(source))
    order = [
        (*before, *(axis for axis in after if axis in whole))
        for before, after in zip(source.shard_order, target.shard_order, strict=True)
    ]
    return source.relaid(order)


def _is_on_the_way(early: Layout, target: Layout) -> bool:
    """Whether every shard of the target lies within one of `early`, dim by dim."""
    orders = zip(early.shard_order, target.shard_order, strict=True)
    return all(after[: len(before)] == before for before, after in orders)


def _named_reductions(
    source: Layout, target: Layout, axes: tuple[int, ...], op: str
) -> Iterator[list[Step]]:
    """All-reduce; and reduce-scatters to where the target wants the pieces, or anywhere."""
    yield [steps.all_reduce(source, axes, op)]
    if not source.ndim:
        return
    longest = _longest_dim(source)
    wanted = {
        axis: dim for dim, split in enumerate(target.shard_order) for axis in split if axis in axes
    }
    choices = [{axis: wanted.get(axis, longest) for axis in axes}, dict.fromkeys(axes, longest)]
    for dims in choices[: 1 if choices[0] == choices[1] else 2]:
        path: list[Step] = []
        here = source
        for dim in dict.fromkeys(dims.values()):
            # In the order of the target, where it has one.
            together = [axis for axis in target.shard_order[dim] if dims.get(axis) == dim]
            together += [axis for axis in axes if dims[axis] == dim and axis not in together]
            path.append(steps.reduce_scatter(here, tuple(together), dim, op))
            here = path[-1].target
        yield path


def _spread_over_replicas(target: Layout) -> Layout:
    """The target with its longest dim split further, so that no two ranks hold the same."""
    replicas = tuple(replicated_axes(target))
    if not target.ndim or not replicas:
        return target
    dim = _longest_dim(target)
    order = list(target.shard_order)
    order[dim] = (*order[dim], *replicas)
    return target.relaid(order)


def _longest_dim(layout: Layout) -> int:
    """The dim whose shards are longest; the first of equals, whose pieces are contiguous."""
    lengths = layout.box([0] * layout.mesh.ndim).shape
    return max(range(layout.ndim), key=lambda dim: (lengths[dim], -dim))
