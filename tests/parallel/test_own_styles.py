"""Styles that users write, keys of plans that name nothing, and torch's own styles.

The styles are written as programs for torch write them: with `distribute_module`, or by overriding
the private steps of a class. `lib` is `shardwise` here; the gloo tests run them with torch too.
"""

import warnings
from functools import partial

import pytest
import torch
import torch.distributed.tensor.parallel as theirs
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate as TheirReplicate
from torch.distributed.tensor import Shard as TheirShard

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from shardwise.core.mesh import init_device_mesh
from shardwise.parallel import (
    Activations,
    ColwiseParallel,
    ParallelStyle,
    PlanError,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
    shard_module,
)


def on(count, run):
    return sw.simulate(lambda: run(init_device_mesh("cpu", (count,), ("tp",))), count)


def mlp(bias=True):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6, bias), nn.GELU(), nn.Linear(6, 4, bias)).double()


def data(*shape):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


# ---- a style with an _apply of its own, on meshes of any number of axes


class SplitRows(ParallelStyle):
    """Lays out a Linear over all axes of a mesh, and returns whole results."""

    @staticmethod
    def partition(name, module, device_mesh):
        for key, parameter in module.named_parameters(recurse=False):
            split = distribute_tensor(parameter, device_mesh, [Shard(0)] * device_mesh.ndim)
            module.register_parameter(key, nn.Parameter(split))

    @staticmethod
    def enter(module, inputs, device_mesh):
        whole = [Replicate()] * device_mesh.ndim
        return DTensor.from_local(inputs[0], device_mesh, whole, run_check=False)

    @staticmethod
    def leave(module, outputs, device_mesh):
        return outputs.redistribute(placements=[Replicate()] * device_mesh.ndim).to_local()

    def _apply(self, module, device_mesh):
        self.mesh = device_mesh
        return distribute_module(module, device_mesh, self.partition, self.enter, self.leave)


@pytest.mark.parametrize("names", [None, "tp", ("ep", "tp")])
def test_a_style_of_the_user_s_own_gets_the_mesh_as_it_is(names):
    plain = nn.Sequential(nn.Linear(4, 7), nn.Tanh()).double()
    expected = plain(data(3, 4))
    expected.square().sum().backward()

    def run():
        mesh = init_device_mesh("cpu", (2, 1, 2), ("dp", "ep", "tp"))
        mesh = mesh if names is None else mesh[names]
        model = nn.Sequential(nn.Linear(4, 7), nn.Tanh()).double()
        model.load_state_dict(plain.state_dict())
        style = SplitRows()
        assert parallelize_module(model, mesh, {"0": style}) is model
        assert style.mesh is mesh and model[0].weight.device_mesh is mesh
        output = model(data(3, 4))
        torch.testing.assert_close(output, expected)
        output.square().sum().backward()
        torch.testing.assert_close(model[0].weight.grad.full_tensor(), plain[0].weight.grad)

    sw.simulate(run, 4)


def test_the_mesh_of_a_with_block_is_the_default():
    def run():
        mesh = init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        model, own = mlp(), SplitRows()
        with mesh["tp"]:
            parallelize_module(model, parallelize_plan={"0": ColwiseParallel()})
        with mesh:
            parallelize_module(model, None, {"2": own})
        assert model[0].weight.device_mesh is mesh["tp"] and own.mesh is mesh
        with pytest.raises(sw.MeshError):
            parallelize_module(mlp(), None, ColwiseParallel())

    sw.simulate(run, 4)


def test_a_plan_with_one_of_torch_s_styles_beside_it_needs_one_axis():
    def run():
        mesh = init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        with pytest.raises(PlanError, match=r"one axis, got \(dp=2, tp=2\)"):
            parallelize_module(mlp(), mesh, {"0": SplitRows(), "2": ColwiseParallel()})

    sw.simulate(run, 4)


# ---- styles derived from ours, by torch's private names


class ScaledInput(ColwiseParallel):
    @staticmethod
    def _prepare_input_fn(input_layouts, desired_input_layouts, mod, inputs, device_mesh):
        scaled = (inputs[0] * 2, *inputs[1:])
        return ColwiseParallel._prepare_input_fn(
            input_layouts, desired_input_layouts, mod, scaled, device_mesh
        )


class ScaledOutput(RowwiseParallel):
    @staticmethod
    def _prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh):
        outputs = outputs.redistribute(placements=output_layouts) * 3
        return outputs.to_local() if use_local_output else outputs


