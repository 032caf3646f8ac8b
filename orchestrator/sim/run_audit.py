"""The simulator's own bookkeeping, sharing no code with the ledger, the buffer or the staleness policy.

It sees the outside of the system only: the journal's lines as they are written, the batches that reach the trainer, the
versions that were published. From these it checks, as things happen:

* each id starts once, moves as a trajectory can, ends at most once, and nothing is trained that was not taken;
* each trajectory was taken within the versions of the trainer that its mode allows (alpha in ``async``, RollArt 6.2), is of
  one version where the mode carries nothing over an update, and is trained at most once, in a group of at least two;
* each token that is trained on is the one that the policy said, in order, once, with the version that said it;
* no more trajectories run than there are environments, and no more wait to be taken than alpha times the environments and
  what is launched for a batch;
* with short and long rounds, no batch holds a prompt of an epoch before all of the epoch before it are trained or in that
  batch; at the end each prompt was trained once, or is accounted for (:class:`EpochAccount`);
* what is fed to the trainer is taken, whole, at the version it will be trained at, never beside a training step, and a
  prefix of the batch that is trained (:class:`TrainerCallAudit`).

A violation is noted, not raised: the system under test must not be able to swallow it. :meth:`check_end` adds what can only
be said at the end, when the journal, the totals, the trainer's history and the store must agree.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from orchestrator.api import RunError, TrainBatch, TrainSample, VersionSpans, merge_spans
from orchestrator.api.jsontext import parse
from orchestrator.config import Config
from orchestrator.policies.batching.round_planner import RoundPlanner
from orchestrator.sim.seeded_draws import synthetic_logprobs
from orchestrator.sim.simulated_speech import Speech

_NEXT = {
    "": ("running",),
    "running": ("scoring", "evicted_stale", "aborted_redundant", "deferred", "filtered", "failed"),
    "scoring": ("buffered", "evicted_stale", "aborted_redundant", "deferred", "filtered", "failed"),
    "buffered": ("taken", "evicted_stale", "aborted_redundant", "deferred", "filtered", "failed"),
    "taken": ("trained", "evicted_stale", "aborted_redundant", "deferred", "filtered", "failed"),
    "trained": ("rolled_back",),
    "rolled_back": ("buffered", "failed"),
}
_OPEN = ("running", "scoring", "buffered", "taken", "rolled_back")
_BUSY = ("running", "scoring")
_ENDS = ("trained", "evicted_stale", "aborted_redundant", "deferred", "filtered", "failed")
_ONE_VERSION = {"sync": 0, "sync_plus": 0, "one_off": 1}  # mode -> largest lag when trained (RollArt 7.1)
_decode = json.JSONDecoder().raw_decode
_MOST = 1 << 40  # prompts that a run may number
_SPARSE = 100_000  # numbers up to the largest one, for each that is there
_KEEP_VIOLATIONS = 50  # one cause repeats itself; the first few say it


class RunAudit:
    """Feed it with :meth:`check_journal_line`, :meth:`check_batch`, :meth:`record_training` and :meth:`record_version`."""

    def __init__(self, config: Config, speech: Speech | None = None) -> None:
        self._config = config
        self._speech = speech or Speech(config, None)
        self.violations: list[str] = []
        self.count = 0
        self.unaccounted: dict[str, str] = {}  # trajectory -> why nobody can say what became of it
        self.states: dict[str, str] = {}
        self.groups: dict[str, str] = {}
        self.taken_at: dict[str, int] = {}  # trajectory -> the trainer's published version when it was taken
        self.trained_ids: dict[str, int] = {}  # trajectory -> training step
        self.spans: dict[tuple[str, int], list[VersionSpans]] = {}  # what the engines said: one entry an attempt
        self.version = 0
        self.lags: dict[int, int] = {}
        self._busy = 0
        self._buffered = 0
        launched = math.ceil(config.batch_trajectories * config.redundancy)
        if config.rollout.dynamic_concurrency:
            launched = max(launched, config.rollout.environments)
        self._capacity = config.rollout.alpha * config.rollout.environments + launched  # RollArt 6.2: O(alpha E)
        self._sequence = -1
        self._resuming = False
        self._dead = False
        self._starts: list[tuple[int, str]] = []  # (number of a prompt, group), where rounds number them

    def add_violation(self, violation: str) -> None:
        """Record a violation."""
        if self._dead:
            return
        self.count += 1
        if len(self.violations) < _KEEP_VIOLATIONS:
            self.violations.append(violation)

    # What it sees.

    def kill(self) -> None:
        """The process was killed: whatever its remains still do has not happened. Until :meth:`begin_life`."""
        self._dead = True

    def begin_life(self) -> None:
        """A new life begins: until :meth:`end_replay`, states may go back to the checkpoint's."""
        self._dead, self._resuming = False, True

    def end_replay(self) -> None:
        """The new life has replayed its journal: one by one it said what is back in the buffer, and what is not."""
        self._resuming = False
        self._check_room("after a resume the last one")

    def _check_room(self, name: str) -> None:
        if self._buffered > self._capacity:
            self.add_violation(
                f"journal: {name} is trajectory {self._buffered} in the buffer, which holds {self._capacity}"
            )
            self._capacity *= 2  # a leak repeats itself, and would hide what else is wrong

    def check_journal_line(self, line: str) -> None:
        """A complete line of the journal."""
        if self._dead:
            return
        record, _ = _decode(line)
        name, state, sequence = record["id"], record["state"], record["seq"]
        if sequence != self._sequence + 1:
            self.add_violation(f"journal: number {sequence} after {self._sequence}")
        self._sequence = sequence
        before = self.states.get(name, "")
        allowed = _NEXT.get(before, ())
        if self._resuming and before in _OPEN:
            allowed = ("buffered", "failed")
        if state not in allowed:
            self.add_violation(f"journal: {name} went from {before or 'nothing'} to {state}")
        self.states[name] = state
        self._busy += (state in _BUSY) - (before in _BUSY)
        self._buffered += (state == "buffered") - (before == "buffered")
        if not self._resuming:
            self._check_room(name)
        if state == "running":
            self.groups[name] = record["group"]
            if "prompt" in record:
                self._starts.append((record["prompt"], record["group"]))
            if self._busy > self._config.rollout.environments:
                self.add_violation(f"journal: {name} is trajectory {self._busy} under way at once, with "
                          f"{self._config.rollout.environments} environments")  # fmt: skip
        elif state == "taken":
            self.taken_at[name] = self.version
        elif state == "failed" and not record.get("cause"):
            self.add_violation(f"journal: {name} failed without a cause")

    def record_response(self, trajectory_id: str, turn: int, versions: VersionSpans) -> None:
        """An engine finished a response. A request that was sent again has several; only one reaches the trajectory."""
        self.spans.setdefault((trajectory_id, turn), []).append(versions)

    def record_version(self, version: int) -> None:
        """The trainer's ``publish`` has answered: from now on its version is this one."""
        if not self._dead:
            self.version = version

    def check_batch(self, batch: TrainBatch, version: int) -> None:
        """A batch has reached the trainer, which holds ``version``."""
        if self._dead:
            return
        if batch.version != version:
            self.add_violation(f"batch {batch.step}: made for version {batch.version}, the trainer holds {version}")
        if batch.step != version:
            self.add_violation(f"batch {batch.step}: step number at version {version}")
        members: dict[str, int] = {}
        seen: dict[str, None] = {}
        for sample in batch.samples:
            key = f"{sample.trajectory_id}/{sample.first_turn}"
            if key in seen:
                self.add_violation(f"batch {batch.step}: {sample.trajectory_id} is in it twice")
            seen[key] = None
            if not sample.first_turn:
                members[sample.group_id] = members.get(sample.group_id, 0) + 1
            self._sample(sample, batch, version)
        rollout = self._config.rollout
        if len(members) != rollout.groups_per_step:
            self.add_violation(f"batch {batch.step}: {len(members)} groups instead of {rollout.groups_per_step}")
        for group, size in members.items():
            if not 2 <= size <= rollout.group_size:
                self.add_violation(f"batch {batch.step}: group {group} has {size} members")

    def record_training(self, batch: TrainBatch) -> None:
        """The trainer has finished a step."""
        if self._dead:
            return
        for sample in batch.samples:
            self.trained_ids[sample.trajectory_id] = batch.step

    def roll_back(self, trained: dict[str, int]) -> None:
        """A trainer was loaded from a checkpoint."""
        self.trained_ids = trained

    # What it concludes.

    def _sample(self, sample: TrainSample, batch: TrainBatch, version: int) -> None:
        name = sample.trajectory_id
        if name in self.trained_ids:
            self.add_violation(f"{name} is trained in step {batch.step} and was in step {self.trained_ids[name]}")
        if self.states.get(name) != "taken":
            self.add_violation(f"{name} is trained while the journal says {self.states.get(name, 'nothing')}")
        if self.groups.get(name) != sample.group_id:
            self.add_violation(f"{name} is trained in group {sample.group_id}, started in {self.groups.get(name)}")
        if sample.first_turn:  # a later context: its first tokens may be younger than the trajectory
            problem = self._tokens(sample, version)
            if problem:
                self.add_violation(f"{name}, context from turn {sample.first_turn}: {problem}")
            return
        lag = self.taken_at.get(name, version) - (sample.versions[0][0] if sample.versions else -1)
        self.lags[lag] = self.lags.get(lag, 0) + 1
        mode, alpha = self._config.run.mode, self._config.rollout.alpha
        if lag < 0 or (lag > alpha and mode != "areal"):  # which looks at the start only
            self.add_violation(f"{name} was taken with lag {lag}, alpha is {alpha}")
        if mode in _ONE_VERSION and sample.versions:
            numbers = dict.fromkeys(number for number, _ in sample.versions)
            oldest = version - min(numbers)
            if len(numbers) > 1 or oldest > _ONE_VERSION[mode]:
                self.add_violation(f"{name} has versions {list(numbers)} and is trained at {version}, in mode {mode}")
        problem = self._tokens(sample, version)
        if problem:
            self.add_violation(f"{name}: {problem}")

    def _tokens(self, sample: TrainSample, version: int) -> str:
        generated = sum(sample.loss_mask)
        if not len(sample.token_ids) == len(sample.loss_mask) == len(sample.logprobs):
            return "tokens, mask and log-probs differ in length"
        if sum(count for _, count in sample.versions) != generated:
            return f"{generated} generated tokens, versions for {sum(count for _, count in sample.versions)}"
        numbers = [number for number, _ in sample.versions]
        if numbers != sorted(numbers) or numbers[0] < 0 or numbers[-1] > version:
            return f"impossible versions {numbers} at version {version}"
        position, turn, total = 0, sample.first_turn, len(sample.token_ids)
        made_by = [number for number, count in sample.versions for _ in range(count)]
        while position < total:
            begin = position
            while position < total and not sample.loss_mask[position]:
                position += 1
            if position == begin:
                return f"turn {turn} has no observation"
            count = self._said(sample, begin, position, turn)
            end = position + count
            if not count or not all(sample.loss_mask[position:end]):
                return f"the tokens of turn {turn} are not those that the policy said"
            if tuple(sample.logprobs[position:end]) != synthetic_logprobs(sample.token_ids[position:end]):
                return f"the log-probs of turn {turn} are not those of its tokens"
            if made_by[0] == made_by[count - 1]:  # they are in order
                said: VersionSpans = ((made_by[0], count),)
            else:
                said = merge_spans((number, 1) for number in made_by[:count])
            if said not in self.spans.get((sample.trajectory_id, turn), ()):
                return f"the versions of turn {turn}, {said}, are not those of the engine"
            del made_by[:count]
            position, turn = end, turn + 1
        return ""

    def _said(self, sample: TrainSample, begin: int, position: int, turn: int) -> int:
        """How many tokens from ``position`` on the policy said in this turn; 0: not what it says. ``begin``: of what it saw
        in it. A summary that was asked for is shorter than a turn may be."""
        config, context = self._config, self._config.context
        limits = [min(self._speech.most, config.rollout.engine.max_model_len - position)]
        if context.strategy == "summarise" and sample.token_ids[begin:position] == context.ask:
            limits.append(min(limits[0], context.summary_tokens or self._speech.most))
        for limit in limits:
            expected = self._speech.response(sample.token_ids[:position], sample.trajectory_id, turn, limit)
            if sample.token_ids[position : position + len(expected)] == expected:
                return len(expected)
        return 0

    def totals(self) -> dict[str, int]:
        """How many ids are in which end state, by the journal's lines alone."""
        counts = {"started": len(self.states), **dict.fromkeys(_ENDS, 0), "in_flight": 0}
        for state in self.states.values():
            counts[state if state in _ENDS else "in_flight"] += 1
        return counts

    def check_end(
        self,
        ledger: Mapping[str, Any],
        recounted: Mapping[str, Any],
        stored: Iterable[tuple[str, str]],
        *,
        completed: bool,
        resumed: bool,
    ) -> None:
        """The run has ended; ``stored`` are (id, outcome) of the store. What was in flight when a life ended is not
        in it (there was nobody to write it), so that after a resume only what was trained is compared."""
        mine = self.totals()
        for name, value in mine.items():
            if ledger.get(name) != value:
                self.add_violation(
                    f"totals: the ledger says {name} = {ledger.get(name)}, its journal's lines say {value}"
                )
            if recounted.get(name) != value:
                self.add_violation(f"totals: ledger.recount says {name} = {recounted.get(name)}, here {value}")
        still_open = {name: state for name, state in self.states.items() if state in _OPEN}
        self.unaccounted.update(still_open)
        if completed and still_open:
            names = [f"{name} ({state})" for name, state in still_open.items()]
            self.add_violation(f"the run has completed with {len(names)} in flight: {', '.join(names[:5])}")
        trained = [name for name, state in self.states.items() if state == "trained"]
        self._compare("the trainer's history", sorted(trained), sorted(self.trained_ids))
        outcomes: dict[str, str] = {}
        for name, outcome in stored:
            if name in outcomes:
                self.add_violation(f"store: {name} is in it as {outcomes[name]!r} and as {outcome!r}")
            outcomes[name] = outcome.partition(":")[0]
        self._compare(
            "the store", sorted(trained), sorted(n for n, outcome in outcomes.items() if outcome == "trained")
        )
        if completed and not resumed:
            for name, state in self.states.items():
                if state in _ENDS and outcomes.get(name) != state:
                    self.unaccounted[name] = "the store and the journal differ"
                    self.add_violation(f"store: {name} is {outcomes.get(name, 'not there')}, the journal says {state}")

    def check_epochs(self, lines: Iterable[str], planner: RoundPlanner) -> None:
        """The run has ended, with short and long rounds: each prompt that was drawn was trained once, or is accounted for."""
        tries: dict[int, dict[str, None]] = {}
        rules, given_up = planner.rules, planner.given_up
        found = account_epochs(lines, rules.epoch, planner.outstanding, given_up, planner.drawn)
        for violation in found.violations:
            self.add_violation(f"rounds: {violation}")
        for line in self._starts:
            tries.setdefault(line[0], {})[line[1]] = None
        for number in given_up:
            if len(tries.get(number, ())) < rules.tries:
                self.add_violation(f"rounds: prompt {number} is given up after {len(tries.get(number, ()))} groups")

    def _compare(self, what: str, journal: list[str], other: list[str]) -> None:
        if journal != other:
            known, present = dict.fromkeys(journal), dict.fromkeys(other)
            only = [name for name in journal if name not in present], [name for name in other if name not in known]
            for name in (*only[0], *only[1]):
                self.unaccounted[name] = f"{what} and the journal differ"
            self.add_violation(
                f"{what} and the journal differ in what was trained: journal only {only[0][:5]}, {what} only {only[1][:5]}"
            )


