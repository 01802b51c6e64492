"""Recording a program without data keeps casts, writes, constants and each collective of a rank."""

import pytest
import torch
from support.export_ranks import Routed, collectives
from support.exported_models import MLP, MLP_PLAN
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise import Shard
from shardwise.core import world
from shardwise.core.layout import Layout
from shardwise.export import ExportError, shard_program, tensor_parallel_transformation
from shardwise.export.operators import is_collective
from shardwise.export.recording import as_recorded
from shardwise.export.simplify import clean

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.export's own

TWO = sw.DeviceMesh.abstract((2,), ("tp",))
TP = {"tp": Shard(0)}


class Module(nn.Module):
    def __init__(self, function, *shape):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(*shape))

    def forward(self, x):
        return self.function(self.weight, x)


def on_three(exported, plan, *inputs, output_placements=None):
    """Return the results of three ranks' programs, and their collectives."""

    def rank():
        mesh = sw.init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        made = shard_program(exported, mesh, plan, output_placements=output_placements)
        with Routed(mesh), torch.no_grad():
            return made.module()(*inputs), collectives(made)

    return sw.simulate(rank, 3)


# ---- autocast


class Autocast(nn.Module):
    """Nested autocast blocks: bfloat16, a part without it, and a norm that needs float32."""

    def __init__(self):
        super().__init__()
        self.block, self.norm = MLP(), nn.LayerNorm(8)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                y = self.block(x)
            with torch.autocast("cpu", enabled=False):
                z = self.block(x)
            w = nn.functional.mse_loss(y, z)  # in float32
        return y, z, w, self.norm(z)


PLAN = {f"block.{name}": spec for name, spec in MLP_PLAN.items()}
STYLES = {"block.up": "colwise", "block.down": "rowwise"}


def dtypes(program):
    return [
        node.meta["val"].dtype
        for node in program.graph.nodes
        if "linear" in str(node.target) or "mse" in str(node.target)
    ]


@pytest.mark.parametrize("decomposed", [False, True])
def test_autocast_casts_in_programs_what_it_does_in_the_model(decomposed):
    torch.manual_seed(0)
    model, x = Autocast(), torch.randn(2, 8)
    exported = torch.export.export(model, (x,))
    if decomposed:
        exported = exported.run_decompositions()
    else:
        want = [torch.bfloat16] * 2 + [torch.float32] * 3
        for made in (
            shard_program(exported, TWO, PLAN),
            tensor_parallel_transformation(exported, 1, 2, "cpu", STYLES),
        ):
            assert sorted(dtypes(made), key=str) == want
            stacks = [n.meta["nn_module_stack"] for n in made.graph.nodes if "linear" in n.name]
            assert all(len(each) == 3 for each in stacks)
    with torch.no_grad():
        want = model(x)
    for got, _ in on_three(exported, PLAN, x):
        assert [each.dtype for each in got] == [each.dtype for each in want]
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_autocast_within_an_operator_is_refused():
    def function(weight, x):
        with torch.autocast("cpu", torch.bfloat16):
            return torch.einsum("ij,kj->ik", x, weight)

    exported = torch.export.export(Module(function, 4, 4), (torch.ones(2, 4),))
    with pytest.raises(ExportError, match=r"einsum.default is within autocast, .*to\(dtype\)"):
        shard_program(exported, TWO, {"weight": TP})


# ---- collectives


def test_collectives_of_values_that_are_the_same_on_one_rank_are_not_shared():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    gather = torch.ops._c10d_functional.all_gather_into_tensor.default
    rows = [graph.call_function(torch.ops.aten.slice.Tensor, (x, 0, 0, 2)) for _ in range(2)]
    graph.output(tuple(graph.call_function(gather, (each, 2, "0")) for each in rows))
    clean(graph, torch.device("cpu"))
    assert sum(map(is_collective, graph.nodes)) == 2
    assert len(graph.nodes) == 5  # the slices are one


