"""Dtypes of single parameters and of their gradients: as torch 2.15 has them, with any torch."""

import copy

import pytest
import torch
from support.fsdp_cases import (
    WIDTH,
    assert_same,
    batch,
    full,
    hybrid,
    in_one,
    made,
    mean_square,
    mine,
    on_ranks,
    replicated,
    shard_all,
)
from torch import nn

from shardwise.fsdp import FSDPError, MixedPrecisionPolicy, fully_shard

HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64
WAYS = pytest.mark.parametrize("way", [in_one, hybrid, replicated])


class Weights(nn.Module):
    """Two vectors of an odd length; their gradients are what each is multiplied with."""

    def __init__(self, dtype=SINGLE):
        super().__init__()
        self.layers = nn.ModuleList()
        self.first = nn.Parameter(torch.ones(3, dtype=dtype))
        self.second = nn.Parameter(torch.ones(3, dtype=dtype))
        self.seen = {}

    def forward(self, x):
        self.seen = {"first": self.first.dtype, "second": self.second.dtype, "x": x.dtype}
        return (self.first * x).sum() + (self.second * x).sum()


class Precise(torch.autograd.Function):
    """Its weight's gradient is wider than its weight."""

    @staticmethod
    def forward(ctx, weight, x):
        ctx.save_for_backward(x)
        return weight * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient.float() * x.float() * FINE, None


FINE = 1 + 2**-12  # in halves it is 1


class Fused(nn.Module):
    def __init__(self, dtype=SINGLE):
        super().__init__()
        self.layers = nn.ModuleList()
        self.weight = nn.Parameter(torch.ones(3, dtype=dtype))

    def forward(self, x):
        return Precise.apply(self.weight, x).sum()


# ---- param_dtype_override_fn


def only_first(parameter):
    """The second stays in its own dtype."""
    return parameter.dtype if getattr(parameter, "is_kept", False) else None


def overridden(mesh, way, **options):
    model = Weights()
    model.second.is_kept = True
    policy = MixedPrecisionPolicy(HALF, param_dtype_override_fn=only_first, **options)
    return way(model, mesh, mp_policy=policy)


@WAYS
def test_a_parameter_may_stay_in_its_own_dtype(way):
    def run(mesh):
        model = overridden(mesh, way)
        x = torch.full((3,), 1 + 2**-12)
        model(x).backward()
        # Inputs are cast all the same.
        assert model.seen == {"first": HALF, "second": SINGLE, "x": HALF}
        assert {each.dtype for each in model.parameters()} == {SINGLE}
        for each in model.parameters():
            assert full(each.grad).tolist() == [1.0, 1.0, 1.0] and each.grad.dtype is SINGLE

    on_ranks(run, 4)


def test_the_function_is_asked_once_for_each_parameter_before_anything_is_changed():
    asked = []

    def run(mesh):
        model = made()
        model.layers[1].linear.weight = model.layers[0].linear.weight  # tied: one parameter
        policy = MixedPrecisionPolicy(SINGLE, param_dtype_override_fn=asked.append)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        model(batch(12).float())
        model(batch(12).float())
        assert len(asked) == len(list(model.parameters()))
        assert all(type(each) is nn.Parameter for each in asked)

    on_ranks(run, 1)


def test_what_a_function_may_say():
    def run(mesh):
        for wanted in (None, HALF, SINGLE):
            policy = MixedPrecisionPolicy(HALF, param_dtype_override_fn=lambda _, it=wanted: it)
            model = fully_shard(Weights(), mesh=mesh, mp_policy=policy)
            model(torch.ones(3))
            assert model.seen["first"] is (wanted or HALF)
        for wanted in (torch.float16, "bfloat16", 3):
            model = Weights()
            policy = MixedPrecisionPolicy(HALF, param_dtype_override_fn=lambda _, it=wanted: it)
            with pytest.raises(FSDPError) as caught:
                fully_shard(model, mesh=mesh, mp_policy=policy)
            for part in ("param_dtype_override_fn", "first", "torch.bfloat16", repr(wanted)):
                assert part in str(caught.value)
            assert type(model.first) is nn.Parameter  # nothing was changed
        with pytest.raises(FSDPError, match="param_dtype_override_fn"):
            MixedPrecisionPolicy(param_dtype_override_fn=HALF)
        with pytest.raises(TypeError):
            MixedPrecisionPolicy(None, None, None, True, only_first)  # by its name only

    on_ranks(run)


