"""Names in a plan: patterns for modules, parameters and buffers, and what they match."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from torch import nn

from shardwise.errors import ShardwiseError
from shardwise.torch_internals import own_modules

_MOST_SHOWN = 5


class PlanError(ShardwiseError, ValueError):
    """A plan that does not fit its module."""


def matches(pattern: str, name: str) -> bool:
    """Whether a dotted name fits a pattern, token by token: `layers.*.w[qkv]`.

    A name fits itself, whatever signs it has: `experts.a[0]` is a name too.
    """
    if not name or pattern == name:  # the module itself is what only the empty pattern means
        return pattern == name
    wanted, tokens = pattern.split("."), name.split(".")
    return len(wanted) == len(tokens) and all(map(fnmatchcase, tokens, wanted))


def check_pattern(argument: str, pattern: object) -> None:
    """Refuse what cannot be a name."""
    if not isinstance(pattern, str):
        raise PlanError(
            f"{argument}: expected names, or patterns for names, as keys; got {pattern!r}"
        )


def all_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every submodule by every name it has: a module that is used twice comes twice."""
    yield prefix, module
    for name, child in own_modules(module).items():
        if child is not None:
            yield from all_modules(child, joined(prefix, name))


def joined(prefix: str, name: str) -> str:
    """A dotted name from two parts, either of which may be empty."""
    return f"{prefix}.{name}" if prefix and name else prefix or name


def unmatched(
    argument: str,
    pattern: str,
    names: Iterable[str],
    kinds: str,
    others: Iterable[str] = (),
    meant: str = "",
    remedy: str = "Correct it, or pass strict=False to leave it out",
) -> PlanError:
    """The error for a pattern that nothing matches, with what the user may have meant.

    Arguments:
        names: those that it may match, which are of these `kinds`.
        others: names of another kind.
        meant: what to write if it matches one of those instead.
        remedy: what to do, where strict=False is no answer.
    """
    asked = f"{argument}[{pattern!r}]: expected the name, or a pattern for names, of {kinds}; it"
    other = next((name for name in others if matches(pattern, name)), None)
    if other is not None:
        return PlanError(f"{asked} matches {other or 'the module itself'}, {meant}")
    known = [name for name in dict.fromkeys(names) if name]
    near = _near(pattern, known)
    hint = f"; near it are {', '.join(near)}" if near else ""
    return PlanError(f"{asked} matches nothing{hint}. {remedy}")


def _near(pattern: str, known: list[str]) -> list[str]:
    # Numbers are all the same to a pattern: show one of many layers.
    shapes: dict[str, str] = {}
    for name in known:
        shapes.setdefault(_unnumbered(name), name)
    found = difflib.get_close_matches(_unnumbered(pattern), shapes, n=_MOST_SHOWN, cutoff=0.5)
    if not found:
        last = pattern.rsplit(".", 1)[-1]
        found = [shape for shape in shapes if last and last in shape][:_MOST_SHOWN]
    return [shapes[each] for each in found]


def _unnumbered(name: str) -> str:
    return ".".join("*" if token.isdecimal() else token for token in name.split("."))