class WholeApply(RowwiseParallel):
    """Written after torch's own `_apply`."""

    def _apply(self, module, device_mesh):
        self.desired_input_layouts = (Shard(-1),)
        return distribute_module(
            module,
            device_mesh,
            self._partition_linear_fn,
            partial(self._prepare_input_fn, self.input_layouts, self.desired_input_layouts),
            partial(ScaledOutput._prepare_output_fn, self.output_layouts, self.use_local_output),
        )


@pytest.mark.parametrize("last", [ScaledOutput, WholeApply])
@pytest.mark.parametrize("count", [2, 4])
def test_styles_that_override_torch_s_private_steps(last, count):
    plain = mlp()
    expected = plain(data(2, 5, 4) * 2) * 3
    expected.square().sum().backward()

    def run(mesh):
        model = mlp()
        parallelize_module(model, mesh, {"0": ScaledInput(), "2": last()}, src_data_rank=None)
        assert model[0].weight.placements == (Shard(0),)
        assert model[2].weight.placements == (Shard(1),)
        assert model[2].bias.placements == (Replicate(),)
        output = model(data(2, 5, 4))
        torch.testing.assert_close(output, expected)
        output.square().sum().backward()
        for ours, one in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), one.grad)

    on(count, run)


class Doubled(SequenceParallel):
    @staticmethod
    def _prepare_output_fn(use_local_output, mod, outputs, device_mesh):
        return (outputs * 2).to_local() if use_local_output else outputs * 2


class ByRows(ColwiseParallel):
    def _partition_embedding_fn(self, name, module, device_mesh):
        split = distribute_tensor(module.weight, device_mesh, [Shard(0)])
        module.register_parameter("weight", nn.Parameter(split))


def test_steps_of_norms_and_embeddings():
    def run(mesh):
        norm = parallelize_module(nn.LayerNorm(4), mesh, Doubled(sequence_dim=0))
        x = data(3, 4).float()
        got = norm(DTensor.from_local(x, mesh, [Shard(0)]))
        expected = nn.LayerNorm(4)(torch.cat([x, x])) * 2
        torch.testing.assert_close(got.full_tensor(), expected)
        embedding = nn.Embedding(5, 4)
        before = embedding.weight.detach().clone()
        parallelize_module(embedding, mesh, ByRows(output_layouts=Replicate()))
        assert embedding.weight.placements == (Shard(0),)
        tokens = torch.tensor([[4, 0]])
        torch.testing.assert_close(
            embedding(tokens), F.embedding(tokens, embedding.weight.full_tensor())
        )
        assert before.shape == (5, 4)

    on(2, run)


def test_steps_that_are_not_called_are_refused():
    class Prepared(PrepareModuleInput):
        def _prepare_input_arg(self, input, mesh, input_layout, desired_layout):
            return input

    class Out(PrepareModuleOutput):
        def _prepare_out_fn(self, outputs, device_mesh):
            return outputs

    def run(mesh):
        style = Prepared(input_layouts=Replicate(), desired_input_layouts=Replicate())
        with pytest.raises(PlanError, match=r"Prepared overrides _prepare_input_arg.*_apply"):
            parallelize_module(mlp(), mesh, {"": style})
        style = Out(output_layouts=Replicate(), desired_output_layouts=Replicate())
        with pytest.raises(PlanError, match=r"Out overrides _prepare_out_fn"):
            parallelize_module(mlp(), mesh, style)

    on(2, run)


# ---- experts, as torchtitan parallelizes them


class Experts(nn.Module):
    """One matrix for each expert; computes with local parameters."""

    def __init__(self, count=4):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(count, 6, 4))
        self.w2 = nn.Parameter(torch.randn(count, 4, 6))

    def forward(self, x):
        w1, w2 = (
            each.to_local() if isinstance(each, DTensor) else each for each in (self.w1, self.w2)
        )
        hidden = F.silu(torch.bmm(x, w1.transpose(-2, -1)))
        return torch.bmm(hidden, w2.transpose(-2, -1))


class TensorParallelExperts(ParallelStyle):
    def _prepare_input_fn(self, mod, inputs, device_mesh):
        # The gradient of each rank is a contribution.
        return (
            DTensor.from_local(inputs[0], device_mesh, (Replicate(),)).to_local(
                grad_placements=(Partial(),)
            ),
            *inputs[1:],
        )

    def _partition_fn(self, name, module, device_mesh):
        split = distribute_tensor(module.w1, device_mesh, [Shard(1)])
        module.register_parameter("w1", nn.Parameter(split))
        split = distribute_tensor(module.w2, device_mesh, [Shard(2)])
        module.register_parameter("w2", nn.Parameter(split))

    def _prepare_output_fn(self, mod, outputs, device_mesh):
        whole = DTensor.from_local(outputs, device_mesh, (Partial(),))
        return whole.redistribute(placements=(Replicate(),)).to_local()

    def _apply(self, module, device_mesh):
        return distribute_module(
            module,
            device_mesh,
            self._partition_fn,
            self._prepare_input_fn,
            self._prepare_output_fn,
        )


