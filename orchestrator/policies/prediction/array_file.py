"""Reading a file of arrays that somebody else may have written, or damaged."""

from __future__ import annotations

import io
import math
import struct
import zipfile
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray


def read_arrays(data: bytes) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz that ``numpy.savez`` wrote. Raises ValueError for anything else.

    ``numpy.load`` makes room for what a header announces before it has seen one byte of it, or its checksum. Here a member is
    read first, stored (nothing unfolds) and with its CRC compared, and has as many bytes as its array.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            members = file.infolist()
            if any(item.compress_type != zipfile.ZIP_STORED or item.file_size > len(data) for item in members):
                raise ValueError("a member is not stored as it is")
            texts = {item.filename.removesuffix(".npy"): file.read(item) for item in members}
        return {name: _array(text) for name, text in texts.items()}
    except (
        zipfile.BadZipFile,
        zlib.error,
        struct.error,
        NotImplementedError,
        EOFError,
        OSError,
        RuntimeError,
    ) as error:
        raise ValueError(f"is no file of arrays: {error!r}") from error


def _array(data: bytes) -> NDArray[Any]:
    stream = io.BytesIO(data)
    if np.lib.format.read_magic(stream) != (1, 0):  # type: ignore[no-untyped-call]
        raise ValueError("an array of another format")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)  # type: ignore[no-untyped-call]
    body = data[stream.tell() :]
    if fortran or dtype.hasobject or len(body) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"an array of {shape} {dtype} in {len(body)} B")
    return np.frombuffer(body, dtype).reshape(shape)
