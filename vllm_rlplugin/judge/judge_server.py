"""A judge with streamed layers behind an OpenAI-compatible endpoint, on the GPU of a rollout engine (RollPacker 4.3).

    python -m vllm_rlplugin.judge.judge_server MODEL --port 8100 [--device cuda] [--memory-mb N] [--layers-file FILE]

`[reward.judge] path` starts it as a child of a run (:mod:`orchestrator.rewards.host_launch`); by hand it serves several.
``POST /v1/chat/completions`` (messages, max_tokens, temperature, seed) and ``GET /health``; what `[reward.judge]` asks for with
``structured = false``. Before each batch the number of resident layers is chosen from the length of its sequences and the
memory left; under MPS it is started with the environment of :class:`orchestrator.ops.mps.MpsControl`.

Guarantees: loopback unless ``--host`` says otherwise, and then TLS unless ``--allow-plain-http`` says so; every
request needs the bearer token of RL_COSERVE_JUDGE_TOKEN, and without one it does not start; what waits when the model
is free is computed as one batch, as far as there is memory for it; what nobody waits for any more is not; a sequence
that does not fit is status 413, a request that is none 400, and both leave the judge as it was. When it answers it
prints ``{"port": P}``; with ``--die-with-stdin`` it ends when its standard input does, so that it never outlives the
process that holds the other end.
"""

from __future__ import annotations

import argparse
import asyncio
import ssl
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from jinja2 import TemplateError

from orchestrator.api import ConfigError, bearer, jsontext, tls
from orchestrator.api.listener_limits import (
    LISTENERS,
    SERVER_OPTIONS,
    BodyRefused,
    HttpListener,
    read_body,
    serve_until_told,
)
from orchestrator.policies.parallelism.engine_profile import EngineLayout, EngineProfile
from orchestrator.policies.serving.judge_residency import BATCH, batch_size
from vllm_rlplugin.judge.judge_profiler import identity, read_profile
from vllm_rlplugin.judge.streamed_model import JudgeQuestion, StreamedModel, load_model, memory_left, padded_tokens

TOKEN = "RL_COSERVE_JUDGE_TOKEN"
LIMITS = LISTENERS["judge"]
MOST_WAITING = 256  # requests
MOST_MESSAGES = 1024
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _NoRoom(Exception):
    """A sequence does not fit into the memory that there is."""


@dataclass(eq=False)
class _Asked:
    question: JudgeQuestion
    is_gone: Callable[[], bool]  # who asked
    answer: list[int] | None = None


