"""The Triton kernels in Triton's interpreter (a process of its own): exact against the NumPy reference, every bit pattern."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MISSING = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]

PROBE = """
import numpy as np, torch
from orchestrator.api import ConfigError
from orchestrator.transfer.delta import delta_codec as delta
from orchestrator.transfer.delta.reference_codec import steps_between
from megatron_rlplugin.weights import gpu_delta

random = np.random.default_rng(0)
odd = np.array([0, 0x8000, 1, 0x8001, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x7FFF], np.uint16)
for count in (0, 1, 4097, 8192):
    for density in (0, 0.01, 1):
        old = random.integers(0, 1 << 16, count).astype(np.uint16)
        other = random.choice(odd, count)
        new = np.where(random.random(count) < density, other, old)
        before, after = (torch.from_numpy(words.view(np.int16).copy()).view(torch.bfloat16) for words in (old, new))
        positions, steps = gpu_delta.gather_steps(before, after)
        where = np.flatnonzero(old != new)
        assert np.array_equal(positions.numpy(), where), (count, density)
        assert np.array_equal(steps.numpy(), steps_between(old[where], new[where])), (count, density)
        packed = delta.encode_steps(positions.numpy(), steps.numpy(), count)
        base = old.copy()
        delta.apply_change(packed.data, base.view(np.uint8))
        assert np.array_equal(base, new)
        gpu_delta.scatter_steps(before, positions, steps)
        assert torch.equal(before.view(torch.int16), after.view(torch.int16))
        gpu_delta.scatter_steps(before, positions, steps, back=True)
        assert np.array_equal(before.view(torch.int16).numpy().view(np.uint16), old)
for bad in (torch.zeros(4), torch.zeros(4, 4, dtype=torch.bfloat16).t()[:2]):
    try:
        gpu_delta.gather_steps(bad, bad)
    except ConfigError:
        continue
    raise AssertionError("was taken")
print("exact")
"""


@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
def test_the_kernels_gather_and_scatter_what_the_reference_does() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=200, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("exact\n")
