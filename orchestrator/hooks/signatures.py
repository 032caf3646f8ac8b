"""Checks that the hooks into a stock engine still look as they did when they were tested.

Guarantees: every mismatch is reported at once; a target that is missing, moved or no longer callable is a mismatch,
never an exception. Targets are looked up in the installed engine, which imports it (do that only where the engine is
imported anyway), or in a :class:`~orchestrator.hooks.source_signatures.SourceTree`, which imports nothing. One
comparison for both.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

Parameters = tuple[str, ...]


class Parameter(NamedTuple):
    """One parameter of a callable."""

    name: str
    required: bool  # has no default and is not *args or **kwargs


class Signatures(Protocol):
    """Those of an engine's sources. Reading them is for checks: this module, which every process loads, brings no parser."""

    def parameters(self, target: str) -> tuple[Parameter, ...]: ...

    def has(self, target: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class SignatureMismatch:
    """One hook target that differs from what was tested."""

    target: str
    expected: Parameters
    found: str

    def __str__(self) -> str:
        return f"{self.target}: expected parameters ({', '.join(self.expected)}), found {self.found}"


def signature_mismatches(
    targets: Mapping[str, Parameters], sources: Signatures | None = None
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


def missing_names(targets: Iterable[str], sources: Signatures) -> tuple[str, ...]:
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
