"""How the rollout engines are divided, step by step: the parallelism planner (RollPacker 4.2; experts: section 7).

The rule: a sudden rise of preemptions over the last round of the same kind asks for twice the tensor parallelism (more KV
memory per engine); ``calm_steps`` steps without a preemption ask for half of it (less communication). A request is carried out
only if it is possible and pays.

Short rounds preempt more than long ones at any TP (the paper's figure 7), so counts of different kinds of round are never
compared: four short rounds and a long one, repeated, are no rise. The paper defines the rise as a factor of 1.05; after a
round with almost no preemptions any count would exceed it. So here the rise must also be that share of the round's responses:
one preemption is not worth a restart.

Guarantees:

* A layout is one of ``layouts``: it divides the devices of a server and all devices, so no engine spans servers (4.2). With a
  profile it must be a profiled one. A change is one doubling or one halving, at most one per step.
* A change has a cost: it is made only if the seconds per step that it is expected to gain, over ``calm_steps`` steps (before
  which the rule can hardly undo it) or the remaining ones, exceed the measured cost of changes (before the first one, the
  profile's engine start-up; else zero). The expectation for a layout is what was measured, else the profile's prediction times
  the ratio of measured to predicted time of steps without preemptions. If neither is known, the change is tried, and measured.
  A layout that failed to start is not tried again.
* With a mixture of experts, if the rule of 4.2 changes nothing: whole experts per device instead of slices of each, or the
  reverse, at the same TP, if that is expected to gain more than it costs at the step's expert imbalance (section 7). The cost
  of uneven routing comes from the profile, if it was measured at several imbalances.
* If the engine's step time differs from the profile's by more than ``divergence`` times, or the step is outside what was
  measured, for ``patience`` steps in a row, the profile is corrected with the measured times (section 7: targeted
  re-profiling; the steps themselves are the measurement, at no cost), and later plans use it. Steps outside: their median is a
  new measurement of this layout. Steps inside: the decode times of all layouts are scaled by the median ratio. A full
  re-profile is suggested too; for steps outside only once.

Pure: seconds come in as numbers. The same object serves a run, the simulator and a replay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from orchestrator.policies.parallelism.engine_profile import EngineLayout, EngineProfile

FORGET = 8
_MEMORY = 0.5  # weight of the newest of several measurements of one thing


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The rollout of one step as it was. ``preemptions``: over all engines, without those of weight updates; ``seconds``:
    until its responses were complete; ``lengths``: tokens of each response; ``prompt``: mean tokens before a response.

    ``token_seconds``: mean time between tokens, at mean batch ``batch`` per engine and mean context ``context`` (tokens); 0:
    not measured. ``imbalance``: tokens of the fullest device's experts over the mean (1: even; only with experts). ``kind``:
    kind of round, "" if all are alike; only rounds of one kind are compared.
    """

    preemptions: int
    seconds: float
    lengths: Sequence[int] = ()
    prompt: int = 1
    token_seconds: float = 0.0
    batch: float = 0.0
    context: float = 0.0
    imbalance: float = 1.0
    kind: str = ""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A measured decode step: ``batch`` sequences of ``context`` tokens, ``seconds``."""

    batch: float
    context: float
    seconds: float


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """For the next step. ``reason``: why it changes, or why not although the rule asked for it; "" if it did not ask.
    ``gain``: expected seconds per step, None: unknown; ``cost``: seconds charged. ``reprofile``: profile this layout again;
    ``scaled``: the factor by which the profile's decode times were just scaled, None: not. ``measured``: what was added to it."""

    layout: EngineLayout
    changes: bool = False
    reason: str = ""
    gain: float | None = None
    cost: float = 0.0
    reprofile: EngineLayout | None = None
    scaled: float | None = None
    measured: MeasuredStep | None = None


