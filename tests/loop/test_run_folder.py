"""A run folder is one process's at a time, its logs survive what can be survived, and a resume says what it cannot mend."""

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
import time
import tracemalloc
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from orchestrator import cli, durable_files, run_folder
from orchestrator.api import ConfigError, Prompt, RunError, Trajectory, Turn
from orchestrator.checkpoint import Checkpoints, CheckpointState
from orchestrator.cli import main
from orchestrator.config import Config, parse_config
from orchestrator.durable_files import GroupCommit, JournalFile, write_durably
from orchestrator.events import MemorySink
from orchestrator.ledger import Ledger, intact_lines
from orchestrator.rollout import Rollout
from orchestrator.run_folder import RunFolder, environment_owner, write_environment
from orchestrator.runtime.real_run import _Assembly
from orchestrator.runtime.run_records import RunRecords, compare_store
from orchestrator.transfer import Publisher, RelayError, Subscriber

STARTED = datetime(2026, 1, 1, tzinfo=UTC)


def make_folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(parse_config({"run": {"folder": str(tmp_path / "runs")}}))


def open_records(folder: RunFolder, *, resume: bool) -> RunRecords:
    return RunRecords.open(
        folder, folder.config(), time.monotonic, STARTED, resume=resume, make_checkpoints=Checkpoints
    )


