"""Ranks agree on a step: an interruption, a wrong total or a NaN on one is refused by all; a lost rank is an error.

Run as a program, this file is one of two data-parallel ranks that go through the scenarios in turn.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

import dataclasses  # noqa: E402

from megatron_rlplugin.parallel_layout import ParallelLayout, initialize_parallel  # noqa: E402
from megatron_rlplugin.stream.gradient_stream import GradientStream  # noqa: E402
from orchestrator.api import ConfigError, RunError  # noqa: E402
from scripts.bench.probes.megatron.equality import feed, optimizer_tensors, same, weights_of  # noqa: E402
from scripts.bench.probes.megatron.equality_data import Case, batch_of, build, denominator_of, even  # noqa: E402
from tests.support.forked_ranks import first_of_ranks  # noqa: E402

pytestmark = pytest.mark.engine
LAYOUTS = {"plain": {}, "overlapped": {"overlap_reduce": True}, "sharded": {}}


@pytest.fixture(scope="module")
def said() -> dict[str, dict[str, Any]]:
    """What rank 0 found, layout by layout; rank 1 leaves in the last scenario, and says before what it found."""
    answer: dict[str, dict[str, Any]] = first_of_ranks(2, [__file__], [])
    return answer


@pytest.fixture(params=sorted(LAYOUTS))
def found(request: pytest.FixtureRequest, said: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return said[request.param]


def test_an_interruption_on_one_rank_is_refused_by_all_and_only_that_rank_starts_again(found: dict[str, Any]) -> None:
    assert found["interrupted"] == ["RunError", "RunError"]
    assert found["kept_after_interruption"] == [True, True]
    assert found["equal_after_restart"] == [True, True]


def test_a_wrong_total_on_one_rank_is_refused_by_all_before_a_gradient_is_sent(found: dict[str, Any]) -> None:
    assert found["mismatch"] == ["ConfigError", "ConfigError"]
    assert found["kept_after_mismatch"] == [True, True]
    assert found["taken_after_mismatch"] == [True, True]


def test_a_nan_on_one_rank_keeps_all_from_stepping(found: dict[str, Any]) -> None:
    assert found["nan_taken"] == [False, False]
    assert found["kept_after_nan"] == [True, True]


def test_a_replica_that_trains_nothing_need_not_be_there_until_the_merge(found: dict[str, Any]) -> None:
    assert found["alone"] == [True, True]


def test_a_rank_that_disappears_is_an_error_and_leaves_weights_and_optimizer_as_before(said: dict[str, Any]) -> None:
    assert said["lost"] == {"error": "RunError", "kept": True, "refused": True}


# --- the ranks


class Rank:
    """One of two data-parallel ranks."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank = case, rank
        self.chunks, self.optimizer = build(case)
        self.stream = GradientStream(self.chunks, self.optimizer, elastic=True)

    def held(self) -> list[Any]:
        return [*weights_of(self.chunks), *optimizer_tensors(self.optimizer)]

    def feed(self, step: int, *, samples: Any = None) -> float:
        """This rank's even share (or ``samples``); returns N."""
        batch = batch_of(self.case, step)
        feed(self.case, self.stream, even(self.case, batch, self.rank) if samples is None else samples)
        return math.fsum(denominator_of(self.case, sample) for sample in batch)

    def finish(self, expected: float | None = None) -> str:
        try:
            return str(self.stream.finish_step(expected).taken)
        except (ConfigError, RunError) as error:
            return type(error).__name__


def scenarios(case: Case, rank: int) -> dict[str, Any]:
    clean, own = Rank(case, rank), Rank(case, rank)
    results: dict[str, Any] = {}
    clean.stream.begin_step()
    clean.stream.finish_step(clean.feed(0))

    own.stream.begin_step()
    before = own.held()
    if rank == 1:  # dies after its first two micro-batches
        poisoned = even(case, batch_of(case, 0), rank)[:3]
        poisoned[2] = dataclasses.replace(poisoned[2], tokens=poisoned[2].tokens[:0])
        try:
            own.feed(0, samples=poisoned)
        except (RuntimeError, IndexError, ValueError):
            pass
        else:
            raise AssertionError("an empty trajectory was trained on")
    else:
        own.feed(0)
    results["interrupted"] = own.finish()
    results["kept_after_interruption"] = same(before, own.held())
    if rank == 1:
        own.stream.abandon_step()
        own.stream.begin_step()
        own.feed(0)
    own.stream.finish_step()
    results["equal_after_restart"] = same(clean.held(), own.held())

    own.stream.begin_step()
    before = own.held()
    total = own.feed(1)
    results["mismatch"] = own.finish(total + 1 if rank == 0 else None)
    results["kept_after_mismatch"] = same(before, own.held())
    results["taken_after_mismatch"] = own.finish(total) == "True"

    before = own.held()
    own.stream.begin_step()
    share = even(case, batch_of(case, 2), rank)
    own.feed(2, samples=[dataclasses.replace(share[0], advantage=math.nan), *share[1:]] if rank == 1 else share)
    results["nan_taken"] = own.finish() == "True"
    results["kept_after_nan"] = same(before, own.held())

    # No barrier between: rank 1 waits for rank 0 in nothing but finish, rank 0 for rank 1 in nothing at all.
    own.stream.begin_step()
    own.feed(3, samples=batch_of(case, 3) if rank == 0 else [])
    results["alone"] = own.finish() == "True"
    return results


def lose(case: Case, rank: int) -> dict[str, Any]:
    """Rank 1 ends in the middle of the step."""
    own = Rank(case, rank)
    own.stream.begin_step()
    own.feed(0)
    torch.distributed.barrier()
    if rank == 1:
        os._exit(0)
    before = own.held()
    error = own.finish()
    kept = same(before, own.held())
    try:
        own.stream.feed(lambda *_: None, iter([]), num_microbatches=1)
    except RunError:
        return {"error": error, "kept": kept, "refused": True}
    return {"error": error, "kept": kept, "refused": False}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--rank", "--world"):
        parser.add_argument(name, type=int)
    parser.add_argument("--rendezvous")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, options in LAYOUTS.items():
        layout = ParallelLayout(distributed_optimizer=name == "sharded")
        initialize_parallel(
            ParallelLayout(), args.rank, args.world, args.rendezvous
        )  # the optimizer needs no other groups
        mine = scenarios(Case(name, 2, layout, **options), args.rank)
        both: list[Any] = [None, None]
        torch.distributed.all_gather_object(both, mine)
        found[name] = {key: [answer[key] for answer in both] for key in mine}
    found["lost"] = lose(Case("lost", 2), args.rank)
    print(json.dumps(found), flush=True)
    os._exit(0)  # the group is broken: taking it down would wait for the lost rank


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    main()
