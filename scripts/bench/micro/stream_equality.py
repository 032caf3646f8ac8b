"""Streamed training against whole batches over the parallel layouts: relative difference of gradients in another order.

Real Megatron-Core, ``scripts.bench.probes.megatron.equality_probe`` in a process of its own: every layout on the
installed version, one of each kind on the other supported one. In
the same order of micro-batches weights must be bit-equal after every step; otherwise the merged gradients (``main_grad``)
are compared, relative to their largest element. The value is the worst over cases, steps, ranks and versions. In each case
the gradients go to host memory and back in one step, and one more step has a NaN: it must not be taken and change nothing.
``python -m scripts.bench.micro.stream_equality FILE`` prints a result as a table.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestrator.api import RunError
from scripts.bench.probes.probe_run import run_probe
from scripts.bench.result import frame, now

NAME = "stream-equality"
OTHER_VERSION = "0.19.2"  # beside the installed one; its wheel is unzipped, see scripts/bootstrap.sh
QUICK = ("DP2, token-mean", "DP2, dist-opt, sequence-mean", "TP2, token-mean", "PP2, sequence-mean")
LIMIT = 3 * 3600.0  # seconds for all cases of a version
_BAR = 1e-6


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure. Raises RunError when a probe fails."""
    begun = now()
    if quick:
        probes, missing = measure(["--steps", "3", *named(QUICK)])
    else:  # every layout on the installed Megatron-Core, one of each kind on the other
        probes, missing = measure([], other=["--quick"])
    cases = [case for probe in probes for case in probe["cases"]]
    if not cases:
        raise RunError("no layout could be measured: " + "; ".join(probes[0]["skipped"]))
    worst = max(case["uneven"] for case in cases)
    equal = sum(case["bit_equal"] for case in cases)
    refused = not any(case["nan_taken"] or case["nan_changed"] for case in cases)
    moved = min(case["moved"] for case in cases)  # weights that do not move are equal without proof
    return frame(
        NAME,
        "real",
        value=worst,
        unit="largest difference of a merged gradient over the largest gradient, shares uneven and shuffled",
        reference="one batch on stock Megatron-Core",
        reference_value=0.0,
        bar=f"<= {_BAR:g}; weights bit-equal in the same order; a step with a NaN not taken",
        holds=worst <= _BAR and equal == len(cases) and refused and moved > 0 and not (missing and not quick),
        detail={
            "bit_equal": equal,
            "cases": len(cases),
            "missing": missing,
            "nan_refused": refused,
            "samples": sum(case["steps"] for case in cases),
            "probes": probes,
        },
        quick=quick,
        nonce=nonce,
        begun=begun,
        pids=[*(int(probe["pid"]) for probe in probes)],
    )


def named(cases: Sequence[str]) -> list[str]:
    """The probe's arguments for these cases only."""
    return [word for case in cases for word in ("--case", case)]


def measure(arguments: Sequence[str], *, other: Sequence[str] | None = None) -> tuple[list[dict[str, Any]], list[str]]:
    """(the probe's answer for the installed Megatron-Core and, asked with ``other``, the other one; versions not found)."""
    probes = [run_probe("equality", arguments, package="scripts.bench.probes.megatron", limit=LIMIT)]
    if other is None:
        return probes, []
    folder = Path(sys.prefix) / "alternates" / f"megatron-core-{OTHER_VERSION}"
    if not folder.is_dir():
        return probes, [f"megatron-core {OTHER_VERSION}: not in alternates/ of this environment"]
    probes.append(run_probe("equality", other, package="scripts.bench.probes.megatron", path=folder, limit=LIMIT))
    return probes, []


def table(result: dict[str, Any]) -> str:
    """A result of :func:`run` as Markdown, one row a case, one pair of columns a version."""
    probes = result["detail"]["probes"]
    by_case: dict[str, list[dict[str, Any] | None]] = {}
    for place, probe in enumerate(probes):
        for case in probe["cases"]:
            by_case.setdefault(case["case"], [None] * len(probes))[place] = case
    heads = [f"{what}, {_version(probe)}" for probe in probes for what in ("same order", "uneven")]
    lines = [f"| case | ranks | {' | '.join(heads)} |", "| --- | --- |" + " --- |" * len(heads)]
    for name, cases in by_case.items():
        cells = [cell for case in cases for cell in _cells(case)]
        world = next(case["world"] for case in cases if case is not None)
        lines.append(f"| {name} | {world} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cells(case: dict[str, Any] | None) -> tuple[str, str]:
    if case is None:
        return "", ""
    return "bit-equal" if case["bit_equal"] else f"**{case['weights']:.1e}**", f"{case['uneven']:.1e}"


def _version(probe: dict[str, Any]) -> str:
    return str(probe["megatron"]).partition("+")[0]


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
