"""Why simulated figures of RollPacker differ from the printed ones: a sentence with a number of the same run for each.

Guarantee, tested: every row of ``rollpacker-figures`` that is further off than :data:`BAR` is covered by an entry, and an entry
appears on the page only while a row that it covers is. Numbers come from the result's detail, so that they are those of the run
that the page shows; what the words claim beyond them is said to be a reading.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from orchestrator.sim.paper_setups import ROLLPACKER

BAR = 0.05  # of the printed value: the simulator's error that the design allows
Detail = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Why:
    """``rows``: pattern of the rows' names; ``says``: the sentence, from the detail."""

    title: str
    rows: str
    says: Callable[[Detail], str]


def _rung(detail: Detail, size: str, rung: str, what: str) -> float:
    return float(detail["ladder"][size][rung].get(what, 0.0))


def _verl(detail: Detail, size: str, what: str) -> float:
    return _rung(detail, size, "veRL", what)


def _each(value: Callable[[str], float], digits: int = 0) -> str:
    """A value of each setup: "1, 2 and 3"."""
    *before, last = (f"{value(size):.{digits}f}" for size in ROLLPACKER)
    return f"{', '.join(before)} and {last}"


def _tail(detail: Detail) -> str:
    def limit(size: str) -> float:
        return 1000 * float(detail["figure_12"][size]["plain"]["rollout_seconds"]) / ROLLPACKER[size][3]

    shares = _each(lambda size: 100 * _verl(detail, size, "rollout_seconds") / _verl(detail, size, "step_seconds"))
    return (
        f"rollout and reward are {shares} % of our veRL step, which bounds what either can save; the paper prints "
        f"this for 14B only (78 %, table 1). A plain rollout takes {_each(limit, 1)} ms for each token of the limit "
        "of lengths. Lengths of 7B and 32B are ASSUMED (the paper shows those of 14B), and so is how alike the "
        "answers to one prompt are."
    )


def _rewards(detail: Detail) -> str:
    def hidden(size: str) -> float:
        tail = _rung(detail, size, "+ tail batching", "step_seconds")
        return tail - _rung(detail, size, "+ reward scheduler", "step_seconds")

    def left(size: str) -> float:
        alone = float(detail["figure_12"][size]["both 1.25"]["short_rollout_seconds"])
        return _rung(detail, size, "+ reward scheduler", "short_rollout_seconds") - alone

    return (
        f"rewards beside the rollout, with adaptive timeouts, take {_each(hidden)} s off a step of ours, and add "
        f"{_each(left, 1)} s to a short round's rollout (figure 12's has none). How much they cost the paper's "
        "RollPacker is not printed; table 1, by which the scores at a time are set, is of veRL alone."
    )


def _stream(detail: Detail) -> str:
    def taken(rung: str) -> str:
        return _each(lambda size: _rung(detail, size, rung, "long_training_seconds"))

    return (
        f"of {taken('+ reward scheduler')} s of training after a long round {taken('+ stream trainer')} s are left "
        "with streaming. A trained token costs the trainer a time that no GPU shortens (calibrated by RollArt's "
        "figure 3), so that half of the GPUs train nearly as fast as all of them; in the paper a long round of 124.2 "
        "s gets 9.0 s shorter (table 3)."
    )


def _fuse(detail: Detail) -> str:
    left = _each(lambda size: _rung(detail, size, "RLHFuse, strengthened", "training_seconds"))
    whole = _each(lambda size: _verl(detail, size, "training_seconds"))
    return (
        f"of its training {left} s a step are left beside the rollout, of {whole} s: half of the GPUs are freed "
        "within its long tail, and train nearly as fast as all (see streaming)."
    )


def _planner(detail: Detail) -> str:
    def saved(size: str) -> float:
        ours = _rung(detail, size, "+ reward scheduler", "rollout_seconds")
        return 100 * (1.0 - _rung(detail, size, "+ parallelism planner", "rollout_seconds") / ours)

    return (
        f"it makes rollouts {_each(saved)} % shorter here: nothing is preempted in these setups, so the rule never "
        "asks, and what it gains is the TP that its profile begins with, where that is not the paper's (32B: 4 "
        "instead of 2, since a round waits for one long response)."
    )


