"""Weights straight from the trainer by vLLM's own engines of its backend ``nccl``: the worker's side.

``rollout.weights = "nccl"``; the trainer's side is :mod:`megatron_rlplugin.weights.stock_sender`.

Guarantees:

* :meth:`StockReceiver.begin` returns at once, raises nothing and does not touch the model: the group is joined in a thread. One
  that is never complete is given up at the time limit.
* :meth:`StockReceiver.load` is vLLM's own start, update and finish, which write what comes into the live weights. It raises
  unless all of it came within the limit, when the group is aborted; then the weights are in no defined state.
* No digest is compared: vLLM's engines send none.

Not run by the tests of this project on a GPU: these have a stand-in for NCCL (``tests/support/stock_nccl.py``).
"""

from __future__ import annotations

import json
import math
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import torch
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from orchestrator.api import Meeting, RetryableError
from vllm_rlplugin.weights.collective_receiver import join_beside, late_receivers

_LATE = "the time limit is over"


class StockReceiver:
    """One rank's. Not for several threads at a time. Its group serves the next version while its meeting stays the same."""

    def __init__(self, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        self._engine_of = vllm_config, device, model
        self._device = device
        self._engine: Any = None
        self._meeting: Meeting | None = None
        self._joined: Future[Any] = Future()
        self._update: dict[str, Any] = {}
        self._deadline = 0.0
        self._error = ""
        self.version = -1  # that was begun; -1: none

    @property
    def elements(self) -> int:
        """Of the version that was begun."""
        return sum(math.prod(shape) for shape in self._update.get("shapes", ()))

    @property
    def bytes(self) -> int:
        """Of the same."""
        sizes = zip(self._update.get("shapes", ()), self._update.get("dtype_names", ()), strict=True)
        return sum(math.prod(shape) * int(getattr(torch, dtype).itemsize) for shape, dtype in sizes)

    def begin(self, version: int, meeting: Meeting, place: int, limit: float) -> None:
        """Join, unless it is the group of the last version. See the module."""
        self.version, self._deadline = version, time.monotonic() + limit
        self._error = ""
        if meeting == self._meeting and self._engine is not None:
            return
        self.close()
        self._meeting, self._joined = meeting, Future()
        try:
            told = json.loads(meeting.where)
            self._update = told["update_info"]
            engine = WeightTransferEngineFactory.create_engine(WeightTransferConfig(backend="nccl"), *self._engine_of)
            where = {
                "nccl_unique_id_b64": told["nccl_unique_id_b64"],
                "rank_offset": place,
                "world_size": meeting.receivers + 1,
                "packed": True,  # as the trainer's side
            }
            info = engine.parse_init_info(where)
        except Exception as error:  # noqa: BLE001  of vLLM: raised on one rank alone it would put the executor out of step
            self._error = str(error) or type(error).__name__
            return

        def join() -> Any:
            with torch.cuda.device(self._device):
                engine.init_transfer_engine(info)
            return engine

        self._engine = engine
        self._joined = join_beside(join, lambda late: late.shutdown())

    def state(self) -> dict[str, Any]:
        """As :func:`vllm_rlplugin.weights.transfer_engine.prepared`; "ready": joined, and nothing has come yet."""
        joined = self._joined.done()
        if not self._error and self._meeting is not None:
            failure = self._joined.exception() if joined else None
            if failure is not None:
                self._error = str(failure) or type(failure).__name__
            elif time.monotonic() >= self._deadline:
                self._error = _LATE if joined else late_receivers(self._meeting)
        if self._error:
            self.close()  # the next version has a group of its own
        state = "failed" if self._error else "ready" if joined else "fetching"
        return {"state": state, "error": self._error, "version": self.version, "seconds": {}, "checksum": ""}

    def refusal(self) -> str:
        """Why the version cannot be loaded now, "" if it can; nothing is touched."""
        found = self.state()
        return "" if found["state"] == "ready" else str(found["error"]) or "its group is not complete"

    def load(self) -> float:
        """Receive into the model; returns the seconds. While nothing runs. See the module."""
        started, engine = time.perf_counter(), self._engine
        limit = threading.Timer(max(self._deadline - time.monotonic(), 0.0), self.close)
        limit.daemon = True
        limit.start()
        try:
            engine.start_weight_update()
            engine.update_weights(self._update)
            engine.finish_weight_update()
        finally:
            limit.cancel()
            self.version = -1
        if self._engine is None:  # an aborted group raises nothing: it only brings nothing
            raise RetryableError(_LATE)
        return time.perf_counter() - started

    def forget(self) -> None:
        """What was begun is not wanted any more; the group stays."""
        self.version = -1

    def close(self) -> None:
        """Leave the group. Idempotent; ends what another thread waits for in it."""
        engine, self._engine = self._engine, None
        if engine is not None and not self._joined.cancel():
            with suppress(Exception):  # the communicator may be broken already; nothing is to be saved
                engine.shutdown()
