"""The templates of the report's pages (``templates/``).

Guarantees: whatever a run says is escaped; a template that asks for what it was not given is an error; a figure cannot be made
without saying whether its data is real or simulated (``parts.html``).
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from orchestrator.observe.report.page_text import (
    ALPHA,
    count,
    data_size,
    duration,
    interval,
    percent,
    plural,
    significant,
)

NOTHING = Markup()  # of a section that a run has not


def fill(template: str, **values: object) -> Markup:
    """A template with these values."""
    return Markup(_templates().get_template(template).render(values))


@cache
def _templates() -> Environment:
    made = Environment(
        loader=PackageLoader("orchestrator.observe.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for write in (count, data_size, duration, percent, plural, significant):
        made.filters[write.__name__] = write
    style = files("orchestrator.observe.report").joinpath("page.css").read_text(encoding="utf-8")
    made.globals.update(ALPHA=ALPHA, interval=interval, style=Markup(style))
    return made
