"""Is it still learning, and from what it thinks: figures of a step that people look at first, and alarms that name the reason.

Guarantees: pure; an alarm is said when its bar is crossed and again only after it was not; the bars are the config's
(``trainer.logprob_gap_alarm``, ``trainer.entropy_alarm``, ``trainer.tis_alarm``, ``rollout.ess_alarm``), 0 switches off the last
three. The gap of engine and trainer is said at every step that is over it: nothing else is worth reading until that is mended.

Entropy has collapsed when the mean of the last five steps is below the bar's share of the first five's AND three of four groups
of the last five have members that all got the same reward, so that nothing is left to raise it again, AND most
answers are wrong. A low entropy alone is what learning a deterministic task looks like, and members that agree on what is right
are no wonder: neither is an alarm. It is said again only after the entropy was half as high again as the bar.
Gradients are gone when they were exactly 0 in ten steps one after the other; and a run past its half ends where
``run.signal_share`` asks for more groups with different rewards than the last twenty steps had (:meth:`LearningWatch.exhausted`).
Background: Cui et al. 2025, "The entropy mechanism of reinforcement learning for reasoning language models", 2; DAPO 3.1.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.api import Prompt, Trajectory

FIRST, LAST = 5, 5  # steps that the entropy is compared over
SILENT = 0.75  # share of groups of equal rewards from which on little is learned
SOLVED = 0.5  # share of right answers from which on agreement is no wonder
ZEROS = 10  # steps one after the other without any gradient
SIGNAL = 20  # steps that the groups with a signal are counted over
REPEATED = 0.2  # share of prompts asked before from which on they are the reason
_REMEMBERED = 250_000  # prompts
_METRICS = 32  # of reward functions, in a step


@dataclass(frozen=True, slots=True)
class AlarmBars:
    """See the module."""

    gap: float
    entropy: float
    tis: float
    ess: float


@dataclass(frozen=True, slots=True)
class Alarm:
    """``what`` is one of :data:`WORDS`."""

    what: str
    detail: str


WORDS = {
    "logprob_gap": "log-prob gap between rollout and trainer",
    "ess": "effective sample size",
    "entropy": "entropy collapse",
    "policies": "rollout and trainer disagree",
    "gradient": "nothing is learned",
    "signal": "the run ends early",
}


def answer_figures(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Lengths in generated tokens over whole episodes, and the share of episodes that ran into a limit; {} of none."""
    if not trajectories:
        return {}
    lengths = sorted(trajectory.generated_tokens for trajectory in trajectories)
    return {
        "response_tokens_mean": round(sum(lengths) / len(lengths), 6),
        "response_tokens_p95": float(lengths[math.ceil(0.95 * len(lengths)) - 1]),
        "response_tokens_max": float(lengths[-1]),
        "truncated_share": round(sum(trajectory.truncated for trajectory in trajectories) / len(trajectories), 6),
    }


