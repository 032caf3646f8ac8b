"""Long episodes: the trained tokens are exactly those the policy saw, and what was left out is recorded."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rlplugin.objective.advantages import group_advantages, group_counts, leave_one_out
from megatron_rlplugin.trainer.recorded_rows import to_samples as parquet_samples
from orchestrator.api import (
    Completion,
    ConfigError,
    GenerationRequest,
    Observation,
    Prompt,
    Sampling,
    StepResult,
    TrainBatch,
    TrainMetrics,
    TrainSample,
    Trajectory,
    TrajectoryError,
    Turn,
)
from orchestrator.checkpoint import _trajectory_from_json  # what a resume reads
from orchestrator.config import Config, load_config
from orchestrator.environments.episode_context import setup_of
from orchestrator.envs import EnvManager, Episode
from orchestrator.ops import requirements
from orchestrator.policies.episodes.context_rule import ContextRules
from orchestrator.rewards.reward_client import HttpReward
from orchestrator.runtime import preflight
from orchestrator.sim.simulated_run import simulate
from orchestrator.sim.simulated_worker import SimWorker
from orchestrator.sim.twins import SimTask, SimTrainer
from orchestrator.store import TrajectoryStore, read_trajectories, to_trajectory
from orchestrator.tasks.game_memory import MemoryTask
from orchestrator.tasks.household import HouseholdTask
from orchestrator.tasks.note_ranks import NearestVectors
from orchestrator.tasks.text_rewards import household_goal
from orchestrator.train_samples import to_samples

PROMPT = Prompt("key", "toy", 3, "payload")
SAMPLING = Sampling(6, stop_token_ids=(1,))
STRATEGIES = ["context.strategy=restart", "context.strategy=summarise"]


class Corridor:
    """Twelve turns; each observation names its number."""

    version = "corridor 1"

    def __init__(self, turns: int = 12) -> None:
        self.turn, self.turns = 0, turns
        self.seen: list[tuple[int, ...]] = []

    async def reset(self, prompt: Prompt) -> Observation:
        return Observation((40, 41, 42))

    async def step(self, action_ids: tuple[int, ...]) -> StepResult:
        self.seen.append(action_ids)
        self.turn += 1
        return StepResult(Observation((10 + self.turn, 9)), 0.0, done=self.turn == self.turns)

    async def close(self) -> None:
        self.turn = 0


class CorridorTask:
    name = "toy"
    vocabulary: Sequence[str] = tuple(f"w{index}" for index in range(64))
    pad_id, end_id, max_turns, max_response_tokens, max_context_tokens = 0, 1, 30, 6, 60

    def __init__(self) -> None:
        self.made: list[Corridor] = []

    def prompts(self, split: str, seed: int):  # type: ignore[no-untyped-def]
        yield PROMPT

    def environment(self) -> Corridor:
        self.made.append(Corridor())
        return self.made[-1]


class Speaker:
    """Says three tokens that nobody else says, and keeps every request; ``refuse`` may answer with an error."""

    def __init__(self, refuse: Callable[[GenerationRequest], str] = lambda request: "") -> None:
        self.requests: list[GenerationRequest] = []
        self.refuse = refuse

    async def generate(self, request: GenerationRequest) -> Completion:
        self.requests.append(request)
        if error := self.refuse(request):
            return Completion(request.request_id, (), (), (), "error", error=error)
        number = len(self.requests)
        tokens = (50 + number % 10, 2 + number % 7, 1)[-request.sampling.max_tokens :]
        return Completion(request.request_id, tokens, (-0.5,) * len(tokens), ((number // 8, len(tokens)),), "stop")

    def note_fault(self, what: str, detail: str) -> None:
        raise AssertionError(f"{what}: {detail}")


def play(config: Config | None, speaker: Speaker, task: CorridorTask | MemoryTask | None = None) -> Episode:
    task = task or CorridorTask()

    async def run() -> Episode:
        context = setup_of(config.context, task) if config else None
        manager = EnvManager(
            task, speaker, step_timeout=5, trajectory_timeout=30, is_stale=lambda _: False, context=context  # type: ignore[arg-type]
        )  # fmt: skip
        episode = Episode("t0", "g0", PROMPT, 0.0)
        try:
            await manager.play(episode, SAMPLING)
        except TrajectoryError as error:
            episode.waiting_for = f"{error.cause}: {error.detail}"
        return episode

    return asyncio.run(run())


def words(dropped: Sequence[int]) -> tuple[int, ...]:
    """A summary by a function: how much there was, and its last token."""
    return (30 + len(dropped) % 8, dropped[-1])


def rules(*overrides: str) -> Config:
    return load_config(None, ["context.tokens=40", *overrides])


CASES = {
    "restart": rules("context.strategy=restart", "context.recent_turns=2"),
    "forget everything": rules("context.strategy=restart", "context.recent_turns=0"),
    "summary": rules("context.strategy=summarise", "context.ask=[60, 61]", "context.recent_turns=1"),
    "function": rules("context.strategy=summarise", f"context.summary={__name__}:words"),
}


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function's name resolves however the tests were collected."""
    import sys

    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or _this_module())


