"""Rollouts beside a serving engine: what they get, and what its users notice, with each kind of admission (ROSE 6.2).

``python -m scripts.bench.probes.vllm.coserve_probe --trace FILE`` starts two engines of different models and KV layouts
in one pool of host memory, both pinned to the same processor core, at the same priority: they compete for it as for a
GPU that switches between processes, and nothing but admission protects serving. The parent runs elsewhere where there
is another core.

``FILE`` is a JSON array of [milliseconds, prompt tokens, answer tokens]. Its arrivals are squeezed until serving alone
is busy for ``--busy`` of the time, its lengths divided (``LENGTHS``), with one second in twelve of four times the
mean rate. The same arrivals are replayed alone and with rollouts under each mode, in turn, ``--rounds`` times, or as
often as ``--requests`` of a mode need; SLOs are
1.5 x the P99 of a replay alone that precedes them, which with ``--rounds 1`` is what they are compared with too;
admission is given ``KEPT`` of them. Modes
are ROSE's ladder (table 2, figure 9): "static": each engine has its half of the pool, steps run as they come, no prefix
is kept; "preempt": with pages that move to serving; "none": and with prefixes kept; then with admission by "ttft",
"tpot", "dual". Rollouts: ``SEQUENCES`` multi-turn trajectories at a time. Prints one JSON object on the last line.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.bench.probes.vllm.coserve_engine import Driven
from vllm_rlplugin.kvpool.engine.pool_engine import pool_path
from vllm_rlplugin.kvpool.pages import page_keeper
from vllm_rlplugin.kvpool.pages.cuda_driver import LIBRARY

LENGTHS = (8, 640, 1, 24)  # prompts divided by, at most; answers divided by, at most
SEQUENCES = 8
TRAJECTORY = {"prompt": 100, "answer": 60, "turns": 4, "sequences": SEQUENCES}
MODES: dict[str, tuple[str, float, bool]] = {  # ROSE, table 2 and figure 9: admission, rollouts' own part, prefix cache
    "static": ("none", 0.5, False),
    "preempt": ("none", 0.0, False),
    "none": ("none", 0.0, True),
    "ttft": ("ttft", 0.0, True),
    "tpot": ("tpot", 0.0, True),
    "dual": ("dual", 0.0, True),
}
PAGE_KIB = 128
POOL_MIB = 24  # so small that a burst wants more than half of it
FACTOR = 1.5  # of P99 alone: later is late
KEPT = 0.9  # of that is the SLO that admission is given: P99 of a few hundred requests is not known better
WINDOW = 3.0  # seconds over which serving's peak counts where budgets open
SPACING = 0.2  # seconds between requests that are timed one by one; each takes about half as long
BURST, BURSTS_EVERY = 4.0, 12.0  # times the mean rate, for a second; seconds
_SHAPES: dict[str, dict[str, int]] = {
    "serving": {"num_hidden_layers": 4, "num_key_value_heads": 2},
    "rollout": {"num_hidden_layers": 3, "num_key_value_heads": 4},
}


def write_model(folder: Path, role: str) -> str:
    """The config of an fp32 Qwen3, whose weights the engine makes up (``load_format`` "dummy"): what a step costs does not hang
    on them. Returns the folder."""
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "head_dim": 64}
    kind: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "dtype": "float32",
    }
    rest = {"max_position_embeddings": 1088, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False}
    (folder / role).mkdir()
    text = json.dumps(kind | sizes | _SHAPES[role] | rest)
    (folder / role / "config.json").write_text(text, encoding="utf-8")
    return str(folder / role)


def scaled(trace: list[list[int]], seconds: float, rate: float) -> list[list[float]]:
    """So many seconds of the trace at ``rate`` requests a second, with a burst in the middle of each part of ``BURSTS_EVERY``
    seconds, or of the whole where it is shorter."""
    count = max(4, round(seconds * rate))
    rows = trace[:count]
    first, last = rows[0][0], rows[-1][0]
    squeeze = seconds / max(1, last - first)
    found = [[(row[0] - first) * squeeze, *_lengths(row)] for row in rows]
    bursts, more = max(1, round(seconds / BURSTS_EVERY)), round((BURST - 1) * rate)
    for number in range(bursts):
        extra = trace[count + number * more :][:more]
        begins = (number + 0.5) * seconds / bursts
        found += [[begins + index / len(extra), *_lengths(row)] for index, row in enumerate(extra)]
    return sorted(found)


def _lengths(row: list[int]) -> list[int]:
    return [min(LENGTHS[1], max(16, row[1] // LENGTHS[0])), min(LENGTHS[3], max(2, row[2] // LENGTHS[2]))]


def percentile(values: list[float], share: float) -> float:
    """By nearest rank."""
    found = sorted(values)
    return found[min(len(found) - 1, int(share * len(found)))]


class Pair:
    """The two engines."""

    def __init__(
        self,
        folder: Path,
        name: str,
        core: int,
        page_kib: int = PAGE_KIB,
        pool_mib: int = POOL_MIB,
        library: str = LIBRARY,
    ) -> None:
        shared: dict[str, Any] = {
            "kv_pool": name,
            "kv_pool_page_kib": page_kib,
            "kv_pool_keep": 1.0,
            "kv_pool_mib": pool_mib,
        }
        if library != LIBRARY:
            shared["fake_driver"] = library
        common: dict[str, Any] = {"max_num_seqs": 16, "max_model_len": 1088, "block_size": 32}
        common |= {"kv_cache_memory_bytes": 256 << 20}
        common |= {"num_gpu_blocks_override": 512, "cpu": core, "load_format": "dummy"}
        roles: dict[str, dict[str, Any]] = {
            "serving": {"kv_pool_role": "serving", "kv_pool_lent": 1.0, "kv_pool_window": WINDOW},
            "rollout": {"kv_pool_budget_mib": pool_mib // 4},
        }
        models = {role: write_model(folder, role) for role in roles}
        made = {
            role: Driven({**common, "model": models[role], "plugin": {**shared, **plugin}})
            for role, plugin in roles.items()
        }
        self.serving, self.rollout = made["serving"], made["rollout"]
        for engine in made.values():
            engine.answer()

    def close(self) -> None:
        """End both."""
        self.serving.close()
        self.rollout.close()

    def replay(self, arrivals: list[list[float]], mode: str, slo: tuple[float, float]) -> dict[str, Any]:
        """Once, under one of ``MODES``; "alone": without rollouts."""
        admission, partition, cached = MODES.get(mode, ("none", 0.0, True))
        self.serving.do("tune", ttft=KEPT * slo[0], tpot=KEPT * slo[1], mode=admission, partition=partition)
        if mode == "alone":
            return self.judged(self.serving.do("replay", arrivals=arrivals), slo)
        opened = self.serving.do("look", opened=True)
        before = self.rollout.do("look")
        self.rollout.tell("roll", seconds=arrivals[-1][0] + 0.5, cached=cached, **TRAJECTORY)
        served = self.judged(self.serving.do("replay", arrivals=arrivals), slo)
        rolled, after = self.rollout.answer(), self.rollout.do("look")
        said = self.serving.do("look")
        names = ("steps", "refused", "stalls", "returned", "misses", "busy")
        served |= {f"rollout_{key}": after[key] - before[key] for key in names}
        served |= {key: said[key] for key in ("blamed_first", "blamed_next")}
        served |= {key: said[key] - opened[key] for key in ("cuts", "kills")}
        return {**served, "rollout_tokens": rolled["tokens"], "rollout_seconds": rolled["seconds"]}

    @staticmethod
    def judged(found: dict[str, Any], slo: tuple[float, float]) -> dict[str, Any]:
        """With ``late``: requests beyond one of the SLOs."""
        late = sum(ttft > slo[0] or tpot > slo[1] for ttft, tpot in zip(found["ttft"], found["tpot"], strict=True))
        return {**found, "late": late}


def summary(rows: list[Mapping[str, Any]], idle: float) -> dict[str, Any]:
    """Of one mode's replays; ``idle``: rollout tokens a second that the time serving leaves would allow."""
    ttft = [value for row in rows for value in row["ttft"]]
    tpot = [value for row in rows for value in row["tpot"]]
    found: dict[str, Any] = {
        "requests": len(ttft),
        "late": sum(row["late"] for row in rows),
        **{f"ttft_p{at}": percentile(ttft, at / 100) for at in (50, 99)},
        **{f"tpot_p{at}": percentile(tpot, at / 100) for at in (50, 99)},
        "busy": sum(row["busy"] for row in rows) / len(rows),
        "pages": max(row["pages"] for row in rows),
    }
    if "rollout_tokens" in rows[0]:
        speed = sum(row["rollout_tokens"] for row in rows) / sum(row["rollout_seconds"] for row in rows)
        found |= {"rollout_tokens_per_s": speed, "over_idle_share": speed / idle if idle > 0 else None}
        sums = ("rollout_steps", "rollout_refused", "rollout_returned", "rollout_misses", "blamed_first", "blamed_next")
        found |= {key: sum(row[key] for row in rows) for key in (*sums, "cuts", "kills")}
    return found


