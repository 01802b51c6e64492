"""Optimizers, gradient clipping and inf checks on DTensor parameters of mixed layouts."""

import copy

import pytest
import torch
from support.rules import in_layout
from torch import nn

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard
from shardwise.dtensor.tensor import unwrap

SHAPES = [(5, 4), (4,), (3, 2, 2), (1,), ()]
PLACEMENTS = [
    [Shard(0), Shard(1)],
    [Replicate(), Shard(0)],
    [Shard(2), Replicate()],
    [Shard(0), Replicate()],
    [Replicate(), Replicate()],
]


def ranks(fn, count=4, shape=(2, 2)):
    return sw.simulate(lambda: fn(sw.init_device_mesh("cpu", shape)), count)


def values(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def parameters(mesh):
    return [
        nn.Parameter(sw.distribute_tensor(value, mesh, placements, src_data_rank=None))
        for value, placements in zip(values(0), PLACEMENTS, strict=True)
    ]


def set_gradients(params, step):
    for parameter, value in zip(params, values(step + 1), strict=True):
        parameter.grad = value.clone()


OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
    (torch.optim.AdamW, {"lr": 0.1}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.1, "centered": True, "momentum": 0.5}),
]


@pytest.mark.parametrize(
    "options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str
)
@pytest.mark.parametrize(
    "kind, settings", OPTIMIZERS, ids=lambda each: getattr(each, "__name__", "")
)
def test_optimizers_step_as_in_one_process(kind, settings, options):
    if "fused" in options and kind is torch.optim.RMSprop:
        options = {"foreach": True}
    if "fused" in options:
        settings = {name: value for name, value in settings.items() if name != "nesterov"}

    def run(mesh):
        ours = parameters(mesh)
        theirs = [nn.Parameter(value) for value in values(0)]
        optimizers = kind(ours, **settings, **options), kind(theirs, **settings, **options)
        for step in range(3):
            for params, optimizer in zip((ours, theirs), optimizers, strict=True):
                set_gradients(params, step)
                optimizer.step()
                optimizer.zero_grad()
        for mine, plain, placements in zip(ours, theirs, PLACEMENTS, strict=True):
            assert mine.placements == tuple(placements)
            assert torch.allclose(mine.full_tensor(), plain, atol=1e-6)
        state = optimizers[0].state[ours[0]]
        moments = [value for value in state.values() if isinstance(value, DTensor)]
        assert all(value.mesh_layout is ours[0].mesh_layout for value in moments if value.dim())

    ranks(run)


def test_lbfgs_minimizes_as_in_one_process():
    def run(mesh):
        target = values(9)

        def closure_of(params, optimizer):
            def closure():
                optimizer.zero_grad()
                loss = sum(
                    ((p - t) ** 2).sum() + (p**4).sum() for p, t in zip(params, target, strict=True)
                )
                loss.backward()
                return loss

            return closure

        results = []
        for params in (parameters(mesh), [nn.Parameter(value) for value in values(0)]):
            optimizer = torch.optim.LBFGS(params, lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
            optimizer.step(closure_of(params, optimizer))
            results.append([p.full_tensor() if isinstance(p, DTensor) else p for p in params])
        for mine, plain in zip(*results, strict=True):
            assert torch.allclose(mine, plain, atol=1e-5)

    ranks(run)


def test_adamw_takes_its_learning_rate_as_a_tensor_where_a_parameter_is_pending():
    row = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)

    def trained(weight):
        parameter = nn.Parameter(weight)
        optimizer = torch.optim.AdamW([parameter], lr=torch.tensor(0.1), foreach=False)
        for _ in range(2):
            optimizer.zero_grad()
            (parameter**2).sum().backward()
            optimizer.step()
        return parameter.detach()

    def run(mesh):
        made = trained(in_layout(row, mesh, Partial()))
        torch.testing.assert_close(made.full_tensor(), trained(row.clone()))

    ranks(run, 2, (2,))


def test_an_optimizers_state_survives_its_state_dict():
    def run(mesh):
        params = parameters(mesh)
        optimizer = torch.optim.AdamW(params, lr=0.1)
        set_gradients(params, 0)
        optimizer.step()
        again = torch.optim.AdamW(params, lr=0.1)
        again.load_state_dict(optimizer.state_dict())
        moment = again.state[params[0]]["exp_avg"]
        assert isinstance(moment, DTensor) and moment.mesh_layout is params[0].mesh_layout

    ranks(run)


