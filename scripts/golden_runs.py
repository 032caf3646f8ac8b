"""Seeded simulated runs over all modes and features, and what each of them wrote, as digests: a guard of changes that must not
change what a run does.

python scripts/golden_runs.py record tests/golden/digests.json [--keep FOLDER]
python scripts/golden_runs.py compare tests/golden/digests.json [--keep FOLDER] [--only TEXT ...]

The runs are in tests/golden/runs.json: a name, what it covers, and a config with only what is not its default. A digest is the
sha256 of ``events.jsonl``, of ``ledger.jsonl``, and of the summary (less its count of callbacks), which alone says what users of
borrowed servers saw. ``compare`` exits with 1 where one differs, is missing, or a run fails. ``--keep`` writes the files that the
digests are of to FOLDER/NAME: kept before and after a change, ``diff -r`` shows what differs. The digests are of one build of
Python and NumPy, which stands beside them: record them anew where another one is used. In a run with faults ready
callbacks come in a random order, so that one more task or callback makes it another run, though nothing is wrong; one without
faults does not mind.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.config import parse_config
from orchestrator.sim.simulated_run import simulate

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "tests" / "golden" / "runs.json"
BUILD = f"Python {platform.python_version()}, NumPy {np.__version__}, {platform.system()} {platform.machine()}"
LIMIT = 30  # seconds of CPU of a run; the longest takes two


class Endless(KeyboardInterrupt):
    """A run goes on and on. Of this kind, as an event loop passes no other error on from its callbacks."""


def length_of(prompt: Any) -> float | None:
    """A user's guess of the tokens of a prompt's answers, for ``rollout.rounds.predict``; of every third prompt it has none."""
    return None if prompt.seed % 3 == 0 else float(prompt.seed % 97)


def beginning(tokens: Sequence[int]) -> Sequence[int]:
    """A summary of a context, for ``context.summary``."""
    return tokens[:8]


def play(config: dict[str, Any]) -> dict[str, bytes]:
    """What a run leaves, by file. Raises where the run cannot account for something."""
    result = simulate(parse_config(config))
    summary = {name: value for name, value in result.summary.items() if name != "callbacks"}
    text = json.dumps(summary, indent=2, sort_keys=True) + "\n"
    return {"events.jsonl": result.events, "ledger.jsonl": result.journal, "summary.json": text.encode()}


def digest(run: dict[str, Any], keep: Path | None) -> dict[str, str]:
    """Of each file of a run; of one that raises, or does not end, the error in place of them."""
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT, LIMIT)
    try:
        files = play(run["config"])
    except (Exception, Endless) as error:  # noqa: BLE001 -- whatever it is, the other runs are still played
        return {"error": f"{type(error).__name__}: {str(error)[:500]}"}
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    if keep is not None:
        folder = keep / run["name"]
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def difference(before: dict[str, str] | None, now: dict[str, str]) -> str:
    """What of a run is not what it was; empty: nothing."""
    if "error" in now:
        return now["error"]
    if before is None:
        return "was not recorded"
    return ", ".join(name for name in now if now[name] != before.get(name))


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--keep", type=Path, metavar="FOLDER")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="compare runs whose name has one of these")
    options = parser.parse_args()
    recording = options.command == "record"
    if options.only and recording:
        parser.error("--only: all runs are recorded together")
    file, keep = options.file.resolve(), options.keep.resolve() if options.keep else None
    kept = {} if recording else json.loads(file.read_text(encoding="utf-8"))
    before = kept.get("runs", {})
    if not recording and kept["build"] != BUILD:
        print(f"recorded with {kept['build']}, and this is {BUILD}: that alone may make a difference", flush=True)
    os.chdir(ROOT)  # configs name files of the repository
    signal.signal(signal.SIGVTALRM, _end)
    clock, now, wrong = time.monotonic(), dict[str, dict[str, str]](), 0
    for run in json.loads(RUNS.read_text(encoding="utf-8")):
        name = run["name"]
        if options.only and not any(text in name for text in options.only):
            continue
        found = now[name] = digest(run, keep)
        if what := found.get("error", "") if recording else difference(before.get(name), found):
            wrong += 1
            print(f"{name}: {what}", flush=True)
    if not options.only and not recording:
        for name in before.keys() - now.keys():
            wrong += 1
            print(f"{name}: is recorded, and no run any more")
    print(f"{wrong} of {len(now)} runs {'failed' if recording else 'differ'}; {time.monotonic() - clock:.0f} s")
    if recording and not wrong:  # a run that failed has no digests
        file.write_text(json.dumps({"build": BUILD, "runs": now}, indent=1) + "\n", encoding="utf-8")
    return 1 if wrong else 0


def _end(*_: object) -> None:
    raise Endless(f"has not ended after {LIMIT} s of CPU")


if __name__ == "__main__":
    sys.exit(main())
