"""Which notes of a memory answer a question, best first: those that share words with it, or those whose vectors are near.

Guarantee: the same notes and the same question give the same order; of equals the newest note is first. The library of vectors
(FAISS, extra ``vectors``) is imported when it is asked for the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from orchestrator.api import TrajectoryError

Note = Sequence[int]  # token ids
NoteRank = Callable[[Sequence[Note], Note], list[int]]  # (notes, question) -> places of the notes that answer
Embed = Callable[[Sequence[Note]], Any]  # -> a vector of each, as NumPy reads them


def by_shared_words(notes: Sequence[Note], question: Note) -> list[int]:
    """Those that share a token, most of them first; all, for no question."""
    asked = frozenset(question)
    shared = [len(asked.intersection(note)) for note in notes]
    return sorted((place for place, count in enumerate(shared) if count or not asked), key=lambda n: (-shared[n], -n))


class NearestVectors:
    """All notes, by the cosine of their vectors with the question's. ``embed``: of the user's, called with the new notes and the
    question in one call; vectors are remembered while their notes are asked for."""

    def __init__(self, embed: Embed) -> None:
        self._embed = embed
        self._known: dict[tuple[int, ...], np.ndarray[Any, Any]] = {}

    def __call__(self, notes: Sequence[Note], question: Note) -> list[int]:
        """See :data:`NoteRank`. Raises TrajectoryError for what are no vectors."""
        import faiss

        if not notes or not question:
            return by_shared_words(notes, ())
        asked = [tuple(note) for note in (*notes, question)]
        self._known = {note: self._known[note] for note in asked if note in self._known}
        if new := list(dict.fromkeys(note for note in asked if note not in self._known)):
            self._known |= zip(new, self._vectors(new), strict=True)
        try:
            rows = np.stack([self._known[note] for note in asked])
        except ValueError as error:
            raise TrajectoryError("memory_vectors", f"task.memory.embed: of several lengths: {error}") from error
        faiss.normalize_L2(rows)
        index = faiss.IndexFlatIP(rows.shape[1])
        index.add(rows[:-1])
        scores, places = index.search(rows[-1:], len(notes))
        ranked = sorted((-float(score), -int(place)) for score, place in zip(scores[0], places[0], strict=True))
        return [-place for _, place in ranked]

    def _vectors(self, notes: Sequence[Note]) -> np.ndarray[Any, Any]:
        found = np.asarray(self._embed(notes), np.float32)
        if found.ndim != 2 or len(found) != len(notes) or not found.shape[1] or not np.isfinite(found).all():
            detail = f"task.memory.embed gave {found.shape} for {len(notes)} notes: one finite vector each"
            raise TrajectoryError("memory_vectors", detail)
        return np.ascontiguousarray(found)
