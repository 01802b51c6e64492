"""Replace the names of torch in a Python program that shardwise has.

The syntax tree tells which names are meant: `import a.b`, `from a import b as c`, `a.b.c` through
any alias, in any scope. Only the characters of these names are replaced, so comments and formatting
stay.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from shardwise.cli.counterparts import (
    advice,
    counterpart,
    difference,
    is_moved,
    name_left,
    names_in,
)
from shardwise.cli.scopes import Binding, Chain, ImportStatement, NameCollector, Scope
from shardwise.core.errors import ShardwiseError

PACKAGE = "shardwise"

_Located: TypeAlias = ast.stmt | ast.expr | ast.alias
_Import: TypeAlias = ast.Import | ast.ImportFrom


class SourceError(ShardwiseError, ValueError):
    """A text that is no Python program."""

    names_rank = False


@dataclass(frozen=True, order=True)
class Finding:
    """Something that the author of a program should know, about a line of it."""

    line: int
    message: str

    def at(self, path: object) -> str:
        """Return the message with its place in a file."""
        return f"{path}:{self.line}: {self.message}"


@dataclass(frozen=True)
class Rewritten:
    """A program after the replacements."""

    text: str
    findings: tuple[Finding, ...]
    """What is left to do by hand."""
    notes: tuple[Finding, ...]
    """What the author should know of its names, though nothing is left to do."""


def rewrite(text: str) -> Rewritten:
    """Replace torch's names in a program by those of shardwise.

    Raises:
        SourceError: the text is no Python program; the message begins with the line.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None) or 1
        raise SourceError(f"{line}: {getattr(error, 'msg', None) or error}") from None
    if "distributed" not in text and PACKAGE not in text:
        return Rewritten(text, (), ())
    names = NameCollector()
    names.visit(tree)
    rewriter = _Rewriter(_Source(text), names)
    rewriter.run()
    changed = rewriter.source.apply(rewriter.edits)
    if changed != text:
        try:
            ast.parse(changed)
        except SyntaxError as error:  # better no change than a broken program
            line = error.lineno or 1
            raise SourceError(f"{line}: cannot be rewritten: please report this line") from None
    findings, notes = (sorted(set(each)) for each in (rewriter.findings, rewriter.notes))
    return Rewritten(changed, tuple(findings), tuple(notes))


# ---- positions


@dataclass(frozen=True, order=True)
class _Edit:
    """Replace the characters from `start` to `end`."""

    start: int
    end: int
    new: str


class _Source:
    """A text with the positions of its syntax tree: lines, and bytes of UTF-8 within a line."""

    def __init__(self, text: str) -> None:
        self.text = text
        # Not `splitlines`, which also splits at form feeds.
        newlines = list(re.finditer(r"\r\n|\r|\n", text))
        self.starts = [0, *(each.end() for each in newlines)]
        self.newline = newlines[0][0] if newlines else "\n"

    def start(self, node: _Located) -> int:
        return self._offset(node.lineno, node.col_offset)

    def end(self, node: _Located) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._offset(node.end_lineno, node.end_col_offset)

    def of(self, node: _Located) -> str:
        return self.text[self.start(node) : self.end(node)]

    def before(self, node: _Located) -> str:
        """Return the text in front of a node in its first line."""
        return self.text[self.starts[node.lineno - 1] : self.start(node)]

    def line_end(self, offset: int) -> int:
        """Return where the line that has an offset ends."""
        found = re.compile(r"[\r\n]").search(self.text, offset)
        return found.start() if found else len(self.text)

    def apply(self, edits: Iterable[_Edit]) -> str:
        text = self.text
        for edit in sorted(edits, reverse=True):
            text = text[: edit.start] + edit.new + text[edit.end :]
        return text

    def _offset(self, line: int, column: int) -> int:
        start = self.starts[line - 1]
        end = self.starts[line] if line < len(self.starts) else len(self.text)
        return start + len(self.text[start:end].encode()[:column].decode(errors="replace"))


# ---- replacements


