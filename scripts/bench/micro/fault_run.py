"""A run under faults, as :mod:`scripts.bench.micro.kills` drives it: started, resumed, watched, and looked at when it has ended.

Each start carries a mark in its environment, which children inherit; what still carries the mark of an ended start after
``END_LIMIT`` seconds, or was its descendant, was left over. All is kept in files: who is cut continues.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.api import RunError
from orchestrator.checkpoint import Checkpoints, verify
from orchestrator.events import MemorySink, read_events
from orchestrator.ledger import END_STATES, Ledger, recount
from orchestrator.store import count_by_outcome, read_trajectories
from scripts.bench.micro.victims import alive, children, descendants, environment_workers, identity, is_still, marked

END_LIMIT = 90.0  # seconds for what belongs to an ended process to be gone; Ray's agents take 63 to 66
MARK = "RL_COSERVE_BENCH_MARK"
LOGPROB_GAP = 1e-3  # between engine and trainer; more: an engine spoke with other weights than it says
ACTOR = "ray::WorkerHost"
_NAMES = {"engine": "vllm-0", "relay master": "mooncake_master", "function host": "reward-host"}
_POLL = 0.1


@dataclass(frozen=True)
class Setting:
    """A kind of run. ``real``: with vLLM and Megatron-Core. ``limit``: seconds without a training step that count as standing
    still. ``events``: how many of each kind."""

    name: str
    real: bool
    overrides: tuple[str, ...]
    steps: int
    limit: float
    events: Mapping[str, int]
    clock: bool = False  # with libfaketime


class FaultRun:
    """The newest run of a setting in ``folder``, there or not. ``environment``: what its processes start with besides."""

    def __init__(
        self, folder: Path, setting: Setting, config: Path, overrides: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self.setting = setting
        self.folder = folder / setting.name
        self.folder.mkdir(exist_ok=True)
        self._config = config
        self._overrides = overrides
        self._environment = environment
        self._lives = self.folder / "lives.jsonl"
        self._ends = self.folder / "ends.jsonl"
        self.process: subprocess.Popen[bytes] | None = None
        self._mark = ""
        self._end_leftovers()

    # -- the run -----------------------------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """The newest run; before the first one, where it will be."""
        return max(self.folder.glob("run-[0-9]*"), default=self.folder / "run-001")

    @property
    def log(self) -> Path:
        """Its events."""
        return self.path / "events.jsonl"

    @property
    def ended(self) -> bool:
        """Whether there is no process."""
        return self.process is None or self.process.poll() is not None

    @property
    def completed(self) -> bool:
        """Whether it ended and was complete; one that was killed while it tidied up has said so, too."""
        code = None if self.process is None else self.process.poll()
        if code == 0 or not self.ended:
            return code == 0
        last = self.events()[-1:] if code in (None, -signal.SIGKILL) else []
        return any(event["kind"] == "run_end" and event["status"] == "completed" for event in last)

    def up(self) -> None:
        """A run that continues: the one there is, or one that is started or resumed."""
        if not self.ended:
            return
        if self.completed:
            self.note_end()
        ended = {end["run"] for end in self.ends()}
        if (self.path / "config.json").exists() and self.path.name not in ended:
            self.resume()
            return
        known = self.path if ended else None
        settings = [
            "run.name=run", f"run.steps={self.setting.steps}", f'run.folder="{self.folder}"', *self.setting.overrides,
            *self._overrides,
        ]  # fmt: skip
        self._launch(["train", str(self._config), *settings])
        self.wait(lambda: self.path != known and self.log.exists(), self.setting.limit, "did not start")

    def resume(self, around: Callable[[list[str]], list[str]] = list) -> None:
        """``train --resume``, in the command that ``around`` makes of it."""
        self._launch(["train", "--resume", str(self.path)], around)

    def _launch(self, arguments: list[str], around: Callable[[list[str]], list[str]] = list) -> None:
        module = "orchestrator.cli" if self.setting.real else "scripts.bench.micro.engine_twins"
        self._mark = secrets.token_hex(8)
        self._note(self._lives, {"mark": self._mark})
        environment = {**os.environ, "NO_COLOR": "1", **self._environment, MARK: self._mark}
        with (self.folder / "output").open("ab") as output:
            self.process = subprocess.Popen(
                around([sys.executable, "-m", module, *arguments]),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def wait_end(self, seconds: float) -> int:
        """Its exit code, once it has ended. Raises RunError."""
        assert self.process is not None
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise RunError(f"the run did not end within {seconds:g} s: {self.last_words()}") from None
        self.note_death()
        return code

    def end(self) -> None:
        """At once. Idempotent."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.note_death()

    def wait(self, true: Callable[[], Any], seconds: float, what: str) -> Any:
        """The first answer that is not false. Raises RunError, ``what`` being wrong, when there is none or the run has ended."""
        deadline = time.monotonic() + seconds
        while True:
            ended = self.ended
            if found := true():
                return found
            if ended or time.monotonic() > deadline:
                raise RunError(f"{what}: {self.last_words()}")
            time.sleep(_POLL / 5)

    # -- its processes -----------------------------------------------------------------------------------------------

    def pid(self, kind: str, choose: Callable[[list[int]], int] = min) -> int | None:
        """The process of a kind that lives now."""
        if self.ended:
            return None
        if kind == "environment worker":
            found = environment_workers(self.pid("orchestrator") or 0)
            return choose(found) if found else None
        try:
            rows = dict(line.split() for line in (self.path / "processes").read_text(encoding="utf-8").splitlines())
        except FileNotFoundError:
            return None
        pid = int(rows.get(_NAMES.get(kind, kind), 0))
        if kind.startswith("shard-"):  # in the file is its watcher
            pid = next(iter(children(pid)), 0)
        return pid if pid and alive(pid) else None

    def actors(self) -> set[int]:
        """Processes of engines and trainer, those that are only starting included."""
        assert self.process is not None
        return {pid for pid in descendants(self.process.pid) if ACTOR in identity(pid)}

    def note_descendants(self) -> None:
        """Those that it has now; an environment may have lost the mark."""
        assert self.process is not None
        found = {pid: name for pid in descendants(self.process.pid) if (name := identity(pid))}
        self._note(self._lives, {"mark": self._mark, "descendants": found})

    def note_death(self) -> None:
        """The process has ended: from now on nothing of it may be left."""
        if self._mark:
            self._note(self._lives, {"mark": self._mark, "died": time.time()})
        self._mark = ""

    def leftovers(self, wait: bool = False) -> list[dict[str, Any]]:
        """Of each start that has ended: what was still there after END_LIMIT (and is then killed), or how long the last of it
        took; those that are not decided yet are left out, or waited for."""
        while True:
            found: dict[str, dict[str, Any]] = {}
            for row in read_events(self._lives) if self._lives.exists() else ():
                found.setdefault(row["mark"], {}).update(row)
            open_ones = [row for row in found.values() if "died" in row and "left" not in row]
            for row in open_ones:
                known = {int(pid): name for pid, name in row.get("descendants", {}).items()}
                left = marked(MARK, row["mark"]) | {pid: name for pid, name in known.items() if is_still(pid, name)}
                age = time.time() - row["died"]
                if left and age < END_LIMIT:
                    continue
                row.update(left=[f"{pid} {name}" for pid, name in left.items()], gone_after=round(age, 1))
                self._note(self._lives, {key: value for key, value in row.items() if key != "descendants"})
                _kill_all(left)
            if not wait or all("left" in row for row in open_ones):
                return [row for row in found.values() if "left" in row]
            time.sleep(1.0)

    def _end_leftovers(self) -> None:
        """Of a bench that was cut."""
        for row in read_events(self._lives) if self._lives.exists() else ():
            _kill_all(marked(MARK, row["mark"]))

    # -- what happened -----------------------------------------------------------------------------------------------

    def events(self) -> list[dict[str, Any]]:
        """All so far."""
        return list(read_events(self.log)) if self.log.exists() else []

    def now(self) -> float:
        """On the clock of its log."""
        events = self.events()
        return float(events[-1]["t"]) + max(time.time() - self.log.stat().st_mtime, 0.0) if events else 0.0

    def step_after(self, known: int, moment: float) -> bool:
        """Wait for a training step beyond the ``known`` events that began after ``moment`` of the log's clock, or in a later
        life; False: the run ended before that. Raises RunError: neither came."""
        deadline = time.monotonic() + self.setting.limit
        while True:
            ended, later = self.ended, False
            for event in self.events()[known:]:
                later = later or event["kind"] == "run_start"
                if event["kind"] == "step" and (later or event["t"] - event["seconds"] >= moment):
                    return True
            if ended:
                return False
            if time.monotonic() > deadline:
                raise RunError(f"no training step for {self.setting.limit:g} s: {self.last_words()}")
            time.sleep(_POLL)

    def last_words(self) -> str:
        """Of its output."""
        file = self.folder / "output"
        text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
        lines = [line for line in text.splitlines() if line.strip()]
        said = [
            line for line in lines[-40:] if not any(word in line for word in ("resume with", "report:", "go on with"))
        ]
        return said[-1][:300] if said else ""

    def note_end(self) -> None:
        """A run completed: its books."""
        if self.path.name not in {end["run"] for end in self.ends()}:
            self.note_death()
            lives = sum(event["kind"] == "run_start" for event in self.events())
            self._note(self._ends, {"run": self.path.name, "lives": lives, **books_of(self.path, self.setting.real)})

    def ends(self) -> list[dict[str, Any]]:
        """Of runs that completed."""
        return list(read_events(self._ends)) if self._ends.exists() else []

    @staticmethod
    def _note(file: Path, row: Mapping[str, Any]) -> None:
        with file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row, sort_keys=True) + "\n")


