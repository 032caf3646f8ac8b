"""The endpoint of a judge with streamed layers: it answers what the model says, to those who have the token."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer

from orchestrator.api import ConfigError
from orchestrator.api.listener_limits import SERVER_OPTIONS as OPTIONS
from vllm_rlplugin.judge.judge_server import JudgeServer
from vllm_rlplugin.judge.streamed_model import StreamedModel, memory_left

LETTERS = [chr(code) for code in range(32, 127)]
PROMPT = "Is it good?"


def judge() -> StreamedModel:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(LETTERS) + 1,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
    )
    torch.manual_seed(2)
    return StreamedModel(Qwen3ForCausalLM(config).float())


class Letters:
    """A tokenizer whose tokens are letters."""

    eos_token_id = len(LETTERS)

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize
        assert add_generation_prompt
        return "".join(message["content"] for message in messages)

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [LETTERS.index(letter) for letter in text]}

    def decode(self, ids: list[int]) -> str:
        return "".join(LETTERS[number] for number in ids if number < len(LETTERS))


def served(
    model: StreamedModel, memory: int, main: Callable[[str, aiohttp.ClientSession], Coroutine[Any, Any, None]]
) -> None:
    async def run() -> None:
        app = JudgeServer(model, Letters(), "judge", "secret", memory_left(model, memory)).app()
        async with TestServer(app) as server, aiohttp.ClientSession() as session:
            await main(str(server.make_url("/v1/chat/completions")), session)

    asyncio.run(run())


HEADERS = {"Authorization": "Bearer secret"}


def asked(text: str = PROMPT, **more: Any) -> dict[str, Any]:
    return {"model": "judge", "messages": [{"role": "user", "content": text}], "max_tokens": 12, **more}


def test_answers_are_the_models_whatever_is_streamed_and_several_may_ask_at_once() -> None:
    model = judge()
    prompts = [PROMPT, "a much longer question, is it?", "x"]
    plain = [model.generate([LETTERS.index(letter) for letter in text], 12) for text in prompts]
    memory = model.memory.fixed + int(24 * model.memory.token) + 4 * model.memory.layer

    async def main(url: str, session: aiohttp.ClientSession) -> None:
        async def ask(text: str) -> dict[str, Any]:
            async with session.post(url, json=asked(text), headers=HEADERS) as response:
                assert response.status == 200
                found: dict[str, Any] = await response.json()
                return found

        answers = await asyncio.gather(*(ask(text) for text in prompts))
        for text, answer, tokens in zip(prompts, answers, plain, strict=True):
            assert answer["choices"][0]["message"]["content"] == Letters().decode(tokens)
            assert answer["usage"] == {
                "prompt_tokens": len(text),
                "completion_tokens": len(tokens),
                "total_tokens": len(text) + len(tokens),
            }
        async with session.get(url.replace("/v1/chat/completions", "/health"), headers=HEADERS) as response:
            health = await response.json()
        assert health["layers"] == 4
        assert health["copies"] > 0, "the long sequence left no room for all layers"

    served(model, memory, main)


@pytest.mark.parametrize("several", [True, False])
def test_an_answer_ends_by_what_the_models_folder_names_too(several: bool) -> None:
    """As Gemma 3 and GLM-4.5, which do not say the tokenizer's own."""
    model = judge()
    plain = model.generate([LETTERS.index(letter) for letter in PROMPT], 12)
    last = next(place for place in range(1, len(plain)) if plain[place] not in plain[:place])
    model.model.generation_config.eos_token_id = [0, plain[last]] if several else plain[last]

    async def main(url: str, session: aiohttp.ClientSession) -> None:
        async with session.post(url, json=asked(), headers=HEADERS) as response:
            answer = await response.json()
        (choice,) = answer["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (Letters().decode(plain[:last]), "stop")

    served(model, model.memory.fixed + int(24 * model.memory.token) + 4 * model.memory.layer, main)


def test_what_waits_is_computed_as_one_batch_as_far_as_memory_goes() -> None:
    model = judge()
    prompts = [f"{PROMPT}{number}" for number in range(9)]
    alone = [Letters().decode(model.generate([LETTERS.index(letter) for letter in text], 12)) for text in prompts]
    together: list[int] = []
    computed = model.generate_batch

    def noted(questions: Any, stop: Any) -> Any:
        together.append(len(questions))
        return computed(questions, stop)

    model.generate_batch = noted  # type: ignore[method-assign]
    memory = model.memory.fixed + int(4 * 24 * model.memory.token) + 2 * model.memory.layer

    async def main(url: str, session: aiohttp.ClientSession) -> None:
        async def ask(text: str) -> str:
            async with session.post(url, json=asked(text), headers=HEADERS) as response:
                answer = await response.json()
                return str(answer["choices"][0]["message"]["content"])

        assert await asyncio.gather(*(ask(text) for text in prompts)) == alone

    served(model, memory, main)
    assert sum(together) == 9
    assert max(together) in (2, 3, 4), "memory for four"


def test_a_question_whose_asker_has_gone_is_not_computed() -> None:
    model, computed, told = judge(), list[int](), threading.Event()
    begun = asyncio.Event()

    async def main(url: str, session: aiohttp.ClientSession) -> None:
        loop, generate = asyncio.get_running_loop(), model.generate_batch

        def slow(questions: Any, stop: Any) -> Any:
            computed.append(len(questions))
            loop.call_soon_threadsafe(begun.set)
            told.wait(10)
            return generate(questions, stop)

        model.generate_batch = slow  # type: ignore[method-assign]

        async def ask() -> int:
            async with session.post(url, json=asked(), headers=HEADERS) as response:
                return response.status

        first = asyncio.ensure_future(ask())
        await begun.wait()
        gone = [asyncio.ensure_future(ask()) for _ in range(3)]
        stays = asyncio.ensure_future(ask())
        await asyncio.sleep(0.3)
        for task in gone:  # its time was up
            task.cancel()
        await asyncio.sleep(0.1)
        told.set()
        assert [await first, await stays] == [200, 200]
        assert await ask() == 200, "who left is counted no more"

    async def run() -> None:  # as it is served, where no handler ends with its connection
        runner = web.AppRunner(JudgeServer(model, Letters(), "judge", "secret", memory_left(model, 0)).app(), **OPTIONS)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with aiohttp.ClientSession() as session:
            await main(f"http://127.0.0.1:{runner.addresses[0][1]}/v1/chat/completions", session)
        await runner.cleanup()

    asyncio.run(run())
    assert computed == [1, 1, 1], "the first, the one that stayed, the last"


def test_without_the_token_or_with_a_wrong_request_nothing_is_computed() -> None:
    model = judge()

    async def main(url: str, session: aiohttp.ClientSession) -> None:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            async with session.post(url, json=asked(), headers=headers) as response:
                assert response.status == 401
            async with session.get(url.replace("/v1/chat/completions", "/health"), headers=headers) as response:
                assert response.status == 401
        wrong = [
            asked(response_format={"type": "json_schema"}),
            asked(max_tokens=0),
            asked(n=2),
            asked("x" * 60),
            asked(seed=2**70),
            {"messages": []},
            {"model": "judge"},
        ]
        for body in wrong:
            async with session.post(url, json=body, headers=HEADERS) as response:
                assert response.status == 400, body
                assert (await response.json())["error"]["message"]

    served(model, 0, main)
    assert model.counts.passes == 0


def test_a_sequence_that_does_not_fit_is_refused_and_the_next_is_answered() -> None:
    model = judge()
    memory = model.memory.fixed + int(14 * model.memory.token) + 2 * model.memory.layer

    async def main(url: str, session: aiohttp.ClientSession) -> None:
        for text, status in (("x" * 40, 413), ("x", 200)):
            async with session.post(url, json=asked(text), headers=HEADERS) as response:
                assert response.status == status

    served(model, memory, main)


def test_a_judge_without_a_token_does_not_start() -> None:
    with pytest.raises(ConfigError, match="RL_COSERVE_JUDGE_TOKEN"):
        JudgeServer(judge(), Letters(), "judge", "", lambda: 0)
