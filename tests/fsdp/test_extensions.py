"""Gather extensions: parameters that define the tensors to gather for them."""

import copy
import math
from functools import partial

import pytest
import torch
from support.fsdp_cases import (
    assert_at_rest,
    assert_same,
    batch,
    full,
    made,
    mean_square,
    mine,
    on_ranks,
    shard_all,
    train,
)
from support.fsdp_extensions import (
    Same,
    SameShort,
    Within,
    as_kind,
    copied_after,
    extend,
    quantise,
    quantised,
    quantised_after,
    quantised_before,
    same_as_quantised,
    same_before,
    same_before_short,
    train_quantised,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import Shard
from shardwise.fsdp import (
    AllGather,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    replicate,
)
from shardwise.parallel import shard_module

# ---- they train


EXTENDED = {
    "kept where it was gathered": lambda model: extend(model, same_before),
    "copied": lambda model: extend(model, same_before, copied_after),
    "short signature": lambda model: extend(model, same_before_short),
    "class": lambda model: as_kind(model, lambda plain: plain.as_subclass(Same)),
    "class, short signature": lambda model: as_kind(
        model, lambda plain: plain.as_subclass(SameShort)
    ),
    "wrapper class": lambda model: as_kind(model, lambda plain: Within(plain, "a note")),
}


@pytest.mark.parametrize(
    ("extended", "count"), [*((kind, 2) for kind in EXTENDED), ("copied", 3), ("wrapper class", 3)]
)
def test_an_extension_that_changes_nothing_trains_as_none(extended, count):
    plain = train(made(), batch(12), steps=4)

    def run(mesh):
        model = shard_all(EXTENDED[extended](made()), mesh)
        train(model, mine(batch(12), mesh), steps=4)
        assert_same(model, plain)
        assert_at_rest(model)

    on_ranks(run, count)


def test_it_is_exactly_what_is_trained_without():
    def run(mesh):
        ours, theirs = extend(made(), same_before), made()
        for model in (ours, theirs):
            train(shard_all(model, mesh), mine(batch(), mesh), steps=10)
        for mine_, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(mine_.to_local(), other.to_local())

    on_ranks(run)


@pytest.mark.parametrize("kept", [False, True])
def test_quantised_gathers_train_as_one_process_that_quantises(kept):
    wanted = train_quantised(made(), batch(), 4)
    plain = train(made(), batch(), 4)
    assert max((wanted[name] - each).abs().max() for name, each in plain.named_parameters()) > 1e-4

    def run(mesh):
        model = shard_all(quantise(made()), mesh, reshard_after_forward=not kept)
        train(model, mine(batch(), mesh), steps=4)
        for name, each in model.named_parameters():
            torch.testing.assert_close(full(each), wanted[name], rtol=1e-10, atol=1e-12)
        assert_at_rest(model)

    on_ranks(run)


def test_what_travels_is_what_the_extension_sends():
    def run(mesh, is_quantised):
        model = nn.Linear(256, 64, bias=False)
        if is_quantised:
            quantise(model)
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
        for _ in range(2):
            model(torch.ones(1, 256)).sum().backward()

    def gathered(is_quantised):
        events = []
        with sw.listen(events.append):
            on_ranks(lambda mesh: run(mesh, is_quantised))
        return [event.bytes for event in events if event.kind == "all_gather" and not event.rank]

    rows, columns = 32, 256
    assert gathered(False) == [rows * columns * 4 + 64] * 4  # with a header
    assert gathered(True) == [rows * columns + rows * 4 + 2] * 4  # with scales, and another


# ---- what they are given


def test_what_extensions_are_given():
    def run():
        given = []

        def before(*args):
            given.append(args)
            shard, *_, policy = args
            return (shard.to(policy.param_dtype), torch.tensor(float(len(shard)))), "metadata"

        def after(*args, out=None):
            given.append((*args, args[1][1].tolist(), out))
            return (args[1][0], ()) if out is None else None

        mesh = sw.init_device_mesh("cpu", (2, 2), ("replicate", "shard"))
        model = extend(nn.Linear(4, 5, bias=False), before, after)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        model(torch.ones(2, 4)).sum().backward()

        own = model.weight.to_local()
        for shard, *rest in (given[0], given[2]):
            assert type(shard) is torch.Tensor and torch.equal(shard, own)
            assert rest == [mesh["shard"], torch.Size([5, 4]), (4, 1), model, policy]
        whole = full(model.weight).bfloat16()
        for shard, (data, _), metadata, dtype, lengths, _ in (given[1], given[3]):
            assert type(shard) is torch.Tensor and torch.equal(shard, own)
            # Exactly joined, without padding: of ranks with 3 rows and with 2.
            assert data.shape == (5, 4) and lengths == [3.0, 2.0]
            assert (metadata, dtype, data.dtype) == ("metadata", torch.bfloat16, whole.dtype)
        assert given[1][-1] is None
        assert type(given[3][-1]) is nn.Parameter and given[3][-1].shape == (5, 4)
        assert torch.equal(full(model.weight.grad), torch.full((5, 4), 2.0))

    sw.simulate(run, 4)


class Copied(Within):
    """What is in it is a copy of what was gathered."""

    def fsdp_post_all_gather(self, gathered, metadata, param_dtype, *, out=None):
        if out is None:
            inner = gathered[0].clone()
            return Within(inner, metadata), (inner,)
        out.inner.copy_(gathered[0])
        return None

    @staticmethod
    def __tensor_unflatten__(parts, note, outer_size, outer_stride):
        return Copied(parts["inner"], note)


class Released(Copied):
    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self):
        return True

    @staticmethod
    def __tensor_unflatten__(parts, note, outer_size, outer_stride):
        return Released(parts["inner"], note)


