"""Two real vLLM engines take versions straight from a real Megatron trainer, while the same versions go out on a relay.

The engines are processes of their own; the trainer, the relay (a folder) and the orchestrator's side of it are here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import free_port

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron_rlplugin.trainer.megatron_trainer import MegatronTrainer  # noqa: E402
from orchestrator.api import (  # noqa: E402
    CollectiveTrainer,
    CollectiveWorker,
    Completion,
    Meeting,
    PublishResult,
    RetryableError,
    UpdateResult,
    WorkerStats,
)
from orchestrator.events import EventLog  # noqa: E402
from orchestrator.proxy.gateway import LLMProxy  # noqa: E402
from orchestrator.proxy.worker_state import WorkerLimits  # noqa: E402
from orchestrator.transfer import RelayEndpoint  # noqa: E402
from orchestrator.transfer.filesystem_relay import FsspecRelay  # noqa: E402
from orchestrator.weight_sync import WeightSync  # noqa: E402
from scripts.bench.probes.megatron.trainer_probe import make_batch, tiny_folder  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")]

# One engine: reads a line of JSON for each call, answers with a line.
ENGINE = """
import asyncio, json, os, signal, sys
from vllm_rlplugin.worker.inprocess_engine import prepare_process
prepare_process(1)
from vllm_rlplugin.weights import version_staging as staging
from vllm_rlplugin.worker.inprocess_worker import EngineWorker
from orchestrator.api import CommandError, GenerationRequest, Meeting, RetryableError, Sampling

lines = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)
order = json.loads(sys.argv[1])
stock = staging.VersionStaging._add_tensor
dying = []

def add(self, region, data):
    if dying:
        os.kill(os.getpid(), signal.SIGKILL)
    stock(self, region, data)

staging.VersionStaging._add_tensor = add

async def main():
    worker = EngineWorker(**order)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)

    async def call(number, method, arguments):
        try:
            if method == "die":
                dying.append(True)
                result = None
            elif method == "add":
                result = await worker.add(
                    [GenerationRequest(r[0], r[0], 0, tuple(r[1]), Sampling(r[2], 0.0), "g") for r in arguments]
                )
            elif method == "completions":
                result = [[c.request_id, list(c.token_ids), list(c.logprobs), [list(v) for v in c.versions]]
                          for c in await worker.completions()]
            elif method == "receive":
                version, meetings, place, limit = arguments
                result = await worker.receive(version, [Meeting(*m) for m in meetings], place, limit)
            elif method == "update":
                done = await worker.update(*arguments)
                result = [done.version, done.bytes, done.seconds, done.preempted]
            elif method == "version":
                result = (await worker.stats()).version
            else:
                result = await getattr(worker, method)(*arguments)
            answer = ["ok", result]
        except CommandError as error:
            answer = ["command", [error.code, error.detail]]
        except RetryableError as error:
            answer = ["error", str(error)]
        lines.write(json.dumps([number, *answer]) + "\\n")

    lines.write(json.dumps([0, "ok", None]) + "\\n")
    tasks = []
    while line := await reader.readline():
        tasks.append(asyncio.ensure_future(call(*json.loads(line))))

