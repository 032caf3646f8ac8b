"""A run's events for other systems: Weights & Biases, OpenTelemetry, one of the user's. Run by the process beside the run.

Guarantees: each is behind a queue of its own (:mod:`orchestrator.observe.view.exporter_queue`), in a process that is not the
run's. Names of curves are those of :mod:`orchestrator.observe.view.scalars`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.api import ConfigError
from orchestrator.config import Config
from orchestrator.config.view_keys import LoggingSection
from orchestrator.observe.view import otlp, wandb
from orchestrator.observe.view.exporter_queue import Beside, Event, Say
from orchestrator.observe.view.scalars import KINDS as CURVES
from orchestrator.observe.view.scalars import scalars
from orchestrator.settings.user_functions import named_function

_PLACES = ("_file", "_files", "_folder", "_host", "_url", "_address")


def config_to_share(config: Config) -> dict[str, Any]:
    """What others may keep of a config: what is trained and how, no address and no file of this machine."""
    kept = ("run", "model", "task", "rollout", "trainer", "warmup", "evaluation", "filters")
    found: dict[str, Any] = _shared(config.model_dump(mode="json", include=set(kept)))
    found["run"].pop("folder", None)
    found["rollout"].pop("served", None)
    return found


def _shared(value: Any) -> Any:
    """Without what names a place: absolute paths, those from here, home folders, URLs, and keys of files and addresses."""
    if isinstance(value, dict):
        kept = {key: _shared(one) for key, one in value.items() if not str(key).endswith(_PLACES)}
        return {key: one for key, one in kept.items() if not _is_place(one)}
    return [_shared(one) for one in value if not _is_place(one)] if isinstance(value, list) else value


def _is_place(value: Any) -> bool:
    return isinstance(value, str) and (value.startswith(("/", "./", "../", "~")) or "://" in value)


def start_exporters(settings: LoggingSection, folder: Path, config: dict[str, Any], say: Say) -> list[Beside]:
    """Those that the config switches on, under way. ``config``: the run's own, for those who keep it."""
    found = []
    if settings.wandb.enabled:
        make = partial(wandb.WandbExporter, settings.wandb, folder, config)
        found.append(Beside("Weights & Biases", wandb.KINDS, make, say))
    if settings.otlp.endpoint:
        connect = partial(otlp.OtlpExporter, settings.otlp.endpoint.rstrip("/"), folder.name, say)
        found.append(Beside("OpenTelemetry", otlp.KINDS, connect, say))
    if settings.exporter:
        begin = partial(OwnExporter, settings.exporter, folder.name, config)
        found.append(Beside(settings.exporter, CURVES, begin, say))
    return found


class OwnExporter:
    """The curves for a class of the user's (``logging.exporter``): made with the run's name and what others may keep of its
    config; ``log(step, values)`` is called with the curves of an event by name, ``close()`` at the end."""

    def __init__(self, target: str, run: str, config: dict[str, Any]) -> None:
        self._made = own_exporter(target)(run, config)

    def take(self, event: Event) -> None:
        """See the protocol."""
        step, values = scalars(event)
        if values:
            self._made.log(step, values)

    def close(self) -> None:
        """See the protocol."""
        self._made.close()


def own_exporter(target: str) -> Callable[..., Any]:
    """The class of the user's. Raises ConfigError for one that could not be used."""
    field = "logging.exporter"
    found = named_function(field, target)
    try:
        inspect.signature(found).bind("run", {})
    except (TypeError, ValueError) as error:
        raise ConfigError(field, target, f"is made with the run's name and its config: {error}") from error
    if missing := [name for name in ("log", "close") if not callable(getattr(found, name, None))]:
        raise ConfigError(field, target, f"has no {' and no '.join(missing)}: write log(step, values) and close()")
    return found
