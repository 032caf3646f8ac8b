"""Agreement among the ranks of one vLLM engine in the middle of a weight update.

vLLM's multi-process executor stops reading the ranks' answers at the first that is an exception, and takes those it has
not read for the answers of the next call: from then on every call gets a stale answer. So with several ranks only the
last one may raise. The ranks therefore agree on the outcome first, over vLLM's own CPU groups (gloo), all of them at the
same place; a rank that died ends that with an error of the group.

While a version is loaded layer by layer, ranks with slices of the same layers agree before each (:class:`LoadVotes`): where
vLLM quantises a slice by the largest value of the whole, they meet in a collective, in which others would wait for one that
failed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed import parallel_state

from orchestrator.api import RetryableError


class RankVotes:
    """One rank's view. ``number`` counts from 0 to ``size`` - 1 within the engine (a data-parallel replica is another)."""

    def __init__(self, parallel_config: Any) -> None:
        self.number = int(parallel_config.rank)
        self.size = int(parallel_config.world_size)

    @property
    def may_raise(self) -> bool:
        """Whether an exception of this rank leaves the executor in step."""
        return self.number == self.size - 1

    def all_agree(self, fine: bool, token: str = "0") -> bool:
        """Whether all ranks are fine and have the same token (hexadecimal, at most 64 bits). A collective call."""
        if self.size == 1:
            return fine
        value = int(token, 16) >> 1  # 63 bits fit a signed word
        state = torch.tensor([int(fine), value, -value], dtype=torch.int64)
        for group in (parallel_state.get_tp_group(), parallel_state.get_pcp_group(), parallel_state.get_pp_group()):
            if group.world_size > 1:
                torch.distributed.all_reduce(state, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
        least, lowest, highest = state.tolist()
        return bool(least) and lowest == -highest

    def stage_agrees(self, fine: bool) -> bool:
        """Whether all ranks that have slices of the same layers are fine. A collective call of theirs."""
        if self.size == 1 or (group := parallel_state.get_tp_group()).world_size == 1:
            return fine
        state = torch.tensor([int(fine)])
        torch.distributed.all_reduce(state, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
        return bool(state.item())


class LoadVotes:
    """Of one load: each rank votes as often as the others, until one says that it failed, or all are through."""

    def __init__(self, agree: Callable[[bool], bool] = lambda fine: fine) -> None:
        self._agree = agree
        self._over = False

    def cast(self, error: Exception | None = None) -> None:
        """Raises ``error``, or RetryableError where another rank has failed."""
        self._over = not self._agree(error is None)
        if error is not None:
            raise error
        if self._over:
            raise RetryableError("another rank of this engine failed; its report says why")

    def give_up(self) -> None:
        """This rank failed for whatever reason, and no later vote of it will come. Idempotent."""
        if not self._over:
            self._over = True
            self._agree(False)
