"""The trainer's keys are written once: a field of the model is a key of the config, and one flag or one of Megatron's own."""

from __future__ import annotations

import argparse
import tomllib
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from megatron_rlplugin.flags import add_setting_flags
from orchestrator.api import ConfigError
from orchestrator.config import Config, parse_config
from orchestrator.settings.trainer_settings import Flag, TrainerSection, TrainerSettings
from scripts.config_reference import tables

# Of the processes of a run, which a training script of one's own does not have.
RUN_ONLY = {
    "threads",
    "arguments",
    "megatron",
    "routing_replay",
    "collective_timeout",
    "interface",
    "reference_samples",
    "reference_path",
    "reference_update_every",
    "logprob_gap_samples",
    "logprob_gap_alarm",
    "entropy_alarm",
    "tis_alarm",
}


class Longer(TrainerSettings):
    """With a key of each kind more."""

    sharpness: Annotated[float, Field(gt=0), Flag("how sharp")] = 0.5
    shape: Annotated[Literal["round", "square"] | None, Flag("which shape", unset="any")] = None
    mirrored: Annotated[bool, Flag("turn it around")] = False
    tempo: Annotated[int, Flag(megatron="train_tempo")] = 1


def flags(model: type[TrainerSettings]) -> dict[str, argparse.Action]:
    """By their name."""
    parser = argparse.ArgumentParser(add_help=False)
    add_setting_flags(parser, model)
    return {action.option_strings[0]: action for action in parser._actions}


def test_every_field_is_one_key_of_the_config_and_one_flag() -> None:
    assert Config.model_fields["trainer"].annotation is TrainerSection
    assert set(TrainerSection.model_fields) - set(TrainerSettings.model_fields) == RUN_ONLY
    spelled = [flag.spelled(key) for key, flag in TrainerSettings.flags().items()]
    assert len(set(spelled)) == len(spelled) == len(TrainerSettings.model_fields)
    ours = {flag.spelled(key) for key, flag in TrainerSettings.flags().items() if not flag.megatron}
    assert set(flags(TrainerSettings)) == ours
    assert all(name.startswith("--rl-") == (name in ours) for name in spelled)


def test_a_new_field_is_a_key_and_a_flag_without_a_second_list() -> None:
    added = {name: action for name, action in flags(Longer).items() if name not in flags(TrainerSettings)}
    assert list(added) == ["--rl-sharpness", "--rl-shape", "--rl-mirrored"]  # and Megatron's own --train-tempo
    assert added["--rl-sharpness"].help == "how sharp (default: 0.5)"
    assert (added["--rl-sharpness"].type, added["--rl-sharpness"].default) == (float, 0.5)
    assert (added["--rl-shape"].choices, added["--rl-shape"].help) == (
        ("round", "square"),
        "which shape (default: any)",
    )
    assert added["--rl-mirrored"].nargs == 0
    assert Longer.flags()["tempo"].spelled("tempo") == "--train-tempo"
    page = "\n".join(tables("trainer", Longer))
    assert "| `sharpness` | number, > 0 | `0.5` | how sharp |" in page
    assert "| `shape` | `round`, `square` |  | which shape |" in page
    assert Longer.from_dict(tomllib.loads("sharpness = 2.0\nmirrored = true")).sharpness == 2.0


def test_every_flag_says_what_it_is() -> None:
    assert [name for name, action in flags(TrainerSettings).items() if (action.help or "").startswith(" (")] == []


@pytest.mark.parametrize(
    "given",
    [
        {"learning_rat": 1.0},
        {"clip_low": 1.0, "minibatches": 0},
        {"learning_rate": 1e-3, "final_learning_rate": 1e-2},
        {"objective": "trpo"},
        {"threads": 0},
    ],
)
def test_a_config_and_the_plugin_refuse_the_same_in_the_same_words(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^trainer\.") as of_plugin:
        TrainerSection.from_dict(given)
    with pytest.raises(ConfigError) as of_config:
        parse_config({"trainer": given})
    assert str(of_plugin.value) == str(of_config.value)


def test_an_unknown_key_in_a_table_of_tables_is_named() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^context\.tasks\.maze\.strateg = 'keep': no such key; did you mean context\.tasks\.maze\.strategy",
    ):
        parse_config({"context": {"tasks": {"maze": {"strateg": "keep"}}}})