asyncio.run(main())
"""


class Engine:
    """A CollectiveWorker in a process; what a Ray actor is in a run."""

    ranks = 1
    code = ENGINE

    def __init__(self, name: str, model: str, endpoint: RelayEndpoint, log: Path) -> None:
        self.name = name
        self._order = {"model": model, "name": name, "dtype": "float32", "kv_cache_mb": 16, "relay": endpoint.to_dict()}
        self._order |= {"max_model_len": 64, "max_num_seqs": 8}
        self._log = log
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._reader: asyncio.Task[None] | None = None
        self.process: asyncio.subprocess.Process | None = None

    async def restart(self) -> None:
        await self.close()
        self._asked[0] = started = asyncio.get_running_loop().create_future()
        with self._log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", self.code, json.dumps({**self._order, "max_model_len": 64})),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                limit=1 << 24,
            )
        self._reader = asyncio.create_task(self._read(self.process))
        await started

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            number, kind, result = json.loads(line)
            future = self._asked.pop(number)
            if not future.done():
                future.set_result(result) if kind == "ok" else future.set_exception(RetryableError(f"{kind}: {result}"))
        for future in self._asked.values():
            if not future.done():
                future.set_exception(RetryableError(f"{self.name} died"))
        self._asked.clear()

    async def ask(self, method: str, *arguments: Any) -> Any:
        if self.process is None or self.process.stdin is None or self.process.returncode is not None:
            raise RetryableError(f"{self.name} is not there")
        self._number += 1
        self._asked[self._number] = answer = asyncio.get_running_loop().create_future()
        self.process.stdin.write((json.dumps([self._number, method, arguments]) + "\n").encode())
        return await answer

    async def add(self, requests: Any) -> None:
        await self.ask("add", *([r.request_id, r.token_ids, r.sampling.max_tokens] for r in requests))

    async def abort(self, request_ids: Any = (), *, trajectories: Any = (), groups: Any = ()) -> None:
        await self.ask("abort", list(request_ids))

    async def prioritize(self, priorities: Any) -> None:
        await self.ask("prioritize", dict(priorities))

    async def completions(self) -> list[Completion]:
        return [
            Completion(name, tuple(ids), tuple(logs), tuple((v, n) for v, n in spans), "length")
            for name, ids, logs, spans in await self.ask("completions")
        ]

    async def suspend(self) -> None:
        await self.ask("suspend")

    async def prepare(self, version: int) -> None:
        await self.ask("prepare", version)

    async def receive(self, version: int, meetings: Any, place: int, limit: float) -> str:
        told = [[m.name, m.backend, m.where, m.receivers] for m in meetings]
        content: str = await self.ask("receive", version, told, place, limit)
        return content

    async def update(self, version: int) -> UpdateResult:
        return UpdateResult(*await self.ask("update", version))

    async def resume(self) -> None:
        await self.ask("resume")

    async def stats(self) -> WorkerStats:
        return WorkerStats(0, 0, 0, 0, 0, 0.0, await self.ask("version"))

    async def close(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        if self._reader is not None:
            await self._reader


class ThreadTrainer:
    """The trainer's port, with ``publish`` in a thread of its own: in a run it is another process that is busy then."""

    def __init__(self, inner: MegatronTrainer) -> None:
        self.inner = inner
        for name in ("train_step", "feed", "save", "saved", "load", "close"):
            setattr(self, name, getattr(inner, name))

    async def publish(self) -> PublishResult:
        return await asyncio.to_thread(lambda: asyncio.run(self.inner.publish()))

    async def send(self, receivers: int, limit: float, anew: bool) -> tuple[Meeting, ...]:
        return await self.inner.send(receivers, limit, anew)


class Rig:
    """A trainer, a relay whose buckets can be held back, engines, and what the orchestrator makes of them."""

    def __init__(self, folder: Path, model: str, endpoint: RelayEndpoint, engines: list[Engine], limit: float) -> None:
        self.endpoint = endpoint
        self.trainer = MegatronTrainer(model=model, total_steps=10, seed=3, dtype="float32", relay=endpoint.to_dict())
        self.engines = engines
        self.log = StringIO()
        loop = asyncio.get_running_loop()
        self.events = EventLog(self.log, loop.time, 0.0)
        self.fatal: list[Exception] = []
        self.proxy = LLMProxy(
            engines,  # type: ignore[arg-type]
            self.events,
            limits=WorkerLimits(120.0),
            restarts=1,
            on_fatal=self.fatal.append,
        )

        async def call(_: str, asked: Any) -> Any:
            return await asked

        port = ThreadTrainer(self.trainer)
        assert isinstance(port, CollectiveTrainer)
        assert isinstance(engines[0], CollectiveWorker)
        self.delivery = WeightSync(port, self.proxy, self.events, call, limit)  # type: ignore[arg-type]

    async def deliver(self, version: int) -> None:
        await self.delivery.begin_publishing(version, version)
        await self.delivery.lead(version, version)
        await self.delivery.follow(version, version)

    async def train(self, step: int) -> None:
        await self.trainer.train_step(make_batch(step))

    def seen(self, kind: str, **what: Any) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in self.log.getvalue().splitlines()]
        return [e for e in found if e["kind"] == kind and all(e.get(name) == value for name, value in what.items())]


