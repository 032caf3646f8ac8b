"""Drawings of ``docs/results`` from the JSON files beside them: ``python -m scripts.bench.drawings [FOLDER]``.

Each is one SVG file that stands alone, made with matplotlib in the colours of the report
(:mod:`orchestrator.observe.report.plots`).
Numbers of papers are typed in here with their source and drawn dashed or pale, labelled "paper"; a line between two
printed values is only there to guide the eye.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

from orchestrator.observe.report.page_text import significant
from orchestrator.observe.report.plots import COLOUR, Point, figure_file, new_figure, style_axes
from scripts.bench.micro.coserve_slo import slack_left

Row = dict[str, Any]

# ROSE, figure 10b and its text (6.3): seconds at 1 and at 200 Gbps; "within" at 5 Gbps.
ROSE_SHARDS = {"qwen3-8b": {1: 109.0, 200: 31.0}, "qwen3-32b": {1: 584.0, 200: 96.0}}
ROSE_SPARSE = {"qwen3-8b": {1: 39.0, 5: 10.0, 200: 7.0}, "qwen3-32b": {1: 89.0, 5: 30.0, 200: 21.0}}
# ROSE, 6.3, figure 10a: the factors that asynchrony, shards and sparsity bring one after the other.
ROSE_FACTORS = {"qwen3-8b": (1.6, 1.8, 4.4), "qwen3-32b": (1.5, 1.3, 4.6)}
ROSE_STEPS = ("batch", "+ async", "+ shards", "+ sparse")


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a chart and its entry in the legend. ``look``: what matplotlib draws it with, beside its colour."""

    name: str
    colour: str
    points: Sequence[Point]
    look: Mapping[str, Any] = field(default_factory=dict)
    dots: bool = True


STRONG, DASHED = {"linewidth": 2.6}, {"dashes": (7, 4)}


def chart(axes: Any, curves: Sequence[Curve], title: str, x: str, y: str) -> None:
    """Lines over two axes."""
    style_axes(axes)
    for curve in curves:
        xs, ys = [at for at, _ in curve.points], [value for _, value in curve.points]
        look = {"linewidth": 1.8, "marker": "o" if curve.dots else None, "markersize": 5, **curve.look}
        axes.plot(xs, ys, color=COLOUR[curve.colour], label=curve.name, **look)
    _titled(axes, title, x, y)


def _titled(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=14, color=COLOUR["ink"], pad=22)
    axes.set_xlabel(x, loc="right", fontsize=12, color=COLOUR["soft"])
    axes.annotate(
        y, (0, 1), (0, 7), xycoords="axes fraction", textcoords="offset points", fontsize=12, color=COLOUR["soft"]
    )


def logarithmic(axis: Any, ticks: Sequence[float]) -> None:
    """A scale from the first tick to the last, with no other."""
    getattr(axis.axes, f"set_{axis.axis_name}scale")("log")
    getattr(axis.axes, f"set_{axis.axis_name}lim")(ticks[0], ticks[-1])
    axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_ticks([], minor=True)


def legend(figure: Any, axes: Any, columns: int, place: tuple[float, float] = (0.02, 0.01)) -> None:
    """A sample of each line and its name, below the charts."""
    handles, names = axes.get_legend_handles_labels()
    figure.legend(
        handles, names, ncols=columns, loc="lower left", bbox_to_anchor=place, frameon=False, labelcolor=COLOUR["soft"]
    )


def rose_figure_10(detail: Row) -> str:
    """ROSE's figure 10 with ours on it."""
    rows, title = detail["rows"], "Time to move a version of the weights: ROSE, figure 10, and ours"
    figure = new_figure(976, 906)
    figure.text(0.016, 0.975, title, fontsize=16, color=COLOUR["ink"])
    bars, *charts = (
        figure.add_axes(box) for box in ((0.06, 0.64, 0.92, 0.25), (0.06, 0.225, 0.41, 0.3), (0.56, 0.225, 0.41, 0.3))
    )
    _optimisation_bars(bars, rows)
    for axes, (model, name) in zip(charts, (("qwen3-8b", "Qwen3-8B"), ("qwen3-32b", "Qwen3-32B")), strict=True):
        curves = _bandwidth_curves(rows, model)
        chart(axes, curves, f"(b) {name}, by bandwidth", "cross-cluster link, Gbps", "seconds (whole model)")
        logarithmic(axes.xaxis, (1, 5, 20, 200))
        logarithmic(axes.yaxis, (0.01, 0.1, 1, 10, 100, 1000, 10000))
    legend(figure, charts[0], 3, (0.02, 0.09))
    notes = (
        "paper: values printed in ROSE 6.3 (16 + 16 H800); of 10a the factors are printed, seconds follow from the last bar."
        " At 5 Gbps ROSE says “within”.",
        "ours, COO, dense: one of 16 ranks on this machine, with its share of model and link (token bucket in user space),"
        " real Mooncake Store; made-up weights.",
        "200 Gbps: computed. Dense, and Qwen3-32B: time of the whole computed from some layers. ROSE ends in the memory of GPUs,"
        " ours in that of hosts.",
    )
    for number, note in enumerate(notes):
        figure.text(0.016, 0.06 - 0.02 * number, note, fontsize=11, color=COLOUR["soft"])
    return figure_file(figure, title)


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
        return sorted(found.items())

    def printed(values: dict[int, float]) -> list[Point]:
        return sorted(values.items())

    return [
        Curve("ROSE, shard-aware (paper)", "c0", printed(ROSE_SHARDS[model]), DASHED),
        Curve("ROSE, sparse (paper)", "c2", printed(ROSE_SPARSE[model]), DASHED),
        Curve("ours, 1 % changed", "c1", ours("ours", 0.01), STRONG),
        Curve("dense bf16, our protocol", "c6", ours("raw")),
        Curve("COO int32 + bf16, our protocol, 1 %", "c4", ours("coo", 0.01)),
        Curve("ours, 5 % changed", "c5", ours("ours", 0.05)),
    ]


