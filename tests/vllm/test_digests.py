"""Both kinds of weight digest find any flipped bit, any two exchanged elements, any two exchanged tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from vllm_rlplugin.weights.digests import (  # noqa: E402
    digest_for,
    digest_of_parts,
    mixsum,
    mixsum_of_parts,
    xxh3,
    xxh3_of_parts,
)

KINDS = pytest.mark.parametrize("digest", [xxh3, mixsum])
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
]
Digest = Callable[[torch.Tensor], int]


def values(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, generator=generator).to(dtype)


@KINDS
@pytest.mark.parametrize("count", [1, 2, 3, 13])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_every_single_flipped_bit_changes_the_digest(digest: Digest, dtype: torch.dtype, count: int) -> None:
    tensor = values(count, dtype)
    seen = {digest(tensor)}
    data = tensor.view(torch.uint8)
    for byte in range(data.numel()):
        for bit in range(8):
            data[byte] ^= 1 << bit
            seen.add(digest(tensor))
            data[byte] ^= 1 << bit
    assert len(seen) == 1 + 8 * data.numel()


@KINDS
@pytest.mark.parametrize("distance", [1, 2, 8, 64, 511])
def test_two_exchanged_elements_change_the_digest(digest: Digest, distance: int) -> None:
    tensor = values(1000)
    before = digest(tensor)
    for first in range(0, 1000 - distance, 37):
        other = tensor.clone()
        other[first], other[first + distance] = tensor[first + distance], tensor[first]
        assert digest(other) != before


@KINDS
def test_two_exchanged_tensors_show_at_both_places(digest: Digest) -> None:
    first, second = values(512), values(512) * 2
    assert digest(first) != digest(second)


@KINDS
def test_length_counts_and_zeros_are_not_nothing(digest: Digest) -> None:
    digests = [digest(torch.zeros(count, dtype=torch.uint8)) for count in range(40)]
    assert len(set(digests)) == len(digests)


@KINDS
def test_a_view_has_the_digest_of_its_copy(digest: Digest) -> None:
    whole = values(24 * 10).reshape(24, 10)
    for view in (whole[3:5], whole[:, 2:7], whole.t(), whole[1, 1:], whole[2, 3]):
        assert digest(view) == digest(view.clone(memory_format=torch.contiguous_format))
    # A start that is no multiple of a word, and bytes that fill none.
    halves = values(33, torch.bfloat16)
    assert digest(halves[1:]) == digest(halves[1:].clone())


def test_a_long_tensor_in_parts_is_one_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = values(1000)
    whole = mixsum(tensor)
    monkeypatch.setattr("vllm_rlplugin.weights.digests._CHUNK_WORDS", 37)
    assert mixsum(tensor) == whole


def test_a_tensor_that_comes_in_parts_has_the_digest_of_the_whole() -> None:
    tensor = values(1003, torch.bfloat16)
    for size in (8, 400, 2000):
        parts = list(tensor.split(size))
        assert xxh3_of_parts(iter(parts)) == xxh3(tensor)
        assert mixsum_of_parts(iter(parts)) == mixsum(tensor)
    with pytest.raises(ValueError, match="middle of a word"):
        mixsum_of_parts(tensor.split(3))
    assert mixsum_of_parts(()) == mixsum(tensor[:0])
    cpu = torch.device("cpu")
    assert digest_of_parts(cpu)(tensor.split(8)) == digest_for(cpu)(tensor)


@pytest.mark.parametrize("device", DEVICES)
def test_both_kinds_say_the_same_wherever_the_tensor_is(device: str) -> None:
    tensor = values(100_003)
    moved = tensor.to(device)
    assert (xxh3(moved), mixsum(moved)) == (xxh3(tensor), mixsum(tensor))
    assert digest_for(torch.device(device)) is (xxh3 if device == "cpu" else mixsum)


def test_the_digest_of_known_bytes_stays_what_it_is() -> None:
    """A change of the algorithm would make engines of two versions disagree."""
    known = torch.arange(20, dtype=torch.uint8)
    assert f"{xxh3(known):016x}" == "287caa944e605ead"
    assert f"{mixsum(known):016x}" == "ea2b4495d4a1cd14"
