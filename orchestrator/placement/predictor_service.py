"""The length predictor in a process of its own: questions on standard input, answers on standard output, JSON lines.

    python -m orchestrator.placement.predictor_service SETTINGS    started by
    :mod:`orchestrator.placement.predictor_client`, never by hand

Guarantees: only who started it can speak to it (a pipe, no port); it ends when that pipe is closed, however its parent ended;
forecasts go before what is to be learned, of which the oldest is left out, and counted in its log, where more than ``LESSONS``
bytes wait; what was learned is in the file ``state`` after every ``SAVE_EVERY`` trajectories and
at the end (written aside, renamed), and is where the next one begins; a file that cannot be used is said and left behind. What
is no question ends it: its parent is broken then.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Any

from orchestrator.api import ConfigError
from orchestrator.config.prediction_keys import PredictionSection
from orchestrator.placement.forecast_setup import make_predictor
from orchestrator.policies.prediction.length_features import TrajectoryProgress
from orchestrator.policies.prediction.length_predictor import (
    HistoryPredictor,
    LengthOutcome,
    LengthPredictor,
    ProgressivePredictor,
)

SAVE_EVERY = 256  # trajectories
LINE_LIMIT = 16 << 20  # bytes: an outcome of very many turns
LESSONS = 64 << 20  # bytes
_LESSON = b'{"learn"'  # how one begins


def progress_of(data: dict[str, Any]) -> TrajectoryProgress:
    """Of a JSON object. Raises KeyError or TypeError."""
    lists = ("prompt_ids", "tail_ids", "heard", "said", "tool_seconds")
    return TrajectoryProgress(data["trajectory"], data["task"], data["prompt"], *(tuple(data[name]) for name in lists))


class Service:
    """One predictor and its file."""

    def __init__(self, policy: LengthPredictor, state: Path | None) -> None:
        self.policy = policy
        self._state = state
        self._lessons: deque[bytes] = deque()
        self._waiting = 0  # their bytes
        self.left_out = 0
        self._unsaved = 0
        self._more = asyncio.Event()

    def take(self, line: bytes) -> bytes | None:
        """A line of the parent's; what to answer."""
        if line.startswith(_LESSON):
            self._lessons.append(line)
            self._waiting += len(line)
            while self._waiting > LESSONS:
                self._waiting -= len(self._lessons.popleft())
                self.left_out += 1
                if not self.left_out & (self.left_out - 1):
                    print(f"lags: {self.left_out} trajectories are not learned from", file=sys.stderr, flush=True)
            self._more.set()
            return None
        message = json.loads(line)
        forecast = self.policy.forecast(progress_of(message["forecast"]))
        return json.dumps({"id": message["id"], **asdict(forecast)}).encode() + b"\n"

    async def learn(self) -> None:
        """Take up what came, between questions. Runs until cancelled."""
        while True:
            await self._more.wait()
            self._more.clear()
            while self._lessons:
                self.study()
                await asyncio.sleep(0)

    def study(self) -> None:
        """The oldest lesson."""
        line = self._lessons.popleft()
        self._waiting -= len(line)
        lesson = json.loads(line)["learn"]
        before = tuple(progress_of(one) for one in lesson["before"])
        self.policy.learn(LengthOutcome(before, tuple(lesson["said"]), lesson["complete"]))
        self._unsaved += 1
        if self._unsaved >= SAVE_EVERY:
            self.save()

    def save(self) -> None:
        """Where there is a file, and something to save."""
        self._unsaved = 0
        if self._state is not None and isinstance(self.policy, ProgressivePredictor | HistoryPredictor):
            aside = self._state.with_suffix(".part")
            aside.write_bytes(self.policy.dump())
            aside.replace(self._state)


async def serve(service: Service) -> None:
    """Until standard input ends."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(LINE_LIMIT)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    learning = asyncio.create_task(service.learn(), name="learn")
    out = sys.stdout.buffer
    out.write(b'{"ready": true}\n')
    out.flush()
    try:
        while line := await reader.readline():
            if learning.done():
                learning.result()
            answer = service.take(line)
            if answer is not None:
                out.write(answer)
                out.flush()
    finally:
        learning.cancel()
    service.save()


def main(arguments: list[str]) -> int:
    """Settings are JSON: ``prediction`` (the config's section), ``prior``, ``seed``, ``state``."""
    settings = json.loads(arguments[0])
    state = Path(settings["state"]) if settings["state"] else None
    section = PredictionSection.model_validate(settings["prediction"])
    prior, seed = settings["prior"], settings["seed"]
    policy: LengthPredictor | None = None
    if state is not None and state.exists():
        try:
            policy = make_predictor(section.model_copy(update={"start": str(state)}), prior, seed)
        except ConfigError as error:
            print(f"begins anew: {error}", file=sys.stderr, flush=True)
    policy = policy or make_predictor(section, prior, seed)
    try:
        asyncio.run(serve(Service(policy, state)))
    except (BrokenPipeError, KeyboardInterrupt):
        return 0
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)
