"""The simulated workload of several tasks: what is drawn is what was declared, and a run of it accounts for everything."""

import math
import random
import statistics
from collections import Counter

import pytest

from orchestrator.api import ConfigError, Prompt
from orchestrator.config import Config, load_config
from orchestrator.sim.seeded_draws import END, random_stream
from orchestrator.sim.simulated_run import simulate
from orchestrator.sim.task_mix import TaskMix
from orchestrator.sim.twins import SimTask
from scripts.bench.papers.length_fit import RecordedEpisode, of_set
from scripts.bench.virtual_run import run


def config(*overrides: str) -> Config:
    return load_config(
        None,
        [
            "run.steps=3",
            "rollout.workers=3",
            "rollout.groups_per_step=4",
            "rollout.group_size=4",
            "rollout.environments=32",
            "rollout.trajectory_timeout=100000",
            "rollout.environment_step_timeout=10000",
            "rollout.stall_timeout=10000",
            "rollout.engine.max_model_len=2048",
            "evaluation.prompts=2",
            "sim.costs=roofline",
            "sim.model=Qwen3-8B",
            "sim.fleet.H800=2",
            "sim.fleet.H20=1",
            "sim.grain=16",
            "sim.tasks.game.weight=3",
            "sim.tasks.game.turns_min=2",
            "sim.tasks.game.turns_max=6",
            "sim.tasks.game.step_seconds=1.5",
            "sim.tasks.game.step_sigma=0.5",
            "sim.tasks.math.response_tokens=3000",
            "sim.tasks.math.prompt_share=0.6",
            "rollout.routing.affinity.game=H800",
            "rollout.routing.affinity.default=H20",
            *overrides,
        ],
    )


def test_prompts_are_of_the_tasks_in_their_shares() -> None:
    prompts = SimTask(config()).prompts("train", 0)
    counts = Counter(next(prompts).task for _ in range(4000))
    assert counts["game"] / 4000 == pytest.approx(0.75, abs=0.03)


def test_responses_have_the_declared_mean_and_members_of_a_group_resemble_each_other() -> None:
    workload = TaskMix(config("sim.tasks.math.response_max=200000"))
    groups = []
    for prompt in range(400):
        opening = workload.opening("math", random_stream(prompt))
        lengths = [len(workload.response(opening, f"{prompt}-{member}", 0, 10**6)) for member in range(6)]
        groups.append([length * 16 for length in lengths])
    everybody = [length for group in groups for length in group]
    assert statistics.mean(everybody) == pytest.approx(3000, rel=0.08)
    means = [statistics.mean(group) for group in groups]
    assert statistics.stdev(means) > 0.5 * statistics.stdev(everybody)


SHARED = (
    "sim.tasks.math.response_max=2000000",
    "sim.grain=1",
    "sim.tasks.math.prompt_share=0.3",
    "sim.tasks.math.trajectory_share=0.4",
)


def test_lengths_have_the_shares_of_prompt_and_trajectory_that_were_asked_for() -> None:
    workload, episodes = TaskMix(config(*SHARED, "sim.tasks.math.response_tokens=400")), []
    for prompt in range(200):
        opening = workload.opening("math", random_stream(prompt))
        for member in range(5):
            said = [workload.response(opening, f"{prompt}-{member}", turn, 10**6) for turn in range(4)]
            episodes.append(RecordedEpisode(str(prompt), 0, tuple(map(len, said))))
    found = of_set(episodes)
    assert found["sigma"] == pytest.approx(0.8, rel=0.06)
    assert statistics.mean(length for one in episodes for length in one.said) == pytest.approx(400, rel=0.08)
    for name, asked in (("prompt", 0.3), ("trajectory", 0.4)):
        low, high = found["shares"][name]["interval"]
        assert low <= asked <= high, name


def test_a_prompt_that_comes_back_has_its_own_part_again_and_its_trajectories_have_others() -> None:
    given = config(*SHARED, "sim.data_set=30", "sim.tasks.game.weight=1e-9", "sim.tasks.math.prompt_tokens=8")
    task, workload = SimTask(given), TaskMix(given)
    prompts = [prompt for prompt, _ in zip(task.prompts("train", 0), range(60), strict=False)]
    openings = [workload.beginning(prompt.task, prompt.seed)[1] for prompt in prompts]
    assert openings[:30] == openings[30:]
    assert len({opening[1] for opening in openings[:30]}) > 15

    def mean(epoch: int, place: int) -> float:
        opening = openings[30 * epoch + place]
        logs = [
            math.log(len(workload.response(opening, f"{epoch}-{place}-{member}", 0, 10**6))) for member in range(24)
        ]
        return statistics.mean(logs)

    first, second = ([mean(epoch, place) for place in range(30)] for epoch in (0, 1))
    assert first != second
    assert statistics.correlation(first, second) > 0.75


