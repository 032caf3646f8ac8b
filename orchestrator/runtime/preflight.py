"""What is checked before anything starts: everything that would fail later for a reason that can be known now.

Each check raises one ConfigError that names the field, the value and the fix; the command ends with exit code 2.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import socket
from pathlib import Path

from orchestrator.api import ConfigError, Task
from orchestrator.config import Config
from orchestrator.hooks import versions
from orchestrator.runtime import served
from orchestrator.sandbox import Sandbox
from orchestrator.tasks import registry
from orchestrator.transfer import RelayEndpoint, open_relay

_ARCHITECTURES = ("Qwen3ForCausalLM",)


def make_task(config: Config) -> Task:
    """The task that the config names. Raises ConfigError."""
    return registry.make(config.task.name, config.task.heldout_maps, **config.task.options)


def check(config: Config, task: Task) -> None:
    """Run all checks. Nothing is started or written."""
    for component in (versions.PYTHON, versions.VLLM, versions.MEGATRON_CORE, versions.MOONCAKE, versions.RAY):
        versions.check(component)
    _model(config)
    _function(config, task)
    _task(config, task)
    _lengths(config, task)
    _heldout(config)
    _relay(config)
    _port(config)
    served.check(config, task)


def _heldout(config: Config) -> None:
    if config.evaluation.prompts > config.task.heldout_maps:
        fix = f"there are task.heldout_maps = {config.task.heldout_maps} held-out prompts; ask for fewer, or hold out more"
        raise ConfigError("evaluation.prompts", config.evaluation.prompts, fix)


def _relay(config: Config) -> None:
    if config.relay.kind == "fsspec" and config.relay.master:
        endpoint = RelayEndpoint(job="preflight", kind="fsspec", master=config.relay.master)
        open_relay(endpoint).close()


def _port(config: Config) -> None:
    if config.relay.kind != "mooncake" or config.relay.master or not config.relay.port:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", config.relay.port))
        except OSError as error:
            fix = f"cannot be bound on 127.0.0.1 ({error.strerror}); choose another, or 0 for a free one"
            raise ConfigError("relay.port", config.relay.port, fix) from error


def _model(config: Config) -> None:
    if not config.model.path:
        return
    file = Path(config.model.path) / "config.json"
    fix = "give a Hugging Face folder of a Qwen3 model, or leave it empty to make a tiny one"
    if not file.is_file():
        raise ConfigError("model.path", config.model.path, f"is not a model folder (no config.json); {fix}")
    try:
        found = json.loads(file.read_text(encoding="utf-8")).get("architectures") or ["none"]
    except (OSError, json.JSONDecodeError, AttributeError) as error:
        raise ConfigError(
            "model.path", config.model.path, f"its config.json cannot be read ({error}); {fix}"
        ) from error
    if found[0] not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ConfigError(
            "model.path", config.model.path, f"its architecture {found[0]} is not supported ({known}); {fix}"
        )


def _task(config: Config, task: Task) -> None:
    if config.warmup.steps and not hasattr(task, "demonstrations"):
        raise ConfigError("warmup.steps", config.warmup.steps, f"task {task.name} has no demonstrations; set it to 0")
    if getattr(task, "needs_sandbox", False):
        asyncio.run(Sandbox().check())
    seconds = getattr(task, "reward_seconds", 0.0)
    if config.reward.timeout < seconds:
        fix = f"scoring a trajectory of task {task.name} may take {seconds:g} s; raise it to that or more"
        raise ConfigError("reward.timeout", config.reward.timeout, fix)


def _function(config: Config, task: Task) -> None:
    if config.reward.url or config.reward.judge.url:
        return
    function = config.reward.function or registry.reward_of(task)
    module, _, name = function.partition(":")
    try:
        found = importlib.util.find_spec(module)
    except ImportError:
        found = None
    if found is None:
        fix = f"there is no module {module!r} on the path; write module:function"
        raise ConfigError("reward.function", function, fix)
    if not hasattr(importlib.import_module(module), name):
        raise ConfigError("reward.function", function, f"{module} has no function {name!r}")


def _lengths(config: Config, task: Task) -> None:
    room = config.rollout.engine.max_model_len
    if room < task.max_context_tokens:
        fix = f"a trajectory of task {task.name} may have {task.max_context_tokens} tokens; raise it to that or more"
        raise ConfigError("rollout.engine.max_model_len", room, fix)
