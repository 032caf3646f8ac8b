"""A judge's profile (RollPacker 4.1): what its tokens take and its passes cost is measured, and its server goes by it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.api import ConfigError
from orchestrator.cli import main
from orchestrator.config import Config, load_config
from orchestrator.ops.profile_command import Wanted, own_judge
from orchestrator.policies.parallelism.engine_profile import EngineLayout, EngineProfile, EngineShape, ProfilePoint
from orchestrator.policies.serving.judge_residency import JudgeMemory, batch_size
from orchestrator.profiler.profile_file import ProfileFile, ProfileKey, load_profile, model_name
from orchestrator.rewards.host_launch import JUDGE_REFUSED, JudgeHost
from orchestrator.runtime import judge_setup
from tests.support.tiny_judge import LAYERS, write_judge
from vllm_rlplugin.judge import judge_server
from vllm_rlplugin.judge.judge_profiler import JudgeProfiler, identity, read_profile
from vllm_rlplugin.judge.streamed_model import JudgeQuestion, StreamedModel

ONE = EngineLayout()
PLACE: dict[str, Any] = {"device": "cpu", "threads": 1, "memory_mb": 12}
KV_BYTES = 2 * LAYERS * 64 * 4  # a token: key and value of each layer, one head of 64, float32


def law(batch: int, tokens: int) -> float:
    """Long prompts in batches are slower than one by one, short ones faster."""
    return 1.0 + batch * tokens * (0.001 if tokens < 100 else 0.01 * batch**0.5)


def profile(bytes_per_token: float = 1000.0) -> EngineProfile:
    sizes = [(batch, tokens) for batch in (1, 4, 16) for tokens in (16, 64, 1024)]
    points = [ProfilePoint("prefill", ONE, *size, law(*size)) for size in sizes]
    points += [ProfilePoint("decode", ONE, *size, 1.0) for size in sizes]
    return EngineProfile(points, [EngineShape(ONE, bytes_per_token, 1 << 20, 1, 1.0)])


def test_short_questions_are_computed_together_and_long_ones_as_few_as_are_fastest() -> None:
    measured = profile()
    assert batch_size(measured, 16, 4.0, 16) == 16
    assert batch_size(measured, 16, 4.0, 10) == 10, "all that wait, where that is no size that was measured"
    assert batch_size(measured, 1024, 1.0, 16) == 1
    assert batch_size(measured, 1024, 500.0, 16) == 16, "long answers are worth it again"


@given(st.integers(1, 64), st.integers(1, 2000), st.floats(1, 64))
def test_no_size_that_was_measured_answers_more_questions_per_second(waiting: int, tokens: int, said: float) -> None:
    measured = profile()

    def rate(count: int) -> float:
        decoding = said * measured.decode_seconds(count, tokens + said / 2)
        return count / (measured.prefill_seconds(tokens, count) + decoding)

    chosen = batch_size(measured, tokens, said, waiting)
    assert 1 <= chosen <= waiting
    assert all(rate(chosen) >= rate(count) for count in (1, 4, 16, waiting) if count <= waiting)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_judge(tmp_path_factory.mktemp("judge"))


def test_memory_and_seconds_of_a_real_judge_in_the_memory_that_it_has(folder: str) -> None:
    profiler = JudgeProfiler(model=folder, dtype="float32", longest=64, file="", **PLACE)
    model = profiler._model
    try:
        shape = profiler.shape()
        assert KV_BYTES < shape["kv_bytes_per_token"] < 4 * model.memory.token
        assert shape["weight_bytes"] == model.memory.fixed + LAYERS * model.memory.layer
        room = (12 << 20) - model.memory.fixed - 2 * model.memory.layer
        assert shape["kv_tokens"] == int(room / shape["kv_bytes_per_token"])
        longer = profiler._peak(lambda: profiler._prefill(2, 128)) - profiler._peak(lambda: profiler._prefill(2, 64))
        assert longer >= 2 * 64 * KV_BYTES, "what a pass leaves in the cache is counted"
        for phase in ("prefill", "decode"):
            passes = model.counts.passes
            found = profiler.measure(phase, 4, 32)
            assert 0 < found["seconds"] < 60
            assert model.counts.passes - passes == {"prefill": 3, "decode": 9}[phase]
            assert 0 < model.residency.resident < LAYERS, "arranged for the memory that it has"
        assert "bytes more than the" in profiler.measure("prefill", 64, 4000)["why"]
        assert "4096 positions" in profiler.measure("decode", 1, 4090)["why"]
        with pytest.raises(ConfigError, match="'prefill' or 'decode'"):
            profiler.measure("train", 1, 1)
    finally:
        profiler.close()


class Asked:
    """A model that only says what it was asked together, and what was arranged."""

    def __init__(self) -> None:
        self.memory = JudgeMemory(8, 0, 1000, 500.0)
        self.together: list[int] = []
        self.tokens: list[int] = []

    def fit(self, tokens: int, free: int) -> None:
        self.tokens.append(tokens)
        if tokens * self.memory.token > free:
            raise ValueError("too long")

    def generate_batch(self, questions: list[JudgeQuestion], stop: frozenset[int]) -> list[list[int]]:
        self.together.append(len(questions))
        return [[1] * 4 for _ in questions]


def together(length: int, measured: EngineProfile | None, memory: int = 1 << 30) -> tuple[list[int], Asked]:
    """How many of 16 questions that wait are computed at a time."""
    model: Any = Asked()
    server = judge_server.JudgeServer(model, None, "judge", "secret", lambda: memory, measured)

    async def ask() -> None:
        question = JudgeQuestion([5] * length, 4)
        async with server._busy:
            asked = [
                asyncio.create_task(server._generated(judge_server._Asked(question, lambda: False), frozenset()))
                for _ in range(16)
            ]
            await asyncio.sleep(0)
        await asyncio.gather(*asked)

    asyncio.run(ask())
    return model.together, model


def test_the_server_computes_as_many_together_as_its_profile_says_within_its_memory() -> None:
    assert together(16, None)[0] == [16] == together(16, profile())[0]
    assert together(1024, None)[0] == [16]
    assert together(1024, profile())[0] == [1] * 16
    found, model = together(16, profile(1000.0), 4 * (16 + 4) * 1000)
    assert model.memory.token == 1000.0, "what was measured"
    assert (max(found), sum(found)) == (4, 16)


def written(path: Path, key: Mapping[str, str], model: str, measured: EngineProfile) -> Path:
    file = ProfileFile(path, ProfileKey(model=model, **key))
    for point in measured._points():
        file.add(point)
    file.shapes = dict(measured.shapes)
    file.save()
    return path


def test_a_profile_of_another_device_engine_or_memory_or_one_that_is_none_is_one_error(tmp_path: Path) -> None:
    here = identity(**PLACE)
    path = written(tmp_path / "p.json", here, "m", profile())
    assert read_profile(path, here).shape(ONE).kv_bytes_per_token == 1000.0
    with pytest.raises(ConfigError, match=r"streamed.profile.*another device: its device is 'CPU.*here it is 'H100'"):
        read_profile(path, {**here, "device": "H100"})
    with pytest.raises(ConfigError, match=r"another engine: its engine is 'judge, 12 MB; torch .*all memory"):
        read_profile(path, identity("cpu", 1, 0))
    data = json.loads(path.read_text())
    for damaged in (
        "",
        "[]",
        "{}",
        json.dumps({**data, "points": [{"phase": "decode"}]}),
        json.dumps({**data, "key": 3}),
    ):
        path.write_text(damaged)
        with pytest.raises(ConfigError, match=r"reward.judge.streamed.profile.*cannot be read"):
            read_profile(path, here)
    path.write_text(json.dumps({**data, "points": []}))
    with pytest.raises(ConfigError, match="no points of both phases"):
        read_profile(path, here)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_profile(tmp_path / "none.json", here)


def config(folder: str, *more: str) -> Config:
    own = [f'reward.judge.path="{folder}"', "reward.judge.criterion=c", "reward.judge.streamed.device=cpu"]
    return load_config(None, [*own, "reward.judge.streamed.dtype=float32", *more])


def test_a_run_names_a_profile_that_is_not_there_or_of_another_model_before_anything_starts(
    folder: str, tmp_path: Path
) -> None:
    path, named = tmp_path / "p.json", f'reward.judge.streamed.profile="{tmp_path / "p.json"}"'
    with pytest.raises(ConfigError, match=r"reward.judge.streamed.profile = .*cannot be read"):
        judge_setup.check(config(folder, named))
    written(path, identity(**PLACE), model_name(Path(folder), "bfloat16"), profile())
    with pytest.raises(ConfigError, match=r"reward.judge.streamed.profile = .*another model"):
        judge_setup.check(config(folder, named))
    written(path, identity(**PLACE), model_name(Path(folder), "float32"), profile())
    judge_setup.check(config(folder, named))


@pytest.mark.parametrize(
    ("task", "wanted", "field", "words"),
    [
        ("", Wanted(tp=(2,)), "--tp", "one device"),
        ("", Wanted(batches=(65,)), "--batch", "at most 64 questions"),
        ("chess", Wanted(), "--judge", "name one of"),
    ],
)
def test_what_cannot_be_measured_of_a_judge_is_refused(
    folder: str, task: str, wanted: Wanted, field: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{field} = .*{words}"):
        own_judge(config(folder), task, wanted)
    assert own_judge(config(folder), "", Wanted()).path == folder
    with pytest.raises(ConfigError, match=r"^--judge = .*the run has no judge of its own"):
        own_judge(load_config(None, []), "", Wanted())


def test_a_judge_with_a_profile_of_another_machine_says_so_and_does_not_start(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "p.json", {**identity(**PLACE), "device": "another"}, "m", profile())
    monkeypatch.setenv("RL_COSERVE_JUDGE_TOKEN", "secret" * 8)
    monkeypatch.setattr(sys, "argv", ["judge", folder, "--port", "0", "--memory-mb", "12", "--profile", str(path)])
    assert judge_server.main() == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{JUDGE_REFUSED}: reward.judge.streamed.profile = ")
    assert "its device is 'another'" in said
    (tmp_path / "log").write_text(f"noise\n{said}")
    refused = JudgeHost(folder, log=tmp_path / "log").refusal_error()
    assert "its device is 'another'" in str(refused), "the run says what the judge said"


@pytest.mark.engine
@pytest.mark.long
def test_the_command_measures_a_judge_and_its_server_takes_the_file(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # for the actor
    judge = [f'reward.judge.path="{folder}"', "reward.judge.criterion=c", "reward.judge.streamed.memory_mb=12"]
    judge += ["reward.judge.streamed.dtype=float32", "reward.judge.streamed.device=cpu", "ray.cpus=2"]
    (tmp_path / "c.toml").write_text("")
    command = [
        "profile",
        "--judge",
        "--out",
        str(tmp_path / "p.json"),
        "--json",
        "--batch",
        "1,4",
        "--length",
        "32,128",
    ]
    assert main([*command, str(tmp_path / "c.toml"), *judge]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["points"] == 8
    file = load_profile(tmp_path / "p.json")
    assert file.key == ProfileKey(model=model_name(Path(folder), "float32"), **identity(**PLACE))
    assert read_profile(tmp_path / "p.json", identity(**PLACE)).shape(ONE).kv_bytes_per_token > KV_BYTES
    options = ["--memory-mb", "12", "--dtype", "float32", "--profile", str(tmp_path / "p.json")]
    monkeypatch.setenv("RL_COSERVE_JUDGE_TOKEN", "secret" * 8)
    made: list[StreamedModel] = []

    async def stand_in(server: judge_server.JudgeServer, *_: object) -> None:
        made.append(server._model)

    monkeypatch.setattr(judge_server, "serve", stand_in)
    monkeypatch.setattr(sys, "argv", ["judge", folder, "--port", "0", *options])
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    assert judge_server.main() == 0
    assert made[0].memory.token == file.shapes[ONE].kv_bytes_per_token
