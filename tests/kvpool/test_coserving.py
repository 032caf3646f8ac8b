"""Two real vLLM engines of different layouts in one pool, on one core: serving under load, rollouts by admission beside it."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.micro import coserve_slo
from scripts.bench.micro.coserve_slo import LADDER, load_table, table
from scripts.bench.probes.vllm.coserve_probe import MODES, TRAJECTORY, Pair, scaled, summary
from scripts.bench.probes.vllm.remap_probe import measure
from vllm_rlplugin.kvpool.engine.pool_engine import pool_path
from vllm_rlplugin.kvpool.ledger.page_ledger import PagePool
from vllm_rlplugin.kvpool.ledger.tenant_words import ControlWord

LOAD = [[0.25 * index, 60 + 40 * (index % 4), 6] for index in range(16)]
LAX = (60.0, 60.0)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pair, Path]]:
    name = f"test-coserving-{os.getpid()}"
    found = Pair(tmp_path_factory.mktemp("models"), name, min(os.sched_getaffinity(0)))
    found.serving.do("replay", arrivals=LOAD[:4])
    yield found, pool_path(name)
    found.close()
    pool_path(name).unlink(missing_ok=True)


@pytest.mark.long
@pytest.mark.engine
def test_rollouts_run_beside_a_busy_serving_engine_in_admitted_steps_only(pair: tuple[Pair, Path]) -> None:
    engines, _ = pair
    for mode in ("dual", "ttft", "tpot"):
        found = engines.replay(LOAD, mode, LAX)
        assert len(found["ttft"]) == len(LOAD)
        assert found["late"] == 0
        assert found["rollout_tokens"] > 0
        assert found["rollout_steps"] > 0


@pytest.mark.long
@pytest.mark.engine
def test_an_slo_without_any_slack_keeps_rollouts_out_and_they_are_handed_back(pair: tuple[Pair, Path]) -> None:
    """What arrives next has no slack either, so nothing runs even while serving is idle; after two seconds they go elsewhere."""
    engines, _ = pair
    engines.serving.do("tune", ttft=1e-6, tpot=1e-6, mode="dual")
    engines.serving.do("look", opened=True)
    time.sleep(0.2)
    before = engines.rollout.do("look")
    done = engines.rollout.do("roll", seconds=4.0, **TRAJECTORY)
    after = engines.rollout.do("look")
    assert done["tokens"] == 0
    assert done["returned"] >= TRAJECTORY["sequences"]
    assert after["steps"] == before["steps"]
    assert after["stalls"] > before["stalls"]


@pytest.mark.long
@pytest.mark.engine
def test_a_dry_run_computes_nothing_and_says_what_it_would_have(pair: tuple[Pair, Path]) -> None:
    engines, path = pair
    pool = PagePool.open(path)
    engines.serving.do("tune", ttft=LAX[0], tpot=LAX[1], mode="dual")
    pool.control(ControlWord.DRY, 1)
    try:
        before = engines.rollout.do("look")
        assert engines.rollout.do("roll", seconds=1.5, **TRAJECTORY)["tokens"] == 0
        after = engines.rollout.do("look")
    finally:
        pool.control(ControlWord.DRY, 0)
        pool.close()
    assert after["would"] > before["would"]
    assert after["tokens"] == before["tokens"]


@pytest.mark.long
@pytest.mark.engine
def test_a_rollout_engine_that_is_stopped_at_any_point_holds_up_no_serving_request(pair: tuple[Pair, Path]) -> None:
    engines, _ = pair
    alone = engines.replay(LOAD, "alone", LAX)
    engines.serving.do("tune", ttft=LAX[0], tpot=LAX[1], mode="dual")
    engines.serving.do("look", opened=True)
    engines.rollout.tell("roll", seconds=8.0, **TRAJECTORY)
    engines.serving.tell("replay", arrivals=LOAD)
    for number in range(12):  # at a dozen points of its steps, most of the time standing still
        time.sleep(0.05 + 0.013 * number)
        engines.rollout.process.send_signal(signal.SIGSTOP)
        time.sleep(0.25)
        if number < 11:
            engines.rollout.process.send_signal(signal.SIGCONT)
    found = engines.serving.answer()
    engines.rollout.process.send_signal(signal.SIGCONT)
    assert len(found["ttft"]) == len(LOAD)
    assert found["seconds"] < 3 * alone["seconds"] + 10
    assert engines.rollout.answer()["tokens"] > 0, "and it goes on"
    assert engines.serving.do("look")["kills"] == 0, "it was within its budget"


def test_a_trace_is_squeezed_to_the_rate_with_a_burst_in_the_middle() -> None:
    trace = [[100 * index, 800, 40] for index in range(200)]
    found = scaled(trace, 10.0, 5.0)
    assert all(row[1:] == [100, 24] for row in found)
    inside = sum(5.0 <= row[0] < 6.0 for row in found)
    assert sum(row[0] < 5.0 for row in found) == pytest.approx(25, abs=1)
    assert inside == pytest.approx(4 * 5, abs=2)
    longer = scaled(trace, 24.0, 5.0)
    for second in (6, 18):
        assert sum(second <= row[0] < second + 1 for row in longer) == pytest.approx(4 * 5, abs=2)
    assert len(longer) == 24 * 5 + 2 * 15


def test_the_summary_counts_over_all_replays_and_says_what_of_the_idle_share_was_used() -> None:
    rows = [
        {"ttft": [0.1, 0.2], "tpot": [0.01, 0.02], "late": 1, "busy": 0.3, "seconds": 2.0, "pages": 7},
        {"ttft": [0.3], "tpot": [0.03], "late": 0, "busy": 0.5, "seconds": 2.0, "pages": 9},
    ]
    found = summary(rows, 100.0)
    assert (found["requests"], found["late"], found["ttft_p99"], found["busy"]) == (3, 1, 0.3, 0.4)
    assert "rollout_tokens_per_s" not in found


def played(late: int, ttft: float, tokens: float = 50.0, requests: int = 302) -> dict[str, Any]:
    """What the probe says of one run."""
    alone = {"requests": requests, "late": 2, "ttft_p99": 0.1, "tpot_p99": 0.02}
    dual = {**alone, "late": late, "ttft_p99": ttft, "rollout_tokens_per_s": tokens}
    return {"modes": {"alone": alone, "dual": dual}, "slo": {"ttft": 0.15, "tpot": 0.03}, "pid": 7}


@pytest.mark.parametrize(
    ("runs", "value", "holds"),
    [
        ([played(1, 0.12)] * 4 + [played(2, 0.14)], 1.4, True),
        ([played(1, 0.12)] * 4 + [played(3, 0.14)], 1.4, False),  # later than the worst run alone
        ([played(1, 0.12)] * 4 + [played(1, 0.16)], 1.6, False),
        ([played(1, 0.12)] * 5 + [played(1, 0.12, tokens=0.0)], 1.2, False),
        ([played(1, 0.12)] * 4 + [played(1, 0.12, requests=80)], 1.2, False),  # too few: its P99 is its longest
    ],
)
def test_the_worst_run_decides_not_the_median(runs: list[dict[str, Any]], value: float, holds: bool) -> None:
    found = coserve_slo.result({"azure_code": runs}, {}, {}, quick=False, nonce="n")
    assert (found["value"], found["holds"]) == (pytest.approx(value), holds)
    assert found["detail"]["traces"]["azure_code"]["dual"]["ttft_p99_over_alone"]["median"] == pytest.approx(1.2)


def test_one_command_plays_both_traces_five_times_and_the_curve_and_the_quick_form_claims_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[list[str]] = []

    def probe(name: str, arguments: list[str], limit: float) -> dict[str, Any]:
        assert len(json.loads(Path(arguments[1]).read_text())) == 2000
        asked.append(arguments[4:])
        return played(1, 0.12)

    monkeypatch.setattr(coserve_slo, "run_probe", probe)
    found = coserve_slo.run(quick=False, nonce="n")
    assert len(asked) == 2 * (coserve_slo.RUNS + 1 + len(coserve_slo.LOADS))
    assert sum("--requests" in each for each in asked) == 2 * coserve_slo.RUNS
    assert sum("--modes" not in each for each in asked) == 2, "the ladder: all modes"
    assert found["detail"]["by_load"]["azure_code"].keys() == {"0.15", "0.3", "0.45", "0.6"}
    assert load_table(found).splitlines()[2] == "| `mooncake_conversation` | 15 % | 20 % | 33 % | 1 of 302 | 50 |"
    asked.clear()
    assert coserve_slo.run(quick=True, nonce="n")["holds"] is None
    assert asked == [["--seconds", "3", "--rounds", "1", "--modes", "static,none,dual"]]


def test_the_table_has_the_rungs_that_a_result_has_in_the_order_of_the_ladder() -> None:
    row = {"ttft_p99_over_alone": 1.234, "tpot_p99_over_alone": 1.1, "late": 2, "requests": 84}
    modes = {
        "alone": {},
        "dual": {**row, "rollout_tokens_per_s": 1020.4},
        "static": {**row, "rollout_tokens_per_s": 7.0},
    }
    rows = table({"detail": {"ladder": {"azure_code": modes}}}).splitlines()[2:]
    assert rows[0] == "| `azure_code` | static partition of the KV memory, no admission | 1.23 | 1.10 | 2 of 84 | 7 |"
    assert rows[1] == "| `azure_code` | + dual admission | 1.23 | 1.10 | 2 of 84 | 1,020 |"
    assert set(LADDER) == set(MODES)


def test_pages_that_go_from_process_to_process_are_the_same_memory() -> None:
    path = Path(f"/dev/shm/rl-coserve-test-{os.getpid()}-remap")
    try:
        found = measure(argparse.Namespace(kind="host", library="", mib=8, rounds=3), path, 4)
    finally:
        path.unlink(missing_ok=True)
    assert len(found) == 3
    assert all(0 < release < seconds and 0 < mapped < seconds for seconds, release, mapped in found)
