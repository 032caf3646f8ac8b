"""What a language model is told of recorded trajectories, and the bench of it as an encoder, with a model of nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.api import ConfigError
from orchestrator.policies.prediction.length_features import TAIL_TOKENS, TrajectoryProgress
from orchestrator.policies.prediction.length_predictor import LengthOutcome
from scripts.bench.papers import encoder_prediction as bench
from scripts.bench.papers.length_sets import Case
from tests.support.tiny_judge import write_judge


def case(prompt: int, said: tuple[int, ...] = (2, 1)) -> Case:
    rows = (
        TrajectoryProgress(f"t{prompt}", "made-up", f"{prompt}", (0, 1), (0, 1) * 40, (2,), said[:turn], ())
        for turn in range(len(said))
    )
    return Case(f"{prompt}", 0, LengthOutcome(tuple(rows), said, True))


def test_words_are_told_as_text_and_a_models_own_ids_as_they_are() -> None:
    outcome = case(0, (2, 1, 1, 5)).outcome
    told = bench.read_as_text(outcome, {0: "go", 1: "up"}, lambda text: [ord(one) for one in text])
    assert "".join(map(chr, told.before[0].prompt_ids)) == "go up"
    assert "".join(map(chr, told.before[0].tail_ids)) == ("go up " * 40)[:-1][-TAIL_TOKENS:]
    assert (len(told.before), told.said) == (3, outcome.said), "the boundaries that are judged, and all that came"
    assert bench.read_as_text(outcome, None, lambda text: []).before == outcome.before[:3]


def test_no_fold_learns_the_prompts_that_it_is_judged_by() -> None:
    rows = [(one, one) for prompt in range(13) for one in (case(prompt), case(prompt))]
    folds = bench._by_prompts(rows)
    assert sorted(one[0].prompt for asked, _ in folds for one in asked) == sorted(one.prompt for one, _ in rows)
    for asked, taught in folds:
        assert not {one[0].prompt for one in asked} & {one[0].prompt for one in taught}
        assert len(asked) + len(taught) == len(rows)
    drawn = [one.prompt for one, _ in bench._drawn([*rows, *rows], 6, 1)]
    assert sorted(drawn) == sorted([*set(drawn)] * 2), "two of each prompt"
    assert len(set(drawn)) == 3
    with pytest.raises(ConfigError, match="name the Hugging Face folder"):
        bench.run(True, "n")


@pytest.mark.engine
@pytest.mark.long
def test_the_whole_of_it_with_a_model_of_nothing(tmp_path: Path) -> None:
    found = bench.run(True, "n", write_judge(tmp_path / "model"))
    assert {"frozenlake", "household", "problems", "puzzles", "chores"} <= set(found["detail"]["judged"])
    assert found["holds"] is None
    assert found["reference_value"] == 4 * len(found["detail"]["judged"])
    assert 0 <= found["value"] <= found["reference_value"]
