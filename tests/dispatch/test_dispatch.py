"""Dispatch: what is cached, what the policies do, in-place and out=, aliases, errors."""

import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from support.rules import full, ranks, split

import shardwise as sw
from shardwise import DTensor, Partial, Replicate, Shard
from shardwise.comm import listen
from shardwise.rules import registry


@pytest.fixture
def inv_has_no_rule(monkeypatch):
    monkeypatch.delitem(registry._table, torch.linalg.inv)


# ---- the cache


def test_numbers_that_do_not_change_the_plan_do_not_miss():
    def run(mesh):
        x = split(full(4), mesh, Shard(0))
        sw.cache_clear()
        for step in range(10):
            x * (0.5 + step)
            x.add(x, alpha=step)
        info = sw.cache_info()
        assert (info.misses, info.hits, info.entries) == (2, 18, 2)

    ranks(run)


def test_arguments_that_change_the_plan_are_told_apart():
    def run(mesh):
        x = split(full(4, 4), mesh, Shard(0))
        assert x.sum(0).placements == (Partial(),)
        assert x.sum(1).placements == (Shard(0),)
        # True is not the dim 1
        assert x.var(True).shape == () and x.var(1).shape == (4,)

    ranks(run)


def test_the_cache_is_bounded(monkeypatch):
    monkeypatch.setattr("shardwise.dtensor.state.MOST_ENTRIES", 8)

    def run(mesh):
        for size in range(20):
            x = split(full(size + 1), mesh, Shard(0))
            x + x
        x + x
        info = sw.cache_info()
        assert info.entries <= 8 and info.hits >= 1

    ranks(run)


def test_each_thread_has_its_own_cache_and_policies():
    def run(mesh):
        if mesh.get_rank() == 0:
            sw.fallback("error")
        x = split(full(4), mesh, Shard(0))
        x + x
        sw.communicator(mesh).barrier()
        return sw.cache_info().misses > 0

    assert ranks(run) == [True, True]
    seen = []
    thread = threading.Thread(target=lambda: seen.append(sw.cache_info().entries))
    thread.start()
    thread.join()
    assert seen == [0]


def test_arguments_may_all_be_keywords():
    def run(mesh):
        x, at = split(full(3, 4), mesh, Replicate()), torch.tensor([[3], [0], [1]])
        taken = torch.take_along_dim(input=full(3, 4), indices=at, dim=1)
        for indices in (at, split(at, mesh, Replicate())):
            ours = torch.take_along_dim(input=x, indices=indices, dim=1)
            assert torch.equal(ours.full_tensor(), taken)
        ours = torch.take_along_dim(input=full(3, 4), indices=split(at, mesh, Replicate()), dim=1)
        assert torch.equal(ours.full_tensor(), taken)

    ranks(run)


def test_lowerings_get_operands_that_are_named():
    aten = torch.ops.aten
    calls = [
        lambda x: torch.roll(input=x, shifts=1, dims=0),
        lambda x: torch.tensor_split(input=x, sections=3)[1],
        lambda x: torch.trapezoid(y=x, x=x * x, dim=0),
        lambda x: torch.relu_(input=-x),
        lambda x: torch.polygamma(n=1, input=x),
        lambda x: torch.where(condition=x > 4, input=x, other=-x),
        lambda x: aten.roll.default(self=x, shifts=[1], dims=[0]),
        lambda x: aten._softmax_backward_data(x, output=x, dim=0, input_dtype=torch.float32),
    ]

    def run(mesh):
        for call in calls:
            ours = call(split(full(3, 4), mesh, Shard(0))).full_tensor()
            torch.testing.assert_close(ours, call(full(3, 4)))

    ranks(run)


# ---- policies


@pytest.mark.usefixtures("inv_has_no_rule")
def test_a_missing_rule_replicates_inputs_and_warns_once_for_each_line():
    def run(mesh):
        x = split(torch.eye(4) * 2, mesh, Shard(0))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(2):
                y = torch.linalg.inv(x)
            z = torch.linalg.inv(x * 1)
        assert y.placements == (Replicate(),)
        assert torch.equal(z.full_tensor(), torch.eye(4) / 2)
        messages = [str(each.message) for each in seen]
        return messages, [each.filename for each in seen]

    for messages, files in ranks(run):
        assert len(messages) == 2  # of two lines, on each rank
        for message, file in zip(messages, files, strict=True):
            assert "inv" in message and "[4@0, 4]" in message and "register_rule" in message
            assert file.endswith("test_dispatch.py")


