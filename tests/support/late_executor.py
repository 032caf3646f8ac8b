"""Async scheduling on a CPU, for tests: vLLM's own loop, scheduler and runner, with the model in a thread that lags behind.

vLLM's CPU platform turns async scheduling off; :func:`force` turns it on again. The runner then is vLLM's with its async
branches, streams and events of CUDA being nothing here. :class:`LateExecutor` stands in for the order of a GPU's stream: what
the scheduler has launched is computed later, in order, in a thread of its own; so a batch in flight does read and write its KV
pages while the next one is scheduled.
"""

from __future__ import annotations

import contextlib
import copy
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.serial_utils import run_method


class Nothing:
    """A stream or an event that does nothing."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **settings: None


class LateExecutor(UniProcExecutor):
    """One worker in this process; a batch begins ``RL_TEST_LAG`` seconds after it was launched, or when those before it end."""

    def _init_executor(self) -> None:
        self._stream = ThreadPoolExecutor(1)
        super()._init_executor()

    def collective_rpc(  # type: ignore[override]
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        single_value: bool = False,
    ) -> Any:
        late = float(os.environ.get("RL_TEST_LAG", "0")) if method == "execute_model" else 0.0
        due = time.monotonic() + late
        given = copy.deepcopy(args) if method == "execute_model" else args  # the scheduler goes on with its own

        def work() -> Any:
            time.sleep(max(0.0, due - time.monotonic()))
            result = run_method(self.driver_worker, method, given, kwargs or {})
            if isinstance(result, AsyncModelRunnerOutput):
                result = result.get_output()
            return result if single_value else [result]

        future: Future[Any] = self._stream.submit(work)
        return future if non_block else future.result()


def force() -> None:
    """From now on engines of this process schedule asynchronously. Before the engine is made."""
    import torch
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def check_and_update_config(cls: Any, config: Any) -> None:
        stock(cls, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)  # type: ignore[assignment]
    cuda: Any = torch.cuda
    cuda.Event = Nothing
    cuda.current_stream = Nothing
    cuda.stream = lambda stream: contextlib.nullcontext()
