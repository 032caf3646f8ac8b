"""What a figure was measured on: the files it depends on, their hash, what changed since, and parts that agree."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from orchestrator.api import ConfigError
from orchestrator.sim.paper_setups import load_scenario
from orchestrator.sim.simulated_run import simulate
from scripts.bench import measured_sources
from scripts.bench.cells import Cells, check_agreement
from scripts.bench.measured_sources import ONLY_REAL, RESULTS, ROOT, changes_since, digest_of, page, sources_of

CLEAN = {"commit": "c", "clean": True, "sources": "one"}


def test_the_sources_of_a_figure_are_what_its_module_imports_and_the_engines_that_it_needs() -> None:
    routing, exact, learns = (set(map(str, sources_of(name))) for name in ("routing", "recompute-exact", "learns"))
    assert "orchestrator/policies/routing/turn_routing.py" in routing
    assert not [file for file in routing if file.startswith(("vllm_rlplugin", "orchestrator/sim"))]
    assert {"vllm_rlplugin/scheduler.py", "patches/vllm/kv_range.py"} <= exact
    assert "megatron_rlplugin/install.py" not in exact
    assert {"megatron_rlplugin/install.py", "orchestrator/pipeline.py", "vllm_rlplugin/scheduler.py"} <= learns
    assert sources_of("no-such-bench") == ()


def test_a_simulated_figure_depends_on_simulator_policies_its_workload_and_its_own_module_and_not_on_what_shows_it() -> (
    None
):
    modes, rotation = (set(map(str, sources_of(name))) for name in ("modes", "rotation"))
    assert {
        "orchestrator/sim/simulated_run.py",
        "orchestrator/policies/routing/turn_routing.py",
        "orchestrator/sim/scenarios/rollart.toml",
        "orchestrator/sim/coserving/served_azure_code.json.xz",
        "scripts/bench/papers/modes.py",
        "scripts/bench/papers/runner.py",
    } <= modes
    assert "scripts/bench/papers/lengths_smollm2.json.xz" in rotation
    elsewhere = (
        "vllm_rlplugin",
        "megatron_rlplugin",
        "patches",
        "csrc",
        "orchestrator/cli",
        "orchestrator/observe/view",
    )
    others = (
        "scripts/bench/result",
        "scripts/bench/cells",
        "scripts/bench/__init__",
        "scripts/bench/papers/calibration",
    )
    assert not [file for file in modes | rotation if file.startswith((*elsewhere, *others))]
    assert not {"orchestrator/sim/scenarios/rose.toml", "scripts/bench/papers/heddle.py"} & modes


@pytest.mark.slow
def test_no_simulated_run_enters_what_its_figures_are_said_not_to_depend_on() -> None:
    entered = set[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and f"{module}.".startswith(ONLY_REAL) and frame.f_code.co_name != "<module>":
            entered.add(f"{module}: {frame.f_code.co_name}")

    config = load_scenario(
        "rollart", ["run.steps=2", "rollout.placement.enabled=true", "rollout.prediction.enabled=true"], 32
    )
    sys.setprofile(note)
    try:
        simulate(config)
    finally:
        sys.setprofile(None)
    assert entered == set()


def test_a_hash_is_of_names_and_contents(tmp_path: Path) -> None:
    for name, text in (("a", "1"), ("b", "2")):
        (tmp_path / name).write_text(text)
    both = [Path("a"), Path("b")]
    first = digest_of(both, tmp_path)
    assert (len(first), digest_of([], tmp_path)) == (16, "")
    assert len({first, digest_of(both[:1], tmp_path), digest_of(both[::-1], tmp_path)}) == 3
    (tmp_path / "b").write_text("3")
    assert digest_of(both, tmp_path) != first


def test_lines_that_changed_since_a_commit_are_counted_and_a_move_is_none(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        own = ["-c", "user.name=n", "-c", "user.email=e"]
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *own, *arguments], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    git("init", "-q")
    for name in ("stays", "moves", "changes"):
        (tmp_path / name).write_text("".join(f"{name} {number}\n" for number in range(20)))
    git("add", ".")
    git("commit", "-qm", "first")
    first = git("rev-parse", "HEAD")
    git("mv", "moves", "moved")
    (tmp_path / "changes").write_text((tmp_path / "changes").read_text().replace("changes 7\n", "another\nand one\n"))
    git("commit", "-qam", "second")
    assert changes_since(first, tmp_path) == {"changes": 3, "moved": 0}
    assert changes_since("0" * 40, tmp_path) is None


def test_parts_are_measured_once_and_put_together_only_where_their_sources_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: dict[str, Any] = dict(CLEAN)
    monkeypatch.setattr("scripts.bench.cells.source", lambda name: said)
    cells = Cells(tmp_path / "parts", "x", "recipe")
    assert (cells.has("a"), cells.found()) == (False, [])
    cells.keep("a", {"seconds": 1})
    cells.keep("b", [2])
    assert (cells.has("a"), cells.has("c"), cells.found()) == (True, False, [{"seconds": 1}, [2]])
    assert Cells(tmp_path / "parts", "x", "other").found() == []
    said = {**CLEAN, "sources": "two"}
    with pytest.raises(ConfigError, match="changed while it was measured"):
        cells.keep("c", 3)
    assert not cells.has("c")
    cells = Cells(tmp_path / "parts", "x", "recipe")
    with pytest.raises(ConfigError, match=r"kept-recipe-a.*other sources than the tree as it is"):
        cells.check_current()
    cells.keep("c", 3)
    with pytest.raises(ConfigError, match=r"kept-recipe-c\.json.*other sources than kept-recipe-a\.json"):
        cells.found()
    said = {**CLEAN, "clean": False}
    Cells(tmp_path / "parts", "x", "recipe").keep("c", 3)
    with pytest.raises(ConfigError, match="tree with changes"):
        cells.found()


def parts(found: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Each part of a result that says what it was measured on."""
    if isinstance(found, dict):
        if path and isinstance(found.get("source"), dict) and "sources" in found["source"]:
            yield path, found["source"]
        for name, value in found.items():
            yield from parts(value, f"{path}/{name}")
    elif isinstance(found, list):
        for place, value in enumerate(found):
            yield from parts(value, f"{path}/{place}")


