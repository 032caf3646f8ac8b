"""The native library of the KV pool (``csrc/pages.c``, ``csrc/vmm.c``), loaded by ctypes; calls release the interpreter lock.

Built when the package is installed. Without it there is no pool: :func:`library` says why and what to do.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

from orchestrator.api import RunError

ABI = 6
_PATH = Path(__file__).with_name("_pages.ctypes.so")
TENANTS, WORDS, NAME, CONTROLS, RANKS = 16, 14, 64, 8, 8
DRIVER, FULL_DEVICE, PAGE_SIZE, NO_DEVICE, NO_LIBRARY = range(-34, -29)
BUSY, FOREIGN, VERSION, SHAPE, FULL, NOT_OWNER, MAPPED, GONE, OLD, SYSTEM, STUCK, NAMESPACE = range(-10, -22, -1)

_P, _U64, _INT, _I64 = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int, ctypes.c_int64


class TenantRow(ctypes.Structure):
    """``rlc_tenant``."""

    _fields_ = (
        ("role", ctypes.c_uint32),
        ("pid", ctypes.c_int32),
        ("name", ctypes.c_char * NAME),
        ("generation", _U64),
        ("budget", _U64),
        ("revision", _U64),
        ("used", _U64),
        ("sequence", _U64),
        ("words", _U64 * WORDS),
        ("started", _U64 * RANKS),
        ("members", ctypes.c_int32 * RANKS),
        ("attached", ctypes.c_uint32),
        ("broken", ctypes.c_uint32),
    )


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "rlc_pool_abi": (_INT, []),
    "rlc_pool_open": (_INT, [ctypes.c_char_p, _U64, _U64, _INT, ctypes.c_char_p, _U64, _U64, _INT, _P, _P]),
    "rlc_pool_join": (_INT, [_P, ctypes.c_char_p, _INT, _INT, _U64]),
    "rlc_pool_attach": (_INT, [_P, _INT, _U64, _INT, ctypes.c_char_p, _INT]),
    "rlc_pool_acquire": (_I64, [_P, _U64, _INT, _U64, _P]),
    "rlc_pool_release": (_INT, [_P, _P, _U64]),
    "rlc_pool_renew": (_INT, [_P, _P, _U64, _U64]),
    "rlc_pool_expired": (_I64, [_P, _U64, _P, _U64]),
    "rlc_pool_share": (_INT, [_P, _P]),
    "rlc_pool_budget": (_INT, [_P, _INT, _U64, _U64]),
    "rlc_pool_headroom": (_INT, [_P, _U64]),
    "rlc_pool_reap": (_INT, [_P]),
    "rlc_pool_leave": (_INT, [_P]),
    "rlc_pool_snapshot": (_INT, [_P, _P, _P, _P, _P]),
    "rlc_pool_publish": (_INT, [_P, _P]),
    "rlc_pool_read": (_INT, [_P, _INT, _P]),
    "rlc_pool_holder": (_INT, [_P]),
    "rlc_pool_control": (_INT, [_P, _INT, _U64, _INT]),
    "rlc_pool_controls": (_INT, [_P, _P]),
    "rlc_pool_trim": (_I64, [_P, _U64]),
    "rlc_pool_mark": (_INT, [_P, _P, _U64, _INT]),
    "rlc_pool_device": (_INT, [_P, _P]),
    "rlc_pool_keep": (_INT, [_P]),
    "rlc_pool_kept": (_INT, [_P]),
    "rlc_cuda_why": (ctypes.c_char_p, []),
    "rlc_cuda_open": (_INT, [ctypes.c_char_p, _INT, _U64, _P]),
    "rlc_cuda_facts": (_INT, [_P, _P, _P, _P]),
    "rlc_cuda_create": (_INT, [_P, _U64, _P, _P]),
    "rlc_cuda_release": (_INT, [_P, _P, _U64]),
    "rlc_cuda_export": (_INT, [_P, _U64, _P]),
    "rlc_cuda_import": (_INT, [_P, _P, _U64, _P]),
    "rlc_cuda_reserve": (_INT, [_P, _U64, _P]),
    "rlc_cuda_free": (_INT, [_P, _U64, _U64]),
    "rlc_cuda_fill": (_INT, [_P, _U64, _P, _U64, _U64]),
    "rlc_cuda_map": (_INT, [_P, _U64, _P, _P, _U64, _U64]),
    "rlc_cuda_unmap": (_INT, [_P, _U64, _P, _U64, _U64]),
    "rlc_cuda_zero": (_INT, [_P, _U64, _P, _U64]),
    "rlc_cuda_settle": (_INT, [_P]),
    "rlc_range_reserve": (_INT, [_U64, _P]),
    "rlc_range_free": (_INT, [_P, _U64]),
    "rlc_range_map": (_I64, [_P, _P, _P, _P, _U64, _INT]),
    "rlc_range_unmap": (_INT, [_P, _P, _P, _P, _U64]),
}


@cache
def quick_library() -> ctypes.PyDLL:
    """The same, for calls that never wait: they keep the interpreter lock, which another thread might not give back for
    milliseconds."""
    library()  # which says what is wrong with it
    found = ctypes.PyDLL(str(_PATH), use_errno=True)
    _declare(found)
    return found


@cache
def library() -> ctypes.CDLL:
    """The library. Raises RunError where it is missing or of another version."""
    fix = "install the package again, with a C compiler"
    if not _PATH.exists():
        raise RunError(f"the KV pool needs its native library, which was not built: {fix}")
    found = ctypes.CDLL(str(_PATH), use_errno=True)
    _declare(found)
    if (version := found.rlc_pool_abi()) != ABI:
        raise RunError(f"the KV pool's native library has version {version}, this package needs {ABI}: {fix}")
    return found


def _declare(found: ctypes.CDLL) -> None:
    fix = "install the package again, with a C compiler"
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(found, name, None)
        if function is None:
            raise RunError(f"the KV pool's native library has no {name}: {fix}")
        function.restype, function.argtypes = result, arguments
    for name, arguments in (("rlc_pool_close", [_P]), ("rlc_cuda_close", [_P]), ("rlc_cuda_written", [_P, _P, _P])):
        getattr(found, name).restype, getattr(found, name).argtypes = None, arguments


def system_error() -> OSError:
    """What the last call's ``errno`` says."""
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
