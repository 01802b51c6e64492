"""DTensor: from and to local tensors, global properties, moves, pickles, autograd."""

import copy
import io
import pickle
import weakref

import pytest
import torch
from support.rules import full, heard, in_layout, ranks, split
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import DTensor, LayoutError, Partial, Replicate, Shard
from shardwise.comm import listen

# ---- from_local


def test_from_local_works_out_the_true_shape_of_uneven_pieces():
    def run(mesh):
        piece = full(5, 2).chunk(3)[mesh.get_rank()] if mesh.get_rank() < 3 else full(0, 2)
        x = DTensor.from_local(piece, mesh, [Shard(0)])
        assert torch.equal(x.full_tensor(), full(5, 2))
        return tuple(x.shape)

    assert ranks(run, 4) == [(5, 2)] * 4


def test_from_local_works_out_nested_and_mixed_pieces():
    def run(mesh):
        whole = full(7, 5)
        layout = sw.Layout.from_placements(mesh, (7, 5), [Shard(0), Shard(0)])
        x = DTensor.from_local(whole[layout.box().slices].clone(), mesh, [Shard(0), Shard(0)])
        y = DTensor.from_local(
            whole[sw.Layout.from_placements(mesh, (7, 5), [Shard(1), Replicate()]).box().slices],
            mesh,
            [Shard(1), Replicate()],
        )
        assert torch.equal(x.full_tensor(), whole) and torch.equal(y.full_tensor(), whole)

    ranks(run, 4, (2, 2))


def test_from_local_refuses_pieces_that_are_no_chunks_naming_rank_and_size():
    def run(mesh):
        DTensor.from_local(torch.ones(2 + 2 * mesh.get_rank(), 3), mesh, [Shard(0)])

    with pytest.raises(sw.RankError, match=r"rank 0 has \(2, 3\), and would have \(3, 3\)"):
        ranks(run)


def test_from_local_refuses_pieces_with_other_dims_on_other_ranks():
    def run(mesh):
        DTensor.from_local(torch.ones(*([2] * (1 + mesh.get_rank()))), mesh, [Shard(0)])

    with pytest.raises(sw.RankError, match="as many dims on every rank"):
        ranks(run)


def test_from_local_refuses_a_piece_that_is_not_the_given_shapes():
    def run(mesh):
        DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)], shape=(5, 3))

    with pytest.raises(sw.RankError, match=r"local_tensor: expected \(3, 3\)"):
        ranks(run)


def test_from_local_checks_that_replicas_agree_when_asked():
    def run(mesh):
        DTensor.from_local(torch.full((2,), float(mesh.get_rank())), mesh, run_check=True)

    with pytest.raises(sw.RankError, match=r"values on ranks \[1\] differ"):
        ranks(run)


@pytest.mark.parametrize("rows", [1, 4])
def test_run_check_takes_empty_pieces(rows):
    def run(mesh):
        placements = [Replicate(), Shard(0)]
        box = sw.Layout.from_placements(mesh, (rows, 2), placements).box()
        piece = full(rows, 2)[box.slices].clone()
        x = DTensor.from_local(piece, mesh, placements, run_check=True)
        assert torch.equal(x.full_tensor(), full(rows, 2))

    ranks(run, 6, (2, 3))


def test_from_local_without_splits_does_not_communicate():
    events = []

    def run(mesh):
        with listen(events.append):
            assert DTensor.from_local(torch.ones(3), mesh).shape == (3,)
            assert DTensor.from_local(torch.ones(3), mesh, [Partial()]).shape == (3,)

    ranks(run)
    assert not events


def test_from_local_shares_memory_and_leaves_the_tensor_plain():
    def run(mesh):
        local = torch.ones(2)
        x = DTensor.from_local(local, mesh)
        local[0] = 5
        assert type(local) is torch.Tensor and x.to_local()[0] == 5

    ranks(run)


