"""A tensor over memory that torch has not allocated, by DLPack, the public way to do so.

Guarantees: nothing is copied, and nothing is freed with the tensor: the memory must outlive it. For CUDA the device is told,
not guessed from the pointer, so that addresses may be without memory.
"""

from __future__ import annotations

import ctypes
from typing import Any

_CPU, _CUDA = 1, 2  # DLDeviceType
_INT8 = (0, 8, 1)  # DLDataType: int, bits, lanes
_NAME = b"dltensor"


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("dimensions", ctypes.c_int32),
        ("type", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_alive: list[Any] = []  # torch reads the structure until it drops the tensor, and is told of no deleter


def byte_tensor(address: int, size: int, *, cuda: int | None) -> Any:
    """int8[size] at this address: of this host, or of CUDA device ``cuda``."""
    import torch
    from torch.utils.dlpack import from_dlpack

    if cuda is not None:
        torch.cuda.init()  # a process may have had no reason to do so yet
    shape = (ctypes.c_int64 * 1)(size)
    device = _Device(_CPU, 0) if cuda is None else _Device(_CUDA, cuda)
    managed = _Managed(_Tensor(address, device, 1, _Type(*_INT8), shape, None, 0), None, None)
    _alive.append((shape, managed))
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return from_dlpack(new(ctypes.addressof(managed), _NAME, None))
