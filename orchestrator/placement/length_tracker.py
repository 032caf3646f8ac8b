"""Forecasts of the trajectories of a run: asked for beside the environments, and turned into priorities (Heddle 4).

Guarantees: nothing waits for a forecast: it is asked for when the prompt is known and whenever a turn is over, while the
environment works, and a turn begins with what is there; when a later one changes the order, the engine is told. A predictor
that is dead, late, or answers with no forecast (NaN, negative) costs nothing: the last one, less what was said since,
or the mean of what has ended so far stands in, said once until it answers again. Forecasts that are all equal leave the engines'
own order, said once. What ends is learned from, what was cut off too.

Priorities are steps of the logarithm (``rollout.prediction.levels`` a doubling), so that turns that are about as long do not
preempt each other; that nothing starves is the engines' own rule (:mod:`orchestrator.policies.routing.priority`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from orchestrator.api import CommandError, GenerationRequest, Prompt, RetryableError, Trajectory, Turn
from orchestrator.config.prediction_keys import PredictionSection
from orchestrator.events import EventLog
from orchestrator.placement.placer import TrajectoryPlacer
from orchestrator.policies.prediction.length_features import TrajectoryProgress, progress_of, turn_boundaries
from orchestrator.policies.prediction.length_predictor import (
    FinishedStatistics,
    LengthForecast,
    LengthOutcome,
    is_usable,
)
from orchestrator.policies.prediction.prompt_lengths import ForecastLengths
from orchestrator.proxy.gateway import LLMProxy
from orchestrator.proxy.worker_state import WorkerState

SAME = 64  # forecasts of the model in a row that are all equal: then it is said


class PredictorPort(Protocol):
    """A length predictor somewhere else (:mod:`orchestrator.placement.predictor_client`), or here."""

    async def forecast(self, progress: TrajectoryProgress) -> LengthForecast:
        """Raises RetryableError when it cannot be asked."""
        ...

    def learn(self, outcome: LengthOutcome) -> None:
        """Never waits, never fails; what cannot be told is lost."""
        ...


@dataclass(slots=True)
class _Known:
    """``number``: of its start; ``asked``: the turn of the newest question; ``forecast``: made after ``made`` tokens."""

    number: int
    forecast: LengthForecast
    said: int = 0
    made: int = 0
    question: asyncio.Task[None] | None = None
    sent: int | None = None  # priority of its turn in an engine; None: none is there


class LengthTracker:
    """One run's. ``prior``: tokens of a trajectory of which nothing is known."""

    def __init__(
        self,
        settings: PredictionSection,
        predictor: PredictorPort,
        events: EventLog,
        prior: float,
        prioritize: Callable[[Mapping[str, int]], Any] | None = None,
        placer: TrajectoryPlacer | None = None,
    ) -> None:
        self._settings = settings
        self._predictor = predictor
        self._events = events
        self._prioritize = prioritize
        self._placer = placer
        self._memory = FinishedStatistics(settings.prior_tokens or prior)  # what stands in, whatever the predictor is
        self._known: dict[str, _Known] = {}
        self._started = 0
        self._away = ""  # why it is not asked in vain any more
        self._same = 0
        self._last = -1.0
        self._changed: dict[str, int] = {}
        self._telling: asyncio.Task[None] | None = None
        self.prompts = ForecastLengths()  # what was forecast of each prompt: for rounds (rollout.rounds.predict)
        self.asked = 0
        self.answered = 0
        self.stood_in = 0  # turns that began with what stands in

    # -- a trajectory's way ------------------------------------------------------------------------------------------

    def begin(self, trajectory: str, prompt: Prompt) -> None:
        """It starts; its prompt is not known yet."""
        progress = TrajectoryProgress(trajectory, prompt.task, prompt.key, (), (), (), (), ())
        self._known[trajectory] = _Known(self._started, self._stand_in(progress))
        self._started += 1
        if self._placer is not None:
            self._placer.begin(trajectory, prompt.task, self._known[trajectory].forecast.tokens)

    def observed(self, trajectory: str, prompt: Prompt, turns: Sequence[Turn], observation: Sequence[int]) -> None:
        """What the policy is shown next. Before the first turn: the prompt."""
        known = self._known.get(trajectory)
        if known is None or turns:
            return
        opening = Turn(tuple(observation), (), (), ())
        self._ask(known, progress_of(trajectory, prompt, (opening,), 0))

    def turn_over(
        self, trajectory: str, prompt: Prompt, turns: Sequence[Turn], observation: Sequence[int], action: Sequence[int]
    ) -> None:
        """The policy has spoken, the environment begins to work. ``turns``: those before."""
        known = self._known.get(trajectory)
        if known is None:
            return
        known.said += len(action)
        known.sent = None
        if self._placer is not None:
            self._placer.turn_over(trajectory, len(action), len(observation))
        now = Turn(tuple(observation), tuple(action), (), ())
        self._ask(known, progress_of(trajectory, prompt, (*turns, now), len(turns) + 1))

    async def rank(self, request: GenerationRequest) -> GenerationRequest:
        """A turn begins: with its priority. Waits only for KV of it that is on its way to another worker."""
        known = self._known.get(request.trajectory_id)
        if known is None:
            return request
        if self._placer is not None:
            if not known.said and known.question is not None:
                await asyncio.wait([known.question])  # where it runs depends on it; ``patience`` at most
            await self._placer.before(request.trajectory_id)
        forecast = self.of(request.trajectory_id)
        self.stood_in += forecast.source != "model"
        known.sent = self._priority(known, forecast)
        return replace(request, priority=known.sent, predicted_tokens=round(forecast.tokens))

    def ended(self, trajectory: Trajectory, complete: bool, heldout: bool = False) -> None:
        """It is over, whatever ended it. ``heldout``: nothing is kept of its prompt, which no round ever asks for."""
        known = self._known.get(trajectory.id)
        if known is None:
            return
        rest = 0.0 if complete else self.of(trajectory.id).tokens
        del self._known[trajectory.id]
        if not heldout and (complete or known.forecast.source in ("model", "oracle")):
            self.prompts.record_length(trajectory.prompt, known.said + rest)
        if known.question is not None:
            known.question.cancel()
        self._changed.pop(trajectory.id, None)
        if self._placer is not None:
            self._placer.end(trajectory.id)
        if trajectory.turns:
            said = tuple(len(turn.action_ids) for turn in trajectory.turns)
            self._predictor.learn(LengthOutcome(tuple(turn_boundaries(trajectory)), said, complete))
            if complete:
                left = [sum(said[turn:]) for turn in range(len(said))]
                rows = [(math.log1p(tokens), math.log1p(len(said) - turn)) for turn, tokens in enumerate(left)]
                self._memory.add_trajectory(trajectory.task, trajectory.prompt.key, said, rows)

    def of(self, trajectory: str) -> LengthForecast:
        """The newest, less what was said since."""
        known = self._known[trajectory]
        since = known.said - known.made
        if not since:
            return known.forecast
        old = known.forecast
        return replace(
            old,
            tokens=max(1.0, old.tokens - since),
            low=max(0.0, min(old.low - since, 1.0)),
            high=max(1.0, old.high - since),
        )

    def remaining(self) -> list[float]:
        """Tokens that those in flight have before them."""
        return [self.of(trajectory).tokens for trajectory in self._known]

    def stats(self) -> dict[str, int]:
        """Counters since the start."""
        return {"asked": self.asked, "answered": self.answered, "stood_in": self.stood_in}

    # -- the predictor -----------------------------------------------------------------------------------------------

    def _ask(self, known: _Known, progress: TrajectoryProgress) -> None:
        if known.question is not None:
            known.question.cancel()
        known.question = asyncio.create_task(self._answer(known, progress), name=f"forecast {progress.trajectory}")

    async def _answer(self, known: _Known, progress: TrajectoryProgress) -> None:
        self.asked += 1
        why = ""
        try:
            async with asyncio.timeout(self._settings.patience):
                forecast = await self._predictor.forecast(progress)
            if not is_usable(forecast):
                why = f"no forecast: {forecast}"
        except RetryableError as error:
            why = str(error)
        except TimeoutError:
            why = f"no answer for {self._settings.patience:g} s"
        if why:
            self._note(why)
            forecast = self._stand_in(progress)
        else:
            self.answered += 1
            if self._away:
                self._away = ""
                self._events.emit("recovered", what="predictor", detail="it answers")
            self._note_same(forecast)
        known.forecast, known.made = forecast, progress.generated
        self._take(known, progress.trajectory)

    def _take(self, known: _Known, trajectory: str) -> None:
        forecast = self.of(trajectory)
        if self._placer is not None:
            self._placer.update(trajectory, forecast)
        if known.sent is None or self._prioritize is None:
            return
        priority = self._priority(known, forecast)
        if priority != known.sent:  # its turn is in an engine already
            known.sent = priority
            self._changed[trajectory] = priority
            if self._telling is None or self._telling.done():
                self._telling = asyncio.create_task(self._tell(), name="tell priorities")

    async def _tell(self) -> None:
        assert self._prioritize is not None
        while self._changed:
            await asyncio.sleep(0.05)  # answers come in bursts
            changed, self._changed = self._changed, {}
            await self._prioritize(changed)

    async def close(self) -> None:
        """No more questions."""
        tasks = [known.question for known in self._known.values() if known.question is not None]
        tasks += [self._telling] if self._telling is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _stand_in(self, progress: TrajectoryProgress) -> LengthForecast:
        past = self._memory.features_of(progress)
        tokens = max(1.0, math.expm1(min(past.prompt, 20.0)))
        return LengthForecast(tokens, tokens / 8.0, tokens * 8.0, math.expm1(min(past.turns, 20.0)), past.source)

    def _priority(self, known: _Known, forecast: LengthForecast) -> int:
        order, levels = self._settings.order, self._settings.levels
        if order == "longest-first":
            return -round(levels * math.log2(1.0 + forecast.tokens))
        if order == "shortest-first":  # by what it was given so far, as in Autellix
            return round(levels * math.log2(1.0 + known.said))
        return known.number if order == "fcfs" else 0

    # -- what is said ------------------------------------------------------------------------------------------------

    def _note(self, why: str) -> None:
        if not self._away:
            detail = f"{why}; the mean of what has ended stands in"[:300]
            self._events.emit("fault", what="predictor", cause="predictor", detail=detail)
        self._away = why

    def _note_same(self, forecast: LengthForecast) -> None:
        if forecast.source != "model":
            return
        self._same = self._same + 1 if forecast.tokens == self._last else 1
        self._last = forecast.tokens
        if self._same == SAME:
            detail = f"the last {SAME} forecasts are all {forecast.tokens:g} tokens: engines keep their own order"
            self._events.emit("alarm", what="prediction", detail=detail)


async def prioritize(proxy: LLMProxy, priorities: Mapping[str, int], limit: float = 60.0) -> None:
    """Tell the engines that have turns of these trajectories, all at once. One that is silent holds up no other, but for what is
    told next, by ``limit`` seconds at most."""

    async def tell(state: WorkerState) -> None:
        held = {pending.request.trajectory_id for pending in state.sent.values()}
        theirs = {name: priority for name, priority in priorities.items() if name in held}
        if theirs and state.usable:
            try:
                async with asyncio.timeout(limit):
                    await state.worker.prioritize(theirs)
            except (RetryableError, CommandError, TimeoutError) as error:
                why = str(error) or f"no answer for {limit} s"
                proxy.note_fault(f"prioritize {state.worker.name}", why)  # if it died, its completions tell

    await asyncio.gather(*map(tell, proxy.states))
