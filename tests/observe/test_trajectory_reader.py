"""What the agent said, as it was: found by step, reward and end, decoded, shown as text and never as what steers or marks up."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import re
import shlex
import subprocess
import sys
import weakref
from pathlib import Path

import aiohttp
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyarrow import parquet

from orchestrator.api import ConfigError, ContextStart, Prompt, Trajectory, Turn
from orchestrator.cli import main
from orchestrator.observe.report.report_page import write_report
from orchestrator.observe.trajectory_reader import TokenText, TrajectoryChoice, TrajectoryReader
from orchestrator.observe.view.view_server import Hub, Server
from orchestrator.store import PartIndex, TrajectoryStore
from tests.support.view_runs import write_unfinished

TOKEN = "token-of-this-test-1234"
WORDS = ["<pad>", "<end>", "left", "right", "hole", "\x1b[2J", "[red]", "<img src=x>"]
SAID = (2, 5, 6, 7, 1)  # left, what clears a screen, markup of a terminal, markup of a page, <end>


def trajectory(
    identity: str, reward: float | None, *, at: float = 10.0, group: str = "g1", turns: int = 1
) -> Trajectory:
    spans = ((3, 2), (4, 3))
    said = tuple(
        Turn(
            (4, 2),
            SAID,
            (-1.0, -2.0, 0.0, 0.0, -0.5),
            spans,
            0.25 * index,
            generate_seconds=0.5,
            environment_seconds=0.125,
        )
        for index in range(turns)
    )
    prompt = Prompt("key", "maze", 7, "SFFH")
    return Trajectory(identity, group, "maze", prompt, said, reward, "1", 7, False, (), at - 5, at, at + 1)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = write_unfinished(tmp_path / "maze-001", steps=3)
    (folder / "config.json").write_text("{}")
    model = folder / "model"
    model.mkdir()
    write_words(model, WORDS)
    store = TrajectoryStore(folder / "trajectories")
    store.append(trajectory("t1", 0.0, at=10), 0, "trained")
    store.append(trajectory("t2", 1.0, at=11, turns=2), 0, "trained")
    store.append(trajectory("t3", 0.5, at=12, group="g2"), 1, "trained")
    store.append(trajectory("t4", None, at=13, group="g2"), 1, "failed: env_timeout")
    store.append(trajectory("t5", 0.5, at=14, group="g2"), 2, "evicted_stale")
    store.close()
    lines = [
        ["t2", 0, "vllm-1", 1.0, 1.5, 1.75, 2.0],
        ["t2", 1, "vllm-0", 2.5, 3.0, 3.0, 3.1],
        ["t22", 0, "x", 1, 2, 3, 4],
    ]
    (folder / "turns.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n["t2", 2, "vll')
    return folder


def write_words(folder: Path, words: list[str]) -> None:
    vocab = {word: token for token, word in enumerate(words)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "WordLevel", "vocab": vocab}}))


@pytest.mark.parametrize(
    ("chosen", "order", "found"),
    [
        (TrajectoryChoice(), "newest", "t5 t4 t3 t2 t1"),
        (TrajectoryChoice(), "best", "t2 t5 t3 t1"),  # of two alike the newer; never what has no reward
        (TrajectoryChoice(), "worst", "t1 t5 t3 t2"),
        (TrajectoryChoice(), "longest", "t2 t5 t4 t3 t1"),
        (TrajectoryChoice(step=1), "newest", "t2 t1"),
        (TrajectoryChoice(step=2, cause="trained"), "newest", "t3"),
        (TrajectoryChoice(cause="failed"), "newest", "t4"),
        (TrajectoryChoice(cause="fail", task="lake"), "newest", ""),
        (TrajectoryChoice(least=0.5, most=0.75), "newest", "t5 t3"),
        (TrajectoryChoice(group="g1"), "newest", "t2 t1"),
    ],
)
def test_trajectories_are_found_by_step_reward_and_end(
    run: Path, chosen: TrajectoryChoice, order: str, found: str
) -> None:
    reader = TrajectoryReader(run)
    lines, total = reader.lines(chosen, order)
    assert " ".join(line["trajectory_id"] for line in lines) == found
    assert total == len(lines)
    page, total_again = reader.lines(chosen, order, first=1, most=2)
    assert (page, total_again) == (lines[1:3], total)


def test_a_page_of_any_order_and_filter_is_the_one_that_sorting_everything_gives(tmp_path: Path) -> None:
    rng = random.Random(7)
    store = TrajectoryStore(tmp_path / "trajectories", rows_per_file=20)
    rows = []
    for number in range(120):
        reward = rng.choice([None, 0.0, 0.5, 1.0]) if number % 40 > 9 else None  # some files have no reward at all
        at, turns = float(number // 20 * 10 + rng.randrange(40)), rng.randrange(1, 4)
        end = "failed: env_timeout" if rng.random() < 0.1 else "trained"
        rows.append((f"t{number}", reward, at, turns, number // 20 + 1, end))
        store.append(trajectory(f"t{number}", reward, at=at, turns=turns), number // 20, end)
    store.close()
    reader = TrajectoryReader(tmp_path)
    ranks = {"newest": lambda row: -row[2], "best": lambda row: -row[1], "worst": lambda row: row[1]}
    ranks["longest"] = lambda row: -row[3]
    choices = [
        (TrajectoryChoice(), lambda row: True),
        (TrajectoryChoice(step=4), lambda row: row[4] == 4),
        (TrajectoryChoice(cause="failed"), lambda row: row[5] != "trained"),
        (TrajectoryChoice(least=0.5, cause="trained"), lambda row: (row[1] or 0) >= 0.5 and row[5] == "trained"),
    ]
    for order, rank in ranks.items():
        for chosen, passes in choices:
            kept = [row for row in rows if passes(row) and (order not in ("best", "worst") or row[1] is not None)]
            kept.sort(key=lambda row: (rank(row), -row[2], row[0]))
            for first, most in ((0, 20), (9, 100)):
                lines, total = reader.lines(chosen, order, first, most)
                found = [line["trajectory_id"] for line in lines]
                assert (found, total) == ([row[0] for row in kept[first : first + most]], len(kept)), (order, chosen)


def test_a_first_page_reads_rows_of_those_files_only_that_may_hold_one_of_its_lines(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path / "trajectories", rows_per_file=10)
    for number in range(400):
        store.append(trajectory(f"t{number:03d}", number / 400, at=float(number)), number // 10, "trained")
    store.close()
    files = sorted((tmp_path / "trajectories").rglob("part-*.parquet"))
    assert len(files) == 40
    for file in files[:-2]:  # what is not a footer can no longer be read: every page has a checksum
        data = bytearray(file.read_bytes())
        body = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
        data[4:body] = bytes(byte ^ 0xFF for byte in data[4:body])
        file.write_bytes(data)
    reader = TrajectoryReader(tmp_path)
    newest = [f"t{number}" for number in range(399, 379, -1)]
    for order in ("newest", "best"):
        lines, total = reader.lines(TrajectoryChoice(), order)
        assert ([line["trajectory_id"] for line in lines], total) == (newest, 400)
    assert reader.lines(TrajectoryChoice(step=40))[1] == 10
    for chosen, order, most in ((TrajectoryChoice(), "worst", 20), (TrajectoryChoice(), "newest", 21)):
        with pytest.raises(ConfigError, match="cannot be read"):
            reader.lines(chosen, order, most=most)


def test_each_footer_is_read_once_and_not_kept_however_much_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A week's run has tens of thousands of files; a report asks four times, then for the trajectories that it found."""
    store = TrajectoryStore(tmp_path / "trajectories", rows_per_file=1)
    for number in range(20):
        store.append(trajectory(f"t{number:02d}", number / 20, at=number), number, "trained")
    store.close()
    read, footers = parquet.read_metadata, []

    def counted(file: Path) -> object:
        footer = read(file)
        footers.append(weakref.ref(footer))
        return footer

    monkeypatch.setattr(parquet, "read_metadata", counted)
    gc.disable()
    try:
        reader = TrajectoryReader(tmp_path)
        for order in ("newest", "best", "worst"):
            lines, _ = reader.lines(TrajectoryChoice(cause="trained"), order)
            reader.read(reader.find(lines[0]["trajectory_id"]))
        assert (len(footers), [one for one in footers if one() is not None]) == (20, [])
    finally:
        gc.enable()


