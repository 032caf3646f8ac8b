"""Simulated figures of RollArt beside the printed ones: 10c (scaling), 12 (serverless rewards), 13 (alpha), 14 (transfer of
weights, redundancy), table 4, 7.5.

And table 5: prefill on H800 and decode on H20 (:mod:`orchestrator.proxy.prefill_decode`) against both on all. The value is the
rollout time with four dedicated reward GPUs over that with serverless rewards (figure 12), three jobs on one cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from orchestrator.config import Config
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
from scripts.bench.papers.runner import Cells, Figure, Found, Reading, Row, each_seed, row

_SCALE = 16  # a 16th of cluster and batch, for figure 13
_TRANSFERS = (("8B", 38.6, 1.4), ("14B", 84.1, 5.1), ("32B", 157.0, 9.6))  # table 4: without overlap, and exposed
_JUDGES = 16  # requests that a judging GPU serves at a time: ASSUMED, as in orchestrator.sim.paper_setups
_ASSUMED = "tokens a turn are by one of the bars; half the GPUs hold twice the sequences, which a memory-bound step hardly feels"
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


_JOBS = ((1, "16 GPUs a job"), (3, "three jobs on the 16 GPUs"))  # figure 12
_ALPHAS = (1, 2, 4)
_RUNGS = ("sync_plus", "one_off", "areal", "async")  # figure 10c
_GPUS = (64, 96, 128)
_MORE = (1.0, 1.25, 1.5)  # times the groups or members that are needed, figure 14b


def _played(scenario: str, given: Sequence[str], seed: int) -> dict[str, float]:
    return _kept(load_scenario(scenario, [*given, f"run.seed={seed}"]))


def _rung(model: str, rung: str, steps: int, extra: Sequence[str], seed: int) -> dict[str, float]:
    return _kept(rollart(model, rung, _SCALE, steps=steps, seed=seed, extra=extra))


def _kept(config: Config) -> dict[str, float]:
    one = measure(config)
    return {**one.kept(), "rollout_seconds": one.step_seconds - one.train_seconds}


def _figure_12_cells(steps: int) -> Cells:
    """As a job on its own, and as "three concurrent jobs" on one cluster: played as one batch three times as large."""
    cells = {}
    for jobs, _ in _JOBS:
        given = [f"run.steps={steps}", f"rollout.groups_per_step={14 * jobs}", f"rollout.environments={84 * jobs}"]
        own = [*given, "rollout.workers=4", f"sim.reward_slots={4 * _JUDGES}"]
        cells[f"figure 12/{jobs}/dedicated"] = partial(_played, "rollart-rewards", own)
        cells[f"figure 12/{jobs}/serverless"] = partial(_played, "rollart-rewards", given)
    return cells


def _figure_12(found: Found) -> tuple[float, list[Row]]:
    rows, source, ratio = list[Row](), "RollArt 7.3, figure 12", 0.0
    for jobs, sharing in _JOBS:
        dedicated, serverless = (
            found[f"figure 12/{jobs}/{how}"]["rollout_seconds"] for how in ("dedicated", "serverless")
        )
        ratio = dedicated / serverless
        rows += [
            row(f"{sharing}: rollout, 4 for rewards, s", 158, dedicated, source, _ASSUMED),
            row(f"{sharing}: rollout, serverless rewards, s", 77, serverless, source, _ASSUMED),
            row(f"{sharing}: dedicated over serverless", 158 / 77, ratio, source, _ASSUMED, "2.05"),
        ]
    return ratio, rows  # of the literal reading


def _figure_13(found: Found) -> tuple[dict[str, Any], list[Row]]:
    times = {
        model: {str(alpha): found[f"alpha/{model}/{alpha}"]["step_seconds"] for alpha in _ALPHAS} for model in MODELS
    }
    what, source = "step time at alpha 1 over the best alpha", "RollArt 7.3, figure 13"
    best = {model: of["1"] / min(of.values()) for model, of in times.items()}
    return times, [row(f"{model}: {what}", (1.0, 1.22), ours, source, text="1 to 1.22") for model, ours in best.items()]


def _figure_10c_cells() -> Cells:
    """14B on 64 to 128 H800 without affinity; from one-off on, 32 of them train."""
    cells = {}
    for rung in _RUNGS:
        for gpus in _GPUS:
            training = gpus if rung == "sync_plus" else 32
            rollout = gpus if rung == "sync_plus" else gpus - 32
            extra = [*rollart_fleet("14B", rollout, 0), f"sim.trainer_gpus={training}"]
            cells[f"scaling/{rung}/{gpus}"] = partial(_rung, "14B", rung, 5, extra)
    return cells


def _figure_10c(found: Found) -> tuple[dict[str, Any], list[Row]]:
    rates = {rung: {str(gpus): found[f"scaling/{rung}/{gpus}"]["tokens_per_s"] for gpus in _GPUS} for rung in _RUNGS}
    base, source = rates["sync_plus"]["64"], "RollArt 7.2, figure 10c"
    return rates, [
        row(f"14B, {gpus} H800: throughput of async over Sync+ on 64", (1.33, 2.08), ours / base, source)
        for gpus, ours in rates["async"].items()
    ]


def _figure_14a_cells() -> Cells:
    """The last rung against one whose workers stand still for table 4's push and pull, as with veRL's transfer."""
    cells = {}
    for model, naive, _ in _TRANSFERS:
        cells[f"transfer/{model}/asynchronous"] = partial(_rung, model, "affinity", 5, ())
        stalled = [*NO_PUSH, f"sim.stall_seconds={naive}"]
        cells[f"transfer/{model}/synchronous"] = partial(_rung, model, "affinity", 5, stalled)
    return cells


def _figure_14a(found: Found) -> tuple[dict[str, Any], list[Row]]:
    """And how long the paper's steps must be for its numbers."""
    seconds, rows, source = dict[str, Any](), list[Row](), "RollArt 7.4, figure 14a"
    for model, naive, exposed in _TRANSFERS:
        apart, together = (found[f"transfer/{model}/{how}"]["step_seconds"] for how in ("asynchronous", "synchronous"))
        seconds[model] = {"asynchronous": apart, "synchronous": together}
        what = f"{model}: step time, transfer that stops the rollout over the relay"
        rows.append(row(what, (1.10, 1.16), together / apart, source))
        low, high = (naive - exposed) / 0.16, (naive - exposed) / 0.10
        what = f"{model}: s a step of affinity; printed: what table 4 and the factors of 14a come to"
        rows.append(row(what, (low, high), apart, source + ", table 4", text=f"{low:.0f} to {high:.0f}"))
    return seconds, rows


