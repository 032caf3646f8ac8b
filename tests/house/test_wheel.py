"""The wheel holds all that the repository's packages hold, is tagged for what it is, and works where there is no engine."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from orchestrator.cli import _ORCHESTRATOR
from orchestrator.hooks.tested_versions import COMPONENTS, MEGATRON_CORE, MOONCAKE, VLLM

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PACKAGES = ("orchestrator", "vllm_rlplugin", "megatron_rlplugin", "patches")
LIBRARIES = ("orchestrator/transfer/delta/_native.ctypes.so", "vllm_rlplugin/kvpool/ledger/_pages.ctypes.so")
RELEASES = {  # what a resolver may find, tested and not
    "vLLM": ("0.31.0", "0.31.2", "0.32.0", "0.32.1", "0.33.0", "0.34.0"),
    "Megatron-Core": (
        "0.15.3",
        "0.16.0",
        "0.16.1",
        "0.17.0",
        "0.18.0",
        "0.18.2",
        "0.19.0",
        "0.19.1",
        "0.19.2",
        "0.20.0",
    ),
    "Mooncake": ("0.3.12", "0.3.13", "0.3.13.post1", "0.3.14"),
    "Ray": ("2.49.0", "2.50.0", "2.60.0", "3.0.0"),
}
ENGINES = ("torch", "vllm", "megatron.core", "mooncake", "ray")


def run(*command: str | Path, cwd: Path, limit: float = 280) -> subprocess.CompletedProcess[str]:
    """As a user would who has nothing of this repository on the path. What is built is of one date."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VLLM_PLUGINS")}
    environment["SOURCE_DATE_EPOCH"] = "1700000000"
    return subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, timeout=limit
    )


