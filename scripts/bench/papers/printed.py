"""Every absolute number of the papers that the simulator can say something about: predicted, printed, error.

``calibration`` marks rows that a constant was taken from: they prove nothing and do not count. The others were not used for
anything. Rows that do not fit stay, with what we know of why.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

from orchestrator.sim.cost_model import RooflineCosts, RooflineTraining
from orchestrator.sim.hardware import DEVICES, MODELS
from orchestrator.sim.paper_setups import load_scenario
from scripts.bench.papers.run_figures import measure

_GIB = 1 << 30
_TRANSFER = "the paper's path has a start of 4 s and reaches a small part of the link; ours counts 0.8 of the link"


def rows(simulate: bool) -> list[dict[str, Any]]:
    """The table. ``simulate``: with those that need a run (minutes)."""
    found = [*_sizes(), *_transfers(), *_engines(), *_profile()]
    return found + (_runs() if simulate else [])


def median_error(table: list[dict[str, Any]]) -> float:
    """Of the rows that no constant was taken from, by absolute value."""
    errors: list[float] = [abs(row["error"]) for row in table if not row["calibration"]]
    return statistics.median(errors)


def _row(
    what: str, predicted: float, printed: float, source: str, unit: str, note: str = "", calibration: bool = False
) -> dict[str, Any]:
    return {
        "what": what,
        "predicted": round(predicted, 4),
        "printed": printed,
        "error": round(predicted / printed - 1.0, 4),
        "unit": unit,
        "source": source,
        "note": note,
        "calibration": calibration,
    }


def _sizes() -> list[dict[str, Any]]:
    printed = {"Qwen3-8B": 15.26, "Qwen3-14B": 27.51, "Qwen3-32B": 61.02}
    return [
        _row(f"size of {name}", MODELS[name].weight_bytes / _GIB, size, "RollArt, table 3", "GiB")
        for name, size in printed.items()
    ]


def _transfers() -> list[dict[str, Any]]:
    tcp = {"Qwen3-8B": 6.911, "Qwen3-14B": 14.437, "Qwen3-32B": 29.649}
    rdma = {"Qwen3-8B": 5.466, "Qwen3-14B": 5.817, "Qwen3-32B": 9.442}
    found = []
    for name in tcp:
        size = MODELS[name].weight_bytes / 1e9
        found.append(
            _row(f"{name} over 200 Gbit/s Ethernet", size / 20.0, tcp[name], "RollArt, table 3", "s", _TRANSFER)
        )
        found.append(
            _row(f"{name} over 400 Gbit/s InfiniBand", size / 40.0, rdma[name], "RollArt, table 3", "s", _TRANSFER)
        )
    push = {"Qwen3-8B": 32.4, "Qwen3-14B": 67.8, "Qwen3-32B": 127.3}
    pull = {"Qwen3-8B": 6.2, "Qwen3-14B": 16.3, "Qwen3-32B": 29.7}
    exposed = {"Qwen3-8B": 1.4, "Qwen3-14B": 5.1, "Qwen3-32B": 9.6}
    config = load_scenario("rollart")
    device = DEVICES["H20"]
    for name, ranks in (("Qwen3-8B", 1), ("Qwen3-14B", 2), ("Qwen3-32B", 4)):
        model = MODELS[name]
        training = RooflineTraining(DEVICES["H800"], model, 32, 1, config.sim.push_gb_s)
        engine = RooflineCosts(device, model, ranks, config.sim.pull_gb_s)
        where = "RollArt, table 4"
        note = "one rate for all sizes"
        found.append(_row(f"push of {name}", training.publish_seconds, push[name], where, "s", note, True))
        found.append(_row(f"accumulated pull of {name}", engine.weights.fetch, pull[name], where, "s", note, True))
        late = "ours fetches all beside generation and stands still for the copy to the device only"
        found.append(_row(f"exposed pull of {name}", engine.weights.load, exposed[name], where, "s", late))
    return found


def _engines() -> list[dict[str, Any]]:
    """An engine that somebody else measured: InferSim's README, SGLang on H20, bf16, Qwen3-30B-A3B on four GPUs."""
    model, device = MODELS["Qwen3-30B-A3B"], DEVICES["H20"]
    source = "InferSim README (SGLang on H20, Qwen3-30B-A3B, bf16)"
    whole = RooflineCosts(device, model, 4)
    prompts, length = 4, 4096
    seconds = whole.prefill(prompts * length, prompts * length * length / 2, 1) / (prompts * length)
    found = [_row("prefill, tokens/s of a GPU", 1 / seconds / 4, 16594, source, "tokens/s")]
    fixed, growing = whole.decode(400)
    step = fixed + growing * 400 * (4096 + 1024)
    note = "attention there is data-parallel, experts over four GPUs; ours splits everything"
    found.append(_row("decode at 100 sequences a GPU, tokens/s of a GPU", 100 / step, 2749, source, "tokens/s", note))
    return found


