"""Whether the next version travels whole or as a difference to the one before: by what versions of both kinds took. Pure.

What a version takes is encoding, link and decoding together, from its first shard until the last reader has it verified, so it
is measured as that: which of the three binds, and how many weights changed, need not be known. Guarantees: after one version of
each kind the one that took less is chosen (median of the last three, per byte of the weights); when it has become slower than
the other was (another link, other densities) the other one is; and the one that is not chosen is measured anew once in ``AGAIN``
versions, more rarely the slower it was, but once in ``AGAIN * MOST``: only so is a link that became faster noticed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

AGAIN, MOST = 32, 8
SAMPLES = 3


@dataclass(frozen=True, slots=True)
class TransferTime:
    """One version. ``raw_bytes``: of the weights, however they travelled."""

    whole: bool
    seconds: float
    raw_bytes: int


class EncodingChoice:
    """See the module. One publisher's."""

    def __init__(self) -> None:
        self._took = {whole: deque[float](maxlen=SAMPLES) for whole in (False, True)}  # seconds a byte
        self._since = {False: 0, True: 0}  # versions of the other kind since this one was measured

    def note(self, took: TransferTime) -> None:
        """A version has arrived."""
        kind, other = took.whole, not took.whole
        if self._since[kind] >= AGAIN:
            self._took[kind].clear()  # they are of another time
        self._took[kind].append(took.seconds / max(took.raw_bytes, 1))
        self._since[kind] = 0
        self._since[other] += 1

    def choose_whole(self) -> bool:
        """Whether the next version should be published whole."""
        whole, difference = self._took[True], self._took[False]
        if not whole or not difference:
            return bool(difference)  # the kind that is not known, a difference first: it may cost little
        better = median(whole) < median(difference)
        slower = median(self._took[not better]) / max(median(self._took[better]), 1e-18)
        return (not better) if self._since[not better] >= AGAIN * min(max(1.0, slower), MOST) else better
