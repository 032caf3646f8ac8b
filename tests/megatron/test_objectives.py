"""CISPO, GSPO, sequence-level importance weights, OPSM, the length-normalised sum and distillation against formulas written apart
from the code in numpy, loss and gradient; a loss of the user's behind the same contract; a reference that moves."""

from __future__ import annotations

import asyncio
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron_rlplugin import parallel_layout  # noqa: E402
from megatron_rlplugin.objective.policy_loss import Coefficients, Tokens, objective_loss, policy_loss  # noqa: E402
from megatron_rlplugin.objective.user_loss import UserLoss, token_loss_of  # noqa: E402
from megatron_rlplugin.trainer.learner import check_trainer  # noqa: E402
from megatron_rlplugin.trainer.megatron_trainer import MegatronTrainer  # noqa: E402
from orchestrator.api import ConfigError, RunError  # noqa: E402
from orchestrator.settings.trainer_settings import TrainerSection, TrainerSettings  # noqa: E402
from scripts.bench.probes.megatron.trainer_probe import comparable, make_batch, tiny_folder, train, weights_digest  # noqa: E402
from tests.support.page_blocks import page_block  # noqa: E402

COUNTS, V = (5, 1, 9, 12, 3, 7), 6
T = sum(COUNTS)
FLOATS = np.float64
LOSSES = f"{__name__}:"


