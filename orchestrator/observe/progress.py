"""What a person sees while ``rl-coserve train`` runs. Called by the pipeline on the event loop.

On a terminal: a panel that says where the run stands and, always, what it is waiting for. Elsewhere, or with ``NO_COLOR``
set: one plain line a step, an evaluation, a message, a new reason for waiting that has lasted five seconds, and what is
being waited for after each minute in which nothing else was said.

Its figures are those of every view (:mod:`orchestrator.observe.run_figures`), folded from the run's events as they happen.

Guarantees: no thread, no clock of its own (``now`` is the loop's time), no sleeping; drawing is limited to a few times a
second however often it is called. A stream that can no longer be written to (a closed terminal or pipe) silences the
display, never the run. Text from the run is never taken for markup, nor a message for what steers a terminal.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from orchestrator.observe.event_records import Evaluation, Step
from orchestrator.observe.report.page_text import clock, printable, sparkline
from orchestrator.observe.run_figures import Curve, EventFigures, lag_words

_REDRAW_SECONDS = 0.2  # between two drawings, unless something happened
_WAIT_SECONDS = 5.0  # a plain line for a reason that lasted this long
_REMIND_SECONDS = 60.0  # without any line, one says what is being waited for
_CURVE = 40  # points of a sparkline


class _Terminal(Console):
    """A console whose broken pipe ends the display; rich's own ends the process."""

    def on_broken_pipe(self) -> None:
        """Say nothing more."""
        self.quiet = True


