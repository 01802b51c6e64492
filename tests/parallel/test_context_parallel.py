"""Context parallelism: a part of the sequence on each rank, attention over all of it."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as imported_before
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.comm import listen
from shardwise.parallel import PlanError, parallelize_module
from shardwise.parallel.context_parallel import (
    ContextParallel,
    context_parallel,
    context_parallel_shard,
    context_parallel_unshard,
    enable_context_parallel_dispatcher,
)
from shardwise.parallel.sequence_split import (
    HeadTailLoadBalancer,
    PTRRLoadBalancer,
    SequenceSplit,
    options,
    set_rotate_method,
)

SDPA = ContextParallel.AttentionType.SDPA


@pytest.fixture(autouse=True)
def _options():
    before = copy.copy(vars(options))
    yield
    vars(options).update(before)


def qkv(length, heads=4, kv_heads=None, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)

    def drawn(count):
        return torch.randn(2, count, length, 8, generator=generator, dtype=dtype)

    return drawn(heads), drawn(kv_heads or heads), drawn(kv_heads or heads)


def expected_of(tensors, **options):
    """Output and gradients of one process."""
    leaves = [each.clone().requires_grad_() for each in tensors]
    out = F.scaled_dot_product_attention(*leaves, **options)
    (out * out.sin()).sum().backward()
    return [out.detach(), *(each.grad for each in leaves)]


def found_with(tensors, ranks, **options):
    """The same on ranks that share the sequence, gathered."""

    def run():
        mesh = sw.init_device_mesh("cpu", (ranks,), ("cp",))
        buffers = [each.clone() for each in tensors]
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2]):
            leaves = [each.clone().requires_grad_() for each in buffers]
            out = F.scaled_dot_product_attention(*leaves, **options)
            (out * out.sin()).sum().backward()
            parts = [out.detach(), *(each.grad for each in leaves)]
            whole = context_parallel_unshard(mesh, parts, [2] * 4)
        assert all(map(torch.equal, buffers, tensors)), "restored"
        return whole

    return sw.simulate(run, ranks)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("length", [16, 24, 13, 6, 3])
def test_attention_and_gradients_are_those_of_one_process(ranks, is_causal, length):
    tensors = qkv(length)
    expected = expected_of(tensors, is_causal=is_causal)
    for found in found_with(tensors, ranks, is_causal=is_causal):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("ranks", [2, 4])
def test_fewer_heads_of_keys_and_a_scale(ranks):
    tensors = qkv(16, heads=4, kv_heads=2)
    options = {"is_causal": True, "enable_gqa": True, "scale": 0.3}
    expected = expected_of(tensors, **options)
    for found in found_with(tensors, ranks, **options):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


def test_bfloat16_is_as_exact_as_on_one_process():
    tensors = qkv(32, dtype=torch.bfloat16)
    exact = expected_of([each.double() for each in tensors], is_causal=True)
    alone = expected_of(tensors, is_causal=True)
    for found in found_with(tensors, 4, is_causal=True):
        for one, plain, right in zip(found, alone, exact, strict=True):
            error = (plain - right).abs().max()
            assert (one - right).abs().max() <= 2 * error + 1e-3


def test_each_rank_computes_as_much_of_the_causal_mask():
    def run():
        mesh = sw.init_device_mesh("cpu", (4,))
        split = SequenceSplit(mesh, 16, is_balanced=True)
        return split.own_ranges, sum((stop - start) * stop for start, stop in split.own_ranges)

    found = sw.simulate(run, 4)
    assert [ranges for ranges, _ in found] == [
        [(0, 2), (14, 16)],
        [(2, 4), (12, 14)],
        [(4, 6), (10, 12)],
        [(6, 8), (8, 10)],
    ]
    assert len({work for _, work in found}) == 1


def test_keys_and_values_are_gathered_and_their_gradients_scattered():
    def run():
        mesh = sw.init_device_mesh("cpu", (2,))
        x = torch.ones(4, 8, 64, 64)
        events = []
        with (
            listen(events.append),
            context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]),
        ):
            leaves = [x.clone().requires_grad_() for _ in range(3)]
            F.scaled_dot_product_attention(*leaves, is_causal=True).sum().backward()
        return [event.kind for event in events if event.rank == mesh.get_rank()]

    assert sw.simulate(run, 2)[0] == ["all_gather"] * 2 + ["reduce_scatter"] * 2


class Block(nn.Module):
    """Attention with rotary positions, as a decoder has it."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)
        self.inner = Inner()

    def forward(self, x, angles):
        parts = self.project(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        query, key, value = parts
        turned = [turn(each, angles) for each in (query, key)]
        attended = self.inner(*turned, value)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Inner(nn.Module):
    def forward(self, query, key, value):
        return imported_before(query, key, value, is_causal=True)


def turn(x, angles):
    one, other = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([one * cos - other * sin, one * sin + other * cos], -1)


def model():
    torch.manual_seed(0)
    return nn.ModuleList([Block().double(), Block().double()])


def run_model(blocks, x, angles, recompute=False):
    for block in blocks:
        x = checkpoint(block, x, angles, use_reentrant=False) if recompute else block(x, angles)
    return x


def batch(length=16):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, length, 16, generator=generator, dtype=torch.float64)
    labels = torch.randn(2, length, 16, generator=generator, dtype=torch.float64)
    # positional embeddings of the longest sequence, as models keep them
    angles = torch.arange(length + 4, dtype=torch.float64)[:, None] * torch.tensor(
        [0.1, 0.2, 0.3, 1]
    )
    return x, labels, angles


