"""Checks that the hooks into a stock engine still look as they did when they were tested.

Guarantees: standard library only; every mismatch is reported at once; a target that is missing, moved or no longer callable is a
mismatch, never an exception. Signatures are those of the installed engine, which is imported (do that only where it is imported
anyway); names are looked up in a :class:`SourceTree`, which imports and executes nothing of it.

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
from typing import NamedTuple, Self

Parameters = tuple[str, ...]
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
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
    targets: Mapping[str, Parameters], look: Callable[[str], tuple[Parameter, ...]] | None = None
) -> tuple[SignatureMismatch, ...]:
    """Compare targets, ``"module:qualname" -> parameter names``, with what is installed, or what ``look`` says (which raises
    LookupError).

    The expected names must be there in this order; parameters that were added must have a default (an upstream
    release may add options, a call that we make must keep working).
    """
    mismatches = []
    for target, expected in targets.items():
        try:
            found = (look or _imported)(target)
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
class Definition:
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
    def installed(cls, folder: Path) -> Self:
        """That below a folder, such as site-packages."""

        def read(path: str) -> str | None:
            file = folder / PurePosixPath(path)
            return file.read_text(encoding="utf-8") if file.is_file() else None

        return cls(read)

    def has(self, target: str) -> bool:
        """Whether ``"module:qualname"`` (or ``"module:"``) is there: anything, a variable of an instance included."""
        try:
            self.find(target)
        except LookupError:
            return False
        return True

    def find(self, target: str) -> Definition:
        """Where ``"module:qualname"`` is defined. Raises LookupError."""
        module, _, qualname = target.partition(":")
        if not qualname:
            return Definition(module, self._module(module))
        first, *rest = qualname.split(".")
        found = self._top(module, first, _FOLLOW)
        for name in rest:
            found = self.member(found, name)
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

    def _top(self, module: str, name: str, follow: int) -> Definition:
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
            return Definition(module, found)
        if follow == 0:
            raise LookupError(f"{name} of {module} is imported in a circle")
        if imported is None:
            for source in reversed(everything):
                with contextlib.suppress(LookupError):  # another one may have it
                    return self._top(source, name, follow - 1)
            try:  # a submodule of a package
                return Definition(f"{module}.{name}", self._module(f"{module}.{name}"))
            except LookupError:
                raise LookupError(f"nothing named {name} in {module}") from None
        source, original = imported
        if not original:
            return Definition(source, self._module(source))
        return self._top(source, original, follow - 1)

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        keep = len(parts) - node.level + (self._read(f"{module.replace('.', '/')}.py") is None)
        return ".".join([*parts[:keep], *([node.module] if node.module else [])])

    def member(self, found: Definition, name: str, follow: int = _FOLLOW) -> Definition:
        """One of a module or class, of its base classes too. Raises LookupError."""
        if isinstance(found.node, ast.Module):
            return self._top(found.module, name, _FOLLOW)
        if not isinstance(found.node, ast.ClassDef):
            raise LookupError(f"no class of which {name} could be a member")
        member = _own_member(found.node, name)
        if member is not None:
            return Definition(found.module, member, found.node)
        if follow:
            for base in found.node.bases:
                try:
                    parent = self._expression(found.module, base)
                    return self.member(parent, name, follow - 1)
                except LookupError:  # a base of another distribution, or one that does not have it: the next may
                    continue
        raise LookupError(f"{found.node.name} of {found.module} has no {name}")

    def _expression(self, module: str, node: ast.expr) -> Definition:
        if isinstance(node, ast.Subscript):  # Generic[T]
            return self._expression(module, node.value)
        if isinstance(node, ast.Name):
            return self._top(module, node.id, _FOLLOW)
        if isinstance(node, ast.Attribute):
            return self.member(self._expression(module, node.value), node.attr)
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
        if isinstance(method, FUNCTION) and (arguments := [*method.args.posonlyargs, *method.args.args]):
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
