"""Plays the simulated figures of the papers cell by cell, on as many days as that takes; puts together those that are whole.

``python -m scripts.bench.papers.sweep FOLDER`` plays what FOLDER does not have yet, one seed of all figures after the other, and
says what is left and about how long that takes. ``--figures modes,heddle``: these; ``--seeds 0,1``: these, so that processes can
share the work; ``--minutes N``: ends then (0: only says what is left); ``--write docs/results``: writes each figure whose cells
are all there.

Guarantees: it takes only time that nobody else wants (nice 19, and Linux's idle class); a cell is kept with commit and hash of
its sources (:mod:`scripts.bench.cells`) and never played twice; what a cut ends is played again, and nothing else; a cell that
fails is said, and keeps no other from being played; it begins no cell that took longer with another seed than there is time left,
and none on a tree with changes or with other sources than those that are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.api import ConfigError
from orchestrator.durable_files import write_durably
from orchestrator.sim.virtual_loop import SimulationError
from scripts.bench import BENCHES
from scripts.bench.cells import Cells
from scripts.bench.papers.runner import Figure, as_kept

FIGURES = (
    "modes",
    "affinity",
    "rollart-figures",
    "expert-parallelism",
    "all-together",
    "heddle",
    "rose-figures",
    "borrowed",
    "rollpacker-figures",
    "reallocation",
    "rotation",
)
_AGAIN = 5.0  # seconds after which the end is said again, to code that went on


class CellFailedError(Exception):
    """A cell's run was refused, or did something wrong."""


@dataclass(slots=True)
class Sweep:
    """A figure's cells in a folder. Raises ConfigError where two of its cells would have one file."""

    figure: Figure
    folder: Path
    _cells: Cells = field(init=False)
    _names: dict[str, str] = field(init=False)  # of files, by name of the cell

    def __post_init__(self) -> None:
        self._cells = Cells(self.folder / self.figure.name, self.figure.name)
        self._names = {name: re.sub(r"[^\w.]+", "-", name.replace("+", "plus")) for name in self.figure.cells(False)}
        if len(set(self._names.values())) < len(self._names):
            raise ConfigError("figure", self.figure.name, "two of its cells would have one file: name them apart")

    def missing(self, seeds: Sequence[int]) -> list[tuple[int, str]]:
        """Seed and name of each cell of these seeds that is not there, seed by seed."""
        mine = [seed for seed in self.figure.seeds if seed in seeds]
        return [(seed, name) for seed in mine for name in self._names if not self._cells.has(self._key(seed, name))]

    def check(self) -> None:
        """What there is can be added to. Raises ConfigError."""
        self._cells.check_current()

    def play(self, seed: int, name: str) -> float:
        """Play and keep one; the processor seconds that it took. Raises CellFailedError, and ConfigError where the sources
        changed."""
        begun = time.process_time()
        try:
            found = as_kept(self.figure.cells(False)[name](seed))
        except (ConfigError, SimulationError) as error:
            raise CellFailedError(str(error)) from error
        seconds = time.process_time() - begun
        self._cells.keep(
            self._key(seed, name), {"cell": name, "seed": seed, "seconds": round(seconds, 2), "found": found}
        )
        return seconds

    def took(self) -> dict[str, float]:
        """Processor seconds of each cell that was played, the mean over its seeds. Raises ConfigError as :meth:`result`."""
        seconds = dict[str, list[float]]()
        for one in self._cells.found():
            seconds.setdefault(one["cell"], []).append(one["seconds"])
        return {name: statistics.mean(of) for name, of in seconds.items()}

    def seconds_left(self, missing: Sequence[tuple[int, str]]) -> float | None:
        """About what these take: as with other seeds, or as the figure's others do; None before one was played."""
        took = self.took()
        if not took:
            return None
        return sum(took.get(name, statistics.mean(took.values())) for _, name in missing)

    def result(self) -> dict[str, Any]:
        """The figure. Raises ConfigError where a cell is missing, or they are not of one clean source."""
        missing = self.missing(self.figure.seeds)
        if missing:
            raise ConfigError("cells", self.figure.name, f"{len(missing)} are missing: play them first")
        found = dict[int, dict[str, Any]]()
        kept = {(one["seed"], one["cell"]): one for one in self._cells.found()}
        for seed in self.figure.seeds:
            found[seed] = {name: kept[seed, name]["found"] for name in self._names}
        result = self.figure.put_together(found)
        seconds = sum(one["seconds"] for one in kept.values())
        detail = {**result["detail"], "cells": len(kept), "processor_seconds": round(seconds, 1)}
        return {**result, "source": self._cells.measured_on(), "detail": detail}

    def _key(self, seed: int, name: str) -> str:
        return f"{seed}-{self._names[name]}"