def _figure_14b_cells() -> Cells:
    """GEM-math on 32 H800; more groups, or larger ones, than are needed."""
    given = ["run.mode=sync_plus", "rollout.alpha=0", *COLLECTIVE, "sim.push_gb_s=0", NO_AFFINITY, "run.steps=5"]
    given += ["rollout.workers=32", "sim.fleet={H800=32}", "rollout.groups_per_step=16", "rollout.environments=288"]
    given += without_tasks("frozenlake", "webshop", "gem-game")
    cells = {}
    for groups in _MORE:
        for members in _MORE:
            extra = [f"rollout.redundant_groups={groups}", f"rollout.redundant_members={members}"]
            cells[_redundant(groups, members)] = partial(_played, "rollart", [*given, *extra])
    return cells


def _redundant(groups: float, members: float) -> str:
    return f"redundancy/{groups} x groups, {members} x members"


def _figure_14b(found: Found) -> tuple[dict[str, Any], list[Row]]:
    names = [_redundant(groups, members) for groups in _MORE for members in _MORE]
    seconds = {name.partition("/")[2]: found[name]["rollout_seconds"] for name in names}
    best = found[_redundant(1.0, 1.0)]["rollout_seconds"] / min(seconds.values())
    what = "largest speed-up by redundant environments"
    return seconds, [row(what, (1.0, 1.62), best, "RollArt 7.4, figure 14b", text="1.62")]


