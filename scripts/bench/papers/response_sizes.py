"""Sizes of RollArt's responses from the step times that it prints, where our cost model can be solved for them.

``python -m scripts.bench.papers.response_sizes [--write]``: for each printed time the tokens of a turn with which the simulated
time is the printed one (seed 0); the residual with the tokens as frozen in the scenarios, rounded, in the mean over seeds; and
the printed times that were not used, as tests. What is solved and frozen is in :mod:`scripts.bench.papers.calibration`, so that
its rows are flagged. A time that no size gives within the contexts of the paper, or that asks for another size than one that is
frozen, is written down as that, and the guess stays.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from orchestrator.sim.paper_setups import load_scenario
from scripts.bench.papers.rollart_setups import rollart
from scripts.bench.papers.run_figures import measure

FILE = Path(__file__).with_name("response_sizes.json")
SEEDS = (0, 1, 2)
TURN = 650  # tokens of a turn of SWE-bench, response and observation: 40 turns fill 28k, and training keeps its tokens
STEP, ROLLOUT_SHARE = 366.0, 0.69  # RollArt 3.1: 54 % generation and 15 % environments of a step
SERVERLESS, DEDICATED = 77.0, 158.0  # RollArt 7.3, figure 12
JOBS = 3  # concurrent ones, as 7.3 says
_TABLE_5 = (("Qwen3-32B", 741.2), ("Qwen3-30B-A3B", 327.4))  # 8 H800 and 24 H20, both phases on all
_AFFINITY = (232.0, 372.0)  # s a step at 8B: table 4 over the factors of figure 14a
_ROUNDS = 6  # a few percent of the size; simulated times do not grow evenly with it


def swe_bench(response: float, seed: int, extra: Sequence[str] = ()) -> float:
    """Seconds of generation and environments of a step of figure 3, half of cluster and batch."""
    of = "sim.tasks.swe-bench"
    sizes = [f"{of}.response_tokens={response}", f"{of}.observation_tokens={max(1, round(TURN - response))}"]
    one = measure(load_scenario("rollart-swe", ["run.steps=4", f"run.seed={seed}", *sizes, *extra], 2))
    return one.step_seconds - one.train_seconds


def gem_math(response: float, seed: int, extra: Sequence[str] = (), jobs: int = JOBS) -> float:
    """Seconds of a rollout of figure 12, rewards without a server."""
    given = ["run.steps=8", f"run.seed={seed}", f"rollout.groups_per_step={14 * jobs}"]
    given += [f"rollout.environments={84 * jobs}", f"sim.tasks.gem-math.response_tokens={response}"]
    one = measure(load_scenario("rollart-rewards", [*given, *extra]))
    return one.step_seconds - one.train_seconds


def mixed(response: float, seed: int) -> float:
    """Seconds of a step of Qwen3-8B with affinity, a 16th of cluster and batch, both GEM tasks of this size."""
    sizes = [f"sim.tasks.gem-{name}.response_tokens={response}" for name in ("math", "game")]
    return measure(rollart("8B", "affinity", 16, seed=seed, extra=sizes)).step_seconds


def over_seeds(play: Callable[[int], float]) -> float:
    """The mean."""
    return sum(play(seed) for seed in SEEDS) / len(SEEDS)


def solved(play: Callable[[float], float], printed: float, low: float, high: float) -> float | None:
    """The size between ``low`` and ``high`` with which ``play`` gives ``printed``, by halving of the bracket where a secant
    would leave it; None where neither end reaches it. ``play`` grows with the size."""
    below, above = play(low), play(high)
    if not below <= printed <= above:
        return None
    size = low
    for step in range(_ROUNDS):
        size = low + (printed - below) / (above - below) * (high - low) if step % 2 == 0 else (low + high) / 2
        found = play(size)
        if abs(found / printed - 1.0) < 0.003:
            break
        if found < printed:
            low, below = size, found
        else:
            high, above = size, found
    return size


def _against(what: str, ours: float, printed: float, source: str) -> dict[str, Any]:
    return {
        "what": what,
        "ours": round(ours, 1),
        "printed": round(printed, 1),
        "off": round(ours / printed - 1.0, 3),
        "source": source,
    }


def found_swe() -> dict[str, Any]:
    """SWE-bench by figure 3; table 5 is a test of it, and the most that contexts allow says whether it can be solved."""
    printed = ROLLOUT_SHARE * STEP
    size = solved(lambda tokens: swe_bench(tokens, 0), printed, 200.0, 400.0)
    frozen = load_scenario("rollart-swe").sim.tasks["swe-bench"].response_tokens
    tests = []
    for model, seconds in _TABLE_5:
        where = [f"sim.model={model}", "sim.tensor_parallel=4", "rollout.workers=8", "sim.fleet={H800=2, H20=6}"]
        for name, tokens in (("frozen", frozen), ("nothing but responses", TURN - 1)):
            ours = swe_bench(tokens, 0, where)
            tests.append(_against(f"{model}, 8 H800 and 24 H20, {name}", ours, seconds, "RollArt 7.4, table 5"))
    what = "generation and environments of a step, s"
    ours = over_seeds(lambda seed: swe_bench(frozen, seed))
    return {
        "task": "rollart-swe, swe-bench",
        "held": f"response and observation are {TURN} tokens a turn, so that the step's tokens and its training stay",
        "solved_tokens": None if size is None else round(size, 1),
        "frozen_tokens": frozen,
        "residual": _against(what, ours, printed, "RollArt 3.1, figure 3: 54 % and 15 % of 366 s"),
        "tests": tests,
    }


def found_gem_math() -> dict[str, Any]:
    """GEM-math at 16k by figure 12's serverless bar; the other bar is a test of it."""
    size = solved(lambda tokens: gem_math(tokens, 0), SERVERLESS, 300.0, 1500.0)
    frozen = load_scenario("rollart-rewards").sim.tasks["gem-math"].response_tokens
    local = ["rollout.workers=4", "sim.reward_slots=64"]
    source = "RollArt 7.3, figure 12"
    ours = over_seeds(lambda seed: gem_math(frozen, seed, local))
    alone = over_seeds(lambda seed: gem_math(frozen, seed, (), 1))
    return {
        "task": "rollart-rewards, gem-math",
        "held": "three jobs as one batch of 252 on the 16 GPUs",
        "solved_tokens": None if size is None else round(size, 1),
        "frozen_tokens": frozen,
        "residual": _against(
            "rollout, serverless, s", over_seeds(lambda seed: gem_math(frozen, seed)), SERVERLESS, source
        ),
        "tests": [
            _against("rollout, 4 GPUs for rewards, s", ours, DEDICATED, source),
            _against("rollout, serverless, one job on the 16 GPUs, s", alone, SERVERLESS, source),
        ],
    }


