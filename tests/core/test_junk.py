"""Whatever is given to a constructor, it makes a value or raises one of shardwise's own errors."""

import enum
import math
import pickle
import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import placement_types as theirs

from shardwise import (
    DeviceMesh,
    Layout,
    LayoutError,
    MeshError,
    Partial,
    Replicate,
    Shard,
    ShardwiseError,
    _StridedShard,
    init_device_mesh,
)
from shardwise.core.mesh import unpickled
from shardwise.core.placement import as_placement

MESH = DeviceMesh.abstract((2, 3), ("dp", "tp"))


class Color(enum.IntEnum):
    RED = 1


BIG = 10**5000  # Python refuses to print it

ATOMS: list[Callable[[random.Random], Any]] = [
    lambda draw: None,
    lambda draw: draw.choice([True, False]),
    lambda draw: draw.randint(-3, 9),
    lambda draw: draw.choice([BIG, -BIG, 2**63, 2**63 - 1, -(2**63) - 1, 2**31]),
    lambda draw: draw.choice([0.0, 1.0, 2.5, math.inf, math.nan, 1j]),
    lambda draw: draw.choice(["dp", "tp", "sum", "max", "cpu", "cuda:1", "meta", "[8@dp]", "x"]),
    lambda draw: draw.choice(["", "\ud800", "\0", "größe", "a b", "'", b"dp", bytearray(2)]),
    lambda draw: draw.choice([Shard(0), Shard(-1), Replicate(), Partial("max")]),
    lambda draw: draw.choice([_StridedShard(0, sf=2), Shard(0, 2), Shard(1, (2, 4), 2)]),
    lambda draw: draw.choice([MESH, Shard, Replicate, Layout, int, type, len, ..., math]),
    lambda draw: draw.choice([Color.RED, np.int64(2), np.float32(1), np.bool_(True), torch.int8]),
    lambda draw: draw.choice([object(), slice(0, 2), range(3), range(0, 4, 2), {1, 2}, set()]),
    lambda draw: draw.choice([torch.ones(2), torch.tensor(1), torch.tensor([[0, 1], [2, 3]])]),
    lambda draw: torch.zeros(draw.choice([(), (2,), (2, 2)]), dtype=torch.int64, device="meta"),
    lambda draw: draw.choice([np.arange(4).reshape(2, 2), np.array(["a", "b"]), np.zeros(0)]),
    lambda draw: draw.choice([np.array([None, 1]), np.array(3), np.ones(2), iter([0, 1])]),
    lambda draw: torch.eye(2).to_sparse(),
    lambda draw: theirs.Shard(draw.choice([0, 7])),
    lambda draw: theirs._StridedShard(0, split_factor=draw.choice([0, -1, 2, 3, 1000])),
]


def junk(draw: random.Random, depth: int = 2) -> Any:
    """Return anything: a value that some argument may have, or one that none has."""
    kind = draw.choice(["list", "tuple", "dict", "atom", "atom", "atom"]) if depth else "atom"
    if kind == "atom":
        return draw.choice(ATOMS)(draw)
    items = [junk(draw, depth - 1) for _ in range(draw.randint(0, 3))]
    if kind == "dict":
        keys = draw.sample([0, 1, -1, "dp", "tp", None, BIG, (1,)], len(items))
        return dict(zip(keys, items, strict=True))
    return items if kind == "list" else tuple(items)


def survives(call: Callable[[], Any]) -> None:
    """Check that a call returns, or raises an error of shardwise."""
    with suppress(ShardwiseError):
        repr(call())


