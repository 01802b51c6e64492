"""torch.func: whole DTensors are transformed as plain tensors, split ones are refused."""

import threading

import pytest
import torch
import torch.nn.functional as F
from support.rules import ranks, split, values
from torch import func, nn

import shardwise as sw
from shardwise import DTensor, Replicate, Shard

# torch's forward mode scripts its decompositions
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script")

W, X = values(3, 4, grad=False), values(5, 4, seed=1, grad=False)


def squares(weight, x):
    return torch.tanh(F.linear(x, weight)).pow(2).sum()


def functional(weight, x):
    module = nn.Linear(4, 3, bias=False, dtype=torch.float64)
    return func.functional_call(module, {"weight": weight}, (x,)).pow(2).sum()


TRANSFORMS = {
    "vmap of a closure": lambda w, x: func.vmap(lambda row: squares(w, row))(x),
    "vmap of both": func.vmap(squares, in_dims=(None, 0)),
    "grad": func.grad(squares),
    "grad of a closure": lambda w, x: func.grad(lambda it: squares(w, it))(x),
    "grad for each sample": func.vmap(func.grad(squares), in_dims=(None, 0)),
    "vjp": lambda w, x: func.vjp(squares, w, x)[1](torch.tensor(2.0, dtype=w.dtype))[0],
    "jvp": lambda w, x: func.jvp(lambda it: squares(it, x), (w,), (torch.ones_like(w),))[1],
    "jacrev": lambda w, x: func.jacrev(lambda it: F.linear(x, it).sin().sum(0))(w),
    "jacfwd": lambda w, x: func.jacfwd(lambda it: F.linear(x, it).sin().sum(0))(w),
    "hessian": func.hessian(squares),
    "functional_call": func.grad(functional),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_whole_dtensors_are_transformed_as_one_process_does(name):
    expected = TRANSFORMS[name](W, X)

    def run(mesh):
        given = split(W, mesh, Replicate()), split(X, mesh, Replicate())
        for w, x in (given, (given[0], X), (W, given[1])):
            made = TRANSFORMS[name](w, x)
            made = made.full_tensor() if isinstance(made, DTensor) else made
            torch.testing.assert_close(made, expected)
        return DTensor.__torch_function__

    (after,) = set(ranks(run)) | {DTensor.__torch_function__}
    assert after.__func__ is sw.dispatch.dispatch


@pytest.mark.parametrize("name", TRANSFORMS)
def test_split_dtensors_are_refused_with_the_remedy(name):
    with pytest.raises(sw.RankError, match=r"torch\.func: got a DTensor \[3@0, 4\]"):
        ranks(lambda mesh: TRANSFORMS[name](split(W, mesh, Shard(0)), split(X, mesh, Replicate())))


def test_a_split_parameter_in_the_transformed_function_is_refused():
    """As in vmap over a model with tensor parallelism, or over one with sharded parameters."""

    def run(mesh):
        model = nn.Linear(4, 3, bias=False, dtype=torch.float64)
        model.weight = nn.Parameter(split(W, mesh, Shard(0)))
        func.vmap(model)(X)

    with pytest.raises(sw.RankError, match=r"torch\.func: got a DTensor .*redistribute"):
        ranks(run)


@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_functionalize_is_refused(placement):
    with pytest.raises(sw.RankError, match=r"torch\.func: got a DTensor"):
        ranks(lambda mesh: func.functionalize(torch.sin)(split(W, mesh, placement)))


def test_forward_mode_is_refused_outside_of_transforms():
    def run(mesh):
        with torch.autograd.forward_ad.dual_level():
            torch.autograd.forward_ad.make_dual(split(W, mesh, Shard(0)), W)

    with pytest.raises(sw.RankError, match=r"forward-mode AD .*got a DTensor"):
        ranks(run)


def test_gradients_pass_through_a_transform_to_a_whole_dtensor():
    def outer(w, x):
        w = w.clone().requires_grad_()
        (made,) = torch.autograd.grad(func.grad(squares)(w, x).pow(2).sum(), w)
        return made

    expected = outer(W, X)

    def run(mesh):
        made = outer(split(W, mesh, Replicate()), split(X, mesh, Replicate()))
        torch.testing.assert_close(made.full_tensor(), expected)

    ranks(run)


def test_other_threads_dispatch_as_ever_while_one_is_in_a_transform():
    def elsewhere():
        def run(mesh):
            assert torch.equal((split(W, mesh, Shard(0)) * 2).full_tensor(), W * 2)

        ranks(run)

    def function(row):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return row.sum()

    func.vmap(function)(X)
    assert DTensor.__torch_function__.__func__ is sw.dispatch.dispatch
