"""What a person sees while ``rl-coserve train`` runs. Called by the pipeline on the event loop.

On a terminal: a panel that says where the run stands and, always, what it is waiting for. Elsewhere, or with ``NO_COLOR``
set: one plain line a step, an evaluation, a message, a new reason for waiting that has lasted five seconds, and what is
being waited for after each minute in which nothing else was said.

Guarantees: no thread, no clock of its own (``now`` is the loop's time), no sleeping; drawing is limited to a few times a
second however often it is called. A stream that can no longer be written to (a closed terminal or pipe) silences the
display, never the run. Text from the run is never taken for markup.
"""

from __future__ import annotations

import os
import re
import sys
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from orchestrator.observe.report.page_text import clock, sparkline

_REDRAW_SECONDS = 0.2  # between two drawings, unless something happened
_RATE_SECONDS = 30.0  # tokens a second are the mean over this
_WAIT_SECONDS = 5.0  # a plain line for a reason that lasted this long
_REMIND_SECONDS = 60.0  # without any line, one says what is being waited for
_CURVE = 40  # points of a sparkline
_ENDS = (
    ("trained", "trained"),
    ("evicted_stale", "stale"),
    ("aborted_redundant", "redundant"),
    ("deferred", "deferred"),
    ("filtered", "filtered"),
    ("failed", "failed"),
    ("in_flight", "in flight"),
)


class _Terminal(Console):
    """A console whose broken pipe ends the display; rich's own ends the process."""

    def on_broken_pipe(self) -> None:
        """Say nothing more."""
        self.quiet = True


