"""Engines cut anew between steps: no request is lost, whatever fails; and the planner that asks for it, in a whole run."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api import (
    ConfigError,
    GenerationRequest,
    Prompt,
    RetryableError,
    RunError,
    Sampling,
    Trajectory,
    Turn,
    WorkerStats,
)
from orchestrator.config import Config
from orchestrator.events import EventLog, MemorySink
from orchestrator.observe.report.report_page import write_report
from orchestrator.parallelism.planner_setup import make_planner
from orchestrator.parallelism.replanner import Cut, Replanner, StepPlanner
from orchestrator.policies.parallelism.engine_profile import PHASES, EngineLayout, EngineProfile, ProfilePoint
from orchestrator.policies.parallelism.parallelism_planner import ParallelismPlanner
from orchestrator.proxy.gateway import LLMProxy
from orchestrator.proxy.resize import EngineResizing, Reshaped, require_resizable
from orchestrator.proxy.worker_state import WorkerLimits
from orchestrator.runtime import engine_cuts
from orchestrator.sim import resizable_worker as sim_cutting
from orchestrator.sim import simulated_run as sim_run
from orchestrator.sim.resizable_worker import ResizableSimWorker
from orchestrator.sim.simulated_worker import SimWeights, SimWorker
from orchestrator.sim.twins import SimTask
from scripts.bench.virtual_run import run
from tests.support import colocation_twins as twins
from tests.support.engines import rollout_worker

STALL = 5.0


class Resizable(twins.TwinWorker):  # type: ignore[misc, name-defined]
    """Starts over one, two or four devices; over two, as often as ``refuses`` says, it does not."""

    ranks = 1
    refuses = 0
    starts = 0

    async def resize(self, ranks: int) -> None:
        self.die()
        self.ranks = ranks
        await asyncio.sleep(0)

    async def restart(self) -> None:
        assert self.ranks, "a parked worker is not started"
        self.starts += 1
        if self.ranks == 2 and self.refuses:
            self.refuses -= 1
            await asyncio.sleep(1.0)
            raise RetryableError(f"{self.name} has no memory for TP 2")
        await super().restart()


class Expert(Resizable):
    """It may have whole experts on its devices, too."""

    expert_ranks = 1

    async def resize(self, ranks: int, expert_ranks: int = 1) -> None:
        await super().resize(ranks)
        self.expert_ranks = expert_ranks


class Rig:
    def __init__(self, workers: int = 4, kind: type[Resizable] = Resizable) -> None:
        self.faults = twins.Faults({})
        self.devices = [twins.Device(f"device-{index}") for index in range(workers)]
        self.workers = [kind(f"worker-{i}", device, self.faults) for i, device in enumerate(self.devices)]
        self.sink = MemorySink()
        self.fatal: list[RunError] = []
        events = EventLog(self.sink, asyncio.get_running_loop().time)
        self.proxy = LLMProxy(
            self.workers,
            events,
            limits=WorkerLimits(STALL, STALL, STALL, STALL, 4 * STALL),
            restarts=3,
            on_fatal=self.fatal.append,
        )
        self.resizing = EngineResizing(self.proxy)
        self.asked: dict[str, tuple[GenerationRequest, asyncio.Task[Any]]] = {}

    async def start(self) -> None:
        self.proxy.start()
        await self.proxy.suspend()
        await self.proxy.update(7)
        await self.proxy.resume()

    def ask(self, count: int, prefix: str = "t") -> None:
        for number in range(count):
            name = f"{prefix}{number}"
            request = GenerationRequest(
                name, name, 0, (number + 2, 3), Sampling(20 + 7 * number, 0.0, stop_token_ids=(1,)), "t"
            )
            self.asked[name] = request, asyncio.create_task(self.proxy.generate(request))

    async def check(self) -> None:
        """Every answer is what an undisturbed engine would have said."""
        for request, task in self.asked.values():
            answer = await task
            assert answer.token_ids == twins.whole_response(request)
            assert answer.versions == ((7, len(answer.token_ids)),)
        assert not self.fatal
        assert self.proxy.in_flight == 0
        await self.proxy.close()
        for worker in self.workers:
            await worker.close()

    def faults_noted(self) -> list[str]:
        return [event["detail"] for event in map(json.loads, self.sink.lines) if event["kind"] == "fault"]


@pytest.mark.parametrize("after", [0.0, 0.02, 0.33, 1.7])
def test_requests_in_flight_go_on_in_the_new_engines_with_the_tokens_they_have(after: float) -> None:
    async def main() -> list[Reshaped]:
        rig = Rig()
        await rig.start()
        rig.ask(10)
        await asyncio.sleep(after)
        done = [await rig.resizing.reshape(2)]
        assert [worker.ranks for worker in rig.workers] == [2, 0, 2, 0]
        assert (rig.resizing.layout.tp, rig.resizing.engines) == (2, 2)
        assert len(rig.proxy.loads()) == 2
        assert rig.proxy.waiting_for == "", "nobody waits for a parked worker"
        rig.ask(5, "u")
        await asyncio.sleep(after)
        done.append(await rig.resizing.reshape(4))
        assert [worker.ranks for worker in rig.workers] == [4, 0, 0, 0]
        await asyncio.sleep(after)
        done.append(await rig.resizing.reshape(1))
        assert [worker.ranks for worker in rig.workers] == [1, 1, 1, 1]
        assert len(rig.proxy.loads()) == 4
        rig.ask(6, "v")
        await rig.check()
        assert rig.faults_noted() == []
        assert [worker.starts for worker in rig.workers] == [3, 1, 2, 1]
        return done

    done = run(main())
    assert [item.error for item in done] == ["", "", ""]
    assert all(item.seconds >= 1.0 for item in done), "a start takes a second here: it is what a change costs"
    assert done[0].moved == 10 or after > 0.1, "short ones have ended by then"


def test_when_an_engine_does_not_come_up_in_the_new_layout_all_go_back_to_the_old_one() -> None:
    async def main() -> None:
        rig = Rig()
        await rig.start()
        rig.workers[2].refuses = 1
        rig.ask(8)
        await asyncio.sleep(0.3)
        done = await rig.resizing.reshape(2)
        assert "worker-2 has no memory for TP 2" in done.error
        assert done.seconds >= 2.0
        assert [worker.ranks for worker in rig.workers] == [1, 1, 1, 1]
        assert rig.resizing.layout.tp == 1
        await rig.check()

    run(main())


def test_an_engine_that_died_before_is_started_in_the_new_layout_like_the_others() -> None:
    async def main() -> None:
        rig = Rig()
        await rig.start()
        rig.ask(8)
        await asyncio.sleep(0.3)
        rig.workers[0].die()
        rig.workers[1].die()
        await asyncio.sleep(0.5)  # they are being revived
        done = await rig.resizing.reshape(2)
        assert done.error == ""
        assert [worker.ranks for worker in rig.workers] == [2, 0, 2, 0]
        rig.ask(4, "u")
        await rig.check()

    run(main())


def test_an_engine_that_dies_while_parked_neighbours_wait_is_restarted_with_its_devices() -> None:
    async def main() -> None:
        rig = Rig()
        await rig.start()
        await rig.resizing.reshape(2)
        rig.ask(8)
        await asyncio.sleep(0.3)
        rig.workers[2].die()
        await rig.check()
        assert [worker.ranks for worker in rig.workers] == [2, 0, 2, 0]
        assert [worker.starts for worker in rig.workers] == [1, 0, 2, 0]

    run(main())


def test_a_tp_that_does_not_divide_the_devices_is_refused() -> None:
    async def main() -> None:
        rig = Rig()
        await rig.start()
        for tp in (0, 3, 8):
            with pytest.raises(ValueError, match="cannot be cut"):
                await rig.resizing.reshape(tp)
        await rig.check()

    run(main())


def test_a_plan_that_changes_only_the_experts_starts_the_engines_anew_and_loses_nothing() -> None:
    async def main() -> list[Reshaped]:
        rig = Rig(kind=Expert)
        await rig.start()
        done = [await rig.resizing.reshape(EngineLayout(2))]
        rig.ask(10)
        await asyncio.sleep(0.02)
        done.append(await rig.resizing.reshape(EngineLayout(2, 2)))
        assert [(worker.ranks, worker.expert_ranks) for worker in rig.workers] == [(2, 2), (0, 1), (2, 2), (0, 1)]
        assert rig.resizing.layout == EngineLayout(2, 2)
        rig.ask(5, "u")
        done.append(await rig.resizing.reshape(EngineLayout(2, 2)))
        assert [worker.starts for worker in rig.workers] == [2, 0, 2, 0], "the same layout again: nobody is started"
        done.append(await rig.resizing.reshape(2))
        assert (rig.resizing.layout, [worker.starts for worker in rig.workers]) == (EngineLayout(2), [3, 0, 3, 0])
        await rig.check()
        return done

    done = run(main())
    assert [(item.tp, item.ep, item.error) for item in done] == [(2, 1, ""), (2, 2, ""), (2, 2, ""), (2, 1, "")]
    assert done[1].seconds >= 1.0
    assert done[1].moved == 10
    assert (done[2].seconds, done[2].moved) == (0.0, 0)


def test_when_engines_with_whole_experts_do_not_come_up_they_have_slices_again() -> None:
    async def main() -> None:
        rig = Rig(kind=Expert)
        await rig.start()
        await rig.resizing.reshape(2)
        rig.workers[2].refuses = 1
        rig.ask(8)
        await asyncio.sleep(0.3)
        done = await rig.resizing.reshape(EngineLayout(2, 2))
        assert "worker-2 has no memory" in done.error
        assert rig.resizing.layout == EngineLayout(2)
        assert [worker.expert_ranks for worker in rig.workers] == [1, 1, 1, 1]
        await rig.check()

    run(main())


def test_engines_with_slices_only_refuse_whole_experts_before_anything_is_stopped() -> None:
    async def main() -> None:
        rig = Rig()
        await rig.start()
        with pytest.raises(ValueError, match="cannot have whole experts"):
            await rig.resizing.reshape(EngineLayout(2, 2))
        assert [worker.starts for worker in rig.workers] == [0, 0, 0, 0]
        await rig.check()

    run(main())


class PressedWorker(ResizableSimWorker):
    """A simulated worker that preempts 12 times a step at TP 1, never at TP 2 and above. Times are the simulator's own."""

    _asked = 0

    async def restart(self) -> None:
        self._asked = 0
        await super().restart()

    async def stats(self) -> WorkerStats:
        self._asked += 1
        rate = 12 + self._asked if self.ranks == 1 else 0
        return replace(await super().stats(), preemptions=rate * self._asked)


