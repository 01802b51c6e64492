"""Shards stay where they are from `fully_shard` on: what shares their memory follows them."""

import copy
import gc
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import fsdp_random
from support.fsdp_cases import (
    Net,
    assert_close,
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
    train,
)
from torch import nn

import shardwise as sw
from shardwise import DTensor, Replicate, Shard
from shardwise.dtensor.tensor import as_local
from shardwise.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    share_comm_ctx,
)
from shardwise.parallel import ColwiseParallel, parallelize_module


class Aliases:
    """What someone may hold of a model's parameters: views, and a state dict."""

    def __init__(self, model):
        self.model = model
        self.held = []
        for parameter in shards(model):
            local = parameter.to_local()
            first = local.detach().narrow(-1, 0, min(1, local.shape[-1])) if local.dim() else local
            views = [local, parameter.detach(), parameter.data, first]
            self.held.append([*views, *nn.ParameterList([parameter]).state_dict().values()])
        for name, value in model.state_dict().items():
            parameter = model.get_parameter(name)
            self.held[[each is parameter for each in shards(model)].index(True)].append(value)

    def check(self):
        """Check that all of it has the memory, and so the values, of the parameters."""
        for parameter, held in zip(shards(self.model), self.held, strict=True):
            with as_local():
                own = parameter.detach().as_subclass(torch.Tensor)
                for each in held:
                    other = each.as_subclass(torch.Tensor)
                    assert other.untyped_storage()._cdata == own.untyped_storage()._cdata
                    assert other.data_ptr() in (own.data_ptr(), 0)
                    if other.shape == own.shape:
                        assert torch.equal(own, other)


def shards(model):
    """Return the shards of a model, also if it is gathered now."""
    found = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            group = module._fsdp_group
            with group.with_shards():
                found.update((id(slot), slot.tensor) for slot in group.slots)
    return list(found.values())


# ---- every way to shard, every event


def with_offload(model, mesh):
    return shard_all(model, mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))


