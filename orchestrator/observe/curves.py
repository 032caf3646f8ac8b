"""The curves of a run: what each is called, what it says, which record has it and how far down its axis reaches. The one table
of them, for all that shows a run."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.observe.event_records import Evaluation, Step


@dataclass(frozen=True)
class Quantity:
    """``about``: what it is, or what to look for. ``fields`` of ``record`` hold it, and its interval; none: a step's metrics do,
    under its name. ``floor``: the axis reaches down to this, None: as far as the values do."""

    title: str
    about: str
    floor: float | None = 0.0
    label: str = ""  # of the axis, unit included
    record: type[Step | Evaluation] = Step
    fields: tuple[str, ...] = ()

    def values(self, name: str, record: Step | Evaluation) -> list[float]:
        """The value, and what else the record has of it; empty where it has none."""
        if not isinstance(record, self.record):
            return []
        if self.fields:
            return [getattr(record, field) for field in self.fields]
        assert isinstance(record, Step)
        return [record.metrics[name]] if name in record.metrics else []


QUANTITIES = {
    "reward": Quantity("Training reward", "Mean reward of the last batch.", 0.0, "mean reward", Step, ("reward_mean",)),
    "success": Quantity(
        "Success on held-out prompts", "Success on held-out prompts, at the last evaluation.", 0.0,
        "success on held-out prompts (%)", Evaluation, ("value", "low", "high"),
    ),
    "loss": Quantity("Policy loss", "hovers around zero", None),
    "entropy": Quantity("Entropy", "falls slowly; a sudden fall is collapse"),
    "groups_silent_share": Quantity("Groups without variance", "all members the same reward: nothing to learn from"),
    "advantage_std": Quantity("Advantage, deviation", "over the tokens that are trained on"),
    "grad_norm": Quantity("Gradient norm", "before clipping"),
    "clip_fraction": Quantity("Clip fraction", "share of tokens whose gradient the clip removed"),
    "approx_kl": Quantity("Approximate KL", "of the update, against the policy before it"),
    "reference_kl": Quantity("KL to the reference", "how far it has gone from where RL began"),
    "tis_p01": Quantity("Trainer over rollout, 1st percentile", "ratio of a token's probabilities, before any cap", None),
    "tis_p99": Quantity("Trainer over rollout, 99th percentile", "far from 1: staleness, or engine and trainer differ", None),
    "tis_mean": Quantity("TIS weight, mean", "1 when rollout and trainer agree", None),
    "tis_max": Quantity("TIS weight, maximum", "held at the cap", None),
    "tis_capped": Quantity("TIS weights at a bound", "share of tokens held at the cap, or left out"),
    "ess": Quantity("Effective sample size", "share of the batch that counts after weighting"),
    "logprob_gap_mean": Quantity("Log-prob gap, mean", "rollout against trainer, same version"),
    "logprob_gap_max": Quantity("Log-prob gap, maximum", "the worst token"),
    "logprob_gap_own_experts": Quantity("Log-prob gap without replay", "by the experts that the trainer's routers choose"),
    "mtp_loss": Quantity("Loss of heads for several tokens", "cross-entropy of the policy's tokens, mean of the heads"),
    "routing_replayed": Quantity("Tokens with replayed experts", "share of those computed whose experts the rollout said", 1.0),
    "logprob_gap_all": Quantity("Log-prob distance", "rollout against trainer, staleness included"),
    "rollout_kl": Quantity("KL of rollout to trainer", "what TIS corrects"),
    "advantage_nonzero": Quantity("Trajectories with a signal", "share whose advantage is not zero"),
    "response_tokens_mean": Quantity("Response length, mean", "generated tokens of an episode"),
    "response_tokens_p95": Quantity("Response length, 95th percentile", "near the limit: answers are cut off"),
    "truncated_share": Quantity("Truncated", "share of episodes that ran into a limit"),
    "prompts_repeated": Quantity("Prompts asked before", "share of those drawn; if high, it may memorise them"),
    "learning_rate": Quantity("Learning rate", ""),
}  # fmt: skip
HEADLINES = tuple(name for name, quantity in QUANTITIES.items() if quantity.fields)
HEALTH = tuple(name for name in QUANTITIES if name not in HEADLINES)  # the trainer's own, in the order to look at
WEIGHTY = (  # of them, what a report shows at first sight
    "entropy", "groups_silent_share", "grad_norm", "clip_fraction", "logprob_gap_mean", "ess",
)  # fmt: skip
TOLD = (  # by the live views, of the last step
    "entropy", "groups_silent_share", "advantage_std", "grad_norm", "clip_fraction", "approx_kl", "reference_kl", "tis_p01",
    "tis_p99", "tis_capped", "logprob_gap_mean", "response_tokens_mean", "truncated_share", "prompts_repeated",
)  # fmt: skip
DRAWN = (*HEADLINES, "entropy")  # by the live views, over steps


def quantity_of(name: str) -> Quantity:
    """The row of a name; of one that only the trainer knows, its name."""
    return QUANTITIES.get(name) or Quantity(name, "", None)
