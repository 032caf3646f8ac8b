"""From trajectories to padded micro-batches, deterministically.

Guarantees: a trajectory that cannot be trained on (a reward or log-prob that is not finite, no policy token) is left out
and counted by cause, never silently; a micro-batch is padded to its own longest member; which trajectories meet in one
depends only on their order, lengths and the micro-batch size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from megatron_rlplugin.objective import Tokens, group_advantages
from megatron_rlplugin.parallel import device
from orchestrator.api import RunError, TrainSample, VersionSpans

SKIP_CAUSES = ("reward_not_finite", "logprob_not_finite", "no_policy_token")


@dataclass(frozen=True, slots=True)
class Row:
    """One trajectory, ready to be put into a micro-batch. ``positions`` are those of the policy's tokens."""

    token_ids: np.ndarray[tuple[int], np.dtype[np.int64]]
    positions: np.ndarray[tuple[int], np.dtype[np.int64]]
    rollout: np.ndarray[tuple[int], np.dtype[np.float32]]
    fresh: np.ndarray[tuple[int], np.dtype[np.bool_]]
    advantage: float
    old: Tensor | None = None

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Padded inputs, and where in ``[batch * length]`` the logits of the policy's tokens are."""

    inputs_BS: Tensor
    positions_BS: Tensor
    at_T: Tensor
    tokens: Tokens
    counts: tuple[int, ...]  # policy tokens of each trajectory
    indices: tuple[int, ...]  # which rows these are

    def select(self, logits_BSV: Tensor) -> Tensor:
        """The logits that predict the policy's tokens."""
        return logits_BSV.reshape(-1, logits_BSV.shape[-1]).index_select(0, self.at_T)


def usable(samples: Sequence[TrainSample], vocabulary: int, longest: int) -> tuple[list[TrainSample], dict[str, int]]:
    """The samples that can be trained on, and how many were skipped, by cause. Raises RunError for malformed ones."""
    kept: list[TrainSample] = []
    skipped = dict.fromkeys(SKIP_CAUSES, 0)
    for sample in samples:
        check_tokens(sample.trajectory_id, sample.token_ids, sample.loss_mask, vocabulary, longest)
        generated = sum(sample.loss_mask)
        if len(sample.logprobs) != len(sample.token_ids) or sum(n for _, n in sample.versions) != generated:
            raise RunError(f"trajectory {sample.trajectory_id}: token ids, log-probs and versions differ in length")
        if not math.isfinite(sample.reward):
            skipped["reward_not_finite"] += 1
        elif not all(math.isfinite(p) for p, own in zip(sample.logprobs, sample.loss_mask, strict=True) if own):
            skipped["logprob_not_finite"] += 1
        elif not generated:
            skipped["no_policy_token"] += 1
        else:
            kept.append(sample)
    return kept, skipped


def check_tokens(name: str, token_ids: Sequence[int], loss_mask: Sequence[int], vocabulary: int, longest: int) -> None:
    """Raise RunError unless the model can read these tokens and predict the masked ones."""
    if len(token_ids) != len(loss_mask) or not token_ids:
        raise RunError(f"trajectory {name}: {len(token_ids)} tokens, {len(loss_mask)} mask entries")
    if loss_mask[0]:
        raise RunError(f"trajectory {name}: its first token is the policy's, so nothing predicts it")
    if len(token_ids) > longest:
        raise RunError(f"trajectory {name}: {len(token_ids)} tokens, the model has {longest} positions")
    if min(token_ids) < 0 or max(token_ids) >= vocabulary:
        raise RunError(f"trajectory {name}: a token id outside the vocabulary of {vocabulary}")


