"""What a user of torch.distributed.tensor meets who changes the import: ported habits, mistakes."""

import io

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import DTensor, Replicate, Shard

FULL = torch.arange(10.0).reshape(5, 2) + 1


def ranks(fn, count=2):
    """Run `fn(mesh)` on simulated ranks; the results by rank."""
    return sw.simulate(lambda: fn(sw.init_device_mesh("cpu", (count,))), count)


def rows(mesh):
    return sw.distribute_tensor(FULL, mesh, [Shard(0)], src_data_rank=None)


# ---- ported programs


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


def test_a_model_made_on_the_meta_device_is_split_made_empty_and_initialized():
    def run(mesh):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))

        def split(name, module, mesh):
            if name == "0":
                weight = sw.distribute_tensor(module.weight, mesh, [Shard(0)])
                module.weight = nn.Parameter(weight)

        sw.distribute_module(model, mesh, split)
        assert model[0].weight.is_meta and model[0].weight.placements == (Shard(0),)
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        for module in model:
            module.reset_parameters()
        assert isinstance(model[0].weight, nn.Parameter) and not model[0].weight.is_meta
        return torch.cat([each.full_tensor().flatten() for each in model.parameters()])

    one, *_ = ranks(run, 1)
    for made in ranks(run, 3):
        torch.testing.assert_close(made, one)


def test_distribute_module_keeps_tied_parameters_tied():
    def run(mesh, split_at):
        def split(name, module, mesh):
            if name == split_at:
                weight = sw.distribute_tensor(module.weight.detach(), mesh, [Shard(0)])
                module.weight = nn.Parameter(weight)

        model = sw.distribute_module(Tied(), mesh, split)
        assert model.head.weight is model.embedding.weight
        model(torch.tensor([1, 2])).sum().backward()
        return len(list(model.parameters())), model.head.weight.placements

    assert ranks(lambda mesh: run(mesh, "embedding"))[0] == (1, (Shard(0),))
    assert ranks(lambda mesh: run(mesh, "head"))[0] == (1, (Shard(0),))
    assert ranks(lambda mesh: run(mesh, "neither"))[0] == (1, (Replicate(),))


def test_torch_load_takes_a_saved_state_dict_of_dtensors_as_it_is():
    def run(mesh):
        model = sw.distribute_module(nn.Linear(2, 3), mesh)
        model.weight = nn.Parameter(sw.distribute_tensor(FULL[:3], mesh, [Shard(0)]))
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "step": 3}, file)
        file.seek(0)
        loaded = torch.load(file)["model"]
        assert loaded["weight"].layout is model.weight.layout
        assert torch.equal(loaded["weight"].full_tensor(), FULL[:3])

    ranks(run)


def test_clip_grad_norm_takes_plain_parameters_beside_dtensors():
    def run(mesh, foreach):
        split, plain = nn.Parameter(rows(mesh)), nn.Parameter(torch.ones(3))
        (split.sum() + plain.sum()).backward()
        norm = nn.utils.clip_grad_norm_([split, plain], 1.0, foreach=foreach)
        torch.testing.assert_close(norm.item(), 13**0.5)
        torch.testing.assert_close(plain.grad, torch.full((3,), 13**-0.5))
        torch.testing.assert_close(split.grad.full_tensor(), torch.full((5, 2), 13**-0.5))

    for foreach in (True, False):
        ranks(lambda mesh, foreach=foreach: run(mesh, foreach))


def test_a_split_tensor_is_not_written_into_a_plain_one():
    with pytest.raises(sw.RankError, match="mul_: cannot write a DTensor's values into a plain"):
        ranks(lambda mesh: torch.ones(5, 2).mul_(rows(mesh)))


def test_new_tensor_takes_the_global_values_of_dtensors():
    def run(mesh):
        x = rows(mesh)
        assert x.new_tensor([x.sum(), 1.0]).tolist() == [55.0, 1.0]
        assert torch.equal(x.new_tensor(x.tolist()).full_tensor(), FULL)

    ranks(run)


