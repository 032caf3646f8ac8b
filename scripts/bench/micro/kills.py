"""Trajectories unaccounted for, and processes left over, after ``kill -9`` of every process kind of real runs (must be 0).

Real runs of the FrozenLake demo's kind, small (stock vLLM, stock Megatron-Core, Ray, Mooncake, metadata in a redis-server,
environments in processes of their own, the embedded function host). After each trained step that follows a kill the next
process is killed, at a seeded moment. What is measured of each kill: whether the same process went on or had to be resumed, the
seconds to the first training step that began after it, and what is left of the killed process's children. When a run has
ended, nothing that carries its mark may live; its journal is recounted and compared with the store.

Interrupted, it goes on: ``python -m scripts.bench.micro.kills FOLDER --minutes M`` keeps its rows in ``FOLDER/kills.jsonl``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestrator.api import RunError
from orchestrator.events import read_events
from orchestrator.ledger import END_STATES, recount
from orchestrator.store import count_by_outcome
from scripts.bench.micro.victims import RedisProcess, alive, descendants, environment_workers, identity, marked
from scripts.bench.result import frame, now

NAME = "kills"
KINDS = ("engine", "trainer", "relay master", "function host", "environment worker", "metadata store", "orchestrator")
QUICK_KINDS = ("function host", "environment worker", "metadata store")
PER_KIND = 3
STEPS = 40  # of a run; when it has completed, and kills are left, another is started
STEP_LIMIT = 300.0  # seconds without a training step that count as standing still
END_LIMIT = 90.0  # seconds for what belongs to a dead process to be gone; Ray's agents take 63 to 66
MARK = "RL_COSERVE_BENCH_MARK"
_NAMES = {"engine": "vllm-0", "trainer": "trainer", "relay master": "mooncake_master", "function host": "reward-host"}
_CONFIG = Path("examples/frozenlake.toml")
_SMALL = (
    "run.name=kills",
    "run.minutes=600",
    "rollout.groups_per_step=4",
    "rollout.environments=32",
    "rollout.worker_restarts=1000",
    "reward.host_restarts=1000",
    "trainer.micro_batch_size=8",
    "checkpoint.every=1",
    "evaluation.prompts=8",
    "evaluation.every=0",
    "warmup.steps=5",
    "environment.backend=subprocess",
    "environment.size=4",
    "environment.warm=2",
)


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure. Needs the repository's ``examples`` folder and redis-server. Raises RunError when a run cannot go on."""
    begun = now()
    folder = Path("runs") / f"kills-{begun.replace(':', '')[:17]}"
    bench = Kills(folder, QUICK_KINDS if quick else KINDS, 1 if quick else PER_KIND, seed=0)
    while not bench.measure(3600.0):
        pass
    return bench.result(quick, nonce, begun)


