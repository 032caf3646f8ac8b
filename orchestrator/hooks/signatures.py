"""Checks that the hooks into a stock engine still look as they did when they were tested.

Guarantees: every mismatch is reported at once; a target that is missing, moved or no longer callable is a mismatch,
never an exception. Targets are imported: call this only where the engine is imported anyway.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass

Parameters = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One hook target that differs from what was tested."""

    target: str
    expected: Parameters
    found: str

    def __str__(self) -> str:
        return f"{self.target}: expected parameters ({', '.join(self.expected)}), found {self.found}"


def signature_mismatches(targets: Mapping[str, Parameters]) -> tuple[Mismatch, ...]:
    """Compare targets, ``"module:qualname" -> parameter names``, with what is installed.

    The expected names must be there in this order; parameters that were added must have a default (an upstream
    release may add options, a call that we make must keep working).
    """
    mismatches = []
    for target, expected in targets.items():
        found = _difference(target, expected)
        if found:
            mismatches.append(Mismatch(target, expected, found))
    return tuple(mismatches)


def _difference(target: str, expected: Parameters) -> str:
    module_name, _, qualname = target.partition(":")
    try:
        value: object = importlib.import_module(module_name)
        for part in qualname.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        return f"nothing there ({error})"
    if not callable(value):
        return f"a {type(value).__name__}, which is not callable"
    try:
        parameters = inspect.signature(value).parameters
    except (TypeError, ValueError) as error:
        return f"no readable signature ({error})"
    found = f"({', '.join(parameters)})"
    if [name for name in parameters if name in expected] != list(expected):
        return found
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for name, parameter in parameters.items():
        added = name not in expected and parameter.kind not in variadic
        if added and parameter.default is inspect.Parameter.empty:
            return f"{found}, where {name} is new and has no default"
    return ""
