"""The benchmarks: one name, one figure of ``docs/results``, measured afresh by each call.

A benchmark module has ``NAME``, a docstring whose first paragraph says what it measures, and ``run(quick, nonce) -> dict``, a
result of :func:`scripts.bench.result.frame`; a simulated figure is declared, as ``FIGURE``
(:class:`scripts.bench.papers.runner.Figure`).
"""

from __future__ import annotations

import difflib
import importlib
from typing import Any, NamedTuple

from orchestrator.api import ConfigError

VLLM, MEGATRON, MOONCAKE = "vllm", "megatron-core", "mooncake"
RUN = "vllm, megatron-core, ray, mooncake"


class Bench(NamedTuple):
    """Where a benchmark is, how long the whole of it took when the committed figure was measured (on two cores, which others
    used, too; tested), and what it needs beside the package. Where it has cells (:mod:`scripts.bench.papers.sweep`), what all of
    them took of one core, at five seeds."""

    module: str
    whole: str
    needs: str = "nothing more"


BENCHES = {
    "recompute-exact": Bench("scripts.bench.micro.recompute_exact", "3 min", VLLM),
    "update-pause": Bench("scripts.bench.micro.update_pause", "3 min", VLLM),
    "preemption": Bench("scripts.bench.micro.preemption", "2 min", VLLM),
    "idle-overhead": Bench("scripts.bench.micro.idle_overhead", "4 min", VLLM),
    "active-overhead": Bench("scripts.bench.micro.active_overhead", "10 min", VLLM),
    "ledger-faults": Bench("scripts.bench.micro.ledger_faults", "15 min"),
    "kills": Bench("scripts.bench.micro.kills", "2 h", f"{RUN}, redis-server, libfaketime, root"),
    "memory-plan": Bench("scripts.bench.micro.memory_plan", "20 min", MEGATRON),
    "power-cuts": Bench("scripts.bench.micro.power_cuts", "6 min"),
    "learns": Bench("scripts.bench.papers.learns", "20 to 75 min", RUN),
    "demo-seeds": Bench("scripts.bench.papers.demo_seeds", "30 min", RUN),
    "pretrained": Bench("scripts.bench.papers.pretrained_learns", "2 h", f"{RUN}; models/smollm2"),
    "reward-timeout": Bench("scripts.bench.micro.reward_timeout", "3 min", "bubblewrap"),
    "turn-cost": Bench("scripts.bench.micro.turn_cost", "1 min"),
    "scale-out": Bench("scripts.bench.micro.scale_out", "4 min", "root, iproute2"),
    "environments": Bench("scripts.bench.micro.environments", "41 min"),
    "learning-parity": Bench("scripts.bench.papers.learning_parity", "100 min", RUN),
    "trajectory-vs-batch": Bench("scripts.bench.micro.trajectory_vs_batch", "5 min", f"{VLLM}, ray"),
    "resets": Bench("scripts.bench.micro.resets", "3 min"),
    "store": Bench("scripts.bench.micro.store", "6 min", "duckdb, polars"),
    "batch-handover": Bench("scripts.bench.micro.batch_handover", "1 min", "ray"),
    "checkpoint-stall": Bench("scripts.bench.micro.checkpoint_stall", "1 min"),
    "routing": Bench("scripts.bench.micro.routing", "2 min"),
    "placement": Bench("scripts.bench.micro.placement", "3 min"),
    "placement-gain": Bench("scripts.bench.micro.placement_gain", "4 min", f"{VLLM}, ray"),
    "allocation": Bench("scripts.bench.micro.allocation", "a few seconds"),
    "reallocation": Bench("scripts.bench.papers.reallocation", "11 min, 120 cells"),
    "expert-parallelism": Bench("scripts.bench.papers.expert_parallelism", "4 min, 40 cells"),
    "peers": Bench("scripts.bench.peers.side_by_side", "10 min", f"{RUN}; the first time pip, 2 GB of disk"),
    "prediction": Bench("scripts.bench.papers.prediction", "2 min"),
    "prediction-encoder": Bench("scripts.bench.papers.encoder_prediction", "10 min", "transformers, --model FOLDER"),
    "heddle": Bench("scripts.bench.papers.heddle", "70 min, 495 cells"),
    "all-together": Bench("scripts.bench.papers.all_together", "24 min, 540 cells"),
    "stream-equality": Bench("scripts.bench.micro.stream_equality", "29 min", MEGATRON),
    "calibrated-prediction": Bench("scripts.bench.micro.calibrated_prediction", "6 min", RUN),
    "stream-step": Bench("scripts.bench.micro.stream_step", "10 min", RUN),
    "padding": Bench("scripts.bench.micro.padding", "10 s", MEGATRON),
    "delta-bytes": Bench("scripts.bench.micro.delta_bytes", "5 min"),
    "delta-speed": Bench("scripts.bench.micro.delta_speed", "1 min"),
    "transfer-limit": Bench("scripts.bench.micro.transfer_limit", "6 min", MOONCAKE),
    "site-fanout": Bench("scripts.bench.micro.site_fanout", "3 min", f"{MOONCAKE}, {VLLM}, root, iproute2"),
    "encoding-choice": Bench("scripts.bench.micro.auto_encoding", "2 min", f"{MOONCAKE}, root, iproute2"),
    "delta-peers": Bench("scripts.bench.micro.delta_peers", "2 min", VLLM),
    "kv-migrate": Bench("scripts.bench.micro.kv_migrate", "1 min", VLLM),
    "sim-error": Bench("scripts.bench.papers.sim_error", "5 min", VLLM),
    "roofline-error": Bench("scripts.bench.papers.roofline_error", "a second"),
    "sim-speed": Bench("scripts.bench.micro.sim_speed", "1 min"),
    "modes": Bench("scripts.bench.papers.modes", "11 min, 315 cells"),
    "affinity": Bench("scripts.bench.papers.affinity", "8 min, 180 cells"),
    "rollart-figures": Bench("scripts.bench.papers.rollart_figures", "10 min, 240 cells"),
    "rollpacker-figures": Bench("scripts.bench.papers.rollpacker_figures", "23 min, 400 cells"),
    "borrowed": Bench("scripts.bench.papers.borrowed", "16 min, 150 cells"),
    "rose-figures": Bench("scripts.bench.papers.rose_figures", "60 min, 315 cells"),
    "rotation": Bench("scripts.bench.papers.rotation", "10 min, 300 cells"),
    "tail-batching": Bench("scripts.bench.papers.tail_batching", "4 min", VLLM),
    "coserve-slo": Bench("scripts.bench.micro.coserve_slo", "50 min", VLLM),
    "pool-step": Bench("scripts.bench.micro.pool_step", "1 min", VLLM),
    "four-papers": Bench("scripts.bench.micro.four_papers", "5 min", RUN),
    "judge-batches": Bench("scripts.bench.micro.judge_batches", "4 min", VLLM),
    "kv-remap": Bench("scripts.bench.micro.kv_remap", "a few seconds", VLLM),
}


