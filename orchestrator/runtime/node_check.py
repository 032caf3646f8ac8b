"""Whether the nodes of a run are alike, as their processes say when they start: what is installed, and what time it is.

Guarantee: a process on a node with another version of an engine, a plugin or Ray, or with a clock that is minutes off, is one
ConfigError that names both sides, before it has loaded anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from orchestrator.api import ConfigError
from orchestrator.cluster.actor import FirstReport

# Seconds. Certificates, tokens that are replaced and the order of logs go by the clocks; a report is on its way for less.
CLOCK_LIMIT = 60.0


class NodeCheck:
    """Of one run. ``clock``: of this machine, seconds since 1970. The first process that has a package says which version."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._known: dict[str, tuple[str, str]] = {}  # distribution -> (version, who has it)

    def check(self, worker: str, report: FirstReport) -> None:
        """Of a report that has just come. Raises ConfigError."""
        who = f"{worker} on {report.node}"
        for name, version in report.versions.items():
            have, first = self._known.setdefault(name, (version, who))
            if version != have:
                fix = f"{who} has this version, {first} has {have}: install the same on every node"
                raise ConfigError(name, version, fix)
        if abs(off := report.clock - self._clock()) > CLOCK_LIMIT:
            ahead = "ahead of" if off > 0 else "behind"
            fix = f"the clock of {who} is this many seconds {ahead} this machine's: let NTP or PTP set both"
            raise ConfigError("clock", round(abs(off)), fix)
