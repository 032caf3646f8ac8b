"""The report and the summary: what they promise about any run folder, damaged, resumed, broken or compared."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from orchestrator import cli
from orchestrator.api import ConfigError, RunError
from orchestrator.cli import main
from orchestrator.observe.report import page_text, run_log
from orchestrator.observe.report.report_page import write_report
from orchestrator.observe.report.run_log import load_run
from orchestrator.observe.report.summary import summarize
from orchestrator.observe.report.timeline import LANES, clip, per_step, shares, typical_window
from tests.support import report_runs as runs

ROOT = Path(__file__).parents[2]


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    folder: Path = runs.write_run(tmp_path / "frozenlake-001", steps=40)
    return folder


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a finished run: tests that only read it share it."""
    return write_report(runs.write_run(tmp_path_factory.mktemp("drawn") / "frozenlake-001", steps=40))


def read_document(file: Path) -> ElementTree.Element:
    """The page as a tree: parsing fails unless every element is closed and every text escaped."""
    shown = file.read_text(encoding="utf-8")
    assert shown.startswith("<!DOCTYPE html>")
    return ElementTree.fromstring(shown.split("\n", 1)[1])


def words(element: ElementTree.Element) -> str:
    return " ".join("".join(element.itertext()).replace("\u202f", " ").split())


def edit_events(folder: Path, change: Any) -> None:
    file = folder / "events.jsonl"
    events = [json.loads(line) for line in file.read_text().splitlines()]
    kept = [event for event in events if change(event) is not False]
    file.write_text("".join(json.dumps(event, sort_keys=True) + "\n" for event in kept))


# -- the page ----------------------------------------------------------------------------------------------------------


def test_a_report_needs_no_library_that_its_extra_lacks(finished: Path) -> None:
    runs.write_trajectories(finished, {"trained": 2, "failed: env_timeout": 1})
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {name: {re.split(r"[\[><=]", one)[0] for one in extras[name]} for name in ("orchestrator", "report")}
    modules = {word.replace("-", "_") for word in named["orchestrator"] - named["report"]}
    assert {"ray", "aiohttp"} <= modules
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({sorted(modules)!r}))\n"
        "from orchestrator.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    for words in ([], ["--json"]):
        asked = [sys.executable, "-c", code, "report", str(finished), *words]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stderr) == (0, "")
    assert "What did the agent say?" in (finished / "report.html").read_text(encoding="utf-8")


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_ended_before_its_last_step_says_why(finished: Path) -> None:
    def plan(event: dict[str, Any]) -> None:
        if event["kind"] == "run_start":
            event["steps"] = 80

    assert load_run(finished).ended_early == ""
    edit_events(finished, plan)
    assert load_run(finished).ended_early == ""
    config = json.loads((finished / "config.json").read_text())
    config["run"]["minutes"] = 0.05
    (finished / "config.json").write_text(json.dumps(config))
    assert "ended early: its time was over, run.minutes = 0.05" in words(read_document(write_report(finished)))
    config["run"]["minutes"] = 1000
    (finished / "config.json").write_text(json.dumps(config))
    with (finished / "events.jsonl").open("a") as log:
        log.write('{"kind":"alarm","t":1.0,"what":"signal","detail":"3 % of the groups"}\n')
    assert "ended early: its groups had next to nothing to teach" in words(read_document(write_report(finished)))


@pytest.mark.slow
def test_the_page_is_well_formed_and_says_what_happened(drawn: Path) -> None:
    page = read_document(drawn)
    shown = words(page)
    for heading in (
        "Did it learn?",
        "Who waited for whom?",
        "How stale was the data?",
        "How fast was it?",
        "Is the trainer healthy?",
        "Where did every trajectory go?",
        "What went wrong?",
        "What did it run on?",
    ):
        assert heading in shown
    assert "intervals do not overlap" in shown
    assert "environment_timeout" in shown
    assert "Synthetic CPU" in shown


