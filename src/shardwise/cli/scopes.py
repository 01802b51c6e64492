"""Which names a Python program binds and uses, and in which scopes."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Binding:
    """A name gets a value."""

    path: str | None
    """The full name of what is imported; None for other values."""
    at: ast.AST
    is_none: bool = False
    """Whether the value is None, as where an import failed."""


@dataclass(eq=False)
class Scope:
    """The names that a module, class, function or comprehension binds."""

    parent: Scope | None = None
    is_class: bool = False
    bindings: defaultdict[str, list[Binding]] = field(default_factory=lambda: defaultdict(list))
    body: list[ast.stmt] | None = None
    """The statements that always run: not those within conditions."""
    elsewhere: dict[str, Scope] = field(default_factory=dict)
    """Names that `global` and `nonlocal` statements bind in another scope."""

    def bind(self, name: str, binding: Binding) -> None:
        self.elsewhere.get(name, self).bindings[name].append(binding)

    def find(self, name: str) -> Scope | None:
        """Return the scope that binds a name used in this one."""
        scope: Scope | None = self.elsewhere.get(name, self)
        while scope is not None:
            if name in scope.bindings and (scope is self or not scope.is_class):
                return scope
            scope = scope.parent
        return None

    def outermost(self) -> Scope:
        return self if self.parent is None else self.parent.outermost()


@dataclass(frozen=True)
class Chain:
    """A use of a name with its attributes: `root.a.b`."""

    nodes: tuple[ast.Name | ast.Attribute, ...]
    """The nodes of `root`, `root.a` and `root.a.b`."""
    scope: Scope

    @property
    def parts(self) -> list[str]:
        return [each.id if isinstance(each, ast.Name) else each.attr for each in self.nodes]


@dataclass(frozen=True)
class ImportStatement:
    """An import, its scope, and the statements of its block."""

    node: ast.Import | ast.ImportFrom
    scope: Scope
    block: list[ast.stmt]


class NameCollector(ast.NodeVisitor):
    """Collect the imports of a program, its uses of names, and its strings."""

    def __init__(self) -> None:
        self.scope = Scope()
        self.imports: list[ImportStatement] = []
        self.chains: list[Chain] = []
        self.strings: list[ast.Constant] = []
        self._block: list[ast.stmt] = []

    # imports

    def visit_Import(self, node: ast.Import) -> None:
        self.imports.append(ImportStatement(node, self.scope, self._block))
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            self.scope.bind(name, Binding(alias.name if alias.asname else name, node))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.imports.append(ImportStatement(node, self.scope, self._block))
        for alias in node.names:
            path = f"{node.module}.{alias.name}" if node.level == 0 else None
            self.scope.bind(alias.asname or alias.name, Binding(path, node))

    # uses

    def visit_Attribute(self, node: ast.Attribute) -> None:
        nodes: list[ast.Name | ast.Attribute] = [node]
        value = node.value
        while isinstance(value, ast.Attribute):
            nodes.append(value)
            value = value.value
        if isinstance(value, ast.Name):
            self.chains.append(Chain((value, *reversed(nodes)), self.scope))
        else:
            self.visit(value)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self.chains.append(Chain((node,), self.scope))
        else:
            self.scope.bind(node.id, Binding(None, node))

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self.strings.append(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.visit(node.value)

    # what else binds names

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        is_none = isinstance(node.value, ast.Constant) and node.value.value is None
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.scope.bind(target.id, Binding(None, node, is_none))
            else:
                self.visit(target)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.scope.bind(node.name, Binding(None, node))
        self._visit_function(node, node.body)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._visit_function(node, [node.body])

    def _visit_function(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, body: Sequence[ast.AST]
    ) -> None:
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        every += [each for each in (arguments.vararg, arguments.kwarg) if each is not None]
        outside = [
            *arguments.defaults,
            *arguments.kw_defaults,
            *(each.annotation for each in every),
        ]
        if not isinstance(node, ast.Lambda):
            outside += [*node.decorator_list, node.returns]
        self._visit_all(outside)
        with self._inner_scope():
            for each in every:
                self.scope.bind(each.arg, Binding(None, each))
            self._visit_block(body)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.scope.bind(node.name, Binding(None, node))
        self._visit_all([*node.decorator_list, *node.bases, *node.keywords])
        with self._inner_scope(is_class=True):
            self._visit_block(node.body)

    def visit_ListComp(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
    ) -> None:
        self.visit(node.generators[0].iter)  # in the scope around
        with self._inner_scope():
            self._visit_all(each.target for each in node.generators)
            self._visit_all(each.iter for each in node.generators[1:])
            self._visit_all(test for each in node.generators for test in each.ifs)
            if isinstance(node, ast.DictComp):
                self._visit_all([node.key, node.value])
            else:
                self.visit(node.elt)

    visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_ListComp  # noqa: N815

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.name is not None:
            self.scope.bind(node.name, Binding(None, node))
        self.generic_visit(node)

    def visit_MatchAs(self, node: ast.MatchAs | ast.MatchStar) -> None:
        if node.name is not None:
            self.scope.bind(node.name, Binding(None, node))
        self.generic_visit(node)

    visit_MatchStar = visit_MatchAs  # noqa: N815

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        if node.rest is not None:
            self.scope.bind(node.rest, Binding(None, node))
        self.generic_visit(node)

    def visit_Global(self, node: ast.Global) -> None:
        for name in node.names:
            self.scope.elsewhere[name] = self.scope.outermost()

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        for name in node.names:
            outer = self.scope.parent.find(name) if self.scope.parent else None
            self.scope.elsewhere[name] = outer or self.scope

    # walking

    def generic_visit(self, node: ast.AST) -> None:
        for _, value in ast.iter_fields(node):
            if isinstance(value, list):
                self._visit_block(value)
            elif isinstance(value, ast.AST):
                self.visit(value)

    def _visit_block(self, nodes: Sequence[ast.AST]) -> None:
        around = self._block
        if nodes and isinstance(nodes[0], ast.stmt):
            self._block = [each for each in nodes if isinstance(each, ast.stmt)]
            if self.scope.body is None:
                self.scope.body = self._block
        self._visit_all(nodes)
        self._block = around

    def _visit_all(self, nodes: Iterable[ast.AST | None]) -> None:
        for node in nodes:
            if isinstance(node, ast.AST):
                self.visit(node)

    @contextmanager
    def _inner_scope(self, is_class: bool = False) -> Iterator[None]:
        self.scope = Scope(self.scope, is_class)
        yield
        assert self.scope.parent is not None
        self.scope = self.scope.parent
