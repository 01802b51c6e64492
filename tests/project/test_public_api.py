"""The public names and their signatures are those stored in public_api.txt.

`python tests/project/test_public_api.py --write` stores the present ones: the diff of that file
then shows what a change does to the public API. Neither the modules in which things are defined nor
the names of classes and type aliases that are not public nor the versions of torch and of Python
matter.
"""

import ast
import dataclasses
import difflib
import enum
import functools
import importlib
import inspect
import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

MODULES = (
    "shardwise",
    "shardwise.export",
    "shardwise.fsdp",
    "shardwise.interop",
    "shardwise.parallel",
    "shardwise.sharded",
    "shardwise.testing",
)
STORED = Path(__file__).with_name("public_api.txt")
REMEDY = "if intended: python tests/project/test_public_api.py --write, and commit the file"

# Methods that a user calls by syntax rather than by name.
PROTOCOLS = {
    *("__call__", "__enter__", "__exit__", "__await__", "__bool__", "__hash__", "__eq__"),
    *("__len__", "__iter__", "__next__", "__contains__", "__getitem__", "__setitem__"),
    *("__index__", "__int__", "__float__", "__add__", "__sub__", "__mul__", "__or__", "__and__"),
}


def public_names(module: types.ModuleType) -> list[str]:
    """Return the names in `__all__`, or without one the public names the module itself defines."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    )


def api() -> str:
    """Return the text that public_api.txt should have."""
    modules = {name: importlib.import_module(name) for name in MODULES}
    public = {getattr(module, name) for module in modules.values() for name in classes_of(module)}
    lines = []
    for path, module in modules.items():
        lines.append(path)
        for name in public_names(module):
            lines += [f"  {line}" for line in described(name, getattr(module, name), public)]
        lines.append("")
    return "\n".join(lines)


def classes_of(module: types.ModuleType) -> list[str]:
    return [name for name in public_names(module) if isinstance(getattr(module, name), type)]


def described(name: str, value: object, public: set[type]) -> Iterator[str]:
    """Describe one public name, in one line or, for a class, in one and one for each member."""
    if isinstance(value, types.ModuleType):
        yield f"module {name}"
    elif isinstance(value, type):
        bases = ", ".join(sorted(base.__name__ for base in visible_bases(value, public)))
        yield f"class {name}" + (f"({bases})" if bases else "")
        if has_own_constructor(value):
            yield f"  {name}{signature_text(value, constructor=True)}"
        yield from (f"  {line}" for line in members(value))
    elif callable(value) and not typing.get_origin(value):
        yield f"def {name}{signature_text(value)}"
    else:
        yield f"{name} = {value_text(value)}"


def visible_bases(cls: type, public: set[type]) -> set[type]:
    """Return the nearest ancestors that are public, or that another library defines."""
    known = [
        base
        for base in cls.__mro__[1:]
        if base in public or not (is_ours(base) or base in (object, typing.Generic))
    ]
    return {
        base
        for base in known
        if not base.__name__.startswith("_")
        and not any(other is not base and issubclass(other, base) for other in known)
    }


def is_ours(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "shardwise"


def has_own_constructor(cls: type) -> bool:
    """Tell whether shardwise defines how instances are made, and not Python or torch."""
    if issubclass(cls, enum.Enum) or getattr(cls, "_is_protocol", False):
        return False
    owners = {owner_of(cls, "__init__"), owner_of(cls, "__new__")}
    return is_ours(type(cls)) or any(map(is_ours, owners))


def owner_of(cls: type, name: str) -> type:
    """Return the class in which an attribute is found."""
    return next((base for base in cls.__mro__ if name in vars(base)), object)


def members(cls: type) -> list[str]:
    """Describe the public members that shardwise gives a class, in itself or in a base."""
    ours = [base for base in cls.__mro__ if is_ours(base)]
    found = {name for base in ours for name in (*vars(base), *annotations_of(base))}
    found |= {name for base in ours for name in assigned_to_self(base)}
    return [
        member(cls, name)
        for name in sorted(found)
        if (name in PROTOCOLS or not name.startswith("_"))
        and (owner_of(cls, name) is object or is_ours(owner_of(cls, name)))
        and not (name in PROTOCOLS and owner_of(cls, name) is object)
    ]


def member(cls: type, name: str) -> str:
    value = vars(owner_of(cls, name)).get(name)
    annotated = next((base for base in cls.__mro__ if name in annotations_of(base)), None)
    typed = ""
    if annotated is not None:
        typed = annotation_text(annotations_of(annotated)[name], annotated.__module__)
        typed = f": {typed}"
    if isinstance(cls, enum.EnumMeta) and name in cls.__members__:
        return f"member {name} = {value_text(cls[name].value)}"
    if dataclasses.is_dataclass(cls) and name in {field.name for field in dataclasses.fields(cls)}:
        return f"field {name}{typed}"
    if isinstance(value, property | functools.cached_property):
        getter = value.func if isinstance(value, functools.cached_property) else value.fget
        returned = getattr(getter, "__annotations__", {}).get("return")
        typed = f": {annotation_text(returned, getter.__module__)}" if returned else ""
        return f"property {name}{typed}" + (", settable" if getattr(value, "fset", None) else "")
    if isinstance(value, classmethod | staticmethod):
        return f"{type(value).__name__} {name}{signature_text(value.__func__)}"
    if name in PROTOCOLS and value is None:
        return f"{name} = None"
    if name in ("__eq__", "__hash__"):
        return f"def {name}"  # a dataclass has the signatures that its version of Python gives it
    if callable(value) and not isinstance(value, type):
        return f"def {name}{signature_text(value)}"
    if inspect.isdatadescriptor(value) or not any(name in vars(base) for base in cls.__mro__):
        return f"attribute {name}{typed}"
    return f"attribute {name}{typed} = {value_text(value)}"


def annotations_of(cls: type) -> dict[str, object]:
    return dict(inspect.get_annotations(cls)) if is_ours(cls) else {}


@functools.cache
def assigned_to_self(cls: type) -> frozenset[str]:
    """Return the names that methods of a class assign to `self`."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):  # made by code: there is no source
        return frozenset()
    return frozenset(
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def signature_text(function: typing.Any, constructor: bool = False) -> str:
    """Return a signature as in its definition, without modules and addresses."""
    signature = inspect.signature(function)
    module = home_of_signature(function)
    parts, kinds = [], [parameter.kind for parameter in signature.parameters.values()]
    for index, parameter in enumerate(signature.parameters.values()):
        before = kinds[:index]
        if parameter.kind is parameter.KEYWORD_ONLY and not (
            {parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL} & set(before)
        ):
            parts.append("*")
        if parameter.kind is not parameter.POSITIONAL_ONLY and before[-1:] == [
            parameter.POSITIONAL_ONLY
        ]:
            parts.append("/")
        is_self = parameter.name == "self"  # its annotation is for type checkers only
        parts.append("self" if is_self else parameter_text(parameter, module))
    if kinds and kinds[-1] is inspect.Parameter.POSITIONAL_ONLY:
        parts.append("/")
    text = f"({', '.join(parts)})"
    if constructor or signature.return_annotation is signature.empty:
        return text
    return f"{text} -> {annotation_text(signature.return_annotation, module)}"


def home_of_signature(function: typing.Any) -> str:
    """Return the module whose names the annotations of a function or a constructor use."""
    if not isinstance(function, type):
        return str(function.__module__)
    maker = next(
        (name for name in ("__new__", "__init__") if is_ours(owner_of(function, name))), "__init__"
    )
    return owner_of(function, maker).__module__


def parameter_text(parameter: inspect.Parameter, module: str) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = f"{stars}{parameter.name}"
    if parameter.annotation is not parameter.empty:
        text += f": {annotation_text(parameter.annotation, module)}"
    if parameter.default is not parameter.empty:
        text += f" = {value_text(parameter.default)}"
    return text


def annotation_text(annotation: object, module: str) -> str:
    """Return an annotation of something that `module` defines, in which every name is public.

    Type aliases of shardwise are written out, its classes that are not public shown as <internal>,
    and of other dotted names only the last part.
    """
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = re.sub(r"ForwardRef\('([^']*)'\)", r"\1", text)
    if "Literal[" in text:
        return without_modules(text)
    text = " ".join(text.replace("'", "").replace('"', "").split())
    text = re.sub(r"\bNoneType\b", "None", text)
    return re.sub(r"[A-Za-z_][\w.]*\w|[A-Za-z_]", lambda name: type_text(name[0], module), text)


def type_text(name: str, module: str) -> str:
    home, _, last = name.rpartition(".")
    home = home or origins(module).get(name, "")
    if home.partition(".")[0] != "shardwise":
        return last
    value = getattr(sys.modules.get(home), last, for_type_checkers(home).get(last))
    if last in public_types() and (value is None or isinstance(value, type)):
        return last
    if isinstance(value, typing.TypeVar):
        return last
    if isinstance(value, type) and not is_ours(value):
        return value.__name__
    if isinstance(value, str | types.UnionType) or typing.get_origin(value):
        return annotation_text(value, home)
    return "<internal>"


@functools.cache
def origins(module: str) -> dict[str, str]:
    """Return the module that each name of a module was imported from, or that module itself.

    Read from its source, as some are imported for type checkers only.
    """
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {each.asname or each.name: str(node.module) for each in node.names}
    found |= {node.name: module for node in tree.body if isinstance(node, ast.ClassDef)}
    found |= dict.fromkeys(assigned(tree.body), module)
    return found | dict.fromkeys(for_type_checkers(module), module)


@functools.cache
def for_type_checkers(module: str) -> dict[str, str]:
    """Return the type aliases of a module that do not exist when it runs, as text."""
    if module not in sys.modules:
        return {}
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    branches = [node for node in tree.body if isinstance(node, ast.If)]
    return {name: text for node in branches for name, text in assigned(node.body).items()}


def assigned(body: list[ast.stmt]) -> dict[str, str]:
    """Return the names that statements assign to, and the text of their values."""
    found = {}
    for node in body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            found |= dict.fromkeys(names, ast.unparse(node.value))
    return found


@functools.cache
def public_types() -> frozenset[str]:
    modules = map(importlib.import_module, MODULES)
    return frozenset(name for module in modules for name in classes_of(module))


def value_text(value: object) -> str:
    """Return a constant or a default, without modules and addresses."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return value.__qualname__
    if isinstance(value, dict):
        pairs = sorted(f"{value_text(key)}: {value_text(each)}" for key, each in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, str):
        return repr(value)
    return without_modules(re.sub(r" at 0x[0-9a-f]+", "", repr(value)))


def without_modules(text: str) -> str:
    return re.sub(r"\b(?:[a-zA-Z_]\w*\.)+([a-zA-Z_]\w*)", r"\1", text)


def test_the_public_names_and_signatures_are_those_stored():
    stored = STORED.read_text("utf-8")
    now = api()
    if now != stored:
        lines = difflib.unified_diff(
            stored.splitlines(), now.splitlines(), STORED.name, "now", lineterm="", n=0
        )
        pytest.fail("\n".join(["the public API has changed:", *lines, REMEDY]), pytrace=False)


def test_the_modules_of_the_package_that_are_public_are_stored():
    package = importlib.import_module("shardwise")
    modules = {
        f"shardwise.{name}"
        for name in package.__all__
        if isinstance(getattr(package, name), types.ModuleType)
    }
    assert {"shardwise", *modules} == set(MODULES)


def test_the_place_of_a_definition_makes_no_difference_to_a_signature():
    def one(x: "ast.expr | None" = None, *, key: type = dict) -> "list[ast.AST]": ...

    def other(x: ast.expr | None = None, *, key: type = dict) -> list[ast.AST]: ...

    assert signature_text(one) == signature_text(other)
    assert signature_text(one) == "(x: expr | None = None, *, key: type = dict) -> list[AST]"


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(f"usage: python {sys.argv[0]} --write")
    STORED.write_text(api(), "utf-8")
    print(f"written: {STORED}")