def _optimisation_bars(axes: Any, rows: Sequence[Row]) -> None:
    names = (*ROSE_STEPS, "ours, 1 %", "ours, 5 %")
    style_axes(axes)
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
        colours = [COLOUR["c2" if at < len(ROSE_STEPS) else "c1"] for at in range(len(values))]
        places = [at - 0.15 + 0.3 * place for at in range(len(values))]
        bars = axes.bar(places, values, 0.28, color=colours, alpha=0.55 if place else 1.0)
        axes.bar_label(bars, [significant(value, 2) for value in values], padding=3, color=COLOUR["ink"])
    logarithmic(axes.yaxis, (0.01, 0.1, 1, 10, 100, 1000))
    axes.set_xticks(range(len(names)), names)
    about = "seconds (whole model); left bars: Qwen3-8B, right: Qwen3-32B; orange: paper, blue: ours, computed"
    _titled(axes, "(a) What each step of ROSE brings at 200 Gbps, and ours", "", about)


def bytes_per_change(detail: Row) -> str:
    """Bytes on the wire per changed weight over density."""
    rows = detail["rows"]
    first = [row for row in rows if row["model"] == rows[0]["model"]]

    def over(key: str) -> list[Point]:
        return [(100 * row["density"], row[key]) for row in first]

    curves = [
        Curve("COO: int32 position, bf16 value", "c0", over("coo")),
        Curve("zstd on old XOR new", "c2", over("zstd_xor")),
        Curve("ours", "c1", over("bytes_per_change"), STRONG),
        Curve("entropy bound", "c3", over("entropy_bound"), DASHED, dots=False),
    ]
    figure, title = new_figure(640, 420), "Bytes on the wire per changed weight"
    axes = figure.add_axes((0.07, 0.25, 0.9, 0.6))
    chart(axes, curves, title, "changed weights, %", "bytes per changed weight")
    logarithmic(axes.xaxis, (0.1, 0.3, 1, 2, 5, 10, 20, 30))
    axes.set_ylim(0, 7)
    legend(figure, axes, 2)
    return figure_file(figure, title)


def real_density(detail: Row) -> str:
    """What share of a real run's weights each step changed, by layer, and the bytes a change took."""
    published, cast = detail["as_published"]["pairs"], detail["bfloat16"]["pairs"]

    def over(pairs: Sequence[Row], value: Callable[[Row], float]) -> list[Point]:
        return [(number + 1.0, value(pair)) for number, pair in enumerate(pairs)]

    colours = ("c5", "c1", "c2", "c3", "c4", "c6")
    by_place = [
        Curve(f"{place}, bf16", colours[number % len(colours)], over(cast, _density_of(place)), dots=False)
        for number, place in enumerate(cast[0]["density_by_layer"])
    ]
    by_place.append(
        Curve("all, float32", "c0", over(published, lambda pair: 100 * pair["density"]), DASHED, dots=False)
    )
    per_change = [
        Curve("bf16: ours", "c1", over(cast, lambda pair: pair["bytes_per_change"]), STRONG, dots=False),
        Curve("bf16: bound", "c3", over(cast, lambda pair: pair["entropy_per_change"]), DASHED, dots=False),
        Curve("float32: ours", "c2", over(published, lambda pair: pair["bytes_per_change"]), dots=False),
        Curve("float32: bound", "c0", over(published, lambda pair: pair["entropy_per_change"]), DASHED, dots=False),
    ]
    figure, title = new_figure(976, 500), "Deltas of a real run: what each training step changes"
    left, right = figure.add_axes((0.05, 0.32, 0.43, 0.53)), figure.add_axes((0.55, 0.32, 0.43, 0.53))
    chart(left, by_place, "Changed weights by layer", "training step", "changed by a step, % of the weights")
    chart(right, per_change, "Bytes per changed weight", "training step", "bytes per changed weight")
    left.set_ylim(0, 100)
    right.set_ylim(0)
    legend(figure, left, 2)
    legend(figure, right, 2, (0.52, 0.01))
    return figure_file(figure, title)