def _profile() -> list[dict[str, Any]]:
    """RollPacker 4.1, its offline profile on H800."""
    costs = RooflineCosts(DEVICES["H800"], MODELS["Qwen2.5-7B"])
    steps = [
        sum(part * (1, running * 4096)[place] for place, part in enumerate(costs.decode(running)))
        for running in (32, 64)
    ]
    found = [
        _row(
            "time between tokens at batch 64 over batch 32, Qwen2.5-7B, 4k contexts",
            steps[1] / steps[0],
            1.23,
            "RollPacker 4.1",
            "ratio",
            "the paper does not say model and lengths",
        )
    ]
    longest = costs.prefill(8192, 8192 * 8192 / 2, 1)
    note = "printed as an upper bound, of a maximum length that is not named: 8k taken"
    found.append(_row("prefill of the longest sequence, Qwen2.5-7B", longest, 0.1, "RollPacker 4.1", "s", note))
    return found


def _runs() -> list[dict[str, Any]]:
    """Numbers of whole steps."""
    found = []
    config = load_scenario("rollart-swe", ["run.steps=4"], 2)
    swe = measure(config)
    source = "RollArt 3.1, figure 3"
    assumed = "tokens a turn and environment times are assumed"
    found.append(_row("step of Qwen3-8B on SWE-bench", swe.step_seconds, 366.0, source, "s", assumed))
    found.append(_row("training in it", swe.train_seconds, 0.23 * 366, source, "s", "its time a token", True))
    rest = swe.step_seconds - swe.train_seconds
    found.append(_row("generation and environments in it", rest, 0.69 * 366, source, "s", assumed))
    for model, h800, h20, printed in (
        ("Qwen3-32B", 2, 6, 741.2),
        ("Qwen3-32B", 4, 4, 734.9),
        ("Qwen3-30B-A3B", 2, 6, 327.4),
        ("Qwen3-30B-A3B", 4, 4, 305.2),
    ):
        fleet = f"sim.fleet={{H800={h800}, H20={h20}}}"
        given = ["run.steps=3", f"sim.model={model}", "sim.tensor_parallel=4", "rollout.workers=8", fleet]
        one = measure(load_scenario("rollart-swe", given, 2))
        what = f"rollout of {model} on SWE-bench, collocated on {4 * h800} H800 and {4 * h20} H20"
        found.append(_row(what, one.step_seconds - one.train_seconds, printed, "RollArt 7.4, table 5", "s", assumed))
    base = measure(load_scenario("rollpacker", ["run.steps=4"], 2))
    rollout, reward = _shares(base)
    period, source = base.step_seconds, "RollPacker 2.2, table 1 (mean of three tasks)"
    found.append(
        _row("training, share of a veRL step of Qwen2.5-14B", base.train_seconds / period, 0.22, source, "share")
    )
    found.append(_row("rollout, share", rollout / period, 0.697, source, "share"))
    note = "three tasks in one batch, so that the slowest scorer counts in every step; scores at a time: by table 1"
    found.append(_row("reward, share", reward / period, 0.083, source, "share", note, True))
    return found


def _shares(found: Any) -> tuple[float, float]:
    """Seconds of rollout and of rewards of the last step's batch, from when its trajectories changed state."""
    journal = [json.loads(line) for line in found.result.journal.splitlines()]
    trained = [line["id"] for line in journal if line["state"] == "trained" and line["step"] == 3]
    of: dict[str, dict[str, float]] = {}
    for line in journal:
        of.setdefault(line["id"], {}).setdefault(line["state"], line["t"])
    begun = min(of[name]["running"] for name in trained)
    scoring = max(of[name]["scoring"] for name in trained)
    scored = max(of[name]["buffered"] for name in trained)
    return scoring - begun, scored - scoring
