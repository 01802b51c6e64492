"""check_rule: compare an operator on DTensors with the same operator in one process.

Every layout of the inputs is tried (a fixed sample of them where there are too many): values,
dtypes, shapes and gradients. And what is legal is found numerically: a split that a rule does not
offer is reported.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.dispatch.state import fallback
from shardwise.layout import Layout
from shardwise.mesh import init_device_mesh
from shardwise.policy import PolicyError
from shardwise.rules.calls import tensors_in
from shardwise.rules.registry import RuleError
from shardwise.sim import simulate
from shardwise.tensor import DTensor
from shardwise.testing.combinations import combinations
from shardwise.testing.comparing import warn_of_unstable
from shardwise.testing.layouts import distributed, layouts_of, whole_of
from shardwise.testing.legal import missing_splits
from shardwise.testing.reference import Reference, Tolerance, difference, loss_of, reference_of
from shardwise.testing.sample import Sample


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
    unstable: list[str] = field(default_factory=list)
    """Results and gradients that torch itself does not reproduce when it is called twice: of these
    shapes and dtypes were compared, and no values."""

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
        What was tried. Anything wrong is raised as a `RuleError` with the same report. Values that
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
            return [self.outcome(layouts) for layouts in combinations(choices, most, seed)]

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
        reference = self.reference
        problem = difference(
            outputs, reference.outputs, "result", self.tolerance, reference.unstable
        )
        if problem or reference.gradients is None:
            return problem
        loss_of(outputs).backward()  # type: ignore[no-untyped-call]
        leaves = [each for each in inputs if each.requires_grad]
        return self.problem_of_gradients(leaves, reference.gradients)

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
            unstable = frozenset({0}) if at in self.reference.unstable_gradients else frozenset()
            name = f"gradient of input {at}"
            problem = difference([got], [want], name, self.tolerance, unstable)
            if problem:
                return problem
        return ""