def _this_module():  # type: ignore[no-untyped-def]
    import types

    module = types.ModuleType(__name__)
    module.words = words  # type: ignore[attr-defined]
    return module


def assert_trained_is_what_was_seen(episode: Episode, requests: Sequence[GenerationRequest]) -> list[TrainSample]:
    """Walk the samples: before each run of trained tokens stands exactly one request's context, in order, and after it
    exactly what was answered; nothing is trained twice and nothing that was said is left out."""
    samples = to_samples(episode.trajectory(0.0, reward=1.0))
    asked = iter(requests)
    said = iter(episode.turns)
    for sample in samples:
        assert len(sample.token_ids) == len(sample.loss_mask) == len(sample.logprobs)
        position = 0
        while position < len(sample.token_ids):
            begin = position
            while not sample.loss_mask[position]:
                assert sample.logprobs[position] == 0.0
                position += 1
            assert position > begin
            assert sample.token_ids[:position] == next(asked).token_ids
            turn = next(said)
            end = position + len(turn.action_ids)
            assert sample.token_ids[position:end] == turn.action_ids
            assert all(sample.loss_mask[position:end])
            assert sample.logprobs[position:end] == turn.logprobs
            position = end
        assert sum(count for _, count in sample.versions) == sum(sample.loss_mask)
    assert next(asked, None) is None
    assert next(said, None) is None
    return samples


@pytest.mark.parametrize("case", CASES)
def test_the_trained_tokens_are_exactly_those_the_policy_saw(case: str) -> None:
    speaker, task = Speaker(), CorridorTask()
    episode = play(CASES[case], speaker, task)
    samples = assert_trained_is_what_was_seen(episode, speaker.requests)
    assert len(samples) >= 2
    assert max(len(sample.token_ids) for sample in samples) <= 40
    assert len(task.made[0].seen) == 12, "the environment's turns are those of the episode, summaries are not"
    assert {sample.trajectory_id for sample in samples} == {"t0"}
    assert len({sample.first_turn for sample in samples}) == len(samples)


def test_keep_is_one_context_as_before() -> None:
    config = load_config(None, [])
    task, speaker = CorridorTask(), Speaker()
    task.max_context_tokens = 200
    episode = play(config, speaker, task)
    (sample,) = assert_trained_is_what_was_seen(episode, speaker.requests)
    assert sample.first_turn == 0
    assert all(turn.context is None for turn in episode.turns)
    assert not episode.truncated


