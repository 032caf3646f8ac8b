"""Rollout workers in servers that somebody else runs: ``vllm serve MODEL --plugin rl-coserve``, named by ``rollout.served``.

Guarantees: before anything starts, each server was asked and fits (protocol, model, lengths, log-probs), or one ConfigError
names it with the fix. A server gets the run's relay when the run starts, the run's weights before its first request (the
pipeline does that for every worker), and at the end it is left running with its users and without our requests; one that was
inactive is activated, and with ``rollout.served_deactivate`` left inactive at the end. The token
is in no config, no event and no message.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from orchestrator.api import CommandError, ConfigError, RetryableError, RunError, Task, bearer, jsontext, urls
from orchestrator.api import http as wire
from orchestrator.borrowing.http_worker import HttpWorker, OtherProtocol
from orchestrator.config import Config
from orchestrator.events import EventLog
from orchestrator.transfer import RelayEndpoint
from orchestrator.transfer.turns.routed_experts import ExpertsOfModel

VARIABLE = "RL_COSERVE_TOKEN"  # as the server's own
ANSWER_SECONDS = 20.0  # that a server may take to say what it is
_FIELD = "rollout.served"

_logger = logging.getLogger(__name__)


def check(config: Config, task: Task, candidates: Sequence[str]) -> None:
    """Ask every server whether it fits. Raises ConfigError. Not inside an event loop."""
    token = read_token(config, os.environ)
    _reachable(config, candidates)
    found, silent = asyncio.run(_ask_all(config, token, candidates))
    if not found and not config.rollout.workers:
        fix = f"none of these servers can be had, the first: {silent[0].fix}"
        raise ConfigError(_FIELD, ", ".join(candidates)[:300], fix)
    seen: dict[str, str] = {}
    for url, status in found:
        for mistake in mistakes(config, task, status):
            raise ConfigError(_FIELD, url, mistake)
        if (other := seen.setdefault(str(status.get("instance")), url)) != url:
            raise ConfigError(_FIELD, url, f"is the same server as {other}: name each server once")


def read_token(config: Config, environment: Mapping[str, str]) -> str:
    """The bearer token of the served workers, ``file:PATH`` where it is in a file. Raises ConfigError."""
    file = config.rollout.served_token_file
    if not file:
        if token := bearer.variable(VARIABLE, environment):
            return token
        fix = f"give the path of a file with the token of the servers, or set the environment variable {VARIABLE}"
        raise ConfigError("rollout.served_token_file", file, fix)
    fix = "give a readable file with the token that the servers were started with (--rl-token-file)"
    bearer.read_file(file, "rollout.served_token_file", fix)
    return bearer.FILE + os.path.abspath(file)


def mistakes(config: Config, task: Task, status: Mapping[str, Any]) -> list[str]:
    """Why the server with this status cannot work for this run, in words, with fixes. The status may say anything."""
    try:
        return _mistakes(config, task, status)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        return [f"says of itself what cannot be ({error!r:.200}): is it vllm serve with --plugin rl-coserve?"]


def _mistakes(config: Config, task: Task, status: Mapping[str, Any]) -> list[str]:
    limits, shape = status.get("limits") or {}, status.get("shape") or {}
    room, mode = int(limits.get("max_model_len", 0)), status.get("logprobs_mode")
    found: list[str] = []
    if status.get("broken"):
        found.append(f"has no engine: {status['broken']}; restart the server")
    if room < task.max_context_tokens:
        needed = task.max_context_tokens
        found.append(
            f"takes {room} tokens, a trajectory of task {task.name} may have {needed}: --max-model-len {needed} or more"
        )
    wanted = _wanted(config, task)
    if (vocabulary := int(limits.get("vocabulary", 0))) != wanted["vocab_size"]:
        found.append(
            f"has a vocabulary of {vocabulary} tokens, the run's model {wanted['vocab_size']}: serve the same model"
        )
    other = [
        f"{name} {shape[name]} (the run's: {value})"
        for name, value in wanted.items()
        if name != "vocab_size" and shape.get(name) and value and shape[name] != value
    ]
    if other:
        found.append(f"serves another model than the one that is trained: {', '.join(other)}")
    if mode != "processed_logprobs" and not (mode == "raw_logprobs" and config.rollout.temperature == 1.0):
        found.append(
            f"gives log-probs of another distribution than the sampled one ({mode}): --logprobs-mode processed_logprobs"
        )
    if config.trainer.routing_replay and not status.get("routed_experts"):
        found.append(
            "does not return the experts that it chose, which trainer.routing_replay replays: start it with "
            "--enable-return-routed-experts, or set trainer.routing_replay = false"
        )
    return found


def workers(
    config: Config,
    endpoint: RelayEndpoint,
    chosen: Sequence[str] | None = None,
    key: str = "",
    task: Task | None = None,
    takeover: bool = False,
) -> list[HttpWorker]:
    """One client a server (None: of all that the config names), under its URL as its name. ``key``: of the run's leases, "": one
    of their own for all of these. ``task``: for which a server must fit, each time that it is taken up. ``takeover``: see
    :class:`HttpWorker`. Nothing is sent yet. Raises ConfigError."""
    names = config.rollout.served if chosen is None else chosen
    if not names:
        return []
    token, rollout = read_token(config, os.environ), config.rollout
    make = partial(
        HttpWorker,
        relay=endpoint,
        allow_plain_http=rollout.served_allow_plain_http,
        deactivate=rollout.served_deactivate,
        priority=rollout.served_priority,
        tls=config.tls.files(),
        lease=rollout.borrowed.lease,
        key=key or secrets.token_hex(16),
        takeover=takeover,
        mistakes=None if task is None else partial(mistakes, config, task),
        experts=_experts(config) if config.trainer.routing_replay else None,
    )
    return [make(url, token, url.rstrip("/")) for url in names]


async def start(served: Sequence[HttpWorker], events: EventLog | None = None) -> None:
    """Activate each server, if it is not, and tell it of the run's relay. ``events`` has what was activated. Raises RunError
    that names the one that did not take it."""

    async def one(worker: HttpWorker) -> None:
        try:
            await worker.start()
            if events is not None:
                tell_activated(worker, events)
        except CommandError as error:
            fix = ""
            if error.code == "requests_in_flight":
                fix = f'; another run uses it, or one that was killed left them: POST {wire.ABORT} {{"all": true}} ends them'
            elif error.code == "leased":
                fix = "; name another server, or several with rollout.borrowed.most, or wait: a dead run loses it by itself"
            raise RunError(f"{_FIELD}: {worker.url}: {error.detail}{fix}") from error
        except (RetryableError, ConfigError) as error:
            raise RunError(f"{_FIELD}: {worker.url} did not take the run's relay: {error}") from error

    await asyncio.gather(*(one(worker) for worker in served))


def tell_activated(worker: HttpWorker, events: EventLog) -> None:
    """An event, if it had to be."""
    if worker.activation:
        found = {name: worker.activation.get(name) for name in ("activation_seconds", "weights_bytes")}
        events.emit("activated", worker=worker.name, **found)


def _reachable(config: Config, candidates: Sequence[str]) -> None:
    """The relay that the run starts itself listens on this machine only, unless ``relay.host`` says otherwise."""
    if config.relay.master or (config.relay.kind == "mooncake" and not _stays_here(config.relay.host)):
        return
    for url in candidates:
        if not urls.is_loopback(urlsplit(url).hostname or ""):
            fix = (
                f"{url} is on another machine, and the relay that a run starts itself listens on loopback "
                f"({config.relay.host}): set "
                "relay.host to an address of this machine that it reaches, or give host:port of a mooncake_master that both "
                "reach; and a run.folder on a file system that both see"
            )
            raise ConfigError("relay.master", "", fix)


def _stays_here(host: str) -> bool:
    """Whether a relay at this name is one for this machine: a machine's own name often means 127.0.1.1 on it."""
    try:
        return urls.is_loopback(socket.gethostbyname(host))
    except OSError:
        return False  # which is said where it is to be bound


