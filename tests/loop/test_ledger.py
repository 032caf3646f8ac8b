"""The ledger closes, whatever happens; when it does not, it says so."""

import json
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.api import RunError
from orchestrator.events import MemorySink
from orchestrator.ledger import END_STATES, Ledger, _line, recount


def make(sink: MemorySink | None = None) -> tuple[Ledger, MemorySink]:
    sink = sink or MemorySink()
    return Ledger(sink, lambda: 0.0), sink


def drive(ledger: Ledger, name: str, *states: str) -> None:
    for state in states:
        if state in END_STATES:
            ledger.end(name, state, "broke" if state == "failed" else "", step=3 if state == "trained" else -1)
        else:
            ledger.move(name, state)


FINITE = st.floats(allow_nan=False, allow_infinity=False)


def test_every_start_is_in_exactly_one_place() -> None:
    ledger, sink = make()
    for index in range(4):
        ledger.start(f"t{index}", "g0")
    drive(ledger, "t0", "scoring", "buffered", "taken", "trained")
    drive(ledger, "t1", "failed")
    drive(ledger, "t2", "scoring", "buffered", "evicted_stale")
    ledger.check()
    counts = ledger.counts.as_dict()
    assert (counts["started"], counts["in_flight"]) == (4, 1)
    assert counts["trained"] == counts["failed"] == counts["evicted_stale"] == 1
    assert counts["failed_by_cause"] == {"broke": 1}
    assert recount(sink.lines) == counts


@pytest.mark.parametrize(
    "states", [("trained", "trained"), ("scoring", "scoring"), ("taken",), ("failed", "buffered"), ("scoring", "taken")]
)
def test_an_impossible_change_is_refused(states: tuple[str, ...]) -> None:
    ledger, _ = make()
    ledger.start("t", "g")
    with pytest.raises(RunError):
        drive(ledger, "t", *states)


def test_unknown_and_repeated_ids_are_refused() -> None:
    ledger, _ = make()
    ledger.start("t", "g")
    with pytest.raises(RunError, match="twice"):
        ledger.start("t", "g")
    with pytest.raises(RunError, match="never started"):
        ledger.end("other", "trained")
    with pytest.raises(RunError, match="without a cause"):
        ledger.end("t", "failed")


def test_a_lost_trajectory_is_caught() -> None:
    """The mutation: an entry vanishes behind the ledger's back."""
    ledger, _ = make()
    ledger.start("t0", "g")
    ledger.start("t1", "g")
    del ledger._entries["t1"]
    with pytest.raises(RunError, match="does not close"):
        ledger.check()


def test_a_miscounted_flight_is_caught() -> None:
    ledger, _ = make()
    ledger.start("t0", "g")
    ledger.counts.in_flight -= 1
    with pytest.raises(RunError, match="does not close"):
        ledger.check()


def test_an_end_counted_twice_is_caught() -> None:
    ledger, _ = make()
    ledger.start("t0", "g")
    drive(ledger, "t0", "failed")
    ledger.counts.ended["failed"] += 1
    with pytest.raises(RunError, match="does not close"):
        ledger.check()


def test_resume_rolls_back_what_was_trained_after_the_checkpoint() -> None:
    ledger, sink = make()
    for name in ("old", "held", "lost", "flying", "buffered", "evicted"):
        ledger.start(name, f"group-{name}")
    drive(ledger, "old", "scoring", "buffered", "taken")
    ledger.end("old", "trained", step=1)
    for name in ("held", "lost"):
        drive(ledger, name, "scoring", "buffered", "taken")
        ledger.end(name, "trained", step=2)
    drive(ledger, "buffered", "scoring", "buffered")
    drive(ledger, "evicted", "scoring", "buffered", "evicted_stale")

    again, journal = make()
    returned = again.restore(sink.lines, checkpoint_step=2, held={"held", "buffered", "evicted"})

    assert returned == ["held", "buffered"]
    assert [again.state(name) for name in ("old", "held", "lost", "flying", "buffered", "evicted")] == [
        "",  # ended before the checkpoint
        "buffered",
        "failed",
        "failed",
        "buffered",
        "",
    ]
    assert +again.trained_by_step == {1: 1}
    counts = again.counts.as_dict()
    assert counts["rolled_back"] == 2
    assert counts["failed_by_cause"] == {"interrupted": 1, "rolled_back": 1}
    assert recount([*sink.lines, *journal.lines]) == counts
    drive(again, "held", "taken", "trained")
    again.check()


