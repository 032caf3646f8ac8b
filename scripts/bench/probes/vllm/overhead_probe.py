"""Tokens per second of one engine, on command: stock vLLM, stock with the plugin loaded but idle, or our worker.

``python -m scripts.bench.probes.vllm.overhead_probe KIND MODEL`` starts one engine and then answers each line
``{"requests", "tokens", "seed"}`` on stdin with one JSON line: seconds (wall and processor), tokens, and a digest of
every token and log-prob. A parent interleaves several such processes round by round, so that a busy machine slows all
of them alike. ``KIND``:

* ``stock`` : vLLM without the plugin (``VLLM_PLUGINS`` empty); no hook of ours may be live, else it ends with an error.
* ``idle``  : vLLM loaded the plugin, nobody asked for it: entry point and flag must be live, the scheduler stock.
* ``worker``: :class:`~vllm_rlplugin.worker.inprocess_worker.EngineWorker`: our scheduler, a random priority for each request.

All kinds run the same model, limits and sampling.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from orchestrator.api import GenerationRequest, Sampling
from vllm_rlplugin.worker.inprocess_worker import EngineWorker

KINDS = ("stock", "idle", "worker")
VOCABULARY = 64
PROMPT_TOKENS = 32
MAX_NUM_SEQS = 128
MAX_MODEL_LEN = 512
BLOCK_SIZE = 32
KV_CACHE_MB = 96
WORST_PRIORITY = 1 << 20
ADD_AFTER_TURNS = 16  # turns of the event loop before the further requests are added

STOCK_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}

Answer = tuple[tuple[int, ...], tuple[float, ...]]  # token ids and log-probs of one request


@dataclass(frozen=True, slots=True)
class Round:
    """What one round generates: ``requests`` at once, ``tokens`` each; contents follow from ``seed``.

    ``adds`` (our worker only): so many further requests of worse priority are added while the first ones are generated,
    each by a call of its own; they are aborted afterwards. ``to_first_end``: time only until the first request ends, from
    when on others share the steps. ``seeded``: each request has a
    sampling seed of its own, so digests are comparable (vLLM's CPU runner cannot do that with chunked prefills).
    """

    requests: int
    tokens: int
    seed: int
    adds: int = 0
    seeded: bool = False
    to_first_end: bool = False

    def inputs(self) -> list[tuple[str, list[int], int | None, int]]:
        """(name, prompt, sampling seed, priority) of each request."""
        rng = random.Random(self.seed)
        return [
            (
                f"{self.seed}-{index}",
                [rng.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)],
                rng.randrange(1 << 30) if self.seeded else None,
                rng.randrange(1000),
            )
            for index in range(self.requests)
        ]


def digest(answers: dict[str, Answer]) -> str:
    """One digest over all tokens and log-probs, bit for bit, in order of the requests' names."""
    state = xxhash.xxh3_64()
    for name in sorted(answers):
        tokens, logprobs = answers[name]
        state.update(repr((name, tokens, [value.hex() for value in logprobs])).encode())
    return str(state.hexdigest())


def stock_engine(model: str) -> Any:
    """A plain ``LLMEngine`` with the limits of this probe."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    arguments = EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype="float32",
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        kv_cache_memory_bytes=KV_CACHE_MB << 20,
        gpu_memory_utilization=0.01,  # else vLLM starts on an empty device only
        enforce_eager=True,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
    )
    return LLMEngine.from_vllm_config(arguments.create_engine_config(), disable_log_stats=True)


def run_stock(engine: Any, work: Round, timed: Callable[[], None]) -> dict[str, Answer]:
    """One round on a plain engine, first come first served."""
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    inputs = work.inputs()
    timed()
    for name, prompt, seed, _ in inputs:
        params = SamplingParams(
            temperature=1.0,
            max_tokens=work.tokens,
            seed=seed,
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        engine.add_request(name, tokens_input(prompt), params)
    answers: dict[str, Answer] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            result = output.outputs[0]
            answers[output.request_id] = (tuple(result.token_ids), tuple(result.logprobs.logprobs))
    timed()
    return answers


async def run_worker(worker: EngineWorker, work: Round, timed: Callable[[], None]) -> dict[str, Answer]:
    """One round on our worker, ranked by priority. ``timed`` is called before the first ADD, and when the requests that
    count are finished."""
    requests = [
        GenerationRequest(
            name, name, 0, tuple(prompt), Sampling(work.tokens, temperature=1.0, seed=seed), "probe", priority
        )
        for name, prompt, seed, priority in work.inputs()
    ]
    extra = {
        name: GenerationRequest(name, name, 0, (1,) * PROMPT_TOKENS, Sampling(8), "probe", WORST_PRIORITY)
        for name in (f"{work.seed}+{index}" for index in range(work.adds))
    }
    answers: dict[str, Answer] = {}
    timed()
    await worker.add(requests)
    if extra:
        for _ in range(ADD_AFTER_TURNS):
            await asyncio.sleep(0)  # the worker runs about one engine step a turn of the event loop
        await asyncio.gather(*(worker.add([request]) for request in extra.values()))
    while len(answers) < work.requests:
        for completion in await worker.completions():
            if completion.request_id not in extra:
                answers[completion.request_id] = (completion.token_ids, completion.logprobs)
                if work.to_first_end and len(answers) == 1:
                    timed()
    if not work.to_first_end:
        timed()
    await worker.abort(list(extra))
    ended = 0
    while ended < len(extra):
        ended += len(await worker.completions())
    return answers


def assert_kind(kind: str, scheduler: Any) -> dict[str, Any]:
    """Prove in this process that the hooks are as ``kind`` says. Raises RuntimeError."""
    from vllm_rlplugin import status

    found = status()
    live = sorted(name for name, is_live in found["patches"].items() if is_live)
    ours = type(scheduler).__module__.startswith("vllm_rlplugin")
    wanted = {
        "stock": (not found["entry_point"] and not live and not ours),
        "idle": (found["entry_point"] and live == ["cli_flag"] and not ours),
        "worker": ("engine_command" in live and ours),
    }[kind]
    if not wanted:
        raise RuntimeError(f"not {kind}: entry point {found['entry_point']}, live {live}, {type(scheduler)}")
    return {"entry_point": found["entry_point"], "patches": live, "scheduler": type(scheduler).__name__}


def serve(kind: str, model: str) -> None:
    """Start the engine, then one round for each line of stdin."""
    if kind == "worker":
        loop = asyncio.new_event_loop()
        worker = EngineWorker(
            model=model,
            max_num_seqs=MAX_NUM_SEQS,
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK_SIZE,
            kv_cache_mb=KV_CACHE_MB,
        )
        scheduler = worker._engine._scheduler
        steps: StepClock | None = StepClock(worker._engine)

        def run(work: Round, timed: Callable[[], None]) -> dict[str, Answer]:
            return loop.run_until_complete(run_worker(worker, work, timed))
    else:
        # What EngineWorker sets for its process, without asking for the plugin.
        os.environ.update(STOCK_ENVIRONMENT)
        if kind == "stock":
            os.environ["VLLM_PLUGINS"] = ""
        else:
            os.environ.pop("VLLM_PLUGINS", None)
        engine = stock_engine(model)
        steps = None
        scheduler = engine.engine_core.engine_core.scheduler

        def run(work: Round, timed: Callable[[], None]) -> dict[str, Answer]:
            return run_stock(engine, work, timed)

    gc.collect()
    gc.freeze()  # as vLLM's own engine process does; else what happened to be imported decides how often it collects
    _say({"ready": True, "pid": os.getpid(), "hooks": assert_kind(kind, scheduler)})
    for line in sys.stdin:
        _say(_timed(run, Round(**json.loads(line)), steps))


class StepClock:
    """Adds up the processor time that a worker's engine spends inside its steps."""

    def __init__(self, engine: Any) -> None:
        self.seconds = 0.0
        self._stock = engine.step
        engine.step = self._step

    def _step(self, now: float) -> Any:
        began = time.process_time()
        try:
            return self._stock(now)
        finally:
            self.seconds += time.process_time() - began


def _timed(
    run: Callable[[Round, Callable[[], None]], dict[str, Answer]], work: Round, steps: StepClock | None
) -> dict[str, Any]:
    clocks: list[tuple[float, float, float]] = []

    def timed() -> None:
        clocks.append((time.perf_counter(), time.process_time(), steps.seconds if steps is not None else 0.0))

    answers = run(work, timed)
    (began, began_processor, began_steps), (ended, ended_processor, ended_steps) = clocks
    return {
        "wall": ended - began,
        "processor": ended_processor - began_processor,
        "in_steps": ended_steps - began_steps,
        "tokens": sum(len(token_ids) for token_ids, _ in answers.values()),
        "digest": digest(answers),
    }


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.probes.vllm.overhead_probe")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("model")
    options = parser.parse_args(arguments)
    serve(options.kind, options.model)
    return 0


if __name__ == "__main__":
    sys.exit(main())
