"""verl trains, our rollout side generates: what verl's config names is here, and nothing of verl is changed.

    VERL_USE_EXTERNAL_MODULES=orchestrator.adapters.verl     in the environment of all of verl's processes
    actor_rollout_ref.rollout.name = coserve
    actor_rollout_ref.rollout.agent.agent_loop_manager_class = orchestrator.adapters.verl.CoserveAgentLoopManager
    actor_rollout_ref.rollout.checkpoint_manager_class = orchestrator.adapters.verl.CoserveCheckpointManager
    actor_rollout_ref.rollout.checkpoint_engine.backend = coserve
    actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.coserve = {relay: {...}}
    actor_rollout_ref.rollout.custom.coserve = {relay: {...}, rollout: {served: [...]}, stop_token_ids: [...]}

Guarantees: nothing else of this installation imports this module or verl; with a version of verl that was not tested every
name is an error which names the tested range, and nothing is registered. verl's agent loops run as they are: only the client
that they ask for tokens is another one. What a request would need and is not served (images, top_k) is an error.

The classes are made on demand (PEP 562), because their bases are verl's.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from orchestrator.adapters.rollout_side import RolloutSide
from orchestrator.api import ConfigError, RunError
from orchestrator.hooks import tested_versions
from orchestrator.transfer import Publisher, RelayEndpoint

NAME = "coserve"
SECTION = f"actor_rollout_ref.rollout.custom.{NAME}"
ACTOR = "rl-coserve-rollout"  # the Ray actor, one a job
_CONCURRENCY = 1 << 14  # turns in flight at once
_UNSERVED = ("image_data", "video_data", "audio_data")


def section_of(config: Any) -> dict[str, Any]:
    """The settings in verl's config, as plain data. Raises ConfigError."""
    custom = config.actor_rollout_ref.rollout.get("custom") or {}
    section = custom.get(NAME)
    if not section:
        raise ConfigError(SECTION, None, "is missing: relay, rollout.served and stop_token_ids (docs/adapters.md)")
    from omegaconf import OmegaConf

    found = OmegaConf.to_container(section, resolve=True) if OmegaConf.is_config(section) else dict(section)
    return dict(found)


def rollout_actor(config: Any) -> Any:
    """The job's rollout side: made by whoever asks first, and shared. Raises ConfigError."""
    import ray

    settings = section_of(config)
    RolloutSide(settings, SECTION)  # what is wrong is said here, not in another process
    options = {"name": ACTOR, "get_if_exists": True, "max_concurrency": _CONCURRENCY, "num_cpus": 1}
    return ray.remote(RolloutSide).options(**options).remote(settings, SECTION)


def tokens_left(config: Any, prompt: int, sampling: Mapping[str, Any]) -> int:
    """``max_tokens`` where the caller names none: verl's rule. At least 1. Raises ConfigError without room."""
    rollout = config.actor_rollout_ref.rollout
    room = int(rollout.get("max_model_len") or rollout.prompt_length + rollout.response_length) - prompt
    if room < 1:
        fix = f"a prompt of {prompt} tokens leaves no room for an answer; raise it"
        raise ConfigError("actor_rollout_ref.rollout.max_model_len", rollout.get("max_model_len"), fix)
    named = sampling.get("max_tokens") or sampling.get("max_new_tokens")
    usual = min(rollout.response_length, rollout.prompt_length + rollout.response_length - prompt)
    return max(1, min(int(named or usual), room))


class ClientMethods:
    """What :class:`CoserveClient` puts in the place of verl's own client; pickled into verl's workers with it."""

    config: Any
    _rollout: Any

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> Any:
        """See verl's LLMServerClient. ``request_id`` names the trajectory; ``priority``: the lower one goes first. The versions
        of the tokens are ``global_steps``, ``min_global_steps`` and ``max_global_steps`` in ``extra_fields``."""
        for name in _UNSERVED:
            if kwargs.get(name):
                raise ConfigError(name, "(given)", "the rollout side serves text: images, video and audio are not")
        from verl.workers.rollout.replica import TokenOutput

        prompt = [int(token) for token in prompt_ids]
        limited = {
            name: value for name, value in sampling_params.items() if name not in ("max_tokens", "max_new_tokens")
        }
        limited["max_tokens"] = tokens_left(self.config, len(prompt), sampling_params)
        priority = int(kwargs.get("priority") or 0)
        done = await self._rollout.generate.remote(str(request_id), prompt, limited, priority)
        if done["finish_reason"] == "error":
            raise RunError(f"generation failed: {done['error']}")
        spans = [version for version, _ in done["versions"]]
        return TokenOutput(
            token_ids=done["token_ids"],
            log_probs=done["logprobs"] if sampling_params.get("logprobs") else None,
            stop_reason="aborted" if done["finish_reason"] in ("abort", "stale") else "completed",
            num_preempted=0,
            extra_fields={
                "global_steps": spans[-1] if spans else None,
                "min_global_steps": min(spans, default=None),
                "max_global_steps": max(spans, default=None),
            },
        )


