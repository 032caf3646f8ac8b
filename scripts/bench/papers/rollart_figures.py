"""Simulated figures of RollArt beside the printed ones: 10c (scaling), 12 (serverless rewards), 13 (alpha), 14 (transfer of
weights, redundancy), table 4, 7.5.

And table 5: prefill on H800 and decode on H20 (:mod:`orchestrator.proxy.prefill_decode`) against both on all. The value is the
rollout time with four dedicated reward GPUs over that with serverless rewards (figure 12), three jobs on one cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from orchestrator.sim.paper_setups import load_scenario
from orchestrator.sim.simulated_cluster import engine_costs, trainer_costs
from scripts.bench.papers.rollart_setups import (
    COLLECTIVE,
    MODELS,
    NO_AFFINITY,
    NO_PUSH,
    rollart,
    rollart_fleet,
    without_tasks,
)
from scripts.bench.papers.run_figures import measure
from scripts.bench.papers.runner import Figure, Found, Parts, Row, Verdict, row

_SCALE = 16  # a 16th of cluster and batch, for figure 13
_TRANSFERS = (("8B", 38.6, 1.4), ("14B", 84.1, 5.1), ("32B", 157.0, 9.6))  # table 4: without overlap, and exposed
_JUDGES = 16  # requests that a judging GPU serves at a time: ASSUMED, as in orchestrator.sim.paper_setups
_ASSUMED = "tokens a turn are assumed; half the GPUs hold twice the sequences, which a memory-bound step hardly feels"
_TABLE_5 = (  # model, name, workers of H800 and H20, printed seconds: apart, and both on all
    ("Qwen3-32B", "1P3D", 2, 6, 722.7, 741.2),
    ("Qwen3-32B", "2P2D", 4, 4, 701.6, 734.9),
    ("Qwen3-30B-A3B", "1P3D", 2, 6, 294.8, 327.4),
    ("Qwen3-30B-A3B", "2P2D", 4, 4, 251.1, 305.2),
)
_APART = (
    "rollout.disaggregation.enabled=true",
    "rollout.disaggregation.prefill=H800",
    "rollout.disaggregation.decode=H20",
    "rollout.kv_transfer.enabled=true",
    "sim.kv_gb_s=25",  # between the clusters: 200 Gbit/s Ethernet (7.1)
)


def _rollout(scenario: str, given: Sequence[str]) -> float:
    """Seconds of a step but its training."""
    one = measure(load_scenario(scenario, given))
    return one.step_seconds - one.train_seconds


def _figure_12(steps: int) -> Found:
    """As a job on its own, and as "three concurrent jobs" on one cluster: played as one batch three times as large."""
    rows, source, ratio = list[Row](), "RollArt 7.3, figure 12", 0.0
    for jobs, sharing in ((1, "16 GPUs a job"), (3, "three jobs on the 16 GPUs")):
        given = [f"run.steps={steps}", f"rollout.groups_per_step={14 * jobs}", f"rollout.environments={84 * jobs}"]
        dedicated = _rollout("rollart-rewards", [*given, "rollout.workers=4", f"sim.reward_slots={4 * _JUDGES}"])
        serverless = _rollout("rollart-rewards", given)
        ratio = dedicated / serverless
        rows += [
            row(f"{sharing}: rollout, 4 for rewards, s", 158, dedicated, source, _ASSUMED),
            row(f"{sharing}: rollout, serverless rewards, s", 77, serverless, source, _ASSUMED),
            row(f"{sharing}: dedicated over serverless", 158 / 77, ratio, source, _ASSUMED, "2.05"),
        ]
    return {"ratio": ratio}, rows  # of the literal reading


def _figure_13() -> Found:
    found = {
        model: {
            str(alpha): round(measure(rollart(model, "affinity", _SCALE, steps=6, extra=[given])).step_seconds, 2)
            for alpha in (1, 2, 4)
            for given in [f"rollout.alpha={alpha}"]
        }
        for model in MODELS
    }
    what, source = "step time at alpha 1 over the best alpha", "RollArt 7.3, figure 13"
    best = {model: times["1"] / min(times.values()) for model, times in found.items()}
    return found, [row(f"{model}: {what}", (1.0, 1.22), ours, source, text="1 to 1.22") for model, ours in best.items()]


def _figure_10c() -> Found:
    """14B on 64 to 128 H800 without affinity; from one-off on, 32 of them train."""
    found: dict[str, dict[str, float]] = {}
    for rung in ("sync_plus", "one_off", "areal", "async"):
        for gpus in (64, 96, 128):
            training = gpus if rung == "sync_plus" else 32
            rollout = gpus if rung == "sync_plus" else gpus - 32
            extra = [*rollart_fleet("14B", rollout, 0), f"sim.trainer_gpus={training}"]
            throughput = measure(rollart("14B", rung, _SCALE, extra=extra)).throughput
            found.setdefault(rung, {})[str(gpus)] = round(throughput, 1)
    base, source = found["sync_plus"]["64"], "RollArt 7.2, figure 10c"
    return found, [
        row(f"14B, {gpus} H800: throughput of async over Sync+ on 64", (1.33, 2.08), ours / base, source)
        for gpus, ours in found["async"].items()
    ]


def _figure_14a() -> Found:
    """The last rung against one whose workers stand still for table 4's push and pull, as with veRL's transfer; and how long
    the paper's steps must be for its numbers."""
    found, rows, source = dict[str, Any](), list[Row](), "RollArt 7.4, figure 14a"
    for model, naive, exposed in _TRANSFERS:
        apart = measure(rollart(model, "affinity", _SCALE)).step_seconds
        stalled = [*NO_PUSH, f"sim.stall_seconds={naive}"]
        together = measure(rollart(model, "affinity", _SCALE, extra=stalled)).step_seconds
        found[model] = {"asynchronous": round(apart, 2), "synchronous": round(together, 2)}
        what = f"{model}: step time, transfer that stops the rollout over the relay"
        rows.append(row(what, (1.10, 1.16), together / apart, source))
        low, high = (naive - exposed) / 0.16, (naive - exposed) / 0.10
        what = f"{model}: s a step of affinity; printed: what table 4 and the factors of 14a come to"
        rows.append(row(what, (low, high), apart, source + ", table 4", text=f"{low:.0f} to {high:.0f}"))
    return found, rows


