"""``--rl-*`` for a Megatron training script: one argument group, and the records that the plugin makes of it.

Guarantees: not given, the flags change nothing: every other argument keeps its value, Megatron's own included. A wrong value
or a contradiction is one ConfigError that names the flag. No name is one of Megatron-Core 0.19.2's own ``--rl-*`` flags.
What Megatron has a flag for is read from Megatron's (``--lr``, ``--clip-grad``, ``--micro-batch-size``, the sizes of the
parallel groups), so nothing is said twice.

:func:`add_rl_args` is one of Megatron's ``extra_args_provider``: it takes a parser and returns it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from megatron_rlplugin.settings import TrainerSettings
from orchestrator.api import ConfigError
from orchestrator.policies.training.objective_table import DECAYS, KL_ESTIMATORS, LOSSES, OBJECTIVES, RATIOS, TIS_MODES
from orchestrator.transfer import RelayEndpoint

Provider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]
GROUP = "rl-coserve"
STREAM = "--rl-stream-training"
OWN = "the objective's own"
# What streaming needs of Megatron's own flags: raw sums go into the backward pass, and gradients are added up in fp32.
STREAM_NEEDS = ("calculate_per_token_loss", "accumulate_allreduce_grads_in_fp32")


@dataclass(frozen=True, slots=True)
class Flag:
    """One of ``TrainerSettings`` on the command line. ``kind`` None: a switch that needs no value. ``unset``: what a
    default of None means."""

    name: str
    field: str
    kind: type | None
    help: str
    choices: tuple[str, ...] = ()
    unset: str = ""

    @property
    def destination(self) -> str:
        """The attribute of the parsed namespace."""
        return self.name.removeprefix("--").replace("-", "_")


FLAGS = (
    Flag(STREAM, "stream", None, "take gradients trajectory by trajectory as they finish, then one synchronised step"),
    Flag("--rl-grad-offload", "grad_offload", None, "keep gradients in host memory between the parts of a stream"),
    Flag("--rl-objective", "objective", str, "what is optimised; see docs/megatron.md", tuple(OBJECTIVES)),
    Flag("--rl-loss", "loss", str, "how token losses become one number", LOSSES, OWN),
    Flag("--rl-clip-low", "clip_low", float, "importance ratio clipped at 1 - this", unset=OWN),
    Flag("--rl-clip-high", "clip_high", float, "importance ratio clipped at 1 + this", unset=OWN),
    Flag(
        "--rl-dual-clip",
        "dual_clip",
        float,
        "bound of the ratio where the advantage is negative; 3 is usual",
        unset="none",
    ),
    Flag("--rl-ratio-to", "ratio_to", str, "what the clip compares with: pi_old, or the rollout that sampled", RATIOS),
    Flag("--rl-kl-coefficient", "kl_coefficient", float, "weight of the KL to the weights that training began with"),
    Flag("--rl-kl-estimator", "kl_estimator", str, "estimator of that KL", KL_ESTIMATORS),
    Flag("--rl-kl-in-reward", "kl_in_reward", None, "subtract the KL from rewards per token, not add it to the loss"),
    Flag("--rl-gamma", "gamma", float, "discount per token (ppo, reinforce++)"),
    Flag("--rl-gae-lambda", "gae_lambda", float, "lambda of the advantage estimate (ppo)"),
    Flag("--rl-value-lr", "value_learning_rate", float, "learning rate of the critic (ppo)", unset="that of --lr"),
    Flag("--rl-value-clip", "value_clip", float, "clip range of the value loss (ppo)"),
    Flag("--rl-tis-cap", "tis_cap", float, "cap of the importance weight pi_trainer / pi_rollout of a token"),
    Flag("--rl-tis-floor", "tis_floor", float, "lower bound of that weight, with --rl-tis-mode mask"),
    Flag("--rl-tis-mode", "tis_mode", str, "tokens outside of the bounds: held at the cap, or left out", TIS_MODES),
    Flag(
        "--rl-max-token-lag", "max_token_lag", int, "weight versions; older tokens are not trained on", unset="all are"
    ),
    Flag("--rl-entropy-coefficient", "entropy_coefficient", float, "weight of the entropy bonus"),
    Flag("--rl-normalize-advantage", "normalize_advantage", bool, "divide advantages by their standard deviation"),
    Flag("--rl-minibatches", "minibatches", int, "optimizer steps a batch"),
    Flag("--rl-micro-batch-order", "micro_batch_order", str, "what goes into a micro-batch", ("length", "arrival")),
    Flag("--rl-pack-tokens", "pack_tokens", int, "tokens of a packed row, which needs a GPU", unset="padded rows"),
)
# TrainerSettings -> Megatron's own argument.
FROM_MEGATRON = {
    "learning_rate": "lr",
    "lr_warmup_steps": "lr_warmup_iters",
    "weight_decay": "weight_decay",
    "adam_beta1": "adam_beta1",
    "adam_beta2": "adam_beta2",
    "clip_grad": "clip_grad",
    "micro_batch_size": "micro_batch_size",
    "tensor_parallel": "tensor_model_parallel_size",
    "pipeline_parallel": "pipeline_model_parallel_size",
    "expert_parallel": "expert_model_parallel_size",
    "data_parallel": "data_parallel_size",
    "distributed_optimizer": "use_distributed_optimizer",
}


def add_rl_args(parser: argparse.ArgumentParser, then: Provider | None = None) -> argparse.ArgumentParser:
    """Add the group; ``then`` is a provider of your own that is called after it. Returns the parser."""
    group = parser.add_argument_group(GROUP, "reinforcement learning on recorded or arriving trajectories")
    defaults = {field.name: field.default for field in fields(TrainerSettings)}
    for flag in FLAGS:
        default = defaults[flag.field]
        assert default is not MISSING, flag.field
        options: dict[str, Any] = {"dest": flag.destination, "default": default}
        if flag.kind is None:
            options["action"] = _Streaming if flag.name == STREAM else "store_true"
            text = f"{flag.help} (default: off)"
        elif flag.kind is bool:
            options["action"] = argparse.BooleanOptionalAction
            text = f"{flag.help} (default: {'on' if default else 'off'})"
        else:
            options |= {"type": flag.kind, "choices": flag.choices or None}
            text = f"{flag.help} (default: {flag.unset if default is None else default})"
            if not flag.choices:
                options["metavar"] = "N" if flag.kind is int else "X"
        group.add_argument(flag.name, help=text, **options)
    group.add_argument(
        "--rl-weight-relay",
        metavar="JSON",
        help="where weights are published: the fields of a RelayEndpoint as JSON, or a file of it (default: nowhere)",
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
        help="the rollout's: log-probs are those of the sampling distribution (default: 1.0)",
    )
    return parser if then is None else then(parser)


def settings_from(args: argparse.Namespace) -> TrainerSettings:
    """The settings of a parsed command line. Raises ConfigError that names the flag."""
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    for flag in FLAGS:
        if not hasattr(args, flag.destination):
            raise ConfigError(flag.name, None, "is unknown to this parser: give it to add_rl_args before it parses")
        values[flag.field], names[f"trainer.{flag.field}"] = getattr(args, flag.destination), flag.name
    for field, source in FROM_MEGATRON.items():
        if getattr(args, source, None) is not None:
            values[field], names[f"trainer.{field}"] = getattr(args, source), f"--{source.replace('_', '-')}"
    if getattr(args, "lr_decay_style", "linear") != "constant" and getattr(args, "min_lr", None):
        values["final_learning_rate"], names["trainer.final_learning_rate"] = args.min_lr, "--min-lr"
        if getattr(args, "lr_decay_style", "") in DECAYS:
            values["lr_decay"], names["trainer.lr_decay"] = args.lr_decay_style, "--lr-decay-style"
    try:
        return TrainerSettings.from_dict(values)
    except ConfigError as error:
        if error.field not in names:
            raise
        raise ConfigError(names[error.field], error.value, _in_flags(error.fix, names)) from None


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
        data = json.loads(text)
    except (OSError, ValueError) as error:
        fix = f"must be a JSON object, or a file of one ({error})"
        raise ConfigError("--rl-weight-relay", args.rl_weight_relay, fix) from error
    if not isinstance(data, dict):
        raise ConfigError(
            "--rl-weight-relay", args.rl_weight_relay, "must be a JSON object with a RelayEndpoint's fields"
        )
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