def _short(detail: Detail) -> str:
    ours = _each(lambda size: _rung(detail, size, "+ stream trainer", "short_rollout_seconds"))
    return (
        f"rollouts of our short rounds take {ours} s, of veRL's rounds (with rewards) "
        f"{_each(lambda size: _verl(detail, size, 'rollout_seconds'))} s. The longest of a lognormal batch is far "
        "from the rest, which speculation cuts off; the paper's figure 11b has at most a factor of 7.8 between "
        "rollouts."
    )


def _sweep(detail: Detail) -> str:
    said = "; ".join(
        f"{size}: " + ", ".join(f"{name} {one['speedup']:.2f}" for name, one in runs.items() if name != "plain")
        for size, runs in detail["figure_12"].items()
    )
    return (
        f"speed-ups over plain rounds are ({said}). They depend on how alike the answers to one prompt are (0.6 of "
        "the variance, ASSUMED): the more, the more speculation in prompts and the less that in responses is worth."
    )


def _code(detail: Detail) -> str:
    step, reward = (detail["table_1"]["code"][name] for name in ("step", "reward"))
    return (
        f"the reward after a rollout of code takes {reward:.0f} s here, {100 * reward / step:.0f} % of the step: the "
        "slowest of 1,024 answers has its 30 s whatever else is done, while the printed 13 % of our step would be "
        f"{0.13 * step:.0f} s, less than the limit that 5 % of the answers reach (figure 8a)."
    )


def _cheap(detail: Detail) -> str:
    step, reward = (detail["table_1"]["math"][name] for name in ("step", "reward"))
    return (
        f"scores of maths take 0.5 s each (ASSUMED) and {reward:.1f} s a batch; the printed 5 % would be "
        f"{0.05 * step:.1f} s, for which the paper gives no reason (its limit is 2 s a score)."
    )


def _timeout(detail: Detail) -> str:
    return (
        f"veRL's reward of code alone is {detail['table_1']['code']['reward']:.0f} s at 14B, so that no more can be "
        "cut; an answer is one test case here, and run times of answers to one prompt are drawn apart, so that a "
        "right answer says less of the next one's time than it would where they resemble each other."
    )


def _table_3(detail: Detail) -> str:
    found = detail["table_3"]
    marks = ", ".join(f"{found['w/o'] - seconds:.0f} s ({name})" for name, seconds in found.items() if name != "w/o")
    return (
        f"our long round of {found['w/o']:.0f} s gets {marks} shorter, the printed one of 124.2 s at most 9.0 s. That "
        "is more than the paper allows, and comes from the time a token that no GPU shortens (see streaming): this "
        "form of the cost, which fits table 1 and figure 16, makes training on half of the GPUs too cheap."
    )


def _table_4(detail: Detail) -> str:
    found = detail["table_4"]
    spread = max(value for name, value in found.items() if name != "stream") - found["stream"]
    return (
        f"one fetch is up to {spread:.1f} s slower than streaming, of {found['stream']:.0f} s: what is complete when "
        "GPUs are freed is about 20 % of the batch, so that larger caps take no more."
    )


def _larger(detail: Detail) -> str:
    def each(rung: str, what: str) -> str:
        return ", ".join(f"{detail['figure_16'][f'{gpus} GPUs, {rung}'][what]:.0f}" for gpus in (32, 64, 128))

    return (
        f"with 32, 64 and 128 GPUs (half of each played) a veRL step trains for {each('veRL', 'training_seconds')} s "
        f"and our short rollouts take {each('+ stream trainer', 'short_rollout_seconds')} s; veRL's rollout gets "
        "longer with the batch, as its longest response does, ours hardly."
    )


def _first(detail: Detail) -> str:
    short, long = (detail["figure_5"][kind]["ttft_seconds"] for kind in ("short", "long"))
    return (
        f"first tokens come after {short:.2f} s in short rounds and {long:.2f} s in long ones: short rounds prefill "
        "1.56 times the requests at once."
    )


