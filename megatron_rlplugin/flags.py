"""``--rl-*`` for a Megatron training script: one argument group, made from the fields of ``TrainerSettings``, and the
records that the plugin makes of it.

Guarantees: not given, the flags change nothing: every other argument keeps its value, Megatron's own included. A wrong value
or a contradiction is one ConfigError that names the flag. No name is one of Megatron-Core 0.19.2's own ``--rl-*`` flags.
What Megatron has a flag for is read from Megatron's (``--lr``, ``--clip-grad``, ``--micro-batch-size``, the sizes of the
parallel groups), so nothing is said twice.

:func:`add_rl_args` is one of Megatron's ``extra_args_provider``: it takes a parser and returns it.
"""

from __future__ import annotations

import argparse
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from orchestrator.api import ConfigError
from orchestrator.api.jsontext import parse_object
from orchestrator.policies.training.objective_table import LrDecay
from orchestrator.settings.trainer_settings import TrainerSettings
from orchestrator.transfer import RelayEndpoint

Provider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]
GROUP = "rl-coserve"
STREAM = TrainerSettings.flags()["stream"].spelled("stream")
# What streaming needs of Megatron's own flags: raw sums go into the backward pass, and gradients are added up in fp32.
STREAM_NEEDS = ("calculate_per_token_loss", "accumulate_allreduce_grads_in_fp32")


def add_rl_args(parser: argparse.ArgumentParser, then: Provider | None = None) -> argparse.ArgumentParser:
    """Add the group; ``then`` is a provider of your own that is called after it. Returns the parser."""
    group = parser.add_argument_group(GROUP, "reinforcement learning on recorded or arriving trajectories")
    add_setting_flags(group)
    group.add_argument(
        "--rl-weight-relay",
        metavar="JSON",
        help="where weights are published: a RelayEndpoint as JSON, or a file that contains it (default: nowhere)",
    )
    group.add_argument(
        "--rl-vocab-size",
        type=int,
        metavar="N",
        help="vocab_size of the engines' config.json; Megatron's padding is not published (default: no padding)",
    )
    group.add_argument(
        "--rl-trajectories",
        metavar="DIR",
        help="a run folder whose recorded trajectories are trained on (default: none)",
    )
    group.add_argument(
        "--rl-temperature",
        type=float,
        default=1.0,
        metavar="X",
        help="sampling temperature of the rollout; log-probs are those of that distribution (default: 1.0)",
    )
    return parser if then is None else then(parser)


def add_setting_flags(group: argparse._ActionsContainer, model: type[TrainerSettings] = TrainerSettings) -> None:
    """One flag for each field of ``model`` that Megatron has no argument for."""
    for key, flag in model.flags().items():
        if flag.megatron:
            continue
        field, name = model.model_fields[key], flag.spelled(key)
        kind, choices = _value_of(field.annotation)
        options: dict[str, Any] = {"dest": flag.argument(key), "default": field.default}
        if kind is bool:
            shown = "on" if field.default else "off"
            switch = _Streaming if name == STREAM else "store_true"
            options["action"] = argparse.BooleanOptionalAction if field.default else switch
        else:
            shown = flag.unset if field.default is None else str(field.default)
            options |= {"type": kind, "choices": choices or None}
            if not choices:
                options["metavar"] = "N" if kind is int else "X"
        group.add_argument(name, help=f"{flag.help} (default: {shown})", **options)


def settings_from(args: argparse.Namespace) -> TrainerSettings:
    """The settings of a parsed command line. Raises ConfigError that names the flag."""
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    flags = TrainerSettings.flags()
    style = getattr(args, flags["lr_decay"].megatron, "linear")
    for key, flag in flags.items():
        value = getattr(args, flag.argument(key), None)
        if not flag.megatron and not hasattr(args, flag.argument(key)):
            raise ConfigError(
                flag.spelled(key), None, "is unknown to this parser: call add_rl_args(parser) before parsing"
            )
        if flag.megatron and value is None:
            continue
        if key == "final_learning_rate" and (style == "constant" or not value):
            continue
        if key == "lr_decay" and ("final_learning_rate" not in values or style not in typing.get_args(LrDecay)):
            continue
        values[key], names[f"trainer.{key}"] = value, flag.spelled(key)
    try:
        return TrainerSettings.from_dict(values)
    except ConfigError as error:
        if error.field not in names:
            raise
        raise ConfigError(names[error.field], error.value, _in_flags(error.fix, names)) from None


def vocabulary_from(args: argparse.Namespace, padded: int) -> int:
    """The rows of the vocabulary that engines have, of the model's ``padded`` ones. Raises ConfigError."""
    rows = args.rl_vocab_size
    if rows is None:
        return padded
    if not 0 < rows <= padded:
        raise ConfigError("--rl-vocab-size", rows, f"must lie between 1 and the model's {padded} rows")
    return int(rows)


def temperature_from(args: argparse.Namespace) -> float:
    """The rollout's temperature. Raises ConfigError unless it is above 0."""
    value = float(args.rl_temperature)
    if not value > 0:
        raise ConfigError("--rl-temperature", value, "must be above 0")
    return value


def relay_from(args: argparse.Namespace) -> RelayEndpoint | None:
    """The relay of ``--rl-weight-relay``; None where there is none. Raises ConfigError."""
    text = args.rl_weight_relay
    if not text:
        return None
    try:
        if not text.lstrip().startswith("{"):
            text = Path(text).read_text(encoding="utf-8")
        data = parse_object(text)
    except (OSError, ValueError) as error:
        fix = f"must be a JSON object with a RelayEndpoint's fields, or a file that contains one ({error})"
        raise ConfigError("--rl-weight-relay", args.rl_weight_relay, fix) from error
    try:
        return RelayEndpoint.from_dict(data)
    except ConfigError as error:
        raise ConfigError(f"--rl-weight-relay: {error.field}", error.value, error.fix) from None


def flag_table() -> list[tuple[str, str, str]]:
    """(flag, default, meaning) of each flag, as ``--help`` says it: what the documentation shows."""
    parser = add_rl_args(argparse.ArgumentParser(add_help=False))
    rows = []
    for action in parser._actions:
        text, _, default = (action.help or "").rpartition(" (default: ")
        values = " ".join(action.choices) if action.choices else ""
        rows.append((action.option_strings[0], default.removesuffix(")"), f"{text}: {values}" if values else text))
    return rows


def _value_of(annotation: Any) -> tuple[Any, tuple[str, ...]]:
    """(type, choices) of a field that is a plain value, perhaps one of several, perhaps None."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return str, inner
    if origin in (typing.Annotated, typing.Union, types.UnionType):
        return _value_of(inner[0])
    return annotation, ()


class _Streaming(argparse.Action):
    """Sets the flag, and the ones of Megatron's that streaming needs where this parser has them."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **options)

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, True)
        for name in STREAM_NEEDS:
            if hasattr(namespace, name):
                setattr(namespace, name, True)


def _in_flags(text: str, names: dict[str, str]) -> str:
    """Settings that a message names, as flags; longer names first, because some are the beginning of others."""
    for setting in sorted(names, key=len, reverse=True):
        text = text.replace(setting, names[setting])
    return text
