"""The simulator's cost models: what they promise, and what they say in cases that can be counted by hand."""

import itertools
import random

import pytest

from orchestrator.api import ConfigError
from orchestrator.config import load_config
from orchestrator.sim.cost_model import (
    SEQUENCE_SECONDS,
    STEP_SECONDS,
    EngineCosts,
    GrainedCosts,
    GrainedTraining,
    LinearCosts,
    RooflineCosts,
    RooflineTraining,
    seconds_of,
    steps_in,
)
from orchestrator.sim.hardware import DEVICES, MODELS, DeviceSpec, ModelSpec
from orchestrator.sim.simulated_cluster import engine_costs, fleet, trainer_costs

EVERY = [
    RooflineCosts(device, model, ranks)
    for device, model, ranks in itertools.product(DEVICES.values(), MODELS.values(), (1, 2, 4, 8))
    if model.weight_bytes < 0.8 * ranks * device.memory_gb * 1e9
    and device.memory_gb * ranks > 1.25e-9 * model.weight_bytes
]
PUBLISHED = {  # billions of parameters, from the models' cards on the Hugging Face Hub
    "Qwen2.5-7B": 7.61,
    "Qwen2.5-14B": 14.7,
    "Qwen2.5-32B": 32.5,
    "Qwen2.5-72B": 72.7,
    "Qwen3-8B": 8.2,
    "Qwen3-14B": 14.8,
    "Qwen3-32B": 32.8,
    "Qwen3-30B-A3B": 30.5,
}


@pytest.mark.parametrize("name", MODELS)
def test_models_have_as_many_parameters_as_their_cards_say(name: str) -> None:
    assert MODELS[name].parameters / 1e9 == pytest.approx(PUBLISHED[name], rel=0.01)


def test_a_mixture_reads_all_of_itself_and_computes_with_a_tenth() -> None:
    model = MODELS["Qwen3-30B-A3B"]
    assert model.active_parameters / 1e9 == pytest.approx(3.3, rel=0.1)
    costs = RooflineCosts(DEVICES["H800"], model)
    few, many = costs.decode(1)[0], costs.decode(256)[0]
    assert few < 0.2 * many  # one token wakes 8 of 128 experts, many wake all


@pytest.mark.parametrize("costs", EVERY, ids=lambda c: f"{c.model.name} on {c.tensor_parallel} {c.device.name}")
def test_more_work_never_costs_less(costs: RooflineCosts) -> None:
    fixed = [costs.decode(running)[0] for running in (1, 2, 3, 8, 32, 64, 200, 400, 1000)]
    assert fixed == sorted(fixed)
    prefills = [costs.prefill(tokens, tokens * tokens / 2, 8) for tokens in (0, 1, 7, 100, 8192, 8193, 30_000)]
    assert prefills == sorted(prefills)
    assert costs.prefill(100, 1e6, 8) >= costs.prefill(100, 1e3, 8)
    assert costs.decode(7)[1] > 0.0


def test_more_devices_hold_more_kv_and_step_faster_where_memory_binds() -> None:
    for model in ("Qwen3-8B", "Qwen3-32B"):
        rows = [RooflineCosts(DEVICES["H20"], MODELS[model], ranks) for ranks in (1, 2, 4, 8)]
        room = [row.kv_tokens for row in rows]
        assert all(two > 2 * one for one, two in itertools.pairwise(room))
        assert rows[1].decode(64)[1] == pytest.approx(rows[0].decode(64)[1] / 2)
    big = [RooflineCosts(DEVICES["H800"], MODELS["Qwen2.5-32B"], ranks).decode(32)[0] for ranks in (2, 4, 8)]
    assert big == sorted(big, reverse=True)


def test_compute_bound_work_is_faster_on_h800_and_memory_bound_work_on_h20() -> None:
    h800, h20 = (RooflineCosts(DEVICES[name], MODELS["Qwen3-8B"]) for name in ("H800", "H20"))
    assert h800.prefill(8192, 8192 * 8192 / 2, 1) < 0.25 * h20.prefill(8192, 8192 * 8192 / 2, 1)
    assert seconds_of(1, *_step(h20, 32, 20_000)) < seconds_of(1, *_step(h800, 32, 20_000))


def _step(costs: EngineCosts, running: int, each: int) -> tuple[float, float]:
    fixed, growing = costs.decode(running)
    return fixed + growing * running * each, growing * running


TOY = DeviceSpec("toy", 1.0, 1e-3, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, network_gb_s=1.25, pcie_gb_s=1.25)
SMALL = ModelSpec("small", 1, 1000, 1000, 10, 5, 1000, head_size=100)


