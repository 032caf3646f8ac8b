"""Trajectories that nobody can account for after seeded fault runs of the whole orchestrator (must be 0).

Simulated: the production pipeline on the virtual-time loop, its ports wrapped by the fault injector, its process killed and
resumed (:mod:`orchestrator.sim`). Each seed draws a shape of run (mode, alpha, sizes, fault rate) and a history of faults.
After each run the journal is recounted by code that shares nothing with the ledger, and compared with the trainer's own
history and with the store. The full run takes 10,000 seeds in two processes; ``--quick`` takes as many as fit 40 seconds,
from a first seed that the nonce decides. One more run loses a trajectory on purpose: the control, which must be caught.

``python -m scripts.bench.micro.ledger_faults FOLDER`` is the full run on one core, a chunk of seeds at a time, each kept in
FOLDER when it is done: one that was interrupted goes on, and what there is by then is printed (``--minutes``).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

from orchestrator.api import Prompt, Trajectory
from orchestrator.buffer import SampleBuffer
from orchestrator.config import Config, parse_config
from orchestrator.policies.batching import coordination_modes
from orchestrator.policies.routing.turn_routing import RULES
from orchestrator.sim.seeded_draws import random_stream
from orchestrator.sim.simulated_run import SimResult, simulate
from scripts.bench.result import frame, now

NAME = "ledger-faults"
_SEEDS = 10_000
_PROCESSES = 2
_CHUNK = 10  # seeds a task of a process
_KEPT = 50  # seeds of a kept part
_SAY_SECONDS = 10.0  # between two lines where the output is no terminal
_QUICK_SECONDS = 29.0  # no chunk is begun after this; start and the last chunks take the rest of 40 s
_CONTROL_SEED = 0


@dataclass
class Tally:
    """What some seeds added up to."""

    seeds: int = 0
    started: int = 0
    trained: int = 0
    unaccounted: int = 0
    deadlocks: int = 0
    lives: int = 0
    virtual_seconds: float = 0.0
    injected: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)  # with their seed; the first few
    violating_seeds: int = 0
    pid: int = 0

    def add(self, other: Tally) -> None:
        """Sum up."""
        self.seeds += other.seeds
        self.started += other.started
        self.trained += other.trained
        self.unaccounted += other.unaccounted
        self.deadlocks += other.deadlocks
        self.lives += other.lives
        self.virtual_seconds += other.virtual_seconds
        self.injected.update(other.injected)
        self.violations = (self.violations + other.violations)[:20]
        self.violating_seeds += other.violating_seeds


def config_of(seed: int, fault_rate: float | None = None) -> Config:
    """The small run that a seed stands for: its shape is drawn as well."""
    rng = random_stream(seed, "shape")
    alpha = rng.choice((0, 1, 1, 2, 3))
    size, groups = rng.choice((2, 3, 4)), rng.choice((1, 2, 3))
    extra = random_stream(seed, "shape", "streaming")  # its own draws, so that a seed keeps the rest of its shape
    weights = random_stream(seed, "shape", "weights")
    route = random_stream(seed, "shape", "routing")
    fitting = [name for name in coordination_modes.MODES if not coordination_modes.alpha_conflict(name, alpha)]
    steps, workers = rng.choice((2, 3, 4)), rng.choice((1, 2, 3))
    more = random_stream(seed, "shape", "tasks, pools, tools, contexts")
    worlds = random_stream(seed, "shape", "templates, timeouts")
    members = more.choice((1.0, 1.0, 1.5))
    environments = math.ceil(size * members) * rng.choice((1, 2, 6))
    redundant_groups = rng.choice((1.0, 1.0, 1.5))
    mode = random_stream(seed, "shape", "mode").choice(fitting)
    around = _surroundings(more)
    if mode == "sync":
        around["environment"]["size"] = 0
    rounds = rounds_of(seed, size, groups)
    lengths = _cut(_lengths(random_stream(seed, "shape", "lengths")), random_stream(seed, "shape", "degrees"))
    others = {}
    if "disaggregation" in lengths:
        workers = max(2, workers)
        others = {f"sim-{index}": "H20" for index in range(1, workers)}
    cut = "planner" in lengths or "degrees" in lengths.get("placement", {})
    if cut:
        workers = 4 if workers > 1 or "start" in lengths.get("placement", {}).get("degrees", {}) else 2
    borrowed = _borrowed(random_stream(seed, "shape", "borrowed"), lengths)
    if mode != "sync" and "prediction" not in lengths:
        lengths["shards"] = min(environments, random_stream(seed, "shape", "shards").choice((1, 1, 2, 3)))
    if rounds["enabled"]:
        steps, environments, redundant_groups, members = steps + 1, max(environments, 2 * size), 1.0, 1.0
        around["filters"]["balance"] = "none"
    return parse_config(
        {
            **around,
            "run": {
                "name": "ledger-faults",
                "seed": seed,
                "steps": steps,
                "mode": mode,
            },
            "rollout": {
                "workers": workers,
                "environments": environments,
                "alpha": alpha,
                "group_size": size,
                "groups_per_step": groups,
                "redundant_groups": redundant_groups,
                "member_refills": rng.choice((0, 2)),
                "worker_restarts": rng.choice((1, 4)),
                "dynamic_sampling": extra.choice((False, True)),
                "max_filtered_groups": extra.choice((1, 8)),
                "stall_timeout": 30.0,
                "first_token_timeout": 30.0,
                "prepare_timeout": 30.0,
                "update_timeout": 30.0,
                "restart_timeout": 120.0,
                "weights": weights.choice(("relay", "collective")),
                "collective_timeout": 20.0,
                "engine": {"max_num_seqs": rng.choice((2, 64))},
                "routing": {
                    "policy": route.choice(RULES),
                    "cap": route.choice((0, 1, 4)),
                    "imbalance": route.choice((0, 16)),
                    "hardware": {"sim-0": "H800", **others},
                    "affinity": route.choice(({}, {"default": "H800"}, {"sim-2": "H800"})),
                },
                "rounds": rounds,
                "redundant_members": members,
                "group_timeout": more.choice((None, None, 20.0)),
                "staleness_decay": more.choice((0.0, 0.5)),
                **lengths,
            },
            "task": {"on_timeout": worlds.choice((None, None, "truncated", "partial"))},
            "trainer": {"stream": extra.choice((False, True))},
            "evaluation": {"prompts": 2, "every": rng.choice((0, 1))},
            "checkpoint": {"every": rng.choice((1, 1, 2))},
            "sim": {
                "publish_seconds": weights.choice((0.5, 10.0)),
                "turns_max": rng.choice((2, 6)),
                "response_tokens_mean": rng.choice((5.0, 30.0)),
                "environment_seconds_sigma": rng.choice((0.3, 1.5)),
                "train_seconds_per_token": rng.choice((2e-4, 2e-2)),
                "fault_rate": rng.choice((0.01, 0.03, 0.08)) if fault_rate is None else fault_rate,
                "faults": ("crash", "delay", "drop", "duplicate", "cancel", "lose", "evict", "damage", "kill"),
                "kinds": more.choice((1, 1, 2, 3)),
                "tools": more.choice((0.0, 0.0, 0.5)),
                "tool_concurrency": more.choice((1, 16)),
                "tool_burst": more.choice((0, 64)),
                "response_tokens_max": 32,
                "templates": worlds.choice((0, 0, 3)),
                **({"kv_tokens": 320, "start_seconds": 2.0} if cut else {}),
                **borrowed,
            },
        }
    )


def rounds_of(seed: int, size: int, groups: int) -> dict[str, Any]:
    """Short and long rounds of every third seed: small epochs, so that a run sees the ends of some."""
    rng = random_stream(seed, "shape", "rounds")
    return {
        "enabled": rng.random() < 1 / 3,
        "eta_prompts": rng.choice((1.0, 1.25, 1.5, 2.0)),
        "eta_responses": rng.choice((1.0, 1.25, 1.5)),
        "search": rng.choice(((), (), (1.1, 1.4))),
        "epoch_prompts": rng.choice((0, groups, max(groups, 3), 5, 7)),
        "tries": rng.choice((2, 12)),  # of groups of up to six: fewer than the failures in a row that end a run
        "isolate_environments": rng.choice((False, True)),
        "max_active": rng.choice((None, 2 * size)),
        "predict": random_stream(seed, "shape", "rounds", "predict").choice(
            ("", "", "history", f"{__name__}:length_of")
        ),
    }


def length_of(prompt: Prompt) -> float | None:
    """A user's guess of the tokens of a prompt's answers; of every third prompt it has none."""
    return None if prompt.seed % 3 == 0 else float(prompt.seed % 97)


def _lengths(draw: random.Random) -> dict[str, Any]:
    """Forecasts and what is decided by them; where KV goes; how engines are cut. Sections of ``[rollout]``."""
    found: dict[str, Any] = {}
    if draw.random() < 1 / 3:
        predictors, orders = ("progressive", "prompt-only", "history"), ("longest-first", "shortest-first", "fcfs")
        found["prediction"] = {
            "enabled": True,
            "predictor": draw.choice(predictors),
            "order": draw.choice(orders),
            "patience": draw.choice((0.1, 2.0)),
        }
        found["placement"] = {"enabled": draw.random() < 0.6, "migrate": draw.choice((False, True))}
    if draw.random() < 1 / 3:
        found["kv_transfer"] = {
            "enabled": True,
            "min_tokens": draw.choice((0, 16)),
            "limit": draw.choice((0.001, 10.0)),
        }
        if draw.random() < 1 / 2:
            parts = {"enabled": True, "prefill": "H800", "decode": "H20", "min_tokens": draw.choice((0, 24))}
            found["disaggregation"] = parts
    if draw.random() < 1 / 6 and "disaggregation" not in found:
        found["planner"] = {"enabled": True, "calm_steps": draw.choice((1, 2))}
    return found


def _cut(found: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """The same, with degrees that change between steps in every fourth: changes cost nothing at first, so that there are some."""
    if draw.random() < 1 / 4 and not found.keys() & {"planner", "disaggregation"}:
        placement, prediction = found.get("placement", {}), found.get("prediction", {})
        degrees = {
            "enabled": True,
            "speeds": {"1": 1.0, "2": draw.uniform(1.2, 2.0), "4": draw.uniform(1.5, 4.0)},
            "start_seconds": 0.0,
            "horizon": draw.choice((1, 4)),
        }
        degrees |= draw.choice(({}, {"expected_tokens": 20.0}, {"start": (2, 1, 1)}, {"start": (1, 1, 2)}))
        found["prediction"] = {**prediction, "enabled": True}
        found["placement"] = {**placement, "enabled": True, "degrees": degrees}
    return found


def _borrowed(draw: random.Random, lengths: dict[str, Any]) -> dict[str, Any]:
    """Workers beside serving engines, or on devices that come and go, of every fifth seed; keys of ``[sim]``."""
    if draw.random() > 1 / 5 or lengths.keys() & {"disaggregation", "planner", "placement"}:
        return {}
    how = draw.choice(("coserve", "coserve", "multiplex", "autoscale", "spot", "serverless"))
    found = {
        "how": how,
        "workers": draw.choice((1, 2, 4)),
        "serving": 4,
        "phases": "disaggregated" if how == "autoscale" else draw.choice(("disaggregated", "collocated")),
        "speed": draw.choice((1.0, 8.0)),
        "activation_seconds": draw.choice((0.0, 5.0)),
    }
    if how == "coserve" and draw.random() < 1 / 2:
        found["exchanged"] = True
        if found["phases"] == "disaggregated":
            found |= {"scaled": draw.choice((False, True)), "outage_seconds": draw.choice((0.0, 20.0))}
    return {"costs": "roofline", "borrowed": found}


def _surroundings(draw: random.Random) -> dict[str, Any]:
    """Where environments live, what long episodes are shown, and what is filtered."""
    contexts: tuple[dict[str, Any], ...] = (
        {},
        {},
        {"strategy": "restart", "tokens": 96, "recent_turns": draw.choice((0, 2))},
        {"strategy": "summarise", "tokens": 128, "summary_tokens": 12, "ask": (5, 6)},
        {"strategy": "summarise", "tokens": 128, "summary_tokens": 12, "summary": f"{__name__}:beginning"},
    )
    pool = {
        "backend": draw.choice(("in-process", "in-process-pool")),
        "size": draw.choice((0, 2, 5)),
        "warm": draw.choice((0, 2)),
        "parallel_starts": draw.choice((1, 4)),
        "max_episodes": draw.choice((0, 1, 3)),
        "max_age_seconds": draw.choice((30.0, 3600.0)),
        "health_seconds": draw.choice((5.0, 30.0)),
        "idle_seconds": draw.choice((5.0, 300.0)),
    }
    chosen = {
        "truncated": draw.choice(("keep", "keep", "drop")),
        "max_repetition": draw.choice((None, None, 0.5)),
        "balance": draw.choice(("none", "none", "task", "difficulty")),
    }
    return {"context": draw.choice(contexts), "environment": pool, "filters": chosen}


def beginning(tokens: Sequence[int]) -> Sequence[int]:
    """A summary of a context, for runs whose contexts a function summarises."""
    return tokens[:8]


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure."""
    begun, clock = now(), time.monotonic()
    first = zlib.crc32(nonce.encode()) % 1_000_000 if quick else 0
    total, pids, said = Tally(), {os.getpid(): None}, clock
    with ProcessPoolExecutor(_PROCESSES, get_context("spawn")) as pool:
        control = pool.submit(_lose_one_on_purpose)
        pending: list[Future[Tally]] = []
        following = first
        while True:
            more = time.monotonic() - clock < _QUICK_SECONDS if quick else following < first + _SEEDS
            while more and len(pending) < 2 * _PROCESSES:
                pending.append(pool.submit(_chunk, following, _CHUNK))
                following += _CHUNK
                more = quick or following < first + _SEEDS
            if not pending:
                break
            wait(pending, return_when=FIRST_COMPLETED)
            for done in [future for future in pending if future.done()]:
                pending.remove(done)
                tally = done.result()
                total.add(tally)
                pids[tally.pid] = None
                said = _say(total, clock, said)
        lost, caught = control.result()
    if sys.stderr.isatty():
        print(file=sys.stderr)
    times = {"started": begun, "first_seed": first, "pids": list(pids), "nonce": nonce}
    return result(total, (lost, caught), time.monotonic() - clock, quick, times)


