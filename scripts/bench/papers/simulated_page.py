"""Writes ``simulated.md`` of a results folder: ``python -m scripts.bench.papers.simulated_page FOLDER``.

It is made of the JSON files beside it: every row of every simulated figure, printed number and ours.
Nothing but the words is written here; longer reasons are a page of their own, ``simulated_why.md``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestrator.sim.ablation import PLANNED
from scripts.bench.papers.rollpacker_why import reasons

_HEAD = """# Simulated figures beside the printed ones

Made by `python -m scripts.bench.papers.simulated_page docs/results` from the JSON files beside it. Everything here is
**simulated** (virtual time, the same pipeline), but for the first table, where real engine steps are predicted. How it counts:
[the simulator](../simulator.md).
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
_ROSE = """
### Why ROSE's differ

- **Figure 14, 16 GPUs, dedicated first (-7 %)**: the dedicated GPUs are filled first (the paper's cap of 16), and turns
  stay where their prefixes lie. The longest trajectories have fifteen neighbours there, which more borrowed GPUs do not
  change: 12 of 15 steps take as long to the digit beside serving as on multiplexed devices. Our rows of 8 and 16 GPUs fit
  305 s + 4,080 s / GPUs, which gives 1.72 for 24. A longer tail (sigma 1.0 for 0.5) gives 1.56, Mooncake's trace, a third
  of the time busy, 1.34; serving engines that prefill and decode (ROSE 4.3, no figure there) 1.55.
- **Figure 14, least-utilized (+9 %)**: another rule than the paper's: all GPUs are as full as one another, and a turn
  leaves its prefix for one that is emptier by more than two requests. It is 1.74, 1.36, 1.82 in these three. With the same
  `imbalance` the paper's rule gives 1.58, so the spread makes the difference. Its own 8 GPUs take 794 s, for 815 (one
  queue, moved prefixes).
- **The workload's tail**: the 75th percentile of trajectories' times is 76 to 79 % of the rollout at 8B, 48 % at 32B (2.2's
  setup); printed is at most 30 %, which cannot be had with the printed times: a trajectory ends at 32k tokens, which alone
  on an engine of ours takes 265 s (8B) and 301 s (32B). Printed times fit 324 s and 752 s that remain with any number of
  GPUs.
- **The baselines**: RLBoost+ and lambda-RL have 32 GPUs at 32B (6.1), which is 8 engines, and fetch whole weights over the
  link, in 31 and 96 s (6.3), since only ROSE ships differences.
- **32B gains too much** (2.75 over ROLL for 1.86; spot and serverless alike): for that reason. Ours fit 352 + 5,495 / engines.
- **ROSE over spot devices** (1.08 for 1.20; 32B 1.24 for 1.26): at 8B beyond 8 borrowed GPUs nothing is gained in most steps,
  so a market that leaves 10 of 16 in the mean costs little. When devices come and go is only drawn in the paper: ASSUMED.
  Spread by utilization, and the spot devices under the rule that is better for them, 1.09997 and 1.33.
- **Starting, % of GPU time**: 40 s a start, ASSUMED: 4.0 and 4.3 % of a lease of 15 minutes. The printed 6.8 to 26.1 % are
  61 to 235 s a lease, while the text says tens of seconds. Spot: 2.1 and 2.8 %, for 6.8 to 7.3.
- **Autoscaling's first tokens** (13 and 22 s for 1.2 and 2.4): 20 s to load a model, ASSUMED; a quarter of them is late.
- **Prism** (rollouts 0.99 for 1.47, 32B 1.06 for 1.36): prefixes are computed anew on borrowed devices only, which the longest
  trajectory does not visit. First tokens (0.72 s for 0.97, 0.84 for 1.63): one step before each, where Prism's overlap.
- **ROSE's own latencies**: no rollout step begins while a prompt waits, so first tokens are serving's alone and one step (32B
  -11 %); one step stands between two decode steps (TPOT 0.02 s of 0.15, printed 0.136).
- **Table 3**: the paper pins each trajectory "to a fixed rollout worker" (6.4), and does not say how it shares them out.
  Here evenly, ten or eleven on each GPU: 443 s (8B), less than the 519 s of ROSE's rule, and near "least-utilized" (433 s).
  Our trajectories differ less than the paper's, so that a fixed share costs nothing, and what turns gain by moving is less
  than what their prefixes cost (585 s without affinity).
- **Figure 7** (8B 1.55, 2.10, 1.56; 32B 3.16, 3.77, 3.12): one step off the policy a rollout binds at any number of devices, so
  that the gain is the rollout's. DAPO is played with twice the groups, not with the paper's rule from step to step.
- **Table 5**: serving alone is as late (1.95 s, 32B 3.43 s; rollouts add 1 % at most): the trace's one burst is twice as
  steep at twice the speed. Serving alone at 8B (+7 %) is the worst of three seeds, which see 0.31 to 0.34 s.
"""


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
            parts.append(f"\n## {title}\n\nValue {found['value']:.3f} ({found['unit']}); bar {found['bar']}: "
                         f"{'held' if found['holds'] else '**not held**'}.{note}\n")  # fmt: skip
            rows = found["detail"]["rows"]
            if name == "heddle":  # the ablation is in the file
                rows = [one for one in rows if one["printed"] != "not printed" or "our degrees" in one["what"]]
            if name == "all-together":
                best = [
                    f"{one}'s workload: all policies over {by}'s set"
                    for one, by in found["detail"]["best_single"].items()
                ]
                rows = [one for one in rows if one["what"] in best]
            parts.append(_rows(rows))
            parts += _binding(found["detail"].get("workloads", {}))
            parts += [f"Not played: {what}: {why}.\n" for what, why in found["detail"].get("not_played", {}).items()]
            if name == "rollpacker-figures" and "search" in found["detail"]:  # the full form
                parts.append("\n".join([_ROLLPACKER, *reasons(found), *_searched(found["detail"])]) + "\n")
            if name == "rose-figures":
                parts.append(_ROSE)
            elif "runs" in found["detail"]:
                parts.append(_runs(found["detail"]["runs"]))
    ablation = _load(folder, "ablation")
    if ablation:
        parts.append("\n## One feature away at a time (`rl-coserve sim --ablate`)\n\n![ablation](ablation.svg)\n")
        parts.append("| without | step time over all on | standard deviation over seeds |\n| --- | --- | --- |")
        parts += [
            f"| {one['without'] or '(all on)'} | {one['over_all_on']:.3f} | {one['deviation']:.3f} |"
            for one in ablation
        ]
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


def _rows(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| figure | printed | simulated | outside by | source |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        off = f"{100 * row['off']:+.0f} %" if row["off"] else "inside"
        if row["printed"] == "not printed":
            off = ""
        lines.append(f"| {row['what']} | {row['printed']} | {row['simulated']:.3g} | {off} | {row['source']} |")
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
    for row in detail["papers"]["rows"]:
        error = "calibration" if row["calibration"] else f"{100 * row['error']:+.0f} %"
        numbers = f"{row['predicted']:.3g} | {row['printed']:.3g} | {error}"
        lines.append(f"| {row['what']} ({row['unit']}) | {numbers} | {row['source']} | {row['note']} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.papers.simulated_page", description=__doc__)
    parser.add_argument("folder", nargs="?", default="docs/results")
    folder = Path(parser.parse_args(arguments).folder)
    (folder / "simulated.md").write_text(page(folder), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
