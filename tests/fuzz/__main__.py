"""``python -m tests.fuzz [HARNESS...]``: fuzz, one harness after the other, each in a process of its own.

An input that fails is printed as a line for its corpus, with what it did; exit code 1. ``--out FILE`` keeps the figures, in the
form of ``docs/results``; with ``--until MINUTES`` it adds to those that are there, slice by slice and the least fuzzed first,
until each harness has had so many minutes of processor time; one with a finding rests until it is named, as mended. It may be
stopped at any moment. ``--reach INPUTS`` says how soon drawn inputs reach the lines of the parsers that they reach at all.
``--collect`` begins the corpora of harnesses that have none; ``--page`` writes ``docs/fuzzing.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scripts.bench.result import frame, now, source
from tests.fuzz import native
from tests.fuzz.harness import HARNESSES, FuzzResult, collect, fuzz, reach
from tests.fuzz.table import PAGE, everything, written

MINUTES = float(os.environ.get("FUZZ_MINUTES", "2"))
EACH = 30  # minutes that the figure is for
MANY = "delta-decoder"  # whose inputs are counted in millions
PATIENCE = 300.0  # seconds more than asked for, until a harness counts as hanging


def fuzz_one(name: str, seconds: float, seed: int, least: int) -> FuzzResult:
    """In this process."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        if name in native.NATIVE:
            return native.fuzz(native.NATIVE[name], Path(folder), seconds, seed, least)
        return fuzz(HARNESSES[name], Path(folder), seconds, seed)


def fuzz_apart(name: str, seconds: float, seed: int, least: int) -> FuzzResult:
    """In a process of its own: what ends it is a finding."""
    begun = time.monotonic()
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.fuzz", name, "--here", "--seconds", str(seconds)]
    command += ["--seed", str(seed), "--least", str(least)]
    limit = None if least else seconds + PATIENCE
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return FuzzResult(0, time.monotonic() - begun, f"seed {seed}", "it hangs")
    if done.returncode:
        return FuzzResult(0, time.monotonic() - begun, f"seed {seed}", f"{done.returncode}: {done.stderr[-3000:]}")
    return FuzzResult(**json.loads(done.stdout.splitlines()[-1]))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="HARNESS", help=f"default: all of {', '.join(everything())}")
    parser.add_argument("--seconds", type=float, default=60 * MINUTES, help="of each (default: FUZZ_MINUTES, 2)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first round (default: the time)")
    parser.add_argument("--least", type=int, default=0, help=f"inputs of {MANY}, however long that takes")
    parser.add_argument("--out", type=Path, help="where the figures are kept")
    parser.add_argument("--until", type=float, metavar="MINUTES", help="add to --out until each has had so many")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--collect", type=int, default=0, metavar="N", help="begin corpora, from N inputs each")
    parser.add_argument(
        "--reach", type=int, default=0, metavar="INPUTS", help="add to --out which input reached new lines last"
    )
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name}")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - set(everything())):
        parser.error(f"no such harness: {', '.join(unknown)}")
    if options.page:
        PAGE.write_text(written(), encoding="utf-8")
        return 0
    names = options.names or list(everything())
    if options.collect:
        return begin_corpora(names, options.collect)
    if options.reach:
        if options.out is None:
            parser.error("--reach adds to the figures of --out FILE")
        return note_reach(names, options.reach, options.seed, options.out)
    if options.here:
        (name,) = names
        print(json.dumps(asdict(fuzz_one(name, options.seconds, options.seed, options.least))))
        return 0
    if options.until is not None:
        if options.out is None:
            parser.error("--until adds to the figures of --out FILE")
        return fuzz_until(options.until, names, options.seconds, options.seed, options.out)
    begun, rows = now(), list[dict[str, Any]]()
    for name in names:
        rows.append(fuzz_row(name, options.seconds, options.seed, options.least if name == MANY else 0))
        if options.out is not None:
            keep(options.out, figures(rows, options.seed, begun, options.seconds / 60))
    return int(any(row["finding"] for row in rows))


