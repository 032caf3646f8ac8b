"""The roofline's own error: of the roofline as it is, against speeds that no constant was taken from."""

import json
from pathlib import Path

import pytest

from orchestrator.sim.hardware import DEVICES, MODELS
from scripts.bench.papers import roofline_error

RESULT = Path(__file__).parents[2] / "docs/results/roofline-error.json"


def test_a_step_that_reads_weights_and_contexts_is_predicted_by_hand() -> None:
    """Eight sequences of Qwen3-8B on one H100: bound by memory, so bytes over bandwidth, 1.5 ms and 35 us a sequence."""
    row = next(row for row in roofline_error.rows() if (row["model"], row["sequences"]) == ("Qwen3-8B", 8))
    model, rate = MODELS["Qwen3-8B"], DEVICES["H100"].bandwidth
    read = 2 * model.shared_parameters / rate + 8 * row["context"] * model.kv_bytes / rate
    step = read + 1.5e-3 + 8 * 35e-6
    assert row["predicted"] == pytest.approx(8 / step, rel=0.02)  # prompts are a hundredth
    assert row["error"] == pytest.approx(row["predicted"] / 962 - 1, abs=1e-3)


def test_the_committed_errors_are_those_of_the_roofline_as_it_is() -> None:
    committed = json.loads(RESULT.read_text(encoding="utf-8"))
    now = roofline_error.run(False, "")
    assert committed["value"] == now["value"]
    for part in ("rows", "groups", "second_gpu", "kv_tokens"):
        assert committed["detail"][part] == now["detail"][part]


def test_no_published_speed_is_one_that_a_constant_was_taken_from() -> None:
    sources = {row["source"] for row in roofline_error.rows()}
    assert not any("InferSim" in source or "RollArt" in source for source in sources)
    assert {row["group"] for row in roofline_error.rows()} == set(roofline_error.run(True, "")["detail"]["groups"])
