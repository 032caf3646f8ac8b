"""Figures that pages quote are those of the files in ``docs/results``: one that is measured again is told where it is quoted.

Held are the README's figures, the short list of the page of results and the row "measured" of each feature's page, digit by
digit; what the page of results begins each row with; and the figures that recipes give. A line of :data:`QUOTES` is a page, what
it says with ``{}`` for each figure, the file, and where in it the figures are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FEATURES = sorted(path.stem for path in ROOT.glob("docs/*.md") if "| in short |" in path.read_text(encoding="utf-8"))
# What a row says of its conditions, not of what was found.
CONDITIONS = re.compile(
    r"\(?paper: [^)]*|2 cores of an AMD EPYC|two cores|vLLM 0\.32\.0 CPU|Megatron-Core 0\.16\.1 and 0\.19\.2|"
    r"[Pp]99|\bH100 and H20\b|alpha 1 and 2|\b1 GiB|\]\([^)]*\)|`[^`]*`|\bSmolLM2-135M|bar 2\b|80 steps"
)
Figures = Callable[[Any], tuple[float, ...]]


def value(found: Any) -> tuple[float, ...]:
    return (found["value"],)


def worst_seed(found: Any) -> tuple[float, ...]:
    """Before and after RL in it, the mean of all seeds, and the minutes of the longest."""
    worst = min(found["detail"]["runs"], key=lambda run: float(run["success_end"]))
    return worst["success_start"], worst["success_end"], found["value"], found["detail"]["longest"] / 60


def turn_seconds(found: Any) -> tuple[float, ...]:
    """Milliseconds of a turn, and how many fit into a second."""
    turns = found["detail"]["turns_per_processor_second"]["32000"]
    return 1000 / turns, turns


def checkpoint(found: Any) -> tuple[float, ...]:
    return found["value"], found["detail"]["whole"]["seconds"]


def handover(found: Any) -> tuple[float, ...]:
    return found["value"], found["detail"]["copied_over_share"]


def ten_thousand(found: Any) -> tuple[float, ...]:
    run = found["detail"]["sharded"]
    return run["ledger"]["started"], run["steps"], found["value"], found["detail"]["most_ms"]


def site(found: Any) -> tuple[float, ...]:
    return found["value"], found["detail"]["time_ratio"]["worst"]


def level_ratios(found: Any) -> tuple[float, ...]:
    """Batch-level over trajectory-level, by deviation of the environments' times."""
    return tuple(row["ratio"] for row in found["detail"]["table"])


def widest(found: Any) -> tuple[float, ...]:
    """The least and the most of the repetitions, where environments differ most."""
    ratios = found["detail"]["table"][-1]["ratios"]
    return min(ratios), max(ratios)


def peers(found: Any) -> tuple[float, ...]:
    """Trajectories per second, TRL's and ours."""
    return tuple(found["detail"]["medians"][side]["trajectories_per_s"] for side in ("trl", "ours"))


def moves(*tokens: int) -> Figures:
    """Moving so many tokens of KV over computing them."""

    def ratios(found: Any) -> tuple[float, ...]:
        rows = {row["tokens"]: row["move"] / row["recompute"] for row in found["detail"]["rows"]}
        return tuple(rows[count] for count in tokens)

    return ratios


def update_pause(found: Any) -> tuple[float, ...]:
    overlapped = found["detail"]["ways"]["overlapped"]
    return (overlapped["pause_ms"], overlapped["bytes"] / 1e6)


def fan_out(found: Any) -> tuple[float, ...]:
    """Bytes with and without a cache, and the worst time over the link's."""
    return found["value"], found["reference_value"], found["detail"]["time_ratio"]["worst"]


def sparse(density: float) -> Figures:
    """Bytes a changed weight, the larger of the two models."""
    return lambda found: (max(row["bytes_per_change"] for row in found["detail"]["rows"] if row["density"] == density),)