def test_parametrizations_of_a_split_weight_give_what_they_give_on_one_process():
    def run(mesh, split):
        torch.manual_seed(0)
        layer = nn.Linear(2, 5)
        if split:
            layer.weight = nn.Parameter(rows(mesh))
        else:
            layer.weight = nn.Parameter(FULL.clone())
        with sw.fallback("replicate"):
            nn.utils.parametrizations.weight_norm(layer)
            nn.utils.parametrizations.spectral_norm(layer)
            return layer(torch.ones(3, 2)), layer.weight

    def both(mesh):
        for made, plain in zip(run(mesh, True), run(mesh, False), strict=True):
            torch.testing.assert_close(made.full_tensor(), plain)

    ranks(both)


# ---- mistakes


@pytest.mark.parametrize(
    "transform",
    [
        torch.vmap(lambda row: row.sum()),
        torch.func.grad(lambda it: it.sum()),
        lambda x: torch.func.vjp(lambda it: it * 2, x),
        torch.func.jacrev(lambda it: it.sum()),
        torch.func.functionalize(lambda it: it * 2),
    ],
)
def test_transforms_of_torch_func_are_refused_as_they_would_see_only_the_piece(transform):
    with pytest.raises(sw.RankError, match=r"torch\.func: got a DTensor .*torch\.autograd\.grad"):
        ranks(lambda mesh: transform(rows(mesh)))
    assert torch.equal(torch.vmap(lambda row: row.sum())(FULL), FULL.sum(1))  # plain ones are not


def test_torch_func_works_on_the_pieces_within_local_map():
    def run(mesh):
        sums = sw.local_map(torch.vmap(lambda row: row.sum()), out_placements=[Shard(0)])
        assert torch.equal(sums(rows(mesh)).full_tensor(), FULL.sum(1))

    ranks(run)


def test_torchs_errors_are_about_global_shapes_and_name_the_operator_and_the_layouts():
    with pytest.raises(sw.RankError, match=r"\[in matmul of \[5@0, 2\], \[5@0, 2\]\]"):
        ranks(lambda mesh: rows(mesh) @ rows(mesh))
    with pytest.raises(sw.RankError, match=r"\[7\].*size 10\n\n(.*\n)*\[in view of \[5@0, 2\]\]"):
        ranks(lambda mesh: rows(mesh).view(7))


def test_a_plain_tensor_that_is_a_piece_is_told_from_local():
    def mistake(mesh):
        x = rows(mesh)
        return x + torch.ones(x.to_local().shape)

    with pytest.raises(sw.RankError, match=r"add of \[5@0, 2\], a plain \(3, 2\).*from_local"):
        ranks(mistake)

    def remedy(mesh):
        x = rows(mesh)
        ones = DTensor.from_local(torch.ones(x.to_local().shape), mesh, [Shard(0)])
        assert torch.equal((x + ones).full_tensor(), FULL + 1)

    ranks(remedy)


def test_an_indexed_row_of_a_split_dim_is_written_to():
    def run(mesh):
        x = rows(mesh)
        x[1] += 1
        assert x[1].tolist() == [4.0, 5.0]

    ranks(run)


def test_writing_to_a_diagonal_that_is_split_is_refused_and_the_remedy_works():
    with pytest.raises(sw.RankError, match=r"result of diagonal, .*or clone\(\) it"):
        ranks(lambda mesh: rows(mesh).diagonal().add_(1))

    def remedy(mesh):
        x = rows(mesh).diagonal().clone()
        assert x.add_(1).tolist() == [1 + rows(mesh)[at, at].item() for at in range(2)]

    ranks(remedy)


def test_placements_in_place_of_the_mesh_are_told_their_keyword():
    with pytest.raises(sw.RankError, match=r"x.redistribute\(placements="):
        ranks(lambda mesh: rows(mesh).redistribute([Replicate()]))


def test_an_operator_on_one_rank_only_is_found_where_the_ranks_parted():
    def mistake(mesh):
        x = rows(mesh)
        if mesh.get_rank() == 0:
            x.sum().item()
        x.mean().item()

    with pytest.raises(sw.MismatchError) as caught:
        ranks(mistake)
    first, second = mistake.__code__.co_firstlineno + 3, mistake.__code__.co_firstlineno + 4
    message = str(caught.value)
    assert "from different lines" in message
    assert f"rank 0: at {__file__}:{first}" in message
    assert f"rank 1: at {__file__}:{second}" in message


def test_ranks_may_meet_from_different_lines():
    def run(mesh):
        x = rows(mesh)
        if mesh.get_rank() == 0:
            return x.sum().item()
        return x.sum().item()

    assert ranks(run) == [55.0, 55.0]
