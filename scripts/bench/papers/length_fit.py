"""Fits the simulator's drawn lengths to recorded multi-turn sets, and says how far off they are on prompts not fitted.

``python -m scripts.bench.papers.length_fit --tau-bench FILE [--write]``: of each task of each set (:mod:`.length_sets`)

- which share of the variance of log(response length) belongs to the prompt, to the trajectory within it, and to the turn: a
  nested random-effects decomposition for unequal numbers (Searle, Casella and McCulloch 1992, section 5.3), negative components
  set to 0; ``sim.tasks.NAME.prompt_share`` and ``.trajectory_share`` take them;
- ``visits``: how a prompt's mean log length in one visit goes with that in its next (Pearson), where prompts come back;
- tails: the 90th and 99th percentile over the median;
- environment times, lognormal as ``step_seconds`` and ``step_sigma`` draw them;
- the error: fitted on one half of the prompts, drawn again for the other half with its recorded numbers of turns, the
  Kolmogorov-Smirnov distance between both, per turn and per trajectory; ``independent``: the same with each turn by itself.

Guarantees: the same sets and seed give the same numbers; intervals are of 95 %, by a bootstrap over prompts. A set whose
lengths hardly vary says so (``sigma``): shares of next to nothing are worth nothing. ``at_most`` is the share of responses as
long as the longest: where it is not small, a limit cut them, and true variances are larger.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scripts.bench.papers.length_sets import built_in, tau_bench, trajectories_in

Array = NDArray[np.float64]
FILE = Path(__file__).with_name("length_fit.json")
SEED = 0
RESAMPLES = 200
COPIES = 20  # of each trajectory that is drawn again
_FEWEST = 10  # prompts, below which nothing is fitted


@dataclass(frozen=True, slots=True)
class RecordedEpisode:
    """``visit``: the how manieth time that its prompt was asked. ``said``: tokens of each response; ``waited``: seconds of its
    environment after each but the last."""

    prompt: str
    visit: int
    said: tuple[int, ...]
    waited: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class LengthShares:
    """Of log(length): its mean and standard deviation, and shares of its variance; the turn has the rest."""

    mean: float
    sigma: float
    prompt: float
    trajectory: float


Episodes = Sequence[RecordedEpisode]


def shares_of(episodes: Episodes) -> LengthShares:
    """The decomposition. Where no trajectory has two turns, what is the trajectory's cannot be told from the turn's, and is the
    turn's. Raises ValueError where fewer than two prompts are there."""
    prompts: dict[str, list[Array]] = {}
    for one in episodes:
        prompts.setdefault(one.prompt, []).append(np.log(np.array(one.said, float)))
    if len(prompts) < 2:
        raise ValueError("lengths of two prompts at least")
    everything = np.concatenate([turns for of in prompts.values() for turns in of])
    total, mean, members = len(everything), float(everything.mean()), len(episodes)
    within = between = among = weights = squares = 0.0
    for of in prompts.values():
        whole = np.concatenate(of)
        among += len(whole) * float(whole.mean() - mean) ** 2
        squares += len(whole) ** 2
        for turns in of:
            within += float(((turns - turns.mean()) ** 2).sum())
            between += len(turns) * float(turns.mean() - whole.mean()) ** 2
            weights += len(turns) ** 2 / len(whole)
    own_squares = sum(len(one.said) ** 2 for one in episodes)
    single = total == members  # of one turn each
    if single or members == len(prompts):  # two levels
        inner = (between + within) / (total - len(prompts)) if total > len(prompts) else 0.0
        outer = (among / (len(prompts) - 1) - inner) / ((total - squares / total) / (len(prompts) - 1))
        variances = [max(0.0, outer), 0.0, inner]
    else:
        turn = within / (total - members)
        size = (total - weights) / (members - len(prompts))
        trajectory = max(0.0, (between / (members - len(prompts)) - turn) / size)
        crossed = (weights - own_squares / total) / (len(prompts) - 1)
        size = (total - squares / total) / (len(prompts) - 1)
        prompt = max(0.0, (among / (len(prompts) - 1) - turn - crossed * trajectory) / size)
        variances = [prompt, trajectory, turn]
    variance = sum(variances)
    if variance <= 0.0:
        return LengthShares(mean, 0.0, 0.0, 0.0)
    return LengthShares(mean, variance**0.5, variances[0] / variance, variances[1] / variance)