def with_half_precision(model, mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    return shard_all(model, mesh, mp_policy=policy)


def on_other_dims(model, mesh):
    return shard_all(model, mesh, shard_placement_fn=lambda each: Shard(each.dim() - 1))


def over_tensor_parallel(model, mesh):
    both = sw.init_device_mesh("cpu", (2, mesh.size() // 2), ("dp", "tp"))
    whole = ColwiseParallel(output_layouts=Replicate())
    plan = {f"layers.{index}.linear": whole for index in range(3)}
    parallelize_module(model, both["tp"], plan)
    return shard_all(model, both["dp"])


def with_tied_weights(model, mesh):
    model.layers[2].linear.weight = model.layers[0].linear.weight
    return shard_all(model, mesh)


WAYS = {
    "by layer": shard_all,
    "in one": in_one,
    "replicated": replicated,
    "hybrid": hybrid,
    "offload": with_offload,
    "mixed precision": with_half_precision,
    "other dims": on_other_dims,
    "over tensor parallel": over_tensor_parallel,
    "ties": with_tied_weights,
}


def step(model, x):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    mean_square(model, x).backward()
    optimizer.step()
    optimizer.zero_grad()


def evaluate(model, x):
    with torch.no_grad():
        model(x)


def gather(model, x):
    model.unshard()
    model.reshard()


def stay_gathered(model, x):
    model.set_reshard_after_backward(False)
    model.set_reshard_after_forward(False)
    step(model, x)
    model.set_reshard_after_backward(True)
    model.set_reshard_after_forward(True)


def change_buckets(model, x):
    model.set_all_reduce_hook(lambda gradients: None)
    model.set_gradient_divide_factor(2.0)
    model.set_requires_gradient_sync(False)
    step(model, x)
    model.set_requires_gradient_sync(True)
    step(model, x)


def load(model, x):
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


def convert_to_the_same(model, x):
    model.to(torch.float64).to("cpu").double().requires_grad_()


def copy_it(model, x):
    step(copy.deepcopy(model), x)


def share_a_schedule(model, x):
    share_comm_ctx([model])
    step(model, x)


def reset(model, x):
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reset_iter_state()


EVENTS = [
    step,
    evaluate,
    gather,
    stay_gathered,
    change_buckets,
    load,
    convert_to_the_same,
    copy_it,
    share_a_schedule,
    reset,
]


def check_events(way, events, count=4):
    def run():
        torch.manual_seed(0)
        mesh = sw.init_device_mesh("cpu", (count,), ("dp",))
        model = Net().double()
        WAYS[way](model, mesh)
        aliases = Aliases(model)
        x = mine(batch(), mesh)
        for event in events:
            event(model, x)
            aliases.check()
        before = full(model.head.weight).clone()
        step(model, x)
        aliases.check()
        assert not torch.equal(before, full(model.head.weight))

    sw.simulate(run, count)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("way", WAYS)
def test_no_event_moves_a_shard(way):
    check_events(way, EVENTS)


@settings(max_examples=15)
@given(st.sampled_from(list(WAYS)), st.lists(st.sampled_from(EVENTS), max_size=5))
def test_no_order_of_events_moves_a_shard(way, events):
    check_events(way, events)


@settings(max_examples=25)
@given(fsdp_random.cases())
def test_no_shard_of_a_random_model_moves(case):
    fsdp_random.check_case(case, watch=Aliases)


# ---- nesting


def test_sharding_an_outer_module_does_not_move_the_shards_of_inner_ones():
    plain = train(made(), batch())

    def run(mesh):
        model = made()
        aliases = []
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
            aliases.append(Aliases(layer))
        model.layers[0](mine(batch(), mesh)).sum().backward()  # it may have run alone
        model.layers[0].zero_grad()
        fully_shard(model, mesh=mesh)
        aliases.append(Aliases(model))
        train(model, mine(batch(), mesh))
        for each in aliases:
            each.check()
        assert_same(model, plain)

    on_ranks(run)


def test_updates_of_an_alias_reach_the_model():
    """As an optimizer does that keeps views of the shards."""

    def run(mesh):
        model = shard_all(made(), mesh)
        views = [each.to_local() for each in model.parameters()]
        before = model(batch())
        with torch.no_grad():
            for each in views:
                each.mul_(2)
        plain = made()
        with torch.no_grad():
            for each in plain.parameters():
                each.mul_(2)
        assert_close(model(batch()), plain(batch()))
        assert not torch.equal(before, model(batch()))

    on_ranks(run)


@pytest.mark.sampled(every=3)
def test_a_state_dict_taken_at_the_start_is_that_of_every_step():
    def run(mesh):
        model = shard_all(made(), mesh)
        entries = model.state_dict()
        train(model, mine(batch(), mesh))
        for name, value in model.state_dict().items():
            assert torch.equal(full(value), full(entries[name]))

    on_ranks(run)


# ---- memory that others made


def test_assigned_tensors_stay_where_they_are():
    plain = train(made(), batch())

    def run(mesh):
        source = shard_all(made(), mesh)
        model = shard_all(Net().double(), mesh)
        entries = source.state_dict()
        model.load_state_dict(entries, assign=True)
        aliases = Aliases(model)
        x = mine(batch(), mesh)
        train(model, x)
        aliases.check()
        assert_same(model, plain)
        for name, value in model.state_dict().items():  # as in one process
            assert torch.equal(full(value), full(entries[name]))

    on_ranks(run)


@pytest.mark.parametrize("limit", [1 << 17, 8])
def test_assigned_tensors_of_any_strides_are_gathered(limit, monkeypatch):
    from shardwise.fsdp import flat_buffer

    monkeypatch.setattr(flat_buffer, "DIRECT_BYTES", limit)
    plain = train(made(), batch())

    def run(mesh):
        model = shard_all(made(), mesh)
        for layer in (*model.layers, model.head):
            linear = getattr(layer, "linear", layer)
            old = linear.weight
            local = old.detach().to_local().t().contiguous().t()
            new = DTensor.from_local(local, mesh, old.placements, shape=old.shape, stride=(5, 1))
            linear.weight = nn.Parameter(new)
        aliases = Aliases(model)
        train(model, mine(batch(), mesh))
        aliases.check()
        assert_same(model, plain)

    on_ranks(run)


@pytest.mark.parametrize("has_run", [False, True])
def test_whole_tensors_that_are_assigned_become_shards_at_once(has_run):
    """So that what is taken of them before the next forward stays right."""
    plain = train(made(), batch())

    def run(mesh):
        model = shard_all(Net().double(), mesh)
        if has_run:
            model(batch())
        model.load_state_dict(made().state_dict(), assign=True)
        assert all(type(each) is DTensor for each in model.parameters())
        aliases = Aliases(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        for _ in range(3):
            optimizer.zero_grad()
            mean_square(model, mine(batch(), mesh)).backward()
            optimizer.step()
        aliases.check()
        assert_same(model, plain)

    on_ranks(run)


def test_an_optimizer_of_parameters_that_a_load_has_replaced_is_refused():
    def run(mesh):
        model = shard_all(Net().double(), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.load_state_dict(made().state_dict(), assign=True)
        mean_square(model, mine(batch(), mesh)).backward()
        with pytest.raises(sw.ShardwiseError, match=r"layers.0.norm.weight|norm.weight"):
            optimizer.step()
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    on_ranks(run)


def test_memory_that_a_meta_model_gets_is_its_place():
    plain = train(made(), batch())

    def run(mesh):
        with torch.device("meta"):
            model = Net().double()
        shard_all(model, mesh)
        model.to_empty(device="cpu")
        aliases = Aliases(model)
        model.load_state_dict(made().state_dict())
        train(model, mine(batch(), mesh))
        aliases.check()
        assert_same(model, plain)
        units = model._fsdp_group.schedule.unit_set.units
        assert all(unit.row is not None for unit in units), "they are sent without a copy"

    on_ranks(run)


# ---- conversions, which torch does with new memory


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("take", [DTensor.detach, DTensor.to_local, lambda each: each.data[:1]])
def test_a_conversion_warns_of_tensors_that_keep_the_old_memory(has_run, take):
    def run(mesh):
        model = shard_all(made(), mesh)
        if has_run:
            train(model, mine(batch(), mesh), 1)
        alias = take(model.layers[1].linear.weight)
        with pytest.warns(UserWarning, match=r"tensors still share the old memory"):
            model.float()
        del alias
        gc.collect()
        aliases = Aliases(model)
        model.float()  # nothing to do
        aliases.check()
        train(model, mine(batch(), mesh).float(), 1)
        aliases.check()
        del aliases
        model.double()  # nobody holds it

    on_ranks(run)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("way", WAYS)
def test_a_conversion_whose_memory_nobody_holds_is_silent(way):
    def run():
        torch.manual_seed(0)
        mesh = sw.init_device_mesh("cpu", (4,), ("dp",))
        model = WAYS[way](Net().double(), mesh)
        x = mine(batch(), mesh)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            for dtype in (torch.float64, torch.float32, torch.float64):
                model.to(dtype)
                aliases = Aliases(model)
                optimizer.zero_grad()
                mean_square(model, x.to(dtype)).backward()
                optimizer.step()
                aliases.check()
                del aliases

    sw.simulate(run, 4)


def test_all_ranks_notice_a_conversion_also_those_with_empty_shards():
    def run(mesh):
        model = fully_shard(nn.Linear(3, 1), mesh=mesh)
        model(torch.ones(1, 3)).sum().backward()
        for parameter in model.parameters():
            parameter.data = parameter.data.double()
        model.zero_grad()
        assert model(torch.ones(1, 3, dtype=torch.float64)).dtype is torch.float64

    on_ranks(run, 4)


# ---- copies


def test_copies_have_a_place_of_their_own():
    plain = train(made(), batch())

    def run(mesh):
        model = shard_all(made(), mesh)
        again = copy.deepcopy(model)
        first, second = Aliases(model), Aliases(again)
        train(again, mine(batch(), mesh))
        first.check()
        second.check()
        assert_same(again, plain)
        assert all(unit.row is not None for unit in again._fsdp_group.schedule.unit_set.units)

    on_ranks(run)


# ---- ties that come apart


class Tied(nn.Module):
    """An embedding and a head with one weight; each may be in a group of its own."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(torch.tanh(self.middle(self.embed(x))))


def shard_tied(model, mesh, groups):
    if groups == "several":
        fully_shard(model.embed, mesh=mesh)
        fully_shard(model.head, mesh=mesh)
    fully_shard(model, mesh=mesh)


def train_tied(model, tokens):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        optimizer.step()
    return model


TOKENS = torch.arange(8).view(4, 2) % 7


@pytest.mark.parametrize("groups", ["one", "several"])
@pytest.mark.parametrize("keys", ["both", "embed", "head"])
@pytest.mark.parametrize("kind", ["whole", "shards"])
@pytest.mark.parametrize("is_meta", [True, False])
def test_tied_weights_stay_tied_when_a_state_dict_is_assigned(groups, keys, kind, is_meta):
    torch.manual_seed(0)
    source = Tied().double()
    plain = train_tied(copy.deepcopy(source), TOKENS)

    def run(mesh):
        with torch.device("meta" if is_meta else "cpu"):
            model = Tied().double()
        shard_tied(model, mesh, groups)
        entries = copy.deepcopy(source)
        if kind == "shards":
            shard_tied(entries, mesh, "one")
        entries = {name: value.clone() for name, value in entries.state_dict().items()}
        for key in ("embed", "head"):
            if keys not in ("both", key):
                del entries[f"{key}.weight"]
        model.load_state_dict(entries, assign=True, strict=False)
        assert model.head.weight is model.embed.weight
        train_tied(model, mine(TOKENS, mesh))
        assert model.head.weight is model.embed.weight
        assert_same(model, plain)

    on_ranks(run)


@pytest.mark.parametrize("groups", ["one", "several"])
@pytest.mark.parametrize("how", ["at once", "module by module"])
def test_tied_weights_stay_tied_when_a_meta_model_gets_memory(groups, how):
    torch.manual_seed(0)
    source = Tied().double()
    plain = train_tied(copy.deepcopy(source), TOKENS)

    def run(mesh):
        with torch.device("meta"):
            model = Tied().double()
        shard_tied(model, mesh, groups)
        if how == "at once":
            model.to_empty(device="cpu")
            assert model.head.weight is model.embed.weight
        else:
            for module in model.modules():
                module.to_empty(device="cpu", recurse=False)
        model.load_state_dict(source.state_dict())
        model(TOKENS)
        assert model.head.weight is model.embed.weight
        train_tied(model, mine(TOKENS, mesh))
        assert_same(model, plain)

    on_ranks(run)


def test_users_may_untie_weights():
    def run(mesh):
        torch.manual_seed(0)
        model = Tied().double()
        plain = copy.deepcopy(model)
        fully_shard(model, mesh=mesh)
        model(TOKENS)
        for each in (model, plain):
            each.head.weight = nn.Parameter(each.embed.weight.detach().clone())
        train_tied(plain, TOKENS)
        train_tied(model, mine(TOKENS, mesh))
        assert_same(model, plain)

    on_ranks(run)
