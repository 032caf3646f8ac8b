"""Drawings of ``docs/results`` from the JSON files beside them: ``python -m scripts.bench.papers.figures [FOLDER]``.

Each is one SVG file that stands alone, made with the charts of the report (:mod:`orchestrator.observe.report.svg`).
Numbers of papers are typed in here with their source and drawn dashed or pale, labelled "paper"; a line between two
printed values is only there to guide the eye.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from orchestrator.observe.report.page_text import coordinate, significant, tag
from orchestrator.observe.report.svg import Axis, Margins, Plot, Point, document, nice_axis, placed, step_axis

Row = dict[str, Any]

# ROSE, figure 10b and its text (6.3): seconds at 1 and at 200 Gbps; "within" at 5 Gbps.
ROSE_SHARDS = {"qwen3-8b": {1: 109.0, 200: 31.0}, "qwen3-32b": {1: 584.0, 200: 96.0}}
ROSE_SPARSE = {"qwen3-8b": {1: 39.0, 5: 10.0, 200: 7.0}, "qwen3-32b": {1: 89.0, 5: 30.0, 200: 21.0}}
# ROSE, 6.3, figure 10a: the factors that asynchrony, shards and sparsity bring one after the other.
ROSE_FACTORS = {"qwen3-8b": (1.6, 1.8, 4.4), "qwen3-32b": (1.5, 1.3, 4.6)}
ROSE_STEPS = ("batch", "+ async", "+ shards", "+ sparse")


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a chart and its entry in the legend. ``dots``: whether its points are marked."""

    name: str
    style: str
    points: Sequence[Point]
    dots: bool = True


def log_axis(ticks: Iterable[float], label: str, form: Callable[[float], str] = "{:g}".format) -> Axis:
    """A logarithmic scale from the first tick to the last; values are given to it as their logarithm (base 10)."""
    found = list(ticks)
    return Axis(
        math.log10(found[0]), math.log10(found[-1]), tuple((math.log10(tick), form(tick)) for tick in found), label
    )


def chart(curves: Sequence[Curve], x: Axis, y: Axis, title: str, size: tuple[float, float] = (440, 340)) -> Plot:
    """Lines over two axes."""
    about = "; ".join(
        f"{curve.name}: " + ", ".join(f"({significant(a)}, {significant(b)})" for a, b in curve.points)
        for curve in curves
        if len(curve.points) <= 12
    )
    plot = Plot(*size, x, y, title, about, Margins(left=46, right=14, top=30, bottom=40))
    for curve in curves:
        plot.line(curve.points, curve.style)
        for a, b in curve.points if curve.dots else ():
            plot.dot(a, b, next(word for word in curve.style.split() if word[0] in "cb"), 3.5, curve.name)
    return plot


def legend(curves: Sequence[Curve], x: float, y: float, width: float, columns: int) -> str:
    """A sample of each line and its name."""
    made = []
    for number, curve in enumerate(curves):
        left, top = x + number % columns * width / columns, y + number // columns * 18
        made.append(
            tag("path", d=f"M{coordinate(left)} {coordinate(top - 4)}h22", class_=f"line {curve.style}")
            + tag("text", curve.name, x=left + 28, y=top)
        )
    return "".join(made)


def page(width: float, height: float, parts: Sequence[str]) -> str:
    """An SVG file of its own."""
    return document(width, height, parts)


def heading(text: str, x: float, y: float) -> str:
    """The title of a part."""
    return tag("text", text, x=x, y=y, class_="head")


def rose_figure_10(detail: Row) -> str:
    """ROSE's figure 10 with ours on it."""
    rows = detail["rows"]
    seconds = log_axis((0.01, 0.1, 1, 10, 100, 1000, 10000), "seconds (whole model)")
    speed = log_axis((1, 5, 20, 200), "cross-cluster link, Gbps")
    parts = [heading("Time to move a version of the weights: ROSE, figure 10, and ours", 16, 26)]
    curves: list[Curve] = []
    for place, (model, name) in enumerate((("qwen3-8b", "Qwen3-8B"), ("qwen3-32b", "Qwen3-32B"))):
        curves = _bandwidth_curves(rows, model)
        left = 16 + 480 * place
        title = f"(b) {name}, by bandwidth"
        parts += [heading(title, left, 400), placed(chart(curves, speed, seconds, title, (464, 360)), left, 410)]
    parts.append(legend(curves, 24, 800, 940, 3))
    bars = _optimisation_bars(rows)
    parts += [heading("(a) What each step of ROSE brings at 200 Gbps, and ours", 16, 62), placed(bars, 16, 72)]
    notes = (
        "paper: values printed in ROSE 6.3 (16 + 16 H800); of 10a the factors are printed, seconds follow from the last bar."
        " At 5 Gbps ROSE says “within”.",
        "ours, COO, dense: one of 16 ranks on this machine, with its share of model and link (token bucket in user space),"
        " real Mooncake Store; made-up weights.",
        "200 Gbps: computed. Dense, and Qwen3-32B: time of the whole computed from some layers. ROSE ends in the memory of GPUs,"
        " ours in that of hosts.",
    )
    parts += [tag("text", note, x=16, y=854 + 18 * number) for number, note in enumerate(notes)]
    return page(976, 906, parts)


