"""OpenAI's HTTP interface as far as it is served here: requests as records, answers and errors as JSON.

What a field means is what OpenAI's reference says. Guarantees: a field that would change what is sampled and is not supported is
refused, never ignored; so is one that is unknown. ``null`` is as if it were not there. Ignored is what has no bearing on the
answer (:data:`IGNORED`). ``seed`` is ignored too: with one seed all members of a group would say the same.

Reading takes time in proportion to the body, whatever is in it: lists and objects have limits, and the first mistake ends it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from orchestrator.agents.chat_template import Message
from orchestrator.api import jsontext
from orchestrator.api.http import MAX_PROMPT_TOKENS

T = TypeVar("T", bound=BaseModel)
MAX_CHOICES = 16  # `n`
MAX_MESSAGES = 10_000
MAX_PARTS = 256  # of a message, and its calls of tools
MAX_FIELDS = 64  # of an object
MAX_TOOLS = 512
MAX_NAME = 256  # characters of a model, a role, an identity
MAX_STOP = 1000  # characters of a stop text
MAX_STOPS = 4  # as OpenAI
# Of a field that may have several forms: what is wrong within one says more.
_OTHER_FORM = ("string_type", "list_type", "int_type")
_AT_ONCE = 512  # tokens whose texts and log-probs are written in one go: some 4 ms
IGNORED = frozenset(
    {
        *("user", "metadata", "store", "seed", "service_tier", "prediction", "reasoning_effort"),
        *("safety_identifier", "prompt_cache_key", "prompt_cache_retention", "verbosity"),
    }
)
# Fields that are taken only with a value that changes nothing.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("auto", "none"),
}


class ApiError(Exception):
    """What a client is told instead of an answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str = "",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code or None}}


@dataclass(frozen=True, slots=True)
class Asked:
    """How to sample. None: not said."""

    model: str
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    n: int
    stop: tuple[str, ...]
    stream: bool
    usage: bool  # in the stream
    logprobs: bool
    one_call: bool = False  # an answer ends with its first call of a tool


@dataclass(frozen=True, slots=True)
class ChatAsked:
    """``tools``: canonical JSON, empty without."""

    asked: Asked
    messages: tuple[Message, ...]
    tools: str


