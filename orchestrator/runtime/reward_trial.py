"""A reward function of the user's is tried before a run: on two answers of one turn, in a process like those of the run's host.

Guarantees: one that gives a number for neither, by its own doing, is a ConfigError that says what it gave; one that fails for
some, or for what the machine may be to blame (a connection, a limit of time), is a note, since a run may do without; built-in
functions, which tests know, and functions elsewhere (``reward.url``, Ray Serve) are not tried; no process is left.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from orchestrator.api import ConfigError, Prompt, Task, Trajectory, TrajectoryError, Turn, stop_ids_of
from orchestrator.api.errors import shown
from orchestrator.config import Config
from orchestrator.environments.environment_wire import error_text
from orchestrator.rewards.function_protocol import IMPORT_FAILED, TIMED_OUT
from orchestrator.rewards.process_pool import FunctionError, FunctionPool
from orchestrator.rewards.reward_client import metrics_in, not_kept, reward_event, reward_in
from orchestrator.tasks.dataset import DatasetTask

_PROMPTS = 64  # that are looked at for one of each part of a mixture
_SECONDS = 30.0  # of a call, where more is allowed
_OF_MACHINE = re.compile(
    rf"connect|time_?out|retry|unavailable|oserror|not imported within|{re.escape(TIMED_OUT)}", re.I
)


def try_reward(config: Config, task: Task, target: str) -> list[str]:
    """Notes, for people. Raises ConfigError."""
    scorers: Mapping[str, str] = getattr(task, "scorers", {})
    of_rows = isinstance(task, DatasetTask)
    if config.reward.host != "embedded" or (target.startswith("orchestrator.") and not of_rows and not scorers):
        return []
    try:
        prompts = {
            prompt.task: prompt for prompt in islice(task.prompts("train", config.run.seed), _PROMPTS if scorers else 1)
        }
        asked = [name for name in prompts if name not in config.reward.judges and (name in scorers or not scorers)]
        events = {scorers.get(name, target): _events(config, task, prompts[name]) for name in asked}
    except Exception as error:  # noqa: BLE001  a class of the user's may raise anything; its own trial says what is wrong
        return [f"{target} was not tried before the run: {error_text(error)[:200]}"]
    seconds = min(_SECONDS, config.reward.call_seconds(getattr(task, "reward_by_case", False)))
    notes = []
    for name, two in events.items():
        wrong, ignored = asyncio.run(_tried(target, two, seconds))
        said = next((why for why in wrong if why), "")
        if all(wrong) and not any(_OF_MACHINE.search(why) for why in wrong):
            field, value = (
                ("task.data.reward", list(config.task.data.rewards)) if of_rows else ("reward.function", name)
            )
            given = "a finite number" if of_rows else '{"reward": a finite number}, of Python\'s own types,'
            mend = f"it must return {given} for whatever is said"
            if said.startswith(IMPORT_FAILED):
                mend = "the processes of rewards import it too: start with PYTHONPATH=. where its file lies"
            fix = f"a trial answer before the run got no reward: {said}; {mend}"
            raise ConfigError(field, value, fix)
        if said:
            notes.append(
                f"{name}: a trial answer got no reward ({said}); in a run such a trajectory fails, it is not 0"
            )
        if ignored:
            notes.append(
                f"{name}: of what it answers beside the reward only numbers are kept, not {', '.join(ignored)}"
            )
    return notes


def _events(config: Config, task: Task, prompt: Prompt) -> list[dict[str, Any]]:
    """What the function is sent for an answer of one word, and for one without any."""
    special = {task.pad_id, *stop_ids_of(task)}
    word = next((number for number in range(len(task.vocabulary)) if number not in special), task.end_id)
    played, said, scorers = (getattr(task, name, None) for name in ("played", "said", "scorers"))
    events = []
    for action in ((word, task.end_id), (task.end_id,)):
        turn = Turn((), action, (0.0,) * len(action), ((0, len(action)),))
        trajectory = Trajectory("trial", "trial", prompt.task, prompt, (turn,), None, "", prompt.seed, False)
        event = reward_event(trajectory, played, said, scorers)
        if config.reward.timeout == "adaptive":
            chosen = config.reward.adaptive
            event["timeouts"] = {"cases": [], "other": chosen.most, "whole": chosen.whole}
        events.append(event)
    return events


async def _tried(target: str, events: Sequence[dict[str, Any]], seconds: float) -> tuple[list[str], list[str]]:
    """What was wrong with each (empty: it got a reward), and the fields that are not kept."""
    pool = FunctionPool(target, concurrency=1, timeout=seconds, idle_seconds=seconds)
    wrong: list[str] = []
    ignored: dict[str, None] = {}
    try:
        for event in events:
            try:
                answer = await pool.invoke(event)
                reward_in(answer), metrics_in(answer)
                ignored |= dict.fromkeys(shown(field, 40) for field in not_kept(answer)[:5])
                wrong.append("")
            except FunctionError as error:
                wrong.append(str(error)[:300])
            except TrajectoryError as error:
                wrong.append(error.detail[:300])
    finally:
        await pool.close()
    return wrong, list(ignored)