def grads_of_one_process(length=16):
    blocks = model()
    x, labels, angles = batch(length)
    loss = (run_model(blocks, x, angles[:length]) - labels).square().sum()
    loss.backward()
    return loss.detach(), [each.grad for each in blocks.parameters()]


def summed(mesh, blocks, loss):
    group = sw.communicator(mesh)
    grads = [group.all_reduce(each.grad) for each in blocks.parameters()]
    return group.all_reduce(loss.detach()), grads


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("length", [16, 10])
def test_a_model_trains_as_on_one_process(recompute, length):
    def run():
        mesh = sw.init_device_mesh("cpu", (4,), ("cp",))
        blocks = model()
        x, labels, angles = batch(length)
        before = x.clone()
        with context_parallel(
            mesh,
            buffers=[x, labels, angles],
            buffer_seq_dims=[1, 1, 0],
            no_restore_buffers={labels},
        ):
            assert x.shape[1] == labels.shape[1] == angles.shape[0] <= -(-length // 4)
            loss = (run_model(blocks, x, angles, recompute) - labels).square().sum()
            loss.backward()
        assert torch.equal(x, before)
        assert labels.shape[1] < length
        return summed(mesh, blocks, loss)

    loss, grads = grads_of_one_process(length)
    for found, theirs in sw.simulate(run, 4):
        torch.testing.assert_close(found, loss)
        for one, other in zip(theirs, grads, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("is_balanced", [True, False])
def test_the_style_of_an_attention_module(is_balanced):
    def run():
        mesh = sw.init_device_mesh("cpu", (2,), ("cp",))
        blocks = model()
        enable_context_parallel_dispatcher()
        same_ranks = sw.DeviceMesh("cpu", [0, 1], mesh_dim_names=("sequence",))
        for block in blocks:
            parallelize_module(block.inner, same_ranks, ContextParallel(2, SDPA))
        x, labels, angles = batch()
        balancer = HeadTailLoadBalancer(16, 2, "cpu") if is_balanced else None
        x, labels = context_parallel_shard(mesh, (x, labels), (1, 1), balancer)
        named = context_parallel_shard(mesh, {"angles": angles[:16]}, {"angles": 0}, balancer)
        out = run_model(blocks, x, named["angles"])
        loss = (out - labels).square().sum()
        loss.backward()
        (whole,) = context_parallel_unshard(mesh, [out], [1], balancer)
        copied = copy.deepcopy(blocks[0])
        assert torch.equal(copied(x, named["angles"]), blocks[0](x, named["angles"]))
        assert copied.inner.forward.__self__ is copied.inner
        pickle.dumps(blocks)
        return whole, *summed(mesh, blocks, loss)

    x, _, angles = batch()
    expected = run_model(model(), x, angles[:16])
    loss, grads = grads_of_one_process()
    for whole, found, theirs in sw.simulate(run, 2):
        torch.testing.assert_close(whole, expected)
        torch.testing.assert_close(found, loss)
        for one, other in zip(theirs, grads, strict=True):
            torch.testing.assert_close(one, other)


def test_heads_split_by_tensor_parallelism():
    tensors = qkv(16)

    def run():
        mesh = sw.init_device_mesh("cpu", (2, 2), ("cp", "tp"))
        buffers = [each.clone() for each in tensors]
        with context_parallel(mesh["cp"], buffers=buffers, buffer_seq_dims=[2, 2, 2]):
            heads = [sw.distribute_tensor(each, mesh["tp"], [Shard(1)]) for each in buffers]
            out = F.scaled_dot_product_attention(*heads, is_causal=True)
            assert out.placements == (Shard(1),)
            return context_parallel_unshard(mesh["cp"], [out.full_tensor()], [2])[0]

    expected = F.scaled_dot_product_attention(*tensors, is_causal=True)
    for found in sw.simulate(run, 4):
        torch.testing.assert_close(found, expected)


def test_indices_are_torchs():
    from torch.distributed.tensor.experimental._attention import _HeadTailLoadBalancer

    for length, ranks in ((8, 2), (24, 4), (6, 3), (2, 1)):
        for restore in (False, True):
            ours = HeadTailLoadBalancer(length, ranks, "cpu")._generate_indices(restore)
            theirs = _HeadTailLoadBalancer(length, ranks, "cpu")._generate_indices(restore)
            assert torch.equal(ours, theirs)
            assert ours.shape == (1, length)


def test_parts_are_those_of_the_indices():
    x = torch.arange(16.0).reshape(1, 16)
    order = HeadTailLoadBalancer(16, 2, "cpu")._generate_indices()[0]

    def run():
        mesh = sw.init_device_mesh("cpu", (2,))
        buffer = x.clone()
        with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[1]):
            return buffer.clone(), context_parallel_unshard(mesh, [buffer], [1])[0]

    found = sw.simulate(run, 2)
    assert torch.equal(torch.cat([part for part, _ in found], 1), x[:, order])
    assert all(torch.equal(whole, x) for _, whole in found)


# ---- refused


def inside(call, match, kind=sw.ShardwiseError, buffers=None):
    def run():
        mesh = sw.init_device_mesh("cpu", (2,), ("cp",))
        given = [torch.ones(1, 2, 8, 4)] if buffers is None else buffers()
        with (
            context_parallel(mesh, buffers=given, buffer_seq_dims=[2]),
            pytest.raises(kind, match=match),
        ):
            call(given[0])

    sw.simulate(run, 2)


def test_what_is_not_attention_over_the_whole_is_refused():
    attend = F.scaled_dot_product_attention
    inside(lambda x: attend(x, x, x, torch.ones(4, 4).bool()), "attn_mask", NotImplementedError)
    inside(lambda x: attend(x, x, x, dropout_p=0.5), "dropout_p=0.5", NotImplementedError)
    inside(lambda x: attend(x, x[:, :, :2], x), "a key with the 4 positions")
    inside(lambda x: attend(x[:, :, :2], x, x, is_causal=True), "a query with the 4 positions")
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    inside(lambda x: attention(*[x[0]] * 3), "attend to that part alone")


def test_attention_is_torchs_again_afterwards():
    x = qkv(8)[0]
    expected = F.scaled_dot_product_attention(x, x, x)

    def run():
        mesh = sw.init_device_mesh("cpu", (2,))
        with (
            pytest.raises(ZeroDivisionError),
            context_parallel(mesh, buffers=[buffer := x.clone()], buffer_seq_dims=[2]),
        ):
            raise ZeroDivisionError
        assert torch.equal(buffer, x)
        assert torch.equal(F.scaled_dot_product_attention(x, x, x), expected)

    sw.simulate(run, 2)


def test_wrong_arguments_are_refused():
    def run():
        mesh = sw.init_device_mesh("cpu", (2, 1), ("cp", "tp"))
        x = torch.ones(2, 8)

        def refused(match, kind=sw.ShardwiseError, mesh=mesh["cp"], **options):
            with pytest.raises(kind, match=match), context_parallel(mesh, **options):
                pass

        refused("one axis", mesh=mesh, buffers=[x], buffer_seq_dims=[1])
        refused("at least one")
        refused("as many dims", buffers=[x], buffer_seq_dims=[])
        refused("another tensor", buffers=[x], buffer_seq_dims=[1], no_restore_buffers={x.clone()})
        refused("8 positions", buffers=[x, x[:, :4]], buffer_seq_dims=[1, 1])
        whole = sw.distribute_tensor(x, mesh, [Replicate()] * 2)
        refused("DTensor", buffers=[whole], buffer_seq_dims=[1])
        with pytest.raises(sw.LayoutError, match="multiple of 4"):
            context_parallel_shard(mesh["cp"], [x[:, :6]], [1], HeadTailLoadBalancer(6, 2, "cpu"))
        with pytest.raises(sw.LayoutError, match="length of 8"):
            context_parallel_shard(mesh["cp"], [x], [1], HeadTailLoadBalancer(4, 2, "cpu"))
        module = parallelize_module(Inner(), sw.DeviceMesh("cpu", [1, 0]), ContextParallel(2, SDPA))
        with pytest.raises(PlanError, match="context_parallel_shard"):
            module(x, x, x)

    sw.simulate(run, 2)


def test_flex_attention_is_refused():
    flex = ContextParallel.AttentionType.FLEX
    for call in (lambda: ContextParallel(2, flex), lambda: PTRRLoadBalancer(None, 2)):
        with pytest.raises(NotImplementedError, match="flex_attention"):
            call()


def test_rotate_methods_other_than_allgather_warn_or_are_refused():
    set_rotate_method("allgather")
    with pytest.warns(UserWarning, match="more memory"):
        set_rotate_method("alltoall")
    with pytest.raises(NotImplementedError, match="'ring'"):
        set_rotate_method("ring")
    with warnings.catch_warnings():
        set_rotate_method("allgather")


def test_buffers_may_be_views_of_one_tensor_and_come_twice():
    def run():
        mesh = sw.init_device_mesh("cpu", (2,))
        tokens = torch.arange(18).view(2, 9)
        before = tokens.clone()
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        split = SequenceSplit(mesh, 8, is_balanced=True)
        with context_parallel(mesh, buffers=[inputs, labels, inputs], buffer_seq_dims=[1, 1, 1]):
            assert torch.equal(inputs, split.shard(before[:, :-1], 1))
            assert torch.equal(labels, split.shard(before[:, 1:], 1))
        assert torch.equal(inputs, before[:, :-1])
        assert torch.equal(labels, before[:, 1:])
        assert torch.equal(tokens, before)

    sw.simulate(run, 2)


def test_a_backward_after_the_context_is_told_that_buffers_changed():
    def run():
        mesh = sw.init_device_mesh("cpu", (2,))
        x, weight = torch.ones(8), torch.ones((), requires_grad=True)
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[0]):
            loss = (x * weight).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    sw.simulate(run, 2)