class TrainerCallAudit:
    """What the pipeline asks of the trainer during one life, before any fault is injected."""

    def __init__(self, audit: RunAudit) -> None:
        self._audit = audit
        self._fed: list[TrainSample] = []
        self._version = -1  # of what was fed since the last training step
        self._busy = ""

    @contextmanager
    def feeding(self, samples: Sequence[TrainSample], version: int) -> Iterator[None]:
        """A feed has begun."""
        note, states = self._audit.add_violation, self._audit.states
        if not samples:
            note("an empty feed")
        for name in (sample.trajectory_id for sample in samples):
            if states.get(name) != "taken":
                note(f"{name} was fed while the journal says {states.get(name, 'nothing')}")
        if self._fed and version != self._version:
            note(f"fed at version {version} after version {self._version}")
        if version != self._audit.version:
            note(f"fed at version {version} while the trainer holds {self._audit.version}")
        self._fed += samples
        self._version = version
        with self._alone("feed"):
            yield

    @contextmanager
    def training(self, batch: TrainBatch) -> Iterator[None]:
        """A training step has begun."""
        fed, self._fed = self._fed, []
        if fed and self._version != batch.version:
            self._audit.add_violation(f"batch {batch.step}: trained at version {batch.version}, fed at {self._version}")
        if list(batch.samples[: len(fed)]) != fed:
            self._audit.add_violation(
                f"batch {batch.step}: the {len(fed)} samples that were fed are not its first ones"
            )
        elif fed and len(fed) < len(batch.samples) and batch.samples[len(fed)].group_id == fed[-1].group_id:
            self._audit.add_violation(f"batch {batch.step}: group {fed[-1].group_id} was fed in part")
        with self._alone("train_step"):
            yield

    @contextmanager
    def _alone(self, call: str) -> Iterator[None]:
        if self._busy:
            self._audit.add_violation(f"{call} was asked for during {self._busy}")
        self._busy = call
        try:
            yield
        finally:
            self._busy = ""