def drawn_again(shares: LengthShares, episodes: Episodes, longest: int, rng: np.random.Generator) -> list[Array]:
    """Lengths of :data:`COPIES` of each episode, shape [copies, turns], with its number of turns, by its prompt's, its own and
    each turn's part, as :mod:`orchestrator.sim.task_mix` draws them: rounded at random, 1 to ``longest``."""
    rest = max(0.0, 1.0 - shares.prompt - shares.trajectory)
    parts = [shares.sigma * share**0.5 for share in (shares.prompt, shares.trajectory, rest)]
    prompts = {name: rng.standard_normal(COPIES) for name in dict.fromkeys(one.prompt for one in episodes)}
    found = []
    for one in episodes:
        own, turns = rng.standard_normal(COPIES), rng.standard_normal((COPIES, len(one.said)))
        log = shares.mean + parts[0] * prompts[one.prompt][:, None] + parts[1] * own[:, None] + parts[2] * turns
        found.append(np.clip(np.floor(np.exp(log) + rng.random(log.shape)), 1.0, float(longest)))
    return found


def distance(ours: Array, theirs: Array) -> float:
    """Kolmogorov's and Smirnov's, of two samples."""
    places = np.union1d(ours, theirs)
    below = [np.searchsorted(np.sort(one), places, side="right") / len(one) for one in (ours, theirs)]
    return float(np.abs(below[0] - below[1]).max())


def of_set(episodes: Episodes, seed: int = SEED) -> dict[str, Any]:
    """All that is said of a task of a set."""
    names = list(dict.fromkeys(one.prompt for one in episodes))
    found = shares_of(episodes)
    said = np.array([length for one in episodes for length in one.said], float)
    longest = int(said.max())
    about = {
        "prompts": len(names),
        "trajectories": len(episodes),
        "responses": len(said),
        "median_tokens": float(np.median(said)),
        "sigma": round(found.sigma, 3),
        "at_most": round(float((said == longest).mean()), 3),
        "shares": {
            "prompt": _ranged(found.prompt, lambda one: shares_of(one).prompt, episodes, seed),
            "trajectory": _ranged(found.trajectory, lambda one: shares_of(one).trajectory, episodes, seed),
        },
        "visits": _visits(episodes),
        "tails": {
            "turn": _tail(said),
            "trajectory": _tail(np.array([sum(one.said) for one in episodes], float)),
        },
        "environment": _waiting(episodes),
        "error": None,
    }
    if len(names) >= _FEWEST:
        about["error"] = _errors(episodes, names, longest, seed)
    return about