async def _ask_all(
    config: Config, token: str, candidates: Sequence[str]
) -> tuple[list[tuple[str, dict[str, Any]]], list[Silent]]:
    """Of those that answer, where the run chooses among them, and what is wrong with the others; else of all. Raises
    ConfigError."""
    asked = [ask(config, url, token) for url in candidates]
    found: list[tuple[str, dict[str, Any]]] = []
    silent: list[Silent] = []
    for answer in await asyncio.gather(*asked, return_exceptions=True):
        if isinstance(answer, Silent) and config.rollout.borrowed.exchanged:
            silent.append(answer)
        elif isinstance(answer, BaseException):
            raise answer
        else:
            found.append(answer)
    return found, silent


class Silent(ConfigError):
    """A server does not answer, or is not upgraded yet: it may be another time."""


async def ask(config: Config, url: str, token: str) -> tuple[str, dict[str, Any]]:
    """The status of a server, with its URL. Raises ConfigError, Silent among them."""
    worker = _onlooker(config, url, token)
    fix = "is a server running there? vllm serve MODEL --plugin rl-coserve"
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return url, await worker.status()
    except TimeoutError as error:
        raise Silent(_FIELD, url, f"no answer within {ANSWER_SECONDS:g} s; {fix}") from error
    except (RetryableError, CommandError) as error:
        raise Silent(_FIELD, url, f"{error}; {fix}") from error
    except OtherProtocol as error:
        raise Silent(_FIELD, url, error.fix) from error
    except ConfigError as error:
        if error.field == "worker.token":
            where = config.rollout.served_token_file or f"(environment variable {VARIABLE})"
            raise ConfigError("rollout.served_token_file", where, f"{url} refuses it: {error.fix}") from error
        raise ConfigError(_FIELD, url, error.fix) from error
    finally:
        await worker.disconnect()


