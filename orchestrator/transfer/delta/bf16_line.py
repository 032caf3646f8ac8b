"""Steps between 16-bit floats on the integer line: exact for every bit pattern.

The bits of a bf16 (or fp16) number are sign and magnitude. Mirrored below zero they become an integer that grows with
the number: ..., -smallest, -0, +0, +smallest, ..., with infinities and NaN payloads at both ends. A change of a weight is the
difference of two such integers, modulo 2^16: mostly +1 or -1 after an optimizer step, and it brings back every pattern
(an added bf16 difference would not). The line is its own inverse, so adding a step needs no branch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint16]
Steps = npt.NDArray[np.int16]


def to_line(bits: Words) -> Words:
    """Bits to integers (as uint16, modulo 2^16) and back."""
    mirror = np.where(bits >> 15, np.uint16(0x7FFF), np.uint16(0))
    integers: Words = np.bitwise_xor(bits, mirror)
    return integers


def steps_between(old: Words, new: Words) -> Steps:
    """``new - old`` on the line. 0 where the bits are the same, and only there."""
    return (to_line(new) - to_line(old)).view(np.int16)


def advance_values(values: Words, steps: Steps) -> Words:
    """The values ``steps`` further on the line: what the publisher has, from what the engine has."""
    return to_line(to_line(values) + steps.view(np.uint16))


def retreat_values(values: Words, steps: Steps) -> Words:
    """Takes :func:`advance_values` back, bit for bit."""
    return to_line(to_line(values) - steps.view(np.uint16))


def zigzag(steps: Steps) -> Words:
    """Steps other than 0 as small numbers 0..65534: -1, 1, -2, 2, ..."""
    wide = steps.astype(np.int32)
    return (((wide << 1) ^ (wide >> 31)) - 1).astype(np.uint16)


def unzigzag(symbols: Words) -> Steps:
    """Takes :func:`zigzag` back; 65535 is no symbol."""
    wide = symbols.astype(np.int32) + 1
    return ((wide >> 1) ^ -(wide & 1)).astype(np.int16)