def test_gradients_go_back_through_from_local_and_to_local():
    def run(mesh):
        local = full(2, 2).requires_grad_()
        x = DTensor.from_local(local, mesh, [Partial()])
        (x.full_tensor() * 3).sum().backward()
        assert torch.equal(local.grad, torch.full((2, 2), 3.0))

        local = full(2, 2).requires_grad_()
        with pytest.raises(RuntimeError, match="a local tensor and its gradient have one shape"):
            DTensor.from_local(local, mesh, [Replicate()], grad_placements=[Shard(0)])

    ranks(run)


def test_to_local_takes_gradients_that_are_contributions():
    def run(mesh):
        x = split(full(4), mesh, Replicate()).requires_grad_()
        local = x.to_local(grad_placements=[Partial()])
        (local * (mesh.get_rank() + 1)).sum().backward()
        assert torch.equal(x.grad.full_tensor(), torch.full((4,), 3.0))

    ranks(run)


# ---- properties of the global tensor


def test_python_sees_the_global_tensor():
    def run(mesh):
        x = split(full(5, 4), mesh, Shard(0))
        assert x.shape == x.size() == torch.Size((5, 4)) and x.size(-1) == 4
        assert x.numel() == x.nelement() == 20 and x.dim() == x.ndim == x.ndimension() == 2
        assert len(x) == 5 and x.stride() == (4, 1) and x.t().stride() == (1, 4)
        assert x.nbytes == 80 and x.dtype is torch.float32 and x.device.type == "cpu"
        assert x.placements == (Shard(0),) and x.device_mesh is mesh
        assert repr(x.mesh_layout) == "[5@0, 4]" and x.box == x.mesh_layout.box()

    ranks(run)


def test_reading_properties_never_plans():
    def run(mesh):
        x = split(full(5, 4), mesh, Shard(0)).requires_grad_()
        sw.cache_clear()
        for name in ("shape", "dtype", "device", "requires_grad", "grad", "is_leaf", "grad_fn"):
            getattr(x, name)
        x.size(), x.numel(), x.dim(), x.stride(), x.is_floating_point(), x.is_contiguous()
        assert sw.cache_info() == (0, 0, 0, sw.cache_info().most_entries)

    ranks(run)


def test_printing_does_not_communicate_and_shows_layout_and_piece():
    events = []

    def run(mesh):
        x = split(full(3, 2), mesh, Shard(0))
        with listen(events.append):
            return repr(x), f"{x}"

    first, _ = ranks(run)
    assert first[0].startswith("DTensor(f32[3@0, 2], local=tensor([[1., 2.],")
    assert first[1] == first[0] and not events


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Partial()])
def test_python_values_are_of_the_whole_tensor(placement):
    def run(mesh):
        one = split(torch.tensor([45.0]), mesh, placement)
        assert one.item() == float(one) == 45.0 and int(one) == 45 and bool(one) is True
        scalar = split(torch.tensor(4.5), mesh, Partial() if placement.is_shard() else placement)
        assert f"{scalar:.2f}" == "4.50"
        many = split(full(3), mesh, placement)
        assert many.tolist() == [1.0, 2.0, 3.0] and many.numpy().tolist() == many.tolist()
        assert 2.0 in many and 7.0 not in many

    ranks(run)


def test_item_of_a_pending_sum_is_the_sum_on_every_rank():
    def run(mesh):
        return DTensor.from_local(
            torch.tensor(10.0 + 25 * mesh.get_rank()), mesh, [Partial()]
        ).item()

    assert ranks(run) == [45.0, 45.0]


def test_iteration_gives_global_rows():
    def run(mesh):
        x = split(full(3, 2), mesh, Shard(0))
        return [row.full_tensor().tolist() for row in x]

    assert ranks(run)[0] == full(3, 2).tolist()


# ---- moving


