"""Functions under torch.compile run eagerly when they get DTensors, with a warning."""

import warnings

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.torch_patches.compiled import told


def newton_step(value: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    return value - scaled(gradients[0])


def scaled(value: torch.Tensor) -> torch.Tensor:
    return value.mul(0.5)


@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_a_compiled_function_runs_eagerly_on_dtensors_and_compiled_on_plain_tensors(
    placement: sw.Placement,
) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    told.clear()
    compiled = torch.compile(newton_step, backend=backend)

    def run() -> list[str]:
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.distribute_tensor(torch.arange(5.0), mesh, [placement])
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(2):
                made = compiled(x, [x])
        assert isinstance(made, sw.DTensor)
        assert torch.equal(made.full_tensor(), torch.arange(5.0) / 2)
        return [str(each.message) for each in seen]

    (message,) = [text for texts in sw.simulate(run, 2) for text in texts]
    assert not graphs
    assert "newton_step" in message and "runs eagerly" in message
    assert torch.equal(compiled(torch.ones(3), [torch.ones(3)]), torch.full((3,), 0.5))
    assert len(graphs) == 1


@pytest.mark.filterwarnings("ignore:.*runs eagerly:shardwise.dispatch.fallback.FallbackWarning")
@pytest.mark.filterwarnings("ignore:.*record_function")
def test_a_compiled_step_of_an_optimizer_updates_split_parameters() -> None:
    torch._dynamo.reset()

    def run() -> torch.Tensor:
        mesh = sw.init_device_mesh("cpu", (2,))
        parameter = nn.Parameter(sw.distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]))
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        step = torch.compile(optimizer.step, backend="eager")
        for _ in range(2):
            parameter.grad = torch.ones_like(parameter)
            step()
        return parameter.detach().full_tensor()

    for each in sw.simulate(run, 2):
        assert torch.equal(each, torch.arange(5.0) - 1)


def test_a_whole_graph_of_dtensors_is_refused() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(scaled, backend="eager", fullgraph=True)

    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        with pytest.raises(Exception, match="this rank's piece"):
            compiled(sw.distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]))

    sw.simulate(run, 2)
