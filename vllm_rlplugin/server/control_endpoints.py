"""The control endpoints of ``vllm serve --plugin rl-coserve``: vLLM's own names and verbs, and the worker's under ``/rl/``.

An endpoint plugin on vLLM's official hook; it reaches the engine as vLLM's own routes do, through the engine client.
Guarantees: every route is a :class:`ControlRoute` (token, network, protocol, body limit, error shape); a client written
for vLLM's development routes needs only the token; nothing here unpickles, imports or runs what a client sent; there is
no ``/collective_rpc``. One API server process and one engine: with more, starting is refused.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import ssl
from argparse import Namespace
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse

import vllm_rlplugin
from orchestrator.api import CommandError, ConfigError, KvMove, KvMoved, RetryableError
from orchestrator.api import http as wire
from orchestrator.transfer.turns import HeldContexts, decode_turns, encode_completions
from vllm_rlplugin.hookpoints import require_loaded
from vllm_rlplugin.kv.mover import KvMover, KvOptions
from vllm_rlplugin.kvpool.engine.idle_upkeep import PoolUpkeep
from vllm_rlplugin.kvpool.engine.pool_engine import pool_path
from vllm_rlplugin.kvpool.ledger.page_ledger import PagePool
from vllm_rlplugin.options import ACTIVE, PLUGIN, FrontendOptions, PluginOptions
from vllm_rlplugin.server import request_bodies
from vllm_rlplugin.server.bearer_auth import BearerGuard, find_token
from vllm_rlplugin.server.control_route import STATE, ControlRoute, RouteContext, error_response
from vllm_rlplugin.server.engine_metrics import EngineMetrics, refresh_metrics
from vllm_rlplugin.server.outbox import Outbox, encode_batch
from vllm_rlplugin.server.pool_metrics import PoolMetrics
from vllm_rlplugin.server.server_claims import ClaimBook
from vllm_rlplugin.server.server_lease import LeaseBook, LeaseKeeper, lease_path
from vllm_rlplugin.sleep.activation import Activation
from vllm_rlplugin.worker.live_engine import LiveEngine
from vllm_rlplugin.worker.served_worker import EngineLimits, ServedWorker

CONTROL = "rl_coserve"  # in the app's state
SAMPLING_LOGPROBS = "processed_logprobs"  # the --logprobs-mode under which log-probs are the sampling distribution's

_logger = logging.getLogger("vllm.rl_coserve")
router = APIRouter(route_class=ControlRoute)


class ControlContext:
    """What the handlers use. Plain attributes; lives in ``app.state``."""

    def __init__(
        self, worker: ServedWorker, facts: dict[str, Any], activation: Activation, pool: Path | None = None
    ) -> None:
        self.worker, self.activation = worker, activation
        # One for all engines of the device.
        self.lease = LeaseKeeper(LeaseBook(str(facts["instance"]), None if pool is None else lease_path(pool)), worker)
        self.claims = ClaimBook()
        self.outbox = Outbox(worker)
        self.contexts = HeldContexts()
        self.mover: KvMover | None = None  # where KV moves
        self.facts = facts  # for /rl/status: what does not change while the server runs
        self.pool: PoolUpkeep | None = None  # where the KV cache is in a pool
        self.device: PoolMetrics | None = None  # and what it says of the device
        self.tasks: list[asyncio.Task[None]] = []

    def start(self, client: Any, metrics: EngineMetrics, options: PluginOptions) -> None:
        """What goes on by itself, until the engine dies."""
        self.tasks.append(asyncio.create_task(self.lease.watch(), name="rl-coserve lease"))
        if options.kv_pool:
            self.device = PoolMetrics(PagePool.open(pool_path(options.kv_pool)))
            self.pool = PoolUpkeep(LiveEngine(client))
            self.tasks.append(asyncio.create_task(self.pool.run(), name="rl-coserve pool"))
            self.tasks.append(asyncio.create_task(self.activation.watch(), name="rl-coserve activation"))
        self.tasks.append(
            asyncio.create_task(refresh_metrics(metrics, self.worker, self.device), name="rl-coserve metrics")
        )


def _control(request: Request) -> ControlContext:
    control: ControlContext = getattr(request.app.state, CONTROL)
    return control


def _used(request: Request) -> AbstractAsyncContextManager[ServedWorker]:
    """The worker, for what needs its engine: one that is inactive is activated first."""
    return _control(request).activation.use_worker()


# The worker's commands.


@router.post(wire.ADD)
async def add(request: Request, body: request_bodies.AddBody) -> JSONResponse:
    """Enqueue turns; an id that was added before changes nothing. All of them or, without ``partial``, (400) none."""
    requests = [item.to_request() for item in body.requests]
    async with _used(request) as worker:
        if not body.partial:
            worker.check(requests)
        await worker.add(requests)
    return JSONResponse({"accepted": len(body.requests)})


@router.post(wire.TURNS)
async def turns(request: Request) -> JSONResponse:
    """Enqueue turns of which only what is new comes: see :mod:`orchestrator.transfer.turns`. Answers for each with the digest
    of its context, or "" where this server lacks what it goes on from, which is sent whole then. One that this model cannot
    take ends in a completion with the finish reason ``error``."""
    message = decode_turns(await request.body())
    async with _used(request) as worker:
        requests, digests = _control(request).contexts.take(message)
        await worker.add(requests)
    return JSONResponse({"contexts": digests})


@router.post(wire.ABORT)
async def abort(request: Request, body: request_bodies.AbortBody) -> JSONResponse:
    """Cancel by id, trajectory or group, or all. 404 when nothing of what is named was ever added."""
    worker = _control(request).worker
    if body.all:
        return JSONResponse({"aborted": await worker.abort_all()})
    named = (body.request_ids, body.trajectories, body.groups)
    if any(named) and not worker.known(*named):
        raise CommandError("unknown_request", "none of these requests, trajectories or groups was ever added")
    unfinished = len(worker.unfinished(*named))
    await worker.abort(body.request_ids, trajectories=body.trajectories, groups=body.groups)
    return JSONResponse({"aborted": unfinished})


@router.post(wire.PRIORITIZE)
async def prioritize(request: Request, body: request_bodies.PrioritizeBody) -> JSONResponse:
    """Give the unfinished requests of trajectories another priority; the lower number goes first."""
    worker = _control(request).worker
    meant = len(worker.unfinished((), list(body.priorities)))
    await worker.prioritize(body.priorities)
    return JSONResponse({"requests": meant})


@router.get(wire.COMPLETIONS, response_class=Response)
async def completions(
    request: Request,
    acknowledged: Annotated[int | None, Query(ge=0)] = None,
    timeout: Annotated[float, Query(ge=0, le=wire.MAX_POLL_SECONDS)] = 20.0,  # noqa: ASYNC109
) -> Response:
    """The next batch of completions, waited for; kept until a later call acknowledges its sequence number."""
    number, batch = await _control(request).outbox.next_batch(acknowledged, timeout)
    if request.headers.get("accept") == wire.TURNS_TYPE:
        return Response(encode_completions(number, batch), media_type=wire.TURNS_TYPE)
    return Response(await encode_batch(number, batch), media_type="application/json")


@router.post(wire.SUSPEND)
async def suspend(request: Request) -> JSONResponse:
    """Stop between two engine steps; in-flight requests keep their tokens."""
    control = _control(request)
    async with _used(request) as worker:
        control.lease.note_suspend(wire.LEASE_HEADER in request.headers)
        await worker.suspend()
    return JSONResponse({"suspended": True, "version": worker.cycle.version})


@router.post(wire.PREPARE)
async def prepare(request: Request, body: request_bodies.VersionBody) -> JSONResponse:
    """Fetch and verify a version while requests go on; answers when it is ready to be loaded."""
    async with _used(request) as worker:
        await worker.prepare(body.version)
    return JSONResponse({"prepared": body.version})


@router.post(wire.UPDATE)
async def update(request: Request, body: request_bodies.VersionBody) -> JSONResponse:
    """Load a version. Only while suspended."""
    async with _used(request) as worker:
        return JSONResponse(asdict(await worker.update(body.version)))


@router.post(wire.RESUME)
async def resume(request: Request) -> JSONResponse:
    """Go on; in-flight requests recompute their KV under the new weights."""
    async with _used(request) as worker:
        await worker.resume()
        _control(request).lease.note_resume()
    return JSONResponse({"suspended": False, "version": worker.cycle.version})


@router.post(wire.ACTIVATE)
async def activate(request: Request) -> JSONResponse:
    """Pages and weights in memory again, the weights verified; 503 while the pool has no pages for it. Idempotent."""
    return JSONResponse(await _control(request).activation.activate())


@router.post(wire.DEACTIVATE)
async def deactivate(request: Request, body: request_bodies.DeactivateBody | None = None) -> JSONResponse:
    """Of an idle rollout engine: no pages, no weights in memory. Not ``kept``, an update must follow. Idempotent; 409: busy."""
    return JSONResponse(await _control(request).activation.deactivate(True if body is None else body.kept))


@router.post(wire.LEASE)
async def lease(request: Request, body: request_bodies.LeaseBody) -> JSONResponse:
    """Take the GPU for a job, or renew that; 409 ``leased`` while another job has it. The header RL-Coserve-Lease has the key."""
    keeper, key = _control(request).lease, _key(request)
    seconds = await keeper.grant(body.job, body.place, key, body.seconds, takeover=body.takeover)
    return JSONResponse({"seconds": seconds})


@router.post(wire.CLAIM)
async def claim(request: Request, body: request_bodies.ClaimBody) -> JSONResponse:
    """A job that waits for servers says how many it wants in all: who has this one reads it in the status."""
    _control(request).claims.record_claim(body.job, body.place, body.wanted, body.weight, body.seconds)
    return JSONResponse({"seconds": body.seconds})


@router.post(wire.GIVE_BACK)
async def give_back(request: Request) -> JSONResponse:
    """The job does not use this server any more. Idempotent."""
    return JSONResponse({"given_back": await _control(request).lease.end_lease(_key(request))})


def _key(request: Request) -> str:
    key = request.headers.get(wire.LEASE_HEADER, "")
    if not 16 <= len(key) <= wire.MAX_ID_LENGTH:
        raise CommandError("invalid_request", f"{wire.LEASE_HEADER}: give a key of at least 16 characters")
    return key


@router.get(wire.KV_PLACE)
async def kv_place(request: Request) -> JSONResponse:
    """host:port at which this engine hands out KV; "" without --rl-kv-transfer."""
    mover = _control(request).mover
    return JSONResponse({"place": "" if mover is None else mover.start_listener()})


@router.post(wire.KV_FETCH)
async def kv_fetch(request: Request, body: request_bodies.KvFetchBody) -> JSONResponse:
    """Get the KV of a prefix from another engine. What cannot be got is recomputed; the answer says why."""
    mover = _control(request).mover
    if mover is None:
        return JSONResponse(asdict(KvMoved(0, 0, 0, 0.0, "off: start the server with --rl-kv-transfer")))
    move = KvMove(body.trajectory_id, tuple(body.token_ids), body.source, body.limit)
    return JSONResponse(asdict(await mover.fetch(move)))


@router.get(wire.STATS)
async def stats(request: Request) -> JSONResponse:
    """A snapshot: the fields of WorkerStats."""
    return JSONResponse(asdict(await _control(request).worker.stats()))


@router.get(wire.STATUS)
async def status(request: Request) -> JSONResponse:
    """What this server is, and which hooks are live. Answers with a dead engine too."""
    control = _control(request)
    worker, cycle = control.worker, control.worker.cycle
    return JSONResponse(
        {
            **control.facts,
            "weight_version": cycle.version,
            "weight_label": cycle.label,
            "suspended": cycle.suspended,
            "unusable": cycle.unusable,
            "relay": cycle.relay,
            "history": cycle.history.to_dict(),
            "unfinished": len(worker.unfinished_ids),
            "held": worker.held,
            "contexts": control.contexts.status(),
            "activation": control.activation.status(),
            "lease": control.lease.status(),
            "claims": control.claims.status(),
            "pool": None if control.pool is None else control.pool.public_status(),  # by the engine's process
            "broken": worker.broken,
            "device": None if control.device is None else control.device.recent_use,
            # Of this process; scheduler and worker extension are the engine's, and without them it would not have started.
            "hooks": {**vllm_rlplugin.status(), "scheduler": True, "worker_extension": True},
        }
    )


# vLLM's own names and verbs: parameters and answers as in vllm/entrypoints/rl/online/api_router.py (0.32, 0.33).


@router.post("/pause")
async def pause_generation(
    request: Request,
    mode: Annotated[request_bodies.PauseMode, Query()] = "abort",
    clear_cache: Annotated[bool, Query()] = True,
) -> JSONResponse:
    """Pause the engine: ``abort`` in-flight requests, ``wait`` for them, or ``keep`` them."""
    async with _used(request) as worker:
        _control(request).lease.note_suspend(wire.LEASE_HEADER in request.headers)
        await worker.cycle.pause(mode, clear_cache=clear_cache)
    return JSONResponse({"status": "paused"})


@router.post("/resume")
async def resume_generation(request: Request) -> JSONResponse:
    """Go on after a pause."""
    async with _used(request) as worker:
        await worker.resume()
        _control(request).lease.note_resume()
    return JSONResponse({"status": "resumed"})


@router.get("/is_paused")
async def is_paused(request: Request) -> JSONResponse:
    """Whether the engine is paused."""
    return JSONResponse({"is_paused": _control(request).worker.cycle.suspended})


@router.post("/abort_requests")
async def abort_requests(request: Request, body: request_bodies.AbortRequestsBody | None = None) -> JSONResponse:
    """Abort requests of ours or of serving users by id; without ids: all."""
    aborted = await _control(request).worker.abort_stock(body.request_ids if body is not None else None)
    return JSONResponse({"status": "aborted", "aborted": aborted})


@router.post("/init_weight_transfer_engine")
async def init_weight_transfer_engine(request: Request, body: request_bodies.InitBody) -> JSONResponse:
    """Connect to the weight relay: ``{"init_info": {"endpoint": {...}}}``, the fields of a RelayEndpoint. Another one, or
    another epoch, begins a history in which versions count anew; 409 while requests of the present one are in flight."""
    async with _used(request) as worker:
        await worker.connect(body.init_info)
    return JSONResponse({"message": "Weight transfer initialized"})


@router.post("/shutdown_weight_transfer_engine")
async def shutdown_weight_transfer_engine(request: Request) -> JSONResponse:
    """Let go of the weight relay. What is loaded stays; no update until a relay is named again. Idempotent."""
    async with _used(request) as worker:
        await worker.cycle.disconnect()
    return JSONResponse({"message": "Weight transfer shut down"})


@router.post("/start_draft_weight_update")
async def start_draft_weight_update() -> JSONResponse:
    """Refused: a version on the relay is one of the served model."""
    raise CommandError("invalid_request", "draft model weights cannot be updated: only those of the served model can")


@router.post("/start_weight_update")
async def start_weight_update(request: Request) -> JSONResponse:
    """Begin an update. Only while paused."""
    async with _used(request) as worker:
        await worker.cycle.start_session()
    return JSONResponse({"message": "Weight update started"})


@router.post("/update_weights")
async def update_weights(request: Request, body: request_bodies.UpdateWeightsBody) -> JSONResponse:
    """Fetch and verify: ``{"update_info": {"version": N}}``."""
    async with _used(request) as worker:
        await worker.cycle.receive_weights(body.update_info)
    return JSONResponse({"message": "Weights updated"})


@router.post("/finish_weight_update")
async def finish_weight_update(request: Request, body: request_bodies.FinishBody | None = None) -> JSONResponse:
    """Load what was fetched, and name it (``weight_version``; default: its number)."""
    async with _used(request) as worker:
        await worker.cycle.finish_session(body.weight_version if body is not None else None)
    return JSONResponse({"message": "Weight update finished"})


@router.post("/update_weight_version")
async def update_weight_version(request: Request, body: request_bodies.LabelBody) -> JSONResponse:
    """Another label for the weights that are loaded."""
    async with _used(request) as worker:
        await worker.cycle.set_label(body.new_version)
    return JSONResponse({"success": True, "new_version": body.new_version})


@router.post("/weight_checker")
async def weight_checker(request: Request, body: request_bodies.WeightCheckerBody) -> JSONResponse:
    """``checksum``: of every tensor in the model, as vLLM counts it; ``compare``: which differ from the ``baseline``."""
    if body.action == "reset":
        fix = "it would leave no valid weights: load another version instead"
        raise CommandError("invalid_request", f"action 'reset': {fix}")
    baseline = body.baseline
    if body.action == "compare" and baseline is None:
        raise CommandError("invalid_request", "action 'compare': give the baseline, which 'checksum' answered")
    async with _used(request) as worker:
        found = await worker.cycle.weight_checksums()
    if baseline is None or body.action == "checksum":
        return JSONResponse({"checksums": found})
    differ = sorted(name for name in found.keys() | baseline.keys() if found.get(name) != baseline.get(name))
    return JSONResponse({"match": not differ, "mismatches": differ})


@router.get("/get_world_size")
async def get_world_size(request: Request, include_dp: Annotated[bool, Query()] = True) -> JSONResponse:
    """Ranks of the engine; with data parallelism it would not have started, so ``include_dp`` changes nothing."""
    return JSONResponse({"world_size": _control(request).facts["world_size"]})


@router.get("/weight_info")
async def weight_info(request: Request) -> JSONResponse:
    """vLLM's label of the weights that are loaded."""
    return JSONResponse({"weight_version": _control(request).worker.cycle.label})


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(
    request: Request,
    reset_running_requests: Annotated[bool, Query()] = False,
    reset_external: Annotated[bool, Query()] = False,
) -> JSONResponse:
    """Forget all cached prefixes; false while blocks are in use, unless running requests are to be recomputed."""
    async with _used(request) as worker:
        done = await worker.reset_prefix_cache(reset_running_requests, reset_external)
    return JSONResponse({"success": done})


