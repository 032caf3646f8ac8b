"""Long answers lose reward softly, as DAPO prints it, and only where the trainer sees it."""

from __future__ import annotations

import pytest

from orchestrator.api import ConfigError, Prompt, Trajectory, Turn
from orchestrator.config import load_config, parse_config
from orchestrator.policies.training.sample_weights import OverlongPenalty
from orchestrator.runtime import preflight
from orchestrator.train_samples import to_samples


def printed(length: int, most: int, cache: int) -> float:
    """DAPO eq. 13, case by case."""
    if length <= most - cache:
        return 0.0
    if length <= most:
        return ((most - cache) - length) / cache
    return -1.0


def test_the_penalty_is_the_papers_times_its_size() -> None:
    rule = OverlongPenalty(limit=100, buffer=20, penalty=0.5)
    for length in range(140):
        assert rule.penalty_for(length) == pytest.approx(0.5 * printed(length, 100, 20))
    assert rule.penalty_for(90) == -0.25, "it falls before the limit"


def test_without_a_buffer_it_is_a_step_and_without_a_limit_nothing() -> None:
    assert [OverlongPenalty(limit=10).penalty_for(length) for length in (10, 11)] == [0.0, -1.0]
    assert OverlongPenalty().penalty_for(10**6) == 0.0


def trajectory(tokens: int) -> Trajectory:
    turn = Turn(observation_ids=(5,), action_ids=(6,) * tokens, logprobs=(-1.0,) * tokens, versions=((0, tokens),))
    prompt = Prompt(key="p", task="t", seed=0, payload="")
    return Trajectory("t0", "g0", "t", prompt, (turn,), 1.0, "1", 0, truncated=False)


def test_only_what_the_trainer_is_given_is_lower() -> None:
    long = trajectory(9)
    (sample,) = to_samples(long, 1.0, OverlongPenalty(limit=10, buffer=4, penalty=1.0))
    assert (sample.reward, long.reward) == (0.25, 1.0)
    (plain,) = to_samples(long)
    assert plain.reward == 1.0


def test_a_limit_that_no_answer_reaches_is_refused() -> None:
    def refused(limit: int, *more: str) -> str:
        given = ["task.name=sums", f"reward.overlong.limit={limit}", "reward.overlong.buffer=2", *more]
        config = load_config(None, given)
        task = preflight.make_task(config)
        assert (task.max_turns, most) == (1, task.max_response_tokens)
        try:
            preflight._task(config, task)
        except ConfigError as error:
            return error.field
        return ""

    most = preflight.make_task(load_config(None, ["task.name=sums"])).max_response_tokens
    assert [refused(limit) for limit in (most, most + 1, most + 2)] == ["", "", "reward.overlong.limit"]
    assert refused(most + 2, "context.strategy=summarise", "context.ask=[1]") == "", "summaries count, too"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"buffer": 5}, "needs a limit"),
        ({"limit": 5, "buffer": 6}, "must not be above limit"),
        ({"limit": 5, "penalty": 0.0}, "more than 0"),
        ({"limit": -1}, "at least 0"),
        ({"tokens": 5}, "tokens"),
    ],
)
def test_what_cannot_be_meant_is_refused(given: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_config({"reward": {"overlong": given}})