@pytest.mark.parametrize("case", CASES)
def test_what_was_left_out_is_recorded(case: str) -> None:
    """Every token of every earlier turn is in the new context or counted as dropped."""
    speaker = Speaker()
    episode = play(CASES[case], speaker)
    begins = [(index, turn.context) for index, turn in enumerate(episode.turns) if turn.context is not None]
    assert begins
    for index, start in begins:
        assert start.reason == ("restart" if "context" not in case and case not in ("summary", "function") else case)
        assert start.dropped_turns > 0
        assert start.dropped_tokens > 0
        assert start.token_ids[:3] == (40, 41, 42), "the task stays"
        if case == "summary":
            summary = episode.turns[index - 1]
            assert summary.observation_ids == (60, 61)
            assert start.token_ids[3 : 3 + len(summary.action_ids)] == summary.action_ids
    if case == "restart":
        first = begins[0][0]
        whole = sum(len(t.observation_ids) + len(t.action_ids) for t in episode.turns[:first])
        assert len(begins[0][1].token_ids) + begins[0][1].dropped_tokens == whole


def test_the_environment_and_the_reward_are_told_nothing_of_the_policys_summaries() -> None:
    task = CorridorTask()
    trajectory = play(CASES["summary"], Speaker(), task).trajectory(0.0)
    assert len(trajectory.turns) > 12
    assert list(trajectory.actions) == task.made[0].seen


def test_no_summary_is_asked_for_that_would_leave_no_room() -> None:
    """The observation fills the context almost alone: the episode goes on without what was before."""
    speaker = Speaker()

    class Loud(Corridor):
        async def step(self, action_ids: tuple[int, ...]) -> StepResult:
            answer = await super().step(action_ids)
            return StepResult(Observation((9,) * 52), 0.0, answer.done)

    class LoudTask(CorridorTask):
        def environment(self) -> Corridor:
            self.made.append(Loud())
            return self.made[-1]

    task = LoudTask()
    episode = play(CASES["summary"], speaker, task)
    assert len(task.made[0].seen) == 12
    assert {turn.context.reason for turn in episode.turns if turn.context} == {"restart"}
    assert list(episode.trajectory(0.0).actions) == task.made[0].seen
    assert_trained_is_what_was_seen(episode, speaker.requests)


def test_what_is_recorded_survives_the_store_and_a_checkpoint(tmp_path: Path) -> None:
    import json
    from dataclasses import asdict

    trajectory = play(CASES["summary"], Speaker()).trajectory(1.0, reward=1.0)
    assert len(trajectory.contexts) > 2
    store = TrajectoryStore(tmp_path)
    store.append(trajectory, 0, "trained", position=0)
    store.close()
    (row,) = read_trajectories(tmp_path).to_pylist()
    assert to_trajectory(row) == trajectory
    assert parquet_samples(row) == to_samples(trajectory), "replay trains on the same contexts"
    assert _trajectory_from_json(json.loads(json.dumps(asdict(trajectory)))) == trajectory


def test_several_contexts_of_one_trajectory_are_one_member_of_its_group() -> None:
    rewards, groups, names = [1.0, 1.0, 1.0, 0.0], ["g"] * 4, ["a", "a", "a", "b"]
    plain = group_advantages([1.0, 0.0], ["g", "g"], normalize=True)
    assert group_advantages(rewards, groups, names, normalize=True) == [plain[0]] * 3 + [plain[1]]
    assert leave_one_out(rewards, groups, names) == [1.0, 1.0, 1.0, -1.0]
    assert group_counts([1.0, 1.0], ["g", "g"], ["a", "a"]).lone == 1


# -- an engine without room --------------------------------------------------------------------------------------------


def test_a_context_that_the_engine_has_no_room_for_is_shortened_and_asked_once_more() -> None:
    error = "The decoder prompt (length 30) is longer than the maximum model length of 28."
    speaker = Speaker(lambda request: error if len(request.token_ids) > 28 else "")
    task = CorridorTask()
    task.max_context_tokens = 200
    episode = play(load_config(None, []), speaker, task)
    answered = [request for request in speaker.requests if len(request.token_ids) <= 28]
    assert len(answered) < len(speaker.requests)
    assert len({request.request_id for request in speaker.requests}) == len(speaker.requests)
    assert_trained_is_what_was_seen(episode, answered)
    assert len(task.made[0].seen) == 12
    assert {turn.context.reason for turn in episode.turns if turn.context} == {"shortened"}