def metric_means(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """What reward functions gave beside the reward, the mean of those that have it, as ``reward/NAME``: the names that most have,
    of more than 32."""
    given: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.metrics:
            given.setdefault(name, []).append(value)
    most = sorted(given, key=lambda name: (-len(given[name]), name))[:_METRICS]
    return {f"reward/{name}": float(f"{sum(given[name]) / len(given[name]):.6g}") for name in most}


class PromptRepeats:
    """The training prompts in the order they are drawn, with how many of them were drawn before. A resume draws them again,
    so it counts as if it had not been interrupted. Of more than 250,000 different ones the later ones count as new."""

    def __init__(self, prompts: Iterator[Prompt]) -> None:
        self._prompts = prompts
        self._seen: set[tuple[str, str]] = set()
        self._drawn = self._repeated = 0

    def __iter__(self) -> PromptRepeats:
        return self

    def __next__(self) -> Prompt:
        prompt = next(self._prompts)
        key = (prompt.task, prompt.key)
        self._drawn += 1
        self._repeated += key in self._seen
        if len(self._seen) < _REMEMBERED:
            self._seen.add(key)
        return prompt

    def repeated_share(self) -> dict[str, float]:
        """The share of those drawn since the last call that had been drawn before; {} when none was drawn."""
        drawn, repeated = self._drawn, self._repeated
        self._drawn = self._repeated = 0
        return {"prompts_repeated": round(repeated / drawn, 6)} if drawn else {}


class LearningWatch:
    """Compares each step with the bars. ``entropies``: of the first steps, of a run that goes on."""

    def __init__(self, bars: AlarmBars, entropies: Sequence[float] = ()) -> None:
        self._bars = bars
        self.entropies: tuple[float, ...] = tuple(entropies)
        self._recent: deque[tuple[float, float, float, float]] = deque(maxlen=LAST)  # see `_entropy`
        self._said: set[str] = set()
        self._zeros = 0  # steps without a gradient, up to now
        self._signals: deque[float] = deque(maxlen=SIGNAL)  # share of groups whose members differ

    def check_step(self, step: int, values: Mapping[str, float], success: float, lag: float) -> list[Alarm]:
        """Of the trainer's figures of a step, counted from 0; ``success``: its share of right answers, ``lag``: the mean of its
        trajectories, in versions, when trained."""
        behind = f"after step {step + 1}"
        found = []
        gap = values.get("logprob_gap_mean", 0.0)
        if gap > self._bars.gap:
            why = "engine and trainer compute different policies from the same weights (dtype, temperature, model code)"
            found.append(Alarm("logprob_gap", f"{why}: mean {gap:.4g} over {self._bars.gap:.4g} {behind}"))
        why = self._distance(gap, lag)
        ess = values.get("ess", 1.0)
        if self._crossed("ess", ess < self._bars.ess):
            found.append(Alarm("ess", f"{why}: {ess:.4g} under rollout.ess_alarm = {self._bars.ess:.4g} {behind}"))
        outside = values.get("tis_capped", 0.0)
        if self._crossed("policies", 0 < self._bars.tis < outside):
            detail = f"{why}: the ratio of {outside:.1%} of the tokens reaches its bound, over trainer.tis_alarm = "
            found.append(Alarm("policies", f"{detail}{self._bars.tis:.1%} {behind}{_spread(values)}"))
        if "entropy" in values:
            found += self._entropy(behind, values, success)
        self._signals.append(1 - values.get("groups_silent_share", 0.0))
        self._zeros = self._zeros + 1 if values.get("grad_norm") == 0 else 0
        if self._crossed("gradient", self._zeros >= ZEROS):
            if any(self._signals[-back] for back in range(1, ZEROS + 1)):
                why = "although groups had members with different rewards: does the loss reach the parameters?"
            else:
                why = f"no group had members with different rewards, {success:.0%} of the last answers were right: set "
                why += "rollout.dynamic_sampling, or give it prompts that are harder or easier"
            found.append(Alarm("gradient", f"{why}; the gradient was 0 in {ZEROS} steps, {behind}"))
        return found

    def exhausted(self, done: float, share: float) -> Alarm | None:
        """Why the run is to end although it has steps left: past its half, fewer groups of the last steps than ``share`` had
        members with different rewards. ``done``: the part of the run that is over, from 0 to 1."""
        if not share or done < 0.5 or len(self._signals) < SIGNAL:
            return None
        found = sum(self._signals) / SIGNAL
        if not found < share:
            return None
        detail = f"{found:.0%} of the groups of the last {SIGNAL} steps had members with different rewards, under "
        return Alarm("signal", f"{detail}run.signal_share = {share:.0%}: more steps would teach it next to nothing")

    def _entropy(self, behind: str, values: Mapping[str, float], success: float) -> list[Alarm]:
        if len(self.entropies) < FIRST:
            self.entropies = (*self.entropies, values["entropy"])
        silent, repeated = values.get("groups_silent_share", 0.0), values.get("prompts_repeated", 0.0)
        self._recent.append((values["entropy"], silent, success, repeated))
        if len(self.entropies) < FIRST or len(self._recent) < LAST:
            return []
        first = sum(self.entropies) / FIRST
        now, silent, right, repeated = (sum(column) / LAST for column in zip(*self._recent, strict=True))
        low = now < self._bars.entropy * first
        if not low and now < 1.5 * self._bars.entropy * first and "entropy" in self._said:
            return []
        if not self._crossed("entropy", low and ((silent > SILENT and right < SOLVED) or "entropy" in self._said)):
            return []
        if repeated > REPEATED:
            why = f"it memorises its prompts, {repeated:.0%} were asked before: add more of them"
        else:
            clips = ", trainer.clip_high" if values.get("clip_fraction") else ""  # elsewhere it does nothing
            why = f"it gives only one answer per prompt: raise trainer.entropy_coefficient{clips} or trainer.kl_coefficient, "
            why += "or lower trainer.learning_rate"
        detail = f"{why}; {now:.3g} {behind}, {now / first:.0%} of the {first:.3g} of the first {FIRST} steps "
        detail += f"(trainer.entropy_alarm = {self._bars.entropy:.0%}), {silent:.0%} of the groups with equal rewards"
        return [Alarm("entropy", detail)]

    def _crossed(self, what: str, beyond: bool) -> bool:
        """Whether it is said now."""
        new = beyond and what not in self._said
        (self._said.add if beyond else self._said.discard)(what)
        return new

    def _distance(self, gap: float, lag: float) -> str:
        """Why the policies differ: the engine's arithmetic, or time."""
        if gap > 0.5 * self._bars.gap:
            return (
                f"engine and trainer, not staleness: they differ with the same weights already (log-prob gap {gap:.3g})"
            )
        if lag > 0:
            return f"staleness, {lag:.2g} versions on average: lower rollout.alpha or trainer.learning_rate (gap {gap:.3g})"
        return f"neither staleness nor the gap with the same weights ({gap:.3g}); look for a rising gradient norm"


def _spread(values: Mapping[str, float]) -> str:
    if "tis_p01" not in values or "tis_p99" not in values:
        return ""
    return f" (1 % of the weights below {values['tis_p01']:.3g}, 1 % above {values['tis_p99']:.3g})"
