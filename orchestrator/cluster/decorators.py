"""The three declarations of a worker's methods (RollArt 5.2, Listing 1). They only note; a cluster reads the notes.

Bad declarations are ConfigErrors where the class is written, not where it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

from orchestrator.api import ConfigError

EXECUTE_ALL, EXECUTE_ONE, EXECUTE_RANK_ZERO, SCATTER = "execute_all", "execute_one", "execute_rank_zero", "scatter"
MODES = (EXECUTE_ALL, EXECUTE_ONE, EXECUTE_RANK_ZERO, SCATTER)
AGGREGATES = ("list", "concat", "sum", "mean", "first")
DEFAULT_TAG = "default"
_NOTE = "__rlc_declaration__"

Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Declaration:
    """What is noted of a method. ``mode`` "": nothing was said. ``affinity``: task tag -> hardware class."""

    mode: str = ""
    aggregate: str = ""
    affinity: Mapping[str, str] | None = None
    attribute: str = ""
    url: str = ""


def declaration(method: object) -> Declaration:
    """The note of a method; an empty one where there is none."""
    found = getattr(method, _NOTE, None)
    return found if isinstance(found, Declaration) else Declaration()


def register(mode: str = EXECUTE_ALL, aggregate: str = "") -> Callable[[Method], Method]:
    """How a cluster's call of the method is carried out.

    ``mode``: "execute_all" on every worker with the same arguments; "execute_one" on the least busy worker;
    "execute_rank_zero" on the first; "scatter": the first argument, a sequence, is cut into a part a worker, in order.
    ``aggregate`` of the workers' results, by rank: "list" (default of execute_all), "concat" (default of scatter),
    "sum", "mean" (numbers, arrays, or mappings of these), "first".
    """
    if mode not in MODES:
        raise ConfigError("register.mode", mode, f"must be one of {', '.join(MODES)}")
    if aggregate and aggregate not in AGGREGATES:
        raise ConfigError("register.aggregate", aggregate, f"must be one of {', '.join(AGGREGATES)}")
    if aggregate and mode in (EXECUTE_ONE, EXECUTE_RANK_ZERO):
        raise ConfigError("register.aggregate", aggregate, f"{mode} has one result: leave it out")
    chosen = aggregate or ("concat" if mode == SCATTER else "list")
    return lambda method: _note(method, mode=mode, aggregate=chosen)


def hw_mapping(hw_affinity: Mapping[str, str]) -> Callable[[Method], Method]:
    """The method runs on workers of the class that its argument ``tag_name`` maps to ("default" for other tags); on a
    compatible one while there is none of them. One worker runs it, unless ``register`` says otherwise."""
    words = all(isinstance(text, str) and text for pair in hw_affinity.items() for text in pair)
    if not hw_affinity or not words:
        fix = 'write it as {task: class, "default": class}, for instance {"FrozenLake": "H800", "default": "H20"}'
        raise ConfigError("hw_mapping.hw_affinity", hw_affinity, fix)
    return lambda method: _note(method, affinity=dict(hw_affinity))


def register_serverless(attribute: str, serverless_url: str) -> Callable[[Method], Method]:
    """In the method, ``self.ATTRIBUTE(payload)`` calls the function at that URL: JSON in, JSON out, by POST. It returns a
    reference at once, as a remote call of Ray does: ``ray.get`` waits for the answer."""
    if not attribute.isidentifier() or attribute.startswith("__"):
        raise ConfigError("register_serverless.attribute", attribute, "must be a name, as in self.reward_proxy")
    parts = urlsplit(serverless_url)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.username is not None:
        fix = (
            "write it as https://host/path: Function Compute, Lambda and Knative give every function such a URL "
            "(the token goes into RL_COSERVE_REWARD_TOKEN)"
        )
        raise ConfigError("register_serverless.serverless_url", serverless_url, fix)
    return lambda method: _note(method, attribute=attribute, url=serverless_url)


def _note(method: Method, **said: Any) -> Method:
    setattr(method, _NOTE, replace(declaration(method), **said))
    return method