def _bandwidth_curves(rows: Sequence[Row], model: str) -> list[Curve]:
    def ours(method: str, density: float | None = None) -> list[Point]:
        found = {
            row["gbps"]: row["whole_model_seconds"]
            for row in rows
            if row["model"] == model
            and row["method"] == method
            and not row["one_machine"]
            and (density is None or row["density"] == density)
        }
        return [(math.log10(gbps), math.log10(value)) for gbps, value in sorted(found.items())]

    def printed(values: dict[int, float]) -> list[Point]:
        return [(math.log10(gbps), math.log10(value)) for gbps, value in sorted(values.items())]

    return [
        Curve("ROSE, shard-aware (paper)", "c0 dashed", printed(ROSE_SHARDS[model])),
        Curve("ROSE, sparse (paper)", "c2 dashed", printed(ROSE_SPARSE[model])),
        Curve("ours, 1 % changed", "strong c1", ours("ours", 0.01)),
        Curve("dense bf16, our protocol", "c6", ours("raw")),
        Curve("COO int32 + bf16, our protocol, 1 %", "c4", ours("coo", 0.01)),
        Curve("ours, 5 % changed", "c5", ours("ours", 0.05)),
    ]


def _optimisation_bars(rows: Sequence[Row]) -> Plot:
    names = (*ROSE_STEPS, "ours, 1 %", "ours, 5 %")
    x = Axis(-0.6, len(names) - 0.4, tuple((at, name) for at, name in enumerate(names)), "")
    plot = Plot(944, 290, x, log_axis((0.01, 0.1, 1, 10, 100, 1000), "seconds (whole model)"), "Figure 10a and ours")
    for place, model in enumerate(("qwen3-8b", "qwen3-32b")):
        values = [ROSE_SPARSE[model][200]]
        for factor in reversed(ROSE_FACTORS[model]):
            values.insert(0, values[0] * factor)
        for density in (0.01, 0.05):
            values += [
                row["whole_model_seconds"]
                for row in rows
                if (row["model"], row["method"], row["density"], row["gbps"]) == (model, "ours", density, 200)
            ]
        for at, value in enumerate(values):
            paper = at < len(ROSE_STEPS)
            style = ("c2" if paper else "c1") + (" pale" if place else "")
            left, top = plot.x(at) - 42 + 44 * place, plot.y(math.log10(value))
            about = f"{model}, {names[at]}: {significant(value)} s, {'paper' if paper else 'computed'}"
            plot.rect(left, top, 40, plot.bottom - top, f"bar {style}", about)
            plot.text(left + 20, top - 5, f"{significant(value, 2)}", "value middle")
    plot.text(plot.right, 13, "left bars: Qwen3-8B, right: Qwen3-32B; orange: paper, blue: ours, computed", "end")
    return plot


def bytes_per_change(detail: Row) -> str:
    """Bytes on the wire per changed weight over density."""
    rows = detail["rows"]
    first = [row for row in rows if row["model"] == rows[0]["model"]]

    def over(key: str) -> list[Point]:
        return [(math.log10(100 * row["density"]), row[key]) for row in first]

    x = log_axis((0.1, 0.3, 1, 2, 5, 10, 20, 30), "changed weights, %")
    y = Axis(0.0, 7.0, tuple((float(tick), str(tick)) for tick in range(8)), "bytes per changed weight")
    curves = [
        Curve("COO: int32 position, bf16 value", "c0", over("coo")),
        Curve("zstd on old XOR new", "c2", over("zstd_xor")),
        Curve("ours", "strong c1", over("bytes_per_change")),
        Curve("entropy bound", "c3 dashed", over("entropy_bound"), dots=False),
    ]
    plot = chart(curves, x, y, "Bytes on the wire per changed weight", (620, 340))
    return page(640, 420, [placed(plot, 10, 10), legend(curves, 40, 376, 580, 2)])