def found_mix() -> dict[str, Any]:
    """The GEM tasks of the mix by what table 4 and figure 14a come to: not frozen."""
    low, high = _AFFINITY
    middle = (low * high) ** 0.5
    size = solved(lambda tokens: mixed(tokens, 0), middle, 3000.0, 16000.0)
    frozen = load_scenario("rollart").sim.tasks["gem-math"].response_tokens
    source = "RollArt 7.4, figure 14a over table 4: 232 to 372 s, their geometric mean"
    return {
        "task": "rollart, gem-math and gem-game",
        "held": "FrozenLake, WebShop, turns and the trainer's rate",
        "solved_tokens": None if size is None else round(size, 1),
        "frozen_tokens": frozen,
        "residual": _against("a step of 8B with affinity, s", mixed(frozen, 0), middle, source),
        "why_not_frozen": "it is a range, through a difference of two small factors; what it asks of GEM-math cannot be had "
        "together with figure 12",
        "tests": [],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.papers.response_sizes", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"to {FILE.name} beside this module")
    options = parser.parse_args(arguments)
    result = {
        "what": "tokens of a response with which simulated times are the printed ones",
        "how": "python -m scripts.bench.papers.response_sizes --write",
        "kind": "simulated, beside paper",
        "seeds": list(SEEDS),
        "sizes": [found_swe(), found_gem_math(), found_mix()],
    }
    text = json.dumps(result, indent=1) + "\n"
    if options.write:
        FILE.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
