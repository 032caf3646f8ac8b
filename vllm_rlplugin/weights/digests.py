"""A 64-bit digest of a tensor's bytes, order-sensitive, made where the tensor is.

Guarantees: equal bytes give equal digests on every device, for one kind of digest; any single changed bit changes it; two
exchanged elements, or anything else, leave it alike with a probability of about 2**-64. It finds corruption; it is no
defence against someone who chooses the bytes.

Two kinds, because each is fast in one place only: ``xxh3`` (CPU: 10 GB/s a core and more; reads the memory in place) and
``mixsum`` (CUDA: a few elementwise kernels, a sum, and no copy to the host). Who compares digests uses one kind for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import xxhash

Digest = Callable[[torch.Tensor], int]  # of the logical content: a view is digested as its contiguous copy would be

_CHUNK_WORDS = 1 << 23  # 64 MiB at a time: bounds the temporaries of ``mixsum``
_MASK = (1 << 64) - 1
# splitmix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words, each output bit depends on every input bit.
_GAMMA = 0x9E3779B97F4A7C15
_STEPS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


def digest_for(device: torch.device) -> Digest:
    """The kind to use for tensors that live on ``device``; it may be asked for tensors elsewhere, more slowly."""
    return xxh3 if device.type == "cpu" else mixsum


def digest_of_parts(device: torch.device) -> Callable[[Iterable[torch.Tensor]], int]:
    """The same kind, of a tensor that comes in parts; all but the last have a multiple of 8 bytes."""
    return xxh3_of_parts if device.type == "cpu" else mixsum_of_parts


def xxh3(tensor: torch.Tensor) -> int:
    """xxh3-64 of the bytes."""
    return int(xxhash.xxh3_64_intdigest(_on_host(tensor).numpy().data))


def xxh3_of_parts(parts: Iterable[torch.Tensor]) -> int:
    """:func:`xxh3` of all of them, one after the other."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(_on_host(part).numpy().data)
    return int(state.intdigest())


def mixsum(tensor: torch.Tensor) -> int:
    """Sum over all 64-bit words of splitmix64(word + position * gamma), and of the length; the tail is padded with zeros.

    For a given position the mixer is a bijection, so a change within one word always shows.
    """
    return mixsum_of_parts((tensor,))


def mixsum_of_parts(parts: Iterable[torch.Tensor]) -> int:
    """:func:`mixsum` of all of them, one after the other. Raises ValueError for a part in the middle that ends in half a word."""
    total = size = 0
    for part in parts:
        if size % 8:
            raise ValueError(f"a part begins at byte {size}, in the middle of a word")
        data = _bytes(part)
        total += _mix_bytes(data, size // 8)
        size += data.numel()
    return (total + _mix_int(size)) & _MASK


def _mix_bytes(data: torch.Tensor, first: int) -> int:
    """Of words at positions ``first`` and on."""
    total, size = 0, data.numel()
    whole = size // 8 * 8
    # A slice may start at any element: words need an aligned start, which only a copy gives then.
    body = data[:whole] if data.data_ptr() % 8 == 0 else data[:whole].clone()
    words = body.view(torch.int64)
    for start in range(0, words.numel(), _CHUNK_WORDS):
        total += int(_mix(words[start : start + _CHUNK_WORDS], first + start).sum().item())
    if whole < size:
        tail = torch.zeros(8, dtype=torch.uint8, device=data.device)
        tail[: size - whole] = data[whole:]
        total += int(_mix(tail.view(torch.int64), first + words.numel()).sum().item())
    return total


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    data = _bytes(tensor)
    return data if data.device.type == "cpu" else data.cpu()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _mix(words: torch.Tensor, first: int) -> torch.Tensor:
    """Mix words at positions ``first`` and on; int64 arithmetic wraps, as splitmix64 wants."""
    mixed = torch.arange(first + 1, first + 1 + words.numel(), dtype=torch.int64, device=words.device)
    mixed.mul_(_signed(_GAMMA)).add_(words)
    for shift, factor in _STEPS:
        shifted = (mixed >> shift).bitwise_and_((1 << (64 - shift)) - 1)  # >> keeps the sign: clear what it drew in
        mixed.bitwise_xor_(shifted).mul_(_signed(factor))
    return mixed


def _mix_int(value: int) -> int:
    for shift, factor in _STEPS:
        value = (value ^ (value >> shift)) * factor & _MASK
    return value


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