class Strict(HTMLParser):
    """Collects what a browser would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [
            value or "" for name, value in attrs if name in ("href", "src", "srcset", "xlink:href", "action")
        ]
        assert not any(name.startswith("on") for name, _ in attrs)


@pytest.mark.parametrize("compared", [False, True])
def test_the_page_requests_nothing_and_runs_nothing(drawn: Path, tmp_path: Path, compared: bool) -> None:
    other = runs.write_run(tmp_path / "frozenlake-002", steps=12, seed=3)
    shown = (write_report([other, drawn.parent]) if compared else drawn).read_text(encoding="utf-8")
    parser = Strict()
    parser.feed(shown)
    assert not {"script", "link", "iframe", "img", "object", "embed", "base", "form"} & set(parser.tags)
    assert all(link.startswith("#") for link in parser.links)
    assert "http:" not in shown
    assert "https:" not in shown
    assert "//" not in re.sub(r"/\*.*?\*/", "", shown, flags=re.S)
    assert "@import" not in shown
    assert all(target.startswith("url(#") for target in re.findall(r"url\([^)]*", shown))


def test_links_within_the_page_and_patterns_have_their_targets(drawn: Path) -> None:
    shown = drawn.read_text(encoding="utf-8")
    identities = re.findall(r'\bid="([^"]+)"', shown)
    assert len(identities) == len(set(identities))
    for target in re.findall(r'href="#([^"]+)"', shown) + re.findall(r"url\(#([^)]+)\)", shown):
        assert target in identities


@pytest.mark.parametrize("simulated", [False, True])
def test_every_figure_card_and_table_says_real_or_simulated(drawn: Path, tmp_path: Path, simulated: bool) -> None:
    if simulated:
        drawn = write_report(runs.write_run(tmp_path / "run-001", steps=20, simulated=True))
    page = read_document(drawn)
    kind, other = ("simulated", "real") if simulated else ("real", "simulated")
    figures = page.findall(".//figure") + [item for item in page.iter("div") if "card" in item.get("class", "").split()]
    assert len(figures) > 15
    assert {figure.get("data-kind") for figure in figures} == {kind}
    assert [item.text for item in page.iter("span") if "badge" in item.get("class", "")] == [kind]  # once, at the top
    captions = [words(caption) for caption in page.iter("caption")]
    assert captions
    assert all(f"({kind}" in caption and f"({other}" not in caption for caption in captions)


def test_what_a_mark_says_is_also_there_for_keyboard_and_touch(drawn: Path) -> None:
    page = read_document(drawn)
    parents = {child: parent for parent in page.iter() for child in parent}
    drawings = [svg for svg in page.iter("svg") if svg.findall(".//rect[@class='hit']")]
    assert len(drawings) > 5
    for svg in drawings:
        around = list(parents[svg])
        values = around[around.index(svg) + 1]
        assert (values.tag, values.get("class")) == ("details", "values")
        said = [hit.findtext("title") for hit in svg.findall(".//rect[@class='hit']")]
        assert [item.text for item in values.iter("li")] == said


def test_a_report_of_a_machine_without_a_gpu_speaks_of_none(drawn: Path) -> None:
    assert "GPU" not in words(read_document(drawn)).partition("[cost]")[0]


def test_every_drawing_has_a_title_and_a_label_for_screen_readers(drawn: Path) -> None:
    drawings = list(read_document(drawn).iter("svg"))
    assert len(drawings) > 15
    for drawing in drawings:
        assert drawing.get("role") == "img"
        assert len(drawing.get("aria-label", "")) > 10
        assert drawing[0].tag == "title"


@pytest.mark.slow
def test_the_same_folder_gives_the_same_bytes(drawn: Path) -> None:
    before = drawn.read_bytes()
    assert write_report(drawn.parent).read_bytes() == before


def test_what_a_run_says_cannot_become_markup(tmp_path: Path) -> None:
    run = runs.SyntheticRun(tmp_path / "run-001", steps=6)
    run.name = "<script>alert(1)</script>"
    run.start()
    run.loop(0, 6)
    run.emit("fault", what="worker <b>", cause="x", detail='"><img src=x onerror=alert(1)>')
    run.trajectories(1, "failed", cause="<i>&amp;")
    run.finish("failed", "the trainer said </main>")
    shown = write_report(run.write()).read_text(encoding="utf-8")
    assert "<script" not in shown
    assert "<img" not in shown
    assert "&lt;script&gt;" in shown
    assert "&lt;i&gt;&amp;amp;" in shown
    assert shown.count("</main>") == 1


def test_a_drawing_is_coloured_by_the_page_in_light_and_dark(drawn: Path) -> None:
    page = drawn.read_text(encoding="utf-8")
    drawings = "".join(re.findall(r"<svg.*?</svg>", page, re.S))
    assert set(re.findall(r"var\(--([\w-]+)\)", drawings)) <= set(re.findall(r"--([\w-]+):", page))
    assert re.findall(r"#[0-9a-f]{6}", drawings) == []


@pytest.mark.slow
def test_a_long_run_stays_a_small_file(tmp_path: Path) -> None:
    folder = runs.write_run(tmp_path / "run-001", steps=1500, batch=2)
    assert write_report(folder).stat().st_size < 1_500_000


# -- the ledger --------------------------------------------------------------------------------------------------------


def test_a_ledger_that_closes_is_said_to_close(drawn: Path) -> None:
    shown = words(read_document(drawn))
    assert "the sum closes" in shown
    assert "does not close" not in shown


@pytest.mark.usefixtures("undrawn")
def test_a_lost_trajectory_is_shown_as_broken(finished: Path) -> None:
    def lose_one(event: dict[str, Any]) -> None:
        if event["kind"] == "run_end":
            event["ledger"]["trained"] -= 1

    edit_events(finished, lose_one)
    shown = words(read_document(write_report(finished)))
    assert "The ledger does not close. 1 trajectory unaccounted for" in shown
    assert "the sum does not close" in shown
    assert "off by 1" in shown
    assert "the sum closes" not in shown


@pytest.mark.usefixtures("undrawn")
def test_a_journal_that_counts_otherwise_is_shown(finished: Path) -> None:
    lines = (finished / "ledger.jsonl").read_text().splitlines()
    (finished / "ledger.jsonl").write_text("\n".join(lines[:-1]) + "\n")  # the last one's end is missing
    table = next(item for item in read_document(write_report(finished)).iter("table") if "Journal" in words(item))
    assert len([item for item in table.iter("span") if item.get("class") == "broken"]) == 2  # its end, and in flight


@pytest.mark.usefixtures("undrawn")
def test_the_rows_in_parquet_stand_beside_the_ledger(finished: Path) -> None:
    runs.write_trajectories(finished, {"trained": 7, "failed: environment_timeout": 2, "failed: reward_unavailable": 1})
    shown = words(read_document(write_report(finished)))
    assert "Rows in Parquet" in shown
    rows = [[words(cell) for cell in row] for row in read_document(finished / "report.html").iter("tr")]
    assert [row[-1] for row in rows if row[0] in ("trained", "failed", "Started")] == ["7 ✗", "3", "10"]


# -- the summary -------------------------------------------------------------------------------------------------------


def test_the_summary_has_exactly_its_keys(finished: Path) -> None:
    summary = summarize(finished)
    assert set(summary) == {
        "name", "kind", "mode", "alpha", "steps", "status", "success_before_warmup", "success_start", "success_end",
        "success_intervals", "success_curve", "evaluations", "tokens_per_s", "streamed", "seconds", "staleness", "rounds",
        "borrowed", "serving", "analysis", "ledger", "machine", "versions",
    }  # fmt: skip
    assert set(summary["success_intervals"]["success_end"]) == {"low", "high", "prompts"}
    assert summary["success_curve"][-1][1] == summary["success_end"]
    assert set(summary["ledger"]) == {
        "started", "trained", "evicted_stale", "aborted_redundant", "deferred", "filtered", "failed", "in_flight",
        "rolled_back", "failed_by_cause", "ended_by_cause",
    }  # fmt: skip
    assert (summary["name"], summary["kind"], summary["mode"], summary["alpha"]) == (
        "frozenlake-001",
        "real",
        "async",
        1,
    )
    assert (summary["steps"], summary["status"]) == (40, "completed")
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def test_the_summary_is_what_the_events_say(finished: Path) -> None:
    events = [json.loads(line) for line in (finished / "events.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["kind"] == "step"]
    first = next(event["start"] for event in events if event.get("stage") == "get_batch")
    summary = summarize(finished)
    seconds = steps[-1]["t"] - first
    assert summary["tokens_per_s"] == pytest.approx(sum(step["tokens"] for step in steps) / seconds, abs=1e-3)
    lags = {lag: sum(step["lag"].get(lag, 0) for step in steps) for lag in ("0", "1")}
    assert summary["staleness"]["lag"] == lags
    assert summary["staleness"]["max"] == 1
    assert summary["staleness"]["mean"] == pytest.approx(lags["1"] / sum(lags.values()), abs=1e-6)
    assert sum(summary["ledger"]["failed_by_cause"].values()) == summary["ledger"]["failed"]


@pytest.mark.usefixtures("undrawn")
def test_success_at_the_end_counts_only_when_no_step_follows(finished: Path) -> None:
    edit_events(finished, lambda event: not (event["kind"] == "evaluation" and event["phase"] == "end"))
    summary = summarize(finished)
    assert summary["success_end"] is None
    assert summary["success_intervals"]["success_start"]["prompts"] == 300
    assert "the last evaluation" in words(read_document(write_report(finished)))


@pytest.mark.usefixtures("undrawn")
def test_several_samples_of_a_prompt_are_told(finished: Path) -> None:
    lines = [json.loads(line) for line in (finished / "events.jsonl").read_text().splitlines()]
    more = {
        "samples": 8,
        "solved": 0.75,
        "reward": 0.3125,
        "tokens": 42.0,
        "truncated": 0.125,
        "tasks": {"nim": 0.5, "sums": 1.0},
    }
    lines = [line | more if line["kind"] == "evaluation" else line for line in lines]
    (finished / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = words(read_document(write_report(finished)))
    assert "8 sampled episodes of each prompt" in found
    assert (
        "42.0 generated tokens, and 12.5 % ran into a limit; the mean reward is 0.312; 75.0 % of the prompts" in found
    )
    assert "by task: nim 50.0 %, sums 100.0 %." in found
    assert summarize(finished)["evaluations"][-1]["tasks"] == {"nim": 0.5, "sums": 1.0}


# -- damaged and unfinished folders ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("undrawn")
def test_a_half_written_last_line_is_left_out_and_said(finished: Path) -> None:
    file = finished / "events.jsonl"
    lines = file.read_text().splitlines()
    whole = next(index for index, line in enumerate(lines) if '"step": 30' in line and '"kind": "step"' in line)
    file.write_text("\n".join(lines[:whole]) + "\n" + lines[whole][:57])
    summary = summarize(finished)
    assert (summary["steps"], summary["status"]) == (30, "unfinished")
    shown = words(read_document(write_report(finished)))
    assert "1 line of the event log could not be read" in shown
    assert "did not say that it ended" in shown


def test_a_line_cut_in_a_byte_of_a_character_is_left_out_too(finished: Path) -> None:
    with (finished / "events.jsonl").open("ab") as stream:
        stream.write('{"kind":"fault","what":"größe'.encode()[:-4])
    assert load_run(finished).unreadable == 1


def test_the_ledger_of_a_killed_run_is_recounted_from_its_journal(finished: Path) -> None:
    edit_events(finished, lambda event: event["kind"] != "run_end")
    ended = summarize(finished)["ledger"]
    assert ended["started"] == sum(ended[state] for state in runs.ENDS) + ended["in_flight"]
    journal = [json.loads(line) for line in (finished / "ledger.jsonl").read_text().splitlines()]
    assert ended["started"] == len({record["id"] for record in journal})


def test_the_end_of_a_run_reads_its_log_once_and_its_journal_a_line_at_a_time(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read: list[Path] = []
    monkeypatch.setattr(run_log, "check_format", read.append)
    reading = Path.read_text

    def refuse(path: Path, *given: Any, **named: Any) -> str:
        assert path.suffix != ".jsonl", f"{path.name} is read whole"
        return reading(path, *given, **named)

    monkeypatch.setattr(Path, "read_text", refuse)
    cli._say_report(finished)
    assert read == [finished]
    assert (finished / "report.html").is_file()
    assert json.loads((finished / "summary.json").read_bytes())["status"] == "completed"
    assert "report: " in capsys.readouterr().out


def test_the_figures_of_a_run_that_has_ended_need_no_journal(finished: Path) -> None:
    (finished / "ledger.jsonl").write_text('{"no": "record"}\n')
    assert summarize(finished)["status"] == "completed"
    with pytest.raises(ConfigError, match="is damaged"):
        write_report(finished)


def test_a_folder_that_is_no_run_is_a_config_error(tmp_path: Path) -> None:
    for call in (summarize, write_report):
        with pytest.raises(ConfigError, match="not a run folder"):
            call(tmp_path)
        with pytest.raises(ConfigError, match="not a run folder"):
            call(tmp_path / "missing")


def test_a_damaged_config_is_a_config_error(finished: Path) -> None:
    (finished / "config.json").write_text('{"run": ')
    with pytest.raises(ConfigError, match="is damaged"):
        summarize(finished)


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_failed_before_its_first_event_still_has_a_report(tmp_path: Path) -> None:
    folder = tmp_path / "run-001"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert "run-001" in words(read_document(write_report(folder)))
    summary = summarize(folder)
    assert (summary["status"], summary["steps"], summary["tokens_per_s"]) == ("unfinished", 0, None)


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_failed_in_startup_says_why(tmp_path: Path) -> None:
    run = runs.SyntheticRun(tmp_path / "run-001")
    run.start()
    run.emit("run_end", status="failed", reason="the relay did not start", ledger=run.ledger())
    shown = words(read_document(write_report(run.write())))
    assert "The run failed. the relay did not start" in shown


@pytest.mark.slow
def test_values_that_are_not_finite_interrupt_a_line_and_nothing_else(finished: Path) -> None:
    def spoil(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] in (3, 7):
            event["metrics"].update(loss=float("nan"), grad_norm=float("inf"))
        if event["kind"] == "step" and event["step"] == 9:
            del event["metrics"]["entropy"]

    edit_events(finished, spoil)
    shown = write_report(finished).read_text(encoding="utf-8")
    assert "step 4: nan" in shown
    assert not re.search(r'(?:d|x|y|points|height|width)="[^"]*(?:nan|inf)', shown)


@pytest.mark.usefixtures("undrawn")
def test_health_says_how_many_steps_taught_nothing(finished: Path) -> None:
    def change(event: dict[str, Any]) -> None:
        if event["kind"] == "step":
            late = event["step"] >= 20
            event["metrics"] |= {"groups_silent_share": 0.25 + 0.7 * late, **({"grad_norm": 0.0} if late else {})}

    assert "had a gradient of 0" not in words(read_document(write_report(finished)))
    edit_events(finished, change)
    shown = words(read_document(write_report(finished)))
    assert "20 steps of 40 had a gradient of 0." in shown
    assert "75.0 % in the first half, 5.0 % in the second" in shown


@pytest.mark.usefixtures("undrawn")
def test_a_gap_measured_on_no_token_is_no_gap_of_zero(finished: Path) -> None:
    def unmeasured(event: dict[str, Any]) -> None:
        if event["kind"] == "step":
            event["metrics"]["logprob_gap_tokens"] = 100.0 if event["step"] == 2 else 0.0

    edit_events(finished, unmeasured)
    assert "measured in 1 of 40 steps" in words(read_document(write_report(finished)))


# -- a resume ----------------------------------------------------------------------------------------------------------


def resumed_run(folder: Path) -> Path:
    """Killed after 20 steps, resumed from the checkpoint of 18."""
    run = runs.SyntheticRun(folder, steps=30)
    run.start()
    run.loop(0, 20)
    run.counts["trained"] -= 2 * run.batch  # rolled back, and back in the buffer: trained again below
    run.counts["started"] -= 2 * run.batch
    run.counts["rolled_back"] += 2 * run.batch
    run.start(resumed_from=18)
    run.loop(18, 30)
    run.finish()
    run.journal.clear()
    path: Path = run.write()
    (path / "ledger.jsonl").unlink()
    return path


@pytest.mark.usefixtures("undrawn")
def test_steps_after_the_checkpoint_of_a_resume_count_once(tmp_path: Path) -> None:
    folder = resumed_run(tmp_path / "run-001")
    run = load_run(folder)
    assert [step.number for step in run.steps] == list(range(1, 31))
    assert all(step.period > 0 for step in run.steps)
    assert max(step.period for step in run.steps) < 30  # the second startup is no step's time
    assert summarize(folder)["steps"] == 30
    shown = words(read_document(write_report(folder)))
    assert "resumed once" in shown
    assert "128 trajectories were trained after the checkpoint" in shown
    assert "the sum closes" in shown


# -- who waited for whom -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "alpha"), [("sync", 0), ("async", 1)])
def test_the_pieces_of_a_lane_never_overlap_and_cover_the_run(tmp_path: Path, mode: str, alpha: int) -> None:
    run = load_run(runs.write_run(tmp_path / "run-001", steps=25, mode=mode, alpha=alpha))
    pieces = run.lanes()
    for lane in LANES:
        assert all(piece.seconds > 0 for piece in pieces[lane])
        assert all(a.end <= b.start for a, b in zip(pieces[lane], pieces[lane][1:], strict=False))
    first = next(stage.start for stage in run.stages if stage.name == "get_batch")
    for lane in ("rollout", "trainer"):
        span = pieces[lane][-1].end - pieces[lane][0].start
        assert pieces[lane][0].start == pytest.approx(first)
        assert sum(shares(pieces[lane]).values()) == pytest.approx(span)


def test_the_trainers_time_is_what_its_stages_took(tmp_path: Path) -> None:
    run = load_run(runs.write_run(tmp_path / "run-001", steps=25))
    trained = sum(stage.seconds for stage in run.stages if stage.name == "train_step")
    assert shares(run.lanes()["trainer"])["train"] == pytest.approx(trained, abs=1e-3)


def test_sync_rollout_waits_for_the_trainer_and_async_does_not(tmp_path: Path) -> None:
    sync = shares(load_run(runs.write_run(tmp_path / "a-001", steps=20, mode="sync", alpha=0)).lanes()["rollout"])
    overlapped = shares(load_run(runs.write_run(tmp_path / "b-001", steps=20)).lanes()["rollout"])
    assert sync["wait_training"] / sum(sync.values()) > 0.25
    assert overlapped.get("wait_training", 0.0) / sum(overlapped.values()) < 0.1


def test_the_window_is_of_typical_steps(tmp_path: Path) -> None:
    run = load_run(runs.write_run(tmp_path / "run-001", steps=40))
    window = typical_window(run.steps)
    assert window is not None
    assert window.last - window.first == 3
    assert not window.first <= 18 <= window.last  # the step with the dead worker
    assert clip(run.lanes()["trainer"], window.start, window.end)


def test_each_steps_time_is_accounted_for(tmp_path: Path) -> None:
    run = load_run(runs.write_run(tmp_path / "run-001", steps=20))
    for step, totals in per_step(run.steps, run.lanes()["trainer"]):
        assert sum(totals.values()) == pytest.approx(step.period, abs=1e-3)


# -- comparison --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("undrawn")
def test_a_comparison_lies_beside_the_runs_and_shows_each(tmp_path: Path) -> None:
    folders = [
        runs.write_run(tmp_path / "sync-001", steps=12, mode="sync", alpha=0),
        runs.write_run(tmp_path / "async-001", steps=12),
    ]
    page = write_report(folders)
    assert page == (tmp_path / "compare-sync-001-async-001.html").resolve()
    shown = words(read_document(page))
    assert "2 runs compared" in shown
    assert "sync-001" in shown
    assert "async-001" in shown


def test_a_comparison_warns_of_what_does_not_compare(tmp_path: Path) -> None:
    real = runs.write_run(tmp_path / "real-001", steps=12)
    simulated = runs.write_run(tmp_path / "sim-001", steps=12, simulated=True)
    (simulated / "environment.json").write_text('{"machine": {"cpu": "another"}, "versions": {}}')
    edit_events(simulated, lambda event: event["kind"] != "run_end")
    page = read_document(write_report([real, simulated]))
    shown = words(page)
    assert "Real and simulated runs are mixed" in shown
    assert "The machines differ" in shown
    assert "Not every run completed: sim-001" in shown
    badges = {
        item.text for figure in page.iter("figure") for item in figure.iter("span") if "badge" in str(item.attrib)
    }
    assert badges == {"real and simulated"}


@pytest.mark.usefixtures("undrawn")
def test_a_comparison_of_one_is_its_report(finished: Path) -> None:
    assert write_report([finished]) == finished.resolve() / "report.html"


def test_many_runs_have_distinct_styles_and_a_short_file_name(tmp_path: Path) -> None:
    folders = [runs.write_run(tmp_path / f"run-{index:03d}", steps=6, seed=index) for index in range(8)]
    page = write_report(folders)
    assert page.name == "compare-run-000-and-7-others.html"
    first = next(read_document(page).iter("svg"))
    lines = [path.get("style", "") for path in first.iter("path") if "stroke-width: 2.4" in path.get("style", "")]
    looks = {(re.findall(r"stroke: var\(--(\w+)\)", style)[0], "dasharray" in style) for style in lines}
    assert len(looks) == 8


# -- numbers in words --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (page_text.percent(0.8934), "89.3 %"),
        (page_text.percent(0.0), "0.0 %"),
        (page_text.percent(2 / 15_000), "below 0.1 %"),
        (page_text.duration(0.0123), "12 ms"),
        (page_text.duration(0.000001), "below 0.1 ms"),
        (page_text.duration(4.6321), "4.63 s"),
        (page_text.duration(59.96), "60 s"),
        (page_text.duration(351), "5 min 51 s"),
        (page_text.duration(7260), "2 h 1 min"),
        (page_text.significant(0.02), "0.0200"),
        (page_text.significant(1.49e-7), "1.49e-7"),
        (page_text.significant(12345.6), "12,346"),
        (page_text.data_size(2_310_144), "2.20 MiB"),
        (page_text.plural(1, "trajectory", "trajectories"), "1 trajectory"),
        (page_text.plural(3, "trajectory", "trajectories"), "3 trajectories"),
    ],
)
def test_numbers_read_well(made: str, expected: str) -> None:
    assert made.replace(page_text.THIN, " ") == expected


@pytest.mark.parametrize("ends", ["completed", "a part failed"])
def test_a_report_that_cannot_be_written_hides_no_runs_end(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from orchestrator.observe.report import report_page
    from orchestrator.runtime import real_run

    async def train(*_: Any) -> str:
        if ends != "completed":
            raise RunError(ends)
        return ends

    def full(_: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the run's handler is not for the tests that follow
    monkeypatch.setattr(real_run, "train", train)
    monkeypatch.setattr(real_run, "start_ray", lambda config: None)
    monkeypatch.setattr(report_page, "write_report", full)
    code = main(["train", "examples/frozenlake.toml", f'run.folder="{tmp_path}"'])
    printed = capsys.readouterr()
    assert code == (0 if ends == "completed" else 1)
    assert "no report could be written ([Errno 28] No space left on device); try: rl-coserve report" in printed.out
    assert (ends in printed.err) is (ends != "completed")
