"""A run's events for other systems: Weights & Biases, OpenTelemetry. Run by the process beside the run.

Guarantees: an exporter runs in a thread of its own behind a bounded queue, in a process that is not the run's: one that hangs,
fails or is slow holds up nothing; that it failed, or does not keep up, is said once; at the end it has some seconds to send what
is left. Names of curves are those of :mod:`orchestrator.observe.view.scalars`.
"""

from __future__ import annotations

import importlib.util
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from orchestrator.api import ConfigError
from orchestrator.config import Config
from orchestrator.config.sections import LoggingSection

QUEUE = 10_000  # events that may wait
FINISH_SECONDS = 15.0  # to send what is left

Event = Mapping[str, Any]
Say = Callable[[str], None]


class Exporter(Protocol):
    """What sends events somewhere. Its methods are called in one thread; they may block, and raise what they like."""

    name: str
    kinds: frozenset[str]  # of events that it wants

    def take(self, event: Event) -> None: ...

    def close(self) -> None: ...


class Beside:
    """One exporter, behind its queue. ``make`` is called in its thread: it may take long, and fail."""

    def __init__(
        self, name: str, kinds: frozenset[str], make: Callable[[], Exporter], say: Say, limit: int = QUEUE
    ) -> None:
        self._name, self._kinds, self._say, self._make = name, kinds, say, make
        self._waiting: queue.Queue[Event | None] = queue.Queue(limit)
        self._told = False
        self._over = False
        self._thread = threading.Thread(target=self._run, name=f"export to {name}", daemon=True)
        self._thread.start()

    def take(self, event: Event) -> None:
        """Never waits."""
        if self._over or event["kind"] not in self._kinds:
            return
        try:
            self._waiting.put_nowait(event)
        except queue.Full:
            self._tell("does not keep up; some of its events are left out")

    def close(self, seconds: float = FINISH_SECONDS) -> None:
        """Give it so long to send what is left."""
        try:
            self._waiting.put(None, timeout=seconds)
        except queue.Full:
            self._tell("did not send everything in time")
            return
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._tell("did not send everything in time")

    def _run(self) -> None:
        try:
            exporter = self._make()
            while (event := self._waiting.get()) is not None:
                exporter.take(event)
            exporter.close()
        except Exception as error:  # noqa: BLE001 - a library of others, which may raise anything: it is said, and ends only itself
            self._over = True
            text = (str(error).splitlines() or [""])[0]
            self._tell(f"failed ({type(error).__name__}: {text[:200]}); the run goes on without it")

    def _tell(self, what: str) -> None:
        if not self._told:
            self._told = True
            self._say(f"{self._name} {what}")


def check(settings: LoggingSection) -> None:
    """Raises ConfigError for what is switched on and not installed."""
    for on, module, field, package in (
        (settings.wandb.enabled, "wandb", "logging.wandb.enabled", "wandb"),
        (bool(settings.otlp.endpoint), "opentelemetry.exporter.otlp.proto.http", "logging.otlp.endpoint", "otlp"),
    ):
        if on and not _there(module):
            value = settings.otlp.endpoint or True
            raise ConfigError(field, value, f"needs a package that is not installed: pip install rl-coserve[{package}]")


def _there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # one of its parents
        return False


def described(config: Config) -> dict[str, Any]:
    """What others may keep of a config: what is trained and how, no address and no file of this machine."""
    kept = ("run", "model", "task", "rollout", "trainer", "warmup", "evaluation", "filters")
    found: dict[str, Any] = config.model_dump(mode="json", include=set(kept))
    for section, name in (("run", "folder"), ("rollout", "served"), ("rollout", "served_token_file")):
        found[section].pop(name, None)
    return found


def exporters(settings: LoggingSection, folder: Path, config: dict[str, Any], say: Say) -> list[Beside]:
    """Those that the config switches on, under way. ``config``: the run's own, for those who keep it."""
    found = []
    if settings.wandb.enabled:
        from orchestrator.observe.view import wandb

        make = wandb.maker(settings.wandb, folder, config)
        found.append(Beside("Weights & Biases", wandb.KINDS, make, say))
    if settings.otlp.endpoint:
        from orchestrator.observe.view import otlp

        found.append(Beside("OpenTelemetry", otlp.KINDS, otlp.maker(settings.otlp, folder.name, say), say))
    return found
