"""Weights by vLLM's own engines of its backend ``nccl``: both sides are real, NCCL is a stand-in, and models are left out here
(``tests/support/stock_nccl.py``)."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron_rlplugin.weights import stock_sender  # noqa: E402
from megatron_rlplugin.weights.stock_sender import StockGroup, StockSender, WholeTensors  # noqa: E402
from orchestrator.api import ConfigError, Meeting, RetryableError  # noqa: E402
from orchestrator.hooks.tested_versions import VLLM, find_version  # noqa: E402
from tests.support import stock_nccl  # noqa: E402

INSTALLED = (find_version(VLLM) or ("", ""))[1]
NEW = pytest.mark.skipif(INSTALLED < "0.33", reason="needs vLLM 0.33: scripts/next_vllm.py runs it")
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")]

GPU = torch.device("cuda", 0)
LIMIT = 20.0


def tensors(seed: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(96, 64, generator=draw),
        "norm": torch.randn(64, generator=draw).to(torch.bfloat16),
        "head": torch.randn(64, 96, generator=draw).to(torch.bfloat16),
    }


def pieces(given: Mapping[str, Any]) -> list[Any]:
    """As those of a rank that holds everything."""
    return [
        SimpleNamespace(name=name, shape=tuple(t.shape), held=tuple(t.shape), parameter=t, read=lambda t=t: t)
        for name, t in given.items()
    ]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    stock_nccl.stand_in(monkeypatch.setattr)
    monkeypatch.setattr(stock_sender, "tensor_pieces", lambda chunks: iter(pieces(chunks[0])))


class Loaded:
    """A receiver of vLLM's, whose model only notes what it is given; vLLM's reload of a model is left out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: Any = "cpu") -> None:
        from vllm.distributed.weight_transfer import nccl_engine

        from vllm_rlplugin.weights.stock_receiver import StockReceiver

        for name in ("start_weight_update", "finish_weight_update"):
            monkeypatch.setattr(nccl_engine.NCCLWeightTransferEngine, name, lambda engine: None)
        self.weights: dict[str, Any] = {}
        ranks = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
        config = SimpleNamespace(parallel_config=ranks, model_config=None)
        self.receiver = StockReceiver(config, torch.device(device), self)  # type: ignore[arg-type]

    def load_weights(self, given: Any) -> None:
        """As a model of vLLM's."""
        self.weights.update((name, tensor.clone()) for name, tensor in given)

    def joined(self) -> dict[str, Any]:
        while (found := self.receiver.state())["state"] == "fetching":
            time.sleep(0.005)
        return dict(found)


def same(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return list(found) == list(wanted) and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name].cpu(), tensor.cpu())
        for name, tensor in wanted.items()
    )


@NEW
@pytest.mark.usefixtures("stand_in")
def test_vllms_own_engines_bring_every_tensor_whole_to_every_receiver_and_use_their_group_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = tensors(1), tensors(2)
    weights = dict(first)
    sender = StockSender([weights], GPU)
    takers = [Loaded(monkeypatch), Loaded(monkeypatch)]
    meetings = []
    for version, wanted in ((3, first), (4, second)):
        for name, tensor in wanted.items():
            weights[name].copy_(tensor)
        meetings.append(sender.begin_send(version, 2, LIMIT, False))
        for place, taker in enumerate(takers, 1):
            taker.weights.clear()
            taker.receiver.begin(version, meetings[-1], place, LIMIT)
        for taker in takers:
            assert taker.joined() == {"state": "ready", "error": "", "version": version, "seconds": {}, "checksum": ""}
            assert taker.weights == {}, "nothing comes before the workers stand still"

        loads = [threading.Thread(target=taker.receiver.load) for taker in takers]
        for load in loads:
            load.start()
        for load in loads:
            load.join(LIMIT)
        assert all(same(taker.weights, wanted) for taker in takers)
        sender.finish_send()
        assert sender.error == ""
    assert meetings[0] == meetings[1]
    assert takers[0].receiver.bytes == sum(tensor.nbytes for tensor in first.values())
    sender.close()


