"""Predicted over measured step time of the simulator's cost model, real vLLM engine on this machine, sizes not fitted.

``scripts.bench.probes.vllm.steptime_probe`` measures steps of a small random Qwen3 over batch sizes and lengths,
interleaved. The model's eight constants are fitted to some sizes; the value is the largest error on sizes that were
held back and lie between those (each a median over rounds: one figure for a prefill, one for the decode steps after
it). The detail also has whole rollouts with queueing, predicted by the simulator's own batch, and the table of the
papers' absolute numbers (``scripts/bench/papers/printed.py``).
"""

from __future__ import annotations

import json
import random
import statistics
from typing import Any

from scripts.bench.papers import printed
from scripts.bench.papers.calibrate import COSTS, FittedCosts, Step, errors, fit, left_out, rollout_seconds
from scripts.bench.probes.probe_run import run_probe
from scripts.bench.result import frame, now

NAME = "sim-error"
_BAR = 0.05
_FITTED = [(sequences, prompt) for prompt in (32, 256) for sequences in (1, 4, 16, 64)]
_FITTED += [
    (1, 512),
    (4, 512),
    (16, 512),
    (2, 32),
    (4, 128),
    (12, 128),
    (32, 128),
    (64, 128),
    (8, 64),
    (48, 64),
    (32, 256),
]
_HELD = [(2, 128), (8, 192), (12, 384), (24, 64), (32, 96), (48, 224)]
_HELD += [(3, 320), (6, 48), (20, 160), (40, 112), (56, 80)]
_QUICK = ([(1, 32), (16, 32), (64, 32), (4, 256), (16, 256)], [(8, 96), (32, 64)])
_SLOTS = 64  # of the probe's engine
_ROLLOUT_REQUESTS = 96


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure. Raises RunError when the probe fails."""
    begun = now()
    fitted, held = _QUICK if quick else (_FITTED, _HELD)
    requests = _requests()
    work: dict[str, Any] = {
        "cells": [*fitted, *held],
        "rollouts": [] if quick else [requests],
        "rounds": 40,
        "seconds": 12 if quick else 420,
    }
    probe = run_probe("steptime", ["--work", json.dumps(work)])
    steps = _cells(probe["steps"])
    costs = fit([step for (sequences, prompt), step in steps if (sequences, prompt) in fitted])
    table = [_row(size, step, costs) for size, step in steps]
    missed = [row for row in table if (row["sequences"], row["prompt"]) in held]
    value = max(abs(row["error"]) for row in missed)
    papers = printed.rows(simulate=not quick)
    return frame(
        NAME,
        "real",
        value=value,
        unit="largest |predicted / measured - 1| of held-back sizes",
        reference="published simulators",
        reference_value=_BAR,
        bar=f"<= {_BAR}",
        holds=value <= _BAR,
        detail={
            "constants": dict(zip(COSTS, costs.costs, strict=True)) | {"cached": costs.cached},
            "held_back_mean": statistics.mean(abs(row["error"]) for row in missed),
            "held_back_decode_max": max(abs(row["error"]) for row in missed if not row["prefill"]),
            "fitted_sizes_left_out_one_by_one": _left_out(steps, fitted),
            "fitted_max": max(abs(row["error"]) for row in table if row not in missed),
            "sizes": table,
            "rollouts": [
                {"measured": seconds, "predicted": predicted, "error": predicted / seconds - 1.0}
                for seconds in probe["rollouts"]
                for predicted in [rollout_seconds(costs, requests, _SLOTS)]
            ],
            "machine_speed": probe["speeds"],
            "spread_of_prefills": dict(zip(map(str, work["cells"]), probe["spread"], strict=True)),
            "papers": {"median_error": printed.median_error(papers), "rows": papers},
            "samples": probe["rounds"],
        },
        quick=quick,
        nonce=nonce,
        begun=begun,
        pids=[int(probe["pid"])],
    )


def _left_out(steps: list[tuple[tuple[int, int], Step]], fitted: list[tuple[int, int]]) -> dict[str, float]:
    found = [abs(error) for error in left_out([[step for at, step in steps if at == size] for size in fitted])]
    return {"median": statistics.median(found), "max": max(found)}


def _requests() -> list[tuple[int, int]]:
    """A held-back rollout: more requests than slots, long-tailed responses."""
    rng = random.Random(7)
    return [
        (rng.randint(16, 200), max(4, min(120, int(rng.lognormvariate(3.2, 0.8))))) for _ in range(_ROLLOUT_REQUESTS)
    ]


def _cells(rows: list[dict[str, Any]]) -> list[tuple[tuple[int, int], Step]]:
    """One step for each cell's prefill, and one for the decode steps that the probe lists after it."""
    found: list[tuple[tuple[int, int], Step]] = []
    starts = [place for place, row in enumerate(rows) if row["prefill"]]
    for begin, end in zip(starts, [*starts[1:], len(rows)], strict=True):
        row, decode = rows[begin], rows[begin + 1 : end]
        size = (int(row["sequences"]), int(row["prefill"]))
        found.append((size, Step(size[0], row["context"], row["prefill"], row["seconds"])))
        seconds = statistics.mean(other["seconds"] for other in decode)
        context = statistics.mean(other["context"] for other in decode)
        found.append((size, Step(size[0], context, 0, seconds)))
    return found


def _row(size: tuple[int, int], step: Step, costs: FittedCosts) -> dict[str, Any]:
    return {
        "sequences": size[0],
        "prompt": size[1],
        "prefill": bool(step.prefill),
        "measured_ms": step.seconds * 1e3,
        "predicted_ms": costs.seconds(step) * 1e3,
        "error": errors(costs, [step])[0],
    }