def result(
    total: Tally, control: tuple[int, list[str]], wall: float, quick: bool, detail: dict[str, Any]
) -> dict[str, Any]:
    """The figure. ``control``: what the run that loses one reported; ``wall``: seconds."""
    lost, caught = control
    enough = total.seeds >= _SEEDS or quick
    return frame(
        NAME,
        "simulated",
        value=total.unaccounted,
        unit="trajectories unaccounted for",
        reference="the ledger's invariant",
        reference_value=0,
        bar=f"0 in >= {_SEEDS:,} runs; no deadlock, no violation; the control is caught",
        holds=not total.unaccounted and not total.violating_seeds and bool(caught) and lost >= 1 and enough,
        detail={
            "seeds": total.seeds,
            "samples": total.seeds,
            "trajectories_started": total.started,
            "trajectories_trained": total.trained,
            "lives": total.lives,
            "deadlocks": total.deadlocks,
            "violating_seeds": total.violating_seeds,
            "violations": total.violations,
            "injected": _by(total.injected, 0),
            "injected_where": _by(total.injected, 1),
            "control_unaccounted": lost,
            "control_violations": caught,
            "virtual_hours": round(total.virtual_seconds / 3600, 2),
            "wall_seconds": round(wall, 1),
            "trajectories_per_wall_second": round(total.started / wall, 1),
            **detail,
        },
        quick=quick,
    )