class NoParallel(ParallelStyle):
    """Every rank computes all of a module, on DTensors."""

    def __init__(self, *, input_layout=None, output_layout=None, use_local_output=True):
        self.input_layout = input_layout or Replicate()
        self.output_layout = output_layout or Replicate()
        self.desired_input_layout = Replicate()
        self.use_local_output = use_local_output

    @staticmethod
    def _prepare_input_fn(input_layout, desired_input_layout, mod, inputs, device_mesh):
        x = inputs[0]
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, device_mesh, (input_layout,), run_check=False)
        if input_layout != desired_input_layout:
            x = x.redistribute(placements=(desired_input_layout,))
        return (x, *inputs[1:])

    @staticmethod
    def _prepare_output_fn(output_layout, use_local_output, mod, outputs, device_mesh):
        if outputs.placements != (output_layout,):
            outputs = outputs.redistribute(placements=(output_layout,))
        return outputs.to_local() if use_local_output else outputs

    def _apply(self, module, device_mesh):
        return distribute_module(
            module,
            device_mesh,
            None,
            partial(self._prepare_input_fn, self.input_layout, self.desired_input_layout),
            partial(self._prepare_output_fn, self.output_layout, self.use_local_output),
        )


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 4, bias=False), Experts()

    def forward(self, x):
        weights = self.gate(x).softmax(-1)  # [batch, length, experts]
        shared = x.flatten(0, 1).expand(4, -1, -1)
        mixed = torch.einsum("etd,te->td", self.experts(shared), weights.flatten(0, 1))
        return mixed.view_as(x)


def layer():
    torch.manual_seed(0)
    return Layer().double()


@pytest.mark.parametrize("count", [2, 3])
def test_experts_and_a_gate_with_styles_as_torchtitan_writes_them(count):
    plain, x = layer(), data(2, 6, 4).requires_grad_()
    expected = plain(x)
    expected.square().sum().backward()

    def run(mesh):
        model, mine = layer(), data(2, 6, 4)
        plan = {
            # the sequence is split outside of the layer, and each rank gets its part back
            "": PrepareModuleInputOutput(
                input_layouts=(Shard(1),),
                desired_input_layouts=(Replicate(),),
                use_local_input=True,
                output_layouts=(Replicate(),),
                desired_output_layouts=(Shard(1),),
            ),
            "gate": NoParallel(),
            "experts": TensorParallelExperts(),
        }
        parallelize_module(model, mesh, plan)
        part = mine.chunk(count, 1)[mesh.get_rank()].clone().requires_grad_()
        output = model(part)
        torch.testing.assert_close(output, expected.chunk(count, 1)[mesh.get_rank()])
        output.square().sum().backward()
        torch.testing.assert_close(part.grad, x.grad.chunk(count, 1)[mesh.get_rank()])
        for name, parameter in model.named_parameters():
            wanted = plain.get_parameter(name).grad
            torch.testing.assert_close(parameter.grad.full_tensor(), wanted)

    on(count, run)


# ---- keys that name nothing


class Stage(nn.Module):
    """A stage of a pipeline: what other stages have is None."""

    def __init__(self, first):
        super().__init__()
        self.embed = nn.Embedding(5, 4) if first else None
        self.layers = nn.ModuleDict({"1": mlp()} if first else {})
        self.head = None if first else nn.Linear(4, 5, bias=False)


STAGES = {
    "embed": RowwiseParallel(),
    "layers.*.0": ColwiseParallel(),
    "layers.*.2": RowwiseParallel(),
    "head": ColwiseParallel(),
    "head.inner": ColwiseParallel(),
}


@pytest.mark.parametrize("first", [True, False])
def test_keys_that_name_modules_of_other_stages_are_skipped(first):
    def run(mesh):
        plan = dict(STAGES)
        if not first:
            del plan["head.inner"]
        stage = parallelize_module(Stage(first), mesh, plan)
        assert all(isinstance(each, DTensor) for each in stage.parameters())
        whole = Stage(True)
        whole.embed = whole.layers["1"][2] = None  # as torchtitan makes stages of a whole model
        parallelize_module(whole, mesh, STAGES)
        placements = {"embed.weight": {"tp": Shard(0)}, "head.*": {"tp": Shard(0)}}
        by_name = {
            **placements,
            "layers.*.0.weight": {"tp": Shard(0)},
            "layers.*": Activations(inputs={"tp": Replicate()}),
            "head": Activations(inputs={"tp": Replicate()}),
        }
        shard_module(Stage(first), mesh, by_name)

    on(2, run)