@dataclass(frozen=True, slots=True)
class PlainAsked:
    """A text, or token ids."""

    asked: Asked
    prompt: str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer. ``reason``: stop, length or tool_calls."""

    text: str
    said: Message
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Answered:
    """``identity``: of the request; tokens are those of the prompt and of all choices; ``words``: what tokens say."""

    identity: str
    prompt_tokens: int
    completion_tokens: int
    choices: tuple[Choice, ...]
    words: Callable[[Sequence[int]], str]


class _Object(BaseModel):
    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise ValueError(f"has over {MAX_FIELDS} fields")
        return value


_Name = Annotated[str, Field(max_length=MAX_NAME)]


class _Part(_Object):
    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: str


class _Call(_Object):
    model_config = ConfigDict(extra="ignore")

    class Function(_Object):
        model_config = ConfigDict(extra="ignore")
        name: _Name
        arguments: str

    id: _Name = ""
    type: Literal["function"] = "function"
    function: Function


class _Message(_Object):
    model_config = ConfigDict(extra="ignore")  # clients send back what they were given, with fields of later versions
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[_Part], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    name: _Name | None = None
    tool_calls: Annotated[list[_Call], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    tool_call_id: _Name | None = None


class _StreamOptions(_Object):
    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False


_Stop = Annotated[str, Field(max_length=MAX_STOP)]


class _Common(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    model: _Name = "policy"
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None

    def asked(self, max_tokens: int | None, logprobs: bool) -> Asked:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return Asked(
            self.model,
            max_tokens,
            self.temperature,
            self.top_p,
            self.n,
            tuple(text for text in stops if text),
            self.stream,
            self.stream_options is not None and self.stream_options.include_usage,
            logprobs,
        )


class _Tool(_Object):
    model_config = ConfigDict(extra="allow")
    type: Literal["function"]
    function: Annotated[dict[str, Any], Field(max_length=MAX_FIELDS)]


class _Chat(_Common):
    messages: Annotated[list[_Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    tools: Annotated[list[_Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] = []
    tool_choice: Literal["auto", "none"] = "auto"
    parallel_tool_calls: bool = True


class _Plain(_Common):
    prompt: (
        str
        | Annotated[list[int], Field(max_length=MAX_PROMPT_TOKENS, fail_fast=True)]
        | Annotated[list[str], Field(min_length=1, max_length=1, fail_fast=True)]
    )
    logprobs: Annotated[int, Field(ge=0)] | None = None


def chat_request(body: str | bytes) -> ChatAsked:
    """A body of /v1/chat/completions. Raises ApiError."""
    found = _checked(_Chat, body)
    shown = found.tools if found.tool_choice != "none" else []
    tools = _canonical([tool.model_dump() for tool in shown]) if shown else ""
    asked = found.asked(found.max_completion_tokens or found.max_tokens, found.logprobs)
    asked = replace(asked, one_call=bool(shown) and not found.parallel_tool_calls)
    return ChatAsked(asked, tuple(map(_message, found.messages)), tools)


def plain_request(body: str | bytes) -> PlainAsked:
    """A body of /v1/completions. Raises ApiError."""
    found = _checked(_Plain, body)
    if found.logprobs:
        raise ApiError(
            400,
            "logprobs: 0 is served: the sampled token's, without alternatives",
            param="logprobs",
            code="unsupported",
        )
    prompt: object = found.prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
        prompt = prompt[0]
    if not prompt:
        raise ApiError(400, "prompt: must not be empty", param="prompt")
    ready = prompt if isinstance(prompt, str) else tuple(found.prompt)
    return PlainAsked(found.asked(found.max_tokens, found.logprobs is not None), ready)  # type: ignore[arg-type]


def read_apart(event: Mapping[str, Any]) -> dict[str, Any]:
    """What a process of its own makes of ``{"chat": bool, "body": text}``: fields of the record, or ``refused``: status, body."""
    try:
        found = (chat_request if event["chat"] else plain_request)(event["body"])
    except ApiError as error:
        return {"refused": [error.status, error.body]}
    return asdict(found)


_WHOLE: TypeAdapter[ChatAsked | PlainAsked] = TypeAdapter(ChatAsked | PlainAsked)


def read_by_another(fields: Mapping[str, Any]) -> ChatAsked | PlainAsked:
    """The record that :func:`read_apart` made. Raises ApiError where it was none."""
    if "refused" in fields:
        status, body = fields["refused"]
        refusal = ApiError(status, str(body["error"]["message"]))
        refusal.body = body
        raise refusal
    return _WHOLE.validate_python(fields)


def _checked(form: type[T], text: str | bytes) -> T:
    try:
        body = jsontext.parse(text)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}"[:300]) from error
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    fields = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
    for name, values in NEUTRAL.items():
        if name in fields and name not in form.model_fields:
            if fields[name] not in values:
                text = f"{name}: is not supported here; leave it out"
                raise ApiError(400, text, param=name, code="unsupported_parameter")
            del fields[name]
    for name in fields:
        if name not in form.model_fields:
            told = name[:MAX_NAME]
            text = f"Unrecognized request argument supplied: {told}"
            raise ApiError(400, text, param=told, code="unknown_parameter")
    try:
        return form.model_validate(fields)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        first = next((one for one in found if one["type"] not in _OTHER_FORM), found[0])
    name = _where(first["loc"], fields)[:MAX_NAME]
    if first["type"] == "extra_forbidden":
        raise ApiError(400, f"Unrecognized request argument supplied: {name}", param=name, code="unknown_parameter")
    raise ApiError(400, f"{name}: {first['msg']}", param=name or None, code="invalid_value")


def _where(path: Sequence[int | str], body: Any) -> str:
    """The field that an error is about, without the names of the forms that were tried for it."""
    found: list[str] = []
    for part in path:
        if isinstance(body, dict) and isinstance(part, str):
            body = body.get(part)
        elif isinstance(body, list) and isinstance(part, int):
            body = body[part]
        else:
            continue
        found.append(str(part))
    return ".".join(found)


def _message(found: _Message) -> Message:
    content = found.content
    text = content if isinstance(content, str) else "".join(part.text for part in content or [])
    extra: dict[str, Any] = {}
    if found.tool_calls:
        calls = [(call.id, call.function.name, call.function.arguments) for call in found.tool_calls]
        extra["tool_calls"] = [_call(*call) for call in calls]
    # The name of an assistant is the agent program's own (LangGraph gives its node's): with it, an answer that comes back
    # would not be the one that was given.
    for name in ("tool_call_id",) if found.role == "assistant" else ("name", "tool_call_id"):
        if (value := getattr(found, name)) is not None:
            extra[name] = value
    return Message(found.role, text, _canonical(extra) if extra else "")


def answer_message(content: str, calls: list[tuple[str, str, str]]) -> Message:
    """An answer as it will come back in the next request. ``calls``: (id, name, arguments as JSON)."""
    extra = _canonical({"tool_calls": [_call(*call) for call in calls]}) if calls else ""
    return Message("assistant", content, extra)


def _call(identity: str, name: str, arguments: str) -> dict[str, Any]:
    try:
        given: Any = jsontext.parse(arguments)
    except ValueError:
        given = arguments  # what the policy wrote is no JSON: shown as it is
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": given}}


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


# -- answers: for ``jsontext.pieces``, as log-probs are made while they are written -----------------------------------


def chat_body(asked: Asked, answered: Answered, created: int) -> dict[str, Any]:
    """A whole chat completion."""
    return {
        **_head(asked, answered, "chat.completion", created),
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", **_content(choice)},
                "finish_reason": choice.reason,
                "logprobs": _chat_logprobs(answered, choice) if asked.logprobs else None,
            }
            for index, choice in enumerate(answered.choices)
        ],
        "usage": token_usage(answered),
    }


def chat_chunks(asked: Asked, answered: Answered, created: int) -> list[dict[str, Any]]:
    """The same as the events of a stream."""
    head = _head(asked, answered, "chat.completion.chunk", created)
    found: list[dict[str, Any]] = []

    def chunk(index: int, delta: dict[str, Any], reason: str | None, logprobs: object = None) -> None:
        choice = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
        found.append({**head, "choices": [choice]})

    for index, choice in enumerate(answered.choices):
        chunk(index, {"role": "assistant", "content": ""}, None)
        delta = _content(choice)
        if calls := delta.pop("tool_calls", None):
            delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(calls)]
        chunk(index, delta, None, _chat_logprobs(answered, choice) if asked.logprobs else None)
        chunk(index, {}, choice.reason)
    return [*found, *_usage_chunk(asked, answered, head)]


def plain_body(asked: Asked, answered: Answered, created: int) -> dict[str, Any]:
    """A whole completion."""
    choices = [_plain_choice(asked, answered, index) for index, choice in enumerate(answered.choices)]
    return {**_head(asked, answered, "text_completion", created), "choices": choices, "usage": token_usage(answered)}


def plain_chunks(asked: Asked, answered: Answered, created: int) -> list[dict[str, Any]]:
    """The same as the events of a stream."""
    head = _head(asked, answered, "text_completion", created)
    found: list[dict[str, Any]] = [
        {**head, "choices": [_plain_choice(asked, answered, index)]} for index, choice in enumerate(answered.choices)
    ]
    return [*found, *_usage_chunk(asked, answered, head)]


def token_usage(answered: Answered) -> dict[str, int]:
    """Tokens that were read and generated."""
    read, made = answered.prompt_tokens, answered.completion_tokens
    return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}


def _head(asked: Asked, answered: Answered, kind: str, created: int) -> dict[str, Any]:
    return {"id": answered.identity, "object": kind, "created": created, "model": asked.model}


def _usage_chunk(asked: Asked, answered: Answered, head: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**head, "choices": [], "usage": token_usage(answered)}] if asked.usage else []


def _content(choice: Choice) -> dict[str, Any]:
    calls = json.loads(choice.said.extra)["tool_calls"] if choice.said.extra else []
    for call in calls:
        given = call["function"]["arguments"]
        call["function"]["arguments"] = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    content: dict[str, Any] = {"content": choice.said.content or (None if calls else "")}
    return {**content, "tool_calls": calls} if calls else content


def _texts(answered: Answered, choice: Choice) -> Iterator[list[str]]:
    """Of each token, so many at a time."""
    for start in range(0, len(choice.token_ids), _AT_ONCE):
        yield [answered.words((token,)) for token in choice.token_ids[start : start + _AT_ONCE]]


def _chat_logprobs(answered: Answered, choice: Choice) -> dict[str, Any]:
    values = iter(choice.logprobs)
    content = (
        [
            {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
            for text, value in zip(texts, values, strict=False)
        ]
        for texts in _texts(answered, choice)
    )
    return {"content": content, "refusal": None}


def _plain_choice(asked: Asked, answered: Answered, index: int) -> dict[str, Any]:
    choice = answered.choices[index]
    logprobs: dict[str, Any] | None = None
    if asked.logprobs:
        lengths = ([len(text) for text in texts] for texts in _texts(answered, choice))
        logprobs = {
            "tokens": _texts(answered, choice),
            "token_logprobs": choice.logprobs,
            "top_logprobs": None,
            "text_offset": _offsets(lengths),
        }
    return {"index": index, "text": choice.text, "finish_reason": choice.reason, "logprobs": logprobs}


def _offsets(lengths: Iterator[list[int]]) -> Iterator[list[int]]:
    past = 0
    for block in lengths:
        *offsets, past = accumulate(block, initial=past)
        yield offsets
