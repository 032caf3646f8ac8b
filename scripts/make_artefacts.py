"""Makes the small artefacts of this version that later versions must still read: tests/artefacts/VERSION.

python scripts/make_artefacts.py FOLDER

Run it once for each minor version, when that is released, and commit what it makes; never again for a version that is out.
All of it is made by the code that makes it in a run, from fixed seeds: a simulated run with faults, for its log, journal,
checkpoints and queue of rounds; a checkpoint whose buffer is shards, as real runs write it; a trajectory store; weight
buckets, manifests, differences and records; a profile; the state of a length predictor. ``expected.json`` says what a reader
must find in them.
"""

from __future__ import annotations

import json
import lzma
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator import __version__
from orchestrator.api import ContextStart, Prompt, RoutedExperts, ShardKey, Trajectory, Turn
from orchestrator.checkpoint import Checkpoints, CheckpointState
from orchestrator.config import load_config, to_json
from orchestrator.policies.parallelism.engine_profile import EngineLayout, EngineShape, ProfilePoint
from orchestrator.policies.placement.device_allocation import AllocationView, DeviceBinding, DevicePool, DeviceWish
from orchestrator.policies.prediction.length_features import TrajectoryProgress
from orchestrator.policies.prediction.length_predictor import LengthOutcome, ProgressivePredictor
from orchestrator.profiler.profile_file import ProfileFile, ProfileKey
from orchestrator.resources.resource_manager import encode_view
from orchestrator.run_folder import write_environment
from orchestrator.shards.shard_folder import ShardFolder
from orchestrator.sim.simulated_run import simulate
from orchestrator.store import TrajectoryStore
from orchestrator.transfer import MemoryMetadata, MemoryRelay, Publisher, RelayEndpoint, announcement, version_leases
from orchestrator.transfer.job_head import head_key
from orchestrator.transfer.retention import VersionHolder
from orchestrator.transfer.shard_codec import DeltaCodec

CONFIG = """\
[run]
name = "artefact"
mode = "async"
steps = 4
seed = 5

[rollout]
workers = 2
environments = 24
group_size = 2
groups_per_step = 3
alpha = 1

[rollout.rounds]
enabled = true
epoch_prompts = 12

[checkpoint]
every = 2

[sim]
fault_rate = 0.002
faults = ["delay"]
"""
JOB = RelayEndpoint(job="artefact", kind="memory", master="unused", bucket_bytes=4096, snapshot_every=3)


