"""One engine of a pool in a process of its own, driven by JSON lines: for the co-serving benchmark and its tests.

``Driven`` starts it; ``python -m scripts.bench.probes.vllm.coserve_engine JSON`` is it. Commands, each with one answer:

* ``replay`` {"arrivals": [[seconds, prompt tokens, answer tokens], ...]}: each request at its time, as users send them; answers
  with ``ttft`` (seconds from that time to the first token) and ``tpot`` (the mean between its tokens) of each, ``busy``: the
  share of the time in which a step ran, and ``pages``: the most that it held.
* ``roll`` {"seconds", "prompt", "answer", "turns", "sequences"}: so many trajectories at a time, multi-turn, new ones as they
  end; what is handed back goes on with its tokens after ``REST`` seconds, as a scheduler with other workers would have it.
  Answers with ``tokens`` made, ``ended`` turns, ``returned`` requests. What is unfinished is dropped.
  With ``cached`` false no prefix is found again and pages go back as soon as nobody uses them.
* ``tune`` {"ttft", "tpot", "mode", "partition"}: other SLOs, of a serving engine. ``look`` {"opened"}: the scheduler's
  ``page_pool``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.api import RunError
from orchestrator.policies.serving.admission import Slo
from vllm_rlplugin.kvpool.engine.idle_upkeep import LOOK_SECONDS

REST = 0.5  # seconds


class Child:
    """The engine, and what it can be told."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm_rlplugin.options import PluginOptions, engine_arguments
        from vllm_rlplugin.worker.inprocess_engine import prepare_process

        plugin, core = settings.pop("plugin"), settings.pop("cpu", None)
        if "fake_driver" in plugin:
            importlib.import_module("tests.support.kvpool_engine").on_fake_driver(plugin.pop("fake_driver"))
        prepare_process(1, bool(plugin.get("kv_pool")))
        from vllm import SamplingParams
        from vllm.engine.arg_utils import EngineArgs
        from vllm.inputs import tokens_input
        from vllm.v1.engine.llm_engine import LLMEngine

        arguments = EngineArgs(
            skip_tokenizer_init=True,
            generation_config="vllm",
            dtype="float32",
            enforce_eager=True,
            disable_log_stats=True,
            gpu_memory_utilization=0.01,  # else vLLM starts on an empty device only
            **settings,
            **engine_arguments(PluginOptions.from_dict(plugin)),
        )
        self._engine: Any = LLMEngine.from_vllm_config(arguments.create_engine_config(), disable_log_stats=True)
        self._core = self._engine.engine_core.engine_core
        self._sampling: Callable[..., Any] = SamplingParams
        self._tokens_input: Callable[..., Any] = tokens_input
        self._vocabulary = int(self._engine.model_config.get_vocab_size())
        self._random = random.Random(5)
        self._number = 0
        self._keep = float(plugin.get("kv_pool_keep", 10.0))
        if core is not None:  # only now: engines that start do not have to wait for each other
            for thread in os.listdir("/proc/self/task"):
                with contextlib.suppress(ProcessLookupError):  # it has ended since
                    os.sched_setaffinity(int(thread), {core})

    def run(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """One command."""
        what, values = command["do"], {key: value for key, value in command.items() if key != "do"}
        calls: dict[str, Callable[..., dict[str, Any]]] = {}
        calls |= {"replay": self.replay, "roll": self.roll, "tune": self.tune, "look": self.look}
        return calls[what](**values)

    def look(self, opened: bool = False) -> dict[str, Any]:
        """See the module."""
        return dict(self._core.rl_coserve("page_pool", {"opened": opened}))

    def tune(self, ttft: float, tpot: float, mode: str, partition: float = 0.0) -> dict[str, Any]:
        """See the module."""
        self._core.scheduler._rl_pages.tune(Slo(ttft, tpot), mode, partition)
        return {}

    def _prompt(self, tokens: int) -> list[int]:
        return [self._random.randrange(self._vocabulary) for _ in range(tokens)]

    def _add(self, prompt: list[int], tokens: int, arrival: float | None = None, cached: bool = True) -> str:
        self._number += 1
        name = f"q{self._number}"
        sampling = self._sampling(
            max_tokens=tokens,
            ignore_eos=True,
            temperature=0.0,
            detokenize=False,
            skip_reading_prefix_cache=not cached,
        )
        self._engine.add_request(name, self._tokens_input(prompt), sampling, arrival_time=arrival)
        return name

    def replay(self, arrivals: list[list[float]]) -> dict[str, Any]:
        """See the module."""
        engine, begun = self._engine, time.monotonic()
        wall = time.time() - begun  # of the two clocks
        queue = [(begun + at, self._prompt(int(prompt)), int(answer)) for at, prompt, answer in arrivals]
        asked: dict[str, tuple[float, int]] = {}
        first: dict[str, float] = {}
        rows: list[tuple[float, float]] = []
        at, busy, pages = 0, 0.0, 0
        while at < len(queue) or engine.has_unfinished_requests():
            now = time.monotonic()
            while at < len(queue) and queue[at][0] <= now:
                due, prompt, answer = queue[at]
                asked[self._add(prompt, answer, due + wall)] = (due, answer)
                at += 1
            if not engine.has_unfinished_requests():
                time.sleep(max(0.0, queue[at][0] - now))
                continue
            outputs = engine.step()
            ended = time.monotonic()
            busy += ended - now
            pages = max(pages, self._core.scheduler._rl_pages.held_pages)
            for output in outputs:
                name = output.request_id
                first.setdefault(name, ended)
                if output.finished:
                    due, answer = asked.pop(name)
                    rows.append((first[name] - due, (ended - first[name]) / max(1, answer - 1)))
        seconds = time.monotonic() - begun
        return {
            "ttft": [row[0] for row in rows],
            "tpot": [row[1] for row in rows],
            "busy": busy / seconds,
            "seconds": seconds,
            "pages": pages,
        }

    def roll(
        self, seconds: float, prompt: int, answer: int, turns: int, sequences: int, cached: bool = True
    ) -> dict[str, Any]:
        """See the module."""
        engine, begun = self._engine, time.monotonic()
        self._core.scheduler._rl_pages.set_keep_seconds(self._keep if cached else 0.0)
        end, most = begun + seconds, int(engine.model_config.max_model_len)
        waiting: list[tuple[float, list[int], int, int]] = [
            (begun, self._prompt(prompt), answer, turns) for _ in range(sequences)
        ]
        asked: dict[str, tuple[list[int], int, int]] = {}
        made: dict[str, int] = {}
        counts = {"tokens": 0, "ended": 0, "returned": 0}
        while (now := time.monotonic()) < end:
            for item in [item for item in waiting if item[0] <= now]:
                waiting.remove(item)
                asked[self._add(item[1], item[2], cached=cached)] = item[1:]
            if not engine.has_unfinished_requests():
                time.sleep(0.005)
                continue
            for output in engine.step():
                name, tokens = output.request_id, list(output.outputs[0].token_ids)
                counts["tokens"] += len(tokens) - made.get(name, 0)
                made[name] = len(tokens)
                if not output.finished:
                    continue
                context, left, more = asked.pop(name)
                context, left = context + tokens, left - len(tokens)
                if output.outputs[0].finish_reason == "abort":
                    counts["returned"] += 1
                    waiting.append((time.monotonic() + REST, context, left, more))
                    continue
                counts["ended"] += 1
                context = context + self._prompt(16)  # what the environment says
                if more <= 1 or len(context) + answer >= most:
                    context, more = self._prompt(prompt), turns + 1
                waiting.append((time.monotonic(), context, answer, more - 1))
        engine.abort_request(list(asked))
        while engine.has_unfinished_requests():
            engine.step()
        engine.step()  # so that the workers forget them too
        return {**counts, "seconds": time.monotonic() - begun}


class Driven:
    """The parent's end. Raises RunError when the engine has ended."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the engine
        self.process = subprocess.Popen(
            [sys.executable, "-m", "scripts.bench.probes.vllm.coserve_engine", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
            text=True,
        )

    def tell(self, what: str, **values: Any) -> None:
        """Give a command; :meth:`answer` waits for what it says."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": what, **values}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise self._ended() from error

    def answer(self) -> dict[str, Any]:
        """To the earliest command without one; the first says that it is ready."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise self._ended()

    def _ended(self) -> RunError:
        code = self.process.wait()
        self._errors.seek(0)
        return RunError(f"the engine ended with {code}: {self._errors.read().decode(errors='replace')[-2000:]}")

    def do(self, what: str, **values: Any) -> dict[str, Any]:
        """Both."""
        self.tell(what, **values)
        return self.answer()

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        self._errors.close()


def main() -> None:
    """The child."""
    child = Child(json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), flush=True)
    commands: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            commands.put(line)
        commands.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = commands.get(timeout=LOOK_SECONDS)
        except queue.Empty:
            child.look()  # as a served engine does: one that is idle and gives no page back is killed
            continue
        if line is None:
            return
        print(json.dumps(child.run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
