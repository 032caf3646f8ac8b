"""Whether each prompt of the data set was trained exactly once an epoch: said by the ledger's journal, not by who planned it.

With ``rollout.rounds`` each start in the journal carries the number of its prompt in the training stream
(:meth:`orchestrator.ledger.Ledger.start`). From these lines alone, and the list of what the run says is still to be trained,
:func:`account_epochs` finds every prompt that was trained twice, is missing, or was overtaken by a later epoch. It shares no code
with the planner (:mod:`orchestrator.policies.batching.round_planner`) or the ledger's totals.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from orchestrator.api import RunError
from orchestrator.api.jsontext import parse

_MOST = 1 << 40  # prompts that a run may number
_SPARSE = 100_000  # numbers up to the largest one, for each that is there


@dataclass
class EpochAccount:
    """What became of each prompt, by number. ``trained``: in which training step; ``discarded``: by dynamic sampling."""

    trained: dict[int, int] = field(default_factory=dict)
    discarded: tuple[int, ...] = ()
    started: int = 0  # prompts
    violations: list[str] = field(default_factory=list)

    def epochs(self, size: int) -> int:
        """Epochs of ``size`` prompts of which each prompt is trained or discarded."""
        done, count = {*self.trained, *self.discarded}, 0
        while all(number in done for number in range(count * size, (count + 1) * size)):
            count += 1
        return count


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
            raise RunError(f"the journal holds a line that is no record ({error!r}): {line!r:.200}") from error
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
