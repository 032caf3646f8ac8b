"""Tools as functions (Heddle 3, tool manager): an environment calls a tool over the same serverless protocol as rewards.

Guarantees: those of :class:`~orchestrator.rewards.function_client.FunctionClient` for each tool (retries, at most ``concurrency``
calls in flight and ``burst`` waiting, cold starts counted). What a tool itself did wrong (raised, ran too long) is an answer
for the policy to read; what keeps a call from the tool is a TrajectoryError, so that it masks the trajectory and is no
reward: ``tool_unavailable`` (no try reached it, no answer, too many calls), ``tool_refused`` (address, token).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

from orchestrator.api import TrajectoryError
from orchestrator.api.errors import shown
from orchestrator.api.tls import Tls
from orchestrator.rewards.function_client import FunctionCalls, FunctionClient, FunctionFailed


@dataclass(frozen=True)
class ToolAnswer:
    """``value`` is what the tool returned, parsed JSON; or ``error`` says in words what went wrong in it."""

    value: Any = None
    error: str = ""


@dataclass(frozen=True)
class ToolSettings:
    """Which tools there are; sent to environments in other processes. ``urls``: name -> where to POST."""

    urls: Mapping[str, str]
    token: str = ""
    concurrency: int = 16
    burst: int = 64
    timeout: float = 10.0
    retries: int = 3
    seed: int = 0
    patience: float = 0.0  # seconds that a host which is gone is tried for in any case
    tls: Mapping[str, Any] | None = None  # fields of a Tls: for https


class ToolClient:
    """All tools of a run, by name."""

    def __init__(self, settings: ToolSettings) -> None:
        common = {name: value for name, value in vars(settings).items() if name not in ("urls", "tls")}
        common["tls"] = Tls(**(settings.tls or {}))
        self._functions = {name: FunctionClient(url, **common) for name, url in sorted(settings.urls.items())}

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        """Run a tool on named arguments. Raises TrajectoryError when it was not reached."""
        function = self._functions.get(name)
        if function is None:
            return ToolAnswer(
                error=f"no such tool: {shown(name, 60)}; there are: {', '.join(self._functions) or 'none'}"
            )
        try:
            return ToolAnswer(await function.call(dict(arguments)))
        except FunctionFailed as error:
            match error.kind:
                case "unavailable" | "no_answer" | "burst":
                    raise TrajectoryError("tool_unavailable", f"{name}: {error}") from error
                case "refused":
                    raise TrajectoryError("tool_refused", f"{name}: {error.detail}") from error
                case "error" | "timeout" | "not_finite":
                    return ToolAnswer(error=error.detail or error.kind)

    async def prewarm(self, count: int) -> tuple[str, ...]:
        """Have ``count`` processes of each tool ready before the first call. Returns the tools whose host cannot do that."""
        if count == 0:
            return ()
        done = await asyncio.gather(*(function.prewarm(count) for function in self._functions.values()))
        return tuple(name for name, able in zip(self._functions, done, strict=True) if not able)

    def stats(self) -> dict[str, dict[str, Any]]:
        """Counters of each tool, as called from this process."""
        return {name: function.stats() for name, function in self._functions.items()}

    async def close(self) -> None:
        """Idempotent."""
        for function in self._functions.values():
            await function.close()


class ToolTally:
    """Calls of ``tools`` in all processes: of each environment's process what it said last, and those of this one.

    What a process did after its last answer (it died in a call) is not in it.
    """

    _FIELDS = tuple(asdict(FunctionCalls()))

    def __init__(self, tools: Iterable[str]) -> None:
        self._sums = {name: dict.fromkeys(self._FIELDS, 0.0) for name in tools}

    def of_process(self) -> Callable[[object], None]:
        """What a new process' counters, which only grow, are to be told to. Raises TrajectoryError for what are none."""
        last: dict[str, dict[str, float]] = {}

        def note(said: object) -> None:
            for name, counted in _counters(said, self._sums, self._FIELDS).items():
                before, sums = last.get(name, {}), self._sums[name]
                for field, value in counted.items():
                    sums[field] += max(0, value - before.get(field, 0))
                last[name] = counted

        return note

    def stats(self, own: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Counters of each tool; ``own`` are those of this process."""
        names = sorted({*own, *self._sums})
        return {
            name: {
                field: round(own.get(name, {}).get(field, 0) + self._sums.get(name, {}).get(field, 0), 6)
                for field in self._FIELDS
            }
            for name in names
        }


_MOST = 1e15  # of a counter; a float holds every whole number below it


def _counters(said: object, tools: Container[str], fields: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """By tool. A process said it that may say anything: tools that there are, finite numbers. Raises TrajectoryError."""
    if isinstance(said, dict) and all(name in tools for name in said):
        values = {
            name: {field: counted.get(field, 0) for field in fields}
            for name, counted in said.items()
            if isinstance(counted, dict)
        }
        numbers = [value for counted in values.values() for value in counted.values()]
        if len(values) == len(said) and all(type(n) in (int, float) and 0 <= n < _MOST for n in numbers):
            return values
    raise TrajectoryError("environment_protocol", f"no counters of tools: {shown(said, 100)}")


@runtime_checkable
class ToolUser(Protocol):
    """A task or an environment that calls tools."""

    def use_tools(self, tools: ToolClient) -> None:
        """Called once, before the first environment is made, or reset."""