def test_a_tied_parameter_has_one_dtype():
    def run(mesh):
        def tied(one, other):
            model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
            model[1].weight = model[0].weight
            for layer, wanted in zip(model, (one, other), strict=True):
                policy = MixedPrecisionPolicy(
                    HALF,
                    cast_forward_inputs=False,
                    param_dtype_override_fn=lambda _, it=wanted: it,
                )
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            return fully_shard(model, mesh=mesh)

        tied(SINGLE, SINGLE)(torch.ones(2, 4))
        with pytest.raises(FSDPError, match="param_dtype"):
            tied(SINGLE, None)(torch.ones(2, 4))

    on_ranks(run)


def test_extensions_get_the_policy_of_their_parameter():
    policies = []

    def before(shard, mesh, outer_size, outer_stride, module, mp_policy):
        policies.append(mp_policy)
        return (shard,), None

    def after(shard, gathered, metadata, param_dtype, *, out=None):
        if out is None:
            made = gathered[0].to(param_dtype, copy=True)
            return made, (made,)
        out.copy_(gathered[0])

    def run(mesh):
        model = Weights()
        model.second.is_kept = True
        for each in model.parameters():
            each.fsdp_pre_all_gather, each.fsdp_post_all_gather = before, after
        policy = MixedPrecisionPolicy(HALF, SINGLE, param_dtype_override_fn=only_first)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        model(torch.ones(3))
        assert model.seen["first"] is HALF and model.seen["second"] is SINGLE

    on_ranks(run)
    assert set(policies) == {
        MixedPrecisionPolicy(HALF, SINGLE),
        MixedPrecisionPolicy(SINGLE, SINGLE),
    }


# ---- what gradients are reduced and kept in


@WAYS
def test_sums_over_ranks_are_of_the_parameters_own_dtype(way):
    """In halves the mean of 1 and 1 / 256, over many ranks, would be lost."""

    def run(mesh):
        policy = MixedPrecisionPolicy(HALF)
        model = way(Weights(), mesh, mp_policy=policy)
        x = torch.full((3,), 256.0 if mesh.get_rank() == 0 else 1.0)
        model(x).backward()
        return full(model.first.grad).tolist()

    wanted = [(256.0 + 3) / 4] * 3
    assert on_ranks(run, 4) == [wanted] * 4


@WAYS
def test_the_old_meaning_is_there_on_demand(way):
    def run(mesh):
        policy = MixedPrecisionPolicy(HALF, HALF)
        model = way(Weights(), mesh, mp_policy=policy)
        x = torch.full((3,), 256.0 if mesh.get_rank() == 0 else 1.0)
        model(x).backward()
        return full(model.first.grad)[0].item()

    assert all(found != (256.0 + 3) / 4 for found in on_ranks(run, 4))


@WAYS
@pytest.mark.parametrize("grad_dtype", [HALF, DOUBLE])
@pytest.mark.parametrize("when", ["before", "after"])
def test_shards_of_gradients_have_the_dtype_that_was_set(way, grad_dtype, when):
    def run(mesh):
        model = Weights()
        if when == "before":
            model.first.grad_dtype = grad_dtype
        way(model, mesh)
        if when == "after":
            model.first.grad_dtype = grad_dtype
        for _ in range(2):
            model(torch.full((3,), 1.0 + mesh.get_rank())).backward()
        assert model.first.grad_dtype is grad_dtype
        assert model.first.grad.dtype is grad_dtype and model.second.grad.dtype is SINGLE
        for each in model.parameters():
            assert full(each.grad).tolist() == [5.0, 5.0, 5.0]

    on_ranks(run, 4)