def _table_5_cells() -> Cells:
    """SWE-bench, batch 128, 32 GPUs, TP 4: all engines do both, or H800 prefill and H20 decode. Half of it is played."""
    cells = {}
    for model, name, h800, h20, *_ in _TABLE_5:
        given = ["run.steps=4", f"sim.model={model}", "sim.tensor_parallel=4", "rollout.workers=4", "sim.grain=1"]
        given += ["rollout.engine.max_model_len=32768"]  # a turn's first token is made apart
        given += [f"sim.fleet={{H800={h800 // 2}, H20={h20 // 2}}}", "rollout.environments=64"]
        given += ["rollout.groups_per_step=8", "sim.trainer_gpus=16"]
        for how, more in (("both", ()), ("apart", _APART)):
            cells[f"table 5/{model}, {name}/{how}"] = partial(_played, "rollart-swe", [*given, *more])
    return cells


def _table_5(found: Found) -> tuple[dict[str, Any], list[Row]]:
    times, rows, source = dict[str, Any](), list[Row](), "RollArt 7.4, table 5"
    assumed = "environment times and shares of lengths are assumed"
    for model, name, _, _, apart, both in _TABLE_5:
        seconds = {how: found[f"table 5/{model}, {name}/{how}"]["rollout_seconds"] for how in ("both", "apart")}
        times |= {f"{model}, {name}, {how}": took for how, took in seconds.items()}
        ours, printed = seconds["both"] / seconds["apart"], both / apart
        rows.append(row(f"{model}, {name}: rollout, s", apart, seconds["apart"], source, assumed))
        rows.append(row(f"{model}, {name}'s GPUs collocated: rollout, s", both, seconds["both"], source, assumed))
        rows.append(row(f"{model}: collocated over {name}", printed, ours, source, assumed, f"{printed:.2f}"))
    return times, rows


def _tax() -> list[Row]:
    """7.5 by data path: what of the transfer of weights stands in the way, without overlap and with it. Nothing is played."""
    rows, source = list[Row](), "RollArt table 4 and 7.5"
    late = "all of the pull is beside generation; the copy to the device is not"
    for model, naive, exposed in _TRANSFERS:
        config = rollart(model, "affinity")
        engine, trainer = engine_costs(config, "H20"), trainer_costs(config)
        whole = trainer.publish_seconds + engine.weights.fetch
        rows.append(row(f"{model}: push and pull in the way, s", naive, whole, source, "rates from table 4"))
        rows.append(row(f"{model}: exposed, s", exposed, engine.weights.load, source, late))
    return rows


def _cells(quick: bool) -> Cells:
    if quick:
        return _figure_12_cells(4)
    alphas = {
        f"alpha/{model}/{alpha}": partial(_rung, model, "affinity", 6, [f"rollout.alpha={alpha}"])
        for model in MODELS
        for alpha in _ALPHAS
    }
    further = (_figure_10c_cells(), _figure_14a_cells(), _figure_14b_cells(), _table_5_cells())
    return dict(item for cells in (_figure_12_cells(8), alphas, *further) for item in cells.items())


def _read(found: Found, quick: bool) -> Reading:
    value, rows = _figure_12(found)
    detail = dict[str, Any]()
    for name, figure in () if quick else _FIGURES.items():
        detail[name], more = figure(found)
        rows += more
    return Reading(value, value >= 1.5, rows if quick else [*rows, *_tax()], detail)


_FIGURES = {
    "alpha": _figure_13,
    "scaling": _figure_10c,
    "transfer": _figure_14a,
    "redundancy": _figure_14b,
    "table_5": _table_5,
}
FIGURE = Figure(
    "rollart-figures",
    claim="rollout time, 4 of 16 GPUs for rewards, over serverless rewards",
    paper="RollArt figure 12: 158 s over 77 s (paper)",
    printed=158 / 77,
    bar=">= 1.5",
    cells=_cells,
    read=each_seed(_read),
)