def tree(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_config_that_this_version_cannot_read_names_its_file_and_who_wrote_it(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    write_environment(folder.path / "environment.json", {"versions": {"rl-coserve": "0.0.9"}})
    data = json.loads(folder.config_file.read_text())
    folder.replace_config(json.dumps(data | {"rollout": data["rollout"] | {"gone": 3}}))
    with pytest.raises(ConfigError, match=r"rollout.gone = 3: no such key") as refused:
        folder.config()
    assert str(refused.value).startswith(f"run = {str(folder.config_file)!r}: was written by rl-coserve 0.0.9")


def test_a_resume_says_what_was_upgraded_and_stamps_its_own_format_before_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, file = make_folder(tmp_path), tmp_path / "runs" / "run-001" / "environment.json"
    first = {"machine": {"cores": 1}, "versions": {"rl-coserve": "0.0.9", "vllm": "0.31.0", "python": "3.11"}}
    write_environment(file, first)
    here = {"machine": {"cores": 2}, "versions": {"rl-coserve": "0.1.0", "ray": "2.60", "python": "3.11"}}
    monkeypatch.setattr(run_folder, "describe_machine", lambda: here)
    assert folder.renew_environment() == [
        "ray: 2.60, before none",
        "rl-coserve: 0.1.0, before 0.0.9",
        "vllm: none, before 0.31.0",
    ]
    assert json.loads(file.read_text()) == {"format": 1, **here, "before": [{"format": 1, **first}]}
    assert folder.renew_environment() == []
    monkeypatch.setattr(run_folder, "FORMAT", 2)  # an upgrade that changes no version that is noted
    assert folder.renew_environment() == []
    monkeypatch.setattr(run_folder, "FORMAT", 1)  # and what came before it
    with pytest.raises(ConfigError, match="is of format 2, this version reads 1"):
        RunFolder.open(folder.path)


def test_a_damaged_or_missing_environment_does_not_keep_a_run_from_continuing(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    for damage in (None, b"{", b"[]", b'{"versions": 3, "before": 4}'):
        if damage is not None:
            (folder.path / "environment.json").write_bytes(damage)
        assert folder.renew_environment() == []
        assert json.loads((folder.path / "environment.json").read_bytes())["versions"]["python"]


# -- one run is one run ----------------------------------------------------------------------------------------------


def test_a_second_resume_is_refused_with_exit_code_2_before_anything_is_touched(tmp_path: Path) -> None:
    nowhere = {"path": str(tmp_path / "nowhere")}  # what would end it if nothing else did
    folder = RunFolder.create(parse_config({"run": {"folder": str(tmp_path / "runs")}, "model": nowhere}))
    (folder.checkpoints / ".partial-000001").mkdir(parents=True)
    before = tree(folder.path)
    command = [sys.executable, "-m", "orchestrator.cli", "train", "--resume", str(folder.path)]
    second = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert second.returncode == 2
    assert f"is being written by process {os.getpid()} on {os.uname().nodename}" in second.stderr
    assert tree(folder.path) == before
    assert (folder.checkpoints / ".partial-000001").is_dir()


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    folder.unlock()
    program = (
        "import sys, time; from orchestrator.run_folder import RunFolder; RunFolder.open(sys.argv[1]).lock(); print()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", f"{program}; sys.stdout.flush(); time.sleep(60)", str(folder.path)],
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        with pytest.raises(ConfigError, match=f"process {child.pid} on"):
            folder.lock()
        child.kill()
        child.wait()
        assert folder.lock() == ""


def test_who_only_looks_is_not_hindered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_placed", lambda config: [])
    monkeypatch.setattr(cli, "_about", lambda config: "nothing")
    folder = make_folder(tmp_path)
    folder.events_file.write_text('{"kind":"run_start","t":0.0,"mode":"async","alpha":1,"steps":4,"name":"run"}\n')
    assert main(["report", str(folder.path), "--json"]) == 0
    assert main(["train", "--resume", str(folder.path), "--dry-run"]) == 0
    capsys.readouterr()


def test_a_file_system_without_locks_is_said_and_not_fatal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path)
    folder.unlock()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert "nothing keeps a second process from resuming" in folder.lock()


def test_two_runs_that_start_at_once_get_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make_folder(tmp_path)
    real, calls = Path.mkdir, []

    def late(self: Path, *rest: object, **more: object) -> None:
        if self.name == "run-002" and not calls:  # another process takes the number first
            calls.append(self)
            real(self)
        real(self, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", late)
    assert (first.path.name, make_folder(tmp_path).path.name) == ("run-001", "run-003")


# -- logs ------------------------------------------------------------------------------------------------------------


def test_half_a_line_is_cut_and_a_whole_one_without_its_end_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "log"
    for content, kept, cut in (
        (b'{"a":1}\n{"a"', b'{"a":1}\n', 4),
        (b'{"a":1}\n{"a":2}', b'{"a":1}\n{"a":2}\n', 0),
        (b'{"a":1}\n\0\0\0', b'{"a":1}\n', 3),
        (b"\xff\xfe", b"", 2),
        (b"", b"", 0),
    ):
        file.write_bytes(content)
        with JournalFile(file) as journal:
            assert (file.read_bytes(), journal.cut) == (kept, cut)
            journal.write('{"a":3}\n')
        assert file.read_bytes() == kept + b'{"a":3}\n'


def test_logs_are_synced_every_so_often_in_a_thread_and_only_where_there_is_something_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with JournalFile(tmp_path / "log") as journal:
        journal.sync()
        threads: list[str] = []
        synced = threading.Event()
        real = os.fsync

        def fsync(descriptor: int) -> None:
            threads.append(threading.current_thread().name)
            real(descriptor)
            synced.set()

        monkeypatch.setattr(os, "fsync", fsync)
        with GroupCommit([journal], 0.01):
            journal.write("1\n")
            assert synced.wait(10.0)
            time.sleep(0.1)  # ten times more, with nothing to sync
        assert threads == ["group commit"]


def test_a_log_that_cannot_be_written_says_so_and_is_left_with_half_a_line_that_a_resume_cuts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = JournalFile(tmp_path / "log")
    journal.write('{"a":1}\n')
    real = os.write

    def full(descriptor: int, data: bytes) -> int:
        if len(data) > 4:
            return real(descriptor, data[:4])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(RunError, match="log cannot be written: No space left on device"):
            journal.write('{"a":2}\n')
    for again in (lambda: journal.write("x\n"), journal.sync):  # a later line would stand behind half a line
        with pytest.raises(RunError, match="No space left"):
            again()
    journal.close()
    with JournalFile(tmp_path / "log") as after:
        assert after.cut == 4
        assert list(after.lines()) == ['{"a":1}']


def test_a_sync_that_failed_is_never_said_to_have_succeeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = JournalFile(tmp_path / "log")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
        with GroupCommit([journal], 0.01) as commits:
            journal.write("1\n")
            commits._thread.join(10.0)
    with pytest.raises(RunError, match="cannot be synced: Input/output error"):
        journal.sync()
    with pytest.raises(RunError, match="cannot be synced"):
        journal.write("2\n")
    journal.close()


def test_a_file_is_written_synced_renamed_and_then_its_folder_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    real = {name: getattr(os, name) for name in ("fsync", "replace")}

    def fsync(descriptor: int) -> None:
        done.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        real["fsync"](descriptor)

    def replace(source: Path, target: Path) -> None:
        done.append(f"rename {Path(target).name}")
        real["replace"](source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    write_durably(tmp_path / "life", "1\n")
    assert done == ["sync .life.partial", "rename life", f"sync {tmp_path.name}"]
    write_environment(tmp_path / "environment.json", {})  # which a report reads, after a power cut too
    assert done[3:] == ["sync .environment.json.partial", "rename environment.json", f"sync {tmp_path.name}"]


def test_names_that_a_resume_needs_are_kept(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    assert folder.job(shared=True) == folder.job(shared=True)
    assert environment_owner(folder.path) == environment_owner(folder.path)


def test_runs_of_one_folder_name_on_one_relay_leave_each_others_weights(tmp_path: Path) -> None:
    """Each with the version pointer in its own folder: neither knows of the other."""
    relay = {"kind": "fsspec", "master": f"file://{tmp_path}/shared"}
    publishers: list[Publisher] = []
    for name in "ab":
        (tmp_path / name).mkdir()
        folder = make_folder(tmp_path / name)
        assembly: Any = SimpleNamespace(config=Config(relay=relay), folder=folder)
        endpoint = asyncio.run(_Assembly._start_relay(assembly))
        publishers.append(Publisher(endpoint))
        publishers[-1].rollback(0)
        value = np.frombuffer(name.encode() * 64, np.uint8)
        try:
            publishers[-1].publish(0, [("w", (64,), "uint8", value)])
        except RelayError:  # it is tried again
            publishers[-1].publish(0, [("w", (64,), "uint8", value)])
    for name, publisher in zip("ab", publishers, strict=True):
        reader = Subscriber(publisher._endpoint)
        ((_, data),) = reader.fetch(reader.manifest(0))
        assert data.tobytes() == name.encode() * 64
        reader.close()
        publisher.close()


# -- going back ------------------------------------------------------------------------------------------------------


def journal_of(trajectories: int) -> list[str]:
    sink = MemorySink()
    ledger = Ledger(sink, lambda: 0.0)
    for number in range(trajectories):
        ledger.start(f"t{number}", f"g{number}")
    return [line.removesuffix("\n") for line in sink.lines]


def test_a_journal_that_is_torn_behind_the_checkpoint_is_cut_there() -> None:
    lines = journal_of(6)
    assert intact_lines(lines, 3) == (6, "")
    assert intact_lines([*lines[:4], '{"id":"t4","s'], 3) == (4, "line 5 is no whole record")
    assert intact_lines([*lines[:4], "\0\0\0", lines[5]], 4) == (4, "line 6 is record 5 where 4 was to come")
    assert intact_lines([*lines[:3], '{"id":"\udcff"}'], 3) == (
        3,
        "line 4 holds a byte 0xff that is not UTF-8: the file is damaged",
    )
    assert intact_lines([*lines[:2], '{"half', *lines[2:]], 6) == (7, "")  # closed off by an earlier version


@pytest.mark.parametrize("lines", [journal_of(6)[:4], [*journal_of(6)[:4], "\udcff", journal_of(6)[5]], []])
def test_a_journal_with_less_than_the_checkpoint_claims_is_refused_with_the_numbers(lines: list[str]) -> None:
    whole = min(4, len(lines))
    with pytest.raises(RunError, match=f"holds {whole} records, the checkpoint was written after 5: {5 - whole} are"):
        intact_lines(lines, 5)


def test_a_refused_resume_leaves_checkpoints_journal_and_store_alone(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    with open_records(folder, resume=False) as records:
        for number in range(4):
            records.ledger.start(f"t{number}", "g0")
        for step in (1, 2):
            state = CheckpointState(step, step, records.ledger.sequence, 1.0, ())
            records.checkpoints.commit(records.checkpoints.begin(step), state)
    (folder.checkpoints / "step-000002" / "state.json").write_text("damaged")  # the resume would drop it
    lines = folder.ledger_file.read_bytes().splitlines(keepends=True)
    folder.ledger_file.write_bytes(b"".join(lines[:2]))
    before = tree(folder.path)
    with pytest.raises(RunError, match="holds 2 records, the checkpoint was written after 4: 2 are missing"):
        open_records(folder, resume=True)
    after = tree(folder.path)
    assert {name: after[name] for name in before} == before


def test_an_environment_that_was_upgraded_between_two_lives_is_said_as_one_that_changes_in_mid_run(
    tmp_path: Path,
) -> None:
    folder, told = make_folder(tmp_path), list[str]()
    turn = Turn((1,), (2,), (-0.5,), ((0, 1),))
    with open_records(folder, resume=False) as records:
        for step, version in enumerate(("env 1", "env 2", "env 3")):
            prompt = Prompt("p", "nim", 1, "")
            kept = Trajectory(f"t{step}", "g0", "nim", prompt, (turn,), 1.0, version, 1, False)
            records.ledger.start(kept.id, "g0")
            records.ledger.end(kept.id, "trained", step=step)
            records.store.append(kept, step, "trained", position=0, weight=1.0)
        records.store.flush()
        records.checkpoints.commit(records.checkpoints.begin(2), CheckpointState(2, 2, 4, 1.0, ()))
    with open_records(folder, resume=True) as records:
        assert records.resumed is not None
        found = records.resumed.position.environments
    assert found == {"nim": ["env 2"]}, "the third is rolled back"
    rollout: Any = SimpleNamespace(buffer=SimpleNamespace(restore=lambda *_: None), rounds=None)
    rollout.events = SimpleNamespace(emit=lambda kind, **fields: told.append(f"{fields['what']}: {fields['detail']}"))
    Rollout.restore(rollout, [], 2, found)
    for version in ("env 2", "env 4", "env 4"):
        episode: Any = SimpleNamespace(prompt=SimpleNamespace(task="nim"), env_version=version)
        Rollout._note_version(rollout, episode)
    assert told == ["environment_version: task nim: 'env 4' beside 'env 2'"]


def test_a_longer_journal_is_rolled_back_and_no_id_comes_twice(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    with open_records(folder, resume=False) as records:
        records.checkpoints.commit(records.checkpoints.begin(0), CheckpointState(0, 0, 0, 1.0, ()))
        records.ledger.start("t0", "g0")
    with folder.ledger_file.open("ab") as stream:
        stream.write(b"\0" * 512)
    for life in (1, 2):
        with open_records(folder, resume=True) as records:
            assert records.resumed is not None
            assert records.resumed.position.life == life
            assert records.ledger.counts.failed_by_cause == {"interrupted": 1}
            assert [text for text in records.repairs if "512 bytes" in text] == records.repairs
            assert len(records.repairs) == (life == 1)


def test_a_byte_that_is_no_text_ends_a_resume_in_words_or_is_cut_off(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    with open_records(folder, resume=False) as records:
        for number in range(3):
            records.ledger.start(f"t{number}", "g0")
        state = CheckpointState(1, 1, records.ledger.sequence, 1.0, ())
        records.checkpoints.commit(records.checkpoints.begin(1), state)
        records.ledger.start("t3", "g0")
    whole = folder.ledger_file.read_bytes()
    for line, told in ((1, "holds 1 records, the checkpoint was written after 3: 2 are missing"), (3, "")):
        lines = whole.splitlines(keepends=True)
        lines[line] = lines[line].replace(b"g0", b"g\xff")
        folder.ledger_file.write_bytes(b"".join(lines))
        refused = pytest.raises(RunError, match=told) if told else contextlib.nullcontext()
        with refused, open_records(folder, resume=True) as records:
            assert "byte 0xff" in " ".join(records.repairs)


def test_a_life_that_is_no_number_is_one_clear_error(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    folder.life_file.write_text("two\n")
    with pytest.raises(ConfigError, match=r"life.*is not a number"):
        folder.next_life()


def test_a_log_that_is_no_text_is_one_clear_error(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    folder.ledger_file.write_bytes(b"{}\n\xff\n")
    with pytest.raises(ConfigError, match="line 2 holds a byte 0xff that is not UTF-8"):
        folder.lines(folder.ledger_file)


def test_a_store_that_disagrees_with_the_journal_is_said_in_words() -> None:
    assert compare_store({0: 4, 1: 4}, {0: 4, 1: 4}) == []
    assert compare_store({0: 4, 1: 4}, {0: 4}) == ["the store holds 0 of 4 trajectories that were trained in step 1"]
    assert compare_store(dict.fromkeys(range(5), 1), {})[-1] == "... and 2 more steps like these"


def test_a_journal_is_read_a_line_at_a_time(tmp_path: Path) -> None:
    """That of a week has gigabytes."""
    lines = [f"{line}\n" for line in journal_of(40_000)]
    (tmp_path / "ledger.jsonl").write_text("".join(lines) + '{"half')
    tracemalloc.start()
    try:
        with JournalFile(tmp_path / "ledger.jsonl") as journal:
            assert intact_lines(journal.lines(), 40_000) == (40_000, "")
            journal.keep(39_999)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20, "of 3 MB of journal, and the piece that is looked at for its end"
    assert (tmp_path / "ledger.jsonl").read_text() == "".join(lines[:-1])


@pytest.mark.parametrize("piece", [1, 2, 7, 100])
def test_the_end_of_a_log_is_found_in_whatever_pieces_it_is_read(
    piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable_files, "_TAIL", piece)
    for content, kept in (
        (b'{"a":1}\n{"b":2', b'{"a":1}\n'),
        (b'{"a":1}\n', b'{"a":1}\n'),
        (b'{"a":1', b""),
        (b"1", b"1\n"),
    ):
        (tmp_path / "log").write_bytes(content)
        JournalFile(tmp_path / "log").close()
        assert (tmp_path / "log").read_bytes() == kept
