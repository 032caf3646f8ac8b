"""The length predictor's process, as its run sees it (Heddle 4.1: a microservice, asked beside the environments).

Guarantees: after :meth:`start` it answers; a question ends in one answer or one RetryableError when the process dies or answers
nonsense (who asks has a time limit, for one that hangs), and never fails the run; it is started again, with what it had learned
up to its last save, ``restarts`` times in a row after pauses that grow, and left dead after that; it ends with this process,
because its standard input does. It lags, and is not asked more, while it has not read ``BACKLOG`` bytes, or has owed an answer
for longer than anybody waits for one: else each would come too late, for good.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from dataclasses import fields
from pathlib import Path

from orchestrator.api import ConfigError, RetryableError, RunError
from orchestrator.api.jsontext import parse_object
from orchestrator.child_process import ChildProcess
from orchestrator.config.prediction_keys import PredictionSection
from orchestrator.policies.prediction.length_features import TrajectoryProgress
from orchestrator.policies.prediction.length_predictor import LengthForecast, LengthOutcome

START_LIMIT = 60.0  # seconds
BACKLOG = 4 << 20
PAUSE_FIRST, PAUSE_LIMIT = 1.0, 30.0  # seconds before the second restart in a row; doubles
_STEADY = 300.0  # seconds of life after which restarts are counted anew
_LINE_LIMIT = 1 << 20  # bytes of an answer


class PredictorProcess(ChildProcess):
    """See the module. ``state``: the file that it keeps what it learned in; ``prior``: tokens of a trajectory at first."""

    name = "predictor"

    def __init__(
        self, settings: PredictionSection, prior: float, seed: int, state: Path | None = None, log: Path | None = None
    ) -> None:
        super().__init__(log)
        self._restarts, self._patience = settings.restarts, settings.patience
        self._arguments = json.dumps(
            {
                "prediction": settings.model_dump(mode="json"),
                "prior": prior,
                "seed": seed,
                "state": str(state.resolve()) if state is not None else "",
            }
        )
        self._answers: dict[int, asyncio.Future[LengthForecast]] = {}
        self._owed: dict[int, float] = {}  # questions that it has not answered, whoever still waits: since when
        self._questions = 0
        self._pump: asyncio.Task[None] | None = None
        self._ready = False

    async def start(self) -> None:
        """Start it and wait until it answers. Raises ConfigError when it refuses its settings, RunError otherwise."""
        await self._launch()
        self._pump = asyncio.create_task(self._keep(), name="keep the predictor")

    async def stop(self) -> None:
        """Let it save what it learned; kill it if need be. Idempotent."""
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)
            self._pump = None
        self._give_up("it was stopped")
        process = self._process
        if process is not None and process.returncode is None and process.stdin is not None:
            process.stdin.close()
            try:
                async with asyncio.timeout(5.0):
                    await process.wait()
            except TimeoutError:
                await super().stop()

    async def forecast(self, progress: TrajectoryProgress) -> LengthForecast:
        """See :class:`orchestrator.placement.length_tracker.PredictorPort`."""
        loop, number = asyncio.get_running_loop(), self._questions + 1
        if self._owed and loop.time() - next(iter(self._owed.values())) > self._patience:
            raise RetryableError("the predictor lags behind")
        self._questions = number
        self._write({"id": number, "forecast": _plain(progress)})
        self._owed[number] = loop.time()
        answer: asyncio.Future[LengthForecast] = loop.create_future()
        self._answers[number] = answer
        try:
            return await answer
        finally:
            self._answers.pop(number, None)

    def learn(self, outcome: LengthOutcome) -> None:
        """See :class:`orchestrator.placement.length_tracker.PredictorPort`."""
        with contextlib.suppress(RetryableError):  # a lesson less; whoever asks is told why
            lesson = {"before": [*map(_plain, outcome.before)], "said": outcome.said, "complete": outcome.complete}
            self._write({"learn": lesson})

    def _write(self, message: dict[str, object]) -> None:
        process = self._process
        if not self._ready or process is None or process.stdin is None or process.stdin.is_closing():
            raise RetryableError("the predictor is not up")
        if process.stdin.transport.get_write_buffer_size() > BACKLOG:
            raise RetryableError("the predictor lags behind")
        process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _launch(self) -> None:
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "orchestrator.placement.predictor_service", self._arguments]
        await self._start_process(command, {**os.environ, **threads}, START_LIMIT, _LINE_LIMIT)

    def _heard(self, line: bytes) -> None:
        self._ready = True

    async def _keep(self) -> None:
        """Deliver answers; when it dies, start it again."""
        loop, restarts = asyncio.get_running_loop(), 0
        while True:
            since = loop.time()
            why = await self._deliver()
            self._ready = False
            self._give_up(why)
            await super().stop()
            restarts = 0 if loop.time() - since > _STEADY else restarts
            while not self._ready:
                if restarts >= self._restarts:
                    return
                await asyncio.sleep(min(PAUSE_FIRST * 2 ** (restarts - 1), PAUSE_LIMIT) if restarts else 0.0)
                restarts += 1
                try:
                    await self._launch()
                except (RunError, ConfigError, OSError) as error:
                    self._give_up(str(error))

    async def _deliver(self) -> str:
        """Until it dies or says something else than answers: why."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        while True:
            try:
                line = await process.stdout.readline()
                if not line:
                    return "the predictor died"
                number, forecast = read_forecast(line)
            except ValueError as error:
                return f"the predictor answered nonsense: {error!r}"[:200]
            self._owed.pop(number, None)
            answer = self._answers.pop(number, None)
            if answer is not None and not answer.done():
                answer.set_result(forecast)

    def _give_up(self, why: str) -> None:
        answers, self._answers = self._answers, {}
        self._owed.clear()
        for answer in answers.values():
            if not answer.done():
                answer.set_exception(RetryableError(why))


def _plain(progress: TrajectoryProgress) -> dict[str, object]:
    """For JSON. ``asdict`` copies each token by itself, milliseconds of the event loop for a trajectory of many turns."""
    return {item.name: getattr(progress, item.name) for item in fields(progress)}


def read_forecast(line: bytes) -> tuple[int, LengthForecast]:
    """The number of the question and its answer. Raises ValueError for anything else, infinite numbers included."""
    data = parse_object(line, finite=True)
    number, source = data.pop("id", None), data.get("source")
    if (
        type(number) is not int
        or not isinstance(source, str)
        or data.keys() != {item.name for item in fields(LengthForecast)}
    ):
        raise ValueError(f"no forecast: {line!r:.100}")
    if any(
        type(value) not in (int, float) or not abs(value) < 1e18 for name, value in data.items() if name != "source"
    ):
        raise ValueError(f"no finite numbers: {line!r:.100}")
    return number, LengthForecast(**data)
