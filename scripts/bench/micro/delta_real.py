"""Deltas of real snapshots: ``python -m scripts.bench.micro.delta_real FOLDER`` (JSON on standard output).

FOLDER holds versions in the order of their names (numbers count as numbers): files ``*.safetensors``, or folders with such
files in them, as the exports of a trainer are. For each two that follow one another: changed share,
bytes on the wire, entropy bound; in all, by layer and by tensor (``--tensors``). Every change is applied and compared bit by
bit. ``--cast``: float32 rounded to bf16 first, as an engine would serve it.

The bound is that of the symbols that are coded, each on its own, as they occur (:func:`.delta_synthetic.entropy_bound`): gaps
and steps of 16-bit floats; the byte planes of old XOR new, or of the new values where these have less, of others.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.api import ConfigError
from orchestrator.transfer.delta import delta_codec as delta
from orchestrator.transfer.delta.delta_format import open_change
from scripts.bench.micro.delta_synthetic import COO_BYTES, Bytes, bf16, entropy_bound
from scripts.bench.result import frame, now

NAME = "delta-real"
_BAR = 1.4
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "I64": "int64", "I32": "int32"}
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_SUMS = ("elements", "changed", "wire_bytes", "entropy_bytes")


def measure(folder: Path, *, cast: bool = False) -> dict[str, Any]:
    """Rows for each pair of versions. Raises ConfigError without at least two."""
    versions = sorted(
        (path for path in folder.iterdir() if path.suffix == ".safetensors" or (path.is_dir() and _files(path))),
        key=lambda path: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.name)],
    )
    if len(versions) < 2:
        raise ConfigError("folder", str(folder), "needs two versions at least: *.safetensors, or folders with them")
    pairs = []
    for before, after in pairwise(versions):
        old = dict(_tensors(before, cast))
        tensors = []
        for name, (dtype, new) in _tensors(after, cast):
            if name not in old or old[name][0] != dtype or old[name][1].size != new.size:
                raise ConfigError("folder", str(after), f"tensor {name} is not that of {before.name}")
            tensors.append({"tensor": name, "dtype": dtype, **_row(old[name][1], new, dtype)})
        pairs.append(
            {"from": before.name, "to": after.name, **_total(tensors), **_by_layer(tensors), "tensors": tensors}
        )
    return {"folder": folder.name, "cast": cast, "pairs": pairs, **_total([row for p in pairs for row in p["tensors"]])}


def _row(old: Bytes, new: Bytes, dtype: str) -> dict[str, Any]:
    change = delta.encode_change(old, new, dtype)
    base = old.copy()
    delta.apply_change(change.data, base)
    width = old.size // max(1, open_change(change.data).header.elements)
    words = f"<u{width}" if width else "u1"
    changed = int(np.count_nonzero(old.view(words) != new.view(words)))
    if width == 2:
        bound = entropy_bound(old.view(np.uint16), new.view(np.uint16))["bound"] * changed
    else:
        bound = min(_planes_bound(old ^ new, width), _planes_bound(new, width)) if changed else 0.0
    return {
        "elements": old.size // max(width, 1),
        "changed": changed,
        "encoding": change.encoding,
        "wire_bytes": change.data.nbytes,
        "entropy_bytes": bound,
        "bit_exact": bool(np.array_equal(base, new)),
    }


def _planes_bound(values: Bytes, width: int) -> float:
    """Bytes that a coder needs which knows how often each byte occurs in each plane."""
    total = 0.0
    for plane in values.reshape(-1, max(width, 1)).T:
        counts = np.bincount(plane, minlength=256)
        shares = counts[counts > 0] / max(plane.size, 1)
        total -= plane.size * float((shares * np.log2(shares)).sum()) / 8
    return total


def _total(tensors: list[dict[str, Any]]) -> dict[str, Any]:
    total = {key: sum(row[key] for row in tensors) for key in _SUMS}
    changed = max(total["changed"], 1)
    return {
        **total,
        "density": total["changed"] / max(total["elements"], 1),
        "bytes_per_change": total["wire_bytes"] / changed,
        "entropy_per_change": total["entropy_bytes"] / changed,
        "over_bound": total["wire_bytes"] / max(total["entropy_bytes"], 1.0),
        "coo_per_change": float(COO_BYTES),
        "bit_exact": all(row["bit_exact"] for row in tensors),
    }


def _by_layer(tensors: Iterable[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Density of the weights outside of layers, and of each layer."""
    sums: dict[str, list[int]] = {}
    for row in tensors:
        found = _LAYER.search(row["tensor"])
        place = f"layer {found[1]}" if found else row["tensor"].removeprefix("model.").removesuffix(".weight")
        held = sums.setdefault(place, [0, 0])
        held[0] += row["changed"]
        held[1] += row["elements"]
    return {"density_by_layer": {place: changed / elements for place, (changed, elements) in sums.items()}}


def _files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def _tensors(version: Path, cast: bool) -> Iterator[tuple[str, tuple[str, Bytes]]]:
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
            dtype = _DTYPES.get(entry["dtype"], entry["dtype"])
            if cast and dtype == "float32":
                dtype, content = "bfloat16", bf16(content.view(np.float32)).view(np.uint8)
            yield name, (dtype, content)


def main() -> None:
    """Print what :func:`measure` finds, as it was published and cast to bf16."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tensors", action="store_true", help="each tensor of each pair, too")
    arguments, begun = parser.parse_args(), now()
    found = {name: measure(arguments.folder, cast=cast) for name, cast in (("as_published", False), ("bfloat16", True))}
    for measured in found.values() if not arguments.tensors else ():
        for pair in measured["pairs"]:
            pair["encodings"] = _count(row["encoding"] for row in pair.pop("tensors"))
    made = json.dumps(result(found, begun))
    print(json.dumps(json.loads(made, parse_float=lambda text: float(f"{float(text):.5g}")), indent=1))


def result(found: dict[str, dict[str, Any]], begun: str) -> dict[str, Any]:
    """The figure, of what :func:`measure` found ``as_published`` and as ``bfloat16``."""
    value = found["bfloat16"]["over_bound"]
    return frame(
        NAME,
        "real",
        value=value,
        unit="bytes on the wire over the entropy bound, all pairs, cast to bf16",
        reference="the entropy bound",
        reference_value=1.0,
        bar=f"<= {_BAR} x the bound, every change bit-exact",
        holds=value <= _BAR and all(one["bit_exact"] for one in found.values()),
        detail=found,
        quick=False,
        begun=begun,
    )


def _count(words: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    return counts


if __name__ == "__main__":
    main()