def _chunk(first: int, count: int) -> Tally:
    tally = Tally(pid=os.getpid())
    for seed in range(first, first + count):
        result = simulate(config_of(seed), strict=False)
        tally.seeds += 1
        tally.started += result.ledger["started"]
        tally.trained += result.ledger["trained"]
        tally.unaccounted += result.unaccounted
        tally.deadlocks += result.deadlocks
        tally.lives += result.lives
        tally.virtual_seconds += result.summary["seconds"]
        tally.injected.update(result.injected)
        if result.violations:
            tally.violating_seeds += 1
            tally.violations.append(f"seed {seed}: {result.violations[0][:500]}")
    return tally


def _lose_one_on_purpose() -> tuple[int, list[str]]:
    result = run_that_loses_one(_CONTROL_SEED)
    return result.unaccounted, [line[:200] for line in result.violations[:3]]


def run_that_loses_one(seed: int) -> SimResult:
    """The control: a buffer that forgets the first trajectory that it gets."""
    honest = SampleBuffer.put
    lost: list[str] = []

    def forgetful(buffer: SampleBuffer, trajectory: Trajectory) -> bool:
        if lost:
            return honest(buffer, trajectory)
        lost.append(trajectory.id)
        buffer.lose(trajectory.group_id, trajectory.id, None)
        return False

    with patch.object(SampleBuffer, "put", forgetful):
        return simulate(config_of(seed, fault_rate=0.0), strict=False)