class EngineMethods:
    """verl's checkpoint engine over our relay: rank 0 publishes, the others take part in gathering."""

    def __init__(self, bucket_size: int = 0, is_master: bool = False, relay: Any = None, **unknown: Any) -> None:
        if unknown or not relay:
            fix = f"give relay there, the same as {SECTION}.relay, and nothing else"
            raise ConfigError(f"checkpoint_engine.engine_kwargs.{NAME}", sorted(unknown), fix)
        self._master = is_master
        self._endpoint = RelayEndpoint.from_dict(dict(relay))
        self._publisher: Publisher | None = None
        self._version = -1

    def prepare(self) -> dict[str, Any]:
        """Nothing: there are no groups of processes between training and rollout."""
        return {}

    @classmethod
    def build_topology(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Nothing, as above."""
        return {}, {}

    def init_process_group(self, **kwargs: Any) -> None:
        """Nothing, as above."""

    def finalize(self) -> None:
        """Nothing, as above."""

    async def send_weights(self, weights: Iterable[tuple[str, Any]], global_steps: int | None = None) -> dict[str, Any]:
        """Publish whole tensors, under their Hugging Face names, as version ``global_steps``. Raises RelayError."""
        if global_steps is None:
            raise RunError("verl gave no global_steps with its weights: they are the versions here")
        if global_steps == self._version:
            return {}  # published already; on no rank is anything gathered
        if not self._master:
            for _ in weights:
                pass
        else:
            if self._publisher is None:
                self._publisher = Publisher(self._endpoint)
                self._publisher.rollback(global_steps)
            self._publisher.publish(global_steps, _tensors(weights))
        self._version = global_steps
        return {}

    async def receive_weights(self, global_steps: int | None = None) -> Any:
        """Never: the rollout workers fetch from the relay by themselves."""
        raise RunError("the rollout side fetches its weights from the relay")


def _tensors(weights: Iterable[tuple[str, Any]]) -> Iterable[tuple[str, tuple[int, ...], str, Any]]:
    import torch

    for name, tensor in weights:
        whole = tensor.detach().to("cpu").contiguous()
        data = whole.reshape(-1).view(torch.uint8).numpy()
        yield name, tuple(whole.shape), str(whole.dtype).removeprefix("torch."), data


class ReplicaMethods:
    """A replica that starts no server: ours run already."""

    async def launch_servers(self) -> None:
        """Nothing."""

    async def init_hybrid(self, worker_group: Any) -> None:
        """Nothing: the devices of the trainer are its own."""
        self._place()

    async def init_hybrid_colocated(self, worker_group: Any, resource_pool: Any) -> None:
        """As above."""
        self._place()

    async def init_standalone(self) -> None:
        """No resource pool, no workers."""
        self._place()

    def _place(self) -> None:
        self._server_address = f"{NAME}-{getattr(self, 'replica_rank', 0)}"
        self._server_handle = None


class WorkerMethods:
    """The rollout in a trainer's process: there is none."""

    async def resume(self, tags: list[str]) -> None:
        """Nothing lies on the trainer's devices."""

    async def release(self) -> None:
        """As above."""

    async def update_weights(self, weights: Any, **kwargs: Any) -> None:
        """Never: set checkpoint_engine.backend."""
        raise RunError(f"set actor_rollout_ref.rollout.checkpoint_engine.backend = {NAME}: weights go over the relay")


def _client() -> type:
    from verl.workers.rollout.llm_server import LLMServerClient

    def __init__(self: Any, config: Any, rollout: Any) -> None:
        LLMServerClient.__init__(self, config, None)
        self._rollout = rollout

    return _named("CoserveClient", (ClientMethods, LLMServerClient), {"__init__": __init__})


def _loop_manager(name: str) -> type:
    """Of our client; its base has the same name without ours."""
    base: Any = getattr(importlib.import_module(_LOOP_MANAGERS[name]), name.removeprefix("Coserve"))

    def __init__(self: Any, config: Any, llm_client: Any = None, *args: Any, **kwargs: Any) -> None:
        client = _made("CoserveClient")(config, rollout_actor(config))
        base.__init__(self, config, client, *args, **kwargs)

    return _named(name, (base,), {"__init__": __init__})


def _checkpoint_manager() -> type:
    import ray
    from verl.checkpoint_engine import CheckpointEngineManager
    from verl.utils.ray_utils import auto_await

    def __init__(self: Any, config: Any, actor_wg: Any, replicas: Any) -> None:
        CheckpointEngineManager.__init__(self, config, actor_wg, replicas)
        if config.backend != NAME:
            fix = f"must be {NAME!r} with this checkpoint manager"
            raise ConfigError("actor_rollout_ref.rollout.checkpoint_engine.backend", config.backend, fix)

    @auto_await  # type: ignore[untyped-decorator]
    async def update_weights(self: Any, global_steps: int | None = None) -> dict[str, Any]:
        """The trainer publishes, then the workers move; generation stops only while they load."""
        results = ray.get(self.actor_wg.update_weights(global_steps=global_steps, mode=NAME))
        await ray.get_actor(ACTOR).move_to.remote(int(global_steps or 0))
        return {name: value for result in results if isinstance(result, dict) for name, value in result.items()}

    methods = {"__init__": __init__, "update_weights": update_weights}
    return _named("CoserveCheckpointManager", (CheckpointEngineManager,), methods)


def _implementation(name: str) -> type:
    """Our methods before those of verl's base."""
    methods, module, base = _IMPLEMENTATIONS[name]
    return _named(name, (methods, getattr(importlib.import_module(module), base)), {})


_LOOP_MANAGERS = {
    "CoserveAgentLoopManager": "verl.experimental.agent_loop",
    "CoserveAgentLoopManagerTQ": "verl.trainer.ppo.v1",
}
_IMPLEMENTATIONS = {
    "CoserveCheckpointEngine": (EngineMethods, "verl.checkpoint_engine", "CheckpointEngine"),
    "CoserveReplica": (ReplicaMethods, "verl.workers.rollout.replica", "RolloutReplica"),
    "CoserveRollout": (WorkerMethods, "verl.workers.rollout.base", "BaseRollout"),
}
_MAKERS: dict[str, Callable[[], type]] = {
    "CoserveClient": _client,
    "CoserveCheckpointManager": _checkpoint_manager,
    **{name: partial(_loop_manager, name) for name in _LOOP_MANAGERS},
    **{name: partial(_implementation, name) for name in _IMPLEMENTATIONS},
}


def _named(name: str, bases: tuple[Any, ...], methods: dict[str, Any]) -> type:
    """A class that pickle finds again under its name in this module."""
    return type(name, bases, {**methods, "__module__": __name__, "__qualname__": name, "__doc__": f"See {__name__}."})


def _made(name: str) -> Any:
    """A class of this module. Raises ConfigError for a verl that was not tested."""
    if name not in globals():
        tested_versions.check_version(tested_versions.VERL)
        globals()[name] = _MAKERS[name]()
    return globals()[name]


def __getattr__(name: str) -> Any:
    if name not in _MAKERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _made(name)


def register_with_verl() -> bool:
    """Make the names in verl's config known to it; False: there is no tested verl here, and nothing is done."""
    found = tested_versions.find_version(tested_versions.VERL)
    if found is None or found[1] not in tested_versions.VERL.tested:
        return False
    from verl.checkpoint_engine import CheckpointEngineRegistry
    from verl.workers.rollout import base, replica

    CheckpointEngineRegistry.register(NAME)(_made("CoserveCheckpointEngine"))
    replica.RolloutReplicaRegistry.register(NAME, lambda: _made("CoserveReplica"))
    base._ROLLOUT_REGISTRY[NAME, "async"] = f"{__name__}.CoserveRollout"
    return True


with contextlib.suppress(ImportError):  # a verl without what it needs itself: asking for a class says what is missing
    register_with_verl()
