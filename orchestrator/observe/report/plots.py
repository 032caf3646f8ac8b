"""Drawings by matplotlib, as SVG: for the report's page, whose style sheet colours them, or as files of their own.

Guarantees: the same data give the same bytes (with one version of matplotlib); no state of pyplot; matplotlib is imported when
the first drawing is made. Every drawing has a title and a description for screen readers, and the marks that were given a
:meth:`Drawing.tip` say their figures when they are pointed at. A unit is a CSS pixel at full size.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from markupsafe import Markup

from orchestrator.api import ConfigError
from orchestrator.observe.report.page_templates import fill

Point = tuple[float, float]
# Colour -> (its light value, its name in page.css): on a page the name decides, in light as in dark.
_COLOURS = {
    "c0": ("#9aa3ab", "n"), "c1": ("#0b6fb8", "blue"), "c2": ("#bf6600", "orange"), "c3": ("#0a8f72", "green"),
    "c4": ("#b4578f", "pink"), "c5": ("#4aa7dc", "sky"), "c6": ("#8a7a00", "olive"), "c7": ("#6d5bd0", "violet"),
    "bad": ("#c2331d", "alarm"),
    "ink": ("#1c2126", "ink"), "soft": ("#5b646d", "soft"), "faint": ("#8b949c", "faint"), "grid": ("#ecedea", "grid"),
    "sheet": ("#fefefe", "sheet"), "on": ("#fdfdfd", "on-colour"),
}  # fmt: skip
COLOUR = {name: light for name, (light, _) in _COLOURS.items()}
_OVER = {"zorder": 3, "clip_on": False}  # a point at the end of an axis is drawn whole
_FAMILY = "Segoe UI, Helvetica Neue, Arial, sans-serif"  # of a file; a page has its own


@dataclass(frozen=True)
class Size:
    """A drawing's width in units. ``narrow``: for a phone."""

    width: float
    narrow: bool = False

    @property
    def ticks(self) -> int:
        """How many ticks an x axis has room for."""
        return 4 if self.width < 500 else 8


WIDE, HALF, NARROW, SMALL = Size(960), Size(464), Size(440, narrow=True), Size(300)


LegendItem = tuple[str, str, bool]  # words, colour, hatched (waiting)


@dataclass(frozen=True)
class Chart:
    """A drawing in one size, or in two of which the page shows the one that fits, and what its colours mean."""

    drawings: tuple[str, ...]
    legend: Sequence[LegendItem] = ()


def chart(
    draw: Callable[[Size], str], sizes: Sequence[Size] = (WIDE, NARROW), legend: Sequence[LegendItem] = ()
) -> Chart | None:
    """None when there is nothing to draw."""
    drawings = tuple(draw(size) for size in sizes)
    return Chart(drawings, legend) if drawings[0] else None


@dataclass(frozen=True)
class Margins:
    """Room around the axes; the left one grows with the labels of the ticks."""

    left: float = 36.0
    right: float = 14.0
    top: float = 30.0
    bottom: float = 40.0