def test_a_small_case_by_hand() -> None:
    """1 TFLOP/s and 1 GB/s; a layer with attention of 3, feed-forward of 3, and a head of 1 million parameters."""
    costs = RooflineCosts(TOY, SMALL, memory_share=4.0)
    assert (SMALL.shared_parameters, SMALL.parameters) == (7_000_000, 8_000_000)
    assert SMALL.kv_bytes == 2 * 5 * 100 * 2
    assert costs.kv_tokens == (4_000_000_000 - 3_000_000_000 - 16_000_000) // 2000
    fixed, growing = costs.decode(3)
    assert fixed == pytest.approx(14e6 / 1e9 + STEP_SECONDS + 3 * SEQUENCE_SECONDS)  # reading the weights
    assert growing == pytest.approx(2000 / 1e9)
    # 2,000 tokens beside 3 others: 14e6 operations a token are more than the reading, and the pairs come on top
    assert costs.prefill(2000, 1e6, 3) == pytest.approx(14e6 * 2003 / 1e12 - 14e6 / 1e9 + 4 * 1e6 * 1000 / 1e12)
    assert costs.prefill(500, 0.0, 3) == 0.0  # as many as share the reading of the weights
    assert costs.weights.fetch == pytest.approx(16e6 / 1e9)
    training = RooflineTraining(TOY, SMALL, 2, 1, serial=1e-3)
    computed = 4 * (14e6 * 400 + 4 * 50_000 * 1000) / 2e12
    assert training.train([100, 300]) == pytest.approx(computed + 0.4)
    assert training.train([100, 300], 0.25) == pytest.approx(4 * computed + 0.4)  # on a quarter of the devices


@pytest.mark.parametrize("growth", [0.0, 1e-9, 1e-4, 0.3])
def test_steps_in_is_the_inverse_of_seconds_of(growth: float) -> None:
    rng = random.Random(3)
    for _ in range(300):
        first = rng.uniform(growth, 1.0) + 1e-3
        steps = rng.randint(1, 5000)
        seconds = seconds_of(steps, first, growth)
        assert abs(seconds - sum(first + growth * at for at in range(steps))) <= 1e-9 * seconds
        middle = seconds - first / 2
        assert steps_in(middle, first, growth) == steps
        assert steps_in(-1.0, first, growth) == 1


def test_a_grained_model_costs_what_the_tokens_it_stands_for_cost() -> None:
    costs = RooflineCosts(DEVICES["H800"], MODELS["Qwen3-8B"])
    coarse = GrainedCosts(costs, 16)
    assert coarse.kv_tokens == costs.kv_tokens // 16
    fine = sum(seconds_of(1, *_step(costs, 20, 1600 + at)) for at in range(160))
    first, growth = _step(coarse, 20, 100)
    assert seconds_of(10, first, growth) == pytest.approx(fine)
    assert coarse.prefill(100, 5000, 4) == costs.prefill(1600, 5000 * 256, 4)
    training = RooflineTraining(DEVICES["H800"], MODELS["Qwen3-8B"], 8)
    assert GrainedTraining(training, 16).train([10, 20]) == training.train([160, 320])


def test_the_linear_model_is_the_config_s() -> None:
    costs = engine_costs(load_config(None, ["sim.decode_seconds_per_step=1", "sim.decode_seconds_per_sequence=0.5"]))
    assert isinstance(costs, LinearCosts)
    assert costs.decode(4) == (3.0, 0.0)
    assert costs.kv_tokens is None


def test_a_fleet_gives_each_worker_its_class() -> None:
    config = load_config(None, ["rollout.workers=3", "sim.costs=roofline", "sim.fleet.H800=2", "sim.fleet.H20=1"])
    assert fleet(config) == ["H800", "H800", "H20"]
    assert engine_costs(config, "H20").kv_tokens != engine_costs(config, "H800").kv_tokens
    assert trainer_costs(config).train([1000]) > 0


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (["sim.device=H9000"], "sim.device"),
        (["sim.model=Qwen9"], "sim.model"),
        (["sim.trainer_device=abacus"], "sim.trainer_device"),
        (["sim.model=Qwen2.5-72B"], "sim.tensor_parallel"),
        (["sim.tensor_parallel=3"], "sim.tensor_parallel"),
    ],
)
def test_what_cannot_be_is_one_clear_error(overrides: list[str], field: str) -> None:
    config = load_config(None, ["sim.costs=roofline", *overrides])
    with pytest.raises(ConfigError, match=field):
        print(engine_costs(config), trainer_costs(config))


def test_a_fleet_that_does_not_add_up_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sim\.fleet"):
        load_config(None, ["rollout.workers=3", "sim.fleet.H800=2"])
