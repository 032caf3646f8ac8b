"""From trajectories to micro-batches, deterministically.

Guarantees: a trajectory that cannot be trained on (a reward or log-prob that is not finite, no policy token, none recent
enough) is left out and counted by cause, never silently; padding and masked tokens are neither trained on nor counted in a
denominator; which trajectories meet in a micro-batch depends only on their order and lengths and on the limits, not on
when they arrived.

Shapes: ``_T`` policy tokens of a micro-batch one after the other, ``_BS`` rows of a micro-batch by tokens in a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rlplugin.objective.policy_loss import Tokens, kept_tokens, token_weights
from megatron_rlplugin.parallel_layout import device
from megatron_rlplugin.trainer.row_packing import check_fits, first_fit_decreasing
from orchestrator.api import RunError, SampleFacts, SampleSource, TrainSample
from orchestrator.transfer.turns.routed_experts import UNKNOWN, Experts, unpack_experts

TOO_OLD, SILENT = "tokens_too_old", "group_silent"  # all masked by max_token_lag; DAPO's dynamic sampling
SKIP_CAUSES = ("reward_not_finite", "logprob_not_finite", "no_policy_token", TOO_OLD, SILENT)
Floats = np.ndarray[tuple[int], np.dtype[np.float32]]
Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]
Ids = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Unread:
    """An array of a row that nobody has needed yet: where it lies, and its length."""

    source: SampleSource
    length: int

    def __len__(self) -> int:
        return self.length


@dataclass(frozen=True, slots=True)
class TrainRow:
    """One trajectory, ready to be put into a micro-batch; the arrays but ``token_ids`` have one entry a policy token. Those of a
    sample that lies elsewhere are :class:`Unread` until :meth:`read`: only a rank that computes the row reads them.

    ``kept``: whether the token is trained on; ``fresh``: whether the version that is trained made it. ``old``,
    ``reference``, ``values``: log-probs at the step's start and of the reference, the critic's values at the step's start;
    ``returns``: what the critic is trained towards. None: not needed. ``experts``: that the rollout chose for each token, where
    they are replayed; None: nobody said.
    """

    name: str
    group: str
    token_ids: Ids
    positions: Ids  # in token_ids
    rollout: Floats
    fresh: Flags
    kept: Flags
    advantages: Floats
    reward: float = 0.0
    weight: float = 1.0  # of all its tokens in the loss, beside their own (policies.training.sample_weights)
    old: Floats | None = None
    reference: Floats | None = None
    values: Floats | None = None
    returns: Floats | None = None
    experts: Experts | Unread | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    def with_array(self, name: str, array: Floats) -> TrainRow:
        """With ``old``, ``reference`` or ``values`` as a forward pass gave them."""
        return replace(self, **{name: array})  # type: ignore[arg-type]

    def read(self) -> TrainRow:
        """With all its arrays. Each call reads anew: who computes a row holds it no longer than its micro-batch. Raises RunError
        where it is lost or damaged."""
        unread: Any = self.token_ids
        if not isinstance(unread, Unread):
            return self
        token_ids, positions, rollout = unread.source.read()
        experts = self.experts
        if isinstance(experts, Unread):
            experts = unpack_experts(experts.source.experts(), experts.length)
        return replace(
            self,
            experts=experts,
            token_ids=token_ids.astype(np.int64),
            positions=positions.astype(np.int64),
            rollout=rollout.astype(np.float32),
        )

    def trained(self) -> TrainRow:
        """The row without the tokens that are not trained on; they stay context."""
        if self.kept.all():
            return self
        values = {name: getattr(self, name) for name in _PER_TOKEN}
        return replace(self, **{name: value[self.kept] for name, value in values.items() if value is not None})


_PER_TOKEN = ("positions", "rollout", "fresh", "kept", "advantages", "old", "reference", "values", "returns")


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Inputs, and where in ``[batch * length]`` the logits of the policy's tokens are.

    ``packed``: the lengths of the trajectories in the one row, when it holds several; empty: one trajectory a row.
    """

    inputs_BS: Tensor
    positions_BS: Tensor
    at_T: Tensor
    tokens: Tokens
    counts: tuple[int, ...]  # policy tokens of each trajectory
    indices: tuple[int, ...]  # which rows these are
    packed: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()  # tokens that are no padding, of each row; of a packed one, all
    values_T: Tensor | None = None  # the critic's, at the step's start
    returns_T: Tensor | None = None  # what the critic is trained towards
    # that the rollout chose for each input in each layer, UNKNOWN where nobody said; on the CPU: a rank needs its layers' alone
    experts_BSLK: Tensor | None = None
    replayed: int = 0  # inputs whose experts are known

    def idle_copy(self) -> MicroBatch:
        """The same to compute, weighing nothing in loss and denominator: where a schedule wants more micro-batches."""
        tokens = replace(self.tokens, weights_T=torch.zeros_like(self.tokens.weights_T), denominator=0)
        return replace(self, tokens=tokens, lengths=(0,) * len(self.lengths))

    def padding_BS(self) -> Tensor:
        """True where there is nothing: padding, and all of what only fills a schedule."""
        place = torch.arange(self.inputs_BS.shape[1], device=self.inputs_BS.device)
        return place >= torch.tensor(self.lengths, device=place.device)[:, None]

    def select(self, logits_BSV: Tensor) -> Tensor:
        """The logits (or values) that predict the policy's tokens."""
        return logits_BSV.reshape(-1, logits_BSV.shape[-1]).index_select(0, self.at_T)