@pytest.mark.usefixtures("inv_has_no_rule")
def test_a_missing_rule_can_be_an_error_or_silent():
    def run(mesh):
        x = split(torch.eye(4) * 2, mesh, Shard(0))
        with sw.fallback("replicate"), warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(torch.linalg.inv(x).to_local(), torch.eye(4) / 2)
        sw.cache_clear()
        with (
            sw.fallback("error"),
            pytest.raises(sw.PolicyError, match=r"inv has no rule.*register_rule"),
        ):
            torch.linalg.inv(x)
        with sw.fallback("replicate"):
            torch.linalg.inv(x)

    ranks(run)


@pytest.mark.usefixtures("inv_has_no_rule")
def test_fallbacks_are_counted_by_operator():
    def run(mesh):
        sw.cache_clear()
        x = split(torch.eye(4) * 2, mesh, Shard(0))
        with sw.fallback("replicate"):
            torch.linalg.inv(torch.linalg.inv(x))  # the second is of a whole tensor
            torch.linalg.inv(x)
        assert sw.fallback_counts() == {"linalg_inv": 2}
        sw.cache_clear()
        assert sw.fallback_counts() == {}

    ranks(run)


@pytest.mark.usefixtures("inv_has_no_rule")
def test_the_policy_error_holds_for_calls_that_were_planned_before():
    def run(mesh):
        x = split(torch.eye(4) * 2, mesh, Shard(0))
        with sw.fallback("replicate"):
            torch.linalg.inv(x)
        with sw.fallback("error"), pytest.raises(sw.PolicyError):
            torch.linalg.inv(x)

    ranks(run)


@pytest.mark.usefixtures("inv_has_no_rule")
def test_gradients_of_a_fallback_are_right():
    def run(mesh):
        plain = (torch.eye(3) * 2 + 0.1).requires_grad_()
        x = split(plain.detach(), mesh, Shard(0)).requires_grad_()
        with sw.fallback("replicate"):
            (torch.linalg.inv(x) * full(3, 3)).sum().backward()
        (torch.linalg.inv(plain) * full(3, 3)).sum().backward()
        assert torch.allclose(x.grad.full_tensor(), plain.grad)

    ranks(run)


def test_an_unknown_policy_is_refused():
    with pytest.raises(sw.PolicyError, match="fallback: expected one of warn, replicate, error"):
        sw.fallback("never")
    with pytest.raises(sw.PolicyError, match="plain_tensors: expected one of"):
        sw.plain_tensors("maybe")


def test_explicit_refuses_implicit_communication_and_names_the_remedy_that_works():
    def run(mesh):
        x, y = split(full(4, 4), mesh, Shard(0)), split(full(4, 4), mesh, Shard(1))
        with sw.explicit():
            x + x  # nothing moves
            x + split(full(4, 4), mesh, Replicate())  # a slice is no communication
            with pytest.raises(
                sw.PolicyError,
                match=r"add.*an input must move(.|\n)*exchange(.|\n)*"
                r"Say so: x.redistribute\(placements=\[Shard\(0\)\]\)",
            ):
                x + y
            x + y.redistribute(placements=[Shard(0)])
        x + y

    ranks(run)


def test_plain_tensors_are_taken_as_replicated_or_refused():
    def run(mesh):
        x = split(full(4), mesh, Shard(0))
        assert torch.equal((x + full(4)).full_tensor(), 2 * full(4))
        with sw.plain_tensors("error"):
            x + torch.tensor(1.0)
            with pytest.raises(sw.PolicyError, match=r"add: got a plain tensor of shape \(4,\)"):
                x + full(4)

    ranks(run)