def two_schedulers(found: Any) -> tuple[float, ...]:
    """Of each size with its interval."""
    rows = {row["what"]: row for row in found["detail"]["rows"]}
    each = [rows[f"{model}: + reward scheduler, over veRL"] for model in ("7B/8k", "14B/16k", "32B/32k")]
    return tuple(figure for row in each for figure in (row["simulated"], *row["interval"]))


def peers_seconds(found: Any) -> tuple[float, ...]:
    """To the target, TRL's and ours: median, least and most of the seeds."""
    runs, figures = found["detail"]["runs"], list[float]()
    for side in ("trl", "ours"):
        seconds = [run["seconds_to_target"] for run in runs if run["side"] == side]
        figures += [median(seconds), min(seconds), max(seconds)]
    return tuple(figures)


def heddle(found: Any) -> tuple[float, ...]:
    """Over the best router of degree 1, and over that of any equal degree: each agent's."""
    rows = {row["what"]: row["simulated"] for row in found["detail"]["rows"]}
    agents = ("coding", "search", "math")
    return tuple(
        rows[f"8 GPUs, {name}: ours over the best router of {over}"]
        for over in ("degree 1", "any equal degree")
        for name in agents
    )


def borrowed(found: Any) -> tuple[float, ...]:
    """The worst seed and load; then with 16 devices on ROSE's: under its rule, then spread by utilization, with intervals."""
    rows = {row["what"]: row for row in found["detail"]["rows"]}
    rules = ("dedicated-first", "least-utilized, imbalance 2")
    on_rose = [rows[f"{rule}: speed-up with 16 borrowed GPUs"] for rule in rules]
    return (found["value"], *(figure for row in on_rose for figure in (row["simulated"], *row["interval"])))


def admission(found: Any) -> tuple[float, ...]:
    """Late of all under dual admission, of both traces; without any, on Azure's; and the worst ratios."""
    detail = found["detail"]
    late = sum(run["dual"]["late"] for runs in detail["runs"].values() for run in runs)
    judged, none = [trace["dual"] for trace in detail["traces"].values()], detail["ladder"]["azure_code"]["none"]
    tails = (max(dual[f"{name}_p99_over_alone"]["worst"] for dual in judged) for name in ("ttft", "tpot"))
    return (late, sum(dual["requests"] for dual in judged), none["late"], none["requests"], *tails)


def stream_steps(found: Any) -> tuple[float, ...]:
    return (found["value"], *found["detail"]["ratios"])


def single_sets(found: Any) -> tuple[float, ...]:
    """Means over seeds."""
    rows = {row["what"]: row["simulated"] for row in found["detail"]["rows"]}
    papers = ("RollArt", "ROSE", "RollPacker")
    return tuple(rows[f"{paper}'s workload: all policies over the best single set"] for paper in papers)


def kills(found: Any) -> tuple[float, ...]:
    rows = [row for row in found["detail"]["table"] if row["engines"] == "real"]
    seconds = [row["median_seconds"] for row in rows]
    return (found["value"], found["reference_value"], sum(row["count"] for row in rows), min(seconds), max(seconds))


def environment_kill(found: Any) -> tuple[float, ...]:
    wanted = ("environment worker killed", "real")
    return tuple(row["median_seconds"] for row in found["detail"]["table"] if (row["kind"], row["engines"]) == wanted)


def routing(found: Any) -> tuple[float, ...]:
    kept = {case["case"]: 100 * case["prefix_kept"] for case in found["detail"]["cases"]}
    return (found["value"], kept["cache-affine, cap 16"], kept["least-loaded, cap 16"])


def parity(found: Any) -> tuple[float, ...]:
    table = {row["variant"]: row for row in found["detail"]["table"]}
    both, prompts = (table[name]["difference"] for name in ("tail batching", "tail batching of prompts"))
    return (both["value"], prompts["value"], both["low"], both["high"], prompts["low"], prompts["high"])


