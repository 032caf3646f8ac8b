"""What models, agents and judges write, and who calls us: read, or refused with the one documented error."""

from __future__ import annotations

import ipaddress
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st

from orchestrator.agents import openai_protocol
from orchestrator.agents.agent_program import AgentProgram, reward_of
from orchestrator.agents.agent_session import calls_in
from orchestrator.agents.chat_template import ChatFormat, ModelChat, TemplateRefused, VocabularyChat
from orchestrator.agents.conversation import Conversation
from orchestrator.agents.openai_protocol import Answered, ApiError, Choice
from orchestrator.api import TrajectoryError, bearer, jsontext
from orchestrator.api.http import INSTANCE_HEADER, LEASE_HEADER, PROTOCOL_HEADER
from orchestrator.rewards.function_client import FunctionClient
from orchestrator.sandbox import SandboxLimits, SandboxOutcome
from orchestrator.tasks.calculator import answers
from orchestrator.tasks.coding import is_handed_in
from orchestrator.tasks.household import House
from orchestrator.tasks.repository import RepositoryGame
from orchestrator.tasks.sums import Sum
from orchestrator.tasks.vocabulary import CHARACTERS, printable
from tests.fuzz import inputs
from tests.fuzz.harness import Check, Drawn, harness, merged
from tests.support.tiny_tokenizer import write_tokenizer

