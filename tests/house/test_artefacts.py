"""What earlier versions wrote is still read, and says the same; what a newer version wrote is refused in one clear error."""

from __future__ import annotations

import hashlib
import json
import lzma
import re
import shutil
import struct
import tomllib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pyarrow.parquet as pq
import pytest

from orchestrator.api import (
    Completion,
    CompletionTiming,
    ConfigError,
    CoserveError,
    GenerationRequest,
    KvMove,
    KvMoved,
    RoutedExperts,
    RunError,
    Sampling,
    SharedDevice,
    TokenSequence,
    UpdateResult,
    WorkerStats,
)
from orchestrator.api import http as http_wire
from orchestrator.checkpoint import Checkpoints, verify
from orchestrator.config import to_json
from orchestrator.events import MemorySink
from orchestrator.ledger import Ledger, recount
from orchestrator.observe.report.run_log import load_run
from orchestrator.policies.batching.round_planner import RoundPlanner, RoundRules
from orchestrator.policies.parallelism.engine_profile import EngineLayout
from orchestrator.policies.prediction.length_features import TrajectoryProgress
from orchestrator.policies.prediction.length_predictor import ProgressivePredictor
from orchestrator.profiler.profile_file import load_profile
from orchestrator.resources.resource_manager import decode_view
from orchestrator.run_folder import RunFolder
from orchestrator.runtime.recorded_batches import Recording
from orchestrator.sim.recorded_traces import load_traces
from orchestrator.sim.run_audit import account_epochs
from orchestrator.store import read_trajectories, to_trajectory
from orchestrator.transfer import (
    CorruptWeightsError,
    MemoryMetadata,
    MemoryRelay,
    RelayEndpoint,
    Subscriber,
    announcement,
    version_leases,
)
from orchestrator.transfer import bucket as wire
from orchestrator.transfer import job_head as heads
from orchestrator.transfer.shard_codec import DeltaCodec, apply_stored
from orchestrator.transfer.turns.turn_messages import encode_completions, encode_turns
from vllm_rlplugin.server import request_bodies

ROOT = Path(__file__).parents[2]
ARTEFACTS = sorted((ROOT / "tests" / "artefacts").iterdir())
VERSIONS = pytest.mark.parametrize("made", ARTEFACTS, ids=lambda path: path.name)


