"""A pretrained model before and after RL alone: right answers to 450 held-out questions that neither training nor its evaluations
asked, three seeds, and a control whose rewards are shuffled.

Real: SmolLM2-135M-Instruct (``models/smollm2``, ``scripts/smollm2.py``) by ``examples/smollm2.toml``. Of the held-out
questions the first 150 are the validation split: the run's own evaluations, by which a recipe may be chosen; the others are asked
once before and once after, greedily, and compared question by question (an exact McNemar test). Of these the share of well-formed
answers, and the gain among questions whose answers were well formed both times.

A run takes half an hour, so it is made in sessions: ``python -m scripts.bench.papers.pretrained_learns --minutes 30`` begins the
first one that is missing, or resumes it, and ends after so many minutes. Exit codes: 0 a run was finished and kept, 4 the same
command continues it, 3 none is missing. ``--only shuffled-0`` names one of them, ``--result`` prints the figure of what there is.
``--quick`` makes two steps and asks 16 questions: it shows that the measurement works, not that the bar is met.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

from orchestrator.observe.report.run_log import load_run
from orchestrator.observe.report.summary import summary_of
from scripts.bench.cells import Cells
from scripts.bench.probes.probe_run import run_probe
from scripts.bench.probes.shuffled_reward import shuffled
from scripts.bench.probes.training_run import train_for
from scripts.bench.result import frame, now

NAME = "pretrained"
RUNS = ("rewards-0", "shuffled-0", "rewards-1", "rewards-2")
CELLS = Path("runs/cells") / NAME
VALIDATION, TEST = 150, 450
START = (0.15, 0.6)
_CONFIG, _TASK = Path("examples/smollm2.toml"), Path("examples/largest.py")
_MODEL, _FOLDER = "models/smollm2", Path("runs/pretrained")
_RECIPE = (f"task.heldout_maps={VALIDATION + TEST}", f"evaluation.prompts={VALIDATION}")
_SHORT = ("run.steps=2", f"task.heldout_maps={VALIDATION + TEST}", "evaluation.prompts=4", "evaluation.every=0")
_SHUFFLED = (f"reward.function={shuffled.__module__}:{shuffled.__name__}",)
_ASKING = 3600.0  # seconds for the questions, at most
_SHOWN = 12  # answers that are kept in words
_CURVE = ("entropy", "groups_silent_share", "logprob_gap_mean", "response_tokens_mean")


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure. Needs ``models/smollm2``. Raises RunError when a run fails, ConfigError for runs kept of other sources."""
    begun = now()
    if quick:
        with tempfile.TemporaryDirectory(prefix="rl-coserve-pretrained-") as folder:
            row = session(RUNS[0], Path(folder), math.inf, _SHORT, 16)
        assert row is not None
        return result([row], True, {"started": begun, "nonce": nonce})
    kept_cells().check_current()
    while measure_next(math.inf) != 3:
        pass
    return kept_result({"started": begun, "nonce": nonce})


def measure_next(seconds: float, only: str = "") -> int:
    """The exit code: see the module."""
    cells = kept_cells()
    name = next((name for name in RUNS if only in ("", name) and not cells.has(name)), None)
    if name is None:
        return 3
    row = session(name, _FOLDER, seconds, _RECIPE, TEST)
    if row is None:
        print(f"{name}: interrupted with a checkpoint; the same command continues it", file=sys.stderr)
        return 4
    cells.keep(name, row)
    found = compared(row["before"], row["after"])
    print(
        f"{name}: {found['before']} -> {found['after']} of {found['questions']}, p = {found['p']:.2g}", file=sys.stderr
    )
    return 0


def kept_result(detail: dict[str, Any]) -> dict[str, Any]:
    """The figure of the runs that were kept, which names what they were measured on."""
    kept = kept_cells()
    return result(kept.found(), False, detail) | {"source": kept.measured_on()}


def kept_cells() -> Cells:
    """Of the recipe and the task as they are now: others have other files."""
    recipe = _CONFIG.read_bytes() + _TASK.read_bytes() + " ".join(_RECIPE).encode()
    return Cells(CELLS, NAME, f"{zlib.crc32(recipe):08x}")


