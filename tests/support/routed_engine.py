"""An engine on a CPU that returns the experts that it chose: a stand-in for vLLM's second model runner.

vLLM 0.32.0 returns routed experts from that runner, which needs Triton, so not on a CPU. What stands in for it is small: vLLM's
own capturer, bound to its own routers, read after each step. All else is the product's path.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_rlplugin.worker.inprocess_engine import InprocessEngine
from vllm_rlplugin.worker.inprocess_worker import EngineWorker

OPTION = "enable_return_routed_experts"


class RoutedWorker(EngineWorker):
    """A run's worker with the stand-in; needs the prefix cache to be off, as what is found there was computed for others."""

    def __init__(self, **options: Any) -> None:
        assert options.pop(OPTION), "a run with trainer.routing_replay asks for it"
        super().__init__(**options)
        return_experts(self._engine)


def return_experts(engine: InprocessEngine) -> None:
    """From now on its outputs have ``routed_experts``, of the tokens that the request asks for."""
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
        RoutedExpertsCapturer,
        bind_routed_experts_capturer,
    )

    parts: Any = engine  # its parts are vLLM's
    config, parts._routed = parts._llm.vllm_config, True
    runner = parts._core.model_executor.driver_worker.worker.model_runner
    capturer = RoutedExpertsCapturer(config.scheduler_config.max_num_batched_tokens, config)
    bind_routed_experts_capturer(runner.model, capturer)
    rows: dict[str, dict[int, Any]] = {}
    execute, step = runner.execute_model, parts._llm.step

    def executing(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        answer = execute(scheduled, *args, **kwargs)
        chosen, begin = capturer.snapshot_routing_data(scheduled.total_num_scheduled_tokens).numpy(), 0
        for place, name in enumerate(runner.input_batch.req_ids):
            count = scheduled.num_scheduled_tokens[name]
            at = int(runner.input_batch.num_computed_tokens_cpu[place])
            for number in range(count):
                rows.setdefault(name, {})[at + number] = chosen[begin + number].copy()
            begin += count
        return answer

    def stepping() -> Any:
        outputs = step()
        for output in outputs:
            active = parts._active[output.request_id]
            known = rows.pop(active.internal_id)
            wanted = range(active.experts_from, max(known) + 1)
            output.outputs[0].routed_experts = np.stack([known[at] for at in wanted])
        return outputs

    runner.execute_model, parts._llm.step = executing, stepping
