"""Environments of other trainers: a venv each beside ours, made by pip from what it names here.

A venv that is whole has a stamp with its requirements; what is half made, or of other requirements, is made anew. torch is the
build of our own environment, so that both sides compute with the same one.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
from pathlib import Path

from orchestrator.api import RunError

REQUIREMENTS = {
    "trl": (
        "trl>=1.16,<1.17",
        "transformers>=5.2,<5.20",
        "accelerate>=1.10,<2",
        "datasets>=4.7,<6",
        "gymnasium>=1.2,<2",
    ),
    "verl": ("verl[verl-core]>=0.9,<0.10",),
}
FOLDER = Path(sys.prefix) / "peers"
_STAMP = "requirements.json"


def requirements(name: str) -> list[str]:
    """What pip is asked for."""
    return [f"torch=={importlib.metadata.version('torch')}", *REQUIREMENTS[name]]


def prepared(name: str, folder: Path = FOLDER) -> Path | None:
    """The interpreter of a peer's environment; None where it is not there, or was made of other requirements."""
    stamp, python = folder / name / _STAMP, folder / name / "bin" / "python"
    if (
        not stamp.is_file()
        or not python.exists()
        or json.loads(stamp.read_text(encoding="utf-8")) != requirements(name)
    ):
        return None
    return python


def prepare(name: str, folder: Path = FOLDER) -> Path:
    """The same, made first where it is not there. Raises RunError with pip's last lines."""
    if python := prepared(name, folder):
        return python
    shutil.rmtree(folder / name, ignore_errors=True)
    _must([sys.executable, "-m", "venv", str(folder / name)], f"no environment for {name}")
    made = folder / name / "bin" / "python"
    _must([str(made), "-m", "pip", "install", "--quiet", *requirements(name)], f"{name} could not be installed")
    (folder / name / _STAMP).write_text(json.dumps(requirements(name)), encoding="utf-8")
    return made


def versions(python: Path) -> dict[str, str]:
    """What is installed there, of what a reader asks for."""
    names = ("trl", "verl", "transformers", "accelerate", "datasets", "torch", "gymnasium", "ray", "tensordict")
    text = (
        "import importlib.metadata as m, json\n"
        f"print(json.dumps({{d.name: d.version for d in m.distributions() if d.name in {names!r}}}))"
    )
    found: dict[str, str] = json.loads(
        subprocess.run([str(python), "-c", text], capture_output=True, check=True).stdout
    )
    return found


def _must(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(f"{what}: {(done.stdout + done.stderr)[-1500:]}")
