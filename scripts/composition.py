#!/usr/bin/env python3
"""Writes the tables of docs/composition.md: each feature of the four papers, and every pair of them, as the config, the checks of
a real run and the simulator take it.

    python scripts/composition.py            # is the page what the code says? exit code 1: no
    python scripts/composition.py --write

A pair works, or is refused in one sentence, before anything starts. What real runs and the simulator take differently is said
pair by pair. Each pair is played in the simulator, two steps.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from orchestrator.api import ConfigError  # noqa: E402
from orchestrator.config import Config  # noqa: E402
from orchestrator.runtime import engine_cuts, kv_setup, pool_requests  # noqa: E402
from orchestrator.sim.simulated_run import simulate  # noqa: E402

PAGE = ROOT / "docs" / "composition.md"
BEGIN, END = "<!-- scripts/composition.py writes from here -->\n", "<!-- to here -->\n"
Tree = Mapping[str, Any]
WORKERS = 4
BASE: Tree = {
    "run": {"steps": 2, "mode": "sync_plus"},
    "rollout": {
        "workers": WORKERS,
        "alpha": 0,
        "environments": 20,
        "group_size": 2,
        "groups_per_step": 4,
        "engine": {"max_model_len": 512, "kv_cache_mb": 4},
    },
    "trainer": {"data_parallel": WORKERS},
    "evaluation": {"every": 0, "prompts": 2},
    "checkpoint": {"every": 100},
    "sim": {"response_tokens_mean": 8.0, "turns_max": 2},
}
SERVER = "http://127.0.0.1:8000"
CLASSES = {"H800": 2, "H20": 2}


@dataclass(frozen=True)
class Feature:
    """``sets``: what turns it on; ``real`` and ``simulated``: what only one of the two needs or has. ``kind``: of which a run has
    one. ``test``: on real engines, "" for none; ``pays``: where its figure is, "" while there is none. ``refuses``: what else a
    real run refuses beside it: in words, the key that its error names, what sets it."""

    name: str
    paper: str
    key: str
    sets: Tree
    real: Tree = field(default_factory=dict)
    simulated: Tree = field(default_factory=dict)
    kind: str = ""
    test: str = ""
    pays: str = ""
    refuses: tuple[tuple[str, str, Tree], ...] = ()


def rollout(**settings: Any) -> Tree:
    return {"rollout": settings}


_POOLS: Tree = {"resources": {"pools": {"H800": 8}, "rollout": {"H800": 4}, "trainer": "H800"}}
_CLASSES: Tree = {"pools": {"H800": 4, "H20": 4}, "rollout": {"H800": 2, "H20": 2}, "trainer": "H800"}
_CUT_ANEW = (
    ("devices of several classes", "resources.rollout", {"resources": _CLASSES}),
    (
        "a part of a node beside whole ones",
        "rollout.workers",
        {"ray": {"address": "10.0.0.1:6379"}, "resources": {"devices_per_server": 3}},
    ),
    (
        "engines that say themselves how many devices they have",
        "rollout.engine.tensor_parallel_size",
        rollout(engine={"tensor_parallel_size": 2}),
    ),
)
_PREDICTED: Tree = {"prediction": {"enabled": True}}
_PLACED: Tree = {**_PREDICTED, "placement": {"enabled": True}}
_SPEEDS = {"1": 1.0, "2": 0.7, "4": 0.6}
_NAMED = [name for name, count in CLASSES.items() for _ in range(count)]
FEATURES = (
    Feature(
        "sync",
        "RollArt 6.2",
        "run.mode",
        {"run": {"mode": "sync"}},
        kind="mode",
        test="tests/loop/test_real_run.py",
        pays="modes",
    ),
    Feature(
        "one-off",
        "RollArt 6.2",
        "run.mode",
        {"run": {"mode": "one_off"}, "rollout": {"alpha": 1}},
        kind="mode",
        test="tests/loop/test_composed_runs.py",
        pays="modes",
    ),
    Feature(
        "async",
        "RollArt 6.2",
        "run.mode",
        {"run": {"mode": "async"}, "rollout": {"alpha": 1}},
        kind="mode",
        test="tests/loop/test_real_run.py",
        pays="modes",
    ),
    Feature(
        "areal",
        "RollArt 7",
        "run.mode",
        {"run": {"mode": "areal"}, "rollout": {"alpha": 1}},
        kind="mode",
        test="tests/loop/test_composed_runs.py",
        pays="modes",
    ),
    Feature(
        "redundant groups",
        "RollArt 6.3",
        "rollout.redundant_groups",
        rollout(redundant_groups=1.5),
        test="tests/loop/test_real_run.py",
        pays="ablation",
    ),
    Feature(
        "hardware affinity",
        "RollArt 5.2",
        "rollout.routing.affinity",
        rollout(routing={"affinity": {"default": "H20"}}),
        real=rollout(routing={"hardware": {f"vllm-{index}": name for index, name in enumerate(_NAMED)}}),
        simulated={"sim": {"fleet": CLASSES}},
        test="tests/bench/test_four_papers.py",
        pays="affinity",
        refuses=(
            (
                "a class that no worker is of",
                "rollout.routing.affinity.default",
                rollout(routing={"affinity": {"default": "L40"}}),
            ),
        ),
    ),
    Feature(
        "prefill and decode apart",
        "RollArt 6.3",
        "rollout.disaggregation.enabled",
        rollout(
            kv_transfer={"enabled": True, "min_tokens": 8},
            disaggregation={"enabled": True, "prefill": "H800", "decode": "H20", "min_tokens": 8},
        ),
        real=rollout(routing={"hardware": {f"vllm-{index}": name for index, name in enumerate(_NAMED)}}),
        simulated={"sim": {"fleet": CLASSES}},
        test="tests/proxy/test_kv_moves_real_run.py",
        refuses=(
            ("one class for both", "rollout.disaggregation.prefill", rollout(disaggregation={"decode": "H800"})),
            ("no KV that moves", "rollout.disaggregation.enabled", rollout(kv_transfer={"enabled": False})),
        ),
    ),
    Feature(
        "weights by a collective",
        "RollArt 6.3, ROSE 4.2",
        "rollout.weights",
        rollout(weights="collective"),
        test="tests/megatron/test_collective_sender_engine.py",
        pays="collective-time",
        refuses=(
            ("`relay.signing_key`: they come unsigned", "relay.signing_key", {"relay": {"signing_key": "RELAY_KEY"}}),
            ("no engine of the run's own", "rollout.weights", rollout(workers=0, served=[SERVER])),
        ),
    ),
    Feature(
        "weights as differences",
        "ROSE 4.2",
        "relay.snapshot_every",
        {"relay": {"snapshot_every": 4}},
        test="tests/loop/test_real_run.py",
        pays="delta-real",
    ),
    Feature(
        "weights beside a step",
        "RollArt 6.3",
        "rollout.weights_overlap",
        {"run": {"mode": "async"}, "rollout": {"alpha": 1, "weights_overlap": True}},
        kind="mode",  # it needs one of two
        test="tests/loop/test_weights_overlap_real.py",
        refuses=(
            (
                "modes that keep a trajectory to one version, or train when none is under way",
                "rollout.weights_overlap",
                {"run": {"mode": "one_off"}},
            ),
        ),
    ),
    Feature(
        "tail batching",
        "RollPacker 3",
        "rollout.rounds.enabled",
        rollout(rounds={"enabled": True}),
        test="tests/loop/test_tail_batching_real.py",
        pays="tail-batching",
        refuses=(
            (
                "`filters.balance`, which chooses among finished groups",
                "filters.balance",
                {"filters": {"balance": "task"}},
            ),
            ("`rollout.redundant_members`", "rollout.redundant_members", rollout(redundant_members=1.5)),
        ),
    ),
    Feature(
        "tail batching by forecasts",
        "RollPacker 3, Heddle 4.1",
        "rollout.rounds.predict",
        rollout(rounds={"enabled": True, "predict": "progressive"}, **_PREDICTED),
        test="tests/loop/test_tail_batching_progressive_real.py",
        refuses=(("no forecasts", "rollout.rounds.predict", rollout(prediction={"enabled": False})),),
    ),
    Feature(
        "parallelism planner",
        "RollPacker 4.2",
        "rollout.planner.enabled",
        rollout(planner={"enabled": True}),
        test="tests/loop/test_composed_runs.py",
        pays="rollpacker-figures",
        refuses=(
            *_CUT_ANEW,
            (
                "`rollout.planner.experts`: engines are cut by tensor parallelism only",
                "rollout.planner.experts",
                rollout(planner={"experts": True}),
            ),
        ),
    ),
    Feature(
        "adaptive timeouts",
        "RollPacker 4.3",
        "reward.timeout",
        {"reward": {"timeout": "adaptive"}},
        test="tests/tasks/test_real_run.py",
        pays="reward-timeout",
    ),
    Feature(
        "judge",
        "RollPacker 4.3",
        "reward.judge",
        {"reward": {"judge": {"url": "http://127.0.0.1:9/v1", "model": "m", "criterion": "c"}}},
        test="tests/rewards/test_judge_real.py",
        pays="judge-batches",
        refuses=(
            (
                "a form of answers that the run's own judge would enforce",
                "reward.judge.structured",
                {"reward": {"judge": {"url": "", "path": "m", "structured": True}}},
            ),
        ),
    ),
    Feature(
        "judges by task",
        "RollPacker 4.3",
        "reward.judges",
        {
            "task": {"name": "mixture", "mixture": {"nim": 1.0, "coding": 1.0}},
            "reward": {"judges": {"nim": {"url": "http://127.0.0.1:9/v1", "model": "m", "criterion": "c"}}},
        },
        test="tests/bench/test_four_papers.py",
        refuses=(
            (
                "a task that the mixture has not",
                "reward.judges.chess",
                {"reward": {"judges": {"chess": {"url": "http://127.0.0.1:9/v1", "model": "m", "criterion": "c"}}}},
            ),
        ),
    ),
    Feature(
        "streamed training",
        "RollPacker 4.4",
        "trainer.stream",
        {"trainer": {"stream": True}},
        test="tests/megatron/test_trainer_stream.py",
        pays="stream-step",
        refuses=(("several optimizer steps per batch", "trainer.minibatches", {"trainer": {"minibatches": 2}}),),
    ),
    Feature(
        "colocation",
        "RollPacker 4.4",
        "rollout.colocation.enabled",
        {"trainer": {"stream": True}, "rollout": {"colocation": {"enabled": True}}},
        test="tests/colocation/test_stream_training_real.py",
        pays="rollpacker-figures",
        refuses=(
            ("training that is not streamed", "rollout.colocation.enabled", {"trainer": {"stream": False}}),
            ("`resources.pools`, which divides devices", "rollout.colocation.enabled", _POOLS),
            ("more trainer ranks than engines", "rollout.colocation.enabled", {"trainer": {"data_parallel": 8}}),
        ),
    ),
    Feature(
        "dynamic sampling",
        "ROSE 2.2, RollPacker 7",
        "rollout.dynamic_sampling",
        rollout(dynamic_sampling=True),
        test="tests/loop/test_composed_runs.py",
        refuses=(
            (
                "objectives that do not compare a group's members",
                "rollout.dynamic_sampling",
                {"trainer": {"objective": "ppo"}},
            ),
        ),
    ),
    Feature(
        "concurrency by steps",
        "ROSE 6",
        "rollout.dynamic_concurrency",
        rollout(dynamic_sampling=True, dynamic_concurrency=True),
        test="tests/loop/test_composed_runs.py",
        refuses=(("no dynamic sampling", "rollout.dynamic_concurrency", rollout(dynamic_sampling=False)),),
    ),
    Feature(
        "prediction and priority",
        "Heddle 4",
        "rollout.prediction.enabled",
        rollout(**_PREDICTED),
        test="tests/loop/test_tail_batching_progressive_real.py",
        pays="prediction",
    ),
    Feature(
        "placement",
        "Heddle 5.2",
        "rollout.placement.enabled",
        rollout(**_PLACED),
        test="tests/proxy/test_kv_moves_real_run.py",
        pays="placement",
        refuses=(("no forecasts", "rollout.placement", rollout(prediction={"enabled": False})),),
    ),
    Feature(
        "KV that moves",
        "Heddle 5.3",
        "rollout.kv_transfer.enabled",
        rollout(kv_transfer={"enabled": True}),
        test="tests/proxy/test_kv_moves_real_run.py",
        pays="kv-migrate",
    ),
    Feature(
        "degrees",
        "Heddle 6.2",
        "rollout.placement.degrees.enabled",
        rollout(
            **_PREDICTED,
            placement={"enabled": True, "degrees": {"enabled": True, "start": [2, 1, 1], "speeds": _SPEEDS}},
        ),
        test="tests/parallelism/test_degree_planner_real.py",
        pays="heddle",
        refuses=(
            *_CUT_ANEW,
            ("no placement", "rollout.placement.degrees.enabled", rollout(placement={"enabled": False})),
        ),
    ),
    Feature(
        "borrowed servers",
        "ROSE 4",
        "rollout.served",
        {},
        real=rollout(served=[SERVER]),
        simulated={"sim": {"costs": "roofline", "borrowed": {"workers": 1, "serving": 2}}},
        test="tests/borrowing/test_served_run.py",
        pays="borrowed",
        refuses=(
            ("plain http to another machine", "rollout.served", rollout(served=["http://10.0.0.1:8000"])),
            ("servers named twice", "rollout.served", rollout(served=[SERVER, SERVER])),
        ),
    ),
    Feature(
        "exchanged servers",
        "ROSE 4",
        "rollout.borrowed.most",
        {},
        real=rollout(served=[SERVER], borrowed={"most": 1}),
        simulated={"sim": {"costs": "roofline", "borrowed": {"workers": 1, "serving": 2, "exchanged": True}}},
        test="tests/borrowing/test_exchanged_run.py",
        refuses=(("fewer servers than it may borrow", "rollout.borrowed.most", rollout(borrowed={"most": 2})),),
    ),
    Feature(
        "turns by utilization",
        "ROSE 4.3",
        "rollout.routing.spread",
        rollout(routing={"spread": "least-utilized", "cap": 16, "served_cap": 16}),
        test="tests/borrowing/test_served_run.py",
        pays="borrowed",
        refuses=(
            (
                '`rollout.routing.policy = "round-robin"`, which goes by nobody\'s load',
                "rollout.routing.policy",
                rollout(routing={"policy": "round-robin"}),
            ),
            ("no caps", "rollout.routing.cap", rollout(routing={"cap": 0})),
        ),
    ),
)


@dataclass(frozen=True)
class Verdict:
    """Of one combination: why it is refused, "" where it works."""

    real: str
    simulated: str

    @property
    def works(self) -> bool:
        return not self.real and not self.simulated


def merged(*trees: Tree) -> dict[str, Any]:
    """One tree of several, the later over the earlier."""
    found: dict[str, Any] = {}
    for tree in trees:
        for key, value in tree.items():
            both = isinstance(value, Mapping) and isinstance(found.get(key), Mapping)
            found[key] = merged(found[key], value) if both else deepcopy(value)
    return found


def refusal_beside(feature: Feature, given: Tree) -> str:
    """What a real run says of a feature with these settings beside it; "": it takes them."""
    return _refusal(lambda: check_real(Config.from_dict(merged(BASE, feature.sets, feature.real, given))))


def play(*features: Feature) -> Verdict:
    """These features together. Whatever else than a ConfigError is raised passes through."""
    together = [one.sets for one in features]
    return Verdict(
        _refusal(lambda: check_real(Config.from_dict(merged(BASE, *together, *(one.real for one in features))))),
        _refusal(lambda: simulate(Config.from_dict(merged(BASE, *together, *(one.simulated for one in features))))),
    )


def check_real(config: Config) -> None:
    """What a real run checks of features together, before anything starts."""
    for module in (engine_cuts, kv_setup, pool_requests):
        module.check(config)


def _refusal(call: Any) -> str:
    try:
        call()
    except ConfigError as error:
        return str(error)
    return ""


def pairs() -> Iterator[tuple[Feature, Feature]]:
    """All that a run could be asked to have together."""
    for one, other in itertools.combinations(FEATURES, 2):
        if not (one.kind and one.kind == other.kind):
            yield one, other


def verdicts() -> dict[tuple[str, str], Verdict]:
    """Of every feature with itself, and of every pair."""
    found = {(one.name, one.name): play(one) for one in FEATURES}
    return found | {(one.name, other.name): play(one, other) for one, other in pairs()}


def tables(found: Mapping[tuple[str, str], Verdict]) -> str:
    """What the page has of this, in Markdown."""
    lines = [
        "## Features",
        "",
        "Of what it refuses, other features are named in italics; the reasons are in the next table, and in the error.",
        "",
        "| feature | paper | key | on real engines | refuses | does it pay |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    refused = {names: verdict for names, verdict in found.items() if not verdict.works}
    for one in FEATURES:
        others = [f"*{two if one.name == first else first}*" for first, two in refused if one.name in (first, two)]
        refuses = "; ".join([*others, *(words for words, _, _ in one.refuses)]) or "nothing"
        test = f"`{one.test}`" if one.test else "none yet"
        pays = f"[{one.pays}](results/{one.pays}.json)" if one.pays else "pending"
        lines.append(f"| {one.name} | {one.paper} | `{one.key}` | {test} | {refuses} | {pays} |")
    lines += [
        "",
        f"## Pairs that are refused ({len(refused)} of {len(found) - len(FEATURES)})",
        "",
        "Every other pair is played in the simulator, and passes the checks of a real run.",
        "",
        "| pair | by | why |",
        "| --- | --- | --- |",
    ]
    for (one, other), verdict in refused.items():
        by = "both" if verdict.real and verdict.simulated else "real runs" if verdict.real else "the simulator"
        why = (verdict.real or verdict.simulated).replace("\n", " ").replace("|", "\\|").strip()
        lines.append(f"| {one}, {other} | {by} | {why} |")
    return "\n".join(lines) + "\n"


def written(page: str, text: str) -> str:
    """The page with these tables."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}"


def main(arguments: list[str]) -> int:
    before = PAGE.read_text(encoding="utf-8")
    after = written(before, tables(verdicts()))
    if "--write" in arguments:
        PAGE.write_text(after, encoding="utf-8")
    elif after != before:
        print("docs/composition.md is not what the code says: python scripts/composition.py --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
