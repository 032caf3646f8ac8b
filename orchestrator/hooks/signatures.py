"""Checks that the hooks into a stock engine still look as they did when they were tested.

Guarantees: standard library only; every mismatch is reported at once; a target that is missing, moved or no longer callable is a
mismatch, never an exception. Targets are looked up in the installed engine, which imports it (do that only where the engine is
imported anyway), or in a :class:`SourceTree`, which imports and executes nothing of it. One comparison for both.

Reading sources follows what a reader would: definitions at module level (also below ``if`` and ``try``), names imported from
other modules of the same source tree, and methods and attributes that a class inherits from classes of that tree. What cannot
be found so is reported as not there, never guessed: names that are made at run time (``setattr``, ``globals()``) are not seen.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

Parameters = tuple[str, ...]
Function = ast.FunctionDef | ast.AsyncFunctionDef
_FOLLOW = 20  # imports and base classes that are followed before a name counts as not there


class Parameter(NamedTuple):
    """One parameter of a callable."""

    name: str
    required: bool  # has no default and is not *args or **kwargs


@dataclass(frozen=True, slots=True)
class SignatureMismatch:
    """One hook target that differs from what was tested."""

    target: str
    expected: Parameters
    found: str

    def __str__(self) -> str:
        return f"{self.target}: expected parameters ({', '.join(self.expected)}), found {self.found}"


def signature_mismatches(
    targets: Mapping[str, Parameters], sources: SourceTree | None = None
) -> tuple[SignatureMismatch, ...]:
    """Compare targets, ``"module:qualname" -> parameter names``, with what is installed, or with ``sources``.

    The expected names must be there in this order; parameters that were added must have a default (an upstream
    release may add options, a call that we make must keep working).
    """
    mismatches = []
    for target, expected in targets.items():
        try:
            found = _imported(target) if sources is None else sources.parameters(target)
        except LookupError as error:
            mismatches.append(SignatureMismatch(target, expected, f"nothing there ({error})"))
            continue
        if difference := _difference(found, expected):
            mismatches.append(SignatureMismatch(target, expected, difference))
    return tuple(mismatches)


def missing_names(targets: Iterable[str], sources: SourceTree) -> tuple[str, ...]:
    """Those of ``"module:qualname"`` that are not in the sources: classes, variables of modules, classes, instances."""
    return tuple(target for target in targets if not sources.has(target))


def _imported(target: str) -> tuple[Parameter, ...]:
    """Raises LookupError."""
    module_name, _, qualname = target.partition(":")
    try:
        value: object = importlib.import_module(module_name)
        for part in qualname.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        raise LookupError(str(error)) from error
    if not callable(value):
        raise LookupError(f"a {type(value).__name__}, which is not callable")
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError) as error:
        raise LookupError(f"no readable signature: {error}") from error
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return tuple(
        Parameter(item.name, item.default is inspect.Parameter.empty and item.kind not in variadic)
        for item in parameters
    )


def _difference(parameters: Iterable[Parameter], expected: Parameters) -> str:
    found = {parameter.name: parameter for parameter in parameters}
    shown = f"({', '.join(found)})"
    if [name for name in found if name in expected] != list(expected):
        return shown
    for name, parameter in found.items():
        if name not in expected and parameter.required:
            return f"{shown}, where {name} is new and has no default"
    return ""


@dataclass(frozen=True, slots=True)
class _Found:
    """A definition, and the module in which its own names are looked up."""

    module: str
    node: ast.AST
    owner: ast.ClassDef | None = None


class SourceTree:
    """The Python sources of a distribution. ``read`` gives the text of a file ("package/module.py"), None if absent."""

    def __init__(self, read: Callable[[str], str | None]) -> None:
        self._read = read
        self._modules: dict[str, ast.Module | None] = {}

    @classmethod
    def installed(cls, folder: Path) -> SourceTree:
        """That below a folder, such as site-packages."""

        def read(path: str) -> str | None:
            file = folder / PurePosixPath(path)
            return file.read_text(encoding="utf-8") if file.is_file() else None

        return cls(read)

    def parameters(self, target: str) -> tuple[Parameter, ...]:
        """Of ``"module:qualname"``, as ``inspect.signature`` gives them. Raises LookupError when it is not there.

        A class stands for its ``__init__``, without self; one without ``__init__`` (a dataclass) has none to show.
        """
        found = self._find(target)
        if isinstance(found.node, ast.ClassDef):
            found, bound = self._member(found, "__init__"), True
        else:
            bound = found.owner is not None and "classmethod" in _decorators(found.node)
        if not isinstance(found.node, Function):
            raise LookupError(f"a {type(found.node).__name__}, which is not callable")
        parameters = tuple(_parameters(found.node.args))
        return parameters[1:] if bound else parameters

    def has(self, target: str) -> bool:
        """Whether ``"module:qualname"`` (or ``"module:"``) is there: anything, a variable of an instance included."""
        try:
            self._find(target)
        except LookupError:
            return False
        return True

    def _find(self, target: str) -> _Found:
        module, _, qualname = target.partition(":")
        if not qualname:
            return _Found(module, self._module(module))
        first, *rest = qualname.split(".")
        found = self._top(module, first, _FOLLOW)
        for name in rest:
            found = self._member(found, name)
        return found

    def _module(self, name: str) -> ast.Module:
        if name not in self._modules:
            path = name.replace(".", "/")
            text = self._read(f"{path}.py")
            if text is None:
                text = self._read(f"{path}/__init__.py")
            self._modules[name] = None if text is None else ast.parse(text)
        tree = self._modules[name]
        if tree is None:
            raise LookupError(f"no module {name}")
        return tree

    def _is_package(self, name: str) -> bool:
        return self._read(f"{name.replace('.', '/')}.py") is None

    def _top(self, module: str, name: str, follow: int) -> _Found:
        """A name at module level; the last definition counts, a definition before an import of the same name."""
        imported: tuple[str, str] | None = None
        found: ast.AST | None = None
        everything: list[str] = []  # modules of which all names are imported
        for node in _statements(self._module(module).body):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        imported = self._absolute(module, node), alias.name
                    elif alias.name == "*":
                        everything.append(self._absolute(module, node))
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.asname == name:
                        imported = alias.name, ""
            elif name in _defined(node):
                found = node
        if found is not None:
            return _Found(module, found)
        if follow == 0:
            raise LookupError(f"{name} of {module} is imported in a circle")
        if imported is None:
            for source in reversed(everything):
                with contextlib.suppress(LookupError):  # another one may have it
                    return self._top(source, name, follow - 1)
            try:  # a submodule of a package
                return _Found(f"{module}.{name}", self._module(f"{module}.{name}"))
            except LookupError:
                raise LookupError(f"nothing named {name} in {module}") from None
        source, original = imported
        if not original:
            return _Found(source, self._module(source))
        return self._top(source, original, follow - 1)

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        keep = len(parts) - node.level + (1 if self._is_package(module) else 0)
        return ".".join([*parts[:keep], *([node.module] if node.module else [])])

    def _member(self, found: _Found, name: str, follow: int = _FOLLOW) -> _Found:
        if isinstance(found.node, ast.Module):
            return self._top(found.module, name, _FOLLOW)
        if not isinstance(found.node, ast.ClassDef):
            raise LookupError(f"no class of which {name} could be a member")
        member = _own_member(found.node, name)
        if member is not None:
            return _Found(found.module, member, found.node)
        if follow:
            for base in found.node.bases:
                try:
                    parent = self._expression(found.module, base)
                    return self._member(parent, name, follow - 1)
                except LookupError:  # a base of another distribution, or one that does not have it: the next may
                    continue
        raise LookupError(f"{found.node.name} of {found.module} has no {name}")

    def _expression(self, module: str, node: ast.expr) -> _Found:
        if isinstance(node, ast.Subscript):  # Generic[T]
            return self._expression(module, node.value)
        if isinstance(node, ast.Name):
            return self._top(module, node.id, _FOLLOW)
        if isinstance(node, ast.Attribute):
            return self._member(self._expression(module, node.value), node.attr)
        raise LookupError(f"{ast.unparse(node)} is no name")


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module or class, also below if, try and with."""
    for node in body:
        yield node
        for block in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield from _statements(getattr(node, block, []))
        if isinstance(node, ast.Try):
            for handler in node.handlers:
                yield from _statements(handler.body)


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        names = (item for target in node.targets for item in ast.walk(target))
        return [item.id for item in names if isinstance(item, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []


def _own_member(owner: ast.ClassDef, name: str) -> ast.AST | None:
    """In the class body (the last one counts), else a variable that one of its methods sets on self."""
    found = [node for node in _statements(owner.body) if name in _defined(node)]
    if found:
        return found[-1]
    for method in owner.body:
        if isinstance(method, Function) and (arguments := [*method.args.posonlyargs, *method.args.args]):
            self_name = arguments[0].arg
            for node in ast.walk(method):
                if (
                    isinstance(node, ast.Attribute)
                    and isinstance(node.ctx, ast.Store)
                    and node.attr == name
                    and isinstance(node.value, ast.Name)
                    and node.value.id == self_name
                ):
                    return node
    return None


def _decorators(node: ast.AST) -> list[str]:
    return [ast.unparse(decorator) for decorator in getattr(node, "decorator_list", [])]


def _parameters(arguments: ast.arguments) -> Iterator[Parameter]:
    positional = [*arguments.posonlyargs, *arguments.args]
    without_default = len(positional) - len(arguments.defaults)
    for index, argument in enumerate(positional):
        yield Parameter(argument.arg, index < without_default)
    if arguments.vararg is not None:
        yield Parameter(arguments.vararg.arg, required=False)
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield Parameter(argument.arg, default is None)
    if arguments.kwarg is not None:
        yield Parameter(arguments.kwarg.arg, required=False)
