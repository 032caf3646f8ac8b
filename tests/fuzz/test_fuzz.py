"""Every harness: its corpus in each run of the tests, new inputs for FUZZ_MINUTES in the long ones."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz import __main__ as runner
from tests.fuzz import native
from tests.fuzz.__main__ import MINUTES, fuzz_one
from tests.fuzz.harness import CORPORA, HARNESSES, ROOT, collect, fuzz, harness, read_input, read_lines, write_line
from tests.fuzz.inputs import JUNK
from tests.fuzz.run_files import check_missing_lines
from tests.fuzz.table import OURS, PAGE, everything, written

MADE = {"delta-decoder": 15_000, "page-ledger": 300}  # inputs in each run of the tests; of the ledger, each is a file
SEED = 20  # of the long tests, which are the same every time


@pytest.mark.parametrize("name", HARNESSES)
def test_what_is_in_its_corpus_is_read_or_refused(name: str, tmp_path: Path) -> None:
    found = fuzz(HARNESSES[name], tmp_path, 0.0, SEED)
    assert found.error == ""
    assert found.inputs == len(read_lines(HARNESSES[name].corpus)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", native.NATIVE)
def test_what_is_in_its_corpus_does_not_leave_its_buffers(name: str, tmp_path: Path) -> None:
    try:
        assert native.replay(native.NATIVE[name], tmp_path) > 0
        made = native.run(native.build(native.NATIVE[name], tmp_path, guided=False), [str(MADE[name]), "1"], 300.0)
        assert (made.returncode, made.stdout) == (0, f"{MADE[name]} inputs\n"), made.stderr[-3000:]
    except native.NoSanitizer as error:
        pytest.skip(str(error))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", everything())
def test_new_inputs_are_read_or_refused(name: str) -> None:
    try:
        found = fuzz_one(name, 60 * MINUTES, SEED, 0)
    except native.NoSanitizer as error:
        pytest.skip(str(error))
    assert found.error == "", f"{found.finding}\n{found.error}"


def test_a_corpus_gives_back_what_was_written() -> None:
    values = [
        *JUNK[:-1],
        b"[" * 100_000 + b"x",
        (True, b"\xff" * 70 + b"ab" * 40),
        {"a": (1, b"")},
        "x" * 500,
        ("", [b"", {}]),
    ]
    for value in values:
        line = write_line("why", value)
        assert len(line) < 4000
        found = read_input(line)
        assert (type(found), repr(found)) == (type(value), repr(value))


def test_a_parser_that_breaks_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that raises something else, one that never answers, one that takes more than it may."""
    from hypothesis import strategies as st

    from tests.fuzz import inputs

    def broken(data: bytes) -> None:
        if len(data) > 3:
            raise KeyError(data[0])

    def hangs(data: bytes) -> None:
        while len(data) > 3:
            pass

    def greedy(data: bytes) -> None:
        inputs.survives(lambda: bytearray(bool(data) * (inputs.MEMORY + 1)), ValueError)

    monkeypatch.setattr(inputs, "SECONDS", 0.5)
    for check, wrong in ((broken, "KeyError"), (hangs, "TooSlow"), (greedy, "were allocated")):

        def build(folder: Path, check=check):  # type: ignore[no-untyped-def]
            yield st.binary(max_size=9), check

        name = f"{check.__name__}_for_this_test"
        build.__name__ = name
        harness("x.py", refuses="x")(build)
        one = HARNESSES.pop(name.replace("_", "-"))
        found = fuzz(one, tmp_path, 30.0, SEED)
        assert wrong in found.error, found
        assert found.finding


def test_figures_grow_slice_by_slice_the_least_fuzzed_first_and_a_finding_rests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, asked = tmp_path / "fuzzing.json", list[str]()

    def row(name: str, seconds: float, seed: int) -> dict[str, Any]:
        asked.append(name)
        return {"harness": name, "inputs": 10, "minutes": 1.0, "finding": "seed 7" if name == "journal" else ""}

    monkeypatch.setattr(runner, "fuzz_row", row)
    names = ["address", "journal", "events"]
    assert runner.fuzz_until(1, ["address"], 60, 0, out) == 0
    assert runner.fuzz_until(2, names, 60, 0, out) == 1
    assert asked == ["address", "journal", "events", "address", "events"]
    found = json.loads(out.read_text())
    assert (found["value"], found["holds"]) == (1, False)
    assert runner.fuzz_until(2, ["journal"], 60, 0, out) == 1, "it was named as mended, and is not"
    assert asked[5:] == ["journal"]
    result = json.loads(out.read_text())
    rows = {one["harness"]: one for one in result["detail"]["harnesses"]}
    assert set(rows) == set(everything())
    assert [(rows[name]["inputs"], rows[name]["minutes"]) for name in names] == [(20, 2.0), (20, 2.0), (20, 2.0)]
    assert len(rows["address"]["commits"]) == 1


def test_a_corpus_is_begun_with_what_reaches_new_lines(tmp_path: Path) -> None:
    lines = collect(HARNESSES["json-text"], tmp_path, 150)
    assert 2 <= len(lines) < 40


def test_a_journal_with_a_missing_line_is_noticed() -> None:
    check_missing_lines()


READING = re.compile(
    r"(json|tomllib|csv)\.(loads?|reader)|(jsontext\.)?parse(_object)?|ast\.literal_eval|(np|numpy)\.(frombuffer|load)|sqlite3\.connect"
    r"|msgpack\.(unpackb|Unpacker)|.*\.(unpack_from|open_file|open_stream|ParquetFile)|ElementTree\.\w+|yaml\.\w+"
)


def test_whatever_makes_values_of_bytes_is_in_a_harness_or_says_whose_bytes_they_are() -> None:
    found = set()
    packages = ("orchestrator", "vllm_rlplugin", "megatron_rlplugin", "patches")
    for file in (file for name in packages for file in (ROOT / name).rglob("*.py")):
        text = file.read_text("utf-8")
        if not READING.search(text):
            continue
        calls = (node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
        if any(READING.fullmatch(ast.unparse(call)) for call in calls):
            found.add(str(file.relative_to(ROOT)))
    read = {file for one in everything().values() for file in one.reads}
    assert sorted(found - read - set(OURS)) == []
    assert sorted(set(OURS) - found | set(OURS) & read) == [], "not read there any more, or in a harness"
    assert all(OURS.values())


def test_the_page_lists_every_harness_and_every_file_is_there() -> None:
    assert PAGE.read_text(encoding="utf-8") == written(), "python -m tests.fuzz --page"
    for one in everything().values():
        assert one.property.endswith("."), one.name
        assert one.corpus.is_file(), f"python -m tests.fuzz {one.name} --collect 300"
        assert one.corpus.stat().st_size < 64 << 10, one.name
        assert [file for file in one.reads if not (ROOT / file).is_file()] == []
    assert {file.stem for file in CORPORA.glob("*.jsonl")} == set(everything())
