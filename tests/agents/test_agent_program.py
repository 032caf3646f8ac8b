"""Agent programs in the real sandbox, and with a real vLLM engine: from a process with a base URL to a trajectory."""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from orchestrator.agents import agent_session
from orchestrator.agents.agent_manager import AgentManager, OutcomeReward
from orchestrator.agents.chat_template import VocabularyChat
from orchestrator.agents.manager_choice import manager_of, outcome_scores
from orchestrator.api import Completion, ConfigError, GenerationRequest, Sampling, TrajectoryError
from orchestrator.config import load_config
from orchestrator.config.agent_keys import AgentSection
from orchestrator.envs import EnvManager, Episode, StaleTrajectory
from orchestrator.events import EventLog, MemorySink
from orchestrator.proxy.gateway import LLMProxy
from orchestrator.proxy.worker_state import WorkerLimits
from orchestrator.rewards.reward_client import reward_event
from orchestrator.runtime.preflight import make_task
from orchestrator.tasks import splits
from orchestrator.tasks.agent_task import AgentTask
from orchestrator.tasks.agent_trial import try_agent
from orchestrator.transfer import Publisher, RelayEndpoint

ROOT = Path(__file__).parents[2]
CHAT = VocabularyChat()
pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")

HEAD = """
import json, os, sys, time, urllib.request, socket
def ask(text, seconds=30):
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, key)
    return json.load(urllib.request.urlopen(request, timeout=seconds))["choices"][0]["message"]["content"]
"""


class EchoProxy:
    """Says the last character of what it was shown before the mark of the answer, as scripted policy."""

    def __init__(self, delay: float = 0.0) -> None:
        self.delay, self.requests, self.aborted = delay, 0, 0

    async def generate(self, request: GenerationRequest) -> Completion:
        self.requests += 1
        try:
            await asyncio.sleep(self.delay)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        return Completion(request.request_id, (request.token_ids[-3], CHAT.end_id), (-0.5, -0.1), ((4, 2),), "stop")

    def note_fault(self, what: str, detail: str) -> None:
        raise AssertionError(what, detail)


def task_of(folder: Path, source: str, **settings: Any) -> AgentTask:
    (folder / "agent.py").write_text(HEAD + source)
    (folder / "prompts.txt").write_text("".join(f"state {number}\n" for number in range(60)))
    files = (str(folder / "agent.py"),)
    chosen = AgentSection(
        command=("python3", "agent.py"), files=files, prompts=str(folder / "prompts.txt"), memory_mb=256, **settings
    )
    return AgentTask(2, chosen)


async def play(task: AgentTask, proxy: Any, name: str = "t0", limit: float = 20.0, stale: bool = False) -> Episode:
    manager = AgentManager(task, proxy, step_timeout=5.0, trajectory_timeout=limit, is_stale=lambda _: stale)
    episode = Episode(name, "g0", next(task.prompts("train", 0)), 0.0)
    try:
        await manager.play(episode, Sampling(16, stop_token_ids=(task.end_id,)))
    except (TrajectoryError, StaleTrajectory) as error:
        episode.waiting_for = getattr(error, "cause", type(error).__name__)
    return episode


def test_a_program_asks_over_its_loopback_and_its_last_line_is_the_reward(tmp_path: Path) -> None:
    source = (
        'first = ask("xyz"); print("said", first); assert os.environ["AGENT_PROMPT"] == sys.stdin.read(); print(0.25)'
    )

    async def run() -> tuple[Episode, float]:
        episode = await play(task_of(tmp_path, source), EchoProxy())
        return episode, await OutcomeReward().score(episode.trajectory(0.0))

    episode, reward = asyncio.run(run())
    assert episode.waiting_for == "the agent"
    assert [CHAT.text(turn.action_ids) for turn in episode.turns] == ["z"]
    assert (episode.turns[-1].reward, episode.turns[-1].done, reward) == (0.25, True, 0.25)
    assert episode.env_version == "agent 1"


