"""Two ranks as one trainer: data, tensor, pipeline, context, expert parallel, on gloo, against one rank and each other.

A pair of processes plays the scenarios of every run, another one those of the long tier; the tests read what they wrote.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron_rlplugin import parallel_layout  # noqa: E402
from megatron_rlplugin.trainer.replicas import Dealer  # noqa: E402
from orchestrator.api import ConfigError, RetryableError  # noqa: E402
from orchestrator.config import Config  # noqa: E402
from orchestrator.runtime.engine_actors import RayTrainer  # noqa: E402
from orchestrator.runtime.real_run import TRAINER_CLASS, start_ray  # noqa: E402
from scripts.bench.probes.megatron.trainer_probe import chunked, make_batch, play, tiny_folder, tiny_mixture  # noqa: E402
from tests.support.forked_ranks import ForkedRank, wait_for_all  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")]
Answers = dict[str, dict[str, Any]]
BASE = {"learning_rate": 1e-2, "micro_batch_size": 4, "micro_batch_order": "arrival"}
DP, TP, PP = {"data_parallel": 2}, {"tensor_parallel": 2}, {"pipeline_parallel": 2}
EP, CP = {"data_parallel": 2, "expert_parallel": 2}, {"context_parallel": 2}
KL = {"kl_coefficient": 0.1, "max_token_lag": 0}
PPO = {"objective": "ppo", "normalize_advantage": False, "kl_coefficient": 0.05, "kl_estimator": "k2"}
STREAM = {"stream": True, "grad_offload": True}
SHARDED = {"distributed_optimizer": True}
LONG_ROWS = {
    "sequence_parallel": True,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
# name -> (settings, more of the scenario)
SCENARIOS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dp": (DP, {}),
    "dp stream": ({**DP, **STREAM}, {"feeds": [1, 2]}),
    "dp pool": (DP, {"batch_size": 30}),
    "dp pool stream": ({**DP, **STREAM}, {"batch_size": 30, "feeds": [1, 2]}),
    "dp one micro-batch": ({**DP, "micro_batch_size": 64}, {}),
    "dp by length, packed": ({**DP, "micro_batch_order": "length", "pack_tokens": 60}, {}),
    "dp overlapped": ({**DP, "megatron": {"overlap_grad_reduce": True, "bucket_size": 2000}}, {}),
    "dp kl": ({**DP, **KL}, {}),
    "dp kl stream": ({**DP, **KL, **STREAM}, {"feeds": [2, 1, 1]}),
    "dp ppo": ({**DP, **PPO}, {}),
    "dp ppo stream": ({**DP, **PPO, **STREAM}, {"feeds": [1, 1]}),
    "dp reinforce++": ({**DP, "objective": "reinforce++"}, {}),
    "dp two mini-batches": ({**DP, "minibatches": 2}, {}),
    "dp sharded optimizer": ({**DP, **SHARDED}, {"steps": 3}),
    "dp sharded optimizer, restored": ({**DP, **SHARDED}, {"steps": 3, "save_after": 1}),
    "dp restored": ({**DP, **PPO}, {"save_after": 0}),
    "dp nothing finite": (DP, {"spoil": 7}),
    "tp": (TP, {}),
    "tp stream": ({**TP, **STREAM}, {"feeds": [2, 1]}),
    "tp kl": ({**TP, **KL, "entropy_coefficient": 0.01}, {}),
    "tp long rows": ({**TP, "megatron": LONG_ROWS}, {}),
    "tp long rows stream": ({**TP, "megatron": LONG_ROWS, **STREAM}, {"feeds": [2, 1]}),
    "tp ppo": ({**TP, **PPO}, {}),
    "tp restored": (TP, {"save_after": 0}),
    "pp": (PP, {}),
    "pp stream": ({**PP, **STREAM}, {"feeds": [1, 2]}),
    "pp interleaved": ({**PP, "megatron": {"virtual_pipeline_model_parallel_size": 2}}, {"deep": True}),
    "pp uneven": ({**PP, "megatron": {"num_layers_in_first_pipeline_stage": 1}}, {"deep": True}),
    "pp kl two mini-batches": ({**PP, **KL, "minibatches": 2}, {}),
    "pp ppo": ({**PP, **PPO}, {}),
    "pp restored": (PP, {"save_after": 0}),
    "ep": (EP, {"mixture": True}),
    "ep stream": ({**EP, **STREAM}, {"mixture": True, "feeds": [1, 1, 1]}),
    "ep kl two mini-batches": ({**EP, **KL, "minibatches": 2}, {"mixture": True}),
    "ep sharded optimizer": ({**EP, **SHARDED}, {"mixture": True, "steps": 3}),
    "ep sharded optimizer, restored": ({**EP, **SHARDED}, {"mixture": True, "steps": 3, "save_after": 1}),
    "ep nothing finite": (EP, {"mixture": True, "spoil": 7}),
    "cp": (CP, {}),
    "cp stream": ({**CP, **STREAM}, {"feeds": [2, 1]}),
    "cp kl two mini-batches": ({**CP, **KL, "entropy_coefficient": 0.01, "minibatches": 2}, {}),
    "cp by length, packed": ({**CP, "micro_batch_order": "length", "pack_tokens": 60}, {}),
    "cp ppo": ({**CP, **PPO}, {}),
    "cp ppo stream": ({**CP, **PPO, **STREAM}, {"feeds": [1, 1]}),
    "cp sharded optimizer": ({**CP, **SHARDED}, {"steps": 3}),
    "cp sharded optimizer, restored": ({**CP, **SHARDED}, {"steps": 3, "save_after": 1}),
    "cp nothing finite": (CP, {"spoil": 7}),
    "cp of a mixture": ({**CP, "expert_parallel": 2}, {"mixture": True}),
    "cp of a mixture stream": ({**CP, "expert_parallel": 2, **STREAM}, {"mixture": True, "feeds": [1, 1, 1]}),
    "tp of a mixture": (TP, {"mixture": True}),
    "pp of a mixture": (PP, {"mixture": True}),
    "dp part": ({**DP, **STREAM}, {"feeds": [1, 2], "units": [1], "lends": True}),
    "dp part, whole": ({**DP, **STREAM}, {"feeds": [1, 2], "units": [1]}),
    "dp kl sharded part": ({**DP, **KL, **SHARDED, "stream": True}, {"feeds": [2, 1], "units": [0], "lends": True}),
    "dp kl sharded part, whole": ({**DP, **KL, **SHARDED, "stream": True}, {"feeds": [2, 1], "units": [0]}),
    "dp ppo part": ({**DP, **PPO, **STREAM}, {"feeds": [1, 1], "units": [0], "lends": True}),
    "dp ppo part, whole": ({**DP, **PPO, **STREAM}, {"feeds": [1, 1], "units": [0]}),
    "dp no such part": ({**DP, **STREAM}, {"feeds": [1], "units": [2], "lends": True}),
    "dp wrong world": ({**DP, **TP}, {}),
}


class Ranks:
    """Plays the scenarios of a tier when they are first asked for, on two ranks together, and each one on one rank alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._models = {
            "dense": tiny_folder(folder / "dense"),
            "mixture": tiny_mixture(folder / "mixture"),
            "deep": tiny_folder(folder / "deep", layers=4),
        }
        self._pairs: dict[bool, tuple[Answers, Answers]] = {}
        self._alone: Answers = {}

    def pair(self, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """What each of the two ranks saw."""
        tier = is_long(name)
        if tier not in self._pairs:
            self._pairs[tier] = self._play([other for other in SCENARIOS if is_long(other) == tier])
        first, second = self._pairs[tier]
        return first[name], second[name]

    def alone(self, name: str) -> dict[str, Any]:
        """What one rank saw in the same scenario; some differ in the layout only."""
        sizes = ("data_parallel", "tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")
        one = {**dict.fromkeys(sizes, 1), "megatron": {}}
        scenario = self.scenario(name, "alone")
        scenario["settings"] |= one
        scenario |= {"units": None, "lends": False}
        same = json.dumps({**scenario, "folder": ""}, sort_keys=True)
        if same not in self._alone:
            self._alone[same] = play(scenario, 0, 1, "")
        return self._alone[same]

    def scenario(self, name: str, where: str) -> dict[str, Any]:
        settings, more = SCENARIOS[name]
        model = self._models[next((kind for kind in ("mixture", "deep") if kind in more), "dense")]
        return {"model": model, "settings": {**BASE, **settings}, "folder": str(self._folder / where / name), **more}

    def _play(self, names: list[str]) -> tuple[Answers, Answers]:
        folder = self._folder / names[0]
        folder.mkdir()
        (folder / "scenarios.json").write_text(json.dumps({name: self.scenario(name, "pair") for name in names}))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        command = ["-m", "scripts.bench.probes.megatron.trainer_probe", str(folder / "scenarios.json")]
        meet = f"file://{folder / 'meet'}"
        for ended in wait_for_all(
            [ForkedRank(*command, str(rank), "2", meet, env=environment) for rank in range(2)], 280
        ):
            assert ended.code == 0, ended.err[-4000:]
        first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in range(2))
        return first, second


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    yield Ranks(tmp_path_factory.mktemp("ranks"))
    parallel_layout.shutdown_parallel()


