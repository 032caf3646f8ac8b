"""What idle-overhead and active-overhead share: engines in processes of their own, measured side by side."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from orchestrator.api import RunError

_MAKE_MODEL = (
    "import pathlib, sys; from scripts.bench.probes.vllm.recompute_probe import write_tiny_qwen3; "
    "write_tiny_qwen3(pathlib.Path(sys.argv[1]), 0)"
)


class Probe:
    """One engine process of ``scripts.bench.probes.vllm.overhead_probe``; one round at a time."""

    def __init__(self, kind: str, model: Path, log: IO[str]) -> None:
        self.kind = kind
        self._log = log
        self._process = subprocess.Popen(
            [sys.executable, "-m", "scripts.bench.probes.vllm.overhead_probe", kind, str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )

    def ready(self) -> dict[str, Any]:
        """Wait for the engine; what is live in its process."""
        return self.answer()

    def round(self, requests: int, tokens: int, seed: int, *, adds: int = 0, **options: bool) -> dict[str, Any]:
        """Generate, and say how long it took. Options are those of ``scripts.bench.probes.vllm.overhead_probe.Round``."""
        self.begin(requests, tokens, seed, adds=adds, **options)
        return self.answer()

    def begin(self, requests: int, tokens: int, seed: int, *, adds: int = 0, **options: bool) -> None:
        """The same without waiting; :meth:`answer` waits."""
        assert self._process.stdin is not None
        work = {"requests": requests, "tokens": tokens, "seed": seed, "adds": adds, **options}
        self._process.stdin.write(json.dumps(work) + "\n")
        self._process.stdin.flush()

    def pin(self, core: int) -> None:
        """Run on this core: those of one machine differ by some percent, and a process tends to stay where it is."""
        os.sched_setaffinity(self._process.pid, {core})

    def kill(self) -> None:
        """Idempotent."""
        self._process.kill()
        self._process.wait()

    def answer(self) -> dict[str, Any]:
        """What it says next. Raises RunError when it ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # an engine may print other lines
                answer: dict[str, Any] = json.loads(line)
                return answer
        self._log.seek(0)
        raise RunError(f"the {self.kind} engine ended: {self._log.read()[-800:]}")


@contextlib.contextmanager
def probes(kinds: tuple[str, ...]) -> Iterator[tuple[dict[str, Probe], dict[str, dict[str, Any]]]]:
    """Started engines of these kinds on one tiny model, and what each says of its hooks."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rl-coserve-overhead-")))
        subprocess.run([sys.executable, "-c", _MAKE_MODEL, str(folder)], check=True, capture_output=True)
        started: dict[str, Probe] = {}
        for kind in kinds:
            probe = Probe(kind, folder, stack.enter_context(tempfile.TemporaryFile("w+")))
            stack.callback(probe.kill)
            started[kind] = probe
        yield started, {kind: probe.ready() for kind, probe in started.items()}


def pairs_against_stock(subject: str, pairs: int) -> Iterator[tuple[int, dict[str, Probe], dict[str, dict[str, Any]]]]:
    """So many times: number, probes and hooks of a fresh engine of ``subject`` and one of stock vLLM, in turn in the other
    order of starts. Two processes of one kind differ by a percent or two, as their memory lies elsewhere: hence several."""
    for pair in range(pairs):
        with probes((subject, "stock") if pair % 2 else ("stock", subject)) as (started, hooks):
            yield pair, started, hooks


def paired(
    started: dict[str, Probe],
    subject: str,
    reference: str,
    requests: int,
    tokens: int,
    rounds: int,
    first_seed: int,
    *,
    seeded: bool = False,
) -> dict[str, Any]:
    """Both kinds at once on one core, the core changing from round to round; a warm-up each is not counted.

    Engine and loop are one thread that never waits, so tokens per second of processor time are tokens/s on a core of its
    own. Sharing the core, both meet the same cache, clock and neighbours at the same moment: measured one after the other,
    equal processes differ by ten percent on a machine that others use too, this way by one or two.
    ``ratio``: median over rounds of the subject's tokens per processor second over the reference's; ``identical``: all
    digests agreed (if ``seeded``).
    """
    rows: list[tuple[dict[str, Any], dict[str, Any]]] = []
    cores = sorted(os.sched_getaffinity(0))
    for index in range(rounds + 1):
        order = (subject, reference) if index % 2 else (reference, subject)
        for kind in order:
            started[kind].pin(cores[index % len(cores)])
            started[kind].begin(requests, tokens, first_seed + index, seeded=seeded)
        answers = {kind: started[kind].answer() for kind in order}
        if index:
            rows.append((answers[subject], answers[reference]))
    ratios = sorted(mine["tokens"] / mine["processor"] / (other["tokens"] / other["processor"]) for mine, other in rows)
    return {
        "requests": requests,
        "tokens_each": tokens,
        "rounds": rounds,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "tokens_per_s": statistics.median(mine["tokens"] / mine["processor"] for mine, _ in rows),
        "reference_tokens_per_s": statistics.median(other["tokens"] / other["processor"] for _, other in rows),
        "identical": seeded and all(mine["digest"] == other["digest"] for mine, other in rows),
    }


def with_adds(probe: Probe, requests: int, tokens: int, adds: int, rounds: int, first_seed: int) -> dict[str, Any]:
    """What ``adds`` concurrent ADDs during decode take from the running requests: tokens/s with them over without,
    until the first of the running ones ends.

    ``cost`` is the processor time that they add outside of the engine's steps (taking, holding and feeding them), over that
    of the whole decode: exact, where the ratio of whole rounds is as noisy as the machine. ``step_ratio`` is the median
    time of the steps with them waiting over without.
    """
    probe.round(requests, tokens, first_seed, adds=adds, to_first_end=True)
    rows = []
    cores = sorted(os.sched_getaffinity(0))
    for index in range(rounds):
        probe.pin(cores[index // 2 % len(cores)])
        order = (adds, 0) if index % 2 else (0, adds)
        seed = first_seed + 1 + 2 * index
        answers = {
            count: probe.round(requests, tokens, seed + (count > 0), adds=count, to_first_end=True) for count in order
        }
        rows.append((answers[adds], answers[0]))
    outside = [(mine["processor"] - mine["in_steps"], other["processor"] - other["in_steps"]) for mine, other in rows]
    ratios = {clock: [other[clock] / mine[clock] for mine, other in rows] for clock in ("wall", "processor")}
    return {
        "adds": adds,
        "requests": requests,
        "tokens_each": tokens,
        "rounds": rounds,
        "cost": statistics.median(
            (added - alone) / other["processor"] for (added, alone), (_, other) in zip(outside, rows, strict=True)
        ),
        "seconds_outside_steps": [statistics.median(column) for column in zip(*outside, strict=True)],
        "step_ratio": statistics.median(mine["in_steps"] / other["in_steps"] for mine, other in rows),
        "ratio": statistics.median(ratios["wall"]),
        "ratios": sorted(ratios["wall"]),
        "processor_ratio": statistics.median(ratios["processor"]),
    }
