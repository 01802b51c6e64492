"""check_rule: compare an operator on DTensors with the same operator in one process.

Rules are checked, not believed. Every layout of the inputs is tried (a fixed sample of them where
there are too many): values, dtypes, shapes and gradients. And what is legal is found numerically: a
split that a rule does not offer is reported.
"""

from __future__ import annotations

import itertools
import math
import random
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from shardwise.comm import Event, listen
from shardwise.dispatch.state import fallback
from shardwise.layout import Layout
from shardwise.mesh import DeviceMesh, init_device_mesh
from shardwise.pieces import check_dense
from shardwise.placement import Partial, Placement, Replicate, Shard
from shardwise.policy import PolicyError
from shardwise.rules.calls import tensors_in
from shardwise.rules.registry import RuleError
from shardwise.sim import simulate
from shardwise.tensor import DTensor, wrap


class Sample:
    """The arguments of one call, with plain tensors.

    Example:
        >>> Sample(torch.randn(5, 4), dim=1)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs

    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the arguments, in order."""
        return list(tensors_in((self.args, self.kwargs)))

    def filled(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with these tensors in place of its own."""
        rest = iter(tensors)
        args = tuple(_filled(arg, rest) for arg in self.args)
        return args, {name: _filled(arg, rest) for name, arg in self.kwargs.items()}

    def __repr__(self) -> str:
        parts = [_shown(arg) for arg in self.args]
        parts += [f"{name}={_shown(arg)}" for name, arg in self.kwargs.items()]
        return f"({', '.join(parts)})"


@dataclass
class Report:
    """What `check_rule` found."""

    cases: int = 0
    """How many layouts of inputs were tried."""
    fallbacks: list[str] = field(default_factory=list)
    """Layouts that no rule speaks for."""
    wrong: list[str] = field(default_factory=list)
    """Where values, dtypes, shapes or gradients differ, or an error was raised."""
    missing: list[str] = field(default_factory=list)
    """Splits that are legal but communicate."""

    def __str__(self) -> str:
        lines = [f"{self.cases} cases, {len(self.wrong)} wrong, {len(self.fallbacks)} fall back"]
        for title, found in (
            ("wrong", self.wrong),
            ("falls back", self.fallbacks),
            ("legal, but communicates", self.missing),
        ):
            lines += [f"  {title}: {each}" for each in found[:12]]
            if len(found) > 12:
                lines.append(f"  {title}: ... and {len(found) - 12} more")
        return "\n".join(lines)


def check_rule(
    fn: Callable[..., Any],
    samples: Sequence[Sample],
    *,
    mesh_shapes: Sequence[tuple[int, ...]] = ((2,), (3,), (2, 2)),
    gradients: bool = True,
    most: int = 60,
    seed: int = 0,
    allow_fallback: bool = False,
    allow_missing: bool = False,
    rtol: float = 1e-7,
    atol: float = 1e-9,
) -> Report:
    """Compare `fn` on DTensors of every layout with `fn` on the plain tensors.

    Arguments:
        fn: what is checked; a torch function or any function of tensors.
        samples: its arguments. float64 makes small errors visible. Tensors that require grad get
            their gradients compared.
        mesh_shapes: the meshes to try, in `simulate`.
        gradients: whether to compare gradients.
        most: how many layouts to try for each sample and mesh; all if there are fewer.
        allow_fallback: whether a call without a rule may be made whole.
        allow_missing: do not look for legal splits that communicate. To look for them, the plain
            operator is called with pieces of its inputs, which a few operators do not survive.

    Returns:
        What was tried. Anything wrong is raised as a `RuleError` with the same report.

    Example:
        >>> check_rule(torch.mm, [Sample(torch.randn(5, 4), torch.randn(4, 3))])
    """
    report = Report()
    policy = "replicate" if allow_fallback else "error"
    tolerance = Tolerance(rtol, atol)
    for sample in samples:
        reference = _reference(fn, sample, gradients)
        for mesh_shape in mesh_shapes:
            check = _Check(fn, sample, reference, tolerance, mesh_shape, policy)
            check.run(report, most, seed)
        if not allow_missing:
            report.missing += missing_splits(fn, sample)
    if report.wrong or (report.fallbacks and not allow_fallback) or report.missing:
        raise RuleError(f"check_rule({getattr(fn, '__name__', fn)}): {report}")
    return report


def layouts_of(tensor: torch.Tensor, mesh: DeviceMesh) -> list[Layout]:
    """Every layout a tensor can have on a mesh (of nested shards, two orders)."""
    per_axis: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(tensor.dim()))]
    if tensor.is_floating_point() or tensor.is_complex():
        per_axis.append(Partial())
    found = [
        Layout.from_placements(mesh, tensor.shape, placements)
        for placements in itertools.product(per_axis, repeat=mesh.ndim)
    ]
    nested = [each for each in found if any(len(axes) > 1 for axes in each.shard_order)]
    return found + [each.relaid(axes[::-1] for axes in each.shard_order) for each in nested]


def piece(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """This rank's piece of a tensor that every rank has; contributions that add up to it."""
    place = layout.mesh.get_coordinate()
    assert place is not None, "every rank is on the mesh"
    local = layout.piece_of(tensor, place).clone()
    for axis, _ in layout.partial:
        local = contribution(local, place[axis], layout.mesh.shape[axis])
    return local


def contribution(total: torch.Tensor, at: int, count: int) -> torch.Tensor:
    """One of so many contributions: x is 2x - x + 0 + ..., exact in any order of adding up."""
    if count == 1:
        return total
    finite = torch.isfinite(total)
    others = total if at == 0 else torch.zeros_like(total)
    return torch.where(finite, total * 2 if at == 0 else -total if at == 1 else others, others)


def distributed(tensor: torch.Tensor, layout: Layout) -> DTensor:
    """A leaf in this layout, of a tensor that every rank has."""
    check_dense("tensor", tensor)
    result = wrap(piece(tensor.detach(), layout), layout)
    result.requires_grad = tensor.requires_grad
    return result


class Reference(NamedTuple):
    """What a call gives in one process."""

    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor | None] | None
    """Of the inputs that require grad; None if they are not compared."""


