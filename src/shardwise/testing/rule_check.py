"""check_rule: compare an operator on DTensors with the same operator in one process.

All layouts of the inputs are tried (a fixed sample, where there are too many), and values, dtypes,
shapes and gradients are compared. Splits that need no communication are found numerically; those
for which the rule communicates are reported.
"""

from __future__ import annotations

import math
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.comm import Event, listen
from shardwise.core.errors import PolicyError
from shardwise.core.layout import Layout
from shardwise.core.mesh import DeviceMesh, init_device_mesh
from shardwise.core.placement import Placement, Replicate, Shard
from shardwise.dispatch.errors import SUCCESS_CHECK
from shardwise.dtensor.state import fallback
from shardwise.dtensor.tensor import DTensor, tensors_in
from shardwise.rules.registry import RuleError
from shardwise.run.simulate import simulate
from shardwise.testing.inputs import Sample, combinations, distributed, layouts_of, whole_of
from shardwise.testing.reference import (
    Reference,
    Tolerance,
    difference,
    loss_of,
    reference_of,
    value_difference,
    warn_of_unstable,
    widened,
)


@dataclass
class Report:
    """The findings of `check_rule`."""

    cases: int = 0
    """The number of layouts of inputs that were tried."""
    fallbacks: list[str] = field(default_factory=list)
    """Layouts that no rule covers."""
    wrong: list[str] = field(default_factory=list)
    """Cases where values, dtypes, shapes or gradients differ, or an error was raised."""
    missing: list[str] = field(default_factory=list)
    """Splits that need no communication, but communicate."""
    unstable: list[str] = field(default_factory=list)
    """Results and gradients that torch itself does not reproduce in a second call: only their
    shapes and dtypes were compared."""

    def __str__(self) -> str:
        lines = [f"{self.cases} cases, {len(self.wrong)} wrong, {len(self.fallbacks)} fall back"]
        for title, found in (
            ("wrong", self.wrong),
            ("falls back", self.fallbacks),
            ("legal, but communicates", self.missing),
            ("not compared, as torch does not reproduce it", self.unstable),
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
    """Compare `fn` on DTensors of all layouts with `fn` on the plain tensors.

    Arguments:
        fn: a torch function, or any function of tensors.
        samples: its arguments. float64 makes small errors visible. For tensors that require grad,
            gradients are compared.
        mesh_shapes: the meshes to try, in `simulate`.
        gradients: whether to compare gradients.
        most: how many layouts to try for each sample and mesh; all if there are fewer.
        allow_fallback: whether a call without a rule may gather its inputs.
        allow_missing: do not look for splits that communicate without need. To find them, the plain
            operator is called with pieces of its inputs, which crashes a few operators.

    Returns:
        The report. Anything wrong is raised as a `RuleError` with the same report. Values that
            torch itself does not reproduce are not compared: an `UnstableWarning` names them.

    Example:
        >>> check_rule(torch.mm, [Sample(torch.randn(5, 4), torch.randn(4, 3))])
    """
    report = Report()
    policy = "replicate" if allow_fallback else "error"
    tolerance = Tolerance(rtol, atol)
    for sample in samples:
        reference = reference_of(fn, sample, gradients, tolerance)
        for kind, at in (
            *(("result", at) for at in sorted(reference.unstable)),
            *(("gradient of input", at) for at in sorted(reference.unstable_gradients)),
        ):
            report.unstable.append(f"{sample}: {kind} {at}")
        for mesh_shape in mesh_shapes:
            check = _Check(fn, sample, reference, tolerance, mesh_shape, policy)
            check.run(report, most, seed)
        if not allow_missing:
            report.missing += missing_splits(fn, sample)
    if report.wrong or (report.fallbacks and not allow_fallback) or report.missing:
        raise RuleError(f"check_rule({getattr(fn, '__name__', fn)}): {report}")
    warn_of_unstable(f"check_rule({getattr(fn, '__name__', fn)})", report.unstable)
    return report


@dataclass(frozen=True)
class _Check:
    """The check of one sample on one mesh."""

    fn: Callable[..., Any]
    sample: Sample
    reference: Reference
    tolerance: Tolerance
    mesh_shape: tuple[int, ...]
    policy: str
    """The fallback policy: what happens to a call without a rule."""

    def run(self, report: Report, most: int, seed: int) -> None:
        """Try at most `most` layouts, and add the findings to the report."""

        def cases() -> list[tuple[str, str]]:
            mesh = init_device_mesh("cpu", self.mesh_shape)
            choices = [layouts_of(each, mesh) for each in self.sample.tensors()]
            return [self.outcome(layouts) for layouts in combinations(choices, most, seed)]

        by_rank = simulate(cases, math.prod(self.mesh_shape))
        report.cases += len(by_rank[0])
        for outcomes in zip(*by_rank, strict=True):
            kind, text = next((each for each in outcomes if each[0]), ("", ""))
            if kind:
                (report.wrong if kind == "wrong" else report.fallbacks).append(text)

    def outcome(self, layouts: Sequence[Layout]) -> tuple[str, str]:
        """Return the kind of problem of one case and its description; two empty strings if there is
        none."""
        case = f"{self.sample} on {self.mesh_shape} with {', '.join(map(repr, layouts))}"
        with fallback(self.policy):
            try:
                problem = self.problem(layouts)
            except PolicyError as error:
                return "fallback", f"{case}: {error}"
        return ("wrong", f"{case}: {problem}") if problem else ("", "")

    def problem(self, layouts: Sequence[Layout]) -> str:
        """Describe what is wrong with one case, or return an empty string."""
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
        reference = self.reference
        problem = difference(
            outputs, reference.outputs, "result", self.tolerance, reference.unstable
        )
        if problem or reference.gradients is None:
            return problem
        loss_of(outputs).backward()  # type: ignore[no-untyped-call]
        leaves = [each for each in inputs if each.requires_grad]
        return self.gradient_problem(leaves, reference.gradients)

    def gradient_problem(
        self, leaves: Sequence[DTensor], expected: Sequence[torch.Tensor | None]
    ) -> str:
        """Describe what is wrong with the gradients, or return an empty string. A missing gradient
        counts as zero."""
        for at, (leaf, want) in enumerate(zip(leaves, expected, strict=True)):
            if leaf.grad is not None:
                got = leaf.grad.full_tensor()
                want = torch.zeros_like(got) if want is None else want
            elif want is not None:
                got = torch.zeros_like(want)
            else:
                continue
            unstable = frozenset({0}) if at in self.reference.unstable_gradients else frozenset()
            name = f"gradient of input {at}"
            problem = difference([got], [want], name, self.tolerance, unstable)
            if problem:
                return problem
        return ""


# ---- splits that need no communication


def missing_splits(fn: Callable[..., Any], sample: Sample) -> list[str]:
    """List the splits of the inputs over two ranks that need no communication, but communicate."""
    expected = reference_of(fn, sample, False, Tolerance(1e-5, 1e-8)).outputs
    tensors = sample.tensors()
    choices = [[None, *range(each.dim())] for each in tensors]
    legal = [
        dims
        for dims in combinations(choices, 200, 0)
        if any(dim is not None for dim in dims) and _is_legal(fn, sample, dims, expected)
    ]

    def run() -> list[str]:
        mesh = init_device_mesh("cpu", (2,))
        return [_first_collective(fn, sample, _placements(dims), mesh) for dims in legal]

    found = simulate(run, 2)[0] if legal else []
    return [
        f"{sample} with {', '.join(map(repr, _placements(dims)))}: {kind}"
        for dims, kind in zip(legal, found, strict=True)
        if kind
    ]


def _placements(dims: Sequence[int | None]) -> list[Placement]:
    return [Replicate() if dim is None else Shard(dim) for dim in dims]


def _first_collective(
    fn: Callable[..., Any], sample: Sample, placements: Sequence[Placement], mesh: DeviceMesh
) -> str:
    """Return the kind of the first collective of a call, or an empty string."""
    events: list[Event] = []
    inputs = [
        distributed(each, Layout.from_placements(mesh, each.shape, [placement]))
        for each, placement in zip(sample.tensors(), placements, strict=True)
    ]
    args, kwargs = sample.filled(inputs)
    with listen(events.append), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fn(*args, **kwargs)
    for event in events:
        if event.rank == mesh.get_rank() and not event.cause.operator.startswith(SUCCESS_CHECK):
            return event.kind
    return ""


def _is_legal(
    fn: Callable[..., Any], sample: Sample, dims: Sequence[int | None], expected: Sequence[Any]
) -> bool:
    """Return whether the results of two ranks with these pieces, concatenated or added, are the
    expected ones."""
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
        _forms_whole(first, second, whole)
        for first, second, whole in zip(*pieces, expected, strict=True)
    )


def _forms_whole(first: torch.Tensor, second: torch.Tensor, whole: torch.Tensor) -> bool:
    """Return whether two results, concatenated or added, are the whole one."""
    first, second, whole = widened(first), widened(second), widened(whole)

    def is_whole(result: torch.Tensor) -> bool:
        return result.shape == whole.shape and not value_difference(
            result, whole, rtol=1e-5, atol=1e-8
        )

    if first.dim() != whole.dim() or second.dim() != whole.dim():
        return False
    if first.shape == second.shape and is_whole(first + second):
        return True
    for dim in range(whole.dim()):
        others = [each for at, each in enumerate(first.shape) if at != dim]
        if others != [each for at, each in enumerate(second.shape) if at != dim]:
            continue
        sizes = [each.shape[dim] for each in whole.chunk(2, dim)]
        if [first.shape[dim], second.shape[dim]] == sizes and is_whole(
            torch.cat([first, second], dim)
        ):
            return True
    return False
