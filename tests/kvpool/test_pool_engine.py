"""Two real vLLM engines of different models and layouts, in two processes, whose KV caches share one pool of host memory."""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api import ConfigError
from vllm_rlplugin.kvpool.engine.parked_blocks import _PARTS, ParkedBlocks
from vllm_rlplugin.kvpool.engine.pool_engine import pool_path
from vllm_rlplugin.kvpool.ledger.page_ledger import PagePool
from vllm_rlplugin.kvpool.pages.page_geometry import PageGeometry, regions_of
from vllm_rlplugin.options import PluginOptions

PAGE_KIB = 32
DRIVER = Path(__file__).parents[1] / "support" / "kvpool_engine.py"


# -- geometry ----------------------------------------------------------------------------------------------------------


def test_a_group_is_the_least_run_of_blocks_that_lies_in_whole_pages_of_every_layer() -> None:
    layers = PageGeometry.from_regions(16, [(0, 3072), (16 * 3072, 3072)], 4096)
    assert (layers.group_blocks, layers.groups, layers.pages_a_group) == (4, 4, 6)
    assert [int(place) for place in layers.places([1])] == [3, 4, 5, 15, 16, 17]
    assert list(layers.blocks_of(1)) == [4, 5, 6, 7]
    together = PageGeometry.from_regions(6, [(0, 8192)], 4096)
    assert [int(place) for place in together.places([0, 2])] == [0, 1, 4, 5]
    every = layers.places(range(4))
    assert sorted(int(place) for place in every) == list(range(24))
    with pytest.raises(ValueError, match="group 4 of 4"):
        layers.places([4])


