"""A serving cluster whose load is replayed from a trace (ROSE 6).

Guarantees: the same trace reaches serving whatever the rollouts do; nothing here is drawn.
"""

from __future__ import annotations

import asyncio
import json
import lzma
from collections.abc import Sequence
from importlib.resources import files
from operator import attrgetter, itemgetter
from pathlib import Path

from orchestrator.api import ConfigError
from orchestrator.config.sim_keys import SimBorrowedSection
from orchestrator.policies.serving.admission import Slo
from orchestrator.policies.serving.kv_sharing import SharingRules
from orchestrator.sim import hardware
from orchestrator.sim.coserving.serving_engine import (
    PAGE,
    CollocatedEngine,
    Role,
    ServedLatencies,
    ServingEngine,
    UserRequest,
)
from orchestrator.sim.cost_model import ACTIVATION_BYTES, MEMORY_SHARE, RooflineCosts
from orchestrator.sim.trace_files import read_arrivals

Row = tuple[float, int, int]  # seconds, prompt tokens, answer tokens


def read_trace(name: str) -> Sequence[Row]:
    """Arrivals of a packed trace by its name, of a JSON file of the same form, or of a trace as others write it
    (:mod:`orchestrator.sim.trace_files`). Raises ConfigError."""
    packed = files("orchestrator.sim.coserving") / f"served_{name}.json.xz"
    path = Path(name)
    if path.suffix != ".json" and path.is_file():
        return read_arrivals(path)
    try:
        if packed.is_file():
            found = json.loads(lzma.decompress(packed.read_bytes()))["rows"]
        else:
            found = json.loads(path.read_text(encoding="utf-8"))["rows"]
        rows = [(float(at) / 1000.0, int(prompt), int(answer)) for at, prompt, answer in found]
    except (OSError, ValueError, KeyError, TypeError) as error:
        fix = (
            "give azure_code, mooncake_conversation, a CSV, JSONL or Parquet file with columns arrival_seconds, prompt_tokens "
            "and response_tokens, or a JSON file with rows of milliseconds, prompt and answer tokens"
        )
        raise ConfigError("sim.borrowed.trace", name, f"{fix} ({error})") from error
    if (
        not rows
        or any(prompt < 1 or answer < 1 for _, prompt, answer in rows)
        or rows != sorted(rows, key=itemgetter(0))
    ):
        raise ConfigError("sim.borrowed.trace", name, "needs rows in order of time, with at least one token each")
    return rows


class ServingCluster:
    """Engines that serve a trace, each on a device of its own: prompts to the least busy one that prefills, then on to the least
    busy one that decodes; where each engine does both, they stay."""

    def __init__(
        self, settings: SimBorrowedSection, engines: int, device: hardware.DeviceSpec, degree: int, tenant: int
    ) -> None:
        """``tenant``: bytes of the rollout model's weights on a device."""
        model = hardware.model(settings.model, "sim.borrowed.model")
        costs, self.served = RooflineCosts(device, model, degree), ServedLatencies()
        rules = _rules(settings, device, degree, model.weight_bytes + tenant)
        slo = Slo(settings.ttft, settings.tpot)
        every = max(2, round(1 / settings.prefill))
        together = settings.phases == "collocated"
        if engines < 2 and not together:
            fix = "one serving engine prefills and another decodes: must be at least 2"
            raise ConfigError("sim.borrowed.serving", engines, fix)
        self.engines: list[ServingEngine] = []
        for number in range(engines):
            name = f"serving-{number}"
            if together:
                given = (name, "both", costs, slo, rules, self.served, self._decode)
                self.engines.append(CollocatedEngine(*given, chunk=settings.chunk))
                continue
            role: Role = "prefill" if number % every == 0 else "decode"
            self.engines.append(ServingEngine(name, role, costs, slo, rules, self.served, self._decode))
        self._entry: Role = "both" if together else "prefill"
        self._speed = settings.speed
        self._rows = read_trace(settings.trace)
        self._span = self._rows[-1][0] + 1.0
        self._next = 0
        self._timer: asyncio.TimerHandle | None = None
        self.requests = 0

    def engines_of(self, role: Role) -> list[ServingEngine]:
        """Those that serve, of a role."""
        return [engine for engine in self.engines if engine.role == role and engine.up]

    def start(self) -> None:
        """Users begin to ask."""
        self._arm()

    def close(self) -> None:
        """The simulation ends."""
        if self._timer is not None:
            self._timer.cancel()
        for engine in self.engines:
            engine.close()

    def _arm(self) -> None:
        rounds, place = divmod(self._next, len(self._rows))
        when = (rounds * self._span + self._rows[place][0]) / self._speed
        self._timer = asyncio.get_running_loop().call_at(when, self._arrive)

    def _arrive(self) -> None:
        _, prompt, answer = self._rows[self._next % len(self._rows)]
        self._next += 1
        self.requests += 1
        self._prefill(UserRequest(asyncio.get_running_loop().time(), prompt, answer))
        self._arm()

    def _prefill(self, request: UserRequest) -> None:
        min(self.engines_of(self._entry), key=attrgetter("load")).add(request)

    def _decode(self, request: UserRequest) -> None:
        min(self.engines_of("decode"), key=attrgetter("load")).add(request)

    def requeue_requests(self, engine: ServingEngine, requests: Sequence[UserRequest]) -> None:
        """What an engine that stopped had not done."""
        for request in requests:
            (self._prefill if engine.role == "prefill" else self._decode)(request)


def _rules(settings: SimBorrowedSection, device: hardware.DeviceSpec, degree: int, weights: int) -> SharingRules:
    """The KV pool of a device: what weights and activations of both models leave. The headroom is a share of all memory."""
    whole = device.memory_gb * 1e9 * degree
    pool = whole * MEMORY_SHARE - 2 * ACTIVATION_BYTES * degree - weights
    if settings.how == "multiplex":  # nobody keeps anything free
        return SharingRules(max(1, int(pool / PAGE)), headroom=0.0, watermark=1.0)
    if pool <= settings.headroom * whole:
        fix = "both models and this headroom do not fit on the device: use more devices per engine, or another model"
        raise ConfigError("sim.borrowed.model", settings.model, fix)
    return SharingRules(int(pool / PAGE), headroom=settings.headroom * whole / pool)


def tail_latency(values: Sequence[float], limit: float) -> tuple[float, float]:
    """The 99th percentile, and the share that is beyond a limit."""
    if not values:
        return 0.0, 0.0
    ordered = sorted(values)
    late = sum(value > limit for value in ordered) / len(ordered)
    return round(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 6), round(late, 6)