def test_what_was_gathered_is_released_if_the_parameter_does_not_need_it():
    plain = train(made(), batch(12), steps=4)

    def run(mesh, kind):
        model = as_kind(made(), lambda each: kind(each, "a note"))
        shard_all(model, mesh, reshard_after_forward=False)
        train(model, mine(batch(12), mesh), steps=4)
        assert_same(model, plain)
        assert_at_rest(model)
        mean_square(model, mine(batch(12), mesh))
        return sum(unit.gathered_bytes for unit in model._fsdp_group.schedule.unit_set.units)

    for kept, released in zip(
        on_ranks(lambda mesh: run(mesh, Copied)),
        on_ranks(lambda mesh: run(mesh, Released)),
        strict=True,
    ):
        matrices = sum(each.nbytes for each in made().parameters() if each.dim() == 2)
        assert kept - released == matrices


def test_the_parameter_is_made_once_and_then_filled():
    outs = []

    def after(shard, gathered, metadata, param_dtype, *, out=None):
        outs.append(out)
        return copied_after(shard, gathered, metadata, param_dtype, out=out)

    def run(mesh):
        model = extend(nn.Linear(4, 4), same_before, after)
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
        seen = []
        model.register_forward_hook(lambda module, *_: seen.append(module.weight))
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
        assert seen[0] is seen[1]
        return seen[0]

    whole, _ = on_ranks(run)
    assert sum(out is None for out in outs) == 2
    assert sum(out is whole for out in outs) == 3


# ---- with everything else


def check_quantised(shard, mesh_shape=(2,), names=("dp",), loss=mean_square):
    """A model, sharded in some way, trains as one process that quantises."""

    def run():
        mesh = sw.init_device_mesh("cpu", mesh_shape, names)
        data = mesh["dp"] if "tp" in names else mesh
        place = data.mesh.flatten().tolist().index(mesh.get_rank())
        model = quantise(made()) if "tp" not in names else made()
        shard(model, mesh)
        train(model, batch().chunk(data.size())[place], loss=loss)
        assert_at_rest(model)
        return {name: full(each) for name, each in model.named_parameters()}

    for found in sw.simulate(run, math.prod(mesh_shape)):
        same_as_quantised(found)


def test_on_two_axes():
    check_quantised(shard_all, (2, 2), ("replicate", "shard"))


def test_where_nothing_is_split():
    check_quantised(lambda model, mesh: replicate(model, mesh=mesh))


def test_where_every_rank_holds_all():
    check_quantised(partial(shard_all, shard_placement_fn=lambda each: sw.Replicate()))


def test_with_tensor_parallelism():
    def both(model, mesh):
        shard_module(model, mesh["tp"], {"layers.*.linear.*": {"tp": Shard(0)}})
        shard_all(quantise(model), mesh["dp"])

    check_quantised(both, (2, 2), ("dp", "tp"))