def test_gradients_of_one_group_are_reduced_in_a_dtype_that_holds_all():
    """So the second is rounded once, at the end, as the first is not."""

    def run(mesh, second):
        model = Weights()
        model.first.grad_dtype, model.second.grad_dtype = HALF, second
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(HALF))
        model(torch.full((3,), 256.0 if mesh.get_rank() == 0 else 1.0)).backward()
        (unit,) = model._fsdp_group.units
        return unit.reduce_dtype, model.first.grad.dtype, full(model.second.grad).tolist()

    exact = [(256.0 + 3) / 4] * 3
    assert on_ranks(lambda mesh: run(mesh, SINGLE), 4) == [(SINGLE, HALF, exact)] * 4
    assert {found[0] for found in on_ranks(lambda mesh: run(mesh, HALF), 4)} == {HALF}


def test_a_backward_that_makes_wider_gradients_is_not_rounded():
    def run(mesh, **options):
        policy = MixedPrecisionPolicy(HALF, **options)
        model = in_one(Fused(), mesh, mp_policy=policy)
        for sync in (False, True):
            model.set_requires_gradient_sync(sync)
            model(torch.ones(3)).backward()
        return full(model.weight.grad).tolist()

    assert on_ranks(run) == [[2 * FINE] * 3] * 2
    assert on_ranks(lambda mesh: run(mesh, reduce_dtype=SINGLE)) == [[2 * FINE] * 3] * 2
    assert on_ranks(lambda mesh: run(mesh, reduce_dtype=HALF)) == [[2.0] * 3] * 2


@WAYS
@pytest.mark.parametrize(("kind", "wanted"), [(Weights, HALF), (Fused, SINGLE)])
def test_any_dtype_means_that_of_the_gradients_that_come(way, kind, wanted):
    def run(mesh):
        model = kind()
        for each in model.parameters():
            each.grad_dtype = None
        way(model, mesh, mp_policy=MixedPrecisionPolicy(HALF))
        for sync in (False, True, True):
            model.set_requires_gradient_sync(sync)
            model(torch.full((3,), 1.0 + mesh.get_rank() % 2)).backward()
        for each in model.parameters():
            assert each.grad_dtype is None and each.grad.dtype is wanted
            factor = FINE if kind is Fused else 1.0
            assert full(each.grad).tolist() == [4.5 * factor] * 3

    on_ranks(run, 4)


def test_partial_sums_of_any_dtype_are_not_rounded_by_later_ones():
    class Both(Fused):
        is_wide = True

        def forward(self, x):
            return super().forward(x) if self.is_wide else (self.weight * x).sum()

    def run(mesh):
        model = Both()
        model.weight.grad_dtype = None
        hybrid(model, mesh, mp_policy=MixedPrecisionPolicy(HALF))
        model.set_requires_all_reduce(False)
        model(torch.ones(3)).backward()
        model.set_requires_all_reduce(True)
        model.is_wide = False
        model(torch.ones(3)).backward()
        assert model.weight.grad.dtype is SINGLE
        assert full(model.weight.grad).tolist() == [1 + FINE] * 3

    on_ranks(run, 4)


def test_zeros_for_the_unused_need_a_dtype():
    def run(mesh):
        model = Weights()
        model.first.grad_dtype = None
        fully_shard(model, mesh=mesh)
        model.set_reduce_scatter_unused_params(True)
        loss = model(torch.ones(3))
        with pytest.raises(FSDPError) as caught:
            loss.backward()
        for part in ("set_reduce_scatter_unused_params", "first", "reduce_dtype"):
            assert part in str(caught.value)

        other = Weights()
        other.first.grad_dtype = None
        fully_shard(other, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=SINGLE))
        other.set_reduce_scatter_unused_params(True)
        (other(torch.ones(3)) * 0 + other.second.sum() * 0).backward()
        assert full(other.first.grad).tolist() == [0.0, 0.0, 0.0]

    on_ranks(run)


# ---- conversions


def test_what_was_set_survives_conversions_and_copies():
    def run(mesh):
        model = Weights()
        model.first.grad_dtype = HALF
        fully_shard(model, mesh=mesh)
        model(torch.ones(3)).backward()
        model.double()
        assert model.first.dtype is DOUBLE and model.first.grad_dtype is HALF
        assert model.first.grad.dtype is HALF and full(model.first.grad).tolist() == [1.0] * 3
        assert model.second.grad.dtype is DOUBLE  # one that was not set follows
        other = copy.deepcopy(model)
        for each in (model, other):
            each.zero_grad()
            each(torch.ones(3, dtype=DOUBLE)).backward()
            assert each.first.grad.dtype is HALF and each.second.grad.dtype is DOUBLE

    on_ranks(run)


