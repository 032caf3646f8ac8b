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


def config_to_share(config: Config) -> dict[str, Any]:
    """What others may keep of a config: what is trained and how, no address and no file of this machine."""
    kept = ("run", "model", "task", "rollout", "trainer", "warmup", "evaluation", "filters")
    found: dict[str, Any] = config.model_dump(mode="json", include=set(kept))
    for section, name in (("run", "folder"), ("rollout", "served"), ("rollout", "served_token_file")):
        found[section].pop(name, None)
    return found


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
