"""Compare-and-gather and scatter-apply on the accelerator, in Triton. Entropy coding stays on the host.

* :func:`gather_steps` : old and new weights to positions and steps on the integer line, in order: what
  :func:`orchestrator.transfer.delta.delta_codec.encode_steps` packs. Two passes over the weights (count, then compact), so memory
  traffic is 4 reads of 2 B a weight; no atomics, hence the same result every time.
* :func:`scatter_steps` : adds steps at positions (or takes them back), in place: one read and one write a changed weight.

Exact for every bit pattern of a 16-bit float, as the line is (:mod:`orchestrator.transfer.delta.reference_codec`). Runs on
tensors of a GPU, or anywhere under Triton's interpreter (``TRITON_INTERPRET=1`` before the import), which is how it is tested.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from orchestrator.api import ConfigError

_BLOCK = 4096  # weights a program looks at: 16 KB of old and new, and one count
_SCATTER_BLOCK = 1024


@triton.jit
def _line(bits):  # type: ignore[no-untyped-def]
    """int16 bits, as int32, to the integer line and back: -0 and below are mirrored."""
    return bits ^ ((bits >> 15) & 0x7FFF)


@triton.jit  # type: ignore[untyped-decorator]
def _count(old, new, counts, elements, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    at = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    differs = tl.load(old + at, inside, other=0) != tl.load(new + at, inside, other=0)
    tl.store(counts + program, tl.sum(differs.to(tl.int32), axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def _compact(old, new, ends, positions, steps, elements, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    at = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    before = tl.load(old + at, inside, other=0)
    after = tl.load(new + at, inside, other=0)
    differs = before != after
    ones = differs.to(tl.int32)
    start = tl.load(ends + program) - tl.sum(ones, axis=0)
    target = start + tl.cumsum(ones, axis=0) - 1
    step = _line(after.to(tl.int32)) - _line(before.to(tl.int32))
    tl.store(positions + target, at, differs)
    tl.store(steps + target, step.to(tl.int16), differs)


@triton.jit  # type: ignore[untyped-decorator]
def _scatter(base, positions, steps, changes, SIGN: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < changes
    at = tl.load(positions + index, inside, other=0)
    step = tl.load(steps + index, inside, other=0).to(tl.int32)
    value = _line(tl.load(base + at, inside, other=0).to(tl.int32))
    moved = (value + SIGN * step).to(tl.int16)  # modulo 2^16
    tl.store(base + at, _line(moved.to(tl.int32)).to(tl.int16), inside)


def gather_steps(old: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where two contiguous tensors of a 16-bit float type differ: positions int64 (ascending), steps int16, on their device.

    Raises ConfigError for tensors of different shape, device or dtype, or of another width.
    """
    if old.shape != new.shape or old.dtype != new.dtype or old.device != new.device:
        raise ConfigError("new", f"{new.dtype} {tuple(new.shape)}", f"must be like old: {old.dtype} {tuple(old.shape)}")
    before, after = _bits("old", old), _bits("new", new)
    elements = before.numel()
    programs = triton.cdiv(elements, _BLOCK)
    counts = torch.zeros(max(programs, 1), dtype=torch.int32, device=old.device)
    if programs:
        _count[(programs,)](before, after, counts, elements, BLOCK=_BLOCK)
    ends = counts.to(torch.int64).cumsum(0)
    changes = int(ends[-1])
    positions = torch.empty(changes, dtype=torch.int64, device=old.device)
    steps = torch.empty(changes, dtype=torch.int16, device=old.device)
    if changes:
        _compact[(programs,)](before, after, ends, positions, steps, elements, BLOCK=_BLOCK)
    return positions, steps


def scatter_steps(base: torch.Tensor, positions: torch.Tensor, steps: torch.Tensor, *, back: bool = False) -> None:
    """Add ``steps`` (int16) at ``positions`` (int64, inside and no two the same) of a contiguous 16-bit float tensor.

    ``back`` takes them away again. Positions are not looked at here: they come checked from
    :func:`orchestrator.transfer.delta.delta_codec.read_steps`. Raises ConfigError for other types or sizes.
    """
    words = _bits("base", base)
    if positions.dtype != torch.int64 or steps.dtype != torch.int16 or positions.shape != steps.shape:
        raise ConfigError("steps", str(steps.dtype), "positions int64 and steps int16 must be parallel")
    changes = positions.numel()
    if changes:
        grid = (triton.cdiv(changes, _SCATTER_BLOCK),)
        _scatter[grid](words, positions, steps, changes, SIGN=-1 if back else 1, BLOCK=_SCATTER_BLOCK)


def _bits(field: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.element_size() != 2 or not tensor.is_contiguous():
        raise ConfigError(field, str(tensor.dtype), "must be contiguous and of a 16-bit type")
    return tensor.view(torch.int16).reshape(-1)