def _by(injected: Counter[str], part: int) -> dict[str, int]:
    """Injected faults by kind (0) or by place (1)."""
    counts: Counter[str] = Counter()
    for name, count in injected.items():
        counts[name.split(" ", 1)[part]] += count
    return dict(sorted(counts.items()))


def _say(total: Tally, clock: float, said: float) -> float:
    """The progress line, at once on a terminal and now and then elsewhere. Returns when it last spoke."""
    now, terminal = time.monotonic(), sys.stderr.isatty()
    if not terminal and now - said < _SAY_SECONDS:
        return said
    text = (
        f"{NAME}: {total.seeds} seeds, {total.started} trajectories, {total.unaccounted} unaccounted, "
        f"{total.violating_seeds} seeds with a violation, {now - clock:.0f} s"
    )
    print(f"\r{text}" if terminal else text, end="" if terminal else "\n", file=sys.stderr, flush=True)
    return now


def kept(folder: Path, minutes: float, seeds: int = _SEEDS) -> dict[str, Any]:
    """The chunks of ``folder``, and those that are missing until the time is up; then the figure of all of them."""
    begun, clock = now(), time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    total, wall = Tally(), 0.0
    for first in range(0, seeds, _KEPT):
        file = folder / f"seeds-{first:06d}.json"
        if not file.exists():
            if time.monotonic() - clock > 60 * minutes:
                break
            since = time.monotonic()
            found = vars(_chunk(first, min(_KEPT, seeds - first))) | {"wall": time.monotonic() - since}
            file.with_suffix(".partial").write_text(json.dumps(found), encoding="utf-8")
            file.with_suffix(".partial").rename(file)
        row = json.loads(file.read_text(encoding="utf-8"))
        wall += row.pop("wall")
        total.add(Tally(**row | {"injected": Counter(row["injected"])}))
        print(f"{total.seeds} seeds, {total.violating_seeds} with a violation", file=sys.stderr, flush=True)
    detail = {"started": begun, "first_seed": 0, "pids": [os.getpid()], "nonce": "", "in_parts": True}
    return result(total, _lose_one_on_purpose(), wall, False, detail)


def main(arguments: list[str]) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.micro.ledger_faults", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no chunk after this")
    options = parser.parse_args(arguments)
    print(json.dumps(kept(options.folder, options.minutes), indent=1, sort_keys=True))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