class Progress:
    """The display of one run. ``steps`` are planned, ``minutes`` is the time limit, ``now`` the loop's time in seconds.

    Give :meth:`take` every event of the run. Numbers that :meth:`update` knows of what is under way: ``in_flight``, ``buffered``,
    ``training`` (whether a step is being trained), ``ledger``.
    """

    def __init__(
        self,
        *,
        steps: int,
        minutes: float | None,
        name: str,
        now: Callable[[], float],
        stream: TextIO | None = None,
    ) -> None:
        self._steps, self._minutes, self._name, self._now = steps, minutes, name, now
        self._stream = stream if stream is not None else sys.stdout
        self._begun = now()
        self._figures = EventFigures(name)
        self._stage, self._detail = "startup", ""
        self._waiting = ""
        self._reason, self._reason_since, self._reason_told = "", self._begun, ""
        self._told_at = self._begun  # when the last plain line was written
        self._drawn = float("-inf")
        self._silent = False
        self._terminal: Live | None = None
        if self._stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
            console = _Terminal(file=self._stream)
            self._terminal = Live(self._panel(), console=console, auto_refresh=False, transient=False)
            self._guarded(self._terminal.start)

    # -- what the pipeline calls -------------------------------------------------------------------------------------

    watched = True

    def stage(self, name: str, detail: str = "") -> None:
        """The loop enters a stage."""
        self._stage, self._detail = name, printable(detail)
        if self._terminal is None and name != "get_batch":  # every step has that one
            self._line(f"{name}: {self._detail}" if detail else name)
        self._draw(at_once=True)

    def waiting(self, reason: str) -> None:
        """What the run waits for now, "" for nothing. May be called at any rate."""
        self._waiting = reason = printable(reason)  # it may quote what an environment said
        now = self._now()
        # "3 of 32 groups" and "4 of 32 groups" are one reason
        same = re.sub(r"\d+", "#", reason)
        if same != self._reason:
            self._reason, self._reason_since = same, now
        if self._terminal is None and reason:
            lasted = now - self._reason_since
            if same != self._reason_told and lasted >= _WAIT_SECONDS:
                self._reason_told = same
                self._line(f"waiting for: {reason} (for {lasted:.0f} s)")
            elif now - self._told_at >= _REMIND_SECONDS:
                self._line(f"waiting for: {reason} (nothing else for {now - self._told_at:.0f} s)")
        self._draw()

    def take(self, event: Mapping[str, Any]) -> None:
        """One more event of the run."""
        try:
            found = self._figures.take(event)
        except ValueError:  # it is in the log, and no figure of ours
            return
        match found:
            case Step():
                words = self._step_line(found)
            case Evaluation():
                words = f"evaluation ({found.phase}): success {_success_words(found)}"
            case _:
                return
        if self._terminal is None:
            self._line(words)
        self._draw(at_once=True)

    def update(self, **numbers: Any) -> None:
        """New numbers of what is under way; those not named stay as they are."""
        self._figures.take_live({**self._figures.live, **numbers})
        self._draw()

    def message(self, text: str) -> None:
        """Something that must be read; it stays on the screen."""
        text = printable(text)
        if self._terminal is None:
            self._line(text)
        else:
            style = "bold red" if text.startswith("ALARM") else "yellow"
            live = self._terminal
            self._guarded(lambda: live.console.print(Text(text, style=style)))
            self._draw(at_once=True)

    def close(self) -> None:
        """The last picture stays. Idempotent."""
        live, self._terminal = self._terminal, None
        if live is not None:
            self._waiting = ""
            self._guarded(lambda: live.update(self._panel()))
            self._silent = False  # stopping gives back what rich redirected, whatever became of the stream
            self._guarded(live.stop)
        self._silent = True

    # -- numbers -----------------------------------------------------------------------------------------------------

    @property
    def _left(self) -> float | None:
        """Seconds until the last step or the time limit, None until a step's time is known."""
        if (period := self._figures.seconds_per_step) is None:
            return None
        left = (self._steps - self._figures.step) * period
        return min(left, self._limit - self._elapsed) if self._limit is not None else left

    @property
    def _elapsed(self) -> float:
        return self._now() - self._begun

    @property
    def _limit(self) -> float | None:
        return self._minutes * 60 if self._minutes is not None else None

    # -- words -------------------------------------------------------------------------------------------------------

    def _step_line(self, step: Step) -> str:
        figures = self._figures
        parts = [f"step {step.number}/{self._steps}", f"reward {step.reward_mean:.3f}"]
        if figures.last_evaluation is not None:
            parts.append(f"success {_success_words(figures.last_evaluation)}")
        parts += [*self._speed(), *self._rollout()]
        if figures.lag:
            parts.append(f"lag {lag_words(figures.lag)}")
        ledger = figures.ledger
        parts.append(f"LEDGER: {ledger.sum_words}" if ledger.difference else "ledger closes")
        return "  ".join([*parts, clock(self._elapsed)])

    def _speed(self) -> list[str]:
        return [f"{rate:,.0f} tokens/s"] if (rate := self._figures.tokens_per_s) is not None else []

    def _rollout(self) -> list[str]:
        live = self._figures.live
        return [f"{live[name]:,} {words}" for name, words in _COUNTS if name in live]

    # -- the panel ---------------------------------------------------------------------------------------------------

    def _panel(self) -> RenderableType:
        figures = self._figures
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim", no_wrap=True)
        rows.add_column(no_wrap=True, overflow="ellipsis")
        if figures.last_evaluation is not None:
            words = Text(f"{_success_words(figures.last_evaluation)}  ")
            rows.add_row("success", words + Text(_drawn(figures.curves["success"]), "cyan"))
        if figures.last_step is not None:
            words = Text(f"{figures.last_step.reward_mean:.3f}  ")
            rows.add_row("reward", words + Text(_drawn(figures.curves["reward"]), "blue"))
        for name, parts in (("speed", self._speed()), ("rollout", self._rollout())):
            if parts:
                rows.add_row(name, ", ".join(parts))
        rows.add_row("trainer", Text(self._trainer_words()))
        if (ledger := figures.ledger).started:
            mark, style = ("✗", "bold red") if ledger.difference else ("✓", "")
            rows.add_row("ledger", Text(f"{ledger.sum_words} {mark}", style))
        doing = f"{self._stage}: {self._detail}" if self._detail else self._stage
        waits = Text(self._waiting or doing, "" if self._waiting else "dim")
        rows.add_row("waiting for" if self._waiting else "now", waits)
        return Panel(Group(self._bar(), rows), title=Text(f"rl-coserve · {self._name}"), title_align="left", width=None)

    def _bar(self) -> RenderableType:
        done = self._figures.step
        filled = round(30 * min(1.0, done / self._steps))
        time = clock(self._elapsed) + (f" of {clock(self._limit)}" if self._limit is not None else "")
        if self._left is not None and done < self._steps:
            time += f", about {clock(max(0.0, self._left))} left"
        bar = Text.assemble(("━" * filled, "green"), ("━" * (30 - filled), "dim"))
        return Text.assemble(bar, f"  step {done}/{self._steps}  ", (time, "dim"), no_wrap=True, overflow="ellipsis")

    def _trainer_words(self) -> str:
        figures = self._figures
        parts = ["training" if figures.live.get("training") else "idle"]
        if figures.last_step is not None:
            parts += [f"version {figures.version}", f"staleness {lag_words(figures.lag) or '-'}"]
        return ", ".join(parts)

    # -- output ------------------------------------------------------------------------------------------------------

    def _draw(self, at_once: bool = False) -> None:
        live = self._terminal
        if live is None or not (at_once or self._now() - self._drawn >= _REDRAW_SECONDS):
            return
        self._drawn = self._now()
        self._guarded(lambda: live.update(self._panel(), refresh=True))

    def _line(self, text: str) -> None:
        def write() -> None:
            self._stream.write(text + "\n")
            self._stream.flush()

        self._told_at = self._now()
        self._guarded(write)

    def _guarded(self, write: Callable[[], object]) -> None:
        """Write, unless the stream is gone: a run outlives the terminal that it was started from."""
        if self._silent:
            return
        try:
            write()
        except OSError:  # a broken pipe, a closed terminal
            self._silent = True
        except ValueError:
            if not self._stream.closed:
                raise
            self._silent = True


_COUNTS = (("in_flight", "in flight"), ("buffered", "buffered"))


def _drawn(curve: Curve) -> str:
    return sparkline([point[1] for point in curve.shown()[-_CURVE:] if point[1] is not None])


def _success_words(found: Evaluation) -> str:
    words = f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"
    if found.samples > 1 and found.solved is not None:
        words += f", any of {found.samples}: {found.solved:.3f}"
    if found.reward is not None and abs(found.reward - found.value) > 0.0005:
        words += f", reward {found.reward:.3f}"
    if found.failed:
        words += f", {found.failed} of {found.episodes} episodes failed"
    return words