# One of a kind is in every run; each takes seconds.
EVERY_RUN = (
    "dp", "dp stream", "dp one micro-batch", "dp ppo", "dp ppo stream", "dp sharded optimizer", "dp sharded optimizer, restored",
    "dp nothing finite", "tp", "tp stream", "tp long rows", "cp", "cp stream", "ep", "ep stream", "ep nothing finite",
    "tp of a mixture",
    "dp part", "dp part, whole", "dp no such part", "dp wrong world",
)  # fmt: skip


def is_long(name: str) -> bool:
    """Pipelines belong to the long tier: tests/megatron/test_gradient_stream.py has the same layouts in every run."""
    return name not in EVERY_RUN


def tiers(names: Iterable[str]) -> list[ParameterSet | str]:
    return [pytest.param(name, marks=pytest.mark.long) if is_long(name) else name for name in names]


REFUSED = ("dp wrong world", "dp no such part")
TRAINED = tiers(name for name in SCENARIOS if name not in REFUSED)


@pytest.mark.parametrize("name", TRAINED)
def test_two_ranks_train_as_one(name: str, ranks: Ranks) -> None:
    (found, _), expected = ranks.pair(name), ranks.alone(name)
    assert "error" not in found, found["error"]
    assert "error" not in expected, expected["error"]
    assert len(found["metrics"]) == len(expected["metrics"]) > 1
    assert found["gap"]["tokens"] == expected["gap"]["tokens"] > 0
    for step, (one, other) in enumerate(zip(expected["metrics"], found["metrics"], strict=True)):
        assert one.keys() == other.keys()
        # From the second step on, weights differ by Adam's answer to gradients that differ in the last bits.
        tolerance = 1e-5 if step == 0 else 2e-3
        assert other["loss"] == pytest.approx(one["loss"], abs=tolerance)
        for key, value in one.items():
            if key not in ("fed", "tis_max", "logprob_gap_max"):
                assert other[key] == pytest.approx(value, rel=50 * tolerance, abs=tolerance), (step, key)
        for key in ("tokens", "trajectories", "skipped", "updates", "skipped_updates", "gradient_not_finite"):
            assert other[key] == one[key], (step, key)