def _figure_14b() -> Found:
    """GEM-math on 32 H800; more groups, or larger ones, than are needed."""
    given = ["run.mode=sync_plus", "rollout.alpha=0", *COLLECTIVE, "sim.push_gb_s=0", NO_AFFINITY, "run.steps=5"]
    given += ["rollout.workers=32", "sim.fleet={H800=32}", "rollout.groups_per_step=16", "rollout.environments=288"]
    given += without_tasks("frozenlake", "webshop", "gem-game")
    found = {}
    for groups in (1.0, 1.25, 1.5):
        for members in (1.0, 1.25, 1.5):
            extra = [f"rollout.redundant_groups={groups}", f"rollout.redundant_members={members}"]
            found[f"{groups} x groups, {members} x members"] = round(_rollout("rollart", [*given, *extra]), 3)
    best = found["1.0 x groups, 1.0 x members"] / min(found.values())
    what = "largest speed-up by redundant environments"
    return found, [row(what, (1.0, 1.62), best, "RollArt 7.4, figure 14b", text="1.62")]


def _table_5() -> Found:
    """SWE-bench, batch 128, 32 GPUs, TP 4: all engines do both, or H800 prefill and H20 decode. Half of it is played."""
    found, rows, source = dict[str, Any](), list[Row](), "RollArt 7.4, table 5"
    assumed = "tokens a turn and environment times are assumed"
    for model, name, h800, h20, apart, both in _TABLE_5:
        given = ["run.steps=4", f"sim.model={model}", "sim.tensor_parallel=4", "rollout.workers=4", "sim.grain=1"]
        given += ["rollout.engine.max_model_len=32768"]  # a turn's first token is made apart
        given += [f"sim.fleet={{H800={h800 // 2}, H20={h20 // 2}}}", "rollout.environments=64"]
        given += ["rollout.groups_per_step=8", "sim.trainer_gpus=16"]
        seconds = {
            how: round(_rollout("rollart-swe", [*given, *more]), 2) for how, more in (("both", ()), ("apart", _APART))
        }
        found |= {f"{model}, {name}, {how}": took for how, took in seconds.items()}
        ours, printed = seconds["both"] / seconds["apart"], both / apart
        rows.append(row(f"{model}, {name}: rollout, s", apart, seconds["apart"], source, assumed))
        rows.append(row(f"{model}, {name}'s GPUs collocated: rollout, s", both, seconds["both"], source, assumed))
        rows.append(row(f"{model}: collocated over {name}", printed, ours, source, assumed, f"{printed:.2f}"))
    return found, rows


def _tax() -> Found:
    """7.5 by data path: what of the transfer of weights stands in the way, without overlap and with it."""
    rows, source = list[Row](), "RollArt table 4 and 7.5"
    late = "all of the pull is beside generation; the copy to the device is not"
    for model, naive, exposed in _TRANSFERS:
        config = rollart(model, "affinity")
        engine, trainer = engine_costs(config, "H20"), trainer_costs(config)
        whole = trainer.publish_seconds + engine.weights.fetch
        rows.append(row(f"{model}: push and pull in the way, s", naive, whole, source, "rates from table 4"))
        rows.append(row(f"{model}: exposed, s", exposed, engine.weights.load, source, late))
    return {}, rows


def _parts(quick: bool) -> Parts:
    if quick:
        return {"figure_12": partial(_figure_12, 4)}
    return {
        "figure_12": partial(_figure_12, 8),
        "alpha": _figure_13,
        "scaling": _figure_10c,
        "transfer": _figure_14a,
        "redundancy": _figure_14b,
        "tax": _tax,
        "table_5": _table_5,
    }


def _read(found: dict[str, Any], rows: list[Row], quick: bool) -> Verdict:
    value = float(found.pop("figure_12")["ratio"])
    return value, value >= 1.5, {name: one for name, one in found.items() if one}


FIGURE = Figure(
    "rollart-figures",
    claim="rollout time, 4 of 16 GPUs for rewards, over serverless rewards",
    paper="RollArt figure 12: 158 s over 77 s (paper)",
    printed=158 / 77,
    bar=">= 1.5",
    parts=_parts,
    read=_read,
)
