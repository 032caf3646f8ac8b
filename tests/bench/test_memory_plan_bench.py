"""The benchmark of memory plans: its table stands in the page as the command prints it, misses are told, parts become a whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from orchestrator.api import ConfigError
from scripts.bench import cells
from scripts.bench.micro import memory_plan

ROOT = Path(__file__).parents[2]


def kept() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "docs/results/memory-plan.json").read_text(encoding="utf-8"))
    return found


def test_the_table_of_the_page_is_that_of_the_result() -> None:
    assert memory_plan.table(kept()) in (ROOT / "docs/megatron.md").read_text(encoding="utf-8")


def test_a_plan_that_leaves_too_little_and_a_copy_on_the_device_are_misses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = {"commit": "c", "clean": True, "sources": "s"}
    monkeypatch.setattr(cells, "source", lambda name: dict(measured))
    detail = kept()["detail"]
    plans, rows = [dict(row) for row in detail["plans"]], [dict(row) for row in detail["calibration"]]
    parts = cells.Cells(tmp_path, memory_plan.NAME)
    for place, row in enumerate(plans):
        parts.keep(f"{place:02d}", [row])
    by_layout = {layout.name: [row for row in rows if row["layout"] == layout.name] for layout in memory_plan.REAL}
    for place, found in enumerate(by_layout.values(), len(plans)):
        with pytest.raises(ConfigError, match="are missing"):
            memory_plan.put_together(tmp_path)
        parts.keep(f"{place:02d}", found)
    whole = memory_plan.put_together(tmp_path)
    assert whole["value"] == kept()["value"]
    assert whole["holds"] is kept()["holds"]
    assert (whole["source"], whole["detail"]["in_parts"]) == (measured, True)
    (tmp_path / "kept-00.json").unlink()
    measured["sources"] = "other"
    cells.Cells(tmp_path, memory_plan.NAME).keep("00", [plans[0]])
    with pytest.raises(ConfigError, match="other sources"):
        memory_plan.put_together(tmp_path)
    plans[0] |= {"holds": False, "free_gb": 3.0}
    rows[0] |= {"holds": False, "ratio": 1.2}
    worse = memory_plan.result(plans, rows, False)
    assert worse["holds"] is False
    assert worse["value"] == 1.2
    assert worse["detail"]["misses"][-2:] == ["Qwen2.5-7B TP2 DP4: 3.0 GB free", "DP1 rank 0: 1.200"]


@pytest.mark.long
def test_the_quick_form_measures_afresh() -> None:
    found = memory_plan.run(quick=True, nonce="n")
    assert found["holds"] is None
    (row,) = found["detail"]["calibration"]
    assert 0.8 < row["ratio"] < 1.2