def rows_of(samples: Sequence[TrainSample], version: int, *, normalize: bool) -> list[Row]:
    """Rows with their advantages, taken over the whole batch."""
    rewards, groups = [sample.reward for sample in samples], [sample.group_id for sample in samples]
    advantages = group_advantages(rewards, groups, normalize=normalize)
    rows = []
    for sample, advantage in zip(samples, advantages, strict=True):
        positions = np.flatnonzero(np.asarray(sample.loss_mask, dtype=np.int64))
        rollout = np.asarray(sample.logprobs, dtype=np.float32)[positions]
        rows.append(
            Row(
                np.asarray(sample.token_ids, dtype=np.int64),
                positions,
                rollout,
                _fresh(sample.versions, version),
                advantage,
            )
        )
    return rows


def supervised_row(token_ids: Sequence[int], loss_mask: Sequence[int]) -> Row:
    """A row for the warm-up: no rollout, no advantage."""
    positions = np.flatnonzero(np.asarray(loss_mask, dtype=np.int64))
    nothing = np.zeros(len(positions), dtype=np.float32)
    return Row(np.asarray(token_ids, dtype=np.int64), positions, nothing, nothing.astype(np.bool_), 0.0)


def split_rows(count: int, parts: int, generator: torch.Generator) -> list[list[int]]:
    """``range(count)`` in ``parts`` random parts of nearly equal size; in order, and no draw, when there is one part."""
    if parts == 1:
        return [list(range(count))]
    order = torch.randperm(count, generator=generator).tolist()
    chunks = np.array_split(np.asarray(order), min(parts, max(count, 1)))
    return [sorted(int(index) for index in chunk) for chunk in chunks]


def micro_batches(
    rows: Sequence[Row], indices: Sequence[int], size: int, *, sequence_mean: bool
) -> Iterator[MicroBatch]:
    """``rows[indices]`` sorted by length (longest first, then by index), ``size`` at a time."""
    ordered = sorted(indices, key=lambda index: (-len(rows[index]), index))
    for start in range(0, len(ordered), size):
        yield _micro_batch(rows, ordered[start : start + size], sequence_mean=sequence_mean)


def with_old(rows: Sequence[Row], batches: Sequence[tuple[MicroBatch, Tensor]]) -> list[Row]:
    """The rows with the log-probs that a forward pass gave."""
    answer = list(rows)
    for batch, logp_T in batches:
        for index, old in zip(batch.indices, logp_T.split(list(batch.counts)), strict=True):
            answer[index] = replace(rows[index], old=old)
    return answer


def _micro_batch(rows: Sequence[Row], indices: Sequence[int], *, sequence_mean: bool) -> MicroBatch:
    members = [rows[index] for index in indices]
    # The last token predicts nothing that is trained on, so it is not an input.
    length = max(max(len(row) for row in members) - 1, 1)
    inputs = np.zeros((len(members), length), dtype=np.int64)
    for place, row in enumerate(members):
        inputs[place, : len(row) - 1] = row.token_ids[:-1]
    counts = np.asarray([len(row.positions) for row in members])
    at = np.concatenate([place * length + row.positions - 1 for place, row in enumerate(members)])
    weights = 1.0 / counts if sequence_mean else np.ones(len(members))
    old = None
    if members[0].old is not None:
        old = torch.cat([row.old for row in members if row.old is not None])
    tokens = Tokens(
        targets_T=_tensor(np.concatenate([row.token_ids[row.positions] for row in members])),
        rollout_T=_tensor(np.concatenate([row.rollout for row in members])),
        advantages_T=_tensor(np.repeat([row.advantage for row in members], counts).astype(np.float32)),
        weights_T=_tensor(np.repeat(weights, counts).astype(np.float32)),
        fresh_T=_tensor(np.concatenate([row.fresh for row in members])),
        old_T=old,
        denominator=len(members) if sequence_mean else int(counts.sum()),
    )
    positions = torch.arange(length, device=device()).expand(len(members), length)
    return MicroBatch(
        _tensor(inputs), positions, _tensor(at), tokens, tuple(int(count) for count in counts), tuple(indices)
    )


def _fresh(spans: VersionSpans, version: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return np.repeat([made == version for made, _ in spans], [count for _, count in spans]).astype(np.bool_)


def _tensor(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
    return torch.from_numpy(array).to(device())
