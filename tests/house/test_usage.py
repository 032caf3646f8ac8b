"""What a stranger types first: help with examples that are taken, a model out of nothing, one clear error for a slip."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator import cli
from orchestrator.cli import _parser, _steps_told, main
from orchestrator.config import load_config
from orchestrator.ops.help_text import USAGE
from orchestrator.sim.simulated_run import simulate
from orchestrator.sim.twins import SimDisplay
from vllm_rlplugin.kvpool.engine import pool_engine as pools
from vllm_rlplugin.kvpool.serving import pool_lending

ROOT = Path(__file__).parents[2]
COMMANDS = next(action.choices for action in _parser()._actions if action.choices)


def test_every_command_is_explained() -> None:
    assert set(USAGE) == set(COMMANDS)


@pytest.mark.parametrize("name", USAGE)
def test_the_help_of_a_command_has_examples_that_are_taken_and_a_page_that_exists(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert (ROOT / "docs" / USAGE[name].page).is_file()
    assert f"docs/{USAGE[name].page}" in said
    for example in USAGE[name].examples:
        assert f"  rl-coserve {example}\n" in said
        assert example.split()[0] == name
        _parser().parse_args(example.split())


@pytest.mark.parametrize("name", USAGE)
def test_every_option_and_argument_says_what_it_is(name: str) -> None:
    silent = [action.dest for action in COMMANDS[name]._actions if not action.help]
    assert silent == []


def test_a_first_word_with_an_equals_sign_is_an_override_of_the_default_config(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_placed", lambda config: [])
    monkeypatch.setattr(cli, "_about", lambda config: "nothing")
    assert main(["train", "run.seed=7", "run.steps=3", "--dry-run"]) == 0
    found = json.loads(capsys.readouterr().out)["run"]
    assert (found["seed"], found["steps"]) == (7, 3)


def test_a_model_is_written_that_has_the_tasks_words_and_the_configs_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(cli, "_placed", lambda config: [])
    monkeypatch.setattr(cli, "_about", lambda config: "nothing")
    folder = tmp_path / "model"
    assert main(["model", str(folder), str(ROOT / "examples/frozenlake.toml"), "model.hidden_size=96"]) == 0
    assert capsys.readouterr().out == f"model: {folder}\n"
    shape = json.loads((folder / "config.json").read_text())
    words = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert (shape["hidden_size"], shape["vocab_size"]) == (96, len(words))
    assert main(["train", str(ROOT / "examples/frozenlake.toml"), f"model.path={folder}", "--dry-run"]) == 0
    again = tmp_path / "again"
    assert main(["model", str(again), str(ROOT / "examples/frozenlake.toml"), "model.hidden_size=96"]) == 0
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("{used}",), "already exists"),
        (("/proc/nothing",), "cannot be written"),
        (("{new}", "model.path=/x"), "this config names a model"),
        (("{new}", "model.dtype='float16'"), "model.dtype"),
    ],
)
def test_a_model_that_cannot_be_written_is_one_error(
    more: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    words = [word.format(used=tmp_path / "used", new=tmp_path / "new") for word in more]
    assert main(["model", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_pool_that_is_not_there_is_told_with_those_that_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pools, "_FOLDER", tmp_path)
    assert main(["lend", "--pool", "gpu1", "--status"]) == 2
    assert "you have none" in capsys.readouterr().err
    pools.pool_path("gpu0").touch()
    assert main(["reclaim", "--pool", "gpu1"]) == 2
    assert "yours are: gpu0" in capsys.readouterr().err


def test_no_run_yet_is_told_apart_from_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report"]) == 2
    assert "there is no run here yet: start one with `rl-coserve train CONFIG`" in capsys.readouterr().err
    assert main(["report", "other"]) == 2
    assert "there is no folder `runs` here" in capsys.readouterr().err
    (tmp_path / "runs").mkdir()
    assert main(["report", "other"]) == 2
    assert "see `ls runs`" in capsys.readouterr().err


def test_a_list_that_is_none_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["profile", "--tp", "x"])
    assert ended.value.code == 2
    assert "write 1,2,4" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("train", "--dry-run"), ("doctor", "--quick")], ids=["long", "short"])
def test_output_that_nobody_reads_any_more_is_no_traceback(words: tuple[str, ...]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "orchestrator.cli", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    said = process.stderr.read().decode()
    process.stderr.close()
    assert (process.wait(timeout=60), "Traceback" in said, "BrokenPipe" in said) == (0, False, False)


def test_a_task_beside_the_config_that_is_not_on_the_path_is_told_how_it_gets_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "task.name=guesses:GuessTask", "--dry-run"]) == 2
    assert "PYTHONPATH=. where its file lies" in capsys.readouterr().err
    assert main(["train", "task.name=guesses.inner:GuessTask", "--dry-run"]) == 2
    assert "PYTHONPATH=." in capsys.readouterr().err


def test_a_probe_that_says_what_is_wrong_ends_with_that_and_no_traceback(
    tmp_path: Path,
) -> None:
    from orchestrator.api import RunError
    from scripts.bench.probes.probe_run import run_probe

    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "good_probe.py").write_text(
        "from orchestrator.api import ConfigError\nraise ConfigError('vLLM', 'not installed', 'install it')\n"
    )
    (tmp_path / "strange" / "bad_probe.py").write_text("raise KeyError('a defect')\n")
    with pytest.raises(RunError) as told:
        run_probe("good", [], package="strange", path=tmp_path)
    assert str(told.value) == "the good probe: vLLM = 'not installed': install it"
    with pytest.raises(RunError, match="Traceback"):
        run_probe("bad", [], package="strange", path=tmp_path)


def test_a_run_that_would_fill_its_disk_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5 << 20, total=9 << 30))
    assert main(["train", f"run.folder={tmp_path}", "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: run.folder = '{tmp_path}': 5 MB free in {tmp_path}; free at least ")
    assert list(tmp_path.iterdir()) == []


SLIPS = [
    (["trian"], "'trian' is not a command; did you mean 'train'?"),
    (["train", "examples/frozenlake.toml", "--rollout.alpha", "2"], "is written without dashes: rollout.alpha=2"),
    (["train", "examples/frozenlake.toml", "--rollout.alpha=2"], "is written without dashes: rollout.alpha=2"),
    (["view", "--port", "99999"], "'99999' is not a port; give 1 to 65535, or 0 for a free one"),
    (["view", "--port", "http"], "'http' is not a port; give 1 to 65535, or 0 for a free one"),
    (["profile"], "config = '': name a TOML file: its model is measured"),
    (["sim"], "config = '': name a TOML file: `rl-coserve sim examples/sim.toml` takes a few seconds"),
    (["train"], "config = '': name a TOML file: `rl-coserve train examples/frozenlake.toml` is the demo"),
    (
        ["train", "task.name=frozenlak", "--dry-run"],
        "task.name = 'frozenlak': no such task; did you mean 'frozenlake'? there",
    ),
    (["train", "relay.master=127.0.0.1:9", "--dry-run"], "relay.master = '127.0.0.1:9': "),
    (["train", "relay.master=127.0.0.1:9", "--dry-run"], "no mooncake_master answers at 127.0.0.1:9"),
    (["train", "examples/frozenlake.toml", "--dryrun"], "unrecognized arguments: --dryrun; did you mean --dry-run?"),
    (["train", "examples/frozenlake.toml", "--steps", "4"], "is written without dashes: run.steps=4"),
    (["sim", "examples/sim.toml", "--lr=1e-4"], "is written without dashes: trainer.learning_rate=1e-4"),
    (["show", "--steps", "4"], "unrecognized arguments: --steps; did you mean --step?"),
    (["model"], "error: the following arguments are required: FOLDER\n"),
    (
        ["sim", "examples/sim.toml", "--svg", "drawn.svg"],
        "--svg = 'drawn.svg': draws what --ablate finds: give that too",
    ),
    (
        ["sim", "--ablate", "--events", "log"],
        "--events = 'log': is the log of one simulation: leave it out with --ablate",
    ),
    (["train", "examples"], "config = 'examples': is a folder; give the path of a TOML file"),
    (["train", "no.toml"], "config = 'no.toml': no such file; give the path of a TOML file"),
    (
        ["train", "examples/frozenlake.toml", "model.path=Qwen/Qwen3-0.6B"],
        "`hf download NAME --local-dir FOLDER` fetches",
    ),
]


@pytest.mark.parametrize(("words", "said"), SLIPS, ids=lambda part: " ".join(part) if isinstance(part, list) else "")
def test_a_slip_is_one_sentence_that_says_what_to_type(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    try:
        code = main(words)
    except SystemExit as ended:
        code = int(ended.code or 0)
    error = capsys.readouterr().err
    assert code == 2
    assert said in error
    assert "Traceback" not in error


def test_an_example_that_came_with_the_wheel_is_told_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "share" / "rl-coserve" / "examples" / "sim.toml"
    there.parent.mkdir(parents=True)
    there.touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["sim", "examples/sim.toml"]) == 2
    assert f"config = 'examples/sim.toml': no such file; it is {there}" in capsys.readouterr().err


def test_ctrl_c_while_parts_start_says_how_to_resume_and_that_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before there is an event."""

    async def interrupted(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("orchestrator.cli.signal.signal", lambda *_: None)
    monkeypatch.setattr("orchestrator.runtime.preflight.prepare", lambda config: (None, []))
    monkeypatch.setattr("orchestrator.runtime.real_run.start_ray", lambda config: None)
    monkeypatch.setattr("orchestrator.runtime.real_run.train", interrupted)
    assert main(["train", "examples/frozenlake.toml", f"run.folder={tmp_path}"]) == 130
    run = tmp_path / "frozenlake-001"
    hint = f"interrupted; resume with: rl-coserve train --resume {run}\n"
    assert capsys.readouterr().out.endswith(hint)
    assert not (run / "events.jsonl").exists()
    assert main(["train", "--resume", str(run)]) == 130
    assert capsys.readouterr().out.endswith(hint)


def test_a_pool_that_is_not_there_is_told_with_the_pools_that_are_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pool_lending, "pool_path", lambda name: tmp_path / f"pool-{name}")
    for name in ("gpu0", "gpu0.pages", "gpu0.log", "gpu0.lease.lock", "gone.lease.lock"):
        (tmp_path / f"pool-{name}").touch()
    assert main(["lend", "--pool", "gpu1", "--status"]) == 2
    assert "yours are: gpu0; " in capsys.readouterr().err