def main(folder: Path) -> None:
    """Everything, into a folder that is made anew."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    expected = {
        "version": __version__,
        "run": run(folder),
        "trajectories": trajectories(folder / "run" / "trajectories"),
    }
    expected |= {"weights": weights(folder / "weights"), "profile": profile(folder), "predictor": predictor(folder)}
    expected["shards"] = shards(folder / "shards")
    wish = DeviceWish("vllm-0", "H800", 2, "run-1")
    view = AllocationView(
        (DevicePool("H800", (0, 1, 2, 3), 4, (3,)),), {"vllm-0": DeviceBinding(wish, "H800", (0, 1), "")}
    )
    (folder / "resources.msgpack").write_bytes(encode_view(view))
    (folder / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def run(folder: Path) -> dict[str, Any]:
    """Config, log, journal, checkpoints with the queue of rounds."""
    (folder / "config.toml").write_text(CONFIG, encoding="utf-8")
    config = load_config(folder / "config.toml")
    result = simulate(config, folder / "run")
    (folder / "run" / "config.json").write_text(to_json(config) + "\n", encoding="utf-8")
    write_environment(folder / "run" / "environment.json", {"machine": {}, "versions": {"rl-coserve": __version__}})
    checkpoints = Checkpoints(folder / "run" / "checkpoints", keep=9)
    _, state, _ = checkpoints.newest() or (None, None, None)
    assert state is not None
    assert state.rounds is not None
    # One more, whose buffer holds what a buffer can: several turns and versions, a context that began anew.
    start = ContextStart((2, 7), "summary", 1, 30)
    turns = (
        Turn((2, 3), (4,), (-0.5,), ((3, 1),)),
        Turn((5,), (6, 7), (-0.25, -1.5), ((3, 1), (4, 1)), 0.5, True, context=start),
    )
    kept = Trajectory(
        "t900", "g900", "nim", Prompt("k", "nim", 1, "{}"), turns, 1.0, "v", 3, False, ("slow",), 1.0, 2.0, 3.0
    )
    more = replace(state, step=6, buffer=(kept,), success_history=((2, 0.5),), run_times={"nim/k": [0.5]})
    partial = checkpoints.begin(6)
    (partial / "trainer" / "trainer.json").write_text("{}", encoding="utf-8")
    checkpoints.commit(partial, more)
    found = sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())
    return {"ledger": result.ledger, "steps": 4, "checkpoints": found, "buffered": ["t900"]}


def shards(folder: Path) -> dict[str, Any]:
    """Of one step: log-probs of either width, a context that began anew, experts that the rollout chose."""
    experts, start = RoutedExperts(0, 1, 2, 1, bytes(range(8))), ContextStart((2,), "summary", 1, 30)
    turns = (
        Turn((2, 3), (4,), (-0.5,), ((3, 1),), experts=experts),
        Turn((5,), (6, 7), (-0.25, -1.5), ((3, 1), (4, 1)), 0.5, True, 0.5, 0.25, start),
    )
    prompt = Prompt("k", "nim", 1, "{}")
    kept = Trajectory("t1", "g1", "nim", prompt, turns, 1.0, "v", 3, False, ("slow",), 1.0, 2.0, 3.0)
    exact = replace(kept, id="t2", turns=(Turn((2,), (3,), (-0.1,), ((4, 1),)),), errors=())
    laid = ShardFolder(folder / "laid")
    checkpoints = Checkpoints(folder, keep=1)
    state = CheckpointState(2, 4, 9, 12.5, tuple(map(laid.finish, (kept, exact))), ((2, 0.5),), entropies=(0.25,))
    partial = checkpoints.begin(2)
    (partial / "trainer" / "trainer.json").write_text("{}", encoding="utf-8")
    checkpoints.commit(partial, state)
    laid.close()
    said = [[[turn.observation_ids, turn.action_ids, turn.logprobs] for turn in item.turns] for item in (kept, exact)]
    return {"turns": said, "experts": experts.data.hex(), "context": [start.reason, *start.token_ids]}


def trajectories(folder: Path) -> dict[str, Any]:
    """Two groups that were trained, one that was filtered."""
    store = TrajectoryStore(folder)
    for number in range(6):
        turn = Turn((2, 3, number), (4, 5), (-0.5, -0.25), ((number % 2, 1), (number % 2 + 1, 1)), 0.5, True, 0.5, 0.25)
        prompt = Prompt(f"k{number // 2}", "nim", number // 2, "")
        made = Trajectory(
            f"t{number}", f"g{number // 2}", "nim", prompt, (turn,), 1.0, "v", 3, False, (), 1.0, 2.0, 3.0
        )
        trained = number < 4
        place = number if trained else None
        store.append(made, 0, "trained" if trained else "filtered: zero_variance", position=place)
    store.close()
    return {"trained": 4, "all": 6, "tokens": [4, 5], "logprobs": [-0.5, -0.25]}


def weights(folder: Path) -> dict[str, Any]:
    """A full snapshot and a difference, as they lie on a relay; the records beside them."""
    relay, metadata = MemoryRelay(), MemoryMetadata()
    publisher = Publisher(JOB, relay, metadata, codec=DeltaCodec())
    generator = np.random.default_rng(3)
    old = (generator.normal(0, 0.02, 2000).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    new = old.copy()
    new[::40] ^= 1
    key = ShardKey("layers.0.weight", -1, 0, 0, (2000,), "bfloat16", "raw", 0)
    first = publisher.publish_shards(0, [(key, old.view(np.uint8), None)])
    second = publisher.publish_shards(1, [(key, new.view(np.uint8), old.view(np.uint8))], base=0)
    version_leases.renew_lease(metadata, JOB.job, "host/1/0", publisher.epoch, VersionHolder(1, -1), 600)
    folder.mkdir()
    for name in relay.keys():  # noqa: SIM118
        size = relay.size(name)
        buffer = bytearray(size)
        relay.get_into(name, memoryview(buffer))
        (folder / name.replace("/", "@")).write_bytes(buffer)
    for name, record in (("head", head_key(JOB.job)), ("leases", version_leases.leases_key(JOB.job))):
        present = metadata.get(record)
        assert present is not None
        (folder / f"{name}.msgpack").write_bytes(present[0])
    (folder / "announcement.bin").write_bytes(announcement.pack_announcement([key]))
    (folder / "old.bin").write_bytes(old.tobytes())
    (folder / "new.bin").write_bytes(new.tobytes())
    return {"contents": [first.content, second.content], "endpoint": JOB.to_dict()}


def profile(folder: Path) -> dict[str, Any]:
    """Four points of one layout."""
    layout = EngineLayout(2, 1)
    made = ProfileFile(folder / "profile.json", ProfileKey("m", "e", "d"))
    for batch in (1, 4):
        made.add(ProfilePoint("prefill", layout, batch, 128, 0.5 * batch))
        made.add(ProfilePoint("decode", layout, batch, 128, 0.01 * batch, 0.1))
    made.shapes[layout] = EngineShape(layout, 1000.0, 5000, 10**9, 12.0)
    made.save()
    return {"decode": 0.02, "prefill": 0.5, "kv_tokens": 5000}


def predictor(folder: Path) -> dict[str, Any]:
    """After a few lessons."""
    policy = ProgressivePredictor(100.0)
    for number in range(40):
        before = TrajectoryProgress(f"t{number}", "nim", f"k{number % 5}", (2, 3), (3,), (), (), ())
        policy.learn(LengthOutcome((before,), (10 + number % 5,), True))
    (folder / "predictor.npz.xz").write_bytes(lzma.compress(policy.dump()))
    forecast = policy.forecast(TrajectoryProgress("t99", "nim", "k1", (2, 3), (3,), (), (), ()))
    return {"tokens": forecast.tokens, "source": forecast.source}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