def link_seconds(found: Any) -> tuple[float, ...]:
    """Of the whole of Qwen3-8B as a difference of 1 %, over 1, 5 and 20 Gbps."""
    rows = [row for row in found["detail"]["rows"] if (row["model"], row["method"]) == ("qwen3-8b", "ours")]
    seconds = {
        row["gbps"]: row["whole_model_seconds"] for row in rows if row["density"] == 0.01 and not row["one_machine"]
    }
    return tuple(seconds[gbps] for gbps in (1, 5, 20))


def one_class(found: Any) -> tuple[float, ...]:
    """Step time of H800 alone over affinity at 8B, 14B, 32B, then of H20 alone: means of five seeds."""
    rows = {row["what"]: row["simulated"] for row in found["detail"]["rows"]}
    sizes = ("8B", "14B", "32B")
    return tuple(rows[f"{size}: step time, {fleet} only over affinity"] for fleet in ("h800", "h20") for size in sizes)


def over_sync(found: Any) -> tuple[float, ...]:
    """Async with affinity over sync at 8B, 14B, 32B: mean of five seeds and interval of each."""
    rows = {row["what"]: row for row in found["detail"]["rows"]}
    each = [rows[f"{size}: throughput of affinity over sync"] for size in ("8B", "14B", "32B")]
    return tuple(figure for row in each for figure in (row["simulated"], *row["interval"]))


def both_ways(found: Any) -> tuple[float, ...]:
    return tuple(way["seconds_per_step"] for way in found["ways"].values())


def own_pace(found: Any) -> tuple[float, ...]:
    """The least and the most of the seeds."""
    batch, own = (way["by_seed"] for way in found["ways"].values())
    gains = [slow / fast for slow, fast in zip(batch, own, strict=True)]
    return min(gains), max(gains)


def papers_off(found: Any) -> tuple[float, ...]:
    """Median error in percent of the papers' absolute numbers: without sizes of models, and of those in seconds."""
    rows = [row for row in found["detail"]["papers"]["rows"] if not row["calibration"]]
    kinds = ([row for row in rows if row["unit"] != "GiB"], [row for row in rows if row["unit"] == "s"])
    return tuple(100 * median(abs(row["error"]) for row in kind) for kind in kinds)


def roofline(*groups: str) -> Figures:
    """The median of all, then of some of its groups."""
    return lambda found: (found["value"], *(found["detail"]["groups"][group]["median"] for group in groups))


def answers(found: Any) -> tuple[float, ...]:
    """Right while training, in the first and the fourth ten steps; held out, at the start and at the end."""
    rewards = [row["reward_mean"] for row in found["steps_table"]]
    curve = [success for _, success in found["success_curve"]]
    return (sum(rewards[:10]) / 10, sum(rewards[30:40]) / 10, curve[0], curve[-1])


def pretrained(found: Any) -> tuple[float, ...]:
    """Right before and after in the seed that gained least, how many were asked; of well-formed ones as well."""
    table = [row for name, row in found["detail"]["table"].items() if not name.startswith("shuffled")]
    worst, formed = (min(rows, key=lambda row: row["gain"]) for rows in (table, [row["well_formed"] for row in table]))
    return (worst["before"], worst["after"], worst["questions"], formed["before"], formed["after"])


def shuffled(found: Any) -> tuple[float, ...]:
    row = found["detail"]["table"]["shuffled-0"]
    return (row["before"], row["after"])