def test_where_all_layers_of_a_block_lie_together_any_number_of_blocks_fits() -> None:
    """Else the first start in a pool failed after loading, 31 times out of 32."""
    for blocks in range(5, 40):
        geometry = PageGeometry.from_regions(blocks, [(0, 3072)], 4096)
        assert (geometry.group_blocks, geometry.groups) == (4, -(-blocks // 4))
        assert [block for group in range(geometry.groups) for block in geometry.blocks_of(group)] == list(range(blocks))
        assert [int(place) for place in geometry.places(range(geometry.groups))] == list(
            range(-(-blocks * 3072 // 4096))
        )


def test_vllm_is_told_to_put_all_layers_of_a_block_together_where_its_kernels_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker import worker_base

    from vllm_rlplugin.patches import kv_range

    names = ["LBNHC", "LBHNC", "BLNHC", "BLHNC"]
    monkeypatch.setattr(
        worker_base, "get_supported_kv_cache_layouts", lambda backends: [KVCacheLayout[name] for name in names]
    )
    for name in kv_range._MODULES:
        monkeypatch.setattr(importlib.import_module(name), "allocate_kv_cache", None)
    kv_range._apply()
    found = worker_base.get_supported_kv_cache_layouts([])
    assert [layout.name for layout in found] == ["BLNHC", "BLHNC", "LBNHC", "LBHNC"]


def test_blocks_that_do_not_lie_in_pages_say_how_many_would() -> None:
    with pytest.raises(ValueError, match=r"--num-gpu-blocks-override 16 \(a multiple of 4\)"):
        PageGeometry.from_regions(18, [(0, 3072), (18 * 3072, 3072)], 4096)
    with pytest.raises(ValueError, match="one group of pages"):
        PageGeometry.from_regions(4, [(0, 3072)], 4096)


def test_the_runs_of_blocks_are_those_of_vllms_layouts_and_one_that_has_none_is_refused() -> None:
    """On a GPU vLLM has more layouts than on CPU."""
    from vllm.v1.kv_cache_interface import KVCacheTensor
    from vllm.v1.kv_cache_layout import KVCacheLayout

    layers = KVCacheTensor(size=800, layers=["a", "b"], layer_stride=400, block_stride=100)
    together = KVCacheTensor(size=800, layers=["a", "b"], layer_stride=100, block_stride=200)
    for name in ("LBHNC", "LBNHC"):
        assert regions_of([layers], KVCacheLayout[name]) == [(0, 100), (400, 100)]
    for name in ("BLHNC", "BLNHC", "BHLNC"):
        assert regions_of([together], KVCacheLayout[name]) == [(0, 200)]
    with pytest.raises(ValueError, match="VLLM_KV_CACHE_LAYOUT"):
        regions_of([layers], KVCacheLayout.LHBNC)


# -- parking, on vLLM's own pool of blocks ------------------------------------------------------------------------------


class Pages:
    """A backing with so many groups' worth of pages; notes what is mapped."""

    def __init__(self, groups: int) -> None:
        self.free = groups
        self.mapped: set[int] = {0}

    def map_groups(self, groups: list[int]) -> bool:
        if len(groups) > self.free:
            return False
        self.free -= len(groups)
        self.mapped |= set(groups)
        return True

    def unmap_groups(self, groups: list[int]) -> None:
        self.mapped -= set(groups)
        self.free += len(groups)

    def synchronize(self) -> None:
        """Nothing runs on a device."""


def parking_of(
    pages: Any, clock: list[float] | None = None, groups: int = 8, **options: Any
) -> tuple[Any, ParkedBlocks]:
    from vllm.v1.core.block_pool import BlockPool

    pool = BlockPool(4 * groups, enable_caching=True, hash_block_size=16)
    at = clock if clock is not None else [0.0]
    geometry = PageGeometry.from_regions(4 * groups, [(0, 1024)], 4096)
    return pool, ParkedBlocks(pool, geometry, pages, backed=[0], now=lambda: at[0], keep=10.0, **options)


def test_only_blocks_with_pages_are_ever_handed_out() -> None:
    """Seeded: whatever is wanted, freed, given back and refused, stock's pool never hands out a block without a page."""
    for seed in range(30):
        rng, pages, held = random.Random(seed), Pages(5), list[Any]()
        clock = [0.0]
        pool, parking = parking_of(pages, clock=clock)
        ahead = rng.choice((0, 2))
        assert pool.get_num_free_blocks() == 3
        for _ in range(300):
            clock[0] += rng.uniform(0, 2)
            what = rng.random()
            if what < 0.4:
                count = rng.randrange(1, 9)
                if parking.ensure_free(count):
                    held += pool.get_new_blocks(count)
            elif what < 0.7 and held:
                rng.shuffle(held)
                pool.free_blocks(held[:4])
                held = held[4:]
            elif what < 0.8:
                parking.shrink(rng.randrange(3))
            elif what < 0.9:
                parking.park_idle()
            parking.note_scheduled()
            if parking.steps_in_flight > ahead:
                parking.note_ended()
            assert {block.block_id // 4 for block in held} <= pages.mapped
            assert 0 in pages.mapped
            assert pool.num_gpu_blocks == 4 * parking.backed_groups
            assert pool.get_num_free_blocks() == 4 * parking.backed_groups - len(held) - 1
            assert parking.held_groups == len(pages.mapped)
        pool.free_blocks(held)
        assert pool.reset_prefix_cache()


def test_of_a_static_partition_no_more_groups_get_pages_than_belong_to_it() -> None:
    pages = Pages(8)
    pool, parking = parking_of(pages)
    parking.most = 3
    assert not parking.ensure_free(20)
    assert (parking.backed_groups, pool.get_num_free_blocks()) == (3, 11)
    parking.most = 8
    assert parking.ensure_free(20)
    assert parking.backed_groups == 6


def test_pages_are_dropped_only_after_the_steps_that_were_in_flight() -> None:
    pages = Pages(5)
    _, parking = parking_of(pages)
    assert parking.ensure_free(8)
    parking.note_scheduled()
    parking.note_scheduled()
    assert parking.shrink(1) == 1
    before = set(pages.mapped)
    parking.note_scheduled()
    parking.park_idle()
    parking.note_ended()
    assert pages.mapped == before, "a step that was scheduled before may still write there"
    with pytest.raises(RuntimeError, match="2 steps are in flight"):
        parking.sleep()
    parking.note_ended()
    assert len(pages.mapped) == len(before) - 1, "and not a step later"


def test_pages_on_their_way_are_used_again_only_as_far_as_the_budget_goes() -> None:
    pages = Pages(5)
    _, parking = parking_of(pages)
    assert parking.ensure_free(15)
    parking.note_scheduled()
    assert parking.shrink(4) == 3
    assert not parking.ensure_free(15, 2), "else what was cut would never be given back"
    assert (parking.backed_groups, parking.held_groups) == (2, 4)
    parking.note_ended()
    assert (parking.backed_groups, parking.held_groups) == (2, 2)


def test_a_group_nobody_used_for_long_goes_back_and_a_used_one_stays() -> None:
    pages, clock = Pages(5), [0.0]
    pool, parking = parking_of(pages, clock=clock)
    assert parking.ensure_free(9)
    blocks = pool.get_new_blocks(4)
    clock[0] = 9.0
    parking.park_idle()
    assert parking.backed_groups == 3
    clock[0] = 11.0
    parking.park_idle()
    used = {block.block_id // 4 for block in blocks}
    assert pages.mapped == used | {0}


def test_beside_steps_that_look_themselves_nothing_else_looks_at_every_group() -> None:
    pages, clock = Pages(5), [0.0]
    _, parking = parking_of(pages, clock=clock)
    assert parking.ensure_free(9)
    clock[0] = 11.0
    parking.note_scheduled()
    parking.note_ended()
    parking.park_idle(running=True)
    assert parking.backed_groups == 3
    parking.park_idle(running=True)
    assert parking.backed_groups == 1, "requests are there, and it was paused since"


def test_steps_together_look_at_every_group_and_each_at_a_part() -> None:
    pages, clock = Pages(600), [0.0]
    pool, parking = parking_of(pages, clock=clock, groups=600)
    assert parking.ensure_free(4 * 500)
    blocks = pool.get_new_blocks(4)
    clock[0] = 11.0
    parking.park_idle_part()
    backed = parking.backed_groups
    assert 600 - 100 > backed > 400, "a part of them"
    for _ in range(2 * _PARTS):
        parking.park_idle_part()
    assert pages.mapped == {block.block_id // 4 for block in blocks} | {0}


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"kv_pool": "../x"}, "kv_pool"),
        ({"kv_pool": "a", "kv_pool_role": "both"}, "kv_pool_role"),
        ({"kv_pool": "a", "kv_pool_page_kib": 3}, "kv_pool_page_kib"),
        ({"kv_pool": "a", "kv_pool_mib": -1}, "kv_pool_mib"),
        ({"kv_pool": "a", "kv_pool_keep": -1.0}, "kv_pool_keep"),
        ({"kv_pool": "a", "kv_pool_window": -1.0}, "kv_pool_window"),
        ({"kv_pool": "a", "kv_pool_headroom": 1.5}, "kv_pool_headroom"),
        ({"kv_pool": "a", "kv_pool_lent": -0.1}, "kv_pool_lent"),
        ({"kv_pool_mib": 10}, "kv_pool_mib"),
    ],
)
def test_options_that_make_no_sense_name_the_field(values: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PluginOptions.from_dict(values)
    assert caught.value.field == field


# -- real engines ------------------------------------------------------------------------------------------------------


class Driven:
    """One engine in a process; commands and answers are JSON lines."""

    def __init__(self, model: Path, blocks: int, *, given: dict[str, Any] | None = None, **plugin: Any) -> None:
        settings = {
            "model": str(model),
            "max_num_seqs": 8,
            "max_model_len": 512,
            "block_size": 32,
            "num_gpu_blocks_override": blocks,
            "kv_cache_memory_bytes": 64 << 20,
            **(given or {}),
            "plugin": plugin,
        }
        environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the engine
        self.process = subprocess.Popen(
            [sys.executable, str(DRIVER), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=environment,
            text=True,
        )

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        code = self.process.wait()
        self.errors.seek(0)
        raise AssertionError(f"the engine ended with {code}: {self.errors.read().decode()[-2000:]}")

    def do(self, **command: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.answer()


@pytest.fixture
def engines() -> Iterator[list[Driven]]:
    started: list[Driven] = []
    yield started
    for engine in started:
        engine.process.kill()
        engine.process.wait()
        engine.errors.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    from megatron_rlplugin.tiny_model import create_qwen3

    folder = tmp_path_factory.mktemp("models")
    common: dict[str, Any] = {
        "vocabulary": [chr(33 + at) for at in range(93)],
        "max_positions": 512,
        "dtype": "float32",
    }
    common |= {"intermediate_size": 128, "head_dim": 32}
    small = create_qwen3(str(folder / "a"), hidden_size=64, layers=2, heads=2, kv_heads=1, seed=1, **common)
    large = create_qwen3(str(folder / "b"), hidden_size=96, layers=3, heads=4, kv_heads=2, seed=2, **common)
    return Path(small), Path(large)


def prompt(seed: int, tokens: int) -> list[int]:
    return [(7 * at + 13 * seed) % 80 + 5 for at in range(tokens)]


REQUESTS = [(f"r{index}", prompt(index, 60 + 20 * index), 40) for index in range(6)]


def play(engine: Driven, requests: list[tuple[str, list[int], int]], tag: str) -> None:
    for name, tokens, length in requests:
        engine.do(add=(f"{tag}-{name}", tokens, length))


def named(answer: dict[str, Any], tag: str) -> dict[str, list[int]]:
    """Tokens of the requests with this tag, by their names."""
    return {name.partition("-")[2]: tokens for name, tokens in answer["outputs"].items() if name.startswith(f"{tag}-")}


@pytest.mark.engine
def test_engines_of_two_models_share_a_pool_and_serving_takes_pages_from_rollouts_that_run(
    models: tuple[Path, Path], engines: list[Driven]
) -> None:
    """Tokens are those of the same engine undisturbed; a stray access would be a segmentation fault. Who gets what is decided by
    the serving engine itself; in the end the rollout engine is stopped, and serving gets its pages all the same."""
    name = f"test-{os.getpid()}"
    path = pool_path(name)
    try:
        shared = {"kv_pool": name, "kv_pool_page_kib": PAGE_KIB, "kv_pool_keep": 0.0}
        serving = Driven(
            models[0],
            64,
            **shared,
            kv_pool_role="serving",
            kv_pool_mib=2,
            kv_pool_lent=1.0,
            kv_pool_window=0.0,
            kv_pool_admission="none",
        )
        engines.append(serving)
        serving.answer()
        rollout = Driven(models[1], 64, **shared, kv_pool_budget_mib=1)
        engines.append(rollout)
        rollout.answer()
        lent = serving.do()["pool"]["lent"]
        assert lent > 40, "it saw that somebody joined"
        pool = PagePool.open(path)
        small = {tenant.role: tenant.used for tenant in pool.view().tenants}
        expected = []
        for engine, role in ((rollout, "rollout"), (serving, "serving")):
            play(engine, REQUESTS, "alone")
            assert engine.do(steps=12)["pool"]["pages"] > 2 * small[role]
            expected.append(named(engine.do(drain=True), "alone"))
            assert engine.do()["pool"]["pages"] == small[role], "what nobody uses went back"
        cut = serving.do()["pool"]["lent"]
        assert cut <= lent // 2, "serving's burst cut what is lent"
        assert serving.do(opened=True)["pool"]["lent"] > cut

        play(rollout, REQUESTS, "shared")
        before = rollout.do(steps=12)["pool"]
        many = before["pages"]
        play(serving, REQUESTS, "shared")
        assert serving.do(steps=12)["pool"]["lent"] < many
        given = rollout.do(steps=1)["pool"]
        assert given["pages"] <= given["budget"] < many
        assert given["displaced"] > 0
        assert 0 < given["blocks"] < before["blocks"], "it says what its budget has room for"
        second = named(serving.do(drain=True), "shared")
        serving.do(opened=True)
        done = rollout.do(drain=True)
        assert [named(done, "shared"), second] == expected, "those handed back went on with the tokens they had"
        assert done["returned"] >= given["displaced"]

        play(rollout, REQUESTS, "stopped")
        rollout.do(steps=12)
        rollout.process.send_signal(signal.SIGSTOP)
        play(serving, REQUESTS, "stopped")
        deadline = time.monotonic() + 60
        while not serving.do(steps=1)["pool"]["kills"]:
            assert time.monotonic() < deadline
            if not serving.do()["unfinished"]:
                play(serving, [(f"{time.monotonic()}-{index}", prompt(index, 150), 40) for index in range(6)], "more")
        assert rollout.process.wait(30) == -signal.SIGKILL
        assert named(serving.do(drain=True), "stopped") == second
        assert pool.view().free == pool.pages - serving.do()["pool"]["pages"]
    finally:
        path.unlink(missing_ok=True)


@pytest.mark.engine
def test_a_serving_engine_in_fp8_shares_a_pool_with_a_rollout_engine_that_rounds_nothing(
    models: tuple[Path, Path], engines: list[Driven]
) -> None:
    """Weights and KV in FP8: its blocks are a quarter of float32's. Tokens are those of each engine alone in the pool."""
    name, fp8 = (
        f"test-fp8-{os.getpid()}",
        {"quantization": "fp8_per_channel", "dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    )
    try:
        shared = {"kv_pool": name, "kv_pool_page_kib": PAGE_KIB, "kv_pool_keep": 0.0}
        serving = Driven(models[0], 64, given=fp8, **shared, kv_pool_role="serving", kv_pool_mib=2, kv_pool_lent=1.0)
        engines.append(serving)
        serving.answer()
        rollout = Driven(models[1], 64, **shared, kv_pool_budget_mib=1)
        engines.append(rollout)
        rollout.answer()
        expected = []
        for engine in engines:
            play(engine, REQUESTS, "alone")
            expected.append(named(engine.do(drain=True), "alone"))
        for engine in engines:
            play(engine, REQUESTS, "shared")
        most = [0, 0]
        for _ in range(12):
            most = [max(had, engine.do(steps=1)["pool"]["pages"]) for had, engine in zip(most, engines, strict=True)]
        assert min(most) > 2
        assert [named(engine.do(drain=True), "shared") for engine in engines] == expected
    finally:
        pool_path(name).unlink(missing_ok=True)


@pytest.mark.long
@pytest.mark.engine
def test_an_engine_in_a_pool_makes_the_tokens_of_one_that_has_its_memory_to_itself(
    models: tuple[Path, Path], engines: list[Driven]
) -> None:
    name = f"test-stock-{os.getpid()}"
    found = []
    try:
        for plugin in (
            {},
            {"kv_pool": name, "kv_pool_page_kib": PAGE_KIB, "kv_pool_mib": 2, "kv_pool_role": "serving"},
        ):
            engine = Driven(models[1], 64, **plugin)
            engines.append(engine)
            engine.answer()
            play(engine, REQUESTS, "r")
            found.append(engine.do(drain=True)["outputs"])
            engine.process.kill()
        assert found[0] == found[1]
    finally:
        pool_path(name).unlink(missing_ok=True)


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.timeout(600)
def test_models_with_windows_share_a_pool_with_pages_for_every_kv_group(tmp_path: Path, engines: list[Driven]) -> None:
    """Windows in three of four layers, as in Gemma 3, and in every second one, as in gpt-oss (whose experts vLLM does not compute
    on a CPU): four and two KV groups; windows shorter than a block, whose blocks stock frees while the request runs. Tokens are
    those of engines that have their memory to themselves."""
    from tests.support.family_models import write_family

    turns = ["sliding_attention", "full_attention"] * 2
    folders = [write_family(tmp_path / "most", "gemma3"), write_family(tmp_path / "half", "gemma3", layer_types=turns)]
    asked = [(name, [token % 50 for token in tokens], length) for name, tokens, length in REQUESTS]
    given = {"max_model_len": 256}
    name = f"test-windows-{os.getpid()}"
    shared: dict[str, Any] = {"kv_pool": name, "kv_pool_page_kib": PAGE_KIB, "kv_pool_keep": 0.0, "given": given}
    lending = {"kv_pool_lent": 1.0, "kv_pool_window": 0.0, "kv_pool_admission": "none"}
    try:
        expected = []
        for folder in folders:
            alone = Driven(folder, 128, given=given)
            engines.append(alone)
            alone.answer()
            play(alone, asked, "alone")
            expected.append(named(alone.do(drain=True), "alone"))
            alone.process.kill()
        serving = Driven(folders[0], 128, **shared, **lending, kv_pool_role="serving", kv_pool_mib=2)
        engines.append(serving)
        serving.answer()
        rollout = Driven(folders[1], 128, **shared, kv_pool_budget_mib=2)
        engines.append(rollout)
        rollout.answer()
        serving.do(opened=True)
        play(rollout, asked, "shared")
        many = rollout.do(steps=12)["pool"]
        play(serving, asked, "shared")
        assert serving.do(steps=12)["pool"]["lent"] < many["pages"]
        given_back = rollout.do(steps=1)["pool"]
        assert given_back["pages"] <= given_back["budget"] < many["pages"]
        found = [named(serving.do(drain=True), "shared")]
        serving.do(opened=True)
        found.append(named(rollout.do(drain=True), "shared"))
        assert found == expected
    finally:
        pool_path(name).unlink(missing_ok=True)


@pytest.mark.long
@pytest.mark.engine
def test_a_layout_that_does_not_lie_in_pages_ends_the_start_with_the_number_of_blocks_that_would(
    models: tuple[Path, Path], engines: list[Driven]
) -> None:
    name = f"test-odd-{os.getpid()}"
    odd = Driven(models[1], 61, kv_pool=name, kv_pool_page_kib=1024, kv_pool_mib=8)
    engines.append(odd)
    try:
        with pytest.raises(AssertionError, match=r"ConfigError: kv_pool = .*--num-gpu-blocks-override"):
            odd.answer()
    finally:
        pool_path(name).unlink(missing_ok=True)
