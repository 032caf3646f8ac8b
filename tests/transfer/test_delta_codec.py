"""Weight changes: what is encoded is what is applied, bit for bit; what can be taken back is; what is damaged is refused."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.api import ConfigError
from orchestrator.transfer import CorruptWeightsError
from orchestrator.transfer.delta import delta_codec as delta
from orchestrator.transfer.delta import delta_format as wire
from orchestrator.transfer.delta import reference_codec
from orchestrator.transfer.delta.delta_codec import CodecBackend
from orchestrator.transfer.delta.native_codec import native
from orchestrator.transfer.delta.reference_codec import (
    NumpyCodec,
    advance_values,
    retreat_values,
    steps_between,
    to_line,
    unzigzag,
    zigzag,
)

BACKENDS = [NumpyCodec(), *([library] if (library := native()) else [])]
NAMES = [type(backend).__name__ for backend in BACKENDS]
ODD = [0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x807F, 0x7F80, 0xFF80, 0x7FC0, 0xFFC0, 0x7F81, 0xFFFF, 0x3F80, 0x7F7F]
DTYPES = ["bfloat16", "float16", "float32", "float8_e4m3fn", "int64", "something"]
Bytes = np.ndarray


def as_bytes(words: np.ndarray) -> Bytes:
    return np.ascontiguousarray(words).view(np.uint8).reshape(-1)


def weights(seed: int, count: int) -> np.ndarray:
    """bf16 words of N(0, 0.02)."""
    values = np.random.default_rng(seed).normal(0, 0.02, count).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def stepped(old: np.ndarray, density: float, seed: int) -> np.ndarray:
    """``old`` with a share of its words one step up or down."""
    random = np.random.default_rng(seed)
    hit = random.random(old.size) < density
    return np.where(hit, advance_values(old, random.choice(np.array([-1, 1], np.int16), old.size)), old)


def read_changes(
    data: Bytes, old: Bytes, *, backend: CodecBackend | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Positions and new values of any change; positions that did not change are left out. ``old`` is only read."""
    values = old.view(f"<u{wire.open_change(data).header.width}")
    for edit in delta.read_edits(data, backend=backend):
        before = values[edit.positions]
        fresh = edit.new_values(before)
        moved = fresh != before
        if moved.any():
            yield edit.positions[moved], fresh[moved]


@st.composite
def pairs(draw: st.DrawFn) -> tuple[str, Bytes, Bytes]:
    """A dtype, and old and new bytes of a few shapes of change: none, some, all; patterns at random or peculiar."""
    dtype = draw(st.sampled_from(DTYPES))
    width = wire.DTYPE_BYTES.get(dtype, 1)
    count = draw(st.sampled_from([0, 1, 2, 7, 64, 4095, 4096, 4097, 9000]))
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    old = random.integers(0, 256, count * width, np.uint8)
    if width == 2 and draw(st.booleans()):
        old = as_bytes(random.choice(np.array(ODD, np.uint16), count))
    other = random.integers(0, 256, old.size, np.uint8)
    if draw(st.booleans()):
        other = old ^ random.integers(0, 4, old.size, np.uint8)
    share = draw(st.sampled_from([0.0, 0.001, 0.03, 0.3, 1.0]))
    return dtype, old, np.where(random.random(old.size) < share, other, old).astype(np.uint8)


@pytest.mark.parametrize("backend", BACKENDS, ids=NAMES)
@settings(max_examples=60)
@given(pairs(), st.integers(1, 3))
def test_a_change_brings_every_bit_and_takes_it_back(backend: CodecBackend, pair: tuple, threads: int) -> None:
    dtype, old, new = pair
    change = delta.encode_change(old, new, dtype, threads=threads, backend=backend)
    base = old.copy()
    log = delta.apply_change(change.data, base, threads=threads, backend=backend)
    assert base.tobytes() == new.tobytes()
    delta.undo_change(log)
    assert base.tobytes() == old.tobytes()
    values = base.view(f"<u{wire.DTYPE_BYTES.get(dtype, 1)}")
    for at, found in read_changes(change.data, old, backend=backend):
        values[at] = found
    assert base.tobytes() == new.tobytes()