def test_a_tensor_that_two_operators_and_a_user_want_whole_is_gathered_once():
    def function(weight, x):
        return weight.cholesky_inverse() + torch.linalg.pinv(weight) + x, weight

    exported = torch.export.export(Module(function, 7, 7), (torch.ones(7),))
    model = exported.module()(torch.ones(7))
    for got, counted in on_three(exported, {"weight": TP}, torch.ones(7)):
        torch.testing.assert_close(got, model, rtol=1e-3, atol=1e-3)
        assert counted == {"all_gather_into_tensor": 1}


def test_a_rank_that_has_no_use_for_a_result_meets_the_others_nevertheless():
    """Of four columns to sort, the third of three ranks has none; torch would drop its exchange."""
    model, x = Module(lambda weight, x: (weight + x).sort(0), 8, 4), torch.randn(4)
    exported = torch.export.export(model, (x,)).run_decompositions()
    with torch.no_grad():
        want = tuple(model(x))
    for got, counted in on_three(exported, {"weight": TP}, x):
        torch.testing.assert_close(tuple(got), want)
        assert counted == {"all_to_all_single": 1, "all_gather_into_tensor": 2}


@pytest.mark.parametrize("dim", [0, 1])
def test_sums_are_scattered_unevenly_along_any_dim(dim):
    model, x = MLP(7, 8), torch.randn(5, 7)
    exported = torch.export.export(model, (x,))
    with torch.no_grad():
        whole = model(x)
    found = on_three(exported, MLP_PLAN, x, output_placements=[Shard(dim)])
    mesh = sw.DeviceMesh.abstract((3,), ("tp",))
    layout = Layout.from_placements(mesh, whole.shape, [Shard(dim)])
    for rank, (got, counted) in enumerate(found):
        want = whole[layout.box([rank]).slices]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        assert counted == {"reduce_scatter_tensor": 1}


# ---- writes through views, and numbers that nobody knows yet


class Cache(nn.Module):
    """A write to rows of a buffer that is split along rows."""

    def __init__(self, write):
        super().__init__()
        self.write = write
        self.register_buffer("rows", torch.arange(28.0).reshape(7, 4))

    def forward(self, x):
        return self.write(self.rows, x), self.rows * 2


def _assigned(rows, x):
    rows[2:6] = x


def _row_assigned(rows, x):
    rows[3] = x[0]


def _part_of_a_part(rows, x):
    rows[1:6][2] = 5.0


def _added(rows, x):
    rows[2:6] += x


def _by_a_view(rows, x):
    view = rows[2:6]
    other = rows[:4]
    first = view.mul_(2)
    second = first.add_(x)
    rows.sub_(1)
    return view + 1, first + second, other * 1


GATHER = {"all_gather_into_tensor": 1}
WRITES = {
    _assigned: GATHER,
    _row_assigned: GATHER,
    _part_of_a_part: None,
    _added: None,
    _by_a_view: None,
}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("decomposed", [False, True])
def test_a_view_of_a_split_dim_may_be_written_to(write, decomposed):
    x = torch.randn(4, 4)
    exported = torch.export.export(Cache(write), (x,))
    if decomposed:
        exported = exported.run_decompositions()
    want = Cache(write)(x)
    for got, counted in on_three(exported, {"rows": TP}, x):
        torch.testing.assert_close(got, want)
        if WRITES[write] is not None and not decomposed:
            assert counted == WRITES[write]  # for the result; what is only written is not read


@pytest.mark.parametrize(
    "function",
    [
        lambda w, x: w.index_put((x.long(),), x),
        lambda w, x: w.masked_scatter(w > x, w),
        lambda w, x: torch.nonzero_static(w, size=3),
    ],
)
def test_what_needs_numbers_of_a_split_dim_is_refused_by_name(function):
    exported = torch.export.export(Module(function, 4, 4), (torch.ones(4),))
    with pytest.raises(ExportError, match=r"\(aten\..*\) of \[4@tp, 4\].* whole") as caught:
        shard_program(exported, TWO, {"weight": TP})
    assert any("in node" in note for note in caught.value.__notes__)
    shard_program(exported, TWO, {})  # as it says


