"""Extensions of the all-gather of parameters, and one process that computes the same."""

import torch
from torch import nn

from support.fsdp_cases import batch, made, mean_square


def same_before(shard, mesh, outer_size, outer_stride, module, mp_policy):
    return (shard,), None


def same_before_short(shard, mesh):
    return (shard,), None


def same_after(shard, gathered, metadata, param_dtype, *, out=None):
    """Keep the parameter in the memory it was gathered into."""
    (whole,) = gathered
    if out is None:
        return whole, ()
    assert out.untyped_storage()._cdata == whole.untyped_storage()._cdata
    return None


def copied_after(shard, gathered, metadata, param_dtype, *, out=None):
    """Make the parameter a copy of the gathered tensors."""
    whole = gathered[0].to(param_dtype, copy=True)
    if out is None:
        return whole, (whole,)
    out.copy_(whole)
    return None


def quantised(weight):
    """Return bytes, and a scale for each row."""
    scale = weight.abs().amax(1) / 127
    return torch.round(weight / scale[:, None]).to(torch.int8), scale


def quantised_before(shard, mesh, outer_size, outer_stride, module, mp_policy):
    return quantised(shard), None


def quantised_after(shard, gathered, metadata, param_dtype, *, out=None):
    data, scale = gathered
    if out is None:
        whole = data * scale[:, None]
        return whole, (whole,)
    torch.mul(data, scale[:, None], out=out)
    return None


def matrices(model):
    return [each for each in model.parameters() if each.dim() == 2]


def extend(model, before, after=same_after):
    """Extend all matrices of a model."""
    for parameter in matrices(model):
        parameter.fsdp_pre_all_gather = before
        parameter.fsdp_post_all_gather = after
    return model


class Same(torch.Tensor):
    """A subclass without state of its own."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        assert type(self) is Same
        return (self.as_subclass(torch.Tensor),), None

    def fsdp_post_all_gather(self, gathered, metadata, param_dtype, *, out=None):
        return same_after(self, gathered, metadata, param_dtype, out=out)


class SameShort(Same):
    def fsdp_pre_all_gather(self, mesh):
        return (self.as_subclass(torch.Tensor),), None


class Within(torch.Tensor):
    """A tensor that wraps another one, as in quantisation libraries, and computes with it."""

    @staticmethod
    def __new__(cls, inner, note):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad
        )

    def __init__(self, inner, note):
        self.inner, self.note = inner, note

    def __tensor_flatten__(self):
        return ["inner"], self.note

    @staticmethod
    def __tensor_unflatten__(parts, note, outer_size, outer_stride):
        return Within(parts["inner"], note)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def unwrapped(value):
            return value.inner if isinstance(value, Within) else value

        result = function(*map(unwrapped, args), **(kwargs or {}))
        is_same = function is torch.ops.aten.detach.default
        return type(args[0])(result, args[0].note) if is_same else result

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        return (self.inner,), self.note

    def fsdp_post_all_gather(self, gathered, metadata, param_dtype, *, out=None):
        assert metadata == "a note"
        if out is None:
            return Within(gathered[0], metadata), (gathered[0],)
        assert type(out) is Within and out.inner.data_ptr() == gathered[0].data_ptr()
        out.note = "another note"
        return None


def as_kind(model, kind):
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(kind(module.weight.detach()))
    return model


def quantise(model):
    return extend(model, quantised_before, quantised_after)


def train_quantised(model, x, steps):
    """Train in one process: compute with quantised matrices, and pass their gradients on."""
    masters = {name: each.detach().clone() for name, each in model.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=0.05)
    for _ in range(steps):
        with torch.no_grad():
            for name, each in model.named_parameters():
                data = masters[name]
                if data.dim() == 2:
                    values, scale = quantised(data)
                    data = values * scale[:, None]
                each.copy_(data)
        model.zero_grad()
        mean_square(model, x).backward()
        for name, each in model.named_parameters():
            masters[name].grad = each.grad
        optimizer.step()
    return masters


def same_as_quantised(found, steps=3):
    wanted = train_quantised(made(), batch(), steps)
    for name, each in found.items():
        torch.testing.assert_close(each, wanted[name], rtol=1e-10, atol=1e-12)
