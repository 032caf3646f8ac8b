"""The four kinds of error, each with one owner.

* :class:`ConfigError` : the user's input. The command line prints it and exits with code 2; nothing was started.
* :class:`RetryableError` : a part failed in a way that a retry may cure. The caller that owns the retry policy handles it.
* :class:`TrajectoryError` : fatal to one trajectory, which ends as ``failed: cause``; the run goes on.
* :class:`RunError` : fatal to the run. The run stops cleanly, says how to resume, exit code 1.
"""

from __future__ import annotations


class CoserveError(Exception):
    """Base of all errors that rl-coserve raises on purpose."""


class ConfigError(CoserveError):
    """One wrong input: names the field, the value and the fix."""

    def __init__(self, field: str, value: object, fix: str) -> None:
        super().__init__(f"{field} = {value!r}: {fix}")
        self.field = field
        self.value = value
        self.fix = fix

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str]]:
        return ConfigError, (self.field, self.value, self.fix)  # it crosses processes


class RetryableError(CoserveError):
    """A part (worker, relay, reward endpoint) failed; the same call may succeed later."""


class TrajectoryError(CoserveError):
    """One trajectory cannot go on. ``cause`` is a short stable word that the ledger counts by."""

    def __init__(self, cause: str, detail: str = "") -> None:
        super().__init__(f"{cause}: {detail}" if detail else cause)
        self.cause = cause
        self.detail = detail

    def __reduce__(self) -> tuple[type[TrajectoryError], tuple[str, str]]:
        return TrajectoryError, (self.cause, self.detail)


class RunError(CoserveError):
    """The run cannot go on."""