def test_a_simulation_that_takes_long_says_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    small = load_config(
        None, ["run.steps=3", "rollout.groups_per_step=2", "rollout.environments=16", "evaluation.prompts=2"]
    )
    simulate(small, events_sink=_steps_told(3, every=0.0))
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(",")[0] for line in said] == ["step 1/3", "step 2/3", "step 3/3"]
    assert all(re.fullmatch(r"step \d/3, [\d,]+ simulated seconds", line) for line in said)
    simulate(small, events_sink=_steps_told(3, every=600.0))
    assert capsys.readouterr().err == ""  # it took no time worth a word


def test_a_run_that_evaluates_says_that_it_waits_for_the_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(SimDisplay, "__init__", lambda self, watched: setattr(self, "watched", True))
    monkeypatch.setattr(SimDisplay, "waiting", lambda self, reason: said.append(reason))
    simulate(load_config(None, ["run.steps=2", "rollout.environments=16", "evaluation.prompts=40"]))
    far = [int(found[1]) for line in said if (found := re.fullmatch(r"the evaluation: (\d+) of 40 held-out .*", line))]
    assert min(far) < 20 < max(far)
    assert any(line and not line.startswith("the evaluation") for line in said)  # and before and after, something else


def test_a_run_whose_time_is_over_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(SimDisplay, "message", lambda self, text: said.append(text))
    small = ["run.steps=50", "rollout.groups_per_step=2", "rollout.environments=16", "evaluation.prompts=2"]
    steps = simulate(load_config(None, [*small, "run.minutes=0.5"])).summary["steps"]
    assert said == [f"run.minutes = 0.5 are over after step {steps}/50"]
    simulate(load_config(None, [*small, "run.steps=2"]))
    assert len(said) == 1
