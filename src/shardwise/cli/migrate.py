"""The command `shardwise migrate`: rewrite the imports of a program from torch's names to ours."""

from __future__ import annotations

import codecs
import difflib
import io
import os
import re
import shutil
import sys
import tempfile
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.cli.counterparts import MODULES, NAMES
from shardwise.cli.import_rewriter import Finding, SourceError, rewrite
from shardwise.core.errors import ShardwiseError

DONE, LEFT, FAILED = 0, 1, 2
"""The exit codes: nothing is left to do by hand, something is, a file could not be handled."""

SUFFIXES = (".py", ".pyi")
NOTEBOOK = ".ipynb"
_SKIPPED_FOLDERS = {"__pycache__", "node_modules", "site-packages"}


class MigrateError(ShardwiseError):
    """A file that cannot be read, rewritten or written."""

    names_rank = False


@dataclass(frozen=True)
class Migrated:
    """A file, its text before and after, and what is left to do by hand."""

    path: Path
    old: str
    new: str
    encoding: str
    findings: tuple[Finding, ...] = ()
    notes: tuple[Finding, ...] = ()


def run(paths: Sequence[str], *, write: bool = False) -> int:
    """Show how the files below some paths change, or change them; return the exit code.

    The differences go to standard output, and everything else to standard error.
    """
    files, problems = [], []
    for path in find_files(paths):
        try:
            files.append(migrate_file(path))
        except MigrateError as error:
            problems.append(str(error))
    changed = [each for each in files if each.new != each.old]
    failed = 0
    for each in changed:
        if not write:
            _show_difference(each)
            continue
        try:
            replace_file(each.path, each.new.encode(each.encoding))
        except OSError as error:
            problems.append(f"{each.path}: cannot write it: {error.strerror}")
            failed += 1
    left = [finding.at(each.path) for each in files for finding in each.findings]
    notes: dict[str, str] = {}  # each once, at the first place
    for each in files:
        for note in each.notes:
            notes.setdefault(note.message, f"note: {note.at(each.path)}")
    counts = {
        "files read": len(files),
        "changed" if write else "to change by --write": len(changed) - failed,
        "places left to change by hand": len(left),
        "errors": len(problems),
    }
    summary = ", ".join(f"{name}: {count}" for name, count in counts.items())
    print(*notes.values(), *left, *problems, summary, sep="\n", file=sys.stderr)
    return FAILED if problems else LEFT if left else DONE


# ---- files


def find_files(paths: Iterable[str]) -> list[Path]:
    """Return the Python files and notebooks at some paths and in the folders among them, each once.

    Hidden folders, virtual environments and installed packages are left out.

    Raises:
        MigrateError: a path does not exist.
    """
    found: dict[Path, Path] = {}
    for name in paths:
        path = Path(name)
        if not path.exists():
            raise MigrateError(f"{name}: there is no such file or folder")
        for each in _files_in(path) if path.is_dir() else [path]:
            found.setdefault(each.resolve(), each)
    return list(found.values())


def _files_in(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(each for each in folders if not _is_skipped(Path(parent), each))
        for name in sorted(files):
            if name.endswith((*SUFFIXES, NOTEBOOK)):
                yield Path(parent, name)


def _is_skipped(parent: Path, name: str) -> bool:
    is_environment = (parent / name / "pyvenv.cfg").exists()
    return name.startswith(".") or name in _SKIPPED_FOLDERS or is_environment


def migrate_file(path: Path) -> Migrated:
    """Read a file and rewrite its text, without changing the file.

    Raises:
        MigrateError: it cannot be read, or is no Python program.
    """
    try:
        data = path.read_bytes()
        if path.suffix == NOTEBOOK:
            return _check_notebook(path, data)
        encoding = _encoding(data)
        text = data.decode(encoding)
    except OSError as error:
        raise MigrateError(f"{path}: cannot read it: {error.strerror}") from None
    except (SyntaxError, UnicodeDecodeError) as error:
        raise MigrateError(f"{path}:1: cannot decode it: {error}") from None
    try:
        rewritten = rewrite(text)
    except SourceError as error:
        raise MigrateError(f"{path}:{error}") from None
    return Migrated(path, text, rewritten.text, encoding, rewritten.findings, rewritten.notes)


def _encoding(data: bytes) -> str:
    """Return the encoding of a program, with its byte order mark if it has one."""
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    return "utf-8-sig" if data.startswith(codecs.BOM_UTF8) else encoding


def _check_notebook(path: Path, data: bytes) -> Migrated:
    """Find the lines of a notebook that need changes, which are left to the user."""
    text = data.decode("utf-8")
    findings = tuple(
        Finding(number, f"{module} in a notebook, which is not rewritten: write {ours}")
        for number, line in enumerate(text.split("\n"), 1)
        for module, ours in _torch_names_in(line)
    )
    return Migrated(path, text, text, "utf-8", findings)


def _torch_names_in(line: str) -> Iterator[tuple[str, str]]:
    """Yield the modules and names of torch in a line that move, and what replaces each."""
    line = line.replace("\\n", " ")  # the end of a line in JSON
    for name, ours in {**MODULES, **NAMES}.items():
        parent, _, last = name.rpartition(".")
        spellings = rf"{re.escape(name)}|from {re.escape(parent)} import\b.*\b{last}"
        if re.search(rf"\b(?:{spellings})(?!\w)", line):
            yield name, ours


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file in one step, so that a reader never sees half of it. Its mode stays."""
    target = path.resolve()  # the file itself, not a link to it
    number, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(number, "wb") as file:
            file.write(data)
        shutil.copymode(target, name)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


# ---- the difference


def _show_difference(file: Migrated) -> None:
    lines = difference(file)
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.text import Text
        except ModuleNotFoundError:  # an optional package
            pass
        else:
            console = Console(soft_wrap=True)
            for line in lines:
                console.print(Text(line.rstrip("\r\n"), style=_style(line)))
            return
    sys.stdout.writelines(lines)


def difference(file: Migrated) -> list[str]:
    """Return the lines of a unified diff between the old and the new text of a file."""
    old, new = (text.splitlines(keepends=True) for text in (file.old, file.new))
    name = file.path.as_posix().lstrip("/")
    lines = difflib.unified_diff(old, new, f"a/{name}", f"b/{name}")
    return [
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    ]


def _style(line: str) -> str:
    if line.startswith(("---", "+++")):
        return "bold"
    return {"+": "green", "-": "red", "@": "cyan"}.get(line[0], "")