def new_figure(width: float, height: float) -> Any:
    """A figure of matplotlib's, in units. Raises ConfigError where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError("report", "", "needs matplotlib: pip install rl-coserve[report]") from error
    figure = Figure(figsize=(width / 72, height / 72), dpi=72)  # SVG is written in points: one is a unit
    figure.patch.set_visible(False)
    return figure


def style_axes(axes: Any) -> None:
    """A grid of horizontal lines, an axis below, nothing else."""
    axes.patch.set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=COLOUR["grid"], linewidth=1)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set(color=COLOUR["faint"], alpha=0.6)
    axes.tick_params(length=0, pad=6, labelcolor=COLOUR["faint"], labelsize=11.5)


class Drawing:
    """One pair of axes with its title and tips. Draw on ``axes`` in colours of :data:`COLOUR`."""

    def __init__(
        self, width: float, height: float, title: str, about: str = "", margins: Margins | None = None
    ) -> None:
        self.width, self.height = width, height
        self._title, self._about, self._margins = title, about, margins or Margins()
        self.figure = new_figure(width, height)
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        style_axes(self.axes)
        self._tips: list[tuple[float, float, float, float, str]] = []
        self.y_scale(0.0, 1.0, ticks=0)

    @property
    def left(self) -> float:
        """Where the axes begin, in units."""
        axis = self.axes.yaxis
        widest = max((len(text) for text in axis.get_major_formatter().format_ticks(axis.get_ticklocs())), default=0)
        return max(self._margins.left, 14 + 6.8 * widest)

    @property
    def unit(self) -> float:
        """Units of width for one of the x axis."""
        low, high = self.axes.get_xlim()
        return float((self.width - self._margins.right - self.left) / (high - low))

    def x_scale(
        self,
        low: float,
        high: float,
        label: str = "",
        ticks: int = 8,
        form: Callable[[float], str] | None = None,
        unit: float = 1.0,
    ) -> None:
        """From ``low`` to ``high``, with about so many ticks at round multiples of ``unit``; its name at the right end."""
        from matplotlib.ticker import FixedLocator

        self.axes.set_xlim(low, high)
        places = [at * unit for at in _round(low / unit, high / unit, ticks)]
        self.axes.xaxis.set_major_locator(FixedLocator([at for at in places if low <= at <= high]))
        self.axes.xaxis.set_major_formatter(_formatter(form, unit))
        self.axes.set_xlabel(label, loc="right", color=COLOUR["soft"], fontsize=12, labelpad=2)

    def y_scale(
        self, low: float, high: float, label: str = "", ticks: int = 5, form: Callable[[float], str] | None = None
    ) -> None:
        """Over at least these values; it ends at round ones. Its name is above it; without ticks there is no scale."""
        from matplotlib.ticker import FixedLocator

        places = _round(low, high, ticks) if ticks else [low, high]
        self.axes.set_ylim(places[0], places[-1])
        self.axes.yaxis.set_major_locator(FixedLocator(places if ticks else []))
        self.axes.yaxis.set_major_formatter(_formatter(form))
        if label:
            self.figure.text(0, 1 - 13 / self.height, label, color=COLOUR["soft"], fontsize=12)

    def rows(self, names: Sequence[str]) -> None:
        """One row each instead of a y axis, the first above: row n reaches from n to n + 1."""
        from matplotlib.ticker import FixedFormatter, FixedLocator

        self.axes.set_ylim(len(names), 0)
        self.axes.grid(False)
        self.axes.yaxis.set_major_locator(FixedLocator([at + 0.5 for at in range(len(names))]))
        self.axes.yaxis.set_major_formatter(FixedFormatter(names))
        self.axes.tick_params(axis="y", labelcolor=COLOUR["ink"], labelsize=13)

    def line(self, points: Sequence[Point], colour: str, **style: Any) -> None:
        """A line, interrupted where a value is not finite; a point between two gaps is a dot."""
        xs, ys = [x for x, _ in points], [y for _, y in points]
        style = {"linewidth": 1.7, "solid_capstyle": "round"} | style
        self.axes.plot(xs, ys, color=COLOUR[colour], **style)
        known = [False, *(math.isfinite(y) for y in ys), False]
        lonely = [point for at, point in enumerate(points) if known[at + 1] and not known[at] and not known[at + 2]]
        if lonely and style.get("marker") is None:
            self.axes.plot([x for x, _ in lonely], [y for _, y in lonely], ".", color=COLOUR[colour], markersize=3)

    def smoothed(self, points: Sequence[Point], colour: str, window: int, **style: Any) -> None:
        """The raw line, faint, under its moving mean."""
        if window > 1:
            self.line(thinned(points), colour, linewidth=1, alpha=0.34)
            points = smooth(points, window)
        self.line(thinned(points), colour, **({"linewidth": 2.4 if window > 1 else 1.7} | style))

    def interval(
        self, points: Sequence[tuple[float, float, float, float]], colour: str, bars: bool = True, **style: Any
    ) -> None:
        """A line with what it may as well be, as a band and as bars: (x, value, low, high)."""
        xs, ys, lows, highs = ([point[at] for point in points] for at in range(4))
        self.axes.fill_between(xs, lows, highs, color=COLOUR[colour], alpha=0.13, linewidth=0)
        self.line(list(zip(xs, ys, strict=True)), colour, **({"linewidth": 2.4} | style))
        if bars:
            self.whiskers([(x, low, high) for x, _, low, high in points], colour)

    def whiskers(self, points: Sequence[tuple[float, float, float]], colour: str) -> None:
        """Intervals: (x, low, high)."""
        xs, lows, highs = ([point[at] for point in points] for at in range(3))
        look = {"color": COLOUR[colour], "alpha": 0.75, "clip_on": False}
        self.axes.vlines(xs, lows, highs, linewidth=1.3, **look)
        self.axes.plot(xs + xs, lows + highs, "_", markersize=6, markeredgewidth=1.3, **look)

    def dot(self, x: float, y: float, colour: str, tip: str, wide: float = 8.0) -> None:
        """A point."""
        self.axes.plot([x], [y], "o", color=COLOUR[colour], markersize=wide, markeredgecolor=COLOUR["sheet"], **_OVER)
        self.tip_at(x, y, tip)

    def mark(self, x: float, words: str, colour: str, before: bool = False) -> None:
        """A vertical line with a meaning, its name at the top; ``before``: to its left."""
        self.axes.axvline(x, color=COLOUR[colour], linewidth=1.2, dashes=(2, 3) if before else (5, 4), zorder=0)
        before = before or x > sum(self.axes.get_xlim()) / 2
        at = {
            "xytext": (-5 if before else 5, 5),
            "textcoords": "offset points",
            "fontsize": 12,
            "color": COLOUR[colour],
        }
        place = self.axes.get_xaxis_transform()
        self.axes.annotate(words, (x, 1.0), xycoords=place, ha="right" if before else "left", **at)

    def level(self, y: float, words: str, colour: str, below: bool = False) -> None:
        """A horizontal line with a meaning, its name at the right."""
        self.axes.axhline(y, color=COLOUR[colour], linewidth=1.2, dashes=(5, 4))
        self.words(self.axes.get_xlim()[1], y, words, colour, ha="right", va="top" if below else "bottom")

    def words(self, x: float, y: float, words: str, colour: str, **style: Any) -> None:
        """Text at a place of the axes."""
        self.axes.text(x, y, words, color=COLOUR[colour], **({"fontsize": 12} | style))

    def stack(
        self,
        spans: Sequence[tuple[float, float]],
        lows: Sequence[float],
        heights: Sequence[float],
        colour: str,
        waits: bool = False,
    ) -> None:
        """Rectangles, each over its span (x, width); hatched for waiting."""
        xs, widths = [x for x, _ in spans], [width for _, width in spans]
        whole = {"width": widths, "bottom": lows, "align": "edge", "linewidth": 0}
        self.axes.bar(xs, heights, color=COLOUR[colour], alpha=0.22 if waits else 1.0, **whole)
        if waits:  # a hatched area has no ground of its own that is pale
            self.axes.bar(xs, heights, facecolor="none", edgecolor=COLOUR[colour], hatch="////", **whole)

    def block(
        self, x: float, y: float, width: float, height: float, colour: str, tip: str, waits: bool = False
    ) -> None:
        """A rectangle with its tip; hatched for waiting."""
        self.stack([(x, width)], [y], [height], colour, waits)
        self.tip(x, x + width, y, y + height, tip)

    def tip(self, left: float, right: float, low: float, high: float, words: str) -> None:
        """What is said when somebody points there; in values of the axes."""
        self._tips.append((left, right, low, high, words))

    def tip_at(self, x: float, y: float, words: str, radius: float = 7.0) -> None:
        """The same for a point."""
        low, high = self.axes.get_ylim()
        wide = radius / self.unit
        tall = radius * abs(high - low) / (self.height - self._margins.top - self._margins.bottom)
        self.tip(x - wide, x + wide, y - tall, y + tall, words)

    def columns(self, entries: Sequence[tuple[float, str]]) -> None:
        """Tips over the whole height, each around its x."""
        (first, last), (low, high) = self.axes.get_xlim(), self.axes.get_ylim()
        middles = ((a + b) / 2 for (a, _), (b, _) in pairwise(entries))
        for (_, words), (begin, end) in zip(entries, pairwise([first, *middles, last]) if entries else (), strict=True):
            self.tip(begin, end, low, high, words)

    def page_svg(self) -> str:
        """The drawing as a part of the page."""
        left, bottom, wide, tall = self._place()
        (x0, x1), (y0, y1) = self.axes.get_xlim(), self.axes.get_ylim()
        hits = []
        for begin, end, low, high, words in self._tips:
            xs = sorted(left + min(max((x - x0) / (x1 - x0), 0.0), 1.0) * wide for x in (begin, end))
            ys = sorted(bottom - min(max((y - y0) / (y1 - y0), 0.0), 1.0) * tall for y in (low, high))
            places = (xs[0], ys[0], max(xs[1] - xs[0], 0.5), max(ys[1] - ys[0], 0.5))
            hits.append((*(f"{at:.1f}".removesuffix(".0") for at in places), words))
        drawn = _svg(self.figure, salt=f"{self._title} {self.width}")
        for light, name in _COLOURS.values():
            drawn = drawn.replace(light, f"var(--{name})")
        return _element(drawn, self.width, self.height, self._title, self._about, hits=hits)

    def file_svg(self) -> str:
        """The drawing as a file of its own, on white."""
        self._place()
        return figure_file(self.figure, self._title, self._about)

    def _place(self) -> tuple[float, float, float, float]:
        """Give the axes their room. Returns its left and lower edge, width and height, in units from above."""
        room, left = self._margins, self.left
        wide, tall = self.width - room.right - left, self.height - room.bottom - room.top
        self.axes.set_position((left / self.width, room.bottom / self.height, wide / self.width, tall / self.height))
        return left, self.height - room.bottom, wide, tall


def figure_file(figure: Any, title: str, about: str = "") -> str:
    """A figure as a file of its own, on white."""
    width, height = (72 * side for side in figure.get_size_inches())
    return _element(_svg(figure, salt=title), width, height, title, about, family=_FAMILY) + "\n"


def smooth(points: Sequence[Point], window: int) -> list[Point]:
    """The centred mean over ``window`` finite neighbours (fewer at the ends)."""
    half, found = window // 2, []
    for index, (x, _) in enumerate(points):
        found.append((x, _mean(points[max(0, index - half) : index + half + 1])))
    return found


def thinned(points: Sequence[Point], limit: int = 400) -> list[Point]:
    """At most ``limit`` points, each the mean of its neighbours, so that long runs stay small files."""
    if len(points) <= limit:
        return list(points)
    parts = (points[at * len(points) // limit : (at + 1) * len(points) // limit] for at in range(limit))
    return [(sum(x for x, _ in part) / len(part), _mean(part)) for part in parts]


def spread(items: int, limit: int = 120) -> list[int]:
    """At most ``limit`` indices over ``items``, evenly, the last included."""
    if items <= limit:
        return list(range(items))
    return sorted({round(index * (items - 1) / (limit - 1)) for index in range(limit)})


def _mean(points: Sequence[Point]) -> float:
    finite = [y for _, y in points if math.isfinite(y)]
    return sum(finite) / len(finite) if finite else math.nan


def _round(low: float, high: float, ticks: int) -> list[float]:
    from matplotlib.ticker import MaxNLocator

    if not math.isfinite(low) or not math.isfinite(high):
        low, high = 0.0, 1.0
    if high <= low:
        high = low + (abs(low) or 1.0)
    return [float(at) for at in MaxNLocator(ticks, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)]


def _formatter(form: Callable[[float], str] | None, unit: float = 1.0) -> Any:
    from matplotlib.ticker import FuncFormatter

    write = form or (lambda value: f"{value + 0.0:,.10g}")
    return FuncFormatter(lambda value, _: write(value / unit))


def _svg(figure: Any, salt: str) -> str:
    """What matplotlib draws, without its head: nothing in it is named but what is referred to, and positions have two digits."""
    import matplotlib

    stream = io.StringIO()
    settings = {"svg.fonttype": "none", "svg.hashsalt": salt, "hatch.linewidth": 1.4}
    with matplotlib.rc_context(settings):
        figure.savefig(stream, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    drawn = stream.getvalue()
    drawn = drawn[drawn.index(">", drawn.index("<svg")) + 1 : drawn.rindex("</svg>")]
    drawn = re.sub(r'<g id="[^"]*"', "<g", drawn).replace("xlink:href", "href")
    for useless in (
        r"<metadata>.*?</metadata>", r"<style.*?</style>", r"<defs>\s*</defs>", r"<!--.*?-->", r"<g\s*/>",
        r' transform="rotate\(-0 [^"]*"', r" font-family: [^;]*;",
    ):  # fmt: skip
        drawn = re.sub(useless, "", drawn, flags=re.DOTALL)
    drawn = re.sub(r' (?:d|x|y|transform)="[^"]*"', lambda found: _shorter(found[0]), drawn)
    return re.sub(r">\s+<", "><", drawn).strip()


def _shorter(text: str) -> str:
    text = re.sub(r"-?\d+\.\d+", lambda found: f"{float(found[0]):.2f}".rstrip("0").rstrip("."), text)
    return re.sub(r"\s+", " ", text).replace(' "', '"')


def _element(
    drawn: str,
    width: float,
    height: float,
    title: str,
    about: str,
    hits: Sequence[tuple[str, ...]] = (),
    family: str = "",
) -> Markup:
    """``family``: of the fonts of a file, which is on white; "": a part of a page."""
    label = f"{title}. {about}" if about else title
    size = {"width": f"{width:g}", "height": f"{height:g}"}
    words = {"title": title, "about": about, "label": label, "family": family}
    return fill("plot.svg", drawn=Markup(drawn), hits=hits, **size, **words)