def test_redistribute_moves_and_its_gradient_moves_back():
    def run(mesh):
        x = split(full(5, 4), mesh, Shard(0)).requires_grad_()
        y = x.redistribute(placements=[Shard(1)])
        assert y.placements == (Shard(1),) and torch.equal(y.full_tensor(), full(5, 4))
        (y.full_tensor() * full(5, 4)).sum().backward()
        assert x.grad.placements == (Shard(0),)
        assert torch.equal(x.grad.full_tensor(), full(5, 4))

    ranks(run)


def test_redistribute_by_default_makes_whole_and_can_wait():
    def run(mesh):
        x = split(full(5), mesh, Shard(0))
        assert x.redistribute().placements == (Replicate(),)
        pending = x.redistribute(placements=[Replicate()], async_op=True)
        assert torch.equal(pending.wait().to_local(), full(5))
        assert x.redistribute(forward_dtype=torch.float64).dtype is torch.float64

    ranks(run)


def test_placements_in_place_of_the_mesh_are_told_their_keyword():
    with pytest.raises(sw.RankError, match=r"x.redistribute\(placements="):
        ranks(lambda mesh: split(full(5, 2), mesh, Shard(0)).redistribute([Replicate()]))


def test_redistribute_with_nothing_to_do_is_an_alias_and_another_object():
    def run(mesh):
        x = split(full(4), mesh, Shard(0))
        y = x.redistribute(placements=[Shard(0)])
        assert y is not x and y.to_local().data_ptr() == x.to_local().data_ptr()

    ranks(run)


# ---- distribute_tensor


@pytest.mark.parametrize(
    "placements",
    [[Shard(0), Replicate()], [Shard(0), Shard(1)], [Replicate(), Replicate()],
     [Shard(1), Shard(1)], [Partial(), Shard(0)], [Partial(), Replicate()]],
)  # fmt: skip
def test_distribute_tensor_takes_the_sources_data(placements):
    def run(mesh):
        mine = full(5, 3) * (1 if mesh.get_rank() == 0 else -100)
        x = sw.distribute_tensor(mine, mesh, placements)
        assert x.placements == tuple(placements)
        assert torch.equal(x.full_tensor(), full(5, 3))

    ranks(run, 4, (2, 2))


def test_distribute_tensor_from_another_source():
    def run(mesh):
        x = sw.distribute_tensor(full(4) * mesh.get_rank(), mesh, [Shard(0)], src_data_rank=1)
        assert torch.equal(x.full_tensor(), full(4))

    ranks(run)


def test_distribute_tensor_refuses_a_tensor_with_a_history_and_says_what_to_do():
    def run(mesh):
        sw.distribute_tensor(full(4).requires_grad_() * 2, mesh, [Shard(0)])

    with pytest.raises(sw.RankError, match=r"expected a leaf.*from_local"):
        ranks(run)


def test_distribute_tensor_does_not_share_the_users_memory():
    def run(mesh):
        mine = full(4)
        for source in (0, None):
            x = sw.distribute_tensor(mine, mesh, [Replicate()], src_data_rank=source)
            assert x.data_ptr() != mine.data_ptr()

    ranks(run)


# ---- as an object


def test_parameters_are_parameters_and_leaves():
    def run(mesh):
        p = nn.Parameter(split(full(4, 2), mesh, Shard(0)))
        assert isinstance(p, nn.Parameter) and isinstance(p, DTensor) and p.is_leaf
        assert p.requires_grad and "Parameter" in repr(p)
        (p * p).sum().backward()
        assert isinstance(p.grad, DTensor) and p.grad.placements == (Shard(0),)
        assert torch.equal(p.grad.full_tensor(), 2 * full(4, 2))

    ranks(run)


def test_deepcopy_copies_the_piece_the_gradient_and_the_kind():
    def run(mesh):
        p = nn.Parameter(split(full(4), mesh, Shard(0)))
        (p * 2).sum().backward()
        q = copy.deepcopy(p)
        with torch.no_grad():
            p.zero_()
        assert isinstance(q, nn.Parameter) and q.mesh_layout is p.mesh_layout
        assert torch.equal(q.full_tensor(), full(4)) and q.grad is not p.grad
        assert torch.equal(q.grad.full_tensor(), torch.full((4,), 2.0))
        both = copy.deepcopy([p, p])
        assert both[0] is both[1]

    ranks(run)


