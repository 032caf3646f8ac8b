"""The benchmarks: one name, one figure of ``docs/results``, measured afresh by each call.

A benchmark module has ``NAME``, a docstring whose first line says what it measures, and ``run(quick, nonce) -> dict`` with
the keys ``name, kind, value, unit, reference, reference_value, bar, holds, machine, versions, detail``.
"""

from __future__ import annotations

import importlib
from typing import Any

from orchestrator.api import ConfigError

_MODULES = {
    "recompute-exact": "orchestrator.bench.recompute_exact",
    "update-pause": "orchestrator.bench.update_pause",
    "preemption": "orchestrator.bench.preemption",
    "idle-overhead": "orchestrator.bench.idle_overhead",
    "active-overhead": "orchestrator.bench.active_overhead",
    "ledger-faults": "orchestrator.bench.ledger_faults",
    "kills": "orchestrator.bench.kills",
    "learns": "orchestrator.bench.learns",
    "reward-timeout": "orchestrator.bench.reward_timeout",
    "event-loop": "orchestrator.bench.event_loop",
    "learning-parity": "orchestrator.bench.learning_parity",
    "trajectory-vs-batch": "orchestrator.bench.trajectory_vs_batch",
    "store": "orchestrator.bench.store",
    "routing": "orchestrator.bench.routing",
    "placement": "orchestrator.bench.placement",
    "allocation": "orchestrator.bench.allocation",
    "reallocation": "orchestrator.bench.reallocation",
    "expert-parallelism": "orchestrator.bench.expert_parallelism",
    "prediction": "orchestrator.bench.prediction",
    "heddle": "orchestrator.bench.heddle",
    "all-together": "orchestrator.bench.all_together",
    "stream-equality": "orchestrator.bench.stream_equality",
    "stream-step": "orchestrator.bench.stream_step",
    "merge-control": "orchestrator.bench.merge_control",
    "delta-bytes": "orchestrator.bench.delta_bytes",
    "delta-speed": "orchestrator.bench.delta_speed",
    "transfer-limit": "orchestrator.bench.transfer_limit",
    "delta-peers": "orchestrator.bench.delta_peers",
    "kv-migrate": "orchestrator.bench.kv_migrate",
    "sim-error": "orchestrator.bench.sim_error",
    "sim-speed": "orchestrator.bench.sim_speed",
    "modes": "orchestrator.bench.modes",
    "affinity": "orchestrator.bench.affinity",
    "rollart-figures": "orchestrator.bench.rollart_figures",
    "rollpacker-figures": "orchestrator.bench.rollpacker_figures",
    "borrowed": "orchestrator.bench.borrowed",
    "rose-figures": "orchestrator.bench.rose_figures",
    "tail-batching": "orchestrator.bench.tail_batching",
    "coserve-slo": "orchestrator.bench.coserve_slo",
    "kv-remap": "orchestrator.bench.kv_remap",
}


def describe() -> list[tuple[str, str]]:
    """Name and first line of each benchmark."""
    rows = []
    for name, module in sorted(_MODULES.items()):
        text = importlib.import_module(module).__doc__ or ""
        rows.append((name, text.strip().splitlines()[0]))
    return rows


def run(name: str, *, quick: bool, nonce: str, model: str = "") -> dict[str, Any]:
    """Measure. ``model``: a Hugging Face folder, where the benchmark can take one (``TAKES_MODEL``). Raises ConfigError for an
    unknown name, or a model that it does not take."""
    if name not in _MODULES:
        raise ConfigError("bench", name, f"no such benchmark; known: {', '.join(sorted(_MODULES))}")
    module = importlib.import_module(_MODULES[name])
    if model and not getattr(module, "TAKES_MODEL", False):
        raise ConfigError("bench --model", model, f"{name} is not measured with a model of yours: leave it out")
    more = {"model": model} if model else {}
    result: dict[str, Any] = module.run(quick=quick, nonce=nonce, **more)
    return result
