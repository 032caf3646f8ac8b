"""The building blocks of the page: sections, figures with their label, legends, cards, tables, notices.

Guarantee: a figure cannot be made without saying whether its data is real or simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files
from string import Template

from orchestrator.observe.report.page_text import block, tag
from orchestrator.observe.report.plots import NARROW, WIDE, Size

LegendItem = tuple[str, str, bool]  # words, colour class, hatched (waiting)

_KIND_HELP = {
    "real": "Measured: real engines ran.",
    "simulated": "Virtual time: the orchestrator is real, engines and environments are models.",
    "mixed": "Real and simulated runs in one figure: see the label of each run.",
}
_KIND_WORDS = {"mixed": "real and simulated"}


def page(title: str, body: str) -> str:
    """The whole HTML document: one file, no request to anywhere."""
    assets = files("orchestrator.observe.report")
    template = Template(assets.joinpath("page.html").read_text(encoding="utf-8"))
    style = assets.joinpath("page.css").read_text(encoding="utf-8")
    return template.substitute(title=escape(title), style=style, body=body)


def badge(kind: str) -> str:
    """How a figure was obtained."""
    return tag("span", _KIND_WORDS.get(kind, kind), class_=f"badge {kind}", title=_KIND_HELP[kind])


def section(identity: str, title: str, lead: str, *content: str) -> str:
    """A part of the page with the one sentence that sums it up; nothing when it has no content."""
    inside = "".join(content)
    if not inside:
        return ""
    head = tag("h2", escape(title), id=f"h-{identity}") + (tag("p", lead, class_="lead") if lead else "")
    return block("section", head + inside, id=identity, aria_labelledby=f"h-{identity}")


def figure(
    title: str,
    kind: str,
    draw: Callable[[Size], str],
    sizes: tuple[Size, ...] = (WIDE, NARROW),
    legend: Sequence[LegendItem] = (),
    note: str = "",
) -> str:
    """A chart in one size, or in two of which the page shows the one that fits; "" when there is nothing to draw."""
    drawings = [draw(size) for size in sizes]
    if not drawings[0]:
        return ""
    if len(drawings) == 2:
        drawings = [tag("div", drawings[0], class_="for-wide"), tag("div", drawings[1], class_="for-narrow")]
    head = tag("h3", escape(title)) + badge(kind)
    inside = tag("figcaption", head) + legend_of(legend) + "".join(drawings)
    if note:
        inside += tag("p", note, class_="figure-note")
    return tag("figure", inside)


def legend_of(items: Sequence[LegendItem]) -> str:
    """What the colours mean."""
    if not items:
        return ""
    chips = "".join(
        tag(
            "li",
            block("span", class_=f"chip {colour}{' hatched' if hatched else ''}", aria_hidden="true") + escape(name),
        )
        for name, colour, hatched in items
    )
    return tag("ul", chips, class_="legend")


def columns(*content: str) -> str:
    """Figures side by side where there is room."""
    shown = [item for item in content if item]
    return tag("div", "".join(shown), class_="columns") if shown else ""


def card(label: str, kind: str, value: str, detail: str, style: str = "", extra: str = "") -> str:
    """One headline figure. ``value`` and ``detail`` are markup."""
    inside = tag("p", tag("span", escape(label)) + badge(kind), class_="card-label") + tag(
        "p", value, class_="card-value"
    )
    inside += extra + (tag("p", detail, class_="card-detail") if detail else "")
    return tag("div", inside, class_=f"card {style}".strip())


def notice(style: str, title: str, text: str) -> str:
    """A box that must be seen. ``text`` is markup."""
    return tag("div", tag("p", tag("strong", escape(title)) + " " + text), class_=f"notice {style}", role="note")


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[int] = (), caption: str = "", style: str = ""
) -> str:
    """A table whose cells are markup; columns in ``numeric`` are set flush right."""
    if not rows:
        return ""

    def cells(name: str, values: Sequence[str], scope: str | None) -> str:
        return "".join(
            block(name, value, class_="number" if index in numeric else None, scope=scope)
            for index, value in enumerate(values)
        )

    inside = tag("caption", escape(caption)) if caption else ""
    inside += tag("thead", tag("tr", cells("th", [escape(name) for name in head], "col")))
    inside += tag("tbody", "".join(tag("tr", cells("td", row, None)) for row in rows))
    body = tag("table", inside, class_=style or None)
    return tag("div", body, class_="scroll", tabindex="0", role="region", aria_label=caption or "table")


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Names and values; both plain text."""
    return tag("dl", "".join(tag("div", tag("dt", escape(name)) + block("dd", escape(value))) for name, value in pairs))
