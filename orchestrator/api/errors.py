"""The five kinds of error, each with one owner.

* :class:`ConfigError` : the user's input. The command line prints it and exits with code 2; nothing was started.
* :class:`RetryableError` : a part failed in a way that a retry may cure. The caller that owns the retry policy handles it.
  :class:`ProcessDied` is one whose process is gone: the same call to the same process will not succeed. :class:`MachineGone`:
  its machine is, and there is nowhere else to go.
* :class:`TrajectoryError` : fatal to one trajectory, which ends as ``failed: cause``; the run goes on.
* :class:`CommandError` : a worker refused a command and changed nothing: the mistake is the caller's, or the weights are
  unusable. Over HTTP it is the status that vLLM's clients expect.
* :class:`RunError` : fatal to the run. The run stops cleanly, says how to resume, exit code 1. :class:`PartLost` is one that
  the run may cure by itself, from its newest checkpoint.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from itertools import islice
from typing import Any

MAX_CAUSE = 64  # characters
MAX_DETAIL = 2000


def writable(text: object, most: int) -> str:
    """Up to so many characters of it; of half a surrogate pair, which no file or pipe takes, its escape."""
    return str(text)[:most].encode("utf-8", "backslashreplace").decode()


class _Short(reprlib.Repr):
    """Of a long value the beginning is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxdict = 8
        self.maxstring = self.maxlong = self.maxother = 200

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        return super().repr_dict(dict(islice(x.items(), self.maxdict + 1)), level)


_SHORT = _Short()


def shown(value: object, most: int = 100) -> str:
    """What a value of others is, for an error's text: of a long one not all is written, and one that cannot be written (a number
    of too many digits, words of its own that fail) is its type."""
    try:
        return writable(_SHORT.repr(value), most)
    except Exception:  # noqa: BLE001  no refusal fails by what it refuses
        return f"<{type(value).__name__}>"


class CoserveError(Exception):
    """Base of all errors that rl-coserve raises on purpose."""


class ConfigError(CoserveError):
    """One wrong input: names the field, the value (where its repr is not empty) and the fix."""

    def __init__(self, field: str, value: object, fix: str) -> None:
        shown = repr(value)
        super().__init__(f"{field} = {shown}: {fix}" if shown else f"{field}: {fix}")
        self.field = field
        self.value = value
        self.fix = fix

    @staticmethod
    def of_all(found: Iterable[ConfigError]) -> ConfigError:
        """One for several, each once: the first, with the others below its fix."""
        first, *others = {str(error): error for error in found}.values()
        return ConfigError(first.field, first.value, "\n  ".join([first.fix, *map(str, others)]))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str]]:
        return ConfigError, (self.field, self.value, self.fix)  # it crosses processes


class RetryableError(CoserveError):
    """A part (worker, relay, reward endpoint) failed; the same call may succeed later."""


class ProcessDied(RetryableError):
    """The process behind a port is gone."""


class MachineGone(RetryableError):
    """The machine of a process is gone. It may come back, and the process with it."""


class TrajectoryError(CoserveError):
    """One trajectory cannot go on. ``cause`` is a short stable word that the ledger counts by, ``detail`` what others said, both
    within limits and such that they can be written down."""

    def __init__(self, cause: str, detail: str = "") -> None:
        cause, detail = writable(cause, MAX_CAUSE) or "unnamed", writable(detail, MAX_DETAIL)
        super().__init__(f"{cause}: {detail}" if detail else cause)
        self.cause = cause
        self.detail = detail

    def __reduce__(self) -> tuple[type[TrajectoryError], tuple[str, str]]:
        return TrajectoryError, (self.cause, self.detail)


class RunError(CoserveError):
    """The run cannot go on."""


class PartLost(RunError):
    """A part that holds state (trainer, relay) is gone; a new one from the newest checkpoint may cure it."""


class CheckpointLost(CoserveError):
    """What was being saved went with the process that wrote it; the checkpoint before it stands."""


class CommandError(CoserveError):
    """A worker refused a command; its state is unchanged. ``code`` is one of :data:`COMMAND_STATUS`."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.status = COMMAND_STATUS[code]

    def __reduce__(self) -> tuple[type[CommandError], tuple[str, str]]:
        return CommandError, (self.code, self.detail)


# What a worker refuses, and the HTTP status it is over that carrier.
COMMAND_STATUS: dict[str, int] = {
    "invalid_request": 400,  # malformed, out of range, a prompt over the model's length, a token id it does not have
    "unknown_request": 404,  # no such request, trajectory or group was ever added
    "not_suspended": 409,  # UPDATE without SUSPEND
    "update_in_progress": 409,  # a second UPDATE, or RESUME during one
    "version_decreases": 409,  # UPDATE to an older version than is loaded
    "weights_unusable": 409,  # RESUME after an UPDATE that failed half-way; another UPDATE or a restart cures it
    "released": 409,  # UPDATE, RESUME or another that needs the device, between RELEASE and RECLAIM
    "no_sleep_mode": 409,  # RELEASE on a worker that was started without sleep mode
    "no_relay": 409,  # UPDATE on a worker that was not told where the relay is
    "requests_in_flight": 409,  # another relay while requests of the present one are unfinished
    "leased": 409,  # another job has the serving GPU
}
