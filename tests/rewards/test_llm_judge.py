"""A model as a judge, and several votes: a score that was given, or a named failure, never a number made up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from orchestrator.api import ConfigError, Prompt, RetryableError, RunError, Trajectory, TrajectoryError, Turn
from orchestrator.config import load_config
from orchestrator.rewards import function_client
from orchestrator.rewards.llm_judge import LLMJudge, transcript
from orchestrator.rewards.reward_client import HttpReward
from orchestrator.rewards.voting import MajorityVote
from orchestrator.runtime import function_hosts
from orchestrator.tasks.frozenlake import FrozenLakeTask, encode
from orchestrator.tasks.nim import NimTask

NIM = NimTask(5)
TOKEN = "the-token-of-the-judge-0123456789"


def episode(shown: str = "a3 b0 c0 d0", answered: str = "a0", name: str = "t1") -> Trajectory:
    words = NIM.words
    turn = Turn(words.encode(shown), words.turn(answered), (0.0, 0.0), ((0, 2),))
    return Trajectory(name, "g1", "nim", Prompt("k", "nim", 1, "3/0/0/0"), (turn,), None, "1", 1, False)


class FaultyJudge:
    """An HTTP twin of a chat endpoint that answers what the list holds, the last entry for ever; real ones do not misbehave
    when asked to. An entry is what the model says, a status, or a whole body."""

    def __init__(self, *answers: str | int | bytes | None) -> None:
        self.answers, self.requests = answers, list[dict[str, Any]]()
        self.headers: list[str] = []
        self.at_once = self.most = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        answer = self.answers[min(len(self.requests), len(self.answers) - 1)]
        self.requests.append(await request.json())
        self.headers.append(request.headers.get("Authorization", ""))
        assert request.path == "/v1/chat/completions"
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        await asyncio.sleep(0.01)
        self.at_once -= 1
        if isinstance(answer, int):
            return web.Response(status=answer)
        if isinstance(answer, bytes):
            return web.Response(body=answer)
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": answer}}]})

    async def __aenter__(self) -> str:
        application = web.Application()
        application.router.add_post("/{path:.*}", self.handle)
        self._runner = web.AppRunner(application, shutdown_timeout=0.05)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function_client, "BACKOFF_FIRST", 0.001)


def judged(twin: FaultyJudge, trajectories: int = 1, **options: Any) -> list[float | Exception]:
    async def run() -> list[float | Exception]:
        async with twin as url:
            settings = {"model": "m", "criterion": "wins", "retries": 2, "timeout": 5.0, "token": TOKEN, **options}
            judge = LLMJudge(NIM, url, **settings)
            try:
                asked = (judge.score(episode(name=f"t{n}")) for n in range(trajectories))
                return list(await asyncio.gather(*asked, return_exceptions=True))  # type: ignore[arg-type]
            finally:
                await judge.close()
                await judge.close()

    return asyncio.run(asyncio.wait_for(run(), 30))


@pytest.mark.parametrize(
    ("said", "score"),
    [('{"score": 7}', 0.7), ('{"score": 0}', 0.0), (' {"score":10} ', 1.0), ('{"score": 3, "why": "x"}', 0.3)],
)
def test_the_score_is_scaled_to_the_range_of_a_reward(said: str, score: float) -> None:
    assert judged(FaultyJudge(said)) == [score]


@pytest.mark.parametrize(
    ("said", "score"), [("Well.\nScore: 4", 0.4), ("Score: 2\nno:\n**Score: 9**\n", 0.9), ("score = 10.", 1.0)]
)
def test_a_score_in_words_is_the_last_line_that_says_so(said: str, score: float) -> None:
    assert judged(FaultyJudge(said), structured=False) == [score]


@pytest.mark.parametrize(
    "said",
    [
        "",
        "ten",
        "[]",
        "7",
        '{"score": 11}',
        '{"score": -1}',
        '{"score": 7.5}',
        '{"score": true}',
        '{"score": "7"}',
        None,
    ],
)
def test_what_holds_no_score_is_asked_again_and_never_becomes_a_number(said: str | None) -> None:
    twin = FaultyJudge(said)
    (error,) = judged(twin)
    assert isinstance(error, TrajectoryError)
    assert error.cause == "reward_unreadable"
    assert len(twin.requests) == 3
    assert len({request["seed"] for request in twin.requests}) == 3
    assert judged(FaultyJudge(said, '{"score": 5}')) == [0.5]


@pytest.mark.parametrize("said", ["Score: 11", "score: high", "I would score 7 of 10", "Score: 1000000000000"])
def test_a_line_without_a_score_in_the_range_is_no_score(said: str) -> None:
    (error,) = judged(FaultyJudge(said), structured=False)
    assert isinstance(error, TrajectoryError)
    assert error.cause == "reward_unreadable"


def test_failures_of_the_endpoint_are_named_and_never_a_reward() -> None:
    assert judged(FaultyJudge(500, 429, '{"score": 1}')) == [0.1]
    (busy,) = judged(FaultyJudge(503))
    assert isinstance(busy, RetryableError)
    (refused,) = judged(FaultyJudge(401))
    assert isinstance(refused, RunError)
    for body in (b"{}", b"no", b'{"choices": []}', b'{"choices": [{"message": {"content": 3}}]}'):
        (other,) = judged(FaultyJudge(body))
        assert isinstance(other, TrajectoryError)
        assert other.cause == "reward_error"


def test_no_more_calls_than_allowed_are_in_flight_and_each_carries_the_token() -> None:
    twin = FaultyJudge('{"score": 1}')
    assert judged(twin, trajectories=12, concurrency=3) == [0.1] * 12
    assert twin.most <= 3
    assert set(twin.headers) == {f"Bearer {TOKEN}"}


def test_the_judge_sees_criterion_and_episode_and_is_held_to_the_form() -> None:
    twin = FaultyJudge('{"score": 1}')
    judged(twin)
    (request,) = twin.requests
    text = request["messages"][0]["content"]
    assert "wins" in text
    assert "> a3 b0 c0 d0\n< a0 <end>" in text
    schema = request["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["score"] == {"type": "integer", "minimum": 0, "maximum": 10}


def test_an_episode_cannot_end_its_own_quotation() -> None:
    """The mark follows from the episode, so an episode that holds its own mark would have another one."""
    texts = []
    for answered in ("a0", "b0"):
        twin = FaultyJudge('{"score": 1}')

        async def run(twin: FaultyJudge = twin, answered: str = answered) -> None:
            async with twin as url:
                judge = LLMJudge(NIM, url, model="m", criterion="wins")
                await judge.score(episode(answered=answered))
                await judge.close()

        asyncio.run(run())
        texts.append(twin.requests[0]["messages"][0]["content"])
    marks = [{line for line in text.splitlines() if line.startswith("-----")} for text in texts]
    assert [len(found) for found in marks] == [1, 1]
    assert marks[0] != marks[1]


@pytest.mark.parametrize(
    "template", ["{criterion}", "{episode}", "{criterion}{episode}{other}", "{criterion}{episode}{", "{0}"]
)
def test_a_template_that_cannot_be_filled_is_refused_before_anything_is_asked(template: str) -> None:
    with pytest.raises(ConfigError, match=r"reward\.judge\.template"):
        LLMJudge(NIM, "http://127.0.0.1:1/v1", model="m", criterion="c", template=template)


def test_a_task_without_text_of_its_own_is_shown_in_its_words() -> None:
    turn = Turn(encode("@a1"), encode("down <end>"), (0.0, 0.0), ((0, 2),))
    lake = Trajectory("t", "g", "frozenlake", Prompt("k", "frozenlake", 1, ""), (turn,), None, "1", 1, False)
    assert transcript(FrozenLakeTask(), lake) == "> @a1\n< down <end>"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["reward.judge.url='http://x/v1'", "reward.judge.criterion=c"], "model = .*: a judge needs one"),
        (["reward.judge.url='http://x/v1'", "reward.judge.model=m"], "criterion = .*: a judge needs one"),
        (["reward.judge.low=10"], "must be above low"),
        (["reward.votes=4"], "must be odd"),
    ],
)
def test_a_judge_that_is_half_configured_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(None, overrides)


@pytest.mark.parametrize(
    ("overrides", "kind", "votes"),
    [
        (["reward.url='http://127.0.0.1:1/x'"], HttpReward, 1),
        (["reward.url='http://127.0.0.1:1/x'", "reward.votes=3"], HttpReward, 3),
        (["reward.judge={url='http://127.0.0.1:1/v1', model='m', criterion='c'}"], LLMJudge, 1),
        (["reward.judge={url='http://127.0.0.1:1/v1', model='m', criterion='c'}", "reward.votes=5"], LLMJudge, 5),
    ],
)
def test_a_run_is_scored_as_its_config_says(overrides: list[str], kind: type, votes: int) -> None:
    async def started() -> Any:
        async with AsyncExitStack() as stack:
            nothing: Any = None  # no host is started, so that none is kept or logged
            config = load_config(None, ["task.name=nim", *overrides])
            return (await function_hosts.start_reward(config, NIM, nothing, stack, nothing, nothing)).function

    reward = asyncio.run(started())
    if votes > 1:
        assert isinstance(reward, MajorityVote)
        assert reward._votes == votes
        reward = reward._reward
    assert isinstance(reward, kind)


# ------------------------------------------------------------------------------------------------------------- votes


class Voters:
    """Answers in order: a reward, or an error; ``None`` never answers."""

    def __init__(self, *answers: float | Exception | None) -> None:
        self.answers, self.asked, self.cancelled = answers, 0, 0

    async def score(self, _: Trajectory) -> float:
        answer = self.answers[self.asked]
        self.asked += 1
        await asyncio.sleep(0)
        if answer is None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if isinstance(answer, Exception):
            raise answer
        assert answer is not None
        return answer


def voted(*answers: float | Exception | None, by: Any = "majority") -> tuple[float, Voters]:
    async def run() -> tuple[float, Voters]:
        voters = Voters(*answers)
        return await MajorityVote(voters, len(answers), by).score(episode()), voters

    return asyncio.run(asyncio.wait_for(run(), 10))


FLAKE = RetryableError("busy")


@pytest.mark.parametrize(
    ("answers", "reward"),
    [
        ((1.0,), 1.0),
        ((1.0, 0.0, 1.0), 1.0),
        ((0.0, 1.0, 0.0), 0.0),
        ((FLAKE, 1.0, 1.0), 1.0),
        ((1.0, 1.0, 0.0, 0.0, 1.0), 1.0),
    ],
)
def test_more_than_half_of_the_votes_decide(answers: tuple[Any, ...], reward: float) -> None:
    assert voted(*answers)[0] == reward


def test_a_certain_majority_does_not_wait_for_the_rest_and_leaves_nothing_running() -> None:
    reward, voters = voted(1.0, 1.0, None)
    assert (reward, voters.asked, voters.cancelled) == (1.0, 3, 1)


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ((FLAKE, FLAKE, 1.0), RetryableError),
        ((TrajectoryError("reward_error"), TrajectoryError("reward_error"), None), TrajectoryError),
        ((RunError("refused"), 1.0, None), RunError),
        ((0.1, 0.2, 0.3), TrajectoryError),
        ((1.0, 0.0, FLAKE), TrajectoryError),
    ],
)
def test_without_a_majority_there_is_no_reward(answers: tuple[Any, ...], error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        voted(*answers)
    if answers[0] == 0.1:
        assert caught.value.cause == "reward_disagreement"  # type: ignore[attr-defined]


def test_scores_that_differ_a_little_have_a_median() -> None:
    assert voted(0.1, 0.9, 0.3, by="median")[0] == 0.3
    assert voted(0.1, FLAKE, 0.3, by="median")[0] == 0.1
    with pytest.raises(RetryableError):
        voted(0.1, FLAKE, FLAKE, by="median")


@pytest.mark.parametrize("votes", [0, 2, -1])
def test_an_even_number_of_votes_is_refused(votes: int) -> None:
    with pytest.raises(ConfigError, match="odd"):
        MajorityVote(Voters(), votes)


# -------------------------------------------------------------------------------------------------- the real endpoint


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, vllm_serve: Callable[..., Any]) -> Iterator[Any]:
    """A tiny random model that speaks in bytes: what it says is noise, but for the form that the endpoint enforces."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from megatron_rlplugin.tiny_model import create_qwen3

    folder = tmp_path_factory.mktemp("judge")
    letters = ["<pad>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    letters += [f"<unused{n}>" for n in range(-len(letters) % 32)]
    create_qwen3(
        str(folder / "model"), hidden_size=64, intermediate_size=128, layers=2, heads=4, kv_heads=2, head_dim=32,
        vocabulary=letters, max_positions=2048, dtype="float32", seed=5,
    )  # fmt: skip
    plain = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<end>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    tokenizer.save_pretrained(str(folder / "model"))
    options = ("--no-skip-tokenizer-init", "--max-model-len", "2048", "--served-model-name", "judge")
    with vllm_serve(folder, folder / "model", TOKEN, *options) as running:
        yield running


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.timeout(900)
def test_a_real_vllm_gives_scores_in_the_range_and_names_what_it_cannot(server: Any) -> None:
    async def run() -> None:
        options: dict[str, Any] = {"model": "judge", "criterion": "wins", "token": TOKEN, "timeout": 300.0}
        judge = LLMJudge(NIM, f"{server.url}/v1", **options)
        scores = await asyncio.gather(*(judge.score(episode(name=f"t{n}")) for n in range(4)))
        assert all(score in [n / 10 for n in range(11)] for score in scores)
        await judge.close()
        noise = LLMJudge(NIM, f"{server.url}/v1", **options, structured=False, retries=1)
        with pytest.raises(TrajectoryError, match="reward_unreadable"):
            await noise.score(episode())
        await noise.close()
        votes = LLMJudge(NIM, f"{server.url}/v1", **options, temperature=0.7)
        assert 0.0 <= await MajorityVote(votes, 3, "median").score(episode()) <= 1.0
        await votes.close()
        unknown = LLMJudge(NIM, f"{server.url}/v1", **{**options, "model": "another"})
        with pytest.raises(RunError, match="404"):
            await unknown.score(episode())
        await unknown.close()

    asyncio.run(run())


def test_the_whole_message_is_json_that_every_endpoint_reads(tmp_path: Path) -> None:
    judge = LLMJudge(NIM, "http://127.0.0.1:1/v1", model="m", criterion='says "no" {x}')
    body = json.loads(json.dumps(judge._body(judge._asked("> {episode}\n< \u2028", "t"), 0)))
    assert "{x}" in body["messages"][0]["content"]
    assert "> {episode}" in body["messages"][0]["content"]
