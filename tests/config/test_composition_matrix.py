"""Every pair of features (docs/composition.md): it is played in the simulator and passes the checks of a real run, or is
refused in one sentence by both; the page says the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import composition
from scripts.composition import FEATURES, PAGE, Feature, Tree, Verdict, refusal_beside, tables, verdicts, written

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
# What only one of the two takes, knowingly; everything else is the same in both.
ONLY_REAL = {
    ("prefill and decode apart", "borrowed servers"),
    ("prefill and decode apart", "exchanged servers"),
}


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str], Verdict]:
    return verdicts()


def test_each_feature_works_alone_and_each_pair_works_or_is_refused_in_one_sentence(
    found: dict[tuple[str, str], Verdict],
) -> None:
    for (one, other), verdict in found.items():
        assert verdict.works or one != other, verdict
        for refusal in filter(None, (verdict.real, verdict.simulated)):
            assert refusal.count("\n") <= 1, (one, other, refusal)
            assert ": " in refusal


def test_real_runs_and_the_simulator_refuse_the_same(found: dict[tuple[str, str], Verdict]) -> None:
    differ = {names for names, verdict in found.items() if bool(verdict.real) != bool(verdict.simulated)}
    assert differ == ONLY_REAL


def test_the_page_is_what_the_code_says(found: dict[tuple[str, str], Verdict]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == written(page, tables(found)), "python scripts/composition.py --write"


def test_every_test_and_figure_that_a_feature_names_is_there() -> None:
    for one in FEATURES:
        assert "mark.engine" in (ROOT / one.test).read_text(encoding="utf-8"), f"{one.name}: with real engines"
        assert not one.pays or (ROOT / "docs" / "results" / f"{one.pays}.json").is_file(), one
    assert len({one.name for one in FEATURES}) == len(FEATURES)


@pytest.mark.parametrize(("feature", "words", "key", "given"), [(one, *row) for one in FEATURES for row in one.refuses])
def test_what_the_page_says_a_feature_refuses_is_refused(feature: Feature, words: str, key: str, given: Tree) -> None:
    assert refusal_beside(feature, given).startswith(f"{key} = "), f"{feature.name}: {words}"


def test_a_pair_that_is_no_longer_refused_changes_the_page(found: dict[tuple[str, str], Verdict]) -> None:
    refused = next(names for names, verdict in found.items() if not verdict.works)
    assert tables({**found, refused: Verdict("", "")}) != composition.tables(found)
