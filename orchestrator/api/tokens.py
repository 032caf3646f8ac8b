"""Token ids that only ever grow at their end: what a context is, turn after turn.

Guarantees: a :class:`TokenSequence` never changes; to append to it costs what is appended, however long it is (only a second
continuation of the same sequence copies it); so does its digest, which is the same wherever and in whatever pieces the
sequence was put together: BLAKE2b (RFC 7693) with 16 bytes over the ids as little-endian int32. Sequences that begin alike share
their tokens: they belong to one thread.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from typing import overload

DIGEST_BYTES = 16
TOKEN_BYTES = 4
_SWAPPED = sys.byteorder != "little"


class _Line:
    """Tokens that several sequences share, each a beginning of them; hashed, and looked at, as far as somebody asked."""

    __slots__ = ("hashed", "hasher", "high", "low", "seen", "tokens")

    def __init__(self, tokens: array[int]) -> None:
        self.tokens = tokens
        self.hasher = blake2b(digest_size=DIGEST_BYTES)
        self.hashed = 0
        self.low, self.high, self.seen = 0, -1, 0

    def digest(self, length: int) -> bytes:
        """Of the first ``length`` tokens."""
        if length < self.hashed:
            return blake2b(_little(self.tokens[:length]), digest_size=DIGEST_BYTES).digest()
        if length > self.hashed:
            self.hasher.update(_little(self.tokens[self.hashed : length]))
            self.hashed = length
        return self.hasher.digest()

    def bounds(self, length: int) -> tuple[int, int]:
        """The least and the greatest of the first ``length`` tokens."""
        if length > self.seen:
            new = self.tokens[self.seen : length]
            low, high = min(new), max(new)
            self.low, self.high = (min(low, self.low), max(high, self.high)) if self.seen else (low, high)
            self.seen = length
        elif length < self.seen:
            shorter = self.tokens[:length]
            return min(shorter), max(shorter)
        return self.low, self.high


class TokenSequence(Sequence[int]):
    """Reads like a tuple of ints, equals one with the same ids, and is pickled by value. Slices are tuples.

    Raises ValueError for what is no int of 32 bits.
    """

    __slots__ = ("_digest", "_length", "_line")

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        tokens: array[int] = array("i")
        _extend(tokens, token_ids)
        self._line = _Line(tokens)
        self._length = len(tokens)
        self._digest = b""

    @classmethod
    def of(cls, token_ids: Iterable[int]) -> TokenSequence:
        """``token_ids`` itself where it is one."""
        return token_ids if isinstance(token_ids, TokenSequence) else cls(token_ids)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> TokenSequence:
        """Of little-endian int32. Raises ValueError where ``data`` is no whole number of them."""
        return cls() + array_of(data)

    def __add__(self, token_ids: Iterable[int]) -> TokenSequence:
        line = self._line
        if len(line.tokens) != self._length:  # somebody has gone on from here already
            line = _Line(line.tokens[: self._length])
        _extend(line.tokens, token_ids)
        longer = object.__new__(TokenSequence)
        longer._line, longer._length, longer._digest = line, len(line.tokens), b""
        return longer

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            return tuple(self._line.tokens[start:stop:step]) if start < stop or step > 0 else tuple(self)[index]
        place = index + self._length if index < 0 else index
        if not 0 <= place < self._length:
            raise IndexError(f"token {index} of {self._length}")
        return self._line.tokens[place]

    def __iter__(self) -> Iterator[int]:
        return islice(self._line.tokens, self._length)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenSequence):
            return len(self) == len(other) and self.begins_with(other)
        return tuple(self) == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return tuple(self).__hash__()

    def __reduce__(self) -> tuple[object, ...]:
        return TokenSequence.from_bytes, (self.bytes_after(0),)

    def __repr__(self) -> str:
        return f"TokenSequence({', '.join(map(str, self[:8]))}{', ...' if self._length > 8 else ''}; {self._length})"

    def begins_with(self, other: TokenSequence) -> bool:
        """Whether the first tokens are those of ``other``; costs nothing where this one was made by adding to it."""
        if self._length < other._length:
            return False
        if self._line is other._line or not other._length:
            return True
        if self[other._length - 1] != other[-1]:
            return False
        return self._line.tokens[: other._length] == other._line.tokens[: other._length]

    def bytes_after(self, start: int) -> bytes:
        """The ids from ``start`` on, as little-endian int32."""
        return _little(self._line.tokens[start : self._length]).tobytes()

    def to_list(self) -> list[int]:
        """A fresh one."""
        return self._line.tokens[: self._length].tolist()

    @property
    def digest(self) -> bytes:
        """See the module."""
        if not self._digest:
            self._digest = self._line.digest(self._length)
        return self._digest

    @property
    def bounds(self) -> tuple[int, int]:
        """The least and the greatest id; costs what was not looked at before. (0, -1): there is none."""
        return self._line.bounds(self._length) if self._length else (0, -1)


def array_of(data: bytes | memoryview) -> array[int]:
    """Little-endian int32. Raises ValueError where ``data`` is no whole number of them."""
    tokens: array[int] = array("i")
    tokens.frombytes(data)
    return _little(tokens)


def _extend(tokens: array[int], token_ids: Iterable[int]) -> None:
    """What was appended before an error is nobody's: the sequences of the line know their lengths."""
    if isinstance(token_ids, TokenSequence):
        token_ids = token_ids._line.tokens[: token_ids._length]
    try:
        tokens.extend(token_ids)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids are whole numbers of 32 bits: {error}") from error


def _little(tokens: array[int]) -> array[int]:
    """A slice, in the byte order of the wire."""
    if _SWAPPED:
        tokens.byteswap()
    return tokens
