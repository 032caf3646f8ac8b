"""One trajectory behind the endpoint: what its agent asks becomes generation requests, what comes back becomes its turns.

Guarantees: ids that the policy generated are kept as they came, with their log-probs and weight versions; staleness is checked
before every request; an answer whose client has gone is no part of the trajectory; what ends the trajectory (staleness, an
engine's error, the run's) is in :attr:`Session.broken`, and the agent is told that it is over. Temperature and top_p are the
run's, unless the task leaves them to the agent: the trainer recomputes log-probs at the run's.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from orchestrator.agents.chat_template import ChatFormat, TemplateRefused
from orchestrator.agents.conversation import Answer, Conversation, Opening
from orchestrator.agents.openai_protocol import Answered, ApiError, Asked, ChatAsked, Choice, PlainAsked, answer_message
from orchestrator.api import Completion, GenerationRequest, Sampling, TrajectoryError, Turn, jsontext, merge_spans
from orchestrator.environments.episode_context import no_room

T = TypeVar("T")
MOST_REFUSALS = 1000  # in a row: an agent that asks on whatever it is told
_LONG = 2048  # tokens of an answer: looking for its end is some 3 ms
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class AgentBounds:
    """Of one trajectory; ``seconds``: of one request. ``own_sampling``: temperature and top_p are the agent's to choose.
    ``tool_calls``: look for calls in what the policy wrote, where the agent named tools."""

    max_turns: int
    max_response_tokens: int
    max_context_tokens: int
    seconds: float = 600.0
    concurrent: int = 16
    own_sampling: bool = False
    tool_calls: bool = True


@dataclass(slots=True)
class AgentSession:
    """``generate`` asks the rollout's workers; ``request`` is what all its requests have in common; ``stale(first_version)`` is
    the bound, ``stale_error`` what is raised when it is passed."""

    chat_format: ChatFormat
    request: GenerationRequest
    bounds: AgentBounds
    generate: Callable[[GenerationRequest, Sequence[Turn]], Awaitable[Completion]]
    stale: Callable[[int], bool]
    stale_error: type[Exception]
    conversation: Conversation = field(init=False)
    broken: asyncio.Future[None] = field(init=False)
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)  # one of its requests waits for a thread
    truncated: bool = False  # a limit of turns or tokens was reached
    requests: int = 0
    active: int = 0
    pending: int = 0  # answers that open requests wait for
    refusals: int = 0  # since its last answer
    unanswered: str = ""  # why its newest request had no answer, where that was not the agent's doing

    def __post_init__(self) -> None:
        self.conversation = Conversation(self.chat_format)
        self.broken = asyncio.get_running_loop().create_future()

    async def answer(self, wanted: ChatAsked | PlainAsked) -> tuple[Answered, list[Answer]]:
        """Raises ApiError."""
        if isinstance(wanted, PlainAsked):
            return await self._answer_plain(wanted)
        self._check_length(sum(len(message.content) for message in wanted.messages) + len(wanted.tools))
        opening = await self._opened("messages", self.conversation.open_chat, wanted.messages, wanted.tools)
        return await self._answer(wanted.asked, opening)

    async def _answer_plain(self, wanted: PlainAsked) -> tuple[Answered, list[Answer]]:
        prompt = wanted.prompt
        size = len(self.chat_format.vocabulary)
        if not isinstance(prompt, str) and not 0 <= min(prompt) <= max(prompt) < size:
            raise ApiError(400, f"prompt: token ids must lie in [0, {size})", param="prompt")
        self._check_length(len(prompt) if isinstance(prompt, str) else 0)
        opening = await self._opened("prompt", self.conversation.open_plain, prompt)
        self._check(wanted.asked, opening)
        return await self._answer(
            wanted.asked, opening, prompt if isinstance(prompt, str) else self.chat_format.text(prompt)
        )

    async def _opened(self, field: str, opens: Callable[..., Opening], *said: Any) -> Opening:
        """Raises ApiError."""
        try:
            return await self._apart(opens, *said)
        except TemplateRefused as error:
            raise ApiError(400, str(error), param=field) from error

    async def _apart(self, work: Callable[..., T], *given: Any) -> T:
        """Beside the event loop where that takes long, one at a time, of all agents in turn."""
        if (turn := self.chat_format.thread) is None:
            await asyncio.sleep(0)
            return work(*given)
        async with self.opening, turn:
            working = asyncio.ensure_future(asyncio.to_thread(work, *given))
            try:
                return await asyncio.shield(working)
            finally:
                await asyncio.wait([working])  # whoever asked may be gone

    def end_with(self, error: BaseException) -> None:
        """The trajectory cannot go on."""
        if not self.broken.done():
            self.broken.set_exception(error)

    def note_refusal(self, error: ApiError) -> None:
        """One who catches every error and asks again would keep the event loop busy until the trajectory's time is over."""
        self.refusals += error.status in (400, 403)
        if self.refusals >= MOST_REFUSALS:
            told = f"{self.refusals} requests in a row were refused, the last one with: {error}"
            self.end_with(TrajectoryError("agent_limit", told))

    def end_error(self) -> ApiError | None:
        """What the agent is told when it is."""
        if not self.broken.done():
            return None
        error = None if self.broken.cancelled() else self.broken.exception()
        why = f": {str(error) or type(error).__name__}" if error is not None else ""
        return ApiError(403, f"the trajectory is over{why}", kind="permission_denied", code="trajectory_over")

    async def _answer(self, asked: Asked, opening: Opening, prompt: str | None = None) -> tuple[Answered, list[Answer]]:
        """``prompt``: the text of a plain completion, None: it is a chat."""
        self._check(asked, opening)
        loop = asyncio.get_running_loop()
        began, sampling = loop.time(), self._sampling(asked, opening)
        turns = self.conversation.turns()
        numbers = range(self.requests, self.requests + asked.n)
        self.requests += asked.n
        self.active, self.pending = self.active + 1, self.pending + asked.n
        ids = opening.token_ids()
        work = [asyncio.ensure_future(self._generated(ids, sampling, number, turns)) for number in numbers]
        try:
            async with asyncio.timeout(self.bounds.seconds):
                found = await asyncio.gather(*work)
        except TimeoutError as error:
            text = self.unanswered = f"no answer within {self.bounds.seconds:g} s"
            raise ApiError(504, text, kind="timeout", code="timeout") from error
        except Exception as error:
            self.end_with(error)
            raise self.end_error() or error from error
        finally:
            self.active, self.pending = self.active - 1, self.pending - asked.n
            for choice_of in work:
                choice_of.cancel()  # those that are not done, when one failed or the client has gone
        cut = []
        for completion in found:
            if len(completion.token_ids) > _LONG:
                cut.append(await self._apart(self._cut, completion, asked))
            else:
                await asyncio.sleep(0)
                cut.append(self._cut(completion, asked))
        if (over := self.end_error()) is not None:
            raise over
        choices, answers = [], []
        for number, (kept, text) in zip(numbers, cut, strict=True):
            choice = self._choice(kept, text, number, look=bool(opening.tools))
            choices.append(choice)
            heard, whole = (choice.said, "") if prompt is None else (None, prompt + text)
            answers.append(self.conversation.add(opening, kept, heard, whole, began, loop.time()))
        self.unanswered, self.refusals = "", 0
        made = sum(len(answer.completion.token_ids) for answer in answers)
        identity = f"{'chatcmpl' if prompt is None else 'cmpl'}-{self.request.trajectory_id}-{numbers[0]}"
        return Answered(identity, opening.size, made, tuple(choices), self.chat_format.text), answers

    def _check(self, asked: Asked, opening: Opening) -> None:
        if (over := self.end_error()) is not None:
            raise over
        turns, bounds = self.conversation.turns(), self.bounds
        if turns and self.stale(turns[0].versions[0][0]):
            self.end_with(self.stale_error("the weights have moved on"))
            raise self.end_error() or AssertionError
        if self.active >= bounds.concurrent:
            text = f"{self.active} requests are open: at most {bounds.concurrent} at once"
            raise ApiError(429, text, kind="rate_limit_exceeded", code="too_many_requests")
        if len(turns) + self.pending + asked.n > bounds.max_turns:
            self.truncated = True
            waited = f" and waits for {self.pending}" if self.pending else ""
            text = f"this trajectory has {len(turns)} answers{waited}: at most {bounds.max_turns}"
            raise ApiError(403, text, kind="permission_denied", code="turn_limit_reached")
        if not opening.size:  # which a served engine refuses, and that would look like its end
            raise ApiError(400, "prompt: the tokenizer makes no token of it", param="prompt")
        if opening.size >= bounds.max_context_tokens:
            raise self._too_long(f"{opening.size} tokens")

    def _check_length(self, characters: int) -> None:
        """Before they are tokenized: whatever they are, they are too many tokens."""
        if characters > self.bounds.max_context_tokens * self.chat_format.longest:
            if (over := self.end_error()) is not None:
                raise over
            raise self._too_long(f"{characters} characters")

    def _too_long(self, size: str) -> ApiError:
        self.truncated = True
        text = f"the context has {size}: the longest with its answer is {self.bounds.max_context_tokens} tokens"
        return ApiError(400, text, param="messages", code="context_length_exceeded")

    def _sampling(self, asked: Asked, opening: Opening) -> Sampling:
        bounds, run = self.bounds, self.request.sampling
        room = bounds.max_context_tokens - opening.size
        most = min(asked.max_tokens or bounds.max_response_tokens, bounds.max_response_tokens, room)
        single = [ids[0] for ids in map(self._stop_ids, (*asked.stop, *self._ends(asked))) if len(ids) == 1]
        found = replace(run, max_tokens=most, stop_token_ids=tuple(dict.fromkeys((*run.stop_token_ids, *single))))
        if bounds.own_sampling:
            heat = run.temperature if asked.temperature is None else asked.temperature
            found = replace(found, temperature=heat, top_p=run.top_p if asked.top_p is None else asked.top_p)
        return found

    def _stop_ids(self, text: str) -> tuple[int, ...]:
        try:
            return self.chat_format.encode(text)
        except TemplateRefused:
            return ()

    async def _generated(
        self, token_ids: tuple[int, ...], sampling: Sampling, number: int, turns: Sequence[Turn]
    ) -> Completion:
        request = replace(
            self.request,
            request_id=f"{self.request.trajectory_id}/{number}",
            turn=number,
            token_ids=token_ids,
            sampling=sampling,
        )
        completion = await self.generate(request, turns)
        if completion.finish_reason in ("error", "abort") or not completion.token_ids:
            cause = no_room(completion.error) or f"generation_{completion.finish_reason}"
            raise TrajectoryError(cause, completion.error)
        return completion

    def _ends(self, asked: Asked) -> tuple[str, ...]:
        """The text that is the last of an answer."""
        return (_CLOSE,) if asked.one_call and self.bounds.tool_calls else ()

    def _cut(self, completion: Completion, asked: Asked) -> tuple[Completion, str]:
        """The answer up to the token that completes a stop text, which the text is without, as OpenAI's, or the one call that
        was asked for. What the policy generated behind that token nobody reads, and it is not trained."""
        text, ends = self.chat_format.text(completion.token_ids), self._ends(asked)
        stops = (*asked.stop, *ends)
        places = [place + len(stop) * (stop in ends) for stop in stops if (place := text.find(stop)) >= 0]
        if not places:
            return completion, text
        low, high = 1, len(completion.token_ids)
        while low < high:
            half = (low + high) // 2
            said_so_far = self.chat_format.text(completion.token_ids[:half])
            if any(stop in said_so_far for stop in stops):
                high = half
            else:
                low = half + 1
        spans, left = [], low
        for version, count in completion.versions:
            spans.append((version, min(count, left)))
            left -= min(count, left)
        return (
            replace(
                completion,
                token_ids=completion.token_ids[:low],
                logprobs=completion.logprobs[:low],
                versions=merge_spans(spans),
                finish_reason="stop",
            ),
            text[: min(places)],
        )

    def _choice(self, completion: Completion, text: str, number: int, *, look: bool) -> Choice:
        """``look``: for calls of the tools that the agent named."""
        calls: list[tuple[str, str, str]] = []
        content = text
        if look and self.bounds.tool_calls:
            content, calls = calls_in(text, f"call-{number}")
        reason = "tool_calls" if calls else completion.finish_reason
        return Choice(text, answer_message(content, calls), completion.token_ids, completion.logprobs, reason)


def calls_in(text: str, identity: str) -> tuple[str, list[tuple[str, str, str]]]:
    """Tool calls in what a policy wrote, as Hermes and Qwen do: ``<tool_call>{"name": ..., "arguments": {}}</tool_call>``.
    Returns (the text before the first call, (id, name, arguments as JSON) of each); ids begin with ``identity``.

    Guarantees: an answer of which any call is not of that form, or not ended, has no calls: its text is given as it is, and the
    agent judges it; one look at each character, whatever the policy wrote."""
    found: list[tuple[str, str, str]] = []
    at = text.find(_OPEN)
    while at >= 0:
        begin = at + len(_OPEN)
        end = text.find(_CLOSE, begin)
        if end < 0:
            return text, []
        try:
            call = jsontext.parse_object(text[begin:end])
        except ValueError:
            return text, []
        name, arguments = call.get("name"), call.get("arguments", {})
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return text, []
        found.append((f"{identity}-{len(found)}", name, json.dumps(arguments, ensure_ascii=False)))
        at = text.find(_OPEN, end)
    return (text.partition(_OPEN)[0].rstrip("\n"), found) if found else (text, [])