def test_a_bias_that_is_none_is_skipped_and_a_misspelt_name_is_not():
    def run(mesh):
        shard_module(
            mlp(bias=False), mesh, {"0.bias": {"tp": Shard(0)}, "*.bias": {"tp": Shard(0)}}
        )
        with pytest.raises(PlanError, match="matches nothing"):
            shard_module(mlp(bias=False), mesh, {"0.bia": {"tp": Shard(0)}})
        with pytest.raises(PlanError, match="matches nothing"):
            parallelize_module(Stage(True), mesh, {"heads": ColwiseParallel()})

    on(2, run)


def test_without_a_plan_nothing_is_done_and_a_warning_tells_so():
    def run(mesh):
        model = mlp()
        with pytest.warns(UserWarning, match="no parallelize_plan"):
            assert parallelize_module(model, mesh) is model

    on(2, run)


def test_keys_that_match_nothing_as_in_torch():
    """torch warns of what ours refuses, or warns of with strict=False."""

    def run(mesh):
        with pytest.warns(UserWarning, match=r"parallelize_plan\['x'\].*matches nothing") as warned:
            parallelize_module(mlp(), mesh, {"x": ColwiseParallel()}, strict=False)
        assert {each.filename for each in warned} == {__file__}
        with pytest.warns(UserWarning, match="could not be resolved"):
            theirs.parallelize_module(mlp(), mesh, {"x": theirs.ColwiseParallel()})

    on(2, run)


# ---- torch's own styles


def test_torch_s_own_styles_are_converted():
    plain = nn.Sequential(mlp(), nn.LayerNorm(4).double())
    expected = plain(data(2, 4, 4))

    def run(mesh):
        model = nn.Sequential(mlp(), nn.LayerNorm(4).double())
        plan = {
            "0.0": theirs.ColwiseParallel(),
            "0.2": theirs.RowwiseParallel(output_layouts=TheirShard(1)),
            "0": theirs.PrepareModuleInput(
                input_layouts=TheirReplicate(), desired_input_layouts=TheirReplicate()
            ),
            "1": theirs.SequenceParallel(),
            "": theirs.PrepareModuleOutput(
                output_layouts=TheirShard(1), desired_output_layouts=TheirReplicate()
            ),
        }
        parallelize_module(model, mesh, plan)
        assert all(isinstance(each, DTensor) for each in model.parameters())
        torch.testing.assert_close(model(data(2, 4, 4)), expected)
        both = theirs.PrepareModuleInputOutput(
            input_layouts=(TheirShard(0),),
            desired_input_layouts=(TheirReplicate(),),
            use_local_input=True,
            output_layouts=(TheirReplicate(),),
            desired_output_layouts=(TheirShard(0),),
        )
        same = parallelize_module(nn.Identity(), mesh, both)
        assert same(torch.ones(2, 3)).shape == (2, 3)

    on(2, run)


def test_a_style_derived_from_torch_s_is_refused_with_the_remedy():
    class Own(theirs.ParallelStyle):
        def _apply(self, module, device_mesh):
            return module

    def run(mesh):
        for style in (Own(), Own):
            with pytest.raises(PlanError, match=r"import ParallelStyle from shardwise\.parallel"):
                parallelize_module(mlp(), mesh, {"0": style})

    on(2, run)


def test_errors_have_the_types_of_torch_s():
    def run(mesh):
        with pytest.raises(TypeError, match="expected a style"):
            parallelize_module(mlp(), mesh, {"0": "colwise"})
        with pytest.raises(TypeError, match="expected a style"):
            parallelize_module(mlp(), mesh, 3)
        with pytest.raises(NotImplementedError, match=r"fits nn\.Linear"):
            parallelize_module(nn.LayerNorm(4), mesh, RowwiseParallel())
        with pytest.raises(AssertionError, match="expected 2"):
            PrepareModuleInput(
                input_layouts=(Replicate(), None), desired_input_layouts=(Replicate(),)
            )
        with pytest.raises(AssertionError, match="expected 1"):
            PrepareModuleOutput(
                output_layouts=Replicate(), desired_output_layouts=(Replicate(), None)
            )
        prepared = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
        with pytest.raises(AssertionError, match="expected a tensor, got int"):
            parallelize_module(nn.Identity(), mesh, prepared)(3)

    on(2, run)


def test_no_warning_is_given_for_keys_that_match():
    def run(mesh):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            parallelize_module(mlp(), mesh, {"[02]": ColwiseParallel()}, strict=False)

    on(2, run)
