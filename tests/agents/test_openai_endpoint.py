"""The OpenAI-compatible endpoint: what agents ask becomes trajectories, token for token. Real HTTP; the policy is scripted."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import tracemalloc
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.agents import openai_protocol
from orchestrator.agents.agent_session import AgentBounds, AgentSession, calls_in
from orchestrator.agents.chat_template import Message, ModelChat, VocabularyChat
from orchestrator.agents.conversation import Answer, Conversation, Opening
from orchestrator.agents.openai_endpoint import AgentAccess, AgentGateway
from orchestrator.api import Completion, ConfigError, GenerationRequest, Prompt, Sampling, Trajectory, Turn
from orchestrator.envs import StaleTrajectory
from tests.support.tiny_tokenizer import write_tokenizer

T = TypeVar("T")
CHAT = VocabularyChat()
BOUNDS = AgentBounds(max_turns=12, max_response_tokens=16, max_context_tokens=8000)


class ScriptedPolicy:
    """Says what it is told to, ended; remembers every request. Another weight version with every answer."""

    def __init__(self, *says: str, wait: asyncio.Event | None = None) -> None:
        self.says, self.wait = list(says), wait
        self.requests: list[GenerationRequest] = []
        self.completions: list[Completion] = []
        self.aborted = 0

    async def generate(self, request: GenerationRequest, turns: Sequence[Turn] = ()) -> Completion:
        self.requests.append(request)
        said = self.says[len(self.requests) - 1] if len(self.requests) <= len(self.says) else f"{len(self.requests)}"
        if self.wait is not None:
            try:
                await self.wait.wait()
            except asyncio.CancelledError:
                self.aborted += 1
                raise
        ids = (*CHAT.encode(said), CHAT.end_id)[: request.sampling.max_tokens]
        logprobs = tuple(-(index + 1) / 8 for index in range(len(ids)))
        reason = "stop" if ids[-1] == CHAT.end_id else "length"
        done = Completion(request.request_id, ids, logprobs, ((len(self.completions), len(ids)),), reason)
        self.completions.append(done)
        return done


def session_of(
    policy: ScriptedPolicy, bounds: AgentBounds = BOUNDS, stale: Callable[[int], bool] = lambda _: False
) -> AgentSession:
    request = GenerationRequest("", "t0", 0, (), Sampling(16, stop_token_ids=(CHAT.end_id,)), "agent", group_id="g0")
    return AgentSession(CHAT, request, bounds, policy.generate, stale, StaleTrajectory)


def trajectory(session: AgentSession) -> Trajectory:
    turns = tuple(session.conversation.turns(1.0, True))
    return Trajectory("t0", "g0", "agent", Prompt("k", "agent", 0, ""), turns, 1.0, "v", 0, False)


@asynccontextmanager
async def served(
    session: AgentSession, body_bytes: int = 1 << 16
) -> AsyncIterator[tuple[AgentAccess, aiohttp.ClientSession]]:
    gateway = AgentGateway(body_bytes=body_bytes)
    async with gateway.open_session(session) as door, aiohttp.ClientSession() as client:
        yield door, client
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", int(door.url.split(":")[2].split("/")[0]))


async def post(
    door: AgentAccess, client: aiohttp.ClientSession, body: Any, path: str = "/chat/completions", key: str | None = None
) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {door.key if key is None else key}"}
    async with client.post(f"{door.url}{path}", json=body, headers=headers) as answer:
        return answer.status, await answer.json()


def with_server(
    policy: ScriptedPolicy,
    scenario: Callable[[AgentAccess, aiohttp.ClientSession], Coroutine[Any, Any, T]],
    bounds: AgentBounds = BOUNDS,
    stale: Callable[[int], bool] = lambda _: False,
    body_bytes: int = 1 << 16,
) -> tuple[T, AgentSession]:
    async def run() -> tuple[T, AgentSession]:
        session = session_of(policy, bounds, stale)
        async with served(session, body_bytes) as (door, client):
            return await scenario(door, client), session

    return asyncio.run(run())


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


# ------------------------------------------------------------------------------------------------ token in, token out


def test_a_conversation_over_http_is_one_context_of_exactly_the_generated_ids() -> None:
    policy = ScriptedPolicy("hello", "more", "enough")

    async def talk(door: AgentAccess, client: aiohttp.ClientSession) -> list[str]:
        messages: list[Any] = [{"role": "system", "content": "be short"}, user("hi")]
        heard = []
        for text in ("and?", "so?", ""):
            status, body = await post(door, client, {"model": "gpt-anything", "messages": messages})
            assert status == 200, body
            assert body["model"] == "gpt-anything"
            choice = body["choices"][0]
            assert choice["finish_reason"] == "stop"
            heard.append(choice["message"]["content"])
            messages += [choice["message"], user(text)]
        return heard

    heard, session = with_server(policy, talk)
    assert heard == ["hello", "more", "enough"]
    made = trajectory(session)
    assert [turn.action_ids for turn in made.turns] == [done.token_ids for done in policy.completions]
    assert [turn.logprobs for turn in made.turns] == [done.logprobs for done in policy.completions]
    assert made.versions == ((0, 6), (1, 5), (2, 7))
    assert len(made.contexts) == 1
    for before, after in zip(policy.requests, policy.requests[1:], strict=False):
        answer = policy.completions[policy.requests.index(before)].token_ids
        assert after.token_ids[: len(before.token_ids) + len(answer)] == (*before.token_ids, *answer)
    assert made.token_ids == (*policy.requests[-1].token_ids, *policy.completions[-1].token_ids)
    assert made.turns[-1].reward == 1.0


def test_an_official_client_streams_and_reads_errors() -> None:
    openai = pytest.importorskip("openai")
    policy = ScriptedPolicy("hello there", '<tool_call>{"name": "look", "arguments": {"at": 3}}</tool_call>', "seen")
    bounds = AgentBounds(12, 96, 4000)

    async def talk(door: AgentAccess, _: aiohttp.ClientSession) -> None:
        client = openai.AsyncOpenAI(base_url=door.url, api_key=door.key, max_retries=0)
        messages: list[Any] = [user("hi")]
        stream = await client.chat.completions.create(
            model="policy", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert (said, chunks[-1].usage.completion_tokens) == ("hello there", 12)
        messages += [{"role": "assistant", "content": said}, user("look at 3")]
        tools: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
        answer = await client.chat.completions.create(
            model="policy", messages=messages, tools=tools, logprobs=True, max_completion_tokens=96
        )
        call = answer.choices[0].message.tool_calls[0]
        assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"at": 3})
        assert answer.choices[0].finish_reason == "tool_calls"
        assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens
        messages += [answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "a cat"}]
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
        assert answer.choices[0].message.content == "seen"
        plain = await client.completions.create(model="policy", prompt="once", max_tokens=4, logprobs=0)
        assert len(plain.choices[0].logprobs.tokens) == len(plain.choices[0].logprobs.token_logprobs)
        assert [model.id async for model in client.models.list()] == ["policy"]
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="policy", messages=messages, temperature=3)
        assert refused.value.param == "temperature"
        with pytest.raises(openai.AuthenticationError):
            await openai.AsyncOpenAI(base_url=door.url, api_key="x", max_retries=0).models.list()
        await client.close()

    _, session = with_server(policy, talk, bounds)
    made = trajectory(session)
    # Tools came in at the second turn, so that the head of the prompt is another: a context of its own, as is the plain one.
    assert [part.turns[0].context and part.turns[0].context.reason for _, part in made.contexts] == [
        None,
        "edited",
        "edited",
    ]
    assert [len(part.turns) for _, part in made.contexts] == [1, 2, 1]


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["on", "on", "on", "again", "edit", "restart", "back"]), st.text("ab <>", max_size=6)),
    max_size=9,
)


STEPS = st.lists(st.tuples(st.sampled_from(["ask", "answer", "leave"]), st.integers(0, 9)), max_size=24)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_whoever_leaves_while_others_go_on_from_what_it_heard_the_turns_are_those_that_were_heard(
    steps: list[tuple[str, int]],
) -> None:
    """As by an agent that asks on before the answer before it has been told to its end, and hangs up on that."""
    conversation, heard, open_requests = Conversation(CHAT), list[Answer](), list[Opening]()
    for number, (what, which) in enumerate(steps):
        if what == "ask":
            past = heard[which % len(heard)] if heard and which else None
            said = () if past is None or past.said is None else (*past.opening.shown, past.said)
            open_requests.append(conversation.open_chat([*said, Message("user", f"{number}")], ""))
        elif what == "answer" and open_requests:
            opening = open_requests.pop(which % len(open_requests))
            ids = (*CHAT.encode(f"a{number}"), CHAT.end_id)
            done = Completion(f"r{number}", ids, (0.0,) * len(ids), ((number, len(ids)),), "stop")
            message = Message("assistant", f"a{number}")
            heard.append(conversation.add(opening, done, message, "", float(number), float(number)))
        elif what == "leave" and heard:
            conversation.withdraw([heard[which % len(heard)]])
        kept = conversation.answers
        assert sorted(turn.versions for turn in conversation.turns()) == sorted(a.completion.versions for a in kept)
        assert all(answer.opening.parent is None or answer.opening.parent in kept for answer in kept)


@settings(max_examples=80)
@given(OPERATIONS, st.lists(st.text("xyz ?", max_size=20), min_size=10, max_size=10))
def test_the_prefix_property_holds_whatever_an_agent_does_to_its_history(
    operations: list[tuple[str, str]], says: list[str]
) -> None:
    """Each context is what its last request showed and its answer; each generated token is trained once."""
    policy = ScriptedPolicy(*says)

    async def play() -> AgentSession:
        session = session_of(policy, AgentBounds(20, 16, 4000))
        history: list[dict[str, Any]] = [user("go")]
        for index, (what, text) in enumerate([("on", ""), *operations]):
            answered, _ = await session.answer(openai_protocol.chat_request(json.dumps({"messages": history})))
            body = openai_protocol.chat_body(
                openai_protocol.chat_request(json.dumps({"messages": history})).asked, answered, 0
            )
            heard = {"role": "assistant", "content": body["choices"][0]["message"]["content"]}
            match what:
                case "on":
                    history = [*history, heard, user(text)]
                case "again":
                    history = [*history, heard, user(text)] if index == 0 else history
                case "edit":
                    history = [*history, {"role": "assistant", "content": f"no {text}"}, user(text)]
                case "restart":
                    history = [user(f"anew {text}")]
                case "back":
                    history = history[:1]
        return session

    made = trajectory(asyncio.run(play()))
    by_answer = {(done.token_ids, done.logprobs, done.versions): done for done in policy.completions}
    assert sorted((turn.versions, turn.action_ids, turn.logprobs) for turn in made.turns) == sorted(
        (done.versions, done.token_ids, done.logprobs) for done in policy.completions
    )
    shown = {(*r.token_ids, *d.token_ids) for r, d in zip(policy.requests, policy.completions, strict=True)}
    for _, part in made.contexts:
        ids = part.token_ids
        assert ids in shown, "a context is what one request showed and what was answered"
        assert len(ids) == len(part.loss_mask) == len(part.logprobs)
        past = 0
        for turn in part.turns:  # every turn's prompt is the prompt and answer before it, and something new
            past += len(turn.context.token_ids) if turn.context is not None else 0
            past += len(turn.observation_ids) + len(turn.action_ids)
            assert ids[:past] in shown
            assert ids[past - len(turn.action_ids) : past] == turn.action_ids
            assert (turn.action_ids, turn.logprobs, turn.versions) in by_answer
    assert sum(map(sum, (part.loss_mask for _, part in made.contexts))) == sum(
        len(done.token_ids) for done in policy.completions
    )
    assert made.first_version == 0, "the oldest weights are measured from, whatever came back first"


def test_two_that_go_on_from_one_answer_share_its_ids_and_it_is_trained_once() -> None:
    policy = ScriptedPolicy("root", "left", "right")

    async def fork() -> AgentSession:
        session = session_of(policy)
        first = [user("go")]
        await session.answer(openai_protocol.chat_request(json.dumps({"messages": first})))
        said = {"role": "assistant", "content": "root"}
        both = [
            session.answer(openai_protocol.chat_request(json.dumps({"messages": [*first, said, user(t)]})))
            for t in ("l", "r")
        ]
        await asyncio.gather(*both)
        return session

    made = trajectory(asyncio.run(fork()))
    (_, straight), (_, branch) = made.contexts
    root = (*policy.requests[0].token_ids, *policy.completions[0].token_ids)
    assert straight.token_ids[: len(root)] == branch.token_ids[: len(root)] == root
    start = branch.turns[0].context
    assert start is not None
    assert (start.reason, start.token_ids) == ("branched", root)
    assert branch.loss_mask[: len(root)] == (0,) * len(root)


def test_the_context_with_the_oldest_weights_comes_first_whatever_came_back_first() -> None:
    conversation = Conversation(CHAT)
    for text, version in (("new", 3), ("old", 2), ("newer", 4)):
        opening = conversation.open_chat([Message("user", text)], "")
        ids = (*CHAT.encode(text), CHAT.end_id)
        done = Completion("r", ids, (0.0,) * len(ids), ((version, len(ids)),), "stop")
        conversation.add(opening, done, Message("assistant", text), "", 0.0, 0.0)
    turns = conversation.turns(0.5, True)
    assert [turn.versions[0][0] for turn in turns] == [2, 3, 4]
    assert [turn.context and turn.context.reason for turn in turns] == [None, "edited", "edited"]
    assert [turn.reward for turn in turns] == [0.0, 0.0, 0.5]


def test_several_choices_are_branches_of_one_prompt() -> None:
    policy = ScriptedPolicy("one", "two", "three")

    async def talk(door: AgentAccess, client: aiohttp.ClientSession) -> Any:
        return await post(door, client, {"messages": [user("go")], "n": 3})

    (status, body), session = with_server(policy, talk)
    assert status == 200
    assert [choice["message"]["content"] for choice in body["choices"]] == ["one", "two", "three"]
    assert len(trajectory(session).contexts) == 3
    assert len({request.token_ids for request in policy.requests}) == 1
    assert len({request.request_id for request in policy.requests}) == 3


def test_a_stop_text_ends_the_answer_where_openai_ends_it_and_nothing_behind_it_is_kept() -> None:
    policy = ScriptedPolicy("yes END and so on")

    async def talk(door: AgentAccess, client: aiohttp.ClientSession) -> Any:
        return await post(door, client, {"messages": [user("go")], "stop": ["END"]})

    (_, body), session = with_server(policy, talk)
    assert body["choices"][0]["message"]["content"] == "yes "
    assert body["choices"][0]["finish_reason"] == "stop"
    made = trajectory(session)
    assert made.turns[0].action_ids == policy.completions[0].token_ids[:7]
    assert made.turns[0].versions == ((0, 7),)


def test_plain_completions_go_on_from_text_and_from_ids() -> None:
    policy = ScriptedPolicy("b", "c", "e")

    async def talk(door: AgentAccess, client: aiohttp.ClientSession) -> None:
        _, first = await post(door, client, {"prompt": "a"}, "/completions")
        await post(door, client, {"prompt": f"a{first['choices'][0]['text']} more"}, "/completions")
        ids = [*policy.requests[-1].token_ids, *policy.completions[-1].token_ids, *CHAT.encode("!")]
        status, _ = await post(door, client, {"prompt": ids}, "/completions")
        assert status == 200

    _, session = with_server(policy, talk)
    assert len(trajectory(session).contexts) == 1


def test_an_answer_that_comes_back_with_its_authors_name_is_the_one_that_was_given() -> None:
    policy = ScriptedPolicy("hello", "more")

    async def talk(door: AgentAccess, client: aiohttp.ClientSession) -> None:
        messages: list[Any] = [user("hi")]
        for text in ("and?", ""):
            _, body = await post(door, client, {"messages": messages})
            messages += [{**body["choices"][0]["message"], "name": "supervisor"}, user(text)]

    _, session = with_server(policy, talk)
    assert len(trajectory(session).contexts) == 1


# --------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "messages"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages.0.content.0.type"),
        ({"messages": [user("x")], "top_k": 3}, 400, "top_k"),
        ({"messages": [user("x")], "logit_bias": {"1": 2}}, 400, "logit_bias"),
        ({"messages": [user("x")], "response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"messages": [user("x")], "tool_choice": "required"}, 400, "tool_choice"),
        ({"messages": [user("x")], "n": 17}, 400, "n"),
        ({"messages": [user("x")], "max_tokens": 0}, 400, "max_tokens"),
        ({"messages": [user("x")], "stream": "yes"}, 400, "stream"),
        ({"messages": [user("x")], "stop": ["a", "b", "c", "d", "e"]}, 400, "stop"),
        ([], 400, None),
    ],
)
def test_what_would_change_the_answer_and_is_not_served_is_refused_by_name(
    body: Any, status: int, param: str | None
) -> None:
    async def talk(door: AgentAccess, client: aiohttp.ClientSession) -> Any:
        return await post(door, client, body)

    (found, error), session = with_server(ScriptedPolicy(), talk)
    assert found == status, error
    assert set(error["error"]) == {"message", "type", "param", "code"}
    assert param is None or error["error"]["param"] == param
    assert session.conversation.answers == []


def test_what_is_wrong_within_a_field_of_several_forms_is_said_and_so_is_what_there_is() -> None:
    async def talk(door: AgentAccess, client: aiohttp.ClientSession) -> list[str]:
        image = {"type": "image_url", "image_url": {"url": "data:,"}}
        bodies = [{"messages": [{"role": "user", "content": [image]}]}, {"messages": [user("x")], "stop": [*"abcde"]}]
        told = [(await post(door, client, body))[1] for body in bodies]
        status, elsewhere = await post(door, client, {}, path="/responses")
        assert status == 404
        return [body["error"]["message"] for body in (*told, elsewhere)]

    (image, stop, elsewhere), _ = with_server(ScriptedPolicy(), talk)
    assert image == "messages.0.content.0.type: Input should be 'text'"
    assert stop == "stop: List should have at most 4 items after validation, not 5"
    assert elsewhere.startswith("POST /v1/responses: Not Found; there are /v1/chat/completions")


def test_what_changes_nothing_is_taken() -> None:
    neutral = {"frequency_penalty": 0, "top_logprobs": None, "user": "me", "seed": 4, "metadata": {}, "logit_bias": {}}

    async def talk(door: AgentAccess, client: aiohttp.ClientSession) -> Any:
        return await post(door, client, {"messages": [user("x")], **neutral, "response_format": {"type": "text"}})

    policy = ScriptedPolicy()
    (status, body), _ = with_server(policy, talk)
    assert status == 200, body
    assert policy.requests[0].sampling.seed is None, "one seed would make all members of a group say the same"


def test_a_key_that_is_none_opens_nothing_and_no_body_is_read() -> None:
    async def talk(door: AgentAccess, client: aiohttp.ClientSession) -> None:
        for key in ("", "x", "rl-1-", f"{door.key}x", door.key[:-1], "rl-2-" + door.key[5:], door.key.upper()):
            status, body = await post(door, client, {"messages": "x" * (1 << 20)}, key=key)
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        async with client.get(f"{door.url}/models") as answer:
            assert answer.status == 401
        root = door.url.removesuffix("/v1")
        async with client.get(f"{root}/k/{door.key}/v1/models") as answer:  # for programs that take a URL only
            assert answer.status == 200
        async with client.get(f"{root}/k/{door.key}x/v1/models") as answer:
            assert answer.status == 401
        async with client.get(f"{root}/nothing") as answer:
            assert (answer.status, (await answer.json())["error"]["type"]) == (404, "invalid_request_error")

    policy = ScriptedPolicy()
    with_server(policy, talk)
    assert policy.requests == []


def test_a_body_over_the_limit_is_refused_announced_or_not() -> None:
    async def talk(door: AgentAccess, client: aiohttp.ClientSession) -> None:
        status, body = await post(door, client, {"messages": [user("x" * (1 << 17))]})
        assert (status, body["error"]["code"]) == (413, "body_too_large")

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(20):
                yield b" " * 8192

        headers = {"Authorization": f"Bearer {door.key}"}
        async with client.post(f"{door.url}/chat/completions", data=pieces(), headers=headers) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (413, "body_too_large")
        status, body = await post(door, client, {"messages": [user("x")]})
        assert status == 200

    with_server(ScriptedPolicy(), talk)


def test_a_client_that_goes_away_aborts_what_it_asked_for_and_leaves_no_turn() -> None:
    async def run() -> tuple[ScriptedPolicy, AgentSession]:
        policy = ScriptedPolicy("late", "in time", wait=asyncio.Event())
        session = session_of(policy)
        assert policy.wait is not None
        async with served(session) as (door, client):
            asked = asyncio.create_task(post(door, client, {"messages": [user("x")], "n": 2}))
            while len(policy.requests) < 2:
                await asyncio.sleep(0.01)
            asked.cancel()
            async with asyncio.timeout(5):
                while policy.aborted < 2:
                    await asyncio.sleep(0.01)
            policy.wait.set()
            status, _ = await post(door, client, {"messages": [user("x")]})
            assert status == 200
        return policy, session

    policy, session = asyncio.run(run())
    assert policy.aborted == 2
    assert [turn.action_ids for turn in trajectory(session).turns] == [policy.completions[0].token_ids]


def test_limits_of_turns_and_context_are_errors_that_no_client_retries() -> None:
    async def talk(door: AgentAccess, client: aiohttp.ClientSession) -> None:
        status, body = await post(door, client, {"messages": [user("x" * 200)]})
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        for _ in range(2):
            status, _ = await post(door, client, {"messages": [user("x")]})
            assert status == 200
        status, body = await post(door, client, {"messages": [user("x")]})
        assert (status, body["error"]["code"]) == (403, "turn_limit_reached")

    _, session = with_server(ScriptedPolicy(), talk, AgentBounds(2, 8, 100))
    assert session.truncated


def test_requests_at_once_have_no_more_turns_than_one_after_the_other() -> None:
    async def talk(door: AgentAccess, client: aiohttp.ClientSession) -> list[tuple[int, Any]]:
        asking = [asyncio.ensure_future(post(door, client, {"messages": [user("x")], "n": 2})) for _ in range(3)]
        while len(policy.requests) < 4:
            await asyncio.sleep(0.01)
        gate.set()
        return list(await asyncio.gather(*asking))

    gate = asyncio.Event()
    policy = ScriptedPolicy(wait=gate)
    found, session = with_server(policy, talk, AgentBounds(5, 8, 100))
    refused = [body["error"] for status, body in found if status == 403]
    assert [error["code"] for error in refused] == ["turn_limit_reached"]
    assert refused[0]["message"] == "this trajectory has 0 answers and waits for 4: at most 5"
    assert (len(session.conversation.answers), session.pending) == (4, 0)


def test_memory_grows_with_what_is_new_in_each_turn() -> None:
    def held(turns: int) -> int:
        async def run() -> int:
            done = Completion("r", (*CHAT.encode("y" * 100), CHAT.end_id), (0.0,) * 101, ((0, 101),), "stop")

            async def generate(request: GenerationRequest, turns: Sequence[Turn]) -> Completion:
                return replace(done, request_id=request.request_id)

            request = GenerationRequest("", "t0", 0, (), Sampling(200), "agent", group_id="g0")
            bounds = AgentBounds(turns, 200, 1 << 20)
            session = AgentSession(CHAT, request, bounds, generate, lambda _: False, StaleTrajectory)
            messages: list[Any] = []
            tracemalloc.start()
            for number in range(turns):
                messages.append(user(f"{number:0200}"))
                wanted = openai_protocol.chat_request(json.dumps({"messages": messages}))
                answered, _ = await session.answer(wanted)
                messages.append({"role": "assistant", "content": answered.choices[0].said.content})
            assert len(session.conversation.answers[-1].token_ids()) > 300 * turns
            return tracemalloc.get_traced_memory()[0]

        try:
            return asyncio.run(run())
        finally:
            tracemalloc.stop()

    few, many = held(20), held(80)
    assert many < 6 * few, f"{few} bytes of 20 turns, {many} of 80"


def test_a_trajectory_that_gets_too_stale_ends_at_its_next_request() -> None:
    policy = ScriptedPolicy()

    async def talk(door: AgentAccess, client: aiohttp.ClientSession) -> Any:
        await post(door, client, {"messages": [user("x")]})
        return await post(door, client, {"messages": [user("x")]})

    (status, body), session = with_server(policy, talk, stale=lambda first: first == 0)
    assert (status, body["error"]["code"]) == (403, "trajectory_over")
    assert isinstance(session.broken.exception(), StaleTrajectory)
    assert len(policy.requests) == 1


def test_an_engine_that_fails_ends_the_trajectory_with_the_cause() -> None:
    class Failing(ScriptedPolicy):
        async def generate(self, request: GenerationRequest, turns: Sequence[Turn] = ()) -> Completion:
            return Completion(request.request_id, (), (), (), "error", error="CUDA out of memory")

    async def talk(door: AgentAccess, client: aiohttp.ClientSession) -> Any:
        return await post(door, client, {"messages": [user("x")]})

    (status, _), session = with_server(Failing(), talk)
    assert status == 403
    assert "engine_out_of_memory" in str(session.broken.exception())


def test_an_answer_that_takes_too_long_is_a_timeout_in_their_form() -> None:
    async def run() -> tuple[int, Any]:
        policy = ScriptedPolicy(wait=asyncio.Event())
        async with served(session_of(policy, AgentBounds(4, 8, 100, seconds=0.1))) as (door, client):
            return await post(door, client, {"messages": [user("x")]})

    status, body = asyncio.run(run())
    assert (status, body["error"]["code"]) == (504, "timeout")


def test_who_hangs_up_at_the_last_line_of_a_stream_has_heard_the_answer() -> None:
    """As the official client does, while answers of other agents are written."""

    async def run() -> tuple[bytes, AgentSession]:
        session, gateway, heard = session_of(ScriptedPolicy("hello")), AgentGateway(), b""

        async def others() -> None:
            while True:
                async with gateway._writing:
                    await asyncio.sleep(0.05)

        async with gateway.open_session(session) as door:
            writing = asyncio.ensure_future(others())
            reader, writer = await asyncio.open_connection("127.0.0.1", int(door.url.split(":")[2].split("/")[0]))
            body = json.dumps({"messages": [user("hi")], "stream": True})
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {door.key}\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            while b"[DONE]" not in heard:
                heard += await reader.read(1 << 16)
            writer.close()
            while door.handlers:
                await asyncio.sleep(0.01)
            writing.cancel()
        return heard, session

    heard, session = asyncio.run(run())
    assert b"hello" in heard
    assert [CHAT.text(turn.action_ids) for turn in session.conversation.turns()] == ["hello"]


def test_an_answer_that_cannot_be_told_to_its_end_is_no_turn_and_no_fault_of_ours(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def lost(self: Any, data: bytes = b"") -> None:
        raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")

    async def talk(door: AgentAccess, client: aiohttp.ClientSession) -> None:
        with pytest.raises(aiohttp.ClientError):
            await post(door, client, {"messages": [user("hi")]})

    monkeypatch.setattr(aiohttp.web.StreamResponse, "write_eof", lost)
    _, session = with_server(ScriptedPolicy("hello"), talk)
    assert session.conversation.answers == []
    assert [record for record in caplog.records if record.name.startswith("aiohttp")] == []


def test_temperature_is_the_runs_unless_the_task_leaves_it_to_the_agent() -> None:
    async def talk(door: AgentAccess, client: aiohttp.ClientSession) -> None:
        await post(door, client, {"messages": [user("x")], "temperature": 0.25, "top_p": 0.5, "max_tokens": 3})

    for own, expected in ((False, (1.0, 1.0)), (True, (0.25, 0.5))):
        policy = ScriptedPolicy()
        with_server(policy, talk, AgentBounds(4, 8, 100, own_sampling=own))
        sampling = policy.requests[0].sampling
        assert ((sampling.temperature, sampling.top_p), sampling.max_tokens) == (expected, 3)


# ------------------------------------------------------------------------------------------------------ chat templates


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("tokenizers")
    pytest.importorskip("transformers")
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_a_models_own_template_never_tokenizes_an_answer_again(tokenizer_folder: Path) -> None:
    chat = ModelChat(str(tokenizer_folder))
    chance = random.Random(1)
    for _ in range(60):
        conversation, messages = Conversation(chat), [Message("user", "the cat")]
        previous: tuple[int, ...] = ()
        for turn in range(3):
            opening = conversation.open_chat(messages, "")
            assert opening.token_ids()[: len(previous)] == previous
            # Any ids, not those that the tokenizer would choose; now and then cut off, with reasoning, or not UTF-8.
            ids = [chance.randrange(3, len(chat.vocabulary)) for _ in range(chance.randrange(1, 9))]
            ids += chat.encode("</think>") if chance.random() < 0.5 else ()
            ended = chance.random() < 0.7
            ids += [chat.end_id] if ended else []
            done = Completion("r", tuple(ids), (0.0,) * len(ids), ((0, len(ids)),), "stop" if ended else "length")
            said = Message("assistant", chat.text(ids))
            previous = conversation.add(opening, done, said, "", 0.0, 0.0).token_ids()
            messages = [*messages, said, Message("user", f"and then {turn}")]
        last = conversation.open_chat(messages, "").token_ids()
        assert last[: len(previous)] == previous
        behind = last[len(previous) :]
        close = () if done.token_ids[-1] == chat.end_id else (chat.end_id,)
        assert behind == (*close, *chat.encode("\n<|im_start|>user\nand then 2<|im_end|>\n<|im_start|>assistant\n"))


def test_a_developers_message_is_a_system_message_to_a_template_that_knows_no_developer(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    pytest.importorskip("transformers")
    folder = write_tokenizer(tmp_path)
    template = folder / "chat_template.jinja"
    drops = "{% for message in messages if message.role in ('system', 'user', 'assistant', 'tool') %}"  # as Qwen3's
    template.write_text(template.read_text().replace("{% for message in messages %}", drops))
    chat = ModelChat(str(folder))
    told, known = ([Message(role, "be kind"), Message("user", "hi")] for role in ("developer", "system"))
    assert chat.encode_conversation(told, "") == chat.encode_conversation(known, "")
    assert "be kind" in chat.text(chat.encode_conversation(told, ""))


def test_a_models_own_template_serves_several_requests_of_one_agent_at_once(tokenizer_folder: Path) -> None:
    chat = ModelChat(str(tokenizer_folder))

    async def run() -> list[str]:
        policy = ScriptedPolicy()
        session = session_of(policy)
        session.chat_format = session.conversation._chat = chat
        wanted = [
            openai_protocol.chat_request(json.dumps({"messages": [user(f"the cat {n} " * 200)]})) for n in range(12)
        ]
        answers = await asyncio.gather(*(session.answer(each) for each in wanted))
        shown = {request.token_ids for request in policy.requests}
        assert shown == {chat.encode_conversation(each.messages, "") for each in wanted}
        return [answered.choices[0].reason for answered, _ in answers]

    assert asyncio.run(run()) == ["stop"] * 12


@pytest.mark.parametrize("path", ["chat", "plain"])
def test_a_long_text_that_is_tokenized_holds_up_neither_the_loop_nor_short_ones(
    path: str, tokenizer_folder: Path
) -> None:
    chat, begun, loop_went_on = ModelChat(str(tokenizer_folder)), threading.Event(), threading.Event()
    right, seen = type(chat._tokenizer).encode, list[bool]()

    def encode(self: Any, text: str, **options: Any) -> Any:
        if "long" in text:
            begun.set()
            seen.append(loop_went_on.wait(10))
        return right(self, text, **options)

    async def run() -> None:
        policy = ScriptedPolicy()
        session = session_of(policy)
        session.chat_format = session.conversation._chat = chat
        if path == "plain":
            wanted: Any = openai_protocol.plain_request(json.dumps({"prompt": "the long cat"}))
        else:
            wanted = openai_protocol.chat_request(json.dumps({"messages": [user("the long cat")]}))
        asked = [asyncio.ensure_future(session.answer(wanted)) for _ in range(2)]
        while not begun.is_set():
            await asyncio.sleep(0.01)
        assert chat.text(chat.encode("the cat")) == "the cat"
        asked.pop().cancel()  # gone: what it began is waited for all the same
        loop_went_on.set()
        await asyncio.gather(*asked)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(chat._tokenizer), "encode", encode)
        asyncio.run(run())
    assert all(seen)


@pytest.mark.parametrize("body", [{"messages": [user("go")]}, {"prompt": "go"}], ids=["chat", "plain"])
@pytest.mark.parametrize("more", [{"logprobs": 0}, {"logprobs": 0, "stream": True}, {"stop": ["END"]}], ids=str)
def test_long_answers_are_cut_and_written_a_part_at_a_time(body: dict[str, Any], more: dict[str, Any]) -> None:
    """Counted: how many tokens are made text while the loop serves nobody else."""
    long, n, counts, ended = 6000, 3, [0], asyncio.Event()

    class Counting(VocabularyChat):
        def text(self, token_ids: Sequence[int]) -> str:
            counts[-1] += len(token_ids)
            return super().text(token_ids)

    async def others() -> None:
        while not ended.is_set():
            counts.append(0)
            await asyncio.sleep(0)

    async def talk() -> tuple[int, str]:
        session = session_of(ScriptedPolicy(*["a" * (long - 4) + "END"] * n), AgentBounds(12, long, 4 * long))
        session.chat_format = Counting()
        said = {"logprobs": True} if "messages" in body and "logprobs" in more else {}
        async with served(session) as (door, client):
            other = asyncio.create_task(others())
            path = "/chat/completions" if "messages" in body else "/completions"
            headers = {"Authorization": f"Bearer {door.key}"}
            wanted = {**body, **more, **said, "n": n}
            async with client.post(f"{door.url}{path}", json=wanted, headers=headers) as answer:
                found = answer.status, await answer.text()
            ended.set()
            await other
        return found

    status, text = asyncio.run(talk())
    assert status == 200, text
    assert max(counts) <= (long + 2048 if "logprobs" in more else 15 * long), "one answer, or one part of one"
    parts = [part for part in text.split("data: ")[1:] if "[DONE]" not in part] if "stream" in more else [text]
    choices = [choice for part in parts for choice in json.loads(part)["choices"]]
    if "logprobs" not in more:
        assert [len(choice.get("text") or choice["message"]["content"]) for choice in choices] == [long - 4] * n
        return
    told = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    assert [len(each.get("content") or each["tokens"]) for each in told] == [long] * n
    for each in told:
        if "content" in each:
            assert [row["logprob"] for row in each["content"]] == [-(index + 1) / 8 for index in range(long)]
            assert [row["token"] for row in each["content"]][-4:] == ["E", "N", "D", ""]
        else:
            assert each["token_logprobs"] == [-(index + 1) / 8 for index in range(long)]
            assert each["text_offset"] == [*range(long)]


def test_a_prompt_without_tokens_reaches_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VocabularyChat, "encode_prompt", lambda self, text: ())
    policy = ScriptedPolicy()

    async def talk(door: AgentAccess, client: aiohttp.ClientSession) -> None:
        status, told = await post(door, client, {"prompt": "\x00"}, "/completions")
        assert (status, told["error"]["param"]) == (400, "prompt")

    with_server(policy, talk)
    assert policy.requests == []


def test_an_agent_with_many_long_texts_keeps_another_waiting_for_one(tokenizer_folder: Path) -> None:
    chat, seen = ModelChat(str(tokenizer_folder)), list[str]()
    right = type(chat._tokenizer).encode

    def encode(self: Any, text: str, **options: Any) -> Any:
        seen.append(text)
        return right(self, text, **options)

    async def run() -> None:
        sessions = [session_of(ScriptedPolicy()) for _ in range(2)]
        for session in sessions:
            session.chat_format = session.conversation._chat = chat
        many, one = (openai_protocol.plain_request(json.dumps({"prompt": text})) for text in ("the cat", "on the mat"))
        asked = [asyncio.ensure_future(sessions[0].answer(many)) for _ in range(8)]
        await asyncio.sleep(0)
        await asyncio.gather(*asked, sessions[1].answer(one))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(chat._tokenizer), "encode", encode)
        asyncio.run(run())
    assert seen.index("on the mat") <= 2
    assert len(seen) == 9


@pytest.mark.parametrize("body", [{"messages": [user("x" * 9000)]}, {"prompt": "x" * 9000}], ids=["chat", "plain"])
def test_what_is_longer_than_the_context_in_characters_is_not_tokenized(
    body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def talk(door: AgentAccess, client: aiohttp.ClientSession) -> None:
        monkeypatch.setattr(VocabularyChat, "encode", None)
        status, told = await post(door, client, body, "/chat/completions" if "messages" in body else "/completions")
        assert (status, told["error"]["code"]) == (400, "context_length_exceeded")

    _, session = with_server(ScriptedPolicy(), talk)
    assert session.truncated


def test_where_the_answer_is_what_the_tokenizer_would_write_the_prompt_is_the_templates_own(
    tokenizer_folder: Path,
) -> None:
    chat = ModelChat(str(tokenizer_folder))
    conversation, messages = Conversation(chat), [Message("user", "the cat")]
    tools = '[{"function":{"name":"look"},"type":"function"}]'
    for text in ("sat there", "on the mat"):
        opening = conversation.open_chat(messages, tools)
        assert opening.token_ids() == chat.encode_conversation(messages, tools)
        ids = (*chat.encode(text), chat.end_id)
        said = Message("assistant", text)
        conversation.add(opening, Completion("r", ids, (0.0,) * len(ids), ((0, len(ids)),), "stop"), said, "", 0, 0)
        messages = [*messages, said, Message("user", "and?")]
    assert conversation.open_chat(messages, tools).token_ids() == chat.encode_conversation(messages, tools)


def test_a_folder_without_a_tokenizer_or_a_template_is_one_error(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match=r"task\.agent\.tokenizer"):
            ModelChat(str(folder))


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{</tool_call>",
        '<tool_call>{"name": 3}</tool_call>',
        "<tool_call>[]</tool_call>",
        '<tool_call>{"name": "a"}</tool_call><tool_call>{"name": "b", "argum',
    ],
)
def test_a_call_that_is_malformed_or_cut_off_is_text(text: str) -> None:
    assert calls_in(text, "c") == (text, [])


def test_without_tools_what_looks_like_a_call_is_text() -> None:
    call = '<tool_call>{"name": "look"}</tool_call>'
    tools = [{"type": "function", "function": {"name": "look"}}]

    async def talk(door: AgentAccess, client: aiohttp.ClientSession) -> list[Any]:
        asked = {"messages": [user("x")]}
        bodies = [asked, {**asked, "tools": tools, "tool_choice": "none"}, {**asked, "tools": tools}]
        chats = [(await post(door, client, body))[1]["choices"][0] for body in bodies]
        _, plain = await post(door, client, {"prompt": "x"}, path="/completions")
        return [*chats, plain["choices"][0]]

    (bare, none, named, plain), _ = with_server(ScriptedPolicy(*[call] * 4), talk, AgentBounds(9, 96, 4000))
    assert [(one["message"]["content"], one["finish_reason"]) for one in (bare, none)] == [(call, "stop")] * 2
    assert (named["message"]["content"], named["finish_reason"]) == (None, "tool_calls")
    assert (plain["text"], plain["finish_reason"]) == (call, "stop")


def test_who_wants_one_call_at_a_time_is_given_the_first_and_nothing_behind_it_is_trained() -> None:
    calls = [f'<tool_call>{{"name": "{name}"}}</tool_call>' for name in ("look", "go")]
    tools = [{"type": "function", "function": {"name": name}} for name in ("look", "go")]

    async def talk(door: AgentAccess, client: aiohttp.ClientSession) -> list[Any]:
        asked = {"messages": [user("x")], "tools": tools}
        bodies = [{**asked, "parallel_tool_calls": wanted} for wanted in (True, False)]
        return [(await post(door, client, body))[1]["choices"][0] for body in bodies]

    policy = ScriptedPolicy(*["".join(calls)] * 2)
    (both, one), session = with_server(policy, talk, AgentBounds(9, 96, 4000))
    assert [call["function"]["name"] for call in both["message"]["tool_calls"]] == ["look", "go"]
    assert [call["function"]["name"] for call in one["message"]["tool_calls"]] == ["look"]
    assert one["finish_reason"] == "tool_calls"
    assert session.conversation.answers[1].completion.token_ids == CHAT.encode(calls[0])