def test_one_trajectory_and_its_group_are_read_from_those_files_only_that_may_hold_them(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path / "trajectories", rows_per_file=10)
    for number in range(100):
        store.append(trajectory(f"t{number:02d}", number / 100, at=number, group=f"g{number // 5:02d}"), 0, "trained")
    store.close()
    files = sorted((tmp_path / "trajectories").rglob("part-*.parquet"))
    assert [PartIndex(tmp_path / "trajectories").parts_with("trajectory_id", name) for name in ("t42", "t990")] == [
        [files[4]],
        [],
    ]
    for file in files:  # the group may be in any file whose footer says nothing
        if file != files[4]:
            table = parquet.read_table(file)
            parquet.write_table(table, file, write_statistics=file == files[0])
    assert PartIndex(tmp_path / "trajectories").parts_with("group_id", "g08") == files[1:]
    reader = TrajectoryReader(tmp_path)
    shown = reader.read(reader.find("t42"))
    assert [one["trajectory_id"] for one in shown.group] == ["t44", "t43", "t42", "t41", "t40"]


@pytest.mark.long
def test_a_first_page_of_100_000_trajectories_takes_two_seconds_and_500_mib(tmp_path: Path) -> None:
    """Of processor time, as other work does not count then; 1,000 files, each newer than the one before, of 100 rows."""
    store = TrajectoryStore(tmp_path / "trajectories")
    for number in range(100):
        store.append(trajectory(f"t{number:03d}", number / 100, at=float(number), turns=8), 0, "trained")
    store.close()
    (first,) = (tmp_path / "trajectories").rglob("part-*.parquet")
    table = parquet.read_table(first)
    for number in range(1, 1000):
        later = {
            "trajectory_id": pa.array([f"t{number}{row:02d}" for row in range(100)]),
            "group_id": pa.array([f"g{number}-{row // 8}" for row in range(100)]),
            "finished_at": pc.add(table["finished_at"], 100.0 * number),
        }
        copy = pa.table([later.get(name, table[name]) for name in table.column_names], schema=table.schema)
        parquet.write_table(copy, first.with_name(first.name.replace("part-", f"part-{number:04d}-")))
    (tmp_path / "config.json").write_text("{}")
    code = (
        "import resource, sys; from pathlib import Path; from orchestrator.cli import main\n"
        "if sys.argv[2] == 'newest': main(['show', sys.argv[1]])\n"
        "elif sys.argv[2].startswith('--'): main(['show', sys.argv[1], sys.argv[2]])\n"
        "else:\n"
        "    from orchestrator.observe.trajectory_reader import TrajectoryChoice, TrajectoryReader\n"
        "    print(TrajectoryReader(Path(sys.argv[1])).lines(TrajectoryChoice(), sys.argv[2])[1])\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM'))  # ru_maxrss has the parent's\n"
        "print(used.ru_utime + used.ru_stime, int(peak.split()[1]) / 1024)"
    )
    took = {}
    for order in ("newest", "best", "worst", "longest", "--best", "--worst"):
        asked = [sys.executable, "-c", code, str(tmp_path), order]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=300, check=True)
        assert re.match(r"t\d+  trained" if order.startswith("--") else r"100,?000\b", done.stdout)
        took[order] = tuple(map(float, done.stdout.splitlines()[-1].split()))
    print(took)
    assert [order for order, (seconds, mebibytes) in took.items() if seconds > 2 or mebibytes > 500] == [], took


