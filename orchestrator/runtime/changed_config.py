"""What of a run's config may change when it continues: how long it runs, what it tells and to whom, how patient it is, where it
runs (its Ray, its servers), how much memory its parts take, and over which ranks the trainer is cut, as its checkpoints are of
no layout.

Guarantees: a key that shapes what was trained (model, task, loss, seed, mode, staleness) is refused by name, since the
checkpoint, the ledger and the stored trajectories were made with the old one; nothing is written here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.api import ConfigError
from orchestrator.api.jsontext import parse_object
from orchestrator.checkpoint import Checkpoints
from orchestrator.config import Config, apply_override, parse_config, to_json
from orchestrator.events import each_event, time_of
from orchestrator.run_folder import RunFolder

# A name that ends with a dot is all of a section.
CHANGEABLE = (
    "run.steps", "run.minutes", "run.signal_share", "run.restarts", "run.sync_seconds", "run.trainer_start_timeout",
    "run.trainer_timeout", "checkpoint.", "evaluation.every", "logging.", "view.", "ray.address", "relay.host",
    "rollout.start_timeout", "rollout.prepare_timeout", "rollout.update_timeout", "rollout.restart_timeout",
    "rollout.restart_window", "rollout.restart_pause",
    "rollout.first_token_timeout", "rollout.stall_timeout", "rollout.heartbeat_seconds",
    "rollout.heartbeat_misses", "rollout.trajectory_timeout", "rollout.environment_reset_timeout",
    "rollout.environment_step_timeout", "trainer.tensor_parallel", "trainer.pipeline_parallel",
    "trainer.expert_parallel", "trainer.data_parallel", "trainer.distributed_optimizer",
    # what docs/troubleshooting.md tells to change after a run has ended
    "rollout.served", "rollout.served_token_file", "rollout.served_allow_plain_http",
    "rollout.worker_restarts", "rollout.collective_timeout", "rollout.engine.kv_cache_mb", "trainer.micro_batch_size",
    "trainer.micro_batch_tokens", "ray.object_store_mb", "relay.patience", "relay.segment_mb", "reward.timeout",
    "reward.concurrency", "rollout.ess_alarm", "trainer.logprob_gap_alarm", "trainer.entropy_alarm", "trainer.tis_alarm",
    "environment.start_tries", "environment.parallel_starts", "environment.max_age_seconds",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _End:
    """Of a run whose last life said that it was complete. ``seconds``: of the run by then; ``silent``: too few groups had
    anything to teach."""

    seconds: float
    silent: bool


def _end_of(folder: RunFolder) -> _End | None:
    """None: it has not ended. One that was killed after its last checkpoint has yet to be evaluated and exported."""
    silent, complete, seconds = False, False, 0.0
    for event in each_event(folder.events_file) if folder.events_file.exists() else ():  # none while Ray starts
        kind, seconds = event.get("kind"), max(seconds, time_of(event))
        if kind == "run_start":
            silent = complete = False
        elif kind == "alarm" and event.get("what") == "signal":
            silent = True
        elif kind == "run_end":
            complete = event.get("status") == "completed"
    return _End(seconds, silent) if complete else None


def notes_of(before: Config, after: Config) -> list[str]:
    """What a change means that one might not expect."""
    rate = after.trainer
    if before.run.steps == after.run.steps or rate.final_learning_rate is None:
        return []
    return [
        f"the learning rate decays to {rate.final_learning_rate:g} over {after.run.steps} steps now, not {before.run.steps}"
    ]


def unsaid(folder: RunFolder, config: Config) -> list[str]:
    """Keys that the run's config.json does not have, as an earlier version wrote it, with the values that they have now."""
    found = list(_missing(parse_object(folder.config_file.read_bytes()), json.loads(to_json(config))))
    return [f"not in config.json, which an earlier version wrote, so by default: {', '.join(found)}"] if found else []


def _missing(said: dict[str, Any], whole: dict[str, Any], place: str = "") -> Iterator[str]:
    for name, value in whole.items():
        if name not in said:
            yield f"{place}{name} = {json.dumps(value)}"
        elif isinstance(value, dict) and isinstance(said[name], dict):
            yield from _missing(said[name], value, f"{place}{name}.")


def config_to_continue(folder: RunFolder, overrides: Sequence[str]) -> Config:
    """The run's config with these values changed. Raises ConfigError: for a key that may not change, and for a run that has done
    all its steps and is not given more."""
    config = folder.config()
    data = json.loads(to_json(config))
    for override in overrides:
        name = override.partition("=")[0].strip()
        there = _has(data, name)
        apply_override(data, override)
        if not there:
            parse_config(data)  # says what was meant
        unread = config.rollout.engines and name.startswith("rollout.engine.")  # its engines are groups
        if unread or not any(name == key or (key.endswith(".") and name.startswith(key)) for key in CHANGEABLE):
            known = ", ".join(key + "*" * key.endswith(".") for key in CHANGEABLE)
            raise ConfigError(
                name, override.partition("=")[2], f"a resume keeps the run's own; what may change: {known}"
            )
    changed = parse_config(data)
    done, end = Checkpoints(folder.checkpoints, 1).last_step(), _end_of(folder)
    if more := _wanted(config, changed, done, end):
        fix = f"the run is complete: {done} of {config.run.steps} steps are done; extend it with {' '.join(more)}, for example"
        if end is not None and end.silent and done < config.run.steps:
            fix += " (it ended early, as its groups had next to nothing to teach)"
        raise ConfigError("--resume", str(folder.path), fix)
    return changed


def _has(data: Any, name: str) -> bool:
    for part in name.split("."):
        if not isinstance(data, dict) or part not in data:
            return False
        data = data[part]
    return True


def _wanted(config: Config, changed: Config, done: int, end: _End | None) -> list[str]:
    """What a run has to be given to do one more step; [] when it has all, or is not complete."""
    run, more = changed.run, []
    if done > run.steps or (done == run.steps and end is not None):
        more.append(f"run.steps={2 * done}")
    if end is None:
        return more
    if run.minutes is not None and end.seconds >= 60 * run.minutes:
        more.append(f"run.minutes={2 * max(1, round(end.seconds / 60))}")
    if (
        end.silent
        and run.signal_share
        and run.signal_share >= config.run.signal_share
        and run.steps <= config.run.steps
    ):
        more.append("run.signal_share=0")
    return more