def test_buffers_with_gradients_are_refused():
    def run():
        mesh = sw.init_device_mesh("cpu", (2,))
        x = torch.ones(8, requires_grad=True)
        with (
            pytest.raises(sw.LayoutError, match="without gradient"),
            context_parallel(mesh, buffers=[x], buffer_seq_dims=[0]),
        ):
            pass

    sw.simulate(run, 2)


@pytest.mark.parametrize(
    ("heads", "shared", "is_possible"), [(8, 4, True), (6, 3, False), (4, 1, False), (3, 3, True)]
)
def test_shared_heads_are_split_with_their_queries_or_refused(heads, shared, is_possible):
    def run():
        mesh = sw.init_device_mesh("cpu", (2, 2), ("cp", "tp"))
        torch.manual_seed(0)
        inputs = [torch.randn(1, count, 8, 4) for count in (heads, shared, shared)]
        settings = {"is_causal": True, "enable_gqa": True}
        wanted = F.scaled_dot_product_attention(*inputs, **settings)
        with context_parallel(mesh["cp"], buffers=[*inputs, wanted], buffer_seq_dims=[2] * 4):
            split = [sw.distribute_tensor(each, mesh["tp"], [Shard(1)]) for each in inputs]
            if is_possible:
                found = F.scaled_dot_product_attention(*split, **settings)
                torch.testing.assert_close(found.full_tensor(), wanted)
            else:
                with pytest.raises(sw.DispatchError, match="keys and values of its queries"):
                    F.scaled_dot_product_attention(*split, **settings)

    sw.simulate(run, 4)
