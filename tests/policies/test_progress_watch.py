"""Requests that make no progress beside serving: one object for engine and simulator."""

from __future__ import annotations

import math

from orchestrator.policies.serving.progress_watch import STALL_SECONDS, ProgressWatch


def test_what_stood_still_for_two_seconds_is_named_once_and_what_moved_is_not() -> None:
    watch = ProgressWatch()
    watch.note(0.0, {"stands": 3, "moves": 3})
    assert watch.due == STALL_SECONDS
    assert watch.stalled(1.9, {"stands": 3, "moves": 4}) == []
    assert watch.due == STALL_SECONDS
    assert watch.stalled(2.0, {"stands": 3, "moves": 4}) == ["stands"]
    assert watch.due == 1.9 + STALL_SECONDS
    assert watch.stalled(2.1, {"stands": 3, "moves": 4}) == [], "seen anew"


def test_who_is_not_named_is_forgotten_and_a_pause_is_no_stall() -> None:
    watch = ProgressWatch(5.0)
    watch.note(0.0, {"a": 1})
    watch.note(1.0, {})
    assert watch.due == math.inf
    assert watch.stalled(6.0, {"a": 1}) == []
    watch.clear()
    assert watch.stalled(12.0, {"a": 1}) == []
    assert watch.stalled(17.0, {"a": 1}) == ["a"]


def test_less_progress_than_before_is_progress() -> None:
    """A request that was preempted is computed anew."""
    watch = ProgressWatch()
    watch.note(0.0, {"a": 9})
    assert watch.stalled(2.0, {"a": 0}) == []
    assert watch.stalled(4.0, {"a": 0}) == ["a"]
