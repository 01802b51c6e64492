"""tensor_parallel_transformation, without ranks: layouts, collectives, refused styles."""

from collections import Counter

import pytest
import torch
from support.export_styles import called, collectives
from support.exported_models import MLP, Attention, Tied
from torch import nn
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.parallel import style as torch_styles
from torch.export import Dim

from shardwise import DeviceMesh, Replicate, Shard
from shardwise.core.errors import ShardwiseError
from shardwise.export import ExportError, shard_program, tensor_parallel_transformation
from shardwise.parallel import (
    Activations,
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.export's own

X = torch.randn(2, 4, 8)
SPLIT = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def exported(model=None, *args, **options):
    return torch.export.export(model or MLP(), args or (X,), **options)


def local(styles, program=None, rank=0, size=2):
    return tensor_parallel_transformation(program or exported(), rank, size, "cpu", styles)


def shapes(program):
    return {name: tuple(each.shape) for name, each in program.state_dict.items()}


def structure(program):
    """Return the operators of a program, with their arguments that are not tensors."""
    return [
        (str(node.target), torch.fx.map_arg(node.args, lambda _: None))
        for node in program.graph.nodes
        if node.op == "call_function"
    ]


@pytest.mark.parametrize(
    "up, down",
    [
        (ColwiseParallel, RowwiseParallel),
        ("colwise", "rowwise"),
        (torch_styles.ColwiseParallel, torch_styles.RowwiseParallel),
        (torch_styles.ColwiseParallel(), torch_styles.RowwiseParallel()),
    ],
)
def test_a_style_may_be_a_class_an_instance_a_name_or_torchs_own(up, down):
    program = exported()
    given = local({"up": up, "down": down}, program)
    same = local(SPLIT, program)
    assert shapes(given) == {
        "up.weight": (8, 8),
        "up.bias": (8,),
        "down.weight": (8, 8),
        "down.bias": (8,),
    }
    assert structure(given) == structure(same)


def test_programs_of_all_ranks_are_made_anywhere_and_have_the_same_collectives():
    program = exported(MLP(hidden=13))
    made = [local(SPLIT, program, rank, 4) for rank in range(4)]
    assert [shapes(each)["up.weight"] for each in made] == [(4, 8), (4, 8), (4, 8), (1, 8)]
    assert torch.equal(
        torch.cat([each.state_dict["up.weight"] for each in made]), program.state_dict["up.weight"]
    )
    assert all(collectives(each) == Counter(["all_reduce"]) for each in made)


def test_a_program_for_one_rank_is_the_original():
    model = MLP()
    program = local(SPLIT, exported(model), 0, 1)
    assert not collectives(program)
    torch.testing.assert_close(called(program.module(), (X,), {}, 1)[0], model(X))


def test_patterns_name_many_modules():
    program = torch.export.export(Attention(fused=True), (torch.randn(2, 5, 16),))
    made = local({"[qkv]": "colwise", "o": "rowwise"}, program)
    assert [shapes(made)[f"{name}.weight"] for name in "qkvo"] == [(8, 16)] * 3 + [(16, 8)]


def test_an_output_goes_where_the_style_says():
    gathered = local({"up": ColwiseParallel(output_layouts=Replicate())})
    assert collectives(gathered) == Counter(["all_gather_into_tensor"])
    last = [node for node in gathered.graph.nodes if "layout" in node.meta][-1]
    assert last.meta["layout"].placements == (Replicate(),)
    scattered = local({"up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=Shard(1))})
    layouts = [node.meta["layout"] for node in scattered.graph.nodes if "layout" in node.meta]
    assert any(each.placements == (Shard(1),) for each in layouts)
    theirs = torch_styles.RowwiseParallel(output_layouts=TorchShard(1))
    same = local({"up": torch_styles.ColwiseParallel(), "down": theirs})
    assert structure(same) == structure(scattered)


def test_an_input_is_moved_once_for_all_modules_that_take_it():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.a, self.b = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            x = self.norm(x)
            a, b = self.a(x), self.b(x)
            self.calls.add_(1)  # programs that write are not searched for equal collectives
            return a * b

    program = local({"norm": SequenceParallel, "[ab]": "colwise"}, exported(Two()))
    assert collectives(program) == Counter({"all_gather_into_tensor": 2})  # the norm's, the result


def test_a_sequence_style_splits_the_dim_it_names():
    program = local(
        {"norm": SequenceParallel(sequence_dim=0)}, exported(Tied(20), torch.ones(4, 6).long())
    )
    norm = next(node for node in program.graph.nodes if "norm.default" in str(node.target))
    assert norm.meta["layout"].placements == (Shard(0),)
    theirs = torch_styles.SequenceParallel(sequence_dim=0)
    same = local({"norm": theirs}, exported(Tied(20), torch.ones(4, 6).long()))
    assert structure(same) == structure(program)


def test_replicate_brings_a_module_what_is_whole():
    program = local({"up": "colwise", "down": "replicate"})
    assert collectives(program) == Counter(["all_gather_into_tensor"])
    assert shapes(program)["down.weight"] == (8, 16)


def test_styles_that_prepare_inputs_and_outputs_move_them():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.block = nn.LayerNorm(8), MLP()

        def forward(self, x):
            return self.block(self.norm(x)).tanh()

    def styles(prepared, output, shard, whole):
        return {
            "norm": SequenceParallel,
            "block": prepared(input_layouts=shard, desired_input_layouts=whole),
            "": output(output_layouts=whole, desired_output_layouts=shard),
        }

    ours = styles(PrepareModuleInput, PrepareModuleOutput, Shard(1), Replicate())
    theirs = styles(
        torch_styles.PrepareModuleInput,
        torch_styles.PrepareModuleOutput,
        TorchShard(1),
        TorchReplicate(),
    )
    program = exported(Block())
    made = local(ours, program)
    assert Counter(["all_gather_into_tensor"] * 2) == collectives(made)  # the input, the result
    assert structure(local(theirs, program)) == structure(made)


def test_a_module_that_is_like_an_embedding_or_a_transposed_linear_map_is_split_as_one():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(10, 8))

        def forward(self, tokens):
            return nn.functional.embedding(tokens, self.weight)

    class Conv1D(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 6))
            self.bias = nn.Parameter(torch.randn(6))

        def forward(self, x):
            return torch.addmm(self.bias, x.view(-1, 8), self.weight)

    program = exported(nn.Sequential(Table(), Conv1D()), torch.arange(4))
    made = local({"0": "rowwise", "1": "colwise"}, program)
    assert shapes(made) == {"0.weight": (5, 8), "1.weight": (8, 3), "1.bias": (3,)}
    assert shapes(local({"1": "rowwise"}, program))["1.weight"] == (4, 6)
    assert shapes(local({"0": "colwise"}, program))["0.weight"] == (10, 4)


def test_a_block_without_gradients_in_a_module_is_moved_too():
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = MLP()

        def forward(self, x):
            with torch.no_grad():
                y = self.block(x)
            return y + x

    styles = {"block.up": "colwise", "block.down": RowwiseParallel(output_layouts=Shard(1))}
    program = local(styles, exported(Frozen()))
    assert sum(collectives(program).values()) == 2  # of the sum's pieces, and to the result


def test_the_original_is_not_changed():
    program = exported()
    before, weights = str(program), {k: v.clone() for k, v in program.state_dict.items()}
    local(SPLIT, program)
    assert str(program) == before
    assert all(torch.equal(program.state_dict[name], each) for name, each in weights.items())


# ---- what is refused


@pytest.mark.parametrize(
    "styles, said",
    [
        ({"upp": "colwise"}, r"\['upp'\].*matches nothing; near it are up"),
        ({"up.weight": "colwise"}, "matches up.weight, which is a parameter or buffer"),
        ({"up": "columns"}, r"\['up'\]: expected ColwiseParallel.*'colwise'.*got 'columns'"),
        ({"up": Shard(0)}, r"expected Colwise.*got Shard\(0\)\. Placements are for shard_"),
        ({"up": PrepareModuleOutput}, "PrepareModuleOutput has no defaults"),
        ({"": "colwise"}, "the module itself has no weight that ColwiseParallel could split"),
        ({"*": "colwise", "down": "rowwise"}, "down: it is given ColwiseParallel.* and Rowwise"),
        (
            {"up": ColwiseParallel(output_layouts=Shard(5))},
            r"output of up.*3-d tensor.*got Shard\(5\)",
        ),
        ([("up", "colwise")], "parallel_strategies: expected a dict"),
        ({0: "colwise"}, "expected names"),
    ],
)
def test_styles_that_do_not_fit_are_refused_by_name(styles, said):
    with pytest.raises(ShardwiseError, match=said):
        local(styles)


@pytest.mark.parametrize(
    "rank, size, device, said",
    [
        (2, 2, "cpu", r"rank: expected less than world_size \(2\), got 2"),
        (-1, 2, "cpu", "rank: expected an int of at least 0, got -1"),
        (0, 0, "cpu", "world_size: expected an int of at least 1, got 0"),
        (0, 2.0, "cpu", "world_size: expected an int"),
        (0, 2, "cpu:1", "device_type: expected a kind of device.*got 'cpu:1'"),
        (0, 2, "gpu", "device_type"),
        (0, 2, None, "device_type"),
    ],
)
def test_rank_world_size_and_device_are_checked(rank, size, device, said):
    with pytest.raises(ExportError, match=said):
        tensor_parallel_transformation(exported(), rank, size, device, {})


def test_what_is_no_program_is_refused():
    with pytest.raises(ExportError, match=r"exported_program: expected what torch.export"):
        tensor_parallel_transformation(MLP(), 0, 2, "cpu", {})


def test_styles_that_tear_a_tie_are_refused():
    program = exported(Tied(20), torch.ones(2, 3).long())
    with pytest.raises(ExportError, match=r"they are one tensor.*embedding.weight.*head.weight"):
        local({"embedding": "colwise", "head": "colwise"}, program)


def test_a_dynamic_dim_is_not_split():
    program = exported(Tied(20), torch.ones(2, 3).long(), dynamic_shapes=({1: Dim("length")},))
    with pytest.raises(ExportError, match=r"input of norm \(.*\): dim 1 is dynamic"):
        local({"norm": "sequence"}, program)


def test_which_of_several_inputs_is_meant_must_be_clear():
    class Sum(nn.Module):
        def forward(self, x, y):
            return x + y

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.sum = Sum()

        def forward(self, x):
            return self.sum(x.sin(), x.cos())

    with pytest.raises(ExportError, match=r"input of sum: .*several \(sin, cos\)"):
        local({"sum": "sequence"}, exported(Outer()))
    styles = {
        "sum": PrepareModuleInput(
            input_layouts=(Shard(0), Shard(1)), desired_input_layouts=(Shard(0), Shard(1))
        )
    }
    with pytest.raises(ExportError, match="does not say which"):
        local(styles, exported(Outer()))


# ---- Activations in the plan of shard_program


PLAN = {"block.up.*": {"tp": Shard(0)}, "block.down.weight": {"tp": Shard(1)}}


def planned(plan, shape=(2,), axes=("tp",), model=None, **options):
    program = exported(model or Tied(20), torch.ones(4, 6).long(), **options)
    return shard_program(program, DeviceMesh.abstract(shape, axes), {**PLAN, **plan})


def layout_of(program, name):
    (node,) = [each for each in program.graph.nodes if each.name == name]
    return node.meta["layout"].placements


def test_activations_in_a_plan_split_what_is_between_modules():
    between = Activations(outputs={"tp": Shard(1)})
    block = Activations(inputs={"tp": Replicate()}, outputs={"tp": Shard(1)})
    program = planned({"embedding": between, "block": block})
    assert layout_of(program, "layer_norm") == (Shard(1),)
    assert layout_of(program, "add") == (Shard(1),)


def test_inputs_of_the_program_are_named_and_cut():
    plan = {"": Activations(inputs={"tokens": {"dp": Shard(0)}})}
    program = planned(plan, (2, 2), ("dp", "tp"))
    assert layout_of(program, "embedding") == (Shard(0), Replicate())
    assert layout_of(program, "relu") == (Shard(0), Shard(2))
    (tokens,) = [each for each in program.graph.nodes if each.name == "tokens"]
    assert tokens.meta["val"].shape == (4, 6)


@pytest.mark.parametrize(
    "plan, said",
    [
        ({"blok": Activations(outputs={"tp": Shard(1)})}, "matches nothing; near it are block"),
        ({"": Activations(inputs={"token": {"tp": Shard(0)}})}, "'token'.*near it are tokens"),
        ({"": Activations(inputs={0: {"tp": Shard(0)}})}, r"inputs by position \[0\]"),
        ({"": Activations(outputs=(None, {"tp": Shard(0)}))}, "does not say which"),
        ({"block": Activations(outputs={"dp": Shard(0)})}, "expected axes of the mesh"),
        (
            {"norm": Activations(inputs={"tp": Shard(3)})},
            r"input of norm.*3-d tensor.*got Shard\(3\)",
        ),
    ],
)
def test_activations_that_do_not_fit_are_refused_by_name(plan, said):
    with pytest.raises(ShardwiseError, match=said):
        planned(plan)
