"""Training steps as one graph for each rank, over real processes."""

from collections import Counter

import pytest
import torch
from support.training_steps import MODELS, batches, model_of, start, trained_alone, training_step
from torch.utils import _pytree as pytree

import shardwise as sw
from shardwise import DTensor, Shard
from shardwise.comm import trace
from shardwise.export import shard_step
from shardwise.export.operators import is_collective

STEPS = 3
MESHES = {"two": ((2,), ("tp",)), "four": ((4,), ("tp",)), "both": ((2, 2), ("dp", "tp"))}


def mesh_and_plan(name, kind):
    """Return a mesh of the first ranks and the model's plan for it; None on other ranks."""
    shape, names = MESHES[kind]
    ranks = torch.arange(torch.Size(shape).numel()).view(shape)
    mesh = sw.DeviceMesh("cpu", ranks, mesh_dim_names=names)
    plan = dict(MODELS[name][2])
    if kind == "both":
        plan |= {"batch.*": {"dp": Shard(0)}}
    return (None if mesh.get_coordinate() is None else mesh), plan


def collectives(module):
    """Return the collectives of a graph, in order: kind and axes."""
    said = [node.meta["custom"]["collective"] for node in module.graph.nodes if is_collective(node)]
    return [(each["kind"], tuple(each["axes"])) for each in said]


def eager_collectives(step, fn, mesh, *arguments):
    """Return the collectives of the same function, run on DTensors."""

    def distributed(tree, argument):
        names = iter(step.layouts)
        pieces = pytree.tree_leaves(step.shard(tree, argument))
        found = [name for name in names if name.startswith("batch.") == (argument == "batch")]
        leaves = [
            DTensor.from_local(
                piece, mesh, step.layouts[name].placements, shape=step.layouts[name].shape
            )
            for name, piece in zip(found, pieces, strict=True)
        ]
        return pytree.tree_unflatten(leaves, pytree.tree_structure(tree))

    state, batch = arguments
    state, batch = distributed(state, "state"), distributed(batch, "batch")
    events = []
    with trace.listen(events.append):
        state, outputs = fn(state, batch)
        outputs["loss"].full_tensor()
        for name, each in zip(step.layouts, pytree.tree_leaves(state), strict=False):
            each.redistribute(placements=step.layouts[name].placements)
    return [(event.kind, event.axes) for event in events]


def trained(name, optimizer, kind, backend=None):
    mesh, plan = mesh_and_plan(name, kind)
    if mesh is None:
        return None
    model = model_of(name)
    fn, state = training_step(name, optimizer, model), start(model, optimizer)
    step = shard_step(fn, mesh, plan, (state, batches(name, 1)[0]))
    if backend is not None:
        step.compile(backend=backend, fullgraph=True)
    pieces = step.shard(state)
    losses = []
    for batch in batches(name, STEPS):
        pieces, outputs = step(pieces, step.shard(batch, "batch"))
        assert outputs["kind"] == optimizer
        losses.append(outputs["loss"].item())
    found = collectives(step.graph_module)
    eager = eager_collectives(step, fn, mesh, state, batches(name, 1)[0])
    return step.unshard(pieces), losses, found, eager


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    "name, optimizer, kind",
    [
        ("mlp", "sgd", "two"),
        ("attention", "adam", "four"),
        ("llama", "adam", "both"),
    ],
)
def test_a_step_as_a_graph_trains_as_one_process_does(workers4, name, optimizer, kind):
    wanted = trained_alone(name, optimizer, STEPS)
    results = [each for each in workers4.run(trained, name, optimizer, kind) if each is not None]
    for state, losses, found, eager in results:
        torch.testing.assert_close((state, losses), wanted)
        assert found == results[0][2]  # all ranks meet in the same order
        assert Counter(found) == Counter(eager)


@pytest.mark.slow
def test_a_step_can_be_compiled(workers4):
    wanted = trained_alone("mlp", "adam", STEPS)
    for state, losses, _, _ in workers4.run(trained, "mlp", "adam", "both", "aot_eager"):
        torch.testing.assert_close((state, losses), wanted)