QUOTES: list[tuple[str, str, str, Figures]] = [
    ("README", "**{:.3f} -> {:.3f}** (real; mean {:.3f}, each within {:.1f} minutes", "demo-seeds", worst_seed),
    ("README", "a step every {:.1f} s batch by batch, every {:.1f} s on their own", "step", both_ways),
    ("README", "*Simulated, the first of five seeds ({:.2f} to {:.2f} times as fast);", "step", own_pace),
    ("README", "takes {:.2f} to {:.2f} times as long batch by batch", "trajectory-vs-batch", widest),
    (
        "results/README",
        "| {} of {:,} | `recompute-exact`",
        "recompute-exact",
        lambda r: (r["value"], r["detail"]["tokens"]),
    ),
    (
        "results/README",
        "| {:.3f} ({:.1f} ms) | `update-pause`",
        "update-pause",
        lambda r: (r["value"], update_pause(r)[0]),
    ),
    (
        "results/README",
        "| {:.3f} ({:.3f} to {:.3f}), bit-identical | `idle-overhead`",
        "idle-overhead",
        lambda r: (r["value"], *(pick(pair["ratio"] for pair in r["detail"]["pairs"]) for pick in (min, max))),
    ),
    ("results/README", "| {:.3f} | `active-overhead`", "active-overhead", value),
    ("results/README", "| {:.3f} | `preemption`", "preemption", value),
    ("results/README", "| {:.2f} to ", "delta-bytes", sparse(0.01)),
    ("results/README", " to {:.2f} | `delta-bytes`", "delta-bytes", sparse(0.05)),
    (
        "results/README",
        "| {} of {:,} | `ledger-faults`",
        "ledger-faults",
        lambda r: (r["value"], r["detail"]["trajectories_started"]),
    ),
    (
        "results/README",
        "| {:.2f}, {:.2f}, {:.2f} ({:.2f} to {:.2f}) | `trajectory-vs-batch`",
        "trajectory-vs-batch",
        lambda r: (*level_ratios(r), *widest(r)),
    ),
    ("results/README", "| {:.2f}; ", "kv-migrate", moves(8192)),
    ("results/README", "; {:.2f} | `kv-migrate`", "kv-migrate-model", value),
    (
        "results/README",
        "| {:.2f} ({:.2f} to {:.2f}) | `tail-batching`",
        "tail-batching",
        lambda r: (r["value"], *(pick(r["detail"]["ratios"]["processor"]) for pick in (min, max))),
    ),
    (
        "results/README",
        "| {:.2f} ({:.2f} to {:.2f}), {:.2f} ({:.2f} to {:.2f}), {:.2f} ({:.2f} to {:.2f}) (paper: 2.01, 1.99, 2.48)",
        "rollpacker-figures",
        two_schedulers,
    ),
    (
        "results/README",
        "equal degree {6:.3f} in the worst seed ({3:.2f}, {4:.2f}, {5:.2f}): **no gain**; over TP 1 {0:.2f}, {1:.2f}, {2:.2f} (",
        "heddle",
        lambda r: (*heddle(r), r["value"]),
    ),
    (
        "results/README",
        "| {:.2f}; {:.2f} ({:.2f} to {:.2f}; paper: 1.69); {:.2f} ({:.2f} to {:.2f}) |",
        "borrowed",
        borrowed,
    ),
    (
        "results/README",
        "| {} of {:,} (without admission {} of {}); {:.2f}, {:.2f} | `coserve-slo`",
        "coserve-slo",
        admission,
    ),
    (
        "results/README",
        "| {:.3f}, {:.3f}, {:.3f} | `learns`",
        "learns",
        lambda r: tuple(sorted(r["detail"]["success_end"])),
    ),
    ("results/README", "| {:.3f} -> {:.3f}; {:.3f} | `demo-seeds`", "demo-seeds", lambda r: worst_seed(r)[:3]),
    (
        "results/README",
        "| {:.2f} ({:.2f} to {:.2f}), {:.2f} ({:.2f} to {:.2f}), {:.2f} ({:.2f} to {:.2f}) | `modes`",
        "modes",
        over_sync,
    ),
    (
        "results/README",
        "| over H800 {:.2f}, {:.2f} (shown), {:.2f}; over H20 {:.2f}, {:.2f}, not shown, {:.2f} | `affinity`",
        "affinity",
        one_class,
    ),
    (
        "results/README",
        "| {:.1f} ({:.1f} to {:.1f}), {:.1f} ({:.1f} to {:.1f}) | `peers`",
        "peers",
        peers_seconds,
    ),
    (
        "results/README",
        "| {:.2f}; {:.2f}, {:.2f}, {:.2f} | `roofline-error`",
        "roofline-error",
        roofline("dense, H100", "mixture of experts, H100", "one sequence, H20"),
    ),
    ("simulator", "another model: {:.0f} % off speeds", "roofline-error", lambda r: (100 * r["value"],)),
    (
        "limits",
        "another model: {:.0f} % off published speeds of engines on H100 and H20 in the median, of a mixture of experts {:.0f} % "
        "too slow, of a single sequence on H20 {:.0f} % too fast",
        "roofline-error",
        lambda r: tuple(100 * part for part in roofline("mixture of experts, H100", "one sequence, H20")(r)),
    ),
    ("comparison", "is: {:.0f} trajectories per second against our {:.0f}", "peers", peers),
    (
        "limits",
        "makes {:.1f} times as many trajectories per second as ours",
        "peers",
        lambda r: (peers(r)[0] / peers(r)[1],),
    ),
    ("composition", "set {:.2f} on RollArt's workload, {:.2f} on ROSE's, {:.2f} on", "all-together", single_sets),
    (
        "environments",
        "batch-level {:.2f}, {:.2f}, {:.2f} at deviations of {:.1f}, {:.1f}, {:.0f} ",
        "trajectory-vs-batch",
        lambda r: (*level_ratios(r), *r["detail"]["load"]["deviations"]),
    ),
    (
        "coserving",
        "TTFT {4:.2f} and TPOT {5:.2f} of serving alone under dual admission, {0} of {1:,} late, without admission {2} of {3} ",
        "coserve-slo",
        admission,
    ),
    ("coserving", "pages in {:.0f} ms", "kv-remap", lambda r: (1000 * r["value"],)),
    ("environments", "; {:.1f} s in the median", "kills", environment_kill),
    (
        "kv_transfer",
        "{:.2f} of computing 8,192 tokens, {:.2f} of 1,024, {:.2f} of 256 ",
        "kv-migrate",
        moves(8192, 1024, 256),
    ),
    (
        "megatron",
        "bit-equal to one batch in {} of {} runs over 68 layouts",
        "stream-equality",
        lambda r: (r["detail"]["bit_equal"], r["detail"]["cases"]),
    ),
    ("megatron", "a step {:.2f} ({:.2f}, {:.2f}, {:.2f}: within", "stream-step", stream_steps),
    ("modes", "environments {:.2f} to {:.2f} times", "trajectory-vs-batch", lambda r: level_ratios(r)[::2]),
    (
        "prediction",
        "throughput {:.2f} of the best router of any equal degree on 8 GPUs in the worst of five seeds, {:.2f} to {:.2f} of",
        "heddle",
        lambda r: (value(r)[0], min(heddle(r)[:3]), max(heddle(r)[:3])),
    ),
    (
        "recovery",
        "{} of {:,} trajectories that a checkpoint saw were lost",
        "power-cuts",
        lambda r: (r["value"], r["detail"]["trajectories_seen_by_checkpoints"]),
    ),
    (
        "recovery",
        "{} trajectories unaccounted for, 0 processes left after {} events, {} with real engines: {:.0f} to {:.0f} s",
        "kills",
        kills,
    ),
    (
        "routing",
        "over H800 {:.2f}, {:.2f} (shown), {:.2f}; over H20 {:.2f}, {:.2f}, not shown, {:.2f}: bar",
        "affinity",
        one_class,
    ),
    (
        "routing",
        "takes {:.3f} ms at the 99th percentile; {:.0f} % of the turns go back to their prefix, {:.1f} %",
        "routing",
        routing,
    ),
    ("scale", "| {:.2f} ms ({:,.0f} turns per second) |", "turn-cost", turn_seconds),
    (
        "scale",
        "300 new tokens | {:,.0f}, whatever the context's length |",
        "turn-cost",
        lambda r: (r["detail"]["bytes_per_turn"]["1000"],),
    ),
    ("scale", "p99 of the slowest case | {:.3f} ms |", "routing", value),
    ("scale", "how long the loop itself is blocked | {1:.1f} s; {0:.0f} ms at most |", "checkpoint-stall", checkpoint),
    ("scale", "bytes read per rank, relative to its share | {:.0f} ms; {:.2f} |", "batch-handover", handover),
    (
        "scale",
        "10,000 for 30 minutes; {:,} trajectories, {} steps, ledger closed; p99 of a loop's busy time {:.1f} ms, the "
        "longest {:,.0f} ms",
        "environments",
        ten_thousand,
    ),
    (
        "scale",
        "for any number of engines there | {:.3f} copies, at worst {:.2f} times the link's time",
        "site-fanout",
        site,
    ),
    ("scale", "delta bytes per changed weight, with 1 to 5 % changed | {:.2f} at most |", "delta-bytes", value),
    ("simulator", "{:.1f} % at worst", "sim-error", lambda r: (100 * r["value"],)),
    ("simulator", "{:.0f} % off the papers'", "sim-error", lambda r: (100 * r["detail"]["papers"]["median_error"],)),
    ("simulator", "({:.0f} % without sizes of models, {:.0f} % of those in seconds)", "sim-error", papers_off),
    ("results/README", "| {:.3f} to {:.3f} | `pretrained`", "pretrained", pretrained),
    (
        "smollm2",
        "{:.3f} to {:.3f} of {} held-out questions, among those well formed both times {:.3f} to {:.3f}",
        "pretrained",
        pretrained,
    ),
    ("smollm2", "control with shuffled rewards {:.3f} to {:.3f}", "pretrained", shuffled),
    ("smollm2", "{:.2f} to {:.2f} of training questions; held out {:.2f} to {:.2f}", "smollm2", answers),
    (
        "tail_batching",
        "{:.2f} of the rollout's processor seconds (six pairs, {:.2f} to {:.2f};",
        "tail-batching",
        lambda r: (r["value"], min(r["detail"]["ratios"]["processor"]), max(r["detail"]["ratios"]["processor"])),
    ),
    (
        "tail_batching",
        "| {:.2f}, which is {:.0f} to {:.0f} % off: held",
        "tail-batching",
        lambda r: (r["reference_value"], *(100 * one(map(abs, r["detail"]["predicted_off"])) for one in (min, max))),
    ),
    (
        "tail_batching",
        "held-out success {:.3f} with both etas at 1.25 after 120 steps of the demo, {:+.3f} with `eta_responses = 1` "
        "(five seeds; paired by seed {:.3f} to {:.3f}, {:.3f} to {:.3f}:",
        "learning-parity",
        parity,
    ),
    ("tasks", "adaptive timeouts {:.2f} over two rounds", "reward-timeout", value),
    ("tasks", "worst of the seeds {:.3f} to {:.3f} in the demo", "demo-seeds", lambda r: worst_seed(r)[:2]),
    (
        "tasks",
        "demo, {:.2f} to {:.3f} in the longer run",
        "learns",
        lambda r: (min(r["detail"]["success_end"]), max(r["detail"]["success_end"])),
    ),
    (
        "trajectories",
        "in 11 versions reads {:.1f} % of the bytes of a million rows",
        "store",
        lambda r: (100 * r["value"],),
    ),
    ("vllm", "idle plugin {:.3f} of stock's", "idle-overhead", value),
    ("vllm", "active {:.3f} (bar", "active-overhead", value),
    ("vllm", "waits {:.3f} of a slot's time", "preemption", value),
    ("vllm", "still {:.1f} ms for {:.0f} MB", "update-pause", update_pause),
    (
        "weights",
        "{:.3f} times the version's bytes come in, {:.2f} without a cache; an update takes {:.2f}",
        "site-fanout",
        fan_out,
    ),
    ("weights", "an update took {:.2f} of the better one's time", "encoding-choice", value),
    ("weights", "standstill of {:.1f} ms for {:.0f} MB", "update-pause", update_pause),
    ("weights", "{:.2f} bytes per changed weight", "delta-bytes", sparse(0.01)),
    (
        "start",
        "`success on held-out prompts: {:.3f} -> {:.3f}`",
        "demo-seeds",
        lambda r: worst_seed(r)[:2],
    ),
    (
        "recipes/tune",
        "| {:.2f} to {:.2f} times as fast as batch-level |",
        "trajectory-vs-batch",
        lambda r: level_ratios(r)[::2],
    ),
    ("recipes/tune", "| {:.2f} of the rollout's processor seconds;", "tail-batching", value),
    ("recipes/tune", "| {:.2f} a step ({:.2f}, {:.2f}, {:.2f}: within", "stream-step", stream_steps),
    ("recipes/tune", "| {:.2f} bytes per changed weight at 1 %", "delta-bytes", sparse(0.01)),
    (
        "recipes/tune",
        "{:.2f} of computing it at 8,192 tokens, {:.2f} at 1,024, {:.2f} at 256",
        "kv-migrate",
        moves(8192, 1024, 256),
    ),
    ("recipes/tune", "| adaptive reward timeout | {:.2f} (", "reward-timeout", value),
    ("recipes/tune", "within {:.1f} % of", "sim-error", lambda r: (100 * r["value"],)),
    ("recipes/slow_environments", "{:.2f}, {:.2f}, {:.2f} times as fast", "trajectory-vs-batch", level_ratios),
    ("recipes/slow_link", "{:.1f} ms for {:.0f} MB", "update-pause", update_pause),
    ("recipes/slow_link", "| {:.2f} s | {:.3f} s | {:.3f} s |", "transfer-limit", link_seconds),
    ("start", "their mean is {:.3f}. A run took {:.1f} minutes at most", "demo-seeds", lambda r: worst_seed(r)[2:]),
]
# Rows whose figures are in no file, or are held elsewhere: what of them is not compared.
ELSEWHERE = {
    "seeing": r"2\.1 and 2\.8 ms with its samples, 2\.3 and 2\.6 ms without, 2,000 episodes",  # short runs, page of results
}