@dataclass(frozen=True, slots=True)
class MicroBatchLimits:
    """What a micro-batch may hold, and in which order it is filled (``length`` or ``arrival``).

    ``multiple``: rows are padded to a multiple of this many tokens (sequence parallelism splits them evenly). ``tokens``:
    of padded rows, padding included; a longer trajectory is alone. Without a bound the longest ones meet in one micro-batch,
    and decide the memory of a step. None: no bound. ``held``: in the order of arrival, so many trajectories wait for others of
    their length (:class:`LengthPool`); 0: none does. Packed rows have no padding, and none waits.
    """

    size: int  # trajectories
    order: str = "length"
    pack_tokens: int | None = None
    multiple: int = 1
    tokens: int | None = None
    held: int = 0

    def takes(self, count: int, widest: int, total: int) -> bool:
        """Whether so many trajectories, with the longest and the sum of their tokens, may be one micro-batch."""
        if count > self.size:
            return False
        if self.pack_tokens is not None:
            return total <= self.pack_tokens
        return self.tokens is None or count == 1 or count * widest <= self.tokens


# -- trajectories ----------------------------------------------------------------------------------------------------


def usable_samples(
    samples: Sequence[TrainSample], vocabulary: int, longest: int, pack_tokens: int | None = None
) -> tuple[list[TrainSample], dict[str, int]]:
    """The samples that can be trained on, and how many were skipped, by cause. Raises RunError for malformed ones."""
    kept: list[TrainSample] = []
    skipped = dict.fromkeys(SKIP_CAUSES, 0)
    for sample in samples:
        facts = sample.source.facts if sample.source is not None else _facts_of(sample)
        _check_facts(sample.trajectory_id, facts, vocabulary, longest)
        check_fits(sample.trajectory_id, facts.tokens, pack_tokens)
        if len(sample.logprobs) != facts.tokens or sum(n for _, n in sample.versions) != facts.generated:
            raise RunError(f"trajectory {sample.trajectory_id}: token ids, log-probs and versions differ in length")
        if not (math.isfinite(sample.weight) and sample.weight >= 0.0):
            raise RunError(f"trajectory {sample.trajectory_id}: its weight in the loss is {sample.weight}")
        if not math.isfinite(sample.reward):
            skipped["reward_not_finite"] += 1
        elif not facts.finite:
            skipped["logprob_not_finite"] += 1
        elif not facts.generated:
            skipped["no_policy_token"] += 1
        else:
            kept.append(sample)
    return kept, skipped


def check_tokens(name: str, token_ids: Sequence[int], loss_mask: Sequence[int], vocabulary: int, longest: int) -> None:
    """Raise RunError unless the model can read these tokens and predict the masked ones."""
    if len(token_ids) != len(loss_mask) or not token_ids:
        raise RunError(f"trajectory {name}: {len(token_ids)} tokens, {len(loss_mask)} mask entries")
    _check_facts(name, _facts(token_ids, loss_mask), vocabulary, longest)


def _check_facts(name: str, facts: SampleFacts, vocabulary: int, longest: int) -> None:
    if not facts.tokens:
        raise RunError(f"trajectory {name}: it has no tokens")
    if not facts.prompted:
        raise RunError(f"trajectory {name}: its first token is the policy's, so nothing predicts it")
    if facts.tokens > longest:
        raise RunError(f"trajectory {name}: {facts.tokens} tokens, the model has {longest} positions")
    if facts.least < 0 or facts.most >= vocabulary:
        raise RunError(f"trajectory {name}: a token id outside the vocabulary of {vocabulary}")