def test_plain_tensors_that_differ_between_ranks_are_found_where_they_are_used():
    def run():
        mesh = sw.init_device_mesh("cpu", (3,), ("tp",))
        x = sw.ones(6, device_mesh=mesh, placements=[Shard(0)])
        mine = torch.zeros(6)
        with sw.plain_tensors("check"):
            for _ in range(2):
                assert (x + mine).sum() == 6.0
            mine[0] = float(mesh.get_rank() == 1)  # the call is known; the values are others
            with pytest.raises(
                sw.PolicyError, match=r"add: .* on ranks \[1\] of .* ranks \[0, 2\]"
            ):
                x + mine
            with pytest.raises(sw.PolicyError, match=r"copy_: .*from_local\(x, mesh, placements"):
                x.copy_(mine)
            misses = sw.cache_info().misses
            _ = x * x + x, x * x + x
            assert sw.cache_info().misses == misses + 2
        x + mine

    sw.simulate(run, 3)


def test_plain_tensors_that_require_grad_get_the_whole_gradient():
    def run(mesh):
        w = full(4).requires_grad_()
        (split(full(4), mesh, Shard(0)) * w).sum().backward()
        assert torch.equal(w.grad, full(4))

    ranks(run)


# ---- in place, out=, aliases


def test_in_place_keeps_the_object_and_the_layout():
    def run(mesh):
        x = split(full(4, 4), mesh, Shard(0))
        y = x
        x += split(full(4, 4), mesh, Shard(1))
        x.mul_(2).relu_()
        assert x is y and x.placements == (Shard(0),)
        assert torch.equal(x.full_tensor(), 4 * full(4, 4))

    ranks(run)


@pytest.mark.parametrize("placement", [Replicate(), Partial(), Shard(1)])
def test_in_place_works_where_the_result_would_have_another_layout(placement):
    def run(mesh):
        x = split(full(4, 4), mesh, placement)
        x.add_(split(full(4, 4), mesh, Shard(0))).add_(1)
        assert x.placements == (placement,)
        assert torch.equal(x.full_tensor(), 2 * full(4, 4) + 1)

    ranks(run)


def test_in_place_gradients_are_right():
    def run(mesh):
        x = split(full(4), mesh, Shard(0)).requires_grad_()
        w = split(full(4), mesh, Replicate()).requires_grad_()
        y = x * 1
        y.mul_(w)
        y.sum().backward()
        assert torch.equal(x.grad.full_tensor(), full(4))
        assert torch.equal(w.grad.full_tensor(), full(4))

    ranks(run)


def test_moved_versions_of_a_tensor_end_when_it_is_changed_in_place():
    def run(mesh):
        x = DTensor.from_local(full(4) / 2, mesh, [Partial()])
        torch.relu(x)
        x.mul_(-1)
        assert torch.equal(torch.relu(x).full_tensor(), torch.zeros(4))

    ranks(run)


def test_a_write_to_a_copy_that_emulates_a_view_reaches_the_original():
    def run(mesh):
        parts = [
            lambda x: x[1],
            lambda x: x[1].view(2, 2),
            lambda x: x.view(2, 8)[0],
            lambda x: x.T[:, 0],
            lambda x: x[:, 1],
        ]
        for write in (lambda v: v.mul_(2), lambda v: v.zero_(), lambda v: v.fill_(3)):
            for part in parts:
                plain = full(4, 4)
                x = split(full(4, 4), mesh, Shard(0))
                write(part(plain))
                write(part(x))
                assert torch.equal(x.full_tensor(), plain)

    ranks(run)


@pytest.mark.usefixtures("inv_has_no_rule")
def test_a_view_of_a_replicated_input_is_not_written_to():
    def run(mesh):
        x = split(full(4, 4), mesh, Shard(0))
        with sw.fallback("replicate"):
            torch.linalg.inv(x + split(torch.eye(4), mesh, Shard(0))).add_(1)  # a new tensor
            with pytest.raises(sw.DispatchError):
                torch.as_strided(x, (2,), (1,)).add_(1)

    ranks(run)


def test_in_place_operators_with_a_lowering_write_their_result():
    def run(mesh):
        for placement in (Shard(0), Shard(1), Replicate(), Partial()):
            x = split(full(4, 4), mesh, placement)
            x.tril_()
            assert torch.equal(x.full_tensor(), full(4, 4).tril())
            x.cumsum_(0)
            assert torch.equal(x.full_tensor(), full(4, 4).tril().cumsum(0))
            assert x.placements == (placement,)

    ranks(run)


