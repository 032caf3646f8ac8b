"""``rollout.weights = "nccl"`` from end to end: a real Megatron trainer, two real vLLM engines in processes of their own, vLLM's
own weight-transfer engines on both sides, the orchestrator's side of an update. NCCL is a stand-in."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron_rlplugin.weights.stock_sender import StockSender  # noqa: E402
from tests.megatron.test_collective_sender_engine import ENGINE, Engine, Players, Rig, rig, sums  # noqa: E402
from tests.megatron.test_stock_sender import NEW  # noqa: E402
from tests.support import stock_nccl  # noqa: E402

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    NEW,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron"),
]

STAND_IN = """
from tests.support import stock_nccl
stock_nccl.stand_in()
receive = stock_nccl.SocketCommunicator.broadcast

def broadcast(self, tensor, src, stream=None):
    if dying:
        os.kill(os.getpid(), signal.SIGKILL)
    receive(self, tensor, src, stream)

stock_nccl.SocketCommunicator.broadcast = broadcast

async def main():"""


class StockEngine(Engine):
    code = ENGINE.replace("\nasync def main():", STAND_IN)


def sends_by_vllm(made: Rig) -> None:
    made.trainer._sender = StockSender(made.trainer._learner.chunks, torch.device("cuda", 0))


def test_workers_receive_every_version_by_vllms_own_engines_and_it_is_that_of_the_relay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, kind=StockEngine) as made:
            stock_nccl.stand_in(monkeypatch.setattr)
            sends_by_vllm(made)
            first, second = made.engines
            await made.deliver(0)
            start = await sums(first)
            players = Players(made.proxy)
            await players.until(0)
            await made.train(0)
            await made.deliver(1)
            await players.until(1)
            await players.stop()
            assert {len(versions) for versions in players.versions} <= {1, 2}
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

    asyncio.run(scenario())


def test_a_worker_killed_in_the_broadcast_costs_the_limit_and_all_of_its_group_come_back_from_the_relay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, limit=8.0, kind=StockEngine) as made:
            stock_nccl.stand_in(monkeypatch.setattr)
            sends_by_vllm(made)
            first, second = made.engines
            await made.deliver(0)
            await made.train(0)
            await first.ask("die")
            await made.deliver(1)
            assert made.trainer._sender is not None
            while len(made.seen("recovered")) < 2:
                await asyncio.sleep(0.1)
            assert [await engine.ask("version") for engine in made.engines] == [1, 1]
            assert await sums(first) == await sums(second)
            await made.train(1)
            assert made.trainer._sender.error
            await made.deliver(2)  # in a new group, both of them again
            assert made.seen("collective")[-1]["workers"] == 2
            assert await sums(first) == await sums(second)
            assert made.fatal == []

    asyncio.run(scenario())