def _facts_of(sample: TrainSample) -> SampleFacts:
    """Of a sample in memory."""
    token_ids, mask, logprobs = sample.token_ids, sample.loss_mask, sample.logprobs
    if len(token_ids) != len(mask) or not token_ids:
        raise RunError(f"trajectory {sample.trajectory_id}: {len(token_ids)} tokens, {len(mask)} mask entries")
    return _facts(token_ids, mask, all(math.isfinite(p) for p, own in zip(logprobs, mask, strict=False) if own))


def _facts(token_ids: Sequence[int], loss_mask: Sequence[int], finite: bool = True) -> SampleFacts:
    return SampleFacts(len(token_ids), sum(loss_mask), min(token_ids), max(token_ids), finite, not loss_mask[0])


def row_of(sample: TrainSample, version: int, max_token_lag: int | None = None, *, replay: bool = False) -> TrainRow:
    """A usable sample without advantages yet, to be trained at ``version``; what lies elsewhere is not read yet. ``replay``: with
    the experts that the rollout chose."""
    token_ids: Any
    positions: Any
    rollout: Any
    experts: Experts | Unread | None = None
    if sample.source is None:
        token_ids = np.asarray(sample.token_ids, dtype=np.int64)
        positions = np.flatnonzero(np.asarray(sample.loss_mask, dtype=np.int64))
        rollout = np.asarray(sample.logprobs, dtype=np.float32)[positions]
        experts = unpack_experts(sample.experts, len(token_ids)) if replay else None
    else:
        facts = sample.source.facts
        token_ids = Unread(sample.source, facts.tokens)
        experts = token_ids if replay else None
        positions = rollout = Unread(sample.source, facts.generated)
    return TrainRow(
        name=sample.trajectory_id,
        group=sample.group_id,
        token_ids=token_ids,
        positions=positions,
        rollout=rollout,
        fresh=np.repeat([made == version for made, _ in sample.versions], [n for _, n in sample.versions]).astype(
            np.bool_
        ),
        kept=np.asarray(kept_tokens(sample.versions, version, max_token_lag), dtype=np.bool_),
        advantages=np.zeros(len(positions), dtype=np.float32),
        reward=sample.reward,
        weight=sample.weight,
        experts=experts,
    )


def supervised_row(token_ids: Sequence[int], loss_mask: Sequence[int]) -> TrainRow:
    """A row for the warm-up: no rollout, no advantage."""
    positions = np.flatnonzero(np.asarray(loss_mask, dtype=np.int64))
    nothing = np.zeros(len(positions), dtype=np.float32)
    ids = np.asarray(token_ids, dtype=np.int64)
    return TrainRow(
        "", "", ids, positions, nothing, nothing.astype(np.bool_), np.ones(len(positions), np.bool_), nothing
    )


# -- which trajectories meet -----------------------------------------------------------------------------------------


def split_rows(count: int, parts: int, generator: torch.Generator) -> list[list[int]]:
    """``range(count)`` in ``parts`` random parts of nearly equal size; in order, and no draw, when there is one part."""
    if parts == 1:
        return [list(range(count))]
    order = torch.randperm(count, generator=generator).tolist()
    chunks = np.array_split(np.asarray(order), min(parts, max(count, 1)))
    return [sorted(int(index) for index in chunk) for chunk in chunks]


class ArrivalPacker:
    """Fills micro-batches in the order given: a group joins the open one if it fits in whole, else begins the next; a group
    that fits in none is split. A group is a run of rows with one group id.

    So the micro-batches of a sequence of groups are the same whether they are added one by one or all at once.
    """

    def __init__(self, limits: MicroBatchLimits) -> None:
        self._limits = limits
        self._open: list[int] = []
        self._tokens = self._widest = 0

    def add(self, members: Iterable[tuple[int, str, int]]) -> list[list[int]]:
        """Whole groups as (index, group id, tokens); returns the micro-batches that are full now."""
        full: list[list[int]] = []
        run: list[tuple[int, int]] = []
        group = ""
        for index, name, tokens in members:
            if run and name != group:
                self._add_run(run, full)
                run = []
            group = name
            run.append((index, tokens))
        if run:
            self._add_run(run, full)
        return full

    def rest(self) -> list[list[int]]:
        """The micro-batch that is not full, if any. The next one begins empty."""
        open_, self._open, self._tokens, self._widest = self._open, [], 0, 0
        return [open_] if open_ else []

    def _add_run(self, run: Sequence[tuple[int, int]], full: list[list[int]]) -> None:
        if not self._fits([tokens for _, tokens in run]):
            full += self.rest()
        for index, tokens in run:
            if not self._fits([tokens]):
                full += self.rest()
            self._open.append(index)
            self._tokens += tokens
            self._widest = max(self._widest, tokens)
        if len(self._open) == self._limits.size:
            full += self.rest()

    def _fits(self, more: Sequence[int]) -> bool:
        count, widest = len(self._open) + len(more), max(self._widest, *more)
        return self._limits.takes(count, widest, self._tokens + sum(more))