@contextlib.asynccontextmanager
async def rig(folder: Path, workers: int = 2, limit: float = 60.0, kind: type[Engine] = Engine) -> AsyncIterator[Rig]:
    endpoint = RelayEndpoint(
        job="collective",
        kind="fsspec",
        master=f"file://{folder}/relay",
        metadata=str(folder / "metadata.sqlite"),
        bucket_bytes=4 << 10,
    )
    model = tiny_folder(folder / "model", head_dim=32)  # vLLM's attention on CPU has no smaller one
    engines = [kind(f"vllm-{index}", model, endpoint, folder / f"{index}.log") for index in range(workers)]
    try:
        await asyncio.gather(*(engine.restart() for engine in engines))
        made = Rig(folder, model, endpoint, engines, limit)
        made.proxy.start()
        try:
            yield made
        finally:
            print(made.log.getvalue())  # what happened, where a test fails
            await made.proxy.close()
            await made.delivery.close()
            await made.trainer.close()
    finally:
        await asyncio.gather(*(engine.close() for engine in engines))


async def sums(engine: Engine) -> dict[str, str]:
    found: dict[str, str] = await engine.ask("checksums")
    return found


class Players:
    """Requests, one after the other on each of six lines, until they are told to stop. Versions that wrote the answers."""

    def __init__(self, proxy: LLMProxy) -> None:
        self.versions: list[tuple[int, ...]] = []
        self._stopped = False
        self._proxy = proxy
        self._tasks = [asyncio.create_task(self._play(line)) for line in range(6)]

    async def _play(self, line: int) -> None:
        from scripts.bench.probes.vllm.recompute_probe import greedy

        turn = 0
        while not self._stopped:
            prompt = [(7 * line + turn + place) % 24 for place in range(5)]
            done = await self._proxy.generate(greedy(f"{line}-{turn}", prompt, 40))
            assert done.finish_reason == "length"
            assert len(done.token_ids) == 40
            self.versions.append(tuple(version for version, _ in done.versions))
            turn += 1

    async def until(self, version: int) -> None:
        """Some answer was written by this version from its first token on."""
        while (version,) not in self.versions:
            assert not any(task.done() for task in self._tasks)
            assert self._proxy.faults == 0
            await asyncio.sleep(0.02)

    async def stop(self) -> None:
        self._stopped = True
        await asyncio.gather(*self._tasks)


