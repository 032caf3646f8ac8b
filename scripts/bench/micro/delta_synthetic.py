"""Weights before and after one optimizer step, made up: layouts of Qwen3-8B and -32B, bf16 rounded from fp32 masters.

Masters are N(0, 0.02). A step is Adam's: lr * u with u ~ N(0, 0.23), the spread of m / sqrt(v) when gradients are noise
(beta1 0.9: sqrt((1 - 0.9) / (1 + 0.9))); both versions are rounded to the nearest even bf16. So weights change where the
master crosses a rounding boundary: mostly by one step, small weights by more. Density is set through lr alone; an lr near
1e-6, as RL uses, gives about half a percent.

One pool of 2^24 weights is drawn for each density; tensors are cut from it at moving offsets, so a model streams tensor by
tensor at the speed of a memory copy, and no coder here could profit from the repetition (none looks back).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from orchestrator.transfer.delta.reference_codec import steps_between

Words = npt.NDArray[np.uint16]
Bytes = npt.NDArray[np.uint8]

SPREAD, ADAM = 0.02, math.sqrt((1 - 0.9) / (1 + 0.9))
POOL = 1 << 24
COO_BYTES = 6  # int32 position and bf16 value


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of a dense Qwen3 model (its config.json); embeddings are not tied."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    vocab: int = 151936

    def tensors(self, every: int = 1) -> Iterator[tuple[str, int]]:
        """Name and number of elements, in the order of a checkpoint; of the layers, which are alike, each ``every``-th.

        Embeddings and head, of the same made-up weights, only when all layers are wanted.
        """
        if every == 1:
            yield "model.embed_tokens.weight", self.vocab * self.hidden
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for layer in range(0, self.layers, every):
            at = f"model.layers.{layer}"
            yield f"{at}.self_attn.q_proj.weight", queries * self.hidden
            yield f"{at}.self_attn.k_proj.weight", keys * self.hidden
            yield f"{at}.self_attn.v_proj.weight", keys * self.hidden
            yield f"{at}.self_attn.o_proj.weight", queries * self.hidden
            yield f"{at}.self_attn.q_norm.weight", self.head_dim
            yield f"{at}.self_attn.k_norm.weight", self.head_dim
            for name in ("gate_proj", "up_proj", "down_proj"):
                yield f"{at}.mlp.{name}.weight", self.hidden * self.intermediate
            yield f"{at}.input_layernorm.weight", self.hidden
            yield f"{at}.post_attention_layernorm.weight", self.hidden
        yield "model.norm.weight", self.hidden
        if every == 1:
            yield "lm_head.weight", self.vocab * self.hidden


LAYOUTS = {
    "qwen3-8b": Layout("qwen3-8b", 4096, 12288, 36, 32, 8),
    "qwen3-32b": Layout("qwen3-32b", 5120, 25600, 64, 64, 8),
}
# For runs of seconds: the shape of the thing, not its size.
SMALL = Layout("small", 1024, 3072, 4, 16, 8, vocab=16384)


def bf16(values: npt.NDArray[np.float32]) -> Words:
    """Rounded to the nearest, ties to even; finite values only."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


class Pool:
    """``old`` and ``new`` bf16 words of one optimizer step that changes about ``density`` of them; ``rate`` is the lr."""

    def __init__(self, density: float, size: int = POOL, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        masters = random.standard_normal(size, np.float32) * np.float32(SPREAD)
        updates = random.standard_normal(size, np.float32) * np.float32(ADAM)
        self.rate = _rate(masters[: 1 << 20], updates[: 1 << 20], density)
        self.old = bf16(masters)
        updates *= np.float32(self.rate)
        updates += masters
        self.new = bf16(updates)
        self._at = 0
        self._long: dict[int, tuple[Words, Words]] = {}

    @property
    def density(self) -> float:
        """What share of the words changed."""
        return float(np.count_nonzero(self.old != self.new)) / self.old.size

    def cut(self, count: int) -> tuple[Words, Words]:
        """The next ``count`` words of both, from an offset that moves by a prime; over and over when that is more than all.

        Only to be read: views of the pool where it has as many, else arrays that are kept for the next time.
        """
        self._at += 7_654_321
        if count <= self.old.size:
            at = self._at % (self.old.size - count + 1)
            return self.old[at : at + count], self.new[at : at + count]
        if count not in self._long:
            self._long = {count: (np.resize(self.old, count), np.resize(self.new, count))}
        return self._long[count]


def entropy_bound(old: Words, new: Words) -> dict[str, float]:
    """Bytes a changed weight: entropy of the gaps and of the steps as they occur, and of independent positions.

    Plug-in estimates from the histograms; what a coder could reach that knows these and codes each symbol on its own.
    """
    positions = np.flatnonzero(old != new)
    if not positions.size:
        return {"gaps": 0.0, "steps": 0.0, "bound": 0.0, "independent": 0.0}
    gaps = _entropy(np.bincount(np.diff(positions, prepend=-1))) / 8
    steps = _entropy(np.bincount(steps_between(old[positions], new[positions]).view(np.uint16))) / 8
    share = positions.size / old.size
    rest = 0.0 if share == 1 else (1 - share) * math.log2(1 - share)
    independent = -(share * math.log2(share) + rest) / share / 8
    return {"gaps": gaps, "steps": steps, "bound": gaps + steps, "independent": independent + steps}


def _entropy(counts: npt.NDArray[np.signedinteger]) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def _rate(masters: npt.NDArray[np.float32], updates: npt.NDArray[np.float32], density: float) -> float:
    """The lr that changes that share of a sample, by bisection of its logarithm."""
    before, low, high = bf16(masters), -8.0, 0.0
    for _ in range(30):
        middle = (low + high) / 2
        changed = np.count_nonzero(bf16(masters + updates * np.float32(10**middle)) != before)
        low, high = (middle, high) if changed < density * masters.size else (low, middle)
    return float(10 ** ((low + high) / 2))
