"""Checkpoints are whole or absent; a damaged one is noticed and the one before it is used."""

import asyncio
import errno
import json
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.api import CHECKPOINT_DIGESTS, Prompt, RunError, Trajectory, Turn
from orchestrator.checkpoint import Checkpoints, CheckpointState, verify
from orchestrator.runtime.run_records import BesideTheLoop


def state(step: int) -> CheckpointState:
    turns = (Turn((1, 2), (3, 4), (-0.25, -0.125), ((step, 1), (step + 1, 1)), 0.5, True, 0.1, 0.2),)
    trajectory = Trajectory(
        "t", "g", "task", Prompt("k", "task", 1, "p"), turns, 1.0, "v", 1, False, ("e",), 1.0, 2.0, 3.0, (("m", 0.5),)
    )
    return CheckpointState(step, step + 1, 17, 12.5, (trajectory,), ((0, 0.25),))


def write(checkpoints: Checkpoints, step: int) -> Path:
    partial = checkpoints.begin(step)
    (partial / "trainer" / "weights.bin").write_bytes(bytes([step]) * 1000)
    return checkpoints.commit(partial, state(step))


def test_what_was_saved_is_what_is_loaded(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    folder = write(checkpoints, 3)
    assert checkpoints.newest() == (folder, state(3), [])


def test_only_the_last_ones_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in range(5):
        write(checkpoints, step)
    assert [folder.name for folder in checkpoints.all()] == ["step-000003", "step-000004"]


def test_those_after_every_so_many_steps_stay_too(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1, keep_every=2)
    for step in range(6):
        write(checkpoints, step)
    assert [folder.name for folder in checkpoints.all()] == ["step-000002", "step-000004", "step-000005"]


def test_what_a_rank_digested_is_not_read_again_unless_it_has_another_size(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)

    def said(size: int) -> str:
        partial = checkpoints.begin(1)
        (partial / "trainer" / "weights.bin").write_bytes(bytes(1000))
        listed = {"weights.bin": [size, "0123456789abcdef"]}
        (partial / "trainer" / CHECKPOINT_DIGESTS.format("00000")).write_text(json.dumps(listed))
        return verify(checkpoints.commit(partial, state(1)))

    assert said(1000) == "trainer/weights.bin is damaged"  # this digest was believed
    assert said(999) == ""


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest"])
def test_a_damaged_checkpoint_is_skipped_with_a_reason(tmp_path: Path, damage: str) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    good, bad = write(checkpoints, 1), write(checkpoints, 2)
    weights = bad / "trainer" / "weights.bin"
    if damage == "flip":
        weights.write_bytes(b"\xff" + weights.read_bytes()[1:])
    elif damage == "truncate":
        weights.write_bytes(b"")
    elif damage == "remove":
        weights.unlink()
    else:
        (bad / "files.json").unlink()
    assert verify(bad)
    found = checkpoints.newest()
    assert found is not None
    assert found[0] == good
    assert len(found[2]) == 1


def test_a_copy_beside_the_checkpoints_is_none_of_them(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    newest = write(checkpoints, 2)
    (tmp_path / "step-000396.bak").mkdir()
    (tmp_path / "step-000397").write_text("no folder")
    checkpoints.drop_after(2)
    assert checkpoints.newest() == (newest, state(2), [])
    assert (tmp_path / "step-000396.bak").is_dir()


def test_journals_are_synced_before_a_checkpoint_has_its_name(tmp_path: Path) -> None:
    seen: list[list[Path]] = []

    class Journal:
        def sync(self) -> None:
            seen.append(checkpoints.all())

    checkpoints = Checkpoints(tmp_path, 2, [Journal()])
    final = write(checkpoints, 1)
    assert (seen, checkpoints.all()) == ([[]], [final])


def test_an_interrupted_write_leaves_the_one_before(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    good = write(checkpoints, 1)
    checkpoints.begin(2)  # and the process dies here
    found = checkpoints.newest()
    assert found is not None
    assert found[0] == good
    checkpoints.drop_after(1)
    assert [folder.name for folder in tmp_path.iterdir()] == ["step-000001"]


def test_nothing_intact_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    (write(checkpoints, 1) / "state.json").write_text("{}")
    with pytest.raises(RunError, match="no intact checkpoint"):
        checkpoints.newest()
    assert Checkpoints(tmp_path / "none", keep=1).newest() is None


def test_what_a_batch_launched_is_kept_and_less_than_it_needs_is_no_state(tmp_path: Path) -> None:
    for launched, words in ((2.5, ""), (0.5, "not a run's state.*redundancy")):
        checkpoints = Checkpoints(tmp_path / str(launched), keep=1)
        checkpoints.commit(checkpoints.begin(1), replace(state(1), redundancy=launched))
        if words:
            with pytest.raises(RunError, match=words):
                checkpoints.newest()
        else:
            found = checkpoints.newest()
            assert found is not None
            assert found[1].redundancy == launched


def test_a_full_disk_is_one_error_and_the_checkpoint_before_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    before = write(checkpoints, 1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(RunError, match=r"partial-000002 cannot be written: No space left on device"):
            write(checkpoints, 2)
    assert checkpoints.newest() == (before, state(1), [])


def test_a_run_that_is_stopped_during_a_checkpoint_ends_after_it(tmp_path: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Slow:
        def sync(self) -> None:
            begun.set()
            assert go_on.wait(20.0)

    checkpoints = BesideTheLoop(tmp_path, 1, [Slow()])

    async def stopped() -> list[str]:
        committing = asyncio.create_task(checkpoints.committed(checkpoints.begin(1), state(1)))
        await asyncio.to_thread(begun.wait, 20.0)
        committing.cancel()
        asyncio.get_running_loop().call_later(0.05, go_on.set)
        with pytest.raises(asyncio.CancelledError):
            await committing
        return [path.name for path in checkpoints.all()]

    assert asyncio.run(stopped()) == ["step-000001"]


def test_one_that_cannot_be_removed_yet_is_said_and_goes_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On NFS a file that somebody has open is renamed, and its folder is not empty."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    first = write(checkpoints, 1)
    with monkeypatch.context() as patched:
        busy = OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(first))
        patched.setattr(shutil, "rmtree", lambda *_: (_ for _ in ()).throw(busy))
        second = write(checkpoints, 2)
    assert checkpoints.all() == [first, second]
    assert f"{first} is not removed yet: [Errno 39] Directory not empty" in caplog.text
    assert checkpoints.newest() == (second, state(2), [])
    third = write(checkpoints, 3)
    assert checkpoints.all() == [third]


def test_where_nothing_can_be_written_or_removed_it_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"partial-000001 cannot be written: (Not a directory|File exists)"):
        Checkpoints(tmp_path / "file", keep=1).begin(1)
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    write(checkpoints, 2)  # of a history that a resume goes back behind
    monkeypatch.setattr(os, "rmdir", lambda *_, **__: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    with pytest.raises(RunError, match=r"step-000002 cannot be written: Input/output error"):
        checkpoints.drop_after(1)