class Kills:
    """One measurement in a folder, begun or continued. ``seed`` decides the order of kills and their moments."""

    def __init__(self, folder: Path, kinds: Sequence[str], per_kind: int, seed: int) -> None:
        if shutil.which("redis-server") is None:
            raise RunError("redis-server is not installed (Debian: apt-get install redis-server)")
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder.resolve()
        self._rows_file = self._folder / "kills.jsonl"
        self._random = random.Random(f"{seed}")
        self._schedule = [kind for kind in kinds for _ in range(per_kind)]
        self._random.shuffle(self._schedule)
        self._moments = [self._random.uniform(0.0, 3.0) for _ in self._schedule]
        self._away = [self._random.uniform(1.0, 8.0) for _ in self._schedule]  # seconds that Redis is gone
        self._ends_file = self._folder / "ends.jsonl"
        self._mark = secrets.token_hex(8)
        self._process: subprocess.Popen[bytes] | None = None

    # -- a measurement -----------------------------------------------------------------------------------------------

    def measure(self, seconds: float) -> bool:
        """Go on for about so long; whether it is done."""
        deadline = time.monotonic() + seconds
        redis = RedisProcess(self._folder)
        try:
            while len(done := self.rows()) < len(self._schedule):
                if time.monotonic() > deadline:
                    self._stop()
                    return False
                self._up(redis)
                self._one(len(done), redis)
            self._up(redis)
            assert self._process is not None
            if self._process.wait(STEP_LIMIT + 10.0 * STEPS) != 0:
                raise RunError(f"the last run did not complete: {self._last_words()}")
            self._note_end()
            return True
        finally:
            self._end()
            redis.kill()

    def rows(self) -> list[dict[str, Any]]:
        """One a kill so far."""
        return list(read_events(self._rows_file)) if self._rows_file.exists() else []

    def _one(self, number: int, redis: RedisProcess) -> None:
        """Wait for a step, then for a moment, kill, and see what happens."""
        kind = self._schedule[number]
        before = self._events()
        if not self._step_after(len(before), 0.0):
            assert self._process is not None
            if self._process.wait() != 0:
                raise RunError(f"a run ended without being killed: {self._last_words()}")
            return  # it completed: another one is started
        time.sleep(self._moments[number])
        pid = redis.pid if kind == "metadata store" else self._victim(kind)
        if pid is None:
            return  # it is just being replaced: try again
        children = {child: identity(child) for child in descendants(pid)} if kind != "metadata store" else {}
        before, begun = self._events(), time.monotonic()
        last = float(before[-1]["t"])
        killed_at = last + max(time.time() - self._log.stat().st_mtime, 0.0)
        if kind == "metadata store":
            redis.kill()
            time.sleep(self._away[number])
            redis.start()
        else:
            os.kill(pid, signal.SIGKILL)
        row: dict[str, Any] = {"kind": kind, "run": self._run.name, "outcome": "went on", "error": "", "pid": pid}
        if not self._step_after(len(before), killed_at):
            row["outcome"] = "resumed"
            row["error"] = "" if kind == "orchestrator" else self._last_words()
            assert self._process is not None
            if self._process.wait() == 0:
                return  # it ended before this could be seen: try again with another run
            row["orphans"], row["gone_after"] = self._orphans_of_run()
            self._up(redis)
            if not self._step_after(len(before), killed_at):
                raise RunError(f"after kill {number} ({kind}) the resumed run ended: {self._last_words()}")
        row["seconds"] = round(time.monotonic() - begun - row.get("gone_after", 0.0), 2)
        row["recovered"] = sorted(
            {str(event.get("what")) for event in self._events()[len(before) :] if event["kind"] == "recovered"}
        )
        row.setdefault("orphans", [])
        row["orphans"] += self._orphans(children)
        with self._rows_file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row, sort_keys=True) + "\n")
        print(f"{number + 1}/{len(self._schedule)} {row}", file=sys.stderr, flush=True)

    def _note_end(self) -> None:
        """A run completed: its books, and what is left of it."""
        orphans, gone_after = self._orphans_of_run()
        lives = sum(event["kind"] == "run_start" for event in self._events())
        end = {"run": self._run.name, "orphans": orphans, "gone_after": gone_after, "lives": lives, **self._books()}
        with self._ends_file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(end, sort_keys=True) + "\n")

    def result(self, quick: bool, nonce: str, begun: str = "") -> dict[str, Any]:
        """The figure, of a measurement that is done."""
        rows, ends = self.rows(), list(read_events(self._ends_file))
        kinds: dict[str, dict[str, Any]] = {}
        for kind in dict.fromkeys(row["kind"] for row in sorted(rows, key=lambda row: KINDS.index(row["kind"]))):
            found = [row for row in rows if row["kind"] == kind]
            kinds[kind] = {
                "kills": len(found),
                "went_on": sum(row["outcome"] == "went on" for row in found),
                "resumed": sum(row["outcome"] == "resumed" for row in found),
                "orphans": sum(len(row["orphans"]) for row in found),
                "median_seconds": round(statistics.median(row["seconds"] for row in found), 1),
                "most_seconds": max(row["seconds"] for row in found),
                "errors": sorted({row["error"] for row in found if row["error"]}),
            }
        orphans = sum(kind["orphans"] for kind in kinds.values()) + sum(len(end["orphans"]) for end in ends)
        wrong = orphans + sum(end["unaccounted"] for end in ends)
        every_kind = all(kinds.get(kind, {}).get("kills", 0) >= PER_KIND for kind in KINDS)
        return frame(
            NAME,
            "real",
            value=wrong,
            unit="trajectories unaccounted for, and processes left over",
            reference="kills",
            reference_value=len(rows),
            bar="0; each kind killed >= 3 times; every run completes",
            holds=None if quick and wrong == 0 else wrong == 0 and every_kind,
            detail={
                **(
                    {"shrunk": f"one kill of {', '.join(QUICK_KINDS)} each, in a run of {STEPS} steps"} if quick else {}
                ),
                "kinds": kinds,
                "ends": ends,
                "rows": rows,
            },
            quick=quick,
            nonce=nonce,
            begun=begun,
        )

    # -- the run -----------------------------------------------------------------------------------------------------

    @property
    def _run(self) -> Path:
        """The newest run; before the first one, where it will be."""
        return max(self._folder.glob("kills-[0-9]*"), default=self._folder / "kills-001")

    @property
    def _log(self) -> Path:
        return self._run / "events.jsonl"

    def _up(self, redis: RedisProcess) -> None:
        """A run that goes on: the one there is, or one that is started or resumed."""
        if self._process is not None and self._process.poll() is None:
            return
        if self._process is not None and self._process.poll() == 0:
            self._note_end()
        ended = {end["run"] for end in read_events(self._ends_file)} if self._ends_file.exists() else set()
        if (self._run / "config.json").exists() and self._run.name not in ended:
            self._launch("train", "--resume", str(self._run))
            return
        settings = [*_SMALL, f"run.steps={STEPS}", f'run.folder="{self._folder}"', f"relay.metadata_url={redis.url}"]
        known = self._run
        self._launch("train", str(_CONFIG), *settings)
        deadline = time.monotonic() + STEP_LIMIT
        while (self._run == known and ended) or not self._log.exists():
            if self._process is None or self._process.poll() is not None or time.monotonic() > deadline:
                raise RunError(f"the run did not start: {self._last_words()}")
            time.sleep(0.1)

    def _launch(self, *arguments: str) -> None:
        environment = {**os.environ, "NO_COLOR": "1", MARK: self._mark}
        with (self._folder / "output").open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "orchestrator.cli", *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _stop(self) -> None:
        """End it so that it can be resumed."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(60)

    def _end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _victim(self, kind: str) -> int | None:
        """The process of a kind that lives now."""
        assert self._process is not None
        if kind == "orchestrator":
            return self._process.pid
        if kind == "environment worker":
            found = environment_workers(self._process.pid)
            return self._random.choice(found) if found else None
        rows = dict(line.split() for line in (self._run / "processes").read_text(encoding="utf-8").splitlines())
        pid = int(rows.get(_NAMES[kind], 0))
        return pid if pid and alive(pid) else None

    # -- what happened -----------------------------------------------------------------------------------------------

    def _events(self) -> list[dict[str, Any]]:
        return list(read_events(self._log)) if self._log.exists() else []

    def _step_after(self, known: int, moment: float) -> bool:
        """Wait for a training step beyond the ``known`` events that began after ``moment`` of the log's clock, or in a later
        life; False: the run ended before that."""
        assert self._process is not None
        deadline = time.monotonic() + STEP_LIMIT
        while True:
            ended = self._process.poll() is not None
            later = False
            for event in self._events()[known:]:
                later = later or event["kind"] == "run_start"
                if event["kind"] == "step" and (later or event["t"] - event["seconds"] >= moment):
                    return True
            if ended:
                return False
            if time.monotonic() > deadline:
                raise RunError(f"no training step for {STEP_LIMIT:g} s: {self._last_words()}")
            time.sleep(0.1)

    def _last_words(self) -> str:
        text = (self._folder / "output").read_text(encoding="utf-8", errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        said = [line for line in lines[-40:] if "resume with" not in line and "report:" not in line]
        return said[-1][:300] if said else ""

    def _orphans(self, children: dict[int, str]) -> list[str]:
        """Of these processes, those that are still there."""
        return _gone({pid: name for pid, name in children.items() if name})

    def _orphans_of_run(self) -> tuple[list[str], float]:
        """Those that carry the mark of a run whose orchestrator has ended, and the seconds until there were none; they are
        killed, so that the next is not disturbed."""
        assert self._process is not None
        self._process.wait()
        begun = time.monotonic()
        while (left := marked(MARK, self._mark)) and time.monotonic() < begun + END_LIMIT:
            time.sleep(0.2)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return [f"{pid} {name}" for pid, name in left.items()], round(time.monotonic() - begun, 1)

    def _books(self) -> dict[str, Any]:
        """The journal of a run that ended, recounted and compared with the store."""
        counts = recount((self._run / "ledger.jsonl").read_text(encoding="utf-8").splitlines())
        over = abs(counts["started"] - sum(counts[state] for state in END_STATES) - counts["in_flight"])
        trained = count_by_outcome(self._run / "trajectories").get("trained", 0)
        unaccounted = over + counts["in_flight"] + abs(counts["trained"] - trained)
        return {"unaccounted": unaccounted, "ledger": counts, "trained_in_store": trained}


def _gone(processes: dict[int, str]) -> list[str]:
    deadline = time.monotonic() + END_LIMIT
    while True:
        left = [f"{pid} {name}" for pid, name in processes.items() if identity(pid) == name]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.2)


def main() -> None:
    """Go on with a measurement."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--per-kind", type=int, default=PER_KIND)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    bench = Kills(options.folder, options.kinds.split(","), options.per_kind, options.seed)
    if bench.measure(60.0 * options.minutes):
        print(json.dumps(bench.result(quick=False, nonce=""), indent=1, sort_keys=True))
    else:
        print("not done yet: call it again", file=sys.stderr)


if __name__ == "__main__":
    main()
