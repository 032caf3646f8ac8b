"""Every absolute number of the papers that the simulator can say something about: predicted, printed, error.

``calibration`` marks rows that a constant was taken from (:mod:`scripts.bench.papers.calibration`): they prove nothing and do not
count. The others were not used for anything. Rows that do not fit stay, with what we know of why.
"""

from __future__ import annotations

import statistics
from typing import Any

from orchestrator.sim.cost_model import RooflineCosts, RooflineTraining
from orchestrator.sim.hardware import DEVICES, MODELS
from orchestrator.sim.paper_setups import load_scenario
from scripts.bench.papers.calibration import assumed_for, calibrated_by
from scripts.bench.papers.run_figures import measure
from scripts.bench.papers.runner import Run

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


def _row(what: str, predicted: float, printed: float, source: str, unit: str, note: str = "") -> dict[str, Any]:
    assumed = assumed_for("sim-error", what)
    return {
        "what": what,
        "predicted": round(predicted, 4),
        "printed": printed,
        "error": round(predicted / printed - 1.0, 4),
        "unit": unit,
        "source": source,
        "note": note,
        "calibration": bool(calibrated_by("sim-error", what)),
        **({"assumed": assumed} if assumed else {}),
    }


def _sizes() -> list[dict[str, Any]]:
    printed = {"Qwen3-8B": 15.26, "Qwen3-14B": 27.51, "Qwen3-32B": 61.02}
    return [
        _row(f"size of {name}", MODELS[name].weight_bytes / _GIB, size, "RollArt, table 3", "GiB")
        for name, size in printed.items()
    ]


_TRANSFERS = {  # RollArt, table 3: seconds over Ethernet, InfiniBand; table 4: ranks, push, accumulated pull, exposed pull
    "Qwen3-8B": ((6.911, 5.466), 1, (32.4, 6.2, 1.4)),
    "Qwen3-14B": ((14.437, 5.817), 2, (67.8, 16.3, 5.1)),
    "Qwen3-32B": ((29.649, 9.442), 4, (127.3, 29.7, 9.6)),
}


def _transfers() -> list[dict[str, Any]]:
    found, exposed = list[dict[str, Any]](), list[dict[str, Any]]()
    sim, where, note = load_scenario("rollart").sim, "RollArt, table 4", "one rate for all sizes"
    late = "ours fetches all beside generation and stands still for the copy to the device only"
    for name, ((tcp, rdma), ranks, (push, pull, seen)) in _TRANSFERS.items():
        model = MODELS[name]
        for seconds, rate, link in ((tcp, 20.0, "200 Gbit/s Ethernet"), (rdma, 40.0, "400 Gbit/s InfiniBand")):
            ours = model.weight_bytes / 1e9 / rate
            found.append(_row(f"{name} over {link}", ours, seconds, "RollArt, table 3", "s", _TRANSFER))
        training = RooflineTraining(DEVICES["H800"], model, 32, 1, sim.push_gb_s)
        engine = RooflineCosts(DEVICES["H20"], model, ranks, sim.pull_gb_s)
        exposed.append(_row(f"push of {name}", training.publish_seconds, push, where, "s", note))
        exposed.append(_row(f"accumulated pull of {name}", engine.weights.fetch, pull, where, "s", note))
        exposed.append(_row(f"exposed pull of {name}", engine.weights.load, seen, where, "s", late))
    return found + exposed


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
    costs, source = RooflineCosts(DEVICES["H800"], MODELS["Qwen2.5-7B"]), "RollPacker 4.1"
    half, whole = (
        fixed + growing * running * 4096 for running in (32, 64) for fixed, growing in [costs.decode(running)]
    )
    what, note = (
        "time between tokens at batch 64 over batch 32, Qwen2.5-7B, 4k contexts",
        "the paper does not say model and lengths",
    )
    found = [_row(what, whole / half, 1.23, source, "ratio", note)]
    longest = costs.prefill(8192, 8192 * 8192 / 2, 1)
    note = "printed as an upper bound, of a maximum length that is not named: 8k taken"
    return [*found, _row("prefill of the longest sequence, Qwen2.5-7B", longest, 0.1, source, "s", note)]


def _runs() -> list[dict[str, Any]]:
    """Numbers of whole steps."""
    swe = measure(load_scenario("rollart-swe", ["run.steps=4"], 2))
    source, assumed = "RollArt 3.1, figure 3", "environment times and shares of lengths are assumed"
    rest = swe.step_seconds - swe.train_seconds
    found = [
        _row("step of Qwen3-8B on SWE-bench", swe.step_seconds, 366.0, source, "s", assumed),
        _row("training in it", swe.train_seconds, 0.23 * 366, source, "s", "its time a token"),
        _row("generation and environments in it", rest, 0.69 * 366, source, "s", assumed),
    ]
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
    base = Run(load_scenario("rollpacker", ["run.steps=4"], 2))
    rollout, reward = base.stages()[3]
    last, source = (base.steps[3]["t"] - base.steps[1]["t"]) / 2, "RollPacker 2.2, table 1 (mean of three tasks)"
    trained = (base.steps[2]["seconds"] + base.steps[3]["seconds"]) / 2
    note = "three tasks in one batch, so that the slowest scorer counts in every step; scores at a time: by table 1"
    return [
        *found,
        _row("training, share of a veRL step of Qwen2.5-14B", trained / last, 0.22, source, "share"),
        _row("rollout, share", rollout / last, 0.697, source, "share"),
        _row("reward, share", reward / last, 0.083, source, "share", note),
    ]
