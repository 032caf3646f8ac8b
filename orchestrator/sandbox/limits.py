"""How much a sandbox may use, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass, fields

from orchestrator.api import ConfigError

MB = 1 << 20


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Of one run. Raises ConfigError for a limit that is not positive: there is no unlimited sandbox."""

    wall_seconds: float = 10.0  # from start to end, sleeping included
    cpu_seconds: int = 5  # of each process
    memory_bytes: int = 512 * MB  # of all processes together, and the address space of each
    processes: int = 32  # at once, threads included
    file_bytes: int = 16 * MB  # of one file
    scratch_bytes: int = 64 * MB  # in all files of each writable folder: the working folder, /tmp, /dev/shm
    open_files: int = 64  # of each process
    output_bytes: int = 1 * MB  # standard output and standard error together

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ConfigError(f"sandbox.{field.name}", value, "must be a number above 0")


@dataclass(frozen=True, slots=True)
class SandboxOutcome:
    """How one run ended; ``stdout`` and ``stderr`` are what was written until then, at most ``output_bytes``.

    ``limit`` names the limit that ended it (``wall``, ``cpu``, ``memory``, ``output``), or is empty when it ended by
    itself. ``exit_code`` is -1 where a limit ended it from outside; 128 + n: by signal n.
    """

    exit_code: int
    limit: str
    stdout: bytes
    stderr: bytes
    seconds: float

    @property
    def ok(self) -> bool:
        """It ended by itself, with exit code 0."""
        return self.exit_code == 0 and not self.limit