@cache
def page(name: str) -> str:
    return (ROOT / ("README.md" if name == "README" else f"docs/{name}.md")).read_text(encoding="utf-8")


def rendered(template: str, file: str, figures: Figures) -> str:
    """What the page has to say."""
    return template.format(*figures(json.loads((ROOT / f"docs/results/{file}.json").read_text(encoding="utf-8"))))


@pytest.mark.parametrize(
    ("name", "template", "file", "figures"), QUOTES, ids=lambda part: part if isinstance(part, str) else ""
)
def test_a_quoted_figure_is_that_of_its_file(name: str, template: str, file: str, figures: Figures) -> None:
    assert rendered(template, file, figures) in page(name), f"docs/results/{file}.json has another figure than {name}"


def rows() -> Iterator[tuple[str, str]]:
    """Each row of the short list of results (its column of values), and each feature's row "measured"."""
    table = page("results/README").partition("\n## The short list\n")[2].partition("\n## ")[0]
    for line in re.findall(r"^\|.*\| `[\w-]+` \|$", table, re.M):
        cells = line.strip("|").split("|")
        yield "results/README", f"|{cells[2]}|{cells[3]}"
    for name in FEATURES:
        short = page(name).partition("| in short |")[2].partition("\n\n")[0]
        for line in re.findall(r"^\| measured \| (.*) \|$", short, re.M):
            yield name, line