@pytest.mark.parametrize(
    ("error", "cause"),
    [("CUDA out of memory", "engine_out_of_memory"), ("prompt is longer than the maximum model length", "context_too_long")],
)  # fmt: skip
def test_then_it_is_masked_by_cause(error: str, cause: str) -> None:
    speaker = Speaker(lambda request: error if request.turn >= 5 else "")
    episode = play(load_config(None, ["context.strategy=restart"]), speaker)
    assert episode.waiting_for.startswith(f"{cause}: ")
    assert len([request for request in speaker.requests if request.turn == 5]) == 2, "once more, and no more"


def test_another_error_of_the_engine_is_not_asked_again() -> None:
    speaker = Speaker(lambda request: "vLLM ended the request with an error" if request.turn == 2 else "")
    assert play(load_config(None, []), speaker).waiting_for.startswith("generation_error")
    assert len(speaker.requests) == 3


def test_it_is_counted_in_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = SimWorker._enqueue

    def enqueue(self: SimWorker, request: GenerationRequest, now: float) -> None:
        honest(self, request, now)
        sequence = self._known[request.request_id]
        if request.trajectory_id == "t00000003" and request.turn == 0 and sequence is not None:
            self._finish(sequence, "error", "out of memory")

    monkeypatch.setattr(SimWorker, "_enqueue", enqueue)
    ledger = simulate(load_config(None, ["run.steps=2", "evaluation.prompts=2", "rollout.groups_per_step=2"])).ledger
    assert ledger["failed_by_cause"] == {"engine_out_of_memory": 1}


# -- in whole runs -----------------------------------------------------------------------------------------------------


def long_run(*overrides: str) -> Config:
    sizes = [
        "run.steps=3",
        "rollout.workers=2",
        "rollout.groups_per_step=3",
        "rollout.group_size=3",
        "evaluation.prompts=2",
    ]
    costs = ["rollout.engine.max_model_len=200", "sim.response_tokens_max=24", "sim.turns_max=30", "context.tokens=120"]
    return load_config(None, [*sizes, *costs, "rollout.environments=18", *overrides])