@pytest.mark.parametrize("backend", BACKENDS, ids=NAMES)
@settings(max_examples=30)
@given(pairs())
def test_each_encoding_brings_every_bit(backend: CodecBackend, pair: tuple) -> None:
    dtype, old, new = pair
    width = wire.DTYPE_BYTES.get(dtype, 1)
    made = [delta._encode_planes(known, new, width, 1, backend) for known in (old, None)]
    if width == 2:
        made.append(delta._encode_sparse(old.view(np.uint16), new.view(np.uint16), 1, backend))
    assert {"delta-xor", "dense-planes"} <= {change.encoding for change in made}
    for change in made:
        base = old.copy()
        log = delta.apply_change(change.data, base, backend=backend)
        assert base.tobytes() == new.tobytes()
        delta.undo_change(log)
        assert base.tobytes() == old.tobytes()


def test_the_line_is_monotone_and_every_pattern_comes_back() -> None:
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    assert np.array_equal(to_line(to_line(bits)), bits)
    floats = (bits.astype(np.uint32) << 16).view(np.float32)
    order = np.argsort(to_line(bits).view(np.int16), kind="stable")
    ordered = floats[order][~np.isnan(floats[order])]
    assert (np.diff(ordered) >= 0).all()
    assert to_line(np.array([0x8000, 0x0000], np.uint16)).view(np.int16).tolist() == [-1, 0]


def test_any_pattern_reaches_any_other_by_a_step() -> None:
    old = np.random.default_rng(0).integers(0, 1 << 16, 200_000).astype(np.uint16)
    for target in ODD:
        new = np.full_like(old, target)
        steps = steps_between(old, new)
        assert np.array_equal(advance_values(old, steps), new)
        assert np.array_equal(retreat_values(new, steps), old)
    steps = np.arange(-32768, 32768).astype(np.int16)
    steps = steps[steps != 0]
    assert np.array_equal(unzigzag(zigzag(steps)), steps)
    assert zigzag(np.array([-1, 1, -2, 2], np.int16)).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("density", "most"), [(0.01, 1.2), (0.02, 1.06), (0.05, 0.9)])
def test_a_changed_weight_costs_little_more_than_its_entropy(density: float, most: float) -> None:
    old = weights(1, 400_000)
    new = stepped(old, density, 2)
    change = delta.encode_change(as_bytes(old), as_bytes(new), "bfloat16")
    gaps = -(density * np.log2(density) + (1 - density) * np.log2(1 - density)) / density
    assert change.encoding == "delta-sparse"
    assert (gaps + 1) / 8 < change.data.size / change.changed < min(most, 1.06 * (gaps + 1) / 8)


def test_an_unchanged_shard_is_a_header() -> None:
    old = as_bytes(weights(0, 5_000_000))
    for dtype in ("bfloat16", "float32"):
        change = delta.encode_change(old, old, dtype)
        assert change.data.size < 0.0005 * old.size
        assert not list(read_changes(change.data, old))