@NEW
@pytest.mark.usefixtures("stand_in")
def test_who_waits_for_a_group_that_is_never_complete_waits_no_longer_than_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sender, taker = StockSender([tensors(1)], GPU), Loaded(monkeypatch)
    began = time.monotonic()
    taker.receiver.begin(1, sender.begin_send(1, 2, 0.5, False), 1, 0.5)
    found = taker.joined()
    assert (found["state"], found["error"]) == ("failed", "not all 2 receivers joined the trainer in time")
    assert "not all 2" in taker.receiver.refusal()
    monkeypatch.setattr("megatron_rlplugin.weights.collective_sender.ABORT_SECONDS", 0.1)
    sender.finish_send()
    assert sender.error
    assert time.monotonic() - began < 10
    again = sender.begin_send(2, 1, LIMIT, False)  # the next version has a group of its own
    taker.receiver.begin(2, again, 1, LIMIT)
    assert taker.joined()["state"] == "ready"
    taker.receiver.load()
    assert same(taker.weights, tensors(1))
    sender.close()


@NEW
@pytest.mark.usefixtures("stand_in")
def test_a_sender_that_goes_while_it_sends_costs_the_limit_and_what_came_counts_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop = StockGroup.send
    monkeypatch.setattr(StockGroup, "send", lambda group: group.close())
    sender, taker = StockSender([tensors(1)], GPU), Loaded(monkeypatch)
    taker.receiver.begin(1, sender.begin_send(1, 1, 1.0, False), 1, 1.0)
    assert taker.joined()["state"] == "ready"
    began = time.monotonic()
    with pytest.raises(RetryableError, match="the time limit is over"):
        taker.receiver.load()
    assert time.monotonic() - began < 5
    monkeypatch.setattr(StockGroup, "send", stop)
    late = Loaded(monkeypatch)
    late.receiver.begin(2, sender.begin_send(2, 1, 1.0, True), 1, 1.0)
    assert late.joined()["state"] == "ready"
    sender.close()
    assert sender.error, "nothing reads weights any more that may change"


@pytest.mark.skipif(not INSTALLED.startswith("0.32"), reason="needs vLLM 0.32")
def test_a_vllm_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stock_nccl.stand_in(monkeypatch.setattr)
    monkeypatch.setattr(stock_sender, "tensor_pieces", lambda chunks: iter(pieces(tensors(1))))
    with pytest.raises(ConfigError, match=r"rollout.weights = 'nccl': needs vLLM 0.33"):
        StockSender([], GPU).begin_send(0, 1, LIMIT, False)


def test_what_vllms_engine_cannot_send_is_refused_with_key_value_and_fix() -> None:
    with pytest.raises(ConfigError, match=r"rollout.weights = 'nccl'.*the trainer computes on cpu: take 'collective'"):
        StockSender([], torch.device("cpu")).begin_send(0, 1, LIMIT, False)
    [whole] = pieces({"experts": torch.zeros(4, 2)})
    whole.held = (1, 2)
    with pytest.raises(ConfigError, match=r"rollout.weights = 'nccl'.*has experts in parts"):
        WholeTensors([whole], [])
    from megatron_rlplugin.trainer.megatron_trainer import MegatronTrainer

    with pytest.raises(ConfigError, match=r"rollout.weights = 'nccl'.*tensor_parallel"):
        MegatronTrainer(model="", settings={"tensor_parallel": 2}, vllm_nccl=True)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("where", ["", "{}", json.dumps({"nccl_unique_id_b64": "AA==", "update_info": {}})])
def test_a_meeting_that_cannot_be_read_is_told_and_never_raised(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    taker = Loaded(monkeypatch)
    taker.receiver.begin(1, Meeting("m", "vllm-nccl", where, 1), 1, LIMIT)
    found = taker.joined()
    assert found["state"] == "failed"
    assert found["error"]


@NEW
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
def test_vllms_own_engines_carry_the_bits_over_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sender on the first GPU, receiver on the second, in two threads."""
    given = {name: tensor.cuda(0) for name, tensor in tensors(1).items()}
    monkeypatch.setattr(stock_sender, "tensor_pieces", lambda chunks: iter(pieces(chunks[0])))
    torch.cuda.set_device(0)
    sender, taker = StockSender([given], GPU), Loaded(monkeypatch, torch.device("cuda", 1))
    taker.receiver.begin(1, sender.begin_send(1, 1, 60.0, False), 1, 60.0)
    assert taker.joined()["state"] == "ready"
    with torch.cuda.device(1):
        taker.receiver.load()
    sender.finish_send()
    assert sender.error == ""
    assert same(taker.weights, given)
    sender.close()
