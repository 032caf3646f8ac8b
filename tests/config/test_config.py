"""Bad input: one clear error that names field, value and fix; and every TOML of the repository loads."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from orchestrator import cli
from orchestrator.api import ConfigError
from orchestrator.cli import main
from orchestrator.config import Config, load_config, parse_config, to_json
from orchestrator.tasks import registry

ROOT = Path(__file__).parents[2]
PACKAGES = ("orchestrator", "vllm_rlplugin", "megatron_rlplugin")
TOMLS = sorted(path for path in ROOT.rglob("*.toml") if path.name != "pyproject.toml" and ".venv" not in path.parts)


@pytest.mark.parametrize("path", TOMLS, ids=lambda path: path.name)
def test_every_toml_of_the_repository_loads(path: Path) -> None:
    load_config(path)


@pytest.mark.parametrize(
    ("override", "field", "hint"),
    [
        ("rollout.alpa=1", "rollout.alpa", "did you mean rollout.alpha?"),
        ("rollout.alpha=-1", "rollout.alpha", "at least 0"),
        ("rollout.group_size=1", "rollout.group_size", "at least 2"),
        ("trainer.learning_rate=0", "trainer.learning_rate", "more than 0"),
        ("run.mode=sometimes", "run.mode", "'sync', 'sync_plus', 'one_off', 'areal' or 'async'"),
        ("nothing.here=1", "nothing", "unknown section"),
        ("relay.port=70000", "relay.port", "65535"),
        ("relay.kind=redis", "relay.kind", "'mooncake' or 'fsspec'"),
        ("relay.snapshot_every=-1", "relay.snapshot_every", "at least 0"),
        ("reward.function=os.system", "reward.function", "must match"),
        ("reward.host=lambda", "reward.host", "'embedded' or 'ray_serve'"),
        ("reward.serve={min_replicas=3, max_replicas=2}", "reward.serve.max_replicas", "must be at least min_replicas"),
        ("rollout.environment_reset_timeout=4000", "rollout.environment_reset_timeout", "trajectory_timeout = 3600"),
        ("rollout.engine.block_size=20", "rollout.engine.block_size", "multiple of 32"),
    ],
)
def test_a_wrong_value_is_named_with_its_fix(override: str, field: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    assert caught.value.field == field
    assert hint in str(caught.value)


def test_every_violation_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["rollout.alpha=-1", "trainer.clip_low=7", "model.layers=0"])
    text = str(caught.value)
    assert all(name in text for name in ("rollout.alpha", "trainer.clip_low", "model.layers"))


@pytest.mark.parametrize("override", ["run.mode=sync", "rollout.alpha=0", "rollout.environments=4"])
def test_values_that_do_not_fit_together_are_refused(override: str) -> None:
    with pytest.raises(ConfigError):
        load_config(None, [override])


@pytest.mark.parametrize("objective", ["ppo", "reinforce++"])
def test_what_goes_by_equal_rewards_is_refused_where_members_are_not_compared(objective: str) -> None:
    with pytest.raises(ConfigError, match="does not compare the members of a group"):
        load_config(None, ["rollout.dynamic_sampling=true", f"trainer.objective={objective}"])
    with pytest.raises(ConfigError, match=r"run.signal_share = 0.3: would end a run that still learns"):
        load_config(None, ["run.signal_share=0.3", f"trainer.objective={objective}"])


def test_a_missing_file_and_broken_toml_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "broken.toml").write_text("[run\n")
    with pytest.raises(ConfigError, match="TOML"):
        load_config(tmp_path / "broken.toml")


def test_the_saved_config_is_the_same_config() -> None:
    import json

    config = load_config(None, ["rollout.alpha=2", "run.name='x'"])
    assert parse_config(json.loads(to_json(config))) == config


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "orchestrator.cli", *arguments], capture_output=True, text=True, cwd=ROOT
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("train", "nowhere.toml"), "no such file"),
        (("train", "--resume", "nowhere"), "is not a run folder"),
        (("train", "examples/frozenlake.toml", "model.path=/nonexistent"), "is not a model folder"),
        (("train", "examples/frozenlake.toml", "reward.function=nowhere.at:all"), "No module named"),
        (("train", "examples/frozenlake.toml", "rollout.engine.max_model_len=20"), "may have"),
        (("train", "examples/frozenlake.toml", "run.folder=/proc/nothing"), "cannot be written"),
        (("report", "nowhere"), "is not a run folder"),
        (("bench", "zzzz"), "no such benchmark; see rl-coserve bench --list"),
        (("bench", "calibrated"), "no such benchmark; did you mean calibrated-prediction?"),
        (("sim",), "name a TOML file: `rl-coserve sim examples/sim.toml`"),
        (
            ("sim", "examples/sim.toml", "--events", "/nowhere/events"),
            "--events = '/nowhere/events': cannot be written",
        ),
        (("sim", "--ablate", "--svg", "docs"), "--svg = 'docs': cannot be written"),
        ((), "give a command; `rl-coserve --help` lists them"),
    ],
)
def test_bad_input_ends_with_exit_code_2_and_starts_nothing(arguments: tuple[str, ...], words: str) -> None:
    done = command(*arguments)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_dry_run_prints_the_resolved_config_then_the_plan_and_starts_nothing() -> None:
    pytest.importorskip("ray")
    words = ("examples/frozenlake.toml", "run.seed=7")
    done = command("train", *words, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["run"]["seed"] == 7
    places, _, ok = done.stderr.removesuffix("\n").rpartition("\n")
    assert re.fullmatch(r"OK: 1 engine, 1 trainer, about \d\.\d GB", ok)
    assert "trainer, vllm-0" in places
    assert command("plan", *words).stdout.endswith(f"{places}\n{ok}\n")


def test_values_may_stand_before_and_behind_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_placed", lambda config: [])
    monkeypatch.setattr(cli, "_about", lambda config: "nothing")
    demo = str(ROOT / "examples/frozenlake.toml")
    for words in (
        [demo, "run.seed=7", "--dry-run", "run.steps=9"],
        ["--dry-run", demo, "run.seed=7", "run.steps=9"],
        [demo, "--dry-run", "run.seed=7", "--view", "run.steps=9"],
    ):
        assert main(["train", *words]) == 0
        run = json.loads(capsys.readouterr().out)["run"]
        assert (run["seed"], run["steps"]) == (7, 9)
    for wrong in (
        ["train", demo, "--dry-run", "more"],
        ["train", demo, "--dry-runn", "run.seed=7"],
        ["top", "a", "b=1"],
    ):
        with pytest.raises(SystemExit) as caught:
            main(wrong)
        assert caught.value.code == 2
        assert "unrecognized arguments" in capsys.readouterr().err


def test_dry_run_says_all_that_is_wrong_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["relay.master=127.0.0.1:9", "evaluation.prompts=5000", "rollout.routing.affinity.default=B200"]
    wrong += ["rollout.workers=6400"]
    assert main(["train", str(ROOT / "examples/frozenlake.toml"), *wrong, "--dry-run"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    first, *others = said.err.splitlines()
    assert first.startswith("error: evaluation.prompts = 5000: ")
    assert [line.split(" = ")[0] for line in others] == [
        "  rollout.workers",
        "  relay.master",
        "  rollout.routing.affinity.default",
    ]


@pytest.mark.parametrize("command", [["train", "--dry-run"], ["plan"]])
def test_beside_a_task_that_cannot_be_made_all_else_that_is_wrong_is_said(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "lend"]) == 0
    capsys.readouterr()
    assert main([command[0], "served.toml", "evaluation.prompts=5000", *command[1:]]) == 2
    first, *others = capsys.readouterr().err.splitlines()
    assert first.startswith("error: task.data.tokenizer = 'MODEL': is not a folder")
    assert [line.split(" = ")[0].strip() for line in others] == [
        "task.data.reward",
        "task.data.file",
        "model.path",
        "evaluation.prompts",
        "rollout.served_token_file",
    ]


TASKS = """
from orchestrator.api import Observation, StepResult
from orchestrator.tasks.nim import NimTask
from orchestrator.tasks.text import Reply