def test_what_was_set_survives_copies_without_gradients():
    def run(mesh):
        model = Weights()
        model.first.grad_dtype = HALF
        fully_shard(model, mesh=mesh)
        other = copy.deepcopy(model)
        other(torch.ones(3)).backward()
        assert other.first.grad.dtype is HALF and other.second.grad.dtype is SINGLE

    on_ranks(run)


def test_what_was_set_survives_conversions_that_make_new_parameters():
    def run(mesh):
        model = Weights()
        model.first.grad_dtype = HALF
        fully_shard(model, mesh=mesh)
        model(torch.ones(3)).backward()
        before = model.first
        model.double()
        assert model.first is not before and model.first.grad_dtype is HALF
        assert model.first.grad.dtype is HALF and full(model.first.grad).tolist() == [1.0] * 3

    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        on_ranks(run)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


@pytest.mark.parametrize("has_run", [False, True])
def test_a_parameter_from_a_state_dict_inherits_what_was_set(has_run):
    def run(mesh):
        model = nn.Sequential(Weights(), Weights())
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        model[0].first.grad_dtype = HALF
        model[1].second.grad_dtype = None
        if has_run:
            model[0](torch.ones(3))
        values = {name: torch.full((3,), 2.0) for name in model.state_dict()}
        model.load_state_dict(values, assign=True)
        (model[0](torch.ones(3)) + model[1](torch.ones(3))).backward()
        assert model[0].first.grad_dtype is HALF and model[0].first.grad.dtype is HALF
        assert model[1].second.grad_dtype is None
        assert full(model[0].first).tolist() == [2.0] * 3

    on_ranks(run)


def test_the_dtype_of_parameters_may_change_before_they_are_first_gathered():
    def run(mesh):
        model = fully_shard(Weights(), mesh=mesh, mp_policy=MixedPrecisionPolicy(HALF))
        model.double()
        x = torch.full((3,), 256.0 if mesh.get_rank() == 0 else 1.0)
        model(x).backward()
        assert model.seen["first"] is HALF and model.first.grad.dtype is DOUBLE
        return full(model.first.grad).tolist()

    assert on_ranks(run) == [[128.5] * 3] * 2


# ---- with training


@pytest.mark.parametrize("sync", ["every", "last"])
def test_training_is_that_of_one_process_with_parameters_of_two_dtypes(sync):
    """Norms stay in double precision; all else is computed in single."""

    def keep_norms(parameter):
        return parameter.dtype if getattr(parameter, "is_norm", False) else None

    def cast(model):
        """What the ranks do, in one process."""
        for layer in model.layers:
            layer.linear.float()
        model.head.float()
        return model

    class Mixed(nn.Module):
        """Casts where it changes between the two."""

        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(2))
            self.head = nn.Linear(WIDTH, 3)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return self.head(x.to(self.head.weight.dtype)).double()

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            x = self.norm(x.double())
            return torch.tanh(self.linear(x.to(self.linear.weight.dtype)))

    plain = cast(made(Mixed))
    mean_square(plain, batch(12)).backward()

    def run(mesh):
        model = made(Mixed)
        for layer in model.layers:
            for each in layer.norm.parameters():
                each.is_norm = True
        policy = MixedPrecisionPolicy(
            SINGLE, cast_forward_inputs=False, param_dtype_override_fn=keep_norms
        )
        shard_all(model, mesh, mp_policy=policy)
        parts = mine(batch(12), mesh).chunk(2)
        for part in parts:
            model.set_requires_gradient_sync(sync == "every" or part is parts[-1])
            (mean_square(model, part) / 2).backward()
        for (name, each), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert each.grad.dtype is DOUBLE
            torch.testing.assert_close(
                full(each.grad), wanted.grad.double(), rtol=1e-4, atol=1e-6, msg=name
            )

    on_ranks(run)


def test_without_a_policy_nothing_is_rounded():
    def run(mesh):
        model = shard_all(made(), mesh)
        mean_square(model, mine(batch(12), mesh)).backward()
        plain = made()
        mean_square(plain, batch(12)).backward()
        assert_same(model, plain)

    on_ranks(run, 3)
