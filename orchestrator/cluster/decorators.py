"""The declaration of a worker's methods (RollArt 5.2, Listing 1). It only notes; a cluster reads the notes.

Bad declarations are ConfigErrors where the class is written, not where it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from orchestrator.api import ConfigError

MODES = EXECUTE_ALL, EXECUTE_ONE, EXECUTE_RANK_ZERO = "execute_all", "execute_one", "execute_rank_zero"
AGGREGATES = ("list", "concat", "first")
_NOTE = "__rlc_declaration__"

Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Declaration:
    """What is noted of a method."""

    mode: str = EXECUTE_ALL
    aggregate: str = "list"
    beside: bool = False


def declaration(method: object) -> Declaration:
    """The note of a method; where there is none, what :func:`register` alone would note."""
    found = getattr(method, _NOTE, None)
    return found if isinstance(found, Declaration) else Declaration()


def register(mode: str = EXECUTE_ALL, aggregate: str = "", *, beside: bool = False) -> Callable[[Method], Method]:
    """How a cluster's call of the method is carried out.

    ``mode``: "execute_all" on every worker with the same arguments; "execute_one" on the least busy worker;
    "execute_rank_zero" on the first. ``aggregate`` of all workers' results, by rank: "list" (the default), "concat" (of
    sequences), "first". ``beside``: it runs, and answers, while another method computes without yielding; its class says
    how many of these at a time.
    """
    if mode not in MODES:
        raise ConfigError("register.mode", mode, f"must be one of {', '.join(MODES)}")
    if aggregate and aggregate not in AGGREGATES:
        raise ConfigError("register.aggregate", aggregate, f"must be one of {', '.join(AGGREGATES)}")
    if aggregate and mode != EXECUTE_ALL:
        raise ConfigError("register.aggregate", aggregate, f"{mode} has one result: leave it out")
    chosen = aggregate or ("list" if mode == EXECUTE_ALL else "first")

    def note(method: Method) -> Method:
        setattr(method, _NOTE, Declaration(mode, chosen, beside))
        return method

    return note
