"""A run's events for other systems: Weights & Biases, OpenTelemetry. Run by the process beside the run.

Guarantees: each is behind a queue of its own (:mod:`orchestrator.observe.view.exporter_queue`), in a process that is not the
run's. Names of curves are those of :mod:`orchestrator.observe.view.scalars`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.config import Config
from orchestrator.config.view_keys import LoggingSection
from orchestrator.observe.view import otlp, wandb
from orchestrator.observe.view.exporter_queue import Beside, Say

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
    return found