class Tolerance(NamedTuple):
    """How far numbers may be off."""

    rtol: float
    atol: float


@dataclass(frozen=True)
class _Check:
    """One sample on one mesh."""

    fn: Callable[..., Any]
    sample: Sample
    reference: Reference
    tolerance: Tolerance
    mesh_shape: tuple[int, ...]
    policy: str
    """What happens to a call without a rule."""

    def run(self, report: Report, most: int, seed: int) -> None:
        """Try so many layouts, and report."""

        def cases() -> list[tuple[str, str]]:
            mesh = init_device_mesh("cpu", self.mesh_shape)
            choices = [layouts_of(each, mesh) for each in self.sample.tensors()]
            return [self.outcome(layouts) for layouts in _combinations(choices, most, seed)]

        by_rank = simulate(cases, math.prod(self.mesh_shape))
        report.cases += len(by_rank[0])
        for outcomes in zip(*by_rank, strict=True):
            kind, text = next((each for each in outcomes if each[0]), ("", ""))
            if kind:
                (report.wrong if kind == "wrong" else report.fallbacks).append(text)

    def outcome(self, layouts: Sequence[Layout]) -> tuple[str, str]:
        """What kind of problem one case has, and which; nothing twice if it has none."""
        case = f"{self.sample} on {self.mesh_shape} with {', '.join(map(repr, layouts))}"
        with fallback(self.policy):
            try:
                problem = self.problem(layouts)
            except PolicyError as error:
                return "fallback", f"{case}: {error}"
        return ("wrong", f"{case}: {problem}") if problem else ("", "")

    def problem(self, layouts: Sequence[Layout]) -> str:
        """What is wrong with one case, or nothing."""
        tensors = self.sample.tensors()
        inputs = [distributed(each, how) for each, how in zip(tensors, layouts, strict=True)]
        args, kwargs = self.sample.filled(inputs)
        try:
            outputs = [whole_of(each) for each in tensors_in(self.fn(*args, **kwargs))]
        except PolicyError:
            raise
        except (RuntimeError, ValueError, IndexError, TypeError, AssertionError, KeyError) as error:
            trace = traceback.extract_tb(error.__traceback__)[-1]
            return f"raised {type(error).__name__}: {error} ({trace.filename}:{trace.lineno})"
        problem = _difference(outputs, self.reference.outputs, "result", self.tolerance)
        if problem or self.reference.gradients is None:
            return problem
        loss_of(outputs).backward()  # type: ignore[no-untyped-call]
        leaves = [each for each in inputs if each.requires_grad]
        return self.problem_of_gradients(leaves, self.reference.gradients)

    def problem_of_gradients(
        self, leaves: Sequence[DTensor], expected: Sequence[torch.Tensor | None]
    ) -> str:
        """The same, of the gradients. One that is missing is zero."""
        for at, (leaf, want) in enumerate(zip(leaves, expected, strict=True)):
            if leaf.grad is not None:
                got = leaf.grad.full_tensor()
                want = torch.zeros_like(got) if want is None else want
            elif want is not None:
                got = torch.zeros_like(want)
            else:
                continue
            problem = _difference([got], [want], f"gradient of input {at}", self.tolerance)
            if problem:
                return problem
        return ""


