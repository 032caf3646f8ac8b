"""The metadata store without a server: a SQLite file shared by processes.

Guarantees: ``compare_and_set`` is atomic among all processes that open the file (BEGIN IMMEDIATE takes the write lock
before the revision is read); a revision is never used twice for a key. On several machines that holds where their file system
has POSIX locks that all of them see, and without a write-ahead log, which needs memory that all processes share: two machines
would both win. What was changed survives a power cut: an epoch that came back would let two histories share keys, where the
relay's objects are on a disk.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from orchestrator.api import ConfigError, RunError
from orchestrator.transfer.transfer_errors import RelayError

BUSY_SECONDS = 10.0  # how long a call waits for another process's transaction, which takes microseconds


class SqliteMetadata:
    """Implements :class:`orchestrator.api.MetadataStore`. One caller at a time; do not carry it through a fork.

    ``write_ahead``: from now on the file has such a log, and a change takes one sync of the disk instead of several, or has none;
    None: as it is; a new one has none."""

    def __init__(self, path: str | Path, write_ahead: bool | None = None) -> None:
        self._path = str(path)
        try:
            # Autocommit: transactions are begun explicitly. Engines may call from another thread than the one that opened.
            self._connection: sqlite3.Connection | None = sqlite3.connect(
                self._path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            if write_ahead is not None:
                self._switch_journal(self._connection, "WAL" if write_ahead else "DELETE")
            self._connection.execute("PRAGMA synchronous=EXTRA")  # the journal's end is on disk, too
            self._connection.execute(
                "CREATE TABLE IF NOT EXISTS facts (key TEXT PRIMARY KEY, value BLOB NOT NULL, revision INTEGER NOT NULL)"
                " WITHOUT ROWID"
            )
        except (sqlite3.Error, UnicodeDecodeError) as error:  # it quotes names of a damaged file as they are
            fix = (
                f"cannot be opened as a SQLite file ({error}); its folder must exist and be writable, with POSIX locks:"
            )
            fix += " where it has none, set relay.metadata_url"
            raise ConfigError("relay.metadata", self._path, fix) from error

    def _switch_journal(self, connection: sqlite3.Connection, mode: str) -> None:
        """SQLite does not wait for who else is just doing the same to a fresh file: it says "locked" at once."""
        deadline = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                connection.execute(f"PRAGMA journal_mode={mode}")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
                time.sleep(0.005)

    def get(self, key: str) -> tuple[bytes, int] | None:
        with self._calls() as connection:
            row = connection.execute("SELECT value, revision FROM facts WHERE key = ?", (key,)).fetchone()
        return None if row is None else (bytes(row[0]), int(row[1]))

    def compare_and_set(self, key: str, value: bytes, revision: int) -> bool:
        with self._calls() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                row = connection.execute("SELECT revision FROM facts WHERE key = ?", (key,)).fetchone()
                if (0 if row is None else int(row[0])) != revision:
                    return False
                connection.execute(
                    "INSERT INTO facts (key, value, revision) VALUES (?, ?, ?)"
                    " ON CONFLICT (key) DO UPDATE SET value = excluded.value, revision = excluded.revision",
                    (key, value, revision + 1),
                )
                connection.execute("COMMIT")
                return True
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextmanager
    def _calls(self) -> Iterator[sqlite3.Connection]:
        if self._connection is None:
            raise RelayError("closed", "this metadata store was closed")
        try:
            yield self._connection
        except sqlite3.OperationalError as error:  # locked for too long, disk full, I/O error
            raise RelayError("metadata_busy", f"{self._path}: {error}") from error
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise RunError(f"the metadata store {self._path} is damaged or misused: {error}") from error