def measure(pair: Pair, trace: list[list[int]], options: argparse.Namespace) -> dict[str, Any]:
    """See the module."""
    lax = (60.0, 60.0)
    sample = [[SPACING * index, *_lengths(row)] for index, row in enumerate(trace[:12])]
    pair.replay(sample[:4], "alone", lax)  # what an engine does once
    solo = pair.replay(sample, "alone", lax)
    rate = options.busy / (solo["busy"] * solo["seconds"] / len(sample))
    arrivals = scaled(trace, options.seconds, rate)
    begun = pair.replay(arrivals, "alone", lax)
    slo = (FACTOR * percentile(begun["ttft"], 0.99), FACTOR * percentile(begun["tpot"], 0.99))
    pair.serving.do("tune", ttft=slo[0], tpot=slo[1], mode="none")
    pair.serving.do("look", opened=True)
    rolled = pair.rollout.do("roll", seconds=options.seconds / 2, **TRAJECTORY)
    alone = rolled["tokens"] / rolled["seconds"]
    rows: dict[str, list[Mapping[str, Any]]] = {}
    modes = ["alone", *options.modes.split(",")]
    rounds = max(options.rounds, math.ceil(options.requests / len(arrivals)))
    if rounds == 1:  # it was played just now
        rows["alone"] = [pair.judged(begun, slo)]
        modes.remove("alone")
    for number in range(rounds):
        for mode in modes[number % len(modes) :] + modes[: number % len(modes)]:
            time.sleep(WINDOW + 1.0)  # else budgets open by the peak of the replay before
            rows.setdefault(mode, []).append(pair.replay(arrivals, mode, slo))
    idle = alone * (1 - sum(row["busy"] for row in rows["alone"]) / len(rows["alone"]))
    return {
        "modes": {mode: summary(found, idle) for mode, found in rows.items()},
        "slo": {"ttft": slo[0], "tpot": slo[1]},
        "rate": rate,
        "pool_pages": options.pool_mib * 1024 // options.page_kib,
        "arrivals": len(arrivals),
        "rollout_alone_tokens_per_s": alone,
        "idle_share_tokens_per_s": idle,
    }


def main() -> int:
    """Exit code 0: measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", required=True)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=0)
    parser.add_argument("--busy", type=float, default=0.3)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--page-kib", type=int, default=PAGE_KIB)
    parser.add_argument("--pool-mib", type=int, default=POOL_MIB)
    parser.add_argument("--library", default=LIBRARY, help="another driver than NVIDIA's: a stand-in of tests/support")
    options = parser.parse_args()
    trace = json.loads(Path(options.trace).read_text(encoding="utf-8"))
    name = f"probe-{os.getpid()}"
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, set(cores[1:]))
    with tempfile.TemporaryDirectory() as folder:
        try:
            pair = Pair(Path(folder), name, cores[0], options.page_kib, options.pool_mib, options.library)
            try:
                found = measure(pair, trace, options)
            finally:
                pair.close()
        finally:
            for file in (pool_path(name), page_keeper.socket_path(pool_path(name))):
                file.unlink(missing_ok=True)
    print(json.dumps({**found, "pid": os.getpid()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