@pytest.mark.parametrize("kind", ["plain", "of another layout"])
def test_an_optimizer_loads_whole_state_and_state_of_another_layout(kind):
    def run(mesh):
        ours, theirs = parameters(mesh), [nn.Parameter(value) for value in values(0)]
        optimizers = [torch.optim.AdamW(params, lr=0.1) for params in (ours, theirs)]
        set_gradients(theirs, 0)
        optimizers[1].step()
        saved = copy.deepcopy(optimizers[1].state_dict())
        if kind == "of another layout":
            for state in saved["state"].values():
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = sw.distribute_tensor(state[name], mesh, [Replicate()] * 2)
        optimizers[0].load_state_dict(saved)
        for mine, plain in zip(ours, theirs, strict=True):
            state = optimizers[0].state[mine]
            assert state["exp_avg"].mesh_layout is mine.mesh_layout and float(state["step"]) == 1
            assert unwrap(state["exp_avg"]).untyped_storage().nbytes() == unwrap(mine).nbytes
            mine.data.copy_(plain.detach())
        for params, optimizer in zip((ours, theirs), optimizers, strict=True):
            set_gradients(params, 1)
            optimizer.step()
        for mine, plain in zip(ours, theirs, strict=True):
            assert torch.allclose(mine.full_tensor(), plain, atol=1e-6)

    ranks(run)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("foreach", [False, True])
def test_clip_grad_norm_returns_the_true_norm_and_clips_by_it(norm_type, foreach):
    def run(mesh):
        ours = parameters(mesh)
        theirs = [nn.Parameter(value) for value in values(0)]
        norms = []
        for params in (ours, theirs):
            set_gradients(params, 0)
            norms.append(nn.utils.clip_grad_norm_(params, 0.5, norm_type, foreach=foreach))
        assert float(norms[0]) == pytest.approx(float(norms[1]), rel=1e-5)
        for mine, plain in zip(ours, theirs, strict=True):
            assert torch.allclose(mine.grad.full_tensor(), plain.grad, atol=1e-6)
        total = nn.utils.get_total_norm([p.grad for p in ours], norm_type, foreach=foreach)
        assert float(total) == pytest.approx(
            float(nn.utils.get_total_norm([p.grad for p in theirs], norm_type)), rel=1e-5
        )

    ranks(run)


def test_clip_grad_norm_over_parameters_on_two_meshes_of_the_same_ranks():
    def run(mesh):
        flat = sw.init_device_mesh("cpu", (4,))
        first = nn.Parameter(sw.distribute_tensor(torch.ones(5, 4), mesh, [Shard(0), Shard(1)]))
        second = nn.Parameter(sw.distribute_tensor(torch.ones(7), flat, [Shard(0)]))
        first.grad, second.grad = torch.ones(5, 4), torch.ones(7)
        norm = nn.utils.clip_grad_norm_([first, second], 1.0)
        assert float(norm) == pytest.approx(27**0.5)
        assert torch.allclose(second.grad.full_tensor(), torch.full((7,), 27**-0.5), atol=1e-6)

    ranks(run)


def test_clip_grad_norm_over_parameters_on_a_mesh_and_on_one_of_its_axes():
    def run(mesh):
        mesh = sw.init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        first = nn.Parameter(sw.distribute_tensor(torch.ones(7), mesh["dp"], [Shard(0)]))
        second = nn.Parameter(sw.distribute_tensor(torch.ones(5, 4), mesh, [Shard(0), Shard(1)]))
        first.grad, second.grad = torch.ones(7), torch.ones(5, 4)
        norm = nn.utils.clip_grad_norm_([first, second], 1.0)
        assert float(norm) == pytest.approx(27**0.5)
        for each in (first, second):
            expected = torch.full(each.shape, 27**-0.5)
            assert torch.allclose(each.grad.full_tensor(), expected, atol=1e-6)

    ranks(run)


def test_clip_grad_norm_takes_plain_parameters_beside_dtensors():
    def run(mesh, foreach):
        split = nn.Parameter(sw.distribute_tensor(torch.ones(5, 2), mesh, [Shard(0)]))
        plain = nn.Parameter(torch.ones(3))
        (split.sum() + plain.sum()).backward()
        norm = nn.utils.clip_grad_norm_([split, plain], 1.0, foreach=foreach)
        torch.testing.assert_close(norm.item(), 13**0.5)
        torch.testing.assert_close(plain.grad, torch.full((3,), 13**-0.5))
        torch.testing.assert_close(split.grad.full_tensor(), torch.full((5, 2), 13**-0.5))

    for foreach in (True, False):
        ranks(lambda mesh, foreach=foreach: run(mesh, foreach), 2, (2,))


def test_clip_grad_value_clips_every_shard():
    def run(mesh):
        params = parameters(mesh)
        set_gradients(params, 0)
        nn.utils.clip_grad_value_(params, 0.3)
        for parameter, value in zip(params, values(1), strict=True):
            assert torch.allclose(parameter.grad.full_tensor(), value.clamp(-0.3, 0.3))

    ranks(run)


