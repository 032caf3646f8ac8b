"""The projected peak of KV: against sums over what was drawn, and its bounds."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orchestrator.policies.placement.worker_load import projected_peak


def fullest(contexts: list[float], tokens: list[float], grows: float, longest: float) -> float:
    """Token by token: nothing is approximated."""
    ends = [min(said, (longest - context) / grows) for context, said in zip(contexts, tokens, strict=True)]
    return max(
        sum(context + grows * t for context, end in zip(contexts, ends, strict=True) if t <= end)
        for t in range(math.ceil(max(ends)) + 1)
    )


@pytest.mark.parametrize("seed", range(5))
def test_forecasts_that_are_sure_give_what_stepping_through_them_gives(seed: int) -> None:
    draw = random.Random(seed)
    tokens = [draw.lognormvariate(5.0, 1.0) for _ in range(200)]
    contexts = [draw.uniform(0, 300) for _ in tokens]
    truth = fullest(contexts, tokens, 1.5, 4000.0)
    assert projected_peak(contexts, tokens, [0.0] * 200, 1.5, 4000.0) == pytest.approx(truth, rel=0.08)


def test_unsure_forecasts_give_the_mean_over_what_may_come() -> None:
    draw, count, spread = random.Random(1), 300, 1.0
    drawn = [
        [draw.lognormvariate(math.log(400.0) - spread * spread / 2, spread) for _ in range(count)] for _ in range(40)
    ]
    curves = [
        [sum(100.0 + 1.2 * t for said in tokens if said >= t) for t in range(0, 3000, 10)] for tokens in drawn
    ]  # the most of the mean, and not the mean of the most, which is a little more
    truth = max(sum(values) / len(values) for values in zip(*curves, strict=True))
    found = projected_peak([100.0] * count, [400.0] * count, [spread] * count, 1.2)
    assert found == pytest.approx(truth, rel=0.05)
    assert found < projected_peak([100.0] * count, [400.0] * count, [0.0] * count, 1.2), "all at once would need more"


@example([(11.0, 13715.0, 0.0)], 4.0, 1e4)
@given(
    st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1e5), st.floats(0, 2)), max_size=30),
    st.floats(1, 4),
    st.sampled_from([1e4, math.inf]),
)
def test_it_is_never_less_than_what_is_there_nor_more_than_all_of_it(
    rows: list[tuple[float, float, float]], grows: float, longest: float
) -> None:
    contexts, tokens, spreads = ([row[column] for row in rows] for column in range(3))
    found = projected_peak(contexts, tokens, spreads, grows, longest)
    assert math.isfinite(found)
    assert found >= sum(contexts) * (1 - 1e-9)
    if math.isfinite(longest):
        assert found <= len(rows) * longest * (1 + 1e-9)
    one_more = projected_peak([*contexts, 10.0], [*tokens, 50.0], [*spreads, 0.5], grows, longest)
    assert one_more >= found * 0.8, "the times that are looked at move a little"


def test_nobody_holds_nothing() -> None:
    assert projected_peak([], [], []) == 0.0