CALLS: dict[str, tuple[int, Callable[..., Any]]] = {
    "Shard(dim)": (1, Shard),
    "Shard(0, pieces, unit)": (2, lambda pieces, unit: Shard(0, pieces, unit)),
    "Shard(pieces).cut": (2, lambda pieces, unit: Shard(0, pieces, unit).cut(12, "x")),
    "_StridedShard": (2, lambda dim, factor: _StridedShard(dim, split_factor=factor)),
    "Partial": (1, Partial),
    "is_partial": (1, lambda op: Partial().is_partial(op)),
    "is_shard": (1, lambda dim: Shard(0).is_shard(dim)),
    "as_placement": (1, lambda value: as_placement(value, "x")),
    "Layout(mesh)": (1, lambda mesh: Layout(mesh, (8,))),
    "Layout(shape)": (1, lambda shape: Layout(MESH, shape)),
    "Layout(shard_order)": (1, lambda order: Layout(MESH, (8, 6), order)),
    "Layout(shard_order of a dim)": (1, lambda axes: Layout(MESH, (8, 6), {0: axes})),
    "Layout(partial)": (1, lambda partial: Layout(MESH, (8,), {}, partial)),
    "Layout(partial of an axis)": (1, lambda op: Layout(MESH, (8,), {}, {"dp": op})),
    "Layout(cuts)": (1, lambda cuts: Layout(MESH, (8, 6), {0: ["dp"]}, None, cuts)),
    "Layout(cuts of a dim)": (1, lambda cut: Layout(MESH, (8, 6), {0: ["dp"]}, None, {0: cut})),
    "from_placements(placements)": (1, lambda p: Layout.from_placements(MESH, (8, 6), p)),
    "from_placements(each)": (2, lambda p, q: Layout.from_placements(MESH, (8, 6), [p, q])),
    "from_placements(shape)": (1, lambda s: Layout.from_placements(MESH, s, [Shard(0)] * 2)),
    "from_placements(shard_order)": (
        1,
        lambda order: Layout.from_placements(MESH, (8, 6), [Shard(0), Shard(0)], order),
    ),
    "parse(text)": (1, lambda text: Layout.parse(text, MESH)),
    "parse(mesh)": (1, lambda mesh: Layout.parse("[8]", mesh)),
    "box(coordinate)": (1, lambda place: Layout(MESH, (8,), {0: ["dp"]}).box(place)),
    "DeviceMesh(device_type)": (1, lambda device: DeviceMesh(device, [0])),
    "DeviceMesh(mesh)": (1, lambda ranks: DeviceMesh("cpu", ranks)),
    "DeviceMesh(names)": (1, lambda names: DeviceMesh("cpu", [[0]], mesh_dim_names=names)),
    "DeviceMesh.abstract(shape)": (1, DeviceMesh.abstract),
    "DeviceMesh.abstract(names)": (1, lambda names: DeviceMesh.abstract((2, 2), names)),
    "DeviceMesh.abstract(device)": (1, lambda kind: DeviceMesh.abstract((2,), ("a",), kind)),
    "init_device_mesh": (2, lambda shape, names: init_device_mesh("cpu", shape, names)),
    "unpickled": (3, lambda ranks, names, kind: unpickled("cpu", ranks, names, kind)),
    "mesh.axis": (1, MESH.axis),
    "mesh[names]": (1, lambda names: MESH[names]),
    "mesh.size": (1, MESH.size),
    "mesh.flatten": (2, lambda axis, name: MESH.flatten(axis, name=name)),
    "mesh.unflatten": (3, MESH.unflatten),
    "mesh.has": (1, MESH.has),
    "mesh.rank_at": (1, MESH.rank_at),
    "mesh.ranks_along": (2, MESH.ranks_along),
    "mesh.coordinate_of": (1, MESH.coordinate_of),
}


@pytest.mark.parametrize("name", CALLS)
def test_junk_gives_a_value_or_an_error_of_shardwise(name: str) -> None:
    count, call = CALLS[name]
    for seed in range(600):
        draw = random.Random(seed)
        values = [junk(draw) for _ in range(count)]
        survives(partial(call, *values))


@settings(max_examples=400, deadline=None)
@given(st.text(alphabet="[]()@.,+/'\"\\ 0123456789dptsumx\n", max_size=30))
def test_any_text_is_a_layout_or_refused(text: str) -> None:
    survives(lambda: Layout.parse(text, MESH))
    survives(lambda: Layout.parse(f"[8@{text}]", MESH))
    survives(lambda: Layout.parse(f"[{text}]", MESH))


@pytest.mark.parametrize("text", [None, 3, b"[8]", ["[8]"], MESH], ids=repr)
def test_a_layout_is_not_parsed_from_anything_but_text(text: Any) -> None:
    with pytest.raises(LayoutError, match=r"text: expected such as '\[8@dp"):
        Layout.parse(text, MESH)


@pytest.mark.parametrize("digits", [20, 5000])
def test_a_size_of_too_many_digits_is_refused(digits: int) -> None:
    text = "9" * digits
    for wrong in (f"[{text}]", f"[({text}/2)@dp]", f"[8@{text}]", f"[8] +sum@{text}"):
        with pytest.raises(ShardwiseError):
            Layout.parse(wrong, MESH)
    with pytest.raises(LayoutError, match="shape: expected sizes"):
        Layout(MESH, (10**digits,))
    with pytest.raises(LayoutError, match="shape: expected sizes"):
        Layout(MESH, (2**40, 2**40))
    assert Layout(MESH, (2**40, 2**40, 0)).numel == 0


@pytest.mark.parametrize("ranks", [[0, 0], [[0, 1], [1, 2]], [], [0.5], None, [-1]], ids=repr)
def test_a_pickled_mesh_of_impossible_ranks_is_refused(ranks: Any) -> None:
    with pytest.raises(MeshError, match="mesh: expected"):
        unpickled("cpu", ranks, None, True)
    shape = (2,)
    good = pickle.dumps(DeviceMesh.abstract(shape), protocol=0)
    assert pickle.loads(good) is DeviceMesh.abstract(shape)