def fuzz_row(name: str, seconds: float, seed: int, least: int = 0) -> dict[str, Any]:
    """Its figures: ``minutes`` of processor time, as others may use the machine."""
    before = _processor_seconds()
    found = fuzz_apart(name, seconds, seed, least)
    spent = _processor_seconds() - before
    print(f"{name}: {found.inputs:,} inputs in {spent:.0f} s{': FOUND' if found.error else ''}", flush=True)
    if found.error:
        print(f"{found.finding}\n{found.error}", flush=True)
    return {"harness": name, "inputs": found.inputs, "minutes": round(spent / 60, 2), "finding": found.finding}


def fuzz_until(minutes: float, names: list[str], seconds: float, seed: int, out: Path) -> int:
    """Add slices of ``seconds`` to the rows of ``out`` until each harness has had ``minutes``. One with a finding rests."""
    kept = json.loads(out.read_text(encoding="utf-8")) if out.exists() else None
    rows = {row["harness"]: row for row in (kept["detail"]["harnesses"] if kept else [])}
    begun, commit = now(), source()["commit"][:12]
    empty = {"inputs": 0, "minutes": 0.0, "finding": "", "commits": []}
    rows = {name: {**empty, "harness": name, **rows.get(name, {})} for name in everything()}
    if names != list(everything()):
        for name in names:
            rows[name]["finding"] = ""
    while due := [rows[name] for name in names if rows[name]["minutes"] < minutes and not rows[name]["finding"]]:
        row = min(due, key=lambda one: one["minutes"])
        seed += 1
        part = fuzz_row(row["harness"], seconds, seed)
        row["inputs"] += part["inputs"]
        row["minutes"] = round(row["minutes"] + max(part["minutes"], 0.01), 2)
        row["finding"] = part["finding"]
        row["commits"] = sorted({*row["commits"], commit})
        keep(out, figures(list(rows.values()), seed, begun, minutes))
    return int(any(row["finding"] for row in rows.values()))


def note_reach(names: list[str], inputs: int, seed: int, out: Path) -> int:
    """Of each harness in Python: the lines of its parsers that so many inputs reach, those that the second half of them reaches
    first, and which input reached a new one last."""
    kept = json.loads(out.read_text(encoding="utf-8"))
    rows = {row["harness"]: row for row in kept["detail"]["harnesses"]}
    for name in (name for name in names if name in HARNESSES):
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            firsts = reach(HARNESSES[name], Path(folder), inputs, seed)
        late = sum(first > inputs // 2 for first in firsts)
        rows[name]["reach"] = {"inputs": inputs, "lines": len(firsts), "late": late, "last": max(firsts, default=0)}
        print(f"{name}: {rows[name]['reach']}", flush=True)
        keep(out, kept)
    return 0


def keep(out: Path, result: dict[str, Any]) -> None:
    """Whole, or as it was."""
    part = out.with_suffix(".part")
    part.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    part.replace(out)


def _processor_seconds() -> float:
    """Of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def begin_corpora(names: list[str], inputs: int) -> int:
    """Of the harnesses that have none."""
    for name in names:
        one = everything()[name]
        if not one.corpus.exists():
            with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
                native_one = isinstance(one, native.NativeHarness)
                lines = (native.collect if native_one else collect)(one, Path(folder), inputs)  # type: ignore[operator]
            one.corpus.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            print(f"{name}: {len(lines)} inputs, {sum(map(len, lines))} bytes", flush=True)
    return 0


def figures(rows: list[dict[str, Any]], seed: int, begun: str, minutes: float) -> dict[str, Any]:
    """The result so far; ``minutes``: that each was to have."""
    try:
        how = native.engine()
    except native.NoSanitizer as error:
        how = f"not run: {error}"
    findings = sum(bool(row["finding"]) for row in rows)
    enough = len(rows) == len(everything()) and all(row["minutes"] >= EACH for row in rows)
    detail = {
        "minutes_each": minutes,
        "first_seed": seed,
        "native": how,
        "harnesses": rows,
        "inputs": sum(row["inputs"] for row in rows),
    }
    return frame(
        "fuzzing",
        "real",
        value=findings,
        unit="harnesses with a finding",
        reference="harnesses",
        reference_value=len(everything()),
        bar=f"0, after {EACH} minutes each",
        holds=findings == 0 and enough,
        detail=detail,
        quick=False,
        begun=begun,
    )


if __name__ == "__main__":
    sys.exit(main())