@pytest.fixture
def relay_gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While it is not set, no object of the relay is stored."""
    gate = threading.Event()
    gate.set()
    stock = FsspecRelay.put

    def put(relay: FsspecRelay, key: str, data: memoryview) -> None:
        assert gate.wait(240)
        stock(relay, key, data)

    monkeypatch.setattr(FsspecRelay, "put", put)
    yield gate
    gate.set()


def test_workers_resume_with_the_version_of_the_trainer_before_its_first_bucket_is_on_the_relay_and_it_is_the_same_bits(
    tmp_path: Path, relay_gate: threading.Event
) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as made:
            first, second = made.engines
            await made.deliver(0)
            start = await sums(first)
            await made.train(0)
            players = Players(made.proxy)
            await players.until(0)
            relay_gate.clear()
            try:
                await made.delivery.begin_publishing(1, 1)
                await made.delivery.lead(1, 1)
                assert [await engine.ask("version") for engine in made.engines] == [1, 1]
                await players.until(1)
                assert made.proxy.unpublished >= 0, "nothing of it is on the relay yet"
            finally:
                relay_gate.set()
            await made.delivery.follow(1, 1)
            await players.stop()
            assert {len(versions) for versions in players.versions} <= {1, 2}
            [resumed] = made.seen("stage", stage="resume", step=1)
            [published] = made.seen("stage", stage="publish", step=1)
            assert resumed["end"] < published["end"]
            assert [event["workers"] for event in made.seen("collective")] == [2, 2]
            assert made.seen("fault") == []
            got = await sums(first)
            assert got == await sums(second) != start
            # One that comes late takes the same version from the relay: the same bits.
            assert second.process is not None
            second.process.kill()
            while not made.seen("recovered"):
                await asyncio.sleep(0.1)
            assert await second.ask("version") == 1
            assert await sums(second) == got
            assert len(made.seen("collective")) == 2

    asyncio.run(scenario())


@pytest.mark.long
def test_a_worker_killed_in_the_middle_holds_up_nobody_and_both_have_the_version_in_the_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as made:
            first, second = made.engines
            await made.deliver(0)
            await made.train(0)
            await second.ask("die")  # at the next tensor that it receives
            await made.deliver(1)
            assert {event["what"] for event in made.seen("fault")} >= {"receive vllm-1"}
            while not made.seen("recovered"):
                await asyncio.sleep(0.1)
            assert await first.ask("version") == 1
            assert await second.ask("version") == 1
            assert await sums(first) == await sums(second)
            await made.train(1)
            await made.deliver(2)  # in a new group, all of them again
            assert made.seen("collective")[-1]["workers"] == 2
            assert await sums(first) == await sums(second)
            assert await first.ask("version") == await second.ask("version") == 2
            assert made.fatal == []

    asyncio.run(scenario())


@pytest.mark.long
def test_a_version_with_a_wrong_checksum_is_refused_and_the_relay_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_rlplugin.weights import collective_sender

    stock = collective_sender.GlooGroup.shards

    def wrong(group: Any, keys: Any, shards: Any, deadline: float) -> list[int]:
        digests = stock(group, keys, shards, deadline)
        return [digests[0] ^ 1, *digests[1:]]

    async def scenario() -> None:
        async with rig(tmp_path) as made:
            first, second = made.engines
            await made.deliver(0)
            start = await sums(first)
            await made.train(0)
            monkeypatch.setattr(collective_sender.GlooGroup, "shards", wrong)
            await made.delivery.begin_publishing(1, 1)
            await made.delivery.lead(1, 1)
            assert [await engine.ask("version") for engine in made.engines] == [0, 0]
            assert await sums(first) == start
            assert all("corrupt weights (digest)" in event["detail"] for event in made.seen("fault"))
            assert len(made.seen("fault")) == 2
            await made.delivery.follow(1, 1)
            assert [await engine.ask("version") for engine in made.engines] == [1, 1]
            assert start != await sums(first) == await sums(second)
            monkeypatch.setattr(collective_sender.GlooGroup, "shards", stock)
            await made.train(1)
            await made.deliver(2)
            assert made.seen("collective")[-1]["workers"] == 2

    asyncio.run(scenario())


# One rank of a trainer: publishes, sends, and ends when it is told to.
RANK = """
import asyncio, json, sys
from megatron_rlplugin.trainer.megatron_trainer import MegatronTrainer
order = json.loads(sys.argv[1])
rank, out = int(sys.argv[2]), sys.argv[3]

async def main():
    trainer = MegatronTrainer(model=order["model"], settings=order["settings"], total_steps=10, seed=3, dtype="float32",
                              relay=order["relay"], rank=rank, world_size=2, init_method=order["meet"])
    [meeting] = await trainer.send(1, 120.0, True)
    result = await trainer.publish()
    told = [meeting.name, meeting.backend, meeting.where, meeting.receivers]
    open(f"{out}/{rank}.part", "w").write(json.dumps([result.content, told]))
    import os
    os.rename(f"{out}/{rank}.part", f"{out}/{rank}.json")
    trainer._sender.finish_send()
    open(f"{out}/{rank}.error", "w").write((await trainer.status())["sending_failed"])
    await trainer.close()

