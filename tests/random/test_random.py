"""Random numbers belong to the global tensor: layouts, meshes and ranks do not matter."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.api import factories
from shardwise.random import philox, samplers
from shardwise.testing import layouts_of

MESHES = [(1,), (2,), (3,), (2, 2)]
KEY = 2**64 - 12345
ONE = sw.DeviceMesh.abstract((1,))


def layouts(shape: tuple[int, ...], mesh: sw.DeviceMesh) -> list[sw.Layout]:
    return layouts_of(torch.empty(shape), mesh)


def on_ranks(run: Callable[..., Any], mesh_shape: tuple[int, ...]) -> list[Any]:
    def start() -> Any:
        return run(sw.init_device_mesh("cpu", mesh_shape))

    return sw.simulate(start, math.prod(mesh_shape))


# ---- the words


def stream(count: int) -> np.ndarray:
    return np.random.Philox(key=KEY).random_raw(count)


def words(layout: sw.Layout, place: tuple[int, ...]) -> np.ndarray:
    """Those of the shard at a place."""
    ((runs, _),) = philox.boxes_of(layout, place)
    made = philox.blocks(KEY, runs)
    return np.concatenate([philox.NONE, *made]).reshape(runs.shape)


def test_the_word_of_an_element_is_that_of_its_global_position() -> None:
    mesh = sw.DeviceMesh.abstract((2,))
    layout = sw.Layout.from_placements(mesh, (2, 6), [sw.Shard(1)])
    assert words(layout, (1,)).tolist() == [
        stream(12)[3:6].tolist(),
        stream(12)[9:12].tolist(),
    ]


@pytest.mark.parametrize(
    "shape", [(), (7,), (0, 3), (5, 4), (3, 5, 7), (2, 3, 4, 5), (6, 3001), (3, 2, 2003)]
)
@pytest.mark.parametrize("mesh_shape", [*MESHES, (2, 3)])
def test_words_of_any_shard(shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> None:
    expected = stream(math.prod(shape)).reshape(shape)
    mesh = sw.DeviceMesh.abstract(mesh_shape)
    for layout in layouts(shape, mesh):
        for rank in range(mesh.size()):
            place = mesh.coordinate_of(rank)
            found = words(layout, place)
            assert (found == expected[layout.box(place).slices]).all(), (layout, place)


@settings(deadline=None, max_examples=60)
@given(
    shape=st.lists(st.integers(1, 18), min_size=1, max_size=4),
    dims=st.lists(st.integers(0, 3), min_size=1, max_size=3),
    block=st.sampled_from([1, 6, 64, 1 << 14]),
    jump=st.sampled_from([0, 3, 40, 500]),
)
def test_how_the_words_are_made_does_not_matter(
    shape: list[int], dims: list[int], block: int, jump: int
) -> None:
    mesh = sw.DeviceMesh.abstract((2, 3, 2)[: len(dims)])
    placements = [sw.Shard(dim % len(shape)) for dim in dims]
    layout = sw.Layout.from_placements(mesh, shape, placements)
    expected = stream(math.prod(shape)).reshape(shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(philox, "BLOCK", block)
        patch.setattr(philox, "_JUMP", jump)
        philox.boxes_of.cache_clear()
        for rank in range(mesh.size()):
            place = mesh.coordinate_of(rank)
            found = words(layout, place)
            assert (found == expected[layout.box(place).slices]).all()
    philox.boxes_of.cache_clear()


def test_a_shard_far_into_a_huge_tensor_is_made_alone() -> None:
    mesh = sw.DeviceMesh.abstract((2**20,))
    layout = sw.Layout.from_placements(mesh, (2**40,), [sw.Shard(0)])
    place = (2**20 - 1,)
    stream = np.random.Philox(key=KEY)
    stream.advance((2**40 - 2**20) // 4)
    assert (words(layout, place) == stream.random_raw(2**20)).all()


# ---- the key


def test_a_key_takes_64_bits_off_the_default_generator() -> None:
    torch.manual_seed(3)
    keys = [samplers.draw_key() for _ in range(200)]
    torch.manual_seed(3)
    drawn = torch.empty(200, dtype=torch.int64).random_(-(2**63), None)
    assert keys == [int(each) % 2**64 for each in drawn]
    assert max(keys) > 2**63 > min(keys)


def test_a_generator_is_drawn_from_instead() -> None:
    before = torch.get_rng_state()
    first = samplers.draw_key(generator=torch.Generator().manual_seed(1))
    assert first == samplers.draw_key(generator=torch.Generator().manual_seed(1))
    assert first != samplers.draw_key(generator=torch.Generator().manual_seed(2))
    assert torch.equal(before, torch.get_rng_state())


# ---- the numbers

MANY = sw.Layout(ONE, (1_000_000,))
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", FLOATS)
def test_uniform_numbers(dtype: torch.dtype) -> None:
    values = samplers.uniform(KEY, MANY, dtype=dtype).double()
    step = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}.get(dtype, 0)
    assert abs(values.mean() + step / 2 - 0.5) < 0.0015
    assert abs(values.var() - 1 / 12) < 0.0005
    assert values.min() >= 0 and values.max() < 1


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-2.0, 3.0), (0.9, 1.0), (1e6, 1e6 + 1)])
def test_uniform_numbers_stay_below_the_limit_after_rounding(
    dtype: torch.dtype, low: float, high: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    extremes = np.array([0, 2**64 - 1], dtype=np.uint64)
    monkeypatch.setattr(samplers, "blocks", lambda *_: iter([extremes]))
    if dtype == torch.float16 and high > 65504:
        return
    least, largest = samplers.uniform(KEY, sw.Layout(ONE, (2,)), low, high, dtype).tolist()
    assert least <= largest < high
    assert least == torch.tensor(low, dtype=dtype).item() or least < low


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_normal_numbers(dtype: torch.dtype) -> None:
    values = samplers.normal(KEY, MANY, dtype=dtype).double()
    for power, expected, allowed in [(1, 0, 4e-3), (2, 1, 6e-3), (3, 0, 2e-2), (4, 3, 5e-2)]:
        assert abs((values**power).mean() - expected) < allowed
    assert abs((values.abs() > 3).double().mean() - 0.0026998) < 0.0002
    assert abs((values.abs() > 4).sum() - 63) < 40
    ordered = torch.special.ndtr(values.sort().values)
    distance = (ordered - torch.linspace(0, 1, len(values), dtype=torch.float64)).abs().max()
    assert distance * math.sqrt(len(values)) < 1.95  # Kolmogorov and Smirnov's, 0.1 %


def test_the_tails_of_normal_numbers_are_exact_and_finite() -> None:
    words = np.array([0, 1, 2**64 - 1, 2**64 - 2, 2**63], dtype=np.uint64)
    exact = [
        -8.292361075813596,
        8.292361075813596,
        1.391458e-16,
        -1.391458e-16,
        -0.6744897501960817,
    ]
    assert samplers._gauss_double(words) == pytest.approx(exact, rel=1e-6)
    single = samplers._gauss_single(words)
    assert np.isfinite(single).all() and single[0] == pytest.approx(6.7637, rel=1e-4)


def test_other_distributions() -> None:
    exponential = samplers.exponential(KEY, MANY, 2.0, torch.float64)
    assert exponential.min() > 0
    assert abs(exponential.mean() - 0.5) < 0.003 and abs(exponential.var() - 0.25) < 0.005
    assert abs(samplers.cauchy(KEY, MANY, 3.0, 2.0).sub(3).abs().median() - 2) < 0.02
    trials = samplers.geometric(KEY, MANY, 0.25)
    assert trials.min() == 1 and abs(trials.mean() - 4) < 0.02
    log_normal = samplers.log_normal(KEY, MANY, 0.0, 0.5, torch.float64)
    assert abs(log_normal.mean() - math.exp(0.125)) < 0.003
    for p in (0.0, 0.3, 1.0):
        assert abs(samplers.bernoulli(KEY, MANY, p, dtype=torch.float64).mean() - p) < 0.002
    assert set(samplers.bernoulli(KEY, MANY, 0.3, divisor=0.4).unique().tolist()) == {0.0, 2.5}
    counts = torch.bincount(samplers.integers(KEY, MANY, -5, 6) + 5)
    assert len(counts) == 11 and (counts - 1e6 / 11).abs().max() < 1500
    anything = samplers.integers(KEY, MANY, -(2**63), 2**63)
    assert anything.min() < -(2**62) and anything.max() > 2**62
    assert samplers.permutation(KEY, sw.Layout(ONE, (9,))).sort().values.tolist() == list(range(9))
    complex_ = samplers.normal(KEY, MANY, 1.0, 2.0, torch.complex64)
    assert abs(complex_.mean() - 1) < 0.01 and abs(complex_.var() - 4) < 0.02


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_exponential_numbers_always_have_a_logarithm(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest = np.array([2**64 - 1, 0], dtype=np.uint64)
    monkeypatch.setattr(samplers, "blocks", lambda *_: iter([largest]))
    values = samplers.exponential(KEY, sw.Layout(ONE, (2,)), dtype=dtype)
    assert torch.isfinite(values.double().log()).all()


def test_neighbours_and_streams_are_not_correlated() -> None:
    first = samplers.uniform(KEY, MANY, dtype=torch.float64)
    other = samplers.uniform(KEY + 1, MANY, dtype=torch.float64)
    pairs = [(first[1:], first[:-1]), (first[4:], first[:-4]), (first, other)]
    for left, right in pairs:
        assert abs(torch.corrcoef(torch.stack([left, right]))[0, 1]) < 0.004


# ---- factories

FACTORIES: dict[str, Callable[..., Any]] = {
    "rand": lambda **how: factories.rand(5, 7, **how),
    "randn": lambda **how: factories.randn((5, 7), **how),
    "randn in half": lambda **how: factories.randn(5, 7, dtype=torch.float16, **how),
    "randint": lambda **how: factories.randint(3, 9, (5, 7), **how),
    "randint below": lambda **how: factories.randint(9, (5, 7), **how),
    "randperm": lambda **how: factories.randperm(7, **how),
    "zeros": lambda **how: factories.zeros(5, 7, **how),
    "arange": lambda **how: factories.arange(2, 9.5, 0.7, **how),
    "linspace": lambda **how: factories.linspace(-1, 2, 7, **how),
    "linspace of two": lambda **how: factories.linspace(-3, 3, 2, dtype=torch.int64, **how),
    "linspace of none": lambda **how: factories.linspace(0, 1, 0, **how),
    "logspace": lambda **how: factories.logspace(-2, 3, 7, **how),
    "logspace of base 2": lambda **how: factories.logspace(0, 9, 5, 2, dtype=torch.int64, **how),
    "logspace of one": lambda **how: factories.logspace(2.5, 9, 1, base=3, **how),
    "eye": lambda **how: factories.eye(5, 7, **how),
    "ones": lambda **how: factories.ones([5, 7], dtype=torch.int32, **how),
    "full": lambda **how: factories.full((5, 7), 2.5, **how),
}


TORCHS = {
    "ones": torch.ones(5, 7, dtype=torch.int32),
    "full": torch.full((5, 7), 2.5),
    "arange": torch.arange(2, 9.5, 0.7),
    "linspace": torch.linspace(-1, 2, 7),
    "linspace of two": torch.linspace(-3, 3, 2, dtype=torch.int64),
    "linspace of none": torch.linspace(0, 1, 0),
    "logspace": torch.logspace(-2, 3, 7),
    "logspace of base 2": torch.logspace(0, 9, 5, 2, dtype=torch.int64),
    "logspace of one": torch.logspace(2.5, 9, 1, base=3),
    "eye": torch.eye(5, 7),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_a_new_tensor_is_the_same_on_every_layout(name: str) -> None:
    make = FACTORIES[name]
    whole = [sw.Replicate()]

    def run(mesh: sw.DeviceMesh) -> list[Any]:
        found = []
        torch.manual_seed(5)
        shape = make(device_mesh=mesh, placements=whole * mesh.ndim).shape
        for layout in layouts(shape, mesh):
            torch.manual_seed(5)
            made = make(device_mesh=mesh, placements=layout.placements)
            assert made.placements == layout.placements
            assert made.to_local().shape == made.mesh_layout.local_shape()
            found.append((made.full_tensor(), torch.get_rng_state()))
        return found

    expected, after = on_ranks(run, (1,))[0][0]
    if name in TORCHS:
        assert torch.equal(expected, TORCHS[name]) and expected.dtype == TORCHS[name].dtype
    for mesh_shape in MESHES:
        for rank in on_ranks(run, mesh_shape):
            for values, state in rank:
                assert torch.equal(values, expected) and values.dtype == expected.dtype
                assert torch.equal(state, after)


def test_factories_take_what_torch_takes() -> None:
    mesh = sw.DeviceMesh.abstract((2, 2))
    for make in (factories.empty, factories.zeros, factories.ones, factories.rand):
        made = make(6, 5, device_mesh=mesh, placements=[sw.Shard(0), sw.Shard(1)])
        assert made.is_meta and made.shape == (6, 5) and made.to_local().shape == (3, 3)
    made = factories.zeros(2, dtype=torch.float64, requires_grad=True, device_mesh=mesh)
    assert made.requires_grad and made.dtype == torch.float64
    assert made.placements == (sw.Replicate(), sw.Replicate())
    assert factories.full((2,), 3, device_mesh=mesh).dtype == torch.int64
    rows = {"device_mesh": mesh, "placements": [sw.Shard(0), sw.Partial()]}
    assert factories.arange(5, **rows).dtype == torch.int64
    for made in (factories.arange(5, **rows), factories.eye(5, 4, **rows)):
        assert made.is_meta and made.to_local().shape[0] == 3
    with pytest.raises(sw.MeshError, match="device_mesh: expected a DeviceMesh, or a call within"):
        factories.rand(3)
    with pytest.raises(sw.LayoutError, match=r"zeros\(layout\): expected torch.strided"):
        factories.zeros(3, device_mesh=mesh, layout=torch.sparse_coo)
    with pytest.raises(sw.LayoutError, match="expected low < high, got 4 and 4"):
        factories.randint(4, 4, (2,), device_mesh=mesh)


SPACED = {"linspace": torch.linspace, "logspace": torch.logspace}
ENDS = {
    torch.float64: (-1.25, 2.5),
    torch.float16: (-1, 2),
    torch.bfloat16: (-1.5, 2),
    torch.int32: (0, 4),
    torch.uint8: (0, 2),
    torch.complex64: (1 - 1j, 2),
    torch.complex128: (0.5, 2j),
    None: (1j, 2),
}


@pytest.mark.parametrize("name", SPACED)
@pytest.mark.parametrize("dtype", ENDS)
def test_evenly_spaced_numbers_are_torchs_in_every_dtype(
    name: str, dtype: torch.dtype | None
) -> None:
    make, ends = getattr(sw, name), ENDS[dtype]
    expected = SPACED[name](*ends, 7, dtype=dtype)

    def run(mesh: sw.DeviceMesh) -> None:
        for placement in (sw.Shard(0), sw.Replicate(), sw.Partial()):
            how = {"device_mesh": mesh, "placements": [placement]}
            made = make(*ends, 7, dtype=dtype, **how)
            assert made.dtype == expected.dtype and torch.equal(made.full_tensor(), expected)

    on_ranks(run, (3,))


@pytest.mark.parametrize("name", SPACED)
def test_the_ends_of_evenly_spaced_numbers_may_be_tensors_of_one_number(name: str) -> None:
    make, expected = getattr(sw, name), SPACED[name](-1.0, 2.0, 5)

    def run(mesh: sw.DeviceMesh) -> None:
        how = {"device_mesh": mesh, "placements": [sw.Shard(0)]}
        start = sw.full((), -1.0, device_mesh=mesh, placements=[sw.Partial()])
        for first, last in ((torch.tensor(-1.0), torch.tensor(2.0)), (start, 2.0)):
            made = make(first, last, 5, requires_grad=True, **how)
            assert made.requires_grad and made.is_leaf
            assert torch.equal(made.full_tensor(), expected)
        with pytest.raises(sw.LayoutError, match=rf"{name}\(end\): expected .* a 0-d tensor"):
            make(0, torch.ones(1), 5, **how)
        with pytest.raises(sw.LayoutError, match=rf"{name}\(steps\): .* from 0 on, got -1"):
            make(0, 1, -1, **how)
        with pytest.raises(sw.LayoutError, match=rf"{name}\(steps\): .* got 2.5"):
            make(0, 1, 2.5, **how)

    on_ranks(run, (2,))


def test_shards_differ_and_so_do_successive_calls() -> None:
    def run(mesh: sw.DeviceMesh) -> list[list[float]]:
        made = [factories.rand(8, device_mesh=mesh, placements=[sw.Shard(0)]) for _ in range(2)]
        return [each.to_local().tolist() for each in made]

    pieces = [tuple(piece) for rank in on_ranks(run, (2,)) for piece in rank]
    assert len(set(pieces)) == 4


def test_a_generator_makes_a_tensor_again() -> None:
    def run(mesh: sw.DeviceMesh) -> bool:
        made = [
            factories.randn(
                6,
                device_mesh=mesh,
                placements=[placement],
                generator=torch.Generator().manual_seed(8),
            )
            for placement in (sw.Shard(0), sw.Replicate())
        ]
        return torch.equal(made[0].full_tensor(), made[1].full_tensor())

    assert on_ranks(run, (2,)) == [True, True]


# ---- torch's ways of keeping and restoring random state


def test_random_state_is_saved_restored_and_forked() -> None:
    def run(mesh: sw.DeviceMesh) -> None:
        def draw() -> list[float]:
            made = factories.rand(5, device_mesh=mesh, placements=[sw.Shard(0)])
            return made.full_tensor().tolist()

        state = torch.get_rng_state()
        with torch.random.fork_rng():
            inside = draw()
            assert draw() != inside
        assert draw() == inside
        torch.set_rng_state(state)
        assert draw() == inside
        assert torch.rand(3).tolist() != torch.rand(3).tolist()

    on_ranks(run, (2,))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_repeats_the_dropout(use_reentrant: bool) -> None:
    def run(mesh: sw.DeviceMesh) -> None:
        torch.manual_seed(1)
        weight = factories.randn(
            6, 6, device_mesh=mesh, placements=[sw.Shard(1)], requires_grad=True
        )
        value = factories.randn(4, 6, device_mesh=mesh, placements=[sw.Replicate()])

        def layer(x: torch.Tensor) -> torch.Tensor:
            return F.dropout(F.relu(x @ weight), 0.5)

        found = []
        for is_checkpointed in (False, True):
            torch.manual_seed(2)
            x = value.clone().requires_grad_()
            if is_checkpointed:
                y = checkpoint(layer, x, use_reentrant=use_reentrant)
            else:
                y = layer(x)
            torch.rand(3)
            y.square().sum().backward()
            assert x.grad is not None
            found.append((y.full_tensor().detach(), x.grad.full_tensor()))
        (y, gradient), (again, same) = found
        assert torch.equal(y, again) and torch.allclose(gradient, same) and gradient.any()

    on_ranks(run, (2,))


def test_integers_below_a_number_begin_with_zero() -> None:
    def program() -> None:
        mesh = sw.init_device_mesh("cpu", (2,))
        for arguments in ((1, (8, 4)), (0, 1, (8, 4))):
            x = factories.randint(*arguments, device_mesh=mesh, placements=[sw.Shard(0)])
            assert not x.full_tensor().any()

    sw.simulate(program, 2)
