"""Manual finalization: a backward is over when users say so; gradients are those of one process."""

from itertools import pairwise

import pytest
import torch
from support.fsdp_cases import (
    WIDTH,
    Net,
    assert_at_rest,
    assert_same,
    batch,
    by_layer,
    by_layer_apart,
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

from shardwise.fsdp import (
    GradientReductionHandle,
    MixedPrecisionPolicy,
    StateError,
    fully_shard,
    share_comm_ctx,
)


class Tied(nn.Module):
    """The first and the last of its layers have one weight."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.layers[2].weight = self.layers[0].weight

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Choice(nn.Module):
    """Of two layers a call uses one; all have both in one group."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList()
        self.both = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.unused = nn.Parameter(torch.ones(3))
        self.chosen = 0

    def forward(self, x):
        return self.both[self.chosen](x)


WAYS = [by_layer, by_layer_apart, in_one, replicated, hybrid]
EVERY_WAY = pytest.mark.parametrize("way", WAYS)


def refused(call, *parts):
    with pytest.raises(StateError) as caught:
        call()
    assert isinstance(caught.value, RuntimeError)  # as torch's
    for part in parts:
        assert part in str(caught.value)


def manual(way, mesh, kind=Net, **options):
    model = way(made(kind), mesh, **options)
    model.set_manual_backward_finalization(True)
    return model


def ended(model, async_op):
    handle = model.finalize_backward(async_op=async_op)
    assert isinstance(handle, GradientReductionHandle) if async_op else handle is None
    if handle is not None:
        handle.wait()
        handle.wait()  # nothing more happens


def accumulate(model, x, parts=2):
    """Several backwards, none of which reduces."""
    model.set_requires_gradient_sync(False)
    for part in x.chunk(parts):
        (mean_square(model, part) / parts).backward()
    model.set_requires_gradient_sync(True)


def trained(kind, steps=2):
    model = made(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        mean_square(model, batch(24)).backward()
        optimizer.step()
    return model


@EVERY_WAY
@pytest.mark.parametrize("kind", [Net, Tied])
@pytest.mark.parametrize("async_op", [False, True])
def test_what_several_backwards_have_left_is_reduced(way, kind, async_op):
    """On four ranks some have an empty piece of what has three rows."""

    def run(mesh):
        model = manual(way, mesh, kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        for _ in range(2):
            optimizer.zero_grad()
            accumulate(model, mine(batch(24), mesh))
            assert all(each.grad is None for each in model.parameters())
            ended(model, async_op)
            optimizer.step()
        assert_same(model, trained(kind))
        assert_at_rest(model)

    on_ranks(run, 4)


@EVERY_WAY
@pytest.mark.parametrize("async_op", [False, True])
def test_backwards_that_reduce_need_not_wait(way, async_op):
    """Whether they are called the last or not."""

    def run(mesh):
        model = manual(way, mesh)
        model.set_is_last_backward(True)
        for part in mine(batch(24), mesh).chunk(2):
            (mean_square(model, part) / 2).backward()
        queue = model._fsdp_group.schedule.reduce_queue
        assert queue.units_in_flight()
        ended(model, async_op)
        assert not queue.units_in_flight()
        plain = made()
        mean_square(plain, batch(24)).backward()
        assert_same(model, plain)
        assert_at_rest(model)

    on_ranks(run, 4)


def test_a_backward_in_two_parts_is_ended_once():
    """First the gradients of inputs, which the stage before waits for; then all others."""

    def run(mesh):
        model = manual(by_layer, mesh)
        x = mine(batch(), mesh).requires_grad_()
        model.set_requires_gradient_sync(False)
        loss = mean_square(model, x)
        (found,) = torch.autograd.grad(loss, [x], retain_graph=True)
        loss.backward()
        model.set_requires_gradient_sync(True)
        model.finalize_backward()
        plain, whole = made(), batch().requires_grad_()
        mean_square(plain, whole).backward()
        assert_same(model, plain)
        torch.testing.assert_close(found / mesh.size(), mine(whole.grad, mesh))

    on_ranks(run)


def test_ranks_may_have_used_different_parameters():
    def run(mesh):
        model = manual(in_one, mesh, Choice)
        model.chosen = mesh.get_rank() % 2
        accumulate(model, mine(batch(24), mesh))
        model.finalize_backward()
        plain = made(Choice)
        for rank, part in enumerate(batch(24).chunk(mesh.size())):
            plain.chosen = rank % 2
            (mean_square(plain, part) / mesh.size()).backward()
        assert_same(model, plain)
        assert model.unused.grad is None

    on_ranks(run, 3)


def test_gradients_wait_in_the_dtype_in_which_they_will_be_reduced():
    def run(mesh):
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        model = fully_shard(nn.Linear(1, 1, bias=False), mesh=mesh, mp_policy=policy)
        model.set_manual_backward_finalization(True)
        model.set_requires_gradient_sync(False)
        for value in (256.0, 1.0, 1.0):  # in halves 256 + 1 is 256
            model(torch.full((1, 1), value)).sum().backward()
        model.set_requires_gradient_sync(True)
        model.finalize_backward()
        return model.weight.grad.full_tensor().item()

    assert on_ranks(run) == [258.0, 258.0]


def test_memory_is_given_back_by_the_settings_of_the_end():
    def run(mesh):
        model = manual(by_layer, mesh)
        model.set_reshard_after_backward(False)
        mean_square(model, mine(batch(), mesh)).backward()
        units = model._fsdp_group.schedule.unit_set.units
        assert all(unit.gathered_bytes for unit in units)
        model.set_reshard_after_backward(True)
        model.finalize_backward()
        assert_at_rest(model)

    on_ranks(run)


def test_without_synchronisation_nothing_is_reduced():
    def run(mesh):
        model = manual(by_layer, mesh)
        accumulate(model, mine(batch(), mesh))
        model.set_requires_gradient_sync(False)
        model.finalize_backward()
        assert all(each.grad is None for each in model.parameters())
        model.set_requires_gradient_sync(True)
        model.finalize_backward()
        plain = made()
        mean_square(plain, batch()).backward()
        assert_same(model, plain)

    on_ranks(run)


def test_before_the_first_forward_nothing_happens():
    def run(mesh):
        model = by_layer(made(), mesh)
        assert model.finalize_backward() is None
        model.finalize_backward(async_op=True).wait()
        model.set_manual_backward_finalization(True)
        model.finalize_backward()
        with torch.no_grad():
            model(batch())
        model.finalize_backward()  # after no backward it is safe too
        assert_at_rest(model)

    on_ranks(run)


def test_the_mode_may_change_between_iterations():
    def run(mesh):
        model = by_layer(made(), mesh)
        x = mine(batch(), mesh)
        for step in range(4):
            model.set_manual_backward_finalization(step % 2 == 0)
            mean_square(model, x).backward()
            if step % 2 == 0:
                model.set_manual_backward_finalization(True)  # no change
                model.finalize_backward()
        plain = made()
        for _ in range(4):
            mean_square(plain, batch()).backward()
        assert_same(model, plain)

    on_ranks(run)


# ---- outstanding handles


def test_until_the_handle_is_waited_for_nothing_else_begins():
    def run(mesh):
        model = manual(by_layer, mesh)
        x = mine(batch(), mesh)
        other = mean_square(model, x)
        mean_square(model, x).backward()
        handle = model.finalize_backward(async_op=True)
        refused(lambda: model(x), "forward", "wait()")
        refused(lambda: model.layers[0](x), "forward", "wait()")
        refused(other.backward, "backward", "wait()")
        refused(model.finalize_backward, "finalize_backward", "wait()")
        refused(lambda: model.finalize_backward(async_op=True), "wait()")
        handle.wait()
        plain = made()
        mean_square(plain, batch()).backward()
        assert_same(model, plain)
        model(x)

    on_ranks(run)


def test_a_handle_is_worthless_after_a_reset():
    def run(mesh):
        model = manual(by_layer, mesh)
        x = mine(batch(), mesh)
        mean_square(model, x).backward()
        handle = model.finalize_backward(async_op=True)
        model.reset_iter_state()
        for _ in range(2):
            refused(handle.wait, "reset_iter_state")
        model.zero_grad()
        mean_square(model, x).backward()
        later = model.finalize_backward(async_op=True)
        refused(handle.wait, "reset_iter_state")
        later.wait()
        plain = made()
        mean_square(plain, batch()).backward()
        assert_same(model, plain)

    on_ranks(run)


def stages(mesh):
    """Two roots with one schedule."""
    models = [manual(by_layer, mesh) for _ in range(2)]
    share_comm_ctx(models)
    return models


def test_roots_that_share_a_schedule_end_each_by_itself():
    def run(mesh):
        first, second = stages(mesh)
        x = mine(batch(), mesh)
        for model in (first, second):
            accumulate(model, x)
        first.finalize_backward()
        assert all(each.grad is None for each in second.parameters())
        second.finalize_backward(async_op=True).wait()
        plain = made()
        mean_square(plain, batch()).backward()
        for model in (first, second):
            assert_same(model, plain)
            assert_at_rest(model)

    on_ranks(run)


def test_only_the_root_of_a_handle_resets_it():
    def run(mesh):
        first, second = stages(mesh)
        x = mine(batch(), mesh)
        accumulate(first, x)
        handle = first.finalize_backward(async_op=True)
        refused(lambda: second(x), "forward", "wait()")
        refused(second.finalize_backward, "wait()")
        refused(second.reset_iter_state, "reset_iter_state", "wait()")
        handle.wait()
        second.reset_iter_state()
        plain = made()
        mean_square(plain, batch()).backward()
        assert_same(first, plain)

    on_ranks(run)


def test_reductions_of_another_root_are_not_left_beside():
    def run(mesh):
        first, second = stages(mesh)
        x = mine(batch(), mesh)
        mean_square(second, x).backward()  # under way
        accumulate(first, x)
        refused(lambda: first.finalize_backward(async_op=True), "shares the schedule", "async_op")
        first.finalize_backward()
        second.finalize_backward()
        loss = mean_square(second, x)  # its backward is to come
        accumulate(first, x)
        loss.backward()
        second.finalize_backward()
        first.finalize_backward()
        plain = made()
        for _ in range(2):
            mean_square(plain, batch()).backward()
        assert_same(first, plain)
        assert_same(second, plain)

    on_ranks(run)


def test_a_root_that_ends_by_itself_may_share_a_schedule():
    def run(mesh):
        first, second = stages(mesh)
        second.set_manual_backward_finalization(False)
        x = mine(batch(), mesh)
        (mean_square(first, x) + mean_square(second, x)).backward()
        plain = made()
        mean_square(plain, batch()).backward()
        assert_same(second, plain)
        first.finalize_backward()
        assert_same(first, plain)

    on_ranks(run)


# ---- refusals


def test_only_the_root_is_asked():
    def run(mesh):
        model = by_layer(made(), mesh)
        layer = model.layers[1]
        for enabled in (True, False):
            refused(
                lambda enabled=enabled: layer.set_manual_backward_finalization(enabled),
                "set_manual_backward_finalization",
                "root",
            )
        model.set_manual_backward_finalization(True)
        mean_square(model, mine(batch(), mesh)).backward()
        refused(layer.finalize_backward, "finalize_backward", "layers.1", "root")
        model.finalize_backward()

    on_ranks(run)


def test_what_was_a_root_and_is_none_any_more_is_named_at_the_first_forward():
    def run(mesh):
        model = made()
        layer = fully_shard(model.layers[1], mesh=mesh)
        layer.set_manual_backward_finalization(True)
        shards = [each for each in model.layers if each is not layer]
        for each in (*shards, model):
            fully_shard(each, mesh=mesh)
        x = mine(batch(), mesh)
        for _ in range(2):
            refused(lambda: model(x), "layers.1", "root")
        layer.set_manual_backward_finalization(False)
        mean_square(model, x).backward()
        plain = made()
        mean_square(plain, batch()).backward()
        assert_same(model, plain)

    on_ranks(run)


def test_the_mode_does_not_change_within_a_backward():
    def run(mesh):
        model = by_layer(made(), mesh)
        x = mine(batch(), mesh).requires_grad_()
        seen = []

        def hook(_):
            model.set_manual_backward_finalization(False)  # no change
            refused(lambda: model.set_manual_backward_finalization(True), "cannot change", "during")
            refused(model.finalize_backward, "finalize_backward")
            seen.append(True)

        x.register_hook(hook)
        mean_square(model, x).backward()
        assert seen
        model.set_manual_backward_finalization(True)

    on_ranks(run)


def test_the_mode_does_not_change_before_the_end():
    def run(mesh):
        model = manual(by_layer, mesh)
        x = mine(batch(), mesh)
        mean_square(model, x).backward()
        refused(lambda: model.set_manual_backward_finalization(False), "cannot change")
        model.finalize_backward()
        model.set_manual_backward_finalization(False)
        model.set_is_last_backward(False)
        mean_square(model, x).backward()
        refused(lambda: model.set_manual_backward_finalization(True), "cannot change")
        refused(model.finalize_backward, "set_manual_backward_finalization(True)")
        model.set_is_last_backward(True)
        mean_square(model, x).backward()
        model.set_manual_backward_finalization(True)
        mean_square(model, x).backward()
        model.reset_iter_state()
        model.set_manual_backward_finalization(False)
        refused(model.finalize_backward, "set_manual_backward_finalization(True)")

    on_ranks(run)


def test_a_backward_under_way_is_not_ended():
    def run(mesh):
        model = manual(by_layer, mesh)
        x = mine(batch(), mesh).requires_grad_()
        seen = []

        def hook(_):
            refused(model.finalize_backward, "under way")
            seen.append(True)

        x.register_hook(hook)
        mean_square(model, x).backward()
        assert seen
        model.finalize_backward()

    on_ranks(run)


def test_after_an_exception_in_backward_a_reset_is_needed():
    def run(mesh):
        model = manual(by_layer, mesh)
        x = mine(batch(), mesh).requires_grad_()

        def fail(_):
            raise ZeroDivisionError

        handle = x.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            mean_square(model, x).backward()
        refused(model.finalize_backward, "reset_iter_state()")
        handle.remove()
        model.reset_iter_state()
        model.zero_grad()
        mean_square(model, x).backward()
        model.finalize_backward()
        plain = made()
        mean_square(plain, batch()).backward()
        assert_same(model, plain)

    on_ranks(run)


@pytest.mark.parametrize("way", [hybrid, replicated])
def test_gradients_must_be_summed_over_replicas(way):
    def run(mesh):
        model = manual(way, mesh)
        x = mine(batch(), mesh)
        accumulate(model, x)
        model.set_requires_all_reduce(False)
        refused(model.finalize_backward, "set_requires_all_reduce(True)")
        model.set_requires_all_reduce(True)
        model.finalize_backward()
        plain = made()
        mean_square(plain, batch()).backward()
        assert_same(model, plain)
        model.set_requires_all_reduce(False)
        mean_square(model, x).backward()
        model.set_requires_all_reduce(True)
        refused(model.finalize_backward, "reset_iter_state()")
        model.reset_iter_state()
        assert_same(model, plain)

    on_ranks(run, 4)


def test_a_copy_has_the_mode_and_no_backward():
    def run(mesh):
        import copy

        model = manual(by_layer, mesh)
        x = mine(batch(), mesh)
        mean_square(model, x).backward()
        other = copy.deepcopy(model)
        other.zero_grad()
        accumulate(other, x)
        other.finalize_backward()
        model.finalize_backward()
        plain = made()
        mean_square(plain, batch()).backward()
        assert_same(model, plain)
        assert_same(other, plain)

    on_ranks(run)


def test_checkpoints_and_prefetching_are_as_ever():
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Net):
        def forward(self, x):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return self.head(x)

    def run(mesh):
        model = manual(shard_all, mesh, Checkpointed)
        for before, after in pairwise(model.layers):
            before.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([before])
        for _ in range(2):
            model.zero_grad()
            accumulate(model, mine(batch(), mesh))
            model.finalize_backward()
        plain = made()
        mean_square(plain, batch()).backward()
        assert_same(model, plain)

    on_ranks(run)
