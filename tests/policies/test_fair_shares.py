"""Servers of one fleet for several jobs: each its share, nobody more than it wants, and nothing goes back and forth."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.policies.serving.fair_shares import FleetTenant, fair_shares

tenants = st.dictionaries(
    st.sampled_from("abcdef"),
    st.builds(FleetTenant, st.integers(0, 12), st.integers(0, 12), st.sampled_from((0.25, 0.5, 1.0, 2.0, 3.0))),
    min_size=1,
)


@pytest.mark.parametrize(
    ("jobs", "servers", "shares"),
    [
        ({"a": FleetTenant(4, 4), "b": FleetTenant(0, 4)}, 4, {"a": 2, "b": 2}),
        ({"a": FleetTenant(4, 4, 3.0), "b": FleetTenant(0, 4)}, 4, {"a": 3, "b": 1}),
        ({"a": FleetTenant(4, 4), "b": FleetTenant(0, 1)}, 4, {"a": 3, "b": 1}),
        ({"a": FleetTenant(2, 5), "b": FleetTenant(3, 5)}, 5, {"a": 2, "b": 3}),
        ({"a": FleetTenant(3, 5), "b": FleetTenant(2, 5)}, 5, {"a": 3, "b": 2}),
        ({"a": FleetTenant(0, 9, 100.0), "b": FleetTenant(0, 9, 0.01)}, 2, {"a": 1, "b": 1}),
        ({"a": FleetTenant(1, 1), "b": FleetTenant(1, 1), "c": FleetTenant(0, 1)}, 2, {"a": 1, "b": 1, "c": 0}),
    ],
)
def test_who_gets_what(jobs: dict[str, FleetTenant], servers: int, shares: dict[str, int]) -> None:
    assert fair_shares(jobs, servers) == shares


@given(tenants, st.integers(0, 40))
def test_every_deal_is_fair_and_is_dealt_again_when_it_was_carried_out(
    jobs: dict[str, FleetTenant], servers: int
) -> None:
    shares = fair_shares(jobs, servers)
    wanted = sum(tenant.wanted for tenant in jobs.values())
    assert sum(shares.values()) == min(servers, wanted), "none lies idle that somebody wants"
    assert all(shares[job] <= tenant.wanted for job, tenant in jobs.items())
    for poor, rich in ((one, other) for one in jobs for other in jobs):
        if shares[poor] < jobs[poor].wanted and shares[rich] > 1:
            assert shares[rich] / jobs[rich].weight <= (shares[poor] + 1) / jobs[poor].weight + 1e-9
            assert shares[poor] > 0
    held = {job: FleetTenant(shares[job], tenant.wanted, tenant.weight) for job, tenant in jobs.items()}
    assert fair_shares(held, servers) == shares
    assert fair_shares(dict(reversed(held.items())), servers) == shares, "whoever computes it"


@given(tenants, st.integers(1, 12), st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 12)), max_size=6))
def test_jobs_that_look_one_after_the_other_come_to_the_deal_and_stay_there(
    jobs: dict[str, FleetTenant], servers: int, changes: list[tuple[str, int]]
) -> None:
    held = dict.fromkeys(jobs, 0)

    def look(job: str) -> bool:
        """What the exchange of one run does: it sees who has what, and who claims; whether anything changed."""
        seen = {name: FleetTenant(held[name], max(held[name], one.wanted), one.weight) for name, one in jobs.items()}
        seen[job] = FleetTenant(held[job], jobs[job].wanted, jobs[job].weight)
        share, free = fair_shares(seen, servers)[job], servers - sum(held.values())
        before, held[job] = held[job], min(share, held[job] + free)
        return held[job] != before

    for name, wanted in [("", 0), *changes]:
        if name in jobs:
            jobs[name] = FleetTenant(0, wanted, jobs[name].weight)
        for _ in range(8):
            moved = [look(job) for job in jobs]
        assert not any(moved)
        for job, tenant in jobs.items():
            if held[job] < tenant.wanted:
                assert sum(held.values()) == servers


def test_no_tenant_is_less_than_nobody() -> None:
    for wrong in ((-1, 0, 1.0), (0, -1, 1.0), (0, 0, 0.0), (0, 0, float("inf"))):
        with pytest.raises(ValueError, match="counts from 0"):
            FleetTenant(*wrong)