def test_an_operator_in_place_takes_its_target_by_name():
    def run(mesh):
        x = split(full(6, 4) - 9, mesh, Shard(0))
        assert torch.relu_(input=x) is x
        assert torch.equal(x.full_tensor(), F.relu(full(6, 4) - 9))

    ranks(run)


def test_a_dtensor_is_not_written_into_a_plain_tensor():
    def run(mesh):
        with pytest.raises(sw.DispatchError, match="plain tensor"):
            full(4).add_(split(full(4), mesh, Shard(0)))
        with pytest.raises(sw.DispatchError, match=r"add\(out=\): cannot write.* plain tensor"):
            torch.add(split(full(4), mesh, Shard(0)), 1, out=full(4))

    ranks(run)


def test_a_split_tensor_is_not_written_into_a_plain_one():
    with pytest.raises(sw.RankError, match="mul_: cannot write a DTensor's values into a plain"):
        ranks(lambda mesh: torch.ones(5, 2).mul_(split(full(5, 2), mesh, Shard(0))))


def test_out_keeps_its_layout():
    def run(mesh):
        x = split(full(4, 4), mesh, Shard(0))
        out = split(torch.zeros(4, 4), mesh, Shard(1))
        assert torch.add(x, x, out=out) is out and out.placements == (Shard(1),)
        assert torch.equal(out.full_tensor(), 2 * full(4, 4))
        with pytest.raises(
            sw.DispatchError, match=r"expected a tensor of shape \(4, 4\), got \(3,\)"
        ):
            torch.add(x, x, out=split(torch.zeros(3), mesh, Shard(0)))

    ranks(run)


def test_an_aten_overload_writes_to_out():
    def run(mesh):
        x = split(full(6, 4), mesh, Shard(0))
        out = torch.empty_like(x)
        torch.ops.aten.add.out(x, x, alpha=2, out=out)
        assert torch.equal(out.full_tensor(), 3 * full(6, 4))

    ranks(run)


def test_functions_that_return_their_argument_do_so_and_plain_tensors_stay_plain():
    def run(mesh):
        x = split(full(4), mesh, Shard(0))
        assert x.contiguous() is x and x.to(torch.float32) is x and x.float() is x
        plain = full(4)
        y = plain.type_as(x)
        assert type(plain) is type(y) is torch.Tensor
        z = torch.broadcast_tensors(plain, x)
        assert type(plain) is torch.Tensor and isinstance(z[1], DTensor)

    ranks(run)


# ---- functions that torch wrote in Python, and users' own


def test_functions_written_in_python_run_by_the_functions_they_call():
    def run(mesh):
        x = split(full(4, 4), mesh, Shard(0))
        with sw.fallback("error"):
            y = F.normalize(x, dim=1)
        assert y.placements == (Shard(0),)
        assert torch.allclose(y.full_tensor(), F.normalize(full(4, 4), dim=1))

    ranks(run)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 3 * x**2


def test_a_custom_autograd_function_is_right_on_whole_tensors_and_refused_on_split_ones():
    def run(mesh):
        x = split(full(3), mesh, Replicate()).requires_grad_()
        y = Cube.apply(x)
        assert isinstance(y, DTensor)
        y.sum().backward()
        assert torch.equal(x.grad.full_tensor(), 3 * full(3) ** 2)
        x = split(full(3), mesh, Shard(0)).requires_grad_()
        with pytest.raises(sw.DispatchError, match=r"Cube.apply: got a DTensor.*local_map"):
            Cube.apply(x)
        sw.local_map(Cube.apply, out_placements=[Shard(0)])(x).sum().backward()
        assert torch.equal(x.grad.full_tensor(), 3 * full(3) ** 2)

    ranks(run)


@torch.library.custom_op("shardwise_tests::scaled_product", mutates_args=())
def scaled_product(x: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
    return (x @ y) * scale


@scaled_product.register_fake
def _(x, y, scale):
    return x.new_empty(x.shape[0], y.shape[1])


def _product_backward(ctx, gradient):
    x, y = ctx.saved_tensors
    return gradient @ y.T * ctx.scale, x.T @ gradient * ctx.scale, None


def _product_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2])
    ctx.scale = inputs[2]


