"""What the serving team says about a pool: lent, taken back, killed, looked at; by commands, on real processes."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.cli import main
from orchestrator.policies.serving.admission import ServingState
from orchestrator.policies.serving.kv_sharing import SharingRules
from tests.support.waiting import wait_for
from vllm_rlplugin.kvpool.engine import pool_engine
from vllm_rlplugin.kvpool.engine.pool_engine import PoolPlan
from vllm_rlplugin.kvpool.ledger.page_ledger import PagePool
from vllm_rlplugin.kvpool.ledger.tenant_words import RolloutWords, ServingWords
from vllm_rlplugin.kvpool.pages.page_geometry import PageGeometry
from vllm_rlplugin.kvpool.serving import pool_lending
from vllm_rlplugin.kvpool.serving.guardian import Guardian
from vllm_rlplugin.options import PluginOptions
from vllm_rlplugin.server.server_lease import LeaseBook, lease_path

pytestmark = pytest.mark.slow

RULES = SharingRules(pages=100, headroom=0.2)


class Setup:
    """A pool of 100 pages; rollout tenants in processes of their own, which cannot give back two of their pages."""

    def __init__(self) -> None:
        self.name = f"test-lend-{os.getpid()}-{random.randrange(10**9)}"
        self.path = pool_engine.pool_path(self.name)
        self.pool = PagePool.create(self.path, 100, page_bytes=4096)
        self.children: list[int] = []

    def serve(self) -> Guardian:
        self.pool.join("serving", "serving")
        guardian = Guardian(self.pool, RULES, time.monotonic, 0.0)
        guardian.watch(lambda: None)
        return guardian

    def rollout(self, name: str, polite: bool = True) -> int:
        child = os.fork()
        if not child:
            try:
                play(self.path, name, polite)
            finally:
                os._exit(1)
        self.children.append(child)
        wait_for(lambda: self.used() >= 2)
        return child

    def used(self) -> int:
        return sum(tenant.used for tenant in self.pool.view().tenants if tenant.role == "rollout")


def play(path: Path, name: str, polite: bool) -> None:
    """Takes all that it may have; gives back what it must, if it is polite."""
    pool = PagePool.open(path)
    slot = pool.join(name, "rollout", 10)
    pool.publish(RolloutWords(minimum=2, tokens=7).pack())
    held = np.empty(0, np.uint64)
    while True:
        mine = next(tenant for tenant in pool.view().tenants if tenant.slot == slot)
        over = max(0, held.size - max(2, mine.budget)) if polite else 0
        if over:
            pool.release(held[:over])
            held = held[over:]
        held = np.concatenate([held, pool.acquire(100, whole=False)])
        time.sleep(0.002)


@pytest.fixture
def setup() -> Iterator[Setup]:
    made = Setup()
    yield made
    for child in made.children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    made.path.unlink()


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_an_idle_serving_engine_lends_what_the_team_says_and_takes_it_back(
    setup: Setup, capsys: pytest.CaptureFixture[str]
) -> None:
    guardian = setup.serve()
    setup.rollout("roll")
    wait_for(lambda: setup.used() > 60)
    assert said(capsys, "lend", "--pool", setup.name, "--max", "0.3")[0] == 0
    wait_for(lambda: setup.used() == 32)
    code, found = said(capsys, "reclaim", "--pool", setup.name)
    assert (code, found) == (1, {"out": 2, "kept": 2, "killed": []}), "two pages are still out"
    guardian.open_budget()
    time.sleep(0.1)
    assert setup.used() == 2, "the next RL step gives nothing of what was taken back"
    assert said(capsys, "lend", "--pool", setup.name, "--max", "0.5")[0] == 0
    wait_for(lambda: setup.used() == 52)
    guardian.stop()


def test_a_pool_whose_team_has_not_said_anything_lends_nothing_and_says_so(
    setup: Setup, capsys: pytest.CaptureFixture[str]
) -> None:
    prometheus_client = pytest.importorskip("prometheus_client")
    from vllm_rlplugin.server.pool_metrics import PoolMetrics

    metrics = PoolMetrics(PagePool.open(setup.path), prometheus_client.CollectorRegistry())
    metrics.refresh()
    assert metrics.recent_use["lends"], "no serving engine, no owner: rollouts have the pool"
    setup.pool.join("serving", "serving")
    guardian = Guardian(setup.pool, replace(RULES, lent=0.0), time.monotonic, 0.0)
    metrics.refresh()
    assert not metrics.recent_use["lends"]
    assert said(capsys, "lend", "--pool", setup.name, "--status")[1]["most"] == 0
    code, found = said(capsys, "lend", "--pool", setup.name, "--max", "0.3", "--status")
    assert (code, found["most"]) == (0, 0.3), "--status takes nothing of what is asked for away"
    metrics.refresh()
    assert metrics.recent_use["lends"]
    guardian.stop()


def test_the_kill_switch_ends_rollout_engines_whatever_they_do_and_nothing_is_lent_afterwards(
    setup: Setup, capsys: pytest.CaptureFixture[str]
) -> None:
    guardian = setup.serve()
    child = setup.rollout("roll", polite=False)
    wait_for(lambda: setup.used() > 60)
    os.kill(child, signal.SIGSTOP)
    code, found = said(capsys, "reclaim", "--pool", setup.name, "--kill")
    assert (code, found["out"], found["killed"]) == (0, 0, [child])
    setup.children.remove(child)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    setup.rollout("another")
    wait_for(lambda: setup.pool.view().tenants[-1].budget == 2)
    wait_for(lambda: setup.used() == 2)
    guardian.stop()


def test_without_a_serving_engine_the_command_itself_sets_the_budgets(
    setup: Setup, capsys: pytest.CaptureFixture[str]
) -> None:
    setup.rollout("roll")
    said(capsys, "lend", "--pool", setup.name, "--max", "0.2")
    wait_for(lambda: setup.used() == 22)
    assert said(capsys, "reclaim", "--pool", setup.name)[1]["out"] == 2


def test_what_is_taken_back_a_moment_after_the_serving_engine_died_comes_back(
    setup: Setup, capsys: pytest.CaptureFixture[str]
) -> None:
    setup.rollout("roll")
    wait_for(lambda: setup.used() == 10)
    serving = os.fork()
    if not serving:
        PagePool.open(setup.path).join("serving", "serving")
        signal.pause()
    wait_for(lambda: setup.pool.view().serving)
    os.kill(serving, signal.SIGKILL)
    os.waitpid(serving, 0)
    assert said(capsys, "reclaim", "--pool", setup.name)[1] == {"out": 2, "kept": 2, "killed": []}


@pytest.mark.parametrize(("lent", "budget"), [(None, 50), (0.3, 30 + 2), (0.0, 2)])
def test_without_a_serving_engine_one_that_comes_later_gets_no_more_than_was_said(
    setup: Setup, capsys: pytest.CaptureFixture[str], lent: float | None, budget: int
) -> None:
    if lent is not None:
        said(capsys, "lend", "--pool", setup.name, "--max", f"{lent}")
    geometry = PageGeometry.from_regions(100, [(0, 4096), (100 * 4096, 4096)], 4096)
    assert geometry.pages_a_group == 2
    slot = PoolPlan(geometry, 0, 50, "rollout").join(setup.pool)
    assert next(tenant.budget for tenant in setup.pool.view().tenants if tenant.slot == slot) == budget


def test_the_status_says_what_is_lent_to_whom_and_what_became_of_the_slos(
    setup: Setup, capsys: pytest.CaptureFixture[str]
) -> None:
    guardian = setup.serve()
    setup.pool.publish(ServingWords(ServingState(1.0, 0.07, busy=True), "dual", 9, 2, 1, 30, 4, 0).pack())
    child = setup.rollout("roll")
    code, found = said(capsys, "lend", "--pool", setup.name, "--dry-run")
    assert code == 0
    assert found["dry_run"]
    assert (found["rollouts"][0]["pid"], found["rollouts"][0]["tokens"]) == (child, 7)
    assert (found["slo"]["late_first"], found["slo"]["state"]["tpot_slack"]) == (2, None)
    assert found["lease"] is None
    LeaseBook("a server", lease_path(setup.path)).grant("run-007", "/its/metadata", "its key", 60)
    assert main(["lend", "--pool", setup.name, "--status"]) == 0
    text = capsys.readouterr().out
    for file in setup.path.parent.glob(f"{lease_path(setup.path).name}*"):
        file.unlink()
    assert re.match(
        r"rollouts hold (\d+) pages \([\d.]+ MiB, \d+% of the pool\): roll \1; users' P99 misses TTFT", text
    )
    for words in (
        "misses TTFT (22.2% late) and TPOT (13.3% late)",
        "lease: job run-007, for 60 s",
        "TTFT 70.0 ms, TPOT -",
        "TTFT misses: 2 of 9 tokens (1 caused by rollouts)",
        "dry run",
    ):
        assert words in text, (words, text)
    setup.pool.publish(ServingWords(ServingState(1.0, 0.07), "dual", 200, 2, 0, 300, 3, 0).pack())
    os.kill(child, signal.SIGKILL)
    setup.children.remove(child)
    os.waitpid(child, 0)
    assert main(["lend", "--pool", setup.name, "--status"]) == 0
    verdict = capsys.readouterr().out.splitlines()[0]
    assert verdict == "rollouts hold 0 pages (0 MiB, 0% of the pool); users' P99 is within its SLOs", (
        "who is dead has nothing"
    )
    guardian.stop()


def test_nothing_is_lent_before_the_serving_team_says_so() -> None:
    assert PluginOptions().kv_pool_lent == 0


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"out": 0, "kept": 0, "killed": []}, "everything is back"),
        ({"out": 0, "kept": 0, "killed": [7]}, "everything is back; killed: processes 7"),
        (
            {"out": 2, "kept": 2, "killed": []},
            "2 pages (4 MiB) remain in use, the minimum of running engines; --kill frees them",
        ),
        ({"out": 3, "kept": 2, "killed": []}, "3 pages (6 MiB) remain in use, not given back yet"),
    ],
)
def test_what_is_back_and_what_is_not_is_said_in_pages_and_mebibytes(found: dict[str, Any], said: str) -> None:
    assert pool_lending._describe_reclaimed(found, 2 << 20) == said


def test_the_metrics_are_those_of_the_pool_and_counters_never_fall(setup: Setup) -> None:
    from prometheus_client import CollectorRegistry

    from vllm_rlplugin.server.pool_metrics import PREFIX, PoolMetrics

    guardian = setup.serve()
    guardian.stop()
    registry = CollectorRegistry()
    metrics = PoolMetrics(PagePool.open(setup.path), registry)
    child = setup.rollout("roll")
    setup.pool.publish(ServingWords(ServingState(1.0, 0.07, busy=True), "dual", 9, 2, 1, 30, 4, 0).pack())
    metrics.refresh()
    metrics.refresh()
    assert metrics.recent_use["lends"] is True
    assert 0 <= metrics.recent_use["serving_now"] <= 1
    found = registry.get_sample_value
    assert found(PREFIX + "admitted_tokens_total") == 7
    assert found(PREFIX + "late_first_tokens_by_rollouts_total") == 1
    assert found(PREFIX + "ttft_slack_seconds") == pytest.approx(0.07)
    assert found(PREFIX + "tpot_slack_seconds") == float("inf")
    assert (found(PREFIX + "pages_rollout") or 0) >= 2
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    setup.children.remove(child)
    setup.pool.reap()
    pool_lending.set_lent(setup.pool, 0.0, None)
    metrics.refresh()
    assert metrics.recent_use["lends"] is False, "nothing for a run to borrow"
    assert found(PREFIX + "admitted_tokens_total") == 7
    assert found(PREFIX + "pages_rollout") == 0


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        (["lend", "--pool", "NAME", "--max", "1.5"], "give a share of the pool"),
        (["lend", "--pool", "NAME"], "give --max SHARE, --dry-run or --status"),
        (["reclaim", "--pool", "no-such-pool"], "this user has no such pool"),
    ],
)
def test_what_makes_no_sense_is_one_error(
    setup: Setup, arguments: list[str], fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([setup.name if text == "NAME" else text for text in arguments]) == 2
    assert fix in capsys.readouterr().err


def test_a_pool_that_others_could_open_is_refused(setup: Setup, capsys: pytest.CaptureFixture[str]) -> None:
    setup.path.chmod(0o644)
    assert main(["lend", "--pool", setup.name, "--status"]) == 2
    assert "belongs to another user, can be opened by others" in capsys.readouterr().err