def _errors(episodes: Episodes, names: Sequence[str], longest: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng([seed, len(names)])
    fitted = {names[place] for place in rng.permutation(len(names))[: len(names) // 2]}
    shares = shares_of([one for one in episodes if one.prompt in fitted])
    held = [one for one in episodes if one.prompt not in fitted]
    independent = LengthShares(shares.mean, shares.sigma, 0.0, 0.0)
    found: dict[str, Any] = {"held_prompts": len(names) - len(fitted)}
    for name, how in (("fitted", shares), ("independent", independent)):
        drawn = drawn_again(how, held, longest, np.random.default_rng([seed, 1]))
        recorded, prompts = [np.array(one.said, float) for one in held], [one.prompt for one in held]
        found[f"turn, {name}"] = _distances(prompts, recorded, [one.ravel() for one in drawn], seed)
        wholes = [np.array([one.sum()]) for one in recorded]
        found[f"trajectory, {name}"] = _distances(prompts, wholes, [one.sum(axis=1) for one in drawn], seed)
    return found


def _distances(prompts: Sequence[str], theirs: Sequence[Array], ours: Sequence[Array], seed: int) -> dict[str, Any]:
    """The distance and its interval, both samples of the same prompts."""
    rows: dict[str, list[int]] = {}
    for place, prompt in enumerate(prompts):
        rows.setdefault(prompt, []).append(place)
    groups, rng, found = list(rows.values()), np.random.default_rng([seed, 2]), list[float]()
    for _ in range(RESAMPLES):
        chosen = [place for group in rng.integers(0, len(groups), len(groups)) for place in groups[group]]
        found.append(
            distance(np.concatenate([theirs[one] for one in chosen]), np.concatenate([ours[one] for one in chosen]))
        )
    low, high = np.quantile(found, [0.025, 0.975])
    whole = distance(np.concatenate(theirs), np.concatenate(ours))
    return {"distance": round(whole, 3), "interval": [round(float(low), 3), round(float(high), 3)]}


def _ranged(value: float, measure: Callable[[Episodes], float], episodes: Episodes, seed: int) -> dict[str, Any]:
    """A share and its interval; a prompt that is drawn twice is two prompts."""
    rows: dict[str, list[RecordedEpisode]] = {}
    for one in episodes:
        rows.setdefault(one.prompt, []).append(one)
    groups, rng, found = list(rows.values()), np.random.default_rng([seed, 3]), list[float]()
    for _ in range(RESAMPLES):
        chosen = rng.integers(0, len(groups), len(groups))
        found.append(
            measure(
                [
                    RecordedEpisode(str(number), one.visit, one.said)
                    for number, group in enumerate(chosen)
                    for one in groups[group]
                ]
            )
        )
    low, high = np.quantile(found, [0.025, 0.975])
    return {"share": round(value, 3), "interval": [round(float(low), 3), round(float(high), 3)]}


def _visits(episodes: Episodes) -> dict[str, Any] | None:
    """Of prompts that came back; None where too few did, or none of them varies."""
    means: dict[tuple[str, int], list[float]] = {}
    for one in episodes:
        means.setdefault((one.prompt, one.visit), []).append(float(np.log(one.said).mean()))
    pairs = [
        (np.mean(of), np.mean(means[prompt, visit + 1]))
        for (prompt, visit), of in means.items()
        if (prompt, visit + 1) in means
    ]
    if len({prompt for prompt, visit in means if visit}) < _FEWEST:
        return None
    first, second = np.array(pairs).T
    if not first.std() * second.std():
        return None
    return {"pairs": len(pairs), "correlation": round(float(np.corrcoef(first, second)[0, 1]), 3)}


def _tail(lengths: Array) -> dict[str, float]:
    median, ninety, last = np.quantile(lengths, [0.5, 0.9, 0.99])
    return {
        "p50": float(median),
        "p90_over_p50": round(float(ninety / median), 3),
        "p99_over_p50": round(float(last / median), 3),
    }


def _waiting(episodes: Episodes) -> dict[str, Any] | None:
    """Seconds of environment steps; None where none was timed."""
    seconds = np.array([one for episode in episodes for one in episode.waited if one > 0.0])
    if len(seconds) < _FEWEST:
        return None
    log = np.log(seconds)
    again = np.exp(np.random.default_rng([SEED, 4]).normal(log.mean(), log.std(), len(log)))
    return {
        "steps": len(seconds),
        "mean_seconds": round(float(np.exp(log.mean() + log.var() / 2)), 5),
        "sigma": round(float(log.std()), 3),
        "distance": round(distance(seconds, again), 3),
    }


def recorded_tasks() -> dict[str, list[RecordedEpisode]]:
    """Those that come with the repository, by "set/task"; a group of eight is a visit."""
    found: dict[str, list[RecordedEpisode]] = {}
    for name, path in built_in().items():
        asked: dict[tuple[str, str], int] = {}
        for one in trajectories_in(path):
            key = (one.task, one.prompt.key)
            asked[key] = asked.get(key, -1) + 1
            said = tuple(len(turn.action_ids) for turn in one.turns)
            waited = tuple(turn.environment_seconds for turn in one.turns)
            found.setdefault(f"{name}/{one.task}", []).append(RecordedEpisode(key[1], asked[key] // 8, said, waited))
    return found


def of_tau_bench(file: str) -> list[RecordedEpisode]:
    """Its assistant's messages, in words and signs; each trial is a visit."""
    return [RecordedEpisode(case.prompt, case.trial, case.outcome.said) for case in tau_bench(file)]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.papers.length_fit", description=__doc__)
    parser.add_argument(
        "--tau-bench", metavar="FILE", help="historical_trajectories/gpt-4o-airline.json, gzip or plain"
    )
    parser.add_argument("--write", action="store_true", help=f"to {FILE.name} beside this module")
    options = parser.parse_args(arguments)
    if options.write and not options.tau_bench:
        parser.error("--write: needs --tau-bench too, as the file has it")
    sets = recorded_tasks()
    if options.tau_bench:
        sets["tau-bench/airline"] = of_tau_bench(options.tau_bench)
    result = {
        "what": "shares of the variance of log(response length), and the error of lengths drawn by them",
        "how": "python -m scripts.bench.papers.length_fit --tau-bench FILE --write",
        "kind": "real: recorded runs; the lengths drawn again are drawn ones",
        "seed": SEED,
        "resamples": RESAMPLES,
        "sets": {name: of_set(episodes) for name, episodes in sets.items()},
    }
    text = json.dumps(result, indent=1) + "\n"
    if options.write:
        FILE.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
