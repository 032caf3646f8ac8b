"""Sections of a config: who looks at a run, docs/seeing.md."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from orchestrator.sections.base import Section


class ViewSection(Section):
    """The live page of a run, on loopback. ``rl-coserve view`` shows it of a run that was started without."""

    enabled: bool = False
    port: Annotated[int, Field(ge=0, le=65535)] = 0  # 0: a free one
    token_file: str = ""  # holds the page's token, for scrapes of /metrics; empty: a new one that is printed


class LoggingSection(Section):
    """What a run writes for others to look at, docs/seeing.md."""

    turns_mb: Annotated[float, Field(ge=0)] = 64.0  # of turns.jsonl, for traces: about 80 bytes a turn; 0: none