class _Rewriter:
    """Decide on the edits of a program, and on what is left to do by hand."""

    def __init__(self, source: _Source, names: NameCollector) -> None:
        self.source = source
        self.names = names
        self.edits: list[_Edit] = []
        self.findings: list[Finding] = []
        self.notes: list[Finding] = []
        self._kept: defaultdict[tuple[Scope, str], list[str]] = defaultdict(list)
        """The full names that the program goes on using, by the name they begin with."""
        self._needed: defaultdict[Scope, dict[str, ast.AST]] = defaultdict(dict)
        """The modules of ours that a scope must import, and an import that they follow."""
        self._imported: list[tuple[str, ImportStatement]] = []
        """The modules of ours that are imported by `import a.b`."""
        self._binds_torch: set[_Import] = set()
        """The imports that still import torch beside ours."""

    def run(self) -> None:
        for chain in self.names.chains:
            self._rewrite_chain(chain)
        for statement in self.names.imports:
            if isinstance(statement.node, ast.Import):
                self._rewrite_import(statement, statement.node)
            elif statement.node.level == 0 and statement.node.module is not None:
                self._rewrite_from(statement.node, statement.node.module)
        self._add_imports()
        for string in self.names.strings:
            self._check_string(string)

    # a.b.c

    def _rewrite_chain(self, chain: Chain) -> None:
        root, *attributes = chain.parts
        scope = chain.scope.find(root)
        if scope is None:
            return
        bindings = scope.bindings[root]
        paths = {each.path for each in bindings if each.path is not None}
        for path in paths:
            full = ".".join([path, *attributes])
            if (left := name_left(full)) is not None:
                self._find_absent(chain.nodes[0], left)
            elif is_moved(path):
                self._check_attribute(chain, path, full)
            elif not is_moved(full) or not self._replace_chain(chain, path, full, bindings):
                self._kept[scope, root].append(full)

    def _check_attribute(self, chain: Chain, path: str, full: str) -> None:
        """Check the use of a module or name that an import of its own brings."""
        module = counterpart(path, is_module=True)
        if module is None or full == path:
            return  # no module, or one that stays torch's
        found = counterpart(full)
        self._note(chain.nodes[0], full)
        if found is None:
            self._find_absent(chain.nodes[0], full)
        elif not f"{module.path}{full.removeprefix(path)}".startswith(found.path):
            self._find(chain.nodes[0], f"{full}: write {found.path}")

    def _replace_chain(self, chain: Chain, path: str, full: str, bindings: list[Binding]) -> bool:
        """Replace the first names of a chain; return whether that was possible."""
        found = counterpart(full)
        root = chain.nodes[0]
        if found is None:
            self._find_absent(root, full)
            return False
        last = chain.nodes[found.length - path.count(".") - 1]
        start, end = self.source.start(root), self.source.end(last)
        is_clear = {each.path for each in bindings if not each.is_none} == {path}
        written = re.sub(r"[\s\\]|#.*", "", self.source.text[start:end])
        # Not so with parentheses within, and in f-strings, whose positions are wrong before 3.12.
        is_there = written == ".".join(chain.parts[: found.length - path.count(".")])
        own = chain.scope.find(PACKAGE)
        is_free = own is None or all(
            each.path is not None and each.path.partition(".")[0] == PACKAGE
            for each in own.bindings[PACKAGE]
        )
        if not (is_clear and is_there and is_free):
            self._find(root, f"{full}: write {found.path}, and import {found.module}")
            return False
        self.edits.append(_Edit(start, end, found.path))
        self._note(root, full)
        scope = chain.scope.find(chain.parts[0])
        anchor = next(each.at for each in bindings if each.path is not None)
        assert scope is not None
        self._needed[scope].setdefault(found.module, anchor)
        return True

    # import a.b

    def _rewrite_import(self, statement: ImportStatement, node: ast.Import) -> None:
        for alias in node.names:
            name = alias.name
            if name.partition(".")[0] == PACKAGE and alias.asname is None:
                self._imported.append((name, statement))
            self._note(alias, name)
            if not is_moved(name):
                continue
            found = counterpart(name, is_module=True)
            if found is None:
                self._find_absent(alias, name)
                continue
            if alias.asname is not None:
                new = f"{found.path} as {alias.asname}"
            else:
                self._imported.append((found.path, statement))
                kept = self._still_needed(statement, name)
                if kept == [name] and any(each.name == found.path for each in node.names):
                    continue  # both are there, from an earlier run
                new = ", ".join([*kept, found.path])
            self.edits.append(_Edit(self.source.start(alias), self.source.end(alias), new))

    def _still_needed(self, statement: ImportStatement, module: str) -> list[str]:
        """Return the module that `import module` must still import beside ours, if any.

        The statement also bound the name `torch`, which the program may use otherwise.
        """
        root = module.partition(".")[0]
        used = self._kept[statement.scope, root]
        if any(each == module or each.startswith(f"{module}.") for each in used):
            self._binds_torch.add(statement.node)
            return [module]
        if not used or any(
            self._binds(each, root)
            for each in self.names.imports
            if each.scope is statement.scope
            and (each.block is each.scope.body or each.block is statement.block)
        ):
            return []
        self._binds_torch.add(statement.node)
        while is_moved(module):
            module = module.rpartition(".")[0]
        return [module]

    def _binds(self, statement: ImportStatement, root: str) -> bool:
        """Return whether `import root` or `import root.a` is still there after the replacements."""
        return statement.node in self._binds_torch or (
            isinstance(statement.node, ast.Import)
            and any(
                alias.asname is None
                and alias.name.partition(".")[0] == root
                and counterpart(alias.name, is_module=True) is None
                for alias in statement.node.names
            )
        )

    # from a import b

    def _rewrite_from(self, node: ast.ImportFrom, module: str) -> None:
        if node.names[0].name == "*":
            self._rewrite_star(node, module)
            return
        targets: list[tuple[str, str]] = []
        for alias in node.names:
            path = f"{module}.{alias.name}"
            targets.append((module, self.source.of(alias)))
            self._note(alias, path)
            if not is_moved(path):
                continue
            found = counterpart(path)
            if found is None or found.length != path.count(".") + 1:
                self._find_absent(alias, path)
                continue
            parent, _, name = found.path.rpartition(".")
            renamed = f"{name} as {alias.asname or alias.name}"
            text = self.source.of(alias) if name == alias.name else renamed
            targets[-1] = (parent, text)
        new_modules = dict.fromkeys(parent for parent, _ in targets)
        if list(new_modules) == [module]:
            return
        if len(new_modules) == 1:
            self._replace_module(node, targets[0][0])
            for alias, (_, text) in zip(node.names, targets, strict=True):
                if text != self.source.of(alias):
                    start, end = self.source.start(alias), self.source.end(alias)
                    self.edits.append(_Edit(start, end, text))
            return
        self._split_from(node, targets)

    def _rewrite_star(self, node: ast.ImportFrom, module: str) -> None:
        found = counterpart(module, is_module=True)
        if found is not None:
            self._replace_module(node, found.path)
        elif is_moved(module):
            self._find_absent(node, module)
            return
        known = set(names_in(module))
        for chain in self.names.chains:
            name = chain.parts[0]
            if name not in known or chain.scope.find(name) is not None:
                continue
            own = counterpart(f"{module}.{name}")
            if own is None:
                self._find_absent(chain.nodes[0], f"{module}.{name}")
            elif found is None:
                parent = own.path.rpartition(".")[0]
                self._find(node, f"it imports {name}: add from {parent} import {name} after it")

    def _replace_module(self, node: ast.ImportFrom, new: str) -> None:
        start = self.source.start(node)
        found = re.compile(r"from[\s\\]+(\w[\w.\s\\]*?)[\s\\]+import\b").match(
            self.source.text, start
        )
        assert found is not None
        self.edits.append(_Edit(*found.span(1), new))

    def _split_from(self, node: ast.ImportFrom, targets: list[tuple[str, str]]) -> None:
        """Write one import for each module, as the names of one are now in several."""
        comments = self._comments(node)
        groups: dict[str, list[int]] = {}
        for index, (parent, _) in enumerate(targets):
            groups.setdefault(parent, []).append(index)
        indent = self.source.before(node)
        is_alone = not indent.strip()
        newline, lines = self.source.newline, []
        for parent, indices in groups.items():
            texts = [targets[index][1] for index in indices]
            if node.end_lineno == node.lineno or not is_alone:
                lines.append(f"from {parent} import {', '.join(texts)}")
                continue
            lines.append(f"from {parent} import (")
            for index, text in zip(indices, texts, strict=True):
                above, beside = comments[index]
                lines += [f"    {each}" for each in above]
                lines.append(f"    {text}," + (f"  {beside}" if beside else ""))
            lines.append(")")
        text = (newline + indent).join(lines) if is_alone else "; ".join(lines)
        self.edits.append(_Edit(self.source.start(node), self.source.end(node), text))

    def _comments(self, node: ast.ImportFrom) -> list[tuple[list[str], str]]:
        """Return the comments above and beside each name of an import."""
        found: list[tuple[list[str], str]] = []
        for index, alias in enumerate(node.names):
            begin = self.source.end(node.names[index - 1]) if index else self.source.start(node)
            if index:
                begin = self.source.line_end(begin)
            between = self.source.text[begin : self.source.start(alias)]
            is_last_in_line = (
                index + 1 == len(node.names) or node.names[index + 1].lineno > alias.lineno
            )
            end = self.source.end(alias)
            rest = self.source.text[end : self.source.line_end(end)] if is_last_in_line else ""
            beside = re.search(r"#.*", rest)
            found.append((re.findall(r"#[^\r\n]*", between), beside[0] if beside else ""))
        return found

    # new imports

    def _add_imports(self) -> None:
        """Import the modules of ours that replaced names need."""
        blocks = {statement.node: statement.block for statement in self.names.imports}
        for scope, needed in self._needed.items():
            for module, anchor in sorted(needed.items()):
                assert isinstance(anchor, ast.Import | ast.ImportFrom)
                block = blocks[anchor]
                covered = [
                    *(other for other in needed if other != module),
                    *(
                        other
                        for other, statement in self._imported
                        if statement.scope is scope
                        and (statement.block is scope.body or statement.block is block)
                    ),
                ]
                if not any(each == module or each.startswith(f"{module}.") for each in covered):
                    self._add_import(module, _last_of_run(anchor, block))

    def _add_import(self, module: str, anchor: ast.stmt) -> None:
        end = self.source.end(anchor)
        line_end = self.source.line_end(end)
        indent = self.source.before(anchor)
        rest = self.source.text[end:line_end].strip()
        if indent.strip() or (rest and not rest.startswith("#")):  # beside other statements
            self.edits.append(_Edit(end, end, f"; import {module}"))
        else:
            new = f"{self.source.newline}{indent}import {module}"
            self.edits.append(_Edit(line_end, line_end, new))

    # strings

    def _check_string(self, node: ast.Constant) -> None:
        """Find the names of modules in strings, such as those of `importlib.import_module`."""
        text = node.value
        assert isinstance(text, str)
        if not re.fullmatch(r"[\w.\[\], |]+", text) or re.search(r"\w \w", text):
            return  # no name, and no annotation
        for name in re.findall(r"\btorch(?:\.\w+)+", text):
            if not is_moved(name):
                continue
            found = counterpart(name)
            if found is None:
                self._find_absent(node, name)
            else:
                rest = name.split(".")[found.length :]
                ours = ".".join([found.path, *rest])
                self._find(node, f'the string "{text}" names {name}: write {ours}')

    # findings

    def _find_absent(self, node: _Located, path: str) -> None:
        self._find(node, f"{_up_to_class(path)} has no counterpart: {advice(path)}")

    def _note(self, node: _Located, path: str) -> None:
        text = difference(path)
        if text is not None:
            self.notes.append(Finding(node.lineno, f"{path} {text}"))

    def _find(self, node: _Located, message: str) -> None:
        self.findings.append(Finding(node.lineno, message))


def _last_of_run(anchor: _Import, block: list[ast.stmt]) -> ast.stmt:
    """Return the last of the imports that follow one without other statements between."""
    index = next(index for index, each in enumerate(block) if each is anchor)
    while index + 1 < len(block) and isinstance(block[index + 1], ast.Import | ast.ImportFrom):
        index += 1
    return block[index]


def _up_to_class(path: str) -> str:
    """Return a dotted name without the attributes of its class."""
    parts = path.split(".")
    ends = [index for index, part in enumerate(parts) if part[:1].isupper()]
    return ".".join(parts[: ends[0] + 1] if ends else parts)