def describe() -> list[tuple[str, str]]:
    """Name of each benchmark, and what it measures (its module's first paragraph), needs and takes."""
    rows = []
    for name, (module, whole, needs) in sorted(BENCHES.items()):
        text = (importlib.import_module(module).__doc__ or "").strip().partition("\n\n")[0]
        rows.append((name, f"{' '.join(text.split())} [needs {needs}; about {whole}, --quick about a minute]"))
    return rows


def run(name: str, *, quick: bool, nonce: str, model: str = "") -> dict[str, Any]:
    """Measure. ``model``: a Hugging Face folder, where the benchmark can take one (``TAKES_MODEL``). Raises ConfigError for an
    unknown name, or a model that it does not take."""
    if name not in BENCHES:
        near = [one for one in BENCHES if name and name in one] or difflib.get_close_matches(name, BENCHES, 5)
        hint = f"did you mean {' or '.join(near[:5])}?" if near else "see rl-coserve bench --list"
        raise ConfigError("bench", name, f"no such benchmark; {hint}")
    module = importlib.import_module(BENCHES[name].module)
    if model and not getattr(module, "TAKES_MODEL", False):
        raise ConfigError("bench --model", model, f"{name} is not measured with a model of yours: leave it out")
    more = {"model": model} if model else {}
    measure = module.FIGURE.run if hasattr(module, "FIGURE") else module.run
    result: dict[str, Any] = measure(quick=quick, nonce=nonce, **more)
    return result