def test_pickle_keeps_piece_and_layout():
    def run(mesh):
        p = nn.Parameter(split(full(5), mesh, Shard(0)))
        q = pickle.loads(pickle.dumps(p))
        assert isinstance(q, nn.Parameter) and q.mesh_layout is p.mesh_layout and q.requires_grad
        assert torch.equal(q.full_tensor(), full(5))
        buffer = io.BytesIO()
        torch.save({"p": p}, buffer)
        buffer.seek(0)
        r = torch.load(buffer, weights_only=False)["p"]
        assert torch.equal(r.full_tensor(), full(5))

    ranks(run)


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_file_of_another_ranks_piece_is_refused_though_the_sizes_fit(weights_only):
    placements = ([Shard(0)], [Partial()], [Shard(0, pieces=2)], [Replicate()])

    def save(mesh):
        saved = []
        for each in placements:
            file = io.BytesIO()
            torch.save(in_layout(full(4), mesh, *each), file)
            saved.append(file.getvalue())
        return saved

    files = ranks(save)
    of_four = ranks(save, 4)

    def load(data):
        return torch.load(io.BytesIO(data), weights_only=weights_only)

    def run(mesh):
        own, other = files[mesh.get_rank()], files[1 - mesh.get_rank()]
        for at in range(3):
            assert torch.equal(load(own[at]).full_tensor(), full(4))
            with pytest.raises(LayoutError, match=r"this rank is at \(.,\).*full_tensor\(\)"):
                load(other[at])
            with pytest.raises(LayoutError, match=r"this process is rank . of 2"):
                load(of_four[mesh.get_rank()][at])
        for whole in (own[3], other[3], of_four[2][3]):  # each rank has all of it
            assert torch.equal(load(whole).to_local(), full(4))

    ranks(run)
    alone = load(files[1][0])  # a process that collects results
    assert torch.equal(alone.to_local(), full(4)[2:]) and alone.shape == (4,)
    with pytest.raises(sw.ShardwiseError):
        alone.full_tensor()
    assert torch.equal(load(files[1][3]).to_local(), full(4))


def test_one_rank_alone_may_save_its_piece():
    def run(mesh):
        for placement in (Shard(0), Partial(), Replicate()):
            x = in_layout(full(5), mesh, placement)
            if mesh.get_rank() == 0:
                events, _ = heard(mesh, lambda x=x: torch.save(x, io.BytesIO()))
                assert events == []

    ranks(run)


def test_a_replica_may_load_what_another_replica_saved():
    def save(mesh):
        return pickle.dumps(split(full(4), mesh, Replicate(), Shard(0)))

    files = ranks(save, 4, (2, 2))

    def run(mesh):
        loaded = pickle.loads(files[(mesh.get_rank() + 2) % 4])
        assert torch.equal(loaded.full_tensor(), full(4))
        with pytest.raises(LayoutError, match="this rank is at"):
            pickle.loads(files[(mesh.get_rank() + 1) % 4])

    ranks(run, 4, (2, 2))


def test_the_gradient_may_be_set_whole_or_as_a_piece_or_as_a_dtensor():
    def run(mesh):
        p = split(full(4), mesh, Shard(0)).requires_grad_()
        for value in (
            full(4),
            split(full(4), mesh, Replicate()),
            full(4).chunk(2)[mesh.get_rank()],
        ):
            p.grad = value
            assert p.grad.placements == (Shard(0),) and torch.equal(p.grad.full_tensor(), full(4))
        p.grad = None
        assert p.grad is None
        with pytest.raises(sw.LayoutError, match="grad: expected"):
            p.grad = full(3)

    ranks(run)


