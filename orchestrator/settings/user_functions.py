"""Functions and classes of the user's that a config names, as ``module:name``. Guarantee: whatever their module does when it is
imported (a mistake in its syntax, an exception, an exit) is one ConfigError.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from orchestrator.api import ConfigError


def named_function(field: str, target: str, other: str = "") -> Callable[..., Any]:
    """What ``target`` names. ``other``: what else the field may be, for the error. Raises ConfigError."""
    found = load_named(field, target, "function", f"; write module:function{other}")
    if not callable(found):
        raise ConfigError(field, target, "is not callable: write module:function")
    made: Callable[..., Any] = found
    return made


def load_named(field: str, target: str, kind: str, form: str = "") -> Any:
    """What ``target`` names, a ``kind``. ``form``: how to write it, where that may be what is wrong. Raises ConfigError."""
    module, _, name = target.partition(":")
    if module.endswith(".py"):
        known = module.removesuffix(".py").replace("/", ".")
        raise ConfigError(field, target, f"{module} is a file, not a module; write {known}:{name}")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]
        fix = "; start it with PYTHONPATH=. where its file lies" if absent else ""
        raise ConfigError(field, target, f"{module} cannot be imported: {error}{fix or form}") from error
    except (Exception, SystemExit) as error:  # a module of the user's may raise anything
        why = f"{module} cannot be imported: {type(error).__name__}: {error}"
        raise ConfigError(field, target, why) from error
    try:
        return getattr(found, name)
    except AttributeError:
        raise ConfigError(field, target, f"{module} has no {kind} {name!r}{form}") from None
