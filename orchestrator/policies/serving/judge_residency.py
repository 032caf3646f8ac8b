"""Which layers of a judge stay on the device that it shares with a rollout engine, which are streamed to it, and how many
waiting questions are batched (RollPacker 4.3).

Guarantees:

* The plan fits: the weights outside the layers, the resident layers, the buffers for streamed layers, and KV and activations
  of the sequence, in the memory that is left. If all layers fit, none is streamed, and no buffer is needed. If not even the
  buffers fit, it is a ValueError that says how much is missing.
* More memory, or a shorter sequence, never makes fewer layers resident.
* The streamed layers are spread evenly over the model, so that as much computation of resident layers as possible hides each
  transfer.

Pure; bytes and seconds are plain numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.policies.parallelism.engine_profile import EngineLayout, EngineProfile

BUFFERS = 2  # one is computed with while the other is filled
BATCH = 64  # questions that are computed together at most


@dataclass(frozen=True, slots=True)
class JudgeMemory:
    """Bytes of a judge. ``fixed``: embedding, head, norms; ``layer``: the largest layer; ``token``: KV and activations per
    token of the sequence at their peak; ``reserve``: always kept free."""

    layers: int
    fixed: int
    layer: int
    token: float
    reserve: int = 0

    def __post_init__(self) -> None:
        if self.layers < 1 or self.layer < 1 or min(self.fixed, self.token, self.reserve) < 0:
            raise ValueError(f"{self}: sizes must be positive")


@dataclass(frozen=True, slots=True)
class JudgeResidency:
    """``streamed``: indices of the layers that are not resident, ascending; ``buffers``: how many buffers they use; ``bytes``:
    the whole plan, the sequence included."""

    layers: int
    streamed: tuple[int, ...]
    buffers: int
    bytes: int

    @property
    def resident(self) -> int:
        """How many layers are resident."""
        return self.layers - len(self.streamed)


def plan_residency(judge: JudgeMemory, tokens: int, free: int, buffers: int = BUFFERS) -> JudgeResidency:
    """For a sequence of ``tokens`` and ``free`` bytes left on the device. Raises ValueError if it cannot run at all."""
    if buffers < 1:
        raise ValueError(f"buffers = {buffers}: streamed layers need at least one")
    others = judge.fixed + judge.reserve + int(judge.token * tokens)
    room = (free - others) // judge.layer
    if room >= judge.layers:
        return JudgeResidency(judge.layers, (), 0, others + judge.layers * judge.layer)
    if room < min(buffers, judge.layers):
        missing = others + min(buffers, judge.layers) * judge.layer - free
        raise ValueError(f"a sequence of {tokens} tokens needs {missing} bytes more than the {free} that are left")
    return spread_layers(judge, tokens, resident=min(room - buffers, judge.layers - 1), buffers=buffers)


def spread_layers(judge: JudgeMemory, tokens: int, resident: int, buffers: int = BUFFERS) -> JudgeResidency:
    """With so many layers resident, regardless of memory."""
    if not 0 <= resident <= judge.layers:
        raise ValueError(f"resident = {resident}: the judge has {judge.layers} layers")
    count = judge.layers - resident
    streamed = tuple((2 * index + 1) * judge.layers // (2 * count) for index in range(count))
    used = min(buffers, count)
    others = judge.fixed + judge.reserve + int(judge.token * tokens)
    return JudgeResidency(judge.layers, streamed, used, others + (resident + used) * judge.layer)


def batch_size(profile: EngineProfile, tokens: int, said: float, waiting: int) -> int:
    """How many of ``waiting`` questions are batched: what answers most of them per second, among the measured sizes and all of
    them, if prompts have ``tokens`` and answers ``said`` tokens. The smaller one if two are equally fast."""

    def rate(count: int) -> float:
        steps = said * profile.decode_seconds(count, tokens + said / 2)
        return count / (profile.prefill_seconds(tokens, count) + steps)

    measured = profile.sizes("prefill", EngineLayout())[0]
    return max((*(count for count in measured if count < waiting), waiting), key=rate)
