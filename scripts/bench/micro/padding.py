"""Padded over real tokens of streamed, unpacked micro-batches, on the recorded sets of lengths.

A count, with the trainer's own code: groups of eight arrive in the order in which they ended in the recorded run, whole; a batch
of 8 to 64 groups fills about 8, 16 or 32 micro-batches (the budget of tokens is that share of the batch's, or its longest
trajectory), of 64 trajectories at most. Compared with the order of arrival, and with the whole batch sorted by length, which
cannot be streamed. Beside it: how much of the batch has arrived when the first micro-batch begins, beyond what the order of
arrival needs; and the work of the fullest of four data-parallel replicas over the mean (operations of a Qwen2.5-7B), against
micro-batches dealt in turn. The value is the worst of all sets and sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_rlplugin.trainer.micro_batches import (
    ArrivalPacker,
    LengthPool,
    MicroBatchLimits,
    TrainRow,
    plan_micro_batches,
)
from megatron_rlplugin.trainer.replicas import Dealer
from megatron_rlplugin.trainer.training_work import TrainingWork
from scripts.bench.papers.length_sets import Case, built_in, packed
from scripts.bench.result import frame, now

NAME = "padding"
_BAR = 1.10
_MEMBERS, _TRAJECTORIES, _REPLICAS = 8, 64, 4
# Qwen2.5-7B: 28 layers of 3,584, 28 heads of 128 with 4 for keys and values, feed forward 18,944, 152,064 words.
_WORK = TrainingWork(2.0 * 28 * (2 * 3584 * (3584 + 512) + 3 * 3584 * 18944), 2.0 * 28 * 3584, 2.0 * 3584 * 152_064)


@dataclass
class _Sums:
    """Over the batches of one set and size."""

    real: int = 0
    padded: int = 0
    plans: int = 0
    later: float = 0.0  # of a batch, at most: first micro-batch, beyond what the order of arrival needs
    fullest: float = 0.0
    mean: float = 0.0


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Count. ``quick``: one size of batch."""
    begun = now()
    rows = [
        _measured(name, cases, groups, share)
        for name, cases in ((name, packed(file)) for name, file in built_in().items())
        for groups in ((16,) if quick else (8, 16, 32, 64))
        for share in ((16,) if quick else (8, 16, 32))
        if len(cases) >= groups * _MEMBERS
    ]
    worst = max(row["streamed"] for row in rows)
    late = max(row["first_later"] for row in rows)
    return frame(
        NAME,
        "real",
        value=worst,
        unit="padded over real tokens, streamed and unpacked, the worst of all sets and sizes",
        reference="in the order of arrival, the worst",
        reference_value=max(row["arrival"] for row in rows),
        bar=f"<= {_BAR:.2f}, and the first micro-batch begins with at most a tenth of the batch more",
        holds=None if quick else worst <= _BAR and late <= 0.1,
        detail={"sets": rows, "first_later": late, "samples": sum(row["batches"] for row in rows)},
        quick=quick,
        nonce=nonce,
        begun=begun,
    )


def _measured(name: str, cases: Sequence[Case], groups: int, share: int) -> dict[str, Any]:
    sums = {kind: _Sums() for kind in ("arrival", "streamed", "length")}
    turns, batches = _Sums(), 0
    for batch in _batches(cases, groups):
        lengths = [length for group in batch for length in group]
        budget = max(sum(lengths) // share, *lengths)
        rows = [_row(k, number, n) for k, (number, n) in enumerate(_numbered(batch))]
        limits = MicroBatchLimits(_TRAJECTORIES, "arrival", tokens=budget, held=len(lengths) // 10)
        arrival, begins = _streamed(ArrivalPacker(limits), rows)
        pooled, later = _streamed(LengthPool(limits), rows)
        kinds = {
            "arrival": arrival,
            "streamed": pooled,
            "length": plan_micro_batches(rows, range(len(rows)), MicroBatchLimits(_TRAJECTORIES, tokens=budget)),
        }
        for kind, plans in kinds.items():
            _add(sums[kind], plans, rows, limits, turns if kind == "streamed" else None)
        sums["streamed"].later = max(sums["streamed"].later, (later - begins) / len(rows))
        batches += 1
    return {
        "set": name,
        "groups": groups,
        "micro_batches": share,
        "batches": batches,
        **{kind: round(one.padded / one.real, 4) for kind, one in sums.items()},
        "plans": {kind: round(one.plans / batches, 1) for kind, one in sums.items()},
        "first_later": round(sums["streamed"].later, 4),
        "fullest_replica": round(sums["streamed"].fullest / sums["streamed"].mean, 4),
        "fullest_in_turn": round(turns.fullest / turns.mean, 4),
    }


def _batches(cases: Sequence[Case], groups: int) -> list[list[list[int]]]:
    """Whole batches of the lengths of groups, in the order in which groups were complete."""
    members: dict[tuple[str, int], list[Case]] = {}
    for case in cases:
        members.setdefault((case.prompt, case.trial // _MEMBERS), []).append(case)
    ended = sorted(members.values(), key=lambda group: max(case.ended for case in group))
    lengths = [[sum(case.outcome.before[-1].heard) + sum(case.outcome.said) for case in group] for group in ended]
    return [lengths[start : start + groups] for start in range(0, len(lengths) - groups + 1, groups)]


def _numbered(batch: Iterable[Sequence[int]]) -> list[tuple[int, int]]:
    return [(number, length) for number, group in enumerate(batch) for length in group]


def _row(index: int, group: int, length: int) -> TrainRow:
    said = np.arange(length // 2, dtype=np.int64)
    numbers, flags = np.zeros(len(said), np.float32), np.ones(len(said), np.bool_)
    return TrainRow(f"t{index}", f"g{group}", np.zeros(length, np.int64), said, numbers, flags, flags, numbers)


def _streamed(packer: ArrivalPacker | LengthPool, rows: Sequence[TrainRow]) -> tuple[list[list[int]], int]:
    """(micro-batches, trajectories that have arrived when the first begins), fed group by group."""
    plans: list[list[int]] = []
    begins = len(rows)
    for name in dict.fromkeys(row.group for row in rows):
        own = [(index, name, len(row)) for index, row in enumerate(rows) if row.group == name]
        found = packer.add(own)
        if found and not plans:
            begins = own[-1][0] + 1
        plans += found
    return plans + packer.rest(), begins


def _add(
    sums: _Sums, plans: list[list[int]], rows: list[TrainRow], limits: MicroBatchLimits, turns: _Sums | None
) -> None:
    sums.real += sum(len(row) for row in rows)
    sums.padded += sum(len(plan) * max(len(rows[index]) for index in plan) for plan in plans)
    sums.plans += len(plans)
    if turns is None:
        return
    work = [_WORK.of_plan(rows, plan, limits) for plan in plans]
    known = {tuple(plan): one for plan, one in zip(plans, work, strict=True)}
    shares = [
        sum(
            known[tuple(share.members)]
            for share in Dealer(k, _REPLICAS, in_step=False).deal_micro_batches(plans, work)[1]
        )
        for k in range(_REPLICAS)
    ]
    for into, loads in ((sums, shares), (turns, [sum(work[k::_REPLICAS]) for k in range(_REPLICAS)])):
        into.fullest, into.mean = into.fullest + max(loads), into.mean + sum(work) / _REPLICAS
