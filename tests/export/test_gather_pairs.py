"""Gathers that the next operator would undo are not in a program, on any rank."""

import pytest
import torch
from support.export_ranks import Routed, collectives
from support.exported_models import MLP, MLP_PLAN
from torch import nn

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.export import shard_program, tensor_parallel_transformation
from shardwise.parallel import Activations, ColwiseParallel

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.export's own

WHOLE = {"tp": Replicate()}
GATHERED = {"up": Activations(outputs=WHOLE)}
SPLIT = {"down": Activations(inputs={"tp": Shard(2)})}


class Uses(nn.Module):
    """The result of `up` is used by `down`, after a pointwise step, and in another way."""

    def __init__(self, use):
        super().__init__()
        self.up, self.down, self.use = nn.Linear(7, 13), nn.Linear(13, 7), use

    def forward(self, x):
        y = self.up(x)
        return self.down((y.relu() * 2 + y).to(torch.float32)), self.use(y)


def counted(model, plan, shape=(2,), **placements):
    """Check the results of the ranks' programs; return their collectives."""
    x = torch.randn(3, 5, 7)
    exported = torch.export.export(model, (x,))
    with torch.no_grad():
        want = model(x)

    def rank():
        mesh = sw.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])
        made = shard_program(exported, mesh, plan, **placements)
        with Routed(mesh), torch.no_grad():
            return made.module()(x), collectives(made)

    found = sw.simulate(rank, torch.Size(shape).numel())
    for got, _ in found:
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert all(counts == found[0][1] for _, counts in found)
    return found[0][1]


@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)])
@pytest.mark.parametrize("plan", [GATHERED, GATHERED | SPLIT])
def test_what_one_module_gathers_and_the_next_splits_is_not_gathered(shape, plan):
    assert counted(MLP(7, 13), MLP_PLAN | plan, shape) == {"all_reduce": 1}


def test_what_a_module_gathers_where_it_enters_only_to_split_it_is_not_gathered():
    plan = MLP_PLAN | {"down": Activations(inputs=WHOLE)}
    assert counted(MLP(7, 13), plan) == {"all_reduce": 1}


def test_styles_that_gather_between_two_layers_do_not():
    exported = torch.export.export(MLP(), (torch.randn(2, 8),))
    styles = {"up": ColwiseParallel(output_layouts=Replicate()), "down": "rowwise"}
    for rank in range(4):
        made = tensor_parallel_transformation(exported, rank, 4, "cpu", styles)
        assert collectives(made) == {"all_reduce": 1}


def test_what_somebody_else_wants_whole_is_gathered_once():
    model = Uses(lambda y: y.flip(-1))
    wanted = {"all_reduce": 1, "all_gather_into_tensor": 1}
    assert counted(model, MLP_PLAN | GATHERED) == wanted


def test_what_is_returned_is_gathered_as_it_is_returned():
    wanted = {"all_reduce": 1, "all_gather_into_tensor": 1}
    assert counted(Uses(lambda y: y), MLP_PLAN | GATHERED) == wanted


def test_what_is_written_to_stays_gathered():
    def written(y):
        y.add_(1)
        return y.sum()

    assert counted(Uses(written), MLP_PLAN | GATHERED)["all_gather_into_tensor"] == 1


def test_another_part_than_the_own_is_gathered_for():
    plan = MLP_PLAN | GATHERED | {"down": Activations(inputs={"tp": Shard(1)})}
    assert counted(MLP(7, 13), plan)["all_gather_into_tensor"] >= 1


def test_a_dynamic_size_is_known_without_gathering():
    model = Uses(lambda y: torch.ones(y.shape[0]))
    sizes = ({0: torch.export.Dim("batch")},)
    exported = torch.export.export(model, (torch.randn(3, 7),), dynamic_shapes=sizes)
    mesh = sw.DeviceMesh.abstract((2,), ("tp",))
    assert collectives(shard_program(exported, mesh, MLP_PLAN | GATHERED)) == {"all_reduce": 1}
