"""What the harnesses draw from: ways to damage a valid artefact; and the bounds within which a parser must answer."""

from __future__ import annotations

import contextlib
import copy
import json
import signal
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import strategies as st

SECONDS = 2.0  # of processor time, for one input of some kilobytes; a parser takes milliseconds
SECONDS_PER_BYTE = 10e-6  # more
MEMORY = 64 << 20  # bytes that Python and NumPy allocate for one input of some kilobytes
DEEP = 100_000  # levels of nesting: beyond every stack

# What a field may hold instead of what it should. JSON's and msgpack's own types; not every form can carry all of them.
JUNK: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 7, 1 << 31, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63), 1 << 200, 10**400,
    0.5, -0.0, 1e308, float("inf"), float("-inf"), float("nan"), "", "x", "0", "\x00", "\ud800", "/../..", "x" * 5000,
    b"", b"\xff", [], [[]], {}, {"x": 1}, [0] * 1000, {"format": 99}, [None, None],
)  # fmt: skip


class TooSlow(BaseException):
    """Not an Exception: nothing that catches those may hide it."""


@contextlib.contextmanager
def in_time(size: int) -> Iterator[None]:
    """Fail when the body takes more processor time than a parser may, for an input of ``size`` bytes."""
    seconds = SECONDS + SECONDS_PER_BYTE * size

    def alarm(number: int, frame: object) -> None:
        raise TooSlow(f"no answer within {seconds:.1f} s of processor time, for {size} B")

    before = signal.signal(signal.SIGPROF, alarm)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Fail when the body allocates more than a parser may."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= MEMORY, f"{peak} B were allocated"


def size_of(value: Any) -> int:
    """Bytes of an input, or nearly so."""
    if isinstance(value, bytes | str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(size_of, value)) + sum(map(size_of, value.values()))
    return sum(map(size_of, value)) if isinstance(value, list | tuple) else 8


def documented(parse: Callable[[], Any], *errors: type[Exception]) -> Any:
    """What the parser returned, or None when it refused as documented."""
    try:
        return parse()
    except errors:
        return None


def survives(parse: Callable[[], Any], *errors: type[Exception]) -> Any:
    """The same, within bounds."""
    with bounded():
        return documented(parse, *errors)


# -- bytes ---------------------------------------------------------------------------------------------------------------


@st.composite
def damaged(draw: st.DrawFn, whole: bytes, others: tuple[bytes, ...] = ()) -> bytes:
    """``whole`` after one to four accidents: flipped bits, a cut, a hole, a repetition, a piece of another artefact."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        length = draw(st.sampled_from((1, 2, 4, 8, 64, 1024)))
        match draw(
            st.sampled_from(("flip", "flip", "set", "cut", "hole", "zeros", "ones", "twice", "insert", "splice"))
        ):
            case "flip" if data:
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "set" if data:
                data[at] = draw(st.sampled_from((0, 1, 0x7F, 0x80, 0xFF, 0x5B, 0x7B, 0x22, 0x2C, 0xC1, 0x91, 0xDF)))
            case "cut":
                del data[at:]
            case "hole":
                del data[at : at + length]
            case "zeros":
                data[at : at + length] = bytes(len(data[at : at + length]))
            case "ones":
                data[at : at + length] = b"\xff" * len(data[at : at + length])
            case "twice":
                data[at:at] = data[at : at + length]
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=16))
            case "splice":
                other = draw(st.sampled_from(others or (whole,)))
                start = draw(st.integers(0, max(0, len(other) - 1)))
                data[at : at + length] = other[start : start + length]
    return bytes(data)


# -- trees ---------------------------------------------------------------------------------------------------------------


def places(tree: Any, path: tuple[Any, ...] = (), most: int = 400) -> list[tuple[Any, ...]]:
    """The paths of all values in a tree of dictionaries and lists; of a long list the first few and the last."""
    found = [path]
    if isinstance(tree, dict):
        children: list[Any] = list(tree)
    elif isinstance(tree, list):
        children = list(range(len(tree))) if len(tree) < 8 else [0, 1, 2, len(tree) - 1]
    else:
        children = []
    for child in children:
        found += places(tree[child], (*path, child), most)
        if len(found) > most:
            break
    return found


@st.composite
def altered(draw: st.DrawFn, tree: Any) -> Any:
    """A valid tree with one to three fields that are gone, of another type, huge, renamed, swapped or repeated."""
    made = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places(made)))
        how = draw(st.sampled_from(("junk", "junk", "junk", "gone", "twice", "swap", "wrap", "nudge", "rename")))
        if not path:
            made = copy.deepcopy(draw(st.sampled_from(JUNK))) if how == "junk" else made
            continue
        parent = made
        for step in path[:-1]:
            parent = parent[step]
        key, value = path[-1], parent[path[-1]]
        match how:
            case "junk":
                parent[key] = copy.deepcopy(draw(st.sampled_from(JUNK)))
            case "gone":
                del parent[key]
            case "twice" if isinstance(parent, list):
                parent.insert(key, copy.deepcopy(value))
            case "swap":
                other = draw(st.sampled_from(places(made)))
                found = made
                for step in other:
                    found = found[step]
                parent[key] = copy.deepcopy(found)
            case "wrap":
                parent[key] = [value]
            case "nudge" if isinstance(value, int | float):
                more = draw(st.sampled_from((-1, 1, 0.5, 1 << 40)))
                parent[key] = value + (1 if isinstance(value, int) and abs(value) > 1 << 1000 else more)  # no float
            case "rename" if isinstance(parent, dict):
                parent[f"{key}x"] = parent.pop(key)
    return made


def as_json(tree: Any) -> bytes | None:
    """The tree as JSON (NaN and lone surrogates too); None: it cannot be written so."""
    try:
        return json.dumps(tree, default=lambda value: repr(value)).encode("utf-8", "surrogatepass")
    except (ValueError, TypeError):
        return None


def texts(tree: Any) -> st.SearchStrategy[bytes]:
    """JSON of the tree, altered as a tree, damaged as bytes, or hostile from the ground up."""
    valid = as_json(tree)
    assert valid is not None
    return st.one_of(
        altered(tree).map(as_json).filter(lambda data: data is not None),  # type: ignore[arg-type]
        damaged(valid),
        st.sampled_from(hostile_json()),
    )


def hostile_json() -> tuple[bytes, ...]:
    """Texts that no writer makes."""
    return (
        b"", b" ", b"null", b"0", b"[]", b"{}", b'""', b"\xff\xfe", b"\x00", b"NaN", b"-Infinity", b"[" * DEEP,
        b'{"a":' * DEEP, b"[" * DEEP + b"]" * DEEP, b"9" * 100_000, b'{"format": ' + b"9" * 5000 + b"}", b"1e99999", b'"\\ud800"',
        b'{"kind": 1e400}', b'{"id": {}, "seq": []}',
    )  # fmt: skip
