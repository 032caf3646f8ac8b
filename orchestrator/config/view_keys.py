"""Sections of a config: who looks at a run, docs/seeing.md."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from orchestrator.settings.section import Section


class ViewSection(Section):
    """The live page of a run, on loopback; elsewhere only with TLS. ``rl-coserve view`` shows it of a run that was started
    without."""

    enabled: bool = False
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"  # another address needs [tls]
    port: Annotated[int, Field(ge=0, le=65535)] = 0  # 0: a free one
    token_file: str = ""  # holds the page's token, for scrapes of /metrics; empty: a new one that is printed


class WandbSection(Section):
    """Curves for Weights & Biases; the key comes from its own environment variable or login."""

    enabled: bool = False
    project: str = "rl-coserve"
    entity: str = ""  # team; empty: the user's own
    mode: Literal["online", "offline"] = "online"


class OtlpSection(Section):
    """Stages and curves for an OpenTelemetry collector, by HTTP; headers come from OTEL_EXPORTER_OTLP_HEADERS."""

    endpoint: Annotated[str, Field(pattern=r"^(https?://[^@\s]+)?$")] = ""  # http://127.0.0.1:4318; empty: off


class LoggingSection(Section):
    """What a run writes or sends for others to look at, docs/seeing.md."""

    tensorboard: bool = True  # event files in the run folder's tensorboard/, where the package is installed
    turns_mb: Annotated[float, Field(ge=0)] = 64.0  # size of turns.jsonl, for traces: about 80 bytes per turn; 0: none
    wandb: WandbSection = WandbSection()
    otlp: OtlpSection = OtlpSection()
    # module:Class(run, config) of your own, with log(step, values) and close(); empty: none
    exporter: Annotated[str, Field(pattern=r"^([\w.]+:\w+)?$")] = ""