CALLED = {"id": "c-0", "type": "function", "function": {"name": "go", "arguments": '{"to": [1, "x"]}'}}
CHAT = {
    "model": "policy", "max_tokens": 5, "temperature": 0.5, "top_p": 1, "n": 2, "stop": ["x"], "stream": True,
    "stream_options": {"include_usage": True}, "logprobs": True, "user": "me", "frequency_penalty": 0,
    "tools": [{"type": "function", "function": {"name": "go", "parameters": {"type": "object"}}}], "tool_choice": "auto",
    "messages": [
        {"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALLED]},
        {"role": "tool", "tool_call_id": "c-0", "name": "go", "content": "done"},
    ],
}  # fmt: skip
SAID = openai_protocol.answer_message("x", [("c-0", "go", "{}")])
PLAIN = {"model": "policy", "prompt": "hello", "max_tokens": 3, "logprobs": 0, "echo": False, "best_of": 1, "stop": "y"}


def _chat_body(chat: ChatFormat) -> tuple[st.SearchStrategy[Any], Check]:
    def check(data: bytes) -> None:
        with inputs.bounded():
            asked = inputs.documented(lambda: openai_protocol.chat_request(data), ApiError)
            if asked is None:
                return
            opening = inputs.documented(
                lambda: Conversation(chat).open_chat(asked.messages, asked.tools), TemplateRefused
            )
        assert opening is None or all(0 <= token < len(chat.vocabulary) for token in opening.token_ids())
        answered = Answered("a", 1, 1, (Choice("x", SAID, (chat.end_id,), (-0.5,), "stop"),), chat.text)
        for told in (openai_protocol.chat_body, openai_protocol.chat_chunks):
            json.loads("".join(jsontext.pieces(told(asked.asked, answered, 0))).encode())

    return inputs.texts(CHAT), check


def _plain_body(data: bytes) -> None:
    with inputs.bounded():
        asked = inputs.documented(lambda: openai_protocol.plain_request(data), ApiError)
        if asked is not None and isinstance(asked.prompt, str):
            Conversation(VocabularyChat()).open_plain(asked.prompt)


@harness("orchestrator/agents/openai_protocol.py", "orchestrator/agents/chat_template.py", refuses="ApiError 400")
def openai_body(folder: Path) -> Drawn:
    """A body of an agent is messages that its chat template takes, or refused with status 400; an answer to it can be sent."""
    yield merged({"chat": _chat_body(VocabularyChat()), "plain": (inputs.texts(PLAIN), _plain_body)})


@harness("orchestrator/agents/openai_protocol.py", "orchestrator/agents/chat_template.py", refuses="TemplateRefused")
def chat_template(folder: Path) -> Drawn:
    """The same with a model's own tokenizer and template: token ids of its vocabulary, or refused."""
    yield _chat_body(ModelChat(str(write_tokenizer(folder / "model"))))


@harness("orchestrator/agents/agent_session.py", "orchestrator/agents/openai_protocol.py", refuses="no calls")
def tool_calls(folder: Path) -> Drawn:
    """Calls of tools in what a policy wrote can be sent back by the agent that was told of them; else it has none."""
    call = json.dumps({"name": "go", "arguments": {"to": [1, "x"], "why": None}})
    text = f"first\n<tool_call>\n{call}\n</tool_call>\n<tool_call>{call}</tool_call>"
    pieces = st.sampled_from(("<tool_call>", "</tool_call>", call, "{", "}", '"', "\\ud800", "\n", "NaN", "[" * 70))

    def check(data: bytes) -> None:
        said = data.decode("utf-8", "replace")
        with inputs.bounded():
            content, calls = calls_in(said, "c")
        assert content == said or (calls and said.startswith(content))
        answer = openai_protocol.answer_message(content, calls)
        told = openai_protocol.chat_body(
            openai_protocol.chat_request(json.dumps({"messages": [{"role": "user", "content": ""}]})).asked,
            Answered("a", 1, 1, (Choice(said, answer, (), (), "stop"),), str),
            0,
        )["choices"][0]["message"]
        back = openai_protocol.chat_request(json.dumps({"messages": [told]})).messages[0]
        assert (back.content, back.extra) == (answer.content, answer.extra)

    yield (
        st.one_of(
            inputs.damaged(text.encode()), st.lists(pieces, max_size=8).map("".join).map(str.encode), inputs.texts(text)
        ),
        check,
    )


@harness("orchestrator/api/jsontext.py", refuses="ValueError")
def json_text(folder: Path) -> Drawn:
    """JSON is at most 64 levels deep, finite where that was asked, and written as UTF-8, in pieces too; or refused."""

    def depth(value: Any) -> int:
        found = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else None
        return 0 if found is None else 1 + max(map(depth, found), default=0)

    def check(drawn: tuple[bool, bytes]) -> None:
        finite, data = drawn
        with inputs.bounded():
            try:
                value = jsontext.parse(data, finite=finite)
            except ValueError:
                return
        assert depth(value) <= jsontext.DEPTH
        assert "".join(jsontext.pieces(value)) == json.dumps(value)
        json.dumps(value, ensure_ascii=False).encode()
        if finite:
            assert "NaN" not in data.decode("utf-8", "replace") or b'"' in data

    tree = {"a": [1, 2.5, None, {"b": "x", "c": [[], {}]}], "d": True, "numbers": list(range(50))}
    deep = st.integers(60, 70).map(lambda n: b"[" * n + b"1" + b"]" * n)
    yield st.tuples(st.booleans(), st.one_of(inputs.texts(tree), deep)), check


@harness("orchestrator/agents/agent_program.py", refuses="TrajectoryError")
def agent_reward(folder: Path) -> Drawn:
    """What an agent printed last is a finite reward, or ends its trajectory."""
    programs = {kind: AgentProgram(("x",), {}, (), SandboxLimits(), {}, reward=kind) for kind in ("output", "exit")}

    def check(drawn: tuple[str, int, bytes]) -> None:
        kind, code, data = drawn
        outcome = SandboxOutcome(code, "", data, data, 0.0)
        found = inputs.survives(lambda: reward_of(programs[kind], outcome), TrajectoryError)
        assert found is None or (type(found) is float and math.isfinite(found))

    numbers = ("0.5", "-1e3", "1e999", "nan", "-inf", "1_0", "\u0665", "0x1p3", "", "9" * 5000, "1 2")
    lines = st.lists(st.sampled_from(numbers), max_size=3).map(lambda found: "\n".join(found).encode())
    yield (
        st.tuples(st.sampled_from(sorted(programs)), st.integers(-1, 2), st.one_of(lines, st.binary(max_size=40))),
        check,
    )


@harness(
    "orchestrator/tasks/household.py",
    "orchestrator/tasks/calculator.py",
    "orchestrator/tasks/sums.py",
    "orchestrator/tasks/coding.py",
    "orchestrator/tasks/vocabulary.py",
    "orchestrator/tasks/repository.py",
    refuses="an answer to everything",
)
def policy_text(folder: Path) -> Drawn:
    """Each task has an answer to whatever a policy writes, in its own vocabulary."""
    import asyncio

    loop = asyncio.new_event_loop()
    said = (
        "go kitchen",
        "take apple",
        "open",
        "put",
        "=",
        "1+2",
        "```python",
        "def f():",
        "\ud800",
        "\x00",
        "(" * 200,
        "٣",
        "edit toposort.py 1 0\nx",
        "edit new/x.py 1 0\n",
        "show toposort.py 3 9",
        "find def",
        "ls",
        "\n",
    )

    def check(text: str) -> None:
        with inputs.bounded():
            House("kitchen//apple:kitchen/apple fridge").do(text)
            loop.run_until_complete(Sum("1+2", "?").act(text))
            answers("1+2", text)
            is_handed_in(text)
            game = RepositoryGame("toposort planted-1", None)
            for said in (text, text):
                loop.run_until_complete(game.act(printable(said)))
            assert all(isinstance(data, bytes) for data in game.files.values())
            ids = CHARACTERS.encode(printable(text))
        assert all(0 <= token < len(CHARACTERS.words) for token in ids)

    try:
        yield st.one_of(st.lists(st.sampled_from(said), max_size=5).map(" ".join), st.text(max_size=60)), check
    finally:
        loop.close()


@harness(
    "orchestrator/api/bearer.py",
    "orchestrator/rewards/function_client.py",
    "vllm_rlplugin/server/control_route.py",
    "vllm_rlplugin/server/bearer_auth.py",
    refuses="status 400, 401, 409, 413; not counted",
)
def http_headers(folder: Path) -> Drawn:
    """Only the token opens, whatever a header says; no header is answered with 500."""
    from fastapi import APIRouter, FastAPI
    from starlette.testclient import TestClient

    from vllm_rlplugin.server.bearer_auth import BearerGuard
    from vllm_rlplugin.server.control_route import STATE, ControlRoute, RouteContext

    router, token = APIRouter(route_class=ControlRoute), "t" * 32

    async def take() -> dict[str, int]:
        return {}

    router.post("/rl/add")(take)
    app = FastAPI()
    app.include_router(router)
    guard = BearerGuard(token, (ipaddress.ip_network("127.0.0.1/32"),))
    setattr(app.state, STATE, RouteContext(guard, 1 << 10, "s", lambda: 0, lambda key: "" if key == "k" else "taken"))
    client = TestClient(app, client=("127.0.0.1", 5))
    names = ("Authorization", "Content-Length", PROTOCOL_HEADER, INSTANCE_HEADER, LEASE_HEADER, "X-Other")

    def check(drawn: dict[str, str]) -> None:
        headers = [(name.encode(), value.encode("latin-1")) for name, value in drawn.items()]
        with inputs.bounded():
            answer = client.post("/rl/add", headers=headers)
        assert answer.status_code in (200, 400, 401, 409, 413), answer.text
        given = drawn.get("Authorization", "")
        assert answer.status_code == 401 or bearer.token_of(given) == token
        asked = FunctionClient("http://127.0.0.1:1/2015-03-31/functions/f/invocations")
        asked._note_cold(given)
        assert 0 <= asked.counts.cold_seconds < 1e9

    values = st.one_of(
        st.sampled_from(
            (
                *(
                    f"Bearer {token}",
                    f"bearer  {token}\t",
                    "Bearer",
                    token,
                    "k",
                    "s.0",
                    "1",
                    "-1",
                    "0",
                    "99",
                    "9" * 5000,
                ),
                *("\xff", "\xb2", "1e9", " ", "Bearer " + "x" * 9000, "+5", "1_0", "12, 12"),
            )
        ),
        st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=30),
    )
    yield st.dictionaries(st.sampled_from(names), values, max_size=6), check


@harness("vllm_rlplugin/judge/judge_server.py", refuses="status 400")
def judge_body(folder: Path) -> Drawn:
    """A body that our own judge is sent is a prompt that fits its model, or refused."""
    from transformers import AutoTokenizer

    from vllm_rlplugin.judge.judge_server import JudgeServer

    judge: Any = object.__new__(JudgeServer)
    judge._tokenizer = AutoTokenizer.from_pretrained(str(write_tokenizer(folder / "model", refuses="forbidden")))
    judge._model = SimpleNamespace(model=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=2000)))
    refused = (ValueError, TypeError, LookupError, OverflowError)
    valid = {
        "messages": [{"role": "system", "content": "x"}, {"role": "forbidden", "content": "y"}],
        "max_tokens": 9, "temperature": 0.5, "n": 1, "seed": 3, "stream": False, "response_format": None,
    }  # fmt: skip

    def check(data: bytes) -> None:
        found = inputs.survives(lambda: judge._read(jsontext.parse_object(data)), *refused)
        if found is not None:
            prompt, most, temperature, seed = found
            assert 0 < len(prompt) + most <= 2000
            assert 0 <= temperature <= 10
            assert type(seed) is int

    yield inputs.texts(valid), check
