"""A mistake in a config is answered with what was meant, or with what a value must be, in words people use."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from orchestrator.api import ConfigError
from orchestrator.config import Config, load_config
from orchestrator.settings import config_mistakes

PAGE = Path(__file__).parents[2] / "docs" / "coming_from.md"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rolout.alpha=1", "rolout: unknown section; did you mean [rollout]?"),
        ("nothing.here=1", "nothing: unknown section; docs/config.md lists them all"),
        ("rollout.worker=2", "rollout.worker = 2: no such key; did you mean rollout.workers?"),
        ("trainer.lr=1", "trainer.lr = 1: no such key; did you mean trainer.learning_rate?"),
        ("rollout.lr=1", "rollout.lr = 1: no such key; did you mean trainer.learning_rate?"),
        ("rollout.tp=2", "rollout.tp = 2: no such key; did you mean rollout.engine.tensor_parallel_size?"),
        ("trainer.tp=2", "trainer.tp = 2: no such key; did you mean trainer.tensor_parallel?"),
        (
            "trainer.temperature=1",
            "trainer.temperature = 1: no such key; did you mean evaluation.temperature or rollout.temperature?",
        ),
        ("rollout.zzz=1", "rollout.zzz = 1: no such key; docs/config.md lists them all"),
        ("run.steps=many", "run.steps = 'many': must be a whole number"),
        ("run.steps=1.5", "run.steps = 1.5: must be a whole number"),
        ("rollout.alpha=-1", "rollout.alpha = -1: must be at least 0"),
        ("rollout.temperature=[1]", "rollout.temperature = [1]: must be a number"),
        (  # the shell took the quotes
            "rollout.served=[http://a,http://b]",
            "rollout.served = '[http://a,http://b]': must be a list: 'rollout.served=[\"http://a\", \"http://b\"]'",
        ),
        (
            "run.mode=Async",
            "run.mode = 'Async': must be 'sync', 'sync_plus', 'one_off', 'areal' or 'async'; did you mean 'async'?",
        ),
        ("run.folder=~/runs", "run.folder = '~/runs': would be a folder named ~ here: write the whole path"),
        ("reward.url=localhost:80", "reward.url = 'localhost:80': write it as http://host:port/path or https://..."),
        ("rollout.served=http://a", "rollout.served = 'http://a': must be a list: 'rollout.served=[\"http://a\"]'"),
        ("run.folder=3", "run.folder = 3: must be text"),
        ("view.enabled=perhaps", "view.enabled = 'perhaps': must be true or false"),
        ("rollout.engine=3", "rollout.engine = 3: must be a section"),
        (
            "run.mode=asynch",
            "run.mode = 'asynch': must be 'sync', 'sync_plus', 'one_off', 'areal' or 'async'; did you mean 'async'?",
        ),
        (
            "reward.timeout=adaptiv",
            "reward.timeout = 'adaptiv': must be a number, or must be 'adaptive'; did you mean 'adaptive'?",
        ),
        ("reward.timeout=-1", "reward.timeout = -1: must be more than 0.0, or must be 'adaptive'"),
        ("task.data.reward=grader.right", "task.data.reward = 'grader.right': must be module:function"),
        ('task.data.reward={"g:right"="x"}', "task.data.reward.g:right = 'x': must be a number"),
        ("task.data.reward=3", "task.data.reward = 3: must be text, or must be a table"),
        ("model.dtype=int", "model.dtype = 'int': must be 'float32' or 'bfloat16'"),
        (
            "batch_size=3",
            "batch_size = 3: no such key; did you mean rollout.groups_per_step, trainer.micro_batch_size or "
            "warmup.batch_size?",
        ),
    ],
)
def test_a_mistake_is_answered_with_its_cure(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    assert str(caught.value).splitlines()[0] == said


def test_all_mistakes_are_said_at_once_and_each_on_its_line() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["run.seed=x", "run.step=3", "rolout.a=1"])
    assert sorted(line.strip() for line in str(caught.value).splitlines()) == [
        "rolout: unknown section; did you mean [rollout]?",
        "run.seed = 'x': must be a whole number",
        "run.step = 3: no such key; did you mean run.steps?",
    ]


def test_no_more_than_five_keys_are_offered() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["rollout.enabled=1"])
    assert 2 <= str(caught.value).count(".enabled") - 1 <= config_mistakes.MOST


def test_the_page_for_users_of_other_systems_names_keys_that_there_are() -> None:
    known = {".".join(path) for path in config_mistakes.paths_of(Config)}
    table = PAGE.read_text(encoding="utf-8").partition("## Keys")[2].partition("\n## ")[0]
    named = {
        key for cell in re.findall(r"^\| [^|]+ \| ([^|]+) \|", table, re.M) for key in re.findall(r"`([^`]+)`", cell)
    }
    assert len(named) > 15
    assert named <= known


@pytest.mark.parametrize(("alias", "targets"), config_mistakes.ALIASES.items())
def test_what_other_systems_call_a_key_leads_to_keys_that_there_are(alias: str, targets: tuple[str, ...]) -> None:
    known = {".".join(path) for path in config_mistakes.paths_of(Config)}
    assert {key for key in targets if not key.startswith(config_mistakes._OPEN)} <= known
    assert not any(key.rpartition(".")[2] == alias for key in targets)