def play_all(sweeps: Sequence[Sweep], seeds: Sequence[int], until: float) -> int:
    """Play what is missing, one seed of all figures after the other, up to the time ``until`` of the monotonic clock, at which
    the process has to be interrupted: only cells that would be longer are not begun. One that fails is said and stays missing;
    how many did. Raises ConfigError where nothing can be added."""
    failed = 0
    for sweep in sweeps:
        sweep.check()
    for seed in seeds:
        for sweep in sweeps:
            took = sweep.took()
            for number, name in sweep.missing([seed]):
                if took.get(name, 0.0) > until - time.monotonic():
                    continue
                print(f"{sweep.figure.name}, seed {number}: {name}", file=sys.stderr, end=" ", flush=True)
                try:
                    print(f"{sweep.play(number, name):.0f} s", file=sys.stderr, flush=True)
                except CellFailedError as error:
                    failed += 1
                    print(f"FAILED: {error}", file=sys.stderr, flush=True)
    return failed


def left(sweeps: Sequence[Sweep], seeds: Sequence[int]) -> str:
    """A line a figure: cells that are left, and about how long they take."""
    lines = []
    for sweep in sweeps:
        missing = sweep.missing(seeds)
        seconds = sweep.seconds_left(missing)
        about = (
            "" if not missing else ", nobody knows how long" if seconds is None else f", about {seconds / 60:.0f} min"
        )
        lines.append(
            f"{sweep.figure.name}: {len(missing)} of {len(sweep.figure.cells(False)) * len(seeds)} cells left{about}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.papers.sweep", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("folder", type=Path, help="of the cells")
    parser.add_argument("--figures", default=",".join(FIGURES), help="names, with commas between them")
    parser.add_argument("--seeds", default="", help="numbers, with commas between them; all of a figure's")
    parser.add_argument("--minutes", type=float, default=1e6, help="after which it ends")
    parser.add_argument("--write", type=Path, help="folder of the results")
    given = parser.parse_args(arguments)
    try:
        sweeps = [Sweep(_figure(name), given.folder) for name in given.figures.split(",")]
        seeds = _numbers(given.seeds) or sorted({seed for sweep in sweeps for seed in sweep.figure.seeds})
        failed = 0
        if given.minutes > 0:
            _be_idle()
            with contextlib.suppress(KeyboardInterrupt), ended_after(60.0 * given.minutes) as until:
                failed = play_all(sweeps, seeds, until)
        print(left(sweeps, seeds))
        for sweep in sweeps:
            if given.write and not sweep.missing(sweep.figure.seeds):
                text = json.dumps(sweep.result()) + "\n"
                write_durably(given.write / f"{sweep.figure.name}.json", text)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 1 if failed else 0


def _figure(name: str) -> Figure:
    if name not in FIGURES:
        raise ConfigError("--figures", name, f"no such figure; there are {', '.join(FIGURES)}")
    figure: Figure = importlib.import_module(BENCHES[name].module).FIGURE
    return figure


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part]
    except ValueError as error:
        raise ConfigError("--seeds", text, "give whole numbers, with commas between them: 0,1") from error


@contextlib.contextmanager
def ended_after(seconds: float) -> Iterator[float]:
    """Interrupted then, as by Ctrl-C; again and again where that is not heard. Gives the time of the monotonic clock."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN)
    try:
        yield time.monotonic() + seconds
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _be_idle() -> None:
    with contextlib.suppress(OSError):  # another system, or a container that allows neither
        os.nice(19)
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


if __name__ == "__main__":
    sys.exit(main())
