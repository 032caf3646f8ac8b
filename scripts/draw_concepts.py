#!/usr/bin/env python3
"""Draws the figures of docs/concepts.md into docs/images: plain SVG, on a ground of their own, for light and dark readers.

python scripts/draw_concepts.py            # are the files what this says? exit code 1: no
python scripts/draw_concepts.py --write
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from html import escape
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "images"
STYLE = """
.ground{fill:#fcfcfb}.ink{fill:#1f2328}.soft{fill:#59636e}.edge{stroke:#59636e;fill:none}.head{fill:#59636e}
.grey{fill:#e9ebee}.blue{fill:#cfe3ff}.green{fill:#cdeccd}.orange{fill:#ffdcb0}.red{fill:#ffcfcf}.violet{fill:#e4d7fb}
text{font:14px system-ui,-apple-system,"Segoe UI","DejaVu Sans",sans-serif}
.small{font-size:12px}.bold{font-weight:600}
@media (prefers-color-scheme: dark){
.ground{fill:#1c1f24}.ink{fill:#f0f3f6}.soft{fill:#adb6c0}.edge{stroke:#adb6c0}.head{fill:#adb6c0}
.grey{fill:#343a42}.blue{fill:#1d4272}.green{fill:#1f4d2a}.orange{fill:#6b4310}.red{fill:#6d2529}.violet{fill:#47356d}}
"""


class Drawing:
    """A canvas of ``width`` x ``height``; every method adds something to it."""

    def __init__(self, title: str, width: int, height: int) -> None:
        self.title, self.width, self.height = title, width, height
        self.parts: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, colour: str, *lines: str, bold: bool = True) -> None:
        """A filled box with its text in the middle; the first line is its name."""
        self.parts.append(f'<rect class="{colour}" x="{x}" y="{y}" width="{w}" height="{h}" rx="6"/>')
        top = y + h / 2 - 9 * (len(lines) - 1) + 5
        for place, line in enumerate(lines):
            kind = "ink bold" if place == 0 and bold else "ink small"
            self.text(x + w / 2, top + 18 * place, line, kind, "middle")

    def text(self, x: float, y: float, text: str, kind: str = "ink small", anchor: str = "start") -> None:
        self.parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>')

    def arrow(self, *points: tuple[float, float], dashed: bool = False) -> None:
        """A line through the points with a head at the end."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dash = ' stroke-dasharray="4 4"' if dashed else ""
        self.parts.append(f'<polyline class="edge" points="{path}" stroke-width="1.5"{dash} marker-end="url(#head)"/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, dashed: bool = False) -> None:
        dash = ' stroke-dasharray="4 4"' if dashed else ""
        self.parts.append(f'<line class="edge" x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"{dash}/>')

    def svg(self) -> str:
        head = (
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path class="head" d="M0,0 L8,4 L0,8 z"/></marker>'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" role="img" aria-label="{escape(self.title)}">\n<title>{escape(self.title)}</title>\n'
            f"<style>{STYLE}</style>\n<defs>{head}</defs>\n"
            f'<rect class="ground" width="{self.width}" height="{self.height}" rx="8"/>\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )


def pools() -> Drawing:
    """Who runs where, and what passes between them."""
    d = Drawing(
        "The pools: environments, rewards, rollout engines and trainer; the orchestrator between them", 860, 350
    )
    d.box(20, 20, 210, 90, "green", "environments", "in process, in processes,", "or in pods: CPU")
    d.box(250, 20, 190, 90, "violet", "rewards and tools", "functions, a judge,", "a sandbox")
    d.box(
        460, 20, 240, 90, "blue", "rollout: vLLM engines", "dedicated, or borrowed from", "serving; several GPU classes"
    )
    d.box(20, 160, 680, 50, "grey", "orchestrator: one event loop, a ledger, policies")
    d.box(20, 260, 280, 70, "orange", "trainer: Megatron-Core", "streams finished groups")
    d.box(460, 260, 240, 70, "grey", "weight relay", "Mooncake, or shared files")
    for x, text in ((80, "turns"), (300, "scores"), (520, "tokens in and out")):
        d.arrow((x, 158), (x, 112))
        d.arrow((x + 30, 112), (x + 30, 158))
        d.text(x + 42, 140, text)
    d.arrow((140, 210), (140, 258))
    d.text(152, 240, "complete groups")
    d.arrow((300, 295), (458, 295))
    d.text(334, 287, "version n + 1")
    d.arrow((700, 295), (740, 295), (740, 65), (702, 65))
    for place, line in enumerate(("each engine", "fetches what", "it hosts")):
        d.text(750, 170 + 18 * place, line)
    return d


def six_steps() -> Drawing:
    """One round of the loop on a time line."""
    d = Drawing("The six steps of one round: training of one batch runs beside the rollout of the next", 860, 260)
    lane, h = {"trainer": 20, "batch": 70, "rollout": 120, "weights": 170}, 40
    for name, y in lane.items():
        d.text(20, y + 25, name, "ink bold")
    d.box(110, lane["trainer"], 240, h, "orange", "training on batch n - 1", bold=False)
    d.box(500, lane["trainer"], 340, h, "orange", "6 train_step on batch n", bold=False)
    d.box(110, lane["batch"], 200, h, "violet", "1 get_batch: whole groups", bold=False)
    d.box(500, lane["batch"], 340, h, "violet", "get_batch of the next round", bold=False)
    d.box(110, lane["rollout"], 285, h, "blue", "generation under n - 1 goes on", bold=False)
    d.box(399, lane["rollout"], 97, h, "red", "standstill", bold=False)
    d.box(500, lane["rollout"], 340, h, "blue", "5 KV is recomputed, the same trajectories continue", bold=False)
    d.box(354, lane["weights"], 41, h, "grey", "fetch", bold=False)
    d.box(399, lane["weights"], 97, h, "green", "2 3 4", bold=False)
    d.line(352, 16, 352, 210, True)
    d.text(346, 204, "version n is published", "soft small", "end")
    steps = (
        "2 suspend, between two engine steps",
        "3 update, in place, each tensor checked",
        "4 resume: requests keep their tokens",
    )
    for place, line in enumerate(steps):
        d.text(500, 184 + 17 * place, line, "soft small")
    d.text(110, 244, "The standstill is steps 2 to 4; what is fetched before it is not waited for.", "soft small")
    return d


def staleness() -> Drawing:
    """What alpha = 1 allows."""
    d = Drawing(
        "Versions and staleness: with alpha = 1 a trajectory may be one version behind when it is taken", 820, 290
    )
    d.text(20, 30, "weight version", "ink bold")
    for version, x in enumerate((150, 370, 590)):
        d.box(x, 14, 212, 26, "grey", f"version {version + 4}", bold=False)
        for row in range(3 if version else 0):
            d.line(x - 4, 52 + 62 * row, x - 4, 94 + 62 * row, True)
    d.text(
        20, 270, "taken when the trainer has published version 6: lag = 6 - version of the first token", "soft small"
    )
    rows = (
        ("A", 600, 170, [("blue", 170)], "lag 0: trained"),
        (
            "B",
            420,
            350,
            [("blue", 166), ("green", 184)],
            "lag 1 = alpha: trained, spans say which version made which tokens",
        ),
        ("C", 170, 420, [("blue", 196), ("red", 224)], "begins to lag 2 at the update: evicted_stale"),
    )
    for place, (name, x, _, spans, what) in enumerate(rows):
        y = 62 + 62 * place
        d.text(20, y + 19, f"trajectory {name}", "ink bold")
        for colour, width in spans:
            d.box(x, y, width - 3, 28, colour, "", bold=False)
            x += width
        d.text(150, y + 46, what, "ink small")
    return d


def tail_batching() -> Drawing:
    """Plain rounds, then short and long ones."""
    d = Drawing("Tail batching: short rounds keep what is ready first, one long round plays what was put off", 820, 300)
    d.text(20, 30, "plain rounds: each waits for its longest", "ink bold")
    x = 20
    for name in ("1", "2", "3"):
        for row, share in enumerate((0.35, 0.45, 0.4, 1.0)):
            d.box(x, 42 + 19 * row, 240 * share, 15, "red" if share == 1 else "blue", "", bold=False)
        d.line(x + 250, 40, x + 250, 118, True)
        d.text(x + 80, 134, f"round {name}", "soft small")
        x += 262
    d.text(
        20, 176, "short rounds launch more and keep the first; the long ones wait for a round of their own", "ink bold"
    )
    x = 20
    for name in ("1", "2", "3"):
        for row, share in enumerate((0.35, 0.45, 0.4, 0.42)):
            d.box(x, 188 + 19 * row, 240 * share, 15, "blue", "", bold=False)
        d.box(x, 264, 108, 15, "grey", "", bold=False)
        d.line(x + 113, 186, x + 113, 282, True)
        d.text(x + 18, 294, f"short {name}", "soft small")
        x += 124
    for row in range(3):
        d.box(x, 188 + 19 * row, 240, 15, "red", "", bold=False)
    d.text(x + 90, 264, "long round", "soft small")
    d.text(x, 294, "grey: put off, starts afresh in the long round", "soft small")
    return d


def coserving() -> Drawing:
    """One device, two engines."""
    d = Drawing("Co-serving: a serving and a rollout engine share the pages and the time of one device", 820, 300)
    d.box(20, 40, 240, 80, "orange", "serving engine", "its users, its SLOs:", "it waits for nobody")
    d.box(560, 40, 240, 80, "blue", "rollout engine", "another model; asks before", "each of its steps")
    d.box(310, 30, 200, 44, "green", "slack, published", "TTFT and TPOT to spare", bold=False)
    d.box(310, 86, 200, 44, "grey", "budget, headroom", "what it may hold", bold=False)
    d.arrow((260, 60), (308, 54))
    d.arrow((510, 54), (558, 60))
    d.arrow((260, 100), (308, 106))
    d.arrow((510, 106), (558, 100))
    d.text(20, 172, "one pool of physical KV pages on the device", "ink bold")
    d.box(20, 186, 330, 40, "orange", "used by serving", bold=False)
    d.box(354, 186, 110, 40, "grey", "headroom", bold=False)
    d.box(468, 186, 200, 40, "blue", "lent to rollout", bold=False)
    d.box(672, 186, 128, 40, "green", "free", bold=False)
    d.arrow((560, 250), (430, 250))
    d.text(20, 254, "serving grows into the headroom: the rollout's budget is halved", "ink small")
    d.text(20, 278, "at once, its requests go on elsewhere with their tokens", "ink small")
    d.text(570, 254, "pages come back", "ink small")
    return d


FIGURES: dict[str, Callable[[], Drawing]] = {
    "pools": pools,
    "six-steps": six_steps,
    "staleness": staleness,
    "tail-batching": tail_batching,
    "coserving": coserving,
}


def main() -> int:
    stale = 0
    for name, draw in FIGURES.items():
        file, text = FOLDER / f"{name}.svg", draw().svg()
        if "--write" in sys.argv[1:]:
            file.write_text(text, encoding="utf-8")
        elif not file.is_file() or file.read_text(encoding="utf-8") != text:
            print(f"{file.name} is not what is drawn here: scripts/draw_concepts.py --write", file=sys.stderr)
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
