"""Numbers and times as text."""

from __future__ import annotations

import math
from collections.abc import Collection

THIN = "\u202f"  # narrow no-break space, between a number and its unit
ALPHA = "\u03b1"  # the staleness bound
_BARS = "▁▂▃▄▅▆▇█"


def printable(text: str) -> str:
    """For a terminal: with a sign in place of each control character but the end of a line. ESC begins a terminal's commands."""
    return "".join(sign if sign.isprintable() or sign == "\n" else "\N{REPLACEMENT CHARACTER}" for sign in text)


def count(value: float) -> str:
    """An integer with separators."""
    return f"{round(value):,}"


def significant(value: float, digits: int = 3) -> str:
    """A number to a few significant digits, without an exponent where one can do without."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 10**digits:
        return count(value)
    if size < 1e-4:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    decimals = max(0, digits - 1 - math.floor(math.log10(size)))
    return f"{value:.{decimals}f}"


def percent(value: float, decimals: int = 1) -> str:
    """A share as a percentage; what is there but would be rounded to nothing is said to be less than the last digit."""
    if 0 < value < 0.5 * 10 ** -(decimals + 2):
        return f"below {10**-decimals:.{decimals}f}{THIN}%"
    return f"{100 * value:.{decimals}f}{THIN}%"


def interval(low: float, high: float) -> str:
    """The bounds of a share."""
    return f"{100 * low:.1f} to {100 * high:.1f}{THIN}%"


def duration(seconds: float) -> str:
    """A stretch of time, to two units."""
    if seconds < 1e-4:
        return f"below 0.1{THIN}ms" if seconds > 0 else f"0{THIN}s"
    if seconds < 1:
        return f"{significant(1000 * seconds, 2)}{THIN}ms"
    if seconds < 60:
        return f"{significant(seconds, 2 if seconds >= 10 else 3)}{THIN}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}{THIN}min {rest}{THIN}s" if rest else f"{minutes}{THIN}min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}{THIN}h {minutes}{THIN}min" if minutes else f"{hours}{THIN}h"


def data_size(size: float) -> str:
    """Bytes."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{significant(size)}{THIN}{unit}"
        size /= 1024
    return f"{significant(size)}{THIN}GiB"


def plural(number: int, word: str, many: str = "") -> str:
    """``3 steps``."""
    return f"{number:,} {word if number == 1 else many or word + 's'}"


def sparkline(values: Collection[float]) -> str:
    """Shares from 0 to 1 as bars; other rewards by their own range."""
    low, high = min(0.0, *values), max(1.0, *values)
    return "".join(_BARS[min(7, int(8 * (value - low) / (high - low)))] for value in values)


def clock(seconds: float) -> str:
    """As 1:02:03, or 2:03."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