def uncovered(name: str, row: str) -> str:
    """The row without what is compared, and without its conditions."""
    held = [re.escape(rendered(template, file, figures)) for its, template, file, figures in QUOTES if its == name]
    left = list(row)
    for pattern in (*held, ELSEWHERE.get(name, "$^"), CONDITIONS.pattern):
        for match in re.finditer(pattern, row):
            left[match.start() : match.end()] = " " * len(match.group())
    return "".join(left)


@pytest.mark.parametrize(("name", "row"), list(rows()))
def test_no_digit_of_a_measured_row_is_without_a_file(name: str, row: str) -> None:
    assert re.findall(r"\d[\d.,]*", uncovered(name, row)) == []


def test_a_figure_that_changed_would_be_noticed() -> None:
    assert (
        uncovered("tasks", "adaptive timeouts 1.16 over two rounds").strip() == "adaptive timeouts 1.16 over two rounds"
    )
    assert len(list(rows())) > 30


# Rows of the page of results that begin with another figure than the file's "value", in which it is, too.
ANOTHER = {"stream-equality", "trajectory-vs-batch", "transfer-limit"}


LONGEST = 240  # characters of a cell, some three lines


def results() -> Iterator[tuple[str, str]]:
    """Name and column of values of each row of the page of results whose file has a figure; then what the page of figures in full
    found of it."""
    for line in page("results/README").splitlines():
        file = re.search(r"\[json\]\(([\w-]+)\.json\)", line)
        if file and _has_value(file[1]):
            yield file[1], line.split(" | ")[2]
    for name, found in re.findall(
        r"^## ([\w-]+)\n(?:(?!## ).*\n)*?\*\*Found\*\*: ((?:.+\n)+)", page("results/in_full"), re.M
    ):
        if _has_value(name):
            yield name, found


