"""What a run writes down, opened: log, journal, store and checkpoints of its folder; new, or gone back to the newest checkpoint.

Guarantees: a checkpoint and a stored trajectory are on disk only after the log and the journal up to them; in between these
are synced every ``run.sync_seconds``, in a thread. Where journal, store and checkpoint of a resumed run disagree it is refused
or repaired, in words.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Self

from orchestrator.checkpoint import Checkpoints, CheckpointState
from orchestrator.config import Config
from orchestrator.durable_files import GroupCommit, JournalFile
from orchestrator.events import EventLog, last_time
from orchestrator.ledger import Ledger
from orchestrator.run_folder import RunFolder
from orchestrator.runtime.record_writer import RecordWriter
from orchestrator.runtime.resume import Resumed, remember, rewind
from orchestrator.shards.shard_folder import ShardFolder
from orchestrator.store import BACKLOG, TrajectoryStore, last_environments, recent_scored, trained_rows

_BACKLOG_SHARE = 0.125  # of the shared memory that shards lie in may wait for the disk


class BesideTheLoop(Checkpoints):
    """Checkpoints for which a thread waits: a process of its own digests and syncs the gigabytes. The pipeline takes one
    checkpoint at a time."""

    async def committed(self, partial: Path, state: CheckpointState) -> Path:
        """See Checkpoints. Who is cancelled meanwhile, at a SIGTERM for example, waits for its end: nobody goes back to an
        earlier checkpoint while this one gets its name."""
        commit = asyncio.ensure_future(asyncio.to_thread(self.commit, partial, state))
        try:
            return await asyncio.shield(commit)
        finally:
            await asyncio.wait([commit])


@dataclass
class RunRecords:
    """Open until :meth:`close`, or the end of the ``with``. ``resumed`` is None for a new run; ``repairs``: what a resume found
    wrong and did about it, in words."""

    events: EventLog
    ledger: Ledger
    store: TrajectoryStore
    checkpoints: Checkpoints
    shards: ShardFolder
    journals: tuple[JournalFile, JournalFile]
    resumed: Resumed | None
    repairs: list[str]
    _stack: ExitStack

    @classmethod
    def open(
        cls,
        folder: RunFolder,
        config: Config,
        now: Callable[[], float],
        started: datetime,
        *,
        resume: bool,
        make_checkpoints: type[Checkpoints] = BesideTheLoop,
        make_store: type[TrajectoryStore] = TrajectoryStore,
    ) -> Self:
        """``now``: the event loop's time; ``started``: the date at this moment. Raises RunError and ConfigError for what
        cannot be gone back to."""
        with ExitStack() as stack:
            log = stack.enter_context(folder.append(folder.events_file))
            journal = stack.enter_context(folder.append(folder.ledger_file))
            journals = (journal, log)
            stack.enter_context(GroupCommit(journals, config.run.sync_seconds))
            events = EventLog(log, now, last_time(folder.events_file))
            ledger = Ledger(journal, events.time)
            epoch = started - timedelta(seconds=events.time())  # a resume goes on counting
            shards, writer = ShardFolder(folder.shards), RecordWriter(folder.logs / "record-writer.log")
            stack.callback(shards.close)
            stack.callback(writer.close)
            store = make_store(
                folder.trajectories,
                epoch=epoch,
                journals=journals,
                finish=shards.finish,
                writer=writer,
                backlog=max(BACKLOG, int(_BACKLOG_SHARE * shards.capacity)),
            )
            stack.callback(store.close)
            checkpoints = make_checkpoints(
                folder.checkpoints, config.checkpoint.keep, journals, config.checkpoint.keep_every, writer
            )
            resumed: Resumed | None = None
            repairs = [
                f"{file.path.name}: {file.cut} bytes of half a line were cut off" for file in journals if file.cut
            ]
            if resume:
                resumed = rewind(checkpoints, ledger, journal, store, folder.next_life())
                repairs += [f"skipped a damaged checkpoint: {problem}" for problem in resumed.damaged]
                repairs += [resumed.cut] if resumed.cut else []
                repairs += compare_store(ledger.trained_by_step, trained_rows(folder.trajectories))
                resumed.position.environments = last_environments(folder.trajectories)
                if config.filters.max_similarity is not None:
                    window = config.filters.similarity_window
                    remember(resumed, recent_scored(folder.trajectories, window, resumed.elapsed), window)
            return cls(events, ledger, store, checkpoints, shards, journals, resumed, repairs, stack.pop_all())

    def close(self) -> None:
        """All that was written is on disk. Idempotent."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def compare_store(trained: dict[int, int], stored: dict[int, int]) -> list[str]:
    """What the store lacks of the trajectories that the journal says were trained, or has too many of, by step. Nothing of
    training depends on it: the run goes on."""
    wrong = [step for step in sorted(trained.keys() | stored.keys()) if trained.get(step, 0) != stored.get(step, 0)]
    return [
        f"the store holds {stored.get(step, 0)} of {trained.get(step, 0)} trajectories that were trained in step {step}"
        for step in wrong[:3]
    ] + ([f"... and {len(wrong) - 3} more steps like these"] if len(wrong) > 3 else [])