class HealthGate:
    """In front of vLLM's ``/health``, by which load balancers and supervisors judge a server: 503 while its weights are in no
    defined state and none are being loaded. Its users would wait in a paused engine for a run that may be dead."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/health"):
            control: ControlContext | None = getattr(scope["app"].state, CONTROL, None)
            cycle = None if control is None else control.worker.cycle
            if cycle is not None and cycle.unusable and not cycle.changing:
                await error_response(503, "weights_unusable", cycle.unusable)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def add_routes(app: FastAPI) -> None:
    """All that is there for HTTP. The routes take the place of vLLM's development routes of the same name."""
    app.include_router(router)
    app.add_middleware(HealthGate)


class ControlPlugin:
    """What vLLM's entry point ``vllm.endpoint_plugins`` makes."""

    name = PLUGIN
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """See :func:`add_routes`."""
        if os.environ.get(ACTIVE) != "1":
            _logger.warning("the control endpoints stay closed: the plugin was loaded, but not asked for")
            return
        add_routes(app)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Make the worker. Raises ConfigError when this server cannot have one: it does not start then."""
        if os.environ.get(ACTIVE) != "1":
            return
        require_loaded()  # which reads sources for half a second: never while requests wait
        config = engine_client.vllm_config
        _check_topology(config, args)
        options = FrontendOptions.from_args(args)
        relay = options.relay_endpoint()
        metrics = EngineMetrics()
        worker = ServedWorker(
            engine_client,
            EngineLimits.from_config(config),
            name=f"vllm-serve-{os.getpid()}",
            observe_update=metrics.observe_phase,
            observe_completion=metrics.observe_completion,
        )
        try:
            await worker.open(None if relay is None else relay.to_dict())
        except RetryableError as error:
            raise ConfigError("--rl-relay", options.relay, str(error)) from error
        instance = secrets.token_hex(8)
        plugin = PluginOptions.from_config(config)
        rollout = bool(plugin.kv_pool) and plugin.kv_pool_role == "rollout"
        if options.deactivate_after and not rollout:
            fix = "only a rollout engine of a pool is deactivated: leave it out"
            raise ConfigError("--rl-deactivate-after", options.deactivate_after, fix)
        activation = Activation(worker, LiveEngine(engine_client), rollout=rollout, after=options.deactivate_after)
        pool = pool_path(plugin.kv_pool) if plugin.kv_pool else None
        control = ControlContext(worker, _facts(config, worker, instance, options), activation, pool)
        control.start(engine_client, metrics, plugin)
        token = find_token(options, os.environ)
        if PluginOptions.from_config(config).kv_transfer:
            control.mover = KvMover(_kv(config, options, token, args), worker.kv_command)
            control.mover.load_carrier()
        guard = BearerGuard(token, options.networks())
        door = RouteContext(
            guard, _bytes(options), instance, lambda: worker.cycle.history.number, control.lease.book.refusal
        )
        setattr(state, STATE, door)
        setattr(state, CONTROL, control)
        _warn(control)


def _kv(config: Any, options: FrontendOptions, token: str, args: Namespace) -> KvOptions:
    """With the certificate of the server itself."""
    names = {"certificate": "ssl_certfile", "key": "ssl_keyfile", "authority": "ssl_ca_certs"}
    tls: dict[str, Any] = {name: found for name, flag in names.items() if (found := getattr(args, flag, None))}
    if "certificate" in tls:
        tls.setdefault("key", tls["certificate"])  # one PEM file may hold both, as https takes it
    if tls and getattr(args, "ssl_cert_reqs", ssl.CERT_NONE) == ssl.CERT_REQUIRED:
        tls["verify_clients"] = True
    return KvOptions(
        token=token,
        host=options.kv_host,
        carrier=options.kv_carrier,
        protocol=options.kv_protocol,
        device=options.kv_device,
        room_mb=PluginOptions.from_config(config).kv_staging_mb,
        tls=tls,
        allow_plain=options.kv_allow_plain,
    )


def _bytes(options: FrontendOptions) -> int:
    return options.max_body_mb << 20


def _facts(config: Any, worker: ServedWorker, instance: str, options: FrontendOptions) -> dict[str, Any]:
    limits = worker.limits
    return {
        "protocol": wire.PROTOCOL,
        "instance": instance,
        "worker": worker.name,
        "model": config.model_config.model,
        "world_size": config.parallel_config.world_size,
        "shape": _shape(config.model_config),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "logprobs_mode": config.model_config.logprobs_mode,
        "routed_experts": config.aux_output_config.enable_return_routed_experts,
        "options": PluginOptions.from_config(config).to_dict(),
        "limits": {
            "max_model_len": limits.model_len,
            "vocabulary": limits.vocabulary,
            "max_num_seqs": limits.slots,
            "max_body_bytes": _bytes(options),
            "max_requests": wire.MAX_REQUESTS,
            "max_ids": wire.MAX_IDS,
        },
    }


def _shape(model_config: Any) -> dict[str, Any]:
    """What tells whether this can be the model that somebody trains: names as in its config.json."""
    found = model_config.hf_text_config
    sizes = {name: getattr(found, name, None) for name in wire.SHAPE}
    return {"architectures": list(getattr(model_config.hf_config, "architectures", None) or []), **sizes}


def _check_topology(config: Any, args: Namespace) -> None:
    if (getattr(args, "api_server_count", None) or 1) > 1:
        raise ConfigError("--api-server-count", args.api_server_count, "the control endpoints need one process: give 1")
    if config.parallel_config.data_parallel_size > 1:
        size = config.parallel_config.data_parallel_size
        raise ConfigError(
            "--data-parallel-size", size, "the control endpoints command one engine: start a server per engine"
        )


def _warn(control: ControlContext) -> None:
    import vllm.envs as envs

    if envs.VLLM_SERVER_DEV_MODE:
        _logger.warning(
            "VLLM_SERVER_DEV_MODE is set: vLLM's development routes (/collective_rpc, /sleep and others) are open to "
            "everyone without a token; rl-coserve does not need it"
        )
    if (mode := control.facts["logprobs_mode"]) != SAMPLING_LOGPROBS:
        _logger.warning(
            "--logprobs-mode is %s: log-probs of rollouts are those of the sampling distribution only with %s",
            mode,
            SAMPLING_LOGPROBS,
        )
