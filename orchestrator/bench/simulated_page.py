"""Writes ``simulated.md`` of a results folder: ``python -m orchestrator.bench.simulated_page FOLDER``.

It is made of the JSON files beside it: every row of every simulated figure, printed number and ours. Nothing but the words
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_HEAD = """# Simulated figures beside the printed ones

Made by `python -m orchestrator.bench.simulated_page docs/results` from the JSON files beside it. Everything here is **simulated**
(virtual time, the same pipeline), but for the first table, where real engine steps are predicted. How it counts:
[the simulator](../simulator.md).
"""
_WHY = """
## Why ours differ

- **What RollArt's tasks are is not printed**: tokens a turn, environment times and the mix are our assumptions, made before the
  first run (`orchestrator/sim/scenarios`). FrozenLake shows it best: with 180 tokens of observation a turn and prefix caching
  it is bound by memory, not by prefill, in our model, so H800 have no advantage there; figure 4a says that its real turns
  prefill far more.
- **Training binds in our runs of RollArt**: calibrated by its figure 3, 32 H800 need longer for our batch than the other GPUs
  need to make it, so whatever speeds up the rollout (affinity, redundancy, a larger alpha) cannot show in the step time. The
  rows "faster trainer" are the same ladder with training at 0.40 of the peak. That the trainer has 128 GPUs in `sync` and
  `sync_plus` and 32 in the others is RollArt's own setup (7.1), so training takes four times as long from `one_off` on. The
  paper's one-off is 1.52 times as fast as its Sync+ at 32B with a quarter of the GPUs for training, so that training can be at
  most 16 % of its Sync+ step; its figure 3 (8B, all GPUs train) says 23 %; ours is 43 % at 32B. Our rollouts of 32B on SWE-bench
  are 2.7 times as fast as printed (table 5), with which alone its share would be about half of that.
- **One mistake of ours is mended here**: the rungs on one class of GPUs sent versions to a relay at the rate of RollArt's
  Ethernet beside the collective, and the next training step waited for it (34 s at 8B, 135 s at 32B). They have NCCL.
- **Two batches are in flight** from `areal` on (`rollout.redundant_groups` = 2, as RollArt keeps all its environments busy):
  what is complete first is trained, so no step waits for its longest episode, which in `sync` to `one_off` every step does.
  Of long episodes more get stale and are thrown away.
- **Publishing takes the trainer's time** in our pipeline: the next training step waits until the version is on the relay, 34 s
  (8B) to 135 s (32B) at the rates of RollArt's table 4, from which only the last rung suffers. RollArt pushes beside training.
- **RollArt's figure 12**: the paper runs three jobs "on a 16-H800 cluster". Both readings are played: a job that has the 16 GPUs
  for itself, and three that share them, as one batch three times as large; the value is that of three. In either a memory-bound
  decode step gains less from half the sequences than the printed factor of two.