@pytest.mark.parametrize("file", sorted((ROOT / RESULTS).glob("*.json")), ids=lambda file: file.stem)
def test_all_parts_of_a_committed_figure_agree(file: Path) -> None:
    check_agreement(dict(parts(json.loads(file.read_text(encoding="utf-8")))))


def test_parts_that_do_not_agree_would_be_noticed() -> None:
    found = {"source": {}, "detail": {"runs": [{"source": CLEAN}, {"source": {**CLEAN, "sources": "two"}}]}}
    with pytest.raises(ConfigError, match="other sources"):
        check_agreement(dict(parts(found)))


def test_a_committed_figure_is_of_the_commit_that_it_says_or_of_that_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / RESULTS).mkdir(parents=True)
    now = digest_of(sources_of("routing"))
    for name, source in (("told", {"commit": "t", "clean": True, "sources": now}), ("untold", None)):
        (tmp_path / RESULTS / f"{name}.json").write_text(json.dumps({"name": "routing", "source": source}))
    monkeypatch.setattr(measured_sources, "_git", lambda *_: "f")
    monkeypatch.setattr(measured_sources, "changes_since", lambda *_: {str(sources_of("routing")[0]): 5, "other": 7})
    monkeypatch.setattr(measured_sources, "digest_of", lambda files, root: digest_of(files))
    told, untold = measured_sources.ages(tmp_path)
    assert told == ("told", "t", True, True, True, 1, 5)
    assert untold == ("untold", "f", False, None, None, 1, 5)


def test_the_page_of_what_was_measured_on_what_is_that_of_the_files() -> None:
    said = (ROOT / RESULTS / "measured_on.md").read_text(encoding="utf-8")
    known = dict(re.findall(r"^\| \[([\w-]+)\].*\| ([0-9a-f]{8}), of its file \|", said, re.M))
    missing = {file.stem: "a new file" for file in (ROOT / RESULTS).glob("*.json")}
    assert said == page(known=missing | known), "python -m scripts.bench.measured_sources --page"
