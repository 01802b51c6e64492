"""Which name of shardwise replaces a name of torch.

Torch's module paths are mapped by their beginnings; whether shardwise has the rest is asked of
shardwise itself, so that this cannot be out of date.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

from shardwise.cli.torch_names import DIFFERENT, INSTEAD

MODULES: dict[str, str] = {
    "torch.distributed.tensor": "shardwise.tensor",
    "torch.distributed._tensor": "shardwise.tensor",
    "torch.distributed.device_mesh": "shardwise.device_mesh",
    "torch.distributed.fsdp": "shardwise.fsdp",
    "torch.distributed._composable.fsdp": "shardwise.fsdp",
    "torch.distributed._composable.fsdp.fully_shard": "shardwise.fsdp",
    "torch.distributed._composable.replicate": "shardwise.fsdp",
    "torch.distributed._composable.replicate_with_fsdp": "shardwise.fsdp",
    "torch.distributed._shard": "shardwise.sharded",
    "torch.distributed._sharded_tensor": "shardwise.sharded.sharded_tensor",
    "torch.distributed._sharding_spec": "shardwise.sharded.sharding_spec",
}
"""Modules of torch, with all below them, and those that replace them."""

NAMES: dict[str, str] = {
    "torch.distributed.DeviceMesh": "shardwise.DeviceMesh",
    "torch.distributed.init_device_mesh": "shardwise.init_device_mesh",
    "torch.distributed._composable.fsdp.fully_shard": "shardwise.fsdp.fully_shard",
    "torch.distributed._composable.replicate": "shardwise.fsdp.replicate",
}
"""Names that are in another module than `MODULES` says. Modules of the last two names exist too."""

STAYS: dict[str, str] = {
    "torch.distributed._local_tensor": "it simulates ranks for torch's own DTensors; for ours "
    "sw.simulate(function, ranks) does",
}
"""Modules that stay torch's, and what a program that uses them should know."""


@dataclass(frozen=True)
class Counterpart:
    """A name of shardwise that replaces the first `length` parts of a dotted name of torch."""

    path: str
    module: str
    """The module to import for it: all of `path`, or all but its last part."""
    length: int


def is_moved(path: str) -> bool:
    """Return whether a dotted name of torch belongs to what shardwise replaces."""
    return any(_is_below(path, each) for each in (*MODULES, *NAMES))


@functools.cache
def counterpart(path: str, is_module: bool = False) -> Counterpart | None:
    """Return what replaces a dotted name of torch: of a module, or of anything and its attributes.

    The name `torch.distributed.tensor.DTensor.from_local` has the one of `DTensor`.
    """
    parts = path.split(".")
    if any(".".join(parts[:length]) in INSTEAD for length in range(3, len(parts) + 1)):
        return None  # also where shardwise has a name like it, of another meaning
    if not is_module:
        for length in range(len(parts), 0, -1):
            name = ".".join(parts[:length])
            is_module_too = name in MODULES and length < len(parts)
            if (ours := NAMES.get(name)) is not None and not is_module_too:
                return Counterpart(ours, ours.rpartition(".")[0], length)
    prefix = _module_rule(path)
    if prefix is None:
        return None
    start = prefix.count(".") + 1
    found = _in_modules(MODULES[prefix], parts[start:])
    if found is None:
        return None
    ours_path, module, used = found
    if is_module and (module != ours_path or start + used != len(parts)):
        return None
    return Counterpart(ours_path, module, start + used)


def _in_modules(module: str, rest: list[str]) -> tuple[str, str, int] | None:
    """Return what `rest` means below a module of ours: path, module, and how many parts it took.

    Torch's own files below it, such as `_fully_shard._fsdp_state`, need not exist here: a name that
    is in one of them may be in `module` itself.
    """
    while (loaded := _load(module)) is None and module != "shardwise":
        module = module.rpartition(".")[0]
    used = 0
    while used < len(rest):
        below = f"{module}.{rest[used]}"
        value = vars(loaded).get(rest[used])
        if value is not None and not isinstance(value, ModuleType):
            break
        if (submodule := _load(below)) is None:
            break
        module, loaded, used = below, submodule, used + 1
    if used == len(rest):
        return module, module, used
    for position in range(used, len(rest)):
        if _has(loaded, rest[position]):
            return f"{module}.{rest[position]}", module, position + 1
        if not rest[position].islower():  # a class, not a file of torch
            break
    return None


def name_left(path: str) -> str | None:
    """Return torch's name for a dotted name of shardwise that does not exist, if it is known.

    An earlier run replaced the module, of which the program uses a name without a counterpart.
    """
    for module, ours in MODULES.items():
        rest = path.removeprefix(ours)
        if not rest or not _is_below(path, ours) or _in_modules(ours, rest[1:].split(".")):
            continue
        if f"{module}.{rest[1:].partition('.')[0]}" in INSTEAD:
            return f"{module}{rest}"
    return None


def advice(path: str) -> str:
    """Return what to write instead of a dotted name of torch that has no counterpart."""
    parts = path.split(".")
    for length in range(len(parts), 2, -1):
        text = INSTEAD.get(".".join(parts[:length]))
        if text is not None:
            return text
    # The same name may be described under another path.
    others = [text for name, text in INSTEAD.items() if name.rpartition(".")[2] == parts[-1]]
    return others[0] if others else "see docs/moving-over.md"


def difference(path: str) -> str | None:
    """Return what a program should know about a name, though nothing is left to do by hand."""
    if (text := DIFFERENT.get(path)) is not None:
        return f"behaves differently: {text}"
    stays = (text for module, text in STAYS.items() if _is_below(path, module))
    return next((f"stays torch's: {text}" for text in stays), None)


def names_in(module: str) -> Iterator[str]:
    """Yield the names of a module of torch that are replaced one by one, or known to be absent."""
    for name in (*NAMES, *INSTEAD):
        parent, _, last = name.rpartition(".")
        if parent == module:
            yield last


def _module_rule(path: str) -> str | None:
    """Return the longest module of the table that a dotted name begins with."""
    matches = [module for module in MODULES if _is_below(path, module)]
    return max(matches, key=len, default=None)


def _is_below(path: str, module: str) -> bool:
    return path == module or path.startswith(f"{module}.")


def _has(module: ModuleType | None, name: str) -> bool:
    try:
        return hasattr(module, name)
    except ModuleNotFoundError:  # of a module that imports its submodules when they are used
        return False


@functools.cache
def _load(module: str) -> ModuleType | None:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        return None
