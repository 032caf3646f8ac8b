"""Trajectories in a terminal: ``rl-coserve show``. A list, or one turn by turn: what the policy was shown, what it said, in the
colour of the weights that said it, what that earned.

Guarantees: pure; text from the run is never taken for markup, nor for what steers a terminal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from orchestrator.observe.report.page_text import duration, plural, printable, significant
from orchestrator.observe.trajectory_reader import ShownTrajectory, ShownTurn

_COLOURS = ("blue", "dark_orange", "green", "magenta", "cyan", "yellow")  # of versions, in turn
_SIBLINGS = 8  # of a group


def list_screen(lines: Sequence[Mapping[str, Any]], total: int, note: str) -> RenderableType:
    """``note``: what was asked for, in words."""
    rows = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    rows.add_column("trajectory", overflow="fold")
    rows.add_column("task")
    for name in ("step", "reward", "turns", "said", "time"):
        rows.add_column(name, justify="right")
    rows.add_column("end", overflow="fold")
    for line in lines:
        rows.add_row(
            Text(printable(line["trajectory_id"])),
            Text(printable(line["task"])),
            f"{line['step']:,}",
            _number(line["total_reward"]),
            f"{line['total_steps']:,}",
            f"{line['generated_tokens']:,}",
            duration(line["wall_time"]),
            Text(printable(line["outcome"]), _style_of(line["outcome"])),
        )
    head = Text.assemble((f"{plural(total, 'trajectory', 'trajectories')}{note}", "bold"))
    if len(lines) < total:
        head.append(f", {len(lines):,} shown", "dim")
    return Group(head, rows) if lines else head


def trajectory_screen(shown: ShownTrajectory, missing: str) -> RenderableType:
    """``missing``: why ids are shown instead of text, "" where text is."""
    line = shown.line
    head = Text.assemble((printable(line["trajectory_id"]), "bold"), "  ")
    head.append(printable(line["outcome"]), _style_of(line["outcome"]))
    facts = [
        printable(line["task"]),
        f"step {line['step']:,}",
        f"reward {_number(line['total_reward'])}",
        plural(line["total_steps"], "turn"),
        f"{line['generated_tokens']:,} of {line['total_tokens']:,} tokens said",
        duration(line["wall_time"]),
    ]
    facts[3:3] = [f"{printable(name)} {significant(value)}" for name, value in shown.metrics.items()]
    if line["truncated"]:
        facts.append("truncated: a limit ended it")
    if shown.gap is not None:
        facts.append(f"log-prob gap of the batch {significant(shown.gap)}")
    parts: list[RenderableType] = [head, Text(", ".join(facts), "dim")]
    asked = f"{printable(shown.prompt)} (seed {shown.seed})" if shown.prompt else f"seed {shown.seed}"
    parts.append(Text(f"prompt: {asked}", "dim"))
    if len(shown.group) > 1:
        parts.append(_group(shown))
    parts += [Text(f"error: {printable(error)}", "red") for error in shown.errors]
    if missing:
        parts.append(Text(f"token ids: {missing}", "yellow"))
    colours = _colours_of(shown.turns)
    if len(colours) > 1:
        legend = Text("versions: ", "dim")
        for version, colour in colours.items():
            legend.append(f"{version} ", colour)
        parts.append(legend)
    for index, turn in enumerate(shown.turns):
        parts += [Text(""), *_turn(index, turn, colours)]
    return Group(*parts)


def _turn(index: int, turn: ShownTurn, colours: Mapping[int, str]) -> list[RenderableType]:
    times = f"answer {duration(turn.generated)}, environment {duration(turn.environment)}"
    if turn.waited is not None:
        times += f", waited {duration(turn.waited)}, {printable(turn.worker) or 'no worker'}"
    head = Text.assemble((f"turn {index + 1}", "bold"), (f"  {times}", "dim"))
    if turn.reward:
        head.append(f"  reward {significant(turn.reward)}", "green" if turn.reward > 0 else "red")
    said = Text()
    for span in turn.action:
        said.append(printable(span.text), colours[span.version])
    parts: list[RenderableType] = [head]
    if turn.context:
        parts.append(Text(f"  a new context, {printable(turn.context)}", "yellow"))
    if turn.observed_tokens:
        parts.append(Padding(Text(printable(turn.observation), "dim"), (0, 0, 0, 2), expand=False))
    parts.append(Padding(said, (0, 0, 0, 2), expand=False))
    return parts


def _group(shown: ShownTrajectory) -> Text:
    told = Text(f"group of {len(shown.group)}: ", "dim")
    for one in shown.group[:_SIBLINGS]:
        itself = one["trajectory_id"] == shown.line["trajectory_id"]
        told.append(f"{printable(one['trajectory_id'])} {_number(one['total_reward'])}  ", "bold" if itself else "dim")
    return told.append("..." if len(shown.group) > _SIBLINGS else "", "dim")


def _colours_of(turns: Sequence[ShownTurn]) -> dict[int, str]:
    versions = sorted({span.version for turn in turns for span in turn.action})
    return {version: _COLOURS[place % len(_COLOURS)] for place, version in enumerate(versions)}


def _style_of(outcome: str) -> str:
    return "green" if outcome == "trained" else "red" if outcome.startswith("failed") else "yellow"


def _number(value: float | None) -> str:
    return "-" if value is None else significant(value)