def layouts_of(
    devices: int, per_server: int, *, heads: int = 0, most: int = 0, experts: bool = False
) -> tuple[EngineLayout, ...]:
    """Powers of two that divide the devices, the servers and the attention ``heads`` (0: unknown); at most ``most`` (0: any).
    ``experts``: each also with whole experts per device."""
    found, tp = [], 1
    while tp <= min(devices, per_server, most or devices):
        if devices % tp == 0 and per_server % tp == 0 and (not heads or heads % tp == 0):
            found.append(EngineLayout(tp))
            if experts and tp > 1:
                found.append(EngineLayout(tp, tp))
        tp *= 2
    return tuple(found)


class ParallelismPlanner:
    """One per run. ``layouts``: from :func:`layouts_of`; ``layout``: the current one. ``expert_share``: the part of a step
    that waits for the fullest device's experts, if the profile does not know the cost of uneven routing. Raises ValueError if
    no layout is possible."""

    def __init__(
        self,
        devices: int,
        layouts: Sequence[EngineLayout],
        profile: EngineProfile | None = None,
        *,
        rise: float = 1.05,
        calm_steps: int = 4,
        divergence: float = 1.5,
        patience: int = 3,
        expert_share: float = 0.5,
    ) -> None:
        if rise < 1 or calm_steps < 1 or divergence <= 1 or patience < 1 or not 0 <= expert_share <= 1:
            raise ValueError(f"rise >= 1, calm_steps >= 1, divergence > 1, not {rise}, {calm_steps}, {divergence}")
        self.profile = profile
        self._devices = devices
        self._layouts = tuple(sorted(layouts))
        self._rise, self._calm_steps = rise, calm_steps
        self._divergence, self._patience = divergence, patience
        self._expert_share = expert_share
        self._previous: dict[str, int] = {}  # kind of round -> preemptions of the last one
        self._calm = 0  # steps on end without preemption
        self._ratio: float | None = None  # measured over predicted, of steps without preemption
        # seconds a generated token, and in which step that was known last
        self._seen: dict[tuple[EngineLayout, str], tuple[float, int]] = {}
        self._steps = 0
        self._cost: float | None = None  # of a change, measured
        self._failed: dict[EngineLayout, str] = {}
        # of steps on end that leave the profile: times over its; whether that was measured; what they were
        self._astray: list[tuple[float, bool, MeasuredStep]] = []
        self._asked = False  # for re-profiling
        self.correction = 1.0  # what decode times of the profile as it was read have been scaled by
        if not self.candidates:
            raise ValueError("no layout is possible: none divides the devices, or none of them was profiled")
        self.layout = self.candidates[0]

    def choose_first(self, lengths: Sequence[int], prompt: int) -> EngineLayout:
        """Start with the layout that the profile predicts to be best for these lengths; without a profile, with the lowest TP."""
        if self.profile is not None and lengths:
            profile = self.profile
            self.layout = min(
                self.candidates,
                key=lambda layout: (
                    profile.rollout_seconds(lengths, max(1, prompt), layout, self._devices // layout.tp),
                    layout,
                ),
            )
        return self.layout

    def state(self) -> dict[str, Any]:
        """What a resumed run continues with, for JSON: devices of each engine, how many of them share out whole experts, and what
        a change costs."""
        cost = {"cost": self._cost or 0.0, "measured": self._cost is not None}
        return {"degrees": self._degrees(self.layout), "experts": self.layout.ep, **cost}

    def _degrees(self, layout: EngineLayout) -> list[int]:
        return [layout.tp] * (self._devices // layout.tp)

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Before anything starts: continue with the result of :meth:`state`, not with :meth:`choose_first`. False: engines of so
        many devices are no longer possible, and nothing was changed."""
        wanted = state["degrees"], state.get("experts", 1)
        known = [layout for layout in self.candidates if (self._degrees(layout), layout.ep) == wanted]
        if not known:
            return False
        self.layout, self._cost = known[0], float(state["cost"]) if state["measured"] else None
        return True

    def plan_next_step(self, load: StepLoad, steps_left: int | None = None) -> LayoutPlan:
        """A step has ended: the plan for the next one. The caller carries it out and calls :meth:`confirm_change` or
        :meth:`reject_change`."""
        self._measure(load)
        previous = self._previous.get(load.kind)
        self._previous[load.kind] = load.preemptions
        self._calm = 0 if load.preemptions else self._calm + 1
        reprofile, scaled, measured = self._diverges(load)
        plan = self._plan(load, previous, steps_left)
        return replace(plan, reprofile=reprofile, scaled=scaled, measured=measured)

    def _plan(self, load: StepLoad, previous: int | None, steps_left: int | None) -> LayoutPlan:
        horizon = self._calm_steps if steps_left is None else min(self._calm_steps, steps_left)
        target, why = self._asked_for(load, previous)
        asked = LayoutPlan(self.layout, reason=why) if target is None else self._weighed(target, why, load, horizon)
        if asked.changes:
            return asked
        other, gained = self._experts(load, horizon)
        if other is None:
            return asked
        return self._weighed(other, f"{asked.reason}; {gained}" if asked.reason else gained, load, horizon)

    def _weighed(self, target: EngineLayout, why: str, load: StepLoad, horizon: int) -> LayoutPlan:
        """Whether what was asked for pays."""
        gain, cost = self._gain(target, load), self._price(target)
        if gain is not None and gain * horizon <= cost:
            found = f"{why}; but {target} would gain {gain:.3g} s a step over {horizon} steps, and costs {cost:.3g} s"
            return LayoutPlan(self.layout, False, found, gain, cost)
        if not horizon:
            return LayoutPlan(self.layout, False, f"{why}; but no step is left", gain, cost)
        return LayoutPlan(target, True, why, gain, cost)

    def confirm_change(self, layout: EngineLayout, seconds: float) -> None:
        """The change was made; ``seconds``: how long generation stood still."""
        self.layout = layout
        self._calm = 0
        self._cost = seconds if self._cost is None else _blend(self._cost, seconds)

    def reject_change(self, layout: EngineLayout, seconds: float, why: str) -> None:
        """The engines did not start in this layout, and have the old one again."""
        self._failed[layout] = why
        self._cost = seconds if self._cost is None else _blend(self._cost, seconds)

    @property
    def candidates(self) -> list[EngineLayout]:
        """The layouts that can still be chosen."""
        known = self.profile.layouts if self.profile is not None else self._layouts
        return [layout for layout in self._layouts if layout in known and layout not in self._failed]

    def _asked_for(self, load: StepLoad, previous: int | None) -> tuple[EngineLayout | None, str]:
        """The rule of 4.2."""
        base = 0 if previous is None else max(previous, len(load.lengths))
        if previous is not None and load.preemptions > previous + (self._rise - 1) * base:
            why = f"preemptions rose from {previous} to {load.preemptions}"
            return self._scaled(2 * self.layout.tp, why)
        if self._calm >= self._calm_steps:
            self._calm = 0  # asked once, then again after as many
            if self.layout.tp > 1:
                return self._scaled(self.layout.tp // 2, f"no preemption in {self._calm_steps} steps")
        return None, ""

    def _scaled(self, tp: int, why: str) -> tuple[EngineLayout | None, str]:
        found = [layout for layout in self.candidates if layout.tp == tp]
        if not found:
            largest = f"; {self.layout} stays: TP {tp} is not possible"
            return None, why + largest
        alike = [layout for layout in found if (layout.ep > 1) == (self.layout.ep > 1)]
        return (alike or found)[0], why

    def _experts(self, load: StepLoad, horizon: int) -> tuple[EngineLayout | None, str]:
        """The other way to cut the experts at the same TP, where what it gains is expected to exceed its cost."""
        others = [layout for layout in self.candidates if layout.tp == self.layout.tp and layout != self.layout]
        for other in others:
            gain = self._gain(other, load)
            if gain is not None and gain * horizon > self._price(other):
                return other, f"experts: {other} is expected to be faster at an imbalance of {load.imbalance:.3g}"
        return None, ""

    def _predicted(self, layout: EngineLayout, load: StepLoad) -> float | None:
        if self.profile is None or not load.lengths:
            return None
        engines = self._devices // layout.tp
        uneven = _imbalance(layout, load)
        seconds = self.profile.rollout_seconds(load.lengths, max(1, load.prompt), layout, engines, uneven)
        return seconds * self._waits(self.profile, layout, uneven)

    def _waits(self, profile: EngineProfile, layout: EngineLayout, imbalance: float) -> float:
        """How many times what the profile says a step takes for its fullest device; 1 where the profile has measured that."""
        return 1.0 if profile.knows_routing(layout) else 1.0 + self._expert_share * (imbalance - 1.0)

    def _expected(self, layout: EngineLayout, load: StepLoad) -> float | None:
        """Seconds of this load in a layout; None: nobody knows."""
        tokens = sum(load.lengths)
        if layout == self.layout:
            return load.seconds
        each, when = self._seen.get((layout, load.kind), (0.0, 0))
        if each and tokens and self._steps - when <= FORGET * self._calm_steps and layout.ep == 1:
            return each * tokens
        predicted = self._predicted(layout, load)
        return None if predicted is None else predicted * (1.0 if self._ratio is None else self._ratio)

    def _gain(self, target: EngineLayout, load: StepLoad) -> float | None:
        then = self._expected(target, load)
        return None if then is None else load.seconds - then

    def _price(self, target: EngineLayout) -> float:
        if self._cost is not None:
            return self._cost
        shape = self.profile.shapes.get(target) if self.profile is not None else None
        return shape.start_seconds if shape is not None else 0.0

    def _measure(self, load: StepLoad) -> None:
        tokens = sum(load.lengths)
        self._steps += 1
        if tokens:
            each = load.seconds / tokens
            now = self.layout, load.kind
            self._seen[now] = _blend(self._seen.get(now, (each, 0))[0], each), self._steps
        predicted = self._predicted(self.layout, load)
        if predicted and not load.preemptions:
            ratio = load.seconds / predicted
            self._ratio = ratio if self._ratio is None else _blend(self._ratio, ratio)

    def _diverges(self, load: StepLoad) -> tuple[EngineLayout | None, float | None, MeasuredStep | None]:
        """(the layout to profile anew, what the profile was scaled by, what was added), None where there is nothing to do."""
        if self.profile is None or not load.token_seconds:
            return None, None, None
        now = MeasuredStep(load.batch, load.context, load.token_seconds)
        uneven = _imbalance(self.layout, load)
        expected = self.profile.decode_seconds(now.batch, now.context, self.layout, uneven)
        ratio = now.seconds / (expected * self._waits(self.profile, self.layout, uneven))
        known = self.profile.covers(now.batch, now.context, self.layout)
        if known and self._agrees(ratio):
            self._astray = []
            return None, None, None
        self._astray = [*self._astray, (ratio, known, now)][-self._patience :]
        if len(self._astray) < self._patience:
            return None, None, None
        astray, self._astray = self._astray, []
        asked, self._asked = self._asked, True
        outside = [one for _, measured, one in astray if not measured]
        if outside:
            found = sorted(outside, key=lambda one: one.seconds)[len(outside) // 2]
            seconds = found.seconds / self._waits(self.profile, self.layout, uneven)
            self.profile = self.profile.extended(found.batch, found.context, self.layout, seconds, uneven)
            return None if asked else self.layout, None, found
        factor = median(found for found, _, _ in astray)
        if self._agrees(factor):
            return None if asked else self.layout, None, None
        self.profile = self.profile.scaled(factor)
        self.correction *= factor
        self._ratio = None
        return self.layout, factor, None

    def _agrees(self, ratio: float) -> bool:
        return 1 / self._divergence <= ratio <= self._divergence


def _imbalance(layout: EngineLayout, load: StepLoad) -> float:
    """What devices wait for: with slices of experts for nobody; none of a few devices has more than all tokens."""
    return min(load.imbalance, float(layout.ep))


def _blend(old: float, new: float) -> float:
    return (1 - _MEMORY) * old + _MEMORY * new
