"""A loss of the user's (``trainer.loss = "module:function"``), behind the contract of ours.

The function gets (log-probs of the policy's tokens ``[T]``, :class:`~megatron_rlplugin.objective.policy_loss.Tokens`,
:class:`~megatron_rlplugin.objective.policy_loss.Coefficients`) and returns (the loss of each token ``[T]``, a dictionary of what
is reported: name -> a number for each token, of which the step reports the mean). Advantages are those of ``trainer.objective``,
and so are weights and denominators; KL and entropy bonus are added to what it returns. Tokens of a micro-batch are those of whole
trajectories (``tokens.segments_T`` says whose each is); ``tokens.old_T`` is always there, with one mini-batch the log-probs
themselves, ``tokens.reference_T`` where the settings need a reference. Tensor-parallel ranks each call it, with the same numbers.

Guarantees: before anything starts it is called with made-up tokens; what is not of the contract is one ConfigError that names
the function, and so is, with a stream, a loss of one trajectory that depends on the others in its micro-batch: which these are is
known only when they have arrived. Of finite log-probs it must make finite losses, in every step: else RunError, as where it
raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from megatron_rlplugin.objective.policy_loss import Coefficients, TokenLossFunction, Tokens, Totals, objective_loss
from orchestrator.api import ConfigError, RunError
from orchestrator.settings.trainer_settings import TrainerSettings
from orchestrator.settings.user_functions import load_named

FIELD = "trainer.loss"
_COUNTS = (3, 2)  # tokens of the trajectories that it is tried with


class UserLoss:
    """Of ``settings.loss``, tried. ``metrics``: the names that it reports, sorted."""

    def __init__(self, settings: TrainerSettings) -> None:
        self.target = settings.loss_function
        self._function: Any = load_named(FIELD, self.target, "function", "; write module:function")
        if not callable(self._function):
            raise ConfigError(FIELD, self.target, "is not a function; write module:function")
        self.metrics: tuple[str, ...] = ()
        self._try(settings, Coefficients.from_settings(settings))

    def __call__(
        self, logp_T: Tensor, tokens: Tokens, coefficients: Coefficients
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """See :data:`~megatron_rlplugin.objective.policy_loss.TokenLossFunction`. Raises RunError."""
        known = tokens if tokens.old_T is not None else replace(tokens, old_T=logp_T.detach())
        try:
            loss_T, said = self._function(logp_T, known, coefficients)
        except torch.OutOfMemoryError:  # of the device's memory, which others fill too
            raise
        except Exception as error:  # whatever a user's function raises, it is named
            raise RunError(f"{FIELD} = {self.target!r}: raised {type(error).__name__}: {error}") from error
        if wrong := _mistake(logp_T, loss_T, said) or (
            "" if tuple(sorted(said)) == self.metrics else "reports other names"
        ):
            raise RunError(f"{FIELD} = {self.target!r}: {wrong}")
        return loss_T, said

    def reported(self, totals: Totals) -> dict[str, float]:
        """The means over the tokens of a step, as ``loss_NAME``."""
        names = [name for name in self.metrics if name not in ("clipped", "tis")]
        sums = totals.own or (0.0,) * len(names)
        return {f"loss_{name}": value / max(totals.tokens, 1.0) for name, value in zip(names, sums, strict=True)}

    def _try(self, settings: TrainerSettings, coefficients: Coefficients) -> None:
        tokens, logp_T = _made_up()
        if not settings.needs_reference:  # as in the run
            tokens = replace(tokens, reference_T=None)
        try:
            answer = self._function(logp_T, tokens, coefficients)
        except Exception as error:  # whatever a user's function raises, it is the config's mistake
            why = f"raised {type(error).__name__}: {error}"
            if tokens.reference_T is None and "None" in why:
                why += "; tokens.reference_T is None unless trainer.kl_coefficient is above 0"
            raise self._refused(why) from error
        if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Mapping)):
            raise self._refused("must return (the loss of each token, a dictionary of what is reported)")
        loss_T, said = answer
        if wrong := _mistake(logp_T, loss_T, said):
            raise self._refused(wrong)
        if not loss_T.requires_grad:
            raise self._refused("gives a loss that does not depend on the log-probs: it has no gradient")
        self.metrics = tuple(sorted(said))
        apart = [
            self._function(logp_T[part], _part(tokens, part), coefficients)[0]
            for part in (slice(0, _COUNTS[0]), slice(_COUNTS[0], None))
        ]
        if settings.stream and not torch.allclose(torch.cat(apart), loss_T, rtol=1e-5, atol=1e-7):
            raise self._refused(
                "the loss of a trajectory depends on the others in its micro-batch, so a stream would train another one: "
                "trainer.stream = false, or a loss of each trajectory alone"
            )

    def _refused(self, why: str) -> ConfigError:
        return ConfigError(FIELD, self.target, f"tried with {sum(_COUNTS)} tokens: {why}")


def token_loss_of(settings: TrainerSettings) -> TokenLossFunction:
    """What makes the token losses of these settings. Raises ConfigError."""
    return UserLoss(settings) if settings.loss_function else objective_loss


def _mistake(logp_T: Tensor, loss_T: Any, said: Mapping[str, Any]) -> str:
    """What is not of the contract; "": nothing."""
    values = {"the loss": loss_T, **{f"{name!r}": value for name, value in said.items()}}
    for name, value in values.items():
        if not isinstance(value, Tensor) or value.shape != logp_T.shape:
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            return f"{name} must have one number for each of {len(logp_T)} tokens, but is {found}"
    if not loss_T.is_floating_point():
        return f"the loss must be of floating-point numbers, not {loss_T.dtype}"
    lost = int((~loss_T.isfinite() & logp_T.isfinite()).sum())
    return f"the loss of {lost} of {len(logp_T)} tokens is not finite, and their log-probs are" if lost else ""


def _made_up() -> tuple[Tokens, Tensor]:
    generator = torch.Generator().manual_seed(0)
    count = sum(_COUNTS)

    def numbers() -> Tensor:
        return -2.0 * torch.rand(count, generator=generator) - 0.1

    rollout_T, old_T, reference_T, logp_T = numbers(), numbers(), numbers(), numbers()
    tokens = Tokens(
        targets_T=torch.arange(count),
        rollout_T=rollout_T,
        advantages_T=torch.tensor([1.0, -0.5]).repeat_interleave(torch.tensor(_COUNTS)),
        weights_T=torch.ones(count),
        fresh_T=torch.ones(count, dtype=torch.bool),
        old_T=old_T,
        denominator=count,
        segments_T=torch.tensor([0, 1]).repeat_interleave(torch.tensor(_COUNTS)),
        reference_T=reference_T,
    )
    return tokens, logp_T.requires_grad_()


def _part(tokens: Tokens, part: slice) -> Tokens:
    cut = {item.name: getattr(tokens, item.name) for item in fields(tokens)}
    cut = {name: value[part] for name, value in cut.items() if isinstance(value, Tensor)}
    cut["segments_T"] = cut["segments_T"] - cut["segments_T"][0]
    return replace(tokens, **cut)
