"""The native library: the same bytes and verdicts as NumPy, at every instruction set, and no step outside its buffers."""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from orchestrator.transfer import CorruptWeightsError
from orchestrator.transfer.delta import delta_codec, native_codec
from orchestrator.transfer.delta.native_codec import LEVELS, NativeCodec
from orchestrator.transfer.delta.reference_codec import NumpyCodec, advance_values

CSRC = Path(__file__).parents[2] / "csrc"
SOURCES = [str(CSRC / f"{name}.c") for name in ("level", "rans", "gather", "sparse", "planes")]
COMPILER = shutil.which(os.environ.get("CC", "cc"))
pytestmark = [pytest.mark.slow, pytest.mark.skipif(COMPILER is None, reason="no C compiler here")]
REFERENCE = NumpyCodec()


def compile_to(target: Path, *options: str) -> Path:
    command = [str(COMPILER), "-std=gnu11", "-Wall", "-Wextra", "-Werror", *options, "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> NativeCodec:
    """Of the sources as they are now, not of the last install."""
    target = tmp_path_factory.mktemp("native") / "_native.ctypes.so"
    return NativeCodec(compile_to(target, "-O3", "-shared", "-fPIC", "-fvisibility=hidden", *SOURCES))


@pytest.fixture(params=LEVELS)
def at_level(request: pytest.FixtureRequest, library: NativeCodec) -> Iterator[NativeCodec]:
    """The library at one instruction set; skipped where this CPU lacks it."""
    if library.use_level(request.param) != request.param:
        pytest.skip(f"this CPU has no {request.param}")
    yield library
    library.use_level(LEVELS[-1])


def cases() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Old and new words: all densities, sizes around the edges of vectors, chunks and segments, steps small and large."""
    random = np.random.default_rng(0)
    for count in (0, 1, 31, 63, 64, 65, 4095, 4096, 4097, 20_000):
        for density in (0.0, 0.002, 0.05, 0.12, 0.5, 1.0):
            for spread in (1, 3, 200, 40_000):
                old = random.integers(0, 1 << 16, count).astype(np.uint16)
                steps = random.integers(-spread, spread + 1, count).astype(np.int16)
                yield old, np.where(random.random(count) < density, advance_values(old, steps), old)


def test_the_bytes_are_those_of_the_reference(at_level: NativeCodec) -> None:
    for old, new in cases():
        segments = -(-old.size >> 12)
        expected, lengths, changed = REFERENCE.sparse_encode(old, new, 12, 0, segments)
        data, found, count = at_level.sparse_encode(old, new, 12, 0, segments)
        assert data.tobytes() == expected.tobytes()
        assert found.tolist() == lengths.tolist()
        assert count == changed
        for first, last in ((0, segments), (0, 1), (1, 3), (4, segments)):
            if not first <= last <= segments:
                continue
            part = data[sum(lengths[:first]) : sum(lengths[:last])]
            base = old.copy()
            applied = at_level.sparse_apply(part, lengths[first:last].copy(), base, 12, first, last, 1)
            inside = slice(first << 12, last << 12)
            assert applied.error is None
            assert np.array_equal(base[inside], new[inside])
            assert at_level.sparse_apply(part, lengths[first:last].copy(), base, 12, first, last, -1).error is None
            assert np.array_equal(base, old)


def test_decoded_steps_are_those_of_the_reference(at_level: NativeCodec) -> None:
    for old, new in cases():
        if not old.size:
            continue
        data, _, _ = REFERENCE.sparse_encode(old, new, 24, 0, 1)
        for found, expected in zip(
            at_level.sparse_decode(data, old.size), REFERENCE.sparse_decode(data, old.size), strict=True
        ):
            assert found.dtype == expected.dtype
            assert np.array_equal(found, expected)


def test_planes_are_those_of_the_reference(at_level: NativeCodec) -> None:
    random = np.random.default_rng(1)
    for width in (1, 2, 4, 8):
        for elements in (0, 1, 33, 5000):
            old = random.integers(0, 256, elements * width, np.uint8)
            new = old ^ (random.integers(0, 9, old.size, np.uint8) // 7)
            for known in (old, None):
                segments = -(-elements >> 12)
                expected, lengths = REFERENCE.planes_encode(known, new, width, 12, 0, segments)
                data, found = at_level.planes_encode(known, new, width, 12, 0, segments)
                assert data.tobytes() == expected.tobytes()
                assert found.tolist() == lengths.tolist()
                base = old.copy()
                done = at_level.planes_apply(data, lengths, base, width, 12, 0, segments, known is not None)
                assert (done.error, done.segments) == (None, segments)
                assert base.tobytes() == new.tobytes()


def test_gathering_is_exact_beyond_a_segment(at_level: NativeCodec) -> None:
    old = np.random.default_rng(2).integers(0, 1 << 16, 300_001).astype(np.uint16)
    new = old.copy()
    where = np.r_[0, 4095, 4096, 5000:5130, 299_999, 300_000]
    new[where] ^= 0x8000
    gather, pointer = at_level._library.rlc_sparse_gather, ctypes.c_void_p
    gather.restype, gather.argtypes = ctypes.c_int64, [pointer, pointer, ctypes.c_uint64, pointer, pointer, pointer]
    positions, olds, news = (np.empty(old.size + 64, dtype) for dtype in (np.uint32, np.uint16, np.uint16))
    found = gather(
        *(array.ctypes.data for array in (old, new)), old.size, *(x.ctypes.data for x in (positions, olds, news))
    )
    assert positions[:found].tolist() == where.tolist()
    assert np.array_equal(olds[:found], old[where])
    assert np.array_equal(news[:found], new[where])


def test_a_damaged_segment_ends_the_call_after_the_whole_ones_before_it(at_level: NativeCodec) -> None:
    old = np.zeros(3 << 12, np.uint16)
    new = old + (np.arange(old.size) % 9 == 0).astype(np.uint16)
    data, lengths, _ = at_level.sparse_encode(old, new, 12, 0, 3)
    data = data.copy()
    data[int(lengths[0]) + 16] = 99  # the Rice parameter of the second
    base = old.copy()
    applied = at_level.sparse_apply(data, lengths, base, 12, 0, 3, 1)
    assert applied.segments == 1
    assert isinstance(applied.error, CorruptWeightsError)
    assert np.array_equal(base, np.r_[new[: 1 << 12], old[1 << 12 :]])


def test_positions_that_wrap_are_refused(at_level: NativeCodec) -> None:
    """Eight are summed in 32 bits at once: one far gap, and many short ones, that come round to small numbers again."""

    def segment(low: bytes, unary: bytes, count: int) -> np.ndarray:
        header = struct.pack("<4I2BH", count, len(unary), 1, 0, 14, 1, 0)  # k 14; constant steps
        return np.frombuffer(header + low + unary + b"\x01", np.uint8)

    far = bytes(1 << 15) + b"\xff"  # 2^18 zeros, each worth 2^14 words, and eight ones
    many = (1 << 18) + 8  # of 2^14 words each
    for data in (segment(bytes(14), far, 8), segment(b"\xff" * (many * 14 // 8), b"\xff" * (many // 8), many)):
        with pytest.raises(CorruptWeightsError, match="format"):
            at_level.sparse_decode(data, 1 << 24)
        with pytest.raises(CorruptWeightsError, match="format"):
            REFERENCE.sparse_decode(data, 1 << 24)


def test_both_write_the_same_change_whatever_the_threads(library: NativeCodec) -> None:
    random = np.random.default_rng(3)
    old = (random.normal(0, 0.02, 700_000).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    for density in (0.001, 0.2):
        new = np.where(random.random(old.size) < density, old + np.uint16(1), old)
        before, after = old.view(np.uint8), new.view(np.uint8)
        expected = delta_codec.encode_change(before, after, "bfloat16", backend=REFERENCE)
        for threads in (1, 2, 5):
            change = delta_codec.encode_change(before, after, "bfloat16", threads=threads, backend=library)
            assert change.data.tobytes() == expected.data.tobytes()


def test_arguments_that_do_not_fit_are_refused(library: NativeCodec) -> None:
    words = np.zeros(5000, np.uint16)
    with pytest.raises(ValueError, match="refused its arguments"):
        library.sparse_encode(words, words, 12, 0, 3)
    with pytest.raises(ValueError, match="contiguous"):
        library.sparse_encode(words[::2], words[::2], 12, 0, 1)
    with pytest.raises(ValueError, match="not sorted"):
        library.sparse_encode_steps(np.array([3, 3]), np.array([1, 1], np.int16), 5000, 12, 0, 2)


def test_the_status_says_what_is_live_and_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status = native_codec.native_status()
    assert status["live"] in (*LEVELS, "numpy")
    assert bool(status["reason"]) == (status["live"] == "numpy")
    monkeypatch.setattr(native_codec, "__file__", str(tmp_path / "native.py"))
    monkeypatch.setattr(native_codec, "_loaded", native_codec._loaded.__wrapped__)
    assert "no C compiler" in native_codec.native_status()["reason"]
    assert isinstance(delta_codec.default_backend(), NumpyCodec)
    (tmp_path / "_native.ctypes.so").write_bytes(b"not a library")
    assert native_codec.native_status()["live"] == "numpy"
    assert "_native.ctypes.so" in native_codec.native_status()["reason"]
    compile_to(tmp_path / "_native.ctypes.so", "-shared", "-fPIC", str(CSRC / "level.c"))
    assert "install the package again" in native_codec.native_status()["reason"]


def test_the_portable_path_needs_nothing_of_x86(tmp_path: Path) -> None:
    compile_to(
        tmp_path / "portable.so", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-DRLC_PORTABLE_ONLY", *SOURCES
    )
    portable = NativeCodec(tmp_path / "portable.so")
    assert (portable.level, portable.use_level("avx512")) == ("portable", "portable")
    old = np.arange(5000, dtype=np.uint16)
    new = old ^ (old % 11 == 0)
    data, _, _ = portable.sparse_encode(old, new, 12, 0, 2)
    assert data.tobytes() == REFERENCE.sparse_encode(old, new, 12, 0, 2)[0].tobytes()