# ---- numbers that rules know

KNOWN = {
    "statistics": lambda w, x: torch.var_mean(w, 0),
    "the largest": lambda w, x: w.topk(3, 0),
    "running extremes": lambda w, x: torch.cummax(w, 0),
    "the place of the largest": lambda w, x: (w.argmax(), w.argmin(0)),
    "a format": lambda w, x: w.double(memory_format=torch.preserve_format),
    "a diagonal": lambda w, x: (w + x).fill_diagonal_(3.0),
}


@pytest.mark.parametrize("name", KNOWN)
def test_numbers_that_a_rule_makes_tensors_of_are_in_the_program(name):
    exported = torch.export.export(Module(KNOWN[name], 7, 4), (torch.ones(4),))
    want = exported.module()(torch.ones(4))
    for got, _ in on_three(exported, {"weight": TP}, torch.ones(4)):
        torch.testing.assert_close(got, want)


# ---- dynamic sizes


def test_nothing_is_learnt_about_the_dynamic_sizes_of_the_original():
    """A guard on a size in one rank's program would restrict the original too."""
    model = Module(lambda weight, x: nn.functional.pad(x @ weight, (1, 2)), 8, 5)
    batch = torch.export.Dim("batch", min=2, max=40)
    exported = torch.export.export(model, (torch.randn(6, 8),), dynamic_shapes=({0: batch},))
    value = next(node.meta["val"] for node in exported.graph.nodes if node.name == "x")
    known = value.fake_mode.shape_env
    before = dict(known.replacements), list(known.guards)
    x = torch.randn(9, 8)
    for result, _ in on_three(exported, {"weight": {"tp": Shard(1)}}, x):
        torch.testing.assert_close(result, model(x).detach())
    assert (dict(known.replacements), list(known.guards)) == before


# ---- the communicator of a program


class Functional(TorchDispatchMode):
    """Runs functional collectives as the only rank of their group would; keeps their names."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "_c10d_functional":
            return func(*args, **(kwargs or {}))
        self.names.append(func._opname)
        return args[0].clone()


def test_a_program_contains_broadcasts_and_exchanges_with_some_ranks():
    mesh, recording = as_recorded(TWO)
    with world.use(recording), Functional() as heard:
        group = sw.communicator(mesh)
        assert torch.equal(group.broadcast(torch.ones(2)), torch.ones(2))
        target = torch.zeros(3)
        group.exchange({1: torch.arange(3.0)}, {1: target})
        assert torch.equal(target, torch.arange(3.0))
    assert heard.names == ["broadcast", "wait_tensor", "all_to_all_single", "wait_tensor"]


CALLS = {
    "exchange of nothing": lambda group: group.exchange({}, {}),
    "scatter": lambda group: group.scatter(torch.ones(1), [torch.ones(1)] * 2),
    "gather": lambda group: group.gather(torch.ones(1)),
    "send": lambda group: group.send(torch.ones(1), 1),
    "recv": lambda group: group.recv(torch.ones(1), 1),
    "barrier": lambda group: group.barrier(),
    "gather_objects": lambda group: group.gather_objects("a"),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_torch_has_no_functional_collective_for_is_refused_in_programs(name):
    mesh, recording = as_recorded(TWO)
    with world.use(recording), pytest.raises(ExportError, match=f"^{name}: torch has no func"):
        CALLS[name](sw.communicator(mesh))


def test_a_mesh_is_not_aborted_while_a_program_for_it_is_made():
    mesh, recording = as_recorded(TWO)
    with world.use(recording), pytest.raises(ExportError, match=r"a program for .* is being made"):
        mesh.abort()
    assert recording.describe() == "a program for 2 ranks is being made"