class Sluggish(NimTask):
    def play(self, payload):
        class Game:
            def start(self): return "a0"
            def act(self, said): return Reply(done=True)
        return Game()

class Played(NimTask):
    shown, answered, version = (2,), StepResult(Observation(()), 1.0, True, False), "played 1"
    def environment(self):
        task = self
        class Environment:
            version = task.version
            async def reset(self, prompt): return Observation(task.shown)
            async def step(self, ids): return task.answered
            async def close(self): pass
        return Environment()

class Strange(Played): shown = (5000,)
class Dictionary(Played): shown = {"board": [1, 2], "turn": 3}  # as a Gymnasium space
class Nothing(Played): answered = None
class FiveOfGymnasium(Played): answered = ((2,), 1.0, True, False, {})
class NotANumber(Played): answered = StepResult(Observation(()), float("nan"), True, False)
class Unversioned(Played): version = None

class NoPrompt(NimTask):
    def prompts(self, split, seed): return iter(())

class FewHeldout(NimTask):
    def prompts(self, split, seed):
        drawn = super().prompts(split, seed)
        return drawn if split == "train" else iter([next(drawn), next(drawn)])

class NoHeldout(NimTask):
    def prompts(self, split, seed): return super().prompts({"train": "train"}[split], seed)

class Unseeded(NimTask):
    def prompts(self, split, seed): return super().prompts(split, __import__("random").random() if split == "train" else seed)