def planned(mode: str = "sync_plus", **planner: Any) -> Config:
    alpha = 1 if mode in ("async", "one_off") else 0
    return Config.model_validate(
        {
            "run": {"steps": 14, "mode": mode},
            "rollout": {
                "workers": 2,
                "alpha": alpha,
                "environments": 32,
                "group_size": 4,
                "groups_per_step": 4,
                "planner": {"enabled": True, "expected_tokens": 20, **planner},
            },
            "evaluation": {"every": 0, "prompts": 4},
            "checkpoint": {"every": 100},
        }
    )


def events_of(result: Any, kind: str) -> list[dict[str, Any]]:
    return [event for event in map(json.loads, result.events.decode().splitlines()) if event["kind"] == kind]


@pytest.mark.parametrize(
    "mode",
    [pytest.param("sync_plus", marks=pytest.mark.long), "async", pytest.param("one_off", marks=pytest.mark.long)],
)
def test_a_simulated_run_follows_the_planner_and_accounts_for_every_trajectory(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(sim_cutting, "ResizableSimWorker", PressedWorker)
    result = sim_run.simulate(planned(mode, calm_steps=4))
    assert result.violations == []
    plans, changes = events_of(result, "plan"), events_of(result, "reshape")
    assert [plan["step"] for plan in plans] == list(range(14))
    assert changes[0]["tp"] == 2
    assert changes[0]["error"] == ""
    rise = next(plan for plan in plans if plan["next_tp"] != plan["tp"])
    assert "preemptions rose" in rise["reason"]
    assert changes[0]["step"] == rise["step"]
    later = [plan for plan in plans if plan["step"] > rise["step"]]
    assert all(plan["preemptions"] == 0 for plan in later if plan["tp"] == 2), "a new engine counts from nothing"
    asked = [plan for plan in later if "no preemption in 4 steps" in plan["reason"]]
    assert asked, "then the rule asks for TP 1"
    assert asked[0]["cost"] == pytest.approx(changes[0]["seconds"], abs=1e-5), "and what it did cost is charged"


def test_preemptions_for_those_that_outrank_are_no_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Outranking(PressedWorker):
        async def stats(self) -> WorkerStats:
            stats = await super().stats()
            return replace(stats, outranked=stats.preemptions)

    monkeypatch.setattr(sim_cutting, "ResizableSimWorker", Outranking)
    result = sim_run.simulate(planned(calm_steps=4))
    assert {plan["preemptions"] for plan in events_of(result, "plan")} == {0}
    assert not events_of(result, "reshape")


class Server(Resizable):
    """Somebody else's, whose neighbours take its memory."""

    url = "http://127.0.0.1:1"

    async def stats(self) -> WorkerStats:
        return replace(await super().stats(), preemptions=5000, expert_imbalance=9.0)


def test_a_resumed_run_begins_with_the_engines_of_its_checkpoint() -> None:
    """Not with those that it began with: it would fill its memory and grow again, a restart of all engines each time."""
    config = Config.model_validate({"rollout": {"workers": 4, "planner": {"enabled": True}}})

    async def main() -> dict[str, Any] | None:
        rig = Rig()
        await rig.start()
        planner = make_planner(config.rollout, SimTask(config))
        rule = StepPlanner(planner, rig.resizing, EventLog(rig.sink, lambda: 0.0))
        rule.note_change(Cut(EngineLayout(2), ""), await rig.resizing.reshape(EngineLayout(2)))
        await rig.check()
        return Replanner(rule, rig.resizing, EventLog(rig.sink, lambda: 0.0), 9).state()

    kept = run(main())
    assert kept == {"degrees": [2, 2], "experts": 1, "cost": pytest.approx(1.0, abs=0.5), "measured": True}
    assert make_planner(config.rollout, SimTask(config), kept=kept).layout.tp == 2
    assert make_planner(config.rollout, SimTask(config), heads=3, kept=kept).layout.tp == 1, "no longer possible"


def test_preemptions_in_servers_do_not_count_as_nobody_cuts_them() -> None:
    async def main() -> None:
        rig = Rig(2)
        rig.workers[1].__class__ = Server
        rig.proxy.states[1].have_worker(rig.workers[1])
        await rig.start()
        planner = StepPlanner(ParallelismPlanner(2, [EngineLayout(1)]), rig.resizing, EventLog(rig.sink, lambda: 0.0))
        assert await planner._counted() == (0, 1.0)
        await rig.check()

    run(main())


def test_a_profile_that_is_wrong_is_said_to_be_scaled_and_asked_for_anew(tmp_path: Path) -> None:
    """The proxy is a stand-in: what is told is how long requests took."""

    class Proxy:
        states = ()

        async def stats(self) -> list[Any]:
            return []

    layout = EngineLayout(1)
    points = [ProfilePoint(phase, layout, 1, tokens, 0.01) for phase in PHASES for tokens in (8, 64)]
    planner = ParallelismPlanner(1, [layout], EngineProfile(points))
    sink, times = MemorySink(), iter(range(0, 400, 2))

    class Resizing:
        proxy, layout, engines = Proxy(), EngineLayout(1), 1

    resizing: Any = Resizing()
    events = EventLog(sink, lambda: float(next(times)))
    planning = Replanner(StepPlanner(planner, resizing, events), resizing, events, 10)
    turn = Turn(
        (1,) * 10, (2,) * 20, (0.0,) * 20, ((0, 20),), generate_seconds=1.01
    )  # 0.05 s a token, 0.01 for the prefill
    one = Trajectory("t", "g", "sim", Prompt("k", "sim", 1, ""), (turn,), 1.0, "1", 1, False)

    async def steps() -> None:
        for step in range(5):
            planning.begin_rollout()
            await planning.end_rollout(step, [one])

    asyncio.run(steps())
    events = [json.loads(line) for line in sink.lines]
    (scaled,) = (event for event in events if event["kind"] == "profile_scaled")
    assert (scaled["step"], scaled["tp"]) == (2, 1)
    assert scaled["factor"] == scaled["total"] == pytest.approx(5.0)
    (alarm,) = (event for event in events if event["kind"] == "alarm")
    assert "take 5 times what the profile says; it is scaled by that" in alarm["detail"]
    assert "rl-coserve profile" in alarm["detail"]
    assert [event["correction"] for event in events if event["kind"] == "plan"] == [1.0, 1.0, 5.0, 5.0, 5.0]


def test_workers_that_cannot_be_cut_anew_are_refused_and_so_are_foreign_profiles_and_pools_are_not(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.planner\.enabled = True: needs engines that the run starts"):
        require_resizable([SimWorker("sim-0", planned(), SimWeights())])
    pools = planned().model_dump() | {"resources": {"pools": {"CPU": 4}}}
    config = Config.model_validate(pools)
    real = rollout_worker("vllm-0", "vllm_rlplugin.worker.inprocess_worker:EngineWorker")
    require_resizable([real])
    with pytest.raises(ConfigError, match=r"rollout\.planner\.experts = True: .*only use tensor parallelism"):
        require_resizable([real], experts=True)
    with pytest.raises(ConfigError, match=r"rollout\.planner\.experts = True: .*set it to false"):
        engine_cuts.check(planned(experts=True))
    engine_cuts.check(config)
    with pytest.raises(ConfigError, match=r"rollout\.planner\.profile.*cannot be read"):
        engine_cuts.check(planned(profile=str(tmp_path / "none.json")))


@pytest.mark.usefixtures("undrawn")
def test_what_the_planner_did_is_in_the_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sim_cutting, "ResizableSimWorker", PressedWorker)
    config = planned()
    result = sim_run.simulate(config)
    (tmp_path / "events.jsonl").write_bytes(result.events)
    (tmp_path / "ledger.jsonl").write_bytes(result.journal)
    (tmp_path / "config.json").write_text(config.model_dump_json())
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "Tensor parallelism" in page
    assert "preemptions rose" in page
