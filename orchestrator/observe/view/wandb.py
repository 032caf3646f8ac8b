"""A run's curves for Weights & Biases (``logging.wandb``).

Guarantees: the API key is wandb's own business (its environment variable, its login), never in our config or files; a resumed
run goes on in the same run of W&B; what a checkpoint took back stays there as it was sent.
"""

from __future__ import annotations

import importlib
import secrets
from pathlib import Path
from typing import Any

from orchestrator.config.view_keys import WandbSection
from orchestrator.observe.view.exporter_queue import Event
from orchestrator.observe.view.scalars import KINDS as CURVES
from orchestrator.observe.view.scalars import scalars

KINDS = CURVES | {"alarm", "fault"}
_ID = "wandb-id"  # file in the run folder


class WandbExporter:
    """Begins the run of W&B. ``config``: what is kept of the run's."""

    def __init__(self, settings: WandbSection, folder: Path, config: dict[str, Any]) -> None:
        library: Any = importlib.import_module("wandb")
        self._faults = 0
        self._run = library.init(
            project=settings.project,
            entity=settings.entity or None,
            name=folder.name,
            id=_identity(folder),
            resume="allow",
            dir=str(folder),
            mode=settings.mode,
            config=config,
            settings=library.Settings(console="off", silent=True),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")  # evaluations and updates come later than the step they are of

    def take(self, event: Event) -> None:
        """See the protocol."""
        if event["kind"] in CURVES:
            step, values = scalars(event)
            self._run.log({"step": step, **values})
        else:
            self._faults += 1
            self._run.summary["incidents"] = self._faults

    def close(self) -> None:
        """See the protocol."""
        self._run.finish()


def _identity(folder: Path) -> str:
    """Made once, and kept for a resume."""
    file = folder / _ID
    if not file.exists():
        file.write_text(f"{secrets.token_hex(6)}\n", encoding="utf-8")
    return file.read_text(encoding="utf-8").strip()
