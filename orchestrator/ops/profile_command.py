"""``rl-coserve profile``: measures the config's model in this machine's engine, an actor a layout; with ``--judge`` a judge that
runs start themselves (RollPacker 4.1).

Guarantees: what cannot be asked for is one ConfigError before anything starts (a TP that the model's heads do not divide
into, a file of another model, engine or device); the actors end with the command.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.api import ConfigError
from orchestrator.api.jsontext import parse_object
from orchestrator.cluster import ActorGen
from orchestrator.config import Config
from orchestrator.config.reward_keys import JudgeSection
from orchestrator.policies.parallelism.engine_profile import EngineLayout
from orchestrator.policies.serving.judge_residency import BATCH
from orchestrator.profiler.measurement import Prober, ProfileProgress, measure_places, powers_between, profile_grid
from orchestrator.profiler.profile_file import ProfileFile, ProfileKey, load_profile, model_name
from orchestrator.run_folder import describe_machine
from orchestrator.runtime import tiny_model_setup
from orchestrator.runtime.engine_actors import VllmEngine
from orchestrator.runtime.engine_cuts import IDENTITY
from orchestrator.runtime.own_engines import engine_environment, thread_variables
from orchestrator.tasks import registry

PROFILER = "vllm_rlplugin.engine_profiler:EngineProfiler"
JUDGE_PROFILER = "vllm_rlplugin.judge.judge_profiler:JudgeProfiler"
JUDGE_IDENTITY = "vllm_rlplugin.judge.judge_profiler:identity"
_SHORTEST, _LONGEST_QUESTION = 32, 2048  # tokens


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which sizes; () for the defaults: TP 1, batches 1, 2, 4, ... up to max_num_seqs, lengths 32, 128, ... up to the longest
    context."""

    tp: Sequence[int] = ()
    batches: Sequence[int] = ()
    lengths: Sequence[int] = ()
    out: Path | None = None  # None: profiles/KEY.json

    def __post_init__(self) -> None:
        for name, values in (("--tp", self.tp), ("--batch", self.batches), ("--length", self.lengths)):
            if any(value < 1 for value in values):
                raise ConfigError(name, ",".join(map(str, values)), "give sizes of at least 1, as in 1,2,4")


async def profile_model(config: Config, wanted: Wanted, note: Callable[[ProfileProgress], object]) -> ProfileFile:
    """Bring the file to all points. Ray is up. Raises ConfigError, and RunError when an engine dies."""
    engine = config.rollout.engine
    check_sizes(config, wanted)
    with tempfile.TemporaryDirectory(prefix="rl-coserve-profile-") as folder:
        async with _actor(config, "profile") as actor:
            model = config.model.path or await _tiny(actor, config, folder)
            names = await actor.start("function", IDENTITY, {"threads": engine.threads})
        _check_heads(model, wanted.tp)
        key = ProfileKey(model=model_name(Path(model), config.model.dtype), **names)
        path = wanted.out or Path("profiles") / key.file_name()
        file = load_profile(path, "--out", key) if path.exists() else ProfileFile(path, key)
        file.about = describe_machine()
        layouts = [EngineLayout(tp) for tp in wanted.tp or (1,)]
        batches = wanted.batches or powers_between(1, engine.max_num_seqs)
        room = engine.max_model_len - 32  # for what a point generates
        lengths = wanted.lengths or powers_between(min(_SHORTEST, room), room, 4)

        def start(layout: EngineLayout) -> AbstractAsyncContextManager[Prober]:
            return _engine(config, model, layout)

        await measure_places(file, profile_grid(layouts, batches, lengths), start, note)
    return file


async def profile_judge(
    config: Config, task: str, wanted: Wanted, note: Callable[[ProfileProgress], object]
) -> ProfileFile:
    """The same of the judge that :func:`own_judge` names."""
    judge = own_judge(config, task, wanted)
    streamed = judge.streamed
    environment = thread_variables(streamed.threads)
    place = {"device": streamed.device, "threads": streamed.threads, "memory_mb": streamed.memory_mb}
    batches = wanted.batches or powers_between(1, BATCH, 4)
    lengths = wanted.lengths or powers_between(_SHORTEST, _LONGEST_QUESTION, 4)
    cluster = ActorGen(VllmEngine, {"profile-judge": None}, environment)
    await cluster.launch()
    try:
        here = await cluster.start("function", JUDGE_IDENTITY, place)
        key = ProfileKey(model=model_name(Path(judge.path), streamed.dtype), **here)
        path = wanted.out or Path("profiles") / key.file_name()
        file = load_profile(path, "--out", key) if path.exists() else ProfileFile(path, key)
        file.about = describe_machine()

        @asynccontextmanager
        async def start(_: EngineLayout) -> AsyncIterator[Prober]:
            options = {"model": judge.path, "dtype": streamed.dtype, "file": streamed.layers_file, **place}
            await cluster.start("create", JUDGE_PROFILER, {**options, "longest": max(lengths)})
            yield _Engine(cluster)
            await cluster.start("beyond", "close")

        await measure_places(file, profile_grid([EngineLayout()], batches, lengths), start, note)
    finally:
        cluster.close()
    return file