def learning_curves(detail: Row) -> str:
    """Held-out success over training steps and over seconds, a line a variant of ``learning-parity``, its seeds averaged."""
    looks: dict[str, tuple[str, Mapping[str, Any]]] = {
        "sync_plus": ("c0", STRONG),
        "async, alpha 1": ("c1", STRONG),
        "async, alpha 2": ("c1", DASHED),
        "tail batching": ("c2", {}),
        "tail batching of prompts": ("c2", DASHED),
        "shared devices": ("c3", {}),
    }
    figure, title = new_figure(976, 460), "Held-out success of each variant, its seeds averaged"
    boxes = ((0.05, 0.29, 0.43, 0.57), (0.55, 0.29, 0.43, 0.57))
    for at, (box, name, label) in enumerate(
        zip(boxes, ("training steps", "seconds"), ("training step", "seconds"), strict=True)
    ):
        curves = []
        for variant, (colour, look) in looks.items():
            runs = [run["curve"] for run in detail["runs"] if run["variant"] == variant]
            points = [
                (mean(point[at] for point in same), mean(100 * point[2] for point in same))
                for same in zip(*runs, strict=True)
            ]
            curves.append(Curve(f"{variant}, {len(runs)} seeds", colour, points, look))
        axes = figure.add_axes(box)
        chart(axes, curves, f"Success over {name}", label, "held-out success, %")
        axes.set_ylim(0, 100)
        axes.set_xlim(0)
    legend(figure, axes, 3)
    return figure_file(figure, title)


def pretrained_curves(detail: Row) -> str:
    """Right answers to the validation questions, and rewards of sampled answers, by step: ``pretrained``, a line per run."""
    looks: dict[str, tuple[str, Mapping[str, Any]]] = {
        "rewards-0": ("c0", {}),
        "rewards-1": ("c1", {}),
        "rewards-2": ("c2", {}),
        "shuffled-0": ("c3", DASHED),
    }
    figure, title = new_figure(976, 460), "SmolLM2-135M-Instruct learns which of three numbers is the largest"
    runs = {run["run"]: run for run in detail["runs"]}
    held = [Curve(name, looks[name][0], run["validation"], looks[name][1]) for name, run in runs.items()]
    said = [
        Curve(
            name, looks[name][0], [(step["step"], step["reward"]) for step in run["curve"]], looks[name][1], dots=False
        )
        for name, run in runs.items()
    ]
    for left, curves, name in (
        (0.05, held, "held-out questions, greedily"),
        (0.55, said, "answers trained on, reward"),
    ):
        axes = figure.add_axes((left, 0.26, 0.43, 0.58))
        percent = [replace(curve, points=[(at, 100 * value) for at, value in curve.points]) for curve in curves]
        chart(axes, percent, name.capitalize(), "training step", "%")
        axes.set_ylim(0, 100)
        axes.set_xlim(0)
    legend(figure, axes, 4)
    return figure_file(figure, title)


def slack_over_load(detail: Row) -> str:
    """What dual admission leaves serving of its SLOs, over how busy it is alone: ``coserve-slo``."""
    figure, title = new_figure(976, 420), "What rollouts leave serving of its SLOs, by load"
    for number, (trace, by_load) in enumerate(detail["by_load"].items()):
        axes = figure.add_axes((0.05 + 0.5 * number, 0.26, 0.43, 0.58))
        loads = [100 * float(load) for load in by_load]
        curves = [
            Curve("alone: a third, by how the SLOs are set", "c0", [(at, 100 / 3) for at in loads], DASHED, dots=False)
        ]
        for name, colour in (("ttft", "c1"), ("tpot", "c2")):
            left = [100 * slack_left(row, name) for row in by_load.values()]
            look = STRONG if name == "ttft" else {}
            curves.append(Curve(f"{name.upper()}, dual admission", colour, list(zip(loads, left, strict=True)), look))
        chart(axes, curves, trace, "serving alone is busy, %", "slack left at P99, % of the SLO; below 0: not kept")
        axes.axhline(0, color=COLOUR["ink"], linewidth=0.8)
    legend(figure, axes, 3)
    return figure_file(figure, title)


def _density_of(place: str) -> Callable[[Row], float]:
    return lambda pair: 100 * float(pair["density_by_layer"][place])


DRAWINGS: dict[str, tuple[str, Callable[[Row], str]]] = {
    "learning-parity.svg": ("learning-parity.json", learning_curves),
    "transfer-limit.svg": ("transfer-limit.json", rose_figure_10),
    "delta-bytes.svg": ("delta-bytes.json", bytes_per_change),
    "delta-real.svg": ("delta-real.json", real_density),
    "pretrained.svg": ("pretrained.json", pretrained_curves),
    "coserve-slo.svg": ("coserve-slo.json", slack_over_load),
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
