"""Deltas of real snapshots: ``python -m orchestrator.bench.delta_real FOLDER`` (JSON on standard output).

FOLDER holds versions in the order of their names (numbers count as numbers): files ``*.safetensors``, or folders with such
files. For each two that follow one another: changed share, bytes on the wire, entropy bound; in all and by tensor. Every
change is applied and compared bit by bit.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.api import ConfigError
from orchestrator.bench.delta_synthetic import COO_BYTES, Bytes, entropy_bound
from orchestrator.transfer import delta

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "I64": "int64", "I32": "int32"}


def measure(folder: Path) -> dict[str, Any]:
    """Rows for each pair of versions. Raises ConfigError without at least two."""
    versions = sorted(
        (path for path in folder.iterdir() if path.suffix == ".safetensors" or (path.is_dir() and _files(path))),
        key=lambda path: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.name)],
    )
    if len(versions) < 2:
        raise ConfigError("folder", str(folder), "needs two versions at least: *.safetensors, or folders with them")
    pairs = []
    for before, after in pairwise(versions):
        old = dict(_tensors(before))
        tensors = []
        for name, (dtype, new) in _tensors(after):
            if name not in old or old[name][0] != dtype or old[name][1].size != new.size:
                raise ConfigError("folder", str(after), f"tensor {name} is not that of {before.name}")
            tensors.append({"tensor": name, "dtype": dtype, **_row(old[name][1], new, dtype)})
        pairs.append({"from": before.name, "to": after.name, **_total(tensors), "tensors": tensors})
    return {"folder": folder.name, "pairs": pairs}


def _row(old: Bytes, new: Bytes, dtype: str) -> dict[str, Any]:
    change = delta.encode(old, new, dtype)
    base = old.copy()
    delta.apply(change.data, base)
    width = old.size // max(1, delta.open_change(change.data).header.elements)
    words = f"<u{width}" if width else "u1"
    changed = int(np.count_nonzero(old.view(words) != new.view(words)))
    bound = 0.0
    if width == 2:
        bound = entropy_bound(old.view(np.uint16), new.view(np.uint16))["bound"] * changed
    return {
        "elements": old.size // max(width, 1),
        "changed": changed,
        "encoding": change.encoding,
        "wire_bytes": change.data.nbytes,
        "entropy_bytes": bound,
        "bit_exact": bool(np.array_equal(base, new)),
    }


def _total(tensors: list[dict[str, Any]]) -> dict[str, Any]:
    total = {key: sum(row[key] for row in tensors) for key in ("elements", "changed", "wire_bytes", "entropy_bytes")}
    changed = max(total["changed"], 1)
    return {
        **total,
        "density": total["changed"] / max(total["elements"], 1),
        "bytes_per_change": total["wire_bytes"] / changed,
        "entropy_per_change": total["entropy_bytes"] / changed,
        "coo_per_change": float(COO_BYTES),
        "bit_exact": all(row["bit_exact"] for row in tensors),
    }


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _tensors(version: Path) -> Iterator[tuple[str, tuple[str, Bytes]]]:
    """Name, dtype and mapped bytes (an 8-byte length, JSON, data: the safetensors format)."""
    for path in [version] if version.is_file() else _files(version):
        data = np.memmap(path, np.uint8, "r")
        length = int(data[:8].view("<u8")[0])
        if length > data.size - 8:
            raise ConfigError("folder", str(path), "is no safetensors file")
        for name, entry in json.loads(data[8 : 8 + length].tobytes()).items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            content = np.array(data[8 + length + begin : 8 + length + end])
            yield name, (_DTYPES.get(entry["dtype"], entry["dtype"]), content)


def main() -> None:
    """Print what :func:`measure` finds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    print(json.dumps(measure(parser.parse_args().folder), indent=1))


if __name__ == "__main__":
    main()