def test_a_second_crash_replays_the_first_resume() -> None:
    ledger, sink = make()
    ledger.start("t", "g")
    drive(ledger, "t", "scoring", "buffered", "taken")
    ledger.end("t", "trained", step=5)
    second, more = make()
    second.restore(sink.lines, checkpoint_step=5, held={"t"})
    third, _ = make()
    lines = [*sink.lines, *more.lines]
    assert third.restore(lines, checkpoint_step=5, held={"t"}) == ["t"]
    assert third.counts.as_dict() == second.counts.as_dict()


def test_a_group_of_which_too_little_is_left_is_lost_and_one_that_ended_by_itself_is_not() -> None:
    ledger, sink = make()
    ends = {
        "0": ("trained", "trained"),
        "1": ("rolled_back", "filtered"),
        "2": ("failed", "failed"),
        "3": ("held", "cut"),
    }
    ends |= {"4": ("held", "held"), "5": ("filtered", "cut"), "6": ("cut", "cut")}
    for number, members in ends.items():
        for place, end in enumerate(members):
            name = f"t{number}-{place}"
            ledger.start(name, f"g000000{number}")
            if end == "cut":
                continue
            drive(ledger, name, "scoring", "buffered")
            if end in ("trained", "rolled_back"):
                ledger.move(name, "taken")
                ledger.end(name, "trained", step=4 + (end == "rolled_back"))
            elif end != "held":
                ledger.end(name, end, "why")
    held = {"t3-0", "t4-0", "t4-1"}
    second, more = make()
    second.restore(sink.lines, 5, held)
    assert (second.groups_started, second.groups_lost) == (7, (1, 3, 5, 6))
    for twice in (1, 3):  # in its second life the first is trained, the second ends by itself
        for place in range(2):
            name = f"u{twice}-{place}"
            second.start(name, f"g000000{twice}-1")
            drive(second, name, "scoring", "buffered")
            if twice == 1:
                second.move(name, "taken")
            second.end(name, *(("trained", "", 5) if twice == 1 else ("filtered", "zero_variance")))
    third, _ = make()
    third.restore([*sink.lines, *more.lines], 6, held)
    assert (third.groups_started, third.groups_lost) == (7, (5, 6))


def test_a_long_run_holds_no_more_in_memory_than_a_short_one() -> None:
    """What ended before the check before is only counted: totals, the check and a resume are as if it were still there."""
    ledger, sink = make()
    for step in range(50):
        for index in range(20):
            ledger.start(f"t{step}-{index}", f"g{step * 5 + index // 4:07d}")
            drive(ledger, f"t{step}-{index}", "scoring", "buffered", "taken", "trained")
        ledger.check()
        assert len(ledger._entries) <= 40
    assert ledger.counts.as_dict() == recount(sink.lines)
    again, _ = make()
    again.restore(sink.lines, checkpoint_step=4, held=set())
    assert again.counts.as_dict() == ledger.counts.as_dict()
    assert again.groups_started == 250