@pytest.mark.parametrize("faults", [0.0, 0.05])
@pytest.mark.parametrize("stream", ["false", "true"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_runs_with_several_contexts_train_what_was_said_and_lose_nothing(
    strategy: str, stream: str, faults: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The audit compares each trained token with what the simulated policy says at that turn."""
    honest, contexts = SimTrainer.train_step, []

    async def train_step(self: SimTrainer, batch: TrainBatch) -> TrainMetrics:
        contexts.extend(sample.first_turn for sample in batch.samples)
        return await honest(self, batch)

    monkeypatch.setattr(SimTrainer, "train_step", train_step)
    result = simulate(
        long_run(strategy, "context.ask=[7, 8]", f"trainer.stream={stream}", f"sim.fault_rate={faults}", "run.seed=1")
    )
    assert result.summary["reason"] == "completed"
    assert sum(first > 0 for first in contexts) > 10


def test_a_context_that_loses_a_token_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation: the new context's record lacks its last token."""
    from dataclasses import replace

    honest = Trajectory.contexts.fget  # type: ignore[attr-defined]

    def damaged(self: Trajectory):  # type: ignore[no-untyped-def]
        parts = honest(self)
        return tuple(
            (first, replace(part, turns=(replace(part.turns[0], action_ids=part.turns[0].action_ids[1:]), *part.turns[1:])))
            if first
            else (first, part)
            for first, part in parts
        )  # fmt: skip

    monkeypatch.setattr(Trajectory, "contexts", property(damaged))
    found = simulate(long_run(STRATEGIES[0]), strict=False).violations
    assert any("context from turn" in line for line in found)


# -- the rules ---------------------------------------------------------------------------------------------------------


@given(
    st.sampled_from(["restart", "summarise"]),
    st.integers(0, 5),
    st.lists(st.integers(1, 20), max_size=12),
    st.integers(1, 20),
    st.integers(1, 10),
)
def test_what_stays_fits_with_a_whole_response(
    strategy: str, recent: int, turns: list[int], observation: int, head: int
) -> None:
    reserve = (6, 2) if strategy == "summarise" else (0, 0)
    found = ContextRules(strategy, 60, 8, recent, *reserve)
    count = found.kept(head, turns, observation)
    assert 0 <= count <= min(recent, len(turns))
    context = head + found.summary + sum(turns[len(turns) - count :])
    if count:
        assert not found.must_begin_anew(context, observation)


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (["context.strategy=summarise"], "context.ask"),
        (["context.tokens=100"], "context.tokens"),
        (["context.strategy=summarise", "context.ask=[1]", "context.tokens=10"], "context.tokens"),
        (["context.ask=[999]"], "context.ask"),
        (["context.strategy=summarise", "context.summary=no.such.module:f"], "context.summary"),
        (["context.tasks.toy.tokens=100"], "context.tasks.toy.tokens"),
        (["context.strategy=forget"], "context.strategy"),
    ],
)
def test_rules_that_do_not_fit_the_task_are_one_clear_error(overrides: list[str], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        setup_of(load_config(None, overrides).context, CorridorTask())
    assert caught.value.field == field


def test_a_task_may_have_rules_of_its_own() -> None:
    config = load_config(None, ["context.strategy=restart", "context.tasks.toy.strategy=keep"])
    assert setup_of(config.context, CorridorTask())[0].strategy == "keep"
    assert setup_of(config.context, SimTask(config))[0].strategy == "restart"


# -- memory ------------------------------------------------------------------------------------------------------------


def test_a_note_outlives_the_context_and_never_reaches_the_environment() -> None:
    task = MemoryTask(CorridorTask(), turns=2, longest=8)
    note, recall, memory = task.note_id, task.recall_id, task.memory_id

    async def run() -> tuple[list[StepResult], list[tuple[int, ...]], str]:
        environment = task.environment()
        await environment.reset(PROMPT)
        answers = [await environment.step(action) for action in ((note, 5, 6, 7, 1), (20, 1), (recall, 6, 1))]
        cause = ""
        try:
            await environment.step((note, 5, 1))
        except TrajectoryError as error:
            cause = error.cause
        seen = environment._inner.seen  # type: ignore[attr-defined]
        await environment.close()
        return answers, seen, cause

    answers, seen, cause = asyncio.run(run())
    assert [answer.observation.token_ids for answer in answers] == [(memory,), (11, 9), (memory, 5, 6, 7)]
    assert seen == [(20, 1)]
    assert cause == "memory_turns"
    assert task.vocabulary[note : memory + 1] == ("<note>", "<recall>", "<memory>")


def test_an_answer_is_never_longer_than_it_may_be_and_names_the_best_note_first() -> None:
    task = MemoryTask(CorridorTask(), turns=9, longest=6)

    async def run() -> list[tuple[int, ...]]:
        environment = task.environment()
        await environment.reset(PROMPT)
        for words_ in ((5, 6), (7, 8, 9), (6, 7, 8)):
            await environment.step((task.note_id, *words_, 1))
        found = [
            (await environment.step((task.recall_id, *asked, 1))).observation.token_ids for asked in ((7, 8), (), (30,))
        ]
        await environment.close()
        return found

    memory = task.memory_id
    assert asyncio.run(run()) == [(memory, 6, 7, 8, 7, 8), (memory, 6, 7, 8, 7, 8), (memory,)]


def letters(notes: Sequence[Sequence[int]]) -> list[list[float]]:
    """An embedding: tokens of one ten mean the same."""
    return [[1e-3 + sum(token // 10 == ten for token in note) for ten in range(4)] for note in notes]


def test_with_an_embedding_the_nearest_notes_answer_though_they_share_no_word() -> None:
    pytest.importorskip("faiss")
    asked: list[int] = []

    def embed(notes: Sequence[Sequence[int]]) -> list[list[float]]:
        asked.append(len(notes))
        return letters(notes)

    rank = NearestVectors(embed)
    notes = [(11, 12), (21, 22), (13, 25), (22, 21)]
    assert rank(notes, (14,)) == [0, 2, 3, 1], "the newest first among equals"
    assert rank([*notes, (31,)], (14,)) == [0, 2, 4, 3, 1]
    assert asked == [5, 1], "what is known is not embedded again"
    assert (rank(notes, ()), rank([], (14,))) == ([3, 2, 1, 0], [])
    for wrong in ([1.0], [[1.0], [float("nan")]], [[1.0]], [[], []]):
        with pytest.raises(TrajectoryError, match="one finite vector each"):
            NearestVectors(lambda notes, said=wrong: said)([(1,)], (2,))  # type: ignore[misc]


def test_an_embedding_is_a_function_that_exists_and_needs_a_memory_and_its_package() -> None:
    name = "builtins:list"
    with pytest.raises(ConfigError, match=r"task\.memory\.embed = .*memory needs turns"):
        load_config(None, [f"task.memory.embed={name}"])
    config = load_config(None, ["task.name=household", f"task.memory={{turns=3, embed='{name}'}}"])
    assert preflight.make_task(config).name == "household"
    assert [package.extra for package in requirements.required_packages(config)] == ["vectors"]
    nothing = load_config(None, ["task.name=household", "task.memory={turns=3, embed='no_module:f'}"])
    with pytest.raises(ConfigError, match=r"task\.memory\.embed = .*cannot be imported"):
        preflight.make_task(nothing)


def test_a_config_puts_a_memory_around_any_task_and_rewards_see_what_the_environment_saw() -> None:
    """A household: an action that is replayed where it was none would change the outcome, or be refused."""
    config = load_config(None, ["task.name=household", "task.memory={turns=3, longest=8, notes=2}"])
    task = preflight.make_task(config)
    inner = preflight.make_task(load_config(None, ["task.name=household"]))
    assert isinstance(task, MemoryTask)
    assert (task.turns, task.longest, task.notes) == (3, 8, 2)
    assert len(task.vocabulary) % 32 == 0
    assert task.max_turns == inner.max_turns + 3
    assert task.reward == inner.reward  # type: ignore[attr-defined]
    assert not hasattr(task, "environment_target")
    prompt = next(task.prompts("train", 0))
    [(_, solved)] = [(list(tokens), mask) for tokens, mask in task.demonstrations(1, 0, 1.0)]
    assert any(solved)
    words = HouseholdTask.words
    turns = [words.turn(said) for _, said in HouseholdTask(1).expert(prompt.payload)]
    spoken = [(task.note_id, 5, 1), *turns[:-1], (task.recall_id, 1), (*turns[-1][:-1], task.memory_id, 1)]

    async def play() -> list[StepResult]:
        environment = task.environment()
        await environment.reset(prompt)
        return [await environment.step(action) for action in spoken]

    assert asyncio.run(play())[-1].done
    payload = {
        "task": "household",
        "prompt": prompt.payload,
        "actions": [list(turn) for turn in task.played("household", spoken)],
    }
    assert household_goal(payload)["reward"] == 1.0
    assert task.played("household", spoken) == turns


def test_what_a_reward_function_is_sent_are_the_actions_that_were_played() -> None:
    sent: list[Any] = []

    class Recorded(HttpReward):
        async def call(self, event: Any) -> Any:
            sent.append(event)
            return {"reward": 1.0}

    trajectory = Trajectory("t", "g", "x", PROMPT, (Turn((2,), (9, 1), (0.0, 0.0), ((0, 2),)),), None, "1", 0, False)

    async def scored() -> None:
        await Recorded("http://127.0.0.1:1/").score(trajectory)
        await Recorded("http://127.0.0.1:1/", played=lambda task, actions: actions[1:]).score(trajectory)

    asyncio.run(scored())
    assert [event["actions"] for event in sent] == [[[9, 1]], []]