def test_data_may_be_read_and_replaced():
    def run(mesh):
        p = nn.Parameter(split(full(4), mesh, Shard(0)))
        assert isinstance(p.data, DTensor) and not p.data.requires_grad
        p.data = split(full(4).double() * 2, mesh, Shard(0))
        assert p.dtype is torch.float64 and torch.equal(p.full_tensor(), full(4).double() * 2)

    ranks(run)


@pytest.mark.parametrize("placement", [Replicate(), Partial()], ids=["whole", "pending"])
@pytest.mark.parametrize("how", ["set", "written"])
def test_a_change_through_data_is_seen_by_the_next_use(placement, how):
    def run(mesh):
        x = split(full(6, 4), mesh, Shard(1))
        weight = in_layout(full(4).requires_grad_(), mesh, placement)
        (x * weight).sum()  # without a backward: the move is kept
        if how == "set":
            weight.data = in_layout(full(4) * 3, mesh, placement)
        else:
            weight.data.mul_(3)
        assert (x * weight).sum().item() == (full(6, 4) * full(4) * 3).sum().item()

    ranks(run)


def test_data_may_get_another_layout_after_a_use():
    def run(mesh):
        x = split(full(6, 4), mesh, Shard(1))
        weight = in_layout(full(4).requires_grad_(), mesh, Replicate())
        (x * weight).sum()
        weight.data = in_layout(full(4), mesh, Shard(0))
        (x * weight).sum().backward()
        assert weight.grad.mesh_layout is weight.mesh_layout
        assert torch.equal(weight.grad.full_tensor(), full(6, 4).sum(0))

    ranks(run)


# ---- autograd


def test_hooks_are_handed_dtensors_and_may_change_the_gradient():
    seen = []

    def run(mesh):
        x = split(full(4), mesh, Shard(0)).requires_grad_()
        y = x * 2
        y.register_hook(lambda g: seen.append((type(g), g.placements)) or g * 10)
        y.sum().backward()
        assert torch.equal(x.grad.full_tensor(), torch.full((4,), 20.0))
        x.register_post_accumulate_grad_hook(lambda p: seen.append((type(p), p.grad.placements)))
        (x * 1).sum().backward()

    ranks(run)
    assert seen == [(DTensor, (Shard(0),))] * 4


def test_autograd_grad_gives_dtensors_and_can_be_differentiated_again():
    def run(mesh):
        x = split(full(3), mesh, Shard(0)).requires_grad_()
        w = split(full(3), mesh, Replicate()).requires_grad_()
        (g,) = torch.autograd.grad((x * x * x * w).sum(), x, create_graph=True)
        assert g.placements == (Shard(0),)
        gx, gw = torch.autograd.grad(g.sum(), [x, w])
        assert torch.allclose(gx.full_tensor(), 6 * full(3) * full(3))
        assert torch.allclose(gw.full_tensor(), 3 * full(3) ** 2)
        assert gw.placements == (Replicate(),)

    ranks(run)


def test_backward_from_a_pending_loss_needs_no_reduction():
    events = []

    def run(mesh):
        x = split(full(4), mesh, Shard(0)).requires_grad_()
        loss = (x * x).sum()
        assert loss.placements == (Partial(),)
        with listen(events.append):
            loss.backward()
        assert torch.equal(x.grad.full_tensor(), 2 * full(4))

    ranks(run)
    assert not events


def test_backward_takes_a_gradient_for_the_whole_tensor():
    def run(mesh):
        x = split(full(4), mesh, Shard(0)).requires_grad_()
        (x * 2).backward(full(4))
        assert torch.equal(x.grad.full_tensor(), 2 * full(4))
        with pytest.raises(RuntimeError, match="only for scalar outputs"):
            (x * 2).backward()

    ranks(run)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_gives_the_same_gradients(use_reentrant):
    def block(x, w):
        return torch.relu(x @ w) @ w

    def run(mesh):
        def gradients(call):
            x = split(full(5, 4) / 10, mesh, Shard(0)).requires_grad_()
            w = split(full(4, 4) / 10, mesh, Replicate()).requires_grad_()
            call(x, w).sum().backward()
            return x.grad.full_tensor(), w.grad.full_tensor()

        plain = gradients(block)
        kept = gradients(lambda x, w: checkpoint(block, x, w, use_reentrant=use_reentrant))
        for a, b in zip(plain, kept, strict=True):
            assert torch.allclose(a, b)

    ranks(run)


