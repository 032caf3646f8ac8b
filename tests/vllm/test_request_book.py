"""The book of requests in front of an engine: order, idempotency, and no more inside the engine than can run soon."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import vllm_rlplugin.worker.request_book
from orchestrator.api import GenerationRequest, Sampling
from vllm_rlplugin.worker.request_book import REMEMBERED_IDS, RequestBook

LOOKAHEAD, SLOTS = 3, 2


def request(name: str, priority: int = 0, trajectory: str = "", group: str = "") -> GenerationRequest:
    return GenerationRequest(
        name, trajectory or name, 0, (1, 2), Sampling(4), "test", priority=priority, group_id=group
    )


def names(entries: list[vllm_rlplugin.worker.request_book.UnfinishedRequest]) -> list[str]:
    return [entry.request.request_id for entry in entries]


def test_the_engine_gets_the_best_ranked_and_no_more_than_the_lookahead() -> None:
    book = RequestBook(2)
    assert book.add([request(f"r{index}", priority=index % 2) for index in range(8)], 1.0) == 8
    assert names(book.next_to_feed(0, 1, None)) == ["r0", "r2", "r4"]
    assert (book.held_count, len(book)) == (5, 8)
    assert names(book.next_to_feed(1, 0, 0)) == ["r6"]
    assert book.best_held == 1
    assert book.next_to_feed(2, 0, 1) == []


def test_a_held_request_that_outranks_is_fed_at_once_but_only_as_many_as_could_run_soon() -> None:
    book = RequestBook(2)
    book.add([request("worse", 9)], 0.0)
    assert book.next_to_feed(2, 0, 9) == []  # full, and no better than what waits
    book.add([request(f"better{index}", 1) for index in range(10)], 0.0)
    assert names(book.next_to_feed(2, 1, 9)) == ["better0", "better1", "better2"]
    assert names(book.next_to_feed(5, 0, 9)) == ["better3", "better4"]
    assert book.next_to_feed(7, 0, 1) == []


def test_who_counts_only_those_ahead_feeds_a_better_one_without_a_worst() -> None:
    book = RequestBook(2)
    book.add([request(f"better{index}", 1) for index in range(4)], 0.0)
    assert book.best_held == 1
    assert names(book.next_to_feed(0, 0, None)) == ["better0", "better1"]
    assert book.next_to_feed(2, 0, None) == []


def test_a_repeated_add_is_ignored_while_it_runs_and_after_it_ended() -> None:
    book = RequestBook(4)
    assert book.add([request("a"), request("a")], 0.0) == 1
    assert book.add([request("a", 7)], 1.0) == 0
    assert names(book.next_to_feed(0, 0, None)) == ["a"]
    assert book.finish("a") is not None
    assert book.finish("a") is None
    assert book.add([request("a")], 2.0) == 0
    assert book.was_added("a")
    assert (len(book), book.held_count) == (0, 0)


def test_arrival_breaks_ties_also_among_those_of_one_call() -> None:
    book = RequestBook(1)
    book.add([request(f"r{index}") for index in range(5)], 3.0)
    book.add([request("late")], 3.0)
    times = [entry.added_at for entry in book.next_to_feed(0, 9, None)]
    assert len(times) == 6
    assert times == sorted(set(times)), "no two alike, in order"
    assert times[-1] == pytest.approx(3.0, abs=1e-9)


def test_requests_are_found_by_id_trajectory_and_group_until_they_finish() -> None:
    book = RequestBook(9)
    book.add(
        [
            request("a", trajectory="t", group="g"),
            request("b", trajectory="t"),
            request("c", trajectory="u", group="g"),
        ],
        0.0,
    )
    book.next_to_feed(0, 0, None)
    assert book.select(["b", "unknown"], ["u"], ["g"]) == ["b", "c", "a"]
    book.finish("a")
    assert book.select((), ["t", "unknown"], ["g"]) == ["b", "c"]
    book.finish("c")
    book.finish("b")
    assert book.select(["a"], ["t"], ["g", ""]) == []
    assert (book._trajectories, book._groups) == ({}, {}), "an index that is not emptied leaks"


def test_priorities_move_held_requests_and_name_those_inside() -> None:
    book = RequestBook(2)
    book.add([request("x0", 5, "x"), request("x1", 5, "x"), request("y", 5), request("z", 5)], 0.0)
    assert names(book.next_to_feed(0, 0, None)) == ["x0", "x1"]
    assert book.prioritize({"x": 3, "z": 1, "unknown": 0}) == {"x0": 3, "x1": 3}
    assert book.best_held == 1
    book.prioritize({"z": 8})
    assert book.best_held == 5
    assert names(book.next_to_feed(0, 0, None)) == ["y", "z"]
    assert book.best_held is None


def test_changing_priorities_for_ever_does_not_fill_the_memory() -> None:
    book = RequestBook(1)
    book.add([request(f"r{index}", 5, "t") for index in range(20)], 0.0)
    for priority in range(1000):
        book.prioritize({"t": priority % 7})
    assert len(book._held) <= 3 * 20 + 64
    assert names(book.next_to_feed(0, 99, None)) == [f"r{index}" for index in range(20)]


def test_old_ids_are_forgotten_but_never_those_of_unfinished_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_rlplugin.worker.request_book, "REMEMBERED_IDS", 10)
    book = RequestBook(100)
    book.add([request(f"r{index}") for index in range(10)], 0.0)
    book.next_to_feed(0, 0, None)
    for index in range(1, 10):
        book.finish(f"r{index}")
    book.add([request(f"s{index}") for index in range(10)], 0.0)
    assert book.was_added("r0")
    assert book.add([request("r0")], 0.0) == 0, "an unfinished request is never taken twice"
    book.finish("r0")
    for index in range(10):
        book.finish(f"s{index}")
    book.add([request("t")], 0.0)
    assert not book.was_added("r0")
    assert len(book._seen) <= max(10, 2 * len(book))


def test_the_oldest_of_those_held_is_known() -> None:
    book = RequestBook(1)
    assert book.oldest() is None
    book.add([request("a")], 1.0)
    book.add([request("b", -1)], 2.0)
    assert book.oldest() == 1.0
    assert names(book.next_to_feed(0, 0, None)) == ["b"]
    assert book.oldest() == 1.0
    book.finish("a")
    assert book.oldest() is None


def test_a_request_that_was_held_for_too_long_is_fed_whatever_its_rank() -> None:
    book = RequestBook(2)
    book.add([request(f"old{index}", 9) for index in range(4)], 1.0)
    book.add([request("young", 9)], 5.0)
    book.add([request("better", 0)], 6.0)
    assert names(book.next_to_feed(2, 0, 0, overdue=0.5)) == []
    assert names(book.next_to_feed(2, 0, 0, overdue=5.0)) == ["old0", "old1"], "by age, and no more than the lookahead"
    assert names(book.next_to_feed(4, 0, 9, overdue=5.0)) == ["better"]
    book.finish("old0")
    assert names(book.next_to_feed(4, 0, 9, overdue=5.0)) == ["old2"]
    assert book.held_count == 2
    for name in ("old1", "old2"):
        book.finish(name)
    assert names(book.next_to_feed(4, 0, 9, overdue=5.0)) == ["old3"]
    assert names(book.next_to_feed(4, 0, 9, overdue=5.0)) == []
    assert names(book.next_to_feed(0, 0, None)) == ["young"]


class BookModel(RuleBasedStateMachine):
    """The book against a plain list of what is unfinished, with an engine that starts, finishes and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.book = RequestBook(LOOKAHEAD)
        self.unfinished: dict[str, GenerationRequest] = {}  # in order of arrival
        self.inside: dict[str, None] = {}
        self.running: dict[str, None] = {}
        self.aged: dict[str, None] = {}  # fed for their age, and unfinished
        self.ever: dict[str, None] = {}
        self.clock = 0.0

    def ranked(self, found: list[str]) -> list[str]:
        arrival = {name: index for index, name in enumerate(self.unfinished)}
        return sorted(found, key=lambda name: (self.unfinished[name].priority, arrival[name]))

    @rule(
        numbers=st.lists(st.integers(0, 30), min_size=1, max_size=6),
        priority=st.integers(-2, 2),
        trajectory=st.integers(0, 3),
        group=st.integers(0, 2),
    )
    def add(self, numbers: list[int], priority: int, trajectory: int, group: int) -> None:
        self.clock += 0.5
        found = [request(f"r{n}", priority, f"t{trajectory}", f"g{group}" if group else "") for n in numbers]
        fresh = {item.request_id: item for item in reversed(found) if item.request_id not in self.ever}
        assert self.book.add(found, self.clock) == len(fresh)
        for item in found:
            if item.request_id not in self.ever:
                self.ever[item.request_id] = None
                self.unfinished[item.request_id] = item

    @rule(free=st.integers(0, SLOTS), by_count=st.booleans())
    def feed(self, free: int, by_count: bool) -> None:
        waiting = [name for name in self.inside if name not in self.running]
        held = self.ranked([name for name in self.unfinished if name not in self.inside])
        best = self.book.best_held
        assert best == (self.unfinished[held[0]].priority if held else None)
        if by_count:  # as the in-process carrier does
            ahead = sum(best is not None and self.unfinished[name].priority <= best for name in waiting)
            entries = self.book.next_to_feed(ahead, free, None)
            assert len(entries) == min(len(held), max(0, LOOKAHEAD + free - ahead))
        else:
            worst = max((self.unfinished[name].priority for name in waiting), default=None)
            entries = self.book.next_to_feed(len(waiting), free, worst)
            room = max(0, LOOKAHEAD + free - len(waiting))
            assert min(len(held), room) <= len(entries) <= max(room, LOOKAHEAD + free)
            for entry in entries[room:]:
                assert worst is not None
                assert entry.request.priority < worst
        assert names(entries) == held[: len(entries)], "best first, and none is passed over"
        for entry in entries:
            assert entry.fed
            assert entry.request == self.unfinished[entry.request.request_id]
            self.inside[entry.request.request_id] = None

    @rule(age=st.floats(0, 5))
    def feed_overdue(self, age: float) -> None:
        before = self.clock - age
        held = [name for name in self.unfinished if name not in self.inside]
        late = [name for name in held if self.book.get(name).added_at < before]  # type: ignore[union-attr]
        entries = self.book.next_to_feed(LOOKAHEAD, 0, None, overdue=before)
        assert names(entries) == late[: max(0, LOOKAHEAD - len(self.aged))]
        for name in names(entries):
            self.inside[name] = self.aged[name] = None

    @precondition(lambda self: self.inside)
    @rule(pick=st.integers(0, 99))
    def start(self, pick: int) -> None:
        self.running[list(self.inside)[pick % len(self.inside)]] = None

    @precondition(lambda self: self.unfinished)
    @rule(pick=st.integers(0, 99))
    def finish(self, pick: int) -> None:
        name = list(self.unfinished)[pick % len(self.unfinished)]
        entry = self.book.finish(name)
        assert entry is not None
        assert entry.request == self.unfinished.pop(name)
        self.inside.pop(name, None)
        self.aged.pop(name, None)
        self.running.pop(name, None)
        assert self.book.finish(name) is None

    @rule(trajectory=st.integers(0, 4), priority=st.integers(-2, 2))
    def prioritize(self, trajectory: int, priority: int) -> None:
        expected = {}
        for name, item in self.unfinished.items():
            if item.trajectory_id == f"t{trajectory}":
                self.unfinished[name] = replace(item, priority=priority)
                if name in self.inside:
                    expected[name] = priority
        assert self.book.prioritize({f"t{trajectory}": priority}) == expected

    @rule(trajectory=st.integers(0, 4), group=st.integers(0, 3), number=st.integers(0, 40))
    def select(self, trajectory: int, group: int, number: int) -> None:
        expected = {
            name
            for name, item in self.unfinished.items()
            if name == f"r{number}" or item.trajectory_id == f"t{trajectory}" or item.group_id == f"g{group}"
        }
        found = self.book.select([f"r{number}"], [f"t{trajectory}"], [f"g{group}"])
        assert len(found) == len(set(found))
        assert set(found) == expected

    @invariant()
    def counts_agree(self) -> None:
        assert len(self.book) == len(self.unfinished)
        assert self.book.held_count == len(self.unfinished) - len(self.inside)
        for name in self.unfinished:
            entry = self.book.get(name)
            assert entry is not None
            assert entry.fed is (name in self.inside)
        for priority in range(-3, 4):
            ahead = sum(self.unfinished[name].priority <= priority for name in self.inside)
            assert self.book.fed_ahead(priority) == ahead


BookModel.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestBookModel = BookModel.TestCase


def test_a_book_that_forgets_takes_no_longer_than_one_that_only_remembers() -> None:
    """With plain dicts it looked past all that it had forgotten: an ADD of a thousand took five times as long, 8 ms."""
    book, sampling, seconds = RequestBook(8), Sampling(1), []
    for batch in range(0, 2 * REMEMBERED_IDS, 1024):
        items = [GenerationRequest(f"r{batch + i}", f"t{batch + i}", 0, (1,), sampling, "t") for i in range(1024)]
        started = time.thread_time()
        book.add(items, float(batch))
        seconds.append(time.thread_time() - started)
        for item in items:
            book.finish(item.request_id)
    half = len(seconds) // 2
    remembering, forgetting = sorted(seconds[:half]), sorted(seconds[half + 1 :])
    assert forgetting[half // 2] < 2 * remembering[half // 2], (remembering[half // 2], forgetting[half // 2])