class Weeks:
    """The journal of so many steps, each line made when it is asked for; two were rolled back once."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __iter__(self) -> Iterator[str]:
        return (json.dumps(record | {"seq": number, "t": 0}) for number, record in enumerate(self.records()))

    def records(self) -> Iterator[dict[str, object]]:
        for step in range(self.steps):
            for life in ("", "-1")[: 1 + (step in (49, 99))]:
                names = [f"t{step}-{index}{life}" for index in range(8)]
                for index, name in enumerate(names):
                    yield {"id": name, "group": f"g{2 * step + index // 4:07d}{life}", "state": "running"}
                    for state in ("scoring", "buffered", *(("taken",) if index != 3 else ())):
                        yield {"id": name, "state": state}
                    yield {"id": name, "state": "trained" if index != 3 else "filtered", "step": step}
                for name in (*names[:3], *names[4:]) if step in (49, 99) and not life else ():
                    yield {"id": name, "state": "rolled_back", "step": step}
                    yield {"id": name, "state": "failed", "cause": "rolled_back"}


def test_a_resume_of_a_long_run_holds_no_more_than_that_of_a_short_one() -> None:
    """Totals, steps and lost groups are those of the whole journal."""
    peaks = []
    for steps in (120, 1_200):
        again, sink = make()
        tracemalloc.start()
        try:
            again.restore(Weeks(steps), checkpoint_step=steps - 1, held=())
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        assert again.groups_lost == (2 * steps - 2, 2 * steps - 1)
        assert +again.trained_by_step == dict.fromkeys(range(steps - 1), 7)
        assert again.counts.as_dict() == recount([*Weeks(steps), *sink.lines])
    assert again.groups_started == 2 * steps
    assert peaks[1] < peaks[0] + (64 << 10), f"bytes of 1,000 and of 10,000 trajectories: {peaks}"


@given(st.dictionaries(st.sampled_from(["id", "cause", "t", "seq", "step"]), st.text() | st.integers() | FINITE))
def test_a_line_of_the_journal_is_what_json_would_write(record: dict[str, object]) -> None:
    assert _line(record) == json.dumps(record, sort_keys=True, separators=(",", ":"))


def test_two_records_in_one_line_are_none() -> None:
    line = '{"id":"a","seq":0,"state":"running","t":0}'
    assert [recount([text])["started"] for text in (line, line + "\n", line + line, line + " x")] == [1, 1, 0, 0]


def test_a_half_written_line_is_skipped() -> None:
    ledger, sink = make()
    ledger.start("t", "g")
    again, _ = make()
    again.restore([*sink.lines, '{"id":"t","sta'], 0, set())
    assert again.counts.failed_by_cause == {"interrupted": 1}


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["scoring", "buffered", "taken", *END_STATES])), max_size=60)
)
def test_random_histories_always_close_and_agree_with_the_recount(steps: list[tuple[int, str]]) -> None:
    ledger, sink = make()
    for index in range(6):
        ledger.start(f"t{index}", "g")
    for index, state in steps:
        try:
            drive(ledger, f"t{index}", state)
        except RunError:
            continue  # refused, and nothing was written
    ledger.check()
    assert recount(sink.lines) == ledger.counts.as_dict()
    assert [json.loads(line)["seq"] for line in sink.lines] == list(range(len(sink.lines)))


def test_a_recount_takes_no_memory_for_what_has_ended_and_sees_one_that_ended_twice() -> None:
    def journal(number: int) -> Iterator[str]:
        for index in range(number):
            name = f"t{index:07d}"
            yield _line({"id": name, "group": "g0", "state": "running", "seq": 2 * index, "t": 0.0})
            yield _line({"id": name, "state": "trained", "step": 1, "seq": 2 * index + 1, "t": 1.0})

    tracemalloc.start()
    counts = recount(journal(5000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (counts["started"], counts["trained"], counts["in_flight"]) == (5000, 5000, 0)
    assert peak < 100_000, "20 bytes per trajectory: a week has millions"
    again = recount([*journal(3), _line({"id": "t0000001", "state": "trained", "step": 2, "seq": 6, "t": 2.0})])
    assert (again["started"], again["trained"]) == (4, 4)
