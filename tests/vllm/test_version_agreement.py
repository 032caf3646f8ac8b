"""An engine serves only when all its ranks hold one version, equal replicas, and together every element."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from vllm_rlplugin.weights.version_agreement import count_covered, find_disagreement

SHAPES = {"q": [8, 4], "norm": [4], "o": [4, 8]}


def reports() -> list[dict[str, Any]]:
    """Two ranks: ``q`` split by rows, ``o`` by columns, ``norm`` on both."""
    return [
        {
            "rank": rank,
            "world_size": 2,
            "version": 5,
            "checksum": "aa",
            "state": "intact",
            "error": "",
            "verified": {"slices": 3},
            "shapes": SHAPES,
            "slices": {
                "q": [[16 * rank, [4, 4], [4, 1], "float32", f"q{rank}"]],
                "o": [[4 * rank, [4, 4], [8, 1], "float32", f"o{rank}"]],
                "norm": [[0, [4], [1], "float32", "n"]],
            },
        }
        for rank in range(2)
    ]


def test_two_halves_agree_in_any_order() -> None:
    assert find_disagreement(reports()) is None
    assert find_disagreement(reports()[::-1]) is None


def change(rank: int, path: str, value: Any) -> list[dict[str, Any]]:
    changed = copy.deepcopy(reports())
    place: Any = changed[rank]
    *way, last = path.split(".")
    for name in way:
        place = place[name]
    place[last] = value
    return changed


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ([], "ranks"),
        (reports()[:1], "the engine has 2"),
        ([reports()[0], reports()[0]], "ranks"),
        (change(1, "version", 4), "version of their weights: 5 on 0, 4 on 1"),
        (change(1, "checksum", "bb"), "checksum"),
        (change(0, "shapes", {}), "shapes"),
        (change(1, "state", "unusable"), "rank 1"),
        (change(1, "slices.norm", [[0, [4], [1], "float32", "m"]]), "norm: digest n on rank 0, m on rank 1"),
        (change(1, "slices.q", []), "q: 16 of 32 elements"),
        (change(1, "slices.o", [[4, [4, 3], [8, 1], "float32", "o1"]]), "o: 4 of 32 elements"),
        (change(1, "slices.o", [[0, [4, 4], [8, 1], "float32", "o0"]]), "o: 16 of 32 elements"),
    ],
)
def test_what_is_not_one_whole_version_is_named(found: list[dict[str, Any]], text: str) -> None:
    assert text in str(find_disagreement(found))


def test_without_slices_only_versions_are_compared() -> None:
    found = change(0, "verified.slices", 0)
    assert find_disagreement(found) is None
    found[1]["version"] = 6
    assert "version" in str(find_disagreement(found))


@pytest.mark.parametrize(
    ("shape", "slices", "elements"),
    [
        ((), [(0, (), ())], 1),
        ((0, 3), [(0, (0, 3), (3, 1))], 0),
        ((4, 6), [(0, (24,), (1,))], 24),  # flattened
        ((4, 6), [(0, (6, 4), (1, 6))], 24),  # transposed
        ((4, 6), [(0, (2, 6), (6, 1)), (6, (2, 6), (6, 1))], 18),  # overlapping
        ((4, 6), [(7, (2, 2), (6, 1)), (9, (2, 2), (6, 1))], 8),  # side by side
        ((4, 1, 6), [(3, (4, 1, 3), (6, 6, 1))], 12),
        ((4, 6), [(4, (4,), (1,))], 4),  # across rows: counted one by one
        ((4, 6), [(4, (4,), (1,)), (0, (1, 6), (6, 1))], 8),
        ((3, 4, 5), [(20, (1, 4, 5), (20, 5, 1)), (5, (3, 2, 5), (20, 5, 1))], 40),
    ],
)
def test_covered_counts_every_element_once(shape: Any, slices: Any, elements: int) -> None:
    assert count_covered(shape, slices) == elements