def books_of(run: Path, real: bool) -> dict[str, Any]:
    """The journal of a run that ended: recounted, replayed as a resume does, compared with the store. ``wrong``: what else no run
    may do, in words."""
    lines = (run / "ledger.jsonl").read_text(encoding="utf-8").splitlines()
    counts = recount(lines)
    over = abs(counts["started"] - sum(counts[state] for state in END_STATES) - counts["in_flight"])
    trained = count_by_outcome(run / "trajectories").get("trained", 0)
    unaccounted = over + counts["in_flight"] + abs(counts["trained"] - trained)
    wrong: list[str] = []
    try:
        Ledger(MemorySink(), lambda: 0.0).restore(lines, 1 << 40, ())
    except RunError as error:
        wrong.append(str(error)[:300])
    names = read_trajectories(run / "trajectories", columns=["trajectory_id"])["trajectory_id"].to_pylist()
    if len(names) != len(set(names)):
        wrong.append(f"{len(names) - len(set(names))} trajectories are stored twice")
    damaged = [f"{one.name}: {why}" for one in Checkpoints(run / "checkpoints", 1).all() if (why := verify(one))]
    wrong += damaged
    steps = {event["step"]: event for event in read_events(run / "events.jsonl") if event["kind"] == "step"}
    alpha = json.loads((run / "config.json").read_text(encoding="utf-8"))["rollout"]["alpha"]
    wrong += [
        f"step {number}: lag {step['lag']}" for number, step in steps.items() if max(map(int, step["lag"])) > alpha
    ]
    gaps = [step["metrics"].get("logprob_gap_mean", 0.0) for step in steps.values()]
    if real and max(gaps, default=0.0) >= LOGPROB_GAP:
        wrong.append(f"log-probs of engine and trainer differ by {max(gaps):g} in the mean of a step")
    return {"unaccounted": unaccounted, "ledger": counts, "trained_in_store": trained, "wrong": wrong}


def _kill_all(processes: Mapping[int, str]) -> None:
    for pid, name in processes.items():
        if is_still(pid, name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
