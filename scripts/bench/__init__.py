"""The benchmarks: one name, one figure of ``docs/results``, measured afresh by each call.

A benchmark module has ``NAME``, a docstring whose first line says what it measures, and ``run(quick, nonce) -> dict`` with
the keys ``name, kind, value, unit, reference, reference_value, bar, holds, machine, versions, detail``.
"""

from __future__ import annotations

import importlib
from typing import Any

from orchestrator.api import ConfigError

MODULES = {
    "recompute-exact": "scripts.bench.micro.recompute_exact",
    "update-pause": "scripts.bench.micro.update_pause",
    "preemption": "scripts.bench.micro.preemption",
    "idle-overhead": "scripts.bench.micro.idle_overhead",
    "active-overhead": "scripts.bench.micro.active_overhead",
    "ledger-faults": "scripts.bench.micro.ledger_faults",
    "kills": "scripts.bench.micro.kills",
    "power-cuts": "scripts.bench.micro.power_cuts",
    "learns": "scripts.bench.papers.learns",
    "reward-timeout": "scripts.bench.micro.reward_timeout",
    "event-loop": "scripts.bench.micro.event_loop",
    "learning-parity": "scripts.bench.papers.learning_parity",
    "trajectory-vs-batch": "scripts.bench.micro.trajectory_vs_batch",
    "store": "scripts.bench.micro.store",
    "routing": "scripts.bench.micro.routing",
    "placement": "scripts.bench.micro.placement",
    "allocation": "scripts.bench.micro.allocation",
    "reallocation": "scripts.bench.papers.reallocation",
    "expert-parallelism": "scripts.bench.papers.expert_parallelism",
    "prediction": "scripts.bench.papers.prediction",
    "heddle": "scripts.bench.papers.heddle",
    "all-together": "scripts.bench.papers.all_together",
    "stream-equality": "scripts.bench.micro.stream_equality",
    "stream-step": "scripts.bench.micro.stream_step",
    "merge-control": "scripts.bench.micro.merge_control",
    "delta-bytes": "scripts.bench.micro.delta_bytes",
    "delta-speed": "scripts.bench.micro.delta_speed",
    "transfer-limit": "scripts.bench.micro.transfer_limit",
    "delta-peers": "scripts.bench.micro.delta_peers",
    "kv-migrate": "scripts.bench.micro.kv_migrate",
    "sim-error": "scripts.bench.papers.sim_error",
    "sim-speed": "scripts.bench.micro.sim_speed",
    "modes": "scripts.bench.papers.modes",
    "affinity": "scripts.bench.papers.affinity",
    "rollart-figures": "scripts.bench.papers.rollart_figures",
    "rollpacker-figures": "scripts.bench.papers.rollpacker_figures",
    "borrowed": "scripts.bench.papers.borrowed",
    "rose-figures": "scripts.bench.papers.rose_figures",
    "tail-batching": "scripts.bench.papers.tail_batching",
    "coserve-slo": "scripts.bench.micro.coserve_slo",
    "kv-remap": "scripts.bench.micro.kv_remap",
}


def describe() -> list[tuple[str, str]]:
    """Name and first line of each benchmark."""
    rows = []
    for name, module in sorted(MODULES.items()):
        text = importlib.import_module(module).__doc__ or ""
        rows.append((name, text.strip().splitlines()[0]))
    return rows


def run(name: str, *, quick: bool, nonce: str, model: str = "") -> dict[str, Any]:
    """Measure. ``model``: a Hugging Face folder, where the benchmark can take one (``TAKES_MODEL``). Raises ConfigError for an
    unknown name, or a model that it does not take."""
    if name not in MODULES:
        raise ConfigError("bench", name, f"no such benchmark; known: {', '.join(sorted(MODULES))}")
    module = importlib.import_module(MODULES[name])
    if model and not getattr(module, "TAKES_MODEL", False):
        raise ConfigError("bench --model", model, f"{name} is not measured with a model of yours: leave it out")
    more = {"model": model} if model else {}
    result: dict[str, Any] = module.run(quick=quick, nonce=nonce, **more)
    return result