def expected(made: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((made / "expected.json").read_text())
    return data


def holds(given: Any, found: Any) -> bool:
    """Whether all that was given is there."""
    if isinstance(given, dict):
        return all(holds(value, found[name]) for name, value in given.items())
    return bool(given == found)


@VERSIONS
def test_a_run_folder_of_an_earlier_version_is_read(made: Path) -> None:
    said, folder = expected(made)["run"], RunFolder.open(made / "run")
    given = tomllib.loads((made / "config.toml").read_text(encoding="utf-8"))
    assert holds(given, json.loads(to_json(folder.config())))  # defaults are those of its day
    log = load_run(folder.path)
    assert log.unreadable == 0
    assert log.done_steps == said["steps"]
    assert log.ledger.difference == 0
    assert recount(folder.lines(folder.ledger_file)) == said["ledger"]
    assert account_epochs(folder.lines(folder.ledger_file), 12).trained


@VERSIONS
def test_a_journal_and_a_checkpoint_of_an_earlier_version_are_gone_back_to(made: Path) -> None:
    said, folder = expected(made)["run"], RunFolder.open(made / "run")
    checkpoints = Checkpoints(folder.checkpoints, keep=9)
    assert [path.name for path in checkpoints.all()] == said["checkpoints"]
    assert [verify(path) for path in checkpoints.all()] == [""] * len(said["checkpoints"])
    newest = checkpoints.newest()
    assert newest is not None
    state = newest[1]
    assert [item.id for item in state.buffer] == said["buffered"]
    assert state.buffer[0].turns[1].context is not None
    assert state.rounds is not None
    planner = RoundPlanner(RoundRules(3, 2, epoch=12))
    planner.restore(state.rounds["planner"])
    planner.settle()
    ledger = Ledger(MemorySink(), lambda: 1.0)
    ledger.restore(folder.lines(folder.ledger_file), 2, ())
    ledger.check()
    assert ledger.counts.rolled_back > 0


@VERSIONS
def test_a_checkpoint_of_a_real_run_of_an_earlier_version_is_gone_back_to(made: Path) -> None:
    """Its buffer is shards."""
    (folder,) = (made / "shards").glob("step-*")
    assert json.loads((folder / "state.json").read_text())["format"] == 2
    newest = Checkpoints(folder.parent, keep=1).newest()
    assert newest is not None
    state = newest[1]
    assert (state.step, state.version, state.journal_sequence, state.entropies) == (2, 4, 9, (0.25,))
    said, (kept, exact) = expected(made)["shards"], state.buffer
    found = [[[turn.observation_ids, turn.action_ids, turn.logprobs] for turn in item.turns] for item in (kept, exact)]
    assert [[[list(part) for part in turn] for turn in turns] for turns in found] == said["turns"]
    first, second = kept.turns
    assert first.experts is not None
    assert second.context is not None
    assert first.experts.data.hex() == said["experts"]
    assert [second.context.reason, *second.context.token_ids] == said["context"]
    assert (kept.prompt.key, kept.errors, kept.versions) == ("k", ("slow",), ((3, 2), (4, 1)))


@VERSIONS
def test_trajectories_of_an_earlier_version_are_read(made: Path) -> None:
    said, folder = expected(made)["trajectories"], made / "run" / "trajectories"
    found = [to_trajectory(row) for row in read_trajectories(folder).to_pylist()]
    assert len(found) == said["all"]
    assert [list(found[0].turns[0].action_ids), list(found[0].turns[0].logprobs)] == [said["tokens"], said["logprobs"]]
    (step,) = Recording(made / "run").steps()
    assert len(step) == said["trained"]
    assert len(load_traces(made / "run", 100).episodes) == said["all"]


@VERSIONS
def test_weights_on_a_relay_of_an_earlier_version_are_fetched(made: Path) -> None:
    said, folder = expected(made)["weights"], made / "weights"
    relay, metadata = MemoryRelay(), MemoryMetadata()
    for file in folder.glob("rlc@*"):
        relay.put(file.name.replace("@", "/"), memoryview(file.read_bytes()))
    endpoint = RelayEndpoint.from_dict(said["endpoint"])
    metadata.compare_and_set(heads.head_key(endpoint.job), (folder / "head.msgpack").read_bytes(), 0)
    metadata.compare_and_set(version_leases.leases_key(endpoint.job), (folder / "leases.msgpack").read_bytes(), 0)
    subscriber = Subscriber(endpoint, relay, metadata, codec=DeltaCodec())
    full, change = subscriber.chain(1)
    assert [f"{full.content():016x}", f"{change.content():016x}"] == said["contents"]
    ((_, held),) = subscriber.fetch(full)
    base = held.copy()
    assert base.tobytes() == (folder / "old.bin").read_bytes()
    for number, data in subscriber.fetch_shards(change, range(len(change.shards))):
        apply_stored(DeltaCodec(), change.shards[number], data, base, change.pieces[number].digest)
    assert base.tobytes() == (folder / "new.bin").read_bytes()
    assert announcement.unpack_announcement((folder / "announcement.bin").read_bytes())[0].tensor == "layers.0.weight"
    subscriber.hold(1)  # the lease record is read and goes on


@VERSIONS
def test_profile_predictor_and_resources_of_an_earlier_version_are_read(made: Path) -> None:
    said = expected(made)
    profile = load_profile(made / "profile.json").profile
    layout = EngineLayout(2, 1)
    assert profile.shape(layout).kv_tokens == said["profile"]["kv_tokens"]
    assert profile.prefill_seconds(128, 1, layout) == said["profile"]["prefill"]
    policy = ProgressivePredictor(1.0)
    policy.load(lzma.decompress((made / "predictor.npz.xz").read_bytes()))
    forecast = policy.forecast(TrajectoryProgress("t99", "nim", "k1", (2, 3), (3,), (), (), ()))
    assert forecast.source == said["predictor"]["source"]
    assert forecast.tokens == pytest.approx(said["predictor"]["tokens"], rel=1e-6)
    assert decode_view((made / "resources.msgpack").read_bytes()).bindings["vllm-0"].devices == (0, 1)


# -- a newer version -------------------------------------------------------------------------------------------------------

NEWEST = ARTEFACTS[-1]


def newer_json(file: Path) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 99}))


def newer_msgpack(file: Path) -> bytes:
    data: bytes = msgpack.packb({**msgpack.unpackb(file.read_bytes()), "format": 99})
    return data


def run_folder(made: Path) -> None:
    newer_json(made / "run" / "environment.json")
    with pytest.raises(ConfigError, match="format 99, this version reads 1"):
        load_run(made / "run")
    RunFolder.open(made / "run")


def state(made: Path) -> None:
    folder = made / "run" / "checkpoints" / "step-000006"
    newer_json(folder / "files.json")
    Checkpoints(folder.parent, keep=9).newest()


def trajectories(made: Path) -> None:
    (file, *_) = sorted((made / "run" / "trajectories").rglob("part-*.parquet"))
    table = pq.ParquetFile(file).read()
    facts = {**pq.read_schema(file).metadata, b"rl_coserve.format": b"99"}
    pq.write_table(table.replace_schema_metadata(facts), file)
    Recording(made / "run")


def bucket(made: Path) -> None:
    (file,) = (made / "weights").glob("rlc@*@full@0")
    name = wire.BucketName("artefact", 1, 0, "full", 0, 0)
    wire.open_bucket(np.frombuffer(b"RLCBKT99" + file.read_bytes()[8:], np.uint8), name)


def sending(made: Path) -> None:
    announcement.unpack_opening(struct.pack("<8sQQ", b"RLCSND99", 1, 100), 1)


