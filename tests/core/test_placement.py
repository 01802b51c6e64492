"""Placements are small values: how a tensor lies along one axis of a mesh."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import placement_types as theirs

from shardwise import (
    DeviceMesh,
    Layout,
    LayoutError,
    Partial,
    Placement,
    Replicate,
    Shard,
    ShardwiseError,
    _StridedShard,
)
from shardwise.core.placement import as_placement

REDUCE_OPS = ["sum", "avg", "max", "min", "product"]

placements = st.one_of(
    st.integers(-9, 9).map(Shard),
    st.just(Replicate()),
    st.sampled_from(REDUCE_OPS).map(Partial),
)


def test_shard_knows_its_dim() -> None:
    assert Shard(1).dim == 1
    assert Shard(1).is_shard() and Shard(1).is_shard(1) and Shard(1).is_shard(dim=1)
    assert not Shard(1).is_shard(0)
    assert not Shard(1).is_replicate() and not Shard(1).is_partial()


def test_replicate_is_nothing_else() -> None:
    assert Replicate().is_replicate()
    assert not Replicate().is_shard() and not Replicate().is_shard(0)
    assert not Replicate().is_partial() and not Replicate().is_partial("sum")


def test_partial_knows_its_reduction() -> None:
    assert Partial("max").reduce_op == "max"
    assert Partial("max").is_partial() and Partial("max").is_partial("max")
    assert not Partial("max").is_partial("sum")
    assert not Partial("max").is_shard() and not Partial("max").is_replicate()


def test_the_default_reduction_is_the_sum() -> None:
    assert Partial() == Partial("sum") == Partial(reduce_op="sum")


@pytest.mark.parametrize("name", REDUCE_OPS)
def test_a_reduction_may_be_named_by_torchs_object(name: str) -> None:
    theirs_op = getattr(dist.ReduceOp, name.upper())
    for op in (theirs_op, dist.ReduceOp(theirs_op)):
        assert Partial(op) == Partial(name) and Partial(op).reduce_op == name
        assert Partial(name).is_partial(op) and not Partial(name).is_partial(dist.ReduceOp.BOR)
    mesh = DeviceMesh.abstract((2, 2), ("dp", "tp"))
    layout = Layout(mesh, (4,), partial={"tp": theirs_op})
    assert layout is Layout(mesh, (4,), partial={"tp": name})
    assert layout is Layout(mesh, (4,)).relaid(partial={1: theirs_op})
    assert layout is Layout.from_placements(mesh, (4,), [Replicate(), Partial(theirs_op)])


@pytest.mark.parametrize("op", [dist.ReduceOp.BAND, dist.ReduceOp.PREMUL_SUM, "SUM", 0, None])
def test_a_reduction_that_is_not_computed_is_refused(op: Any) -> None:
    with pytest.raises(LayoutError, match=r"Partial\(reduce_op\): expected one of sum, avg, max"):
        Partial(op)


def test_a_negative_dim_stays_as_given_until_a_tensor_is_known() -> None:
    assert Shard(-1).dim == -1
    assert Shard(-1) != Shard(1)


def test_equal_placements_are_one_key() -> None:
    different = {Shard(0), Shard(1), Replicate(), *map(Partial, REDUCE_OPS)}
    assert len(different) == 8
    assert different == {Shard(0), Shard(1), Replicate(), *map(Partial, REDUCE_OPS)}
    assert Shard(0) != 0 and Partial("sum") != "sum"


@pytest.mark.parametrize(
    ("placement", "field", "value"),
    [(Shard(0), "dim", 1), (Partial(), "reduce_op", "max"), (Replicate(), "dim", 0)],
    ids=repr,
)
def test_placements_cannot_be_changed(placement: Placement, field: str, value: object) -> None:
    before = repr(placement)
    with pytest.raises((AttributeError, TypeError)):
        setattr(placement, field, value)
    assert repr(placement) == before and not hasattr(placement, "__dict__")


@pytest.mark.parametrize("op", ["mean", "SUM", "", None, 1, []], ids=repr)
def test_an_unknown_reduction_is_refused(op: Any) -> None:
    with pytest.raises(LayoutError) as caught:
        Partial(op)
    assert isinstance(caught.value, ShardwiseError) and isinstance(caught.value, ValueError)
    assert "Partial(reduce_op)" in str(caught.value)
    assert "sum, avg, max, min, product" in str(caught.value)
    assert f"got {op!r} ({type(op).__name__})" in str(caught.value)


@pytest.mark.parametrize("dim", [np.int64(2), np.uint8(2), torch.tensor(2)], ids=repr)
def test_an_int_of_any_type_is_a_dim(dim: Any) -> None:
    assert Shard(dim) == Shard(2) and type(Shard(dim).dim) is int


@pytest.mark.parametrize("dim", ["0", 1.0, None, True, np.True_, (0,), torch.tensor(1.0)], ids=repr)
def test_a_dim_that_is_no_int_is_refused(dim: Any) -> None:
    with pytest.raises(LayoutError) as caught:
        Shard(dim)
    assert isinstance(caught.value, ShardwiseError) and isinstance(caught.value, ValueError)
    assert "Shard(dim): expected an int" in str(caught.value)
    assert f"got {dim!r} ({type(dim).__name__})" in str(caught.value)


def test_repr_is_what_one_writes() -> None:
    shown = [repr(p) for p in (Shard(0), Shard(-1), Replicate(), Partial(), Partial("max"))]
    assert shown == ["Shard(0)", "Shard(-1)", "Replicate()", "Partial()", "Partial('max')"]


@given(placements)
def test_repr_pickle_and_copies_give_the_placement_back(placement: Placement) -> None:
    names = {"Shard": Shard, "Replicate": Replicate, "Partial": Partial}
    again = eval(repr(placement), names)
    for other in (again, pickle.loads(pickle.dumps(placement)), copy.deepcopy(placement)):
        assert other == placement and hash(other) == hash(placement)
        assert type(other) is type(placement)


@given(placements)
def test_a_placement_is_exactly_one_kind(placement: Placement) -> None:
    kinds = [placement.is_shard(), placement.is_replicate(), placement.is_partial()]
    assert kinds.count(True) == 1


# ---- torch's own placements


@given(placements)
def test_a_placement_is_taken_as_it_is(placement: Placement) -> None:
    assert as_placement(placement, "x") is placement


@pytest.mark.parametrize(
    ("placement", "ours"),
    [
        (theirs.Shard(1), Shard(1)),
        (theirs.Shard(-1), Shard(-1)),
        (theirs.Replicate(), Replicate()),
        (theirs.Partial(), Partial()),
        (theirs.Partial("max"), Partial("max")),
        (theirs._StridedShard(1, split_factor=4), _StridedShard(1, split_factor=4)),
    ],
    ids=repr,
)
def test_torchs_placements_are_taken_for_ours_and_equal_them(
    placement: Any, ours: Placement
) -> None:
    assert as_placement(placement, "x") == ours
    assert ours == placement and hash(ours) == hash(placement)
    # torch's _StridedShard asks for its own class, and does not let the other side answer.
    assert placement == ours or isinstance(placement, theirs._StridedShard)


def test_placements_of_other_meaning_differ_from_torchs() -> None:
    assert Shard(0) != theirs.Shard(1)
    assert Shard(0, pieces=2) != theirs.Shard(0)
    assert Shard(0) != theirs._StridedShard(0, split_factor=1)
    assert _StridedShard(0, sf=2) != theirs._StridedShard(0, split_factor=3)
    assert _StridedShard(0, sf=2) != theirs.Shard(0)
    assert Partial("max") != theirs.Partial()
    assert Replicate() != theirs.Shard(0)


# ---- _StridedShard


def test_a_strided_shard_is_a_shard_with_a_place_in_the_order() -> None:
    placement = _StridedShard(0, split_factor=2)
    assert isinstance(placement, Shard) and placement.is_shard() and placement.is_shard(0)
    assert not placement.is_shard(1) and not placement.is_replicate()
    assert placement == _StridedShard(0, sf=2) and hash(placement) == hash(_StridedShard(0, sf=2))
    assert placement not in (Shard(0), _StridedShard(0), _StridedShard(1, sf=2))
    assert Shard(0) not in (placement, _StridedShard(0))
    assert placement.without_order() == Shard(0)
    assert _StridedShard(0, sf=2, pieces=3, unit=4).without_order() == Shard(0, 3, 4)


@pytest.mark.parametrize(
    "placement",
    [_StridedShard(0, sf=2), _StridedShard(-1), _StridedShard(1, sf=6, pieces=(4, 8), unit=2)],
    ids=repr,
)
def test_a_strided_shard_is_copied_pickled_and_read_from_its_text(placement: Shard) -> None:
    assert copy.deepcopy(placement) == placement
    assert pickle.loads(pickle.dumps(placement)) == placement
    assert eval(repr(placement), {"_StridedShard": _StridedShard}) == placement


def test_the_text_of_a_strided_shard_is_torchs() -> None:
    assert repr(_StridedShard(0, sf=2)) == repr(theirs._StridedShard(0, split_factor=2))


@pytest.mark.parametrize("factor", [0, -2, 1.5, "2", None, True, [2]], ids=repr)
def test_a_split_factor_that_is_no_positive_int_is_refused(factor: Any) -> None:
    with pytest.raises(LayoutError, match=r"_StridedShard\(split_factor\): expected one positive"):
        _StridedShard(0, split_factor=factor)


def test_two_different_split_factors_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"split_factor"):
        _StridedShard(0, split_factor=2, sf=3)


class Impostor:
    """It only has the name of a placement."""

    dim = 0


Impostor.__name__ = "Shard"


@pytest.mark.parametrize(
    "placement",
    [
        theirs._MaskPartial(offset_shape=torch.Size([2]), offset_dim=0),
        Placement(),
        Impostor(),
        Shard,
        "tp",
        None,
    ],
    ids=lambda placement: type(placement).__name__,
)
def test_anything_else_is_refused_by_name(placement: Any) -> None:
    with pytest.raises(LayoutError) as caught:
        as_placement(placement, "placements[1]")
    assert "placements[1]: expected Shard, Replicate or Partial, got" in str(caught.value)
    kind = "type" if isinstance(placement, type) else type(placement).__name__
    assert f"({kind})" in str(caught.value)


def test_a_reduction_that_only_torch_knows_is_refused() -> None:
    with pytest.raises(LayoutError, match="expected one of sum, avg, max, min, product"):
        as_placement(theirs.Partial("premul_sum"), "x")