@dataclass
class EpochAccount:
    """Whether each prompt of the data set was trained exactly once an epoch: said by the ledger's journal, not by who planned it.

    With ``rollout.rounds`` each start in the journal carries the number of its prompt in the training stream
    (:meth:`orchestrator.ledger.Ledger.start`). From these lines alone, and the list of what the run says is still to be trained,
    :func:`account_epochs` finds every prompt that was trained twice, is missing, or was overtaken by a later epoch. It shares
    no code with the planner (:mod:`orchestrator.policies.batching.round_planner`) or the ledger's totals.

    What became of each prompt, by number. ``trained``: in which training step; ``discarded``: by dynamic sampling."""

    trained: dict[int, int] = field(default_factory=dict)
    discarded: tuple[int, ...] = ()
    started: int = 0  # prompts
    violations: list[str] = field(default_factory=list)


def account_epochs(
    lines: Iterable[str],
    epoch: int,
    left: Collection[int] = (),
    given_up: Collection[int] = (),
    drawn: int | None = None,
) -> EpochAccount:
    """Read a journal. ``epoch``: prompts in the data set, 0: it never repeats; ``left``: numbers that the run still has to
    train; ``given_up``: those that it says failed too often; ``drawn``: those from this one on are still to be drawn, though
    a life that was rolled back may have started them (None: all that were ever started are drawn). Raises RunError for a
    journal that holds whole lines which are no records."""
    prompt_of: dict[str, tuple[int, str]] = {}  # trajectory -> (number, group)
    last: dict[str, tuple[str, str, int]] = {}  # trajectory -> (state, cause, training step)
    for line in lines:
        try:
            record = parse(line)
        except ValueError:  # half a line: the process was killed while it wrote
            continue
        if not isinstance(record, dict) or "id" not in record:
            continue
        try:
            name, number = str(record["id"]), record.get("prompt")
            if record["state"] == "running" and number is not None:
                if type(number) is not int or not 0 <= number < _MOST:
                    raise ValueError(f"prompt {number!r:.40}")
                prompt_of[name] = number, str(record["group"])
            last[name] = str(record["state"]), str(record.get("cause", "")), int(record.get("step", -1))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise RunError(f"the journal has a line that is not a record ({error!r}): {line!r:.200}") from error
    found = EpochAccount()
    groups: dict[int, dict[str, int]] = {}  # number -> group -> step
    unwanted: dict[int, None] = {}
    numbers: dict[int, None] = {}
    for name, (number, group) in prompt_of.items():
        state, cause, step = last[name]
        numbers[number] = None
        if state == "trained":
            groups.setdefault(number, {})[group] = step
        elif (state, cause) == ("filtered", "zero_variance"):
            unwanted[number] = None
    found.started = len(numbers)
    for number, trained in sorted(groups.items()):
        found.trained[number] = min(trained.values())
        if len(trained) > 1:
            found.violations.append(f"prompt {number} is trained {len(trained)} times: {', '.join(sorted(trained))}")
        if number in left:
            found.violations.append(f"prompt {number} is trained and still to be trained")
    found.discarded = tuple(sorted(number for number in unwanted if number not in groups and number not in left))
    gone = {*found.discarded, *given_up}
    known = max((*numbers, *left), default=-1) + 1 if drawn is None else drawn
    # they are drawn in order, a few ahead of the others
    if known > _SPARSE * (len(numbers) + len(left) + len(given_up) + 1):
        raise RunError(f"the journal names prompt {known - 1}, and {len(numbers)} prompts in all: it is damaged")
    found.violations += [f"prompt {n} is trained and was never drawn" for n in sorted(groups) if n >= known]
    for number in range(known):
        if number not in groups and number not in gone and number not in left:
            found.violations.append(f"prompt {number} is missing: not trained, not queued, not discarded, not given up")
    if epoch:
        found.violations += _overtaken(found.trained, gone, epoch)
    return found


def _overtaken(trained: dict[int, int], gone: Collection[int], epoch: int) -> list[str]:
    """Prompts that were not trained when one of a later epoch was, in a batch without any of theirs."""
    steps: dict[int, list[int]] = {}
    for number, step in trained.items():
        steps.setdefault(step, []).append(number)
    wrong = []
    for step, batch in sorted(steps.items()):
        for number in range(max(batch) // epoch * epoch):
            if number not in gone and trained.get(number, step + 1) > step:
                wrong.append(
                    f"step {step} trains prompt {max(batch)} of epoch {max(batch) // epoch}, prompt {number} of epoch "
                    f"{number // epoch} is not trained yet"
                )
                break
    return wrong