def test_split_over_fewer_ranks_between_forward_and_backward():
    check_quantised(partial(shard_all, reshard_after_forward=2), (4,))


def test_with_shards_on_the_cpu():
    check_quantised(partial(shard_all, offload_policy=CPUOffloadPolicy(pin_memory=False)))


def test_with_checkpoints():
    def loss(model, x):
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return model.head(x).square().mean()

    def shard(model, mesh):
        fully_shard(model.head, mesh=mesh)
        shard_all(model, mesh)

    check_quantised(shard, loss=loss)


class Recorded(AllGather):
    """A gather of the user's, which notes what it sends."""

    def __init__(self):
        self.sent = []

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.sent.append((input_tensor.dtype, len(input_tensor)))
        group.all_gather_into(input_tensor, output_tensor.view(group.size, -1))


def test_with_a_custom_gather():
    def run(mesh):
        model = quantise(nn.Linear(4, 6, bias=False))
        gather = Recorded()
        fully_shard(model, mesh=mesh)
        model.set_custom_all_gather(gather)
        whole = full(model.weight)
        data, scale = quantised(whole)
        assert torch.equal(model(torch.eye(4)), (data * scale[:, None]).T)
        return gather.sent

    assert on_ranks(run) == [[(torch.uint8, 2 + 3 * 4 + 3 * 4)]] * 2


@pytest.mark.parametrize("sync", [False, True])
def test_accumulated_gradients(sync):
    def run(mesh, count):
        model = shard_all(quantise(made()), mesh)
        for index, part in enumerate(mine(batch(), mesh).chunk(count)):
            model.set_requires_gradient_sync(sync or index == count - 1)
            (mean_square(model, part) / count).backward()
        return [full(each.grad) for each in model.parameters()]

    at_once, in_parts = (on_ranks(lambda mesh: run(mesh, count))[0] for count in (1, 2))  # noqa: B023
    torch.testing.assert_close(in_parts, at_once, rtol=1e-10, atol=1e-12)


def test_copies_state_dicts_and_evaluation():
    def run(mesh):
        model = shard_all(quantise(made()), mesh)
        train(model, mine(batch(), mesh))
        twin = copy.deepcopy(model)
        for state in (model.state_dict(), twin.state_dict()):
            assert all(type(each) is sw.DTensor for each in state.values())
        with torch.inference_mode():
            expected = model(batch())
            assert torch.equal(twin(batch()), expected)
        fresh = shard_all(quantise(made()), mesh)
        with torch.inference_mode():
            fresh(batch())
        fresh.load_state_dict(model.state_dict(), assign=True)
        train(fresh, mine(batch(), mesh), steps=1)
        train(twin, mine(batch(), mesh), steps=1)
        for one, other in zip(fresh.parameters(), twin.parameters(), strict=True):
            assert torch.equal(one.to_local(), other.to_local())
        assert_at_rest(twin)

    on_ranks(run)


def test_memory_is_given_back_while_others_compute():
    """One layer at a time, beside the one that comes next."""

    def run(mesh):
        model = shard_all(quantise(made()), mesh)
        groups = [layer._fsdp_group for layer in model.layers]
        most = []

        def count(*_):
            most.append(sum(bool(unit.gathered_bytes) for group in groups for unit in group.units))

        for layer in model.layers:
            layer.linear.register_forward_hook(count)
            layer.linear.register_full_backward_hook(count)
        mean_square(model, mine(batch(), mesh)).backward()
        return most

    for most in on_ranks(run):
        assert most == [2] * 6  # the matrix, and the rest of the layer


@pytest.mark.parametrize("when", ["made", "filled"])
def test_an_exception_in_an_extension_leaves_the_model_usable(when):
    def run(mesh):
        fails = [True]

        def after(shard, gathered, metadata, param_dtype, *, out=None):
            if fails and (out is None) == (when == "made"):
                raise KeyError("once")
            return quantised_after(shard, gathered, metadata, param_dtype, out=out)

        model = shard_all(extend(made(), quantised_before, after), mesh)
        if when == "filled":
            model(batch())
            model.reshard()
        with pytest.raises(KeyError, match="once"):
            model(batch())
        assert_at_rest(model)
        fails.clear()
        train(model, mine(batch(), mesh))
        return {name: full(each) for name, each in model.named_parameters()}

    same_as_quantised(on_ranks(run)[0])
