"""The register of runtime patches of stock engines: few, version-gated, each with the reason to exist and to go.

Guarantees: a patch is applied only on a version it was tested on, at most once a process, and says itself whether it is
live. Applying never happens at import time; the plugin that owns the register decides when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from orchestrator.api import ConfigError
from orchestrator.hooks.tested_versions import EngineComponent, VersionRange, check_version


@dataclass(frozen=True, slots=True)
class Patch:
    """One topic, one module. ``apply`` changes the engine in this process; ``is_live`` looks at the engine itself."""

    name: str
    target: str  # "module:qualname" that it changes
    reason: str
    tested: VersionRange
    upstream: str  # link to the issue or pull request, or why there is none
    remove_when: str
    apply: Callable[[], None]
    is_live: Callable[[], bool]


class PatchRegister:
    """All patches of one engine, in the order in which they are applied."""

    def __init__(self, component: EngineComponent, patches: tuple[Patch, ...] = ()) -> None:
        names = [patch.name for patch in patches]
        if len(names) != len(set(names)):
            raise ValueError(f"two patches of {component.name} have the same name: {names}")
        self.component = component
        self._patches = {patch.name: patch for patch in patches}

    def __iter__(self) -> Iterator[Patch]:
        return iter(self._patches.values())

    def __len__(self) -> int:
        return len(self._patches)

    def apply(self, *names: str) -> tuple[str, ...]:
        """Apply the named patches (none named: all); returns those that this call made live.

        Raises ConfigError outside the tested range, KeyError for an unknown name. A live patch is left alone.
        """
        wanted = [self._patches[name] for name in names] if names else list(self._patches.values())
        if not wanted:
            return ()
        version = check_version(self.component).version
        for patch in wanted:
            if version not in patch.tested:
                raise ConfigError(
                    f"patch {patch.name}", f"{self.component.name} {version}", f"tested on {patch.tested} only"
                )
        applied = []
        for patch in wanted:
            if not patch.is_live():
                patch.apply()
                applied.append(patch.name)
        return tuple(applied)

    def status(self) -> dict[str, bool]:
        """Which patches are live in this process."""
        return {patch.name: patch.is_live() for patch in self}
