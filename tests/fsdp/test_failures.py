"""Exceptions in forward and backward, after which training goes on; and what is refused."""

import pytest
import torch
from support.fsdp_cases import (
    Block,
    Net,
    assert_at_rest,
    assert_close,
    assert_same,
    batch,
    by_layer,
    full,
    in_one,
    made,
    mean_square,
    mine,
    on_ranks,
    replicated,
    shard_all,
    train,
)

import shardwise as sw
from shardwise.fsdp import StateError


class BrokenError(RuntimeError):
    """What tests raise."""


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise BrokenError("in backward")


class Fragile(Net):
    """Fails after its second layer, in forward or in backward, or in a recomputation."""

    fails = ""

    def forward(self, x):
        for at, layer in enumerate(self.layers):
            x = layer(x)
            if at == 1 and self.fails == "forward":
                raise BrokenError("in forward")
            if at == 1 and self.fails == "backward":
                x = Breaks.apply(x)
        return self.head(x)


FAILURES = pytest.mark.parametrize("fails", ["forward", "backward"])


def fail(model, x, fails):
    model.fails = fails
    with pytest.raises(BrokenError):
        mean_square(model, x).backward()
    model.fails = ""


@FAILURES
@pytest.mark.parametrize("shard", [by_layer, in_one, replicated])
def test_training_goes_on_after_an_exception(fails, shard):
    plain = train(made(), batch())

    def run(mesh):
        model = shard(made(Fragile), mesh)
        x = mine(batch(), mesh)
        fail(model, x, fails)  # at the very first
        assert all(type(each) is sw.DTensor for each in model.parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        for _ in range(3):
            fail(model, x, fails)
            assert all(type(each) is sw.DTensor for each in model.parameters())
            optimizer.zero_grad()
            mean_square(model, x).backward()
            optimizer.step()
        assert_same(model, plain)
        assert_at_rest(model)

    on_ranks(run)


@FAILURES
def test_an_exception_in_evaluation_leaves_nothing_gathered(fails):
    def run(mesh):
        model = by_layer(made(Fragile), mesh)
        fail(model, batch(), fails)
        if fails == "backward":
            model.reset_iter_state()
        assert_at_rest(model)
        with torch.no_grad():
            assert_close(model(batch()), made()(batch()))

    on_ranks(run)


@FAILURES
def test_gradients_that_the_shards_had_before_an_exception_stay(fails):
    plain = made()
    mean_square(plain, batch()).backward()
    mean_square(plain, 2 * batch()).backward()

    def run(mesh):
        model = by_layer(made(Fragile), mesh)
        x = mine(batch(), mesh)
        mean_square(model, x).backward()
        kept = [full(each.grad) for each in model.layers[0].parameters()]
        fail(model, x, fails)
        for parameter, gradient in zip(model.layers[0].parameters(), kept, strict=True):
            assert_close(full(parameter.grad), gradient)
        if fails == "forward":
            mean_square(model, 2 * x).backward()
            assert_same(model, plain)

    on_ranks(run)


def test_a_graph_made_before_an_exception_can_still_be_run():
    plain = made()
    mean_square(plain, batch()).backward()

    def run(mesh):
        model = by_layer(made(Fragile), mesh)
        x = mine(batch(), mesh)
        loss = mean_square(model, x)
        fail(model, x, "forward")
        loss.backward()
        assert_same(model, plain)
        assert_at_rest(model)
        loss = mean_square(model, x)
        fail(model, x, "backward")
        model.zero_grad()
        loss.backward()
        assert_same(model, plain)
        assert_at_rest(model)

    on_ranks(run)


def test_a_microbatch_whose_forward_fails_is_left_out():
    plain = made()
    for scale in (1, 2, 4):
        mean_square(plain, scale * batch()).backward()

    def run(mesh):
        model = by_layer(made(Fragile), mesh)
        x = mine(batch(), mesh)
        model.set_requires_gradient_sync(False)
        mean_square(model, x).backward()
        fail(model, 3 * x, "forward")
        model.set_requires_gradient_sync(True)
        model.set_is_last_backward(False)
        mean_square(model, 2 * x).backward()
        fail(model, 3 * x, "forward")
        model.set_is_last_backward(True)
        mean_square(model, 4 * x).backward()
        assert_same(model, plain)

    on_ranks(run)


@pytest.mark.parametrize("trains", [True, False])
def test_an_exception_that_the_model_handles(trains):
    class Handles(Net):
        def forward(self, x):
            try:
                return self.layers[0](x[:, :2])  # of the wrong size
            except RuntimeError:
                return self.head(self.layers[2](x))

    plain = made(Handles)

    def run(mesh):
        model = by_layer(made(Handles), mesh)
        with torch.set_grad_enabled(trains):
            assert_close(model(batch()), plain(batch()))
        if trains:
            train(model, mine(batch(), mesh))
            assert_same(model, train(made(Handles), batch()))
        assert_at_rest(model)

    on_ranks(run)


def test_an_exception_in_a_recomputed_block():
    from torch.utils.checkpoint import checkpoint

    class Fails(Block):
        count = 0

        def forward(self, x):
            self.count += 1
            if self.count == 2:
                raise BrokenError("computed anew")
            return super().forward(x)

    class Recomputed(Net):
        def __init__(self):
            super().__init__(1)
            self.layers.append(Fails())

        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return self.head(x)

    def run(mesh):
        model = by_layer(made(Recomputed), mesh)
        x = mine(batch(), mesh)
        with pytest.raises(BrokenError):
            mean_square(model, x).backward()
        model.zero_grad()
        train(model, x)
        assert_same(model, expected)
        assert_at_rest(model)

    expected = made(Recomputed)
    with pytest.raises(BrokenError):
        mean_square(expected, batch()).backward()
    expected.zero_grad()
    train(expected, batch())
    on_ranks(run)


def test_no_accumulated_gradient_survives_zero_grad():
    plain = made()
    mean_square(plain, batch()).backward()

    def run(mesh):
        model = by_layer(made(), mesh)
        x = mine(batch(), mesh)
        model.set_requires_gradient_sync(False)
        mean_square(model, 3 * x).backward()
        model.zero_grad()
        model.set_requires_gradient_sync(True)
        mean_square(model, x).backward()
        assert_same(model, plain)

    on_ranks(run)


def test_what_cannot_be_done_now_is_refused_by_name():
    class Reshards(Net):
        def forward(self, x):
            self.layers[0](x)
            self.reshard()

    class ReshardsInside(Block):
        def forward(self, x):
            self.register = self.linear.weight
            with pytest.raises(StateError, match=r"reshard: layers\.0 is in FORWARD"):
                self.reshard()
            return super().forward(x)

    class Holds(Net):
        def __init__(self):
            super().__init__(0)
            self.layers.append(ReshardsInside())

    def run(mesh):
        with pytest.raises(StateError, match=r"reshard: FSDPReshards is in FORWARD"):
            shard_all(made(Reshards), mesh)(batch())
        model = shard_all(made(Holds), mesh)
        output = model(batch())

        def refused(_):
            with pytest.raises(StateError, match="is in PRE_BACKWARD"):
                model.reshard()

        output.register_hook(refused)
        output.sum().backward()

    on_ranks(run)


@pytest.mark.parametrize("shard", [by_layer, replicated])
def test_tensors_in_place_of_parameters_are_refused_as_they_would_get_no_gradient(shard):
    plain = train(made(), batch())

    def run(mesh):
        model = shard(made(), mesh)
        others = {name: parameter.detach() for name, parameter in model.named_parameters()}
        with pytest.raises(
            StateError, match=r"weight: expected a parameter, got .*functional_call"
        ):
            torch.func.functional_call(model, others, (batch(),))
        assert_same(train(model, mine(batch(), mesh)), plain)

    on_ranks(run)


def test_a_backward_after_its_weights_were_changed_raises_as_in_one_process():
    def train(model, x):
        loss = mean_square(model, x)
        loss.backward(retain_graph=True)
        with torch.no_grad():
            for each in model.parameters():
                each.mul_(0.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    train(made(), batch())
    on_ranks(lambda mesh: train(shard_all(made(), mesh), mine(batch(), mesh)))