scaled_product.register_autograd(_product_backward, setup_context=_product_setup)


def test_a_rule_for_a_users_operator_is_one_line_and_can_be_checked():
    from shardwise.testing import Sample, check_rule

    sw.register_rule(scaled_product, "m k, k n -> m n", linear=[(0,), (1,)])
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    y = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    report = check_rule(scaled_product, [Sample(x, y, 2.0)])
    assert report.cases > 50


def test_check_rule_finds_a_wrong_rule_and_a_missing_split():
    from shardwise.testing import Sample, check_rule

    sample = Sample(
        torch.randn(5, 4, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64), 2.0
    )
    sw.register_rule(scaled_product, "m k, k n -> m n", reduces="max")
    with pytest.raises(sw.RuleError, match="result 0 is wrong: off by"):
        check_rule(scaled_product, [sample], mesh_shapes=[(2,)])
    sw.register_rule(scaled_product, "m _, _ n -> m n", linear=[(0,), (1,)])
    with pytest.raises(sw.RuleError, match=r"legal, but communicates: .* Shard\(1\), Shard\(0\)"):
        check_rule(scaled_product, [sample], mesh_shapes=[(2,)])
    sw.register_rule(scaled_product, "m k, k n -> m n", linear=[(0, 1)])
    with pytest.raises(sw.RuleError, match="off by"):
        check_rule(scaled_product, [sample], mesh_shapes=[(2,)])


def test_a_rule_that_does_not_fit_is_refused():
    with pytest.raises(sw.RuleError, match=r"expected an operator such as torch\.ops\.mine\.op"):
        sw.register_rule(len, "m -> m")
    with pytest.raises(sw.RuleError, match="pattern: expected such as"):
        sw.register_rule(scaled_product, "m k, k n")
    with pytest.raises(sw.RuleError, match="expected positions below 2"):
        sw.register_rule(scaled_product, "m k, k n -> m n", linear=[(2,)])


# ---- errors


def test_tensors_of_two_meshes_do_not_mix():
    def run(mesh):
        other = sw.init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
        x = split(full(4), mesh, Shard(0))
        y = split(full(4), other, Replicate(), Shard(0))
        with pytest.raises(sw.MeshError, match=r"add: expected DTensors on one mesh.*redistribute"):
            x + y
        x + y.redistribute(mesh, [Shard(0)])
        # whole tensors are at home on any mesh of the same ranks
        assert (x + split(full(4), other, Replicate(), Replicate())).placements == (Shard(0),)

    ranks(run)


def test_torchs_own_errors_are_about_global_shapes():
    def run(mesh):
        x = split(full(4, 6), mesh, Shard(0))
        with pytest.raises(RuntimeError, match=r"\[4, 6\] X \[4, 6\]"):
            torch.mm(x, x)
        with pytest.raises(RuntimeError, match=r"invalid for input of size 24"):
            x.view(5, 5)
        with pytest.raises(IndexError, match="out of range"):
            x.sum(7)

    ranks(run)


def test_an_error_inside_a_rule_becomes_torchs_own_error():
    def run(mesh):
        x = split(torch.ones(3, 3, 4), mesh, Shard(0))
        with pytest.raises(RuntimeError, match="stride must be greater than zero"):
            torch.max_pool1d(x, 1, 0)
        with pytest.raises(RuntimeError, match="shifts and dimensions must align"):
            x.roll((2, 1), 0)
        with pytest.raises(RuntimeError, match="output_size must be 2"):
            torch.nn.functional.adaptive_avg_pool2d(x, ())

    ranks(run)


def test_nothing_is_communicated_when_layouts_fit():
    events = []

    def run(mesh):
        x = split(full(4, 4), mesh, Shard(0), Replicate())
        w = split(full(4, 4), mesh, Replicate(), Shard(1))
        with listen(events.append):
            y = torch.relu(x @ w) * 2
        assert y.placements == (Shard(0), Shard(1))

    ranks(run, 4, (2, 2))
    assert not events


