"""Writes ``simulated.md`` of a results folder: ``python -m scripts.bench.papers.simulated_page FOLDER``.

It is made of the JSON files beside it: every row of every simulated figure, printed number and ours.
Nothing but the words is written here; longer reasons are a page of their own, ``simulated_why.md``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestrator.sim.ablation import PLANNED
from scripts.bench.papers.calibration import calibrated_by, played_before
from scripts.bench.papers.refusals import refused_for
from scripts.bench.papers.rollpacker_why import reasons

_HEAD = """# Simulated figures beside the printed ones

Made by `python -m scripts.bench.papers.simulated_page docs/results` from the JSON files beside it. Everything here is
**simulated** (virtual time, the same pipeline), but for the first table, where real engine steps are predicted. How it counts:
[the simulator](../simulator.md). Where a row has an interval it is the mean over seeds, with the 95 % of Student's t.
**Calibration**: a constant was taken from what the row is compared with (`scripts/bench/papers/calibration.py`), so that it
proves nothing, however near or far it is. **Assumed**: rows that are played with shares of lengths from recorded sets, ASSUMED.
"""
_BEFORE = """
Played before lengths had shares of recorded sets, and RollArt's responses the sizes of its own times: not of the workload as it
is now ([the simulator](../simulator.md)), and not played again since.
"""
_WHY = "\nWhy ours differ: [the reasons](simulated_why.md).\n"
_BINDS = """
Beside each paper's own workload stand as many serving GPUs as it has of its own, which ROSE's set and all together may borrow.
*Training allows*: if nothing but the trainer took time, on the GPUs that train in the set's best setting. Other sets, and all
settings, are in the JSON.
"""
_ROLLPACKER = """
### Why RollPacker's differ