class Drawn:
    """Random tokens of a few trajectories, whose ratios lie on both sides of every bound."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.logits, self.targets = rng.normal(size=(T, V)), rng.integers(0, V, T)
        self.segments = np.repeat(np.arange(len(COUNTS)), COUNTS)
        shifted = self.logits - self.logits.max(-1, keepdims=True)
        self.p = np.exp(shifted) / np.exp(shifted).sum(-1, keepdims=True)
        self.logp = np.log(self.p[np.arange(T), self.targets])
        by_row = rng.normal(scale=0.4, size=len(COUNTS))[self.segments]
        self.old = self.logp + by_row + rng.normal(scale=0.7, size=T)
        self.rollout = self.old + by_row + rng.normal(scale=0.5, size=T)
        self.reference = self.logp + rng.normal(scale=0.6, size=T)
        self.advantages = rng.normal(size=len(COUNTS))[self.segments]

    def tokens(self, weights: np.ndarray) -> Tokens:
        names = ("rollout", "advantages", "old", "reference")
        values = {f"{name}_T": torch.tensor(getattr(self, name)) for name in names}
        return Tokens(
            targets_T=torch.tensor(self.targets),
            weights_T=torch.tensor(weights),
            fresh_T=torch.ones(T, dtype=torch.bool),
            denominator=T,
            segments_T=torch.tensor(self.segments),
            **values,
        )

    def over_rows(self, values: np.ndarray, *, mean: bool) -> np.ndarray:
        parts = [values[self.segments == row] for row in range(len(COUNTS))]
        return np.asarray([part.mean() if mean else part.sum() for part in parts])[self.segments]

    def gradient(self, by_logp: np.ndarray) -> np.ndarray:
        """Of the logits: by_logp (onehot - p)."""
        return by_logp[:, None] * (np.eye(V)[self.targets] - self.p)


def ppo(drawn: Drawn, advantages: np.ndarray, low: float = 0.2, high: float = 0.2) -> tuple[np.ndarray, np.ndarray]:
    """(the loss of each token, its derivative by log pi), Schulman et al. (2017) eq. 7."""
    ratio = np.exp(drawn.logp - drawn.old)
    clipped = np.clip(ratio, 1 - low, 1 + high)
    free = ratio * advantages <= clipped * advantages
    return -np.minimum(ratio * advantages, clipped * advantages), np.where(free, -ratio * advantages, 0.0)


def capped(drawn: Drawn, cap: float = 2.0) -> np.ndarray:
    return np.minimum(np.exp(drawn.old - drawn.rollout), cap)


def cispo(drawn: Drawn) -> tuple[np.ndarray, np.ndarray]:
    weight = np.minimum(np.exp(drawn.logp - drawn.old), 1.3) * drawn.advantages * capped(drawn)
    return -weight * drawn.logp, -weight


def gspo(drawn: Drawn) -> tuple[np.ndarray, np.ndarray]:
    """Zheng et al. (2025) eq. 5 in the token form of 4.3."""
    ratio = np.exp(drawn.over_rows(drawn.logp - drawn.old, mean=True))
    held = np.clip(ratio, 0.9, 1.1)
    free = ratio * drawn.advantages <= held * drawn.advantages
    by_logp = np.where(free, -ratio * drawn.advantages, 0.0)
    return -np.minimum(ratio * drawn.advantages, held * drawn.advantages) * capped(drawn), by_logp * capped(drawn)


def of_sequences(drawn: Drawn) -> tuple[np.ndarray, np.ndarray]:
    weight = np.minimum(np.exp(drawn.over_rows(drawn.old - drawn.rollout, mean=False)), 1.5)
    return tuple(value * weight for value in ppo(drawn, drawn.advantages))  # type: ignore[return-value]


def masked_geometric(drawn: Drawn) -> tuple[np.ndarray, np.ndarray]:
    ratio = np.exp(drawn.over_rows(drawn.old - drawn.rollout, mean=True))
    weight = np.where((ratio >= 0.8) & (ratio <= 1.4), ratio, 0.0)
    assert 0 < np.count_nonzero(weight) < T
    return tuple(value * weight for value in ppo(drawn, drawn.advantages))  # type: ignore[return-value]


def opsm(drawn: Drawn) -> tuple[np.ndarray, np.ndarray]:
    left = drawn.over_rows(drawn.rollout - drawn.logp, mean=True)
    keep = ~((drawn.advantages < 0) & (left > 0.1))
    return tuple(value * keep * capped(drawn) for value in ppo(drawn, drawn.advantages))  # type: ignore[return-value]


def distillation(drawn: Drawn) -> tuple[np.ndarray, np.ndarray]:
    return tuple(value * capped(drawn) for value in ppo(drawn, drawn.reference - drawn.old))  # type: ignore[return-value]


def length_normalized(drawn: Drawn) -> tuple[np.ndarray, np.ndarray]:
    return tuple(value * capped(drawn) / 40 for value in ppo(drawn, drawn.advantages))  # type: ignore[return-value]


CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "cispo": ({"objective": "cispo", "clip_high": 0.3}, cispo),
    "gspo": ({"objective": "gspo", "clip_low": 0.1, "clip_high": 0.1}, gspo),
    "importance of sequences, truncated": ({"tis_level": "sequence", "tis_cap": 1.5}, of_sequences),
    "importance of sequences, masked": (
        {"tis_level": "geometric", "tis_mode": "mask", "tis_floor": 0.8, "tis_cap": 1.4},
        masked_geometric,
    ),
    "opsm": ({"opsm_delta": 0.1}, opsm),
    "distillation": ({"objective": "distillation"}, distillation),
    "length-normalized": ({"loss": "length-normalized", "loss_length": 40}, length_normalized),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_the_formula(name: str, seed: int) -> None:
    given, formula = CASES[name]
    drawn = Drawn(seed)
    weights = np.random.default_rng(seed).uniform(0.1, 1.0, T)
    leaf = torch.tensor(drawn.logits, requires_grad=True)
    coefficients = Coefficients.from_settings(TrainerSettings.from_dict({"minibatches": 2, **given}))
    loss, _ = policy_loss(leaf, drawn.tokens(weights), coefficients)
    loss.backward()
    by_token, by_logp = formula(drawn)
    assert loss.item() == pytest.approx(float((by_token * weights).sum()), rel=1e-10)
    np.testing.assert_allclose(leaf.grad.numpy(), drawn.gradient(by_logp * weights), rtol=1e-9, atol=1e-12)


def test_opsm_leaves_out_what_pi_left_and_nothing_else() -> None:
    drawn = Drawn(1)
    _, said = objective_loss(
        torch.tensor(drawn.logp), drawn.tokens(np.ones(T)), Coefficients(0.2, 0.2, 2.0, 0.0, opsm_delta=0.1)
    )
    assert set(drawn.segments[said["tis"].numpy() == 0]) == {
        1
    }  # its advantage is negative; row 3 is further, and better


@pytest.mark.parametrize("name", CASES)
def test_parts_of_whole_trajectories_add_up(name: str) -> None:
    """What streaming and micro-batches need."""
    coefficients = Coefficients.from_settings(TrainerSettings.from_dict({"minibatches": 2, **CASES[name][0]}))
    drawn = Drawn(7)
    tokens, logits = drawn.tokens(np.ones(T)), torch.tensor(drawn.logits)
    whole, _ = policy_loss(logits, tokens, coefficients)
    parts = 0.0
    for rows in ((0, 1, 2), (3, 4, 5)):
        at = torch.tensor(np.flatnonzero(np.isin(drawn.segments, rows)))
        cut = {key: getattr(tokens, key)[at] for key in tokens.__dataclass_fields__ if key.endswith("_T")}
        cut["segments_T"] = cut["segments_T"] - rows[0]
        parts += float(policy_loss(logits[at], replace(tokens, **cut), coefficients)[0])
    assert parts == pytest.approx(float(whole), rel=1e-12)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"loss": "length-normalized"}, "trainer.loss_length"),
        ({"loss_length": 5}, "trainer.loss_length"),
        ({"loss": "median"}, "trainer.loss"),
        ({"objective": "gspo", "loss": "a:b"}, "trainer.loss"),
        ({"tis_level": "sequence", "ratio_to": "rollout"}, "trainer.tis_level"),
        ({"opsm_delta": -1.0}, "trainer.opsm_delta"),
        ({"objective": "reinforce++", "normalize_advantage": False}, "trainer.normalize_advantage"),
        ({"objective": "rloo", "normalize_advantage": False}, "trainer.normalize_advantage"),
        ({"objective": "cispo", "dual_clip": 3.0, "minibatches": 2}, "trainer.dual_clip"),
        ({"objective": "distillation"}, "trainer.reference_path"),
        ({"reference_update_every": 3}, "trainer.reference_update_every"),
        ({"reference_path": "x", "reference_update_every": 3, "kl_coefficient": 0.1}, "trainer.reference_update_every"),
    ],
)
def test_what_contradicts_itself_is_refused_by_name(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        TrainerSection.from_dict(given)
    assert refused.value.field == field


# -- a loss of the user's --------------------------------------------------------------------------------------------


def as_ours(logp_T: Any, tokens: Tokens, coefficients: Coefficients) -> Any:
    return objective_loss(logp_T, tokens, coefficients)


def reinforce(logp_T: Any, tokens: Tokens, coefficients: Coefficients) -> Any:
    return -tokens.advantages_T * logp_T, {"logp": logp_T, "paid": (tokens.advantages_T > 0).float()}


def not_a_number(logp_T: Any, tokens: Tokens, coefficients: Coefficients) -> Any:
    return logp_T * float("nan"), {}


def one_number(logp_T: Any, tokens: Tokens, coefficients: Coefficients) -> Any:
    return logp_T.mean(), {}


def no_gradient(logp_T: Any, tokens: Tokens, coefficients: Coefficients) -> Any:
    return logp_T.detach(), {}


def no_metrics(logp_T: Any, tokens: Tokens, coefficients: Coefficients) -> Any:
    return logp_T


def raises(logp_T: Any, tokens: Tokens, coefficients: Coefficients) -> Any:
    raise KeyError("mine")


def of_the_whole_micro_batch(logp_T: Any, tokens: Tokens, coefficients: Coefficients) -> Any:
    return -(tokens.advantages_T - tokens.advantages_T.mean()) * logp_T, {}


def wrong_later(logp_T: Any, tokens: Tokens, coefficients: Coefficients) -> Any:
    return logp_T * (1.0 if len(logp_T) < 6 else float("nan")), {}


def to_the_reference(logp_T: Any, tokens: Tokens, coefficients: Coefficients) -> Any:
    return (logp_T - tokens.reference_T) ** 2, {}


def to_the_old(logp_T: Any, tokens: Tokens, coefficients: Coefficients) -> Any:
    return -(logp_T - tokens.old_T).exp() * tokens.advantages_T, {}


def raises_later(logp_T: Any, tokens: Tokens, coefficients: Coefficients) -> Any:
    return logp_T * (1.0 if len(logp_T) < 6 else {}["mine"]), {}


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("not_a_number", r"tried with 5 tokens: the loss of 5 of 5 tokens is not finite"),
        ("one_number", r"the loss must have one number for each of 5 tokens, but is \(\)"),
        ("no_gradient", "has no gradient"),
        ("no_metrics", "must return"),
        ("raises", "raised KeyError: 'mine'"),
        ("to_the_reference", r"tokens.reference_T is None unless trainer.kl_coefficient is above 0"),
        ("absent", "has no function 'absent'; write module:function"),
        ("T", "is not a function"),
    ],
)
def test_a_loss_that_breaks_the_contract_is_one_error_before_anything_starts(function: str, why: str) -> None:
    settings = TrainerSection.from_dict({"loss": LOSSES + function})
    with pytest.raises(ConfigError, match=why) as refused:
        check_trainer("", settings, "float32")
    assert refused.value.field == "trainer.loss"


def test_a_stream_refuses_a_loss_that_looks_at_the_micro_batch() -> None:
    mixing = {"loss": LOSSES + "of_the_whole_micro_batch"}
    UserLoss(TrainerSettings.from_dict(mixing))
    with pytest.raises(ConfigError, match="depends on the others in its micro-batch"):
        UserLoss(TrainerSettings.from_dict({**mixing, "stream": True}))
    UserLoss(TrainerSettings.from_dict({"loss": LOSSES + "reinforce", "stream": True}))


def test_a_loss_that_goes_wrong_later_names_itself() -> None:
    loss = token_loss_of(TrainerSettings.from_dict({"loss": LOSSES + "wrong_later"}))
    drawn = Drawn()
    tokens, coefficients = drawn.tokens(np.ones(T)), Coefficients(0.2, 0.2, 2.0, 0.0)
    with pytest.raises(RunError, match=r"trainer.loss = '.*wrong_later': the loss of 37 of 37 tokens is not finite"):
        policy_loss(torch.tensor(drawn.logits, requires_grad=True), tokens, coefficients, function=loss)


def test_a_loss_that_raises_in_a_step_names_itself() -> None:
    loss = token_loss_of(TrainerSettings.from_dict({"loss": LOSSES + "raises_later"}))
    tokens, coefficients = Drawn().tokens(np.ones(T)), Coefficients(0.2, 0.2, 2.0, 0.0)
    with pytest.raises(RunError, match=r"trainer.loss = '.*raises_later': raised KeyError: 'mine'"):
        loss(torch.zeros(T, requires_grad=True), tokens, coefficients)


def test_a_module_of_a_loss_that_cannot_be_imported_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text, why in (("unended", "def f(x", "SyntaxError"), ("unlicensed", "raise RuntimeError('no')", "no")):
        (tmp_path / f"{name}.py").write_text(text)
        with pytest.raises(ConfigError, match=rf"trainer.loss = '{name}:f': {name} cannot be imported: .*{why}"):
            check_trainer("", TrainerSection.from_dict({"loss": f"{name}:f"}), "float32")


def test_with_one_mini_batch_a_loss_gets_the_log_probs_themselves_as_the_old_ones() -> None:
    loss = token_loss_of(TrainerSettings.from_dict({"loss": LOSSES + "to_the_old"}))
    tokens, logp_T = (
        replace(Drawn().tokens(np.ones(T)), old_T=None),
        torch.zeros(T, dtype=torch.float64, requires_grad=True),
    )
    loss_T, _ = loss(logp_T, tokens, Coefficients(0.2, 0.2, 2.0, 0.0))
    assert torch.equal(loss_T, -tokens.advantages_T)
    (gradient_T,) = torch.autograd.grad(loss_T.sum(), logp_T)
    assert torch.equal(gradient_T, -tokens.advantages_T)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    parallel_layout.initialize_parallel()
    yield tiny_folder(tmp_path_factory.mktemp("model"))
    parallel_layout.shutdown_parallel()


def make_trainer(folder: str, **settings: Any) -> MegatronTrainer:
    return MegatronTrainer(model=folder, settings={"learning_rate": 1e-2, **settings}, total_steps=30, seed=3)


@pytest.mark.engine
def test_a_trainer_takes_the_users_loss_and_reports_what_it_says(folder: str) -> None:
    ours, theirs = make_trainer(folder), make_trainer(folder, loss=LOSSES + "as_ours")
    for step in range(2):
        batch = make_batch(step)
        assert comparable(train(ours, batch)) == comparable(train(theirs, batch))
    assert weights_digest(ours._learner) == weights_digest(theirs._learner)
    other = make_trainer(folder, loss=LOSSES + "reinforce", stream=True, micro_batch_size=4)
    values = train(other, make_batch(0), [2, 1]).values
    assert values["loss_logp"] < 0
    assert 0 < values["loss_paid"] < 1
    assert values["updates"] == 1
    assert weights_digest(other._learner) != weights_digest(ours._learner)


@pytest.mark.engine
def test_the_loss_of_the_page_is_trained_by_the_config_of_the_page(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = "docs/megatron.md"
    config = tomllib.loads(page_block(page, "my_losses:clipped", "toml"))
    config["trainer"] |= tomllib.loads(page_block(page, "my_losses:centred", "toml"))["trainer"]
    (tmp_path / "my_losses.py").write_text(page_block(page, "def clipped(") + page_block(page, "def centred("))
    monkeypatch.syspath_prepend(str(tmp_path))
    for stream in (False, True):
        trainer = make_trainer(folder, **config["trainer"], stream=stream, micro_batch_size=4)
        before = weights_digest(trainer._learner)
        values = train(trainer, make_batch(0), [2, 1] if stream else ()).values
        assert values["loss_ratio"] == pytest.approx(1.0)  # one step per batch: pi is pi_old
        assert weights_digest(trainer._learner) != before
    sys.modules.pop("my_losses")


@pytest.mark.engine
def test_the_reference_moves_with_the_weights_or_is_a_teacher(folder: str, tmp_path: Path) -> None:
    moving = make_trainer(folder, kl_coefficient=0.1, reference_update_every=2)
    began = [value.clone() for value in moving._experience.reference or ()]

    def same(values: Any) -> bool:
        pairs = zip(moving._experience.reference or (), values, strict=True)
        return all(torch.equal(mine.cpu(), other.cpu()) for mine, other in pairs)

    train(moving, make_batch(0))
    assert same(began)
    train(moving, make_batch(1))
    assert not same(began)
    assert same([parameter.detach() for parameter in moving._learner.parameters()])
    asyncio.run(moving.export(str(tmp_path / "teacher")))
    given = {"objective": "distillation", "reference_path": str(tmp_path / "teacher"), "reference_samples": 8}
    student = make_trainer(folder, **given)
    assert same(student._experience.reference)
    before = weights_digest(make_trainer(folder)._learner)
    assert weights_digest(student._learner) == before  # the teacher's weights did not stay
    first = train(student, make_batch(0)).values
    assert first["reference_kl"] > 0
    assert first["grad_norm"] > 0
    assert "advantage_std" not in first, (
        "its advantages are made in the loss, and a 0 would say that nothing is learned"
    )
    assert weights_digest(student._learner) != before
    with pytest.raises(ConfigError, match=r"trainer.reference_path = .*has hidden_size = 16, the model"):
        make_trainer(folder, **{**given, "reference_path": tiny_folder(tmp_path / "other", hidden_size=16)})