NEWER: dict[str, tuple[Callable[[Path], Any], type[CoserveError], str]] = {
    "run folder": (run_folder, ConfigError, "format 99, this version reads 1"),
    "checkpoint": (state, RunError, "format 99, this version reads 2"),
    "trajectories": (trajectories, ConfigError, "format 99, this version reads 1"),
    "bucket": (bucket, CorruptWeightsError, "of another format"),
    "sending": (sending, CorruptWeightsError, "of another format"),
    "head record": (
        lambda made: heads.decode_head(newer_msgpack(made / "weights" / "head.msgpack")),
        CorruptWeightsError,
        "format 99, this version reads",
    ),
    "lease record": (
        lambda made: version_leases.decode_leases(newer_msgpack(made / "weights" / "leases.msgpack")),
        CorruptWeightsError,
        "format 99, this version reads",
    ),
    "resources": (
        lambda made: decode_view(newer_msgpack(made / "resources.msgpack")),
        RunError,
        "format 99, this version reads",
    ),
    "profile": (
        lambda made: (newer_json(made / "profile.json"), load_profile(made / "profile.json")),
        ConfigError,
        r"not a profile of format 1 \(it says 99\)",
    ),
}


@pytest.mark.parametrize("name", NEWER)
def test_what_a_newer_version_wrote_is_refused_in_one_clear_error(name: str, tmp_path: Path) -> None:
    made = tmp_path / "made"
    shutil.copytree(NEWEST, made)
    read, error, words = NEWER[name]
    with pytest.raises(error, match=words):
        read(made)


def test_a_newer_manifest_and_a_newer_predictor_are_refused(tmp_path: Path) -> None:
    """Their format is within what a checksum covers: it is written anew."""
    from orchestrator.transfer import manifest as manifests

    (file,) = (NEWEST / "weights").glob("rlc@*@full@manifest")
    data = {**msgpack.unpackb(file.read_bytes()[16:]), "format": 99}
    payload = msgpack.packb(data)
    checksum = wire.digest(np.frombuffer(payload, np.uint8))
    encoded = manifests.MAGIC + struct.pack("<Q", checksum) + payload
    with pytest.raises(CorruptWeightsError, match=r"this is \(99, .*wanted \(2, "):
        manifests.decode_manifest(memoryview(encoded), checksum, "artefact", 1, 0, 0)

    class Newer(ProgressivePredictor):
        format = 99

    with pytest.raises(ValueError, match="of another kind: format"):
        ProgressivePredictor(1.0).load(Newer(1.0).dump())


# -- between processes of two versions -------------------------------------------------------------------------------------


def endpoint_shapes() -> str:
    """What a run and a server say to each other: paths, headers, limits, bodies, records, and turns as they travel."""
    bodies = [
        [name, item.__annotations__]
        for name, item in vars(request_bodies).items()
        if isinstance(item, type) and issubclass(item, request_bodies.Body)
    ]
    records = (WorkerStats, SharedDevice, UpdateResult, KvMove, KvMoved, Completion, CompletionTiming)
    said = [[item.__name__, [[part.name, str(part.type)] for part in fields(item)]] for item in records]
    words = {
        name: value
        for name, value in vars(http_wire).items()
        if name.isupper() and isinstance(value, str | int | float)
    }
    request = GenerationRequest("r", "t", 1, (), Sampling(8, 1.0, 0.5, (3,), 4), "task", 5)
    done = Completion("r", (1,), (-0.5,), ((0, 1),), "stop", experts=RoutedExperts(0, 1, 2, 1, b"ab"))
    turns = encode_turns([(request, TokenSequence((1, 2)), None)], ["gone"]) + encode_completions(3, [done])
    return json.dumps([bodies, said, words, turns.hex()], sort_keys=True)


def pool_shapes() -> str:
    """The records of the page ledger that processes share, without comments."""
    text = re.sub(r"/\*.*?\*/", "", (ROOT / "csrc" / "pages.h").read_text(encoding="utf-8"), flags=re.DOTALL)
    records = re.findall(r"typedef struct \{(.*?)\} (rlc_tenant|rlc_header);", text, flags=re.DOTALL)
    sizes = re.findall(r"#define (RLC_POOL_SCHEMA|RLC_TENANTS|RLC_RANKS|RLC_WORDS|RLC_CONTROLS) (\d+)", text)
    return json.dumps([[name, body.split()] for body, name in records] + sizes)


SHAPES = {
    endpoint_shapes: "1c96505f9a658012",  # PROTOCOL 9
    pool_shapes: "c1852c037a229e84",  # RLC_POOL_SCHEMA 5
}


@pytest.mark.parametrize("shapes", SHAPES)
def test_what_two_versions_say_to_each_other_does_not_change_under_one_number(shapes: Callable[[], str]) -> None:
    """Else one would misread the other, or lose it for good. After a change raise the number; the digest then is another, too."""
    assert hashlib.sha256(shapes().encode()).hexdigest()[:16] == SHAPES[shapes]
