"""The five kinds of error, each handled in one place.

* :class:`ConfigError`: wrong input. The command line prints it and exits with code 2; nothing was started.
* :class:`RetryableError`: a part failed, and a retry may help. The caller that owns the retry policy handles it.
  :class:`ProcessDied`: the process is gone, so the same call to it will not succeed. :class:`MachineGone`: its machine is gone,
  and there is nowhere else to start it.
* :class:`TrajectoryError`: fatal to one trajectory, which ends as ``failed: cause``; the run continues.
* :class:`CommandError`: a worker refused a command and changed nothing: the caller made a mistake, or the weights are
  unusable. Over HTTP it has the status that vLLM's clients expect.
* :class:`RunError`: fatal to the run, which stops cleanly, says how to resume and exits with code 1. From a :class:`PartLost`
  the run may recover by itself, from its newest checkpoint.

:class:`CheckpointLost` is apart: one checkpoint could not be written, and the run continues.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from itertools import islice
from typing import Any

MAX_CAUSE = 64  # characters
MAX_DETAIL = 2000


def writable(text: object, most: int) -> str:
    """At most so many characters of ``text``; a lone surrogate, which cannot be encoded, is escaped."""
    return str(text)[:most].encode("utf-8", "backslashreplace").decode()


class _Short(reprlib.Repr):
    """Looks only at the beginning of a long value."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxdict = 8
        self.maxstring = self.maxlong = self.maxother = 200

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        return super().repr_dict(dict(islice(x.items(), self.maxdict + 1)), level)


_SHORT = _Short()


def shown(value: object, most: int = 100) -> str:
    """A foreign value for an error's text: shortened if long, and only its type if its repr fails."""
    try:
        return writable(_SHORT.repr(value), most)
    except Exception:  # noqa: BLE001  no refusal fails by what it refuses
        return f"<{type(value).__name__}>"


class CoserveError(Exception):
    """Base class of all errors that rl-coserve raises deliberately."""


class ConfigError(CoserveError):
    """One wrong input: names the field, the value (unless its repr is empty) and the fix."""

    def __init__(self, field: str, value: object, fix: str) -> None:
        shown = repr(value)
        super().__init__(f"{field} = {shown}: {fix}" if shown else f"{field}: {fix}")
        self.field = field
        self.value = value
        self.fix = fix

    @staticmethod
    def of_all(found: Iterable[ConfigError]) -> ConfigError:
        """Several as one, without duplicates: the first, with the others listed below its fix."""
        first, *others = {str(error): error for error in found}.values()
        return ConfigError(first.field, first.value, "\n  ".join([first.fix, *map(str, others)]))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str]]:
        return ConfigError, (self.field, self.value, self.fix)  # it crosses processes


class RetryableError(CoserveError):
    """A part (worker, relay, reward endpoint) failed; the same call may succeed later."""


class ProcessDied(RetryableError):
    """The process behind a port is gone."""


class MachineGone(RetryableError):
    """The machine of a process is gone. Both may come back."""


class TrajectoryError(CoserveError):
    """One trajectory cannot continue. ``cause``: a short stable word that the ledger counts by; ``detail``: more about it.
    Both are limited in length and can be encoded."""

    def __init__(self, cause: str, detail: str = "") -> None:
        cause, detail = writable(cause, MAX_CAUSE) or "unnamed", writable(detail, MAX_DETAIL)
        super().__init__(f"{cause}: {detail}" if detail else cause)
        self.cause = cause
        self.detail = detail

    def __reduce__(self) -> tuple[type[TrajectoryError], tuple[str, str]]:
        return TrajectoryError, (self.cause, self.detail)


class RunError(CoserveError):
    """The run cannot continue."""


class PartLost(RunError):
    """A part with state (trainer, relay) is gone; the run may recover from its newest checkpoint."""


class CheckpointLost(CoserveError):
    """The process that was writing a checkpoint died; the previous checkpoint is intact."""


class CommandError(CoserveError):
    """A worker refused a command; its state is unchanged. ``code`` is one of :data:`COMMAND_STATUS`."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.status = COMMAND_STATUS[code]

    def __reduce__(self) -> tuple[type[CommandError], tuple[str, str]]:
        return CommandError, (self.code, self.detail)


# What a worker refuses, and its HTTP status.
COMMAND_STATUS: dict[str, int] = {
    "invalid_request": 400,  # malformed, out of range, a prompt over the model's length, a token id it does not have
    "unknown_request": 404,  # no such request, trajectory or group was ever added
    "not_suspended": 409,  # UPDATE without SUSPEND
    "update_in_progress": 409,  # a second UPDATE, or RESUME during one
    "version_decreases": 409,  # UPDATE to an older version than is loaded
    "weights_unusable": 409,  # RESUME after an UPDATE that failed half-way; fixed by another UPDATE or a restart
    "released": 409,  # UPDATE, RESUME or another that needs the device, between RELEASE and RECLAIM
    "no_sleep_mode": 409,  # RELEASE on a worker that was started without sleep mode
    "no_relay": 409,  # UPDATE on a worker that was not told where the relay is
    "requests_in_flight": 409,  # another relay while requests of the present one are unfinished
    "leased": 409,  # another job has the serving GPU
}