async def claim(config: Config, url: str, token: str, job: tuple[str, str], wanted: int, seconds: float) -> None:
    """Say there that this job (name, metadata store) wants so many servers in all. One that does not take it is told again when
    the job claims again."""
    worker = _onlooker(config, url, token)
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            await worker.claim(job, wanted, config.rollout.borrowed.weight, seconds)
    except (TimeoutError, RetryableError, CommandError, ConfigError) as error:
        _logger.info("%s did not take a claim: %s", url, error)
    finally:
        await worker.disconnect()


def _onlooker(config: Config, url: str, token: str) -> HttpWorker:
    """A client without a relay, and so without a lease."""
    return HttpWorker(url, token, url, allow_plain_http=config.rollout.served_allow_plain_http, tls=config.tls.files())


def _wanted(config: Config, task: Task) -> dict[str, Any]:
    """What a server's model must be like: that of ``model.path``, or the tiny one that the run makes."""
    if not config.model.path:
        sizes = {"hidden_size": config.model.hidden_size, "num_hidden_layers": config.model.layers}
        return {**sizes, "vocab_size": len(task.vocabulary)}
    found = _model(config)
    return {name: found.get(name) for name in ("architectures", *wire.SHAPE)}


def _experts(config: Config) -> ExpertsOfModel | None:
    """None: the model has none, which the trainer refuses."""
    found = _model(config) if config.model.path else {}
    names = ("n_routed_experts", "num_experts", "num_local_experts")  # families and versions of transformers differ
    count = next((found[name] for name in names if type(found.get(name)) is int), None)
    layers, choices = found.get("num_hidden_layers"), found.get("num_experts_per_tok")
    if type(layers) is not int or type(choices) is not int or count is None:
        return None
    before, step, named = (
        found.get(name) for name in ("first_k_dense_replace", "decoder_sparse_step", "mlp_only_layers")
    )
    every, some = step if type(step) is int and step > 0 else 1, named if isinstance(named, list) else []
    least = before if type(before) is int else 0
    dense = (layer for layer in range(layers) if layer < least or layer in some or (layer + 1) % every)
    return ExpertsOfModel(layers, choices, count, frozenset(dense))


def _model(config: Config) -> dict[str, Any]:
    """The config.json of ``model.path``. Raises ConfigError."""
    try:
        return jsontext.parse_object((Path(config.model.path) / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError("model.path", config.model.path, f"its config.json cannot be read: {error}") from error
