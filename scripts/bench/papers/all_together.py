"""Simulated throughput with the policies of all papers together over the best single paper's set, on the same workload and GPUs.

Three workloads, each as its paper prints its own evaluation: RollArt's (``rollart.toml``: four tasks, 8B, 96 H800 and 32 H20),
RollPacker's (``rollpacker.toml``: 14B, responses to 16k, 32 H800) and ROSE's (``rose.toml``: FrozenLake, 8B, 16 H800). Beside
each stand as many serving GPUs as the run has of its own, as in ROSE's setup (16 beside 16), with its load an engine. Every set
may borrow them, by ROSE's co-serving, so that all have the same devices. Sets whose rollout and training take turns have all of
the run's own GPUs for both, the others split them in three ways. ROSE's has its transfer of differences (6.3: 7 s for 8B across
clusters), RollArt's its relay (table 4) where two classes of GPUs are two clusters. Each set is tuned over three to nine settings
of what its paper leaves open (:func:`settings`; ``settings_tried`` in the detail), all together over seven of the same (splits,
rounds or not, degrees), and compared at its best of the same seed. Caps on requests are ROSE's 16 in three of its settings;
elsewhere there are none, also on borrowed engines: the paper calls them workload-dependent (4.3), and what protects serving is
admission and budgets. At 16, which fits its own 8B at 32k, the borrowed engines of RollPacker's workload would stand at 16
sequences of the 77 that are theirs.

Throughput is trained tokens a second after the first steps, which fill the pipeline. The value is the least of the three
workloads. ``detail`` has, for each, what the trainer could do at most if nothing but it took time (``training_binds_at``): no set
can be above it; what serving's users saw beyond serving alone, and how busy serving was; and what each paper's policies add, one
after the other (``ladder``), on the middle split of the GPUs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from orchestrator.api import ConfigError
from orchestrator.config import Config
from orchestrator.policies.parallelism.degree_reallocation import allocate_loads
from orchestrator.sim.hardware import TRAIN_SERIAL_SECONDS
from orchestrator.sim.paper_setups import load_scenario
from orchestrator.sim.resizable_worker import SimRates
from orchestrator.sim.simulated_cluster import trainer_costs
from scripts.bench.papers.heddle import DEGREES, MARGIN, known_loads
from scripts.bench.papers.rose_runs import serving_alone
from scripts.bench.papers.run_figures import measure
from scripts.bench.papers.runner import Cells, Figure, Found, Reading, Row, each_seed, unprinted

BAR = 1.25
SETS = ("RollArt", "RollPacker", "Heddle", "ROSE", "all")
_QUICK = {  # settings that --quick plays
    "RollArt": ("redundancy 1.5, 64 GPUs train",),
    "RollPacker": ("in turn, eta 1.25",),
    "Heddle": ("degrees cut",),
    "ROSE": ("one-off, 64 GPUs train",),
    "all": ("async, degrees cut, 64 GPUs train",),
}
_RATE = 1.5 / 16  # of ROSE's serving load, an engine


@dataclass(frozen=True, slots=True)
class Workload:
    """A paper's evaluation, played in an n-th (``scale``). ``gpus``: class -> how many, before it is scaled; ``splits``: how many
    of the H800 train, where they do nothing else; ``ranks``: of an engine."""

    scenario: str
    scale: int
    gpus: Mapping[str, int]
    splits: tuple[int, ...]
    ranks: int = 1
    given: tuple[str, ...] = ()
    serving: tuple[str, ...] = ()
    affinity: Mapping[str, str] = field(default_factory=dict)  # task -> class

    def workers(self, training: int = 0) -> tuple[str, ...]:
        """Overrides: what generates when so many H800 train; 0: all do both in turn."""
        left = {name: (count - (training if name == "H800" else 0)) // self.ranks for name, count in self.gpus.items()}
        trainer = training or sum(self.gpus.values())
        fleet = ", ".join(f"{name}={count}" for name, count in left.items())
        found = (f"rollout.workers={sum(left.values())}", f"sim.trainer_gpus={trainer}")
        return (*found, f"sim.fleet={{{fleet}}}") if len(left) > 1 else found

    def borrowed(self) -> tuple[str, ...]:
        """Overrides: the serving GPUs are there to be borrowed."""
        engines = sum(self.gpus.values()) // self.ranks // self.scale
        found = (f"sim.borrowed.workers={engines}", f"sim.borrowed.serving={engines}")
        return (*found, f"sim.borrowed.speed={_RATE * engines}", "sim.borrowed.device=H800", *self.serving)


_ROSE_TASK = "sim.tasks.frozenlake"
WORKLOADS = {
    "RollArt": Workload(
        "rollart",
        16,
        {"H800": 96, "H20": 32},
        (48, 64, 80),
        affinity={"gem-math": "H20", "gem-game": "H20", "frozenlake": "H800", "webshop": "H800"},
    ),
    "RollPacker": Workload(
        "rollpacker",
        2,
        {"H800": 32},
        (8, 16, 24),
        ranks=2,
        given=("trainer.tensor_parallel=4", "trainer.data_parallel=2", "rollout.environments=2048"),
        serving=("sim.borrowed.model=Qwen3-14B",),  # "similarly sized" models are served (ROSE 6)
    ),
    "ROSE": Workload(
        "rose",
        4,
        {"H800": 16},
        (4, 8, 12),
        given=(f"sim.trainer_serial_seconds={TRAIN_SERIAL_SECONDS}", "rollout.environments=512"),
    ),
}
_PREDICT = (
    "rollout.prediction.enabled=true",
    "rollout.placement.enabled=true",
    "rollout.placement.prefill_seconds=0.0005",
    "rollout.kv_transfer.enabled=true",
)
_NO_CAPS = ("rollout.routing.cap=0", "rollout.routing.served_cap=0")  # ROSE 4.3: they depend on the workload
_CAPS = ("rollout.routing.cap=16", "rollout.routing.served_cap=16")  # ROSE, appendix A
_ANYWHERE = "rollout.routing.affinity={}"
_DIFFERENCES = ("sim.push_gb_s=0", "sim.pull_gb_s=2.34")  # ROSE 6.3: a version in 7 s
_TURNS = ("run.mode=sync_plus", "rollout.alpha=0")
_ASYNC = ("run.mode=async", "rollout.alpha=1", "sim.reward_slots=0")
_ONE_OFF = ("run.mode=one_off", "rollout.alpha=1")
_SCHEDULED = "reward.timeout=adaptive"
_STREAM = "trainer.stream=true"
_REDUNDANT = "rollout.redundant_groups=1.5"
_MORE = "rollout.environments=2048"  # a short round starts more


def _rounds(eta: float) -> tuple[str, ...]:
    return ("rollout.rounds.enabled=true", f"rollout.rounds.eta_prompts={eta}", f"rollout.rounds.eta_responses={eta}")


def _streamed(where: Workload) -> tuple[str, ...]:
    """Streaming on devices that are freed within the step, where those of a replica are whole workers of one class."""
    if len(where.gpus) > 1:
        return ("trainer.stream=true",)
    return ("trainer.stream=true", "rollout.colocation.enabled=true", "rollout.weights=relay")


def _degrees(where: Workload, given: Sequence[str], affine: bool) -> tuple[str, ...]:
    """Overrides: unequal degrees of the run's own GPUs, as Heddle's resource manager cuts them, in each class for its tasks."""
    config = load_scenario(where.scenario, given, where.scale)
    classes = config.sim.fleet or {"": config.rollout.workers}
    number = config.rollout.groups_per_step * config.rollout.group_size
    rates, found, fleet = SimRates(config), list[int](), list[str]()
    for name, workers in classes.items():
        here = {task for task, wanted in where.affinity.items() if wanted == name} if affine else set(config.sim.tasks)
        expected = max(1, number * len(here) // len(config.sim.tasks))
        known = known_loads(_only(where, given, here) if affine else config, expected)
        kinds = {degree: rates.rates_at(name, degree) for degree in DEGREES if degree <= workers * where.ranks}
        devices = workers * where.ranks
        server = 8 if devices < 8 else math.gcd(devices, 8)
        chosen = allocate_loads(known, devices, kinds, per_server=server, margin=MARGIN).degrees
        found += chosen
        fleet.append(f"{name}={len(chosen) * where.scale}")
    overrides = [f"rollout.workers={len(found) * where.scale}", f"sim.degrees={found}"]
    return (*overrides, f"sim.fleet={{{', '.join(fleet)}}}") if config.sim.fleet else tuple(overrides)


def _only(where: Workload, given: Sequence[str], tasks: set[str]) -> Config:
    others = [name for name in where.affinity if name not in tasks]
    return load_scenario(where.scenario, [*given, *(f"sim.tasks.{name}.weight=1e-9" for name in others)], where.scale)


Setting = tuple[str, tuple[str, ...], bool]  # name, overrides, whether the manager's degrees come to them


def settings(name: str, where: Workload) -> Iterator[Setting]:
    """What is on in a set, in three to nine settings of what its paper leaves open; all together in seven."""
    anywhere = (_ANYWHERE,) if where.affinity else ()
    splits = [(f"{gpus} GPUs train", where.workers(gpus)) for gpus in where.splits]
    lent = where.borrowed()
    if name == "RollArt":
        for groups, (text, split) in itertools.product((1.0, 1.5), splits):
            given = (*_ASYNC, *_NO_CAPS, f"rollout.redundant_groups={groups}", *lent, *split)
            yield f"redundancy {groups}, {text}", given, False
    elif name == "RollPacker":
        rounds = (*anywhere, *_NO_CAPS, _SCHEDULED, _MORE)
        for eta in (1.25, 1.5, 2.0):
            in_turn = (*rounds, *_TURNS, *_streamed(where), *lent, *where.workers(), *_rounds(eta))
            yield f"in turn, eta {eta}", in_turn, False
        for text, split in splits:  # its 6.7
            yield f"one-off, {text}", (*rounds, *_ONE_OFF, *_rounds(1.25), *lent, *split), False
    elif name == "Heddle":
        whole = (*_TURNS, *anywhere, *_NO_CAPS, *_PREDICT, *lent, *where.workers())
        cuts = (("equal", (), False), ("wider", tuple(_widened(where)), False), ("cut", (), True))
        for text, how, cut in cuts:  # its certainty, 0.25 for 0.5: at most 7 % less on RollArt's workload
            yield f"degrees {text}", (*whole, *how), cut
    elif name == "ROSE":
        areal = ("run.mode=areal", "rollout.alpha=1", *_NO_CAPS)
        modes = (("one-off, caps", (*_ONE_OFF, *_CAPS)), ("one-off", (*_ONE_OFF, *_NO_CAPS)), ("areal", areal))
        for (kind, mode), (text, split) in itertools.product(modes, splits):
            yield f"{kind}, {text}", (*anywhere, *mode, *_DIFFERENCES, *lent, *split), False
    else:
        every = (*_NO_CAPS, *_PREDICT, _SCHEDULED, _STREAM, "sim.reward_slots=0", *_DIFFERENCES, *lent)
        for text, split in splits:
            flowing = (*every, *_ASYNC, _REDUNDANT, *split)
            yield f"async, degrees equal, {text}", flowing, False
            yield f"async, degrees cut, {text}", flowing, True
        for text, split in splits[1:2]:
            predicted = (*_rounds(1.25), "rollout.rounds.predict=progressive", _MORE)
            yield f"one-off, rounds, {text}", (*every, *_ONE_OFF, *predicted, *split), False


def ladder(where: Workload) -> Iterator[tuple[str, tuple[str, ...]]]:
    """From RollArt's set to all in the asynchronous mode, one paper's policies after the other, on the middle split."""
    training = where.splits[len(where.splits) // 2]
    given: tuple[str, ...] = (*_ASYNC, *_NO_CAPS, _REDUNDANT, *where.workers(training))
    yield "RollArt's set", given
    for name, more in (
        ("+ ROSE's transfer of differences", _DIFFERENCES),
        ("+ ROSE's borrowed GPUs", where.borrowed()),
        ("+ RollPacker's streaming and timeouts", (_STREAM, _SCHEDULED)),
        ("+ Heddle's prediction, priorities, placement", _PREDICT),
    ):
        given += more
        yield name, given


def _widened(where: Workload) -> Iterator[str]:
    """Overrides: engines of twice the ranks."""
    scaled = {
        name: max(1, count // where.scale // where.ranks // 2) * where.scale for name, count in where.gpus.items()
    }
    yield f"rollout.workers={sum(scaled.values())}"
    yield f"sim.tensor_parallel={2 * where.ranks}"
    if len(scaled) > 1:
        yield f"sim.fleet={{{', '.join(f'{name}={count}' for name, count in scaled.items())}}}"


def configured(where: Workload, setting: str, given: Sequence[str], steps: int = 1, seed: int = 0) -> Config:
    """A run of a set. Raises ConfigError, which names the setting."""
    all_given = (f"run.steps={steps}", f"run.seed={seed}", *where.given, *given)
    try:
        return load_scenario(where.scenario, all_given, where.scale)
    except ConfigError as error:
        raise ConfigError("all-together", setting, str(error)) from error


def overrides(where: Workload, chosen: str, setting: str) -> tuple[str, ...]:
    """Of a set in one of its settings, with the degrees that the manager cuts there."""
    given, cut = next((given, cut) for name, given, cut in settings(chosen, where) if name == setting)
    affine = chosen == "all" and bool(where.affinity)
    return (*given, *_degrees(where, given, affine)) if cut else given


def _played(config: Config) -> dict[str, Any]:
    """A run as the figure keeps it: what users saw beside it, and without it on the same arrivals; how busy serving was."""
    one = measure(config)
    found: dict[str, Any] = {**one.kept()}
    users = one.result.summary.get("borrowed", {})
    if users:
        alone = serving_alone(config, one.result.summary["seconds"])
        found["borrowed_tokens"] = users["generated"]
        found |= {key: value for key, value in users.items() if key.endswith(("_late", "_busy"))}
        found |= {f"alone_{key}": value for key, value in alone.items() if key.endswith("_late")}
    return found


def _cell(name: str, chosen: str, setting: str, steps: int, seed: int) -> dict[str, Any]:
    where = WORKLOADS[name]
    return _played(configured(where, f"{chosen}, {setting}", overrides(where, chosen, setting), steps, seed))


def _ladder_cell(name: str, given: Sequence[str], steps: int, seed: int) -> dict[str, Any]:
    return _played(configured(WORKLOADS[name], "ladder", given, steps, seed))


def _cells(quick: bool) -> Cells:
    cells: dict[str, Any] = {}
    for name in ("RollArt",) if quick else WORKLOADS:
        for chosen in SETS:
            for setting, *_ in settings(chosen, WORKLOADS[name]):
                if not quick or setting in _QUICK[chosen]:
                    cells[f"{name}/{chosen}/{setting}"] = partial(_cell, name, chosen, setting, 4 if quick else 5)
        if not quick:
            for step, given in ladder(WORKLOADS[name]):
                cells[f"{name}/ladder/{step}"] = partial(_ladder_cell, name, given, 5)
    return cells


def binds_at(where: Workload, given: Sequence[str], tokens: float) -> float:
    """Tokens a second if the trainer were never waited for: it trains a step's ``tokens``, publishes, and begins the next."""
    config = configured(where, "bound", given)
    number = config.rollout.groups_per_step * config.rollout.group_size
    costs = trainer_costs(config)
    seconds = costs.train([int(tokens / config.sim.grain / number)] * number) + costs.publish_seconds
    return tokens / seconds


