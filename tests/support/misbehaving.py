"""An environment that does what its prompt says, for tests in this process and in others."""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from orchestrator.api import Observation, Prompt, StepResult

CONTEXT = 60


class BadError(Exception):
    """Cannot even say what it is."""

    def __repr__(self) -> str:
        raise ValueError("no repr")


class Misbehaving:
    version = "misbehaving 1"

    def __init__(self) -> None:
        self.what = ""
        self.fresh = True
        self.count = 0

    async def reset(self, prompt: Prompt) -> Observation:
        assert self.fresh, "used again without being renewed"
        self.fresh = False
        self.what = prompt.payload
        if self.what == "hang in reset":
            await asyncio.Event().wait()
        return Observation((2, 3))

    async def step(self, action_ids: tuple[int, ...]) -> StepResult:
        answer: Any = StepResult(Observation((4,)), 0.0, True)
        match self.what:
            case "raise":
                raise ZeroDivisionError("inside")
            case "raise something unspeakable":
                raise BadError
            case "raise a cancellation":
                raise asyncio.CancelledError
            case "exit":
                sys.exit(3)
            case "hang":
                await asyncio.Event().wait()
            case "swallow the cancellation":
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    await asyncio.sleep(0.5)
                    return StepResult(Observation((4,)), 1.0, True)
            case "count slowly":
                await asyncio.sleep(0.3)
                self.count += 1
                answer = StepResult(Observation((4,)), float(self.count), False)
            case "return nothing":
                answer = None
            case "return NaN":
                answer = StepResult(Observation((4,)), math.nan, True)
            case "return text for a number":
                answer = StepResult(Observation((4,)), "1.0", True)  # type: ignore[arg-type]
            case "return text for tokens":
                answer = StepResult(Observation(("a", "b")), 0.0, False)  # type: ignore[arg-type]
            case "return no observation":
                answer = StepResult(None, 0.0, False)  # type: ignore[arg-type]
            case "return a number for done":
                answer = StepResult(Observation((4,)), 0.0, 1)  # type: ignore[arg-type]
            case "say too much":
                answer = StepResult(Observation((4,) * (CONTEXT + 1)), 0.0, False)
            case "speak another language":
                answer = StepResult(Observation((99,)), 0.0, False)
            # From here on only where it has a process of its own.
            case "busy loop":
                while True:
                    pass
            case "end the process":
                os._exit(7)
            case "crash":
                ctypes.string_at(0)
            case "say far too much":
                answer = StepResult(Observation((4,) * 2_000_000), 0.0, False)  # 4 MB on the wire
            case "flood":
                answer = StepResult(Observation((10**18,) * 450_000), 0.0, False)  # 9 MB on the wire
            case "take all memory":
                bytearray(8 << 30)
            case "leave orphans":
                subprocess.run(["sh", "-c", "sleep 0.1 & sleep 0.1 &"], check=True)  # noqa: ASYNC221
            case "print":
                print('{"id": 3, "result": {}}', flush=True)
                os.write(1, b"garbage\n")
            case "start children":
                subprocess.Popen(["sleep", "1000"])  # noqa: ASYNC220
                subprocess.Popen(["sleep", "1000"], start_new_session=True)  # noqa: ASYNC220
                time.sleep(1000)  # noqa: ASYNC251
        return answer  # type: ignore[no-any-return]

    async def close(self) -> None:
        if self.what == "hang in close":
            await asyncio.Event().wait()


class MisbehavingTask:
    name = "misbehaving"
    vocabulary: Sequence[str] = tuple("abcdefgh")
    pad_id, end_id, max_turns, max_response_tokens, max_context_tokens = 0, 1, 5, 2, CONTEXT

    def prompts(self, split: str, seed: int) -> Iterator[Prompt]:
        return iter(())

    def environment(self) -> Misbehaving:
        return Misbehaving()


def no_such_thing() -> None:
    raise RuntimeError("the library is not there")