Every row that is more than 5 % off; numbers are of the run that the table shows, three in a row of 7B/8k, 14B/16k
and 32B/32k.
"""
_HEDDLE = "our degrees|any equal degree"
_TOGETHER = "best single set|, all policies: "
_ROSE = Path(__file__).with_name("rose_why.txt")  # of the committed rose-figures.json


def _binding(workloads: dict[str, Any]) -> list[str]:
    """Of all policies together and the best single set: what the trainer allows; and what each paper's policies add."""
    if not workloads:
        return []
    lines = [
        "| workload | set | its best setting | tokens/s | training allows | share |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    added = ["| workload | policies added one after the other, tokens/s |", "| --- | --- |"]
    for name, found in workloads.items():
        for chosen in (found["best_single"], "all"):
            runs, rate = found["sets"][chosen], found["tokens_per_s"][chosen]
            setting = max(runs, key=lambda one: float(runs[one]["tokens_per_s"]))
            most = found["training_binds_at"][chosen]
            what = f"{name}'s, 1/{found['scale']} | {chosen} | {setting}"
            lines.append(f"| {what} | {rate:,.0f} | {most:,.0f} | {rate / most:.2f} |")
        said = "; ".join(f"{one['policies']} {one['tokens_per_s']:,.0f}" for one in found["ladder"])
        added.append(f"| {name}'s | {said} |")
    return [_BINDS, "\n".join(added) + "\n", "\n".join(lines) + "\n"]


def page(folder: Path) -> str:
    """The text. Files that are not there are left out."""
    parts = [_HEAD]
    error = _load(folder, "sim-error")
    if error:
        parts += _sim_error(error)
    if roofline := _load(folder, "roofline-error"):
        parts += _roofline_error(roofline)
    for name, title in (
        ("modes", "The ladder of modes (`bench modes`)"),
        ("affinity", "Hardware affinity (`bench affinity`)"),
        ("rollart-figures", "RollArt's other figures (`bench rollart-figures`)"),
        ("rollpacker-figures", "RollPacker's figures (`bench rollpacker-figures`)"),
        ("heddle", "Heddle's comparison (`bench heddle`)"),
        ("borrowed", "Borrowed serving devices, ROSE's figure 14 (`bench borrowed`)"),
        ("rose-figures", "ROSE's other figures (`bench rose-figures`)"),
        ("all-together", "All policies together (`bench all-together`)"),
    ):
        found = _load(folder, name)
        if found:
            scale = found["detail"].get("scale")
            part = {1: "Whole cluster and batch", 2: "Half of cluster and batch"}.get(
                scale, f"One {scale}th of cluster and batch"
            )
            note = f" {part}." if scale else ""
            parts.append(f"\n## {title}\n\nValue {found['value']:.3f}{_seeds(found['detail'])} ({found['unit']}); "
                         f"bar {found['bar']}: {'held' if found['holds'] else '**not held**'}.{note}\n")  # fmt: skip
            rows = found["detail"]["rows"]
            if name == "heddle":  # the ablation is in the file
                rows = [one for one in rows if one["printed"] != "not printed" or re.search(_HEDDLE, one["what"])]
            if name == "all-together":
                best = [
                    f"{one}'s workload: all policies over {by}'s set"
                    for one, by in found["detail"]["best_single"].items()
                ]
                rows = [one for one in rows if one["what"] in best or re.search(_TOGETHER, one["what"])]
            if played_before(name, rows):
                parts.append(_BEFORE)
            parts.append(_rows(name, rows))
            parts += _binding(found["detail"].get("workloads", {}))
            parts += [f"Not played: {what}: {why}.\n" for what, why in found["detail"].get("not_played", {}).items()]
            if name == "rollpacker-figures" and "search" in found["detail"]:  # the full form
                parts.append("\n".join([_ROLLPACKER, *reasons(found), *_searched(found["detail"])]) + "\n")
            if name == "rose-figures":
                parts.append(_ROSE.read_text(encoding="utf-8"))
            elif "runs" in found["detail"]:
                parts.append(_runs(found["detail"]["runs"]))
    ablation = _load(folder, "ablation")
    if ablation:
        parts.append("\n## One feature away at a time (`rl-coserve sim --ablate`)\n\n![ablation](ablation.svg)\n")
        parts.append("| without | step time over all on | 95 %, over seeds | by seed, s |\n| --- | --- | --- | --- |")
        for one in ablation:
            spread = "{:.3f} to {:.3f}".format(*one["interval"]) if one["without"] else ""
            seconds = ", ".join(f"{value:.1f}" for value in one["step_seconds"])
            parts.append(f"| {one['without'] or '(all on)'} | {one['over_all_on']:.3f} | {spread} | {seconds} |")
        last = (
            "; the third, with its planner, 32B/32k"
            if any(one["without"] == PLANNED[0].name for one in ablation)
            else ""
        )
        parts.append(f"\nThe first base is RollArt's, a 16th of it; the second is RollPacker's 7B/8k, a 4th{last}.")
    parts.append(_WHY)
    return "\n".join(parts)


def _searched(detail: dict[str, Any]) -> list[str]:
    """What the search over eta found, which nothing is printed of."""
    found = detail["search"]
    said = ", ".join(
        f"{eta}: {tried:.1f} ({found['rollout_seconds_kept'][eta]:.1f})"
        for eta, tried in found["rollout_seconds_tried"].items()
    )
    return [
        f"- **The search over eta** (`rollout.rounds.search`, 6.3; 7B/8k, one {found['scale']}th) takes "
        f"{found['rounds']} rounds and stays with "
        f"{found['stays_with']}. Seconds of rollout a batch where it was tried (and where it was kept for 24 "
        f"steps): {said}."
    ]


def _load(folder: Path, name: str) -> Any:
    file = folder / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def _seeds(detail: dict[str, Any]) -> str:
    """What stands behind a value over seeds; nothing for one seed."""
    found = detail.get("value_by_seed")
    if not found or not found["interval"]:
        return ""
    low, high = found["interval"]
    return f", the worst of {len(found['by_seed'])} seeds (mean {found['mean']:.3f}, {low:.3f} to {high:.3f})"


def _rows(figure: str, rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| figure | printed | simulated | outside by | source |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        off = f"{100 * row['off']:+.0f} %" if row["off"] else "inside"
        if row["printed"] == "not printed":
            off = ""
        elif calibrated_by(figure, row["what"]):
            off = "calibration" if off == "inside" else f"calibration, {off}"
        ours = f"{row['simulated']:.3g}"
        if row.get("interval"):
            low, high = row["interval"]
            ours += f" ({low:.3g} to {high:.3g})"
        what = row["what"].removeprefix("calibration: ")
        if why := refused_for(figure, f"{what} {row['source']}"):
            what += f" (refused by a real run: {why})"
        if row.get("assumed"):
            what += " (assumed)"
        lines.append(f"| {what} | {row['printed']} | {ours} | {off} | {row['source']} |")
    return "\n".join(lines) + "\n"


def _runs(runs: dict[str, Any]) -> str:
    lines = [
        "| model | rung | s a step | of it training | tokens a step | stale a step |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for model, ladder in runs.items():
        for rung, one in ladder.items():
            lines.append(
                f"| {model} | {rung} | {one['step_seconds']:.0f} | {one['train_seconds']:.0f} | "
                f"{one['tokens_per_step']:,.0f} | {one['evicted_stale_per_step']:.0f} |"
            )
    return "\n".join(lines) + "\n"


def _sim_error(found: dict[str, Any]) -> list[str]:
    detail = found["detail"]
    papers, rollouts = detail["papers"], detail["rollouts"]
    whole = ", ".join(f"{100 * one['error']:+.1f} %" for one in rollouts) or "not measured"
    lines = [
        "\n## The simulator's own error (`bench sim-error`)\n",
        f"Real engine (tiny Qwen3, this machine), sizes held back: largest error {100 * found['value']:.1f} %, "
        f"mean {100 * detail['held_back_mean']:.1f} %, decode steps at most "
        f"{100 * detail['held_back_decode_max']:.1f} %; "
        f"the bar is 5 %: {'held' if found['holds'] else '**not held**'}. Medians of {detail['samples']} rounds. "
        f"A whole rollout that was held back: {whole}. "
        f"Absolute numbers of the papers, median error {100 * papers['median_error']:.0f} %:\n",
        "| number | predicted | printed | error | source | note |\n| --- | --- | --- | --- | --- | --- |",
    ]
    if played_before("sim-error", papers["rows"]):
        lines.insert(1, _BEFORE)
    for row in detail["papers"]["rows"]:
        older = played_before("sim-error", [row])  # than the constants of what it is played with
        flagged = row["calibration"] if older else calibrated_by("sim-error", row["what"])
        error = "calibration" if flagged else f"{100 * row['error']:+.0f} %"
        numbers = f"{row['predicted']:.3g} | {row['printed']:.3g} | {error}"
        what = f"{row['what']} ({row['unit']}{', assumed' if row.get('assumed') else ''})"
        lines.append(f"| {what} | {numbers} | {row['source']} | {row['note']} |")
    return lines


def _roofline_error(found: dict[str, Any]) -> list[str]:
    about = (
        f"What GPU figures below are played with is another model, a roofline. Beside {found['detail']['samples']} speeds of "
        f"engines that others published, of which no constant was taken, its median error is {100 * found['value']:.0f} %: "
        "[what that means](../simulator.md#how-far-it-is-off).\n"
    )
    lines = [
        "| published speeds | rows | median of the absolute errors | least | most |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {group} | {one['rows']} | {100 * one['median']:.0f} % | {100 * one['least']:+.0f} % | {100 * one['most']:+.0f} % |"
        for group, one in found["detail"]["groups"].items()
    ]
    return ["\n## The roofline's own error (`bench roofline-error`)\n", about, "\n".join(lines) + "\n"]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.papers.simulated_page", description=__doc__)
    parser.add_argument("folder", nargs="?", default="docs/results")
    folder = Path(parser.parse_args(arguments).folder)
    (folder / "simulated.md").write_text(page(folder), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
