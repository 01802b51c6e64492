"""Errors: what they derive from, and what survives pickling."""

import copy
import pickle

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.core.errors import also


@pytest.mark.parametrize(
    "kind", [sw.MeshError, sw.LayoutError, sw.CollectiveError, sw.MismatchError, sw.LaunchError]
)
def test_every_error_is_a_shardwise_error(kind):
    assert issubclass(kind, sw.ShardwiseError)


def test_a_message_names_the_rank_it_was_raised_on_once_also_after_pickling_elsewhere():
    def body():
        everybody = sw.communicator(sw.init_device_mesh("cpu", (2,)))
        received = everybody.gather_objects(sw.MeshError("no such axis"))
        return [str(error) for error in received]

    expected = ["no such axis [rank 0 of 2]", "no such axis [rank 1 of 2]"]
    assert sw.simulate(body, 2) == [expected, expected]


def test_a_rank_error_keeps_its_rank():
    error = sw.RankError("rank 3 raised KeyError", 3)
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is sw.RankError
        assert (str(other), other.rank) == ("rank 3 raised KeyError", 3)


@pytest.mark.parametrize(
    "builtin", [TypeError, KeyError, AttributeError, IndexError, AssertionError]
)
def test_an_error_can_be_of_one_of_pythons_types_too(builtin):
    kind = also(sw.LayoutError, builtin)
    assert issubclass(kind, sw.LayoutError) and issubclass(kind, builtin)
    assert (
        also(sw.LayoutError, builtin) is kind and also(sw.LayoutError, ValueError) is sw.LayoutError
    )
    several = also(sw.LayoutError, builtin, NotImplementedError)
    assert issubclass(several, builtin) and issubclass(several, NotImplementedError)
    assert type(pickle.loads(pickle.dumps(several("no")))) is several
    error = kind("placements: expected a list")
    for other in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is kind and str(other) == "placements: expected a list"
    with pytest.raises(builtin, match="expected a list"):
        raise error


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda mesh: sw.Shard("rows"), TypeError),
        (lambda mesh: mesh["unknown"], KeyError),
        (lambda mesh: mesh.size(5), IndexError),
        (lambda mesh: mesh.get_group, None),
        (lambda mesh: sw.distribute_tensor(torch.ones(4), mesh, 3), TypeError),
        (lambda mesh: sw.zeros(4, device_mesh=mesh, placements=[sw.Shard(1)] * 2), IndexError),
        (lambda mesh: sw.distribute_tensor([1.0], mesh, [sw.Shard(0)]), AttributeError),
        (lambda mesh: sw.zeros(4, layout=torch.sparse_coo, device_mesh=mesh), AssertionError),
        (lambda mesh: sw.zeros("a", device_mesh=mesh), TypeError),
        (lambda mesh: sw.DTensor.from_local(sw.zeros(4, device_mesh=mesh), mesh), RuntimeError),
        (lambda mesh: sw.distribute_module(nn.Linear(1, 1), mesh, input_fn=print), None),
        (lambda mesh: sw.distribute_module(nn.Linear(1, 1), mesh, input_fn=len), ValueError),
    ],
)
def test_errors_are_of_torchs_types(call, kind):
    mesh = sw.DeviceMesh.abstract((2, 2), ("dp", "tp"))
    if kind is None:
        call(mesh)
        return
    with pytest.raises(kind) as caught:
        call(mesh)
    assert isinstance(caught.value, sw.ShardwiseError)