def test_several_uses_of_a_tensor_share_one_reduction_of_their_gradients():
    def run(mesh):
        x = split(full(4, 4), mesh, Shard(0))
        w = split(full(4, 4), mesh, Replicate()).requires_grad_() * 1
        loss = (x @ w).sum() + (x @ w.relu()).sum() + ((x + 1) @ w).sum()  # whole beside shards
        loss = loss + (x * w).sum() + (x + w).sum()  # cut to the shards
        events = []
        with listen(events.append):
            loss.backward()
        return sorted(event.kind for event in events if event.rank == mesh.get_rank())

    # one for w, one for w.relu(), and one of the pieces of w
    assert ranks(run) == [["all_gather", "all_reduce", "all_reduce"]] * 2


def test_a_leaf_is_freed_though_it_was_used_beside_a_shard():
    def run(mesh):
        x = split(full(4, 4), mesh, Shard(0))
        for finish in (lambda loss: loss.backward(), lambda loss: sw.cache_clear()):
            w = split(full(4, 4), mesh, Replicate()).requires_grad_()
            loss = (x @ w).sum()
            finish(loss)
            gone = weakref.ref(w)
            del w, loss
            assert gone() is None

    ranks(run)


def test_a_leaf_used_again_after_a_backward_is_reduced_again():
    def run(mesh):
        x = split(full(4, 4), mesh, Shard(0))
        w = split(full(4, 4), mesh, Replicate()).requires_grad_()
        for _ in range(2):
            ((x @ w) + (x @ w)).sum().backward()
        assert torch.equal(w.grad.full_tensor(), 4 * full(4, 4).sum(0)[:, None].expand(4, 4))

    ranks(run)


@pytest.mark.parametrize("leaf", [Replicate(), Shard(0), Shard(1), Partial()])
def test_second_derivatives_through_pending_sums_are_right(leaf):
    def run(mesh):
        def second(x, w):
            y = x @ w  # pending, if the summed dim is split
            (first,) = torch.autograd.grad((y * y * y).sum(), x, create_graph=True)
            return torch.autograd.grad((first * first).sum(), [x, w])

        plain = [full(3, 4).double().div(10).requires_grad_(), full(4, 2).double().requires_grad_()]
        expected = second(*plain)
        x = split(plain[0].detach(), mesh, leaf).requires_grad_()
        w = split(plain[1].detach(), mesh, Shard(0)).requires_grad_()
        for ours, theirs in zip(second(x, w), expected, strict=True):
            assert torch.allclose(ours.full_tensor(), theirs)

    ranks(run)


def test_layout_is_torchs_so_that_comparisons_and_factories_of_torch_take_it() -> None:
    def run() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        x = sw.distribute_tensor(torch.arange(20.0).view(5, 4), mesh, [Shard(0)])
        assert x.layout is torch.strided and torch.zeros(2, layout=x.layout).shape == (2,)
        assert x.mesh_layout == sw.Layout.from_placements(mesh, (5, 4), [Shard(0)])
        assert x.mesh_layout != torch.strided
        torch.testing.assert_close(x, x.clone())
        torch.testing.assert_close(x, x.full_tensor())
        with pytest.raises(AssertionError, match="Mismatched elements: 20 / 20"):
            torch.testing.assert_close(x, x + 1)
        with pytest.raises(AssertionError, match="Mismatched elements: 1 / 20"):
            torch.testing.assert_close(x, torch.where(x == 9, 0, x))

    sw.simulate(run, 2)
