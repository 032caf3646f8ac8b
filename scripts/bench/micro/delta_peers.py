"""The same weight change in vLLM's sparse_nccl patches, in safetensors files, and in ours: bytes, and seconds on each side.

A quarter of one layer of Qwen3-8B (48 million weights, made up: :mod:`scripts.bench.micro.delta_synthetic`) with 1 and 5 % of
the weights changed. What is measured, and what stands in for NCCL, is in
``scripts/bench/probes/vllm/formats_probe.py``. Seconds are the best of the rounds, one thread, processor and wall time.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.transfer.delta.native_codec import native_status
from scripts.bench.micro.delta_synthetic import LAYOUTS, Pool
from scripts.bench.probes.probe_run import run_probe
from scripts.bench.result import frame, now

NAME = "delta-peers"
DENSITIES = (0.01, 0.05)
_PARTS = 4  # of each tensor of the layer, one


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure. ``value``: bytes of ours over those of vLLM's patches, the worse of the densities."""
    begun = now()
    rows = []
    for density in DENSITIES[:1] if quick else DENSITIES:
        found = _probe(density, _PARTS * (8 if quick else 1), 2 if quick else 5)
        size = {name: found[name] for name in ("elements", "changed", "tensors")}
        rows += [{"density": density, **size, **row} for row in found["rows"]]
    by = {(row["density"], row["format"]): row["bytes"] for row in rows}
    ratios = [by[density, "ours"] / by[density, "vllm-sparse-nccl"] for density, name in by if name == "ours"]
    return frame(
        NAME,
        "real code of both sides, made-up weights; a recorder in the place of NCCL",
        value=max(ratios),
        unit="bytes of ours over bytes of the same change in the peer's format",
        reference="vLLM sparse_nccl",
        reference_value=1.0,
        bar="< 1, all bit-exact",
        holds=max(ratios) < 1 and all(row["bit_exact"] for row in rows),
        detail={
            "native": native_status()["live"],
            "rows": rows,
            "samples": len(rows),
            "load_average": os.getloadavg(),
        },
        quick=quick,
        nonce=nonce,
        begun=begun,
    )


def _probe(density: float, parts: int, rounds: int) -> dict[str, Any]:
    pool = Pool(density)
    layer = [item for item in LAYOUTS["qwen3-8b"].tensors(10**6) if ".layers.0." in item[0]]
    layout = [(name, max(count // parts, 1)) for name, count in layer]
    cuts = [pool.cut(count) for _, count in layout]
    with tempfile.TemporaryDirectory(prefix="rl-coserve-peers-") as folder:
        (Path(folder) / "layout.json").write_text(json.dumps(layout))
        for side, name in enumerate(("old.npy", "new.npy")):
            np.save(Path(folder) / name, np.concatenate([cut[side] for cut in cuts]))
        return run_probe("formats", [folder, str(rounds)])
