"""Closed vocabularies: text to token ids and back, without a tokenizer that was learned somewhere.

Guarantees: every id is one word, always the same; what is encoded decodes to the same text; a turn that is not ended by
``<end>``, or holds something behind it, says nothing (None). Two kinds: ``words`` (a task's own list; tens of ids, which a
tiny model learns in minutes) and ``characters`` (printable ASCII, for tasks that speak in any text).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

PAD, END = "<pad>", "<end>"
_MULTIPLE = 32  # sizes divide evenly over tensor-parallel ranks


class Vocabulary:
    """Token id -> word. ``joiner`` stands between words in text: a space, or nothing for characters."""

    def __init__(self, words: Iterable[str], joiner: str) -> None:
        listed = [PAD, END, *words]
        if len(set(listed)) != len(listed):
            raise ValueError("a word is there twice")
        unused = -len(listed) % _MULTIPLE
        self.words: tuple[str, ...] = (*listed, *(f"<unused{n}>" for n in range(unused)))
        self.pad_id, self.end_id = 0, 1
        self.joiner = joiner
        self._ids = {word: token for token, word in enumerate(listed)}

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a text. Raises ValueError for a word outside the vocabulary."""
        try:
            return tuple(self._ids[word] for word in (text.split() if self.joiner else text))
        except KeyError as error:
            raise ValueError(f"not in the vocabulary: {error.args[0]!r}") from None

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids. Raises ValueError for an id outside the vocabulary."""
        for token in token_ids:
            if not 0 <= token < len(self.words):
                raise ValueError(f"token id {token} is outside the vocabulary of {len(self.words)}")
        return self.joiner.join(self.words[token] for token in token_ids)

    def said(self, action_ids: Sequence[int]) -> str | None:
        """The text of a turn without its ``<end>``; None when it is not ended, or ended in its midst, or holds padding."""
        if not action_ids or action_ids[-1] != self.end_id or not {0, 1}.isdisjoint(action_ids[:-1]):
            return None
        return self.decode(action_ids[:-1])

    def turn(self, text: str) -> tuple[int, ...]:
        """Ids of a turn that says ``text``, ended."""
        return (*self.encode(text), self.end_id)


def words(listed: Iterable[str]) -> Vocabulary:
    """A task's own words."""
    return Vocabulary(listed, " ")


CHARACTERS = Vocabulary(["\n", *map(chr, range(32, 127))], "")
"""Line feed and printable ASCII."""


def printable(text: str) -> str:
    """``text`` with ``?`` for each character that :data:`CHARACTERS` has not; tabs become spaces."""
    text = text.replace("\t", "    ")
    return "".join(c if c == "\n" or " " <= c <= "~" else "?" for c in text)