def test_who_lists_trajectories_waits_for_no_library_of_configs_or_engines(run: Path) -> None:
    code = (
        "import sys; from orchestrator.cli import main; code = main(sys.argv[1:])\n"
        "heavy = {'pydantic', 'ray', 'torch', 'vllm', 'aiohttp', 'matplotlib', 'pandas'} & set(sys.modules)\n"
        "sys.exit(f'imported: {sorted(heavy)}' if heavy else code)"
    )
    asked = [sys.executable, "-c", code, "show", str(run)]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "5 trajectories of maze-001" in done.stdout


def test_a_trajectory_is_read_turn_by_turn_with_its_group_and_who_said_what(run: Path) -> None:
    reader = TrajectoryReader(run)
    shown = reader.read(reader.find("t2"))
    assert [turn.observation for turn in shown.turns] == ["hole left"] * 2
    assert [(span.text, span.version, span.tokens, span.logprob) for span in shown.turns[0].action] == [
        ("left \x1b[2J", 3, 2, -1.5),
        (" [red] <img src=x> <end>", 4, 3, pytest.approx(-0.5 / 3)),
    ]
    assert [(turn.worker, turn.waited) for turn in shown.turns] == [("vllm-1", 0.25), ("vllm-0", 0.5)]
    assert [turn.reward for turn in shown.turns] == [0.0, 0.25]
    assert [line["trajectory_id"] for line in shown.group] == ["t2", "t1"]
    assert (shown.line["step"], shown.prompt, shown.seed) == (1, "SFFH", 7)
    assert reader.read(reader.find("t4")).gap is None