def _thirteen(detail: Detail) -> str:
    runs = detail["figure_13a"]
    pressed, quiet = (
        sum(one["preemptions"] for one in found) for found in (runs["TP 1"], detail["figure_13bc"]["TP 2"])
    )
    widths = ", ".join(map(str, sorted({one["tp"] for one in runs["planner"]})))
    return (
        f"in figure 13a all responses of a step have its length (ASSUMED); TP 1 then has {pressed:,} preemptions, and "
        f"the planner, whose profile begins with what is fastest, uses TP {widths}. A wider TP that preemptions ask "
        "for is refused where an engine's own time a sequence, which TP does not divide in our model, is longer than "
        f"what it gains. In figure 13b {quiet} requests are preempted, so there is as much to save: responses of 450 "
        "tokens (median) fill less than half of the KV memory."
    )


def _judge(detail: Detail) -> str:
    found = sorted((int(tokens), one["apart"] / one["pipelined"]) for tokens, one in detail["figure_14b"].items())
    return (
        f"pipelining gains {', '.join(f'{gain:.2f} at {tokens:,}' for tokens, gain in found)} tokens: it is the "
        "streaming policy on the cost model, where the computation of a long sequence takes longer than its "
        "transfers, so that the gain falls with the length; the paper's rises."
    )


def _pipeline(detail: Detail) -> str:
    plain, tail = (statistics.median(detail["figure_15b"][rung]) for rung in ("veRL", "+ tail batching"))
    return (
        f"the longest response of a step has {plain:,.0f} tokens in plain rounds and {tail:,.0f} with tail batching "
        "(medians), but training of the batch before runs beside the rollout there, and where it is the longer of "
        "the two a shorter rollout does not show."
    )


_SIZE = r"(7B/8k|14B/16k|32B/32k): "
WHY = (
    Why("Tail batching alone", _SIZE + r"\+ tail batching", _tail),
    Why("Rewards beside the rollout", _SIZE + r"\+ (reward scheduler|parallelism planner)", _rewards),
    Why("The parallelism planner", _SIZE + r"\+ parallelism planner", _planner),
    Why("Streaming", _SIZE + r"\+ stream trainer", _stream),
    Why("RLHFuse, strengthened", _SIZE + r"(over|short rounds, over) RLHFuse", _fuse),
    Why("Short rounds", r"(" + _SIZE + r"short rounds, over|32k: rollout, plain rounds over short)", _short),
    Why("Figure 12", r"(rollout, .* (at best)|32k: rollout, prompts alone)", _sweep),
    Why("Table 1, code", r"veRL, 14B/16k, (code|judged)", _code),
    Why("Table 1, maths", r"veRL, 14B/16k, math", _cheap),
    Why("Figure 14c", r"code, 7B/8k", _timeout),
    Why("Table 3", r"(long rounds, 7B/8k, maths|no GPU freed over)", _table_3),
    Why("Table 4", r"long rounds: streaming over", _table_4),
    Why("Figure 15", r"one-off, 7B/8k", _pipeline),
    Why("Figure 16", r"14B/16k( on|: throughput)", _larger),
    Why("Figure 5", r"(TPOT|TTFT|concurrent tokens)", _first),
    Why("Figure 13", r"(14B on 16 GPUs|TP at|14B/32k, short)", _thirteen),
    Why("Figure 14b", r"(judge, layers streamed|the same at 32k)", _judge),
)


def reasons(result: dict[str, Any]) -> list[str]:
    """Of a result of the full benchmark: one paragraph an entry that covers a row beyond the bar, for a list in Markdown."""
    detail = result["detail"]
    off = [row["what"] for row in detail["rows"] if abs(row["off"]) > BAR]
    return [f"- **{why.title}**: {why.says(detail)}" for why in WHY if any(re.match(why.rows, what) for what in off)]


def unexplained(rows: list[dict[str, Any]]) -> list[str]:
    """Rows beyond the bar that nothing covers."""
    off = [row["what"] for row in rows if abs(row["off"]) > BAR]
    return [what for what in off if not any(re.match(why.rows, what) for why in WHY)]
