"""The notes that the library keeps on a tensor: one object, absent on ordinary tensors."""

from __future__ import annotations

import copy
import io

import torch

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.core.tensor_state import TensorState, ensure_state, state_of, user_attributes


def test_ordinary_tensors_have_no_state() -> None:
    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        w = torch.nn.Parameter(sw.distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]))
        y = (x @ w).relu()
        y.sum().backward()
        x.add_(1)
        for each in (x, w, y, y.sum(), x.detach(), x.to_local()):
            assert state_of(each) is None

    sw.simulate(run, 2)


def test_a_pending_sum_keeps_its_reduced_value_until_it_changes() -> None:
    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.DTensor.from_local(torch.ones(2), mesh, [Partial()])
        x.relu()
        state = state_of(x)
        assert state is not None and state.reduced is not None and state.moves
        x.data = torch.zeros(2)
        assert state.reduced is None and state.moves is None

    sw.simulate(run, 2)


def test_copies_and_pickles_of_a_plain_tensor_have_no_state() -> None:
    x = torch.ones(2)
    ensure_state(x).alias_of = torch.zeros(3)
    assert state_of(copy.deepcopy(x)) is None
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded.tolist() == [1, 1] and state_of(loaded) is None
    assert ensure_state(loaded).alias_of is None  # it may get a state of its own


def test_a_new_state_has_no_notes() -> None:
    state = TensorState()
    assert not any(getattr(state, field) for field in TensorState.__slots__)


def test_a_tensor_that_replaces_another_takes_over_attributes_but_no_state() -> None:
    x = torch.ones(2)
    x.learning_rate = 0.1
    ensure_state(x).is_gradient = True
    assert user_attributes(x) == {"learning_rate": 0.1}