def _has_value(name: str) -> bool:
    file = ROOT / f"docs/results/{name}.json"
    data = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    return isinstance(data, dict) and data.get("value") is not None


@pytest.mark.parametrize(("name", "said"), list(results()))
def test_a_row_of_the_page_of_results_has_the_figure_of_its_file(name: str, said: str) -> None:
    figure = json.loads((ROOT / f"docs/results/{name}.json").read_text(encoding="utf-8"))["value"]
    first = re.search(r"-?\d[\d,]*(?:\.(\d+))?( %)?", said)
    assert first
    shown = f"{figure * (100 if first[2] else 1):,.{len(first[1] or '')}f}"
    if name in ANOTHER:
        assert f"{figure:.2f}" in said or f"{figure:.1e}".replace("e-0", "e-") in said
    else:
        assert first[0].removesuffix(" %") == shown, f"docs/results/{name}.json has {figure}"


@pytest.mark.parametrize("page_name", ["results/README", "results/in_full"])
def test_a_bar_that_a_file_misses_is_said_to_be_missed(page_name: str) -> None:
    text = page(page_name)
    for file in sorted((ROOT / "docs/results").glob("*.json")):
        data = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(data, dict) and data.get("holds") is False:
            row = re.search(rf"^\|.*\[json\]\({file.stem}\.json\).*$|^## {file.stem}\n(?:(?!## ).*\n)*", text, re.M)
            if row or page_name == "results/README":
                assert row, file.stem
                assert "not met" in row[0].lower(), file.stem


def test_a_row_of_the_page_of_results_can_be_read() -> None:
    rows = [line for line in page("results/README").splitlines() if line.startswith("| ")]
    cells = [cell for row in rows for cell in row.strip("| ").split(" | ")]
    assert len(rows) > 50
    assert [cell for cell in cells if len(cell) > LONGEST] == [], "the long story is docs/results/in_full.md's"


def test_what_a_row_leaves_out_is_in_full() -> None:
    linked = re.findall(r"in_full\.md#([\w-]+)", page("results/README"))
    assert sorted(linked) == sorted(re.findall(r"^## ([\w-]+)$", page("results/in_full"), re.M))
