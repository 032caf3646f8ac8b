"""A worker whose engine fails: every call says so, with the cause, and nothing hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api import CommandError, RetryableError
from orchestrator.transfer import Publisher, RelayEndpoint
from scripts.bench.probes.vllm.recompute_probe import greedy, publish, write_tiny_qwen3
from vllm_rlplugin.worker.inprocess_worker import EngineWorker

pytestmark = pytest.mark.engine
ENDPOINT = RelayEndpoint(job="fault-tests", kind="memory", master="fault-tests")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_qwen3(folder, 1)
    return folder


@pytest.fixture(scope="module")
def publisher() -> Iterator[Publisher]:
    publisher = Publisher(ENDPOINT)
    yield publisher
    publisher.close()


@pytest.fixture
def worker(model: Path) -> EngineWorker:
    """Each test closes it: an in-process engine must be gone before the next one starts."""
    return EngineWorker(model=str(model), kv_cache_mb=1, relay=ENDPOINT.to_dict())


async def check_broken(worker: EngineWorker, expected: str) -> None:
    """Every call of a broken worker raises, with the cause; closing it works, twice."""
    for call in (
        worker.add([greedy("x", (1,), 1)]),
        worker.abort(["x"]),
        worker.prioritize({"x": 1}),
        worker.completions(),
        worker.suspend(),
        worker.prepare(9),
        worker.update(9),
        worker.resume(),
        worker.stats(),
    ):
        with pytest.raises(RetryableError, match=expected):
            await call
    assert expected in (await worker.status())["broken"]
    await worker.close()
    await worker.close()


def test_an_exception_in_the_engine_breaks_the_worker_with_its_cause(
    worker: EngineWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        pending = asyncio.create_task(worker.completions())
        await worker.add([greedy("last", (1, 2, 3), 4)])
        monkeypatch.setattr(worker._engine._llm, "step", lambda: 1 / 0)
        with pytest.raises(RetryableError, match="division by zero"):
            await pending
        await check_broken(worker, "division by zero")

    asyncio.run(scenario())


@pytest.mark.parametrize(("wrong", "first"), [("raises", 1), ("digest", 11)])
def test_an_update_that_fails_half_way_keeps_the_worker_suspended_until_one_succeeds(
    worker: EngineWorker, publisher: Publisher, model: Path, monkeypatch: pytest.MonkeyPatch, wrong: str, first: int
) -> None:
    from safetensors.torch import load_file

    from vllm_rlplugin.weights.live_weights import MappedWeights

    weights: dict[str, Any] = load_file(str(model / "model.safetensors"))
    stock = MappedWeights.load

    def spoil(self: MappedWeights, staged: Any) -> dict[str, float]:
        if wrong == "raises":
            raise RuntimeError("power cut")
        piece = staged.pieces[0]
        staged.pieces[0] = replace(piece, digest=piece.digest ^ 1)
        return stock(self, staged)

    async def scenario() -> None:
        await worker.add([greedy("survivor", (1, 2, 3), 30)])
        for _ in range(8):
            await asyncio.sleep(0)
        await worker.suspend()
        publish(publisher, first, weights)
        monkeypatch.setattr(MappedWeights, "load", spoil)
        for _ in range(2):  # a second failure leaves it as it is
            with pytest.raises(CommandError, match="half-way") as failed:
                await worker.update(first)
            assert failed.value.code == "weights_unusable"
            with pytest.raises(CommandError) as refused:
                await worker.resume()
            assert refused.value.code == "weights_unusable"
        with pytest.raises(RetryableError):  # nothing was touched, but the weights are no better than before
            await worker.update(first + 1)
        with pytest.raises(CommandError, match="half-way"):
            await worker.resume()
        stats = await worker.stats()
        assert (stats.suspended, stats.version) == (True, 0)
        assert "half-way" in (await worker.status())["weights_unusable"]
        monkeypatch.undo()
        publish(publisher, first + 2, weights)
        await worker.update(first + 2)
        await worker.resume()
        (completion,) = await worker.completions()
        assert [version for version, _ in completion.versions] == [0, first + 2]
        assert (await worker.status())["weights_unusable"] == ""
        await worker.close()

    asyncio.run(scenario())


def test_calls_after_close_and_calls_pending_at_close_raise(worker: EngineWorker) -> None:
    async def scenario() -> None:
        pending = asyncio.create_task(worker.completions())
        await worker.add([greedy("unfinished", (1, 2, 3), 50)])
        for _ in range(3):
            await asyncio.sleep(0)
        await worker.close()
        with pytest.raises(RetryableError, match="closed"):
            await pending
        with pytest.raises(RetryableError, match="closed"):
            await worker.add([greedy("more", (1,), 1)])

    asyncio.run(scenario())


def test_a_worker_without_a_relay_refuses_updates_and_says_why(model: Path) -> None:
    worker = EngineWorker(model=str(model), kv_cache_mb=1)

    async def scenario() -> None:
        await worker.suspend()
        for call in (worker.update(1), worker.prepare(1)):
            with pytest.raises(CommandError) as refused:
                await call
            assert refused.value.code == "no_relay"
        await worker.resume()
        await worker.close()

    asyncio.run(scenario())
