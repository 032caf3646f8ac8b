"""Seeded draws of the simulated twins.

Guarantee: every draw is a pure function of the run's seed and of what it is for (a trajectory's turn, an environment's
history), so a trajectory's lengths, tokens and durations are the same whatever runs beside it, wherever it is routed and
however often it is sent again. Two policies are therefore compared on the same workload.
"""

from __future__ import annotations

import math
import random
from functools import lru_cache

PAD, END = 0, 1
VOCABULARY = ("<pad>", "<end>", *(f"w{index}" for index in range(62)))
_WORDS = len(VOCABULARY) - 2
_LOGPROBS = tuple(-(token + 1) / 32 for token in range(len(VOCABULARY)))
_SPOKEN = bytes(2 + byte % _WORDS for byte in range(256))  # what a random byte says
RESPONSE_SIGMA = 0.8  # of log(length); long-tailed, as RollPacker fig. 2 and Heddle fig. 3 show responses to be


def random_stream(*parts: object) -> random.Random:
    """A random stream that belongs to ``parts``. Strings are hashed with SHA-512 by ``random``, never with ``hash``."""
    return random.Random("/".join(map(str, parts)))


def lognormal(rng: random.Random, mean: float, sigma: float) -> float:
    """A lognormal draw with the given mean; ``sigma`` is that of the logarithm. 0 when the mean is 0."""
    if mean <= 0:
        return 0.0
    return rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)


def draw_words(rng: random.Random, number: int) -> tuple[int, ...]:
    """So many tokens, none of which ends a response."""
    return tuple(rng.randbytes(number).translate(_SPOKEN))


@lru_cache(maxsize=4096)
def draw_response(seed: int, trajectory_id: str, turn: int, mean: float, limit: int) -> tuple[int, ...]:
    """What the simulated policy says: words, then END if it ends before ``limit`` tokens."""
    rng = random_stream(seed, "response", trajectory_id, turn)
    length = max(1, round(lognormal(rng, mean, RESPONSE_SIGMA)))
    tokens = draw_words(rng, min(length, limit))
    return (*tokens[:-1], END) if length <= limit else tokens


def synthetic_logprobs(tokens: tuple[int, ...]) -> tuple[float, ...]:
    """Synthetic log-probs: finite, negative, a function of the token, exact in binary so that JSON keeps them."""
    return tuple(map(_LOGPROBS.__getitem__, tokens))