- **Table 5**: our rollouts are too fast throughout (SWE-bench's tokens a turn are ASSUMED). For the dense model prefill apart
  gains, as printed. For the mixture of experts it loses: a step's grouped matrix products, at the efficiency measured on H20,
  are most of our decode, so engines taken away from decoding cost more there than undisturbed decoding gains.
- **The simulator's own error** is 16.5 % at a prefill of 32 sequences of 96 tokens, on a quiet machine; decode steps that were
  held back are at most 5.0 % off, a whole rollout 2.7 %. Prefills of 1,500 to 4,600 tokens are predicted 11 to 17 % too slow,
  one of 16,384 15 % too fast: a token costs this machine more in a long step, which one rate does not say. Neither a fixed
  cost of a prefill, nor the square of a step's tokens, nor a second rate beyond 4,096 tokens predicted sizes better that were
  left out of the fit one by one (on a busy machine), so none was added.
- **Transfers**: the papers' have a start of seconds and reach 2 to 12 GB/s of links of 25 and 50; a roofline of the link does
  not.
- **RollPacker's tail batching alone saves less than printed**: in our `sync` the slowest scorer is waited for in short rounds too
  (up to 30 s of code, and a queue before it), which shrinks what the shorter rollout saves; with rewards beside the rollout
  the speed-ups are nearer. How many scores are computed at a time is ASSUMED (four a GPU), so the split between these two rows is
  less certain than their product (not varied).
- **Lengths of 7B/8k and 32B/32k are ASSUMED**: the paper shows those of 14B/16k. At 32k our short rounds are faster than printed
  and our long rounds slower: 1.8 times veRL's rollout, where the paper has them about equal. We take that to be since each of
  its batches reaches the limit of lengths, and half a batch of ours often does not. A run has two long rounds, one seed, so that
  a period's mean has an error of its own, which is not shown.
- **Figure 12**: all speed-ups are smaller, at a quarter of a batch, whose longest response is shorter than a whole one's. How
  alike the answers to one prompt are (0.6 of the variance, ASSUMED) decides what speculation in responses is worth.
- **Figure 16**: training takes the same time for twice the batch on twice the GPUs in our model, which knows no cost of
  communication; the paper says that training takes longer there. veRL's rollout gets longer with the batch, as in any long tail.
- **The planner** begins with TP 1, 2 and the TP that the profile says, as RollPacker's setups do for 7B and 14B, and stays there:
  nothing is preempted in these setups, as our median response is 450 tokens long. At 32B its profile takes a larger TP than
  the paper's 2, since a long round waits for one long response. In figure 13a all responses have the step's length (ASSUMED);
  the profile already begins with TP 2, and TP 4, for which preemptions ask, is refused: an engine's own time a sequence, which
  is not divided by TP in our model, is longer than what is gained. In figure 13b nothing is preempted, so nothing is saved.
- **Expert parallelism** (`experts` in the JSON): nothing is printed. The rule leaves it as soon as uneven routing has cost more
  than a change, and does not come back for the small gain of even routing.
- **RollPacker's table 4**: our first fetch never holds 20 % of a batch, so the caps do not differ. **Figure 14b** is the
  streaming policy on the cost model: computing a long sequence hides its transfers here, so that the gain falls with the
  length, where the paper's rises.
- **Figure 5**: first tokens come later in short rounds, which prefill 1.56 times the requests at once.
- **RLHFuse is stronger here than printed** at 14B and 32B: of its training 9 and 13 s a step are left beside the
  rollout, as half of the GPUs are freed within its long tail.
- **The adaptive trigger frees GPUs at 20 %** in every long round of table 3, since KV memory is no concern at 7B; so it cannot
  differ from the fixed 20 %. What limits it in the paper is not printed.
- **Figure 14c**: an answer is one test case here, and run times of answers to one prompt are drawn apart, so a right answer
  says less of the next one's time than it would where they resemble each other (not tried).
- **Mixed tasks**: RollPacker's table 1 is of one task at a time; ours has all three in a batch, so that every step waits for
  the slowest scorer.
"""


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
        ("all-together", "All policies together (`bench all-together`)"),
    ):
        found = _load(folder, name)
        if found:
            scale = found["detail"].get("scale")
            part = "Half" if scale == 2 else f"One {scale}th"
            note = f" {part} of cluster and batch." if scale else ""
            parts.append(f"\n## {title}\n\nValue {found['value']:.3f} ({found['unit']}); bar {found['bar']}: "
                         f"{'held' if found['holds'] else '**not held**'}.{note}\n")  # fmt: skip
            parts.append(_rows(found["detail"]["rows"]))
            parts += [f"Not played: {what}: {why}.\n" for what, why in found["detail"].get("not_played", {}).items()]
            if "runs" in found["detail"]:
                parts.append(_runs(found["detail"]["runs"]))
    ablation = _load(folder, "ablation")
    if ablation:
        parts.append("\n## One feature away at a time (`rl-coserve sim --ablate`)\n\n![ablation](ablation.svg)\n")
        parts.append("| without | step time over all on | standard deviation over seeds |\n| --- | --- | --- |")
        parts += [
            f"| {one['without'] or '(all on)'} | {one['over_all_on']:.3f} | {one['deviation']:.3f} |"
            for one in ablation
        ]
        parts.append("\nThe first base is RollArt's, a 16th of it; the second is RollPacker's 7B/8k, a 4th.")
    parts.append(_WHY)
    return "\n".join(parts)


def _load(folder: Path, name: str) -> Any:
    file = folder / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def _rows(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| figure | printed | simulated | outside by | source |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        off = f"{100 * row['off']:+.0f} %" if row["off"] else "inside"
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
        f"mean {100 * detail['held_back_mean']:.1f} %, decode steps at most {100 * detail['held_back_decode_max']:.1f} %; "
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
    parser = argparse.ArgumentParser(prog="python -m orchestrator.bench.simulated_page", description=__doc__)
    parser.add_argument("folder", nargs="?", default="docs/results")
    folder = Path(parser.parse_args(arguments).folder)
    (folder / "simulated.md").write_text(page(folder), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
