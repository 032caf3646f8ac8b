"""Rollout workers on devices of others, in virtual time: shares of a device, budgets, hand-backs, what serving feels of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.api import BorrowedWorker, CollectiveWorker, Completion, ConfigError, GenerationRequest, Sampling
from orchestrator.config import Config, load_config
from orchestrator.policies.serving.admission import Admission, Slo
from orchestrator.policies.serving.kv_sharing import SharingRules
from orchestrator.sim import hardware
from orchestrator.sim.coserving.borrowed_fleet import borrowed_of
from orchestrator.sim.coserving.serving_cluster import read_trace
from orchestrator.sim.coserving.serving_engine import PAGE, ServedLatencies, ServingEngine, UserRequest
from orchestrator.sim.coserving.shared_worker import BorrowedSimWorker
from orchestrator.sim.cost_model import RooflineCosts
from orchestrator.sim.paper_setups import load_scenario
from orchestrator.sim.simulated_run import SimResult, simulate
from orchestrator.sim.simulated_worker import SimWeights, SimWorker, TurnMoves
from scripts.bench.papers.rose_runs import serving_alone
from scripts.bench.virtual_run import run
from tests.support.worker_contract import CHECKS, Rig

STEP = 0.02
KV = PAGE / 4  # bytes of a token: four to a page
SMALL = (  # of rose.toml
    "run.steps=2",
    "rollout.environments=48",
    "rollout.groups_per_step=3",
    "rollout.workers=1",
    "sim.tasks.frozenlake.response_tokens=300",
    "sim.borrowed.serving=4",
)


def config(*overrides: str) -> Config:
    given = [
        f"sim.decode_seconds_per_step={STEP}",
        "sim.decode_seconds_per_sequence=0",
        "rollout.engine.max_num_seqs=8",
    ]
    return load_config(None, [*given, "sim.prefill_seconds_per_token=0", *overrides])


async def borrowed(given: Config, **more: Any) -> tuple[BorrowedSimWorker, SimWeights]:
    weights = SimWeights()
    weights.put(0)
    options: dict[str, Any] = {"lease": 10.0, "activation": 0.0, "start": 5.0, "kv_bytes": KV, "grain": 1, **more}
    worker = BorrowedSimWorker("sim-0", given, weights, **options)
    await worker.suspend()
    await worker.update(0)
    await worker.resume()
    return worker, weights


def request(name: str, tokens: int = 8, limit: int = 256, priority: int = 0) -> GenerationRequest:
    return GenerationRequest(f"{name}/0", name, priority, (2,) * tokens, Sampling(limit), "sim")


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_it_keeps_the_port_of_a_worker(check: Callable[[Rig], Awaitable[None]]) -> None:
    async def main() -> None:
        worker, weights = await borrowed(config())
        versions = iter(range(1, 100))

        async def publish() -> int:
            version = next(versions)
            weights.put(version)
            return version

        await check(Rig(worker, publish))
        await worker.close()

    run(main())


def test_it_is_borrowed_and_takes_weights_from_the_relay_alone() -> None:
    async def main() -> None:
        worker, _ = await borrowed(config())
        assert isinstance(worker, BorrowedWorker)
        assert not isinstance(worker, CollectiveWorker)
        await worker.close()

    run(main())


# Time.


async def seconds_of(shares: list[tuple[float, float]]) -> tuple[float, float]:
    """Play two requests while the share of the device changes: seconds of the loop, and of device time they took."""
    worker, _ = await borrowed(config())
    begun, device = now(), worker._clock()
    changes = []
    at = begun
    for wait, share in shares:
        at += wait
        changes.append(asyncio.get_running_loop().call_at(at, worker.set_share, share))
    await worker.add([request("a"), request("b")])
    done: list[Completion] = []
    while len(done) < 2:
        done += await worker.completions()
    found = now() - begun, worker._clock() - device
    for change in changes:
        change.cancel()
    await worker.close()
    return found


def test_half_of_a_device_takes_twice_as_long() -> None:
    whole, _ = run(seconds_of([]))
    half, device = run(seconds_of([(0.0, 0.5)]))
    assert half == pytest.approx(2 * whole)
    assert device == pytest.approx(whole)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.floats(0, 0.3), st.floats(0.05, 1.0)), max_size=12))
def test_whatever_the_shares_the_same_device_time_is_needed(shares: list[tuple[float, float]]) -> None:
    whole, _ = run(seconds_of([]))
    _, device = run(seconds_of(shares))
    assert device == pytest.approx(whole, abs=1e-6)


def test_what_makes_no_progress_for_two_seconds_is_handed_back_with_its_tokens() -> None:
    async def main() -> None:
        worker, _ = await borrowed(config("sim.response_tokens_mean=200"))
        begun = now()
        await worker.add([request("a")])
        asyncio.get_running_loop().call_at(begun + 10.5 * STEP, worker.set_share, 1e-9)
        (given_back,) = await worker.completions()
        assert given_back.finish_reason == "abort"
        assert len(given_back.token_ids) == 10
        assert now() - begun == pytest.approx(10.5 * STEP + 2.0)
        assert worker.handed_back == 1
        await worker.close()

    run(main())


# Memory.


def test_a_smaller_budget_takes_unused_prefixes_first_then_the_requests_of_least_priority() -> None:
    async def main() -> None:
        worker, _ = await borrowed(config("sim.response_tokens_mean=2000", "sim.response_tokens_max=200"))
        await worker.add([request("idle", tokens=40)])
        await worker.abort(["idle/0"])
        await worker.completions()
        held = worker.pages
        await worker.add([request("least", 40, priority=5), request("most", 40, priority=1)])
        await asyncio.sleep(4.5 * STEP)
        worker.set_room(30)  # 120 tokens: two of three
        await asyncio.sleep(STEP)
        assert held > 0
        assert worker.pages <= 30
        assert worker.handed_back == 0, "the prefix that nobody used was enough"
        worker.set_room(15)
        (given_back,) = await worker.completions()
        assert (given_back.request_id, given_back.finish_reason) == ("least/0", "abort")
        assert given_back.token_ids
        assert worker.pages <= 15
        assert (await worker.stats()).kv_capacity == 60 // 32
        await worker.close()

    run(main())


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 8)), min_size=1, max_size=10))
def test_a_step_after_any_budget_no_more_is_held_and_every_request_ends_once(budgets: list[tuple[int, int]]) -> None:
    async def main() -> None:
        worker, _ = await borrowed(config("sim.response_tokens_mean=60"))
        await worker.add([request(f"r{number}", 16, priority=number) for number in range(6)])
        done: list[Completion] = []

        async def collect() -> None:
            while len(done) < 6:
                done.extend(await worker.completions())

        task = asyncio.create_task(collect())
        for pages, steps in budgets:
            worker.set_room(pages)
            await asyncio.sleep(1.01 * STEP)
            running = len(worker._batch.running)
            assert worker._batch.held <= max(4 * pages, 0) + running  # the token of the step itself
            await asyncio.sleep(steps * STEP)
        worker.set_room(1000)
        await asyncio.wait_for(task, 300)
        assert len({item.request_id for item in done}) == 6
        assert {item.finish_reason for item in done} <= {"stop", "length", "abort"}
        await worker.close()

    run(main())


def test_a_prefix_that_nobody_uses_goes_when_its_lease_is_over() -> None:
    async def main() -> None:
        worker, _ = await borrowed(config(), lease=3.0)
        await worker.add([request("a", 40)])
        await worker.completions()
        assert worker._batch.prefix_tokens("a") > 0
        await asyncio.sleep(2.9)
        assert worker._batch.prefix_tokens("a") > 0
        await asyncio.sleep(0.2)
        assert worker._batch.prefix_tokens("a") == 0
        await worker.close()

    run(main())


# Coming and going.


def test_a_device_that_is_taken_hands_back_what_it_had_and_does_not_answer_until_it_is_there_again() -> None:
    async def main() -> None:
        worker, _ = await borrowed(config("sim.response_tokens_mean=200"))
        await worker.add([request("a")])
        await asyncio.sleep(5.5 * STEP)
        worker.lose_device()
        (given_back,) = await worker.completions()
        assert (given_back.finish_reason, len(given_back.token_ids)) == ("abort", 5)
        for _ in range(2):
            with pytest.raises(Exception, match=r"it has no device|is dead"):
                await worker.restart() if worker._dead else await worker.completions()
        worker.gain_device()
        begun = now()
        await worker.restart()
        assert now() - begun == pytest.approx(5.0)
        await worker.close()

    run(main())


# Beside a serving engine.


def serve(
    tenant: bool, role: str, arrivals: list[tuple[float, int, int]], mode: str = "dual"
) -> tuple[ServedLatencies, float]:
    """Play requests on one engine, alone or with a rollout engine that never runs out of work; device seconds of the
    latter."""

    async def main() -> tuple[ServedLatencies, float]:
        device, model = hardware.device("H800"), hardware.model("Qwen2.5-7B")
        served, costs = ServedLatencies(), RooflineCosts(device, model)
        rules = SharingRules(10_000, headroom=0.2)
        engine = ServingEngine("s", role, costs, Slo(0.5, 0.15), rules, served, lambda _: None)  # type: ignore[arg-type]
        own = RooflineCosts(device, hardware.model("Qwen3-8B"))
        given = ["sim.costs=roofline", "sim.response_tokens_mean=100000", "sim.response_tokens_max=2000"]
        worker, _ = await borrowed(config(*given, "rollout.engine.max_model_len=4096"), kv_bytes=own.model.kv_bytes)
        if tenant:
            admission = Admission(
                lambda tokens: own.prefill(tokens, 0.0, 1),
                lambda batch: own.decode(batch)[0],
                mode=mode,  # type: ignore[arg-type]
            )
            engine.admission = admission
            worker.move_to_engine(engine)
            engine.begin_rl_step()
            await worker.add([request(f"r{number}", 64, 2000) for number in range(4)])
        for at, prompt, answer in arrivals:
            await asyncio.sleep(max(0.0, at - now()))
            one = UserRequest(now(), prompt, answer, now(), float(answer - 1))
            engine.add(one)
        await asyncio.sleep(5.0)
        engine.close()
        seconds = worker._clock()
        await worker.close()
        return served, seconds

    return run(main())


ARRIVALS = [(1.0 + 0.4 * number, 1000 + 300 * (number % 4), 20 + number) for number in range(12)]


def test_serving_waits_for_one_admitted_step_at_most() -> None:
    own = RooflineCosts(hardware.device("H800"), hardware.model("Qwen3-8B"))
    fixed, growing = own.decode(4)
    step = fixed + growing * 4 * 2100
    alone, _ = serve(False, "prefill", ARRIVALS)
    beside, seconds = serve(True, "prefill", ARRIVALS)
    assert seconds > 8.0, "of ten"
    assert len(alone.ttft) == len(beside.ttft) == 12
    assert any(late > early for late, early in zip(beside.ttft, alone.ttft, strict=True)), "it is felt"
    assert all(early <= late <= early + step + 1e-6 for late, early in zip(beside.ttft, alone.ttft, strict=True))


def test_between_two_tokens_of_serving_stands_one_admitted_step_at_most() -> None:
    own = RooflineCosts(hardware.device("H800"), hardware.model("Qwen3-8B"))
    fixed, growing = own.decode(4)
    step = fixed + growing * 4 * 2100
    alone, _ = serve(False, "decode", ARRIVALS)
    beside, _ = serve(True, "decode", ARRIVALS)
    assert len(alone.tpot) == len(beside.tpot) == 12
    for late, early in zip(sorted(beside.tpot), sorted(alone.tpot), strict=True):
        assert early * 1.2 < late <= early * 1.5 + step


def test_prompts_that_leave_no_slack_keep_rollouts_off_the_device() -> None:
    crowd = [(1.0, 8000, 2)] * 12  # 0.2 s each, all at once: more than the SLO allows
    alone, _ = serve(False, "prefill", crowd)
    beside, _ = serve(True, "prefill", crowd)
    greedy, _ = serve(True, "prefill", crowd, mode="none")
    late = [after - before for before, after in zip(alone.ttft, beside.ttft, strict=True)]
    assert max(late[3:]) - late[2] < 0.001, "none but the first may be held up"
    assert greedy.ttft[-1] > beside.ttft[-1] + 0.05


def test_a_burst_with_slack_enough_is_held_up_by_one_step_and_not_by_one_for_each_prompt() -> None:
    own = RooflineCosts(hardware.device("H800"), hardware.model("Qwen3-8B"))
    fixed, growing = own.decode(4)
    crowd = [(1.0, 2000, 2)] * 5
    alone, _ = serve(False, "prefill", crowd)
    held = {}
    for mode in ("dual", "tpot"):
        beside, _ = serve(True, "prefill", crowd, mode=mode)
        held[mode] = max(late - early for late, early in zip(beside.ttft, alone.ttft, strict=True))
    assert held["dual"] <= fixed + growing * 4 * 2100 + 1e-6
    assert held["tpot"] > 3 * held["dual"], "which looks at no prompt"


# Whole runs.


def small(*overrides: str) -> SimResult:
    return simulate(load_scenario("rose", [*SMALL, *overrides]))


@pytest.mark.parametrize("how", ["coserve", "multiplex", "autoscale", "spot", "serverless"])
def test_a_run_that_borrows_accounts_for_every_trajectory_and_repeats(how: str) -> None:
    given = ["sim.borrowed.workers=3", f"sim.borrowed.how={how}", "sim.borrowed.function_seconds=90"]
    given += ["sim.borrowed.spot_seconds=20", "sim.borrowed.start_seconds=10"]
    found, again = small(*given), small(*given)
    assert found.events == again.events
    assert found.ledger["trained"] == 2 * 48
    report = found.summary["borrowed"]
    assert report["generated"] > 0
    assert report == again.summary["borrowed"]
    plain = small()
    assert found.summary["tokens"] == plain.summary["tokens"], "the same workload"
    assert found.summary["seconds"] < plain.summary["seconds"]


_TWO_CLASSES = (  # of rollart.toml: two H800 and one H20 of the run's own, H20 borrowed
    "run.steps=1",
    "sim.fleet={H800=64, H20=32}",
    "sim.borrowed.workers=2",
    "sim.borrowed.device=H20",
    "rollout.routing.cap=4",
    "rollout.routing.served_cap=8",
)


def test_tasks_go_by_class_over_a_fleet_and_what_is_borrowed(monkeypatch: pytest.MonkeyPatch) -> None:
    went: dict[str, set[tuple[str, bool]]] = {task: set() for task in ("frozenlake", "webshop", "gem-math", "gem-game")}
    add = SimWorker.add

    async def seen(worker: SimWorker, requests: list[GenerationRequest]) -> None:
        for one in requests:
            went[one.task].add((worker.hardware, isinstance(worker, BorrowedSimWorker)))
        await add(worker, requests)

    monkeypatch.setattr(SimWorker, "add", seen)
    found = simulate(load_scenario("rollart", [*_TWO_CLASSES, "rollout.routing.fallback=false"], 16))
    assert found.summary["borrowed"]["generated"] > 0
    assert went["gem-math"] | went["gem-game"] == {("H20", False), ("H20", True)}
    assert went["frozenlake"] | went["webshop"] == {("H800", False)}, "none of that class is borrowed"
    for workers in went.values():
        workers.clear()
    simulate(
        load_scenario("rollart", [*_TWO_CLASSES, "rollout.routing.fallback=false", "sim.borrowed.device=H800"], 16)
    )
    assert went["frozenlake"] | went["webshop"] == {("H800", False), ("H800", True)}
    assert went["gem-math"] | went["gem-game"] == {("H20", False)}


def test_a_borrowed_worker_costs_what_its_class_costs_and_is_of_no_class_where_none_is_named() -> None:
    def steps(*overrides: str) -> set[tuple[str, float]]:
        given = load_scenario("rose", [*SMALL, "sim.borrowed.workers=2", *overrides])
        fleet = borrowed_of(given)
        assert fleet is not None
        made = fleet.workers(1, SimWeights(), None, None, None, TurnMoves())
        return {(one.hardware, one._costs.decode(1)[0]) for one in made}

    ((none, usual),) = steps()
    ((named, slower),) = steps("sim.device=H20", "sim.borrowed.device=H800")
    ((mixed, other),) = steps("sim.fleet={H800=1}", "sim.borrowed.device=H20")
    assert (none, named, mixed) == ("", "H800", "H20")
    assert steps("sim.fleet={H20=1}") == {("H800", usual)}, "beside a fleet, the class is that of sim.device"
    assert slower == usual
    assert other != usual


def test_serving_alone_sees_the_same_requests_and_what_is_late_there_is_not_the_rollouts_doing() -> None:
    given = load_scenario("rose", [*SMALL, "sim.borrowed.workers=3", "sim.borrowed.speed=4.0", "sim.borrowed.ttft=0.3"])
    result = simulate(given)
    report, alone = result.summary["borrowed"], serving_alone(given, result.summary["seconds"])
    assert alone["requests"] == report["requests"] > 100
    assert alone["ttft_late"] > 0, "it is a load that serving cannot take"
    assert report["ttft_late"] <= alone["ttft_late"] + 0.01
    assert alone["ttft_p99"] <= report["ttft_p99"] + 0.05


@pytest.mark.slow
def test_devices_that_serving_needs_for_itself_are_given_back_and_the_run_goes_on() -> None:
    """The rules are those of a real run: ``rollout.borrowed``."""
    given = ("sim.borrowed.workers=3", "sim.borrowed.window=20", "rollout.borrowed.margin=0.001", "run.steps=5")
    calm, crowded = small(*given), small(*given, "rollout.borrowed.crowded=0.0015")
    reports = [result.summary["borrowed"] for result in (calm, crowded)]
    assert [result.ledger["trained"] for result in (calm, crowded)] == [5 * 48] * 2
    assert reports[1]["exchanges"] > reports[0]["exchanges"]
    assert reports[1]["generated"] < reports[0]["generated"]


def test_bad_input_is_named() -> None:
    for override, field in (
        ("sim.borrowed.trace=nothing-like-it", "sim.borrowed.trace"),
        ("sim.borrowed.model=Qwen3-32B", "sim.borrowed.model"),
        ("sim.borrowed.serving=2", "sim.borrowed.serving"),
        ("sim.borrowed.device=H900", "sim.borrowed.device"),
    ):
        with pytest.raises(ConfigError) as caught:
            small("sim.borrowed.workers=3", override)
        assert caught.value.field == field
    assert borrowed_of(load_scenario("rose")) is None


def test_a_trace_of_ones_own_is_read_and_a_broken_one_refused(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"rows": [[0, 10, 2], [1500, 20, 3]]}))
    assert read_trace(str(file)) == [(0.0, 10, 2), (1.5, 20, 3)]
    assert len(read_trace("azure_code")) == 8819
    for rows in ([], [[1, 1, 0]], [[5, 1, 1], [1, 1, 1]], [["a"]]):
        file.write_text(json.dumps({"rows": rows}))
        with pytest.raises(ConfigError):
            read_trace(str(file))
