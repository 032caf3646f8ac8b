"""Drawing: one plot area with two axes, as inline SVG. No script; colours come from the page's style sheet by class.

Conventions: the y axis is named above its top (not rotated), the x axis at its right end; a value that is not finite
interrupts a line; every drawing carries a title and a description for screen readers; figures appear as tooltips.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from orchestrator.observe.report.page_text import coordinate, tag

Point = tuple[float, float]
DOCUMENT_STYLE = """
text{font-family:"Segoe UI","Helvetica Neue",Arial,sans-serif;font-size:12px;fill:#5b646d}
.tick{fill:#8b949c;font-size:11.5px}.end{text-anchor:end}.middle{text-anchor:middle}.value{fill:#1c2126}
.head{fill:#1c2126;font-size:15px;font-weight:600}.note{paint-order:stroke;stroke:#fff;stroke-width:4px}
.grid{stroke:#ecedea}.axis{stroke:#8b949c;opacity:.6}.line{fill:none;stroke-width:1.8}.strong{stroke-width:2.6}
.dashed{stroke-dasharray:7 4}.dotted{stroke-dasharray:2 4}.level{stroke-dasharray:5 4}
.line.c0{stroke:#9aa3ab}.line.c1{stroke:#0b6fb8}.line.c2{stroke:#bf6600}.line.c3{stroke:#0a8f72}.line.c4{stroke:#b4578f}
.line.c5{stroke:#4aa7dc}.line.c6{stroke:#8a7a00}.line.bad{stroke:#c2331d}
.dot,.bar{stroke:#fff}.dot.c0,.bar.c0{fill:#9aa3ab}.dot.c1,.bar.c1{fill:#0b6fb8}.dot.c2,.bar.c2{fill:#bf6600}
.dot.c3,.bar.c3{fill:#0a8f72}.dot.c4,.bar.c4{fill:#b4578f}.dot.c5,.bar.c5{fill:#4aa7dc}.dot.c6,.bar.c6{fill:#8a7a00}
.dot.bad{fill:#c2331d}.pale{opacity:.55}
"""


@dataclass(frozen=True)
class Axis:
    """A linear scale with its ticks."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    label: str = ""


@dataclass(frozen=True)
class Margins:
    """Room around the plot area."""

    left: float = 46.0
    right: float = 14.0
    top: float = 30.0
    bottom: float = 40.0


def nice_axis(
    low: float,
    high: float,
    label: str,
    form: Callable[[float], str] | None = None,
    ticks: int = 5,
    whole: bool = False,
) -> Axis:
    """An axis over at least [low, high] whose ends and ticks are round numbers; integers only when ``whole``. Without
    ``form``, all ticks are written with the decimals that their distance needs."""
    if not math.isfinite(low) or not math.isfinite(high):
        low, high = 0.0, 1.0
    if high <= low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / max(1, ticks)
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw * 0.999)
    if whole:
        step = max(1.0, round(step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    values = [index * step for index in range(first, last + 1)]
    write = form or _tick_form(step)
    return Axis(values[0], values[-1], tuple((value, write(value)) for value in values), label)


def _tick_form(step: float) -> Callable[[float], str]:
    if step < 1e-3:  # 0.0005 and less: as a multiple of a power of ten
        return lambda value: "0" if abs(value) < step / 2 else f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")
    decimals = next(digits for digits in range(8) if abs(round(step, digits) - step) < step * 1e-6)
    return lambda value: f"{value + 0.0:,.{decimals}f}"


def step_axis(last: int, label: str = "training step", ticks: int = 8) -> Axis:
    """Training steps from 0 to the last one, without room behind it."""
    wide = nice_axis(0, max(last, 1), label, lambda value: f"{value:,.0f}", ticks, whole=True)
    return Axis(0.0, float(max(last, 1)), tuple(tick for tick in wide.ticks if tick[0] <= max(last, 1)), label)


class Plot:
    """A drawing of ``width`` by ``height`` units. Marks are drawn in the order of the calls, over the grid."""

    def __init__(
        self,
        width: float,
        height: float,
        x: Axis,
        y: Axis,
        title: str,
        about: str = "",
        margins: Margins | None = None,
        style: str = "",
    ) -> None:
        self.width, self.height, self.x_axis, self.y_axis = width, height, x, y
        self._title, self._about, self._style = title, about, style
        room = margins or Margins()
        widest = max((len(text) for _, text in y.ticks), default=0)
        self.left, self.right = max(room.left, 14 + 6.8 * widest), width - room.right
        self.top, self.bottom = room.top, height - room.bottom
        self._marks: list[str] = []
        self._grid()

    def x(self, value: float) -> float:
        """Where a value of the x axis is."""
        return self.left + (self.right - self.left) * (value - self.x_axis.low) / (self.x_axis.high - self.x_axis.low)

    def y(self, value: float) -> float:
        """Where a value of the y axis is; values beyond the axis are held at its ends."""
        value = min(max(value, self.y_axis.low), self.y_axis.high)
        return self.bottom - (self.bottom - self.top) * (value - self.y_axis.low) / (self.y_axis.high - self.y_axis.low)

    def add(self, markup: str) -> None:
        """A mark of one's own."""
        self._marks.append(markup)

    def line(self, points: Sequence[Point], style: str) -> None:
        """A line through finite points, interrupted at others."""
        path = ""
        pen = "M"
        for x, y in points:
            if not (math.isfinite(x) and math.isfinite(y)):
                pen = "M"
                continue
            path += f"{pen}{coordinate(self.x(x))} {coordinate(self.y(y))}"
            path += "h0" if pen == "M" else ""  # a point between two gaps is drawn as a dot
            pen = "L"
        if path:
            self.add(tag("path", d=path, class_=f"line {style}"))

    def band(self, points: Sequence[tuple[float, float, float]], style: str) -> None:
        """The area between two lines: (x, low, high)."""
        if len(points) > 1:
            upper = " ".join(f"{coordinate(self.x(x))},{coordinate(self.y(high))}" for x, _, high in points)
            lower = " ".join(f"{coordinate(self.x(x))},{coordinate(self.y(low))}" for x, low, _ in reversed(points))
            self.add(tag("polygon", points=f"{upper} {lower}", class_=f"band {style}"))

    def dot(self, x: float, y: float, style: str, radius: float = 4.0, tooltip: str = "") -> None:
        """A point."""
        inside = tag("title", escape(tooltip)) if tooltip else ""
        self.add(tag("circle", inside, cx=self.x(x), cy=self.y(y), r=radius, class_=f"dot {style}"))

    def whisker(self, x: float, low: float, high: float, style: str) -> None:
        """An interval."""
        centre, top, bottom = self.x(x), self.y(high), self.y(low)
        path = f"M{coordinate(centre)} {coordinate(top)}V{coordinate(bottom)}"
        for end in (top, bottom):
            path += f"M{coordinate(centre - 3)} {coordinate(end)}h6"
        self.add(tag("path", d=path, class_=f"whisker {style}"))

    def level(self, y: float, label: str, style: str, below: bool = False) -> None:
        """A horizontal reference line with its name at the right."""
        at = self.y(y)
        self.add(tag("line", x1=self.left, x2=self.right, y1=at, y2=at, class_=f"level {style}"))
        self.text(self.right - 2, at + (15 if below else -6), label, f"note end {style}")

    def mark(self, x: float, label: str, style: str) -> None:
        """A vertical reference line with its name at the top."""
        at = self.x(x)
        self.add(tag("line", x1=at, x2=at, y1=self.top, y2=self.bottom, class_=f"level {style}"))
        near_end = at > (self.left + self.right) / 2
        self.text(at if near_end else at + 6, self.top - 6, label, f"note {'end ' if near_end else ''}{style}")

    def rect(self, x: float, y: float, width: float, height: float, style: str, tooltip: str = "") -> None:
        """A rectangle in drawing units."""
        inside = tag("title", escape(tooltip)) if tooltip else ""
        self.add(tag("rect", inside, x=x, y=y, width=max(width, 0.3), height=max(height, 0.0), class_=style))

    def text(self, x: float, y: float, text: str, style: str = "note") -> None:
        """Words at a place in drawing units."""
        self.add(tag("text", escape(text), x=x, y=y, class_=style))

    def hover(self, entries: Sequence[tuple[float, str]]) -> None:
        """Invisible columns around x values, each with a tooltip; drawn last so that they are on top."""
        if not entries:
            return
        places = [self.x(x) for x, _ in entries]
        edges = [self.left, *((a + b) / 2 for a, b in pairwise(places)), self.right]
        for (_, tooltip), (start, end) in zip(entries, pairwise(edges), strict=True):
            self.rect(start, self.top, end - start, self.bottom - self.top, "hit", tooltip)

    def render(self) -> str:
        """The drawing as markup."""
        inside = tag("title", escape(self._title)) + (tag("desc", escape(self._about)) if self._about else "")
        label = f"{self._title}. {self._about}" if self._about else self._title
        return tag(
            "svg",
            inside + "".join(self._marks),
            viewBox=f"0 0 {coordinate(self.width)} {coordinate(self.height)}",
            role="img",
            aria_label=label,
            class_=f"plot {self._style}".strip(),
        )

    def _grid(self) -> None:
        for value, label in self.y_axis.ticks:
            at = self.y(value)
            self.add(tag("line", x1=self.left, x2=self.right, y1=at, y2=at, class_="grid"))
            self.text(self.left - 8, at + 4, label, "tick end")
        for value, label in self.x_axis.ticks:
            self.text(self.x(value), self.bottom + 17, label, "tick middle")
        self.add(tag("line", x1=self.left, x2=self.right, y1=self.bottom, y2=self.bottom, class_="axis"))
        if self.y_axis.label:
            self.text(0, 13, self.y_axis.label, "label")
        if self.x_axis.label:
            self.text(self.right, self.bottom + 34, self.x_axis.label, "label end")


def hatch(identity: str, colours: Sequence[str]) -> str:
    """Definitions of one hatching a colour class, named ``identity-colour``: waiting."""
    patterns = "".join(
        tag(
            "pattern",
            tag("rect", width=6, height=6, class_=f"hatch-ground {colour}")
            + tag("line", x1=0, y1=0, x2=0, y2=6, class_=f"hatch-line {colour}"),
            id=f"{identity}-{colour}",
            width=6,
            height=6,
            patternUnits="userSpaceOnUse",
            patternTransform="rotate(45)",
        )
        for colour in colours
    )
    return tag("defs", patterns)


def smooth(points: Sequence[Point], window: int) -> list[Point]:
    """The centred mean over ``window`` finite neighbours (fewer at the ends)."""
    half = window // 2
    result = []
    for index, (x, _) in enumerate(points):
        near = [y for _, y in points[max(0, index - half) : index + half + 1] if math.isfinite(y)]
        result.append((x, sum(near) / len(near) if near else math.nan))
    return result


def thin_out(points: Sequence[Point], limit: int) -> list[Point]:
    """At most ``limit`` points, each the mean of its neighbours, so that long runs stay small files."""
    if len(points) <= limit:
        return list(points)
    result = []
    for index in range(limit):
        part = points[index * len(points) // limit : (index + 1) * len(points) // limit]
        finite = [y for _, y in part if math.isfinite(y)]
        x = sum(x for x, _ in part) / len(part)
        result.append((x, sum(finite) / len(finite) if finite else math.nan))
    return result


def spread(items: int, limit: int) -> list[int]:
    """At most ``limit`` indices over ``items``, evenly, the last included."""
    if items <= limit:
        return list(range(items))
    return sorted({round(index * (items - 1) / (limit - 1)) for index in range(limit)})


def document(width: float, height: float, parts: Sequence[str], style: str = "") -> str:
    """An SVG file of its own, on white; ``style`` goes beside :data:`DOCUMENT_STYLE`."""
    ground = tag("rect", width=width, height=height, fill="#fff")
    return tag(
        "svg",
        tag("style", DOCUMENT_STYLE + style) + ground + "".join(parts) + "\n",
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {coordinate(width)} {coordinate(height)}",
    )


def placed(plot: Plot, x: float, y: float) -> str:
    """A plot as a part of a document."""
    where = f'<svg x="{coordinate(x)}" y="{coordinate(y)}" width="{coordinate(plot.width)}" height="{coordinate(plot.height)}" '
    return plot.render().replace("<svg ", where, 1)