NUMPYS = {
    "chunk": lambda x: x.chunk(2, axis=1)[1],
    "unbind": lambda x: x.unbind(axis=1)[3],
    "narrow": lambda x: x.narrow(axis=1, start=1, length=2),
    "select": lambda x: x.select(axis=1, index=2),
    "unsqueeze": lambda x: x.unsqueeze(axis=1),
    "squeeze": lambda x: x[:1].squeeze(axis=0),
    "stack": lambda x: torch.stack([x, x], axis=1),
    "softmax": lambda x: torch.softmax(x, axis=1),
    "log_softmax": lambda x: x.log_softmax(axis=1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, axis=1),
    "gather": lambda x: x.gather(axis=1, index=torch.tensor([[0, 3]])),
    "max": lambda x: x.max(axis=1, keepdims=True).values,
    "topk": lambda x: x.topk(2, axis=1).values,
}


@pytest.mark.parametrize("call", NUMPYS.values(), ids=NUMPYS.keys())
def test_numpys_names_of_arguments_are_taken_as_torch_takes_them(call):
    plain = torch.arange(12.0).reshape(3, 4).sin()

    def run():
        mesh = sw.init_device_mesh("cpu", (2,))
        with sw.fallback("error"):
            return call(sw.distribute_tensor(plain, mesh, [Shard(1)])).full_tensor()

    for result in sw.simulate(run, 2):
        torch.testing.assert_close(result, call(plain))


def test_an_axis_that_torch_itself_calls_so_stays_one():
    def run(mesh):
        x = split(torch.arange(5.0), mesh, Shard(0))
        with sw.fallback("replicate"):
            result = torch.segment_reduce(x, "max", lengths=torch.tensor([2, 3]), axis=0)
        assert result.full_tensor().tolist() == [1.0, 4.0]

    ranks(run)


def test_a_dispatch_mode_of_the_user_s_sees_local_tensors_also_in_the_backward():
    from torch.utils.flop_counter import FlopCounterMode

    def run(mesh):
        torch.manual_seed(0)
        x = split(torch.randn(4, 6), mesh, Shard(0))
        w = split(torch.randn(6, 6), mesh, Shard(1)).requires_grad_()
        with FlopCounterMode(display=False) as counter:
            F.gelu(x @ w).square().sum().backward()
        with torch.inference_mode():  # which is no mode of the user's
            assert torch.ops.aten.mm.default(x, w).shape == (4, 6)
        return w.grad.full_tensor(), counter.get_total_flops()

    (ours, flops), _ = ranks(run)
    torch.manual_seed(0)
    x, w = torch.randn(4, 6), torch.randn(6, 6).requires_grad_()
    F.gelu(x @ w).square().sum().backward()
    assert torch.allclose(ours, w.grad, atol=1e-5)
    assert flops == 2 * (2 * 4 * 6 * 6) // 2  # the product and its gradient, half of each here


def test_plain_accumulators_take_numbers_that_are_whole_on_every_rank():
    """As metrics do: `total += loss`; a pending sum is computed first, and told once."""

    def run(mesh):
        x = split(full(4), mesh, Shard(0))
        total = torch.tensor(0.0)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(3):
                total += x.mean()
                total.add_(x.max())
                torch.maximum(total, x.sum(), out=total)
        assert type(total) is torch.Tensor
        row = torch.zeros(4)
        row += x.redistribute(placements=[Replicate()])
        row[0] = x.sum().full_tensor()
        out = torch.zeros(4, 4)
        whole = x.redistribute(placements=[Replicate()])
        torch.addmm(torch.zeros(4, 4), whole[:, None], whole[None], out=out)
        return total, row, out, len(told)

    x, total = full(4), torch.tensor(0.0)
    for _ in range(3):
        total = torch.maximum(total + x.mean() + x.max(), x.sum())
    found = ranks(run)
    for made, row, out, _ in found:
        assert torch.equal(made, total)
        assert torch.equal(row, torch.tensor([10.0, 2.0, 3.0, 4.0]))
        assert torch.equal(out, torch.outer(x, x))
    assert sum(told for *_, told in found) <= 4