def test_dense_is_taken_where_it_is_smaller() -> None:
    random = np.random.default_rng(0)
    noise, other = random.integers(0, 256, (2, 200_000), np.uint8)
    assert delta.encode_change(noise, other, "bfloat16").encoding == "dense-raw"
    old, new = as_bytes(weights(1, 100_000)), as_bytes(weights(2, 100_000))
    change = delta.encode_change(old, new, "bfloat16")
    assert change.encoding == "dense-planes"
    assert change.data.size < 0.75 * new.size
    assert delta.encode_change(None, new, "bfloat16").encoding == "dense-planes"
    hit = random.random(old.size // 2) < 0.3
    replaced = as_bytes(np.where(hit, new.view(np.uint16), old.view(np.uint16)))
    assert delta.encode_change(old, replaced, "bfloat16").encoding == "delta-xor"
    masters = random.normal(0, 0.02, 50_000).astype(np.float32)
    moved = masters + random.normal(0, 1e-6, masters.size).astype(np.float32)
    assert delta.encode_change(as_bytes(masters), as_bytes(moved), "float32").encoding == "delta-xor"


@pytest.mark.parametrize("backend", BACKENDS, ids=NAMES)
def test_a_reader_of_a_slice_gets_its_positions_only(backend: CodecBackend) -> None:
    old = weights(3, 300_000)
    new = stepped(old, 0.4, 4)
    data = delta.encode_change(as_bytes(old), as_bytes(new), "bfloat16", backend=backend).data
    assert wire.open_change(data).header.segments > 1
    for start, stop in (
        (0, 300_000),
        (0, 0),
        (131_072, 262_144),
        (1_000, 1_001),
        (70_001, 290_000),
        (299_999, 400_000),
    ):
        mine = old[start:stop].copy()
        for positions, steps in delta.read_steps(data, start, stop, backend=backend):
            mine[positions - start] = delta.advance_values(mine[positions - start], steps)
        assert np.array_equal(mine, new[start:stop])


@pytest.mark.parametrize("backend", BACKENDS, ids=NAMES)
def test_a_reader_of_a_slice_gets_its_edits_whatever_the_encoding(backend: CodecBackend) -> None:
    random = np.random.default_rng(7)
    old = random.integers(0, 1 << 32, 150_000, np.uint32)
    near = np.where(random.random(old.size) < 0.1, old ^ 3, old)
    words, moved = weights(8, 150_000), stepped(weights(8, 150_000), 0.05, 9)
    made = [
        (old, near, delta.encode_change(as_bytes(old), as_bytes(near), "float32", backend=backend)),
        (words, moved, delta.encode_change(as_bytes(words), as_bytes(moved), "bfloat16", backend=backend)),
        (words, moved, delta.encode_change(None, as_bytes(moved), "bfloat16", backend=backend)),
        (old, old[::-1], delta.encode_change(as_bytes(old), as_bytes(old[::-1].copy()), "uint8", backend=backend)),
    ]
    made[3] = (made[3][0].view(np.uint8), as_bytes(old[::-1].copy()), made[3][2])
    found = ("delta-xor", "delta-sparse", "dense-planes", "dense-raw")
    assert tuple(change.encoding for _, _, change in made) == found
    for before, after, change in made:
        opened = wire.open_change(change.data)
        for start, stop in (
            (0, None),
            (0, 0),
            (65_536, 131_072),
            (1_000, 1_001),
            (70_001, 140_000),
            (149_999, 900_000),
        ):
            mine = before.copy()
            for edit in delta.read_edits(opened, start, stop, backend=backend):
                assert edit.positions.size == edit.operand.size
                mine[edit.positions] = edit.new_values(mine[edit.positions])
            expected = before.copy()
            expected[start:stop] = after[start:stop]
            assert np.array_equal(mine, expected)


@pytest.mark.parametrize("backend", BACKENDS, ids=NAMES)
def test_what_an_accelerator_gathered_gives_the_same_change(backend: CodecBackend) -> None:
    old = weights(5, 50_000)
    new = stepped(old, 0.05, 6)
    positions = np.flatnonzero(old != new)
    steps = steps_between(old[positions], new[positions])
    whole = delta.encode_change(as_bytes(old), as_bytes(new), "bfloat16", backend=backend)
    assert delta.encode_steps(positions, steps, old.size, backend=backend).data.tobytes() == whole.data.tobytes()
    for bad, step in (
        (positions[::-1], steps),
        (positions, steps * 0),
        (positions + old.size, steps),
        (positions - 60_000, steps),
    ):
        with pytest.raises(ConfigError):
            delta.encode_steps(bad, step.astype(np.int16), old.size, backend=backend)
    assert delta.encode_steps(positions[:0], steps[:0], 0, backend=backend).changed == 0


# -- bad input ---------------------------------------------------------------------------------------------------------


def sealed_again(data: Bytes) -> Bytes:
    """With a checksum that fits: what only a forger or a defect writes."""
    data[8:16] = np.frombuffer(xxhash.xxh3_64_intdigest(data[16:].data).to_bytes(8, "little"), np.uint8)
    return data


def refused(data: Bytes, old: Bytes, backend: CodecBackend) -> bool:
    """Whether it was refused; base must then be what it was, and else must come back."""
    base = old.copy()
    try:
        log = delta.apply_change(data, base, threads=2, backend=backend)
    except CorruptWeightsError:
        assert base.tobytes() == old.tobytes()
        return True
    delta.undo_change(log)
    assert base.tobytes() == old.tobytes()
    return False


def sample(kind: str) -> tuple[Bytes, Bytes]:
    """A change and its base, of several segments."""
    old = weights(7, 40_000)
    new = stepped(old, 0.3, 8)
    new[5:9] = ODD[6:10]
    known = as_bytes(old)
    if kind == "sparse":
        positions = np.flatnonzero(old != new)
        parts = [NumpyCodec().sparse_encode(old, new, 12, 0, 10)[:2]]
        return delta._sealed("delta-sparse", 2, 12, old.size, positions.size, parts).data, known
    if kind == "raw":
        return delta.encode_change(
            None, np.random.default_rng(0).integers(0, 256, known.size, np.uint8), "bfloat16"
        ).data, known
    return delta._encode_planes(known if kind == "xor" else None, as_bytes(new), 2, 1, NumpyCodec()).data, known


@pytest.mark.parametrize("backend", BACKENDS, ids=NAMES)
@pytest.mark.parametrize("kind", ["sparse", "xor", "planes", "raw"])
def test_damage_is_refused_and_the_base_stays(kind: str, backend: CodecBackend) -> None:
    data, old = sample(kind)
    assert not refused(data, old, backend)
    random = np.random.default_rng(1)
    for cut in (0, 1, 15, 63, 64, 70, data.size - 1):
        assert refused(data[:cut].copy(), old, backend)
    assert refused(np.append(data, np.uint8(0)), old, backend)
    for bit in random.integers(0, 8 * data.size, 60).tolist():
        flipped = data.copy()
        flipped[bit // 8] ^= 1 << bit % 8
        assert refused(flipped, old, backend)


@pytest.mark.parametrize("kind", ["sparse", "xor", "planes"])
def test_a_forged_change_never_breaks_out_and_both_decoders_agree(kind: str) -> None:
    data, old = sample(kind)
    random = np.random.default_rng(2)
    verdicts = []
    for _ in range(50):
        forged = data.copy()
        for at in random.choice(np.r_[16:200, 16 : forged.size], random.integers(1, 4)):
            forged[at] = random.integers(0, 256)
        verdicts.append([refused(sealed_again(forged.copy()), old, backend) for backend in BACKENDS])
    assert all(len(set(verdict)) == 1 for verdict in verdicts)
    assert sum(verdict[0] for verdict in verdicts) > 15


@pytest.mark.parametrize(
    ("at", "width", "value"),
    [
        (16, 1, 9),
        (17, 1, 3),
        (18, 1, 63),
        (19, 1, 1),
        (20, 4, 1 << 31),
        (24, 8, 1 << 62),
        (32, 8, 1 << 50),
        (40, 8, 1 << 63),
        (32, 8, 1),
        (48, 8, 1),
        (64, 4, 0xFFFFFFFF),
    ],
)
def test_no_number_of_a_header_is_believed(at: int, width: int, value: int) -> None:
    data, old = sample("sparse")
    data[at : at + width] = np.frombuffer(value.to_bytes(width, "little"), np.uint8)
    assert all(refused(sealed_again(data.copy()), old, backend) for backend in BACKENDS)


@pytest.mark.parametrize(
    ("log", "segments", "elements", "changed", "payload"),
    [
        (11, 4, 8192, 0, 0),
        (25, 1, 100, 0, 0),
        (12, 1, 8192, 0, 0),
        (12, 3, 8192, 0, 0),
        (12, 2, 8192, 8193, 0),
        (12, 2, 8192, 0, 1),
    ],
)
def test_numbers_that_do_not_fit_one_another_are_refused_when_opened(
    log: int, segments: int, elements: int, changed: int, payload: int
) -> None:
    def sealed(header: wire.ChangeHeader) -> Bytes:
        return wire.seal_change(header, np.zeros(header.segments, np.uint32), [np.zeros(header.payload, np.uint8)])

    assert wire.open_change(sealed(wire.ChangeHeader("delta-sparse", 2, 12, 2, 8192, 0, 0))).payload.size == 0
    with pytest.raises(CorruptWeightsError):
        wire.open_change(sealed(wire.ChangeHeader("delta-sparse", 2, log, segments, elements, changed, payload)))


@pytest.mark.parametrize("backend", BACKENDS, ids=NAMES)
def test_escapes_must_fit_their_symbols(backend: CodecBackend) -> None:
    data = np.frombuffer(reference_codec.encode_sparse(np.array([1, 2, 9]), np.array([300, 1, -1], np.int16)), np.uint8)
    symbols = data.size - 2 - 3  # three symbols as they are, one escape
    assert data[symbols:-2].tolist() == [255, 1, 0]
    assert backend.sparse_decode(data, 10)[1].tolist() == [300, 1, -1]
    for at, value in ((symbols, 7), (symbols + 1, 255), (data.size - 1, 0), (12, 0)):
        forged = data.copy()
        forged[at] = value
        with pytest.raises(CorruptWeightsError):
            backend.sparse_decode(forged, 10)
    forged[12:] = data[12:]
    forged[-2:] = 0xFF  # 65535 is no symbol
    with pytest.raises(CorruptWeightsError):
        backend.sparse_decode(forged, 10)


def test_a_change_for_another_array_is_refused() -> None:
    data, old = sample("sparse")
    for other in (old[:-2].copy(), np.append(old, old)):
        with pytest.raises(CorruptWeightsError, match="layout"):
            delta.apply_change(data, other)
    fixed = old.copy()
    fixed.flags.writeable = False
    with pytest.raises(ConfigError):
        delta.apply_change(data, fixed)
    with pytest.raises(ConfigError):
        delta.encode_change(old, old[:-2].copy(), "bfloat16")
    with pytest.raises(ConfigError):
        delta.encode_change(None, old[:-1].copy(), "bfloat16")
    with pytest.raises(ConfigError):
        delta.encode_change(old[::2], old[::2], "bfloat16")
    with pytest.raises(ConfigError):
        next(delta.read_steps(sample("xor")[0]))


@settings(max_examples=60)
@given(st.binary(max_size=300), st.integers(0, 3), st.integers(0, 400))
def test_no_bytes_make_a_stream_or_a_segment_break_out(data: bytes, mode: int, count: int) -> None:
    array = np.frombuffer(data, np.uint8)
    for decode in (
        lambda: reference_codec.decode_stream(array, mode, count),
        lambda: reference_codec.decode_sparse(array, count),
    ):
        try:
            decode()
        except CorruptWeightsError:
            continue


def test_the_frequencies_of_a_stream_always_sum_up() -> None:
    random = np.random.default_rng(0)
    for kinds in (2, 3, 256):
        for scale in (1, 10, 10_000):
            counts = np.zeros(256, np.int64)
            counts[random.permutation(256)[:kinds]] = 1 + random.integers(0, scale, kinds) ** 2
            frequencies = reference_codec.normalise(counts)
            assert frequencies.sum() == reference_codec.SCALE
            assert ((frequencies > 0) == (counts > 0)).all()
