#!/usr/bin/env python3
"""Draws docs/images/step.svg, what happens to a training step, from docs/results/step.json; both are simulated.

python scripts/draw_step.py               # is the figure what the file says? exit code 1: no
python scripts/draw_step.py --write
python scripts/draw_step.py --simulate    # makes the file anew, in virtual time; a minute; then --write

The first way is `sync_plus`, the fastest that trains on policy: `sync`, which waits for environments and rewards too, is slower
still and nobody's choice. The figure shows the first of five seeds.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA, FIGURE = ROOT / "docs" / "results" / "step.json", ROOT / "docs" / "images" / "step.svg"
WAYS = {
    "batch by batch (sync_plus)": ["run.mode=sync_plus", "rollout.alpha=0"],
    "each trajectory on its own (async, alpha 1)": ["run.mode=async", "rollout.alpha=1"],
}
SETTINGS = [
    "sim.fault_rate=0",
    "run.steps=8",
    "rollout.workers=1",
    "rollout.environments=64",
    "rollout.groups_per_step=8",
    "rollout.group_size=8",
    "evaluation.prompts=2",
    "sim.environment_seconds_mean=0.5",
    "sim.environment_seconds_sigma=0.83",  # a standard deviation of the mean: the real `trajectory-vs-batch` at 1
]
SEEDS = range(5)
FIRST, SECONDS, BIN = 2, 60.0, 0.25  # the step at whose batch the figure begins; seconds shown; seconds a point


def simulated() -> dict[str, Any]:
    """Both ways: seconds a step, requests in the engine over time, training steps and updates."""
    from orchestrator.api import Completion, GenerationRequest
    from orchestrator.config import load_config
    from orchestrator.sim.simulated_run import simulate

    sys.path.insert(0, str(ROOT))
    from scripts.bench.result import source

    found: dict[str, Any] = {
        "kind": "simulated",
        "source": source(),
        "seeds": list(SEEDS),
        "settings": SETTINGS,
        "bin_seconds": BIN,
        "ways": {},
    }
    for name, mode in WAYS.items():
        spans: list[tuple[float, float]] = []

        def note(_: GenerationRequest, done: Completion, spans: list[tuple[float, float]] = spans) -> None:
            now = asyncio.get_running_loop().time()
            spans.append((now - done.timing.running, now))

        result = simulate(load_config(None, [*SETTINGS, *mode]), watch=note)
        events = [json.loads(line) for line in result.events.decode().splitlines()]
        stages = [event for event in events if event["kind"] == "stage"]
        begin = next(e["start"] for e in stages if e["stage"] == "get_batch" and e["step"] == FIRST)
        bins = [0.0] * round(SECONDS / BIN)
        for start, end in spans:  # which overlap each bin, by the share of it
            for place in range(max(0, int((start - begin) / BIN)), min(len(bins), int((end - begin) / BIN) + 1)):
                low = begin + place * BIN
                bins[place] += max(0.0, min(end, low + BIN) - max(start, low)) / BIN
        shown = [e for e in stages if begin <= e["start"] < begin + SECONDS]
        found["ways"][name] = {
            "seconds_per_step": result.summary["seconds_per_step"],
            "by_seed": [
                simulate(load_config(None, [*SETTINGS, *mode, f"run.seed={seed}"])).summary["seconds_per_step"]
                for seed in SEEDS
            ],
            "in_engine": [round(value, 1) for value in bins],
            "training": _spans(shown, "train_step", begin),
            "updates": _spans(shown, "update", begin),
        }
    return found


def _spans(stages: list[dict[str, Any]], name: str, begin: float) -> list[list[float]]:
    return [[round(e["start"] - begin, 2), round(e["end"] - begin, 2)] for e in stages if e["stage"] == name]


def drawn(data: dict[str, Any]) -> str:
    """The figure."""
    spec = importlib.util.spec_from_file_location("draw_concepts", Path(__file__).with_name("draw_concepts.py"))
    assert spec is not None
    assert spec.loader is not None
    tools = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tools)
    d = tools.Drawing(
        "What becomes of a training step: the same 64 agents batch by batch, and each on its own", 860, 396
    )
    left, right, high = 120.0, 840.0, 64.0
    scale, most = (right - left) / SECONDS, 64
    for panel, (name, way) in enumerate(data["ways"].items()):
        top = 20 + panel * 172
        d.text(20, top + 12, name, "ink bold")
        d.text(840, top + 12, f"a step every {way['seconds_per_step']:.1f} s", "ink bold", "end")
        d.text(20, top + 62, "engine:", "ink small")
        d.text(20, top + 78, "requests", "soft small")
        floor = top + 28 + high
        points = [(left, floor)]
        for place, value in enumerate(way["in_engine"]):
            x = left + place * data["bin_seconds"] * scale
            points += [(x, floor - high * value / most), (x + data["bin_seconds"] * scale, floor - high * value / most)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*points, (right, floor)])
        d.parts.append(f'<polygon class="strong" points="{path}"/>')
        d.line(left, floor, right, floor)
        d.text(20, floor + 28, "trainer", "ink small")
        for start, end in way["training"]:
            width = (min(end, SECONDS) - start) * scale
            d.parts.append(
                f'<rect class="warm" x="{left + start * scale:.1f}" y="{floor + 14}" width="{width:.1f}" height="20" rx="2"/>'
            )
        d.line(left, floor + 34, right, floor + 34)
        for start, _ in way["updates"]:
            d.line(left + start * scale, top + 22, left + start * scale, floor + 34, True)
    axis = 20 + 172 + 28 + high + 52
    for second in range(0, int(SECONDS) + 1, 10):
        d.text(left + second * scale, axis, f"{second} s", "soft small", "end" if second == SECONDS else "middle")
    d.text(20, 362, "dashed: new weights in the engine, requests go on", "soft small")
    d.text(
        20, 382, "Simulated, virtual time: tools take 0.5 s in the mean with as much spread (assumed).", "soft small"
    )
    colours = ".strong{fill:#3b82d9}.warm{fill:#d97c1a}\n"
    return d.svg().replace("</style>", colours + "</style>")


def main() -> int:
    """Entry point."""
    if "--simulate" in sys.argv[1:]:
        DATA.write_text(json.dumps(simulated()) + "\n", encoding="utf-8")
        return 0
    text = drawn(json.loads(DATA.read_text(encoding="utf-8")))
    if "--write" in sys.argv[1:]:
        FIGURE.write_text(text, encoding="utf-8")
    elif not FIGURE.is_file() or FIGURE.read_text(encoding="utf-8") != text:
        print(f"{FIGURE.name} is not what is drawn here: scripts/draw_step.py --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
