"""What this rank does of a step, and how the ranks' parts become one again.

Guarantees: every rank is given the same trajectories; which data-parallel replica computes a micro-batch depends on it and on
those before it that were dealt to the replicas that compute then, not on how they come in (uneven shares are fine); what was
summed is equal on all ranks, bit for bit. With one rank nothing is communicated. With expert parallelism, replicas that share
experts run the same number of micro-batches, idle ones added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from megatron_rlplugin.parallel_layout import device
from megatron_rlplugin.trainer.micro_batches import Floats
from orchestrator.api import ConfigError, RunError

Report = TypeVar("Report")


@dataclass(frozen=True, slots=True)
class MicroBatchShare:
    """A micro-batch for this replica: the rows in it; ``idle``: it keeps experts in step and weighs nothing."""

    members: list[int]
    idle: bool = False


class Replicas:
    """This rank's place among the data-parallel replicas. Made once Megatron's groups exist. ``present``: those that compute;
    while only a part does (RollPacker 4.4), the others take part in what is exchanged, and touch no weight."""

    def __init__(self) -> None:
        from megatron.core import parallel_state as groups

        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.index = groups.get_data_parallel_rank(with_context_parallel=False)
        self.count = groups.get_data_parallel_world_size(with_context_parallel=False)
        ranks = groups.get_tensor_model_parallel_world_size() * groups.get_context_parallel_world_size()
        sharing = groups.get_tensor_model_parallel_world_size() * groups.get_expert_model_parallel_world_size()
        self._each = (
            math.lcm(ranks, sharing) // ranks
        )  # replicas of a unit, as stream_units has them: they share experts
        self.in_step = self._each > 1
        self.present: tuple[int, ...] = tuple(range(self.count))
        first = groups.get_tensor_model_parallel_rank() == 0 and groups.get_context_parallel_rank() == 0
        # One rank a replica has the reports of its last pipeline stage.
        self.speaks = first and groups.is_pipeline_last_stage(ignore_virtual=True)

    @property
    def units(self) -> int:
        """How many parts can compute without each other."""
        return int(self.count // self._each)

    @property
    def here(self) -> bool:
        """Whether this one computes now."""
        return self.index in self.present

    def is_of(self, units: Sequence[int] | None) -> bool:
        """Whether this rank is of one of these units (None: of any). Raises ConfigError for a unit that there is not."""
        if units is None:
            return True
        if strange := [unit for unit in units if not 0 <= unit < self.units]:
            fix = f"must be below {self.units} and at least 0: a replica, or a set of replicas that share experts"
            raise ConfigError("replicas", strange[0], fix)
        return self.index // self._each in units

    def compute_on(self, units: Sequence[int] | None) -> None:
        """Only the replicas of these units compute from now on (None: all). Raises ConfigError as :meth:`is_of`."""
        self.is_of(units)
        everyone = range(self.count)
        self.present = tuple(everyone if units is None else (one for one in everyone if one // self._each in units))

    def dealer(self) -> Dealer:
        """Deals the micro-batches of one optimizer step."""
        return Dealer(self.index, self.count, in_step=self.in_step)

    def sum_report(self, report: Report) -> Report:
        """A dataclass of floats and tuples of floats, summed over the replicas (fields that end in ``_max``: their maximum)."""
        if self.world == 1:
            return report
        names = [field.name for field in fields(report)]  # type: ignore[arg-type]
        parts = [getattr(report, name) for name in names]
        flat = [float(x) for part in parts for x in (part if isinstance(part, tuple) else (part,))]
        flat = flat if self.speaks else [0.0] * len(flat)
        sums, largest = iter(self._reduce(flat, dist.ReduceOp.SUM)), iter(self._reduce(flat, dist.ReduceOp.MAX))
        added: dict[str, float | tuple[float, ...]] = {}
        for name, part in zip(names, parts, strict=True):
            count = len(part) if isinstance(part, tuple) else 1
            total, most = tuple(islice(sums, count)), tuple(islice(largest, count))
            added[name] = total if isinstance(part, tuple) else most[0] if name.endswith("_max") else total[0]
        return type(report)(**added)

    def exchange(self, values: Mapping[int, Floats], lengths: Mapping[int, int]) -> dict[int, Floats]:
        """What each replica knows of some rows (an array a row) made known to all; ``lengths`` of all of them."""
        if self.world == 1:
            return dict(values)
        starts = dict(zip(lengths, np.cumsum([0, *lengths.values()]).tolist(), strict=False))
        flat = np.zeros(sum(lengths.values()), dtype=np.float32)
        for index, array in values.items() if self.speaks else ():
            flat[starts[index] : starts[index] + lengths[index]] = array
        tensor = torch.from_numpy(flat).to(device())
        dist.all_reduce(tensor)  # one rank has the value, the others 0: nothing is rounded
        flat = tensor.cpu().numpy()
        return {index: flat[start : start + lengths[index]] for index, start in starts.items()}

    def all_true(self, flag: bool) -> bool:
        """Whether it holds on every rank."""
        return flag if self.world == 1 else self._reduce([float(flag)], dist.ReduceOp.MIN)[0] > 0

    def ranks_agree(self, number: int) -> bool:
        """Whether all ranks give the same number."""
        if self.world == 1:
            return True
        least, opposite = self._reduce([float(number), -float(number)], dist.ReduceOp.MIN)
        return least == -opposite

    def require_everywhere(self, flag: bool, what: str) -> None:
        """Raise RunError on every rank when it fails on one, so that no rank waits for one that gave up."""
        if not self.all_true(flag):
            raise RunError(f"rank {self.rank} of {self.world}: another rank failed to {what}; see its error")

    def _reduce(self, values: Sequence[float], operation: Any) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=device())
        dist.all_reduce(tensor, op=operation)
        answer: list[float] = tensor.tolist()
        return answer


class Dealer:
    """Each micro-batch goes to the replica with the least work so far of those that compute, however the micro-batches come in:
    longest first, this is at most 4/3 of the best split (Graham, 1969). Equal work goes round."""

    def __init__(self, index: int, count: int, *, in_step: bool) -> None:
        self._index, self._in_step = index, in_step
        self._all = tuple(range(count))
        self._work = dict.fromkeys(self._all, 0.0)  # that each of those that compute was dealt
        self._waiting: list[tuple[list[int], float]] = []

    def deal_micro_batches(
        self,
        plans: Sequence[list[int]],
        work: Sequence[float] = (),
        *,
        last: bool = False,
        among: tuple[int, ...] | None = None,
    ) -> tuple[list[list[int]], list[MicroBatchShare]]:
        """(the micro-batches that replicas compute now, those of this one). ``work``: of each, in any unit; none: all the same.
        ``among``: the replicas that compute, in order (None: all). Replicas in step wait for a whole round, in which each gets
        one, except for the ``last``, which idle copies make whole."""
        among = self._all if among is None else among
        if among != tuple(self._work):
            self._work = dict.fromkeys(among, 0.0)
        now = [*self._waiting, *zip(plans, work or [1.0] * len(plans), strict=True)]
        size = len(among)
        whole = len(now) if last or not self._in_step else len(now) // size * size
        now, self._waiting = now[:whole], now[whole:]
        own: list[MicroBatchShare] = []
        for start in range(0, whole, size):
            own += self._deal_round(now[start : start + size])
        return [members for members, _ in now], own

    def _deal_round(self, dealt: Sequence[tuple[list[int], float]]) -> list[MicroBatchShare]:
        own: list[MicroBatchShare] = []
        free = list(self._work)
        order = sorted(dealt, key=lambda one: -one[1]) if self._in_step else dealt
        for members, work in order:
            replica = min(free, key=lambda index: (self._work[index], free.index(index)))
            self._work[replica] += work
            if self._in_step:
                free.remove(replica)
            if replica == self._index:
                own.append(MicroBatchShare(members))
        if self._in_step and self._index in free:
            own.append(MicroBatchShare(order[-1][0], idle=True))
        return own