def test_an_inf_on_one_rank_is_seen_by_all():
    def run(mesh):
        params = parameters(mesh)
        set_gradients(params, 0)
        if mesh.get_rank() == 3:
            with torch.no_grad():
                params[0].grad.to_local()[0, 0] = float("inf")
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        optimizer = torch.optim.SGD(params, lr=1.0)
        before = params[0].full_tensor().clone()
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(params[0].full_tensor(), before)
        assert scaler.get_scale() == 1.0

    ranks(run)


def test_a_scaled_loss_trains_as_in_one_process():
    def run(mesh):
        p = nn.Parameter(sw.distribute_tensor(torch.ones(5, 4), mesh, [Shard(0), Shard(1)]))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = torch.optim.SGD([p], lr=0.25)
        scaler.scale((p * p).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.allclose(p.full_tensor(), torch.full((5, 4), 0.5))

    ranks(run)


def test_a_loss_that_is_a_pending_sum_can_be_printed_and_compared():
    def run(mesh):
        p = nn.Parameter(sw.distribute_tensor(torch.ones(5, 4), mesh, [Shard(0), Shard(1)]))
        loss = p.sum()
        assert loss.placements == (Partial(), Partial())
        assert f"{loss:.1f}" == "20.0" and loss > 19 and max(loss, 3) is loss

    ranks(run)


# ---- a step runs on the shards themselves


def trained_once(mesh, **options):
    params = parameters(mesh)
    optimizer = torch.optim.AdamW(params, lr=0.1, **options)
    set_gradients(params, 0)
    optimizer.step()
    return params, optimizer


def test_a_pointwise_step_plans_nothing():
    def run(mesh):
        params, optimizer = trained_once(mesh)
        set_gradients(params, 1)
        before = sw.cache_info()
        optimizer.step()
        assert sw.cache_info() == before

    ranks(run)


def test_hooks_of_an_optimizer_see_dtensors():
    seen = []

    def run(mesh):
        params, optimizer = trained_once(mesh)
        optimizer.register_step_pre_hook(lambda o, a, k: seen.append(type(params[0])))
        optimizer.register_step_post_hook(lambda o, a, k: seen.append(type(params[0].grad)))
        set_gradients(params, 1)
        optimizer.step()

    ranks(run)
    assert seen == [DTensor] * 8


def test_a_step_that_fails_leaves_dtensors(monkeypatch):
    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    def run(mesh):
        params, optimizer = trained_once(mesh, foreach=False)
        set_gradients(params, 1)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "lerp_", fail)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
        state = optimizer.state[params[0]]
        kinds = {type(each) for each in (params[0], params[0].grad, state["exp_avg"])}
        assert kinds == {DTensor} and params[0].shape == (5, 4)

    ranks(run, 1, (1, 1))


def test_gradients_of_another_layout_go_through_dispatch():
    def run(mesh):
        p = nn.Parameter(sw.distribute_tensor(torch.ones(5, 4), mesh, [Shard(0), Replicate()]))
        p.grad = torch.ones(5, 4)
        optimizer = torch.optim.SGD([p], lr=0.5, momentum=0.9)
        optimizer.state[p]["momentum_buffer"] = sw.distribute_tensor(
            torch.ones(5, 4), mesh, [Replicate(), Shard(1)]
        )
        optimizer.step()
        assert torch.allclose(p.full_tensor(), torch.full((5, 4), 1 - 0.5 * 1.9))

    ranks(run)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
@pytest.mark.parametrize("how", ["shard_module", "parallelize_module", "distribute_module"])
def test_an_optimizer_made_before_its_model_was_sharded_is_refused(kind, how):
    def run():
        mesh = sw.init_device_mesh("cpu", (2,), ("tp",))
        model = nn.Sequential(nn.Linear(4, 4))
        early = kind(model.parameters(), lr=0.1)
        if how == "shard_module":
            sw.parallel.shard_module(model, mesh, {"0.weight": {"tp": Shard(0)}})
        elif how == "parallelize_module":
            sw.parallel.parallelize_module(model, mesh, {"0": sw.parallel.ColwiseParallel()})
        else:
            sw.distribute_module(model, mesh)

        def closure():
            loss = model(torch.ones(2, 4)).sum()
            loss.backward()
            return loss

        closure()
        with pytest.raises(
            sw.OptimizerError, match=r"weight as it was .* make the optimizer after"
        ):
            early.step(closure)
        kind(model.parameters(), lr=0.1).step(closure)

    sw.simulate(run, 2)
