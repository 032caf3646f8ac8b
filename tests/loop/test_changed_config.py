"""A run can continue, longer if one likes, with what may change changed; everything else is its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api import ConfigError
from orchestrator.cli import main
from orchestrator.components import Position
from orchestrator.config import Config, load_config, to_json
from orchestrator.run_folder import RunFolder, write_environment
from orchestrator.runtime.changed_config import CHANGEABLE, config_to_continue, notes_of
from orchestrator.runtime.resume import Resumed
from orchestrator.settings.config_mistakes import paths_of


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Of a run of 40 steps, of which so many are done as a test says."""
    made = RunFolder.create(load_config(None, [f"run.folder={tmp_path}", "run.steps=40", "rollout.alpha=2"]))
    made.write_environment()
    made.unlock()
    return made


def did(folder: RunFolder, steps: int, status: str = "completed") -> None:
    (folder.checkpoints / f"step-{steps:06d}").mkdir(parents=True)
    events = [{"kind": "run_start"}, {"kind": "step"}, *([{"kind": "run_end", "status": status}] if status else [])]
    folder.events_file.write_text(
        "".join(json.dumps(one, separators=(",", ":")) + "\n" for one in events) + '{"kind":"run_e'
    )


def test_a_run_continues_with_its_own_config_and_what_was_changed(folder: RunFolder) -> None:
    did(folder, 30)
    before = folder.config()
    assert config_to_continue(folder, []) == before
    after = config_to_continue(folder, ["run.steps=60", "checkpoint.every=5", "rollout.stall_timeout=900"])
    assert (after.run.steps, after.checkpoint.every, after.rollout.stall_timeout) == (60, 5, 900)
    assert after.rollout.alpha == 2
    elsewhere = config_to_continue(folder, ["ray.address=10.0.0.7:6379", "relay.host=10.0.0.7"])
    assert (elsewhere.ray.address, elsewhere.relay.host) == ("10.0.0.7:6379", "10.0.0.7")
    cut = config_to_continue(folder, ["trainer.tensor_parallel=2", "trainer.distributed_optimizer=true"])
    assert (cut.trainer.tensor_parallel, cut.trainer.distributed_optimizer) == (2, True)
    assert folder.config() == before, "nothing is written before it starts"


def test_what_the_troubleshooting_page_tells_to_change_after_a_run_has_ended_may_change(folder: RunFolder) -> None:
    """Also where its servers are: after a job's time limit they are others, with another token."""
    did(folder, 30)
    cures = ["rollout.worker_restarts=9", "rollout.collective_timeout=900", "rollout.engine.kv_cache_mb=64"]
    cures += ["trainer.micro_batch_size=1", "trainer.micro_batch_tokens=2048", "ray.object_store_mb=100"]
    cures += ["relay.patience=900", "relay.segment_mb=512", "reward.timeout=90", "reward.concurrency=2"]
    cures += [
        "trainer.logprob_gap_alarm=0.1",
        "trainer.entropy_alarm=0",
        "trainer.tis_alarm=0.3",
        "rollout.ess_alarm=0.1",
    ]
    cures += ["environment.start_tries=9", "environment.parallel_starts=9", "environment.max_age_seconds=9"]
    cures += ['rollout.served=["http://10.0.0.9:8000"]', "rollout.served_token_file=t"]
    cures += ["rollout.served_allow_plain_http=true"]
    after = config_to_continue(folder, cures)
    assert (after.rollout.served, after.rollout.engine.kv_cache_mb) == (("http://10.0.0.9:8000",), 64)
    assert (after.trainer.micro_batch_size, after.rollout.worker_restarts) == (1, 9)


def test_an_option_of_engines_that_the_runs_groups_do_not_read_is_refused(tmp_path: Path) -> None:
    folder = RunFolder.create(load_config(None, [f"run.folder={tmp_path}", "rollout.engines=[{count = 1}]"]))
    folder.unlock()
    with pytest.raises(ConfigError, match="a resume keeps the run's own"):
        config_to_continue(folder, ["rollout.engine.kv_cache_mb=64"])


@pytest.mark.parametrize(
    "override",
    ["run.seed=3", "run.mode=sync", "task.name=nim", "trainer.lr_decay=cosine", "rollout.workers=9"],
)
def test_what_shaped_the_training_is_refused_by_name(folder: RunFolder, override: str) -> None:
    with pytest.raises(ConfigError, match=r"what may change: run\.steps, ") as caught:
        config_to_continue(folder, [override])
    assert caught.value.field == override.partition("=")[0]


def test_a_key_that_does_not_exist_is_answered_with_the_one_that_was_meant(folder: RunFolder) -> None:
    did(folder, 40)
    for override, meant in (("run.step=60", r"run\.steps\?"), ("lr=1", r"trainer\.learning_rate\?")):
        with pytest.raises(ConfigError, match=f"no such key; did you mean {meant}"):
            config_to_continue(folder, [override])


def test_a_complete_run_is_not_started_again_unless_it_is_given_more(folder: RunFolder) -> None:
    did(folder, 40)
    with pytest.raises(ConfigError, match=r"40 of 40 steps are done; extend it with run\.steps=80"):
        config_to_continue(folder, [])
    with pytest.raises(ConfigError, match="40 of 40 steps are done"):
        config_to_continue(folder, ["run.steps=39"])
    assert config_to_continue(folder, ["run.steps=41"]).run.steps == 41


@pytest.mark.parametrize("status", ["", "failed", "interrupted"])
def test_a_run_that_was_killed_after_its_last_checkpoint_is_brought_to_its_end(folder: RunFolder, status: str) -> None:
    did(folder, 40, status)
    assert config_to_continue(folder, []).run.steps == 40
    with pytest.raises(ConfigError, match="40 of 40 steps are done"):
        config_to_continue(folder, ["run.steps=39"])


