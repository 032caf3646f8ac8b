"""The power fails at any operation on a run's files: nothing that a checkpoint saw is lost, and without one sync some is."""

import errno
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api import RunError
from orchestrator.ledger import recount
from orchestrator.run_folder import RunFolder
from scripts.bench import run
from scripts.bench.micro import power_cuts, real_cuts
from scripts.bench.micro.crash_states import Disk, torn
from scripts.bench.micro.file_trace import Operation, recorded


def states(operations: list[Operation], path: Path, tries: int = 60) -> set[str]:
    found = set()
    for seed in range(tries):
        target = path / str(seed)
        target.mkdir()
        Disk(operations).cut(random.Random(seed), target)
        found.add(json.dumps({file.name: file.read_text("latin-1") for file in sorted(target.iterdir())}))
    return found


def test_writes_syncs_and_new_names_are_seen_in_order(tmp_path: Path) -> None:
    with recorded(tmp_path) as trace:
        partial = tmp_path / ".a.partial"
        partial.write_text("1")
        descriptor = os.open(partial, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        partial.replace(tmp_path / "a")
        (tmp_path / "folder").mkdir()
        (tmp_path / "a").unlink()
    seen = [(one.kind, one.path) for one in trace.operations]
    assert seen == [
        ("create", ".a.partial"),
        ("write", ".a.partial"),
        ("sync", ".a.partial"),
        ("rename", ".a.partial"),
        ("mkdir", "folder"),
        ("unlink", "a"),
    ]


def test_what_was_synced_is_there_and_the_rest_may_be(tmp_path: Path) -> None:
    content = [Operation("create", "a"), Operation("write", "a", 0, b"1"), Operation("sync", "a")]
    assert states(content, tmp_path) == {"{}", '{"a": "1"}'}  # its name is not
    for found in tmp_path.iterdir():
        found.rename(tmp_path.parent / f"{tmp_path.name}-{found.name}")
    assert states([*content, Operation("sync", ".")], tmp_path) == {'{"a": "1"}'}


def test_a_file_that_was_moved_twice_is_in_one_folder_when_both_are_synced(tmp_path: Path) -> None:
    moved = [Operation("mkdir", "a"), Operation("mkdir", "b"), Operation("sync", "."), Operation("create", "a/part")]
    moved += [Operation("rename", "a/part", to="a/whole"), Operation("rename", "a/whole", to="b/whole")]
    moved += [Operation("sync", "b"), Operation("sync", "a")]
    for seed in range(20):
        target = tmp_path / str(seed)
        target.mkdir()
        Disk(moved).cut(random.Random(seed), target)
        assert sorted(str(file.relative_to(target)) for file in target.rglob("*")) == ["a", "b", "b/whole"]


def test_a_name_without_the_file_s_sync_may_be_empty(tmp_path: Path) -> None:
    operations = [
        Operation("create", "b"),
        Operation("write", "b", 0, b"1"),
        Operation("rename", "b", to="a"),
        Operation("sync", "."),
    ]
    found = states(operations, tmp_path)
    assert {'{"a": ""}', '{"a": "1"}'} <= found
    assert not any('"b"' in state or state == "{}" for state in found)


def test_a_torn_end_leaves_what_was_synced(tmp_path: Path) -> None:
    before, after = b"x" * 700, b"x" * 700 + b"y" * 3000
    found = {torn(before, after, random.Random(seed)) for seed in range(200)}
    assert all(content.startswith(before) for content in found)
    assert any(b"\0" * 512 in content and content.endswith(b"y") for content in found)


@pytest.mark.slow
def test_nothing_that_a_checkpoint_saw_is_lost_and_without_one_sync_some_is() -> None:
    result = run("power-cuts", quick=True, nonce="test")
    detail = result["detail"]
    assert result["holds"] is None, detail["wrong"]
    assert detail["states"] == 40
    assert detail["trajectories_seen_by_checkpoints"] > 100
    assert all(control["lost"] > 0 for control in detail["controls"].values())


@pytest.mark.parametrize(
    ("where", "room"), [("ledger.jsonl", 40), ("events.jsonl", 10), ("/.partial-", 8), (".parquet.partial", 1)]
)
def test_a_full_disk_ends_the_run_with_one_error_that_names_the_file_and_it_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, room: int
) -> None:
    config = power_cuts.config_of(1, str(tmp_path))
    folder, calls = RunFolder.create(config), [0]

    def filling(real: Any) -> Any:
        def call(descriptor: int, *rest: Any) -> Any:
            if where in os.readlink(f"/proc/self/fd/{descriptor}"):
                calls[0] += 1
                if calls[0] > room:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(descriptor, *rest)

        return call

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", filling(os.write))
        patched.setattr(os, "fsync", filling(os.fsync))
        with pytest.raises(RunError, match=r"cannot be (written|synced): No space left on device"):
            power_cuts.play(folder, config, False, None, "full")
    life = power_cuts.play(folder, config, True, None, "room again")
    counts = life.records.ledger.counts.as_dict()
    assert recount(folder.lines(folder.ledger_file)) == counts
    assert counts["in_flight"] == 0
    assert counts["trained"] >= config.run.steps
    ids = [json.loads(line)["id"] for line in folder.lines(folder.ledger_file)]
    assert "1" in {name.partition("-")[2] for name in ids} <= {"", "1"}, "an id says which life it is of"


def test_cuts_of_a_run_are_dealt_over_kinds_opened_as_a_resume_opens_them_and_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real_cuts, "STEPS", 4)
    operations = power_cuts.record(3)
    places = real_cuts.choose(operations, 20, random.Random("1"))
    named = next(at for at, one in enumerate(operations) if one.to.endswith("step-000004"))
    assert len(places) == 20
    assert max(places) < named, "a step is left to train"
    assert len({power_cuts.kind_of(operations[at]) for at in places}) > 8
    rows = [real_cuts.try_cut(operations, at, f"{at}", tmp_path, whole=False) for at in places]
    assert sum(row["seen"] for row in rows) > 50
    assert [row for row in rows if row["lost"] or row["wrong"]] == []
    assert [row for row in rows if row["committed_step"] is not None and row["resumed_at"] is None] == []
    broken = [one for one in operations if one.kind != "sync" or not one.path.endswith("ledger.jsonl")]
    rows = [real_cuts.try_cut(broken, len(broken) - 1, f"{seed}", tmp_path, whole=False) for seed in range(20)]
    assert sum(row["lost"] for row in rows) > 0
    assert real_cuts.summary_of(rows, broken)["wrong"] != []