asyncio.run(main())
"""


@pytest.mark.long
@pytest.mark.parametrize("layout", ["tensor_parallel", "pipeline_parallel", "data_parallel"])
def test_two_ranks_of_a_trainer_send_the_very_version_that_they_publish(layout: str, tmp_path: Path) -> None:
    import subprocess
    import time

    from orchestrator.transfer import Subscriber
    from orchestrator.transfer.shard_routing import shard_label
    from vllm_rlplugin.weights.collective_receiver import CollectiveReceiver

    endpoint = RelayEndpoint(
        job="ranks", kind="fsspec", master=f"file://{tmp_path}/relay", metadata=str(tmp_path / "metadata.sqlite")
    )
    meet = f"tcp://127.0.0.1:{free_port()}"
    order = {
        "model": tiny_folder(tmp_path / "model"),
        "settings": {layout: 2},
        "relay": endpoint.to_dict(),
        "meet": meet,
    }
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, json.dumps(order), str(rank), str(tmp_path)], env=environment)
        for rank in (0, 1)
    ]
    try:
        files = [tmp_path / f"{rank}.json" for rank in (0, 1)]
        deadline = time.monotonic() + 200
        while not all(file.exists() for file in files):
            assert time.monotonic() < deadline
            assert all(process.poll() in (None, 0) for process in ranks)
            time.sleep(0.1)
        told = [json.loads(file.read_text()) for file in files]
        received: dict[str, bytes] = {}
        coming = CollectiveReceiver(torch.device("cpu"), 0).join_version(
            0, [Meeting(*place) for _, place in told], 1, 60.0
        )
        content = coming.receive_shards(
            lambda n, data: received.__setitem__(shard_label(coming.shards[n]), data.tobytes())
        )
        assert [f"{content:016x}"] * 2 == [published for published, _ in told]
        subscriber = Subscriber(endpoint)
        manifest = subscriber.manifest(0)
        relayed = {shard_label(key): data.tobytes() for key, data in subscriber.fetch(manifest)}
        assert received == relayed
        subscriber.close()
        assert [process.wait(60) for process in ranks] == [0, 0]
        assert [(tmp_path / f"{rank}.error").read_text() for rank in (0, 1)] == ["", ""]
    finally:
        for process in ranks:
            process.kill()
            process.wait()


@pytest.mark.long
@pytest.mark.timeout(420)
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_run_whose_workers_take_their_weights_from_the_trainer(mode: str, tmp_path: Path) -> None:
    import subprocess

    small = [
        "model.hidden_size=64",
        "model.intermediate_size=128",
        "rollout.groups_per_step=4",
        "rollout.dynamic_sampling=false",
        "warmup.steps=5",
    ]
    small += ["rollout.environments=32", "trainer.micro_batch_size=8", "evaluation.prompts=40", "evaluation.every=0"]
    small += [
        "run.steps=3",
        "rollout.weights=collective",
        "rollout.workers=2",
        f'run.folder="{tmp_path}"',
        "run.name=t",
    ]
    small += [f"run.mode={mode}", f"rollout.alpha={int(mode == 'async')}", "ray.cpus=3"]
    command = [sys.executable, "-m", "orchestrator.cli", "train", "examples/frozenlake.toml", *small]
    environment = {**os.environ, "NO_COLOR": "1"}
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=400, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [folder] = [path for path in tmp_path.iterdir() if path.is_dir() and not path.is_symlink()]
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    delivered = [event for event in events if event["kind"] == "collective"]
    assert [event["version"] for event in delivered] == [0, 1, 2, 3]
    assert [(event["workers"], event["of"]) for event in delivered] == [(2, 2)] * 4
    assert [event for event in events if event["kind"] == "fault"] == []
    waits = [event["waiting_for"] for event in events if event["kind"] == "stage" and event["stage"] == "prepare"]
    assert all("from the trainer" in wait for wait in waits)
    assert [event["status"] for event in events if event["kind"] == "run_end"] == ["completed"]