@pytest.mark.parametrize("name", TRAINED)
def test_both_ranks_report_the_same_and_hold_one_model(name: str, ranks: Ranks) -> None:
    first, second = ranks.pair(name)
    assert first["metrics"] == second["metrics"]
    assert first["weights"] == second["weights"]
    assert first["gap"] == second["gap"]
    assert first.get("faulty") == second.get("faulty")


@pytest.mark.parametrize("name", tiers(["dp nothing finite", "ep nothing finite", "cp nothing finite"]))
def test_the_trajectory_at_fault_is_named_on_whichever_replica_it_was(name: str, ranks: Ranks) -> None:
    first, _ = ranks.pair(name)
    assert first["faulty"] == ["s1-7"]
    assert first["metrics"][1]["gradient_not_finite"] == 1


STREAMED = {
    "dp stream": "dp",
    "dp pool stream": "dp pool",
    "dp kl stream": "dp kl",
    "dp ppo stream": "dp ppo",
    "tp stream": "tp",
    "tp long rows stream": "tp long rows",
    "pp stream": "pp",
    "cp stream": "cp",
    "cp ppo stream": "cp ppo",
    "cp of a mixture stream": "cp of a mixture",
    "ep stream": "ep",
}


@pytest.mark.parametrize("name", tiers(STREAMED))
def test_a_stream_over_two_ranks_ends_with_the_bits_of_the_whole_batch(name: str, ranks: Ranks) -> None:
    for streamed, whole in zip(ranks.pair(name), ranks.pair(STREAMED[name]), strict=True):
        assert all(metrics["fed"] > 0 for metrics in streamed["metrics"])
        assert streamed["state"] == whole["state"]


@pytest.mark.parametrize("name", tiers(["dp part", "dp kl sharded part", "dp ppo part"]))
def test_a_part_of_the_replicas_that_streams_ends_with_the_bits_of_the_whole_trainer(name: str, ranks: Ranks) -> None:
    for part, whole in zip(ranks.pair(name), ranks.pair(f"{name}, whole"), strict=True):
        assert "error" not in part, part["error"]
        assert all(metrics["fed"] > 0 for metrics in part["metrics"])
        assert all(metrics["stream_restarts"] == 0 for metrics in part["metrics"] if "stream_restarts" in metrics)
        assert (part["state"], part["weights"]) == (whole["state"], whole["weights"])