def repository_files() -> list[str]:
    """As git sees them; all, when this is no git checkout. A link to a folder is none of them."""
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    names = (
        listed.stdout.splitlines() if listed.returncode == 0 else [str(p.relative_to(ROOT)) for p in ROOT.rglob("*")]
    )
    built = ("build/", "dist/", ".venv/", "runs/")
    return sorted(name for name in names if (ROOT / name).is_file() and not name.startswith(built))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy without what was built or installed beside the sources."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in repository_files():
        if not name.endswith((".so", ".pyc")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def built(checkout: Path) -> Path:
    """The wheel of a checkout."""
    options = ("--no-deps", "--no-build-isolation", "--wheel-dir", "wheels")
    done = run(sys.executable, "-m", "pip", "wheel", *options, ".", cwd=checkout)
    assert done.returncode == 0, done.stderr[-2000:]
    (found,) = (checkout / "wheels").glob("*.whl")
    return found


@pytest.fixture(scope="module")
def wheel(checkout: Path) -> Path:
    """Built by pip in this environment (no download), out of the copy."""
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        pytest.skip("there is no C compiler: a wheel without its libraries is not what is published")
    return built(checkout)


@pytest.fixture(scope="module")
def fresh(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel and what its base requires, and nothing else."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python3*/site-packages")
    # Linked from where the tests run: which distributions is the wheel's metadata's word, so one that is missing is missed.
    for name in closure("rl-coserve", base_requirements(wheel)):
        for path in importlib.metadata.files(name) or ():
            top, inside = path.parts[0], path.parts[0] != ".."
            if inside and not (site / top).exists():
                (site / top).symlink_to(Path(str(path.locate())).parents[len(path.parts) - 1] / top)
    python = folder / "bin" / "python"
    options = ("--no-deps", "--no-index", "--disable-pip-version-check", "--no-compile")
    done = run(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel, cwd=folder)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def base_requirements(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    return [line.split(": ", 1)[1] for line in lines if line.startswith("Requires-Dist: ") and "extra ==" not in line]


def closure(name: str, requirements: list[str]) -> set[str]:
    """Names of the distributions that these requirements need, here."""
    found: set[str] = set()
    for text in requirements:
        match = re.match(r"[\w.-]+", text)
        assert match, f"{name} requires {text!r}"
        required = match.group()
        if "extra ==" in text or required in found:
            continue
        try:
            theirs = importlib.metadata.requires(required) or []
        except importlib.metadata.PackageNotFoundError:
            assert ";" in text, f"{name} requires {required}, which is not installed here"
            continue
        found |= {required, *closure(required, theirs)}
    return found


def test_the_wheel_holds_every_file_of_every_package(wheel: Path) -> None:
    moved = {f"patches/{engine}/": f"{engine}_rlplugin/patches/" for engine in ("vllm", "megatron")}
    ours = {name for name in repository_files() if name.split("/")[0] in PACKAGES}
    for old, new in moved.items():
        ours = {name.replace(old, new, 1) if name.startswith(old) else name for name in ours}
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    assert sorted(ours - inside) == []
    assert set(LIBRARIES) <= inside


@pytest.mark.slow
def test_a_wheel_that_is_built_again_elsewhere_is_the_same_to_the_bit(wheel: Path, tmp_path: Path) -> None:
    """With one SOURCE_DATE_EPOCH, from files of other dates in a folder of another name."""
    for name in repository_files():
        if not name.endswith((".so", ".pyc")):
            (tmp_path / "again" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tmp_path / "again" / name)
    again = built(tmp_path / "again")
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        assert [item.filename for item in one.infolist()] == [item.filename for item in other.infolist()]
        assert [name for name in one.namelist() if one.read(name) != other.read(name)] == []
    assert again.name == wheel.name
    assert again.read_bytes() == wheel.read_bytes()


def test_what_users_copy_from_is_in_the_wheel(wheel: Path) -> None:
    """Examples and the Grafana dashboard land under share/ of the environment."""
    with zipfile.ZipFile(wheel) as archive:
        shared = {name.partition(".data/data/share/rl-coserve/")[2] for name in archive.namelist()} - {""}
    assert {f"examples/{path.name}" for path in ROOT.glob("examples/*.toml")} <= shared
    assert {"grafana/rl-coserve.json", "examples/largest.py"} <= shared  # the task of examples/smollm2.toml


def test_the_wheel_is_bound_to_the_platform_and_to_no_python(wheel: Path) -> None:
    assert re.fullmatch(r"rl_coserve-[\d.]+-py3-none-(many)?linux\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        for library in LIBRARIES:
            needed = archive.read(library)
            assert b"PyInit" not in needed
            assert b"libpython" not in needed


def test_the_wheel_may_be_called_manylinux(wheel: Path) -> None:
    """Its libraries need nothing but the C library, so no repair is due beyond the name."""
    pytest.importorskip("auditwheel")
    done = run(sys.executable, "-m", "auditwheel", "show", wheel, cwd=wheel.parent)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert re.search(r'platform tag: "manylinux_2_\d+_\w+"', said), said
    assert re.findall(r"\blib\w+\.so\.\d+", said) == ["libc.so.6"]


def test_the_native_libraries_of_the_wheel_load(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for library in LIBRARIES:
            archive.extract(library, tmp_path)
    assert ctypes.CDLL(str(tmp_path / LIBRARIES[0])).rlc_delta_abi() == 1
    assert ctypes.CDLL(str(tmp_path / LIBRARIES[1])).rlc_pool_abi() == 6


def test_an_installed_wheel_runs_without_an_engine(fresh: Path, tmp_path: Path) -> None:
    program = fresh / "bin" / "rl-coserve"
    assert "usage: rl-coserve" in run(program, "--help", cwd=tmp_path).stdout
    assert run(program, "--version", cwd=tmp_path).stdout.startswith("rl-coserve ")
    probe = (
        "import importlib.util, orchestrator, orchestrator.policies, vllm_rlplugin, megatron_rlplugin\n"
        "from orchestrator.transfer.delta.native_codec import native_status\n"
        "from vllm_rlplugin.kvpool.ledger.native_pages import library\n"
        f"assert not [name for name in {ENGINES!r} if importlib.util.find_spec(name.split('.')[0])]\n"
        "print(orchestrator.__file__, native_status()['live'], library().rlc_pool_abi())\n"
    )
    done = run(fresh / "bin" / "python", "-c", probe, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    file, live, abi = done.stdout.split()
    assert file.startswith(str(fresh))
    assert (live != "numpy", abi) == (True, "6")


def test_the_doctor_of_an_installed_wheel_says_what_is_missing(fresh: Path, tmp_path: Path) -> None:
    done = run(fresh / "bin" / "rl-coserve", "doctor", "--quick", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"^FAIL  packages .*not installed: ray, aiohttp", done.stdout, re.M)
    assert re.search(r"^OK    weight codec .*native", done.stdout, re.M)
    assert re.search(r"^OK    entry point", done.stdout, re.M)
    assert "Traceback" not in done.stdout + done.stderr
    assert "make venv" not in done.stdout  # there is no Makefile here
    assert "fix: pip install 'rl-coserve[cpu]' (docs/install.md), or install vLLM" in done.stdout
    example = fresh / "share" / "rl-coserve" / "examples" / "frozenlake.toml"
    done = run(fresh / "bin" / "rl-coserve", "doctor", "--quick", example, cwd=tmp_path)
    assert done.returncode == 1
    assert {"vllm", "megatron-core", "mooncake", "ray"} <= set(re.findall(r"^FAIL  (\S+)", done.stdout, re.M))


@pytest.mark.parametrize(
    "words",
    [
        "sim C",
        "cost C",
        "train C",
        "plan C",
        "model m C",
        "profile C",
        "report",
        "view",
        "top",
        "show",
        "play",
        "calibrate R",
    ],
)
def test_a_command_that_needs_the_extra_says_so_in_one_line(words: str, fresh: Path, tmp_path: Path) -> None:
    (tmp_path / "runs/latest").mkdir(parents=True)
    (tmp_path / "runs/latest/config.json").write_text("{}")
    places = {"C": fresh / "share/rl-coserve/examples/sim.toml", "R": "runs/latest"}
    done = run(fresh / "bin" / "rl-coserve", *(places.get(word, word) for word in words.split()), cwd=tmp_path)
    assert done.returncode == 2
    assert re.fullmatch(r"error: \S+ is not installed: pip install 'rl-coserve\[orchestrator\]'\n", done.stderr)


def test_every_missing_library_that_is_named_is_one_of_the_extra() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["orchestrator"]
    assert set(_ORCHESTRATOR.values()) == {re.split(r"[\[><=]", requirement)[0] for requirement in extra}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_wheel_of_the_sdist_is_the_wheel_of_the_checkout(checkout: Path, wheel: Path, tmp_path: Path) -> None:
    """What is published is built from the sdist, in isolation (pip fetches setuptools)."""
    code = "import setuptools.build_meta as build; print(build.build_sdist('sdists'))"
    done = run(sys.executable, "-c", code, cwd=checkout)
    assert done.returncode == 0, done.stderr[-2000:]
    archive = checkout / "sdists" / done.stdout.splitlines()[-1]
    with tarfile.open(archive) as inside:
        names = {name.partition("/")[2] for name in inside.getnames()}
    wanted = {name for name in repository_files() if name.split("/")[0] in (*PACKAGES, "csrc", "tests", "examples")}
    assert sorted(wanted - names) == []
    done = run(
        sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, archive, cwd=tmp_path, limit=500
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (rebuilt,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(rebuilt) as one, zipfile.ZipFile(wheel) as other:
        assert sorted(one.namelist()) == sorted(other.namelist())


def test_the_pins_of_the_cpu_extra_are_the_tested_ranges() -> None:
    """pip must not be able to choose a version that the plugin then refuses."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    components = {name: component for component in COMPONENTS for name in component.distributions}
    checked = 0
    for requirement in map(Requirement, [text for name in ("cpu", "orchestrator") for text in extras[name]]):
        if component := components.get(requirement.name):
            allowed = [text for text in RELEASES[component.name] if text in requirement.specifier]
            assert allowed
            assert [text for text in allowed if text not in component.tested] == []
            checked += 1
    assert checked == 4


def test_the_extras_of_the_plugins_bring_no_engine() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    engines = {name for component in (VLLM, MEGATRON_CORE, MOONCAKE) for name in component.distributions} | {"torch"}
    for name in set(extras) - {"cpu", "dev"}:
        assert {Requirement(text).name for text in extras[name]} & engines == set(), name