class JudgeServer:
    """``memory``: bytes that the judge may have, now; see :func:`memory_left`. ``profile``: what was measured of it; without it a
    token's memory follows from the model's sizes, and batches are as large as there are questions and memory."""

    def __init__(
        self,
        model: StreamedModel,
        tokenizer: Any,
        name: str,
        token: str,
        memory: Callable[[], int],
        profile: EngineProfile | None = None,
    ) -> None:
        """``token``: see :class:`orchestrator.api.bearer.Token`."""
        if profile is not None:
            model.memory = replace(model.memory, token=profile.shape(EngineLayout()).kv_bytes_per_token)
        if not token:
            raise ConfigError(TOKEN, "", "set it: every request must carry it as its bearer token")
        self._model, self._tokenizer, self._name = model, tokenizer, name
        named = getattr(getattr(getattr(model, "model", None), "generation_config", None), "eos_token_id", None)
        self._ends: list[int | None] = (
            named if isinstance(named, list) else [named]
        )  # of an answer, as the model's folder says
        self._token = bearer.Token(token, TOKEN)
        self.listener = HttpListener(LIMITS)
        self._memory, self._profile = memory, profile
        self._busy, self._reading = asyncio.Lock(), asyncio.Lock()  # a tokenizer is one thread's at a time
        self._count = self._waiting = self._said = 0  # ``_said``: tokens of all answers
        self._unanswered: list[_Asked] = []

    def app(self) -> web.Application:
        """To be served."""
        app = web.Application(middlewares=[self.listener.middleware, self._admitted])
        app.router.add_get("/health", self._health)
        app.router.add_post("/v1/chat/completions", self._complete)
        return app

    @web.middleware
    async def _admitted(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Nobody learns anything without the token, before a body is read."""
        if not self._token.admits(request.headers.get("Authorization")):
            return _refuse(401, "give the bearer token")
        return await handler(request)

    async def _health(self, request: web.Request) -> web.Response:
        residency, counts = self._model.residency, self._model.counts
        return web.json_response(
            {
                "device": str(self._model.device),
                "layers": residency.layers,
                "resident": residency.resident,
                "copies": counts.copies,
                "passes": counts.passes,
            }
        )

    async def _complete(self, request: web.Request) -> web.Response:
        if self._waiting >= MOST_WAITING:
            return _refuse(429, f"{self._waiting} requests wait already")
        self._waiting += 1
        try:
            return await self._answer(await read_body(request, LIMITS), lambda: request.transport is None)
        except BodyRefused as error:
            return _refuse(error.status, str(error))
        finally:
            self._waiting -= 1

    async def _answer(self, body: bytes, is_gone: Callable[[], bool]) -> web.Response:
        try:
            async with self._reading:
                prompt, most, temperature, seed = await asyncio.to_thread(self._read, jsontext.parse_object(body))
        except (ValueError, TypeError, LookupError, OverflowError) as error:
            return _refuse(400, str(error)[:500])
        stop = frozenset({self._tokenizer.eos_token_id, *self._ends} - {None})
        try:
            found = await self._generated(_Asked(JudgeQuestion(tuple(prompt), most, temperature, seed), is_gone), stop)
        except _NoRoom as error:
            return _refuse(413, str(error))
        self._count += bool(found)
        self._said += len(found)
        ended = bool(found) and found[-1] in stop
        text = self._tokenizer.decode(found[:-1] if ended else found)
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(found),
            "total_tokens": len(prompt) + len(found),
        }
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": "stop" if ended else "length",
        }
        answer = {"id": f"judge-{self._count}", "object": "chat.completion", "model": self._name}
        kept = {"layers": self._model.residency.layers, "resident": self._model.residency.resident}
        return web.json_response({**answer, "choices": [choice], "usage": usage, "residency": kept})

    async def _generated(self, mine: _Asked, stop: frozenset[int]) -> list[int]:
        """Its answer; nothing, where nobody waits for it. Whoever comes to the model first computes what waits with its own.
        Raises _NoRoom."""
        self._unanswered.append(mine)
        try:
            async with self._busy:
                self._unanswered = [one for one in self._unanswered if not one.is_gone()]
                if mine.answer is None and not mine.is_gone():
                    batch = self._batch(mine)
                    questions = [one.question for one in batch]
                    answers = await asyncio.to_thread(self._model.generate_batch, questions, stop)
                    for one, answer in zip(batch, answers, strict=True):
                        one.answer = answer
                    self._unanswered = [one for one in self._unanswered if one.answer is None]
        finally:
            self._unanswered = [one for one in self._unanswered if one is not mine]
        return mine.answer or []

    def _batch(self, first: _Asked) -> list[_Asked]:
        """With ``first`` those whose prompts are about as long, as many as there is memory for, which is arranged, and as a
        profile says pays."""
        length = len(first.question.prompt)
        alike = [one for one in self._unanswered if one is not first and _about(length, len(one.question.prompt))]
        batch, memory = [first, *alike][:BATCH], self._memory()
        if self._profile is not None:
            said = self._said / self._count if self._count else first.question.max_tokens
            batch = batch[: batch_size(self._profile, length, said, len(batch))]
        while True:
            try:
                self._model.fit(padded_tokens([one.question for one in batch]), memory)
            except ValueError as error:
                if len(batch) == 1:
                    raise _NoRoom(str(error)) from error
                batch = batch[: len(batch) // 2]
            else:
                return batch

    def _read(self, body: Mapping[str, Any]) -> tuple[list[int], int, float, int]:
        """Raises ValueError, TypeError or LookupError for what is no request of ours."""
        if body.get("response_format"):
            raise ValueError("response_format is not supported: set reward.judge.structured to false")
        if body.get("stream") or int(body.get("n", 1)) != 1:
            raise ValueError("stream and n > 1 are not supported")
        if not isinstance(body["messages"], list) or len(body["messages"]) > MOST_MESSAGES:
            raise ValueError(f"messages is a list of at most {MOST_MESSAGES}")
        messages = [{"role": str(item["role"]), "content": str(item["content"])} for item in body["messages"]]
        if not messages:
            raise ValueError("messages is empty")
        most, temperature = int(body.get("max_tokens", 64)), float(body.get("temperature", 0.0))
        if most < 1 or not 0 <= temperature <= 10:
            raise ValueError("max_tokens is at least 1, temperature 0 to 10")
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        prompt = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        room = int(self._model.model.config.max_position_embeddings)
        if len(prompt) + most > room:
            raise ValueError(f"{len(prompt)} + {most} tokens are more than the model's {room}")
        seed = int(body.get("seed") or 0)
        if not -(2**63) <= seed < 2**63:
            raise ValueError("seed has 64 bits")
        return prompt, most, temperature, seed


def _about(one: int, other: int) -> bool:
    """Whether padding the shorter to the longer is worth the layers that are not brought twice."""
    return max(one, other) <= 2 * min(one, other) + 64


def _refuse(status: int, why: str) -> web.Response:
    return web.json_response({"error": {"message": why, "code": status}}, status=status)


async def serve(
    judge: JudgeServer, host: str, port: int, die_with_stdin: bool, context: ssl.SSLContext | None = None
) -> None:
    """Until SIGTERM, SIGINT or, if so asked, the end of standard input."""
    runner = web.AppRunner(judge.app(), access_log=None, shutdown_timeout=0.5, **SERVER_OPTIONS)
    await serve_until_told(runner, judge.listener, {"host": host, "port": port, "context": context}, die_with_stdin)


def main() -> int:
    """Entry point. 2: what it was given cannot be used, or the port is taken."""
    parser = argparse.ArgumentParser(description="A judge whose layers are streamed from host memory.")
    parser.add_argument("model", help="Hugging Face folder with a tokenizer and a chat template")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True, help="0: a free one, which is printed")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, or auto: cuda where there is one")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--memory-mb", type=int, default=0, help="memory that the judge may use; 0: what is free (CPU: no limit)"
    )
    parser.add_argument("--layers-file", type=Path, help="keep the layers here instead of in memory (CPU)")
    parser.add_argument(
        "--profile", type=Path, help="file of `rl-coserve profile --judge`: its memory and batches go by it"
    )
    parser.add_argument("--die-with-stdin", action="store_true", help="end when standard input ends")
    parser.add_argument("--allow-plain-http", action="store_true", help="listen unencrypted where others can reach it")
    tls.add_arguments(parser)
    arguments = parser.parse_args()
    bearer.take_variables([TOKEN])
    try:
        context = tls.check_listener(arguments.host, tls.of_arguments(arguments), "--host", arguments.allow_plain_http)
        asyncio.run(
            serve(_server(arguments), arguments.host, arguments.port, arguments.die_with_stdin, context),
        )
    except (ConfigError, OSError, ValueError) as error:
        print(f"the judge cannot start: {error}", file=sys.stderr)
        return 2
    return 0


def _server(arguments: argparse.Namespace) -> JudgeServer:
    from transformers import AutoTokenizer

    given, profile = arguments.memory_mb << 20, None
    if arguments.profile:
        here = identity(arguments.device, torch.get_num_threads(), arguments.memory_mb)
        profile = read_profile(arguments.profile, here)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, local_files_only=True)
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError("model", arguments.model, "its tokenizer has no chat template, so that it cannot be asked")
    judge = load_model(arguments.model, arguments.device, arguments.dtype, given, arguments.layers_file)
    memory = memory_left(judge, given)
    return JudgeServer(judge, tokenizer, arguments.model, bearer.variable(TOKEN), memory, profile)


if __name__ == "__main__":
    sys.exit(main())
