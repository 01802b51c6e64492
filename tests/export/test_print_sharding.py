"""print_sharding: its text for a program, a loaded program and a training step."""

import io
import re

import pytest
import torch
from support.training_steps import LLAMA, MODELS, batches, model_of, start, training_step
from torch import nn

import shardwise as sw
from shardwise import Shard
from shardwise.examples.llama import Llama
from shardwise.export import (
    ExportError,
    print_sharding,
    shard_program,
    shard_step,
    sharding_text,
)
from shardwise.export.operators import is_collective

# torch's own, where it copies the tree of a program's arguments
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")

TWO = sw.DeviceMesh.abstract((2,), ("tp",))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.up(x).relu()) * 2


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp, self.norm = MLP(), nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(self.mlp(x))


PLAN = {"mlp.up.*": {"tp": Shard(0)}, "mlp.down.weight": {"tp": Shard(1)}}


def program(dynamic=False):
    shapes = ({0: torch.export.Dim("batch")},) if dynamic else None
    exported = torch.export.export(Outer(), (torch.randn(4, 8),), dynamic_shapes=shapes)
    return shard_program(exported, TWO, PLAN)


def reloaded(given):
    file = io.BytesIO()
    torch.export.save(given, file)
    file.seek(0)
    return torch.export.load(file)


def lines(text):
    """Return the cells of each line, without the spaces between columns."""
    return [[cell for cell in line.split("  ") if cell] for line in text.splitlines()]


def test_a_program_is_shown_with_layouts_collectives_and_reasons():
    shown = [[cell.strip() for cell in line] for line in lines(sharding_text(program()))]
    assert ["mlp.up.weight", "f32", "[16@tp, 8]", "[8, 8]"] in shown
    assert ["mlp.down.bias", "f32", "[8]", "[8]"] in shown
    assert ["x", "f32", "[4, 8]", "[4, 8]"] in shown
    assert ["relu", "relu(linear)", "f32", "[4, 8]", "[4, 16@tp]", "mlp"] in shown
    reason = "<- all_reduce over tp, 128 B, layer_norm in norm"
    assert ["all_reduce", "all_reduce(mul)", "f32", "[4, 8]", reason] in shown
    waited = ["wait_tensor", "wait_tensor(all_reduce)", "f32", "[4, 8]", "[4, 8]", "norm"]
    assert waited in shown
    assert shown[-3] == ["layer_norm", "[4, 8]"]  # the output
    assert shown[-1] == ["1 collective (1 all_reduce), 128 B received per call"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_loaded_program_is_shown_as_it_was(dynamic):
    made = program(dynamic)
    assert sharding_text(reloaded(made)) == sharding_text(made)


def test_dynamic_sizes_are_shown_as_symbols():
    made = program(dynamic=True)
    symbol = str(next(iter(made.range_constraints)))
    text = sharding_text(made)
    assert f"[{symbol}, 16@tp]" in text and "[4," not in text
    assert text.endswith("received per call at the sizes of the example")
    assert "_empty_nn_module_stack" not in text
    (linear,) = (node for node in made.graph.nodes if node.name == "linear")
    assert linear.meta["layout"].shape == (4, 16)


def test_layers_share_a_line_and_lines_are_not_too_long():
    plan = {name.removeprefix("params."): each for name, each in MODELS["llama"][2].items()}
    exported = torch.export.export(Llama(LLAMA), (torch.zeros(2, 5, dtype=torch.int64),))
    text = sharding_text(shard_program(exported, TWO, plan))
    assert "layers.*.feed_forward.w2.weight (x2)  f32    [16, 24@tp]" in text
    assert max(map(len, text.splitlines())) < 170
    assert re.search(r"chunk\(transpose\) +2 x \[2, ", text)


def test_every_collective_has_its_bytes_and_reason():
    name = "llama"
    state, batch = start(model_of(name), "sgd"), batches(name, 1)[0]
    step = shard_step(training_step(name, "sgd"), TWO, MODELS[name][2], (state, batch))
    found = [node for node in step.graph_module.graph.nodes if is_collective(node)]
    assert found
    for node in found:
        said = node.meta["custom"]["collective"]
        assert said["bytes"] > 0 and said["axes"] == ["tp"] and said["operator"]
    directions = {node.meta["custom"]["collective"]["direction"] for node in found}
    assert directions == {"forward", "backward"}
    text = sharding_text(step)
    assert "params.tok_embeddings.weight" in text and "layers.1.attention" in text
    assert ", backward" in text and f"{len(found)} collectives (" in text


def test_it_prints_to_a_file_and_refuses_other_things(capsys):
    made = program()
    file = io.StringIO()
    print_sharding(made, file)
    print_sharding(made)
    assert file.getvalue() == capsys.readouterr().out == sharding_text(made) + "\n"
    with pytest.raises(ExportError, match=r"program: expected one of shard_program.*got int"):
        print_sharding(3)
