"""Functions of the user's that a config names, as ``module:function``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from orchestrator.api import ConfigError


def named_function(field: str, target: str, other: str = "") -> Callable[..., Any]:
    """What ``target`` names. ``other``: what else the field may be, for the error. Raises ConfigError."""
    module, _, name = target.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(field, target, f"cannot be imported ({error}); write module:function{other}") from error
    if not callable(found):
        raise ConfigError(field, target, "is not callable: write module:function")
    made: Callable[..., Any] = found
    return made