def test_the_official_client_needs_a_folder_to_read_and_no_change(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    openai = pytest.importorskip("openai")
    libraries = Path(openai.__file__).parents[1]
    if not all(folder.stat().st_mode & 0o001 for folder in (libraries, *libraries.parents)):
        pytest.skip(f"{libraries} is private: sandboxes run as another user")
    shared = Path(tempfile.mkdtemp())  # pytest's own folder is private
    request.addfinalizer(lambda: shutil.rmtree(shared))
    shared.chmod(0o755)
    (shared / "extra.txt").write_text("readable")
    source = f"""
import openai
assert open({str(shared / "extra.txt")!r}).read() == "readable"
client = openai.OpenAI()
stream = client.chat.completions.create(model="gpt-4o", messages=[{{"role": "user", "content": "xyz"}}], stream=True)
said = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
try: open({str(shared / "extra.txt")!r}, "w")
except OSError: print(float(said == "z"))
"""
    readable = (str(libraries), str(shared))
    task = task_of(tmp_path, source, readable=readable, variables={"PYTHONPATH": str(libraries)})
    version = asyncio.run(task.sandbox().python("import sys; print(sys.version_info[:2])")).stdout.decode().strip()
    if version != str(sys.version_info[:2]):
        pytest.skip(f"the sandbox has Python {version}: its libraries are others")
    episode = asyncio.run(play(task, EchoProxy()))
    assert episode.waiting_for == "the agent"
    assert episode.turns[-1].reward == 1.0


@pytest.mark.parametrize(
    ("source", "settings", "end"),
    [
        ("ask('x'); sys.exit(3)", {}, "agent_error"),
        ("ask('x'); print('done')", {}, "agent_output"),
        ("ask('x'); print('nan')", {}, "agent_output"),
        ("print(1)", {}, "agent_silent"),
        ("ask('x'); b = bytearray(1 << 30); print(1)", {}, "agent_error"),
        ("ask('x'); print('a' * (2 << 20))", {}, "agent_limit"),
        ("ask('x'); sys.exit(0)", {"reward": "exit"}, 1.0),
        ("ask('x'); sys.exit(7)", {"reward": "exit", "zero_exit": 7}, 0.0),
        ("ask('x'); sys.exit(1)", {"reward": "exit", "zero_exit": 7}, "agent_error"),
        ("ask('x')\nwhile True: time.sleep(1)", {}, "trajectory_timeout"),
    ],
)
def test_whatever_a_program_does_ends_its_trajectory_with_a_cause_or_a_reward(
    tmp_path: Path, source: str, settings: dict[str, Any], end: str | float
) -> None:
    limit = 2.0 if end == "trajectory_timeout" else 20.0
    episode = asyncio.run(play(task_of(tmp_path, source, **settings), EchoProxy(), limit=limit))
    if isinstance(end, float):
        assert (episode.waiting_for, episode.turns[-1].reward) == ("the agent", end)
    else:
        assert episode.waiting_for == end
        assert len(episode.turns) == (end != "agent_silent"), "what there is of it survives"


@pytest.mark.parametrize(
    ("rest", "end"),
    [("sys.exit(1)", "generation_timeout"), ("print(0.0)", "generation_timeout"), ("ask('y'); sys.exit(1)", 0.0)],
)
def test_an_engine_that_was_too_slow_is_no_reward_of_0(tmp_path: Path, rest: str, end: str | float) -> None:
    class SlowOnce(EchoProxy):
        async def generate(self, request: GenerationRequest) -> Completion:
            self.delay = 0.0 if self.requests == 1 else 60.0
            return await super().generate(request)

    source = f"\ntry: ask('x')\nexcept OSError: {rest}"
    reward = "output" if rest.startswith("print") else "exit"
    episode = asyncio.run(play(task_of(tmp_path, source, reward=reward, request_seconds=0.2), SlowOnce()))
    assert (episode.turns[-1].reward if isinstance(end, float) else episode.waiting_for) == end


def test_a_start_state_too_long_for_a_variable_is_on_standard_input(tmp_path: Path) -> None:
    source = "state = sys.stdin.read(); assert 'AGENT_PROMPT' not in os.environ; ask('x'); print(len(state))"
    task = task_of(tmp_path, source)
    (tmp_path / "prompts.txt").write_text("".join(f"{number:03} {'x' * (1 << 17)}\n" for number in range(20)))
    long = AgentTask(2, AgentSection(command=("python3",), prompts=str(tmp_path / "prompts.txt")))
    long.program = task.program
    episode = asyncio.run(play(long, EchoProxy()))
    assert (episode.waiting_for, episode.turns[-1].reward) == ("the agent", (1 << 17) + 4)


def test_a_program_asks_for_as_much_at_once_as_its_settings_allow_from_threads_too(tmp_path: Path) -> None:
    source = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(40) as pool: print(len(list(pool.map(ask, map(str, range(40))))))
"""

    class AllAtOnce(EchoProxy):
        async def generate(self, request: GenerationRequest) -> Completion:
            completion = await super().generate(request)
            while self.requests < 40:
                await asyncio.sleep(0.01)
            return completion

    task = task_of(tmp_path, source, concurrent=40, max_turns=40)
    task.program = replace(
        task.program, limits=replace(task.program.limits, memory_bytes=AgentSection().memory_mb << 20)
    )
    episode = asyncio.run(play(task, AllAtOnce()))
    assert (episode.waiting_for, episode.turns[-1].reward, len(episode.turns)) == ("the agent", 40.0, 40)


def test_a_program_that_asks_on_whatever_it_is_told_ends_before_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_session, "MOST_REFUSALS", 30)
    source = """
while True:
    try: ask('x')
    except Exception: pass
"""
    episode = asyncio.run(play(task_of(tmp_path, source, max_turns=2), EchoProxy()))
    assert (episode.waiting_for, len(episode.turns)) == ("agent_limit", 2)


def test_a_program_reaches_nothing_but_the_endpoint(tmp_path: Path) -> None:
    source = """
ask("x")
with socket.create_server(("127.0.0.1", 0)) as own: pass
assert [line.split(":")[0].strip() for line in open("/proc/net/dev").readlines()[2:]] == ["lo"], "its own network"
for place in (("127.0.0.1", int(os.environ["OUTSIDE"])), ("1.1.1.1", 80)):
    try:
        socket.create_connection(place, timeout=2)
    except OSError:
        continue
    sys.exit(4)
with socket.socket(socket.AF_UNIX) as unix:
    try:
        unix.connect(chr(0) + os.environ["ABSTRACT"])
    except OSError:
        pass
    else:
        sys.exit(5)
assert not os.path.exists("/root") and os.listdir("/box") == sorted([".bridge.py", "agent.py"])
print(1)
"""
    abstract = f"rl-coserve-{os.getpid()}"

    async def run() -> Episode:
        servers = [
            await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0),
            await asyncio.start_unix_server(lambda reader, writer: writer.close(), f"\0{abstract}"),
        ]
        port = str(servers[0].sockets[0].getsockname()[1])
        try:
            variables = {"OUTSIDE": port, "ABSTRACT": abstract}
            return await play(task_of(tmp_path, source, variables=variables), EchoProxy())
        finally:
            for server in servers:
                server.close()

    assert asyncio.run(run()).waiting_for == "the agent"


def test_a_program_that_is_killed_takes_its_open_request_along(tmp_path: Path) -> None:
    async def run() -> tuple[Episode, EchoProxy]:
        proxy = EchoProxy(delay=60.0)
        episode = await play(task_of(tmp_path, "ask('x')"), proxy, limit=2.0)
        await asyncio.sleep(0.05)
        return episode, proxy

    episode, proxy = asyncio.run(run())
    assert (episode.waiting_for, episode.turns) == ("trajectory_timeout", [])
    assert (proxy.requests, proxy.aborted) == (1, 1)


def test_a_client_that_gives_up_and_asks_again_is_answered_and_the_first_answer_is_aborted(tmp_path: Path) -> None:
    source = "\ntry: ask('x', 0.5)\nexcept OSError: pass\ntime.sleep(0.3); print(float(ask('y', 20) == 'y'))"

    class SlowFirst(EchoProxy):
        async def generate(self, request: GenerationRequest) -> Completion:
            self.delay = 0.0 if self.requests else 60.0
            return await super().generate(request)

    async def run() -> tuple[Episode, SlowFirst]:
        proxy = SlowFirst()
        return await play(task_of(tmp_path, source), proxy), proxy

    episode, proxy = asyncio.run(run())
    assert proxy.aborted == 1
    assert [turn.reward for turn in episode.turns] == [1.0]


def test_a_trajectory_that_is_stale_is_evicted_and_its_program_killed(tmp_path: Path) -> None:
    source = "ask('x')\ntry: ask('y')\nexcept OSError: time.sleep(60)"
    episode = asyncio.run(play(task_of(tmp_path, source), EchoProxy(), stale=True))
    assert episode.waiting_for == "StaleTrajectory"
    assert len(episode.turns) == 1


# ------------------------------------------------------------------------------------------------------------- config


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["task.agent.command=[]"], r"task\.agent\.command"),
        (["task.agent.prompts=nowhere.txt"], r"task\.agent\.prompts"),
        (["task.agent.files=['nowhere.py']"], r"task\.agent\.files"),
        (["task.agent.readable=['somewhere']"], r"task\.agent\.readable"),
        (["task.agent.response_tokens=96"], r"task\.agent\.response_tokens"),
        (["task.agent.tokenizer=nowhere"], r"task\.agent\.tokenizer"),
        (["task.agent.comand=['x']"], "no such key"),
        (["task.name=nim"], "only for name"),
        (["model.path=somewhere"], "tokenizer of model.path"),
        (["environment.backend=subprocess"], "its own sandbox"),
        (["context.strategy=restart"], "decides itself what the policy sees"),
        (["task.memory.turns=2"], "the agent keeps"),
    ],
)
def test_a_config_that_no_run_could_use_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], words: str
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError, match=words):
        make_task(load_config(ROOT / "examples/agents.toml", overrides))


@pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes run as another user only when root starts them")
def test_a_folder_that_the_sandboxes_user_cannot_reach_is_said_before_a_run(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir(mode=0o700)
    (tmp_path / "private/inside").mkdir()
    with pytest.raises(ConfigError, match="private"):
        task_of(tmp_path, "", readable=(str(tmp_path / "private/inside"),))


def test_the_example_is_played_by_agents_and_scored_by_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(ROOT / "examples/agents.toml")
    task = make_task(config)
    assert manager_of(task) is AgentManager
    assert outcome_scores(config.reward, task)
    named = load_config(ROOT / "examples/agents.toml", ["reward.url=http://127.0.0.1:1"])
    assert not outcome_scores(named.reward, task)
    assert manager_of(make_task(load_config(None))) is EnvManager


def test_a_function_that_scores_reads_what_was_said_and_needs_nothing_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task_of(tmp_path, "ask('xyz')")
    monkeypatch.chdir(tmp_path)
    agent = ["task.name=agent", 'task.agent.command=["python3", "agent.py"]', 'task.agent.files=["agent.py"]']
    named = [*agent, "task.agent.prompts=prompts.txt", "task.heldout_maps=2", "evaluation.prompts=2"]
    task = make_task(load_config(None, [*named, "reward.function=mine:score"]))
    assert isinstance(task, AgentTask)
    episode = asyncio.run(play(task, EchoProxy()))
    assert episode.waiting_for == "the agent"
    assert reward_event(episode.trajectory(0.0), None, task.said)["texts"] == ["z"]
    printed = make_task(load_config(None, named))
    assert isinstance(printed, AgentTask)
    assert asyncio.run(play(printed, EchoProxy())).waiting_for == "agent_output"


@pytest.mark.parametrize(
    ("source", "refused", "note"),
    [
        ("import no_such_module", "No module named 'no_such_module'", ""),
        ("print(1.0)", "agent_silent", ""),
        ("json.loads(ask('x'))", "", "agent_error: the agent ended with exit code 1"),
        ("print(len(ask('x')))", "", ""),
    ],
)
def test_a_program_is_tried_before_a_run_with_a_word_for_an_answer(
    tmp_path: Path, source: str, refused: str, note: str
) -> None:
    task, config = task_of(tmp_path, source), load_config(None)
    if refused:
        with pytest.raises(ConfigError, match=rf"task\.agent\.command(.|\n)*{refused}"):
            try_agent(config, task)
        return
    notes = try_agent(config, task)
    assert len(notes) == bool(note)
    assert note in "".join(notes)
    assert asyncio.run(play(task, EchoProxy())).turns, "it belongs to no event loop that is over"


def test_a_line_ends_where_json_lines_end(tmp_path: Path) -> None:
    lines = [json.dumps({"q": f"{number} \u2028 \x85 \x0c"}, ensure_ascii=False) for number in range(30)]
    (tmp_path / "prompts.txt").write_bytes("\r\n".join(lines).encode())
    task = AgentTask(1, AgentSection(command=("true",), prompts=str(tmp_path / "prompts.txt")))
    assert {prompt.payload for prompt in islice(task.prompts("train", 0), task.epoch_prompts)} < set(lines)


def test_every_line_is_asked_before_any_comes_again(tmp_path: Path) -> None:
    task = task_of(tmp_path, "")
    lines = [prompt.payload for prompt in islice(task.prompts("train", 3), 2 * task.epoch_prompts)]
    first, second = lines[: task.epoch_prompts], lines[task.epoch_prompts :]
    held = {prompt.payload for prompt in task.prompts("heldout", 0)}
    assert sorted(first) == sorted(second) == sorted(set(first))
    assert first != second
    assert not held & set(first)
    assert all(
        splits.is_heldout(splits.key_of(f"state {number}")) != (f"state {number}" in first) for number in range(60)
    )


# ------------------------------------------------------------------------------------------------------- a real engine


class Recorded:
    """A worker of a proxy; keeps what it was sent and what it answered."""

    name = "vllm-0"

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.sent: dict[str, GenerationRequest] = {}
        self.answered: dict[str, Completion] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def add(self, requests: Sequence[GenerationRequest]) -> None:
        self.sent.update((request.request_id, request) for request in requests)
        await self._inner.add(requests)

    async def completions(self) -> list[Completion]:
        found: list[Completion] = await self._inner.completions()
        self.answered.update((done.request_id, done) for done in found)
        return found

    async def restart(self) -> None:
        raise AssertionError("the engine was taken for dead")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[tuple[Path, Publisher, RelayEndpoint]]:
    """A tiny Qwen3 that speaks in characters, and where its weights are published."""
    from megatron_rlplugin.tiny_model import create_qwen3

    sizes = {"hidden_size": 64, "intermediate_size": 128, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 32}
    options: dict[str, Any] = {**sizes, "max_positions": 128, "dtype": "float32", "seed": 0}
    create_qwen3(str(tmp_path / "model"), vocabulary=CHAT.vocabulary, **options)
    endpoint = RelayEndpoint(job="agents", kind="memory", master="agents")
    publisher = Publisher(endpoint)
    publisher.reset()
    yield tmp_path / "model", publisher, endpoint
    publisher.close()


@pytest.mark.engine
def test_with_a_real_engine_the_trajectory_is_what_the_worker_generated(
    engine: tuple[Path, Publisher, RelayEndpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six agent programs at once; the weights change while they talk."""
    from safetensors.torch import load_file

    from scripts.bench.probes.vllm.recompute_probe import publish
    from vllm_rlplugin.worker.inprocess_worker import EngineWorker

    model, publisher, endpoint = engine
    weights = load_file(str(model / "model.safetensors"))
    monkeypatch.chdir(ROOT)
    task = make_task(load_config(ROOT / "examples/agents.toml"))
    score = runpy.run_path(str(ROOT / "examples/agents/number.py"))["score"]

    async def run() -> tuple[Recorded, list[Episode]]:
        inner = EngineWorker(
            model=str(model), max_num_seqs=8, max_model_len=96, kv_cache_mb=2, relay=endpoint.to_dict()
        )
        worker, fatal = Recorded(inner), list[Any]()
        events = EventLog(MemorySink(), asyncio.get_running_loop().time)
        proxy = LLMProxy([worker], events, limits=WorkerLimits(60.0), restarts=0, on_fatal=fatal.append)
        proxy.start()

        async def move_to(version: int) -> None:
            publish(publisher, version, weights)
            await proxy.suspend()
            await proxy.update(version)
            await proxy.resume()

        try:
            await move_to(0)
            manager = AgentManager(task, proxy, step_timeout=5.0, trajectory_timeout=90.0, is_stale=lambda _: False)
            prompts = task.prompts("train", 0)
            episodes = [Episode(f"t{number}", "g0", next(prompts), 0.0) for number in range(6)]
            sampling = Sampling(8, 1.0, stop_token_ids=(task.end_id,))
            async with asyncio.timeout(120), asyncio.TaskGroup() as group:
                for episode in episodes:
                    group.create_task(manager.play(episode, sampling))
                while len(worker.answered) < 4:
                    await asyncio.sleep(0.005)
                await move_to(1)
            assert not fatal
            return worker, episodes
        finally:
            await proxy.close()
            await inner.close()

    worker, episodes = asyncio.run(run())
    for episode in episodes:
        shown: tuple[int, ...] = ()
        for number, turn in enumerate(episode.turns):
            done, asked = worker.answered[f"{episode.id}/{number}"], worker.sent[f"{episode.id}/{number}"]
            assert (turn.action_ids, turn.logprobs, turn.versions) == (done.token_ids, done.logprobs, done.versions)
            assert asked.token_ids == (*shown, *turn.observation_ids)
            shown = (*asked.token_ids, *done.token_ids)
        trajectory = episode.trajectory(0.0)
        assert trajectory.token_ids == shown
        assert len(trajectory.contexts) == 1
        said = [CHAT.text(turn.action_ids) for turn in episode.turns]
        assert episode.turns[-1].reward == pytest.approx(max(score(text, int(episode.prompt.payload)) for text in said))
    spans = [version for episode in episodes for version, _ in episode.trajectory(0.0).versions]
    assert set(spans) == {0, 1}
    assert sum(map(len, (episode.turns for episode in episodes))) == len(worker.answered)