def test_what_a_part_streams_is_computed_by_it(ranks: Ranks) -> None:
    assert ranks.pair("dp part")[0]["weights"] != ranks.pair("dp stream")[0]["weights"], "sums in another order"


def test_a_part_that_is_none_of_the_trainers_is_refused(ranks: Ranks) -> None:
    for answer in ranks.pair("dp no such part"):
        assert answer["error"].startswith("ConfigError: replicas = 2: must be below 2")


RESTORED = {
    "dp sharded optimizer, restored": "dp sharded optimizer",
    "dp restored": "dp ppo",
    "ep sharded optimizer, restored": "ep sharded optimizer",
    "cp sharded optimizer, restored": "cp sharded optimizer",
    "tp restored": "tp",
    "pp restored": "pp",
}


@pytest.mark.parametrize("name", tiers(RESTORED))
def test_restored_ranks_continue_bit_for_bit(name: str, ranks: Ranks) -> None:
    for restored, whole in zip(ranks.pair(name), ranks.pair(RESTORED[name]), strict=True):
        assert restored["state"] == whole["state"]
        assert restored["weights"] == whole["weights"]


def test_an_interface_that_does_not_exist_is_refused_with_those_that_do() -> None:
    parallel_layout._check_interface("")
    parallel_layout._check_interface("lo")
    with pytest.raises(ConfigError, match=r"has no such interface; it has: .*lo") as caught:
        parallel_layout._check_interface("nic9")
    assert caught.value.field == "trainer.interface"


def test_ranks_that_are_not_the_product_of_the_parallel_sizes_are_refused(ranks: Ranks) -> None:
    for answer in ranks.pair("dp wrong world"):
        assert answer["error"].startswith("ConfigError: world_size = 2")


def test_two_ray_actors_train_as_one_and_a_dead_one_is_named(ranks: Ranks) -> None:
    ray = pytest.importorskip("ray")
    expected = ranks.alone("dp stream")
    scenario = ranks.scenario("dp stream", "ray")

    async def main() -> list[dict[str, float]]:
        trainer = RayTrainer(TRAINER_CLASS, {"OMP_NUM_THREADS": "1"}, 2)
        await trainer.start()
        await trainer.create(
            {"model": scenario["model"], "settings": scenario["settings"], "total_steps": 10, "seed": 3}
        )
        found = []
        for step in range(2):
            batch = make_batch(step)
            for part in chunked(batch.samples, scenario["feeds"]):
                await trainer.feed(part, step)
            found.append(dict((await trainer.train_step(batch)).values))
        os.kill((await trainer.pids())["trainer-1"], signal.SIGKILL)
        with pytest.raises(RetryableError, match="rank 1 of 2: trainer-1 died"):
            await trainer.train_step(make_batch(2))
        with pytest.raises(RetryableError, match="the trainer has lost a rank"):
            await trainer.publish()
        await trainer.close()
        return found

    start_ray(Config.model_validate({"ray": {"cpus": 2}}))
    try:
        found = asyncio.run(main())
    finally:
        ray.shutdown()
    for one, other in zip(expected["metrics"], found, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-5 if one is expected["metrics"][0] else 2e-3)
        assert other["stream_fed"] == one["fed"] > 0


@given(
    replicas=st.sampled_from([1, 2, 4, 6]),
    together=st.sampled_from([1, 2]),
    in_step=st.booleans(),
    feeds=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), max_size=6),
    rest=st.integers(0, 9),
)
def test_every_micro_batch_is_dealt_once_to_a_replica_that_computes_and_those_in_step_run_as_many(
    replicas: int, together: int, in_step: bool, feeds: list[tuple[int, int]], rest: int
) -> None:
    if replicas % together:
        return
    dealers = [Dealer(index, replicas, in_step=in_step) for index in range(replicas)]
    done: list[list[int]] = [[] for _ in dealers]
    number = 0
    for part, count in [*feeds, (-1, rest)]:
        last = part < 0
        first = part % (replicas // together) * together
        among = tuple(range(replicas)) if last else tuple(range(first, first + together))
        plans = [[number + index] for index in range(count)]
        number += count
        shares = [dealer.deal_micro_batches(plans, last=last, among=among)[1] for dealer in dealers]
        for index, own in enumerate(shares):
            assert not own or index in among
            done[index] += [share.members[0] for share in own if not share.idle]
        if in_step:
            for start in range(0, replicas, together):
                assert len({len(own) for own in shares[start : start + together]}) == 1
    assert sorted(itertools.chain.from_iterable(done)) == list(range(number))
