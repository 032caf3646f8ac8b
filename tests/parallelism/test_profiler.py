"""The offline profile: what is read from it, what its file promises, and that measuring can be interrupted."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.api import ConfigError, RetryableError, RunError
from orchestrator.cli import main
from orchestrator.config import Config
from orchestrator.ops.profile_command import Wanted, check_sizes
from orchestrator.policies.parallelism.engine_profile import EngineLayout, EngineProfile, EngineShape, ProfilePoint
from orchestrator.profiler.measurement import ProfileProgress, measure_places, powers_between, profile_grid
from orchestrator.profiler.profile_file import ProfileFile, ProfileKey, load_profile, model_name

KEY = ProfileKey("Qwen3ForCausalLM 2x64 float32 0a1b2c3d", "vLLM 0.32.0", "CPU X x 1")
ONE, TWO = EngineLayout(1), EngineLayout(2)


def decode_law(layout: EngineLayout, batch: int, tokens: int) -> float:
    return 1e-3 / layout.tp + 2e-5 * batch + 1e-8 * batch * tokens


def prefill_law(layout: EngineLayout, batch: int, tokens: int) -> float:
    return 2e-3 + 1e-6 * batch * tokens / layout.tp


def seconds(phase: str, layout: EngineLayout, batch: int, tokens: int) -> float:
    return (decode_law if phase == "decode" else prefill_law)(layout, batch, tokens)


def made(batches: tuple[int, ...] = (1, 8, 64), lengths: tuple[int, ...] = (32, 512, 4096)) -> EngineProfile:
    places = profile_grid([ONE, TWO], batches, lengths)
    points = [
        ProfilePoint(p.phase, p.layout, p.batch, p.tokens, seconds(p.phase, p.layout, p.batch, p.tokens))
        for p in places
    ]
    shapes = [EngineShape(ONE, 1024, 40_000, 1 << 20, 20.0), EngineShape(TWO, 1024, 100_000, 1 << 20, 30.0)]
    random.Random(1).shuffle(points)
    return EngineProfile(points, shapes)


@given(st.floats(1, 64), st.floats(32, 4096))
def test_between_points_a_profile_follows_a_law_that_is_linear_in_each(batch: float, tokens: float) -> None:
    profile = made()
    wanted = 1e-3 + 2e-5 * batch + 1e-8 * batch * tokens
    assert profile.decode_seconds(batch, tokens, ONE) == pytest.approx(wanted, rel=1e-9)
    assert profile.prefill_seconds(tokens, batch, TWO) == pytest.approx(2e-3 + 5e-7 * batch * tokens, rel=1e-9)


def test_beyond_its_points_a_profile_goes_on_and_below_them_the_smallest_counts() -> None:
    profile = made()
    assert profile.decode_seconds(128, 4096) == pytest.approx(decode_law(ONE, 128, 4096))
    assert profile.decode_seconds(1, 1) == pytest.approx(decode_law(ONE, 1, 32))
    falling = EngineProfile([ProfilePoint("decode", ONE, 1, 32, 2.0), ProfilePoint("decode", ONE, 1, 64, 1.0)])
    assert falling.decode_seconds(1, 10_000) == 1.0, "a measured fall is not drawn on to nothing"


def test_a_size_that_could_not_be_measured_at_one_batch_is_read_from_its_neighbours() -> None:
    points = [
        ProfilePoint("decode", ONE, 1, 32, 1.0),
        ProfilePoint("decode", ONE, 1, 64, 2.0),
        ProfilePoint("decode", ONE, 2, 32, 1.5),
    ]
    assert EngineProfile(points).decode_seconds(2, 64) == 1.5
    assert EngineProfile(points).decode_seconds(1.5, 48) == pytest.approx(1.5)


def test_what_was_not_profiled_is_an_error_that_says_what_was() -> None:
    with pytest.raises(KeyError, match=r"TP 4 was not profiled; there are: TP 1, TP 2"):
        made().decode_seconds(1, 1, EngineLayout(4))
    with pytest.raises(KeyError, match="TP 4"):
        made().shape(EngineLayout(4))


def test_the_predicted_rollout_counts_every_step_once_and_waits_for_memory() -> None:
    points = [
        ProfilePoint("decode", ONE, 1, 1, 1.0),
        ProfilePoint("decode", ONE, 2, 1, 1.5),
        ProfilePoint("prefill", ONE, 1, 1, 10.0),
    ]
    free = EngineProfile(points)
    assert free.rollout_seconds([3, 5], 1, ONE) == pytest.approx(10 + 3 * 1.5 + 2 * 1.0)
    assert free.rollout_seconds([3, 5], 1, ONE, engines=2) == pytest.approx(10 + 5)
    tight = EngineProfile(points, [EngineShape(ONE, 1.0, 6, 1, 1.0)])  # one at a time
    assert tight.rollout_seconds([3, 5], 1, ONE) == pytest.approx(10 + 3 + 10 + 5)
    assert free.rollout_seconds([], 1, ONE) == 0.0


@given(st.lists(st.integers(1, 400), min_size=1, max_size=40), st.integers(1, 100))
def test_the_predicted_rollout_lies_between_one_at_a_time_and_all_at_once(lengths: list[int], prompt: int) -> None:
    flat = [
        ProfilePoint("decode", ONE, 1, 1, 1.0),
        ProfilePoint("prefill", ONE, 1, 1, 1e-9),
    ]  # a step costs the same at any batch
    times = []
    for room in (1, 400, 4000, 10**6):
        times.append(EngineProfile(flat, [EngineShape(ONE, 1.0, room, 1, 1.0)]).rollout_seconds(lengths, prompt, ONE))
    assert times[0] == pytest.approx(sum(lengths), rel=1e-6)
    assert times[-1] == pytest.approx(max(lengths), rel=1e-6)
    assert max(times) == times[0]


def test_the_corners_of_a_grid_are_measured_first_and_every_place_once() -> None:
    places = profile_grid([ONE, TWO], powers_between(1, 16), powers_between(32, 2000, 4))
    assert powers_between(32, 2000, 4) == (32, 128, 512, 2000)
    assert len(places) == len({place.key for place in places}) == 2 * 2 * 5 * 4
    assert [place.layout for place in places] == [ONE] * 40 + [TWO] * 40
    assert {(place.batch, place.tokens) for place in places[:8]} == {(1, 32), (1, 2000), (16, 32), (16, 2000)}
    assert profile_grid([ONE], [4], [7]) == [
        place for place in profile_grid([ONE], [4], [7]) if (place.batch, place.tokens) == (4, 7)
    ]


class TwinEngine:
    """Answers by the law; ``dies`` after so many measurements, all engines together."""

    def __init__(self, dies: int = -1) -> None:
        self.asked: list[tuple[str, EngineLayout, int, int]] = []
        self.starts: list[EngineLayout] = []
        self.dies = dies

    @asynccontextmanager
    async def start(self, layout: EngineLayout) -> AsyncIterator[TwinEngine]:
        self.layout = layout
        self.starts.append(layout)
        yield self

    async def shape(self) -> Mapping[str, Any]:
        return {"kv_bytes_per_token": 512.0, "kv_tokens": 999, "weight_bytes": 7}

    async def measure(self, phase: str, batch: int, tokens: int) -> Mapping[str, Any]:
        if len(self.asked) == self.dies:
            raise RetryableError("profile-tp2 died")
        self.asked.append((phase, self.layout, batch, tokens))
        if batch * tokens > 999:
            return {"why": "the KV cache holds 999 tokens"}
        return {"seconds": seconds(phase, self.layout, batch, tokens), "spread": 0.1}


def test_measuring_goes_on_where_it_was_interrupted_and_measures_nothing_twice(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "profile.json"
    places = profile_grid([ONE, TWO], (1, 4, 16), (10, 100))
    said: list[ProfileProgress] = []
    first = TwinEngine(dies=17)
    with pytest.raises(RunError, match=r"TP 2 failed: profile-tp2 died\n.*points are kept in .*profile.json"):
        asyncio.run(measure_places(ProfileFile(path, KEY), places, first.start, said.append))
    kept = load_profile(path, key=KEY)
    assert len(kept.points) + len(kept.skipped) == 17 == said[-1].done
    second = TwinEngine()
    asyncio.run(measure_places(kept, places, second.start, said.append))
    assert second.starts == [TWO]
    assert sorted(first.asked + second.asked, key=str) == sorted((place.key for place in places), key=str)
    whole = load_profile(path, key=KEY)
    assert said[-1].done == said[-1].total == len(places)
    assert set(whole.skipped.values()) == {"the KV cache holds 999 tokens"}
    assert whole.profile.decode_seconds(4, 10, TWO) == pytest.approx(decode_law(TWO, 4, 10))
    assert whole.profile.shape(TWO).kv_bytes_per_token == 512.0
    third = TwinEngine()
    asyncio.run(measure_places(whole, places, third.start, said.append))
    assert third.starts == [], "a complete profile starts nothing"


@pytest.mark.parametrize("part", ["model", "engine", "device"])
def test_a_profile_of_another_model_engine_or_device_is_one_error_that_names_both(tmp_path: Path, part: str) -> None:
    ProfileFile(tmp_path / "p.json", KEY).save()
    other = ProfileKey(**{**{name: getattr(KEY, name) for name in ("model", "engine", "device")}, part: "other thing"})
    with pytest.raises(ConfigError) as refused:
        load_profile(tmp_path / "p.json", "rollout.planner.profile", other)
    text = str(refused.value)
    assert text.startswith("rollout.planner.profile = ")
    assert f"another {part}:" in text
    assert getattr(KEY, part) in text
    assert "other thing" in text


@pytest.mark.parametrize(
    "content", ["", "[]", "nonsense", '{"format": 2}', '{"format": 1}', '{"format": 1, "key": {"model": "m"}}']
)
def test_what_is_no_profile_is_one_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "p.json").write_text(content)
    with pytest.raises(ConfigError, match="profile"):
        load_profile(tmp_path / "p.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_profile(tmp_path / "none.json")


def test_a_point_that_is_no_measurement_is_refused(tmp_path: Path) -> None:
    file = ProfileFile(tmp_path / "p.json", KEY)
    file.add(ProfilePoint("decode", ONE, 1, 1, 1.0))
    file.save()
    text = (tmp_path / "p.json").read_text()
    for damage in ('"seconds": -1.0', '"seconds": "x"', '"seconds": NaN'):
        (tmp_path / "p.json").write_text(text.replace('"seconds": 1.0', damage))
        with pytest.raises(ConfigError, match="damaged"):
            load_profile(tmp_path / "p.json")


def test_a_model_is_known_by_its_shape_not_by_its_weights_or_its_folder(tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "torch_dtype": "float32",
    }
    for name, extra in (("a", {}), ("b", {"torch_dtype": "bfloat16"}), ("c", {"hidden_size": 128})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config | extra))
    names = {name: model_name(tmp_path / name, "float32") for name in "abc"}
    assert names["a"] == names["b"] != names["c"]
    assert model_name(tmp_path / "a", "bfloat16") != names["a"]
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        model_name(tmp_path, "float32")


def test_sizes_that_cannot_be_are_refused_before_anything_starts(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "config.json").write_text('{"num_attention_heads": 6}')
    model = Config.model_validate({"model": {"path": str(tmp_path)}})
    with pytest.raises(ConfigError, match="must divide the model's 6 attention heads"):
        check_sizes(model, Wanted(tp=(2, 4)))
    with pytest.raises(ConfigError, match="at least 1"):
        Wanted(batches=(0,))
    assert main(["profile", "run.seed=1", "--length", "99999"]) == 2
    assert main(["profile", "run.seed=1", "--batch", "99999"]) == 2
    assert "rollout.engine.max_num_seqs" in capsys.readouterr().err