def test_a_new_context_and_what_was_left_out_of_it_are_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    turn = Turn((1,), (2,), (-1.0,), ((0, 1),), context=ContextStart((1, 2, 3), "limit", 4, 90))
    store = TrajectoryStore(tmp_path / "trajectories")
    store.append(Trajectory("a", "g", "maze", Prompt("k", "maze", 1, ""), (turn,), 1.0, "1", 1, False), 0, "trained")
    store.close()
    reader = TrajectoryReader(tmp_path)
    assert reader.read(reader.find("a")).turns[0].context == "limit: 4 turns left out"
    assert (reader.read(reader.find("a")).turns[0].observation, reader.tokens.missing[:5]) == ("1", "there")


def test_characters_are_joined_and_a_tokenizer_of_others_decodes_its_own(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    characters, bytes_ = tmp_path / "characters", tmp_path / "bytes"
    for folder in (characters, bytes_):
        folder.mkdir()
    write_words(characters, ["<pad>", "<user>", *"\n abc"])
    assert TokenText([tmp_path, characters]).text((1, 4, 3, 5, 2, 99)) == "<user>a b\n[99]"
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer, made.decoder = tokenizers.pre_tokenizers.ByteLevel(False), tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(["the cat sat on the mat"] * 3, trainer)
    made.save(str(bytes_ / "tokenizer.json"))
    assert TokenText([bytes_]).text(made.encode("the cät").ids) == "the cät"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": {"type": "BPE"}}', "\xff"])
def test_a_tokenizer_that_cannot_be_read_leaves_the_ids(tmp_path: Path, text: str) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text(text, encoding="latin-1")
    tokens = TokenText([tmp_path])
    assert tokens.text((1, 2)) == "1 2"
    assert "tokenizer.json cannot be read" in tokens.missing


def test_a_text_of_any_length_is_cut_in_its_middle(tmp_path: Path) -> None:
    write_words(tmp_path, ["x", "y"])
    text = TokenText([tmp_path]).text([0] * 300_000 + [1])
    assert text.endswith("y")
    assert len(text) < 200_100
    assert "100,001 characters left out" in text


def test_the_command_lists_and_shows_and_nothing_that_was_said_steers_the_terminal(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*arguments: str) -> str:
        assert main(["show", str(run), *arguments]) == 0
        return capsys.readouterr().out

    assert "5 trajectories of maze-001" in said()
    assert [identity for identity in ("t1", "t2", "t3", "t4") if f"\n{identity} " in said("--step", "1")] == [
        "t1",
        "t2",
    ]
    best = said("--best")
    assert best.startswith("t2  trained")
    for words in (
        "left \N{REPLACEMENT CHARACTER}[2J [red] <img src=x> <end>",
        "waited 250 ms",
        "vllm-1",
        "group of 2: t2 1.00  t1 0",
    ):
        assert words.replace("\u202f", " ") in best.replace("\u202f", " "), words
    assert "\x1b" not in best
    assert said("--worst").startswith("t1 ")
    assert said("--failed").startswith("t4  failed: env_timeout")
    assert "t3" in said("--reward", "0.5:", "--task", "maze", "--cause", "trained")
    assert json.loads(said("t3", "--json"))["turns"][0]["observation"] == "hole left"
    assert json.loads(said("--json", "--most", "2"))["total"] == 5


def test_the_command_that_a_list_ends_with_can_be_typed_as_it_stands(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my runs").symlink_to(run)
    assert main(["show", str(tmp_path / "my runs")]) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1].partition("show one: rl-coserve ")[2])
    assert main(words) == 0
    assert capsys.readouterr().out.startswith(f"{words[-1]}  ")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["t9"], "'t9'"),
        (["--best", "--step", "77"], "no such trajectory"),
        (["--failed", "--step", "77"], "'step 77, failed': no such trajectory"),
        (["--reward", "high"], "not a range of rewards"),
        (["--most", "0"], "not a number of lines"),
        (["--best", "--worst"], "not allowed with"),
    ],
)
def test_what_is_not_there_is_one_error(
    run: Path, arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: int | str | None = main(["show", str(run), *arguments])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert error in capsys.readouterr().err


def test_an_id_that_is_nearly_right_names_the_right_one(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean t3"):
        TrajectoryReader(run).find("t33")


def test_the_pages_list_and_trajectory_need_the_token_and_say_what_was_wrong(run: Path) -> None:
    async def main() -> None:
        server = Server(Hub(run), TOKEN)
        await server.start()
        base = server.url.split("?")[0]
        try:
            async with aiohttp.ClientSession() as client:
                for path in ("trajectories", "trajectories.json", "trajectory.json?id=t2", "trajectories.js"):
                    assert (await client.get(base + path)).status == 401

            async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as client:
                assert "trajectories.js" in await (await client.get(f"{base}trajectories")).text()
                found = await (await client.get(f"{base}trajectories.json?order=best&least=0.5")).json()
                assert [line["trajectory_id"] for line in found["trajectories"]] == ["t2", "t5", "t3"]
                one = await (await client.get(f"{base}trajectory.json?id=t2")).json()
                assert one["turns"][1]["action"][0]["text"] == "left \x1b[2J"
                assert one["missing"] == ""
                for bad in ("step=x", "order=strange", "least=--", f"step={10**30}", f"first={'9' * 5000}"):
                    assert (await client.get(f"{base}trajectories.json?{bad}")).status == 400
                assert (await client.get(f"{base}trajectory.json?id=t9")).status == 404
        finally:
            await server.close()

    asyncio.run(main())


@pytest.mark.usefixtures("undrawn")
def test_the_report_shows_a_few_and_escapes_what_they_said(run: Path) -> None:
    page = write_report(run).read_text(encoding="utf-8")
    assert "The last that failed: t4" in page
    assert " [red] &lt;img src=x&gt;" in page
    assert "<img" not in page
