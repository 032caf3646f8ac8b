"""Seconds until a turn's first token on another worker: its prefix's KV moved there, over computing it anew (Heddle 5.3).

Two real engines, a process each, loopback TCP: ``scripts.bench.probes.vllm.kv_probe``. The value is the ratio at the
longest prefix, the detail has all lengths and the break-even, as the run's own policy
(:class:`orchestrator.policies.placement.kv_transfer_cost.BreakEven`) derives it from these figures; and some lengths
over Mooncake's transfer engine, TCP too. Every move is compared bit for bit with the engine that the trajectory came
from. ``--quick``: 256 and 1,024 tokens. ``--model FOLDER``: a real model (a Hugging Face folder), over TCP only; to its
last position in about 10 minutes for one of 135 million parameters.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from orchestrator.api import ConfigError
from orchestrator.policies.placement.kv_transfer_cost import BreakEven
from scripts.bench.probes.probe_run import run_probe
from scripts.bench.result import frame, now

NAME = "kv-migrate"
_QUICK = [("256,1024", 1, "tcp"), ("256,1024", 1, "mooncake")]
_FULL = [  # (lengths, rounds, carrier), each in processes of its own
    ("256,512,1024,2048,4096", 3, "tcp"),
    ("256,8192", 1, "tcp"),
    ("256,1024,4096", 3, "mooncake"),
]
_REAL = [("256,1024", 3, "tcp"), ("256,4096", 1, "tcp")]  # and its longest
TAKES_MODEL = True


def longest(folder: Path) -> int:
    """Tokens of the longest context that a model takes with a turn behind it. Raises ConfigError."""
    try:
        return int(json.loads((folder / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"]) - 64
    except (OSError, ValueError, KeyError) as error:
        fix = f"no Hugging Face folder ({error}): give one with config.json and weights"
        raise ConfigError("bench --model", str(folder), fix) from error


def run(quick: bool, nonce: str, model: str = "") -> dict[str, Any]:
    """Measure. Raises RunError when a probe fails, as it does for a move that changed anything."""
    begun = now()
    parts = _QUICK if quick else _FULL
    if model:
        parts = _QUICK[:1] if quick else [*_REAL, (f"256,{longest(Path(model))}", 1, "tcp")]
    more = ["--model", str(Path(model).resolve())] if model else []
    probes = [
        run_probe("kv", ["--lengths", lengths, "--rounds", str(rounds), "--carrier", carrier, *more])
        for lengths, rounds, carrier in parts
    ]
    plain = [probe for probe, (_, _, carrier) in zip(probes, parts, strict=True) if carrier == "tcp"]
    found = {row["tokens"]: row for probe in reversed(plain) for row in probe["rows"]}
    rows = [found[tokens] for tokens in sorted(found)]
    mooncake = [] if model else probes[-1]["rows"]
    policy = BreakEven()
    for row in rows:
        policy.record_turn(True, row["tokens"], row["move"])
        policy.record_turn(False, row["tokens"], row["recompute"])
    last, crossing = rows[-1], break_even_tokens(policy)
    value = last["move"] / last["recompute"]
    return frame(
        NAME,
        "real",
        value=value,
        unit=f"seconds to the first token with {last['tokens']} tokens moved, over computing them",
        reference="recomputation",
        reference_value=1.0,
        bar="< 1 at the longest prefix, every move bit for bit",
        holds=value < 1.0,
        detail={
            "model": probes[0]["model"],
            "rows": rows,
            "break_even_tokens": crossing if math.isfinite(crossing) else None,
            "shortest_that_paid": next((row["tokens"] for row in rows if row["move"] < row["recompute"]), None),
            "megabytes_per_s": [row["bytes"] / row["transfer"] / 1e6 for row in rows],
            "mooncake": mooncake,
            "mooncake_megabytes_per_s": [row["bytes"] / row["transfer"] / 1e6 for row in mooncake],
        },
        quick=quick,
        nonce=nonce,
        begun=begun,
        pids=[*(int(probe["pid"]) for probe in probes)],
    )


def break_even_tokens(policy: BreakEven) -> float:
    """From so many tokens on a move is expected to pay; 0: always, infinite: never."""
    (move_fixed, fixed), (move_one, one) = policy.expected(0), policy.expected(1)
    move_each, each = move_one - move_fixed, one - fixed
    if each <= move_each:
        return 0.0 if move_fixed < fixed else math.inf
    return max(0.0, (move_fixed - fixed) / (each - move_each))
