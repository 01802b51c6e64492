"""Errors: what they derive from, and what survives pickling."""

import copy
import pickle

import pytest

import shardwise as sw


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
