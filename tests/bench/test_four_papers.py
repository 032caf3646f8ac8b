"""The run with policies of all four papers, killed and resumed, in its short form: real engines beside a real serving engine."""

from __future__ import annotations

import pytest

from scripts.bench.micro import four_papers

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(1200)]


def test_one_run_with_policies_of_all_four_papers_is_killed_resumed_and_ends_with_closed_books() -> None:
    found = four_papers.run(quick=True, nonce="n")
    detail = found["detail"]
    assert detail["wrong"] == []
    assert detail["features"]["resumed"]["shown"]
    # In four steps nothing of these is bound to happen.
    rare = {"tail batching", "prediction and priority", "KV that moves", "adaptive timeouts", "async, alpha 1"}
    assert set(detail["silent"]) <= rare
