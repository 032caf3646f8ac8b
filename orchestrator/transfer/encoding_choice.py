"""Whether the next version travels whole or as a difference to the one before: by what versions of both kinds took. Pure.

What a version takes is encoding, link and decoding together, from its first shard until the last reader has it verified, so it is
measured as that: which of the three binds, and how many weights changed, need not be known. Guarantees: after one version of each
kind the one that took less (median of the last three, per byte of the weights) is chosen; the other is measured anew when the
chosen one has become slower twice in a row (another link, other densities, other work on the machine), and once in ``AGAIN``
versions, more rarely the slower it was, but once in ``AGAIN * MOST`` at least: only so is a link that became faster noticed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

AGAIN, MOST = 32, 8
SAMPLES = 3
DRIFT = 1.5  # times what it took before: then it is slower


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
        self._before = {False: 0.0, True: 0.0}  # what this kind took when both were compared last

    def note(self, took: TransferTime) -> None:
        """A version has arrived."""
        kind, other = took.whole, not took.whole
        recent = self._took[kind]
        if self._since[kind] >= AGAIN:
            recent.clear()  # they are of another time
        recent.append(took.seconds / max(took.raw_bytes, 1))
        if self._since[kind] or not self._before[kind]:
            self._before = {which: median(found) if found else 0.0 for which, found in self._took.items()}
        elif len(recent) > 1 and min(list(recent)[-2:]) > DRIFT * self._before[kind]:
            last = recent[-1]
            recent.clear()
            recent.append(last)
            self._took[other].clear()
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
