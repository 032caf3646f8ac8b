"""Time to encode and to apply a change of weights; `make bench` times it (the same code as ``rl-coserve bench delta-speed``)."""

from __future__ import annotations

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from orchestrator.transfer.delta import delta_codec as delta
from scripts.bench.micro.delta_synthetic import Bytes, Pool

WEIGHTS = 1 << 20


@pytest.fixture(scope="module")
def weights() -> tuple[Bytes, Bytes]:
    old, new = Pool(0.01, WEIGHTS).cut(WEIGHTS)
    return old.view(np.uint8), new.view(np.uint8)


def test_a_change_is_encoded(benchmark: BenchmarkFixture, weights: tuple[Bytes, Bytes]) -> None:
    old, new = weights
    change = benchmark.pedantic(delta.encode_change, (old, new, "bfloat16"), {"threads": 1}, rounds=50, warmup_rounds=1)
    assert 0.005 < change.changed / WEIGHTS < 0.02


def test_a_change_is_applied(benchmark: BenchmarkFixture, weights: tuple[Bytes, Bytes]) -> None:
    old, new = weights
    change, base = delta.encode_change(old, new, "bfloat16"), old.copy()

    def fresh() -> tuple[tuple[Bytes, Bytes], dict[str, int]]:
        base[:] = old
        return (change.data, base), {"threads": 1}

    log = benchmark.pedantic(delta.apply_change, setup=fresh, rounds=50)
    assert np.array_equal(base, new)
    delta.undo_change(log)
    assert np.array_equal(base, old)
