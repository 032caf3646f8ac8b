"""Checkpoints: atomic, verified, the last few kept.

A checkpoint is a folder ``step-000012`` with the trainer's files, ``state.json`` (step, version, journal position, the
buffer's trajectories) and ``files.json`` (size and xxh3-64 of every file). It is written under a temporary name, synced,
and renamed: a folder with its final name is complete. Loading verifies every file; a damaged checkpoint is skipped with a
message, the one before it is used.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from orchestrator.api import ContextStart, Prompt, RunError, Trajectory, Turn

_PREFIX = "step-"
_PARTIAL = ".partial-"


@dataclass(frozen=True)
class RunState:
    """What a resume needs beside the trainer's own files. ``step``: training steps done."""

    step: int
    version: int
    journal_sequence: int
    elapsed: float  # seconds of the run so far
    buffer: tuple[Trajectory, ...]
    success_history: tuple[tuple[int, float], ...] = ()
    rounds: dict[str, Any] | None = (
        None  # the long-prompt queue and its like (orchestrator.rounds); None: there are none
    )
    run_times: Mapping[str, Sequence[float]] = field(
        default_factory=dict
    )  # of test cases, by prompt: adaptive timeouts


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def begin(self, step: int) -> Path:
        """An empty folder for the trainer to write into; :meth:`commit` makes it a checkpoint."""
        self._folder.mkdir(parents=True, exist_ok=True)
        partial = self._folder / f"{_PARTIAL}{step:06d}"
        if partial.exists():
            shutil.rmtree(partial)
        (partial / "trainer").mkdir(parents=True)
        return partial

    def commit(self, partial: Path, state: RunState) -> Path:
        """Write the state, sync everything, rename. Drops the oldest beyond ``keep``."""
        (partial / "state.json").write_text(json.dumps(_state_to_json(state)), encoding="utf-8")
        files = {
            str(file.relative_to(partial)): [file.stat().st_size, _digest(file)]
            for file in sorted(partial.rglob("*"))
            if file.is_file()
        }
        (partial / "files.json").write_text(json.dumps(files, sort_keys=True), encoding="utf-8")
        for file in sorted(partial.rglob("*")):
            if file.is_file():
                _sync(file)
        final = self._folder / f"{_PREFIX}{state.step:06d}"
        if final.exists():  # written before a resume went back behind it
            shutil.rmtree(final)
        os.replace(partial, final)
        _sync(self._folder)
        for old in self.all()[: -self._keep]:
            shutil.rmtree(old)
        return final

    async def committed(self, partial: Path, state: RunState) -> Path:
        """:meth:`commit`, for the event loop; a run's own do it beside the loop (:mod:`orchestrator.runtime.checkpoints`)."""
        return self.commit(partial, state)

    def all(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(self._folder.glob(f"{_PREFIX}*")) if self._folder.exists() else []

    def newest(self) -> tuple[Path, RunState, list[str]] | None:
        """The newest intact checkpoint, its state, and what was wrong with newer ones; None when there is none at all."""
        damaged: list[str] = []
        for folder in reversed(self.all()):
            problem = verify(folder)
            if not problem:
                return (
                    folder,
                    _state_from_json(json.loads((folder / "state.json").read_text(encoding="utf-8"))),
                    damaged,
                )
            damaged.append(f"{folder.name}: {problem}")
        if damaged:
            raise RunError(f"no intact checkpoint in {self._folder}: {'; '.join(damaged)}")
        return None

    def drop_after(self, step: int) -> None:
        """Remove checkpoints of later steps (a resume went back behind them), and partial ones."""
        for folder in self.all():
            if int(folder.name.removeprefix(_PREFIX)) > step:
                shutil.rmtree(folder)
        for partial in self._folder.glob(f"{_PARTIAL}*"):
            shutil.rmtree(partial)


def verify(folder: Path) -> str:
    """What is wrong with a checkpoint folder, "" when nothing is."""
    try:
        files: dict[str, list[Any]] = json.loads((folder / "files.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        return f"files.json: {error}"
    for name, (size, digest) in files.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size or _digest(file) != digest:
            return f"{name} is damaged"
    return ""


def _digest(file: Path) -> str:
    digest = xxhash.xxh3_64()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _state_to_json(state: RunState) -> dict[str, Any]:
    return asdict(state)


def _state_from_json(data: dict[str, Any]) -> RunState:
    return RunState(
        step=int(data["step"]),
        version=int(data["version"]),
        journal_sequence=int(data["journal_sequence"]),
        elapsed=float(data["elapsed"]),
        buffer=tuple(_trajectory_from_json(item) for item in data["buffer"]),
        success_history=tuple((int(step), float(value)) for step, value in data["success_history"]),
        rounds=data.get("rounds"),
        run_times={str(prompt): [float(one) for one in times] for prompt, times in data.get("run_times", {}).items()},
    )


def _context_from_json(data: dict[str, Any] | None) -> ContextStart | None:
    return None if data is None else ContextStart(**{**data, "token_ids": tuple(data["token_ids"])})


def _trajectory_from_json(data: dict[str, Any]) -> Trajectory:
    turns = tuple(
        Turn(
            **{
                **turn,
                "observation_ids": tuple(turn["observation_ids"]),
                "action_ids": tuple(turn["action_ids"]),
                "logprobs": tuple(turn["logprobs"]),
                "versions": tuple((int(v), int(n)) for v, n in turn["versions"]),
                "context": _context_from_json(turn.get("context")),
            }
        )
        for turn in data["turns"]
    )
    return Trajectory(**{**data, "prompt": Prompt(**data["prompt"]), "turns": turns, "errors": tuple(data["errors"])})
