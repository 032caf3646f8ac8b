"""The native library (``csrc``), loaded by ctypes; calls release the interpreter lock. Optional.

It is built when the package is installed (``setup.py``); without a compiler the install succeeds and :func:`native`
returns None, with the reason in :func:`native_status`. The NumPy reference then does the same work, byte for byte, slower.
The library checks its own bounds (``tests/transfer/test_native_codec.py``); here only codes become errors.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from orchestrator.transfer.delta.reference_codec import AppliedSegments, Bytes, Lengths, Positions, Steps, Words
from orchestrator.transfer.transfer_errors import CorruptWeightsError

ABI = 1
LEVELS = ("portable", "avx2", "avx512")
_CAPACITY, _MEMORY, _TRUNCATED, _FORMAT = -1, -2, -3, -4
_REASONS = {_TRUNCATED: "truncated", _FORMAT: "format"}
_PER_SEGMENT = 64  # of an output buffer, beyond what its elements may take

_P, _U64, _INT = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int
_SIGNATURES: dict[str, tuple[type[ctypes._SimpleCData[int]], list[type]]] = {
    "rlc_delta_abi": (_INT, []),
    "rlc_delta_best": (_INT, []),
    "rlc_delta_use": (_INT, [_INT]),
    "rlc_sparse_encode": (ctypes.c_int64, [_P, _P, _U64, _INT, _U64, _U64, _P, _U64, _P, _P]),
    "rlc_sparse_encode_steps": (ctypes.c_int64, [_P, _P, _U64, _U64, _INT, _U64, _U64, _P, _U64, _P]),
    "rlc_sparse_decode": (ctypes.c_int64, [_P, _U64, _U64, _P, _P, _U64]),
    "rlc_sparse_apply": (ctypes.c_int64, [_P, _U64, _P, _U64, _INT, _U64, _U64, _P, _INT, _P]),
    "rlc_planes_encode": (ctypes.c_int64, [_P, _P, _U64, _INT, _INT, _U64, _U64, _P, _U64, _P]),
    "rlc_planes_apply": (ctypes.c_int64, [_P, _U64, _P, _U64, _INT, _INT, _U64, _U64, _P, _INT, _P]),
}


class NativeCodec:
    """The library's calls on NumPy arrays, which must be contiguous. Segments ``first`` to ``last - 1`` of a shard.

    Raises OSError when ``path`` cannot be loaded, ImportError when it is of another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self._library, name, None)
            if function is None:
                raise ImportError(f"{path} has no {name}: it was built from other sources; install the package again")
            function.restype, function.argtypes = result, arguments
        if (found := self._library.rlc_delta_abi()) != ABI:
            raise ImportError(f"{path} has version {found}, this package needs {ABI}; install the package again")
        self.level = LEVELS[self._library.rlc_delta_best()]

    def use_level(self, level: str) -> str:
        """Use an instruction set up to the best of this CPU, in the whole process; returns the one now in use."""
        self.level = LEVELS[self._library.rlc_delta_use(LEVELS.index(level))]
        return self.level

    def sparse_encode(self, old: Words, new: Words, log: int, first: int, last: int) -> tuple[Bytes, Lengths, int]:
        """Payload, lengths and number of changes."""
        out, lengths = _output(old.size, 2, log, first, last)
        changed = ctypes.c_uint64()
        written = self._library.rlc_sparse_encode(
            *(_at(old), _at(new), old.size, log, first, last, _at(out), out.size, _at(lengths)),
            ctypes.addressof(changed),
        )
        return out[: _written(written)], lengths, changed.value

    def sparse_encode_steps(
        self, positions: Positions, steps: Steps, elements: int, log: int, first: int, last: int
    ) -> tuple[Bytes, Lengths]:
        """The same from positions and steps inside these segments. Raises ValueError unless sorted and none 0."""
        out, lengths = _output(elements, 2, log, first, last)
        written = self._library.rlc_sparse_encode_steps(
            *(_at(positions), _at(steps), positions.size, elements, log, first, last),
            *(_at(out), out.size, _at(lengths)),
        )
        if written == _FORMAT:
            raise ValueError("positions are not sorted inside the shard, or a step is 0")
        return out[: _written(written)], lengths

    def sparse_decode(self, data: Bytes, elements: int) -> tuple[Positions, Steps]:
        """Positions and steps of one segment. Raises CorruptWeightsError."""
        room = min(8 * data.size, elements)
        positions, steps = np.empty(room, np.uint32), np.empty(room, np.int16)
        found = self._library.rlc_sparse_decode(_at(data), data.size, elements, _at(positions), _at(steps), room)
        if (error := _error(found)) is not None:
            raise error
        return positions[:found].astype(np.int64), steps[:found]

    def sparse_apply(
        self, data: Bytes, lengths: Lengths, base: Words, log: int, first: int, last: int, sign: int
    ) -> AppliedSegments:
        """Add (``sign`` 1) or take back (-1) the steps of segments, in place."""
        done = ctypes.c_uint64()
        changed = self._library.rlc_sparse_apply(
            *(_at(data), data.size, _at(lengths), base.size, log, first, last, _at(base), sign),
            ctypes.addressof(done),
        )
        return AppliedSegments(done.value, changed, _error(changed))

    def planes_encode(
        self, old: Bytes | None, new: Bytes, width: int, log: int, first: int, last: int
    ) -> tuple[Bytes, Lengths]:
        """Payload and lengths; ``old`` is None for planes of the values."""
        elements = new.size // width
        out, lengths = _output(elements, width, log, first, last)
        written = self._library.rlc_planes_encode(
            *(None if old is None else _at(old), _at(new), elements, width, log, first, last),
            *(_at(out), out.size, _at(lengths)),
        )
        return out[: _written(written)], lengths

    def planes_apply(
        self, data: Bytes, lengths: Lengths, base: Bytes, width: int, log: int, first: int, last: int, xor: bool
    ) -> AppliedSegments:
        """Write (or XOR in) the planes of segments, in place."""
        done = ctypes.c_uint64()
        code = self._library.rlc_planes_apply(
            *(_at(data), data.size, _at(lengths), base.size // width, width, log, first, last, _at(base), int(xor)),
            ctypes.addressof(done),
        )
        return AppliedSegments(done.value, 0, _error(code))


@cache
def _loaded() -> tuple[NativeCodec | None, str]:
    if sys.byteorder != "little":
        return None, "this machine is not little-endian"
    path = Path(__file__).with_name("_native.ctypes.so")
    if not path.exists():
        return None, "not built: there was no C compiler when the package was installed (pip install again with one)"
    try:
        return NativeCodec(path), ""
    except (OSError, ImportError) as error:
        return None, str(error)


def native() -> NativeCodec | None:
    """The library, or None."""
    return _loaded()[0]


def native_status() -> dict[str, str]:
    """Which code runs: ``live`` (avx512, avx2, portable, numpy), ``library`` (path or ""), ``reason`` (why numpy, or "")."""
    library, reason = _loaded()
    if library is None:
        return {"live": "numpy", "library": "", "reason": reason}
    return {"live": library.level, "library": str(library.path), "reason": ""}


def _output(elements: int, width: int, log: int, first: int, last: int) -> tuple[Bytes, Lengths]:
    # Twice the elements is more than any encoding takes; pages that are not written to cost nothing.
    covered = max(0, min(elements, last << log) - (first << log))
    return np.empty(2 * covered * width + _PER_SEGMENT * width * (last - first), np.uint8), np.empty(
        last - first, np.uint32
    )


def _written(code: int) -> int:
    if code < 0:
        if code == _MEMORY:
            raise MemoryError("no memory to encode a weight change")
        raise ValueError(f"the native encoder refused its arguments ({code})")
    return code


def _error(code: int) -> Exception | None:
    if code >= 0:
        return None
    if code == _MEMORY:
        return MemoryError("no memory to decode a weight change")
    return CorruptWeightsError(_REASONS.get(code, "format"), "a segment cannot be decoded")


def _at(array: npt.NDArray[np.generic]) -> int:
    if not array.flags.c_contiguous:
        raise ValueError("the native library works on contiguous arrays")
    return array.ctypes.data