def real_density(detail: Row) -> str:
    """What share of a real run's weights each step changed, by layer, and the bytes a change took."""
    published, cast = detail["as_published"]["pairs"], detail["bfloat16"]["pairs"]
    steps = step_axis(len(cast), ticks=6)

    def over(pairs: Sequence[Row], value: Callable[[Row], float]) -> list[Point]:
        return [(number + 1.0, value(pair)) for number, pair in enumerate(pairs)]

    places = list(cast[0]["density_by_layer"])
    styles = ["c5", "strong c1", "strong c2", "c3", "c4", "c6"]
    by_place = [
        Curve(f"{place}, bf16", styles[number % len(styles)], over(cast, _density_of(place)), dots=False)
        for number, place in enumerate(places)
    ]
    by_place.append(Curve("all, float32", "c0 dashed", over(published, lambda pair: pair["density"]), dots=False))
    per_change = [
        Curve("bf16: ours", "strong c1", over(cast, lambda pair: pair["bytes_per_change"]), dots=False),
        Curve("bf16: bound", "c3 dashed", over(cast, lambda pair: pair["entropy_per_change"]), dots=False),
        Curve("float32: ours", "c2", over(published, lambda pair: pair["bytes_per_change"]), dots=False),
        Curve("float32: bound", "c0 dashed", over(published, lambda pair: pair["entropy_per_change"]), dots=False),
    ]
    shares = nice_axis(0.0, 1.0, "changed by a step, % of the weights", lambda value: f"{100 * value:g}")
    most = max(y for curve in per_change for _, y in curve.points)
    sizes = nice_axis(0.0, most, "bytes per changed weight")
    return page(
        976,
        470,
        [
            heading("Deltas of a real run: what each training step changes", 16, 26),
            placed(chart(by_place, steps, shares, "Changed weights by layer over steps", (464, 330)), 16, 46),
            placed(chart(per_change, steps, sizes, "Bytes per changed weight over steps", (464, 330)), 496, 46),
            legend(by_place, 24, 402, 460, 2),
            legend(per_change, 504, 402, 460, 2),
        ],
    )


def learning_curves(detail: Row) -> str:
    """Held-out success over training steps and over seconds, a line a variant of ``learning-parity``, its seeds averaged."""
    styles = {
        "sync_plus": "strong c0",
        "async, alpha 1": "strong c1",
        "async, alpha 2": "c1 dashed",
        "tail batching": "c2",
    }
    styles |= {"tail batching of prompts": "c2 dashed", "shared devices": "c3"}

    def lines(at: int) -> list[Curve]:
        curves = []
        for name, style in styles.items():
            runs = [run["curve"] for run in detail["runs"] if run["variant"] == name]
            points = [
                (mean(point[at] for point in same), mean(point[2] for point in same))
                for same in zip(*runs, strict=True)
            ]
            curves.append(Curve(f"{name}, {len(runs)} seeds", style, points))
        return curves

    steps, seconds = lines(0), lines(1)
    success = nice_axis(0.0, 1.0, "held-out success, %", lambda value: f"{100 * value:g}")
    last = max(x for curve in seconds for x, _ in curve.points)
    return page(
        976,
        440,
        [
            placed(chart(steps, step_axis(40), success, "Success over training steps", (464, 330)), 16, 16),
            placed(chart(seconds, nice_axis(0, last, "seconds"), success, "Success over seconds", (464, 330)), 496, 16),
            legend(steps, 24, 372, 940, 3),
        ],
    )


def _density_of(place: str) -> Callable[[Row], float]:
    return lambda pair: float(pair["density_by_layer"][place])


DRAWINGS: dict[str, tuple[str, Callable[[Row], str]]] = {
    "learning-parity.svg": ("learning-parity.json", learning_curves),
    "transfer-limit.svg": ("transfer-limit.json", rose_figure_10),
    "delta-bytes.svg": ("delta-bytes.json", bytes_per_change),
    "delta-real.svg": ("delta-real.json", real_density),
}


def main() -> None:
    """Draw all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("docs/results"))
    folder = parser.parse_args().folder
    for name, (source, draw) in DRAWINGS.items():
        (folder / name).write_text(draw(json.loads((folder / source).read_text())["detail"]), encoding="utf-8")
        print(folder / name)


if __name__ == "__main__":
    main()