def own_judge(config: Config, task: str, wanted: Wanted) -> JudgeSection:
    """The judge of ``task`` that a run starts itself; "": of all, or the only one. Raises ConfigError."""
    own = config.reward.own_judges
    name = task or next(iter(own), "")
    if name not in own or (not task and len(own) > 1):
        fix = f"name one of {', '.join(own)}" if own else "the run has no judge of its own: give reward.judge.path"
        raise ConfigError("--judge", task, fix)
    if wanted.tp:
        raise ConfigError("--tp", ",".join(map(str, wanted.tp)), "a judge runs on one device: leave it out")
    if wanted.batches and max(wanted.batches) > BATCH:
        raise ConfigError("--batch", max(wanted.batches), f"a judge batches at most {BATCH} questions")
    return own[name]


def check_sizes(config: Config, wanted: Wanted) -> None:
    """What can be known before anything starts. Raises ConfigError."""
    if config.rollout.engines:
        fix = "a profile is for one kind of engine: give its options in [rollout.engine]"
        raise ConfigError("rollout.engines", len(config.rollout.engines), fix)
    longest = config.rollout.engine.max_model_len
    if wanted.lengths and max(wanted.lengths) >= longest:
        fix = f"rollout.engine.max_model_len is {longest}: longer contexts do not fit; raise it, or ask for less"
        raise ConfigError("--length", max(wanted.lengths), fix)
    if wanted.batches and max(wanted.batches) > config.rollout.engine.max_num_seqs:
        fix = f"rollout.engine.max_num_seqs is {config.rollout.engine.max_num_seqs}; raise it, or ask for less"
        raise ConfigError("--batch", max(wanted.batches), fix)
    if config.model.path:
        _check_heads(config.model.path, wanted.tp)


def _check_heads(model: str, sizes: Sequence[int]) -> None:
    try:
        heads = int(parse_object((Path(model) / "config.json").read_bytes())["num_attention_heads"])
    except (OSError, ValueError, LookupError, TypeError, OverflowError) as error:
        raise ConfigError(
            "model.path", model, f"its config.json cannot be read ({error}); give a Hugging Face folder"
        ) from error
    for tp in sizes:
        if heads % tp:
            raise ConfigError("--tp", tp, f"must divide the model's {heads} attention heads")


class _Engine:
    """A Prober in an actor."""

    def __init__(self, actor: ActorGen) -> None:
        self._actor = actor

    async def shape(self) -> Mapping[str, Any]:
        """See the protocol."""
        found: Mapping[str, Any] = await self._actor.start("beyond", "shape")
        return found

    async def measure(self, phase: str, batch: int, tokens: int) -> Mapping[str, Any]:
        """See the protocol."""
        found: Mapping[str, Any] = await self._actor.start("beyond", "measure", phase, batch, tokens)
        return found


@asynccontextmanager
async def _actor(config: Config, name: str) -> AsyncIterator[ActorGen]:
    cluster = ActorGen(VllmEngine, {name: None}, engine_environment(config))
    await cluster.launch()
    try:
        yield cluster
    finally:
        cluster.close()


@asynccontextmanager
async def _engine(config: Config, model: str, layout: EngineLayout) -> AsyncIterator[Prober]:
    sizes = config.rollout.engine.model_dump()
    async with _actor(config, f"profile-tp{layout.tp}") as actor:
        options = {"model": model, "dtype": config.model.dtype, "seed": config.run.seed, **sizes}
        await actor.start("create", PROFILER, {**options, "tensor_parallel_size": layout.tp})
        yield _Engine(actor)
        await actor.start("beyond", "close")


async def _tiny(actor: ActorGen, config: Config, folder: str) -> str:
    """The model that a run of this config would make; its cost does not depend on its weights."""
    task = registry.make(config.task.name, config.task.heldout_maps, **config.task.options)
    await actor.start("function", tiny_model_setup.TINY_MODEL, tiny_model_setup.arguments(config, task, Path(folder)))
    return folder