def _compared(name: str, table: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Any], list[Row]]:
    """All sets on a workload: the best setting of each, the gain, what binds."""
    where, best, rates, binds = WORKLOADS[name], dict[str, str](), dict[str, float](), dict[str, float]()
    for chosen in SETS:
        of = table[chosen]
        best[chosen] = max(of, key=lambda one: float(of[one]["tokens_per_s"]))
        one = of[best[chosen]]
        rates[chosen] = float(one["tokens_per_s"])
        given = next(given for setting, given, _ in settings(chosen, where) if setting == best[chosen])
        binds[chosen] = binds_at(where, given, one["tokens_per_step"])
    single = max((one for one in SETS if one != "all"), key=lambda one: rates[one])
    users, what = table["all"][best["all"]], f"{name}'s workload"
    late = max(0.0, users["ttft_late"] - users["alone_ttft_late"])
    rows = [
        unprinted(f"{what}: all policies over {one}'s set", rates["all"] / rates[one], best["all"])
        for one in SETS
        if one != "all"
    ]
    rows.append(unprinted(f"{what}: all policies over the best single set", rates["all"] / rates[single], best["all"]))
    rows.append(unprinted(f"{what}, all policies: prompts late beyond those of serving alone, share", late, "ours"))
    rows += [
        unprinted(
            f"{what}, all policies: {key.removesuffix('_busy')} engines busy with serving, share", users[key], "ours"
        )
        for key in users
        if key.endswith("_busy")
    ]
    return {
        "scale": where.scale,
        "best_single": single,
        "best_settings": best,
        "settings_tried": {chosen: len(table[chosen]) for chosen in SETS},
        "tokens_per_s": rates,
        "gain": rates["all"] / rates[single],
        "training_binds_at": binds,
        "sets": {chosen: table[chosen] for chosen in SETS},
        "ladder": [{"policies": step, **one} for step, one in table.get("ladder", {}).items()],
    }, rows


def _read(found: Found, quick: bool) -> Reading:
    table: dict[str, dict[str, dict[str, Any]]] = {}
    for key, one in found.items():
        name, chosen, setting = key.split("/", 2)
        table.setdefault(name, {}).setdefault(chosen, {})[setting] = one
    compared, rows = dict[str, dict[str, Any]](), list[Row]()
    for name, of in table.items():
        compared[name], more = _compared(name, of)
        rows += more
    least = min(compared, key=lambda name: float(compared[name]["gain"]))
    value = float(compared[least]["gain"])
    keys = {"scales": "scale", "best_single": "best_single", "gains": "gain"}
    each = {name: {where: one[key] for where, one in compared.items()} for name, key in keys.items()}
    return Reading(value, value > BAR, rows, {"least": least, **each, "workloads": compared})


FIGURE = Figure(
    "all-together",
    claim="throughput of all policies together over the best single paper's set on the same devices, the least of the workloads",
    paper="none: the papers were built one by one",
    printed=1.0,
    bar=f"> {BAR}",
    cells=_cells,
    read=each_seed(_read),
)
