"""Parameters that are tensor subclasses: with gather functions they train, others are refused."""

import warnings

import pytest
import torch
from support.fsdp_cases import (
    assert_at_rest,
    assert_same,
    batch,
    hybrid,
    in_one,
    made,
    mine,
    on_ranks,
    shard_all,
    train,
)
from support.fsdp_extensions import as_kind
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree

from shardwise.fsdp import FSDPError, fully_shard


class Padded(torch.Tensor):
    """A wrapper that sends shards of equal length, and whose operators return wrappers.

    As in torch's own tests, `__tensor_unflatten__` takes no context, and returns no wrapper.
    """

    pads = True

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_wrapper_subclass(
            cls, values.shape, values.stride(), dtype=values.dtype, device=values.device
        )

    def __init__(self, values):
        self._values = values

    def __tensor_flatten__(self):
        return ["_values"], None

    @staticmethod
    def __tensor_unflatten__(inner_tensors, outer_size, outer_stride):
        return inner_tensors["_values"]

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        given = pytree.tree_map_only(cls, lambda each: each._values, (args, kwargs or {}))
        found = function(*given[0], **given[1])
        return pytree.tree_map_only(torch.Tensor, cls, found)

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        assert mesh.ndim == 1 and type(self) is type(self)
        if not self.pads:
            return self._values, None
        rows = -(-outer_size[0] // mesh.size())
        padded = torch.full((rows, *outer_size[1:]), torch.nan, dtype=self.dtype)
        padded[: self._values.shape[0]] = self._values
        return (padded,), None

    def fsdp_post_all_gather(self, gathered, metadata, param_dtype, *, out=None):
        (values,) = gathered
        if out is not None:
            with torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(values)
            return None
        whole = values.to(param_dtype, copy=True)
        return whole, (values, whole)


class Unpadded(Padded):
    """Returns one tensor, not a tuple of them."""

    pads = False


@pytest.mark.parametrize("kind", [Padded, Unpadded])
@pytest.mark.parametrize("shard", [shard_all, in_one, hybrid])
@pytest.mark.parametrize("count", [2, 4])
def test_wrappers_whose_operators_make_wrappers_train(kind, shard, count):
    plain = train(made(), batch())

    def run(mesh):
        model = as_kind(made(), kind)
        shard(model, mesh)
        train(model, mine(batch(), mesh))
        assert_same(model, plain)
        assert_at_rest(model)

    on_ranks(run, count)


def test_rows_are_cut_off_only_if_every_rank_has_padded_its_shard():
    class Longer(Unpadded):
        def fsdp_post_all_gather(self, gathered, metadata, param_dtype, *, out=None):
            longer = torch.cat([gathered[0], gathered[0]])
            return longer, (longer,)

    def run(mesh):
        model = fully_shard(as_kind(nn.Sequential(nn.Linear(5, 3)), Longer), mesh=mesh)
        with pytest.raises(FSDPError, match=r"weight: .* pads its shard to 2 rows"):
            model(torch.ones(1, 5))

    on_ranks(run)


def test_gather_functions_may_be_set_on_the_sharded_parameter():
    plain = train(made(), batch())
    calls = []

    def before(shard, mesh):
        calls.append(tuple(shard.shape))
        return (shard,), None

    def after(shard, gathered, metadata, param_dtype, *, out=None):
        return None if out is not None else (gathered[0], ())

    def run(mesh):
        model = shard_all(made(), mesh)
        model.head.weight.fsdp_pre_all_gather = before
        model.head.weight.fsdp_post_all_gather = after
        train(model, mine(batch(), mesh))
        assert_same(model, plain)

    on_ranks(run)
    assert set(calls) == {(2, 5), (1, 5)}


# ---- refused, before anything is changed


def quantized(weight):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8)


def nested(weight):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([weight, weight])


class Opaque(torch.Tensor):
    """A wrapper that does not say what it is made of."""

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)

    def __init__(self, values):
        self.values = values

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return cls(function(args[0].values, *args[1:], **(kwargs or {})))


UNSUITED = {
    "two tensors": (lambda each: TwoTensor(each, each.clone()), r"a TwoTensor, .* \(a, b\)"),
    "opaque": (Opaque, "an? Opaque, a tensor subclass"),
    "quantized": (quantized, "expected a dense tensor, got a quantized one"),
    "sparse": (lambda each: each.to_sparse(), "got a torch.sparse_coo one"),
    "sparse rows": (lambda each: each.to_sparse_csr(), "got a torch.sparse_csr one"),
    "mkldnn": (lambda each: each.to_mkldnn(), "got a torch._mkldnn one"),
    "nested": (nested, "got a nested one"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:.*quantize")
@pytest.mark.parametrize("kind", UNSUITED)
def test_other_parameters_are_refused_before_anything_is_changed(kind):
    make, message = UNSUITED[kind]

    def run(mesh):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        weight = nn.Parameter(make(model[1].weight.detach()), requires_grad=False)
        model[1].weight = weight
        before = dict(model.named_parameters())
        with pytest.raises(FSDPError, match=rf"1.weight: .*{message}.*ignored_params"):
            fully_shard(model, mesh=mesh)
        assert all(each is before[name] for name, each in model.named_parameters())
        fully_shard(model, mesh=mesh, ignored_params={weight})
        assert model[1].weight is weight

    on_ranks(run)


def test_several_inner_tensors_cannot_be_one_shard_even_with_gather_functions():
    class Pair(TwoTensor):
        def fsdp_pre_all_gather(self, mesh):
            return (self.a, self.b), None

        def fsdp_post_all_gather(self, gathered, metadata, param_dtype, *, out=None):
            return Pair(*gathered), gathered

    def run(mesh):
        model = nn.Linear(4, 4)
        weight = model.weight.detach()
        model.weight = nn.Parameter(Pair(weight, weight.clone()))
        with pytest.raises(FSDPError, match="Pair is made of a, b; expected one tensor"):
            fully_shard(model, mesh=mesh)

    on_ranks(run)