def test_without_a_trajectory_s_share_nothing_is_drawn_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = set[object]()

    def noted(*parts: object) -> random.Random:
        drawn.add(parts[1])
        return random_stream(*parts)

    plain, shared = TaskMix(config()), TaskMix(config(*SHARED))
    opening = plain.opening("math", random_stream(3))
    monkeypatch.setattr("orchestrator.sim.task_mix.random_stream", noted)
    plain.response(opening, "t", 0, 10**6)
    assert drawn == {"response"}
    shared.response(opening, "t", 0, 10**6)
    assert drawn == {"response", "trajectory"}


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (["sim.tasks.math.trajectory_share=1.5"], "trajectory_share"),
        (["sim.tasks.math.trajectory_share=-0.1"], "trajectory_share"),
        (["sim.tasks.math.prompt_share=0.7", "sim.tasks.math.trajectory_share=0.5"], "trajectory_share"),
        (["sim.tasks.math.prompt_share=2"], "prompt_share"),
    ],
)
def test_shares_that_are_none_are_one_error_each(given: list[str], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"sim\.tasks\.math\.{field}"):
        config(*given)


def test_a_response_ends_at_the_task_s_own_limit() -> None:
    workload = TaskMix(config("sim.tasks.math.response_max=160"))
    opening = workload.opening("math", random_stream(1))
    lengths = [workload.response(opening, f"t{number}", 0, 10**6) for number in range(40)]
    assert max(map(len, lengths)) == 10
    assert any(tokens[-1] != END for tokens in lengths)


def test_responses_grow_with_each_batch_of_prompts_and_not_where_nothing_was_said_of_it() -> None:
    given = config("sim.tasks.math.response_growth=1600", "sim.tasks.math.response_sigma=0")
    workload = TaskMix(given)

    async def lengths(split: str, count: int) -> dict[str, int]:
        task, found = SimTask(given), {}
        for prompt in [one for one, _ in zip(task.prompts(split, 0), range(count), strict=False)]:
            if prompt.task == "math":
                opening = (await task.environment().reset(prompt)).token_ids
                found[prompt.key] = len(workload.response(opening, "t", 0, 10**6)) * 16
        return found

    for key, tokens in run(lengths("train", 48)).items():
        grown = 3000 + 1600 * (int(key.rsplit("-", 1)[1]) // 4)
        assert tokens == pytest.approx(min(grown, 8192), abs=16), "8192 is where the task cuts them off"
    assert set(run(lengths("heldout", 40)).values()) <= {2992, 3008}
    assert workload.batch_stage(Prompt("train-0-99999", "math", 1, "")) == 61
    assert workload.batch_stage(Prompt("train-0-99999", "game", 1, "")) == 0
    assert simulate(given).unaccounted == 0


def test_every_number_of_turns_is_as_likely() -> None:
    task = SimTask(config("sim.tasks.game.step_seconds=0"))

    async def turns(number: int) -> int:
        prompts = (prompt for prompt in task.prompts("train", number) if prompt.task == "game")
        environment = task.environment()
        await environment.reset(next(prompts))
        for turn in range(1, 100):
            if (await environment.step((5, number % 60 + 2))).done:
                await environment.close()
                return turn
        raise AssertionError("it never ends")

    async def main() -> Counter[int]:
        return Counter([await turns(number) for number in range(1500)])

    counts = run(main())
    assert sorted(counts) == [2, 3, 4, 5, 6]
    assert min(counts.values()) > 240


def test_a_run_of_several_tasks_repeats_and_accounts_for_everything() -> None:
    first, again = simulate(config()), simulate(config())
    assert first.events == again.events
    assert first.summary["reason"] == "completed"
    assert first.ledger["failed"] == 0
    assert first.ledger["trained"] == 3 * 16


def test_faults_with_kv_pressure_lose_nothing() -> None:
    pressed = config("sim.fault_rate=0.01", "sim.kv_tokens=34000", "run.seed=4", "rollout.stall_timeout=600")
    result = simulate(pressed, strict=False)
    assert result.violations == []