def _reference(fn: Callable[..., Any], sample: Sample, gradients: bool) -> Reference:
    """The results and gradients in one process."""
    tensors = [each.detach().clone().requires_grad_(each.requires_grad)
               for each in sample.tensors()]  # fmt: skip
    args, kwargs = sample.filled(tensors)
    outputs = list(tensors_in(fn(*args, **kwargs)))
    leaves = [each for each in tensors if each.requires_grad]
    found = [each.detach().clone() for each in outputs]
    if not gradients or not leaves or not any(each.requires_grad for each in outputs):
        return Reference(found, None)
    grads = torch.autograd.grad(loss_of(outputs), leaves, allow_unused=True)
    return Reference(found, list(grads))


def loss_of(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """A number that depends on every element of the results differently."""
    total = torch.zeros((), dtype=torch.float64)
    for at, each in enumerate(outputs):
        if each.requires_grad:
            generator = torch.Generator().manual_seed(23 + at)
            weights = torch.randn(each.shape, generator=generator, dtype=torch.float64)
            part = each.real + each.imag if each.is_complex() else each
            total = total + (part.double() * weights).sum()
    return total


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """A result as every rank has it; its piece must be what its layout says."""
    if not isinstance(tensor, DTensor):
        return tensor
    local = tensor.to_local()
    if tuple(local.shape) != tensor.layout.local_shape():
        raise AssertionError(
            f"the result says {tensor.layout!r}, but its piece has shape {tuple(local.shape)}"
        )
    return tensor.full_tensor()


def _difference(
    got: Sequence[torch.Tensor],
    want: Sequence[torch.Tensor],
    what: str,
    tolerance: Tolerance,
) -> str:
    if len(got) != len(want):
        return f"{len(got)} tensors in the {what}, expected {len(want)}"
    for at, (have, expected) in enumerate(zip(got, want, strict=True)):
        if have.shape != expected.shape or have.dtype != expected.dtype:
            return (
                f"{what} {at} is {have.dtype}{list(have.shape)}, "
                f"expected {expected.dtype}{list(expected.shape)}"
            )
        loose = 1.0 if expected.dtype in (torch.float64, torch.complex128) else 3e3
        if not torch.allclose(
            have.detach(),
            expected.detach(),
            rtol=tolerance.rtol * loose,
            atol=tolerance.atol * loose,
            equal_nan=True,
        ):
            off = (have.detach() - expected.detach()).abs().max() if have.dtype != torch.bool else 1
            return f"{what} {at} is off by up to {float(off):.3g}"
    return ""


# ---- which splits are legal, found by trying


def missing_splits(fn: Callable[..., Any], sample: Sample) -> list[str]:
    """Splits of the inputs over two ranks that need no communication, but for which there is."""
    expected = _reference(fn, sample, gradients=False).outputs
    tensors = sample.tensors()
    choices = [[None, *range(each.dim())] for each in tensors]
    legal = [
        dims
        for dims in _combinations(choices, 200, 0)
        if any(dim is not None for dim in dims) and _is_legal(fn, sample, dims, expected)
    ]

    def run() -> list[str]:
        mesh = init_device_mesh("cpu", (2,))
        return [_communicates(fn, sample, _placements(dims), mesh) for dims in legal]

    found = simulate(run, 2)[0] if legal else []
    return [
        f"{sample} with {', '.join(map(repr, _placements(dims)))}: {kind}"
        for dims, kind in zip(legal, found, strict=True)
        if kind
    ]


def _placements(dims: Sequence[int | None]) -> list[Placement]:
    return [Replicate() if dim is None else Shard(dim) for dim in dims]


def _communicates(
    fn: Callable[..., Any], sample: Sample, placements: Sequence[Placement], mesh: DeviceMesh
) -> str:
    """The first collective of a call, or nothing."""
    events: list[Event] = []
    inputs = [
        distributed(each, Layout.from_placements(mesh, each.shape, [placement]))
        for each, placement in zip(sample.tensors(), placements, strict=True)
    ]
    args, kwargs = sample.filled(inputs)
    with listen(events.append), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fn(*args, **kwargs)
    mine = [event.kind for event in events if event.rank == mesh.get_rank()]
    return mine[0] if mine else ""


def _is_legal(
    fn: Callable[..., Any], sample: Sample, dims: Sequence[int | None], expected: Sequence[Any]
) -> bool:
    """Whether the results of two ranks with these pieces, joined or added, are the results."""
    pieces = []
    for rank in range(2):
        local = []
        for tensor, dim in zip(sample.tensors(), dims, strict=True):
            tensor = tensor.detach().clone()
            if dim is not None:
                chunks = tensor.chunk(2, dim)
                if len(chunks) < 2:
                    return False
                tensor = chunks[rank].clone()
            local.append(tensor)
        args, kwargs = sample.filled(local)
        try:
            pieces.append(list(tensors_in(fn(*args, **kwargs))))
        except Exception:
            return False
    return len(pieces[0]) == len(pieces[1]) == len(expected) and all(
        _joins(first, second, whole) for first, second, whole in zip(*pieces, expected, strict=True)
    )


def _joins(first: torch.Tensor, second: torch.Tensor, whole: torch.Tensor) -> bool:
    def same(made: torch.Tensor) -> bool:
        return made.shape == whole.shape and torch.allclose(
            made.double() if not made.is_complex() else made,
            whole.double() if not whole.is_complex() else whole,
            equal_nan=True,
        )

    if first.dim() != whole.dim() or second.dim() != whole.dim():
        return False
    if first.shape == second.shape and same(first + second):
        return True
    for dim in range(whole.dim()):
        others = [each for at, each in enumerate(first.shape) if at != dim]
        if others != [each for at, each in enumerate(second.shape) if at != dim]:
            continue
        sizes = [each.shape[dim] for each in whole.chunk(2, dim)]
        if [first.shape[dim], second.shape[dim]] == sizes and same(torch.cat([first, second], dim)):
            return True
    return False


# ---- small things


def _combinations(choices: Sequence[Sequence[Any]], most: int, seed: int) -> list[tuple[Any, ...]]:
    if math.prod(map(len, choices)) <= most:
        return list(itertools.product(*choices))
    generator = random.Random(seed)
    found = {tuple(generator.randrange(len(each)) for each in choices) for _ in range(most)}
    return [
        tuple(each[at] for each, at in zip(choices, picked, strict=True))
        for picked in sorted(found)
    ]


def _filled(value: Any, rest: Iterator[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return next(rest)
    if isinstance(value, list | tuple):
        parts = [_filled(each, rest) for each in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    return repr(value)