class NullProgress:
    """Shows nothing: for the simulator and for tests."""

    watched = False

    def stage(self, name: str, detail: str = "") -> None:
        """Nothing."""

    def waiting(self, reason: str) -> None:
        """Nothing."""

    def update(self, **numbers: Any) -> None:
        """Nothing."""

    def message(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Progress:
    """The display of one run. ``steps`` are planned, ``minutes`` is the time limit, ``now`` the loop's time in seconds.

    Numbers that :meth:`update` knows: ``step`` (steps done), ``version``, ``reward``, ``train_success``, ``success``,
    ``low``, ``high``, ``phase``, ``tokens`` (generated so far), ``in_flight``, ``buffered``, ``training`` (whether a step is
    being trained), ``lag`` (trajectories of the batch by lag), ``ledger``. Others are ignored: the log has them.
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
        self._numbers: dict[str, Any] = {}
        self._stage, self._detail = "startup", ""
        self._waiting = ""
        self._reason, self._reason_since, self._reason_told = "", self._begun, ""
        self._told_at = self._begun  # when the last plain line was written
        self._rewards: deque[float] = deque(maxlen=_CURVE)
        self._successes: deque[float] = deque(maxlen=_CURVE)
        self._tokens: deque[tuple[float, float]] = deque()
        self._first_step: tuple[int, float] | None = None  # where the estimate of the time left starts
        self._drawn = float("-inf")
        self._silent = False
        self._live: Live | None = None
        if self._stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
            console = _Terminal(file=self._stream)
            self._live = Live(self._panel(), console=console, auto_refresh=False, transient=False)
            self._guarded(self._live.start)

    # -- what the pipeline calls -------------------------------------------------------------------------------------

    watched = True

    def stage(self, name: str, detail: str = "") -> None:
        """The loop enters a stage."""
        self._stage, self._detail = name, detail
        if self._live is None and name != "get_batch":  # every step has that one
            self._line(f"{name}: {detail}" if detail else name)
        self._draw(at_once=True)

    def waiting(self, reason: str) -> None:
        """What the run waits for now, "" for nothing. May be called at any rate."""
        self._waiting = reason
        now = self._now()
        # "3 of 32 groups" and "4 of 32 groups" are one reason
        same = re.sub(r"\d+", "#", reason)
        if same != self._reason:
            self._reason, self._reason_since = same, now
        if self._live is None and reason:
            lasted = now - self._reason_since
            if same != self._reason_told and lasted >= _WAIT_SECONDS:
                self._reason_told = same
                self._line(f"waiting for: {reason} (for {lasted:.0f} s)")
            elif now - self._told_at >= _REMIND_SECONDS:
                self._line(f"waiting for: {reason} (nothing else for {now - self._told_at:.0f} s)")
        self._draw()

    def update(self, **numbers: Any) -> None:
        """New numbers; those not named stay as they are."""
        self._numbers.update(numbers)
        if "tokens" in numbers:
            self._count_tokens(float(numbers["tokens"]))
        if "success" in numbers:
            self._successes.append(float(numbers["success"]))
            if self._live is None:
                self._line(f"evaluation ({numbers.get('phase', '')}): success {self._success_words()}")
        if "step" in numbers:
            self._take_step(int(numbers["step"]))
        self._draw(at_once="step" in numbers or "success" in numbers)

    def message(self, text: str) -> None:
        """Something that must be read; it stays on the screen."""
        if self._live is None:
            self._line(text)
        else:
            style = "bold red" if text.startswith("ALARM") else "yellow"
            live = self._live
            self._guarded(lambda: live.console.print(Text(text, style=style)))
            self._draw(at_once=True)

    def close(self) -> None:
        """The last picture stays. Idempotent."""
        live, self._live = self._live, None
        if live is not None:
            self._waiting = ""
            self._guarded(lambda: live.update(self._panel()))
            self._silent = False  # stopping gives back what rich redirected, whatever became of the stream
            self._guarded(live.stop)
        self._silent = True

    # -- numbers -----------------------------------------------------------------------------------------------------

    def _take_step(self, step: int) -> None:
        self._rewards.append(float(self._numbers.get("reward", 0.0)))
        if self._first_step is None:
            self._first_step = (step, self._now())
        if self._live is None:
            self._line(self._step_line(step))

    def _count_tokens(self, tokens: float) -> None:
        now = self._now()
        if self._tokens and tokens < self._tokens[-1][1]:
            self._tokens.clear()  # the counter started anew
        self._tokens.append((now, tokens))
        while len(self._tokens) > 2 and now - self._tokens[1][0] >= _RATE_SECONDS:
            self._tokens.popleft()

    @property
    def _rate(self) -> float | None:
        """Tokens a second, None until they can be told."""
        if len(self._tokens) < 2:
            return None
        (begin, first), (end, last) = self._tokens[0], self._tokens[-1]
        return (last - first) / (end - begin) if end > begin else None

    @property
    def _left(self) -> float | None:
        """Seconds until the last step or the time limit, None until a step's time is known."""
        if self._first_step is None:
            return None
        first, since = self._first_step
        done = int(self._numbers["step"])
        if done <= first:
            return None
        left = (self._steps - done) * (self._now() - since) / (done - first)
        return min(left, self._limit - self._elapsed) if self._limit is not None else left

    @property
    def _elapsed(self) -> float:
        return self._now() - self._begun

    @property
    def _limit(self) -> float | None:
        return self._minutes * 60 if self._minutes is not None else None

    # -- words -------------------------------------------------------------------------------------------------------

    def _step_line(self, step: int) -> str:
        numbers = self._numbers
        parts = [f"step {step}/{self._steps}", f"reward {float(numbers.get('reward', 0.0)):.3f}"]
        if self._successes:
            parts.append(f"success {self._success_words()}")
        if self._rate is not None:
            parts.append(f"{self._rate:,.0f} tokens/s")
        parts += [f"{numbers[name]:,} {words}" for name, words in _COUNTS if name in numbers]
        if "lag" in numbers:
            parts.append(f"lag {_lag_words(numbers['lag'])}")
        if "ledger" in numbers:
            words, closes = _ledger_words(numbers["ledger"])
            parts.append("ledger closes" if closes else f"LEDGER: {words}")
        return "  ".join([*parts, clock(self._elapsed)])

    def _success_words(self) -> str:
        value = f"{self._successes[-1]:.3f}"
        if "low" in self._numbers and "high" in self._numbers:
            value += f" [{float(self._numbers['low']):.3f}, {float(self._numbers['high']):.3f}]"
        return value

    # -- the panel ---------------------------------------------------------------------------------------------------

    def _panel(self) -> RenderableType:
        numbers = self._numbers
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim", no_wrap=True)
        rows.add_column(no_wrap=True, overflow="ellipsis")
        if self._successes:
            rows.add_row("success", Text(f"{self._success_words()}  ") + Text(sparkline(self._successes), "cyan"))
        if self._rewards:
            rows.add_row("reward", Text(f"{self._rewards[-1]:.3f}  ") + Text(sparkline(self._rewards), "blue"))
        if self._rate is not None:
            rows.add_row("speed", f"{self._rate:,.0f} tokens/s")
        rollout = [f"{numbers[name]:,} {words}" for name, words in _COUNTS if name in numbers]
        if rollout:
            rows.add_row("rollout", ", ".join(rollout))
        rows.add_row("trainer", Text(self._trainer_words()))
        if "ledger" in numbers:
            words, closes = _ledger_words(numbers["ledger"])
            rows.add_row("ledger", Text(f"{words} ✓" if closes else f"{words} ✗", "" if closes else "bold red"))
        waits = Text(self._waiting or self._doing(), "" if self._waiting else "dim")
        rows.add_row("waiting for" if self._waiting else "now", waits)
        return Panel(Group(self._bar(), rows), title=Text(f"rl-coserve · {self._name}"), title_align="left", width=None)

    def _bar(self) -> RenderableType:
        done = int(self._numbers.get("step", 0))
        filled = round(30 * min(1.0, done / self._steps))
        time = clock(self._elapsed) + (f" of {clock(self._limit)}" if self._limit is not None else "")
        if self._left is not None and done < self._steps:
            time += f", about {clock(max(0.0, self._left))} left"
        bar = Text.assemble(("━" * filled, "green"), ("━" * (30 - filled), "dim"))
        return Text.assemble(bar, f"  step {done}/{self._steps}  ", (time, "dim"), no_wrap=True, overflow="ellipsis")

    def _trainer_words(self) -> str:
        parts = ["training" if self._numbers.get("training") else "idle"]
        if "version" in self._numbers:
            parts.append(f"version {self._numbers['version']}")
        if "lag" in self._numbers:
            parts.append(f"staleness {_lag_words(self._numbers['lag'])}")
        return ", ".join(parts)

    def _doing(self) -> str:
        return f"{self._stage}: {self._detail}" if self._detail else self._stage

    # -- output ------------------------------------------------------------------------------------------------------

    def _draw(self, at_once: bool = False) -> None:
        live = self._live
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


def _ledger_words(ledger: Mapping[str, Any]) -> tuple[str, bool]:
    """The sum in words, and whether it closes."""
    started = int(ledger.get("started", 0))
    parts = [(int(ledger.get(key, 0)), words) for key, words in _ENDS]
    off = started - sum(number for number, _ in parts)
    terms = " + ".join(f"{number:,} {words}" for number, words in parts if number) or "0"
    return f"{started:,} started = {terms}" + (f", off by {off:,}" if off else ""), off == 0


def _lag_words(lag: Mapping[Any, int]) -> str:
    total = sum(lag.values()) or 1
    ordered = sorted((int(key), number) for key, number in lag.items())
    return ", ".join(f"{key}: {100 * number / total:.0f} %" for key, number in ordered)
