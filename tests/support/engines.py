"""A rollout worker of a run, alone in its cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.cluster import ActorGen
from orchestrator.cluster.cluster import Heard
from orchestrator.resources import Placement
from orchestrator.runtime.engine_actors import RayWorker, VllmEngine


def rollout_worker(
    name: str,
    target: str = "types:SimpleNamespace",
    kwargs: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    placement: Placement | None = None,
    *,
    kind: type[RayWorker] = RayWorker,
    heard: Heard | None = None,
    **cut: Any,
) -> RayWorker:
    engines = ActorGen(VllmEngine, {name: placement}, environment, heard=heard)
    return kind(engines, engines.actors[0], target, kwargs or {}, **cut)
