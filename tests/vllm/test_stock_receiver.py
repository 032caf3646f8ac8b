"""vLLM's own engine of its backend ``nccl`` inside ours, in a real vLLM worker: who has which version, what a failure costs.

NCCL is a stand-in (``tests/support/stock_nccl.py``); vLLM's engines, its layerwise reload and the model are real.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

import vllm_rlplugin
from megatron_rlplugin.weights.stock_sender import StockGroup, StockSender
from tests.megatron.test_stock_sender import GPU, NEW, pieces
from tests.support import stock_nccl
from tests.vllm.test_weight_updates_in_place import IN_PLACE, Bench
from vllm_rlplugin.weights.version_agreement import find_disagreement
from vllm_rlplugin.worker.inprocess_engine import prepare_process

pytestmark = [pytest.mark.engine, NEW]

LIMIT = 60.0


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    prepare_process(1)
    vllm_rlplugin.activate()
    vllm_rlplugin.register_backend()
    made = Bench(tmp_path_factory.mktemp("bench"))
    yield made
    made.server.close()
    made.publisher.close()


class Sender(StockSender):
    """Of the weights of one seed."""

    def __init__(self, bench: Bench, seed: int) -> None:
        super().__init__([], GPU)
        self._bench = bench
        self.seed = seed

    def _open_group(self, receivers: int, host: str, number: int, limit: float) -> StockGroup:
        return StockGroup(pieces(self._bench.seeds[self.seed]), receivers, host, number)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    stock_nccl.stand_in(monkeypatch.setattr)


def begin(bench: Bench, sender: Sender, version: int, limit: float = LIMIT, receivers: int = 1) -> dict[str, Any]:
    """The trainer sends, and the worker has joined it or knows that it cannot."""
    meeting = sender.begin_send(version, receivers, limit, False)
    bench.server.call("rl_receive", version, [asdict(meeting)], 1, limit)
    return bench.server.wait(version)


def test_a_version_that_vllms_own_engine_received_is_that_of_the_relay_bit_for_bit_and_the_relay_can_follow(
    bench: Bench,
) -> None:
    server = bench.server
    server.update(bench.publish(2))
    wanted, sums = server.answers(), server.call("compute_weight_checksums")
    server.update(bench.publish(1))
    before = server.answers()
    assert before != wanted
    version = bench.publish(2)
    sender = Sender(bench, 2)
    joined = begin(bench, sender, version)
    assert (joined["state"], joined["error"], joined["checksum"]) == ("ready", "", "")
    assert server.answers() == before, "nothing comes while requests run"
    report = server.update(version)
    sender.finish_send()
    assert sender.error == ""
    assert (report["version"], report["state"], report["error"]) == (version, "intact", "")
    assert report["bytes"] == sum(tensor.nbytes for tensor in bench.seeds[2].values())
    assert report["touched"]["how"] == "received into the model"
    assert find_disagreement([report]) is None
    assert server.call("rl_verify")["mismatches"] == []
    assert server.call("compute_weight_checksums") == sums
    assert server.answers() == wanted
    after = server.update(bench.publish(1))
    assert (after["state"], after["verified"]["how"]) == ("intact", IN_PLACE)
    assert server.answers() == before
    sender.close()


def test_a_group_that_is_not_complete_leaves_the_old_weights_and_the_relay_brings_the_version(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_rlplugin.weights.collective_sender.ABORT_SECONDS", 0.1)
    server = bench.server
    server.update(bench.publish(1))
    before, version = server.answers(), bench.publish(2)
    sender = Sender(bench, 2)
    failed = begin(bench, sender, version, limit=0.5, receivers=2)
    assert (failed["state"], failed["error"]) == ("failed", "not all 2 receivers joined the trainer in time")
    with pytest.raises(Exception, match="not all 2 receivers joined"):
        server.start(version)
    assert server.call("rl_report")["kind"] == "retryable"
    assert server.answers() == before
    server.call("rl_prepare", version)
    assert server.wait(version)["state"] == "ready"
    assert server.update(version)["verified"]["how"] == IN_PLACE
    sender.close()


def test_a_sender_that_goes_in_the_middle_leaves_weights_that_only_a_restart_cures(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = bench.server
    server.update(bench.publish(1))
    monkeypatch.setattr(StockGroup, "send", lambda group: group.close())
    version = bench.publish(2)
    sender = Sender(bench, 2)
    assert begin(bench, sender, version, limit=2.0)["state"] == "ready"
    began = time.monotonic()
    server.start(version)
    with pytest.raises(Exception, match="the time limit is over"):
        server.call("finish_weight_update")
    assert time.monotonic() - began < 10
    report = server.call("rl_report")
    assert (report["state"], report["kind"], report["damaged"]) == ("unusable", "fatal", True)
    with pytest.raises(Exception, match="restart the engine"):
        server.start(version)
    sender.close()