PADDED = 1.1  # the tokens of a micro-batch over the real ones, at most, in a LengthPool
_FULL = 0.75  # of what a micro-batch may hold; one that has as much is chosen by its padding


class LengthPool:
    """Fills micro-batches with trajectories of about one length, from those that have arrived: one is filled before more than
    ``limits.held`` wait beside those that the oldest need to fill theirs. None has more than :data:`PADDED` times its real
    tokens, but for what ``limits.multiple`` adds.

    What is filled depends on the sequence of groups only, not on how many were added at once.
    """

    def __init__(self, limits: MicroBatchLimits) -> None:
        self._limits = limits
        self._waiting: list[tuple[int, int]] = []  # (index, tokens), the oldest first

    def add(self, members: Iterable[tuple[int, str, int]]) -> list[list[int]]:
        """See :meth:`ArrivalPacker.add`."""
        full: list[list[int]] = []
        for _, group in groupby(members, key=lambda member: member[1]):
            own = [(index, tokens) for index, _, tokens in group]
            self._waiting += own
            # Another such group would be too much.
            while (spare := len(self._waiting) - self._needed()) > 0 and spare + len(own) > self._limits.held:
                full.append(self._fill())
        return full

    def rest(self) -> list[list[int]]:
        """Those that wait, longest first. The pool is empty then."""
        left, full = self._longest_first(), list[list[int]]()
        while left:
            count = self._fitting(left, 0)
            full.append([index for index, _ in left[:count]])
            del left[:count]
        self._waiting = []
        return full

    def _needed(self) -> int:
        """How many of the oldest fill a micro-batch."""
        widest = total = 0
        for count, (_, tokens) in enumerate(self._waiting):
            widest, total = max(widest, tokens), total + tokens
            if not self._limits.takes(count + 1, widest, total):
                return count
        return len(self._waiting)

    def _fill(self) -> list[int]:
        """The run of neighbours in length that pads least, of those that are full; else the fullest."""
        order = self._longest_first()
        runs = [(first, self._fitting(order, first)) for first in range(len(order))]
        first, count = max(runs, key=lambda run: self._worth(order, *run))
        chosen = {index for index, _ in order[first : first + count]}
        self._waiting = [one for one in self._waiting if one[0] not in chosen]
        return [index for index, _ in order[first : first + count]]

    def _worth(self, order: Sequence[tuple[int, int]], first: int, count: int) -> tuple[float, float]:
        padded = count * order[first][1]
        share = max(count / self._limits.size, padded / self._limits.tokens if self._limits.tokens else 0.0)
        return min(share, _FULL), sum(tokens for _, tokens in order[first : first + count]) / padded

    def _fitting(self, order: Sequence[tuple[int, int]], first: int) -> int:
        """How many from ``first`` on may be one micro-batch."""
        widest, total = order[first][1], 0
        for count, (_, tokens) in enumerate(order[first:], 1):
            total += tokens
            if not self._limits.takes(count, widest, total) or count * widest > PADDED * total:
                return max(count - 1, 1)
        return len(order) - first

    def _longest_first(self) -> list[tuple[int, int]]:
        return sorted(self._waiting, key=lambda one: (-one[1], one[0]))


def arrival_order(limits: MicroBatchLimits) -> ArrivalPacker | LengthPool:
    """What fills the micro-batches of groups as they come."""
    return LengthPool(limits) if limits.held and limits.pack_tokens is None else ArrivalPacker(limits)


def plan_micro_batches(rows: Sequence[TrainRow], indices: Sequence[int], limits: MicroBatchLimits) -> list[list[int]]:
    """``indices`` in micro-batches. ``length``: longest first, then by index; packed: first-fit decreasing."""
    if limits.order == "arrival":
        arrival = arrival_order(limits)
        return arrival.add((index, rows[index].group, len(rows[index])) for index in indices) + arrival.rest()
    if limits.pack_tokens is not None:
        return first_fit_decreasing(indices, [len(row) for row in rows], limits.pack_tokens, limits.size)
    plans: list[list[int]] = []
    for index in sorted(indices, key=lambda index: (-len(rows[index]), index)):
        # The first of a micro-batch is its longest.
        if plans and limits.takes(len(plans[-1]) + 1, len(rows[plans[-1][0]]), 0):
            plans[-1].append(index)
        else:
            plans.append([index])
    return plans


