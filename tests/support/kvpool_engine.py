"""An engine in a process of its own, driven by JSON lines: what tests/kvpool/test_pool_engine.py starts, twice."""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

from vllm_rlplugin.kvpool.engine.pool_processes import pool_executor
from vllm_rlplugin.kvpool.serving import mps_client
from vllm_rlplugin.options import PluginOptions, engine_arguments
from vllm_rlplugin.worker.inprocess_engine import prepare_process


def on_fake_driver(library: str) -> None:
    """The pool's pages are those of a fake CUDA driver, whose memory this CPU engine can read and write."""
    from vllm_rlplugin.kvpool.engine import pool_engine as engine
    from vllm_rlplugin.kvpool.pages import dlpack, page_backends

    class Fake(page_backends.CudaBackend):
        def tensor(self, address: int, size: int) -> Any:
            return dlpack.byte_tensor(address, size, cuda=None)

    engine.backend_for = lambda device, page_bytes, supply: Fake(page_bytes, 0, supply, library)  # type: ignore[assignment]


def main() -> None:
    settings = json.loads(sys.argv[1])
    plugin = settings.pop("plugin")
    if "fake_driver" in plugin:
        on_fake_driver(plugin.pop("fake_driver"))
    mps_client.join_mps(plugin.get("kv_pool", ""), plugin.get("kv_pool_mps", 0), os.environ)
    prepare_process(1, bool(plugin.get("kv_pool")))
    if settings.pop("run_ahead", False):
        sys.path.insert(0, os.path.dirname(__file__))
        from late_executor import LateExecutor, force

        force()
        settings["distributed_executor_backend"] = LateExecutor
    if (ranks := settings.get("tensor_parallel_size", 1)) > 1 and plugin.get("kv_pool"):
        settings["distributed_executor_backend"] = pool_executor(None, ranks=ranks, on_cpu=True)
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.inputs import tokens_input
    from vllm.v1.engine.llm_engine import LLMEngine

    arguments = EngineArgs(
        skip_tokenizer_init=True,
        generation_config="vllm",
        enforce_eager=True,
        disable_log_stats=True,
        **{"dtype": "float32", **settings},
        **engine_arguments(PluginOptions.from_dict(plugin)),
    )
    gc.freeze()  # what was imported is no garbage
    engine: Any = LLMEngine.from_vllm_config(arguments.create_engine_config(), disable_log_stats=True)
    core = engine.engine_core.engine_core
    outputs: dict[str, list[int]] = {}
    asked: dict[str, tuple[list[int], int, int]] = {}  # name -> prompt, tokens, priority
    counts = {"returned": 0}

    def add(name: str, prompt: list[int], tokens: int, priority: int) -> None:
        asked[name] = (prompt, tokens, priority)
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0)
        engine.add_request(name, tokens_input(prompt), sampling, priority=priority)

    def step() -> None:
        for output in engine.step():
            if output.finished:
                name, made = output.request_id, list(output.outputs[0].token_ids)
                outputs[name] = outputs.get(name, []) + made
                if output.outputs[0].finish_reason == "abort":  # handed back: its owner goes on with it, here
                    counts["returned"] += 1
                    prompt, tokens, priority = asked[name]
                    add(name, prompt + made, tokens - len(made), priority)

    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer: dict[str, Any] = {}
        if "add" in command:
            name, prompt, tokens = command["add"]
            add(name, prompt, tokens, command.get("priority", 0))
        flights = 0
        for _ in range(command.get("steps", 0)):
            if engine.has_unfinished_requests():
                step()
                flights = max(flights, len(core.batch_queue or ()))
        answer["flights"] = flights
        while command.get("drain") and engine.has_unfinished_requests():
            step()
        answer["outputs"], answer["pool"] = (
            outputs,
            core.rl_coserve("page_pool", {"opened": command.get("opened", False)}),
        )
        answer["returned"] = counts["returned"]
        answer["unfinished"] = engine.get_num_unfinished_requests()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
