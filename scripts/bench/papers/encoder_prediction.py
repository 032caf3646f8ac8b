"""What a small language model as the length predictor's encoder is worth: Pearson's r of predicted and true length over the
better of prompt-only and history, cross-validated by task over every recorded set, turns 1 and 2 apart from turn 0.

The predictor is the run's own (:mod:`orchestrator.policies.prediction.length_predictor`) with the model of ``--model FOLDER`` in
its encoder's place, frozen (``rollout.prediction.encoder_tuned = 0``): a ridge regression reads the mean of its hidden
states. The recorded sets hold token ids. Those of closed vocabularies (FrozenLake; nim, household, calculator) are told to the
model as text, each word as its vocabulary spells it; those of SmolLM2 are its own, so the model has to be one of that family;
tau-bench (``RL_COSERVE_PREDICTION_SETS="tau-bench=PATH"``) has words. What is compared reads its own ids.

Of each task ``MOST`` trajectories, ``MEMBERS`` of a prompt, prompts drawn by the seed: what two cores read in ten minutes. Each
is learned and judged by its first three turn boundaries, and judged where it has more than two turns (nim and calculator have
not: they are learned from only). Two ways: other prompts of the same task (five folds), and other tasks (each task is judged by
what learned all others).
Intervals: :mod:`scripts.bench.papers.resampling`. A gain is shown where its interval lies above 0 and r itself is positive: on
prompts that nobody has seen a baseline may be below chance. ``--quick``: eight trajectories of a task; mechanics only.
"""

from __future__ import annotations

import os
import random
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from orchestrator.api import ConfigError
from orchestrator.placement.length_lm import FrozenModelEncoder, TokenStates
from orchestrator.policies.prediction.length_features import PROMPT_TOKENS, TAIL_TOKENS
from orchestrator.policies.prediction.length_predictor import LengthOutcome, LengthPredictor, ProgressivePredictor
from orchestrator.tasks.frozenlake import VOCABULARY
from orchestrator.tasks.mixture import MixtureTask
from scripts.bench.papers.length_sets import Case, built_in, packed, tau_bench, tau_bench_words
from scripts.bench.papers.prediction import (
    BASELINES,
    COVERAGE,
    PRIOR,
    SETS,
    TURNS,
    Tally,
    differences,
    judge,
    predictors,
)
from scripts.bench.result import frame, now

NAME = "prediction-encoder"
TAKES_MODEL = True
MOST, QUICK, MEMBERS = 60, 8, 2
FOLDS = 5
BATCH = 16
_LEAST = 20  # trajectories with more than two turns: fewer are learned from only
_ENCODER = "encoder"
_SEEN = TURNS[-1] + 1
_OVER = {"over baselines": BASELINES, "over the hashed encoder": ("progressive",)}

Encode = Callable[[str], Sequence[int]]
Pairs = list[tuple[Case, Case]]  # a case as it is recorded, and as the model reads it
Told = dict[str, Pairs]  # by task


def run(quick: bool, nonce: str, model: str = "") -> dict[str, Any]:
    """Measure. Raises ConfigError without a model, and for a set that cannot be read."""
    begun, seed, most = now(), zlib.crc32(nonce.encode()), QUICK if quick else MOST
    if not model:
        raise ConfigError("bench --model", model, "name the Hugging Face folder that scripts/smollm2.py makes")
    states = TokenStates(model, remembered=1 << 20)
    told = {name: _drawn(rows, most, seed) for name, rows in _sets(tokenizer(model)).items()}
    cost = _read(states, told)
    judged = [name for name, rows in told.items() if sum(_long(case) for case, _ in rows) >= (1 if quick else _LEAST)]
    tables: dict[str, dict[str, Any]] = {}
    for task in judged:
        tables[f"{task}, other prompts"] = compare(_by_prompts(told[task]), states, seed)
        others = [pair for name, rows in told.items() if name != task for pair in rows]
        random.Random(seed).shuffle(others)
        tables[f"{task}, other tasks"] = compare([(told[task], others)], states, seed)
    cells = [row["shown"] for table in tables.values() for row in table["over baselines"] if row["turn"]]
    return frame(
        NAME,
        "real",
        value=sum(cells),
        unit="cells (task, way of holding out, turn 1 or 2) with a gain in Pearson's r over the better of prompt-only and "
        "history that is shown at 95 %",
        reference="cells",
        reference_value=len(cells),
        bar="all of them",
        holds=None if quick else all(cells),
        detail={
            "model": states.kind,
            "lines": lines(tables),
            "trajectories": {name: len(rows) for name, rows in told.items()},
            "judged": judged,
            "cost": cost,
            "tables": tables,
            "load_average": os.getloadavg()[0],
        },
        quick=quick,
        nonce=nonce,
        begun=begun,
    )


def tokenizer(folder: str) -> Encode:
    """Ids of a text by the folder's own tokenizer."""
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return cache(lambda text: tuple(made(text, add_special_tokens=False)["input_ids"]))


def read_as_text(outcome: LengthOutcome, words: Mapping[int, str] | None, encode: Encode) -> LengthOutcome:
    """The first boundaries of a trajectory with their tokens in the model's ids. ``words``: of the recorded ids; None: they are
    the model's own."""

    def ids(recorded: Sequence[int], most: int) -> tuple[int, ...]:
        if words is None:
            return tuple(recorded[-most:])
        return tuple(encode(" ".join(words[one] for one in recorded))[-most:])

    rows = (
        replace(row, prompt_ids=ids(row.prompt_ids, PROMPT_TOKENS), tail_ids=ids(row.tail_ids, TAIL_TOKENS))
        for row in outcome.before[:_SEEN]
    )
    return replace(outcome, before=tuple(rows))


