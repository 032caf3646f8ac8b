"""Whether the nodes of a run are alike, as their processes say when they start: what is installed, and what time it is.

Guarantees: a process on a node with another version of an engine, a plugin or Ray than the others, with another rl-coserve than
the run's own process, or with a clock that is minutes off, is one ConfigError that names both sides, before it has loaded
anything. What is installed here while the run lives is said once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from orchestrator import __version__
from orchestrator.api import ConfigError
from orchestrator.cluster.actor import FirstReport, installed_versions

# Seconds. Certificates, tokens that are replaced and the order of logs go by the clocks; a report is on its way for less.
CLOCK_LIMIT = 60.0


class NodeCheck:
    """Of one run. ``clock``: of this machine, seconds since 1970; ``installed``: what is installed on it. The first process that
    has an engine says which version: this machine may have none, or another build."""

    def __init__(
        self,
        clock: Callable[[], float] = time.time,
        installed: Callable[[], Mapping[str, str]] = installed_versions,
    ) -> None:
        self._clock, self._installed = clock, installed
        self._before = dict(installed())
        # distribution -> (version, who has it)
        self._known: dict[str, tuple[str, str]] = {"rl-coserve": (__version__, "the run's own process")}

    async def watch(self, tell: Callable[[str], object], every: float = 60.0) -> None:
        """Until cancelled. ``tell`` hears, once, of what was installed over what this process has loaded in part."""
        while True:
            await asyncio.sleep(every)
            now = await asyncio.to_thread(self._installed)
            found = [
                f"{name} {now[name]} over {had}" for name, had in self._before.items() if now.get(name, had) != had
            ]
            self._before.update(now)
            if found:
                tell(f"{', '.join(found)}: what starts again from now on may be refused; end the run and resume it")

    def check(self, worker: str, report: FirstReport) -> None:
        """Of a report that has just come. Raises ConfigError."""
        who = f"{worker} on {report.node}"
        for name, version in report.versions.items():
            have, first = self._known.setdefault(name, (version, who))
            if version != have:
                fix = f"{who} has this version, {first} has {have}: install the same on every node"
                if name == "rl-coserve":
                    fix += "; a run that lives while its package is replaced has to be ended and resumed"
                raise ConfigError(name, version, fix)
        if abs(off := report.clock - self._clock()) > CLOCK_LIMIT:
            ahead = "ahead of" if off > 0 else "behind"
            fix = f"the clock of {who} is this many seconds {ahead} this machine's: let NTP or PTP set both"
            raise ConfigError("clock", round(abs(off)), fix)