def ended_early(folder: RunFolder, seconds: float, *, silent: bool = False) -> None:
    did(folder, 30)
    alarm = [{"kind": "alarm", "what": "signal", "t": seconds - 1}] if silent else []
    said = [{"kind": "run_start", "t": 0.0}, *alarm, {"kind": "run_end", "status": "completed", "t": seconds}]
    folder.events_file.write_text("".join(json.dumps(one, separators=(",", ":")) + "\n" for one in said))


def test_a_run_whose_time_was_over_is_not_started_again_unless_it_is_given_time(tmp_path: Path) -> None:
    folder = RunFolder.create(load_config(None, [f"run.folder={tmp_path}", "run.steps=40", "run.minutes=8"]))
    folder.unlock()
    ended_early(folder, 8.2 * 60)
    for overrides in ([], ["run.steps=600"], ["run.minutes=8.1"]):
        with pytest.raises(ConfigError, match=r"30 of 40 steps are done; extend it with run\.minutes=16, for example"):
            config_to_continue(folder, overrides)
    for enough in (["run.minutes=16"], ["run.minutes=9", "run.steps=600"]):
        assert config_to_continue(folder, enough).run.minutes != 8
    with pytest.raises(ConfigError, match=r"extend it with run\.steps=60 run\.minutes=16"):
        config_to_continue(folder, ["run.steps=30"])


def test_a_run_whose_groups_taught_nothing_says_so_and_continues_when_it_is_told_to(tmp_path: Path) -> None:
    folder = RunFolder.create(load_config(None, [f"run.folder={tmp_path}", "run.steps=40", "run.signal_share=0.3"]))
    folder.unlock()
    ended_early(folder, 100, silent=True)
    for overrides in ([], ["run.signal_share=0.3"], ["run.steps=35"]):
        with pytest.raises(
            ConfigError, match=r"extend it with run\.signal_share=0, .* \(it ended early, as its groups"
        ):
            config_to_continue(folder, overrides)
    for enough in (["run.signal_share=0"], ["run.signal_share=0.1"], ["run.steps=600"]):
        config_to_continue(folder, enough)


def test_the_command_refuses_with_status_2_and_leaves_the_folder_as_it_is(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    did(folder, 40)
    files = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file() and path.name != "lock"}
    for arguments in ([], ["run.seed=9"], ["run.stepz=9"]):
        assert main(["train", "--resume", str(folder.path), *arguments]) == 2
        assert capsys.readouterr().err.startswith("error: ")
    assert {path: path.read_bytes() for path in files} == files


def test_a_decay_over_more_steps_is_said() -> None:
    before = load_config(None, ["run.steps=40", "trainer.final_learning_rate=0.00001"])
    after = load_config(None, ["run.steps=60", "trainer.final_learning_rate=0.00001"])
    assert notes_of(before, after) == ["the learning rate decays to 1e-05 over 60 steps now, not 40"]
    assert notes_of(before, before) == notes_of(Config(), load_config(None, ["run.steps=7"])) == []


@pytest.mark.parametrize(
    ("resumed", "said"),
    [
        (Resumed(Path("c"), Position(7, 7), ()), "continuing from its checkpoint after step 7, of 9 steps"),
        (
            Resumed(Path("c"), Position(7, 7), (), rolled_back=2, dropped=1024),
            "continuing from its checkpoint after step 7, of 9 steps; 2 later steps (1,024 trajectories) are rolled back and "
            "trained again",
        ),
        (Resumed(None, Position(), ()), "continuing from the start: there is no checkpoint, of 9 steps"),
    ],
)
def test_a_resume_says_from_where_it_continues_and_what_it_took_back(resumed: Resumed, said: str) -> None:
    assert resumed.words(9) == said


def test_what_may_change_is_there() -> None:
    known = {".".join(path) for path in paths_of(Config)}
    assert {key for key in CHANGEABLE if not key.endswith(".")} <= known
    assert all(any(name.startswith(key) for name in known) for key in CHANGEABLE)


def test_a_resume_by_a_newer_version_says_its_versions_and_the_defaults_that_the_run_never_chose(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    did(folder, 30, status="")
    data = json.loads(folder.config_file.read_text())
    del data["checkpoint"]["grace"], data["tls"]
    folder.replace_config(json.dumps(data))
    file = folder.path / "environment.json"
    write_environment(file, {"versions": json.loads(file.read_text())["versions"] | {"rl-coserve": "0.0.9"}})
    stamped = list[Any]()

    async def train(*_: object) -> str:
        stamped.append(json.loads(file.read_text())["versions"]["rl-coserve"])
        return "interrupted"

    monkeypatch.setattr("orchestrator.cli.signal.signal", lambda *_: None)
    monkeypatch.setattr("orchestrator.cli._say_report", lambda run: None)
    monkeypatch.setattr("orchestrator.runtime.preflight.prepare", lambda config: (None, []))
    monkeypatch.setattr("orchestrator.runtime.real_run.start_ray", lambda config: None)
    monkeypatch.setattr("orchestrator.runtime.real_run.train", train)
    assert main(["train", "--resume", str(folder.path)]) == 130
    said = capsys.readouterr().out
    assert f"rl-coserve: {stamped[0]}, before 0.0.9\n" in said
    assert "so by default: checkpoint.grace = 180.0, tls = {" in said
    assert json.loads(file.read_text())["before"][0]["versions"]["rl-coserve"] == "0.0.9"
    assert json.loads(folder.config_file.read_text()) == data, "an older version can be gone back to"
    folder.replace_config(to_json(folder.config()) + "\n")
    assert main(["train", "--resume", str(folder.path)]) == 130
    assert "before" not in (said := capsys.readouterr().out), said