# -- tensors ---------------------------------------------------------------------------------------------------------


def micro_batch(
    rows: Sequence[TrainRow],
    indices: Sequence[int],
    limits: MicroBatchLimits,
    loss: str,
    *,
    whole: bool = False,
    idle: bool = False,
) -> MicroBatch:
    """``rows[indices]`` as tensors; ``loss`` is the kind of mean, see :mod:`megatron_rlplugin.objective.policy_loss`.

    ``whole``: all of the policy's tokens, also those that are not trained on (for log-probs). ``idle``: it is computed but
    weighs nothing, in loss and in denominator.
    """
    full = [rows[index].read() for index in indices]
    members = full if whole else [row.trained() for row in full]
    # The last token predicts nothing that is trained on, so it is not an input.
    lengths = [max(len(row) - 1, 1) for row in members]
    packed = limits.pack_tokens is not None
    width = sum(lengths) if packed else max(lengths)
    width = -(-width // limits.multiple) * limits.multiple
    starts = [0, *np.cumsum(lengths)[:-1].tolist()] if packed else [place * width for place in range(len(members))]
    shape = (1, width) if packed else (len(members), width)
    inputs, positions = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    if not packed:
        positions[:] = np.arange(width)
    for start, length, row in zip(starts, lengths, members, strict=True):
        inputs.reshape(-1)[start : start + len(row) - 1] = row.token_ids[:-1]
        if packed:
            positions[0, start : start + length] = np.arange(length)
    experts = _experts(members, starts, shape)
    at = np.concatenate([start + row.positions - 1 for start, row in zip(starts, members, strict=True)])
    weighed = [token_weights(len(row.positions), loss) for row in members]
    factors = [0.0 if idle else row.weight for row in members]  # 1.0 changes no bit
    values = {
        "targets_T": np.concatenate([row.token_ids[row.positions] for row in members]),
        "rollout_T": np.concatenate([row.rollout for row in members]),
        "advantages_T": np.concatenate([row.advantages for row in members]),
        "weights_T": np.concatenate(
            [weights * np.float32(factor) for (weights, _), factor in zip(weighed, factors, strict=True)]
        ),
        "fresh_T": np.concatenate([row.fresh for row in members]),
        "segments_T": np.repeat(np.arange(len(members)), [len(row.positions) for row in members]),
        "old_T": _optional(members, "old"),
        "reference_T": _optional(members, "reference"),
    }
    tensors: dict[str, Any] = {name: None if value is None else _tensor(value) for name, value in values.items()}
    return MicroBatch(
        inputs_BS=_tensor(inputs),
        positions_BS=_tensor(positions),
        at_T=_tensor(at),
        tokens=Tokens(
            **tensors,
            denominator=0 if idle else sum(denominator for _, denominator in weighed),
            masked=sum(len(row.kept) for row in full) - sum(len(row.kept) for row in members),
        ),
        counts=tuple(len(row.positions) for row in members),
        indices=tuple(indices),
        packed=tuple(lengths) if packed else (),
        lengths=tuple(0 if idle else length for length in ([sum(lengths)] if packed else lengths)),
        values_T=_tensor_or_none(_optional(members, "values")),
        returns_T=_tensor_or_none(_optional(members, "returns")),
        experts_BSLK=None if experts is None else torch.from_numpy(experts),
        replayed=0 if experts is None or idle else int((experts[:, :, 0, 0] != UNKNOWN).sum()),
    )


def _experts(members: Sequence[TrainRow], starts: Sequence[int], shape: tuple[int, int]) -> np.ndarray[Any, Any] | None:
    """Of each input of a micro-batch of this shape, ``[rows, tokens, layers, choices]``; None: nobody said any."""
    known = [row.experts for row in members]
    form = next((one.shape[1:] for one in known if isinstance(one, np.ndarray)), None)
    if form is None:
        return None
    whole = np.full((shape[0] * shape[1], *form), UNKNOWN, np.int16)
    for start, one in zip(starts, known, strict=True):
        if isinstance(one, np.ndarray):
            if one.shape[1:] != form:
                raise RunError(
                    f"routed experts of different models, (layers, choices) each: {form} and {one.shape[1:]}"
                )
            whole[start : start + len(one) - 1] = one[:-1]
    return whole.reshape(*shape, *form)


def _optional(members: Sequence[TrainRow], name: str) -> Floats | None:
    parts = [getattr(row, name) for row in members]
    return None if any(part is None for part in parts) else np.concatenate(parts)


def _tensor(array: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(array).to(device())


def _tensor_or_none(array: np.ndarray[Any, Any] | None) -> Tensor | None:
    return None if array is None else _tensor(array)
