"""A run of ``rl-coserve train`` whose engines are twins: they compute nothing, and stand in for vLLM and Megatron-Core.

``python -m scripts.bench.micro.engine_twins train ...`` is the command line. Ray's actors, Mooncake's master, Redis, hosts of
functions, environments, journals, store, checkpoints, listeners and signals are the run's own; a start takes seconds. Weights
are bytes that say their version. They go through the real publisher and relay, an engine loads nothing else, and what it
says stands under that version. The trainer refuses to train a trajectory twice. While ``FOLDER/hold`` is there
(``RL_COSERVE_TWIN_HOLD`` names it) the trainer stands still between the last put of a version and its commit, and says so in
``FOLDER/held``.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from orchestrator.api import PublishResult, RunError, TrainBatch, UpdateResult
from orchestrator.config import Config, parse_config, to_json
from orchestrator.sim.run_audit import RunAudit
from orchestrator.sim.seeded_draws import END, random_stream
from orchestrator.sim.simulated_speech import Speech
from orchestrator.sim.simulated_worker import SimWeights, SimWorker
from orchestrator.sim.twins import SimTrainer
from orchestrator.transfer import Publisher, RelayEndpoint, Subscriber
from orchestrator.transfer.job_head import PublishAttempt, PublishedVersion
from orchestrator.transfer.manifest import RankShare

HOLD = "RL_COSERVE_TWIN_HOLD"  # the environment variable
_HELD_SECONDS = 5.0  # at most
_SHAPE = (64, 1024)  # of each tensor, bytes
_TENSORS = 4
_STATE = "state.npy"
_MOVES = 4  # ids from 2 on: FrozenLake's
_HERE = "scripts.bench.micro.engine_twins"


def weights_of(version: int) -> np.ndarray[Any, Any]:
    """One tensor of a version."""
    return np.full(_SHAPE, version % 251, np.uint8)


class _Moves(Speech):
    """What the policy says: one move."""

    def response(self, context: Sequence[int], trajectory_id: str, turn: int, limit: int) -> tuple[int, ...]:
        """See Speech."""
        return (2 + random_stream(trajectory_id, turn).randrange(_MOVES), END)[:limit]


class TwinWorker(SimWorker):
    """An engine's process: time passes for each token, weights come from the relay."""

    def __init__(self, config: str, relay: dict[str, Any], name: str, **_: Any) -> None:
        settings = parse_config(json.loads(config))
        super().__init__(name, settings, SimWeights(), speech=_Moves(settings, None))
        self._endpoint = RelayEndpoint.from_dict(relay)
        self._subscriber: Subscriber | None = None
        self._fetching = asyncio.Lock()

    async def prepare(self, version: int) -> None:
        """See the port. Raises what the relay does, and RunError for weights of another version."""
        async with self._fetching:
            if version != self._prepared:
                await asyncio.to_thread(self._fetch, version)
                self._weights.put(version)
        await super().prepare(version)

    async def update(self, version: int) -> UpdateResult:
        """See the port."""
        await self.prepare(version)
        return await super().update(version)

    def _fetch(self, version: int) -> None:
        if self._subscriber is None:
            self._subscriber = Subscriber(self._endpoint)
        wanted, found = weights_of(version), 0
        for _, data in self._subscriber.fetch(self._subscriber.manifest(version)):
            found += np.array_equal(np.frombuffer(data, wanted.dtype), wanted.ravel())
        if found != _TENSORS:
            raise RunError(f"what the relay calls version {version} is not")


class _TrainedOnce:
    """For the trainer's twin, in RunAudit's place."""

    trained_ids: dict[str, int]

    def __init__(self) -> None:
        self.trained_ids = {}

    def check_batch(self, batch: TrainBatch, version: int) -> None:
        """Raises RunError."""
        again = [one.trajectory_id for one in batch.samples if one.trajectory_id in self.trained_ids]
        if again or batch.version != version:
            raise RunError(f"a batch of version {batch.version} for {version}; trained before: {again[:3]}")

    def record_training(self, batch: TrainBatch) -> None:
        """They are trained."""
        self.trained_ids.update((one.trajectory_id, batch.step) for one in batch.samples)

    def roll_back(self, trained: dict[str, int]) -> None:
        """To a checkpoint's."""
        self.trained_ids = trained


class TwinTrainer(SimTrainer):
    """A trainer's process."""

    def __init__(self, config: str, relay: dict[str, Any]) -> None:
        settings = parse_config(json.loads(config))
        super().__init__(settings, SimWeights(), cast(RunAudit, _TrainedOnce()))
        self._endpoint = RelayEndpoint.from_dict(relay)
        self._publisher: Publisher | None = None

    async def publish(self) -> PublishResult:
        """See the port. The first publication opens a new epoch."""
        return await asyncio.to_thread(self._publish)

    def _publish(self) -> PublishResult:
        if self._publisher is None:
            self._publisher = _HeldPublisher(self._endpoint)
            self._publisher.rollback(self.version)
        data = weights_of(self.version).ravel()
        return self._publisher.publish(
            self.version, [(f"layer.{number}", _SHAPE, "uint8", data) for number in range(_TENSORS)]
        )

    async def save(self, folder: str) -> None:
        """See the port."""
        await super().save(folder)
        await asyncio.to_thread(np.save, Path(folder) / _STATE, np.repeat(weights_of(self.version), 16, 0))

    async def load(self, folder: str) -> int:
        """See the port. Raises RunError for the weights of another version."""
        version = await super().load(folder)
        if not (np.load(Path(folder) / _STATE) == version % 251).all():
            raise RunError(f"{folder} holds the weights of another version than {version}")
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
        return version

    async def export(self, folder: str) -> None:
        """The result."""
        await asyncio.to_thread(os.makedirs, folder, exist_ok=True)
        await asyncio.to_thread(np.save, f"{folder}/{_STATE}", weights_of(self.version))


class _HeldPublisher(Publisher):
    """One that can be met between the last put and the commit."""

    def _store_manifest(self, attempt: PublishAttempt, share: RankShare) -> PublishedVersion:
        found = super()._store_manifest(attempt, share)
        _hold()
        return found


def _hold() -> None:
    folder = os.environ.get(HOLD)
    if not folder or not Path(folder, "hold").exists():
        return
    Path(folder, "held").touch()
    deadline = time.monotonic() + _HELD_SECONDS
    while Path(folder, "hold").exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def make_shape(folder: str, **_: Any) -> None:
    """In the place of a tiny model: what is asked of its config."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 2}
    Path(folder, "config.json").write_text(json.dumps(shape | {"hidden_size": 128}), encoding="utf-8")


def _worker_arguments(config: Config, model: str, number: int) -> dict[str, Any]:
    return {"config": to_json(config)}


def _trainer_arguments(config: Config, model: str) -> dict[str, Any]:
    return {"config": to_json(config)}


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code of the command line."""
    from orchestrator import cli
    from orchestrator.runtime import own_engines, real_run, tiny_model_setup

    own_engines.WORKER_CLASS = f"{_HERE}:TwinWorker"
    real_run.TRAINER_CLASS = f"{_HERE}:TwinTrainer"
    own_engines.worker_arguments = _worker_arguments
    real_run.trainer_arguments = _trainer_arguments
    tiny_model_setup.TINY_MODEL = f"{_HERE}:make_shape"
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