class Licensed(NimTask):
    def __init__(self, heldout): raise SystemExit("no licence")

class ActsNothing(NimTask):
    def play(self, payload):
        class Game:
            def start(self): return "a0"
            async def act(self, said): return None
        return Game()
"""


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Sluggish", "TypeError"),
        ("Strange", "an observation holds token 5000, the vocabulary has 64"),
        ("Dictionary", "reset: token_ids must be a tuple of int, is {'board': [1, 2], 'turn': 3}"),
        ("Nothing", "step returned NoneType, not a StepResult"),
        ("FiveOfGymnasium", "step returned tuple, not a StepResult"),
        ("NotANumber", "step: the reward is nan"),
        ("Unversioned", "the version must be text of at most 200 characters, is None"),
        ("ActsNothing", "act returned NoneType, not a Reply"),
        ("NoPrompt", "prompts('train', seed) yields none"),
        ("Unseeded", "a resume would draw others"),
    ],
)
def test_a_task_that_cannot_be_played_is_known_before_anything_starts(
    name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "odd_tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert (
        main(["train", f"task.name=odd_tasks:{name}", "task.heldout_maps=5", "evaluation.prompts=5", "--dry-run"]) == 2
    )
    said = capsys.readouterr().err
    assert "a trial turn before the run failed" in said
    assert says in said


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("FewHeldout", "evaluation.prompts = 5: prompts('heldout', seed) of task nim yields 2"),
        ("NoHeldout", "prompts('heldout', seed) failed: KeyError('heldout')"),
    ],
)
def test_a_task_with_fewer_held_out_prompts_than_are_evaluated_is_known_before_anything_starts(
    name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "few_tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    given = ["train", f"task.name=few_tasks:{name}", "task.heldout_maps=5", "--dry-run"]
    assert main([*given, "evaluation.prompts=5"]) == 2
    assert says in capsys.readouterr().err
    if name == "FewHeldout":
        main([*given, "evaluation.prompts=2"])
        assert "evaluation.prompts" not in capsys.readouterr().err


def test_a_task_that_exits_where_it_is_made_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaving_tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="cannot be made: SystemExit: no licence"):
        registry.make("leaving_tasks:Licensed", 5)


def test_the_registry_may_be_the_first_that_is_imported() -> None:
    command = "from orchestrator.tasks import registry; registry.find('nim')"
    subprocess.run([sys.executable, "-c", command], check=True, timeout=120)


REWARDS = """
import os
def raises(event): return {"reward": event["answer"]}
def none(event): return None
def bare(event): return 1.0
def pair(event): return {"reward": (1.0, "right")}
def words(event): return {"reward": "1.0"}
def nan(event): return {"reward": float("nan")}
def leaves(event): os._exit(3)
def offline(event): raise ConnectionError("no judge here")
def of_words(event): return {"reward": float(event["actions"][0][-2])}
def sound(event): return {"reward": 1, "format": True}
def tells(event): return {"reward": 1, "why": "no end", "format": True}
def many(event): return {"reward": 1} | {str(number): number for number in range(40)}
"""


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("raises", "KeyError: 'answer'"),
        ("none", "the answer is not an object: None"),
        ("bare", "the answer is not an object: 1.0"),
        ("pair", 'no number under "reward"'),
        ("words", 'no number under "reward"'),
        ("nan", "Runtime.NotFinite"),
        ("leaves", "Runtime.ExitError"),
        ("offline", "note: ConnectionError: no judge here"),
        ("of_words", "note: IndexError"),
        ("sound", ""),
        ("tells", "note: beside the reward only numbers are kept, not 'why'"),
        ("many", "at most 32 are kept"),
    ],
)
def test_a_reward_function_that_gives_no_number_is_known_before_anything_starts(
    name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from orchestrator.runtime import preflight, reward_trial

    (tmp_path / "odd_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    config = load_config(None, [f"reward.function=odd_rewards:{name}"])
    task = preflight.make_task(config)
    if says and not says.startswith("note"):
        with pytest.raises(
            ConfigError, match=r"reward\.function = .*a trial answer before the run got no reward"
        ) as said:
            reward_trial.try_reward(config, task, config.reward.function)
        assert says in str(said.value)
    else:
        notes = reward_trial.try_reward(config, task, config.reward.function)
        assert len(notes) == bool(says)
        assert all(says.removeprefix("note: ") in note for note in notes)
    if name == "none":
        assert main(["train", "reward.function=odd_rewards:none", "--dry-run"]) == 2
        assert "a trial answer before the run got no reward" in capsys.readouterr().err


@pytest.mark.parametrize("version", ["0.31.0", "0.35.1"])
def test_an_untested_engine_version_is_refused_with_the_range(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from orchestrator.hooks import tested_versions
    from orchestrator.runtime import preflight

    def installed(_: tuple[str, ...]) -> tuple[str, str]:
        return "vllm", version

    monkeypatch.setattr(tested_versions, "installed_version", installed)
    config = load_config(ROOT / "examples/frozenlake.toml")
    with pytest.raises(ConfigError, match=r"0\.32") as caught:
        preflight.check(config, preflight.make_task(config))
    assert version in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["ray.address=auto"], "reward.serve.port = 0: in a Ray that others run, name the port"),
        (["reward.serve={min_replicas=3}", "ray.cpus=2"], "3 replicas of 1 CPUs do not fit into ray.cpus = 2"),
    ],
)
def test_a_ray_serve_that_could_not_start_is_refused_before_anything_starts(
    overrides: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from orchestrator.runtime import preflight

    monkeypatch.setattr("importlib.util.find_spec", lambda name: name != "grpc_reflection" or None)
    config = load_config(ROOT / "examples/frozenlake.toml", ["reward.host=ray_serve", *overrides])
    with pytest.raises(ConfigError, match=r"rl-coserve\[ray-serve\]"):
        preflight.check(config, preflight.make_task(config))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    with pytest.raises(ConfigError, match=message):
        preflight.check(config, preflight.make_task(config))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("encoder", "rollout.prediction.encoder = .*is not a Hugging Face folder"),
        ("start", "rollout.prediction.start = .*cannot be used"),
    ],
)
def test_a_predictors_model_that_is_not_there_is_refused_before_anything_starts(
    given: str, message: str, tmp_path: Path
) -> None:
    from orchestrator.runtime import preflight

    keys = ["rollout.prediction.enabled=true", f'rollout.prediction.{given}="{tmp_path / "none"}"']
    config = load_config(ROOT / "examples/frozenlake.toml", keys)
    with pytest.raises(ConfigError, match=message):
        preflight.check(config, preflight.make_task(config))
    with pytest.raises(ConfigError, match=r"rollout.prediction.encoder = .*leave it at 'hashed'"):
        load_config(None, ["rollout.prediction.encoder=m", "rollout.prediction.predictor=history"])
    with pytest.raises(ConfigError, match=r"rollout.prediction.encoder_tuned = 0: .*name its folder"):
        load_config(None, ["rollout.prediction.encoder_tuned=0"])


def test_a_collective_needs_workers_of_the_run_itself() -> None:
    url = 'rollout.served=["http://127.0.0.1:8000"]'
    with pytest.raises(ConfigError, match="own workers only") as caught:
        load_config(None, ["rollout.weights=collective", "rollout.workers=0", url])
    assert caught.value.field == "rollout.weights"
    mixed = load_config(None, ["rollout.weights=collective", "rollout.collective_timeout=7", url])
    assert mixed.collective_limit == 7.0
    assert load_config(None).collective_limit is None
    assert load_config(None, ["rollout.weights=nccl"]).collective_limit == 60.0


@pytest.mark.parametrize(
    ("given", "field", "fix"),
    [
        (["trainer.tensor_parallel=2"], "rollout.weights", "one rank that holds every tensor whole"),
        (["trainer.pipeline_parallel=2"], "rollout.weights", "or rollout.weights = 'collective'"),
        (["trainer.expert_parallel=2", "trainer.data_parallel=2"], "rollout.weights", "expert_parallel = 1"),
        (["rollout.workers=0", 'rollout.served=["http://127.0.0.1:8000"]'], "rollout.weights", "own workers only"),
        (["run.mode=async", "rollout.alpha=1", "rollout.weights_overlap=true"], "rollout.weights_overlap", "'relay'"),
        (["relay.signing_key=KEY"], "relay.signing_key", "rollout.weights = 'nccl' sends weights unsigned"),
    ],
)
def test_vllms_own_weight_transfer_is_refused_where_it_cannot_be(given: list[str], field: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=fix) as caught:
        load_config(None, ["rollout.weights=nccl", *given])
    assert caught.value.field == field


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")
def test_vllms_own_weight_transfer_is_refused_without_a_gpu_before_anything_starts() -> None:
    from orchestrator.runtime import preflight

    config = load_config(ROOT / "examples/frozenlake.toml", ["rollout.weights=nccl"])
    with pytest.raises(
        ConfigError, match=r"rollout.weights = 'nccl': .*take 'collective' \(gloo on a CPU\) or 'relay'"
    ):
        preflight.check(config, preflight.make_task(config))


def test_vllms_own_weight_transfer_is_refused_with_a_vllm_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    from orchestrator.hooks import tested_versions
    from orchestrator.runtime import preflight

    config = load_config(None, ["rollout.weights=nccl", "ray.address=127.0.0.1:6379"])  # the GPUs may be elsewhere
    monkeypatch.setattr(tested_versions, "find_version", lambda component: ("vllm", "0.32.0+cpu"))
    with pytest.raises(ConfigError, match=r"rollout.weights = 'nccl': needs vLLM 0.33, installed is 0.32.0\+cpu"):
        preflight._nccl(config)
    monkeypatch.setattr(tested_versions, "find_version", lambda component: ("vllm", "0.33.0"))
    preflight._nccl(config)


def test_turns_in_step_need_an_environment_for_everybody() -> None:
    """Else those that have one wait, in the middle of their episode, for those that wait for one."""
    pool = ["environment.backend=in-process-pool", "rollout.alpha=0", "run.mode=sync", "rollout.environments=64"]
    with pytest.raises(ConfigError, match="make them equal"):
        load_config(None, [*pool, "environment.size=8"])
    assert load_config(None, [*pool, "environment.size=64"]).environment.size == 64
    pool[2] = "run.mode=sync_plus"
    assert load_config(None, [*pool, "environment.size=8"]).environment.size == 8


def keys(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(path, name) of every key, in all sections."""
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}", name
        for part in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from keys(part, f"{prefix}{name}.")


def test_every_key_is_read_by_something_that_is_no_section() -> None:
    """As an attribute, or as a field of the record that a section's values are handed on in."""
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py") if file.parent.name != "sections"]
    text = "\n".join(file.read_text("utf-8") for file in files)
    read = set(re.findall(r"\.([a-z]\w*)|^    ([a-z]\w*): ", text, re.M))
    names = {name for pair in read for name in pair}
    found = dict(keys(Config))
    assert {"run.steps", "rollout.routing.affinity", "filters.max_similarity"} <= set(found)
    assert [path for path, name in found.items() if name not in names] == []