def session(name: str, folder: Path, seconds: float, recipe: tuple[str, ...], questions: int) -> dict[str, Any] | None:
    """Bring a run on for so long; what is kept of it where it is complete."""
    arm, _, seed = name.rpartition("-")
    overrides = [f"run.seed={seed}", *recipe, *(_SHUFFLED if arm == "shuffled" else ())]
    begun = time.monotonic()
    path, complete = train_for(seconds, _CONFIG, folder, name, overrides)
    if not complete:
        return None
    log = load_run(path)
    summary = summary_of(log)
    asked = [str(VALIDATION), str(questions), str(_CONFIG), *overrides]
    before, after = (
        run_probe("answers", [str(model), *asked], package="scripts.bench.probes", limit=_ASKING)["rows"]
        for model in (_MODEL, path / "model-final")
    )
    return {
        "run": name,
        "overrides": overrides,
        "before": [[row["right"], row["well_formed"]] for row in before],
        "after": [[row["right"], row["well_formed"]] for row in after],
        "said": [
            {"question": one["question"], "before": one["said"], "after": other["said"]}
            for one, other in zip(before[:_SHOWN], after[:_SHOWN], strict=True)
        ],
        "validation": summary["success_curve"],
        "curve": [
            {"step": step.number, "reward": round(step.reward_mean, 4), "seconds": round(step.period, 1)}
            | {name: round(step.metrics[name], 4) for name in _CURVE}
            for step in log.steps
        ],
        "ledger": summary["ledger"],
        "steps": summary["steps"],
        "seconds": summary["seconds"],
        "last_session_seconds": round(time.monotonic() - begun, 1),
    }


def compared(before: list[list[bool]], after: list[list[bool]]) -> dict[str, Any]:
    """Question by question: success before and after, the gain with its 95 % interval (normal, of paired differences) and the
    exact two-sided McNemar p; the same of those that were well formed both times. Rows are (right, well formed)."""
    both = [(one[0], other[0]) for one, other in zip(before, after, strict=True) if one[1] and other[1]]
    return {
        **_paired([(one[0], other[0]) for one, other in zip(before, after, strict=True)]),
        "format": [round(sum(row[1] for row in rows) / len(rows), 4) for rows in (before, after)],
        "well_formed": _paired(both) if both else None,
    }


def _paired(pairs: list[tuple[bool, bool]]) -> dict[str, Any]:
    total = len(pairs)
    won = sum(after and not before for before, after in pairs)
    lost = sum(before and not after for before, after in pairs)
    gain = (won - lost) / total
    spread = 1.959964 * math.sqrt(max(0.0, won + lost - (won - lost) ** 2 / total)) / total
    changed = won + lost
    tail = sum(math.comb(changed, fewer) for fewer in range(min(won, lost) + 1)) / 2**changed
    return {
        "questions": total,
        "before": round(sum(before for before, _ in pairs) / total, 4),
        "after": round(sum(after for _, after in pairs) / total, 4),
        "gain": round(gain, 4),
        "low": round(gain - spread, 4),
        "high": round(gain + spread, 4),
        "p": min(1.0, 2 * tail),
    }


def result(rows: list[dict[str, Any]], quick: bool, detail: dict[str, Any]) -> dict[str, Any]:
    """The figure from finished runs."""
    table = {row["run"]: compared(row["before"], row["after"]) for row in rows}
    learned = {name: found for name, found in table.items() if not name.startswith("shuffled")}
    flat = [found["low"] <= 0 for name, found in table.items() if name not in learned]
    met = all(
        found["low"] > 0 and found["p"] < 0.05 and found["well_formed"] and found["well_formed"]["low"] > 0
        for found in learned.values()
    )
    starts = [found["before"] for found in learned.values()]
    met = met and all(START[0] <= start <= START[1] for start in starts) and bool(flat) and all(flat)
    return frame(
        NAME,
        "real",
        value=min(found["gain"] for found in learned.values()),
        unit="right answers to held-out questions, after RL less before, worst seed",
        reference="right answers before RL",
        reference_value=starts[0],
        bar="each of three seeds gains (exact McNemar p < 0.05), among well-formed answers too; the start is between "
        f"{START[0]:g} and {START[1]:g}; the control with shuffled rewards does not gain",
        holds=None if quick else met and set(table) == set(RUNS),
        detail={
            "table": table,
            "runs": [{key: row[key] for key in row if key not in ("before", "after")} for row in rows],
            "recipe": [str(_CONFIG), *(_SHORT if quick else _RECIPE)],
            "samples": sum(2 * found["questions"] for found in table.values()),
            **({"shrunk": ["one run", *_SHORT]} if quick else {}),
            **detail,
        },
        quick=quick,
    )


def main(arguments: list[str]) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.papers.pretrained_learns", description=__doc__)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--only", choices=RUNS, default="")
    parser.add_argument("--result", action="store_true")
    options = parser.parse_args(arguments)
    if options.result:
        print(json.dumps(kept_result({"in_parts": True}), indent=1, sort_keys=True))
        return 0
    kept_cells().check_current()
    return measure_next(60 * options.minutes, options.only)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