def compare(parts: Sequence[tuple[Pairs, Pairs]], states: TokenStates, seed: int) -> dict[str, Any]:
    """``parts``: what is judged, and what was learned before. The encoder over the baselines, and over our own predictor without
    it, by turn."""
    makers: dict[str, Callable[[], LengthPredictor]] = predictors(seed)
    makers[_ENCODER] = lambda: ProgressivePredictor(
        PRIOR, coverage=COVERAGE, seed=seed, encoder=FrozenModelEncoder(states)
    )
    tallies = {name: Tally() for name in makers}
    for asked, taught in parts:
        for name, make in makers.items():
            reads = int(name == _ENCODER)
            judge([pair[reads] for pair in asked], [pair[reads] for pair in taught], make(), tallies[name])
    found: dict[str, Any] = {name: tally.measures() for name, tally in tallies.items()}
    against = partial(differences, tallies, dict(found))
    for what, others in _OVER.items():
        found[what] = [against(turn, seed, _ENCODER, others) for turn in TURNS]
        for row in found[what]:
            own = found[_ENCODER][f"turn {row['turn']}"]["pearson"]
            row |= {"own": own, "shown": own > 0 and row["pearson"]["is"] == "better"}
    return found


def lines(tables: Mapping[str, dict[str, Any]]) -> list[str]:
    """For a reader: what the encoder gains after each turn, over the baselines and over our own predictor without it."""
    found = []
    for name, table in tables.items():
        for row in (row for what in _OVER for row in table[what]):
            said = row["pearson"]
            known = "shown" if row["shown"] else "worse" if said["is"] == "worse" else "not shown"
            sure = f"95 %: {said['low']:+.3f} to {said['high']:+.3f}"
            own = f"{name}, turn {row['turn']}: r {row['own']:.3f}"
            found.append(f"{own}, {said['gain']:+.3f} over {said['over']} ({sure}): {known}")
    return found


def _sets(encode: Encode) -> Told:
    """All recorded trajectories, by task. Raises ConfigError."""
    mixed = MixtureTask(shares={"nim": 1.0, "household": 1.0, "calculator": 1.0}).vocabulary
    spelled = {"frozenlake": dict(enumerate(VOCABULARY)), "tasks": dict(enumerate(mixed)), "smollm2": None}
    found: Told = {}

    def add(cases: Sequence[Case], words: Mapping[int, str] | None) -> None:
        for case in cases:
            known = replace(case, outcome=replace(case.outcome, before=case.outcome.before[:_SEEN]))
            read = replace(case, outcome=read_as_text(case.outcome, words, encode))
            found.setdefault(case.outcome.before[0].task, []).append((known, read))

    for name, path in built_in().items():
        add(packed(path), spelled[name])
    for item in os.environ.get(SETS, "").split():
        _, separator, file = item.partition("=")
        if not separator or not Path(file).is_file() or file.endswith(".xz"):
            raise ConfigError(SETS, item, "write NAME=PATH, of a file of tau-bench: of others the words are not known")
        add(tau_bench(file), tau_bench_words(file))
    return found


def _drawn(rows: Pairs, most: int, seed: int) -> Pairs:
    """The first ``MEMBERS`` of so many prompts, in the order in which they ended."""
    prompts = sorted({case.prompt for case, _ in rows})
    random.Random(seed).shuffle(prompts)
    room = dict.fromkeys(prompts[: most // MEMBERS], MEMBERS)
    found: Pairs = []
    for pair in rows:
        if room.get(pair[0].prompt, 0):
            room[pair[0].prompt] -= 1
            found.append(pair)
    return found


def _by_prompts(
    rows: Pairs,
) -> list[tuple[Pairs, Pairs]]:
    """Each fold of prompts, and the others."""
    prompts = sorted({case.prompt for case, _ in rows})
    fold = {prompt: number % FOLDS for number, prompt in enumerate(prompts)}
    return [
        (
            [pair for pair in rows if fold[pair[0].prompt] == held],
            [pair for pair in rows if fold[pair[0].prompt] != held],
        )
        for held in range(min(FOLDS, len(prompts)))
    ]


def _read(states: TokenStates, told: Told) -> dict[str, float]:
    """Have the model read all boundaries, those of alike length together; what one costs."""
    rows = [row for pairs in told.values() for _, case in pairs for row in case.outcome.before]
    distinct = {(row.prompt_ids, row.tail_ids if row.said else ()): row for row in rows}
    order = sorted(distinct.values(), key=lambda row: len(row.prompt_ids) + (len(row.tail_ids) if row.said else 0))
    begun, processor = time.monotonic(), time.process_time()
    for start in range(0, len(order), BATCH):
        states.of(order[start : start + BATCH])
    return {
        "boundaries": len(order),
        "seconds": time.monotonic() - begun,
        "processor_ms_a_boundary": 1000 * (time.process_time() - processor) / max(1, len(order)),
    }


def _long(case: Case) -> bool:
    return len(case.outcome.said) > TURNS[-1]
